"""Where torch.save puts bytes. Truth is ``torch.load``; strange but legal archives are written by
``zipfile``.
"""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from workbench.core import zipdirectory
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import TensorRef
from workbench.core.pickles.unpickle import loads
from workbench.core.ziparchive import Archive, Item, read_directory, single_tensor
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError, WorkbenchError

CASES = 3000 if os.environ.get("WORKBENCH_SLOW") == "1" else 200
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def save(value: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.fixture
def no_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def view(data: bytes, item: Item) -> torch.Tensor:
    """The tensor that an Item describes, built by torch from the bytes at the place that it names."""
    storage = torch.frombuffer(
        bytearray(data[item.start : item.start + item.nbytes]) or bytearray(16), dtype=torch.uint8
    )
    dtype = getattr(torch, item.dtype)
    return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), item.storage_offset, item.shape, item.stride)


def same(found: torch.Tensor, truth: torch.Tensor) -> bool:
    """Bit for bit; dtypes and strides too."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in (found, truth)]
    return (
        found.dtype == truth.dtype
        and found.shape == truth.shape
        and found.stride() == truth.stride()
        and raw[0] == raw[1]
    )


def repack(data: bytes, **options: object) -> bytes:
    """The same records, written by Python's zipfile; options: comment, compress, drop, replace, streamed."""
    out: io.BytesIO = Unseekable() if options.get("streamed") else io.BytesIO()
    compress = options.get("compress", ())
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        new.comment = options.get("comment", b"")
        for name in old.namelist():
            if name in options.get("drop", ()):
                continue
            content = options.get("replace", {}).get(name, old.read(name))
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED if name in compress else zipfile.ZIP_STORED
            with new.open(info, "w", force_zip64=bool(options.get("zip64"))) as file:
                file.write(content)
    return out.getvalue()


