"""Find the parameters that an optimizer's numbers mean in another checkpoint, whose param groups may be cut anew.

::

    before   [embed wq.0 wq.1 wq.2] [norm.0 norm.1]           0 1 2 3   4 5
    after    [embed wq.0 wq.2] [norm.0 norm.1] [wq.1]         0 1 2   3 4   5       5 is wq.1, and 2 is wq.2

torch numbers parameters through the groups. A parameter that moves to another group changes the numbers of all after
it, but within each group the order is kept. If shapes and order do not determine what moved, values do: state is like
its own earlier state, and a weight moves against its own momentum. Numbers that remain uncertain keep no name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.doctor.facts.groups import Names, is_numbered
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.ledger.roles import FIRST, SECOND
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

SAMPLED = 4096  #: elements of a tensor
ALIKE = 256  #: most parameters of one shape whose values are compared
LONGEST = 512  #: most parameters of an optimizer
MARGIN = 0.2  #: of correlations, above that of any other order
SIGMAS = 4.0  #: standard errors of a correlation that the margin has as well
NEARLY = 1 - 1e-6  #: correlation from which values may be equal
OWN = 1.5  #: how much more a weight's own update tells than the earlier state, which may have been exchanged


class Numbering(Protocol):
    """A checkpoint whose optimizer numbers its parameters: what is asked of `workbench.doctor.facts.evidence.State`."""

    @property
    def ckpt(self) -> Checkpoint: ...
    @property
    def facts(self) -> TrainingState: ...
    @property
    def names(self) -> Names: ...
    @property
    def params(self) -> Mapping[str, Mapping[str, int]]: ...
    @property
    def numbered(self) -> Mapping[str, int]: ...

    def shape(self, position: int) -> tuple[int, ...]: ...
    def tensor(self, position: int) -> LazyTensor: ...
    def under(self: S, names: Mapping[str, str]) -> S: ...


S = TypeVar("S", bound=Numbering)


def alike(a: S, b: S) -> tuple[S, S]:
    """Return both, with numbered state under the name, or the number, that the other one has for its parameter.

    In another format, the numbers are the same ones if weights, param groups and shapes are.
    """
    if not (a.numbered or b.numbered) or not (a.names.paths and b.names.paths):
        return a, b  # one of them has no numbers
    other = a.ckpt.format != b.ckpt.format
    if other and (a.names.weights.keys() != b.names.weights.keys() or len(a.facts.groups) != len(b.facts.groups)):
        return a, b
    found = _matched(a, b)
    if other and [a.names.shapes.get(one) for one in found] != [b.names.shapes.get(two) for two in found.values()]:
        return a, b
    mine = {one: two for one, two in found.items() if is_numbered(one) and not is_numbered(two) and _fits(a, one, two)}
    theirs = {two: one for one, two in found.items() if is_numbered(two) and one != two and _fits(b, two, one)}
    if not set(b.names.owner.values()) <= set(found.values()):  # the numbers that are left would be those of others
        theirs = {two: one for two, one in theirs.items() if not is_numbered(one)}
    a, b = a.under(mine) if mine else a, b.under(theirs) if theirs else b
    new = _added(a, b)
    return a, b.under(new) if new else b


def other_sizes(one: Sequence[int], two: Sequence[int]) -> bool:
    """Return whether param groups have other sizes; a group that was added last changes no other number."""
    first, second = sorted((one, two), key=len)
    return sum(one) > 0 and sum(two) > 0 and list(first) != list(second[: len(first)])


def _fits(state: Numbering, number: str, name: str) -> bool:
    """Return whether state has the shape of the weight; if not, it is that of a weight of another size."""
    shape, weight = state.names.shapes.get(number), state.names.weights.get(name)
    return shape is None or weight is None or tuple(shape) == tuple(weight)


def _matched(a: Numbering, b: Numbering) -> dict[str, str]:
    """Return names in ``a`` → names in ``b`` of the same parameters."""
    sizes = [[group.count or 0 for group in state.facts.groups] for state in (a, b)]
    if not other_sizes(*sizes):
        found = {mine: b.names.owner[pseudo] for pseudo, mine in a.names.owner.items() if pseudo in b.names.owner}
        for one, two in zip(a.facts.groups, b.facts.groups, strict=False):
            if one.params is not None and two.params is not None and len(one.params) == len(two.params):
                found |= dict(zip(one.params, two.params, strict=True))
        return found
    found = {}
    groups = [_by_optimizer(state) for state in (a, b)]
    for path in groups[0].keys() & groups[1].keys():
        found |= _Match(a, b, groups[0][path], groups[1][path]).found
    return found


def _by_optimizer(state: Numbering) -> dict[str, list[Sequence[str]]]:
    """Return path → the parameters of its groups, of optimizers whose parameters are all known by name or number."""
    found: dict[str, list[Sequence[str]]] = defaultdict(list)
    for group in state.facts.groups:
        found[group.source.partition(".param_groups")[0]].append(group.params or ())
    counts = [group.source.partition(".param_groups")[0] for group in state.facts.groups if group.params is None]
    return {path: groups for path, groups in found.items() if path not in counts}


def _added(a: Numbering, b: Numbering) -> dict[str, str]:
    """Return numbers of ``b`` → new weights without state, if these have the shapes of the numbers, in one order."""
    there = {name for group in a.facts.groups for name in group.params or ()}
    numbers = [name for group in b.facts.groups for name in group.params or () if is_numbered(name)]
    numbers = [name for name in numbers if name not in there]
    new = [name for name in b.names.weights if name not in a.params and name not in b.names.shapes]
    shapes = [b.names.shapes.get(name) for name in numbers]
    same = bool(new) and len(set(shapes)) > 1 and shapes == [tuple(b.names.weights[name]) for name in new]
    return dict(zip(numbers, new, strict=True)) if same else {}


class _Match:
    """The parameters of one optimizer, group beside group, and then those that are left.

    Attributes:
        found: names in ``a`` → names in ``b``.
    """

    def __init__(self, a: Numbering, b: Numbering, one: Sequence[Sequence[str]], two: Sequence[Sequence[str]]) -> None:
        self.a, self.b, self.found = a, b, dict[str, str]()
        mine, theirs = [list(some) for some in one], [list(some) for some in two]
        if max(sum(map(len, mine)), sum(map(len, theirs))) > LONGEST:
            return
        self.like = self._values([n for some in mine for n in some], [n for some in theirs for n in some])
        if self._of_a_module(mine, theirs):
            return
        gone: list[str] = []
        for n, own in enumerate(mine):
            beside = [name for at, some in enumerate(theirs) if at != n for name in some]
            gone += self._align(own, theirs[n] if n < len(theirs) else [], beside)
        left = [name for some in theirs for name in some if name not in self.found.values()]
        while gone and left and (taken := len(self.found)) >= 0:
            gone = self._align(gone, left, [])
            left = [name for name in left if name not in self.found.values()]
            if len(self.found) == taken:
                break

    def _of_a_module(self, mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> bool:
        """Match the groups if the parameters of one module moved to a group of their own, the last one.

        Several modules may have the same shapes. Names are given where those whose values fit agree.
        """
        if len(theirs) != len(mine) + 1:
            return False
        flat = [name for some in mine for name in some]
        moved = {}
        for name in flat if not any(map(is_numbered, flat)) else ():
            parts = name.split(".")
            for head in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
                if head not in moved:
                    moved[head] = frozenset(one for one in flat if f"{one}.".startswith(f"{head}."))
        able: list[tuple[float, dict[str, str]]] = []
        for some in dict.fromkeys(moved.values()):
            if len(some) != len(theirs[-1]):
                continue
            kept = [[name for name in group if name not in some] for group in mine]
            for order in (flat, list(self.a.names.weights)):  # group after group, or as in the model
                able += self._fit([*kept, [name for name in order if name in some]], theirs)
        best = max(able, key=lambda one: one[0], default=(0.0, dict[str, str]()))
        near = [found for total, found in able if best[0] - total < self._margin_of(best[1], found)]
        self.found |= {one: two for one, two in best[1].items() if all(found[one] == two for found in near)}
        return bool(able)

    def _fit(
        self, mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]
    ) -> Iterator[tuple[float, dict[str, str]]]:
        """Yield how well the values fit, and the match of all groups one by one, if sizes and shapes agree."""
        if list(map(len, mine)) != list(map(len, theirs)):
            return
        pairs = [pair for one, two in zip(mine, theirs, strict=True) for pair in zip(one, two, strict=True)]
        if all(self._may_be(x, y) for x, y in pairs):
            yield sum(self.like.get(pair, 0.0) for pair in pairs), dict(pairs)

    def _margin_of(self, one: Mapping[str, str], two: Mapping[str, str]) -> float:
        """Return how much better one match has to be than another: only the names count that they match otherwise."""
        off = [self._margin(name) for name in one if one[name] != two[name]]
        return math.hypot(*off) if off else 0.0

    def _may_be(self, x: str, y: str) -> bool:
        named = not is_numbered(x) and not is_numbered(y)
        one, two = self._shape(self.a, x), self._shape(self.b, y)
        return (one is None or two is None or one == two) and not (named and x != y)

    def _shape(self, state: Numbering, name: str) -> tuple[int, ...] | None:
        return state.names.shapes.get(name) or state.names.weights.get(name)

    def _align(self, mine: Sequence[str], theirs: Sequence[str], beside: Sequence[str]) -> list[str]:
        """Match two lists in their order; return those of the first that certainly have no partner in the second."""
        m, score = len(theirs), self._scores(mine, theirs)
        skip = (self._scores(mine, beside) - 1).max(1, initial=0.0)
        ahead, behind = _totals(score, skip), _totals(score[::-1, ::-1], skip[::-1])[::-1, ::-1]
        through = ahead[:-1, :-1] + score + behind[1:, 1:]
        # the best of all orders in which one of the first has no partner
        alone = (ahead[:-1] + skip[:, None] + behind[1:]).max(1, initial=-math.inf)
        gone = []
        for at, name in enumerate(mine):
            every = np.append(through[at], alone[at])
            best = int(every.argmax())
            rest = np.delete(every, best)
            if best < m:
                rest = np.append(rest, np.delete(through[:, best], at))
            if every[best] - rest.max(initial=-math.inf) < self._margin(name):
                continue
            if best == m:
                gone.append(name)
            else:
                self.found[name] = theirs[best]
        return gone

    def _margin(self, name: str) -> float:
        size = math.prod(self._shape(self.a, name) or (1,))
        return min(max(MARGIN, SIGMAS / math.sqrt(min(size, SAMPLED))), 1.0)

    def _scores(self, mine: Sequence[str], theirs: Sequence[str]) -> Array:
        """Return 1 for pairs that may be the same parameter, more if their values say so, and −∞ if they cannot be."""
        found = np.full((len(mine), len(theirs)), -math.inf)
        for i, x in enumerate(mine):
            for j, y in enumerate(theirs):
                if self._may_be(x, y):
                    found[i, j] = 1.0 + self.like.get((x, y), 0.0)
        return found

    def _values(self, mine: Iterable[str], theirs: Iterable[str]) -> dict[tuple[str, str], float]:
        """Return how alike the state of two parameters is, of those of a shape that several have."""
        shapes: dict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, (state, names) in enumerate(((self.a, mine), (self.b, theirs))):
            for name in names:
                if (shape := self._shape(state, name)) is not None:
                    shapes[shape][side].append(name)
        found: dict[tuple[str, str], float] = {}
        for shape, (one, two) in shapes.items():
            if not one or not two or max(len(one), len(two)) == 1 or max(len(one), len(two)) > ALIKE:
                continue
            like = np.maximum(self._states(shape, one, two), 0) + OWN * np.maximum(self._moved(shape, one, two), 0)
            found |= {(x, y): float(like[i, j]) for i, x in enumerate(one) for j, y in enumerate(two)}
        return found

    def _states(self, shape: tuple[int, ...], one: Sequence[str], two: Sequence[str]) -> Array:
        """Return the correlation of all states of ``a`` with those of ``b``: the largest of any of their tensors.

        Of equal ones it is 2, however few their elements.
        """
        found = np.zeros((len(one), len(two)))
        for role in (*FIRST, *SECOND):
            sides = [
                [self._read(state, name, role, shape) for name in names]
                for state, names in ((self.a, one), (self.b, two))
            ]
            if all(any(row is not None for row in side) for side in sides):
                like = _correlations(*map(_eased, sides))
                for i, j in np.argwhere(like > NEARLY).tolist():
                    like[i, j] += np.array_equal(sides[0][i], sides[1][j])  # type: ignore[arg-type]
                found = np.maximum(found, like)
        return found

    def _moved(self, shape: tuple[int, ...], one: Sequence[str], two: Sequence[str]) -> Array:
        """Return how well the momentum of each number of ``b`` explains how each weight moved."""
        moves: list[Array | None] = []
        for name in one:
            sides = [self._read(state, name, "param", shape) for state in (self.a, self.b)]
            moves.append(None if sides[0] is None or sides[1] is None else sides[0] - sides[1])
        pulls: list[Array | None] = []
        for name in two:
            first = next((held for role in FIRST if (held := self._read(self.b, name, role, shape)) is not None), None)
            squares = self._read(self.b, name, "exp_avg_sq", shape)
            if first is not None and squares is not None:
                first = first / (np.sqrt(np.maximum(squares, 0)) + 1e-12)
            pulls.append(first)
        return _correlations(moves, pulls)

    def _read(self, state: Numbering, name: str, role: str, shape: tuple[int, ...]) -> Array | None:
        at = state.params.get(name, {}).get(role)
        if at is None or state.shape(at) != shape:
            return None
        try:
            tensor = state.tensor(at)
            if tensor.numel() > SAMPLED:
                many = max(SAMPLED * shape[0] // tensor.numel(), 1)
                tensor = tensor.lazy[np.unique(np.linspace(0, shape[0] - 1, many).astype(int)).tolist()]
            with np.errstate(invalid="ignore"):  # a signalling NaN
                return np.asarray(Decoder(tensor.element).numbers(tensor.numpy().reshape(-1)), np.float64)
        except WorkbenchError:  # verify reports the reason
            return None


def _totals(score: Array, skip: Array) -> Array:
    """Return ``(n + 1, m + 1)``: the best total of the first rows and columns, matched in their order."""
    n, m = score.shape
    total = np.zeros((n + 1, m + 1))
    for i in range(n):
        row = total[i] + skip[i]
        row[1:] = np.maximum(row[1:], total[i, :-1] + score[i])
        total[i + 1] = np.maximum.accumulate(row)
    return total


def _eased(rows: Sequence[Array | None]) -> list[Array | None]:
    """Return values with large ones brought closer; otherwise a few would decide a correlation."""
    return [None if row is None else np.sign(row) * np.abs(row) ** 0.25 for row in rows]


def _correlations(one: Sequence[Array | None], two: Sequence[Array | None]) -> Array:
    """Return the correlation of every row of the first with every row of the second; 0 without values."""
    width = max((len(row) for row in (*one, *two) if row is not None), default=0)
    sides = []
    for rows in (one, two):
        held = np.array([np.zeros(width) if row is None else row for row in rows], float).reshape(len(rows), width)
        held = np.where(np.isfinite(held), held, 0)
        held = held - held.mean(1, keepdims=True) if width else held
        sides.append(held / np.maximum(np.linalg.norm(held, axis=1, keepdims=True), 1e-30))
    return sides[0] @ sides[1].T
