"""The opcodes of pickles: their lengths and stack effects. Derived from ``pickletools.opcodes``.

::

    4b 05              BININT1   5                one byte follows              FIXED
    58 04 00 00 00 …   BINUNICODE 'step'          a length, then its bytes      COUNTED
    63 … 0a … 0a       GLOBAL    'os' 'path'      two lines                     LINES
    86                 TUPLE2    (…, …)           takes two values, pushes one  TAKES
"""

from __future__ import annotations

import pickletools
from typing import Any

FIXED = [-1] * 256  #: bytes that follow the opcode, -1 where that varies or there is no such opcode
COUNTED = [0] * 256  #: bytes of the length that follows
LINES = [0] * 256  #: lines that follow
TAKES: list[tuple[int, int] | None] = [None] * 256  #: values taken and pushed; None where a mark is involved
TO_MARK: dict[int, int] = {}  #: opcodes that take everything since the last mark: how many values they push
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}

for _op in pickletools.opcodes:
    _code, _size = ord(_op.code), _op.arg.n if _op.arg else 0
    if _size == pickletools.UP_TO_NEWLINE:
        LINES[_code] = 2 if _op.name in ("GLOBAL", "INST") else 1
    elif _size < 0:
        COUNTED[_code] = _LENGTHS[_size]
    else:
        FIXED[_code] = _size
    if pickletools.markobject in _op.stack_before:
        TO_MARK[_code] = len(_op.stack_after) - _op.stack_before.index(pickletools.markobject)
    elif _op.name != "MARK":
        TAKES[_code] = len(_op.stack_before), len(_op.stack_after)


def end_of(data: Any, pos: int) -> int:
    """Return the position after the opcode at ``pos`` and its argument, which may be beyond the data.

    Args:
        data: bytes, a ``memoryview``, or an object that is sliced as one.

    Raises:
        IndexError: the data end before the argument's length is known; KeyError: there is no such opcode.
    """
    op = data[pos]
    if (width := FIXED[op]) >= 0:
        return pos + 1 + width
    if count := COUNTED[op]:
        start = pos + 1 + count
        if start > len(data):
            raise IndexError
        return start + int.from_bytes(data[pos + 1 : start], "little")
    if not LINES[op]:
        raise KeyError(op)
    pos += 1
    for _ in range(LINES[op]):
        pos = line_end(data, pos)
    return pos


def line_end(data: Any, pos: int) -> int:
    """Return the position after the line that starts at ``pos``. Raises IndexError if no line ends."""
    for at in range(pos, len(data), 4096):
        found = bytes(data[at : at + 4096]).find(b"\n")
        if found >= 0:
            return at + found + 1
    raise IndexError
