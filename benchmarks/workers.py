"""CPU time of a pass in a process pool and on a Dask cluster, of all processes together.

``python benchmarks/workers.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
2 GB. The threads that run tasks are counted apart from all others: on a busy machine, the time of equal tasks varies by
more than the rest. A cluster uses CPU time to start, for each second that it exists, and for each batch. The second is
taken on an idle cluster, for as long as the passes took just before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
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


def main(scratch: Path) -> None:
    folder = scratch / "workers"
    nbytes = write(folder)
    print(
        f"## Process pool and Dask\n\n{machine()}. `wb.stats` of {nbytes / 1e9:.2f} GB of bfloat16 in the page cache,"
    )
    print(
        f"2 workers of one thread; CPU-seconds of all processes, mean of {PASSES} passes after 2 others, the best of "
        f"{ROUNDS} rounds, taken in turns. Load at the start: {os.getloadavg()[0]:.1f}.\n"
    )
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for name in WHERE:
            found.setdefault(name, []).append(run(name, folder))
    print("| workers | to start | tasks of a pass | the rest | … without the idle share | of the tasks | idle |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, rounds in found.items():
        start, tasks, rest, idle = (min(one[what] for one in rounds) for what in ("start", "tasks", "rest", "idle"))
        alone = min(one["rest"] - one["share"] for one in rounds)
        print(f"| {name} | {start:.2f} | {tasks:.3f} | {rest:.3f} | {alone:.3f} | {alone / tasks:.1%} | {idle:.3f} |")
    print(
        "\n*To start* includes the first two passes, in which workers import what they need; *idle* is for each "
        "second.\n"
    )


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


def run(name: str, folder: Path) -> dict[str, float]:
    kind, more = WHERE[name]
    environment = os.environ | more | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, kind, str(folder)]
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


def cpu_of(threads: list[tuple[int, int]]) -> float:
    """Return the CPU time of some threads, given by process."""
    import psutil

    times = {
        (pid, one.id): one.user_time + one.system_time for pid, _ in threads for one in psutil.Process(pid).threads()
    }
    return float(sum(times[pair] for pair in threads))


def threads_of_tasks() -> list[tuple[int, int]]:
    """Return the threads of a Dask worker that run tasks."""
    own = os.getpid()
    return [(own, one.native_id or 0) for one in threading.enumerate() if "Dask-Default-Threads" in one.name]


def measure(kind: str, folder: str) -> dict[str, float]:
    from concurrent.futures import ProcessPoolExecutor
    from contextlib import ExitStack
    from multiprocessing import get_context

    import pandas  # noqa: F401  imported first, so that the start does not include it

    import workbench as wb

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
            client = held.enter_context(Client(cluster, set_as_default=False))
            executor = client.get_executor()
        for _ in range(2):
            wb.stats(ckpt, cache=False, executor=executor)
        if kind == "pool":
            working = [(pid, pid) for pid in executor._processes]
        else:
            working = [pair for pairs in client.run(threads_of_tasks).values() for pair in pairs]
        first, before, clock = cpu(), cpu_of(working), time.perf_counter()
        for _ in range(PASSES):
            wb.stats(ckpt, cache=False, executor=executor)
        took, last, after = time.perf_counter() - clock, cpu(), cpu_of(working)
        time.sleep(took)
        idle = cpu() - last
    tasks = after - before
    found = {"start": first - begin, "idle": idle / took, "share": idle / PASSES}
    return found | {"tasks": tasks / PASSES, "rest": (last - first - tasks) / PASSES}


if __name__ == "__main__":
    if sys.argv[1:2] in (["pool"], ["dask"]):
        print(json.dumps(measure(sys.argv[1], sys.argv[2])))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
