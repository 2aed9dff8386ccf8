"""Manifests: digests of every byte of a checkpoint, to detect and locate later changes.

::

    write    files cut into segments (tensor, header, object …)  ──►  digests, and a fingerprint per tensor
    check    the files again, with only the manifest             ──►  which blocks differ, and their contents
    compare  two manifests, no checkpoint                        ──►  tensors added, removed, changed, renamed, moved

A manifest records the files' state when it was written, not that they were correct. Checkpoints too damaged to open
can still be checked: only names, sizes and bytes are compared.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

import numpy as np

from workbench.analysis.folder import files_of
from workbench.analysis.manifest_entries import FileEntry, Manifest, TensorEntry, grain_for
from workbench.analysis.manifest_file import FORMAT, INSIDE, holds_other, is_pending, pending, read, save
from workbench.analysis.segments import FileSegments, Labels, cut_files
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.core.blocks import DIGEST, FileBlocks, file_digests
from workbench.core.executors import using
from workbench.core.fingerprint import combine, tensor_fingerprints
from workbench.core.place import Place, stat_or_absent
from workbench.core.remote.destination import Destination
from workbench.core.remote.url import is_url, on_disk, parse
from workbench.core.scan import Progress
from workbench.core.source import needs_descriptors
from workbench.errors import ChangedError, MissingFileError, UsageError

Known = Mapping[str, Mapping[tuple[int, int], bytes]]  #: by file and block ``(start, stop)``, the block's xxh3_128
MARKER = ".metadata"  #: the commit marker of the only format that is overwritten in place, DCP
BUDGET = 1 << 18  #: approximate number of digests of a manifest: 6 MB of JSON


def beside(path: str) -> str:
    """Return the default path of a manifest: next to the checkpoint, named after it."""
    real = parse(path).shown if is_url(path) else os.path.abspath(os.path.expanduser(path))
    return real + ".manifest.json"


def find(path: str | os.PathLike[str] | Place) -> str:
    """Return the path, or the URL, of a checkpoint's manifest: in its folder, or next to it.

    Raises:
        MissingFileError: neither exists.
        NotACheckpointError: a URL does not exist.
    """
    if isinstance(path, Place) or is_url(os.fsdecode(path)):
        place = path if isinstance(path, Place) else Place(path)
        if not place.local:
            return _found(place).path
        path = place.path
    where = os.fsdecode(path)
    inside = _inside(Place(where)) if os.path.isdir(where) else INSIDE
    for name in (os.path.join(where, inside), beside(where)):
        if os.path.isfile(name):
            return name
    raise _missing_manifest(where)


def load(path: str | os.PathLike[str] | Place) -> Manifest:
    """Load a manifest from its file, or the manifest of a checkpoint: a path, a URL, or a checkpoint's place."""
    if isinstance(path, Place):
        return read(find(path) if path.local else _found(path))
    name = on_disk(os.fsdecode(path))
    if is_url(name):
        return read(name) if name.endswith(".json") else read(_found(Place(name)))
    if os.path.isdir(name) or not name.endswith(".json"):
        name = find(name)
    return read(name)


def _found(place: Place) -> Place:
    """Return the place of the manifest of a checkpoint in a store."""
    if place.file is None and place.exists(name := _inside(place)):
        return place.sub(name)
    above, name = place.above, f"{place.name}.manifest.json"
    if above is None or not above.exists(name):
        raise _missing_manifest(place.path)
    return above.sub(name)


def _inside(place: Place) -> str:
    """Return the name of a folder's manifest: :data:`INSIDE`, or a name with the digest of the folder's commit marker.

    A save that was interrupted before renaming it leaves it under that name, and every save into a store does.
    """
    with suppress(MissingFileError, OSError):  # what cannot be read has no such manifest
        if any(map(is_pending, place.files)) and MARKER in place.files:
            name = pending(place.read(MARKER))
            if name in place.files:
                return name
    return INSIDE


def _missing_manifest(path: str) -> MissingFileError:
    return MissingFileError(
        f"{path!r} has no manifest, neither {INSIDE!r} inside nor {os.path.basename(beside(path))!r} next to it; "
        "write one with `workbench manifest write`"
    )


