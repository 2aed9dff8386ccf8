"""Training logs: which files beside or above the checkpoints are logs, and their contents.

::

    run/                              kind            read by
      train.log  slurm-12.out         megatron …      printed   what trainers print, by the line
      metrics.csv  history.jsonl      csv, jsonl      tables    rows of CSV and JSON; history.json is a list of them
      train.log.1.gz  log.jsonl.gz    as without .gz            decompressed in memory
      checkpoint-N/trainer_state.json hf_trainer      tables
      mlruns/  mlflow.db  p.db        mlflow …        tables    file store and SQLite
      runs/exp/events.out.tfevents.*  tensorboard     binary    records of protocol buffers
      wandb/offline-run-*/run-*.wandb wandb           binary

One :class:`~workbench.runs.logs.record.MetricLog` is one run of one program: files that a restart began (the next event
file, the next ``version_N``, the next offline run) are joined in their order. Everything is streamed;
nothing is executed; a file that cannot be read is a note, and the others are read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.core.place import Place
from workbench.errors import UnsafeError, UsageError, WorkbenchError
from workbench.names.metrics import pick_metric
from workbench.names.steps import step_of
from workbench.runs.logs.binary import WANDB_MAGIC, EventsReading, read_wandb
from workbench.runs.logs.grown import FileReading, GrownLogs, LinesReading, read_grown
from workbench.runs.logs.lines import decoded, is_text
from workbench.runs.logs.printed import PrintedLogs
from workbench.runs.logs.record import VALUES, LogFull, MetricLog, StartMark
from workbench.runs.logs.tables import (
    CsvRows,
    JsonRows,
    read_databases,
    read_json_rows,
    read_mlflow,
    read_trainer_state,
)

__all__ = ["ABOVE", "FoundLogs", "GrownLogs", "MetricLog", "StartMark", "find_logs", "is_log", "read_logs"]

DEPTH = 6  #: folders below the root that are searched: mlruns/<experiment>/<run>/metrics/train/loss
ABOVE = 2  #: folders above the root that are searched if there is no log below it
FILES = 2000  #: maximum number of files to examine
FOLDERS = 5000  #: maximum number of folders to examine
STATES = 8  #: newest checkpoints whose trainer_state.json is read; each repeats the history of those before
ARGUMENTS, ARGUMENTS_SIZE, ARGUMENTS_READ = "training_args.bin", 1 << 20, 64  #: bytes; number of such files compared
#: Folders above the checkpoints in which programs put their logs.
LOG_FOLDERS = (
    "runs",
    "tb",
    "tensorboard",
    "wandb",
    "mlruns",
    "lightning_logs",
    "logs",
    "metrics",
    "csv_monitor",
    "trackio",
)

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)")
_WANDB = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
_TEXT = re.compile(r"(?:.*\.(?:log|out|err|txt)|stdout|stderr|nohup|log)(?:\.\d+)?", re.IGNORECASE)
#: Text files that are never logs.
_NOT_TEXT = re.compile(
    r"(?:requirements|readme|license|vocab|merges|latest.*|MARKER|rank\d+|log_rank\d+)\.(?:txt|log)", re.I
)
_JSON = re.compile(r"(?:.*[-_.])?(?:logs?|metrics|history|losses)\.json", re.IGNORECASE)
_PACKED = re.compile(r".*\.(?:jsonl|ndjson|csv|tsv|log|out|txt)\.(?:bz2|xz|zst)", re.IGNORECASE)
#: W&B's own logs, which are about W&B.
_OF_WANDB = re.compile(r"debug(?:-\w+)?\.log")
_VERSION = re.compile(r"version_(\d+)")
#: Folders that each start creates anew: the Trainer's, torchtitan's, Lightning's.
_DATED = re.compile(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.*|\d{8}[-_]\d{4,6}|version_\d+")
_RANKS = re.compile(r"(?:rank|node|worker|proc|gpu|local)[-_]?\d+", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]+")
_SUFFIX = re.compile(r"[-_.]?[0-9]+")
_SQLITE = b"SQLite format 3\0"


@dataclass
class FoundLogs:
    """Logs of a run.

    Attributes:
        logs: the logs that have points, one per run of a program.
        root: the folder that the paths are relative to.
        starts_only: texts without rows that report that a checkpoint was loaded.
        notes: sentences on files that were not read, and why.
        files: paths or URLs of all examined files, including those that turned out not to be logs.
        unknown: sentences on files that look like logs and hold no known form; of interest if nothing else was found.
        restarted: checkpoints after which the Hugging Face Trainer was started with other arguments.
    """

    logs: list[MetricLog] = field(default_factory=list)
    starts_only: list[MetricLog] = field(default_factory=list)
    root: str = ""
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file that may be a log: its kind, the run of a program it belongs to, and its place in that run's order."""

    kind: str
    group: str
    order: tuple[Any, ...]
    path: str
    name: str = ""  #: of the metric, if each has a file


