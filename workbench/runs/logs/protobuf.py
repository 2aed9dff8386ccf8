"""The wire format of protocol buffers, as far as logs need it: fields in order, without a schema.

::

    key = field << 3 | type      type 0 varint · 1 eight bytes · 2 length, bytes · 5 four bytes

A message is walked once, left to right; a length that leaves the message ends it. (protobuf's encoding specification.)
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["BadMessage", "fields", "signed"]


class BadMessage(Exception):
    """The bytes are not a message."""


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values: an int for varints, bytes for everything else.

    Raises:
        BadMessage: the bytes end in the middle of a field, or a type is unknown.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at, end)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at, end)
        elif kind == 1:
            size = 8
        elif kind == 5:
            size = 4
        else:
            raise BadMessage
        if size > end - at:
            raise BadMessage
        yield key >> 3, data[at : at + size]
        at += size


def signed(value: int) -> int:
    """Return a varint as the signed 64-bit integer that it encodes."""
    return value - (1 << 64) if value >> 63 else value


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
    raise BadMessage
