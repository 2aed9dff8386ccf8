"""Synthetic Megatron ``torch_dist`` metadata of any size; data files are sparse, of the right length.

A mixture of experts, stacked as Megatron stacks it: ``layers × experts × TP`` chunks of each expert weight, and as
many again for the master and both moments. With ``buckets`` the optimizer is ``dp_reshardable`` instead: flat
buckets of ``dp`` shards, a chunk a parameter.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

from synthetic import finish_sparse

STATES = ("", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
HIDDEN, FFN, PER = 64, 16, 40_000


def write_torch_dist(
    folder: str | Path,
    *,
    layers: int = 64,
    experts: int = 256,
    tp: int = 5,
    buckets: bool = False,
    pp: int = 1,
    dp: int = 8,
) -> int:
    """Write the folder; returns the chunks (layers · experts · tp · 3 · 4 and a few, without ``buckets``)."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    ends: dict[int, int] = {}

    def tensor(
        key: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...], int]], half: bool
    ) -> None:
        metas = []
        for k, (at, sizes, rank) in enumerate(chunks):
            metas.append(dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)))
            nbytes = (2 if half else 4) * torch.Size(sizes).numel() + 1577
            start = ends.get(rank, 0)
            ends[rank] = start + nbytes
            name = f"__{rank}_0.distcp".encode().decode()  # fresh strings, as in a real save
            storage[dcp.MetadataIndex(key.encode().decode(), torch.Size(at), k)] = _StorageInfo(name, start, nbytes)
        dtype = torch.bfloat16 if half else torch.float32
        state[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), metas)

    for prefix in STATES[: 1 if buckets else 4]:
        half = not prefix
        model = f"{prefix}decoder.layers."
        grid = [(n, t) for n in range(layers) for t in range(tp)]
        rows = HIDDEN // 2
        tensor(
            f"{model}self_attention.linear_proj.weight",
            (layers, HIDDEN, rows * tp),
            [((n, 0, t * rows), (1, HIDDEN, rows), n % 64 * tp + t) for n, t in grid],
            half,
        )
        if experts:
            cells = [(n, e, t) for n in range(layers) for e in range(experts) for t in range(tp)]
            tensor(
                f"{model}mlp.experts.experts.linear_fc1.weight",
                (layers, experts, 2 * FFN * tp, HIDDEN),
                [
                    ((n, e, (g * tp + t) * FFN, 0), (1, 1, FFN, HIDDEN), e % 64 * tp + t)
                    for n, e, t in cells
                    for g in (0, 1)
                ],
                half,
            )
            tensor(
                f"{model}mlp.experts.experts.linear_fc2.weight",
                (layers, experts, HIDDEN, FFN * tp),
                [((n, e, 0, t * FFN), (1, 1, HIDDEN, FFN), e % 64 * tp + t) for n, e, t in cells],
                half,
            )
    args: dict[str, Any] = {
        "num_layers": layers,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "swiglu": True,
        "num_experts": experts,
        "world_size": tp * pp * dp,
        "data_parallel_size": dp,
        "iteration": 7,
    }
    if buckets:
        proj = HIDDEN * HIDDEN // 2
        numel = layers // pp * proj
        shard = -(-numel // dp)
        for g in range(tp * pp):
            edges = sorted({*range(0, numel + 1, proj), *range(0, numel, shard)})
            for what in ("param", "exp_avg", "exp_avg_sq"):
                buffer = f"optimizer.distributed.dp_group_idx_{g}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
                tensor(
                    f"{buffer}.bucket_idx_0.{what}",
                    (numel,),
                    [((a,), (b - a,), g * dp + a // shard) for a, b in pairwise(edges)],
                    False,
                )
    torch.save({"args": Namespace(**args), "iteration": 7}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    finish_sparse(folder, dcp.Metadata(state, None, storage), ends)
    return len(storage)
