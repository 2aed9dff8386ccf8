"""Passes over aligned blocks: the same elements of several tensors at once, whatever their files and shardings.

::

    A  param      ▒▒│▒▒│▒▒│▒▒        block 1 of every tensor of a parameter, in memory together
    A  exp_avg    ▒▒│▒▒│▒▒│▒▒   ──►  fold(state, {(0, "param"): …, (0, "exp_avg"): …, (1, "param"): …})
    B  param      ▒▒│▒▒│▒▒│▒▒
                  └ up to BLOCK (or WIDE) elements, cut along leading axes: a block is a run of the row-major order

Threads take runs of blocks, whose reads are planned together, and small parameters in groups. Their states are merged
in the order of the blocks, so results do not depend on the number of threads. Memory is one block of each tensor and
the intermediate arrays of a fold, a few megabytes per thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import INFLATED_LEAST, Catalog
from workbench.core.dtypes import DType
from workbench.core.engine import engine
from workbench.core.executors import cores, ordered
from workbench.core.runs import Runs
from workbench.core.scan import Progress
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor, fetched

Name = tuple[int, str]  #: side (0: A, 1: B) and role
S = TypeVar("S")
BLOCK = 1 << 16  #: elements of a block: half a megabyte as float64
WIDE = 1 << 18  #: elements of a block for compiled code, which needs no intermediate arrays and fewer calls
READ = 1 << 19  #: elements per read, for the cost of a read
RUN = 1 << 22  #: elements that a thread takes at a time, for the cost of planning reads
TOGETHER, MANY = 1 << 16, 32  #: elements of small parameters that a thread takes at a time, and how many of them
FAR = 1 << 20  #: elements at a time if they are in a store, which sends them all at once


class StoredTensors(Mapping[Name, LazyTensor]):
    """Tensors of one or two checkpoints by position, created on each access.

    A mixture of experts has a hundred thousand parameters of eight tensors each, too many to keep.
    """

    __slots__ = ("_names", "_positions", "_sides")
    _known: ClassVar[dict[tuple[Name, ...], tuple[Name, ...]]] = {}  # there are few sets of roles

    def __init__(self, sides: Sequence[Checkpoint], positions: Mapping[Name, int]) -> None:
        names = tuple(positions)
        self._sides, self._names = sides, self._known.setdefault(names, names)
        self._positions = array("q", positions.values())

    def __getitem__(self, name: Name) -> LazyTensor:
        catalog, position = self._where(name)
        return self._sides[name[0]][catalog.keys[position]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[Name]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self) -> tuple[int, ...]:
        catalog, position = self._where(self._names[0])
        return catalog.shape_of(position)

    def element(self, name: Name) -> DType:
        catalog, position = self._where(name)
        return catalog.dtype_of(position)

    def elements(self) -> Iterator[DType]:
        """Yield the element type of each tensor, in order."""
        for (side, _), position in zip(self._names, self._positions, strict=True):
            yield self._sides[side].catalog.dtype_of(position)

    def _where(self, name: Name) -> tuple[Catalog, int]:
        if name not in self._names:
            raise KeyError(name)
        return self._sides[name[0]].catalog, self._positions[self._names.index(name)]


@dataclass(frozen=True, eq=False, slots=True)
class TensorSlot:
    """Tensors of one shape that belong together: a parameter with its states, of one checkpoint or two."""

    fqn: str
    tensors: Mapping[Name, LazyTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        held = self.tensors
        return held.shape() if isinstance(held, StoredTensors) else next(iter(held.values())).shape

    def dtype(self, name: Name) -> str | None:
        """Return the name of the element type, or ``None`` if there is no such tensor."""
        held = self.tensors
        if name not in held:
            return None
        return (held.element(name) if isinstance(held, StoredTensors) else held[name].element).name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each stored once."""
        held = self.tensors
        known = held.elements() if isinstance(held, StoredTensors) else (one.element for one in held.values())
        return prod(self.shape) * sum(element.bits for element in known) // 8


