"""How wide printed text is, and how its lines are folded.

::

    repr, notebook     sentences fold at 100 columns; names are shortened to fit a line of 100
    a terminal         sentences fold at its width, at most 100; names are shortened as in a repr
    a pipe, a file     sentences fold at 100; nothing is shortened

The command line chooses (:func:`printing_to`); views only call :func:`room`, :func:`wrap` and :func:`fold`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from workbench.views.names import columns

WIDEST = 100  #: columns of a line, wherever there is room for them
HANG = 24  #: the largest default indent of the lines after the first
_COLOUR = re.compile("\x1b\\[[0-9;]*m")

_columns: ContextVar[int] = ContextVar("columns", default=WIDEST)
_room: ContextVar[int | None] = ContextVar("room", default=WIDEST)


@contextmanager
def printing_to(out: TextIO) -> Iterator[None]:
    """Choose the layout for a terminal, a pipe or a file while the block runs."""
    terminal = out.isatty()
    width = shutil.get_terminal_size((WIDEST, 24)).columns if terminal else WIDEST
    with laid_out(width if 0 < width < WIDEST else WIDEST, WIDEST if terminal else None):
        yield


@contextmanager
def laid_out(width: int, room: int | None) -> Iterator[None]:
    """Fold lines at ``width`` columns and shorten names to ``room`` while the block runs."""
    before = _columns.set(width), _room.set(room)
    try:
        yield
    finally:
        _columns.reset(before[0])
        _room.reset(before[1])


def room() -> int | None:
    """Return the columns that names are shortened to; ``None``, as in a pipe, if nothing may be cut."""
    return _room.get()


def wrap(head: str, words: str, *, hang: int | None = None, most: int | None = None) -> list[str]:
    """Return words after a head, in lines as wide as the output; no word is broken.

    Args:
        hang: indent of the lines after the first; by default, the width of the head, up to 24.
        most: lines of 100 columns that the words may fill; the rest is replaced by ``…``.

    >>> wrap("  note: ", "two of the files were not read")
    ['  note: two of the files were not read']
    """
    hang = min(columns(head), HANG) if hang is None else hang
    if most is not None:
        words = _cut(head, words, hang, most)
    return _lines(head, words, _columns.get(), hang)


def fold(line: str) -> list[str]:
    """Return a line of a table in parts as wide as a narrow terminal, the later ones indented by two more columns.

    Anywhere else, it is one part, however long.
    """
    if _columns.get() == WIDEST:
        return [line]
    head = line[: len(line) - len(line.lstrip())]
    return _lines(head, line[len(head) :], _columns.get(), len(head) + 2)


def _lines(head: str, words: str, width: int, hang: int) -> list[str]:
    """Fold words; in a narrow terminal, lines after the first are indented by two columns more than the head."""
    indent = " " * (hang if hang < width // 2 else len(head) - len(head.lstrip()) + 2)
    done: list[str] = []
    line, bare = head, True
    for space, word in re.findall("( *)([^ ]+)", words):
        if not bare and columns(_COLOUR.sub("", line + space + word)) > width:
            done.append(line)
            line, space = indent, ""
        line, bare = line + space + word, False
    return [*done, line.rstrip()]


def _cut(head: str, words: str, hang: int, most: int) -> str:
    lines = _lines(head, words, WIDEST, hang)
    if len(lines) <= most:
        return words
    kept = [lines[0][len(head) :], *(line.strip() for line in lines[1:most])]
    last = kept[-1].split(" ")
    taken = columns(head) if most == 1 else hang
    while len(last) > 1 and taken + columns(" ".join(last)) + 2 > WIDEST:
        last.pop()
    return " ".join([*kept[:-1], *last, "…"])
