"""Megatron checkpoints written with torch and pickle alone, the way Megatron-LM does it rank by rank.

A model is full tensors by global name. Ranks cut their parts with ``chunk`` and ``cat``; buffers are filled by the
loop of ``distrib_optimizer.py`` (absolute starts, padded bucket ends), holes with a value that nobody may read.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

HOLE = -12345.75
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


@dataclass
class Model:
    """Full tensors by global name, in the order in which one process would register them."""

    layers: int = 4
    hidden: int = 20
    ffn: int = 12
    heads: int = 4
    groups: int = 2
    kv: int = 6
    vocab: int = 44
    experts: int = 0
    tied: bool = False
    grouped: bool = False
    te: bool = False
    seed: int = 0
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (self.vocab, h)}
        rows = (self.heads + 2 * self.groups) * self.kv
        for n in range(self.layers):
            x = f"decoder.layers.{n}."
            a, m = x + "self_attention.", x + "mlp."
            shapes |= {} if self.te else {x + "input_layernorm.weight": (h,)}
            shapes |= {a + "linear_proj.weight": (h, self.heads * self.kv), a + "linear_proj.bias": (h,)}
            shapes |= {a + "linear_qkv.layer_norm_weight": (h,)} if self.te else {}
            shapes |= {a + "linear_qkv.weight": (rows, h), a + "linear_qkv.bias": (rows,)}
            if self.experts:
                shapes |= {x + "pre_mlp_layernorm.weight": (h,), m + "router.weight": (self.experts, h)}
                for e in range(self.experts):
                    expert = f"{m}experts.local_experts.{e}."  # for `grouped`, the name in the file is another
                    shapes |= {
                        expert + "linear_fc1.weight": (2 * self.ffn, h),
                        expert + "linear_fc2.weight": (h, self.ffn),
                    }
            else:
                shapes |= {} if self.te else {x + "pre_mlp_layernorm.weight": (h,)}
                shapes |= {m + "linear_fc1.layer_norm_weight": (h,)} if self.te else {}
                shapes |= {m + "linear_fc1.weight": (2 * self.ffn, h), m + "linear_fc2.weight": (h, self.ffn)}
        shapes |= {"decoder.final_layernorm.weight": (h,)}
        shapes |= {} if self.tied else {"output_layer.weight": (self.vocab, h)}
        made = torch.Generator().manual_seed(self.seed)
        for name, shape in shapes.items():
            master = torch.randn(shape, generator=made)
            self.params[name] = master.bfloat16()
            moments = torch.randn(shape, generator=made), torch.rand(shape, generator=made)
            self.states[name] = dict(zip(STATES, (master, *moments), strict=True))

    def args(self, **more: Any) -> Namespace:
        facts: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "group_query_attention": True,
            "kv_channels": self.kv,
            "swiglu": True,
            "untie_embeddings_and_output_weights": not self.tied,
            "num_experts": self.experts or None,
            "moe_grouped_gemm": self.grouped,
            "transformer_impl": "transformer_engine" if self.te else "local",
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": 1,
            "rank": 0,
            "vocab_size": self.vocab - 3,
            "padded_vocab_size": self.vocab,
            "consumed_train_samples": 80,
            "overlap_grad_reduce": False,
            "iteration": 10,
        }
        return Namespace(**(facts | more))

    def truth(self) -> dict[tuple[str, str], torch.Tensor]:
        """Every tensor by ``(fqn, role)``."""
        found = {(name, "param"): tensor for name, tensor in self.params.items()}
        roles = {"fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        return found | {(n, roles[s]): t for n, states in self.states.items() for s, t in states.items()}


def cut_of(name: str) -> tuple[bool, int, int]:
    """``tensor_model_parallel, partition_dim, partition_stride`` as Megatron's layers set them."""
    if "layer_norm_" in name or "layernorm" in name or "router" in name or name.endswith("linear_proj.bias"):
        return False, -1, 1
    if "linear_fc1" in name:
        return True, 0, 2
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return True, 1, 1
    return True, 0, 1


