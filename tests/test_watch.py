"""``workbench watch``: each step, spike and resume once, never a half-written one, whatever way it is written.

A script of writes runs in lockstep with the looks: the watcher's ``sleep`` runs the next write. No test waits.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests.range_server import RangeServer
from tests.test_run import save, spiky
from tests.test_stores import S3, s3, server, upload
from workbench.analysis.health import StepHealth
from workbench.analysis.run import open_run
from workbench.analysis.watch import Watcher, WatchEvent
from workbench.app.run_cache import RunCache, shared_runs
from workbench.app.watching import Watching, recent
from workbench.cli import main
from workbench.errors import NotACheckpointError, UsageError
from workbench.runs import Found, discover

__all__ = ["s3", "server"]  # fixtures

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
AT_ONCE = ("--once", "--interval", "0.01")
IDLE = 8  #: looks after the last write
Script = Iterable[Callable[[], object]]


def follow(root: Any, script: Script = (), *, idle: int = IDLE, opens: bool = True, **options: Any) -> list[WatchEvent]:
    """The events of a watch while a script runs, one part between two looks; each step opens when it is reported."""
    parts, elapsed, left = iter(script), 0.0, idle

    def sleep(seconds: float) -> bool:
        nonlocal elapsed, left
        elapsed += seconds
        part = next(parts, None)
        if part is None:
            left -= 1
            return left < 0
        part()
        return False

    began = time.time()
    events = []
    for event in Watcher(root, clock=lambda: began + elapsed, sleep=sleep, **options).events():
        events.append(event)
        if event.kind in ("step", "rewritten") and opens:
            wb.open(event.path, cache=False).state_dict()
    return events


def names(events: Iterable[WatchEvent], *kinds: str) -> list[str]:
    return [os.path.basename(event.path) for event in events if event.kind in (kinds or ("step",))]


def nothing() -> None:
    """A look during which nothing is written."""


def in_pieces(data: bytes, path: Path, pieces: int = 4, stalls: int = 2) -> Iterator[Callable[[], object]]:
    """Append a file in pieces, with looks at which it does not grow."""

    def append(part: bytes) -> None:
        path.parent.mkdir(exist_ok=True, parents=True)
        with path.open("ab") as file:
            file.write(part)

    size = -(-len(data) // pieces)
    for start in range(0, len(data), size):
        yield partial(append, data[start : start + size])
        yield from [nothing] * stalls


def dcp_in_place(path: Path, stalls: int = 2) -> Iterator[Callable[[], object]]:
    """What a writer without a rename does: the data files one after the other, then ``.metadata``, all slowly."""
    source = ROOT / "titan_run" / "step-2"
    for file in sorted(source.iterdir(), key=lambda file: file.name == ".metadata"):
        yield from in_pieces(file.read_bytes(), path / file.name, 3, stalls)


def torch_bytes(step: int, value: float = 0.0) -> bytes:
    import io

    out = io.BytesIO()
    torch.save({"model": {"w": torch.full((4000,), value)}, "step": step}, out)
    return out.getvalue()


# ---- a run that is being written -------------------------------------------------------------------------------------


def test_what_is_renamed_into_place_is_a_step_once(tmp_path):
    def write(step: int) -> Iterator[Callable[[], object]]:
        yield lambda: shutil.copytree(ROOT / "titan_run" / "step-2", tmp_path / f"step-{step}.tmp")
        yield from [nothing] * 3  # complete, under a name that is not meant to stay
        yield lambda: (tmp_path / f"step-{step}.tmp").rename(tmp_path / f"step-{step}")

    events = follow(tmp_path, [part for step in (10, 20, 30) for part in write(step)])
    assert names(events) == ["step-10", "step-20", "step-30"]
    assert names(events, "checked") == names(events) and {event.kind for event in events} == {"step", "checked"}


@pytest.mark.parametrize("stalls", [0, 3])
def test_what_is_written_in_place_is_a_step_once_it_is_whole(tmp_path, stalls):
    script = [part for step in (10, 20) for part in dcp_in_place(tmp_path / f"step-{step}", stalls)]
    events = follow(tmp_path, script, checks=("deep",))
    assert names(events) == ["step-10", "step-20"] and names(events, "incomplete", "finding", "rewritten") == []
    assert [event.health.values for event in events if event.kind == "checked"] == [True, True]


@pytest.mark.parametrize("stalls", [0, 3])
def test_a_torch_save_that_grows_is_no_step_before_its_last_byte(tmp_path, stalls):
    script = [
        part for step in (10, 20) for part in in_pieces(torch_bytes(step), tmp_path / f"step-{step}.pt", 7, stalls)
    ]
    events = follow(tmp_path, script, checks=("deep",))
    assert names(events) == ["step-10.pt", "step-20.pt"] and names(events, "incomplete", "finding", "rewritten") == []


def test_a_file_whose_bytes_are_there_before_its_values(tmp_path):
    """Its size does not change, its time does."""
    data, path = torch_bytes(10, 1.0), tmp_path / "step-10.pt"

    def fill(size: int) -> None:
        path.write_bytes(data[:size] + bytes(len(data) - size))
        os.utime(path, ns=(size, 10**18 + size))  # a clock that is coarser than this test would show nothing

    events = follow(
        tmp_path, [partial(fill, size) for size in range(0, len(data) + 1, len(data) // 5)] + [partial(fill, len(data))]
    )
    assert names(events) == ["step-10.pt"] and names(events, "finding", "rewritten") == []


def test_a_writer_in_another_thread(tmp_path):
    """Without lockstep: whatever the looks catch, no step is reported before it is whole."""

    def write() -> None:
        for step in range(10, 60, 10):
            for part in dcp_in_place(tmp_path / f"step-{step}", 0):
                part()
            for part in in_pieces(torch_bytes(step), tmp_path / f"last-{step}.pt", 20, 0):
                part()

    thread = threading.Thread(target=write)
    ends: list[int] = []

    def sleep(seconds: float) -> bool:
        if not thread.is_alive():
            ends.append(0)
        return len(ends) > 4

    watcher = Watcher(tmp_path, checks=(), sleep=sleep)
    thread.start()
    events = []
    for event in watcher.events():
        events.append(event)
        assert event.kind == "step"
        wb.open(event.path, cache=False).state_dict()
    wanted = [name for step in range(10, 60, 10) for name in (f"step-{step}", f"last-{step}.pt")]
    assert sorted(names(events)) == sorted(wanted)


def test_a_step_without_what_the_others_have_waits(tmp_path):
    """A trainer that saves the weights, then gathers the optimizer: nothing marks the end."""

    def weights(step: int) -> None:
        (tmp_path / f"step-{step}").mkdir()
        save_file({"w": torch.ones(4)}, tmp_path / f"step-{step}" / "model.safetensors")

    def optimizer(step: int) -> None:
        (tmp_path / f"step-{step}" / "optimizer.pt").write_bytes(torch_bytes(step))

    weights(10)
    optimizer(10)
    script = [nothing] * 4 + [lambda: weights(20)] + [nothing] * 20 + [lambda: optimizer(20)]
    events = follow(tmp_path, script)
    assert names(events) == ["step-10", "step-20"] and names(events, "rewritten") == []
    assert events[-1].time - events[0].time > 40
    (tmp_path / "step-20" / "optimizer.pt").unlink()
    late = follow(tmp_path, [], idle=50, patience=60)  # nothing more comes: reported, with what it lacks
    assert names(late) == ["step-10", "step-20"]
    assert "it has no 'optimizer.pt', which the other steps have" in late[-2].words + late[-1].words


def test_logs_that_cannot_be_read_are_noted_once(tmp_path):
    def grow() -> None:
        with (tmp_path / "odd.jsonl").open("a") as handle:
            handle.write("not a row\n" * 3)

    (tmp_path / "metrics.jsonl").write_bytes(b"")
    (tmp_path / "train.log").write_bytes(b"\0" * 100)
    grow()
    events = follow(tmp_path, [nothing, grow, nothing, grow, nothing])
    assert sorted(event.words for event in events if event.kind == "note") == [
        "'metrics.jsonl' is empty",
        "'odd.jsonl': 3 lines are not rows with a step, the first 'not a row'",
        "'train.log' is binary and was not read",
    ]
    save(tmp_path, 10)  # also where there are steps
    assert len([event for event in follow(tmp_path, []) if event.kind == "note"]) == 3


def test_a_step_that_stays_half_written_is_called_incomplete_once(tmp_path):
    save(tmp_path, 10)
    data, path = torch_bytes(20), tmp_path / "step-20.pt"
    script = [*in_pieces(data[:-1], path, 2, 0), *[nothing] * 40, lambda: path.write_bytes(data)]
    watched_events = follow(tmp_path, script, patience=60)
    (lost,) = [event for event in watched_events if event.kind == "incomplete"]
    assert lost.severity == "error" and "no end record" in lost.words and lost.health.state == "incomplete"
    assert lost.time - watched_events[0].time >= 60
    assert names(watched_events) == ["step-10.pt", "step-20.pt"]


def test_a_save_that_was_interrupted_long_ago_is_incomplete_at_once(tmp_path):
    for step in (10, 20):
        shutil.copytree(ROOT / "titan_run" / "step-2", tmp_path / f"step-{step}")
    (tmp_path / "step-20" / ".metadata").unlink()
    for file in (tmp_path / "step-20").iterdir():
        file.touch()
    assert names(follow(tmp_path), "incomplete") == []
    for file in (tmp_path / "step-20").iterdir():
        os.utime(file, (1e9, 1e9))
    events = follow(tmp_path)
    assert names(events) == ["step-10"] and names(events, "incomplete") == ["step-20"]
    (lost,) = [event for event in events if event.kind == "incomplete"]
    assert lost.severity == "error" and lost.words == "incomplete: .metadata is missing"


def test_rewritten_removed_and_sealed(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    shutil.copytree(ROOT / "titan_run" / "step-2", tmp_path / "step-40")
    for file in (tmp_path / "step-40").iterdir():
        file.touch()  # saved just now: a folder does not wait for what the files beside it have
    script = [
        *[nothing] * 3,
        lambda: save(tmp_path, 20),
        *[nothing] * 3,
        lambda: (tmp_path / "step-10.pt").unlink(),
        *[nothing] * 3,
        lambda: wb.seal(tmp_path / "step-40"),  # adds a file: nothing that was checked has changed
    ]
    events = follow(tmp_path, script)
    assert names(events) == ["step-10.pt", "step-20.pt", "step-30.pt", "step-40"]
    assert names(events, "rewritten") == ["step-20.pt"] and names(events, "removed") == ["step-10.pt"]
    (again,) = [event for event in events if event.kind == "rewritten"]
    assert again.words.endswith("bytes; files 1 replaced")
    assert names(events, "checked").count("step-20.pt") == 2


def test_the_first_step_of_a_run_whose_optimizer_comes_late_is_checked_again(tmp_path):
    script = [nothing] * 3 + [lambda: (tmp_path / "step-10" / "optimizer.pt").write_bytes(torch_bytes(10))]
    (tmp_path / "step-10").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "step-10" / "model.safetensors")
    events = follow(tmp_path, script)
    assert [event.kind for event in events] == ["step", "checked", "rewritten", "checked"]
    assert events[2].words.endswith("files 1 added")


def test_a_corrupt_file_is_a_step_for_the_checks_when_it_does_not_change(tmp_path):
    data = torch_bytes(10)
    at = data.index(b"PK\x01\x02")  # the directory, which is written last
    (tmp_path / "step-10.pt").write_bytes(data[:at] + b"XX" + data[at + 2 :])
    assert follow(tmp_path) == []  # it may be a file whose end was written first
    events = follow(tmp_path, patience=60, idle=50, opens=False)
    assert [event.kind for event in events] == ["step", "finding"] and events[1].severity == "error"


def test_one_look_at_what_is_being_written(tmp_path):
    save(tmp_path, 10)
    part = in_pieces(torch_bytes(20), tmp_path / "step-20.pt", 9, 0)
    next(part)()
    events = list(Watcher(tmp_path, sleep=lambda seconds: next(part)()).once())
    lost = next(event for event in events if event.kind == "incomplete")
    assert (names([lost], "incomplete"), lost.severity) == (["step-20.pt"], "") and "being written" in lost.words
    next(part)()
    events = list(Watcher(tmp_path, sleep=lambda seconds: None).once())
    lost = next(event for event in events if event.kind == "incomplete")
    assert lost.severity == "" and "s ago and may still be written" in lost.words
    assert names(events) == ["step-10.pt"]


@pytest.mark.parametrize("root", ["titan_run/step-2", "loss_spike/step-240.pt"])
def test_the_root_may_be_one_checkpoint(root):
    events = follow(ROOT / root)
    assert [(event.kind, event.path) for event in events] == [(kind, str(ROOT / root)) for kind in ("step", "checked")]


def test_a_link_to_the_newest_step_is_not_a_step(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "last.pt").symlink_to("step-10.pt")
    assert names(follow(tmp_path)) == ["step-10.pt"]


def test_from_now(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{s},{v}\n" for s, v in spiky(61).items()))
    assert names(follow(tmp_path), "spike", "step") != []
    events = follow(tmp_path, [nothing, nothing, lambda: save(tmp_path, 20), *[nothing] * 3], from_now=True)
    assert [(event.kind, event.step) for event in events] == [("step", 20), ("checked", 20)]


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_by_the_deep_check_only(tmp_path):
    save(tmp_path, 10)
    data = bytearray((tmp_path / "step-10.pt").read_bytes())
    at = data.index(torch.full((3,), 10.0).numpy().tobytes())
    data[at] ^= 1
    (tmp_path / "step-10.pt").write_bytes(data)
    assert names(follow(tmp_path), "finding") == []
    (found,) = [event for event in follow(tmp_path, checks=("verify", "deep")) if event.kind == "finding"]
    assert (found.check, found.severity, found.step) == ("deep", "error", 10)
    assert found.details["count"] == len(found.details["findings"]) == 1 and "CRC" in json.dumps(found.to_dict())


def test_the_doctor_compares_a_step_with_the_one_before_it(tmp_path):
    source = ROOT / "loss_spike"
    script: list[Callable[[], object]] = []
    for name in ("step-240.pt", "step-240-echo.pt", "step-245.pt"):
        script += [partial(shutil.copy, source / name, tmp_path / name), nothing, nothing]
    events = [event for event in follow(tmp_path, script, checks=("doctor",)) if event.check]
    assert [(os.path.basename(event.path), event.kind) for event in events] == [
        ("step-240-echo.pt", "finding"),
        ("step-245.pt", "finding"),
    ]
    assert os.path.basename(events[1].details["before"]) == "step-240.pt"
    assert os.path.basename(events[1].details["echo"]) == "step-240-echo.pt"
    assert events[1].words.startswith("The fp32 master weights do not match the weights.")


def test_a_result_for_files_that_were_replaced_meanwhile_is_dropped(tmp_path, monkeypatch):
    from workbench.analysis import watch

    save(tmp_path, 10)
    real, calls = watch.check_step, []

    def replaced(*args: Any, **options: Any) -> StepHealth:
        found = real(*args, **options)
        if not calls:
            (tmp_path / "step-10.pt").write_bytes(torch_bytes(10))
        calls.append(found)
        return found

    monkeypatch.setattr(watch, "check_step", replaced)
    events = follow(tmp_path)
    assert [event.kind for event in events] == ["step", "rewritten", "checked"] and len(calls) == 2


def test_wrong_arguments(tmp_path):
    with pytest.raises(UsageError, match="unknown check 'depe'"):
        Watcher(tmp_path, checks=("depe",))
    with pytest.raises(UsageError, match="interval 0"):
        Watcher(tmp_path, interval=0)
    with pytest.raises(NotACheckpointError, match="does not exist"):
        list(Watcher(tmp_path / "none").once())
    with pytest.raises(NotACheckpointError, match="does not exist"):
        list(Watcher(tmp_path, logs=tmp_path / "none.log").once())


def test_looks_are_rarer_while_nothing_changes(tmp_path):
    waits: list[float] = []

    def sleep(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 12:
            save(tmp_path, 10)
        return len(waits) > 14

    list(Watcher(tmp_path, clock=lambda: 0.0, sleep=sleep).events())
    assert waits[:4] == [2, 3, 4.5, 6.75] and waits[10:12] == [30, 30] and waits[12:14] == [2, 2]


# ---- logs ------------------------------------------------------------------------------------------------------------


def rows(curve: dict[int, float], steps: Iterable[int]) -> bytes:
    return "".join(f"{step},{curve[step]}\n" for step in steps).encode()


@pytest.mark.parametrize("pieces", [31])
def test_a_spike_is_reported_once_while_the_log_grows_by_half_lines(tmp_path, pieces):
    curve = spiky(61)
    data = b"step,loss\n" + rows(curve, range(1, 121))
    events = follow(tmp_path, in_pieces(data, tmp_path / "log.csv", pieces, 0))
    (spike,) = events
    assert (spike.kind, spike.severity, spike.path) == ("spike", "warn", str(tmp_path))
    assert spike.step == 61 and spike.details["kind"] == "unresolved"  # reported before it was known to be over
    assert wb.run(tmp_path).spikes["kind"].tolist() == ["spike"]


def test_a_number_of_which_half_is_written_is_not_read(tmp_path):
    curve = spiky(1000)
    whole = b"step,loss\n" + rows(curve, range(1, 60))
    (tmp_path / "log.csv").write_bytes(whole + b"60,9")  # of 9e-1
    assert len(wb.run(tmp_path).spikes) == 1 and len(open_run(tmp_path, growing=True).spikes) == 0
    assert follow(tmp_path) == []
    (tmp_path / "log.csv").write_bytes(whole + b"6")  # of 60: an earlier step would be a resume
    assert follow(tmp_path) == []


def test_a_spike_that_a_resume_has_undone_may_come_again(tmp_path):
    curve = spiky(81)
    data = b"step,loss\n" + rows(curve, range(1, 96)) + rows(curve, range(61, 121))
    events = follow(tmp_path, in_pieces(data, tmp_path / "log.csv", 40, 0))
    assert [(event.kind, event.step) for event in events] == [("spike", 81), ("resume", 61), ("spike", 81)]
    assert events[1].details["repeated"] == 35 and events[1].severity == ""


def test_a_log_that_takes_long_to_read_is_read_less_often(tmp_path, monkeypatch):
    from workbench.analysis import watch

    now, reads = [1000.0], []
    real = watch.open_run

    def slow(*args: Any, **options: Any) -> Any:
        now[0] += 10
        reads.append(now[0])
        return real(*args, **options)

    monkeypatch.setattr(watch, "open_run", slow)
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n1,3.0\n")

    def sleep(seconds: float) -> bool:
        now[0] += seconds
        with path.open("a") as file:
            file.write(f"{int(now[0])},3.0\n")
        return now[0] > 1400

    looks = Watcher(tmp_path, clock=lambda: now[0], sleep=sleep)
    assert list(looks.events()) == []
    assert [after - before for before, after in pairwise(reads)] == [100, 100, 100, 100]


def test_nan_is_an_error(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n1,3.0\n2,2.9\n3,nan\n")
    (event,) = follow(tmp_path)
    assert event.severity == "error" and event.words.startswith("the loss is NaN or infinite at step 3")
    json.dumps(event.to_dict(), allow_nan=False)


def test_two_runs_are_watched_apart(tmp_path):
    for name, at in (("a", 61), ("b", 71)):
        for step in (10, 20):
            save(tmp_path / name, step)
        (tmp_path / name / "log.csv").write_bytes(b"step,loss\n" + rows(spiky(at), range(1, 121)))
    found = [(os.path.basename(event.path), event.step) for event in follow(tmp_path) if event.kind == "spike"]
    assert sorted(found) == [("a", 61), ("b", 71)]


def test_the_same_in_a_store(s3: S3, tmp_path):
    curve = spiky(61)
    log = b"step,loss\n" + rows(curve, range(1, 121))
    upload(s3, ROOT / "logs" / "torchtitan", "elsewhere")

    def put(data: bytes, key: str) -> None:
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / os.path.basename(key)).write_bytes(data)
        upload(s3, tmp_path / "one", os.path.dirname(key))
        shutil.rmtree(tmp_path / "one")

    put(log[:900], "run/log.csv")
    script: list[Callable[[], object]] = []
    for step in (10, 20):
        files = sorted((ROOT / "titan_run" / "step-2").iterdir(), key=lambda file: file.name == ".metadata")
        for file in files:
            script += [partial(put, file.read_bytes(), f"run/step-{step}/{file.name}"), nothing]
        script += [partial(put, log[: 1400 + 20 * step], "run/log.csv")]
    script += [partial(put, log, "run/log.csv")]
    events = follow("s3://bucket/run", script, idle=4, opens=False, storage_options=s3.options)
    assert names(events) == ["step-10", "step-20"] == names(events, "checked")
    assert [event.step for event in events if event.kind == "spike"] == [61]
    assert {event.kind for event in events} == {"step", "checked", "spike"}
    assert events[0].path == "s3://bucket/run/step-10"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_lines_or_json_and_its_exit_code_says_what_was_found(tmp_path, capsys):
    assert main(["watch", str(ROOT / "titan_run"), *AT_ONCE]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1:3] for line in out.splitlines()] == [
        ["step", "step-2"],
        ["step", "step-4"],
        ["checked", "step-4"],
        ["checked", "step-2"],
    ]
    assert err.endswith("titan_run: 2 steps\n")
    (tmp_path / "log.csv").write_bytes(b"step,loss\n" + rows(spiky(61), range(1, 121)))
    assert main(["watch", str(tmp_path), *AT_ONCE, "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert set(json.loads(line)) == {"event", "time", "path", "step", "severity", "words", "check", "details"}
    (tmp_path / "log.csv").write_text("step,loss\n1,3.0\n2,nan\n")
    assert main(["watch", str(tmp_path), *AT_ONCE]) == 2
    assert main(["watch", str(tmp_path / "none")]) == 3 and "does not exist" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--for", "0.01"]) == 2
    assert main(["watch", str(ROOT / "titan_run"), "--until-steps", "2", "--interval", "0.01"]) == 0


def test_a_command_gets_the_event_but_not_on_its_command_line(tmp_path, capfd):
    bad = tmp_path / "run; touch hacked $(touch hacked) 'x"
    bad.mkdir()
    (bad / "log.csv").write_text("step,loss\n1,3.0\n2,nan\n")
    got = tmp_path / "got"
    script = tmp_path / "told.py"
    script.write_text(
        "import json, os, sys\n"
        "seen = os.environ['WORKBENCH_SEVERITY'], os.environ['WORKBENCH_PATH'], json.load(sys.stdin)['step']\n"
        "print(*seen, len(sys.argv), file=open(sys.argv[1], 'w'))\n"
    )
    command = f"{sys.executable} {script} {got}"
    assert main(["watch", str(bad), *AT_ONCE, "--on-finding", command]) == 2
    assert got.read_text() == f"error {bad} 2 2\n" and not list(tmp_path.rglob("hacked"))
    assert main(["watch", str(bad), *AT_ONCE, "--on-finding", "false"]) == 2
    assert "note: --on-finding: 'false' ended with exit code 1" in capfd.readouterr().err
    assert main(["watch", str(bad), *AT_ONCE, "--on-finding", "no-such-command-here x"]) == 64


def test_no_event_contains_the_secrets_of_a_url(tmp_path, capfd):
    run = tmp_path / "run"
    for step in (10, 20):
        save(run, step)
    (run / "step-20.pt").write_bytes(torch_bytes(20, float("nan")))
    (run / "log.csv").write_text("step,loss\n1,3.0\n2,nan\n")
    (run / "empty.csv").touch()
    script = tmp_path / "told.py"
    script.write_text("import os, sys; print(os.environ['WORKBENCH_PATH'], sys.stdin.read(), file=sys.stderr)\n")
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with RangeServer(tmp_path) as server, HTTPServer(("127.0.0.1", 0), Handler) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        url = server.url.replace("://", "://usr:s3cret@") + "/run"
        words = ["watch", url, *AT_ONCE, "--check", "deep", "--check", "doctor", "--webhook"]
        words += [f"http://127.0.0.1:{hook.server_port}", "--on-finding", f"{sys.executable} {script}"]
        printed = []
        for logs in ([], ["--json", "--logs", f"{url}/log.csv"]):
            assert main([*words, *logs]) == 2
            printed.append(capfd.readouterr())
        hook.shutdown()
    paths = {json.loads(line)["path"] for line in printed[-1].out.splitlines()}
    assert paths >= {f"{server.url}/run"} and len(got) > 3
    assert f"{server.url}/run " in printed[0].err and f"watched {server.url}/run: " in printed[0].err
    assert "s3cret" not in str(printed) and "usr" not in str(got)


def test_a_webhook_is_tried_again_and_its_url_is_not_shown(tmp_path, capsys, monkeypatch):
    from workbench.cli import watch

    monkeypatch.setattr(watch, "PAUSE", 0.0)
    (tmp_path / "log.csv").write_text("step,loss\n1,3.0\n2,nan\n")
    answers, got, users = [500, 503, 200], [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            users.append((self.path, self.headers["Authorization"]))
            self.send_response(answers[len(got) - 1])
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}/hook?token=s3cret"
        assert main(["watch", str(tmp_path), *AT_ONCE, "--webhook", url]) == 2
        assert [one["event"] for one in got] == ["spike"] * 3 and "note" not in capsys.readouterr().err
        answers += [302]
        assert main(["watch", str(tmp_path), *AT_ONCE, "--webhook", url]) == 2
        assert len(got) == 4 and "'127.0.0.1' did not accept the event: HTTP status 302" in capsys.readouterr().err
        answers += [200, 401]
        named = url.replace("://", "://us%40er:s3%3acr%C3%A9t@")
        for _ in range(2):
            assert main(["watch", str(tmp_path), *AT_ONCE, "--webhook", named]) == 2
        basic = f"Basic {base64.b64encode('us@er:s3:crét'.encode()).decode()}"
        assert users == [("/hook?token=s3cret", None)] * 4 + [("/hook?token=s3cret", basic)] * 2
        printed = capsys.readouterr()
        assert (
            printed.err.count("note: ") == 1 and "'127.0.0.1' did not accept the event: HTTP status 401" in printed.err
        )
        assert not [secret for secret in ("us@er", "us%40er", "s3:", "s3%3a", "s3cret") if secret in str(printed)]
        listening.shutdown()
    assert main(["watch", str(tmp_path), *AT_ONCE, "--webhook", url]) == 2
    err = capsys.readouterr().err
    assert "'127.0.0.1' did not accept the event: Connection refused" in err and "s3cret" not in err
    for url in ("file:///etc/passwd", "ftp://host/", "http:///x", "https://ho st/"):
        assert main(["watch", str(tmp_path), *AT_ONCE, "--webhook", url]) == 64


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_exit_code_and_a_summary(tmp_path, number):
    (tmp_path / "log.csv").write_text("step,loss\n1,3.0\n2,nan\n")
    command = [sys.executable, "-m", "workbench", "watch", str(tmp_path), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT.parent
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "spike"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "") and err == f"watched {tmp_path}: 1 spike\n"


# ---- in a server -----------------------------------------------------------------------------------------------------


def test_a_server_keeps_what_its_watch_finds(tmp_path):
    from workbench.app.serve import start

    root = tmp_path / "titan_run"
    shutil.copytree(ROOT / "titan_run", root)
    recent.clear()
    (found,) = [one for one in discover(root) if one.step == 4]
    server = start(root, watch=("verify",))
    try:
        deadline = time.monotonic() + 60
        while (health := shared_runs.health(found, str(root / "step-4"))).state == "unseen":  # what pages ask
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert health.state == "sound" and not health.values and health.report is not None
        assert {one.kind for one in recent} >= {"step"}
    finally:
        server.watching.stop()
        server.stop()
        recent.clear()
    assert not [thread for thread in threading.enumerate() if thread.name == "workbench-watch"]
    quiet = start(root)
    assert quiet.watching is None and not recent
    quiet.stop()


def test_the_worst_of_several_checks_is_the_health_of_a_step():
    runs, found = RunCache(), Found("step-1", "dcp", 1, 10, 5.0, True, "")
    place = "s3://bucket/run/step-1"
    assert runs.health(found, place).state == "unseen"
    for state, severity, words, values, expected in (
        ("sound", "", "deep", True, "deep"),
        ("sound", "", "verify", False, "deep"),
        ("finding", "warn", "doctor", False, "doctor"),
        ("sound", "", "deep again", True, "doctor"),
    ):
        runs.keep(found, place, StepHealth(state, severity, words, values))
        assert runs.health(found, place).words == expected
    assert runs.health(replace(found, mtime=6.0), place).state == "unseen"  # rewritten


def test_a_watch_that_is_stopped_ends_within_a_check(tmp_path, monkeypatch):
    from workbench.analysis import watch

    save(tmp_path, 10)
    there = threading.Event()

    def endless(*args: Any, progress: Callable[[float], None], **options: Any) -> StepHealth:
        there.set()
        while True:
            progress(0.0)
            time.sleep(0.001)

    monkeypatch.setattr(watch, "check_step", endless)
    watching = Watching(tmp_path, ("verify",), interval=0.01)
    watching.start()
    assert there.wait(30)
    watching.stop(30)
    assert not watching._thread.is_alive()
    recent.clear()


def test_a_level_shift_is_an_alarm_only_soon_after_a_resume():
    from workbench.analysis.watch import _alarm

    row = {"kind": "level shift", "step": 100, "resume": None, "height": 3.0}
    assert [_alarm(row | {"resume": resume}) for resume in (None, 20, 90, 100)] == ["", "", "warn", "warn"]
    assert _alarm(row | {"kind": "nan"}) == "error" and _alarm(row | {"kind": "spike"}) == "warn"
