"""Which of a million spans of bytes are equal: numbered by value without making a million Python strings.

::

    rows   a word of 8 bytes after the other, zero after the end    → sum of word × odd constant, top bits = slot
    slot   the last row to write its number there speaks for it     → equal to the row that speaks: numbered
                                                                      otherwise once more with other constants

Equality is compared byte for byte; the hash only proposes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core.lane_match import MARGIN, Bytes, Ints

__all__ = ["distinct"]

BLOCK = 8192
ROUNDS = 12
WIDTHS = (32, 64, 128, MARGIN)  # longer spans are compared by Python

Words = np.ndarray[Any, np.dtype[np.uint64]]


def distinct(buffer: Bytes, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Number the spans ``buffer[start[i]:stop[i]]`` by value.

    Args:
        start, stop: ``(n,)`` byte positions, at least `MARGIN` before the end of the buffer.

    Returns:
        ``(n,)`` numbers, and for each number the position in ``start`` of one span of that value.
    """
    length = stop - start
    speaker = np.empty(len(start), np.int64)
    lower = -1
    for width in WIDTHS:
        todo = np.flatnonzero((length > lower) & (length <= width))
        if len(todo):
            _speak(_Rows(buffer, start, length, width), todo, speaker)
        lower = width
    _one_by_one(buffer, start, stop, np.flatnonzero(length > lower), speaker)
    own = np.flatnonzero(speaker == np.arange(len(start)))
    number = np.empty(len(start), np.int64)
    number[own] = np.arange(len(own))
    return number[speaker], own


class _Rows:
    """Spans as rows of whole words, zero after their ends."""

    def __init__(self, buffer: Bytes, start: Ints, length: Ints, width: int) -> None:
        self.buffer, self.start, self.length, self.width = buffer, start, length, width
        self.view: np.ndarray[Any, Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer.data, 0, (1,))
        ends = np.arange(width + 1)[:, None] - 8 * np.arange(width // 8)  # bytes of a word that are within
        bits = (8 * np.clip(ends, 0, 8)).astype(np.uint64)
        self.masks = np.where(bits == 64, ~np.uint64(0), (np.uint64(1) << (bits % np.uint64(64))) - np.uint64(1))

    def of(self, rows: Ints) -> Words:
        words = self.view[self.start[rows]].view(np.uint64).reshape(len(rows), -1)
        words &= self.masks.take(self.length[rows], axis=0)
        return words


def _speak(rows: _Rows, todo: Ints, speaker: Ints) -> None:
    random = np.random.default_rng(1)
    for _ in range(ROUNDS):
        if not len(todo):
            return
        bits = max(10, min(22, len(todo).bit_length() + 1))
        odd = random.integers(1 << 62, 1 << 63, rows.width // 8, np.uint64) * np.uint64(2) + np.uint64(1)
        slots = np.empty(len(todo), np.uint32)
        for block in range(0, len(todo), BLOCK):
            part = todo[block : block + BLOCK]
            words = rows.of(part)
            words ^= words >> np.uint64(29)
            mixed = (words * odd).sum(axis=1, dtype=np.uint64) + rows.length[part].astype(np.uint64) * odd[0]
            slots[block : block + BLOCK] = (mixed ^ mixed >> np.uint64(32)) * odd[-1] >> np.uint64(64 - bits)
        table = np.zeros(1 << bits, np.int64)
        table[slots] = todo
        chosen = table[slots]
        equal = np.empty(len(todo), np.bool_)
        for block in range(0, len(todo), BLOCK):
            mine, other = todo[block : block + BLOCK], chosen[block : block + BLOCK]
            same = rows.length[mine] == rows.length[other]
            same &= (rows.of(mine) == rows.of(other)).all(axis=1)
            equal[block : block + BLOCK] = same
        speaker[todo[equal]] = chosen[equal]
        todo = todo[~equal]
    _one_by_one(rows.buffer, rows.start, rows.start + rows.length, todo, speaker)


def _one_by_one(buffer: Bytes, start: Ints, stop: Ints, todo: Ints, speaker: Ints) -> None:
    seen: dict[bytes, int] = {}
    for row in todo.tolist():
        speaker[row] = seen.setdefault(bytes(buffer[start[row] : stop[row]]), row)
