"""veScale's legacy checkpoints (``vescale.checkpoint``, 2024); the new veScale writes plain DCP, which dcp.py reads.

::

    ckpt/
      model/           .metadata  __0_0.distcp …      DCP of all ranks together
      optimizer/pp_0/  .metadata  __0_0.distcp …      DCP of one pipeline stage; __<rank within its group>_<k>
      optimizer/pp_1/  …

    optimizer keys     torch.float32.(0, 'layers.0.w.weight').exp_avg       buffer's dtype, (model chunk, name), state
                       torch.float32.(0, 'layers.0.w.weight').shard_casted_float16_groups     the fp32 master weight
                       param_group_meta                                     the optimizer's param_groups
                       state.0.exp_avg                                      without the distributed optimizer

Pieces of the distributed optimizer's flat buffers that are no boxes are gathered on one rank before they are
written: every stored chunk is a box and every item a ``torch.save`` archive, as in DCP; only the class of
``storage_data`` is veScale's own. Keys are the stored ones after ``model.`` or ``optimizer.``; one that several stages
store is kept apart as ``optimizer.pp_R.…``, without an fqn: whose parameter it is, is not written. No step, world size
or mesh is stored; the number of stages is that of the folders.

Read from veScale's ``legacy/vescale`` (``checkpoint/api/vescale_checkpointer.py``, ``optim/distributed_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench import formats, naming
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.objects import archive_objects
from workbench.core.place import Place
from workbench.errors import IncompleteError, NotACheckpointError, WorkbenchError

__all__ = ["detect", "read_catalog", "read_objects"]

MODEL, OPTIMIZER, METADATA = "model", "optimizer", ".metadata"
MARK = b"vescale.checkpoint"  #: module of the class in storage_data
SEARCHED = 8 << 20  #: bytes searched at a time
MASTER = "shard_casted_float16_groups"
UNKNOWN = ["dp", "tp", "cp", "ep"]
_STAGE = re.compile(r"pp_(\d{1,6})")
_DATA = re.compile(r"__\d+_\d+\.distcp")
_STATE = re.compile(r"torch\.\w+\.(?:\((\d+), (['\"])(.+)\2\)|(.+))\.([^.]+)", re.DOTALL)
NAMED = 8  #: stages that a message names


def detect(place: Place) -> bool:
    """Whether the folder has an optimizer by pipeline stage, or a model whose metadata names veScale's class."""
    if place.file is not None or METADATA in place.files:
        return False
    if _stages(place):
        return True
    return MODEL in place.folders and place.exists(f"{MODEL}/{METADATA}") and _names_vescale(place)


