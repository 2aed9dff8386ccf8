"""Every object of a checkpoint as leaves: a path of words, a plain value, the rank that wrote it.

::

    scheduler.last_epoch                           240      dcp: a name with dots
    {"scheduler": {"last_epoch": 240}}                      torch.save: nested       ──▶  (scheduler, last_epoch) 240
    mp_rank_01/opt_param_scheduler {"num_steps": 1920}                               ──▶  rank "mp_rank_01"
    Namespace(lr=4e-3)   TrainingArguments(…)                stand-ins: their fields

Containers are looked into up to bounds; generators' states, logs and what is large are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.pickles.standins import Opaque, Record
from workbench.errors import WorkbenchError

__all__ = ["Leaf", "leaves", "plain"]

NODES = 1_000_000  #: values that are looked at, over all objects
DEPTH = 10
BITS = 1000  #: of an integer; a float holds 1023
ENTRIES = 4096  #: of a container that is looked into
#: Switches of torch's optimizers that say how, not what, they compute; DCP stores each as an object a parameter.
_SWITCHES = re.compile(r"param_groups\..*\.(?:foreach|capturable|differentiable|fused)$")
_SCALARS = (bool, int, float, str, type(None))
_SKIPPED = re.compile(
    r"(?:^|[._])(?:rng|random|generator|log_history|losses|token_buffer|save_log)(?:$|[._])|rng_state"
)


@dataclass(frozen=True)
class Leaf:
    """One value.

    Attributes:
        path: words from the outermost; positions in lists are numbers as words.
        rank: part of the object's name before a slash: whose file it is; empty for the first or only one.
        source: the path in words, for people.
    """

    path: tuple[str, ...]
    value: Any
    rank: str = ""

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def source(self) -> str:
        head = f"{self.rank}/" if self.rank else ""
        return head + ".".join(self.path)


def leaves(objects: Mapping[str, Any]) -> tuple[list[Leaf], dict[str, str]]:
    """The leaves of all objects in their order, and which objects cannot be read, with the reason."""
    found: list[Leaf] = []
    unreadable: dict[str, str] = {}
    walk = _Walk()
    for name in objects:
        rank, _, rest = name.rpartition("/")
        if _SKIPPED.search(rest) or _SWITCHES.search(rest):
            continue
        try:
            found += walk.visit(tuple(rest.split(".")), rank, objects[name], DEPTH)
        except (WorkbenchError, RecursionError) as error:
            unreadable[name] = str(error)
        if walk.left <= 0:
            unreadable[name] = f"more than {NODES:,} values: this object and what comes after it were not looked at"
            break
    return found, unreadable


def plain(value: Any) -> Any:
    """A number out of a tensor or array of one element, the word of an enumeration, the fields of a stand-in."""
    if isinstance(value, Record):
        return value.fields
    if isinstance(value, Opaque):
        if isinstance(value.state, Mapping):
            return value.state
        return value.args[0] if len(value.args) == 1 and isinstance(value.args[0], _SCALARS) else value
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item") and all(n == 1 for n in shape):
        return value.item()
    return value


def _told(value: Any) -> Any:
    """``None`` for an integer that no float holds: nothing trains with one, and Python will not even print it."""
    return None if isinstance(value, int) and value.bit_length() > BITS else value


class _Walk:
    def __init__(self) -> None:
        self.left = NODES

    def visit(self, path: tuple[str, ...], rank: str, value: Any, depth: int) -> Iterator[Leaf]:
        self.left -= 1
        value = plain(value)
        if self.left <= 0 or depth <= 0:
            return
        if isinstance(value, _SCALARS):
            yield Leaf(path, _told(value), rank)
        elif isinstance(value, Mapping):
            if len(value) <= ENTRIES:
                for key, child in value.items():
                    word = str(_told(key)) if isinstance(key, (str, int)) else "?"
                    if not _SKIPPED.search(word):
                        yield from self.visit((*path, word), rank, child, depth - 1)
        elif isinstance(value, (list, tuple)):
            if all(isinstance(plain(item), _SCALARS) for item in value):
                yield Leaf(path, tuple(_told(plain(item)) for item in value), rank)
            elif len(value) <= ENTRIES:
                for number, child in enumerate(value):
                    yield from self.visit((*path, str(number)), rank, child, depth - 1)
