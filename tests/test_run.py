"""``wb.run``: curves over restarts, resumes, spikes, and the checkpoints that the doctor compares for a spike."""

from __future__ import annotations

import json
import math
import os
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests.lab import restarts
from tests.lab.curves import Score, curves, measured
from workbench.analysis.spikes import find_spikes
from workbench.cli import main
from workbench.views.run import run_sentence

LOGS = Path(__file__).resolve().parents[1] / "sample_ckpts" / "logs"
KINDS = sorted(path.name for path in LOGS.iterdir())


def truth(kind: str) -> dict:
    return json.loads((LOGS / kind / "truth.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_and_spikes_of_a_sample_are_those_of_its_truth(kind):
    run, want = wb.run(LOGS / kind), truth(kind)
    (spike,), (row,) = want["spikes"], run.spikes.to_dict("records")
    assert (row["step"], row["peak_step"]) == (spike["onset_step"], spike["peak_step"])
    # some samples are cut six steps after the spike, before the loss is back
    assert row["kind"] == ("spike" if run.metrics.index[-1] - row["step"] >= 24 else "unresolved")
    if kind != "verl":  # its loss is scripted near 0
        assert abs(row["height"] - spike["added_nats"]) < 0.1
    assert row["before"] is None and row["after"] is None and "keep one from before step 9" in row["advice"]
    if kind == "verl_jsonl":  # the resume erased the file
        assert len(run.resumes) == 0
        return
    (resume,), (got,) = want["resumes"], run.resumes.to_dict("records")
    assert (got["step"], got["stopped_after"], got["repeated"]) == (
        resume["first_step_after"],
        resume["stopped_after"],
        resume["repeated_steps"],
    )
    assert row["resume"] == resume["first_step_after"]
    assert run.metrics.index.is_unique and run.metrics["loss"].notna().all()
    assert set(run.ghosts[run.ghosts["metric"] == "loss"]["step"]) == set(
        range(resume["first_step_after"], resume["stopped_after"] + 1)
    )


def test_a_run_is_json_and_text():
    run = wb.run(LOGS / "torchtitan")
    document = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert document["spikes"][0]["step"] == 93 and document["resumes"][0]["from_step"] == 60
    assert document["metrics"]["loss"]["step"] == list(range(59, 100))
    assert "SPIKE" in repr(run) and "at step 93" in repr(run) and all(len(x) <= 100 for x in repr(run).splitlines())


def test_metrics_have_one_name_each_whatever_the_program_calls_them():
    frame = wb.run(LOGS / "megatron").metrics
    assert list(frame)[:4] == ["loss", "lr", "grad_norm", "throughput"] and frame.index.name == "step"
    assert "loss scale" in frame and frame.loc[61, "lr"] == pytest.approx(2.546686e-4)


def test_three_logs_of_one_run_are_one_curve():
    run = wb.run(LOGS / "hf_trainer")
    assert len(run.sources) == 3 and list(run.resumes["step"]) == [61] and len(run.spikes) == 1


def test_a_folder_without_checkpoints_and_logs_is_refused(tmp_path):
    with pytest.raises(wb.errors.NotACheckpointError, match="neither checkpoints with steps in their names nor a log"):
        wb.run(tmp_path)
    with pytest.raises(wb.errors.NotACheckpointError, match="does not exist"):
        wb.run(tmp_path / "absent")


# ---- with checkpoints -------------------------------------------------------------------------------------------


def save(root: Path, step: int) -> None:
    root.mkdir(exist_ok=True, parents=True)
    torch.save({"model": {"w": torch.full((3,), float(step))}, "step": step}, root / f"step-{step}.pt")


def log(path: Path, losses: dict[int, float] | list[tuple[int, float]]) -> None:
    rows = losses.items() if isinstance(losses, dict) else losses
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("step,loss\n" + "".join(f"{step},{value}\n" for step, value in rows))


def spiky(at: int, last: int = 120, seed: int = 0, interval: int = 1) -> dict[int, float]:
    random = np.random.default_rng(seed)
    return {
        s: 3 * math.exp(0.01 * random.normal()) + (2 * math.exp(-(s - at) / 5) if s >= at else 0)
        for s in range(interval, last + 1, interval)
    }


@pytest.mark.parametrize(
    ("onset", "before", "after"), [(61, 60, 80), (80, 60, 80), (81, 80, 100), (79, 60, 80), (101, 100, None)]
)
def test_the_pair_is_the_last_checkpoint_before_the_spike_and_the_first_with_its_update(tmp_path, onset, before, after):
    for step in (40, 60, 80, 100):
        save(tmp_path, step)
    log(tmp_path / "log.csv", spiky(onset))
    run = wb.run(tmp_path)
    (row,) = run.spikes.to_dict("records")
    assert row["step"] == onset and row["before"] == f"step-{before}.pt"
    assert row["after"] == (None if after is None else f"step-{after}.pt")
    if after is None:
        assert "no complete checkpoint from step 101 or later exists: save one soon after" in row["advice"]


def test_a_program_that_counts_from_zero_logs_a_step_under_the_number_of_its_checkpoint(tmp_path):
    for step in (60, 80):
        save(tmp_path, step)
    log(tmp_path / "log.csv", {s - 1: loss for s, loss in spiky(61).items()})  # its 61st update is number 60
    (row,) = wb.run(tmp_path).spikes.to_dict("records")
    assert (row["step"], row["before"], row["after"]) == (60, "step-60.pt", "step-80.pt")


def test_a_mean_of_ten_steps_may_have_risen_in_the_first(tmp_path):
    for step in (500, 510, 520):
        save(tmp_path, step)
    log(tmp_path / "log.csv", spiky(520, 1200, interval=10))
    (row,) = wb.run(tmp_path).spikes.to_dict("records")
    assert (row["step"], row["before"], row["after"]) == (520, "step-510.pt", "step-520.pt")


def test_the_first_row_after_a_resume_has_no_step_from_before_it(tmp_path):
    for step in (50, 75, 100):
        save(tmp_path, step)
    curve = spiky(76, 120, interval=2)  # the row of step 76 is the mean of 75 and 76, or of 76 alone after a resume
    log(tmp_path / "log.csv", curve)
    assert wb.run(tmp_path).spikes["before"].tolist() == ["step-50.pt"]
    quiet = spiky(1000, 80, interval=2)
    log(tmp_path / "log.csv", [*quiet.items(), *((s, v) for s, v in curve.items() if s > 75)])
    run = wb.run(tmp_path)
    assert run.resumes[["step", "from_step"]].values.tolist() == [[76, 75]]
    assert run.spikes[["step", "before", "after"]].values.tolist() == [[76, "step-75.pt", "step-100.pt"]]


def test_the_resume_names_the_checkpoint_that_exists(tmp_path):
    for step in (60, 80):
        save(tmp_path, step)
    curve = spiky(1000)
    log(tmp_path / "log.csv", [(s, curve[s]) for s in [*range(1, 73), *range(61, 121)]])
    (row,) = wb.run(tmp_path).resumes.to_dict("records")
    assert (row["step"], row["from_step"], row["path"]) == (61, 60, "step-60.pt")
    (tmp_path / "step-60.pt").unlink()
    (row,) = wb.run(tmp_path).resumes.to_dict("records")
    assert not isinstance(row["from_step"], int) and row["path"] is None


def test_an_incomplete_checkpoint_is_listed_and_not_compared(tmp_path):
    for step in (60, 80):
        save(tmp_path, step)
    (tmp_path / "step-70").mkdir()
    (tmp_path / "step-70" / "__0_0.distcp").write_bytes(b"x")
    log(tmp_path / "log.csv", spiky(71))
    run = wb.run(tmp_path)
    assert list(run.steps["complete"]) == [True, False, True]
    assert run.spikes["before"].tolist() == ["step-60.pt"]


def test_a_log_of_other_steps_is_reported(tmp_path):
    save(tmp_path, 5000)
    log(tmp_path / "log.csv", spiky(1000))
    assert "it may belong to another run" in wb.run(tmp_path).notes[-1]


def test_a_second_log_of_another_run_is_not_joined(tmp_path):
    log(tmp_path / "a.csv", spiky(61))
    log(tmp_path / "b.csv", {s: round(loss, 2) for s, loss in spiky(61).items() if s > 10})
    log(tmp_path / "c.csv", {s: 2 * loss for s, loss in list(spiky(90).items())[:100]})
    run = wb.run(tmp_path)
    assert list(run.spikes["step"]) == [61] and list(run.metrics) == ["loss"] and len(run.sources) == 3
    (note,) = run.notes
    assert note.startswith("'c.csv' logs other steps or another loss than 'a.csv'")


def test_a_run_in_a_store_is_read_like_one_on_disk():
    fsspec = pytest.importorskip("fsspec")
    files, samples = fsspec.filesystem("memory"), LOGS.parent
    for path in [*(samples / "loss_spike").iterdir(), samples / "loss_spike.csv"]:
        files.pipe(f"/bucket-of-runs/{path.relative_to(samples)}", path.read_bytes())
    run = wb.run("memory://bucket-of-runs/loss_spike")
    here = wb.run(samples / "loss_spike")
    assert run.spikes.equals(here.spikes) and run.metrics.equals(here.metrics) and len(run.spikes) == 1
    found = run.diagnose(deep=False)
    assert [one.step for one in found.subjects] == [240, 240, 245]


def test_checkpoints_without_a_log_are_a_run(tmp_path):
    save(tmp_path / "a", 1)
    run = wb.run(tmp_path / "a")
    assert len(run.steps) == 1 and run.metrics.empty and run.spikes.empty and "no log was found" in run.notes[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small model that was resumed at step 120 with the weights of step 30: checkpoints, and the loss by step."""
    root, resumed_at = tmp_path_factory.mktemp("trained") / "run", 120
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3, betas=(0.9, 0.95))
    target = torch.randn(8, 4)
    rows, old = [], None
    for step in range(1, 151):
        if step == 31:
            old = {name: one.clone() for name, one in model.state_dict().items()}
        if step == resumed_at + 1:
            model.load_state_dict(old)
        data = torch.randn(256, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rows.append((step, loss.item()))
        optimizer.step()
        if step % 10 == 0:
            root.mkdir(exist_ok=True, parents=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, root / f"step-{step}.pt")
    return root, rows


def logged(trained, target: Path, kind: str) -> Path:
    """A copy of the run with a log in a program's format."""
    root, rows = trained
    lines = {
        "csv": ["step,loss", *(f"{s},{v}" for s, v in rows)],
        "jsonl": [json.dumps({"step": s, "loss": v}) for s, v in rows],
        "log": [f"[titan] t - root - INFO - step: {s:2}  loss: {v:8.5f}  grad_norm:  1.0  tps: 6,507" for s, v in rows],
    }
    shutil.copytree(root, target / "run")
    (target / "run" / f"train.{kind}").write_text("\n".join(lines[kind]) + "\n")
    return target / "run"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "log"])
def test_the_pair_of_a_spike_after_a_wrong_load_is_that_of_the_load(kind, trained, tmp_path):
    run = wb.run(logged(trained, tmp_path, kind))
    (row,) = run.spikes.to_dict("records")
    assert (row["step"], row["before"], row["after"]) == (121, "step-120.pt", "step-130.pt")


def test_the_command_and_the_run_diagnose_a_spike_on_its_pair(trained, tmp_path, capsys):
    run = wb.run(logged(trained, tmp_path, "csv"))
    found = run.diagnose()
    assert [subject.step for subject in found.subjects] == [120, 130] and found.exit_code and found.causes
    assert any("at step 121" in note for note in found.notes)
    assert run.diagnose(45, deep=False).subjects[0].step == 40
    assert main(["doctor", str(tmp_path / "run"), "--json"]) == found.exit_code
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["spikes"][0]["step"] == 121 and [one["step"] for one in document["subjects"]] == [120, 130]
    assert main(["doctor", str(tmp_path / "run")]) == found.exit_code
    text = capsys.readouterr().out
    assert text.startswith(("SPIKE ", "LEVEL SHIFT ")) and "of the loss at step 121: +" in text.splitlines()[0]
    assert found.causes[0].title.rstrip(".") in " ".join(text.split())
    assert len(text.splitlines()) <= 46


def test_the_command_takes_a_log_from_elsewhere(trained, tmp_path, capsys):
    other = tmp_path / "far" / "history.csv"
    other.parent.mkdir()
    (logged(trained, tmp_path, "csv") / "train.csv").rename(other)
    assert main(["doctor", str(tmp_path / "run"), "--logs", str(other), "--shallow"]) in (0, 1, 2)
    assert "at step 121" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "run"), "--logs", str(tmp_path / "absent")]) == 3
    paths = [str(tmp_path / "run" / f"step-{step}.pt") for step in (110, 120)]
    assert main(["doctor", *paths, "--logs", str(other)]) == 64


