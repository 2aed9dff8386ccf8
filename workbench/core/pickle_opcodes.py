"""Pickle opcodes that push one value, by how much follows them; and how a reader of opcodes gives up.

::

    4b 05              BININT1   5                one byte follows
    58 04 00 00 00 …   BINUNICODE 'step'          a length in four bytes, then so many
    63 … 0a … 0a       GLOBAL    'os' 'path'      two lines
    86                 TUPLE2    (…, …)           takes two values off the stack

Read from CPython 3.11 (``Lib/pickletools.py``, ``Modules/_pickle.c``).
"""

from __future__ import annotations

__all__ = ["EXTENSION", "OUT_OF_BAND", "ROWS", "SKIP", "TUPLE", "WIDTH", "Ends", "Refused"]

# fmt: off

LEAVES = {b"N": 0, b"\x88": 0, b"\x89": 0, b"K": 1, b"M": 2, b"J": 4, b"G": 8, b")": 0, b"]": 0, b"}": 0}
COUNTED = {b"U": 1, b"C": 1, b"\x8c": 1, b"\x8a": 1, b"X": 4, b"T": 4, b"B": 4, b"\x8b": 4, b"\x8d": 8,
           b"\x8e": 8, b"\x96": 8}
LINES = {b"I": 1, b"L": 1, b"F": 1, b"S": 1, b"V": 1, b"P": 1, b"c": 2}
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}  # these take so many values instead
# fmt: on
SKIP = [-1] * 256
WIDTH = [0] * 256
ROWS = [0] * 256
TUPLE = [0] * 256
for _table, _to in ((LEAVES, SKIP), (COUNTED, WIDTH), (LINES, ROWS), (TUPLES, TUPLE)):
    for _op, _value in _table.items():
        _to[_op[0]] = _value
EXTENSION = "an object of the process's own extension registry"
OUT_OF_BAND = "an out-of-band buffer, which is not in the file"


class Refused(Exception):
    """Where (from the start of the pickle), why, and whether it is an attack rather than damage."""


class Ends(Exception):
    """The data end within the opcode at this place."""
