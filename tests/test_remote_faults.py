"""A store that fails now and then: the right answer or one clear error, never wrong bytes.

A schedule says which requests of a run fail, and how. A failure may pass, as overload does, or last until the end.
"""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests.properties import SLOW
from tests.range_server import RangeServer
from workbench.core.remote import objects
from workbench.errors import OpenError

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
SAMPLES = ["dcp_fsdp2", "hf_llama_bf16_sharded", "torch_save/ckpt.pt", "paddlenlp_legacy"][: 4 if SLOW else 1]
FAULTS = [403, 404, 408, 412, 416, 429, 500, 503, "reset", "short", "whole", "shifted", "page"]
PASSING = [408, 429, 500, 503, "reset", "short"]  #: are tried again
SCHEDULES = 500 if SLOW else 8
SLICES = 16  #: number of tensors that are sliced


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Retries without their pauses."""
    brief = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(objects, "BACKOFF", brief)
    monkeypatch.setattr(objects, "PAUSES", (0.001,))


class Schedule:
    """The requests of one run, by number, and what happens to them."""

    def __init__(self) -> None:
        self.start()

    def start(self, faults: dict[int, int | str] | None = None, lasting: int | None = None) -> None:
        self.faults, self.lasting, self.count, self.met, self.harmless = faults or {}, lasting, 0, 0, 0
        self._lock = threading.Lock()

    def __call__(self, request):
        with self._lock:
            number, self.count = self.count, self.count + 1
        if self.lasting is not None and number >= self.lasting:
            number = self.lasting
        fault = self.faults.get(number)
        self.met += fault is not None
        self.harmless += fault == "shifted" and not request.start  # a whole file cannot be shifted
        return fault


def everything(url: str) -> dict[str, object]:
    """What a user reads: objects, whole tensors, and slices of some of them, each a request of its own."""
    ckpt = wb.open(url, cache=False)
    found: dict[str, object] = {f"object {key}": repr(ckpt.objects[key]) for key in ckpt.objects}
    found |= {key: bits(tensor) for key, tensor in ckpt.state_dict().items()}
    keys = [key for key in ckpt if ckpt[key].shape]
    found |= {f"{key}[-1]": bits(ckpt[key][-1]) for key in keys[:: max(len(keys) // SLICES, 1)]}
    return found


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), np.asarray(flat).tobytes()


@pytest.fixture(scope="module", params=SAMPLES)
def run(request):
    """A server with a schedule, the URL of a sample on it, what it holds, and how many requests a run makes."""
    schedule = Schedule()
    truth = everything(str(ROOT / request.param))
    with RangeServer(ROOT, fault=schedule) as server:
        url = f"{server.url}/{request.param}"
        schedule.start()
        assert everything(url) == truth
        yield schedule, url, truth, schedule.count


def right_or_refused(schedule: Schedule, url: str, truth: dict[str, object]) -> OpenError | None:
    """The error of a run, if it has one; every value it returns is the right one."""
    try:
        found = everything(url)
    except OpenError as error:
        text = str(error)
        assert schedule.met, f"an error without a fault: {text}"
        assert text and "\n" not in text and "Traceback" not in text and "Debug" not in text, text
        return error
    assert found == truth
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_at_each_request_of_a_run(run, fault):
    schedule, url, truth, requests = run
    for number in range(requests) if SLOW else [requests // 2]:
        schedule.start({number: fault})
        error = right_or_refused(schedule, url, truth)
        if fault in PASSING:
            assert error is None, (number, error)
        if number % max(requests // 4, 1) == 0 or not SLOW:
            schedule.start({number: fault}, lasting=number)
            error = right_or_refused(schedule, url, truth)
            noticed = error is not None or not schedule.met or schedule.harmless
            assert noticed, (number, "all requests from here on fail, and nobody noticed")


def test_random_schedules(run):
    schedule, url, truth, requests = run
    refused = []
    for seed in range(SCHEDULES // len(SAMPLES)):
        draw = random.Random(seed)
        rate, kinds = draw.choice([0.02, 0.05, 0.2]), draw.choice([FAULTS, PASSING])
        faults = {number: draw.choice(kinds) for number in range(3 * requests) if draw.random() < rate}
        lasting = draw.choice([None, None, None, *faults]) if faults else None
        schedule.start(faults, lasting)
        refused.append(right_or_refused(schedule, url, truth) is not None)
    assert any(refused) and not all(refused)
