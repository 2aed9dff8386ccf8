"""Parse a slice in Python syntax, ``2:9, :, -1``, into an index key. Nothing is evaluated."""

from __future__ import annotations

import re
from types import EllipsisType

from workbench.errors import UsageError

Part = int | slice | list[int] | EllipsisType
_INT = re.compile(r"\s*([+-]?\d{1,19})\s*")
_SLICE = re.compile(r"\s*([+-]?\d{1,19})?\s*:\s*([+-]?\d{1,19})?\s*(?::\s*([+-]?\d{1,19})?\s*)?")
_PARTS = re.compile(r"(\s*\[[^\[\]]*\]\s*|[^,\[\]]*)(,|$)")


def parse_slice(text: str) -> tuple[Part, ...]:
    """Parse ``2:9, :, -1, ..., [0, 2]`` as an index key.

    Raises:
        UsageError: something is not an integer, slice, ellipsis or list of integers.
    """
    parts: list[Part] = []
    at = 0
    while at < len(text):
        found = _PARTS.match(text, at)
        if found is None:
            raise UsageError(f"{_short(text)!r} is not a slice: brackets do not match")
        body, comma = found[1], found[2]
        parts.append(_part(body, text))
        at = found.end()
        if not comma:
            break
    if not parts:
        raise UsageError("an empty slice []; write [...] for everything")
    return tuple(parts)


def _part(body: str, text: str) -> Part:
    body = body.strip()
    if body == "...":
        return ...
    if found := _INT.fullmatch(body):
        return int(found[1])
    if found := _SLICE.fullmatch(body):
        return slice(*(None if group is None else int(group) for group in found.groups()))
    if body.startswith("["):
        inner = [_INT.fullmatch(item) for item in body[1:-1].split(",")] if body[1:-1].strip() else []
        if all(inner):
            return [int(item[1]) for item in inner if item is not None]
    raise UsageError(
        f"{_short(body)!r} in [{_short(text)}] is not an integer (up to 19 digits), slice (2:9:1), ellipsis (...) "
        "or list ([0, 2])"
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"
