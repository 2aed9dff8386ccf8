"""Where weights of after come from, of which the pair rules say that no update made them: rows, columns, other tensors.

::

    weights   rows of after ─ angle ─▶ rows of before    its own places: nothing to say
                                                         others: the order, and what it means          P17
              a window ─ correlation ─▶ the flat line    another place: a partition cut elsewhere      P17
                                                         none: not this run's values                   P18
    moments   laws of Adam hold with another tensor's older moments and not with their own             P17
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from workbench.analysis.patterns.forms import find_form
from workbench.core.scan import Tick
from workbench.doctor.echo_atoms import Atom, Atoms, kind_of, names_of
from workbench.doctor.echo_tags import TAGS, Move, gathered, said, tag_of
from workbench.doctor.evidence import Pair
from workbench.doctor.rows import Block, row_shape
from workbench.doctor.rows_line import stood
from workbench.doctor.rows_match import Matched, match
from workbench.doctor.rows_moments import descends
from workbench.doctor.sign import Outcome, Rule, Sign, register
from workbench.doctor.updates import between
from workbench.errors import WorkbenchError

__all__ = ["check_rows"]

SELF = 0.9  #: cosine of a row with itself, a few updates later (catalogue, 3.2)
GAP = 0.3  #: between the cosine with another row and with its own
LIKE = 0.6  #: cosine from which a row may be another one
SURE = 0.9  #: share of the rows
SOME = 0.5  #: share of the rows from which an order is told at all
SUSPECTS = 64  #: weights that are looked at
SIBLINGS = 16  #: tensors that each is searched in
ALONE = 0.3  #: cosine below which a tensor has nothing of the old one
WINDOWS = 8  #: odd weights of which a window is looked for in the line
LIST = 100

P17 = Rule(
    "P17", "values that come from other places", ("E1", "E2", "E3", "E4", "E5", "E6", "E9", "E10", "F7", "B5"), "pair",
    "a few updates turn a row of a weight little, and moments evolve from their own",
    f"error: {SURE:.0%} of the rows match others, cosine higher by {GAP:g} than with their own; or an exact law",
    "catalogue, E1 and B5", "error", "a layout converted on purpose, together with the code that reads it",
    "load with the layout that was written; bind the optimizer's state by name",
)  # fmt: skip
P18 = Rule(
    "P18", "values without likeness to before", ("A2", "A1", "D2"), "pair",
    "a few updates turn a weight little", f"cosine < {ALONE:g}, and no row or column of before is in it",
    "catalogue, A2", "warn", "very early in a training; a learning rate much too high",
    "look for keys that the load did not read",
)  # fmt: skip
register(P17, P18)


@dataclass(frozen=True, eq=False)
class _Seen:
    """A suspect: its move, or none; how sure; its cosine with before."""

    atom: Atom
    move: Move | None
    sure: bool
    cosine: float
    share: float


def check_rows(pair: Pair, suspects: Sequence[str], *, tick: Tick | None = None) -> Outcome:
    """Find where suspicious weights and moments came from.

    Args:
        pair: ``evidence.pair("before", "after")``, few updates apart.
        suspects: fqns that other rules flagged (P03 P04 P05 P06 P08 P12).
        tick: told the share of the suspects that is done.
    """
    found = Outcome()
    atoms = Atoms(pair)
    wanted = set(suspects)
    held = {atom.role for atom in atoms.rows}
    role = "master" if "master" in held else "param"
    of_weights = {atom.fqn for atom in atoms.rows if atom.role == role}
    weights = [
        atom for atom in atoms.rows
        if set(atom.owners) & wanted and len(atoms.before(atom).shape) > 1
        and atom.role == (role if atom.fqn in of_weights else "param")
    ]  # fmt: skip
    if len(weights) > SUSPECTS:
        found.not_checked["P17"] = f"{len(weights) - SUSPECTS:,} of {len(weights):,} suspicious weights"
        weights = [weights[k] for k in np.linspace(0, len(weights) - 1, SUSPECTS).astype(int).tolist()]
    seen = []
    for number, atom in enumerate(weights):
        try:
            seen.append(_look(atoms, atom))
        except WorkbenchError as error:
            found.not_checked["P17"] = f"{atom.fqn!r}: {error}"
        if tick is not None:
            tick((number + 1) / len(weights))
    odd = [one for one in seen if one.cosine < ALONE and not (one.move is not None and one.sure)]
    cut = _cut(atoms, odd, found.not_checked)
    if cut is not None:
        found.signs.append(cut)
        seen = []  # what else matches does so by the way
    found.signs += _weights(atoms, [one for one in seen if one.move is not None])
    found.signs += _strangers(atoms, [one for one in seen if one.move is None and one.cosine < ALONE], len(of_weights))
    if not found.signs:  # moments that moved with their weights need no words of their own
        states = [atom for atom in atoms.rows if set(atom.owners) & wanted and atom.role == "exp_avg_sq"]
        found.signs += _moments(atoms, descends(atoms, states, between(pair), found.not_checked))
    if wanted:
        found.checked["P17"] = f"{len(weights):,} weights, rows and columns"
        found.checked["P18"] = f"{len(weights):,} weights"
    else:
        found.not_checked.setdefault("P17", "no parameter is suspicious")
    return found


# ---- one weight ------------------------------------------------------------------------------------------------------


def _look(atoms: Atoms, atom: Atom) -> _Seen:
    before, after = atoms.tensors(atom)
    alone = match(after, [before], 0)
    middle = float(np.median(alone.own))
    if middle >= SELF:
        return _Seen(atom, None, True, middle, 0.0)
    family = [atom, *_family(atoms, atom)]
    rows = match(after, [atoms.before(one) for one in family], 0)
    seen = _read(atom, rows, [one.fqn for one in family], False, after.shape, middle)
    if seen.move is not None or len(after.shape) != 2:
        return seen
    columns = match(after, [before], 0, columns=True)
    return _read(atom, columns, [atom.fqn], True, after.shape, middle)


def _family(atoms: Atoms, atom: Atom) -> list[Atom]:
    """Tensors that it may have been mixed up with: of its layer first, then the same of the nearest layers, experts."""
    width = row_shape(atoms.before(atom).shape)[1]
    bare, layer, expert = names_of(atom.fqn)
    kind = kind_of(atom.fqn)
    groups = ({"gate", "up"}, {"q", "k", "v"})
    ranked = []
    for one in atoms.rows:
        shape = atoms.before(one).shape
        if one.role != atom.role or one.fqn == atom.fqn or len(shape) < 2 or row_shape(shape)[1] != width:
            continue
        other, there, number = names_of(one.fqn)
        if there == layer and number == expert and any({kind, kind_of(one.fqn)} <= group for group in groups):
            ranked.append((0, one))
        elif other == bare and there == layer:
            ranked.append((1 + abs((number or 0) - (expert or 0)), one))
        elif other == bare and number == expert:
            ranked.append((1 + abs((there or 0) - (layer or 0)), one))
    ranked.sort(key=lambda one: one[0])
    return [one for _, one in ranked[:SIBLINGS]]


def _read(
    atom: Atom, found: Matched, names: Sequence[str], columns: bool, shape: tuple[int, ...], cosine: float
) -> _Seen:  # fmt: skip
    """The move that matches tell."""
    elsewhere = (found.source != 0) | (found.place != found.rows)
    clear = elsewhere & (found.cosine >= LIKE) & (found.cosine - found.own >= GAP)
    still = found.own >= LIKE
    share = float((clear | still).mean())
    if not clear.any() or clear.mean() < 0.1 or share < SOME:
        return _Seen(atom, None, False, cosine, share)
    source, place = _mended(found, clear | still)
    used = sorted(set(source.tolist()))
    blocks = tuple(_blocks(found, source, place, {number: k for k, number in enumerate(used)}))
    move = Move(atom.fqn, shape, columns, tuple(names[k] for k in used), blocks)
    if used == [0] and found.step == 1:
        form = find_form(np.arange(len(place)).astype(np.uint64), place.astype(np.uint64))
        if form is not None:
            text = form.say("column" if columns else "row", "columns" if columns else "rows")
            move = replace(move, text=text, form={"form": form.name, **form.detail})
    return _Seen(atom, move, share >= SURE, cosine, share)


def _mended(found: Matched, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that match nothing clearly go on where the row above (else below) was."""
    source, place = found.source.copy(), found.place.copy()
    known = known.copy()
    for way in (1, -1):
        order = range(len(place)) if way == 1 else range(len(place) - 1, -1, -1)
        for at in order:
            if not known[at] and 0 <= at - way < len(place) and known[at - way]:
                source[at], place[at] = source[at - way], place[at - way] + way * found.step
                known[at] = True
    return source, place


