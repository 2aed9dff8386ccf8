"""One process that runs cases: ``python -m tests.fuzz.worker FOLDER`` reads a case a line, and answers in JSON.

A case is ``SEED``, ``SEED quick``, or the name of a trap (:data:`TRAPS`): what limits and hook are there for, to see
them at work.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import workbench as wb
from tests.fuzz.look import Look, Original
from tests.fuzz.mutate import Target, mutate
from tests.fuzz.samples import SAMPLES, Sample
from tests.fuzz.watch import Watch

GROWTH = 512 << 20  #: bytes of memory above what the process had after its first, healthy case
ADDRESSES = 3 << 30  #: bytes of address space above that
CPU = 60  #: s of a case


class Worker:
    """Runs cases in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[Path, Original]] = {}
        for name in ("made", "case", "outside", "out", "cache"):
            (folder / name).mkdir()
        os.environ["WORKBENCH_CACHE"] = str(folder / "cache")
        os.chdir(folder / "out")
        self.warm_up()
        self.watch = Watch([folder / "case", folder / "made"], [folder / "out", folder / "cache"])
        self.base = _status("VmRSS")
        resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ADDRESSES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def warm_up(self) -> None:
        """Healthy checkpoints in every way: what they import is nobody's doing."""
        import torch

        repr(torch.ones(2))
        for sample in SAMPLES:
            if sample.title in ("DCP, one file", "torch.save, odd", "nanoGPT"):
                path, original = self.original(sample)
                base = self.folder / "made" / _plain(sample.title)
                target = Target(base, path, self.folder / "outside")
                look = Look(path, base, original, target, self.folder / "out", Random(0), spared=(), quick=False)
                look.skipped.clear()
                found = look.run()
                if found.failures:
                    raise SystemExit(f"the healthy {sample.title}: {found.failures}")

    def original(self, sample: Sample) -> tuple[Path, Original]:
        """The sample as it is; made once."""
        if sample.title not in self.made:
            folder = self.folder / "made" / _plain(sample.title)
            folder.mkdir()
            path = sample.copy(folder)
            _settle(folder)
            self.made[sample.title] = path, Original.of(path, self.folder / "made" / (folder.name + ".json"))
        return self.made[sample.title]

    def case(self, seed: int, keep: Path | None = None, *, quick: bool = False) -> dict[str, Any]:
        """Run one case; with ``keep``, leave the mutated checkpoint there."""
        chance = Random(seed)
        sample = chance.choices(SAMPLES, [sample.weight for sample in SAMPLES])[0]
        healthy, original = self.original(sample)
        base = self.folder / "made" / _plain(sample.title)
        root = self.folder / "case" / "run"
        for name in ("case", "outside", "out"):
            _emptied(self.folder / name)
        shutil.copytree(base, root, copy_function=shutil.copyfile)
        path = root / healthy.relative_to(base)
        target = Target(root, path, self.folder / "outside")
        mutate(target, chance)
        _settle(root)
        look = Look(path, base, original, target, self.folder / "out", chance, spared=sample.spared, quick=quick)
        if keep is not None:
            shutil.copytree(root, keep / str(seed), symlinks=True, dirs_exist_ok=True)
        start, wall = _cpu(), time.monotonic()
        resource.setrlimit(resource.RLIMIT_CPU, (int(start) + CPU, resource.RLIM_INFINITY))
        _forget_peak()
        with self.watch.watching():
            found = look.run()
        grown = _status("VmHWM") - self.base
        failures = [*found.failures, *(f"side effect: {one}" for one in self.watch.noted)]
        if grown > GROWTH:
            failures.append(f"memory: {grown >> 20:,} MB above what the process has")
        return {
            "case": seed,
            "sample": sample.title,
            "done": target.done,
            "steps": found.steps,
            "failures": failures,
            "lost": found.lost,
            "cpu": round(_cpu() - start, 2),
            "wall": round(time.monotonic() - wall, 2),
            "grown": grown >> 20,
        }

    def trap(self, name: str) -> dict[str, Any]:
        """Do what no case may, and tell what was noticed."""
        _forget_peak()
        with self.watch.watching():
            try:
                TRAPS[name](self.folder)
            except BaseException as error:
                said = type(error).__name__
            else:
                said = "nothing stopped it"
        return {"case": name, "noted": self.watch.noted[:], "said": said, "grown": (_status("VmHWM") - self.base) >> 20}


def _bomb(folder: Path) -> None:
    held = bytearray(1 << 30)
    held[:: 1 << 12] = b"x" * (1 << 18)


TRAPS = {
    "system": lambda folder: os.system("true"),
    "import": lambda folder: __import__("canary_module"),
    "exec": lambda folder: exec("1"),
    "socket": lambda folder: __import__("socket").socket(),
    "outside": lambda folder: (folder / "outside" / "x").read_bytes(),
    "passwd": lambda folder: Path("/etc/passwd").read_bytes(),
    "write": lambda folder: (folder / "case" / "x").write_bytes(b""),
    "list": lambda folder: os.listdir("/etc"),
    "memory": _bomb,
    "addresses": lambda folder: bytearray(ADDRESSES + (1 << 30)),
    "signal": lambda folder: os.abort(),
    "hang": lambda folder: time.sleep(3600),
}


def _plain(title: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in title)


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _settle(root: Path) -> None:
    """All files of one age: what is judged by times is tested elsewhere."""
    for path in root.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000), follow_symlinks=False)


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def _forget_peak() -> None:
    """From now on ``VmHWM`` is the peak of what follows; where the system refuses, it stays that of all before."""
    try:
        with open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")
    except OSError:
        pass


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    worker = Worker(Path(sys.argv[1]))
    print(json.dumps({"ready": wb.__version__}), file=answers)
    for line in sys.stdin:
        asked, *how = line.split()
        found = worker.trap(asked) if asked in TRAPS else worker.case(int(asked), quick="quick" in how)
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
