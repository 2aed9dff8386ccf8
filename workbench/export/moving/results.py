"""The progress of a pass: units make up pieces, and pieces make up files."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.crc32 import crc32_of_two
from workbench.core.dtypes import ALL, DType
from workbench.core.fingerprint import BlockDigests, combine
from workbench.export.atomic.journal import Kept, Written
from workbench.export.casts import CastError
from workbench.export.filemap import FileMap
from workbench.export.moving.units import Done


class ExportResults:
    """The results so far. Pieces of all files are numbered consecutively, as in units.

    Attributes:
        unrecorded: by file, bytes of the pieces that :meth:`take` has not returned yet.
    """

    def __init__(self, maps: Sequence[FileMap], code: Ints, kept: Kept, piece: Ints) -> None:
        """Create the results of pieces, complete once all their units are added.

        Args:
            code: ``(P,)`` element type of each piece's source.
            kept: pieces that an earlier run wrote.
            piece: the piece of each expected unit; pieces without units have no elements to read.
        """
        self._maps, self._code = maps, code
        self._base = np.cumsum([0, *(len(one.pieces) for one in maps)]).tolist()
        file = np.searchsorted(self._base, piece, side="right") - 1
        self._units_of_file = np.bincount(file, minlength=len(maps)).tolist()
        self._units_of_piece = np.bincount(piece, minlength=self._base[-1]).tolist()
        self._parts: dict[int, list[Done]] = defaultdict(list)
        self._new: dict[int, list[tuple[int, Written]]] = defaultdict(list)
        self.unrecorded = [0] * len(maps)
        self._found = {self._base[one] + at: found for one, pieces in kept.items() for at, found in pieces.items()}
        for one, base in enumerate(self._base[:-1]):
            for at in range(base, self._base[one + 1]):
                if at not in self._found and not self._units_of_piece[at]:
                    self._found[at] = self._result(one, at - base, at, [])

    def add(self, unit: Done) -> None:
        """Add a unit that was written."""
        self._parts[unit.piece].append(unit)
        self._units_of_file[unit.file] -= 1
        self._units_of_piece[unit.piece] -= 1
        if not self._units_of_piece[unit.piece]:
            at = unit.piece - self._base[unit.file]
            found = self._result(unit.file, at, unit.piece, self._parts.pop(unit.piece))
            self._found[unit.piece] = found
            self._new[unit.file].append((at, found[0]))
            self.unrecorded[unit.file] += int(self._maps[unit.file].pieces.nbytes[at])

    def is_full(self, file: int) -> bool:
        """Return whether every piece of a file is written."""
        return not self._units_of_file[file]

    def take(self, file: int) -> list[tuple[int, Written]]:
        """Return the pieces of a file written since the last call, by their numbers in the file."""
        self.unrecorded[file] = 0
        return self._new.pop(file, [])

    def of_file(self, file: int) -> list[tuple[Written, int]]:
        """Return the result of each piece of a full file, and its CRC-32 as written."""
        return [self._found[at] for at in range(self._base[file], self._base[file + 1])]

    def _result(self, file: int, piece: int, at: int, parts: list[Done]) -> tuple[Written, int]:
        """Combine the fingerprints and CRC-32s of a piece's units."""
        pieces = self._maps[file].pieces
        shape, new = pieces.shape_of(piece), pieces.dtype_of(piece)
        old = ALL[self._code[at]]
        if piece in pieces.literal:
            return _literal(new, shape, pieces.literal[piece])
        parts.sort(key=lambda part: part.first)
        crc, error = 0, CastError() if pieces.change_of(piece, old) is not None else None
        for part in parts:
            crc = crc32_of_two(crc, part.crc, part.written)
            if error is not None and part.cast is not None:
                error.merge(part.cast)
        source = combine(old, shape, [digest for part in parts for digest in part.source])
        if error is None:
            return Written(source, source, None), crc
        return Written(source, combine(new, shape, [digest for part in parts for digest in part.target]), error), crc


def _literal(dtype: DType, shape: tuple[int, ...], data: bytes | np.ndarray[Any, Any]) -> tuple[Written, int]:
    """Return the result of a literal, which is its own source."""
    digests = BlockDigests()
    digests.update(np.frombuffer(data, np.uint8))
    found = combine(dtype, shape, digests.digests())
    return Written(found, found, None), zlib.crc32(data)
