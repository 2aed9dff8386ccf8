"""ckpt-chaos against the exporter: killed before each event, with a file torn, with all that was not synced lost."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.properties import SLOW

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ckpt_chaos") is None, reason="needs ckpt-chaos: pip install ckpt-chaos==0.1.8"
)
ROOT = Path(__file__).resolve().parents[1]
JOB = [sys.executable, "-m", "tests.chaos_job"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two checkpoints that are exported, one after the other."""
    folder = tmp_path_factory.mktemp("chaos") / "sources"
    subprocess.run([*JOB, "sources", str(folder)], cwd=ROOT, check=True)
    return folder


def chaos(sources: Path, work: Path, format: str, points: int) -> tuple[str, list[dict[str, Any]]]:
    """Its table, and the record of each crash point."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_chaos", "run", "--modes", "before,torn,unsynced"),
            *("--max-points", str(points), "--jobs", "2", "--work", str(work)),
            *("--result-cmd", " ".join([*JOB, "digest", "{out}", format])),
            *("--", *JOB, "run", str(sources), "{out}", format),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout, [json.loads(path.read_text()) for path in sorted(work.glob("pt_*/result.json"))]


def verdict(record: dict[str, Any]) -> str:
    from ckpt_chaos.invariants import ResumeOutcome, classify

    return classify(ResumeOutcome(**record["outcome"]))


@pytest.mark.parametrize(("format", "few"), [("safetensors", 3), ("torch", 3)])
def test_every_crash_point_is_recovered_from(sources, tmp_path, format, few):
    table, records = chaos(sources, tmp_path, format, 1000 if SLOW else few)
    crashed = [record for record in records if "point" in record]
    assert len(crashed) == len(records) - 1 and len(crashed) >= (60 if SLOW else few)
    assert {verdict(record) for record in records} == {"PASS"}, table
    assert all(record["crashed"] for record in crashed) and "DID NOT CRASH" not in table, table
    assert {record["point"][1] for record in crashed} == {"before", "torn", "unsynced"}
    if SLOW:
        assert sum("resumed" in record["resume_tail"] for record in crashed) > 20, "resume was hardly ever needed"


@pytest.mark.slow
@pytest.mark.skipif(not SLOW, reason="a minute; WORKBENCH_SLOW=1 runs it")
def test_a_careless_writer_is_found_out(sources, tmp_path):
    """The same harness, so that its passes mean something: torn and lost bytes of descriptors are seen."""
    _, records = chaos(sources, tmp_path, "careless", 1000)
    failed = {record["point"][1] for record in records if "point" in record and verdict(record) != "PASS"}
    assert failed == {"before", "torn", "unsynced"}
