"""What is checked before and while a pickle is decoded: every opcode of the stream, and every argument of
plain constructors.

::

    80 02  7d  71 00  58 04 00 00 00 's' 't' 'e' 'p'  4b 05  73  2e
    PROTO  {   put 0  string of 4 bytes               5      set .     `_follow` does this with sizes

CPython 3.11's C unpickler trusts its input in places where that costs the process (``Modules/_pickle.c``): a
memo index is an index into an array that is grown and filled up to it (``LONG_BINPUT 0x7fffffff`` is 16 GB
from nine bytes), the extension registry hands out objects without asking ``find_class``, and a dict key may
be a tuple that holds itself twice, forty times over: hashing it visits 2**40 elements, or overflows the C
stack when it nests deeply instead.

Constructors here take only the argument types that real picklers emit: ``bytearray(10**12)``,
``tuple(range(10**12))`` and ``str`` of a list with 2**60 paths are all one REDUCE away. They raise TypeError
or ValueError.
"""

from __future__ import annotations

import codecs
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from workbench.core.stubs import (
    NumpyArray,
    NumpyDType,
    PickledDict,
    check_shape,
    opaque_class,
    raw_bytes,
    short,
)
from workbench.errors import CorruptError, TruncatedError, UnsafeError

__all__ = ["WALK_LIMIT", "walk"]

WALK_LIMIT = 2 << 20  # bytes that `_follow` simulates: 0.1 to 0.2 s a MiB
MARK_LIMIT = 1000  # open marks: real picklers nest as deep as Python recurses
SET_LIMIT = 250_000  # an empty set takes 216 bytes for its one; nothing else comes near
KEY_LIMIT = 10_000  # elements visited by hashing one key
HASH_BUDGET = 1000  # the same for the arguments of set(), dict() … below
HUGE = 1 << 40  # sizes saturate here

# opcode → how much follows it: so many bytes, a length in so many bytes, so many lines. All push one value.
# fmt: off
LEAVES = {b"N": 0, b"\x88": 0, b"\x89": 0, b"K": 1, b"M": 2, b"J": 4, b"G": 8, b")": 0, b"]": 0, b"}": 0}
COUNTED = {b"U": 1, b"C": 1, b"\x8c": 1, b"\x8a": 1, b"X": 4, b"T": 4, b"B": 4, b"\x8b": 4, b"\x8d": 8,
           b"\x8e": 8, b"\x96": 8}
LINES = {b"I": 1, b"L": 1, b"F": 1, b"S": 1, b"V": 1, b"P": 1, b"c": 2}
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}  # these take so many values instead
# fmt: on
_SKIP = [-1] * 256
_WIDTH = [0] * 256
_ROWS = [0] * 256
_TUPLE = [0] * 256
for _table, _to in ((LEAVES, _SKIP), (COUNTED, _WIDTH), (LINES, _ROWS), (TUPLES, _TUPLE)):
    for _op, _value in _table.items():
        _to[_op[0]] = _value


def walk(view: memoryview, offset: int, what: str) -> int:
    """Read the opcodes of the pickle at ``offset``; returns the offset after its STOP.

    Up to `WALK_LIMIT` bytes by simulation (`_follow`): opcodes known and of protocol 5 or less, arguments
    inside the data, every memo index at most the number of opcodes so far, the stack never short, open marks
    and sets bounded, the cost of hashing keys bounded, no extension registry, no out-of-band buffer.

    A longer stream is skimmed from end to end by a regular expression (`_skim`, about 10 ns a byte, a
    fraction of what decoding takes): the same but for stack, marks and keys. What it could still do is to
    stop the process with keys of nested tuples; run code it cannot, since `find_class` hands out inert
    stand-ins whatever the length.

    Raises:
        CorruptError: contradicts itself or is no pickle; TruncatedError: ends early; UnsafeError: a bomb.
    """
    try:
        stop = len(view)
        if stop - offset > WALK_LIMIT:  # a long pickle, or a short one before other bytes
            stop = _skim(view, offset)
        if stop - offset > WALK_LIMIT:
            return stop
        return offset + _follow(bytes(view[offset:stop]))
    except _Ends as end:
        raise TruncatedError(
            f"{what} ends at byte {len(view):,}, within the opcode at byte {offset + end.args[0]:,} of a "
            "pickle that starts at byte "
            f"{offset:,}; the file is cut short or no pickle"
        ) from None
    except _Refused as refusal:
        at, reason, unsafe = refusal.args
        kind, hint = (
            (UnsafeError, "it was not decoded")
            if unsafe
            else (CorruptError, "the file is damaged or no pickle")
        )
        raise kind(f"{what}, byte {offset + at:,}: {reason}; {hint}") from None


