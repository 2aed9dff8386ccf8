"""On a GPU: loads onto it, loads into its tensors, saves from it, and what the doctor says of runs on it.

Without one, every test here is skipped. ``python -m pytest tests/test_gpu.py`` needs torch with CUDA, and no browser.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import workbench as wb
from tests.reader_suite import same_bits
from tests.test_device import SMALL, TRUTHS, opened, rows
from workbench import errors
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Shard
from workbench.dcp.staging import devices_of, digests_of, wait_for
from workbench.doctor.facts.generators import drawn, is_fresh, seed
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.load import fill
from workbench.load.device import to_device
from workbench.load.onto_device import ring
from workbench.load.onto_device.lane import measure_peak

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- onto the device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUTHS)
def test_every_tensor_is_the_truth(samples: Path, name: str) -> None:
    with wb.open(samples / name) as ckpt:
        read = ckpt.state_dict()
        for options in (SMALL, {}):
            got = to_device(ckpt, "cuda", role=None, **options)
            assert list(got) == list(read) and all(one.is_cuda for one in got.values())
            for key, want in read.items():
                same_bits(got[key].cpu(), want, key)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_rows_are_cut_and_cast(tmp_path: Path, tp: int, dtype: str | None) -> None:
    catalog, dense = rows(tmp_path)
    rules = Rules((PlacementRule("t", {"tp": Shard(1)}),))
    ckpt = opened(tmp_path, catalog)
    want = torch.from_numpy(dense).chunk(tp, 1)[-1].to(torch.bfloat16 if dtype else torch.float32)
    for buffer in (1 << 20, 32 << 20):
        with torch.cuda.stream(torch.cuda.Stream()):  # results are usable on whatever stream is current
            got = to_device(ckpt, "cuda", mesh=Mesh(tp=tp), rules=rules, rank=tp - 1, dtype=dtype, buffer=buffer)
            twice = got["t.weight"] * 2
        torch.cuda.synchronize()
        assert torch.equal(got["t.weight"].cpu(), want) and torch.equal(twice.cpu(), want * 2)


def test_an_error_leaves_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, _ = rows(tmp_path)
    before = torch.cuda.memory_allocated()

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_device(opened(tmp_path, catalog), "cuda", buffer=1 << 20, progress=stop)
    assert torch.cuda.memory_allocated() == before
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    torch.cuda.empty_cache()
    with pytest.raises(errors.DeviceMemoryError, match=r"which has .* free"):
        to_device(opened(tmp_path, catalog), "cuda")
    assert torch.cuda.memory_allocated() == before


def test_the_peak_is_that_of_a_bus() -> None:
    assert measure_peak("cuda") > 1


def test_one_tensor_goes_to_the_device(samples: Path) -> None:
    with wb.open(samples / "hf_llama_bf16_sharded") as ckpt:
        key = next(iter(ckpt))
        got = ckpt[key].to("cuda")
        assert got.is_cuda
        same_bits(got.cpu(), ckpt.state_dict()[key], key)


# ---- into tensors of the device --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUTHS)
def test_load_fills_tensors_of_the_device(samples: Path, name: str) -> None:
    with wb.open(samples / name) as ckpt:
        read = ckpt.state_dict()
    flat = {key: torch.empty(one.shape, dtype=one.dtype, device="cuda") for key, one in read.items()}
    wb.load(flat, samples / name)
    for key, want in read.items():
        same_bits(flat[key].cpu(), want, key)


@pytest.mark.parametrize("strided", [False, True])
def test_load_through_buffers_that_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strided: bool
) -> None:
    monkeypatch.setattr(fill, "STAGE", 1 << 20)
    monkeypatch.setattr(ring, "BUFFER", 1 << 20)
    state = {f"layer.{n}": torch.randn(1000 + n, 200) for n in range(40)}  # about one a batch
    save_file(state, tmp_path / "model.safetensors")
    for _ in range(3):
        held = {
            name: torch.zeros(*one.shape, 2, device="cuda")[..., 0] if strided else torch.zeros_like(one, device="cuda")
            for name, one in state.items()
        }
        torch.cuda._sleep(100_000_000)  # copies wait, and their buffers are in use
        wb.load(held, tmp_path)
        with torch.cuda.stream(torch.cuda.Stream()):  # filled for every stream
            for name, one in state.items():
                same_bits(held[name].cpu(), one, name)


def test_load_fills_strided_tensors_on_any_stream(samples: Path) -> None:
    read = wb.open(samples / "hf_llama_bf16_sharded").state_dict()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # the tensors are still being cleared when they are filled
        wide = {key: torch.zeros((*one.shape, 2), dtype=one.dtype, device="cuda") for key, one in read.items()}
        state = {key: one[..., 0] for key, one in wide.items()}
        wb.load(state, samples / "hf_llama_bf16_sharded")
        twice = {key: one + 0 for key, one in wide.items()}
    torch.cuda.synchronize()
    for key, want in read.items():
        same_bits(twice[key][..., 0].cpu(), want, key)
        assert not twice[key][..., 1].any()


@pytest.fixture
def job() -> Any:
    """A job of one rank whose collectives for the device are NCCL's."""
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cuda", (1, 1), mesh_dim_names=("fsdp", "tp"))
    dist.destroy_process_group()


