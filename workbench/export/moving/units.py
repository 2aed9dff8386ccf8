"""The work of a thread on a part of a piece: fill a buffer step by step, update its digests, and write it."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from workbench.core.dtypes import ALL, nbytes_of
from workbench.core.fingerprint import BlockDigests
from workbench.core.payload import Payloads
from workbench.core.transfer.streams import StreamReader, Streams, StreamUnit, renumbered
from workbench.export.atomic.writing import write_all, writing
from workbench.export.casts import CastError
from workbench.export.filemap import FileMap


@dataclass
class Done:
    """A unit that was written: from byte ``first`` of its source on, ``nbytes`` read and ``written`` bytes written."""

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
        streams: Streams,
        payloads: Payloads,
        paths: Sequence[str],
        *,
        durable: bool = False,
    ) -> None:
        """Create a filler of the files.

        Args:
            streams: the pieces of all files.
            durable: sync written bytes before a task ends, because another machine cannot sync them.
        """
        self._maps, self._paths, self._durable = maps, paths, durable
        self._reader = StreamReader(payloads, streams)
        self._base = np.cumsum([0, *(len(one.pieces) for one in maps)]).tolist()

    def file_of(self, unit: StreamUnit) -> int:
        """Return the file that a unit is written to."""
        return bisect_right(self._base, unit.stream) - 1

    def __call__(self, units: list[StreamUnit]) -> list[Done]:
        opened: dict[int, int] = {}
        with ExitStack() as stack:
            for file in map(self.file_of, units):
                if file not in opened:
                    with writing(self._maps[file].name):
                        opened[file] = os.open(self._paths[file], os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
                    stack.callback(os.close, opened[file])
            stack.enter_context(self._reader.payloads.ahead(*self._reader.reach(units)))
            done = [self._unit(opened, unit) for unit in units]
            for file, fd in opened.items() if self._durable else ():
                with writing(self._maps[file].name):
                    os.fsync(fd)
            return done

    def nbytes(self, units: list[StreamUnit]) -> int:
        return sum(stop - first for _, first, stop in units)

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(Filler, durable=self._durable)
        return made, (self._maps, self._reader.streams, self._reader.payloads, self._paths)

    def part(self, tasks: list[list[StreamUnit]]) -> tuple[Filler, list[list[StreamUnit]]]:
        pieces, local = renumbered(tasks)
        ends = np.searchsorted(pieces, self._base).tolist()  # of the pieces before each file
        files = [file for file in range(len(self._maps)) if ends[file] < ends[file + 1]]
        maps = [self._maps[file].of_pieces(pieces[ends[file] : ends[file + 1]] - self._base[file]) for file in files]
        streams, paths = self._reader.streams.take(pieces), [self._paths[file] for file in files]
        return Filler(maps, streams, self._reader.payloads, paths, durable=True), local

    def key(self, units: list[StreamUnit]) -> bytes:
        raise NotImplementedError("no export is cut in parts")

    def close(self) -> None:
        self._reader.close()

    def _unit(self, opened: Mapping[int, int], unit: StreamUnit) -> Done:
        file, (stream, first, _) = self.file_of(unit), unit
        one, inside, fd = self._maps[file], stream - self._base[file], opened[file]
        old, new = ALL[self._reader.streams.code[stream]], one.pieces.dtype_of(inside)
        change = one.pieces.change_of(inside, old)
        begin = first if change is None else first // old.itemsize  # elements, if they change
        at = int(one.start[inside]) + (first if change is None else nbytes_of(new, begin))
        done = Done(file, stream, first, 0, 0)
        before, after = BlockDigests(), BlockDigests() if change is not None else None
        for flat in self._reader.read(unit):
            before.update(flat)
            nbytes = flat.nbytes
            if change is not None and after is not None:
                bits, error = change(begin + done.nbytes // old.itemsize, flat.view(old.raw))
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
