"""The files of a checkpoint as the file system sees them; nothing in them is read.

::

    model-00001.safetensors   17:02   0644   every block on disk
    model-00002.safetensors   17:02   0600   ← its siblings may be read by all
    model-00003.safetensors   09:11   0644   ← eight hours before its siblings
    model-00004.safetensors   17:03   0644   ▓▓▓▓░░░░   ← a hole where a tensor should be
    model-00004.safetensors.tmp              ← a save that was interrupted
"""

from __future__ import annotations

import os
import re
import stat as stat_module
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from workbench import completeness, runs
from workbench.analysis.verify_log import Subject, names, plural
from workbench.core.place import Place
from workbench.errors import WorkbenchError

__all__ = ["check_commit", "check_files", "check_folder", "leftovers", "listed"]

HOUR = 3_600_000_000_000  #: nanoseconds
APART = 5  #: how many times wider than the rest of the family a gap in time must be
MAX_SCANNED = 100_000  #: names looked at in one folder
SECTOR = 512

_LEFTOVER = re.compile(
    r".*\.(?:tmp|temp|incomplete|part|partial|crdownload|aria2|download|writing)(?:[-_.]\w+)?|\.?tmp[-_.].*|.*\.tmp_\w+"
)
_SHARD = re.compile(r"__\d+_\d+\.distcp")


def check_files(subject: Subject) -> None:
    """Absent, short, empty, unreadable and sparse files, and those that seem to be of another save."""
    catalog, log = subject.catalog, subject.log
    sizes = np.array([stat.size for stat in catalog.file_stats], np.int64)
    if catalog.chunks:
        subject.lost = catalog.stop > sizes[catalog.file]
    _absent_and_short(subject, sizes)
    wanted = dict.fromkeys([*catalog.files, *catalog.metadata_files])
    present = {name: path for name in wanted for path in _resolved(subject.place, name)}
    stats = {name: os.stat(path) for name, path in present.items()}
    for name, path in present.items():
        if not os.access(path, os.R_OK):
            mode = stat_module.filemode(stats[name].st_mode)
            log.add(
                "files.unreadable",
                "error",
                name,
                f"may not be read by this user (mode {mode})",
                "ask its owner for `chmod a+r`",
                mode=mode,
            )
        elif stats[name].st_size > 0:
            _sparse(subject, name, path, stats[name])
    linked = {name for name in present if os.path.islink(os.path.join(subject.place.root, name))}
    data = {catalog.files[number] for number in np.unique(catalog.file).tolist()} if catalog.chunks else set()
    families: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for name in sorted((data & set(stats)) - linked):
        folder, _, base = name.rpartition("/")
        families[folder, re.sub(r"\d+", "#", base), 0].append(name)
    for family in families.values():
        _modes(subject, family, stats)
        _ages(subject, family, stats)
    _stale_metadata(subject, stats, data)
    log.checked["files"] = (
        f"{plural(len(catalog.files), 'file')} and {plural(catalog.chunks, 'byte range')} in them: there, long enough, "
        "readable, whole on disk, of one age"
    )


def check_folder(subject: Subject) -> None:
    """Leftovers of an interrupted save, and shards that the metadata does not name."""
    place, log, known = subject.place, subject.log, set(subject.catalog.files)
    for name in leftovers(place):
        log.add(
            "files.leftover",
            "warn",
            name,
            "is a temporary file: a save or a download was interrupted, or still runs",
            "wait for it to end, or save again; then delete it",
        )
    folders = {name.rpartition("/")[0] for name in known}
    extra = []
    for folder in sorted(folders):
        for name, size in listed(place, folder):
            full = f"{folder}/{name}" if folder else name
            if _SHARD.fullmatch(name) and full not in known and size > 0:
                extra.append(full)
    for name in extra:
        log.add(
            "files.unlisted",
            "warn",
            name,
            "is a shard that no metadata names: of an older save into the same "
            "folder, or the metadata is of another save",
            "compare it with the run's log; delete it if it is a remainder",
        )


def check_commit(subject: Subject) -> None:
    """The format's commit marker, and the tracker of the run that the checkpoint is part of."""
    log = subject.log
    try:
        why = completeness.missing(subject.place, subject.catalog.format)
    except WorkbenchError as error:
        why = str(error)
    if why:
        log.add(
            "commit.incomplete",
            "error",
            subject.place.name,
            why,
            "the save was interrupted, or files were lost: restore them, or use another step",
        )
    if isinstance(told := subject.catalog.meta.get("incomplete"), str):
        log.add("commit.incomplete", "error", subject.place.name, told, "restore the files of the ranks named")
    _partner(subject)
    log.checked["commit"] = "the marker that a finished save leaves, and the run's tracker beside the folder"
    _tracker(subject)


