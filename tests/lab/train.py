"""Training steps with torch's own optimizers, on one thread and seeded: the same state goes the same way every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tests.lab.data import batch
from tests.lab.facts import GROWTH
from tests.lab.model import E4M3_MAX, is_norm, loss_and_load
from tests.lab.state import Named, State

__all__ = ["SILENT", "step_optimizer", "train"]

EMA_DECAY = 0.99
BIAS_RATE = 1e-3  #: of the experts' balance, as in DeepSeek-V3
#: What a trainer may do and say nothing of: factors of the learning rate and of the gradient; decay of the vectors;
#: how far an update moves the schedule, the data and what the loader says of itself; decay of the average.
SILENT = {"lr": 1.0, "gradient": 1.0, "vector_decay": 0.0, "schedule": 1, "data": 1, "loader": 1, "ema": EMA_DECAY}


def train(state: State, steps: int, *, micro: int = 1) -> tuple[State, list[float], list[float]]:
    """Advance a copy of ``state``; returns it with the losses and the learning rates of its updates.

    Args:
        micro: parts that the batch is cut into, last one first; another number changes the order of summation and
            nothing else.
    """
    state = state.clone()
    losses, rates = [], []
    with _one_thread():
        optimizer, updated = step_optimizer(state)
        for _ in range(steps):
            rates.append(state.lr)
            losses.append(_step(state, optimizer, updated, micro))
        _take_back(state, optimizer, updated)
    return state, losses, rates


def step_optimizer(state: State) -> tuple[torch.optim.Optimizer, Named]:
    """torch's optimizer over the tensors that it updates, with the state's moments put in."""
    config = state.config
    updated = {name: tensor.clone() for name, tensor in state.updated.items()}
    groups = [{"params": [updated[name] for name in names], "weight_decay": decay} for decay, names in state.groups()]
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    optimizer = kind(
        groups, lr=state.lr, betas=config.betas, eps=config.eps, foreach=False, maximize=state.trainer.maximize
    )
    for name in state.exp_avg:
        optimizer.state[updated[name]] = {
            "step": torch.tensor(state.step[name]),
            "exp_avg": state.exp_avg[name].clone(),
            "exp_avg_sq": state.exp_avg_sq[name].clone(),
        }
    return optimizer, updated


def _step(state: State, optimizer: torch.optim.Optimizer, updated: Named, micro: int) -> float:
    config, trainer = state.config, state.trainer
    quiet = SILENT | dict(trainer.silent)
    names = [name for name in state.trained() if not any(part in name for part in trainer.frozen)]
    weights = {name: tensor.float() for name, tensor in state.params.items()}
    for name in names:
        weights[name] = weights[name].detach().requires_grad_(True)
    tokens = batch(config, trainer.data_index, trainer.data_seed)
    total, load = 0.0, {}
    for part in tokens.chunk(micro)[::-1]:
        loss, counted = loss_and_load(config, weights, state.buffers, part)
        (loss * (len(part) / len(tokens))).backward()
        total += float(loss.detach()) * len(part) / len(tokens)
        load = {name: load.get(name, 0) + count for name, count in counted.items()}
    if config.clip:
        torch.nn.utils.clip_grad_norm_([weights[name] for name in names], config.clip)
    for name in names:
        gradient = weights[name].grad
        assert gradient is not None
        updated[name].grad = gradient.to(updated[name].dtype) * quiet["gradient"]
    for group, (decay, members) in zip(optimizer.param_groups, state.groups(), strict=True):
        group["lr"] = state.rate(members) * quiet["lr"]
        group["weight_decay"] = quiet["vector_decay"] or decay if is_norm(members[0]) else decay
    optimizer.step()
    for name in names:
        state.params[name] = updated[name].detach().to(state.params[name].dtype)
    _balance(state, load)
    _observe(state)
    for name, average in state.ema.items():
        average.lerp_(updated[name].detach().float(), 1 - quiet["ema"])
    state.trainer = replace(
        trainer,
        step=trainer.step + 1,
        scheduler=trainer.scheduler + int(quiet["schedule"]),
        data_index=trainer.data_index + int(quiet["data"]),
        samples=trainer.samples + config.batch,
        loader=trainer.loader + int(quiet["loader"]),
        growth=(trainer.growth + 1) % GROWTH,
        scale=min(2.0**30, trainer.scale * (2 if trainer.growth + 1 == GROWTH else 1)),
    )
    return total


def _take_back(state: State, optimizer: torch.optim.Optimizer, updated: Named) -> None:
    if state.masters:
        state.masters = {name: tensor.detach().clone() for name, tensor in updated.items()}
    for name in state.trained():
        held = optimizer.state[updated[name]]
        if held:
            state.exp_avg[name], state.exp_avg_sq[name] = held["exp_avg"], held["exp_avg_sq"]
            state.step[name] = float(held["step"])


def _balance(state: State, load: Named) -> None:
    """Raise the bias of experts with few tokens."""
    for name, count in load.items():
        state.buffers[name] = state.buffers[name] + BIAS_RATE * torch.sign(count.mean() - count)


def _observe(state: State) -> None:
    """Delayed scaling: the newest amax enters the history, the scale is set by the largest in it."""
    for name in [n for n in state.buffers if n.endswith(".amax_history")]:
        weight = name.replace(".amax_history", ".weight")
        amax = state.params[weight].float().abs().max().reshape(1)
        state.buffers[name] = torch.cat([amax, state.buffers[name][:-1]])
        state.buffers[weight + "_scale"] = E4M3_MAX / state.buffers[name].max().reshape(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
