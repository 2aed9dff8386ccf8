"""A pass over aligned blocks: the same elements of several tensors at once, whatever their files and shardings.

::

    A  param      ▒▒│▒▒│▒▒│▒▒        block 1 of every tensor of a parameter, in memory together
    A  exp_avg    ▒▒│▒▒│▒▒│▒▒   ──►  fold(state, {(0, "param"): …, (0, "exp_avg"): …, (1, "param"): …})
    B  param      ▒▒│▒▒│▒▒│▒▒
                  └ at most BLOCK (or WIDE) elements: leading axes cut, so that a block is a run of the row-major order

Threads take runs of blocks, whose reads are planned together; their states are merged in the order of the blocks, so
that results do not depend on the number of threads. Memory is one block of each tensor and what a fold makes of it:
some megabytes a thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from workbench.analysis.compare import engine
from workbench.analysis.numbers import Decoder
from workbench.checkpoint import Checkpoint
from workbench.core.catalog import INFLATED_LEAST, Catalog
from workbench.core.dtypes import DType, by_name
from workbench.core.scan import Tick, cores, in_order
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

__all__ = ["BLOCK", "WIDE", "Block", "Fold", "Slot", "Stored", "compiled", "stream"]

Array = np.ndarray[Any, Any]
Name = tuple[int, str]  #: side (0: A, 1: B) and role
S = TypeVar("S")
BLOCK = 1 << 16  #: elements of a block: half a megabyte as float64
WIDE = 1 << 18  #: of a block that compiled code folds, which makes nothing of it: calls cost more than caches win
READ = 1 << 19  #: elements that are read at a time: what a read costs
RUN = 1 << 22  #: elements that a thread takes at a time: what a plan of reads costs


class Stored(Mapping[Name, LazyTensor]):
    """Tensors of one checkpoint or two by their positions, made anew each time that one is asked for.

    A mixture of experts has a hundred thousand parameters of eight tensors each, which would be more than a pass holds.
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

    @classmethod
    def beside(cls, a: Mapping[Name, LazyTensor], b: Mapping[Name, LazyTensor]) -> Mapping[Name, LazyTensor]:
        """Tensors of two checkpoints, of side 0 each, as those of two sides."""
        if isinstance(a, Stored) and isinstance(b, Stored):
            positions = {(0, role): at for (_, role), at in zip(a, a._positions, strict=True)}
            positions |= {(1, role): at for (_, role), at in zip(b, b._positions, strict=True)}
            return cls([a._sides[0], b._sides[0]], positions)
        if isinstance(b, Stored) and not a:
            return cls(
                [b._sides[0], b._sides[0]], {(1, role): at for (_, role), at in zip(b, b._positions, strict=True)}
            )
        return {(0, role): a[_, role] for _, role in a} | {(1, role): b[_, role] for _, role in b}

    def shape(self) -> tuple[int, ...]:
        catalog, position = self._where(self._names[0])
        return catalog.shape_of(position)

    def element(self, name: Name) -> DType:
        catalog, position = self._where(name)
        return catalog.dtype_of(position)

    def _where(self, name: Name) -> tuple[Catalog, int]:
        if name not in self._names:
            raise KeyError(name)
        return self._sides[name[0]].catalog, self._positions[self._names.index(name)]


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Tensors of one shape that belong together: a parameter with its states, of one checkpoint or two."""

    fqn: str
    tensors: Mapping[Name, LazyTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        held = self.tensors
        return held.shape() if isinstance(held, Stored) else next(iter(held.values())).shape

    def dtype(self, name: Name) -> str | None:
        """Name of the element type, or ``None`` where there is no such tensor."""
        held = self.tensors
        if name not in held:
            return None
        return (held.element(name) if isinstance(held, Stored) else held[name].element).name

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, stored once."""
        return prod(self.shape) * sum(by_name(self.dtype(name) or "").bits for name in self.tensors) // 8


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
    """What a pass computes for a parameter; states merge associatively.

    It may have an attribute ``block``: how many elements it wants at a time, :data:`BLOCK` where there is none.
    """

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
    total, done = max(sum(prod(slot.shape) for slot in slots), 1), 0
    work = _Work(fold)
    whole: S | None = None  # of the slot that is being merged: runs come in their order
    failed = False
    with ThreadPoolExecutor(threads or cores(), thread_name_prefix="workbench-doctor") as pool:
        try:
            for run, state, error in in_order(pool, work, _runs(slots, getattr(fold, "block", BLOCK))):
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
                if tick is not None:
                    done += sum(box.stop - box.start for box in run.boxes)
                    tick(min(done / total, 1.0))
                if run.last and not failed and whole is not None:
                    yield run.slot, whole
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def compiled(slots: Sequence[Slot], fast: bool | None) -> bool:
    """Whether a pass over those tensors runs numba's code: where it is asked for, or by default worth its loading.

    Raises:
        MissingExtraError: it is asked for and not installed.
    """
    return engine(sum(slot.nbytes for slot in slots), fast) == "numba"


