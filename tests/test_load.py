"""``load``: into plain tensors here, into DTensors of fake meshes, and on one to four gloo ranks (load_worker.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import workbench as wb
from tests import load_worker
from tests.properties import examples
from tests.rank_jobs import cases_of, told_by
from tests.reader_suite import same_bits
from workbench import errors
from workbench.load.asked import Asked
from workbench.load.boxes import cut_held, held
from workbench.load.exchange import WISH, share
from workbench.load.load import load
from workbench.load.names import flatten

CASES = cases_of(load_worker)
RANKS = [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)), 4]


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    return told_by("tests.load_worker", tmp_path_factory)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_load_together(told, ranks, case):
    for rank, one in enumerate(told(ranks)):
        assert "error" not in one[case], f"rank {rank}: {one[case]['error']}"


@pytest.mark.parametrize("ranks", RANKS)
def test_no_byte_is_read_in_vain_and_with_broadcast_none_twice(told, ranks):
    every = told(ranks)
    for name, first in every[0]["case_every_sample"]["result"]["alone"].items():
        alone, shared = (
            [one["case_every_sample"]["result"][how][name] for one in every] for how in ("alone", "broadcast")
        )
        needed, once = sum(one[2] for one in alone), first[3]
        assert sum(one[0] for one in alone) <= 1.05 * needed, name
        assert sum(one[1] for one in alone) == 0
        assert sum(one[0] for one in shared) <= 1.05 * once, name
        if "zstd" in name or name.startswith(("zarr/", "orbax/")):
            continue  # what is received is not as it is stored
        assert [read + received for read, received, *_ in shared] == [one[2] for one in alone], name
        if ranks > 1 and once > 100_000:  # and all ranks take part in reading
            assert max(one[0] for one in shared) < 1.5 * once / ranks, name


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_with_broadcast_a_compressed_chunk_is_read_once_though_each_rank_wants_a_part(told, ranks):
    every = [one["case_compressed_chunks_are_undone_by_one_rank"]["result"] for one in told(ranks)]
    assert sum(one["read"] for one in every) == every[0]["stored"]


# ---- boxes and shares ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int, int], None]]:
    """Pretend to be one rank of many: meshes and DTensors can be made, nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, ranks: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@examples(60, 2_000)
@given(st.data())
def test_boxes_of_any_dtensor_are_those_of_torch(fake_ranks, data):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    rank = data.draw(st.integers(0, int(np.prod(sizes)) - 1))
    fake_ranks(rank, int(np.prod(sizes)))
    mesh = init_device_mesh("cpu", tuple(sizes))
    tensors, want = [], []
    for number in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 7), max_size=3))
        ways = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            ways += [st.builds(Shard, dims), st.builds(lambda d, n: _StridedShard(d, split_factor=n), dims, st.just(2))]
        placements = [data.draw(st.one_of(ways)) for _ in sizes]
        size, first = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
        whole = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
        local = torch.zeros(tuple(size), dtype=torch.int64)
        made = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        tensors.append(held(str(number), made))
        part = whole
        for axis, placement in enumerate(placements):  # the pieces, by torch itself
            if not isinstance(placement, Replicate):
                at, count = mesh.get_coordinate()[axis], sizes[axis]
                part = placement._split_tensor(part, count, with_padding=False)[0][at]
        assert tuple(part.shape) == tuple(size)
        if part.numel():
            assert whole[tuple(first)] == part.flatten()[0]
        want.append((whole, part))
    found = cut_held(tensors, 4)
    assert found.tensor.tolist() == list(range(len(tensors)))
    for at, (whole, part) in enumerate(want):
        got = np.full(part.numel(), -1)
        for row in range(found.ptr[at], found.ptr[at + 1]):
            low, size = found.offsets[row, : whole.ndim].tolist(), found.sizes[row, : whole.ndim].tolist()
            source = whole[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))].numpy()
            steps = [8 * step for step in found.strides[row, : whole.ndim].tolist()]
            np.lib.stride_tricks.as_strided(got[found.at[row] :], source.shape, steps)[...] = source
        assert (got == part.flatten().numpy()).all()


