"""What can make a loss jump after a resume: a `Cause` says what happens, which measurements it leaves, what to do.

::

    pattern     finds in the ledger what this cause leaves  ──► matches: names, strength, measured reasons
    explains    rules whose signs may follow from it, on those names
    expects     rules; if the cause applies and they were checked, at least one of them fires
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.doctor.facts.state import TrainingState

if TYPE_CHECKING:
    from workbench.doctor.causes.case import Case, Match

__all__ = ["FRAMEWORKS", "Cause", "made"]

#: Format of a checkpoint → framework whose words a remedy uses.
FRAMEWORKS = {
    "dcp": "dcp", "torch_save": "torch", "megatron_dist": "megatron", "megatron_legacy": "megatron",
    "deepspeed": "deepspeed", "deepspeed_universal": "deepspeed", "hf_trainer": "hf", "accelerate": "accelerate",
    "lightning": "lightning", "paddlenlp": "paddle", "paddle_dist": "paddle", "paddle_save": "paddle",
    "bytecheckpoint": "bytecheckpoint", "vescale": "vescale",
}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """A row of the catalogue.

    Attributes:
        id: stable, as in JSON: ``B1``.
        title: what happened, in one short sentence.
        mechanism: how it comes about. symptom: what the loss does.
        remedies: framework → what to do; ``""`` for any other.
        settles: which further file or fact settles doubts.
        source: threads, papers or code that it was seen in.
        explains, expects: ids of rules, as above.
        losses: which of the first losses after the resume are wrong.
        everywhere: whether it affects every parameter.
        pattern: finds it in the ledger; ``None`` if only its rules name it.
        damage: states what to expect, with the run's own numbers.
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
        """What to do, in the words of the framework that writes that format."""
        return self.remedies.get(FRAMEWORKS.get(format, ""), self.remedies[""])

    def expected(self, facts: TrainingState) -> tuple[str, ...]:
        """What to expect of the run, a sentence each.

        Args:
            facts: of the run: its betas and lr put numbers in.
        """
        said = list(self.damage(facts)) if self.damage is not None else []
        return (*said, self.losses) if self.losses else tuple(said)


def made(
    id: str, title: str, mechanism: str, symptom: str, remedy: str, settles: str = "", source: str = "", *,
    explains: str = "", expects: str = "", losses: str = "", everywhere: bool = False,
    pattern: Callable[[Case], Iterator[Match]] | None = None,
    damage: Callable[[TrainingState], list[str]] | None = None, **others: str,
) -> Cause:  # fmt: skip
    """A cause whose remedies in particular frameworks are keywords: ``megatron="drop --no-load-optim"``."""
    return Cause(
        id, title, mechanism, symptom, {"": remedy, **others}, settles, source, frozenset(explains.split()),
        tuple(expects.split()), losses, everywhere, pattern, damage,
    )  # fmt: skip
