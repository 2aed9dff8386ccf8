"""A button that starts long work, with progress, cancel and error message; a tab shows the result below.

::

    [ Verify ]                                    idle
    reading, 34%, 2 min left  ▓▓▓▓░░░░░ [Cancel]  running
    Cancelled. [ Verify ]                         cancelled
    │ this file is shorter than …                 failed       [ Verify ]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jobs import Job, Progress, Schedule


class JobButton(pn.viewable.Viewer):
    """A job with its controls.

    Args:
        label: of the button; ``verb`` is the word before the progress: ``reading, 34%``.
        work: runs in a thread with ``progress``; ``None`` to refuse, which ``ready`` explains.
        done: called on the page's thread with the result.
        ready: returns why the work cannot start, or ``""``.
        long: the work may read every byte and waits only for other long jobs.
    """

    def __init__(
        self,
        label: str,
        work: Callable[[Progress], Any],
        done: Callable[[Any], None],
        *,
        verb: str = "reading",
        ready: Callable[[], str] | None = None,
        schedule: Schedule | None = None,
        long: bool = False,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.job = Job(schedule, long=long)
        self._work, self._done, self._verb, self._ready = work, done, verb, ready or (lambda: "")
        self.button = pmui.Button(label=label, color="primary", on_click=lambda _: self.start())
        self._body = pn.Column(self.button, sizing_mode="stretch_width")
        self.job.param.watch(self._progressed, ["progress", "status"])

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    # Most buttons of a page are never pressed: the rest is made when it is needed.

    @cached_property
    def _bar(self) -> pn.pane.HTML:
        return style.pane("")

    @cached_property
    def _message(self) -> pn.pane.HTML:
        return style.pane("")

    @cached_property
    def _running(self) -> pn.Row:
        cancel = style.button("Cancel", lambda _: self.cancel(), size="medium")
        return pn.Row(self._bar, cancel, sizing_mode="stretch_width", align="center")

    def start(self) -> None:
        """Start, unless ``ready`` gives a reason not to; running work is superseded."""
        if why := self._ready():
            self.say(why, "warning")
        else:
            self.job.start(self._work)

    def cancel(self) -> None:
        """Stop the work at its next step and drop its result."""
        self.job.cancel()

    def reset(self) -> None:
        """Return to the bare button."""
        self.job.reset()

    def say(self, text: str, kind: str = "info") -> None:
        """Show a sentence below the button."""
        self._message.object = style.message(text, kind)
        self._body[:] = [self.button, self._message]

    def _progressed(self, *events: Any) -> None:
        job = self.job
        if job.status == "running":
            self._bar.object = style.progress(self._verb, job.progress, job.left)
            if self._running not in list(self._body):
                self._body[:] = [self._running]
        elif job.status == "failed":
            self.say(job.error, "error")
        elif job.status == "cancelled":
            self.say("Cancelled; the partial result was discarded.")
        else:
            self._body[:] = [self.button]
            if job.status == "done" and any(event.name == "status" for event in events):
                self._done(job.result)
