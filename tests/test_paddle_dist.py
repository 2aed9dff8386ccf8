"""paddle.distributed: shards and metadata written here as paddle writes them, against whole arrays; and bad input."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.paddle_files import DistSave, flat, numbers, same, save
from tests.reader_suite import check_catalog
from workbench.errors import (
    CorruptError,
    IncompleteError,
    MissingFileError,
    TruncatedError,
    UnsafeError,
)


@pytest.fixture
def metadata() -> Iterator[types.SimpleNamespace]:
    """The metadata classes of paddle under their own module's name, as long as a test writes them."""

    @dataclass
    class LocalTensorMetadata:
        global_offset: Any
        local_shape: Any
        dtype: str
        global_shape: Any = None
        is_flattened: bool = False
        flattened_range: Any = None

    @dataclass(frozen=True)
    class LocalTensorIndex:
        tensor_key: str
        global_offset: Any
        is_flattened: bool = False
        flattened_range: Any = None
        replica_id: Any = None
        local_shape: Any = None

    @dataclass
    class Metadata:
        state_dict_metadata: Any
        storage_metadata: Any
        flat_mapping: Any = None

    classes = (Metadata, LocalTensorMetadata, LocalTensorIndex)
    made: list[str] = []

    def settle(module: str) -> None:
        parts = module.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                made.append(name)
        for kind in classes:
            kind.__module__, kind.__qualname__ = module, kind.__name__
            setattr(sys.modules[module], kind.__name__, kind)

    settle("paddle.distributed.flex_checkpoint.dcp.metadata")
    yield types.SimpleNamespace(Metadata=Metadata, Local=LocalTensorMetadata, Index=LocalTensorIndex, settle=settle)
    for name in made:
        del sys.modules[name]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_flattened_ranges_land_where_numpy_puts_them(
    tmp_path_factory: pytest.TempPathFactory, local: list[int], data: st.DataObject
) -> None:
    """A global tensor of two local shards along a drawn axis, each cut into flat ranges over ranks."""
    kinds = next(metadata_classes := metadata.__wrapped__())  # type: ignore[attr-defined]
    axis = data.draw(st.integers(0, len(local) - 1))
    whole = numbers(*(n * 2 if at == axis else n for at, n in enumerate(local)))
    out = DistSave(kinds, tmp_path_factory.mktemp("d"))
    numel, rank = math.prod(local), 0
    for half in range(2):
        offset = tuple(half * local[axis] if at == axis else 0 for at in range(len(local)))
        cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
        for start, stop in pairwise(cuts):
            out.shard("w", whole, offset, tuple(local), f"{rank}_0.distcp", (start, stop))
            rank += 1
    ckpt = wb.open(out.write(), cache=False)
    next(metadata_classes, None)
    same(ckpt["w"], whole)
    check_catalog(ckpt.catalog)


