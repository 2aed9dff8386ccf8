"""What can make a loss jump after a resume, one by one: a `Cause` says what happens, what is seen of it, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        id: as in the catalogue: ``B1``.
        title: what happened, in one short sentence.
        mechanism: how it comes about. symptom: what the loss does.
        remedies: framework → what to do; ``""`` for any other.
        settles: which further file or fact settles doubts.
        source: threads, papers or code that it was seen in.
    """

    id: str
    title: str
    mechanism: str
    symptom: str
    remedies: Mapping[str, str]
    settles: str
    source: str

    def remedy(self, format: str) -> str:
        """What to do, in the words of the framework that writes that format."""
        return self.remedies.get(FRAMEWORKS.get(format, ""), self.remedies[""])


def made(
    id: str, title: str, mechanism: str, symptom: str, remedy: str, settles: str = "", source: str = "", **others: str
) -> Cause:  # fmt: skip
    """A cause whose remedies in particular frameworks are keywords: ``megatron="drop --no-load-optim"``."""
    return Cause(id, title, mechanism, symptom, {"": remedy, **others}, settles, source)
