"""Elements of a chunk in place: in a file, at strides, or in memory if a codec had to decode them.

::

    region     shape, strides, first byte            nothing is read
    [box]      the same of a part                    nothing is read
    into(out)  elements → an array of any strides    dense runs directly, others through a scratch buffer
    load()     elements → memory in the order in which they are stored

Strided elements (a column, every tenth row, a transposed matrix) are read in *spans*: elements closer than the source's
``gap`` together, those further apart separately. So a column of a wide matrix does not read the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np

from workbench.core import memory
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.core.source import Source

Axis = range | Array  #: positions along an axis; an array is ascending, without repeats


class Sources(Protocol):
    """Where a region gets its bytes from."""

    def source(self, file: int) -> Source:
        """Return the source with this id."""


RUN = 64 << 10  #: bytes from which a run is read directly to its destination


class Region:
    """A box of one chunk.

    Attributes:
        shape: elements along each axis.
        raw: numpy type of an element's bits (unsigned; bytes for packed types).
        memory: the decoded elements if a codec had to decode them, otherwise ``None``.
    """

    __slots__ = ("_file", "_pool", "_start", "_strides", "_undo", "memory", "raw", "shape")

    def __init__(
        self,
        pool: Sources,
        file: int,
        start: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        raw: np.dtype[Any],
        undo: Callable[[Array], Array] | None = None,
    ) -> None:
        """Create a region of elements in a file.

        Args:
            start: byte of the first.
            strides: bytes, none negative.
            undo: converts the stored bits to elements, if the file has another byte order or other signs.
        """
        self._pool, self._file, self._start, self._strides, self._undo = pool, file, start, strides, undo
        self.shape, self.raw = shape, raw
        self.memory: Array | None = None

    @classmethod
    def of(cls, array: Array) -> Region:
        """Create a region of elements in memory."""
        made = cls.__new__(cls)
        made.memory, made.shape, made.raw = array, array.shape, array.dtype
        return made

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.raw.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        if self.memory is not None:
            return self.memory.flags.c_contiguous
        return _dense(self.shape, self._strides, self.raw.itemsize)

    @property
    def ordered(self) -> bool:
        """Whether the elements are in row-major order, with gaps or without."""
        steps = self._strides if self.memory is None else self.memory.strides
        return all(a >= b for a, b in pairwise(steps))

    @property
    def straight(self) -> int | None:
        """Byte of the file from which the elements are stored as in row-major memory, or ``None``."""
        return self._start if self.memory is None and self._undo is None and self.contiguous else None

    def __getitem__(self, box: tuple[slice, ...]) -> Region:
        """Return a box inside this one, given by one slice per axis, from a start to a stop."""
        if self.memory is not None:
            return Region.of(self.memory[box])
        start = self._start + sum(axis.start * step for axis, step in zip(box, self._strides, strict=True))
        shape = tuple(axis.stop - axis.start for axis in box)
        return Region(self._pool, self._file, start, shape, self._strides, self.raw, self._undo)

    def widened(self, dims: int) -> Region:
        """Return the same region with trailing axes of size 1 added."""
        more = dims - len(self.shape)
        if self.memory is not None:
            return Region.of(self.memory.reshape(self.shape + (1,) * more))
        shape, strides = self.shape + (1,) * more, self._strides + (self.raw.itemsize,) * more
        return Region(self._pool, self._file, self._start, shape, strides, self.raw, self._undo)

    def flat(self, start: int, stop: int, buffer: Array) -> Array:
        """Return elements ``[start, stop)`` of a contiguous region, read-only: in a ``uint8`` buffer, or where they
        are.
        """
        if self.memory is not None:
            found = self.memory.reshape(-1)[start:stop]
        else:
            itemsize = self.raw.itemsize
            found = buffer[: (stop - start) * itemsize].view(self.raw)
            self._pool.source(self._file).read_into(buffer[: found.nbytes], self._start + start * itemsize)
            self._decode(found)
        found = found.view()
        found.flags.writeable = False
        return found

    def into(self, out: Array, axes: Sequence[Axis] | None = None) -> None:
        """Read all elements, or those at the given positions of each axis, into an array of their shape and type."""
        if not out.size:
            return
        if self.memory is not None:
            out[...] = self.memory if axes is None else self.memory[_index(axes)]
            return
        chosen: list[Axis] = [range(n) for n in self.shape] if axes is None else list(axes)
        _read(self._pool.source(self._file), self._start, chosen, list(self._strides), out, [])
        self._decode(out)

    def load(self, buffer: Array | None = None) -> Array:
        """Read all elements, in stored order if that is not row-major.

        Args:
            buffer: ``uint8``, used if it is large enough; otherwise new memory is allocated.
        """
        if self.memory is not None:
            return self.memory
        order = sorted(range(len(self.shape)), key=lambda axis: -self._strides[axis])
        shape = tuple(self.shape[axis] for axis in order)
        if buffer is not None and len(buffer) >= self.nbytes:
            out = buffer[: self.nbytes].view(self.raw).reshape(shape)
        else:
            out = memory.empty(shape, self.raw)
        strides = tuple(self._strides[axis] for axis in order)
        Region(self._pool, self._file, self._start, shape, strides, self.raw, self._undo).into(out)
        return out.transpose(np.argsort(order)) if len(order) > 1 else out

    def gathered(self, low: Sequence[int], high: Sequence[int]) -> tuple[Region, Sequence[int]]:
        """Return a region from which to read many parts of the box ``[low, high)``, and its start.

        It is this region, from 0, unless its elements are not in row-major order: each part would be read in many
        small runs, or with everything in between, and the box is loaded.
        """
        if self.memory is not None or self.ordered:
            return self, [0] * len(self.shape)
        return Region.of(self[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].load()), low

    def _decode(self, array: Array) -> None:
        if self._undo is not None:
            array[...] = self._undo(array)


def swapped(array: Array, dtype: DType) -> Array:
    """Swap elements to this machine's byte order; the halves of complex numbers separately."""
    if dtype.kind == "c":
        half = np.dtype(f"<u{dtype.itemsize // 2}")
        parts = np.ascontiguousarray(array).view(half)
        return parts.byteswap().view(dtype.raw).reshape(array.shape)
    return array.byteswap()


