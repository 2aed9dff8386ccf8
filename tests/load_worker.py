"""Gloo ranks that load checkpoints together; run by the tests as ``python -m tests.load_worker RANKS OUT [CASE …]``.

Every ``case_…`` runs on all ranks, one after the other, and asserts what it is about; ``OUT/rank<r>.json`` says of each
case what it returned, or its traceback. A case that leaves a rank waiting ends by the group's timeout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import workbench as wb
from tests.rank_jobs import main
from workbench import errors
from workbench.load.load import load

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
SLOW = os.environ.get("WORKBENCH_SLOW") == "1"
#: Samples whose truth is that of decoded values; what is loaded is what is stored.
QUANTISED = ("gguf/types", "quantised/")
#: Below ``WORKBENCH_SAMPLES``: checkpoint → its truth.
OUTSIDE = {
    "dcp/a_fsdp2": "dcp/a_fsdp2_truth/truth.safetensors",
    "dcp/a3_fsdp2_zstd": "dcp/a_fsdp2_truth/truth.safetensors",
    "dcp/d_fsdp1_flat": "dcp/d_fsdp1_flat_truth/truth.safetensors",
    "dcp/x_single_odd": "dcp/x_single_odd_truth/truth.safetensors",
    "hf/f1_llama_bf16_sharded": "hf/f1_llama_bf16_sharded_truth/truth.safetensors",
    "bytecheckpoint/ddp_w4": "bytecheckpoint/ddp_w4/truth.safetensors",
    "bytecheckpoint/fsdp2_w4": "bytecheckpoint/fsdp2_w4/truth.safetensors",
    "megatron/torch_dist_tp2pp2": "megatron/torch_dist_tp2pp2/truth.safetensors",
    "megatron/legacy_tp2pp2": "megatron/legacy_tp2pp2/truth.safetensors",
    "deepspeed/zero3_dp2_bf16": "deepspeed/zero3_dp2_bf16/truth.safetensors",
}


# ---- what is loaded, and what it should be ---------------------------------------------------------------------------


def samples() -> list[tuple[Path, list[Path]]]:
    """Every sample, with the files that hold its truth: those beside it, or its own where its library reads it."""
    found = []
    for path in sorted((ROOT.parent / "tests/truth").rglob("*.safetensors")):
        name = path.relative_to(ROOT.parent / "tests/truth").with_suffix("")
        if not name.as_posix().startswith(QUANTISED):
            found.append((ROOT / name, [path]))
    found.append((ROOT / "torch_save/ckpt_legacy.pt", [ROOT.parent / "tests/truth/torch_save/ckpt.pt.safetensors"]))
    for name in ("hf_llama_tied_fp32", "hf_deepseek_fp8_block", "hf_peft_lora", "trainer_run/checkpoint-6"):
        found.append((ROOT / name, sorted((ROOT / name).glob("*.safetensors"))))
    if outside := os.environ.get("WORKBENCH_SAMPLES"):
        found += [(Path(outside, name), [Path(outside, truth)]) for name, truth in OUTSIDE.items()]
    return found


def truth_of(files: list[Path]) -> dict[str, torch.Tensor]:
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def key_of(ckpt: wb.Checkpoint, name: str) -> str:
    """Truths of merged ranks name tensors by role and parameter."""
    role, _, fqn = name.partition(".")
    return name if name in ckpt else ckpt.param(fqn, {"fp32_param": "master"}.get(role, role)).key


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of 0xAB bytes: what is not written shows."""
    made = torch.empty(shape, dtype=dtype)
    if made.numel():
        made.view(-1).view(torch.uint8).fill_(0xAB)
    return made


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def placed(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> tuple[DTensor, torch.Tensor]:
    """An unfilled DTensor, and what this rank should hold of it as torch computes it."""
    size, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = empty(tuple(size), whole.dtype)
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return made, whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]


def layouts(ndim: int, axes: int) -> list[list[Any]]:
    """Placements that cut boxes, of one mesh axis or two."""
    ways: list[Any] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    if axes == 1:
        return [[one] for one in ways]
    return [[a, b] for a in ways for b in ways]


def meshes() -> list[Any]:
    """One axis of all ranks, and where there are four, two of two."""
    ranks = dist.get_world_size()
    found = [init_device_mesh("cpu", (ranks,))]
    if ranks == 4:
        found.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return found


