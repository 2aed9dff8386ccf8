"""Four gloo ranks save with ``wb.dcp``; the truth is gathered by torch. ``tests.save_loader`` loads it by torch alone.

Run as ``python -m tests.save_worker RANKS OUT [CASE …]``; each case leaves ``ckpt/`` and ``truth.pt`` in its folder.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import workbench as wb
from tests import rank_jobs
from workbench.analysis.manifest import load


def save(folder: Path, state: dict[str, Any], planner: Any = None, **options: Any) -> Any:
    planner = planner or wb.dcp.Planner()
    dcp.save(state, storage_writer=wb.dcp.Writer(folder / "ckpt", **options), planner=planner)
    return planner


def truth(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """What the ranks hold together, by torch's own collectives."""
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in tensors.items()}
    if dist.get_rank() == 0:
        torch.save({key: one.detach().clone() for key, one in whole.items()}, folder / "truth.pt")


def shares(folder: Path) -> list[int]:
    """Bytes that each rank wrote."""
    dist.barrier()
    found = [0] * dist.get_world_size()
    for path in (folder / "ckpt").glob("__*.distcp"):
        found[int(path.name.split("_")[2])] += path.stat().st_size
    return found


def whole(names: str = "ab") -> dict[str, torch.Tensor]:
    """The same tensors on all ranks."""
    made = torch.Generator().manual_seed(7)
    return {name: torch.randn(13 + at, 6, generator=made) for at, name in enumerate(names)}


# ---- cases -----------------------------------------------------------------------------------------------------------


def case_fsdp(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    state = {key: distribute_tensor(one, mesh, [Shard(0)]) for key, one in whole("abc").items()}
    state["short"] = distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])  # two ranks hold nothing
    state["none"] = distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)])
    save(folder, state)
    truth(folder, state)


