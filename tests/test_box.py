"""Box arithmetic against dense arrays, where every element can be counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import boxes, chunkings, examples, shapes
from workbench.core import box
from workbench.core.runs import Runs


def painted(shape, offsets, sizes):
    """How often each element of a dense array is covered."""
    count = np.zeros(shape, int)
    for low, size in zip(offsets, sizes, strict=True):
        count[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))] += 1
    return count


def columns(found, dims):
    low = np.array([a for a, _ in found], np.int64).reshape(len(found), dims)
    return low, np.array([n for _, n in found], np.int64).reshape(len(found), dims)


def test_positions_times_strides_are_summed_by_row():
    numbers = np.random.default_rng(1).integers(-9, 9, (2, 50, 4))
    assert (box.dot(*numbers) == np.einsum("nd,nd->n", *numbers)).all()
    assert box.dot(np.ones((3, 0), np.int64), np.ones((3, 0), np.int64)).tolist() == [0, 0, 0]


@st.composite
def shape_and_boxes(draw, count=6):
    shape = draw(shapes().filter(len))
    return shape, columns(draw(st.lists(boxes(shape), max_size=count)), len(shape))


@examples()
@given(st.data())
def test_intersection_holds_the_elements_that_both_hold(data):
    shape = data.draw(shapes().filter(len))
    a, b = columns([data.draw(boxes(shape))], len(shape)), columns([data.draw(boxes(shape))], len(shape))
    low, size = box.intersect(*a, *b)
    both = painted(shape, *a) * painted(shape, *b)
    if box.volume(size)[0]:
        assert (painted(shape, low, size) == both).all()
    else:
        assert not both.any()


@examples()
@given(st.data())
def test_join_finds_every_pair_that_shares_an_element_and_no_other(data):
    shape = data.draw(shapes().filter(len))
    sides = []
    for _ in range(2):
        found = data.draw(st.lists(st.tuples(st.integers(0, 2), boxes(shape)), max_size=6))
        sides.append((np.array([g for g, _ in found], np.int64), *columns([b for _, b in found], len(shape))))
    (ga, oa, sa), (gb, ob, sb) = sides
    i, j = box.group_join(ga, oa, sa, gb, ob, sb)
    want = {
        (x, y)
        for x in range(len(ga))
        for y in range(len(gb))
        if ga[x] == gb[y]
        and (painted(shape, oa[x : x + 1], sa[x : x + 1]) * painted(shape, ob[y : y + 1], sb[y : y + 1])).any()
    }
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == sorted(want)


def test_join_of_coordinates_too_large_for_one_number_line():
    huge = 1 << 54
    group = np.arange(600, dtype=np.int64)
    low = np.stack([group * 0 + huge, group * 0], axis=1)
    size = np.full_like(low, 2)
    i, j = box.group_join(group, low, size, group, low + np.array([1, 1]), size)
    assert (i == group).all() and (j == group).all()
    i, j = box.group_join(group, low, size, group, low + np.array([2, 0]), size)
    assert len(i) == len(j) == 0


@examples()
@given(shape_and_boxes())
def test_overlapping_pairs_are_those_painted_twice(case):
    shape, (offsets, sizes) = case
    i, j = box.overlapping(np.zeros(len(offsets), np.int64), offsets, sizes)
    assert (i < j).all()
    assert bool(len(i)) == bool((painted(shape, offsets, sizes) > 1).any())


@examples()
@given(shape_and_boxes())
def test_missing_boxes_are_disjoint_and_exactly_what_is_uncovered(case):
    shape, (offsets, sizes) = case
    whole = np.zeros(len(shape), np.int64), np.array(shape, np.int64)
    found = columns(box.missing(*whole, offsets, sizes, limit=10**6), len(shape))
    holes = painted(shape, *found)
    assert holes.max(initial=0) <= 1
    assert ((holes == 1) == (painted(shape, offsets, sizes) == 0)).all()


@examples()
@given(shape_and_boxes())
def test_owned_parts_are_disjoint_and_each_is_of_the_first_box_that_covers_it(case):
    shape, (offsets, sizes) = case
    parts = box.owned(np.zeros(len(shape), np.int64), np.array(shape, np.int64), offsets, sizes)
    owner = np.full(shape, -1)
    for row in reversed(range(len(offsets))):
        owner[tuple(slice(a, a + n) for a, n in zip(offsets[row], sizes[row], strict=True))] = row
    found = np.full(shape, -2)
    for row, low, size in parts:
        where = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
        assert (found[where] == -2).all()
        found[where] = row
    assert (found == owner).all()


def test_a_hole_in_a_large_grid_is_one_box_and_boxes_that_overlap_without_end_are_not_all_looked_at():
    grid = np.stack(np.meshgrid(np.arange(100), np.arange(100), indexing="ij"), -1).reshape(-1, 2) * 3
    there = np.delete(grid, [777, 778, 5000], axis=0)
    holes = box.missing(np.zeros(2, np.int64), np.full(2, 300), there, np.full_like(there, 3))
    want = [([21, 231], [3, 6]), ([150, 0], [3, 3])]
    assert sorted((low.tolist(), size.tolist()) for low, size in holes) == want
    low, size = np.zeros((120, 3), np.int64), np.full((120, 3), 81)
    for axis in range(3):  # 40 walls a way, and 41³ holes between them
        low[40 * axis : 40 * axis + 40, axis] = np.arange(1, 81, 2)
        size[40 * axis : 40 * axis + 40, axis] = 1
    with pytest.raises(box.Tangled):
        box.missing(np.zeros(3, np.int64), np.full(3, 81), low, size)


@examples()
@given(st.data())
def test_a_flat_range_is_at_most_2n_minus_1_boxes_in_flat_order(data):
    shape = data.draw(shapes().filter(len))
    total = int(np.prod(shape))
    a, b = sorted((data.draw(st.integers(-2, total + 2)), data.draw(st.integers(-2, total + 2))))
    index, offsets, sizes, at = box.flat_ranges(np.array([shape]), np.array([a]), np.array([b]))
    assert len(index) <= 2 * len(shape) - 1 and not index.any()
    flat = np.arange(total).reshape(shape)
    pieces = [
        flat[tuple(slice(x, x + n) for x, n in zip(o, s, strict=True))].ravel()
        for o, s in zip(offsets, sizes, strict=True)
    ]
    assert [int(piece[0]) for piece in pieces] == at.tolist()
    got = np.concatenate(pieces) if pieces else np.empty(0, int)
    assert got.tolist() == list(range(max(a, 0), max(0, min(b, total))))


@examples(60, 2_000)
@given(st.data())
def test_many_flat_ranges_at_once_are_the_ranges_one_by_one(data):
    dims = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.tuples(*[st.integers(1, 5)] * dims), min_size=1, max_size=5))
    ranges = [sorted((data.draw(st.integers(0, 130)), data.draw(st.integers(0, 130)))) for _ in rows]
    starts, stops = (np.array(column) for column in zip(*ranges, strict=True))
    index, *together = box.flat_ranges(np.array(rows), starts, stops)
    for k, row in enumerate(rows):
        _, *alone = box.flat_ranges(np.array([row]), starts[k : k + 1], stops[k : k + 1])
        for one, many in zip(alone, together, strict=True):
            assert (one == many[index == k]).all()


@pytest.mark.parametrize(("shape", "a", "b", "count"), [((4, 6), 4, 17, 3), ((3, 4, 5), 1, 59, 5), ((7,), 2, 5, 1)])
def test_ragged_ranges_use_all_their_boxes(shape, a, b, count):
    assert len(box.flat_ranges(np.array([shape]), np.array([a]), np.array([b]))[0]) == count


@examples()
@given(st.data())
def test_overlapping_pairs_of_several_groups_under_any_numbers(data):
    shape = data.draw(shapes(max_dims=3).filter(len))
    found = data.draw(st.lists(st.tuples(st.sampled_from([-(1 << 40), 3, 1 << 40]), boxes(shape)), max_size=8))
    group = np.array([g for g, _ in found], np.int64)
    offsets, sizes = columns([b for _, b in found], len(shape))
    i, j = box.overlapping(group, offsets, sizes)
    want = [
        (x, y)
        for x in range(len(found))
        for y in range(x + 1, len(found))
        if group[x] == group[y] and (painted(shape, offsets[[x, y]], sizes[[x, y]]) == 2).any()
    ]
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == want


@pytest.mark.parametrize("room", [1, 30, 4_000_000])
def test_overlapping_pairs_up_to_a_limit_are_some_of_all_in_every_group(monkeypatch, room):
    monkeypatch.setattr(box, "JOIN", room)
    rng = np.random.default_rng(room)
    for limit in (1, 3, 1000):
        group = rng.integers(0, 6, 60)
        offsets = rng.integers(0, 12, (60, 2))
        sizes = rng.integers(0, 5, (60, 2))
        every = set(zip(*(one.tolist() for one in box.overlapping(group, offsets, sizes)), strict=True))
        i, j = box.overlapping(group, offsets, sizes, limit=limit)
        some = list(zip(i.tolist(), j.tolist(), strict=True))
        assert len(set(some)) == len(some) and set(some) <= every
        for one in range(6):
            there = sum(group[a] == one for a, _ in every)
            assert sum(group[a] == one for a, _ in some) == min(there, limit)


@examples()
@given(st.data())
def test_the_pieces_of_a_chunking_do_not_overlap_in_any_order(data):
    shape = data.draw(shapes(min_side=1).filter(len))
    tiles = [data.draw(chunkings(shape)) for _ in range(2)]
    group = np.repeat([0, 1], [len(one) for one in tiles])
    order = np.array(data.draw(st.permutations(range(len(group)))))
    offsets, sizes = columns([*tiles[0], *tiles[1]], len(shape))
    i, _ = box.overlapping(group[order], offsets[order], sizes[order])
    assert len(i) == 0
    i, j = box.overlapping(group[order] * 0, offsets[order], sizes[order])
    assert (group[order][i] != group[order][j]).all() and box.volume(
        box.intersect(offsets[order][i], sizes[order][i], offsets[order][j], sizes[order][j])[1]
    ).sum() == np.prod(shape)


@examples()
@given(st.data())
def test_parts_of_boxes_are_their_elements_in_order_and_no_larger_than_asked(data):
    dims = data.draw(st.integers(0, 4))
    rows = data.draw(st.lists(st.tuples(*[st.integers(0, 6)] * dims), max_size=4))
    sizes, most = np.array(rows, np.int64).reshape(len(rows), dims), data.draw(st.integers(1, 40))
    index, low, extent = box.cut(sizes, np.full(len(rows), most))
    assert (np.diff(index) >= 0).all()
    for k, shape in enumerate(rows):
        dense, found = np.arange(int(np.prod(shape))).reshape(shape), []
        for part in np.flatnonzero(index == k):
            found += (
                dense[tuple(slice(a, a + n) for a, n in zip(low[part], extent[part], strict=True))].ravel().tolist()
            )
        assert found == list(range(dense.size))
        sizes = [tuple(size) for size in extent[index == k].tolist()]
        assert sizes == [run.sizes for run in Runs(shape, most)] and max(map(math.prod, sizes), default=1) <= most
