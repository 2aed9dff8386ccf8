"""Targets are old or new, whatever happens: refusals, failures at every call, signals, kills at random points."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.filling import fill
from tests.properties import SLOW
from workbench import errors
from workbench.export.atomic import transaction
from workbench.export.atomic.transaction import clean, staging

ROOT = Path(__file__).resolve().parents[1]


def state(target: Path) -> str:
    """``absent``, or whose bytes are under the name; anything between the two is neither."""
    if not target.exists():
        return "absent"
    found = {f.name: f.read_text() for f in target.iterdir()} if target.is_dir() else {"": target.read_text()}
    for text in ("old", "new"):
        if found == ({"a": text * 1000, "b": text * 1000} if target.is_dir() else {"": text * 1000}):
            return text
    return f"partial: { {name: len(data) for name, data in found.items()} }"


def put_old(target: Path, folder: bool) -> None:
    with staging(target, folder=folder, nbytes=1) as made:
        fill(made, "old")


@pytest.mark.parametrize("folder", [True, False])
def test_a_target_appears_whole_and_is_refused_or_replaced(tmp_path, folder):
    target = tmp_path / "out"
    with staging(target, folder=folder, nbytes=6000) as made:
        fill(made, "old")
        assert not target.exists() and Path(made.work).parent == tmp_path
    assert state(target) == "old"
    with pytest.raises(errors.WriteError, match="exists"), staging(target, folder=folder, nbytes=1):
        pytest.fail("the block ran")
    with staging(target, folder=folder, nbytes=1, overwrite=True) as made:
        fill(made)
        assert state(target) == "old"
    assert state(target) == "new" and os.listdir(tmp_path) == ["out"]


def test_modes_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        with staging(tmp_path / "folder", folder=True, nbytes=1):
            pass
        with staging(tmp_path / "file", folder=False, nbytes=1):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_what_stands_in_the_way_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    for name, folder in (("file", True), ("folder", False)):
        with (
            pytest.raises(errors.WriteError, match="is not a"),
            staging(tmp_path / name, folder=folder, nbytes=1, overwrite=True),
        ):
            pytest.fail("the block ran")
    with (
        pytest.raises(errors.WriteError, match="does not exist"),
        staging(tmp_path / "no" / "x", folder=True, nbytes=1),
    ):
        pytest.fail("the block ran")
    with (
        pytest.raises(errors.WriteError, match=r"not enough space .* too few"),
        staging(tmp_path / "x", folder=True, nbytes=1 << 60),
    ):
        pytest.fail("the block ran")
    (tmp_path / "empty").mkdir()
    with staging(tmp_path / "empty", folder=True, nbytes=1) as made:
        fill(made)
    assert state(tmp_path / "empty") == "new"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "folder"]


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("exchange", [True, False])
def test_one_that_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch, folder, exchange):
    if not exchange:
        monkeypatch.setattr(transaction, "rename_noreplace", lambda *_: False)
    target = tmp_path / "out"
    with pytest.raises(errors.WriteError, match="exists"), staging(target, folder=folder, nbytes=1) as made:
        fill(made)
        if folder:
            target.mkdir()
            (target / "a").write_text("somebody's")
        else:
            target.write_text("somebody's")
    assert "somebody's" in (target / "a" if folder else target).read_text() and os.listdir(tmp_path) == ["out"]


CALLS = ["mkdir", "open", "pwrite", "fsync", "rename", "replace", "link", "unlink", "exchange", "noreplace"]


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("helped", [True, False], ids=["renameat2", "plain"])
@pytest.mark.parametrize("code", [28, 5], ids=["ENOSPC", "EIO"])
def test_every_call_may_fail_once(tmp_path, monkeypatch, folder, old, helped, code):
    """Each call to the system fails in turn: an error of ours, the old state or the new one, and no temp but aside."""
    failed = 0
    for call in CALLS:
        for which in range(8):
            target = tmp_path / f"{call}-{which}" / "out"
            target.parent.mkdir()
            if old:
                put_old(target, folder)
            with monkeypatch.context() as patch:
                if not helped:
                    patch.setattr(transaction, "rename_exchange", lambda *_: False)
                    patch.setattr(transaction, "rename_noreplace", lambda *_: False)
                hits = inject(patch, call, which, code)
                try:
                    with staging(target, folder=folder, nbytes=1, overwrite=True) as made:
                        fill(made)
                except (errors.WriteError, OSError):  # OSError: of the block itself
                    pass
            failed += hits[0] > which
            assert state(target) in (("old", "new") if old else ("absent", "new")), (call, which)
            clean(str(target))
            if hits[0] <= which:  # nothing failed
                assert state(target) == "new" and os.listdir(target.parent) == ["out"]
                break
    assert failed > 5


def inject(patch, call: str, which: int, code: int) -> list[int]:
    hits = [0]
    owner, name = (transaction, f"rename_{call}") if call in ("exchange", "noreplace") else (os, call)
    real = getattr(owner, name)

    def failing(*args, **named):
        hits[0] += 1
        if hits[0] == which + 1:
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    patch.setattr(owner, name, failing)
    return hits


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_temp(tmp_path, number):
    before = signal.getsignal(number)
    wanted = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, usual)
    try:
        with pytest.raises(wanted), staging(tmp_path / "out", folder=True, nbytes=1) as made:
            fill(made)
            signal.raise_signal(number)
        assert os.listdir(tmp_path) == []
        assert signal.getsignal(number) == usual
    finally:
        signal.signal(number, before)


def test_a_signal_during_the_last_step_waits_for_it(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    real = transaction.rename_noreplace

    def interrupted(*names):
        signal.raise_signal(signal.SIGTERM)
        return real(*names)

    monkeypatch.setattr(transaction, "rename_noreplace", interrupted)
    try:
        with pytest.raises(SystemExit) as caught, staging(tmp_path / "out", folder=True, nbytes=1) as made:
            fill(made)
        assert caught.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert state(tmp_path / "out") == "new" and os.listdir(tmp_path) == ["out"]


def test_temps_of_the_living_stay_and_those_of_the_dead_go(tmp_path):
    target = tmp_path / "out"
    (tmp_path / ".out.tmp-of somebody's own").mkdir()
    (tmp_path / ".other.tmp-").mkdir()
    with staging(target, folder=True, nbytes=1) as made:
        assert clean(str(target)) == [] and os.path.isdir(made.path)
        mine = os.path.basename(made.work)
        token = mine.removeprefix(".out.tmp-").split(".")
        # another process of this machine that is gone; one of another machine, today and last week
        gone = ".".join([*token[:2], "3fffff", *token[3:]])
        other = ".".join(["00000000", "00000000", *token[2:]])
        for name in (gone, other):
            (tmp_path / f".out.tmp-{name}").mkdir()
        assert clean(str(target)) == [f".out.tmp-{gone}"]
        os.utime(tmp_path / f".out.tmp-{other}", (time.time() - 2 * 86_400,) * 2)
        assert clean(str(target)) == [f".out.tmp-{other}"]
        fill(made)
    assert sorted(os.listdir(tmp_path)) == [".other.tmp-", ".out.tmp-of somebody's own", "out"]


def test_long_names_leave_room_for_the_temps(tmp_path):
    for name in ("x" * 255, "é" * 127, "x" * 254 + "y"):
        with staging(tmp_path / name, folder=False, nbytes=1) as made:
            fill(made)
        assert state(tmp_path / name) == "new"


def test_a_death_between_the_two_renames_is_put_right_by_the_next_run(tmp_path, monkeypatch):
    """Where names cannot be exchanged, the one moment in which no name is visible."""
    target = tmp_path / "out"
    put_old(target, True)
    code = f"""
