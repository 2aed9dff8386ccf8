"""Gloo ranks that take an echo together; run by the tests as ``python -m tests.echo_worker RANKS OUT``.

Each case trains a few updates on all ranks, takes an echo and returns what the test compares with torch's own
gathering of the same tensors; ``OUT/rank<r>.json`` holds it, or a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import workbench as wb
from tests.rank_jobs import main
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BlockDigests, combine
from workbench.core.ranks import Ranks
from workbench.echo.hashing import fingerprints
from workbench.echo.listing import list_all


def truth(tensor: torch.Tensor) -> str:
    """The fingerprint by its definition, of a tensor that torch has gathered."""
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    hasher = BlockDigests()
    if whole.numel():
        hasher.update(whole.reshape(-1).view(torch.uint8).numpy())
    return combine(by_name(str(whole.dtype)), tuple(whole.shape), hasher.digests()).hex


def model_of(sharded: bool) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(515, 48), nn.Linear(48, 96), nn.LayerNorm(96), nn.Linear(96, 515))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in model:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    made = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    ids = torch.randint(0, 515, (4, 8), generator=made)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def case_every_placement(out: Path) -> dict[str, Any]:
    """Fingerprints of DTensors on all kinds of meshes are those of the whole tensors."""
    ranks, found, want = dist.get_world_size(), {}, {}
    meshes = [init_device_mesh("cpu", (ranks,))]
    if ranks == 4:
        meshes.append(init_device_mesh("cpu", (2, 2)))
    shapes = [
        ((515, 16), torch.float32),
        ((3, 7, 5), torch.bfloat16),
        ((1,), torch.int64),
        ((2100, 1030), torch.float32),
        ((1030, 3000), torch.bfloat16),
        ((0, 4), torch.float32),
    ]
    tensors = {}
    for at, mesh in enumerate(meshes):
        for number, (shape, dtype) in enumerate(shapes):
            ways: list[Any] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for placements in [[one] for one in ways] if mesh.ndim == 1 else [[a, b] for a in ways for b in ways]:
                torch.manual_seed(number)
                whole = torch.randn(shape).mul(9).to(dtype)
                if dtype == torch.float32 and at == 1 and number == 3 and placements[0] == placements[1]:
                    continue  # 8 MB, twice cut: three more of them are enough
                tensors[f"{at} {number} {placements}"] = distribute_tensor(whole, mesh, placements)
    tensors["plain"] = torch.arange(6.0).reshape(2, 3).t()
    tensors["large, not contiguous"] = torch.arange(3_000_000, dtype=torch.float32).reshape(1500, 2000).t()
    one = Ranks()
    made = fingerprints(list_all(tensors, one), one)
    for name, tensor in tensors.items():
        found[name], want[name] = made[name].hex, truth(tensor)
    assert not any(content.copies for content in made.values())
    return {"found": found, "want": want}


def case_fsdp(out: Path) -> dict[str, Any]:
    """Saved by DCP, compared with the live state: nothing; with another state: what is another."""
    model = model_of(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(3):
        update(model, optimizer, seed)
    weights, moments = get_state_dict(model, optimizer)
    folder = out / "step-3"
    dcp.save({"model": weights, "optimizer": moments, "train_state": {"step": 3}}, checkpoint_id=folder)
    healthy = wb.echo(model, optimizer, out / "echo.json", payload=False, step=3, against=folder)
    payload = wb.echo(model, optimizer, out / "echo", step=3)
    again = wb.echo(model, optimizer, against=out / "echo", payload=False, step=3)
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lost = wb.echo(model, fresh, against=folder, payload=False, step=3)
    state = {name: truth(tensor) for name, tensor in model.state_dict().items()}
    dist.barrier()
    ckpt = wb.open(out / "echo")
    return {
        "healthy": [one.rule for one in healthy if one.severity != "info"],
        "equal": healthy.checked["values"],
        "again": [one.rule for one in again],
        "lost": [one.message for one in lost if one.rule == "echo.state"],
        "prints": {name: healthy.echo.tensors[f"model.{name}"].fingerprint for name in state},
        "want": state,
        "payload": payload.path == str(out / "echo")
        and torch.equal(ckpt["model.1.weight"].torch(), weights["1.weight"].full_tensor()),
        "steps": sorted({float(ckpt[key].torch()) for key in ckpt if key.endswith(".step") and "state" in key}),
    }


def case_untouched(out: Path) -> dict[str, Any]:
    """Losses with an echo between two updates, and without."""
    losses = []
    for taken in (False, True):
        model = model_of(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        told = [update(model, optimizer, 0)]
        if taken:
            wb.echo(model, optimizer, out / "between.json", payload=False, step=1)
            wb.echo(model, optimizer, out / "between", step=1)
        told += [update(model, optimizer, seed) for seed in (1, 2)]
        losses.append([float(one).hex() for one in told])
    return {"without": losses[0], "with": losses[1]}


def case_replicas_that_differ(out: Path) -> dict[str, Any]:
    """A plain weight that one rank changed is found, and no other."""
    model = model_of(False)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model[2].weight[5] += 1
    report = wb.echo(model, None, out / "replicas.json", payload=False)
    return {"found": [(one.rule, one.evidence["tensors"]) for one in report]}


def case_stages(out: Path) -> dict[str, Any]:
    """Ranks with parameters of their own, as stages of a pipeline: one echo holds all of them."""
    model = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[f"layer{dist.get_rank()}"](torch.ones(1, 8)).sum().backward()
    optimizer.step()
    report = wb.echo(model, optimizer, out / "stages", step=1)
    groups = report.echo.objects["optimizer"]["param_groups"]
    return {
        "tensors": len(report.echo.tensors),
        "params": [len(group["params"]) for group in groups],
        "counts": report.echo.counts,
        "findings": [one.rule for one in report],
    }


def case_an_error_is_raised_on_all(out: Path) -> dict[str, Any]:
    """One rank gives a model that cannot be named: no rank is left waiting."""
    try:
        wb.echo(model_of(False) if dist.get_rank() else object(), None, out / "no.json", payload=False)
    except wb.errors.UsageError as error:
        return {"error_text": str(error)}
    return {"error_text": ""}


if __name__ == "__main__":
    main("tests.echo_worker", sys.argv[1:])
