"""A histogram in a line of text, or in a few bytes of SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bars", "spark"]

_LEVELS = "▁▂▃▄▅▆▇█"


def spark(counts: np.ndarray[Any, Any]) -> str:
    """One block a bin, the highest full; an empty bin is a space, so that an outlier's gap is seen.

    >>> spark(np.array([1, 4, 0, 8]))
    '▁▄ █'
    """
    top = int(counts.max(initial=0))
    return "".join(" " if not n else _LEVELS[-(-n * 8 // top) - 1] for n in counts.tolist())


def bars(counts: np.ndarray[Any, Any], width: int = 160, height: int = 28) -> str:
    """The same as inline SVG in the colour of the text around it."""
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
