"""The metrics of one log in the order in which they were written, as columns.

::

    steps   1 2 3 … 72 │ 61 62 …        row numbers continue; at │ the trainer was restarted
    loss    10.4 … 3.9 │ 4.4 …
    val     -  -  2.1  │ -              a column holds only the rows that have a value

A row takes 24 bytes per value and no Python object, so a log of gigabytes needs memory only for its numbers, up to
:data:`VALUES` of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

VALUES = 20_000_000  #: maximum values of one log: 480 MB
COLUMNS = 4096  #: maximum names of one log; a file of random text must not create a million columns
NAME = 200  #: characters of a name
STEP_LIMIT = 1 << 62
PROCESS = "the process id"  #: the name of the counter that says which process wrote a row


class LogFull(Exception):
    """There are more values than the limit; the reader stops."""


@dataclass(slots=True)
class LoggedColumn:
    """Values of one metric: their row numbers, steps and values."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class StartMark:
    """A place in the log where the trainer was started.

    Attributes:
        row: number of the first row after it.
        why: ``new file``, ``restart line``, ``start event``, ``counter``, ``new process``, ``pause`` (before a
            row that is there again), ``opening`` (the program's first lines are printed again), or a sentence.
        loaded: step of the checkpoint that was loaded according to the log; ``None`` if it does not state it.
        first: step of the first row after it, if the log says so.
        fresh: whether the log says that nothing was loaded.
        text: the line, for people.
    """

    row: int
    why: str
    loaded: int | None = None
    first: int | None = None
    fresh: bool = False
    text: str = ""


@dataclass(slots=True)
class MetricLog:
    """The log of one run by one program.

    Attributes:
        path: path of its first file, relative to the folder that was searched.
        kind: the format: ``tensorboard``, ``megatron`` ….
        unit: the unit of its steps: ``step``, or ``samples``, ``tokens``, ``lines`` if no step is logged.
        columns: metric → its values.
        counters: values besides the metrics that rise while a program runs: its running time, that of its progress bar;
            and :data:`PROCESS`.
        starts: the starts of the trainer, in written order.
        times: seconds by row, by the log's own clock, whatever its time zone; empty if the log has no times.
        files: all its files.
        notes: sentences on what was not read, and why.
        zero_based: whether the program numbers the first update 0.
        by_metric: whether each metric has a separate file: rows of different metrics have no common order.
        saved: steps of the checkpoints that the program says it saved.
        unknown: of a file without rows, what it holds; a note only if the run has no other log.
        opened: whether the program prints lines when it starts: no start can go unnoticed.
    """

    path: str
    kind: str
    unit: str = "step"
    columns: dict[str, LoggedColumn] = field(default_factory=dict)
    counters: dict[str, LoggedColumn] = field(default_factory=dict)
    starts: list[StartMark] = field(default_factory=list)
    times: array[float] = field(default_factory=lambda: array("d"))
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    zero_based: bool = False
    by_metric: bool = False
    saved: list[int] = field(default_factory=list)
    opened: bool = False
    unknown: str = ""
    rows: int = 0
    kept: int = 0
    limit: int = VALUES

    def add(
        self,
        step: int,
        values: Mapping[str, float],
        time: float | None = None,
        counters: Mapping[str, float] | None = None,
    ) -> None:
        """Append a row; rows without a value are left out.

        Raises:
            LogFull: there are more values than :attr:`limit`.
        """
        if not values or not 0 <= step < STEP_LIMIT:
            return
        if self.kept + len(values) > self.limit:
            raise LogFull
        self._keep(self.columns, step, values)
        if counters:
            self._keep(self.counters, step, counters)
        if time is not None and len(self.times) == self.rows:  # a log has a time in every row or in none
            self.times.append(time)
        self.rows += 1

    def _keep(self, columns: dict[str, LoggedColumn], step: int, values: Mapping[str, float]) -> None:
        row = self.rows
        for name, value in values.items():
            column = columns.get(name)
            if column is None:
                if len(columns) >= COLUMNS or len(name) > NAME:
                    continue
                column = columns[name] = LoggedColumn()
            column.rows.append(row)
            column.steps.append(step)
            column.values.append(value)
            self.kept += 1

    def extend(self, more: MetricLog, why: str = "") -> None:
        """Append the rows of a further file; ``why``, if given, is the mark of a start between the two.

        Raises:
            LogFull: there are more values than :attr:`limit`; nothing was appended.
        """
        if self.kept + more.kept > self.limit:
            raise LogFull
        base = self.rows
        if why:
            self.start(StartMark(base, why))
        for mark in more.starts:
            self.start(replace(mark, row=base + mark.row))
        for mine, theirs in ((self.columns, more.columns), (self.counters, more.counters)):
            for name, column in theirs.items():
                own = mine.setdefault(name, LoggedColumn())
                own.rows.extend(row + base for row in column.rows)
                own.steps.extend(column.steps)
                own.values.extend(column.values)
        if len(self.times) == base:
            self.times.extend(more.times)
        self.rows += more.rows
        self.kept += more.kept
        self.files += more.files
        self.saved += more.saved
        self.opened &= more.opened
        self.notes += more.notes

    def start(self, mark: StartMark) -> None:
        """Note that the trainer was started here; lines about one start are merged into one mark."""
        if self.starts and self.starts[-1].row == mark.row:
            old = self.starts[-1]
            mark = StartMark(
                mark.row,
                old.why if old.why == "restart line" else mark.why,
                mark.loaded if mark.loaded is not None else old.loaded,
                mark.first if mark.first is not None else old.first,
                old.fresh or mark.fresh,
                old.text if old.loaded is not None and mark.loaded is None else mark.text or old.text,
            )
            self.starts[-1] = mark
        else:
            self.starts.append(mark)

    def points(self, name: str) -> int:
        """Count the values of a metric."""
        return len(self.columns[name].steps)


def seconds_of(text: str) -> float | None:
    """Return a date and time in ISO 8601 as seconds, in UTC if no time zone is given; ``None`` if it is not one."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
