"""Which rules on values were looked at, by what the passes could add up: what was not found then says something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.doctor.sign import RULES

__all__ = ["ran_alone", "ran_pair"]

_ALONE: Mapping[str, Callable[[Any], int]] = {
    "S01": lambda one: one.count, "S02": lambda one: one.count, "S14": lambda one: one.count,
    "S03": lambda one: _held(one, "exp_avg_sq"), "S05": lambda one: _held(one, "exp_avg_sq"),
    "S15": lambda one: _seen(one), "S04": lambda one: one.bound.of, "S08": lambda one: one.compared,
    "S09": lambda one: one.low.get("master", (0, 0))[1], "S10": lambda one: one.low.get("exp_avg_sq", (0, 0))[1],
}  # fmt: skip
_PAIR: Mapping[str, Callable[[Any], int]] = {
    "P03": lambda one: one.floor.of, "P04": lambda one: one.transition.of, "P05": lambda one: one.reach.of,
    "P08": lambda one: one.count, "P09": lambda one: one.count, "P11": lambda one: one.ruler.count,
    "P12": lambda one: one.replay.count, "P13": lambda one: one.replay.count, "P14": lambda one: one.moved_of,
    "N25": lambda one: one.count,
}  # fmt: skip


def ran_alone(states: Mapping[str, Any], where: str) -> dict[str, str]:
    """Rule → over how many elements of which checkpoint it was looked at."""
    return _ran(_ALONE, states, where)


def ran_pair(states: Mapping[str, Any], where: str) -> dict[str, str]:
    """The same of two checkpoints."""
    return _ran(_PAIR, states, where)


def _ran(rules: Mapping[str, Callable[[Any], int]], states: Mapping[str, Any], where: str) -> dict[str, str]:
    counts = {rule: sum(count(one) for one in states.values()) for rule, count in rules.items() if rule in RULES}
    return {rule: f"{where}: {count:,} elements" for rule, count in counts.items() if count}


def _seen(one: Any) -> int:
    """Elements of a parameter that gradients reached."""
    v = one.numbers.get("exp_avg_sq")
    return int(v.count - v.zeros) if v is not None else 0


def _held(one: Any, role: str) -> int:
    return int(one.numbers[role].count) if role in one.numbers else 0
