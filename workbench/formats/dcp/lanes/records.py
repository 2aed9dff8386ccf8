"""Find candidate records of a pickle and read their fields: templates matched at many positions at once.

::

    … 94 ( | h 27 ) 81 94 } 94 ( h 2b … u b | h 27 ) 81 94 } 94 ( …      find the signature ``) 81 94 } 94 (``; the
             └─ class of memo 27                                         class before it sorts the positions

    step          lane 0                lane 1                lane 2
    literal       … ) 81 94 } 94 (      … ) 81 94 } 94 (      … ) 81 94 } 81       not equal: the lane ends
    int           K 05        ▸ 5       M e803      ▸ 1000                         each advances by its own width
    text          8c 02 w0    ▸ span    8c 03 w10   ▸ span

A literal must be equal byte for byte, and a field must have one of its opcodes. A lane that reaches the end *is* that
sequence of opcodes, whatever wrote it. Its start is a guess: the bytes may be inside a string or another record;
cut.py decides which starts are real.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.formats.dcp.lanes.pages import Bytes, HeldBytes
from workbench.formats.dcp.lanes.templates import (
    FIELDS,
    INT,
    LITERAL,
    REF,
    TEXT,
    WIDTH,
    Template,
    Unlike,
    Value,
    derive,
)

BLOCK = 8192  # lanes at a time: their bytes and columns stay in the CPU cache
SPAN = 32 << 20  # bytes between the first and the last of them
REACH = 1 << 20  # bytes that are in memory after the start of a lane; longer records are not found
MARGIN = 256  # a lane ends this far before the end of the buffer, so none of its reads was clipped
_STEP = {
    kind: np.array([WIDTH[op] + 1 if FIELDS.get(op) == kind and op != 0x8A else 0 for op in range(256)])
    for kind in (INT, REF)
}
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1
_MASK = np.array([(1 << 8 * WIDTH[op]) - 1 if FIELDS.get(op) in (INT, REF) and op != 0x8A else 0 for op in range(256)])


def position_type(buffer: Bytes) -> type[np.signedinteger[Any]]:
    """Return the integer type for byte positions: three million records have tens of millions of them."""
    return np.int32 if len(buffer) < 1 << 31 else np.int64


def match(held: HeldBytes, template: Template, starts: Ints) -> tuple[Ints, Ints, list[Ints]]:
    """Match the records at ``starts``, in rising order, with a template.

    Returns:
        Positions in ``starts`` of the ``(n,)`` matches, the byte after each, and the fields' columns, ``(n,)`` each.
    """
    shifted = [held.array[i:] for i in range(LITERAL)]
    place = position_type(held.array)
    kinds = [kind for one in template.fields for kind in ((place, place) if one.kind == TEXT else (np.int32,))]
    out: list[Ints] = [np.empty(len(starts), kind) for kind in (place, place, *kinds)]  # unused pages are never touched
    count = 0
    for first, stop in blocks(starts, BLOCK, SPAN):
        end = held.need(int(starts[first]), int(starts[stop - 1]) + REACH)
        lanes = _Lanes(shifted, starts[first:stop].astype(np.int64), first)
        for step in template.steps:
            if isinstance(step, bytes):
                lanes.literal(step)
            elif step == TEXT:
                lanes.text()
            else:
                lanes.number(step)
            if not len(lanes.pos):
                break
        lanes.keep(lanes.pos <= end - MARGIN)
        if len(lanes.pos):
            for position, part in enumerate((lanes.index, lanes.pos, *lanes.columns)):
                column = out[position]
                if column.dtype.itemsize == 4 and (part.min() < _LEAST or part.max() > _MOST):
                    column = out[position] = column.astype(np.int64)
                column[count : count + len(part)] = part
            count += len(lanes.pos)
    index, ends, *columns = (column[:count] if 2 * count > len(starts) else column[:count].copy() for column in out)
    return index, ends, columns


def blocks(starts: Ints, count: int, span: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of parts of rising positions that have at most ``count`` of them within ``span`` bytes."""
    first = 0
    while first < len(starts):
        part = starts[first : first + count]
        stop = first + int(np.searchsorted(part, int(part[0]) + span, "right"))
        yield first, stop
        first = stop


