"""All tensors in few rows: the tree of their names, expanded where most bytes are, until the rows are full.

::

    model.layers.0.attention.wq          model.embed.weight        512 MiB      1 tensor
    model.layers.0.attention.wk    ──►   model.layers.0–7.*          3 GiB     72 tensors
    …                                    model.layers.8–15.*         3 GiB     72 tensors
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.analysis.layout import Layout
from workbench.core.arrays import Array
from workbench.views.names import safe

ROWS = 40  #: maximum number of groups
BUNDLED = 8  #: neighbours are merged if there are this many
COLUMNS = 1024  #: maximum number of columns; beyond, neighbouring holders share one
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """Tensors that share a row.

    Attributes:
        name: of the only tensor, or the common prefix: ``model.layers.0–7.*``.
        tensors: positions, ascending.
    """

    name: str
    tensors: Array


@dataclass(frozen=True, eq=False)
class GroupShares:
    """How many bytes of each group each holder stores.

    Attributes:
        groups: the rows.
        per: holders per column.
        nbytes: ``(groups, columns)`` stored bytes.
        whole: ``(groups,)`` bytes of the tensors, each counted once.
        wrong: ``(groups,)`` number of holes and overlaps.
    """

    groups: list[TensorGroup]
    per: int
    nbytes: Array
    whole: Array
    wrong: Array


@dataclass(frozen=True, eq=False)
class _Node:
    depth: int  # number of leading name parts that all have in common
    tensors: Array
    span: str = ""  # range of the next part: "0–7"; empty for all


def groups(keys: Sequence[str], nbytes: Array, chosen: Array, most: int = ROWS) -> list[TensorGroup]:
    """Group the chosen tensors in up to ``most`` rows, in natural order of their names."""
    if not len(chosen):
        return []
    parts = {t: keys[t].split(".") for t in chosen.tolist()}
    weight = np.maximum(np.asarray(nbytes, np.float64), 1.0)
    root = _Node(0, np.asarray(chosen, np.int64))
    heap, tick = [(-float(weight[root.tensors].sum()), 0, root)], 1
    done: list[_Node] = []
    while heap:
        _, _, node = heapq.heappop(heap)
        free = most - len(heap) - len(done)
        mine = float(weight[node.tensors].sum())
        children = _children(node, parts, free, free * mine / (mine - sum(one[0] for one in heap)))
        if len(children) == 1 or len(children) > free:
            done.append(node)
            continue
        for child in children:
            if len(child.tensors) == 1 or child.span:  # spans stay closed: neighbours should look the same
                done.append(child)
            else:
                heapq.heappush(heap, (-float(weight[child.tensors].sum()), tick, child))
                tick += 1
    done.sort(key=lambda node: _natural(keys[int(node.tensors[0])]))
    return [_group(node, keys) for node in done]


def shares(found: Layout, rows: Sequence[TensorGroup]) -> GroupShares:
    """Compute the bytes of each group that each holder stores."""
    catalog, who = found.catalog, found.holders
    per = max(-(-len(who) // COLUMNS), 1)
    columns = max(-(-len(who) // per), 1)
    of = np.full(max(len(catalog), 1), -1, np.int64)
    for number, group in enumerate(rows):
        of[group.tensors] = number
    row = of[catalog.tensor]
    place = row * columns + who.of_chunk // per
    if (row < 0).any():
        placed = row >= 0
        place, nbytes = place[placed], catalog.chunk_nbytes[placed]
    else:
        nbytes = catalog.chunk_nbytes
    held = np.bincount(place, weights=nbytes, minlength=len(rows) * columns).reshape(len(rows), columns)
    whole = np.array([int(catalog.tensor_nbytes[group.tensors].sum()) for group in rows], np.int64)
    wrong = np.zeros(len(rows), np.int64)
    for tensor in [t for t, *_ in found.covered.holes] + [t for t, *_ in found.covered.overlaps]:
        if of[tensor] >= 0:
            wrong[of[tensor]] += 1
    return GroupShares(list(rows), per, held, whole, wrong)


def _children(node: _Node, parts: dict[int, list[str]], free: int, fair: float) -> list[_Node]:
    """Split a node at the next part of its names that differs; merge neighbours if there are too many children.

    Args:
        free: remaining rows; ``fair``: their part in proportion to the node's share of bytes.
    """
    depth, tensors = node.depth, node.tensors.tolist()
    while True:
        found: dict[str, list[int]] = {}
        for t in tensors:
            mine = parts[t]
            found.setdefault(mine[depth] if len(mine) > depth else "", []).append(t)
        if len(found) > 1 or "" in found:
            break
        depth += 1
    order = sorted(found, key=_natural)
    if len(order) == 1:  # all names are the same to the end
        return [node]
    step = 1
    if len(order) > free:
        if len(order) < BUNDLED:
            return [node]
        step = -(-len(order) // max(int(fair), 2))
    made = []
    for at in range(0, len(order), step):
        names = order[at : at + step]
        some = np.sort(np.array([t for name in names for t in found[name]], np.int64))
        whole = _Node(depth + 1, some)
        made.append(whole if len(names) == 1 else _Node(depth, some, f"{names[0]}–{names[-1]}"))
    return made


def _group(node: _Node, keys: Sequence[str]) -> TensorGroup:
    if len(node.tensors) == 1:
        return TensorGroup(safe(keys[int(node.tensors[0])]), node.tensors)
    split = [keys[t].split(".") for t in node.tensors.tolist()]
    first, depth = split[0], node.depth
    if not node.span:
        while all(len(parts) > depth and parts[depth] == first[depth] for parts in split) and depth < len(first):
            depth += 1
    deeper = any(len(parts) > depth + 1 for parts in split[:64])
    last = f"{node.span}.*" if node.span and deeper else node.span or "*"
    return TensorGroup(safe(".".join([*first[:depth], last])), node.tensors)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which 2 comes before 10."""
    return [(1, int(one), "") if one.isdecimal() and len(one) < 19 else (0, 0, one) for one in _NUMBER.split(name)]
