"""What runs into the same target that ended badly left beside it: gone on with, put back, or removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

from workbench.errors import WriteError
from workbench.reshard.atomic import owners
from workbench.reshard.atomic.writing import writing
from workbench.reshard.moving import journal

__all__ = ["ASIDE", "TEMP", "adopt", "beside", "clean", "others", "remove"]

TEMP = ".tmp-"  #: folders in which a target is made
ASIDE = ".old-"  #: what a target had been, where names cannot be exchanged
GONE = ".gone-"  #: being removed: nobody goes on with it, or puts it back, while it is half gone


def beside(target: str, kind: str, token: str) -> str:
    """The path of one of a target's temps."""
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{owners.short(name)}{kind}{token}")


def clean(target: str) -> list[str]:
    """Remove what dead runs into the same target left behind, and put back what they had moved aside.

    Returns:
        the names that are gone.
    """
    gone = []
    for kind in (ASIDE, TEMP, GONE):
        for entry, path, token in _found(target, kind):
            if not owners.is_dead(path, token):
                continue
            if kind == ASIDE and not os.path.lexists(target):
                with writing(entry):
                    os.rename(path, target)
            else:
                mine = beside(target, GONE, owners.token())
                if not owners.claim(path, mine):
                    continue
                remove(mine)
            gone.append(entry)
    return gone


def adopt(target: str, plan: str, mine: str) -> bool:
    """Take over the temp of a dead run of the same plan, under the name ``mine``.

    Raises:
        WriteError: a run into the same target is under way, or may be.
    """
    for _, path, token in _found(target, TEMP):
        if not owners.is_dead(path, token, owners.QUIET):
            raise WriteError(
                f"{target!r} is being written by {owners.describe(path, token)}; wait until that is done, or end it "
                f"(one that cannot be seen counts as ended after {owners.QUIET // 60} minutes), or remove {path!r}"
            )
    return any(journal.plan_in(path) == plan and owners.claim(path, mine) for _, path, _ in _found(target, TEMP))


def others(target: str, plan: str) -> int:
    """How many dead runs of other plans left something to go on with, which :func:`clean` removes."""
    return sum(
        journal.plan_in(path) not in (None, plan)
        for _, path, token in _found(target, TEMP)
        if owners.is_dead(path, token)
    )


def remove(path: str) -> None:
    """Whatever has the name; what cannot be removed now is removed by the next run."""
    with suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _found(target: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """Name, path and token of each temp of a target."""
    parent, name = os.path.split(target)
    start = f".{owners.short(name)}{kind}"
    try:
        names = sorted(os.listdir(parent))
    except OSError:  # what lies there cannot be known, so nothing is touched
        return
    for entry in names:
        token = entry.removeprefix(start)
        if token != entry and owners.is_token(token):
            yield entry, os.path.join(parent, entry), token
