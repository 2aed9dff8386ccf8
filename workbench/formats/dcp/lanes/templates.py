"""Templates of pickled objects: the opcodes that a million records share, separated from what differs.

A pickler writes every record of a class by the same opcodes; numbers, strings and memo indices differ::

    j 5c17    ) 81 94 } 94 (   j 5f17   8c 0c __3_0.distcp 94   j 6017   M e803   …   u b
    class     NEWOBJ, a dict   key      text                    key      int          SETITEMS, BUILD
    literal                    literal  field, literal          literal  field        literal

`derive` runs one record through a symbolic pickle machine, which separates the fields from the structure; records.py
reads the other records by the template. Opcodes are those of CPython 3.11 (``Modules/_pickle.c``), protocol 4 and
later. The memo is counted, so only MEMOIZE may fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.core.pickles.opcodes import COUNTED, FIXED

LITERAL = 16  # bytes compared without moving the pointers
LONGEST = 1024  # tokens of a record; longer ones do not become lanes

#: Opcodes that picklers of protocol 4 write; others are not read.
KNOWN = frozenset(
    b"N\x88\x89)]}\x8f(tuseabR\x81\x92\x93\x94\x85\x86\x87\x90\x91ldKMJhjG\x95.\x8cX\x8d\x8a\x8bCB\x8e\x96"
)
WIDTH = [FIXED[op] if op in KNOWN else -1 for op in range(256)]  # bytes after an opcode
COUNT = [COUNTED[op] if op in KNOWN else 0 for op in range(256)]

INT, REF, TEXT = "int", "ref", "text"
FIELDS = {b"K"[0]: INT, b"M"[0]: INT, b"J"[0]: INT, 0x8A: INT, b"h"[0]: REF, b"j"[0]: REF, 0x8C: TEXT, b"X"[0]: TEXT}


class Unlike(Exception):
    """The bytes are not records that lanes can read; the message is the reason."""


@dataclass(eq=False)
class Value:
    """A value that a record's opcodes create.

    ``kind`` is ``int``, ``ref``, ``text``, ``const``, ``tuple``, ``list``, ``dict``, ``call`` or ``object``.
    ``column`` is the template's column of an int, ref or text (for text, the column of start bytes; the next one has
    the stops). ``parts`` are a tuple's or list's elements, a dict's alternating keys and values, a call's (callable,
    arguments), or an object's (class, state). ``at`` is the number of objects memoized before the token.
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
    """The steps to match, the value they create, and the objects that enter the memo.

    ``steps`` are bytes (literal) or a field's kind. ``slots[i]`` is the i-th object that a lane memoizes. ``literals``
    are memo indices of literal references, each with the smallest number of objects that the lane memoized before it.
    """

    steps: tuple[bytes | str, ...]
    value: Value
    slots: list[Value]
    fields: list[Value]
    literals: dict[int, int]


def token(data: bytes | memoryview, pos: int) -> tuple[int, int]:
    """Return the opcode at ``pos`` and the position after it. Raises IndexError at the end, `Unlike` for others."""
    op = data[pos]
    if (width := WIDTH[op]) >= 0:
        return op, pos + 1 + width
    if count := COUNT[op]:
        return op, pos + 1 + count + int.from_bytes(data[pos + 1 : pos + 1 + count], "little")
    raise Unlike(f"opcode {op:#04x}")


def derive(data: bytes | memoryview, pos: int) -> Template:
    """Return the template of the object with a state dict that starts at byte ``pos``. Raises `Unlike`, IndexError."""
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
    """A symbolic pickle machine. It may not reach below its own stack or change what it did not create."""

    def __init__(self) -> None:
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.slots: list[Value] = []
        self.structural: set[int] = set()
        self.count = 0

    def step(self, op: int, data: bytes | memoryview, pos: int, end: int) -> Value | None:
        """Execute one opcode; return the int, reference or text that it pushes."""
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
            raise Unlike(f"memoizes a {top.kind}")
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
            if key.kind != REF:  # a first use: it happens only once
                raise Unlike(f"a key that is a {key.kind}")
            self.structural.add(key.token)
        self.container("dict").parts.extend(items)

    def extend(self, items: list[Value]) -> None:
        self.container("list").parts.extend(items)

    def reduce(self) -> None:
        call, arguments = self.pop(2)
        if call.kind != REF or arguments.kind != "tuple":
            raise Unlike("calls what it created itself")
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
            raise Unlike("state of something other than the object")
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
