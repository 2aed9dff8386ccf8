"""Changes to the elements of a piece on the way from the source to the target.

::

    source ──► raw bits, part by part ──► change(first, raw) ──► new bits, the error ──────► target
               (fingerprint before)                              (fingerprint after, CRC)

A cast is the simplest change; :mod:`workbench.export.values.located` makes those that depend on an element's position
in its tensor: scales, low-rank updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.export.casts import CastError, cast


class Change(Protocol):
    """A change of a piece's elements.

    It is called in several threads, for parts of the piece in any order: the result for an element may depend on its
    position in the piece and on nothing else.
    """

    @property
    def source(self) -> DType:
        """Element type that is read."""

    @property
    def wanted(self) -> DType:
        """Element type that is written."""

    @property
    def identity(self) -> str:
        """Text that distinguishes this change from every other one; part of a plan's identity."""

    def __call__(self, first: int, raw: Array) -> tuple[Array, CastError]:
        """Change the elements ``[first, first + len(raw))`` of the piece, counted in row-major order.

        Args:
            raw: flat, of ``source.raw``; neither kept nor changed.

        Returns:
            their new bits, flat, of ``wanted.raw``, and the error.
        """


@dataclass(frozen=True)
class Cast:
    """The change that only casts, between the types of :mod:`workbench.export.casts`."""

    source: DType
    wanted: DType

    @property
    def identity(self) -> str:
        """The two types."""
        return f"cast {self.source} {self.wanted}"

    def __call__(self, first: int, raw: Array) -> tuple[Array, CastError]:
        """Cast the elements; their position does not matter."""
        return cast(raw, self.source, self.wanted)
