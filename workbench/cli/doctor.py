"""``workbench doctor``: why did the loss jump after the resume?

::

    workbench doctor RUN                            a run's folder; its log says which steps are compared
    workbench doctor BEFORE AFTER --echo ECHO       with an echo: the strongest evidence
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.common import note, open_as, paint, print_json, say
from workbench.cli.workers import workers
from workbench.core.remote.url import is_url
from workbench.errors import (
    CorruptError,
    IncompleteError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    UsageError,
)
from workbench.views.pages import page_path, write_page
from workbench.views.progress import progress_bar

if TYPE_CHECKING:
    from workbench.analysis.run import Run
    from workbench.doctor.reasoning.diagnosis import Diagnosis

HEADS = ("RESUMED", "LEVEL SHIFT", "LOG", "VERDICT", "RULED OUT", "NOT CHECKED", "ALSO SEEN")


def doctor(options: argparse.Namespace) -> int:
    """Print the diagnosis; return the exit code: 0 nothing found, 1 warnings, 2 errors.

    Options: ``before after echo betas lr weight_decay shallow html all threads`` and the common ones.
    """
    from workbench.doctor.examine import doctor as examine

    _check_given(options)
    run = _run(options)
    page = None if options.html is None else page_path(options.html, "--html")
    paths = [_opened(options, path) for path in (options.before, options.after, options.echo)]
    with workers(options) as executor, progress_bar("doctor") as progress:
        examined = partial(examine, *paths[:2], echo=paths[2]) if run is None else run.diagnose
        found = examined(
            betas=None if options.betas is None else tuple(options.betas),
            lr=options.lr,
            weight_decay=options.weight_decay,
            deep=not options.shallow,
            format=options.format,
            threads=options.threads,
            progress=progress,
            executor=executor,
        )
    if page is not None:
        _write(found, page, options)
    if options.json:
        print_json(found.to_dict() | ({} if run is None else {"run": _events(run)}))
    else:
        from workbench.views.doctor import diagnosis_lines, diagnosis_text
        from workbench.views.run import event_lines

        for line in [] if run is None else event_lines(run):
            say(paint(line, "bad") if line.startswith("SPIKE") else _headed(line))
        for line in diagnosis_lines(found) if options.all else diagnosis_text(found).split("\n"):
            say(paint(line, "bad") if " ERROR  " in line[:14] else _headed(line))
    return found.exit_code


def _run(options: argparse.Namespace) -> Run | None:
    """Return the run that the command is about; which of its checkpoints are compared is decided in ``of_run``.

    Raises:
        UsageError: ``--logs`` beside two checkpoints, or not a log. OpenError: with ``--logs``, not a run.
    """
    from workbench.analysis.run import run
    from workbench.runs import discover

    alone = options.after is None and options.echo is None
    if options.logs and not alone:
        raise UsageError(
            "--logs needs a run's folder; with two checkpoints or an echo, the steps to compare are already given"
        )
    if not alone or (
        options.logs is None
        and (options.format is not None or not (is_url(options.before) or os.path.isdir(options.before)))
    ):
        return None
    try:
        if options.logs is None and len([one for one in discover(options.before) if one.step is not None]) < 2:
            return None  # one checkpoint: a log beside it is of no use
        return run(options.before, options.logs)
    except OpenError:
        if options.logs:
            raise
        return None  # a checkpoint, or a folder without steps: the doctor reports what it is


def _events(run: Run) -> dict[str, Any]:
    """Return the part of a run's JSON about its events, without the curves."""
    whole = run.to_dict()
    return {name: whole[name] for name in ("sources", "resumes", "spikes", "notes")}


def _opened(options: argparse.Namespace, path: Any) -> Any:
    """Open with the common options; return the path if the doctor itself has to choose a step or report the damage."""
    from workbench.analysis.echo_file import is_echo

    if path is None or (options.after is None and options.echo is None):
        return path  # a single path may be a run's folder
    if is_echo(path):
        return path  # fingerprints without tensor data, read by the doctor itself
    try:
        return open_as(options, path)
    except (CorruptError, IncompleteError, MissingFileError):
        return path


def _check_given(options: argparse.Namespace) -> None:
    for beta, least in zip(options.betas or (), ("from 0", "above 0"), strict=False):
        if not 0 <= beta < 1 or (beta == 0 and least == "above 0"):
            which = "β1" if least == "from 0" else "β2"
            raise UsageError(f"--betas {beta:g}: {which} is {least} to below 1, as in --betas 0.9 0.95")
    for name in ("lr", "weight_decay"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be finite and not negative")


def _write(found: Diagnosis, target: Path, options: argparse.Namespace) -> None:
    """Write the page atomically; for a run's folder, with the run's history."""
    from workbench.doctor.pictured.history import history
    from workbench.views.doctor_html import diagnosis_page
    from workbench.views.doctor_pictures import doctor_pictures, timeline_picture

    pictures = doctor_pictures(found)
    if options.after is None and options.echo is None and len(found.subjects) > 1:
        with suppress(NotACheckpointError):  # two checkpoints without steps in their names
            frame = history(options.before, values=not options.shallow, threads=options.threads)
            if len(frame) > 1:
                pictures["timeline"] = timeline_picture(frame, found.subjects[0].step)
    page = diagnosis_page(found, pictures)
    write_page(page, target)
    note(f"wrote {os.fspath(target)!r}")


def _headed(line: str) -> str:
    for head in HEADS:
        if line.startswith(head):
            return paint(head, "head") + line[len(head) :]
    return line
