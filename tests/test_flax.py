"""Flax's msgpack files, written here byte by byte after the specification, and what a hostile one can say."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.reader_suite import check_reader, raw, refused
from workbench.core.source import PreadSource
from workbench.errors import CorruptError, IncompleteError, TruncatedError, UnsafeError, WorkbenchError

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int32: "int32", torch.float16: "float16"}


def pack(value: Any) -> bytes:
    """As msgpack with flax's extensions packs it."""
    if isinstance(value, torch.Tensor):
        inner = (
            b"\x93" + pack(list(value.shape)) + pack(NAMES[value.dtype]) + b"\xc6" + _u32(len(raw(value))) + raw(value)
        )
        return b"\xc9" + _u32(len(inner)) + b"\x01" + inner
    if isinstance(value, dict):
        return b"\xdf" + _u32(len(value)) + b"".join(pack(key) + pack(item) for key, item in value.items())
    if isinstance(value, list):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(pack, value))
    if isinstance(value, complex):
        inner = b"\x92\xcb" + struct.pack(">d", value.real) + b"\xcb" + struct.pack(">d", value.imag)
        return b"\xc7" + bytes([len(inner), 2]) + inner
    if isinstance(value, str):
        return b"\xd9" + bytes([len(value)]) + value.encode()
    if isinstance(value, bool) or value is None:
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    return b"\xcb" + struct.pack(">d", value) if isinstance(value, float) else b"\xd3" + struct.pack(">q", value)


def _u32(number: int) -> bytes:
    return struct.pack(">I", number)


def chunked(value: torch.Tensor, size: int) -> dict[str, Any]:
    pieces = value.reshape(-1).split(size)
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(axis): n for axis, n in enumerate(value.shape)},
        "chunks": {str(number): piece for number, piece in enumerate(pieces)},
    }


def tree() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "step": 9,
        "params": {"dense": {"kernel": torch.randn(6, 4), "bias": torch.randn(4).bfloat16()}, "g": torch.tensor(2.0)},
        "opt_state": {
            "0": {"mu": {"dense": {"kernel": torch.randn(6, 4)}}, "count": torch.tensor(9, dtype=torch.int32)},
            "1": {},
        },
        "none": None,
        "phase": 1 - 2j,
        "empty": torch.zeros(0, 3),
    }


def tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix[:-1]: value}
    found: dict[str, torch.Tensor] = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        found |= tensors(item, f"{prefix}{key}.")
    return found


def test_a_train_state_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_9").write_bytes(pack(tree()))
    ckpt = check_reader(tmp_path / "checkpoint_9", tensors(tree()))
    assert (ckpt.format, ckpt.step) == ("flax", 9)
    assert dict(ckpt.objects) == {"step": 9, "opt_state.1": {}, "none": None, "phase": 1 - 2j}
    assert ckpt["opt_state.0.mu.dense.kernel"].role == "exp_avg" and ckpt["opt_state.0.count"].role == "step"
    assert ckpt.param("dense.kernel").key == "params.dense.kernel"


@pytest.mark.parametrize("size", [1, 7, 12, 30, 60, 1000])
def test_flat_pieces_of_an_array_are_boxes_of_it(tmp_path: Path, size: int) -> None:
    values = torch.arange(120, dtype=torch.float16)
    truth = {
        "w": values.reshape(4, 5, 6),
        "v": values,
        "column": values.reshape(120, 1),
        "none": values[:0].reshape(0, 3),
    }
    (tmp_path / "x.msgpack").write_bytes(pack({key: chunked(value, size) for key, value in truth.items()}))
    check_reader(tmp_path / "x.msgpack", truth)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    state = tensors(tree())
    for number, half in enumerate((list(state)[:2], list(state)[2:]), 1):
        (tmp_path / f"flax_model-{number:05d}-of-00002.msgpack").write_bytes(pack({key: state[key] for key in half}))
    (tmp_path / "flax_model.msgpack.index.json").write_text("{}")
    check_reader(tmp_path, state)
    (tmp_path / "flax_model-00002-of-00002.msgpack").unlink()
    refused(IncompleteError, tmp_path, "1 of 2 shards", "partial=True")
    assert len(wb.open(tmp_path, partial=True)) == 2


def test_payloads_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.msgpack").write_bytes(pack({name: torch.zeros(1 << 20) for name in "ab"}))
    read: list[int] = []
    fill = PreadSource._fill
    monkeypatch.setattr(PreadSource, "_fill", lambda self, left, at: (read.append(len(left)), fill(self, left, at))[1])
    assert len(wb.open(tmp_path / "x.msgpack", cache=False)) == 2
    assert sum(read) < 64 << 10


ARRAY = pack(torch.zeros(4))


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"\xdf\xff\xff\xff\xff", TruncatedError, "4,294,967,295 items"),
        (b"\x81\xa1w" + ARRAY[:-1], TruncatedError, "1 byte before the end of an extension"),
        (b"\x81\xa1w" * 100_000 + b"\xc0", CorruptError, "more than 64 nested maps"),
        (b"\x81\xa1w" + b"\x91" * 100_000 + b"\xc0", CorruptError, "more than 64 nested maps"),
        (b"\x82\xa1w\xc0\xa1w\xc0", CorruptError, "occurs twice"),
        (b"\x81\x01\xc0", CorruptError, "is not text"),
        (b"\x81\xa1w\xc1", CorruptError, "0xc1"),
        (b"\x81\xa1w\xc0\xc0", CorruptError, "1 byte follows"),
        (b"\x81\xa1\xff\xc0", CorruptError, "not UTF-8"),
        (b"\x81\xa1w" + ARRAY.replace(b"\x04", b"\x05", 1), CorruptError, "float32 (5,) has 16 bytes"),
        (b"\x81\xa1w" + ARRAY.replace(b"float32", b"object_"), CorruptError, "unknown element type"),
        (b"\x81\xa1w\xc6\x04\x00\x00\x00" + bytes(64 << 20), UnsafeError, "67,108,864 bytes is outside an array"),
        (pack({"w": chunked(torch.zeros(4, 4), 5) | {"shape": {"0": 4, "1": 5}}}), CorruptError, "(4, 5)"),
        (pack({"w": {"__msgpack_chunked_array__": True}}), CorruptError, "no shape"),
        (pack({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}), CorruptError, "two arrays"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, content: bytes, kind: Any, words: str) -> None:
    (tmp_path / "x.msgpack").write_bytes(content)
    refused(kind, tmp_path / "x.msgpack", words)


def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    whole, chance = pack(tree() | {"big": chunked(torch.arange(24.0).reshape(4, 6), 7)}), random.Random(0)
    for _ in range(200):
        data = bytearray(whole[: chance.randrange(1, len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(1, len(data)) if len(data) > 1 else 0] = chance.randrange(256)
        (tmp_path / "x.msgpack").write_bytes(data)
        try:
            wb.open(tmp_path / "x.msgpack", cache=False).state_dict()
        except WorkbenchError as error:
            assert "\n" not in str(error)


def test_checkpoints_without_a_suffix_are_listed_and_other_files_of_such_names_are_not(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"checkpoint_{step}").write_bytes(pack(tree()))
    (tmp_path / "checkpoint_11").write_text("a note, not msgpack")
    (tmp_path / "checkpoint_12.tmp").write_bytes(pack(tree()))
    (tmp_path / "checkpoint_13").mkdir()
    found = wb.discover(tmp_path)
    assert found[["path", "format"]].values.tolist() == [["checkpoint_5", "flax"], ["checkpoint_10", "flax"]]
