"""Build the ledger's rows from the sums of the passes, one row for each quantity, form and leg.

::

    before ‖ echo     TensorStatus per tensor     equal · a form of change · absent · not compared (why)    leg load
    before → after    PairState per parameter     within its laws · the form of a broken one · (why not)    leg train
    one state         OneState per parameter      zeros, masters, finite numbers                            leg before …
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.doctor.facts.counted import fell_back, lagging
from workbench.doctor.facts.evidence import Pair, State
from workbench.doctor.laws.bounds import Hits
from workbench.doctor.ledger.roles import MASTERS, MOMENTS, STATE, WEIGHTS, quantity
from workbench.doctor.ledger.rows import GROUPS, Row, Status
from workbench.doctor.ledger.sign import Sign
from workbench.doctor.origins.became import Became, beyond, columns_apart, moments_became, weights_became
from workbench.doctor.origins.tags import TOGETHER, tag_of
from workbench.doctor.passes.pair import PairState, Update
from workbench.doctor.rules.pair import replayed
from workbench.errors import WorkbenchError
from workbench.names.roles import adapter_of
from workbench.names.weights import kinds
from workbench.tensor import LazyTensor

ADAM = {"exp_avg", "exp_avg_sq"}  #: state whose updates obey laws, if a parameter has both
COUNTED = 2  #: most updates of a fresh optimizer between a load and an immediate save
RENUMBERED = "it is stored by number, and which parameter a number means is unknown"
FEW = 2  #: parameters
WILD = 1e6  #: times the bound of a law, which only a flipped exponent bit reaches in single elements
FLIPS = 8  #: most elements that count as flipped bits
PATCH = 0.2  #: share of one parameter below which a change is a damaged part
BARELY = 1.5  #: times the reach below which the excess is rounding of loaded values
LIKE = 0.9  #: cosine below which weights are others, however little each element is beyond reach
IN_PARTS = ("near", "part", "flip", "zeros", "other")  #: forms that a change of some rows or columns may have
MANY = 400  #: most parameters whose form is examined; further ones are only counted as beyond their law


class _GatheredRows:
    """A collector of names that become rows."""

    def __init__(self, leg: str) -> None:
        self.leg = leg
        self._found: dict[tuple[str, Status, str, str, bool], list[str]] = {}
        self._elements: Counter[tuple[str, Status, str, str, bool]] = Counter()
        self._detail: dict[tuple[str, Status, str, str, bool], dict[str, Any]] = {}

    def put(
        self,
        quantity: str,
        status: Status,
        name: str,
        elements: int = 0,
        *,
        form: str = "",
        why: str = "",
        exact: bool = True,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        key = (quantity, status, form, why, exact)
        self._found.setdefault(key, []).append(name)
        self._elements[key] += elements
        if detail:
            self._detail.setdefault(key, {})[name] = detail

    def rows(self) -> Iterator[Row]:
        for key, names in self._found.items():
            quantity, status, form, why, exact = key
            detail = self._detail.get(key, {})
            yield Row(self.leg, quantity, status, form, tuple(names), self._elements[key], why, exact, detail)


# ---- the load --------------------------------------------------------------------------------------------------------


#: Forms of changes that are proved on all elements of a tensor, and those that are not.
PROVED, LOOSE = ("moved.", "rounded", "ratio"), ("near", "other", "part")


def load_rows(pair: Pair, status: Mapping[tuple[str, str], Any], facts: Any) -> Iterator[Row]:
    """Yield what the load did to every stored tensor of ``before``.

    Args:
        status: ``(fqn, role)`` → :class:`workbench.doctor.rules.load.TensorStatus`.
        facts: geometry of the model, for the meaning of moved rows.
    """
    found = _GatheredRows("load")
    for fqn, roles in pair.a.params.items():
        there = pair.b.params.get(fqn, {})
        for stored in roles:
            role = quantity(stored)
            if role is None:
                continue
            one = status.get((fqn, stored))
            if one is None:
                if not pair.comparable(fqn):
                    found.put(role, Status.SKIPPED, fqn, why=RENUMBERED)
                elif stored in there:
                    why = "the two have different shapes"
                    found.put(role, Status.SKIPPED, fqn, why=why)
                elif not pair.mapped:
                    found.put(role, Status.ABSENT, fqn)
                else:
                    found.put(role, Status.SKIPPED, fqn, why="the other format does not store it")
                continue
            if one.status == "equal":
                found.put(role, Status.EQUAL, fqn, one.row.numel)
            elif one.status in ("unread", "unknown"):
                found.put(role, Status.SKIPPED, fqn, why=one.row.why or "it could not be read")
            elif one.status == "type" and not one.looks:
                found.put(role, Status.EQUAL, fqn, one.row.numel)
            else:
                found.put(role, Status.BEYOND, fqn, one.row.numel, form=_form(one, facts), detail=_detail(one))
    yield from _adopted(gathered_rows(found.rows()))


def _adopted(rows: Iterable[Row]) -> Iterator[Row]:
    """Assign changes without a form to the form of most of their kind: small tensors, and parts, cannot prove one."""
    rows = list(rows)
    for names in GROUPS.values():
        group = [row for row in rows if row.quantity in names and row.status is Status.BEYOND]
        sizes: Counter[str] = Counter()
        for row in group:
            if row.form.startswith(PROVED):
                sizes[row.form] += row.elements
        loose = {id(row) for row in group if row.form in LOOSE}
        if not loose or sum(row.elements for row in group if id(row) in loose) > sizes.total():
            continue
        lead = "moved.flat" if "moved.flat" in sizes else sizes.most_common(1)[0][0]
        rows = [replace(row, form=lead, exact=False) if id(row) in loose else row for row in rows]
    yield from rows


def gathered_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Merge moves with a common reason under one form: heads and tokens move with the ranks that held them."""
    rows = list(rows)
    weights = [row for row in rows if row.quantity in (*WEIGHTS, *MASTERS)]
    turned = [row for row in weights if row.form == "moved.ranks"]
    if turned and all(kinds(row.names) <= {"embed", "head"} for row in turned):  # ranks would move others too
        rows = [replace(row, form="moved.vocab") if row.form == "moved.ranks" else row for row in rows]
        weights = [row for row in rows if row.quantity in (*WEIGHTS, *MASTERS)]
    forms = {row.form for row in weights} or {row.form for row in rows}
    for row in rows:
        for lead, others in TOGETHER.items():
            if f"moved.{lead}" in forms and row.form.removeprefix("moved.") in others:
                row = replace(row, form=f"moved.{lead}")
        yield row


