"""One file per rank: the local tensors of a mesh, under their global names.

::

    model-rank-00000-of-00002.safetensors     "gate_up": local tensor of tp 0, (4, h)
    model-rank-00001-of-00002.safetensors     "gate_up": local tensor of tp 1, (4, h)

    __metadata__ of a file    "rank" "world_size" "mesh": "tp=2"
                              "workbench.boxes": {"gate_up": {"shape": [8, h], "boxes": [[[0, 0], [2, h], [0, 0]],
                                                 offsets in the global tensor, sizes, ┘   [[4, 0], [2, h], [2, 0]]]}}
                                                 offsets in the local tensor
                              "DCP_SHARDING_INFO": {"norm": {"saved_offsets": [0]}}

With the boxes, :mod:`workbench.formats.safetensors.reader` opens the folder as one checkpoint of global tensors.
torch's ``HuggingFaceStorageReader`` merges such files by ``DCP_SHARDING_INFO``; it supports one box per file, so it
is written only if every local tensor is one box.

Files of torch.save have no place for this: each is a separate checkpoint, for the rank in its name.

Source: torch 2.13 ``torch/distributed/checkpoint/hf_storage.py``, ``_hf_utils.py`` (``CUSTOM_METADATA_KEY``,
``SAVED_OFFSETS_KEY``).
"""

from __future__ import annotations

import json
from typing import Any

from workbench.core.mesh.cut import Locals
from workbench.export.filemap import FileMap, Pieces
from workbench.export.moving.pieces import rank_pieces
from workbench.export.selection import ExportSelection
from workbench.export.writers.safetensors import one_file
from workbench.export.writers.torch import torch_file


def safetensors_ranks(selection: ExportSelection) -> list[FileMap]:
    """Return a safetensors file for each rank of the selection's mesh. Raises as :func:`one_file` and
    :func:`rank_pieces`.
    """
    ranks = rank_pieces(selection)
    single = all(bool((found.ptr[1:] - found.ptr[:-1] <= 1).all()) for _, found in ranks)
    return [
        one_file(pieces, _name(selection, rank, "safetensors"), metadata=_facts(selection, rank, pieces, found, single))
        for rank, (pieces, found) in enumerate(ranks)
    ]


def torch_ranks(selection: ExportSelection) -> list[FileMap]:
    """Return a torch.save of a flat dict for each rank. Raises as :func:`torch_file` and :func:`rank_pieces`."""
    return [
        torch_file(pieces, _name(selection, rank, "pt"), objects=selection.objects)
        for rank, (pieces, _) in enumerate(rank_pieces(selection))
    ]


def _name(selection: ExportSelection, rank: int, suffix: str) -> str:
    return f"model-rank-{rank:05d}-of-{selection.mesh.world_size:05d}.{suffix}"


def _facts(selection: ExportSelection, rank: int, pieces: Pieces, found: Locals, single: bool) -> dict[str, str]:
    facts = {"rank": str(rank), "world_size": str(selection.mesh.world_size), "mesh": str(selection.mesh)}
    boxes = {name: _boxes(selection, pieces, found, at) for at, name in enumerate(pieces.names)}
    if single:
        offsets = {
            name: {"saved_offsets": one["boxes"][0][0] if one["boxes"] else [0] * len(one["shape"])}
            for name, one in boxes.items()
        }
        facts["DCP_SHARDING_INFO"] = json.dumps(offsets, separators=(",", ":"))
    return facts | {"workbench.boxes": json.dumps(boxes, separators=(",", ":"))}


def _boxes(selection: ExportSelection, pieces: Pieces, found: Locals, at: int) -> dict[str, Any]:
    """Return the global shape of a local tensor, and its boxes: global offsets, sizes, local offsets."""
    shape = selection.shape_of(int(found.tensor[at]))
    rows = slice(int(found.ptr[at]), int(found.ptr[at + 1]))
    columns = (found.offsets[rows], found.sizes[rows], pieces.dest[rows])
    boxes = zip(*(column[:, : len(shape)].tolist() for column in columns), strict=True)
    return {"shape": list(shape), "boxes": [list(box) for box in boxes]}
