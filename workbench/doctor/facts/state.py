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

from workbench.doctor.facts.numbers import number
from workbench.doctor.facts.optimizer import Optimizer, claimed

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
        params: names of its parameters (pseudo-names of numbered ones); ``None`` where nothing tells them.
        count: parameters in it, as stored; ``None`` where not even that is.
        step: of optimizers that keep one counter a group.
        decoupled: AdamW (``True``) or Adam with L2 in the gradient (``False``).
        source: object that states it.
        settings: every field as stored, but for its parameters; an integer that no float holds is ``None``.
        weights: weights that are in it because only its numbered state has their shape.
        optimizer: whose group it is.
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
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    weights: tuple[str, ...] = ()
    optimizer: Optimizer = field(default_factory=Optimizer)


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
        settings: every field as stored.
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
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Steps:
    """What the optimizer's own counters say.

    Attributes:
        by_name: step of each parameter, numbered ones under their pseudo-names.
        counts: step → how many counters say so, named or not.
        by_file: file → step → how many of its counters say so.
        split: parameters whose copies say different steps.
        unread: why counters were not read, if any were not.
        source: where they stand, in words.
    """

    by_name: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[float, int] = field(default_factory=dict)
    by_file: Mapping[str, Mapping[float, int]] = field(default_factory=dict)
    split: tuple[str, ...] = ()
    unread: str = ""
    source: str = ""

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
        optimizer: who wrote the optimizer's state; of several what holds for all.
        states: name → what its optimizer state is called: ``exp_avg``, ``state1`` …
    """

    told: Mapping[str, tuple[Told, ...]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    schedule: Schedule | None = None
    steps: Steps = field(default_factory=Steps)
    args: Mapping[str, Told] = field(default_factory=dict)
    model: Mapping[str, Told] = field(default_factory=dict)
    generators: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    optimizer: Optimizer = field(default_factory=Optimizer)
    states: Mapping[str, frozenset[str]] = field(default_factory=dict)

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

    def optimizer_of(self, fqn: str) -> Optimizer:
        """The optimizer of a parameter: its group's, or what holds for all groups where its own is not known."""
        group = self.group_of(fqn)
        return self.optimizer if group is None else group.optimizer

    @property
    def counters(self) -> Mapping[str, tuple[float, str]]:
        """Who counts → count, where it stands; in units of their own. Of ``trainer``, ``optimizer``, ``schedule``,
        ``folder`` and ``tracker`` those that are known."""
        found: dict[str, tuple[float, str]] = {}
        for name, fact in (("trainer", "step"), ("folder", "folder_step"), ("tracker", "tracker_step")):
            if (value := self.value(fact)) is not None:
                found[name] = value, self.source(fact)
        if (usual := self.steps.usual) is not None:
            found["optimizer"] = usual, self.steps.source
        if self.schedule is not None and self.schedule.count is not None:
            found["schedule"] = self.schedule.count, self.schedule.source
        return found

    @property
    def cycled(self) -> bool:
        """Whether a schedule moves β1 at every update (``OneCycleLR``, ``CyclicLR``)."""
        settings = self.schedule.settings if self.schedule is not None else {}
        told = settings.get("cycle_momentum") is True and settings.get("use_beta1") is not False
        return told or bool(self.beta_ends)

    @property
    def beta_ends(self) -> tuple[float, ...]:
        """Least and greatest β1 between which a schedule moves it, where the groups say so."""
        told = {group.settings.get(end) for group in self.groups for end in ("base_momentum", "max_momentum")}
        numbers = {number(one) for one in told} - {None}
        return tuple(sorted(one for one in numbers if one is not None and 0 <= one < 1))

    def renamed(self, names: Mapping[str, str]) -> TrainingState:
        """The same with parameters under other names."""
        if not names:
            return self
        groups = [
            group if group.params is None else replace(group, params=tuple(names.get(p, p) for p in group.params))
            for group in self.groups
        ]
        by_name = {names.get(name, name): step for name, step in self.steps.by_name.items()}
        steps = replace(self.steps, by_name=by_name, split=tuple(names.get(one, one) for one in self.steps.split))
        states = {names.get(name, name): words for name, words in self.states.items()}
        return replace(self, groups=tuple(groups), steps=steps, states=states)

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
        if betas is None:
            return replace(self, told=told)
        groups = tuple(replace(group, optimizer=claimed(group.optimizer)) for group in self.groups)
        return replace(self, told=told, groups=groups, optimizer=claimed(self.optimizer))

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
        for at, group in enumerate(self.groups):
            for name in (*(group.params or ()), *group.weights):
                found.setdefault(name, at)
        return found
