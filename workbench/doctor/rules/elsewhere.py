"""Find where weights came from that no update could have produced: rows, columns or other tensors of before.

::

    weights   rows of after ─ angle ─▶ rows of before    its own places: no sign
                                                         others: the order, and its meaning            P17
              a window ─ correlation ─▶ the flat line    another place: a partition cut elsewhere      P17
                                                         none: values from another run                 P18
    moments   satisfy Adam's laws with another tensor's earlier moments and not with their own         P17
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from workbench.core.words import plural
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.sign import Inapplicable, Outcome, Rule, Sign, register
from workbench.doctor.origins.atoms import Atom, Atoms
from workbench.doctor.origins.index import MovedRows, row_shape
from workbench.doctor.origins.line import WINDOW, stood
from workbench.doctor.origins.moments import Descent, descends
from workbench.doctor.origins.seen import GAP, SELF, SURE, SeenWeight, others_stay, out_of_reach, see, see_vector
from workbench.doctor.origins.tags import TAGS, Move, gathered, move_text, shared_sources, singular, tag_of
from workbench.doctor.passes.pair import PairState, Update
from workbench.doctor.passes.updates import between
from workbench.errors import WorkbenchError

MOSTLY = 0.85  #: share of the rows of a tensor
SUSPECTS = 64  #: weights that are examined
ALONE = 0.3  #: cosine below which a tensor has nothing in common with the old one
WINDOWS = 8  #: suspicious weights whose values are searched for in the concatenated model
FRESH = 0.8  #: β2^k from which second moments are mostly the old ones
LIST = 100

P17 = Rule(
    "P17", "values that come from other places", ("E1", "E2", "E3", "E4", "E5", "E6", "E9", "E10", "F7", "B5"),
    "pair", "a few updates turn a row of a weight only a little, and moments evolve from their own old values",
    f"error: {SURE:.0%} of the rows match others, cosine higher by {GAP:g} than with their own; or an exact law",
    "catalogue, E1 and B5", "error", "a layout converted on purpose, together with the code that reads it",
    "load with the layout that was written; assign the optimizer's state by name"
)  # fmt: skip
P18 = Rule(
    "P18", "values unlike any of before", ("A2", "A1", "D2"), "pair", "a few updates turn a weight only a little",
    f"cosine < {ALONE:g}, and no row or column of before is in it", "catalogue, A2", "warn",
    "very early in training; a learning rate much too high", "look for keys that the load did not read"
)  # fmt: skip
register(P17, P18)


def check_rows(pair: Pair, suspects: Sequence[str], turned: Sequence[str] = ()) -> Outcome:
    """Find where suspicious weights and moments came from.

    Args:
        pair: ``evidence.pair("before", "after")``, few updates apart.
        suspects: fqns that other rules flagged (P03 P04 P05 P06 P08 P12).
        turned: fqns of weights that have nothing in common with the old ones, which their updates may have done.
    """
    found = Outcome()
    atoms = Atoms(pair)
    wanted = set(suspects)
    held = {atom.role for atom in atoms.rows}
    role = "master" if "master" in held else "param"
    of_weights = {atom.fqn for atom in atoms.rows if atom.role == role}
    weights = [
        atom
        for atom in atoms.rows
        if set(atom.owners) & wanted.union(turned)
        and len(atoms.before(atom).shape) > 1
        and atom.role == (role if atom.fqn in of_weights else "param")
    ]
    if len(weights) > SUSPECTS:
        found.not_checked["P17"] = f"{len(weights) - SUSPECTS:,} of {len(weights):,} suspicious weights"
        weights = [weights[k] for k in np.linspace(0, len(weights) - 1, SUSPECTS).astype(int).tolist()]
    seen = []
    for atom in weights:
        try:
            seen.append(see(atoms, atom))
        except WorkbenchError as error:
            found.not_checked["P17"] = f"{atom.fqn!r}: {error}"
    updates = between(pair)
    seen += _vectors(atoms, wanted, of_weights, role, updates, found.not_checked)
    odd = [one for one in seen if one.cosine < ALONE and not (one.move is not None and one.sure)]
    whole, cut = _line(atoms, odd, found.not_checked)
    if cut is not None:
        found.signs.append(cut)
        seen = []  # any other match is incidental
    seen = [whole.get(one.atom.tensor, one) for one in seen]
    found.signs += _weights(atoms, [replace(one, move=_mostly(one.move)) for one in seen if one.move is not None])
    lost = [one for one in seen if one.move is None and one.cosine < ALONE and set(one.atom.owners) & wanted]
    calm = bool(lost) and others_stay(atoms, role, {one.atom.tensor for one in lost})
    strangers = [one for one in lost if calm or out_of_reach(atoms, one.atom, updates)]
    if len(strangers) < len(lost):
        found.not_checked["P18"] = (
            f"{plural(len(lost) - len(strangers), 'weight')} may have turned that far through their updates"
        )
    found.signs += _strangers(strangers, len(of_weights))
    if not found.signs:  # moments that moved with their weights need no sign of their own
        states = [atom for atom in atoms.rows if set(atom.owners) & wanted and atom.role == "exp_avg_sq"]
        moved = descends(atoms, states, updates, found.not_checked)
        found.signs += _moments(atoms, moved)
        if not moved:
            found.signs += _line_of_moments(atoms, states, updates, found.not_checked)
    if wanted or turned:
        found.checked["P17"] = f"{plural(len(weights), 'weight')}, rows and columns"
        found.checked["P18"] = f"{plural(len(weights), 'weight')}"
    else:
        found.not_checked.setdefault("P17", Inapplicable("no parameter is suspicious"))
    return found


def turned_weights(states: Mapping[str, PairState]) -> list[str]:
    """Return the weights that have nothing in common with the old ones, if most weights are still like theirs."""
    cosines = {name: cosine for name, sums in states.items() if (cosine := sums.cosine) is not None}
    found = [name for name, cosine in cosines.items() if cosine < ALONE]
    return found if found and median(cosines.values()) >= SELF else []


def _vectors(
    atoms: Atoms,
    wanted: set[str],
    of_weights: set[str],
    role: str,
    updates: Mapping[str, Update],
    not_checked: dict[str, str],
) -> Iterator[SeenWeight]:
    """Yield suspicious vectors that come from other places."""
    looked = [
        atom
        for atom in atoms.rows
        if atom.owners[0] in wanted
        and len(atoms.before(atom).shape) == 1
        and atom.role == (role if atom.fqn in of_weights else "param")
    ]
    for atom in looked[:SUSPECTS]:
        try:
            one = see_vector(atoms, atom, updates[atom.owners[0]]) if atom.owners[0] in updates else None
        except WorkbenchError as error:
            not_checked["P17"] = f"{atom.fqn!r}: {error}"
            continue
        if one is not None:
            yield one


def _mostly(move: Move) -> Move:
    """Return the move of nearly all rows, without the few rows that fit other places better after some updates."""
    if move.columns or not move.sources or not move.blocks:
        return move
    mine = [block for block in move.blocks if move.sources[block.source] == move.fqn]
    moved = sum(block.stop - block.start for block in mine if block.start != block.first)
    strays = sum(block.stop - block.start for block in move.blocks) - sum(block.stop - block.start for block in mine)
    if 0 < strays <= (1 - MOSTLY) * max(block.stop for block in move.blocks) and moved > strays:
        blocks = tuple(replace(block, source=0) for block in mine)
        return replace(move, sources=(move.fqn,), blocks=blocks)
    rows = Counter[int]()
    for block in move.blocks:
        if block.start == block.first:
            rows[block.source] += block.stop - block.start
    if not rows:
        return move
    source, count = rows.most_common(1)[0]
    last = max(block.stop for block in move.blocks)
    if move.sources[source] == move.fqn or count < MOSTLY * last:
        return move
    return replace(move, sources=(move.sources[source],), blocks=(MovedRows(0, last, 0, 0),))


# ---- signs -----------------------------------------------------------------------------------------------------------


def _weights(atoms: Atoms, seen: Sequence[SeenWeight]) -> Iterator[Sign]:
    tags: dict[str, list[SeenWeight]] = {}
    for one in seen:
        assert one.move is not None
        tags.setdefault(tag_of(atoms.facts, one.move), []).append(one)
    for tag, some in gathered(tags).items():
        words = TAGS[tag]
        first = some[0]
        assert first.move is not None
        share = min(one.share for one in some)
        words = words if len(some) > 1 else singular(words)
        text = f"{_count(some)} {words}: {move_text(first.move)} ({_share(share)} of the rows match)"
        every = first.move.form.get("sampled")
        text += shared_sources(one.move for one in some if one.move is not None)
        text += f"; one in {every} was examined, so edges are exact to {every}" if every else ""
        blocks = [[b.start, b.stop, first.move.sources[b.source], b.first] for b in first.move.blocks[:16]]
        grave = None if sum(one.sure for one in some) > len(some) / 2 else "warn"
        evidence = {"in": "before → after", "tag": tag, "share": share, "blocks": blocks, "form": dict(first.move.form)}
        yield _sign(P17, [one.atom for one in some], text, (), grave, evidence)


def _line(
    atoms: Atoms, seen: Sequence[SeenWeight], not_checked: dict[str, str], floors: Mapping[int, float] | None = None
) -> tuple[dict[int, SeenWeight], Sign | None]:
    """Return the weights that are another complete tensor, and a sign if most are other parts of the flat line.

    Args:
        floors: tensor → the least share of its elements that the updates leave, of second moments.
    """
    long = [one for one in seen if atoms.before(one.atom).numel() >= 2 * WINDOW]
    looked = long[:: max(len(long) // WINDOWS, 1)]
    if not looked:
        return {}, None
    line = [atom for atom in atoms.rows if atom.role == seen[0].atom.role]
    try:
        least = [floors[one.atom.tensor] for one in looked] if floors is not None else ()
        found = stood([atoms.tensors(one.atom)[1] for one in looked], [atoms.before(atom) for atom in line], least)
    except WorkbenchError as error:
        not_checked["line"] = str(error)
        return {}, None
    whole: dict[int, SeenWeight] = {}
    shifts: list[tuple[SeenWeight, int, str, int]] = []
    for one, place in zip(looked, found, strict=True):
        if place is None or place.cosine < SELF:
            continue
        source, shape = line[place.number], atoms.before(one.atom).shape
        if place.at != place.place or atoms.before(source).shape != shape:
            shifts.append((one, place.at, source.fqn, place.place))
        elif source.tensor != one.atom.tensor:
            rows = row_shape(shape)[0]
            move = Move(one.atom.fqn, shape, False, (source.fqn,), (MovedRows(0, rows, 0, 0),))
            whole[one.atom.tensor] = SeenWeight(one.atom, move, False, one.cosine, 1.0)
    count = len(shifts) + len(whole)  # a part of a line cut at other places may coincide with a tensor
    if not shifts or count < 2 or 2 * count <= len(looked):
        return whole, None
    by = {at - there for one, at, name, there in shifts if name == one.atom.fqn}
    one, at, name, there = shifts[0]
    if len(by) == 1 and all(name == one.atom.fqn for one, _, name, _ in shifts):
        if not any(next(iter(by)) % row_shape(atoms.before(one.atom).shape)[1] for one, *_ in shifts):
            return whole, None  # complete rows of their own
        text = f"values of {_count(seen)} are shifted by {next(iter(by)):+,} elements across tensors"
        causes = ("E7", "E13")
    else:
        text = (
            f"values of {_count(seen)} come from a flat line cut at other places: those at {at:,} of "
            f"{one.atom.fqn!r} were at {there:,} of {name!r}"
        )
        causes = ("E13", "E7")
    evidence: dict[str, object] = {"in": "before → after", "windows": [[o.atom.fqn, a, n, t] for o, a, n, t in shifts]}
    return whole, _sign(P17, [one.atom for one in seen], text, causes, None, evidence)


def _line_of_moments(
    atoms: Atoms, states: Sequence[Atom], updates: Mapping[str, Update], not_checked: dict[str, str]
) -> list[Sign]:
    """Check whether second moments are other parts of the optimizer's flat line; many updates hide this."""
    known = [(atom, updates.get(atom.owners[0])) for atom in states]
    fresh = [
        SeenWeight(atom, None, False, 0.0, 0.0)
        for atom, one in known
        if one is not None and one.betas is not None and one.betas[1] ** one.k > FRESH
    ]
    floors = {atom.tensor: one.fading**one.k for atom, one in known if one is not None and one.betas is not None}
    cut = _line(atoms, fresh, not_checked, floors)[1] if fresh else None
    return [] if cut is None else [replace(cut, evidence={**cut.evidence, "role": "exp_avg"})]


