"""Differences of whole checkpoints: GB of one side a CPU-second, beside the floors and what else there is.

``python benchmarks/differences.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH
needs ~9 GB; what it made there is used again. Peers that are commands (sft-cli, mergelens) are taken from PATH.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import beside_others, best, machine
from synthetic import write_llama

SIZE = 512 << 20  #: bytes of each side
GB = 2_000_000_000
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Differences\n\n{machine()}. Warm page cache; best of the rounds of each, taken in turns.\n")
    sides = {}
    for short, name in TYPES.items():
        sides[short] = [scratch / f"diff-{short}-{side}" for side in ("a", "same", "b")]
        if not (sides[short][2] / "model.safetensors").exists():
            _write(sides[short], name)
    by_type(sides)
    threads(sides["bf16"])
    without_payload(scratch)
    patterns(scratch)
    peers(sides["bf16"])


def by_type(sides: dict[str, list[Path]]) -> None:
    """One thread, imports and compilation done before."""
    print("### Equal, and different in nearly every element: 512 MiB a side, one thread\n")
    print(
        "| GB of one side/CPU-s | floor: sum | floor: memcmp | equal | differs, numpy | differs, numba | memory, MB |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for short, (a, same, b) in sides.items():
        programs = {
            "sum": _floor(a, a, "sum"),
            "memcmp": _floor(a, same, "memcmp"),
            "equal": _ours(a, same, False),
            "numpy": _ours(a, b, False),
            "numba": _ours(a, b, True),
        }
        found = best(programs, 3)
        peak = max(found[name]["anon"] for name in ("equal", "numpy", "numba"))
        cells = [f"{SIZE / 1e9 / found[name]['cpu']:.2f}" for name in programs]
        print(f"| {short} | {' | '.join(cells)} | {peak:,.0f} |")
    print()


def threads(sides: list[Path]) -> None:
    """Wall seconds of two threads and of one."""
    a, same, b = sides
    programs = {}
    for n in (1, 2):
        programs |= {f"equal, {n}": _ours(a, same, False, threads=n, times=6), f"numba, {n}": _ours(a, b, True, n, 4)}
    found = best(programs, 4, by="wall")
    print("### Two threads against one (bf16, wall seconds of several passes)\n")
    print("| | one | two | ratio |\n|---|---:|---:|---:|")
    for how in ("equal", "numba"):
        one, two = (found[f"{how}, {n}"]["wall"] for n in (1, 2))
        print(f"| {how} | {one:.3f} | {two:.3f} | {one / two:.2f} |")
    print()


def without_payload(scratch: Path) -> None:
    """Two DCP saves of 2 GB that differ in some tensors: by stored CRC-32, and by value."""
    folders = [scratch / "diff-dcp-a", scratch / "diff-dcp-b"]
    for folder, moved in zip(folders, (None, r"layers\.[12]\.(q|up)"), strict=True):
        if not (folder / "dcp" / ".metadata").exists():
            write_llama(folder, GB, moved=moved)
    a, b = (str(folder / "dcp") for folder in folders)
    code = """
import pandas, workbench
from workbench.analysis.diff import diff
with timed():
    found = diff(workbench.open(A, cache=False), workbench.open(B, cache=False), HOW)
    found.summary
print(found.chunks[['key', 'offsets', 'file']].to_json())
assert found.summary['changed'] == 4 and len(found.chunks) == 16, found.summary
""".replace("A,", f"{a!r},").replace("B,", f"{b!r},")
    found = best({"stored CRC-32": code.replace("HOW", "values=False"), "every element": code.replace("HOW", "")}, 3)
    print("### Two DCP saves of 2 GB, 4 ranks, 4 tensors changed (both name the same 16 chunks)\n")
    print("| | CPU s | wall s | memory, MB |\n|---|---:|---:|---:|")
    for name, result in found.items():
        print(f"| {name} | {result['cpu']:.3f} | {result['wall']:.3f} | {result['anon']:,.0f} |")
    print()


def patterns(scratch: Path) -> None:
    """1.1 GB of bf16 in 147 tensors, 44 of them changed by noise: the comparison, and the search for patterns."""
    folders = [scratch / f"diff-noise-{side}" for side in "ab"]
    if not (folders[1] / "model.safetensors").exists():
        _write_noise(folders)
    code = f"""
import pandas, workbench
from workbench.analysis.diff import diff
def run(patterns):
    return diff({str(folders[0])!r}, {str(folders[1])!r}, patterns=patterns, threads=1)
run(True)
with timed():
    found = run(HOW)
