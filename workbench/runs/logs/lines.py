"""Lines of a text file, streamed: memory for one block and one line, whatever the file's size.

A carriage return, which ends a progress bar, ends a line, too. Colours are removed. A line that is longer
than :data:`LINE` is not text that a trainer prints; it is skipped. Files compressed with gzip and files in UTF-16 are
decoded in memory first.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator

from workbench.core.arrays import Array
from workbench.core.source import FileStat, Source
from workbench.errors import CorruptError, UsageError

BLOCK = 1 << 20  #: bytes per read
LINE = 1 << 20  #: bytes of the longest line that is read
DECODED = 256 << 20  #: bytes of a file that is decoded in memory
_HEAD = 4096
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_END = re.compile(rb"[\r\n]+")
_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  #: what PowerShell writes for ``program > train.log``


class DecodedText(Source):
    """The UTF-8 text of a file that is compressed with gzip or encoded in UTF-16, in memory."""

    def __init__(self, data: bytes, stat: FileStat) -> None:
        self._data, self.stat = data, FileStat(len(data), stat.mtime_ns, stat.tag)

    def read_into(self, buffer: Array, start: int) -> None:
        memoryview(buffer)[:] = self._data[start : start + len(buffer)]

    def read_bytes(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]


def decoded(source: Source, path: str) -> Source:
    """Return a source of a file's text in UTF-8: the file itself, unless it is compressed or in UTF-16.

    Raises:
        CorruptError: the compressed data are damaged. UsageError: it would take more than :data:`DECODED` bytes.
    """
    head = source.read_bytes(0, 2)
    if head == _GZIP:
        data = _gunzip(source, path)
    elif head in _UTF16 and source.size <= DECODED:
        data = source.read_bytes(0, source.size)
    else:
        return source
    if data.startswith(_UTF16):
        data = data.decode("utf-16", "replace").encode()
    return DecodedText(data, source.stat)


def _gunzip(source: Source, path: str) -> bytes:
    """Decompress the members of a file; the last one may be incomplete, as while it is written."""
    parts, kept, rest, stream = [], 0, b"", zlib.decompressobj(31)
    at = 0
    while rest or at < source.size:
        if not rest:
            rest = source.read_bytes(at, at + BLOCK)
            at += BLOCK
        if stream.eof:
            rest = rest.lstrip(b"\0")  # padding between members
            if not rest:
                continue
            stream = zlib.decompressobj(31)
        try:
            parts.append(stream.decompress(rest, BLOCK))
        except zlib.error as error:
            raise CorruptError(f"{path!r} is damaged: its gzip stream cannot be decompressed ({error})") from None
        rest = stream.unused_data if stream.eof else stream.unconsumed_tail
        kept += len(parts[-1])
        if kept > DECODED:
            raise UsageError(f"{path!r} has more than {DECODED:,} bytes when it is decompressed; decompress it first")
    return b"".join(parts)


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
        if text[0] == "\ufeff":
            text = text[1:]
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