class _Work(Generic[S]):
    """What a thread does with a run of blocks."""

    def __init__(self, fold: Fold[S]) -> None:
        self._fold = fold

    def __call__(self, run: _Run) -> tuple[_Run, S, WorkbenchError | None]:
        names = dict(run.slot.tensors)
        slot = Slot(run.slot.fqn, names)  # tensors that are made once
        state = self._fold.begin(slot)
        tensors = {id(tensor): tensor for tensor in names.values()}  # one that two names share is read once
        decoders = {which: Decoder(tensor.element) for which, tensor in tensors.items()}
        offsets = np.array([box.offsets for box in run.boxes], np.int64).reshape(len(run.boxes), -1)
        sizes = np.array([box.sizes for box in run.boxes], np.int64).reshape(len(run.boxes), -1)
        known = {name: (id(tensor), decoders[id(tensor)]) for name, tensor in names.items()}
        readers = {which: tensor.boxes(offsets, sizes) for which, tensor in tensors.items()}
        try:
            for box in run.boxes:
                read = {which: next(reader).reshape(-1) for which, reader in readers.items()}
                for first in range(0, box.stop - box.start, box.step):
                    part = {which: flat[first : first + box.step] for which, flat in read.items()}
                    bits = {name: part[id(tensor)] for name, tensor in names.items()}
                    self._fold.fold(state, slot, Block(box.start + first, bits, _Numbers(known, part)))
        except WorkbenchError as error:
            return run, state, error
        return run, state, None


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
    """Blocks that are read together: flat positions ``[start, stop)``, ``step`` of each, and the same as a box."""

    start: int
    stop: int
    step: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Run(NamedTuple):
    """Blocks of a slot that a thread takes at a time; whether they are its first, and its last."""

    slot: Slot
    boxes: list[_Box]
    first: bool
    last: bool


def _runs(slots: Iterable[Slot], block: int) -> Iterator[_Run]:
    """One after the other as they are wanted: a large model has a million."""
    for slot in slots:
        boxes = _boxes(slot.shape, block)
        if slot.nbytes > INFLATED_LEAST and any(tensor.inflated for tensor in slot.tensors.values()):
            boxes = islice(boxes, 1)  # refused, and told once
        here, first = list(islice(boxes, RUN // READ)), True
        while here:
            after = list(islice(boxes, RUN // READ))
            yield _Run(slot, here, first, not after)
            here, first = after, False


def _boxes(shape: tuple[int, ...], block: int) -> Iterator[_Box]:
    if not prod(shape):
        return
    if not shape:
        yield _Box(0, 1, 1, (), ())
        return
    axis = 0
    while axis < len(shape) - 1 and prod(shape[axis + 1 :]) > block:
        axis += 1
    inner, rest = prod(shape[axis + 1 :]), shape[axis + 1 :]
    step = max(block // inner, 1)
    several = step * max(READ // block, 1)
    for number, lead in enumerate(np.ndindex(*shape[:axis])):
        for first in range(0, shape[axis], several):
            stop = min(first + several, shape[axis])
            base = number * shape[axis]
            offsets, sizes = (*lead, first, *[0] * len(rest)), (*[1] * axis, stop - first, *rest)
            yield _Box((base + first) * inner, (base + stop) * inner, step * inner, offsets, sizes)