def test_what_cannot_be_placed_is_refused(fake_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    fake_ranks(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(errors.UsageError, match=r"'w'.*redistribute"):
        held("w", DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False))
    wrong = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
    with pytest.raises(errors.UsageError, match=r"'w'.*\(3,\).*\(2,\)"):
        cut_held([held("w", wrong)], 1)


@examples(200)
@given(st.data())
def test_each_wish_is_read_once_and_reaches_all_who_have_it(data):
    ranks = data.draw(st.integers(1, 5))
    pieces = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=12))  # bytes of each
    wishes, mine = [], []
    for _ in range(ranks):
        wanted = data.draw(st.lists(st.sampled_from(range(len(pieces))), unique=True))
        mine.append(wanted)
        rows = [(b"piece%03d" % piece, number, pieces[piece]) for number, piece in enumerate(wanted)]
        wishes.append(np.array(rows, WISH))
    parts = [share(wishes, rank) for rank in range(ranks)]
    readers: dict[int, int] = {}
    for rank, part in enumerate(parts):
        for number in part.read:
            assert readers.setdefault(mine[rank][number], rank) == rank
        for other, numbers in part.send.items():
            theirs = parts[other].receive[rank]
            assert [mine[rank][n] for n in numbers] == [mine[other][n] for n in theirs]
            assert set(numbers) <= set(part.read)
    for rank, part in enumerate(parts):
        received = [number for numbers in part.receive.values() for number in numbers]
        assert sorted([*part.read, *received]) == list(range(len(mine[rank])))
        for other, numbers in part.receive.items():
            assert all(readers[mine[rank][number]] == other for number in numbers)


def test_what_all_want_is_read_by_all_in_equal_parts():
    rows = [(b"piece%04d" % piece, piece, 1000 + piece) for piece in range(400)]
    parts = [share([np.array(rows, WISH)] * 8, rank) for rank in range(8)]
    loads = [sum(1000 + piece for piece in part.read) for part in parts]
    assert sum(loads) == sum(row[2] for row in rows) and max(loads) < 1.02 * min(loads)


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    torch.manual_seed(3)
    tensors = {
        "model.a.weight": torch.randn(40, 50),
        "model.a.bias": torch.randn(40, dtype=torch.float16),
        "model.b.running_mean": torch.randn(4, dtype=torch.float64),
        "optim.state.a.weight.exp_avg": torch.randn(40, 50),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(one) for name, one in tensors.items()}


def test_names_are_found_by_key_by_meaning_and_by_map(small):
    folder, tensors = small
    state = zeros(tensors)
    report = load(state, folder)
    assert report.loaded == tuple(tensors) and report.read_nbytes == sum(one.nbytes for one in tensors.values())
    for name, want in tensors.items():
        same_bits(state[name], want, name)

    inner = {name.removeprefix("model."): torch.zeros_like(one) for name, one in tensors.items() if "model" in name}
    nested = {
        "a": {"weight": inner["a.weight"], "bias": inner["a.bias"]},
        "b": {"running_mean": inner["b.running_mean"]},
    }
    load(nested, folder)
    assert torch.equal(nested["a"]["weight"], tensors["model.a.weight"])

    other = {"w": torch.zeros(40, 50), "h": torch.zeros(40, dtype=torch.float16)}
    names = {"w": "model.a.weight", "h": "model.a.bias"}
    for name_map in (names, names.__getitem__):
        report = load(other, wb.open(folder), name_map=name_map, strict=False)
        assert torch.equal(other["w"], tensors["model.a.weight"]) and report.unexpected == ()
    assert load(other, folder, name_map={"w": "model.a.weight"}, strict=False).missing == {
        "h": "is not in the checkpoint"
    }


def test_the_way_onto_a_gpu_fills_tensors_in_place(small):
    """On the CPU, where copies need no waiting."""
    folder, tensors = small
    state = zeros(tensors)
    asked = Asked.of(state, folder, None)
    (batch,) = asked.plan(asked.primary)
    assert not batch.staged
    seen: list[int] = []
    assert batch._through_ring(2, seen.append) == batch.nbytes == seen[-1]
    for name, want in tensors.items():
        same_bits(state[name], want, name)


