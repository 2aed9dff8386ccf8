"""What a state's optimizer is beside Adam, and what its schedule moves: where Adam's laws do not hold.

::

    param_groups[0].momentum_decay   state.0.mu_product      NAdam: looks ahead, beyond Adam's reach
                                     state.0.exp_inf         Adamax: divides by a maximum
    param_groups[0].base_momentum, max_momentum              OneCycleLR, CyclicLR: β1 is another one at every update
    scheduler.cycle_momentum, use_beta1                      the same, of groups that do not say so

torch 2.13: ``torch/optim/nadam.py``, ``adamax.py``, ``lr_scheduler.py`` (``OneCycleLR``, ``CyclicLR``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

from workbench.core.lazymap import LazyMap
from workbench.doctor.evidence import State
from workbench.doctor.facts.flat import leaves

__all__ = ["Kind", "kind_of"]

ENDS = ("base_momentum", "max_momentum")  #: of β1, in a param group
WORDS = ("momentum_decay", "cycle_momentum", "use_beta1", *ENDS)
ROLES = {"mu_product": "NAdam", "exp_inf": "Adamax"}  #: states that Adam has not


@dataclass(frozen=True)
class Kind:
    """Of one state.

    Attributes:
        other: name of an optimizer that is like Adam and is not; empty where none is known.
        cycled: a schedule moves β1. ends: least and greatest β1 that it says, where it does.
    """

    other: str = ""
    cycled: bool = False
    ends: tuple[float, ...] = ()


def kind_of(state: State) -> Kind:
    """What the roles, the param groups and the schedule tell."""
    found = _words(state)
    roles = set(state.ckpt.roles)
    other = next((name for role, name in ROLES.items() if role in roles), "")
    ends = tuple(sorted({float(one) for word in ENDS for one in found[word] if _beta(one)}))
    cycled = True in found["cycle_momentum"] and False not in found["use_beta1"]
    return Kind(other or ("NAdam" if found["momentum_decay"] else ""), cycled or bool(ends), ends)


def _words(state: State) -> Mapping[str, set[object]]:
    """The words' values in all objects; of a group's fields that are objects each only the wanted ones are decoded."""
    objects = state.ckpt.objects
    single = {name: "param_groups." in name for name in objects}
    wanted = [name for name, one in single.items() if not one or name.rpartition(".")[2] in WORDS]
    found: dict[str, set[object]] = {word: set() for word in WORDS}
    for leaf in leaves(LazyMap({name: partial(objects.__getitem__, name) for name in wanted}))[0]:
        if leaf.name in found and not isinstance(leaf.value, tuple):
            found[leaf.name].add(leaf.value)
    return found


def _beta(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
