"""A run as HTML: a fragment for notebooks, and a standalone page to send to someone.

::

    <div>   sentence · curve · resumes and jumps · logs and notes
    page:   the same with interactive curves, the diagnosis, the layers and the steps; opens without a network,
            light or dark like the browser
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from workbench.analysis.health import check_step
from workbench.analysis.run import Run
from workbench.analysis.timeline import timeline
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.views import spark, units
from workbench.views.doctor_html import diagnosis_html
from workbench.views.names import html, safe
from workbench.views.pages import page_of, page_path, write_page
from workbench.views.run import page_notes, run_sentence, spike_sentence, worst_spike
from workbench.views.run_pictures import (
    LAYER_MEASURES,
    curves_of,
    layer_grid,
    layers_figure,
    run_figure,
    thinned,
)

if TYPE_CHECKING:
    import pandas as pd

    from workbench.doctor.reasoning.diagnosis import Diagnosis

ROWS = 40  #: of a table in a notebook; a page has all steps up to PAGE_ROWS
PAGE_ROWS = 500
SMALL = 256 << 20  #: bytes of all checkpoints up to which their values are read by default
POINTS = 4_000  #: of a curve in a page
CELL = 'style="text-align:left;padding:1px 14px 1px 0;vertical-align:top"'
LABEL = CELL.replace("top", "top;white-space:nowrap;overflow-wrap:normal")


def run_html(run: Run) -> str:
    """Return the run's sentence, its curve, its events and its checkpoints, in the colours of the notebook."""
    parts = [f"<div><b>{html(run.path)}</b></div><div>{html(run_sentence(run))}</div>"]
    if "loss" in run.metrics:
        series, row = run.metrics["loss"].dropna(), worst_spike(run)
        steps, values = thinned(series.index.to_numpy("int64"), series.to_numpy("float64"), 600)
        drawn = spark.line(np.asarray(steps, float), values, None if row is None else float(row["step"]), 90)
        parts.append(f'<div style="color:#0072B2;max-width:640px">{drawn}</div>')
    parts.append(_events(run))
    parts.append(_steps(run, {}, ROWS))
    parts += [f"<div>{html(note)}</div>" for note in page_notes(run)]
    return f'<div class="workbench-run">{"".join(parts)}</div>'


def run_page(
    run: Run,
    diagnosis: Diagnosis | None = None,
    *,
    health: Mapping[str, tuple[str, str]] | None = None,
    layers: pd.DataFrame | None = None,
    metrics: Sequence[str] | None = None,
) -> str:
    """Return a standalone page that needs no network.

    Args:
        diagnosis: the diagnosis of its jump, if it has one.
        health: path of a checkpoint → its state (:class:`~workbench.analysis.health.StepHealth`) and a sentence.
        layers: ``wb.timeline(by="tensor")`` of its steps.
        metrics: the metrics to draw, as for ``run.plot``.
    """
    figures = {"The run": run_figure(curves_of(run, metrics, health=health, most=POINTS))}
    if layers is not None:
        for measure in LAYER_MEASURES:
            grid = layer_grid(layers, measure)
            if grid.rows and len(grid.steps) > 1 and (measure != "NaN" or grid.spoilt.any()):
                figures[f"Layers over the steps: {LAYER_MEASURES[measure][2]}"] = layers_figure(grid, measure)
    parts = [f"<p class=verdict>{html(run_sentence(run))}</p>", "<!--The run-->"]
    if diagnosis is not None:
        parts.append(f"<h2>Why?</h2><p><b>{html(diagnosis.verdict)}</b></p>{diagnosis_html(diagnosis, brief=True)}")
    parts.append(_events(run))
    parts += [f"<h2>{escape(name)}</h2><!--{name}-->" for name in figures if name != "The run"]
    parts.append(_steps(run, health or {}, PAGE_ROWS))
    if run.notes or len(run.sources):
        rows = [
            f"{safe(row['path'])} ({safe(row['kind'])}): {plural(row['points'], 'point')}, steps "
            f"{row['first']:,} to {row['last']:,}"
            for row in run.sources.to_dict("records")
        ]
        parts.append(f"<h2>Logs</h2><ul>{_items([*rows, *map(safe, page_notes(run))])}</ul>")
    return page_of(safe(run.path), "".join(parts), figures)


def write_run(
    run: Run,
    path: str | os.PathLike[str],
    *,
    diagnose: bool = True,
    layers: bool | None = None,
    progress: Progress | None = None,
) -> str:
    """Write :func:`run_page`; arguments, result and errors are those of :meth:`workbench.Run.to_html`."""
    target = page_path(path)
    report = progress or (lambda share: None)
    saves = [one for one in run.found if one.complete]
    measured = sum(one.nbytes for one in saves) <= SMALL if layers is None else layers
    diagnosis = None
    if diagnose and len(saves) > 1:
        with suppress(UsageError):  # no pair of checkpoints is near the jump; the events say which to keep
            diagnosis = run.diagnose(progress=lambda share: report(share / 3))
    frame = None
    if measured and saves:
        places = [run.place_of(one) for one in run.saves()]
        frame = timeline(places, by="tensor", progress=lambda share: report((1 + share) / 3))
    health = {}
    for at, one in enumerate(saves):
        report((2 + at / len(saves)) / 3)
        state = check_step(one, run.place_of(one), values=measured)
        health[one.path] = state.state, state.words
    write_page(run_page(run, diagnosis, health=health, layers=frame), target)
    return os.fspath(target)


def _events(run: Run) -> str:
    items = [
        (int(row["step"]), f"resumed at step {int(row['step']):,}: {safe(row['why'])}")
        for row in run.resumes.to_dict("records")
    ]
    items += [
        (int(row["step"]), f"{safe(row['kind'])} {spike_sentence(row)}; {safe(row['advice'])}")
        for row in run.spikes.to_dict("records")
    ]
    return f"<h2>Events</h2><ul>{_items(words for _, words in sorted(items))}</ul>" if items else ""


def _items(words: Iterable[str]) -> str:
    return "".join(f"<li>{escape(one)}</li>" for one in words)


def _steps(run: Run, health: Mapping[str, tuple[str, str]], most: int) -> str:
    if not run.found:
        return ""
    frame = run.steps.iloc[::-1]
    rows = []
    for row in frame.head(most).to_dict("records"):
        plain = "complete; not checked" if row["complete"] else f"incomplete: {row['why']}"
        loss = "" if row["loss"] != row["loss"] else f"{row['loss']:.4g}"
        cells = (f"{int(row['step']):,}", safe(row["path"]), units.nbytes(int(row["nbytes"])), loss)
        words = safe(health.get(row["path"], ("", plain))[1])
        short = "".join(f"<td {LABEL}>{escape(str(one))}</td>" for one in cells)
        rows.append(f"{short}<td {CELL}>{escape(words)}</td>")
    head = "".join(f"<th {CELL}>{name}</th>" for name in ("step", "checkpoint", "size", "loss", "state"))
    more = f"<p>… {plural(len(frame) - most, 'earlier checkpoint')}</p>" if len(frame) > most else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>Checkpoints</h2><table><tr>{head}</tr>{body}</table>{more}"
