"""A table of a run's checkpoints: learning rate and its plan, norms, gradients.

::

    step   lr        plan      norm_param  gradient  change
    2000   3.0e-4    3.0e-4         412.7     0.031       –     gradient: √Σv, the norm in the second moments
    4000   3.0e-4    2.8e-4         431.0     0.027   0.081     change: ‖w₄ − w₂‖ / ‖w₂‖
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.analysis.stats import stats
from workbench.analysis.timeline import timeline
from workbench.checkpoint import Checkpoint, open
from workbench.core.scan import Progress
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.schedule import plan_of
from workbench.doctor.facts.state import TrainingState
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    import pandas as pd

Source = str | os.PathLike[str] | Checkpoint


def history(
    run: str | os.PathLike[str] | Sequence[Source],
    *,
    values: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Return a table of the checkpoints of a run in the order of their steps.

    Args:
        run: its folder, or its checkpoints or their paths.
        values: read norms and moments; otherwise use only metadata and the trainer's state.
        threads, progress: as for ``stats``.

    Returns:
        ``step path lr plan`` and, with ``values``, ``norm_param gradient change``. Values that a step lacks are
        missing; steps that are incomplete or cannot be read are left out. ``plan`` is the learning rate that the
        schedule of the earliest step gives for a step.

    Raises:
        OpenError: the folder cannot be listed.
    """
    import pandas as pd

    frame = timeline(run, values=values, threads=threads, progress=progress)
    root = os.fsdecode(run) if isinstance(run, (str, bytes, os.PathLike)) else None
    held = (
        {}
        if isinstance(run, (str, bytes, os.PathLike))
        else {one.path: one for one in run if isinstance(one, Checkpoint)}
    )
    rows: list[dict[str, Any]] = []
    plan = None
    for one in frame.itertuples():
        if not one.complete or pd.isna(one.step):
            continue
        try:
            path = one.path if root is None else root if one.path == "." else os.path.join(root, one.path)
            ckpt = held.get(one.path) or open(path)
            facts = gather(ckpt)
            gradient = _gradient(ckpt, threads) if values else math.nan
        except WorkbenchError:
            continue
        plan = plan or plan_of(facts.schedule, facts.args, facts.statements)
        wanted = math.nan if plan is None else plan.lr_at(int(one.step))
        row = {"step": int(one.step), "path": one.path, "lr": _lr(facts), "plan": wanted}
        rows.append(row | {"norm_param": one.norm_param, "gradient": gradient, "change": one.change})
    return pd.DataFrame(rows, columns=["step", "path", "lr", "plan", "norm_param", "gradient", "change"])


def _gradient(ckpt: Checkpoint, threads: int | None) -> float:
    """Return √Σv, the norm of the gradient averaged over the last 1/(1−β2) updates."""
    if "exp_avg_sq" not in ckpt.roles:
        return math.nan
    frame = stats(ckpt.select(role="exp_avg_sq"), threads=threads)
    total = float((frame["mean"] * frame["numel"]).sum())
    return math.sqrt(total) if total >= 0 else math.nan


def _lr(facts: TrainingState) -> float:
    rates = [group.lr for group in facts.groups if group.lr is not None]
    return max(rates) if rates else math.nan if facts.lr is None else facts.lr