def test_what_is_refused_leaves_every_tensor_as_it_was(small):
    folder, tensors = small
    cases = [
        (
            {"model.a.weigth": torch.zeros(40, 50)},
            errors.TensorNotFoundError,
            r"'model.a.weigth'.*near: 'model.a.weight'",
        ),
        ({"model.a.weight": torch.zeros(40, 49)}, errors.UsageError, r"float32 \(40, 49\) here and float32 \(40, 50\)"),
        ({"model.a.weight": torch.zeros(40, 50).half()}, errors.UsageError, "float16 .* here and float32 "),
        ({}, errors.UsageError, "1 unexpected: 'model.a.bias'"),
    ]
    for changed, error, words in cases:
        state = zeros({name: one for name, one in tensors.items() if name != "model.a.bias" or changed}) | changed
        with pytest.raises(error, match=words) as told:
            load(state, folder)
        assert type(told.value) is error and "\n" not in str(told.value)
        assert all(not one.any() for one in state.values())
        assert "unexpected" not in str(told.value) or "model.a.weight" not in changed  # it was requested
        report = load(state, folder, strict=False)
        assert len(report.missing) + len(report.mismatched) == bool(changed)
        assert report.unexpected == tuple(key for key in ("model.a.weight", "model.a.bias") if key not in state)
        assert all(not one.any() for name, one in state.items() if name in changed)
    # of roles that nobody asks for nothing is expected
    load({"optim.state.a.weight.exp_avg": torch.zeros(40, 50)}, folder)
    with pytest.raises(errors.TensorNotFoundError, match=r"9 missing: 'x0' .* 'x7' .*…;"):
        load(zeros(tensors) | {f"x{i}": torch.zeros(1) for i in range(9)}, folder)


