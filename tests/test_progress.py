"""The bar: drawn on a terminal only, wiped at the end, harmless whatever the title."""

from __future__ import annotations

import io

import pytest

from workbench.views import progress as module
from workbench.views.names import columns
from workbench.views.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0)
    monkeypatch.setattr(module, "EVERY", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_pipe_gets_nothing(at_once):
    out = io.StringIO()
    with progress("stats", out) as tick:
        tick(0.5)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_line_that_is_wiped(at_once):
    out = Terminal()
    with progress("stats", out) as tick:
        tick(0.5)
        assert "stats" in out.getvalue() and "50%" in out.getvalue() and "█" * 12 in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


def test_it_is_wiped_when_the_work_raises(at_once):
    out = Terminal()
    with pytest.raises(ZeroDivisionError), progress("stats", out) as tick:
        tick(0.1)
        raise ZeroDivisionError
    assert out.getvalue().endswith("\r\x1b[K")


def test_short_work_shows_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress("stats", out) as tick:
        tick(0.5)
    assert out.getvalue() == ""


@pytest.mark.parametrize("width", ["20", "30", "40", "60", "200"])
@pytest.mark.parametrize("title", ["", "x" * 300, "模型" * 60, "a\x1b[2Jb\u202ec"])
@pytest.mark.parametrize("share", [-1.0, 0.0, 0.031, 0.5, 0.999, 1.0, 7.0])
def test_a_line_fits_the_terminal_and_obeys_nothing(at_once, monkeypatch, width, title, share):
    monkeypatch.setenv("COLUMNS", width)
    out = Terminal()
    with progress(title, out) as tick:
        tick(share)
        line = out.getvalue()
    plain = line.removeprefix("\r").removesuffix("\x1b[K")
    assert columns(plain) < int(width) and plain.isprintable()


def test_a_terminal_that_cannot_draw_it_stops_nothing(at_once):
    class Ascii(Terminal):
        def write(self, text):
            text.encode("ascii")
            return super().write(text)

    with progress("stats", Ascii()) as tick:
        tick(0.5)
