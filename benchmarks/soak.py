"""The dashboard under many: latency of others while 20 deep verifications run, 40 pages at once, memory of 300 pages.

``python benchmarks/soak.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. The server is a
process of its own, the visitors are websockets in this one (:mod:`tests.visitor`): each fetches the page and its
document, then changes the address, which opens another tab.

::

    liveness   GET /liveness, on a connection of its own
    change     a tab that was shown before is shown again: sent → the server has dealt with it
    page       HTML and document of a page; its pictures follow
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from harness import ROOT, machine

sys.path.insert(0, str(ROOT))

from tests.visitor import Visitor, fetch

SAMPLES = ROOT / "sample_ckpts"
LOOKED = "hf_llama_bf16_sharded"
TURNS = ("tensors", "layout", "overview", "integrity")
JOBS, TOGETHER, CYCLES = 20, 40, 300
ROUNDS = 60
PERIOD = 0.05  #: s between two requests
FILES, TENSORS, SHAPE = 8, 16, (4096, 2048)  #: of the checkpoint that is verified: 4 GiB of float32
GOAL = 200  #: ms that 95 of 100 requests of others may take


def main(scratch: Path) -> None:
    root = scratch / "soak"
    make(root)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.soak_server", str(root)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WORKBENCH_CACHE": str(scratch / "cache")},
    )
    assert server.stdout is not None
    try:
        url = next(line.split()[1] for line in server.stdout if line.startswith("ready"))
        asyncio.run(measure(url, server.pid))
    finally:
        server.terminate()
        server.wait(30)


def make(root: Path) -> None:
    import torch
    from safetensors.torch import save_file

    if (root / "big").exists():
        return
    (root / "big").mkdir(parents=True)
    for name in (LOOKED, "titan_run"):
        shutil.copytree(SAMPLES / name, root / name)  # links that leave ROOT are refused
    torch.manual_seed(0)
    for number in range(1, FILES + 1):
        state = {f"layers.{number}.{k}.weight": torch.randn(SHAPE) for k in range(TENSORS)}
        save_file(state, root / "big" / f"model-{number:05d}-of-{FILES:05d}.safetensors")


async def measure(url: str, server: int) -> None:
    print(f"## Dashboard: {JOBS} verifications, {TOGETHER} pages, {CYCLES} pages one after the other\n")
    print(f"{machine()}, load average {os.getloadavg()[0]:.1f} when it began. Wall milliseconds of others' requests.\n")
    await latencies(url, 8)  # what is imported at the first page
    rows = {"idle": await latencies(url, ROUNDS)}
    pages = [await Visitor.come(url, ckpt="big", tab="integrity", depth="deep") for _ in range(JOBS)]
    await until(url, lambda found: all(status == "open" for status in found["status"]))
    again = asyncio.create_task(keep_verifying(url))
    await asyncio.sleep(0.5)
    rows[f"{JOBS} deep verifications of 4 GiB"] = await latencies(url, ROUNDS)
    again.cancel()
    for page in pages:
        await page.leave()
    print("| | request | requests | median | 95 of 100 | longest | 95 at most |\n|---|---|---:|---:|---:|---:|---:|")
    for name, told in rows.items():
        for kind, times in told.items():
            times.sort()
            goal = GOAL if kind != "page" and name != "idle" else ""
            low, high = times[len(times) // 2], times[int(0.95 * (len(times) - 1))]
            print(f"| {name} | {kind} | {len(times)} | {low:.0f} | {high:.0f} | {times[-1]:.0f} | {goal} |")
    print("\nA verification that has ended begins again within 0.2 s.\n")
    await together(url, server)
    await many(url)


async def keep_verifying(url: str) -> None:
    while True:
        await fetch(f"{url}soak/verify")
        await asyncio.sleep(0.2)


async def latencies(url: str, count: int) -> dict[str, list[float]]:
    """Milliseconds of each request, by kind."""
    page = await Visitor.come(url, ckpt=LOOKED, tab="overview")
    address = next(one["id"] for one in page.models.values() if one["name"].endswith("Location"))

    async def turn(tab: str) -> None:
        await page.change(address, "search", f"?ckpt={LOOKED}&tab={tab}")

    for tab in TURNS:
        await turn(tab)
        await asyncio.sleep(0.7)
    found: dict[str, list[float]] = {"liveness": [], "change": []}
    for number in range(count):
        found["liveness"].append(await timed(asyncio.to_thread(alive, url)))
        found["change"].append(await timed(turn(TURNS[number % len(TURNS)])))
        await asyncio.sleep(PERIOD)
    await page.leave()
    await asyncio.sleep(1.5)
    found["page"] = []
    for _ in range(max(count // 20, 1)):
        began = time.perf_counter()
        other = await Visitor.come(url, ckpt="titan_run/step-2", tab="integrity")
        found["page"].append(1e3 * (time.perf_counter() - began))
        await other.leave()
    return found


def alive(url: str) -> None:
    with urllib.request.urlopen(f"{url}liveness", timeout=60) as reply:
        reply.read()


async def timed(call: Awaitable[object]) -> float:
    began = time.perf_counter()
    await call
    return 1e3 * (time.perf_counter() - began)


async def together(url: str, server: int) -> None:
    """Pages that are asked for in the same moment."""
    await until(url, lambda found: not found["pages"])
    began, spent, served = time.perf_counter(), cpu(server), []

    async def one() -> Visitor:
        page = await Visitor.come(url, ckpt="titan_run/step-2", tab="overview")
        served.append(time.perf_counter() - began)
        return page

    pages = await asyncio.gather(*(one() for _ in range(TOGETHER)))
    held = await until(url, lambda found: len(found["status"]) == TOGETHER and set(found["status"]) == {"open"})
    all_open = time.perf_counter() - began
    served.sort()
    print(f"### {TOGETHER} pages at once (s of wall time until HTML and document are there)\n")
    print(
        "| first | median | last | all open | CPU of the server | threads | memory |\n"
        "|---:|---:|---:|---:|---:|---:|---:|"
    )
    print(
        f"| {served[0]:.1f} | {served[len(served) // 2]:.1f} | {served[-1]:.1f} | {all_open:.1f} | "
        f"{cpu(server) - spent:.1f} | {held['threads']} | {held['rss'] >> 20} MB |"
    )
    for page in pages:
        await page.leave()


async def many(url: str) -> None:
    """Pages one after the other, and what stays."""
    await until(url, lambda found: not found["pages"])
    print(
        f"\n### {CYCLES} pages one after the other\n\n| pages | memory | threads | descriptors |\n|---:|---:|---:|---:|"
    )
    for number in range(CYCLES + 1):
        if number % 100 == 0:
            await until(url, lambda found: not found["pages"])
            told = await state(url, "collect")
            print(f"| {number} | {told['rss'] / 1e6:.0f} MB | {told['threads']} | {told['files']} |")
        page = await Visitor.come(url, ckpt=LOOKED, tab="integrity")
        await page.leave()


async def state(url: str, what: str = "state") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await fetch(f"{url}soak/{what}"))
    return found


async def until(url: str, true: Any) -> dict[str, Any]:
    while not true(found := await state(url)):
        await asyncio.sleep(0.2)
    return found


def cpu(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
