"""What the commands share: opening as the options say, notes, JSON, colour."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

import workbench
from workbench.checkpoint import Checkpoint
from workbench.errors import UsageError
from workbench.views import units
from workbench.views.names import safe

__all__ = ["narrow", "note", "open_as", "paint", "print_json", "table_width", "tell"]

_COLOURS = {"bad": "31", "head": "1"}


def open_as(options: argparse.Namespace, path: str) -> Checkpoint:
    """Open a checkpoint as the common options say; what was decided on the way goes to stderr."""
    ckpt = workbench.open(
        path, format=options.format, cache=not options.no_cache, io=options.io, partial=options.partial
    )
    for sentence in ckpt.notes:
        note(sentence)
    return ckpt


def narrow(ckpt: Checkpoint, options: argparse.Namespace) -> Checkpoint:
    """The tensors that ``options.pattern`` (regular expressions, any of them) and ``options.role`` mean."""
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
        note(f"none of {units.plural(len(ckpt), 'tensor')} {meant}; roles stored are {roles}")
    return narrow


def note(sentence: str) -> None:
    """One line on stderr that is no error."""
    tell(f"note: {safe(sentence)}")


def tell(line: str) -> None:
    """A line on stderr; where that cannot be written (a full disk), the exit code is what tells."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what is left in the other's buffer would fail at the exit


def print_json(document: Any) -> None:
    """One document on one line, all ASCII: control characters and bidi marks are JSON escapes."""
    print(json.dumps(document, allow_nan=False))


def table_width() -> int | None:
    """Columns that a table may take on a terminal; ``None`` in a pipe or a file, where names are never cut."""
    return 100 if sys.stdout.isatty() else None


def paint(text: str, colour: str) -> str:
    """The text in a colour, on a terminal whose user did not say NO_COLOR."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
