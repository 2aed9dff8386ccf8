"""One curve per metric, from logs in which restarts have written some steps twice.

::

    written   1 2 … 60 61 … 72 │ 61 62 … 120         the trainer died after 72 and resumed from the checkpoint of 60
    surviving 1 2 … 60           61 62 … 120         the last attempt wins
    ghost                61 … 72                     the abandoned branch is kept

A resume is where the step of one series, in written order, does not rise: ``step[i] <= step[i - 1]``; where a
restart line, a new file, a start event, another process, or the program's first lines, printed again, mark one; or
where a counter falls that only rises while a program runs: its time, the epoch, the consumed samples. A wall clock that
goes back is not a resume, and neither is a pause. A step that is logged twice with the same value is one point, and a
file in which many steps are repeated without a restart was written by several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.names.metrics import MEANINGS, counter, pick_metric
from workbench.runs.logs.record import PROCESS, LoggedColumn, MetricLog, StartMark

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

REPEATED = 0.05  #: share of steps logged twice in a row that proves that several ranks wrote the file
FALLS = 0.10  #: share of points with a falling step from which the file is not one series
FEW = 3  #: number of repeats that is not yet evidence for several ranks
COUNTED = 0.5  #: share of rows that a counter has to be in
COUNTER_FALLS = 0.02  #: share of rows at which a counter may fall
RISES, TICKS = 0.5, 0.02  #: share of the other rows at which it has to rise; if it is a timer, of whole seconds
PAUSE, PAUSES = 60.0, 20  #: seconds, and multiples of the median distance of rows, from which a pause is mentioned


@dataclass(frozen=True)
class Curve:
    """A metric by step.

    Attributes:
        name: as logged.
        steps: ascending, without repeats.
        values: values of the surviving attempt.
        ghosts: abandoned branches, first to last: steps and values.
    """

    name: str
    steps: Ints
    values: Floats
    ghosts: tuple[tuple[Ints, Floats], ...] = ()


@dataclass(frozen=True)
class Resume:
    """A place where training resumed from a checkpoint, or started again.

    Attributes:
        first_after: first step logged after it.
        stopped_after: last step logged before it; ``None`` if the log begins with it.
        repeated: steps logged by both attempts: ``stopped_after - first_after + 1``, or 0.
        loaded: step of the checkpoint, from a line of the log; ``None`` if no line states it.
        fresh: whether the log says that nothing was loaded.
        why: the evidence.
        difference: median of ``|log loss after - log loss before|`` over the repeated steps, in nats; NaN if none. With
            the same data in the same order, it is the noise of the arithmetic.
        time: seconds since the epoch of the first row after it; NaN if the log has no absolute times.
    """

    first_after: int
    stopped_after: int | None
    repeated: int
    loaded: int | None
    fresh: bool
    why: str
    difference: float = math.nan
    time: float = math.nan


@dataclass
class JoinedLog:
    """The curves of one log.

    Attributes:
        log: their log.
        curves: name as logged → curve.
        main: name → ``loss``, ``lr``, ``grad_norm`` or ``throughput``, for the best metric of each meaning.
        resumes: by the loss, or by the longest metric if no loss is logged.
        interval: median distance of two logged steps.
        pauses: of more than :data:`PAUSE` seconds and :data:`PAUSES` times the median: the step before, the step after,
            seconds; ``None`` if the log has no absolute times. A pause alone is not a resume.
        points: rows of the main series with those of abandoned branches.
        twice: steps that are logged again at once, with the same value.
        unit: of the steps of its main series; if not ``step``, they are not those of checkpoints.
    """

    log: MetricLog
    curves: dict[str, Curve] = field(default_factory=dict)
    main: dict[str, str] = field(default_factory=dict)
    resumes: list[Resume] = field(default_factory=list)
    interval: int = 1
    pauses: list[tuple[int, int, float]] | None = None
    points: int = 0
    twice: list[int] = field(default_factory=list)
    unit: str = "step"
    notes: list[str] = field(default_factory=list)

    @property
    def loss(self) -> Curve | None:
        """The curve of the loss."""
        name = next((name for name, what in self.main.items() if what == "loss"), None)
        return None if name is None else self.curves[name]


def join(log: MetricLog) -> JoinedLog:
    """Return a log's curves without the steps that a later attempt has overwritten, and its resumes."""
    out = JoinedLog(log)
    names = [(name, log.points(name)) for name in log.columns if not name.endswith(" vs samples")]
    if not names:
        return out
    for what in MEANINGS:
        name = pick_metric(what, names)
        if name is not None:
            out.main[name] = what
    series = next((name for name, what in out.main.items() if what == "loss"), None)
    if series is None:
        series = max(names, key=lambda one: (one[1], one[0]))[0]
    out.points = log.points(series)
    marks = [] if log.by_metric else _starts(log, log.columns[series])
    for name, _ in names:
        column = log.columns[name]
        steps, unit, note = _in_steps(column, log, name)
        if name == series:
            out.unit = unit
            out.notes += [note] if note else []
            steps, per_epoch = _whole_run(steps, column, log)
            if per_epoch:
                out.notes.append("the step begins again in every epoch; the steps of the epochs before were added")
        elif "epoch" in log.columns and not log.by_metric:
            steps, _ = _whole_run(steps, column, log)
        rows = np.frombuffer(column.rows, np.int64)
        values = np.frombuffer(column.values, np.float64)
        seen = sorted([*marks, *_again_after_a_pause(steps, rows, log)], key=lambda mark: mark.row)
        kept, starts, note = _attempts(steps, values, rows, seen)
        if note and name == series:
            out.notes.append(note)
        out.curves[name] = _surviving(name, steps[kept], values[kept], starts)
        if name == series:
            out.interval = _interval(out.curves[name].steps)
            out.resumes = _resumes(steps[kept], values[kept], rows[kept], starts, seen, log)
            out.pauses = _pauses(steps[kept], rows[kept], log)
            if len(steps) - len(kept) <= FEW:
                out.twice = np.delete(steps, kept).tolist()
    return out


