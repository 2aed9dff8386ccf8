"""Rules of a pair on state that updates carry over, on samples: second moments, averages, running statistics.

::

    v_B          is not a function of v_A, because k gradients blur the old profile                   P21
    e_B          an average is between its old value and the weights that it averaged                 P22
    e_B          and not at the weights, as if it had started there                                   P23
    n_B ≥ n_A    numbers of batches and of averaged models; buffers keep most of their values         P24
    s_B ≥ d·s_A  sums and averages of squares of other optimizers, element by element                 P25
    m_B·m_A      averages of gradients keep a part of their old value                                 P26
    W_B = W_A    the base under adapters is not trained                                               P27
    e_B ≠ e_A    an average of weights that changed                                                   P28
    g² ≈ v       gradients since then, from v_B − β2^k·v_A, are as large as before                    P30
    W_B − W_A    does not depend on the low bits of W_A, as if they had been cut off                  P31
    γ_B − 1      keeps most of γ_A − 1: norms do not go back to where they began                       P08
    W_B          keeps most of W_A in each run of elements, too                                        P08
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from workbench.analysis.patterns.rounding import rounded
from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.doctor.facts.counted import fell_back
from workbench.doctor.facts.evidence import Pair, State, is_numbered
from workbench.doctor.facts.flat import leaves
from workbench.doctor.facts.groups import OF_AVERAGES
from workbench.doctor.facts.state import Group
from workbench.doctor.laws.bounds import ROUNDINGS, UNITS
from workbench.doctor.ledger.roles import BLOCK_MAXIMA, BUFFERS, FIRST, MASTERS, MOMENTS, STATE, quantity
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome, Rule, Sign, register, some
from workbench.doctor.origins.became import confined
from workbench.doctor.origins.merge import changed_rank, is_beyond, module_of, ranks_of
from workbench.doctor.origins.samples import sampled, spread
from workbench.doctor.passes.pair import PairState, Update
from workbench.doctor.passes.updates import OFTEN, passed
from workbench.doctor.rules.continuity import Continuity
from workbench.doctor.rules.pair import replayed
from workbench.doctor.rules.stated import NAMED
from workbench.errors import WorkbenchError
from workbench.names.roles import adapter_of
from workbench.tensor import LazyTensor

#: Last words in the keys of buffers that a model computes from its config: frequencies, positions, masks.
CONSTANT = frozenset(
    ["inv_freq", "freqs_cis", "cos_cached", "sin_cached", "position_ids", "relative_position_index", "causal_mask"]
)
SAMPLED = 1 << 14  #: elements per tensor
LOOKED = 64  #: parameters, spread over all
GROWN = 2.0  #: least v_B/v_A over all elements of a parameter from which its profile is examined
SHARP = 0.05  #: standard deviation of log v_B about a line over log v_A below which no gradient blurred it
NEARLY = 1e-3  #: above an integer: a count that begins at a small number, such as 1e-4, to divide by it
#: Words in the keys of integers that count updates.
_COUNTS = re.compile(r"batch|count|step|averaged|updates|iter")
_COUNTED = re.compile(r"(?:^|[._])(?:counts?|seen)$")  #: names of counts that are stored as floats
#: Last parts of keys of integers that begin anew when a ring is full.
_WRAPS = re.compile(r".*(?:ptr|pointer|cursor|position|pos|index|idx|head)")
LEVEL = 0.2  #: standard deviation of log v_B over that of log v_A from which the old profile is lost
STRAIGHT = 0.02  #: distance of the line's slope from 1 within which it is a factor
ENOUGH = 64  #: elements
KEPT = 0.05  #: β2^k below which new gradients are an average themselves
OUTSIDE = 0.05  #: share of the elements of an average
DECAY = 0.95  #: least decay of an average; decays in use are 0.99 and more, and first rise as (1+n)/(10+n)
SETTLED = 20  #: updates; of tables, such as codebooks, EARLY are enough
EARLY, EARLIER = 5, 2.0  #: updates before which gradients are not compared; factor of the limit before they settle
CLEAR = 0.15  #: excess over what that decay allows
FARTHER = 3.0  #: times the way of all other averages
APART = 1e-3  #: share of the weights' size; an average closer to the weights than that shows nothing
FEW = 3  #: elements that may be damaged one by one
PATCH, DENSE = 0.2, 0.7  #: share of one parameter below which a change is a damaged part; least of it that fell
FELL = 0.02  #: share of the elements of a parameter
NONE = 1e-3  #: size of gradients, relative to those before, below which there were none: a batch without targets
SCALED = 0.2  #: share that all elements of squares keep if they were multiplied, and not lost
MOST = 0.9  #: share of the parameters; gradients that reverse suddenly affect fewer
HALF = 0.5  #: decay^k below which new gradients, which oppose old momentum, may outweigh it
SIGMAS = 8.0  #: standard errors of a correlation that is not by chance
LOW_LEAST = 256  #: elements whose low bits are examined
LEFT = 0.3  #: decay^k from which the rest of an old average is visible among k new gradients
FULL = 0.8  #: ‖m_B‖/‖m_A‖ from which a momentum that lost its past is another one
STANDS = 10  #: updates
RANKED = 8  #: matrices
LARGER = (
    4.0  #: root mean square of gradients over that of earlier ones; healthy runs of the lab stay within 0.3 and 2.5
)
WILD, LONE = 10.0, 2  #: times that limit; most parameters whose gradients alone may be that large
#: Factored second moments of torch.optim.Adafactor and transformers' Adafactor.
FACTORED = ("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col")
LIKE, BETTER = 0.5, 0.1  #: correlation with the squares of another, and its excess over that with its own
SQUARES = frozenset({"sum", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", BLOCK_MAXIMA, *FACTORED})
LARGEST = ("max_exp_avg_sq", "exp_inf", BLOCK_MAXIMA)  #: of them, those that are no sums
#: Averages of squares of optimizers that lack Adam's other laws, and which of the betas is their decay.
AVERAGED = {"exp_avg_sq": 1, "exp_avg_var": 1}
#: Optimizers that keep β·v, as their code shows. Others may correct the average in each update, which keeps less.
PLAIN = {"AdaBelief", "AdaBound", "Adan", "AdEMAMix", "D-Adaptation", "LAMB", "NAdam", "Prodigy", "schedule-free"}
THIRD = "Adan"  #: decays its squares by the last of three betas
UNLIKE_IT = ("beta2_decay", "decay_rate", "shampoo_beta")  #: fields of optimizers whose squares decay otherwise
SLACK = 1e-5  #: rounding tolerance per update
DECAYS = ("alpha", "rho", "momentum", "betas", "beta2_decay", "decay_rate")  #: fields of param groups
LONG = 100_000  #: updates
LEAST = 8  #: elements of buffers
MULTIPLIED = 3.0  #: b·a/a·a from which a buffer was multiplied
UNLIKE = 0.1  #: b·a/a·a below which one update replaced nearly all rows of a buffer
SMALL = 0.6  #: ‖b‖/‖a‖ below which a buffer began anew
NOTICED = 8  #: roundings that an offset of norms exceeds
PARTS = 4.0  #: the same as SIGMAS, of a single vector among others
RUN = 32  #: elements of a run that is compared by itself

P21 = Rule(
    "P21", "second moments that were transformed", ("B6",), "pair",
    "k gradients blur the profile of v, so v_B is not a function of v_A if every element grew",
    f"every v_B/v_A ≥ {GROWN:g}, and log v_B within {SHARP:g} of a line over log v_A; a warning: every v_B/(β2^k·v_A) "
    f"≥ {GROWN:g}, and the least of them exceeds 1 by {HALF:g} of what their median does", "workbench.doctor.laws",
    "error", "none known", "load exp_avg_sq as it was saved: unscaled and squared"
)  # fmt: skip
P22 = Rule(
    "P22", "an average that does not belong to these weights", ("F4",), "pair",
    "an exponential average stays between its old value and the weights that it averaged, element by element",
    f"more than {OUTSIDE:.0%} of the elements outside, allowing for the weights' reach", "convexity", "error",
    "averages that are stored with a correction", "restore the averages with the weights"
)  # fmt: skip
P23 = Rule(
    "P23", "an average that restarted from the weights", ("F4",), "pair",
    "in k updates, an average with decay d moves at most 1 − d^k of the way to the weights",
    f"{CLEAR:g} more of the way than with d = min({DECAY:g}, (1+n)/(10+n))", "definition of the average", "warn",
    "a decay that is smaller, or still rising", "restore the averages with the weights"
)  # fmt: skip
P24 = Rule(
    "P24", "buffers or their counters restarted", ("A5", "F4", "D9"), "pair",
    "counters of batches and averages never fall; running statistics keep most of their values in one update; what a "
    "config defines (rotary frequencies, positions) stays the same",
    f"counters: exact; values (a warning): after one update b·a < {LEFT:g}·a·a and ‖b‖ < {SMALL:g}·‖a‖, b·a > "
    f"{MULTIPLIED:g}·a·a, or a constant", "torch.nn.BatchNorm, torch.optim.swa_utils", "error",
    "statistics that were reset on purpose", "restore the buffers with the weights"
)  # fmt: skip
P25 = Rule(
    "P25", "sums or averages of squares that fell", ("B1", "B3", "B4"), "pair",
    "Adagrad's sum and AMSGrad's maximum never fall; averages of squares fall at most by their decay",
    f"s_B < d·s_A in more than {FELL:.0%} of the elements ({FEW} of AMSGrad's), d = 1 or decay^k",
    "torch.optim: adagrad, adam, rmsprop, adadelta, adamax, adafactor", "error", "none known",
    "restore the optimizer's state"
)  # fmt: skip
P26 = Rule(
    "P26", "averages of gradients that lost their past", ("B1", "B3"), "pair",
    "after k updates, an average of gradients keeps decay^k of its old value",
    f"less than half of that, in {MOST:.0%} of the parameters, where decay^k ≥ {HALF:g}",
    "torch.optim: sgd; Lion; Muon", "warn", "gradients that reversed suddenly", "restore the optimizer's state"
)  # fmt: skip
P27 = Rule(
    "P27", "the base under adapters changed", ("F6", "F5", "D7", "G6"), "pair",
    "weights without optimizer state do not change", "exact", "PEFT: base layers are frozen", "error",
    "adapters merged on purpose", "load the base that the adapters were trained on"
)  # fmt: skip
P28 = Rule(
    "P28", "averages that do not change", ("F4",), "pair", "an average of weights that change changes too",
    f"equal bit for bit over {STANDS} updates or more", "definition of the average", "warn",
    "averages that are updated less often", "update the averages after every step"
)  # fmt: skip
P30 = Rule(
    "P30", "gradients of another scale", ("B10", "C10", "D8"), "pair",
    "the mean square of the gradients since then, (v_B − β2^k·v_A)/(1 − β2^k), is about that of those before",
    f"more than {LARGER:g} times, or less than 1/{LARGER:g}, in the median parameter, and half that in "
    f"{MOST:.0%} of them, or {WILD:g} times that limit in one or {LONE}; {EARLIER:g} times that after fewer than "
    f"{SETTLED} updates, and nothing before {EARLY}",
    "definition of exp_avg_sq", "warn",
    "other data, another loss or batch on purpose; a spike in the loss itself",
    "compare how the loss is scaled and averaged, and the clipping, before and after the resume"
)  # fmt: skip
register(P21, P22, P23, P24, P25, P26, P27, P28, P30)


def check_carried(pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState]) -> Continuity:
    """Check state that updates carry over, on samples.

    Args:
        updates, states: fqn → the updates between the two checkpoints, and the sums of their pass.
    """
    found = Continuity()
    _profiles(pair, updates, states, found)
    _gradients(pair, updates, states, found)
    _averages(pair, updates, states, found)
    _counters(pair, found)
    _constants(pair, found)
    if rest := _buffers(pair, found):
        found.not_checked["buffers"] = f"no law relates the values of {plural(rest, 'buffer')} to the old ones"
    found.not_checked.setdefault("P24", Inapplicable("no buffers and counters are stored in both"))
    if "P24" in found.checked:
        del found.not_checked["P24"]
    _squares(pair, updates, found)
    _firsts(pair, updates, found)
    _bases(pair, states, found)
    _low_bits(pair, found)
    _offsets(pair, updates, found)
    _emptied(pair, updates, states, found)
    return found


def _profiles(pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], found: Outcome) -> None:
    held = dict(pair.shared())
    slopes: dict[str, tuple[float, float]] = {}
    seen = late = 0
    for fqn, sums in states.items():
        update = updates[fqn]
        if update.betas is None or sums.skipped.get("floor"):
            continue
        if update.betas[1] ** update.k < KEPT:
            late += 1
            continue
        seen += 1
        if sums.floor.broken or not GROWN <= sums.ratio < math.inf or sums.floor.of < ENOUGH or len(slopes) >= LOOKED:
            continue
        both = _both(pair, fqn, held[fqn]["exp_avg_sq"], "P21", found)
        if both is not None and (line := _line(*both)) is not None:
            slopes[fqn] = line
    if seen:
        found.checked["P21"] = f"{plural(seen, 'parameter')}"
        _grown(pair, updates, {f: one for f, one in states.items() if one.floor.of >= ENOUGH}, found)
    elif late:
        found.not_checked.setdefault("P21", "after so many updates, little of the old second moments is left")
    else:
        found.not_checked.setdefault("P21", Inapplicable("no law of second moments is known"))
    if slopes:
        name, (slope, factor) = next(iter(slopes.items()))
        power = abs(slope - 1) > STRAIGHT
        words = f"raised to the power {slope:.3g}" if power else f"multiplied by {factor:.4g}"
        text = f"exp_avg_sq of {plural(len(slopes), 'parameter')} is the old one, transformed: {name!r} was {words}"
        evidence = {"kind": "power" if power else "factor", "slope": slope, "factor": factor}
        found.signs.append(P21.sign(text, evidence, list(slopes)[:NAMED], hit=len(slopes), of=seen))


def _grown(pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], found: Outcome) -> None:
    """Report second moments that are all above the floor by about the same.

    What gradients add differs from element to element, however large they are, and some elements get little.
    """
    held = dict(pair.shared())
    floors = {f: betas[1] ** updates[f].k for f in states if (betas := updates[f].betas) is not None and updates[f].k}
    lowest = min((states[fqn].ratio / floors[fqn] for fqn in floors), default=0.0)
    if lowest < GROWN or lowest == math.inf or sum(states[fqn].floor.of for fqn in floors) < LOW_LEAST:
        return
    times = []
    for fqn in _spread(list(floors)):
        both = _both(pair, fqn, held[fqn]["exp_avg_sq"], "P21", found)
        if both is not None and (some := both[0] > 0).any():
            times.append(float(np.median(both[1][some] / both[0][some])) / floors[fqn])
    if times and lowest - 1 > HALF * (max(times) - 1):
        text = (
            f"exp_avg_sq of {plural(len(floors), 'parameter')} is, in every element, at least {lowest:.3g} times what "
        )
        text += f"the updates leave of its old value, and at most {max(times):.3g} times that in the median"
        evidence = {"kind": "grown", "factor": lowest}
        sign = P21.sign(text, evidence, list(floors)[:NAMED], severity="warn", hit=len(floors), of=len(floors))
        found.signs.append(sign)


def _line(v_a: Array, v_b: Array) -> tuple[float, float] | None:
    """Return the slope of log v_B over log v_A and the median factor, or ``None`` if they are blurred."""
    both = (v_a > 0) & (v_b > 0) & np.isfinite(v_a) & np.isfinite(v_b)
    if np.count_nonzero(both) < ENOUGH:
        return None
    x, y = np.log(v_a[both]), np.log(v_b[both])
    if min(x.std(), y.std()) < 4 * SHARP:  # anything is a function of equal numbers
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).mean() / x.var())
    rest = (y - y.mean()) - slope * (x - x.mean())
    return (slope, float(np.median(v_b[both] / v_a[both]))) if rest.std() <= SHARP else None


def _gradients(pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], found: Outcome) -> None:
    """Check the size of the gradients since the earlier state against its own second moments."""
    sizes: dict[str, float] = {}
    squares: dict[str, tuple[float, float]] = {}
    level: list[str] = []
    held = {
        fqn: roles["exp_avg_sq"]
        for fqn, roles in pair.shared()
        if "exp_avg_sq" in roles and fqn in states and states[fqn].floor.of and not states[fqn].floor.broken
    }
    broken = sum(bool(one.floor.broken) for one in states.values())
    scaled = any(one.rule == "P21" for one in found.signs) or pair.a.facts.betas != pair.b.facts.betas
    if broken > len(held) or scaled:
        found.not_checked.setdefault("P30", "most second moments did not continue from the old ones, or β2 changed")
        return
    others: dict[str, tuple[str, float | None]] = {}
    least: float = SETTLED
    only = _only(pair.b.facts.groups)
    for fqn, roles in pair.shared():
        group = pair.b.facts.group_of(fqn) or only
        other = next((one for one in ("square_avg", "row_var", "momentum", "exp_avg") if one in roles), None)
        if fqn in updates and "exp_avg_sq" not in roles and group is not None and other is not None:
            decay = _decay(other, group, updates[fqn])
            if decay is not None and (other in SQUARES or updates[fqn].k == 1):
                others[fqn] = other, decay
                held[fqn] = roles[other]
    for fqn in _spread(list(held)):
        update = updates[fqn]
        before = update.before if update.before is not None else pair.a.facts.step or 0
        role, decay = others.get(fqn, ("exp_avg_sq", None if update.betas is None else update.betas[1]))
        if decay is None or update.k < 1 or before < EARLY:
            continue
        least = min(least, before)
        both = _both(pair, fqn, held[fqn], "P30", found)
        if both is None or len(both[0]) != len(both[1]) or not all(np.isfinite(one).all() for one in both):
            continue
        fade = decay**update.k
        if role in ("momentum", "exp_avg"):  # of random signs, k gradients add up to the root of 1/(1−β²)
            size = float(np.dot(both[0], both[0]))
            new = both[1] - decay * both[0]
            like = float(np.dot(both[0], both[1])) / math.sqrt(max(size * float(np.dot(both[1], both[1])), 1e-300))
            if size > 0 and like > LEFT:  # otherwise it is not the old one
                # steady ones add up to more, so that smaller ones are not seen
                sizes[fqn] = max(math.sqrt(float(np.dot(new, new)) * (1 - decay**2) / size), 1.0)
            continue
        if role == "exp_avg_sq" and _levelled(*both):
            level.append(fqn)
        v_a, v_b = (float(one.mean(dtype=np.float64)) for one in both)
        old = v_a / (1 - decay**before) if role not in FACTORED else v_a
        if old > 0 and v_b >= fade * v_a:
            size = math.sqrt(max(v_b - fade * v_a, 0.0) / (1 - fade) / old)
            sizes[fqn] = size if role == "exp_avg_sq" else max(size, 1.0)  # others may have begun with larger ones
            squares[fqn] = old, size * size * old
    if not sizes:
        found.not_checked.setdefault("P30", Inapplicable("no second moments of earlier gradients can be compared"))
        return
    found.checked["P30"] = f"{plural(len(sizes), 'parameter')}"
    if len(level) >= MOST * len(sizes):
        text = f"exp_avg_sq of {plural(len(level), 'parameter')} is nearly one number in all elements: {level[0]!r}"
        found.signs.append(P21.sign(text, {"kind": "level"}, level[:NAMED], hit=len(level), of=len(sizes)))
        return
    middle = median(sizes.values())
    most = LARGER if least >= SETTLED else LARGER * EARLIER
    large, small = middle > most, NONE < middle < 1 / most and least >= SETTLED  # the first gradients are the largest
    agree = [fqn for fqn, size in sizes.items() if (size > most / 2 if large else size < 2 / most)]
    if not (large or small) or len(agree) < MOST * len(sizes):
        highest = max((old for old, _ in squares.values()), default=0.0)
        wild = [fqn for fqn, (_, new) in squares.items() if min(sizes[fqn], math.sqrt(new / highest)) > WILD * most]
        if 0 < len(wild) <= LONE and 0 < middle < most:
            text = f"the gradients of {wild[0]!r} are {sizes[wild[0]]:.3g} times larger than those before"
            text += f", and those of {wild[1]!r}" if len(wild) > 1 else ""
            found.signs.append(P30.sign(text, {"kind": "alone", "times": sizes[wild[0]]}, wild, hit=len(wild)))
        return
    kind = "larger" if large else "smaller"
    times = middle if large else 1 / max(middle, 1e-30)
    text = f"the gradients of {plural(len(agree), 'parameter')} are {times:.3g} times {kind} than those before"
    found.signs.append(P30.sign(text, {"kind": kind, "times": middle}, agree[:NAMED], hit=len(agree), of=len(sizes)))


def _levelled(v_a: Array, v_b: Array) -> bool:
    """Return whether second moments that differed from element to element hardly do so any more."""
    both = (v_a > 0) & (v_b > 0)
    if np.count_nonzero(both) < ENOUGH // 4:
        return False
    old, new = (float(np.log(one[both]).std()) for one in (v_a, v_b))
    return new < LEVEL * old and old > 4 * SHARP


def _decay(role: str, group: Group, update: Update) -> float | None:
    """Return the share of a state that one update keeps, for optimizers other than Adam; ``None`` if unknown."""
    value = group.settings.get({"square_avg": "alpha", "momentum": "momentum"}.get(role, ""))
    if role == "exp_avg" and group.optimizer.family == "Lion" and update.betas is not None:
        value = update.betas[1]
    rate = group.settings.get("beta2_decay", group.settings.get("decay_rate"))
    if role in FACTORED and isinstance(rate, (int, float)) and -1 <= rate < 0 and update.k == 1 and update.before:
        value = 1 - (update.before + 1) ** float(rate)
    if role == "momentum" and (group.optimizer.family != "SGD" or group.settings.get("dampening")):
        return None
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1 else None


def _no_decay(state: State) -> bool:
    """Return whether the stored decay of an average is 0."""
    found = [leaf.path for leaf in leaves(state.ckpt.objects)[0] if leaf.name == "decay" and leaf.value == 0]
    return any(word in part.lower() for path in found for part in path[:-1] for word in OF_AVERAGES)


def _averages(pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], found: Outcome) -> None:
    held = {fqn: roles for fqn, roles in pair.shared() if "ema" in roles and ("master" in roles or "param" in roles)}
    if held and _no_decay(pair.b):
        why = Inapplicable("the stored decay of the average is 0, so it is the weights")
        found.not_checked |= dict.fromkeys(("P22", "P23", "P28"), why)
        return
    if not held:
        why = Inapplicable("no averaged weights are stored beside weights on both sides")
        found.not_checked |= dict.fromkeys(("P22", "P23", "P28"), why)
        return
    outside: dict[str, float] = {}
    near: dict[str, float] = {}
    ways: list[float] = []
    taken: dict[str, tuple[Array, Array]] = {}
    stands: list[str] = []
    looked = dict.fromkeys(("P22", "P23", "P28"), 0)
    for fqn in _spread(list(held)):
        roles, update = held[fqn], updates.get(fqn)
        weight = "master" if "master" in roles else "param"
        averages, weights = (_both(pair, fqn, roles[one], "P22", found) for one in ("ema", weight))
        if averages is None or weights is None:
            continue
        (e_a, e_b), (w_a, w_b) = averages, weights
        if update is not None and 1 <= update.k < STANDS and np.array_equal(e_a, e_b) and (w_a != w_b).any():
            continue  # averages that are updated less often prove nothing yet
        if update is None or update.k < 1 or len({len(one) for one in (e_a, e_b, w_a, w_b)}) > 1:
            continue
        if update.k >= STANDS and (w_a != w_b).any():
            looked["P28"] += 1
            if np.array_equal(e_a, e_b):
                stands.append(fqn)
        kinds = [side.dtype(at) for side, at in zip((pair.a, pair.b), roles["ema"], strict=True)]
        reach = states[fqn].reach if fqn in states else None
        right = fqn in states and replayed(update, states[fqn], pair.b.dtype(roles[weight][1]))
        known = update.most is not None and reach is not None and reach.of and not reach.broken
        if known or right:  # otherwise the weights are others
            looked["P22"] += 1
            most = np.abs(w_b - w_a) if right or update.most is None else update.most
            share = _outside(e_a, e_b, w_a, most, max(UNITS.get(kind, 1.0) for kind in kinds))
            if share > OUTSIDE:
                outside[fqn] = share
        way = _way(e_a, e_b, w_b)
        if np.isfinite(w_b).all() and np.isfinite(e_a).all() and (e_a != w_a).any():
            taken[fqn] = e_a - w_a, w_b - w_a
        begun = update.before if update.before is not None else pair.a.facts.step
        if way is not None and begun is not None and begun >= EARLY:
            looked["P23"] += 1
            decay = min(DECAY, (1 + begun) / (10 + begun))
            if way > 1 - decay**update.k + CLEAR:
                near[fqn] = way
            else:
                ways.append(way)
    for rule, count in looked.items():
        if count:
            found.checked[rule] = f"{count:,} of {plural(len(held), 'averaged parameter')}"
        else:
            found.not_checked.setdefault(rule, "the updates in between are not known well enough")
    found.signs += _strayed(outside, near, looked, ways)
    each = [float(np.dot(way, moved)) > HALF * float(np.dot(way, way)) for way, moved in taken.values()]
    if 4 * sum(each) > 3 * len(each) and _went(*(np.concatenate(side) for side in zip(*taken.values(), strict=True))):
        text = f"the weights of {plural(len(taken), 'parameter')} went to where their averages were"
        evidence = {"kind": "average"}
        sign = RULES["P08"].sign(text, evidence, list(taken), hit=len(taken), of=len(taken), causes=("F4",))
        found.signs.append(sign)
    if stands and len(stands) == looked["P28"]:
        text = (
            f"the averages of {plural(len(stands), 'parameter')} are equal bit for bit although their weights changed"
        )
        found.signs.append(P28.sign(text, {}, stands[:NAMED], hit=len(stands), of=looked["P28"]))


def _went(way: Array, moved: Array) -> bool:
    """Return whether weights went most of the way, by more than chance; updates lead away from averages of the past."""
    size = float(np.dot(way, way))
    part = float(np.dot(way, moved)) / max(size, 1e-30)
    return part > HALF and part * math.sqrt(size) > SIGMAS * _rms(moved - part * way)


def _strayed(
    outside: Mapping[str, float], near: Mapping[str, float], looked: Mapping[str, int], ways: Sequence[float]
) -> Iterator[Sign]:
    if outside:
        share = max(outside.values())
        text = (
            f"the averages of {plural(len(outside), 'parameter')} left the range between their old values and the "
            f"weights, in up to {share:.0%} of the examined elements"
        )
        yield P22.sign(text, {"share": share}, list(outside)[:NAMED], hit=len(outside), of=looked["P22"])
    near = {fqn: way for fqn, way in near.items() if fqn not in outside}
    apart = bool(near) and len(ways) > 1 and max(ways) < min(near.values()) / FARTHER  # one decay moves all alike
    if near and (2 * len(near) > looked["P23"] or apart):
        way = sorted(near.values())[len(near) // 2]
        text = f"the averages of {plural(len(near), 'parameter')} moved {way:.0%} of the way to the weights"
        yield P23.sign(text, {"way": way}, list(near)[:NAMED], hit=len(near), of=looked["P23"])


def _outside(e_a: Array, e_b: Array, w_a: Array, most: Array | float, unit: float) -> float:
    """Return the share of elements outside every average of ``e_a`` and weights within reach of ``w_a``.

    NaN and Inf are not counted; rules of single checkpoints report them.
    """
    finite = np.isfinite(e_a) & np.isfinite(e_b) & np.isfinite(w_a)
    if not finite.any():
        return 0.0
    e_a, e_b, w_a = e_a[finite], e_b[finite], w_a[finite]
    most = most[finite] if isinstance(most, np.ndarray) else most
    low, high = np.minimum(e_a, w_a - most), np.maximum(e_a, w_a + most)
    room = ROUNDINGS * unit * np.maximum(np.abs(e_a), np.abs(w_a))
    return float(((e_b < low - room) | (e_b > high + room)).mean())


def _way(e_a: Array, e_b: Array, w_b: Array) -> float | None:
    """Return how far an average moved to the weights, 0 to 1; ``None`` if it was there at first, or for NaN."""
    if not all(np.isfinite(one).all() for one in (e_a, e_b, w_b)):
        return None
    gap = w_b - e_a
    size = float(np.dot(gap, gap))
    if not size > APART**2 * float(np.dot(w_b, w_b)):
        return None
    return float(np.dot(e_b - e_a, gap)) / size


def _counters(pair: Pair, found: Outcome) -> None:
    """Check that integers stored as tensors, as of running statistics and averages, did not fall or restart."""
    sides = (pair.stored, pair.b)
    a, b = ({key: at for key, at in one.ckpt.catalog.index.items() if _is_counter(one, at)} for one in sides)
    held = [key for key in a if key in b and not _WRAPS.fullmatch(_leaf(key).lower())]
    k, step = passed(pair.a.facts, pair.b.facts), pair.a.facts.step
    fell: dict[str, tuple[int, int]] = {}
    parts: set[str] = set()  # those that may decay
    seen = 0
    of: Counter[str] = Counter()
    for key in _spread(held):
        try:
            values = [float(_sample(side.ckpt[key])[0]) for side in (pair.stored, pair.b)]
            whole = values[0].is_integer()
            offset = all(0 < one - round(one) < NEARLY for one in values)
            if (
                not whole
                and not offset
                and not (step and k and values[0] > 1 and values[1] <= values[0] * k / step + 1)
            ):
                continue  # one that decays
            old, new = map(int, values)
            parts |= set() if whole else {key}
        except (WorkbenchError, IndexError, ValueError, OverflowError) as error:
            found.not_checked["P24"] = f"{key!r}: {error}"
            continue
        seen += 1
        of[_leaf(key)] += 1
        stands = new == old == step and bool(k) and _COUNTS.search(key.lower()) is not None  # of every update so far
        late = old == step and new - old < (k or 0) and _COUNTS.search(key.lower()) is not None
        if new < old or stands or late or (new == k and old > 1):  # otherwise it is more
            fell[key] = (old, new)
    if seen:
        found.checked["P24"] = f"{seen:,} of {plural(len(held), 'counter')}"
    # an integer whose name does not say that it counts, as a zero point, may fall; a restart makes all of them fall
    below = Counter(map(_leaf, fell))
    fell = {
        key: both for key, both in fell.items() if _COUNTS.search(key.lower()) or below[_leaf(key)] == of[_leaf(key)]
    }
    for average in (False, True):
        which = {key: both for key, both in fell.items() if any(one in key.lower() for one in OF_AVERAGES) == average}
        if which:
            name, (old, new) = next(iter(which.items()))
            what = "began anew" if new == k else "advanced by too little" if new > old else "did not advance"
            what = "fell" if new < old else what
            text = f"{len(which):,} of {plural(seen, 'counter')} {what}: {name!r} went from {old:,} to {new:,}"
            text += f", as many as the {plural(new, 'update')} since" if new == k and new > old else ""
            text += f" in {plural(k or 0, 'update')}, and counted each one before" if new != k and new > old else ""
            names = [pair.b.names.fqns[b[key]] or key for key in which][:NAMED]
            evidence = {"before": old, "after": new, "stands": new == old}
            causes = ("F4",) if average else ("A5",)
            # others may count fewer updates, or not at all where a module is not trained
            sure = all(new < old or (old == step and new == k != old) for old, new in which.values())
            grave = None if sure and not parts & which.keys() else "warn"
            sign = P24.sign(text, evidence, names, severity=grave, hit=len(which), of=seen, causes=causes)
            found.signs.append(sign)


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _is_counter(state: State, at: int) -> bool:
    catalog = state.ckpt.catalog
    if catalog.numel[at] != 1 or state.names.roles[at] not in ("buffer", "other"):
        return False
    integers = state.dtype(at) in ("int64", "int32")
    return integers or (state.dtype(at).startswith("float") and _COUNTED.search(catalog.keys[at].lower()) is not None)


def _buffers(pair: Pair, found: Outcome) -> int:
    """Check that one update left most of what buffers held, those of one name together, as some are short.

    Later ones leave no buffer whose elements are all one number other than 0, as those of a mask when it is made.

    Returns:
        the number of buffers that could not be judged.
    """
    step = pair.a.facts.step or 0 if passed(pair.a.facts, pair.b.facts) == 1 else 0
    places: dict[str, list[tuple[str, tuple[int, int]]]] = defaultdict(list)
    for fqn, roles in pair.shared():
        for role in roles.keys() & set(BUFFERS):
            at, last = roles[role][1], fqn.rpartition(".")[2]
            if pair.b.dtype(at).startswith(("float", "bfloat")) and last not in CONSTANT:
                places[f"{role} {last}"].append((fqn, roles[role]))
    lost: dict[str, list[str]] = {"A5": [], "D9": []}  # by the cause: those of the model, or of fp8
    rest = sum(map(len, places.values()))
    for what, held in places.items():
        both = [one for fqn, at in held[:LOOKED] if (one := _both(pair, fqn, at, "P24", found)) is not None]
        if not both or any(pair.b.ckpt.catalog.numel[at[1]] > SAMPLED for _, at in held):
            continue
        cause = "A5" if what.startswith("buffer ") else "D9"
        a, b = (np.concatenate(side) for side in zip(*both, strict=True))
        size = float(np.dot(a, a))
        if len(a) < LEAST or len(b) != len(a) or not 0 < size < math.inf or not np.isfinite(b).all():
            continue
        made = bool((b == b[0]).all() and not (a == a[0]).all())
        if step < (EARLY if all(len(pair.b.shape(at[1])) > 1 for _, at in held) else SETTLED):
            lost[cause] += [fqn for fqn, _ in held] if made and b[0] != 0 else []
            continue
        rest -= len(held)
        slope, left = float(np.dot(a, b)) / size, float(np.dot(b, b)) / size
        less = slope < LEFT and left < SMALL**2
        more = slope > MULTIPLIED and what.startswith("buffer ")  # scales of fp8 may double
        if less or more or made or (abs(slope) < UNLIKE and all(map(_is_replaced, *_tables(pair, held, both)))):
            lost[cause] += [fqn for fqn, _ in held]
    if places and not rest:
        found.checked.setdefault("P24", plural(len(places), "kind") + " of buffers")
    for cause, names in lost.items():
        if names:
            text = f"{plural(len(names), 'buffer')} did not continue from the old values: {some(names)}"
            of = sum(map(len, places.values()))
            sign = P24.sign(text, {}, names[:NAMED], severity="warn", hit=len(names), of=of, causes=(cause,))
            found.signs.append(sign)
    return rest


def _tables(
    pair: Pair, held: list[tuple[str, tuple[int, int]]], both: list[tuple[Array, Array]]
) -> tuple[list[Array], list[Array]]:
    """Return buffers of two dimensions in their shape, those before and those after."""
    found = [
        [one.reshape(shape) for one in sides]
        for (_, at), sides in zip(held, both, strict=True)
        if len(shape := pair.b.shape(at[1])) == 2 and math.prod(shape) == len(sides[0])
    ]
    return [one for one, _ in found] or [np.empty((0, 0))], [one for _, one in found] or [np.empty((0, 0))]


def _is_replaced(a: Array, b: Array) -> bool:
    """Return whether hardly any row or column of a table is an old one, as in a queue that moved on."""
    if a.size < ENOUGH:
        return False
    old = [{line.tobytes() for line in one} for one in (a, np.ascontiguousarray(a.T))]
    new = [
        [line.tobytes() in lines for line in one]
        for one, lines in zip((b, np.ascontiguousarray(b.T)), old, strict=True)
    ]
    return max(sum(one) / len(one) for one in new) < UNLIKE


def _constants(pair: Pair, found: Outcome) -> None:
    """Check that buffers that a model's config defines are the same."""
    sides = pair.stored.ckpt.catalog, pair.b.ckpt.catalog
    held = [key for key in sides[0].index if key.rpartition(".")[2] in CONSTANT and key in sides[1].index]
    held = [key for key in held if sides[0].shape_of(sides[0].index[key]) == sides[1].shape_of(sides[1].index[key])]
    other: dict[str, tuple[Array, Array]] = {}
    for key in _spread(held):
        both = _both(pair, key, (sides[0].index[key], sides[1].index[key]), "P24", found)
        if both is not None and not np.array_equal(*both, equal_nan=True):
            other[key] = both
    if held:
        found.checked.setdefault("P24", f"{plural(len(held), 'buffer')} that the config defines")
    if other:
        name, (a, b) = next(iter(other.items()))
        at = int(np.argmax(a != b))
        text = (
            f"{plural(len(other), 'buffer')} that the model's config defines changed: {name!r} went from {a[at]:.6g} "
        )
        text += f"to {b[at]:.6g}"
        evidence = {"kind": "constant", "before": float(a[at]), "after": float(b[at])}
        names = [pair.b.names.fqns[sides[1].index[key]] or key for key in other][:NAMED]
        found.signs.append(P24.sign(text, evidence, names, severity="warn", hit=len(other), of=len(held)))


