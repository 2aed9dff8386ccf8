"""Where the distributed optimizer stores a parameter in the flat buffer of its model chunk.

::

    parameters in reverse model order, each at a multiple of 64 elements; ░ = hole, never written
    │ output_layer │ final_layernorm │ ░ │ layers.3.mlp.linear_fc2 │ ░ ║ layers.3.mlp.linear_fc1 │ …
                                                                       ╚ a gradient bucket closes when it is full

Read from megatron-core 0.16.1 (``core/optimizer/distrib_optimizer.py``) and 0.20.0dev.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.formats.megatron.args import RunArgs

ALIGN = 64  #: elements; ``pad_param_start``
BUCKET = 40_000_000  #: elements of a gradient bucket, unless args set another size


def bucket_size(run: RunArgs, stage: int, chunk: int) -> int | None:
    """Return the size at which a bucket closes; ``None``: one bucket (no overlap, or not the first stage and chunk)."""
    if not run.args.get("overlap_grad_reduce") or stage or chunk:
        return None
    return run.number("ddp_bucket_size") or max(BUCKET, 1_000_000 * run.known("dp") * run.known("cp"))


def flat_layout(numels: Iterable[int], alone: Iterable[bool], bucket: int | None) -> tuple[list[int], int]:
    """Return parameters' starts (in buffer order) in a coalesced buffer, and its size; bucket ends are not padded.

    Args:
        alone: whether a parameter gets its own bucket (tied embeddings of a pipeline).
        bucket: elements at which a bucket closes.
    """
    starts: list[int] = []
    base = at = 0
    filled = False
    for numel, single in zip(numels, alone, strict=True):
        at = _aligned(at)
        if single and filled:
            base, at = base + at, 0
        starts.append(base + at)
        at, filled = at + numel, True
        if single or (bucket is not None and at >= bucket):
            base, at, filled = base + at, 0, False
    return starts, base + at


def fill_buckets(numels: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return parameters' buckets and starts (in buffer order) in buckets of these unpadded sizes; ``None``: no fit."""
    found: list[tuple[int, int]] = []
    bucket = at = 0
    for numel in numels:
        start = _aligned(at)
        if found and bucket < len(sizes) and sizes[bucket] in (at, start) and start + numel > sizes[bucket]:
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + numel > sizes[bucket]:
            return None
        found.append((bucket, start))
        at = start + numel
    return found if found and bucket == len(sizes) - 1 and at == sizes[bucket] else None


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
