"""The memory budget of a checkpoint on some GPUs: for a given layout, or the smallest that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from workbench.analysis.layout import Layout
from workbench.checkpoint import Checkpoint, as_checkpoint
from workbench.core.mesh.mesh import MAX_RANKS, Mesh
from workbench.errors import UsageError
from workbench.export.sharding.rules import Rules
from workbench.memory.budget import PARTS, Budget, Choice, rank_bytes
from workbench.memory.local import LocalPieces, MemoryModel
from workbench.memory.precision import Precision

if TYPE_CHECKING:
    import pandas as pd

NODE = 8  #: largest tp that is tried by default: the GPUs of one machine
STAGES = (0, 1, 2, 3)
TRIED = 4096  #: approximate number of layouts that are tried
MAX_GB = 1e6  #: of one GPU
NOT_COUNTED = "activations, temporary buffers, allocator overhead and, at stage 3, gathered weights are not counted"


def plan_memory(
    source: Checkpoint | Layout | str | os.PathLike[str],
    gpus: int,
    memory_gb: float,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    stage: int | None = None,
    precision: Precision | None = None,
    reserve_gb: float = 0.0,
    rules: Rules | None = None,
    progress: Callable[[float], None] | None = None,
) -> Budget:
    """Compute whether a checkpoint's tensors fit ``gpus`` GPUs, and the smallest layout in which they do.

    All values of sizes that are not given are tried: ``tp`` up to 8, ``pp`` up to the number of layers, ``ep`` that
    divides the number of experts, stages 0 to 3, on every number of GPUs that divides ``gpus``. The smallest layout has
    the fewest GPUs, then the lowest ``tp · pp``, then the lowest stage.

    Args:
        source: the checkpoint, its path or URL, or its layout; its weights are used, or the shapes of their optimizer
            state if no weights are stored.
        gpus: number of GPUs available.
        memory_gb: memory of each GPU, in 10⁹ bytes.
        tp, pp, dp, ep: fixed sizes, if any; ``dp`` counts data parallel ranks, ``ep`` is a part of them.
        stage: the state sharded over data parallel ranks, by rows as in FSDP2: 0 nothing, 1 moments and masters, 2
            gradients too, 3 weights too.
        precision: types; by default weights as stored, gradients of the same types, fp32 masters and two fp32 moments.
        reserve_gb: memory of each GPU reserved for activations and everything else, in 10⁹ bytes.
        rules: placements, as for resharding.
        progress: called with the fraction of layouts tried; raise an exception to cancel.

    Raises:
        UsageError: the sizes do not give a layout, or there are no parameters.
    """
    if not 1 <= gpus <= MAX_RANKS:
        raise UsageError(f"{gpus!r} is not a number of GPUs from 1 to {MAX_RANKS:,}")
    if not (reserve_gb >= 0 and reserve_gb < memory_gb <= MAX_GB):
        raise UsageError(
            f"{memory_gb:g} GB for each GPU, {reserve_gb:g} GB of it reserved: the memory must be more than the "
            f"reserve, and {MAX_GB:,.0f} GB or less; a reserve is 0 GB or more"
        )
    fixed = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
    for name, size in fixed.items():
        if size is not None and size < 1:
            raise UsageError(f"{name} must be 1 or more, not {size}")
    if stage is not None and stage not in STAGES:
        raise UsageError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    known = source if isinstance(source, Layout) else as_checkpoint(source)
    model, precision, rules = MemoryModel.of(known), precision or Precision(), rules or Rules()
    room = int(memory_gb * 1e9) - int(reserve_gb * 1e9)

    @lru_cache(maxsize=256)
    def pieces(tp: int, pp: int, ep: int) -> tuple[Mesh, list[LocalPieces], list[str]]:
        mesh = Mesh(pp=pp, ep=ep, tp=tp)
        return (mesh, *model.pieces(mesh, rules, precision))

    choices = []
    tried, thinned = _thinned(list(_layouts(model, gpus, tuple(fixed.values()))))
    for number, (a, b, c, d) in enumerate(tried):
        if progress is not None:
            progress(number / len(tried))
        mesh, mine, _ = pieces(a, b, d)
        for one in STAGES if stage is None else (stage,):
            if stage is None and c == 1 and one > 0:
                continue  # nothing to shard
            choices.append(_choice(mine, mesh, c, one, room))
    if not choices:
        asked = ", ".join(f"{name}={size}" for name, size in fixed.items() if size is not None)
        raise UsageError(
            f"{asked or 'no size'} does not give a layout for {gpus} GPUs or fewer; tp · pp · dp must divide {gpus}"
        )
    order = sorted(choices, key=_preferred)
    chosen = order[0]
    mesh, mine, notes = pieces(chosen.tp, chosen.pp, chosen.ep)
    return Budget(
        gpus,
        int(memory_gb * 1e9),
        int(reserve_gb * 1e9),
        precision,
        int(model.catalog.numel.sum()),
        order,
        chosen,
        _frame(mine, mesh, chosen),
        [*model.notes, *notes, *thinned, NOT_COUNTED],
    )


def _layouts(model: MemoryModel, gpus: int, fixed: Sequence[int | None]) -> Iterator[tuple[int, int, int, int]]:
    """Yield sizes of tp, pp, dp, ep that make up a layout; the fewest GPUs first."""
    tp, pp, dp, ep = fixed
    for world in (n for n in range(1, gpus + 1) if gpus % n == 0):
        for a in _sizes(tp, world, NODE):
            for b in _sizes(pp, world // a, max(model.layers, 1)):
                c = world // (a * b)
                if dp is not None and c != dp:
                    continue
                for d in _sizes(ep, c, max(model.experts, 1)):
                    if ep is None and d > 1 and model.experts % d:
                        continue
                    yield a, b, c, d


def _thinned(every: list[tuple[int, int, int, int]]) -> tuple[list[tuple[int, int, int, int]], list[str]]:
    """Return about :data:`TRIED` layouts, equally many for each number of GPUs, and a note if some were left out."""
    if len(every) <= TRIED:
        return every, []
    worlds: dict[int, list[tuple[int, int, int, int]]] = {}
    for one in every:
        worlds.setdefault(one[0] * one[1] * one[2], []).append(one)
    most = max(TRIED // len(worlds), 1)
    kept = [one for mine in worlds.values() for one in mine[:: -(-len(mine) // most)]]
    note = f"{len(kept):,} of {len(every):,} layouts were tried, evenly over the numbers of GPUs; fix tp, pp or ep"
    return kept, [note]


def _sizes(fixed: int | None, whole: int, most: int) -> list[int]:
    """Return divisors of ``whole``: the fixed one, or all up to ``most``."""
    if fixed is not None:
        return [fixed] if whole % fixed == 0 else []
    return [n for n in range(1, min(whole, most) + 1) if whole % n == 0]


def _choice(pieces: list[LocalPieces], mesh: Mesh, dp: int, stage: int, room: int) -> Choice:
    _, parts = rank_bytes(pieces, mesh, dp, stage)
    total = parts.sum(axis=1)
    top = int(np.argmax(total))
    a, b, c, d = parts[top].tolist()
    return Choice(
        mesh.size("tp"),
        mesh.size("pp"),
        dp,
        mesh.size("ep"),
        stage,
        int(total[top]),
        float(total.mean()),
        (a, b, c, d),
        int(total[top]) <= room,
    )


def _preferred(one: Choice) -> tuple[float, ...]:
    """Sort choices that fit first, by size; then the others, by their largest rank."""
    if one.fits:
        return 0, one.gpus, one.tp * one.pp, one.stage, one.tp, one.ep
    return 1, one.largest, one.stage, one.gpus, one.tp, one.ep


def _frame(pieces: list[LocalPieces], mesh: Mesh, chosen: Choice) -> pd.DataFrame:
    import pandas as pd

    places, parts = rank_bytes(pieces, mesh, chosen.dp, chosen.stage)
    order = np.lexsort((places[:, 3], places[:, 1], places[:, 0]))
    places, parts = places[order], parts[order]
    columns = {"rank": np.arange(len(places))}
    columns |= {name: places[:, at] for at, name in enumerate(("pp", "dp", "ep", "tp"))}
    columns |= {name: parts[:, at] for at, name in enumerate(PARTS)}
    return pd.DataFrame(columns | {"nbytes": parts.sum(axis=1)})
