"""What a checkpoint says of its training beside the tensors, each statement with where it stands.

::

    step          240   'iteration' of 'mp_rank_00/model_optim_rng.pt'
    step          240   the folder's name
    lr            2.7e-3  'optimizer.param_groups[0].lr'
    groups        (decay 0.1: 15 parameters), (decay 0.0: 5)
    schedule      num_steps 1920 in samples, warm-up 320, total 3840, cosine 4e-3 → 4e-4

Several places may state one fact: all of them are kept, most trusted first, and where they contradict one another that
is a sign (S07, N6, N9, C9). What nothing states is ``None``, never a default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

__all__ = ["GIVEN", "NAME", "Group", "Schedule", "Steps", "Told", "TrainingState"]

GIVEN = "given"  #: provenance of what the user said
NAME = "the name"  #: of a step that only the folder's name tells


@dataclass(frozen=True)
class Told:
    """One statement of a fact.

    Attributes:
        source: object (and path in it) that states it, or :data:`GIVEN`.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class Group:
    """A param group of the optimizer.

    Attributes:
        params: fqns of its parameters; ``None`` where only numbers are stored and nothing certain joins them.
        count: parameters in it, as stored; ``None`` where not even that is.
        step: of optimizers that keep one counter a group.
        decoupled: AdamW (``True``) or Adam with L2 in the gradient (``False``).
        source: object that states it.
    """

    params: tuple[str, ...] | None = None
    count: int | None = None
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    initial_lr: float | None = None
    step: float | None = None
    amsgrad: bool | None = None
    decoupled: bool | None = None
    source: str = ""


@dataclass(frozen=True)
class Schedule:
    """State of a learning-rate schedule, in the units that it counts in.

    Attributes:
        kind: whose: ``torch``, ``megatron``, ``deepspeed`` or ``paddle``.
        count: updates (or samples) that it has counted.
        in_samples: it counts samples (Megatron); ``None``: not known.
        lrs: learning rates that it says are current, a group each.
        base_lrs: those it scales.
        warmup, total: lengths in its units; style: of the decay.
        weight_decay: of a schedule that moves it (Megatron): start, end.
    """

    kind: str
    count: int | None = None
    in_samples: bool | None = None
    lrs: tuple[float, ...] = ()
    base_lrs: tuple[float, ...] = ()
    max_lr: float | None = None
    min_lr: float | None = None
    warmup: int | None = None
    total: int | None = None
    style: str | None = None
    weight_decay: tuple[float, float] | None = None
    source: str = ""


@dataclass(frozen=True)
class Steps:
    """What the optimizer's own counters say.

    Attributes:
        by_name: step of each parameter whose name is known.
        counts: step → how many counters say so, named or not.
        by_file: file → step → how many of its counters say so.
        split: parameters whose copies say different steps.
        unread: why counters were not read, if any were not.
    """

    by_name: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[float, int] = field(default_factory=dict)
    by_file: Mapping[str, Mapping[float, int]] = field(default_factory=dict)
    split: tuple[str, ...] = ()
    unread: str = ""

    @property
    def usual(self) -> float | None:
        """What most counters say; of equally many the later step."""
        return max(self.counts, key=lambda step: (self.counts[step], step)) if self.counts else None


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Everything that is stated about the training.

    Attributes:
        told: fact → statements, most trusted first; names in :data:`workbench.doctor.facts.gather.FACTS`.
        groups: param groups, in the optimizer's order; equal groups of several ranks once.
        schedule: state of the learning-rate schedule.
        steps: the optimizer's counters.
        args: the trainer's arguments, flat: name → statement.
        model: the model's config, flat.
        generators: rank or object → digest of its generators' states.
        unreadable: objects that cannot be decoded, with the reason.
    """

    told: Mapping[str, tuple[Told, ...]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    schedule: Schedule | None = None
    steps: Steps = field(default_factory=Steps)
    args: Mapping[str, Told] = field(default_factory=dict)
    model: Mapping[str, Told] = field(default_factory=dict)
    generators: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def value(self, fact: str) -> Any:
        """The most trusted statement's value, or ``None``."""
        told = self.told.get(fact)
        return told[0].value if told else None

    def source(self, fact: str) -> str:
        """Where the most trusted statement stands; empty if nothing states it."""
        told = self.told.get(fact)
        return told[0].source if told else ""

    @property
    def step(self) -> int | None:
        """Updates done, as the trainer counts."""
        found = self.value("step")
        return found if found is None else int(found)

    @property
    def betas(self) -> tuple[float, float] | None:
        """β1 and β2, where all groups agree (or they were given)."""
        return self.value("betas")

    @property
    def eps(self) -> float | None:
        return self.value("eps")

    @property
    def lr(self) -> float | None:
        """Learning rate stored in the optimizer: in most frameworks that of the next update."""
        return self.value("lr")

    @property
    def decoupled(self) -> bool | None:
        """AdamW (``True``) or Adam with L2 (``False``)."""
        return self.value("decoupled")

    @property
    def amsgrad(self) -> bool | None:
        return self.value("amsgrad")

    def weight_decay(self, fqn: str | None = None) -> float | None:
        """Weight decay of a parameter; without a name the one that is stated for all that decay."""
        if fqn is None:
            return self.value("weight_decay")
        group = self.group_of(fqn)
        if self.source("weight_decay") == GIVEN and (group is None or group.weight_decay != 0.0):
            return self.value("weight_decay")
        return None if group is None else group.weight_decay

    def group_of(self, fqn: str) -> Group | None:
        """The group that a parameter is in, where that is known."""
        found = self._by_param.get(fqn)
        return None if found is None else self.groups[found]

    def given(
        self, *, betas: Sequence[float] | None = None, lr: float | None = None, weight_decay: float | None = None
    ) -> TrainingState:
        """The same with what the user said, which is trusted most."""
        said: dict[str, Any] = {
            "betas": None if betas is None else tuple(betas),
            "lr": lr,
            "weight_decay": weight_decay,
        }
        told = dict(self.told)
        for fact, value in said.items():
            if value is not None:
                told[fact] = (Told(value, GIVEN), *told.get(fact, ()))
        return replace(self, told=told)

    def disagreeing(self, fact: str, tolerance: float = 0.0) -> tuple[Told, ...]:
        """The statements of a fact, if they are not all the same up to ``tolerance``; else none."""
        told = self.told.get(fact, ())
        values = [one.value for one in told]
        if not values or all(type(v) not in (int, float) for v in values):
            return told if len(Counter(map(repr, values))) > 1 else ()
        return told if max(values) - min(values) > tolerance else ()

    @cached_property
    def _by_param(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            for name in group.params or ():
                found.setdefault(name, number)
        return found
