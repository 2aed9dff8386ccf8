"""Check the files of a catalog by their metadata in the file system; their contents are not read.

::

    named by the metadata   ├──────── 1,048,576 bytes ────────┤
    on disk                 ├──────── 700,000 ───┤                  truncated: the lost tensors are named
    on disk                 ├──────── 1,048,576 ──────────────┼──┤  trailing: from a larger, older save
    on disk                 ├▓▓▓▓▓▓▓▓▓▓▓░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓┤    sparse: blocks that were never written
"""

from __future__ import annotations

import os
import stat as stat_module
from collections.abc import Iterator

import numpy as np

from workbench.analysis.verify.log import Examined
from workbench.analysis.verify.siblings import check_siblings
from workbench.core import codecs
from workbench.core.arrays import Array
from workbench.core.place import Place
from workbench.core.words import plural, some_of
from workbench.errors import WorkbenchError

SECTOR = 512


def check_files(subject: Examined) -> None:
    """Report absent, short, empty, unreadable and sparse files, and files that seem to be from another save."""
    catalog, log = subject.catalog, subject.log
    sizes = np.array([stat.size for stat in catalog.file_stats], np.int64)
    if catalog.chunks:
        subject.lost = catalog.stop > sizes[catalog.file]
    _absent_and_short(subject, sizes)
    wanted = dict.fromkeys([*catalog.files, *catalog.metadata_files])
    present = {name: path for name in wanted for path in _resolved(subject.place, name)} if subject.place.local else {}
    stats = {name: os.stat(path) for name, path in present.items()}
    for name, path in present.items():
        if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            mode = stat_module.filemode(stats[name].st_mode)
            subject.shut.add(name)
            if name in catalog.files:
                subject.lost |= catalog.file == catalog.files.index(name)
            log.add(
                "files.unreadable",
                "error",
                name,
                f"this user has no permission to read it (mode {mode})",
                "ask its owner for `chmod a+r`",
                mode=mode,
            )
        elif stats[name].st_size > 0:
            _sparse(subject, name, path, stats[name])
    check_siblings(subject, stats)
    _trailing(subject, sizes)
    log.checked["files"] = (
        f"whether {plural(len(catalog.files), 'file')} and {plural(catalog.chunks, 'byte range')} in them are present "
        + ("and complete, readable, allocated on disk, and of similar age" if subject.place.local else "and complete")
    )


# ---- one file ------------------------------------------------------------------------------------------------------


def _absent_and_short(subject: Examined, sizes: Array) -> None:
    catalog, log, objects = subject.catalog, subject.log, subject.catalog.objects
    held = np.bincount(catalog.file, minlength=len(sizes)) if catalog.chunks else np.zeros(len(sizes), int)
    if objects.keys:
        held = held + np.bincount(objects.file, minlength=len(sizes))
    rows = np.flatnonzero(subject.lost)
    for number in np.unique(np.concatenate([np.flatnonzero(sizes < 0), catalog.file[rows]])).tolist():
        name, size = catalog.files[number], int(sizes[number])
        mine = rows[catalog.file[rows] == number]
        keys = list(dict.fromkeys(subject.key(row) for row in mine.tolist()))
        what = (
            f"{plural(len(mine), 'chunk')} of {plural(len(keys), 'tensor')}: {some_of(keys)}" if keys else "no tensors"
        )
        if size < 0:
            if not held[number] and name not in catalog.metadata_files:
                continue
            log.add(
                "files.missing",
                "error",
                name,
                f"is absent; it contained {what}",
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
                f"has {plural(size, 'byte')}, but the metadata refers to bytes up to {end:,}; lost: {what}",
                "the file is truncated or from another save: restore it",
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


def _trailing(subject: Examined, sizes: Array) -> None:
    """Report trailing bytes: DCP files end with their last item, old torch.save files with their last storage."""
    catalog, objects = subject.catalog, subject.catalog.objects
    ends, exact = np.full(len(sizes), -1, np.int64), np.ones(len(sizes), bool)
    np.maximum.at(ends, catalog.file, catalog.stop)
    if objects.keys:
        np.maximum.at(ends, objects.file, objects.stop)
    exact[catalog.file[~codecs.ZIP[catalog.codec]]] = False  # a file of raw bytes may end in padding
    for number in np.flatnonzero(exact & (ends >= 0) & (sizes > ends)).tolist():
        name = catalog.files[number]
        if name.endswith(".distcp"):
            subject.log.add(
                "files.trailing",
                "warn",
                name,
                f"has {plural(int(sizes[number] - ends[number]), 'byte')} after the last one in the metadata",
                "the metadata or the file is from another save",
                size=int(sizes[number]),
                named=int(ends[number]),
            )
    for name, end in catalog.meta.get("ends", {}).items():
        size = int(sizes[catalog.files.index(name)]) if name in catalog.files else -1
        if size > end:
            subject.log.add(
                "files.trailing",
                "warn",
                name,
                f"has {plural(size - end, 'byte')} after byte {end:,}, where the data of torch.save ends",
                "torch.load ignores them: the file overwrote a longer one, or something was appended to it",
                size=size,
                named=end,
            )


def _sparse(subject: Examined, name: str, path: str, stat: os.stat_result) -> None:
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
            f"bytes {start:,} to {stop:,} were never written (a hole on disk, read as zeros), in "
            f"{some_of(keys) or 'no tensor'}",
            "a write was lost, or the file was copied as a sparse file: verify with --deep",
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


def _resolved(place: Place, name: str) -> Iterator[str]:
    try:
        yield place.resolve(name)
    except WorkbenchError:  # reported as absent
        return
