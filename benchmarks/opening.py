"""Open, reopen, slice, materialise, list: ratios to peers and to the floor, all in one run.

``python benchmarks/opening.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
~5 GB; what it made there is used again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, best, machine, table
from synthetic import write_dcp_metadata, write_llama

GB = 2_000_000_000


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Opening and reading\n\n{machine()}. Warm page cache; best of the rounds of each.\n")
    million(scratch / "million")
    llama = scratch / "llama"
    if not (llama / "dcp" / ".metadata").exists():
        write_llama(llama, GB)
    one_row(llama)
    materialise(llama)
    startup(llama)


def million(folder: Path) -> None:
    """1,024,000 chunks of metadata."""
    if not (folder / ".metadata").exists():
        write_dcp_metadata(folder)
    cache = folder.parent / "cache"
    print("### Open 1,024,000 chunks (2,000 tensors × 512 ranks, 194 MB of `.metadata`)\n")
    ours = f"""
os.environ['WORKBENCH_CACHE'] = {str(cache)!r}
import workbench as wb
with timed():
    ckpt = wb.open({str(folder)!r}, cache=CACHE)
assert ckpt.catalog.chunks == 1_024_000
"""
    pickled = f"""
import pickle, torch.distributed.checkpoint
with timed():
    with open({str(folder / ".metadata")!r}, 'rb') as f: meta = pickle.load(f)
"""
    dcp = f"""
from torch.distributed.checkpoint import FileSystemReader
with timed():
    meta = FileSystemReader({str(folder)!r}).read_metadata()
"""
    first = best({"workbench": ours.replace("CACHE", "False")}, 3)
    first |= best({"pickle.load": pickled, "DCP read_metadata": dcp}, 1)
    run_once = best({"fill": ours.replace("CACHE", "True")}, 1)
    assert run_once
    first |= best({"workbench, reopened": ours.replace("CACHE", "True")}, 5)
    print(table(first, "pickle.load"))
    print()
    probe = f"""
import workbench as wb
ckpt = wb.open({str(folder)!r}, cache=False)
print('COLUMNS', ckpt.catalog.nbytes)
with timed():
    assert len(ckpt.catalog.match(r'layers\\.1\\d\\..*up_proj')) == 100
"""
    size = subprocess.run(
        [sys.executable, "-c", f"import workbench as wb; print(wb.open({str(folder)!r}, cache=False).catalog.nbytes)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    regex = best({"regex": probe}, 3)["regex"]
    print(f"Catalog: {int(size) / 1e6:,.0f} MB of columns. A regex over the names: {regex['wall'] * 1e3:.1f} ms.\n")


def one_row(folder: Path) -> None:
    print("### One row of a 65 MB bf16 tensor (opened before; the read alone)\n")
    programs = {
        "workbench, DCP": f"""
import torch, workbench as wb
ckpt = wb.open({str(folder / "dcp")!r}, cache=False)
with timed():
    row = ckpt['embed.weight'][12345]
assert row.shape == (2048,)
""",
        "workbench, safetensors": f"""
import torch, workbench as wb
ckpt = wb.open({str(folder / "hf")!r}, cache=False)
with timed():
    row = ckpt['embed.weight'][12345]
""",
        "safetensors get_slice": f"""
import torch
from safetensors import safe_open
f = safe_open({str(folder / "hf" / "model-00001.safetensors")!r}, 'pt')
with timed():
    row = f.get_slice('embed.weight')[12345]
""",
        "DCP load of the tensor": f"""
import torch, torch.distributed.checkpoint as dcp
state = {{'embed.weight': torch.empty(16000, 2048, dtype=torch.bfloat16)}}
with timed():
    dcp.load(state, checkpoint_id={str(folder / "dcp")!r}, no_dist=True)
    row = state['embed.weight'][12345]
""",
    }
    print(table(best(programs, 3, by="wall"), "DCP load of the tensor", by="wall"))
    print()


def materialise(folder: Path) -> None:
    print("### All tensors of a 2 GB DCP checkpoint (4 ranks) into fresh memory\n")
    dcp = str(folder / "dcp")
    settled = f"settle({dcp!r}, {5 * GB // 2})"
    floor = f"""
import mmap, numpy as np, os
from concurrent.futures import ThreadPoolExecutor
files = []
for n in sorted(os.listdir({dcp!r})):
    if n.endswith('.distcp'):
        fd = os.open(os.path.join({dcp!r}, n), os.O_RDONLY)
        size = os.fstat(fd).st_size
        files.append((fd, size, np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), np.uint8)))
block = 16 << 20
{settled}
with timed():
    out = np.empty(sum(size for _, size, _ in files), np.uint8)  # one array: nearly all of it huge pages
    jobs, at = [], 0
    for fd, size, whole in files:
        jobs += [(fd, whole, i, at + i, min(block, size - i)) for i in range(0, size, block)]
        at += size
    def by_map(job):
        _, whole, low, to, n = job
        out[to:to + n] = whole[low:low + n]
    def by_pread(job):
        fd, _, low, to, n = job
        assert os.preadv(fd, [out[to:to + n]], low) == n
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(HOW, jobs))
"""
    programs = {
        "workbench open and state_dict": f"""
import torch, workbench as wb
{settled}
with timed():
    state = wb.open({dcp!r}, cache=False).state_dict(threads=2)
assert sum(t.nbytes for t in state.values()) > 1.9e9
""",
        "workbench state_dict": f"""
import torch, workbench as wb
ckpt = wb.open({dcp!r}, cache=False)
{settled}
with timed():
    state = ckpt.state_dict(threads=2)
assert sum(t.nbytes for t in state.values()) > 1.9e9
""",
        "DCP load": f"""
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
meta = FileSystemReader({dcp!r}).read_metadata()
{settled}
with timed():
    state = {{k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in meta.state_dict_metadata.items()}}
    dcp.load(state, checkpoint_id={dcp!r}, no_dist=True)
""",
        "dcp_to_torch_save": f"""
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
{settled}
with timed():
    dcp_to_torch_save({dcp!r}, {str(folder / "out.pt")!r})
os.unlink({str(folder / "out.pt")!r})
""",
    }
    ways = {"copy from a map": "by_map", "pread": "by_pread"}
    floors = {
        f"{way}, {n} threads": floor.replace("HOW", how).replace("THREADS", str(n))
        for way, how in ways.items()
        for n in (1, 2)
    }
    rivals = {name: programs[name] for name in programs if name != "dcp_to_torch_save"}
    measured = best(floors | rivals, 5, by="wall")
    fastest = min(floors, key=lambda name: measured[name]["wall"])  # whatever way the memory can be filled
    against = f"floor: {fastest}"
    results = {against: measured.pop(fastest)} | measured
    results |= best({"dcp_to_torch_save": programs["dcp_to_torch_save"]}, 1, by="wall")
    print(table(results, against, by="wall"))
    print()


def startup(folder: Path) -> None:
    walls = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "workbench", "ls", str(folder / "hf")],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        walls.append(time.perf_counter() - begin)
    print(f"### Start-up\n\n`workbench ls` on a safetensors folder: {min(walls):.2f} s wall (best of 5).\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench"))
