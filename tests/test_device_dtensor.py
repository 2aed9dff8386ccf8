"""Local tensors as DTensors: torch puts the ranks' pieces together again; what torch cannot say is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import workbench as wb
from tests.properties import examples
from tests.rank_jobs import told_by
from tests.test_device import piece
from tests.test_reshard_placement import split_by_torch
from workbench import errors
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat, Only, PartedShard, Replicate, Shard, StridedShard
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.load.device import to_device
from workbench.load.onto_device.dtensor import torch_placements


def test_torch_gathers_what_four_ranks_hold(tmp_path_factory):
    for told in told_by("tests.dtensor_worker", tmp_path_factory)(4):
        assert told["case_gather"].get("result", 0) >= 3 * 21, told  # on the meshes without pipeline stages, all 21


@st.composite
def layouts(draw):
    """A mesh, a shape, and steps along its axes in any order."""
    axes = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=2)))
    dim = st.integers(-len(shape), len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        st.just(Only((0,))),
        st.builds(Shard, dim),
        st.builds(Shard, dim),
        st.builds(StridedShard, dim, st.integers(1, 3)),
    )
    steps = tuple((axis, draw(kinds)) for axis in draw(st.permutations(axes))[: draw(st.integers(0, 3))])
    return Mesh(**{axis: draw(st.integers(1, 3)) for axis in axes}), shape, steps


@examples(300)
@given(layouts())
def test_placements_of_torch_cut_where_ours_do_or_are_refused(case):
    mesh, shape, steps = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    try:
        axes, found = torch_placements(steps, mesh, shape)
    except errors.UsageError as error:
        assert "in the order of the mesh" in str(error)
        assert [axis for axis, _ in steps] != [axis for axis in mesh.axes if axis in dict(steps)]
        return
    assert set(mesh.axes) - set(axes) == {axis for axis, one in steps if isinstance(one, Only)}
    for rank in range(mesh.world_size):
        coordinate = mesh.coordinate(rank)
        ours = piece(whole, steps, mesh, coordinate)
        if ours is not None:
            theirs = split_by_torch(whole, found, [mesh.size(a) for a in axes], [coordinate[a] for a in axes])
            assert ours.shape == theirs.shape and torch.equal(ours, theirs)


def test_fsdp_after_tp_is_the_strided_shard_of_torch():
    mesh = Mesh(fsdp=2, tp=2)
    _, found = torch_placements((("tp", Shard(0)), ("fsdp", Shard(0))), mesh, (515, 8))
    assert list(map(repr, found)) == ["_StridedShard(dim=0, sf=2)", "Shard(dim=0)"]
    _, found = torch_placements((("tp", Shard(1)), ("fsdp", Shard(0))), mesh, (515, 8))
    assert list(map(repr, found)) == ["Shard(dim=0)", "Shard(dim=1)"]


@pytest.fixture
def mesh():
    """The third of four ranks that never speak."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "told"),
    [
        ({"tp": Flat(), "fsdp": Replicate()}, r"Flat\(.*'tp'"),
        ({"tp": PartedShard(0, (32, 16, 16))}, r"PartedShard.*'tp'"),
        ({"tp": StridedShard(0, 2), "fsdp": Shard(0)}, r"order of the mesh axes \(fsdp, tp\)"),
    ],
)
def test_what_no_dtensor_can_say_names_the_tensor(samples, mesh, placements, told):
    rules = Rules((PlacementRule("layers.1.self_attn.q_proj", placements),))
    with pytest.raises(errors.UsageError, match=rf"'model.layers.1.self_attn.q_proj.weight' cannot be .*{told}"):
        to_device(wb.open(samples / "hf_llama_bf16_sharded"), "cpu", device_mesh=mesh, rules=rules)


def test_a_mesh_says_which_rank_this_is(samples, mesh):
    ckpt = wb.open(samples / "hf_llama_bf16_sharded")
    got = to_device(ckpt, "cpu", device_mesh=mesh, dtype="fp32")
    plain = to_device(ckpt, "cpu", mesh=Mesh(fsdp=2, tp=2), mesh_coord={"fsdp": 1}, dtype="fp32")
    assert list(got) == list(plain)
    for key, one in got.items():
        assert one.device_mesh == mesh and one.shape == ckpt[key].shape and one.dtype == torch.float32
        assert torch.equal(one.to_local(), plain[key])
    for options in ({"mesh": Mesh(fsdp=2, tp=2)}, {"rank": 0}, {"mesh_coord": {"tp": 0}}):
        with pytest.raises(errors.UsageError, match="device_mesh= already defines the ranks"):
            to_device(ckpt, "cpu", device_mesh=mesh, **options)
    sub = init_device_mesh("cpu", (4,))
    with pytest.raises(errors.UsageError, match="mesh_dim_names"):
        to_device(ckpt, "cpu", device_mesh=sub)
