"""Settings of the optimizer: every field of its param groups, and other values that a trainer stores beside tensors.

::

    load     before  lr 6.67e-4   betas .9 .95   maximize False     a load changes no field: exact             R14
             echo    lr 1.00e-4   betas .9 .95   maximize False
    train    before  lr 3.0e-4    after  lr 9.0e-3                  farther than a schedule moves it in k      P19
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workbench.core.words import plural
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.facts.flat import SWITCHES
from workbench.doctor.facts.numbers import in_words
from workbench.doctor.facts.schedule import plan_of
from workbench.doctor.facts.state import Group, TrainingState
from workbench.doctor.ledger.rows import Row, Status
from workbench.doctor.ledger.sign import Rule, Sign, register

SHOWN = 2  #: changes of a field in a message
STEEP = 1.5  #: factor by which any schedule may change an lr
#: Fields that no schedule and no optimizer changes by itself.
STABLE = frozenset({
    "betas", "initial_lr", "eps", "maximize", "nesterov", "amsgrad", "dampening", "momentum", "decoupled_weight_decay",
    "correct_bias", "bias_correction", "alpha", "rho", "centered", "rectify",
})  # fmt: skip
SHORT = 0.1  #: share of the steps so far within which an lr does not fall to a third
FALL = 1 / 3
SUDDEN = 0.02  #: share of the steps so far within which no smooth decay falls to a third …
LEFT = 0.15  #: … unless it is below this share of the initial lr, at its end
#: Options of kernels, and fields that a schedule changes or that name the parameters.
IGNORED = SWITCHES | frozenset({
    "params", "param_names", "step", "default_config", "max_lr", "min_lr", "lr_mult", "wd_mult", "is_expert_parallel",
    "is_decoupled_lr", "name",
})  # fmt: skip

R14 = Rule(
    "R14", "a setting of the optimizer changed in the load", ("C1", "C2", "H1"), "echo",
    "loading changes no field of a param group", "exact", "torch 2.13 Optimizer.state_dict; torchtitan PR 275", "warn",
    "settings that the new launch overrides on purpose", "restore the param groups with the optimizer"
)  # fmt: skip
R15 = Rule(
    "R15", "tied tensors are stored separately", ("F2",), "echo", "names that share one storage keep sharing it",
    "exact", "torch.save keeps shared storage", "error", "a format that stores every name separately",
    "tie the weights before creating the optimizer"
)  # fmt: skip
P19 = Rule(
    "P19", "the learning rate changed more than a schedule changes it", ("C2", "C1", "H1"), "pair",
    "within few updates a schedule changes the lr by a small factor, or in proportion to the step (warm-up)",
    f"beyond the ratio of the steps, and ×{STEEP:g} unless it is the initial lr; below a third within {SHORT:.0%} more "
    f"steps ({SUDDEN:.0%} if a schedule without a formula is stored); one rate for groups that had several",
    "warm-up and decay formulas of torch, Megatron, DeepSpeed", "warn", "cyclic schedules; a learning rate set by hand",
    "restore the schedule, or record the change in the arguments"
)  # fmt: skip
register(R14, R15, P19)


def setting_rows(pair: Pair, leg: str) -> Iterator[Row]:
    """Yield one row per field: what happened to the settings."""
    a, b = pair.a.facts, pair.b.facts
    for field, (same, off) in _fields(a, b).items():
        if same:
            yield Row(leg, f"group.{field}", Status.EQUAL if leg == "load" else Status.WITHIN, elements=same)
        if off:
            old, new = off[0]
            status = Status.BEYOND if leg == "load" else Status.WITHIN
            yield Row(
                leg, f"group.{field}", status, _way(old, new), elements=len(off), detail={"before": old, "after": new}
            )
    for quantity, one, two in (
        ("schedule", a.schedule and a.schedule.count, b.schedule and b.schedule.count),
        ("loader", a.value("loader"), b.value("loader")),
        ("samples", a.value("consumed_samples"), b.value("consumed_samples")),
    ):
        if one is not None and two is not None:
            status = Status.WITHIN if leg == "train" else Status.EQUAL if one == two else Status.BEYOND
            yield Row(leg, quantity, status, detail={"before": one, "after": two})


def settings_kept(pair: Pair) -> list[Sign] | str:
    """Compare the settings of before and its echo (R14)."""
    a, b = pair.a.facts, pair.b.facts
    if not a.groups or not b.groups:
        return "no param groups are stored on both sides"
    groups = a.beside(b)
    signs = []
    for field, (same, off) in _fields(a, b).items():
        if not off:
            continue
        old, new = off[0]
        changes = list(dict.fromkeys("from {} to {}".format(*in_words(*both)) for both in off))
        of = f"in {len(off):,} of {same + len(off):,} param groups"
        more = f" and {len(changes) - SHOWN:,} more" if len(changes) > SHOWN else ""
        words = f"{field} changed {changes[0]} {of}"
        if len(changes) > 1:
            words = f"{field} changed {of}: {', '.join(changes[:SHOWN])}{more}"
        kind = "lr" if field in ("lr", "initial_lr") else "setting"
        if field in ("weight_decay", "lr", "initial_lr") and len(changes) > 1 and _exchanged(off):
            kind = "groups"  # each value belongs to other parameters now
            words += "; the groups have one another's values"
        evidence: dict[str, Any] = {"kind": kind, "field": field, "before": _plain(old), "after": _plain(new)}
        if kind == "lr" and _number(old) and _number(new):
            evidence["ratio"] = new / old if old else math.inf
            rose = {two > one for one, two in off if _number(one) and _number(two)}
            evidence |= {"apart": True} if len(rose) > 1 else {}  # one rose, another one fell
        names = [name for one, two in groups if _get(one, field) != _get(two, field) for name in two.params or ()]
        causes = ("B7",) if kind == "groups" else ()
        signs.append(R14.sign(words, evidence, names, hit=len(off), of=same + len(off), causes=causes))
    return signs


def _exchanged(off: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether the groups have one another's values, which may all have been multiplied by one number."""
    if not all(_number(value) and value >= 0 for both in off for value in both):
        return Counter(map(repr, (old for old, _ in off))) == Counter(map(repr, (new for _, new in off)))
    sides = [[both[side] for both in off] for side in (0, 1)]
    times = sum(sides[1]) / sum(sides[0]) if any(sides[0]) else 0.0
    places = [all(math.isclose(times * a, b, rel_tol=1e-6) for a, b in zip(*two, strict=True))
              for two in (sides, [sorted(side) for side in sides])]  # fmt: skip
    return times > 0 and places == [False, True]


