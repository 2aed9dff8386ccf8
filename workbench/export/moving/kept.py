"""Pieces that an earlier run of the same plan wrote: kept only after they were read back.

A piece is kept if its bytes have the fingerprint in the journal. The bytes around pieces are written again. Ranges of
a file with neither a literal nor a piece must contain zeros; otherwise, or if its size differs, the file is restarted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from workbench.core.executors import in_order
from workbench.core.fingerprint import BlockDigests, combine
from workbench.core.scan import Progress
from workbench.core.source import PreadSource
from workbench.core.words import plural
from workbench.errors import OpenError
from workbench.export.atomic.journal import Kept, Written
from workbench.export.filemap import FileMap

STEP = 1 << 20  #: bytes read at a time
TASK = 32 << 20  #: bytes in one task of a thread


def kept_pieces(
    maps: Sequence[FileMap],
    paths: Sequence[str],
    recorded: Mapping[str, Mapping[int, Written]],
    *,
    threads: int,
    progress: Progress | None = None,
) -> Kept:
    """Read the recorded pieces back.

    Args:
        recorded: by file and piece, the result recorded by an earlier run.
        progress: called with the fraction of the plan's bytes kept so far.

    Returns:
        the intact pieces, by file; a file is missing here if it has to be restarted.
    """
    found: Kept = {}
    total, done = max(sum(one.size for one in maps), 1), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="workbench-kept") as pool:
        try:
            tasks = _tasks(maps, paths, recorded, found)
            for file, results in in_order(pool, lambda task: (task[0], _read_again(*task[1:])), tasks):
                for piece, written, crc in results:
                    found[file][piece] = (written, crc)
                    done += int(maps[file].pieces.nbytes[piece])
                if progress is not None:
                    progress(done / total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return found


def kept_notes(kept: Kept, maps: Sequence[FileMap]) -> list[str]:
    """Return a sentence about what was kept, for a report; empty if nothing was kept."""
    if not any(kept.values()):
        return []
    nbytes = sum(int(maps[file].pieces.nbytes[piece]) for file, pieces in kept.items() for piece in pieces)
    pieces, files = sum(map(len, kept.values())), sum(1 for one in kept.values() if one)
    return [
        f"resumed an unfinished export: {pieces:,} of {sum(len(one.pieces) for one in maps):,} tensors, "
        f"{plural(nbytes, 'byte')} in {plural(files, 'file')}, were read back, found intact and kept"
    ]


def _tasks(
    maps: Sequence[FileMap], paths: Sequence[str], recorded: Mapping[str, Mapping[int, Written]], found: Kept
) -> Iterator[tuple[int, FileMap, str, list[tuple[int, Written]]]]:
    """Yield runs of recorded pieces of one file; start the entry of each resumed file."""
    for file, (one, path) in enumerate(zip(maps, paths, strict=True)):
        pieces = [(at, written) for at, written in recorded.get(one.name, {}).items() if 0 <= at < len(one.pieces)]
        if not pieces or not _is_ours(one, path):
            continue
        found[file] = {}
        sizes = one.pieces.nbytes
        turn = np.cumsum([int(sizes[at]) for at, _ in pieces]) // TASK
        cuts = [0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(pieces)]
        for a, b in pairwise(cuts):
            yield file, one, path, pieces[a:b]


def _is_ours(one: FileMap, path: str) -> bool:
    """Return whether a file may be resumed: it has the right size, and zeros in its gaps."""
    try:
        if os.path.getsize(path) != one.size:
            return False
        source = PreadSource(path, one.name)
        return not any(source.read(a, b).any() for a, b in _gaps(one))
    except (OSError, OpenError):
        return False


def _gaps(one: FileMap) -> Iterator[tuple[int, int]]:
    """Yield the ranges to which nothing is written, in parts."""
    later = one.finish([0] * len(one.pieces)) if one.finish is not None else []  # only the places count
    taken = sorted(
        [(at, at + len(data)) for at, data in [*one.literals, *later]]
        + list(zip(one.start.tolist(), (one.start + one.pieces.nbytes).tolist(), strict=True))
    )
    end = 0
    for start, stop in [*taken, (one.size, one.size)]:
        for at in range(end, start, STEP):
            yield at, min(at + STEP, start)
        end = max(end, stop)


def _read_again(one: FileMap, path: str, pieces: list[tuple[int, Written]]) -> list[tuple[int, Written, int]]:
    """Return the pieces that match the record."""
    found = []
    try:
        source = PreadSource(path, one.name)
    except OpenError:
        return []
    buffer = np.empty(STEP, np.uint8)
    for piece, written in pieces:
        digests, crc = BlockDigests(), 0
        start, nbytes = int(one.start[piece]), int(one.pieces.nbytes[piece])
        try:
            for at in range(0, nbytes, STEP):
                flat = buffer[: min(STEP, nbytes - at)]
                source.read_into(flat, start + at)
                digests.update(flat)
                if one.finish is not None:
                    crc = zlib.crc32(flat, crc)
        except (OSError, OpenError):  # a bad sector: its content is written again
            continue
        target = combine(one.pieces.dtype_of(piece), one.pieces.shape_of(piece), digests.digests())
        if target.hex == written.target.hex:
            same = written.cast is None
            found.append((piece, Written(target if same else written.source, target, written.cast), crc))
    return found
