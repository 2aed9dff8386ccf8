"""Split a huge pickle of equal records: the records as numpy columns, and a small pickle of the rest.

::

    80 04 95…  head  rec rec rec rec rec rec  e u b  head  rec rec rec …  tail .      the file
               │     └────── a run ────────┘ └─ gap ─┘
    80 04      head  ▒                        e u b  head  ▒          …   tail .      the rest: ▒ replaces a run

The start of a record is guessed from its first bytes, and every guess is proved. Opcodes are followed one by one from
byte 0 on. A run is accepted only if it starts at an opcode, each of its records is exactly its template's sequence of
opcodes, and each ends where the next begins. A record creates one object from nothing, so replacing it by a mark
changes nothing else once memo indices are renumbered. `core.pickles` decodes the rest under all its rules. Anything
that does not fit raises `Unlike`: then the pickle has to be decoded as a whole.

Opcodes as in CPython 3.11 (``Modules/_pickle.c``); protocol 4 and later.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from workbench.core.pickles import unpickle
from workbench.core.pickles.opcodes import TAKES, TO_MARK
from workbench.core.pickles.standins import Inert
from workbench.formats.dcp.lanes.pages import HeldBytes
from workbench.formats.dcp.lanes.records import MARGIN, Chain, Ints, Records, search
from workbench.formats.dcp.lanes.templates import REF, WIDTH, Unlike, token

RUN = 8  # records; shorter runs are not cut
DEPTH = 100  # open marks around a record
PINNED = 100_000  # records put back because the rest refers into them
IRREGULAR = 0.2  # share of the bytes; above it, lanes are not worthwhile


class RecordRun(Inert):
    """Placeholder in the decoded rest for the records ``first`` to ``stop``, numbered over the whole stream."""

    __slots__ = ("first", "stop")
    first: int
    stop: int

    def __init__(self, first: int, stop: int) -> None:
        self._set(first=first, stop=stop)


@dataclass(eq=False)
class Lanes:
    """A pickle cut in two.

    Attributes:
        value: the decoded rest; each run is replaced by up to four `RecordRun` with its record numbers, as many modulo
            2 as the run has records. One of several records is at an even place after the mark; a single one follows.
        records: by template; the records that were put back into the rest are left out.
        cut: total number of records.
        base: ``(lanes,)`` number of objects memoized before each record.
        memo: memo index → object, for objects of the rest that records refer to.
    """

    held: HeldBytes
    value: Any
    records: list[Records]
    cut: int
    base: Ints
    memo: dict[int, Any]
    places: Places


def read(
    held: HeldBytes,
    *,
    what: str,
    allow: Mapping[tuple[str, str], object],
    run: int = RUN,
    irregular: float = IRREGULAR,
) -> Lanes:
    """Cut and decode a pickle.

    Args:
        run: shortest run of records to cut. irregular: largest share of the bytes outside records.

    Raises:
        Unlike: it has few long runs, or something unusual. CorruptError, UnsafeError: as `unpickle.loads`.
    """
    data = held.data
    if len(data) < 2 * MARGIN or data[0] != 0x80 or data[1] not in (4, 5):
        raise Unlike("not a pickle of protocol 4")
    starts, ends, owner, records = search(held, run)
    chain = Chain(starts, ends, np.array([len(one.template.slots) for one in records], starts.dtype)[owner], run)
    if not chain.runs or sum(stop - start for start, stop, *_ in chain.runs) < (1 - irregular) * len(data):
        raise Unlike("most of it is not runs of records")
    walk = _OpcodeWalk(data, chain)
    walk.follow()
    places = Places(walk, chain)
    used = _used(data, walk, chain, owner, records, places)
    records = [one for one in (one.keep(used[one.lane]) for one in records) if len(one.lane)]
    wanted = sorted(_wanted(records, places))
    rest, runs = _rest(data, walk, chain, places, wanted)
    marks = cast(Callable[[object], object], runs.__getitem__)
    value, _ = unpickle.load_prefix(rest, 0, what=what, allow=allow, persistent_load=marks)
    root, objects = cast(tuple[Any, tuple[Any, ...]], value)
    memo = dict(zip(wanted, objects, strict=True))
    for one in records:
        kind, state = one.template.value.parts
        one.kind = memo[kind.number]
        one.state = {memo[key.number]: part for key, part in zip(state.parts[::2], state.parts[1::2], strict=True)}
    return Lanes(held, root, records, int(used.sum()), places.base, memo, places)


class _OpcodeWalk:
    """Follows the opcodes from byte 0 to STOP, skipping runs, and lists the pieces of the rest.

    ``pieces`` are bytes to keep as (start, stop), a memo index to refer to, or a run as (first, stop, memo index,
    whether the number of values since the last mark is odd).
    """

    def __init__(self, data: Any, chain: Chain) -> None:
        self.data, self.chain = data, chain
        self.pieces: list[tuple[int, ...]] = []
        self.runs: list[tuple[int, int, int]] = []

    def follow(self) -> None:
        data, size = self.data, len(self.data)
        pos = kept = 2
        memo = 0
        height = floor = 0
        outer: list[tuple[int, int]] = []  # stack heights below the open marks, and how deep opcodes may reach
        index = 0
        moved: float = math.inf  # memo indices from here on differ in the rest
        runs = self.chain.runs
        ahead: float
        ahead, after, first, stop = runs[0]
        while True:
            if pos >= ahead:
                if pos == ahead:
                    if len(outer) > DEPTH:
                        raise Unlike("deeply nested records")
                    if kept < pos:
                        self.pieces.append((kept, pos))
                    self.runs.append((first, stop, memo))
                    moved = min(moved, memo)
                    self.pieces.append((first, stop, memo, height % 2))
                    memo += int(self.chain.memo[stop] - self.chain.memo[first])
                    height += 2 - (stop - first) % 2
                    floor = height
                    pos = kept = after
                else:  # wrong guess: this record starts inside a string or another record
                    first += int(np.searchsorted(self.chain.starts[first:stop], pos))
                    if first < stop:
                        ahead = int(self.chain.starts[first])
                        continue
                index += 1
                ahead, after, first, stop = runs[index] if index < len(runs) else (math.inf, 0, 0, 0)
                continue
            op = data[pos]  # IndexError: truncated
            width = WIDTH[op]
            end = pos + 1 + width if width >= 0 else token(data, pos)[1]
            if (effect := _EFFECT[op]) is not None:
                need, change = effect
                if height - need < floor:
                    raise Unlike("takes part of a run")
                height += change
                memo += op == 0x94
            elif op == 0x68 or op == 0x6A:
                target = data[pos + 1] if width == 1 else int.from_bytes(data[pos + 1 : end], "little")
                if target >= memo:
                    raise Unlike("refers to what was never stored")
                height += 1
                if target >= moved:
                    if kept < pos:
                        self.pieces.append((kept, pos))
                    self.pieces.append((target,))
                    kept = end
            elif op == 0x28:
                outer.append((height, floor))
                height = floor = 0
            elif op in TO_MARK:
                if not outer:
                    raise Unlike("no mark")
                height, floor = outer.pop()
                if TO_MARK[op]:
                    height += 1
                elif height <= floor:
                    raise Unlike("adds to a run")
            elif op == 0x95:
                if int.from_bytes(data[pos + 1 : end], "little") > size - end:
                    raise Unlike("a frame longer than the data")
                if kept < pos:
                    self.pieces.append((kept, pos))
                kept = end
            elif op == 0x2E:
                break
            pos = end
        if height - 1 < floor:
            raise Unlike("ends on a run")
        if kept < pos:
            self.pieces.append((kept, pos))


# opcode → (values that it pops, change of stack height); None if `follow` handles the opcode itself
_EFFECT = [None if takes is None else (takes[0], takes[1] - takes[0]) for takes in TAKES]
for _op in b"hj\x95.":
    _EFFECT[_op] = None


class Places:
    """Locations of memo indices: in a record that was cut, or in the rest.

    ``base`` is the number of objects memoized before each record of a run.
    """

    def __init__(self, walk: _OpcodeWalk, chain: Chain) -> None:
        self.first, self.stop, self.memo = (np.array(part, np.int64) for part in zip(*walk.runs, strict=True))
        self.base = chain.memo[:-1].copy()
        for first, stop, memo in walk.runs:
            self.base[first:stop] += memo - chain.memo[first]
        self.after = self.memo + chain.memo[self.stop] - chain.memo[self.first]
        self.pinned: set[int] = set()

    def records(self, targets: Ints) -> Ints:
        """Return the cut record that memoizes each target, ``-1`` if the rest does."""
        run = np.maximum(np.searchsorted(self.memo, targets, "right") - 1, 0)
        found = np.full(len(targets), -1, np.int64)
        inside = np.flatnonzero((targets >= self.memo[run]) & (targets < self.after[run]))
        by_run = inside[np.argsort(run[inside], kind="stable")]
        for group in np.split(by_run, np.flatnonzero(np.diff(run[by_run])) + 1):
            if len(group):
                first, stop = int(self.first[run[group[0]]]), int(self.stop[run[group[0]]])
                found[group] = first + np.searchsorted(self.base[first:stop], targets[group], "right") - 1
        if self.pinned:
            found[np.isin(found, np.fromiter(self.pinned, np.int64))] = -1
        return found


def _used(
    data: Any, walk: _OpcodeWalk, chain: Chain, owner: Ints, records: list[Records], places: Places
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which records to cut: those of the runs, except the few that something outside the lanes refers to."""
    used = np.zeros(len(owner), np.bool_)
    for first, stop, _ in walk.runs:
        used[first:stop] = True
    todo = {piece[0] for piece in walk.pieces if len(piece) == 1}
    for one in records:
        if used[one.lane].any():
            todo |= set(one.template.literals)
    while todo:
        targets = np.fromiter(todo, np.int64, len(todo))
        found = places.records(targets)
        fresh = set(found[found >= 0].tolist())
        places.pinned |= fresh
        if len(places.pinned) > PINNED:
            raise Unlike("the rest refers into too many records")
        todo = {target for lane in fresh for _, _, target in _refs(data, chain, lane)}
    used[list(places.pinned)] = False
    return used


