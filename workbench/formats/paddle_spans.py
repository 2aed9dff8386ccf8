"""The bytes and texts that a pickle holds, stepped over: what is left of it is a few hundred bytes a tensor.

A pickle has no table of contents, so its opcodes are walked; what an array holds leaves a persistent id behind::

    protocol 3, 4   …( K\\x01 shape dtype \\x89  B│8e 00100000 ░░░░ 1 MiB ░░░░  t b …
    thinned         …( K\\x01 shape dtype \\x89  J 00000007 Q                   t b …    span 7 = bytes a to b
    protocol 2      …c _codecs encode  X 00170000 ░░ UTF-8 of latin-1 ░░  q.  X latin1  \\x86 R …
    thinned         …c _codecs encode  J 00000008 Q                       q.  X latin1  \\x86 R …

FRAME opcodes are left out, as the lengths that they announce no longer hold.

Source: CPython 3.11 ``pickle.py``, numpy 2.4 (what stands before and after an array's bytes).
"""

from __future__ import annotations

import re

from workbench.core.pickle_opcodes import ROWS, SKIP, TUPLE, WIDTH
from workbench.core.stubs import Inert
from workbench.errors import CorruptError, TruncatedError

__all__ = ["Span", "Text", "plain", "thin"]

INLINE = 256  #: bytes up to which a text's value is kept beside its place
#: Opcodes that push nothing new, with the bytes that follow; those that nobody may use are left to pickle_guard.
_OTHER = {
    **dict.fromkeys(b"(tlde\x91ou\x90saRb\x81\x92\x93012\x94\x97\x98", 0),
    0x71: 1, 0x72: 4, 0x68: 1, 0x6A: 4, 0x80: 1, 0x82: 1, 0x83: 2, 0x84: 4,
}  # fmt: skip
_LINES = {0x67: 1, 0x70: 1, 0x69: 2}  # GET, PUT, INST
_PUT = rb"(?:q.|r....|\x94)?"
#: After a text: what makes it the first argument of ``_codecs.encode(text, "latin1")``.
_LATIN1 = re.compile(_PUT + rb"(?:(?:X\x06\0\0\0|\x8c\x06)latin1" + _PUT + rb"|h.|j....)\x86", re.DOTALL)


class Span(Inert):
    """Bytes of the file that a pickle holds: ``[start, stop)``, as they are or (``text``) as UTF-8 of latin-1."""

    __slots__ = ("start", "stop", "text")
    start: int
    stop: int
    text: bool

    def __init__(self, start: int, stop: int, text: bool = False) -> None:
        set_ = object.__setattr__  # this constructor is hot: twice a tensor
        set_(self, "start", start)
        set_(self, "stop", stop)
        set_(self, "text", text)

    def __repr__(self) -> str:
        return f"<bytes {self.start} to {self.stop}>"


class Text(str):
    """A text with its place; its value is only there up to `INLINE` bytes."""

    __slots__ = ("span",)
    span: Span

    def __setstate__(self, state: object) -> None:
        raise TypeError("a text takes no state")


def thin(view: memoryview, what: str) -> tuple[bytes, list[Span | Text]]:
    """The pickle with a persistent id for each run of bytes in it, and the runs.

    Raises:
        TruncatedError: an opcode ends beyond the data.
        CorruptError: no pickle, or persistent ids, which paddle does not write.
    """
    pieces: list[bytes] = []
    spans: list[Span | Text] = []
    at = kept = 0
    end = len(view)

    def cut(start: int, stop: int, span: Span | Text | None) -> int:
        if stop > end:
            raise TruncatedError(
                f"file {what} ends at byte {end:,}, within {stop - start:,} bytes from byte {start:,}; it is cut short"
            )
        pieces.append(bytes(view[kept:at]))
        if span is not None:
            pieces.append(b"J" + len(spans).to_bytes(4, "little") + b"Q")
            spans.append(span)
        return stop

    while True:
        if at >= end:
            raise TruncatedError(f"file {what} ends at byte {end:,} without the end of its pickle; it is cut short")
        op = view[at]
        if op == 0x2E:  # STOP
            pieces.append(bytes(view[kept : at + 1]))
            return b"".join(pieces), spans
        if (step := SKIP[op]) >= 0:
            at += 1 + step
        elif width := WIDTH[op]:
            start = at + 1 + width
            stop = start + int.from_bytes(view[at + 1 : start], "little")
            if op in b"CB\x8e\x96":
                at = kept = cut(start, stop, Span(start, stop))
            elif op == 0x58 and (stop - start <= 2 or _LATIN1.match(view[stop : stop + 20])):
                at = kept = cut(start, stop, _text(view, start, stop, what))
            else:
                at = stop
        elif op == 0x95:
            at = kept = cut(at, at + 9, None)
        elif op in b"PQ":
            raise CorruptError(
                f"{what}, byte {at:,}: a persistent id, which paddle does not write; it is another format"
            )
        elif op in _OTHER:
            at += 1 + _OTHER[op]
        elif TUPLE[op]:
            at += 1
        elif rows := ROWS[op] or _LINES.get(op, 0):
            for _ in range(rows):
                at = _line(view, at + 1 if _ == 0 else at, what)
        else:
            raise CorruptError(f"{what}, byte {at:,}: {op:#04x} is no pickle opcode; the file is damaged or no pickle")


def plain(view: memoryview, span: Span) -> bytes:
    """The bytes of a span."""
    data = bytes(view[span.start : span.stop])
    return data.decode("utf-8").encode("latin-1") if span.text else data


def _line(view: memoryview, at: int, what: str) -> int:
    for step in range(at, len(view), 4096):
        found = bytes(view[step : step + 4096]).find(b"\n")
        if found >= 0:
            return step + found + 1
    raise TruncatedError(f"file {what} ends at byte {len(view):,} within a line; it is cut short")


def _text(view: memoryview, start: int, stop: int, what: str) -> Text:
    try:
        value = bytes(view[start:stop]).decode("utf-8", "surrogatepass") if stop - start < INLINE else ""
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{what}, byte {start + error.start:,}: a text that is not UTF-8; the file is damaged"
        ) from None
    made = Text(value)
    made.span = Span(start, stop, text=True)
    return made