def _starts(log: MetricLog, series: LoggedColumn) -> list[StartMark]:
    """Return the marks of a log, and the rows where a counter falls that only rises while a program runs."""
    rows = np.frombuffer(series.rows, np.int64)
    falls = rows[np.flatnonzero(np.diff(np.frombuffer(series.steps, np.int64)) <= 0) + 1]
    known = np.unique(np.concatenate([falls, np.array([mark.row for mark in log.starts], np.int64)]))
    found = _not_periodic(log.starts, len(rows)) + _other_processes(log, rows)
    epochs = next((column for name, column in log.columns.items() if counter(name) == "epoch"), None)
    kinds = [(name, counter(name), column, RISES) for name, column in log.columns.items()]
    timers = [(name, "elapsed", column, TICKS) for name, column in log.counters.items() if name != PROCESS]
    for name, what, column, rises in [*kinds, *timers]:
        if what is None:
            continue
        here = np.isin(np.frombuffer(column.rows, np.int64), rows)
        at, values = np.frombuffer(column.rows, np.int64)[here], np.frombuffer(column.values, np.float64)[here]
        if len(at) < COUNTED * len(rows):
            continue
        for fall in _falls(what, at, values, epochs, rises):
            announced = known[(known > at[fall - 1]) & (known <= at[fall])]
            words = f"{name!r}" if name in log.columns else name
            text = f"{words} falls from {values[fall - 1]:,.6g} to {values[fall]:,.6g}"
            found.append(StartMark(int(announced[0] if len(announced) else at[fall]), "counter", text=text))
    return sorted(found, key=lambda mark: mark.row)


def _again_after_a_pause(steps: Ints, rows: Ints, log: MetricLog) -> list[StartMark]:
    """Return the rows that repeat a step after a long time without a row: nothing else writes one step twice."""
    if not len(rows) or rows[-1] >= len(log.times):
        return []
    waits = np.diff(np.frombuffer(log.times, np.float64)[rows])
    usual = float(np.median(waits)) if len(waits) else 0.0
    again = np.flatnonzero((np.diff(steps) == 0) & (waits > max(PAUSE, PAUSES * usual))) + 1
    return [StartMark(int(rows[at]), "pause", text="a step is logged again") for at in again]


def _not_periodic(marks: Sequence[StartMark], rows: int) -> list[StartMark]:
    """Return marks without those that the program's first lines gave, if it prints them again and again."""
    again = np.array([mark.row for mark in marks if mark.why == "opening"], np.int64)
    intervals = np.diff(again)
    often = len(again) > max(FEW, COUNTER_FALLS * rows)
    if often or (len(again) > FEW and intervals.max() - intervals.min() <= 0.02 * intervals.max()):
        return [mark for mark in marks if mark.why != "opening"]
    return list(marks)


def _other_processes(log: MetricLog, rows: Ints) -> list[StartMark]:
    """Return the rows from which another process writes, unless several write in turn."""
    column = log.counters.get(PROCESS)
    if column is None or len(column.rows) < COUNTED * len(rows):
        return []
    numbers, at = np.frombuffer(column.values, np.float64), np.frombuffer(column.rows, np.int64)
    changes = np.flatnonzero(np.diff(numbers)) + 1
    if len(changes) >= 2 * len(np.unique(numbers)):
        return []
    texts = (f"process {numbers[n]:.0f} continues after process {numbers[n - 1]:.0f}" for n in changes)
    return [StartMark(int(at[n]), "new process", text=text) for n, text in zip(changes, texts, strict=True)]


