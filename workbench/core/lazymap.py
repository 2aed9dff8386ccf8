"""A read-only mapping whose values are created on first access, and kept.

Non-tensor state (configs, schedulers, generator states) can be large and is seldom wanted; its names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import getitem
from typing import Any

from workbench.core.near import no_such
from workbench.core.words import plural
from workbench.errors import ObjectNotFoundError


class LazyMap(Mapping[str, Any]):
    """Values by name, each made by its own function on first access.

    >>> LazyMap({"config": lambda: {"hidden": 64}})["config"]
    {'hidden': 64}
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]], what: str = "object") -> None:
        self._makers, self._what = dict(makers), what
        self._made: dict[str, Any] = {}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> LazyMap:
        """Convert any mapping."""
        return stored if isinstance(stored, cls) else cls({name: partial(getitem, stored, name) for name in stored})

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in self._makers:
                raise ObjectNotFoundError(no_such(name, self._makers, self._what))
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, or ``default``; unlike ``[]``, do not look for similar names if it is missing."""
        return self[name] if name in self else default  # noqa: SIM401

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}  # values are made again: nothing says that they can be pickled

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._makers)

    def __repr__(self) -> str:
        names = ", ".join(repr(name) for name in list(self._makers)[:8])
        return f"<{plural(len(self), 'object')}: {names}{', …' if len(self) > 8 else ''}>"
