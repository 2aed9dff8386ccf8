"""ByteCheckpoint's layout: a part for the model and one for the optimizer, raw bytes, and each rank's extra state.

::

    model/.metadata  model/__0_0.distcp …          │ tensor │ tensor │ …         no header, no alignment
    optimizer/.metadata  optimizer/__0_0.distcp …  │ param_groups │ tensor │ …
    extra_state/extra_state_rank_0.pt …            every other object, the same for each rank

The metadata is DCP's with the package's own classes, and beside each chunk's place a pickle of a tensor without
bytes, by which it is read. The step is the name of the folder around it all, ``global_step_3``. Extra states are
pickled by protocol 2: the package writes protocol 4, which its own loading refuses from torch 2.6 on.

Source: bytecheckpoint 0.0.2 ``checkpointer/meta_type.py``, ``utilities/serialization.py`` (``_serialize_tensor``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.core.dtypes import ALL
from workbench.errors import UnsupportedFormatError
from workbench.export.filemap import FileMap
from workbench.export.moving.pieces import chunk_pieces
from workbench.export.selection import ExportSelection
from workbench.export.writers.bytecheckpoint_names import NamedPart, named, param_groups
from workbench.export.writers.dcp_items import Blob, Chunk, check_names, rows
from workbench.export.writers.dcp_metadata import Paths, storage_data, tensor_metadata
from workbench.export.writers.flatten import archive
from workbench.export.writers.pickle_tree import Global, Instance, Pairs
from workbench.export.writers.pickled import dumps
from workbench.export.writers.tensor_archive import tensor_pickle

VERSION = "0.0.2"
GROUPS = "param_groups"
_MODULE = "bytecheckpoint.checkpointer.meta_type"
_EXTRA = re.compile(r"extra_state_rank_(\d{1,9})")
_SOURCE_LOG = "save_log"  #: the reader's object on how the source was saved


def bytecheckpoint_files(selection: ExportSelection) -> list[FileMap]:
    """Return the files, in folders of their parts.

    They include all of ``selection.objects``, except for a log of the source's save. Tensors that are neither a
    parameter's nor the optimizer's go to the model part, under their names: an extra state has no place for them.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load; names the tensor.
        UsageError: two tensors of one name.
    """
    groups, rest = param_groups(selection.objects)
    places = named(selection)
    maps: list[FileMap] = []
    for part in ("model", "optimizer"):
        mine = [at for at, place in enumerate(places) if place.part == part]
        objects = {GROUPS: groups} if part == "optimizer" and groups is not None else {}
        if mine or objects:
            maps += _part(selection, part, mine, [places[at] for at in mine], objects)
    return [*maps, *_extra(selection, rest)]


def _part(
    selection: ExportSelection, part: str, mine: Sequence[int], places: Sequence[NamedPart], objects: Mapping[str, Any]
) -> list[FileMap]:
    names = [place.key for place in places]
    check_names([*names, *objects])
    index = np.array(mine, np.int64)
    inner = replace(selection, tensors=selection.tensors[index], names=names, codes=selection.codes[index])
    maps, chunks, blobs = _data(inner, part, objects)
    paths = {place.key: place.path for place in places} | {name: (name,) for name in objects}
    return [*maps, FileMap.of_bytes(f"{part}/.metadata", _metadata(chunks, blobs, paths, names), selection.dims)]


def _data(
    selection: ExportSelection, part: str, objects: Mapping[str, Any]
) -> tuple[list[FileMap], list[Chunk], list[Blob]]:
    """Return one file per rank, with objects at the beginning of the first, and the chunks and blobs in them."""
    maps, chunks, blobs = [], [], []
    for rank, mine in enumerate(chunk_pieces(selection)):
        file, at = f"__{rank}_0.distcp", 0
        heads = []
        for name, value in objects.items() if not rank else ():
            data = archive(value)
            heads.append((at, data))
            blobs.append(Blob(name, file, at, len(data)))
            at += len(data)
        lengths = mine.pieces.nbytes
        starts = at + np.cumsum(lengths) - lengths
        maps.append(FileMap(f"{part}/{file}", at + int(lengths.sum()), tuple(heads), mine.pieces, starts))
        chunks += rows(selection, mine, mine.pieces, [], file, starts, lengths)
    return maps, chunks, blobs


def _metadata(chunks: Sequence[Chunk], blobs: Sequence[Blob], paths: Paths, order: Sequence[str]) -> bytes:
    places = storage_data(chunks, blobs, Global(_MODULE, "_StorageInfo"))
    inner: dict[tuple[int, tuple[int, ...]], bytes] = {}
    for one in chunks:
        if (one.code, one.sizes) not in inner:
            try:
                inner[one.code, one.sizes] = tensor_pickle(ALL[one.code], one.sizes)
            except UnsupportedFormatError as error:
                raise UnsupportedFormatError(f"tensor {one.key!r}: {error}") from None
    layouts = [*(None for _ in blobs), *(inner[one.code, one.sizes] for one in chunks)]
    state = {
        "state_dict_metadata": tensor_metadata(chunks, blobs, order),
        "planner_data": dict(paths),
        "storage_data": places,
        "all_tensor_metadata": Pairs([(key, layout) for (key, _), layout in zip(places.items, layouts, strict=True)]),
        "bytecheckpoint_version": VERSION,
        "user_defined_dict": {},
    }
    return dumps(Instance(Global(_MODULE, "Metadata"), state))


def _extra(selection: ExportSelection, objects: Mapping[str, Any]) -> list[FileMap]:
    """Return the extra states: those of the source's ranks unchanged, other objects in the states of all ranks."""
    given = {int(match[1]): value for name, value in objects.items() if (match := _EXTRA.fullmatch(name))}
    rest = {name: one for name, one in objects.items() if not _EXTRA.fullmatch(name) and name != _SOURCE_LOG}
    ranks = sorted({*given, *(range(selection.mesh.world_size) if rest else ())})
    return [
        FileMap.of_bytes(
            f"extra_state/extra_state_rank_{rank}.pt", archive(_joined(given.get(rank, {}), rest)), selection.dims
        )
        for rank in ranks
    ]


def _joined(state: Any, rest: Mapping[str, Any]) -> Any:
    if not rest:
        return state
    return {**(state if isinstance(state, dict) else {"extra_state": state}), **rest}
