"""Numbers and names as the page shows them: units after a thin space, commas between thousands, names escaped."""

from __future__ import annotations

from html import escape

from workbench.app.jail import relative_words
from workbench.views import names, units

THIN = "\u2009"


def safe(text: object) -> str:
    """Return text from a checkpoint without control characters and bidirectional marks.

    Paths under ROOT become relative to it, as everywhere on the page.
    """
    return names.safe(relative_words(str(text)))


def count(value: int) -> str:
    """Return ``1,048,576``, exactly."""
    return f"{value:,}"


def size(nbytes: int) -> str:
    """Return ``1.2 GiB``."""
    return units.nbytes(nbytes).replace(" ", THIN)


def number(value: float | int | None) -> str:
    """Format an element's value: integers exactly, others with five digits."""
    if value is None:
        return "–"
    return count(value) if isinstance(value, int) else f"{value:.5g}".replace("-", "−")


def html(text: object) -> str:
    """Return text from a checkpoint that is safe in HTML: markup, controls and bidirectional marks have no effect."""
    return escape(safe(text))
