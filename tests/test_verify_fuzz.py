"""Whatever happens to a file of a checkpoint, verify reports; it never raises, and losses never pass."""

from __future__ import annotations

import json
import random

import pytest

from tests.faults import SAMPLES, Case
from tests.properties import SLOW
from workbench.analysis.verify import verify

KINDS = ("flip", "zero", "cut", "gone", "junk", "grow", "twice", "empty")


def damage(case: Case, chance: random.Random) -> tuple[str, str, int]:
    """One random change of one random file of a checkpoint that holds chunks; returns kind, file and byte."""
    name = chance.choice(case.data_files())
    path = case.folder / name
    data, kind = bytearray(path.read_bytes()), chance.choice(KINDS)
    at = chance.randrange(len(data))
    some = min(chance.choice((1, 16, 512, 4096, 70_000)), len(data) - at)
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "zero":
        data[at : at + some] = bytes(some)
    elif kind == "junk":
        data[at : at + some] = chance.randbytes(some)
    elif kind == "grow":
        data += chance.randbytes(100)
    elif kind == "twice":
        data[at:at] = data[at : at + some]
    elif kind in ("cut", "empty"):
        del data[at if kind == "cut" else 0 :]
    path.unlink() if kind == "gone" else path.write_bytes(data)
    return kind, name, at


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
def test_random_damage_is_reported_and_never_raised(sample, tmp_path):
    chance = random.Random(sample.title)
    for number in range(60 if SLOW else 6):
        case = Case(sample, tmp_path / str(number))
        kind, name, at = damage(case, chance)
        if not case.path.exists():
            continue  # the checkpoint was that file
        case.settle()
        report = verify(case.path, deep=True, threads=1)
        json.dumps(report.to_json(), allow_nan=False)
        assert repr(report)
        # a part that stands by itself (model.pdparams alone, weights without an optimizer) is a checkpoint too
        alone = kind == "gone" and sample.title in ("HF Trainer", "paddle.save")
        if kind in ("cut", "empty", "gone") and not alone:
            assert report.exit_code == 2, (kind, name, at, report)
