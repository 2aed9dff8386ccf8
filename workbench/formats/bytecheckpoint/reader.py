"""ByteCheckpoint (``bytecheckpoint.save``), read from 0.0.2 and 0.0.3: FSDP, FSDP2 and DDP.

::

    run/
      latest_checkpointed_iteration.txt     "3", written last
      log_rank0.txt                         its log lines, if they were kept (log.py)
      global_step_3/                        this level is absent without global_steps=
        model/      .metadata  __0_0.distcp  __1_0.distcp …      __<rank>_<k>; a file may have 0 bytes
        optimizer/  .metadata  __0_0.distcp …
        extra_state/extra_state_rank_0.pt …                      torch.save, any object

    __0_0.distcp   │ bytes item (torch.save) │ tensor │ tensor │ …      raw bytes, no header, no alignment, no checksum

Keys are the stored names prefixed with the part: ``model.<fqn>``, ``optimizer.state.<fqn>.exp_avg``. FSDP1's
decomposed flat parameters are unflattened; the flat tensors remain available by key as views (flat.py).
DDP numbers its optimizer state: numbers are mapped to names only where `names.optimizer` is certain.
Metadata is decoded in metadata.py.

The format stores no step, world size, mesh, checksum or time. The step comes from the folder's name. Ranks come from
file names and state only which rank wrote a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workbench import formats
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.objects import archive_objects, decode_archive
from workbench.core.place import Place, lacking
from workbench.core.words import plural
from workbench.errors import IncompleteError, NotACheckpointError, OpenError, WorkbenchError
from workbench.formats import Format
from workbench.formats.bytecheckpoint import flat as flatten
from workbench.formats.bytecheckpoint import log
from workbench.formats.bytecheckpoint.part import METADATA, NAMED, PartFile, ranks_of, read_part
from workbench.formats.layered import parts
from workbench.names.optimizer import MOMENTS, name_numbered
from workbench.names.roles import resolve

PARTS = ("model", "optimizer")
EXTRA = "extra_state"
MARK = b"bytecheckpoint."  #: the module of the pickle's first global, in its first bytes
AXES = ["dp", "tp", "pp", "cp", "ep"]
_EXTRA = re.compile(r"extra_state_rank_(\d{1,9})\.pt")
_STEP = re.compile(r"global_step_(\d{1,18})")
_NUMBERED = re.compile(r"optimizer\.state\.(\d{1,18})\.([^.]+)")
LOGS_TRIED = 4  #: number of log files that are tried; one of them must begin as ByteCheckpoint's logs do


def detect(place: Place) -> bool:
    """Return whether the folder is a ByteCheckpoint part or holds parts as folders, committed or not."""
    if place.file is not None:
        return False
    if METADATA in place.files:
        return MARK in place.head(METADATA, 256)
    found = [part for part in PARTS if part in place.folders]
    if any(MARK in place.head(f"{part}/{METADATA}", 256) for part in found):
        return True
    interrupted = [part for part in found if not place.exists(f"{part}/{METADATA}") and ranks_of(place.sub(part))]
    return bool(interrupted) and (EXTRA in place.folders or _STEP.fullmatch(place.name) is not None)


def missing(place: Place) -> str:
    """Describe what a part lacks, or the extra state that a save in the background did not come to."""
    if (why := parts.missing(place)) or EXTRA not in place.folders:
        return why
    writers = {rank for part in PARTS if part in place.folders for rank in ranks_of(place.sub(part))}
    lost = sorted(writers - {rank for rank, _ in _extra_files(place)})
    return f"the extra state of {lacking(len(lost), len(writers), 'ranks')}, first of rank {lost[0]}" if lost else ""


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of the parts that exist.

    Raises:
        IncompleteError: a part lacks metadata: the save was interrupted. NotACheckpointError: there is no part.
        CorruptError: the metadata contradicts itself, or the parts are from different saves.
        UnsafeError: the metadata names a file outside the folder.
    """
    if METADATA in place.files:
        return _join(place, [read_part(place, place, _alone(place), "")])
    _check_committed(place)
    found = [part for part in PARTS if place.exists(f"{part}/{METADATA}")]
    if not found:
        raise NotACheckpointError(
            f"{place.path!r} has neither model/{METADATA} nor optimizer/{METADATA}; if it is a run, "
            "open one of its global_step_N folders"
        )
    return _join(place, [read_part(place, place.sub(part), part, part) for part in found])


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return bytes items (``optimizer.param_groups``), ``extra_state_rank_R`` of every rank, and ``save_log``."""
    stored = archive_objects(place, catalog)
    makers: dict[str, Any] = {key: partial(stored.__getitem__, key) for key in stored}
    if EXTRA in place.folders:
        for _, name in _extra_files(place):
            makers[name.removesuffix(".pt")] = partial(_extra, place, f"{EXTRA}/{name}")
    if logs := _logs(place):
        makers["save_log"] = partial(log.read, logs)
    return LazyMap(makers)


# ---- parts and files -----------------------------------------------------------------------------------------------


def _alone(place: Place) -> str:
    """Return which part a folder is if it was opened alone."""
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
        leftover = " (a half-written .metadata.tmp exists)" if ".metadata.tmp" in inner.files else ""
        others = [other for other in PARTS if other != part and place.exists(f"{other}/{METADATA}")]
        hint = f", or open its {others[0]!r} folder alone" if others else ""
        raise IncompleteError(
            f"{place.path!r}: part {part!r} has .distcp files but no .metadata{leftover}: the save was interrupted "
            f"before its commit; use an earlier step{hint}"
        )


def _logs(place: Place) -> list[tuple[Place, list[str]]]:
    """Return ByteCheckpoint's log files in the checkpoint's folder and in its parent, the run's folder."""
    found = [(place, log.find(place))]
    try:
        if (above := place.above) is not None:
            found.append((above, log.find(above)))
    except OpenError:  # no permission to list the parent folder: no logs
        pass
    return [(where, names) for where, names in found if any(log.is_one(where, name) for name in names[:LOGS_TRIED])]


