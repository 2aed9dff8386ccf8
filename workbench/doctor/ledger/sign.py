"""Rules, and the signs that they report when they fire. A single sign is not a conclusion.

::

    Rule   S07  "steps disagree"   causes B2 G6 C9   needs one checkpoint   exact law → severity up to error
     │
     ▼ fires
    Sign   S07  error  "291 of 291 parameters at step 0, the trainer at 48,000"   evidence {…}   hit 291 of 291

Every rule is in the table :data:`RULES`. Modules fill it when they are imported; pages are generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.report import SEVERITIES
from workbench.core.words import plural

#: What a rule examines.
NEEDS = {
    "one": "one checkpoint",
    "echo": "a checkpoint and its echo: saved again right after the load, before any update",
    "pair": "two checkpoints of a run, some steps apart",
    "run": "several checkpoints of a run",
}


def many(count: float, word: str) -> str:
    """Return ``1 parameter``, ``2 parameters``, ``1,200 matrices``."""
    stem = {"matrice": "matrix"}.get(word, word)
    return f"{count:,.0f} {stem if count == 1 else f'{word}s'}"


_SINGULAR = {"are": "is", "have": "has", "differ": "differs"}


def agreeing(count: int, words: str) -> str:
    """Return a predicate that begins with its verb, in the number of ``count``: ``is new`` for 1."""
    verb, _, rest = words.partition(" ")
    return f"{_SINGULAR.get(verb, verb) if count == 1 else verb} {rest}"


def some(names: Sequence[str]) -> str:
    """Return the first two names, and how many more there are."""
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
    return ", ".join(map(repr, names[:2])) + more


@dataclass(frozen=True)
class Rule:
    """One test.

    Attributes:
        id: as in the catalogue: ``S07``; ``N`` if the test was proposed there.
        title: what a sign of it reports, in a few words.
        causes: ids of the causes that it is evidence for (``B2``), likeliest first.
        needs: a key of :data:`NEEDS`.
        law: what holds in a healthy run.
        threshold: where it fires; ``exact`` for equality.
        source: where law and threshold come from.
        severity: the highest that it reports; an exact law may report ``error``, a statistic ``warn``.
        risk: healthy cases in which it fires anyway.
        remedy: what to do.
        looked: returns how many elements the rule examined, from a pass's sums of one parameter; ``None`` if the rule
            does not use such sums.
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
        """Return a sign; pass a milder ``severity`` if less is proved, and fewer ``causes`` if more is."""
        level = severity or self.severity
        if SEVERITIES.index(level) < SEVERITIES.index(self.severity):
            raise ValueError(f"rule {self.id} reports at most {self.severity!r}, not {level!r}")
        return Sign(self.id, level, message, dict(evidence or {}), tuple(tensors), hit, of, causes)


@dataclass(frozen=True)
class Sign:
    """A report of a rule that fired.

    Attributes:
        rule: id of the rule.
        severity: ``error``, ``warn`` or ``info``.
        message: one sentence that includes the numbers.
        evidence: the same numbers, in JSON's types only.
        tensors: fqns of the parameters in which it was seen.
        hit, of: how many of the examined items (parameters, elements or ranks, as the message states).
        causes: the causes that this sign supports, likeliest first; if empty, those of its rule.
    """

    rule: str
    severity: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    hit: int = 0
    of: int = 0
    causes: tuple[str, ...] = ()


SAVED = "save"  #: what is cleared if a manifest records that the trainer's values were written


@dataclass(frozen=True)
class Cleared:
    """Something that was shown to be healthy.

    Attributes:
        what: a few words: ``weights``.
        message: one sentence that includes the numbers: ``291 of 291 are equal bit for bit``.
        causes: ids of the causes that this excludes.
    """

    what: str
    message: str
    causes: tuple[str, ...] = ()


class Inapplicable(str):
    """A reason why a rule was not checked: the checkpoints have nothing that it applies to, and no other would."""

    __slots__ = ()


@dataclass
class Outcome:
    """The result of applying rules.

    Attributes:
        signs: the signs of rules that fired.
        checked: rule → what was examined, with its counts.
        not_checked: rule → why not; an :class:`Inapplicable` if there was nothing to check.
        cleared: what was shown to be healthy.
    """

    signs: list[Sign] = field(default_factory=list)
    checked: dict[str, str] = field(default_factory=dict)
    not_checked: dict[str, str] = field(default_factory=dict)
    cleared: list[Cleared] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Add another outcome; a rule that was checked anywhere counts as checked."""
        self.signs += other.signs
        self.cleared += other.cleared
        for rule, words in other.checked.items():
            self.checked[rule] = f"{self.checked[rule]}; {words}" if rule in self.checked else words
        for rule, words in other.not_checked.items():
            held = self.not_checked.setdefault(rule, words)
            if isinstance(held, Inapplicable) and not isinstance(words, Inapplicable):
                self.not_checked[rule] = words  # another checkpoint had something to check
        for rule in self.checked:
            self.not_checked.pop(rule, None)


#: Every rule by its id.
RULES: dict[str, Rule] = {}


def looked_at(needs: str, states: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return rule → the number of elements it examined, which shows how much finding nothing proves.

    Args:
        needs: the kind of rules: ``one`` or ``pair``.
        states: fqn → a pass's sums.
    """
    rules = [rule for rule in RULES.values() if rule.needs == needs and rule.looked is not None]
    counts = {rule.id: sum(rule.looked(one) for one in states.values()) for rule in rules if rule.looked is not None}
    return {rule: f"{where}: {plural(count, 'element')}" for rule, count in counts.items() if count}


def register(*rules: Rule) -> None:
    """Add rules to the table.

    Raises:
        ValueError: another rule has the same id.
    """
    for rule in rules:
        if RULES.setdefault(rule.id, rule) != rule:
            raise ValueError(f"rule {rule.id} is registered twice")
