"""Everything that a trainer holds between two steps, by parameter name: what a checkpoint should bring back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.lab.config import Config
from tests.lab.model import initial, initial_buffers, is_norm

__all__ = ["STATES", "State", "Trainer", "fresh"]

Named = dict[str, torch.Tensor]
#: Tensors by the role that a reader gives them, and by the field here.
STATES = {"param": "params", "master": "masters", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "ema": "ema"}


@dataclass(frozen=True)
class Trainer:
    """Counters beside the tensors.

    Attributes:
        step: updates done. scheduler: updates that the schedule counts; they differ where it was not restored.
        data_index, data_seed: the next batch, and the order of the data.
        samples: rows of batches consumed, as the trainer logs them.
        loader: batches that the data loader's own state says it has given.
        swapped: weight decay goes to the norms and not to the matrices.
        held_lr: the optimizer's lr where no schedule reaches it any more; vector_lr: that of the vectors' group alone.
        vector_decay, maximize: of the vectors' param group, and of all of them.
        frozen: parts of names whose parameters get no gradient.
        scale, growth: the dynamic loss scale, and updates since it last doubled.
        shared_random: every rank has rank 0's random state.
        silent: what the trainer does and no file says: `train.SILENT`.
    """

    step: int = 0
    scheduler: int = 0
    data_index: int = 0
    data_seed: int = 1234
    samples: int = 0
    loader: int = 0
    swapped: bool = False
    held_lr: float | None = None
    vector_lr: float | None = None
    vector_decay: float = 0.0
    maximize: bool = False
    frozen: tuple[str, ...] = ()
    scale: float = 65536.0
    growth: int = 0
    shared_random: bool = False
    silent: tuple[tuple[str, float], ...] = ()


@dataclass
class State:
    """Weights, optimizer and counters.

    Attributes:
        params: as the model holds them; masters: fp32 copies, empty where the optimizer updates the params themselves.
        exp_avg, exp_avg_sq, step: of the parameters that are trained; empty where a loader made none.
        config: the arguments that the run is on, and that its checkpoints say.
    """

    config: Config
    params: Named
    masters: Named
    exp_avg: Named
    exp_avg_sq: Named
    step: dict[str, float]
    buffers: Named = field(default_factory=dict)
    ema: Named = field(default_factory=dict)
    trainer: Trainer = field(default_factory=Trainer)

    def clone(self) -> State:
        def copied(tensors: Named) -> Named:
            return {name: tensor.clone() for name, tensor in tensors.items()}

        fields = {where: copied(getattr(self, where)) for where in (*STATES.values(), "buffers")}
        return replace(self, step=dict(self.step), **fields)

    def told(self, **changes: Any) -> State:
        """The same with other counters."""
        return replace(self, trainer=replace(self.trainer, **changes))

    def declared(self, **changes: Any) -> State:
        """The same with other arguments."""
        return replace(self, config=self.config.but(**changes))

    @property
    def updated(self) -> Named:
        """What the optimizer updates: masters where there are any, else the params."""
        return self.masters or self.params

    @property
    def lr(self) -> float:
        """Of the next update, as optimizers store it after their scheduler's step."""
        held = self.trainer.held_lr
        return self.config.lr_at(self.trainer.scheduler + 1) if held is None else held

    def rate(self, names: list[str]) -> float:
        """Of the next update of a param group with these parameters."""
        own = self.trainer.vector_lr
        return self.lr if own is None or not is_norm(names[0]) else own

    def trained(self) -> list[str]:
        """Names that the optimizer holds, in the model's order."""
        names = list(self.params)
        return [name for name in names if "lora_" in name] if self.config.lora else names

    def groups(self) -> list[tuple[float, list[str]]]:
        """Param groups ``(weight decay, names)``: matrices decay, vectors do not."""
        matrices = [name for name in self.trained() if not is_norm(name)]
        vectors = [name for name in self.trained() if is_norm(name)]
        decays = (self.config.weight_decay, self.trainer.vector_decay)
        decays = decays[::-1] if self.trainer.swapped else decays
        return [(decay, names) for decay, names in zip(decays, (matrices, vectors), strict=True) if names]

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """``(role, name, tensor)`` of everything but steps and buffers."""
        for role, where in STATES.items():
            for name, tensor in getattr(self, where).items():
                yield role, name, tensor

    def round_weights(self) -> None:
        """Set the weights to their masters, as a loader that refreshes them does."""
        for name, master in self.masters.items():
            self.params[name] = master.to(self.params[name].dtype)


def fresh(config: Config) -> State:
    """The state before the first update."""
    weights = initial(config)
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    params = {name: w.to(dtype, copy=True) for name, w in weights.items()}
    state = State(config, params, {}, {}, {}, {}, initial_buffers(config))
    if config.precision == "mixed":
        state.masters = {name: weights[name] for name in state.trained()}
    for name in state.trained():
        state.exp_avg[name] = torch.zeros_like(state.updated[name])
        state.exp_avg_sq[name] = torch.zeros_like(state.updated[name])
        state.step[name] = 0.0
    if config.ema:
        state.ema = {name: w.clone() for name, w in weights.items()}
    return state
