"""Fingerprints against their definition on the dense array, over random chunkings, codecs, strides and threads."""

from __future__ import annotations

import io as io_module
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.properties import chunkings, examples, shapes
from tests.test_reading import any_stored, stored
from workbench import errors
from workbench.core import codecs
from workbench.core import fingerprint as module
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BLOCK, combine, range_digests, tensor_fingerprints
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.core.transfer import streams


def payloads(folder, catalog, io="mmap"):
    return Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, io))


def defined(name, shape, raw, block=BLOCK):
    """The definition, word for word."""
    digests = [xxhash.xxh3_128_digest(raw[at : at + block]) for at in range(0, len(raw), block)]
    head = f"workbench tensor 1\n{name}[{','.join(map(str, shape))}]\n".encode()
    return xxhash.xxh3_128_hexdigest(head + b"".join(digests)), digests


def of(side, **options):
    return {side.catalog.keys[tensor]: found for tensor, found in tensor_fingerprints(side, **options)}


SMALL = {"BLOCK": 16, "STEP": 8, "MOST": 64, "PIECE": 4, "TASK": 48, "UNIT_COST": 8, "MAX_OPEN": 2}


@pytest.fixture
def small(monkeypatch):
    """Blocks and tasks of a few elements, so that small tensors are cut everywhere."""
    for name, size in SMALL.items():
        monkeypatch.setattr(streams, name, size)
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "PLANNED", 3)


