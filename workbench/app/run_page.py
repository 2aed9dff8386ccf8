"""A run: its curves with checkpoints, resumes and jumps on one axis, why the loss jumped, its layers and its steps.

::

    llama-8b-a                         The loss jumps at step 48,012 by 0.41, right after a resume.
    curves · checkpoints               a click on a jump explains it, a click on a checkpoint opens it
    Why did the loss jump?             the doctor on the checkpoints around it: cause, proof, remedy
    Layers × steps                     weight norm │ update │ second moment │ NaN; a click shows one over the steps
    Steps                              a table; a click opens one

The run is read in a job, again when it changes (:meth:`RunPage.look`); small runs are read and diagnosed at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from workbench.analysis.health import StepHealth
from workbench.analysis.run import CheckpointPair, Run, is_echo_save
from workbench.analysis.summary import Summary, histogram, summarise
from workbench.app import style
from workbench.app.home import DOTS
from workbench.app.jail import relative_html, relative_words
from workbench.app.jobs import Job, Progress, Schedule, steady
from workbench.app.linked import Linked
from workbench.app.picker import Picker
from workbench.app.run_cache import RunCache, shared_runs
from workbench.app.save import csv_button, text_button
from workbench.app.state import WorkbenchState, joined, link, separated
from workbench.app.words import html, safe, size
from workbench.app.work import JobButton
from workbench.core.words import plural, some_of
from workbench.errors import UsageError, WorkbenchError
from workbench.runs import grouped
from workbench.tensor import LazyTensor
from workbench.views import units
from workbench.views.run import page_notes, run_sentence, spike_sentence, worst_spike
from workbench.views.run_html import SMALL
from workbench.views.run_pictures import (
    LAYER_MEASURES,
    Curves,
    LayerGrid,
    MetricLine,
    curves_of,
    histograms_figure,
    layer_grid,
    layers_figure,
    run_figure,
)

if TYPE_CHECKING:
    import pandas as pd

    from workbench.doctor.reasoning.diagnosis import Diagnosis

CHECKED = 200  #: newest steps whose structure is checked without being asked to
OTHERS = 12  #: runs that are offered for comparison
SECTION = (20, 10, 0, 10)  #: margins of the heading of a section
WIDE: dict[str, Any] = {"sizing_mode": "stretch_width", "margin": (5, 10)}
BINS = 64  #: of the values of a tensor
ROW, TALL = 29, 420  #: pixels of a row of the table of steps; its maximum height, above which it scrolls
FIRST, LAST = 3.0, 60.0  #: seconds between two looks at a run: at first, and when nothing has changed for long
COLUMNS: dict[str, tuple[str, str, int | None]] = {
    "step": ("Step", "count", 76),
    "path": ("Checkpoint", "text", None),
    "health": ("Health", "text", None),
    "saved": ("Saved", "text", 100),
    "nbytes": ("Size", "bytes", 95),
    "loss": ("Loss", "text", 80),
    "lr": ("LR", "text", 80),
    "change": ("Δ weights", "text", 100),
}
LEAST = {"path": 120, "health": 130}  #: pixels of a column; on a phone, these two and the step are shown
SHEET = """
h1 { font-size: 21px; font-weight: 600; margin: 4px 0 2px; overflow-wrap: anywhere; }
.verdict { font-size: 16px; margin: 6px 0 8px; max-width: 100ch; }
.cause { font-size: 16px; font-weight: 600; margin: 2px 0; max-width: 80ch; }
.cause small { font-weight: 400; opacity: .8; font-size: 13px; margin-left: 10px; }
.cause + p, .cause ~ p { max-width: 90ch; }
.chips a { display: inline-block; border: 1px solid rgba(128, 128, 128, .5); border-radius: 14px; padding: 2px 11px;
  margin: 2px 6px 2px 0; text-decoration: none; font-size: 13px; font-weight: 400; }
