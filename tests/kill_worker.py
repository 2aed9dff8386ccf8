"""Exports that die, each in a process forked from this one: torch and the rest are imported once.

``python -m tests.kill_worker FOLDER ROUNDS SEED [sweep]`` writes a line of JSON for each format, with and without
resume: how many runs died of what, how often something was kept. It fails at the first visible target that is not
whole, and at the first run after a death that does not end with exactly the wanted bytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import workbench as wb
from workbench import errors
from workbench.core.transfer import streams
from workbench.export.atomic import transaction
from workbench.export.export import export
from workbench.export.moving import engine

#: every call that changes something on the disk, where the exporter looks it up
CALLS = [
    *((os, name) for name in ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "link", "unlink", "ftruncate")),
    (transaction, "rename_exchange"),
    (transaction, "rename_noreplace"),
    (engine, "allocate"),
]
CODES = {"ENOSPC": 28, "EIO": 5}
MANIFEST = ".workbench-manifest.json"
ENDS = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 3)  #: 3: a WriteError
made = [0]  #: calls so far, of a child


def tensors(letter: str) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(ord(letter))
    return {f"{letter}.{n}.weight": chance.standard_normal((100, 50 + n), np.float32) for n in range(8)}


def visible(target: Path) -> str:
    """Which export is there, read by the owning library: ``absent``, ``a``, ``b``, or what is wrong with it."""
    if not target.exists():
        return "absent"
    if target.is_file():
        found = {key: value.numpy() for key, value in torch.load(target, weights_only=True).items()}
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
        found = {key: value for name in set(index.values()) for key, value in load_file(target / name).items()}
        extra = set(os.listdir(target)) - {*index.values(), "model.safetensors.index.json", MANIFEST}
        if extra:
            return f"with {extra}"
    for letter in "ab":
        want = tensors(letter)
        if set(found) == set(want) and all(found[key].tobytes() == want[key].tobytes() for key in want):
            return letter
    return f"neither: {sorted(found)}"


def forked(work: Callable[[], str], after: Callable[[int], None] = lambda pid: None) -> tuple[int, str]:
    """Exit status (negative: of a signal) of a child, and what it said."""
    back, front = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, said = 1, ""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            said, code = work(), 0
        except errors.WriteError as error:
            said, code = str(error), 3
        except SystemExit as error:
            said, code = "", int(str(error.code))
        except BaseException:
            said = traceback.format_exc()
        finally:
            os.write(front, said.encode()[:60_000])
            os._exit(code)
    os.close(front)
    after(pid)
    with os.fdopen(back, "rb") as handle:
        said = handle.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def before_call(which: int, then: Callable[[], None]) -> None:
    """Do something before the call of this number (from 1 on) that changes something."""
    lock = threading.Lock()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if real is not real_open or args[1] & (os.O_WRONLY | os.O_RDWR):
                with lock:
                    made[0] += 1
                    hit = made[0] == which
                if hit:
                    then()
            return real(*args, **named)

        return call

    real_open = os.open
    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name)))


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(CODES[how], os.strerror(CODES[how]))


class Trial:
    """Exports of two checkpoints in turn into one target."""

    def __init__(self, folder: Path, format: str, resume: bool) -> None:
        self.folder, self.format, self.resume = folder, format, resume
        for letter in "ab":
            (folder / letter).mkdir(parents=True)
            save_file(tensors(letter), folder / letter / "model.safetensors")
        self.sources = {letter: wb.open(folder / letter, cache=False) for letter in "ab"}
        export(self.sources["a"], folder / "warm", format, threads=1)  # what an export imports, once for all children
        (folder / "targets").mkdir()
        self.target = folder / "targets" / ("out.pt" if format == "torch" else "out")
        self.told = Counter[str]()
        self.calls = int(self.succeed("a", count=True))

    def run(self, letter: str) -> str:
        report = export(
            self.sources[letter],
            self.target,
            self.format,
            overwrite=True,
            resume=self.resume,
            threads=2,
            max_shard_size=90_000 if self.format == "safetensors" else None,
        )
        return "\n".join(report.notes)

    def succeed(self, letter: str, *, count: bool = False) -> str:
        """A run that nothing happens to ends with exactly the wanted bytes, and with nothing else."""

        def work() -> str:
            if count:
                before_call(0, lambda: None)
            said = self.run(letter)
            return str(made[0]) if count else said

        status, said = forked(work)
        assert status == 0, said
        now, beside = visible(self.target), os.listdir(self.target.parent)
        assert (now, beside) == (letter, [self.target.name]), said
        self.told["went on"] += "resumed an unfinished export" in said
        return said

    def fail(self, old: str, new: str, how: str, which: int, delay: float = 0.0, number: int = 0) -> bool:
        """One that something happens to, if it comes that far: ``False`` when it did not."""

        def work() -> str:
            if how != "timed":
                before_call(which, lambda: die(how))
            return self.run(new)

        def after(pid: int) -> None:
            if how == "timed":
                time.sleep(delay)
                os.kill(pid, number)

        status, said = forked(work, after)
        now = visible(self.target)
        assert now in (old, new), (how, which, now, said)
        assert status in (0, *ENDS), said
        assert status != 0 or now == new, (how, which, now)
        self.told["went on"] += "resumed an unfinished export" in said
        self.told[how] += status != 0
        return status != 0

    @property
    def deaths(self) -> int:
        return sum(self.told[how] for how in ("kill", "timed", *CODES))

    def take_away(self) -> None:
        """The next export begins where nothing is."""
        os.rename(self.target, self.folder / "gone")
        shutil.rmtree(self.folder / "gone") if self.format != "torch" else os.unlink(self.folder / "gone")


def by_chance(trial: Trial, rounds: int, chance: random.Random) -> None:
    """Deaths of all kinds, several in a row at times, until there were so many."""
    old = "a"
    while trial.deaths < rounds:
        new = "b" if old == "a" else "a"
        if chance.random() < 0.3:
            trial.take_away()
        before = visible(trial.target)
        while chance.random() < 0.7:
            how = chance.choice(["kill", "kill", "timed", *CODES])
            signals = [signal.SIGKILL, signal.SIGTERM]
            first = chance.choice([1, trial.calls // 2])  # in the second half there is something to go on with
            which, delay = chance.randint(first, trial.calls), chance.random() * 0.06
            trial.fail(before, new, how, which, delay, chance.choice(signals))
        trial.succeed(new)
        old = new


def everywhere(trial: Trial) -> None:
    """A kill, ENOSPC and EIO at every call in turn, onto nothing and onto an old export, with a way out each time."""
    for how in ("kill", *CODES):
        for which in range(1, trial.calls + 1):
            if which % 2:
                trial.take_away()
            trial.fail(visible(trial.target), "b", how, which)
            trial.succeed("b")
            trial.succeed("a")


def main(folder: Path, rounds: int, seed: int, sweep: bool) -> Iterator[dict[str, Any]]:
    streams.TASK, engine.RECORD = 20_000, 40_000  # many steps of a small export
    for format in ("safetensors", "torch"):
        for resume in (True, False):
            trial = Trial(folder / f"{format}{resume}", format, resume)
            if sweep:
                everywhere(trial)
            else:
                by_chance(trial, rounds, random.Random(seed))
            yield {"format": format, "resume": resume, "calls": trial.calls, "deaths": trial.deaths, **trial.told}


if __name__ == "__main__":
    where, count, number, *more = sys.argv[1:]
    for line in main(Path(where), int(count), int(number), more == ["sweep"]):
        print(json.dumps(line), flush=True)
