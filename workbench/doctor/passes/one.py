"""What one state says about itself, parameter by parameter, in one pass: the sums behind the S rules.

::

    param ─┐                        numbers of each role: NaN, zeros, powers of two of |x|
    master ├─ block ──► OneState    state bound m² ≤ K·v      v ≥ 0      round(master) = weight
    m, v  ─┘                        low bits of masters and moments      a hash of the weights' bits in their order
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.doctor.laws.bounds import PIECE, Hits, has_slack, state_bound
from workbench.doctor.laws.exact import low_bits, rounding
from workbench.doctor.passes.blocks import Block, Slot
from workbench.doctor.passes.profiles import Profile, Sums

__all__ = ["Numbers", "OneFold", "OneState"]

Array = np.ndarray[Any, Any]
Betas = tuple[float, float]
_SALT = np.uint64(0x9E3779B97F4A7C15)
_HALF = {"float16": True, "bfloat16": False}


@dataclass(slots=True)
class Numbers:
    """Elements of one tensor.

    Attributes:
        zeros: how many are 0; ones: exactly 1. total: their sum, of second moments.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    ones: int = 0
    negative: int = 0
    max: float = 0.0
    total: float = 0.0
    counts: Array = field(default_factory=lambda: np.zeros(256, np.int64))
    lowest: int = 0

    def take(self, values: Array, *, fast: bool = False) -> None:
        values = values.astype(np.float32, copy=False)
        if fast:
            from workbench.doctor.passes import fast_one

            nan, inf, zeros, ones, negative, high = fast_one.numbers(values, self.counts)
            self.count, self.nan, self.inf = self.count + len(values), self.nan + nan, self.inf + inf
            self.zeros, self.ones, self.negative = self.zeros + zeros, self.ones + ones, self.negative + negative
            self.max = max(self.max, high)
            return
        magnitude = np.abs(values)
        self.count += len(values)
        nan, inf = int(np.count_nonzero(np.isnan(values))), int(np.count_nonzero(np.isinf(values)))
        self.nan, self.inf = self.nan + nan, self.inf + inf
        self.zeros += len(values) - int(np.count_nonzero(values))
        self.ones += int(np.count_nonzero(values == 1))
        self.negative += int(np.count_nonzero(values < 0))
        finite = magnitude if not nan + inf else magnitude[np.isfinite(magnitude)]
        self.max = max(self.max, float(finite.max(initial=0.0)))
        self.counts += np.bincount(magnitude.view(np.uint32) >> np.uint32(23), minlength=256)[:256]

    def add(self, later: Numbers) -> None:
        for name in ("count", "nan", "inf", "zeros", "ones", "negative", "total"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.max = max(self.max, later.max)
        self.counts += later.counts

    def close(self) -> None:
        """Keep only the octaves that are met: some tens of 256, of each tensor of a model."""
        held = np.flatnonzero(self.counts)
        if len(held):
            small = np.uint32 if self.count < 1 << 32 else np.int64
            self.lowest, self.counts = int(held[0]), self.counts[held[0] : held[-1] + 1].astype(small)

    @property
    def octaves(self) -> Array:
        """``(256,)`` how many are in ``[2^(i−127), 2^(i−126))``; 0 and what is below: ``octaves[0]``."""
        found = np.zeros(256, np.int64)
        found[self.lowest : self.lowest + len(self.counts)] = self.counts
        return found

    @property
    def median(self) -> float:
        """Of |x| over what is not 0, to within a factor of two; 0 where nothing is."""
        counts = self.octaves[1:255]
        total = int(counts.sum())
        if not total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(counts), (total + 1) // 2)) + 1
        return float(1.5 * 2.0 ** (at - 127))

    @property
    def gap(self) -> int:
        """Empty octaves between the largest elements and the next ones."""
        held = np.flatnonzero(self.octaves[:255])
        return int(held[-1] - held[-2]) - 1 if len(held) > 1 else 0


@dataclass(slots=True)
class OneState:
    """Sums over a parameter of one state.

    Attributes:
        numbers: role → what its elements are like.
        bound: m² ≤ K·v; ``unbound``: why it was not looked at.
        unrounded, compared, ulps: weights that are not their rounded master, of how many, by how many last bits.
        low: role → (elements that a 16-bit type holds, of how many): masters in the weight's type, moments in bf16.
        digest: of the weights' (or masters') bits in their order.
        shrunk: elements whose largest second moment is below the present one.
        averaged: (weights that are not their average, of how many), where an average is stored.
        profile: sums by row and column of a matrix; closed when the parameter is done.
    """

    numbers: dict[str, Numbers] = field(default_factory=dict)
    bound: Hits = field(default_factory=Hits)
    unbound: str = ""
    unrounded: int = 0
    compared: int = 0
    ulps: int = 0
    low: dict[str, tuple[int, int]] = field(default_factory=dict)
    digest: int = 0
    count: int = 0
    shrunk: int = 0
    averaged: tuple[int, int] = (0, 0)
    sums: Sums | None = None
    profile: Profile | None = None

    def close(self, fqn: str) -> None:
        """Keep what is judged: of the sums by row and column, and of the octaves those that are met."""
        for numbers in self.numbers.values():
            numbers.close()
        if self.sums is not None:
            self.profile, self.sums = self.sums.close(fqn), None


class OneFold:
    """Folds blocks of one side into :class:`OneState`.

    Args:
        limit: K of the state bound; ``None``: the betas are not known.
        fast: use the compiled code where there is some: the same numbers.
    """

    def __init__(self, betas: Betas | None, limit: float | None, side: int = 0, *, fast: bool = False) -> None:
        self.betas, self.limit, self.side, self.fast = betas, limit, side, fast

    def begin(self, slot: Slot) -> OneState:
        state = OneState(sums=Sums.of(slot))
        kind = slot.dtype((self.side, "exp_avg_sq")) or slot.dtype((self.side, "exp_avg"))
        if kind is None or slot.dtype((self.side, "exp_avg")) is None:
            state.unbound = "no moments"
        elif self.betas is None or self.limit is None:
            state.unbound = "the betas are not known"
        else:
            state.unbound = has_slack(self.betas, kind) or ""
        return state

    def fold(self, state: OneState, slot: Slot, block: Block) -> None:
        side = self.side
        for (at, role), numbers in block.values.items():
            if at == side:
                state.numbers.setdefault(role, Numbers()).take(numbers, fast=self.fast)
        values = block.values
        m, v = values.get((side, "exp_avg")), values.get((side, "exp_avg_sq"))
        if m is not None and v is not None and not state.unbound:
            assert self.betas is not None and self.limit is not None
            kind = slot.dtype((side, "exp_avg_sq")) or "float32"
            found = state_bound(m, v, self.limit, self.betas, kind, fast=self.fast)
            state.bound.add(found, block.start)
        if v is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                state.numbers["exp_avg_sq"].total += float(v.sum(dtype=np.float64))
            largest = values.get((side, "max_exp_avg_sq"))
            if largest is not None:
                state.shrunk += int(np.count_nonzero(largest < v))
        if state.sums is not None:
            main = values.get((side, "master"))
            state.sums.take(block, values.get((side, "param")) if main is None else main, v, fast=self.fast)
        self._masters(state, slot, block)
        self._average(state, slot, block)
        for role in ("exp_avg", "exp_avg_sq"):
            if slot.dtype((side, role)) == "float32":
                _low(state, role, block.bits[side, role], "bfloat16", self.fast)
        name = (side, "master") if (side, "master") in block.bits else (side, "param")
        if name in block.bits:
            state.digest = (state.digest + _digest(block.bits[name], block.start, self.fast)) % (1 << 64)
            state.count += len(block.bits[name])

    def merge(self, state: OneState, later: OneState) -> None:
        for role, numbers in later.numbers.items():
            state.numbers.setdefault(role, Numbers()).add(numbers)
        state.bound.add(later.bound)
        state.unrounded, state.compared = state.unrounded + later.unrounded, state.compared + later.compared
        state.ulps = max(state.ulps, later.ulps)
        for role, (low, full) in later.low.items():
            old = state.low.get(role, (0, 0))
            state.low[role] = old[0] + low, old[1] + full
        state.digest = (state.digest + later.digest) % (1 << 64)
        state.count += later.count
        state.shrunk += later.shrunk
        state.averaged = (state.averaged[0] + later.averaged[0], state.averaged[1] + later.averaged[1])
        if state.sums is not None and later.sums is not None:
            state.sums.merge(later.sums)

    def _masters(self, state: OneState, slot: Slot, block: Block) -> None:
        master, weight = (self.side, "master"), (self.side, "param")
        kind = slot.dtype(weight) or "bfloat16"
        if slot.dtype(master) != "float32" or kind not in (*_HALF, "float32"):
            return
        if kind == "float32":  # both are kept: what the optimizer updates and what the model holds are one number
            a, b = block.bits[master].view(np.int32), block.bits[weight].view(np.int32)
            x, y = block.values[master], block.values[weight]  # -0 is 0
            odd = np.flatnonzero((x != y) & ~np.isnan(x))
            if len(odd):
                ulps = int(np.abs(a[odd].astype(np.int64) - b[odd]).max())
                state.unrounded, state.ulps = state.unrounded + len(odd), max(state.ulps, ulps)
            state.compared += len(a)
            return
        bits = block.bits[master].view(np.uint32)
        _low(state, "master", bits, kind, self.fast)
        if weight in block.bits:
            count, ulps = rounding(bits, block.bits[weight].view(np.uint16), _HALF[kind], fast=self.fast)
            state.unrounded, state.ulps = state.unrounded + count, max(state.ulps, ulps)
            state.compared += len(bits)

    def _average(self, state: OneState, slot: Slot, block: Block) -> None:
        """How many weights are not the average of them that is stored beside, in the coarser of the two types."""
        kind = slot.dtype((self.side, "ema"))
        for role in ("master", "param"):
            mine = slot.dtype((self.side, role))
            if kind is None or mine is None or (mine != kind and not (kind == "float32" and mine in _HALF)):
                continue
            average, weight = block.bits[self.side, "ema"], block.bits[self.side, role]
            if mine == kind:
                differ = int(np.count_nonzero(average != weight))
            else:
                differ = rounding(average.view(np.uint32), weight.view(np.uint16), _HALF[mine], fast=self.fast)[0]
            state.averaged = (state.averaged[0] + differ, state.averaged[1] + len(weight))
            return


def _low(state: OneState, role: str, bits: Array, kind: str, fast: bool) -> None:
    low, full = low_bits(bits.view(np.uint32), kind, fast=fast)
    old = state.low.get(role, (0, 0))
    state.low[role] = old[0] + low, old[1] + full


def _digest(bits: Array, start: int, fast: bool = False) -> int:
    """Σ mix(bits, position) mod 2⁶⁴: adds up over blocks in any order, and changes where two elements trade places."""
    if fast and bits.dtype.itemsize in (2, 4):
        from workbench.doctor.passes import fast_one

        return fast_one.digest(bits, start)
    raw, total = bits.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[bits.dtype.itemsize]), 0
    for first in range(0, len(raw), PIECE):
        mixed = raw[first : first + PIECE].astype(np.uint64)
        mixed += np.uint64(1)
        place = np.arange(start + first, start + first + len(mixed), dtype=np.uint64) * _SALT
        mixed *= place | np.uint64(1)
        mixed ^= mixed >> np.uint64(29)
        total += int((mixed * _SALT).sum(dtype=np.uint64))
    return total % (1 << 64)
