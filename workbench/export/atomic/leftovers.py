"""Leftovers of failed exports next to a target: resumed, restored, or removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

from workbench.errors import WriteError
from workbench.export.atomic import journal, owners
from workbench.export.atomic.writing import writing

TEMP = ".tmp-"  #: folders in which a target is written
ASIDE = ".old-"  #: the previous state of a target, if names cannot be exchanged
GONE = ".gone-"  #: being removed: must not be resumed or restored once it is incomplete


def beside(target: str, kind: str, token: str) -> str:
    """Return the path of one of a target's temps."""
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{owners.short(name)}{kind}{token}")


def clean(target: str) -> list[str]:
    """Remove the leftovers of dead runs into the same target, and restore what they had moved aside.

    Returns:
        the names that were removed.
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
            who = owners.describe(token, owners.silence(path))
            raise WriteError(
                f"{target!r} is being written by {who}; wait until it has finished, or stop "
                f"it (a writer on another machine counts as stopped after {owners.QUIET // 60} silent minutes), or "
                f"remove {path!r}"
            )
    return any(journal.plan_in(path) == plan and owners.claim(path, mine) for _, path, _ in _found(target, TEMP))


def others(target: str, plan: str) -> int:
    """Return how many dead runs of other plans left resumable data, which :func:`clean` removes."""
    return sum(
        journal.plan_in(path) not in (None, plan)
        for _, path, token in _found(target, TEMP)
        if owners.is_dead(path, token)
    )


def remove(path: str) -> None:
    """Remove whatever has this name; anything that cannot be removed now is removed by the next run."""
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
    except OSError:  # its content is unknown, so nothing is changed
        return
    for entry in names:
        token = entry.removeprefix(start)
        if token != entry and owners.is_token(token):
            yield entry, os.path.join(parent, entry), token
