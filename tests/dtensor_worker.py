"""One of four processes that load a sample as DTensors and let torch gather them; imports little, as it starts anew."""

from __future__ import annotations

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import workbench as wb
from workbench.load.device import to_device

NAME = "dcp_tp2_fsdp2_vocab515"  # 515 rows do not divide by anything
MESHES = {"fsdp": (4,), "fsdp,tp": (2, 2), "dp_replicate,dp_shard": (2, 2), "pp,tp": (2, 2), "pp": (4,)}


def rank(number: int, port: int, samples: str) -> None:
    """Raises where a tensor is not the truth."""
    dist.init_process_group("gloo", rank=number, world_size=4, init_method=f"tcp://127.0.0.1:{port}")
    truth = load_file(f"{samples}/../tests/truth/{NAME}.safetensors")
    ckpt = wb.open(f"{samples}/{NAME}")
    for axes, sizes in MESHES.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes.split(",")))
        got = to_device(ckpt, "cpu", device_mesh=mesh)
        assert len(got) == 21 or "pp" in axes  # two layers: two of four stages hold nothing
        for key, one in got.items():
            assert isinstance(one, DTensor) == (axes != "pp"), key
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            assert torch.equal(whole, truth[key]), (axes, key)
    dist.destroy_process_group()
