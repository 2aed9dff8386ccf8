"""What the recogniser returns: a name, its numbers, and the function that proves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.dtypes import DType

__all__ = ["NAMES", "Pattern", "axis_words", "box_text", "made"]

Array = np.ndarray[Any, Any]
Make = Callable[[Array, "Array | None"], Array]

#: Every name that a pattern may have.
NAMES = (
    "halves", "swap", "rolled", "reversed", "interleave", "regroup", "blocks", "order",
    "shift", "resized", "transposed", "reshaped", "sibling",
    "ratio", "rounded", "cast", "byteswap",
    "bit_flip", "bit_flips", "zero_run", "fill", "replaced",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Pattern:
    """How a tensor came from another one.

    Attributes:
        name: one of :data:`NAMES`, which ``docs/patterns.md`` explains; stable.
        sentence: the fact, with its numbers.
        detail: the same numbers, of JSON's types only.
        likely: what usually does this to a tensor of this name, or ``""``. A guess, and only ever said as one.
        evidence: bits by which a random change would have had to be lucky.
    """

    name: str
    sentence: str
    detail: Mapping[str, Any]
    likely: str = ""
    evidence: float = 0.0
    make: Make | None = field(default=None, repr=False)

    def apply(self, array: Array, rest: Array | None = None) -> Array:
        """What the pattern makes of ``a.numpy()``: it equals ``b.numpy()`` bit for bit.

        Args:
            rest: ``b.numpy()``, of which the elements are taken that the pattern says nothing about (rows that
                entered, a block that was replaced); needed only by ``shift``, ``resized`` and ``replaced``.
        """
        if self.make is None:
            raise ValueError(
                f"the pattern {self.name!r} was read from JSON or a pickle; only a recognised one can be applied"
            )
        return self.make(array, rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "make": None}  # a function of the tensors at hand; not pickled, as it is not in JSON

    def to_json(self) -> dict[str, Any]:
        """``name sentence detail likely evidence``."""
        plain = {"name": self.name, "sentence": self.sentence, "detail": dict(self.detail), "likely": self.likely}
        return plain | {"evidence": round(self.evidence, 1)}


def made(of: Callable[[Array], Array], before: DType, after: DType) -> Make:
    """The function of a pattern that turns flat bits into bits."""

    def make(array: Array, rest: Array | None) -> Array:
        raw = np.ascontiguousarray(array).view(before.raw).reshape(-1)
        return of(raw).view(after.numpy).reshape(array.shape)

    return make


def axis_words(ndim: int, axis: int) -> tuple[str, str]:
    """What an index along an axis is called, one and several: row, rows."""
    if ndim == 1:
        return "element", "elements"
    if ndim == 2:
        return ("row", "rows") if axis == 0 else ("column", "columns")
    return f"index of axis {axis}", f"indices of axis {axis}"


def box_text(low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """A box as ``rows 3:5, columns 0:16``; axes that it covers are not told."""
    parts = []
    for axis, (first, last, size) in enumerate(zip(low, high, shape, strict=True)):
        if (first, last) != (0, size):
            one, many = axis_words(len(shape), axis)
            parts.append(f"{one} {first:,}" if last == first + 1 else f"{many} {first:,}:{last:,}")
    return ", ".join(parts) or "everything"
