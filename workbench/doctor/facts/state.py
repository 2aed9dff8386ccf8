"""Facts that a checkpoint states about its training beside the tensors, each with its source.

::

    step          240   'iteration' of 'mp_rank_00/model_optim_rng.pt'
    step          240   the folder's name
    lr            2.7e-3  'optimizer.param_groups[0].lr'
    groups        (decay 0.1: 15 parameters), (decay 0.0: 5)
    schedule      num_steps 1920 in samples, warm-up 320, total 3840, cosine 4e-3 → 4e-4

If several places state a fact, all statements are kept, most trusted first; a contradiction is a sign (S07, N6, N9,
C9). A fact that nothing states is ``None``, never a default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.doctor.facts.generators import Generator
from workbench.doctor.facts.numbers import number
from workbench.doctor.facts.optimizer import Optimizer, claimed

GIVEN = "given"  #: source of a fact that the user passed
#: Part of a trainer's state → words in its path.
PARTS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("sched",),
    "loss scale": ("scaler", "loss_scale"),
    "data loader": ("loader", "sampler"),
    "average": ("ema", "average", "swa"),
}
NAME = "the name"  #: source of a step that only the folder's name states


@dataclass(frozen=True)
class Statement:
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
        params: names of its parameters (pseudo-names of numbered ones); ``None`` if unknown.
        count: stored number of its parameters; ``None`` if unknown.
        step: the counter, of optimizers that keep one per group.
        decoupled: AdamW (``True``) or Adam with L2 in the gradient (``False``).
        source: object that states it.
        settings: every field as stored, except its parameters; an integer that no float holds is ``None``.
        weights: weights that belong to it because only its numbered state has their shape.
        optimizer: the optimizer that it belongs to.
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
        kind: its framework: ``torch``, ``megatron``, ``deepspeed`` or ``paddle``.
        count: updates (or samples) that it has counted.
        in_samples: whether it counts samples (Megatron); ``None`` if unknown.
        lrs: its current learning rates, one per group.
        base_lrs: the learning rates that it scales.
        warmup, total: lengths in its units. style: shape of the decay.
        weight_decay: start and end, of a schedule that changes it (Megatron).
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

    @property
    def by_metric(self) -> bool:
        """Whether it waits for a metric to improve (torch's ReduceLROnPlateau): it counts evaluations, not updates."""
        return "num_bad_epochs" in self.settings


@dataclass(frozen=True)
class Steps:
    """The optimizer's own counters.

    Attributes:
        by_name: step of each parameter, numbered ones under their pseudo-names.
        counts: step → number of counters at that step, named or not.
        by_file: file → step → number of its counters at that step.
        split: parameters whose replicas have different steps.
        unread: why counters were not read, if any were not.
        source: where they are stored, in words.
    """

    by_name: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[float, int] = field(default_factory=dict)
    by_file: Mapping[str, Mapping[float, int]] = field(default_factory=dict)
    split: tuple[str, ...] = ()
    unread: str = ""
    source: str = ""

    @property
    def usual(self) -> float | None:
        """The most common counter; in a tie, the later step."""
        return max(self.counts, key=lambda step: (self.counts[step], step)) if self.counts else None


@dataclass(frozen=True, eq=False)
class TrainingState:
    """All stated facts about the training.

    Attributes:
        groups: param groups, in the optimizer's order; equal groups of several ranks only once.
        schedule: state of the learning-rate schedule.
        steps: the optimizer's counters.
        args: the trainer's arguments, flat: name → statement.
        model: the model's config, flat.
        generators: rank or object → its generators' states.
        optimizer: the optimizer that wrote the state; for several, the laws that hold for all.
        states: name → names of its optimizer state: ``exp_avg``, ``state1`` …
        counts: path → integer that the trainer, a schedule or a param group keeps.
        parts: parts of a trainer's state that are stored: those of :data:`PARTS`.
    """

    #: Fact → statements, most trusted first; names in :data:`workbench.doctor.facts.gather.FACTS`.
    statements: Mapping[str, tuple[Statement, ...]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    schedule: Schedule | None = None
    steps: Steps = field(default_factory=Steps)
    args: Mapping[str, Statement] = field(default_factory=dict)
    model: Mapping[str, Statement] = field(default_factory=dict)
    generators: Mapping[str, Generator] = field(default_factory=dict)
    optimizer: Optimizer = field(default_factory=Optimizer)
    states: Mapping[str, frozenset[str]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()

    def value(self, fact: str) -> Any:
        """Return the value of the most trusted statement, or ``None``."""
        statements = self.statements.get(fact)
        return statements[0].value if statements else None

    def source(self, fact: str) -> str:
        """Return the source of the most trusted statement; empty if nothing states it."""
        statements = self.statements.get(fact)
        return statements[0].source if statements else ""

    @property
    def step(self) -> int | None:
        """Updates done, as the trainer counts."""
        found = self.value("step")
        return found if found is None else int(found)

    @property
    def betas(self) -> tuple[float, float] | None:
        """β1 and β2, if all groups agree (or they were given)."""
        return self.value("betas")

    @property
    def eps(self) -> float | None:
        return self.value("eps")

    @property
    def lr(self) -> float | None:
        """Learning rate stored in the optimizer; in most frameworks, that of the next update."""
        return self.value("lr")

    @property
    def decoupled(self) -> bool | None:
        """AdamW (``True``) or Adam with L2 (``False``)."""
        return self.value("decoupled")

    @property
    def amsgrad(self) -> bool | None:
        return self.value("amsgrad")

    def weight_decay(self, fqn: str | None = None) -> float | None:
        """Return the weight decay of a parameter; without a name, the one stated for all that decay."""
        if fqn is None:
            return self.value("weight_decay")
        group = self.group_of(fqn)
        if self.source("weight_decay") == GIVEN and (group is None or group.weight_decay != 0.0):
            return self.value("weight_decay")
        return None if group is None else group.weight_decay

    def group_of(self, fqn: str) -> Group | None:
        """Return the group of a parameter, if known."""
        found = self._by_param.get(fqn)
        return None if found is None else self.groups[found]

    def optimizer_of(self, fqn: str) -> Optimizer:
        """Return the optimizer of a parameter: its group's, or the common one if its group is unknown."""
        group = self.group_of(fqn)
        return self.optimizer if group is None else group.optimizer

    def beside(self, other: TrainingState) -> list[tuple[Group, Group]]:
        """Return the param groups of both that belong together: if an optimizer of one has more, the first ones.

        A group that is added comes last, with settings of its own.
        """
        sides: list[dict[tuple[str, int], Group]] = []
        for state in (self, other):
            seen: Counter[str] = Counter()
            sides.append({})
            for group in state.groups:
                path = group.source.partition("[")[0]
                sides[-1][path, seen[path]] = group
                seen[path] += 1
        if len(self.groups) == len(other.groups):
            return list(zip(self.groups, other.groups, strict=True))
        return [(one, sides[1][place]) for place, one in sides[0].items() if place in sides[1]]

    @property
    def counters(self) -> Mapping[str, tuple[float, str]]:
        """Known counters → (count, source), each in its own units.

        Keys are ``trainer``, ``optimizer``, ``schedule``, ``folder`` and ``tracker``.
        """
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
    def scheduled(self) -> float | None:
        """The counter of the optimizer whose learning rates the schedule sets, if that is one of several optimizers."""
        held: dict[str, list[Group]] = {}
        for group in self.groups:
            held.setdefault(group.source.partition(".param_groups")[0], []).append(group)
        rates = self.schedule.lrs if self.schedule is not None else ()
        own = [groups for groups in held.values() if tuple(one.lr for one in groups) == rates]
        if len(held) < 2 or len(own) != 1:
            return None
        counts = {self.steps.by_name.get(name) for group in own[0] for name in group.params or ()}
        return counts.pop() if len(counts) == 1 else None

    @property
    def cycled(self) -> bool:
        """Whether a schedule changes β1 at every update (``OneCycleLR``, ``CyclicLR``)."""
        settings = self.schedule.settings if self.schedule is not None else {}
        stated = settings.get("cycle_momentum") is True and settings.get("use_beta1") is not False
        return stated or bool(self.beta_ends)

    @property
    def beta_ends(self) -> tuple[float, ...]:
        """Least and greatest β1 of a schedule that changes it, if the groups state them."""
        ends = {group.settings.get(end) for group in self.groups for end in ("base_momentum", "max_momentum")}
        numbers = {number(one) for one in ends} - {None}
        return tuple(sorted(one for one in numbers if one is not None and 0 <= one < 1))

    def renamed(self, names: Mapping[str, str]) -> TrainingState:
        """Return a copy with parameters under other names."""
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
        """Return a copy with facts that the user passed, which are trusted most."""
        passed: dict[str, Any] = {
            "betas": None if betas is None else tuple(betas),
            "lr": lr,
            "weight_decay": weight_decay,
        }
        statements = dict(self.statements)
        for fact, value in passed.items():
            if value is not None:
                statements[fact] = (Statement(value, GIVEN), *statements.get(fact, ()))
        if betas is None:
            return replace(self, statements=statements)
        groups = tuple(replace(group, optimizer=claimed(group.optimizer)) for group in self.groups)
        return replace(self, statements=statements, groups=groups, optimizer=claimed(self.optimizer))

    @cached_property
    def _by_param(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for at, group in enumerate(self.groups):
            for name in (*(group.params or ()), *group.weights):
                found.setdefault(name, at)
        return found