@examples(150)
@given(st.data())
def test_the_fingerprint_is_of_the_elements_not_of_how_they_are_stored(small, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    dense, catalog = any_stored(data, folder, factor=77777, overlaps=1)
    side = payloads(folder, catalog, data.draw(st.sampled_from(["mmap", "pread"])))
    found = of(side, threads=data.draw(st.integers(1, 3)))["t"]
    assert (found.hex, found.blocks) == defined("int32", dense.shape, dense.tobytes(), 16)


@examples(40)
@given(st.data())
def test_one_flipped_bit_changes_one_block_and_the_fingerprint(small, tmp_path_factory, data):
    shape = data.draw(shapes(min_side=1))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("case")
    catalog = stored(folder, dense, data.draw(chunkings(shape)))
    before = of(payloads(folder, catalog))["t"]
    at = data.draw(st.integers(0, dense.size - 1))
    dense.reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 30))
    catalog = stored(folder, dense, data.draw(chunkings(shape)))
    after = of(payloads(folder, catalog))["t"]
    changed = [k for k, (a, b) in enumerate(zip(before.blocks, after.blocks, strict=True)) if a != b]
    assert changed == [at * 4 // 16] and before.hex != after.hex


def test_the_definition_has_not_moved():
    """Fingerprints are kept in files: these may never change under version 1."""
    assert BLOCK == 4 << 20
    assert xxhash.xxh3_128_hexdigest(b"abc") == "06b05ab6733a618578af5f94892f3950"  # a published test vector
    assert combine(by_name("bfloat16"), (0, 3), []).hex == "051811df9d5917376480c128fc9edce3"
    assert combine(by_name("float32"), (), [bytes(16)]).hex == "7c4bc04af273c4590253461e82e79cc7"


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_the_real_size_in_rows_columns_and_one_chunk(tmp_path, threads):
    dense = np.random.default_rng(0).integers(0, 1 << 62, (1300, 1024), dtype=np.int64)  # 10.6 MB: 2.5 blocks
    whole = [((0, 0), dense.shape)]
    rows = [((0, 0), (517, 1024)), ((517, 0), (783, 1024))]
    columns = [((0, 0), (1300, 333)), ((0, 333), (1300, 691))]
    want = defined("int64", dense.shape, dense.tobytes())
    assert len(want[1]) == 3
    for number, chunks in enumerate((whole, rows, columns)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for order in (None, (1, 0)):
            found = of(payloads(folder, stored(folder, dense, chunks, dtype="int64", order=order)), threads=threads)
            assert (found["t"].hex, found["t"].blocks) == want


def test_dtype_and_shape_are_part_of_it(tmp_path):
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "data.bin").write_bytes(bytes(range(48)))
    forms = [
        ("float32", (12,)),
        ("int32", (12,)),
        ("int32", (3, 4)),
        ("int32", (4, 3)),
        ("bfloat16", (24,)),
        ("complex128", (3,)),
        ("float4_e2m1fn", (96,)),
        ("float6_e2m3fn", (64,)),
    ]
    for number, (dtype, shape) in enumerate(forms):
        builder.tensor(str(number), by_name(dtype), shape)
        builder.chunk(str(number), (0,) * len(shape), shape, "data.bin", 0, 48)
    found = of(payloads(tmp_path, builder.build()))
    assert len({one.hex for one in found.values()}) == len(forms)
    for number, (dtype, shape) in enumerate(forms):
        assert found[str(number)].hex == defined(dtype, shape, bytes(range(48)))[0]


def test_packed_elements_cut_between_bytes_are_put_together_others_refused(tmp_path):
    (tmp_path / "data.bin").write_bytes(bytes(range(100)))

    def side(cuts):
        builder = CatalogBuilder("test", Place(tmp_path))
        builder.tensor("t", by_name("float4_e2m1fn"), (7, 4))
        for (low, size), start in cuts:
            builder.chunk("t", low, size, "data.bin", start, start + int(np.prod(size)) // 2)
        return payloads(tmp_path, builder.build())

    found = of(side([(((0, 0), (2, 4)), 0), (((2, 0), (5, 4)), 4)]))
    assert found["t"].hex == defined("float4_e2m1fn", (7, 4), bytes(range(14)))[0]
    with pytest.raises(errors.UnsupportedFormatError, match="share bytes"):
        of(side([(((0, 0), (7, 2)), 0), (((0, 2), (7, 2)), 7)]))


def test_scalars_and_empty_tensors_have_fingerprints(tmp_path):
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "data.bin").write_bytes(b"\1\2\3\4")
    builder.tensor("scalar", by_name("float32"), ())
    builder.chunk("scalar", (), (), "data.bin", 0, 4)
    builder.tensor("empty", by_name("float32"), (3, 0))
    builder.tensor("listed", by_name("float32"), (0,))
    builder.chunk("listed", (0,), (0,), "data.bin", 4, 4)
    found = of(payloads(tmp_path, builder.build()))
    assert found["scalar"].hex == defined("float32", (), b"\1\2\3\4")[0]
    assert found["empty"] == (defined("float32", (3, 0), b"")[0], [])
    assert found["listed"] == (defined("float32", (0,), b"")[0], [])


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_hole_is_named_whole_and_the_others_are_hashed(small, tmp_path, io):
    dense = np.arange(64, dtype=np.int32).reshape(8, 8)
    quarters = [((a, b), (4, 4)) for a in (0, 4) for b in (0, 4)]
    side = payloads(tmp_path, stored(tmp_path, dense, quarters, skip=(2,)), io)
    with pytest.raises(errors.HoleError, match=r"'t' \(8, 8\) has a hole: \[4:8, 0:4\]"):
        of(side)
    told = []
    assert of(side, on_error=lambda tensor, error: told.append((tensor, type(error)))) == {}
    assert told == [(0, errors.HoleError)]  # once, however many blocks


def test_another_copy_is_read_when_asked_for_and_only_there(tmp_path):
    dense = np.arange(8, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((0,), (8,)), ((0,), (8,))])
    blob = bytearray((tmp_path / "data.bin").read_bytes())
    blob[int(catalog.start[1])] ^= 1
    (tmp_path / "data.bin").write_bytes(blob)
    catalog = replace(catalog, file_stats=[Place(tmp_path).stat("data.bin")])
    side = payloads(tmp_path, catalog)
    first, second = of(side)["t"].hex, of(side, replica=1)["t"].hex
    assert first == defined("int32", (8,), dense.tobytes())[0] != second
    with pytest.raises(errors.HoleError):
        of(side, replica=2)


def test_overlapping_chunks_that_disagree_have_no_fingerprint(tmp_path):
    dense = np.arange(12, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((0,), (8,)), ((4,), (8,))])
    assert of(payloads(tmp_path, catalog))["t"].hex == defined("int32", (12,), dense.tobytes())[0]
    blob = bytearray((tmp_path / "data.bin").read_bytes())
    blob[int(catalog.start[1])] ^= 1
    (tmp_path / "data.bin").write_bytes(blob)
    catalog = replace(catalog, file_stats=[Place(tmp_path).stat("data.bin")])
    with pytest.raises(errors.CorruptError, match="overlaps another chunk and differs from it"):
        of(payloads(tmp_path, catalog))


