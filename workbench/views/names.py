"""Names from a checkpoint, made safe for a terminal or a page.

The author of the file chose its names. Escape sequences could recolour or rewrite a terminal; bidirectional marks
could make one name look like another. Both are shown instead of obeyed::

    layer\\x1b[2J.weight      ESC [ 2 J would have cleared the screen
    user\\u202egpj.exe        RIGHT-TO-LEFT OVERRIDE would have turned the rest around
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from html import escape

_NUMBER = re.compile(r"(?<![^\W_])\d+(?![^\W_])")  #: a number by itself; not that in ``float32``


def safe(text: object) -> str:
    """Return the text with non-printing characters (controls, bidi marks, surrogates) as visible escapes."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(char if char.isprintable() else _escape(char) for char in plain)


def html(text: object) -> str:
    """Return the text safe in HTML: markup, controls and bidirectional marks have no effect."""
    return escape(safe(text))


def shorten(text: str, width: int | None, ending: float = 0.6) -> str:
    """Cut the middle of a text to fit ``width`` characters: names differ at their ends. ``ending`` is the tail's share.

    If possible, the cut contains no number (of a layer, of an expert): ``model…layers.3.self_attn.k``.
    Without a width, as in a pipe, nothing is cut.
    """
    if width is None or len(text) <= width:
        return text
    tail = min(int((width - 1) * ending + 0.001), width - 1)
    spans = [match.span() for match in _NUMBER.finditer(text)]
    if spans and width > 1:
        begins, ends = [span[0] for span in spans], [span[1] for span in spans]
        out = len(text) - width + 1  #: characters to cut, after the `width - 1 - tail` that stay

        def lost(kept: int) -> int:
            head = width - 1 - kept
            return bisect_left(begins, head + out) - bisect_right(ends, head)

        if lost(tail):
            tail = min(range(width), key=lambda one: (lost(one), abs(one - tail)))
    return f"{text[: width - 1 - tail]}…{text[-tail:] if tail else ''}"


def shorten_all(texts: Sequence[str], widths: Sequence[int | None]) -> list[str]:
    """Shorten the names of a column to its width, cutting where they remain distinct."""
    best: list[str] = []
    for ending in (0.6, 0.75, 0.9, 1.0, 0.4, 0.2):
        short = [shorten(text, width, ending) for text, width in zip(texts, widths, strict=True)]
        if len(set(short)) > len(set(best)) or not best:
            best = short
        if len(set(short)) == len(set(texts)):
            break
    return best


def columns(text: str) -> int:
    """Return the terminal columns of a text: two per East Asian wide character, none per combining mark."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int) -> str:
    """Pad the text with spaces to ``width`` columns."""
    return text + " " * max(width - columns(text), 0)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
