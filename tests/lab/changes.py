"""Building blocks of faults: which tensors a loader hits, and what it makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from tests.lab.config import Config
from tests.lab.fault import Lab
from tests.lab.model import initial, is_norm
from tests.lab.state import Named, State

__all__ = [
    "ALIKE",
    "ARGUED",
    "BARE",
    "EXTRA",
    "FLAT",
    "MOMENTS",
    "WEIGHTS",
    "Restore",
    "anything",
    "both",
    "ends",
    "fields",
    "layered",
    "mapped",
    "matrices",
    "moved",
    "of_layers",
    "reborn",
    "set_weights",
    "steps",
    "told",
    "vectors",
    "with_",
]

Restore = Callable[[State, Lab], State]
Pick = Callable[[str], bool]

WEIGHTS = ("params", "masters")
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIKE = (*WEIGHTS, *MOMENTS)  #: what a layout error hits

#: Layouts without Megatron's and DeepSpeed's own: tensors by name, param groups of torch.
FLAT = ("torch_save", "dcp", "dcp_sharded", "torch_masters", "folder", "lightning", "accelerate")
#: Layouts that can hold averages, adapters, fp8 buffers.
EXTRA = ("torch_save", "dcp", "folder", "lightning", "accelerate")
#: Layouts that store the arguments, and the data loader's state.
ARGUED = ("torch_save", "dcp", "dcp_sharded", "torch_masters", "deepspeed")
#: Layouts whose optimizer numbers its parameters.
BARE = ("torch_save", "folder", "lightning", "accelerate")


def anything(name: str) -> bool:
    return True


def matrices(name: str) -> bool:
    return not is_norm(name)


def vectors(name: str) -> bool:
    return is_norm(name)


def ends(*words: str) -> Pick:
    """Names that end in one of these words and ``.weight``."""
    return lambda name: name.endswith(tuple(f"{word}.weight" for word in words))


def of_layers(*numbers: int) -> Pick:
    return lambda name: any(f".layers.{number}." in name for number in numbers)


def fields(state: State, names: Sequence[str]) -> list[Named]:
    return [found for found in (getattr(state, name) for name in names) if found]


def mapped(how: Callable[[torch.Tensor], torch.Tensor], pick: Pick = anything, where: Sequence[str] = ALIKE) -> Restore:
    """Every tensor that is picked becomes what ``how`` makes of it."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, where):
            for name in filter(pick, found):
                found[name] = how(found[name]).to(found[name].dtype).contiguous()
        return state

    return restore


def moved(source: Callable[[str, Config], str], pick: Pick = anything, where: Sequence[str] = ALIKE) -> Restore:
    """Every tensor that is picked becomes another one: ``source(its name, config)``, where there is one."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, where):
            old = dict(found)
            found |= {name: old.get(source(name, state.config), old[name]).clone() for name in filter(pick, old)}
        return state

    return restore


def layered(order: Callable[[int, int], int]) -> Callable[[str, Config], str]:
    """For `moved`: the same name in layer ``order(number, layers)``."""
    return lambda name, config: re.sub(
        r"\.layers\.(\d+)\.", lambda found: f".layers.{order(int(found[1]), config.layers)}.", name
    )


def reborn(pick: Pick, seed: int = 77) -> Restore:
    """Weights left at the random initial values of a fresh process."""

    def restore(state: State, lab: Lab) -> State:
        return set_weights(state, {name: w for name, w in initial(state.config, seed).items() if pick(name)})

    return restore


def set_weights(state: State, weights: Named) -> State:
    """Weights, and masters where there are any."""
    for name, weight in weights.items():
        state.params[name] = weight.to(state.params[name].dtype)
        if name in state.masters:
            state.masters[name] = weight.float()
    return state


def steps(change: Callable[[float], float], pick: Pick = anything) -> Restore:
    """Counters of the optimizer."""

    def restore(state: State, lab: Lab) -> State:
        state.step |= {name: change(step) for name, step in state.step.items() if pick(name)}
        return state

    return restore


def told(change: Callable[[State], dict[str, object]]) -> Restore:
    """Counters and habits of the trainer."""
    return lambda state, lab: state.told(**change(state))


def both(*parts: Restore) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        for part in parts:
            state = part(state, lab)
        return state

    return restore


def with_(**needs: object) -> Callable[[Config], Config]:
    """Runs that are like that."""
    return lambda config: config.but(**needs)
