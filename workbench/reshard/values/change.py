"""What happens to the elements of a piece on their way from the source to the target.

::

    source ──► raw bits, part by part ──► change(first, raw) ──► new bits, what that cost ──► target
               (fingerprint before)                              (fingerprint after, CRC)

A cast is the plainest change; :mod:`workbench.reshard.values.located` makes those that depend on where an element lies
in its tensor: scales, low-rank updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from workbench.core.dtypes import DType
from workbench.reshard.values.casts import CastError, cast

__all__ = ["Cast", "Change"]

Array = np.ndarray[Any, Any]


class Change(Protocol):
    """A change of a piece's elements.

    Called in several threads, for parts of the piece in any order: what becomes of an element may depend on where it
    lies in the piece, on nothing else.
    """

    @property
    def source(self) -> DType:
        """Element type that is read."""

    @property
    def wanted(self) -> DType:
        """Element type that is written."""

    @property
    def identity(self) -> str:
        """What is done, told apart from every other change: part of what a plan is."""

    def __call__(self, first: int, raw: Array) -> tuple[Array, CastError]:
        """Change the elements ``[first, first + len(raw))`` of the piece, counted in row-major order.

        Args:
            raw: flat, of ``source.raw``; neither kept nor changed.

        Returns:
            their new bits, flat, of ``wanted.raw``, and what that cost.
        """


@dataclass(frozen=True)
class Cast:
    """The change that only casts, between the types of :mod:`workbench.reshard.values.casts`."""

    source: DType
    wanted: DType

    @property
    def identity(self) -> str:
        """The two types."""
        return f"cast {self.source} {self.wanted}"

    def __call__(self, first: int, raw: Array) -> tuple[Array, CastError]:
        """Where the elements lie does not matter."""
        return cast(raw, self.source, self.wanted)
