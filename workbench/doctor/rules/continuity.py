"""Rules of a pair on optimizer state for which no law is known: each tensor must visibly continue its own old values.

::

    b of a parameter is like a of that parameter       it continues
    b is like a of another parameter                   bound to the wrong parameter                     P32
    rows of v_B are like other rows of v_A             put together otherwise, where Adam's laws are broken
    b·a/a·a is small and ‖b‖ < ‖a‖                     new: an average that begins at 0 is small        P33
    b/a is small in most elements, a and b ≥ 0         the same for averages of squares
    b is a constant and a is not                       filled
    b ≈ c·a in every parameter                         multiplied by c

    t_B = w_A, bit for bit                             a tensor beside the weights holds what they held    P35

No formula of an update is used, only that a state carries its past: an average keeps most of itself in one update, and
state of one parameter is not that of another. Averages that forget within one update are not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.doctor.facts.counted import fell_back
from workbench.doctor.facts.evidence import Pair, State, is_numbered
from workbench.doctor.facts.groups import OF_AVERAGES
from workbench.doctor.laws.bounds import floor_terms
from workbench.doctor.ledger.roles import FIRST, MAXIMA, MOMENTS, SECOND, STATE, quantity
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome, Rule, Sign, register, some
from workbench.doctor.origins.became import arrangements
from workbench.doctor.origins.samples import sampled, spread
from workbench.doctor.passes.pair import PairState, Update
from workbench.doctor.passes.updates import passed
from workbench.doctor.rules.load import without_state
from workbench.doctor.rules.settings import fields_changed
from workbench.doctor.rules.stated import NAMED
from workbench.errors import WorkbenchError
from workbench.names.weights import kinds as kinds_of
from workbench.names.weights import parse

SAMPLED = 1 << 12  #: elements per tensor
LOOKED = 96  #: tensors of a role, spread over all
ENOUGH = 16  #: elements
TELLING = 64  #: elements from which a correlation shows whose state it is
LIKE = 0.5  #: correlation from which a state resembles an old one
BETTER = 0.25  #: how much better another parameter's old state must fit than its own
NEARER = 0.5  #: ratio of distances from which a state came from one of two values
SOME = 3  #: parameters from which the parameters of a role are compared with one another
MOST = 0.9  #: share of the parameters
NEW, SMALL = 0.3, 0.6  #: b·a/a·a and ‖b‖/‖a‖ below which an average began anew; one with β = 0.9 has 0.1 and 0.44
TINY = 0.1  #: ‖b‖/‖a‖ of a slow average that began anew some updates ago; in all parameters
FELL = 0.5  #: b/a of squares after one update; averages in use keep 0.9 and more
APART = 3.0  #: times less than in the other parameters
GREW = 1.5  #: b/a in nearly all elements after one update; some gradient is always small
LEFT = 0.65  #: b·a/a·a of a state like the old one, in most parameters
PARTS = (2, 4, 8)  #: of the rows of a matrix, as shards of ranks
WHOLE = 1 << 20  #: most elements of a tensor whose rows are searched
FILLED = 3.0  #: change of the mean, over the size before, of values that were set to a constant
SETTLED = 20  #: updates
AT_INTERVALS = frozenset({"hessian"})  #: Sophia's estimate, which is renewed every tenth update
DIFFERENCES = frozenset({"exp_avg_diff"})  #: Adan's average of changes of the gradient, which cancel one another
#: Running statistics of torch.nn, which keep nine tenths of themselves in a batch.
STATISTICS = ("buffer running_mean", "buffer running_var")
TOGETHER = 32  #: tensors that are examined together
FEWER = 50  #: times fewer elements below the floor of other places than below their own
ROWS = 64  #: rows that are searched for
SIGMAS = 8.0  #: over the root of the elements: correlation that is not by chance
CHANCE = 4.5  #: over the root of the columns: correlation that the best of many other rows reaches by chance
BESIDE = 256  #: tensors beside the weights
DECAYS = frozenset({"momentum", "dampening", "nesterov", "betas", "alpha", "rho"})  #: fields of param groups
STANDS = 0.7  #: b·a/a·a from which an average continues
KEEPS = 0.9  #: share that so few updates leave of second moments at least
NOISE = 1e-5  #: of the median size of averages of gradients: below it, as of biases before a norm, are rounding errors

P32 = Rule(
    "P32", "state that continues another parameter's", ("B5", "E13"), "pair",
    "the state of a parameter resembles its own old state, not that of another parameter of the same shape",
    f"correlation > {LIKE:g} with another parameter's old state, and {BETTER:g} higher than with its own",
    "definition of optimizer state: it belongs to one parameter", "warn", "none known",
    "assign the optimizer's state by name"
)  # fmt: skip
P33 = Rule(
    "P33", "state that does not continue", ("B1", "B3", "B4", "B11", "B6"), "pair",
    "one update keeps most of an average, and all parameters of an optimizer keep about the same share",
    f"after one update b·a < {NEW:g}·a·a and ‖b‖ < {SMALL:g}·‖a‖, or squares below {FELL:g} of the old ones, in "
    f"{MOST:.0%} of the parameters; or {APART:g} times less than in the others; at any time: a constant",
    "definition of an average", "warn", "an optimizer that drops its state on purpose",
    "restore the optimizer's state"
)  # fmt: skip
P35 = Rule(
    "P35", "a tensor holds what another one held before", ("F6", "F4", "A5"), "pair",
    "a tensor that is not trained is kept, or changes by its own rule",
    "equal bit for bit to another tensor of the earlier checkpoint, which it was not then", "exact", "warn",
    "copies that a trainer renews at that very step", "restore the named tensor; do not fill it from the weights"
)  # fmt: skip
register(P32, P33, P35)

Key = tuple[str, str]


@dataclass(frozen=True)
class Kept:
    """How a tensor of state relates to its old value: ``a`` before, ``b`` after.

    Attributes:
        own: correlation. slope: b·a/a·a. size: ‖b‖/‖a‖.
        low, least, most: 5 %, 1 % and 75 % quantiles of b/a where a > 0; NaN if either has negative elements.
        constant: the value of all elements of b, if those of a differ.
        offset: by how much the mean changed, over the size of a.
        level: the root mean square of a.
    """

    own: float
    slope: float
    size: float
    low: float
    least: float
    most: float
    constant: float | None = None
    offset: float = 0.0
    level: float = 0.0


@dataclass
class Continuity(Outcome):
    """The result: ``forms`` has (fqn, role) → form of the ledger; "" if the state continues."""

    forms: dict[Key, str] = field(default_factory=dict)


def check_continuity(
    pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], known: Collection[Key] = ()
) -> Continuity:
    """Check state without a law, on samples.

    Args:
        updates, states: fqn → the updates between the two checkpoints, and the sums of their pass.
        known: (fqn, role) of state that is known to continue another parameter's.
    """
    found = Continuity()
    held, lawful = _held(pair, updates, states)
    for role, places in held.items():
        _role(pair, updates, role, places, {fqn for fqn, other in known if other == role}, found)
    found.forms = _of_codes(found.forms)
    samples = _samples(pair, lawful, found)
    kept = {fqn: _kept(*both) for fqn, both in samples.items()}
    turned = _turned(samples, lawful, pair, kept)
    if found.checked:
        words = f"{plural(sum(map(len, held.values())), 'tensor')} of state without a law"
        found.checked = dict.fromkeys(("P32", "P33"), words)
    else:
        why = Inapplicable("no optimizer state without a law of its own is stored in both")
        found.not_checked |= dict.fromkeys(("P32", "P33"), why)
    found.signs += [
        *_stands(pair, held, states),
        *_signs(found.forms),
        *_gone(pair),
        *_rearranged(pair, updates, states, turned, found),
        *_copies(pair, states, found),
        *_taken(pair, states, found),
    ]
    return found


def _stands(
    pair: Pair, held: Mapping[str, Mapping[str, tuple[int, int]]], states: Mapping[str, PairState]
) -> Iterator[Sign]:
    """Yield a sign if averages of gradients or squares are equal bit for bit, and the weights are not."""
    for role, places in held.items():
        moved = {f: both for f, both in places.items() if f in states and states[f].unchanged < states[f].count}
        if quantity(role) not in MOMENTS or role in (MAXIMA, *AT_INTERVALS) or len(moved) < SOME:
            continue
        same = []
        for fqn in list(moved)[:: max(math.ceil(len(moved) / LOOKED), 1)]:
            try:
                a, b = (_sample(side.tensor(at)) for side, at in zip((pair.a, pair.b), moved[fqn], strict=True))
            except WorkbenchError:
                return  # reported where they are compared
            if not np.array_equal(a, b):
                break
            same += [fqn] if a.any() else []
        else:
            if len(same) >= SOME:
                text = f"the weights of {plural(len(moved), 'parameter')} changed; their {role} is equal bit for bit"
                yield RULES["P36"].sign(
                    text, {"kind": "repeated"}, same[:NAMED], severity="warn", hit=len(same), of=len(moved)
                )


def _held(
    pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState]
) -> tuple[dict[str, dict[str, tuple[int, int]]], dict[str, tuple[int, int]]]:
    """Return role → fqn → positions, of state that no law was checked for, and the second moments of Adam."""
    held: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    adam: dict[str, tuple[int, int]] = {}
    for fqn, roles in pair.shared():
        update = updates.get(fqn)
        if update is None or update.k < 1:
            continue
        lawful = fqn in states and bool(states[fqn].floor.of or states[fqn].transition.of)
        if lawful and "exp_avg_sq" in roles and not states[fqn].nan:
            adam[fqn] = roles["exp_avg_sq"]
        for role, both in roles.items():
            if role == "buffer" and (update.k > 1 or (pair.a.facts.step or 0) < SETTLED):
                continue  # statistics forget quickly, and move far at first
            if quantity(role) not in (*MOMENTS, STATE, "buffer") or (lawful and role in ("exp_avg", "exp_avg_sq")):
                continue
            if pair.b.ckpt.catalog.numel[both[1]] < ENOUGH:
                continue
            if _is_quantised(pair, fqn, role):  # apart from that of small parameters, which have floats
                held[f"{role} codes"][fqn] = both
            elif pair.b.dtype(both[1]).startswith(("float", "bfloat")):
                held[role if role != "buffer" else f"buffer {fqn.rpartition('.')[2]}"][fqn] = both
    return held, adam


def _role(
    pair: Pair,
    updates: Mapping[str, Update],
    role: str,
    places: Mapping[str, tuple[int, int]],
    known: Collection[str],
    found: Continuity,
) -> None:
    samples = _samples(pair, places, found, role.removesuffix(" codes"))
    if not samples:
        return
    found.checked["P33"] = ""
    kept = {fqn: _kept(a, b) for fqn, (a, b) in samples.items()}
    single = all(updates[fqn].k == 1 for fqn in samples)
    # gradients and their differences are like none of the old ones; a few resemble those of others by chance
    what = quantity(role.removesuffix(" codes"))
    passing = (what == STATE or role in DIFFERENCES) and median(one.own for one in kept.values()) < LIKE
    least = MOST * len(kept) if passing else 2
    turned = _turned(samples, places, pair, kept, single)
    forms = dict.fromkeys(turned if len(turned) >= least else (), "moved.name")
    rest = {fqn: one for fqn, one in kept.items() if fqn not in forms and fqn not in known}
    same = not fields_changed(pair).keys() & DECAYS  # otherwise an update keeps another share
    counted = pair.b.facts.optimizer.family == "Adafactor"  # its first update keeps nothing, whatever it had
    once = {fqn for fqn in rest if same and updates[fqn].k == 1 and not (counted and updates[fqn].after == 1)}
    forms |= _broken(rest, once)
    older = fell_back(pair.a.facts, pair.b.facts, once & forms.keys(), passed(pair.a.facts, pair.b.facts))
    forms |= {fqn: "fallen" for fqn in older if forms[fqn] == "zero" and kept[fqn].constant is None}
    if what == STATE and single and not role.endswith(" codes"):
        copies = {fqn for fqn, both in samples.items() if _from_weights(pair, fqn, places[fqn][0], *both)}
        forms |= dict.fromkeys(copies, "weights") if SOME <= len(copies) >= MOST * len(samples) else {}
    if what in FIRST and not passing:
        lost = {fqn for fqn in once & rest.keys() - forms.keys() if _is_other(rest[fqn])}
        forms |= dict.fromkeys(lost, "other") if len(rest) >= SOME and len(lost) >= MOST * len(rest) else {}
    elif role in STATISTICS and len(rest) >= SOME and all(one.own < LIKE for one in rest.values()):
        forms |= dict.fromkeys(rest.keys() - forms.keys(), "other")
    # among parameters that continue, one that does not even resemble itself
    odd = {f for f in rest if rest[f].own < LIKE / 2 and median(one.own for one in kept.values()) >= STANDS}
    if (once or odd) and not (forms.keys() - rest.keys()):
        loud = {f for f, form in forms.items() if form in ("zero", "other", "ratio")} | (rest.keys() - forms.keys())
        moved = _searched(pair, {f: places[f] for f in (once | odd) & loud}, found)
        forms |= {f: f"moved.{kind}" for f, kind in moved.items() if len(moved) >= max(least, 2) or f in odd}
        forms |= dict.fromkeys(_in_part(pair, {f: places[f] for f in once - forms.keys()}, found), "zeros")
    codes = role.endswith(" codes")
    role = role.partition(" ")[0]  # buffers are compared with those of their name
    for fqn, one in kept.items():
        if form := forms.get(fqn, ""):  # of codes, the table or the scales may be wrong: a part of the state
            key = (fqn, role.replace("state", "absmax")) if codes else (fqn, role)
            found.forms[key] = f"codes.{form}" if codes else form
        elif one.own >= LIKE:
            found.forms[fqn, role] = ""


def _samples(
    pair: Pair, places: Mapping[str, tuple[int, int]], found: Continuity, role: str = ""
) -> dict[str, tuple[Array, Array]]:
    samples: dict[str, tuple[Array, Array]] = {}
    names = list(places)
    for fqn in names[:: max(math.ceil(len(names) / LOOKED), 1)]:
        one, two = places[fqn]
        try:
            if _is_quantised(pair, fqn, role):
                a, b = (_dequantised(side, fqn, role) for side in (pair.a, pair.b))
            else:
                a, b = (_sample(side.tensor(at)) for side, at in ((pair.a, one), (pair.b, two)))
        except WorkbenchError as error:
            found.not_checked["P32"] = f"{fqn!r}: {error}"
            continue
        if len(a) >= ENOUGH and np.isfinite(a).all() and np.isfinite(b).all() and a.any():
            samples[fqn] = a, b
    return samples


def _is_quantised(pair: Pair, fqn: str, role: str) -> bool:
    """Return whether both sides hold the state as codes of 8 bits, with a table of values and scales of blocks."""
    roles = [side.params.get(fqn, {}) for side in (pair.a, pair.b)]
    parts = (role, f"qmap{role[-1:]}", f"absmax{role[-1:]}")
    if role not in ("state1", "state2") or not all(part in held for part in parts for held in roles):
        return False
    sides = [
        [(side.dtype(held[part]), side.ckpt.catalog.numel[held[part]]) for part in parts]
        for side, held in zip((pair.a, pair.b), roles, strict=True)
    ]
    return all(
        codes[0] == "uint8" and table == ("float32", 256) and scales[0] == "float32" and scales[1] > 0
        for codes, table, scales in sides
    )


def _dequantised(state: State, fqn: str, role: str) -> Array:
    """Return a sample of such a state: ``qmap[code] · absmax[block]``.

    Source: bitsandbytes 0.49 ``functional.py`` (``dequantize_blockwise``); blocks are runs of the flat tensor.
    """
    held = state.params[fqn]
    tensor = state.tensor(held[role])
    rows = spread(tensor.shape, SAMPLED)
    codes = (tensor.lazy[rows.tolist()] if rows is not None else tensor).numpy().reshape(-1)
    width = tensor.numel() // tensor.shape[0] if tensor.shape else 1
    at = np.arange(len(codes)) if rows is None else (rows[:, None] * width + np.arange(width)).reshape(-1)
    table, scales = (_sample(state.tensor(held[f"{part}{role[-1]}"])) for part in ("qmap", "absmax"))
    if rows is not None:
        scales = np.asarray(state.tensor(held[f"absmax{role[-1]}"]).numpy(), np.float64).reshape(-1)
    block = -(-tensor.numel() // len(scales))
    block = 1 << max(block - 1, 0).bit_length()  # the last block may be shorter
    return table[codes] * scales[np.minimum(at // block, len(scales) - 1)]


def _of_codes(forms: Mapping[Key, str]) -> dict[Key, str]:
    """Return the forms, of two quantised states that are both new as of states, else as of a part of them."""
    new = {fqn for (fqn, _), form in forms.items() if form == "codes.zero"}
    new = {fqn for fqn in new if all(forms.get((fqn, f"absmax{n}")) == "codes.zero" for n in (1, 2))}
    found = {}
    for (fqn, role), form in forms.items():
        if form.startswith("codes") and fqn in new:
            found[fqn, role.replace("absmax", "state")] = "zero"
        else:
            found[fqn, role] = form.partition(".")[0] if form.startswith("codes") else form
    return found


def _from_weights(pair: Pair, fqn: str, at: int, a: Array, b: Array) -> bool:
    """Return whether an update led to a state from the old weights, and not from its old value ``a``.

    A state that equals the weights before or after the update is not one: the optimizer or the trainer copies them.
    Where the owner is unknown, it may be any weight of that shape.
    """
    mine, theirs = (side.params[fqn] for side in (pair.a, pair.b))
    role = "master" if "master" in mine and "master" in theirs else "param"
    places = [(mine[role], theirs[role])] if role in mine and role in theirs else []
    if is_numbered(fqn):
        held = [roles["param"] for name, roles in pair.shared() if "param" in roles and name not in pair.b.facts.states]
        places = [both for both in held if pair.a.shape(both[0]) == pair.a.shape(at)][:LOOKED]
    for one, two in places:
        try:
            old, new = _sample(pair.a.tensor(one)), _sample(pair.b.tensor(two))
        except WorkbenchError:
            continue
        if not len(old) == len(new) == len(b) or np.array_equal(new, b) or np.array_equal(old, b):
            continue
        if np.linalg.norm(b - old) < NEARER * np.linalg.norm(b - a):
            return True
    return False


def _kept(a: Array, b: Array) -> Kept:
    constant = float(b[0]) if (b == b[0]).all() and not (a == a[0]).all() else None
    aa = float(np.dot(a, a))
    low = least = most = math.nan
    some = a > 0
    if (a >= 0).all() and (b >= 0).all() and np.count_nonzero(some) >= ENOUGH:
        low, least, most = (float(one) for one in np.quantile(b[some] / a[some], (0.05, 0.01, 0.75)))
    same = np.array_equal(a, b)
    own = 1.0 if same else _correlation(_eased(a), _eased(b))
    offset = abs(float(b.mean() - a.mean())) * math.sqrt(len(a) / aa)
    size, level = math.sqrt(float(np.dot(b, b)) / aa), math.sqrt(aa / len(a))
    return Kept(own, float(np.dot(a, b)) / aa, size, low, least, most, constant, offset, level)


def _turned(
    samples: Mapping[str, tuple[Array, Array]],
    places: Mapping[str, tuple[int, int]],
    pair: Pair,
    kept: Mapping[str, Kept],
    once: bool = False,
) -> set[str]:
    """Return the parameters whose state continues that of another one of the same shape; ``once``: by one update."""
    shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for fqn in samples:
        shapes[pair.b.shape(places[fqn][1])].append(fqn)
    found = set()
    for names in shapes.values():
        wanted = [fqn for fqn in names if kept[fqn].own < 1 - BETTER / 2 and kept[fqn].constant is None]
        wanted = [fqn for fqn in wanted if not once or kept[fqn].offset <= FILLED or not math.isnan(kept[fqn].low)]
        if len(names) < 2 or not wanted or len(samples[names[0]][0]) < TELLING:
            continue
        columns = pair.b.shape(places[names[0]][1])[-1]
        squares = all((one > 0).mean() > MOST for fqn in names for one in samples[fqn])
        line = partial(_own, columns if squares and columns < len(samples[names[0]][0]) else 1)
        old = {fqn: line(samples[fqn][0]) for fqn in names}
        for fqn in wanted:
            new = line(samples[fqn][1])
            own, likes = _correlation(old[fqn], new), {n: _correlation(old[n], new) for n in names if n != fqn}
            source = max(likes, key=lambda name: likes[name])
            best, sure = likes[source], SIGMAS / math.sqrt(len(new))
            if not squares and once and _left(old[source], new) < LIKE:
                continue  # a gradient may be like the momentum of another parameter
            if best > max(LIKE / 2, sure) and best > own + max(BETTER / 2, sure):
                found.add(fqn)
    return found if len(found) > 1 else set()  # a single one may resemble another by chance


def _broken(kept: Mapping[str, Kept], once: set[str]) -> dict[str, str]:
    """Return fqn → form, of state that is new, filled or multiplied; ``once``: after one update, with old settings."""
    forms = {fqn: "zero" if one.constant == 0 else "fill" for fqn, one in kept.items() if one.constant is not None}
    rest = {fqn: one for fqn, one in kept.items() if fqn not in forms}
    if not rest:
        return forms
    squares = all(not math.isnan(one.low) for one in rest.values())
    moved = {fqn for fqn in once & rest.keys() if not squares and rest[fqn].offset > FILLED}
    if len(rest) >= SOME and len(moved) >= MOST * len(rest):
        return forms | dict.fromkeys(moved, "fill")  # and one update
    once = once & rest.keys()
    new = {fqn for fqn, one in rest.items() if _is_new(one, squares, fqn in once)}
    if len(rest) >= SOME and len(new) >= MOST * len(rest):
        return forms | dict.fromkeys(new, "zero")
    other = {fqn for fqn in once - new if squares and rest[fqn].low < FELL}
    if len(rest) >= SOME and len(other | new) >= MOST * len(rest):
        return forms | dict.fromkeys(other | new, "other")
    usual = median(one.low if squares else one.slope for one in rest.values())
    if len(rest) >= SOME and usual >= (FELL if squares else STANDS):  # most parameters continue
        noise = NOISE * median(one.level for one in rest.values())
        few = {fqn for fqn in once if _is_less(rest[fqn], squares, usual) and (squares or rest[fqn].level > noise)}
        forms |= dict.fromkeys(few, "zero")
    scaled = {fqn for fqn in once if _is_scaled(rest[fqn], squares)}
    if len(rest) >= SOME and len(scaled) >= MOST * len(rest):
        forms |= dict.fromkeys(scaled, "ratio")
    return forms


def _is_new(one: Kept, squares: bool, once: bool) -> bool:
    if squares:  # those of others rose in as many elements as they fell
        return once and one.most < FELL
    return one.slope < NEW and one.size < SMALL if once else max(abs(one.slope), one.size) < TINY


def _is_other(one: Kept) -> bool:
    """Return whether an average is as large as before and not the old one."""
    return one.slope < NEW and one.size >= SMALL


def _is_less(one: Kept, squares: bool, usual: float) -> bool:
    """Return whether far less is left of it than of the same state of the other parameters."""
    if squares:
        return one.low < usual / APART and one.most < usual
    return one.slope < usual / APART and one.slope < NEW and one.size < SMALL


def _is_scaled(one: Kept, squares: bool) -> bool:
    if squares:
        return one.least > GREW
    return one.own < -LIKE or (one.own > STANDS and not LEFT < one.slope < 2 * GREW)


def _signs(forms: Mapping[Key, str]) -> Iterator[Sign]:
    hit: dict[str, list[Key]] = defaultdict(list)
    buffers = [fqn for (fqn, role), form in forms.items() if form and role == "buffer"]
    if buffers:
        words = f"{plural(len(buffers), 'buffer', 'do')} not continue their old values: {some(buffers)}"
        of = sum(role == "buffer" for _, role in forms)
        yield RULES["P24"].sign(words, {}, buffers[:NAMED], severity="warn", hit=len(buffers), of=of, causes=("A5",))
    for key, form in forms.items():
        if form and key[1] != "buffer":
            hit[form].append(key)
    for form, keys in hit.items():
        names = list(dict.fromkeys(fqn for fqn, _ in keys))
        roles = sorted({role for _, role in keys})
        of = sum(role in roles for _, role in forms)
        what = ", ".join(role.replace("absmax", "codes or scales of state") for role in roles[:3])
        what = f"the state ({what}) of {plural(len(names), 'parameter')}"
        lost = "it is new, or was set to 0" if 2 * len(keys) > of else "it is new, was set to 0, or is another one's"
        evidence: dict[str, Any] = {"roles": roles, "kind": form}
        if form.startswith("moved."):
            words = {
                "moved.name": "continues that of another parameter of the same shape, not its own",
                "moved.rows": "is most like the old one of other rows",
                "moved.shift": "is most like the old one, shifted",
            }[form]
            yield P32.sign(f"{what} {words}: {names[0]!r}", evidence, names[:NAMED], hit=len(keys), of=of)
            continue
        words = {
            "zero": f"does not continue its old values: {lost}",
            "zeros": "does not continue its old values in a part of the rows",
            "fallen": "fell, and so did the count of its updates",
            "other": "is as large as before, and does not continue its old values",
            "fill": "is one number in all elements",
            "ratio": "was multiplied by a factor",
            "weights": "is closer to the old weights than to its own old value",
            "codes": "does not continue its old values",
        }[form]
        yield P33.sign(f"{what} {words}: {names[0]!r}", evidence, names[:NAMED], hit=len(keys), of=of,
                       causes=_causes(forms, names, roles, form))  # fmt: skip


def _gone(pair: Pair) -> list[Sign]:
    """Report parameters whose optimizer state the later checkpoint does not hold."""
    if pair.mapped or pair.a.ckpt.format != pair.b.ckpt.format:
        return []
    had, gone = without_state(pair)
    tensors = [
        (fqn, role)
        for fqn, roles in pair.a.params.items()
        for role in roles
        if quantity(role) in (*MOMENTS, STATE) and pair.comparable(fqn)
    ]
    lost = [(fqn, role) for fqn, role in tensors if role not in pair.b.params.get(fqn, {})]
    if not gone and 2 * len(lost) > len(tensors):  # state that an optimizer keeps for all parameters together
        words = f"{len(lost):,} of {len(tensors):,} tensors of optimizer state are no longer stored"
        names = list(dict.fromkeys(fqn for fqn, _ in lost))[:NAMED]
        evidence = {"kind": "absent", "gone": True}
        return [P33.sign(words, evidence, names, hit=len(lost), of=len(tensors), causes=("B1",))]
    if len(gone) <= pair.left_out:  # the optimizer does not hold them (R12)
        return []
    words = f"the optimizer state of {len(gone):,} of {plural(len(had), 'parameter')} is no longer stored"
    return [P33.sign(words, {"kind": "absent", "gone": True}, gone[:NAMED], hit=len(gone), of=len(had), causes=("B1",))]


# ---- rows of moments, copies of weights ------------------------------------------------------------------------------


def _rearranged(
    pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], turned: set[str], found: Continuity
) -> Iterator[Sign]:
    """Search for the rows of second moments that break Adam's laws among the old rows; weights are searched by P17."""
    held = {
        fqn: roles["exp_avg_sq"]
        for fqn, roles in pair.shared()
        if "exp_avg_sq" in roles and fqn in states and (states[fqn].floor.broken or states[fqn].transition.broken)
    }
    if crossed := _crossed(pair, updates, states, held):
        least = min(states[fqn].ratio for fqn in crossed - held.keys())
        words = f"second moments of {plural(len(crossed & held.keys()), 'parameter')} fell, and those of others of the "
        words += f"same shapes grew in every element, to {least:.3g} times as much or more"
        evidence = {"kind": "name", "role": "exp_avg", "roles": ["exp_avg_sq"]}
        yield P32.sign(words, evidence, sorted(crossed)[:NAMED], hit=len(crossed), of=len(states), causes=("B5", "E13"))
        return
    placed = {f for f, both in held.items() if f in updates and _is_arranged(pair, both, updates[f], found)}
    kinds = dict.fromkeys(sorted(turned | placed), "rows")
    kinds |= _searched(pair, {f: both for f, both in held.items() if f not in kinds}, found)
    if 2 * len(kinds) < len(held) and (common := _in_common(pair, held, updates, found)) is not None:
        kind, words = common
        evidence = {"kind": kind, "role": "exp_avg", "roles": ["exp_avg_sq"]}
        causes = {"shift": ("E7", "E13"), "part": ("G6",)}.get(kind, ("E13", "B5"))
        yield P32.sign(words, evidence, list(held), hit=len(held), of=len(states), causes=causes)
        return
    for kind in ("rows", "shift"):
        if some := [fqn for fqn, one in kinds.items() if one == kind]:
            words = f"second moments of {plural(len(some), 'parameter')} are most like old ones of other places"
            evidence = {"kind": kind, "role": "exp_avg", "roles": ["exp_avg_sq"]}
            yield P32.sign(f"{words}: {some[0]!r}", evidence, some, hit=len(some), of=len(states))


