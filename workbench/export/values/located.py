"""Changes that depend on an element's position in its tensor, for whole, local and joined tensors.

::

    source bits ─► float32 ─ step ─ step ─►            cast: rounded once ─► bits
                   (× scales, + s·B·A …)   └─ × 1/scale ─► nearest code of e4m3fn ─► bits

    piece (a stream of elements)  first ═══════ first + n
    boxes of the piece            │ box of q │ box of k │      a box knows its place in its tensor: `begin`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.decoding.floats import FP8
from workbench.core.dtypes import ALL, DType
from workbench.export.casts import CastError, cast, costs, narrowed, widened
from workbench.export.filemap import Pieces
from workbench.export.values.scales import Scales


class Step(Protocol):
    """Part of a change, in float32; called in several threads, for boxes in any order."""

    @property
    def identity(self) -> str:
        """Text that distinguishes this change from all others."""

    def __call__(self, begin: Sequence[int], values: Array) -> None:
        """Change a box of the tensor in place.

        Args:
            begin: start of the box in the tensor.
            values: float32, of the box's shape.
        """


class Quantised(NamedTuple):
    """The quantisation to e4m3fn: ``code = nearest(value · forward)``, which represents ``code · back``."""

    forward: Scales
    back: Scales


@dataclass(frozen=True, eq=False)
class TensorChange:
    """The change of the elements of one tensor.

    Attributes:
        source: as it is stored.
        wanted: as it is written; ``float8_e4m3fn`` needs ``quantised``.
        steps: from what is stored to the values that it represents, one after the other, in float32.
        updates: changes of these values by adapters, one after the other, in float32.
        quantised: scales of an 8-bit target.
    """

    source: DType
    wanted: DType
    steps: tuple[Step, ...] = ()
    updates: tuple[Step, ...] = ()
    quantised: Quantised | None = None

    @property
    def identity(self) -> str:
        """The identity of all steps."""
        steps = [step.identity for step in (*self.steps, *self.updates)]
        scales = [] if self.quantised is None else [self.quantised.forward.identity]
        return " ".join([f"{self.source} {self.wanted}", *steps, *scales])

    def values(self, begin: Sequence[int], raw: Array) -> Array:
        """Compute the values of a box of the tensor after all steps and updates: float32, in memory of their own.

        Args:
            raw: the box's bits, of its shape.
        """
        return self._updated(begin, self._stored(begin, raw))

    def _stored(self, begin: Sequence[int], raw: Array) -> Array:
        flat = np.ascontiguousarray(raw).reshape(-1)
        before = widened(flat, self.source)
        values = before.astype(np.float32, copy=self.source.name == "float32").reshape(raw.shape)
        for step in self.steps:
            step(begin, values)
        return values

    def _updated(self, begin: Sequence[int], values: Array) -> Array:
        for update in self.updates:
            update(begin, values)
        return values

    def __call__(self, begin: Sequence[int], raw: Array) -> tuple[Array, CastError]:
        """Return the bits of a box (of its shape), their error against :meth:`values`, and what updates changed."""
        if self.quantised is None and not self.steps and not self.updates and self.source.name not in FP8:
            if self.source == self.wanted:
                return raw, CastError(raw.size)
            bits, error = cast(np.ascontiguousarray(raw).reshape(-1), self.source, self.wanted)
            return bits.reshape(raw.shape), error
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._stored(begin, raw)
            before = values.copy() if self.updates else values
            scaled = self._updated(begin, values)
            if self.quantised is not None:
                scaled = values.copy()
                self.quantised.forward(begin, scaled)
            bits = narrowed(scaled.reshape(-1), self.wanted)
            after = widened(bits, self.wanted).reshape(raw.shape)
            if self.quantised is not None:
                self.quantised.back(begin, after)
        error = costs(values.reshape(-1), after.reshape(-1))
        if self.updates:
            update = costs(before.reshape(-1), values.reshape(-1))
            error.updated, error.max_update = update.changed, update.max_abs
            error.overflowed += update.overflowed
        return bits.reshape(raw.shape), error


def locate(pieces: Pieces, changes: Mapping[int, TensorChange]) -> Pieces:
    """Return the same pieces with the changes of the tensors that their boxes belong to.

    Args:
        changes: by position of the tensor in the catalog; boxes of other tensors in the same piece are cast if the
            piece's type differs.
    """
    found = dict(pieces.change)
    concerned = np.isin(pieces.tensor, np.fromiter(changes, np.int64, len(changes)))
    for piece in np.unique(pieces.piece[concerned]).tolist():
        rows = np.arange(*np.searchsorted(pieces.piece, [piece, piece + 1]))
        ndim, tensors = int(pieces.ndim[piece]), pieces.tensor[rows].tolist()
        source = next(changes[tensor].source for tensor in tensors if tensor in changes)
        plain = TensorChange(source, pieces.dtype_of(piece))
        boxes = tuple(
            _Box(
                changes.get(tensor, plain),
                pieces.offsets[row, :ndim],
                pieces.sizes[row, :ndim],
                pieces.dest[row, :ndim],
            )
            for row, tensor in zip(rows.tolist(), tensors, strict=True)
        )
        found[piece] = _Located(source, ALL[pieces.dtype[piece]], pieces.shape[piece, :ndim], boxes)
    return replace(pieces, change=found)


class _Box(NamedTuple):
    change: TensorChange
    offsets: Ints  # in the tensor
    sizes: Ints
    dest: Ints  # in the piece


@dataclass(frozen=True, eq=False)
class _Located:
    """The change of a piece that is made of boxes."""

    source: DType
    wanted: DType
    shape: Ints
    boxes: tuple[_Box, ...]

    @property
    def identity(self) -> str:
        """The identities of every box's change, in order; the positions of the boxes are part of the piece."""
        return " | ".join(one.change.identity for one in self.boxes)

    def __call__(self, first: int, raw: Array) -> tuple[Array, CastError]:
        """Change a part of the stream: a few boxes; each may overlap several of those that make up the piece."""
        shape = self.shape if len(self.shape) else np.ones(1, np.int64)
        _, begins, sizes, at = box.flat_ranges(shape[None], np.array([first]), np.array([first + len(raw)]))
        out, error = np.empty(len(raw), self.wanted.raw), CastError()
        for begin, size, start in zip(begins, sizes, at.tolist(), strict=True):
            run = slice(start - first, start - first + int(box.volume(size)))
            old, new = raw[run].reshape(size), out[run].reshape(size)
            for one in self.boxes:
                self._part(one, begin, size, old, new, error)
        return out, error

    def _part(self, one: _Box, begin: Ints, size: Ints, old: Array, new: Array, error: CastError) -> None:
        if not len(self.shape):  # a tensor without axes
            bits, cost = one.change((), old.reshape(()))
            new[...] = bits
            error.merge(cost)
            return
        low, extent = box.intersect(begin, size, one.dest, one.sizes)
        if (extent > 0).all():
            key = tuple(slice(a, a + n) for a, n in zip((low - begin).tolist(), extent.tolist(), strict=True))
            bits, cost = one.change((low - one.dest + one.offsets).tolist(), old[key])
            new[key] = bits
            error.merge(cost)