def _spread(names: list[str]) -> list[str]:
    """Return up to :data:`LOOKED` names, evenly spread."""
    return names[:: max(math.ceil(len(names) / LOOKED), 1)]


# ---- optimizers other than Adam --------------------------------------------------------------------------------------


def _left(role: str, group: Group | None, update: Update, step: int | None) -> float | None:
    """Return the least share of a state of squares that remains after k updates; ``None`` if no law is known.

    An average of an optimizer that is not known may be divided by its bias.
    """
    settings: Mapping[str, Any] = {} if group is None else group.settings

    def power(name: str) -> float | None:
        decay = settings.get(name)
        return float(decay) ** update.k if isinstance(decay, (int, float)) and 0 < decay < 1 else None

    if role in ("sum", "max_exp_avg_sq"):
        return 1.0
    if role == "square_avg":
        return power("alpha") or power("rho")
    if role == "acc_delta":
        return power("rho")
    if role in ("exp_inf", BLOCK_MAXIMA):
        return None if update.betas is None else update.betas[1] ** update.k
    if role in AVERAGED and group is not None and not settings.keys() & set(UNLIKE_IT):
        betas, before = settings.get("betas"), step if update.before is None else update.before
        at = 2 if group.optimizer.family == THIRD else AVERAGED[role]
        beta = betas[at] if isinstance(betas, (list, tuple)) and len(betas) > at else None
        if not isinstance(beta, (int, float)) or not 0 < beta < 1 or not before:
            return None
        plain = group.optimizer.family in PLAIN
        return float(beta) ** update.k * (1 if plain else (1 - beta**before) / (1 - beta ** (before + update.k)))
    if role in FACTORED and update.before is not None:  # an update t keeps 1 - t^-0.8
        rate = settings.get("beta2_decay", settings.get("decay_rate"))
        if isinstance(rate, (int, float)) and -1 <= rate < 0 and update.k <= LONG:
            start = 0 if update.after == update.k else update.before  # a counter that restarted: nothing is kept
            return math.prod(1 - (start + t) ** float(rate) for t in range(1, update.k + 1))
    return None


