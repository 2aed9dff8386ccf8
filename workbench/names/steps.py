"""The training step of a checkpoint, as its state or the name of its folder or file gives it.

::

    train_state.step   global_step   iteration …      the trainer's own state, believed first
    step-2000  iter_0000100.pt  epoch=3-step=100.ckpt  a step, in a name
    checkpoint-6  ckpt_6.pt                            a save, usually numbered by steps
    epoch_2                                            an epoch, if the name has nothing better
    0000100                                            a number alone: Nanotron, Orbax, Lingua
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError

LIMIT = 1 << 63  # a pickle can hold a number of a million digits, which Python does not even print

#: Where trainers keep the step, in order of trust: torchtitan, ours and most scripts, Lightning, Megatron, HF.
STEP_KEYS = (
    "train_state.step",
    "train_state",
    "step",
    "global_step",
    "iteration",
    "trainer_state",
    "state.step",
    "state.timestamp.Timestamp.batch",  # Composer, in DCP; in a file it is within "state"
    "state",
)
_DATE = r"(?:19|20)\d\d[-_]?(?:0[1-9]|1[0-2])[-_]?(?:0[1-9]|[12]\d|3[01])(?!\d)"
#: What a name counts and how it is written, best first; no part (``-00001-of-4``), size (``7b``) or date.
_NAMES = tuple(
    (unit, re.compile(rf"(?<![a-z])(?:{words})(\d{{1,18}})(?![0-9a-z]|-of-\d)", re.IGNORECASE))
    for unit, words in (
        ("step", r"(?:global_?steps?|steps?|iterations?|iters?)[-_=]?|ep\d+-ba"),  # Composer: epoch, batch
        ("save", rf"(?:checkpoint(?:_\d+(?=_\d+\.pt$))?|ckpt)[-_=]?(?!{_DATE})"),  # Fairseq: checkpoint_EPOCH_STEP.pt
        ("epoch", r"epoch[-_=]?"),
    )
)
_NUMBER = re.compile(rf"(?!{_DATE})\d{{1,12}}")


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A number in the name of a folder or file.

    Attributes:
        number: of the step, save or epoch.
        unit: ``step``, ``save``, ``epoch``, or ``number`` if the name is nothing else.
    """

    number: int
    unit: str


def parse_name(name: str) -> NamedStep | None:
    """Return what the name of a folder or file counts, or ``None``.

    >>> parse_name("epoch=3-step=100.ckpt")
    NamedStep(number=100, unit='step')
    """
    for unit, pattern in _NAMES:
        if hits := pattern.findall(name):
            return NamedStep(int(hits[-1]), unit)
    return NamedStep(int(name), "number") if _NUMBER.fullmatch(name) else None


def step_of(path: str) -> int | None:
    """Return the step that a path's last component is named after, or else the nearest folder around it.

    A number alone counts only as the last component: ``2024/model.pt`` is not step 2024.
    """
    last, *folders = reversed(path.split("/"))
    if named := parse_name(last):
        return named.number
    outer = (parse_name(folder) for folder in folders)
    return next((named.number for named in outer if named and named.unit != "number"), None)


def find_step(objects: Mapping[str, Any], name: str) -> int | None:
    """Return the step that the objects store or, failing that, a checkpoint's name.

    Return ``None`` if neither does, or if the object that should store it cannot be read: its step may differ
    from the name's. Reading that object itself, and ``verify``, report what is wrong with it.
    """
    for key in STEP_KEYS:
        if key in objects:
            try:
                value = objects[key]
            except (WorkbenchError, RecursionError):
                if key == "state":  # of any optimizer
                    continue
                return None
            if key == "state":
                value = _within(value, "timestamp", "Timestamp", "batch")
            if isinstance(value, Mapping):
                value = next((value[k] for k in ("global_step", "step", "iteration") if k in value), None)
            if hasattr(value, "numel") and value.numel() == 1:
                value = value.item()
            if is_step(value):
                return int(value)
    return step_of(name)


def find_world_size(objects: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that Composer stores; ``None`` if no object states it."""
    for key, names in (("state.metadata.world_size", ()), ("state", ("metadata", "world_size"))):
        if key in objects:
            try:
                value = _within(objects[key], *names)
            except (WorkbenchError, RecursionError):
                return None
            if is_step(value) and value > 0:
                return int(value)
    return None


def _within(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def is_step(value: Any) -> bool:
    """Return whether a stored value can be a step: an integer of at most 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LIMIT
