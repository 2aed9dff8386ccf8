"""Turn the changes of a load into signs: one for each form, over all parameters that have it.

::

    looks   exp_avg {52: zero}   param {2: moved, another layer's rows}   param {1: flip}
              │                      │                                      │
    signs   R03 became zero        R02 hold another layer's values        R06 one bit is flipped

Every change of a stored quantity is in one sign. The ledger, not this module, decides which cause it supports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from workbench.core.words import plural
from workbench.doctor.ledger.roles import AVERAGES, BUFFERS, MASTERS, MOMENTS, SECOND, STATE, WEIGHTS, quantity
from workbench.doctor.ledger.sign import Rule, Sign, agreeing, register
from workbench.doctor.origins.atoms import Atoms
from workbench.doctor.origins.look import AtomLook
from workbench.doctor.origins.tags import TAGS, gathered, move_text, own, shared_sources, tag_of, whole
from workbench.doctor.origins.where import where
from workbench.names.weights import parse

TRIP = "round trip"
EQUAL = "loading makes no update: values stay equal bit for bit"

_RULES = (
    Rule("R02", "another tensor's values", ("E9", "E3", "B5", "E10"), "echo", EQUAL,
         "exact: all rows come from one other tensor of before", TRIP, "error", "tensors renumbered on purpose",
         "load by name, and check the numbering of layers, experts and optimizer parameters"),
    Rule("R03", "state that is fresh, lost or not finite", ("B1", "B4", "B3", "A5", "D9", "G1"), "echo", EQUAL,
         "exact: all zero, gone or not finite, unlike before", TRIP, "error",
         "an optimizer reset on purpose", "load the optimizer's state and the buffers"),
    Rule("R04", "rows in another order", ("E1", "E5", "E6", "F7"), "echo", EQUAL,
         "exact: the same rows at other places", TRIP, "error",
         "a layout that is converted on purpose (rotary halves, heads) together with the code that reads it",
         "read with the layout that was written: order of ranks, heads, rotary halves, vocabulary"),
    Rule("R05", "columns in another order", ("E1", "E6"), "echo", EQUAL, "exact: the same columns at other places",
         TRIP, "error", "as R04", "join ranks in their order, along the sharded dimension"),
    Rule("R06", "flipped bits", ("G2", "G1", "G3"), "echo", EQUAL,
         "exact: at most eight elements differ, each in one bit", TRIP, "error", "none",
         "load again; if it stays, take the tensor from another copy and check memory and storage"),
    Rule("R07", "values rounded to a narrower type", ("D1", "D4", "D7"), "echo", EQUAL,
         "exact: all are the rounded old values", TRIP, "error", "states kept in 16 bits on purpose (moments: warn)",
         "save and load masters and moments in float32"),
    Rule("R08", "runs of zeros", ("G5", "G4"), "echo", EQUAL, "exact: the only difference is one run that became zero",
         TRIP,
         "error", "none", "copy the file again; check that writes were synced before the save was reported complete"),
    Rule("R09", "values differ", ("G6", "A2", "D2", "F4"), "echo", EQUAL, "exact", TRIP, "error",
         "a change that the load makes on purpose (averaged or merged weights)",
         "load weights, masters and moments from one save"),
    Rule("R13", "rows of several tensors mixed", ("E2", "E4", "E1"), "echo", EQUAL,
         "exact: every row comes from before, from two or more tensors", TRIP, "error", "as R04",
         "split fused tensors per rank and per group before joining: gate and up, query, key and value"),
)  # fmt: skip
register(*_RULES)
ECHO = {rule.id: rule for rule in _RULES}

ALIKE = 0.999  #: cosine from which three digits no longer tell the difference
#: Form → rule and its words; ``{text}`` is the sentence of the first tensor.
FORMS = {
    "nan": ("R03", "are no longer finite: {text}"),
    "zero": ("R03", "are zero now"),
    "zeros": ("R08", "have a run of elements that became zero: {text}"),
    "pruned": ("R09", "are zero where they were smallest: {text}"),
    "flip": ("R06", "differ in single elements: {text}"),
    "fill": ("R09", "are constant: {text}"),
    "ratio": ("R09", "are the old values times one factor: {text}"),
    "power": ("R09", "are a power of the old values: {text}"),
    "swapped": ("R02", "are swapped: {text}"),
    "weights": ("R03", "are copies of the weights, such as that of {text}"),
    "other": ("R09", "have different values"),
    "part": ("R09", "differ only in a part: {text}"),
}

#: Quantities → form → the causes of such a change, likeliest first; "" for all other forms. Patterns of causes, which
#: see all changes together, take precedence.
CAUSES: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    (WEIGHTS, {"rounded": ("D7",), "ratio": ("E12",), "nan": ("G1",), "flip": ("G2", "G1"), "zeros": ("G5",),
               "pruned": ("G5",), "part": ("G6", "G10", "A2"),
               "moved": ("E1", "E9"), "moved.followed": ("F4", "A2"), "flat": ("E7", "E13"), "": ("A2", "G6")}),
    (MASTERS, {"rounded": ("D1",), "nan": ("G1",), "flip": ("G2", "G1"), "zeros": ("G5", "D2"), "": ("D2", "G6")}),
    (SECOND, {"zero": ("B4", "B3"), "fill": ("B4", "B3"), "flip": ("G3",)}),
    (MOMENTS, {"zero": ("B3", "B1"), "fill": ("B3", "B1"), "weights": ("B1", "B11"), "rounded": ("D4",),
               "nan": ("G1",), "flip": ("G2", "G3"), "zeros": ("G5", "B3"), "moved": ("B5", "E13"),
               "flat": ("E13", "E7"), "": ("B6", "G6")}),
    ((STATE,), {"zero": ("B3", "B11"), "weights": ("B1", "B11"), "rounded": ("D4", "B11"), "nan": ("G1",),
                "flip": ("G2",), "zeros": ("G5",), "moved": ("B5", "B11"), "flat": ("E13",), "": ("B11", "B6")}),
    (AVERAGES, {"nan": ("F4", "G1"), "flip": ("G2", "F4"), "": ("F4",)}),
    (("buffer",), {"nan": ("A5", "G1"), "flip": ("G2", "A5"), "": ("A5",)}),
    (BUFFERS, {"": ("D9", "A5")}),
)  # fmt: skip


def causes_of(role: str, form: str) -> tuple[str, ...]:
    """Return the causes of a change of one stored role, likeliest first."""
    name = quantity(role)
    rows = [table for quantities, table in CAUSES if name in quantities]
    return next((table[one] for one in (form, form.partition(".")[0], "") for table in rows if one in table), ())


def load_signs(atoms: Atoms, looks: Sequence[AtomLook]) -> Iterator[Sign]:
    """Yield signs of all looks except ``unread``; weights and masters are separate from moments and from buffers."""
    moved = [one for one in looks if one.kind in ("moved", "columns")]
    flat = [one for one in looks if one.kind == "flat"]
    yield from _line(atoms, flat)
    yield from _moved(atoms, moved)
    groups: dict[tuple[str, bool, bool], list[AtomLook]] = {}
    for one in looks:
        if one.kind not in ("moved", "columns", "flat", "unread"):
            what = quantity(one.atom.role)
            kind = "other" if one.kind == "near" else one.kind
            groups.setdefault((kind, what in MOMENTS, what in BUFFERS), []).append(one)
    for (kind, *_), some in groups.items():
        yield _rounded(atoms, some) if kind == "rounded" else _plain(atoms, kind, some)


def _plain(atoms: Atoms, kind: str, some: Sequence[AtomLook]) -> Sign:
    rule, words = FORMS[kind]
    text = some[0].text.partition(", product in ")[0]
    name = repr(some[0].atom.fqn)
    if kind == "zeros":
        text = text.replace(" became zero", f" of {name}", 1) or name
    elif kind in ("weights", "pruned"):
        text = name
    elif kind in ("flip", "nan", "fill", "ratio", "power", "part"):
        text = f"in {name}, {text}" if text else f"in {name}"
    evidence: dict[str, Any] = {"form": kind}
    tail = ""
    if kind in ("near", "other", "part"):
        place = where(atoms, some)
        evidence |= place.evidence
        tail = f"{_cosines(some)}{place.words}"
    if kind == "zeros":
        evidence |= {name: some[0].form[name] for name in ("file", "byte_start", "byte_stop") if name in some[0].form}
    if kind == "flip":
        evidence["flips"] = [flip for one in some for flip in one.form["flips"]][:8]
    return _sign(rule, atoms, some, words.format(text=text) + tail, **evidence)


def _rounded(atoms: Atoms, some: Sequence[AtomLook]) -> Sign:
    through = str(some[0].form.get("through", some[0].row.dtype_b))
    lost = through == "float16" and any(quantity(one.atom.role) in SECOND for one in some)  # small ones are 0
    severity = "warn" if quantity(some[0].atom.role) in MOMENTS and not lost else None
    return _sign("R07", atoms, some, f"are the old values rounded to {through}", severity, through=through)


def _line(atoms: Atoms, flat: Sequence[AtomLook]) -> Iterator[Sign]:
    """Yield a sign for elements of a flat line that was cut at other places."""
    if not flat:
        return
    one = flat[0]
    far = (w for w in one.windows if w[1] != one.atom.fqn)
    at, source, first = next(far, next((w for w in one.windows if w[0] != w[2]), one.windows[0]))
    if source == one.atom.fqn:
        words = f"are shifted by {at - first:+,} elements from {source!r} on, across tensors"
    else:
        words = (
            f"are the old elements cut at other places: those at {at:,} of {one.atom.fqn!r} were at {first:,} of "
            f"{source!r}"
        )
    yield _sign("R09", atoms, flat, words, form="flat", at=at, source=source, was_at=first)


def _moved(atoms: Atoms, moved: Sequence[AtomLook]) -> Iterator[Sign]:
    for moments in (False, True):
        tags: dict[str, list[AtomLook]] = {}
        for one in moved:
            if (quantity(one.atom.role) in MOMENTS) == moments:
                tags.setdefault(tag_of(atoms.facts, one.move), []).append(one)
        for tag, looks in gathered(tags).items():
            by_rule: dict[str, list[AtomLook]] = {}
            for one in looks:
                rule = "R05" if one.kind == "columns" else _rule(one)
                by_rule.setdefault(rule, []).append(one)
            if "R13" in by_rule and "R02" in by_rule:  # some tensors of a mixture may happen to be complete
                by_rule["R13"] += by_rule.pop("R02")
            for rule, some in by_rule.items():
                words = TAGS[tag]
                if moments and tag == "name":
                    words = "belong to other parameters"
                text = f"{words}: {move_text(some[0].move)}{shared_sources(one.move for one in some)}"
                if tag == "expert":
                    text += _routers(atoms, some, looks)
                form = {name: value for name, value in some[0].form.items() if name not in ("order", "moves")}
                blocks = [[b.start, b.stop, some[0].sources[b.source], b.first] for b in some[0].blocks[:16]]
                yield _sign(rule, atoms, some, text, form=f"moved.{tag}", tag=tag, order=form, blocks=blocks)


def _rule(one: AtomLook) -> str:
    return "R02" if whole(one.move) else "R04" if own(one.move) else "R13"


def _routers(atoms: Atoms, some: Sequence[AtomLook], looks: Sequence[AtomLook]) -> str:
    layers = {parse(one.atom.fqn).layer for one in some}
    routers = [
        a.fqn
        for a in atoms.rows
        if a.role == "param" and parse(a.fqn).kind == "router" and parse(a.fqn).layer in layers
    ]
    went = {one.atom.fqn for one in looks}
    still = [name for name in routers if name not in went]
    return f"; the router's rows did not move ({still[0]!r})" if still else ""


def _cosines(looks: Sequence[AtomLook]) -> str:
    found = [one.cosine for one in looks if one.cosine is not None and one.row.numel > 1]  # of a number it is ±1
    if not found:
        return ""
    low, high = f"{min(found):.3g}", f"{max(found):.3g}"
    span = f"above {ALIKE:g}" if min(found) >= ALIKE else low if low == high else f"{low} to {high}"
    return f" (cosine similarity to the old values: {span})"


def _called(roles: Sequence[str]) -> str:
    """Return the names of roles, like ``the weights`` or ``exp_avg and exp_avg_sq``."""
    names = {"param": "the weights", "master": "the masters", "ema": "the averages", "buffer": "the buffers"}
    known = [names.get(role, role) for role in roles]
    if len(known) == 1:
        return names.get(roles[0], f"the {roles[0]} tensors")
    return f"{', '.join(known[:-1])} and {known[-1]}"


def _sign(
    rule: str, atoms: Atoms, looks: Sequence[AtomLook], words: str, severity: str | None = None, **evidence: Any
) -> Sign:
    """Return a sign with a message like ``exp_avg and exp_avg_sq of 52 of 52 parameters are zero now``."""
    owners = list(dict.fromkeys(name for one in looks for name in one.atom.owners))
    roles = sorted({one.atom.role for one in looks})
    of = len({owner for atom in atoms.rows if atom.role in roles for owner in atom.owners})
    found = {"in": "before → echo", "roles": roles, **evidence}
    text = f"{len(owners):,} of {plural(of, 'buffer')} {agreeing(len(owners), words)}"
    if roles != ["buffer"]:
        text = f"{_called(roles)} of {len(owners):,} of {plural(of, 'parameter')} {words}"
    form = str(evidence.get("form", looks[0].kind))
    causes = causes_of(max(roles, key=lambda role: sum(one.row.numel for one in looks if one.atom.role == role)), form)
    return ECHO[rule].sign(text, found, owners, severity=severity, hit=len(owners), of=of, causes=causes)
