"""Megatron's legacy layout on two tensor-parallel ranks: fused QKV by query group, [gate; up], fp32 copies.

::

    mp_rank_00/model_optim_rng.pt    args  iteration  model  optimizer  opt_param_scheduler  rng_state
    mp_rank_01/model_optim_rng.pt    linear_qkv [q q k v] of its groups, linear_fc1 [gate_1; up_1], linear_fc2 columns

Layout as in tests/megatron_files.py (megatron-core 0.16.1). The bf16 of Megatron always has masters.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from tests.lab import facts
from tests.lab.state import State
from tests.megatron_files import cut, cut_of

__all__ = ["fused", "save"]

TP = 2
_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_proj.weight": "self_attention.linear_qkv.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.expert_bias": "mlp.router.expert_bias",
}
_ENDS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}


def fused(state: State, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under Megatron's names, in the order in which its modules register them."""
    found = {}
    for name in ("model.embed_tokens.weight", *_layered(state, named), "model.norm.weight", "lm_head.weight"):
        if name not in named:
            continue
        tensor = named[name]
        if name.endswith("q_proj.weight"):
            tensor = _qkv(state, tensor, *(named[name.replace("q_proj", f"{side}_proj")] for side in "kv"))
        elif name.endswith("gate_proj.weight"):
            tensor = torch.cat([tensor, named[name.replace("gate_proj", "up_proj")]])
        found[_renamed(name)] = tensor
    return found


def save(folder: Path, state: State, second: State | None = None) -> Path:
    """Write both ranks' folders; rank 1 writes its part of ``second`` where that is another."""
    for rank, own in enumerate((state, second or state)):
        content = {
            "args": _args(state, rank),
            "checkpoint_version": 3.0,
            "iteration": state.trainer.step,
            "model": {
                name: tensor.clone() if name.endswith("expert_bias") else cut(name, tensor, rank, TP)
                for name, tensor in fused(own, own.params | own.buffers).items()
            },
            "optimizer": _optimizer(own, rank),
            "opt_param_scheduler": _scheduler(state),
            "rng_state": [{"torch_rng_state": facts.random_state(state, rank)}],
        }
        if "scheduler" in state.config.unstored:
            del content["opt_param_scheduler"]
        path = folder / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        torch.save(content, path / "model_optim_rng.pt")
    return folder


def _layered(state: State, named: dict[str, torch.Tensor]) -> list[str]:
    order = []
    for n in range(state.config.layers):
        layer = f"model.layers.{n}."
        heads = [f"mlp.experts.{e}." for e in range(state.config.experts)] or ["mlp."]
        order += [layer + name for name in _PLAIN]
        order += [f"{layer}{head}{side}_proj.weight" for head in heads for side in ("gate", "down")]
    return [name for name in order if name in named]


def _renamed(name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    _, _, number, rest = name.split(".", 3)
    new = _PLAIN.get(rest) or (
        rest.replace("mlp.experts.", "mlp.experts.local_experts.")
        .replace("gate_proj", "linear_fc1")
        .replace("down_proj", "linear_fc2")
    )
    return f"decoder.layers.{number}.{new}"


def _qkv(state: State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows by query group: the group's queries, its key, its value."""
    groups, width = state.config.groups, q.shape[1:]
    return torch.cat([side.reshape(groups, -1, *width) for side in (q, k, v)], 1).reshape(-1, *width)


def _optimizer(state: State, rank: int) -> dict[str, Any]:
    """``Float16OptimizerWithFloat16Params.state_dict()``, or of ``FP32Optimizer`` where weights are fp32."""
    whole = {what: fused(state, getattr(state, what)) for what in ("params", "masters", "exp_avg", "exp_avg_sq")}
    steps = fused(state, {name: torch.full(state.params[name].shape, step) for name, step in state.step.items()})
    decays = [decay for decay, _ in state.groups()]
    matrices = [name for name, tensor in whole["params"].items() if tensor.ndim > 1]
    vectors = [name for name in whole["params"] if name not in matrices]
    groups, held, masters, number = [], {}, [], 0
    for mult, decay, names in zip((1.0, 0.0), decays, (matrices, vectors), strict=True):
        ids = list(range(number, number + len(names)))
        more = {"wd_mult": mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        groups.append(facts.group_facts(state, decay, names) | more | {"params": ids})
        for k, name in zip(ids, names, strict=True):
            if name in steps:
                moments = {what: cut(name, whole[what][name], rank, TP) for what in ("exp_avg", "exp_avg_sq")}
                held[k] = {"step": steps[name].min(), **moments}
        masters.append([_copy(name, whole["masters"][name], rank) for name in names if name in whole["masters"]])
        number += len(names)
    inner = {"state": held, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if state.masters else inner


def _copy(name: str, master: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's fp32 copy with the attributes that say how TP cut it."""
    found = cut(name, master, rank, TP)
    parallel, dim, stride = cut_of(name)
    if parallel:
        found.tensor_model_parallel, found.partition_dim, found.partition_stride = parallel, dim, stride
    return found


def _args(state: State, rank: int) -> Namespace:
    c = state.config
    return Namespace(
        num_layers=c.layers, hidden_size=c.hidden, ffn_hidden_size=c.ffn, num_attention_heads=c.heads,
        group_query_attention=True, num_query_groups=c.groups, kv_channels=c.head_dim, swiglu=True,
        normalization="RMSNorm", untie_embeddings_and_output_weights=not c.tied, vocab_size=c.vocab,
        padded_vocab_size=c.padded, num_experts=c.experts or None, moe_grouped_gemm=False, transformer_impl="local",
        tensor_model_parallel_size=TP, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, context_parallel_size=1, data_parallel_size=1, world_size=TP,
        rank=rank, optimizer="adam", decoupled_weight_decay=c.optimizer == "adamw", lr=c.lr, min_lr=c.min_lr,
        adam_beta1=c.betas[0], adam_beta2=c.betas[1], adam_eps=c.eps, weight_decay=c.weight_decay, clip_grad=c.clip,
        lr_decay_style="cosine", lr_warmup_iters=c.warmup, lr_decay_iters=c.total, train_iters=c.total,
        micro_batch_size=c.batch, global_batch_size=c.batch, seq_length=c.length, seed=c.seed,
        bf16=c.precision != "fp32", consumed_train_samples=state.trainer.samples, iteration=state.trainer.step,
    )  # fmt: skip


def _scheduler(state: State) -> dict[str, Any]:
    """``OptimizerParamScheduler.state_dict()``: it counts samples."""
    c = state.config
    return {
        "max_lr": c.lr,
        "min_lr": c.min_lr,
        "lr_warmup_steps": c.warmup * c.batch,
        "lr_decay_style": "cosine",
        "lr_decay_steps": c.total * c.batch,
        "num_steps": state.trainer.scheduler * c.batch,
        "start_wd": c.weight_decay,
        "end_wd": c.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": c.total * c.batch,
    }
