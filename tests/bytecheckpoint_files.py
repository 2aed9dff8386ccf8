"""ByteCheckpoint's files written with torch's metadata classes and pickle alone, for layouts that no sample has.

::

    save(folder, {"w": [((0, 0), piece, rank), …]}, {"param_groups": […]}, user={…})   →   .metadata, __R_0.distcp

The two classes of the package that a pickle names are stood in for by dataclasses of the same module and name; that the
inner pickles are the package's, byte for byte, is tested against a real save.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

MODULE = "bytecheckpoint.checkpointer.meta_type"
Pieces = Mapping[str, Sequence[tuple[tuple[int, ...], torch.Tensor, int]]]


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclass
class Metadata:
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: Any = None
    all_tensor_metadata: Any = None
    bytecheckpoint_version: str | None = None
    user_defined_dict: dict[str, Any] = field(default_factory=dict)


_StorageInfo.__module__ = Metadata.__module__ = MODULE


@contextmanager
def package():
    """The module that a pickle of these classes names, while it is written or read by pickle itself."""
    names = [MODULE.rsplit(".", n)[0] for n in (2, 1, 0)]
    kept = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[MODULE].Metadata, sys.modules[MODULE]._StorageInfo = Metadata, _StorageInfo
    try:
        yield
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def inner(tensor: torch.Tensor) -> bytes:
    """The nested pickle of a tensor, its storage replaced by a persistent id (``_serialize_tensor``)."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.storage.TypedStorage):
                return ("storage", getattr(torch, obj._pickle_storage_type()), "0", "cpu", obj._size())
            if isinstance(obj, torch.UntypedStorage):
                return ("storage", torch.UntypedStorage, "0", "cpu", obj.nbytes())
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(tensor)
    return out.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's storage."""
    return bytes(tensor.untyped_storage())


def save(
    folder: Path,
    tensors: Pieces,
    blobs: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    paths: Mapping[str, tuple[str, ...]] | None = None,
    user: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    version: str = "0.0.2",
) -> None:
    """Write one part. Pieces are ``(offsets, tensor, rank)``; blobs go first into rank 0's file."""
    folder.mkdir(parents=True, exist_ok=True)
    count = ranks or 1 + max([0, *(rank for pieces in tensors.values() for *_, rank in pieces)])
    files = [bytearray() for _ in range(count)]
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    layouts: dict[Any, Any] = {}
    for name, value in (blobs or {}).items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        index = MetadataIndex(name)
        storage[index], layouts[index] = _StorageInfo("__0_0.distcp", len(files[0]), buffer.tell()), None
        files[0] += buffer.getvalue()
    for name, pieces in tensors.items():
        chunks = []
        for position, (offsets, piece, rank) in enumerate(pieces):
            index = MetadataIndex(name, torch.Size(offsets), position)
            content = raw(piece)
            storage[index] = _StorageInfo(f"__{rank}_0.distcp", len(files[rank]), len(content))
            layouts[index] = inner(piece)
            files[rank] += content
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.size()))
        ends = [[a + n for a, n in zip(offsets, piece.shape, strict=True)] for offsets, piece, _ in pieces]
        shape = (shapes or {}).get(name) or tuple(max(axis) for axis in zip(*ends, strict=True))
        dtype = (dtypes or {}).get(name) or pieces[0][1].dtype
        state[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
    state |= {name: BytesStorageMetadata() for name in blobs or {}}
    planner = {name: tuple((paths or {}).get(name, (name,))) for name in state}
    write(folder, Metadata(state, planner, storage, layouts, version, dict(user or {})))
    for rank, content in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(content)


def write(folder: Path, metadata: Metadata) -> None:
    with package(), open(folder / ".metadata", "wb") as handle:
        pickle.dump(metadata, handle, protocol=4)


def read(folder: Path) -> Metadata:
    """Our own file back, by pickle itself, to be changed and written again."""
    with package(), open(folder / ".metadata", "rb") as handle:
        return pickle.load(handle)


def write_synthetic(folder: Path, tensors: int = 2000, ranks: int = 512) -> int:
    """Metadata of ``tensors`` row-sharded tensors, and sparse data files; returns the chunks."""
    import os

    folder.mkdir(parents=True, exist_ok=True)
    rows, cols, item = 16, 64, 16 * 64 * 4
    layout = inner(torch.empty(rows, cols))
    state, storage, layouts = {}, {}, {}
    for t in range(tensors):
        name = f"layers.{t // 10}.mlp.experts.{t % 10}.up_proj.weight_{t:05d}"
        chunks = [ChunkStorageMetadata(torch.Size((r * rows, 0)), torch.Size((rows, cols))) for r in range(ranks)]
        state[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((rows * ranks, cols)), chunks)
        for r in range(ranks):
            # new string and bytes objects, as they come from other ranks: pickle writes them again
            index = MetadataIndex(name.encode().decode(), torch.Size((r * rows, 0)), r)
            storage[index] = _StorageInfo(f"__{r}_0.distcp".encode().decode(), t * item, item)
            layouts[index] = bytes(bytearray(layout))
    write(folder, Metadata(state, {name: (name,) for name in state}, storage, layouts, "0.0.2"))
    for r in range(ranks):
        with open(folder / f"__{r}_0.distcp", "wb") as handle:
            os.ftruncate(handle.fileno(), tensors * item)
    return tensors * ranks