def _extra(place: Place, name: str) -> Any:
    return decode_archive(np.frombuffer(place.read(name), np.uint8), what=repr(name))


# ---- all parts -----------------------------------------------------------------------------------------------------


def _join(place: Place, parts: list[PartFile]) -> Catalog:
    """Return one catalog of all parts, with names."""
    notes = [note for part in parts for note in part.catalog.meta["notes"]]
    flats: dict[str, flatten.FlatParam] = {}
    for part in parts:
        if part.user:
            flats |= flatten.tables(part.user, f"part {part.name or 'model'!r}")
    made = [_unflat(place, part, flats, notes) for part in parts]
    facts: dict[str, Any] = {"step": None, "notes": notes, "mesh": _mesh(place, parts, notes)}
    merged = merge("bytecheckpoint", [(_prefix(p), p.folder, p.catalog) for p in made], facts)
    fqns, roles = resolve(merged.keys, {"paths": _paths(made)})
    views = merged.views
    if views is not None:  # a flat tensor holds many parameters and belongs to none
        views = replace(views, fqns=[None] * len(views), roles=["other"] * len(views))
    merged = replace(merged, fqns=fqns, roles=roles, views=views)
    notes += _join_numbers(place, merged, fqns, roles)
    notes += _unknown_parameters(merged, fqns, roles)
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
    """Return a note if a DDP save may hold channels_last tensors, which it stores in memory order as contiguous."""
    if not any(".module." in f".{key}" for key in merged.keys):
        return []
    inner = merged.shape[:, 2:].prod(axis=1)
    doubtful = np.flatnonzero((merged.ndim >= 4) & (merged.shape[:, 1] > 1) & (inner > 1))
    if not len(doubtful):
        return []
    return [
        f"{plural(len(doubtful), 'tensor')} of a DDP save with 4 or more axes, such as {merged.keys[doubtful[0]]!r}: "
        "if the model was in channels_last memory format, ByteCheckpoint stored their elements in another order and "
        "no file records it"
    ]


def _prefix(part: PartFile) -> str:
    return f"{part.folder}." if part.folder else ""


def _paths(parts: list[PartFile]) -> dict[str, tuple[Any, ...]]:
    """Return the path of each merged key, with the part as the outermost container."""
    found: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        head = part.name or ("optimizer" if any(key.startswith("state.") for key in part.catalog.keys) else "model")
        for key in part.catalog.keys:
            path = part.paths.get(key)
            found[_prefix(part) + key] = (head, *path) if isinstance(path, tuple) and path else (head, key)
    return found


