"""What a writer makes: which bytes a target file will hold, before any tensor byte is moved.

Readers make a catalog and never read tensor bytes; a *writer makes file maps and never moves them*::

    file   0                 1,024        ┊            9,216       ┊     size
           │ literal: header │ piece 0: q │ padding: 0 │ piece 1: k │ literal: directory │
    piece  a local tensor, row-major, made of boxes of source tensors:
           ┌──────────────┐
           │ gate  0:704  │   box 0: gate_proj rows 0:704  → its rows 0:704
           │ up    0:704  │   box 1: up_proj   rows 0:704  → its rows 704:1408
           └──────────────┘

The size of every file is known before its first byte. A format whose directory holds checksums (zip) gives the bytes
that depend on them afterwards, through ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL, DType
from workbench.errors import UsageError

__all__ = ["FileMap", "Finish", "Pieces", "no_pieces"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, Any]
#: CRC-32 of each piece as written → the bytes that depend on them: ``(start, bytes)``
Finish = Callable[[Sequence[int]], list[tuple[int, bytes]]]
_BITS = np.array([dtype.bits for dtype in ALL], np.int64)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Named local tensors, ``P`` of them, made of ``B`` boxes of source tensors.

    Attributes:
        names: as the target calls them.
        dtype: ``(P,) uint8`` codes of :mod:`workbench.core.dtypes`, as written; another than the source's is a cast.
        ndim: ``(P,)`` axes.
        shape: ``(P, D)`` elements, padded on the right with 1.
        piece: ``(B,)`` which piece a box belongs to, ascending.
        tensor: ``(B,)`` position of the source tensor in its catalog.
        offsets, sizes: ``(B, D)`` the box in the source tensor.
        dest: ``(B, D)`` where it begins in the piece.
    """

    names: list[str]
    dtype: Array
    ndim: Ints
    shape: Ints
    piece: Ints
    tensor: Ints
    offsets: Ints
    sizes: Ints
    dest: Ints

    @classmethod
    def whole(
        cls, catalog: Catalog, tensors: Ints, *, names: Sequence[str] | None = None, dtype: Array | None = None
    ) -> Pieces:
        """Whole tensors; under their own keys, in their own types, unless told otherwise."""
        tensors = np.asarray(tensors, np.int64)
        shape = catalog.shape[tensors].astype(np.int64)
        zeros = np.zeros_like(shape)
        return cls(
            [catalog.keys[t] for t in tensors.tolist()] if names is None else list(names),
            catalog.dtype[tensors] if dtype is None else np.asarray(dtype, np.uint8),
            catalog.ndim[tensors].astype(np.int64),
            shape,
            np.arange(len(tensors)),
            tensors,
            zeros,
            shape,
            zeros,
        )

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def nbytes(self) -> Ints:
        """``(P,)`` bytes of each piece as written."""
        return np.asarray((box.volume(self.shape) * _BITS[self.dtype] + 7) // 8, np.int64)

    def shape_of(self, piece: int) -> tuple[int, ...]:
        """Elements of a piece along each axis."""
        return tuple(self.shape[piece, : self.ndim[piece]].tolist())

    def dtype_of(self, piece: int) -> DType:
        """Element type of a piece as written."""
        return ALL[self.dtype[piece]]

    def take(self, index: Ints) -> Pieces:
        """Some of the pieces, in the order given."""
        index = np.asarray(index, np.int64)
        first, last = np.searchsorted(self.piece, index), np.searchsorted(self.piece, index, side="right")
        counts = last - first
        rows = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return replace(
            self,
            names=[self.names[i] for i in index.tolist()],
            dtype=self.dtype[index],
            ndim=self.ndim[index],
            shape=self.shape[index],
            piece=np.repeat(np.arange(len(index)), counts),
            tensor=self.tensor[rows],
            offsets=self.offsets[rows],
            sizes=self.sizes[rows],
            dest=self.dest[rows],
        )


@dataclass(frozen=True, eq=False)
class FileMap:
    """One file of the target. Bytes that neither a literal nor a piece covers are zero.

    Attributes:
        name: relative to the target's folder.
        size: bytes.
        literals: ``(start, bytes)`` known beforehand: headers, directories, copies of small files.
        pieces: the tensors in it.
        start: ``(P,)`` byte at which each piece begins.
        finish: makes the bytes that depend on the pieces' CRCs; without it no CRC is computed.
    """

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...]
    pieces: Pieces
    start: Ints
    finish: Finish | None = None

    def check(self) -> None:
        """Raise unless every literal and every piece lies inside the file and no two share a byte.

        Raises:
            UsageError: a writer's arithmetic is wrong; says which bytes.
        """
        starts = np.array([*(at for at, _ in self.literals), *self.start.tolist()], np.int64)
        sizes = np.array([*(len(data) for _, data in self.literals), *self.pieces.nbytes.tolist()], np.int64)
        keep = sizes > 0
        starts, stops = starts[keep], (starts + sizes)[keep]
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        ends = np.append(starts[1:], self.size)
        bad = np.flatnonzero((stops > ends) | (starts < 0))
        if len(bad):
            a, b, c = int(starts[bad[0]]), int(stops[bad[0]]), int(ends[bad[0]])
            raise UsageError(f"map of file {self.name!r}: bytes {a:,} to {b:,} reach past byte {c:,}")


def no_pieces(dims: int) -> Pieces:
    """None, for files that hold literals only; ``dims`` is the padded number of axes."""
    empty, boxes = np.empty(0, np.int64), np.empty((0, dims), np.int64)
    return Pieces([], np.empty(0, np.uint8), empty, boxes, empty, empty, boxes, boxes, boxes)
