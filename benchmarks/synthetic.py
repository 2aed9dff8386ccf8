"""Synthetic DCP metadata of any size, written with torch's own classes, without the data files' bytes.

Names are repeated per chunk, as in real saves: they reach the coordinator from different ranks, so pickle does not
share them (~200 bytes of ``.metadata`` a chunk). Data files are created sparse, of the right length.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ITEM = 4096 + 1577  #: bytes of one stored item: payload of a (16, 64) float32 chunk + archive overhead


def write_dcp_metadata(folder: str | Path, tensors: int = 2000, ranks: int = 512) -> int:
    """Write ``.metadata`` (and sparse ``.distcp`` files) of ``tensors`` row-sharded tensors; returns the chunks."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, cols = 16, 64
    state, storage = {}, {}
    for t in range(tensors):
        name = f"model.layers.{t // 10}.mlp.experts.{t % 10}.up_proj.weight_{t:05d}"
        chunks = [dcp.ChunkStorageMetadata(torch.Size((r * rows, 0)), torch.Size((rows, cols))) for r in range(ranks)]
        state[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(torch.float32), torch.Size((rows * ranks, cols)), chunks
        )
        for r in range(ranks):
            fresh = name.encode().decode()  # a new string object, so that pickle writes it again
            index = dcp.MetadataIndex(fresh, torch.Size((r * rows, 0)), r)
            storage[index] = _StorageInfo(f"__{r}_0.distcp".encode().decode(), t * ITEM, ITEM)
    planner = {name: tuple(name.split(".", 1)) for name in state}
    metadata = dcp.Metadata(state, planner, storage, dcp.StorageMeta(checkpoint_id="synthetic"), "1.0.0")
    finish_sparse(folder, metadata, dict.fromkeys(range(ranks), tensors * ITEM))
    return tensors * ranks


def finish_sparse(folder: Path, metadata: Any, ends: Mapping[int, int]) -> None:
    """``.metadata``, and data files by rank that are holes of the right length."""
    with open(folder / ".metadata", "wb") as handle:
        pickle.dump(metadata, handle, protocol=4)
    for rank, end in ends.items():
        with open(folder / f"__{rank}_0.distcp", "wb") as handle:
            os.ftruncate(handle.fileno(), end)


def write_llama(folder: str | Path, nbytes: int, ranks: int = 4, moved: str | None = None) -> None:
    """Llama-shaped bf16 weights of ``nbytes``: ``hf/`` safetensors, and ``dcp/`` saved by ``ranks`` row shards.

    The DCP files hold ``torch.save`` items as torch writes them, laid down through torch's own serialiser.
    """
    import io

    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = Path(folder)
    (folder / "dcp").mkdir(parents=True, exist_ok=True)
    (folder / "hf").mkdir(exist_ok=True)
    torch.manual_seed(0)
    shapes = {"embed.weight": (16000, 2048)}
    layer = 0
    while sum(2 * a * b for a, b in shapes.values()) < nbytes:
        for name, shape in (
            ("q", (2048, 2048)),
            ("k", (512, 2048)),
            ("o", (2048, 2048)),
            ("up", (5632, 2048)),
            ("down", (2048, 5632)),
            ("norm", (2048, 1)),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = shape
        layer += 1
    state, storage = {}, {}
    opened = ExitStack()
    files = [opened.enter_context((folder / "dcp" / f"__{r}_0.distcp").open("wb")) for r in range(ranks)]
    shard: dict[str, torch.Tensor] = {}
    count = 0
    for name, shape in shapes.items():
        tensor = torch.randn(shape, dtype=torch.float32)
        if moved and re.search(moved, name):  # as if some steps had been taken
            tensor *= 1 + 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        tensor = tensor.bfloat16()
        shard[name] = tensor
        chunks = []
        for r, piece in enumerate(tensor.chunk(ranks)):
            at = r * (-(-shape[0] // ranks))
            buffer = io.BytesIO()
            torch.save(piece.clone(), buffer)
            chunks.append(dcp.ChunkStorageMetadata(torch.Size((at, 0)), piece.size()))
            index = dcp.MetadataIndex(name, torch.Size((at, 0)), r)
            storage[index] = _StorageInfo(f"__{r}_0.distcp", files[r].tell(), buffer.tell())
            files[r].write(buffer.getbuffer())
        state[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.bfloat16), tensor.size(), chunks)
        if sum(t.nbytes for t in shard.values()) > nbytes // 4:
            count += 1
            save_file(shard, folder / "hf" / f"model-{count:05d}.safetensors")
            shard = {}
    if shard:
        save_file(shard, folder / "hf" / f"model-{count + 1:05d}.safetensors")
    opened.close()
    metadata = dcp.Metadata(state, None, storage, dcp.StorageMeta(checkpoint_id="synthetic"), "1.0.0")
    with open(folder / "dcp" / ".metadata", "wb") as handle:
        pickle.dump(metadata, handle, protocol=4)
