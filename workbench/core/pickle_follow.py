"""A pickle's stack machine run with sizes instead of values: exact, at 0.1 to 0.2 s a MiB.

::

    80 02  7d  71 00  58 04 00 00 00 's' 't' 'e' 'p'  4b 05  73  2e
    PROTO  {   put 0  string of 4 bytes               5      set .
    stack  1          1 1                             1 1 1  1        elements that hashing each would visit

What is refused and why: pickle_guard.py.
"""

from __future__ import annotations

from workbench.core.pickle_opcodes import EXTENSION, OUT_OF_BAND, ROWS, SKIP, TUPLE, WIDTH, Ends, Refused

__all__ = ["follow"]

MARK_LIMIT = 1000  # open marks: real picklers nest as deep as Python recurses
SET_LIMIT = 250_000  # an empty set takes 216 bytes for its one; nothing else comes near
KEY_LIMIT = 10_000  # elements visited by hashing one key
HUGE = 1 << 40  # sizes saturate here
# How many values an opcode takes, and whether the result is a new one that may hold them. REDUCE, NEWOBJ,
# NEWOBJ_EX, STACK_GLOBAL make one; BINPERSID, BUILD, APPEND, SETITEM leave the lowest.
_POPS = {0x52: (2, 1), 0x81: (2, 1), 0x92: (3, 1), 0x93: (2, 1),
         0x51: (1, 0), 0x62: (2, 0), 0x61: (2, 0), 0x73: (3, 0)}  # fmt: skip
# TUPLE, LIST, DICT, FROZENSET, OBJ, INST, POP_MARK make one (or none) of all since the mark; APPENDS,
# SETITEMS, ADDITEMS add them to what lies below it.
_ONTO = {0x65, 0x75, 0x90}
_TO_MARK = {0x74, 0x6C, 0x64, 0x91, 0x6F, 0x69, 0x31} | _ONTO


def follow(data: bytes) -> int:
    """Simulate the stack machine with sizes: a value is the number of elements that hashing it would
    visit.
    """
    pos = ops = work = sets = 0
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    at = fence = 0  # opcodes may not reach below the last mark
    push, length = stack.append, len(data)
    skip, width_of = SKIP, WIDTH
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
                    raise Ends(at)
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
                    raise Refused(at, f"memo index {index:,} after {ops:,} opcodes", True)
                if len(stack) <= fence:
                    raise Refused(at, "nothing to memoise", False)
                memo[index] = stack[-1]
            elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if op == 0x68:
                    index = data[pos]
                    pos += 1
                else:
                    index = data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16 | data[pos + 3] << 24
                    pos += 4
                if index not in memo:
                    raise Refused(at, f"memo index {index:,} was never stored", False)
                push(memo[index])
            elif op == 0x28:  # MARK
                marks.append(len(stack))
                fence = len(stack)
                if len(marks) > MARK_LIMIT:
                    raise Refused(at, f"more than {MARK_LIMIT:,} open marks", True)
            elif count := TUPLE[op]:
                if len(stack) - fence < count:
                    raise Refused(at, "a tuple of more elements than there are", False)
                size = 1 + (stack[-1] if count == 1 else sum(stack[-count:]))
                del stack[-count:]
                push(size if size < HUGE else HUGE)
            elif op in _POPS:  # REDUCE, NEWOBJ, BUILD, APPEND … : so many off, and what stays
                need, made = _POPS[op]
                if len(stack) - fence < need:
                    raise Refused(at, "the stack is too short", False)
                if op == 0x73:  # SETITEM hashes its key
                    work = _charge(work, stack[-2:-1], work_limit, at)
                if made:  # the result may hold its arguments
                    stack[-need] = max(stack[-need:])
                del stack[len(stack) - need + 1 :]
            elif op in _TO_MARK:
                if not marks:
                    raise Refused(at, "no mark", False)
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
                        raise Refused(at, "items without a container", False)
                elif op != 0x31:  # POP_MARK leaves nothing
                    push(min(1 + sum(items), HUGE) if op not in (0x6C, 0x64) else 1)
            elif op == 0x8F:  # EMPTY_SET
                sets += 1
                if sets > SET_LIMIT:
                    raise Refused(at, f"more than {SET_LIMIT:,} sets", True)
                push(1)
            elif op == 0x2E:  # STOP
                if len(stack) <= fence:
                    raise Refused(at, "STOP on an empty stack", False)
                return pos
            elif op == 0x95 or op == 0x80:  # FRAME, PROTO
                if op == 0x95:
                    if int.from_bytes(data[pos : pos + 8], "little") > length - pos - 8:
                        raise Ends(at)
                    pos += 8
                else:
                    if data[pos] > 5:
                        raise Refused(at, f"pickle protocol {data[pos]} is newer than 5", False)
                    pos += 1
            elif rows := ROWS[op]:
                for _ in range(rows):
                    pos = _line_end(data, pos)
                push(1)
            elif op == 0x67 or op == 0x70:  # GET, PUT: decimal
                start, pos = pos, _line_end(data, pos)
                digits = data[start : pos - 1]
                if not digits.isdigit() or len(digits) > 19:
                    raise Refused(at, "a memo index that is no number", False)
                index = int(digits)
                if op == 0x67:
                    if index not in memo:
                        raise Refused(at, f"memo index {index:,} was never stored", False)
                    push(memo[index])
                else:
                    if index > ops:
                        raise Refused(at, f"memo index {index:,} after {ops:,} opcodes", True)
                    if len(stack) <= fence:
                        raise Refused(at, "nothing to memoise", False)
                    memo[index] = stack[-1]
            elif op == 0x30:  # POP: a mark counts as an element
                if marks and len(stack) == fence:
                    marks.pop()
                    fence = marks[-1] if marks else 0
                elif len(stack) > fence:
                    stack.pop()
                else:
                    raise Refused(at, "the stack is too short", False)
            elif op == 0x32:  # DUP
                if len(stack) <= fence:
                    raise Refused(at, "the stack is too short", False)
                push(stack[-1])
            elif op in (0x82, 0x83, 0x84):
                raise Refused(at, EXTENSION, True)
            elif op in (0x97, 0x98):
                raise Refused(at, OUT_OF_BAND, False)
            else:
                raise Refused(at, f"no pickle opcode {op:#04x}", False)
    except IndexError:
        raise Ends(at) from None


def _charge(work: int, keys: list[int], limit: int, at: int) -> int:
    for size in keys:
        if size > KEY_LIMIT:
            raise Refused(
                at,
                f"a key of {'more than a trillion' if size >= HUGE else f'{size:,}'} nested elements",
                True,
            )
        work += size
    if work > limit:
        raise Refused(at, "keys that take for ever to hash", True)
    return work


def _line_end(data: bytes, pos: int) -> int:
    end = data.find(b"\n", pos)
    if end < 0:
        raise IndexError
    return end + 1
