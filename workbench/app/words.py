"""Numbers and names as the page writes them: units after a thin space, digits in groups, names escaped."""

from __future__ import annotations

from html import escape

from workbench.app.jail import relative_words
from workbench.views import names, units

__all__ = ["count", "html", "number", "safe", "size"]

THIN = "\u2009"


def safe(text: object) -> str:
    """Text from a checkpoint without controls and bidirectional marks; paths under ROOT are relative to it, as
    everywhere on the page.
    """
    return names.safe(relative_words(str(text)))


def count(value: int) -> str:
    """``1 048 576``, exactly."""
    return f"{value:,}".replace(",", THIN)


def size(nbytes: int) -> str:
    """``1.2 GiB``."""
    return units.nbytes(nbytes).replace(" ", THIN)


def number(value: float | int | None) -> str:
    """An element's value: integers exactly, others with five digits."""
    if value is None:
        return "–"
    return count(value) if isinstance(value, int) else f"{value:.5g}".replace("-", "−")


def html(text: object) -> str:
    """Text from a checkpoint, harmless in HTML: neither markup nor controls nor bidirectional marks are obeyed."""
    return escape(safe(text))