def rates_moved(pair: Pair) -> list[Sign] | str:
    """Compare the lr of two checkpoints if no stored schedule defines it (P19).

    The state of torch's ``LambdaLR``, which transformers uses for every schedule, is a counter without a formula.
    """
    a, b = pair.a.facts, pair.b.facts
    rates = [(_get(one, "lr"), _get(two, "lr")) for one, two in a.beside(b)]
    rates = [(old, new) for old, new in rates if _number(old) and _number(new) and old > 0]
    if not rates:
        return "no learning rates are stored on both sides"
    if (level := _levelled(rates)) is not None:
        return [level]
    if _exchanged(rates):
        words = f"the {len(rates):,} param groups have one another's learning rates"
        return [P19.sign(words, {"kind": "groups", "field": "lr"}, hit=len(rates), of=len(rates), causes=("B7",))]
    stored = a.schedule is not None and b.schedule is not None
    if stored and not (_formless(a) and _formless(b)):
        return "a schedule is stored and defines the lr"
    if a.step is None or b.step is None or b.step <= a.step:
        return "the steps are not stored, or do not advance"
    k = b.step - a.step
    warm = 1.05 * (b.step + 1) / max(a.step, 1)
    peaks = {_get(one, "initial_lr") for one in b.groups}
    if stored and k > max(SUDDEN * a.step, 1):
        return f"no formula of the schedule is stored, and in {plural(k, 'step')} it may have reached any learning rate"
    if stored:  # a cosine may restart at its peak, and ends near 0
        top = max((peak for peak in peaks if _number(peak)), default=0.0)
        off = [(old, new) for old, new in rates if old > LEFT * top and new < FALL * old]
    else:
        soon = k <= max(SHORT * a.step, 1)
        steep = {new: warm if new in peaks else max(STEEP, warm) for _, new in rates}
        off = [(old, new) for old, new in rates if new > steep[new] * old or (soon and new < FALL * old)]
    if not off:
        return []
    old, new = off[0]
    words = (
        f"the learning rate of {len(off):,} of {len(rates):,} param groups went from {old:.4g} to {new:.4g} "
        f"(×{new / old:.3g}) within {plural(k, 'step')}, and no {'formula of the ' if stored else ''}schedule is stored"
    )
    evidence = {"kind": "lr", "before": old, "after": new, "ratio": new / old}
    return [P19.sign(words, evidence, hit=len(off), of=len(rates))]


