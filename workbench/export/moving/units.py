"""The work of a thread on a part of a piece: fill a buffer step by step, update its digests, and write it."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.dtypes import ALL, DType, nbytes_of
from workbench.core.fingerprint import BlockDigests
from workbench.core.payload import Payloads
from workbench.core.region import Region
from workbench.core.scan import Announcer
from workbench.core.source import Source
from workbench.core.stream import BoxStream, ThreadBuffer
from workbench.export.atomic.writing import write_all, writing
from workbench.export.casts import CastError
from workbench.export.filemap import FileMap
from workbench.export.moving.copies import Copies

STEP = 1 << 20  #: bytes per step: they are still in a core's cache when they are hashed and written
MOST = 8 << 20  #: … if a step contains very many chunks
PIECE = 64 << 10  #: minimum bytes of a copy from one chunk


Unit = tuple[int, int, int, int]  #: file, piece, and its elements ``[first, stop)``


@dataclass
class Done:
    """A unit that was written: elements from ``first`` on, ``nbytes`` read and ``written`` bytes written."""

    file: int
    piece: int
    first: int
    nbytes: int
    written: int
    crc: int = 0
    source: list[bytes] = field(default_factory=list)
    target: list[bytes] = field(default_factory=list)
    cast: CastError | None = None


class Filler:
    """Fills units of pieces; one object for all threads."""

    def __init__(
        self,
        maps: Sequence[FileMap],
        copies: Copies,
        payloads: Payloads,
        paths: Sequence[str],
        *,
        durable: bool = False,
    ) -> None:
        """Create a filler of the files.

        Args:
            durable: sync written bytes before a task ends, because another machine cannot sync them.
        """
        self._maps, self._copies, self._payloads = maps, copies, payloads
        self._announcer, self._paths, self._durable = Announcer(), paths, durable
        self._base = np.cumsum([0, *(len(one.pieces) for one in maps)]).tolist()
        self._buffer = ThreadBuffer()

    def __call__(self, units: list[Unit]) -> list[Done]:
        opened: dict[int, int] = {}
        with ExitStack() as stack:
            for file, *_ in units:
                if file not in opened:
                    with writing(self._maps[file].name):
                        opened[file] = os.open(self._paths[file], os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
                    stack.callback(os.close, opened[file])
            stack.enter_context(self._payloads.ahead(*self._reach(units)))
            done = [self._unit(opened[unit[0]], *unit) for unit in units]
            for file, fd in opened.items() if self._durable else ():
                with writing(self._maps[file].name):
                    os.fsync(fd)
            return done

    def nbytes(self, units: list[Unit]) -> int:
        return sum(nbytes_of(ALL[self._copies.code[piece]], stop - first) for _, piece, first, stop in units)

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(Filler, durable=self._durable)
        return made, (self._maps, self._copies, self._payloads, self._paths)

    def part(self, tasks: list[list[Unit]]) -> tuple[Filler, list[list[Unit]]]:
        units = [unit for task in tasks for unit in task]
        files, pieces = sorted({unit[0] for unit in units}), sorted({unit[1] for unit in units})
        maps, copies, base = [], self._copies.of_pieces(np.array(pieces, np.int64)), np.array(self._base)
        number = {piece: at for at, piece in enumerate(pieces)}
        for file in files:
            mine = [piece for piece in pieces if base[file] <= piece < base[file + 1]]
            maps.append(self._maps[file].of_pieces(np.array(mine, np.int64) - base[file]))
        paths = [self._paths[file] for file in files]
        place = {file: at for at, file in enumerate(files)}
        local = [[(place[file], number[piece], a, b) for file, piece, a, b in task] for task in tasks]
        return Filler(maps, copies, self._payloads, paths, durable=True), local

    def key(self, units: list[Unit]) -> bytes:
        raise NotImplementedError("no export is cut in parts")

    def close(self) -> None:
        self._announcer.restore()

    def _unit(self, fd: int, file: int, piece: int, first: int, stop: int) -> Done:
        one, inside = self._maps[file], piece - self._base[file]
        old, new = ALL[self._copies.code[piece]], one.pieces.dtype_of(inside)
        change = one.pieces.change_of(inside, old)
        at = int(one.start[inside]) + nbytes_of(new, first)
        done = Done(file, piece, first, 0, 0)
        before, after = BlockDigests(), BlockDigests() if change is not None else None
        for flat in self._stream(piece, first, stop, old):
            before.update(flat)
            nbytes = flat.nbytes
            if change is not None and after is not None:
                bits, error = change(first + done.nbytes // old.itemsize, flat.view(old.raw))
                flat = bits.view(np.uint8)
                after.update(flat)
                if done.cast is None:
                    done.cast = error
                else:
                    done.cast.merge(error)
            if one.finish is not None:
                done.crc = zlib.crc32(flat, done.crc)
            with writing(one.name):
                write_all(fd, memoryview(flat), at + done.written)
            done.nbytes += nbytes
            done.written += flat.nbytes
        done.source = before.digests()
        done.target = done.source if after is None else after.digests()
        return done

    def _reach(self, units: list[Unit]) -> tuple[Ints, Ints, Ints]:
        """Return the chunk rows that units are made of, and the byte ranges of their elements.

        Chunks that are not one run of a unit are included only if it needs all of them; of the others it reads a part.
        """
        copies, found = self._copies, [np.empty((3, 0), np.int64)]
        for _, piece, first, stop in units if self._payloads.pool.at_once > 1 else ():  # a disk reads on demand
            if ALL[copies.code[piece]].packed:
                continue
            mine = slice(int(copies.ptr[piece]), int(copies.ptr[piece + 1]))
            lo, hi, run = copies.lo[mine], copies.hi[mine], copies.run[mine]
            rows, itemsize = copies.row[mine], ALL[copies.code[piece]].itemsize
            low = np.where(run, copies.at[mine] + np.maximum(first - lo, 0), 0) * itemsize
            high = np.where(run, (copies.at[mine] + np.minimum(stop, hi) - lo) * itemsize, self._nbytes(rows))
            whole = (first <= lo) & (hi <= stop) & (box.volume(copies.sizes[mine]) * itemsize == self._nbytes(rows))
            found.append(np.stack([rows, low, high])[:, (run | whole) & (lo < stop) & (first < hi)])
        rows, low, high = np.concatenate(found, axis=1)
        return rows, low, high

    def _nbytes(self, rows: Ints) -> Ints:
        return self._payloads.catalog.chunk_nbytes[rows]

    # ---- the stream of a piece, step by step ----

    def _stream(self, piece: int, first: int, stop: int, dtype: DType) -> Iterator[Array]:
        """Yield the bytes of its elements ``[first, stop)``, valid until the next iteration."""
        copies = self._copies
        a, b = int(copies.ptr[piece]), int(copies.ptr[piece + 1])
        if dtype.packed:
            self._announce(int(copies.row[a]))
            whole = self._payloads.region(int(copies.row[a]))
            for at in range(0, whole.size, STEP):
                yield whole.flat(at, min(at + STEP, whole.size), self._buffer(STEP))
            return
        begins = None
        if copies.run[a:b].all() and not copies.twice[piece]:  # one after the other: only those in this unit
            a, b = a + bisect_right(copies.hi[a:b], first), a + bisect_left(copies.lo[a:b], stop)
            begins = self._straight(a, b)
        if begins is not None:
            yield from self._read(a, b, begins, first, stop, dtype.itemsize)
        else:
            yield from self._gather(piece, a, b, first, stop, dtype)

    def _straight(self, a: int, b: int) -> list[int] | None:
        """Return the byte of its file at which each chunk begins, or ``None`` if any chunk must be decoded."""
        found = []
        for row in self._copies.row[a:b].tolist():
            start = self._payloads.straight(row)
            if start is None:
                return None
            found.append(start)
        return found

    def _read(self, a: int, b: int, begins: list[int], first: int, stop: int, itemsize: int) -> Iterator[Array]:
        """Read consecutive runs from the files into the buffer."""
        copies = self._copies
        columns = [column[a:b].tolist() for column in (copies.row, copies.lo, copies.hi, copies.at)]
        runs = list(zip(begins, *columns, strict=True))
        step, number = STEP // itemsize, 0
        for low in range(first, stop, step):
            high = min(low + step, stop)
            out = self._buffer((high - low) * itemsize)
            place = low
            while place < high:
                begin, row, lo, hi, at = runs[number]
                end = min(hi, high)
                source = self._announce(row)
                part = out[(place - low) * itemsize : (end - low) * itemsize]
                source.read_into(part, begin + (at + place - lo) * itemsize)
                place = end
                number += end == hi
            yield out

    def _gather(self, piece: int, a: int, b: int, first: int, stop: int, dtype: DType) -> Iterator[Array]:
        """Gather boxes of the chunks in the buffer."""
        copies, raw = self._copies, dtype.raw
        nbytes = STEP
        while nbytes < MOST and nbytes < PIECE * (b - a):  # many chunks: fewer, larger copies
            nbytes *= 2
        cuts = np.append(np.arange(first, stop, nbytes // raw.itemsize), stop)
        columns = (getattr(copies, name)[a:b] for name in ("row", "lo", "hi", "source", "dest", "sizes"))
        yield from BoxStream(self._shape(piece), raw, *columns).read(self._payloads, cuts, self._opened, self._buffer)

    def _opened(self, row: int) -> Region:
        self._announce(row)
        return self._payloads.region(row).widened(self._payloads.catalog.shape.shape[1])

    def _shape(self, piece: int) -> Array:
        file = bisect_right(self._base, piece) - 1
        return self._maps[file].pieces.shape[piece - self._base[file]]

    def _announce(self, row: int) -> Source:
        return self._announcer.announce(self._payloads.pool, int(self._payloads.catalog.file[row]))