def trained(mesh: Any, number: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(number)
    model = torch.nn.Sequential(torch.nn.Embedding(515, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 3)).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        model(torch.randint(515, (32,), device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def bits(value: Any) -> Any:
    """Nested values with host copies of their tensors."""
    if isinstance(value, dict):
        return {name: bits(one) for name, one in value.items()}
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("how", ["save", "async", "echo", "unchanged"])
def test_a_sharded_job_saves_and_loads(tmp_path: Path, job: Any, how: str) -> None:
    model, optimizer = trained(job, 0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    want = bits(state)
    writer = wb.dcp.Writer(tmp_path / "step-3", echo=how == "echo")
    if how == "async":
        saved = dcp.async_save(state, storage_writer=writer, planner=wb.dcp.Planner())
        for one in model.parameters():
            torch.nn.init.constant_(one, 7.0)  # training goes on
        saved.result()
    else:
        dcp.save(state, storage_writer=writer, planner=wb.dcp.Planner())
    assert wb.verify(tmp_path / "step-3", deep=True).exit_code == 0
    other = trained(job, 1)
    weights, moments = get_state_dict(*other)
    state = {"model": weights, "optim": moments}
    assert bits(state) != want
    if how == "unchanged":
        dcp.load(state, checkpoint_id=tmp_path / "step-3")
    else:
        wb.load(state, tmp_path / "step-3", broadcast=True)
    assert bits(state) == want
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optim"])
    again = get_state_dict(*other)
    assert bits({"model": again[0], "optim": again[1]}) == want
    placed = wb.open(tmp_path / "step-3").to_device("cuda", device_mesh=job)
    assert bits({f"model.{name}": one for name, one in weights.items()}).items() <= bits(placed).items()


# ---- saves from the device -------------------------------------------------------------------------------------------


def odd() -> dict[str, Any]:
    made = torch.Generator("cuda").manual_seed(0)
    base = torch.randn(300, 70, device="cuda", generator=made)
    return {
        "base": base,
        "columns": base.t(),
        "rounded": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "complex": torch.view_as_complex(base.reshape(-1, 2)),
        "mask": base > 0,
        "index": torch.arange(7, device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.empty(0, 4, device="cuda"),
        "large": torch.randn(6 << 20, device="cuda", generator=made),  # several blocks
        "host": torch.arange(5.0),
        "nested": [base[:2].clone(), {"deep": base[2].clone()}],
        "count": 3,
    }


@pytest.mark.parametrize("echo", [False, True])
def test_a_save_waits_for_what_is_being_computed(tmp_path: Path, echo: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        state = odd()
        torch.cuda._sleep(200_000_000)
        state["large"].mul_(3)
        writer = wb.dcp.Writer(tmp_path / "save", echo=echo)
        dcp.save(state, storage_writer=writer, planner=wb.dcp.Planner(), no_dist=True)
    torch.cuda.synchronize()
    read = wb.open(tmp_path / "save").state_dict()
    for name, one in state.items():
        if isinstance(one, torch.Tensor):
            same_bits(read[name], one.cpu(), name)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(tmp_path: Path, rounds: int, echo: bool) -> None:
    for number in range(rounds):  # later ones use the same pinned memory again
        with torch.cuda.stream(torch.cuda.Stream()):
            state = odd()
            torch.cuda._sleep(200_000_000)  # what is saved is still being computed
            for name in ("base", "large", "rounded"):
                state[name].mul_(number + 2)
            want = {name: one.clone() for name, one in state.items() if isinstance(one, torch.Tensor)}
            writer = wb.dcp.Writer(tmp_path / f"save-{number}", echo=echo)
            saved = dcp.async_save(state, storage_writer=writer, planner=wb.dcp.Planner(), process_group=group())
            for one in want:
                if one not in ("fp8", "mask"):
                    state[one].zero_()
            saved.result()
        torch.cuda.synchronize()
        path = tmp_path / f"save-{number}"
        assert wb.verify(path, deep=True).exit_code == 0
        read = wb.open(path).state_dict()
        for name, one in want.items():
            same_bits(read[name], one.cpu(), name)


def group() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return None


@pytest.fixture(autouse=True)
def _alone() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_digests_of_the_device_are_those_of_the_host() -> None:
    state = {name: one for name, one in odd().items() if isinstance(one, torch.Tensor)}
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        state["large"].mul_(3)
        wait_for(devices_of(state))
        here = digests_of(state, device=True)
        there = digests_of({name: one.cpu() for name, one in state.items()})
    assert {name: one[:2] for name, one in here.items()} == {name: one[:2] for name, one in there.items()}


# ---- random generators, and echoes -----------------------------------------------------------------------------------


def test_a_generator_of_the_device_knows_its_seed_and_what_it_has_drawn() -> None:
    made = torch.Generator("cuda").manual_seed(2**40 + 11)
    fresh = made.get_state().numpy().tobytes()
    assert seed(fresh) == 2**40 + 11 and is_fresh(fresh) and drawn(fresh) == 0
    torch.rand(1000, device="cuda", generator=made)
    first = made.get_state().numpy().tobytes()
    torch.rand(1000, device="cuda", generator=made)
    second = made.get_state().numpy().tobytes()
    assert not is_fresh(first) and 0 < (drawn(first) or 0) < (drawn(second) or 0)


def test_an_echo_leaves_the_generators_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.rand(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(state, tmp_path / "step-1.pt")
    before = torch.cuda.get_rng_state()
    report = wb.echo(model, optimizer, against=tmp_path / "step-1.pt", step=1)
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert report.exit_code == 0, report
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert wb.echo(model, optimizer, against=tmp_path / "step-1.pt", step=1).exit_code == 2
