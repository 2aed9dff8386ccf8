"""Arithmetic on orders: old positions of rows, factorizations, cycles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.core.arrays import Array, Ints

ANCHORS = 8  #: rows on which a form is tested first


def assign(before: Array, after: Array) -> Ints:
    """Return an old row for each new one: the same position if possible, otherwise equal rows in order."""
    order = np.arange(len(before))
    rest = np.flatnonzero(before != after)
    order[rest[np.argsort(after[rest], kind="stable")]] = rest[np.argsort(before[rest], kind="stable")]
    return order


def parted(order: Ints) -> tuple[int, list[int]] | None:
    """Return the number of groups and the sizes of their parts if ``order`` reads part after part over all groups."""
    n = len(order)
    run = 1
    while run < n and order[run] == order[run - 1] + 1:
        run += 1
    if order[0] != 0 or run >= n:
        return None
    width = int(order[run])
    if width <= 0 or n % width:
        return None
    groups = n // width
    starts = np.arange(groups) * width
    sizes: list[int] = []
    at = inside = 0
    while inside < width and len(sizes) < 16:
        size = 1
        while inside + size < width and order[at + size] == order[at] + size:
            size += 1
        if (order[at : at + groups * size] != (starts[:, None] + inside + np.arange(size)).reshape(-1)).any():
            return None
        sizes.append(size)
        at, inside = at + groups * size, inside + size
    return (groups, sizes) if inside == width and len(sizes) > 1 else None


def anchors(before: Array, order: Ints) -> list[int]:
    """Return new positions of some unique rows that moved, spread out; their old positions are certain."""
    sorted_keys = np.sort(before)
    double = np.zeros(len(before) + 1, bool)
    double[1:-1] = sorted_keys[1:] == sorted_keys[:-1]
    single = sorted_keys[~(double[1:] | double[:-1])]
    moved = np.flatnonzero(order != np.arange(len(order)))
    if len(moved) > 4096:
        moved = moved[np.linspace(0, len(moved) - 1, 4096).astype(np.int64)]
    certain = moved[np.isin(before[order[moved]], single)]
    if len(certain) > ANCHORS:
        certain = certain[np.linspace(0, len(certain) - 1, ANCHORS).astype(np.int64)]
    found: list[int] = certain.tolist()
    return found


def source(at: int, p: int, q: int, r: int) -> int:
    """Return the position in ``(x, p, q, r)`` of the row at ``at`` in ``(x, q, p, r)``."""
    rest, unit = divmod(at, r)
    rest, group = divmod(rest, p)
    outer, each = divmod(rest, q)
    return ((outer * p + group) * q + each) * r + unit


def factors(n: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``x·p·q·r = n`` with ``p, q ≥ 2``: fewest outer groups, largest units first."""
    for x in divisors(n):
        for r in reversed(divisors(n // x)):
            both = n // x // r
            for p in divisors(both):
                if p > 1 and both // p > 1:
                    yield x, p, both // p, r


def divisors(n: int) -> list[int]:
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def cycles(order: Ints) -> Array:
    """Return the lengths of the cycles with more than one row."""
    least, ahead = np.arange(len(order)), order.copy()
    for _ in range(len(order).bit_length()):  # after k iterations: the smallest of 2^k rows along the cycle
        np.minimum(least, least[ahead], out=least)
        ahead = ahead[ahead]
    return np.unique(least[order != np.arange(len(order))], return_counts=True)[1]