def _squares(pair: Pair, updates: Mapping[str, Update], found: Continuity) -> None:
    """Check sums, maxima and averages of squares of optimizers other than Adam."""
    fell: dict[str, float] = {}
    floors: dict[str, tuple[float, Array]] = {}  # the share that remains at least, and the squares after the updates
    kept: list[float] = []  # what all elements keep at least
    stayed: list[float] = []  # above 1 if squares are nearer to what a state would be that did not begin anew
    parts: dict[str, bool] = {}  # parameters in which only some rows or columns fell: whether all in one run did
    roles_of: dict[str, str] = {}
    seen, sure, only = 0, True, _only(pair.b.facts.groups)
    for fqn, roles in pair.shared():
        update, group = updates.get(fqn), pair.b.facts.group_of(fqn) or only
        if update is None or update.k < 1 or not update.k < LONG:
            continue
        for role in roles.keys() & (SQUARES | AVERAGED.keys()):
            if role in AVERAGED and (_is_adam(group) or _is_narrow(pair, roles[role]) or OFTEN[0] in update.barred):
                continue  # Adam's are compared element by element
            left = _left(role, group, update, pair.a.facts.step)
            if left is None or left < KEPT:
                continue
            both = _both(pair, fqn, roles[role], "P25", found)
            if both is None:
                continue
            a, b = both
            seen += 1
            above = a > 0
            least = FELL if role != "max_exp_avg_sq" else FEW / max(len(a), 1)  # a largest value never falls
            below = b < left * a * (1 - SLACK * update.k)
            if role in AVERAGED:
                found.forms.setdefault((fqn, role), "")
            if above.any() and (share := float(below[above].mean())) > least:
                fell[fqn], roles_of[fqn] = share, role
                if confined(pair.b.shape(roles[role][1]), below, above) is not None:
                    first, *_, last = np.flatnonzero(below)
                    parts[fqn] = below[first:last].mean() > DENSE
                floors[fqn] = left * (1 - SLACK * update.k), b
                kept.append(float(np.quantile(b[above] / a[above], FELL)) / left)
                between = math.inf if role in LARGEST else _between(left, update, pair.a.facts.step)
                stayed.append(float(np.median(b[above] / a[above])) / between)
                sure &= role not in AVERAGED or (group is not None and group.optimizer.family in PLAIN)
    if seen:
        found.checked["P25"] = f"{plural(seen, 'tensor')} of squares"
    else:
        found.not_checked.setdefault("P25", Inapplicable("no squares other than Adam's are stored with their decay"))
    if fell:
        name, most = min(fell), max(fell.values())
        text = (
            f"{roles_of[name]} of {plural(len(fell), 'parameter')} fell more than the updates allow, "
            f"in up to {most:.{0 if most >= 0.01 else 2}%} of the examined elements"
        )
        evidence = {"roles": sorted(set(roles_of.values())), "share": max(fell.values())}
        others = {role for fqn, roles in pair.shared() if fqn in fell for role in roles} & set(FIRST)
        parents = _parents(pair, roles_of, floors, found)
        crossed = {fqn for fqn, (_, role) in parents.items() if role != roles_of[fqn]}
        older = fell_back(pair.a.facts, pair.b.facts, fell, passed(pair.a.facts, pair.b.facts))
        # fresh state would be far smaller where gradients are
        scaled = min(kept) > SCALED and len(fell) > 1 and not older and median(fell.values()) > MOST
        another = not older and not scaled and median(stayed) > 1
        if set(roles_of.values()) == {"max_exp_avg_sq"}:
            causes: tuple[str, ...] = ("B11",)
        elif set(roles_of.values()) == {BLOCK_MAXIMA}:  # beside its codes, which may be right
            causes = ("B11", "B4")
        elif 2 * len(parents) > len(fell) and len(parents) > 1:  # a single one may fit another's by chance
            name, (parent, role) = next(iter(parents.items()))
            text += f"; those of {name!r} can have evolved from {f'its {role}' if crossed else f'those of {parent!r}'}"
            found.forms |= dict.fromkeys(roles_of.items(), "swapped" if crossed == parents.keys() else "moved.name")
            causes = ("B11" if crossed == parents.keys() else "B5", "E13")
        elif parts.keys() == fell.keys():
            small = len(fell) <= LONE and most < PATCH and all(parts.values())
            causes = ("G5", "B4") if small else ("G6", "E1")
            text += ", all of them in a part of the rows or columns"
            found.forms |= dict.fromkeys(roles_of.items(), "patch" if small else "part")
        elif another:
            causes = ("G6", "B6", "B5")
            text += ", and the others rose as if it had not begun anew"
            found.forms |= dict.fromkeys(roles_of.items(), "other")
        else:
            causes = ("G6", "C9") if older else ("B6", "E12", "B4") if scaled else ("B4",) if others else ("B1", "B3")
            found.forms |= dict.fromkeys(roles_of.items(), "ratio" if scaled else "fallen")
        names, of = list(fell)[:NAMED], max(seen, len(fell))
        severity = None if sure else "warn"
        found.signs.append(P25.sign(text, evidence, names, severity=severity, hit=len(fell), of=of, causes=causes))


