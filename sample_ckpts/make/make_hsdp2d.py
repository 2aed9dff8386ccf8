"""Two DCP folders on four gloo ranks whose chunks are not simply rows in rank order.

``dcp_hsdp_2x2``: HSDP, mesh (replicate 2, shard 2). Of each chunk one replica is stored; two files a rank.
``dcp_tp2_fsdp2_vocab515``: FSDP2 over tensor parallelism, mesh (dp 2, tp 2). Rows are ``_StridedShard``: the
list of chunks goes by rank, not by offset, and 515 rows do not divide by four::

    tok_embeddings.weight 515 × 32    rank 0: rows 0+129   rank 1: 258+129   rank 2: 129+129   rank 3: 387+128
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import TinyLlama, check_dcp, publish, spawn, train_step, truth_of, write_truth
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB_EVEN, VOCAB_ODD = 256, 515


def hsdp_worker() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = TinyLlama(VOCAB_EVEN)
    _shard(model, mesh)
    _train_and_save(model, VOCAB_EVEN, "dcp_hsdp_2x2", seed=dist.get_rank(), thread_count=2)


def two_d_worker() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = TinyLlama(VOCAB_ODD)
    parallelize_module(
        model,
        mesh["tp"],
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "layers.*.attention.w[qkv]": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(),
            "layers.*.feed_forward.w[13]": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(),
            "output": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    _shard(model, mesh["dp"])
    # the two ranks of a tensor-parallel pair must see the same tokens
    _train_and_save(model, VOCAB_ODD, "dcp_tp2_fsdp2_vocab515", seed=mesh["dp"].get_local_rank(), thread_count=1)


def _shard(model: TinyLlama, mesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train_and_save(model: TinyLlama, vocab: int, name: str, *, seed: int, thread_count: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(3):
        train_step(model, optimizer, vocab, seed=100 * step + seed)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    truth = truth_of(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(name, thread_count=thread_count))
    if dist.get_rank() == 0:
        write_truth(name, truth)


if __name__ == "__main__":
    with publish("dcp_hsdp_2x2", "dcp_tp2_fsdp2_vocab515"):
        spawn(hsdp_worker, 4)
        spawn(two_d_worker, 4)
        check_dcp("dcp_hsdp_2x2")
        check_dcp("dcp_tp2_fsdp2_vocab515")
