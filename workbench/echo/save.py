"""An echo with its tensors: a folder of ``torch.distributed.checkpoint``, and the fingerprints in it.

::

    echo-48000.incomplete/   every rank's shards, .metadata, workbench-echo.json
      └─ renamed ──▶ echo-48000/      only when it is complete; an older echo is then removed

Always DCP, even for one process: it writes each rank's part of DTensors, keeps names, and every tool reads it.
Source: torch 2.13 ``distributed/checkpoint/state_dict_saver.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from typing import Any

from workbench.analysis.echo_file import INSIDE, Echo, is_echo, write_echo
from workbench.core.ranks import Ranks
from workbench.errors import UsageError, WriteError

_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata|" + re.escape(INSIDE))


def save(state: dict[str, Any], echo: Echo, path: str, ranks: Ranks) -> str:
    """Write the echo, on every rank, and return its folder.

    Raises:
        UsageError: the path exists and is not an echo.
        WriteError: the echo cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    unfinished = path + ".incomplete"
    with ranks.together():
        if ranks.rank == 0:
            _check(path)
            try:
                shutil.rmtree(unfinished, ignore_errors=True)
                os.makedirs(unfinished)
            except OSError as error:
                raise WriteError(f"cannot create {unfinished!r}: {error.strerror}; choose another path") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is intended
        try:
            dcp.save(state, checkpoint_id=unfinished, process_group=ranks.group, no_dist=ranks.size == 1)
        except OSError as error:
            raise WriteError(f"cannot write the echo into {unfinished!r}: {error}") from None
    with ranks.together():
        if ranks.rank == 0:
            write_echo(echo, unfinished)
            _check(path)
            if os.path.isdir(path):
                shutil.rmtree(path)
            os.rename(unfinished, path)
    return path


def _check(path: str) -> None:
    """Refuse to replace anything but an echo."""
    if not os.path.lexists(path):
        return
    names = os.listdir(path) if os.path.isdir(path) and not os.path.islink(path) else [""]
    if not names:
        return
    if not is_echo(path) or not all(_OWN.fullmatch(name) for name in names):
        raise UsageError(f"{path!r} exists and is not an echo; choose another path")
