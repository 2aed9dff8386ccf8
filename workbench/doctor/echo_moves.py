"""Weights and states whose rows, columns or elements are all there, at other places: which layout was misread.

::

    optimizer alone moved          moments: bound to other parameters (B5); masters too: a partition cut elsewhere (E13)
    rows of one other tensor       layer (E9) · expert (E10) · gate ↔ up (E3) · q, k, v (E4)
    rows of several                gate and up (E2) · q, k and v (E4)
    own rows or columns            vocabulary (F7 E11) · rotary halves (E5) · heads (E6) · ranks (E1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from workbench.doctor.echo_atoms import MASTERS, MOMENTS, WEIGHTS, Atoms, kind_of, names_of
from workbench.doctor.echo_look import Look
from workbench.doctor.echo_rules import ECHO
from workbench.doctor.rows import blocks_text
from workbench.doctor.sign import Sign

__all__ = ["judge_moves"]

LIST = 100
ATTENTION = {"q", "k", "v", "qkv", "o"}
#: Where a tag leads: its causes, likeliest first, and its words.
TAGS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "layer": (("E9",), "hold another layer's values"),
    "expert": (("E10",), "hold another expert's values"),
    "gate_up": (("E3", "E2"), "gate and up are exchanged"),
    "gate_up_mixed": (("E2",), "rows of gate and up are mixed"),
    "qkv": (("E4", "E1"), "rows of query, key and value are mixed"),
    "heads": (("E6", "E1"), "heads stand in another order"),
    "rope": (("E5", "E6"), "rows within a head stand in another order"),
    "vocab": (("F7", "E1"), "rows of the vocabulary moved"),
    "padding": (("E11", "F7"), "padding rows stand among trained ones of the vocabulary"),
    "ranks": (("E1",), "shards are joined in another order"),
    "name": (("E9", "A1"), "hold another tensor's values"),
    "mixed": (("E1", "E13"), "rows of several tensors are mixed"),
}


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
    rule = "R02" if all(_whole(one) for one in looks) else "R04" if all(_own(one) for one in looks) else "R13"
    what = "masters and moments" if masters else "moments"
    first = looks[0]
    text = f"{what} of {_count(looks)} stand elsewhere and their weights do not: {_said(first)}"
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
        tags.setdefault(_tag(atoms, one), []).append(one)
    for mixed, plain in (("gate_up_mixed", "gate_up"),):
        if mixed in tags:
            tags[mixed] += tags.pop(plain, [])
    if "ranks" in tags:  # heads and tokens moved with the ranks that held them
        for tag in ("heads", "vocab", "padding", "rope"):
            tags["ranks"] += tags.pop(tag, [])
    if "layer" in tags:
        tags["layer"] += tags.pop("name", [])
    for tag, looks in tags.items():
        causes, words = TAGS[tag]
        names = {one.atom.fqn for one in looks}
        moved_too = [one for one in others if one.atom.fqn in names]
        yield from _signs(atoms, tag, causes, words, looks, moved_too)


def _signs(
    atoms: Atoms, tag: str, causes: tuple[str, ...], words: str, looks: Sequence[Look], too: Sequence[Look]
) -> Iterator[Sign]:
    by_rule: dict[str, list[Look]] = {}
    for one in looks:
        rule = "R05" if one.kind == "columns" else "R02" if _whole(one) else "R04" if _own(one) else "R13"
        by_rule.setdefault(rule, []).append(one)
    if "R13" in by_rule and "R02" in by_rule:  # of a mixture some may happen to be whole
        by_rule["R13"] += by_rule.pop("R02")
    stored = {atom.role for atom in atoms.rows if atom.role in (*MASTERS, *MOMENTS)}
    for rule, some in by_rule.items():
        alike = {one.atom.role for one in too}
        stay = ", ".join(sorted(stored - alike))
        tail = "masters and moments with them" if not stay and stored else f"not so their {stay}" if stay else ""
        text = f"{words} in {_count(some)}: {_said(some[0])}{'; ' + tail if tail else ''}"
        if tag == "expert":
            text += _routers(atoms, some, looks)
        form = {name: value for name, value in some[0].form.items() if name not in ("order", "moves")}
        blocks = [[b.start, b.stop, some[0].sources[b.source], b.first] for b in some[0].blocks[:16]]
        yield _sign(rule, atoms, [*some, *too], text, causes, tag=tag, form=form, blocks=blocks)


def _tag(atoms: Atoms, one: Look) -> str:
    kind = kind_of(one.atom.fqn)
    if one.kind == "columns":
        return "heads" if kind == "o" and _heads(atoms, one) else "ranks"
    if _own(one):
        return _own_tag(atoms, one, kind)
    kinds = {kind_of(name) for name in one.sources} | {kind}
    mine = names_of(one.atom.fqn)
    theirs = [names_of(name) for name in one.sources]
    same_layer = all(other[1] == mine[1] and other[2] == mine[2] for other in theirs)
    if same_layer and kinds <= {"gate", "up"}:
        return "gate_up" if _whole(one) else "gate_up_mixed"
    if same_layer and kinds <= {"q", "k", "v"}:
        return "qkv"
    if all(other[0] == mine[0] for other in theirs):
        if all(other[1] == mine[1] for other in theirs):
            return "expert"
        return "layer"
    return "name" if _whole(one) else "mixed"


def _own_tag(atoms: Atoms, one: Look, kind: str) -> str:
    if kind in ("embed", "head"):
        return _vocabulary(atoms, one)
    if kind in ATTENTION and kind != "o":
        return "heads" if _heads(atoms, one) else "rope"
    if len(one.row.shape_b) == 3 and _by(one, one.row.shape_b[1]):
        return "expert"
    return "ranks"


def _vocabulary(atoms: Atoms, one: Look) -> str:
    """Shifted, or padded rank by rank: whole ends of a rank's part come from the padding at the end."""
    if one.form.get("form") in ("halves", "blocks"):
        return "ranks"
    vocab, rows = atoms.facts.vocab, one.row.shape_b[0]
    blocks = one.blocks
    if len(blocks) < 3 or blocks[0].start != blocks[0].first:
        return "vocab"
    for block in blocks[1:]:
        late = block.first >= vocab if vocab else block.first > block.start and block.start < rows // 2 + 1
        parts = {round(rows / n * k) for n in (2, 4, 8, 16) for k in range(1, n)} if rows > 16 else set()
        if late and block.start < (vocab or rows) and any(abs(block.stop - part) <= 1 for part in parts):
            return "padding"
    return "vocab"


