"""Shared parts of the commands: opening a checkpoint with the common options, notes, JSON, colour."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import workbench
from workbench.checkpoint import Checkpoint
from workbench.errors import UsageError
from workbench.views import units
from workbench.views.names import columns, safe

WIDEST = 100  #: columns of what is printed; a narrower terminal gets it folded
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_COLOURS = {"bad": "31", "head": "1"}


def open_as(options: argparse.Namespace, path: str) -> Checkpoint:
    """Open a checkpoint with the common options; notes about choices made on opening go to stderr."""
    ckpt = workbench.open(path, format=options.format, cache=not options.no_cache, partial=options.partial)
    for sentence in ckpt.notes:
        note(sentence)
    return ckpt


def narrow(ckpt: Checkpoint, options: argparse.Namespace) -> Checkpoint:
    """Return the tensors selected by ``options.pattern`` (any of these regular expressions) and ``options.role``."""
    for pattern in options.pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
    if not options.pattern and options.role is None:
        return ckpt
    joined = "|".join(f"(?:{pattern})" for pattern in options.pattern) or None
    narrow = ckpt.select(joined, options.role)
    if not len(narrow):
        roles = ", ".join(sorted(set(ckpt.roles)))
        meant = f"has a name that matches {joined!r}" if joined else f"has the role {options.role!r}"
        meant += f" and the role {options.role!r}" if joined and options.role else ""
        note(f"none of {units.plural(len(ckpt), 'tensor')} {meant}; the stored roles are {roles}")
    return narrow


def note(sentence: str) -> None:
    """Print one line on stderr that is not an error."""
    tell(f"note: {safe(sentence)}")


def tell(line: str) -> None:
    """Print a line on stderr; if that fails (a full disk), the exit code still reports the outcome."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  flushing the old stream's buffer at exit would fail


def print_json(document: Any) -> None:
    """Print one document on one line, all ASCII: control characters and bidi marks are JSON escapes."""
    print(json.dumps(document, allow_nan=False))


def table_width() -> int | None:
    """Return the table width for a terminal; ``None`` for a pipe or a file, where names are never truncated."""
    return WIDEST if sys.stdout.isatty() else None


def _terminal() -> int:
    return shutil.get_terminal_size((WIDEST, 24)).columns


class FoldingOutput(io.TextIOBase):
    """Writes lines to a terminal that is narrower than :data:`WIDEST`, folded between words with a hanging indent.

    A sentence that was folded at :data:`WIDEST` is put together first.
    """

    def __init__(self, out: Any, width: int) -> None:
        self._out, self._width = out, width
        self._rest = ""  # the unfinished line
        self._held: str | None = None  # the sentence that the next line may continue
        self._last = ""  # its last line as it came
        self._hang = 0

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            indent = _indent(line)
            word = line.split(None, 1)[:1]
            full = word and columns(self._last) + 1 + columns(word[0]) > WIDEST
            if self._held is not None and full and indent > _indent(self._held) and self._hang in (0, indent):
                self._held, self._hang = f"{self._held} {line.lstrip()}", indent
            else:
                self._let_go()
                self._held = line
            self._last = line
        return len(text)

    def flush(self) -> None:
        self._let_go()
        self._out.write(self._rest)
        self._rest = ""
        self._out.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._out.fileno())

    def _let_go(self) -> None:
        if self._held is not None:
            self._out.write(fold(self._held, self._width, self._hang) + "\n")
        self._held, self._hang = None, 0


def fold(line: str, width: int, hang: int = 0) -> str:
    """Return a line in parts of up to ``width`` columns; words are not broken.

    Args:
        hang: indent of the parts after the first; by default, 2 more than that of the line.

    >>> print(fold("  files: 4 files and 513 byte ranges in them", 24))
      files: 4 files and 513
        byte ranges in them
    """
    head, indent = _indent(line), hang if 0 < hang < width // 2 else _indent(line) + 2
    done, part = [], line[:head]
    for space, word in re.findall(r"( *)([^ ]+)", line[head:]):
        if part.strip() and columns(_COLOUR.sub("", part + space + word)) > width:
            done.append(part)
            part, space = " " * indent, ""
        part += space + word
    return "\n".join([*done, part])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@contextlib.contextmanager
def folded() -> Iterator[None]:
    """Fold what is printed, if stdout is a terminal of less than :data:`WIDEST` columns."""
    out = sys.stdout
    if not out.isatty() or not 0 < _terminal() < WIDEST:
        yield
        return
    sys.stdout = FoldingOutput(out, _terminal())
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = out


def paint(text: str, colour: str) -> str:
    """Return the text in a colour if stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
