"""Names from a checkpoint, made harmless for a terminal or a page.

Whoever wrote the file chose its names. Escape sequences could recolour or rewrite a terminal, bidirectional marks
could make one name look like another; both are shown instead of obeyed::

    layer\\x1b[2J.weight      ESC [ 2 J would have cleared the screen
    user\\u202egpj.exe        RIGHT-TO-LEFT OVERRIDE would have turned the rest around
"""

from __future__ import annotations

import unicodedata

__all__ = ["columns", "pad", "safe", "shorten"]


def safe(text: object) -> str:
    """The text with every character that does not print (controls, bidi marks, surrogates) as a visible escape."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(char if char.isprintable() else _escape(char) for char in plain)


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters, the middle left out: names differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 3 // 5
    return f"{text[: width - 1 - tail]}…{text[-tail:] if tail else ''}"


def columns(text: str) -> int:
    """Columns that a text takes in a terminal: East Asian wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int) -> str:
    """The text with spaces to ``width`` columns."""
    return text + " " * max(width - columns(text), 0)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