def case_hsdp(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(1)
    state = {"big": torch.randn(601, 500, generator=generator)}
    state |= {f"w{n}": torch.randn(200 + n, 350, generator=generator) for n in range(10)}
    state = {key: distribute_tensor(one, mesh, [Replicate(), Shard(0)]) for key, one in state.items()}
    save(folder, state, wb.dcp.Planner(split_above=64 << 10))
    truth(folder, state)
    return shares(folder)


def case_tp(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    state = {
        "column": distribute_tensor(torch.randn(9, 6), mesh, [Shard(0)]),
        "row": distribute_tensor(torch.randn(6, 9), mesh, [Shard(1)]),
        "norm": distribute_tensor(torch.randn(6), mesh, [Replicate()]),
    }
    save(folder, state)
    truth(folder, state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(515, 8)
        self.up = nn.Linear(8, 22, bias=False)
        self.down = nn.Linear(22, 8, bias=False)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(at)))


def case_tp_fsdp(folder: Path) -> Any:
    """Real modules: tensor parallel, then FSDP2, a vocabulary that nothing divides, and the state of an optimizer."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = Net()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["fsdp"])
    state = {f"model.{key}": one for key, one in model.state_dict().items()}
    kinds = {type(placement).__name__ for one in state.values() for placement in one.placements}
    save(folder, {"model": model.state_dict(), "step": 12})
    truth(folder, state)
    return sorted(kinds)


def case_strided(folder: Path) -> Any:
    """A local tensor of rows that are not adjacent, as fused qkv under tensor parallelism: boxes, one for each run."""
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    fused = torch.arange(24 * 5.0).reshape(24, 5)
    local = fused.reshape(3, 4, 2, 5)[:, rank].reshape(6, 5)  # of each of q, k and v, a quarter
    placement = [_StridedShard(0, split_factor=3)]
    state = {
        "qkv": DTensor.from_local(local, mesh, placement, run_check=False, shape=fused.shape, stride=fused.stride())
    }
    save(folder, state)
    if rank == 0:
        torch.save({"qkv": fused}, folder / "truth.pt")


def case_ddp(folder: Path) -> Any:
    """Everything on every rank: all types, tied weights, scalars, objects; one tensor has 30 % of the bytes."""
    generator = torch.Generator().manual_seed(5)
    tied = torch.randn(300, 101, generator=generator)
    tensors = {
        "model.big": torch.randn(1201, 300, generator=generator),
        "model.tied": tied,
        "model.head": tied,
        "model.bf16": torch.randn(999, 151, generator=generator).bfloat16(),
        "model.bool": torch.tensor([True, False, True]),
        "model.fp8": torch.randn(7, 9, generator=generator).to(torch.float8_e4m3fn),
        "model.scalar": torch.tensor(2.5, dtype=torch.float64),
        "model.none": torch.empty(0, 4),
        "model.view": torch.randn(8, 6, generator=generator).t(),
        "model.complex": torch.randn(5, dtype=torch.complex64, generator=generator),
    }
    tensors |= {f"model.w{n}": torch.randn(60 + n, 300, generator=generator) for n in range(30)}
    state = {"model": {key[6:]: one for key, one in tensors.items()}, "lr": 0.5, "rng": [1, {"a": torch.arange(3)}]}
    planner = save(folder, state, wb.dcp.Planner(split_above=128 << 10))
    truth(folder, tensors)
    return {"shares": shares(folder), "differences": planner.differences}


def case_lowest(folder: Path) -> Any:
    save(folder, whole(), wb.dcp.Planner(balance="lowest"))
    truth(folder, whole())
    return shares(folder)


def case_kept_plans(folder: Path) -> Any:
    """Plans are used again for the same structure, and made anew for another type, shape or a failed save."""
    seen = []
    state = whole("abc")
    for change in ("", "", "dtype", "", "shape", ""):
        if change == "dtype":
            state["a"] = state["a"].half()
        if change == "shape":
            state["b"] = torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
        state["c"] = state["c"] + 1
        seen.append(save(folder, state).cached)
    truth(folder, state)
    report = wb.verify(folder / "ckpt", deep=True)
    return {"cached": seen, "errors": report.exit_code}


def case_torch_planner(folder: Path) -> Any:
    """torch's own planner, whose cached plans name the files of the first save."""
    names = set()
    for round in range(3):
        state = {key: one + round for key, one in whole().items()}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        save(folder, state, planner)
        dist.barrier()
        names |= {path.name for path in (folder / "ckpt").glob("__*.distcp")}
        dist.barrier()
    truth(folder, state)
    return sorted(names)


def case_rename(folder: Path) -> Any:
    """The path does not exist before the save is complete, and is replaced in one step."""
    present = []

    class Planner(wb.dcp.Planner):
        def resolve_data(self, item: Any) -> Any:
            present.append((folder / "ckpt" / ".metadata").exists())
            return super().resolve_data(item)

    for round in range(2):
        save(folder, {key: one + round for key, one in whole("abcdefgh").items()}, Planner(), commit="rename")
        dist.barrier()
    truth(folder, {key: one + 1 for key, one in whole("abcdefgh").items()})
    return {"present": present, "left": sorted(os.listdir(folder))}


def case_different_replicas(folder: Path) -> Any:
    state = whole("abc")
    if dist.get_rank() == 2:
        state["b"][3, 3] += 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planner = save(folder, {"model": state, "seed": dist.get_rank() // 2}, wb.dcp.Planner(split_above=64))
    truth(folder, {f"model.{key}": one for key, one in whole("abc").items()})
    return {"differences": planner.differences, "warned": [str(one.message) for one in told if "differ" in str(one)]}


def case_kept_replicas(folder: Path) -> Any:
    """Replicas are compared although plans are kept, and when a rank has what another one alone had before."""
    rank, told, state = dist.get_rank(), [], whole()
    alone = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    if rank == 1:
        state["alone"] = alone
    for change in ("", "", "value", "", "value", "", "name", ""):
        if change == "value" and rank == 2:
            state["b"][3, 3] *= -1
        if change == "name" and rank == 3:
            state["alone"] = -alone
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner = save(folder, state, wb.dcp.Planner(split_above=64))
        dist.barrier()
        found = torch.zeros(9, 6)
        dcp.load({"alone": found}, checkpoint_id=folder / "ckpt", no_dist=True)
        told.append([planner.cached, planner.differences, torch.equal(found, alone)])
        dist.barrier()
    truth(folder, whole() | {"alone": alone})
    return told


def case_rank_raises(folder: Path) -> Any:
    """One rank cannot write: all ranks get the error, which names it; the old checkpoint stays, no file of the new."""
    save(folder, whole())
    dist.barrier()
    before = sorted(os.listdir(folder / "ckpt"))

    class Planner(wb.dcp.Planner):
        def resolve_data(self, item: Any) -> Any:
            if dist.get_rank() == 2:
                raise OSError(28, "No space left on device")
            return super().resolve_data(item)

    state = {key: one + 1 for key, one in whole("abcdefgh").items()}
    try:
        save(folder, state, Planner())
        words = ""
    except dcp.api.CheckpointException as error:
        words = str(error)
    gc.collect()  # torch's closures hold the writer
    dist.barrier()
    left = sorted(os.listdir(folder / "ckpt"))
    dist.barrier()
    truth(folder, whole())
    return {"same": left == before, "words": words}


def case_async(folder: Path) -> Any:
    """The values at the call are saved, although the trainer changes its tensors meanwhile."""
    mesh = init_device_mesh("cpu", (4,))
    state = {key: distribute_tensor(one, mesh, [Shard(0)]) for key, one in whole().items()}
    state["scalar"] = distribute_tensor(torch.tensor(1.5), mesh, [Replicate()])
    truth(folder, state)
    kept = {key: one.to_local().clone() for key, one in state.items()}
    for _ in range(2):
        writer = wb.dcp.Writer(folder / "ckpt")
        saved = dcp.async_save(state, storage_writer=writer, planner=wb.dcp.Planner())
        for one in state.values():
            one.to_local().fill_(9)
        saved.result()
        for key, one in state.items():
            one.to_local().copy_(kept[key])
    dist.barrier()
    rows = load(folder / "ckpt").save["phases"]
    return sorted({(row["rank"], row["name"]) for row in rows if row["name"] in ("stage", "write", "gather")})


if __name__ == "__main__":
    rank_jobs.main("tests.save_worker", sys.argv[1:])
