"""zarr 2 folders: what Orbax and Megatron's backend write, every layout of chunks, and what is damaged."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load_file

import workbench as wb
from tests.reader_suite import check_reader, refused, same_bits
from workbench.core import payload
from workbench.errors import CorruptError, HoleError, TruncatedError, UnsafeError, UnsupportedFormatError

OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
KERNEL = "params.decoder.layers_0.mlp.wi.kernel"
COMPRESSORS = {
    None: bytes,
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip": gzip.compress,
    "zlib": zlib.compress,
}


def write(
    folder: Path, array: np.ndarray, chunk: tuple[int, ...], *, compressor: str | None = None, **more: Any
) -> Path:
    """An array after the specification of zarr 2: each chunk of its full size, in C or F order."""
    told: dict[str, Any] = {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": chunk,
        "dtype": array.dtype.str,
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": compressor and {"id": compressor},
    } | more
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".zarray").write_text(json.dumps(told))
    separator = told.get("dimension_separator", ".")
    for at in np.ndindex(*(-(-n // c) for n, c in zip(array.shape, chunk, strict=True))):
        low = [a * c for a, c in zip(at, chunk, strict=True)]
        part = array[tuple(slice(a, a + c) for a, c in zip(low, chunk, strict=True))]
        full = np.full(chunk, 77, array.dtype)
        full[tuple(slice(0, n) for n in part.shape)] = part
        name = folder / (separator.join(map(str, at)) or "0")
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(COMPRESSORS[compressor](full.tobytes(order=told["order"])))
    return folder.parent


def numbers(*shape: int, dtype: str = "<f4") -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def crc32c(data: bytes) -> bytes:
    """RFC 3720, bit by bit; little endian, as the codec crc32c of zarr 3 appends it."""
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return (rest ^ 0xFFFFFFFF).to_bytes(4, "little")


#: Chains of codecs after ``bytes``, as zarr 3.1.6 writes them; the workbench found its files of each intact, too.
CHECKED = (["crc32c"], ["zstd", "crc32c"], ["crc32c", "zstd"], ["crc32c", "gzip"])


@pytest.mark.parametrize("chain", CHECKED, ids="-".join)
def test_the_crc32c_of_chunks_is_compared(tmp_path: Path, chain: list[str]) -> None:
    told = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [5, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 6]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": name} for name in ("bytes", *chain)],
    }
    values, folder = numbers(6, 6), tmp_path / "w"
    (folder / "c" / "0").mkdir(parents=True)
    (folder / "c" / "1").mkdir()
    (folder / "zarr.json").write_text(json.dumps(told))
    for at in (0, 1):
        data = values[3 * at : 3 * at + 3].tobytes()
        for name in chain:
            data = data + crc32c(data) if name == "crc32c" else COMPRESSORS[name](data)
        (folder / "c" / str(at) / "0").write_bytes(data)
    report = wb.verify(tmp_path, deep=True)
    assert report.exit_code == 0 and report.checked["checksums"] == "the CRC-32C of 2 records of zarr"
    assert np.array_equal(wb.open(tmp_path)["w"].numpy(), values[:5])
    file = folder / "c" / "0" / "0"
    good = file.read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        found = wb.verify(tmp_path, deep=True)
        assert found.exit_code == 2 and found.findings.message.str.contains("w/c/0/0").all(), at
        if chain[-1] == "crc32c":
            assert "checksum.mismatch" in set(found.findings.rule)


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_every_layout_of_chunks_is_read(tmp_path: Path, compressor: str | None, order: str, separator: str) -> None:
    arrays = {"a": numbers(10, 7), "b": numbers(3, 4, 5, dtype="<i8"), "c": numbers(9, dtype="|u1"), "d": numbers()}
    chunks = {"a": (4, 3), "b": (3, 2, 5), "c": (16,), "d": ()}
    for key, array in arrays.items():
        how = {"compressor": compressor, "order": order, "dimension_separator": separator}
        write(tmp_path / "ckpt" / key, array, chunks[key], **how)
    truth = {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
    ckpt = check_reader(tmp_path / "ckpt", truth)
    assert ckpt.format == "zarr" and len(ckpt["a"].chunks) == 9


def test_names_with_slashes_and_types_of_other_names(tmp_path: Path) -> None:
    write(tmp_path / "ckpt" / "step", numbers(dtype="<i4"), ())
    write(tmp_path / "ckpt" / "a.b" / "c" / "d", numbers(4, dtype="<u2"), (2,), dtype="bfloat16")
    write(tmp_path / "ckpt" / "big", numbers(4, 3, dtype=">f4"), (2, 2))
    truth = {"step": torch.tensor(1, dtype=torch.int32), "big": torch.from_numpy(numbers(4, 3))}
    truth["a.b/c/d"] = torch.from_numpy(numbers(4, dtype="<i2")).view(torch.bfloat16)
    check_reader(tmp_path / "ckpt", truth)


def test_moments_of_optax_are_those_of_their_parameters(samples: Path) -> None:
    ckpt = wb.open(samples / "zarr" / "orbax")
    for role, part in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        found = ckpt.param("decoder.layers_0.mlp.wi.kernel", role=role)
        assert found.key == f"opt_state.1.0.{part}.decoder.layers_0.mlp.wi.kernel"
    assert ckpt.param("decoder.layers_0.mlp.wi.kernel").key == KERNEL
    assert ckpt["opt_state.1.0.count"].role == "step"
    assert "tree_metadata" in ckpt.objects["_METADATA"]
    assert wb.verify(samples / "zarr" / "orbax", deep=True).exit_code == 0


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_blosc_and_filters_are_listed_but_not_read(tmp_path: Path) -> None:
    write(tmp_path / "ckpt" / "a", numbers(4), (4,), filters=[{"id": "delta"}])
    write(tmp_path / "ckpt" / "b", numbers(4), (4,))
    told = json.loads((tmp_path / "ckpt" / "b" / ".zarray").read_text()) | {"compressor": {"id": "blosc"}}
    (tmp_path / "ckpt" / "b" / ".zarray").write_text(json.dumps(told))
    ckpt = wb.open(tmp_path / "ckpt")
    assert list(ckpt) == ["a", "b"] and "2 arrays" in ckpt.notes[0]
    for key in ckpt:
        with pytest.raises(UnsupportedFormatError):
            ckpt[key].torch()


def test_a_chunk_without_a_file_is_a_hole_whatever_the_fill_value(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt" / "a", numbers(10, 7), (4, 3), fill_value=0)
    (tmp_path / "ckpt" / "a" / "1.1").unlink()
    ckpt = wb.open(path)
    same_bits(ckpt["a"][:4], torch.from_numpy(numbers(10, 7)[:4]), "beside the hole")
    with pytest.raises(HoleError, match="'a'"):
        ckpt["a"].torch()
    assert any(one.rule == "coverage.hole" for one in wb.verify(path))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": [10, -7]}, "shape"),
        ({"shape": [10]}, "chunks of"),
        ({"chunks": [0, 3]}, "chunks of"),
        ({"chunks": [1 << 40, 3]}, "bytes, over"),
        ({"shape": [1 << 50, 1 << 50]}, "the shape"),
        ({"shape": [4, 3]}, "outside of the array's grid"),
        ({"dimension_separator": "x"}, "separator"),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(tmp_path: Path, change: dict, word: str) -> None:
    path = write(tmp_path / "ckpt" / "a", numbers(10, 7), (4, 3))
    told = json.loads((path / "a" / ".zarray").read_text()) | change
    (path / "a" / ".zarray").write_text(json.dumps(told))
    refused(CorruptError, path, "'a/", word)


def test_truncated_chunks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt" / "a", numbers(10, 7), (4, 3))
    os.truncate(path / "a" / "2.2", 47)
    refused(TruncatedError, path, "'a'", "'a/2.2'")
    for compressor in ("zstd", "gzip", "zlib"):
        path = write(tmp_path / compressor / "a", numbers(10, 7), (4, 3), compressor=compressor)
        file = path / "a" / "2.2"
        file.write_bytes(file.read_bytes()[:-9])
        refused(CorruptError, path, "'a/2.2'", read="a")


@pytest.mark.parametrize("compressor", ["zstd", "gzip", "zlib"])
def test_a_chunk_never_grows_beyond_the_declared_size(tmp_path: Path, compressor: str) -> None:
    path = write(tmp_path / "ckpt" / "a", numbers(10, 7), (4, 3), compressor=compressor)
    (path / "a" / "0.0").write_bytes(COMPRESSORS[compressor](bytes(1 << 24)))
    refused(CorruptError, path, "more than the expected 48 bytes", "'a/0.0'", read="a")


def test_a_save_that_orbax_did_not_finish_does_not_count(samples: Path, tmp_path: Path) -> None:
    torn = Path(shutil.copytree(samples / "zarr" / "orbax", tmp_path / "6.orbax-checkpoint-tmp-1700000000"))
    document = json.loads((torn / "_CHECKPOINT_METADATA").read_text()) | {"commit_timestamp_nsecs": None}
    shutil.copytree(samples / "zarr" / "orbax", tmp_path / "step_3")
    shutil.copytree(samples / "zarr" / "orbax", tmp_path / "step_5")
    (tmp_path / "step_5" / "_CHECKPOINT_METADATA").write_text(json.dumps(document))
    found = {Path(row.path).name: row for row in wb.discover(tmp_path).itertuples()}
    assert found["step_3"].complete and "commit time" in found["step_5"].why
    assert "not renamed to '6'" in found[torn.name].why


@pytest.mark.parametrize("compressor", ["zstd", "gzip"])
def test_a_small_file_does_not_become_a_large_one(tmp_path: Path, monkeypatch, compressor: str) -> None:
    """The declared size of a chunk is not trusted: what its bytes may become is bounded by their number."""
    zeros = bytes(8 << 20)
    data = zstandard.compress(zeros) if compressor == "zstd" else gzip.compress(zeros)
    folder = tmp_path / "params.w"
    folder.mkdir()
    told = {
        "zarr_format": 2,
        "shape": [10],
        "chunks": [2 << 20],
        "dtype": "<f4",
        "compressor": {"id": compressor},
        "order": "C",
        "fill_value": None,
        "filters": None,
    }
    (folder / ".zarray").write_text(json.dumps(told))
    (folder / "0").write_bytes(data)
    assert not wb.open(tmp_path)["params.w"].torch().any()
    monkeypatch.setattr(payload, "EXPANDED_LEAST", 1 << 20)
    monkeypatch.setattr(payload, "EXPANDED", 64)
    with pytest.raises(UnsafeError, match=r"params\.w.* to more than 1,048,576 bytes from [\d,]+; refused"):
        wb.open(tmp_path)["params.w"].torch()


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize("name", ["orbax/nocdbt_zarr2/ckpt", "misc/megatron_zarr/iter_0000003"])
def test_further_saves_equal_their_truth(name: str) -> None:
    folder = Path(str(OUTSIDE)) / "round2" / name
    check_reader(folder, load_file(folder.parent / "truth.safetensors"))
