"""Manifests: what every byte of a checkpoint was, so that a later flip is found and has a name.

::

    write    files cut into segments (tensor, header, object …)  ──►  a digest each, a fingerprint a tensor
    check    the files again, with the manifest alone            ──►  which blocks differ, and what lies in them
    compare  two manifests, no checkpoint                        ──►  tensors added, removed, changed, renamed, moved

A manifest says what the files were when it was written, not that they were right. Formats whose files are damaged so
that they cannot be opened any more can still be checked: only names, sizes and bytes are looked at.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import numpy as np

from workbench.analysis.folder import files_of
from workbench.analysis.manifest_entries import FileEntry, Manifest, TensorEntry, grain_for
from workbench.analysis.manifest_file import FORMAT, INSIDE, holds_other, read, save
from workbench.analysis.segments import Cut, Labels, cut_files
from workbench.checkpoint import Checkpoint
from workbench.core.blocks import DIGEST, Blocks, file_digests
from workbench.core.fingerprint import combine, tensor_fingerprints
from workbench.core.place import Place, stat_or_absent
from workbench.core.scan import Tick
from workbench.core.source import needs_descriptors
from workbench.errors import ChangedError, MissingFileError, UsageError

__all__ = ["Known", "Manifest", "beside", "find", "is_manifest", "load", "write"]

Array = np.ndarray[Any, Any]
Known = Mapping[str, Mapping[tuple[int, int], bytes]]  #: by file and block ``(start, stop)``, the block's xxh3_128
BUDGET = 1 << 18  #: digests of a manifest, about: 6 MB of JSON


def beside(path: str) -> str:
    """Where a manifest lies by default: beside the checkpoint, named after it."""
    real = os.path.abspath(os.path.expanduser(path))
    return real + ".manifest.json"


def find(path: str | os.PathLike[str]) -> str:
    """The manifest of a checkpoint: in its folder, or beside it.

    Raises:
        MissingFileError: neither is there.
    """
    place = os.fsdecode(path)
    for name in (os.path.join(place, INSIDE), beside(place)):
        if os.path.isfile(name):
            return name
    raise MissingFileError(
        f"{place!r} has no manifest, neither {INSIDE!r} inside nor {os.path.basename(beside(place))!r} beside it; "
        "write one with `workbench manifest write`"
    )


def load(path: str | os.PathLike[str]) -> Manifest:
    """A manifest from its file, or that of a checkpoint from its folder or beside it."""
    name = os.fsdecode(path)
    if os.path.isdir(name) or not name.endswith(".json"):
        name = find(name)
    return read(name)


@needs_descriptors()
def write(
    ckpt: Checkpoint,
    dest: str | os.PathLike[str] | None = None,
    *,
    inside: bool = False,
    known: Known = MappingProxyType({}),
    threads: int | None = None,
    tick: Tick | None = None,
) -> Manifest:
    """Hash every byte of every file of a checkpoint, and every tensor, and keep that in a file.

    Tensors that one piece of a file holds whole are read once; sharded ones are read a second time, in the order of
    their elements.

    Args:
        ckpt: the checkpoint, all of it (a selection's files are hashed whole as well).
        dest: the manifest's file; by default beside the checkpoint, ``step-4000.manifest.json``.
        inside: put it into the checkpoint's folder instead, as ``.workbench-manifest.json``.
        known: by file, digests of blocks that who wrote them has made already; these are not read.
        threads: how many work side by side.
        tick: told the share that is done; raising there leaves no manifest, and an older one as it was.

    Raises:
        ChangedError: a file changed meanwhile.
        OpenError: a file cannot be read.
        UsageError: the manifest's place cannot be written to or holds something that is not a manifest, or ``inside``
            a checkpoint that is one file.
    """
    place = Place(ckpt.path)
    if inside and place.file is not None:
        raise UsageError(f"{ckpt.path!r} is one file and has no folder of its own; leave its manifest beside it")
    path = os.fsdecode(dest) if dest is not None else os.path.join(place.root, INSIDE) if inside else beside(ckpt.path)
    if holds_other(path, FORMAT.encode()):
        raise UsageError(f"{path!r} exists and is not a manifest, so it is not replaced; name another file")
    names, left_out = files_of(ckpt)
    names = [name for name in names if not is_manifest(place, name, path)]
    stats = {name: place.stat(name) for name in names}
    for file, opened in enumerate(ckpt.catalog.file_stats):
        if opened.size >= 0:
            ckpt.payloads.pool.check(file)  # a manifest of what was opened, not of what has taken its place
    labels = Labels()
    cut = cut_files(ckpt.payloads, {name: stat.size for name, stat in stats.items()}, labels)
    grain = grain_for((one.lengths for one in cut.segments.values()), BUDGET)
    empty = np.empty((0, 16), np.uint8)
    kinds = _kinds(ckpt)
    entries = {
        name: FileEntry(stat.size, kinds.get(name, "other"), *cut.segments[name], empty) for name, stat in stats.items()
    }
    blocks = [entry.blocks(name, grain) for name, entry in entries.items()]
    alone = _alone(ckpt, cut, grain)
    rest = np.setdiff1d(np.arange(len(ckpt.catalog)), np.array([t for row in alone.values() for t in row], np.int64))
    total = sum(stat.size for stat in stats.values())
    more = int(ckpt.catalog.tensor_nbytes[rest].sum())
    first, second = _shares(tick, total, more)
    tensors: dict[int, str] = {}
    for number, digests, failed in _digests(place, blocks, known, threads, first):
        name = names[number]
        if failed and stat_or_absent(place, name, fresh=True) != stats[name]:
            raise ChangedError(
                f"file {name!r} changed while its manifest was made: {next(iter(failed.values()))}; "
                "make it again when all is written"
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
        tick=second,
        on_error=lambda t, error: wrong.update({t: str(error)}),
    )
    tensors |= {tensor: found.hex for tensor, found in passes}
    for name, stat in stats.items():
        if place.stat(name) != stat:
            raise ChangedError(f"file {name!r} changed while its manifest was made; make it again when all is written")
    manifest = Manifest(
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
    save(manifest, path)
    return manifest


# ---- writing ---------------------------------------------------------------------------------------------------------


def is_manifest(place: Place, name: str, path: str | None) -> bool:
    """Whether a file of the folder is the manifest at ``path``, an older one, or a temporary of one."""
    if name == INSIDE or (name.startswith(f".{INSIDE}.") and name.endswith(".tmp")):
        return True
    return path is not None and os.path.realpath(os.path.join(place.root, name)) == os.path.realpath(path)


def _kinds(ckpt: Checkpoint) -> dict[str, str]:
    catalog = ckpt.catalog
    kinds = dict.fromkeys(catalog.metadata_files, "metadata")
    for file in {*catalog.file.tolist(), *catalog.objects.file.tolist()}:
        kinds[catalog.files[file]] = "data"
    return kinds


def _digests(
    place: Place, blocks: Sequence[Blocks], known: Known, threads: int | None, tick: Tick | None
) -> Iterator[tuple[int, Array, dict[int, str]]]:
    """As :func:`file_digests`; what is known is not read."""
    told = []
    for one in blocks:
        mine = known.get(one.file, {})
        spans = zip(one.starts.tolist(), one.stops.tolist(), strict=True)
        told.append({at: mine[span] for at, span in enumerate(spans) if span in mine})
    unknown = [np.setdiff1d(np.arange(len(one.starts)), list(mine)) for one, mine in zip(blocks, told, strict=True)]
    rest = [Blocks(one.file, one.starts[at], one.stops[at]) for one, at in zip(blocks, unknown, strict=True)]
    for number, found, failed in file_digests(place, rest, threads=threads, tick=tick):
        digests = np.empty((len(blocks[number].starts), DIGEST), np.uint8)
        digests[unknown[number]] = found
        for at, digest in told[number].items():
            digests[at] = np.frombuffer(digest, np.uint8)
        yield number, digests, {int(unknown[number][at]): why for at, why in failed.items()}


def _alone(ckpt: Checkpoint, cut: Cut, grain: int) -> dict[str, list[int]]:
    """By file, the tensors of which the file's blocks are the blocks, from the first to the last."""
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


def _known(ckpt: Checkpoint, cut: Cut, name: str, tensors: list[int], entry: FileEntry) -> dict[int, str]:
    """Fingerprints of tensors whose blocks are blocks of a file."""
    found: dict[int, str] = {}
    starts = entry.blocks(name, 0).starts
    for tensor in tensors:
        start = cut.whole[tensor][1]
        first, last = np.searchsorted(starts, [start, start + int(ckpt.catalog.tensor_nbytes[tensor])]).tolist()
        digests = [row.tobytes() for row in entry.digests[first:last]]
        found[tensor] = combine(ckpt.catalog.dtype_of(tensor), ckpt.catalog.shape_of(tensor), digests).hex
    return found


def _shares(tick: Tick | None, first: int, second: int) -> tuple[Tick | None, Tick | None]:
    if tick is None:
        return None, None
    whole = max(first + second, 1)
    return lambda share: tick(share * first / whole), lambda share: tick((first + share * second) / whole)