def test_a_pass_can_be_told_and_stopped(small, tmp_path):
    dense = np.arange(4096, dtype=np.int32)
    side = payloads(tmp_path, stored(tmp_path, dense, [((0,), (4096,))]))
    shares = []
    of(side, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10

    class Stop(Exception):
        pass

    def stop(share):
        if share > 0.3:
            raise Stop

    with pytest.raises(Stop):
        of(side, progress=stop)


def test_items_inside_torch_archives_and_zstd_streams(tmp_path):
    torch = pytest.importorskip("torch")
    zstandard = pytest.importorskip("zstandard")
    dense = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    pieces = [dense[:4].clone(), dense[4:].t().contiguous().t(), dense[:, :2].clone(), dense[:, 2:].clone()]
    assert not pieces[1].is_contiguous()
    for number, codec in enumerate((codecs.TORCH_ZIP, codecs.ZSTD_TORCH_ZIP)):
        for name, parts in (
            ("rows", [((0, 0), pieces[0]), ((4, 0), pieces[1])]),
            ("columns", [((0, 0), pieces[2]), ((0, 2), pieces[3])]),
        ):
            folder = tmp_path / f"{number}{name}"
            folder.mkdir()
            builder = CatalogBuilder("test", Place(folder))
            builder.tensor("t", by_name("float32"), (10, 6))
            blob = b""
            for low, tensor in parts:
                buffer = io_module.BytesIO()
                torch.save(tensor, buffer)
                item = buffer.getvalue()
                item = zstandard.compress(item) if codec == codecs.ZSTD_TORCH_ZIP else item
                builder.chunk("t", low, tuple(tensor.shape), "x", len(blob), len(blob) + len(item), codec=codec)
                blob += item
            (folder / "x").write_bytes(blob)
            for io in ("mmap", "pread"):
                found = of(payloads(folder, builder.build(), io))["t"]
                assert found.hex == defined("float32", (10, 6), dense.numpy().tobytes())[0]


def test_ranges_of_a_file(tmp_path):
    raw = np.random.default_rng(1).integers(0, 256, BLOCK + 100, dtype=np.uint8).tobytes()
    (tmp_path / "x").write_bytes(raw)
    for io in ("mmap", "pread"):
        source = SourcePool(Place(tmp_path), ["x"], [Place(tmp_path).stat("x")], io).source(0)
        want = [xxhash.xxh3_128_digest(raw[7 : 7 + BLOCK]), xxhash.xxh3_128_digest(raw[7 + BLOCK : BLOCK + 90])]
        assert range_digests(source, 7, BLOCK + 90) == want
        assert range_digests(source, 7, 7) == []


def test_real_checkpoints_against_their_truth(samples):
    """The truth of a sample is what its framework loaded, written with the safetensors package."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    met = 0
    truths = [
        (samples / truth.relative_to(samples.parent / "tests/truth").with_suffix(""), truth)
        for truth in sorted((samples.parent / "tests/truth").rglob("*.safetensors"))
    ]
    truths.append(
        (samples / "torch_save/ckpt_legacy.pt", samples.parent / "tests/truth/torch_save/ckpt.pt.safetensors")
    )
    for path, truth in truths:
        ckpt = wb.open(path).decode()
        loaded = load_file(truth)
        for key, found in of(ckpt.payloads).items():
            value = loaded.get(key)
            if value is not None:
                raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                position = ckpt.catalog.index[key]
                name, shape = ckpt.catalog.dtype_of(position).name, ckpt.catalog.shape_of(position)
                assert found.hex == defined(name, shape, raw)[0], (truth, key)
                met += 1
    assert met > 900


def test_every_outside_sample_can_be_hashed():
    root = os.environ.get("WORKBENCH_SAMPLES")
    if not root:
        pytest.skip("WORKBENCH_SAMPLES is not set")
    done = 0
    for row in wb.discover(Path(root), depth=6).itertuples():
        if row.complete and row.format != "unreadable":
            ckpt = wb.open(Path(root) / row.path)
            assert len(of(ckpt.payloads)) == len(ckpt)
            done += 1
    assert done
