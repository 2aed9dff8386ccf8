"""Histograms in a line of text, or in a few bytes of SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bars", "spark"]

_LEVELS = "▁▂▃▄▅▆▇█"


def spark(counts: np.ndarray[Any, Any]) -> str:
    """Return one block per bin, the highest full. Empty bins are spaces, which show the gap before an outlier.

    >>> spark(np.array([1, 4, 0, 8]))
    '▁▄ █'
    """
    top = int(counts.max(initial=0))
    return "".join(" " if not n else _LEVELS[-(-n * 8 // top) - 1] for n in counts.tolist())


def bars(counts: np.ndarray[Any, Any], width: int = 160, height: int = 28) -> str:
    """Return the same as inline SVG in the colour of the surrounding text."""
    top, step = int(counts.max(initial=0)) or 1, width / max(len(counts), 1)
    paths = []
    for at, n in enumerate(counts.tolist()):
        if n:
            tall = max(n * height / top, 0.8)
            paths.append(f"M{at * step:.1f} {height}v-{tall:.1f}h{step * 0.85:.1f}v{tall:.1f}z")
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="histogram"><path fill="currentColor" opacity=".7" d="{"".join(paths)}"/></svg>'
    )
