"""Compare a checkpoint with its echo, which was saved right after the load: equal bit for bit, or signs state how not.

::

    before ──load──▶ echo            wb.diff ─ equal? ─▶ cleared: weights, masters, moments, buffers
      │               │                  │ not equal
      └── Pair ───────┘                  ▼
                                     atoms (fused tensors split) ─▶ look: a form for each ─▶ signs, one per family

The first pass reads everything once; only tensors that differ are read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.analysis.diff import diff
from workbench.analysis.diff_rows import TensorDiff
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.ledger.roles import AVERAGES, BUFFERS, MASTERS, MOMENTS, STATE, WEIGHTS, quantity
from workbench.doctor.ledger.sign import Cleared, Outcome, Rule, Sign, register, some
from workbench.doctor.origins.atoms import Atom, Atoms
from workbench.doctor.origins.look import AtomLook, look
from workbench.doctor.origins.merge import averaged, low_rank, unmerged
from workbench.doctor.origins.where import where
from workbench.doctor.rules.leaves import causes_of_topic, topic_of
from workbench.doctor.rules.load_signs import ECHO, load_signs

IN = "before → echo"
VALUES = ("near", "other", "part", "fill")  #: kinds of change without a form
#: Causes that equality bit for bit excludes.
CLEARS = {
    "weights": (
        WEIGHTS,
        (
            "A1", "A2", "A3", "D3", "D7", "E1", "E2", "E3", "E4", "E5", "E6", "E8", "E9", "E10", "E11", "E12", "F4",
            "F5", "F7",
        ),
    ),
    "masters": (MASTERS, ("D1", "D2")),
    "moments": (MOMENTS, ("B1", "B3", "B4", "B5", "B6", "D4", "E13")),
    "averages": (AVERAGES, ()),
    "buffers": (BUFFERS, ("A5", "D9")),
}  # fmt: skip
OF_ALL = ("E7", "G1", "G2", "G3", "G5", "G6", "G7")  #: excluded if weights, masters and moments are equal


R16 = Rule(
    "R16", "a tensor beside the parameters changed in the load", ("A5", "F4"), "echo",
    "a save right after the load holds what was loaded", "exact", "round trip", "warn",
    "counters and tables that a launch resets", "restore what is named, if it was not intended"
)  # fmt: skip
register(R16)


@dataclass(frozen=True, eq=False)
class TensorStatus:
    """What happened to a stored tensor in the load.

    Attributes:
        status: as in :class:`workbench.analysis.diff.TensorDiff`: ``equal changed type shape unread``.
        row: its comparison.
        looks: the forms of its changes, one for each weight that it fuses; empty if equal.
    """

    fqn: str
    role: str
    status: str
    row: TensorDiff
    looks: tuple[AtomLook, ...] = ()


@dataclass
class EchoValues(Outcome):
    """The result of checking an echo.

    Attributes:
        status: ``(fqn, role)`` → what happened to that tensor, for pictures.
        geometry: heads, groups and vocabulary, for the meaning of moved rows.
        traits: of all changes together: ``place`` that holds them, ``averaged`` weights, ``rank`` of their change, and
            whether it is ``unmerged``: not that of their adapters.
    """

    status: Mapping[tuple[str, str], TensorStatus] = field(default_factory=dict)
    geometry: Any = None
    traits: Mapping[str, Any] = field(default_factory=dict)


def check_echo(pair: Pair, *, threads: int | None = None, progress: Progress | None = None) -> EchoValues:
    """Apply the rules R02–R09 and R13 to a checkpoint and its echo.

    Tensors that cannot be read are listed in ``not_checked``; they do not raise an error.

    Args:
        pair: ``evidence.pair("before", "echo")``.
        threads, progress: as in :func:`workbench.diff`.
    """
    found = EchoValues()
    rows = _compared(pair, threads, progress)
    atoms = Atoms(pair)
    changed = {key: row for key, row in rows.items() if row.status in ("changed", "type", "unread")}
    pairs = _changed(atoms, changed, threads)
    looks = look(atoms, pairs, found.not_checked)
    found.signs += [*_gone(pair), *load_signs(atoms, looks)]
    found.geometry, found.traits = atoms.facts, _traits(atoms, looks)
    by_owner: dict[tuple[str, str], list[AtomLook]] = {}
    for one in looks:
        by_owner.setdefault((one.atom.owners[0], one.atom.role), []).append(one)
    found.signs += _others(pair, found)
    found.status = {key: TensorStatus(*key, row.status, row, tuple(by_owner.get(key, ()))) for key, row in rows.items()}
    _checked(found, rows, pair.a.facts.steps.counts == pair.b.facts.steps.counts, _absent(pair))
    return found


def _traits(atoms: Atoms, looks: Sequence[AtomLook]) -> dict[str, Any]:
    """Return what the changes of values have in common."""
    values = [one for one in looks if one.kind in VALUES]
    if not values:
        return {}
    weights = [one for one in values if one.atom.role in WEIGHTS]
    masters = [one for one in values if one.atom.role in MASTERS]
    return {
        "place": where(atoms, values),
        "averaged": averaged(atoms, weights, masters) if weights else 0,
        "rank": low_rank(atoms, weights) if weights else None,
        "unmerged": unmerged(atoms, weights),
    }


def _compared(pair: Pair, threads: int | None, progress: Progress | None) -> dict[tuple[str, str], TensorDiff]:
    """Compare the stored tensors of both sides by parameter and role; an optimizer may renumber its parameters."""
    both = [
        (f"{role}:{fqn}", fqn, role, *places)
        for fqn, roles in pair.shared()
        for role, places in roles.items()
        if quantity(role) is not None
    ]
    sides = []
    for side, state in enumerate((pair.a, pair.b)):
        catalog = state.ckpt.catalog.take(np.array([one[3 + side] for one in both], np.int64))
        named = replace(
            catalog, keys=[one[0] for one in both], fqns=[one[1] for one in both], roles=[one[2] for one in both]
        )
        sides.append(state.ckpt.derive(named))
    compared = diff(*sides, patterns=False, evidence="none", threads=threads, progress=progress)
    by_key = {row.key_b: row for row in compared.rows}
    return {(fqn, role): by_key[key] for key, fqn, role, *_ in both}


def _changed(
    atoms: Atoms, changed: Mapping[tuple[str, str], TensorDiff], threads: int | None
) -> list[tuple[Atom, TensorDiff]]:
    """Return the atoms that differ, each with its comparison; parts of fused tensors are compared separately."""
    found, apart = [], []
    for atom in atoms.of(changed):
        if atom.fqn == atom.owners[0]:
            found.append((atom, changed[atom.fqn, atom.role]))
        else:
            apart.append(atom)
    if apart:
        parts = diff(*atoms.part(apart), patterns=False, evidence="none", threads=threads)
        keys = atoms.b.catalog.keys
        by_key = {row.key_b: row for row in parts.rows}
        found += [(atom, row) for atom in apart if (row := by_key[keys[atom.tensor]]).status != "equal"]
    return sorted(found, key=lambda one: one[0].tensor)


def _others(pair: Pair, found: EchoValues) -> list[Sign]:
    """Compare tensors that do not belong to a parameter by key: averages under other names, tables.

    Generators advance at every restart; R11 compares those that are known as such by their digests.
    """
    if pair.mapped:
        return []
    both = [(roles, pair.b.params.get(fqn, {})) for fqn, roles in pair.a.params.items()]
    compared = [
        (at, theirs[role]) for mine, theirs in both for role, at in mine.items() if quantity(role) and role in theirs
    ]
    held, taken = {one for one, _ in compared}, {-1, *(two for _, two in compared)}  # other numbers of the same state
    catalog, there = pair.stored.ckpt.catalog, pair.b.ckpt.catalog
    roles, fqns = pair.a.names.roles, pair.a.names.fqns
    keys = [
        key
        for at, key in enumerate(catalog.keys)
        if at not in held
        and there.index.get(key, -1) not in taken
        and roles[at] != "step"
        and key not in pair.stored.facts.generators
        and pair.comparable(fqns[at] or "")
    ]
    if not keys:
        return []
    sides = [
        state.ckpt.derive(cat.take(np.array([cat.index[key] for key in keys], np.int64)))
        for state, cat in ((pair.stored, catalog), (pair.b, there))
    ]
    rows = diff(*sides, patterns=False, evidence="none").rows
    off: dict[str, list[str]] = {}
    for row in rows:
        if row.status not in ("equal", "unread", "unknown"):
            off.setdefault(topic_of(row.key_b.lower(), row.dtype_b), []).append(row.key_b)
    equal = sum(row.status == "equal" for row in rows)
    if equal and not off:
        found.cleared.append(Cleared("other tensors", f"{equal:,} of {len(rows):,} are equal bit for bit"))
    return [
        R16.sign(
            f"{len(names):,} of {plural(len(rows), 'further tensor')} changed: {some(names)}",
            {"in": IN, "kind": "other"},
            names,
            severity="info" if topic == "generators" else None,
            hit=len(names),
            of=len(rows),
            causes=causes_of_topic(topic) if topic != "other" else (),
        )
        for topic, names in off.items()
    ]


def _gone(pair: Pair) -> list[Sign]:
    """Report parameters whose optimizer state the echo does not hold."""
    had, gone = without_state(pair)
    if len(gone) <= pair.left_out:  # the optimizer does not hold them (R12)
        return []
    text = f"the optimizer state of {len(gone):,} of {plural(len(had), 'parameter')} is not in the echo"
    return [ECHO["R03"].sign(text, {"in": IN, "gone": True}, gone[:100], hit=len(gone), of=len(had), causes=("B1",))]


def without_state(pair: Pair) -> tuple[list[str], list[str]]:
    """Return the parameters that have optimizer state in the first of a pair, and those that have none in the second.

    State that is listed by numbers without owners counts if the second's param groups still hold the number, or if it
    has state of no parameter. If the groups were cut anew, as much state as before is that of the same parameters.
    """

    def held(state: State) -> list[str]:
        return [fqn for fqn, roles in state.params.items() if any(quantity(r) in (*MOMENTS, STATE) for r in roles)]

    had, has = held(pair.a), set(held(pair.b))
    if pair.cut_anew:
        return had, []
    there = pair.b.params.keys() | {name for group in pair.b.facts.groups for name in group.params or ()}
    gone = [fqn for fqn in had if pair.comparable(fqn) and fqn not in has and (fqn in there or not has)]
    return had, gone


def _absent(pair: Pair) -> bool:
    """Return whether the echo lacks a state that the checkpoint holds, or holds it under names that mean others."""
    if any(not pair.comparable(fqn) for fqn in pair.a.numbered):
        return True
    if pair.mapped:
        return False  # another format may not store it
    there = pair.b.params
    return any(
        quantity(role) is not None and role not in there.get(fqn, {})
        for fqn, roles in pair.a.params.items()
        for role in roles
    )


def _checked(found: EchoValues, rows: Mapping[tuple[str, str], TensorDiff], counted: bool, absent: bool) -> None:
    """Record what was examined, what could not be, and what was shown to be healthy."""
    read = [row for row in rows.values() if row.status in ("equal", "changed", "type")]
    for rule in ECHO:
        if read:
            found.checked[rule] = IN
        else:
            found.not_checked[rule] = "no tensor is stored on both sides"
    unread = [key for key, row in rows.items() if row.status == "unread"]
    if unread:
        fqn, role = unread[0]
        found.not_checked["echo"] = (
            f"{plural(len(unread), 'tensor')} could not be read; the first is {role} {fqn!r}: {rows[unread[0]].why}"
        )
    whole = []
    for what, (roles, causes) in CLEARS.items():
        these = [row for (_, role), row in rows.items() if role in roles]
        if these and all(row.status == "equal" for row in these):
            elements = sum(row.numel for row in these)
            text = f"{len(these):,} of {len(these):,} {what} ({plural(elements, 'element')}) are equal bit for bit"
            found.cleared.append(Cleared(what, text, causes))
            whole.append(what)
    lost = any(sign.evidence.get("gone") for sign in found.signs) or absent
    held = {what for what, (roles, _) in CLEARS.items() if any(role in roles for _, role in rows)}
    causes = OF_ALL if counted else tuple(cause for cause in OF_ALL if cause != "G6")
    if "weights" in whole and held <= set(whole) and not lost and all(row.status == "equal" for row in rows.values()):
        found.cleared.append(
            Cleared(
                "echo",
                "every weight, master, moment and buffer with the same name and shape on both sides is equal",
                causes,
            )
        )
