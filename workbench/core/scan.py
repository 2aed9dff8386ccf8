"""The scan: one ordered, threaded pass over stored elements, folding *mergeable* states as it goes.

::

    work     boxes of chunks, in file order     ┌──────── task ────────┐┌──────── task ───────┐
             (each element once, large ones cut) │ box │ box │   box    ││    box    │   box   │
    threads  a task each; its boxes in pieces     ▒▒▒▒▒▒ fold(state, piece)   ▒▒▒▒▒▒
    caller   states of a group, merged in the order of the tasks whoever was faster ──► (group, state)

Tasks are cut by the data alone and merged in their order, so a result does not depend on the number of threads.
Memory is a few buffers a thread, which are used again: pieces are read into them. A transposed chunk is read a box at a
time (of a task's size at most), and transforms (zstd, text) are undone for a whole chunk.

What to read is a :class:`workbench.core.work.Work`. It may span two catalogs: then a piece holds the same elements of
both, bit for bit as each stores them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from workbench.core.dtypes import DType
from workbench.core.region import Region
from workbench.core.source import Source
from workbench.core.storage import SourcePool
from workbench.core.work import Side, Work, cut, tasks
from workbench.errors import UnsupportedFormatError, WorkbenchError

__all__ = ["PIECE", "Announcer", "Piece", "Reducer", "Tick", "cores", "in_order", "scan"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
Tick = Callable[[float], None]  #: told the share that is done; stops the pass by raising
OnError = Callable[[int, int, WorkbenchError], None]  #: side, chunk row, why

PIECE = 1 << 20  #: bytes of a piece, at most: it stays in a core's cache while several reducers look at it


class Piece(NamedTuple):
    """A run of elements of one box, in its row-major order.

    Attributes:
        row: chunk row in the first catalog.
        offsets, sizes: the box that the run is part of, ``(D,)`` elements of the *global* tensor (axes beyond the
            tensor's are 0 and 1). Element ``k`` of the piece is at ``offsets + unravel_index(start + k, sizes)``.
        start: position of the first element in the box.
        bits: flat, contiguous and read-only, in the raw (unsigned) type; valid until the next piece. Packed types
            come as bytes, and ``start`` counts bytes.
        other: the same elements of the second catalog, of its own raw type; ``None`` in a pass over one.
        other_row: chunk row in the second catalog, or -1.
    """

    row: int
    offsets: Ints
    sizes: Ints
    start: int
    bits: Array
    other: Array | None = None
    other_row: int = -1

    def where(self, k: int) -> tuple[int, ...]:
        """Position in the global tensor of element ``k`` of the piece, padded like ``offsets``."""
        local = np.unravel_index(self.start + k, tuple(self.sizes.tolist()))
        return tuple(int(o) + int(i) for o, i in zip(self.offsets.tolist(), local, strict=True))


class Reducer(Protocol[S]):
    """What a pass computes. States of one group merge associatively, so threads, files and machines add up."""

    def begin(self, dtype: DType, other: DType | None) -> S:
        """A state that has seen nothing, for elements of these types."""

    def fold(self, state: S, piece: Piece) -> None:
        """Take a piece into account. Called in a thread; a state is only ever used by one at a time."""

    def merge(self, state: S, later: S) -> None:
        """Take in a state of pieces that come later in the order of the pass."""


def scan(
    work: Work,
    reducer: Reducer[S],
    *,
    threads: int | None = None,
    tick: Tick | None = None,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, S]]:
    """Fold every piece of the work, and yield each group with its state as soon as its last box is merged.

    Args:
        work: the boxes, from ``chunk_work`` or ``pair_work``.
        reducer: what to compute.
        threads: how many work side by side; by default as many as this process may use cores, at most 8.
        tick: told the share of bytes that is done, in the caller's thread; raising there ends the pass.
        on_error: called in the caller's thread with the side (0 or 1) and the chunk row of a box that could not be
            read, and why; without it the first such error is raised.

    Raises:
        OpenError: a chunk cannot be read (only without ``on_error``).
    """
    work = cut(work)
    runs = tasks(work)
    if not runs:
        return
    last = {group: number for number, run in enumerate(runs) for group in work.group[run].tolist()}
    done, total = 0, max(int(work.nbytes.sum()), 1)
    sizes = np.add.reduceat(work.nbytes, [run.start for run in runs])
    open_states: dict[int, S] = {}
    sources = Announcer()
    with ThreadPoolExecutor(threads or cores(), thread_name_prefix="workbench-scan") as pool:
        try:
            for number, result in enumerate(in_order(pool, _Task(work, reducer, sources), runs)):
                for side, row, error in result.errors:
                    if on_error is None:
                        raise error
                    on_error(side, row, error)
                for group, state in result.states.items():
                    if group in open_states:
                        reducer.merge(open_states[group], state)
                    else:
                        open_states[group] = state
                done += int(sizes[number])
                if tick is not None:
                    tick(done / total)
                for group in result.states:
                    if last[group] == number:
                        yield group, open_states.pop(group)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            sources.restore()


def cores() -> int:
    """Cores that this process may use, at most 8."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, usable))


# ---- in a thread -----------------------------------------------------------------------------------------------------


@dataclass
class _Result(Generic[S]):
    states: dict[int, S]
    errors: list[tuple[int, int, WorkbenchError]]


class _Task(Generic[S]):
    """What a thread does with a run of boxes."""

    def __init__(self, work: Work, reducer: Reducer[S], sources: Announcer) -> None:
        self._work, self._reducer, self._sources = work, reducer, sources
        self._own = threading.local()

    def __call__(self, boxes: range) -> _Result[S]:
        work, reducer, result = self._work, self._reducer, _Result[S]({}, [])
        if not hasattr(self._own, "buffers"):
            self._own.buffers = [np.empty(PIECE, np.uint8) for _ in work.sides]
        buffers: list[Array] = self._own.buffers
        for at in boxes:
            group = int(work.group[at])
            if group not in result.states:
                result.states[group] = reducer.begin(*self._types(at))
            state = result.states[group]
            rows = [int(side.row[at]) for side in work.sides]
            regions: list[Region] = []
            side = 0
            try:
                sources: list[Source] = []
                for side, one in enumerate(work.sides):
                    pool, file = one.payloads.pool, int(one.payloads.catalog.file[rows[side]])
                    sources.append(self._sources.announce(pool, file))
                    regions.append(self._region(one, at))
                self._own.held = sources  # until the next box is found: its files are mostly the same
                for start, flat in _pieces(regions, buffers):
                    other, other_row = (flat[1], rows[1]) if len(flat) > 1 else (None, -1)
                    piece = Piece(rows[0], work.offsets[at], work.sizes[at], start, flat[0], other, other_row)
                    reducer.fold(state, piece)
            except _Unread as unread:
                result.errors.append((unread.side, rows[unread.side], unread.error))
            except WorkbenchError as error:
                result.errors.append((side, rows[side], error))
        return result

    def _types(self, at: int) -> tuple[DType, DType | None]:
        found: list[DType | None] = [None, None]
        for number, side in enumerate(self._work.sides):
            catalog = side.payloads.catalog
            found[number] = catalog.dtype_of(int(catalog.tensor[side.row[at]]))
        assert found[0] is not None
        return found[0], found[1]

    def _region(self, side: Side, at: int) -> Region:
        """The box in its chunk."""
        payloads, row, work = side.payloads, int(side.row[at]), self._work
        catalog = payloads.catalog
        tensor = int(catalog.tensor[row])
        ndim = int(catalog.ndim[tensor])
        if catalog.dtype_of(tensor).packed:
            if (work.sizes[at] != _padded(catalog.sizes[row], len(work.sizes[at]))).any():
                raise UnsupportedFormatError(
                    f"{payloads.describe(row)}: elements of {catalog.dtype_of(tensor)} share bytes, so that a part of "
                    "a chunk cannot be compared; only equal shardings can"
                )
            return payloads.region(row)
        local = work.offsets[at, :ndim] - catalog.offsets[row, :ndim]
        key = tuple(slice(a, a + n) for a, n in zip(local.tolist(), work.sizes[at, :ndim].tolist(), strict=True))
        return payloads.region(row)[key]


class _Unread(Exception):
    """A box that could not be read to its end: which side of it, and why."""

    def __init__(self, side: int, error: WorkbenchError) -> None:
        super().__init__(side, error)
        self.side, self.error = side, error


def _padded(sizes: Array, dims: int) -> Array:
    return np.pad(sizes, (0, dims - len(sizes)), constant_values=1)


class Announcer:
    """Announces one pass over each file when it is first met, and takes that back at the end.

    Sources are held weakly: the pool closes the files of a thousand ranks one after the other.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], weakref.ref[Any]] = {}

    def announce(self, pool: SourcePool, file: int) -> Source:
        """A file is about to be read; its source, to be held while it is."""
        source = pool.source(file)
        key = id(pool), file
        known = self._told.get(key)
        if known is None or known() is not source:
            source.advise("sequential")
            self._told[key] = weakref.ref(source)
        return source

    def restore(self) -> None:
        """The pass is over."""
        for told in self._told.values():
            if (source := told()) is not None:
                source.advise("normal")


def _pieces(regions: Sequence[Region], buffers: list[Array]) -> Iterator[tuple[int, list[Array]]]:
    """Runs of the regions' elements in row-major order: where they begin, and one flat array a region."""
    size = regions[0].size
    if not size:
        return
    most = max(PIECE // max(region.raw.itemsize for region in regions), 1)
    if all(region.contiguous for region in regions):
        for start in range(0, size, most):
            stop = min(start + most, size)
            yield start, [_read(one.flat, side, start, stop, buffers[side]) for side, one in enumerate(regions)]
        return
    held = [one if one.ordered else _read(_loaded, side, one) for side, one in enumerate(regions)]
    shape = held[0].shape
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= most:
        inner *= shape[axis]
        axis -= 1
    step = max(most // inner, 1)
    for number, lead in enumerate(np.ndindex(*shape[:axis])):
        for first in range(0, shape[axis], step):
            key = (
                *(slice(n, n + 1) for n in lead),
                slice(first, min(first + step, shape[axis])),
                *(slice(0, n) for n in shape[axis + 1 :]),
            )
            yield (
                (number * shape[axis] + first) * inner,
                [_read(_block, side, one[key], buffers, side) for side, one in enumerate(held)],
            )


def _read(how: Callable[..., T], side: int, *given: Any) -> T:
    try:
        return how(*given)
    except WorkbenchError as error:
        raise _Unread(side, error) from None


def _loaded(region: Region) -> Region:
    return Region.of(region.load())


def _block(block: Region, buffers: list[Array], side: int) -> Array:
    if len(buffers[side]) < block.nbytes:  # an element that is larger than a piece
        buffers[side] = np.empty(block.nbytes, np.uint8)
    out = buffers[side][: block.nbytes].view(block.raw)
    block.into(out.reshape(block.shape))
    out.flags.writeable = False
    return out


# ---- order -----------------------------------------------------------------------------------------------------------


def in_order(pool: ThreadPoolExecutor, run: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
    """Results in the order of the tasks; only a few are under way, so that finished states do not pile up."""
    ahead = 2 * pool._max_workers
    rest = iter(tasks)
    under_way: deque[Future[R]] = deque(pool.submit(run, task) for task in islice(rest, ahead))
    while under_way:
        result = under_way.popleft().result()
        under_way.extend(pool.submit(run, task) for task in islice(rest, 1))
        yield result