def _blocks(found: Matched, source: np.ndarray, place: np.ndarray, names: dict[int, int]) -> Iterator[Block]:
    cut = np.flatnonzero((np.diff(place) != found.step) | (np.diff(source) != 0)) + 1
    edges = [0, *cut.tolist(), len(place)]
    for start, stop in pairwise(edges):
        first = int(found.rows[start])
        last = int(found.rows[stop]) if stop < len(place) else int(found.rows[-1]) + found.step
        yield Block(first, last, names[int(source[start])], int(place[start]))


# ---- signs -----------------------------------------------------------------------------------------------------------


def _weights(atoms: Atoms, seen: Sequence[_Seen]) -> Iterator[Sign]:
    tags: dict[str, list[_Seen]] = {}
    for one in seen:
        assert one.move is not None
        tags.setdefault(tag_of(atoms.facts, one.move), []).append(one)
    for tag, some in gathered(tags).items():
        causes, words = TAGS[tag]
        first = some[0]
        assert first.move is not None
        share = min(one.share for one in some)
        text = f"{words} in {_count(some)}: {said(first.move)} ({share:.0%} or more of the rows match)"
        blocks = [[b.start, b.stop, first.move.sources[b.source], b.first] for b in first.move.blocks[:16]]
        grave = None if sum(one.sure for one in some) > len(some) / 2 else "warn"
        evidence = {"in": "before → after", "tag": tag, "share": share, "blocks": blocks, "form": dict(first.move.form)}
        yield _sign(P17, [one.atom for one in some], text, causes, grave, evidence)