def _refs(data: Any, chain: Chain, lane: int) -> Iterator[tuple[int, int, int]]:
    pos, stop = int(chain.starts[lane]), int(chain.ends[lane])
    while pos < stop:
        op, end = token(data, pos)
        if op == 0x68 or op == 0x6A:
            yield pos, end, int.from_bytes(data[pos + 1 : end], "little")
        pos = end


def _wanted(records: list[Records], places: Places) -> set[int]:
    """Return the memo indices of the rest that records refer to; every reference is to something stored before it."""
    wanted: set[int] = set()
    for one in records:
        base = places.base[one.lane]
        for number, at in one.template.literals.items():
            if number >= base[0] + at:
                raise Unlike("refers to what was never stored")
            wanted.add(number)
        for value in one.template.fields:
            if value.kind == REF:
                column = one.columns[value.column]
                if (column >= base + value.at).any():
                    raise Unlike("refers to what was never stored")
                targets = np.unique(column)
                wanted.update(targets[places.records(targets) < 0].tolist())
    return wanted


def _rest(
    data: Any, walk: _OpcodeWalk, chain: Chain, places: Places, wanted: list[int]
) -> tuple[bytes, list[RecordRun]]:
    """Return a pickle of (the value without the runs, the wanted objects), and the placeholder of each run."""
    out = bytearray(data[:2])
    runs: list[RecordRun] = []
    since, removed = [0], [0]  # from memo index since[i] on, removed[i] objects are missing

    def refer(target: int) -> None:
        new = target - removed[bisect_right(since, target) - 1]
        out.extend(bytes((0x68, new)) if new < 256 else b"j" + new.to_bytes(4, "little"))

    def cut(first: int, stop: int, odd: int) -> None:
        if first == stop:
            return
        edges = [first, first + 1] if odd else [first]  # if keys and values alternate, a run starts with a key
        last = edges[-1] + (stop - edges[-1]) // 2 * 2
        if last > edges[-1]:
            edges += [last - 1, last]
        if stop > last:
            edges.append(stop)
        for part in itertools.pairwise(edges):
            out.extend(b"J" + len(runs).to_bytes(4, "little") + b"Q")
            runs.append(RecordRun(*part))
        memo = int(chain.memo[stop] - chain.memo[first])
        since.append(int(places.base[first]) + memo)
        removed.append(removed[-1] + memo)

    pinned = sorted(places.pinned)
    for piece in walk.pieces:
        if len(piece) == 1:
            refer(piece[0])
        elif len(piece) == 2:
            out += data[piece[0] : piece[1]]
        else:
            first, stop, _, odd = piece
            for lane in pinned[bisect_right(pinned, first - 1) : bisect_right(pinned, stop - 1)]:
                cut(first, lane, odd)
                odd = (odd + lane - first + 1) % 2
                pos = int(chain.starts[lane])
                for start, end, target in _refs(data, chain, lane):
                    out += data[pos:start]
                    refer(target)
                    pos = end
                out += data[pos : int(chain.ends[lane])]
                first = lane + 1
            cut(first, stop, odd)
    out += b"("
    for target in wanted:
        refer(target)
    out += b"t\x86."
    return bytes(out), runs