import os, signal
from workbench.export.atomic import transaction
from tests.filling import fill
transaction.rename_exchange = lambda *_: False
real, done = os.rename, []
def rename(a, b):
    real(a, b)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = rename
with transaction.staging({str(target)!r}, folder=True, nbytes=1, overwrite=True) as made:
    fill(made)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert state(target) == "absent" and len(os.listdir(tmp_path)) == 2
    clean(str(target))
    assert state(target) == "old" and os.listdir(tmp_path) == ["out"]


LOOP = """
import itertools, sys, time
from workbench.export.atomic.transaction import staging
from tests.filling import fill
for turn in itertools.count():
    with staging(sys.argv[1], folder=sys.argv[2] == "True", nbytes=1, overwrite=True) as made:
        fill(made, ("old", "new")[turn % 2])
        time.sleep(.005)  # real exports spend their time in here
        if turn == 0:
            print("ready", flush=True)
"""


@pytest.mark.parametrize("folder", [True, False])
def test_kills_at_random_points_leave_the_old_state_or_the_new_one(tmp_path, folder):
    """SIGKILL and SIGTERM while a child overwrites the same target again and again."""
    rounds = 100 if SLOW else 8
    chance = random.Random(7)
    left_behind = 0
    for turn in range(rounds):
        target = tmp_path / f"out{turn % 4}"
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(target), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(chance.random() * 0.05)
        number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        child.send_signal(number)
        child.communicate()
        assert child.returncode in (-number, 128 + number)  # SIGTERM between two turns, or within one
        assert state(target) in ("old", "new") or (turn < 4 and state(target) == "absent")
        left_behind += len([name for name in os.listdir(tmp_path) if name.startswith(".")])
        clean(str(target))
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert left_behind, "no kill ever came in the middle"
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
