"""The first page: the runs under ROOT as cards, each with its curve, its steps and what happened.

::

    llama-8b-a      dcp · 12 steps · 96 GiB each        loss ╲__╱╲____       ● nothing found   ○ incomplete
    last step 52,000 · saved 12 min ago                 ●●●●●▲●●●●●●         ▲ finding         ◌ not checked yet
    The loss jumps at step 48,012 by 0.41, right after a resume

Cards appear at once, with what other pages have read before. A job then reads each run's logs and checks the structure
of its steps, the last saved run first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import panel as pn

from workbench.analysis.health import StepHealth
from workbench.analysis.run import Run
from workbench.app import style
from workbench.app.found import checkpoints
from workbench.app.jail import Jail
from workbench.app.jobs import Job, Progress, Schedule, steady
from workbench.app.linked import Linked
from workbench.app.picker import Picker
from workbench.app.run_cache import RunCache, shared_runs
from workbench.app.state import WorkbenchState, link
from workbench.app.watching import recent
from workbench.app.words import html, size
from workbench.core.remote.url import is_url
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, grouped
from workbench.views import spark, units
from workbench.views.run import run_sentence, worst_spike
from workbench.views.run_html import SMALL
from workbench.views.run_pictures import thinned

OPENED = 100  #: maximum runs whose logs and steps are read for the cards
STEPS = 24  #: newest steps of a run in a card, and the number of them that is checked
AHEAD = 12  #: runs that are read when the server starts
ALARMS = 3  #: findings of the watch that are shown
SAID = {"error": "error", "warn": "warning"}
FAR = 3  #: newest steps of a run in a store that are checked: each costs several requests
#: State of a step → mark; the colours are those of the pictures.
DOTS = {"sound": "●", "finding": "▲", "incomplete": "○", "unseen": "◌"}
SHEET = """
.runs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 16px;
  margin: 12px 0 24px; }
.runs a { display: block; text-decoration: none; font-weight: 400; padding: 14px 16px 12px; border-radius: 8px;
  border: 1px solid rgba(128, 128, 128, .35); min-width: 0; }