class SlotBlock(NamedTuple):
    """A run of elements in row-major order; its arrays are read-only and valid until the next block.

    Attributes:
        start: flat position of the first.
        bits: flat arrays as stored (unsigned if numpy lacks the type).
        values: the same as numbers, decoded on first access.
    """

    start: int
    bits: Mapping[Name, Array]
    values: Mapping[Name, Array]


class Fold(Protocol[S]):
    """The computation of a pass for a parameter; states merge associatively.

    An optional attribute ``block`` is the number of elements per block, by default :data:`BLOCK`; an optional method
    ``narrowed(fqns)`` returns the fold of some parameters, to be sent to workers.
    """

    def begin(self, slot: TensorSlot) -> S:
        """Return an empty state."""

    def fold(self, state: S, slot: TensorSlot, block: SlotBlock) -> None:
        """Add a block to the state, in a thread."""

    def merge(self, state: S, later: S) -> None:
        """Merge the state of later blocks into ``state``."""


def stream(
    slots: Sequence[TensorSlot],
    fold: Fold[S],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    on_error: Callable[[str, WorkbenchError], None] | None = None,
) -> Iterator[tuple[TensorSlot, S]]:
    """Fold every block of every slot, and yield each slot with its state when its last block is merged.

    Args:
        slots: the slots; tensors of a slot have one shape.
        progress: called with the fraction of elements done; raise to cancel the pass.
        on_error: called with the fqn of a slot that could not be read in full, and why; by default the error is raised.

    Raises:
        OpenError: a tensor cannot be read (only without ``on_error``).
    """
    total, done = max(sum(prod(slot.shape) for slot in slots), 1), 0
    whole: S | None = None  # state of the slot that is being merged; runs arrive in order
    failed = False
    tasks = ordered(
        _SlotWork(fold),
        _together(_runs(slots, getattr(fold, "block", BLOCK)), *((FAR, FAR) if _far(slots) else (TOGETHER, MANY))),
        sum(slot.nbytes for slot in slots),
        threads=threads or cores(),
        at_once=threads,
        name="workbench-doctor",
    )
    with closing(tasks):
        for run, (state, error) in chain.from_iterable(zip(*task, strict=True) for task in tasks):
            if run.first:
                whole, failed = None, False
            if error is not None:
                if on_error is None:
                    raise error
                if not failed:
                    on_error(run.slot.fqn, error)
                failed = True
            elif whole is None:
                whole = state
            else:
                fold.merge(whole, state)
            if progress is not None:
                done += run.numel
                progress(min(done / total, 1.0))
            if run.last and not failed and whole is not None:
                yield run.slot, whole


def compiled(slots: Sequence[TensorSlot], fast: bool | None) -> bool:
    """Return whether a pass over those tensors uses numba's code: if requested, or by default if it is worth loading.

    Raises:
        MissingExtraError: it is requested but cannot be imported.
    """
    return engine(sum(slot.nbytes for slot in slots), fast) == "numba"


