"""A read-only mapping whose values are made when somebody looks at them, and kept.

Non-tensor state (configs, schedulers, generator states) can be large and is seldom wanted; its names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["LazyMap"]


class LazyMap(Mapping[str, Any]):
    """Values by name, each made by its own function on first access.

    >>> LazyMap({"config": lambda: {"hidden": 64}})["config"]
    {'hidden': 64}
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = dict(makers)
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __repr__(self) -> str:
        names = ", ".join(repr(name) for name in list(self._makers)[:8])
        return f"<{len(self)} objects: {names}{', …' if len(self) > 8 else ''}>"
