"""What one state says about itself, parameter by parameter, in one pass: the sums behind the S rules.

::

    param ─┐                        numbers of each role: NaN, zeros, powers of two of |x|
    master ├─ block ──► OneState    state bound m² ≤ K·v      v ≥ 0      round(master) = weight
    m, v  ─┘                        low bits of masters and moments      a hash of the weights' bits in their order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.doctor.laws.bounds import PIECE, Hits, has_slack, state_bound, state_bound_terms
from workbench.doctor.laws.exact import LOW, low_bits, rounding
from workbench.doctor.passes.blocks import BLOCK, WIDE, Block, Slot
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
            from workbench.doctor.compiled import fast_one

            self.note(len(values), *fast_one.numbers(values))
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

    def note(self, count: int, found: Sequence[int], octaves: Array) -> None:
        """Take in what the compiled code counted: NaN, infinite, 0, 1, below 0, and the bits of the largest."""
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
        self.block = WIDE if fast else BLOCK

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
        values = {role: block.values[at, role] for at, role in block.values if at == side}
        if not values:
            return
        kinds = {role: slot.dtype((side, role)) for role in values}
        if self.fast and all(one.dtype == np.float32 for one in values.values()):
            self._compiled(state, values, kinds, block)
        else:
            self._plain(state, values, kinds, block)
        v, largest = values.get("exp_avg_sq"), values.get("max_exp_avg_sq")
        if v is not None and largest is not None:
            state.shrunk += int(np.count_nonzero(largest < v))
        if state.sums is not None:
            state.sums.take(block, values.get("master", values.get("param")), v, fast=self.fast)
        self._masters(state, kinds, block)
        self._average(state, kinds, block)

    def _plain(
        self, state: OneState, values: Mapping[str, Array], kinds: Mapping[str, str | None], block: Block
    ) -> None:  # fmt: skip
        for role, numbers in values.items():
            state.numbers.setdefault(role, Numbers()).take(numbers)
        m, v = values.get("exp_avg"), values.get("exp_avg_sq")
        if m is not None and v is not None and not state.unbound:
            assert self.betas is not None and self.limit is not None
            kind = kinds["exp_avg_sq"] or "float32"
            state.bound.add(state_bound(m, v, self.limit, self.betas, kind), block.start)
        if v is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                state.numbers["exp_avg_sq"].total += float(v.sum(dtype=np.float64))
        for role, kind in _low_of(kinds).items():
            _low(state, role, *low_bits(block.bits[self.side, role].view(np.uint32), kind))
        if (bits := self._main(block)) is not None:
            state.digest = (state.digest + _digest(bits, block.start)) % (1 << 64)
            state.count += len(bits)

    def _compiled(
        self, state: OneState, values: Mapping[str, Array], kinds: Mapping[str, str | None], block: Block
    ) -> None:  # fmt: skip
        from workbench.doctor.compiled import fast_one

        roles = list(values)
        low, terms = _low_of(kinds), None
        places = tuple(roles.index(role) if role in values else -1 for role in ("exp_avg", "exp_avg_sq"))
        if -1 not in places and not state.unbound:
            assert self.betas is not None and self.limit is not None
            terms = state_bound_terms(self.limit, self.betas, kinds["exp_avg_sq"] or "float32")
        main = self._main(block)
        masks = [LOW[low[role]] if role in low else 0 for role in roles]
        found, bound, total, digest = fast_one.fold(
            list(values.values()), masks, main, block.start, (places[0], places[1]), terms, state.bound.worst
        )
        size = len(next(iter(values.values())))
        for role, row in zip(roles, found, strict=True):
            state.numbers.setdefault(role, Numbers()).note(size, row[:6].tolist(), row[8:])
            if role in low:
                _low(state, role, int(row[6]), int(row[7]))
        if terms is not None:
            broken, worst, at = bound
            state.bound.add(Hits(broken, size, worst, at), block.start)
        if "exp_avg_sq" in values:
            state.numbers["exp_avg_sq"].total += total
        if main is not None:
            state.digest = (state.digest + digest) % (1 << 64)
            state.count += size

    def _main(self, block: Block) -> Array | None:
        """The bits that the digest is of: the masters', else the weights'."""
        for role in ("master", "param"):
            if (self.side, role) in block.bits:
                return block.bits[self.side, role]
        return None

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

    def _masters(self, state: OneState, kinds: Mapping[str, str | None], block: Block) -> None:
        """Weights against masters: what the optimizer updates and what the model holds are one number."""
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
            count, ulps = rounding(bits, block.bits[weight].view(np.uint16), _HALF[kind], fast=self.fast)
        state.unrounded, state.ulps = state.unrounded + count, max(state.ulps, ulps)
        state.compared += len(bits)

    def _average(self, state: OneState, kinds: Mapping[str, str | None], block: Block) -> None:
        """How many weights are not the average of them that is stored beside, in the coarser of the two types."""
        kind = kinds.get("ema")
        for role in ("master", "param"):
            mine = kinds.get(role)
            if kind is None or mine is None or (mine != kind and not (kind == "float32" and mine in _HALF)):
                continue
            average, weight = block.bits[self.side, "ema"], block.bits[self.side, role]
            if mine == kind:
                differ = int(np.count_nonzero(average != weight))
            else:
                differ = rounding(average.view(np.uint32), weight.view(np.uint16), _HALF[mine], fast=self.fast)[0]
            state.averaged = (state.averaged[0] + differ, state.averaged[1] + len(weight))
            return


def _low_of(kinds: Mapping[str, str | None]) -> dict[str, str]:
    """Whose low bits are counted, and the type that would lack them: the weights' for masters, bf16 for moments."""
    found = {role: "bfloat16" for role in ("exp_avg", "exp_avg_sq") if kinds.get(role) == "float32"}
    kind = kinds.get("param") or "bfloat16"
    return found | ({"master": kind} if kinds.get("master") == "float32" and kind in _HALF else {})


def _low(state: OneState, role: str, low: int, full: int) -> None:
    old = state.low.get(role, (0, 0))
    state.low[role] = old[0] + low, old[1] + full


def _digest(bits: Array, start: int, fast: bool = False) -> int:
    """Σ mix(bits, position) mod 2⁶⁴: adds up over blocks in any order, and changes where two elements trade places."""
    if fast and bits.dtype.itemsize in (2, 4):
        from workbench.doctor.compiled import fast_one

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
