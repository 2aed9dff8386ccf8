"""Where a pickle's records may be: every place that some template reads, and the runs of those that touch.

::

    … 94 ( | h 27 ) 81 94 } 94 ( h 2b … u b | h 27 ) 81 94 } 94 ( …      the signature ``) 81 94 } 94 (`` is found,
             └─ class of memo 27                                         the class before it sorts the places

These are guesses: the bytes may lie within a string, or within a record. `core.pickle_lanes` tells which are true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.lane_match import Bytes, Ints, match, position_type
from workbench.core.lane_templates import Template, Unlike, Value, derive

__all__ = ["Chain", "Records", "search"]

RARE = 64  # templates tried for one class without much success before the remaining records are left to the rest
KINDS = 32  # classes tried, of each width of reference
SIGNATURE = b")\x81\x94}\x94("  # an object without arguments, memoised, and the dict of its state


@dataclass(eq=False)
class Records:
    """The records of one template. ``lane`` are their numbers, rising; ``columns`` the fields, ``(n,)`` each.

    ``kind`` is the class as the rest decodes it; ``keys`` maps the state's keys to what they hold.
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


def search(data: bytes | memoryview, buffer: Bytes, run: int) -> tuple[Ints, Ints, Ints, list[Records]]:
    """Every record anywhere that some template reads: start, end, number of its template; rising by start."""
    records: list[Records] = []
    found: list[tuple[Ints, Ints, Ints]] = []
    for left in _candidates(buffer, run):
        poor = 0
        total = len(left)
        while len(left) > total // 1000 and poor < RARE:
            sample = int(left[(poor * 7919) % len(left)])
            poor += 1
            try:
                template = derive(data, sample)
            except (Unlike, IndexError):
                continue
            index, ends, columns = match(buffer, template, left)
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


def _candidates(buffer: Bytes, run: int) -> Iterator[Ints]:
    """Where records may start, for each class that many may be of."""
    found = [_references(buffer, at) for at in _find(buffer, SIGNATURE)]
    place, short, long, low, wide = (np.concatenate(part) for part in zip(*found, strict=True))
    both = np.flatnonzero(short & long)  # an argument byte of a j may be an h: it is a j if others are of that class
    short[both[np.isin(wide[both], np.unique(wide[long & ~short]))]] = False
    for width, chosen, number in ((2, short, low), (5, long & ~short, wide)):
        kinds, counts = np.unique(number[chosen], return_counts=True)
        for kind in kinds[np.argsort(-counts, kind="stable")][:KINDS].tolist():
            places = place[chosen & (number == kind)]
            if len(places) >= run:
                yield places - width


def _references(buffer: Bytes, at: Ints) -> tuple[Ints, Any, Any, Bytes, Any]:
    """What may stand before each signature: its place; is there an ``h``, a ``j``; and the numbers of these."""
    wide = np.zeros(len(at), np.uint32)
    for byte in range(4):
        wide |= buffer[at - 4 + byte].astype(np.uint32) << np.uint32(8 * byte)
    small = at.astype(position_type(buffer))
    return small, buffer[at - 2] == b"h"[0], buffer[at - 5] == b"j"[0], buffer[at - 1], wide


def _find(buffer: Bytes, pattern: bytes) -> Iterator[Ints]:
    """Positions of a short pattern, some at a time: its bytes 0 and 1, or 1 and 2, lie in an aligned pair."""
    pairs = buffer[: len(buffer) & ~1].view("<u2")
    first, second = (int.from_bytes(pattern[i : i + 2], "little") for i in (0, 1))
    for block in range(0, len(pairs), 1 << 18):
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
    """All records by position, and the runs of those that touch: (start, stop, first record, record after the last)."""

    def __init__(self, starts: Ints, ends: Ints, memo: Ints, run: int) -> None:
        self.starts, self.ends = starts, ends
        self.memo = np.zeros(len(memo) + 1, starts.dtype)  # objects memoised by all records before each
        np.cumsum(memo, out=self.memo[1:])
        breaks = np.flatnonzero(ends[:-1] != starts[1:]) + 1
        first, stop = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(starts)]])
        long = stop - first >= max(run, 3)
        first, stop = first[long], stop[long]
        self.runs: list[tuple[int, int, int, int]] = list(
            zip(starts[first].tolist(), ends[stop - 1].tolist(), first.tolist(), stop.tolist(), strict=True)
        )
