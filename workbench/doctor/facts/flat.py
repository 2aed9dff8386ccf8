"""Flatten the objects of a checkpoint into leaves: a path of words, a plain value, the rank that wrote it.

::

    scheduler.last_epoch                           240      dcp: a name with dots
    {"scheduler": {"last_epoch": 240}}                      torch.save: nested       ──▶  (scheduler, last_epoch) 240
    mp_rank_01/opt_param_scheduler {"num_steps": 1920}                               ──▶  rank "mp_rank_01"
    Namespace(lr=4e-3)   TrainingArguments(…)                stand-ins: their fields

Containers are visited up to fixed limits; states of generators, logs and large values are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.pickles.standins import Opaque, Record
from workbench.errors import WorkbenchError

NODES = 1_000_000  #: most values that are visited, over all objects
DEPTH = 10
BITS = 1000  #: most bits of an integer; a float holds 1023
ENTRIES = 4096  #: most entries of a container that is visited
#: Fields of param groups that choose torch's kernels and do not change the result.
SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})
_SWITCHES = re.compile(rf"param_groups\..*\.(?:{'|'.join(sorted(SWITCHES))})$")  # in DCP, an object for each parameter
_SCALARS = (bool, int, float, str, type(None))
_SKIPPED = re.compile(
    r"(?:^|[._])(?:rng|random|generator|log_history|losses|token_buffer|save_log)(?:$|[._])|rng_state"
)


@dataclass(frozen=True)
class ObjectLeaf:
    """One value.

    Attributes:
        path: words from the outermost; positions in lists are numbers as words.
        rank: part of the object's name before a slash, which names the file; empty for the first or only one.
        source: the path in words, for messages.
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


def leaves(objects: Mapping[str, Any]) -> tuple[list[ObjectLeaf], dict[str, str]]:
    """Return the leaves of all objects in their order, and the unreadable objects with the reason."""
    found: list[ObjectLeaf] = []
    unreadable: dict[str, str] = {}
    walk = _ObjectWalk()
    for name in objects:
        rank, _, rest = name.rpartition("/")
        if _SKIPPED.search(rest) or _SWITCHES.search(rest):
            continue
        try:
            found += walk.visit(tuple(rest.split(".")), rank, objects[name], DEPTH)
        except (WorkbenchError, RecursionError) as error:
            unreadable[name] = str(error)
        if walk.left <= 0:
            unreadable[name] = f"more than {NODES:,} values: this object and all later ones were not examined"
            break
    return found, unreadable


def plain(value: Any) -> Any:
    """Return the number of a one-element tensor or array, the word of an enumeration, or a stand-in's fields."""
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


def _bounded(value: Any) -> Any:
    """Return ``None`` for an integer that no float holds, which Python may refuse to print; otherwise the value."""
    return None if isinstance(value, int) and value.bit_length() > BITS else value


class _ObjectWalk:
    def __init__(self) -> None:
        self.left = NODES

    def visit(self, path: tuple[str, ...], rank: str, value: Any, depth: int) -> Iterator[ObjectLeaf]:
        self.left -= 1
        value = plain(value)
        if self.left <= 0 or depth <= 0:
            return
        if isinstance(value, _SCALARS):
            yield ObjectLeaf(path, _bounded(value), rank)
        elif isinstance(value, Mapping):
            if len(value) <= ENTRIES:
                for key, child in value.items():
                    word = str(_bounded(key)) if isinstance(key, (str, int)) else "?"
                    if not _SKIPPED.search(word):
                        yield from self.visit((*path, word), rank, child, depth - 1)
        elif isinstance(value, (list, tuple)):
            if all(isinstance(plain(item), _SCALARS) for item in value):
                yield ObjectLeaf(path, tuple(_bounded(plain(item)) for item in value), rank)
            elif len(value) <= ENTRIES:
                for number, child in enumerate(value):
                    yield from self.visit((*path, str(number)), rank, child, depth - 1)