def _crossed(
    pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], held: Mapping[str, tuple[int, int]]
) -> set[str]:
    """Return the parameters that fell, and others of their shape that grew in every element, in few updates.

    So few leave second moments nearly as they were. State that was lost falls, and no other state grows with it.
    """
    found = set()
    shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for fqn, roles in pair.shared():
        few = fqn in states and (one := updates[fqn]).k > 1 and one.betas is not None and one.fading**one.k >= KEEPS
        if few and "exp_avg_sq" in roles and states[fqn].floor.of >= ENOUGH:
            shapes[pair.b.shape(roles["exp_avg_sq"][1])].append(fqn)
    for names in shapes.values():
        fell = [fqn for fqn in names if fqn in held]
        grew = [fqn for fqn in names if fqn not in held and GREW < states[fqn].ratio < math.inf]
        if min(len(fell), len(grew)) > 1:
            found |= {*fell, *grew}
    return found if 2 * len(found & held.keys()) > len(held) else set()


def _is_arranged(pair: Pair, both: tuple[int, int], update: Update, found: Continuity) -> bool:
    """Return whether second moments stay above the floor of their old values in another order, not in place."""
    if update.betas is None or update.k < 1 or (sides := _matrices(pair, both, found)) is None:
        return False
    fade, lost, under = floor_terms(update.fading, update.k, pair.b.dtype(both[1]))
    least, now = ((1 - lost) * fade * sides[0] - under).ravel(), sides[1].ravel()
    broken = np.count_nonzero(now < least)
    orders = arrangements(sides[0].shape) if broken >= TELLING // 2 else ()
    return any(np.count_nonzero(now < least[at]) <= broken / FEWER for at in orders)