def _heads(atoms: Atoms, one: Look) -> bool:
    """Whether only whole heads moved (of their own size, where it is known)."""
    size = atoms.facts.head_dim
    if one.kind == "columns":
        unit = one.form.get("size") or one.form.get("unit") or 1
        return size is not None and int(unit) % size == 0
    return _by(one, size) if size else one.form.get("unit") != 1


def _by(one: Look, unit: int) -> bool:
    """Whether rows moved in blocks of that many."""
    return bool(one.blocks) and all(
        block.start % unit == 0 and block.first % unit == 0 and (block.stop - block.start) % unit == 0
        for block in one.blocks
    )


def _routers(atoms: Atoms, some: Sequence[Look], looks: Sequence[Look]) -> str:
    layers = {names_of(one.atom.fqn)[1] for one in some}
    routers = [a.fqn for a in atoms.rows if a.role == "param" and kind_of(a.fqn) == "router"
               and names_of(a.fqn)[1] in layers]  # fmt: skip
    went = {one.atom.fqn for one in looks}
    still = [name for name in routers if name not in went]
    return f"; the router's rows stay ({still[0]!r})" if still else ""


# ---- words -----------------------------------------------------------------------------------------------------------


def _whole(one: Look) -> bool:
    """One other tensor, row by row."""
    return len(one.sources) == 1 and one.sources[0] != one.atom.fqn and all(b.start == b.first for b in one.blocks)


def _own(one: Look) -> bool:
    return not one.sources or one.sources == (one.atom.fqn,)


def _said(one: Look) -> str:
    if _whole(one):
        return f"{one.atom.fqn!r} holds {one.sources[0]!r}"
    said = one.text or blocks_text(one.blocks, [repr(name) for name in one.sources])
    return f"in {one.atom.fqn!r} {said}"


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
