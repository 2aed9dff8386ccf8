"""``workbench merge PART…``: combine the parts of a command that ran as an array of jobs."""

from __future__ import annotations

import argparse
import os

from workbench.cli.common import note, places, storage
from workbench.cli.manifest import manifest
from workbench.cli.stats import stats
from workbench.cli.verify import verify
from workbench.core.parts import read_parts
from workbench.core.remote.url import is_url
from workbench.core.words import plural
from workbench.errors import MissingFileError, NotACheckpointError, UsageError

_COMMANDS = {"manifest": manifest, "stats": stats, "verify": verify}


def merge(options: argparse.Namespace) -> int:
    """Print, or write, the same as the command in one process; return its exit code.

    Raises:
        UsageError: the parts do not fit together, or are of an unknown command.
        MissingFileError: a part, or the checkpoint, is not there.
        ChangedError: the checkpoint was replaced after the parts were computed.
    """
    header, merged = read_parts(options.parts)
    command, stored = header.get("command"), header.get("options")
    if command not in _COMMANDS or not isinstance(stored, dict):
        raise UsageError(f"{options.parts[0]!r} is a part of {command!r}, which this version does not merge")
    if options.checkpoint is not None:
        stored = stored | ({"paths": [options.checkpoint]} if "paths" in stored else {"path": options.checkpoint})
    given = {**vars(options), **stored, "merged": merged, "pins": header.get("pins"), "part": None}
    whole = argparse.Namespace(**given, workers=None, dask=None)
    paths = places(whole)
    for path in paths[:1]:
        _check_there(path)
    try:
        with storage(options, paths):
            code = _COMMANDS[command](whole)
    except (MissingFileError, NotACheckpointError):
        if options.checkpoint is None and any(map(is_url, paths)):
            note(
                "parts contain no credentials: set them in the environment or with --storage-option; if the URL itself "
                "has a password or a signature, give it again with --checkpoint"
            )
        raise
    if merged.again:
        note(f"{plural(merged.again, 'task', 'depend')} on the results of other parts, so they ran in the merge")
    return code


def _check_there(path: str) -> None:
    """Check that the checkpoint of the parts is reached from this folder.

    Raises:
        MissingFileError: its path is relative, and does not exist here.
    """
    if not (is_url(path) or os.path.isabs(path) or os.path.exists(os.path.expanduser(path))):
        raise MissingFileError(
            f"{path!r} does not exist in this folder: the parts name it relative to the folder in which they ran; "
            "merge them there, or name the checkpoint with --checkpoint"
        )
