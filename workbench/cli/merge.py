"""``workbench merge PART…``: combine the parts of a command that ran as an array of jobs."""

from __future__ import annotations

import argparse

from workbench.cli.common import note
from workbench.cli.manifest import manifest
from workbench.cli.stats import stats
from workbench.cli.verify import verify
from workbench.core.parts import read_parts
from workbench.errors import UsageError

_COMMANDS = {"manifest": manifest, "stats": stats, "verify": verify}


def merge(options: argparse.Namespace) -> int:
    """Print, or write, the same as the command in one process; return its exit code."""
    header, merged = read_parts(options.parts)
    command, stored = header.get("command"), header.get("options")
    if command not in _COMMANDS or not isinstance(stored, dict):
        raise UsageError(f"{options.parts[0]!r} is a part of {command!r}, which this version does not merge")
    given = {**vars(options), **stored, "merged": merged, "pins": header.get("pins"), "part": None}
    code = _COMMANDS[command](argparse.Namespace(**given, workers=None, dask=None))
    if merged.again:
        note(f"{merged.again:,} tasks depend on the results of other parts, so they ran in the merge")
    return code
