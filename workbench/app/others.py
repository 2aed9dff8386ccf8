"""The other checkpoints of ROOT, to choose one from: listed once, in a job; steps of the same run come first.

::

    page shows   run/step-200         none
                                      run/step-100   dcp · step 100 · …     ┐ of the same run
                                      run/step-300   dcp · step 300 · …     ┘
                                      base           hf · 1.2 GiB · …
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from workbench.app.found import checkpoints
from workbench.app.jail import Jail
from workbench.app.jobs import Job, Schedule
from workbench.app.words import safe

__all__ = ["Others"]


class Others:
    """What a tab offers beside the checkpoint that the page shows.

    Attributes:
        job: lists ROOT; what it found stays when it is reset.

    Args:
        schedule: runs a callback on the page's thread.
        listed: told on that thread when ROOT is listed: why it failed, or nothing.
    """

    def __init__(self, schedule: Schedule | None, listed: Callable[[str], None]) -> None:
        self.job = Job(schedule)
        self._told = listed
        self._about: dict[str, str] = {}  # of each path, in the order of the list
        self.job.param.watch(self._listed, "status")

    def start(self, jail: Jail) -> None:
        """List ROOT, unless that was begun."""
        if self.job.status == "idle":
            self.job.start(lambda tick: checkpoints(jail))

    def options(self, first: str, chosen: str, none_label: str) -> dict[str, str]:
        """Label → path, as a widget takes it.

        Args:
            first: the path that the page shows; it is not offered.
            chosen: what a link names is offered, too, on top where the list lacks it; ``""`` for nothing.
            none_label: of the choice of nothing, ``""``.
        """
        run = os.path.dirname(first)
        paths = sorted((path for path in self._about if path != first), key=lambda p: os.path.dirname(p) != run)
        if chosen and chosen not in paths:
            paths.insert(0, chosen)
        labels = {path: f"{safe(path)}  ·  {about}" for path in paths if (about := self._about.get(path))}
        return {none_label: "", **{labels.get(path, safe(path)): path for path in paths}}

    def _listed(self, *_: Any) -> None:
        if self.job.status == "done":
            paths, frame = self.job.result
            words = zip(paths, frame["about"], frame["state"], strict=True)
            self._about = {path: f"{about}{', incomplete' if lacks else ''}" for path, about, lacks in words}
        if self.job.status in ("done", "failed"):
            self._told(self.job.error)