def _formless(facts: TrainingState) -> bool:
    """Return whether the stored schedule is torch's, and its state does not say how the lr follows from the counter."""
    held = facts.schedule
    if held is None or held.kind != "torch" or "lr_lambdas" not in held.settings:
        return False
    return plan_of(held, facts.args, facts.statements) is None


def _levelled(rates: list[tuple[float, float]]) -> Sign | None:
    """Return a sign if param groups with rates of their own have one rate now, for which some rose and others did not.

    One schedule moves the rates of all groups by the same factor, or all towards one floor.
    """
    new = rates[0][1]
    risen = [old for old, _ in rates if old < new]
    if (
        len({old for old, _ in rates}) == 1
        or any(other != new for _, other in rates)
        or not 0 < len(risen) < len(rates)
    ):
        return None
    words = f"{plural(len(rates), 'param group')} had learning rates of their own, and all have {new:.4g} now"
    evidence = {"kind": "lr", "before": min(risen), "after": new, "ratio": new / min(risen)}
    return P19.sign(words, evidence, hit=len(risen), of=len(rates))


def tied_kept(pair: Pair) -> list[Sign] | str:
    """Check that names that shared one storage still do (R15)."""
    held, now = pair.stored.tied, pair.b.tied
    if pair.mapped or pair.stored.ckpt.format != pair.b.ckpt.format:
        return "the two checkpoints are stored in different formats"
    if not held:
        return "no names share storage"
    apart = [
        sorted(names)
        for names in held
        if not any(names <= other for other in now) and all(name in pair.b.params for name in names)
    ]
    if not apart:
        return []
    words = (
        f"{' and '.join(map(repr, apart[0][:2]))} shared one tensor and are now stored as "
        f"{plural(len(apart[0]), 'tensor')}"
    )
    return [
        R15.sign(
            words, {"groups": len(apart)}, [name for names in apart for name in names], hit=len(apart), of=len(held)
        )
    ]


# ---- fields ----------------------------------------------------------------------------------------------------------


def _fields(a: TrainingState, b: TrainingState) -> dict[str, tuple[int, list[tuple[Any, Any]]]]:
    """Return field → (number of groups that agree, values of those that do not), over corresponding groups."""
    found: dict[str, tuple[int, list[tuple[Any, Any]]]] = {}
    for one, two in a.beside(b):
        mine, theirs = _settings(one), _settings(two)
        for field in mine:
            if field in theirs and field not in IGNORED:
                same, off = found.get(field, (0, []))
                if _same(mine[field], theirs[field]):
                    found[field] = same + 1, off
                else:
                    found[field] = same, [*off, (mine[field], theirs[field])]
    return found


def fields_changed(pair: Pair) -> dict[str, tuple[Any, Any]]:
    """Return field → its values before and after, in the first group where it changed."""
    return {field: off[0] for field, (_, off) in _fields(pair.a.facts, pair.b.facts).items() if off and field in STABLE}


def _settings(group: Group) -> Mapping[str, Any]:
    known = {name: getattr(group, name) for name in ("lr", "betas", "eps", "weight_decay", "initial_lr", "amsgrad")}
    return {**{name: value for name, value in known.items() if value is not None}, **group.settings}


def _get(group: Group, field: str) -> Any:
    return _settings(group).get(field)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two):
        return True
    return bool(one == two) and isinstance(one, bool) == isinstance(two, bool)


def _way(old: Any, new: Any) -> str:
    if _number(old) and _number(new):
        return "lower" if new < old else "higher"
    return "changed"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
