"""Exports: DCP to safetensors and torch.save, beside what torch and safetensors offer and beside plain writes.

``python benchmarks/exporting.py [SCRATCH]`` prints Markdown. SCRATCH needs ~8 GB (the same checkpoint as
``opening.py``'s, and what is written). The floor writes as many bytes from one buffer, in order, and syncs them. Every
program runs four times in one process, each time into the memory that the time before gave back, and its best counts.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from harness import best, machine
from synthetic import write_llama

GB = 2_000_000_000

START = """
import gc, os, shutil
import torch, numpy, workbench as wb
from workbench.export.export import export
shutil.rmtree(OUT, ignore_errors=True); os.makedirs(OUT)
os.sync()
settle(FOLDER, SPACE)
"""
#: What a round before this one freed is what this one gets: a hypervisor takes free memory back within seconds.
ROUNDS = """
for turn in range(4):
    shutil.rmtree(OUT); os.makedirs(OUT); gc.collect()
    with timed():
        work()
"""
FLOOR = """
import mmap
block = memoryview(mmap.mmap(-1, 8 << 20)); block[:] = os.urandom(len(block))
def work():
    fd = os.open(OUT + '/plain', os.O_CREAT | os.O_WRONLY)
    for at in range(0, NBYTES, len(block)):
        os.pwrite(fd, block[: NBYTES - at], at)
    os.fsync(fd)
    os.close(fd)
"""
OURS = """
def work():
    with wb.open(FOLDER) as ckpt:
        export(ckpt, OUT + NAME, FORMAT, role=None, OPTIONS)
"""
PEER_TORCH = """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def work():
    dcp_to_torch_save(FOLDER, OUT + '/one.pt')
"""
PEER = """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors.torch import save_file
def flat(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, key))
        else:
            yield '.'.join((*path, key)), value
def work():
    dcp_to_torch_save(FOLDER, OUT + '/one.pt')
    save_file({k: v.contiguous() for k, v in flat(torch.load(OUT + '/one.pt', weights_only=True, mmap=True))},
              OUT + '/model.safetensors')
"""


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    llama = scratch / "llama"
    if not (llama / "dcp" / ".metadata").exists():
        write_llama(llama, GB)
    out = scratch / "exported"
    print(f"## Exports\n\n{machine()}. Source in the page cache, target on disk and synced (those of")
    print("torch and safetensors are not); wall time, best of the rounds of each.\n")
    size = sum(entry.stat().st_size for entry in os.scandir(llama / "dcp"))
    shards = ("'/hf'", "'safetensors'")
    programs = {
        "floor: plain writes and fsync": FLOOR,
        "dcp_to_torch_save + save_file": PEER,
        "ours: safetensors, shards of 500 MB": ours(*shards, "max_shard_size='500MB'"),
        "ours: one safetensors file": ours("'/one.safetensors'", "'safetensors'", ""),
        "ours: the same, read again (verify)": ours("'/one.safetensors'", "'safetensors'", "verify=True"),
        "ours: the same, 1 thread": ours("'/one.safetensors'", "'safetensors'", "threads=1"),
        "ours: cast to fp16": ours("'/one.safetensors'", "'safetensors'", "dtype='fp16'"),
        "dcp_to_torch_save": PEER_TORCH,
        "ours: torch.save archive": ours("'/one.pt'", "'torch'", ""),
    }
    values = {"FOLDER": repr(str(llama / "dcp")), "OUT": repr(str(out)), "NBYTES": str(size), "SPACE": "3 << 30"}
    programs = {name: START + code + ROUNDS for name, code in programs.items()}
    for word, value in values.items():
        programs = {name: code.replace(word, value) for name, code in programs.items()}
    found = best(programs, 1, by="wall")
    shutil.rmtree(out)
    floor, peer = (found[name]["wall"] for name in list(programs)[:2])
    print(f"### {size / 1e9:.2f} GB, {sum(1 for _ in os.scandir(llama / 'dcp')) - 1} files of DCP\n")
    head = ("wall s", "CPU s", "GB/s", "speed ÷ floor", "speed ÷ torch + save_file", "peak anon MB")
    print(f"| | {' | '.join(head)} |\n|---|{'---:|' * len(head)}")
    for name, one in found.items():
        wall = one["wall"]
        ratios = f"{size / 1e9 / wall:.2f} | {floor / wall:.2f} | {peer / wall:.1f}"
        print(f"| {name} | {wall:.2f} | {one['cpu']:.2f} | {ratios} | {one['anon']:.0f} |")
    print()


def ours(name: str, format: str, options: str) -> str:
    return OURS.replace("NAME", name).replace("FORMAT", format).replace("OPTIONS", options)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