def _cut(atoms: Atoms, seen: Sequence[_Seen], not_checked: dict[str, str]) -> Sign | None:
    """Whether most of the odd ones are other parts of the flat line; of few, one is enough."""
    if not seen:
        return None
    looked = seen[:: max(len(seen) // WINDOWS, 1)]
    line = [atom for atom in atoms.rows if atom.role == seen[0].atom.role]
    try:
        found = stood([atoms.tensors(one.atom)[1] for one in looked], [atoms.before(atom) for atom in line])
    except WorkbenchError as error:
        not_checked["line"] = str(error)
        return None
    shifts = [
        (one, place.at, line[place.number].fqn, place.place)
        for one, place in zip(looked, found, strict=True)
        if place is not None
        and place.cosine >= SELF
        and (line[place.number].tensor != one.atom.tensor or place.at != place.place)
    ]
    if len(shifts) < 2 or 2 * len(shifts) <= len(looked):
        return None
    by = {at - there for one, at, name, there in shifts if name == one.atom.fqn}
    one, at, name, there = shifts[0]
    if len(by) == 1 and all(name == one.atom.fqn for one, _, name, _ in shifts):
        text = f"values of {_count(seen)} are shifted by {next(iter(by)):+,} elements across tensors"
        causes = ("E7", "E13")
    else:
        text = (
            f"values of {_count(seen)} are those of a flat line cut at other places: those at {at:,} of "
            f"{one.atom.fqn!r} were at {there:,} of {name!r}"
        )
        causes = ("E13", "E7")
    evidence: dict[str, object] = {"in": "before → after", "windows": [[o.atom.fqn, a, n, t] for o, a, n, t in shifts]}
    return _sign(P17, [one.atom for one in seen], text, causes, None, evidence)


def _strangers(atoms: Atoms, seen: Sequence[_Seen], of: int) -> Iterator[Sign]:
    if not seen:
        return
    high = max(one.cosine for one in seen)
    causes = ("A1", "A2", "D2") if 2 * len(seen) > of else ("A2", "D2")
    text = f"no row or column of before is in {_count(seen)}: cosine of their rows {high:.2g} at most"
    yield _sign(P18, [one.atom for one in seen], text, causes, None, {"in": "before → after", "cosine": high})


def _moments(atoms: Atoms, moved: Sequence[tuple[Atom, Atom]]) -> Iterator[Sign]:
    if moved:
        one, source = moved[0]
        text = (
            f"second moments of {len(moved):,} tensors can have evolved from another's and not from their own: "
            f"those of {one.fqn!r} from those of {source.fqn!r}"
        )
        pairs = [[one.fqn, source.fqn] for one, source in moved[:LIST]]
        yield _sign(P17, [one for one, _ in moved], text, ("B5", "E13"), None, {"in": "before → after", "from": pairs})


def _count(seen: Sequence[_Seen]) -> str:
    return f"{len(seen):,} tensors" if len(seen) > 1 else "one tensor"


def _sign(
    rule: Rule,
    atoms: Sequence[Atom],
    text: str,
    causes: tuple[str, ...],
    grave: str | None,
    evidence: dict[str, object],
) -> Sign:
    owners = list(dict.fromkeys(name for atom in atoms for name in atom.owners))
    return rule.sign(text, evidence, owners[:LIST], severity=grave, hit=len(owners), of=len(owners), causes=causes)
