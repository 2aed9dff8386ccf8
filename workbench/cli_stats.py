"""``workbench stats``: range, mean, spread, norms and oddities of every tensor."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.analysis.stats import stats as statistics
from workbench.cli_common import narrow, note, open_as, paint, print_json, table_width
from workbench.core.jsonable import finite
from workbench.core.near import did_you_mean
from workbench.errors import UsageError
from workbench.views import units
from workbench.views.progress import progress
from workbench.views.stats import sick_words, stats_lines

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["stats"]

CANNOT_READ = 3
OF_ALL = ("norm", "rms")


def stats(options: argparse.Namespace) -> int:
    """The table; 3 if a part of the checkpoint could not be read, else 0."""
    ckpt = narrow(open_as(options, options.path), options)
    title = f"stats {os.path.basename(os.path.normpath(ckpt.path))}"
    with progress(title) as tick:
        frame = statistics(
            ckpt,
            options.by,
            quantiles=options.quantiles,
            threads=options.threads,
            tick=tick,
            cache=not options.no_cache,
        )
    frame = _sorted(frame, options.sort)
    if options.json:
        head = {"path": ckpt.path, "format": ckpt.format, "step": ckpt.step, "by": options.by}
        print_json(head | {"engine": frame.attrs["engine"], "rows": _rows(frame)})
    else:
        _print(frame, options.by)
    lost = int(frame["error"].notna().sum())
    if lost:
        note(f"{units.plural(lost, options.by)} could not be read whole; the numbers are of the rest")
    return CANNOT_READ if lost else 0


def _sorted(frame: pd.DataFrame, column: str | None) -> pd.DataFrame:
    """Numbers largest first, names in their order."""
    if column is None:
        return frame
    if column not in frame.columns:
        there = list(map(str, frame.columns))
        raise UsageError(f"--sort {column!r}: choose one of {', '.join(there)}{did_you_mean(column, there)}")
    numeric = frame[column].dtype.kind in "iuf"
    return frame.sort_values(column, ascending=not numeric, kind="stable")


def _print(frame: pd.DataFrame, by: str) -> None:
    for at, line in enumerate(stats_lines(frame, by, width=table_width())):
        print(paint(line, "head") if not at else paint(line, "bad") if line.startswith("  ") else line)
    sick = sum(bool(sick_words(row)) for row in frame.to_dict("records"))
    if sick:
        print(f"{units.plural(sick, by)} of {len(frame):,} with something odd")


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(name): _plain(str(name), value, row) for name, value in row.items()} for row in frame.to_dict("records")
    ]


def _plain(name: str, value: Any, row: Mapping[Any, Any]) -> Any:
    """A cell as JSON; what is missing is null. Of all elements, and so NaN where one is, are the norm and rms alone."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float):
        return finite(value) if not math.isnan(value) or (name in OF_ALL and row["nan"] > 0) else None
    return None if str(value) == "<NA>" else value
