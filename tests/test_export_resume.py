"""Exports that are gone on with: the same bytes as without a death, whatever was left and whatever broke since."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.test_export_engine import job_of, laid
from tests.test_reading import stored
from workbench import errors
from workbench.core.transfer import streams
from workbench.export.atomic import journal, leftovers, owners, transaction
from workbench.export.export import export
from workbench.export.filemap import Pieces
from workbench.export.moving import engine, plan

SIZE = 90_000  #: of a shard: four files, of about two tensors each
LAST = ".workbench-manifest.json"  #: names the time at which it was made


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "TASK", 20_000)
    monkeypatch.setattr(engine, "RECORD", 40_000)
    torch.manual_seed(5)
    tensors = {f"model.{n}.weight": torch.randn(100, 100 + n) for n in range(8)}
    tensors |= {"model.empty": torch.empty(0, 3), "model.ids": torch.arange(7)}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    return wb.open(tmp_path / "source")


def stop_at(share: float):
    def progress(done: float) -> None:
        if done >= share:
            raise RuntimeError("stop")

    return progress


def sized(target: Path, options: dict) -> dict:
    """Options of an export in small shards if the target is a folder."""
    return options if target.suffix else {"max_shard_size": SIZE} | options


def stopped(source, target: Path, share: float = 0.6, **options) -> Path:
    """The temp of an export that ended in the middle."""
    with pytest.raises(RuntimeError, match="stop") as caught:
        export(source, target, resume=True, threads=1, progress=stop_at(share), **sized(target, options))
    assert not target.exists() and "with resume to continue from there" in caught.value.__notes__[0]
    return temp(target)


def temp(target: Path) -> Path:
    (found,) = target.parent.glob(f".{target.name}.tmp-*")
    return found


def contents(target: Path) -> dict[str, bytes]:
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    return {
        "" if path == target else str(path.relative_to(target)): path.read_bytes()
        for path in files
        if path.name != LAST
    }


def check(source, target: Path, format: str = "safetensors", **options):
    """Go on, and compare with an export that was never interrupted; what was kept, in the report's words."""
    options = sized(target, options)
    report = export(source, target, format, resume=True, verify=True, **options)
    other = target.with_name("whole" + target.suffix)
    whole = export(source, other, format, **options)
    assert contents(target) == contents(other)
    proof = [
        [(one.key, one.source, one.target, one.changed, one.max_abs) for one in r.tensors] for r in (report, whole)
    ]
    assert proof[0] == proof[1]
    assert sorted(os.listdir(target.parent)) == sorted(["source", target.name, other.name])
    shutil.rmtree(other) if other.is_dir() else other.unlink()
    return next((note for note in report.notes if "resumed" in note), "")


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("format", ["safetensors", "one", "torch"])
def test_what_was_finished_is_kept_and_the_rest_written(source, tmp_path, format, dtype):
    kind = "torch" if format == "torch" else "safetensors"
    target = tmp_path / {"safetensors": "out", "one": "out.safetensors", "torch": "out.pt"}[format]
    for share in (0.3, 0.6, 0.8):  # stopped three times, a bit further each time
        stopped(source, target, share, format=kind, dtype=dtype)
    read = []

    def counted(self, units):
        read.extend(units)
        return real(self, units)

    real = engine.Filler.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Filler, "__call__", counted)
        export(source, target, kind, resume=True, **sized(target, {"dtype": dtype}))
    assert 0 < len(read) <= 4, "kept tensors were read from the source again"
    os.rename(target, tmp_path / "gone")
    stopped(source, target, format=kind, dtype=dtype)
    shutil.rmtree(tmp_path / "gone") if (tmp_path / "gone").is_dir() else (tmp_path / "gone").unlink()
    said = check(source, target, kind, dtype=dtype)
    assert " of 10 tensors" in said and not said.startswith("resumed an unfinished export: 0")


