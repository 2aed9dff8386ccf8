"""Rules on the facts of two checkpoints: an echo must state the same, a later one k updates more.

Changes that the stored arguments declare are reported as such (R12, P15, P16), and their consequences become milder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from workbench.analysis.diff import diff
from workbench.checkpoint import Checkpoint
from workbench.core.words import plural
from workbench.doctor.facts.counted import LOADS, counts, counts_anew, in_epochs, lagging, of_epochs, per_step
from workbench.doctor.facts.evidence import Pair, State, is_numbered
from workbench.doctor.facts.flat import leaves
from workbench.doctor.facts.generators import Generator, drawn, is_fresh, seed
from workbench.doctor.facts.numbers import in_words, number, step_of
from workbench.doctor.facts.schedule import plan_of, rates_at, sets_rates
from workbench.doctor.facts.state import NAME, TrainingState
from workbench.doctor.ledger.sign import Inapplicable, Rule, Sign, register, some
from workbench.doctor.passes.updates import passed, scheduled
from workbench.doctor.rules.names import (
    renamed,
    rows_kept,
    same_buffers,
    same_parameters,
    same_size,
    same_tensors,
    wider_types,
)
from workbench.doctor.rules.pair import SLIGHT
from workbench.doctor.rules.settings import fields_changed, rates_moved, settings_kept, tied_kept
from workbench.doctor.rules.stated import NAMED, reset_meant, scaled
from workbench.errors import WorkbenchError
from workbench.names.weights import parse
from workbench.tensor import LazyTensor

STILL = 5  #: updates in which a parameter that is not an expert gets a gradient
SURELY = 10  #: updates in which an expert that had a gradient at every update gets one again
NEAR = 1.5  #: a changed lr beyond this factor is a warning, within it a remark
#: Arguments that identify the run, host or save, and counters that advance with the run.
_PASSING = re.compile(
    r"(?:^|\.)(?:iteration|step|consumed_\w+|skipped_train_samples|rank|local_rank|master_\w+|\w*(?:dir|path|name|file)"
    r"|load|save|exit_\w+|\w*_version|timestamp|world_size|data_parallel_size|start_time)$"
)

R10 = Rule(
    "R10", "the optimizer's counters changed in the load", ("B2", "B1", "C9"), "echo", "loading makes no update",
    "exact", "round trip", "error", "a reset on purpose (info if an argument states it)",
    "restore the counters with the moments"
)  # fmt: skip
R11 = Rule(
    "R11", "the trainer's state changed in the load", ("C1", "C3", "C6", "C8", "C9", "D8"), "echo",
    "loading does not change a schedule, data loader, counter or generator", "exact", "round trip", "error",
    "data skipped on purpose", "restore the named state"
)  # fmt: skip
R12 = Rule(
    "R12", "arguments changed", ("H1", "B7", "C4", "C10"), "pair", "a run keeps the arguments that it started with",
    "exact", "stored arguments and param groups", "warn",
    "a change on purpose (reported as info); groups that change without an argument are a warning",
    "compare with the intended arguments"
)  # fmt: skip
N10 = Rule(
    "N10", "the data's seed or order changed", ("C7",), "pair", "a resumed sampler keeps its seed", "exact",
    "catalogue C7", "warn", "a new order on purpose (info if an argument states it)",
    "restore the sampler's seed and epoch"
)  # fmt: skip
N12 = Rule(
    "N12", "the batch size changed", ("C10",), "pair", "gradient noise depends on the batch size", "exact",
    "catalogue C10", "info", "a change on purpose", "expect exp_avg_sq to change by about the ratio"
)  # fmt: skip
P01 = Rule(
    "P01", "the optimizer's counters did not advance with the trainer", ("B1", "B2", "C9", "G6"), "pair",
    "k steps of the trainer are k updates of every parameter", "exact", "torch 2.13 AdamW", "error",
    "fp16 steps skipped by the scaler, an intended reset (info); parameters frozen or unfrozen; micro-batches counted",
    "restore the counters with the moments"
)  # fmt: skip
P15 = Rule(
    "P15", "the learning rate left the earlier schedule", ("C1", "C2", "C3", "C4", "H1"), "pair",
    "k updates later, the schedule is k updates further, and the lr follows the old schedule",
    "a position that jumps: exact; an lr off the schedule beyond ×1.5: warn", "stored schedule and arguments",
    "error", "an lr changed on purpose (reported as warn)", "restore the scheduler"
)  # fmt: skip
P16 = Rule(
    "P16", "the optimizer's constants changed", ("H1",), "pair",
    "betas, ε and the kind of Adam do not change; Prodigy's estimate d never falls",
    "exact", "stored param groups", "warn", "a change on purpose",
    "laws on values use the new constants from here on"
)  # fmt: skip
P20 = Rule(
    "P20", "the data's position did not advance with the updates", ("C6", "H1"), "pair",
    "each update takes as much data as before; a position in an epoch never goes back without a new epoch",
    "more than one update's data apart, or a part of that", "counters", "warn",
    "data skipped on purpose; a batch size that is not stored", "restore the data loader's state"
)  # fmt: skip
P29 = Rule(
    "P29", "a part of the trainer's state is no longer stored", ("C8", "C1", "D8", "C6", "F4"), "pair",
    "a save holds everything that the previous one held",
    "generators, schedule, loss scale, data loader or averages: none is stored", "catalogue C8", "warn",
    "a save without it on purpose", "save that part of the state again"
)  # fmt: skip
P37 = Rule(
    "P37", "the schedule's own settings changed", ("C4", "C2", "H1"), "pair",
    "a schedule keeps its length and shape", "exact; counters and learning rates aside",
    "torch 2.13 LRScheduler.state_dict", "warn", "a schedule that was changed on purpose",
    "restore the scheduler's state"
)  # fmt: skip
P51 = Rule(
    "P51", "a random generator was seeded again", ("C8",), "pair",
    "a generator keeps its seed, the numbers that it has drawn never become fewer, and the generators of ranks stay "
    "different", "exact",
    "torch 2.13 CPUGeneratorImpl, CUDAGeneratorImpl", "warn", "a program that sets a seed in each launch or epoch",
    "restore the generators after all seeds are set"
)  # fmt: skip
P34 = Rule(
    "P34", "a counter restarted", ("C1", "B2", "F4", "C9"), "pair",
    "a counter that advances with the updates continues after a resume; one of averages never falls",
    f"it was {SURELY} or more, and is the number of updates in between; or it fell to what it counts in as many, "
    "without a cycle; of averages: fell, or by more than the updates",
    "exact", "warn",
    "a counter of something that began at the resume", "restore the named counter, and what is stored with it"
)  # fmt: skip
register(R10, R11, R12, N10, N12, P01, P15, P16, P20, P29, P34, P37, P51)
#: What schedules of torch change themselves, and learning rates, which other rules compare.
_ADVANCING = frozenset({
    "base_lrs", "max_lrs", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "last_batch_idx",
})  # fmt: skip
#: Kind of a counter → words in its path. A position in a cycle is one of a schedule.
_COUNTING = {
    "groups": re.compile(r"param_groups"),
    "optimizer": re.compile(r"(?:^|[._])state\.\d+\."),  # L-BFGS counts what it evaluated
    "schedule": re.compile(r"sched"),
    "average": re.compile(r"(?:^|[._])(?:ema|swa|average[ds]?)(?:$|[._])"),  # whole words: "remaining" is none
    "data": re.compile(r"(?:^|[._])workers?(?:$|[._])"),
}
#: Kind of a counter → the causes if it restarted.
_COUNTED = {"groups": ("B2", "B1"), "optimizer": ("B1", "B2"), "schedule": ("C1",), "average": ("F4",), "data": ("C6",)}
_OF_DATA = re.compile(r"loader|sampler|epoch(?!$)|batch|scaler|growth|bad_epochs|cooldown|_dim|size|length")
#: Integers that begin anew in any run, are measured, or name something.
_RETURNS = re.compile(
    r"ptr|pointer|cursor|position|pos$|index|idx|offset|head$|queue|since|left|remaining|patience|wait|micro|accum|cycle"
    r"|current|seed|rank|world|version|time|loss|metric|score|best|norm|grad|length|tokens|memory|bytes|_id$|pid|epoch"
    r"|consecutive|streak|skip|bad|fail|stall|retr"
)
#: Part of the trainer's state → the cause if it is no longer stored.
_CAUSE_OF_PART = {
    "schedule": "C1", "loss scale": "D8", "data loader": "C6", "average": "F4", "data position": "C6", "masters": "D1",
}  # fmt: skip
SOME = 3  #: of such numbers in a message
_WORDS = {
    "loader": "the data position",
    "consumed_samples": "the number of consumed samples",
    "loss_scale": "the loss scale",
}
SCHEDULED = ("lr", "weight_decay")  #: fields that a schedule changes, or that other rules compare
CYCLED = ("betas", "momentum")
PRODUCTS = 64  #: of NAdam that are read
BATCHES = ("global_batch_size", "train_batch_size", "batch_size")
SEARCHED = 16  #: generators whose draws are counted, at up to 0.1 s each
ORDER = 16, 1 << 20  #: least and most elements of a stored order of the data

# ---- counters ------------------------------------------------------------------------------------------------------


def counters_advance(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts.step, pair.b.facts.step
    if a is None or b is None:
        if (k := scheduled(pair.a.facts, pair.b.facts)) is not None:
            return _counters(pair, k, P01)
        one, two = pair.a.facts.steps, pair.b.facts.steps
        if one.usual is None or two.usual is None or two.usual >= one.usual or len(one.counts) > 1:
            return "a checkpoint does not store the trainer's step"
        words = f"the optimizer's counters went from {one.usual:,.0f} to {two.usual:,.0f}; updates only raise them"
        names = [name for name in two.by_name if pair.comparable(name)]
        return [P01.sign(words, {"kind": "fell"}, names, hit=len(names) or 1, of=len(names) or 1, severity="warn")]
    if counts_anew(pair.a.facts, pair.b.facts):
        return _counters(pair, b, P01)
    if b <= a:
        return f"the later checkpoint is from step {b:,}, the earlier one from step {a:,}"
    ratio = per_step(pair.a.facts, pair.b.facts) or 1
    return _counters(pair, round((b - a) * ratio), P01)


def _counters(pair: Pair, k: int, rule: Rule) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    if not a.steps.counts or not b.steps.counts:
        return a.steps.unread or b.steps.unread or "an optimizer stores no step counters"
    names = [name for name in a.steps.by_name if name in b.steps.by_name and pair.comparable(name)]
    if names and not pair.mapped:
        moved = {name: b.steps.by_name[name] - a.steps.by_name[name] for name in names}
    else:  # without names: the values alone
        usual = a.steps.usual or 0.0
        due = {value + k for value in a.steps.counts}
        some = any(value in due for value in b.steps.counts)  # new parameters have small counters
        moved = {
            f"counter at {value:,.0f}": k if value in due or (some and value <= k) else value - usual
            for value in b.steps.counts
        }
    rare = lagging(a, b, k)
    off = [name for name, by in moved.items() if by != k]
    # as many updates as since the load, unless schedule and counters show fewer
    fresh = {name for name in off if k and b.steps.by_name.get(name, b.steps.usual) == k and name not in rare}
    fresh -= {name for name in fresh if not moved[name] and len(off) < len(moved)}  # it may as well have stood still
    fresh = fresh if passed(a, b) in (k, None) else set()
    still = {name for name in fresh if moved[name] == 0}  # it had as many updates as were made since
    fresh = fresh - still if len(still) < len(moved) else fresh
    # no gradient, or updates that the trainer skipped
    behind = {name for name in off if 0 <= moved[name] < k}
    anew = [name for name in off if name in fresh and moved[name] < 0]
    fell = [name for name in off if name not in fresh and moved[name] < 0]  # as those of an older save
    rest = [name for name in off if name not in {*anew, *fell}]
    stood, slow = ([name for name in rest if (moved[name] == 0) == zero] for zero in (True, False))
    parts = [anew, fell, stood, slow] if rest and behind.issuperset(rest) else [off]
    return [_of_counters(pair, k, rule, moved, part, fresh, behind) for part in parts if part]


def _of_counters(
    pair: Pair, k: int, rule: Rule, moved: dict[str, float], off: list[str], fresh: set[str], slow: set[str]
) -> Sign:
    """Return the sign of counters that did not advance by ``k``.

    Args:
        moved: by how much each counter advanced.
        off: the counters.
        fresh, slow: those at ``k``, and those that advanced by less.
    """
    a, b = pair.a.facts, pair.b.facts
    new = fresh.issuperset(off)
    behind = not new and slow.issuperset(off)
    named = bool(k) and NAME in (a.source("step"), b.source("step"))  # a file name may be arbitrary
    mixture = any(parse(name).routed for name in (*b.steps.by_name, *pair.b.params))
    every = (
        a.steps.usual if a.step is None else a.step
    ) or 0  # the counter of a parameter with a gradient in every update
    still = [
        name
        for name in off
        if moved[name] == 0
        and not parse(name).routed
        and (k >= STILL or (k > 0 and a.steps.by_name.get(name) == every and every >= SURELY))
        and (not (mixture and is_numbered(name)) or (k >= SURELY and a.steps.by_name.get(name) == a.steps.usual))
    ]
    still = still if behind and len(off) < len(moved) else []
    severity = "warn" if named or still else "info" if reset_meant(b) or behind else "error"
    first = moved[off[0]]
    words = f"advanced by {_span(moved[name] for name in off)} instead of {k:,}" if k else ""
    words = words or f"changed by {_span((moved[name] for name in off), '+')}"
    if first < 0 or new:
        was, now = ([one.by_name.get(name, one.usual or 0.0) for name in off] for one in (a.steps, b.steps))
        if now[0] != was[0] + k:  # of some files, the usual counter may be right
            words = f"went from {_span(was)} to {_span(now)}; they should be at {_span(one + k for one in was)}"
            words += ", so they count only the updates since the load" if new and set(now) == {k} else ""
    if still and not reset_meant(b):
        words = f"did not advance in {plural(k, 'update')}: were these parameters frozen?"
    elif behind:
        why = "counters do not advance without a gradient or in skipped updates"
        words += f"; {'the schedule advanced alike' if 0 < first == scheduled(a, b) else why}"
    kept = [name for name in off if name in b.steps.by_name]
    what = f"{len(off):,} of {len(moved):,} of the optimizer's counters" if kept else "the optimizer's counters"
    return rule.sign(
        f"{what} {words}",
        {"k": k, "moved": first, "kind": "still" if still else "moved"},
        kept,
        hit=len(off),
        of=len(moved),
        severity=severity,
    )


def _span(values: Iterable[float], sign: str = "") -> str:
    """Return ``46``, or ``39 … 46`` if the values differ."""
    ends = sorted(values)
    low, high = f"{ends[0]:{sign},.0f}", f"{ends[-1]:{sign},.0f}"
    return low if low == high else f"{low} … {high}"


# ---- trainer -------------------------------------------------------------------------------------------------------


def same_trainer(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    found = []
    for fact in ("step", "consumed_samples", "loader", "epoch", "loss_scale"):
        one, two = a.value(fact), b.value(fact)
        if one is not None and two is not None and one != two:
            words = f"{_WORDS.get(fact, fact)} was {one:,.15g} and is {two:,.15g} ({b.source(fact)})"
            sure = fact == "step" and NAME not in (a.source(fact), b.source(fact))
            severity = "error" if sure else "warn"
            found.append(R11.sign(words, {"kind": fact, "before": one, "echo": two}, severity=severity))
    if a.schedule and b.schedule and a.schedule.kind == b.schedule.kind and a.schedule.count != b.schedule.count:
        words = f"the schedule was at {a.schedule.count} and is at {b.schedule.count} ({b.schedule.source})"
        declared = _declared(a, b)
        if not (declared and a.schedule.kind == "megatron"):  # in samples, with another batch size
            evidence = {"kind": "schedule", "before": a.schedule.count, "echo": b.schedule.count}
            found.append(R11.sign(words, evidence, severity="warn"))
    shared = a.generators.keys() & b.generators.keys()
    moved = [name for name in a.generators if name in shared and a.generators[name].digest != b.generators[name].digest]
    drew = [name for name in moved[:SEARCHED] if _drew(a.generators[name], b.generators[name])]
    moved = [name for name in moved if name not in drew]
    for kind, names, causes in (("generators", moved, ("C8",)), ("drawn", drew, ("H1",))):
        if names:
            what = "changed" if kind == "generators" else "drew numbers"
            words = f"the states of {len(names):,} of {len(a.generators):,} random generators {what}"
            listed = {"kind": kind, "names": names[:NAMED]}
            sign = R11.sign(words, listed, hit=len(names), of=len(a.generators), severity="info", causes=causes)
            found.append(sign)
    return [*found, *_unstored(pair, R11)]


def _drew(a: Generator, b: Generator) -> bool:
    """Return whether a generator of torch's has only drawn numbers since."""
    one, two = a.engines.get(""), b.engines.get("")
    if one is None or two is None or len(one) != len(two) or seed(one) != seed(two):
        return False
    then, now = drawn(one), drawn(two)
    return then is not None and now is not None and then <= now


