"""Two saves of one training, updates apart, as DCP lays them out: what true AdamW makes of bf16 weights and masters.

::

    before  5 updates  ──1──▶  next  6 updates  ──19──▶  later  25 updates     each: 4 ranks' row shards
"""

from __future__ import annotations

import io
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

VOCAB, HIDDEN, FFN = 16_000, 1024, 2816
SILENT = 1000  #: rows of the embedding that never see a gradient
UPDATES = {"before": 5, "next": 6, "later": 25}
GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BYTES = 14  #: of a parameter: weight, master, exp_avg, exp_avg_sq


def write_trained(root: Path, nbytes: int, ranks: int = 4) -> dict[str, Path]:
    """Write the three folders, each of about ``nbytes``; what is there already is left as it is."""
    folders = {name: root / name for name in UPDATES}
    if all((folder / ".metadata").exists() for folder in folders.values()):
        return folders
    import torch

    savers = {name: _Saver(folder, ranks) for name, folder in folders.items()}
    random = torch.Generator().manual_seed(0)
    shapes = _shapes(nbytes // BYTES)
    for name, shape in shapes.items():
        weight = torch.nn.Parameter(0.02 * torch.randn(shape, generator=random))
        optimizer = torch.optim.AdamW([weight], **GROUP)
        for step in range(1, max(UPDATES.values()) + 1):
            weight.grad = 1e-3 * torch.randn(shape, generator=random)
            if "embed" in name:
                weight.grad[-SILENT:] = 0
            optimizer.step()
            for side, at in UPDATES.items():
                if at == step:
                    savers[side].parameter(name, weight.detach(), optimizer.state[weight])
    for side, saver in savers.items():
        groups = {f"optimizer.param_groups.0.{key}": value for key, value in GROUP.items()}
        position = {"train_state.step": UPDATES[side]}
        saver.finish(groups | {"optimizer.param_groups.0.params": list(shapes)} | position)
    return folders


def _shapes(elements: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    left, layer = elements - VOCAB * HIDDEN, 0
    while left > 0:
        here: dict[str, tuple[int, ...]] = {
            "q": (HIDDEN, HIDDEN),
            "k": (HIDDEN // 4, HIDDEN),
            "v": (HIDDEN // 4, HIDDEN),
            "o": (HIDDEN, HIDDEN),
            "gate": (FFN, HIDDEN),
            "up": (FFN, HIDDEN),
            "down": (HIDDEN, FFN),
            "norm": (HIDDEN,),
        }
        for name, shape in here.items():
            found[f"layers.{layer}.{name}.weight"] = shape
            left -= shape[0] * (shape[1] if len(shape) > 1 else 1)
        layer += 1
    return found


class _Saver:
    """Writes items to the ranks' files as they come."""

    def __init__(self, folder: Path, ranks: int) -> None:
        from torch.distributed.checkpoint import metadata as dcp

        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._opened, self._dcp = folder, ExitStack(), dcp
        self._files = [self._opened.enter_context((folder / f"__{r}_0.distcp").open("wb")) for r in range(ranks)]
        self._state: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}

    def parameter(self, name: str, weight: Any, held: dict[str, Any]) -> None:
        self._tensor(f"model.{name}", weight.bfloat16())
        self._tensor(f"optimizer.state.{name}.master_param", weight)
        for key, tensor in held.items():
            self._tensor(f"optimizer.state.{name}.{key}", tensor)

    def finish(self, objects: dict[str, Any]) -> None:
        for key, value in objects.items():
            self._state[key] = self._dcp.BytesStorageMetadata()
            self._put(0, self._dcp.MetadataIndex(key), value)
        self._opened.close()
        metadata = self._dcp.Metadata(self._state, None, self._storage, self._dcp.StorageMeta("synthetic"), "1.0.0")
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))

    def _tensor(self, key: str, tensor: Any) -> None:
        import torch

        chunks, row = [], 0
        for rank, part in enumerate(tensor.chunk(len(self._files)) if tensor.ndim else [tensor]):
            at = torch.Size((row, *[0] * (tensor.ndim - 1)) if tensor.ndim else ())
            chunks.append(self._dcp.ChunkStorageMetadata(at, part.size()))
            self._put(rank, self._dcp.MetadataIndex(key, at, rank), part.clone())
            row += len(part) if tensor.ndim else 0
        kind = self._dcp.TensorProperties(tensor.dtype)
        self._state[key] = self._dcp.TensorStorageMetadata(kind, tensor.size(), chunks)

    def _put(self, rank: int, index: Any, value: Any) -> None:
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        buffer, file = io.BytesIO(), self._files[rank]
        torch.save(value, buffer)
        self._storage[index] = _StorageInfo(f"__{rank}_0.distcp", file.tell(), buffer.tell())
        file.write(buffer.getbuffer())
