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

import torch

from workbench.core.storage import SourcePool
from workbench.load.onto_device.lane import Lane, Mark
from workbench.load.onto_device.windows import MIN_PART, BufferWindow


class _Ring:
    """Buffers in turn, created when first needed: pinning one takes as long as filling it."""

    def __init__(self, lane: Lane, nbytes: int, count: int) -> None:
        self._lane, self._nbytes, self._count = lane, nbytes, count
        self._slots: deque[tuple[torch.Tensor, Mark | None]] = deque()  # with a mark behind the last copies from it

    def take(self) -> torch.Tensor:
        """Return the next buffer, after waiting until its copies are done."""
        if self._count:
            self._count -= 1
            return self._lane.buffer(self._nbytes)
        host, mark = self._slots.popleft()
        if mark is not None:
            mark.synchronize()
        return host

    def give_back(self, host: torch.Tensor) -> None:
        """Return a buffer, the copies from which were queued."""
        self._slots.append((host, self._lane.mark()))


def run(
    windows: Iterable[BufferWindow],
    pool: SourcePool,
    send: Callable[[BufferWindow, torch.Tensor], None],
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
        pool: their files.
        send: called in this thread and the lane's queue, to queue the copies of a window from its buffer.
        lane: the device's lane.
        nbytes: bytes of one buffer.
        count: number of buffers; they take ``count · nbytes`` bytes.
        threads: number of threads.

    Raises:
        the first error of a read or of ``send``, in the order of windows.
    """
    ring, part = _Ring(lane, nbytes, count), max(-(-nbytes // threads), MIN_PART)
    under_way: deque[tuple[BufferWindow, torch.Tensor, list[Future[None]]]] = deque()

    def send_first() -> None:
        window, host, parts = under_way.popleft()
        for one in parts:
            one.result()
        with lane.queue():
            send(window, host)
        ring.give_back(host)

    with ThreadPoolExecutor(threads, thread_name_prefix="workbench-device") as workers:
        try:
            for window in windows:
                if len(under_way) == max(count // 2, 1):
                    send_first()
                host = ring.take()
                parts = [workers.submit(task, host.numpy()) for task in window.tasks(pool, part)]
                under_way.append((window, host, parts))
            while under_way:
                send_first()
            lane.join()
        except BaseException:
            workers.shutdown(wait=True, cancel_futures=True)
            lane.drain()
            raise
