"""numpy's archives and arrays, against numpy: every layout, pickles that stay closed, and damage."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.reader_suite import check_reader, refused, same_bits
from workbench.core.source import PreadSource
from workbench.errors import CorruptError, TruncatedError, UnsafeError, WorkbenchError

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "layers.0.w": np.arange(600, dtype=np.float32).reshape(30, 20) / 7,
    "half": np.array([1, -2, 65504], np.float16),
    "step": np.array(7),
    "fortran": np.asfortranarray(np.arange(30, dtype=np.float64).reshape(6, 5)),
    "fortran3": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    "a/b": np.arange(4),
    "big": np.arange(12, dtype=">f4").reshape(4, 3),
    "big_fortran": np.asfortranarray(np.arange(12, dtype=">i8").reshape(4, 3)),
    "complex": np.array([1 + 2j, -3j], ">c8"),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
}


def truth() -> dict[str, torch.Tensor]:
    native = {key: np.ascontiguousarray(one.astype(one.dtype.newbyteorder("="))) for key, one in ARRAYS.items()}
    return {key: torch.from_numpy(one).reshape(ARRAYS[key].shape) for key, one in native.items()}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_equal_those_that_numpy_saved(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.npz", **ARRAYS)
    ckpt = check_reader(tmp_path / "x.npz", truth())
    assert ckpt.format == "npz"
    report = wb.verify(ckpt, deep=True)
    assert report.exit_code == 0 and "CRC-32 of 11 records of the archive" in report.checked["checksums"]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_array_of_its_own_is_named_after_its_file(tmp_path: Path, version: tuple[int, int]) -> None:
    with open(tmp_path / "w.npy", "wb") as file:
        np.lib.format.write_array(file, ARRAYS["fortran"], version=version)
    check_reader(tmp_path / "w.npy", {"w": truth()["fortran"]})


def test_fields_are_tensors_and_text_is_an_object(tmp_path: Path) -> None:
    points = np.array([(1, 2.5, (3, 4)), (5, -6.5, (7, 8))], [("id", "<i4"), ("x", ">f4"), ("at", "<i4", (2,))])
    np.savez(
        tmp_path / "x.npz", points=points, name="llama", words=np.array([["ä", "bc"]]), raw=np.array([b"x", b"yz"])
    )
    ckpt = check_reader(
        tmp_path / "x.npz",
        {
            "points.id": torch.tensor([1, 5], dtype=torch.int32),
            "points.x": torch.tensor([2.5, -6.5]),
            "points.at": torch.tensor([[3, 4], [7, 8]], dtype=torch.int32),
        },
    )
    assert {key: ckpt.objects[key] for key in ckpt.objects} == {
        "name": "llama",
        "words": [["ä", "bc"]],
        "raw": ["x", "yz"],
    }


def test_types_without_a_name_are_bits_and_the_others_are_named(tmp_path: Path) -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    np.savez(tmp_path / "x.npz", bf16=bits.view("V2"), day=np.array(["2020-01-01"], "M8[D]"), long=np.ones(2, "g"))
    ckpt = wb.open(tmp_path / "x.npz")
    assert list(ckpt) == ["bf16"] and str(ckpt["bf16"].dtype) == "bits16"
    assert ckpt["bf16"][1:, ::2].numpy().tolist() == [[3, 5]]
    notes = " ".join(ckpt.notes)
    assert "V2" in notes and "array 'day' has the type '<M8[D]'" in notes and "array 'long'" in notes


def test_a_pickle_is_named_and_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    np.savez(tmp_path / "x.npz", objects=np.array([Bomb()], object), w=np.ones(3, np.float32))
    ckpt = check_reader(tmp_path / "x.npz", {"w": torch.ones(3)})
    assert any("array 'objects' is a pickle of Python objects" in note for note in ckpt.notes)
    assert not (tmp_path / "touched").exists()


def test_a_slice_of_a_stored_member_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    np.savez(tmp_path / "x.npz", a=values, b=values)
    read: list[int] = []
    fill = PreadSource._fill
    monkeypatch.setattr(PreadSource, "_fill", lambda self, left, at: (read.append(len(left)), fill(self, left, at))[1])
    ckpt = wb.open(tmp_path / "x.npz", io="pread", cache=False)
    same_bits(ckpt["b"][1000:1002], torch.from_numpy(values[1000:1002]), "b")
    assert sum(read) < 64 << 10


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", w=np.random.default_rng(0).standard_normal(4096).astype(np.float32))
        data = bytearray((tmp_path / "x.npz").read_bytes())
        data[9000] ^= 4
        (tmp_path / "x.npz").write_bytes(data)
        report = wb.verify(tmp_path / "x.npz", deep=True)
        assert report.exit_code == 2 and set(report.findings["rule"]) & {"checksum.mismatch", "checksum.damaged"}


def header(text: str, version: int = 1, length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + text.encode()


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (8,)}") + bytes(31), TruncatedError, "31 bytes"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (8,)}") + bytes(33), CorruptError, "33 bytes"),
        (header("{'descr': '<f4', 'fortran_order': 0, 'shape': (8,)}"), CorruptError, "fortran_order"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-8,)}"), CorruptError, "not a literal"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999,)}"), CorruptError, "impossible"),
        (header("__import__('os').getcwd()"), CorruptError, "not a literal at character 0"),
        (header("{" * 5000), CorruptError, "more than 16 nested brackets"),
        (header("{'descr': '<f4'}"), CorruptError, "not a dict of descr"),
        (header("", 2, 1 << 30), UnsafeError, "1,073,741,824"),
        (header("{}", 1, 400), TruncatedError, "398 bytes"),
        (header("{}", 9), CorruptError, "version 9.0"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes, kind: Any, words: str) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    refused(kind, tmp_path / "x.npy", words)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", content)
    refused(WorkbenchError, tmp_path / "x.npz", "w.npy")


def test_python_2_wrote_long_sizes(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(header("{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 1L)}") + bytes(8))
    assert wb.open(tmp_path / "x.npy")["x"].shape == (2, 1)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path, save: Any) -> None:
    held = io.BytesIO()
    save(held, **ARRAYS)
    whole, chance = held.getvalue(), random.Random(0)
    for _ in range(150):
        data = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / "x.npz").write_bytes(data)
        try:
            wb.open(tmp_path / "x.npz", cache=False).state_dict()
        except WorkbenchError as error:
            assert "\n" not in str(error)