_EXTENSION = "an object of the process's own extension registry"
_OUT_OF_BAND = "an out-of-band buffer, which is not in the file"


class _Refused(Exception):
    """Where (from the start of the pickle), why, and whether it is an attack rather than damage."""


class _Ends(Exception):
    """The data end within the opcode at this place."""


def _follow(data: bytes) -> int:
    """Simulate the stack machine with sizes: a value is the number of elements that hashing it would
    visit.
    """
    pos = ops = work = sets = 0
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    at = fence = 0  # opcodes may not reach below the last mark
    push, length = stack.append, len(data)
    skip, width_of = _SKIP, _WIDTH
    work_limit = 64 * length + 1_000_000
    try:
        while True:
            op = data[pos]  # IndexError: the stream ends without STOP
            at = pos
            pos += 1
            ops += 1
            if (step := skip[op]) >= 0:
                pos += step
                push(1)
            elif width := width_of[op]:
                count = data[pos] if width == 1 else int.from_bytes(data[pos : pos + width], "little")
                pos += width + count
                if pos > length:
                    raise _Ends(at)
                push(1)
            elif op == 0x94 or op == 0x71 or op == 0x72:  # MEMOIZE, BINPUT, LONG_BINPUT
                if op == 0x94:
                    index = len(memo)
                elif op == 0x71:
                    index = data[pos]
                    pos += 1
                else:
                    index = data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16 | data[pos + 3] << 24
                    pos += 4
                if index > ops:
                    raise _Refused(at, f"memo index {index:,} after {ops:,} opcodes", True)
                if len(stack) <= fence:
                    raise _Refused(at, "nothing to memoise", False)
                memo[index] = stack[-1]
            elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if op == 0x68:
                    index = data[pos]
                    pos += 1
                else:
                    index = data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16 | data[pos + 3] << 24
                    pos += 4
                if index not in memo:
                    raise _Refused(at, f"memo index {index:,} was never stored", False)
                push(memo[index])
            elif op == 0x28:  # MARK
                marks.append(len(stack))
                fence = len(stack)
                if len(marks) > MARK_LIMIT:
                    raise _Refused(at, f"more than {MARK_LIMIT:,} open marks", True)
            elif count := _TUPLE[op]:
                if len(stack) - fence < count:
                    raise _Refused(at, "a tuple of more elements than there are", False)
                size = 1 + (stack[-1] if count == 1 else sum(stack[-count:]))
                del stack[-count:]
                push(size if size < HUGE else HUGE)
            elif op in _POPS:  # REDUCE, NEWOBJ, BUILD, APPEND … : so many off, and what stays
                need, made = _POPS[op]
                if len(stack) - fence < need:
                    raise _Refused(at, "the stack is too short", False)
                if op == 0x73:  # SETITEM hashes its key
                    work = _charge(work, stack[-2:-1], work_limit, at)
                if made:  # the result may hold its arguments
                    stack[-need] = max(stack[-need:])
                del stack[len(stack) - need + 1 :]
            elif op in _TO_MARK:
                if not marks:
                    raise _Refused(at, "no mark", False)
                base = marks.pop()
                fence = marks[-1] if marks else 0
                items = stack[base:]
                del stack[base:]
                if op == 0x69:  # INST: two lines
                    pos = _line_end(data, _line_end(data, pos))
                if op in (0x75, 0x64):  # SETITEMS, DICT
                    work = _charge(work, items[::2], work_limit, at)
                elif op in (0x90, 0x91):  # ADDITEMS, FROZENSET
                    work = _charge(work, items, work_limit, at)
                if op in _ONTO:
                    if len(stack) <= fence:
                        raise _Refused(at, "items without a container", False)
                elif op != 0x31:  # POP_MARK leaves nothing
                    push(min(1 + sum(items), HUGE) if op not in (0x6C, 0x64) else 1)
            elif op == 0x8F:  # EMPTY_SET
                sets += 1
                if sets > SET_LIMIT:
                    raise _Refused(at, f"more than {SET_LIMIT:,} sets", True)
                push(1)
            elif op == 0x2E:  # STOP
                if len(stack) <= fence:
                    raise _Refused(at, "STOP on an empty stack", False)
                return pos
            elif op == 0x95 or op == 0x80:  # FRAME, PROTO
                if op == 0x95:
                    if int.from_bytes(data[pos : pos + 8], "little") > length - pos - 8:
                        raise _Ends(at)
                    pos += 8
                else:
                    if data[pos] > 5:
                        raise _Refused(at, f"pickle protocol {data[pos]} is newer than 5", False)
                    pos += 1
            elif rows := _ROWS[op]:
                for _ in range(rows):
                    pos = _line_end(data, pos)
                push(1)
            elif op == 0x67 or op == 0x70:  # GET, PUT: decimal
                start, pos = pos, _line_end(data, pos)
                digits = data[start : pos - 1]
                if not digits.isdigit() or len(digits) > 19:
                    raise _Refused(at, "a memo index that is no number", False)
                index = int(digits)
                if op == 0x67:
                    if index not in memo:
                        raise _Refused(at, f"memo index {index:,} was never stored", False)
                    push(memo[index])
                else:
                    if index > ops:
                        raise _Refused(at, f"memo index {index:,} after {ops:,} opcodes", True)
                    if len(stack) <= fence:
                        raise _Refused(at, "nothing to memoise", False)
                    memo[index] = stack[-1]
            elif op == 0x30:  # POP: a mark counts as an element
                if marks and len(stack) == fence:
                    marks.pop()
                    fence = marks[-1] if marks else 0
                elif len(stack) > fence:
                    stack.pop()
                else:
                    raise _Refused(at, "the stack is too short", False)
            elif op == 0x32:  # DUP
                if len(stack) <= fence:
                    raise _Refused(at, "the stack is too short", False)
                push(stack[-1])
            elif op in (0x82, 0x83, 0x84):
                raise _Refused(at, _EXTENSION, True)
            elif op in (0x97, 0x98):
                raise _Refused(at, _OUT_OF_BAND, False)
            else:
                raise _Refused(at, f"no pickle opcode {op:#04x}", False)
    except IndexError:
        raise _Ends(at) from None


