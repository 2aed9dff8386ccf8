"""ByteCheckpoint (``bytecheckpoint.save``), read from 0.0.2 and 0.0.3: FSDP, FSDP2 and DDP.

::

    run/
      latest_checkpointed_iteration.txt     "3", written last
      log_rank0.txt                         its log lines, where somebody kept them (bytecheckpoint_log.py)
      global_step_3/                        or nothing in between, without global_steps=
        model/      .metadata  __0_0.distcp  __1_0.distcp …      __<rank>_<k>; a file may have 0 bytes
        optimizer/  .metadata  __0_0.distcp …
        extra_state/extra_state_rank_0.pt …                      torch.save, any object

    __0_0.distcp   │ bytes item (torch.save) │ tensor │ tensor │ …      raw bytes, no header, no alignment, no checksum

Keys are the parts' names with the part before them: ``model.<fqn>``, ``optimizer.state.<fqn>.exp_avg``. FSDP1's
decomposed flat parameters are un-flattened; the flat tensors stay reachable by key as views (bytecheckpoint_flat.py).
DDP numbers its optimizer state: the numbers are joined to names only where `naming.join_param_groups` is certain.
Metadata is decoded in bytecheckpoint_metadata.py.

The format stores no step, world size, mesh, checksum or time. The step is the folder's name; ranks are those of file
names, and only as "written by".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workbench import formats, naming
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.objects import archive_objects, decode_archive
from workbench.core.place import Place
from workbench.errors import IncompleteError, NotACheckpointError, OpenError, WorkbenchError
from workbench.formats import bytecheckpoint_flat as flatten
from workbench.formats import bytecheckpoint_log as log
from workbench.formats.bytecheckpoint_part import METADATA, NAMED, Part, ranks_of, read_part

__all__ = ["detect", "read_catalog", "read_objects"]

PARTS = ("model", "optimizer")
EXTRA = "extra_state"
MARK = b"bytecheckpoint."  #: the module of the pickle's first global, in its first bytes
AXES = ["dp", "tp", "pp", "cp", "ep"]
_EXTRA = re.compile(r"extra_state_rank_(\d{1,9})\.pt")
_STEP = re.compile(r"global_step_(\d{1,18})")
_NUMBERED = re.compile(r"optimizer\.state\.(\d{1,18})\.([^.]+)")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf")
LOGS_TRIED = 4  #: files whose beginnings must show a line of ByteCheckpoint's for the others to be read


def detect(place: Place) -> bool:
    """Whether the folder holds a part of ByteCheckpoint's, or its parts as folders, committed or not."""
    if place.file is not None:
        return False
    if METADATA in place.files:
        return _is_ours(place, METADATA)
    found = [part for part in PARTS if part in place.folders]
    if any(_is_ours(place, f"{part}/{METADATA}") for part in found):
        return True
    interrupted = [part for part in found if not place.exists(f"{part}/{METADATA}") and ranks_of(place.sub(part))]
    return bool(interrupted) and (EXTRA in place.folders or _STEP.fullmatch(place.name) is not None)


