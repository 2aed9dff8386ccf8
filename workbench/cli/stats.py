"""``workbench stats``: range, mean, spread, norms and unusual values of every tensor."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.analysis.stats import stats as statistics
from workbench.checkpoint import Checkpoint
from workbench.cli.common import narrow, note, open_as, paint, print_json, say
from workbench.cli.workers import check_pins, run_part, workers
from workbench.core.jsonable import finite
from workbench.core.near import did_you_mean
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.views.progress import progress_bar
from workbench.views.stats import anomaly_words, stats_lines

if TYPE_CHECKING:
    import pandas as pd

CANNOT_READ = 3
OF_ALL = ("norm", "rms")


def stats(options: argparse.Namespace) -> int:
    """Print the table; return 3 if a part of the checkpoint could not be read, otherwise 0."""
    ckpt = narrow(open_as(options, options.path), options)
    if options.part is not None:
        return run_part(options, ckpt, lambda: _computed(options, ckpt, cache=False))
    check_pins(options, ckpt)
    frame = _sorted(_computed(options, ckpt, cache=not options.no_cache), options.sort)
    if options.json:
        head = {"path": ckpt.path, "format": ckpt.format, "step": ckpt.step, "by": options.by}
        print_json(head | {"engine": frame.attrs["engine"], "rows": _rows(frame)})
    else:
        _print(frame, options.by)
    lost = int(frame["error"].notna().sum())
    if lost:
        note(f"{plural(lost, options.by)} could not be read completely; the numbers cover only the rest")
    return CANNOT_READ if lost else 0


def _computed(options: argparse.Namespace, ckpt: Checkpoint, *, cache: bool) -> pd.DataFrame:
    title = f"stats {os.path.basename(os.path.normpath(ckpt.path))}"
    with workers(options) as executor, progress_bar(title) as progress:
        return statistics(
            ckpt,
            options.by,
            quantiles=options.quantiles,
            threads=options.threads,
            progress=progress,
            cache=cache,
            executor=executor,
        )


def _sorted(frame: pd.DataFrame, column: str | None) -> pd.DataFrame:
    """Sort numbers in descending order, names in ascending order."""
    if column is None:
        return frame
    if column not in frame.columns:
        columns = list(map(str, frame.columns))
        raise UsageError(f"--sort {column!r}: choose one of {', '.join(columns)}{did_you_mean(column, columns)}")
    numeric = frame[column].dtype.kind in "iuf"
    return frame.sort_values(column, ascending=not numeric, kind="stable")


def _print(frame: pd.DataFrame, by: str) -> None:
    for at, line in enumerate(stats_lines(frame, by)):
        say(paint(line, "head") if not at else paint(line, "bad") if line.startswith("  ") else line)
    odd = sum(bool(anomaly_words(row)) for row in frame.to_dict("records"))
    if odd:
        say(f"{plural(odd, by)} of {len(frame):,} with unusual values")


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(name): _plain(str(name), value, row) for name, value in row.items()} for row in frame.to_dict("records")
    ]


def _plain(name: str, value: Any, row: Mapping[Any, Any]) -> Any:
    """Convert a cell to JSON, missing values to null. Only norm and rms include NaN elements and can be NaN."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float):
        return finite(value) if not math.isnan(value) or (name in OF_ALL and row["nan"] > 0) else None
    return None if str(value) == "<NA>" else value
