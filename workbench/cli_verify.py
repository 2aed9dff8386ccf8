"""``workbench verify``: is a checkpoint whole?"""

from __future__ import annotations

import argparse

from workbench.analysis.verify import verify as check
from workbench.cli_common import print_json, table_width
from workbench.views.progress import progress
from workbench.views.report import report_text

__all__ = ["verify"]


def verify(options: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 clean, 1 warnings, 2 errors.

    ``--partial`` and ``--no-cache`` are how verify opens in any case: what is lost is a finding, and a catalog of
    earlier is no proof of now.
    """
    with progress(f"verify {options.path}") as tick:
        report = check(
            options.path,
            options.deep,
            format=options.format,
            io=options.io,
            manifest=options.manifest,
            threads=options.threads,
            tick=tick,
        )
    if options.json:
        print_json(report.to_json())
    else:
        print(report_text(report, width=table_width()))
    return report.exit_code