def read_catalog(place: Place) -> Catalog:
    """Columns of the parts that are there.

    Raises:
        IncompleteError: a part without metadata: the save was interrupted. NotACheckpointError: no part at all.
        CorruptError: metadata that contradicts itself, or parts of different saves.
        UnsafeError: metadata that names a file outside the folder.
    """
    if METADATA in place.files:
        return _join(place, [read_part(place, place, _alone(place), "")])
    _check_committed(place)
    found = [part for part in PARTS if place.exists(f"{part}/{METADATA}")]
    if not found:
        raise NotACheckpointError(
            f"{place.path!r} has neither model/{METADATA} nor optimizer/{METADATA}; of a run, "
            "open one global_step_N folder"
        )
    return _join(place, [read_part(place, place.sub(part), part, part) for part in found])


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Bytes items (``optimizer.param_groups``), ``extra_state_rank_R`` of every rank, and ``save_log``."""
    stored = archive_objects(place, catalog)
    makers: dict[str, Any] = {key: partial(stored.__getitem__, key) for key in stored}
    if EXTRA in place.folders:
        for _, name in _extra_files(place):
            makers[name.removesuffix(".pt")] = partial(_extra, place, f"{EXTRA}/{name}")
    if logs := _logs(place):
        makers["save_log"] = partial(log.read, logs)
    return LazyMap(makers)


# ---- what is there -------------------------------------------------------------------------------------------------


def _is_ours(place: Place, name: str) -> bool:
    try:
        size = place.stat(name).size
        return MARK in place.read(name, length=min(size, 256))
    except WorkbenchError:  # not there, or not for us to judge
        return False


def _alone(place: Place) -> str:
    """Which part a folder is that was opened by itself."""
    return place.name if place.name in PARTS else ""


def _extra_files(place: Place) -> list[tuple[int, str]]:
    return sorted((int(m[1]), m[0]) for name in place.sub(EXTRA).files if (m := _EXTRA.fullmatch(name)))


def _check_committed(place: Place) -> None:
    for part in PARTS:
        if part not in place.folders or place.exists(f"{part}/{METADATA}"):
            continue
        inner = place.sub(part)
        if not ranks_of(inner) and ".metadata.tmp" not in inner.files:
            continue
        leftover = " (a half-written .metadata.tmp is there)" if ".metadata.tmp" in inner.files else ""
        others = [other for other in PARTS if other != part and place.exists(f"{other}/{METADATA}")]
        hint = f", or open its {others[0]!r} folder alone" if others else ""
        raise IncompleteError(
            f"{place.path!r}: part {part!r} has .distcp files but no .metadata{leftover}: the save was interrupted "
            f"before its commit; use an earlier step{hint}"
        )


def _logs(place: Place) -> list[tuple[Place, list[str]]]:
    """Log files of ByteCheckpoint's in the checkpoint's folder, and in the one above it (a step's run)."""
    found = [(place, log.find(place))]
    try:
        above = Place(os.path.dirname(place.root))
        found.append((above, log.find(above)))
    except OpenError:  # no permission to list the folder above: there are no logs for us
        pass
    return [(where, names) for where, names in found if any(log.is_one(where, name) for name in names[:LOGS_TRIED])]


def _extra(place: Place, name: str) -> Any:
    return decode_archive(np.frombuffer(place.read(name), np.uint8), what=repr(name))


# ---- the whole -----------------------------------------------------------------------------------------------------


def _join(place: Place, parts: list[Part]) -> Catalog:
    """One catalog of all parts, with names."""
    notes = [note for part in parts for note in part.catalog.meta["notes"]]
    flats: dict[str, flatten.Flat] = {}
    for part in parts:
        if part.user:
            flats |= flatten.tables(part.user, f"part {part.name or 'model'!r}")
    made = [_unflat(place, part, flats, notes) for part in parts]
    facts: dict[str, Any] = {"step": None, "notes": notes, "mesh": _mesh(place, parts, notes)}
    merged = merge("bytecheckpoint", [(_prefix(p), p.folder, p.catalog) for p in made], facts)
    fqns, roles = naming.resolve(merged.keys, {"paths": _paths(made)})
    views = merged.views
    if views is not None:  # flat tensors hold many parameters: they belong to none
        views = replace(views, fqns=[None] * len(views), roles=["other"] * len(views))
    merged = replace(merged, fqns=fqns, roles=roles, views=views)
    notes += _join_numbers(place, merged, fqns, roles)
    notes += _strangers(merged, fqns, roles)
    notes += _channels_last(merged)
    versions = {part.name or "part": part.version for part in parts if part.version is not None}
    if len(set(versions.values())) > 1:
        notes.append(f"the parts were written by different versions: {versions}")
    facts |= {
        "step": _step(place, notes),
        "bytecheckpoint_version": next(iter(versions.values()), None),
        "flat_parameters": [
            {"key": flat.key, "numel": flat.numel, "padding": flat.padding, "parameters": len(flat.names)}
            for flat in flats.values()
        ],
    }
    return replace(merged, meta=facts)


def _channels_last(merged: Catalog) -> list[str]:
    """DDP saves are written in the order of memory and labelled contiguous: nothing tells a channels_last tensor."""
    if not any(".module." in f".{key}" for key in merged.keys):
        return []
    inner = merged.shape[:, 2:].prod(axis=1)
    doubtful = np.flatnonzero((merged.ndim >= 4) & (merged.shape[:, 1] > 1) & (inner > 1))
    if not len(doubtful):
        return []
    return [
        f"{len(doubtful):,} tensors of 4 or more axes of a DDP save, such as {merged.keys[doubtful[0]]!r}: if the "
        "model was in channels_last memory format, ByteCheckpoint stored their elements in another order, and "
        "nothing shows it"
    ]


def _prefix(part: Part) -> str:
    return f"{part.folder}." if part.folder else ""


def _paths(parts: list[Part]) -> dict[str, tuple[Any, ...]]:
    """The path of each key of the whole, with the part as the outermost container."""
    found: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        head = part.name or ("optimizer" if any(key.startswith("state.") for key in part.catalog.keys) else "model")
        for key in part.catalog.keys:
            path = part.paths.get(key)
            found[_prefix(part) + key] = (head, *path) if isinstance(path, tuple) and path else (head, key)
    return found


def _unflat(place: Place, part: Part, flats: Mapping[str, flatten.Flat], notes: list[str]) -> Part:
    where = f"{part.name!r}: " if part.name else ""
    inner = place.sub(part.folder) if part.folder else place
    state = any(key.startswith("state.") for key in part.catalog.keys) if not part.name else part.name == "optimizer"
    found = flatten.unflatten(inner, part.catalog, flats, state=state)
    left = [key for key in found.catalog.keys if flatten.FLAT in key and not key.endswith(flatten.NUMEL)]
    if left:
        notes.append(
            f"{where}{len(left)} flat tensors stay as they are, first {left[0]!r}: which parameters they hold is only "
            "written in the model part's metadata"
        )
    if found.without:
        notes.append(
            f"{where}{len(found.without)} parameters have no state, first {found.without[0]!r}: they are frozen or "
            "were not given to the optimizer"
        )
    return replace(part, catalog=found.catalog, paths={**part.paths, **found.paths})


def _join_numbers(place: Place, merged: Catalog, fqns: list[str | None], roles: list[str]) -> list[str]:
    """Fill in the fqns of numbered optimizer state where they are certain; returns a note on the others."""
    numbers: dict[int, int] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for position, key in enumerate(merged.keys):
        if match := _NUMBERED.fullmatch(key):
            numbers[position] = int(match[1])
            if match[2] in MOMENTS:
                shapes[int(match[1])] = merged.shape_of(position)
    if not numbers:
        return []
    params = {f: merged.shape_of(p) for p, (f, r) in enumerate(zip(fqns, roles, strict=True)) if r == "param" and f}
    try:
        groups = archive_objects(place, merged)["optimizer.param_groups"]
    except (WorkbenchError, KeyError):  # lost with its file; check_files says so where that matters
        groups = None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        groups = []
    # a DDP model's state_dict has the order of its parameters, and the metadata keeps it
    joined = naming.join_param_groups(groups, shapes, list(params), params, ordered=True) or {}
    joined = {n: name if name in params else name.removeprefix("module.") for n, name in joined.items()}
    for position, number in numbers.items():
        fqns[position] = joined.get(number)
    lost = len(set(numbers.values()) - set(joined))
    return [naming.uncertain("optimizer", lost)] if lost else []


def _strangers(merged: Catalog, fqns: list[str | None], roles: list[str]) -> list[str]:
    """A sentence where the optimizer has parameters that the model has not: one of them is from another save."""
    params = {fqn for fqn, role in zip(fqns, roles, strict=True) if role in ("param", "buffer")}
    state = {f for f, r in zip(fqns, roles, strict=True) if f is not None and r not in ("param", "buffer", "other")}
    odd = sorted(state - params)
    if not params or not odd:
        return []
    return [f"the optimizer has state of {len(odd)} parameters that the model has not, first {odd[0]!r}"]


def _step(place: Place, notes: list[str]) -> int | None:
    """The step in the folder's name or, without one, in rank 0's extra state; a contradiction is noted."""
    match = _STEP.fullmatch(place.name)
    named = int(match[1]) if match else None
    told = None
    first = f"{EXTRA}/extra_state_rank_0.pt"
    if EXTRA in place.folders and place.exists(first):
        try:
            told = formats.reader("torch_save").read_catalog(place.sub(first)).meta.get("step")
        except WorkbenchError as error:
            notes.append(f"the extra state of rank 0 cannot be read: {error}")
    if named is not None and told is not None and told != named:
        notes.append(f"the folder is named after step {named}, but the extra state of rank 0 is of step {told}")
    return told if named is None else named


def _mesh(place: Place, parts: list[Part], notes: list[str]) -> dict[str, Any]:
    """What file names tell of the job: the ranks that wrote. Nothing tells how they were arranged."""
    wrote = {p.name or "part": set(ranks_of(place.sub(p.folder) if p.folder else place)) for p in parts}
    if EXTRA in place.folders and (ranks := {rank for rank, _ in _extra_files(place)}):
        wrote[EXTRA] = ranks
    sets = list(wrote.values())
    if any(ranks != sets[0] for ranks in sets):
        counts = ", ".join(f"{name} by {len(ranks)}" for name, ranks in wrote.items())
        least, most = set.intersection(*sets), set.union(*sets)
        notes.append(
            f"the parts were not written by the same ranks ({counts}); only some have {sorted(most - least)[:NAMED]}: "
            "files of a save with another world size are left over, or some are lost"
        )
    return {
        "axes": {},
        "ranks": {},
        "writers": len(set.union(*sets)) if sets else 0,
        "unknown": AXES,
        "source": "names of the .distcp and extra_state files",
    }
