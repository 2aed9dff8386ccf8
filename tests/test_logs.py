"""Training logs: every sample reads back as its truth says, and no file, however broken, is more than a note.

The samples' values are compared with those that other code reads: the ``json`` and ``csv`` modules, ``sqlite3``, a
search of the raw bytes, or another format that the same run was logged in.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import math
import os
import re
import shutil
import sqlite3
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.analysis.run import run
from workbench.core.place import Place
from workbench.errors import UsageError
from workbench.names.metrics import meaning, pick_metric
from workbench.runs.logs import GrownLogs, find_logs, read_logs
from workbench.runs.logs.grown import LinesReading, read_grown
from workbench.runs.logs.joined import join
from workbench.runs.logs.printed import PrintedLogs
from workbench.runs.logs.record import MetricLog

LOGS = Path(__file__).resolve().parents[1] / "sample_ckpts" / "logs"
KINDS = sorted(path.name for path in LOGS.iterdir())
SAMPLES_PER_STEP = {"deepspeed_csv": 32}


def truth(kind: str) -> dict:
    return json.loads((LOGS / kind / "truth.json").read_text())


def logs(root: Path) -> list[MetricLog]:
    return find_logs(Place(root)).logs


def one(root: Path) -> MetricLog:
    (found,) = logs(root)
    return found


def loss(log: MetricLog) -> tuple[list[int], list[float]]:
    name = pick_metric("loss", [(name, log.points(name)) for name in log.columns])
    assert name is not None, list(log.columns)
    return list(log.columns[name].steps), list(log.columns[name].values)


def written(kind: str) -> tuple[list[int], list[float]]:
    """The first log of a sample that has the abandoned branch."""
    found = [loss(log) for log in logs(LOGS / kind)]
    return max(found, key=lambda pair: len(pair[0]))


# ---- the samples ------------------------------------------------------------------------------------------------


def test_there_is_a_sample_of_every_format():
    assert len(KINDS) == 25 and {"tensorboard", "wandb", "mlflow_sqlite", "megatron", "torchtitan"} <= set(KINDS)


def cut_or_whole(kind: str) -> list[list[int]]:
    """Attempts in the file with most points: the event files of ``hf_trainer`` are not cut."""
    return [[1, 71], [61, 120]] if kind == "hf_trainer" else truth(kind)["attempts"]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_a_sample_are_those_of_its_truth(kind):
    steps, _ = written(kind)
    want = [step for first, last in cut_or_whole(kind) for step in range(first, last + 1)]
    assert steps == [step * SAMPLES_PER_STEP.get(kind, 1) for step in want]


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_of_a_sample_are_those_of_its_truth(kind):
    joined = max((join(log) for log in logs(LOGS / kind)), key=lambda one: one.points)
    if kind == "verl_jsonl":
        assert joined.resumes == []
        return
    (want,) = truth(kind)["resumes"]
    (got,) = joined.resumes
    assert (got.stopped_after, got.first_after, got.repeated) == (
        want["stopped_after"],
        want["first_step_after"],
        want["repeated_steps"],
    )
    assert got.loaded in (None, want["loaded_checkpoint_step"])
    assert got.difference < 0.05  # the same data: the scripted noise is 0.01
    curve = joined.loss
    assert curve is not None
    assert list(curve.steps) == list(range(cut_or_whole(kind)[0][0], cut_or_whole(kind)[-1][1] + 1))
    ((ghost, _),) = curve.ghosts
    assert list(ghost) == list(range(want["first_step_after"], want["stopped_after"] + 1))


@pytest.mark.parametrize(
    "kind", ["deepspeed", "fairseq2", "maxtext", "megatron", "nemo", "paddlenlp", "torchtitan", "verl"]
)
def test_the_line_that_names_the_loaded_step_is_read(kind):
    log = one(LOGS / kind)
    assert [mark.loaded for mark in log.starts if mark.row] == [truth(kind)["resumes"][0]["loaded_checkpoint_step"]]


# ---- values, against other code ---------------------------------------------------------------------------------

PRINTED = {
    "composer": r"loss/train/total: (\S+)",
    "deepspeed": r"loss: (\S+)",
    "fairseq2": r"NLL Loss: (\S+)",
    "levanter": r'"train/loss": ([\d.]+)',
    "maxtext": r" loss: ([\d.]+)",
    "megatron": r"lm loss: (\S+)",
    "nanogpt": r"loss ([\d.]+)",
    "nemo": r"train_loss: (\S+)",
    "openrlhf": r" loss=([\d.]+)",
    "paddlenlp": r"loss: ([\d.]+)",
    "torchtitan": r"loss: *([\d.]+)",
    "verl": r"pg_loss:(\S+)",
    "vescale": r"loss (\S+)",
    "torchtune": r"loss:(\S+)",
}


@pytest.mark.parametrize("kind", PRINTED)
def test_printed_values_are_the_numbers_in_the_file(kind):
    files = sorted(path for path in (LOGS / kind).rglob("*") if path.suffix in (".log", ".txt"))
    text = "".join(path.read_text("utf-8") for path in files)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert written(kind)[1] == [float(found) for found in re.findall(PRINTED[kind], text)]


@pytest.mark.parametrize(
    ("kind", "name"), [("llamafactory", "loss"), ("fairseq2_jsonl", "NLL Loss"), ("verl_jsonl", "train/loss")]
)
def test_json_values_are_those_that_json_decodes(kind, name):
    (path,) = (LOGS / kind).rglob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert written(kind)[1] == [(row.get("data") or row)[name] for row in rows]


def test_lightning_values_are_those_that_csv_decodes():
    rows = []
    for version in ("version_0", "version_1"):
        with (LOGS / "lightning_csv" / "lightning_logs" / version / "metrics.csv").open() as handle:
            rows += [
                (int(row["step"]), float(row["train_loss"])) for row in csv.DictReader(handle) if row["train_loss"]
            ]
    assert list(zip(*written("lightning_csv"), strict=True)) == rows
    log = one(LOGS / "lightning_csv")
    assert log.points("val_loss") < log.points("train_loss") and log.zero_based


def test_the_trainers_three_logs_agree():
    """Event files, ``trainer_state.json`` and stdout of one run, which three writers made."""
    state = json.loads((LOGS / "hf_trainer" / "out" / "checkpoint-120" / "trainer_state.json").read_text())
    rows = {row["step"]: row for row in state["log_history"] if "loss" in row}  # of a part of the steps
    by_kind = {log.kind + log.path[-3:]: join(log) for log in logs(LOGS / "hf_trainer")}
    assert len(by_kind) == 3
    for kind, joined in by_kind.items():
        curve = joined.loss
        assert curve is not None and set(rows) <= set(curve.steps)
        curve = replace(curve, steps=curve.steps[keep := np.isin(curve.steps, list(rows))], values=curve.values[keep])
        want = np.array([rows[step]["loss"] for step in curve.steps])
        if kind.endswith("log"):
            np.testing.assert_allclose(curve.values, want, rtol=5e-4)  # four digits are printed
        else:
            assert (curve.values == want).all()
    lr = next(joined for kind, joined in by_kind.items() if kind.startswith("tensorboard")).curves[
        "train/learning_rate"
    ]
    kept = np.isin(lr.steps, list(rows))
    assert (lr.values[kept].astype("f4") == np.array([rows[s]["learning_rate"] for s in rows], "f4")).all()


def test_deepspeeds_csv_is_torchtunes_run():
    """The two samples log the same losses."""
    assert written("deepspeed_csv")[1][-30:] != [] and written("fairseq2_jsonl")[1] == written("torchtune")[1]
    curve = join(one(LOGS / "deepspeed_csv")).loss
    tune = join(one(LOGS / "torchtune")).loss
    assert curve is not None and tune is not None
    both = dict(zip(curve.steps, curve.values, strict=True))
    assert [both[step] for step in tune.steps] == list(tune.values)


def test_wandb_values_are_the_text_in_the_file():
    raw = b"".join(path.read_bytes() for path in sorted((LOGS / "wandb").rglob("*.wandb")))
    texts = re.findall(rb"train/loss\x82\x01.([\d.]+)", raw)
    _, values = written("wandb")
    # a value that is split by the end of a 32 KiB block is not found in the raw bytes
    assert len(texts) >= len(values) - 2 and {float(text) for text in texts} <= set(values)
    assert len(values) == 132


def test_database_values_are_those_that_sqlite_selects():
    with sqlite3.connect(LOGS / "trackio" / "trackio" / "p.db") as database:
        rows = [
            json.loads(data)["train/loss"] for (data,) in database.execute("select metrics from metrics order by id")
        ]
    assert written("trackio")[1] == rows
    # the two MLflow samples log the same losses; the database is cut
    whole = list(zip(*written("mlflow_files"), strict=True))
    cut = list(zip(*written("mlflow_sqlite"), strict=True))
    assert cut == [pair for pair in whole if 59 <= pair[0] <= 99] and len(rows) == len(cut) == 53


def test_events_are_the_floats_in_the_file():
    raw = b"".join(path.read_bytes() for path in sorted((LOGS / "tensorboard").rglob("events*")))
    found = [
        struct.unpack("<f", raw[m.end() : m.end() + 4])[0]
        for m in re.finditer(rb"\ntrain/loss\x15|train/loss\x15", raw)
    ]
    assert written("tensorboard")[1] == found and len(found) == 132


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lm loss", "loss"),
        ("train/loss", "loss"),
        ("Train/Samples/train_loss", "loss"),
        ("run 7 - train/loss", "loss"),
        ("learning rate", "lr"),
        ("lr-AdamW/group0", "lr"),
        ("grad norm", "grad_norm"),
        ("Gradient Norm", "grad_norm"),
        ("throughput(tps)", "throughput"),
        ("my/loss", "loss"),
        ("eval_loss", None),
        ("val/loss", None),
        ("lm loss validation", None),
        ("loss scale", None),
        ("test_loss", None),
        ("load_balancing_loss", None),
        ("epoch", None),
        ("loss_scale", None),
        ("color", None),
    ],
)
def test_names_mean_what_programs_log_under_them(name, what):
    known = meaning(name)
    assert (known and known[0]) == what


# ---- broken files -----------------------------------------------------------------------------------------------


def put(root: Path, name: str, data: str | bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_gives_what_comes_before_the_cut(kind, tmp_path):
    steps, values = written(kind)
    for source in (LOGS / kind).rglob("*"):
        if source.is_file() and source.name != "truth.json":
            data = source.read_bytes()
            put(tmp_path, str(source.relative_to(LOGS / kind)), data[: int(len(data) * 0.61)])
    for log in logs(tmp_path):  # a cut trainer_state.json or database is a note
        got = loss(log)
        assert 0 < len(got[0]) <= len(steps)
        pairs = set(zip(steps, values, strict=True))
        odd = [pair for pair in zip(*got, strict=True) if pair not in pairs]
        assert len(odd) <= 1 or kind == "hf_trainer"  # the last number of a text may be cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_ends_in_rows_or_notes(kind, seed, tmp_path):
    random = np.random.default_rng(seed)
    for source in (LOGS / kind).rglob("*"):
        if source.is_file() and source.name != "truth.json":
            data = np.frombuffer(source.read_bytes(), np.uint8).copy()
            data[random.integers(0, len(data), 40)] = random.integers(0, 256, 40)
            put(tmp_path, str(source.relative_to(LOGS / kind)), data.tobytes())
    for log in logs(tmp_path):
        for curve in join(log).curves.values():
            assert (np.diff(curve.steps) > 0).all()


FORMS = (
    "step {0}/100 | loss {1} | lr 1.0e-03 | 12.3k tok/s",
    "step {0}: loss {1}",
    "[step {0}] loss={1}, lr=0.001",
    "step={0}, loss={1}",
    "Step {0}/100 - loss: {1} - lr: 0.001",
    "Epoch [1/2], Step [{0}/100], Loss: {1}",
    "Epoch: [0][ {0}/5005]  Time 0.5 (0.6)  Loss {1} (4.0)",
    "iteration {0} loss {1} took 12 ms",
    "step:{0}/100 train_loss:{1} train_time:12ms",
    "2026-03-29 01:00:01,123 - trainer - INFO - Step: {0} Train loss: {1}",
    "[2026-03-29 01:00:01] INFO:root:epoch 0 iter {0}: train loss {1} (lr 0.001)",
    "I0329 01:00:01.123456 4242 train.py:89] step {0} loss {1}",
    "{{'step': {0}, 'loss': {1}, 'lr': 0.001}}",
    '{{"global_step": {0}, "train_loss": {1}}}',
    "Loss {1} at step {0}, of 100 max steps",
)


@pytest.mark.parametrize("form", FORMS)
def test_lines_in_no_programs_form_are_read(form, tmp_path):
    lines = ["starting", *(form.format(step, f"{4 - step / 100:.2f}") for step in range(1, 31))]
    put(tmp_path, "train.log", "\n".join(lines))
    log = one(tmp_path)
    assert loss(log) == (list(range(1, 31)), [round(4 - step / 100, 2) for step in range(1, 31)])
    assert log.kind == "printed" and "step" not in log.columns and not log.notes


@pytest.mark.parametrize(
    "line",
    [
        "saved step {0} with loss 4.0",
        "step {0}: val loss 4.0",
        "Validation step {0}: loss 4.0",
        "best loss 4.0 at step {0}",
        "step {0}: lossless, 4.0 s",
        "loss after max steps 100: 4.{0}",
        "epoch {0}: loss 4.0",
        "Epoch: 1 [{0}/60000 (1%)] Loss: 2.3",  # samples or batches
    ],
)
def test_lines_about_something_else_are_no_rows_but_are_named(line, tmp_path):
    put(tmp_path, "train.log", "\n".join(line.format(step) for step in range(1, 31)))
    found = find_logs(Place(tmp_path))
    assert not found.logs and "30 lines in no known form, the first " in found.unknown[0]


def test_a_programs_rows_come_before_lines_in_no_form(tmp_path):
    rows = [f"iter {s}: loss {4 - s / 100:.4f}, time 12.0ms, mfu 31.00%" for s in range(30)]
    put(
        tmp_path, "train.log", "\n".join(["step 0: train loss 4.0", "step 1: train loss 4.0", *rows, "step 30: loss 9"])
    )
    log = one(tmp_path)
    assert log.kind == "nanogpt" and loss(log)[0] == list(range(30))


def test_the_steps_of_an_epoch_are_counted_on_and_those_of_the_run_are_not(tmp_path):
    def steps(rows: list[tuple[int, int]]) -> list[int]:
        lines = [f"Epoch [{epoch}/3], Step [{step}/105], Loss: 4.0" for epoch, step in rows]
        put(tmp_path, "train.log", "\n".join(lines))
        return loss(one(tmp_path))[0]

    each = [(epoch, step) for epoch in (1, 2, 3) for step in range(10, 106, 10)]
    assert steps(each) == [105 * (epoch - 1) + step for epoch, step in each]
    again = [*each[:15], *each[10:]]  # restarted at the beginning of the second epoch
    assert steps(again) == [105 * (epoch - 1) + step for epoch, step in again]
    whole = [(1 + (step - 1) // 35, step) for step in range(5, 106, 5)]
    assert steps(whole) == [step for _, step in whole]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.tsv", "step\tloss\n1\t4.5\n2\t4.25\n"),
        ("log.csv", "\ufeffstep;loss\n1;4.5\n2;4.25\n"),
        ("log.csv", '"step";"loss"\n1;4,5\n2;4,25\n'),
        ("history.json", '[{"step": 1, "loss": 4.5},\n {"step": 2, "loss": 4.25}]'),
        ("metrics.json", '{"step": 1, "loss": 4.5}\n{"step": 2, "loss": 4.25}\n'),
        ("log.jsonl", '{"step": 1, "loss": "4.5"}\n{"step": 2, "loss": "4.25"}\n'),
        ("log.jsonl", '{"step": 1, "m": {"train": {"loss": 4.5}}}\n{"step": 2, "m": {"train": {"loss": 4.25}}}\n'),
    ],
)  # fmt: skip
def test_other_tables_are_read(name, text, tmp_path):
    put(tmp_path, name, text)
    assert loss(one(tmp_path)) == ([1, 2], [4.5, 4.25])


def test_a_file_that_is_no_log_is_named_if_no_log_was_found(tmp_path):
    put(tmp_path, "out.txt", "hello\nworld\n")
    put(tmp_path, "log.csv", "name,loss\na,1\n")
    put(tmp_path, "log.jsonl.xz", b"\xfd7zXZ")
    put(tmp_path, "catalog.json", "{}")
    put(tmp_path, "settings.json", "[1]")
    put(tmp_path, "wandb/run-1/logs/debug-internal.log", "hello\n")
    (tmp_path / "wandb/run-1/logs/debug-core.log").symlink_to(__file__)  # W&B's own link
    found = find_logs(Place(tmp_path))
    assert found.notes == [] and found.unknown == [
        "'log.csv' was not read as a log: no column with a step in the first line, 'name,loss'",
        "'log.jsonl.xz' was not read as a log: it is compressed; unpack it",
        "'out.txt' was not read as a log: 2 lines in no known form, the first 'hello'",
    ]
    (tmp_path / "far.log").symlink_to(__file__)
    (note,) = find_logs(Place(tmp_path)).notes
    assert note == "'far.log' is a symlink out of the folder and was not followed"
    (tmp_path / "far.log").unlink()
    with pytest.raises(UsageError, match="2 lines in no known form"):
        read_logs([tmp_path / "out.txt"])
    torch.save({"w": torch.ones(2)}, tmp_path / "step-1.pt")
    assert run(tmp_path).notes == found.unknown[:2]
    put(tmp_path, "loss.csv", "step,loss\n1,4.5\n2,4.25\n")
    assert run(tmp_path).notes == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.log", "step 1 | loss 4.5\nstep 2 | loss 4.25\n"),
        ("log.jsonl", '{"step": 1, "loss": 4.5}\n{"step": 2, "loss": 4.25}\n'),
        ("log.csv", "step,loss\n1,4.5\n2,4.25\n"),
    ],
)  # fmt: skip
def test_a_compressed_log_and_one_in_utf16_read_as_the_plain_one(name, text, tmp_path):
    data, half = text.encode(), len(text) // 2
    forms = {
        f"{name}.gz": gzip.compress(data),
        f"2/{name}.GZ": gzip.compress(data[:half]) + gzip.compress(data[half:]) + bytes(512),  # appended to, and padded
        f"3/{name}": text.encode("utf-16"),
        f"4/{name}": codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        f"5/{name}": codecs.BOM_UTF8 + data,
        f"6/{name}.gz": gzip.compress(text.encode("utf-16")),
        f"7/{name}": gzip.compress(data),
    }
    for path, form in forms.items():
        put(tmp_path, path, form)
    found = find_logs(Place(tmp_path))
    assert found.notes == found.unknown == []
    assert {log.path for log in found.logs} == forms.keys()
    assert all(loss(log) == ([1, 2], [4.5, 4.25]) for log in found.logs)


def test_a_damaged_or_huge_compressed_log_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.runs.logs.lines.DECODED", 1 << 20)
    whole = gzip.compress(b"step 1 | loss 4.5\nstep 2 | loss 4.25\nstep 3 | loss 4.0\n")
    put(tmp_path, "a/train.log.gz", whole[:15] + bytes(9) + whole[24:])
    put(tmp_path, "b/train.log.gz", gzip.compress(bytes(2 << 20)))
    found = find_logs(Place(tmp_path))
    assert not found.logs and len(found.notes) == 2
    assert "gzip stream cannot be decompressed" in found.notes[0] and "1,048,576 bytes" in found.notes[1]
    put(tmp_path, "c.log.gz", whole[:-12])  # still being written
    assert loss(one(tmp_path))[0] in ([1], [1, 2], [1, 2, 3])


def test_samples_of_an_epoch_are_counted_on_and_are_no_steps(tmp_path):
    line = "Train Epoch: {} [{}/60000 ({:.0f}%)]\tLoss: {:.6f}\n"
    rows = [(epoch, at) for epoch in (1, 2) for at in range(0, 60000, 640)]
    text = "".join(line.format(e, at, at / 600, 3 - e / 2 - at / 1e5) for e, at in rows)
    put(tmp_path, "train.log", text + "\nTest set: Average loss: 0.0481, Accuracy: 9844/10000 (98%)\n")
    log = one(tmp_path)
    assert log.unit == "samples" and loss(log)[0] == [60000 * (e - 1) + at for e, at in rows]
    assert loss(log)[1][:2] == [2.5, 2.4936] and join(log).resumes == []
    torch.save({"w": torch.ones(2)}, tmp_path / "step-938.pt")
    found = run(tmp_path)
    assert "rows state the number of samples instead" in found.notes[0] and found.pair(938).before is None


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv"])
def test_rows_of_another_split_are_another_metric(name, tmp_path):
    def write(key: str, other: str) -> None:
        rows = [(step, split, value, 1.0) for step in (1, 2, 3) for split, value in (("train", 5.0), (other, 9.0))]
        lines = [json.dumps({"step": a, key: b, "loss": c, "epoch": d}) for a, b, c, d in rows]
        table = [f"step,{key},loss,epoch", *(f"{a},{b},{c},{d}" for a, b, c, d in rows)]
        put(tmp_path, name, "\n".join(table if name.endswith("csv") else lines) + "\n")

    write("split", "val")
    log = one(tmp_path)
    assert loss(log) == ([1, 2, 3], [5.0, 5.0, 5.0]) and list(log.columns["val/loss"].values) == [9.0, 9.0, 9.0]
    assert set(log.columns) == {"loss", "val/loss", "epoch"} and join(log).resumes == []
    write("mode", "eval")
    assert loss(one(tmp_path))[1] == [5.0, 5.0, 5.0]
    write("phase", "warmup")  # the training's own
    assert loss(one(tmp_path))[1] == [5.0, 9.0] * 3


def test_binary_noise_under_a_logs_name_is_a_note(tmp_path):
    noise = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8).tobytes()
    for name in (
        "train.log",
        "a.csv",
        "b.jsonl",
        "events.out.tfevents.1.x",
        "run-1.wandb",
        "m.db",
        "trainer_state.json",
    ):
        put(tmp_path, name, noise)
    found = find_logs(Place(tmp_path))
    assert found.logs == [] and len(found.notes) >= 4


def test_a_size_in_a_file_is_not_trusted(tmp_path):
    put(tmp_path, "events.out.tfevents.1.x", struct.pack("<QI", 1 << 60, 0) + bytes(50))
    assert find_logs(Place(tmp_path)).logs == []
    assert "record of" in find_logs(Place(tmp_path)).notes[0]


def test_nan_and_infinite_losses_are_read(tmp_path):
    put(tmp_path, "a.jsonl", '{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n{"step": 3, "loss": "nan"}\n')
    put(tmp_path, "b.csv", "step,loss\n1,nan\n2,inf\n3,\n4,2.5\n")
    put(tmp_path, "c.log", "iter 1: loss nan, time 3.00ms, mfu 1.00%\niter 2: loss inf, time 3.00ms, mfu 1.00%\n")
    a, b, c = sorted(logs(tmp_path), key=lambda log: log.path)
    assert [str(value) for value in loss(a)[1]] == ["nan", "inf", "nan"]
    assert [str(value) for value in loss(b)[1]] == ["nan", "inf", "2.5"] and loss(b)[0] == [1, 2, 4]
    assert [str(value) for value in loss(c)[1]] == ["nan", "inf"]


def test_megatron_prints_no_field_for_a_loss_that_is_nan(tmp_path):
    line = " iteration {:8d}/     120 | consumed samples: 32 | {}loss scale: 1.0 | number of nan iterations:   {} |\n"
    put(tmp_path, "t.log", line.format(1, "lm loss: 2.0E+00 | ", 0) + line.format(2, "", 1))
    steps, values = loss(one(tmp_path))
    assert steps == [1, 2] and values[0] == 2 and math.isnan(values[1])


def test_lines_about_validation_are_not_training(tmp_path):
    put(
        tmp_path,
        "t.log",
        "[titan] x - root - INFO - step:  1  loss:  5.0  grad_norm:  1.0  memory: 1.00GiB(1.00%)  tps: 6,507\n"
        "[titan] x - root - INFO - validate step:  1  loss:  9.0  memory: 1.00GiB(1.00%)  tps: 9\n"
        "step 1: train loss 3.0, val loss 4.0\n",
    )
    assert loss(one(tmp_path)) == ([1], [5.0]) and list(one(tmp_path).columns["tps"].values) == [6507]


def test_of_several_ranks_the_lowest_with_a_loss_is_read(tmp_path):
    line = "[rank{}]: iter {}: loss {}, time 3.00ms, mfu 1.00%\n"
    put(tmp_path, "t.log", "".join(line.format(r, s, 10 * r + s) for s in (1, 2, 3) for r in (2, 1)))
    assert loss(one(tmp_path)) == ([1, 2, 3], [11.0, 12.0, 13.0])


def test_a_log_per_rank_is_not_a_restart(tmp_path):
    for rank in range(3):
        put(tmp_path, f"out-{rank}.log", "".join(f"iter {s}: loss {s}.5, time 3.00ms, mfu 1.00%\n" for s in range(9)))
    joined = join(one(tmp_path))
    assert joined.resumes == [] and joined.points == 9


def test_ranks_without_a_prefix_are_no_resumes(tmp_path):
    put(
        tmp_path,
        "t.log",
        "".join(f"iter {s}: loss {s}.{r}, time 3.00ms, mfu 1%\n" for s in range(40) for r in range(4)),
    )
    joined = join(one(tmp_path))
    assert joined.resumes == [] and joined.loss is not None and len(joined.loss.steps) == 40
    assert "several times in a row, with other values" in joined.notes[0]


def test_a_step_that_is_logged_twice_is_one_point(tmp_path):
    put(tmp_path, "a.csv", "step,loss\n1,3\n2,2\n2,2\n3,1\n")
    joined = join(one(tmp_path))
    assert joined.resumes == [] and joined.loss is not None and list(joined.loss.values) == [3, 2, 1]


def test_the_last_attempt_wins_over_all_before_it(tmp_path):
    put(
        tmp_path,
        "a.csv",
        "step,loss\n"
        + "".join(f"{s},{v}\n" for s, v in [(1, 9), (2, 8), (3, 7), (2, 6), (3, 5), (4, 4), (2, 3), (3, 2)]),
    )
    joined = join(one(tmp_path))
    assert joined.loss is not None and list(joined.loss.steps) == [1, 2, 3] and list(joined.loss.values) == [9, 3, 2]
    assert [list(values) for _, values in joined.loss.ghosts] == [[8, 7], [6, 5, 4]]
    assert [(r.stopped_after, r.first_after) for r in joined.resumes] == [(3, 2), (4, 2)]


def test_a_step_that_begins_again_in_each_epoch_is_counted_on(tmp_path):
    rows = [(e, s) for e in range(3) for s in range(10)]
    put(tmp_path, "a.csv", "epoch,step,loss\n" + "".join(f"{e},{s},{9 - e}\n" for e, s in rows))
    joined = join(one(tmp_path))
    assert joined.resumes == [] and joined.loss is not None and list(joined.loss.steps) == list(range(30))


def test_a_branch_in_the_trainers_histories_is_a_ghost(tmp_path):
    for step, start, shift in ((8, 1, 0.0), (9, 5, 0.5)):
        rows = [{"step": s, "loss": s + (shift if s >= start else 0)} for s in range(1, step + 1)]
        put(tmp_path, f"checkpoint-{step}/trainer_state.json", json.dumps({"log_history": rows}))
    joined = join(one(tmp_path))
    assert joined.loss is not None and list(joined.loss.values) == [1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5]
    assert [list(steps) for steps, _ in joined.loss.ghosts] == [[5, 6, 7, 8]]
    assert [(r.stopped_after, r.first_after) for r in joined.resumes] == [(8, 5)]


def test_an_exported_table_and_a_second_header_are_read(tmp_path):
    put(tmp_path, "w.csv", '"Step","run - loss","run - loss__MIN"\n"1","3.5","1"\n"2","3.25","1"\n')
    assert loss(one(tmp_path)) == ([1, 2], [3.5, 3.25]) and len(one(tmp_path).columns) == 1


def test_logs_beside_and_above_a_folder_are_found(tmp_path):
    put(tmp_path, "exp/run/keep", "")
    put(tmp_path, "exp/train.log", "iter 0: loss 3.5, time 3.00ms, mfu 1.00%\n")
    assert one(tmp_path / "exp" / "run").path == "train.log"
    put(tmp_path, "exp/other/keep", "")  # now it may be of the other run
    assert logs(tmp_path / "exp" / "run") == []
    put(tmp_path, "exp/run.csv", "step,loss\n1,2\n")
    assert one(tmp_path / "exp" / "run").path == "run.csv"


def test_a_path_that_is_no_log_is_refused(tmp_path):
    from workbench.errors import NotACheckpointError

    with pytest.raises(UsageError, match="no log in a known format"):
        read_logs([put(tmp_path, "notes.txt", "hello\n")])
    with pytest.raises(NotACheckpointError):
        read_logs([tmp_path / "absent"])
    assert read_logs([put(tmp_path, "odd.name", "iter 0: loss 3.5, time 3.00ms, mfu 1.00%\n")]).logs


def test_memory_is_that_of_the_numbers_not_of_the_file(tmp_path):
    noise = "x" * 150
    with (tmp_path / "t.log").open("w") as handle:
        for step in range(4_000):
            handle.write(f"iter {step}: loss 3.5, time 3.00ms, mfu 1.00%\n" + f"{noise}\n" * 10)
        handle.write("y" * 8_000_000 + f"\niter {step + 1}: loss 3.5, time 3.00ms, mfu 1.00%\n")
    size = (tmp_path / "t.log").stat().st_size
    tracemalloc.start()
    log = one(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert log.points("loss") == 4_001 and size > 11_000_000
    assert peak < size


def test_a_log_of_too_many_values_is_read_up_to_the_limit(tmp_path):
    path = put(tmp_path, "t.log", "".join(f"iter {step}: loss 3.5, time 3.00ms, mfu 1.00%\n" for step in range(1000)))
    reading = LinesReading(PrintedLogs("t.log", 300), "t.log")
    (log,) = read_grown(Place(path).source("t.log"), str(path), "text", lambda: reading, None, False)
    assert log.points("loss") == 100 and "the rest was not read" in log.notes[0]


# ---- resumes without a step that falls ----------------------------------------------------------------------------


def rows_of(*starts: range, **columns) -> str:
    """JSON lines with the loss, and columns as functions of the step and of the first step of its start."""
    return "".join(
        json.dumps({"step": s, "loss": 3 - s / 1000} | {name: of(s, start.start) for name, of in columns.items()})
        + "\n"
        for start in starts
        for s in start
    )


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"_runtime": lambda s, first: 2.5 * (s - first) + 9}, "_runtime falls from 106.5 to 9"),
        ({"elapsed_time": lambda s, first: f"0:0{(s - first) // 20}:{(s - first) % 20 + 9:02}"}, "elapsed_time falls"),
        ({"consumed_samples": lambda s, first: 32 * (s - first + 1)}, "'consumed_samples' falls from 1,280 to 32"),
        ({"epoch": lambda s, first: (s - (10 if first > 1 else 0)) / 100}, "'epoch' falls from 0.4 to 0.31"),
    ],
)
def test_a_counter_that_begins_again_is_a_resume(column, why, tmp_path):
    put(tmp_path, "a.jsonl", rows_of(range(1, 41), range(41, 81), **column))
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.stopped_after, resume.repeated) == (41, 40, 0) and resume.why.startswith(why)


@pytest.mark.parametrize(
    "column",
    [
        {"time": lambda s, first: 0.9 + 0.1 * math.sin(s)},  # of the step
        {"tokens": lambda s, first: 4096 - 96 * (s % 30 == 0)},  # of the batch
        {"epoch": lambda s, first: s // 40, "elapsed": lambda s, first: s % 40 + 1.5},  # in the epoch
        {"epoch": lambda s, first: s % 40 / 40},  # the part of the epoch that is done
        {"timestamp": lambda s, first: 1.7e9 + s + 900 * (s > 40)},  # a pause
        {"timestamp": lambda s, first: 1.7e9 + s - 900 * (s > 40)},  # a wall clock that was set
    ],
)
def test_what_no_restart_explains_is_no_resume(column, tmp_path):
    put(tmp_path, "a.jsonl", rows_of(range(1, 100), **column))
    assert join(one(tmp_path)).resumes == []


def trainer(epochs, rates=None) -> str:
    return "".join(f"{{'loss': '2.5', 'learning_rate': '{r}', 'epoch': '{e:.2f}'}}\n" for e, r in epochs)


def test_the_trainers_epoch_that_goes_back_is_a_resume(tmp_path):
    steps = [(s / 20, s) for s in range(1, 31)] + [(s / 20, s) for s in range(21, 61)]
    text = "Loading checkpoint shards: 100%|###| 4/4 [00:01<00:00,  3.9it/s]\n" + trainer(steps)
    put(tmp_path, "train.log", text)
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.stopped_after, resume.repeated) == (21, 30, 10)
    assert resume.why == "the epoch falls from 1.5 to 1.05; 10 rows are logged again"
    # five rows have one epoch: the learning rate tells them apart
    steps = [(s // 5 / 100, s) for s in range(1, 31)] + [(s // 5 / 100, s) for s in range(23, 61)]
    put(tmp_path, "train.log", trainer(steps))
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.repeated) == (23, 8)


def test_the_trainers_bar_and_its_last_row_show_a_restart(tmp_path):
    bar = "  1%|#| {}/90 [00:{:02}<10:00, 1.0it/s]\r"
    row = "{{'loss': 2.5, 'epoch': {:.2f}}}\n"
    put(tmp_path, "a.log", "".join(row.format(s / 30) + bar.format(s, s % 40 + 5) for s in range(1, 60)))
    (resume,) = join(one(tmp_path)).resumes
    assert resume.first_after == 40 and resume.why == "the progress bar's time falls from 44 to 5"
    put(tmp_path, "a.log", "Map: 50%|#| 500/1000 [00:01<00:01, 500 examples/s]\r" + row.format(0.1) + bar.format(3, 5))
    assert (one(tmp_path).unit, loss(one(tmp_path))[0]) == ("step", [3])
    rows = [row.format(s / 30) for s in range(1, 60)]  # without bars but for the first of a start
    put(tmp_path, "a.log", "".join([bar.format(0, 0), *rows[:30], bar.format(0, 0), *rows[30:]]))
    (resume,) = join(one(tmp_path)).resumes
    assert resume.first_after == 31 and resume.why == "the progress bar begins again"
    put(tmp_path, "a.log", trainer([(s / 30, s) for s in range(1, 60)]))
    assert join(one(tmp_path)).resumes == []
    lines = trainer([(s / 30, s) for s in range(1, 60)]).splitlines(keepends=True)
    lines.insert(30, "{'train_runtime': 9.5, 'train_loss': 2.4, 'epoch': 1.0}\n")
    put(tmp_path, "a.log", "".join(lines))
    (resume,) = join(one(tmp_path)).resumes
    assert resume.first_after == 31 and "'train_runtime' was logged" in resume.why


OPENING = "using world size: {}, data-parallel size: 2\n> building tokenizer ...\n  seed ........ {}\n"
NANO = "iter {}: loss {:.4f}, time {}ms, mfu 3.1%\n"


def printed(between: str, after: int = 30, opening: str = OPENING, row: str = NANO) -> str:
    """A printed log with lines after some row."""
    rows = [row.format(s, 3 - s / 1000, 90) for s in range(60)]
    return "".join([opening.format(8, 1), *rows[:after], between, *rows[after:]])


@pytest.mark.parametrize(
    ("between", "count"),
    [
        (OPENING.format(16, 2), 1),  # digits may differ
        ("> building tokenizer ...\n  seed ........ 1\n", 1),
        ("> building tokenizer ...\n", 0),  # a single line of three
        ("saving checkpoint to out\nsomething else\n", 0),
    ],
)
def test_the_first_lines_of_a_program_again_are_a_resume(between, count, tmp_path):
    put(tmp_path, "train.log", printed(between))
    resumes = join(one(tmp_path)).resumes
    assert [x.first_after for x in resumes] == [30] * count
    assert all(x.why.endswith("of the 3 lines that the program printed first are printed again") for x in resumes)


def test_lines_that_are_printed_now_and_then_are_no_resume(tmp_path):
    chatter = "UserWarning: x\nRunning evaluation on 8 batches\nEpoch 3 begins\n"
    put(tmp_path, "a.log", printed(chatter, opening=chatter))
    assert join(one(tmp_path)).resumes == []
    rows = [NANO.format(s, 3 - s / 1000, 90) for s in range(60)]
    put(tmp_path, "a.log", "".join((OPENING.format(8, 1) if s % 10 == 0 else "") + row for s, row in enumerate(rows)))
    assert join(one(tmp_path)).resumes == []  # regularly


def test_another_process_is_a_resume_and_several_at_once_are_ranks(tmp_path):
    ray = "(Runner pid={}) step:{} - train/loss:{} - train/lr:0.1\n"
    rows = [ray.format(900 if s < 30 else 77, s, 3 - s / 1000) for s in range(60)]
    put(tmp_path, "a.log", "".join(rows))
    found = join(one(tmp_path))
    assert [(x.first_after, x.why) for x in found.resumes] == [(30, "process 77 continues after process 900")]
    assert found.points == 60
    put(tmp_path, "a.log", "".join(ray.format(pid, s, 3 - s / 1000 + pid) for s in range(60) for pid in (900, 77)))
    found = join(one(tmp_path))
    assert found.resumes == [] and found.loss.values[0] == 80
    absl = "I0301 10:{:02}:{:02}.5 {} a.py:9] completed step: {}, seconds: 1.0, loss: {}\n"
    lines = [absl.format(s // 60, s % 60, 900 if s < 30 else 77, s, 3 - s / 1000) for s in range(60)]
    put(tmp_path, "a.log", "".join(lines))
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.why) == (30, "process 77 continues after process 900")


def test_a_bar_that_a_restart_begins_at_its_step_is_a_resume(tmp_path):
    bar = "\rtrain: 9%|#| {}/90 [{:02}:{:02}<10:00, 1.0it/s, loss={:.3f}]"
    ticks = [(s, s // 2) for s in range(1, 41)] + [(s, (s - 40) // 2 + 1) for s in range(40, 81)]  # 40 again, sooner
    put(tmp_path, "a.log", "".join(bar.format(s, t // 60, t % 60, 3 - s / 1000) * 2 for s, t in ticks))
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.repeated) == (40, 1) and loss(one(tmp_path))[0].count(39) == 1


def test_the_time_of_a_printed_row_is_read(tmp_path):
    row = " [2026-03-01 {:02}:{:02}:{:02}.250000] iteration {}/ 60 | lm loss: {} |\n"
    times = [s + 7200 * (s >= 30) for s in range(60)]
    rows = (row.format(t // 3600, t // 60 % 60, t % 60, s, 3 - s / 1000) for s, t in enumerate(times))
    put(tmp_path, "a.log", "".join(rows))
    found = join(one(tmp_path))
    assert found.pauses == [(29, 30, 7201.0)] and found.resumes == []
    (tmp_path / "b").mkdir()
    put(tmp_path / "b", "b.csv", "date,step,loss\n" + "".join(f"2026-03-0{1 + s // 9},{s},2.5\n" for s in range(18)))
    assert join(one(tmp_path / "b")).pauses == [(8, 9, 86400.0)]


@pytest.mark.parametrize(
    ("line", "loaded"),
    [
        ("INFO: Resumed from step 60", 60),
        ("Resuming training from checkpoint out/checkpoint-60", 60),
        ("=> loaded checkpoint 'ckpt/model_step_60.pt' (epoch 5)", 60),
        ("=> loaded checkpoint 'last.pt' (epoch 5)", None),
        ("Loaded checkpoint at iteration 60", 60),
        ("Checkpoint found; resuming at step 61", None),  # the next step, or the one that was saved
        ("restored checkpoint from /data/run/60", 60),
        ("Restoring states from the checkpoint path at out/epoch=1-step=60.ckpt", 60),
        ("[Torch] Loading checkpoint from out/global_step60/mp_rank_00_model_states.pt...", 60),
        ("Continuing training from global step 60", 60),
    ],
)
def test_lines_of_a_restart_are_read(line, loaded, tmp_path):
    text = "iter {}: loss 2.5, time 3.00ms, mfu 1.00%\n"
    rows = [text.format(s) for s in range(1, 121)]
    put(tmp_path, "t.log", "".join([*rows[:60], f"{line}\n", *rows[60:]]))
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.loaded, resume.why) == (61, loaded, line)


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards: 100%|###| 4/4 [00:01<00:00, 3.9it/s]",
        "No checkpoint found, not resuming training",
        "loaded dataset state from step 40",
        "Loading the best checkpoint for evaluation from out/checkpoint-40",
        "resume_from_checkpoint: out/checkpoint-40",
        "saved checkpoint to out/checkpoint-60",
        "failed to load checkpoint out/checkpoint-60",
        "Loaded reference model checkpoint out/checkpoint-60",
        "epoch done, continuing with the next step",
    ],
)
def test_lines_about_something_else_are_no_restart(line, tmp_path):
    text = "iter {}: loss 2.5, time 3.00ms, mfu 1.00%\n"
    put(tmp_path, "t.log", "".join(text.format(s) + (f"{line}\n" if s == 60 else "") for s in range(1, 121)))
    assert join(one(tmp_path)).resumes == []


def test_a_file_that_a_restart_emptied_begins_after_the_step_that_it_names(tmp_path):
    line = "steps: {} loss: 2.5 iter time (s): 0.9 samples/sec: 3.5\n"
    put(tmp_path, "t.log", "Resuming from step 60\n" + "".join(line.format(s) for s in range(70, 200, 10)))
    (resume,) = join(one(tmp_path)).resumes
    assert (resume.first_after, resume.stopped_after, resume.loaded) == (70, None, 60)


def test_numbered_files_of_rows_are_the_starts_of_one_run_or_other_runs(tmp_path):
    put(tmp_path, "a/m-1.jsonl", rows_of(range(1, 41)))
    put(tmp_path, "a/m-2.jsonl", rows_of(range(41, 81)))
    put(tmp_path, "a/m-10.jsonl", rows_of(range(71, 91)))
    assert [r.first_after for r in join(one(tmp_path / "a")).resumes] == [41, 71]
    put(tmp_path, "c/metrics.jsonl", rows_of(range(1, 57)))
    put(tmp_path, "c/metrics-2.jsonl", rows_of(range(51, 91)))
    assert [r.first_after for r in join(one(tmp_path / "c")).resumes] == [51]
    put(tmp_path, "d/metrics.csv", "step,loss\n1,2\n2,2\n")
    put(tmp_path, "d/metrics-2.csv", "step,loss\n1,3\n2,3\n3,3\n")
    assert len(logs(tmp_path / "d")) == 2
    for seed in (1, 2):
        put(tmp_path, f"b/seed{seed}.jsonl", rows_of(range(1, 41 * seed)))
    assert len(logs(tmp_path / "b")) == 2


def offline(steps: range, loss: float) -> bytes:
    """An offline run of W&B: a record of history for each step."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def item(name: str, value: float) -> bytes:
        return field(1, field(1, name.encode()) + b"\x82\x01" + bytes([len(str(value))]) + str(value).encode())

    rows = [field(2, item("_step", step) + item("loss", loss)) for step in steps]
    return b":W&B\xe1\xbe\x00" + b"".join(struct.pack("<IHB", 0, len(row), 1) + row for row in rows)


