"""Checks before a pickle is decoded: every opcode of the stream is run with sizes instead of values.

::

    80 02  7d  71 00  58 04 00 00 00 's' 't' 'e' 'p'  4b 05  73  2e
    PROTO  {   put 0  string of 4 bytes               5      set .
    stack  0          0 0                             0 0 1  0        work of hashing each, as a key

CPython 3.11's C unpickler trusts its input in places where that costs the process (``Modules/_pickle.c``): a memo index
is an index into an array that is grown and filled up to it (``LONG_BINPUT 0x7fffffff`` is 16 GB from nine bytes), the
extension registry hands out objects without asking ``find_class``, every opcode may make an object of a few hundred
bytes, and a dict key may be a tuple that holds itself twice, forty times over: hashing it visits 2**40 elements, or
overflows the C stack when it nests deeply instead. Opcodes: opcodes.py; their limits: budget.py.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from workbench.core.pickles.budget import allowed
from workbench.core.pickles.opcodes import COUNTED, FIXED, LINES, TAKES, TO_MARK, end_of, line_end
from workbench.errors import CorruptError, TruncatedError, UnsafeError

MARK_LIMIT = 1000  # open marks: real picklers nest as deep as Python recurses
KEY_LIMIT = 2000  # work of hashing one key: tuples of 1,000 levels, integers of 1,000 bytes (Python prints those)
BATCH_LIMIT = 5000  # keys other than text that one opcode adds; CPython's pickler adds 1,000
HUGE = 1 << 40  # sizes saturate here
WINDOW = 1 << 12  # bytes copied at first where the end of the pickle is not known
SET, DICT, LIST, TUPLE = 216, 232, 88, 64  # bytes of memory, with a first item
_FOUR = struct.Struct("<I")
EXTENSION = "an object of the process's own extension registry"
OUT_OF_BAND = "an out-of-band buffer, which is not in the file"


class Refused(Exception):
    """The refusal of a pickle: where (from its start), why, and whether it is an attack rather than damage."""


class Ends(Exception):
    """The data end within the opcode at this position."""


class Walked(NamedTuple):
    """A pickle that may be decoded: the offset after its STOP, the bytes of its containers, its FRAME opcodes."""

    stop: int
    memory: int
    frames: list[int]


def walk(data: bytes | memoryview, offset: int, what: str) -> Walked:
    """Read the opcodes of the pickle at ``offset``: they are known and of protocol 5 or less, arguments are inside the
    data, every memo index is at most the number of bytes so far, the stack is never short, open marks and the memory of
    containers are bounded, so is the cost of hashing keys; no extension registry, no out-of-band buffer.

    Raises:
        CorruptError: contradicts itself or is not a pickle; TruncatedError: ends early; UnsafeError: a bomb.
    """
    window = len(data) - offset if isinstance(data, bytes) else WINDOW
    try:
        while True:
            part = data if isinstance(data, bytes) and not offset else bytes(data[offset : offset + window])
            try:
                stop, memory, frames = follow(part)
                break
            except Ends:
                if offset + window >= len(data):
                    raise
                window *= 16
        return Walked(offset + stop, memory, [offset + at for at in frames])
    except Ends as end:
        raise TruncatedError(
            f"{what} ends at byte {len(data):,}, within the opcode at byte {offset + end.args[0]:,} of a "
            f"pickle that starts at byte {offset:,}; the file is truncated or not a pickle"
        ) from None
    except Refused as refusal:
        at, reason, unsafe = refusal.args
        kind, hint = (
            (UnsafeError, "it was not decoded") if unsafe else (CorruptError, "the file is damaged or not a pickle")
        )
        raise kind(f"{what}, byte {offset + at:,}: {reason}; {hint}") from None


# The cost of a value as a dict key: text, None and instances 0, a number 1, an integer of any length 2 per byte,
# a tuple 1, plus, for each of its elements, its cost and 1.
# `_LEAF` is the length of opcodes that push a value, `_COST` its cost.
_LEAF, _COST, _TUPLE = [0] * 256, [0] * 256, [0] * 256
for _op in b"NKMJG\x88\x89)":
    _LEAF[_op] = 1 + FIXED[_op]
    _COST[_op] = int(_op in b"KMJG)")
for _op, _count in zip(b"\x85\x86\x87", (1, 2, 3), strict=True):
    _TUPLE[_op] = _count
_CONTAINER = {0x5D: LIST, 0x7D: DICT, 0x8F: SET}
_PUT, _GET = [0] * 256, [0] * 256  # bytes of the opcode; PUT and GET, a line, count as 9
for _table, _ops in ((_PUT, b"qr\x94p"), (_GET, b"hjg")):
    for _op in _ops:
        _table[_op] = 9 if LINES[_op] else 1 + FIXED[_op]
_ONTO = frozenset(b"eu\x90")  # add everything since the mark to what lies below it


def follow(data: bytes) -> tuple[int, int, list[int]]:
    """Simulate the stack machine with the costs of hashing: the position after STOP, the memory of containers, the
    frames. Raises `Ends`, `Refused`.
    """
    pos = at = work = memory = 0
    limit = allowed(0)
    stack = [0]  # never empty so that memo opcodes need not look; decoding refuses those that have nothing to store
    marks: list[int] = []
    memo: list[int] = []  # -1: nothing
    frames: list[int] = []
    gaps, fence = 0, 1  # memo indices skipped; opcodes may not reach below the last mark
    push, store, length, four = stack.append, memo.append, len(data), _FOUR.unpack_from
    leaf, cost, put, get, counted = _LEAF, _COST, _PUT, _GET, COUNTED
    try:
        while True:
            op = data[pos]  # IndexError: the stream ends without STOP
            at = pos
            if step := leaf[op]:
                pos += step
                push(cost[op])
            elif step := put[op]:
                pos += step
                if step == 5:
                    index = four(data, at + 1)[0]
                elif step == 2:
                    index = data[at + 1]
                elif op == 0x94:
                    index = len(memo) - gaps
                else:
                    index, pos = _decimal(data, at)
                if index == len(memo):
                    store(stack[-1])
                    continue
                if index > at:
                    raise Refused(at, f"memo index {index:,} after {_before(data, at)}", True)
                if index > len(memo):
                    gaps += index - len(memo)
                    memo.extend([-1] * (index - len(memo)))
                    memo.append(stack[-1])
                else:
                    gaps -= memo[index] < 0
                    memo[index] = stack[-1]
            elif step := get[op]:
                pos += step
                if step == 2:
                    index = data[at + 1]
                elif step == 5:
                    index = four(data, at + 1)[0]
                else:
                    index, pos = _decimal(data, at)
                if index >= len(memo) or memo[index] < 0:
                    raise Refused(at, f"memo index {index:,} was never stored", False)
                push(memo[index])
            elif width := counted[op]:
                pos += 1 + width
                if width == 4:
                    count = four(data, at + 1)[0]
                else:
                    count = data[at + 1] if width == 1 else int.from_bytes(data[at + 1 : pos], "little")
                pos += count
                if pos > length:
                    raise Ends(at)
                push(1 + 2 * count if op in b"\x8a\x8b" else 0)
            elif op == 0x28:  # MARK
                pos += 1
                marks.append(len(stack))
                fence = len(stack)
                if len(marks) > MARK_LIMIT:
                    raise Refused(at, f"more than {MARK_LIMIT:,} open marks", True)
                if memory > limit:  # of the values below the marks
                    limit = _room(memory, at)
            elif op == 0x74:  # TUPLE
                pos += 1
                if not marks:
                    raise Refused(at, "no mark", False)
                items = stack[marks.pop() :]
                del stack[fence:]
                fence = marks[-1] if marks else 1
                size = 1 + len(items) + sum(items)
                push(size if size < HUGE else HUGE)
                memory += TUPLE
            elif op == 0x52 or op == 0x93:  # REDUCE, STACK_GLOBAL: the result may hold its arguments
                pos += 1
                if len(stack) - fence < 2:
                    raise Refused(at, "the stack is too short", False)
                size = stack.pop()
                if size > stack[-1]:
                    stack[-1] = size
            elif count := _TUPLE[op]:
                pos += 1
                if len(stack) - fence < count:
                    raise Refused(at, "a tuple of more elements than the stack has", False)
                size = 1 + count
                for _ in range(count):
                    size += stack.pop()
                push(size if size < HUGE else HUGE)
                memory += TUPLE
                if memory > limit:
                    limit = _room(memory, at)
            elif op in _CONTAINER:
                pos += 1
                push(0)
                memory += _CONTAINER[op]
                if memory > limit:
                    limit = _room(memory, at)
            elif op in TO_MARK:
                pos = line_end(data, line_end(data, pos + 1)) if op == 0x69 else pos + 1  # INST: two lines
                if not marks:
                    raise Refused(at, "no mark", False)
                items = stack[marks.pop() :]
                del stack[fence:]
                fence = marks[-1] if marks else 1
                if op in b"ud":  # SETITEMS, DICT
                    work = _charge(work, items[::2], pos, at)
                elif op in b"\x90\x91":  # ADDITEMS, FROZENSET
                    work = _charge(work, items, pos, at)
                if op in _ONTO:
                    if len(stack) <= fence:
                        raise Refused(at, "items without a container", False)
                elif op != 0x31:  # POP_MARK leaves nothing
                    push(0 if op in b"ld" else min(1 + len(items) + sum(items), HUGE))
                    memory += DICT
            elif LINES[op]:
                pos = line_end(data, pos + 1)
                if op == 0x63:  # GLOBAL: two lines
                    pos = line_end(data, pos)
                push(pos - at if op in b"ILF" else 0)
            elif op == 0x2E:  # STOP
                if len(stack) <= fence:
                    raise Refused(at, "STOP on an empty stack", False)
                return pos + 1, memory, frames
            elif op == 0x95:  # FRAME
                pos += 9
                if int.from_bytes(data[at + 1 : pos], "little") > length - pos:
                    raise Ends(at)
                frames.append(at)
            elif op == 0x80:  # PROTO
                if data[pos + 1] > 5:
                    raise Refused(at, f"pickle protocol {data[pos + 1]} is newer than 5", False)
                pos += 2
            elif op == 0x30 and marks and len(stack) == fence:  # POP: a mark counts as an element
                pos += 1
                marks.pop()
                fence = marks[-1] if marks else 1
            elif op in (0x82, 0x83, 0x84):
                raise Refused(at, EXTENSION, True)
            elif op in (0x97, 0x98):
                raise Refused(at, OUT_OF_BAND, False)
            elif (takes := TAKES[op]) is not None:  # BUILD, NEWOBJ, SETITEM, APPEND, POP, DUP, BINPERSID …
                pos += 1
                need, left = takes
                if len(stack) - fence < need:
                    raise Refused(at, "the stack is too short", False)
                if op == 0x73:  # SETITEM hashes its key
                    work = _charge(work, stack[-2:-1], pos, at)
                if op == 0x32:  # DUP
                    push(stack[-1])
                else:
                    del stack[len(stack) - need + left :]
                    if op in b"\x81\x92Q":  # NEWOBJ, NEWOBJ_EX, BINPERSID: instances
                        stack[-1] = 0
            else:
                raise Refused(at, f"not a pickle opcode: {op:#04x}", False)
    except (IndexError, struct.error):
        raise Ends(at) from None


def _before(data: bytes, stop: int) -> str:
    """Describe how much of a pickle comes before an opcode, for messages."""
    if stop > 1000:
        return f"{stop:,} bytes"
    pos = count = 0
    while pos <= stop:
        pos, count = end_of(data, pos), count + 1
    return f"{count:,} opcodes"


def _room(memory: int, at: int) -> int:
    limit = allowed(at)
    if memory > limit:
        raise Refused(
            at, f"{at + 1:,} bytes of it create containers of {memory >> 20:,} MB, more than {limit >> 20:,} MB", True
        )
    return limit


def _charge(work: int, keys: list[int], pos: int, at: int) -> int:
    if not any(keys):
        return work
    if len(keys) - keys.count(0) > BATCH_LIMIT:
        words = f"{len(keys):,} keys are added at once, and more than {BATCH_LIMIT:,} of them are not text"
        raise Refused(at, words, True)
    if (size := max(keys)) > KEY_LIMIT:
        much = "more than a trillion" if size >= HUGE else f"{size:,}"
        raise Refused(at, f"a key of {much} nested elements, more than {KEY_LIMIT:,}", True)
    work += sum(keys)
    if work > 200 * pos + 1_000_000:
        raise Refused(at, "keys that would take too long to hash", True)
    return work


def _decimal(data: bytes, pos: int) -> tuple[int, int]:
    stop = line_end(data, pos + 1)
    digits = data[pos + 1 : stop - 1]
    if not digits.isdigit() or len(digits) > 19:
        raise Refused(pos, "a memo index that is not a number", False)
    return int(digits), stop
