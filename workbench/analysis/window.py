"""A small window on a tensor's values: a slice with up to two axes, limited to what a table can show.

::

    shape (8, 4096, 1024)    "3, 100:, ::2"  ──►  rows 100 101 … 149 of axis 1, columns 0 2 … 38 of axis 2
                                                  moved down: "3, 150:200, ::2"
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from workbench.core.slices import parse_slice
from workbench.errors import UsageError
from workbench.tensor import LazyTensor

ROWS, COLS = 50, 20  #: maximum rows and columns of a window
FIRST = 20  #: rows and columns if no slice is given
_LIMITS = (ROWS, COLS)


@dataclass(frozen=True)
class Window:
    """The part of a tensor that a slice shows.

    Attributes:
        text: the slice, one part per axis.
        shape: of the slice: two axes, one, or none.
        shown: the part that a table shows, not read yet.
        axes: the stored axes that remain.
        index: the shown positions of each of these axes.
    """

    text: str
    shape: tuple[int, ...]
    shown: LazyTensor
    axes: tuple[int, ...]
    index: tuple[list[int], ...]


def window(tensor: LazyTensor, text: str = "") -> Window:
    """Return the window for a text such as ``2:9, :, -1``; without text, the beginning of the last two axes.

    Raises:
        UsageError: not a slice, more than two axes remain, or the slice is empty.
        SelectionError: the slice does not match the shape.
    """
    if text.strip():
        part = tensor.lazy[parse_slice(text.strip().removeprefix("[").removesuffix("]") if _wrapped(text) else text)]
    else:
        last = tuple(slice(0, FIRST) if size > FIRST else slice(None) for size in tensor.shape[-2:])
        part = tensor.lazy[(0,) * (tensor.ndim - 2) + last if tensor.numel() else ...]
    if part.ndim > 2:
        example = ", ".join(["0"] * (part.ndim - 2) + [":", ":"])
        raise UsageError(
            f"the slice has {part.ndim} axes, {_times(part.shape)}; a table shows two. Index the others, for example "
            f"{example}"
        )
    if not part.numel():
        raise UsageError(f"the slice is empty, {_times(part.shape)}; the tensor is {_times(tensor.shape)}")
    shown = part.lazy[tuple(slice(0, most) for most in _LIMITS[: part.ndim])]
    axes = tuple(at for at, axis in enumerate(part._selection.axes) if not isinstance(axis, int))
    index = tuple([int(i) for i in axis] for axis in shown._selection.axes if not isinstance(axis, int))
    return Window(", ".join(map(_text, part._selection.axes, tensor.shape)), part.shape, shown, axes, index)


def moved(tensor: LazyTensor, here: Window, down: int = 0, right: int = 0) -> str:
    """Return the slice one window further along rows or columns; it stops at the tensor's edges."""
    parts = here.text.split(", ") if here.text else []
    for axis, index, by in zip(here.axes, here.index, (down, right), strict=False):
        size, step = tensor.shape[axis], index[1] - index[0] if len(index) > 1 else 1
        evenly = all(b - a == step for a, b in pairwise(index))
        if not by or step < 1 or not evenly:
            continue
        reach = len(index) * step
        start = index[0] + by * reach
        if start >= size:
            continue
        start = max(start, index[0] % step)
        parts[axis] = f"{start}:{min(start + reach, size)}" + (f":{step}" if step > 1 else "")
    return ", ".join(parts)


def _wrapped(text: str) -> bool:
    """Return whether the text includes the brackets of the whole slice: ``[2:9, 0]``, but not a list ``[0, 2]``."""
    text = text.strip()
    return text.startswith("[") and text.endswith("]") and text.count("[") == 1 and ":" in text


def _text(axis: int | range | np.ndarray[Any, Any], size: int) -> str:
    if isinstance(axis, int):
        return str(axis)
    if isinstance(axis, range):
        if axis == range(size):
            return ":"
        stop = "" if axis.stop < 0 else str(axis.stop)
        return f"{axis.start}:{stop}" + (f":{axis.step}" if axis.step != 1 else "")
    return f"[{' '.join(map(str, axis.tolist()))}]".replace(" ", ",")


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{n:,}" for n in shape) or "a single element"