def _form(one: Any, facts: Any) -> str:
    """Return the most common form of the parts of a tensor; for moved rows, it includes where they went."""
    forms = Counter(_look_form(look, facts) for look in one.looks)
    return forms.most_common(1)[0][0] if forms else "other"


def _look_form(look: Any, facts: Any) -> str:
    if look.kind in ("moved", "columns"):
        return f"moved.{tag_of(facts, look.move)}"
    if look.kind == "flat":
        here = sum(source == look.atom.fqn for _, source, _ in look.windows)
        return "moved.shift" if 2 * here > len(look.windows) else "moved.flat"
    return str(look.kind)


def _detail(one: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for look in one.looks:
        found |= {
            name: look.form[name]
            for name in ("ratio", "value", "through", "rows", "of", "tail", "alone")
            if name in look.form
        }
        if look.row.dtype_a != look.row.dtype_b:
            found["narrower"] = True
        if look.cosine is not None:
            found["cosine"] = max(look.cosine, found.get("cosine", -1.0))
        if look.kind == "flip":
            tops = {"float32": 30, "bfloat16": 14, "float16": 14, "float64": 62}
            found["top"] = any(flip["bit"] == tops.get(look.row.dtype_b) for flip in look.form["flips"])
    return found


def print_rows(compared: Any) -> Iterator[Row]:
    """Yield the rows of an echo of fingerprints, which shows the form of a change only for constants and swaps."""
    found = _GatheredRows("load")
    for key in compared.equal:
        found.put(quantity(compared.role[key]) or "other", Status.EQUAL, compared.fqn.get(key) or key)
    forms = {"zeros": "zero", "ones": "fill", "other": "moved.name", "unknown": "other"}
    for one in compared.differing:
        form = "moved" if one.holds == "other" and one.role in MOMENTS else forms[one.holds]
        value = {"value": "1"} if one.holds == "ones" else None
        found.put(quantity(one.role) or "other", Status.BEYOND, one.fqn or one.key, form=form, detail=value)
    for key in compared.missing:
        role = quantity(compared.role.get(key, "other"))
        if role is not None:
            found.put(role, Status.ABSENT, compared.fqn.get(key) or key)
    for key, why in {**compared.unlike, **compared.unread}.items():
        found.put(
            quantity(compared.role.get(key, "other")) or "other", Status.SKIPPED, compared.fqn.get(key) or key, why=why
        )
    yield from found.rows()


# ---- the updates after it --------------------------------------------------------------------------------------------


def train_rows(
    pair: Pair,
    updates: Mapping[str, Update],
    states: Mapping[str, PairState],
    signs: Iterable[Sign],
    kept: Mapping[tuple[str, str], str],
) -> Iterator[Row]:
    """Yield what the updates did to every parameter that both checkpoints hold.

    Args:
        states: fqn → sums of the pair.
        signs: those on moved rows (P17, P18) and on updates (P08, P12).
        kept: (fqn, role) → form of state without a law; "" if it continues its old values.
    """
    found = _GatheredRows("train")
    signs = list(signs)
    moved, unlike = _origins(signs)
    turned = {
        name
        for sign in signs
        if sign.rule in ("P08", "P12") and sign.severity != "info" and "old" not in sign.evidence
        for name in sign.tensors
    }
    back = [sign for sign in signs if sign.rule == "P08" and "kind" in sign.evidence]
    gone = {name: sign.evidence["kind"] for sign in back for name in sign.tensors}
    held = dict(pair.shared())
    # single elements are flipped bits if one or two parameters have them, but not if many do
    few_weights = _few(sums.reach for sums in states.values())
    few_moments = _few(max((sums.floor, sums.transition), key=lambda one: one.worst) for sums in states.values())
    odd: dict[str, Became | None] = {}
    for fqn, sums in states.items():
        places = held.get(fqn, {})
        weight = "master" if "master" in places else "param"
        far = bool(sums.reach.broken) or fqn in turned or fqn in unlike or f"param:{fqn}" in moved
        if weight not in places or not far:
            continue
        # a step as far as wrong moments make it is still the update of the old weights
        if sums.nan or not replayed(updates[fqn], sums, pair.b.dtype(places[weight][1])):
            odd[fqn] = _weights(pair, fqn, weight, places, updates[fqn], sums) if len(odd) < MANY else None
    looked = len(odd)
    units = _units(odd)
    for fqn, one in odd.items():
        if one is not None and one.form in IN_PARTS and (at := _columns(pair, held[fqn], updates[fqn], states[fqn])):
            units.setdefault(pair.b.shape(held[fqn]["exp_avg"][1])[1], set()).update(at)
    for fqn, sums in states.items():
        update, places = updates[fqn], held.get(fqn, {})
        weight = "master" if "master" in places else "param"
        if weight in places:
            still = update.k == 0 and 0 < sums.count == sums.unchanged  # no update: the law is equality
            seen = sums.reach.of or sums.replay.count or still
            if fqn in odd:
                form, exact, detail = _weight_form(fqn, sums, odd[fqn], moved, unlike)
                # a few rows of a vocabulary are tokens, those of another weight a damaged place
                tokens = kinds([fqn]) <= {"embed", "head"} and not detail.get("tail")
                rows = form == "part" and (tokens or detail["rows"] >= PATCH * detail["of"])
                if units and form in IN_PARTS and _in_units(pair, fqn, (weight,), places, update, units):
                    form = "units"
                elif gone.get(fqn) in ("average", "zeros"):
                    form = str(gone[fqn])
                elif gone.get(fqn) and form in ("near", "flip", "other"):
                    form, detail = ("zero", detail) if fqn.endswith("bias") else ("fill", detail | {"value": 1.0})
                elif not rows and fqn not in unlike:
                    alone = few_weights and not (sums.floor.broken or sums.transition.broken)
                    far = form == "near" and float(detail.get("cosine", 1.0)) < LIKE
                    worst = math.inf if far or not sums.reach.of else sums.reach.worst
                    form = _small(form, alone, sums.reach.broken, sums.reach.of, worst)
                found.put(weight, Status.BEYOND, fqn, sums.count, form=form, exact=exact, detail=detail)
            elif seen:
                found.put(weight, Status.WITHIN, fqn, sums.count)
            else:
                why = sums.skipped.get("reach", "no law of its updates is known")
                found.put(weight, Status.SKIPPED, fqn, why=why)
        if places.keys() >= ADAM:
            measured, numbers = _moment_rows(pair, fqn, places, update, sums, moved, looked <= MANY)
            broken = bool(sums.floor.broken or sums.transition.broken)
            if broken and units and _in_units(pair, fqn, ("exp_avg", "exp_avg_sq"), places, update, units):
                measured = [(quantity, Status.BEYOND, "units", "", False) for quantity in ("exp_avg", "exp_avg_sq")]
            elif broken and (one := odd.get(fqn)) is not None and one.detail.get("at"):
                own = {int(one.detail["of"]): set(one.detail["at"])}  # not small numbers that a cast to 16 bits lost
                if _in_units(pair, fqn, ("exp_avg", "exp_avg_sq"), places, update, own):
                    measured = [(q, s, f if x or f != "rounded" else "part", why, x) for q, s, f, why, x in measured]
            for quantity, status, form, why, exact in measured:
                if status is Status.SKIPPED and (fqn, quantity) in kept:
                    status, form, exact = _continued(kept[fqn, quantity])
                    why = ""
                if status is Status.BEYOND and form != "units":
                    form = _small(form, few_moments, sums.floor.broken, sums.floor.of, math.inf, "other")
                elements = max(sums.floor.of, sums.transition.of)
                found.put(quantity, status, fqn, elements, form=form, why=why, exact=exact, detail=numbers)
            looked += broken
    yield from gathered_rows(found.rows())
    yield from _untouched(pair, states, kept)


def _units(odd: Mapping[str, Became | None]) -> dict[int, set[int]]:
    """Return size of an axis → places along it where complete rows of a weight were replaced, here and there.

    A shard, or a damaged page, is a run of rows. Rows of a vocabulary are tokens.
    """
    found: dict[int, set[int]] = {}
    for fqn, one in odd.items():
        if one is not None and one.detail.get("apart") and not kinds([fqn]) <= {"embed", "head"}:
            found.setdefault(int(one.detail["of"]), set()).update(one.detail["at"])
    return {of: places for of, places in found.items() if 2 * len(places) < of}


def _columns(pair: Pair, places: Mapping[str, tuple[int, int]], update: Update, sums: PairState) -> tuple[int, ...]:
    """Return the columns, here and there, in which a matrix and both its moments did not continue."""
    if not (sums.reach.broken and sums.floor.broken + sums.transition.broken and places.keys() >= ADAM):
        return ()
    weight = "master" if "master" in places else "param"
    sides = [(pair.a.tensor(places[r][0]), pair.b.tensor(places[r][1])) for r in (weight, "exp_avg", "exp_avg_sq")]
    try:
        broken = [beyond(sides[:1], update), beyond(sides[1:], update)]
        if broken[0] is None or broken[1] is None or broken[0].ndim < 2:
            return ()
        seen = (sides[2][0].numpy() != 0) | (sides[2][1].numpy() != 0)
    except WorkbenchError:
        return ()
    return columns_apart(broken[0], broken[1], np.asarray(seen))


def _in_units(
    pair: Pair,
    fqn: str,
    roles: tuple[str, ...],
    places: Mapping[str, tuple[int, int]],
    update: Update,
    units: Mapping[int, set[int]],
) -> bool:
    """Return whether all that is beyond its law, in a weight or its moments, is in those rows or columns."""
    sides = [(pair.a.tensor(places[role][0]), pair.b.tensor(places[role][1])) for role in roles]
    try:
        broken = beyond(sides, update)
    except WorkbenchError:
        return False
    if broken is None or not broken.any():
        return False
    axes = [np.flatnonzero(broken.any(tuple({*range(broken.ndim)} - {axis}))) for axis in range(broken.ndim)]
    return any(units.get(size, set()).issuperset(at.tolist()) for size, at in zip(broken.shape, axes, strict=True))


def _few(hits: Iterable[Hits]) -> bool:
    """Return whether a law is broken in so few parameters, or by so much in so few elements, that bits were flipped."""
    broken = [one for one in hits if one.broken]
    return len(broken) <= FEW or all(one.broken <= FEW and one.worst > WILD for one in broken)


def _small(form: str, few: bool, broken: int, of: int, worst: float, many: str = "near") -> str:
    """Return the form, adjusted if only a part of one or two parameters is affected or is barely beyond."""
    if form in ("flip", "near") and worst < BARELY and not (few and broken == 1):
        return "slight"
    if form == "flip":
        return "flip" if few else many
    if (
        form in ("near", "part", *(("other", "fallen") if many == "other" else ()))
        and few
        and FLIPS < broken < PATCH * of
    ):
        return "patch"
    return form


def _origins(signs: Iterable[Sign]) -> tuple[dict[str, str], set[str]]:
    """Return ``role:fqn`` → tag of the move, and the parameters unlike anything of before."""
    moved: dict[str, str] = {}
    unlike: set[str] = set()
    for sign in signs:
        if sign.rule == "P18":
            unlike |= set(sign.tensors)
        if sign.rule == "P32" and sign.evidence["kind"] in ("name", "rows", "shift", "part"):
            moved |= {f"exp_avg:{name}": str(sign.evidence["kind"]) for name in sign.tensors}
        if sign.rule != "P17":
            continue
        tag = sign.evidence.get("tag")
        role = str(sign.evidence.get("role", "param" if tag or "windows" in sign.evidence else "exp_avg"))
        if not tag:
            shifted = "shift" if sign.causes[:1] != ("E13",) else "flat"
            tag = shifted if "windows" in sign.evidence else "name"
        moved |= {f"{role}:{name}": str(tag) for name in sign.tensors}
    return moved, unlike


def _weight_form(
    fqn: str, sums: PairState, became: Became | None, moved: Mapping[str, str], unlike: set[str]
) -> tuple[str, bool, dict[str, Any]]:
    detail: dict[str, Any] = {} if became is None else dict(became.detail)
    cosine = became.cosine if became is not None else sums.cosine
    if cosine is not None:
        detail["cosine"] = cosine
    detail.setdefault("worst", sums.reach.worst)
    detail["size"] = math.sqrt(sums.bb / sums.aa) if sums.aa > 0 else 1.0
    detail["scale"] = sums.ab / sums.aa if sums.aa > 0 else 1.0
    if tag := moved.get(f"param:{fqn}"):
        return f"moved.{tag}", True, detail
    if sums.nan:
        return "nan", True, detail
    if became is not None and not (fqn in unlike and became.form in ("near", "flip")):
        return became.form, became.exact, detail
    return "other" if fqn in unlike else "near", False, detail


def _weights(
    pair: Pair, fqn: str, weight: str, places: Mapping[str, tuple[int, int]], update: Update, sums: PairState
) -> Became | None:
    a, b = pair.a.tensor(places[weight][0]), pair.b.tensor(places[weight][1])
    moments: tuple[LazyTensor, ...] | None = None
    average = pair.a.tensor(places["ema"][0]) if "ema" in places else None
    if "exp_avg" in places and "exp_avg_sq" in places:
        moments = pair.b.tensor(places["exp_avg"][1]), pair.b.tensor(places["exp_avg_sq"][1])
    elif "momentum" in places:
        moments = (pair.b.tensor(places["momentum"][1]),)
    try:
        return weights_became(a, b, update, sums, moments, average)
    except WorkbenchError:
        return None


def _moment_rows(
    pair: Pair,
    fqn: str,
    places: Mapping[str, tuple[int, int]],
    update: Update,
    sums: PairState,
    moved: Mapping[str, str],
    look: bool,
) -> tuple[list[tuple[str, Status, str, str, bool]], Mapping[str, Any]]:
    both = ("exp_avg", "exp_avg_sq")
    tag = moved.get(f"exp_avg:{fqn}")
    if tag and tag != "part":
        return [(quantity, Status.BEYOND, f"moved.{tag}", "", True) for quantity in both], {}
    if not (sums.floor.broken or sums.transition.broken):
        if sums.floor.of or sums.transition.of:
            return [(quantity, Status.WITHIN, "", "", True) for quantity in both], {}
        why = sums.skipped.get("transition", sums.skipped.get("floor", "no law of its moments is known"))
        return [(quantity, Status.SKIPPED, "", why, True) for quantity in both], {}
    became = None
    if look:
        before = pair.a.tensor(places["exp_avg"][0]), pair.a.tensor(places["exp_avg_sq"][0])
        after = pair.b.tensor(places["exp_avg"][1]), pair.b.tensor(places["exp_avg_sq"][1])
        try:
            became = moments_became(before, after, update, sums)
        except WorkbenchError:
            became = None
    form, exact = (became.form, became.exact) if became is not None else ("other", False)
    if tag and form != "zeros":
        form, exact = tag, False
    which, _, alone = form.partition("_")
    if became is not None and (alone in ("zero", "rounded", "ratio", "flip") or form == "first_other"):
        hit, kept = both if which == "first" else both[::-1]
        return [(hit, Status.BEYOND, alone, "", exact), (kept, Status.WITHIN, "", "", exact)], became.detail
    return [(quantity, Status.BEYOND, form, "", exact) for quantity in both], became.detail if became else {}


def _continued(form: str) -> tuple[Status, str, bool]:
    """Return status, form and exactness of state that was compared with its own old values, without a law."""
    return (Status.BEYOND if form else Status.WITHIN), form, False


def _untouched(pair: Pair, states: Mapping[str, PairState], kept: Mapping[tuple[str, str], str]) -> Iterator[Row]:
    """Yield rows for tensors without a law, or that one side does not hold."""
    found = _GatheredRows("train")
    for fqn, roles in pair.a.params.items():
        there = pair.b.params.get(fqn, {})
        for stored in roles:
            role = quantity(stored)
            listed = role in (*WEIGHTS, *MASTERS, *MOMENTS, STATE) or (fqn, stored) in kept
            if role is None or not listed:
                continue
            lawful = stored in ADAM and there.keys() >= ADAM
            if not pair.comparable(fqn):
                found.put(role, Status.SKIPPED, fqn, why=RENUMBERED)
            elif stored not in there:
                if role in MOMENTS or role == STATE or adapter_of(fqn):
                    found.put(role, Status.ABSENT, fqn)
            elif (fqn, stored) in kept and not (fqn in states and lawful):
                status, form, exact = _continued(kept[fqn, stored])
                found.put(role, status, fqn, form=form, exact=exact)
            elif role == STATE or (role in MOMENTS and not lawful):
                found.put(role, Status.SKIPPED, fqn, why="no law of its updates is known")
            elif pair.a.shape(roles[stored]) != pair.b.shape(there[stored]):
                found.put(role, Status.SKIPPED, fqn, why="the two have different shapes")
            elif fqn not in states and role not in ("param",):
                found.put(role, Status.SKIPPED, fqn, why="no law of its updates is known")
            elif fqn not in states:
                found.put(role, Status.SKIPPED, fqn, why="the number of updates in between is unknown")
    yield from found.rows()


# ---- counters --------------------------------------------------------------------------------------------------------


def counter_rows(
    pair: Pair, leg: str, k: int | None, broken: Collection[str] = (), zeros: Collection[str] = ()
) -> Iterator[Row]:
    """Yield what the optimizer's counters did, by parameter.

    Args:
        k: number of updates by the trainer between the two; 0 in a load; ``None`` if unknown.
        broken: parameters whose moments cannot have come from the old ones in the updates that their counters show.
        zeros: those of them whose moments began at zero.
    """
    found = _GatheredRows(leg)
    a, b = pair.a.facts.steps.by_name, pair.b.facts.steps.by_name
    names = [name for name in a if name in b and pair.comparable(name)]
    usual = pair.a.facts.steps.usual, pair.b.facts.steps.usual
    if not names or pair.mapped:
        if None in usual:
            return
        names, a, b = [""], {"": usual[0]}, {"": usual[1]}  # type: ignore[dict-item]
    if k is None:  # then only a fall of all counters is detectable
        if names and all(a[name] > COUNTED and b[name] < a[name] for name in names):
            fell = Counter(a[name] - b[name] for name in names).most_common(1)[0][0]
            reset = all(2 * b[name] < a[name] for name in names)  # counters of an older save are not that far behind
            form = "reset" if reset else "behind"
            yield Row(leg, "step", Status.BEYOND, form, tuple(names), detail={"by": fell})
        return
    moved = {name: b[name] - a[name] for name in names}
    rare = lagging(pair.a.facts, pair.b.facts, k)
    common = Counter(moved.values()).most_common(1)[0][0]
    late = fell_back(pair.a.facts, pair.b.facts, broken, k)
    for name, by in moved.items():
        fresh = b[name] <= k + COUNTED and a[name] > COUNTED
        if k == 1 < b[name] and name in broken and name not in zeros:
            fresh = False  # one update does not hide zeros: they are of an early save
        if by == k or (
            leg == "train" and 0 <= by < k and (b[name] != k or name in rare or by == 0 != common) and name not in late
        ):  # a counter does not advance without a gradient or in a skipped update
            status = Status.EQUAL if leg == "load" else Status.WITHIN
            found.put("step", status, name)
        elif fresh:
            found.put("step", Status.BEYOND, name, form="reset", detail={"by": by})
        else:
            found.put("step", Status.BEYOND, name, form="ahead" if by > k else "behind", detail={"by": abs(by - k)})
    for row in found.rows():
        detail = {"by": abs(common - k)} if row.form in ("ahead", "behind") else {}
        yield Row(row.leg, row.quantity, row.status, row.form, row.names, row.elements, row.why, row.exact, detail)


# ---- one state -------------------------------------------------------------------------------------------------------


def state_rows(state: State, which: str, sums: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what a single checkpoint shows: moments that are all zero, fresh counters, values that are not finite."""
    found = _GatheredRows(which)
    step = state.facts.step
    held = {fqn: one for fqn, one in sums.items() if "exp_avg_sq" in one.numbers}
    none = {fqn for fqn, one in held.items() if _empty(one, "exp_avg_sq")}
    wide = bool(held) and len(none) == len(held)
    counts = state.facts.steps.by_name
    for fqn, one in sums.items():
        if one.unrounded:
            found.put("master", Status.BEYOND, fqn, one.compared, form="unrounded")
        for role, numbers in one.numbers.items():
            if role == "master" and one.unrounded and not numbers.nan + numbers.inf:
                continue
            if numbers.nan + numbers.inf:
                found.put(role, Status.BEYOND, fqn, numbers.count, form="nan")
            elif (
                role == "exp_avg_sq" and fqn in none and (step or 0) > 0 and (wide or not _empty(one, "exp_avg"))
            ) or (role == "exp_avg" and wide and _empty(one, "exp_avg") and (step or 0) > 0):
                found.put(role, Status.BEYOND, fqn, numbers.count, form="zero")
            elif role in (*WEIGHTS, *MASTERS, *MOMENTS):
                found.put(role, Status.WITHIN, fqn, numbers.count)
    late = step is not None and step > COUNTED
    for fqn, count in counts.items():
        new = late and count <= 1
        found.put("step", Status.BEYOND if new else Status.WITHIN, fqn, form="reset" if new else "")
    yield from found.rows()


def _empty(one: Any, role: str) -> bool:
    numbers = one.numbers.get(role)
    return numbers is not None and numbers.zeros == numbers.count
