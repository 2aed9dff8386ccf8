"""Index keys: ``t[2:9, :, -1]`` normalised, and composed with an earlier key.

Each axis of the stored tensor has one selection: an integer (the axis disappears), a range with a step (which may be
negative), or an array of positions (at most one axis, as the meaning of two is disputed between libraries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import SelectionError

Axis = int | range | np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Selection:
    """Selected positions along every axis of a stored tensor."""

    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the selected part; integer axes are gone."""
        return tuple(len(axis) for axis in self.axes if not isinstance(axis, int))

    @property
    def is_whole(self) -> bool:
        """Whether every axis is a full, unreversed step-1 range from 0 (its end is the caller's to compare)."""
        return all(isinstance(axis, range) and axis.start == 0 and axis.step == 1 for axis in self.axes)

    def box(self) -> tuple[list[int], list[int]]:
        """Return the offsets and sizes of the smallest box that contains the selection."""
        offsets, sizes = [], []
        for axis in self.axes:
            low, high = _bounds(axis)
            offsets.append(low)
            sizes.append(high - low)
        return offsets, sizes

    def compose(self, key: Any) -> Selection:
        """Return the selection ``self`` followed by ``[key]``.

        Raises:
            SelectionError: there are too many indices, one is out of range, a step is 0, or two are arrays.
        """
        live = [position for position, axis in enumerate(self.axes) if not isinstance(axis, int)]
        parts = _expand(key, len(live), self.shape)
        axes = list(self.axes)
        for position, part in zip(live, parts, strict=True):
            axes[position] = _pick(axes[position], part, position)
        if sum(isinstance(axis, np.ndarray) for axis in axes) > 1:
            raise SelectionError("only one axis can be indexed with a list or mask; apply the second to the result")
        return Selection(tuple(axes))


def whole(shape: tuple[int, ...]) -> Selection:
    """Return the selection of everything."""
    return Selection(tuple(range(size) for size in shape))


def _bounds(axis: Axis) -> tuple[int, int]:
    if isinstance(axis, int):
        return axis, axis + 1
    if len(axis) == 0:
        return 0, 0
    if isinstance(axis, range):
        return min(axis[0], axis[-1]), max(axis[0], axis[-1]) + 1
    return int(axis.min()), int(axis.max()) + 1


def _expand(key: Any, ndim: int, shape: tuple[int, ...]) -> list[Any]:
    """Expand an index to one entry per axis: an ellipsis becomes full slices."""
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [position for position, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise SelectionError("an index can hold only one ellipsis (...)")
    if any(part is None for part in parts):
        raise SelectionError("new axes (None) are not supported on stored tensors; add them to the result")
    given = len(parts) - len(dots)
    if given > ndim:
        raise SelectionError(f"too many indices: {given} for a tensor with {ndim} dimensions, shape {shape}")
    fill = [slice(None)] * (ndim - given)
    at = dots[0] if dots else len(parts)
    return parts[:at] + fill + parts[at + len(dots) :]


def _pick(axis: Axis, part: Any, position: int) -> Axis:
    assert not isinstance(axis, int)
    size = len(axis)
    if isinstance(part, slice):
        try:
            return axis[part]
        except (TypeError, ValueError) as error:
            raise SelectionError(f"axis {position}: {error}") from None
    if not isinstance(part, (bool, np.bool_)) and hasattr(part, "__index__") and getattr(part, "ndim", 0) == 0:
        index = int(part.__index__())
        if not -size <= index < size:
            raise SelectionError(f"index {index:,} is out of range for axis {position} of size {size:,}")
        return int(axis[index])
    return _array(axis, part, position)


def _array(axis: range | np.ndarray[Any, Any], part: Any, position: int) -> np.ndarray[Any, Any]:
    index = np.asarray(part)
    if index.dtype == bool and index.ndim == 1:
        if len(index) != len(axis):
            raise SelectionError(f"mask of length {len(index):,} for axis {position} of size {len(axis):,}")
        index = np.flatnonzero(index)
    elif index.size == 0:
        index = index.reshape(-1).astype(np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise SelectionError(
            f"axis {position}: {type(part).__name__} is not a valid index; use an integer, a slice, or a 1-d list or "
            "mask"
        )
    index = index.astype(np.int64)
    out = index[(index < -len(axis)) | (index >= len(axis))]
    if len(out):
        raise SelectionError(f"index {int(out[0]):,} is out of range for axis {position} of size {len(axis):,}")
    index = np.where(index < 0, index + len(axis), index)
    if isinstance(axis, range):
        return axis.start + index * axis.step
    return axis[index]