def test_without_a_pair_the_message_says_what_to_keep(tmp_path):
    log(tmp_path / "log.csv", spiky(61))
    with pytest.raises(wb.errors.UsageError, match="keep one from before step 61 and one from soon after it"):
        wb.run(tmp_path).diagnose()
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "checkpoint-50" / "trainer_state.json").write_text('{"global_step": 50, "log_history": []}')
    with pytest.raises(wb.errors.UsageError, match="'checkpoint-50', the newest one, is not complete: there are no"):
        wb.run(tmp_path).diagnose()


# ---- spikes -----------------------------------------------------------------------------------------------------


def test_without_a_spike_each_resume_is_compared_or_named(tmp_path, monkeypatch):
    for step in (20, 30, 40, 50):
        save(tmp_path, step)
    curve = spiky(1000, 60)
    log(tmp_path / "log.csv", [(s, curve[s]) for s in [*range(1, 26), *range(21, 46), *range(41, 61)]])
    run = wb.run(tmp_path)
    assert list(run.resumes["step"]) == [21, 41] and not len(run.spikes)
    found = run.diagnose()
    assert "chosen because the run was resumed before step 41" in found.notes
    assert found.notes[-1].startswith("the resume before step 21 was compared, too: ")
    monkeypatch.setattr(import_module("workbench.doctor.of_run"), "EARLIER", 0)
    found = run.diagnose()
    want = "the resume before step 21 was not compared; compare 'step-20.pt' with 'step-30.pt'"
    assert found.notes[-1] == want and [one.step for one in found.subjects] == [40, 50]