def resolved(array: Array, dtype: DType, *, conj: bool, neg: bool) -> Array:
    """Return the values of a conjugate or negative view: the stored bits with the relevant signs flipped."""
    parts = 2 if dtype.kind == "c" else 1
    half = np.dtype(f"<u{dtype.itemsize // parts}")
    bits = np.ascontiguousarray(array).view(half).reshape(-1, parts).copy()
    sign = half.type(1 << (8 * half.itemsize - 1))
    if neg:
        bits[:, 0] ^= sign
    if parts == 2 and conj != neg:
        bits[:, 1] ^= sign
    return bits.view(dtype.raw).reshape(array.shape)


# ---- reading at strides ----------------------------------------------------------------------------------------------


def _read(source: Source, start: int, axes: list[Axis], strides: list[int], out: Array, scratch: list[Array]) -> None:
    """Fill ``out`` with the elements at byte ``start + Σ position · stride``."""
    itemsize = out.dtype.itemsize
    lows = [min(int(axis[0]), int(axis[-1])) for axis in axes]
    spans = [max(int(axis[0]), int(axis[-1])) - low for axis, low in zip(axes, lows, strict=True)]
    low = start + sum(a * b for a, b in zip(lows, strides, strict=True))
    reach = sum(a * b for a, b in zip(spans, strides, strict=True)) + itemsize
    if reach == out.nbytes and out.flags.c_contiguous and _ascending(axes) and _dense(out.shape, strides, itemsize):
        source.read_into(out.reshape(-1).view(np.uint8), low)
        return
    sparse = _sparse(axes, strides, itemsize, source.gap) if reach > source.gap else []
    if reach <= source.span and not sparse:
        if not scratch or len(scratch[0]) < reach:
            scratch[:] = [np.empty(reach, np.uint8)]
        source.read_into(scratch[0][:reach], low)
        shape = [span + 1 for span in spans]
        seen: Array = np.ndarray(shape, out.dtype, scratch[0].data, 0, strides)
        out[...] = seen[_index([_moved(axis, first) for axis, first in zip(axes, lows, strict=True)])]
        return
    most = max((at for at, span in enumerate(spans) if span), key=lambda at: strides[at])
    inner = reach - spans[most] * strides[most]
    axis, alone = axes[most], inner >= RUN or (bool(sparse) and most not in sparse)
    rows = np.moveaxis(out, most, 0)
    rest, steps = axes[:most] + axes[most + 1 :], strides[:most] + strides[most + 1 :]
    parts = list(_spans(source, axis, strides[most], inner, alone))
    runs = len(parts) == len(axis) and rows[0].nbytes == inner and rows.flags.c_contiguous and _ascending(rest)
    if runs and _dense(rows.shape[1:], steps, itemsize):
        first = low - lows[most] * strides[most]
        starts = [first + int(position) * strides[most] for position in axis]
        source.read_runs(rows.reshape(len(rows), -1).view(np.uint8), starts)
        return
    for part in parts:
        key = (*[slice(None)] * most, part)
        _read(source, start, [*axes[:most], axis[part], *axes[most + 1 :]], strides, out[key], scratch)


