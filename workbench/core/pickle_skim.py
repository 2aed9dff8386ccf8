"""A long pickle read from end to end by a regular expression: about 10 ns a byte, a fraction of decoding it.

::

    80 04 95 … │ 8c 05 'epoch' 94 4b 07 73 …   │ 72 ff ff ff 7f   │ …
    by hand    │ one match, up to 2,000 opcodes │ by hand: a memo index of 2**31 would take 16 GB

What is refused and why: pickle_guard.py.
"""

from __future__ import annotations

import re

from workbench.core.pickle_opcodes import EXTENSION, OUT_OF_BAND, WIDTH, Ends, Refused

__all__ = ["skim"]


def skim(view: memoryview, start: int) -> int:
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
            raise Ends(pos - start)
        op, at = view[pos], pos - start
        if op == 0x2E:  # STOP
            return pos + 1
        if width := WIDTH[op]:
            pos += 1 + width + int.from_bytes(view[pos + 1 : pos + 1 + width], "little")
        elif op == 0x72 or op == 0x70:  # LONG_BINPUT, PUT
            size = 4 if op == 0x72 else bytes(view[pos + 1 : pos + 24]).find(b"\n")
            digits = bytes(view[pos + 1 : pos + 1 + size])
            if op == 0x70 and not digits.isdigit():
                raise Refused(at, "a memo index that is no number", False)
            index = int.from_bytes(digits, "little") if op == 0x72 else int(digits)
            if index > at:
                raise Refused(at, f"memo index {index:,} after {at:,} bytes", True)
            pos += 1 + size + (op == 0x70)
        elif op == 0x80 and pos + 1 < end:  # PROTO
            if view[pos + 1] > 5:
                raise Refused(at, f"pickle protocol {view[pos + 1]} is newer than 5", False)
            pos += 2
        elif op in (0x82, 0x83, 0x84):
            raise Refused(at, EXTENSION, True)
        elif op in (0x97, 0x98):
            raise Refused(at, OUT_OF_BAND, False)
        elif op in b"MJjhKqGr\x95IFLSVPcig\x80":  # known, so its argument is cut off
            raise Ends(at)
        else:
            raise Refused(at, f"no pickle opcode {op:#04x}", False)
        if pos > end:
            raise Ends(at)


def _counted(zeros: bytes = b"") -> bytes:
    """A pattern for a length byte, ``zeros``, and so many bytes. Sixteen groups of sixteen keep the search
    for the length short.
    """
    groups = []
    for low in range(0, 256, 16):
        each = b"|".join(re.escape(bytes([n])) + zeros + b".{%d}" % n for n in range(low, low + 16))
        groups.append(b"(?=[" + re.escape(bytes([low])) + b"-" + re.escape(bytes([low + 15])) + b"])(?:" + each + b")")
    return b"(?:" + b"|".join(groups) + b")"


# Runs of opcodes whose arguments bear no risk; 2,000 at a time bounds what the matcher remembers. Whatever it
# stops at, `skim` reads: memo indices from 2**22 (LONG_BINPUT) or 10**6 (PUT), long strings, PROTO, STOP,
# and what is not allowed.
_RUN = re.compile(
    rb"(?:[N\x88\x89)\]}\x8f(tlde\x91ou\x90saRb\x81\x92\x93\x85\x86\x87\x94Q012]+"
    + rb"|[hKq].|[\x8cUC\x8a]" + _counted()
    + rb"|[Jj].{4}|M..|r..[\x00-\x3f]\x00|X" + _counted(rb"\0\0\0")
    + rb"|G.{8}|\x95.{8}|[IFLSVP][^\n]*\n|[ci][^\n]*\n[^\n]*\n|g[^\n]*\n|p[0-9]{1,6}\n){0,2000}+",
    re.DOTALL,
)  # fmt: skip
