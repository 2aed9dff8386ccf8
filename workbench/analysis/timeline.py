"""The steps of a run in order: their contents, the norms of weights and moments, and how far the weights moved.

::

    step  path         complete  tensors  nbytes   norm_param  norm_exp_avg  norm_exp_avg_sq  change  nan
    2000  step-2000    yes           738  11.2 GB      412.7         0.031           2.1e-05      –    0
    4000  step-4000    yes           738  11.2 GB      431.0         0.027           1.9e-05   0.081   0
    6000  step-6000    yes           738  11.2 GB        NaN         0.029           1.9e-05     NaN   1
    8000  step-8000    no: .metadata is missing

``change`` is ``‖w₄ − w₂‖ / ‖w₂‖`` of all weights (role ``param``) against the complete step before, over the tensors
that both hold. A norm over NaN is NaN, and so is a change from or to it; ``nan`` counts the NaNs of all tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.compare import compare
from workbench.analysis.comparison import ratio_of
from workbench.analysis.diff_pairs import align
from workbench.analysis.stats import stats
from workbench.checkpoint import Checkpoint, open
from workbench.core.scan import Progress
from workbench.core.source import needs_descriptors
from workbench.errors import NotACheckpointError, UsageError, WorkbenchError
from workbench.names.steps import step_of
from workbench.runs import discover

if TYPE_CHECKING:
    import pandas as pd

ROLES = ("param", "exp_avg", "exp_avg_sq")
BOTH = 3  #: readings of a step that takes part in a change: its statistics, and it and the step before, compared
STEP_COLUMNS = (
    "step",
    "path",
    "format",
    "complete",
    "why",
    "tensors",
    "nbytes",
    "norm_param",
    "norm_exp_avg",
    "norm_exp_avg_sq",
    "change",
    "nan",
)
TENSOR_COLUMNS = ("step", "path", "key", "fqn", "role", "norm", "absmean", "nan", "change")


@needs_descriptors()
def timeline(
    run: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Checkpoint],
    *,
    by: str = "step",
    values: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Return the checkpoints of a run in the order of their steps.

    Args:
        run: a run's folder, one checkpoint, or the run's checkpoints or their paths.
        by: ``step``: one row per step; ``tensor``: one row per tensor of each readable step.
        values: compute norms and changes; otherwise only metadata is used (``step`` only).
        threads, progress: as for ``stats``.

    Returns:
        by step: step path format complete why tensors nbytes norm_param norm_exp_avg norm_exp_avg_sq change nan; values
        that a step lacks are missing. By tensor: step path key fqn role norm absmean nan change, with ``change`` of
        weights and moments. A step that is incomplete or cannot be read is a row with the reason in ``why``.

    Raises:
        OpenError: the folder cannot be listed, or holds no checkpoints with steps.
        UsageError: an unknown ``by``.
    """
    import pandas as pd

    if by not in ("step", "tensor") or (by == "tensor" and not values):
        raise UsageError(f"by={by!r}: choose 'step', or 'tensor' with values=True")
    found = _steps(run)
    rows: list[dict[str, Any]] = []
    before: _ReadStep | None = None
    total = 1 + BOTH * (len(found) - 1)  # in readings of one step
    for number, one in enumerate(found):
        begin, end = max(1 + BOTH * (number - 1), 0), 1 + BOTH * number
        step_progress = None if progress is None else _part(progress, begin / total, end / total)
        row: dict[str, Any] = dict.fromkeys(STEP_COLUMNS)
        row |= {"step": one.step, "path": one.path, "complete": not one.why, "why": one.why, "format": one.format}
        try:
            ckpt = one.ckpt or (None if one.why else open(one.full))
            if ckpt is not None:
                row |= {"format": ckpt.format, "step": one.step if ckpt.step is None else ckpt.step}
                row |= {"tensors": len(ckpt), "nbytes": int(ckpt.catalog.tensor_nbytes.sum())}
                if values:
                    before, tensors = _tensors(before, ckpt, row, threads, step_progress)
                    if by == "tensor":
                        rows += tensors
        except WorkbenchError as error:
            row |= {"complete": False, "why": str(error)}
        if by == "step":
            rows.append(row)
        if progress is not None:
            progress(end / total)
    frame = pd.DataFrame(rows, columns=list(STEP_COLUMNS if by == "step" else TENSOR_COLUMNS))
    for name in ("step", "tensors", "nbytes", "nan"):
        if name in frame:
            frame[name] = frame[name].astype("Int64")
    for name in ("norm_param", "norm_exp_avg", "norm_exp_avg_sq", "change", "norm", "absmean"):
        if name in frame:
            frame[name] = frame[name].astype("float64")
    return frame


@dataclass(frozen=True)
class _Step:
    step: int | None
    path: str
    full: str
    format: str
    why: str
    ckpt: Checkpoint | None = None