def find_logs(
    place: Place,
    *,
    skip: Sequence[str] = (),
    above: int = ABOVE,
    growing: bool = False,
    known: GrownLogs | None = None,
) -> FoundLogs:
    """Return the logs in a run's folder, or else beside it and above.

    Args:
        place: the run's folder.
        skip: checkpoints in it by step, relative paths; only ``trainer_state.json`` of the last few is looked for in
            them, and ``training_args.bin`` of some is compared.
        above: folders above it that are searched.
        growing: leave out an unterminated last line.
        known: the earlier readings of these files; of a file that has grown, only the rest is read.

    Logs above count if their name contains the folder's, or if they cannot belong to another run: the folder has to
    be the only one with a name like its own.
    """
    found = _read(place, list(_walk(place, "", DEPTH, set(skip))) + _states(place, skip), growing, known)
    restarted = _other_arguments(place, skip)
    found = _or_above(found, place, above, growing, known)
    found.restarted = restarted
    return found


def _or_above(found: FoundLogs, place: Place, above: int, growing: bool, known: GrownLogs | None) -> FoundLogs:
    at, inner = place, place.name
    for _ in range(above):
        if found.logs:
            return found
        outer = at.above
        if outer is None:
            break
        try:
            files = list(_above(outer, inner))
        except WorkbenchError:
            break
        notes, unknown = found.notes, found.unknown
        found = _read(outer, files, growing, known)
        found.notes, found.unknown = notes + found.notes, unknown or found.unknown
        at, inner = outer, os.path.basename(outer.root)
    return found


