"""Watch a folder in which a run is being saved and logged: each new step, spike, resume and finding once.

::

    look 1   list ─► discover                     names, sizes and times; and which are checkpoints
    look 2   list ─► same files as at look 1? ─► complete? ─► it opens? ─► `step` ─► checks ─► `finding`
                     not the same: it is being written                          └─► `checked`
             log files changed? ─► wb.run ─► new `resume`, `spike`

Listings before and after ``discover`` bracket what it saw: a step counts if its files were the same in both, in every
format. This holds for writers that rename a finished save and for those that write in place. A file that has stopped
growing but ends too early (half of a ``torch.save``, a ``.metadata`` before its data files) does not open, and waits.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from workbench import checkpoint, formats
from workbench.analysis.health import StepHealth, check_step, unseen
from workbench.analysis.manifest_file import INSIDE
from workbench.analysis.run import after_resume, is_echo_save, open_run, records
from workbench.core.place import Place
from workbench.core.remote.url import is_url, parse, with_options
from workbench.core.scan import Progress
from workbench.core.shown import above
from workbench.core.source import FileStat
from workbench.core.words import plural
from workbench.errors import (
    ChangedError,
    CorruptError,
    IncompleteError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    TruncatedError,
    UsageError,
    WorkbenchError,
)
from workbench.runs import Found, discover, grouped
from workbench.runs.logs import ABOVE, GrownLogs, is_log

CHECKS = ("verify", "deep", "doctor")
#: Of events.
KINDS = ("step", "rewritten", "removed", "incomplete", "checked", "finding", "resume", "spike", "note")
NEAR, FAR = (2.0, 30.0), (30.0, 300.0)  #: seconds between two looks: while something changes, and at most; URLs
SLOWER = 1.5  #: by which the seconds grow with each look that shows nothing new
SHARE = 9  #: times as long as a look, or reading a run's logs, takes, the next one waits
PATIENCE = 600.0  #: seconds without a change after which a step is called incomplete
DEPTH = 8  #: of folders that are listed
LISTED = 20  #: findings in the details of an event
#: What a save that is not finished yet raises when it is opened.
UNFINISHED = (ChangedError, IncompleteError, MissingFileError, NotACheckpointError, TruncatedError)

_NUMBER = re.compile(r"\d+")
#: Names that writers give to a save until they rename it.
_TEMPORARY = re.compile(r"(?:^|[/._-])(?:tmp|temp|partial|incomplete|unfinished)(?:$|[/._-])", re.IGNORECASE)
_SEVERITIES = ("", "warn", "error")

Listing = Mapping[str, FileStat]


@dataclass(frozen=True)
class WatchEvent:
    """Something that happened in a watched folder.

    Attributes:
        kind: one of :data:`KINDS`.
        time: seconds since the epoch at which it was seen.
        path: path or URL of the step, without secrets; of the run's folder for ``resume`` and ``spike``.
        step: the training step; for ``spike`` and ``resume``, the logged one. ``None`` if unknown.
        severity: ``error``, ``warn``, or empty if it is not an alarm.
        words: a sentence.
        check: for ``checked`` and ``finding``: which one of :data:`CHECKS`.
        details: of JSON's types, by kind; docs/run.md lists them.
        health: for ``step``, ``rewritten``, ``incomplete``, ``checked`` and ``finding``: the health of the step.
        found: the step, as found by ``discover``.
    """

    kind: str
    time: float
    path: str
    step: int | None
    severity: str
    words: str
    check: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    health: StepHealth | None = None
    found: Found | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: event time path step severity words check details; the time in ISO 8601, UTC."""
        moment = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds")
        fields = {name: getattr(self, name) for name in ("path", "step", "severity", "words", "check")}
        return {"event": self.kind, "time": moment, **fields, "details": dict(self.details)}


@dataclass
class WatchedStep:
    """The state of a checkpoint between looks.

    Attributes:
        files: at the last look, by path below the checkpoint.
        since: when they last changed.
        why: why they cannot be opened yet; empty if they can, ``None`` if that was not tried.
        corrupt: they cannot be opened, but nothing is missing.
        reported: the files when it was last reported; ``None`` if it was not.
        called: whether its present state was reported as incomplete.
        known: it existed before the watch began, and its events are not wanted.
    """

    found: Found
    files: Listing
    since: float
    why: str | None = None
    corrupt: bool = False
    reported: Listing | None = None
    called: bool = False
    known: bool = False