def _strangers(seen: Sequence[SeenWeight], of: int) -> Iterator[Sign]:
    if not seen:
        return
    high = max(one.cosine for one in seen)
    causes = ("A1", "A2", "D2") if 2 * len(seen) > of else ("A2", "D2")
    text = (
        f"in {_count(seen)}, no row or column of before was recognized: the median cosine similarity of the rows with "
        f"their old values is at most {high:.2g}"
    )
    yield _sign(P18, [one.atom for one in seen], text, causes, None, {"in": "before → after", "cosine": high})


def _moments(atoms: Atoms, moved: Sequence[Descent]) -> Iterator[Sign]:
    if not moved:
        return
    orphans = [one for one in moved if one.orphan]
    if orphans:
        first = orphans[0]
        text = (
            f"second moments of {plural(len(orphans), 'tensor')} can have evolved from another tensor's but not from "
            f"their own: those of {first.atom.fqn!r} from those of {first.parent.fqn!r}"
        )
    else:
        first = moved[0]
        text = (
            f"second moments of {plural(len(moved), 'tensor')} continue another tensor's: those of {first.atom.fqn!r} "
            f"stay above the floor of {first.parent.fqn!r}, which in {first.tested:,} of the examined elements is over "
            "twice what their own would have become"
        )
    pairs = [[one.atom.fqn, one.parent.fqn] for one in moved[:LIST]]
    yield _sign(P17, [one.atom for one in moved], text, ("B5", "E13"), None, {"in": "before → after", "from": pairs})


def _share(found: float) -> str:
    return "all" if found == 1 else f"at least {math.floor(100 * found)}%"


def _count(seen: Sequence[SeenWeight]) -> str:
    return f"{plural(len(seen), 'tensor')}" if len(seen) > 1 else "one tensor"


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