def generators_continue(pair: Pair) -> list[Sign] | str:
    """Compare the seeds of torch's generators, and how far they have come (P51)."""
    seen: list[str] = []
    again, other = {}, {}
    for name, held in pair.a.generators.items():
        later = pair.b.generators.get(name)
        if later is None or _OF_DATA.search(name):
            continue
        for path in held.engines.keys() & later.engines.keys():
            whole = f"{name}.{path}" if path else name
            one, two = held.engines[path], later.engines[path]
            seen.append(whole)
            if one == two or is_fresh(one) or len(seen) > SEARCHED:  # fresh: a program that sets a seed for each step
                continue
            if seed(one) != seed(two):
                other[whole] = seed(one), seed(two)
            elif (now := drawn(two)) is not None and ((then := drawn(one)) is None or now < then):
                again[whole] = then, now
    if not seen:
        return Inapplicable("no generators of torch are stored on both sides")
    found = []
    if again:
        name, (then, now) = next(iter(again.items()))
        before = "more" if then is None else f"{then:,}"
        words = (
            f"{name!r} has drawn {plural(now, 'number')} since its seed, and before the resume it had drawn {before}"
        )
        found.append(P51.sign(words, {"kind": "again", "names": list(again)[:NAMED]}, hit=len(again), of=len(seen)))
    for form, names in _ranks(pair.a.generators.keys() & pair.b.generators.keys()).items():
        engines = [[side.generators[name].engines.get("") for name in names] for side in (pair.a, pair.b)]
        seeds = [{seed(one) for one in some if one is not None} for some in engines]  # since then, some drew more
        alike = list(map(len, seeds)) == [len(names), 1] and None not in engines[1]
        digests = [{side.generators[name].digest for name in names} for side in (pair.a, pair.b)]
        equal = list(map(len, digests)) == [len(names), 1]
        if alike or equal:
            what = "states and are equal now" if equal else "seeds and have one now"
            words = f"the {plural(len(names), 'generator')} {form!r} had different {what}"
            found.append(P51.sign(words, {"kind": "equal", "names": names[:NAMED]}, hit=len(names), of=len(names)))
            other = {name: both for name, both in other.items() if name not in names}
    if other:
        name, (was, is_) = next(iter(other.items()))
        words = f"{name!r} was seeded with {was}, and now with {is_}"
        evidence = {"kind": "seed", "names": list(other)[:NAMED]}
        severity = "warn" if pair.a.facts.step == pair.b.facts.step else "info"  # later, a new epoch may have its own
        found.append(P51.sign(words, evidence, hit=len(other), of=len(seen), severity=severity))
    return found


