"""Stand-ins that are told by their class's name alone, for metadata that is a pickle of a few known classes.

::

    GLOBAL torch.distributed.checkpoint.metadata MetadataIndex ┐
    GLOBAL my.fork.of.it                         MetadataIndex ┴→ one fresh subclass of Held, [{"fqn": …, "offset": …}]

Frameworks bring copies of each other's classes, and move their own from module to module; what they hold stays the
same. Classes of any other name become opaque leaves, as everywhere (core/inert.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from workbench.core.inert import short
from workbench.errors import CorruptError

__all__ = ["FAULTS", "ByClass", "Held", "state_of"]

FAULTS = (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError)  # what another layout provokes


class Held(list[Any]):
    """Stand-in that keeps the state BUILD hands it as its only element: no Python call per object.

    A million chunks make three million of these, so ``__setstate__`` is ``list.append`` itself.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class ByClass(Mapping[tuple[str, str], object]):
    """(module, name) → stand-in class, for classes of these names in any module.

    The classes are made anew for each load, so that a hostile BUILD on one cannot outlive its pickle.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._made = {name: type(name, (Held,), {"__slots__": ()}) for name in names}

    def __getitem__(self, key: tuple[str, str]) -> object:
        return self._made[key[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (("*", name) for name in self._made)

    def __len__(self) -> int:
        return len(self._made)


def state_of(value: object, names: Iterable[str], what: str, foreign: set[str]) -> Any:
    """The state of a decoded root object.

    Args:
        names: classes that it may be of.
        foreign: globals that the pickle names and that were not run, for the message.

    Raises:
        CorruptError: it is something else.
    """
    if not isinstance(value, Held) or type(value).__name__ not in names:
        seen = f"; it names the foreign globals {sorted(foreign)[:3]}, which were not run" if foreign else ""
        raise CorruptError(f"{what} holds {short(value)} instead of checkpoint metadata{seen}")
    return value[0] if value else {}