def fails(error: type[Exception], words: str, state: dict[str, Any], path: Any, **options: Any) -> None:
    """The load is refused, and no tensor is touched."""
    before = {name: raw(one.to_local() if isinstance(one, DTensor) else one) for name, one in state.items()}
    try:
        load(state, path, **options)
    except error as told:
        assert type(told) is error and words in str(told), f"{type(told).__name__}: {told}"
    else:
        raise AssertionError("nothing was refused")
    after = {name: raw(one.to_local() if isinstance(one, DTensor) else one) for name, one in state.items()}
    assert before == after


# ---- cases -----------------------------------------------------------------------------------------------------------


def case_every_sample(out: Path) -> dict[str, Any]:
    """Each tensor in another layout, without broadcast and with it; the bytes that all ranks read, and those that they
    have to. The meshes take turns, unless slow tests are asked for.
    """
    told: dict[str, Any] = {"alone": {}, "broadcast": {}}
    every = meshes()
    for number, (path, files) in enumerate(samples()):
        truth = truth_of(files)
        with wb.open(path) as ckpt:
            keys = {name: key_of(ckpt, name) for name in truth}
            for mesh in every if SLOW else every[number % len(every) :][:1]:
                name = f"{path.parent.name}/{path.name}/{mesh.ndim}"
                for how, found in told.items():
                    found[name] = _sample(name, ckpt, truth, keys, mesh, how)
    return told


def _sample(
    sample: str, ckpt: wb.Checkpoint, truth: dict[str, torch.Tensor], keys: dict[str, str], mesh: Any, how: str
) -> list[int]:
    state: dict[str, torch.Tensor] = {}
    want: dict[str, torch.Tensor] = {}
    for turn, (name, whole) in enumerate(sorted(truth.items())):
        ways = layouts(whole.ndim, mesh.ndim)
        if turn % 5 == 4:
            state[name], want[name] = empty(tuple(whole.shape), whole.dtype), whole
        else:
            state[name], want[name] = placed(whole, mesh, ways[turn % len(ways)])
    report = load(state, ckpt, name_map=keys, strict=False, broadcast=how == "broadcast", threads=2)
    assert not report.missing and not report.mismatched and set(report.loaded) == set(truth)
    for name, one in state.items():
        local = one.to_local() if isinstance(one, DTensor) else one
        assert raw(local) == raw(want[name]), (how, sample, name, getattr(one, "placements", None))
    needed = sum(one.nbytes for one in want.values())
    once = sum(one.nbytes for one in truth.values())
    if "zstd" in sample or sample.startswith(("zarr/", "orbax/")):
        needed, once = _chunks(ckpt, {keys[name]: one for name, one in state.items()})
    return [report.read_nbytes, report.received_nbytes, needed, once]


