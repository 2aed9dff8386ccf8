"""Megatron-core's distributed checkpoint, ``torch_dist``, of megatron-core ≤ 0.18; newer versions read it too.

::

    metadata.json     {"sharded_backend": "torch_dist", …}
    common.pt         iteration, args, schedulers …: every object but those below
    .metadata         as in torch's distributed checkpoint, without planner data
    __R_0.distcp      chunks, and objects in cells:   rng_state/shard_0.1_1.2
                                                      decoder.layers.3.mlp.linear_fc1._extra_state/shard_0_1

Every layer stays a separate tensor, which Megatron loads if ``content_metadata`` states ``non_homogeneous_layers``,
as recorded here. Megatron's own extra state, the plans of the ranks (``all_local_plans``), is a cache and left out.

Source: megatron-core 0.16.1 ``core/dist_checkpointing/strategies/torch.py``, ``mapping.py`` (``ShardedObject``),
``core/transformer/transformer_block.py`` (``sharded_state_dict``), ``training/checkpointing.py``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.core.pickles.standins import Record
from workbench.core.words import plural
from workbench.export.filemap import FileMap
from workbench.export.selection import ExportSelection
from workbench.export.writers.dcp_items import lay_out
from workbench.export.writers.dcp_metadata import metadata
from workbench.export.writers.flatten import FlatLeaf, archive
from workbench.export.writers.plain import plain_objects
from workbench.formats.megatron import layout

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
COMMON_STEP = "optimizer.optimizer.state.common_step"
_MEGATRON = re.compile(
    r"(?:chained_\d+\.)?optimizer\.(?:distributed|optimizer|state\.(?:exp_avg|exp_avg_sq|param|fp32_param))\."
    r"|(?:embedding|decoder|encoder|output_layer|mtp)\."
)
_CELL = re.compile(r"\d+(?:\.\d+)*")


def torch_dist_files(selection: ExportSelection) -> list[FileMap]:
    """Return the files of tensors and all of ``selection.objects``; with objects, also the plain values of ``args``.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load; names the tensor.
        UsageError: two tensors or objects of one name.
    """
    common, cells = _parted(selection.objects)
    if _common_step(common):  # Megatron keeps it there, and nowhere else
        selection = _without(selection, COMMON_STEP)
    items = lay_out(selection, [FlatLeaf(key, (key,), [value]) for key, value in cells.items()])
    return [
        *items.maps,
        FileMap.of_bytes(".metadata", metadata(items.chunks, items.blobs, None, selection.names), selection.dims),
        FileMap.of_bytes("common.pt", archive(_completed(selection, common)), selection.dims),
        FileMap.of_bytes("metadata.json", json.dumps(BACKENDS).encode(), selection.dims),
    ]


def torch_dist_notes(selection: ExportSelection) -> list[str]:
    """List what remains to be done before Megatron can load the export."""
    step = selection.ckpt.step or 0
    notes = [
        f"Megatron expects this folder to be SAVE/iter_{step:07d}, and "
        f"SAVE/latest_checkpointed_iteration.txt to contain {step}"
    ]
    args = _args(selection)
    if args is not None:
        notes.append(f"only the {plural(len(vars(args)), 'arg')} with plain values are written")
    strange = [name for name in selection.names if not _MEGATRON.match(name)]
    if strange:
        notes.append(
            f"{len(strange):,} of {len(selection):,} names are not Megatron's, for example {strange[0]!r}: Megatron "
            "finds tensors only under its own names, with fused weights"
        )
    norms = [name for name in selection.names if ".input_layernorm." in name]
    if norms and selection.ckpt.format != "megatron_dist":  # there they are the names of the run's own layers
        notes.append(
            f"{len(norms):,} names have input_layernorm, for example {norms[0]!r}: Megatron's GPT layers look for "
            "self_attention.linear_qkv.layer_norm_…; rename them if a load reports those keys as missing"
        )
    return notes


def _parted(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the objects into those of the common state, and those in cells by their keys."""
    common: dict[str, Any] = {}
    cells: dict[str, Any] = {}
    for name, value in objects.items():
        extra = name.endswith("._extra_state")
        grid = _grid(value) if extra or name == "rng_state" else None
        if grid is not None:  # ranks, or the experts of a layer's extra state
            of = ".".join(str(1 + max(at)) for at in zip(*(map(int, cell.split(".")) for cell in grid), strict=True))
            cells |= {f"{name}/shard_{cell}_{of}": one for cell, one in grid.items()}
        elif extra:
            cells[f"{name}/shard_0_1"] = value
        else:
            common[name] = value
    return common, cells


def _grid(value: Any) -> Mapping[str, Any] | None:
    """Return cells by position, ``0.1``, as the reader shows objects that each rank of a grid stores."""
    if not isinstance(value, dict) or not value:
        return None
    cells = [key for key in value if isinstance(key, str) and _CELL.fullmatch(key)]
    return value if len(cells) == len(value) and len({cell.count(".") for cell in cells}) == 1 else None


def _completed(selection: ExportSelection, common: dict[str, Any]) -> dict[str, Any]:
    """Return the common state with what Megatron requires, consistent with how the tensors are stored."""
    made = {"checkpoint_version": 3.0, "iteration": selection.ckpt.step or 0} | common
    args = _args(selection)
    if args is not None:
        made["args"] = args
    content = dict(made["content_metadata"]) if isinstance(made.get("content_metadata"), dict) else {}
    if any(layout.layer_of(name) is not None for name in selection.names):
        content["non_homogeneous_layers"] = True
    if any(name.startswith("optimizer.state.param.") for name in selection.names):  # per parameter, no buckets
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        if isinstance(made.get("optimizer"), dict):
            made["optimizer"] = made["optimizer"] | {"param_state_sharding_type": "fully_reshardable"}
    return made | {"content_metadata": content}


def _common_step(common: Mapping[str, Any]) -> bool:
    node: Any = {"optimizer": common.get("optimizer")}
    for name in COMMON_STEP.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node is not None


def _without(selection: ExportSelection, name: str) -> ExportSelection:
    keep = np.array([one != name for one in selection.names], bool)
    names = [one for one in selection.names if one != name]
    return replace(selection, tensors=selection.tensors[keep], names=names, codes=selection.codes[keep])


def _args(selection: ExportSelection) -> argparse.Namespace | None:
    """Return the plain values among the ``args`` if other state is exported too."""
    objects = selection.ckpt.objects
    if not selection.objects or "args" in selection.objects or "args" not in objects:
        return None
    stored = objects["args"]
    if not isinstance(stored, Record):
        return None
    fields = {key: one for key, one in stored.fields.items() if isinstance(key, str)}
    return argparse.Namespace(**plain_objects(fields, list(fields), tensors=False)[0])
