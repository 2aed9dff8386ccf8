"""Four gloo ranks load what we wrote as DCP, with torch alone: DTensors of several meshes, and a sharded module.

Run as ``python -m tests.write_dcp_worker FOLDER``; in ``FOLDER`` each checkpoint ``X`` has its truth beside it, as
``X.safetensors``. Whatever is not bit-equal raises.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as dtensor_empty
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.reader_suite import raw

RANKS = 4
MESHES = [((4,), ["dp"]), ((2, 2), ["dp", "tp"])]


def main(folder: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    mp.start_processes(worker, (folder, port), nprocs=RANKS, start_method="fork")  # torch is imported once


def worker(rank: int, folder: Path, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for path in sorted(one for one in folder.iterdir() if one.is_dir()):
        truth = load_file(f"{path}.safetensors")
        for shape, names in MESHES:
            check_dtensors(path, truth, init_device_mesh("cpu", shape, mesh_dim_names=names))
    check_module(folder / "dcp_fsdp2", load_file(folder / "dcp_fsdp2.safetensors"))
    dist.destroy_process_group()


def check_dtensors(path: Path, truth: dict[str, torch.Tensor], mesh: dist.DeviceMesh) -> None:
    """Every tensor, cut along its first axes, whether or not their sizes divide evenly; the others whole."""
    state = {}
    for key, tensor in truth.items():
        placements = [Shard(axis) if axis < tensor.ndim else Replicate() for axis in range(mesh.ndim)]
        if math.prod(tensor.shape) == 0:
            placements = [Replicate()] * mesh.ndim
        state[key] = dtensor_empty(tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)
    dcp.load(state, checkpoint_id=path)
    for key, tensor in truth.items():
        part = state[key]  # gloo cannot gather every type: compare what this rank holds
        shape, offset = compute_local_shape_and_global_offset(part.shape, mesh, part.placements)
        piece = tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        assert raw(part.to_local()) == raw(piece), f"{path.name}: {key} on {mesh}"


def check_module(path: Path, truth: dict[str, torch.Tensor]) -> None:
    """A module sharded by FSDP2, and its AdamW, through torch's own state dicts and names."""
    model = module_of({key.removeprefix("model."): one for key, one in truth.items() if key.startswith("model.")})
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    groups = [[one for one in model.parameters() if (one.ndim > 1) is decayed] for decayed in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)
    parameters, states = get_state_dict(model, optimizer)
    state = {"model": parameters, "optim": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert [(one["lr"], one["weight_decay"]) for one in optimizer.param_groups] == [(0.001, 0.1), (0.001, 0.0)]
    for name, parameter in model.named_parameters():
        assert raw(whole(parameter)) == raw(truth[f"model.{name}"]), name
        for key, value in optimizer.state[parameter].items():
            assert raw(whole(value)) == raw(truth[f"optim.state.{name}.{key}"]), (name, key)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def module_of(parameters: dict[str, torch.Tensor]) -> nn.Module:
    """Modules in one another with parameters of these names, filled with zeros."""
    root = nn.Module()
    for name, tensor in parameters.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor)))
    return root


if __name__ == "__main__":
    main(Path(sys.argv[1]))
