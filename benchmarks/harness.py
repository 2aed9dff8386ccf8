"""Run small programs as processes of their own, interleaved, and keep the best of each.

A program prints nothing; what lies between ``with timed():`` is measured in it: wall seconds, CPU seconds (user and
system, all threads) and the peak of anonymous memory above the start of the block. Programs of one table take turns,
so that a busy minute of the machine hurts all of them alike; the best round counts.

``settle(folder, nbytes)`` brings a folder's files into the page cache, then touches and frees so much memory until
that gets no faster. Virtual machines need it: memory that was free for some seconds goes back to the host, and the
first touch afterwards costs up to fifty times a copy, for whichever program comes to it first.

Garbage is collected before the clock starts: a process that has just imported torch owes one full collection (0.1 s),
which falls due with the next 700 objects that anybody makes.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PREAMBLE = """
import gc, json, os, resource, sys, threading, time
def _anon():
    with open('/proc/self/status') as f:
        return next(int(line.split()[1]) for line in f if line.startswith('RssAnon')) / 1024
def settle(folder, nbytes):
    import mmap
    buffer = bytearray(1 << 20)
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), 'rb', buffering=0) as f:
            while f.readinto(buffer):
                pass
    last = float('inf')
    for _ in range(6):
        begin = time.perf_counter()
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            block.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, nbytes, 4096):
                block[at] = 1
        took = time.perf_counter() - begin
        if took > .8 * last:
            break
        last = took
class timed:
    def __enter__(self):
        gc.collect()
        self.base = self.peak = _anon()
        self.stop = threading.Event()
        def watch():
            while not self.stop.wait(.01):
                self.peak = max(self.peak, _anon())
        self.thread = threading.Thread(target=watch, daemon=True)
        self.thread.start()
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self
    def __exit__(self, *error):
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.peak = max(self.peak, _anon())
        self.stop.set(); self.thread.join()
        if error[0] is None:
            print('@@' + json.dumps({'wall': self.wall, 'cpu': self.cpu, 'anon': self.peak - self.base}))
"""


def run(code: str) -> dict[str, float]:
    """One round of one program; of several the fastest, and the most memory."""
    peers = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, peers)]), "PYTHONWARNINGS": "ignore"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed: not compiled at each start
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"benchmark program failed:\n{code}\n{done.stderr[-3000:]}")
    rounds = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@@")]
    return min(rounds, key=lambda one: one["wall"]) | {"anon": max(one["anon"] for one in rounds)}


def best(programs: dict[str, str], rounds: int = 3, by: str = "cpu") -> dict[str, dict[str, float]]:
    """The best round of each program, by CPU or wall seconds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, code in programs.items():
            found[name].append(run(code))
    return {name: min(results, key=lambda result: result[by]) for name, results in found.items()}


def table(results: dict[str, dict[str, float]], against: str, by: str = "cpu") -> str:
    """Markdown: seconds, peak anonymous memory, and the ratio to one row."""
    base = results[against][by]
    lines = [f"| | wall s | CPU s | peak anon MB | {by} ÷ {against} |", "|---|---:|---:|---:|---:|"]
    for name, result in results.items():
        ratio = result[by] / base
        lines.append(f"| {name} | {result['wall']:.4f} | {result['cpu']:.4f} | {result['anon']:,.0f} | {ratio:,.3f} |")
    return "\n".join(lines)


def beside_others(programs: dict[str, str], commands: list[list[str]], nbytes: int, unit: str = "GB") -> None:
    """Print ``programs`` and other people's ``commands`` beside each other: CPU seconds, speed, and times the first's.

    A command is a process of its own, so that its start and imports count; one that is not installed is named.
    """
    missing = []
    programs = dict(programs)
    for command in commands:
        if (found := shutil.which(command[0])) is None:
            missing.append(command[0])
            continue
        programs[f"{' '.join(command[:2])} (a process)"] = f"""
import subprocess
with timed() as clock:
    done = subprocess.run({[found, *command[1:]]!r}, capture_output=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    clock.cpu -= spent.ru_utime + spent.ru_stime
assert spent.ru_utime > 1, done.stderr
"""
    results = best(programs, 2)
    first = next(iter(results.values()))["cpu"]
    print(f"| | CPU s | {unit}/CPU-s | times ours |\n|---|---:|---:|---:|")
    for name, result in results.items():
        cpu = result["cpu"]
        print(f"| {name} | {cpu:.2f} | {nbytes / 1e9 / cpu:.2f} | {cpu / first:.1f} |")
    print(f"\nNot installed: {', '.join(missing) or 'none'}.\n")


def machine() -> str:
    """What the figures were taken on."""
    model = platform.processor() or "?"
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    import numpy
    import torch

    return (
        f"{date.today().isoformat()}, {model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {numpy.__version__}"
    )