def test_nothing_is_kept_where_nothing_was_finished_or_nobody_asked(source, tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError) as caught:
        export(source, target, resume=True, threads=1, progress=stop_at(0.0))
    assert os.listdir(tmp_path) == ["source"] and not hasattr(caught.value, "__notes__")
    with pytest.raises(RuntimeError):
        export(source, target, threads=1, progress=stop_at(0.9))
    assert os.listdir(tmp_path) == ["source"]
    stopped(source, target)
    export(source, target)  # without resume: left-overs go, as ever
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def outside(path: Path) -> Path:
    return next(above / "source" for above in path.parents if (above / "source").is_dir()) / "model.safetensors"


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to(outside(path))


def shared(path: Path) -> None:
    path.unlink()
    os.link(outside(path), path)


DAMAGE = {
    "a byte of a tensor": lambda path: flip(path, 3_000),
    "a byte of the header": lambda path: flip(path, 20),
    "the last byte": lambda path: flip(path, path.stat().st_size - 1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "empty": lambda path: os.truncate(path, 0),
    "lost": Path.unlink,
    "another's": linked,
    "another's, by a second name": shared,
    "a stranger beside it": lambda path: path.with_name("stranger.safetensors").write_text("x"),
}


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_what_was_damaged_meanwhile_is_written_again(source, tmp_path, damage, format):
    before = contents(Path(source.path))
    target = tmp_path / ("out.pt" if format == "torch" else "out")
    inside = stopped(source, target, 0.9, format=format) / target.name
    damage(inside if format == "torch" else sorted(inside.glob("model-*"))[0])
    check(source, target, format)
    assert contents(Path(source.path)) == before, "written through a link"


def test_gaps_hold_zeros_again(tmp_path):
    """Bytes that no writer's map covers; a file that has others there is begun again."""
    dense = np.arange(600, dtype=np.int32).reshape(20, 30)
    catalog = stored(tmp_path, dense, [((0, 0), (20, 30))])
    one = dataclasses.replace(laid(Pieces.whole(catalog, np.array([0]))), literals=())
    path, notes = tmp_path / "out", []
    (tmp_path / "work").mkdir()
    for damage in (None, None, 2):
        if damage is not None:
            flip(path, damage)
        opened = journal.Journal(str(tmp_path / "work"), "p")
        job_of(tmp_path, catalog, [one]).run([str(path)], journal=opened)
        opened.close()
        notes.append(opened.notes)
        assert path.read_bytes() == bytes(5) + dense.tobytes()
    assert [len(said) for said in notes] == [0, 1, 0]


def test_a_journal_may_be_torn_or_damaged_at_any_byte(source, tmp_path):
    target = tmp_path / "out"
    work = stopped(source, target, 0.9)
    whole = (work / journal.NAME).read_bytes()
    kept_dir = tmp_path.parent / f"{tmp_path.name}-kept"
    shutil.copytree(work, kept_dir)
    chance, kept = random.Random(3), set()
    for turn in range(8):
        at = chance.randrange(len(whole))
        if turn % 2:
            torn = whole[:at]
        else:
            torn = whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
        (work / journal.NAME).write_bytes(torn)
        kept.add(check(source, target))
        shutil.rmtree(target)
        shutil.copytree(kept_dir, work)
    assert len(kept) > 2, "always the same was kept"
    shutil.rmtree(kept_dir)


def test_lines_after_a_torn_one_are_added_where_it_began(source, tmp_path):
    target = tmp_path / "out"
    work = stopped(source, target, 0.5)
    with open(work / journal.NAME, "ab") as handle:
        handle.write(b'0123456789abcdef {"file": "model-' * 1000)  # longer than what comes in its place
    stopped(source, target, 0.9)
    lines = (temp(target) / journal.NAME).read_bytes().splitlines()
    assert len(lines) > 3 and all(json.loads(line.partition(b" ")[2]) for line in lines)
    check(source, target)


def changed_source(tmp_path: Path) -> None:
    path = tmp_path / "source" / "model.safetensors"
    save_file({key: value + 1 for key, value in load_file(path).items()}, path)


@pytest.mark.parametrize("what", ["options", "names", "source", "journal"])
def test_another_plan_begins_anew(source, tmp_path, what, monkeypatch):
    target, options = tmp_path / "out", {"max_shard_size": SIZE}
    stopped(source, target)
    if what == "options":
        options["dtype"] = "bf16"
    elif what == "names":
        options["rename"] = lambda key: key + ".x"
    elif what == "journal":
        monkeypatch.setattr(journal, "FORMAT", journal.FORMAT + 1)
    else:
        changed_source(tmp_path)
        source = wb.open(tmp_path / "source")
    report = export(source, target, resume=True, verify=True, **options)
    assert not [note for note in report.notes if "resumed" in note]
    assert what == "journal" or [
        note for note in report.notes if "export of other data" in note or "exports of other data" in note
    ]
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_the_plan_names_everything_that_decides_a_byte(source, tmp_path):
    """Digests of jobs that differ in one thing, and of the same job twice."""
    found = []

    def plan_of(*args):
        found.append(real(*args))
        return found[-1]

    real = plan.plan_of
    options = [{}, {"dtype": "bf16"}, {"select": "0"}, {"rename": {"model.ids": "x"}}, {"max_shard_size": 50_000}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "plan_of", plan_of)
        for number, one in enumerate([*options, {}]):
            export(source, tmp_path / f"{number}", resume=True, **{"max_shard_size": SIZE} | one)
        os.utime(tmp_path / "source" / "model.safetensors", (0, 0))
        export(wb.open(tmp_path / "source"), tmp_path / "touched", resume=True, max_shard_size=SIZE)
        (tmp_path / "source").rename(tmp_path / "moved")
        export(wb.open(tmp_path / "moved"), tmp_path / "elsewhere", resume=True, max_shard_size=SIZE)
    assert found[0] == found[len(options)] and len(set(found)) == len(options) + 2


def test_a_full_disk_says_how_to_go_on(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    real, left = os.pwrite, [6]

    def failing(fd, data, at):
        left[0] -= len(data) > 10_000  # the journal's few bytes have room in a block of their own
        if left[0] < 0 and len(data) > 10_000:
            raise OSError(28, os.strerror(28))
        return real(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(
            errors.WriteError, match=r"No space left.*free some space.*with resume to continue from there"
        ):
            export(source, target, resume=True, threads=1, max_shard_size=SIZE)
    assert not target.exists() and temp(target).is_dir()
    assert "resumed" in check(source, target)


def test_bytes_that_are_there_already_need_no_room(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    stopped(source, target, 0.9)

    def room(nbytes):
        blocks = (nbytes + transaction.SPARE) // 4096
        return os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", lambda path: room(0))
    with pytest.raises(errors.WriteError, match="not enough space"):
        export(source, tmp_path / "other", resume=True, max_shard_size=SIZE)
    monkeypatch.setattr(os, "statvfs", lambda path: room(30_000))
    assert "resumed" in check_alone(source, target)


def check_alone(source, target: Path) -> str:
    return "\n".join(export(source, target, resume=True, max_shard_size=SIZE).notes)


def test_too_little_room_keeps_what_there_is(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    stopped(source, target, 0.9)
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "SPARE", 1 << 60)
        with pytest.raises(errors.WriteError, match=r"not enough space.*to continue from there"):
            export(source, target, resume=True, max_shard_size=SIZE)
    assert "resumed" in check(source, target)


def test_a_target_that_came_meanwhile_costs_nothing(source, tmp_path):
    target = tmp_path / "out"

    def progress(done):
        if done == 1.0:
            target.mkdir()
            (target / "mine").write_text("x")

    with pytest.raises(errors.WriteError, match=r"exists.*to continue from there"):
        export(source, target, resume=True, max_shard_size=SIZE, progress=progress)
    shutil.rmtree(target)
    assert "10 tensors" in check(source, target)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_finished(source, tmp_path, number):
    before = signal.getsignal(number)
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def progress(done):
        if done > 0.6:
            signal.raise_signal(number)

    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            export(source, tmp_path / "out", resume=True, threads=1, max_shard_size=SIZE, progress=progress)
    finally:
        signal.signal(number, before)
    assert "resumed" in check(source, tmp_path / "out")


# ---- whose it is -----------------------------------------------------------------------------------------------------


def renamed(work: Path, **parts) -> Path:
    """A temp under the token of somebody else: another host, another start of it, another process."""
    start, _, token = work.name.partition(".tmp-")
    named = dict(zip(("host", "boot", "pid", "start", "random"), token.split("."), strict=True)) | parts
    return work.rename(work.with_name(f"{start}.tmp-{'.'.join(named.values())}"))


def test_one_that_is_under_way_is_left_alone(source, tmp_path):
    target = tmp_path / "out"
    job_seen = []

    def progress(done):
        if done > 0.6 and not job_seen:
            job_seen.append(done)
            with pytest.raises(errors.WriteError, match=rf"being written by process {os.getpid()} on this machine"):
                export(source, target, resume=True, max_shard_size=SIZE)

    export(source, target, resume=True, threads=1, max_shard_size=SIZE, progress=progress)
    assert job_seen and sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_one_of_a_machine_out_of_sight_is_gone_on_with_once_it_is_silent(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    work = renamed(stopped(source, target), host="00000000", boot="00000000")
    with pytest.raises(
        errors.WriteError, match=r"on another machine or in another container, last active .* after 10 silent minutes"
    ):
        export(source, target, resume=True, max_shard_size=SIZE)
    os.utime(work, (time.time() - owners.QUIET - 5,) * 2)
    assert "resumed" in check(source, target)


def test_a_living_one_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "BEAT", 0.01)
    with transaction.staging(tmp_path / "out", folder=True, nbytes=1, plan="p") as made:
        os.utime(made.work, (0, 0))
        until = time.time() + 20
        while os.stat(made.work).st_mtime == 0 and time.time() < until:
            time.sleep(0.01)
        assert os.stat(made.work).st_mtime > 0


def test_of_two_that_go_on_one_wins(source, tmp_path, monkeypatch):
    """The second finds the temp gone between looking at it and taking it, and begins anew."""
    target = tmp_path / "out"
    stopped(source, target)
    real = journal.plan_in

    def taken_meanwhile(folder):
        found = real(folder)
        shutil.move(folder, tmp_path / "taken")
        return found

    monkeypatch.setattr(leftovers.journal, "plan_in", taken_meanwhile)
    report = export(source, target, resume=True, max_shard_size=SIZE)
    assert not report.notes and (tmp_path / "taken").is_dir()


def test_one_that_comes_back_from_the_dead_can_do_no_harm(source, tmp_path):
    """Its temp has another name by then: it fails, and what was gone on with is whole."""
    target = tmp_path / "out"
    stolen = []

    def progress(done):
        if done > 0.6 and not stolen:
            work, until = temp(target), time.time() + 20
            while len((work / journal.NAME).read_bytes().splitlines()) < 2 and time.time() < until:
                time.sleep(0.01)  # for another thread to sync and to record
            stolen.append(work.rename(work.with_name(".taken")))

    with pytest.raises(errors.WriteError):
        export(source, target, resume=True, threads=1, max_shard_size=SIZE, progress=progress)
    assert not target.exists()
    stolen[0].rename(target.with_name(f".out.tmp-{owners.token()}"))
    assert "resumed" in check(source, target)


def test_what_a_cast_cost_is_remembered(source, tmp_path):
    target = tmp_path / "out"
    stopped(source, target, 0.9, dtype="bf16")
    report = export(source, target, resume=True, dtype="bf16", max_shard_size=SIZE)
    whole = export(source, tmp_path / "whole", dtype="bf16", max_shard_size=SIZE)
    assert [dataclasses.replace(one, file="") for one in report.tensors] == [
        dataclasses.replace(one, file="") for one in whole.tensors
    ]
    assert any(one.changed for one in report.tensors)
