"""Synthetic DCP metadata of any size, written with torch's own classes, without the data files' bytes.

Names are repeated per chunk, as in real saves: they reach the coordinator from different ranks, so pickle does not
share them (~200 bytes of ``.metadata`` a chunk). Data files are created sparse, of the right length.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

ITEM = 4096 + 1577  #: bytes of one stored item: payload of a (16, 64) float32 chunk + archive overhead


def write_dcp_metadata(folder: str | Path, tensors: int = 2000, ranks: int = 512) -> int:
    """Write ``.metadata`` (and sparse ``.distcp`` files) of ``tensors`` row-sharded tensors; returns the chunks."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, cols = 16, 64
    state, storage = {}, {}
    for t in range(tensors):
        name = f"model.layers.{t // 10}.mlp.experts.{t % 10}.up_proj.weight_{t:05d}"
        chunks = [
            ChunkStorageMetadata(torch.Size((r * rows, 0)), torch.Size((rows, cols))) for r in range(ranks)
        ]
        state[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size((rows * ranks, cols)), chunks
        )
        for r in range(ranks):
            fresh = name.encode().decode()  # a new string object, so that pickle writes it again
            index = MetadataIndex(fresh, torch.Size((r * rows, 0)), r)
            storage[index] = _StorageInfo(f"__{r}_0.distcp".encode().decode(), t * ITEM, ITEM)
    planner = {name: tuple(name.split(".", 1)) for name in state}
    metadata = Metadata(state, planner, storage, StorageMeta(checkpoint_id="synthetic"), "1.0.0")
    with open(folder / ".metadata", "wb") as handle:
        pickle.dump(metadata, handle, protocol=4)
    for r in range(ranks):
        with open(folder / f"__{r}_0.distcp", "wb") as handle:
            os.ftruncate(handle.fileno(), tensors * ITEM)
    return tensors * ranks
