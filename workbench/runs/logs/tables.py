"""Logs of rows: Hugging Face's ``trainer_state.json``, JSON lines, CSV, MLflow's file store, and two SQLite databases.

::

    checkpoint-N/trainer_state.json   log_history: [{step, epoch, loss, learning_rate, …}, …]  transformers 5.23
    *.jsonl                           {"step": 61, "loss": …} · {"step": 61, "data": {…}} · {"Step": …}
    metrics.csv                       epoch,grad_norm,lr-Adam,step,train_loss; empty cells; header again  lightning 2.6
    Train_Samples_train_loss.csv      step,train_loss; the header again at each start; steps are samples  deepspeed 0.18
    mlruns/<exp>/<run>/metrics/<name> timestamp_ms value step                                             mlflow 3.17
    mlflow.db                         metrics(key, value, timestamp, run_uuid, step, is_nan)              mlflow 3.17
    <project>.db                      metrics(id, run_id, step, timestamp, metrics JSON)                  trackio 0.43

Rows keep their written order; steps that are logged twice are resolved later.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from workbench.core.place import Place
from workbench.core.source import Source
from workbench.errors import CorruptError, UsageError
from workbench.names.metrics import STEP_NAMES, counter, is_validation, normalised
from workbench.runs.logs.lines import end_of_lines, stripped_lines
from workbench.runs.logs.plain import number
from workbench.runs.logs.printed import EXAMPLE, numbers_of
from workbench.runs.logs.record import VALUES, LogFull, MetricLog, StartMark, seconds_of

STATE = 256 << 20  #: bytes of the largest trainer_state.json that is decoded
CELLS = 4096  #: columns of a CSV
FIELD = 1 << 17  #: characters of a row with a field that is quoted over several lines
#: Columns that count something other than updates.
_UNITS = {"samples": "samples", "consumed_samples": "samples", "num_tokens": "tokens", "tokens": "tokens"}
#: Numbers about the run, not measurements at a step.
_ABOUT = {"total_steps", "percentage", "_runtime", "_timestamp", "timestamp", "time", "wall_time"}
#: Names of the time of a row.
TIMES = ("Time", "timestamp", "_timestamp", "time", "wall_time", "datetime", "date")
#: Names of the column that says on which data a row was measured; mmengine calls it ``mode``.
SPLITS = ("split", "phase", "mode", "stage", "subset")
_DURATION = re.compile(r"(?:(\d{1,6}) days?, )?(?:(\d{1,6}):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)")


def step_name(names: Mapping[str, Any] | list[str]) -> str | None:
    """Return the name under which a row has its step, best first; ``None`` if no name is known."""
    plain = {normalised(name): name for name in reversed(list(names))}
    return next((plain[name] for name in STEP_NAMES if name in plain), None)


def whole(value: Any) -> int | None:
    """Return a step: an integer, a float without a fraction, or a text of one."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(found) if math.isfinite(found) and found == int(found) else None


def read_trainer_state(log: MetricLog, place: Place, path: str) -> None:
    """Append the history of the Hugging Face Trainer. The row about the whole training is not a point of a curve.

    Raises:
        OpenError: it cannot be read, or is not JSON. LogFull: there are more values than are kept.
    """
    if place.stat(path).size > STATE:
        log.notes.append(f"{path!r} has more than {STATE:,} bytes; it was not read")
        return
    document = place.read_json(path)
    history = document.get("log_history") if isinstance(document, dict) else None
    if not isinstance(history, list):
        raise CorruptError(f"{path!r} has no list 'log_history'")
    rows: list[tuple[int, dict[str, float]]] = []
    for row in history:
        step = whole(row.get("step")) if isinstance(row, dict) and "train_runtime" not in row else None
        if step is not None:
            rows.append((step, {name: value for name, value in numbers_of(row).items() if name != "step"}))
    begin = _branch(log, rows)
    if begin < len(rows) and log.rows and rows[begin][0] <= last_step(log):
        log.start(StartMark(log.rows, "history differs", text=f"{path!r} differs from step {rows[begin][0]:,} on"))
    for step, values in rows[begin:]:
        log.add(step, values)


