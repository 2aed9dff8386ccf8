"""The checkpoints under ROOT, for the picker; the only place where the dashboard searches for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workbench.app.jail import Jail
from workbench.app.words import safe, size
from workbench.runs import discover
from workbench.views import units

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["checkpoints"]


def checkpoints(jail: Jail) -> tuple[list[str], pd.DataFrame]:
    """Return paths relative to ROOT, and a row of texts for each: ``path``, ``about``, ``state``.

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
    return [item.path for item in found], frame
