"""What a fault is: how it changes what a resume brings back, its cause, and which evidence shows it.

::

    before  ──load──▶  restored  ──save at once──▶  echo  ──k steps──▶  after
               └ restore        └ second, damage

* ``restore``: the files are right, the loader brings back something else (or the trainer goes on differently).
* ``second``: rank 1 wrote something else than rank 0; a layout that one process writes gets what a loader merges.
* ``damage``: bytes change after the save. ``echo`` is then the damaged copy of ``before``, and what is loaded is it.

Ids and outcomes are those of the fault lab that the doctor's rules were found in; ``seen`` says where a rule fired
there, as an error or a warning, and for the later faults where one could.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.config import Config
from tests.lab.run import Run
from tests.lab.state import State

__all__ = ["EVIDENCE", "Fault", "Lab", "masters", "seen", "unchanged"]

#: Kinds of evidence.
EVIDENCE = {
    "alone": "the echo (or the damaged files) by itself",
    "echo": "before beside the echo",
    "next": "before beside one update later",
    "early": "before beside 20 updates later",
    "late": "the checkpoint 20 updates later by itself",
    "manifest": "content hashes of before beside the echo's bytes",
}


@dataclass(frozen=True)
class Lab:
    """What a fault may draw on: the run's other states, and chance that the case's seed decides."""

    run: Run
    rng: random.Random


def unchanged(config: Config) -> Config:
    return config


def never(config: Config, format: str) -> bool:
    return False


def masters(config: Config) -> Config:
    """The run with bf16 weights beside fp32 masters."""
    return config.but(precision="mixed")


def seen(words: str) -> frozenset[str]:
    found = frozenset(words.split())
    assert found <= set(EVIDENCE), words
    return found


@dataclass(frozen=True)
class Fault:
    """One way in which a resume goes wrong; a healthy control has the cause ``healthy``.

    Attributes:
        cause: the catalogue's cause (A1 … H4); also: other causes that would be as right an answer.
        seen: kinds of evidence that can show it.
        needs: what a run must have for it to be possible.
        formats: the layouts in which it can happen; ``None``: any.
        weights: ``second`` differs in the weights alone.
        blind: where it does not show in the echo by itself, though ``seen`` says so of the first lab's layout.
        micro: parts of a batch in the resumed run; elsewhere: it goes on in another layout.
        saver: what the save after the updates writes, given the state that was resumed and the one to be saved.
        live: makes the files by code of its own (`live`), instead of the above.
        why: why the answers are what they are, in a line.
        visible: whether any file shows it.
        kind: ``fault``, ``healthy``, or ``deliberate``: a change on purpose that the files show.
    """

    id: str
    cause: str
    text: str
    seen: frozenset[str]
    restore: Callable[[State, Lab], State] | None = None
    second: Callable[[State, Lab], State] | None = None
    damage: Callable[[Path, State, Lab], State | None] | None = None
    also: tuple[str, ...] = ()
    needs: Callable[[Config], Config] = unchanged
    formats: tuple[str, ...] | None = None
    weights: bool = False
    blind: Callable[[Config, str], bool] = never
    micro: int = 1
    elsewhere: bool = False
    saver: Callable[[State, State], State] | None = None
    live: Callable[[Path, random.Random, int], None] | None = None
    why: str = ""
    visible: bool = True
    kind: str = "fault"

    def expected(self, config: Config, format: str) -> frozenset[str]:
        """Kinds of evidence that can show it in a run of that kind."""
        return self.seen - {"alone"} if self.blind(config, format) else self.seen

    @property
    def answers(self) -> frozenset[str]:
        return frozenset({self.cause, *self.also})

    @property
    def healthy(self) -> bool:
        return self.cause == "healthy"
