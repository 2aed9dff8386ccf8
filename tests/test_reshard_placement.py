"""Local tensors cut by columns against torch's own placements, applied to a tensor that numbers its elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_local
from torch.distributed.tensor.placement_types import _StridedShard as TorchStrided

from tests.properties import examples, shapes
from workbench.core.mesh.cut import concatenate, cut
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import (
    Flat,
    Only,
    PartedShard,
    Replicate,
    Shard,
    StridedShard,
    flat_buffer,
    of_torch,
)
from workbench.errors import UsageError


def numbered(shape):
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def assembled(found, local, whole):
    """The local tensor, written box by box with ``at`` and ``strides``; every element once."""
    flat = np.full(int(found.numel[local]), -1)
    dims = whole.ndim
    for part in range(found.ptr[local], found.ptr[local + 1]):
        low, size = found.offsets[part, :dims].tolist(), found.sizes[part, :dims].tolist()
        assert (found.offsets[part, dims:] == 0).all() and (found.sizes[part, dims:] == 1).all()
        piece = whole[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
        steps = tuple(8 * s for s in found.strides[part, :dims].tolist())
        view = np.lib.stride_tricks.as_strided(flat[found.at[part] :], piece.shape, steps)
        assert (view == -1).all(), "an element is written twice"
        view[...] = piece
    assert (flat != -1).all(), "an element is not written"
    return flat.reshape(found.shape[local, : found.ndim[local]])


def columns(wholes, dims):
    return np.array([(*shape, *[1] * (dims - len(shape))) for shape in wholes], np.int64)


@st.composite
def torch_placements(draw, ndim, axes):
    kinds = [st.just(TorchReplicate())]
    if ndim:
        dim = st.integers(0, ndim - 1)
        kinds += [st.builds(TorchShard, dim)] * 2 + [
            st.builds(lambda d, s: TorchStrided(d, split_factor=s), dim, st.integers(1, 4))
        ]
    return [draw(st.one_of(kinds)) for _ in range(axes)]


def split_by_torch(whole, placements, sizes, coordinate):
    for placement, count, at in zip(placements, sizes, coordinate, strict=True):
        if not isinstance(placement, TorchReplicate):
            whole = placement._split_tensor(whole, count, with_padding=False)[0][at]
    return whole


@examples(250)
@given(st.data())
def test_any_placements_cut_as_torch_cuts(data):
    ndim = data.draw(st.integers(0, 4))
    wholes = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim), min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    placements = data.draw(torch_placements(ndim, len(sizes)))
    mesh = Mesh(**{f"a{k}": n for k, n in enumerate(sizes)})
    steps = list(zip(map(of_torch, placements), sizes, strict=True))
    found = cut(columns(wholes, 4), ndim, steps, mesh.coordinates())
    assert len(found) == len(wholes) * mesh.world_size
    for local in range(len(found)):
        shape, rank = wholes[found.tensor[local]], int(found.rank[local])
        coordinate = mesh.coordinates([rank])[0].tolist()
        want = split_by_torch(torch.from_numpy(numbered(shape)), placements, sizes, coordinate).numpy()
        got = assembled(found, local, numbered(shape))
        assert got.shape == want.shape and (got == want).all(), (placements, coordinate)
        size, first = torch_local(tuple(shape), tuple(sizes), coordinate, placements)
        assert got.shape == tuple(size)
        if want.size:
            assert numbered(shape)[tuple(first)] == got.flat[0]


@examples(150)
@given(st.data())
def test_a_flat_range_is_that_of_the_flattened_local_tensor(data):
    shape = data.draw(shapes(max_dims=3, max_side=6))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    placements = data.draw(torch_placements(len(shape), len(sizes)))
    ranks = data.draw(st.integers(1, 4))
    mesh = Mesh(**{f"a{k}": n for k, n in enumerate([*sizes, ranks])})
    steps = [*zip(map(of_torch, placements), sizes, strict=True), (Flat(), ranks)]
    found = cut(columns([shape], 3), len(shape), steps, mesh.coordinates())
    for local in range(len(found)):
        *coordinate, last = mesh.coordinates([found.rank[local]])[0].tolist()
        before = split_by_torch(torch.from_numpy(numbered(shape)), placements, sizes, coordinate).reshape(-1)
        want = TorchShard(0)._split_tensor(before, ranks, with_padding=False)[0][last].numpy()
        got = assembled(found, local, numbered(shape))
        assert got.shape == want.shape and (got == want).all()


@examples(100)
@given(
    st.lists(shapes(max_dims=3, max_side=5), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([1, 2, 16]),
)
def test_tensors_in_one_flat_buffer_are_cut_where_the_buffer_is(wholes, ranks, multiple):
    dense, base = [], 0
    for shape in wholes:
        dense.append(numbered(shape) + base)
        base += dense[-1].size
    padding = -base % (ranks * multiple)
    buffer = np.concatenate([*(one.reshape(-1) for one in dense), np.full(padding, -1)]).reshape(ranks, -1)
    placed = flat_buffer([one.size for one in dense], ranks, multiple=multiple)
    for rank in range(ranks):
        got = []
        for one, placement in zip(dense, placed, strict=True):
            found = cut(columns([one.shape], 3), one.ndim, [(placement, ranks)], np.array([[rank]]))
            got.append(assembled(found, 0, one))
        want = buffer[rank]
        assert (np.concatenate(got) == want[want >= 0]).all()


@examples(150)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_parts_are_cut_one_by_one_and_joined(parts, ranks, axis, then):
    shape = [2, 3, 2]
    shape[axis] = sum(parts)
    whole = torch.from_numpy(numbered(shape))
    mesh = Mesh(fsdp=then, tp=ranks)
    steps = [(PartedShard(axis, tuple(parts)), ranks), (Shard(0), then)]  # tp first, fsdp on what is left
    found = cut(columns([shape], 3), 3, steps, mesh.coordinates()[:, ::-1])
    for local, (f, t) in enumerate(itertools.product(range(then), range(ranks))):
        pieces = [TorchShard(axis)._split_tensor(p, ranks, with_padding=False)[0][t] for p in whole.split(parts, axis)]
        want = TorchShard(0)._split_tensor(torch.cat(pieces, axis), then, with_padding=False)[0][f].numpy()
        got = assembled(found, local, whole.numpy())
        assert got.shape == want.shape and (got == want).all()


def test_copies_are_counted_from_the_first_rank_that_holds_them():
    mesh = Mesh(replicate=2, shard=2, pp=2)
    steps = [(Replicate(), 2), (Shard(0), 2), (Only((1,)), 2)]
    found = cut(np.array([[4, 2]]), 2, steps, mesh.coordinates())
    assert found.rank.tolist() == [1, 3, 5, 7]
    assert found.copy.tolist() == [0, 0, 1, 1]
    assert found.offsets[:, 0].tolist() == [0, 2, 0, 2]


def test_sets_of_local_tensors_are_joined_in_the_order_of_tensors_and_ranks():
    coordinates = Mesh(tp=3).coordinates()
    a = cut(np.array([[5, 4]]), 2, [(StridedShard(0, 2), 3)], coordinates)
    b = cut(np.array([[7, 1]]), 1, [(Shard(0), 3)], coordinates[:2])
    b.tensor[:] = 1
    assert concatenate([a]) is a
    for parts in ([a, b], [b, a]):
        both = concatenate(parts)
        assert both.tensor.tolist() == [0, 0, 0, 1, 1] and both.rank.tolist() == [0, 1, 2, 0, 1]
        for local, (one, at) in enumerate([(a, 0), (a, 1), (a, 2), (b, 0), (b, 1)]):
            whole = numbered((5, 4) if one is a else (7,))
            assert (assembled(both, local, whole) == assembled(one, at, whole)).all()


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(Shard(2), 2)], "2 axes"),
        ([(Shard(-3), 2)], "2 axes"),
        ([(StridedShard(0, 0), 2)], "split_factor must be 1 or more"),
        ([(PartedShard(0, (1, 2)), 2)], "parts that sum to 3"),
        ([(Flat(), 2), (Shard(0), 2)], "must be the last"),
        ([(Flat((0,), (5,)), 2)], "1 starts for 2 ranks"),
        ([(Flat((0, 5), (5, 99)), 2)], "outside its tensor"),
    ],
)
def test_placements_that_do_not_fit_are_refused(steps, told):
    with pytest.raises(UsageError, match=told):
        cut(np.array([[4, 2]]), 2, steps, np.zeros((1, len(steps)), int) + 1)


def test_a_pending_sum_is_no_place():
    with pytest.raises(UsageError, match="redistribute"):
        of_torch(TorchPartial())
