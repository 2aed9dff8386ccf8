"""Files beside each other: of one save, and all of them?

::

    model-00001.safetensors   17:02   0644
    model-00002.safetensors   17:02   0600   ← its siblings may be read by all
    model-00003.safetensors   09:11   0644   ← eight hours before its siblings
    model-00004.safetensors.tmp              ← a save that was interrupted
    __9_0.distcp                             ← no metadata names it
"""

from __future__ import annotations

import os
import re
import stat as stat_module
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from workbench.analysis.verify.log import Subject
from workbench.core.place import Place
from workbench.core.source import no_descriptor
from workbench.errors import WorkbenchError

__all__ = ["check_folder", "check_siblings", "leftovers", "listed"]

HOUR = 3_600_000_000_000  #: nanoseconds
APART = 5  #: how many times wider than the rest of the family a gap in time must be
#: Endings of files that are never empty (a rank without tensors writes an empty .distcp).
STATE = (".json", ".pt", ".pth", ".bin", ".pkl", ".ckpt", ".safetensors", ".pdparams", ".pdopt", ".metadata")
MAX_SCANNED = 100_000  #: names looked at in one folder

_LEFTOVER = re.compile(
    r".*\.(?:tmp|temp|incomplete|part|partial|crdownload|aria2|download|writing)(?:[-_.]\w+)?|\.?tmp[-_.].*|.*\.tmp_\w+"
)
_SHARD = re.compile(r"__\d+_\d+\.distcp")


def check_siblings(subject: Subject, stats: dict[str, os.stat_result]) -> None:
    """Permissions and ages within each family of data files, and of the metadata beside them."""
    catalog = subject.catalog
    linked = {name for name in stats if os.path.islink(os.path.join(subject.place.root, name))}
    data = {catalog.files[number] for number in np.unique(catalog.file).tolist()} if catalog.chunks else set()
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted((data & set(stats)) - linked - subject.shut):
        folder, _, base = name.rpartition("/")
        families[folder, re.sub(r"\d+", "#", base)].append(name)
    for family in families.values():
        _modes(subject, family, stats)
        _ages(subject, family, stats)
    _stale_metadata(subject, stats, data)


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
    empty = (
        [name for name, size in listed(place, "") if size == 0 and name.endswith(STATE)] if place.file is None else []
    )
    for name in empty:
        log.add("files.empty", "warn", name, "has no bytes", "a write was lost: restore it")
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


def leftovers(place: Place) -> list[str]:
    """Temporary files in the checkpoint's folder and the folders directly in it."""
    if place.file is not None:
        stem = place.file + "."
        return [name for name, _ in listed(place, "") if name.startswith(stem) and _LEFTOVER.fullmatch(name)]
    found = [name for name, _ in listed(place, "") if _LEFTOVER.fullmatch(name)]
    for folder in [*place.folders, ".cache/huggingface/download"]:
        found += [f"{folder}/{name}" for name, _ in listed(place, folder) if _LEFTOVER.fullmatch(name)]
    return found


def listed(place: Place, folder: str) -> Iterator[tuple[str, int]]:
    """Names and sizes of the regular files of a folder inside the place; nothing where it cannot be listed, or is a
    link that leaves the place.
    """
    try:
        inside = place.sub(folder) if folder else place
        if folder and inside.file is not None:
            return
        with os.scandir(inside.root) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_SCANNED:
                    return
                if entry.is_file():
                    yield entry.name, entry.stat().st_size
    except WorkbenchError:
        return
    except OSError as error:
        no_descriptor(error)


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
