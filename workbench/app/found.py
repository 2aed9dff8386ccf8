"""The checkpoints under ROOT, for the picker; the only place where the dashboard searches for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from workbench.app.jail import Jail
from workbench.app.words import safe, size
from workbench.runs import Found, discover
from workbench.views import units

if TYPE_CHECKING:
    import pandas as pd


class FoundCheckpoints(NamedTuple):
    """The checkpoints under ROOT, and a row of texts for each: ``path``, ``about``, ``state``."""

    found: list[Found]
    frame: pd.DataFrame

    @property
    def paths(self) -> list[str]:
        """Paths relative to ROOT."""
        return [one.path for one in self.found]


def checkpoints(jail: Jail) -> FoundCheckpoints:
    """Search ROOT.

    Raises:
        OpenError: ROOT cannot be listed.
    """
    import pandas as pd

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
    frame = pd.DataFrame({"path": [safe(item.path) for item in found], "about": about, "state": state}, dtype="str")
    _last[str(jail.root)] = told = FoundCheckpoints(found, frame)
    return told


def found_before(jail: Jail) -> FoundCheckpoints | None:
    """Return the result of the last search of this ROOT, by any session; a page shows it until its own search ends."""
    return _last.get(str(jail.root))


_last: dict[str, FoundCheckpoints] = {}
