"""What a rule is, and what it says when it fires: a sign. Many signs make a cause; a sign alone judges nothing.

::

    Rule   S07  "steps disagree"   causes B2 G6 C9   needs one checkpoint   exact law → may say error
     │
     ▼ fires
    Sign   S07  error  "291 of 291 parameters at step 0, the trainer at 48,000"   evidence {…}   hit 291 of 291

Every rule is in the one table :data:`RULES`, which modules fill as they are imported and documents are made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.report import SEVERITIES

__all__ = ["NEEDS", "RULES", "Cleared", "Inapplicable", "Outcome", "Rule", "Sign", "looked_at", "many", "register"]

#: What a rule looks at.
NEEDS = {
    "one": "one checkpoint",
    "echo": "a checkpoint and its echo: saved again right after the load, before any update",
    "pair": "two checkpoints of a run, some steps apart",
    "run": "several checkpoints of a run",
}


def many(count: float, word: str) -> str:
    """``1 parameter``, ``2 parameters``, ``1,200 matrices``."""
    stem = {"matrice": "matrix"}.get(word, word)
    return f"{count:,.0f} {stem if count == 1 else f'{word}s'}"


@dataclass(frozen=True)
class Rule:
    """One test.

    Attributes:
        id: as in the catalogue: ``S07``; ``N`` where the test was proposed there.
        title: what a sign of it says, in a few words.
        causes: ids of the causes that it is evidence for (``B2``), likeliest first.
        needs: a key of :data:`NEEDS`.
        law: what holds in a healthy run.
        threshold: where it fires; ``exact`` for equality.
        source: where law and threshold come from.
        severity: the gravest that it says; an exact law may say ``error``, a statistic ``warn``.
        risk: what is healthy and fires all the same.
        remedy: what to do.
        looked: of a pass's sums of one parameter, how many elements the rule looked at; ``None``: it is no rule on
            such sums.
    """

    id: str
    title: str
    causes: tuple[str, ...]
    needs: str
    law: str
    threshold: str
    source: str
    severity: str
    risk: str
    remedy: str
    looked: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if self.needs not in NEEDS or self.severity not in SEVERITIES:
            raise ValueError(f"rule {self.id}: needs {self.needs!r}, severity {self.severity!r}")

    def sign(
        self,
        message: str,
        evidence: Mapping[str, Any] | None = None,
        tensors: Iterable[str] = (),
        *,
        severity: str | None = None,
        hit: int = 0,
        of: int = 0,
        causes: tuple[str, ...] = (),
    ) -> Sign:
        """What it says when it fires; a milder ``severity`` than its own where less is proved, fewer ``causes`` where
        more is.
        """
        grave = severity or self.severity
        if SEVERITIES.index(grave) < SEVERITIES.index(self.severity):
            raise ValueError(f"rule {self.id} says at most {self.severity!r}, not {grave!r}")
        return Sign(self.id, grave, message, dict(evidence or {}), tuple(tensors), hit, of, causes)


@dataclass(frozen=True)
class Sign:
    """A rule that fired.

    Attributes:
        rule: id of the rule.
        severity: ``error``, ``warn`` or ``info``.
        message: one sentence with the numbers in it.
        evidence: the same numbers, of JSON's types only.
        tensors: fqns it was seen in.
        hit, of: how many of what was looked at (parameters, elements, ranks: the message says which).
        causes: those that this sign speaks for, likeliest first; empty: its rule's.
    """

    rule: str
    severity: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    hit: int = 0
    of: int = 0
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cleared:
    """Something that was shown to be healthy.

    Attributes:
        what: a few words: ``weights``.
        message: one sentence with the numbers in it: ``291 of 291 are equal bit for bit``.
        causes: ids of the causes that this excludes.
    """

    what: str
    message: str
    causes: tuple[str, ...] = ()


class Inapplicable(str):
    """Why a rule was not checked: there is nothing of its kind here, and no other file would change that."""

    __slots__ = ()


@dataclass
class Outcome:
    """What came of applying rules.

    Attributes:
        signs: of those that fired.
        checked: rule → what was looked at, with its counts.
        not_checked: rule → why not; an :class:`Inapplicable` where there was nothing to check.
        cleared: what was shown to be healthy.
    """

    signs: list[Sign] = field(default_factory=list)
    checked: dict[str, str] = field(default_factory=dict)
    not_checked: dict[str, str] = field(default_factory=dict)
    cleared: list[Cleared] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Put another outcome's in; what was checked anywhere is checked."""
        self.signs += other.signs
        self.cleared += other.cleared
        for rule, words in other.checked.items():
            self.checked[rule] = f"{self.checked[rule]}; {words}" if rule in self.checked else words
        for rule, words in other.not_checked.items():
            held = self.not_checked.setdefault(rule, words)
            if isinstance(held, Inapplicable) and not isinstance(words, Inapplicable):
                self.not_checked[rule] = words  # of another checkpoint, in which there was something to check
        for rule in self.checked:
            self.not_checked.pop(rule, None)


#: Every rule by its id.
RULES: dict[str, Rule] = {}


def looked_at(needs: str, states: Mapping[str, Any], where: str) -> dict[str, str]:
    """Rule → over how many elements it was looked at: what was not found then says something.

    Args:
        needs: of the rules: ``one`` or ``pair``. states: fqn → a pass's sums.
    """
    rules = [rule for rule in RULES.values() if rule.needs == needs and rule.looked is not None]
    counts = {rule.id: sum(rule.looked(one) for one in states.values()) for rule in rules if rule.looked is not None}
    return {rule: f"{where}: {count:,} elements" for rule, count in counts.items() if count}


def register(*rules: Rule) -> None:
    """Put rules into the table.

    Raises:
        ValueError: an id is taken by another rule.
    """
    for rule in rules:
        if RULES.setdefault(rule.id, rule) != rule:
            raise ValueError(f"rule {rule.id} is registered twice")