class _SlotWork(Generic[S]):
    """The work of a thread on runs of blocks."""

    def __init__(self, fold: Fold[S]) -> None:
        self._fold = fold

    def nbytes(self, runs: list[_SlotRun]) -> int:
        return sum(run.slot.nbytes * run.numel // max(prod(run.slot.shape), 1) for run in runs)

    def part(self, tasks: list[list[_SlotRun]]) -> tuple[_SlotWork[S], list[list[_SlotRun]]]:
        narrowed = getattr(self._fold, "narrowed", None)
        names = {run.slot.fqn for runs in tasks for run in runs}
        return self if narrowed is None else _SlotWork(narrowed(names)), tasks

    def key(self, runs: list[_SlotRun]) -> bytes:
        raise NotImplementedError("no pass of the doctor is cut in parts")

    def close(self) -> None:
        pass

    def __call__(self, runs: list[_SlotRun]) -> list[tuple[S, WorkbenchError | None]]:
        slots = [TensorSlot(run.slot.fqn, dict(run.slot.tensors)) for run in runs]  # tensors are created once
        boxes = [run.columns() for run in runs]
        wanted = zip(slots, boxes, strict=True)
        with fetched((tensor, *columns) for slot, columns in wanted for tensor in slot.tensors.values()):
            return [self._run(*task) for task in zip(runs, slots, boxes, strict=True)]

    def _run(self, run: _SlotRun, slot: TensorSlot, columns: tuple[Ints, Ints]) -> tuple[S, WorkbenchError | None]:
        names = slot.tensors
        state = self._fold.begin(slot)
        tensors = {id(tensor): tensor for tensor in names.values()}  # a tensor under two names is read once
        decoders = {which: Decoder(tensor.element) for which, tensor in tensors.items()}
        known = {name: (id(tensor), decoders[id(tensor)]) for name, tensor in names.items()}
        readers = {which: tensor.boxes(*columns) for which, tensor in tensors.items()}
        try:
            for box in run.boxes:
                read = {which: next(reader).reshape(-1) for which, reader in readers.items()}
                for first in range(0, box.stop - box.start, box.step):
                    part = {which: flat[first : first + box.step] for which, flat in read.items()}
                    bits = {name: part[id(tensor)] for name, tensor in names.items()}
                    self._fold.fold(state, slot, SlotBlock(box.start + first, bits, _BlockNumbers(known, part)))
        except WorkbenchError as error:
            return state, error
        return state, None


class _BlockNumbers(Mapping[Name, Array]):
    """Numbers of a block by name; each tensor is decoded once, on first access."""

    def __init__(self, names: Mapping[Name, tuple[int, Decoder]], bits: Mapping[int, Array]) -> None:
        self._names, self._bits = names, bits
        self._made: dict[int, Array] = {}

    def __getitem__(self, name: Name) -> Array:
        which, decoder = self._names[name]
        if which not in self._made:
            self._made[which] = decoder.numbers(self._bits[which])
        return self._made[which]

    def __iter__(self) -> Iterator[Name]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _BlockBox(NamedTuple):
    """Blocks that are read together: flat positions ``[start, stop)`` in steps of ``step``, also as a box."""

    start: int
    stop: int
    step: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _SlotRun(NamedTuple):
    """Blocks of a slot that a thread takes at a time, and whether they are its first or last."""

    slot: TensorSlot
    boxes: list[_BlockBox]
    first: bool
    last: bool

    @property
    def numel(self) -> int:
        return sum(box.stop - box.start for box in self.boxes)

    def columns(self) -> tuple[Ints, Ints]:
        """Return offsets and sizes of the boxes, ``(R, ndim)``."""
        count = len(self.boxes)
        offsets = np.array([box.offsets for box in self.boxes], np.int64).reshape(count, -1)
        return offsets, np.array([box.sizes for box in self.boxes], np.int64).reshape(count, -1)


def _runs(slots: Iterable[TensorSlot], block: int) -> Iterator[_SlotRun]:
    """Yield runs lazily; a large model has a million."""
    for slot in slots:
        boxes = _boxes(slot.shape, block)
        if slot.nbytes > INFLATED_LEAST and any(tensor.inflated for tensor in slot.tensors.values()):
            boxes = islice(boxes, 1)  # refused, and reported once
        here, first = list(islice(boxes, RUN // READ)), True
        while here:
            after = list(islice(boxes, RUN // READ))
            yield _SlotRun(slot, here, first, not after)
            here, first = after, False


def _far(slots: Sequence[TensorSlot]) -> bool:
    return any(tensor._far for slot in slots[:1] for tensor in slot.tensors.values())


def _together(runs: Iterable[_SlotRun], most: int, many: int) -> Iterator[list[_SlotRun]]:
    """Yield the runs of small parameters in lists: passing one to a thread costs more than folding it."""
    task: list[_SlotRun] = []
    elements = 0
    for run in runs:
        if task and (elements + run.numel > most or len(task) == many):
            yield task
            task, elements = [], 0
        task.append(run)
        elements += run.numel
    if task:
        yield task


def _boxes(shape: tuple[int, ...], block: int) -> Iterator[_BlockBox]:
    step = Runs(shape, block).longest
    for run in Runs(shape, block, max(READ // block, 1)):
        yield _BlockBox(run.start, run.start + prod(run.sizes), step, run.low, run.sizes)
