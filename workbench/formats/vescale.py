"""veScale's legacy checkpoints (``vescale.checkpoint``, 2024); the new veScale writes plain DCP.

::

    ckpt/
      model/           .metadata  __0_0.distcp …      DCP of all ranks together
      optimizer/pp_0/  .metadata  __0_0.distcp …      DCP of one pipeline stage; __<rank within its group>_<k>
      optimizer/pp_1/  …

    optimizer keys     torch.float32.(0, 'layers.0.w.weight').exp_avg       buffer's dtype, (model chunk, name), state
                       torch.float32.(0, 'layers.0.w.weight').shard_casted_float16_groups     the fp32 master weight
                       param_group_meta                                     the optimizer's param_groups
                       state.0.exp_avg                                      without the distributed optimizer

Pieces of the distributed optimizer's flat buffers that are not boxes are gathered on one rank before they are written.
So every stored chunk is a box and every item a ``torch.save`` archive, as in DCP; only the class of ``storage_data`` is
veScale's own. Keys are the stored ones with the prefix ``model.`` or ``optimizer.``. A key that several stages store is
kept separate as ``optimizer.pp_R.…``, without an fqn, as its parameter is not stored. Step, world size and mesh are not
stored; the number of stages is that of the folders.

Read from veScale's ``legacy/vescale`` (``checkpoint/api/vescale_checkpointer.py``, ``optim/distributed_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench import formats
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.objects import archive_objects
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import IncompleteError, NotACheckpointError, WorkbenchError
from workbench.formats import Format
from workbench.formats.layered import parts
from workbench.names.roles import STATES, resolve

MODEL, OPTIMIZER, METADATA = "model", "optimizer", ".metadata"
MARK = b"vescale.checkpoint"  #: module of the class in storage_data
SEARCHED = 8 << 20  #: bytes searched at a time
MASTER = "shard_casted_float16_groups"
UNKNOWN = ["dp", "tp", "cp", "ep"]
_STAGE = re.compile(r"pp_(\d{1,6})")
_DATA = re.compile(r"__\d+_\d+\.distcp")
_STATE = re.compile(r"torch\.\w+\.(?:\((\d+), (['\"])(.+)\2\)|(.+))\.([^.]+)", re.DOTALL)
NAMED = 8  #: maximum stages in a message


def detect(place: Place) -> bool:
    """Return whether the folder has optimizers by pipeline stage, or a model whose metadata names veScale's class."""
    if place.file is not None or METADATA in place.files:
        return False
    if _stages(place):
        return True
    return MODEL in place.folders and place.exists(f"{MODEL}/{METADATA}") and _names_vescale(place)


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of the model and of every stage's optimizer.

    Raises:
        IncompleteError: a part has no metadata (the save was interrupted), or a stage is missing, which is named.
        CorruptError, UnsafeError: as in DCP.
    """
    notes: list[str] = []
    stages = _stages(place)
    absent = sorted(set(range(max(stages, default=-1) + 1)) - stages.keys())
    if absent:
        raise IncompleteError(
            f"{place.path!r}: the optimizer of pipeline stages {absent[:NAMED]} is missing "
            f"({OPTIMIZER}/pp_{absent[0]}; found stages {sorted(stages)[:NAMED]}); restore it, or open one folder alone"
        )
    parts: list[tuple[str, str, Catalog]] = []
    if MODEL in place.folders and _has_data(place.sub(MODEL)):
        parts.append((f"{MODEL}.", MODEL, _part(place, MODEL, notes)))
    else:
        notes.append("the folder holds no model, only an optimizer")
    if not parts and not stages:
        raise NotACheckpointError(f"{place.path!r} has neither a {MODEL}/ nor an {OPTIMIZER}/pp_R/ folder with data")
    found = {stage: _part(place, f"{OPTIMIZER}/{name}", notes) for stage, name in stages.items()}
    keys = [key for catalog in found.values() for key in (*catalog.keys, *catalog.objects.keys)]
    shared = {key for key, count in Counter(keys).items() if count > 1}
    for stage, catalog in found.items():
        parts.append(
            (f"{OPTIMIZER}.", f"{OPTIMIZER}/{stages[stage]}", _named_by_stage(catalog, stage, shared, len(found)))
        )
    tensors = {key for catalog in found.values() for key in catalog.keys} & shared
    if tensors:
        notes.append(
            f"{plural(len(tensors), 'optimizer tensor', 'are')} stored by several stages, first {min(tensors)!r}; they "
            "are kept separate, because their parameters are not stored"
        )
    merged = merge("vescale", parts, {})
    fqns, roles = _named(merged)
    notes += _numbered(merged, fqns)
    facts = {"step": None, "notes": notes, "mesh": _mesh(stages)}
    return replace(merged, fqns=fqns, roles=roles, meta=facts)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return bytes items, such as ``optimizer.param_group_meta``, decoded on access."""
    return archive_objects(place, catalog)


