"""The scan: one ordered, threaded pass over stored elements, folding *mergeable* states as it goes.

::

    work     boxes of chunks, in file order     ┌──────── task ────────┐┌──────── task ───────┐
             (each element once, large ones cut) │ box │ box │   box    ││    box    │   box   │
    threads  a task each; its boxes in pieces     ▒▒▒▒▒▒ fold(state, piece)   ▒▒▒▒▒▒
    caller   states of a group, merged in the order of the tasks, not of completion ──► (group, state)

Tasks are cut by the data alone and merged in their order, so a result does not depend on the number of threads.
Memory is a few reusable buffers per thread, into which pieces are read. A transposed chunk is read a box at a
time (up to a task's size), and transforms (zstd, text) are undone for a whole chunk.

The work is a :class:`workbench.core.work.ReadWork`. It may span two catalogs: then a piece holds the same elements
of both, bit for bit as each stores them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from workbench.core.arrays import Array, Ints
from workbench.core.dtypes import DType
from workbench.core.executors import cores, ordered
from workbench.core.parts import storable
from workbench.core.plan import slices
from workbench.core.region import Region
from workbench.core.runs import Runs
from workbench.core.source import Source
from workbench.core.storage import Announcer, SourcePool
from workbench.core.transfer.regions import ahead
from workbench.core.work import ReadWork, Side, cut, tasks
from workbench.errors import UnsupportedFormatError, WorkbenchError

S = TypeVar("S")
T = TypeVar("T")
Progress = Callable[[float], None]  #: called with the fraction done; cancels the pass by raising
OnError = Callable[[int, int, WorkbenchError], None]  #: side, chunk row, why

LARGEST = 64  #: bytes of an element, at most
PIECE = 1 << 20  #: bytes of a piece of all sides, at most: it stays in a core's cache while reducers look at it


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
        byte: of the first catalog's file, at which ``bits`` are stored as they are; -1 if they were decoded.
    """

    row: int
    offsets: Ints
    sizes: Ints
    start: int
    bits: Array
    other: Array | None = None
    other_row: int = -1
    byte: int = -1

    def where(self, k: int) -> tuple[int, ...]:
        """Return the position of the piece's element ``k`` in the global tensor, padded like ``offsets``."""
        local = np.unravel_index(self.start + k, tuple(self.sizes.tolist()))
        return tuple(int(o) + int(i) for o, i in zip(self.offsets.tolist(), local, strict=True))


class Reducer(Protocol[S]):
    """The computation of a pass. States of one group merge associatively, across threads, files and machines."""

    def begin(self, dtype: DType, other: DType | None) -> S:
        """Return an empty state for elements of these types."""

    def fold(self, state: S, piece: Piece) -> None:
        """Fold a piece into a state. Called in a thread; each state is used by one thread at a time."""

    def merge(self, state: S, later: S) -> None:
        """Merge a state of pieces that come later in the order of the pass."""