def _ranks(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of generators that differ only in a number, by the name with ``*`` in its place."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if not _OF_DATA.search(name):
            found.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return {form: some for form, some in found.items() if len(some) > 1}


def parts_stored(pair: Pair) -> list[Sign] | str:
    held = pair.a.generators or pair.a.facts.parts or pair.a.facts.value("consumed_samples") is not None
    if not held and not any("master" in roles for roles in pair.a.params.values()):
        return Inapplicable("no states of generators, schedules, scales, loaders or averages are stored")
    return _unstored(pair, P29)


def _unstored(pair: Pair, rule: Rule) -> list[Sign]:
    """Report generators whose states the later checkpoint lacks although it has the optimizer's state."""
    a, b = pair.a.facts, pair.b.facts
    one, two = pair.a.ckpt, pair.b.ckpt
    if one.format != two.format or not b.groups:
        return []
    found, lost = [], sorted(a.parts - b.parts)
    if rule is P29:
        masters = [any("master" in roles for roles in side.params.values()) for side in (pair.a, pair.b)]
        position = [side.value("consumed_samples") is not None for side in (a, b)]
        lost += [name for name, held in (("data position", position), ("masters", masters)) if held == [True, False]]
    for part in lost:
        words = f"the {part} {'are' if part == 'masters' else 'is'} no longer stored"
        evidence = {"kind": "unstored", "part": part}
        found.append(rule.sign(words, evidence, severity="warn", causes=(_CAUSE_OF_PART[part],)))
    held_states, left_states = pair.a.generators, pair.b.generators
    if not held_states or left_states or len(one.catalog.files) != len(two.catalog.files):
        return found  # other ranks' generators start fresh
    words = f"the states of {plural(len(held_states), 'random generator')} are no longer stored"
    names = {"kind": "unstored", "names": list(held_states)[:NAMED]}
    return [*found, rule.sign(words, names, severity="warn", causes=("C8",))]


def schedule_kept(pair: Pair) -> list[Sign] | str:
    """Compare the constants in the state of a schedule of torch (P37)."""
    one, two = pair.a.facts.schedule, pair.b.facts.schedule
    if one is None or two is None or one.kind != "torch" or two.kind != "torch":
        return Inapplicable("no schedule of torch is stored on both sides")
    if pair.a.facts.optimizer.family != pair.b.facts.optimizer.family:
        return "another optimizer has another schedule"
    names = [name for name in one.settings if name in two.settings and name not in _ADVANCING and name[:1] != "_"]
    off = {name: (one.settings[name], two.settings[name]) for name in names}
    off = {name: both for name, both in off.items() if _known(both[0]) != _known(both[1])}
    if not off:
        return []
    words = ", ".join(f"{name} {old} → {new}" for name, (old, new) in list(off.items())[:4])
    evidence = {"kind": "constants", "declared": list(off), "changed": {name: list(both) for name, both in off.items()}}
    return [
        P37.sign(f"settings of the schedule ({two.source}) changed: {words}", evidence, hit=len(off), of=len(names))
    ]


def _known(value: Any) -> Any:
    """Return a setting of a schedule; ``None`` for functions, one for each param group, which torch does not store."""
    found = _plain(value)
    return None if isinstance(found, list) and all(one is None for one in found) else found


def counters_restarted(pair: Pair) -> list[Sign] | str:
    """Check integers that a trainer, a schedule or a param group keeps, and NAdam's products (P34)."""
    a, b = pair.a.facts, pair.b.facts
    k, step = passed(a, b), _step(a)
    counts = pair.a.counts, pair.b.counts
    both = [path for path in counts[0] if path in counts[1]]
    products = _products(pair)
    if products or k is None or step is None or k < 1 or not both:
        return products or "no counters are stored on both sides, or the updates in between are unknown"
    moved = _moved(a, b)
    whole = moved is not None and abs(moved - k) > 1  # the schedule as a whole: P15
    each = per_step(a, b) or 1  # updates for each step of the trainer
    restarted: dict[str, list[str]] = {}
    fell: dict[bool, list[str]] = {True: [], False: []}
    for path in both:
        old, new = counts[0][path], counts[1][path]
        kind = next((kind for kind, words in _COUNTING.items() if words.search(path.lower())), "")
        parent, _, name = path.rpartition(".")
        if _OF_DATA.search(path.lower()) or (name == "_step_count" and f"{parent}.last_epoch" in both):
            continue  # torch warns by the one, and sets rates by the other
        if kind == "average":  # one that was at the step counts every update; others count some
            if 1 < old > new or (old == step >= SURELY and new > old + k):
                restarted.setdefault(kind, []).append(path)
            continue
        tracks = abs(old - step) <= 1 or kind == "schedule"
        if kind == "optimizer" and 1 < old > new:
            restarted.setdefault(kind, []).append(path)
            continue
        returns = _RETURNS.search(path.lower()) or LOADS.search(path.lower())  # positions in the data: P20
        if not kind and 1 < old > new >= 0 and not tracks and not returns:
            fell[_began(old, new, step, k)].append(path)
        if old < SURELY - 5 * (kind == "schedule") or not tracks:
            continue
        due = {old, old + k, old + k + 1, old + k - 1, old + int(k / each)}
        if new in (k, k + 1) and new < old + k - 1 and new not in due and not (whole and kind == "schedule"):
            restarted.setdefault(kind, []).append(path)
    found = []
    for anew, paths in fell.items():
        if not paths:
            continue
        words = ", ".join(f"{path!r} from {counts[0][path]:,} to {counts[1][path]:,}" for path in paths[:SOME])
        words += f" and {len(paths) - SOME:,} more" if len(paths) > SOME else ""
        began = f", as if {'it' if len(paths) == 1 else 'they'} began anew at the load" if anew else ""
        words = f"{plural(len(paths), 'stored number')} fell{began}: {words}"
        names = {"kind": "anew" if anew else "fell", "names": paths[:NAMED]}
        causes: tuple[str, ...] = ("H1", "C9")
        if anew and (beside := _beside(pair, paths)):
            words += f"; {beside}"
            causes = ("A5", "C9")  # what is stored with them may have begun anew, too
        found.append(
            P34.sign(words, names, hit=len(paths), of=len(both), severity="warn" if anew else "info", causes=causes)
        )
    for kind, paths in restarted.items():
        old, new = (side[paths[0]] for side in counts)
        words = f"{paths[0]!r} went from {old:,} to {new:,} in {plural(k, 'update')}"
        words += f" (and {len(paths) - 1:,} more fell or restarted)" if len(paths) > 1 else ""
        words += ": it counts only those since the load" if new in (k, k + 1) else ""
        causes = _COUNTED.get(kind, ("C9",))
        evidence = {"kind": kind or "other", "before": old, "after": new, "k": k}
        found.append(P34.sign(words, evidence, hit=len(paths), of=len(both), causes=causes))
    return found


def _began(old: int, new: int, step: int, k: int) -> bool:
    """Return whether a count fell to what it would be if it began at the load, and does not go round a cycle."""
    return new <= old * k / step + 1 and math.gcd(step - old, step + k - new) <= old


def _beside(pair: Pair, paths: Iterable[str]) -> str:
    """Return how many tensors that are stored with counts changed; empty if there are none."""
    roots = sorted({path.partition(".")[0] for path in paths if "." in path})
    first, second = pair.stored.ckpt, pair.b.ckpt
    keys = [key for key in first.catalog.keys if key.partition(".")[0] in roots and key in second.catalog.index]
    if not keys:
        return ""
    sides = [
        one.derive(one.catalog.take(np.array([one.catalog.index[key] for key in keys], np.int64)))
        for one in (first, second)
    ]
    rows = diff(*sides, patterns=False, evidence="none").rows
    changed = sum(row.status != "equal" for row in rows)
    return f"in {some(roots)}, {changed:,} of {plural(len(rows), 'tensor')} changed"


def _products(pair: Pair) -> list[Sign]:
    """Check NAdam's ``mu_product``, the product of a factor below 1 for each update: it never grows."""
    held = [(name, roles["mu_product"]) for name, roles in pair.shared() if "mu_product" in roles]
    held = [(name, at) for name, at in held if pair.b.ckpt.catalog.numel[at[1]] == 1][:PRODUCTS]
    grown = {}
    for name, at in held:
        try:
            old, new = (
                float(side.tensor(n).numpy().reshape(-1)[0]) for side, n in zip((pair.a, pair.b), at, strict=True)
            )
        except WorkbenchError:  # verify reports the reason
            continue
        if new > old:
            grown[name] = old, new
    if not grown:
        return []
    old, new = next(iter(grown.values()))
    words = f"mu_product of {plural(len(grown), 'parameter')} went from {old:.3g} to {new:.3g}; "
    words += "each update makes it smaller"
    evidence = {"kind": "products", "before": old, "after": new}
    return [P34.sign(words, evidence, list(grown)[:NAMED], hit=len(grown), of=len(held), causes=("B2", "B1"))]


def changed_arguments(a: TrainingState, b: TrainingState) -> dict[str, tuple[Any, Any]]:
    """Return the arguments that both state and that differ, except those of the host, save or step."""
    names = [name for name in a.args if name in b.args and not _PASSING.search(name)]
    pairs = {name: (a.args[name].value, b.args[name].value) for name in names}
    return {
        name: two for name, two in pairs.items() if _plain(two[0]) != _plain(two[1]) and not counts(name, *two, a, b)
    }


def arguments(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    if not (a.args and b.args) and not (a.groups and b.groups):
        return "no arguments and no param groups are stored on both sides"
    changed = changed_arguments(a, b)
    if pair.a.ckpt.format != pair.b.ckpt.format:  # another framework: compare the facts that both state
        facts = ("clip", "global_batch", "weight_decay")
        both = {fact: (a.value(fact), b.value(fact)) for fact in facts}
        changed = {fact: two for fact, two in both.items() if None not in two and two[0] != two[1]}
    found = []
    if changed:
        listed = ", ".join(f"{name} {one!r} → {two!r}" for name, (one, two) in list(changed.items())[:6])
        more = f" and {len(changed) - 6:,} more" if len(changed) > 6 else ""
        evidence = {"kind": "declared", "changed": {name: list(two) for name, two in list(changed.items())[:50]}}
        found.append(R12.sign(f"arguments changed: {listed}{more}", evidence, hit=len(changed), severity="info"))
    return [*found, _sizes(pair)] if pair.left_out else found + _decays(pair, changed)


def _sizes(pair: Pair, kind: str = "sizes") -> Sign:
    """Report that the param groups hold other numbers of parameters; whose weight decay changed is then unknown."""
    a, b = (" and ".join(str(group.count) for group in side.facts.groups) for side in (pair.a, pair.b))
    return R12.sign(f"the param groups held {a} parameters, and hold {b} now", {"kind": kind})


def _decays(pair: Pair, changed: Mapping[str, Any]) -> list[Sign]:
    """Compare weight decay by parameter, or by the order of the groups if they list no parameters."""
    a, b = pair.a.facts, pair.b.facts
    if any("weight_decay" in name for name in changed) or pair.a.ckpt.format != pair.b.ckpt.format:
        return []
    named = {name for group in b.groups for name in group.params or ()}
    off: list[str] = []
    became: set[tuple[float | None, float | None]] = set()
    if named and not pair.mapped:
        for name in named:
            one, two = a.group_of(name), b.group_of(name)
            if one and two and not _is_other(pair, name):
                became.add((one.weight_decay, two.weight_decay))
                if one.weight_decay != two.weight_decay:
                    off.append(name)
        of = len(named)
    elif len(a.groups) == len(b.groups) and not pair.mapped:
        pairs = zip(a.groups, b.groups, strict=True)
        off = [two.source for one, two in pairs if one.weight_decay != two.weight_decay]
        became = {(one.weight_decay, two.weight_decay) for one, two in zip(a.groups, b.groups, strict=True)}
        of = len(b.groups)
    if not off:
        sizes = [[group.count or 0 for group in side.groups] for side in (a, b)]
        alike = len(sizes[0]) == len(sizes[1]) and sum(sizes[0]) == sum(sizes[1]) and all(map(all, sizes))
        return [_sizes(pair, "groups")] if alike and sizes[0] != sizes[1] else []
    old, new = ({group.weight_decay for group in side.groups if group.weight_decay} for side in (a, b))
    # none of the old values is in use, each became another one, or they are in a group that was added with settings of
    # its own: another setting, not another grouping
    apart = [group for group in b.groups if not any(group is two for _, two in a.beside(b))]
    added = named and set(off) <= {name for group in apart for name in group.params or ()}
    whole = not old & new or _another_setting(became) or added
    some = [*old, *new]
    slight = whole and len(old) == len(new) == 1 and max(some) <= SLIGHT * min(some)  # a trainer may schedule it
    what = "parameters" if named else "param groups"
    stated = _stated(pair, "weight_decay")
    why = f"as {stated!r} states" if stated else "and no argument that was read says why"
    words = f"weight decay changed for {len(off):,} of {of:,} {what}, {why}"
    tensors = sorted(off)[:NAMED] if named else []
    if pair.renumbered and any(map(is_numbered, off)):  # the numbers are of other parameters
        if len({sum(group.count or 0 for group in side.groups) for side in (a, b)}) > 1:
            return [_sizes(pair)]
        words, tensors = _sizes(pair).message, []
    kind, severity = "decay" if whole else "groups", "info" if slight or (whole and stated) else "warn"
    return [R12.sign(words, {"kind": kind}, tensors, severity=severity, hit=len(off), of=of)]


def _stated(pair: Pair, name: str) -> str:
    """Return the path of a setting of that name in a further file, if its value changed; empty if none did."""
    for file in sorted(pair.stored.beside.keys() & pair.b.beside.keys()):
        sides = [leaves(side.beside[file].objects)[0] for side in (pair.stored, pair.b)]
        old, new = ({leaf.path: leaf.value for leaf in held if leaf.name == name} for held in sides)
        for path in old.keys() & new.keys():
            if old[path] != new[path]:
                return f"{file}/{'.'.join(path)}"
    return ""


def _is_other(pair: Pair, name: str) -> bool:
    """Return whether a name is that of another parameter: all that both hold under it has another shape."""
    mine, theirs = pair.a.params.get(name, {}), pair.b.params.get(name, {})
    both = (mine.keys() & theirs.keys()) - {"step"}
    return bool(both) and all(pair.a.shape(mine[role]) != pair.b.shape(theirs[role]) for role in both)


def _another_setting(became: set[tuple[float | None, float | None]]) -> bool:
    """Return whether parameters that had one weight decay have one still, and none lost it, as if they had moved."""
    old, new = ([values[at] for values in became] for at in (0, 1))
    alone = len(set(old)) == len(set(new)) == len(became)
    return alone and set(old) != set(new) and not any(one and not two for one, two in became)


def _declared(a: TrainingState, b: TrainingState) -> list[str]:
    """Return changed arguments or stored constants of the schedule."""
    found = [name for name in changed_arguments(a, b) if sets_rates(name)]
    one, two = a.schedule, b.schedule
    if one and two and one.kind == two.kind:
        for name in ("max_lr", "min_lr", "warmup", "total", "style", "base_lrs"):
            if getattr(one, name) != getattr(two, name):
                found.append(f"{two.source}.{name}")
    plans = [plan_of(side.schedule, side.args, side.statements) for side in (a, b)]
    if not found and plans[0] is not None and plans[1] is not None:
        ends = [
            (plan.peak, plan.floor, plan.warmup / plan.per_update, plan.total / plan.per_update)
            for plan in plans
            if plan
        ]
        if any(abs(x - y) > 1e-9 * abs(x) for x, y in zip(*ends, strict=True)):
            found.append(plans[1].source)
    return found


def lr_on_old_plan(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    first, last = _step(a), _step(b)
    if first is None or last is None or last <= first:
        return "the steps are not stored, or do not advance"
    declared = _declared(a, b)
    updates = (b.steps.usual or 0) - (a.steps.usual or 0)
    alike = len(a.steps.counts) == len(b.steps.counts) == 1 and updates > 0 and not scaled(b)
    if a.step is None and not alike and (k := passed(a, b)) is not None:
        last = first + k
    moved = _moved(a, b)
    ends = _ends(a, b)
    aligned = ends is not None and ends[0] == first  # then it is not a matter of when the two are counted
    rarely = of_epochs(a, b)
    if moved is not None and not rarely and abs(moved - (last - first)) > (0 if aligned else 1):
        if moved > 0 and moved == updates:
            return "schedule and optimizer advanced alike; the trainer's count is off (P01)"
        if a.scheduled is not None and b.scheduled is not None and moved == b.scheduled - a.scheduled:
            return "the schedule advanced as the optimizer whose learning rates it sets, which is one of several"
        skipped = scaled(b) and updates != last - first  # otherwise the optimizer made all of them
        if not (skipped and 0.5 * (last - first) <= moved <= last - first):
            return [_jump(a, b, moved, last - first, declared)]
    if plan_of(a.schedule, a.args, a.statements) is None and all("batch" in name for name in declared):
        declared = []  # they set no learning rate, and without its formula a schedule may give any
    steps = int(moved) if rarely and moved is not None else last - first
    if (off := _off_its_form(a, b, steps, declared)) is not None:
        return off
    if a.lr is None or b.lr is None:
        return "an optimizer stores no lr"
    plan = plan_of(a.schedule, a.args, a.statements)
    due = plan.lr_at(last) if plan is not None else a.lr
    if plan is not None and plan.allows(b.lr, last):
        return []
    if plan is None and not declared and (floor := _plateau(a, last - first)) is not None:
        if floor <= b.lr <= a.lr * (1 + 1e-6):
            return []
        words = f"lr {b.lr:.4g} at step {last:,}, but the plateau schedule allows {floor:.4g} to {a.lr:.4g}"
        return [P15.sign(words, {"lr": b.lr, "planned": floor, "ratio": b.lr / a.lr if a.lr else None, "declared": []})]
    if plan is None and not declared:
        return [] if a.lr == b.lr else "no complete schedule is stored (peak, floor, warm-up, total, style)"
    if b.lr == due:  # both may be 0
        return []
    ratio = b.lr / due if due else float("inf")
    wanted = f"the earlier schedule gives {due:.4g}" if plan is not None else f"before, it was {due:.4g}"
    words = f"lr {b.lr:.4g} at step {last:,}, but {wanted}{f' (×{ratio:.3g})' if due else ''}"
    words += f"; changed settings: {', '.join(declared[:4])}" if declared else ""
    far = not 1 / NEAR <= ratio <= NEAR
    if not far and plan is None:
        return []
    evidence = {"lr": b.lr, "planned": due, "ratio": ratio if due else None, "declared": declared}
    return [P15.sign(words, evidence, severity="warn" if far or not declared else "info")]


def _off_its_form(a: TrainingState, b: TrainingState, steps: int, declared: list[str]) -> list[Sign] | None:
    """Check that after follows the formula of the schedule that before follows; ``None`` if before does not."""
    one, two = a.schedule, b.schedule
    if one is None or two is None or one.count is None or two.count is None or len(one.lrs) != len(two.lrs):
        return None
    now, due = rates_at(one, one.count), rates_at(one, one.count + steps)
    if now is None or due is None or not one.lrs or not all(map(_near, now, one.lrs)):
        return None
    stored = [group.lr for group in b.groups] if len(b.groups) == len(due) else list(two.lrs)
    off = [(lr, wanted) for lr, wanted in zip(stored, due, strict=True) if lr is not None and not _near(lr, wanted)]
    if not off:
        return []
    lr, wanted = off[0]
    words = f"lr {lr:.4g} {plural(steps, 'step')} later, but the formula of the stored schedule gives {wanted:.4g}"
    words += f"; changed settings: {', '.join(declared[:4])}" if declared else ""
    evidence = {"lr": lr, "planned": wanted, "ratio": lr / wanted if wanted else None, "declared": declared}
    # a schedule moves all groups by one factor
    ratios = [lr / wanted for lr, wanted in zip(stored, due, strict=True) if lr is not None and wanted]
    evidence |= {"uneven": True} if ratios and not declared and not _near(min(ratios), max(ratios)) else {}
    return [P15.sign(words, evidence, severity="warn", hit=len(off), of=len(due))]


def _near(one: float, two: float) -> bool:
    return abs(one - two) <= 1e-4 * max(abs(one), abs(two)) + 1e-12


def _plateau(facts: TrainingState, steps: int) -> float | None:
    """Return the lowest lr that `ReduceLROnPlateau` can reach in that many calls; ``None`` without such a schedule."""
    settings = facts.schedule.settings if facts.schedule is not None else {}
    factor, patience = settings.get("factor"), settings.get("patience")
    if facts.lr is None or not isinstance(factor, (int, float)) or not isinstance(patience, int) or not 0 < factor < 1:
        return None
    falls = steps // (max(patience, 0) + 1) + 1
    return facts.lr * float(factor) ** min(falls, 1000) * (1 - 1e-6)


def _step(facts: TrainingState) -> int | None:
    """Return the trainer's step, or the optimizer's counter if the trainer stores none."""
    if facts.step is not None:
        return facts.step
    return None if facts.steps.usual is None else int(facts.steps.usual)


def _moved(a: TrainingState, b: TrainingState) -> float | None:
    """Return the number of updates by which the schedule advanced, if known."""
    ends = _ends(a, b)
    return None if ends is None else ends[1] - ends[0]


def _ends(a: TrainingState, b: TrainingState) -> tuple[float, float] | None:
    """Return the positions of both schedules in updates, if both count updates or samples of one batch size."""
    one, two = a.schedule, b.schedule
    if one is None or two is None or one.count is None or two.count is None:
        return None
    if one.by_metric and two.count >= one.count:
        return None
    found = []
    for side, schedule, count in ((a, one, one.count), (b, two, two.count)):
        unit = 1.0
        if schedule.kind == "megatron":
            batch = b.value("global_batch")
            if not batch or batch != a.value("global_batch"):
                return None
            unit = float(batch)
        elif one.kind == two.kind:
            unit = float(round(one.count / a.step)) if a.step and one.count > 2 * a.step else 1.0
        elif side.step and count > 2 * side.step:
            return None  # stepped once per rank or per micro-batch, which one is unknown
        found.append(count / unit)
    return found[0], found[1]


def _jump(a: TrainingState, b: TrainingState, moved: float, k: int, declared: list[str]) -> Sign:
    assert a.schedule is not None and b.schedule is not None
    ends = _ends(a, b)
    same = a.schedule.kind == b.schedule.kind
    assert ends is not None
    counts = (a.schedule.count, b.schedule.count) if same else (round(ends[0]), round(ends[1]))
    if counts[0] == counts[1]:
        words = f"the schedule did not move in {plural(k, 'step')}: it stayed at {counts[0]:,}"
    else:
        words = f"the schedule went from {counts[0]:,} to {counts[1]:,} in {plural(k, 'step')}"
        words += f", which are {moved:,.4g} updates" if abs((counts[1] or 0) - (counts[0] or 0) - moved) > 0.01 else ""
    evidence = {"kind": "jump", "before": counts[0], "after": counts[1], "k": k, "declared": declared}
    sure = not declared and NAME not in (a.source("step"), b.source("step"))
    return P15.sign(words, evidence, severity="error" if sure else "warn")


def same_constants(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    facts = ("betas", "eps", "decoupled", "amsgrad")
    pairs = {fact: (a.value(fact), b.value(fact)) for fact in facts}
    known = {fact: pair for fact, pair in pairs.items() if None not in pair}
    if not known and not (a.groups and b.groups):
        return "the optimizer's constants are not stored on both sides"
    off = {fact: pair for fact, pair in known.items() if _plain(pair[0]) != _plain(pair[1])}
    off |= {field: pair for field, pair in fields_changed(pair).items() if field not in (*off, *SCHEDULED)}
    if a.cycled or b.cycled:
        for field in CYCLED:  # a schedule changes beta1 at every update
            off.pop(field, None)
    signs = []
    if off:
        words = ", ".join(f"{fact} {' → '.join(in_words(*both))}" for fact, both in off.items())
        evidence = {"changed": {fact: [_plain(one), _plain(two)] for fact, (one, two) in off.items()}}
        signs.append(P16.sign(f"the optimizer's constants changed: {words}", evidence))
    if fell := {field: both for field, both in _estimates(a, b).items() if both[1] < both[0]}:
        words = " and ".join(f"{field} fell from {one:.4g} to {two:.4g}" for field, (one, two) in fell.items())
        estimate = {"kind": "estimate", "changed": {field: list(both) for field, both in fell.items()}}
        signs.append(P16.sign(f"{words}; the optimizer's estimate of its step size only grows", estimate))
    return signs


def _estimates(a: TrainingState, b: TrainingState) -> dict[str, tuple[float, float]]:
    """Return the estimate of the step size that Prodigy and D-Adaptation keep in the first group: it only grows.

    Source: Mishchenko and Defazio, 2023, algorithm 1; prodigyopt 1.1 ``prodigy.py`` (``d_max``).
    """
    if not a.groups or not b.groups:
        return {}
    both = (a.groups[0].settings, b.groups[0].settings)
    values = {name: tuple(number(one.get(name)) for one in both) for name in ("d", "d_max") if "d0" in both[0]}
    return {name: pair for name, pair in values.items() if None not in pair}  # type: ignore[misc]


def data_advances(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    first, last = _step(a), _step(b)
    if not first or last is None or last <= first:
        return "the steps are not stored, or do not advance"
    found, judged = [], False
    within = in_epochs(pair.a.counts, pair.b.counts)
    anew = any(then[0] != now[0] for then, now in within.values())  # positions that are counted in an epoch
    for kind, fact in (("loader", "loader"), ("samples", "consumed_samples")):
        old, new = a.value(fact), b.value(fact)
        if not old or new is None or old % first or a.value("global_batch") != b.value("global_batch"):
            continue  # an epoch or batch size of its own: the data per update is unknown
        if kind == "loader" and anew:
            continue
        judged = True
        each = old // first
        due = each * (last - first)
        if abs(new - old - due) > each or (new - old) % each or new == old:  # one update may be counted elsewhere
            words = f"{_WORDS[fact]} went from {old:,} to {new:,}; "
            words += f"{plural(last - first, 'update')} should have advanced it to {old + due:,}"
            evidence = {"kind": kind, "before": old + due, kind if kind == "loader" else "consumed": new}
            evidence |= {"stands": new == old, "fewer": old < new < old + due}
            found.append(P20.sign(words, evidence, causes=("C6",) if new < old else ()))
    known = any(side.value(fact) is not None for side in (a, b) for fact in ("loader", "consumed_samples"))
    batches = [_batch(side) for side in (pair.stored, pair.b)]
    for path, (then, now) in within.items():
        if found and path == b.source("loader"):
            continue
        each, rest = divmod(then[1], first)
        rate = each if batches[0] == batches[1] else (batches[1] or 0) if each == batches[0] else 0
        due = then[1] + (rate or each) * (last - first)
        even = then[0] == now[0] and not rest and rate > 0  # an epoch in which every update took as much
        again = even and then[1] < now[1] == due - then[1]  # it is where it is if it began at 0 in the load
        off = even and (then[0] == 0 or each == batches[0]) and abs(now[1] - due) > rate  # one may be counted elsewhere
        # a sampler that is saved when an epoch begins stays at 0
        if again or off or (now <= then and (now < then or then[1] > 0)):
            old, new = (f"{index:,} of epoch {epoch:,}" for epoch, index in (then, now))
            words = f"{path!r} stayed at {old}" if then == now else f"{path!r} went from {old} to {new}"
            words += f" in {plural(last - first, 'update')}"
            words += f", which should have advanced it to {due:,}" if again or off else ""
            before, after = (then[0], now[0]) if then[0] != now[0] else (due if again or off else then[1], now[1])
            evidence = {"kind": "loader", "before": before, "loader": after, "stands": then == now}
            evidence |= {"fewer": off and not again and then < now and now[1] < due}
            found.append(P20.sign(words, evidence, causes=("C6",) if again or now < then else ()))
    for root, moved in {} if found else _positions(pair.a.counts, pair.b.counts, within).items():
        fell = {path: both for path, both in moved.items() if both[1] < both[0]}
        if len(fell) > 1 and 2 * len(fell) >= len(moved):
            words = ", ".join(f"{path!r} from {old:,} to {new:,}" for path, (old, new) in list(fell.items())[:SOME])
            words = f"{len(fell):,} of {plural(len(moved), 'position')} in {root!r} fell: {words}"
            old, new = next(iter(fell.values()))
            evidence = {"kind": "loader", "before": old, "loader": new}
            found.append(P20.sign(words, evidence, hit=len(fell), of=len(moved), causes=("C6",)))
    if judged or within or found:
        return found
    return "the data of an update is unknown" if known else "no position of the data is stored"


def _batch(state: State) -> int | None:
    """Return the batch size, that in a setting of a further file included."""
    stated: int | None = state.facts.value("global_batch")
    held = [leaf for ckpt in state.beside.values() for leaf in leaves(ckpt.objects)[0]]
    found = {step_of(leaf.value) for leaf in held if leaf.name in BATCHES} if stated is None else {stated}
    return found.pop() if len(found) == 1 else None


def _positions(
    a: Mapping[str, int], b: Mapping[str, int], known: Iterable[str]
) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the outermost name of several positions in the data → path → before and after, where no epoch is stored.

    A single position may go back when an epoch ends, which most of them do not do together.
    """
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for path in sorted(a.keys() & b.keys() - set(known)):
        root, _, name = path.partition(".")
        if name and LOADS.search(root.lower()) and a[path] > 1:
            found.setdefault(root, {})[path] = a[path], b[path]
    return {
        root: moved
        for root, moved in found.items()
        if not any(path.startswith(f"{root}.") and "epoch" in path for path in a)
    }


# ---- data ----------------------------------------------------------------------------------------------------------


def same_seed(pair: Pair) -> list[Sign] | str:
    a, b = pair.a.facts, pair.b.facts
    one, two = a.value("data_seed"), b.value("data_seed")
    orders = _orders(pair)
    if changed := [key for key, kept in orders.items() if not kept]:
        words = f"{changed[0]!r} holds another order of the data, in the same epoch"
        return [N10.sign(words, {"kind": "order", "names": changed[:NAMED]}, hit=len(changed), of=len(orders))]
    if one is None or two is None:
        return [] if orders else "neither the data's seed nor its order is stored on both sides"
    if one == two:
        return []
    declared = any(name.endswith("seed") for name in changed_arguments(a, b))
    words = f"the data's seed was {one} and is {two}" + (", as an argument states" if declared else "")
    return [N10.sign(words, {"before": one, "after": two}, severity="info" if declared else "warn")]


def _orders(pair: Pair) -> dict[str, bool]:
    """Return whether stored orders of the data (permutations) are as before, where the epoch beside them is."""
    one, two = pair.stored, pair.b
    files = {"": (one.ckpt, two.ckpt)} | {
        f"{name}/": (held, two.beside[name]) for name, held in one.beside.items() if name in two.beside
    }
    found = {}
    for file, (mine, theirs) in files.items():
        shared = [key for key in theirs if key in mine and _may_be_order(mine[key]) and _may_be_order(theirs[key])]
        epochs = [_epochs(ckpt) for ckpt in (mine, theirs)] if shared else []
        for key in shared:
            within = key.rpartition(".")[0]
            before, after = ({path: n for path, n in each.items() if path[0] == within} for each in epochs)
            try:
                orders = mine[key].numpy(), theirs[key].numpy()
            except WorkbenchError:  # verify reports the reason
                continue
            every = np.arange(len(orders[0]))
            if before and before == after and all(np.array_equal(np.sort(order), every) for order in orders):
                found[f"{file}{key}"] = bool(np.array_equal(*orders))
    return found


def _may_be_order(tensor: LazyTensor) -> bool:
    integers = (tensor.element.numpy_name or "").startswith(("int", "uint"))
    return integers and tensor.ndim == 1 and ORDER[0] <= tensor.numel() <= ORDER[1]


def _epochs(ckpt: Checkpoint) -> dict[tuple[str, str], int]:
    """Return the numbers of epochs in the objects, by the path that they are in and their name."""
    found = leaves(ckpt.objects)[0]
    return {
        (".".join(leaf.path[:-1]), leaf.name): leaf.value
        for leaf in found
        if "epoch" in leaf.name and isinstance(leaf.value, int)
    }


def same_batch(pair: Pair) -> list[Sign] | str:
    one, two = pair.a.facts.value("global_batch"), pair.b.facts.value("global_batch")
    if not one or not two:
        return "the batch size is not stored on both sides"
    return [] if one == two else [N12.sign(f"the batch size was {one} and is {two}", {"ratio": two / one})]


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


ECHO: dict[str, Callable[[Pair], list[Sign] | str]] = {
    "R01": same_tensors,
    "R18": rows_kept,
    "R10": lambda pair: _counters(pair, 0, R10),
    "R11": same_trainer,
    "R12": arguments,
    "N1": renamed,
    "N3": wider_types,
    "N4": same_buffers,
    "N10": same_seed,
    "R14": settings_kept,
    "R15": tied_kept,
    "P37": schedule_kept,
    "P51": generators_continue,
}
PAIR: dict[str, Callable[[Pair], list[Sign] | str]] = {
    "P01": counters_advance,
    "P02": same_parameters,
    "P15": lr_on_old_plan,
    "P16": same_constants,
    "R12": arguments,
    "N1": renamed,
    "N3": same_size,
    "N4": same_buffers,
    "N10": same_seed,
    "N12": same_batch,
    "P20": data_advances,
    "P19": rates_moved,
    "P29": parts_stored,
    "P34": counters_restarted,
    "P51": generators_continue,
    "P37": schedule_kept,
    "R15": tied_kept,
}