def _is_adam(group: Group | None) -> bool:
    return group is None or "moments" in group.optimizer.laws


def _is_narrow(pair: Pair, places: tuple[int, int]) -> bool:
    return {side.dtype(at) for side, at in zip((pair.a, pair.b), places, strict=True)} != {"float32"}


def _between(left: float, update: Update, step: int | None) -> float:
    """Return the ratio of squares to old ones between that of a state that began anew and that of any other.

    They grow from gradients of the same size. Of those since then, an average holds 1 − decay^k, and a sum k of them.
    """
    before = update.before or step
    if not before:
        return math.inf
    new = update.k / before if left == 1 else (1 - left) / (1 - left ** (before / update.k))
    return math.sqrt(new * (new + left))


def _parents(
    pair: Pair, roles_of: Mapping[str, str], floors: Mapping[str, tuple[float, Array]], found: Outcome
) -> dict[str, tuple[str, str]]:
    """Return the parameters whose squares stay above the floor of others, and have their profile.

    These are another parameter's of that shape, or the other ones of its own matrix: those of rows and of columns.
    """
    shared = dict(pair.shared())
    parents = {}
    for fqn, role in roles_of.items():
        left, b = floors[fqn]
        shape = pair.a.shape(shared[fqn][role][0])
        alike = [
            (other, role)
            for other, roles in shared.items()
            if other != fqn and role in roles and pair.a.shape(roles[role][0]) == shape
        ]
        own = [(fqn, other) for other in shared[fqn].keys() & set(FACTORED) - {role}]
        best = LIKE
        for other, kind in [(fqn, role), *own, *alike[:LOOKED]]:
            both = _both(pair, other, shared[other][kind], "P25", found)
            if both is None or len(both[0]) != len(b):
                continue
            like = _likeness(both[0], b)
            if (other, kind) == (fqn, role):
                best = max(best, like + BETTER)
            elif like > best and not (b < left * both[0]).any():
                parents[fqn], best = (other, kind), like
    return parents


