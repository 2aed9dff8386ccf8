"""Compare every value that is stored beside the tensors with its echo, whatever its name.

::

    scaler._growth_tracker        7 → 0      the loss scale's          D8
    optimizer.state.3.beta1_w   .97 → 0      an optimizer's counter    B2
    trainer.total_flos         1e18 → 0      nobody's: a remark

Values that other rules compare (counters, settings, schedules, data) and that these report are not repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from workbench.analysis.diff import diff
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.facts.flat import leaves
from workbench.doctor.ledger.sign import Rule, Sign, many, register
from workbench.doctor.rules.settings import IGNORED

R17 = Rule(
    "R17", "a value beside the tensors changed in the load", ("D8", "C1", "C6", "B2", "F4"), "echo",
    "a save right after the load holds what was loaded", "exact", "round trip", "warn",
    "values that a launch sets itself: times, paths, versions (info)", "restore the named value"
)  # fmt: skip
register(R17)

#: Topic → words in a path, and the causes if a value of it changed; the first that fits.
TOPICS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = (
    ("groups", re.compile(r"param_groups"), ("H1",)),
    ("state", re.compile(r"optim.*\bstate\.|^state\.\d"), ("B2", "B11")),
    ("loss scale", re.compile(r"scaler|loss_scale|growth_tracker"), ("D8",)),
    ("schedule", re.compile(r"sched"), ("C1", "C3", "C4")),
    ("seed", re.compile(r"(?:loader|sampler|data).*seed"), ("C7",)),
    ("data", re.compile(r"loader|sampler|dataset|consumed"), ("C6",)),
    ("tensors", re.compile(r"^$"), ("A5", "A2")),  # of files that no reader opens
    ("moments", re.compile(r"^$"), ("B1", "B6")),
    ("average", re.compile(r"(?:^|[._])(?:ema|swa|averag\w*|shadow)(?:$|[._])"), ("F4",)),
)
DRAWN = re.compile(r"rng|random|generator")  #: states that advance in every launch
#: Values that identify a launch or a save, or that are measured.
_PASSING = re.compile(
    r"(?:^|[._/])(?:\w*time\w*|clock|date|\w*path|\w*dir|\w*file\w*|host\w*|\w*version|rank|world_size|device|verbose"
    r"|\w*args|\w*config)(?:$|[._/])"
)
#: Kind of an R11 sign → topic. Other rules → topic: they compare the same values.
_FACTS = {"schedule": "schedule", "loss_scale": "loss scale", "loader": "data", "consumed_samples": "data"}
_RULES = {"R14": "groups", "R12": "groups", "P37": "schedule", "N10": "seed", "R10": "state"}
SHOWN = 4  #: values in a message
MOST = 200_000  #: values that are compared


def values_kept(pair: Pair, signs: Iterable[Sign]) -> list[Sign] | str:
    """Compare all values beside tensors (R17).

    Args:
        signs: those of this pair so far; their topics are not reported again.
    """
    if pair.mapped or pair.stored.ckpt.format != pair.b.ckpt.format:
        return "the two checkpoints are stored in different formats"
    sides = [{one.source: one.value for one in leaves(side.ckpt.objects)[0][:MOST]} for side in (pair.stored, pair.b)]
    files = [(name, one, two) for name, one in pair.stored.beside.items() if (two := pair.b.beside.get(name))]
    for name, *both in files:
        for side, ckpt in zip(sides, both, strict=True):
            side |= {f"{name}/{one.source}": one.value for one in leaves(ckpt.objects)[0][:MOST]}
    if not all(sides):
        return "no values are stored beside the tensors on both sides"
    known = set(_known(signs))
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for source, old in sides[0].items():
        if source not in sides[1] or same(old, new := sides[1][source]):
            continue
        topic = topic_of(source.lower())
        name = source.rpartition(".")[2]
        if topic in known or _PASSING.search(source.lower()) or (topic == "groups" and name in IGNORED):
            continue
        found.setdefault(topic, {})[source] = old, new
    for name, *both in files:
        rows = diff(both[0], both[1], patterns=False, evidence="none").rows
        for row in rows:
            if row.status in ("changed", "type", "shape") and not DRAWN.search(row.key_b.lower()):
                source = f"{name}/{row.key_b}"
                topic = topic_of(source.lower())
                topic = {"other": "tensors", "state": "moments"}.get(topic, topic)
                found.setdefault(topic, {})[source] = "a tensor", "another"
    return [_sign(topic, off, len(sides[0])) for topic, off in found.items()]


def _known(signs: Iterable[Sign]) -> Iterable[str]:
    for sign in signs:
        yield _FACTS.get(str(sign.evidence.get("kind")), "") if sign.rule == "R11" else _RULES.get(sign.rule, "")


def topic_of(source: str) -> str:
    """Return what a stored value belongs to by the words of its path; ``other`` if none is known."""
    return next((topic for topic, words, _ in TOPICS if words.search(source)), "other")


def causes_of_topic(topic: str) -> tuple[str, ...]:
    return next((causes for one, _, causes in TOPICS if one == topic), ("H1",))


def _sign(topic: str, off: dict[str, tuple[Any, Any]], of: int) -> Sign:
    causes = causes_of_topic(topic)
    if topic == "schedule":
        causes = (_of_schedule(off), *causes)
    listed = ", ".join(f"{name} {_said(old)} → {_said(new)}" for name, (old, new) in list(off.items())[:SHOWN])
    more = f" and {len(off) - SHOWN:,} more" if len(off) > SHOWN else ""
    words = f"{many(len(off), 'stored value')} changed: {listed}{more}"
    shown = {name: [_said(old), _said(new)] for name, (old, new) in list(off.items())[:100]}
    evidence = {"kind": topic, "changed": shown}
    severity = "info" if topic == "other" else "warn"
    return R17.sign(words, evidence, hit=len(off), of=of, severity=severity, causes=tuple(dict.fromkeys(causes)))


def _of_schedule(off: dict[str, tuple[Any, Any]]) -> str:
    """Return the cause for values of a schedule: another curve, a position, another length."""
    if any("lr" in name.rpartition(".")[2] for name in off):
        return "C2"
    old, new = next(iter(off.values()))
    if isinstance(old, int) and isinstance(new, int) and re.search(r"count|epoch|step|cur", next(iter(off))):
        return "C1" if new < old else "C3"
    return "C4"


def same(one: Any, two: Any) -> bool:
    """Return whether two plain values are equal; NaN equals NaN."""
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two):
        return True
    return bool(one == two)


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)[:60]