def _partner(subject: Subject) -> None:
    """Hugging Face's Trainer saves scheduler and optimizer together, or neither."""
    names = {*subject.place.files, *subject.place.folders}
    states = ("optimizer", "pytorch_model_fsdp", "global_step")
    if (
        subject.catalog.format == "hf_trainer"
        and "scheduler.pt" in names
        and not any(name.startswith(states) for name in names)
    ):
        subject.log.add(
            "commit.partner",
            "warn",
            "optimizer.pt",
            "is absent, though 'scheduler.pt' is there, which a save writes beside it",
            "the optimizer's state was lost: a resume would start it from zero",
        )


def leftovers(place: Place) -> list[str]:
    """Temporary files in the checkpoint's folder and the folders directly in it."""
    if place.file is not None:
        stem = place.file + "."
        return [name for name, _ in listed(place, "") if name.startswith(stem) and _LEFTOVER.fullmatch(name)]
    found = [name for name, _ in listed(place, "") if _LEFTOVER.fullmatch(name)]
    for folder in [*place.folders, ".cache/huggingface/download"]:
        found += [f"{folder}/{name}" for name, _ in listed(place, folder) if _LEFTOVER.fullmatch(name)]
    return found


# ---- one file ------------------------------------------------------------------------------------------------------


def _absent_and_short(subject: Subject, sizes: np.ndarray) -> None:  # type: ignore[type-arg]
    catalog, log, objects = subject.catalog, subject.log, subject.catalog.objects
    held = np.bincount(catalog.file, minlength=len(sizes)) if catalog.chunks else np.zeros(len(sizes), int)
    if objects.keys:
        held = held + np.bincount(objects.file, minlength=len(sizes))
    rows = np.flatnonzero(subject.lost)
    for number in np.unique(np.concatenate([np.flatnonzero(sizes < 0), catalog.file[rows]])).tolist():
        name, size = catalog.files[number], int(sizes[number])
        mine = rows[catalog.file[rows] == number]
        keys = list(dict.fromkeys(subject.key(row) for row in mine.tolist()))
        what = f"{plural(len(mine), 'chunk')} of {plural(len(keys), 'tensor')}: {names(keys)}" if keys else "no tensor"
        if size < 0:
            if not held[number] and name not in catalog.metadata_files:
                continue
            log.add(
                "files.missing",
                "error",
                name,
                f"is absent; in it: {what}",
                "restore it, or use another step",
                chunks=len(mine),
                tensors=keys[:100],
            )
        else:
            end = int(catalog.stop[mine].max())
            log.add(
                "files.truncated",
                "error",
                name,
                f"has {size:,} bytes, the metadata reads up to byte {end:,}; lost: {what}",
                "the file is cut short or of another save: restore it",
                size=size,
                needed=end,
                chunks=len(mine),
                tensors=keys[:100],
            )
    for row in np.flatnonzero(objects.stop > sizes[objects.file]).tolist() if objects.keys else []:
        if sizes[objects.file[row]] >= 0:
            name = catalog.files[objects.file[row]]
            log.add(
                "files.truncated",
                "error",
                name,
                f"object {objects.keys[row]!r} ends at byte "
                f"{int(objects.stop[row]):,} of {int(sizes[objects.file[row]]):,}",
                "restore the file",
                object=objects.keys[row],
            )


def _sparse(subject: Subject, name: str, path: str, stat: os.stat_result) -> None:
    if stat.st_blocks * SECTOR >= stat.st_size or not hasattr(os, "SEEK_HOLE"):
        return
    catalog = subject.catalog
    number = catalog.files.index(name) if name in catalog.files else -1
    mine = np.flatnonzero(catalog.file == number)
    for start, stop in _holes(path, stat.st_size):
        inside = mine[(catalog.start[mine] < stop) & (catalog.stop[mine] > start)]
        cut = inside[(catalog.start[inside] < start) | (catalog.stop[inside] > stop)]
        keys = [subject.key(row) for row in (cut if len(cut) else inside)[:100].tolist()]
        subject.log.add(
            "files.sparse",
            "warn" if len(cut) else "info",
            name,
            f"bytes {start:,} to {stop:,} were never written (a hole on disk, read as zeros), in {names(keys) or 'no '}"
            f"{'' if keys else 'tensor'}",
            "a write was lost, or the file was copied with its zeros left out: verify with --deep",
            start=start,
            stop=stop,
            tensors=keys,
        )


