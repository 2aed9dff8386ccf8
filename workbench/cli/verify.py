"""``workbench verify``: check that a checkpoint is intact."""

from __future__ import annotations

import argparse

import workbench
from workbench.analysis.report import Report
from workbench.analysis.verify import verify as check
from workbench.checkpoint import Checkpoint
from workbench.cli.common import print_result
from workbench.cli.workers import check_pins, run_part, workers
from workbench.core.remote.url import shown
from workbench.errors import UsageError
from workbench.views.progress import progress_bar
from workbench.views.report import report_text


def verify(options: argparse.Namespace) -> int:
    """Print the report; return the exit code: 0 clean, 1 warnings, 2 errors.

    ``--partial`` and ``--no-cache`` always apply: missing data is reported as a finding, and a cached catalog would
    prove nothing about the current files.
    """
    if options.part is not None and not options.deep:
        raise UsageError("--part divides what is read: give --deep as well")
    if options.part is not None:
        return run_part(options, _opened(options), lambda: _checked(options))
    if getattr(options, "merged", None) is not None:
        check_pins(options, _opened(options))
    report = _checked(options)
    print_result(options, report, report_text)
    return report.exit_code


def _opened(options: argparse.Namespace) -> Checkpoint:
    return workbench.open(options.path, format=options.format, cache=False, partial=True)


def _checked(options: argparse.Namespace) -> Report:
    with workers(options) as executor, progress_bar(f"verify {shown(options.path)}") as progress:
        return check(
            options.path,
            options.deep,
            format=options.format,
            manifest=options.manifest,
            threads=options.threads,
            progress=progress,
            executor=executor,
        )
