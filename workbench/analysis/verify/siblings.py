"""Check files against their siblings: are they from one save, and complete?

::

    model-00001.safetensors   17:02   0644
    model-00002.safetensors   17:02   0600   ← its siblings are readable by all
    model-00003.safetensors   09:11   0644   ← eight hours before its siblings
    model-00004.safetensors.tmp              ← an interrupted save
    __9_0.distcp                             ← no metadata names it
"""

from __future__ import annotations

import os
import re
import stat as stat_module
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import numpy as np

from workbench.analysis.verify.log import Examined
from workbench.core.parts import is_part
from workbench.core.place import Place
from workbench.core.source import no_descriptor
from workbench.core.words import plural
from workbench.errors import WorkbenchError

HOUR = 3_600_000_000_000  #: nanoseconds
APART = 5  #: minimum ratio of a time gap to the age range of the rest of the family
#: Suffixes of files that are never empty (a rank without tensors writes an empty .distcp).
STATE = (".json", ".pt", ".pth", ".bin", ".pkl", ".ckpt", ".safetensors", ".pdparams", ".pdopt", ".metadata")
MAX_SCANNED = 100_000  #: maximum number of names checked in one folder

_LEFTOVER = re.compile(
    r".*\.(?:tmp|temp|incomplete|part|partial|crdownload|aria2|download|writing)(?:[-_.]\w+)?|\.?tmp[-_.].*|.*\.tmp_\w+"
)
_SHARD = re.compile(r"__\d+_\d+\.distcp")


def check_siblings(subject: Examined, stats: dict[str, os.stat_result]) -> None:
    """Check permissions and ages within each family of data files, and of the metadata next to them."""
    catalog = subject.catalog
    linked = {name for name in stats if subject.place.is_link(name)}
    data = {catalog.files[number] for number in np.unique(catalog.file).tolist()} if catalog.chunks else set()
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted((data & set(stats)) - linked - subject.shut):
        folder, _, base = name.rpartition("/")
        families[folder, re.sub(r"\d+", "#", base)].append(name)
    for family in families.values():
        _modes(subject, family, stats)
        _ages(subject, family, stats)
    _stale_metadata(subject, stats, data)


def check_folder(subject: Examined) -> None:
    """Report leftovers of an interrupted save, and shards that are missing from the metadata."""
    place, log, known = subject.place, subject.log, set(subject.catalog.files)
    for name in leftovers(place):
        log.add(
            "files.leftover",
            "warn",
            name,
            "is a temporary file: a save or a download was interrupted, or is running",
            "wait until it ends, or save again; then delete the file",
        )
    empty = (
        [name for name, size in listed(place, "") if size == 0 and name.endswith(STATE)] if place.file is None else []
    )
    for name in empty:
        log.add("files.empty", "warn", name, "is empty", "a write was lost: restore the file")
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
            "is a shard that is not in the metadata: it is from an older save into the same "
            "folder, or the metadata is from another save",
            "compare it with the run's log; delete it if it is a leftover",
        )


def leftovers(place: Place) -> list[str]:
    """Return temporary files in the checkpoint's folder and its direct subfolders, or those of a single file."""
    if place.file is not None:
        stem = place.file + "."
        mine = [name for name, _ in listed(place, "") if name.startswith(stem) and _LEFTOVER.fullmatch(name)]
        return [name for name in mine if not is_part(name)]  # by default, they are written beside it
    found = [name for name, _ in listed(place, "") if _LEFTOVER.fullmatch(name)]
    for folder in [*place.folders, ".cache/huggingface/download"]:
        found += [f"{folder}/{name}" for name, _ in listed(place, folder) if _LEFTOVER.fullmatch(name)]
    return found


def listed(place: Place, folder: str) -> Iterator[tuple[str, int]]:
    """Return names and sizes of the regular files of a folder inside the place.

    Returns nothing if the folder cannot be listed or is a link that leaves the place.
    """
    try:
        inside = place.sub(folder) if folder else place
        if folder and inside.file is not None:
            return
        if not inside.local:
            yield from ((name, stat.size) for name, stat in islice(inside.files.items(), MAX_SCANNED))
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


def _modes(subject: Examined, family: list[str], stats: dict[str, os.stat_result]) -> None:
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
                f"is readable by fewer users than its {plural(len(family) - 1, 'sibling')}: mode {mode} "
                f"instead of {usual}",
                "`chmod` it like its siblings, otherwise jobs of other users fail",
                mode=mode,
                siblings=usual,
            )


def _ages(subject: Examined, family: list[str], stats: dict[str, os.stat_result]) -> None:
    """Report files of one kind in two groups far apart in time, one of them small."""
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
            f"is {hours:,.1f} hours {word} than its {plural(len(many), 'sibling')}, which were written together",
            "it may be from another save: compare it with a trusted copy",
            hours=round(hours, 2),
            siblings=len(many),
        )


def _stale_metadata(subject: Examined, stats: dict[str, os.stat_result], data: set[str]) -> None:
    """Report metadata an hour older than every shard: it is written last, so it is from an older save."""
    for name in subject.catalog.metadata_files:
        folder = name.rpartition("/")[0]
        times = [stats[other].st_mtime_ns for other in data & set(stats) if other.rpartition("/")[0] == folder]
        if name in data or name not in stats or not times or not name.endswith((".metadata", "metadata.pkl")):
            continue
        late = min(times) - stats[name].st_mtime_ns
        if late > HOUR:
            subject.log.add(
                "files.age",
                "warn",
                name,
                f"is {late / HOUR:,.1f} hours older than every file that it describes, although it is written last",
                "the shards may be from a newer save whose metadata was lost",
                hours=round(late / HOUR, 2),
            )