class Unseekable(io.BytesIO):
    """Makes zipfile write data descriptors after the payloads."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation

    def tell(self) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_tensor_of_every_dtype_lies_where_we_say(dtype: torch.dtype) -> None:
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8).to(dtype)
    shapes = [
        base,
        base.t(),
        base[1:, 2:],
        base[::2],
        base[0, 0],
        base[:0],
        base[2:3].expand(5, 8),
        base.unsqueeze(1),
    ]
    for tensor in [*shapes, torch.nn.Parameter(base, requires_grad=False)]:
        data = save(tensor)
        item = single_tensor(memoryview(data), what="item")
        truth = torch.load(io.BytesIO(data), weights_only=True)
        assert same(view(data, item), truth.detach())
        assert item.crc == zlib.crc32(data[item.start : item.start + item.nbytes]) and item.byteorder == "little"
        assert item.start % 64 == 0 or item.nbytes == 0


def test_every_storage_of_a_nested_file_and_views_that_share_one() -> None:
    base = torch.randn(10, 6)
    value = {
        "a": base,
        "b": base[2:4].t(),
        "c": [torch.arange(5).to(d) for d in (torch.int32, torch.uint16)],
        "n": 3,
    }
    data = save(value)
    archive = read_directory(data, what="'x.pt'")
    found = loads(archive.read(archive.find("data.pkl")), what="x", persistent_load=torch_storage)
    truth = torch.load(io.BytesIO(data))
    pairs = [
        (found["a"], truth["a"]),
        (found["b"], truth["b"]),
        (found["c"][0], truth["c"][0]),
        (found["c"][1], truth["c"][1]),
    ]
    for ref, tensor in pairs:
        assert isinstance(ref, TensorRef)
        start, stop = archive.payload(archive.find(f"data/{ref.storage.key}"))
        item = Item(ref.dtype, ref.shape, ref.stride, ref.storage_offset, start, stop - start, None, "little")
        assert same(view(data, item), tensor)
    assert found["a"].storage.key == found["b"].storage.key
    assert sum(name.startswith("archive/data/") for name in archive.records) == 3


def test_the_folder_is_the_files_stem(tmp_path: object) -> None:
    path = tmp_path / "my model.pt"
    torch.save({"w": torch.ones(3)}, path)
    archive = read_directory(np.fromfile(path, np.uint8), what="x")
    assert archive.prefix == "my model" and archive.find("data/0").usize == 12


def test_an_archive_inside_a_larger_file_and_unaligned() -> None:
    data = save(torch.arange(7))
    whole = b"x" * 13 + data + save(torch.ones(2)) + b"tail"
    assert single_tensor(memoryview(whole)[13 : 13 + len(data)], what="x") == single_tensor(data, what="x")


def test_no_checksums_is_said_and_is_not_corruption(no_checksums: None) -> None:
    data = save(torch.arange(7))
    archive = read_directory(data, what="x")
    assert archive.has_checksums is False and single_tensor(data, what="x").crc is None
    torch.serialization.set_crc32_options(True)
    assert read_directory(save(torch.arange(7)), what="x").has_checksums is True


def test_zip64_comment_data_descriptors_and_plain_headers() -> None:
    tensor = torch.randn(4, 5)
    data = save(tensor)
    for options in (
        {},
        {"comment": b"a comment"},
        {"comment": b"PK\x05\x06" * 9000},
        {"zip64": True},
        {"streamed": True},
        {"compress": ("archive/data.pkl", "archive/byteorder")},
        {"streamed": True, "zip64": True},
    ):
        packed = repack(data, **options)
        assert same(view(packed, single_tensor(packed, what="x")), tensor), options


def test_sizes_beyond_32_bits_come_from_the_zip64_field() -> None:
    """A directory of 5 GB records over a buffer that is not there: only the numbers are looked at."""
    extra = struct.pack("<2H2Q", 1, 16, 5 << 30, 5 << 30)
    found = zipdirectory._zip64(b"FB\x02\x00ZZ" + extra, 0xFFFFFFFF, 0xFFFFFFFF, 77, "x", 0)
    assert found == (5 << 30, 5 << 30, 77)
    assert zipdirectory._zip64(struct.pack("<2HQ", 1, 8, 9 << 32), 5, 6, 0xFFFFFFFF, "x", 0) == (5, 6, 9 << 32)
    with pytest.raises(CorruptError, match="no zip64 field"):
        zipdirectory._zip64(extra[:8], 0xFFFFFFFF, 0xFFFFFFFF, 0, "x", 0)


def test_big_endian_files_are_named_as_such() -> None:
    data = save(torch.arange(3, dtype=torch.int32))
    assert single_tensor(repack(data, replace={"archive/byteorder": b"big"}), what="x").byteorder == "big"
    assert single_tensor(repack(data, drop=("archive/byteorder",)), what="x").byteorder == "little"
    with pytest.raises(CorruptError, match="neither 'little' nor 'big'"):
        single_tensor(repack(data, replace={"archive/byteorder": b"pdp"}), what="x")


def test_a_payload_that_does_not_fit_its_tensor_is_refused() -> None:
    data = save(torch.arange(12.0).reshape(3, 4))
    with pytest.raises(CorruptError, match=r"storage '0' has 48 bytes, the record has 44"):
        single_tensor(repack(data, replace={"archive/data/0": bytes(44)}), what="x")
    pickled = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    for old, new in (
        (b"K\x04K\x01\x86", b"K\x05K\x01\x86"),
        (b"K\x03K\x04\x86", b"K\x04K\x04\x86"),
        (b"K\x00K\x03", b"K\x01K\x03"),
    ):
        assert pickled.count(old) == 1
        with pytest.raises(CorruptError, match=r"ends at byte .* of a storage of 48"):
            single_tensor(repack(data, replace={"archive/data.pkl": pickled.replace(old, new)}), what="x")


def test_lazy_views_are_named_as_such() -> None:
    turned = torch.ones(2, dtype=torch.cfloat).conj()
    item = single_tensor(save(turned), what="x")
    assert (item.conj, item.neg) == (True, False)
    assert single_tensor(save(turned.imag), what="x")[-2:] == (False, True)


def test_what_is_not_one_plain_tensor_is_refused() -> None:
    with pytest.raises(CorruptError, match="not a tensor"):
        single_tensor(save({"a": torch.ones(2)}), what="x")
    with pytest.raises(UnsupportedFormatError, match="'TwoTensor', which is not a single array of elements"):
        single_tensor(save(TwoTensor(torch.ones(2), torch.ones(2))), what="x")
    with pytest.raises(UnsupportedFormatError, match="'archive/data/0' is compressed"):
        single_tensor(repack(save(torch.zeros(99)), compress=("archive/data/0",)), what="x")
    with pytest.raises(CorruptError, match=r"without data\.pkl"):
        single_tensor(repack(save(torch.zeros(99)), drop=("archive/data.pkl",)), what="x")
    with pytest.raises(CorruptError, match="no such record"):
        single_tensor(repack(save(torch.zeros(99)), drop=("archive/data/0",)), what="x")


def test_a_flipped_bit_in_the_object_is_found_by_its_crc() -> None:
    data = bytearray(save(torch.arange(9)))
    at = data.index(b"LongStorage")
    data[at] ^= 1
    with pytest.raises(CorruptError, match=r"record 'archive/data.pkl', bytes .* CRC-32"):
        single_tensor(bytes(data), what="x")


def hostile(name: str = "archive/data/0", *, twice: bool = False) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as file:
        warnings.simplefilter("ignore")
        file.writestr("archive/data.pkl", b"N.")
        file.writestr(name, b"abcd")
        if twice:
            file.writestr(name, b"efgh")
    return out.getvalue()


def patch(data: bytes, signature: bytes, offset: int, value: bytes, nth: int = 0) -> bytes:
    at = -1
    for _ in range(nth + 1):
        at = data.index(signature, at + 1)
    return data[: at + offset] + value + data[at + offset + len(value) :]


def test_names_that_leave_the_archive_duplicates_and_encryption_are_refused() -> None:
    for name in ("archive/../../x", "/abs", "a\\b", "C:x", ".."):
        with pytest.raises(UnsafeError, match="leave the archive"):
            read_directory(hostile(name), what="x")
    with pytest.raises(UnsafeError):
        read_directory(hostile("archive/abc").replace(b"archive/abc", b"archive/a\0c"), what="x")
    with pytest.raises(CorruptError, match="two records 'archive/data/0'"):
        read_directory(hostile(twice=True), what="x")
    with pytest.raises(CorruptError, match="two objects"):
        read_directory(hostile("other/data.pkl"), what="x")
    for flag in (b"\x01", b"\x20", b"\x40"):
        with pytest.raises(UnsafeError, match="encrypted"):
            read_directory(patch(hostile(), b"PK\x01\x02", 8, flag), what="x")
        archive = read_directory(patch(hostile(), b"PK\x03\x04", 6, flag), what="x")
        with pytest.raises(UnsafeError, match="encrypted"):
            archive.read(archive.find("data.pkl"))


def test_records_that_overlap_leave_the_file_or_lie_about_themselves_are_refused() -> None:
    data = hostile()
    with pytest.raises(CorruptError, match="runs into the central directory"):
        read_directory(patch(data, b"PK\x01\x02", 20, struct.pack("<2L", 9999, 9999)), what="x")
    with pytest.raises(CorruptError, match="overlaps"):
        read_directory(patch(data, b"PK\x01\x02", 42, struct.pack("<L", 0), nth=1), what="x")
    with pytest.raises(CorruptError, match="yet has"):
        read_directory(patch(data, b"PK\x01\x02", 20, b"\x01"), what="x")
    for offset, value in (
        (0, b"PK\x03\x05"),
        (26, b"\xff"),
        (28, b"\xff"),
        (30, b"b"),
        (14, b"\x99"),
        (8, b"\x08"),
    ):
        archive = read_directory(patch(data, b"PK\x03\x04", offset, value), what="x")
        with pytest.raises(CorruptError):
            archive.read(archive.find("data.pkl"))
    for nth, name in enumerate(("data.pkl", "data/0")):  # a longer extra field
        archive = read_directory(patch(data, b"PK\x03\x04", 28, b"\x05", nth=nth), what="x")
        with pytest.raises(CorruptError, match="contradicts the central directory"):
            archive.payload(archive.find(name))
    with pytest.raises(CorruptError, match="should be bytes"):
        read_directory(b"before" + data, what="x")
    with pytest.raises(UnsafeError, match="65,000 records"):
        read_directory(patch(data, b"PK\x05\x06", 8, struct.pack("<2H", 65000, 65000)), what="x")
    with pytest.raises(CorruptError, match="contradict each other"):
        read_directory(patch(save(torch.ones(1)), b"PK\x05\x06", 8, b"\x03\x00\x03"), what="x")


def test_a_deflate_bomb_is_not_inflated() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", bytes(3_000_000))
        file.writestr("a/honest", b"abc" * 100)
    data = out.getvalue()
    archive = read_directory(data, what="x")
    assert archive.read(archive.find("honest")) == b"abc" * 100
    with pytest.raises(UnsafeError, match="would inflate"):
        archive.read(archive.find("data.pkl"))
    small = patch(patch(data, b"PK\x01\x02", 24, struct.pack("<L", 100)), b"PK\x03\x04", 22, struct.pack("<L", 100))
    archive = read_directory(small, what="x")
    with pytest.raises(
        CorruptError, match="does not inflate to its 100"
    ):  # stops there, whatever the stream would give
        archive.read(archive.find("data.pkl"))


def test_what_is_cut_short_and_what_is_no_archive() -> None:
    data = save(torch.ones(5))
    with pytest.raises(TruncatedError, match="no end record"):
        read_directory(data[:-1], what="x")
    for junk in (b"", b"PK", b"hello" * 50, bytes(100)):
        with pytest.raises(CorruptError, match="not a zip archive"):
            read_directory(junk, what="x")


def look_at_everything(archive: Archive) -> None:
    archive.byteorder  # noqa: B018  # reads a record
    for record in archive.records.values():
        archive.payload(record)
        archive.read(record)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_archives_raise_our_errors_or_read_the_same(seed: int) -> None:
    rng = random.Random(seed)
    tensor = torch.arange(30, dtype=torch.int16).reshape(5, 6).t()
    data = save(tensor)
    truth = single_tensor(data, what="x")
    ends = 0
    for _ in range(CASES):
        bad = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            bad[rng.randrange(len(bad))] = (
                rng.randrange(256) if rng.random() < 0.5 else bad[rng.randrange(len(bad))] ^ 1 << rng.randrange(8)
            )
        if rng.random() < 0.2:
            del bad[rng.randrange(len(bad)) :]
        blob = bytes(bad)
        try:
            item = single_tensor(blob, what="x")
            look_at_everything(read_directory(blob, what="x"))
        except WorkbenchError as error:
            ends += 1
            assert str(error).isprintable()
            continue
        assert item._replace(crc=truth.crc) == truth  # everything else is covered by checks or by a CRC
    assert ends > CASES // 4