# REDUCE, NEWOBJ, NEWOBJ_EX, STACK_GLOBAL make one of several; BINPERSID one of one; BUILD, APPEND, SETITEM
# leave the container
_POPS = {
    0x52: (2, 1),
    0x81: (2, 1),
    0x92: (3, 1),
    0x93: (2, 1),
    0x51: (1, 0),
    0x62: (2, 0),
    0x61: (2, 0),
    0x73: (3, 0),
}
# TUPLE, LIST, DICT, FROZENSET, OBJ, INST, POP_MARK make one (or none) of all since the mark; APPENDS,
# SETITEMS, ADDITEMS add them
_ONTO = {0x65, 0x75, 0x90}
_TO_MARK = {0x74, 0x6C, 0x64, 0x91, 0x6F, 0x69, 0x31} | _ONTO


def _line_end(data: bytes, pos: int) -> int:
    end = data.find(b"\n", pos)
    if end < 0:
        raise IndexError
    return end + 1


def _counted(zeros: bytes = b"") -> bytes:
    """A pattern for a length byte, ``zeros``, and so many bytes. Sixteen groups of sixteen keep the search
    for the length short.
    """
    groups = []
    for low in range(0, 256, 16):
        each = b"|".join(re.escape(bytes([n])) + zeros + b".{%d}" % n for n in range(low, low + 16))
        groups.append(
            b"(?=[" + re.escape(bytes([low])) + b"-" + re.escape(bytes([low + 15])) + b"])(?:" + each + b")"
        )
    return b"(?:" + b"|".join(groups) + b")"


# Runs of opcodes whose arguments bear no risk; 2,000 at a time bounds what the matcher remembers. Whatever it
# stops at, `_skim` reads: memo indices from 2**22 (LONG_BINPUT) or 10**6 (PUT), long strings, PROTO, STOP,
# and what is not allowed.
_RUN = re.compile(
    rb"(?:[N\x88\x89)\]}\x8f(tlde\x91ou\x90saRb\x81\x92\x93\x85\x86\x87\x94Q012]+"
    + rb"|[hKq].|[\x8cUC\x8a]" + _counted()
    + rb"|[Jj].{4}|M..|r..[\x00-\x3f]\x00|X" + _counted(rb"\0\0\0")
    + rb"|G.{8}|\x95.{8}|[IFLSVP][^\n]*\n|[ci][^\n]*\n[^\n]*\n|g[^\n]*\n|p[0-9]{1,6}\n){0,2000}+",
    re.DOTALL,
)  # fmt: skip


def _skim(view: memoryview, start: int) -> int:
    """The offset after STOP, by matching runs of opcodes; memo indices are held to the number of bytes so
    far.
    """
    pos, end = start, len(view)
    while True:
        stop = _RUN.match(view, pos).end()  # type: ignore[union-attr]  # it matches the empty string
        if stop > pos:
            pos = stop
            continue
        if pos >= end:
            raise _Ends(pos - start)
        op, at = view[pos], pos - start
        if op == 0x2E:  # STOP
            return pos + 1
        if width := _WIDTH[op]:
            pos += 1 + width + int.from_bytes(view[pos + 1 : pos + 1 + width], "little")
        elif op == 0x72 or op == 0x70:  # LONG_BINPUT, PUT
            size = 4 if op == 0x72 else bytes(view[pos + 1 : pos + 24]).find(b"\n")
            digits = bytes(view[pos + 1 : pos + 1 + size])
            if op == 0x70 and not digits.isdigit():
                raise _Refused(at, "a memo index that is no number", False)
            index = int.from_bytes(digits, "little") if op == 0x72 else int(digits)
            if index > at:
                raise _Refused(at, f"memo index {index:,} after {at:,} bytes", True)
            pos += 1 + size + (op == 0x70)
        elif op == 0x80 and pos + 1 < end:  # PROTO
            if view[pos + 1] > 5:
                raise _Refused(at, f"pickle protocol {view[pos + 1]} is newer than 5", False)
            pos += 2
        elif op in (0x82, 0x83, 0x84):
            raise _Refused(at, _EXTENSION, True)
        elif op in (0x97, 0x98):
            raise _Refused(at, _OUT_OF_BAND, False)
        elif op in b"MJjhKqGr\x95IFLSVPcig\x80":  # known, so its argument is cut off
            raise _Ends(at)
        else:
            raise _Refused(at, f"no pickle opcode {op:#04x}", False)
        if pos > end:
            raise _Ends(at)


def _charge(work: int, keys: list[int], limit: int, at: int) -> int:
    for size in keys:
        if size > KEY_LIMIT:
            raise _Refused(
                at,
                f"a key of {'more than a trillion' if size >= HUGE else f'{size:,}'} nested elements",
                True,
            )
        work += size
    if work > limit:
        raise _Refused(at, "keys that take for ever to hash", True)
    return work