def test_replicas_old_modules_and_absent_fields(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    metadata.settle("paddle.distributed.checkpoint.metadata")
    whole, bf16 = numbers(6, 4), numbers(5, dtype="uint16")
    out = DistSave(metadata, tmp_path)
    for copy, rank in enumerate((0, 2)):
        out.shard("w", whole, (0, 0), (3, 4), f"{rank}_0.distcp", replica_id=copy, global_shape=None)
        out.shard("w", whole, (3, 0), (3, 4), f"{rank + 1}_0.distcp", replica_id=copy, global_shape=None)
    out.shard("h", bf16, (0,), (5,), "1_0.distcp", (0, 5))
    for shards in out.tensors.values():
        for shard in shards:
            if shard.flattened_range is None:
                del shard.__dict__["global_shape"], shard.__dict__["is_flattened"], shard.__dict__["flattened_range"]
    for index in out.storage:
        if index.flattened_range is None:
            object.__delattr__(index, "is_flattened")
    out.tensors["h"][0].flattened_range = slice(0, 5)
    ckpt = wb.open(out.write())
    same(ckpt["w"], whole)
    same(ckpt["h"], bf16)
    assert ckpt.tensors.set_index("key")["replicas"].to_dict() == {"w": 2, "h": 1}
    assert ckpt["w"].chunks["rank"].tolist() == [0, 2, 1, 3]
    assert any("no global shape" in note for note in ckpt.notes)
    raw = bytearray((tmp_path / "2_0.distcp").read_bytes())
    raw[raw.find(whole[:3].tobytes()) + 1] ^= 1
    (tmp_path / "2_0.distcp").write_bytes(raw)
    again = wb.open(tmp_path, cache=False)
    assert not torch.equal(again["w"].replica(0).torch(), again["w"].replica(1).torch()), "copies are told apart"


def test_float8_pickled_as_int8_has_the_type_of_the_metadata(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    whole = np.arange(-8, 8, dtype=np.int8)
    out = DistSave(metadata, tmp_path)
    out.shard("w", whole, (0,), (16,), "0_0.distcp")
    out.tensors["w"][0].dtype = "float8_e4m3fn"
    ckpt = wb.open(out.write())
    assert ckpt["w"].dtype == torch.float8_e4m3fn and ckpt["w"].torch().view(torch.int8).tolist() == whole.tolist()


def test_stale_metadata_names_both_files(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    first = DistSave(metadata, tmp_path)
    first.shard("w", numbers(4, 4), (0, 0), (4, 4), "0_0.distcp")
    first.shard("gone", numbers(2), (0,), (2,), "0_0.distcp")
    first.write()
    save(tmp_path / "0_0.distcp", flat({"w": numbers(8, 4), "new": numbers(3)}))
    with pytest.raises(
        CorruptError, match=r"'0.metadata' is not the metadata of '0_0.distcp'.*'gone'.*'new'.*two saves"
    ):
        wb.open(tmp_path)
    save(tmp_path / "0_0.distcp", flat({"w": numbers(8, 4), "gone": numbers(2)}))
    with pytest.raises(
        CorruptError, match=r"'w' at \(0, 0\) has shape \[4, 4\] in '0.metadata' but \[8, 4\] in '0_0.distcp'"
    ):
        wb.open(tmp_path)
    save(tmp_path / "0_0.distcp", flat({"w": numbers(4, 4, dtype="float64"), "gone": numbers(2)}))
    with pytest.raises(CorruptError, match=r"'w' is float32 in '0.metadata' but float64 in '0_0.distcp'"):
        wb.open(tmp_path)
    save(tmp_path / "0_0.distcp", flat({"w": numbers(4, 4), "gone": numbers(2), "new": numbers(3)}))
    ckpt = wb.open(tmp_path)
    same(ckpt["w"], numbers(4, 4))
    assert any("'new'" in note and "two saves" in note for note in ckpt.notes)


def test_the_highest_id_is_read_and_matched_whole(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    for number in (0, 10):
        out = DistSave(metadata, tmp_path)
        out.shard("w", numbers(4, seed=number), (0,), (4,), f"0_{number}.distcp")
        out.write(f"{number}.metadata")
    ckpt = wb.open(tmp_path)
    same(ckpt["w"], numbers(4, seed=10))
    assert any("2 saves" in note and "10 is read" in note for note in ckpt.notes)


def test_missing_and_cut_data_files(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    whole = numbers(4, 6)
    out = DistSave(metadata, tmp_path)
    out.shard("w", whole, (0, 0), (2, 6), "0_0.distcp")
    out.shard("w", whole, (2, 0), (2, 6), "1_0.distcp")
    out.shard("f", whole, (0, 0), (4, 6), "1_0.distcp", (0, 24))
    out.shard("v", whole, (0, 0), (4, 6), "0_0.distcp")
    out.write()
    data = (tmp_path / "1_0.distcp").read_bytes()
    (tmp_path / "1_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(TruncatedError, match=r"'1_0.distcp'"):
        wb.open(tmp_path)
    (tmp_path / "1_0.distcp").unlink()
    with pytest.raises(MissingFileError, match=r"'1_0.distcp' is missing"):
        wb.open(tmp_path)
    rest = wb.open(tmp_path, partial=True)
    same(rest["v"], whole)
    assert np.array_equal(rest["w"][:2].numpy(), whole[:2])
    with pytest.raises(MissingFileError):
        rest["w"][3].numpy()
    with pytest.raises(MissingFileError):
        rest["f"].numpy()


def test_bad_metadata(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    out = DistSave(metadata, tmp_path)
    out.shard("w", numbers(4), (0,), (4,), "0_0.distcp")
    out.write(None)
    with pytest.raises(IncompleteError, match=r"no N.metadata: the save was interrupted"):
        wb.open(tmp_path)
    (tmp_path / "0.metadata").write_bytes(b"")
    with pytest.raises(IncompleteError, match=r"'0.metadata' is empty"):
        wb.open(tmp_path)
    save(tmp_path / "0.metadata", {"not": "metadata"})
    with pytest.raises(CorruptError, match="instead of checkpoint metadata"):
        wb.open(tmp_path)
    out.storage = dict.fromkeys(out.storage, "../../etc/passwd")
    out.write()
    with pytest.raises(UnsafeError, match="leaves the checkpoint"):
        wb.open(tmp_path)
    out.storage = {metadata.Index("w", (0,), True, (2, 9), None, (4,)): "0_0.distcp"}
    out.write()
    with pytest.raises(CorruptError, match=r"range \[2, 9\] is outside a shard of shape \[4\]"):
        wb.open(tmp_path)
    out.storage = {metadata.Index("other", (0,), local_shape=(4,)): "0_0.distcp"}
    save(tmp_path / "0_0.distcp", flat({"other": numbers(4)}))
    save(tmp_path / "0.metadata", metadata.Metadata(out.tensors, out.storage))
    with pytest.raises(CorruptError, match="names 'other'"):
        wb.open(tmp_path)


def test_a_shard_without_a_file_is_a_hole_that_is_told(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    whole = numbers(4, 2)
    out = DistSave(metadata, tmp_path)
    out.shard("w", whole, (0, 0), (2, 2), "0_0.distcp")
    out.tensors["w"].append(metadata.Local((2, 0), (2, 2), "float32", (4, 2)))
    ckpt = wb.open(out.write())
    assert any("1 shards" in note and "holes" in note for note in ckpt.notes)
    assert np.array_equal(ckpt["w"][:2].numpy(), whole[:2])
    with pytest.raises(wb.errors.HoleError):
        ckpt["w"].numpy()


def test_parts_of_paddleformers(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    for folder, key, seed in (
        ("model_state", "fc.weight", 1),
        ("optimizer_state", "fc.weight.moment1_0", 2),
        ("master_weight", "fc.weight.w_0", 3),
        ("ema_state", "fc.weight", 4),
    ):
        out = DistSave(metadata, tmp_path / folder)
        out.shard(key, numbers(4, 3, seed=seed), (0, 0), (4, 3), "0_0.distcp", (0, 7))
        out.shard(key, numbers(4, 3, seed=seed), (0, 0), (4, 3), "1_0.distcp", (7, 12))
        out.write()
    ckpt = wb.open(tmp_path)
    assert ckpt.format == "paddle_dist" and len(ckpt) == 4
    for seed, role in enumerate(("param", "exp_avg", "master", "ema"), 1):
        same(ckpt.param("fc.weight", role=role), numbers(4, 3, seed=seed))
