"""A run: its checkpoints, what it logged, where it was resumed, and where its loss jumped.

::

    checkpoints  ●      ●      ●      ●         runs.discover, by step
    loss         ╲______╲_  ╱╲_____________     logs beside or above them, joined over restarts
    events              ┊resume  ▲spike         the pair to compare is the last checkpoint before the spike and the
                 before ●              ● after  first one after it

Nothing is read but names, sizes and logs; :meth:`Run.diagnose` reads the two checkpoints that it compares.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.spikes import Spike, find_spikes
from workbench.core.jsonable import finite
from workbench.core.place import Place
from workbench.core.remote.url import shown
from workbench.core.scan import Progress
from workbench.core.shown import Shown, above
from workbench.core.words import some_of
from workbench.errors import NotACheckpointError, UsageError
from workbench.names.metrics import MEANINGS, takes_time
from workbench.runs import Found, discover, grouped
from workbench.runs.logs import ABOVE, FoundLogs, GrownLogs, find_logs, read_logs
from workbench.runs.logs.joined import JoinedLog, Resume, join, waited

if TYPE_CHECKING:
    import pandas as pd

RESUMES = ("step", "from_step", "why", "stopped_after", "repeated", "difference", "path")
SPIKES = (
    "step",
    "height",
    "sigma",
    "kind",
    "recovered",
    "peak_step",
    "end_step",
    "points",
    "suspected",
    "resume",
    "before",
    "after",
    "advice",
)
#: Where it is shown, what to do is added: text names an option, a page the folder.
NO_LOG = "no log was found beside or above the checkpoints"
UNKNOWN = 2  #: files of no known form that are named, if no log was found
NEAR = 50  #: steps after a resume within which a jump is mentioned together with it
USUAL = 0.2  #: share of the saves; what follows more of them than this is not a sign of a restart
TIMED, LATE, SPREADS = 4, 3600.0, 8  #: saves whose times are compared; seconds and spreads that a wait has to exceed
AGAIN, FALLEN = 4, 0.5  #: logged learning rates that have to be those of the start; the first, of the one before
SLOW_ROWS, SLOW_TIMES = 24, 2.5  #: rows; times the median of a slow step
SAVED_IN = 1.3  #: times the median of the steps after saves, from which the time includes that of saving
SLOW_LIKE = 0.6, 2.5  #: least and most of it, as a share of the first step
SLOW_SAVE = 120.0  #: seconds that a save may take, by the times in the log
BEGINS = 5  #: rows between two saves; with fewer, a log may begin right after a save by chance
_GOES_ON = re.compile(r"resum|continu|restor|restart", re.IGNORECASE)
SHARED = 0.5  #: of the steps of a second log that have to be logged in the first one, if it is of the same run
ALIKE = 0.05  #: median relative difference of the losses of two logs of one run: digits, and means of several steps
NEW_FILES = ("tensorboard", "wandb", "lightning_csv")  #: kinds of logs that each start begins a file of
FILES = (
    "tensorboard",
    "wandb",
    "mlflow_files",
    "mlflow_sqlite",
    "trackio",
    "lightning_csv",
    "jsonl",
    "csv",
    "hf_trainer",
)


@dataclass(frozen=True)
class CheckpointPair:
    """The checkpoints around a step.

    Attributes:
        before: the newest complete one whose weights were made before the step; ``None`` if there is none.
        echo: a second save of the same step, from right after a load.
        after: the oldest complete one whose weights were made after it.
        advice: what can be compared, or which checkpoint to keep next time.
    """

    before: Found | None
    echo: Found | None
    after: Found | None
    advice: str


def run(
    root: str | os.PathLike[str],
    logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Run:
    """Open a run: its checkpoints, metrics, resumes and spikes.

    Args:
        root: the folder of the run, or its URL; the folder of a log is enough.
        logs: files or folders of logs; by default those in the folder, or else beside and above it. Formats are
            listed in docs/run.md.
        storage_options: for URLs, as in ``wb.open``.

    Returns:
        A :class:`Run`. Its logs have been read; spikes are searched for on first access.

    Raises:
        OpenError: the folder cannot be listed.
        UsageError: ``logs`` are not logs in a known format.
        NotACheckpointError: the folder holds neither checkpoints with steps nor logs.
    """
    return open_run(root, logs, storage_options=storage_options)


def open_run(
    root: str | os.PathLike[str],
    logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    above: int = ABOVE,
    growing: bool = False,
    known: GrownLogs | None = None,
) -> Run:
    """Open a run as :func:`run` does.

    Args:
        above: folders above it in which logs are looked for.
        growing: the run is still being logged: a last line that nothing ends may be half of a number and is left out.
        known: what was read of the logs before; of a log that has grown, the rest is read.
    """
    path = os.fsdecode(root)
    found = [one for one in discover(path, depth=4, storage_options=storage_options) if one.step is not None]
    found.sort(key=lambda one: (one.step or 0, is_echo_save(one), one.mtime, one.path))
    named = None if logs is None else [logs] if isinstance(logs, (str, os.PathLike)) else list(logs)
    place = Place(path, storage_options)
    if named is not None:
        read = read_logs(named, storage_options, growing=growing, known=known)
    elif place.file is not None and not found:
        read = read_logs([path], storage_options, growing=growing, known=known)
    else:
        read = find_logs(place, skip=[one.path for one in found], above=above, growing=growing, known=known)
    if not found and not read.logs:
        error = NotACheckpointError(
            f"{shown(path)!r} holds neither checkpoints with steps in their names nor a log"
            + (f" ({'; '.join(read.notes[:2])})" if read.notes else "")
        )
        for note in read.notes:
            error.add_note(note)
        raise error
    return Run(path, tuple(found), read)


def compare(
    runs: Sequence[Run | str | os.PathLike[str]], *, storage_options: Mapping[str, Any] | None = None
) -> RunComparison:
    """Put several runs side by side.

    Args:
        runs: runs, their folders or their URLs.
        storage_options: for URLs, as in ``wb.open``.

    Raises:
        UsageError: fewer than two runs. Other errors as in :func:`run`.
    """
    if isinstance(runs, (str, bytes, os.PathLike, Run)) or len(runs) < 2:
        raise UsageError("name at least two runs: wb.compare([run_a, run_b])")
    opened = [one if isinstance(one, Run) else open_run(one, storage_options=storage_options) for one in runs]
    return RunComparison(tuple(opened))


@dataclass(frozen=True, repr=False)
class RunComparison(Shown):
    """Several runs side by side.

    Attributes:
        runs: in the order given.
        names: names of the runs: of their folders, or paths if several folders have the same name.
    """

    runs: tuple[Run, ...]

    @property
    def names(self) -> list[str]:
        short = [os.path.basename(one.path.rstrip("/")) or one.path for one in self.runs]
        return [name if short.count(name) == 1 else one.path for name, one in zip(short, self.runs, strict=True)]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Metrics by step; columns are pairs of metric and run, metrics that several runs have first."""
        import pandas as pd

        known = {name: run.metrics for name, run in zip(self.names, self.runs, strict=True)}
        columns = list(dict.fromkeys(column for frame in known.values() for column in frame.columns))
        columns.sort(key=lambda column: -sum(column in frame for frame in known.values()))
        series = {
            (column, name): frame[column] for column in columns for name, frame in known.items() if column in frame
        }
        frame = pd.DataFrame(series)
        frame.columns = pd.MultiIndex.from_tuples(list(series), names=["metric", "run"])
        frame.index.name = "step"
        return frame.sort_index()

    @cached_property
    def spikes(self) -> pd.DataFrame:
        """Events of all runs: run, then the columns of :attr:`Run.spikes`."""
        return self._together("spikes", SPIKES)

    @cached_property
    def resumes(self) -> pd.DataFrame:
        """Resumes of all runs: run, then the columns of :attr:`Run.resumes`."""
        return self._together("resumes", RESUMES)

    def _together(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        import pandas as pd

        parts = [getattr(run, table) for run in self.runs]
        whole = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
        lengths = [len(part) for part in parts]
        whole.insert(0, "run", np.repeat(np.asarray(self.names, object), lengths))
        return whole[["run", *columns]]

    def plot(self, metrics: Sequence[str] | None = None) -> Any:
        """Return one figure with the curves of all runs; as :meth:`Run.plot`."""
        return above(self, "plot")(self.runs, metrics)

    def view(self) -> Any:
        """Return the first run's page, with the others drawn over it, as a ``panel.viewable.Viewer``."""
        return above(self, "view")(self)


class Run(Shown):
    """A run's checkpoints and logs.

    Attributes:
        path: as given; of a URL, without its user, password and signature.
        root: as given, to open it.
        found: its checkpoints, by step.
        notes: what was not read, and anything unusual, one sentence each.
        log_notes: the notes about reading logs.
        log_files: paths or URLs of the files that were searched for logs.
    """

    def __init__(self, path: str, found: Sequence[Found], read: FoundLogs) -> None:
        self.root, self.path = path, shown(path)
        self.found = tuple(found)
        self._starts_only, self._unknown = read.starts_only, read.unknown
        steps = {one.path: one.step for one in found}
        self._other_arguments = [step for path in read.restarted if (step := steps[path]) is not None]
        self._joined = sorted((join(log) for log in read.logs), key=self._rank)
        self.notes: list[str] = list(read.notes)
        self.log_notes = tuple(read.notes)
        self.log_files = tuple(read.files)
        if self._joined:
            self.notes += self._joined[0].notes
            if self._counted:
                unit = self._joined[0].unit
                how = "rows are numbered" if unit == "lines" else f"rows state the number of {unit} instead"
                self.notes.append(
                    f"{self._joined[0].log.path!r} contains no steps: its {how}, and it is unknown which row belongs "
                    "to which checkpoint; log to a file with steps, or keep trainer_state.json"
                )
            self._used = [one for one in self._joined if one is self._joined[0] or self._same(one)]
            first = self._joined[0].log.path
            for one in self._joined:
                if one not in self._used:
                    words = f"{one.log.path!r} logs other steps or another loss than {first!r} and was not used"
                    self.notes.append(f"{words}: it may belong to another run")
        else:
            self._used = []
            self.notes += self._unknown[:UNKNOWN]
        folders = [one.path for one in grouped(found)[0]]
        if len(folders) > 1:
            words = f"the steps of {len(folders)} folders are shown as one run: {some_of(folders, 3)}"
            self.notes.append(f"{words}; open one of them")
        self._check()

    # ---- tables -------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Checkpoints by step: step path format nbytes mtime complete why loss; the loss is that of the last point at
        or before the step."""
        import pandas as pd

        columns = ["step", "path", "format", "nbytes", "mtime", "complete", "why"]
        frame = pd.DataFrame([asdict(one) for one in self.found], columns=columns)
        frame["step"] = frame["step"].astype("Int64")
        frame["mtime"] = pd.to_datetime(frame["mtime"], unit="s")
        frame["loss"] = [self._loss_at(one.step or 0) for one in self.found]
        return frame

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Metrics by step: ``loss``, ``lr``, ``grad_norm`` and ``throughput``, where logged, then everything else under
        its own name. For steps that were logged twice, the values of the last attempt."""
        import pandas as pd

        columns = {
            name: pd.Series(values, index=steps, dtype="float64") for name, (steps, values) in self._curves().items()
        }
        frame = pd.DataFrame(columns)
        frame.index = pd.Index(frame.index.to_numpy("int64") if len(frame) else [], dtype="int64", name="step")
        return frame.sort_index()

    @cached_property
    def ghosts(self) -> pd.DataFrame:
        """Points of overwritten attempts: attempt step metric value; attempts are numbered from 0 for each metric."""
        import pandas as pd

        rows: list[tuple[int, int, str, float]] = []
        if self._joined:
            first = self._joined[0]
            for name, curve in first.curves.items():
                for attempt, (steps, values) in enumerate(curve.ghosts):
                    rows += [
                        (attempt, int(s), first.main.get(name, name), float(v))
                        for s, v in zip(steps, values, strict=True)
                    ]
        return pd.DataFrame(rows, columns=["attempt", "step", "metric", "value"])

    @cached_property
    def resumes(self) -> pd.DataFrame:
        """Resumes: step from_step why stopped_after repeated difference path.

        ``step`` is the first step logged after the resume. ``from_step`` is the step of the checkpoint, taken from a
        line of the log or from an existing checkpoint (``path``), or unknown. ``repeated`` steps were logged by both
        attempts, with losses that differ by ``difference`` nats (median): a difference well above the noise means that
        the data order or the random state was not restored.
        """
        import pandas as pd

        rows = []
        for one in self._resumes:
            from_step, found = self._loaded(one)
            rows.append(
                {
                    "step": one.first_after,
                    "from_step": from_step,
                    "why": one.why,
                    "stopped_after": one.stopped_after,
                    "repeated": one.repeated,
                    "difference": one.difference,
                    "path": None if found is None else found.path,
                }
            )
        frame = pd.DataFrame(rows, columns=list(RESUMES))
        for name in ("step", "from_step", "stopped_after", "repeated"):
            frame[name] = frame[name].astype("Int64")
        return frame

    @cached_property
    def spikes(self) -> pd.DataFrame:
        """Events of the loss: step height sigma kind recovered peak_step end_step points suspected resume before after
        advice.

        ``height`` is in units of the loss, nats for a cross-entropy; ``sigma`` is the rise of the log loss in units of
        the noise before it.
        ``kind`` is ``spike``, ``unresolved``, ``level shift`` or ``nan``. ``resume`` is the step of the last resume
        before it; ``before`` and ``after`` are the checkpoints to compare, and ``advice`` says what they allow, or what
        to keep next time. A step is that of a logged point: with a row every 10 steps, the event may have begun up to 9
        steps earlier.
        """
        import pandas as pd

        loss = self._loss()
        rows = []
        for one in self._events:
            assert loss is not None
            step = int(loss[0][one.onset])
            pair = self.pair(step)
            resume = self._resume_before(step)
            rows.append(
                {
                    "step": step,
                    "height": one.height,
                    "sigma": one.sigma,
                    "kind": one.kind,
                    "recovered": one.recovered,
                    "peak_step": int(loss[0][one.peak]),
                    "end_step": None if one.end is None else int(loss[0][one.end]),
                    "points": one.over,
                    "suspected": one.suspected,
                    "resume": None if resume is None else resume.first_after,
                    "before": None if pair.before is None else pair.before.path,
                    "after": None if pair.after is None else pair.after.path,
                    "advice": pair.advice,
                }
            )
        frame = pd.DataFrame(rows, columns=list(SPIKES))
        for name in ("step", "peak_step", "end_step", "resume", "points"):
            frame[name] = frame[name].astype("Int64")
        return frame

    @cached_property
    def sources(self) -> pd.DataFrame:
        """Logs that were read, the one whose curves are used first: path kind points first last resumes."""
        import pandas as pd

        rows = []
        for one in self._joined:
            steps = np.concatenate([curve.steps for curve in one.curves.values()])
            rows.append((one.log.path, one.log.kind, one.points, int(steps.min()), int(steps.max()), len(one.resumes)))
        return pd.DataFrame(rows, columns=["path", "kind", "points", "first", "last", "resumes"])

    # ---- the checkpoints to compare -----------------------------------------------------------------------------

    def pair(self, step: int) -> CheckpointPair:
        """Return the checkpoints around a logged step; none if the log contains no steps.

        The loss of a step is computed with the weights of the update before it: the step's own checkpoint comes after
        it. Programs that number updates from 0 log it under the number of the checkpoint.
        """
        if self._counted:
            return CheckpointPair(None, None, None, "the log contains no steps: name the two checkpoints to compare")
        zero = 1 if self._zero_based else 0
        interval = self._joined[0].interval if self._joined else 1
        whole = [one for one in self.found if one.complete and one.step is not None]
        last = step - interval + zero  # the mean of several steps may have risen in its first
        resume = self._resume_before(step)
        if resume is not None and step - resume.first_after < interval:
            loaded, _ = self._loaded(resume)  # the first row after a resume begins with it
            last = max(last, min(loaded or 0, step - 1 + zero))
        earlier = [one for one in whole if (one.step or 0) <= last]
        later = [one for one in whole if (one.step or 0) >= step + zero and not is_echo_save(one)]
        before = self._first_of([one for one in earlier if one.step == earlier[-1].step]) if earlier else None
        twins = [one for one in earlier if before is not None and one.step == before.step and one is not before]
        echo = next((one for one in twins if is_echo_save(one)), None)
        after = later[0] if later else None
        return CheckpointPair(before, echo, after, self._advice(step, before, after))

    def diagnose(self, step: int | None = None, **options: Any) -> Any:
        """Diagnose a jump of the loss with the doctor, on the checkpoints before and after it.

        Args:
            step: a logged step. The default is the highest spike, or a level shift soon after a resume. Without either,
                every resume is compared; the worst diagnosis is returned, and its notes name the others. Without a
                resume, all steps are compared.
            options: as for ``wb.doctor``: ``betas``, ``lr``, ``weight_decay``, ``deep``, ``threads``, ``progress`` ….

        Returns:
            A ``Diagnosis`` whose notes say which checkpoints were compared, and why.

        Raises:
            UsageError: no complete checkpoint is near the step; the message says which to keep next time.
            OpenError: a checkpoint cannot be opened.
        """
        return above(self, "diagnose")(self, step, **options)

    def plot(self, metrics: Sequence[str] | None = None) -> Any:
        """Return Matplotlib's figure of the curves with resumes, jumps and checkpoints on one axis.

        Args:
            metrics: names in ``metrics``; by default the loss, the learning rate and the norm of the gradient.

        Returns:
            A ``matplotlib.figure.Figure`` with a method ``save(path)``, which writes PNG, SVG or PDF, depending on the
            path.

        Raises:
            MissingExtraError: Matplotlib is not installed (extra ``figures``).
            UsageError: a metric was not logged.
        """
        return above(self, "plot")([self], metrics)

    def view(self) -> Any:
        """Return the run's page of the dashboard as a ``panel.viewable.Viewer``, for a notebook."""
        return above(self, "view")(self)

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        diagnose: bool = True,
        layers: bool | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Write the run as one HTML file that needs no network: curves, diagnosis, layers and checkpoints.

        Args:
            path: the file; an existing one is replaced.
            diagnose: compare the checkpoints around its highest jump, or else its last resume.
            layers: measure the weights and moments of every step; by default if they have up to 256 MiB.
            progress: called with the fraction done; raise to cancel.

        Returns:
            The path.

        Raises:
            WriteError: the file cannot be written.
            OpenError: a checkpoint cannot be opened.
        """
        return str(above(self, "to_html")(self, path, diagnose=diagnose, layers=layers, progress=progress))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: path steps sources metrics resumes spikes ghosts notes; the metrics as
        ``name → {"step": […], "value": […]}``."""
        curves = {
            name: {"step": steps.tolist(), "value": [finite(value) for value in values.tolist()]}
            for name, (steps, values) in self._curves().items()
        }
        tables = {name: records(getattr(self, name)) for name in ("steps", "sources", "resumes", "spikes", "ghosts")}
        return {"path": self.path, **tables, "metrics": curves, "notes": list(self.notes)}

    # ---- inside -------------------------------------------------------------------------------------------------

    def saves(self) -> list[Found]:
        """Return its complete checkpoints by step, without second saves of a step."""
        return [one for one in self.found if one.complete and not is_echo_save(one)]

    def place_of(self, found: Found) -> str:
        """Return the path or URL of a checkpoint of the run."""
        return self.root if found.path == "." else f"{self.root.rstrip('/')}/{found.path}"

    def _rank(self, one: JoinedLog) -> tuple[Any, ...]:
        steps = [found.step for found in self.found if found.step is not None]
        covered = sum(one.curves[next(iter(one.curves))].steps[-1] >= step for step in steps) if one.curves else 0
        kind = FILES.index(one.log.kind) if one.log.kind in FILES else len(FILES)
        return one.unit != "step", one.loss is None, -covered, -one.points, kind, one.log.path

    def _same(self, one: JoinedLog) -> bool:
        """Return whether another log is of the same run: it has the first log's steps and, where both log it, the same
        loss.
        """
        first = self._joined[0]
        curve = one.loss or max(one.curves.values(), key=lambda each: len(each.steps))
        known = first.loss or max(first.curves.values(), key=lambda each: len(each.steps))
        if one.unit != first.unit or one.unit == "lines" or not len(curve.steps):
            return False
        shared, mine_at, other_at = np.intersect1d(curve.steps, known.steps, assume_unique=True, return_indices=True)
        if len(shared) < SHARED * len(curve.steps):
            return False
        if one.loss is None or first.loss is None:
            return True
        mine, other = curve.values[mine_at], known.values[other_at]
        finite_ = np.isfinite(mine) & np.isfinite(other)
        if not finite_.any():
            return True
        relative = np.abs(mine - other)[finite_] / np.maximum(np.abs(other[finite_]), 1e-12)
        return bool(np.median(relative) <= ALIKE)

    def _check(self) -> None:
        """Note a log that cannot be of these checkpoints."""
        loss = self._loss()
        steps = [one.step for one in self.found if one.step is not None]
        if not steps or self._counted:
            return
        if loss is None:
            if not self._joined and not self.log_notes and not self._unknown:
                self.notes.append(NO_LOG)
            return
        first, last = int(loss[0][0]), int(loss[0][-1])
        if min(steps) > last + max(1, self._joined[0].interval):
            self.notes.append(
                f"the log ends at step {last:,}, before the first checkpoint (step {min(steps):,}): it may belong to "
                "another run"
            )
        elif max(steps) < first - 1:
            self.notes.append(
                f"the log begins at step {first:,}, after the last checkpoint (step {max(steps):,}): it may belong to "
                "another run"
            )

    @property
    def _counted(self) -> bool:
        """Whether the curves are over the rows of a log, or over samples or tokens, because it states no steps."""
        return bool(self._joined) and self._joined[0].unit != "step"

    @property
    def _zero_based(self) -> bool:
        return bool(self._joined) and (
            self._joined[0].log.zero_based
            or any(len(c.steps) and c.steps[0] == 0 for c in self._joined[0].curves.values())
        )

    def _curves(self) -> dict[str, tuple[Any, Any]]:
        out: dict[str, tuple[Any, Any]] = {}
        for one in self._used:
            main = {what: name for name, what in one.main.items()}
            known = [main[what] for what in MEANINGS if what in main]
            for name in [*known, *(name for name in one.curves if name not in one.main)]:
                curve = one.curves[name]
                shown = one.main.get(name, name)
                if shown in out or not len(curve.steps):
                    continue
                out[shown] = (curve.steps, curve.values)
        return out

    def _loss(self) -> tuple[Any, Any] | None:
        curve = self._joined[0].loss if self._joined else None
        return None if curve is None or not len(curve.steps) else (curve.steps, curve.values)

    def _loss_at(self, step: int) -> float:
        loss = None if self._counted else self._loss()
        if loss is None:
            return math.nan
        at = int(np.searchsorted(loss[0], step - (1 if self._zero_based else 0), "right")) - 1
        return (
            float(loss[1][at]) if at >= 0 and step - loss[0][at] <= max(10, 2 * self._joined[0].interval) else math.nan
        )

    @cached_property
    def _resumes(self) -> list[Resume]:
        """Notes of all logs, and on second saves of one step, each once."""
        found: dict[int, Resume] = {}
        for one in self._used:
            for resume in one.resumes:
                found.setdefault(resume.first_after, resume)
        for save in self.found:
            if save.complete and is_echo_save(save) and save.step is not None:
                first = save.step + (0 if self._zero_based else 1)
                why = f"{save.path!r} was saved right after a load"
                if first not in found:
                    found[first] = Resume(first, save.step, 0, save.step, False, why)
        for resume in self._beside():
            found.setdefault(resume.first_after, resume)
        return [found[step] for step in sorted(found)]

    def _beside(self) -> Iterator[Resume]:
        """Yield resumes that the log of the loss does not show: a console log of the same run names the step that was
        loaded, or the log begins right after a checkpoint.
        """
        loss = self._loss()
        if loss is None or self._counted:
            return
        steps, zero, interval = loss[0], 1 if self._zero_based else 0, self._joined[0].interval
        known = [one.first_after for one in self._joined[0].resumes]
        for log in self._starts_only:
            for mark in log.starts:
                loaded = mark.first if mark.loaded is None else mark.loaded
                at = int(np.searchsorted(steps, (loaded or 0) + 1 - zero))
                goes_on = loaded is not None and 0 < at < len(steps) and _GOES_ON.search(mark.text) is not None
                if goes_on and not any(abs(int(steps[at]) - one) <= interval for one in known):
                    why = f"{mark.text} ({log.path!r})"
                    yield Resume(int(steps[at]), int(steps[at - 1]), 0, loaded, mark.fresh, why)
        yield from self._after_saves(steps, known)
        first = int(steps[0])
        saves = sorted({one.step for one in self.saves() if one.step is not None})
        if first in known or len(saves) < 2 or min(np.diff(saves)) < BEGINS * interval:
            return
        if any(max(1, first - interval + zero) <= step <= first - 1 + zero for step in saves):
            yield Resume(first, None, 0, None, False, "the log begins right after a checkpoint")

    def _after_saves(self, steps: Any, known: Sequence[int]) -> Iterator[Resume]:
        """Yield resumes that only show after a save: a long time without output, one step as slow as the first, a
        learning rate that starts over, or other arguments of the trainer.

        What happens after many saves is how this trainer works, and not a sign.
        """
        log, zero = self._joined[0].log, 1 if self._zero_based else 0
        if log.opened or log.counters or log.kind in NEW_FILES:
            return  # a restart would show in the log itself
        saves = {one.step: one for one in self.saves() if one.step is not None}
        deleted = deleted_saves(sorted(saves), BEGINS * self._joined[0].interval)
        steps_saved = sorted({*saves, *deleted, *log.saved})
        slow, waits = self._slow_starts(steps_saved, zero), self._waits(saves, steps_saved, zero)
        signs = (
            dict.fromkeys(self._rate_again(steps_saved, zero), "the learning rate starts over as at the first step"),
            {step: f"a step takes {times:.0f} times as long as usual, as the first one did" for step, times in slow},
            {step: f"nothing was written for {waited(seconds)}" for step, seconds in waits.items()},
            dict.fromkeys(self._other_arguments, "'training_args.bin' of the checkpoints differs"),
            dict.fromkeys(self._twice(steps_saved, zero), "a step is logged again, with the same loss"),
        )
        found: dict[int, str] = {}
        for sign in signs:
            fresh = {}
            for step, words in sign.items():
                until = next((one for one in steps_saved if one > step), math.inf)
                if not any(step < one + zero <= until for one in known):
                    fresh[step] = words
            if len(fresh) <= max(1, USUAL * len(steps_saved)):
                found |= fresh
        for step in sorted(found):
            at = int(np.searchsorted(steps, step + 1 - zero))
            if 0 < at < len(steps):
                after = repr(saves[step].path) if step in saves else f"the save of step {step:,}"
                yield Resume(int(steps[at]), int(steps[at - 1]), 0, step, False, f"after {after}, {found[step]}")

    def _twice(self, saves: Sequence[int], zero: int) -> list[int]:
        """Return the saves after which the first row is there twice: logged before the trainer ended, and again."""
        first = self._joined[0]
        twice, steps = set(first.twice), first.loss.steps if first.loss is not None else np.zeros(0, np.int64)
        at = {save: int(np.searchsorted(steps, save + 1 - zero)) for save in saves}
        return [save for save, n in at.items() if 0 < n < len(steps) - 1 and int(steps[n]) in twice]

    def _waits(self, saves: Mapping[int, Found], every: Sequence[int], zero: int) -> dict[int, float]:
        """Return the saves that a long time without output follows, with its seconds, by the times of log or files."""
        pauses = self._joined[0].pauses
        if pauses is not None:
            slow = [one for one in pauses if one[2] > SLOW_SAVE]
            return {step: seconds for before, after, seconds in slow for step in every if before <= step - zero < after}
        steps, times = np.array(list(saves), float), np.array([one.mtime for one in saves.values()])
        if self._joined[0].log.kind not in FILES or len(steps) < TIMED:  # what prints its rows prints when it starts
            return {}
        if (np.diff(times) <= 0).any():  # copied: the times are not those of saving
            return {}
        waits, expected = np.diff(times), np.median(np.diff(times) / np.diff(steps)) * np.diff(steps)
        more = waits - expected
        spread = 1.4826 * float(np.median(np.abs(more - np.median(more))))
        long = more > np.maximum(expected, max(LATE, SPREADS * spread))
        return {int(steps[at]): float(waits[at]) for at in np.flatnonzero(long)}

    def _slow_starts(self, saves: Sequence[int], zero: int) -> list[tuple[int, float]]:
        """Return the saves after which one step is slow, as only the first one was: what was compiled and allocated
        there is again; and how many times as long as usual it takes.
        """
        if self._joined[0].log.by_metric:
            return []
        for name, (steps, values) in self._curves().items():
            inverse = name == "throughput"
            named = inverse or takes_time(name) or (name == "time" and self._joined[0].log.kind == "nanogpt")
            if not named or len(steps) < SLOW_ROWS or steps[0] > self._joined[0].interval:
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                times = 1 / values if inverse else values
                times = times / np.nanmedian(times)
            least, most = (share * times[0] for share in SLOW_LIKE)
            slow = (times > max(SLOW_TIMES, least)) & (times < most)
            if not slow[0]:
                continue
            slow[1:] &= ~slow[:-1]  # of several slow steps in a row, the first
            at = {n: step for step in saves if (n := int(np.searchsorted(steps, step + 1 - zero))) < len(steps)}
            if at and np.median(times[list(at)]) > SAVED_IN:
                continue  # the time includes that of saving, which varies
            return [(at[n], float(times[n])) for n in np.flatnonzero(slow).tolist() if n in at]
        return []

    def _rate_again(self, saves: Sequence[int], zero: int) -> list[int]:
        """Return the saves after which the learning rate falls and repeats its course from the first step."""
        curve = self._curves().get("lr")
        if curve is None or len(curve[0]) < 2 * AGAIN or curve[0][0] > self._joined[0].interval:
            return []
        steps, rates = curve
        out = []
        for save in saves:
            at = int(np.searchsorted(steps, save + 1 - zero))
            now = rates[at : at + AGAIN]
            if at < AGAIN or len(now) < AGAIN or not now[0] < FALLEN * rates[at - 1]:
                continue
            rates_at_save = np.interp(steps[at : at + AGAIN] - save, steps, rates)
            if now.min() < now.max() and np.allclose(now, rates_at_save, rtol=0.05, atol=0):
                out.append(save)
        return out

    @cached_property
    def _events(self) -> list[Spike]:
        loss = self._loss()
        if loss is None:
            return []
        starts = [int(np.searchsorted(loss[0], one.first_after)) for one in self._resumes]
        return find_spikes(loss[1].tolist(), starts)

    def _resume_before(self, step: int) -> Resume | None:
        return next((one for one in reversed(self._resumes) if one.first_after <= step), None)

    def _loaded(self, one: Resume) -> tuple[int | None, Found | None]:
        """Return the step that a resume continued from, if the log names it, or its checkpoint exists; and that
        checkpoint.
        """
        zero = 1 if self._zero_based else 0
        interval = self._joined[0].interval if self._joined else 1
        whole = [found for found in self.found if found.complete and not is_echo_save(found)]
        if one.loaded is not None:
            candidates = [found for found in whole if found.step in (one.loaded, one.loaded + zero)]
            return one.loaded, candidates[-1] if candidates else None
        if one.fresh:
            return None, None
        low, high = one.first_after - interval + zero, one.first_after - 1 + zero
        candidates = [found for found in whole if low <= (found.step or 0) <= high]
        return (candidates[-1].step, candidates[-1]) if candidates else (None, None)

    @staticmethod
    def _first_of(found: Sequence[Found]) -> Found:
        return next((one for one in found if not is_echo_save(one)), found[0])

    def _advice(self, step: int, before: Found | None, after: Found | None) -> str:
        if before is not None and after is not None:
            return f"compare {before.path!r} with {after.path!r}"
        if before is None and after is None:
            newest = self.found[-1] if self.found else None
            why = ""
            if newest is not None and newest.why:
                why = f" ({newest.path!r}, the newest one, is not complete: {newest.why})"
            return f"no complete checkpoint exists{why}: keep one from before step {step:,} and one from soon after it"
        if before is None:
            assert after is not None
            return f"no complete checkpoint from before step {step:,} exists: keep the one that the run resumes from"
        return f"no complete checkpoint from step {step:,} or later exists: save one soon after a resume"


def deleted_saves(kept: Sequence[int], least: int) -> list[int]:
    """Return the steps of saves that a trainer has deleted, if those that it kept are at multiples of one number, which
    is ``least`` or more. The last save may be anywhere.

    >>> deleted_saves([120, 160, 185], 5)
    [40, 80]
    """
    intervals = {two - one for one, two in pairwise(kept[:-1])}
    interval = intervals.pop() if len(intervals) == 1 else 0
    return list(range(interval, kept[0], interval)) if interval >= max(least, 1) and kept[0] % interval == 0 else []


def is_echo_save(found: Found) -> bool:
    """Return whether a checkpoint was saved right after a load, by the name that docs/echo.md gives it."""
    return "echo" in os.path.basename(found.path)


def after_resume(row: Mapping[str, Any]) -> bool:
    """Return whether a row of ``Run.spikes`` begins soon after a resume."""
    resume = row["resume"]
    return resume is not None and resume == resume and row["step"] - resume <= NEAR


def spike_rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Sort rows of ``Run.spikes``: highest first, but a level shift that no resume explains after all others."""
    return row["kind"] == "level shift" and not after_resume(row), -math.inf if row["kind"] == "nan" else -row["height"]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table in JSON's types; missing values are ``None``."""
    out = []
    for row in frame.to_dict("records"):
        plain: dict[str, Any] = {}
        for name, value in row.items():
            if hasattr(value, "isoformat"):
                plain[name] = None if value != value else value.isoformat()
            elif isinstance(value, (bool, str)) or value is None:
                plain[name] = value
            elif isinstance(value, np.generic):
                plain[name] = finite(value.item()) if isinstance(value, np.floating) else value.item()
            elif isinstance(value, float):
                plain[name] = finite(value)
            elif isinstance(value, int):
                plain[name] = value
            else:
                plain[name] = None  # pandas' NA
        out.append(plain)
    return out
