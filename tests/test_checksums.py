"""CRC-32 of torch.save records: what torch wrote, damaged on purpose, and files that have none."""

from __future__ import annotations

import io as io_module
import random
import shutil
import warnings
import zipfile
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.properties import examples
from workbench.analysis.verify.log import Examined, Log
from workbench.analysis.verify.values import check_values
from workbench.core import checksums as module
from workbench.core import codecs, work
from workbench.core.build import CatalogBuilder
from workbench.core.checksums import Summed, check_archives, stored_crcs
from workbench.core.crc32 import crc32, crc32_of_two
from workbench.core.dtypes import by_name
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
ZERO_CRC = b"\x9d\x0a\xd9\x6d"  # four bytes whose CRC-32 is 0


def flip(path, at, bit=0):
    with open(path, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0] ^ 1 << bit
        handle.seek(at)
        handle.write(bytes([byte]))


def check(path, others=(), **options):
    ckpt = wb.open(path, cache=False)
    return list(check_archives(ckpt.payloads, Place(path), others, **options))


@examples(300)
@given(st.binary(max_size=300), st.integers(0, 300))
def test_the_crc_of_two_parts_is_that_of_the_whole(raw, cut):
    first, second = raw[:cut], raw[cut:]
    assert crc32_of_two(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(raw)


def test_the_crc_of_long_parts(monkeypatch):
    raw = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    assert crc32(raw) == zlib.crc32(raw)
    assert crc32_of_two(crc32(raw[:11]), crc32(raw[11:]), len(raw) - 11) == zlib.crc32(raw)


@pytest.mark.parametrize("task", [32 << 20, 1000])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_every_record_is_checked_and_a_flip_in_any_payload_is_found(tmp_path, monkeypatch, task, io):
    monkeypatch.setattr(module, "TASK", task)  # small: records are cut and their CRCs put together
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(700.0), "b": torch.ones(3, 5), "empty": torch.ones(0), "step": 7}, path)
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    found = list(check_archives(wb.open(path, io=io).payloads))
    assert {one.record: (one.status, one.stored, one.computed) for one in found} == {
        name: ("ok", info.CRC, info.CRC) for name, info in infos.items()
    }
    assert {one.record: one.stop - one.start for one in found} == {n: info.file_size for n, info in infos.items()}
    rng = random.Random(5)
    for record in found:
        if record.start == record.stop or record.record.endswith(("data.pkl", "byteorder")):
            continue  # those two are checked on opening
        at = rng.randrange(record.start, record.stop)
        flip(path, at, rng.randrange(8))
        bad = [one for one in check_archives(wb.open(path, io=io).payloads) if one.status != "ok"]
        assert [(one.status, one.record, one.start, one.stop) for one in bad] == [
            ("mismatch", record.record, record.start, record.stop)
        ]
        assert (
            bad[0].stored
            == record.stored
            != bad[0].computed
            == zlib.crc32(path.read_bytes()[record.start : record.stop])
        )
        shutil.copy(path, tmp_path / "y.pt")
        torch.save({"a": torch.arange(700.0), "b": torch.ones(3, 5), "empty": torch.ones(0), "step": 7}, path)