def test_tensors_that_cannot_be_filled_are_refused_with_the_reason(small):
    folder, _ = small
    for bad, words in (
        (torch.zeros(40, 50, device="meta"), "to_empty"),
        (torch.zeros(50).expand(40, 50), "expanded"),
        (torch.zeros(40, 50).to_sparse(), "sparse"),
    ):
        with pytest.raises(errors.UsageError, match=words):
            load({"model.a.weight": bad}, folder, strict=False)
    with pytest.raises(errors.UsageError, match=r"'model' is a Linear; pass its state_dict\(\)"):
        load({"model": torch.nn.Linear(2, 2)}, folder)
    with pytest.raises(errors.UsageError, match=r"two values .* named 'a\.b'"):
        load({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, folder)
    with pytest.raises(errors.UsageError, match=r"name_map maps 'model\.a\.weight' to None"):
        load({"model.a.weight": torch.zeros(40, 50)}, folder, name_map=lambda name: None)


def test_tied_tensors_are_read_once_and_have_to_agree(tmp_path):
    same, other = torch.randn(3, 4), torch.randn(3, 4)
    save_file({"a": same, "b": same.clone(), "c": other}, tmp_path / "model.safetensors")
    tied = torch.zeros(3, 4)
    report = load({"a": tied, "b": tied.detach(), "head": tied.view(3, 4), "c": torch.zeros(3, 4)}, tmp_path)
    assert torch.equal(tied, same) and set(report.loaded) == {"a", "b", "c", "head"}
    with pytest.raises(errors.UsageError, match="'c' shares its memory"):
        load({"a": tied, "b": torch.zeros(3, 4), "c": tied}, tmp_path)


def test_parameters_that_need_gradients_are_filled_in_place(tmp_path):
    torch.manual_seed(0)
    model, again = (torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    model(torch.randn(8, 5))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    before = {name: one.data_ptr() for name, one in again.named_parameters()}
    load(dict(again.named_parameters()) | dict(again.named_buffers()), tmp_path / "model.pt")
    for name, want in model.state_dict().items():
        same_bits(again.state_dict()[name], want, name)
    assert before == {name: one.data_ptr() for name, one in again.named_parameters()}


def test_objects_are_reported_and_plain_ones_set(samples):
    state = {"epoch": None, "args": None, "scheduler": {"last_epoch": -1, "nothing": 0}, "rng": {"torch": 0}}
    report = load(state, samples / "torch_save" / "ckpt.pt", strict=False)
    assert isinstance(state["epoch"], int) and state["scheduler"]["last_epoch"] >= 0
    assert state["args"] is None and report.objects["args"] is not None  # no plain value: only told
    assert report.missing == {
        "scheduler.nothing": "is neither an object nor a tensor there",
        "rng.torch": "is a tensor there: pass a tensor for it",
    }
    with pytest.raises(errors.TensorNotFoundError, match=r"'scheduler\.nothing'"):
        load(state, samples / "torch_save" / "ckpt.pt")


def test_a_name_map_of_two_checkpoints(samples):
    source, model = samples / "megatron_dp_reshardable", samples / "hf_llama_bf16_sharded"
    made = wb.name_map(wb.open(source), wb.open(model))
    wanted = made.apply()
    state = {key: torch.zeros(one.shape, dtype=one.dtype) for key, one in wanted.items()}
    assert state
    load(state, source, name_map=made)
    for key, one in wanted.items():
        same_bits(state[key], one.torch(), key)
    with pytest.raises(errors.UsageError, match="name_map is from"):
        load(state, model, name_map=made)


def test_a_part_of_a_fused_weight_is_a_view_and_what_is_behind_it_is_expected(samples):
    ckpt = wb.open(samples / "megatron_dp_reshardable")
    truth = load_file(samples.parent / "tests/truth" / "megatron_dp_reshardable.safetensors")
    fused = [name for name in ckpt if name.endswith("linear_qkv.weight") and not name.startswith("optimizer")]
    rest = {name: one.torch() for name, one in ckpt.select(role="param").items() if name not in fused}
    views = [
        name
        for name in ckpt.views
        if any(name.endswith(f"linear_{part}.weight") for part in "qkv") and name.startswith("decoder.layers.0.")
    ]
    assert len(views) == 3
    state = zeros(rest) | {name: torch.zeros(ckpt[name].shape, dtype=ckpt[name].dtype) for name in views}
    report = load(state, ckpt, strict=False)
    assert report.unexpected == tuple(name for name in fused if not name.startswith("decoder.layers.0."))
    rows = torch.cat([state[name] for name in views]).sort(dim=0).values
    assert torch.equal(rows, truth[f"param.{fused[0]}"].sort(dim=0).values) and fused[0].startswith("decoder.layers.0.")


def test_chunks_that_overlap_are_compared(tmp_path):
    from tests.test_gather import payloads
    from workbench.core.build import CatalogBuilder
    from workbench.core.dtypes import by_name
    from workbench.core.place import Place

    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "f").write_bytes(bytes([0, 1, 2, 3, 2, 3, 4, 5, 9, 9]))
    for key, second in (("same", 4), ("other", 5)):
        builder.tensor(key, by_name("uint8"), (6,))
        builder.chunk(key, (0,), (4,), "f", 0, 4)
        builder.chunk(key, (2,), (4,), "f", second, second + 4)
    catalog = builder.build()
    ckpt = wb.Checkpoint(Place(tmp_path), catalog, payloads(tmp_path, catalog).pool, {})
    state = {"same": torch.zeros(6, dtype=torch.uint8), "other": torch.zeros(6, dtype=torch.uint8)}
    with pytest.raises(errors.CorruptError, match=r"'other'.*overlaps"):
        load(state, ckpt)
    load(state, ckpt.select("same"), name_map={"other": "same"})
    assert state["same"].tolist() == state["other"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux' counter of bytes read")
def test_the_count_of_bytes_is_the_kernels(tmp_path):
    def kernel() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    torch.manual_seed(0)
    save_file({f"w{i}": torch.randn(500, 300) for i in range(4)}, tmp_path / "model.safetensors")
    ckpt = wb.open(tmp_path)
    state = {f"w{i}": torch.zeros(500, 300) for i in (0, 2)}
    before = kernel()
    report = load(state, ckpt, strict=False, threads=2)
    assert report.read_nbytes == 2 * 500 * 300 * 4
    assert 0 <= kernel() - before - report.read_nbytes < 4096
    assert json.loads(json.dumps(report.to_dict()))["read_nbytes"] == report.read_nbytes
    assert str(report).startswith("loaded 2 tensors in ") and str(report).endswith("; 2 unexpected")


def test_progress_is_told_and_can_stop_the_load(small):
    folder, tensors = small
    seen: list[float] = []
    load(zeros(tensors), folder, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0

    def stop(_: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        load(zeros(tensors), folder, progress=stop)


def test_state_dicts_are_flattened_as_dcp_does():
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    state = {
        "model": {"a.b": torch.zeros(1), "c": [torch.zeros(2), {"d": 3}]},
        "list": [1, 2, [3]],
        "pair": (torch.ones(1), 2),
        "optim": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "empty": {},
        "nothing": [],
        "deep": [[{"x": 1}], 2],
        "none": None,
    }
    want, paths = flatten_state_dict(state)
    found = flatten(state)
    assert [leaf.name for leaf in found] == list(want)
    assert all(leaf.value is want[leaf.name] for leaf in found)
    assert all(leaf.path == tuple(map(str, paths[leaf.name])) for leaf in found)
