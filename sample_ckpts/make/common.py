"""Shared by the scripts here: a tiny Llama, workers on gloo, truth files, and a check for leaked paths.

Each script builds in a scratch folder that it enters first and saves under relative names, because DCP and
the Trainer record the folder they save to. ``publish`` then looks for machine names in the bytes and moves
the result::

    scratch/<name>, scratch/truth/<name>.safetensors  ──publish──►  sample_ckpts/<name>, tests/truth/…

Truth is each tensor whole, under its stored key, in safetensors (nothing of the workbench takes part).
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

SAMPLES = Path(__file__).resolve().parents[1]
TRUTH = SAMPLES.parent / "tests" / "truth"


class Block(nn.Module):
    """One Llama layer under torchtitan's names."""

    def __init__(self, dim: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention = nn.ModuleDict({n: nn.Linear(dim, dim, bias=False) for n in ("wq", "wk", "wv", "wo")})
        self.feed_forward = nn.ModuleDict(
            {
                "w1": nn.Linear(dim, hidden, bias=False),
                "w2": nn.Linear(hidden, dim, bias=False),
                "w3": nn.Linear(dim, hidden, bias=False),
            }
        )
        self.attention_norm = nn.RMSNorm(dim)
        self.ffn_norm = nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        att, ffn = self.attention, self.feed_forward
        h = self.attention_norm(x)
        # -1 heads: under tensor parallelism a rank holds only some of them
        q, k, v = (att[n](h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for n in ("wq", "wk", "wv"))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + att["wo"](h.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + ffn["w2"](F.silu(ffn["w1"](h)) * ffn["w3"](h))


class TinyLlama(nn.Module):
    def __init__(self, vocab: int = 256, dim: int = 32, layers: int = 2, head_dim: int = 8) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim, head_dim, 88) for i in range(layers)})
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, vocab: int, *, seed: int) -> float:
    """One AdamW step on random tokens; returns the loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (4, 17), generator=generator)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def truth_of(state: object, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a nested state, gathered whole, under its path joined by dots.

    Collective where the state holds DTensors: all ranks must call it.
    """
    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, Tensor):
        return {prefix: state.detach().clone(memory_format=torch.contiguous_format)}
    if isinstance(state, dict):
        items = [(str(k), v) for k, v in state.items()]
    elif isinstance(state, list | tuple):
        items = [(str(i), v) for i, v in enumerate(state)]
    else:
        return {}
    out: dict[str, Tensor] = {}
    for name, value in items:
        out.update(truth_of(value, f"{prefix}.{name}" if prefix else name))
    return out


def write_truth(name: str, tensors: dict[str, Tensor]) -> None:
    path = Path("truth") / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    path.chmod(0o644)


def check_dcp(folder: str) -> None:
    """Read a DCP folder back with torch and compare with its truth: two independent ways to whole tensors."""
    state: dict = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    stored, truth = truth_of(state), load_file(Path("truth") / f"{folder}.safetensors")
    if stored.keys() != truth.keys():
        raise SystemExit(f"{folder}: keys differ: {sorted(stored.keys() ^ truth.keys())[:5]}")
    for key, value in truth.items():
        if stored[key].dtype != value.dtype or not torch.equal(stored[key], value):
            raise SystemExit(f"{folder}: {key!r} differs from its truth")


def spawn(worker: Callable[[], None], world_size: int) -> None:
    """Run ``worker`` on ``world_size`` gloo ranks."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    mp.spawn(_rank_main, (world_size, port, worker), nprocs=world_size)


def _rank_main(rank: int, world_size: int, port: int, worker: Callable[[], None]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    try:
        worker()
    finally:
        dist.destroy_process_group()


@contextmanager
def publish(*names: str) -> Iterator[None]:
    """Build inside a scratch folder, then replace ``sample_ckpts/<name>`` and ``tests/truth/<name>`` for each name."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            yield
            _refuse_machine_names(Path("."), scratch)
            for name in names:
                for target in (SAMPLES / name, TRUTH / name):
                    shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(name, SAMPLES / name)
                for path in (SAMPLES / name).rglob("*.safetensors"):
                    path.chmod(0o644)  # safetensors 0.8 writes 0600
            if Path("truth").is_dir():
                shutil.copytree("truth", TRUTH, dirs_exist_ok=True)
        finally:
            os.chdir(home)


def _refuse_machine_names(folder: Path, scratch: str) -> None:
    needles = {scratch, str(Path.home()), str(SAMPLES.parent), socket.gethostname()}
    needles = {n for n in needles if len(n) > 4}  # shorter ones turn up in random weights
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for needle in needles:
            if needle.encode() in data:
                raise SystemExit(f"{path} names this machine: {needle!r}")
