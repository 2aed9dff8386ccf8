"""Samples for pictures: a few thousand elements of each tensor, read when a picture is drawn.

::

    tensor  ▒·····▒·····▒·····▒     up to 16 runs of neighbours, spread over it, 4,096 elements in all

Pictures state how much was read; the verdict is based on the passes, which read every element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.laws.bounds import UNITS, floor_sides, floor_terms, has_slack, transition_terms
from workbench.doctor.passes.pair import Update
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

LIMIT = 4096  #: elements per tensor
TOTAL = 1 << 20  #: elements of all tensors
RUNS = 16
ENDS = -99.0, 99.0  #: stand for log10 of 0 and of infinity
MANTISSA = 23  #: bits of a float32 mantissa


@dataclass(frozen=True, eq=False)
class Cloud:
    """Sampled elements of two states between which an optimizer made k updates.

    Attributes:
        fqns: the sampled tensors.
        tensor: ``(n,)`` index of each element's tensor in ``fqns``.
        ratio: ``(n,)`` log10 v_B/v_A.
        excess: ``(n,)`` log10 (Δm)²/(K·Δv), with both sides widened by rounding.
        broken: ``(n,)`` whether an element breaks the floor or the transition.
        floor: least and greatest log10 β2^k.
        k: least and greatest number of updates.
    """

    fqns: tuple[str, ...]
    tensor: Array
    ratio: Array
    excess: Array
    broken: Array
    floor: tuple[float, float]
    k: tuple[int, int]


def sample_pair(pair: Pair, updates: Mapping[str, Update], limit: int = LIMIT) -> Cloud | None:
    """Sample elements and compare them with floor and transition; ``None`` if no parameter allows it.

    Tensors that cannot be read are left out; the passes report them.
    """
    wanted = list(_looked(pair, updates))
    limit = max(min(limit, TOTAL // max(len(wanted), 1)), RUNS)
    names: list[str] = []
    parts: list[tuple[Array, Array, Array]] = []
    floors: list[float] = []
    for fqn, update, tensors in wanted:
        try:
            m_a, v_a, m_b, v_b = (_numbers(tensor, limit) for tensor in tensors)
        except WorkbenchError:
            continue
        kind = max((tensor.element.name for tensor in tensors), key=lambda name: UNITS[name])
        parts.append(_places(m_a, v_a, m_b, v_b, update, kind))
        names.append(fqn)
        assert update.betas is not None
        floors.append(update.k * math.log10(update.betas[1]))
    if not parts:
        return None
    ratio, excess, broken = (np.concatenate(list(column)) for column in zip(*parts, strict=True))
    tensor = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    ks = [update.k for _, update, _ in wanted]
    return Cloud(tuple(names), tensor, ratio, excess, broken, (min(floors), max(floors)), (min(ks), max(ks)))


def low_bits(state: State, limit: int = LIMIT) -> Array | None:
    """Count the sampled masters that end in 0, 1 … 23 zero bits; ``None`` if none are stored in float32.

    Powers of two and 0 have no low bits and are left out.
    """
    positions = [roles["master"] for roles in state.params.values() if "master" in roles]
    counts = np.zeros(MANTISSA + 1, np.int64)
    limit = max(min(limit, TOTAL // max(len(positions), 1)), RUNS)
    for position in positions:
        tensor = state.tensor(position)
        if tensor.element.name != "float32":
            continue
        try:
            bits = _bits(tensor, limit).view(np.uint32) & np.uint32((1 << MANTISSA) - 1)
        except WorkbenchError:
            continue
        bits = bits[bits != 0]
        lowest = (bits & (~bits + np.uint32(1))).astype(np.float64)
        counts += np.bincount(np.log2(lowest).astype(np.int64), minlength=MANTISSA + 1)
    return counts if counts.any() else None


def boxes_of(shape: tuple[int, ...], limit: int) -> tuple[Array, Array]:
    """Return offsets and sizes of up to :data:`RUNS` boxes with ``limit`` elements in all, spread over a tensor."""
    if not shape:
        return np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64)
    if len(shape) == 1:
        runs = min(RUNS, max(shape[0] // 64, 1))
        size = min(limit // runs, shape[0] // runs)
        starts = np.linspace(0, shape[0] - size, runs).astype(np.int64)
        return starts[:, None], np.full((runs, 1), size, np.int64)
    rows = math.prod(shape[:-1])
    runs, size = min(RUNS, rows), min(limit // min(RUNS, rows), shape[-1])
    picked = np.linspace(0, rows - 1, runs).astype(np.int64)
    columns = np.linspace(0, shape[-1] - size, runs).astype(np.int64)
    lead = np.stack(np.unravel_index(picked, shape[:-1]), axis=1)
    offsets = np.concatenate([lead, columns[:, None]], axis=1).astype(np.int64)
    sizes = np.ones_like(offsets)
    sizes[:, -1] = size
    return offsets, sizes


def _looked(pair: Pair, updates: Mapping[str, Update]) -> Iterator[tuple[str, Update, list[LazyTensor]]]:
    for fqn, roles in pair.shared():
        update = updates.get(fqn)
        if update is None or update.betas is None or update.k < 1 or not {"exp_avg", "exp_avg_sq"} <= roles.keys():
            continue
        if update.bars("transition"):
            continue
        tensors = [
            state.tensor(roles[role][side])
            for side, state in enumerate((pair.a, pair.b))
            for role in ("exp_avg", "exp_avg_sq")
        ]
        if tensors[0].numel() and not any(has_slack(update.betas, one.element.name, update.k) for one in tensors):
            yield fqn, update, tensors


def _places(m_a: Array, v_a: Array, m_b: Array, v_b: Array, update: Update, kind: str) -> tuple[Array, Array, Array]:
    """Return both coordinates and whether each element breaks a law, with the slack of ``laws.bounds``."""
    assert update.betas is not None
    fade_m, _, limit, per_v, under, all_limit, per_m = transition_terms(update.betas, update.k, kind)
    with np.errstate(all="ignore"):
        least, _, allowed = floor_sides(v_a, v_b, *floor_terms(update.betas[1], update.k, kind))
        sunk = least > allowed
        size = np.abs(m_a) + np.sqrt(all_limit * (np.abs(v_b) + under))
        moved = np.maximum(np.abs(m_b - fade_m * m_a) - per_m * size, 0.0)
        gained = np.maximum(v_b - least, 0.0) + per_v * np.abs(v_b) + under
        part = moved**2 / (limit * gained)
        ratio, excess = np.log10(v_b / v_a), np.log10(part)
    seen = np.isfinite(m_a) & np.isfinite(v_a) & np.isfinite(m_b) & np.isfinite(v_b) & ((v_a != 0) | (v_b != 0))
    ratio = np.nan_to_num(ratio, nan=ENDS[0], neginf=ENDS[0], posinf=ENDS[1])
    excess = np.nan_to_num(excess, nan=ENDS[1], neginf=ENDS[0], posinf=ENDS[1])
    return ratio[seen], excess[seen], (sunk | (part > 1))[seen]


def _numbers(tensor: LazyTensor, limit: int) -> Array:
    return np.array(Decoder(tensor.element).numbers(_bits(tensor, limit)), np.float64)


def _bits(tensor: LazyTensor, limit: int) -> Array:
    return np.concatenate([box.reshape(-1) for box in map(np.array, tensor.boxes(*boxes_of(tensor.shape, limit)))])
