"""Exports killed at random points, and failed at every call: the old state or the new one, and a way to go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.properties import SLOW

ROOT = Path(__file__).resolve().parents[1]


def told(folder: Path, *args: str) -> list[dict[str, Any]]:
    """What the worker says; its own assertions are this test's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_worker", str(folder), *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_deaths_at_random_points(tmp_path):
    """SIGKILL, SIGTERM, ENOSPC and EIO; folders and files, with and without resume: 800 of them in the slow tests."""
    rounds = 200 if SLOW else 10
    lines = told(tmp_path, str(rounds), "7")
    assert len(lines) == 4 and all(line["deaths"] >= rounds for line in lines)
    went_on = {resume: sum(line["went on"] for line in lines if line["resume"] == resume) for resume in (True, False)}
    assert went_on[True] > 0 and went_on[False] == 0, lines


@pytest.mark.slow
@pytest.mark.skipif(not SLOW, reason="minutes; WORKBENCH_SLOW=1 runs it")
def test_a_death_at_every_call(tmp_path):
    for line in told(tmp_path, "0", "0", "sweep"):
        assert line["deaths"] > 2.5 * line["calls"], line  # the last calls only remove what is left over