.chips a.on { background: #0072B2; border-color: #0072B2; color: #fff; }
.chips span { font-size: 13px; opacity: .8; margin-right: 8px; }
"""
#: The metrics and the runs to compare with in one line, or one below the other.
CHOICE = """
:host { display: flex !important; flex-flow: row wrap; align-items: center; gap: 4px 24px; }
:host > :not(style) { flex: 0 1 360px; width: auto !important; align-self: center !important; }
:host > :not(style) ~ :not(style) { flex: 1 1 320px; }
:host > .scroll-button { display: none !important; }
"""


@dataclass(frozen=True)
class Reading:
    """A run as read: the run, those drawn over it, and the known health of its steps."""

    run: Run
    others: Mapping[str, Run]
    health: Mapping[str, StepHealth]
    notes: tuple[str, ...] = ()


class RunPage(pn.viewable.Viewer):
    """The page of ``state.run``.

    Attributes:
        reading: the displayed run; ``None`` before it was read.
        diagnosis: that of the step on display; ``None`` before it was made.
    """

    def __init__(
        self,
        state: WorkbenchState,
        picker: Picker | None = None,
        schedule: Schedule | None = None,
        runs: RunCache = shared_runs,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self._state, self._picker, self._runs = state, picker, runs
        self.reading: Reading | None = None
        self.diagnosis: Diagnosis | None = None
        self._layers: pd.DataFrame | None = None
        self._drawn: Any = None
        self._whole: tuple[float, float] | None = None  #: the range of steps that the picture begins with
        self._next, self._wait = 0.0, FIRST
        self._unchecked = self._unmeasured = False
        self.opening = Job(schedule)
        self.checking = Job(schedule, long=True)
        self._looking = Job(schedule)
        self.examining = JobButton(
            "Diagnose", self._examine, self._examined, verb="comparing", schedule=schedule, long=True
        )
        self.measuring = JobButton(
            "Measure the layers", self._measure, self._measured, verb="measuring", schedule=schedule, long=True
        )
        self.counting = JobButton(
            "Values over the steps", self._count, self._counted, verb="reading", schedule=schedule, long=True
        )
        self._key, self._places = "", list[tuple[int, str]]()
        self._rows: pn.widgets.Tabulator | None = None  #: the table of the steps …
        self._listed = ("", 0)  #: … of this run, which has so many
        self._head = Linked("", state.restore, SHEET)
        self._chips = Linked("", state.restore, SHEET)
        self._why = Linked("", state.restore, SHEET, margin=SECTION)
        self._cell = Linked("", state.restore, SHEET)
        self._curves = pn.Column(sizing_mode="stretch_width")
        self._picture = pn.Column(sizing_mode="stretch_width")
        self._ask = pn.Column(sizing_mode="stretch_width")
        self._measure_it = pn.Column(sizing_mode="stretch_width")
        self._over = pn.Column(sizing_mode="stretch_width")
        self._steps = pn.Column(sizing_mode="stretch_width")
        self._metrics = pmui.MultiChoice(label="Metrics", options=[], value=[], **WIDE)
        self._metrics.param.watch(self._chosen, "value")
        self._choice = pn.Column(self._metrics, self._chips, stylesheets=[CHOICE], sizing_mode="stretch_width")
        self._title = style.pane("<h2>Layers over the steps</h2>", margin=SECTION)
        self._asked: tuple[int | None, CheckpointPair | None] | None = None
        self._measures = style.choice(
            list(LAYER_MEASURES),
            self._measure_name(),
            lambda measure: state.param.update(measure=measure),
            margin=(5, 10),
        )
        self._body = pn.Column(sizing_mode="stretch_width")
        self.opening.param.watch(self._opened, "status")
        self.checking.param.watch(self._checked, "status")
        self._looking.param.watch(self._looked, "status")
        self.examining.job.param.watch(self._rest, "status")
        state.param.watch(self._moved, ["run", "versus"])
        state.param.watch(self._explain, "at")
        state.param.watch(self._redraw, "metrics")
        state.param.watch(self._draw_head, ["at", "measure"])
        state.param.watch(self._draw_layers, "measure")
        self._moved()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def close(self) -> None:
        """Stop the jobs."""
        self._unchecked = False
        for job in (self.opening, self.checking, self._looking):
            job.reset()
        for work in (self.examining, self.measuring, self.counting):
            work.reset()

    def look(self) -> None:
        """Read the run again if it has changed; less and less often while it does not. Call it every few seconds."""
        now = time.monotonic()
        if self.reading is None or now < self._next or self._looking.status == "running":
            return
        self._next = now + self._wait
        path = self._state.run
        self._looking.start(lambda progress: (path, self._runs.open(self._state.jail, path)))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _moved(self, *events: Any) -> None:
        """Show another run, or the same one with others drawn over it."""
        if not self._state.run:
            return
        if self.reading is None or any(event.name == "run" for event in events):
            self.close()
            self.reading = self.diagnosis = self._layers = self._drawn = self._asked = None
            self._body[:] = [style.pane(f'<p>Reading <span class="name">{html(self._state.run)}</span> …</p>')]
        self.opening.start(self._open)

    def _open(self, progress: Progress) -> Reading:
        state = self._state
        run = self._runs.open(state.jail, state.run)
        others, notes = {}, []
        for path in separated(state.versus):
            try:
                others[safe(path)] = self._runs.open(state.jail, path)
            except WorkbenchError as error:
                notes.append(str(error))
        return Reading(run, others, self._health(run), tuple(notes))

    def _health(self, run: Run) -> dict[str, StepHealth]:
        return {one.path: self._runs.health(one, run.place_of(one)) for one in run.found}

    def _opened(self, event: Any) -> None:
        if event.new == "failed":
            title = f'<h2>Cannot open the run <span class="name">{html(self._state.run)}</span></h2>'
            self._body[:] = [style.pane(title + style.message(self.opening.error, "error"))]
        elif event.new == "done":
            self._show(self.opening.result)

    def _looked(self, event: Any) -> None:
        if event.new != "done" or self.reading is None:
            return
        path, run = self._looking.result
        if path != self._state.run or run is self.reading.run:
            self._wait = min(self._wait * 1.5, LAST)
            return
        self._wait = FIRST
        self._next = time.monotonic() + FIRST
        self.opening.start(self._open)

    def _show(self, reading: Reading) -> None:
        grown = self.reading is None or self.reading.run.found != reading.run.found  # or rewritten
        self.reading = reading
        options = [name for name in reading.run.metrics.columns if name != "loss"]
        self._metrics.param.update(options=options, value=[one for one in self._metric_names() if one in options])
        self._redraw()
        shown = [self._head, self._curves, self._why, self._ask, *([self._choice] if options else [self._chips])]
        if reading.run.found:
            shown += [self._title, self._measures, self._measure_it, self._picture, self._cell, self._over, self._steps]
        if list(self._body) != shown:
            self._body[:] = shown
        if self._asked != self._question_now():  # a new jump, or the checkpoint after it has been saved
            self._explain()
        if grown and reading.run.found:
            self._measure_it[:] = [self.measuring]
            self._unchecked = self._unmeasured = True
            self._rest()

    def _rest(self, *_: Any) -> None:
        """Begin the jobs that the answer does not need after it, because they would compete for the cores."""
        if self._unchecked and self.examining.job.status != "running":
            self._unchecked = False
            self.checking.start(self._check, later=self._size() > SMALL)

    def _size(self) -> int:
        return 0 if self.reading is None else sum(one.nbytes for one in self.reading.run.found)

    def _check(self, progress: Progress) -> None:
        """Check the newest steps; the cache keeps the findings."""
        assert self.reading is not None
        run = self.reading.run
        newest = run.found[-CHECKED:]
        values = self._size() <= SMALL
        for at, one in enumerate(newest):
            step_progress = steady(progress, at / len(newest))
            self._runs.check(one, run.place_of(one), values=values, progress=step_progress)

    def _checked(self, event: Any) -> None:
        if event.new == "done" and self.reading is not None:
            old, health = self.reading, self._health(self.reading.run)
            if health != old.health:
                self.reading = Reading(old.run, old.others, health, old.notes)
                self._redraw()
            if self._unmeasured and self._size() <= SMALL:
                self._unmeasured = False
                self.measuring.start()

    # ---- head and curves ---------------------------------------------------------------------------------------------

    def _draw_head(self, *_: Any) -> None:
        reading = self.reading
        if reading is None:
            return
        run, title = reading.run, self._state.jail.title(self._state.run)
        words = "".join(style.message(one, "warning") for one in self._not_in_the_run())
        words += "".join(style.message(relative_words(note), "info") for note in (*reading.notes, *page_notes(run)))
        self._head.text = (
            f'<h1 class="name">{html(title)}</h1><p class="muted">{_about(run)}</p>'
            f'<p class="verdict">{html(run_sentence(run))}</p>{_bad_steps(reading)}{words}'
        )

    def _not_in_the_run(self) -> list[str]:
        """Return sentences on what the link names and the run does not have."""
        assert self.reading is not None
        state, found = self._state, []
        if state.at and not state.at.isdecimal():
            found.append(f"the link names the step {state.at!r}, which is not a number")
        logged = {name for run in (self.reading.run, *self.reading.others.values()) for name in run.metrics.columns}
        if lost := [name for name in self._metric_names() if name not in logged and state.metrics]:
            which = "metric" if len(lost) == 1 else "metrics"
            found.append(f"the link names the {which} {some_of(lost)}, which the log does not have")
        if state.measure and state.measure not in LAYER_MEASURES:
            found.append(f"the link names the picture of layers {state.measure!r}, which does not exist")
        return found

    def _redraw(self, *_: Any) -> None:
        reading, state = self.reading, self._state
        if reading is None:
            return
        run, title = reading.run, state.jail.title(state.run)
        self._draw_head()
        self._chips.text = self._other_runs()
        health = {path: (one.state, relative_words(one.words)) for path, one in reading.health.items()}
        names = None if not state.metrics else ["loss", *self._metric_names()]
        curves = curves_of(run, names, health=health, others=reading.others, name=safe(title))
        window = None if self._drawn is None else (self._drawn.x_range.start, self._drawn.x_range.end)
        if window == self._whole:
            window = None  # nobody has zoomed or panned: new points and other runs are shown too
        figure = run_figure(curves, tapped=self._tapped, window=window)
        self._drawn = figure.children[0] if figure.children else None
        if window is None and self._drawn is not None:
            self._whole = self._drawn.x_range.start, self._drawn.x_range.end
        self._curves[:] = [_pane(figure)] if figure.children else []
        self._list_steps()

    def _metric_names(self) -> list[str]:
        if self._state.metrics:
            return [name for name in separated(self._state.metrics) if name != "loss"]
        columns = () if self.reading is None else self.reading.run.metrics.columns
        return [name for name in ("lr", "grad_norm") if name in columns]

    def _chosen(self, event: Any) -> None:
        if list(event.new) != [name for name in self._metric_names() if name in self._metrics.options]:
            self._state.metrics = joined(["loss", *event.new])

    def _other_runs(self) -> str:
        """Return the other runs under ROOT as links that draw them over this one, or remove them."""
        listing = None if self._picker is None else self._picker.listing
        state = self._state
        folders = [] if listing is None else grouped(listing.found)[0]
        on = separated(state.versus)
        paths = list(dict.fromkeys([*on, *(one.path for one in folders if one.path != state.run)]))[:OTHERS]
        if not paths:
            return ""
        chips = []
        for path in paths:
            left = [one for one in on if one != path] if path in on else [*on, path]
            target = link(run=state.run, at=state.at, metrics=state.metrics, versus=joined(left))
            pressed = ' class="on" aria-current="true"' if path in on else ""
            chips.append(f'<a href="{html(target)}"{pressed}>{html(path)}</a>')
        return f'<div class="chips"><span>Compare with</span>{"".join(chips)}</div>'

    def _tapped(self, what: str, which: Any) -> None:
        if what == "spike":
            self._state.at = str(which)
        elif what == "save":
            self._open_step(which)

    def _open_step(self, path: str) -> None:
        """Open a checkpoint of the run, named relative to it."""
        self._state.show(self._under(path))

    def _under(self, path: str) -> str:
        """Return the path under ROOT of a checkpoint of the run."""
        return path if self._state.run == "." else f"{self._state.run}/{path}" if path != "." else self._state.run

    # ---- why did it jump ---------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        """Return the step to explain: the chosen one, that of the highest spike, or the last resume."""
        if self.reading is None:
            return None
        if self._state.at.isdecimal():
            return int(self._state.at[:18])
        run = self.reading.run
        row = worst_spike(run)
        if row is not None:
            return int(row["step"])
        return int(run.resumes["step"].iloc[-1]) if len(run.resumes) else None

    def _question_now(self) -> tuple[int | None, CheckpointPair | None]:
        """Return the step to explain, and the checkpoints around it."""
        step = self._step()
        return step, None if self.reading is None or step is None else self.reading.run.pair(step)

    def _explain(self, *_: Any) -> None:
        """Begin to explain a step; at once if its checkpoints are small."""
        self.examining.reset()
        self.diagnosis, self._asked = None, self._question_now()
        step = self._step()
        if self.reading is None or step is None:
            self._why.text = ""
            self._ask[:] = []
            return
        pair = self.reading.run.pair(step)
        found = [one for one in (pair.before, pair.echo, pair.after) if one is not None]
        title = self._question(step)
        if not found:
            self._why.text = f"{title}<p>{html(_sentence(pair.advice))}</p>{self._other_jumps(step)}"
            self._ask[:] = []
            return
        self._ask[:] = [self.examining]
        self._why.text = f"{title}<p>{html(_compared(pair))}</p>{self._other_jumps(step)}"
        if sum(one.nbytes for one in found) <= SMALL:
            self.examining.start()

    def _question(self, step: int) -> str:
        assert self.reading is not None
        spikes = self.reading.run.spikes
        jumped = len(spikes) and step in spikes["step"].tolist()
        words = f"Why did the loss jump at step {step:,}?" if jumped else f"What changed at step {step:,}?"
        return f"<h2>{words}</h2>"

    def _other_jumps(self, step: int) -> str:
        assert self.reading is not None
        rows = [row for row in self.reading.run.spikes.to_dict("records") if int(row["step"]) != step]
        state = self._state
        kept = {"run": state.run, "metrics": state.metrics, "versus": state.versus}
        links = [
            f'<a href="{html(link(at=str(int(row["step"])), **kept))}">{html(spike_sentence(row))}</a>'
            for row in rows[:8]
        ]
        more = f" and {plural(len(rows) - 8, 'more event')}" if len(rows) > 8 else ""
        return f'<p class="muted">Also: {"; ".join(links)}{more}.</p>' if links else ""

    def _examine(self, progress: Progress) -> tuple[int, Diagnosis]:
        assert self.reading is not None
        step = self._step()
        assert step is not None
        run = self.reading.run
        return step, self._runs.answer(run, ("diagnosis", step), lambda: run.diagnose(step, progress=progress))

    def _examined(self, result: tuple[int, Diagnosis]) -> None:
        step, found = result
        if self.reading is None or step != self._step():
            return
        self.diagnosis = found
        pair = self.reading.run.pair(step)
        first = pair.before or pair.after
        assert first is not None
        details = link(
            run=self._state.run,
            at=self._state.at,
            path=self._under(first.path),
            other=self._under(pair.after.path) if pair.before is not None and pair.after is not None else "",
            echo=self._under(pair.echo.path) if pair.echo is not None else "",
            tab="doctor",
        )
        more = f'<p><a href="{html(details)}">All signs, pictures and what was not checked</a></p>'
        self._why.text = self._question(step) + relative_html(cause_html(found)) + more + self._other_jumps(step)
        self._ask[:] = []

    # ---- layers over the steps ---------------------------------------------------------------------------------------

    def _measure_name(self) -> str:
        return self._state.measure if self._state.measure in LAYER_MEASURES else next(iter(LAYER_MEASURES))

    def _measure(self, progress: Progress) -> pd.DataFrame:
        from workbench.analysis.timeline import timeline

        assert self.reading is not None
        run = self.reading.run
        places = [run.place_of(one) for one in run.saves()]
        return self._runs.answer(run, ("layers",), lambda: timeline(places, by="tensor", progress=progress))

    def _measured(self, frame: pd.DataFrame) -> None:
        self._layers = frame
        self._measure_it[:] = []
        self._draw_layers()
        self._list_steps()

    def _draw_layers(self, *_: Any) -> None:
        self._measures.value = self._measure_name()
        self._cell.text, self._over[:] = "", []
        if self._layers is None:
            return
        grid = layer_grid(self._layers, self._measure_name())
        if not grid.rows:
            words = f'<p class="muted">No step stores what "{self._measure_name()}" measures.</p>'
            self._picture[:] = [style.pane(words)]
            return
        figure = layers_figure(grid, self._measure_name(), lambda row, at: self._show_cell(grid, row, at))
        words = style.pane(f'<p class="muted">{_sentence(LAYER_MEASURES[self._measure_name()][2])}</p>')
        self._picture[:] = [words, _pane(figure)]

    def _show_cell(self, grid: LayerGrid, row: int, at: int) -> None:
        """Show one row of the picture as curves, with a link to the tensor at the step of the cell."""
        measure = self._measure_name()
        target = link(
            run=self._state.run, path=self._relative(grid.paths[at]), tensor=grid.keys[row][at], tab="tensors"
        )
        name, key = html(grid.rows[row]), grid.keys[row][at]
        opened = f'<a href="{html(target)}">Open {html(key)} at step {grid.steps[at]:,}</a>' if key else "not stored"
        self._cell.text = f'<h3><span class="name">{name}</span>: {measure} over the steps</h3><p>{opened}</p>'
        line = MetricLine(np.asarray(grid.steps, np.int64), grid.values[row])
        self._key, self._places = key, [(step, place) for step, place in zip(grid.steps, grid.paths, strict=True)]
        self.counting.reset()
        self._over[:] = [_pane(run_figure(Curves({measure: {"": line}}))), *([self.counting] if key else [])]
        if key and self._size() <= SMALL:
            self.counting.start()

    def _count(self, progress: Progress) -> tuple[str, list[int], Any, Any]:
        """Return the histograms of a tensor at all steps, in the same bins."""
        key, places = self._key, self._places
        found: list[tuple[LazyTensor | None, Summary | None]] = []
        with ExitStack() as opened:
            for at, (_, place) in enumerate(places):
                progress(0.5 * at / len(places))
                lease = self._state.hold(self._relative(place))
                opened.callback(lease.release)
                tensor = lease.checkpoint.get(key)
                found.append((tensor, None if tensor is None else summarise(tensor)))
            ends = [one for _, summary in found if summary is not None for one in (summary.min, summary.max)]
            known = [float(one) for one in ends if one is not None]
            if not known:
                raise UsageError(f"{key!r} has no finite numbers at any step")
            span, counts, edges = (min(known), max(known)), np.zeros((len(places), BINS), np.int64), np.zeros(BINS + 1)
            for at, (tensor, summary) in enumerate(found):
                progress(0.5 + 0.5 * at / len(places))
                made = None if tensor is None else histogram(tensor, BINS, summary=summary, span=span)
                if made is not None:
                    counts[at], edges = made.counts, made.edges
        return key, [step for step, _ in places], counts, edges

    def _counted(self, result: tuple[str, list[int], Any, Any]) -> None:
        key, steps, counts, edges = result
        if key == self._key:
            title = style.pane(f'<h3>Values of <span class="name">{html(key)}</span> over the steps</h3>')
            self._over[:] = [self._over[0], title, _pane(histograms_figure(steps, counts, edges))]

    def _relative(self, place: str) -> str:
        return self._state.jail.show(place)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _list_steps(self) -> None:
        """Show a row for each checkpoint; an existing table gets the new rows, and keeps its place and order."""
        reading = self.reading
        if reading is None or not reading.run.found:
            self._steps[:] = []
            return
        frame = step_rows(reading, self._layers)
        name = os.path.basename(self._state.run) or "run"
        shown = name, len(frame)
        if self._rows is not None and self._listed == shown and len(self._steps):
            if not frame.equals(self._rows.value):
                self._rows.value = frame
            return
        height = TALL if len(frame) * ROW > TALL else None
        table = style.table(frame, COLUMNS, least=LEAST, pagination=None, height=height)
        table.on_click(self._row_clicked)
        self._listed, self._rows = shown, table
        self._steps[:] = [
            style.pane(f"<h2>{plural(len(frame), 'checkpoint')}</h2>", margin=SECTION),
            table,
            pn.FlexBox(
                text_button(f"{name}-report.html", self._report, "report"),
                csv_button(f"{name}-steps", lambda: table.value, "steps CSV"),
                csv_button(f"{name}-metrics", self._metrics_frame, "metrics CSV"),
                margin=(0, 5),
            ),
        ]

    def _row_clicked(self, event: Any) -> None:
        assert self.reading is not None
        found = self.reading.run.found
        self._open_step(found[len(found) - 1 - int(event.row)].path)

    def _metrics_frame(self) -> pd.DataFrame:
        assert self.reading is not None
        return self.reading.run.metrics.reset_index()

    def _report(self) -> str:
        from workbench.views.run_html import run_page

        assert self.reading is not None
        health = {path: (one.state, one.words) for path, one in self.reading.health.items()}
        return run_page(self.reading.run, self.diagnosis, health=health, layers=self._layers)


def step_rows(reading: Reading, layers: pd.DataFrame | None) -> pd.DataFrame:
    """Return one row per checkpoint, the newest first: step path health saved nbytes loss lr change."""
    import pandas as pd

    run, now = reading.run, time.time()
    metrics = run.metrics
    lr = metrics["lr"].dropna() if "lr" in metrics else None
    changes: Mapping[str, float] = {} if layers is None else _changes(layers)
    rows = []
    for one, loss in zip(run.found, run.steps["loss"].tolist(), strict=True):
        health = reading.health[one.path]
        rates = None if lr is None else lr[lr.index <= (one.step or 0)]
        change = changes.get(run.place_of(one))
        rows.append(
            (
                one.step,
                safe(one.path),
                f"{DOTS[health.state]} {safe(health.words)}",
                f"{units.age(now - one.mtime)} ago" if one.mtime else "–",
                one.nbytes,
                "–" if loss != loss else f"{loss:.4g}",
                "–" if rates is None or not len(rates) else f"{rates.iloc[-1]:.3g}",
                "–" if change is None or change != change else f"{change:.3g}",
            )
        )
    return pd.DataFrame(rows[::-1], columns=list(COLUMNS))


def _changes(layers: pd.DataFrame) -> dict[str, float]:
    """Return the largest relative change of a weight by step's path."""
    weights = layers[layers["role"] == "param"]
    return {str(path): float(value) for path, value in weights.groupby("path")["change"].max().items()}


def _pane(figure: Any) -> pn.pane.Bokeh:
    return pn.pane.Bokeh(figure, sizing_mode="stretch_width", margin=(0, 10))


def _about(run: Run) -> str:
    found = run.found
    parts = []
    if found:
        steps = f"steps {found[0].step or 0:,} to {found[-1].step or 0:,}"
        parts = [html(", ".join(sorted({one.format for one in found}))), plural(len(found), "checkpoint"), steps]
        parts.append(f"{size(max(one.nbytes for one in found))} each")
        parts.append(f"saved {units.age(time.time() - max(one.mtime for one in found))} ago")
    if len(run.sources):
        row = run.sources.iloc[0]
        parts.append(f"log {html(row['path'])} ({html(row['kind'])}), {plural(int(row['points']), 'point')}")
    return " · ".join(parts)


def _bad_steps(reading: Reading) -> str:
    """Return the first step with a finding, and how many there are."""
    saves = [one for one in reading.run.found if not is_echo_save(one)]
    bad = [one for one in saves if reading.health[one.path].state in ("finding", "incomplete")]
    if not bad:
        return ""
    first = reading.health[bad[0].path]
    more = f" Findings in {plural(len(bad), 'checkpoint')}." if len(bad) > 1 else ""
    kind = "error" if any(reading.health[one.path].severity == "error" for one in bad) else "warning"
    return style.message(f"Since step {bad[0].step:,}: {bad[0].path}: {relative_words(first.words)}.{more}", kind)


def _compared(pair: CheckpointPair) -> str:
    names = [one.path for one in (pair.before, pair.echo, pair.after) if one is not None]
    if len(names) < 2:
        return f"Only {names[0]!r} is near it: {pair.advice}."
    return f"To compare: {', '.join(map(repr, names))}."


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:].rstrip(".") + "."


def cause_html(d: Diagnosis) -> str:
    """Return the first cause of a diagnosis in four lines: cause, certainty, proof, remedy; or the verdict."""
    compared = f'<p class="muted">Compared: {html(d.coverage)}</p>' if d.coverage else ""
    real = [one for one in d.causes if one.severity != "info"]
    if not real:
        return f'<p class="cause">{html(d.verdict)}</p>{compared}'
    one = real[0]
    proof = f"<p>{html(_sentence(one.signs[0].message))}</p>" if one.signs else ""
    expect = f"<p>{html(_sentence(one.damage[0]))}</p>" if one.damage else ""
    remedy = f"<p><b>Do:</b> {html(_sentence(one.remedy))}</p>" if one.remedy else ""
    second = f"<p class=muted>Next best explanation: {html(one.runner_up)}</p>" if one.runner_up else ""
    more = f"<p class=muted>{plural(len(real) - 1, 'further cause')}: {html(real[1].title)}</p>" if real[1:] else ""
    since = "" if one.since is None else f", since step {one.since:,}"
    certain = f"<small>{html(one.certainty)} · {html(one.severity)}{since}</small>"
    return f'<p class="cause">{html(one.title)}{certain}</p>{proof}{expect}{remedy}{second}{more}{compared}'
