"""A window of a tensor's values as a table, in HTML and as a DataFrame, with positions along both edges."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.window import Window

if TYPE_CHECKING:
    import pandas as pd

_BOX = "overflow-x:auto;max-width:100%;padding-bottom:6px"


def window_html(here: Window, values: np.ndarray[Any, Any]) -> str:
    """Return the table, with a sentence about which part of the slice it shows.

    Args:
        values: elements of ``here.shown``, from :func:`workbench.views.values.elements`.
    """
    grid = _grid(values)
    rows, cols = _edges(here)
    head = "".join(f'<th class="n" scope="col">{name}</th>' for name in cols)
    body = "".join(
        f'<tr><th class="n" scope="row">{name}</th>{"".join(map(_cell, line))}</tr>'
        for name, line in zip(rows, grid.tolist(), strict=True)
    )
    table = f'<table class="window"><tr><td></td>{head}</tr>{body}</table>'
    box = f'<div style="{_BOX}" tabindex="0" role="region" aria-label="Values of the slice">{table}</div>'
    return f'<p class="muted">{escape(_caption(here))}</p>{box}'


def window_frame(here: Window, values: np.ndarray[Any, Any]) -> pd.DataFrame:
    """Return the same for a file: a column of row positions, then one column per position."""
    import pandas as pd

    rows, cols = _edges(here)
    frame = pd.DataFrame(_grid(values), columns=cols)
    frame.insert(0, "row", rows)
    return frame


def _caption(here: Window) -> str:
    names = " and ".join(f"{edge} are axis {axis}" for edge, axis in zip(("rows", "columns"), here.axes, strict=False))
    whole = " × ".join(f"{n:,}" for n in here.shape) or "one element"
    shown = tuple(map(len, here.index))
    shown_part = f"the first {' × '.join(map(str, shown))} of {whole}" if shown != here.shape else whole
    return f"{shown_part}; {names}" if names else shown_part


def _grid(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(values).reshape(-1, 1) if np.ndim(values) < 2 else np.asarray(values)


def _edges(here: Window) -> tuple[list[str], list[str]]:
    rows = [str(i) for i in here.index[0]] if here.index else [""]
    cols = [str(i) for i in here.index[1]] if len(here.index) > 1 else ["value"]
    return rows, cols


def _cell(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        word = "NaN" if math.isnan(value) else "+Inf" if value > 0 else "−Inf"
        return f'<td class="n"><span class="odd">{word}</span></td>'
    text = f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)
    return f'<td class="n" title="{escape(repr(value))}">{escape(text.replace("-", "−"))}</td>'
