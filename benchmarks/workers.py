"""CPU time of a pass in a process pool and on a Dask cluster, of all processes together.

``python benchmarks/workers.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
2 GB. A cluster uses CPU time in three ways that are told apart: to start, for each second that it exists, and for each
batch. The second is taken on an idle cluster, for as long as the passes took just before, because on a busy machine
passes take longer and this share of them grows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, machine

FILES, TENSORS, SHAPE = 8, 4, (8192, 4096)
PASSES, ROUNDS = 8, 2
QUIET = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
}
WHERE: dict[str, tuple[str, dict[str, str]]] = {
    "process pool": ("pool", {}),
    "Dask": ("dask", {}),
    "Dask, without profile and monitor": ("dask", QUIET),
}
BATCHES = {"256 MiB": 256 << 20, "1 GiB": 1 << 30}


def main(scratch: Path) -> None:
    folder = scratch / "workers"
    nbytes = write(folder)
    print(
        f"## Process pool and Dask\n\n{machine()}. `wb.stats` of {nbytes / 1e9:.2f} GB of bfloat16 in the page cache, "
    )
    print(
        f"2 workers of one thread; CPU-seconds of all processes, {PASSES} passes after 2 others; the best of {ROUNDS} "
        f"rounds, taken in turns. Load at the start: {os.getloadavg()[0]:.1f}.\n"
    )
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for batch in BATCHES:
            for name in WHERE:
                found.setdefault((batch, name), []).append(run(name, batch, folder))
    print("| batches | workers | to start | idle, each second | a pass | … without the idle share | over the pool |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (batch, name), rounds in found.items():
        start, idle, each, alone = (min(one[what] for one in rounds) for what in ("start", "idle", "pass", "alone"))
        pool = min(one["alone"] for one in found[batch, "process pool"])
        over = "" if name == "process pool" else f"{alone / pool - 1:+.1%}"
        print(f"| {batch} | {name} | {start:.2f} | {idle:.3f} | {each:.3f} | {alone:.3f} | {over} |")
    print("\n*To start* includes the two first passes, in which workers import what they need.\n")


def write(folder: Path) -> int:
    """Write the checkpoint, if it is not there."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for number in range(1, FILES + 1):
        path = folder / f"model-{number:05}-of-{FILES:05}.safetensors"
        if not path.exists():
            names = [f"layers.{number * TENSORS + k}.weight" for k in range(TENSORS)]
            save_file({name: torch.randn(SHAPE).mul_(0.02).bfloat16() for name in names}, path)
    return sum(path.stat().st_size for path in folder.iterdir())


def run(name: str, batch: str, folder: Path) -> dict[str, float]:
    kind, more = WHERE[name]
    environment = os.environ | more | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, kind, str(BATCHES[batch]), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cpu() -> float:
    """Return the CPU time of this process and of all below it."""
    import psutil

    own = psutil.Process()
    times = [one.cpu_times() for one in [own, *own.children(recursive=True)]]
    return float(sum(one.user + one.system for one in times))


def measure(kind: str, batch: int, folder: str) -> dict[str, float]:
    from concurrent.futures import ProcessPoolExecutor
    from contextlib import ExitStack
    from multiprocessing import get_context

    import pandas  # noqa: F401  imported first, so that the start does not include it

    import workbench as wb
    from workbench.core import executors

    executors.BATCH = executors.LARGEST = batch
    ckpt = wb.open(folder)
    begin = cpu()
    with ExitStack() as held:
        executor: Any
        if kind == "pool":
            executor = held.enter_context(ProcessPoolExecutor(2, mp_context=get_context("spawn")))
        else:
            from distributed import Client, LocalCluster

            cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0")
            held.enter_context(cluster)
            executor = held.enter_context(Client(cluster, set_as_default=False)).get_executor()
        for _ in range(2):
            wb.stats(ckpt, cache=False, executor=executor)
        start, first, clock = cpu() - begin, cpu(), time.perf_counter()
        for _ in range(PASSES):
            wb.stats(ckpt, cache=False, executor=executor)
        took, last = time.perf_counter() - clock, cpu()
        time.sleep(took)
        idle = cpu() - last
    spent = last - first
    return {"start": start, "idle": idle / took, "pass": spent / PASSES, "alone": (spent - idle) / PASSES}


if __name__ == "__main__":
    if sys.argv[1:2] in (["pool"], ["dask"]):
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
