"""Numbers for pictures: some thousand elements of each tensor, read when a picture is drawn, never kept by a pass.

::

    tensor  ▒·····▒·····▒·····▒     at most 16 runs of neighbours, spread over it, 4,096 elements in all

Pictures say how much was read; the verdict rests on the passes, which read every element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.laws.bounds import ROUNDINGS, TINY, UNITS, bound, has_slack
from workbench.doctor.passes.pair import Update
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

__all__ = ["ENDS", "Cloud", "boxes_of", "low_bits", "sample_pair"]

Array = np.ndarray[Any, Any]
LIMIT = 4096  #: elements of a tensor
TOTAL = 1 << 20  #: elements of all
RUNS = 16
ENDS = -99.0, 99.0  #: stand for log10 of 0 and of what nothing bounds
MANTISSA = 23  #: bits of a float32's


@dataclass(frozen=True, eq=False)
class Cloud:
    """Sampled elements of two states between which an optimizer made k updates.

    Attributes:
        fqns: tensors; tensor: ``(n,)`` which of them an element is of.
        ratio: ``(n,)`` log10 v_B/v_A; excess: log10 (Δm)²/(K·Δv), each side given what rounding may do.
        broken: ``(n,)`` elements that break the floor or the transition.
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
    """Where elements stand against floor and transition; ``None`` if no parameter can be looked at.

    Tensors that cannot be read are left out: the passes say so.
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
    """How many sampled masters end in 0, 1 … 23 zero bits; ``None`` where none are stored in float32.

    Powers of two and 0, which have no low bits, are left out.
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
    """Offsets and sizes of at most :data:`RUNS` boxes, ``limit`` elements in all, spread over a tensor."""
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
        if tensors[0].numel and not any(has_slack(update.betas, one.element.name, update.k) for one in tensors):
            yield fqn, update, tensors


def _places(m_a: Array, v_a: Array, m_b: Array, v_b: Array, update: Update, kind: str) -> tuple[Array, Array, Array]:
    """The two coordinates, and which elements break a law, by the slack of :mod:`workbench.doctor.laws.bounds`."""
    assert update.betas is not None
    (one, two), k, unit = update.betas, update.k, UNITS[kind]
    fade = one / math.sqrt(two)
    with np.errstate(all="ignore"):
        under = 3 * TINY[kind] * min(k, 1 / (1 - two))
        lost = -math.expm1(3 * k * math.log1p(-unit))
        least = two**k * v_a
        sunk = least > v_b + lost * least + under
        size = np.abs(m_a) + np.sqrt(bound(update.betas) * (np.abs(v_b) + under))
        ages = min(k, 1 / (1 - fade)) if fade < 1 else k
        moved = np.maximum(np.abs(m_b - one**k * m_a) - 2 * ROUNDINGS * unit * ages * size, 0.0)
        gained = np.maximum(v_b - least, 0.0) + ROUNDINGS * unit * k * np.abs(v_b) + under
        part = moved**2 / (bound(update.betas, k) * gained)
        ratio, excess = np.log10(v_b / v_a), np.log10(part)
    seen = np.isfinite(m_a) & np.isfinite(v_a) & np.isfinite(m_b) & np.isfinite(v_b) & ((v_a != 0) | (v_b != 0))
    ratio = np.nan_to_num(ratio, nan=ENDS[0], neginf=ENDS[0], posinf=ENDS[1])
    excess = np.nan_to_num(excess, nan=ENDS[1], neginf=ENDS[0], posinf=ENDS[1])
    return ratio[seen], excess[seen], (sunk | (part > 1))[seen]


def _numbers(tensor: LazyTensor, limit: int) -> Array:
    return np.array(Decoder(tensor.element).numbers(_bits(tensor, limit)), np.float64)


def _bits(tensor: LazyTensor, limit: int) -> Array:
    return np.concatenate([box.reshape(-1) for box in map(np.array, tensor.boxes(*boxes_of(tensor.shape, limit)))])
