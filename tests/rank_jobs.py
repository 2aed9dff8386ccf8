"""Jobs of several gloo ranks: all run each case of a module together, and each rank says what came of it.

::

    told_by("tests.load_worker", …)(4) ──► python -m tests.load_worker 4 OUT ──► 4 ranks: case_a(OUT/case_a) …
                                     ◄── OUT/rank0.json … : case → {"result": …} or {"error": its traceback}

A case that leaves a rank waiting ends by the group's timeout. ``python -m MODULE RANKS OUT [CASE …]`` runs one by hand.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each rank job is a process, which does without it
    import pytest

__all__ = ["cases_of", "main", "told_by"]

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = timedelta(seconds=60)  #: of one collective


def cases_of(module: ModuleType) -> list[str]:
    """Names of its cases, in the order of the file."""
    return [name for name in vars(module) if name.startswith("case_")]


def told_by(module: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each rank of a job of so many says of each case; a job is run once."""
    done: dict[int, list[dict[str, Any]]] = {}

    def run(ranks: int) -> list[dict[str, Any]]:
        if ranks not in done:
            out = tmp_path_factory.mktemp(f"ranks{ranks}")
            command = [sys.executable, "-m", module, str(ranks), str(out)]
            made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
            assert made.returncode == 0, made.stderr[-4000:]
            done[ranks] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        return done[ranks]

    return run


def main(module: str, arguments: list[str]) -> None:
    """``RANKS OUT [CASE …]``: run the cases of a module, or all of them."""
    import torch.multiprocessing as mp

    import_module(module)  # once for all ranks, which are forked before there is any thread
    ranks, out, *cases = arguments
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_rank, (module, int(ranks), out, port, cases), nprocs=int(ranks), start_method="fork")


def _rank(rank: int, name: str, ranks: int, out: str, port: int, cases: list[str]) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # torch's own; ours are errors in the tests of one process
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORKBENCH_CACHE": tempfile.mkdtemp(dir=out)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=TIMEOUT)
    module = import_module(name)
    told: dict[str, Any] = {}
    for case in cases or cases_of(module):
        folder = Path(out) / case
        folder.mkdir(exist_ok=True)
        try:
            told[case] = {"result": getattr(module, case)(folder)}
        except Exception:
            told[case] = {"error": traceback.format_exc()}
        dist.barrier()
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
