"""Four gloo ranks that load a sample as DTensors and let torch gather them; run by the tests as
``python -m tests.dtensor_worker 4 OUT``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import workbench as wb
from tests.rank_jobs import ROOT, main
from workbench.load.device import to_device

NAME = "dcp_tp2_fsdp2_vocab515"  # 515 rows do not divide by anything
MESHES = {"fsdp": (4,), "fsdp,tp": (2, 2), "dp_replicate,dp_shard": (2, 2), "pp,tp": (2, 2), "pp": (4,)}


def case_gather(folder: Path) -> int:
    """Every tensor is the truth, on every mesh; returns how many were compared."""
    truth = load_file(ROOT / "tests" / "truth" / f"{NAME}.safetensors")
    ckpt = wb.open(ROOT / "sample_ckpts" / NAME)
    compared = 0
    for axes, sizes in MESHES.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes.split(",")))
        got = to_device(ckpt, "cpu", device_mesh=mesh)
        assert len(got) == 21 or "pp" in axes  # two layers: two of four stages hold nothing
        for key, one in got.items():
            assert isinstance(one, DTensor) == (axes != "pp"), key
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            assert torch.equal(whole, truth[key]), (axes, key)
            compared += 1
    return compared


if __name__ == "__main__":
    main("tests.dtensor_worker", sys.argv[1:])
