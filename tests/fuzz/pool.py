"""Cases in worker processes: a wall time for each, a new process for one that hung or died, and a second try alone."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START = 180  #: s until a worker has imported all and looked at its first checkpoint
WALL = 20  #: s of a case
SECOND = 60  #: s of a case that is tried again, alone: the machine may have been busy


class Process:
    """A worker, and the folder that it works in."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="workbench-fuzz-")
        self._said = open(os.path.join(self.folder, "said"), "w+")  # noqa: SIM115
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": os.path.join(self.folder, "work", "out"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        work = os.path.join(self.folder, "work")
        os.mkdir(work)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", work],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        self._read = b""
        first = self._answer(START)
        if first is None or "ready" not in first:
            raise RuntimeError(f"the worker did not start: {self.close()}")

    def ask(self, case: int | str, seconds: float = WALL, *, quick: bool = False) -> dict[str, Any]:
        """What came of a case; of one that killed the worker or took too long, how it ended."""
        assert self._child.stdin is not None
        self._child.stdin.write((f"{case} quick\n" if quick else f"{case}\n").encode())
        self._child.stdin.flush()
        found = self._answer(seconds)
        return found if found is not None else {"case": case, "failures": [self._end(seconds)], "ended": True}

    def close(self) -> str:
        """End the process and take its folder away; returns the last that it said."""
        if self._said.closed:
            return ""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()
        self._said.seek(0)
        said = self._said.read()[-3000:]
        self._said.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return said

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        while b"\n" not in self._read:
            if not select.select([descriptor], [], [], seconds)[0]:
                return None
            more = os.read(descriptor, 1 << 16)
            if not more:
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self, seconds: float) -> str:
        try:
            code = self._child.wait(0.5)
        except subprocess.TimeoutExpired:
            return f"hang: no answer after {seconds:g} s; {self.close()}"
        what = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"died {what}; {self.close()}"


def run(
    seeds: Iterable[int],
    workers: int = 1,
    *,
    quick: bool = False,
    spare: list[Process] | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Every case, in any order. One that ended its worker is tried again when the others are done.

    Workers are taken from ``spare``, where it is given, and are left there: to start one takes as long as 20 cases.
    """
    left: SimpleQueue[int] = SimpleQueue()
    for seed in seeds:
        left.put(seed)
    found: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []

    def serve() -> None:
        process: Process | None = None
        for seed in _drain(left):
            process = process or (spare.pop() if spare else Process())
            outcome = process.ask(seed, quick=quick)
            (again if outcome.get("ended") else found).append(outcome)
            if outcome.get("ended"):
                process = None
            elif tell is not None:
                tell(outcome)
        if process is not None:
            process.close() if spare is None else spare.append(process)

    with ThreadPoolExecutor(workers) as threads:
        for done in [threads.submit(serve) for _ in range(workers)]:
            done.result()
    for first in again:
        second = once(first["case"], quick=quick)
        if "died" in first["failures"][0]:
            second["failures"] += first["failures"]  # load explains slowness, never a signal
        found.append(second)
        if tell is not None:
            tell(second)
    return found


def once(case: int | str, *, quick: bool = False) -> dict[str, Any]:
    """One case in a worker of its own, with time to spare."""
    process = Process()
    outcome = process.ask(case, SECOND, quick=quick)
    if not outcome.get("ended"):
        process.close()
    return outcome


def _drain(left: SimpleQueue[int]) -> Iterator[int]:
    while True:
        try:
            yield left.get_nowait()
        except Empty:
            return