def _likeness(a: Array, b: Array) -> float:
    """Return the correlation of logarithms; 0 if there is none."""
    some = (a > 0) & (b > 0)
    if np.count_nonzero(some) < LEAST or np.ptp(a[some]) == 0 or np.ptp(b[some]) == 0:
        return 0.0
    return float(np.corrcoef(np.log(a[some]), np.log(b[some]))[0, 1])


def _only(groups: Sequence[Group]) -> Group | None:
    """Return the first param group if all groups have the same optimizer and decays."""
    alike = {(one.optimizer.family, *(str(one.settings.get(name)) for name in DECAYS)) for one in groups}
    return groups[0] if len(alike) == 1 else None


def _firsts(pair: Pair, updates: Mapping[str, Update], found: Continuity) -> None:
    """Check how much of the momentum of SGD, Muon and Lion is left after k updates."""
    kept: dict[str, float] = {}
    sizes: list[float] = []
    fresh: list[float] = []
    roles_of: dict[str, str] = {}
    stored = {fqn: roles for fqn, roles in pair.shared() if roles.keys() & {"momentum", "momentum_buffer", "exp_avg"}}
    only = _only(pair.b.facts.groups)
    for fqn in _spread(list(stored)):
        roles, update, group = stored[fqn], updates.get(fqn), pair.b.facts.group_of(fqn) or only
        if update is None or update.k < 1 or group is None:
            continue
        role = next((one for one in ("momentum", "momentum_buffer") if one in roles), "")
        decay = group.settings.get("momentum")
        if group.optimizer.family == "Lion" and "exp_avg" in roles and update.betas is not None:
            role, decay = "exp_avg", update.betas[1]
        if not role or not isinstance(decay, (int, float)) or not 0 < decay < 1 or decay**update.k < HALF:
            continue
        both = _both(pair, fqn, roles[role], "P26", found)
        if both is None:
            continue
        a, b = both
        size = float(np.dot(a, a))
        if len(a) < ENOUGH or not 0 < size < math.inf or not np.isfinite(b).all():
            continue
        kept[fqn] = float(np.dot(a, b)) / size / float(decay) ** update.k
        roles_of[fqn] = role
        sizes.append(math.sqrt(float(np.dot(b, b)) / size))
        fresh.append(math.sqrt(1 - float(decay) ** (2 * update.k)))  # of random gradients since it began anew
    if not kept:
        found.not_checked.setdefault("P26", Inapplicable("no momentum with a known decay is few enough updates apart"))
        return
    found.checked["P26"] = f"{len(kept):,} of {plural(len(stored), 'parameter')}"
    lost = [fqn for fqn, part in kept.items() if part < 0.5]
    found.forms |= {(fqn, roles_of[fqn]): "" for fqn in kept.keys() - set(lost)}
    if len(kept) >= 3 and len(lost) >= MOST * len(kept):
        middle = sorted(kept.values())[len(kept) // 2]
        text = (
            f"the momentum of {len(lost):,} of {plural(len(kept), 'parameter')} keeps less than half of what "
            f"the updates leave of its old value (median: {middle:.0%})"
        )
        # one that began anew is smaller, because gradients partly cancel
        another = median(sizes) > FULL and median(fresh) < HALF
        causes = ("G6", "B6", "B1") if another else ()
        found.forms |= {(fqn, roles_of[fqn]): "other" if another else "zero" for fqn in lost}
        found.signs.append(P26.sign(text, {"kept": middle}, lost[:NAMED], hit=len(lost), of=len(kept), causes=causes))


def _bases(pair: Pair, states: Mapping[str, PairState], found: Outcome) -> None:
    """Check the weights under adapters, and other weights without optimizer state."""
    trained = {*MOMENTS, *MASTERS, STATE}
    held = {
        fqn
        for side in (pair.a, pair.b)
        for fqn, roles in side.params.items()
        if any(quantity(role) in trained for role in roles)
    }
    under = {module_of(fqn) for fqn in pair.b.params if adapter_of(fqn)}
    if not under or not held:
        found.not_checked.setdefault("P27", Inapplicable("no adapters are stored with their base and an optimizer"))
        return
    numbered = any(map(is_numbered, held))
    thawed = pair.b.numbered_shapes - pair.a.numbered_shapes
    bases = {
        fqn: states[fqn]
        for fqn, roles in pair.shared()
        if "param" in roles
        and fqn in states
        and fqn not in held
        and not adapter_of(fqn)
        and (not numbered or module_of(fqn) in under)
        and pair.b.shape(roles["param"][1]) not in thawed  # otherwise the optimizer holds more of this shape now
    }
    if not bases:
        return
    found.checked["P27"] = plural(len(bases), "weight")
    moved = [fqn for fqn, sums in bases.items() if sums.dd > 0 or sums.nan]  # a NaN that stays is not a change
    if moved:
        which = "under adapters" if numbered else "that the optimizer does not train"
        text = f"{len(moved):,} of {plural(len(bases), 'weight')} {which} changed"
        adapted = [fqn for fqn in moved if module_of(fqn) in under][:RANKED]
        places = {fqn: roles["param"] for fqn, roles in pair.shared() if fqn in adapted}
        try:
            tensors = {fqn: (pair.a.tensor(one), pair.b.tensor(two)) for fqn, (one, two) in places.items()}
            ranks = [changed_rank(*both) for both in tensors.values()]
            most = ranks_of({f: pair.a.shape(held["param"]) for f, held in pair.a.params.items() if "param" in held})
            beyond = [is_beyond(*both, most.get(module_of(fqn), len(most))) for fqn, both in tensors.items()]
        except WorkbenchError:
            ranks, beyond = [], []
        merged = bool(ranks) and all(ranks)
        if merged:
            text += f"; the changes have rank {max(filter(None, ranks))} or less, as merged adapters do"
        causes = ("F5",) if merged else ("F6",)
        kind = "adapted" if all(module_of(fqn) in under for fqn in moved) else "base"
        evidence = {"kind": kind, "unmerged": bool(beyond) and all(beyond)}
        found.signs.append(P27.sign(text, evidence, moved[:NAMED], hit=len(moved), of=len(bases), causes=causes))


def _low_bits(pair: Pair, found: Outcome) -> None:
    """Check whether float32 weights moved by what rounding them to 16 bits takes away, beside what updates did.

    No update depends on these bits, so the change correlates with them only by chance. Weights that move less count
    more, as they show it better.
    """
    held = {
        fqn: roles["param"]
        for fqn, roles in pair.shared()
        if "param" in roles
        and "master" not in roles
        and {side.dtype(at) for side, at in zip((pair.a, pair.b), roles["param"], strict=True)} == {"float32"}
    }
    both = {fqn: one for fqn in _spread(list(held)) if (one := _both(pair, fqn, held[fqn], "P31", found)) is not None}
    for through in ("bfloat16", "float16"):
        products: list[Array] = []
        squares = 0.0
        names = []
        for fqn, (a, b) in both.items():
            moved, cut = b - a, rounded(a, through) - a
            finite = len(moved) > 0 and np.isfinite(moved).all()
            size = float(np.mean(np.square(moved, dtype=np.float64))) if finite else 0.0
            if size > 0 and np.isfinite(cut).all() and cut.any():
                products.append(moved.astype(np.float64) * cut / size)
                squares += float(np.square(cut, dtype=np.float64).sum()) / size
                names.append(fqn)
        if not names or sum(map(len, products)) < LOW_LEAST:
            continue
        total = sum(float(one.sum()) for one in products)
        error = math.sqrt(sum(float(np.square(one).sum()) for one in products))
        if total > SIGMAS * error and abs(total / squares - 1) <= HALF:
            text = f"the weights of {plural(len(names), 'parameter')} changed, beside their updates, by "
            text += f"{total / squares:.0%} of what rounding the old ones to {through} changes"
            evidence = {"through": through, "slope": total / squares, "sigmas": total / error}
            found.signs.append(RULES["P31"].sign(text, evidence, names[:NAMED], hit=len(names), of=len(both)))
            return


def _offsets(pair: Pair, updates: Mapping[str, Update], found: Outcome) -> None:
    """Check whether norms keep what they moved from 1, and their biases from 0, whatever the optimizer is.

    The scatter of what they moved since shows how far that may be chance.
    """
    held = {
        fqn: roles["param"]
        for fqn, roles in pair.shared()
        if "param" in roles and fqn in updates and updates[fqn].k > 0 and len(pair.b.shape(roles["param"][1])) == 1
    }
    seen = 0
    lost: dict[str, tuple[Array, Array]] = {}
    for fqn in _spread([fqn for fqn in held if fqn.endswith(".weight")]):
        for name, start in ((fqn, 1.0), (f"{fqn.removesuffix('weight')}bias", 0.0)):
            both = _both(pair, name, held[name], "P08", found) if name in held else None
            if both is None or len(both[0]) < LEAST or len(both[0]) != len(both[1]) or _rms(both[0] - start) > HALF:
                break
            seen += 1
            a, b = both[0] - start, both[1] - start
            fine = max(UNITS.get(side.dtype(at), 1.0) for side, at in zip((pair.a, pair.b), held[name], strict=True))
            if not (_rms(a) > NOTICED * fine and np.isfinite(b).all() and _forgot(a, b, PARTS)):
                break  # a bias alone may turn: it begins at 0, and has no other scale
            lost[name] = a, b
    if not lost:
        return
    a, b = (np.concatenate(side) for side in zip(*lost.values(), strict=True))
    if len(a) < ENOUGH / 4 or not _forgot(a, b, SIGMAS):
        return
    text = f"{plural(len(lost), 'norm vector')} went back to near their initial value, {next(iter(lost))!r} for one; "
    text += f"{max(float(np.dot(a, b) / np.dot(a, a)), 0.0):.0%} of their distance from it is left"
    evidence = {"kind": "offset"}
    sign = RULES["P08"].sign(text, evidence, list(lost), hit=len(lost), of=seen, causes=("A3", "A2"))
    found.signs.append(sign)


def _emptied(pair: Pair, updates: Mapping[str, Update], states: Mapping[str, PairState], found: Outcome) -> None:
    """Search weights for a run of elements that began at zero while the others continued, whatever the optimizer is."""
    held = {
        fqn: roles["param"]
        for fqn, roles in pair.shared()
        if "param" in roles
        and fqn in updates
        and updates[fqn].k > 0
        and not (fqn in states and states[fqn].reach.broken)
        and len(pair.b.shape(roles["param"][1])) > 1
    }
    runs: dict[str, tuple[int, int]] = {}
    for fqn in _spread(list(held)):
        shape = pair.b.shape(held[fqn][1])
        if math.prod(shape) > SAMPLED or math.prod(shape) < 4 * RUN or pair.a.shape(held[fqn][0]) != shape:
            continue
        both = _both(pair, fqn, held[fqn], "P08", found)
        if both is not None and (run := _run_from_zero(*both)) is not None:
            whole = all(edge % math.prod(shape[1:]) == 0 for edge in run)
            runs |= {} if whole else {fqn: run}  # complete rows may be pruned, or those of tokens
    if 0 < len(runs) <= LONE:
        name, (first, stop) = next(iter(runs.items()))
        text = f"about {stop - first:,} elements in a row of {name!r} fell to about 0, and the others did not"
        sign = RULES["P08"].sign(text, {"kind": "zeros"}, list(runs), hit=len(runs), of=len(held), causes=("G5",))
        found.signs.append(sign)


def _run_from_zero(a: Array, b: Array) -> tuple[int, int] | None:
    """Return where a run of elements begins and stops that holds nothing of the old ones, and is smaller."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    old, both, new = (np.cumsum(np.concatenate([[0.0], x])) for x in (a * a, a * b, b * b))
    old, both, new = (x[RUN:] - x[:-RUN] for x in (old, both, new))
    odd = (both < LEFT * old) & (new < old / 4) & (old > RUN / 4 * np.mean(a * a))
    places = np.flatnonzero(odd)
    if len(places) < RUN / 4:
        return None
    first, last = int(places[0]), int(places[-1])
    small = np.abs(b[first : last + RUN]) < _rms(a) / 2
    inside = np.flatnonzero(small)
    first, stop = first + int(inside[0]), first + int(inside[-1]) + 1
    rest = np.r_[0:first, stop : len(a)]
    alone = 2 * len(rest) > len(a) and float(np.dot(a[rest], b[rest])) > MOST * float(np.dot(a[rest], a[rest]))
    return (first, stop) if alone else None


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


def _forgot(a: Array, b: Array, sigmas: float) -> bool:
    """Return whether less than half of ``a`` is left in ``b``, by that many standard errors less than all of it."""
    left = float(np.dot(a, b) / np.dot(a, a))
    error = _rms(b - left * a) / max(float(np.linalg.norm(a)), 1e-30)
    return left < HALF and 1 - left > sigmas * error


def _both(pair: Pair, fqn: str, places: tuple[int, int], rule: str, found: Outcome) -> tuple[Array, Array] | None:
    """Return samples of a tensor on both sides; if one is unreadable, record the reason and return ``None``."""
    try:
        return _sample(pair.a.tensor(places[0])), _sample(pair.b.tensor(places[1]))
    except WorkbenchError as error:
        found.not_checked[rule] = f"{fqn!r}: {error}"
        return None


def _sample(tensor: LazyTensor) -> Array:
    return sampled(tensor, spread(tensor.shape, SAMPLED), SAMPLED)
