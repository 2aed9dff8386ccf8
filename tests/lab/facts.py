"""What trainers write beside their tensors, in the words that they use for it."""

from __future__ import annotations

from typing import Any

import torch

from tests.lab.state import State

__all__ = [
    "GROWTH",
    "arguments",
    "group_facts",
    "kept",
    "loader",
    "model_config",
    "random_state",
    "scaler",
    "scheduler",
]

GROWTH = 10  #: updates after which the loss scale doubles; real ones wait for two thousand


def arguments(state: State) -> dict[str, Any]:
    """Command line of a trainer in nanoGPT's words."""
    c = state.config
    return {
        "optimizer": c.optimizer,
        "learning_rate": c.lr,
        "min_lr": c.min_lr,
        "beta1": c.betas[0],
        "beta2": c.betas[1],
        "eps": c.eps,
        "weight_decay": c.weight_decay,
        "grad_clip": c.clip,
        "warmup_iters": c.warmup,
        "lr_decay_iters": c.total,
        "max_iters": c.total,
        "batch_size": c.batch,
        "block_size": c.length,
        "seed": c.seed,
        "data_seed": state.trainer.data_seed,
        "dtype": {"fp32": "float32"}.get(c.precision, "bfloat16"),
    }


def model_config(state: State) -> dict[str, Any]:
    """The model in the words of transformers' configs."""
    c = state.config
    return {
        "model_type": "llama",
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.groups,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab,
        "tie_word_embeddings": c.tied,
        "num_experts": c.experts,
        "rms_norm_eps": 1e-6,
        "rope_theta": c.rope_theta,
    }


def group_facts(state: State, decay: float, names: list[str]) -> dict[str, Any]:
    """What a param group holds beside its parameters."""
    found = {"lr": state.rate(names), "betas": state.config.betas, "eps": state.config.eps, "weight_decay": decay}
    return found | ({"maximize": True} if state.trainer.maximize else {})


def kept(state: State, content: dict[str, Any]) -> dict[str, Any]:
    """What this trainer stores of it."""
    return {name: value for name, value in content.items() if name not in state.config.unstored}


def scaler(state: State) -> dict[str, Any]:
    """``GradScaler.state_dict()``."""
    return {
        "scale": state.trainer.scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": GROWTH,
        "_growth_tracker": state.trainer.growth,
    }


def scheduler(state: State) -> dict[str, Any]:
    """``LambdaLR.state_dict()`` of torch 2.13."""
    c, count = state.config, state.trainer.scheduler
    groups = len(state.groups())
    return {
        "base_lrs": [c.lr] * groups,
        "last_epoch": count,
        "_step_count": count + 1,
        "_last_lr": [c.lr_at(count + 1)] * groups,
        "lr_lambdas": [None] * groups,
    }


def loader(state: State) -> dict[str, Any]:
    """State of a data loader that counts batches."""
    return {"batches": state.trainer.loader, "seed": state.trainer.data_seed}


def random_state(state: State, rank: int = 0) -> torch.Tensor:
    """A generator's state that goes with step and rank."""
    return (
        torch.Generator()
        .manual_seed(1000 * state.trainer.step + (0 if state.trainer.shared_random else rank))
        .get_state()
    )
