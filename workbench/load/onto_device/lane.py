"""Lanes: copying host memory to a device, and waiting for the copies.

::

    caller's stream   … free memory is handed out ┐                              ┌ results are used …
    side stream                            begin  └►copy│copy│copy│copy│copy│copy┘ join
    marks                                               ▲         ▲
                                                        a buffer is filled again once the mark behind its copies passed

Copies from pinned memory are only queued: the queueing thread continues, and the copy engine works while other threads
read. Elsewhere (CPU, and devices whose copies cannot be tracked) a copy is done when its call returns, and a
lane has nothing to wait for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch

from workbench.errors import UsageError

PEAK_BUFFER = 32 << 20  #: bytes of a copy in the measurement of the peak
PEAK_COPIES = 32  #: copies in a round: 1 GiB, so the time to start the first one is negligible
PEAK_ROUNDS = 3


class Mark(Protocol):
    """A point in a lane's queue."""

    def synchronize(self) -> Any:
        """Return once everything queued before it is done."""


class Lane(Protocol):
    """A queue of copies to one device, processed in order."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, ``(nbytes,) uint8``, from which copies are fast."""

    def begin(self) -> None:
        """Make later copies wait for the last owners of the memory handed out so far, which may still read it."""

    def queue(self) -> AbstractContextManager[Any]:
        """Queue each ``copy_(…, non_blocking=True)`` of the block in the lane."""

    def mark(self) -> Mark | None:
        """Mark the end of the queued copies; ``None`` if all are complete."""

    def join(self) -> None:
        """Make the caller's stream wait for the queued copies from now on."""

    def drain(self) -> None:
        """Return once all queued copies are done."""


class HostLane:
    """Copies that are done when the call returns: the CPU, and devices without pinned memory."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device is

    def begin(self) -> None:
        pass

    def queue(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def join(self) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaLane:
    """A stream beside the caller's, and pinned buffers (torch keeps their pages for the next call)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def queue(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # waiting must not take a core from the threads that read
        event.record(self._stream)
        return event

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def drain(self) -> None:
        self._stream.synchronize()


def device_of(device: str | torch.device) -> torch.device:
    """Return the device for a name, the current one for ``cuda``.

    Raises:
        UsageError: the device does not exist here, or it has no memory (``meta``).
    """
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if where.type == "meta":
        raise UsageError("device 'meta' has no memory to read into; ckpt.tensors has the shapes and types")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device={str(where)!r}: torch {torch.__version__} finds no CUDA device here")
        index = torch.cuda.current_device() if where.index is None else where.index
        if index >= torch.cuda.device_count():
            raise UsageError(f"device={str(where)!r}: there are {torch.cuda.device_count()} CUDA devices here")
        where = torch.device("cuda", index)
    return where


def lane_to(device: torch.device) -> Lane:
    """Return the lane to a device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


def measure_peak(device: str | torch.device) -> float:
    """Measure the GB/s (10⁹ bytes) of copies from one host buffer to a device: the ceiling of every loader.

    For a CUDA device this is the pinned copy peak, over 1 GiB in copies of 32 MiB, the best of three rounds.

    Raises:
        UsageError: there is no such device here.
    """
    where = device_of(device)
    lane = lane_to(where)
    source = lane.buffer(PEAK_BUFFER).fill_(1)  # touched: fresh memory is one page of zeros
    target = torch.empty(PEAK_BUFFER, dtype=torch.uint8, device=where)
    lane.begin()
    best = float("inf")
    for _ in range(PEAK_ROUNDS + 1):  # the first warms up, and is never the best
        began = perf_counter()
        with lane.queue():
            for _ in range(PEAK_COPIES):
                target.copy_(source, non_blocking=True)
        lane.drain()
        best = min(best, perf_counter() - began)
    return PEAK_BUFFER * PEAK_COPIES / best / 1e9