def test_the_command_compares_what_the_run_compares(tmp_path, capsys):
    for step in (20, 30, 40, 50):
        save(tmp_path, step)
    curve = spiky(1000, 60)
    path = tmp_path / "log.csv"
    log(path, [(s, curve[s]) for s in [*range(1, 46), *range(41, 61)]])
    assert not len(wb.run(tmp_path).spikes)
    main(["doctor", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found["subjects"]] == [40, 50] and found["run"]["resumes"][0]["step"] == 41
    main(["doctor", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith(
        "RESUMED        before step 41 from step 40: 5 steps are logged again\nLOG            log.csv "
    )
    log(path, [(s, curve[s]) for s in [*range(1, 61), *range(56, 61)]])  # no checkpoint after this resume
    main(["doctor", str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert "the resume before step 56 was not compared: no complete checkpoint from step 56 or later exists" in out
    assert "step 40 → step 50" in out
    path.unlink()
    main(["doctor", str(tmp_path)])
    assert "log" not in capsys.readouterr().out.partition("RESUME DOCTOR")[0]


def test_what_to_do_without_a_log_is_said_for_the_place_where_it_is_shown(tmp_path):
    for step in (1, 2):
        save(tmp_path / "a", step)
    run = wb.run(tmp_path / "a")
    assert "name it with logs= or --logs" in repr(run).replace("\n", " ").replace("               ", "")
    page = Path(run.to_html(tmp_path / "page.html", diagnose=False)).read_text("utf-8")
    assert "--logs" not in page and "copy it into the folder of the run, or beside it" in page


def test_a_console_beside_the_rows_names_the_step_that_was_loaded(tmp_path):
    log(tmp_path / "log.csv", {s: 3 - s / 1000 for s in range(1, 121)})
    (tmp_path / "out.txt").write_text("hello\nResuming training from step 60\n")
    run = wb.run(tmp_path)
    assert run.resumes[["step", "from_step"]].values.tolist() == [[61, 60]]
    assert run.resumes["why"][0] == "Resuming training from step 60 ('out.txt')"
    (tmp_path / "out.txt").write_text("Loading checkpoint out/step-60 to evaluate it\n")
    assert len(wb.run(tmp_path).resumes) == 0


def test_a_log_that_begins_right_after_a_checkpoint_began_with_a_resume(tmp_path):
    for step in (60, 80, 100):
        save(tmp_path, step)
    log(tmp_path / "log.csv", {s: 3 - s / 1000 for s in range(61, 121)})
    (row,) = wb.run(tmp_path).resumes.to_dict("records")
    assert (row["step"], row["from_step"]) == (61, 60) and row["why"] == "the log begins right after a checkpoint"
    log(tmp_path / "log.csv", {s: 3 - s / 1000 for s in range(70, 121)})
    assert len(wb.run(tmp_path).resumes) == 0


def timed(root: Path, waits: dict[int, float], clock: bool = False, **more: str) -> wb.Run:
    """A run of 120 steps of a second that is saved every 10; after some steps, nothing is written for long."""
    root.mkdir()
    time, rows = 1.7e9, []
    for step in range(1, 121):
        time += 1
        rows.append({"step": step, "loss": 3 - step / 1000} | ({"timestamp": time} if clock else {}))
        if step % 10 == 0:
            save(root, step)
            os.utime(root / f"step-{step}.pt", (time, time))
        time += waits.get(step, 0)
    (root / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return wb.run(root)


@pytest.mark.parametrize("clock", [False, True])
def test_a_long_wait_after_a_save_is_a_resume(tmp_path, clock):
    run = timed(tmp_path / "a", {60: 7200.0}, clock)
    assert run.resumes[["step", "from_step", "stopped_after"]].values.tolist() == [[61, 60, 60]]
    assert run.resumes["why"][0] == "after 'step-60.pt', nothing was written for 2.0 h"
    for name, waits in {"short": {60: 50.0}, "usual": dict.fromkeys(range(10, 120, 10), 7200.0)}.items():
        assert len(timed(tmp_path / name, waits, clock).resumes) == 0
    if clock:  # the log says that it was not after a save
        assert len(timed(tmp_path / "elsewhere", {65: 7200.0}, clock).resumes) == 0


def test_files_that_were_copied_say_nothing_about_waits(tmp_path):
    timed(tmp_path / "a", {60: 7200.0})
    for step in range(10, 130, 10):
        os.utime(tmp_path / "a" / f"step-{step}.pt", (1.7e9 - 1000 * step,) * 2)
    assert len(wb.run(tmp_path / "a").resumes) == 0


@pytest.mark.parametrize(("saves", "count"), [((60,), 1), ((61,), 0), ((), 0)])
def test_a_learning_rate_that_begins_again_after_a_save_is_a_resume(tmp_path, saves, count):
    for step in saves:
        save(tmp_path, step)
    rate = {s: 1e-3 * min((s if s <= 60 else s - 60) / 8, 1) for s in range(1, 121)}
    (tmp_path / "log.csv").write_text("step,loss,lr\n" + "".join(f"{s},{3 - s / 1e3},{r}\n" for s, r in rate.items()))
    resumes = wb.run(tmp_path).resumes
    assert resumes["step"].tolist() == [61] * count
    assert resumes["why"].tolist() == ["after 'step-60.pt', the learning rate starts over as at the first step"] * count


@pytest.mark.parametrize(
    ("column", "usual", "slow"), [("step_time", 0.5, 9.0), ("tokens_per_second", 8e3, 400.0), ("lr", 1e-3, 9e-3)]
)
def test_a_step_as_slow_as_the_first_after_a_save_is_a_resume(tmp_path, column, usual, slow):
    def found(name: str, *at: int) -> list[int]:
        root = tmp_path / name
        root.mkdir()
        for step in (80, 100, 120):  # those of 20, 40 and 60 were deleted
            save(root, step)
        rows = "".join(f"{s},{3 - s / 1e3},{slow if s in at else usual}\n" for s in range(1, 121))
        (root / "log.csv").write_text(f"step,loss,{column}\n{rows}")
        return wb.run(root).resumes["step"].tolist()

    assert found("again", 1, 61) == ([] if column == "lr" else [61])
    assert found("elsewhere", 1, 66) == found("not-the-first", 61) == found("each", 1, 21, 41, 61, 81, 101) == []


def test_a_row_that_is_there_twice_right_after_a_save_is_a_resume(tmp_path):
    for step in (20, 40, 60):
        save(tmp_path, step)

    def found(twice: int) -> list[int]:
        rows = [(s, 3 - s / 1000) for s in range(1, 81)]
        log(tmp_path / "log.csv", rows[:twice] + rows[twice - 1 :])
        return wb.run(tmp_path).resumes["step"].tolist()

    assert found(41) == [41] and found(45) == []


def test_a_wait_is_no_sign_in_a_log_that_would_show_a_restart(tmp_path):
    row = "[2026-03-01 {:02}:{:02}:{:02},000] [    INFO] - loss: {}, learning_rate: 1e-3, global_step: {}\n"

    def found(name: str, opening: str) -> list[int]:
        root, text, time = tmp_path / name, opening, 0
        root.mkdir()
        for step in range(1, 81):
            time += 1 + 3600 * (step == 41)
            text += row.format(time // 3600, time // 60 % 60, time % 60, 3 - step / 1000, step)
            text += f"Saving model checkpoint to out/checkpoint-{step}\n" if step % 20 == 0 else ""
        (root / "train.log").write_text(text)
        save(root, 80)  # the others were deleted
        return wb.run(root).resumes["step"].tolist()

    assert found("silent", "") == [41]
    assert found("talks", "using world size: 8\nseed ..... 1\n") == []


def test_other_arguments_of_the_trainer_are_a_resume(tmp_path):
    log(tmp_path / "log.csv", {s: 3 - s / 1000 for s in range(1, 121)})
    for step in range(10, 121, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
        (folder / "training_args.bin").write_bytes(b"runs/Mar01_10-00-00" if step <= 70 else b"runs/Mar02_11-30-00")
    (resume,) = wb.run(tmp_path).resumes.to_dict("records")
    assert (resume["step"], resume["from_step"]) == (71, 70)
    assert resume["why"] == "after 'checkpoint-70', 'training_args.bin' of the checkpoints differs"


def test_nan_is_an_event_wherever_it_is():
    (first,) = find_spikes([3.0, math.nan, math.nan, 3.0])
    assert (first.kind, first.onset, first.end, first.over) == ("nan", 1, 3, 2) and first.alarm
    (last,) = find_spikes([3.0] * 30 + [math.inf])
    assert last.kind == "nan" and last.end is None and not last.recovered


def test_a_log_without_a_loss_is_not_a_run_without_a_spike(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "log.csv").write_text("step,lr\n" + "".join(f"{step},0.1\n" for step in range(20)))
    run = wb.run(tmp_path)
    assert run_sentence(run) == "The log contains no loss, so it was not searched for spikes."
    assert "not searched: the log contains no loss" in str(run) and "none" not in str(run)
    log(tmp_path / "log.csv", dict.fromkeys(range(20), 3.0))
    assert run_sentence(wb.run(tmp_path)) == "No jump of the loss was found in 20 points of the log."


def test_a_level_shift_is_not_an_alarm_and_an_open_end_is():
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=300))
    shifted = 3 * noise
    shifted[150:] += 1
    (one,) = find_spikes(shifted.tolist())
    assert (one.kind, one.onset, one.alarm) == ("level shift", 150, False)
    (one,) = find_spikes(shifted[:160].tolist())
    assert (one.kind, one.onset, one.alarm) == ("unresolved", 150, True)


def test_a_level_shift_right_after_a_resume_is_explained_before_a_lower_spike(tmp_path):
    for step in (20, 80, 100, 120):
        save(tmp_path, step)
    curve = spiky(40, 160)  # +2, recovered
    shifted = [(s, v + 5) for s, v in curve.items() if s > 100]
    log(tmp_path / "log.csv", [*((s, v) for s, v in curve.items() if s <= 110), *shifted])
    run = wb.run(tmp_path)
    assert run.spikes[["step", "kind"]].values.tolist() == [[40, "spike"], [101, "level shift"]]
    assert "step 101" in run.diagnose().notes[0] and "step 101" in run_sentence(run)
    log(tmp_path / "log.csv", [*((s, v) for s, v in curve.items() if s <= 100), *shifted])  # no sign of a resume
    assert "step 40" in run_sentence(wb.run(tmp_path))


def test_a_single_outlier_without_an_aftermath_is_not_an_alarm():
    curve = 3 * np.exp(0.01 * np.random.default_rng(0).normal(size=300))
    curve[150] += 1
    assert find_spikes(curve.tolist()) == []
    curve[151] += 0.4
    assert [one.onset for one in find_spikes(curve.tolist())] == [150]


def test_what_is_found_does_not_depend_on_how_long_the_log_goes_on():
    curve = noisy(130, 0.03) * (1 + 2 * np.exp(-np.arange(130) / 8))
    curve[20:23] *= math.exp(0.6)
    curve[70:74] *= math.exp(0.5)
    whole = find_spikes(curve.tolist())
    assert [one.onset for one in whole] == [20, 70]
    for length in (76, 98, 99, 100, 101):
        found = find_spikes(curve[:length].tolist())
        assert [(one.onset, one.height, one.sigma) for one in found] == [
            (one.onset, one.height, one.sigma) for one in whole
        ]


def test_a_flat_curve_and_a_short_one_have_none():
    assert find_spikes([2.0] * 500) == [] and find_spikes([]) == [] and find_spikes([1.0, 9.0]) == []


def test_a_resume_lowers_the_threshold_where_it_is():
    curve = 3 * np.exp(0.01 * np.random.default_rng(3).normal(size=200))
    curve[120:124] += [0.2, 0.15, 0.1, 0.05]
    assert find_spikes(curve.tolist()) == []
    (one,) = find_spikes(curve.tolist(), [120])
    assert one.onset == 120 and one.suspected


def test_hard_curves_of_a_seed_that_was_not_tuned_on():
    """A part of the curves of docs/run.md; ``python -m tests.lab.curves`` measures all."""
    score = measured(seed=4, each=1)
    assert score.curves == 54 and score.hits + score.missed > 15
    assert score.precision >= 0.85 and score.recall >= 0.85 and score.alarmed <= 0.05 * score.healthy


def noisy(count: int, sigma: float, seed: int = 0) -> np.ndarray:
    return np.exp(np.log(2) + sigma * np.random.default_rng(seed).normal(size=count))


def test_two_points_are_an_event_if_the_noise_never_went_that_far():
    curve = noisy(200, 0.02)
    curve[150:152] *= math.exp(0.2), math.exp(0.12)
    (one,) = find_spikes(curve.tolist())
    assert one.onset == 150 and one.kind == "spike"
    curve[100:140:4] *= math.exp(-0.17)  # the noise is wild, on the other side
    assert find_spikes(curve.tolist()) == []


def test_a_rise_that_no_single_point_shows_is_an_event():
    """As of a learning rate that is ten times too high: 0.6 nats over a hundred points."""
    rise = np.clip((np.arange(400) - 200) / 100, 0, 1) * 0.6
    (one,) = find_spikes((noisy(400, 0.04) * np.exp(rise)).tolist())
    assert 195 <= one.onset <= 240 and one.kind == "level shift" and one.height > 0.8
    back = rise * np.where(np.arange(400) > 300, np.exp(-(np.arange(400) - 300) / 10), 1)
    (one,) = find_spikes((noisy(400, 0.04) * np.exp(back)).tolist())
    assert 195 <= one.onset <= 240 and one.alarm and one.recovered


def test_one_point_is_an_event_if_it_doubles_the_loss_far_beyond_the_noise():
    """As of a single batch of bad data, logged in a single row."""
    curve = noisy(200, 0.05)
    curve[150] *= 2.2
    (one,) = find_spikes(curve.tolist())
    assert one.onset == 150 and one.suspected and one.alarm
    curve[120] *= math.exp(-0.4)  # the noise reaches far
    assert find_spikes(curve.tolist()) == []


def test_the_noise_is_not_that_of_a_steep_fall_before_it():
    """In a short log, the fall at its beginning would hide what comes after it."""
    curve = noisy(60, 0.02) * (1 + 2 * np.exp(-np.arange(60) / 4))
    curve[45:] *= math.exp(0.35)
    (one,) = find_spikes(curve.tolist())
    assert one.onset == 45 and one.height > 0.7


def test_a_jump_within_an_event_is_another_event():
    curve = noisy(200, 0.02)
    curve[100:] *= math.exp(0.4)
    curve[112:114] *= math.exp(0.9)
    assert [one.onset for one in find_spikes(curve.tolist())] == [100, 112]


def test_noise_that_swells_is_no_event():
    sigma = np.where(np.arange(400) > 200, 0.09, 0.03)
    assert find_spikes((2 * np.exp(sigma * np.random.default_rng(5).normal(size=400))).tolist()) == []


@pytest.mark.parametrize("seed", [11])
def test_restarts_of_a_lab_are_found_and_none_is_invented(seed):
    """A part of the runs of docs/run.md; ``python -m tests.lab.restarts`` measures all."""
    hits, false, _, traced = np.sum(list(restarts.measured(seed, 48).values()), axis=0)
    assert traced > 40 and hits >= 0.98 * traced and false == 0


def test_the_score_counts_as_it_says():
    curve = next(one for one in curves(1) if len(one.spikes) == 1 and one.spikes[0][0] > 60)
    ((onset, decay),) = curve.spikes
    for onsets, want in (
        ([onset + 3], (1, 0, 0)),
        ([onset - 3], (0, 1, 1)),
        ([onset, onset + int(2 * decay)], (1, 0, 0)),
    ):
        score = Score()
        score.add(curve, onsets)
        assert (score.hits, score.false, score.missed) == want


@pytest.mark.parametrize(("logged", "another"), [(lambda step: 1e-3 * (1 - step / 200), False), (lambda _: 3e-4, True)])
def test_a_log_with_another_learning_rate_is_noted(tmp_path, logged, another):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    rows = []
    for step in range(1, 45):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 200)
        weight.grad = torch.full_like(weight, 0.1)
        optimizer.step()
        rows.append((step, 2 + 0.001 * (step % 3) + (0.5 if step >= 31 else 0), f"{logged(step):.4g}"))
        if step in (30, 40):
            state = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, tmp_path / f"step-{step}.pt")
    lines = "".join(f"{step},{loss},{lr}\n" for step, loss, lr in rows)
    (tmp_path / "log.csv").write_text(f"step,loss,lr\n{lines}")
    notes = [one for one in wb.run(tmp_path).diagnose(31).notes if "another run" in one]
    assert bool(notes) is another
    if another:
        assert "0.0003" in notes[0] and "step-30.pt" in notes[0]


def test_the_rate_of_the_next_step_which_trainers_store_is_no_other_run():
    run = wb.run(LOGS.parent / "trainer_run")  # at step 6, the last one logged, the Trainer stores that of step 7: 0
    assert not [one for step in (2, 4) for one in run.diagnose(step).notes if "another run" in one]


def test_rows_without_steps_are_counted_and_say_so(tmp_path):
    rows = [
        f"{{'loss': '{loss:.4f}', 'learning_rate': '1e-4', 'epoch': '{step / 100}'}}"
        for step, loss in spiky(61).items()
    ]
    for step in (40, 60, 80):
        save(tmp_path, step)
    (tmp_path / "train.log").write_text("\n".join(rows))
    run = wb.run(tmp_path)
    assert "contains no steps" in run.notes[0] and run.spikes["before"].isna().all()
    assert run.pair(61).before is None and "name the two checkpoints" in run.spikes["advice"][0]
    with pytest.raises(wb.errors.UsageError, match="contains no steps"):
        run.diagnose()
    log(tmp_path / "steps.csv", {10 * step: 2.0 + step / 1e3 for step in range(1, 30)})
    assert wb.run(tmp_path).sources["kind"][0] == "csv"  # a log with steps comes first, however short


def test_several_runs_in_one_folder_are_named(tmp_path):
    for name in ("a", "b"):
        for step in (1, 2):
            save(tmp_path / name, step)
    assert any("2 folders are shown as one run: 'a', 'b'" in note for note in wb.run(tmp_path).notes)
    assert not any("folders" in note for note in wb.run(tmp_path / "a").notes)
