"""Gloo ranks that save through torch's HuggingFaceStorageWriter: ``python -m tests.hf_writer 3 OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.rank_jobs import main

FULL = {
    "w": torch.arange(21.0).reshape(7, 3),
    "b": torch.arange(5).bfloat16(),
    "n": torch.arange(16.0).reshape(4, 4) / 7,
}


def case_write(folder: Path) -> str:
    """``pieces/``, and ``both/`` with consolidated files as well."""
    mesh = init_device_mesh("cpu", (3,))
    placements = {"w": [Shard(0)], "b": [Replicate()], "n": [Shard(1)]}
    state = {key: distribute_tensor(FULL[key], mesh, placements[key], src_data_rank=None) for key in placements}
    index = {"w": 1, "b": 1, "n": 2}
    for name, consolidate in (("pieces", False), ("both", True)):
        path = folder / name
        path.mkdir(exist_ok=True)
        writer = HuggingFaceStorageWriter(str(path), index, save_distributed=True, enable_consolidation=consolidate)
        dcp.save(state, storage_writer=writer)
    return str(folder)


if __name__ == "__main__":
    main("tests.hf_writer", sys.argv[1:])