def _steps(run: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Checkpoint]) -> list[_Step]:
    if isinstance(run, (str, bytes, os.PathLike)):
        root = os.fsdecode(run)
        found = discover(root, depth=3)
        if len(found) != 1:  # one is a run of one step, whether or not its name says which
            found = [one for one in found if one.step is not None]
        if not found:
            raise NotACheckpointError(
                f"{root!r} contains no checkpoints with steps in their names; pass them in order, timeline([path, …])"
            )
        steps = [
            _Step(one.step, one.path, root if one.path == "." else os.path.join(root, one.path), one.format, one.why)
            for one in found
        ]
    else:
        steps = []
        for item in run:
            if isinstance(item, Checkpoint):
                steps.append(_Step(item.step, item.path, item.path, item.format, "", item))
            else:
                path = os.fsdecode(item)
                steps.append(_Step(step_of(path), path, path, "", ""))
    return sorted(steps, key=lambda one: (one.step is None, one.step or 0))


@dataclass(frozen=True)
class _ReadStep:
    """A step that was read: its checkpoint, and by tensor whether an element is NaN or infinite."""

    ckpt: Checkpoint
    spoilt: np.ndarray[Any, np.dtype[np.bool_]]


def _tensors(
    before: _ReadStep | None, ckpt: Checkpoint, row: dict[str, Any], threads: int | None, progress: Progress | None
) -> tuple[_ReadStep, list[dict[str, Any]]]:
    """Fill in a step's norms, change and NaNs; returns the step as read, and the rows of its tensors."""
    frame = stats(
        ckpt, threads=threads, progress=progress if progress is None or before is None else _part(progress, 0, 1 / BOTH)
    )
    roles = np.array(ckpt.roles)
    norms = frame["norm"].to_numpy("float64", na_value=math.nan)
    nans = frame["nan"].to_numpy("int64")
    after = _ReadStep(ckpt, nans + frame["posinf"].to_numpy("int64") + frame["neginf"].to_numpy("int64") > 0)
    row["nan"] = int(nans.sum())
    for role in ROLES:
        mine = roles == role
        picked = norms[mine & ~np.isnan(norms)]  # a tensor without elements has no norm
        if nans[mine].any():
            row[f"norm_{role}"] = math.nan
        elif len(picked):
            row[f"norm_{role}"] = math.hypot(*picked.tolist())
    changes = (
        {}
        if before is None
        else _changes(before, after, threads, None if progress is None else _part(progress, 1 / BOTH, 1))
    )
    weights = [squares for u, squares in changes.items() if ckpt.roles[u] == "param"]
    if weights:
        sums = [squares for squares in weights if squares is not None]
        whole = len(sums) == len(weights)
        row["change"] = ratio_of(sum(s[0] for s in sums), sum(s[1] for s in sums)) if whole else math.nan
    rows = []
    for u, (key, norm, mean, nan) in enumerate(
        zip(frame["key"].tolist(), norms.tolist(), frame["absmean"].tolist(), nans.tolist(), strict=True)
    ):
        made = {"step": row["step"], "path": row["path"], "key": key, "fqn": ckpt.fqns[u], "role": ckpt.roles[u]}
        squares = changes.get(u)
        change = None if squares is None else ratio_of(*squares)
        rows.append(made | {"norm": norm, "absmean": mean, "nan": nan, "change": change})
    return after, rows


def _changes(
    first: _ReadStep, second: _ReadStep, threads: int | None, progress: Progress | None
) -> dict[int, tuple[int, int] | None]:
    """Compute exact Σδ² and Σa² of tensors that both steps hold whole, by position in the later step; ``None`` if
    either contains NaN or infinities, because sums over the rest would look like a small change.
    """
    before, ckpt = first.ckpt, second.ckpt
    pairs = [
        pair
        for pair in align(before, ckpt).pairs
        if pair.a is before and before.catalog.shape_of(pair.tensor_a) == ckpt.catalog.shape_of(pair.tensor_b)
    ]
    left = np.array([pair.tensor_a for pair in pairs], np.int64)
    right = np.array([pair.tensor_b for pair in pairs], np.int64)
    passed = compare(
        before.payloads,
        ckpt.payloads,
        left,
        right,
        threads=threads,
        progress=progress,
        on_error=lambda *_: None,
        norms=True,
    )
    return {
        pairs[k].tensor_b: None
        if first.spoilt[pairs[k].tensor_a] or second.spoilt[pairs[k].tensor_b]
        else (state.squares[0], state.squares[1])
        for k, state in passed
        if state.how in ("bits", "numbers") and state.seen == ckpt.catalog.numel[pairs[k].tensor_b]
    }


def _part(progress: Progress, begin: float, end: float) -> Progress:
    return lambda share: progress(begin + share * (end - begin))