# ---- folders and files ---------------------------------------------------------------------------------------------


def _stages(place: Place) -> dict[int, str]:
    """Return the optimizer's folders by pipeline stage, in order."""
    if OPTIMIZER not in place.folders:
        return {}
    inner = place.sub(OPTIMIZER)
    found = {int(match[1]): name for name in inner.folders if (match := _STAGE.fullmatch(name))}
    return {stage: found[stage] for stage in sorted(found) if _has_data(inner.sub(found[stage]))}


def _has_data(place: Place) -> bool:
    return any(name.startswith(METADATA) or _DATA.fullmatch(name) for name in place.files)


def _names_vescale(place: Place) -> bool:
    """Return whether the class is named anywhere. It comes after all tensors, so the file is searched."""
    try:
        window = place.window(f"{MODEL}/{METADATA}")
        # parts overlap, as the name may span two of them
        parts = (bytes(window[at : at + SEARCHED + len(MARK)]) for at in range(0, len(window), SEARCHED))
        return any(MARK in part for part in parts)
    except (WorkbenchError, OSError):  # not our file, or no permission
        return False


def _part(place: Place, folder: str, notes: list[str]) -> Catalog:
    catalog = formats.reader("dcp").read_catalog(place.sub(folder))
    notes += [f"{folder!r}: {note}" for note in catalog.meta.get("notes", [])]
    return catalog


def _named_by_stage(catalog: Catalog, stage: int, shared: set[str], stages: int) -> Catalog:
    """Put keys that other stages have too under the stage's name; with several stages, ranks are group ranks."""

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
    fqns, roles = resolve(merged.keys, {"paths": paths})
    params = {fqn for fqn, key in zip(fqns, merged.keys, strict=True) if key in paths}
    matches = [None if key in paths else _STATE.fullmatch(key.removeprefix(f"{OPTIMIZER}.")) for key in merged.keys]
    # a name in two model chunks of a stage is not global
    chunks: dict[str, set[str | None]] = {}
    for match in matches:
        if match:
            chunks.setdefault(match[3] or match[4], set()).add(match[1])
    for position, match in enumerate(matches):
        if match:
            name, state = match[3] or match[4], match[5]
            certain = len(chunks[name]) == 1 and (not params or name in params)
            fqns[position] = name if certain else None
            roles[position] = "master" if state == MASTER else STATES.get(state, "other")
        elif merged.keys[position].startswith(f"{OPTIMIZER}.pp_"):  # kept separate: its parameter is not stored
            fqns[position], roles[position] = None, _role(merged.keys[position])
    return fqns, roles


def _role(key: str) -> str:
    leaf = key.rpartition(".")[2]
    return "master" if leaf == MASTER else STATES.get(leaf, "other")


def _numbered(merged: Catalog, fqns: Sequence[str | None]) -> list[str]:
    """Return a note on optimizer state with unknown parameters."""
    lost = {
        key.rpartition(".")[0]
        for key, fqn in zip(merged.keys, fqns, strict=True)
        if fqn is None and key.startswith(f"{OPTIMIZER}.")
    }
    if not lost:
        return []
    return [f"the parameters of {len(lost)} optimizer states are not certain, first that of {min(lost)!r}"]


FORMAT = Format(
    name="vescale",
    title="veScale (legacy)",
    marks="model/, optimizer/pp_R/",
    read_from="veScale 2024, legacy/vescale",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=parts.missing,
    subfolders=("*",),
    own_bytes=True,
)
