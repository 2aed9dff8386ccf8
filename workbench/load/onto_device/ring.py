"""A ring of host buffers: threads fill some of them while others are on their way to a device.

::

    buffer 0   │ read by a thread │ copy queued · copied │ read by a thread │ …
    buffer 1     │ read by a thread │ copy queued · copied │ read …
    buffer 2       │ read by a thread │ copy queued · copied │ …
    buffer 3         │ read by a thread │ …

One thread, the caller's, hands buffers out and queues copies; the others only read, each a buffer of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from workbench.core.payload import Payloads
from workbench.core.stop import Stop
from workbench.core.storage import SourcePool
from workbench.core.transfer.regions import BoxRequests, Regions
from workbench.load.onto_device.lane import Lane, Mark, lane_to
from workbench.load.onto_device.loads import loads
from workbench.load.onto_device.results import DeviceResults
from workbench.load.onto_device.windows import BufferWindow, windows

BUFFER = 8 << 20  #: bytes of a buffer: a shorter read costs its thread more in Python than in the system
COPYING = 4  #: buffers that are copied from while every thread fills one of the others
PARTS = 2  #: fewest loads that fill a buffer: its end stays empty if the next load does not fit


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


def fill(
    results: DeviceResults,
    payloads: Payloads,
    boxes: BoxRequests,
    regions: Regions,
    device: torch.device,
    *,
    threads: int,
    buffer: int,
    buffers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Read regions onto a device, to their places in the results.

    Args:
        boxes, regions: the results are the destinations.
        buffer: bytes of a host buffer; the results have a scratch of ``buffer // PARTS`` bytes.
        buffers: number of host buffers; by default one for each thread, and :data:`COPYING`.
        progress: called in the caller's thread with the bytes of elements queued so far; raise an exception to cancel.

    Returns:
        bytes read: those of the elements, and those between them that are read with them.

    Raises:
        CorruptError, TruncatedError, ChangedError, MissingFileError: as :func:`loads`.
    """
    lane = lane_to(device)
    done = read = 0

    def send(window: BufferWindow, host: torch.Tensor) -> None:
        nonlocal done, read
        for at, load in window.loads:
            results.put(load, host[at : at + load.nbytes])
            done += load.wanted
        read += window.nbytes
        if progress is not None:
            progress(done)

    parts = loads(payloads, boxes, regions, buffer // PARTS)
    count = threads + COPYING if buffers is None else buffers
    lane.begin()
    run(windows(parts, buffer), payloads.pool, send, lane, nbytes=buffer, count=count, threads=threads)
    return read


def run(
    filled: Iterable[BufferWindow],
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
        filled: windows, none larger than a buffer.
        pool: their files.
        send: called in this thread and the lane's queue, to queue the copies of a window from its buffer.
        lane: the device's lane.
        nbytes: bytes of one buffer.
        count: number of buffers; they take ``count · nbytes`` bytes.
        threads: number of threads.

    Raises:
        the first error of a read or of ``send``, in the order of windows.
    """
    ring, stop = _Ring(lane, nbytes, count), Stop()
    under_way: deque[tuple[BufferWindow, torch.Tensor, Future[None]]] = deque()

    def send_first() -> None:
        window, host, read = under_way.popleft()
        read.result()
        with lane.queue():
            send(window, host)
        ring.give_back(host)

    with ThreadPoolExecutor(threads, thread_name_prefix="workbench-device") as workers:
        try:
            for window in filled:
                if len(under_way) == max(count - COPYING, 1):
                    send_first()
                host = ring.take()
                under_way.append((window, host, workers.submit(stop.run, window.fill, pool, host.numpy())))
            while under_way:
                send_first()
            lane.join()
        except BaseException:
            stop.set()
            workers.shutdown(wait=True, cancel_futures=True)
            lane.drain()
            raise