def last_step(log: MetricLog) -> int:
    """Return the largest last step of a log's columns."""
    return max((column.steps[-1] for column in log.columns.values()), default=-1)


def _branch(log: MetricLog, rows: list[tuple[int, dict[str, float]]]) -> int:
    """Return the first of the rows that is not logged yet: histories of one branch are prefixes of one another."""
    known: dict[str, dict[int, float]] = {
        name: dict(zip(column.steps, column.values, strict=True)) for name, column in log.columns.items()
    }
    for at, (step, values) in enumerate(rows):
        for name, value in values.items():
            old = known.get(name, {}).get(step)
            if old is None or (old != value and not (math.isnan(old) and math.isnan(value))):
                return at
    return len(rows)


class JsonRows:
    """Rows of JSON lines; a line that is not an object with a step is skipped."""

    def __init__(self, path: str, limit: int = VALUES) -> None:
        self.log = MetricLog(path, "jsonl", files=[path], limit=limit)
        self._chosen: str | None = None
        self._roles: dict[str, str] = {}
        self._unread, self._first = 0, ""

    def feed(self, line: str) -> None:
        """Take one line. Raises LogFull: there are more values than are kept."""
        self._first = self._first or line.strip()[:EXAMPLE]
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            self._unread += 1
            return
        for one in row if isinstance(row, list) else [row]:
            self.row(one)

    def row(self, row: Any) -> None:
        """Take one decoded row. Raises LogFull: there are more values than are kept."""
        if not isinstance(row, dict):
            return
        if self._chosen is None or self._chosen not in row:
            self._chosen, self._roles = step_name(row), {}
            if self._chosen is not None:
                self.log.unit = _UNITS.get(normalised(self._chosen), "step")
        step = None if self._chosen is None else whole(row[self._chosen])
        if step is None:
            self._unread += 1
            return
        data = row.get("data")  # verl
        data = data if isinstance(data, dict) else row
        values: dict[str, float] = {}
        counters: dict[str, float] = {}
        for name, value in numbers_of(data).items():
            role = self._roles.get(name) or self._role(name)
            if role == "counter":
                counters[name] = value
            elif role != "none":
                values[name] = value
        for name, value in data.items():
            if type(value) is not str or name in values:
                continue
            role = self._roles.get(name) or self._role(name)
            if role in ("counter", "timer") and (seconds := duration(value)) is not None:
                counters[name] = seconds
            elif role == "metric" and (plain := number(value)) is not None:
                values[name] = plain
        self.log.add(step, _of_split(row, values), _time(row), counters)

    def _role(self, name: str) -> str:
        role = "none" if name == self._chosen else _role(name)
        if len(self._roles) < CELLS:
            self._roles[name] = role
        return role

    @property
    def kept(self) -> int:
        """Values so far."""
        return self.log.kept

    def done(self) -> list[MetricLog]:
        """Return the log."""
        if self._unread:
            are = "line is not a row" if self._unread == 1 else "lines are not rows"
            self.log.notes.append(f"{self.log.path!r}: {self._unread:,} {are} with a step")
            if not self.log.rows and self._first:
                self.log.notes[-1] += f", the first {self._first!r}"
        return [self.log]


def _role(name: str) -> str:
    """Classify a column: ``metric``; ``timer``, which counts as one only if it contains numbers; ``counter``; or
    ``none``.
    """
    elapsed = counter(name) == "elapsed"
    if normalised(name) in _ABOUT:
        return "counter" if elapsed else "none"
    return "timer" if elapsed else "metric"


def _of_split(row: Mapping[str, Any], values: dict[str, float]) -> dict[str, float]:
    """Return the values of a row, named after its split if that is not the training's: ``val/loss``."""
    split = next((row[name] for name in SPLITS if isinstance(row.get(name), str)), "")
    if not is_validation(split):
        return values
    return {
        name if is_validation(name) or counter(name) else f"{split}/{name}": value for name, value in values.items()
    }


