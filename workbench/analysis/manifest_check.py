"""Check a checkpoint's files against its manifest: which bytes changed, and what they contain.

The manifest alone records what each byte belongs to, so files too damaged for any reader can be checked, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from workbench.analysis.folder import walk
from workbench.analysis.manifest import is_manifest, load
from workbench.analysis.manifest_entries import FileEntry, Manifest
from workbench.analysis.manifest_file import read
from workbench.analysis.report import Finding, Report
from workbench.analysis.segments import Label
from workbench.checkpoint import Checkpoint
from workbench.core.blocks import file_digests
from workbench.core.place import Place, stat_or_absent
from workbench.core.scan import Progress
from workbench.core.source import needs_descriptors
from workbench.core.words import plural, some_of
from workbench.errors import UnsafeError

LISTED = 100  #: findings per file, and names in the evidence of one


@needs_descriptors()
def check(
    ckpt: Checkpoint | Place | str | os.PathLike[str],
    manifest: Manifest | str | os.PathLike[str] | None = None,
    *,
    partial: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare every byte of a checkpoint's files with its manifest, even if the checkpoint cannot be opened.

    Args:
        ckpt: the checkpoint, or its path.
        manifest: by default, the one in its folder or next to it.
        partial: report a link out of the checkpoint as a finding and continue.
        threads: number of worker threads.
        progress: called with the fraction done; raise to cancel.

    Raises:
        UnsafeError: a file is a link out of the checkpoint, unless ``partial``.
    """
    place = ckpt.place.again() if isinstance(ckpt, Checkpoint) else ckpt if isinstance(ckpt, Place) else Place(ckpt)
    if not isinstance(manifest, Manifest):
        manifest = read(os.fsdecode(manifest)) if manifest is not None else load(place)
    looked = {name: _size(place, name, partial) for name in manifest.files}
    sizes = {name: size for name, (size, _) in looked.items()}
    refused = {name: str(error) for name, (_, error) in looked.items() if error is not None}
    present = [name for name, size in sizes.items() if size >= 0]
    found = [*_missing(manifest, sizes, refused), *_added(place, manifest, partial)]
    blocks = []
    for name in present:
        entry, size = manifest.files[name], sizes[name]
        if size != entry.size:
            found.append(_resized(name, entry, size, manifest))
        one = entry.blocks(name, manifest.grain)
        within = one.stops <= size
        blocks.append(one._replace(starts=one.starts[within], stops=one.stops[within]))
    hashed = 0
    for number, digests, failed in file_digests(place, blocks, threads=threads, progress=progress):
        name, one = present[number], blocks[number]
        entry = manifest.files[name]
        hashed += int((one.stops - one.starts).sum())
        bad = (digests != entry.digests[: len(digests)]).any(axis=1)
        bad[list(failed)] = True
        found += _flipped(
            name,
            entry,
            manifest,
            one.starts[bad],
            one.stops[bad],
            [failed.get(k, "") for k in np.flatnonzero(bad).tolist()],
        )
    checked = {
        "files": f"{len(present):,} of {len(manifest.files):,} files of the manifest, {hashed:,} of "
        f"{plural(manifest.nbytes, 'byte')} compared with their digests"
    }
    live = manifest.save.get("echo")
    if isinstance(live, Mapping) and type(live.get("equal")) is type(live.get("tensors")) is int:
        known = f"{live['equal']:,} of {live['tensors']:,} tensors were equal to the trainer's when they were saved"
        checked["live"] = known
    not_checked = {
        "before": f"damage from before the manifest was written, {manifest.made}",
        "meaning": "the values; verify with deep=True checks them",
    }
    if manifest.left_out:
        not_checked["left out"] = (
            f"{plural(len(manifest.left_out), 'entry')} of the folder: {some_of(manifest.left_out)}"
        )
    return Report.of(place.path, found, checked, not_checked)


def _size(place: Place, name: str, partial: bool) -> tuple[int, UnsafeError | None]:
    """Return a file's size, or -1 and the reason if its path leaves the place."""
    try:
        return stat_or_absent(place, name).size, None
    except UnsafeError as error:
        if not partial:
            raise
        return -1, error


def _missing(manifest: Manifest, sizes: Mapping[str, int], refused: Mapping[str, str]) -> Iterator[Finding]:
    for name, entry in manifest.files.items():
        if sizes[name] < 0:
            names = _tensors(entry, manifest, 0, entry.size)
            gone = f"not read ({refused[name]})" if name in refused else "gone"
            lost = f", and with it {plural(len(names), 'tensor')}: {some_of(names)}" if names else ""
            yield Finding(
                "manifest.missing",
                "error",
                name,
                f"the file of {plural(entry.size, 'byte')} is {gone}{lost}",
                {"file": name, "size": entry.size, "tensors": names[:LISTED]},
                "restore it from a copy",
            )