def read_catalog(place: Place) -> Catalog:
    """Columns of the model and of every stage's optimizer.

    Raises:
        IncompleteError: a part without metadata (the save was interrupted), or a stage that is missing; names it.
        CorruptError, UnsafeError: as DCP's.
    """
    notes: list[str] = []
    stages = _stages(place)
    absent = sorted(set(range(max(stages, default=-1) + 1)) - stages.keys())
    if absent:
        raise IncompleteError(
            f"{place.path!r}: the optimizer of pipeline stages {absent[:NAMED]} is missing "
            f"({OPTIMIZER}/pp_{absent[0]}; found are {sorted(stages)[:NAMED]}); restore it, or open one folder alone"
        )
    parts: list[tuple[str, str, Catalog]] = []
    if MODEL in place.folders and _has_data(place.sub(MODEL)):
        parts.append((f"{MODEL}.", MODEL, _part(place, MODEL, notes)))
    else:
        notes.append("no model is in the folder, only an optimizer")
    if not parts and not stages:
        raise NotACheckpointError(f"{place.path!r} has neither a {MODEL}/ nor an {OPTIMIZER}/pp_R/ folder with data")
    found = {stage: _part(place, f"{OPTIMIZER}/{name}", notes) for stage, name in stages.items()}
    keys = [key for catalog in found.values() for key in (*catalog.keys, *catalog.objects.keys)]
    shared = {key for key, count in Counter(keys).items() if count > 1}
    for stage, catalog in found.items():
        parts.append((f"{OPTIMIZER}.", f"{OPTIMIZER}/{stages[stage]}", _apart(catalog, stage, shared, len(found))))
    tensors = {key for catalog in found.values() for key in catalog.keys} & shared
    if tensors:
        notes.append(
            f"{len(tensors)} optimizer tensors are stored by several stages, first {min(tensors)!r}; they are kept "
            "apart: whose they are is not written"
        )
    merged = merge("vescale", parts, {})
    fqns, roles = _named(merged)
    notes += _numbered(merged, fqns)
    facts = {"step": None, "notes": notes, "mesh": _mesh(stages)}
    return replace(merged, fqns=fqns, roles=roles, meta=facts)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Bytes items, such as ``optimizer.param_group_meta``, decoded on access."""
    return archive_objects(place, catalog)


# ---- what is there -------------------------------------------------------------------------------------------------


def _stages(place: Place) -> dict[int, str]:
    """Folders of the optimizer by pipeline stage, in order."""
    if OPTIMIZER not in place.folders:
        return {}
    inner = place.sub(OPTIMIZER)
    found = {int(match[1]): name for name in inner.folders if (match := _STAGE.fullmatch(name))}
    return {stage: found[stage] for stage in sorted(found) if _has_data(inner.sub(found[stage]))}


def _has_data(place: Place) -> bool:
    return any(name.startswith(METADATA) or _DATA.fullmatch(name) for name in place.files)


def _names_vescale(place: Place) -> bool:
    """Whether the class is named anywhere: it comes after all tensors, so that the file is searched."""
    try:
        window = place.window(f"{MODEL}/{METADATA}")
        # a part ends with the first bytes of the next: the name may lie across
        parts = (bytes(window[at : at + SEARCHED + len(MARK)]) for at in range(0, len(window), SEARCHED))
        return any(MARK in part for part in parts)
    except (WorkbenchError, OSError):  # a stranger's file, or no permission: not for us to judge
        return False


def _part(place: Place, folder: str, notes: list[str]) -> Catalog:
    catalog = formats.reader("dcp").read_catalog(place.sub(folder))
    notes += [f"{folder!r}: {note}" for note in catalog.meta.get("notes", [])]
    return catalog


def _apart(catalog: Catalog, stage: int, shared: set[str], stages: int) -> Catalog:
    """The keys that other stages have too, under the stage's name; of several stages, ranks are those of a group."""

    def own(key: str) -> str:
        return f"pp_{stage}.{key}" if key in shared else key

    objects = replace(catalog.objects, keys=[own(key) for key in catalog.objects.keys])
    rank = catalog.rank if stages == 1 else np.full(catalog.chunks, -1, np.int32)
    return replace(catalog, keys=[own(key) for key in catalog.keys], objects=objects, rank=rank)


def _mesh(stages: Mapping[int, str]) -> dict[str, Any]:
    return {
        "axes": {"pp": len(stages)} if stages else {},
        "ranks": {f"{OPTIMIZER}/{name}": {"pp": stage} for stage, name in stages.items()},
        "unknown": UNKNOWN if stages else ["pp", *UNKNOWN],
        "source": f"folders {OPTIMIZER}/pp_R",
    }


# ---- names ---------------------------------------------------------------------------------------------------------


def _named(merged: Catalog) -> tuple[list[str | None], list[str]]:
    paths = {key: (MODEL, key.removeprefix("model.")) for key in merged.keys if key.startswith("model.")}
    fqns, roles = naming.resolve(merged.keys, {"paths": paths})
    params = {fqn for fqn, key in zip(fqns, merged.keys, strict=True) if key in paths}
    matches = [None if key in paths else _STATE.fullmatch(key.removeprefix(f"{OPTIMIZER}.")) for key in merged.keys]
    # a name that two model chunks of a stage have is not global
    chunks: dict[str, set[str | None]] = {}
    for match in matches:
        if match:
            chunks.setdefault(match[3] or match[4], set()).add(match[1])
    for position, match in enumerate(matches):
        if match:
            name, state = match[3] or match[4], match[5]
            certain = len(chunks[name]) == 1 and (not params or name in params)
            fqns[position] = name if certain else None
            roles[position] = "master" if state == MASTER else naming.STATES.get(state, "other")
        elif merged.keys[position].startswith(f"{OPTIMIZER}.pp_"):  # kept apart: whose it is, is not written
            fqns[position], roles[position] = None, _role(merged.keys[position])
    return fqns, roles


def _role(key: str) -> str:
    leaf = key.rpartition(".")[2]
    return "master" if leaf == MASTER else naming.STATES.get(leaf, "other")


def _numbered(merged: Catalog, fqns: Sequence[str | None]) -> list[str]:
    """A note on optimizer state whose parameter is not known."""
    lost = {
        key.rpartition(".")[0]
        for key, fqn in zip(merged.keys, fqns, strict=True)
        if fqn is None and key.startswith(f"{OPTIMIZER}.")
    }
    if not lost:
        return []
    return [f"the parameters of {len(lost)} states of the optimizer are not certain, first of {min(lost)!r}"]
