"""A served dashboard for a long time: 300 pages, 20 deep verifications at once, 40 pages at once, files that go away.

The server is a process of its own (:mod:`tests.soak_server`), the pages are websockets without a browser
(:mod:`tests.visitor`). How long it takes is not judged here but measured by ``benchmarks/soak.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.visitor import Visitor, fetch
from workbench.app.jobs import WORKERS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SOON = 120  #: s that something is waited for; a machine with other work on its cores is slow, not wrong
CYCLES, WARM = 300, 40
GROWTH = 40 << 20  #: bytes that the process may grow by in 300 pages: a page that stayed would take some 6 MB
TABS = ("overview", "integrity", "tensors", "layout")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> Path:
    root = tmp_path_factory.mktemp("soak") / "ckpts"
    for name in ("hf_llama_bf16_sharded", "titan_run", "torch_save", "hf_peft_lora"):
        shutil.copytree(samples / name, root / name)
    (root / "big").mkdir()
    torch.manual_seed(0)
    for number in range(1, 5):
        state = {f"layers.{number}.{name}.weight": torch.randn(2048, 4096) for name in ("a", "b")}
        save_file(state, root / "big" / f"model-{number:05d}-of-00004.safetensors")
    return root


@pytest.fixture(scope="module")
def url(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    said = tmp_path_factory.mktemp("said") / "log"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(said, "w") as log:
        command = [sys.executable, "-m", "tests.soak_server", str(root)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        yield next(line.split()[1] for line in server.stdout if line.startswith("ready"))
        assert server.poll() is None, f"the server ended with {server.returncode}: {said.read_text()[-3000:]}"
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


async def state(url: str, what: str = "state") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await fetch(f"{url}soak/{what}"))
    return found


async def until(url: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the server holds, once that is so."""
    end = time.monotonic() + SOON
    while not true(found := await state(url)):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.3)
    return found


def is_open(found: dict[str, Any]) -> bool:
    return all(status == "open" for status in found["status"])


async def cycles(url: str, count: int) -> None:
    """Pages that come, are drawn and go, three at a time."""
    names = ("hf_llama_bf16_sharded", "hf_peft_lora", "torch_save/odd.pt", "titan_run/step-2")

    async def one(number: int) -> None:
        async with at_once:
            tab = TABS[number // len(names) % len(TABS)]
            page = await Visitor.come(url, ckpt=names[number % len(names)], tab=tab)
            await asyncio.sleep(1.5)
            await page.leave()

    at_once = asyncio.Semaphore(3)
    await asyncio.gather(*(one(number) for number in range(count)))
    await until(url, lambda found: not found["pages"])


def test_three_hundred_pages_leave_nothing_behind(url):
    async def go():
        await cycles(url, WARM)
        before = await state(url, "collect")
        await cycles(url, CYCLES)
        return before, await state(url, "collect")

    before, after = asyncio.run(go())
    assert after["rss"] - before["rss"] <= GROWTH, (before, after)
    assert after["threads"] <= before["threads"] + WORKERS
    assert after["files"] <= before["files"] + 2
    assert after["shared"] == after["pages"] == 0 and after["kept"] <= 2


def test_twenty_deep_verifications_end_while_others_look(url):
    async def go():
        idle = await state(url)
        pages = [await Visitor.come(url, ckpt="big", tab="integrity", depth="deep") for _ in range(20)]
        await until(url, lambda found: len(found["status"]) == 20 and is_open(found))
        await fetch(f"{url}soak/verify")
        busy = await until(url, lambda found: any(job["status"] == "running" for job in found["jobs"]))
        other = await Visitor.come(url, ckpt="titan_run/step-2", tab="tensors")
        while_busy = await until(url, is_open)
        done = await until(url, lambda found: all(job["status"] != "running" for job in found["jobs"] if job))
        for page in (*pages, other):
            await page.leave()
        await until(url, lambda found: not found["pages"])
        return idle, busy, while_busy, done

    idle, busy, while_busy, done = asyncio.run(go())
    assert [job["status"] for job in done["jobs"] if job] == ["done"] * 20
    threads = max(found["threads"] for found in (busy, while_busy, done))
    assert threads <= idle["threads"] + 2 * WORKERS + WORKERS * (os.cpu_count() or 1) + 4, "threads for each job"


def test_forty_pages_at_once_are_all_served(url):
    async def go():
        idle = await state(url)
        pages = await asyncio.gather(*(Visitor.come(url, ckpt="titan_run/step-2", tab="overview") for _ in range(40)))
        served = await until(url, lambda found: len(found["status"]) == 40 and is_open(found))
        for page in pages:
            await page.leave()
        await until(url, lambda found: not found["pages"])
        return idle, served

    idle, served = asyncio.run(go())
    assert served["error"] == [""] * 40
    assert served["shared"] == 1, "forty pages share one open checkpoint"
    assert served["threads"] <= idle["threads"] + 2 * WORKERS + 4


@pytest.mark.parametrize("fault", ["deleted", "truncated", "rewritten", "replaced"])
def test_what_becomes_of_the_files_is_told_and_the_server_lives(url, root, fault):
    folder = root / "fault"
    shutil.copytree(root / "hf_peft_lora", folder)
    file = folder / "adapter_model.safetensors"

    async def go():
        page = await Visitor.come(url, ckpt="fault", tab="integrity", depth="deep")
        await until(url, lambda found: len(found["status"]) == 1 and is_open(found))
        if fault == "deleted":
            shutil.rmtree(folder)
        elif fault == "truncated":
            os.truncate(file, 1000)
        elif fault == "rewritten":
            file.write_bytes(bytes(file.stat().st_size))
        else:
            os.replace(
                shutil.copyfile(root / "hf_llama_bf16_sharded/model-00001-of-00004.safetensors", f"{file}.new"), file
            )
        told = await until(url, lambda found: found["notice"] != [""])
        await fetch(f"{url}soak/verify")
        verified = await until(url, lambda found: found["jobs"][0]["status"] in ("done", "failed"))
        again = await Visitor.come(url, ckpt="fault", tab="overview")
        both = await until(url, lambda found: len(found["status"]) == 2 and "opening" not in found["status"])
        await page.leave()
        await again.leave()
        await until(url, lambda found: not found["pages"])
        return told, verified, both

    try:
        told, verified, both = asyncio.run(go())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    word = "deleted" if fault == "deleted" else "rewritten"
    assert word in told["notice"][0] and "This page shows its earlier contents" in told["notice"][0]
    job = verified["jobs"][0]
    assert "should not happen" not in job["error"] and str(root) not in job["error"], job
    if fault != "replaced":
        assert sorted(both["status"]) == ["failed", "open"]
        assert all(str(root) not in error and "Traceback" not in error for error in both["error"])
        assert any(both["error"])