def _unflat(place: Place, part: PartFile, flats: Mapping[str, flatten.FlatParam], notes: list[str]) -> PartFile:
    where = f"{part.name!r}: " if part.name else ""
    inner = place.sub(part.folder) if part.folder else place
    state = any(key.startswith("state.") for key in part.catalog.keys) if not part.name else part.name == "optimizer"
    found = flatten.unflatten(inner, part.catalog, flats, state=state)
    left = [key for key in found.catalog.keys if flatten.FLAT in key and not key.endswith(flatten.NUMEL)]
    if left:
        notes.append(
            f"{where}{plural(len(left), 'flat tensor', 'stay')} flat, first {left[0]!r}: their parameters are listed "
            "only in the model part's metadata"
        )
    if found.without:
        notes.append(
            f"{where}{plural(len(found.without), 'parameter', 'have')} no state, first {found.without[0]!r}: they are "
            "frozen or were not passed to the optimizer"
        )
    return replace(part, catalog=found.catalog, paths={**part.paths, **found.paths})


def _join_numbers(place: Place, merged: Catalog, fqns: list[str | None], roles: list[str]) -> list[str]:
    """Fill in the fqns of numbered optimizer state if they are certain. Return notes about the others."""
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
    except (WorkbenchError, KeyError):  # lost with its file; check_files reports it if it matters
        groups = None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        groups = []
    # a DDP model's state_dict is in the order of its parameters, and the metadata keeps this order
    notes = name_numbered(fqns, numbers, shapes, groups, params, ordered=True, optimizer="optimizer")
    for position in numbers:
        if (fqn := fqns[position]) is not None and fqn not in params:
            fqns[position] = fqn.removeprefix("module.")
    return notes


def _unknown_parameters(merged: Catalog, fqns: list[str | None], roles: list[str]) -> list[str]:
    """Return a note if the optimizer has parameters that the model lacks: the two are from different saves."""
    params = {fqn for fqn, role in zip(fqns, roles, strict=True) if role in ("param", "buffer")}
    state = {f for f, r in zip(fqns, roles, strict=True) if f is not None and r not in ("param", "buffer", "other")}
    odd = sorted(state - params)
    if not params or not odd:
        return []
    return [f"the optimizer has state of {plural(len(odd), 'parameter')} that the model lacks, first {odd[0]!r}"]


def _step(place: Place, notes: list[str]) -> int | None:
    """Return the step in the folder's name or else in rank 0's extra state; note a contradiction."""
    match = _STEP.fullmatch(place.name)
    named = int(match[1]) if match else None
    stored = None
    first = f"{EXTRA}/extra_state_rank_0.pt"
    if EXTRA in place.folders and place.exists(first):
        try:
            stored = formats.reader("torch_save").read_catalog(place.sub(first)).meta.get("step")
        except WorkbenchError as error:
            notes.append(f"the extra state of rank 0 cannot be read: {error}")
    if named is not None and stored is not None and stored != named:
        notes.append(f"the folder is named after step {named}, but the extra state of rank 0 has step {stored}")
    return stored if named is None else named


def _mesh(place: Place, parts: list[PartFile], notes: list[str]) -> dict[str, Any]:
    """Return the ranks that wrote files, by file names. How they were arranged is not stored."""
    writers = {p.name or "part": set(ranks_of(place.sub(p.folder) if p.folder else place)) for p in parts}
    if EXTRA in place.folders:
        writers[EXTRA] = {rank for rank, _ in _extra_files(place)}
    sets = list(writers.values())
    if any(ranks != sets[0] for ranks in sets):
        counts = ", ".join(f"{name} by {len(ranks)}" for name, ranks in writers.items())
        least, most = set.intersection(*sets), set.union(*sets)
        notes.append(
            f"the parts were not written by the same ranks ({counts}); some lack ranks {sorted(most - least)[:NAMED]}: "
            "files are left over from a save with another world size, or some are lost"
        )
    return {
        "axes": {},
        "ranks": {},
        "writers": len(set.union(*sets)) if sets else 0,
        "unknown": AXES,
        "source": "names of the .distcp and extra_state files",
    }


FORMAT = Format(
    name="bytecheckpoint",
    title="ByteCheckpoint",
    marks="model/, optimizer/, extra_state/",
    read_from="bytecheckpoint 0.0.2 – 0.0.3",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    own_bytes=True,
)