def test_a_file_without_checksums_is_called_so_and_a_crc_of_0_is_no_excuse(tmp_path):
    assert zlib.crc32(ZERO_CRC) == 0
    state = {"t": torch.frombuffer(bytearray(ZERO_CRC), dtype=torch.int32), "u": torch.arange(9)}
    path = tmp_path / "with.pt"
    torch.save(state, path)
    found = {one.record.split("/", 1)[1]: one for one in check(path)}
    assert (found["data/0"].status, found["data/0"].stored) == ("ok", 0)
    flip(path, found["data/0"].start)
    assert {one.record.split("/", 1)[1] for one in check(path) if one.status == "mismatch"} == {"data/0"}
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(state, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = check(tmp_path / "without.pt")
    assert len(found) > 4 and {one.status for one in found} == {"absent"}
    assert {one.stored for one in found} == {None}
    assert (stored_crcs(wb.open(tmp_path / "without.pt").payloads).crc == -1).all()


@pytest.mark.parametrize("name", ["dcp_fsdp2", "megatron_dp_reshardable", "titan_run/step-4"])
def test_items_of_dcp_name_their_tensor(samples, tmp_path, name):
    path = tmp_path / "ckpt"
    shutil.copytree(samples / name, path)
    found = check(path, threads=2)
    catalog = wb.open(path).catalog
    items = set(zip(catalog.file.tolist(), catalog.start.tolist(), strict=True))
    items |= set(zip(catalog.objects.file.tolist(), catalog.objects.start.tolist(), strict=True))
    assert {one.status for one in found} == {"ok"}
    assert len([one for one in found if one.owner and one.record.endswith("/data.pkl")]) == len(items)
    rng = random.Random(1)
    for one in rng.sample([one for one in found if one.record.endswith("/data/0") and one.stop > one.start], 4):
        flip(path / one.file, rng.randrange(one.start, one.stop), rng.randrange(8))
        bad = [other for other in check(path) if other.status != "ok"]
        assert [(x.status, x.file, x.start, x.owner) for x in bad] == [("mismatch", one.file, one.start, one.owner)]
        shutil.copy(samples / name / one.file, path / one.file)


def test_a_damaged_archive_is_told_and_the_others_are_checked(samples, tmp_path):
    path = tmp_path / "ckpt"
    shutil.copytree(samples / "dcp_fsdp2", path)
    healthy = check(path)
    one = next(one for one in healthy if one.record.endswith("/data/0") and one.stop - one.start > 100)
    head = (path / one.file).read_bytes().rfind(b"PK\3\4", 0, one.start)
    flip(path / one.file, head, 1)
    bad = [other for other in check(path) if other.status != "ok"]
    assert [(x.status, x.record, x.owner) for x in bad] == [("damaged", one.record, one.owner)]
    assert "contradicts the central directory" in bad[0].message
    assert len(check(path)) == len(healthy)
    shutil.copy(samples / "dcp_fsdp2" / one.file, path / one.file)
    size = (path / one.file).stat().st_size
    with open(path / one.file, "r+b") as handle:
        handle.truncate(size - 5)
    found = list(check_archives(wb.open(path, cache=False, partial=True).payloads))
    assert Counter(x.status for x in found)["damaged"] == 1
    assert "5 bytes beyond the end" in next(x.message for x in found if x.status == "damaged")
    (path / one.file).unlink()
    found = list(check_archives(wb.open(path, cache=False, partial=True).payloads))
    assert {x.file for x in found if x.status == "damaged"} == {one.file}


def test_other_files_of_the_folder_are_checked_when_they_are_archives(samples, tmp_path):
    path = tmp_path / "ckpt"
    shutil.copytree(samples / "trainer_run" / "checkpoint-3", path)
    others = sorted(entry.name for entry in path.iterdir())
    found = check(path, others)
    assert {one.status for one in found} == {"ok"}
    assert {one.file for one in found} == {"optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"}
    one = next(one for one in found if one.file == "rng_state.pth" and one.record.endswith("/data/0"))
    flip(path / "rng_state.pth", one.start + 3)
    assert [(x.file, x.record) for x in check(path, others) if x.status != "ok"] == [("rng_state.pth", one.record)]
    with zipfile.ZipFile(path / "stranger.zip", "w") as stranger:
        stranger.writestr("readme", "not from torch.save")
    assert not [x for x in check(path, [*others, "stranger.zip"]) if x.file == "stranger.zip"]


def test_items_inside_zstd_streams(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    builder = CatalogBuilder("test", Place(tmp_path))
    blob = b""
    for number in range(3):
        buffer = io_module.BytesIO()
        torch.save(torch.randn(50, generator=torch.Generator().manual_seed(number)), buffer)
        item = zstandard.ZstdCompressor(write_checksum=number == 0).compress(buffer.getvalue())
        builder.tensor(str(number), by_name("float32"), (50,))
        builder.chunk(str(number), (0,), (50,), "x", len(blob), len(blob) + len(item), codec=codecs.ZSTD_TORCH_ZIP)
        blob += item

    def run():
        builder.place = Place(tmp_path)  # opened anew: a place describes the files as it first saw them
        catalog = builder.build()
        side = Payloads(catalog, SourcePool(Place(tmp_path), catalog.files, catalog.file_stats))
        return list(check_archives(side)), stored_crcs(side), catalog

    (tmp_path / "x").write_bytes(blob)
    found, crcs, catalog = run()
    assert {one.status for one in found} == {"ok"} and {one.owner for one in found} == {"0", "1", "2"}
    assert (crcs.crc == -1).all() and not crcs.exact.any()
    for number in (0, 1):  # with a checksum in the frame, and without: then the record's own CRC tells
        at = int(catalog.stop[number]) - 30
        (tmp_path / "x").write_bytes(blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :])
        bad = [one for one in run()[0] if one.status != "ok"]
        assert {one.owner for one in bad} == {str(number)}
        assert all(one.start == catalog.start[number] for one in bad)


@pytest.mark.parametrize(
    "name", ["dcp_fsdp2", "dcp_single_odd", "megatron_dp_reshardable", "deepspeed_zero1", "torch_save/odd.pt"]
)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_stored_crc_is_that_of_the_chunk_where_it_says_exact(samples, name, io):
    side = wb.open(samples / name, io=io).payloads
    crcs = stored_crcs(side)
    assert (crcs.crc >= 0).any() and crcs.exact.any()
    for row in np.flatnonzero(crcs.exact).tolist():
        raw = np.ascontiguousarray(side.array(row)).tobytes()
        assert (zlib.crc32(raw), len(raw)) == (crcs.crc[row], crcs.nbytes[row])


def test_formats_without_archives_have_no_checksums(samples):
    for name in ("hf_llama_bf16_sharded", "paddle_dist", "paddle_save", "torch_save/ckpt_legacy.pt"):
        side = wb.open(samples / name).payloads
        assert not list(check_archives(side))
        assert (stored_crcs(side).crc == -1).all()


@pytest.mark.parametrize(
    "name", ["dcp_fsdp2", "dcp_single_odd", "megatron_dp_reshardable", "deepspeed_zero1", "torch_save/odd.pt"]
)
def test_the_pass_over_the_values_computes_the_same_crcs(samples, name):
    """odd.pt has transposed and expanded tensors, views, and several tensors in one record: these are read again."""
    known, wanted = summed_by_the_scan(samples / name)
    assert known == wanted if name == "dcp_fsdp2" else 0 < known <= wanted


def test_crcs_of_cut_chunks_are_put_together_in_any_order_of_axes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TASK", 5000)
    monkeypatch.setattr(work, "TASK", 5000)  # boxes of a few rows, in tasks of their own
    tensors = {
        "rows": torch.randn(300, 7),
        "turned": torch.randn(40, 60).t(),
        "bf16": torch.randn(9, 1001).bfloat16(),
        "conj": torch.randn(50, dtype=torch.complex64).conj(),
        "one": torch.tensor(3.0),
        "none": torch.ones(0, 4),
    }
    torch.save(tensors | {"tied": tensors["rows"]}, tmp_path / "x.pt")
    with warnings.catch_warnings(action="ignore"):  # torch's remark that this is one process
        dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    known, wanted = summed_by_the_scan(tmp_path / "x.pt")
    assert known >= wanted - 2
    known, wanted = summed_by_the_scan(tmp_path / "dcp")
    assert known >= wanted - 2


def summed_by_the_scan(path):
    """Check that records are judged alike with the scan's CRCs; return how many it knows, and how many were wanted."""
    ckpt = wb.open(path, cache=False)
    alone = list(check_archives(ckpt.payloads, ckpt.place))
    summed = Summed(ckpt.payloads)
    check_values(Examined(ckpt, ckpt.place.again(), Log(), 2), summed)
    found = list(check_archives(ckpt.payloads, ckpt.place, summed=summed))
    assert sorted(found, key=repr) == sorted(alone, key=repr) and {one.status for one in alone} == {"ok"}
    rows = np.flatnonzero(summed.rows)
    places = [(row, summed._at[row], summed._at[row] + ckpt.catalog.chunk_nbytes[row]) for row in rows.tolist()]
    return sum(summed.of(*place) is not None for place in places), len(rows)


def test_stored_crcs_read_no_payload(samples, tmp_path):
    """A flip in a payload changes what is computed, not what is stored: that is what makes it evidence only."""
    path = tmp_path / "ckpt"
    shutil.copytree(samples / "dcp_fsdp2", path)
    before = stored_crcs(wb.open(path).payloads)
    one = next(one for one in check(path) if one.record.endswith("/data/0") and one.stop - one.start > 100)
    flip(path / one.file, one.start + 50)
    after = stored_crcs(wb.open(path, cache=False).payloads)
    assert (before.crc == after.crc).all()


def test_a_pass_can_be_told_and_stopped(samples, monkeypatch):
    monkeypatch.setattr(module, "TASK", 50_000)
    side = wb.open(samples / "dcp_fsdp2").payloads
    shares = []
    list(check_archives(side, progress=shares.append))
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0) and len(shares) > 10

    class Stop(Exception):
        pass

    def stop(share):
        if share > 0.3:
            raise Stop

    with pytest.raises(Stop):
        list(check_archives(side, progress=stop))
