"""Whether a converted weight equals its source, up to the rounding of the type that it was stored in.

::

    source   cell of the stored code
    0.0312   [0.0309, 0.0330]           inside: rounding explains the difference
    0.0412   [0.0309, 0.0330]           beyond: it does not

The cells are those of :func:`workbench.core.decoding.values.cells`: of every block, from its own stored scales. A
source of other than 16 bits may have been rounded to float16 or bfloat16 before it was quantised (llama.cpp quantises
files of such types), which the cells are widened by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Ints
from workbench.core.decoding.ggml import HAS_CELLS
from workbench.core.decoding.values import HALVES, cells
from workbench.core.dtypes import DType
from workbench.core.payload import Payloads
from workbench.core.scan import Piece, scan
from workbench.core.work import pair_work

ON_THE_WAY = (2.0**-9, 2.0**-25)  #: what rounding to bfloat16 costs of a number; what float16 loses of the smallest
#: With an importance matrix, the scale is fitted after the codes were chosen: they need not be the nearest.
_WEIGHTED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS"}


@dataclass(eq=False)
class CellCheck:
    """Whether a source is in the cells of what is stored.

    Attributes:
        scheme: the stored type, such as ``Q4_K``.
        seen: elements that were compared.
        beyond: elements of the source that the stored code does not stand for.
        worst: the largest distance from a cell, in halves of the cell's width; 0 if none is beyond.
        at: its position, ``None`` if none is beyond.
        low, high, value: the cell there, and the source.
    """

    scheme: str
    seen: int = 0
    beyond: int = 0
    worst: float = 0.0
    at: tuple[int, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    value: float = 0.0

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        if not self.beyond:
            return f"equal up to {self.scheme} rounding"
        return (
            f"{self.beyond:,} of {self.seen:,} elements do not match {self.scheme} rounding of the source; "
            f"the worst is at {list(self.at or ())}: the source has {self.value:.6g}, but the stored code stands for "
            f"{self.low:.6g} to {self.high:.6g}"
        )


def has_bound(name: str, weighted: bool) -> bool:
    """Return whether a stored type determines which numbers each of its codes stands for.

    Args:
        weighted: the file was quantised with an importance matrix.
    """
    return name in HALVES or (name in HAS_CELLS and not (weighted and name in _WEIGHTED))


def roundings(
    source: Payloads,
    stored: Payloads,
    pairs: list[tuple[int, int]],
    *,
    threads: int | None = None,
) -> Iterator[tuple[int, CellCheck]]:
    """Compare sources with what is stored; yields the number of the pair and what was found.

    Args:
        source: decoded, or as stored, in floats.
        stored: as stored.
        pairs: positions in the two catalogs, of tensors of equal shapes and of types with :func:`has_bound`.

    Raises:
        as :func:`workbench.core.scan.scan`.
    """
    ends = cells(stored)
    schemes = [stored.catalog.dtype_of(u).name for _, u in pairs]
    first, second = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    work = pair_work(source, ends, first, second)
    for k, state in scan(work, _Within(source, ends, stored), threads=threads):
        state.scheme = schemes[k]
        yield k, state


class _Within:
    """The reducer: which elements of the first side are outside the cells of the second."""

    def __init__(self, source: Payloads, ends: Payloads, stored: Payloads) -> None:
        catalog = source.catalog
        self._dims: Ints = catalog.ndim
        self._types = [catalog.dtype_of(t) for t in range(len(catalog))]
        self._tensor: Ints = catalog.tensor
        blocks = np.array([stored.catalog.dtype_of(u).packed for u in range(len(stored.catalog))], bool)
        self._blocks = blocks[ends.catalog.tensor]

    def begin(self, dtype: DType, other: DType | None) -> CellCheck:
        """Create an empty comparison."""
        return CellCheck("")

    def fold(self, state: CellCheck, piece: Piece) -> None:
        """Take a piece of both sides into account."""
        assert piece.other is not None
        tensor = int(self._tensor[piece.row])
        dtype = self._types[tensor]
        x = np.array(Decoder(dtype).numbers(piece.bits.view(dtype.numpy)), np.float64)
        low, high = piece.other.view(np.float32).reshape(-1, 2).astype(np.float64).T
        if self._blocks[piece.other_row]:
            off = ON_THE_WAY[1] + (0 if dtype.name == "bfloat16" else ON_THE_WAY[0] * np.abs(x))
            low, high = low - off, high + off
        with np.errstate(invalid="ignore"):
            outside = ~((x >= low) & (x <= high))
        state.seen += len(x)
        if not outside.any():
            return
        state.beyond += int(np.count_nonzero(outside))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            how = np.maximum(low - x, x - high) / np.maximum((high - low) / 2, 1e-300)
        how = np.where(outside, np.nan_to_num(how, nan=np.inf, posinf=np.inf), -1.0)
        at = int(np.argmax(how))
        if state.at is None or how[at] > state.worst:
            state.worst, state.at = float(how[at]), piece.where(at)[: int(self._dims[tensor])]
            state.low, state.high, state.value = float(low[at]), float(high[at]), float(x[at])

    def merge(self, state: CellCheck, later: CellCheck) -> None:
        """Add what another part of the pass found."""
        state.seen, state.beyond = state.seen + later.seen, state.beyond + later.beyond
        if later.at is not None and (state.at is None or later.worst > state.worst):
            for name in ("worst", "at", "low", "high", "value"):
                setattr(state, name, getattr(later, name))
