"""Find the rows or columns of before that a weight of after consists of, if its updates cannot have made it.

::

    own rows, cosine ≥ .9        nothing moved, if hardly any row differs
    rows of its family           its own, its siblings' (gate and up; q, k, v), the nearest layers', the experts'
    columns                      its own, and its own as rows: transposed
    an entire vector             another of its shape, if the updates lead from that and not from its own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from workbench.analysis.patterns.forms import find_form
from workbench.core.arrays import Array
from workbench.doctor.laws.bounds import UNITS, reach
from workbench.doctor.origins.atoms import Atom, Atoms
from workbench.doctor.origins.index import MovedRows, row_shape
from workbench.doctor.origins.match import Matched, match, some
from workbench.doctor.origins.samples import sampled
from workbench.doctor.origins.tags import Move
from workbench.doctor.passes.pair import Update
from workbench.names.weights import parse
from workbench.tensor import LazyTensor

SELF = 0.9  #: cosine of a row with itself, a few updates later (catalogue, 3.2)
GAP = 0.3  #: difference of the cosines with another row and with its own
LIKE = 0.6  #: cosine from which a row may be another one
SURE = 0.9  #: share of the rows
SOME = 0.75  #: share of the rows from which an order is reported
FEW = 0.1  #: least share of rows that come from other places
RUN = 3  #: rows one after the other from which fewer are enough
ROOM = 0.1  #: margin above the best cosine by chance
DULL = 0.98  #: cosine by chance from which rows are too short to be identified
SIBLINGS = 16  #: most tensors that each is searched in
STRIP = 16  #: rows that are compared with as many columns
BROKEN = 0.2  #: share of a vector's elements beyond reach
LEAST = 8  #: elements of a vector whose profile is compared
WHOLE = 1 << 20  #: most elements of a weight that is compared as a whole
VECTORS = 256  #: most vectors of one shape
TURN = 0.9  #: ratio of the norms of change and weight below which the cosine stays above ALONE
FEW_ROWS = 16  #: rows that estimate the size of a weight
ROWS = 128  #: rows that are compared with themselves
SAMPLED = 8  #: weights that are checked for whether others stayed the same


@dataclass(frozen=True, eq=False)
class SeenWeight:
    """A weight of after and its origin.

    Attributes:
        move: the rows or columns that it consists of, if not its own.
        sure: whether nearly all of them were recognised. share: the share that was.
        cosine: median cosine of its rows with their old values.
    """

    atom: Atom
    move: Move | None
    sure: bool
    cosine: float
    share: float


def see(atoms: Atoms, atom: Atom) -> SeenWeight:
    """Compare a weight with its own rows, then search its family."""
    before, after = atoms.tensors(atom)
    own = _straight(before, after)
    middle = float(np.median(own))
    if middle >= SELF and (own < LIKE).mean() < FEW and not _is_run(own < LIKE):
        return SeenWeight(atom, None, True, middle, 0.0)
    family = [atom, *_family(atoms, atom)]
    rows = match(after, [atoms.before(one) for one in family], 0)
    seen = _read(atom, rows, [one.fqn for one in family], False, after.shape, middle)
    if seen.move is None and len(after.shape) > 1 and before.shape == after.shape:
        columns = match(after, [before], 0, columns=True)
        seen = _read(atom, columns, [atom.fqn], True, after.shape, middle)
    if seen.move is not None:
        return seen
    return _transposed(atom, before, after) or _entire(atoms, atom, middle) or seen


def _is_run(rows: Array) -> bool:
    """Return whether these are a few rows, one after the other."""
    places = np.flatnonzero(rows)
    return len(places) >= RUN and int(places[-1] - places[0]) == len(places) - 1


def _transposed(atom: Atom, before: LazyTensor, after: LazyTensor) -> SeenWeight | None:
    """Return the move if its first two axes, or its last two as in stacked matrices, were exchanged."""
    dims = len(after.shape)
    for axis in dict.fromkeys([0, dims - 2] if dims > 1 else []):
        if after.shape[axis] == after.shape[axis + 1] > 1 and _turned(before, after, axis):
            text = "rows are the old columns" + (" in each matrix" if axis else "")
            move = Move(atom.fqn, after.shape, True, text=text, form={"form": "transposed"})
            return SeenWeight(atom, move, True, 0.0, 1.0)
    return None


def _entire(atoms: Atoms, atom: Atom, cosine: float) -> SeenWeight | None:
    """Return the move if all elements together are clearly its own, transposed and read again in the old shape, or
    another tensor's: short rows, and those that a transposition mixed, show neither.
    """
    before, after = atoms.tensors(atom)
    if not LEAST <= after.numel() <= WHOLE or before.shape != after.shape:
        return None
    old, new = sampled(before, None, WHOLE), sampled(after, None, WHOLE)
    if np.ptp(new) == 0 or len(after.shape) < 2:
        return None
    rows, columns, *rest = after.shape
    ways = [old.reshape(rows, columns, *rest).swapaxes(0, 1), old.reshape(columns, rows, *rest).swapaxes(0, 1)]
    if rows != columns and any(_angle(one.ravel(), new) >= SELF for one in ways):
        text = "elements are in the order of the transposed weight, under the old shape"
        move = Move(atom.fqn, after.shape, True, text=text, form={"form": "transposed"})
        return SeenWeight(atom, move, True, cosine, 1.0)
    others = islice(_others(atoms, atom), VECTORS)
    found = [one for one in others if _angle(sampled(atoms.before(one), None, WHOLE), new) >= SELF]
    if len(found) != 1 or _angle(old, new) >= LIKE:
        return None  # several of them are alike, such as new ones
    move = Move(atom.fqn, after.shape, False, (found[0].fqn,), (MovedRows(0, row_shape(after.shape)[0], 0, 0),))
    return SeenWeight(atom, move, True, cosine, 1.0)


def _turned(before: LazyTensor, after: LazyTensor, axis: int) -> bool:
    """Return whether strips along one axis are those along the next axis of before."""
    ends = [*(size - 1 for size in after.shape[:axis]), max(after.shape[axis] - STRIP, 0)]
    places = np.linspace(0, ends, 3).astype(np.int64)
    for *lead, at in places.tolist():
        outer = [slice(one, one + 1) for one in lead]
        strip = slice(at, at + STRIP)
        old, new = before.lazy[(*outer, slice(None), strip)], after.lazy[(*outer, strip)]
        turned = np.swapaxes(sampled(old, None, old.numel()).reshape(old.shape), axis, axis + 1)
        if _angle(sampled(new, None, new.numel()), turned.ravel()) < SELF:
            return False
    return True


def see_vector(atoms: Atoms, atom: Atom, update: Update) -> SeenWeight | None:
    """Return the other vector of its shape from which the updates lead to it, if they do not from its own."""
    before, after = atoms.tensors(atom)
    if update.most is None or update.bars("reach") or len(after.shape) != 1:
        return None
    terms = (update.most, update.factors, update.k, after.element.name)
    if after.element.name not in UNITS:
        return None
    mine, now = sampled(before, None), sampled(after, None)
    if len(now) < LEAST:
        return None  # a few numbers have the profile of others by chance
    if reach(mine, now, *terms).broken < BROKEN * len(now):
        return None
    fitting = [
        (one, old)
        for one in islice(_others(atoms, atom), VECTORS)
        if not reach(old := sampled(atoms.before(one), None), now, *terms).broken
    ]
    if len(fitting) != 1 or _angle(now - now.mean(), fitting[0][1] - fitting[0][1].mean()) < SELF:
        return None  # new norms are near 1, as others may be, so the profile decides
    move = Move(atom.fqn, after.shape, False, (fitting[0][0].fqn,), (MovedRows(0, 1, 0, 0),))
    return SeenWeight(atom, move, True, _angle(mine, now), 1.0)


def _others(atoms: Atoms, atom: Atom) -> Iterator[Atom]:
    """Yield the other tensors of before that have its role and shape."""
    shape = atoms.before(atom).shape
    for one in (*atoms.rows, *atoms.gone):
        if one.role == atom.role and one.tensor != atom.tensor and atoms.before(one).shape == shape:
            yield one


def _angle(one: Array, two: Array) -> float:
    length = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(one @ two) / length if length > 0 else float(not one.any() and not two.any())


def _straight(before: LazyTensor, after: LazyTensor) -> Array:
    """Return the cosines of some rows with their old values."""
    count = row_shape(after.shape)[0]
    rows = np.unique(np.linspace(0, count - 1, min(count, ROWS)).astype(np.int64))
    old, new = (some(tensor, rows).astype(np.float64) for tensor in (before, after))
    return np.array([_angle(one, two) for one, two in zip(old, new, strict=True)])


def _family(atoms: Atoms, atom: Atom) -> list[Atom]:
    """Return tensors that it may have been confused with: first of its layer, then of the nearest layers, experts."""
    width = row_shape(atoms.before(atom).shape)[1]
    mine = parse(atom.fqn)
    layer, expert = mine.layer, mine.expert
    groups = ({"gate", "up"}, {"q", "k", "v"})
    ranked = []
    for one in (*atoms.rows, *atoms.gone):
        shape = atoms.before(one).shape
        if one.role != atom.role or one.fqn == atom.fqn or len(shape) < 2 or row_shape(shape)[1] != width:
            continue
        weight = parse(one.fqn)
        there, number, alike = weight.layer, weight.expert, weight.pattern == mine.pattern
        if there == layer and number == expert and any({mine.kind, weight.kind} <= group for group in groups):
            ranked.append((0, one))
        elif alike and there == layer:
            ranked.append((1 + abs((number or 0) - (expert or 0)), one))
        elif alike and number == expert:
            ranked.append((1 + abs((there or 0) - (layer or 0)), one))
    ranked.sort(key=lambda one: one[0])
    return [one for _, one in ranked[:SIBLINGS]]


def _read(
    atom: Atom, found: Matched, names: Sequence[str], columns: bool, shape: tuple[int, ...], cosine: float
) -> SeenWeight:
    """Return the move that the matches show, if they clearly beat the own place and chance."""
    by_chance = found.chance
    if by_chance >= DULL:
        return SeenWeight(atom, None, False, cosine, 0.0)
    least = min(max(LIKE, by_chance + ROOM), DULL)
    elsewhere = (found.source != 0) | (found.place != found.rows)
    clear = elsewhere & (found.cosine >= least) & (found.cosine - found.own >= GAP)
    still = found.own >= LIKE
    share = float((clear | still).mean())
    different = len(np.unique(found.source[clear] * (1 << 40) + found.place[clear]))
    few = clear.mean() < FEW and not (
        _is_run(clear)
        and len(set((found.place - found.rows)[clear].tolist())) == 1
        and found.cosine[clear].min() >= SELF
    )
    if few or share < SOME or different < SURE * np.count_nonzero(clear):
        return SeenWeight(atom, None, False, cosine, share)
    source, place = _mended(found, clear | still)
    used = sorted(set(source.tolist()))
    by = set((found.rows - found.place)[clear].tolist())
    if columns and len(by) == 1:
        offset = by.pop()
        ends = slice(0, offset) if offset > 0 else slice(offset, None)
        if not (clear | still)[ends].any():  # a roll has them at the other end; in a flat line, they are in other rows
            text = f"values are shifted by {offset:+,} elements across rows"
            return SeenWeight(atom, Move(atom.fqn, shape, True, text=text, form={"form": "shift"}), True, cosine, share)
    blocks = tuple(_blocks(found, source, place, {number: k for k, number in enumerate(used)}))
    move = Move(atom.fqn, shape, columns, tuple(names[k] for k in used), blocks)
    if found.step > 1:
        move = replace(move, form={"sampled": found.step})
    elif used == [0]:
        form = find_form(np.arange(len(place)).astype(np.uint64), place.astype(np.uint64))
        if form is not None:
            text = form.say("column" if columns else "row", "columns" if columns else "rows")
            move = replace(move, text=text, form={"form": form.name, **form.detail})
    return SeenWeight(atom, move, share >= SURE, cosine, share)


def _mended(found: Matched, known: Array) -> tuple[Array, Array]:
    """Let rows without a clear match continue the row above (or else below)."""
    source, place = found.source.copy(), found.place.copy()
    known = known.copy()
    for way in (1, -1):
        order = range(len(place)) if way == 1 else range(len(place) - 1, -1, -1)
        for at in order:
            if not known[at] and 0 <= at - way < len(place) and known[at - way]:
                source[at], place[at] = source[at - way], place[at - way] + way * found.step
                known[at] = True
    return source, place


def _blocks(found: Matched, source: Array, place: Array, names: dict[int, int]) -> Iterator[MovedRows]:
    cut = np.flatnonzero((np.diff(place) != found.step) | (np.diff(source) != 0)) + 1
    edges = [0, *cut.tolist(), len(place)]
    for start, stop in pairwise(edges):
        first = int(found.rows[start])
        last = int(found.rows[stop]) if stop < len(place) else found.count
        yield MovedRows(first, last, names[int(source[start])], int(place[start]))


# ---- by how much -----------------------------------------------------------------------------------------------------


def others_stay(atoms: Atoms, role: str, lost: set[int]) -> bool:
    """Return whether the other weights are unchanged; an optimizer like Adam changes all weights."""
    others = [
        atom
        for atom in atoms.rows
        if atom.role == role and atom.tensor not in lost and len(atoms.before(atom).shape) > 1
    ]
    cosines = []
    for atom in others[:: max(len(others) // SAMPLED, 1)]:
        before, after = (_some(tensor) for tensor in atoms.tensors(atom))
        length = float(np.linalg.norm(before) * np.linalg.norm(after))
        cosines.append(float((before * after).sum()) / length if length > 0 else 1.0)
    return len(others) > len(lost) and min(cosines) >= SELF


def out_of_reach(atoms: Atoms, atom: Atom, updates: Mapping[str, Update]) -> bool:
    """Return whether the updates cannot have turned a weight that far: none moves an element by more than √K·lr."""
    update = updates.get(atom.owners[0])
    if update is None or update.most is None or update.bars("reach"):
        return False
    size = float(np.sqrt(np.mean(_some(atoms.before(atom)) ** 2)))
    return bool(update.most < TURN * size)


def _some(tensor: LazyTensor) -> Array:
    """Return the elements of some rows."""
    rows = row_shape(tensor.shape)[0]
    return some(tensor, np.arange(0, rows, rows // FEW_ROWS + 1)).ravel().astype(np.float64)
