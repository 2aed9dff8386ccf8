"""The evidence: up to three checkpoints, each by parameter and role, and aligned in pairs.

::

    before ──load──▶ echo ──k updates──▶ after             one State each: ckpt, facts, fqn → role → position
       │               │                   │
       └── pair("before", "echo") ─────────┘               the first under the names and shapes of the second

Optimizer state that is only numbered has pseudo-names, ``optimizer state 3``, and is compared by its number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from workbench.analysis.name_map import name_map
from workbench.checkpoint import Checkpoint, open_place
from workbench.core.place import stat_or_absent
from workbench.doctor.facts.flat import leaves
from workbench.doctor.facts.gather import counts_of, scales_of
from workbench.doctor.facts.generators import Generator, generators
from workbench.doctor.facts.groups import TRAINED, Names, is_numbered, number_of
from workbench.doctor.facts.renumbered import alike, other_sizes
from workbench.doctor.facts.state import TrainingState
from workbench.errors import WorkbenchError
from workbench.names.roles import adapter_of
from workbench.tensor import LazyTensor

SAME = 0.9  #: share of the names that must agree without their wrappers
_MOVING = {"exp_avg", "exp_avg_sq", "momentum"}  #: roles of optimizer state that an update is computed from
_WHOLE = {"param", "master"}
_WRAPPED = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module)\.")
TENSORS = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".safetensors", ".npz", ".npy")
FILES = 256  #: most further files, and folders, that are looked at
LARGEST = 256 << 20  #: bytes of all further files that are read
_PREFIX = re.compile(r"(?:model|base_model|net|network|state_dict|params)\.")


@dataclass(frozen=True, eq=False)
class State:
    """One checkpoint and its facts."""

    ckpt: Checkpoint
    facts: TrainingState

    @cached_property
    def params(self) -> Mapping[str, Mapping[str, int]]:
        """fqn → role → position in the catalog, the first one if a role is stored twice.

        Numbered optimizer state is listed under pseudo-names, masters under their parameters' names. State without a
        role has the name that its optimizer uses: ``state1``, ``exp_avg.codes``.
        """
        found: dict[str, dict[str, int]] = {}
        for position, (fqn, role) in enumerate(zip(self.names.fqns, self.names.roles, strict=True)):
            if fqn is not None:
                found.setdefault(fqn, {}).setdefault(role, position)
        return found

    @cached_property
    def names(self) -> Names:
        """The parameter of each tensor, including numbered state and masters."""
        return Names(self.ckpt)

    @cached_property
    def numbered(self) -> Mapping[str, int]:
        """Pseudo-name → number, of optimizer state that cannot be assigned to a parameter."""
        found = {fqn: number_of(fqn) for fqn in self.params if is_numbered(fqn)}
        return {fqn: number for fqn, number in found.items() if number is not None}

    @cached_property
    def numbered_shapes(self) -> Counter[tuple[int, ...]]:
        """The shapes of the parameters whose optimizer state is only numbered."""
        numel = self.ckpt.catalog.numel
        every = (self.params[fqn].values() for fqn in self.numbered)
        return Counter(self.shape(max(held, key=lambda at: numel[at])) for held in every)  # of a moment, not a counter

    @cached_property
    def has_adapters(self) -> bool:
        """Whether weights of adapters are stored."""
        return any(map(adapter_of, self.params))

    @cached_property
    def unheld(self) -> frozenset[str]:
        """The weights and buffers without optimizer state, where others have it.

        State that is only numbered belongs to weights of its shape. If there are fewer states of a shape than weights,
        those are without it that are called neither weight nor bias.
        """
        bare = {fqn: roles for fqn, roles in self.params.items() if roles.keys() <= {"param", "buffer"}}
        if any(not is_numbered(name) for name in self.facts.states):
            return frozenset(bare.keys() - self.facts.states.keys())
        state = self.numbered_shapes
        weights = Counter(self.shape(roles["param"]) for roles in self.params.values() if "param" in roles)
        found = set()
        for fqn, roles in bare.items():
            shape = self.shape(roles["param"]) if "param" in roles else None
            few = shape is not None and state[shape] < weights[shape] and fqn.rpartition(".")[2] not in TRAINED
            if shape is None or not state[shape] or few:
                found.add(fqn)
        return frozenset(found) if state else frozenset()

    @cached_property
    def tied(self) -> frozenset[frozenset[str]]:
        """Groups of parameters that are one stored tensor: the same bytes of the same file in the same shape.

        ``torch.save`` stores shared storage once. DCP writes separate bytes for each name, so ties are unknown there.
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

    @cached_property
    def loose(self) -> tuple[str, ...] | None:
        """The files of the checkpoint's folder, and of the folders in it, that no reader opens.

        ``None`` without a folder: of a single file, or of what a trainer holds in memory.
        """
        place = self.ckpt.place
        if place.file is not None or not self.ckpt.catalog.files:
            return None
        names = list(place.files)
        for part in place.folders[:FILES]:
            with suppress(WorkbenchError):  # a link that leaves the folder
                names += [f"{part}/{name}" for name in place.sub(part).files]
        return self._unclaimed(names)

    @cached_property
    def opened(self) -> tuple[str, ...]:
        """Those of these files that are compared with their echo: the first ones, up to a number and a size in all."""
        found, left = [], LARGEST
        for name in (self.loose or ())[:FILES]:
            size = self.size(name)
            if 0 <= size <= left:
                found.append(name)
                left -= size
        return tuple(found)

    def size(self, name: str) -> int:
        """Return the bytes of a file of the folder; -1 if it is absent, or a link that leaves the folder."""
        try:
            return stat_or_absent(self.ckpt.place, name).size
        except WorkbenchError:
            return -1

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """Those directly in the folder that may hold tensors."""
        place = self.ckpt.place
        return () if place.file is not None else self._unclaimed(n for n in place.files if n.endswith(TENSORS))

    def _unclaimed(self, names: Iterable[str]) -> tuple[str, ...]:
        known = {*self.ckpt.catalog.files, *self.ckpt.catalog.metadata_files}
        rest = [one for one in names if one not in known]
        # an object has the name of its file; of two files with that name, it is unknown which one was read
        stems = [one.rpartition(".")[0] for one in rest]
        count = Counter(stems)
        return tuple(f for f, stem in zip(rest, stems, strict=True) if stem not in self.ckpt.objects or count[stem] > 1)

    @cached_property
    def beside(self) -> Mapping[str, Checkpoint]:
        """Those of these files that are checkpoints by themselves, as of a trainer's further objects."""
        found = {}
        for name in self.opened:
            try:
                if name.endswith(TENSORS):
                    found[name] = open_place(self.ckpt.place.sub(name))
            except WorkbenchError:  # of an unknown format
                continue
        return found

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The integers in the trainer's state by path, those of its further files included.

        An average may count in a tensor: ``n_averaged`` of torch's.
        """
        found = dict(self.facts.counts)
        for name, ckpt in self.beside.items():
            stem = name.rpartition(".")[0]
            found |= {f"{stem}.{path}": value for path, value in counts_of(leaves(ckpt.objects)[0]).items()}
            for at in np.flatnonzero(ckpt.catalog.numel == 1)[:FILES]:
                tensor = ckpt[ckpt.catalog.keys[at]]
                if tensor.element.numpy_name in ("int64", "int32"):
                    with suppress(WorkbenchError):  # verify reports the reason
                        found[f"{stem}.{tensor.key}"] = int(tensor.numpy().reshape(-1)[0])
        return found

    @cached_property
    def loss_scale(self) -> float | None:
        """The loss scale, that of a further file included."""
        if (found := self.facts.value("loss_scale")) is not None:
            return float(found)
        files = (leaves({name.rpartition(".")[0]: ckpt.objects})[0] for name, ckpt in self.beside.items())
        return next((float(one.value) for held in files for one in scales_of(held)), None)

    @cached_property
    def generators(self) -> Mapping[str, Generator]:
        """The states of random generators by name, those of further files included."""
        found = dict(self.facts.generators)
        for name, ckpt in self.beside.items():
            every = re.search(r"rng|random_state", name) is not None
            stem = name.rpartition(".")[0]
            found |= {f"{stem}.{inner}": one for inner, one in generators(ckpt, every=every).items()}
        return found

    def under(self, names: Mapping[str, str]) -> State:
        """Return a copy with numbered optimizer state under other names; weights keep theirs."""
        fqns = list(self.ckpt.fqns)
        own = {fqn: pseudo for pseudo, fqn in self.names.owner.items()}
        for position in self.names.numbers:
            name = self.names.fqns[position] or ""
            new = names.get(name, name)
            fqns[position] = None if new == own.get(name) else new
        catalog = replace(self.ckpt.catalog, fqns=fqns, roles=list(self.ckpt.roles))
        found = State(self.ckpt.derive(catalog), self.facts.renamed(names))
        found.names.list_buffers(self.names.unheld)  # and no other weights, although fewer have state under names now
        return found

    def named(self, names: Mapping[str, str]) -> State:
        """Return a copy with parameters under other names."""
        fqns = [names.get(fqn or "", fqn) for fqn in self.names.fqns]
        catalog = replace(self.ckpt.catalog, fqns=fqns, roles=list(self.names.roles))
        return State(self.ckpt.derive(catalog), self.facts.renamed(names))

    def tensor(self, position: int) -> LazyTensor:
        return self.ckpt[self.ckpt.catalog.keys[position]]

    def shape(self, position: int) -> tuple[int, ...]:
        return self._shapes[position]

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor: rules ask for them again and again, and few are distinct."""
        catalog = self.ckpt.catalog
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        shapes = (tuple(row[:ndim]) for row, ndim in zip(catalog.shape.tolist(), catalog.ndim.tolist(), strict=True))
        return [known.setdefault(shape, shape) for shape in shapes]

    def dtype(self, position: int) -> str:
        """Return the name of the element type: ``bfloat16``."""
        return self.ckpt.catalog.dtype_of(position).name


