"""What the doctor looks at: up to three checkpoints, each by parameter and role, and laid side by side.

::

    before ──load──▶ echo ──k updates──▶ after             a State each: ckpt, facts, fqn → role → position
       │               │                   │
       └── pair("before", "echo") ─────────┘               the first under the names and shapes of the second
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from workbench.checkpoint import Checkpoint
from workbench.doctor.facts.state import TrainingState
from workbench.namemap import name_map

__all__ = ["Evidence", "Pair", "State"]


@dataclass(frozen=True, eq=False)
class State:
    """One checkpoint with the facts beside its tensors."""

    ckpt: Checkpoint
    facts: TrainingState

    @cached_property
    def params(self) -> Mapping[str, Mapping[str, int]]:
        """fqn → role → position in the catalog; the first, where a role is stored twice."""
        found: dict[str, dict[str, int]] = {}
        for position, (fqn, role) in enumerate(zip(self.ckpt.fqns, self.ckpt.roles, strict=True)):
            if fqn is not None:
                found.setdefault(fqn, {}).setdefault(role, position)
        return found

    @cached_property
    def unnamed(self) -> Mapping[str, int]:
        """How many tensors of each role belong to no named parameter."""
        found: dict[str, int] = {}
        for fqn, role in zip(self.ckpt.fqns, self.ckpt.roles, strict=True):
            if fqn is None:
                found[role] = found.get(role, 0) + 1
        return found

    def shape(self, position: int) -> tuple[int, ...]:
        return tuple(self.ckpt.catalog.shape_of(position))

    def dtype(self, position: int) -> str:
        """Name of the element type: ``bfloat16``."""
        return self.ckpt.catalog.dtype_of(position).name


@dataclass(frozen=True, eq=False)
class Pair:
    """Two states, the first under the names, shapes and cuts of the second.

    Attributes:
        a, b: the states; ``a`` may be a lazy rearrangement of what is stored.
        mapped: whether the names or fusions differed, so that ``a`` was rearranged.
        only_a, only_b: stored keys that have no partner, with a reason where there is one.
        origin: ``a`` as it is stored.
    """

    a: State
    b: State
    mapped: bool = False
    only_a: Mapping[str, str] = field(default_factory=dict)
    only_b: Mapping[str, str] = field(default_factory=dict)
    origin: State | None = None

    @property
    def stored(self) -> State:
        """``a`` under its own names."""
        return self.origin or self.a

    def shared(self) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """``(fqn, role → positions in a and b)`` of what both hold in one shape, in the order of ``b``."""
        for fqn, theirs in self.b.params.items():
            mine = self.a.params.get(fqn, {})
            both = {
                role: (mine[role], there)
                for role, there in theirs.items()
                if role in mine and self.a.shape(mine[role]) == self.b.shape(there)
            }
            if both:
                yield fqn, both


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that was given: ``before`` alone, with its echo, with a later checkpoint, or with both."""

    before: State
    after: State | None = None
    echo: State | None = None

    def state(self, which: str) -> State:
        """``before``, ``after`` or ``echo``.

        Raises:
            KeyError: it was not given.
        """
        found = {"before": self.before, "after": self.after, "echo": self.echo}[which]
        if found is None:
            raise KeyError(which)
        return found

    def pair(self, first: str, second: str) -> Pair:
        """Two of them side by side; made once."""
        made = self._pairs
        if (first, second) not in made:
            made[first, second] = align(self.state(first), self.state(second))
        return made[first, second]

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], Pair]:
        return {}


def align(a: State, b: State) -> Pair:
    """Put ``a`` under the names of ``b``: by name where the names agree, by the frameworks' conventions elsewhere.

    Within one format half of the names are enough: what is missing then is missing. Between two formats all shapes have
    to agree as well, for a vocabulary may be padded in one of them alone.
    """
    mine, theirs = _meant(a), _meant(b)
    shared = mine.keys() & theirs.keys()
    many = bool(shared) and 2 * len(shared) >= min(len(mine), len(theirs))
    if mine == theirs or (many and (a.ckpt.format == b.ckpt.format or all(mine[n] == theirs[n] for n in shared))):
        return Pair(a, b, False, _alone(a, b), _alone(b, a))
    found = name_map(a.ckpt, b.ckpt)
    return Pair(State(found.apply(), a.facts), b, True, found.only_a, found.only_b, a)


def _meant(state: State) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(fqn, role): state.shape(at) for fqn, roles in state.params.items() for role, at in roles.items()}


def _alone(a: State, b: State) -> dict[str, str]:
    keys = a.ckpt.catalog.keys
    there = b.params
    return {
        keys[at]: "" for fqn, roles in a.params.items() for role, at in roles.items() if role not in there.get(fqn, {})
    }
