"""DeepSpeed ZeRO-1 over two data-parallel ranks: bf16 weights once, fp32 state as flat partitions without names.

::

    global_step240/  mp_rank_00_model_states.pt                        module  param_shapes  lr_scheduler  args …
                     bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt    [ embed │ q │ k │ v │ o … ┊
                     bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt                            ┊ … │ down ] pad

Flat lines and file contents as in tests/fresh/deepspeed_like.py (deepspeed 0.19.8).
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from tests.fresh import deepspeed_like as like
from tests.lab import facts
from tests.lab.state import State

__all__ = ["merged", "save"]

DP = 2
FIELDS = {"fp32": "updated", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def save(folder: Path, state: State, second: State | None = None) -> Path:
    """Write the weights and both ranks' partitions; rank 1 writes its part of ``second`` where that is another."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.params.items()}
    names = [names for _, names in state.groups()]
    client: dict[str, Any] = {
        "args": facts.arguments(state),
        "config": facts.model_config(state),
        "dataloader": facts.loader(state),
        "rng_state": facts.random_state(state),
    }
    content = like.model_states(
        names,
        shapes,
        OrderedDict(state.params | state.buffers),
        DP,
        buffer_names=list(state.buffers),
        global_steps=state.trainer.step,
        global_samples=state.trainer.samples,
        lr_scheduler=None if "scheduler" in state.config.unstored else _scheduler(state),
        ds_config=_config(state),
        **client,
    )
    folder = folder / f"global_step{state.trainer.step}"
    like.save(content, folder / "mp_rank_00_model_states.pt")
    for rank, own in enumerate((state, second or state)):
        path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        like.save_optim(_partition(own, names, rank), path)
    return folder


def merged(first: State, second: State) -> State:
    """What is loaded when rank 0 wrote ``first`` and rank 1 ``second``: the lines' halves; weights are rank 0's."""
    found = first.clone()
    for where in ("masters", "exp_avg", "exp_avg_sq"):
        mine, theirs = getattr(found, where), getattr(second, where)
        for _, names in first.groups() if mine else ():
            line = torch.cat([_line(mine, names)[0], _line(theirs, names)[1]])
            sizes = [mine[name].numel() for name in names]
            for name, part in zip(names, line[: sum(sizes)].split(sizes), strict=True):
                mine[name] = part.reshape(mine[name].shape).clone()
    return found


def _line(tensors: dict[str, torch.Tensor], names: list[str]) -> list[torch.Tensor]:
    return like.split_line([tensors[name] for name in names], DP)


def _partition(state: State, names: list[list[str]], rank: int) -> dict[str, Any]:
    held = [what for what, where in FIELDS.items() if where == "updated" or getattr(state, where)]
    lines = [{what: _line(getattr(state, FIELDS[what]), group) for what in held} for group in names]
    empty = [{what: line.get(what, line["fp32"]) for what in FIELDS} for line in lines]
    needs = [sum(state.params[name].numel() for name in group) for group in names]
    content = like.optim_12(empty, rank, DP, needs=needs, style="bf16")
    base = content["optimizer_state_dict"]["base_optimizer_state"]
    for number, (group, need) in enumerate(zip(names, needs, strict=True)):
        if not state.exp_avg:
            del base["state"][number]
        else:
            base["state"][number]["step"] = torch.tensor(_step(state, group, need, rank))
    base["param_groups"] = [
        facts.group_facts(state, decay, group) | {"params": [number]}
        for number, (decay, group) in enumerate(state.groups())
    ]
    return content


def _step(state: State, names: list[str], need: int, rank: int) -> float:
    """The one step of a rank's flat group: the smallest of the parameters that begin in its part."""
    part, at, found = -(-need // DP), 0, []
    for name in names:
        if rank * part <= at < (rank + 1) * part:
            found.append(state.step[name])
        at += state.params[name].numel()
    return min(found or [state.step[names[-1]]])


def _scheduler(state: State) -> dict[str, Any]:
    return {"last_batch_iteration": state.trainer.scheduler - 1}


def _config(state: State) -> dict[str, Any]:
    c = state.config
    params = {"lr": c.lr, "betas": list(c.betas), "eps": c.eps, "weight_decay": c.weight_decay}
    schedule = {"total_num_steps": c.total, "warmup_num_steps": c.warmup, "cos_min_ratio": c.min_lr / c.lr}
    return {
        "train_batch_size": c.batch,
        "gradient_clipping": c.clip,
        "bf16": {"enabled": c.precision != "fp32"},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW" if c.optimizer == "adamw" else "Adam", "params": params},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }
