"""Templates of pickled objects: the opcodes that a million records share, matched against all of them at once.

A pickler writes every record of a class by the same opcodes; numbers, strings and memo indices differ::

    j 5c17    ) 81 94 } 94 (   j 5f17   8c 0c __3_0.distcp 94   j 6017   M e803   …   u b
    class     NEWOBJ, a dict   key      text                    key      int          SETITEMS, BUILD
    literal                    literal  field, literal          literal  field        literal

`derive` runs one record through a symbolic pickle machine, which tells the fields from the structure; `match` reads
the records at many positions together, one lane each: a literal must be equal byte for byte, a field must be one of its
opcodes, and moves the lane's pointer on by its own width. A lane that matches *is* that sequence of opcodes, whatever
wrote it. Opcodes as in CPython 3.11 (``Modules/_pickle.c``), protocol 4 and later; the memo is counted, so only
MEMOIZE fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Bytes", "Ints", "Template", "Unlike", "Value", "derive", "match", "position_type", "token"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK = 8192  # lanes together: their bytes and columns stay in the processor's cache
LITERAL = 16  # bytes compared without moving the pointers
LONGEST = 1024  # tokens of a record; longer ones are no lanes
MARGIN = 256  # a lane ends so far before the end of the buffer that none of its reads was clipped

# opcode → the bytes after it
WIDTHS = {
    b"N": 0, b"\x88": 0, b"\x89": 0, b")": 0, b"]": 0, b"}": 0, b"\x8f": 0, b"(": 0, b"t": 0, b"u": 0, b"s": 0, b"e": 0,
    b"a": 0, b"b": 0, b"R": 0, b"\x81": 0, b"\x92": 0, b"\x93": 0, b"\x94": 0, b"\x85": 0, b"\x86": 0, b"\x87": 0,
    b"\x90": 0, b"\x91": 0, b"l": 0, b"d": 0, b"K": 1, b"M": 2, b"J": 4, b"h": 1, b"j": 4, b"G": 8, b"\x95": 8, b".": 0,
}  # fmt: skip
COUNTED = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"\x8a": 1, b"\x8b": 4, b"C": 1, b"B": 4, b"\x8e": 8, b"\x96": 8}
WIDTH = [-1] * 256
COUNT = [0] * 256
for _op, _width in WIDTHS.items():
    WIDTH[_op[0]] = _width
for _op, _width in COUNTED.items():
    COUNT[_op[0]] = _width

INT, REF, TEXT = "int", "ref", "text"
FIELDS = {b"K"[0]: INT, b"M"[0]: INT, b"J"[0]: INT, 0x8A: INT, b"h"[0]: REF, b"j"[0]: REF, 0x8C: TEXT, b"X"[0]: TEXT}
_STEP = {
    kind: np.array([WIDTH[op] + 1 if FIELDS.get(op) == kind and op != 0x8A else 0 for op in range(256)])
    for kind in (INT, REF)
}
_MASK = np.array([(1 << 8 * WIDTH[op]) - 1 if FIELDS.get(op) in (INT, REF) and op != 0x8A else 0 for op in range(256)])


class Unlike(Exception):
    """The bytes are no record that lanes can read; its cause is the reason."""


@dataclass(eq=False)
class Value:
    """What opcodes make of a record.

    ``kind`` is ``int``, ``ref``, ``text``, ``const``, ``tuple``, ``list``, ``dict``, ``call`` or ``object``.
    ``column`` numbers the template's columns of an int, ref or text (text: where its bytes start, the next one:
    where they stop). ``parts`` are a tuple's or list's elements, a dict's keys and values in turn, a call's (callable,
    arguments), an object's (class, state). ``at`` is the count of memoised objects before the token.
    """

    kind: str
    parts: list[Value] = field(default_factory=list)
    token: int = -1
    number: int = 0
    at: int = 0
    column: int = -1
    constant: object = None


@dataclass(eq=False)
class Template:
    """The steps to match, what they make, and which objects enter the memo.

    ``steps`` are bytes (literal) or a field's kind. ``slots[i]`` is the i-th object that a lane memoises. ``literals``
    are the memo indices of literal references, each with the least count of objects memoised by the lane before it.
    """

    steps: tuple[bytes | str, ...]
    value: Value
    slots: list[Value]
    fields: list[Value]
    literals: dict[int, int]


def token(data: bytes | memoryview, pos: int) -> tuple[int, int]:
    """Opcode at ``pos`` and the position after its argument. Raises IndexError at the end, `Unlike` for others."""
    op = data[pos]
    if (width := WIDTH[op]) >= 0:
        return op, pos + 1 + width
    if count := COUNT[op]:
        return op, pos + 1 + count + int.from_bytes(data[pos + 1 : pos + 1 + count], "little")
    raise Unlike(f"opcode {op:#04x}")


def derive(data: bytes | memoryview, pos: int) -> Template:
    """The template of the object with a state dict that starts at byte ``pos``. Raises `Unlike`, IndexError."""
    machine = _Machine()
    spans: list[tuple[int, int, Value | None]] = []
    for _ in range(LONGEST):
        op, end = token(data, pos)
        made = machine.step(op, data, pos, end)
        spans.append((pos, end, made))
        pos = end
        if op == b"b"[0] and len(machine.stack) == 1 and not machine.marks:
            break
    else:
        raise Unlike("too long")
    value = machine.stack[0]
    steps: list[bytes | str] = []
    fields: list[Value] = []
    literals: dict[int, int] = {}
    run = b""
    for start, end, made in spans:
        if made is None or (made.kind == REF and made.token in machine.structural):
            run += bytes(data[start:end])
            if made is not None:
                literals[made.number] = min(made.at, literals.get(made.number, made.at))
        else:
            steps.extend(_literal(run))
            run = b""
            steps.append(made.kind)
            made.column = sum(2 if one.kind == TEXT else 1 for one in fields)
            fields.append(made)
    steps.extend(_literal(run))
    return Template(tuple(steps), value, machine.slots, fields, literals)


def _literal(run: bytes) -> list[bytes]:
    return [run[i : i + LITERAL] for i in range(0, len(run), LITERAL)]


class _Machine:
    """A pickle machine of symbols. It may not reach below its own stack nor change what it did not make."""

    def __init__(self) -> None:
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.slots: list[Value] = []
        self.structural: set[int] = set()
        self.count = 0

    def step(self, op: int, data: bytes | memoryview, pos: int, end: int) -> Value | None:
        """Take one opcode; returns the int, reference or text that it pushes."""
        self.count += 1
        if op in FIELDS:
            made = Value(FIELDS[op], token=self.count, at=len(self.slots))
            if made.kind == REF:
                made.number = int.from_bytes(data[pos + 1 : end], "little")
            self.stack.append(made)
            return made
        action = _ACTIONS.get(op)
        if action is None:
            raise Unlike(f"opcode {op:#04x}")
        action(self)
        return None

    def pop(self, count: int) -> list[Value]:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise Unlike("reaches below its own stack")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def to_mark(self) -> list[Value]:
        if not self.marks:
            raise Unlike("no mark of its own")
        base = self.marks.pop()
        taken = self.stack[base:]
        del self.stack[base:]
        return taken

    def push(self, kind: str, parts: list[Value] | None = None, constant: object = None) -> None:
        self.stack.append(Value(kind, parts or [], at=len(self.slots), constant=constant))

    def memoize(self) -> None:
        [top] = self.pop(1)
        if top.kind not in (TEXT, "tuple", "call", "dict", "list", "object"):
            raise Unlike(f"memoises a {top.kind}")
        self.stack.append(top)
        self.slots.append(top)

    def container(self, kind: str) -> Value:
        [top] = self.pop(1)
        if top.kind != kind:
            raise Unlike(f"adds to a {top.kind}")
        self.stack.append(top)
        return top

    def set_items(self, items: list[Value]) -> None:
        if len(items) % 2:
            raise Unlike("a key without a value")
        for key in items[::2]:
            if key.kind != REF:  # a first use: it happens once, and is no lane
                raise Unlike(f"a key that is a {key.kind}")
            self.structural.add(key.token)
        self.container("dict").parts.extend(items)

    def extend(self, items: list[Value]) -> None:
        self.container("list").parts.extend(items)

    def reduce(self) -> None:
        call, arguments = self.pop(2)
        if call.kind != REF or arguments.kind != "tuple":
            raise Unlike("calls what it made itself")
        self.structural.add(call.token)
        self.push("call", [call, *arguments.parts])

    def new(self) -> None:
        kind, arguments = self.pop(2)
        if kind.kind != REF or arguments.kind != "tuple" or arguments.parts:
            raise Unlike("an object with arguments")
        self.structural.add(kind.token)
        self.push("object", [kind])

    def build(self) -> None:
        made, state = self.pop(2)
        if made.kind != "object" or len(made.parts) != 1 or state.kind != "dict" or self.stack:
            raise Unlike("state of something else than the object")
        made.parts.append(state)
        self.stack.append(made)


_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    b"N"[0]: lambda m: m.push("const"),
    0x88: lambda m: m.push("const", constant=True),
    0x89: lambda m: m.push("const", constant=False),
    b")"[0]: lambda m: m.push("tuple"),
    b"]"[0]: lambda m: m.push("list"),
    b"}"[0]: lambda m: m.push("dict"),
    b"("[0]: _Machine.mark,
    b"t"[0]: lambda m: m.push("tuple", m.to_mark()),
    0x85: lambda m: m.push("tuple", m.pop(1)),
    0x86: lambda m: m.push("tuple", m.pop(2)),
    0x87: lambda m: m.push("tuple", m.pop(3)),
    b"u"[0]: lambda m: m.set_items(m.to_mark()),
    b"s"[0]: lambda m: m.set_items(m.pop(2)),
    b"e"[0]: lambda m: m.extend(m.to_mark()),
    b"a"[0]: lambda m: m.extend(m.pop(1)),
    b"R"[0]: _Machine.reduce,
    0x81: _Machine.new,
    b"b"[0]: _Machine.build,
    0x94: _Machine.memoize,
}


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
