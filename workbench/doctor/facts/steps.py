"""Read the optimizer's own counters: one scalar per parameter, group or rank. No other bytes are read.

::

    optimizer.state.layers.0.wq.weight.step   240.0     every replica and every rank's
    optimizer.state.3.step                    240       as a plain number: bitsandbytes, transformers' Adafactor
    optimizer.param_groups[0].step            240       Megatron's and Apex' optimizers keep one per group
    beta_pow                                  240       Paddle stores powers of its betas; the reader converts them
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.checkpoint import Checkpoint
from workbench.core.words import plural
from workbench.doctor.facts.flat import ObjectLeaf
from workbench.doctor.facts.groups import Names
from workbench.doctor.facts.numbers import BITS, number
from workbench.doctor.facts.state import Group, Steps
from workbench.errors import WorkbenchError

MAX_SCALARS = 200_000  #: most counters to read


def read_steps(ckpt: Checkpoint, groups: Sequence[Group], names: Names, found: Iterable[ObjectLeaf]) -> Steps:
    """Return the counters from scalars, or else from plain numbers, groups or powers of beta."""
    catalog, source = ckpt.catalog, ""
    wanted = np.array([role == "step" for role in ckpt.roles], bool) & (catalog.numel == 1)
    rows = np.flatnonzero(wanted[catalog.tensor]) if catalog.chunks else np.empty(0, np.int64)
    counts: dict[float, int] = defaultdict(int)
    by_file: dict[str, dict[float, int]] = defaultdict(lambda: defaultdict(int))
    split: dict[str, None] = {}
    by_name: dict[str, float] = {}
    unread = (
        f"{len(rows) - MAX_SCALARS:,} of {plural(len(rows), 'counter')}: too many" if len(rows) > MAX_SCALARS else ""
    )
    for row in ckpt.payloads.fetching(rows[:MAX_SCALARS]):
        position = int(catalog.tensor[row])
        try:
            value = _number(ckpt, row, position)
        except WorkbenchError as error:
            unread = unread or str(error)
            continue
        if value is None:
            continue
        if not 0 <= value < 1 << BITS:  # NaN neither
            unread = unread or f"{ckpt.catalog.keys[position]!r} holds {value:g}, which is not a count"
            continue
        counts[value] += 1
        by_file[catalog.files[int(catalog.file[row])]][value] += 1
        source = source or catalog.keys[position]
        fqn = names.fqns[position]
        if fqn is not None and by_name.setdefault(fqn, value) != value:
            split[fqn] = None
            by_name[fqn] = min(value, by_name[fqn])  # the one that lags
    for leaf, name in () if counts else _plain(found, names):
        value = number(leaf.value)
        if value is not None and 0 <= value < 1 << BITS:
            counts[value] += 1
            by_name.setdefault(name, value)
            source = source or leaf.source
    if not counts:
        for group in groups:
            if group.step is not None:
                counts[group.step] += group.count or 1
                by_name |= dict.fromkeys(group.params or (), group.step)
                source = source or f"{group.source}.step"
    if not counts:
        counts, source = _powers(ckpt), "beta_pow"
    by_files = {file: dict(held) for file, held in by_file.items()}
    return Steps(by_name, dict(counts), by_files, tuple(split), unread, source if counts else "")


def _plain(found: Iterable[ObjectLeaf], names: Names) -> Iterable[tuple[ObjectLeaf, str]]:
    """Yield counters that are not tensors, each with its parameter."""
    for leaf in found:
        if leaf.name == "step" and len(leaf.path) > 2 and leaf.path[-3] == "state" and leaf.path[-2].isdecimal():
            name = names.of(".".join(leaf.path[:-3]), int(leaf.path[-2][:19]))
            if name is not None:
                yield leaf, name


def _number(ckpt: Checkpoint, row: int, position: int) -> float | None:
    dtype = ckpt.catalog.dtype_of(position)
    if dtype.packed or dtype.kind not in "fiu":
        return None
    bits = ckpt.payloads.array(row).reshape(-1)
    return float(Decoder(dtype).numbers(bits if dtype.numpy_name is None else bits.view(dtype.numpy))[0])


def _powers(ckpt: Checkpoint) -> dict[float, int]:
    try:
        stored: Any = ckpt.objects.get("beta_pow")
    except (WorkbenchError, RecursionError):  # verify reports the reason
        return {}
    steps = stored.get("steps") if isinstance(stored, Mapping) else None
    if not isinstance(steps, Mapping):
        return {}
    return {float(step): int(count) for step, count in steps.items() if str(step).isdigit()}
