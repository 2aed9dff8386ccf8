"""What the doctor looks at: up to three checkpoints, each by parameter and role, and laid side by side.

::

    before ──load──▶ echo ──k updates──▶ after             a State each: ckpt, facts, fqn → role → position
       │               │                   │
       └── pair("before", "echo") ─────────┘               the first under the names and shapes of the second

Optimizer state that is only numbered has pseudo-names, ``optimizer state 3``, and is compared by its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from workbench.checkpoint import Checkpoint
from workbench.doctor.facts.groups import Names, is_numbered, number_of
from workbench.doctor.facts.state import TrainingState
from workbench.namemap import name_map
from workbench.tensor import LazyTensor

__all__ = ["Evidence", "Pair", "State", "is_numbered", "stripped"]

SAME = 0.9  #: share of the names that have to agree without their wrappers
_MOVING = {"exp_avg", "exp_avg_sq", "momentum"}  #: roles of optimizer state that an update is made from
_WHOLE = {"param", "master"}
_WRAPPED = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module)\.")
_PREFIX = re.compile(r"(?:model|base_model|net|network|state_dict|params)\.")


@dataclass(frozen=True, eq=False)
class State:
    """One checkpoint with the facts beside its tensors."""

    ckpt: Checkpoint
    facts: TrainingState

    @cached_property
    def params(self) -> Mapping[str, Mapping[str, int]]:
        """fqn → role → position in the catalog; the first, where a role is stored twice.

        Numbered optimizer state is under pseudo-names, masters under their parameters' names. State that has no role of
        its own is under the name that its optimizer gives it: ``state1``, ``exp_avg.codes``.
        """
        found: dict[str, dict[str, int]] = {}
        for position, (fqn, role) in enumerate(zip(self.names.fqns, self.names.roles, strict=True)):
            if fqn is not None:
                found.setdefault(fqn, {}).setdefault(role, position)
        return found

    @cached_property
    def names(self) -> Names:
        """What each tensor belongs to, numbered state and masters included."""
        return Names(self.ckpt)

    @cached_property
    def numbered(self) -> Mapping[str, int]:
        """Pseudo-name → number, of the optimizer's state that nothing joins to a parameter."""
        found = {fqn: number_of(fqn) for fqn in self.params if is_numbered(fqn)}
        return {fqn: number for fqn, number in found.items() if number is not None}

    @cached_property
    def unnamed(self) -> Mapping[str, int]:
        """How many tensors of each role belong to no parameter, named or numbered."""
        found: dict[str, int] = {}
        for fqn, role in zip(self.names.fqns, self.names.roles, strict=True):
            if fqn is None:
                found[role] = found.get(role, 0) + 1
        return found

    @cached_property
    def tied(self) -> frozenset[frozenset[str]]:
        """Groups of parameters that are one stored tensor: the same bytes of the same file in the same shape.

        ``torch.save`` keeps what shares storage once. DCP writes each name's own bytes: there nothing is known.
        """
        catalog = self.ckpt.catalog
        columns = [
            c for c in (catalog.file, catalog.start, catalog.stop, catalog.inner, catalog.strides) if c is not None
        ]
        found: dict[tuple[object, ...], set[str]] = {}
        for position, (fqn, role) in enumerate(zip(self.names.fqns, self.names.roles, strict=True)):
            rows = catalog.rows_of(position)
            if fqn is None or role != "param" or rows.stop - rows.start != 1 or not catalog.numel[position]:
                continue
            place = tuple(column[rows.start].tobytes() for column in columns)
            found.setdefault((place, self.shape(position), self.dtype(position)), set()).add(fqn)
        return frozenset(frozenset(names) for names in found.values() if len(names) > 1)

    def under(self, names: Mapping[str, str]) -> State:
        """The same with numbered optimizer state under other names; weights keep theirs."""
        fqns = list(self.names.fqns)
        for position in self.names.numbers:
            fqns[position] = names.get(fqns[position] or "", fqns[position])
        catalog = replace(self.ckpt.catalog, fqns=fqns, roles=list(self.names.roles))
        return State(self.ckpt.derive(catalog), self.facts.renamed(names))

    def named(self, names: Mapping[str, str]) -> State:
        """The same with parameters under other names."""
        fqns = [names.get(fqn or "", fqn) for fqn in self.names.fqns]
        catalog = replace(self.ckpt.catalog, fqns=fqns, roles=list(self.names.roles))
        return State(self.ckpt.derive(catalog), self.facts.renamed(names))

    def tensor(self, position: int) -> LazyTensor:
        return self.ckpt[self.ckpt.catalog.keys[position]]

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

    @cached_property
    def renumbered(self) -> bool:
        """Whether the two optimizers hold other numbers of parameters, so that a number need not mean the same one."""
        counts = [
            sum(group.count or 0 for group in state.facts.groups) if state.numbered else 0 for state in (self.a, self.b)
        ]
        return all(counts) and counts[0] != counts[1]

    def comparable(self, name: str) -> bool:
        """Whether a name means the same parameter on both sides."""
        return not (self.renumbered and is_numbered(name))

    def due(self, names: Iterable[str]) -> set[str]:
        """Of some weights, those that updates between the two change: none where both state a learning rate of 0.

        Where no weight is known to have optimizer state of its own, those of a shape that numbered state has.
        """
        if all(state.facts.lr == 0 for state in (self.a, self.b)):
            return set()
        names, params = set(names), self.a.params
        own = {name for name in names if any(role in _MOVING for role in params.get(name, ()))}
        shapes = {self.a.shape(at) for name in self.a.numbered for at in params[name].values()}
        alike = {
            name for name in names
            if any(self.a.shape(at) in shapes for role, at in params.get(name, {}).items() if role in _WHOLE)
        }  # fmt: skip
        return own or (alike if shapes else names)

    def shared(self) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """``(fqn, role → positions in a and b)`` of what both hold in one shape, in the order of ``b``."""
        for fqn, theirs in self.b.params.items():
            mine = self.a.params.get(fqn, {}) if self.comparable(fqn) else {}
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

    Where a number is joined to a parameter in one of them alone, ``a`` takes the name that ``b`` has for it.
    """
    stored, wrapped = a, _wrapped(a, b)
    if wrapped:
        a = a.named(wrapped)
    if renamed := _renamed(a, b):
        a = a.under(renamed)
    mine, theirs = _meant(a), _meant(b)
    shared = mine.keys() & theirs.keys()
    many = bool(shared) and 2 * len(shared) >= min(len(mine), len(theirs))
    origin = stored if renamed or wrapped else None
    if mine == theirs or (many and (a.ckpt.format == b.ckpt.format or all(mine[n] == theirs[n] for n in shared))):
        return Pair(a, b, False, _alone(a, b), _alone(b, a), origin)
    found = name_map(a.under({}).ckpt, b.under({}).ckpt)
    return Pair(State(found.apply(), a.facts), b, True, found.only_a, found.only_b, stored)


def stripped(name: str) -> str:
    """A name without what wrappers add: ``module.`` and ``_orig_mod.`` anywhere, ``model.`` at its beginning."""
    name = _WRAPPED.sub("", name)
    while match := _PREFIX.match(name):
        name = name[match.end() :]
    return name


def _wrapped(a: State, b: State) -> dict[str, str]:
    """Names of ``a`` → those of ``b``, where a wrapper is the only difference and most names differ by it."""
    mine, theirs = ({fqn for fqn, roles in state.params.items() if "param" in roles} for state in (a, b))
    if 2 * len(mine & theirs) >= min(len(mine), len(theirs)):
        return {}
    bare = {stripped(fqn): fqn for fqn in theirs}
    found = {fqn: bare[stripped(fqn)] for fqn in mine if stripped(fqn) in bare}
    whole = len(bare) == len(theirs) and len(set(found.values())) == len(found)
    return found if whole and len(found) >= SAME * min(len(mine), len(theirs)) else {}


def _renamed(a: State, b: State) -> dict[str, str]:
    """Names of ``a`` for numbered state → those of ``b``, where one side has a pseudo-name and the other has not."""
    found = {}
    for pseudo, theirs in b.names.owner.items():
        mine = a.names.owner.get(pseudo)
        if mine is not None and mine != theirs and pseudo in (mine, theirs):
            found[mine] = theirs
    return found


def _meant(state: State) -> dict[tuple[str, str], tuple[int, ...]]:
    """What names mean; numbers mean nothing."""
    return {
        (fqn, role): state.shape(at)
        for fqn, roles in state.params.items()
        if not is_numbered(fqn)
        for role, at in roles.items()
    }


def _alone(a: State, b: State) -> dict[str, str]:
    keys = a.ckpt.catalog.keys
    there = b.params
    return {
        keys[at]: "" for fqn, roles in a.params.items() for role, at in roles.items() if role not in there.get(fqn, {})
    }