def check_hashable(items: Iterable[object]) -> None:
    """Refuse tuples whose hash would visit more than `HASH_BUDGET` elements. Raises ValueError."""
    for item in items:
        if type(item) is tuple:
            left, todo = HASH_BUDGET, [item]
            while todo:
                inner = todo.pop()
                left -= len(inner)
                if left < 0:
                    raise ValueError("a key nests too many elements")
                todo.extend(cast(tuple[object, ...], part) for part in inner if type(part) is tuple)


def sequence(kind: Callable[..., object]) -> Callable[..., object]:
    def build(items: object = ()) -> object:
        if type(items) not in (list, tuple, set, frozenset, dict):
            raise TypeError(f"{kind.__name__} of something that is no list")
        check_hashable(cast(Iterable[object], items))
        return kind(items)

    return build


def mapping(kind: str) -> Callable[..., object]:
    def build(items: object = None) -> PickledDict:
        if items is None:
            return PickledDict(kind)
        if isinstance(items, dict):
            check_hashable(items)
            return PickledDict(kind, items)
        if type(items) is list and all(type(pair) in (tuple, list) and len(pair) == 2 for pair in items):
            check_hashable(pair[0] for pair in items)
            return PickledDict(kind, dict(items))
        raise TypeError(f"{kind} of something that is no mapping")

    return build


def defaultdict(factory: object = None, items: object = None) -> PickledDict:
    made = cast(PickledDict, mapping("defaultdict")(items))
    made.factory = None if factory is None else short(factory)
    return made


def to_bytes(*args: object) -> bytes:
    if not args:
        return b""
    if type(args[0]) in (bytes, bytearray) and len(args) == 1:
        return bytes(cast(bytes, args[0]))
    if type(args[0]) is str and len(args) == 2:
        return encode(*args)
    raise TypeError("bytes of something else than bytes")


def encode(text: object, encoding: object = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "iso-8859-1"):
        raise TypeError("_codecs.encode of something else than latin1 text")
    return codecs.latin_1_encode(text)[0]


def only(kind: Callable[..., object], *types: type) -> Callable[..., object]:
    def build(*args: object) -> object:
        if len(args) > 3 or any(type(arg) not in types for arg in args):
            raise TypeError(f"{kind.__name__} of an odd argument")
        return kind(*args)

    return build


def path(kind: type[pathlib.PurePath]) -> Callable[..., object]:
    def build(*parts: object) -> str:
        if any(type(part) is not str for part in parts):
            raise TypeError("a path of something else than text")
        return str(kind(*cast(tuple[str, ...], parts)))

    return build


def size(items: object = ()) -> tuple[object, ...]:
    if type(items) not in (tuple, list) or any(type(n) is not int for n in cast(tuple[object, ...], items)):
        raise TypeError("torch.Size of something else than whole numbers")
    return tuple(cast(tuple[object, ...], items))


def scalar(dtype: object, data: object = b"") -> object:
    if not isinstance(dtype, NumpyDType):
        raise TypeError("a numpy scalar without a dtype")
    plain = dtype.resolve()
    if plain is None:
        return opaque_class("numpy", "generic")(dtype, data)
    raw = raw_bytes(data)
    if len(raw) != plain.itemsize:
        raise ValueError(f"a numpy scalar of {plain.itemsize} bytes has {len(raw)}")
    return np.frombuffer(raw, plain)[0]


def frombuffer(
    data: object, dtype: object, shape: object, order: object = "C", axes: object = None
) -> object:
    if not isinstance(dtype, NumpyDType) or axes is not None or order not in ("C", "F"):
        return opaque_class("numpy", "ndarray")(dtype, shape, order, axes)
    plain, raw = dtype.resolve(), raw_bytes(data)
    if plain is None:
        return opaque_class("numpy", "ndarray")(dtype, shape, order, axes)
    check_shape(shape, plain, len(raw))
    return np.ndarray(cast(tuple[int, ...], shape), plain, raw, order=cast(Any, order)).view(NumpyArray)


def reconstruct(*_: object) -> NumpyArray:
    return NumpyArray()
