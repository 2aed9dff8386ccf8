"""The training step that a checkpoint is of, as its state or its folder's name tells it.

::

    train_state.step   global_step   iteration …     the trainer's own, believed first
    step-2000   checkpoint-6   iter_0000100.pt       the name, where no state tells
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import WorkbenchError

__all__ = ["find_step", "is_step"]

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
)
_STEP_NAME = re.compile(r"(?:.*[-_./])?(?:step|checkpoint|ckpt|iter|global_step)[-_]?(\d+)(?:\.\w+)?", re.IGNORECASE)


def find_step(objects: Mapping[str, Any], name: str) -> int | None:
    """The step that the objects tell or, failing that, a checkpoint's name.

    ``None`` where neither does, and where the object that should cannot be read: its step may be another than the
    name's. What is wrong with it is told when it is looked at itself, and by ``verify``.
    """
    for key in STEP_KEYS:
        if key in objects:
            try:
                value = objects[key]
            except (WorkbenchError, RecursionError):
                return None
            if isinstance(value, Mapping):
                value = next((value[k] for k in ("global_step", "step", "iteration") if k in value), None)
            if hasattr(value, "numel") and value.numel() == 1:
                value = value.item()
            if is_step(value):
                return int(value)
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found and is_step(int(found[1])) else None


def is_step(value: Any) -> bool:
    """Whether a stored value can be a step: an integer of at most 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LIMIT
