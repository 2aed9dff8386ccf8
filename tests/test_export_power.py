"""Power cuts at every call of an export, in any state that they may leave: the old target or the new one, whole."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import workbench as wb
from tests.power import Record, put, tree_of
from tests.properties import SLOW
from workbench.core.transfer import streams
from workbench.export.atomic import transaction
from workbench.export.export import export
from workbench.export.moving import engine

STATES = 200 if SLOW else 20  #: after each call
RUNS = 300 if SLOW else 8  #: of these, gone on with


def tensors(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {f"{n}.weight": chance.standard_normal((100, 50 + n), np.float32) for n in range(4)}


@pytest.mark.parametrize("helped", [True, False], ids=["renameat2", "plain"])
@pytest.mark.parametrize("old", [True, False], ids=["over an old one", "onto nothing"])
@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_what_is_there_when_power_is_back(tmp_path, monkeypatch, format, old, helped):
    monkeypatch.setattr(streams, "TASK", 20_000)
    monkeypatch.setattr(engine, "RECORD", 20_000)
    sources = {}
    for seed in (1, 2):
        (tmp_path / f"source{seed}").mkdir()
        save_file(tensors(seed), tmp_path / f"source{seed}" / "model.safetensors")
        sources[seed] = wb.open(tmp_path / f"source{seed}", cache=False)
    name = "out.pt" if format == "torch" else "out"

    def run(seed: int, folder: Path):
        return export(
            sources[seed],
            folder / name,
            format,
            overwrite=True,
            resume=True,
            manifest=False,
            threads=2,
            max_shard_size=50_000 if format == "safetensors" else None,
        )

    folder = tmp_path / "targets"
    folder.mkdir()
    if old:
        run(1, folder)
    before = tree_of(folder).get(name)
    record = Record(folder)
    with monkeypatch.context() as patch:
        record.install(patch)
        if not helped:
            for call in ("rename_exchange", "rename_noreplace"):
                patch.setattr(transaction, call, lambda *_: False)
        run(2, folder)
    after = tree_of(folder)
    assert list(after) == [name] and after[name] != before and len(record.calls) > 30

    chance, states, seen = random.Random(9), [], set()
    for count in range(len(record.calls) + 1):
        for _ in range(STATES):
            found = record.after(count, chance)
            now = found.get(name)
            if not helped and old and format != "torch" and now is None:
                # the one moment without a name: the old state is beside it, for the next run to put back
                assert before in [one for beside, one in found.items() if ".old-" in beside]
            else:
                assert now in (before, after[name]), f"after call {count}, {record.calls[count - 1]}"
            assert count < len(record.calls) or now == after[name], "it was said to be done and is not"
            for temp in (one for one in found.values() if isinstance(one, dict) and "journal" in one):
                assert before is None or temp.get(name) != before, "an old target would be gone on with"
            seen.add(now == after[name])
            states.append(found)
    assert seen == {True, False}
    went_on = 0
    for turn, found in enumerate(chance.sample(states, RUNS)):
        again = tmp_path / f"again{turn}"
        put(found, again)
        report = run(2, again)
        went_on += any("resumed" in note for note in report.notes)
        assert tree_of(again) == after
        shutil.rmtree(again)
    assert went_on or not SLOW
