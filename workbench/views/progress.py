"""A bar on a terminal or in a notebook while something long goes on; nothing in a pipe, nor for what is over at once.

::

    stats step-48000  ▕█████████▌          ▏  48 %  1 min left

The command line asks for it (:func:`progress`). Functions that people call in IPython show it by themselves
(:func:`followed`), as nobody else would tell them how far it is.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeVar

from workbench.views import units
from workbench.views.names import columns, safe, shorten

__all__ = ["followed", "progress"]

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 0.4  #: seconds before anything is shown
CELL_PATIENCE = 1.0  #: in a notebook, where what was shown leaves an empty line
EVERY = 0.1  #: seconds between two drawings
BAR = 24  #: cells of the bar
_PARTS = " ▏▎▍▌▋▊▉█"


@contextmanager
def progress(title: str, stream: TextIO | None = None) -> Iterator[Callable[[float], None]]:
    """Show how far something is, on stderr.

    Yields:
        ``tick(share)``, to be told the share that is done, 0 to 1, from one thread; the line is wiped at the end,
        also when the work raises. On anything but a terminal it does nothing.
    """
    out = sys.stderr if stream is None else stream
    if not _terminal(out):
        yield lambda share: None
        return
    line = _Line(safe(title), out)
    try:
        yield line.tick
    finally:
        line.wipe()


def followed(function: Callable[P, R], title: str = "") -> Callable[P, R]:
    """The function, showing how far it is when it is called in IPython and takes long.

    It has a keyword ``tick``: a function that is given takes the place of the bar, ``False`` shows nothing. Outside of
    IPython, and in threads, the function is called as it is.
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        tick = options.pop("tick", None)
        shell = _shell() if tick is None else None
        if shell is None:
            return _told(function, tick or None, args, options)
        with _in_ipython(title or function.__name__, shell) as shown:
            return _told(function, shown, args, options)

    call.__module__ = "workbench"  # whence it is imported, and so what a pickle of it names
    return call


def _told(function: Callable[..., R], tick: object, args: Any, options: Any) -> R:
    return function(*args, **options) if tick is None else function(*args, tick=tick, **options)


def _shell() -> Any:
    """The running IPython; ``None`` outside of it, and in threads other than the one that runs cells."""
    here = threading.current_thread() is threading.main_thread()
    asked = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return asked() if here and asked is not None else None


@contextmanager
def _in_ipython(title: str, shell: Any) -> Iterator[Callable[[float], None]]:
    if not hasattr(shell, "kernel"):  # a terminal, or a script that embeds IPython
        with progress(title) as tick:
            yield tick
        return
    cell = _Cell(title)
    try:
        yield cell.tick
    finally:
        cell.wipe()


class _Bar:
    """A bar that is redrawn as the work progresses: first after some patience, then at most ten times a second."""

    def __init__(self, title: str, patience: float) -> None:
        self._title, self._patience = title, patience
        self._begin = self._drawn = time.monotonic()
        self._shown = False

    def tick(self, share: float) -> None:
        now = time.monotonic()
        if now - self._begin < self._patience or (self._shown and now - self._drawn < EVERY):
            return
        self._drawn, self._shown = now, True
        share = min(max(share, 0.0), 1.0)
        self._draw(share, _left(now - self._begin, share))

    def _draw(self, share: float, left: str) -> None:
        raise NotImplementedError


class _Line(_Bar):
    """The line of a terminal that is drawn over and over."""

    def __init__(self, title: str, out: TextIO) -> None:
        super().__init__(title, PATIENCE)
        self._out = out

    def wipe(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")

    def _draw(self, share: float, left: str) -> None:
        tail = f" ▕{_bar(share)}▏ {share:4.0%}  {left}"
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._write("\r" + _fit(self._title, width - columns(tail)) + tail[: max(width, 0)] + "\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, UnicodeError):  # a terminal that went away, or cannot draw blocks: the work matters more
            self._shown = False


class _Cell(_Bar):
    """An output of a notebook's cell that is replaced over and over, in plain HTML and in text."""

    def __init__(self, title: str) -> None:
        super().__init__(title, CELL_PATIENCE)
        self._handle: Any = None

    def wipe(self) -> None:
        if self._shown:
            self._show("", "")

    def _draw(self, share: float, left: str) -> None:
        words = f"{share:.0%}  {left}".rstrip()
        bar = f'<progress value="{share:.3f}" aria-label="{self._title}"></progress>'
        self._show(f"{self._title} ▕{_bar(share)}▏ {words}", f"{self._title} {bar} {words}")

    def _show(self, text: str, html: str) -> None:
        from IPython.display import display

        data = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _terminal(out: TextIO) -> bool:
    return out.isatty() and os.environ.get("TERM") != "dumb"


def _bar(share: float) -> str:
    whole, part = divmod(round(share * BAR * 8), 8)
    return ("█" * whole + (_PARTS[part] if whole < BAR else "")).ljust(BAR)


def _left(spent: float, share: float) -> str:
    """What remains at the pace so far; nothing while that is a guess."""
    return f"{units.age(spent * (1 - share) / share)} left" if share > 0.02 else ""


def _fit(title: str, width: int) -> str:
    if width <= 0:
        return ""
    while columns(title) > width:  # wide characters take two columns
        title = shorten(title, min(len(title), width) - (1 if len(title) <= width else 0))
    return title
