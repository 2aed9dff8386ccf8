"""ONNX models, written here field by field after ``onnx.proto``: inside, outside, as varints; and hostile ones."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.reader_suite import check_reader, raw, refused
from tests.tensorflow_files import message, number, varint
from workbench.core.source import PreadSource
from workbench.errors import CorruptError, TruncatedError, UnsafeError, WorkbenchError

KINDS = {
    torch.float32: 1,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 16,
}


def tensor(name: str, kind: int, shape: tuple[int, ...], *fields: bytes) -> bytes:
    dims = b"".join(varint(8) + varint(size) for size in shape)
    return message(5, dims + number(2, kind) + message(8, name.encode()) + b"".join(fields))


def inside(name: str, value: torch.Tensor) -> bytes:
    return tensor(name, KINDS[value.dtype], tuple(value.shape), message(9, raw(value)))


def outside(name: str, value: torch.Tensor, **where: object) -> bytes:
    pairs = b"".join(
        message(13, message(1, key.encode()) + message(2, str(text).encode())) for key, text in where.items()
    )
    return tensor(name, KINDS[value.dtype], tuple(value.shape), pairs, number(14, 1))


def varints(name: str, kind: int, shape: tuple[int, ...], values: list[int], field: int = 5) -> bytes:
    return tensor(name, kind, shape, message(field, b"".join(varint(value % (1 << 64)) for value in values)))


def model(*tensors: bytes) -> bytes:
    facts = number(1, 10) + message(2, b"here") + message(14, message(1, b"a") + message(2, b"b"))
    return facts + message(7, message(2, b"graph") + b"".join(tensors)) + message(8, number(2, 21))


def test_initializers_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    w, bf, far = torch.randn(4, 6), torch.randn(3, 2).bfloat16(), torch.randn(5, 3)
    half = torch.randn(7).half()
    signed = torch.tensor([[-128, 127], [0, -1]], dtype=torch.int8)
    long = torch.tensor([1 << 62, -(1 << 63), 5])
    (tmp_path / "m.data").write_bytes(bytes(64) + raw(far) + raw(far[:2]))
    (tmp_path / "m.onnx").write_bytes(
        model(
            inside("w", w),
            inside("bf", bf),
            inside("scalar", torch.tensor(3.0)),
            tensor("floats", 1, (4, 6), message(4, raw(w))),
            varints("half", 10, (7,), half.view(torch.int16).to(torch.int32).remainder(1 << 16).tolist()),
            varints("signed", 3, (2, 2), signed.flatten().tolist()),
            varints("long", 7, (3,), long.tolist(), field=7),
            varints("flags", 9, (2,), [1, 0]),
            tensor("none", 1, (0, 2)),
            outside("far", far, location="m.data", offset=64, length=60),
            outside("end", far[:2], location="m.data", offset=124),
        )
    )
    truth = {"w": w, "bf": bf, "scalar": torch.tensor(3.0), "floats": w, "half": half, "signed": signed, "long": long}
    truth |= {"flags": torch.tensor([True, False]), "none": torch.zeros(0, 2), "far": far, "end": far[:2]}
    ckpt = check_reader(tmp_path / "m.onnx", truth)
    assert (ckpt.format, ckpt.objects["producer_name"], ckpt.objects["metadata"]) == ("onnx", "here", {"a": "b"})
    assert ckpt.objects["opset_import"] == {"": 21} and wb.verify(ckpt, deep=True).exit_code == 0


def test_four_bits_are_stored_bytes(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(
        model(
            tensor("raw", 22, (3, 3), message(9, bytes(range(250, 255)))),
            varints("ints", 21, (3, 3), [1, 200, 3, 4, 5]),
        )
    )
    ckpt = wb.open(tmp_path / "m.onnx")
    assert str(ckpt["raw"].dtype) == "int4" and ckpt["raw"].shape == (3, 3)
    assert ckpt["raw"].numpy().tobytes() == bytes(range(250, 255))
    assert ckpt["ints"].numpy().tobytes() == bytes([1, 200, 3, 4, 5])


def test_payloads_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(model(*(inside(name, torch.zeros(1 << 20)) for name in "ab")))
    read: list[int] = []
    fill = PreadSource._fill
    monkeypatch.setattr(PreadSource, "_fill", lambda self, left, at: (read.append(len(left)), fill(self, left, at))[1])
    assert len(wb.open(tmp_path / "m.onnx", cache=False)) == 2
    assert sum(read) < 64 << 10


W = torch.zeros(2)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (model(outside("w", W, location="../secret")), UnsafeError, "../secret"),
        (model(outside("w", W, location="/etc/passwd")), UnsafeError, "/etc/passwd"),
        (model(outside("w", W)), CorruptError, "without a location"),
        (model(outside("w", W, location="d", offset="-4")), CorruptError, "is not a number"),
        (model(outside("w", W, location="d", offset=1 << 50)), TruncatedError, "1,125,899,906,842,632"),
        (model(outside("w", W, location="d", length=4)), CorruptError, "takes 8 bytes, but 4"),
        (model(tensor("w", 1, (3,), message(9, bytes(8)))), CorruptError, "takes 12 bytes, but 8"),
        (model(tensor("w", 1, (1 << 40, 1 << 40))), CorruptError, "impossible shape"),
        (model(tensor("w", 1, ((1 << 64) - 1,))), CorruptError, "impossible shape"),
        (model(inside("w", W), inside("w", W)), CorruptError, "occurs twice"),
        (model(inside("w", W))[:-8], CorruptError, "ends in the middle"),
        (model(message(5, message(8, b"\xff"))), CorruptError, "not UTF-8"),
    ],
)
def test_a_hostile_model_is_refused(tmp_path: Path, content: bytes, kind: Any, words: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "m" / "d").write_bytes(bytes(8))
    (tmp_path / "m" / "m.onnx").write_bytes(content)
    refused(kind, tmp_path / "m" / "m.onnx", words)


@pytest.mark.parametrize("values", [[1, 2], [1, 2, 3, 4]])
def test_varints_that_are_too_few_or_too_many_are_refused(tmp_path: Path, values: list[int]) -> None:
    (tmp_path / "m.onnx").write_bytes(model(varints("w", 6, (3,), [1 << 20, *values])[:]))
    if len(values) == 2:
        assert wb.open(tmp_path / "m.onnx")["w"].numpy().tolist() == [1 << 20, 1, 2]
    else:
        refused(CorruptError, tmp_path / "m.onnx", "does not consist of 3 varints", read="w")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    pieces = [varint(4 << 3 | 5) + struct.pack("<f", value) for value in (1.0, 2.0)]
    (tmp_path / "m.onnx").write_bytes(
        model(tensor("text", 8, (1,), message(6, b"a")), tensor("unpacked", 1, (2,), *pieces))
    )
    ckpt = wb.open(tmp_path / "m.onnx")
    assert not len(ckpt) and "'text' has the type 8" in ckpt.notes[0] and "'unpacked'" in ckpt.notes[1]


def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    chance = random.Random(0)
    values = torch.from_numpy(np.arange(12, dtype=np.float32)).reshape(3, 4)
    (tmp_path / "d").write_bytes(raw(values))
    whole = model(inside("a", values), outside("b", values, location="d"), varints("c", 6, (3,), [1, -1, 1 << 20]))
    for _ in range(200):
        data = bytearray(whole[: chance.randrange(1, len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(1, len(data)) if len(data) > 1 else 0] = chance.randrange(256)
        (tmp_path / "m.onnx").write_bytes(data)
        try:
            wb.open(tmp_path / "m.onnx", cache=False).state_dict()
        except WorkbenchError as error:
            assert "\n" not in str(error)