@dataclass
class WatchedRun:
    """The reported state of a run's log.

    Attributes:
        logs: its files when they were read.
        stale: something has changed since.
        again: the time before which they are not read again.
        resumes: their steps.
        spikes: their first and last steps.
    """

    logs: Mapping[str, FileStat | None] | None = None
    stale: bool = True
    again: float = 0.0
    resumes: set[int] = field(default_factory=set)
    spikes: list[tuple[int, int]] = field(default_factory=list)


class Watcher:
    """Examines a folder repeatedly; see the module's docstring.

    Attributes:
        exit_code: 0 if nothing was found so far, 1 for warnings, 2 for errors.
        steps: how many steps were reported.
        path: the folder's path, or its URL without user, password and signature, as in events.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        checks: Sequence[str] = ("verify",),
        logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        above: int = ABOVE,
        interval: float | None = None,
        patience: float = PATIENCE,
        from_now: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Prepare; nothing is read before the first look.

        Args:
            root: the folder of a run, or of several; a path or URL.
            checks: the checks of each step: ``verify`` (the structure), ``deep`` (every byte), ``doctor`` (the step
                compared with the complete one before it).
            logs: files or folders of logs of the one run in ``root``; by default those in, beside and above each run.
            above: number of folders above the root that are searched for logs.
            interval: seconds between two looks; by default 2 on disk and 30 for URLs while something changes, growing
                to 30 and 300 while nothing does. A look, or reading a run's logs, that takes long is repeated after 9
                times as long.
            patience: seconds without a change after which a step that is not complete, or does not open, is reported.
            from_now: report nothing that is complete, or logged, at the first look.
            storage_options: for URLs, as in ``wb.open``.
            threads, progress: of the checks, as for ``wb.verify``; an exception of ``progress`` ends the watch.
            clock, sleep: seconds since the epoch; waits, and ends the watch if it returns something true.

        Raises:
            UsageError: an unknown check, or a number of seconds that is not positive.
        """
        for name in checks:
            if name not in CHECKS:
                raise UsageError(f"unknown check {name!r}; known are {', '.join(CHECKS)}")
        for what, value in (("interval", interval), ("patience", patience)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{what} {value:g}: must be positive and finite")
        # the structure is part of a deep verification
        self._checks = [name for name in CHECKS if name in checks and not (name == "verify" and "deep" in checks)]
        self._root = os.fsdecode(root)
        if not is_url(self._root):
            self._root = os.path.realpath(os.path.expanduser(self._root))
        self.path = self._shown(".")
        self._logs = None if logs is None else [logs] if isinstance(logs, str | os.PathLike) else list(logs)
        self._above = above
        limits = FAR if is_url(self._root) else NEAR
        self._least, self._most = limits if interval is None else (interval, interval)
        self._patience, self._from_now = patience, from_now
        self._options, self._threads, self._progress = storage_options, threads, progress
        self._clock, self._sleep = clock, sleep
        self._wait, self._pause, self._busy, self._looks = self._least, 0.0, True, 0
        self._files: Listing = {}
        self._log_files: Listing = {}
        self._found: list[Found] = []
        self._steps: dict[str, WatchedStep] = {}
        self._runs: dict[str, WatchedRun] = {}
        self._unchecked: list[tuple[Found, str]] = []
        self._noted: set[str] = set()
        self._grown = GrownLogs()
        self.exit_code, self.steps = 0, 0

    # ---- looking ------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[WatchEvent]:
        """Look until ``sleep`` returns something true; yield each event as soon as it is known.

        Raises:
            OpenError: the folder cannot be listed at the first look; later that is a ``note``, and tried again.
        """
        while True:
            yield from self.look()
            yield from self._check(until=self._clock() + self._least)
            self._wait = self._least if self._busy else min(self._wait * SLOWER, self._most)
            if self._sleep(0 if self._unchecked else max(self._wait, self._pause)):
                return

    def once(self) -> Iterator[WatchEvent]:
        """Report everything that exists, from two looks up to a second apart.

        A step that is incomplete, and changed within the last ``patience`` seconds, may still be written: it is
        reported without a severity. Raises as :meth:`events`.
        """
        yield from self.look()
        self._sleep(min(self._least, 1.0))
        yield from self.look(last=True)
        yield from self._check(until=float("inf"))

    def look(self, *, last: bool = False) -> Iterator[WatchEvent]:
        """Look once: yield the events since the previous look. The checks are left to :meth:`events`.

        Args:
            last: there will be no further look: also report waiting steps.
        """
        began = self._clock()
        try:
            with self._opening():
                for path in () if self._looks else self._logs or ():
                    Place(path)  # a log that was named has to exist
                files, log_files = self._listing()
            yield from self._settle(files, last)
            changed = files != self._files or not self._looks
            if changed:
                with self._opening():
                    self._found = self._discovered()
                self._remember(files)
        except OpenError as error:
            if not self._looks:
                raise
            yield from self._note(str(error))
            return
        changed |= log_files != self._log_files
        self._busy |= changed
        self._files, self._log_files = files, log_files
        self._pause = SHARE * (self._clock() - began)
        yield from self._read_logs(changed, last)
        self._looks += 1

    @property
    def waiting(self) -> int:
        """How many checks of reported steps have not been run yet."""
        return len(self._unchecked)

    def _opening(self) -> Any:
        return with_options(self._options, self._root)

    def _listing(self, below: str = ".") -> tuple[Listing, Listing]:
        """List the files of the tree, or of a part of it, by path below the root, with logs listed separately."""
        place = Place(self._at(below))
        if place.file is not None:
            return {below: place.stat(place.file)}, {}
        files: dict[str, FileStat] = {}
        logs: dict[str, FileStat] = {}
        for path, stat in _walk(place, "" if below == "." else f"{below}/", DEPTH):
            (logs if is_log(path.rpartition("/")[2]) else files)[path] = stat
        return files, logs

    def _discovered(self) -> list[Found]:
        """Return the checkpoints under permanent names. A link to a file (``latest.pt``) is another name."""
        place = Place(self._root)
        found = (one for one in discover(self._root) if one.format != "unreadable" and not _TEMPORARY.search(one.path))
        return [one for one in found if one.path == "." or not place.is_link(one.path)]

    def _remember(self, files: Listing) -> None:
        now, owned = self._clock(), _owned(self._found, files)
        for found in self._found:
            mine, entry = owned[found.path], self._steps.get(found.path)
            if entry is None:
                since = now if self._looks else min(found.mtime or now, now)  # later on, copies may have old times
                self._steps[found.path] = WatchedStep(found, mine, since, known=self._from_now and not self._looks)
            else:
                entry.found = found
                if entry.files != mine:
                    entry.files, entry.since, entry.why = mine, now, None
                    entry.corrupt = entry.called = entry.known = False

    # ---- steps --------------------------------------------------------------------------------------------------

    def _settle(self, files: Listing, last: bool) -> Iterator[WatchEvent]:
        """Report the steps whose files are the same as at the look before."""
        self._busy = False
        now, owned = self._clock(), _owned(self._found, files)
        found_paths = {found.path for found in self._found}
        for path in [path for path in self._steps if path not in found_paths]:
            if any(name == path or name.startswith(f"{path}/") for name in files):
                continue  # it is being replaced
            entry = self._steps.pop(path)
            self._unchecked = [one for one in self._unchecked if one[0].path != path]
            if entry.reported is not None:
                yield self._event("removed", entry.found, "", "removed")
        for found in self._found:
            entry = self._steps[found.path]
            if owned[found.path] != entry.files:
                if not last:
                    continue  # it is being written; the listing has changed, so `_remember` follows
                yield self._incomplete(found, "its files are changing: it is being written", "")
            else:
                yield from self._settled(entry, now, last)

    def _settled(self, entry: WatchedStep, now: float, last: bool) -> Iterator[WatchEvent]:
        found, before = entry.found, entry.reported
        if before == entry.files or entry.called:
            return
        if before is not None and _differences(before, entry.files) == "":
            entry.reported = entry.files
            return
        why = self._lacks(entry)
        waited = now - entry.since >= self._patience
        if not (waited or last) and (why or self._unlike(entry)):
            self._busy = True
            return
        if why and not (entry.corrupt and waited):  # what is corrupt is what the checks are for
            entry.called = True
            if not entry.known:
                still = "" if waited else f"; it changed {max(now - entry.since, 0):.0f} s ago and may still be written"
                yield self._incomplete(found, why + still, "error" if waited else "")
            return
        entry.reported = entry.files
        if entry.known:
            return
        self._busy = True
        kind, words = "step", f"{found.format}, {plural(found.nbytes, 'byte')}"
        if before is not None:
            kind, words = "rewritten", f"{words}; files {_differences(before, entry.files)}"
        elif odd := self._unlike(entry):
            words += f"; {odd}"
        self.steps += kind == "step"
        yield self._event(kind, found, "", words, health=unseen(found))
        self._unchecked = [one for one in self._unchecked if one[0].path != found.path]
        self._unchecked += [(found, check) for check in self._checks]

    def _lacks(self, entry: WatchedStep) -> str:
        """Return why a step whose files do not change is not complete; empty if it is."""
        found = entry.found
        if not found.complete:
            return found.why or "a part is missing"
        if entry.why is None:
            entry.why = ""
            held = (*UNFINISHED, CorruptError) if formats.record(found.format).single_file else UNFINISHED
            try:
                with self._opening():
                    checkpoint.open(self._at(found.path), cache=False)
            except held as error:
                entry.why, entry.corrupt = str(error), not isinstance(error, UNFINISHED)
            except WorkbenchError:
                pass  # its commit marker is there: the checks say what is wrong
        return entry.why

    def _unlike(self, entry: WatchedStep) -> str:
        """Return the file that a step lacks but every other step beside it has: some formats have no commit marker, and
        their files look complete before the optimizer is saved."""
        beside = os.path.dirname(entry.found.path)
        if entry.found.step is None or "" in entry.files:  # a file is whole once it opens
            return ""
        others = [
            _shape(one.reported)
            for one in self._steps.values()
            if one is not entry and one.found.step is not None
            if one.reported is not None and "" not in one.reported
            if os.path.dirname(one.found.path) == beside
        ]
        lost = sorted(set.intersection(*others) - _shape(entry.files)) if others else []
        return f"it has no {lost[0]!r}, which the other steps have" if lost else ""

    def _incomplete(self, found: Found, why: str, severity: str) -> WatchEvent:
        health = StepHealth("incomplete", severity, f"incomplete: {why}")
        return self._event("incomplete", found, severity, health.words, health=health)

    # ---- checks -------------------------------------------------------------------------------------------------

    def _check(self, until: float) -> Iterator[WatchEvent]:
        """Run checks, those of the latest step first; at least one, then more until a time."""
        while self._unchecked:
            newest = max(self._unchecked, key=lambda one: (one[0].step or 0, one[0].mtime))[0].path
            at = next(n for n, one in enumerate(self._unchecked) if one[0].path == newest)
            found, check = self._unchecked.pop(at)
            with self._opening():
                result = self._checked(found, check)
                entry = self._steps.get(found.path)
                same = entry is not None and self._now(entry) == entry.files
            if result is not None and same:  # or else it was replaced or removed meanwhile: the next look reports that
                health, details = result
                kind = "finding" if health.state == "finding" else "checked"
                yield self._event(kind, found, health.severity, health.words, check, details, health)
            if self._clock() >= until:
                return

    def _checked(self, found: Found, check: str) -> tuple[StepHealth, dict[str, Any]] | None:
        place = self._at(found.path)
        if check != "doctor":
            health = check_step(found, place, values=check == "deep", threads=self._threads, progress=self._progress)
            report = () if health.report is None else health.report
            bad = [one for one in report if one.severity in ("error", "warn")]
            names = ("rule", "severity", "where", "message", "hint")
            rows = [{name: getattr(one, name) for name in names} for one in bad[:LISTED]]
            return health, {"findings": rows, "count": len(bad), "values": health.values}
        before, echo = self._before(found)
        if before is None:
            return None
        pair = {"before": self._shown(before.path), "echo": None if echo is None else self._shown(echo.path)}
        try:
            diagnosis = above(self, "doctor")(
                self._at(before.path),
                place,
                echo=None if echo is None else self._at(echo.path),
                threads=self._threads,
                progress=self._progress,
            )
        except WorkbenchError as error:
            return StepHealth("finding", "error", str(error)), {**pair, "causes": []}
        causes = [
            {name: getattr(one, name) for name in ("cause", "title", "severity", "certainty", "remedy")}
            for one in diagnosis.causes[:LISTED]
        ]
        severity = _SEVERITIES[diagnosis.exit_code]
        state = "finding" if severity else "sound"
        words = f"{diagnosis.verdict} Compared with {os.path.basename(before.path)!r}."
        return StepHealth(state, severity, words), {**pair, "causes": causes}

    def _before(self, found: Found) -> tuple[Found | None, Found | None]:
        """Return the complete step before this one in the same folder, and its save from right after a load."""
        beside = sorted(
            (
                one.found
                for one in self._steps.values()
                if one.reported is not None and one.found.step is not None and one.found.path != found.path
                if os.path.dirname(one.found.path) == os.path.dirname(found.path)
            ),
            key=_order,
        )
        earlier = [one for one in beside if found.step is not None and _order(one) < _order(found)]
        before = next((one for one in reversed(earlier) if not is_echo_save(one)), None)
        if before is None or is_echo_save(found):
            return before, None
        return before, next((one for one in earlier if is_echo_save(one) and one.step == before.step), None)

    def _now(self, entry: WatchedStep) -> Listing:
        try:
            return _owned(self._found, self._listing(entry.found.path)[0])[entry.found.path]
        except OpenError:
            return {}

    # ---- logs ---------------------------------------------------------------------------------------------------

    def _read_logs(self, changed: bool, last: bool) -> Iterator[WatchEvent]:
        if self._found and "." in self._files:
            return  # the root is one file, a checkpoint
        runs, _ = grouped(self._found)
        folders = [one.path for one in runs] if runs and self._logs is None else ["."]
        for folder in folders:
            if folder not in self._runs:  # the second step makes a run of what was the root alone
                self._runs[folder] = self._runs.get(".") or WatchedRun()
            state = self._runs[folder]
            began = self._clock()
            with self._opening():
                state.stale |= changed or not state.logs or self._stats(state.logs) != state.logs
                if not state.stale or (began < state.again and not last):
                    continue
                try:
                    depth = 0 if folder == "." else folder.count("/") + 1
                    levels = min(ABOVE, self._above + depth)
                    run = open_run(self._at(folder), self._logs, above=levels, growing=True, known=self._grown)
                    state.logs = self._stats(run.log_files)
                    resumes, spikes = records(run.resumes), records(run.spikes)
                    why = None
                except WorkbenchError as error:
                    why = error
            state.stale, ended = False, self._clock()
            state.again = ended + SHARE * (ended - began)
            if why is not None:
                if isinstance(why, NotACheckpointError):  # nothing is saved or logged yet
                    yield from self._noted_logs(getattr(why, "__notes__", ()))
                else:
                    yield from self._note(str(why))
                continue
            yield from self._noted_logs(run.log_notes)
            silent = self._from_now and not self._looks
            for event in self._logged(folder, state, resumes, spikes):
                self._busy = True
                if not silent:
                    yield self._counted(event)

    def _noted_logs(self, notes: Sequence[str]) -> Iterator[WatchEvent]:
        """Report once which parts of the logs were not read; counts in these notes grow with the log."""
        for words in notes:
            yield from self._note(words, once=_NUMBER.sub("#", words))

    def _stats(self, paths: Any) -> Mapping[str, FileStat | None]:
        """Return the current identity of log files; those below the root are in the listing."""
        found: dict[str, FileStat | None] = {}
        for path in paths:
            inside = path[len(self.path) + 1 :] if path.startswith(f"{self.path}/") else None
            if inside is not None:
                found[path] = self._log_files.get(inside) or self._files.get(inside)
                continue
            try:
                place = Place(path)
                found[path] = place.stat(place.file or "")
            except WorkbenchError:
                found[path] = None
        return found

    def _logged(self, folder: str, state: WatchedRun, resumes: Any, spikes: Any) -> Iterator[WatchEvent]:
        now, path = self._clock(), self._shown(folder)
        for row in resumes:
            step = row["step"]
            if step in state.resumes:
                continue
            state.resumes.add(step)
            if row["repeated"]:  # the steps from here on are logged again
                state.spikes = [one for one in state.spikes if one[0] < step]
            source = "" if row["from_step"] is None else f" from step {row['from_step']:,}"
            words = f"resumed before step {step:,}{source}: {row['why']}"
            yield WatchEvent("resume", now, path, step, "", words, details=row)
        for row in spikes:
            first, end = row["step"], max(row["end_step"] or 0, row["peak_step"])
            same = [one for one in state.spikes if one[0] <= end and first <= one[1]]
            if same:  # its kind, height or end is better known now
                low, high = min(first, same[0][0]), max(end, same[-1][1])
                state.spikes = [one for one in state.spikes if one not in same] + [(low, high)]
                continue
            state.spikes.append((first, end))
            yield WatchEvent("spike", now, path, first, _alarm(row), _spike_words(row), details=row)

    # ---- events -------------------------------------------------------------------------------------------------

    def _at(self, path: str) -> str:
        """Return the path or URL of what is below the root, to open it."""
        return self._root if path == "." else f"{self._root.rstrip('/')}/{path}"

    def _shown(self, path: str) -> str:
        """Return the same without secrets: events are sent, printed and stored."""
        if not is_url(self._root):
            return self._at(path)
        root = parse(self._root)
        return (root if path == "." else root.at(path)).shown

    def _event(
        self,
        kind: str,
        found: Found,
        severity: str,
        words: str,
        check: str = "",
        details: Mapping[str, Any] | None = None,
        health: StepHealth | None = None,
    ) -> WatchEvent:
        about = {"format": found.format, "nbytes": found.nbytes, "mtime": found.mtime} if details is None else details
        at = self._shown(found.path)
        event = WatchEvent(kind, self._clock(), at, found.step, severity, words, check, about, health, found)
        return self._counted(event)

    def _counted(self, event: WatchEvent) -> WatchEvent:
        self.exit_code = max(self.exit_code, _SEVERITIES.index(event.severity))
        return event

    def _note(self, words: str, once: str = "") -> Iterator[WatchEvent]:
        if (once or words) not in self._noted:
            self._noted.add(once or words)
            yield WatchEvent("note", self._clock(), self.path, None, "", words)


def _walk(place: Place, at: str, depth: int) -> Iterator[tuple[str, FileStat]]:
    """Yield files below a folder with their paths; folders that :func:`discover` does not enter are skipped."""
    yield from ((at + name, stat) for name, stat in place.files.items())
    for folder in place.folders:
        if depth and not folder.startswith(".") and not place.is_link(folder):
            try:
                yield from _walk(place.sub(folder), f"{at}{folder}/", depth - 1)
            except WorkbenchError:  # removed meanwhile, or without permission
                continue


def _owned(found: Sequence[Found], files: Listing) -> dict[str, dict[str, FileStat]]:
    """Return the files of each checkpoint by path below it: its own files, and those in the folders of its format."""
    out: dict[str, dict[str, FileStat]] = {one.path: {} for one in found}
    kinds = {one.path: formats.record(one.format) for one in found}
    for path, stat in files.items():
        owner, inner = path, ""
        while owner not in out and owner != ".":
            owner, _, last = owner.rpartition("/")
            owner, inner = owner or ".", f"{last}/{inner}" if inner else last
        folder, slash, _ = inner.partition("/")
        if owner in out and (not slash or kinds[owner].owns(folder)):
            out[owner][inner] = stat
    return out


def _differences(before: Listing, after: Listing) -> str:
    """Return ``2 replaced, 1 added``; empty if nothing but a manifest was written."""
    counts = {
        "replaced": sum(name in after and after[name] != stat for name, stat in before.items() if name != INSIDE),
        "added": len(after.keys() - before.keys() - {INSIDE}),
        "removed": len(before.keys() - after.keys() - {INSIDE}),
    }
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _order(found: Found) -> tuple[Any, ...]:
    return found.step or 0, is_echo_save(found), found.mtime, found.path


def _shape(files: Listing) -> set[str]:
    """Return the names of a step's files without their numbers, which differ from step to step."""
    return {_NUMBER.sub("#", name) for name in files if name != INSIDE}


def _alarm(row: Mapping[str, Any]) -> str:
    if row["kind"] == "level shift":
        return "warn" if after_resume(row) else ""  # otherwise a curriculum, other data, another rate
    return "error" if row["kind"] == "nan" else "warn"


def _spike_words(row: Mapping[str, Any]) -> str:
    if row["kind"] == "nan":
        words = f"the loss is NaN or infinite at step {row['step']:,}"
    else:
        shift = ", and stays up (level shift)" if row["kind"] == "level shift" else ""
        words = f"the loss rises by {row['height']:.2f} at step {row['step']:,}, {row['sigma']:.0f} sigma{shift}"
    return f"{words}{' (suspected)' if row['suspected'] else ''}; {row['advice']}"
