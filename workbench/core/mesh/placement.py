"""Placements: which boxes of a global tensor a rank's local tensor is made of, for all tensors and ranks at once.

One placement per mesh axis, applied from left to right, each to the result of those before it::

    shape (5, 4)   dp=2, tp=2                 dp 0          dp 1
    dp Shard(0)    rows 0:3 │ 3:5    tp 0     rows 0:3      rows 3:5      local (3, 2), (2, 2)
    tp Shard(1)                               cols 0:2      cols 0:2
                                     tp 1     cols 2:4      cols 2:4

A local tensor may be several boxes of the global one. [gate; up] under TP is ``StridedShard(0, 2)``::

    gate_up (8, h)   ┌ gate ┐ 0   tp 0: rows 0:2, 4:6    local (4, h):  gate 0:2
    tp=2             │      │ 2   tp 1: rows 2:4, 6:8                   up   4:6
                     ├ up   ┤ 4
                     └      ┘ 6

Sizes that do not divide are cut as ``torch.chunk`` cuts them: pieces of ceil(n / ranks), the last ones short or empty.

Sources: torch 2.13 ``distributed/tensor/placement_types.py``, ``_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same elements."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Pieces of ceil(n / ranks) along ``dim`` (negative ones count from the end)."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """``dim`` in ``split_factor`` equal parts, each cut as by :class:`Shard`; a rank joins its pieces of all parts.

    torch's ``_StridedShard`` (FSDP2 over TP), and what TP does to [gate; up] (Megatron's ``partition_stride`` 2).
    """

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class PartedShard:
    """Like :class:`StridedShard`, with parts of the given sizes: [q; k; v] in one weight."""

    dim: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flat:
    """A range of the flattened tensor (FSDP1, ZeRO); the local tensor is 1-d. It must be the last one applied.

    Attributes:
        starts, stops: elements, one pair per coordinate of the axis; without them, ceil(n / ranks) elements each.
    """

    starts: tuple[int, ...] | None = None
    stops: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Only:
    """Held whole by these coordinates of the axis; the others do not have the tensor (pipeline stages, experts)."""

    coordinates: tuple[int, ...]


Placement = Replicate | Shard | StridedShard | PartedShard | Flat | Only


def flat_buffer(numels: Sequence[int], ranks: int, *, multiple: int = 1) -> list[Flat]:
    """Return the placement of each tensor in one flat buffer of all tensors that is cut into ``ranks`` equal parts.

    The end is padded to a multiple of ``ranks · multiple`` elements, as FSDP1 and ZeRO do.
    """
    unit = ranks * multiple
    each = -(-sum(numels) // unit) * unit // ranks
    found, base = [], 0
    for numel in numels:
        cuts = [min(max(rank * each - base, 0), numel) for rank in range(ranks + 1)]
        found.append(Flat(tuple(cuts[:-1]), tuple(cuts[1:])))
        base += numel
    return found


def of_torch(placement: Any) -> Placement:
    """Convert a ``torch.distributed.tensor`` placement.

    Raises:
        UsageError: a pending reduction (``Partial``) or an unknown placement.
    """
    name = type(placement).__name__
    if name == "Replicate":
        return Replicate()
    if name == "Shard":
        return Shard(int(placement.dim))
    if name == "_StridedShard":
        return StridedShard(int(placement.dim), int(placement.split_factor))
    raise UsageError(f"placement {placement} does not describe stored elements; redistribute the DTensor first")
