"""The slice browser: values of the selected tensor as a table; the slice is typed or moved by buttons."""

from __future__ import annotations

from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.analysis.numbers import Decoder
from workbench.analysis.window import Window, moved, window
from workbench.app import style
from workbench.app.jobs import Job, Progress, Schedule
from workbench.app.save import csv_button
from workbench.app.state import WorkbenchState
from workbench.app.words import html
from workbench.errors import UsageError, WorkbenchError
from workbench.views.values import elements
from workbench.views.window import window_frame, window_html

MOVES = {"↑ rows": (-1, 0), "↓ rows": (1, 0), "← columns": (0, -1), "→ columns": (0, 1)}


class Slices(pn.viewable.Viewer):
    """Follows ``state.tensor`` and ``state.place``."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self._here: Window | None = None
        self.job = Job(schedule)
        self.text = pmui.TextInput(
            label="Slice", placeholder="2:9, :, -1", size="small", width=260, margin=(10, 10, 5, 10)
        )
        self._buttons = [style.button(label, self._mover(*by), margin=(12, 4)) for label, by in MOVES.items()]
        self.output = style.pane("")
        self._save = pn.Row(margin=0)
        self._body = pn.Column(sizing_mode="stretch_width")
        self._filling = False
        self.text.param.watch(self._typed, "value")
        self.job.param.watch(self._read, "status")
        state.param.watch(self._turn, ["tensor", "place", "ckpt"])
        self._turn()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def _typed(self, event: Any) -> None:
        if not self._filling:
            self._state.place = event.new

    def _mover(self, down: int, right: int) -> Any:
        def move(_: Any) -> None:
            tensor = self._state.chosen()
            if tensor is not None and self._here is not None:
                self._state.place = moved(tensor, self._here, down, right)

        return move

    def _turn(self, *_: Any) -> None:
        tensor, self._here = self._state.chosen(), None
        self.job.reset()
        self._save[:], self.text.error_state = [], False
        if tensor is None or not tensor.numel() or Decoder(tensor.element).kind == "raw bytes":
            self._body[:] = []
            return
        try:
            self._here = here = window(tensor, self._state.place)
        except WorkbenchError as error:
            self._fail(error)
            self._write(self._state.place)
        else:
            self._write(self._state.place or here.text)
            self.job.start(lambda progress: _values(here, progress))
        if not len(self._body):
            controls = pn.FlexBox(self.text, *self._buttons, self._save, align_items="center")
            self._body[:] = [style.pane("<h3>Values</h3>"), controls, self.output]

    def _write(self, text: str) -> None:
        self._filling = True
        try:
            self.text.value = text
        finally:
            self._filling = False

    def _fail(self, error: WorkbenchError) -> None:
        self.text.error_state = isinstance(error, UsageError)
        self.output.object = style.message(str(error), "error")

    def _read(self, *_: Any) -> None:
        if self.job.status == "failed":
            # reading the whole tensor failed as well, which is reported above
            self.output.object = f'<p class="muted">These values cannot be read: {html(self.job.error)}</p>'
        elif self.job.status == "done":
            here, values = self.job.result
            self.output.object = window_html(here, values)
            self._save[:] = [csv_button(f"{self._state.tensor}-slice", lambda: window_frame(here, values), "slice CSV")]


def _values(here: Window, progress: Progress) -> tuple[Window, Any]:
    progress(0.0)
    return here, elements(here.shown.numpy(), here.shown.element)