assert found.summary['changed'] == 44, found.summary
"""
    found = best({how: code.replace("HOW", how) for how in ("False", "True")}, 5, by="cpu")
    without, with_it = (found[how]["cpu"] for how in ("False", "True"))
    print("### The search for patterns: 1.1 GB of bf16 in 147 tensors, 44 of them changed by noise; one thread\n")
    print("| | CPU s | of the comparison |\n|---|---:|---:|")
    print(f"| comparison alone | {without:.3f} | |")
    print(f"| search for patterns | {with_it - without:.3f} | {(with_it - without) / without:.2f} |\n")


def _write_noise(folders: list[Path]) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    shapes = {"embed": (32000, 1536), "head": (32000, 1536), "norm": (1536,)}
    for layer in range(16):
        shapes |= {f"{layer}.{name}": (1536, 1536) for name in "qkvo"}
        shapes |= {f"{layer}.{name}": (4096, 1536) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (1536, 4096), f"{layer}.norm1": (1536,), f"{layer}.norm2": (1536,)}
    old = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    new = dict(old)
    for at in torch.randperm(len(old))[:44].tolist():
        name = list(old)[at]
        new[name] = (old[name].float() + 1e-3 * torch.randn(shapes[name])).bfloat16()
    for folder, tensors in zip(folders, (old, new), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")


def peers(sides: list[Path]) -> None:
    """From opening to the table, imports included for commands, as they start a process each time."""
    a, _, b = (str(folder / "model.safetensors") for folder in sides)
    loop = f"""
import torch
from safetensors import safe_open
with timed():
    with safe_open({a!r}, 'pt') as f, safe_open({b!r}, 'pt') as g:
        for key in f.keys():
            x, y = f.get_tensor(key), g.get_tensor(key)
            if not torch.equal(x, y):
                x, y = x.float(), y.float()
                d = y - x
                row = [(d != 0).sum().item(), d.abs().max().item(), d.norm().item(), (d.norm() / x.norm()).item(),
                       torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()]
"""
    ours = f"""
import pandas, workbench
from workbench.analysis.diff import diff
with timed():
    diff(workbench.open({str(sides[0])!r}), workbench.open({str(sides[2])!r}), patterns=False).tensors
"""
    commands = [["sft", "diff", "--delta", a, b], ["mergelens", "compare", a, b]]
    print("### Against others (bf16, 512 MiB a side, every element different, CPU seconds)\n")
    beside_others({"workbench": ours, "plain torch loop": loop}, commands, SIZE, "GB of one side")


def _floor(a: Path, b: Path, how: str) -> str:
    return f"""
import ctypes, mmap, numpy as np
memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
sides = []
for name in ({str(a / "model.safetensors")!r}, {str(b / "model.safetensors")!r}):
    with open(name, 'rb') as f:
        flat = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    sides.append(flat[-{SIZE}:][: {SIZE} - 8])
x, y = sides
words = x[-x.ctypes.data % 8:][: {SIZE} - 64].view(np.uint64)
with timed():
    if {how!r} == 'sum':
        for at in range(0, len(words), 1 << 17):
            int(words[at:at + (1 << 17)].sum())
    else:
        for at in range(0, len(x), 1 << 20):
            n = min(1 << 20, len(x) - at)
            assert memcmp(x.ctypes.data + at, y.ctypes.data + at, n) == 0
"""


def _ours(a: Path, b: Path, fast: bool, threads: int = 1, times: int = 1) -> str:
    return f"""
import numpy as np, workbench
from workbench.analysis.compare import compare
a, b = workbench.open({str(a)!r}), workbench.open({str(b)!r})
every = np.arange(len(a))
order = np.array([b.catalog.index[key] for key in a.catalog.keys])
small = [int(np.argmin(a.catalog.tensor_nbytes))]
def run(which, threads):
    return dict(compare(a.payloads, b.payloads, every[which], order[which], threads=threads, fast={fast}))
run(small, 1)
with timed():
    for _ in range({times}):
        found = run(slice(None), {threads})
assert len(found) == len(a)
"""


def _write(folders: list[Path], name: str) -> None:
    """Eight matrices and a small vector; the same again; and 1 % away from them."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, name)
    columns = 4096
    rows = SIZE // 8 // columns // kind.itemsize
    sides: list[dict[str, torch.Tensor]] = [{}, {}]
    torch.manual_seed(0)
    for n in range(8):
        weights = torch.randn(rows, columns) * (0.02 if kind.itemsize > 1 else 1.0)
        noise = 1 + 0.01 * torch.randn(rows, columns) * (1 if kind.itemsize > 1 else 10)
        for side, values in zip(sides, (weights, weights * noise), strict=True):
            side[f"layers.{n}.weight"] = values.to(kind)
    for side in sides:
        side["norm"] = torch.ones(columns).to(kind)
    sides[1]["norm"][7] = 2
    for folder, side in zip(folders, (sides[0], sides[0], sides[1]), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(side, str(folder / "model.safetensors"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
