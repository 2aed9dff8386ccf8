"""Four gloo ranks that save every DCP variant through torch itself, with the gathered truth beside each.

Run by the tests as ``python -m tests.fresh.dcp_ranks OUT``; writes ``OUT/<variant>/`` and
``OUT/<variant>.truth.safetensors`` (keys as stored, full tensors, gathered by torch, not by us).
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS = 4


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wq = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden + 4, bias=False)
        self.down = nn.Linear(2 * hidden + 4, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(self.wq(x)))))


class Net(nn.Module):
    def __init__(self, vocab: int = 515, hidden: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def steps(model: nn.Module, n: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(n):
        ids = torch.randint(0, 515, (2, 7))
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def full(value: object) -> torch.Tensor | None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor().detach().contiguous()
    if isinstance(value, ShardedTensor):
        out = torch.zeros(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, out)
        return out
    return value.detach().clone().contiguous() if isinstance(value, torch.Tensor) else None


def flat(state: object, path: str = "") -> dict[str, torch.Tensor]:
    """Full tensors by DCP's flattened key; every rank takes part, since gathering is collective."""
    found: dict[str, torch.Tensor] = {}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, (dict, list)):
            found |= flat(value, name)
        elif (tensor := full(value)) is not None:
            found[name] = tensor
    return found


def save(out: Path, name: str, state: dict, writer=None, no_dist: bool = False, **kwargs) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    truth = flat(state)
    writer = writer(str(out / name)) if writer else dcp.FileSystemWriter(str(out / name))
    dcp.save(state, storage_writer=writer, **kwargs)
    if dist.get_rank() == 0:
        save_file({key: value.clone() for key, value in truth.items()}, out / f"{name}.truth.safetensors")
    dist.barrier()


def train_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "step": 2, "note": "ein Gruß"}


def fsdp2(mesh, **kwargs) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1)
    return model, steps(model)


def worker(rank: int, out_name: str, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    from torch.distributed.device_mesh import init_device_mesh

    out = Path(out_name)
    flat_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    model, optimizer = fsdp2(flat_mesh)
    state = train_state(model, optimizer)
    save(out, "fsdp2", state)
    save(out, "many_files", state, lambda p: FileSystemWriter(p, single_file_per_rank=False, thread_count=2))
    save(out, "zstd", state, lambda p: FileSystemWriter(p, _extensions=[ZStandard()]))
    save(out, "no_collectives", state, use_collectives=False)
    weights = dict(state["model"])
    save(
        out,
        "safetensors_format",
        dict(weights),
        lambda p: FileSystemWriter(p, serialization_format=SerializationFormat.SAFETENSORS),
    )
    save(out, "hf_sharded", dict(weights), lambda p: HuggingFaceStorageWriter(p, save_distributed=True))

    hsdp, optimizer = fsdp2(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    save(out, "hsdp", train_state(hsdp, optimizer), lambda p: FileSystemWriter(p, thread_count=2))
    save(out, "two_d", two_d(grid))
    save(out, "fsdp1", fsdp1())
    dist.barrier()
    dist.destroy_process_group()


def two_d(grid) -> dict:
    """FSDP2 over TP on a 2×2 mesh, vocab 515: uneven ``_StridedShard`` rows and column splits."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Net()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    parallelize_module(model, grid["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    torch.manual_seed(1)
    return train_state(model, steps(model))


def fsdp1() -> dict:
    """FSDP1 ``SHARDED_STATE_DICT``: ``ShardedTensor`` chunks, uneven rows."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    torch.manual_seed(0)
    model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    torch.manual_seed(1)
    optimizer = steps(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": dict(model.state_dict()), "optim": FSDP.optim_state_dict(model, optimizer)}


def main(out: str) -> None:
    import socket

    Path(out).mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(worker, (out, port), nprocs=RANKS, start_method="fork")  # torch is imported once


if __name__ == "__main__":
    main(sys.argv[1])
