"""Lines of a text file, streamed: memory for one block and one line, whatever the file's size.

A carriage return, which ends a progress bar, ends a line, too. Colours are removed. A line that is longer
than :data:`LINE` is not text that a trainer prints; it is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from workbench.core.arrays import Array
from workbench.core.source import FileStat, Source

__all__ = ["BLOCK", "LINE", "EndedLines", "is_text", "stripped_lines"]

BLOCK = 1 << 20  #: bytes that are read at once
LINE = 1 << 20  #: bytes of the longest line that is read
_HEAD = 4096
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_END = re.compile(rb"[\r\n]+")


class EndedLines(Source):
    """A text file up to its last end of a line: what a program is still writing may be half of a number."""

    def __init__(self, source: Source) -> None:
        self._source = source
        stop = source.size
        while stop > 0:
            start = max(0, stop - BLOCK)
            data = source.read_bytes(start, stop)
            stop = start
            if (last := max(data.rfind(b"\n"), data.rfind(b"\r"))) >= 0:
                stop = start + last + 1
                break
        self.stat = FileStat(stop, source.stat.mtime_ns, source.stat.tag)

    def read_into(self, buffer: Array, start: int) -> None:
        self._source.read_into(buffer, start)

    def read_bytes(self, start: int, stop: int) -> bytes:
        return self._source.read_bytes(start, min(stop, self.size))


def is_text(source: Source) -> bool:
    """Return whether the first bytes hold no NUL, as text does."""
    return b"\0" not in source.read_bytes(0, min(_HEAD, source.size))


def stripped_lines(source: Source) -> Iterator[str]:
    """Yield the lines without their ends, without colours, and without empty ones."""
    for raw in byte_lines(source):
        text = raw.decode("utf-8", "replace")
        yield _ANSI.sub("", text) if "\x1b" in text else text


def byte_lines(source: Source) -> Iterator[bytes]:
    """Yield the lines as bytes. The last one is yielded even if nothing ends it."""
    rest, skipping = b"", False
    for start in range(0, source.size, BLOCK):
        data = rest + source.read_bytes(start, min(start + BLOCK, source.size))
        parts = _END.split(data)
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
