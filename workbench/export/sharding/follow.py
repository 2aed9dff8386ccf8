"""Placements of tensors that belong to a parameter but may differ in shape: moments, counters, quantisation scales.

::

    weight (256, 512)          tp Shard(0)     128 rows a rank
    exp_avg (256, 512)         the same        128 rows
    step ()                    whole
    scale_inv (2, 4)           Shard(0)        1 row a rank: 128 rows are one block
    scale_inv (2, 4), tp=4     does not fit:   64 rows are half a block
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from workbench.core.mesh.placement import Flat, Only, PartedShard, Placement, Replicate, Shard, StridedShard

Steps = tuple[tuple[str, Placement], ...]
SCALES = ("scale", "zero_point")


def follow(
    parameter: tuple[int, ...], shape: tuple[int, ...], role: str, steps: Steps, sizes: Mapping[str, int]
) -> Steps | None:
    """Return a parameter's placements for one of its tensors; ``None`` if they do not fit.

    Args:
        parameter: the parameter's shape.
        shape: the tensor's.
        role: the tensor's.
        steps: the parameter's placements, in the order they are applied.
        sizes: of the mesh axes.
    """
    if shape == parameter:
        return steps
    if prod(shape) <= 1:  # a counter, or one scale for all
        return tuple(step for step in steps if isinstance(step[1], Only))
    if role not in SCALES or len(shape) not in (1, len(parameter)):
        return steps if not any(_cuts(placement) for _, placement in steps) else None
    return _of_blocks(parameter, shape, steps, sizes)


def _of_blocks(
    parameter: tuple[int, ...], shape: tuple[int, ...], steps: Steps, sizes: Mapping[str, int]
) -> Steps | None:
    """Place scales per row or per block: cut where the weight is cut, if that is between two blocks."""
    kept: list[tuple[str, Placement]] = []
    length = list(parameter)
    for axis, placement in steps:
        if isinstance(placement, Only | Replicate):
            kept.append((axis, placement))
            continue
        if isinstance(placement, Flat | PartedShard) or placement.dim < 0:
            return None
        dim, parts = placement.dim, placement.split_factor if isinstance(placement, StridedShard) else 1
        blocks = shape[dim] if dim < len(shape) else 1
        if blocks == 1:
            continue  # one scale for the whole axis: every rank needs it
        block, rest = divmod(parameter[dim], blocks)
        if rest or block & (block - 1):
            return None  # the last block is short, or blocks are odd: their ends are unknown
        pieces = parts * sizes[axis]
        if length[dim] % pieces or length[dim] // pieces % block:
            return None
        length[dim] //= sizes[axis]
        kept.append((axis, placement))
    return tuple(kept)


def _cuts(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard | PartedShard | Flat)