class _Lanes:
    """One block of lanes: where each reads next, and its fields so far. Reads are clipped to the buffer."""

    def __init__(self, shifted: list[Bytes], pos: Ints, first: int) -> None:
        self.shifted = shifted
        self.pos = pos
        self.index = np.arange(first, first + len(pos))
        self.columns: list[Ints] = []

    def keep(self, good: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        if not good.all():
            self.pos, self.index = self.pos[good], self.index[good]
            self.columns = [column[good] for column in self.columns]

    def at(self, shift: int) -> Bytes:
        return self.shifted[shift].take(self.pos, mode="clip")

    def literal(self, expected: bytes) -> None:
        good = self.at(0) == expected[0]
        for shift in range(1, len(expected)):
            good &= self.at(shift) == expected[shift]
        self.keep(good)
        self.pos = self.pos + len(expected)

    def number(self, kind: str) -> None:
        op = self.at(0)
        step = _STEP[kind].take(op)
        if kind == INT and (op == 0x8A).any():
            step[op == 0x8A] = 2 + self.at(1)[op == 0x8A]
            step[step > 10] = 0
            step[(op == 0x8A) & (step == 2)] = 0
        good = step > 0
        if not good.all():
            self.keep(good)
            op, step = op[good], step[good]
        if not len(op):
            return
        value = self.at(1).astype(np.int64)
        for byte in range(1, min(4, int(step.max()) - 1)):
            value |= self.at(1 + byte).astype(np.int64) << 8 * byte
        value &= _MASK.take(op)
        if kind == INT:
            negative = (op == b"J"[0]) & (value >= 1 << 31)
            value[negative] -= 1 << 32
            if len(wide := np.flatnonzero(op == 0x8A)):
                value[wide] = self._long(wide, step[wide] - 2)
        self.columns.append(value)
        self.pos = self.pos + step

    def _long(self, wide: Ints, size: Ints) -> Ints:
        """Return LONG1 of up to eight bytes, in two's complement."""
        value = np.zeros(len(wide), np.uint64)
        for byte in range(8):
            piece = self.shifted[2 + byte].take(self.pos[wide], mode="clip").astype(np.uint64) << np.uint64(8 * byte)
            value |= np.where(byte < size, piece, np.uint64(0))
        up = (64 - 8 * size).astype(np.uint64)
        return (value << up).view(np.int64) >> up.view(np.int64)

    def text(self) -> None:
        op = self.at(0)
        length = self.at(1).astype(np.int64)
        head = np.full(len(op), 2)
        long = op == b"X"[0]
        if long.any():
            for byte in range(1, 4):
                length[long] |= (self.at(1 + byte).astype(np.int64) << 8 * byte)[long]
            head[long] = 5
        start = self.pos + head
        self.pos = start + length
        self.columns += [start, self.pos]
        self.keep(long | (op == 0x8C))


RARE = 64  # templates tried for one class with little success before its remaining records go to the rest
KINDS = 32  # classes tried for each width of reference
SIGNATURE = b")\x81\x94}\x94("  # a memoized object without arguments, and the dict of its state


@dataclass(eq=False)
class Records:
    """The records of one template. ``lane`` has their numbers in rising order; ``columns`` the fields, ``(n,)`` each.

    ``kind`` is the class as decoded in the rest; ``keys`` maps the state's keys to their values.
    """

    template: Template
    lane: Ints
    columns: list[Ints]
    kind: Any = None
    state: Mapping[Any, Value] = field(default_factory=dict)

    def keep(self, good: np.ndarray[Any, np.dtype[np.bool_]]) -> Records:
        if good.all():
            return self
        return Records(self.template, self.lane[good], [column[good] for column in self.columns])


def search(held: HeldBytes, run: int) -> tuple[Ints, Ints, Ints, list[Records]]:
    """Return start, end and template of every record that some template matches, in rising order of start."""
    records: list[Records] = []
    found: list[tuple[Ints, Ints, Ints]] = []
    for left in _candidates(held, run):
        poor = 0
        total = len(left)
        while len(left) > total // 1000 and poor < RARE:
            sample = int(left[(poor * 7919) % len(left)])
            poor += 1
            try:
                template = derive(held.data, sample)
            except (Unlike, IndexError):
                continue
            index, ends, columns = match(held, template, left)
            if len(index):
                poor -= len(index) > total // 50
                found.append((left[index], ends, np.full(len(index), len(records), np.int16)))
                records.append(Records(template, left[index], columns))
                rest = np.ones(len(left), np.bool_)
                rest[index] = False
                left = left[rest]
    if not found:
        raise Unlike("no records")
    starts, ends, owner = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.argsort(starts, kind="stable")
    number = np.empty(len(order), starts.dtype)
    number[order] = np.arange(len(order))
    for position, one in enumerate(records):
        one.lane = number[owner == position]
    return starts[order], ends[order], owner[order], records


def _candidates(held: HeldBytes, run: int) -> Iterator[Ints]:
    """Yield possible starts of records for each class that may have many."""
    found = [_references(held.array, at) for at in _find(held, SIGNATURE)]
    place, short, long, low, wide = (np.concatenate(part) for part in zip(*found, strict=True))
    both = np.flatnonzero(short & long)  # an argument byte of a j may look like an h: then others have its class
    short[both[np.isin(wide[both], np.unique(wide[long & ~short]))]] = False
    for width, chosen, number in ((2, short, low), (5, long & ~short, wide)):
        kinds, counts = np.unique(number[chosen], return_counts=True)
        for kind in kinds[np.argsort(-counts, kind="stable")][:KINDS].tolist():
            places = place[chosen & (number == kind)]
            if len(places) >= run:
                yield places - width


def _references(buffer: Bytes, at: Ints) -> tuple[Ints, Any, Any, Bytes, Any]:
    """Return for each signature its position, whether an ``h`` or a ``j`` precedes it, and their arguments."""
    wide = np.zeros(len(at), np.uint32)
    for byte in range(4):
        wide |= buffer[at - 4 + byte].astype(np.uint32) << np.uint32(8 * byte)
    small = at.astype(position_type(buffer))
    return small, buffer[at - 2] == b"h"[0], buffer[at - 5] == b"j"[0], buffer[at - 1], wide


def _find(held: HeldBytes, pattern: bytes) -> Iterator[Ints]:
    """Yield positions of a short pattern in batches: its bytes 0 and 1, or 1 and 2, form an aligned pair."""
    buffer = held.array
    pairs = buffer[: len(buffer) & ~1].view("<u2")
    first, second = (int.from_bytes(pattern[i : i + 2], "little") for i in (0, 1))
    for block in range(0, len(pairs), 1 << 18):
        held.need(2 * block - MARGIN, 2 * (block + (1 << 18)) + MARGIN)
        part = pairs[block : block + (1 << 18)]
        even = (np.flatnonzero(part == first) + block) * 2
        odd = (np.flatnonzero(part == second) + block) * 2 - 1
        at = np.concatenate([even, odd])
        at.sort()
        at = at[(at >= 5) & (at < len(buffer) - len(pattern))]
        for shift, byte in enumerate(pattern):
            at = at[buffer[at + shift] == byte]
        yield at


class Chain:
    """All records by position, and runs of adjacent ones: (start, stop, first record, record after the last)."""

    def __init__(self, starts: Ints, ends: Ints, memo: Ints, run: int) -> None:
        self.starts, self.ends = starts, ends
        self.memo = np.zeros(len(memo) + 1, starts.dtype)  # objects memoized by all records before each
        np.cumsum(memo, out=self.memo[1:])
        breaks = np.flatnonzero(ends[:-1] != starts[1:]) + 1
        first, stop = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(starts)]])
        long = stop - first >= max(run, 3)
        first, stop = first[long], stop[long]
        self.runs: list[tuple[int, int, int, int]] = list(
            zip(starts[first].tolist(), ends[stop - 1].tolist(), first.tolist(), stop.tolist(), strict=True)
        )
