"""Weights and states whose rows, columns or elements are all there, at other places: which layout was misread.

::

    the optimizer alone moved    moments: bound to other parameters (B5); masters too: a partition cut elsewhere (E13)
    a flat line, cut elsewhere   shifted by some elements (E7), or other tensors' (E13)
    weights moved                which layout, told by their names: workbench.doctor.echo.tags
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from workbench.doctor.echo.atoms import MASTERS, MOMENTS, WEIGHTS, Atoms, kind_of, names_of
from workbench.doctor.echo.look import Look
from workbench.doctor.echo.rules import ECHO
from workbench.doctor.echo.tags import TAGS, gathered, own, said, tag_of, whole
from workbench.doctor.sign import Sign

__all__ = ["judge_moves"]

LIST = 100


def judge_moves(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    """Signs of looks of the kinds ``moved``, ``columns`` and ``flat``."""
    moved = [one for one in looks if one.kind in ("moved", "columns")]
    flat = [one for one in looks if one.kind == "flat"]
    if flat:
        roles = {one.atom.role for one in flat}
        with_it = [one for one in moved if one.atom.role in roles]
        yield _line(atoms, flat, with_it)
        moved = [one for one in moved if one.atom.role not in roles]
    weights = [one for one in moved if one.atom.role in WEIGHTS]
    others = [one for one in moved if one.atom.role not in WEIGHTS]
    stored = {atom.fqn for atom in atoms.rows if atom.role in WEIGHTS}
    went = {one.atom.fqn for one in weights}
    # states that moved while their weights, which are stored, did not
    alone = [one for one in others if one.atom.fqn in stored and one.atom.fqn not in went]
    if alone:
        yield _optimizer(atoms, alone)
    lead = weights or [one for one in others if one.atom.fqn not in stored and one.atom.role in MASTERS]
    yield from _layout(atoms, lead, others)


# ---- the optimizer alone ---------------------------------------------------------------------------------------------


def _optimizer(atoms: Atoms, looks: Sequence[Look]) -> Sign:
    masters = any(one.atom.role in MASTERS for one in looks)
    causes = ("E13", "E7", "B5") if masters else ("B5", "E13")
    rule = "R02" if all(whole(one.move) for one in looks) else "R04" if all(own(one.move) for one in looks) else "R13"
    what = "masters and moments" if masters else "moments"
    first = looks[0]
    text = f"{what} of {_count(looks)} stand elsewhere and their weights do not: {said(first.move)}"
    return _sign(rule, atoms, looks, text, causes, form=dict(first.form))


def _line(atoms: Atoms, flat: Sequence[Look], with_it: Sequence[Look]) -> Sign:
    shifts = Counter(
        at - first for one in flat for at, source, first in one.windows if source == one.atom.fqn and at != first
    )
    windows = sum(len(one.windows) for one in flat)
    order = {atom.tensor: number for number, atom in enumerate(atoms.rows)}
    looks = sorted([*flat, *with_it], key=lambda one: order[one.atom.tensor])
    roles = _roles(looks)
    by, count = shifts.most_common(1)[0] if shifts else (0, 0)
    if 2 * count > windows:
        text = f"{roles} are shifted by {by:+,} elements from {looks[0].atom.fqn!r} on, across tensors"
        return _sign("R09", atoms, looks, text, ("E7", "E13"), shift=by, first=looks[0].atom.fqn)
    at, source, first = next((w for one in flat for w in one.windows if w[1] != one.atom.fqn), flat[0].windows[0])
    text = (
        f"{roles} of {_count(looks)} are the old elements cut at other places: those at {at:,} of "
        f"{flat[0].atom.fqn!r} were at {first:,} of {source!r}"
    )
    return _sign("R09", atoms, looks, text, ("E13", "E7", "B5"), at=at, source=source, was_at=first)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _layout(atoms: Atoms, lead: Sequence[Look], others: Sequence[Look]) -> Iterator[Sign]:
    tags: dict[str, list[Look]] = {}
    for one in lead:
        tags.setdefault(tag_of(atoms.facts, one.move), []).append(one)
    for tag, looks in gathered(tags).items():
        causes, words = TAGS[tag]
        names = {one.atom.fqn for one in looks}
        moved_too = [one for one in others if one.atom.fqn in names]
        yield from _signs(atoms, tag, causes, words, looks, moved_too)


def _signs(
    atoms: Atoms, tag: str, causes: tuple[str, ...], words: str, looks: Sequence[Look], too: Sequence[Look]
) -> Iterator[Sign]:
    by_rule: dict[str, list[Look]] = {}
    for one in looks:
        rule = "R05" if one.kind == "columns" else "R02" if whole(one.move) else "R04" if own(one.move) else "R13"
        by_rule.setdefault(rule, []).append(one)
    if "R13" in by_rule and "R02" in by_rule:  # of a mixture some may happen to be whole
        by_rule["R13"] += by_rule.pop("R02")
    stored = {atom.role for atom in atoms.rows if atom.role in (*MASTERS, *MOMENTS)}
    for rule, some in by_rule.items():
        alike = {one.atom.role for one in too}
        stay = ", ".join(sorted(stored - alike))
        tail = "masters and moments with them" if not stay and stored else f"not so their {stay}" if stay else ""
        text = f"{words} in {_count(some)}: {said(some[0].move)}{'; ' + tail if tail else ''}"
        if tag == "expert":
            text += _routers(atoms, some, looks)
        form = {name: value for name, value in some[0].form.items() if name not in ("order", "moves")}
        blocks = [[b.start, b.stop, some[0].sources[b.source], b.first] for b in some[0].blocks[:16]]
        yield _sign(rule, atoms, [*some, *too], text, causes, tag=tag, form=form, blocks=blocks)


def _routers(atoms: Atoms, some: Sequence[Look], looks: Sequence[Look]) -> str:
    layers = {names_of(one.atom.fqn)[1] for one in some}
    routers = [a.fqn for a in atoms.rows if a.role == "param" and kind_of(a.fqn) == "router"
               and names_of(a.fqn)[1] in layers]  # fmt: skip
    went = {one.atom.fqn for one in looks}
    still = [name for name in routers if name not in went]
    return f"; the router's rows stay ({still[0]!r})" if still else ""


# ---- words -----------------------------------------------------------------------------------------------------------


def _count(looks: Sequence[Look]) -> str:
    count = len({one.atom.fqn for one in looks})
    return f"{count:,} tensors" if count > 1 else "one tensor"


def _roles(looks: Sequence[Look]) -> str:
    return ", ".join(sorted({one.atom.role for one in looks}))


def _sign(
    rule: str, atoms: Atoms, looks: Sequence[Look], text: str, causes: tuple[str, ...], **evidence: object
) -> Sign:
    owners = list(dict.fromkeys(name for one in looks for name in one.atom.owners))
    roles = {one.atom.role for one in looks}
    of = len({owner for atom in atoms.rows if atom.role in roles for owner in atom.owners})
    found = {"in": "before → echo", "roles": sorted(roles),
             "atoms": list(dict.fromkeys(one.atom.fqn for one in looks))[:LIST], **evidence}  # fmt: skip
    return ECHO[rule].sign(text, found, owners[:LIST], hit=len(owners), of=of, causes=causes)