def _sparse(axes: Sequence[Axis], strides: Sequence[int], itemsize: int, gap: int) -> list[int]:
    """Return the axes along which some positions begin more than ``gap`` bytes after the end of the previous one."""
    found, reach = [], itemsize
    for at in sorted(range(len(axes)), key=lambda at: strides[at]):
        axis = axes[at]
        if len(axis) > 1:
            step = abs(axis.step) if isinstance(axis, range) else int(np.diff(axis).max())
            if step * strides[at] - reach > gap:
                found.append(at)
            reach += (max(int(axis[0]), int(axis[-1])) - min(int(axis[0]), int(axis[-1]))) * strides[at]
    return found


def _spans(source: Source, axis: Axis, stride: int, inner: int, alone: bool) -> Iterator[slice]:
    """Yield the positions of an axis that are read together, with ``inner`` bytes at each; or, if ``alone``, each
    position.
    """
    room = max(source.span - inner, 1)
    if isinstance(axis, range):
        step = abs(axis.step) * stride
        count = 1 if alone or step - inner > source.gap else room // step + 1
        yield from (slice(first, first + count) for first in range(0, len(axis), count))
        return
    at = axis * stride
    breaks = (np.diff(at) - inner > source.gap) | (np.diff(at // room) > 0) | alone
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(axis)]
    yield from (slice(a, b) for a, b in pairwise(cuts))


def _ascending(axes: Sequence[Axis]) -> bool:
    return all(isinstance(axis, range) and (axis.step == 1 or len(axis) == 1) for axis in axes)


def _moved(axis: Axis, low: int) -> Axis:
    if isinstance(axis, range):
        return range(axis.start - low, axis.stop - low, axis.step)
    return axis - low


def _index(axes: Sequence[Axis]) -> tuple[slice | Array, ...]:
    """Return positions as an index; up to one axis is an array."""
    found: list[slice | Array] = []
    for axis in axes:
        if isinstance(axis, range):
            last = axis[-1] + (1 if axis.step > 0 else -1)
            found.append(slice(axis[0], None if last < 0 else last, axis.step))
        else:
            found.append(axis)
    return tuple(found)


def _dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements follow each other in row-major order; the stride of an axis of one element is ignored."""
    step = itemsize
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True
