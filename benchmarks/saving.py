"""Saves of the same tensors beside a floor that only writes their bytes, and beside what others save with.

``python benchmarks/saving.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
3 GB.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from harness import best, machine, run

GB = 0.5

#: Tensors of touched memory, as a trainer has them; ``again(save)`` times saves into a new folder and over it.
STATE = """
import shutil, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter('ignore')
def state_of(gb):
    layers = max(1, int(gb * 1e9 / 4 / 7_343_104))
    made = {}
    for n in range(layers):
        made |= {f'layers.{n}.attention': torch.full((1024, 4096), n + .1), f'layers.{n}.norm': torch.ones(4096)}
        made |= {f'layers.{n}.mlp': torch.full((3072, 1024), n + .2)}
    return made
state = state_of(SIZE)
nbytes = sum(one.nbytes for one in state.values())
def again(save, rounds=4):
    path = FOLDER + '/save'
    for _ in range(rounds):
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
        os.sync()
        with timed():
            save(path)
    shutil.rmtree(path)
"""
#: Threads that write a file each with ``write``, which is defined in FLOOR or DIRECT.
FILES = """
from concurrent.futures import ThreadPoolExecutor
def save(path):
    tensors = list(state.values())
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda n: write(f'{path}/{n}', tensors[n::THREADS]), range(THREADS)))
again(save)
"""
FLOOR = """
def write(path, tensors):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    at = 0
    for one in tensors:
        data = memoryview(one.reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), 8 << 20):
            at += os.pwrite(fd, data[start : start + (8 << 20)], at)
    os.fdatasync(fd)
    os.close(fd)
"""
DIRECT = """
import mmap
def write(path, tensors):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    buffer, filled, at = mmap.mmap(-1, 8 << 20), 0, 0
    for one in [*tensors, torch.zeros(1 << 21)]:  # the last one fills the buffer
        data = memoryview(one.reshape(-1).view(torch.uint8).numpy())
        while data:
            count = min(len(data), len(buffer) - filled)
            buffer[filled : filled + count] = data[:count]
            filled, data = filled + count, data[count:]
            if filled == len(buffer):
                at += os.pwrite(fd, buffer, at)
                filled = 0
    os.fdatasync(fd)
    os.close(fd)
"""
OURS = """
import workbench as wb
again(lambda path: dcp.save(state, storage_writer=wb.dcp.Writer(path, OPTIONS), planner=wb.dcp.Planner()))
"""
#: The same save with and without evidence, in turns and in one process: the ratio of each pair.
EVIDENCE = """
import statistics, workbench as wb
path, took = FOLDER + '/save', {True: [], False: []}
def save(manifest):
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    os.sync()
    wall, cpu = time.perf_counter(), time.process_time()
    dcp.save(state, storage_writer=wb.dcp.Writer(path, manifest=manifest), planner=wb.dcp.Planner())
    took[manifest].append((time.perf_counter() - wall, time.process_time() - cpu))
for n in range(PAIRS + 1):
    for manifest in (True, False) if n % 2 else (False, True):
        save(manifest)
shutil.rmtree(path)
wall, cpu = ([a[k] / b[k] for a, b in zip(took[True][1:], took[False][1:])] for k in (0, 1))
found = {'wall': statistics.median(wall), 'cpu': statistics.median(cpu), 'low': statistics.quantiles(wall)[0]}
print('@@' + json.dumps(found | {'high': statistics.quantiles(wall)[2], 'anon': 0}))
"""
PAIRS = 24
DCP = "again(lambda path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=THREADS)))\n"
TORCH = """
def save(path):
    with open(path + '/model.pt', 'wb') as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
again(save)
"""
SAFETENSORS = """
from safetensors.torch import save_file
def save(path):
    save_file(state, path + '/model.safetensors')
    fd = os.open(path + '/model.safetensors', os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
again(save)
"""
TORCH_CHECKPOINTING = """
import logging
logging.disable()
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
storage = LocalFileSystemStorageConfig(use_direct_io=False)  # which fails on ext4
manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
again(lambda path: manager.save(path + '/step', {'model': state}))
"""


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Saving\n\n{machine()}. One process, {GB} GB of float32; wall seconds, best of the rounds of each.\n")
    throughput(scratch)
    one = run(code(scratch, EVIDENCE, PAIRS=PAIRS))
    print(
        f"What the manifest and its digests cost, median of {PAIRS} pairs of saves in turns in one process, load "
        f"{os.getloadavg()[0]:.0f}: wall {one['wall'] - 1:+.1%} (half of the pairs between {one['low'] - 1:+.1%} and "
        f"{one['high'] - 1:+.1%}), CPU {one['cpu'] - 1:+.1%}.\n"
    )


def code(scratch: Path, body: str, **values: object) -> str:
    text = STATE + body
    for name, value in {"SIZE": GB, "FOLDER": repr(str(scratch)), **values}.items():
        text = text.replace(name, str(value))
    return text


def throughput(scratch: Path) -> None:
    programs = {
        "floor: `pwrite` + `fdatasync`, 1 file": code(scratch, FLOOR + FILES, THREADS=1),
        "floor, 2 files": code(scratch, FLOOR + FILES, THREADS=2),
        "floor around the page cache (`O_DIRECT`), 2 files": code(scratch, DIRECT + FILES, THREADS=2),
        "`wb.dcp.Writer`, 1 file": code(scratch, OURS, OPTIONS="thread_count=1"),
        "`wb.dcp.Writer`, 2 files": code(scratch, OURS, OPTIONS="thread_count=2"),
        "`wb.dcp.Writer`, 2 files, no manifest": code(scratch, OURS, OPTIONS="thread_count=2, manifest=False"),
        "`wb.dcp.Writer`, 2 files, `direct=True`": code(scratch, OURS, OPTIONS="thread_count=2, direct=True"),
        **{f"`dcp.save`, {n} files": code(scratch, DCP, THREADS=n) for n in (1, 2, 4)},
        "`torch.save`, `fsync`": code(scratch, TORCH),
        "safetensors `save_file`, `fsync`": code(scratch, SAFETENSORS),
    }
    if find_spec("torch_checkpointing"):
        programs["torch_checkpointing, which syncs nothing"] = code(scratch, TORCH_CHECKPOINTING)
    else:
        print("torch_checkpointing is not installed.\n")
    found = best(programs, 3, "wall")
    floor = min(one["wall"] for name, one in found.items() if name.startswith("floor") and "O_DIRECT" not in name)
    peer = min(one["wall"] for name, one in found.items() if name.startswith("`dcp.save`"))
    print("### Synchronous saves\n\n| | wall s | CPU s | GB/s | speed ÷ floor | speed ÷ best `dcp.save` | anon MB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, one in found.items():
        wall = one["wall"]
        ratios = f"{floor / wall:.2f} | {peer / wall:.2f} | {one['anon']:.0f}"
        print(f"| {name} | {wall:.3f} | {one['cpu']:.2f} | {GB / wall:.2f} | {ratios} |")
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
