"""Meshes number ranks as torch and Megatron do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from workbench.core.mesh.mesh import Mesh
from workbench.errors import UsageError

meshes = st.lists(st.integers(1, 4), max_size=4).map(lambda sizes: Mesh(**{f"a{k}": n for k, n in enumerate(sizes)}))


@examples(100)
@given(meshes)
def test_ranks_and_coordinates_are_those_of_a_row_major_grid(mesh):
    grid = np.arange(mesh.world_size).reshape(mesh.shape)
    found = mesh.coordinates()
    for rank in range(mesh.world_size):
        assert grid[tuple(found[rank])] == rank
        assert mesh.rank(**mesh.coordinate(rank)) == rank
    assert (mesh.coordinates([mesh.world_size - 1]) == np.array(mesh.shape, int) - 1).all()


@examples(100)
@given(st.data())
def test_a_group_differs_in_its_axes_only(data):
    mesh = data.draw(meshes)
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True)) if mesh.axes else []
    groups = mesh.groups(*axes)
    assert sorted(groups.ravel().tolist()) == list(range(mesh.world_size))
    for group in groups.tolist():
        rest = [{k: v for k, v in mesh.coordinate(rank).items() if k not in axes} for rank in group]
        assert all(one == rest[0] for one in rest) and group == sorted(group)


def test_groups_are_those_of_a_device_mesh():
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=5, world_size=12)
    try:
        theirs = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
        mesh = Mesh.like(theirs)
        assert mesh == Mesh(pp=2, dp=3, tp=2)
        assert tuple(mesh.coordinates([5])[0]) == tuple(theirs.get_coordinate())
        for axis in mesh.axes:
            mine = next(group for group in mesh.groups(axis).tolist() if 5 in group)
            assert mine == theirs[axis].mesh.tolist()
    finally:
        destroy_process_group()
    with pytest.raises(UsageError, match="mesh_dim_names"):
        Mesh.like(type("Nameless", (), {"mesh_dim_names": None, "shape": (2,)})())


def test_megatron_counts_tp_fastest_then_cp_dp_pp():
    """Ranks as ``RankGenerator(tp=2, cp=2, dp=3, pp=2, order='tp-cp-ep-dp-pp')`` numbers them."""
    mesh = Mesh.megatron(tp=2, cp=2, dp=3, pp=2)
    assert mesh.groups("tp")[:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert mesh.groups("cp")[:2].tolist() == [[0, 2], [1, 3]]
    assert mesh.groups("dp")[0].tolist() == [0, 4, 8]
    assert mesh.groups("pp")[0].tolist() == [0, 12]
    experts = Mesh.megatron(tp=2, dp=4, ep=2, pp=2)
    assert experts.world_size == 16
    assert experts.groups("ep")[0].tolist() == [0, 2] and experts.groups("dp")[0].tolist() == [0, 4]
    with pytest.raises(UsageError, match="does not divide"):
        Mesh.megatron(dp=3, ep=2)


def test_a_mesh_is_read_from_text_and_written_back():
    assert Mesh.parse(" tp=2 , pp=3") == Mesh(tp=2, pp=3) != Mesh(pp=3, tp=2)
    assert Mesh.parse("") == Mesh() and Mesh().world_size == 1 and Mesh().coordinates().shape == (1, 0)
    assert str(Mesh(dp=2, tp=4)) == "dp=2,tp=4" and repr(Mesh(dp=2, tp=4)) == "Mesh(dp=2, tp=4)"
    assert len({Mesh(tp=2), Mesh.parse("tp=2")}) == 1
    assert torch.Size(Mesh(dp=2, tp=4).shape) == (2, 4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Mesh(tp=0), "sizes are whole numbers, 1 or more"),
        (lambda: Mesh(tp=True), "whole number"),
        (lambda: Mesh(a=1 << 11, b=1 << 11), "larger than"),
        (lambda: Mesh.parse("tp2"), "write a mesh as"),
        (lambda: Mesh.parse("tp=2,tp=2"), "named twice"),
        (lambda: Mesh(tp=2).coordinates([2]), "rank 2 is not in"),
        (lambda: Mesh(tp=2).rank(tp=2), "outside"),
        (lambda: Mesh(tp=2).rank(pp=0), "'pp' is not in"),
        (lambda: Mesh(tp=2).groups("pp"), "it has tp"),
    ],
)
def test_nonsense_is_refused(make, told):
    with pytest.raises(UsageError, match=told):
        make()
