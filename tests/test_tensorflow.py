"""TensorFlow's V2 checkpoints: shards, slices of partitioned variables, text, checksums, and hostile tables.

The key of the slice below is the one that tensorflow 2.21 wrote for such a variable.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests import tensorflow_files as made
from tests.reader_suite import check_reader, refused
from workbench.errors import CorruptError, IncompleteError, TruncatedError, UnsupportedFormatError, WorkbenchError
from workbench.formats.tensorflow import slice_key

KEY = "model/{}/.ATTRIBUTES/VARIABLE_VALUE"
#: Slices of a variable of (10, 6) in three, with the keys that tensorflow wrote.
PARTS = {
    b"\x00emb\x00\x01\x01\x02\x80\x84\x80\x86": ((0, 4), (0, 6)),
    b"\x00emb\x00\x01\x01\x02\x84\x83\x80\x86": ((4, 3), (0, 6)),
    b"\x00emb\x00\x01\x01\x02\x87\x83\x80\x86": ((7, 3), (0, 6)),
}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        KEY.format("w"): torch.randn(30, 20),
        KEY.format("w/.OPTIMIZER_SLOT/optimizer/m"): torch.randn(30, 20),
        KEY.format("b"): torch.randn(20).bfloat16(),
        "step/.ATTRIBUTES/VARIABLE_VALUE": torch.tensor(7),
        "emb": torch.randn(10, 6),
        "emb/Adam_1": torch.rand(10, 6),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_is_read(tmp_path: Path, shards: int) -> None:
    node = made.message(
        1, made.message(2, made.message(2, b"dense/kernel") + made.message(3, KEY.format("w").encode()))
    )
    texts = {"_CHECKPOINTABLE_OBJECT_GRAPH": [node], "words": [b"a", b"", b"bcd"]}
    path = made.write(tmp_path / "ckpt-7", tensors(), texts, {"emb": PARTS}, shards)
    for place in (path, tmp_path):
        ckpt = check_reader(place, tensors())
        assert (ckpt.format, ckpt.step, len(ckpt["emb"].chunks)) == ("tensorflow", 7, 3)
        assert ckpt.objects["words"] == ["a", "", "bcd"]
        assert ckpt.objects["_CHECKPOINTABLE_OBJECT_GRAPH"] == {KEY.format("w"): "dense/kernel"}
    assert ckpt.param("model/w", role="exp_avg").key == KEY.format("w/.OPTIMIZER_SLOT/optimizer/m")
    assert ckpt.param("emb", role="exp_avg_sq").key == "emb/Adam_1"
    report = wb.verify(ckpt, deep=True)
    assert report.exit_code == 0 and report.checked["checksums"].startswith("the CRC-32C of 9 records")


def test_keys_of_slices_are_those_of_tensorflow() -> None:
    for key, extents in PARTS.items():
        assert slice_key(b"emb", extents) == key
    # tensorflow/core/lib/strings/ordered_code_test.cc: 64 → c0 40, -64 → 40, -65 → 3f bf, 2^13 → e0 20 00
    assert slice_key(b"a\xff\0", ((64, -64), (-65, 1 << 13))) == (
        b"\0a\xff\0\0\xff\0\1" + b"\1\2" + b"\xc0\x40\x40" + b"\x3f\xbf\xe0\x20\x00"
    )


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    made.write(tmp_path / "ckpt-7", tensors(), {"words": [b"abc"]}, {"emb": PARTS})
    data = tmp_path / "ckpt-7.data-00000-of-00001"
    whole = bytearray(data.read_bytes())
    whole[100] ^= 1
    whole[-1] ^= 1
    data.write_bytes(whole)
    report = wb.verify(tmp_path, deep=True)
    assert report.exit_code == 2
    (message,) = report.findings[report.findings["rule"] == "checksum.mismatch"]["message"]
    assert KEY.format("w") in message and "CRC-32C" in message
    with pytest.raises(CorruptError, match=r"'words' .* masked CRC-32C"):
        wb.open(tmp_path).objects["words"]


def test_missing_and_truncated_data_files_are_errors(tmp_path: Path) -> None:
    made.write(tmp_path / "ckpt-7", tensors(), shards=2)
    lost = tmp_path / "ckpt-7.data-00001-of-00002"
    whole = lost.read_bytes()
    lost.write_bytes(whole[:-1])
    refused(TruncatedError, tmp_path, "ckpt-7.data-00001-of-00002")
    lost.unlink()
    refused(IncompleteError, tmp_path, "1 of 2 data files")
    assert wb.open(tmp_path, partial=True)[KEY.format("w")].torch().shape == (30, 20)


def test_the_newest_of_several_is_opened(tmp_path: Path) -> None:
    for step in (7, 12):
        made.write(tmp_path / f"ckpt-{step}", tensors())
    assert wb.open(tmp_path).step == 12
    assert len(wb.discover(tmp_path)) == 2


W = torch.zeros(2)


def one(row: bytes, shards: int = 1) -> dict[bytes, bytes]:
    return {b"": made.number(1, shards), b"w": row}


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        (one(made.entry(1, (1 << 40, 1 << 40), 0, 0, b"")), CorruptError, "impossible shape"),
        (one(made.entry(1, (3,), 0, 0, bytes(8))), CorruptError, "has 8 bytes for float32 (3,)"),
        (one(made.entry(1, (2,), 5, 0, bytes(8))), CorruptError, "data file 5 of 1"),
        (one(made.entry(1, (2,), 0, (1 << 64) - 4, bytes(8))), CorruptError, "byte -4"),
        (one(made.entry(1, (2,), 0, 1 << 50, bytes(8))), TruncatedError, "1,125,899,906,842,632"),
        (one(b"\x0a\xff"), CorruptError, "is not a message"),
        (one(b"", shards=0), CorruptError, "0 data files"),
        ({b"w": b""}, CorruptError, "not the header's"),
        (
            one(made.number(1, 1) + made.message(2, made.shape_of((2,))) + made.message(7, made.message(1, b""))),
            CorruptError,
            "has no entry",
        ),
        (one(made.number(1, 1) + made.message(2, made.shape_of((2,))) + made.message(7, b"")), CorruptError, "0 axes"),
    ],
)
def test_a_hostile_entry_is_refused(tmp_path: Path, rows: dict[bytes, bytes], kind: Any, words: str) -> None:
    (tmp_path / "c.index").write_bytes(made.table(rows))
    (tmp_path / "c.data-00000-of-00001").write_bytes(bytes(8))
    refused(kind, tmp_path / "c.index", words)


def test_a_hostile_table_is_refused(tmp_path: Path) -> None:
    path = made.write(tmp_path / "c", {"w": W})
    whole = path.read_bytes()

    def with_handles(rows: list[tuple[bytes, bytes]]) -> bytes:
        first = made.block([(b"", made.number(1, 1))])
        found = first + b"\0" + made.masked(first + b"\0")
        body = made.block([(key, made.varint(0) + made.varint(len(first))) for key, _ in rows])
        footer = made.varint(0) * 2 + made.varint(len(found)) + made.varint(len(body))
        return found + body + b"\0" + made.masked(body + b"\0") + footer.ljust(40, b"\0") + whole[-8:]

    flipped = bytearray(whole)
    flipped[3] ^= 1
    for content, kind, words in (
        (bytes(flipped), CorruptError, "masked CRC-32C of the block at bytes 0"),
        (whole[:-48] + b"\xff" * 40 + whole[-8:], CorruptError, ""),
        (whole[:-48] + made.varint(0) * 2 + made.varint(1 << 40) * 2 + bytes(26) + whole[-8:], CorruptError, ""),
        (with_handles([(b"a", b""), (b"b", b"")]), CorruptError, "begins before the end"),
    ):
        path.write_bytes(content)
        refused(kind, path, words)
    body = made.block([(b"", made.number(1, 1))])
    snappy = body + b"\1" + made.masked(body + b"\1")
    handles = made.block([(b"a", made.varint(0) + made.varint(len(body)))])
    footer = made.varint(0) * 2 + made.varint(len(snappy)) + made.varint(len(handles))
    path.write_bytes(snappy + handles + b"\0" + made.masked(handles + b"\0") + footer.ljust(40, b"\0") + whole[-8:])
    refused(UnsupportedFormatError, path, "is compressed")


def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows, files = made.rows_of(tensors(), {"words": [b"abc"]}, {"emb": PARTS}, 1)
    (tmp_path / "c.data-00000-of-00001").write_bytes(files[0])
    for _ in range(60):
        changed = dict(rows)  # with checksums that are right, or the table itself would be refused
        key = chance.choice(list(changed))
        data = bytearray(changed[key])
        data[chance.randrange(len(data))] = chance.randrange(256)
        changed[key] = bytes(data)
        (tmp_path / "c.index").write_bytes(made.table(changed))
        try:
            ckpt = wb.open(tmp_path / "c.index", cache=False)
            ckpt.state_dict()
            dict(ckpt.objects)
        except WorkbenchError as error:
            assert "\n" not in str(error)