def test_an_offline_run_that_continues_another_one_is_its_restart(tmp_path):
    def runs(*of: tuple[range, float]) -> list[list[int]]:
        shutil.rmtree(tmp_path / "wandb", ignore_errors=True)
        for at, (steps, loss) in enumerate(of):
            name = "zyx"[at]  # ids have no order
            put(tmp_path, f"wandb/offline-run-20260101_00000{at}-{name}/run-{name}.wandb", offline(steps, loss))
        return [[r.first_after for r in join(log).resumes] for log in logs(tmp_path)]

    assert runs((range(1, 57), 4.0), (range(51, 101), 3.0)) == [[51]]
    assert runs((range(1, 57), 4.0), (range(51, 101), 3.0), (range(91, 120), 2.0)) == [[51, 91]]
    assert runs((range(1, 57), 4.0), (range(1, 101), 3.0)) == [[], []]  # another seed
    assert runs((range(1, 57), 4.0), (range(1, 57), 3.0), (range(51, 101), 2.0)) == [[], [], []]  # it may continue two


# ---- files that grow ----------------------------------------------------------------------------------------------


def same(found: list[MetricLog], want: list[MetricLog]) -> bool:
    def plain(log: MetricLog) -> tuple:
        columns = {name: (c.rows, c.steps, c.values) for name, c in {**log.columns, **log.counters}.items()}
        return columns, log.starts, log.times, log.rows, log.kept, log.notes, log.unit

    return [repr(plain(log)) for log in found] == [repr(plain(log)) for log in want]


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "mlflow" not in kind and kind not in ("trackio", "wandb")])
def test_a_log_that_grows_is_read_as_a_whole_one(kind, growing, tmp_path):
    known = GrownLogs()
    files = {
        path: path.read_bytes() for path in (LOGS / kind).rglob("*") if path.is_file() and path.name != "truth.json"
    }
    for part in (0.2, 0.5, 0.51, 0.9, 1, 0):
        for path, data in files.items() if part else ():
            put(tmp_path, str(path.relative_to(LOGS / kind)), data[: int(part * len(data))])
        found = find_logs(Place(tmp_path), growing=growing, known=known)
        want = find_logs(Place(tmp_path), growing=growing)
        assert same(found.logs, want.logs) and found.notes == want.notes
    whole = sum(len(data) for path, data in files.items() if path.name != "trainer_state.json")
    assert known.nbytes <= whole


def test_a_log_that_was_emptied_replaced_or_rewritten_is_read_again(tmp_path):
    known = GrownLogs()

    def read() -> list[float]:
        return loss(find_logs(Place(tmp_path), known=known).logs[0])[1]

    path = put(tmp_path, "a.csv", "step,loss\n" + "".join(f"{s},2.5\n" for s in range(1000)))
    assert read() == [2.5] * 1000
    before = known.nbytes
    with path.open("a") as handle:
        handle.write("1000,1.5\n")
    assert read() == [2.5] * 1000 + [1.5] and known.nbytes - before == 9
    put(tmp_path, "a.csv", "step,loss\n1,9\n")
    assert read() == [9]
    put(tmp_path, "a.csv", "step,loss\n1,8\n")  # of the same size, at another time
    os.utime(path, ns=(1, 1))
    assert read() == [8]
    other = put(tmp_path, "b", "step,loss\n1,8\n2,7\n")
    other.rename(path)
    assert read() == [8, 7]
    put(tmp_path, "a.csv", "step,loss\n1,6\n2,5\n3,4\n")  # longer, and another text before
    assert read() == [6, 5, 4]
