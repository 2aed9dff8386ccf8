"""The other checkpoints under ROOT, as choices: listed once, in a job; steps of the same run come first.

::

    page shows   run/step-200         none
                                      run/step-100   dcp · step 100 · …     ┐ same run
                                      run/step-300   dcp · step 300 · …     ┘
                                      base           hf · 1.2 GiB · …
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from workbench.app import style
from workbench.app.found import checkpoints
from workbench.app.jail import Jail
from workbench.app.jobs import Job, Schedule
from workbench.app.words import safe


class Others:
    """The checkpoints that a tab offers in addition to the one on the page.

    Attributes:
        job: lists ROOT; the list stays when the job is reset.

    Args:
        schedule: runs a callback on the page's thread.
        words: the pane that shows why ROOT could not be listed.
        offer: called on that thread once ROOT is listed.
    """

    def __init__(self, schedule: Schedule | None, words: Any, offer: Callable[[], None]) -> None:
        self.job = Job(schedule)
        self._words, self._offer = words, offer
        self._about: dict[str, str] = {}  # path → description, in the order of the list
        self.job.param.watch(self._listed, "status")

    def start(self, jail: Jail) -> None:
        """List ROOT, unless that has already begun."""
        if self.job.status == "idle":
            self.job.start(lambda progress: checkpoints(jail))

    def options(self, first: str, chosen: str, none_label: str) -> dict[str, str]:
        """Return label → path, in the form that a widget expects.

        Args:
            first: the path that the page shows; it is not offered.
            chosen: the path named by a link; if the list lacks it, it is offered on top; ``""`` for none.
            none_label: label of the empty choice, ``""``.
        """
        run = os.path.dirname(first)
        paths = sorted((path for path in self._about if path != first), key=lambda p: os.path.dirname(p) != run)
        if chosen and chosen not in paths:
            paths.insert(0, chosen)
        labels = {path: f"{safe(path)}  ·  {about}" for path in paths if (about := self._about.get(path))}
        return {none_label: "", **{labels.get(path, safe(path)): path for path in paths}}

    def _listed(self, *_: Any) -> None:
        if self.job.status == "done":
            _, about, missing = self.job.result.texts
            words = zip(self.job.result.paths, about, missing, strict=True)
            self._about = {path: f"{text}{', incomplete' if lacks else ''}" for path, text, lacks in words}
        if self.job.status == "failed":
            self._words.object = style.message(self.job.error, "error")
        elif self.job.status == "done":
            self._offer()
