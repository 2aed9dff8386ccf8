"""The output of a writer: which bytes a target file will contain, before any tensor byte is moved.

Readers make a catalog and never read tensor bytes; a *writer makes file maps and never moves them*::

    file   0                 1,024        ┊            9,216       ┊     size
           │ literal: header │ piece 0: q │ padding: 0 │ piece 1: k │ literal: directory │
    piece  a local tensor, row-major, made of boxes of source tensors:
           ┌──────────────┐
           │ gate  0:704  │   box 0: gate_proj rows 0:704  → its rows 0:704
           │ up    0:704  │   box 1: up_proj   rows 0:704  → its rows 704:1408
           └──────────────┘

A piece whose bytes are known beforehand (scales, an object) is a *literal*: it has a name, a type and a shape like
any other, and its bytes in :attr:`Pieces.literal`. Writers need not know; the pass writes, hashes and checks it.

The size of every file is known before its first byte. A format whose directory holds checksums (zip) gives the bytes
that depend on them afterwards, through ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL, DType, nbytes_of_codes
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.change import Cast, Change

#: CRC-32 of each piece as written → the bytes that depend on them: ``(start, bytes)``
Finish = Callable[[Sequence[int]], list[tuple[int, bytes]]]


@dataclass(frozen=True, eq=False)
class Literal:
    """A tensor whose bytes are known: row-major, little endian; a ``uint8`` array may be a view of a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: bytes | Array


@dataclass(frozen=True, eq=False)
class Pieces:
    """Named local tensors, ``P`` of them, made of ``B`` boxes of source tensors.

    Attributes:
        names: their names in the target.
        dtype: ``(P,) uint8`` codes of :mod:`workbench.core.dtypes`, as written; a cast if the source's differs.
        ndim: ``(P,)`` axes.
        shape: ``(P, D)`` elements, padded on the right with 1.
        piece: ``(B,)`` which piece a box belongs to, ascending.
        tensor: ``(B,)`` position of the source tensor in its catalog.
        offsets, sizes: ``(B, D)`` the box in the source tensor.
        dest: ``(B, D)`` where it begins in the piece.
        change: by piece, the change of its elements; without one, a ``dtype`` other than the source's means a cast.
        literal: by piece, its bytes; boxes of such a piece are not read.
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
    change: Mapping[int, Change] = field(default_factory=dict)
    literal: Mapping[int, bytes | Array] = field(default_factory=dict)

    @classmethod
    def whole(
        cls, catalog: Catalog, tensors: Ints, *, names: Sequence[str] | None = None, dtype: Array | None = None
    ) -> Pieces:
        """Return whole tensors, by default with their own keys and types."""
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
        return nbytes_of_codes(self.dtype, box.volume(self.shape))

    def shape_of(self, piece: int) -> tuple[int, ...]:
        """Return the number of elements of a piece along each axis."""
        return tuple(self.shape[piece, : self.ndim[piece]].tolist())

    def dtype_of(self, piece: int) -> DType:
        """Return the element type of a piece as written."""
        return ALL[self.dtype[piece]]

    def change_of(self, piece: int, source: DType) -> Change | None:
        """Return the change to a piece whose elements are read as ``source``; ``None`` if they stay unchanged."""
        if piece in self.change:
            return self.change[piece]
        wanted = self.dtype_of(piece)
        return Cast(source, wanted) if wanted != source else None

    def take(self, index: Ints) -> Pieces:
        """Return some of the pieces, in the given order."""
        index = np.asarray(index, np.int64)
        first, last = np.searchsorted(self.piece, index), np.searchsorted(self.piece, index, side="right")
        counts = last - first
        rows = box.spans(first, counts)
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
            change=_taken(self.change, index),
            literal=_taken(self.literal, index),
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
        finish: returns the bytes that depend on the pieces' CRCs; without it no CRC is computed.
    """

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...]
    pieces: Pieces
    start: Ints
    finish: Finish | None = None

    @classmethod
    def of_bytes(cls, name: str, data: bytes, dims: int) -> FileMap:
        """Create a file of known bytes; ``dims`` is the padded number of axes of the pieces beside it."""
        none = no_pieces(dims)
        return cls(name, len(data), ((0, data),), none, none.ndim)

    def of_pieces(self, index: Ints) -> FileMap:
        """Return the map of some of the pieces, for a worker that writes them: without literals, and with a mark in
        place of ``finish``, which is called where the file is created.
        """
        finish = None if self.finish is None else _elsewhere
        return FileMap(self.name, self.size, (), self.pieces.take(index), self.start[index], finish)

    def check(self) -> None:
        """Raise unless every literal and every piece is inside the file and no two share a byte.

        Raises:
            UsageError: a writer's arithmetic is wrong; the message names the bytes.
        """
        for at, data in self.pieces.literal.items():
            if len(data) != self.pieces.nbytes[at]:
                raise UsageError(
                    f"tensor {self.pieces.names[at]!r} has {plural(int(self.pieces.nbytes[at]), 'byte')} by its shape "
                    f"and type; {len(data):,} were given"
                )
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
            raise UsageError(f"map of file {self.name!r}: bytes {a:,} to {b:,} extend past byte {c:,}")


def _elsewhere(crcs: Sequence[int]) -> list[tuple[int, bytes]]:
    raise AssertionError("the directory is written where the file was made")


def literals(items: Sequence[Literal], dims: int) -> Pieces:
    """Create pieces of known bytes.

    Args:
        dims: the padded number of axes of the pieces that they go with.
    """
    shape = np.ones((len(items), dims), np.int64)
    for at, one in enumerate(items):
        if len(one.shape) > dims:
            raise UsageError(
                f"tensor {one.name!r} has {len(one.shape)} axes, but tensors of the source have {dims} at most"
            )
        shape[at, : len(one.shape)] = one.shape
    return replace(
        no_pieces(dims),
        names=[one.name for one in items],
        dtype=np.array([one.dtype.code for one in items], np.uint8),
        ndim=np.array([len(one.shape) for one in items], np.int64),
        shape=shape,
        literal={at: one.data for at, one in enumerate(items)},
    )


def join(many: Sequence[Pieces]) -> Pieces:
    """Concatenate pieces; all are padded to the same number of axes."""
    numbered = list(zip(np.cumsum([0, *(len(pieces) for pieces in many)]).tolist(), many, strict=False))
    columns = {
        name: np.concatenate([getattr(pieces, name) for pieces in many])
        for name in ("dtype", "ndim", "shape", "tensor", "offsets", "sizes", "dest")
    }
    return Pieces(
        names=[name for pieces in many for name in pieces.names],
        piece=np.concatenate([pieces.piece + base for base, pieces in numbered]),
        change={base + at: change for base, pieces in numbered for at, change in pieces.change.items()},
        literal={base + at: data for base, pieces in numbered for at, data in pieces.literal.items()},
        **columns,
    )


def _taken(held: Mapping[int, Any], index: Ints) -> dict[int, Any]:
    return {new: held[old] for new, old in enumerate(index.tolist()) if old in held} if held else {}


def no_pieces(dims: int) -> Pieces:
    """Return no pieces, for files that contain literals only; ``dims`` is the padded number of axes."""
    empty, boxes = np.empty(0, np.int64), np.empty((0, dims), np.int64)
    return Pieces([], np.empty(0, np.uint8), empty, boxes, empty, empty, boxes, boxes, boxes)
