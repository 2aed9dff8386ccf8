"""Saves of the same tensors beside a floor that only writes their bytes, and beside what others save with.

``python benchmarks/saving.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
3 GB.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import best, machine

GB = 0.5

#: Tensors of touched memory, as a trainer has them; ``again(save)`` times saves into a new folder and over it.
STATE = """
import shutil, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter('ignore')
torch.manual_seed(0)
def state_of(gb):
    layers = max(1, int(gb * 1e9 / 4 / 7_343_104))
    made = {}
    for n in range(layers):
        made |= {f'layers.{n}.attention': torch.randn(1024, 4096), f'layers.{n}.norm': torch.randn(4096)}
        made |= {f'layers.{n}.mlp': torch.randn(3072, 1024)}
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
FLOOR = """
from concurrent.futures import ThreadPoolExecutor
def write(path, tensors):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    at = 0
    for one in tensors:
        data = memoryview(one.reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), 8 << 20):
            at += os.pwrite(fd, data[start : start + (8 << 20)], at)
    os.fdatasync(fd)
    os.close(fd)
def save(path):
    tensors = list(state.values())
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda n: write(f'{path}/{n}', tensors[n::THREADS]), range(THREADS)))
again(save)
"""
OURS = """
import workbench as wb
again(lambda path: dcp.save(state, storage_writer=wb.dcp.Writer(path, OPTIONS), planner=wb.dcp.Planner()))
"""
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
ASYNC = """
torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())
import workbench as wb
import contextlib, gc
for n in range(5):
    with timed() if n > 1 else contextlib.nullcontext():
        saved = dcp.async_save(state, storage_writer=WRITER)
    saved.result()
    gc.collect()
shutil.rmtree(FOLDER + '/save')
torch.distributed.destroy_process_group()
"""
COPY = """
copies = [torch.empty_like(one).zero_() for one in state.values()]
for _ in range(5):
    with timed():
        for one, copy in zip(state.values(), copies):
            copy.copy_(one)
"""
PLAN = """
ITEMS = 100_000
state = {f'layers.{n}.w': torch.empty(2, 2) for n in range(ITEMS)}
def plan(planner):
    planner.set_up_planner(state, None, True)
    local = planner.create_local_plan()
    plans, metadata = planner.create_global_plan([local])
    planner.finish_plan(plans[0])
"""
MEMORY = """
import workbench as wb, gc
for n in range(50):
    dcp.save(state, storage_writer=wb.dcp.Writer(FOLDER + '/save'), planner=wb.dcp.Planner())
    if n == 9:
        gc.collect(); begin = _anon()
gc.collect()
with timed() as clock:
    clock.base = begin
shutil.rmtree(FOLDER + '/save')
"""


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Saving\n\n{machine()}. One process, {GB} GB of float32; wall seconds, best of the rounds of each.\n")
    throughput(scratch)
    stall(scratch)
    planning(scratch)
    memory(scratch)


def code(scratch: Path, body: str, **values: object) -> str:
    text = STATE + body
    for name, value in {"SIZE": GB, "FOLDER": repr(str(scratch)), **values}.items():
        text = text.replace(name, str(value))
    return text


def throughput(scratch: Path) -> None:
    programs = {
        "floor: `pwrite` + `fdatasync`, 1 file": code(scratch, FLOOR, THREADS=1),
        "floor, 2 files": code(scratch, FLOOR, THREADS=2),
        "`wb.dcp.Writer`, 1 file": code(scratch, OURS, OPTIONS="thread_count=1"),
        "`wb.dcp.Writer`, 2 files": code(scratch, OURS, OPTIONS="thread_count=2"),
        "`wb.dcp.Writer`, 2 files, no manifest": code(scratch, OURS, OPTIONS="thread_count=2, manifest=False"),
        **{f"`dcp.save`, {n} files": code(scratch, DCP, THREADS=n) for n in (1, 2, 4)},
        "`torch.save`, `fsync`": code(scratch, TORCH),
        "safetensors `save_file`, `fsync`": code(scratch, SAFETENSORS),
    }
    found = best(programs, 3, "wall")
    floor = min(one["wall"] for name, one in found.items() if name.startswith("floor"))
    peer = min(one["wall"] for name, one in found.items() if name.startswith("`dcp.save`"))
    print("### Synchronous saves\n\n| | wall s | CPU s | GB/s | speed ÷ floor | speed ÷ best `dcp.save` | anon MB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, one in found.items():
        wall = one["wall"]
        ratios = f"{floor / wall:.2f} | {peer / wall:.2f} | {one['anon']:.0f}"
        print(f"| {name} | {wall:.3f} | {one['cpu']:.2f} | {GB / wall:.2f} | {ratios} |")
    print()


def stall(scratch: Path) -> None:
    folder = repr(str(scratch / "save"))
    found = best(
        {
            "floor: copy into touched memory": code(scratch, COPY),
            "`wb.dcp.Writer`": code(scratch, ASYNC, WRITER=f"wb.dcp.Writer({folder})"),
            "`wb.dcp.Writer`, no manifest": code(scratch, ASYNC, WRITER=f"wb.dcp.Writer({folder}, manifest=False)"),
            "`FileSystemWriter`": code(scratch, ASYNC, WRITER=f"dcp.FileSystemWriter({folder})"),
        },
        3,
        "wall",
    )
    floor = next(iter(found.values()))["wall"]
    print("### Time until the third and later `dcp.async_save` returns\n\n| | wall s | ÷ floor |\n|---|---:|---:|")
    for name, one in found.items():
        print(f"| {name} | {one['wall']:.3f} | {one['wall'] / floor:.2f} |")
    print()


def planning(scratch: Path) -> None:
    ours, theirs = "import workbench as wb\n", "dcp.DefaultSavePlanner(enable_plan_caching=True)"
    once, twice = "with timed():\n    plan({0})\n", "plan({0})\nwith timed():\n    plan({0})\n"
    found = best(
        {
            "`wb.dcp.Planner`, first": code(scratch, ours + PLAN + once.format("wb.dcp.Planner()"), SIZE=0.01),
            "`wb.dcp.Planner`, second": code(scratch, ours + PLAN + twice.format("wb.dcp.Planner()"), SIZE=0.01),
            "`DefaultSavePlanner`, first": code(scratch, PLAN + once.format(theirs), SIZE=0.01),
            "`DefaultSavePlanner`, second": code(scratch, PLAN + twice.format(theirs), SIZE=0.01),
        },
        1,
    )
    print("### Plans of 100,000 tensors\n\n| | CPU s |\n|---|---:|")
    for name, one in found.items():
        print(f"| {name} | {one['cpu']:.2f} |")
    print()


def memory(scratch: Path) -> None:
    one = best({"ours": code(scratch, MEMORY, SIZE=0.05)}, 1)["ours"]
    print(f"Anonymous memory after 50 synchronous saves, beyond that after 10: {one['anon']:.1f} MB.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
