"""Which checkpoints are under a folder, and which of a run's steps to open.

::

    runs/pretrain/
      latest_checkpointed_iteration.txt     a tracker: the step that the trainer would resume from
      step-2000/  .metadata  __0_0.distcp   complete
      step-4000/  .metadata  __0_0.distcp   complete: the newest, opened by default
      step-6000/             __0_0.distcp   no .metadata: the save was interrupted
      final/model.safetensors

Only names, sizes and a few bytes are read, never a tensor; a format's ``missing`` says whether a checkpoint is
complete. Links to folders are not followed: they would list a checkpoint twice, or leave the root.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench import formats
from workbench.core.place import Place
from workbench.core.words import Ordinary, plural, some_of
from workbench.errors import IncompleteError, NotACheckpointError, WorkbenchError, quoted
from workbench.names.steps import is_step, step_of

__all__ = ["DEPTH", "Found", "RunFolder", "discover", "grouped", "locate", "pick", "steps_beside"]

#: Megatron's; DeepSpeed's, and that of the output of its ds_to_universal.py
TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
TRACKER_LIMIT = 4096  #: bytes of a tracker; real ones hold one number or name
#: Not separate checkpoints: parts of one in the same folder.
PARTS = re.compile(
    r"training_args\.bin|scheduler(_\d+)?\.(bin|pt)|sampler(_\d+)?\.bin|scaler\.pt|rng_state.*\.pth|optimizer.*\.(bin|pt)"
    r"|(scheduler|scaler)\.pdparams|.+-(?!00001-)\d{5}-of-\d{5}\.gguf"
)
MAX_NAMED = 3
DEPTH = 6  #: levels below a root: <project>/<user>/<date>/<run>/checkpoints/step-10
SURE, DEEP = 3, 20_000  #: levels that are always listed; limit of folders below them: some 10 s on a slow disk
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint.

    Attributes:
        path: relative to the root; ``.`` for the root itself.
        format: the reader's name.
        step: from the trainer's file or a folder's name, otherwise ``None``.
        nbytes: bytes of all its files, without those of checkpoints in folders below it.
        mtime: seconds since the epoch of its newest file.
        complete: whether the format's commit marker and every file that it lists exist. On a disk, also whether files
            that a small ``.metadata`` names exist, whether ranks are there that Megatron's first file counts, and
            whether the first files of safetensors and GGUF begin like the format (safetensors: whether they are
            whole and hold the tensors that the index maps to them).
        why: what is missing or wrong; empty when complete.
    """

    path: str
    format: str
    step: int | None
    nbytes: int
    mtime: float
    complete: bool
    why: str


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder with several steps of one run.

    Attributes:
        path: relative to the root; ``.`` for the root itself.
        steps: its checkpoints, by step; their paths are relative to the root, too.
    """

    path: str
    steps: tuple[Found, ...]


def discover(
    root: str | os.PathLike[str] | Place, *, depth: int = DEPTH, storage_options: Mapping[str, Any] | None = None
) -> list[Found]:
    """Find the checkpoints in a folder and in the folders below it, ``depth`` levels deep, sorted by path and step.

    Of the folders more than :data:`SURE` levels down, up to :data:`DEEP` are searched.

    Raises:
        NotACheckpointError: the root does not exist.
        MissingFileError: it cannot be listed.
    """
    place = root if isinstance(root, Place) else Place(root, storage_options)
    place.ahead()
    if place.file is not None:
        name = formats.detect(place)
        return [] if name is None else [_found(place, ".", name, place.name)]
    found = list(_walk(place, "", depth, [DEEP]))
    return sorted(found, key=lambda item: (os.path.dirname(item.path), item.step is None, item.step or 0, item.path))


def grouped(found: Iterable[Found]) -> tuple[list[RunFolder], list[Found]]:
    """Group checkpoints into runs; returns the runs and the remaining checkpoints.

    A run is a folder in which two or more checkpoints have different steps, and names that differ only by numbers;
    every checkpoint in it with a step in its name belongs to it.
    """
    folders: dict[str, list[Found]] = {}
    for one in found:
        if one.path != "." and one.step is not None and step_of(one.path) is not None:
            folders.setdefault(os.path.dirname(one.path) or ".", []).append(one)
    runs = []
    for path, steps in folders.items():
        names: dict[str, set[int | None]] = {}
        for one in steps:
            names.setdefault(_NUMBER.sub("#", os.path.basename(one.path)), set()).add(one.step)
        if max(map(len, names.values())) > 1:
            runs.append(RunFolder(path, tuple(sorted(steps, key=lambda one: (one.step or 0, one.path)))))
    taken = {one.path for run in runs for one in run.steps}
    return runs, [one for one in found if one.path not in taken]


def locate(place: Place, format: str | None = None) -> tuple[Place, str | None, str | None]:
    """Locate the checkpoint that a path means: itself, or the step of a run's folder; its format, ``None`` if nothing
    is recognised; and a sentence that explains the choice of that step.

    Args:
        format: a reader's name, if the caller knows it; then the place itself is the checkpoint.

    Raises:
        as :func:`pick`.
    """
    found = format or formats.detect(place)
    # loose files beside a tracker are not the checkpoint, unless their layout has its own tracker
    loose = found is not None and formats.record(found).loose and any(name in place.files for name in TRACKERS)
    if format is not None or (found is not None and not loose):
        return place, found, _beside(place, found) if format is None else None
    picked = pick(place)
    if picked is None:
        return place, found, None
    item, reason = picked
    return place.sub(item.path), item.format, reason


def steps_beside(place: Place, format: str | None) -> list[str]:
    """Return the folders beside the files of a checkpoint that are named like steps of a run, by step.

    As a trainer leaves them that saves the final model next to its checkpoints.
    """
    if place.file is not None:
        return []
    known = formats.record(format or "")
    found = [name for name in place.folders if step_of(name) is not None and not known.closed and not known.owns(name)]
    return sorted((name for name in found if not place.is_link(name)), key=lambda name: (step_of(name) or 0, name))


def _beside(place: Place, format: str | None) -> str | None:
    """Return a note if the folder of a checkpoint is that of a run, too."""
    try:
        steps = steps_beside(place, format)
        if not steps or formats.detect(place.sub(steps[-1])) is None:
            return None
    except WorkbenchError:  # whatever it is, it was not asked for
        return None
    also = f"{len(steps)} steps of a run, {some_of(steps, MAX_NAMED)}" if len(steps) > 1 else f"a step, {steps[0]!r}"
    return f"opened the files of {place.path!r} itself; the folder also has {also}: open a step by its own path"


def pick(place: Place) -> tuple[Found, str] | None:
    """Choose the step of a run's folder to open, and a sentence that explains why; ``None`` if it has no checkpoint.

    Raises:
        IncompleteError: there are steps, but none is complete.
        NotACheckpointError: there are several checkpoints, and the choice is unclear.
    """
    if place.file is not None:
        return None
    found = [item for item in _walk(place, "", 2, [DEEP]) if item.path != "."]
    if not found:
        return None
    steps = [item for item in found if item.step is not None]
    if not steps and len(found) == 1 and found[0].complete:
        return found[0], Ordinary(f"opened {found[0].path!r}: the only checkpoint in the folder")
    if not steps:
        raise NotACheckpointError(
            f"{place.path!r} has {plural(len(found), 'checkpoint')} whose names contain no step: "
            f"{_some(found)}; open one of them"
        )
    complete = [item for item in steps if item.complete]
    if not complete:
        newest = max(steps, key=_step)
        words = f"none of the {len(steps):,} steps is complete; the newest is {newest.path!r}"
        if len(steps) == 1:
            words = f"the only step, {newest.path!r}, is not complete"
        raise IncompleteError(f"{place.path!r}: {words}: {newest.why}")
    tracked, note = _tracked(place, steps)
    if tracked is not None and tracked.complete:
        return tracked, Ordinary(f"opened {tracked.path!r}: {note}")
    newest_step = max(map(_step, complete))
    best = [item for item in complete if item.step == newest_step]
    if len(best) > 1:
        raise NotACheckpointError(
            f"step {newest_step} in {place.path!r} is {len(best)} checkpoints: {_some(best)}; open one of them"
        )
    reason = f"opened {best[0].path!r}: the newest complete of {len(steps)} step{'s' if len(steps) > 1 else ''}"
    newer = [item for item in steps if not item.complete and _step(item) > newest_step and item is not tracked]
    for item in sorted(newer, key=_step)[:MAX_NAMED]:
        reason += f"; {item.path!r} is incomplete ({item.why})"
    if note:
        reason += f"; {note}"
    return best[0], reason if newer or note else Ordinary(reason)


def _step(item: Found) -> int:
    return -1 if item.step is None else item.step


def _some(found: list[Found]) -> str:
    return some_of([item.path for item in found], MAX_NAMED)


# ---- walking -------------------------------------------------------------------------------------------------------


def _walk(place: Place, relative: str, depth: int, budget: list[int]) -> Iterator[Found]:
    name = None
    try:
        files = place.files
    except WorkbenchError as error:
        yield _unreadable(relative or ".", error)
        return
    try:
        name = formats.detect(place)
        if name is not None and formats.record(name).is_collection(place):
            name = None  # each file is listed: together they could not be opened
    except WorkbenchError as error:  # of one file, which may be planted: the other files there are listed as well
        name = None
        yield _unreadable(relative or ".", error)
    if name is not None:
        yield _found(place, relative or ".", name, relative or place.name)
    elif why := formats.unfinished(place):  # an export has just begun
        yield Found(relative or ".", "unreadable", step_of(relative or place.name), *_size(place), False, why)
    known = formats.record(name or "")
    if known.closed:
        return
    endings: tuple[str, ...] = ()
    named: list[str] = []
    if files:
        single = [o for o in formats.FORMATS.values() if o.single_file and (o.name != name or o.loose)]
        endings = tuple(end for other in single for end in (other.beside if name else other.suffixes))
        named = [other.names for other in single if other.names and not name]
    for file in files:
        known_name = file.endswith(endings) or any(re.fullmatch(one, file) for one in named)
        if known_name and not PARTS.fullmatch(file):
            yield from _single(place, relative, file)
    if depth <= 0:
        return
    for folder in place.folders:
        inner = f"{relative}/{folder}" if relative else folder
        if folder.startswith(".") or place.is_link(folder) or known.owns(folder):
            continue
        if inner.count("/") >= SURE:
            if budget[0] <= 0:
                return
            budget[0] -= 1
        yield from _walk(place.sub(folder), inner, depth - 1, budget)


def _single(place: Place, relative: str, file: str) -> Iterator[Found]:
    path = f"{relative}/{file}" if relative else file
    try:
        inner = place.sub(file)
        name = formats.detect(inner)
    except WorkbenchError as error:  # a link out of the root, or no permission: listed, not followed
        yield _unreadable(path, error)
        return
    if name is not None:
        yield _found(inner, path, name, path)


def _unreadable(path: str, error: WorkbenchError) -> Found:
    return Found(path, "unreadable", step_of(path), 0, 0.0, False, str(error))


def _found(place: Place, path: str, format: str, named: str) -> Found:
    nbytes, mtime = _size(place, format)
    try:
        why = formats.missing(place, format)
        stored = formats.record(format).stored_step(place)
        step = stored if is_step(stored) else None
    except WorkbenchError as error:
        why, step = str(error), None
    return Found(path, format, step_of(named) if step is None else step, nbytes, mtime, not why, why)


def _size(place: Place, format: str = "") -> tuple[int, float]:
    """Return the bytes and the newest modification time of all files, two levels down."""
    stats = list(place.files.values())
    if place.file is None:
        known = formats.record(format)
        for folder in place.folders:
            if not place.is_link(folder) and (known.owns(folder) or not _is_checkpoint(place, folder)):
                stats += _quietly(place, folder)
    return sum(stat.size for stat in stats), max((stat.mtime_ns for stat in stats), default=0) / 1e9


def _is_checkpoint(place: Place, folder: str) -> bool:
    """Return whether a folder is listed as a checkpoint of its own."""
    try:
        return formats.detect(place.sub(folder)) is not None
    except WorkbenchError:  # listed as unreadable
        return True


def _quietly(place: Place, folder: str) -> list[Any]:
    try:
        return list(place.sub(folder).files.values())
    except WorkbenchError:  # the size of a folder without permission is unknown
        return []


def _tracked(place: Place, steps: list[Found]) -> tuple[Found | None, str]:
    """Return the step that the tracker names, and a note about it."""
    for tracker in TRACKERS:
        if tracker not in place.files or place.files[tracker].size > TRACKER_LIMIT:
            continue
        text = place.read(tracker).decode("utf-8", "replace").strip()
        hits = [item for item in steps if item.path == text or (text.isdigit() and item.step == int(text[:18]))]
        if not hits:
            return None, f"the tracker {tracker!r} names {quoted(text)}, which does not exist"
        if not hits[0].complete:
            return hits[0], f"the tracker {tracker!r} names {hits[0].path!r}, which is incomplete ({hits[0].why})"
        return hits[0], f"the tracker {tracker!r} names it"
    return None, ""
