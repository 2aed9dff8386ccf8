"""A ring of host buffers: threads fill some of them while others are on their way to a device.

::

    buffer 0   │ read by all threads │ copy queued · copied │ read …
    buffer 1          │ read by all threads │ copy queued · copied │ read …
    buffer 2                 │ read by all threads │ …
    buffer 3                        │ …

One thread, the caller's, hands buffers out and queues copies; the others only read. Half of the ring is being read
while the other half is being copied, so neither the threads nor the bus wait for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from workbench.core.arrays import Array
from workbench.load.onto_device.lane import Lane, Mark

Task = Callable[[Array], None]  #: fills its part of a given buffer


class BufferWindow(Protocol):
    """The loads that go into one buffer."""

    def tasks(self) -> Iterable[Task]:
        """Return the window's parts, each for one thread."""


W = TypeVar("W", bound=BufferWindow)


@dataclass
class RingSlot:
    """One buffer of the ring, as a tensor and as an array; ``mark`` is behind the last copies from it."""

    host: torch.Tensor
    array: Array
    mark: Mark | None = None


class _Ring:
    """Buffers in turn, created when first needed: pinning one takes as long as filling it."""

    def __init__(self, lane: Lane, nbytes: int, count: int) -> None:
        self._lane, self._nbytes, self._count = lane, nbytes, count
        self._slots: deque[RingSlot] = deque()

    def take(self) -> RingSlot:
        """Return the next buffer, after waiting until its copies are done."""
        if len(self._slots) < self._count:
            host = self._lane.buffer(self._nbytes)
            slot = RingSlot(host, host.numpy())
        else:
            slot = self._slots.popleft()
            if slot.mark is not None:
                slot.mark.synchronize()
        self._slots.append(slot)
        return slot


@dataclass
class _UnderWay(Generic[W]):
    window: W
    slot: RingSlot
    parts: list[Future[None]]


def run(
    windows: Iterable[W],
    send: Callable[[W, RingSlot], None],
    lane: Lane,
    *,
    nbytes: int,
    count: int,
    threads: int,
) -> None:
    """Fill windows, and send each one when it is full, in order.

    When this returns or raises, no reads or copies are in progress; after an error nothing more is queued.

    Args:
        windows: none larger than a buffer.
        send: called in this thread and the lane's queue, to queue the copies of a window.
        lane: the device's lane.
        nbytes: bytes of one buffer.
        count: number of buffers; they take ``count · nbytes`` bytes.
        threads: number of threads.

    Raises:
        the first error of a task or ``send``, in the order of windows and tasks.
    """
    ring = _Ring(lane, nbytes, count)
    under_way: deque[_UnderWay[W]] = deque()

    def send_first() -> None:
        one = under_way.popleft()
        for part in one.parts:
            part.result()
        with lane.queue():
            send(one.window, one.slot)
        one.slot.mark = lane.mark()

    with ThreadPoolExecutor(threads, thread_name_prefix="workbench-device") as pool:
        try:
            for window in windows:
                if len(under_way) == max(count // 2, 1):
                    send_first()
                slot = ring.take()
                under_way.append(_UnderWay(window, slot, [pool.submit(task, slot.array) for task in window.tasks()]))
            while under_way:
                send_first()
            lane.join()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            lane.drain()
            raise
