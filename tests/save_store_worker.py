"""Gloo ranks save into a store: ``python -m tests.save_store_worker RANKS OUT``; URL and options are in STORE."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import workbench as wb
from tests import rank_jobs
from tests.save_worker import truth
from workbench.dcp import writer


def save(state: dict[str, Any]) -> None:
    url, options = json.loads(os.environ["STORE"])
    dcp.save(state, storage_writer=wb.dcp.Writer(url, storage_options=options), planner=wb.dcp.Planner())


def case_sharded(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {"w": distribute_tensor(torch.randn(31, 40, generator=made), mesh, [Shard(0)])}
    state["both"] = torch.arange(90_000.0)
    for _ in range(2):
        save(state)
    truth(folder, state)


def case_worse(folder: Path) -> str:
    """The last rank fails: nothing of its own remains, and nothing of others once rank 0 gives up its writer."""
    if dist.get_rank() == dist.get_world_size() - 1:
        writer.DataFile.flush = lambda *_, **__: 1 / 0
    try:
        save({"w": torch.ones(500), "v": torch.ones(500)})
    except CheckpointException as error:
        told = str(sorted(error.failures))
    gc.collect()
    return told


if __name__ == "__main__":
    rank_jobs.main("tests.save_store_worker", sys.argv[1:])
