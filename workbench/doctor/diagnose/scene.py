"""All that was found, as the reasoning asks for it: which rules fired where, what became of the moments, which
parameters are affected in weights, in moments, or in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workbench.doctor.evidence import Evidence, State
from workbench.doctor.sign import Outcome, Sign

__all__ = ["LOADED", "PAIRED", "TRAINED", "Claim", "Scene", "Touched", "where_of"]

#: Pairs of checkpoints, as a sign's ``evidence["in"]`` has them.
LOADED, PAIRED, TRAINED = "before → echo", "before → after", "echo → after"
#: Rules on the values of an echo.
ECHOES = frozenset({"R02", "R03", "R04", "R05", "R06", "R07", "R08", "R09", "R13"})


@dataclass(frozen=True, eq=False)
class Claim:
    """What a sign says of some of its parameters.

    Attributes:
        tensors: that it is about; none: of the run as a whole.
        causes: that can have brought it about, likeliest first.
        cut: the sign names only the first of its parameters.
        weight: less than 1 where a better look at the same thing was had.
        sure: the sign itself says so; else its causes were told by which parameters it is about, which is less.
    """

    sign: Sign
    tensors: frozenset[str]
    causes: tuple[str, ...]
    cut: bool = False
    weight: float = 1.0
    sure: bool = False


@dataclass(frozen=True)
class Touched:
    """Parameters of a pair that broke laws.

    Attributes:
        weights: out of reach, turned, or not replayed; moments: below the floor, or not evolved.
        every: all that were looked at.
    """

    weights: frozenset[str]
    moments: frozenset[str]
    every: frozenset[str]


@dataclass(frozen=True, eq=False)
class Scene:
    """Evidence, signs and sums.

    Attributes:
        alone: ``before``, ``echo``, ``after`` → fqn → sums of one state.
        pairs: ``before → after`` … → fqn → sums of a pair.
    """

    evidence: Evidence
    outcome: Outcome
    alone: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pairs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def signs(self) -> list[Sign]:
        return self.outcome.signs

    @cached_property
    def _by_rule(self) -> dict[str, list[Sign]]:
        found: dict[str, list[Sign]] = {}
        for sign in self.signs:
            found.setdefault(sign.rule, []).append(sign)
        return found

    def fired(self, *rules: str, where: str | None = None) -> list[Sign]:
        """Signs of those rules that say more than a remark."""
        signs = [sign for rule in rules for sign in self._by_rule.get(rule, ())]
        return [one for one in signs if one.severity != "info" and (where is None or where_of(one) == where)]

    @property
    def resumed(self) -> str:
        """The first checkpoint that the load can have spoilt."""
        return "echo" if self.evidence.echo is not None else "after" if self.evidence.after is not None else "before"

    def state(self, where: str) -> State:
        """The later checkpoint of a place: of ``before → after`` it is ``after``."""
        return self.evidence.state(where.rpartition(" → ")[2] or self.resumed)

    @cached_property
    def adam(self) -> bool:
        """Whether any file holds Adam's moments."""
        return any({"exp_avg", "exp_avg_sq"} <= self._roles(which) for which in ("before", "echo", "after"))

    @cached_property
    def mastered(self) -> bool:
        """Whether any file holds masters."""
        return any("master" in self._roles(which) for which in ("before", "echo", "after"))

    def _roles(self, which: str) -> set[str]:
        state = getattr(self.evidence, which)
        return set() if state is None else set(state.ckpt.roles)

    @cached_property
    def moments(self) -> str:
        """What the load left of them: ``absent``, ``zero``, ``no v`` (exp_avg_sq is zero), ``fresh`` (they are, by the
        laws of a pair), ``held`` or ``unknown``.
        """
        before, state = self.evidence.before, self.evidence.state(self.resumed)
        if "exp_avg" in before.ckpt.roles and "exp_avg" not in state.ckpt.roles:
            return "absent"
        sums = [one.numbers for one in self.alone.get(self.resumed, {}).values() if "exp_avg_sq" in one.numbers]
        if sums and all(one["exp_avg_sq"].zeros == one["exp_avg_sq"].count for one in sums):
            held = any("exp_avg" in one and one["exp_avg"].zeros < one["exp_avg"].count for one in sums)
            return "no v" if held else "zero"
        if self.resumed == "echo":
            return "held" if sums else "unknown"
        touched = self.touched(PAIRED)
        if not touched.every:
            return "unknown"
        broken, of = self.broken("floor"), max(1, self.looked("floor"))
        wide = len(touched.moments) >= 0.8 * len(touched.every)
        return "fresh" if wide and broken > 0.02 * of else "held"

    def touched(self, where: str) -> Touched:
        """Which parameters broke laws in a pair."""
        states = self.pairs.get(where, {})
        weights = {fqn for fqn, sums in states.items() if sums.reach.broken}
        weights |= {fqn for sign in self.fired("P08", where=where) for fqn in sign.tensors}
        weights |= {
            fqn for sign in self.fired("P12", where=where) for fqn in sign.tensors if sign.severity == "error"
        }  # fmt: skip
        moments = {fqn for fqn, sums in states.items() if sums.floor.broken or sums.transition.broken}
        return Touched(frozenset(weights), frozenset(moments), frozenset(states))

    def broken(self, law: str, fqns: frozenset[str] | None = None, where: str = PAIRED) -> int:
        """Elements that break a law of a pair."""
        return sum(getattr(s, law).broken for f, s in self.pairs.get(where, {}).items() if fqns is None or f in fqns)

    def looked(self, law: str, fqns: frozenset[str] | None = None, where: str = PAIRED) -> int:
        """Elements that it was looked at in."""
        return sum(getattr(s, law).of for f, s in self.pairs.get(where, {}).items() if fqns is None or f in fqns)

    def worst(self, law: str, fqns: frozenset[str], where: str = PAIRED) -> float:
        """By how much, at most: 1 is the bound."""
        found = [getattr(s, law).worst for f, s in self.pairs.get(where, {}).items() if f in fqns]
        return max(found, default=0.0)

    @cached_property
    def declared(self) -> frozenset[str]:
        """Arguments that both launches state, and differently."""
        found = [sign for sign in self.signs if sign.rule == "R12" and sign.evidence.get("kind") == "declared"]
        return frozenset(name for sign in found for name in sign.evidence.get("changed", {}))

    @cached_property
    def echoed(self) -> frozenset[str]:
        """Parameters of which an echo, or the origin of their rows, tells more than any law of a pair."""
        signs = [sign for sign in self.signs if where_of(sign) == LOADED and sign.rule in ECHOES]
        signs += [sign for sign in self.fired("P17") if sign.severity == "error"]
        return frozenset(name for sign in signs for name in sign.tensors)

    @cached_property
    def trained_well(self) -> bool:
        """From the echo on everything is as the laws want it: what is wrong came with the load."""
        return TRAINED in self.pairs and not any(
            where_of(sign) == TRAINED and sign.severity == "error" for sign in self.signs
        )


def where_of(sign: Sign) -> str:
    """The checkpoint or pair that a sign is about."""
    return str(sign.evidence.get("in", ""))
