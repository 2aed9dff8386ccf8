"""CPU time of a pass in a process pool and on a Dask cluster, of all processes together.

``python benchmarks/workers.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
5 GB. The threads that run tasks are counted apart from all others: on a busy machine, the time of equal tasks varies by
more than the rest. A cluster uses CPU time to start, for each second that it exists, and for each batch. The second is
taken on an idle cluster, for as long as the passes took just before. The larger checkpoint is the same file
under several names (hard links), so that it fits in the page cache too.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ROOT, machine

TENSORS, SHAPE = 32, (8192, 4096)
CASES = (("stats", 1, 8), ("stats", 8, 2), ("verify", 8, 2))  #: call, names of the file, passes over the checkpoint
ROUNDS = 4
QUIET = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__ADMIN__TICK__CYCLE": "10s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "5s",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}  #: as docs/scale.md recommends
WHERE: dict[str, tuple[str, dict[str, str]]] = {
    "process pool": ("pool", {}),
    "Dask": ("dask", {}),
    "Dask, as recommended": ("dask", QUIET),
}


def main(scratch: Path) -> None:
    print(
        f"## Process pool and Dask\n\n{machine()}. `wb.stats` and `wb.verify(deep=True)` of bfloat16 in the page cache,"
    )
    print(
        f"2 workers of one thread; CPU-seconds of all processes, mean of several passes after 2 others, the best of "
        f"{ROUNDS} rounds, taken in turns. Load at the start: {os.getloadavg()[0]:.1f}.\n"
    )
    columns = (
        "call",
        "checkpoint",
        "workers",
        "to start",
        "tasks of a pass",
        "the rest",
        "… without the idle share",
        "of the tasks",
        "idle",
        "all, over the pool",
    )
    print(f"| {' | '.join(columns)} |\n|---|---|---{'|---:' * 7}|")
    for call, names, passes in CASES:
        folder = scratch / f"workers_{names}"
        nbytes = write(folder, names)
        found: dict[str, list[dict[str, float]]] = {}
        every: dict[str, float] = {}
        for _ in range(ROUNDS):
            for name in WHERE:
                found.setdefault(name, []).append(run(name, call, folder, passes))
        for name, rounds in found.items():
            start, tasks, rest, idle = (min(one[what] for one in rounds) for what in ("start", "tasks", "rest", "idle"))
            alone = min(one["rest"] - one["share"] for one in rounds)
            every[name] = min(one["tasks"] + one["rest"] for one in rounds)
            over = every[name] / every["process pool"] - 1
            print(
                f"| {call} | {nbytes / 1e9:.2f} GB | {name} | {start:.2f} | {tasks:.3f} | {rest:.3f} | {alone:.3f} "
                f"| {alone / tasks:.1%} | {idle:.3f} | {over:.1%} |"
            )
    print(
        "\n*To start* includes the first two passes, in which workers import what they need; *idle* is for each "
        "second; *all* is the tasks and the rest, with the idle share.\n"
    )


def write(folder: Path, names: int) -> int:
    """Write the checkpoint, if it is not there, with its file under ``names`` names; return its size in bytes."""
    import torch
    import torch.distributed.checkpoint as dcp

    if not (folder / ".metadata").exists():
        torch.manual_seed(0)
        state = {f"layers.{k}.weight": torch.randn(SHAPE).mul_(0.02).bfloat16() for k in range(TENSORS)}
        with warnings.catch_warnings(action="ignore"):  # torch's remark that this is one process
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
        metadata = dcp.FileSystemReader(folder).read_metadata()
        items = dict(metadata.storage_data)
        for name in range(1, names):
            os.link(folder / "__0_0.distcp", folder / f"__{name}_0.distcp")
            for index, item in items.items():
                renamed = replace(index, fqn=f"{name}.{index.fqn}")
                metadata.state_dict_metadata[renamed.fqn] = metadata.state_dict_metadata[index.fqn]
                metadata.storage_data[renamed] = replace(item, relative_path=f"__{name}_0.distcp")
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def run(name: str, call: str, folder: Path, passes: int) -> dict[str, float]:
    kind, more = WHERE[name]
    environment = os.environ | more | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, kind, call, str(folder), str(passes)]
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


def measure(kind: str, call: str, folder: str, passes: int) -> dict[str, float]:
    from concurrent.futures import ProcessPoolExecutor
    from contextlib import ExitStack
    from multiprocessing import get_context

    import pandas  # noqa: F401  imported first, so that the start does not include it

    import workbench as wb

    ckpt = wb.open(folder)
    passed = {
        "stats": lambda where: wb.stats(ckpt, cache=False, executor=where),
        "verify": lambda where: wb.verify(ckpt, deep=True, executor=where),
    }[call]
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
            passed(executor)
        if kind == "pool":
            working = [(pid, pid) for pid in executor._processes]
        else:
            working = [pair for pairs in client.run(threads_of_tasks).values() for pair in pairs]
        first, before, clock = cpu(), cpu_of(working), time.perf_counter()
        for _ in range(passes):
            passed(executor)
        took, last, after = time.perf_counter() - clock, cpu(), cpu_of(working)
        time.sleep(took)
        idle = cpu() - last
    tasks = after - before
    found = {"start": first - begin, "idle": idle / took, "share": idle / passes}
    return found | {"tasks": tasks / passes, "rest": (last - first - tasks) / passes}


if __name__ == "__main__":
    if sys.argv[1:2] in (["pool"], ["dask"]):
        print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