.runs a:hover, .runs a:focus-visible { border-color: #0072B2; outline: 1px solid #0072B2; }
.runs b { font-size: 15px; overflow-wrap: anywhere; }
.runs small { display: block; font-size: 12.5px; opacity: .8; line-height: 1.5; }
.runs svg { color: #0072B2; display: block; margin: 8px 0 4px; } .runs svg .mark { stroke: #D55E00; stroke-width: 1.5; }
.runs .none { height: 56px; display: flex; align-items: center; opacity: .75; font-size: 13px; }
.runs .none:empty { height: 8px; }
.runs p { margin: 6px 0 0; font-size: 13.5px; line-height: 1.4; }
.strip { letter-spacing: 2px; font-size: 13px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.strip .finding { color: #D55E00; } .strip .sound { color: #0072B2; }
.welcome { max-width: 80ch; font-size: 14px; }
"""
WELCOME = """
<p class="welcome">This page shows what is stored under <span class="name">{root}</span>: runs as cards with their
curves and steps, and every checkpoint in the list on the left. In a narrow window, the button at the top left shows
the list.</p>
<p class="welcome muted">Opening a checkpoint reads only metadata, whatever its size. Nothing stored in a checkpoint is
executed, and {written}.</p>
"""
LEGEND = '<p class="muted">● checked, nothing found · ▲ finding · ○ incomplete · ◌ not checked yet</p>'


class Home(pn.viewable.Viewer):
    """The cards of the runs that the picker's search has found."""

    def __init__(
        self,
        state: WorkbenchState,
        picker: Picker,
        schedule: Schedule | None = None,
        runs: RunCache = shared_runs,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self._state, self._picker, self._runs = state, picker, runs
        self._later = schedule or (lambda callback: callback())
        self.job = Job(schedule, long=True)
        self._folders: list[RunFolder] = []
        self._known: dict[str, tuple[str, Run | None]] = {}
        self._page = Linked("", state.restore, SHEET)
        self._body = pn.Column(self._page, sizing_mode="stretch_width")
        self._drawing = False  # a callback that will draw is on its way
        picker.job.param.watch(self._listed, "status")
        if picker.job.status == "done":
            self._listed()
        else:
            self._list()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    @property
    def text(self) -> str:
        """What it shows, as HTML."""
        return str(self._page.text)

    def close(self) -> None:
        """Stop reading."""
        self.job.reset()

    def _listed(self, *_: Any) -> None:
        if self._picker.job.status == "done":
            self._list()
            if self._folders:
                self.job.start(self._read)

    def _list(self) -> None:
        """Show the runs that were found, with their known state."""
        listing = self._picker.listing
        if listing is None:
            self._page.text = self._welcome()
            return
        jail = self._state.jail
        self._folders = sorted(grouped(listing.found)[0], key=_order)
        for folder in self._folders[:OPENED]:
            run = self._runs.known(jail, folder.path)
            if run is not None:
                self._known.setdefault(folder.path, (run_sentence(run), run))
        self._draw()

    def _read(self, progress: Progress) -> None:
        """Read runs one after the other; cards change as soon as something is known."""
        jail = self._state.jail
        remote = is_url(str(jail.root))
        left, newest = (0, FAR) if remote else (SMALL, STEPS)
        for at, folder in enumerate(self._folders[:OPENED]):
            progress(at / len(self._folders))
            try:
                run = self._runs.open(jail, folder.path)
                self._tell(folder.path, run_sentence(run), run)
            except WorkbenchError as error:
                self._tell(folder.path, str(error), None)
                continue
            nbytes = sum(step.nbytes for step in folder.steps)
            values = nbytes <= left
            left -= nbytes if values else 0
            for step in folder.steps[-newest:]:
                step_progress = steady(progress, at / len(self._folders))
                self._runs.check(step, str(jail.resolve(step.path)), values=values, progress=step_progress)
            self._soon()

    def _tell(self, path: str, words: str, run: Run | None) -> None:
        self._known[path] = words, run
        self._soon()

    def _soon(self) -> None:
        """Draw on the page's thread, once for all that becomes known until then."""
        if not self._drawing:
            self._drawing = True
            self._later(self._draw)

    def _draw(self) -> None:
        self._drawing = False
        root = html(self._state.jail.name)
        if not self._folders:
            none = "<h2>No runs here</h2><p>A run is a folder with two or more steps.</p>"
            listing = self._picker.listing
            found = [one for one in listing.found if one.complete] if listing is not None else []
            newest = max(found, key=lambda one: one.mtime, default=None)
            if newest is not None:
                name = f'<span class="name">{html(newest.path)}</span>'
                none += f'<p><a href="{html(link(path=newest.path))}">Open the newest checkpoint</a>: {name}</p>'
            self._page.text = none + self._welcome()
            return
        cards = "".join(self._card(folder) for folder in self._folders)
        number = plural(len(self._folders), "run")
        head = f'<h2>{number} under <span class="name">{root}</span></h2>'
        self._page.text = f'{head}{_alarms()}<div class="runs">{cards}</div>{LEGEND}{self._welcome()}'

    def _welcome(self) -> str:
        written = "only exports are written" if self._state.outlet.open else "nothing is written"
        return WELCOME.format(root=html(self._state.jail.name), written=written)

    def _card(self, folder: RunFolder) -> str:
        words, run = self._known.get(folder.path, ("", None))
        newest = max(step.mtime for step in folder.steps)
        formats = ", ".join(sorted({step.format for step in folder.steps}))
        about = [
            html(formats),
            plural(len(folder.steps), "checkpoint"),
            f"{size(max(step.nbytes for step in folder.steps))} each" if folder.steps else "",
        ]
        saved = f"last step {folder.steps[-1].step or 0:,} · saved {units.age(time.time() - newest)} ago"
        jail = self._state.jail
        states = [self._runs.health(step, str(jail.resolve(step.path))) for step in folder.steps[-STEPS:]]
        names = [os.path.basename(step.path) for step in folder.steps[-STEPS:]]
        return (
            f'<a href="{html(link(run=folder.path))}"><b class="name">{html(folder.path)}</b>'
            f"<small>{' · '.join(about)}</small><small>{saved}</small>{_curve(run, words)}"
            f"{health_strip(names, states)}<p>{html(words)}</p></a>"
        )


def look_ahead(jail: Jail, runs: RunCache = shared_runs) -> Job:
    """Find the runs under ROOT and read those that the first page shows first, before the page is requested."""

    def read(progress: Progress) -> None:
        folders = sorted(grouped(checkpoints(jail).found)[0], key=_order)[:AHEAD]
        for at, folder in enumerate(folders):
            progress(at / len(folders))
            with suppress(WorkbenchError):  # the page says what is wrong with it
                runs.open(jail, folder.path)

    job = Job(long=True)
    job.start(read)
    return job


def _order(folder: RunFolder) -> tuple[int, int, str]:
    """Sort by last save, newest first; folders saved within an hour, as by an unpacked archive, by depth and name."""
    return -int(max(step.mtime for step in folder.steps) // 3600), folder.path.count("/"), folder.path


def health_strip(names: Sequence[str], states: Sequence[StepHealth]) -> str:
    """Return one mark per step, with the checks and findings as its tooltip."""
    marks = "".join(
        f'<span class="{one.state}" title="{html(name)}: {html(one.words)}">{DOTS[one.state]}</span>'
        for name, one in zip(names, states, strict=True)
    )
    worst = [f"{name}: {one.words}" for name, one in zip(names, states, strict=True) if one.state == "finding"]
    summary = (
        f"{len(worst)} of {len(states)} steps with findings"
        if worst
        else f"{plural(len(states), 'step')}, no findings so far"
    )
    return f'<div class="strip" role="img" aria-label="{html(summary)}">{marks}</div>'


def _alarms() -> str:
    """Return the last findings of the server's watch, newest first."""
    alarms = [one for one in recent if one.severity][-ALARMS:]
    return "".join(style.message(f"{one.path}: {one.words}", SAID[one.severity]) for one in reversed(alarms))


def _curve(run: Run | None, words: str) -> str:
    if run is None:
        return f'<div class="none">{"" if words else "reading its log …"}</div>'
    frame = run.metrics
    if "loss" not in frame:
        return '<div class="none"></div>'  # stated in the sentence below
    series = frame["loss"].dropna()
    steps, values = thinned(series.index.to_numpy("int64"), series.to_numpy("float64"), 240)
    row = worst_spike(run)
    return spark.line(np.asarray(steps, float), values, None if row is None else float(row["step"])) or (
        '<div class="none">a single point was logged</div>'
    )