@dataclass(frozen=True, eq=False)
class Pair:
    """Two states, the first under the names, shapes and cuts of the second.

    Attributes:
        a, b: the states; ``a`` may be a lazy rearrangement of the stored tensors.
        mapped: whether ``a`` was rearranged because names or fusions differ.
        only_a, only_b: stored keys without a partner, with a reason if there is one.
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
        """Whether the param groups have other sizes, so a number may mean another parameter.

        torch numbers parameters through all groups; a group that was added last changes no other number. If all were
        matched, ``b`` lists them under the numbers of ``a``.
        """
        if any(
            is_numbered(name) and name != pseudo for s in (self.a, self.b) for pseudo, name in s.names.owner.items()
        ):
            return False
        sizes = [[group.count or 0 for group in state.facts.groups if state.numbered] for state in (self.a, self.b)]
        return other_sizes(*sizes)

    @cached_property
    def cut_anew(self) -> bool:
        """Whether other param groups hold the state of the same parameters: as many tensors of each shape."""
        return self.renumbered and _as_much_state(self.a, self.b)

    @cached_property
    def left_out(self) -> int:
        """How many parameters fewer the param groups of ``b`` hold, as if some were frozen; 0 if that is unknown."""
        one, two = ([group.count for group in state.facts.groups] for state in (self.a, self.b))
        alike = not self.mapped and self.a.ckpt.format == self.b.ckpt.format
        if not alike or None in one or None in two or not one or not two:
            return 0
        return max(sum(count or 0 for count in one) - sum(count or 0 for count in two), 0)

    @cached_property
    def newly_trained(self) -> frozenset[str]:
        """Weights that have optimizer state in ``b`` only, although other weights have it in both."""
        held: set[str] = set()
        new: set[str] = set()
        for fqn, theirs in self.b.params.items():
            mine = self.a.params.get(fqn, {})
            known = _WHOLE & mine.keys() or (is_numbered(fqn) and not self.renumbered)
            if known and _MOVING & theirs.keys():
                (held if _MOVING & mine.keys() else new).add(fqn)
        return frozenset(new) if held else frozenset()

    @cached_property
    def crossed(self) -> bool:
        """Whether one optimizer stores its state by numbers without owners, and the other one by names."""
        named = [
            any(_MOVING & roles.keys() for fqn, roles in state.params.items() if not is_numbered(fqn))
            for state in (self.a, self.b)
        ]
        a, b = self.a.numbered, self.b.numbered
        return bool((a and not b and not named[0] and named[1]) or (b and not a and not named[1] and named[0]))

    def comparable(self, name: str) -> bool:
        """Return whether a name means the same parameter on both sides."""
        return not ((self.renumbered or self.crossed) and is_numbered(name))

    def due(self, names: Iterable[str]) -> set[str]:
        """Return the weights that updates between the two should change; none if both state a learning rate of 0.

        The first update of an optimizer that started anew proves nothing: a warm-up begins at 0, and ADOPT only stores
        squares then. If no weight is known to have optimizer state, weights whose shape occurs in numbered state are
        returned.
        """
        first, second = (state.facts.steps.usual or 0 for state in (self.a, self.b))
        if all(state.facts.lr == 0 for state in (self.a, self.b)) or second == 1 < first:
            return set()
        names, params = set(names), self.a.params
        own = {name for name in names if any(role in _MOVING for role in params.get(name, ()))}
        shapes = {self.a.shape(at) for name in self.a.numbered for at in params[name].values()}
        alike = {
            name
            for name in names
            if any(self.a.shape(at) in shapes for role, at in params.get(name, {}).items() if role in _WHOLE)
        }
        return own or (alike if shapes else names)

    def shared(self) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """Yield ``(fqn, role → positions in a and b)`` of tensors that both hold in one shape, in ``b``'s order."""
        shapes, their_shapes = self.a._shapes, self.b._shapes
        every = not (self.renumbered or self.crossed)
        for fqn, theirs in self.b.params.items():
            mine = self.a.params.get(fqn) if every or self.comparable(fqn) else None
            if mine is None:
                continue
            both = {
                role: (mine[role], there)
                for role, there in theirs.items()
                if role in mine and shapes[mine[role]] == their_shapes[there]
            }
            if both:
                yield fqn, both


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that was given: ``before`` alone, with its echo, with a later checkpoint, or with both."""

    before: State
    after: State | None = None
    echo: State | None = None

    def __post_init__(self) -> None:
        """Give numbered state the names that it has in another one; list what is a buffer in one as a buffer in all.

        A buffer stays one unless the optimizer of another one holds it: that may lack state of the optimizer, or no
        longer hold a weight.
        """
        given = [which for which in ("before", "echo", "after") if getattr(self, which) is not None]
        for neighbours in [*pairwise(given), *[*pairwise(given)][::-1]]:
            for which, state in zip(neighbours, alike(*map(self.state, neighbours)), strict=True):
                object.__setattr__(self, which, state)
        states = [one for one in (self.before, self.after, self.echo) if one is not None]
        trained = {name for one in states for name in (one.names.weights if one.names.whole else one.names.shapes)}
        unheld = {name for one in states for name in one.names.unheld} - trained
        for one in states:
            if one.names.unheld.keys() == unheld & (one.names.unheld.keys() | one.names.weights.keys()):
                continue
            one.names.list_buffers(unheld)
            for cached in ("params", "tied"):
                one.__dict__.pop(cached, None)

    def state(self, which: str) -> State:
        """Return the state ``before``, ``after`` or ``echo``.

        Raises:
            KeyError: it was not given.
        """
        found = {"before": self.before, "after": self.after, "echo": self.echo}[which]
        if found is None:
            raise KeyError(which)
        return found

    def pair(self, first: str, second: str) -> Pair:
        """Return two states aligned; the pair is cached."""
        made = self._pairs
        if (first, second) not in made:
            made[first, second] = align(self.state(first), self.state(second))
        return made[first, second]

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], Pair]:
        return {}


def align(a: State, b: State) -> Pair:
    """Align ``a`` with the names of ``b``: by name if the names agree, otherwise by the frameworks' conventions.

    Within one format, half of the names are enough, and other tensors count as missing. Between two formats, all shapes
    must agree as well, because a vocabulary may be padded in only one of them.

    If only one of them assigns a number to a parameter, ``a`` takes the name that ``b`` has for it. If other param
    groups hold the same parameters, the number means another one, and only names that both have are kept.
    """
    stored, wrapped = a, _wrapped(a, b)
    if wrapped:
        a = a.named(wrapped)
    renamed = _renamed(a, b)
    sizes = [[group.count or 0 for group in state.facts.groups] for state in (a, b)]
    if renamed and other_sizes(*sizes):
        shared = set(a.names.owner.values()) & set(b.names.owner.values())
        a, b = (
            state.under({fqn: pseudo for pseudo, fqn in state.names.owner.items() if fqn not in shared})
            for state in (a, b)
        )
    elif renamed:
        a = a.under(renamed)
    mine, theirs = _meant(a), _meant(b)
    both = mine.keys() & theirs.keys()
    many = bool(both) and 2 * len(both) >= min(len(mine), len(theirs))
    origin = stored if renamed or wrapped else None
    if mine == theirs or (many and (a.ckpt.format == b.ckpt.format or all(mine[n] == theirs[n] for n in both))):
        return Pair(a, b, False, _alone(a, b), _alone(b, a), origin)
    found = name_map(a.named({}).ckpt, b.named({}).ckpt)
    return Pair(State(found.apply(), a.facts), b, True, found.only_a, found.only_b, stored)


def _as_much_state(a: State, b: State) -> bool:
    """Return whether both hold optimizer state, as many tensors of each role and shape."""
    one, two = (
        Counter(
            (role, state.shape(at)) for roles in state.params.values() for role, at in roles.items() if role in _MOVING
        )
        for state in (a, b)
    )
    return bool(one) and one == two


def stripped(name: str) -> str:
    """Return a name without wrappers: ``module.`` and ``_orig_mod.`` anywhere, ``model.`` at its beginning."""
    name = _WRAPPED.sub("", name)
    while match := _PREFIX.match(name):
        name = name[match.end() :]
    return name


def _wrapped(a: State, b: State) -> dict[str, str]:
    """Return names of ``a`` → names of ``b``, if a wrapper is the only difference and most names differ by it."""
    mine, theirs = ({fqn for fqn, roles in state.params.items() if "param" in roles} for state in (a, b))
    if 2 * len(mine & theirs) >= min(len(mine), len(theirs)):
        return {}
    bare = {stripped(fqn): fqn for fqn in theirs}
    found = {fqn: bare[stripped(fqn)] for fqn in mine if stripped(fqn) in bare}
    whole = len(bare) == len(theirs) and len(set(found.values())) == len(found)
    return found if whole and len(found) >= SAME * min(len(mine), len(theirs)) else {}


def _renamed(a: State, b: State) -> dict[str, str]:
    """Return names of ``a`` for numbered state → names of ``b``, if only one side has a pseudo-name."""
    found = {}
    for pseudo, theirs in b.names.owner.items():
        mine = a.names.owner.get(pseudo)
        if mine is not None and is_numbered(mine) != is_numbered(theirs):
            found[mine] = theirs
    return found


def _meant(state: State) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shape of each named tensor; numbers are not names."""
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
