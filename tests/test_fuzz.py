"""Whatever is done to a checkpoint: an answer or one of our errors, in time, within bounds, without side effects.

150 cases in ``make test``, 10,000 with ``WORKBENCH_SLOW=1``. A case that fails is run again, and told, by
``python -m tests.fuzz SEED``; :mod:`tests.fuzz` says what a case is.
"""

from __future__ import annotations

import sys

import pytest

import workbench as wb
from tests.fuzz import pool
from tests.fuzz.samples import SAMPLES
from tests.properties import SLOW
from workbench.formats import FORMATS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are read from /proc")

BLOCK = 250 if SLOW else 150
BLOCKS = 40 if SLOW else 1
#: Cases that failed once: seed → what was wrong, and is mended.
MENDED = {
    1926: "PaddleNLP, fleet: one rank without its optimizer's file was not noticed",
    2411: "DCP: a ValueError of an object of negative length",
    2770: "safetensors: a RuntimeWarning of a signalling NaN in the doctor",
    3713: "PaddleNLP: a TypeError of a list where the metadata says whether a parameter was divided",
    3851: "Megatron, NVRx local: the doctor of a run followed a step that is a link out of it",
    4184: "Colossal-AI: a message as long as the file name in an index",
    8640: "the suite itself: a document that contained itself, made of an edit's own constants",
    8952: "PaddleNLP: a KeyError of a moment on a rank that does not hold its weight",
}


@pytest.fixture(scope="module")
def spare():
    """Workers that wait for the next test."""
    found = []
    yield found
    for process in found:
        process.close()


def failures(seeds, spare, *, quick=False):
    found = pool.run(seeds, 1, quick=quick, spare=spare)
    assert len(found) == len(seeds)
    bad = [one for one in found if one["failures"]]
    lines = [
        f"python -m tests.fuzz {one['case']}   # {one.get('sample')}: {one.get('done')}: {one['failures']}"
        for one in bad
    ]
    return found, "\n".join(lines)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_mutated_checkpoints_are_answers_or_errors_of_ours(spare, block):
    found, bad = failures(range(block * BLOCK, (block + 1) * BLOCK), spare, quick=not SLOW)
    assert not bad, bad
    steps = [how for one in found for how in one["steps"].items()]
    for name in ("open", "verify", "against", "discover"):
        assert sum(step == name for step, _ in steps) == BLOCK
    for name in ("read", "objects", "stats", "diff", "layout", "export", "doctor", "pair"):
        assert steps.count((name, "ok")) >= 5, f"{name} was hardly ever reached"
    assert sum(one["lost"] for one in found) >= 5, "files were hardly ever cut or deleted"


def test_what_failed_once_stays_mended(spare):
    _, bad = failures(list(MENDED), spare)
    assert not bad, bad


TRAPS = {
    "system": "os.system",
    "import": "imports 'canary_module'",
    "exec": "executes code",
    "socket": "socket.__new__",
    "outside": "reads",
    "passwd": "reads '/etc/passwd'",
    "write": "writes to",
    "list": "os.listdir '/etc'",
}


def test_the_limits_and_the_hook_notice_what_no_case_may_do(spare):
    process = spare.pop() if spare else pool.Process()
    try:
        for trap, said in TRAPS.items():
            found = process.ask(trap)
            assert any(said in one for one in found["noted"]), found
        assert process.ask("memory")["grown"] > 512
        assert process.ask("addresses")["said"] == "MemoryError"
        assert "hang: no answer after 0.5 s" in process.ask("hang", 0.5)["failures"][0]
    finally:
        process.close()
    assert "died by signal 6" in pool.once("signal")["failures"][0]


def test_every_format_is_mutated(tmp_path):
    found = set()
    for number, sample in enumerate(SAMPLES):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.add(wb.open(sample.copy(folder), cache=False).format)
    assert found == set(FORMATS)