def _chunks(ckpt: wb.Checkpoint, state: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Bytes of the stored chunks that this rank wants an element of, and those of all chunks."""
    touched, chunks = 0, ckpt.chunks[ckpt.chunks["key"].isin(list(state)) & (ckpt.chunks["replica"] == 0)]
    for chunk in chunks.itertuples():
        one = state[chunk.key]
        size, low = tuple(one.shape), (0,) * one.ndim
        if isinstance(one, DTensor):
            size, low = compute_local_shape_and_global_offset(one.shape, one.device_mesh, one.placements)
        axes = zip(low, size, chunk.offsets, chunk.sizes, strict=True)
        if all(max(a, b) < min(a + n, b + m) for a, n, b, m in axes):
            touched += chunk.stop - chunk.start
    return int(touched), int((chunks["stop"] - chunks["start"]).sum())


def case_an_error_on_one_rank_is_raised_on_all(out: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = ranks - 1
    whole = torch.arange(12.0).reshape(4, 3)
    folder = _saved(out, "small", {"a": whole, "b": torch.ones(5)})
    mesh = init_device_mesh("cpu", (ranks,))

    def state() -> dict[str, torch.Tensor]:
        return {"a": placed(whole, mesh, [Shard(0)])[0], "b": empty((5,), torch.float32)}

    where = "" if ranks == 1 else f" on rank {last}"
    extra = state() | ({"c": torch.zeros(2)} if rank == last else {})
    fails(errors.TensorNotFoundError, f"1 missing: 'c' is not in the checkpoint{where};", extra, folder)
    other = state() | ({"b": torch.zeros(6)} if rank == last else {})
    fails(errors.UsageError, f"'b' is float32 (6,) here and float32 (5,) in the checkpoint{where};", other, folder)
    other = state() | ({"b": torch.zeros(5, dtype=torch.bfloat16)} if rank == last else {})
    fails(errors.UsageError, f"'b' is bfloat16 (5,) here and float32 (5,) in the checkpoint{where};", other, folder)
    fails(errors.UsageError, "1 unexpected: 'b'", {"a": state()["a"]}, folder)

    # what only one rank asks for is asked for
    partly = {"a": state()["a"]} | ({"b": state()["b"]} if rank == last else {})
    assert load(partly, folder).unexpected == ()
    loose = load(state() | {"c": torch.zeros(2)}, folder, strict=False)
    assert set(loose.missing) == {"c"} and set(loose.loaded) == {"a", "b"}

    gone = str(Path(folder).parent / "gone") if rank == last else folder
    fails(errors.NotACheckpointError, "gone", state(), gone)
    if ranks > 1:
        another = _saved(out, "another", {"a": whole.double(), "b": torch.ones(5)})
        fails(errors.UsageError, "a different save", state(), another if rank == last else folder)
        steps = [_saved(out, f"step-{step}", {"a": whole, "b": torch.ones(5)}) for step in (10, 20)]
        fails(errors.UsageError, "(step 10), which is a different save", state(), steps[rank == last])
        fails(errors.UsageError, "broadcast", state(), folder, broadcast=rank == last)

    def stop(_: float) -> None:
        if rank == last:
            raise InterruptedError("enough")

    try:
        load(state(), folder, progress=stop)
    except InterruptedError:
        assert rank == last
    except errors.WorkbenchError as told:
        assert rank != last and str(told) == f"rank {last} failed with InterruptedError: enough"
    else:
        raise AssertionError("one rank stopped and the others did not")
    whole_again = state()
    load(whole_again, folder, broadcast=True)
    assert torch.equal(whole_again["b"], torch.ones(5))


def case_a_file_that_is_cut_on_one_rank(out: Path) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for broadcast in (False, True):
        tensors = {f"w{i}": torch.ones(4000 - i) for i in range(8)}  # of which every rank reads some
        folder = _saved(out, f"cut{rank}-{broadcast}", tensors, every=True)
        ckpt = wb.open(folder)
        if rank == last:
            file = Path(folder) / "model.safetensors"
            os.truncate(file, file.stat().st_size - 9)
        dist.barrier()
        try:
            load({name: torch.zeros_like(one) for name, one in tensors.items()}, ckpt, broadcast=broadcast)
        except errors.ChangedError as told:
            assert f"rank {last}: " in str(told) or last == 0, told
        else:
            raise AssertionError("a cut file was read")


def case_a_hole(out: Path) -> None:
    """Rows that one rank wants are stored nowhere: nobody writes anything."""
    import torch.distributed.checkpoint as dcp

    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder, whole = out / "hole", torch.arange(64.0).reshape(16, 4)
    if rank == 0:
        dcp.save({"w": whole}, checkpoint_id=folder, no_dist=True)
        import pickle

        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (chunk,) = metadata.state_dict_metadata["w"].chunks
        chunk.sizes = torch.Size((15, 4))
        torch.save(whole[:15].clone(), folder / "item.pt")
        data = (folder / "item.pt").read_bytes()
        (info,) = metadata.storage_data.values()
        (folder / info.relative_path).write_bytes(data)
        info.length = len(data)
        (folder / "item.pt").unlink()
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    dist.barrier()
    made, _ = placed(whole, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    for broadcast in (False, True):
        fails(errors.HoleError, "15:16", {"w": made}, folder, broadcast=broadcast)


def case_uneven_shards_of_two_axes(out: Path) -> None:
    """FSDP2 over TP, vocab 515, model and AdamW, from whole tensors of torch.save; gathered again by torch."""
    if dist.get_world_size() != 4:
        return
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.fresh.dcp_ranks import Net, steps

    def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    torch.manual_seed(0)
    plain = Net()
    truth = states(plain, steps(plain))
    if dist.get_rank() == 0:
        torch.save(truth, out / "plain.pt")
    dist.barrier()

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = Net()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(2):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    parallelize_module(model, grid["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    state = states(model, steps(model, 1))
    assert "_StridedShard" in {type(p).__name__ for one in state["model"].values() for p in one.placements}
    for broadcast in (False, True):
        for one in [*state["model"].values(), *_tensors(state["optim"]["state"])]:
            (one.to_local() if isinstance(one, DTensor) else one).zero_()
        state["optim"]["param_groups"][0]["lr"] = -1.0
        report = load(state, out / "plain.pt", broadcast=broadcast)
        assert not report.missing and report.objects["optim.param_groups.0.lr"] == 0.01
        assert state["optim"]["param_groups"] == truth["optim"]["param_groups"]
        got, want = list(_tensors(state)), list(_tensors(truth))
        assert len(got) == len(want) > 40
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs)


def case_compressed_chunks_are_undone_by_one_rank(out: Path) -> dict[str, int]:
    """Each rank wants rows of the same chunks; in one round, and in many."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._extension import ZStandard

    from workbench.load import chunks as load_chunks

    torch.manual_seed(2)
    truth = {f"w{i}": torch.randint(0, 9, (13 + i, 40)) for i in range(6)} | {"bias": torch.randn(7)}
    if dist.get_rank() == 0:
        writer = dcp.FileSystemWriter(str(out / "zstd"), _extensions=[ZStandard()])
        dcp.save(truth, storage_writer=writer, no_dist=True)
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ckpt = wb.open(out / "zstd")
    stored, read = int((ckpt.catalog.stop - ckpt.catalog.start).sum()), 0
    for stage in (load_chunks.STAGE, 6000):
        load_chunks.STAGE = stage
        made = {name: placed(whole, mesh, [Shard(0)]) for name, whole in truth.items()}
        state = {name: one for name, (one, _) in made.items()}
        state["w1"] = torch.zeros(40, 14, dtype=torch.int64).T  # not contiguous
        report = load(state, ckpt, broadcast=True, threads=2)
        for name, (one, want) in made.items():
            assert raw(state[name]) == raw(truth[name]) if name == "w1" else raw(one.to_local()) == raw(want), name
        read = report.read_nbytes
    return {"read": read, "stored": stored}


def case_targets_of_every_kind(out: Path) -> None:
    """Strided, tied, empty and 0-d targets, with replicas exchanged."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    truth = {
        "wide": torch.randn(6, 40),
        "tied": torch.randn(7, 3),
        "same": torch.randn(2, 9),
        "one": torch.randn(1, 4),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "pairs": torch.randn(5, dtype=torch.complex64),
        "flags": torch.tensor([True, False, True]),
        "long": torch.randn(300_000),
    }
    folder = _saved(out, "kinds", truth)
    mesh = init_device_mesh("cpu", (ranks,))
    for broadcast in (False, True):
        wide = torch.zeros(40, 6).T  # not contiguous
        tied = torch.zeros(7, 3)
        state = {
            "wide": wide,
            "tied": tied,
            "again": tied,
            "same": torch.zeros(4, 9)[::2],
            "scalar": torch.tensor(0.0),
            "none": torch.zeros(0, 3),
            "pairs": torch.zeros(5, dtype=torch.complex64),
            "flags": torch.zeros(3, dtype=torch.bool),
            "one": placed(truth["one"], mesh, [Shard(0)])[0],
            "long": torch.zeros(300_000) if rank == 0 else placed(truth["long"], mesh, [Shard(0)])[0],
        }
        one = state["one"]  # an empty shard on most ranks; tied to a name that the checkpoint lacks
        state["one_too"] = DTensor.from_local(
            one.to_local(), mesh, [Shard(0)], run_check=False, shape=one.shape, stride=(4, 1)
        )
        report = load(state, folder, broadcast=broadcast)
        assert {"again", "one_too"} <= set(report.loaded) and not report.missing
        for name, want in truth.items():
            got = state[name]
            if isinstance(got, DTensor):
                size, offset = compute_local_shape_and_global_offset(want.shape, mesh, got.placements)
                got, want = got.to_local(), want[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
            assert raw(got) == raw(want), name


def case_a_group_of_some_ranks(out: Path) -> None:
    """Two halves of the job load different checkpoints at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 3:
        return
    low = list(range(ranks // 2))
    groups = [dist.new_group(low), dist.new_group([r for r in range(ranks) if r not in low])]
    mine = 0 if rank in low else 1
    folders = [_saved(out, f"half{half}", {"w": torch.full((1000 + half,), half + 1.0)}) for half in range(2)]
    state = {"w": torch.zeros(1000 + mine)}
    report = load(state, folders[mine], process_group=groups[mine], broadcast=True)
    assert torch.equal(state["w"], torch.full((1000 + mine,), mine + 1.0))
    assert report.read_nbytes + report.received_nbytes == 4 * (1000 + mine)
    try:
        load(state, folders[mine], process_group=groups[1 - mine])
    except errors.UsageError as told:
        assert "not a member" in str(told)
    else:
        raise AssertionError("a group of others was taken")


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])


def _saved(out: Path, name: str, tensors: dict[str, torch.Tensor], *, every: bool = False) -> str:
    """A folder of safetensors, made by rank 0 (or by every rank its own)."""
    folder = out / name
    if dist.get_rank() == 0 or every:
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
    if not every:
        dist.barrier()
    return str(folder)


if __name__ == "__main__":
    main("tests.load_worker", sys.argv[1:])