def scan(
    work: ReadWork,
    reducer: Reducer[S],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, S]]:
    """Fold every piece of the work, and yield each group with its state as soon as its last box is merged.

    Args:
        work: the boxes, from ``chunk_work`` or ``pair_work``.
        reducer: what to compute.
        threads: number of threads; by default the cores available to this process, up to 8.
        progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.
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
    pools = [side.payloads.pool for side in work.sides]
    results = ordered(
        _Task(work, reducer),
        runs,
        total,
        threads=max(workers(pool, threads) for pool in pools),
        at_once=threads or max(pool.at_once for pool in pools),
        name="workbench-scan",
    )
    with closing(results):
        for number, (_, result) in enumerate(results):
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
            if progress is not None:
                progress(done / total)
            for group in result.states:
                if last[group] == number:
                    yield group, open_states.pop(group)


def part_of(progress: Progress | None, start: float, share: float) -> Progress | None:
    """Return the progress of a part of the work: it begins at ``start`` and is ``share`` of the whole."""
    return None if progress is None else lambda done: progress(min(1.0, start + done * share))


def workers(pool: SourcePool, threads: int | None = None) -> int:
    """Return the number of threads for a pass over files: as asked, or one a core, or more if a store is far away."""
    return threads or max(cores(), pool.at_once)


# ---- in a thread -----------------------------------------------------------------------------------------------------


@storable
@dataclass
class _Result(Generic[S]):
    states: dict[int, S]
    errors: list[tuple[int, int, WorkbenchError]]


class _Task(Generic[S]):
    """The work of a thread on a run of boxes."""

    def __init__(self, work: ReadWork, reducer: Reducer[S]) -> None:
        self._work, self._reducer, self._sources = work, reducer, Announcer()
        self._own = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Task, (self._work, self._reducer)

    def nbytes(self, boxes: range) -> int:
        return int(self._work.take(slice(boxes.start, boxes.stop)).nbytes.sum())

    def part(self, tasks: list[range]) -> tuple[_Task[S], list[range]]:
        first = tasks[0].start
        part = self._work.take(slice(first, tasks[-1].stop))
        return _Task(part, self._reducer), [range(run.start - first, run.stop - first) for run in tasks]

    def key(self, boxes: range) -> bytes:
        part, reducer = self._work.take(slice(boxes.start, boxes.stop)), type(self._reducer)
        columns = (part.group, part.offsets, part.sizes, *(side.row for side in part.sides))
        what = f"{reducer.__module__}.{reducer.__qualname__} {getattr(self._reducer, 'engine', '')}"
        return what.encode() + b"".join(np.ascontiguousarray(column).tobytes() for column in columns)

    def close(self) -> None:
        self._sources.restore()

    def __call__(self, boxes: range) -> _Result[S]:
        with ExitStack() as held:
            for side in self._work.sides:
                held.enter_context(self._ahead(side, boxes))
            return self._run(boxes)

    def _ahead(self, side: Side, boxes: range) -> AbstractContextManager[None]:
        work, rows, catalog = self._work, side.row[boxes], side.payloads.catalog
        dims = min(work.offsets.shape[1], catalog.offsets.shape[1])
        return ahead(
            side.payloads, rows, work.offsets[boxes, :dims] - catalog.offsets[rows, :dims], work.sizes[boxes, :dims]
        )

    def _run(self, boxes: range) -> _Result[S]:
        work, reducer, result = self._work, self._reducer, _Result[S]({}, [])
        if not hasattr(self._own, "buffers"):
            nbytes = max(PIECE // len(work.sides), LARGEST)
            self._own.buffers = [np.empty(nbytes, np.uint8) for _ in work.sides]
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
                straight = regions[0].straight
                for start, flat in _pieces(regions, buffers):
                    other, other_row = (flat[1], rows[1]) if len(flat) > 1 else (None, -1)
                    byte = -1 if straight is None else straight + start * flat[0].itemsize
                    piece = Piece(rows[0], work.offsets[at], work.sizes[at], start, flat[0], other, other_row, byte)
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
        """Return the box in its chunk."""
        payloads, row, work = side.payloads, int(side.row[at]), self._work
        catalog = payloads.catalog
        tensor = int(catalog.tensor[row])
        ndim = int(catalog.ndim[tensor])
        if catalog.dtype_of(tensor).packed:
            if (work.sizes[at] != _padded(catalog.sizes[row], len(work.sizes[at]))).any():
                raise UnsupportedFormatError(
                    f"{payloads.describe(row)}: elements of {catalog.dtype_of(tensor)} share bytes, so parts of "
                    "a chunk cannot be compared; only equal shardings can"
                )
            return payloads.region(row)
        local = work.offsets[at, :ndim] - catalog.offsets[row, :ndim]
        return payloads.region(row)[slices(local.tolist(), work.sizes[at, :ndim].tolist())]


class _Unread(Exception):
    """A box that could not be read to its end: which side of it, and why."""

    def __init__(self, side: int, error: WorkbenchError) -> None:
        super().__init__(side, error)
        self.side, self.error = side, error


def _padded(sizes: Array, dims: int) -> Array:
    return np.pad(sizes, (0, dims - len(sizes)), constant_values=1)


def _pieces(regions: Sequence[Region], buffers: list[Array]) -> Iterator[tuple[int, list[Array]]]:
    """Yield runs of the regions' elements in row-major order: where each begins, and one flat array per region."""
    size = regions[0].size
    if not size:
        return
    most = max(PIECE // len(regions) // max(region.raw.itemsize for region in regions), 1)
    if all(region.contiguous for region in regions):
        for start in range(0, size, most):
            stop = min(start + most, size)
            yield start, [_read(one.flat, side, start, stop, buffers[side]) for side, one in enumerate(regions)]
        return
    held = [one if one.ordered else _read(_loaded, side, one) for side, one in enumerate(regions)]
    for run in Runs(held[0].shape, most):
        key = slices(run.low, run.sizes)
        yield run.start, [_read(_block, side, one[key], buffers, side) for side, one in enumerate(held)]


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
