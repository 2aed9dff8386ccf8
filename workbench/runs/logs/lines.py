"""Lines of a text file, streamed: memory for one block and one line, whatever the file's size.

A carriage return, which ends a progress bar, ends a line, too. Colours are removed. A line that is longer
than :data:`LINE` is not text that a trainer prints; it is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from workbench.core.source import Source

BLOCK = 1 << 20  #: bytes per read
LINE = 1 << 20  #: bytes of the longest line that is read
_HEAD = 4096
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_END = re.compile(rb"[\r\n]+")


def end_of_lines(source: Source, start: int = 0) -> int:
    """Return where the last terminated line ends, or ``start``: the rest may be half of a number."""
    stop = source.size
    while stop > start:
        begin = max(start, stop - BLOCK)
        data = source.read_bytes(begin, stop)
        if (last := max(data.rfind(b"\n"), data.rfind(b"\r"))) >= 0:
            return begin + last + 1
        stop = begin
    return start


def is_text(source: Source) -> bool:
    """Return whether the first bytes hold no NUL, as text does."""
    return b"\0" not in source.read_bytes(0, min(_HEAD, source.size))


def stripped_lines(source: Source, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the lines without their ends, without colours, and without empty ones."""
    for raw in byte_lines(source, start, source.size if stop is None else stop):
        text = raw.decode("utf-8", "replace")
        yield _ANSI.sub("", text) if "\x1b" in text else text


def byte_lines(source: Source, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines as bytes. The last one is yielded even if it is unterminated."""
    rest, skipping = b"", False
    for at in range(start, stop, BLOCK):
        data = rest + source.read_bytes(at, min(at + BLOCK, stop))
        parts = _END.split(data) if b"\r" in data else data.split(b"\n")
        rest = parts.pop()
        for part in parts:
            if skipping:  # the end of a line that was too long
                skipping = False
            elif part and len(part) <= LINE:
                yield part
        if len(rest) > LINE:
            rest, skipping = b"", True
    if rest and not skipping:
        yield rest