def _added(place: Place, manifest: Manifest, partial: bool) -> Iterator[Finding]:
    """Report added files: in the folder itself, and in subfolders that the manifest covers."""
    if place.file is not None:
        return
    covered = {name.split("/", 1)[0] for name in manifest.files if "/" in name}
    names = list(place.files)
    for folder in sorted(covered & set(place.folders)):
        names += sorted(walk(place, folder)[0])
    hint = "if it belongs to the checkpoint, write the manifest again; what a killed save left can be deleted"
    for name in names:
        if name not in manifest.files and name not in manifest.left_out and not is_manifest(place, name, manifest.path):
            size, refused = _size(place, name, partial)
            what = (
                f"a file of {plural(size, 'byte')}" if refused is None else f"an entry that was not read ({refused}),"
            )
            words = f"{what} that is not in the manifest"
            yield Finding("manifest.added", "warn", name, words, {"file": name}, hint)
    for folder in place.folders:
        if folder not in covered and folder not in manifest.left_out:
            yield Finding("manifest.added", "warn", folder, "a folder that is not in the manifest", {}, hint)


def _resized(name: str, entry: FileEntry, size: int, manifest: Manifest) -> Finding:
    evidence: dict[str, Any] = {"file": name, "size": entry.size, "found": size}
    if size > entry.size:
        words = f"{plural(size - entry.size, 'byte')} longer than the {entry.size:,} of the manifest"
        return Finding("manifest.size", "error", name, words, evidence, "restore it from a copy")
    names = _tensors(entry, manifest, size, entry.size)
    evidence |= {"start": size, "stop": entry.size, "tensors": names[:LISTED]}
    words = f"truncated: bytes {size:,} to {entry.size:,} are lost"
    words += f", with {plural(len(names), 'tensor')} or parts of them: {some_of(names)}" if names else ""
    return Finding("manifest.truncated", "error", name, words, evidence, "restore it from a copy")


def _flipped(
    name: str, entry: FileEntry, manifest: Manifest, starts: Any, stops: Any, reasons: Sequence[str]
) -> Iterator[Finding]:
    """Report one finding per stretch of adjacent blocks with the same content and the same kind of damage."""
    ends = np.cumsum(entry.lengths)
    rows = zip(
        starts.tolist(), stops.tolist(), np.searchsorted(ends, starts, side="right").tolist(), reasons, strict=True
    )
    stretches = 0
    for (_, reason), group in groupby(rows, key=lambda row: (row[2], row[3])):
        for start, stop, count in _stretches([(row[0], row[1]) for row in group]):
            stretches += 1
            if stretches <= LISTED:
                yield _difference(name, entry, manifest, start, stop, count, reason)
    if stretches > LISTED:
        yield Finding(
            "manifest.changed",
            "error",
            name,
            f"{stretches - LISTED:,} more byte ranges of this file differ",
            {"file": name, "stretches": stretches},
            "the file was rewritten; restore it from a copy",
        )


def _stretches(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    start, stop, count = ranges[0][0], ranges[0][0], 0
    for a, b in ranges:
        if a != stop:
            yield start, stop, count
            start, count = a, 0
        stop, count = b, count + 1
    yield start, stop, count


def _difference(
    name: str, entry: FileEntry, manifest: Manifest, start: int, stop: int, count: int, reason: str
) -> Finding:
    labels = _labels(entry, manifest, start, stop)
    tensors = _keys(labels)
    blocks = f"{count:,} blocks" if count > 1 else "a block"
    fact = f"cannot be read ({reason})" if reason else "differ from the manifest"
    words = f"bytes {start:,} to {stop:,} ({blocks}) {fact}: {some_of(labels, show=_named)}"
    evidence = {
        "file": name,
        "start": start,
        "stop": stop,
        "tensors": tensors[:LISTED],
        "parts": [list(label) for label in labels[:LISTED]],
    }
    rule = "manifest.unreadable" if reason else "manifest.changed"
    return Finding(rule, "error", tensors[0] if len(tensors) == 1 else name, words, evidence, "restore from a copy")


def _labels(entry: FileEntry, manifest: Manifest, start: int, stop: int) -> list[Label]:
    """Return the distinct contents of a range of a file."""
    ends = np.cumsum(entry.lengths)
    first, last = int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(ends, stop, side="left"))
    return [manifest.labels[owner] for owner in dict.fromkeys(entry.owners[first : last + 1].tolist())]


def _tensors(entry: FileEntry, manifest: Manifest, start: int, stop: int) -> list[str]:
    return _keys(_labels(entry, manifest, start, stop))


def _keys(labels: Sequence[Label]) -> list[str]:
    return list(dict.fromkeys(key for kind, *keys in labels if kind == "tensor" for key in keys))


_WORDS = {
    "tensor": "tensor {!r}",
    "archive": "the archive around tensor {!r} (zip headers, pickle, directory)",
    "object": "object {!r}",
    "record": "record {!r} of the archive",
    "header": "the file's header",
    "rest": "no tensor data: headers, directories, padding or a file without tensors",
}


def _named(label: Label) -> str:
    shared = f", shared with {some_of(label[2:])}" if label[2:] else ""
    return _WORDS[label[0]].format(label[1]) + shared
