"""A progress bar on a terminal or in a notebook for long work; none in a pipe, and none for short work.

::

    stats step-48000  ▕█████████▌          ▏  48 %  1 min left

The command line shows it with :func:`progress_bar`. Functions that users call in IPython show it automatically
(:func:`followed`).
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

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 0.4  #: seconds before anything is shown
CELL_PATIENCE = 1.0  #: in a notebook, where a removed bar leaves an empty line
EVERY = 0.1  #: seconds between two drawings
BAR = 24  #: cells of the bar
_PARTS = " ▏▎▍▌▋▊▉█"


@contextmanager
def progress_bar(title: str, stream: TextIO | None = None) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr.

    Yields:
        a function to call with the fraction done, 0 to 1, from one thread. The line is erased at the end,
        even if the work raises. If stderr is not a terminal, the function does nothing.
    """
    out = sys.stderr if stream is None else stream
    if not _terminal(out):
        yield lambda share: None
        return
    line = _Line(safe(title), out)
    try:
        yield line.update
    finally:
        line.wipe()


def followed(function: Callable[P, R], title: str = "") -> Callable[P, R]:
    """Wrap a function to show a progress bar when it is called in IPython and takes long.

    The keyword ``progress`` takes a function to call instead of showing the bar, or ``False`` to show nothing. Outside
    IPython, and in other threads, the function is called unchanged.
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        progress = options.pop("progress", None)
        shell = _shell() if progress is None else None
        if shell is None:
            return _call(function, progress or None, args, options)
        with _in_ipython(title or function.__name__, shell) as shown:
            return _call(function, shown, args, options)

    call.__module__ = "workbench"  # users import it from here, and so pickles must refer to it here
    return call


def _call(function: Callable[..., R], progress: object, args: Any, options: Any) -> R:
    return function(*args, **options) if progress is None else function(*args, progress=progress, **options)


def _shell() -> Any:
    """Return the running IPython shell; ``None`` outside it, and in threads other than the one that runs cells."""
    here = threading.current_thread() is threading.main_thread()
    asked = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return asked() if here and asked is not None else None


@contextmanager
def _in_ipython(title: str, shell: Any) -> Iterator[Callable[[float], None]]:
    if not hasattr(shell, "kernel"):  # a terminal, or a script that embeds IPython
        with progress_bar(title) as progress:
            yield progress
        return
    cell = _Cell(title)
    try:
        yield cell.update
    finally:
        cell.wipe()


class _Bar:
    """A bar that is redrawn as the work progresses: first after some patience, then at most ten times a second."""

    def __init__(self, title: str, patience: float) -> None:
        self._title, self._patience = title, patience
        self._begin = self._drawn = time.monotonic()
        self._shown = False

    def update(self, share: float) -> None:
        now = time.monotonic()
        if now - self._begin < self._patience or (self._shown and now - self._drawn < EVERY):
            return
        self._drawn, self._shown = now, True
        share = min(max(share, 0.0), 1.0)
        self._draw(share, time_left(now - self._begin, share))

    def _draw(self, share: float, left: str) -> None:
        raise NotImplementedError


class _Line(_Bar):
    """A line of a terminal that is redrawn repeatedly."""

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
        except (OSError, UnicodeError):  # the terminal is gone, or cannot draw blocks: the work matters more
            self._shown = False


class _Cell(_Bar):
    """An output of a notebook cell that is replaced repeatedly, as plain HTML and as text."""

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


def time_left(spent: float, share: float) -> str:
    """Return the remaining time at the current pace; empty while that is a guess."""
    return f"{units.age(spent * (1 - share) / share)} left" if share > 0.02 else ""


def _fit(title: str, width: int) -> str:
    if width <= 0:
        return ""
    while columns(title) > width:  # wide characters take two columns
        title = shorten(title, min(len(title), width) - (1 if len(title) <= width else 0))
    return title