def cut(name: str, tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    parallel, dim, stride = cut_of(name)
    if not parallel:
        return tensor.clone()
    parts = [part.chunk(world, dim)[rank] for part in tensor.chunk(stride, dim)]
    return torch.cat(parts, dim).contiguous()


@dataclass(eq=False)
class Held:
    """A parameter as one rank holds it."""

    name: str  # global
    local: str
    chunk: int
    param: torch.Tensor
    states: dict[str, torch.Tensor]
    expert: bool
    shared: bool


def held(
    model: Model, stages: list[list[list[int]]], tp: int, pp: int, ep: int, at: tuple[int, int, int]
) -> list[list[Held]]:
    """What the rank at ``(tp, pp, ep)`` holds, by model chunk; ``stages[chunk][stage]`` lists layers."""
    t, p, e = at
    found = []
    for chunk, by_stage in enumerate(stages):
        mine: list[Held] = []
        first, last = chunk == p == 0, chunk == len(stages) - 1 and p == pp - 1
        names = [n for n in model.params if (n.startswith("embedding") and first) or _layer(n) in by_stage[p]]
        names += [n for n in model.params if n.startswith(("decoder.final", "output")) and last]
        if model.tied and last and not first:
            names.append("output_layer.weight")
        for name in names:
            source = name if name in model.params else "embedding.word_embeddings.weight"
            local, expert = name, ".experts." in name
            if (layer := _layer(name)) is not None:
                local = name.replace(f"layers.{layer}.", f"layers.{by_stage[p].index(layer)}.")
            if expert:
                number = int(name.split("local_experts.")[1].split(".")[0])
                each = model.experts // ep
                if number // each != e:
                    continue
                local = local.replace(f"local_experts.{number}.", f"local_experts.{number % each}.")
                if model.grouped:
                    local = local.replace(f"local_experts.{number % each}.", "") + str(number % each)
            states = {k: cut(name, v, t, tp) for k, v in model.states[source].items()}
            shared = model.tied and pp > 1 and name.startswith(("embedding", "output"))
            param = cut(name, model.params[source], t, tp)
            mine.append(Held(name, local, chunk, param, states, expert, shared))
        if model.grouped:  # TEGroupedMLP registers all of fc1, then all of fc2
            mine = sorted(mine, key=lambda h, mine=mine: _place(h, mine))
        found.append(mine)
    return found


def _place(h: Held, mine: list[Held]) -> tuple[int, int, int]:
    if not h.expert:
        return mine.index(h), 0, 0
    module = h.local.partition(".linear_fc")[0]
    first = min(k for k, other in enumerate(mine) if other.local.startswith(module))
    return first, int("linear_fc2" in h.local), int(h.local.rpartition("weight")[2])


def _layer(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


# ---- the distributed optimizer's buffers ---------------------------------------------------------------------------


def buffers(
    params: list[Held], dp: int, bucket_size: int | None
) -> tuple[list[tuple[Held, int, int]], list[tuple[int, int, int]]]:
    """``(parameter, bucket, start)`` and ``(start, end, unpadded)`` of each bucket, as ``distrib_optimizer.py``."""
    divisor = math.lcm(dp, 128)
    placed: list[tuple[Held, int, int]] = []
    done: list[tuple[int, int, int]] = []
    start = first = 0
    filled = False

    def close(end: int) -> int:
        padded = math.ceil(end / divisor) * divisor
        done.append((first, padded, end - first))
        return padded

    for param in params[::-1]:
        start = math.ceil(start / 64) * 64
        if param.shared and filled:
            start = first = close(start)
            filled = False
        end = start + param.param.numel()
        placed.append((param, len(done), start))
        filled = True
        if (bucket_size is not None and end - first >= bucket_size) or param.shared:
            start = first = close(end)
            filled = False
        else:
            start = end
    if filled:
        close(end)
    return placed, done


def flat(params: list[Held], dp: int, bucket_size: int | None, state: str) -> list[torch.Tensor]:
    """The padded bucket tensors of one state."""
    placed, done = buffers(params, dp, bucket_size)
    whole = torch.full((done[-1][1],), HOLE)
    for param, _, start in placed:
        whole[start : start + param.param.numel()] = param.states[state].reshape(-1)
    return [whole[start:end] for start, end, _ in done]


def coalesced(params: list[Held], dp: int, bucket_size: int | None) -> dict[str, Any]:
    """One buffer of ``distrib_optim.pt``: bucket ends stripped, buckets joined."""
    unpadded = [n for _, _, n in buffers(params, dp, bucket_size)[1]]
    found: dict[str, Any] = {}
    for state, name in zip(STATES, ("param", "exp_avg", "exp_avg_sq"), strict=True):
        parts = flat(params, dp, bucket_size, state)
        found[name] = torch.cat([part[:n] for part, n in zip(parts, unpadded, strict=True)])
    return found | {"numel_unpadded": sum(unpadded)}


# ---- legacy --------------------------------------------------------------------------------------------------------


def write_legacy(
    root: Path,
    model: Model,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    stages: list[list[list[int]]] | None = None,
    optimizer: str = "float16",
    attributes: bool = True,
    bucket_size: int | None = None,
    dp: int = 2,
    args: dict[str, Any] | None = None,
    no_args: bool = False,
) -> Path:
    """``mp_rank_…`` folders in ``root``; optimizer ``float16``, ``fp32``, ``flat`` or ``none``."""
    stages = stages or [even(model.layers, pp)]
    told = _sizes(tp, pp, ep, dp, stages) | {"use_distributed_optimizer": optimizer == "flat"}
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                chunks = held(model, stages, tp, pp, ep, (t, p, e))
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                state: dict[str, Any] = (
                    {} if no_args else {"args": model.args(**told, **(args or {}), rank=t + tp * (e + ep * p))}
                )
                state |= {"checkpoint_version": 3.0, "iteration": 10}
                for k, chunk in enumerate(chunks):
                    tensors = OrderedDict((h.local, h.param) for h in chunk)
                    tensors["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                    state["model" if len(chunks) == 1 else f"model{k}"] = tensors
                folder = root / name
                folder.mkdir(parents=True)
                parts = [[[h for h in c if not h.expert] for c in chunks], [[h for h in c if h.expert] for c in chunks]]
                if ep == 1:
                    parts = [chunks]
                if optimizer in ("float16", "fp32"):
                    ones = [_grouped(part, optimizer, attributes, k == 1) for k, part in enumerate(parts)]
                    state["optimizer"] = ones[0] if len(ones) == 1 else ones
                if optimizer == "flat":
                    state["optimizer"] = {"optimizer": {"param_groups": [{"step": 10}]}}
                    kinds = [
                        {"buckets_coalesced": True}
                        | {
                            k: {
                                (torch.bfloat16, torch.float32): coalesced(
                                    chunk, dp, bucket_size if k == p == 0 else None
                                )
                            }
                            for k, chunk in enumerate(part)
                        }
                        for part in parts
                    ]
                    torch.save(kinds[0] if len(kinds) == 1 else kinds, folder / "distrib_optim.pt")
                state["rng_state"] = [{"torch_rng_state": torch.arange(8, dtype=torch.uint8) + t}]
                torch.save(state, folder / "model_optim_rng.pt")
    return root


def _sizes(tp: int, pp: int, ep: int, dp: int, stages: list[list[list[int]]]) -> dict[str, Any]:
    """The mesh as ``args`` say it."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "data_parallel_size": dp,
        "world_size": tp * pp * dp,
        "virtual_pipeline_model_parallel_size": len(stages) if len(stages) > 1 else None,
    }


def even(layers: int, pp: int) -> list[list[int]]:
    each = layers // pp
    return [list(range(p * each, (p + 1) * each)) for p in range(pp)]


def _grouped(chunks: list[list[Held]], kind: str, attributes: bool, expert: bool) -> dict[str, Any]:
    everything = [h for chunk in chunks for h in chunk]
    decayed = [h for h in everything if h.param.ndim > 1 and not h.name.endswith(".bias")]
    groups = [decayed, [h for h in everything if h not in decayed]] if not expert else [decayed]
    state: dict[int, Any] = {}
    stored, masters, number = [], [], 0
    for position, group in enumerate(groups):
        ids = list(range(number, number + len(group)))
        stored.append({"params": ids, "wd_mult": float(position == 0), "is_expert_parallel": expert, "lr": 1e-3})
        copies = []
        for k, h in zip(ids, group, strict=True):
            state[k] = {
                "step": torch.tensor(10.0),
                "exp_avg": h.states["exp_avg"],
                "exp_avg_sq": h.states["exp_avg_sq"],
            }
            copy = h.states["fp32_param"].clone()
            parallel, dim, stride = cut_of(h.name)
            if attributes and parallel:
                copy.tensor_model_parallel, copy.partition_dim, copy.partition_stride = parallel, dim, stride
            copies.append(copy)
        masters.append(copies)
        number += len(group)
    inner = {"state": state, "param_groups": stored}
    return inner if kind == "fp32" else {"optimizer": inner, "fp32_from_fp16_params": masters}


# ---- torch_dist ----------------------------------------------------------------------------------------------------


@dataclass
class Saver:
    """Collects chunks and objects, then writes ``.metadata`` and ``.distcp`` files as DCP lays them out."""

    root: Path
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    chunks: dict[str, list[tuple[tuple[int, ...], torch.Tensor, int]]] = field(default_factory=dict)
    objects: dict[str, tuple[Any, int]] = field(default_factory=dict)

    def chunk(self, key: str, shape: tuple[int, ...], at: tuple[int, ...], tensor: torch.Tensor, rank: int) -> None:
        self.shapes[key] = tuple(shape), tensor.dtype
        if all(at != known for known, _, _ in self.chunks.setdefault(key, [])):  # DCP keeps one replica
            self.chunks[key].append((tuple(at), tensor, rank))

    def object(self, key: str, value: Any, rank: int = 0) -> None:
        self.objects.setdefault(key, ([value], rank))

    def write(self, marker: dict[str, Any] | None) -> Path:
        import io

        self.root.mkdir(parents=True)
        data: dict[str, bytearray] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, Any] = {}

        def put(index: MetadataIndex, value: Any, rank: int) -> None:
            stream = io.BytesIO()
            torch.save(value, stream)
            name = f"__{rank}_0.distcp"
            file = data.setdefault(name, bytearray())
            storage[index] = _StorageInfo(name, len(file), stream.tell())
            file += stream.getvalue()

        for key, (shape, dtype) in self.shapes.items():
            metas = []
            for k, (at, tensor, rank) in enumerate(self.chunks[key]):
                metas.append(ChunkStorageMetadata(torch.Size(at), tensor.shape))
                put(MetadataIndex(key, torch.Size(at), k), tensor.contiguous().clone(), rank)
            entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), metas)
        for key, (value, rank) in self.objects.items():
            entries[key] = BytesStorageMetadata()
            put(MetadataIndex(key), value, rank)
        for name, content in data.items():
            (self.root / name).write_bytes(content)
        (self.root / ".metadata").write_bytes(pickle.dumps(Metadata(entries, None, storage)))
        if marker is not None:
            (self.root / "metadata.json").write_text(json.dumps(marker))
        return self.root


OLD_MARKER = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NEW_MARKER = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def sharded_key(name: str, layered: bool, te: bool = False) -> tuple[str, int | None, int | None]:
    """Megatron's key for a global name, with the layer and expert that it stacks."""
    layer = expert = None
    key = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    if not te:  # gpt_layer_specs.py maps the names of local modules, with experts or without
        key = key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    if ".local_experts." in key:
        head, _, rest = key.partition("local_experts.")
        number, _, tail = rest.partition(".")
        key, expert = f"{head}experts.{tail}", int(number)
    if key.startswith("decoder.layers.") and not layered:
        number, _, tail = key.removeprefix("decoder.layers.").partition(".")
        key, layer = f"decoder.layers.{tail}", int(number)
    return key, layer, expert


def put_tensor(
    saver: Saver, model: Model, h: Held, prefix: str, local: torch.Tensor, tp: int, t: int, rank: int, layered: bool
) -> None:
    """One rank's tensor as chunks; [gate; up] apart, stacked by layer and expert."""
    name = h.name if h.name in model.params else "embedding.word_embeddings.weight"
    key, layer, expert = sharded_key(name, layered, model.te)
    parallel, dim, stride = cut_of(name)
    full = model.params[name].shape
    lead, stack = [], []
    for index, size in ((layer, model.layers), (expert, model.experts)):
        if index is not None:
            lead.append(index)
            stack.append(size)
    for part, piece in enumerate(local.chunk(stride, dim if parallel else 0)) if parallel else [(0, local)]:
        at = [0] * local.ndim
        if parallel:
            at[dim] = part * (full[dim] // stride) + t * piece.shape[dim]
        tensor = piece.reshape(*(1 for _ in lead), *piece.shape)
        saver.chunk(prefix + key, (*stack, *full), (*lead, *at), tensor, rank)


def write_dist(
    root: Path,
    model: Model,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 2,
    stages: list[list[list[int]]] | None = None,
    optimizer: str = "fully",
    layered: bool = False,
    common: str = "file",
    bucket_size: int | None = None,
    args: dict[str, Any] | None = None,
    edit: Any = None,
    order: Any = list,
) -> Path:
    """A ``torch_dist`` folder; optimizer ``float16``, ``fully``, ``dp`` (buckets) or ``none``."""
    stages = stages or [even(model.layers, pp)]
    told = _sizes(tp, pp, ep, dp, stages)
    saver = Saver(root)
    for p in range(pp):
        for e in range(ep):
            for t in range(tp):
                rank = t + tp * (e + dp * p)
                chunks = held(model, stages, tp, pp, ep, (t, p, e))
                for h in (h for chunk in chunks for h in chunk):
                    put_tensor(saver, model, h, "", h.param, tp, t, rank, layered)
                    for state, local in h.states.items() if optimizer in ("float16", "fully") else ():
                        name = "param" if state == "fp32_param" and optimizer == "fully" else state
                        put_tensor(saver, model, h, f"optimizer.state.{name}.", local, tp, t, rank, layered)
                if optimizer == "dp":
                    kinds = [(False, "chained_0." if ep > 1 else ""), (True, "chained_1.")][: 1 + (ep > 1)]
                    for expert, chain in kinds:
                        mine = [order([h for h in chunk if ep == 1 or h.expert == expert]) for chunk in chunks]
                        group = t + tp * (e + ep * p) if expert else t + tp * p
                        if expert or e == 0:
                            put_buckets(
                                saver,
                                mine,
                                f"{chain}optimizer.distributed.dp_group_idx_{group}",
                                dp,
                                rank,
                                tp,
                                bucket_size,
                            )
                saver.object(f"rng_state/shard_{p}.{t}_{pp}.{tp}", {"torch_rng_state": torch.arange(4) + rank}, rank)
    for n in range(model.layers):
        key = f"decoder.layers.mlp.linear_fc1._extra_state/shard_{n}_{model.layers}"
        saver.object(key, None if n else b"state of layer 0")
    content: dict[str, Any] = {
        "args": model.args(**told, **(args or {})),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "opt_param_scheduler": {"num_steps": 80},
        "content_metadata": {"distrib_optim_sharding_type": optimizer},
    }
    if optimizer == "float16":
        content["optimizer"] = {
            "optimizer": {"state": {"common_step": torch.tensor(10.0)}, "param_groups": [{"lr": 0.1}]}
        }
    if common == "object":
        saver.object("common_state/shard_0_1", content)
    if edit is not None:
        edit(saver)
    saver.write(OLD_MARKER if common == "file" else NEW_MARKER)
    if common == "file":
        torch.save(content, root / "common.pt")
    return root


def put_buckets(
    saver: Saver, chunks: list[list[Held]], prefix: str, dp: int, rank: int, tp: int, bucket_size: int | None
) -> None:
    """``dp_reshardable``: every parameter and hole of every DP shard is a chunk of its bucket."""
    for k, chunk in enumerate(chunks):
        if not chunk:
            continue
        size = bucket_size if k == 0 else None
        placed, done = buffers(chunk, dp, size)
        for state, name in zip(STATES, ("param", "exp_avg", "exp_avg_sq"), strict=True):
            parts = flat(chunk, dp, size, state)
            for b, (first, end, unpadded) in enumerate(done):
                key = f"{prefix}.gbuf_idx_{k}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{b}.{name}"
                edges = {0, unpadded}
                for param, bucket, start in placed:
                    if bucket == b:
                        edges |= {start - first, start - first + param.param.numel()}
                edges |= {d * (end - first) // dp for d in range(dp) if d * (end - first) // dp < unpadded}
                ordered = sorted(edges)
                for low, high in itertools.pairwise(ordered):
                    writer = rank + tp * (low // ((end - first) // dp))
                    saver.chunk(key, (unpadded,), (low,), parts[b][low:high], writer)
    saver.object(f"{prefix}.optimizer/shard_0_1", {"param_groups": [{"step": 10}]}, rank)
