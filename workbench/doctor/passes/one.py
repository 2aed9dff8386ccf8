"""Sums over one state, parameter by parameter, in one pass: the numbers behind the S rules.

::

    param ─┐                        numbers of each role: NaN, zeros, powers of two of |x|
    master ├─ block ──► OneState    state bound m² ≤ K·v      v ≥ 0      round(master) = weight
    m, v  ─┘                        low bits of masters and moments      a hash of the weights' bits and positions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.doctor.laws.bounds import PIECE, Hits, has_slack, state_bound, state_bound_terms
from workbench.doctor.laws.exact import LOW, low_bits, rounding
from workbench.doctor.passes.blocks import BLOCK, WIDE, SlotBlock, TensorSlot
from workbench.doctor.passes.profiles import MatrixProfile, Sums

Betas = tuple[float, float]
_SALT = np.uint64(0x9E3779B97F4A7C15)
_HALF = {"float16": True, "bfloat16": False}


@dataclass(slots=True)
class Numbers:
    """Counts over the elements of one tensor.

    Attributes:
        zeros: number of elements that are 0. ones: number that are exactly 1. total: their sum, for second moments.
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

    def take(self, values: Array) -> None:
        with np.errstate(over="ignore"):  # a float64 beyond float32 counts as infinite
            values = values.astype(np.float32, copy=False)
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

    def note(self, count: int, found: Sequence[int], octaves: Array) -> None:
        """Add the counts of compiled code: NaN, infinite, 0, 1, below 0, and the bits of the largest."""
        self.count, self.nan, self.inf = self.count + count, self.nan + found[0], self.inf + found[1]
        self.zeros, self.ones, self.negative = self.zeros + found[2], self.ones + found[3], self.negative + found[4]
        self.max = max(self.max, float(np.int32(found[5]).view(np.float32)))
        self.counts += octaves

    def add(self, later: Numbers) -> None:
        for name in ("count", "nan", "inf", "zeros", "ones", "negative", "total"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.max = max(self.max, later.max)
        self.counts += later.counts

    def close(self) -> None:
        """Keep only the octaves that occur, a few dozen of 256 for each tensor of a model."""
        held = np.flatnonzero(self.counts)
        if len(held):
            small = np.uint32 if self.count < 1 << 32 else np.int64
            self.lowest, self.counts = int(held[0]), self.counts[held[0] : held[-1] + 1].astype(small)

    @property
    def octaves(self) -> Array:
        """``(256,)`` number of elements in ``[2^(i−127), 2^(i−126))``; ``octaves[0]`` has 0 and smaller ones."""
        found = np.zeros(256, np.int64)
        found[self.lowest : self.lowest + len(self.counts)] = self.counts
        return found

    @property
    def median(self) -> float:
        """Median of |x| over nonzero elements, to within a factor of two; 0 if there are none."""
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
        numbers: role → counts over its elements.
        bound: m² ≤ K·v. unbound: why it was not checked.
        unrounded, compared, ulps: weights that differ from their rounded master, all compared, largest distance.
        low: role → (elements that a 16-bit type holds, all): masters in the weight's type, moments in bf16, float32
            weights without masters in float16 or bf16.
        digest: hash of the weights' (or masters') bits and positions.
        shrunk: elements whose largest second moment is below the current one.
        averaged: (weights that differ from their average, all), if an average is stored.
        profile: sums by row and column of a matrix, final when the parameter is done.
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
    profile: MatrixProfile | None = None

    def close(self, fqn: str) -> None:
        """Keep only the profile of the row and column sums, and the octaves that occur."""
        for numbers in self.numbers.values():
            numbers.close()
        if self.sums is not None:
            self.profile, self.sums = self.sums.close(fqn), None


