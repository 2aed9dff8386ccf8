"""A table of statistics as text, 100 columns wide, with anomalies spelled out.

::

    tensor                      dtype  shape         mean     std      min     max   norm  nan
    layers.0.wq.weight          bf16   [64, 64]   0.00012    0.02   -0.081   0.079    nan    3
      NaN! ×3, +Inf!
    layers.0.wk.weight          bf16   [16, 64]         0       0        0       0      0    0
      all zeros
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.views import units
from workbench.views.lines import room
from workbench.views.names import columns, pad, safe, shorten, shorten_all

if TYPE_CHECKING:
    import pandas as pd

NAME = 34  #: minimum width of the name column; numeric columns are dropped first
_NUMBERS = ("mean", "std", "min", "max", "norm")
_SPREAD = ("min", "q01", "q25", "q50", "q75", "q99", "max", "distinct")
_LEAST_WANTED = ("file", "shape", "sizes", "distinct", "q25", "q75", "rank", "dtype", "norm", "tensors")
_MISSING = ("nan", "<NA>", "None")
_WORDS = (("nan", "NaN!"), ("posinf", "+Inf!"), ("neginf", "-Inf!"))


def stats_lines(frame: pd.DataFrame, by: str = "tensor") -> Iterator[str]:
    """Return the header, one line per row, and one more for its anomalies; names are cut where they remain distinct.

    In a pipe, nothing is cut or left out.
    """
    width = room()
    rows: list[dict[str, Any]] = frame.to_dict("records")
    texts, numbers = _shown(frame, by)
    cells = {name: [name, *(_text(row[name]) for row in rows)] for name in texts}
    cells |= {name: [name, *(_number(row, name) for row in rows)] for name in numbers}
    names = [by if by != "shard" else "tensor", *(_name(row, by) for row in rows)]
    first = max(map(columns, names))
    if width is not None:
        _drop(cells, width, min(first, NAME))
    widths = {name: max(map(columns, column)) for name, column in cells.items()}
    if width is not None:
        first = min(first, width - sum(2 + one for one in widths.values()))
    for at, name in enumerate(shorten_all(names, [first] * len(names))):
        line = pad(_fit(name, first), first)
        for title, column in cells.items():
            cell = column[at]
            space = " " * (widths[title] - columns(cell))
            line += "  " + (space + cell if title in numbers else cell + space)
        yield line.rstrip()
        if at and (words := anomaly_words(rows[at - 1])):
            yield shorten("  " + ", ".join(words), width)


def anomaly_words(row: Mapping[str, Any]) -> list[str]:
    """Return the anomalies of a row: ``NaN! ×3``, ``all +Inf!``, ``all zeros``, why it is incomplete."""
    total, found = int(row["numel"]), []
    for column, word in _WORDS:
        if n := int(row[column]):
            found.append(f"all {word}" if n == total > 1 else f"{word} ×{n:,}" if n > 1 else word)
    if int(row["zero"]) == total > 1:
        found.append("all zeros")
    if isinstance(row["error"], str):
        found.append(safe(row["error"]))
    return found


def _shown(frame: pd.DataFrame, by: str) -> tuple[Sequence[str], Sequence[str]]:
    texts = {"tensor": ("dtype", "shape"), "shard": ("sizes", "file", "rank"), "module": ("tensors",)}[by]
    numbers = _SPREAD if "q50" in frame.columns else _NUMBERS
    return texts, (*numbers, "nan") if frame["nan"].any() else numbers


def _name(row: Mapping[str, Any], by: str) -> str:
    if by == "module":
        return safe(row["module"]) or "(all)"
    name = safe(row["key"]) or "''"
    if by == "shard":
        at = "" if not any(row["offsets"]) else " @ " + ",".join(map(str, row["offsets"]))
        name += at + (f" copy {row['replica']}" if row["replica"] else "")
    return name


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return units.shape(value)
    if isinstance(value, str):
        return shorten(safe(units.dtype(value)), 28)
    return "–" if str(value) in _MISSING else f"{value:,}"


def _number(row: Mapping[str, Any], name: str) -> str:
    """Format with three digits, counts exactly; a dash if no element defines the value, ``nan`` for a norm over NaN."""
    value = row[name]
    if str(value) in _MISSING:
        return "nan" if name == "norm" and row["nan"] else "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _drop(cells: dict[str, list[str]], width: int, limit: int) -> None:
    """Drop columns, least important first, until names have room."""
    for name in _LEAST_WANTED:
        if width - sum(2 + max(map(columns, column)) for column in cells.values()) >= limit:
            return
        cells.pop(name, None)


def _fit(text: str, width: int) -> str:
    while columns(text) > width:
        text = shorten(text, min(width, len(text) - 1))
    return text