def _in_common(
    pair: Pair, held: Mapping[str, tuple[int, int]], updates: Mapping[str, Update], found: Continuity
) -> tuple[str, str] | None:
    """Return what all second moments that broke their floor have in common, as ``(kind, sentence)``.

    They obey the floor of the old ones some places away (``shift``) or of the other half of the rows (``rows``), or
    broke it in the same part of their rows alone (``part``). A floor holds in every element, so together a few tensors
    show what none shows alone.
    """
    sides: dict[str, tuple[Array, Array]] = {}
    for fqn, both in list(held.items())[:TOGETHER]:
        update = updates.get(fqn)
        one = None if update is None or update.betas is None or update.k < 1 else _matrices(pair, both, found)
        if update is not None and one is not None:
            fade, lost, under = floor_terms(update.fading, update.k, pair.b.dtype(both[1]))
            sides[fqn] = (1 - lost) * fade * one[0] - under, one[1]
    inner = {fqn: b < a for fqn, (a, b) in sides.items() if not kinds_of([fqn]) <= {"embed", "head"}}
    every = [np.count_nonzero(b < a) for a, b in sides.values()]
    if len(inner) < SOME or sum(every) < TELLING // 2:
        return None
    rows = [np.flatnonzero(one.any(1)) / len(one) for one in inner.values()]
    for parts in PARTS:
        at = {int(place * parts) for one in rows for place in one}
        if len(at) == 1 and sum(map(len, rows)) > ENOUGH:
            first = next(iter(at)) + 1
            return "part", f"second moments fell too far in part {first} of {parts} of the rows alone"
    least = sum(every) / FEWER
    if _broken_by(sides, _halves, least) <= least:
        return "rows", "second moments stay above the floor of the other half of their rows, and not above their own"
    for by in (by for size in range(1, TELLING + 1) for by in (size, -size)):
        if _broken_by(sides, partial(_apart, by), least) <= least:
            where = f"the elements {plural(abs(by), 'place')} {'before' if by > 0 else 'after'} them"
            return "shift", f"second moments stay above the floor of {where}, and not above their own"
    return None


