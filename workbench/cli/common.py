"""Shared parts of the commands: opening a checkpoint with the common options, notes, JSON, colour."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from workbench.checkpoint import Checkpoint, open_place
from workbench.core.place import Place
from workbench.core.remote.url import is_url, with_options
from workbench.core.words import plural, without_partial
from workbench.errors import UsageError
from workbench.views.lines import fold
from workbench.views.names import safe

_COLOURS = {"bad": "31", "head": "1"}
#: Arguments that name a checkpoint, a run, logs, a manifest or a destination; each is a path or a URL.
PLACES = ("path", "paths", "a", "b", "before", "after", "echo", "root", "dest", "logs", "manifest", "output", "lora")


def places(options: argparse.Namespace) -> list[str]:
    """Return the arguments of a command that may be URLs."""
    found: list[str] = []
    for name in PLACES:
        value = getattr(options, name, None)
        found += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
    return found


@contextmanager
def storage(options: argparse.Namespace, paths: Sequence[str]) -> Iterator[None]:
    """Open the URLs with ``--storage-option`` and ``--cache-dir`` while the block runs.

    Args:
        paths: the paths and URLs that the command reads and writes. Without a URL, there is nothing to cache.

    Raises:
        UsageError: ``--storage-option`` is given, and all of them are local.
    """
    local = not any(map(is_url, paths))
    if local and paths and options.storage_option:
        raise UsageError(f"--storage-option is for URLs, and {paths[0]!r} is a local path; leave the option out")
    given = dict(options.storage_option or ()) | ({"cache_dir": options.cache_dir} if options.cache_dir else {})
    with with_options(None if local else given or None, *paths):
        yield


def open_as(options: argparse.Namespace, path: str | Place) -> Checkpoint:
    """Open a checkpoint with the common options; notes about choices made on opening go to stderr."""
    place = path if isinstance(path, Place) else Place(path)
    ckpt = open_place(place, format=options.format, cache=not options.no_cache, partial=options.partial)
    for sentence in ckpt.notes:
        note(sentence)
    return ckpt


def narrow(ckpt: Checkpoint, options: argparse.Namespace) -> Checkpoint:
    """Return the tensors selected by ``options.pattern`` (any of these regular expressions) and ``options.role``.

    Raises:
        UsageError: a pattern is not valid, or no tensor is selected.
    """
    found = narrowed(ckpt, options)
    if options.pattern and not len(found):
        raise UsageError(f"{no_match(ckpt, options)}; `workbench ls` lists the names")
    return found


def narrowed(ckpt: Checkpoint, options: argparse.Namespace) -> Checkpoint:
    """Return the same tensors as :func:`narrow`, or none."""
    for pattern in options.pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
    if not options.pattern and options.role is None:
        return ckpt
    joined = "|".join(f"(?:{pattern})" for pattern in options.pattern) or None
    return ckpt.select(joined, options.role)


def no_match(ckpt: Checkpoint, options: argparse.Namespace) -> str:
    """Return the sentence that no tensor is selected by the patterns and the role of a command."""
    patterns = " or ".join(map(repr, options.pattern))
    role = f" and the role {options.role!r}" if options.role is not None else ""
    roles = ", ".join(sorted(set(ckpt.roles)))
    what = f"none of {plural(len(ckpt), 'tensor')} in {ckpt.path!r}"
    return f"{what} has a name that matches {patterns}{role}; the stored roles are {roles}"


#: Arguments of Python functions that messages suggest, as ``name=True`` or ``name=``, and that are options here, too.
_ARGUMENTS = re.compile(
    r"(?<![^\s(])(dtype|hf_config|lora|max_shard_size|mesh|objects|overwrite|partial|rank|rename|role|rules|select|unscaled)="
    r"(True\b)?(?=([^\s,;:.)])?)"
)


def as_typed(message: str, *, partial: bool = False) -> str:
    """Return a message with options instead of the arguments of Python functions: ``--partial`` for ``partial=True``.

    Args:
        partial: the option was given: the message need not suggest it.
    """
    if partial:
        message = without_partial(message)
    return _ARGUMENTS.sub(
        lambda found: f"--{found[1].replace('_', '-')}{' ' if found[3] and not found[2] else ''}", message
    )


def fail(options: argparse.Namespace | None, message: str, code: int) -> int:
    """Print the line of a failure on stderr, and return the exit code."""
    tell(f"workbench: {safe(as_typed(message, partial=getattr(options, 'partial', False)))}")
    return code


def note(sentence: str) -> None:
    """Print one line on stderr that is not an error."""
    tell(f"note: {safe(as_typed(sentence))}")


def tell(line: str) -> None:
    """Print a line on stderr; if that fails (a full disk), the exit code still reports the outcome."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  flushing the old stream's buffer at exit would fail


def print_json(document: Any) -> None:
    """Print one document on one line, all ASCII: control characters and bidi marks are JSON escapes."""
    print(json.dumps(document, allow_nan=False))


def say(text: str) -> None:
    """Print lines of a result; those too long for a narrow terminal are folded between words."""
    for line in text.split("\n"):
        print("\n".join(fold(line)))


def print_result(options: argparse.Namespace, found: Any, text: Callable[[Any], str]) -> None:
    """Print a result: with ``--json`` its ``to_dict()``, otherwise the text that is made of it."""
    if options.json:
        print_json(found.to_dict())
    else:
        say(text(found))


def paint(text: str, colour: str) -> str:
    """Return the text in a colour if stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
