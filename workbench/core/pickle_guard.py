"""What is checked before a pickle is decoded: every opcode of the stream.

::

    up to 2 MiB   pickle_follow.py   the stack machine, with sizes       memo, stack, marks, sets, keys
    longer        pickle_skim.py     runs of opcodes by their lengths    memo, lengths

CPython 3.11's C unpickler trusts its input in places where that costs the process (``Modules/_pickle.c``): a
memo index is an index into an array that is grown and filled up to it (``LONG_BINPUT 0x7fffffff`` is 16 GB
from nine bytes), the extension registry hands out objects without asking ``find_class``, and a dict key may
be a tuple that holds itself twice, forty times over: hashing it visits 2**40 elements, or overflows the C
stack when it nests deeply instead.
"""

from __future__ import annotations

from workbench.core.pickle_follow import follow
from workbench.core.pickle_opcodes import Ends, Refused
from workbench.core.pickle_skim import skim
from workbench.errors import CorruptError, TruncatedError, UnsafeError

__all__ = ["WALK_LIMIT", "walk"]

WALK_LIMIT = 2 << 20  # bytes that `follow` simulates: 0.1 to 0.2 s a MiB


def walk(view: memoryview, offset: int, what: str) -> int:
    """Read the opcodes of the pickle at ``offset``; returns the offset after its STOP.

    Up to `WALK_LIMIT` bytes by simulation (`follow`): opcodes known and of protocol 5 or less, arguments
    inside the data, every memo index at most the number of opcodes so far, the stack never short, open marks
    and sets bounded, the cost of hashing keys bounded, no extension registry, no out-of-band buffer.

    A longer stream is skimmed from end to end by a regular expression (`skim`, about 10 ns a byte, a
    fraction of what decoding takes): the same but for stack, marks and keys. What it could still do is to
    stop the process with keys of nested tuples; run code it cannot, since `find_class` hands out inert
    stand-ins whatever the length.

    Raises:
        CorruptError: contradicts itself or is no pickle; TruncatedError: ends early; UnsafeError: a bomb.
    """
    try:
        stop = len(view)
        if stop - offset > WALK_LIMIT:  # a long pickle, or a short one before other bytes
            stop = skim(view, offset)
        if stop - offset > WALK_LIMIT:
            return stop
        return offset + follow(bytes(view[offset:stop]))
    except Ends as end:
        raise TruncatedError(
            f"{what} ends at byte {len(view):,}, within the opcode at byte {offset + end.args[0]:,} of a "
            f"pickle that starts at byte {offset:,}; the file is cut short or no pickle"
        ) from None
    except Refused as refusal:
        at, reason, unsafe = refusal.args
        kind, hint = (
            (UnsafeError, "it was not decoded") if unsafe else (CorruptError, "the file is damaged or no pickle")
        )
        raise kind(f"{what}, byte {offset + at:,}: {reason}; {hint}") from None
