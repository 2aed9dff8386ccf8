"""Untrusted JSON: strict UTF-8, no duplicate keys, bounded depth and memory, one error.

Python's decoder keeps the last of two equal keys (safetensors 0.8 does too), so a file can show one tensor to one
reader and another tensor to the next; and 100,000 nested brackets end in a RecursionError. Both are refused here.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from workbench.core.garbage import uncollected
from workbench.core.words import plural
from workbench.errors import CorruptError, OpenError, UnsafeError, UsageError

VALUES = 8_000_000  #: the longest safetensors header has this many; three bytes can become 64 bytes of memory


def read_own(path: str | os.PathLike[str], *, what: str, limit: int = 64 << 20) -> Any:
    """Decode a JSON file that the user named, of rules or names: a regular file of at most ``limit`` bytes.

    Raises:
        UsageError: it cannot be read, or is not such a file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO would wait for its writer
        with open(fd, "rb") as handle:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            data = handle.read(limit + 1) if regular else b""
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not regular:
        raise UsageError(f"{what} is not a regular file")
    if len(data) > limit:
        raise UsageError(f"{what} has more than {limit:,} bytes, too many for such a file")
    try:
        return loads(data, what=what)
    except OpenError as error:
        raise UsageError(str(error)) from None


def loads(data: bytes | memoryview, *, what: str) -> Any:
    """Decode one JSON document; ``what`` names it in messages.

    Raises:
        CorruptError: not UTF-8, not JSON, a duplicate key, or nested too deeply.
        UnsafeError: more than :data:`VALUES` values and keys.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not UTF-8 at byte {error.start:,} ({error.reason})") from None
    count = text.count(",") + text.count(":")
    if count > VALUES:
        raise UnsafeError(
            f"{what} contains about {plural(count, 'value')} in {plural(len(data), 'byte')}, over the limit of "
            f"{VALUES:,}: decoding it would take gigabytes of memory; refused"
        )
    try:
        with uncollected():
            return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, what), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise CorruptError(f"{what} is not JSON: {error.msg} at character {error.pos:,}") from None
    except RecursionError:
        raise CorruptError(f"{what} has brackets nested too deeply; refused") from None
    except ValueError:  # Python converts integers of up to a few thousand digits
        raise CorruptError(f"{what} contains an integer with thousands of digits; refused") from None


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CorruptError(f"{what} has the key {key!r} twice; it is unknown which one is valid")
            seen.add(key)
    return found


def _no_constant(name: str) -> float:
    # NaN and Infinity are not JSON, but trainers' logs (trainer_state.json) hold them
    return float(name)