class OneFold:
    """Folds blocks of one side into :class:`OneState`.

    Args:
        limit: K of the state bound; ``None`` if the betas are unknown.
        fast: use compiled code where it exists; the numbers are the same.
    """

    def __init__(self, betas: Betas | None, limit: float | None, side: int = 0, *, fast: bool = False) -> None:
        self.betas, self.limit, self.side, self.fast = betas, limit, side, fast
        self.block = WIDE if fast else BLOCK

    def begin(self, slot: TensorSlot) -> OneState:
        state = OneState(sums=Sums.of(slot))
        kind = slot.dtype((self.side, "exp_avg_sq")) or slot.dtype((self.side, "exp_avg"))
        if kind is None or slot.dtype((self.side, "exp_avg")) is None:
            state.unbound = "no moments"
        elif self.betas is None or self.limit is None:
            state.unbound = "the betas are unknown"
        else:
            state.unbound = has_slack(self.betas, kind) or ""
        return state

    def fold(self, state: OneState, slot: TensorSlot, block: SlotBlock) -> None:
        side = self.side
        values = {role: block.values[at, role] for at, role in block.values if at == side}
        if not values:
            return
        kinds = {role: slot.dtype((side, role)) for role in values}
        fast = self._compiled(values)
        low = _low_of(kinds)
        for role, held in values.items():
            numbers = state.numbers.setdefault(role, Numbers())
            if fast is None:
                numbers.take(held)
                if role in low:
                    _low(state, role, *low_bits(block.bits[side, role].view(np.uint32), low[role]))
                continue
            found, octaves = fast.numbers(held, LOW[low[role]] if role in low else 0)
            numbers.note(len(held), found, octaves)
            if role in low:
                _low(state, role, *found[6:])
        m, v = values.get("exp_avg"), values.get("exp_avg_sq")
        if m is not None and v is not None and not state.unbound:
            assert self.betas is not None and self.limit is not None
            known = self.limit, self.betas, kinds["exp_avg_sq"] or "float32"
            state.bound.add(
                state_bound(m, v, *known)
                if fast is None
                else fast.state_bound(m, v, state_bound_terms(*known), state.bound.worst),
                block.start,
            )
        if v is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                state.numbers["exp_avg_sq"].total += float(v.sum(dtype=np.float64)) if fast is None else fast.total(v)
        main = next((block.bits[side, role] for role in ("master", "param") if (side, role) in block.bits), None)
        if main is not None:  # the masters' bits, else the weights'
            mixed = _digest(main, block.start) if fast is None else fast.digest(main, block.start)
            state.digest = (state.digest + mixed) % (1 << 64)
            state.count += len(main)
        largest = values.get("max_exp_avg_sq")
        if v is not None and largest is not None:
            state.shrunk += int(np.count_nonzero(largest < v))
        if state.sums is not None:
            state.sums.take(block, values.get("master", values.get("param")), v, fast=self.fast)
        self._masters(state, kinds, block)
        self._average(state, kinds, block)

    def _compiled(self, values: Mapping[str, Array]) -> Any:
        """Return the module of the compiled code if it supports the types of all of them."""
        if not self.fast or any(one.dtype != np.float32 for one in values.values()):
            return None
        from workbench.doctor.compiled import fast_one

        return fast_one

    def _rounding(self, master: Array, weight: Array, half: bool) -> tuple[int, int]:
        if self.fast and not half:
            from workbench.doctor.compiled import fast_one

            return fast_one.rounding(master, weight)
        return rounding(master, weight, half)

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

    def _masters(self, state: OneState, kinds: Mapping[str, str | None], block: SlotBlock) -> None:
        """Compare weights with masters."""
        kind = kinds.get("param")
        if kinds.get("master") != "float32" or kind not in (*_HALF, "float32"):
            return
        master, weight = (self.side, "master"), (self.side, "param")
        bits = block.bits[master].view(np.uint32)
        if kind == "float32":
            a, b = bits.view(np.int32), block.bits[weight].view(np.int32)
            x, y = block.values[master], block.values[weight]  # -0 is 0
            odd = np.flatnonzero((x != y) & ~np.isnan(x))
            count, ulps = len(odd), int(np.abs(a[odd].astype(np.int64) - b[odd]).max(initial=0))
        else:
            count, ulps = self._rounding(bits, block.bits[weight].view(np.uint16), _HALF[kind])
        state.unrounded, state.ulps = state.unrounded + count, max(state.ulps, ulps)
        state.compared += len(bits)

    def _average(self, state: OneState, kinds: Mapping[str, str | None], block: SlotBlock) -> None:
        """Count the weights that differ from their stored average, in the coarser of the two types."""
        kind = kinds.get("ema")
        for role in ("master", "param"):
            mine = kinds.get(role)
            if kind is None or mine is None or (mine != kind and not (kind == "float32" and mine in _HALF)):
                continue
            average, weight = block.bits[self.side, "ema"], block.bits[self.side, role]
            if mine == kind:
                differ = int(np.count_nonzero(average != weight))
            else:
                differ = self._rounding(average.view(np.uint32), weight.view(np.uint16), _HALF[mine])[0]
            state.averaged = (state.averaged[0] + differ, state.averaged[1] + len(weight))
            return


def _low_of(kinds: Mapping[str, str | None]) -> dict[str, str]:
    """Return role → the 16-bit type that lacks the low bits: the weights' type for masters, bf16 for moments.

    For weights, it is float16: what bf16 holds has none of these bits either.
    """
    found = {role: "bfloat16" for role in ("exp_avg", "exp_avg_sq") if kinds.get(role) == "float32"}
    if kinds.get("param") == "float32" and "master" not in kinds:
        found["param"] = "float16"
    kind = kinds.get("param") or "bfloat16"
    return found | ({"master": kind} if kinds.get("master") == "float32" and kind in _HALF else {})


def _low(state: OneState, role: str, low: int, full: int) -> None:
    old = state.low.get(role, (0, 0))
    state.low[role] = old[0] + low, old[1] + full


def _digest(bits: Array, start: int) -> int:
    """Return Σ mix(bits, position) mod 2⁶⁴, which is additive over blocks and changes if two elements are swapped."""
    raw, total = bits.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[bits.dtype.itemsize]), 0
    for first in range(0, len(raw), PIECE):
        mixed = raw[first : first + PIECE].astype(np.uint64)
        mixed += np.uint64(1)
        place = np.arange(start + first, start + first + len(mixed), dtype=np.uint64) * _SALT
        mixed *= place | np.uint64(1)
        mixed ^= mixed >> np.uint64(29)
        total += int((mixed * _SALT).sum(dtype=np.uint64))
    return total % (1 << 64)
