"""Statistics of whole checkpoints: GB of stored bytes a CPU-second, beside the floor and what else there is.

``python benchmarks/statistics.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
~3 GB; what it made there is used again. Peers that are commands (sft-cli, weightlens) are taken from PATH.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import beside_others, best, machine

SIZE = 512 << 20  #: bytes of each checkpoint
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Statistics\n\n{machine()}. Warm page cache; best of the rounds of each, taken in turns.\n")
    for short, name in TYPES.items():
        if not (scratch / f"stats-{short}" / "model.safetensors").exists():
            _write(scratch / f"stats-{short}", name)
    folders = {short: scratch / f"stats-{short}" for short in TYPES}
    by_type(folders)
    threads(folders["bf16"])
    peers(folders["bf16"])


def by_type(folders: dict[str, Path]) -> None:
    """One thread, imports and compilation done before."""
    print("### Min, max, mean, std, norms, zeros, NaN, Inf, subnormals of 512 MiB; one thread\n")
    print("| GB/CPU-s | floor: read-only sum | numpy | numba | quantiles too, numba | share of floor, numpy | numba |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    peak = 0.0
    for short, folder in folders.items():
        programs = {
            "floor": _floor(folder),
            "numpy": _ours(folder, "numpy"),
            "numba": _ours(folder, "numba"),
            "census": _ours(folder, "numba", quantiles=True),
        }
        found = best(programs, 3)
        speed = {name: SIZE / 1e9 / result["cpu"] for name, result in found.items()}
        peak = max(peak, *(found[name]["anon"] for name in ("numpy", "numba", "census")))
        shares = " | ".join(f"{speed[name] / speed['floor']:.2f}" for name in ("numpy", "numba"))
        print(f"| {short} | " + " | ".join(f"{speed[name]:.2f}" for name in programs) + f" | {shares} |")
    print(f"\nPeak anonymous memory over imports, of all of these: {peak:,.0f} MB.\n")


def threads(folder: Path) -> None:
    """Wall seconds of two threads and of one."""
    programs = {f"{how}, {n}": _ours(folder, how, threads=n, times=4) for how in ("numpy", "numba") for n in (1, 2)}
    found = best(programs, 4, by="wall")
    print("### Two threads against one (bf16, wall seconds of four passes)\n")
    print("| | one | two | ratio |\n|---|---:|---:|---:|")
    for how in ("numpy", "numba"):
        one, two = (found[f"{how}, {n}"]["wall"] for n in (1, 2))
        print(f"| {how} | {one:.3f} | {two:.3f} | {one / two:.2f} |")
    print()


def peers(folder: Path) -> None:
    """From opening to the table, imports included for commands, as they start a process each time."""
    path = str(folder / "model.safetensors")
    loop = f"""
import torch
from safetensors import safe_open
with timed():
    with safe_open({path!r}, 'pt') as f:
        for key in f.keys():
            t = f.get_tensor(key).float()
            row = [t.min().item(), t.max().item(), t.mean().item(), t.std().item(), t.norm().item(),
                   torch.isnan(t).sum().item(), torch.isinf(t).sum().item(), (t == 0).sum().item()]
"""
    ours = f"""
import pandas, workbench
from workbench.analysis.stats import stats
with timed():
    stats(workbench.open({str(folder)!r}), cache=False)
"""
    commands = [["sft", "stat", path], ["lens", "analyze", path]]  # sft-cli, weightlens
    print("### Against others (bf16, 512 MiB, CPU seconds)\n")
    beside_others({"workbench": ours, "plain torch loop": loop}, commands, SIZE)


def _floor(folder: Path) -> str:
    return f"""
import mmap, numpy as np
with open({str(folder / "model.safetensors")!r}, 'rb') as f:
    words = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
words = words[-{SIZE}:]
words = words[-words.ctypes.data % 8:][: {SIZE} - 8].view(np.uint64)
total = 0
with timed():
    for at in range(0, len(words), 1 << 17):
        total += int(words[at:at + (1 << 17)].sum())
"""


def _ours(folder: Path, how: str, *, threads: int = 1, quantiles: bool = False, times: int = 1) -> str:
    return f"""
import pandas, numpy as np, torch, workbench
from workbench.analysis import stats as module
module.engine = lambda nbytes: {how!r}
ckpt = workbench.open({str(folder)!r})
small = ckpt.select('warm')
assert module.stats(small, cache=False, quantiles={quantiles}).attrs['engine'] == {how!r}
with timed():
    for _ in range({times}):
        frame = module.stats(ckpt, threads={threads}, cache=False, quantiles={quantiles})
assert frame['error'].isna().all() and frame['nan'].sum() == 0
"""


def _write(folder: Path, dtype: str) -> None:
    """512 MiB of normal numbers in tensors of 16 MiB, and a small one to compile with."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    each = (16 << 20) // kind.itemsize
    scale = 20.0 if kind.itemsize == 1 else 0.02
    tensors = {
        f"layers.{k}.weight": (torch.randn(each // 1024, 1024) * scale).to(kind) for k in range(SIZE // (16 << 20))
    }
    save_file(tensors | {"warm": torch.ones(64).to(kind)}, folder / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench"))