def duration(text: str) -> float | None:
    """Return the seconds of ``0:05:12``, ``05:12`` or ``1 day, 0:05:12.5``; ``None`` for anything else."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _time(row: Mapping[str, Any]) -> float | None:
    for name in TIMES:
        value = row.get(name)
        if isinstance(value, str):
            found = seconds_of(value) if number(value) is None else number(value)
            if found is None:
                continue
            value = found
        if isinstance(value, (int, float)) and 0.9e9 < value < 1e10:
            return float(value)
    return None


class CsvRows:
    """Rows of a CSV. A line that equals the header, or another header, is a new start."""

    def __init__(self, path: str, kind: str = "csv", limit: int = VALUES) -> None:
        self.log = MetricLog(path, kind, files=[path], limit=limit)
        self.log.zero_based = kind == "lightning_csv"
        self.log.by_metric = kind == "deepspeed_csv"
        self._columns: list[tuple[int, str, str]] = []
        self._times: list[tuple[int, str]] = []
        self._splits: list[tuple[int, str]] = []
        self._at: int | None = None
        self._open = ""  # a quoted field that continues in the next line
        self._other = ""  # its first line, if that names no step: it is not a log
        self._between = ","

    def feed(self, line: str) -> None:
        """Take one line. Raises LogFull: there are more values than are kept."""
        if self._other:
            return
        if self._at is None:
            plain = line.replace('"', "")
            self._between = next((one for one in ";\t" if one in plain and step_name(plain.split(one))), ",")
        cells = self._cells(line)
        if not cells or len(cells) > CELLS:
            return
        at = self._at
        if at is None or (len(cells) > at and number(cells[at]) is None and step_name(cells)):
            self._header(cells)
            return
        step = whole(cells[at]) if len(cells) > at else None
        if step is None:
            return
        values: dict[str, float] = {}
        counters: dict[str, float] = {}
        for n, name, role in self._columns:
            text = cells[n] if n < len(cells) else ""
            if self._between == ";":  # where the decimal point is a comma
                text = text.replace(",", ".")
            value = number(text) if text else None
            if value is not None:
                (counters if role == "counter" else values)[name] = value
            elif role != "metric" and (value := duration(text)) is not None:
                counters[name] = value
        time = {name: cells[n] for n, name in self._times if n < len(cells)}
        split = {name: cells[n] for n, name in self._splits if n < len(cells)}
        self.log.add(step, _of_split(split, values), _time(time) if time else None, counters)

    def _header(self, cells: list[str]) -> None:
        name = step_name(cells)
        if name is None:
            self._other = ",".join(cells)[:EXAMPLE]
            return
        if self._at is not None:
            self.log.start(StartMark(self.log.rows, "restart line", text="the header is repeated"))
        self._at = cells.index(name)
        self.log.unit = "samples" if self.log.by_metric else _UNITS.get(normalised(name), "step")
        roles = ((n, cell, _role(cell)) for n, cell in enumerate(cells) if n != self._at)
        # W&B's export adds the extremes of each point
        self._times = [(n, cell) for n, cell in enumerate(cells) if cell in TIMES]
        self._splits = [(n, cell) for n, cell in enumerate(cells) if cell in SPLITS]
        self._columns = [one for one in roles if one[2] != "none" and not one[1].endswith(("__MIN", "__MAX"))]

    def _cells(self, line: str) -> list[str]:
        line = (self._open + line).replace("\0", "")
        self._open = ""
        if '"' not in line:
            return line.split(self._between)
        if line.count('"') % 2 and len(line) <= FIELD:
            self._open = line
            return []
        try:
            return next(csv.reader([line], delimiter=self._between))
        except (csv.Error, StopIteration):  # a field of more than 128 KiB
            return []

    @property
    def kept(self) -> int:
        """Values so far."""
        return self.log.kept

    def done(self) -> list[MetricLog]:
        """Return the log."""
        if self._other:
            self.log.unknown = f"no column with a step in the first line, {self._other!r}"
        return [self.log]


def read_mlflow(log: MetricLog, source: Source, path: str, name: str, growing: bool = False) -> None:
    """Append one metric of MLflow's file store: a line ``timestamp_ms value step`` per point; ``growing`` leaves out an
    unterminated last line.

    Raises:
        LogFull: there are more values than are kept.
    """
    log.by_metric = True
    log.files.append(path)
    for line in stripped_lines(source, 0, end_of_lines(source) if growing else None):
        parts = line.split()
        if len(parts) not in (2, 3):
            continue
        value, step = number(parts[1]), whole(parts[2]) if len(parts) == 3 else 0
        stamp = number(parts[0])
        if value is not None and step is not None:
            log.add(step, {name: value}, None if stamp is None else stamp / 1000)


def read_json_rows(place: Place, path: str) -> list[MetricLog]:
    """Return the log of a JSON document that is a list of rows, or of a file of JSON lines; none for any other one.

    Raises:
        OpenError: it cannot be read. LogFull: there are more values than are kept.
    """
    rows = JsonRows(path)
    try:
        document = place.read_json(path) if place.stat(path).size <= STATE else None
    except CorruptError:
        for line in stripped_lines(place.source(path)):
            rows.feed(line)
        return rows.done() if rows.log.rows else []
    for row in document if isinstance(document, list) else []:
        rows.row(row)
    return rows.done() if rows.log.rows else []


# ---- SQLite -------------------------------------------------------------------------------------------------------


def read_databases(place: Place, path: str, limit: int) -> list[MetricLog]:
    """Return the runs of an MLflow or trackio database, read-only.

    Raises:
        CorruptError: it is damaged. UsageError: it is in a store; copy it to a disk.
    """
    if not place.local:
        raise UsageError(f"{path!r} is an SQLite database, which cannot be read in a store: copy it to a disk")
    # immutable: no lock is taken, no file is created, and a writer is not disturbed; rows that are still in the
    # write-ahead log are not seen
    uri = f"file:{quote(place.resolve(path))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            columns = {row[1] for row in database.execute("pragma table_info(metrics)")}
            if {"key", "value", "run_uuid", "step", "is_nan", "timestamp"} <= columns:
                return _mlflow_rows(database, path, limit)
            if {"id", "run_id", "step", "metrics"} <= columns:
                return _trackio_rows(database, path, limit)
            return []
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise CorruptError(f"{path!r} is damaged: {error}") from None


def _mlflow_rows(database: sqlite3.Connection, path: str, limit: int) -> list[MetricLog]:
    logs: dict[str, MetricLog] = {}
    # an exact repeat of a row is dropped by the primary key, so overlaps differ in their time
    rows = database.execute("select run_uuid, key, value, step, is_nan, timestamp from metrics order by rowid")
    for run, key, value, step, nan, stamp in rows:
        if not isinstance(key, str) or not isinstance(value, (int, float)) or type(step) is not int:
            continue
        log = logs.get(run)
        if log is None:
            log = logs[run] = MetricLog(f"{path}:{run}", "mlflow_sqlite", files=[path], limit=limit, by_metric=True)
        try:
            log.add(step, {key: math.nan if nan else float(value)}, stamp / 1000 if isinstance(stamp, int) else None)
        except LogFull:
            log.notes.append(f"{path!r} has more than {limit:,} values; the rest was not read")
            break
    return list(logs.values())


def _trackio_rows(database: sqlite3.Connection, path: str, limit: int) -> list[MetricLog]:
    logs: dict[str, MetricLog] = {}
    for run, step, data in database.execute("select run_id, step, metrics from metrics order by id"):
        try:
            row = json.loads(data)
        except (ValueError, TypeError, RecursionError):
            continue
        if type(step) is not int or not isinstance(row, dict):
            continue
        log = logs.get(run)
        if log is None:
            log = logs[run] = MetricLog(f"{path}:{run}", "trackio", files=[path], limit=limit)
        try:
            log.add(step, numbers_of(row))
        except LogFull:
            log.notes.append(f"{path!r} has more than {limit:,} values; the rest was not read")
            break
    return list(logs.values())
