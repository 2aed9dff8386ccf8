"""The optimizer's own counters: one scalar a parameter, a group, or a rank. Their bytes are read, and no others.

::

    optimizer.state.layers.0.wq.weight.step   240.0     every replica and every rank's
    optimizer.param_groups[0].step            240       Megatron's and Apex' optimizers keep one a group
    beta_pow                                  240       Paddle stores powers of its betas; the reader turns them back
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.checkpoint import Checkpoint
from workbench.doctor.facts.numbers import BITS
from workbench.doctor.facts.state import Group, Steps
from workbench.errors import WorkbenchError

__all__ = ["read_steps"]

MAX_SCALARS = 200_000  #: counters read


def read_steps(ckpt: Checkpoint, groups: Sequence[Group]) -> Steps:
    """Counters from scalars; from groups or powers of beta where there are none."""
    catalog = ckpt.catalog
    wanted = np.array([role == "step" for role in ckpt.roles], bool) & (catalog.numel == 1)
    rows = np.flatnonzero(wanted[catalog.tensor]) if catalog.chunks else np.empty(0, np.int64)
    counts: dict[float, int] = defaultdict(int)
    by_file: dict[str, dict[float, int]] = defaultdict(lambda: defaultdict(int))
    split: dict[str, None] = {}
    by_name: dict[str, float] = {}
    unread = f"{len(rows) - MAX_SCALARS:,} of {len(rows):,} counters: too many" if len(rows) > MAX_SCALARS else ""
    for row in rows[:MAX_SCALARS].tolist():
        position = int(catalog.tensor[row])
        try:
            value = _number(ckpt, row, position)
        except WorkbenchError as error:
            unread = unread or str(error)
            continue
        if value is None:
            continue
        if not 0 <= value < 1 << BITS:  # NaN neither
            unread = unread or f"{ckpt.catalog.keys[position]!r} holds {value:g}: that is no count"
            continue
        counts[value] += 1
        by_file[catalog.files[int(catalog.file[row])]][value] += 1
        fqn = ckpt.fqns[position]
        if fqn is not None and by_name.setdefault(fqn, value) != value:
            split[fqn] = None
            by_name[fqn] = min(value, by_name[fqn])  # the one that lags
    if not counts:
        for group in groups:
            if group.step is not None:
                counts[group.step] += group.count or 1
                by_name |= dict.fromkeys(group.params or (), group.step)
    if not counts:
        counts = _powers(ckpt)
    return Steps(by_name, dict(counts), {file: dict(told) for file, told in by_file.items()}, tuple(split), unread)


def _number(ckpt: Checkpoint, row: int, position: int) -> float | None:
    dtype = ckpt.catalog.dtype_of(position)
    if dtype.packed or dtype.kind not in "fiu":
        return None
    bits = ckpt.payloads.array(row).reshape(-1)
    return float(Decoder(dtype).numbers(bits if dtype.numpy_name is None else bits.view(dtype.numpy))[0])


def _powers(ckpt: Checkpoint) -> dict[float, int]:
    try:
        told: Any = ckpt.objects.get("beta_pow")
    except (WorkbenchError, RecursionError):  # verify tells what is wrong with it
        return {}
    steps = told.get("steps") if isinstance(told, Mapping) else None
    if not isinstance(steps, Mapping):
        return {}
    return {float(step): int(count) for step, count in steps.items() if str(step).isdigit()}