@needs_descriptors()
def write(
    ckpt: Checkpoint,
    dest: str | os.PathLike[str] | None = None,
    *,
    inside: bool = False,
    known: Known = MappingProxyType({}),
    threads: int | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Manifest:
    """Hash every byte of every file of a checkpoint, and every tensor, and write the digests to a file.

    Tensors stored in one piece are read once; sharded ones are read a second time, in the order of their elements.

    Args:
        ckpt: the checkpoint (files of a selection are hashed completely, too).
        dest: the manifest's file, a path or a URL; by default next to the checkpoint, ``step-4000.manifest.json``.
        inside: put it into the checkpoint's folder instead, as ``.workbench-manifest.json``.
        known: by file, digests of blocks that the writer has computed already; these blocks are not read.
        threads: number of worker threads.
        progress: called with the fraction done; raise to cancel, which leaves no manifest, or the older one unchanged.
        executor: a ``concurrent.futures.Executor`` whose workers do the reading: a process pool with the start method
            ``spawn``, or ``distributed.Client(…).get_executor()``. The result is the same, bit for bit.

    Raises:
        ChangedError: a file changed during the pass.
        OpenError: a file cannot be read.
        UsageError: the manifest's place holds something that is not a manifest, or ``inside`` a checkpoint that is one
            file.
        WriteError: the manifest's place cannot be written to.
        WorkerError: the executor lost its workers or its scheduler.
    """
    with using(executor):
        manifest = computed(ckpt, dest, inside=inside, known=known, threads=threads, progress=progress)
    assert manifest.path is not None
    save(manifest, manifest.path)
    return manifest


def computed(
    ckpt: Checkpoint,
    dest: str | os.PathLike[str] | None = None,
    *,
    inside: bool = False,
    known: Known = MappingProxyType({}),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Compute the manifest that :func:`write` stores; nothing is written."""
    place = ckpt.place.again()
    if inside and place.file is not None:
        raise UsageError(f"{ckpt.path!r} is one file and has no folder of its own; put its manifest next to it")
    default = f"{place.root}/{_inside(place)}" if inside else beside(ckpt.path)
    path = default if dest is None else on_disk(os.fsdecode(dest))
    if is_url(path):
        Destination(path, None, "a manifest")  # a store that is not written to is refused before anything is read
    if holds_other(path, FORMAT.encode()):
        raise UsageError(f"{path!r} exists and is not a manifest, so it is not replaced; name another file")
    names, left_out = files_of(ckpt)
    names = [name for name in names if not is_manifest(place, name, path)]
    stats = {name: place.stat(name) for name in names}
    for file, opened in enumerate(ckpt.catalog.file_stats):
        if opened.size >= 0:
            ckpt.payloads.pool.check(file)  # the manifest describes the opened file, not a later replacement
    labels = Labels()
    cut = cut_files(ckpt.payloads, {name: stat.size for name, stat in stats.items()}, labels)
    grain = grain_for((one.lengths for one in cut.segments.values()), BUDGET)
    empty = np.empty((0, 16), np.uint8)
    kinds = _kinds(ckpt)
    entries = {
        name: FileEntry(stat.size, kinds.get(name, "other"), *cut.segments[name], empty) for name, stat in stats.items()
    }
    blocks = [entry.blocks(name, grain) for name, entry in entries.items()]
    alone = _own_blocks(ckpt, cut, grain)
    rest = np.setdiff1d(np.arange(len(ckpt.catalog)), np.array([t for row in alone.values() for t in row], np.int64))
    total = sum(stat.size for stat in stats.values())
    more = int(ckpt.catalog.tensor_nbytes[rest].sum())
    first, second = _shares(progress, total, more)
    tensors: dict[int, str] = {}
    for number, digests, failed in _digests(place, blocks, known, threads, first):
        name = names[number]
        if failed and stat_or_absent(place, name, fresh=True) != stats[name]:
            raise ChangedError(
                f"file {name!r} changed while its manifest was written: {next(iter(failed.values()))}; "
                "write it again once the save is over"
            )
        if failed:
            raise MissingFileError(f"file {name!r} cannot be read: {next(iter(failed.values()))}")
        entries[name] = replace(entries[name], digests=digests)
        tensors |= _known(ckpt, cut, name, alone.get(name, []), entries[name])
    wrong: dict[int, str] = {}
    passes = tensor_fingerprints(
        ckpt.payloads,
        tensors=rest,
        threads=threads,
        progress=second,
        on_error=lambda t, error: wrong.update({t: str(error)}),
    )
    tensors |= {tensor: found.hex for tensor, found in passes}
    for name, stat in stats.items():
        if place.stat(name) != stat:
            raise ChangedError(
                f"file {name!r} changed while its manifest was written; write it again once the save is over"
            )
    return Manifest(
        path,
        datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        place.name,
        ckpt.format,
        ckpt.step,
        grain,
        labels,
        entries,
        {
            key: TensorEntry(ckpt.catalog.dtype_of(t).name, ckpt.catalog.shape_of(t), tensors.get(t), wrong.get(t, ""))
            for t, key in enumerate(ckpt.catalog.keys)
        },
        left_out,
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


def is_manifest(place: Place, name: str, path: str | None) -> bool:
    """Return whether a file of the folder is the manifest at ``path``, an older one, or a temporary one."""
    if name == INSIDE or is_pending(name) or (name.startswith(f".{INSIDE}.") and name.endswith(".tmp")):
        return True
    if path is None or is_url(path) or not place.local:
        return path == f"{place.root}/{name}"
    return os.path.realpath(os.path.join(place.root, name)) == os.path.realpath(path)


def _kinds(ckpt: Checkpoint) -> dict[str, str]:
    catalog = ckpt.catalog
    kinds = dict.fromkeys(catalog.metadata_files, "metadata")
    for file in {*catalog.file.tolist(), *catalog.objects.file.tolist()}:
        kinds[catalog.files[file]] = "data"
    return kinds


def _digests(
    place: Place, blocks: Sequence[FileBlocks], known: Known, threads: int | None, progress: Progress | None
) -> Iterator[tuple[int, Array, dict[int, str]]]:
    """Return the result of :func:`file_digests` without reading known blocks."""
    reused = []
    for one in blocks:
        mine = known.get(one.file, {})
        spans = zip(one.starts.tolist(), one.stops.tolist(), strict=True)
        reused.append({at: mine[span] for at, span in enumerate(spans) if span in mine})
    unknown = [np.setdiff1d(np.arange(len(one.starts)), list(mine)) for one, mine in zip(blocks, reused, strict=True)]
    rest = [FileBlocks(one.file, one.starts[at], one.stops[at]) for one, at in zip(blocks, unknown, strict=True)]
    for number, found, failed in file_digests(place, rest, threads=threads, progress=progress):
        digests = np.empty((len(blocks[number].starts), DIGEST), np.uint8)
        digests[unknown[number]] = found
        for at, digest in reused[number].items():
            digests[at] = np.frombuffer(digest, np.uint8)
        yield number, digests, {int(unknown[number][at]): why for at, why in failed.items()}


def _own_blocks(ckpt: Checkpoint, cut: FileSegments, grain: int) -> dict[str, list[int]]:
    """Return by file the tensors whose blocks are exactly the file's own blocks."""
    found: dict[str, list[int]] = defaultdict(list)
    if grain:
        return found
    ends = {name: np.cumsum(one.lengths) for name, one in cut.segments.items()}
    for tensor, (name, start) in cut.whole.items():
        nbytes = int(ckpt.catalog.tensor_nbytes[tensor])
        if nbytes and name in ends:
            at = int(np.searchsorted(ends[name], start + nbytes))
            if at < len(ends[name]) and ends[name][at] == start + nbytes and cut.segments[name].lengths[at] == nbytes:
                found[name].append(tensor)
    return found


def _known(ckpt: Checkpoint, cut: FileSegments, name: str, tensors: list[int], entry: FileEntry) -> dict[int, str]:
    """Return fingerprints of tensors whose blocks are blocks of a file."""
    found: dict[int, str] = {}
    starts = entry.blocks(name, 0).starts
    for tensor in tensors:
        start = cut.whole[tensor][1]
        first, last = np.searchsorted(starts, [start, start + int(ckpt.catalog.tensor_nbytes[tensor])]).tolist()
        digests = [row.tobytes() for row in entry.digests[first:last]]
        found[tensor] = combine(ckpt.catalog.dtype_of(tensor), ckpt.catalog.shape_of(tensor), digests).hex
    return found


def _shares(progress: Progress | None, first: int, second: int) -> tuple[Progress | None, Progress | None]:
    if progress is None:
        return None, None
    whole = max(first + second, 1)
    return lambda share: progress(share * first / whole), lambda share: progress((first + share * second) / whole)
