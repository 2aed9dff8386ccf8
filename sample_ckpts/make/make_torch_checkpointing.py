"""Saves of torch_checkpointing 0.1.1: FSDP2 over tensor parallelism on 2 × 2 gloo ranks, and one process.

``torch_checkpointing/step-3``: items of torchtitan (model, nested optimizer, scheduler, train state, data loader),
``_StridedShard`` rows that do not divide (43 over 2 × 2), tensors replicated over one axis of the mesh,
``metadata.pkl``, one item (``ema``) that it does not list, one as safetensors and one as JSON.
``torch_checkpointing/single``: one process without a resharder, so without ``metadata.pkl``; odd tensors.

The library gathers its metadata on "cuda" whatever the backend; here that call runs on the CPU, which changes no byte.
Run with the package beside this script's interpreter: ``pip install torch_checkpointing==0.1.1``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import TinyLlama, publish, spawn, train_step, truth_of, write_truth
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, SafetensorsSerialization
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

VOCAB = 43
NAME = "torch_checkpointing"


def _gather(self, data, process_group):
    gathered = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data, group=process_group)
    return dict(enumerate(gathered))


def worker() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = TinyLlama(VOCAB, dim=8, layers=1, head_dim=4)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"layers.0.attention.w[qkv]": columns, "layers.0.attention.wo": rows, "layers.0.feed_forward.w[13]": columns}
    plan |= {"layers.0.feed_forward.w2": rows, "output": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model.layers["0"], mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for step in range(3):
        train_step(model, optimizer, VOCAB, seed=100 * step + mesh["fsdp"].get_local_rank())
        scheduler.step()
    weights, moments = get_state_dict(model, optimizer)
    kept = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight")
    moments["state"] = {name: moments["state"][name] for name in kept}
    rank = dist.get_rank()
    state = {
        "model": weights,
        "optimizer": moments,
        "ema": {"output.weight": weights["output.weight"] * 0.5},
        "head": {"proj": weights["layers.0.attention.wo.weight"]},
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(192)},
        "dataloader": {f"dp_rank_{rank // 2}": {"cursor": 7 + rank // 2}},
        "config": {"vocab": VOCAB, "rank_independent": True},
    }
    resharded = ItemSpec(resharder=DefaultResharder())
    safetensors = LayoutInfo("head_{rank}.safetensors", SafetensorsSerialization())
    items = {
        "model": resharded,
        "optimizer": resharded,
        "head": ItemSpec(resharder=DefaultResharder(), layout=safetensors),
        "config": ItemSpec(layout=LayoutInfo("config_{rank}.json", JsonSerialization())),
    }
    DefaultMetadataManager._all_gather_pickled_data = _gather
    _save(items, state, f"{NAME}/step-3")
    truth = truth_of(state)
    if rank == 0:
        write_truth(f"{NAME}/step-3", truth)


def single() -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(6, 8, generator=generator)
    state = {
        "model": {"fc.weight": weight, "fc.bias": torch.randn(6, generator=generator)},
        "odd": {
            "bf16": torch.randn(3, 5, generator=generator).bfloat16(),
            "fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "transposed": torch.randn(6, 8, generator=generator).T,
            "view": torch.arange(64.0).reshape(8, 8)[2:4],
            "tied": weight,
            "list": [torch.arange(3), {"x": torch.arange(2.0)}],
            "a.b/c": torch.ones(2, dtype=torch.bool),
        },
        "step": 3,
    }
    _save({}, state, f"{NAME}/single")
    write_truth(f"{NAME}/single", {key: value.clone() for key, value in truth_of(state).items()})


def _save(items: dict[str, ItemSpec], state: dict, path: str) -> None:
    config = CheckpointManager.Config.with_sync_save()
    config.items, config.storage_config = items, LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    manager.save(path, state)
    manager.close()


if __name__ == "__main__":
    with publish(NAME):
        spawn(worker, 4)
        spawn(single, 1)
