"""The checkpoints under ROOT, for the picker; the only place where the dashboard searches for them."""

from __future__ import annotations

import time
from typing import NamedTuple

from workbench.app.jail import Jail
from workbench.app.words import safe, size
from workbench.runs import Found, discover
from workbench.views import units


class FoundCheckpoints(NamedTuple):
    """The checkpoints under ROOT, and their texts: names, descriptions, and what is missing."""

    found: list[Found]
    texts: tuple[list[str], list[str], list[str]]

    @property
    def paths(self) -> list[str]:
        """Paths relative to ROOT."""
        return [one.path for one in self.found]


def checkpoints(jail: Jail) -> FoundCheckpoints:
    """Search ROOT.

    Raises:
        OpenError: ROOT cannot be listed.
    """
    found = discover(jail.root)
    now = time.time()
    about = [
        " · ".join(
            [
                item.format,
                *([] if item.step is None else [f"step {item.step:,}"]),
                size(item.nbytes),
                f"{units.age(now - item.mtime)} ago" if item.mtime else "age unknown",
            ]
        )
        for item in found
    ]
    state = ["" if item.complete else safe(item.why or "incomplete") for item in found]
    _last[str(jail.root)] = listed = FoundCheckpoints(found, ([safe(item.path) for item in found], about, state))
    return listed


def found_before(jail: Jail) -> FoundCheckpoints | None:
    """Return the result of the last search of this ROOT, by any session; a page shows it until its own search ends."""
    return _last.get(str(jail.root))


_last: dict[str, FoundCheckpoints] = {}