def _holes(path: str, size: int) -> Iterator[tuple[int, int]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < size:
            start = os.lseek(fd, at, os.SEEK_HOLE)
            if start >= size:
                return
            try:
                at = os.lseek(fd, start, os.SEEK_DATA)
            except OSError:  # no data after the hole
                at = size
            yield start, at
    finally:
        os.close(fd)


# ---- files beside each other ---------------------------------------------------------------------------------------


def _modes(subject: Subject, family: list[str], stats: dict[str, os.stat_result]) -> None:
    if len(family) < 3:
        return
    bits = {name: stats[name].st_mode & 0o444 for name in family}
    common = max(set(bits.values()), key=list(bits.values()).count)
    for name in family:
        if common & ~bits[name] and list(bits.values()).count(common) * 2 > len(family):
            mode, usual = (stat_module.filemode(m | stat_module.S_IFREG)[1:] for m in (bits[name], common))
            subject.log.add(
                "files.permissions",
                "warn",
                name,
                f"may be read by fewer users than its {len(family) - 1:,} siblings: {mode} and not {usual}",
                "`chmod` it like its siblings, or a job of another user fails",
                mode=mode,
                siblings=usual,
            )


def _ages(subject: Subject, family: list[str], stats: dict[str, os.stat_result]) -> None:
    """Files of one kind in two groups far apart in time, one of them small."""
    if len(family) < 3:
        return
    ordered = sorted(family, key=lambda name: stats[name].st_mtime_ns)
    times = np.array([stats[name].st_mtime_ns for name in ordered], np.int64)
    gaps = np.diff(times)
    at = int(gaps.argmax()) + 1
    older, newer = ordered[:at], ordered[at:]
    rest = max(int(times[at - 1] - times[0]), int(times[-1] - times[at]))
    few, many, word = (older, newer, "older") if len(older) <= len(newer) else (newer, older, "newer")
    if gaps[at - 1] < HOUR or gaps[at - 1] < APART * rest or len(few) * 2 > len(many):
        return
    hours = gaps[at - 1] / HOUR
    for name in few:
        subject.log.add(
            "files.age",
            "warn",
            name,
            f"is {hours:,.1f} hours {word} than its {len(many):,} siblings, which were written together",
            "it may be of another save: compare it with a copy that you trust",
            hours=round(hours, 2),
            siblings=len(many),
        )


def _stale_metadata(subject: Subject, stats: dict[str, os.stat_result], data: set[str]) -> None:
    """Metadata is written last; older than every shard by an hour, it is of an older save."""
    for name in subject.catalog.metadata_files:
        folder = name.rpartition("/")[0]
        times = [stats[other].st_mtime_ns for other in data & set(stats) if other.rpartition("/")[0] == folder]
        if name in data or name not in stats or not times or not name.endswith(".metadata"):
            continue
        late = min(times) - stats[name].st_mtime_ns
        if late > HOUR:
            subject.log.add(
                "files.age",
                "warn",
                name,
                f"is {late / HOUR:,.1f} hours older than every file that it describes, though a save writes it last",
                "the shards may be of a newer save whose metadata was lost",
                hours=round(late / HOUR, 2),
            )


def _tracker(subject: Subject) -> None:
    root = os.path.dirname(os.path.join(subject.place.root, subject.place.file or ""))
    parent = os.path.dirname(root) if subject.place.file is None else root
    try:
        above = Place(parent)
        for tracker in runs.TRACKERS:
            if tracker not in above.files or above.files[tracker].size > runs.TRACKER_LIMIT:
                continue
            text = above.read(tracker).decode("utf-8", "replace").strip()
            there = [*above.folders, *above.files]
            number = int(text) if text.isdecimal() and len(text) < 19 else None
            if (
                text != "release"
                and text not in there
                and not any(runs.step_of(n) == number is not None for n in there)
            ):
                subject.log.add(
                    "commit.tracker",
                    "warn",
                    f"../{tracker}",
                    f"names {text[:80]!r}, which is not beside it",
                    "a trainer that resumes will look for it: restore that step or correct the tracker",
                    names=text[:80],
                )
    except WorkbenchError:  # no permission to list the folder above: nothing to say about it
        return


def listed(place: Place, folder: str) -> Iterator[tuple[str, int]]:
    """Names and sizes of the regular files of a folder inside the place; nothing where it cannot be listed."""
    try:
        with os.scandir(os.path.join(place.root, folder)) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_SCANNED:
                    return
                if entry.is_file():
                    yield entry.name, entry.stat().st_size
    except OSError:
        return


def _resolved(place: Place, name: str) -> Iterator[str]:
    try:
        yield place.resolve(name)
    except WorkbenchError:  # told as absent
        return
