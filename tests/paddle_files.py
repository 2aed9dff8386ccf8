"""Writing as paddle does: its pickles by Python's own, in the shapes that paddle gives them."""

from __future__ import annotations

import math
import pickle
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import workbench as wb
from tests.reader_suite import same_bits

TABLE = "StructuredToParameterName@@"


class Pair:
    """A Tensor inside a nested state: paddle reduces it to the tuple (name, array)."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self.name, self.array),)


class Dense:
    """A static graph's DenseTensor: paddle reduces it to eval("data", {"data": array})."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, self.args


def save(path: Path, state: Any, protocol: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(state, protocol))
    return path


def flat(state: Mapping[str, Any], statics: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {**state, TABLE: dict(statics or {name: name for name in state})}


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    chance = np.random.default_rng(seed + math.prod(shape))
    return (
        chance.integers(0, 1 << 16, shape).astype("uint16")
        if dtype == "uint16"
        else chance.normal(size=shape).astype(dtype)
    )


def same(got: wb.tensor.LazyTensor, want: np.ndarray) -> None:
    dtype = torch.bfloat16 if want.dtype == np.uint16 else None
    plain = torch.from_numpy(np.array(want.astype(want.dtype.newbyteorder("=")), order="C"))  # keeps 0-d
    same_bits(got.torch(), plain.view(dtype) if dtype else plain, got.key)


class DistSave:
    """Writes a folder as paddle.distributed does: shards by file, then the metadata."""

    def __init__(self, kinds: types.SimpleNamespace, folder: Path) -> None:
        self.kinds, self.folder = kinds, folder
        self.files: dict[str, dict[str, np.ndarray]] = {}
        self.tensors: dict[str, list[Any]] = {}
        self.storage: dict[Any, str] = {}

    def shard(
        self,
        key: str,
        whole: np.ndarray,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        file: str,
        flat_range: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        local = whole[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        if flat_range is not None:
            local = local.reshape(-1)[slice(*flat_range)]
        self.files.setdefault(file, {})[key] = np.ascontiguousarray(local)
        dtype = "bfloat16" if whole.dtype == np.uint16 else str(whole.dtype)
        told = {"is_flattened": flat_range is not None, "flattened_range": flat_range}
        local_meta = self.kinds.Local(offset, shape, dtype, more.pop("global_shape", whole.shape), **told)
        if local_meta not in self.tensors.setdefault(key, []):
            self.tensors[key].append(local_meta)
        self.storage[self.kinds.Index(key, offset, **told, local_shape=shape, **more)] = file

    def write(self, name: str | None = "0.metadata", mapping: Any = None) -> Path:
        self.folder.mkdir(exist_ok=True, parents=True)
        for file, shards in self.files.items():
            save(self.folder / file, flat(shards))
        if name is not None:
            save(self.folder / name, self.kinds.Metadata(self.tensors, self.storage, mapping))
        return self.folder
