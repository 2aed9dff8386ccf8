"""Histograms in a line of text, and histograms and curves in a few bytes of SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

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


def line(
    steps: np.ndarray[Any, Any], values: np.ndarray[Any, Any], marked: float | None = None, height: int = 44
) -> str:
    """Return a curve as inline SVG as wide as its place, in the colour of the surrounding text.

    Args:
        steps, values: of equal length; points that are not finite are left out.
        marked: a step that gets a vertical line.
    """
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(steps) < 2:
        return ""
    width, pad = 240.0, 3.0
    low, high = float(values.min()), float(values.max())
    across = (steps - steps[0]) / max(float(steps[-1] - steps[0]), 1.0) * width
    down = pad + (high - values) / ((high - low) or 1.0) * (height - 2 * pad)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across.tolist(), down.tolist(), strict=True))
    mark = ""
    if marked is not None:
        at = (marked - float(steps[0])) / max(float(steps[-1] - steps[0]), 1.0) * width
        mark = f'<path class="mark" d="M{at:.1f} 0V{height}" vector-effect="non-scaling-stroke"/>'
    return (
        f'<svg viewBox="0 0 {width:.0f} {height}" width="100%" height="{height}" preserveAspectRatio="none" role="img" '
        f'aria-label="loss, {low:.3g} to {high:.3g}">{mark}<polyline points="{path}" fill="none" stroke="currentColor" '
        'stroke-width="1.5" stroke-linejoin="round" vector-effect="non-scaling-stroke"/></svg>'
    )
