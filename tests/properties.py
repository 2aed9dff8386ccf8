"""How many cases a property test tries, and what it tries: boxes, chunkings and index keys of small tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SLOW = os.environ.get("WORKBENCH_SLOW") == "1"


def in_turn(ways: list[Any], cases: list[Any], times: int = 1) -> list[Any]:
    """Pairs for ``parametrize``: each case in one of the ways (or ``times``), in turn; the other pairs are slow."""
    return [
        pytest.param(way, case, marks=[] if (number - at) % len(ways) < times else [pytest.mark.slow])
        for number, case in enumerate(cases)
        for at, way in enumerate(ways)
    ]


def examples(count: int = 300, slow: int = 10_000) -> Any:
    """``count`` cases in ``make test``, 10,000 in ``make test-all``; never judged by the clock."""
    return settings(
        max_examples=slow if SLOW else count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


def shapes(max_dims: int = 5, max_side: int = 6, min_side: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(min_side, max_side), max_size=max_dims).map(tuple)


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a box inside a shape; it may be empty."""
    low = tuple(draw(st.integers(0, n)) for n in shape)
    return low, tuple(draw(st.integers(0, n - a)) for a, n in zip(low, shape, strict=True))


@st.composite
def chunkings(draw: Any, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Disjoint boxes that tile a shape: cut in two along some axis, again and again."""
    done, todo = [], [((0,) * len(shape), shape)]
    while todo:
        low, size = todo.pop()
        axes = [axis for axis, n in enumerate(size) if n > 1]
        if not axes or len(done) + len(todo) >= 8 or not draw(st.booleans()):
            done.append((low, size))
            continue
        axis = draw(st.sampled_from(axes))
        cut = draw(st.integers(1, size[axis] - 1))
        todo.append((low, (*size[:axis], cut, *size[axis + 1 :])))
        todo.append(
            (
                (*low[:axis], low[axis] + cut, *low[axis + 1 :]),
                (*size[:axis], size[axis] - cut, *size[axis + 1 :]),
            )
        )
    return draw(st.permutations(done))


@st.composite
def keys(draw: Any, shape: tuple[int, ...], arrays: bool = True) -> Any:
    """An index key that numpy understands in the same way: basic, negative, stepped, one list or mask at most."""
    parts: list[Any] = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        kinds = ["slice", "full"] + (["int"] if n else [])
        parts.append(draw(_part(draw(st.sampled_from(kinds)), n)))
    if arrays and parts and draw(st.booleans()):
        # numpy moves the axis of an array index to the front when integers stand beside it: use slices there
        parts = [part if isinstance(part, slice) else slice(part, part + 1) for part in parts]
        axis = draw(st.integers(0, len(parts) - 1))
        n = shape[axis]
        mask = draw(st.booleans())
        if mask:
            parts[axis] = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
        else:
            picked = draw(st.lists(st.integers(-n, n - 1), max_size=5)) if n else []
            parts[axis] = np.array(picked, np.int64)
    elif len(parts) < len(shape) and draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
        # an ellipsis shifts what follows it to the last axes; redraw those
        at = parts.index(Ellipsis)
        tail = len(parts) - at - 1
        for k in range(tail):
            parts[at + 1 + k] = draw(_part("slice", shape[len(shape) - tail + k]))
    return tuple(parts)


def _part(kind: str, n: int) -> st.SearchStrategy[Any]:
    if kind == "int":
        return st.integers(-n, n - 1)
    if kind == "full":
        return st.just(slice(None))
    edge = st.none() | st.integers(-n - 2, n + 2)
    return st.builds(slice, edge, edge, st.sampled_from([None, 1, 2, 3, -1, -2, -4]))
