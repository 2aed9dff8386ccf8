"""One ``torch.save`` file, as a plain training loop writes it; the optimizer numbers its parameters.

Masters are the optimizer's ``master_param``, as Transformer Engine's FusedAdam keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.lab import facts
from tests.lab.state import State

__all__ = ["content", "optimizer_state", "save"]


def save(folder: Path, state: State, second: State | None = None) -> Path:
    """Write ``checkpoint.pt``; one process wrote it, so that there is no second rank's."""
    assert second is None
    folder.mkdir(parents=True)
    torch.save(content(state), folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def content(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": {**state.params, **state.buffers},
        "optimizer": optimizer_state(state),
        "scheduler": facts.scheduler(state),
        "step": state.trainer.step,
        "consumed_samples": state.trainer.samples,
        "dataloader": facts.loader(state),
        "args": facts.arguments(state),
        "config": facts.model_config(state),
        "rng_state": facts.random_state(state),
    }
    if state.ema:
        found["ema"] = state.ema
    if state.config.scaler:
        found["scaler"] = facts.scaler(state)
    return facts.kept(state, found)


def optimizer_state(state: State) -> dict[str, Any]:
    """As ``Optimizer.state_dict()`` numbers it: group after group."""
    groups, held, number = [], {}, 0
    for decay, names in state.groups():
        numbers = {"params": list(range(number, number + len(names)))}
        named = {"param_names": names} if state.config.lora else {}  # peft's optimizers are given named parameters
        groups.append(facts.group_facts(state, decay, names) | numbers | named)
        for name in names:
            if name in state.step:
                held[number] = {
                    "step": torch.tensor(state.step[name]),
                    "exp_avg": state.exp_avg[name],
                    "exp_avg_sq": state.exp_avg_sq[name],
                }
            if name in state.masters:
                held.setdefault(number, {})["master_param"] = state.masters[name]
            number += 1
    return {"state": held, "param_groups": groups}
