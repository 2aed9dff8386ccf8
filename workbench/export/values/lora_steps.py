"""Steps of a merge: add a product of two narrow matrices, or replace a tensor's values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.export.casts import widened
from workbench.export.values.scales import segments

BLOCK = 1 << 18  #: elements of a product that are computed together


class Scratch(threading.local):
    """The last block that a thread computed: neighbouring parts of a tensor need it again."""

    def __init__(self) -> None:
        self.key: tuple[int, int] | None = None
        self.block = np.empty((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """Adds ``scale · left · right`` to a matrix (axes of 1 may follow).

    The same blocks of rows are always computed whole, so an element's last bit does not depend on the cuts.

    Attributes:
        left: float32 ``(rows, r)``.
        right: float32 ``(r, columns)``.
        scratch: shared by the updates of one export.
    """

    left: Array
    right: Array
    scale: np.float32
    scratch: Scratch

    @property
    def identity(self) -> str:
        """A digest of both factors, and the scale."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.left))
        digest.update(np.ascontiguousarray(self.right))
        return f"update {digest.hexdigest()} {self.scale!r} {self.left.shape} {self.right.shape}"

    def __call__(self, begin: Sequence[int], values: Array) -> None:
        """Add to a box of the tensor."""
        flat = values.reshape(values.shape[:2])
        step = max(BLOCK // max(self.right.shape[1], 1), 1)
        for number, run in segments(begin[0], len(flat), step):
            first = begin[0] + run.start - number * step
            rows = self._block(number, step)[first : first + run.stop - run.start]
            flat[run] += rows[:, begin[1] : begin[1] + flat.shape[1]]

    def _block(self, number: int, step: int) -> Array:
        held = self.scratch
        if held.key != (id(self), number):
            held.block = self.left[number * step : (number + 1) * step] @ self.right
            held.block *= self.scale
            held.key = id(self), number
        return held.block


@dataclass(frozen=True, eq=False)
class Replaced:
    """Replaces a tensor's values.

    Attributes:
        raw: their bits, of the tensor's shape.
        element: their type.
    """

    raw: Array
    element: DType

    @property
    def identity(self) -> str:
        """A digest of the bits."""
        return f"replaced {self.element} {xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.raw))}"

    def __call__(self, begin: Sequence[int], values: Array) -> None:
        """Replace the values of a box."""
        box = self.raw[tuple(slice(a, a + n) for a, n in zip(begin, values.shape, strict=True))]
        values[...] = widened(np.ascontiguousarray(box).reshape(-1), self.element).reshape(values.shape)