def _halves(a: Array, b: Array) -> tuple[Array, Array]:
    return (np.roll(a, len(a) // 2, 0) if len(a) % 2 == 0 else a), b


def _apart(by: int, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the elements of two flat lines that are ``by`` places apart."""
    one, two = a.ravel(), b.ravel()
    return (one[:-by], two[by:]) if by > 0 else (one[-by:], two[:by])


def _broken_by(
    sides: Mapping[str, tuple[Array, Array]], placed: Callable[[Array, Array], tuple[Array, Array]], most: float
) -> int:
    """Return how many elements are below the floor of others, counted to beyond ``most``."""
    broken = 0
    for a, b in sides.values():
        floor, now = placed(a, b)
        broken += int(np.count_nonzero(now < floor))
        if broken > most:
            break
    return broken


def _in_part(pair: Pair, places: Mapping[str, tuple[int, int]], found: Continuity) -> set[str]:
    """Return the matrices that began anew in the same part of their rows, and only there."""
    lost: dict[tuple[int, int], set[str]] = defaultdict(set)
    looked = 0
    for fqn, both in places.items():
        sides = _matrices(pair, both, found)
        if sides is None or looked >= LOOKED:
            continue
        looked += 1
        for parts in PARTS:
            if len(sides[0]) % parts or not all(block.any() for block in np.split(sides[0], parts)):
                continue
            kept = [_kept(x.ravel(), y.ravel()) for x, y in zip(*(np.split(one, parts) for one in sides), strict=True)]
            new = [at for at, one in enumerate(kept) if one.slope < NEW and one.size < SMALL]
            if len(new) == 1 and all(one.slope >= STANDS for at, one in enumerate(kept) if at not in new):
                lost[parts, new[0]].add(fqn)
    best = max(lost.values(), key=len, default=set())
    return best if len(best) >= max(SOME, looked / 2) else set()


def _matrices(pair: Pair, places: tuple[int, int], found: Continuity) -> tuple[Array, Array] | None:
    """Return a matrix before and after; ``None`` if it is large, no matrix, or cannot be read."""
    shape = pair.a.shape(places[0])
    if len(shape) != 2 or min(shape) < 2 or math.prod(shape) > WHOLE:
        return None
    try:
        a, b = (side.tensor(at) for side, at in zip((pair.a, pair.b), places, strict=True))
        return sampled(a, None, WHOLE).reshape(a.shape), sampled(b, None, WHOLE).reshape(b.shape)
    except WorkbenchError as error:
        found.not_checked["P32"] = f"{pair.a.ckpt.catalog.keys[places[0]]!r}: {error}"
        return None


def _searched(pair: Pair, held: Mapping[str, tuple[int, int]], found: Continuity) -> dict[str, str]:
    """Return fqn → ``rows`` or ``shift``, of matrices that are more like old values of other places than their own."""
    kinds: dict[str, str] = {}
    groups: dict[int, list[str]] = defaultdict(list)
    for fqn, (one, _) in held.items():
        if len(shape := pair.a.shape(one)) > 1:
            groups[shape[-1]].append(fqn)
    for columns, names in groups.items():
        old, orders = {}, {}
        for fqn in names[:LOOKED]:
            sides = _matrices(pair, held[fqn], found)
            if sides is not None and all(np.isfinite(one).all() and one.any() for one in sides):
                line = _profile if all((one > 0).mean() > MOST for one in sides) else _eased
                old[fqn] = tuple(map(line, sides))
                orders[fqn] = partial(_arranged, line, sides[0])
        for fqn, (a, b) in old.items():
            near = [other for name, (other, _) in old.items() if parse(name).layer == parse(fqn).layer]
            others = [other for name, (other, _) in old.items() if name != fqn and other.shape == a.shape]
            if _correlation(a.ravel(), b.ravel()) >= 1 - BETTER:
                continue
            if _shifted(a, b):
                kinds[fqn] = "shift"
            elif _elsewhere(a, b, np.concatenate(near), [*others, *orders[fqn]()], columns):
                kinds[fqn] = "rows"
    return kinds


def _shifted(a: Array, b: Array) -> bool:
    """Return whether ``b`` is most like ``a`` shifted as a flat line, by other than complete rows."""
    spectra = [np.fft.rfft(one.ravel(), 2 * one.size) for one in (a, b)]
    products = np.fft.irfft(spectra[1] * np.conj(spectra[0]))
    like = products / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30)
    best, sure = int(like.argmax()), SIGMAS / math.sqrt(b.size)
    by = best if best < b.size else best - 2 * b.size
    if not (by % b.shape[1] and like[best] > max(LIKE / 2, sure, like[0] + max(BETTER / 2, sure))):
        return False
    return _left(np.roll(a.ravel(), by), b.ravel()) >= LIKE


def _elsewhere(a: Array, b: Array, every: Array, whole: Sequence[Array], columns: int) -> bool:
    """Return whether ``b`` is more like other rows of ``every``, or another tensor of ``whole``, than like ``a``."""
    own, sure = _correlation(b.ravel(), a.ravel()), SIGMAS / math.sqrt(b.size)
    likes = [_correlation(b.ravel(), other.ravel()) for other in whole]
    best = max(likes, default=-1.0)
    if best > max(LIKE / 2, sure) and best > own + max(BETTER / 2, sure):
        return _left(whole[likes.index(best)].ravel(), b.ravel()) >= LIKE
    rows = np.unique(np.linspace(0, len(b) - 1, ROWS).astype(int))
    like = _unit(b[rows]) @ _unit(every).T
    at, most = (_unit(b[rows]) * _unit(a[rows])).sum(1), like.max(1)
    return bool(np.median(most) > max(LIKE, CHANCE / math.sqrt(columns)) and np.median(most - at) > BETTER)


def _arranged(line: Callable[[Array], Array], values: Array) -> Iterator[Array]:
    """Yield what ``line`` makes of a matrix whose elements are in another order."""
    for at in arrangements(values.shape):
        yield line(values.ravel()[at].reshape(values.shape))


def _profile(values: Array) -> Array:
    """Return logarithms without the mean of their row and column, which are much the same everywhere."""
    logs = np.log(np.maximum(values.astype(np.float64), 1e-38))
    return logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()


def _unit(rows: Array) -> Array:
    return rows / np.maximum(np.sqrt((rows * rows).sum(1, keepdims=True)), 1e-30)


def _copies(pair: Pair, states: Mapping[str, PairState], found: Continuity) -> Iterator[Sign]:
    """Search for tensors beside the trained weights that hold what those held in the earlier checkpoint."""
    if pair.mapped:
        return
    trained = {fqn for fqn, roles in pair.b.params.items() if any(quantity(r) in (*MOMENTS, STATE) for r in roles)}
    catalog, there = pair.stored.ckpt.catalog, pair.b.ckpt.catalog
    fqns, roles = pair.a.names.fqns, pair.a.names.roles
    sources: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for at, (fqn, role) in enumerate(zip(fqns, roles, strict=True)):
        if role in ("param", "master") and catalog.numel[at] >= ENOUGH:
            sources[_tail(fqn or catalog.keys[at]), tuple(catalog.shape_of(at))].append(at)
    beside = [
        at
        for at, key in enumerate(catalog.keys)
        if roles[at] in ("other", "ema", "buffer", "param")
        and not (roles[at] == "param" and fqns[at] in trained)
        and key in there.index
        and catalog.numel[at] >= ENOUGH
    ]
    hit: dict[str, str] = {}
    for at in beside[:: max(math.ceil(len(beside) / BESIDE), 1)]:
        key, shape = catalog.keys[at], tuple(catalog.shape_of(at))
        others = [one for one in sources[_tail(fqns[at] or key), shape] if one != at][:SOME]
        if not others or tuple(there.shape_of(there.index[key])) != shape:
            continue
        try:
            now = _sample(pair.b.ckpt[key])
            if np.array_equal(now, _sample(pair.stored.ckpt[key])) or (now == now[0]).all():
                continue
            other = next((one for one in others if np.array_equal(now, _sample(pair.stored.tensor(one)))), None)
        except WorkbenchError as error:
            found.not_checked["P35"] = f"{key!r}: {error}"
            continue
        if other is not None:
            hit[key] = catalog.keys[other]
    if beside:
        found.checked["P35"] = plural(len(beside), "tensor")
    if hit:
        key, source = next(iter(hit.items()))
        words = f"{plural(len(hit), 'tensor')} beside the trained weights hold what others held: {key!r} that of "
        words += repr(source)
        average = any(word in key.lower() for word in OF_AVERAGES)
        causes = ("F4", "F6", "A5") if average else ("F6", "F4", "A5")
        yield P35.sign(words, {"from": source}, list(hit)[:NAMED], hit=len(hit), of=len(beside), causes=causes)


def _taken(pair: Pair, states: Mapping[str, PairState], found: Continuity) -> Iterator[Sign]:
    """Search for weights beyond the reach of their updates among the other tensors of the earlier checkpoint."""
    far = [(f, roles["param"]) for f, roles in pair.shared() if "param" in roles and f in states]
    far = [(f, at) for f, at in far if states[f].reach.broken]
    catalog = pair.stored.ckpt.catalog
    beside: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for at, key in enumerate(catalog.keys if far and not pair.mapped else ()):
        if pair.a.names.roles[at] in ("other", "ema") and catalog.numel[at] >= ENOUGH:
            beside[_tail(key), tuple(catalog.shape_of(at))].append(at)
    hit: dict[str, str] = {}
    for fqn, (_, at) in far[:BESIDE]:
        sources = beside[_tail(fqn), tuple(pair.b.shape(at))][:SOME]
        try:
            now = _sample(pair.b.tensor(at)) if sources else np.empty(0)
            same = (one for one in sources if np.array_equal(now, _sample(pair.stored.tensor(one))))
            if (one := next(same, None)) is not None:
                hit[fqn] = catalog.keys[one]
        except WorkbenchError as error:
            found.not_checked["P35"] = f"{fqn!r}: {error}"
    if hit:
        fqn, source = next(iter(hit.items()))
        words = (
            f"{len(hit):,} of {plural(len(states), 'weight')} hold what other tensors of the earlier checkpoint held: "
        )
        words += f"{fqn!r} that of {source!r}"
        evidence = {"kind": "taken", "from": source}
        yield P35.sign(words, evidence, list(hit)[:NAMED], hit=len(hit), of=len(states), causes=("F4",))


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _causes(forms: Mapping[Key, str], names: Sequence[str], roles: Sequence[str], form: str) -> tuple[str, ...]:
    """Return the causes that the lost state suggests: all of it, the squares alone, or another part."""
    if form == "ratio":
        return ("B6", "E12", "E13")
    if form == "codes":
        return ("B11", "B6")
    if form == "fallen":
        return ("G6", "C9")
    wanted = set(names)
    others = {role for (fqn, role), one in forms.items() if fqn in wanted and not one}
    if not others:
        return ("B1", "B3")
    return ("B4", "B11") if set(roles) <= set(SECOND) and others & set(FIRST) else ("B11", "B3", "B1")


def _eased(values: Array) -> Array:
    """Return values with large ones brought closer; otherwise a few would decide a correlation."""
    return np.sign(values) * np.sqrt(np.abs(values))


def _own(columns: int, values: Array) -> Array:
    """Return what is a tensor's own: squares without the mean of row and column, other values as they are."""
    return _profile(values.reshape(-1, columns)).ravel() if columns > 1 else _eased(values)


def _correlation(x: Array, y: Array) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float(np.dot(x, x)) * float(np.dot(y, y)))
    return float(np.dot(x, y)) / size if size > 0 else 0.0


def _left(x: Array, y: Array) -> float:
    """Return the share of ``x`` that is left in ``y``, apart from their means."""
    x = x - x.mean()
    return float(np.dot(x, y)) / max(float(np.dot(x, x)), 1e-30)


def _sample(tensor: Any) -> Array:
    return sampled(tensor, spread(tensor.shape, SAMPLED), SAMPLED)
