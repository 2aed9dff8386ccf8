"""The pattern of a change: a name, its numbers, and the function that proves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.dtypes import DType

Make = Callable[[Array, "Array | None"], Array]

#: All names of patterns.
NAMES = (
    "halves",
    "swap",
    "rolled",
    "reversed",
    "interleave",
    "regroup",
    "blocks",
    "order",
    "shift",
    "resized",
    "transposed",
    "reshaped",
    "sibling",
    "ratio",
    "rounded",
    "cast",
    "byteswap",
    "bit_flip",
    "bit_flips",
    "zero_run",
    "fill",
    "replaced",
)


@dataclass(frozen=True, eq=False)
class Pattern:
    """How a tensor was made from another one.

    Attributes:
        name: one of :data:`NAMES`, explained in ``docs/patterns.md``; stable.
        sentence: the fact, with its numbers.
        detail: the same numbers, of JSON's types only.
        likely: the usual cause for a tensor of this name, or ``""``. A guess, and always presented as one.
        evidence: bits of improbability of a random change with this form.
    """

    name: str
    sentence: str
    detail: Mapping[str, Any]
    likely: str = ""
    evidence: float = 0.0
    make: Make | None = field(default=None, repr=False)

    def apply(self, array: Array, rest: Array | None = None) -> Array:
        """Apply the pattern to ``a.numpy()``; the result equals ``b.numpy()`` bit for bit.

        Args:
            rest: ``b.numpy()``, for the elements that the pattern does not determine (added rows, a replaced block);
                needed only by ``shift``, ``resized`` and ``replaced``.
        """
        if self.make is None:
            raise ValueError(
                f"the pattern {self.name!r} was read from JSON or a pickle and cannot be applied; compare again"
            )
        return self.make(array, rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "make": None}  # a function of these tensors: neither pickled nor in JSON

    def to_dict(self) -> dict[str, Any]:
        """Return ``name sentence detail likely evidence``."""
        plain = {"name": self.name, "sentence": self.sentence, "detail": dict(self.detail), "likely": self.likely}
        return plain | {"evidence": round(self.evidence, 1)}


def made(of: Callable[[Array], Array], before: DType, after: DType) -> Make:
    """Return a pattern's function from flat bits to bits."""

    def make(array: Array, rest: Array | None) -> Array:
        raw = np.ascontiguousarray(array).view(before.raw).reshape(-1)
        return of(raw).view(after.numpy).reshape(array.shape)

    return make


def axis_words(ndim: int, axis: int) -> tuple[str, str]:
    """Return the words for one and several indices along an axis: row, rows."""
    if ndim == 1:
        return "element", "elements"
    if ndim == 2:
        return ("row", "rows") if axis == 0 else ("column", "columns")
    return f"axis-{axis} slice", f"axis-{axis} slices"


def box_text(low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return a box as ``rows 3:5, columns 0:16``, without axes that it covers completely."""
    parts = []
    for axis, (first, last, size) in enumerate(zip(low, high, shape, strict=True)):
        if (first, last) != (0, size):
            one, many = axis_words(len(shape), axis)
            parts.append(f"{one} {first:,}" if last == first + 1 else f"{many} {first:,}:{last:,}")
    return ", ".join(parts) or "everything"
