"""One template of pickled objects matched against the records at many positions at once, one lane each.

::

    step          lane 0                lane 1                lane 2
    literal       … ) 81 94 } 94 (      … ) 81 94 } 94 (      … ) 81 94 } 81       not equal: the lane is gone
    int           K 05        ▸ 5       M e803      ▸ 1000                         each moves on by its own width
    text          8c 02 w0    ▸ span    8c 03 w10   ▸ span

A literal must be equal byte for byte, a field must be one of its opcodes. A lane that comes to the end *is* that
sequence of opcodes, whatever wrote it. Templates: `core.lane_templates`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core.lane_templates import FIELDS, INT, LITERAL, REF, TEXT, WIDTH, Template

__all__ = ["Bytes", "Ints", "match", "position_type"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK = 8192  # lanes together: their bytes and columns stay in the processor's cache
MARGIN = 256  # a lane ends so far before the end of the buffer that none of its reads was clipped
_STEP = {
    kind: np.array([WIDTH[op] + 1 if FIELDS.get(op) == kind and op != 0x8A else 0 for op in range(256)])
    for kind in (INT, REF)
}
_MASK = np.array([(1 << 8 * WIDTH[op]) - 1 if FIELDS.get(op) in (INT, REF) and op != 0x8A else 0 for op in range(256)])


def position_type(buffer: Bytes) -> type[np.signedinteger[Any]]:
    """The integers that byte positions fit in: three million records have tens of millions of them."""
    return np.int32 if len(buffer) < 1 << 31 else np.int64


def match(buffer: Bytes, template: Template, starts: Ints) -> tuple[Ints, Ints, list[Ints]]:
    """Which of the records at ``starts`` are of this template.

    Returns:
        Positions in ``starts`` of the ``(n,)`` that are, the byte after each, and the fields' columns, ``(n,)`` each.
    """
    shifted = [buffer[i:] for i in range(LITERAL)]
    place = position_type(buffer)
    kinds = [kind for one in template.fields for kind in ((place, place) if one.kind == TEXT else (np.int64,))]
    out: list[Ints] = [np.empty(len(starts), kind) for kind in (place, place, *kinds)]  # pages unused are never touched
    count = 0
    for first in range(0, len(starts), BLOCK):
        lanes = _Lanes(shifted, starts[first : first + BLOCK].astype(np.int64), first)
        for step in template.steps:
            if isinstance(step, bytes):
                lanes.literal(step)
            elif step == TEXT:
                lanes.text()
            else:
                lanes.number(step)
            if not len(lanes.pos):
                break
        lanes.keep(lanes.pos <= len(buffer) - MARGIN)
        if len(lanes.pos):
            for column, part in zip(out, (lanes.index, lanes.pos, *lanes.columns), strict=True):
                column[count : count + len(part)] = part
            count += len(lanes.pos)
    index, ends, *columns = (column[:count] if 2 * count > len(starts) else column[:count].copy() for column in out)
    return index, ends, columns


class _Lanes:
    """One block of lanes: where each reads next, and the fields read so far. Reads are clipped to the buffer."""

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
        """LONG1 of at most eight bytes, two's complement."""
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
