"""Gloo ranks load what ``tests.save_worker`` saved, onto other meshes, without importing the workbench."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import empty as dtensor_empty
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests import rank_jobs

FOLDER = "WORKBENCH_SAVED"  #: environment variable: where the cases are


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def case_load(_: Path) -> dict[str, list[str]]:
    """Each case, and what of it is not bit-equal on this rank."""
    ranks = dist.get_world_size()
    shapes = [(ranks,), (ranks // 2, 2)] if ranks % 2 == 0 and ranks > 2 else [(ranks,)]
    wrong: dict[str, list[str]] = {}
    for folder in sorted(Path(os.environ[FOLDER]).glob("case_*")):
        if not (folder / "truth.pt").exists():
            continue
        truth = torch.load(folder / "truth.pt", weights_only=True)
        found = wrong[folder.name] = []
        for shape in shapes:
            found += differences(folder, truth, init_device_mesh("cpu", shape))
        plain = {key: torch.zeros_like(one) for key, one in truth.items()}
        dcp.load(plain, checkpoint_id=folder / "ckpt")
        found += [f"{key} plain" for key, one in truth.items() if raw(plain[key]) != raw(one)]
    assert not [name for name in sys.modules if name.split(".")[0] == "workbench"]
    return wrong


def differences(folder: Path, truth: dict[str, torch.Tensor], mesh: DeviceMesh) -> list[str]:
    state, wrong = {}, []
    for key, tensor in truth.items():
        dims = range(tensor.ndim)[::-1][: mesh.ndim]  # the last dimensions: not as any of them was saved
        placements = [Shard(dims[at]) if at < len(dims) and tensor.numel() else Replicate() for at in range(mesh.ndim)]
        state[key] = dtensor_empty(tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)
    dcp.load(state, checkpoint_id=folder / "ckpt")
    for key, tensor in truth.items():
        part = state[key]
        shape, offset = compute_local_shape_and_global_offset(part.shape, mesh, part.placements)
        piece = tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        if raw(part.to_local()) != raw(piece):
            wrong.append(f"{key} on {tuple(mesh.shape)}")
    return wrong


if __name__ == "__main__":
    rank_jobs.main("tests.save_loader", sys.argv[1:])