def _falls(what: str, rows: Ints, values: Floats, epochs: LoggedColumn | None, rises: float) -> Ints:
    """Return the positions at which a counter restarts; empty unless it counts over the whole run."""
    change = np.diff(values)
    falls = np.flatnonzero(change < 0) + 1
    others = len(change) - len(falls)
    none = falls[:0]
    if not len(falls) or len(falls) > max(min(FEW, len(values) // 8), COUNTER_FALLS * len(values)):
        return none
    if what != "epoch" and (change > 0).sum() < rises * others:
        return none  # the tokens of a batch, the time of a step
    if what == "epoch":  # the finished share of an epoch falls from 1 to 0
        return falls[~((values[falls - 1] > 0.9) & (values[falls - 1] <= 1) & (values[falls] < 0.1))]
    if epochs is not None:  # counted in each epoch
        of_rows = np.searchsorted(np.frombuffer(epochs.rows, np.int64), rows, "right") - 1
        numbers = np.floor(np.frombuffer(epochs.values, np.float64)[np.maximum(of_rows, 0)])
        if np.array_equal(np.flatnonzero(np.diff(numbers) > 0) + 1, falls):
            return none
    intervals = np.diff(falls)
    return none if len(falls) > 2 and intervals.max() - intervals.min() <= 0.02 * intervals.max() else falls


def _in_steps(column: LoggedColumn, log: MetricLog, name: str) -> tuple[Ints, str, str]:
    """Return the steps of a column, their unit, and a note. Samples are divided by the batch, if a row is written for
    every update.
    """
    steps = np.frombuffer(column.steps, np.int64)
    # DeepSpeed's monitor writes at every gradient accumulation boundary (engine.py, _write_monitor)
    if log.kind != "deepspeed_csv" and not name.startswith("Train/Samples/"):
        return steps, log.unit, ""
    rising = np.diff(steps)
    rising = rising[rising > 0]
    batch = int(rising.min()) if len(rising) else 0
    if batch <= 1 or (steps % batch).any():
        return steps, "samples", ""
    note = f"{log.path!r} counts samples; its steps are samples / {batch:,}, the difference between two rows"
    return steps // batch, "step", note


def _whole_run(steps: Ints, column: LoggedColumn, log: MetricLog) -> tuple[Ints, bool]:
    """Add the steps of earlier epochs if the step begins again in each."""
    epochs = log.columns.get("epoch")
    falls = np.flatnonzero(np.diff(steps) <= 0) + 1
    if epochs is None or not len(falls) or (steps[falls] > max(1, int(steps[0]))).any():
        return steps, False
    at = np.searchsorted(np.frombuffer(epochs.rows, np.int64), np.frombuffer(column.rows, np.int64), "right") - 1
    numbers = np.floor(np.frombuffer(epochs.values, np.float64)[np.maximum(at, 0)])
    if not (numbers[falls] > numbers[falls - 1]).all():
        return steps, False
    offsets = np.zeros(len(steps), np.int64)
    offsets[falls] = steps[falls - 1] + (1 if steps[0] == 0 else 0)
    return steps + np.cumsum(offsets), True


def _attempts(steps: Ints, values: Floats, rows: Ints, marks: Sequence[StartMark]) -> tuple[Ints, list[int], str]:
    """Return the positions of the points that count, and the positions among them at which an attempt begins."""
    kept = np.arange(len(steps))
    marked = np.searchsorted(rows, np.array([mark.row for mark in marks], np.int64))
    change = np.diff(steps)
    again = np.flatnonzero(change == 0) + 1
    again = again[~np.isin(again, marked)]
    note = ""
    if len(again):
        same = (values[again] == values[again - 1]) | (np.isnan(values[again]) & np.isnan(values[again - 1]))
        if (~same).sum() > max(FEW, REPEATED * len(steps)):
            note = "many steps are logged several times in a row, with other values; the first of each is used"
            same[:] = True
        kept = np.delete(kept, again[same])
    falls = np.flatnonzero(np.diff(steps[kept]) <= 0) + 1
    if len(falls) > max(FEW, FALLS * len(kept)):
        first = np.sort(np.unique(steps[kept], return_index=True)[1])
        note = "the steps are out of order throughout, as when several ranks write one file; the first of each is used"
        return kept[_rising(steps[kept][first], first)], [], f"{note}, and resumes are unknown"
    edges = np.searchsorted(kept, marked)
    starts = sorted({int(at) for at in [*falls, *edges] if 0 < at < len(kept)})
    return kept, starts, note


def _rising(steps: Ints, at: Ints) -> Ints:
    return at[np.argsort(steps, kind="stable")]


def _surviving(name: str, steps: Ints, values: Floats, starts: Sequence[int]) -> Curve:
    edges = [0, *starts, len(steps)]
    least = np.iinfo(np.int64).max  # first step of the attempts after this one
    parts, ghosts = [], []
    for begin, end in zip(reversed(edges[:-1]), reversed(edges[1:]), strict=True):
        if begin == end:
            continue
        kept = steps[begin:end] < least
        parts.append((steps[begin:end][kept], values[begin:end][kept]))
        if not kept.all():
            ghosts.append((steps[begin:end][~kept], values[begin:end][~kept]))
        least = min(least, int(steps[begin]))
    if not parts:
        return Curve(name, steps, values)
    parts.reverse()
    ghosts.reverse()
    return Curve(name, np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), tuple(ghosts))


def _interval(steps: Ints) -> int:
    return max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1


def _resumes(
    steps: Ints, values: Floats, rows: Ints, starts: Sequence[int], marks: Sequence[StartMark], log: MetricLog
) -> list[Resume]:
    by_position: dict[int, list[StartMark]] = {}
    for mark in marks:
        by_position.setdefault(int(np.searchsorted(rows, mark.row)), []).append(mark)
    found, pauses = [], _pauses(steps, rows, log) or []
    for at in sorted({0, *starts}):
        if at >= len(steps):
            continue
        first, marks_here = int(steps[at]), by_position.get(at, [])
        loaded = next((mark.loaded for mark in marks_here if mark.loaded is not None), None)
        fresh = any(mark.fresh for mark in marks_here) and loaded is None
        if at == 0:
            # the first attempt: a resume only if a line names the loaded step, and training continued from there
            adjacent = log.unit == "lines" or first - _interval(steps) <= (loaded or 0) <= first
            if loaded is None or loaded <= 0 or not adjacent:
                continue
            found.append(
                Resume(first, None, 0, loaded, False, _why(marks_here, 0, log.unit), time=_time(log, int(rows[at])))
            )
            continue
        stopped = int(steps[at - 1])
        repeated = max(0, stopped - first + 1)
        why = _why(marks_here, repeated, log.unit)
        why += "".join(f"; no row for {waited(pause[2])}" for pause in pauses if pause[:2] == (stopped, first))
        difference = _difference(steps, values, at) if repeated else math.nan
        found.append(Resume(first, stopped, repeated, loaded, fresh, why, difference, _time(log, int(rows[at]))))
    return found


def _why(marks: Sequence[StartMark], repeated: int, unit: str) -> str:
    words = [mark.text or mark.why for mark in marks if mark.why != "counter"]
    counters = [mark.text for mark in marks if mark.why == "counter"]
    row = "row" if unit == "lines" else "step"
    if counters and (not (words or repeated) or unit == "lines"):
        words.append(counters[0])
    if repeated:
        words.append(f"{repeated:,} {row}s are logged again" if repeated > 1 else f"a {row} is logged again")
    return "; ".join(dict.fromkeys(words)) or "the step does not rise"


def _pauses(steps: Ints, rows: Ints, log: MetricLog) -> list[tuple[int, int, float]] | None:
    if not len(rows) or rows[-1] >= len(log.times):
        return None
    waits = np.diff(np.frombuffer(log.times, np.float64)[rows])
    usual = float(np.median(waits)) if len(waits) else 0.0
    long = np.flatnonzero(waits > max(PAUSE, PAUSES * usual)).tolist()
    return [(int(steps[at]), int(steps[at + 1]), float(waits[at])) for at in long]


def waited(seconds: float) -> str:
    """Return how long nothing was written, in words.

    >>> waited(150), waited(7380)
    ('2 min', '2.0 h')
    """
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:,.0f} min"


def _difference(steps: Ints, values: Floats, at: int) -> float:
    """Return the median |difference| of the log loss over the steps that both attempts logged."""
    before = dict(zip(steps[:at].tolist(), values[:at].tolist(), strict=True))  # the last write of a step counts
    differences = []
    for step, value in zip(steps[at:].tolist(), values[at:].tolist(), strict=True):
        old = before.get(step)
        if old is None:
            break
        if old > 0 and value > 0 and math.isfinite(old) and math.isfinite(value):
            differences.append(abs(math.log(value / old)))
    return float(np.median(differences)) if differences else math.nan


def _time(log: MetricLog, row: int) -> float:
    return log.times[row] if row < len(log.times) else math.nan