def read_logs(
    paths: Sequence[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
    *,
    growing: bool = False,
    known: GrownLogs | None = None,
) -> FoundLogs:
    """Return the logs in files or folders that the user named; ``growing`` and ``known`` as for :func:`find_logs`.

    Raises:
        OpenError: a path does not exist. UsageError: none of the files is a log in a known format.
    """
    out = FoundLogs()
    for path in paths:
        place = Place(path, storage_options)
        if place.file is not None:
            one = _file(place.files, place.file, "", given=True)
            found = _read(place, [one] if one else [LogFile("text", place.file, (), place.file)], growing, known)
        else:
            found = _read(place, [*_walk(place, "", DEPTH, set(), given=True)], growing, known)
        out.logs += found.logs
        out.starts_only += found.starts_only
        out.files += found.files
        out.notes += found.notes
        out.unknown += found.unknown
        out.root = out.root or place.root
    if not out.logs:
        tried = "; ".join((out.notes + out.unknown)[:2])
        raise UsageError(
            f"no log in a known format in {', '.join(repr(os.fsdecode(path)) for path in paths)}"
            + (f" ({tried})" if tried else "")
        )
    return out


# ---- which files --------------------------------------------------------------------------------------------------


def _walk(place: Place, at: str, depth: int, skip: set[str], given: bool = False) -> Iterator[LogFile]:
    budget = [FOLDERS, FILES]
    yield from _folder(place, at, depth, skip, given, budget)


def _folder(place: Place, at: str, depth: int, skip: set[str], given: bool, budget: list[int]) -> Iterator[LogFile]:
    budget[0] -= 1
    try:
        inner = place.sub(at) if at else place
        files, folders = inner.files, inner.folders
    except WorkbenchError:
        return
    if os.path.basename(at) == "metrics" and "mlruns" in f"{os.path.basename(place.root)}/{at}".split("/"):
        yield from _mlflow(place, at, at, budget)
        return
    if inner.file is not None:
        return
    for name in files:
        if budget[1] <= 0:
            return
        one = _file(files, name, at, given)
        if one is not None:
            budget[1] -= 1
            yield one
    for folder in folders:
        path = f"{at}/{folder}" if at else folder
        if depth <= 0 or budget[0] <= 0 or path in skip or folder.startswith(".") or inner.is_link(folder):
            continue
        yield from _folder(place, path, depth - 1, skip, given, budget)


def _mlflow(place: Place, top: str, at: str, budget: list[int]) -> Iterator[LogFile]:
    """Yield the files of one run of MLflow's store; the name of a metric is its path below ``metrics``."""
    inner = place.sub(at)
    for name in inner.files:
        budget[1] -= 1
        if budget[1] <= 0:
            return
        path = f"{at}/{name}"
        yield LogFile("mlflow_files", os.path.dirname(top), (path,), path, path[len(top) + 1 :])
    for folder in inner.folders:
        if at.count("/") - top.count("/") < 4 and not inner.is_link(folder):
            yield from _mlflow(place, top, f"{at}/{folder}", budget)


def _file(files: Mapping[str, Any], name: str, at: str, given: bool = False) -> LogFile | None:
    path = f"{at}/{name}" if at else name
    if (events := _EVENTS.match(name)) is not None:
        parts = at.split("/")
        while parts and _DATED.fullmatch(parts[-1]):
            parts.pop()
        tail = tuple(int(n) for n in re.findall(r"\d+", name)[-1:])
        return LogFile("tensorboard", "/".join(parts), (int(events[1]), tail, path), path)
    if name.endswith(".wandb"):
        run = _WANDB.fullmatch(os.path.basename(at))
        return LogFile("wandb", run[2] if run else path, (run[1] if run else "", path), path)
    if name == "trainer_state.json":
        return LogFile("hf_trainer", "trainer_state", _written(files[name].mtime_ns, at), path)
    if name.endswith((".db", ".sqlite", ".sqlite3")):
        return LogFile("database", path, (), path)
    if name.endswith((".csv", ".tsv")):
        version = _VERSION.fullmatch(os.path.basename(at))
        if name == "metrics.csv" and version:
            return LogFile("lightning_csv", os.path.dirname(at), (int(version[1]),), path)
        monitor = name.startswith(("Train_", "Eval_"))  # DeepSpeed: one metric per file
        return LogFile("deepspeed_csv", at, (path,), path) if monitor else _numbered("csv", path, at, name)
    if name.endswith((".jsonl", ".ndjson")):
        return _numbered("jsonl", path, at, name)
    if _JSON.fullmatch(name):
        return LogFile("json", path, (), path)
    if _PACKED.fullmatch(name):
        return LogFile("packed", path, (), path)
    if name.lower().endswith(".gz"):
        inner = _file({}, name[:-3], at, given) if name[:-3] != "trainer_state.json" else None
        return replace(inner, path=path) if inner is not None and inner.kind in _DECODED else None
    if _OF_WANDB.fullmatch(name) and "wandb" in f"{at}/".split("/"):
        return None
    if (_TEXT.fullmatch(name) and not _NOT_TEXT.fullmatch(name)) or given:
        return _numbered("text", path, at, name)
    return None


def _numbered(kind: str, path: str, at: str, name: str) -> LogFile:
    """Group files whose names differ in a number other than a rank; they may be the starts of one run."""
    if kind == "text":
        alike = _DIGITS.sub("#", name)  # train.log.1 is older than train.log
    else:
        alike = _SUFFIX.sub("", name)  # metrics-2.jsonl comes after metrics.jsonl
    group = path if _RANKS.search(name) else f"{at}/{alike}"
    return LogFile(kind, group, (tuple(int(n) for n in re.findall(r"\d{1,18}", name)), path), path)


def is_log(name: str) -> bool:
    """Return whether a file of this name is read as a log; ``trainer_state.json`` is also part of a checkpoint."""
    return name != "trainer_state.json" and _file({}, name, "") is not None


def _states(place: Place, skip: Sequence[str]) -> list[LogFile]:
    """Return ``trainer_state.json`` of the checkpoints written last; each holds the history of those before it."""
    found = []
    for path in skip:
        if path == ".":
            continue
        try:
            inner = place.sub(path)
            if inner.file is None and "trainer_state.json" in inner.files:
                order = _written(inner.files["trainer_state.json"].mtime_ns, path)
                found.append(LogFile("hf_trainer", "trainer_state", order, f"{path}/trainer_state.json"))
        except WorkbenchError:
            continue
    return sorted(found, key=lambda one: one.order)[-STATES:]


def _other_arguments(place: Place, paths: Sequence[str]) -> list[str]:
    """Return the checkpoints after which ``training_args.bin`` differs: another process wrote it, as it names the time
    of the start, or was given something else. Few files are compared: a process writes the same bytes each time.
    """

    def digest(at: int) -> bytes | None:
        if at not in digests:
            digests[at] = None
            with suppress(WorkbenchError):
                inner = place.sub(paths[at])
                info = None if inner.file is not None else inner.files.get(ARGUMENTS)
                if info is not None and info.size <= ARGUMENTS_SIZE:
                    digests[at] = hashlib.blake2b(inner.source(ARGUMENTS).read_bytes(0, info.size)).digest()
        return digests[at]

    digests: dict[int, bytes | None] = {}
    found, spans = [], [(0, len(paths) - 1)]
    while spans and len(digests) < ARGUMENTS_READ:
        low, high = spans.pop()
        one, two = (digest(low), digest(high)) if low < high else (None, None)
        if one is None or two is None or one == two:
            continue
        if high == low + 1:
            found.append(paths[low])
        else:
            spans += [((low + high) // 2, high), (low, (low + high) // 2)]
    return found


def _written(mtime_ns: int, folder: str) -> tuple[Any, ...]:
    """Sort by time, then by step: copies made at the same moment are in the order of their steps."""
    return (mtime_ns // 10**9, -1 if (step := step_of(folder)) is None else step, folder)


def _above(place: Place, name: str) -> Iterator[LogFile]:
    """Yield logs directly in a folder above the run, and in the folders where programs put them."""
    files = [one for one in (_file(place.files, file, "") for file in place.files) if one is not None]
    same = [one for one in files if name.lower() in one.path.lower()]
    alone = [folder for folder in place.folders if not folder.startswith(".") and folder not in LOG_FOLDERS] == [name]
    if same or not alone:
        yield from same
        return
    yield from files
    for folder in LOG_FOLDERS:
        if folder in place.folders and folder != name and not place.is_link(folder):
            yield from _folder(place, folder, DEPTH - 1, set(), False, [FOLDERS, FILES])


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LogReader:
    """Reads the files of a place, with an unfinished last line or without it, and reuses earlier readings."""

    place: Place
    growing: bool
    known: GrownLogs | None
    notes: list[str]

    def file(self, one: LogFile) -> list[MetricLog]:
        """Return the logs of a single file; none, and a note, if it cannot be read."""
        make = _READINGS[one.kind]
        try:
            source = self.place.source(one.path)
            if one.kind in _DECODED:
                source = decoded(source, one.path)
                if not is_text(source):
                    self.notes.append(f"{one.path!r} is binary and was not read")
                    return []
            if source.size == 0 and one.kind != "text":  # a console without output loses nothing
                self.notes.append(f"{one.path!r} is empty")
            at = f"{self.place.root.rstrip('/')}/{one.path}"
            return read_grown(source, at, one.kind, lambda: make(one.path), self.known, self.growing)
        except UnsafeError:
            self.notes.append(f"{one.path!r} is a symlink out of the folder and was not followed")
            return []
        except WorkbenchError as error:
            self.notes.append(str(error))
            return []


#: Kind of file → its reading.
_READINGS: dict[str, Callable[[str], FileReading]] = {
    "tensorboard": EventsReading,
    "text": lambda path: LinesReading(PrintedLogs(path, VALUES), path),
    "jsonl": lambda path: LinesReading(JsonRows(path), path),
} | {
    kind: lambda path, kind=kind: LinesReading(CsvRows(path, kind), path)  # type: ignore[misc]
    for kind in ("csv", "lightning_csv", "deepspeed_csv")
}
_DECODED = _READINGS.keys() - {"tensorboard"}  #: kinds of files of lines; they may be compressed or in UTF-16


def _read(place: Place, files: Sequence[LogFile], growing: bool, known: GrownLogs | None) -> FoundLogs:
    out = FoundLogs(root=place.root, files=[f"{place.root.rstrip('/')}/{one.path}" for one in files])
    groups: dict[tuple[str, str], list[LogFile]] = {}
    for one in files:
        groups.setdefault((one.kind, one.group), []).append(one)
    reader = _LogReader(place, growing, known, out.notes)
    for members in groups.values():
        members.sort(key=lambda one: one.order)
    offline: dict[str, list[MetricLog]] = {}
    for (kind, _), members in sorted(groups.items(), key=lambda one: (one[0][0], one[1][0].order, one[0][1])):
        logs = _files(reader, kind, members) if kind in _READINGS else _group(reader, kind, members)
        for log in logs:
            out.notes += log.notes
            out.unknown += [f"{log.path!r} was not read as a log: {log.unknown}"] if log.unknown else []
        if kind == "wandb":
            folder = os.path.dirname(os.path.dirname(members[0].path))
            logs = _not_joined(offline.setdefault(folder, []), logs, out.notes)
        out.logs += [log for log in logs if log.columns]
        out.starts_only += [log for log in logs if not log.columns and log.starts]
    return out


def _not_joined(earlier: list[MetricLog], logs: Sequence[MetricLog], notes: list[str]) -> list[MetricLog]:
    """Return the offline runs that do not continue an earlier one of the folder; those that do are appended to it."""
    out = []
    for log in logs:
        before = [one for one in earlier if _goes_on(one, log)]
        if len(before) != 1:  # of several, it is unknown which
            out.append(log)
            earlier.append(log)
            continue
        try:
            before[0].extend(log)
        except LogFull:
            notes.append(f"{log.path!r} has more than {log.limit:,} values; the rest was not read")
    return out


def _group(reader: _LogReader, kind: str, members: list[LogFile]) -> list[MetricLog]:
    """Read logs whose files have rows in common."""
    place, notes = reader.place, reader.notes
    log = MetricLog(members[-1 if kind == "hf_trainer" else 0].path, kind)  # the newest state has the whole history
    for one in members:
        try:
            if kind == "database":
                if place.source(one.path).read_bytes(0, 16) == _SQLITE:
                    return read_databases(place, one.path, VALUES)
                return []
            if kind == "json":
                return read_json_rows(place, one.path)
            if kind == "packed":
                log.unknown = "it is compressed; unpack it"
                continue
            if kind == "hf_trainer":
                log.files.append(one.path)
                read_trainer_state(log, place, one.path)
                continue
            source = place.source(one.path)
            if kind == "wandb":
                if source.read_bytes(0, 7) == WANDB_MAGIC:
                    read_wandb(log, source, one.path)
                else:
                    notes.append(f"{one.path!r} does not begin as a .wandb file")
            elif not is_text(source):
                notes.append(f"{one.path!r} is binary and was not read")
            else:
                read_mlflow(log, source, one.path, one.name, reader.growing)
        except LogFull:
            notes.append(f"{one.path!r} has more than {log.limit:,} values; the rest was not read")
            break
        except WorkbenchError as error:
            notes.append(str(error))
    return [log]


def _files(reader: _LogReader, kind: str, members: list[LogFile]) -> list[MetricLog]:
    """Read logs of files that each are one start of a run, or one metric of it, joined in order."""
    joined: list[MetricLog] = []
    for one in members:
        for log in reader.file(one):
            old = next((known for known in joined if known.kind == log.kind and _continues(known, log)), None)
            if old is None:
                if log.kind != kind and any(known.kind == log.kind for known in joined):
                    continue  # a printed log of another rank
                joined.append(log)
                continue
            try:
                # an event file begins with its own mark; DeepSpeed's files each hold one metric
                old.extend(log, "" if kind in ("tensorboard", "deepspeed_csv") else "new file")
            except LogFull:
                reader.notes.append(f"{one.path!r} has more than {old.limit:,} values; the rest was not read")
    return joined


def _continues(old: MetricLog, log: MetricLog) -> bool:
    """Return whether a file is a later start of the run that another file logs, rather than another rank or run."""
    if log.kind in ("tensorboard", "lightning_csv", "deepspeed_csv"):
        return True  # grouped by more than their names
    if log.kind not in ("jsonl", "csv"):
        old_ends, new_ends = (
            {step for column in one.columns.values() for step in (column.steps[0], column.steps[-1])}
            for one in (old, log)
        )
        return old_ends != new_ends
    return _goes_on(old, log)


def _goes_on(old: MetricLog, log: MetricLog) -> bool:
    """Return whether the loss of a log begins within the steps of another one, or right after them: other runs, and the
    evaluations of the same one, have the same first step.
    """
    shared = [name for name in log.columns if name in old.columns]
    name = pick_metric("loss", [(name, log.points(name)) for name in shared])
    if name is None:
        return False
    before, after = old.columns[name].steps, log.columns[name].steps
    first, last, begin = before[0], before[-1], after[0]
    interval = max(after[1] - begin, 1) if len(after) > 1 else 1
    same = len(before) < 2 or len(after) < 2 or interval == before[-1] - before[-2]
    return same and first < begin <= last + interval
