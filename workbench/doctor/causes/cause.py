"""A cause of a loss jump after a resume: what happens, which measurements show it, and what to do.

::

    pattern     finds the traces of this cause in the ledger  ──► matches: names, strength, measured reasons
    explains    rules whose signs may follow from it, for those names
    expects     rules; if the cause applies and they were checked, one or more of them fire
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.doctor.facts.state import TrainingState
from workbench.formats import record

if TYPE_CHECKING:
    from workbench.doctor.causes.case import Case, Match


@dataclass(frozen=True)
class Cause:
    """A row of the catalogue.

    Attributes:
        id: a stable id, also used in JSON: ``B1``.
        title: what happened, in one short sentence.
        mechanism: how it happens. symptom: what the loss does.
        remedies: framework → what to do; ``""`` stands for all other frameworks.
        settles: the further file or fact that would settle doubts.
        source: threads, papers or code where it was seen.
        explains, expects: ids of rules, as above.
        losses: which of the first losses after the resume are wrong.
        everywhere: whether it affects every parameter.
        pattern: finds it in the ledger; ``None`` if only its rules name it.
        damage: returns what to expect, with the run's own numbers.
    """

    id: str
    title: str
    mechanism: str
    symptom: str
    remedies: Mapping[str, str]
    settles: str
    source: str
    explains: frozenset[str] = frozenset()
    expects: tuple[str, ...] = ()
    losses: str = ""
    everywhere: bool = False
    pattern: Callable[[Case], Iterator[Match]] | None = None
    damage: Callable[[TrainingState], list[str]] | None = None

    def remedy(self, format: str) -> str:
        """Return what to do, in the terms of the framework that writes ``format``."""
        return self.remedies.get(record(format).framework or format, self.remedies[""])

    def expected(self, facts: TrainingState, losses: str = "") -> tuple[str, ...]:
        """Return what to expect of the run, one sentence each; ``facts`` provide its betas and lr, if Adam's."""
        words = list(self.damage(facts)) if self.damage is not None else []
        return (*words, *filter(None, [losses or self.losses]))


def made(
    id: str,
    title: str,
    mechanism: str,
    symptom: str,
    remedy: str,
    settles: str = "",
    source: str = "",
    *,
    explains: str = "",
    expects: str = "",
    losses: str = "",
    everywhere: bool = False,
    pattern: Callable[[Case], Iterator[Match]] | None = None,
    damage: Callable[[TrainingState], list[str]] | None = None,
    **others: str,
) -> Cause:
    """Return a cause; keywords are remedies for single frameworks: ``megatron="drop --no-load-optim"``."""
    return Cause(
        id,
        title,
        mechanism,
        symptom,
        {"": remedy, **others},
        settles,
        source,
        frozenset(explains.split()),
        tuple(expects.split()),
        losses,
        everywhere,
        pattern,
        damage,
    )
