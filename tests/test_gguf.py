"""GGUF: versions, byte orders, parts, hostile headers; and its blocks as numbers, against gguf and ggml."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.gguf_files import Writer, scalar, write
from tests.reader_suite import check_reader, refused, same_bits
from workbench.core import engine
from workbench.core.decoding import ggml
from workbench.core.dtypes import BLOCKS
from workbench.core.source import PreadSource
from workbench.errors import (
    CorruptError,
    IncompleteError,
    NotACheckpointError,
    OpenError,
    SelectionError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
)

OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def types(samples: Path) -> Path:
    return samples / "gguf" / "types.gguf"


# ---- versions, byte orders, metadata ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "big"), [(1, False), (2, False), (3, False), (3, True)])
def test_every_version_is_read(tmp_path: Path, version: int, big: bool) -> None:
    order = ">" if big else "<"
    half = np.array([1, -2, 65504], np.float16)
    path = write(
        tmp_path / "m.gguf",
        [("w", 0, (3, 4), NUMBERS.astype(f"{order}f4").tobytes()), ("h", 1, (3,), half.astype(f"{order}f2").tobytes())],
        version=version,
        big=big,
    )
    ckpt = check_reader(path, {"w": torch.from_numpy(NUMBERS), "h": torch.from_numpy(half)})
    assert ckpt.objects["general.architecture"] == "llama"


def test_quantised_blocks_of_a_big_endian_file_are_listed_but_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", [("w", 2, (32,), bytes(18))], big=True)
    ckpt = wb.open(path)
    assert "big endian" in ckpt.notes[0] and str(ckpt["w"].element) == "Q4_0"
    with pytest.raises(UnsupportedFormatError):
        ckpt["w"].torch()
    with pytest.raises(UnsupportedFormatError):
        ckpt.decoded("w").torch()


def test_metadata_of_every_type_are_objects(types: Path, tmp_path: Path) -> None:
    objects = wb.open(types).objects
    assert objects["test.uint8"] == 7 and objects["test.int64"] == -5 and objects["test.float32"] == 0.5
    assert objects["test.bool"] is True and objects["test.numbers"] == [1, 2, 3]
    assert objects["test.words"] == ["<s>", "wörd", ""]
    writer = Writer()
    values = {str(kind): scalar(kind, 1) for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)}
    nested = 9, writer.number("I", 9) + writer.size(1) + writer.number("I", 0) + writer.size(2) + b"\1\2"
    pairs = values | {"nested": nested, "merge": writer.words([b"\xff\xfe"]), "general.alignment": scalar(4, 64)}
    (tmp_path / "m.gguf").write_bytes(writer.file([("w", 0, (1,), struct.pack("<f", 7))], pairs, alignment=64))
    ckpt = wb.open(tmp_path / "m.gguf")
    assert all(ckpt.objects[key] == 1 for key in values)
    assert ckpt.objects["nested"] == [[1, 2]] and ckpt.objects["merge"] == ["\\xff\\xfe"]
    assert ckpt["w"].torch().item() == 7
    json.dumps(dict(ckpt.objects))


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_a_part_opens_the_whole_file(samples: Path, tmp_path: Path) -> None:
    truth = load_file(samples.parent / "tests/truth" / "gguf" / "split.safetensors")
    for part in sorted((samples / "gguf" / "split").iterdir()):
        check_reader(part, truth)
    assert wb.open(samples / "gguf" / "split").objects["general.architecture"] == "llama"


def test_a_missing_part_is_named(samples: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(samples / "gguf" / "split", tmp_path / "m"))
    (folder / "model-00002-of-00003.gguf").unlink()
    refused(IncompleteError, folder, "1 of 3 parts", "'model-00002-of-00003.gguf'")
    (row,) = wb.discover(tmp_path).itertuples()
    assert not row.complete and "model-00002-of-00003.gguf" in row.why
    assert list(wb.open(folder, partial=True)) == ["blk.1.attn_norm.weight", "blk.1.ffn_norm.weight"]


def test_swapped_and_foreign_parts_are_refused(samples: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(samples / "gguf" / "split", tmp_path / "m"))
    one, two = (folder / f"model-0000{n}-of-00003.gguf" for n in (2, 3))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    refused(CorruptError, folder, "part 2 of 3", "swapped")
    one.write_bytes(first)
    two.write_bytes(first.replace(b"split.no\2\0\0\0\1", b"split.no\2\0\0\0\2"))
    refused(CorruptError, folder, "'blk.0.attn_norm.weight'", "another part")


def test_a_folder_of_several_models_is_a_collection(types: Path, tmp_path: Path) -> None:
    shutil.copy(types, tmp_path / "a.gguf")
    shutil.copy(types, tmp_path / "mmproj-a.gguf")
    assert sorted(wb.discover(tmp_path)["path"]) == ["a.gguf", "mmproj-a.gguf"]
    with pytest.raises(NotACheckpointError):
        wb.open(tmp_path, format="gguf")


# ---- hostile headers -------------------------------------------------------------------------------------------------

W = Writer()
ONE = [("w", 0, (3, 4), NUMBERS.tobytes())]
HOSTILE = {
    "tensors": (W.file(ONE, {}, count=1 << 62), UnsafeError, "tensors"),
    "pairs": (W.file(ONE, {}, pairs=1 << 40), UnsafeError, "metadata pairs"),
    "text": (W.file(ONE, {"k": (8, W.size(1 << 60))}), TruncatedError, "'k'"),
    "array": (W.file(ONE, {"k": (9, W.number("I", 4) + W.size(1 << 50))}), UnsafeError, "'k'"),
    "words": (W.file(ONE, {"k": (9, W.number("I", 8) + W.size(1 << 50))}), UnsafeError, "'k'"),
    "deep": (W.file(ONE, {"k": (9, (W.number("I", 9) + W.size(1)) * 9)}), CorruptError, "'k'"),
    "kind": (W.file(ONE, {"k": (99, b"")}), CorruptError, "type 99"),
    "magic": (b"GGML" + W.file(ONE, {})[4:], CorruptError, "GGML"),
    "version": (W.file(ONE, {}).replace(b"GGUF\3", b"GGUF\7"), UnsupportedFormatError, "version 7"),
    "alignment": (W.file(ONE, {"general.alignment": scalar(4, 24)}), CorruptError, "24"),
    "axes": (W.file([("w", 0, (1,) * 9, b"1234")], {}), CorruptError, "9 axes"),
    "shape": (W.file([("w", 0, (1 << 40, 1 << 40), b"")], {}), CorruptError, "impossible shape"),
    "rows": (W.file([("w", 2, (3, 33), bytes(99))], {}), CorruptError, "blocks of 32"),
    "type": (W.file([("w", 77, (1,), b"1234")], {}), UnsupportedFormatError, "ggml type 77"),
    "removed": (W.file([("w", 4, (1,), b"1234")], {}), UnsupportedFormatError, "no longer exists"),
    "twice": (W.file([*ONE, *ONE], {}), CorruptError, "occurs twice"),
    "name": (W.file([("é", 0, (1,), b"1234")], {}).replace("é".encode(), b"\xff\xff"), CorruptError, "UTF-8"),
    "end": (W.file(ONE, {})[:-24], TruncatedError, "'w'"),
    "key": (
        W.file(ONE, {"k": scalar(4, 1), "l": scalar(4, 1)}).replace(b"\1\0\0\0\0\0\0\0l", b"\1\0\0\0\0\0\0\0k"),
        CorruptError,
        "'k' occurs twice",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, name: str) -> None:
    data, kind, word = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(data)
    refused(kind, tmp_path / "m.gguf", word, "'m.gguf'")


def test_every_truncation_and_flip_is_an_answer_or_an_error_of_ours(samples: Path, tmp_path: Path) -> None:
    data = (samples / "gguf" / "split" / "model-00002-of-00003.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    for size in range(0, len(data), 3):
        path.write_bytes(data[:size])
        with pytest.raises(OpenError):
            wb.open(path, cache=False)["blk.0.ffn_norm.weight"].torch()
    for bit in range(0, 8 * len(data), 5):
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        try:
            ckpt = wb.open(path, cache=False)
            for key in ckpt:
                ckpt.decoded(key).torch()
        except OpenError:
            continue


# ---- blocks as numbers -----------------------------------------------------------------------------------------------


def test_stored_blocks_stay_bytes(types: Path) -> None:
    ckpt = wb.open(types)
    tensor = ckpt["blk.0.q4_k.weight"]
    assert tensor.shape == (2, 256) and str(tensor.dtype) == "Q4_K" and tensor.nbytes == 2 * 144
    assert tensor.torch().shape == (2, 144) and tensor.torch().dtype == torch.uint8
    with pytest.raises(SelectionError, match="slice decoded"):
        tensor[1]
    assert tensor.decoded().dtype == torch.float32 and ckpt["token_embd.weight"].decoded() is not None
    same_bits(ckpt["token_embd.weight"].decoded().torch(), ckpt["token_embd.weight"].torch(), "not quantised")


def test_lazy_slices_and_selections_decode_alike(types: Path) -> None:
    ckpt = wb.open(types)
    whole = ckpt.decoded("blk.0.iq3_s.weight").torch()
    same_bits(ckpt["blk.0.iq3_s.weight"].lazy[1:, ::7].decoded().torch(), whole[1:, ::7], "a lazy slice")
    narrow = ckpt.select("iq3_s|token_embd")
    assert set(narrow.decode()) == {"blk.0.iq3_s.weight", "token_embd.weight"}
    same_bits(narrow.decoded("blk.0.iq3_s.weight")[1], whole[1], "a selection")
    same_bits(ckpt.decode().select("iq3_s")["blk.0.iq3_s.weight"][1], whole[1], "a selection of the decoded")
    again = pickle.loads(pickle.dumps(ckpt.decoded("blk.0.iq3_s.weight")))
    same_bits(again.torch(), whole, "pickled")
    with pytest.raises(wb.errors.TensorNotFoundError):
        ckpt.decoded("nothing")


def test_a_slice_reads_only_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 60, (256, 4096 // 32, 34), dtype=np.uint8)  # small exponents: every scale is finite
    tensor = wb.open(write(tmp_path / "m.gguf", [("w", 8, (256, 4096), data.tobytes())])).decoded("w")
    scale = data[:, :, :2].copy().view(np.float16).astype(np.float32)
    want = (scale * data[:, :, 2:].view(np.int8).astype(np.float32)).reshape(256, 4096)
    read: list[int] = []
    real = PreadSource.read_into

    def counted(self: PreadSource, buffer: np.ndarray, start: int) -> None:
        read.append(len(buffer))
        real(self, buffer, start)

    monkeypatch.setattr(PreadSource, "read_into", counted)
    assert np.array_equal(tensor[17, 100:140].numpy(), want[17, 100:140]) and sum(read) == 2 * 34
    read.clear()
    assert np.array_equal(tensor[40:44].numpy(), want[40:44]) and sum(read) == 4 * 128 * 34
    read.clear()
    assert np.array_equal(tensor[:, 5].numpy(), want[:, 5]) and sum(read) == 256 * 34
    read.clear()
    assert np.array_equal(tensor[[200, 3], ::1000].numpy(), want[[200, 3], ::1000]) and sum(read) <= 2 * 5 * 34


def test_passes_take_decoded_checkpoints(types: Path, samples: Path, tmp_path: Path) -> None:
    values = wb.open(types).decode()
    truth = load_file(samples.parent / "tests/truth" / "gguf" / "types.gguf.safetensors")
    table = wb.stats(values).set_index("key")
    for key in ("blk.0.q6_k.weight", "blk.0.nvfp4.weight", "blk.0.ffn_up_exps.weight"):
        assert table.loc[key, "max"] == truth[key].max().item()
        assert table.loc[key, "mean"] == pytest.approx(truth[key].double().mean().item(), abs=1e-6)
    floats = values.select("blk")
    wb.export(floats, tmp_path / "out", format="safetensors")
    back = wb.open(tmp_path / "out")
    for key in back:
        same_bits(back[key].torch(), truth[key], key)
    assert not wb.diff(back, floats).changed_rows
    state = floats.to_device("cpu", role=None)
    same_bits(state["blk.0.iq1_m.weight"], truth["blk.0.iq1_m.weight"], "on a device")


def test_a_diff_of_quantised_against_its_source_counts_roundings(types: Path, tmp_path: Path) -> None:
    """Two files whose first stored bytes agree, and whose values do not."""
    data = bytearray(types.read_bytes())
    ckpt = wb.open(types)
    row = ckpt["blk.0.q8_0.weight"].chunks.iloc[0]
    data[int(row["start"]) + 2] ^= 1
    (tmp_path / "m.gguf").write_bytes(bytes(data))
    diff = wb.diff(ckpt.decode(), wb.open(tmp_path / "m.gguf").decode())
    assert [one.key_b for one in diff.changed_rows] == ["blk.0.q8_0.weight"]


def test_the_two_types_without_a_decoder_in_gguf_follow_ggml() -> None:
    """``dequantize_row_q1_0`` and ``dequantize_row_q8_K`` of ggml-quants.c, element by element."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, 18, dtype=np.uint8)
    block[:2] = np.array([0.75], np.float16).view(np.uint8)
    want = [0.75 if block[2 + j // 8] >> j % 8 & 1 else -0.75 for j in range(128)]
    assert ggml.decode("Q1_0", block).tolist() == want
    block = rng.integers(0, 256, 292, dtype=np.uint8)
    block[:4] = np.array([0.5], np.float32).view(np.uint8)
    assert ggml.decode("Q8_K", block).tolist() == [0.5 * int(q) for q in block[4:260].view(np.int8)]


def test_compiled_code_decodes_every_type_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random blocks, so that scales are NaN, infinite, subnormal and negative too; numpy's are the reference's."""
    rng = np.random.default_rng(18)
    for name in (*ggml._GRIDS, *ggml._OTHERS):
        data = rng.integers(0, 256, 60 * BLOCKS[name][1], dtype=np.uint8)
        found = []
        for compiled in (False, True):
            monkeypatch.setattr(engine, "compiled_in_use", lambda compiled=compiled: compiled)
            found.append(ggml.decode(name, data).view(np.uint32))
        assert np.array_equal(*found), name


def test_scales_that_are_not_finite_decode_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    for name, (_, nbytes) in BLOCKS.items():
        ggml.decode(name, np.full(4 * nbytes, 0xFF, np.uint8))
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]
    with pytest.raises(CorruptError, match="whole blocks"):
        ggml.decode("Q4_0", np.zeros(19, np.uint8))


def test_a_hundred_thousand_tensors_open_in_seconds(tmp_path: Path) -> None:
    tensors = [(f"blk.{n // 100}.part.{n % 100}.weight", 0, (2, 4), bytes(32)) for n in range(100_000)]
    writer = Writer()
    head = [writer.file(tensors[:1], {})[:8], writer.size(len(tensors)), writer.size(0)]
    for number, (name, kind, shape, _) in enumerate(tensors):
        head += [writer.text(name.encode()), struct.pack("<IQQIQ", 2, *reversed(shape), kind, 32 * number)]
    data = b"".join(head)
    path = tmp_path / "m.gguf"
    path.write_bytes(data + bytes(-len(data) % 32 + 32 * len(tensors)))
    begin = time.process_time()
    assert len(wb.open(path, cache=False)) == 100_000
    assert time.process_time() - begin < 5  # about 1 s; the rest is for busy machines


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize(
    "name",
    ["llama/llama-q8_0", "quant/llama-iq4_nl", "quant/llama-q4_0", "quant/llama-q4_1", "quant/llama_tied-q4_k_m"],
)
def test_files_of_llama_cpp_equal_ggml(name: str) -> None:
    path = Path(str(OUTSIDE)) / "round2" / "gguf" / name
    check_reader(path.with_suffix(".gguf"), load_file(path.with_suffix(".truth.safetensors")), decoded=True)
