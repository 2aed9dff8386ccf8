"""Will it fit? The memory that a checkpoint's tensors need on each rank for tp × pp × dp × ep and a sharding stage.

::

    tensors ──rules──▶ pieces of each (pp, ep, tp) coordinate ──rows over dp──▶ bytes of each rank
                       local.py                                 budget.py

    stage    0         1            2            3             sharded over dp, by rows, as FSDP2 does
    weights  all       all          all          shard
    grads    all       all          shard        shard
    masters  all       shard        shard        shard
    moments  all       shard        shard        shard
"""

from __future__ import annotations

from workbench.memory.budget import Budget, Choice
from workbench.memory.plan import plan_memory
from workbench.memory.precision import Precision

__all__ = ["Budget", "Choice", "Precision", "plan_memory"]
