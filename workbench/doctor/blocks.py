"""A pass over aligned blocks: the same elements of several tensors at once, whatever their files and shardings.

::

    A  param      ▒▒│▒▒│▒▒│▒▒        block 1 of every tensor of a parameter, in memory together
    A  exp_avg    ▒▒│▒▒│▒▒│▒▒   ──►  fold(state, {(0, "param"): …, (0, "exp_avg"): …, (1, "param"): …})
    B  param      ▒▒│▒▒│▒▒│▒▒
                  └ at most BLOCK elements: leading axes cut, so that a block is a run of the row-major order

Threads take runs of blocks, whose reads are planned together; their states are merged in the order of the blocks, so
that results do not depend on the number of threads. Memory is one block of each tensor and what a fold makes of it:
some megabytes a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from workbench.analysis.compare import engine
from workbench.analysis.numbers import Decoder
from workbench.core.scan import Tick, cores, in_order
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

__all__ = ["BLOCK", "Block", "Fold", "Slot", "compiled", "stream"]

Array = np.ndarray[Any, Any]
Name = tuple[int, str]  #: side (0: A, 1: B) and role
S = TypeVar("S")
BLOCK = 1 << 16  #: elements of a block: half a megabyte as float64
RUN = 16  #: blocks that a thread takes at a time


@dataclass(frozen=True, eq=False)
class Slot:
    """Tensors of one shape that belong together: a parameter with its states, of one checkpoint or two."""

    fqn: str
    tensors: Mapping[Name, LazyTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.tensors.values())).shape

    def dtype(self, name: Name) -> str | None:
        """Name of the element type, or ``None`` where there is no such tensor."""
        found = self.tensors.get(name)
        return None if found is None else found.element.name


class Block(NamedTuple):
    """A run of elements in row-major order; its arrays are read-only, and good until the next block.

    Attributes:
        start: flat position of the first.
        bits: flat arrays as stored (unsigned where numpy lacks the type).
        values: the same as numbers, decoded when they are first asked for.
    """

    start: int
    bits: Mapping[Name, Array]
    values: Mapping[Name, Array]


class Fold(Protocol[S]):
    """What a pass computes for a parameter; states merge associatively."""

    def begin(self, slot: Slot) -> S:
        """A state that has seen nothing."""

    def fold(self, state: S, slot: Slot, block: Block) -> None:
        """Take a block into account, in a thread."""

    def merge(self, state: S, later: S) -> None:
        """Take in a state of later blocks."""


def stream(
    slots: Sequence[Slot],
    fold: Fold[S],
    *,
    threads: int | None = None,
    tick: Tick | None = None,
    on_error: Callable[[str, WorkbenchError], None] | None = None,
) -> Iterator[tuple[Slot, S]]:
    """Fold every block of every slot, and yield each slot with its state when its last block is merged.

    Args:
        slots: tensors of a slot have one shape.
        tick: told the share of elements that is done; stops the pass by raising.
        on_error: called with the fqn of a slot that could not be read (whole) and why; without it the error is raised.

    Raises:
        OpenError: a tensor cannot be read (only without ``on_error``).
    """
    runs = [(number, run) for number, slot in enumerate(slots) for run in _runs(slot.shape)]
    last = {number: at for at, (number, _) in enumerate(runs)}
    total, done = max(sum(prod(slot.shape) for slot in slots), 1), 0
    states: dict[int, S] = {}
    failed: set[int] = set()
    work = _Work(slots, fold)
    with ThreadPoolExecutor(threads or cores(), thread_name_prefix="workbench-doctor") as pool:
        try:
            for at, (number, state, error) in enumerate(in_order(pool, work, runs)):
                if error is not None:
                    if on_error is None:
                        raise error
                    if number not in failed:
                        on_error(slots[number].fqn, error)
                    failed.add(number)
                elif number in states:
                    fold.merge(states[number], state)
                else:
                    states[number] = state
                if tick is not None:
                    done += sum(box.stop - box.start for box in runs[at][1])
                    tick(min(done / total, 1.0))
                if last[number] == at:
                    found = states.pop(number, None)
                    if number not in failed and found is not None:
                        yield slots[number], found
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def compiled(slots: Sequence[Slot], fast: bool | None) -> bool:
    """Whether a pass over those tensors runs numba's code: where it is asked for, or by default worth its loading.

    Raises:
        MissingExtraError: it is asked for and not installed.
    """
    every = {id(tensor): tensor.nbytes for slot in slots for tensor in slot.tensors.values()}
    return engine(sum(every.values()), fast) == "numba"


class _Work(Generic[S]):
    """What a thread does with a run of blocks."""

    def __init__(self, slots: Sequence[Slot], fold: Fold[S]) -> None:
        self._slots, self._fold = slots, fold

    def __call__(self, task: tuple[int, list[_Box]]) -> tuple[int, S, WorkbenchError | None]:
        number, run = task
        slot = self._slots[number]
        state = self._fold.begin(slot)
        # a tensor that two names share is read once: without masters the weights are what is updated
        tensors = {id(tensor): tensor for tensor in slot.tensors.values()}
        decoders = {which: Decoder(tensor.element) for which, tensor in tensors.items()}
        offsets = np.array([box.offsets for box in run], np.int64).reshape(len(run), -1)
        sizes = np.array([box.sizes for box in run], np.int64).reshape(len(run), -1)
        readers = {which: tensor.boxes(offsets, sizes) for which, tensor in tensors.items()}
        try:
            for box in run:
                read = {which: next(reader).reshape(-1) for which, reader in readers.items()}
                bits = {name: read[id(tensor)] for name, tensor in slot.tensors.items()}
                known = _Numbers(
                    {name: (id(tensor), decoders[id(tensor)]) for name, tensor in slot.tensors.items()}, read
                )
                self._fold.fold(state, slot, Block(box.start, bits, known))
        except WorkbenchError as error:
            return number, state, error
        return number, state, None


class _Numbers(Mapping[Name, Array]):
    """Numbers of a block by name; each tensor is decoded once, when it is first asked for."""

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


class _Box(NamedTuple):
    """A block's place: flat positions ``[start, stop)``, and the same as a box."""

    start: int
    stop: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _runs(shape: tuple[int, ...]) -> Iterator[list[_Box]]:
    """Blocks, as many as a thread takes at a time."""
    run: list[_Box] = []
    for one in _boxes(shape):
        run.append(one)
        if len(run) == RUN:
            yield run
            run = []
    if run:
        yield run


def _boxes(shape: tuple[int, ...]) -> Iterator[_Box]:
    if not prod(shape):
        return
    if not shape:
        yield _Box(0, 1, (), ())
        return
    axis = 0
    while axis < len(shape) - 1 and prod(shape[axis + 1 :]) > BLOCK:
        axis += 1
    inner, rest = prod(shape[axis + 1 :]), shape[axis + 1 :]
    step = max(BLOCK // inner, 1)
    for number, lead in enumerate(np.ndindex(*shape[:axis])):
        for first in range(0, shape[axis], step):
            stop = min(first + step, shape[axis])
            base = number * shape[axis]
            offsets, sizes = (*lead, first, *[0] * len(rest)), (*[1] * axis, stop - first, *rest)
            yield _Box((base + first) * inner, (base + stop) * inner, offsets, sizes)
