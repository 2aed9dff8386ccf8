"""Which rank writes which of the replicated parts.

::

    replicated     │ embedding 1.2 GB │ w1 │ w2 │ … │ norm │         on ranks 0 to 3
    cut            │16 MB│16 MB│ … │  w1 │ w2 │ … │ norm │         tensors above 64 MiB, along one dimension
    spread         largest first, each to the rank with the fewest bytes among its holders

Ranks that hold shards of their own start with the bytes of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from workbench.core.fingerprint import BLOCK

PARTS = 4  #: a part of a cut tensor has about this fraction of the limit above which tensors are cut


class Cut(NamedTuple):
    """A part of a box: offsets within the tensor, and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def cut(offsets: Sequence[int], sizes: Sequence[int], itemsize: int, above: int) -> list[Cut]:
    """Divide a box of more than ``above`` bytes along its first dimension that has enough rows, or return it whole.

    If possible, the parts consist of whole blocks of a fingerprint.
    """
    whole = Cut(tuple(offsets), tuple(sizes))
    nbytes = prod(sizes) * itemsize
    if nbytes <= above:
        return [whole]
    count = -(-nbytes // max(above // PARTS, itemsize))
    dim = next((d for d, size in enumerate(sizes) if size >= count), max(range(len(sizes)), key=lambda d: sizes[d]))
    rows = max(1, sizes[dim] // count)
    if dim == 0:
        row = prod(sizes[1:]) * itemsize
        rows = next((n for n in range(rows, 2 * rows + 1) if n * row % BLOCK == 0), rows)
    parts = []
    for start in range(0, sizes[dim], rows):
        size = min(rows, sizes[dim] - start)
        parts.append(
            Cut(
                (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                (*sizes[:dim], size, *sizes[dim + 1 :]),
            )
        )
    return parts


def spread(loads: Sequence[int], weights: Sequence[int], holders: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that writes each part.

    Args:
        loads: bytes that each rank writes anyway.
        weights: bytes of each part.
        holders: the ranks that hold each part.
    """
    loads = list(loads)
    chosen = [0] * len(weights)
    for at in sorted(range(len(weights)), key=lambda at: (-weights[at], at)):
        rank = min(holders[at], key=lambda rank: (loads[rank], rank))
        loads[rank] += weights[at]
        chosen[at] = rank
    return chosen
