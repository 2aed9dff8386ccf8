"""Pickles that name classes of other libraries, written without importing them.

:func:`dumps` writes the opcodes that CPython's pickler would write for the real objects, memo included, in one frame.
Equal texts and equal globals are written once, bytes every time; anything else is written again unless it is the same
object. Rows after the first share the bytes around the holes of their form::

    form   Instance(CHUNK, {"offset": Hole(0), "length": Hole(1)})
    row    │ h 29 ) 81 94 } 94 ( h 2c │ K 07 │ h 2d │ M 00 10 │ u b │      static │ hole │ static │ hole │ static

Source: CPython 3.11 ``Lib/pickle.py``, ``Modules/_pickle.c`` (batches of 1,000 items, one-item forms).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from workbench.export.writers.pickle_tree import (
    Global,
    Hole,
    Instance,
    Opcodes,
    Pairs,
    Persistent,
    PickleCall,
    PickleForm,
    PickleRow,
    filled,
)

BATCH = 1000  #: items between a MARK and its SETITEMS or APPENDS
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


def dumps(value: Any, protocol: int = 4) -> bytes:
    """Return the pickle of a tree of these objects, numbers, strings, bytes, tuples, lists and dicts.

    Args:
        protocol: 2 or 4.

    Raises:
        TypeError: the tree contains another type; or bytes or rows, in protocol 2.
    """
    writer = _Writer(protocol)
    writer.save(value)
    writer.out += pickle.STOP
    head = pickle.PROTO + bytes([protocol])
    if protocol >= 4:
        head += pickle.FRAME + struct.pack("<Q", len(writer.out))
    return head + writer.out


class _Writer:
    def __init__(self, protocol: int) -> None:
        self.out = bytearray()
        self._protocol = protocol
        self._memo: dict[Any, int] = {}  # texts and globals by value, others by id: the tree keeps them alive
        self._count = 0  # objects in the reader's memo
        self._parts: dict[PickleForm, _Parts] = {}
        self._cuts: list[tuple[int, int, int]] = []  # of the current form: byte, memo, number of the hole
        self._first: dict[PickleForm, Any] = {}  # its first row, kept alive
        self._by_type: dict[type, Callable[[Any], None]] = {
            type(None): lambda value: self._add(pickle.NONE),
            bool: lambda value: self._add(pickle.NEWTRUE if value else pickle.NEWFALSE),
            int: lambda value: self._add(_int(value)),
            float: lambda value: self._add(pickle.BINFLOAT + struct.pack(">d", value)),
            str: self._text,
            bytes: self._bytes,
            tuple: self._tuple,
            list: self._list,
            dict: self._dict,
            Pairs: self._pairs,
            Global: self._global,
            PickleCall: self._call,
            Instance: self._instance,
            Persistent: self._persistent,
            Opcodes: lambda value: self._add(value.data),
            PickleRow: self._row,
            Hole: lambda value: self._cuts.append((len(self.out), self._count, value.number)),
        }

    def save(self, value: Any) -> None:
        write = self._by_type.get(type(value))
        if write is None:
            raise TypeError(f"a {type(value).__name__} cannot be written into this pickle")
        write(value)

    def _add(self, opcodes: bytes) -> None:
        self.out += opcodes

    # ---- the memo ----

    def _known(self, key: Any) -> bool:
        """Refer to an object that was written before, if it was."""
        at = self._memo.get(key)
        if at is None:
            return False
        self.out += pickle.BINGET + bytes([at]) if at < 256 else pickle.LONG_BINGET + struct.pack("<L", at)
        return True

    def _put(self, key: Any) -> None:
        at = self._memo[key] = self._count
        self._count += 1
        if self._protocol >= 4:
            self.out += pickle.MEMOIZE
        else:
            self.out += pickle.BINPUT + bytes([at]) if at < 256 else pickle.LONG_BINPUT + struct.pack("<L", at)

    # ---- values ----

    def _text(self, value: str) -> None:
        if self._known(value):
            return
        data = value.encode("utf-8", "surrogatepass")
        if self._protocol >= 4 and len(data) < 256:
            self.out += pickle.SHORT_BINUNICODE + bytes([len(data)]) + data
        else:
            self.out += pickle.BINUNICODE + struct.pack("<L", len(data)) + data
        self._put(value)

    def _bytes(self, value: bytes) -> None:
        if self._protocol < 4:
            raise TypeError("bytes need protocol 4")
        short = len(value) < 256
        head = (
            pickle.SHORT_BINBYTES + bytes([len(value)]) if short else pickle.BINBYTES8 + struct.pack("<Q", len(value))
        )
        self.out += head + value
        self._put(id(value))

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out += pickle.EMPTY_TUPLE
            return
        if self._known(id(value)):
            return
        if len(value) > 3:
            self.out += pickle.MARK
        for one in value:
            self.save(one)
        self.out += _TUPLES[len(value)] if len(value) <= 3 else pickle.TUPLE
        self._put(id(value))

    def _list(self, value: list[Any]) -> None:
        if self._known(id(value)):
            return
        self.out += pickle.EMPTY_LIST
        self._put(id(value))
        self._batches(value, 1, pickle.APPEND, pickle.APPENDS)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._mapping(value, value.items())

    def _pairs(self, value: Pairs) -> None:
        self._mapping(value, value.items)

    def _mapping(self, value: object, items: Iterable[tuple[Any, Any]]) -> None:
        if self._known(id(value)):
            return
        self.out += pickle.EMPTY_DICT
        self._put(id(value))
        self._batches([one for pair in items for one in pair], 2, pickle.SETITEM, pickle.SETITEMS)

    def _batches(self, flat: Sequence[Any], width: int, single: bytes, several: bytes) -> None:
        """Write items of ``width`` values each into the container that was begun."""
        if len(flat) == width:
            for one in flat:
                self.save(one)
            self.out += single
            return
        for at in range(0, len(flat), BATCH * width):
            self.out += pickle.MARK
            for one in flat[at : at + BATCH * width]:
                self.save(one)
            self.out += several

    # ---- names ----

    def _global(self, value: Global) -> None:
        if self._known(value):
            return
        if self._protocol >= 4:
            self._text(value.module)
            self._text(value.name)
            self.out += pickle.STACK_GLOBAL
        else:
            self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        self._put(value)

    def _call(self, value: PickleCall) -> None:
        if self._known(id(value)):
            return
        self._global(value.function)
        self._tuple(value.args)
        self.out += pickle.REDUCE
        self._put(id(value))

    def _instance(self, value: Instance) -> None:
        if self._known(id(value)):
            return
        self._global(value.cls)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        self._put(id(value))
        if value.state is not None:
            self.save(value.state)
            self.out += pickle.BUILD

    def _persistent(self, value: Persistent) -> None:
        self._tuple(value.id)
        self.out += pickle.BINPERSID

    # ---- rows ----

    def _row(self, row: PickleRow) -> None:
        if self._protocol < 4:
            raise TypeError("rows need protocol 4, whose memo is counted, not numbered")
        if self._known(id(row)):
            return
        form = row.form
        if form not in self._first:  # in full: it puts the names into the memo
            whole = self._first[form] = filled(form.tree, row.values)
            self.save(whole)
            self._memo[id(row)] = self._memo[id(whole)]
            return
        if form not in self._parts:
            self._parts[form] = self._cut(form.tree)
        parts = self._parts[form]
        self._memo[id(row)] = self._count + parts.root
        for part in parts.before:
            self.out += part.opcodes
            self._count += part.memos
            value = row.values[part.number]
            if type(value) is str:
                self._text(value)
            else:
                self.out += _int(value)  # type: ignore[arg-type]
        self.out += parts.rest
        self._count += parts.memos

    def _cut(self, tree: Any) -> _Parts:
        """Cut a form into parts; nothing is written."""
        begin, known, count = len(self.out), dict(self._memo), self._count
        self.save(tree)
        before = []
        at, memos = begin, count
        for stop, then, number in self._cuts:
            before.append(_Part(bytes(self.out[at:stop]), then - memos, number))
            at, memos = stop, then
        parts = _Parts(before, bytes(self.out[at:]), self._count - memos, self._memo[id(tree)] - count)
        del self.out[begin:]
        self._memo, self._count, self._cuts = known, count, []
        return parts


class _Part(NamedTuple):
    """Bytes before a hole, objects that they put into the memo, and which value follows."""

    opcodes: bytes
    memos: int
    number: int


class _Parts(NamedTuple):
    """A form: the bytes before each hole and after the last, and the place of its own object in the memo."""

    before: list[_Part]
    rest: bytes
    memos: int
    root: int


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + bytes([value])
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + struct.pack("<H", value)
    if -1 << 31 <= value < 1 << 31:
        return pickle.BININT + struct.pack("<l", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data
