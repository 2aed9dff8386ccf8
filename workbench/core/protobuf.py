"""The part of the wire format of protocol buffers that logs and checkpoints need: fields in order, without a schema.

::

    key = field << 3 | type      type 0 varint · 1 eight bytes · 2 length, bytes · 5 four bytes

A message is walked once, left to right; a length that leaves the message ends it. (protobuf's encoding specification.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class BadMessage(Exception):
    """The bytes are not a message."""


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values: an int for varints, bytes for everything else.

    Raises:
        BadMessage: the bytes end in the middle of a field, or a type is unknown.
    """
    for number, value in spans(data, 0, len(data)):
        yield number, value if isinstance(value, int) else data[value[0] : value[1]]


def spans(data: Any, start: int, stop: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
    """Yield field numbers and values of the message in bytes ``[start, stop)``: an int for varints, and where the bytes
    are for everything else, which are not looked at. ``data`` gives an int for a position.

    Raises:
        BadMessage: as :func:`fields`.
    """
    at = start
    while at < stop:
        key, at = varint(data, at, stop)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at, stop)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = varint(data, at, stop)
        elif kind == 1:
            size = 8
        elif kind == 5:
            size = 4
        else:
            raise BadMessage
        if size > stop - at:
            raise BadMessage
        yield key >> 3, (at, at + size)
        at += size


def signed(value: int) -> int:
    """Return a varint as the signed 64-bit integer that it encodes."""
    return value - (1 << 64) if value >> 63 else value


def varint(data: Any, at: int, end: int) -> tuple[int, int]:
    """Return the varint at a byte, and the byte after it.

    Raises:
        BadMessage: it does not end before ``end``, or after ten bytes.
    """
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
    raise BadMessage
