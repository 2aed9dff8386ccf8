"""The pass against dense arrays: any chunking, any pieces, any casts; memory, cancelling, damaged sources."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import boxes, chunkings, examples, shapes
from tests.test_reading import stored
from workbench import errors
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.core.transfer import streams
from workbench.export.filemap import FileMap, Pieces, no_pieces
from workbench.export.moving import engine
from workbench.export.moving.engine import prepare


def job_of(folder, catalog, maps, io="mmap"):
    return prepare(Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, io)), maps)


def laid(pieces: Pieces, name="out", gap=5, finish=None) -> FileMap:
    """Pieces one after the other, unaligned, a literal before each."""
    at, start, literals = 0, [], []
    for nbytes in pieces.nbytes.tolist():
        literals.append((at, b"\xee" * gap))
        start.append(at + gap)
        at += gap + nbytes
    return FileMap(name, at, tuple(literals), pieces, np.array(start, np.int64), finish)


def cut_pieces(catalog, local: list[tuple[tuple[int, ...], list]], tensor=0) -> Pieces:
    """Pieces of one tensor: for each a shape and ``(offset, size, where it goes)`` boxes."""
    dims = catalog.shape.shape[1]

    def pad(rows, value):
        return np.array([(*row, *[value] * (dims - len(row))) for row in rows], np.int64).reshape(-1, dims)

    flat = [(at, *one) for at, (_, parts) in enumerate(local) for one in parts]
    return Pieces(
        [f"p{at}" for at in range(len(local))],
        np.full(len(local), catalog.dtype[tensor], np.uint8),
        np.array([len(shape) for shape, _ in local], np.int64),
        pad([shape for shape, _ in local], 1),
        np.array([at for at, *_ in flat], np.int64),
        np.full(len(flat), tensor, np.int64),
        pad([low for _, low, _, _ in flat], 0),
        pad([size for _, _, size, _ in flat], 1),
        pad([dest for *_, dest in flat], 0),
    )


@examples(75)
@given(st.data())
def test_pieces_of_any_boxes_from_any_chunks_are_the_dense_slices(tmp_path_factory, data):
    shape = data.draw(shapes(max_dims=4))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    chunks = data.draw(chunkings(shape)) if all(shape) else [((0,) * len(shape), shape)]
    order = data.draw(st.none() | st.permutations(range(len(shape))))
    folder = tmp_path_factory.mktemp("case")
    catalog = stored(folder, dense, chunks, order=order, big=data.draw(st.booleans()))
    local, want = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        low, size = data.draw(boxes(shape))
        whole = dense[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
        if size and size[0] > 1 and data.draw(st.booleans()):  # two boxes of it, put together the other way round
            cut = data.draw(st.integers(1, size[0] - 1))
            first, second = (cut, *size[1:]), (size[0] - cut, *size[1:])
            zero = (0,) * (len(size) - 1)
            local.append((size, [(low, first, (size[0] - cut, *zero)), ((low[0] + cut, *low[1:]), second, (0, *zero))]))
            want.append(np.concatenate([whole[cut:], whole[:cut]]))
        else:
            local.append((size, [(low, size, (0,) * len(size))]))
            want.append(whole)
    one = laid(cut_pieces(catalog, local), gap=data.draw(st.integers(0, 3)))
    job = job_of(folder, catalog, [one], data.draw(st.sampled_from(["mmap", "pread"])))
    step = data.draw(st.sampled_from([4, 12, 64, 1 << 20]))
    before, streams.STEP = streams.STEP, step
    try:
        written = job.run([str(folder / "out")], threads=data.draw(st.integers(1, 2)))
    finally:
        streams.STEP = before
    blob = (folder / "out").read_bytes()
    assert len(blob) == one.size
    for at, truth, result in zip(one.start.tolist(), want, written[0], strict=True):
        raw = np.ascontiguousarray(truth).tobytes()
        assert blob[at : at + len(raw)] == raw
        head = f"workbench tensor 1\nint32[{','.join(map(str, truth.shape))}]\n".encode()
        blocks = [xxhash.xxh3_128_digest(raw)] if raw else []
        assert result.source.hex == result.target.hex == xxhash.xxh3_128_hexdigest(head + b"".join(blocks))


def large(folder, columns=False):
    """40 MB of float32 in two files, cut along an axis; the dense array."""
    dense = np.random.default_rng(2).standard_normal((2500, 4000), np.float32)
    builder = CatalogBuilder("test", Place(folder))
    builder.tensor("t", by_name("float32"), dense.shape)
    for number in range(2):
        part = dense[:, number * 2000 :][:, :2000] if columns else dense[number * 1250 :][:1250]
        (folder / f"f{number}").write_bytes(b"x" * 7 + np.ascontiguousarray(part).tobytes())
        low = (0, number * 2000) if columns else (number * 1250, 0)
        builder.chunk("t", low, part.shape, f"f{number}", 7, 7 + part.nbytes)
        builder.file(f"f{number}")
    return builder.build(), dense


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("many", [64, 1])
def test_many_units_of_one_tensor_keep_their_fingerprints_and_crc(tmp_path, columns, dtype, many, monkeypatch):
    import zlib

    monkeypatch.setattr(engine, "MANY_FILES", many)
    catalog, dense = large(tmp_path, columns)
    crcs = []
    wanted = by_name(dtype)
    pieces = Pieces.whole(catalog, np.array([0]), dtype=np.array([wanted.code], np.uint8))
    one = laid(pieces, finish=lambda found: crcs.extend(found) or [(0, b"done!")])
    ticks = []
    job = job_of(tmp_path, catalog, [one])
    written = job.run([str(tmp_path / "out")], threads=2, progress=ticks.append)[0][0]
    blob = (tmp_path / "out").read_bytes()
    truth = torch.from_numpy(dense).to(wanted.torch).view(torch.uint8).numpy().tobytes()
    assert blob == b"done!" + truth and crcs == [zlib.crc32(truth)]
    assert ticks[-1] == 1.0 and ticks == sorted(ticks) and len(ticks) == len(set(ticks))
    payloads = Payloads(catalog, SourcePool(Place(tmp_path), catalog.files, catalog.file_stats))
    assert written.source == dict(tensor_fingerprints(payloads))[0]
    blocks = [xxhash.xxh3_128_digest(truth[at : at + (4 << 20)]) for at in range(0, len(truth), 4 << 20)]
    assert written.target.blocks == blocks
    assert (written.cast is None) == (dtype == "float32")
    if written.cast is not None:
        gaps = (torch.from_numpy(dense).to(wanted.torch).float() - torch.from_numpy(dense)).abs()
        assert (written.cast.changed, written.cast.max_abs) == (int((gaps > 0).sum()), float(gaps.max()))


def test_raising_in_tick_ends_the_pass(tmp_path):
    catalog, _ = large(tmp_path)
    job = job_of(tmp_path, catalog, [laid(Pieces.whole(catalog, np.array([0])))])

    def stop(share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run([str(tmp_path / "out")], progress=stop)
    assert not [one for one in threading.enumerate() if one.name.startswith(("workbench-export", "workbench-sync"))]


def test_chunks_that_overlap_are_compared(tmp_path):
    (tmp_path / "f").write_bytes(bytes([0, 1, 2, 3, 2, 3, 4, 5, 9, 9]))
    builder = CatalogBuilder("test", Place(tmp_path))
    for key, second in (("same", 4), ("other", 5)):
        builder.tensor(key, by_name("uint8"), (6,))
        builder.chunk(key, (0,), (4,), "f", 0, 4)
        builder.chunk(key, (2,), (4,), "f", second, second + 4)
    catalog = builder.build()
    job_of(tmp_path, catalog, [laid(Pieces.whole(catalog, np.array([0])), gap=0)]).run([str(tmp_path / "out")])
    assert (tmp_path / "out").read_bytes() == bytes(range(6))
    with pytest.raises(errors.CorruptError, match=r"'other'.*overlaps"):
        job_of(tmp_path, catalog, [laid(Pieces.whole(catalog, np.array([1])))]).run([str(tmp_path / "out")])


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    catalog = stored(tmp_path, np.arange(6, dtype=np.int32), [((0,), (3,)), ((3,), (3,))], skip={1})
    whole = Pieces.whole(catalog, np.array([0]))
    with pytest.raises(errors.HoleError, match="hole"):
        job_of(tmp_path, catalog, [laid(whole)])
    catalog = stored(tmp_path, np.arange(6, dtype=np.int32), [((0,), (6,))])
    half = Pieces.whole(catalog, np.array([0]), dtype=np.array([by_name("bfloat16").code], np.uint8))
    with pytest.raises(errors.UnsupportedFormatError, match="int32 to bfloat16"):
        job_of(tmp_path, catalog, [laid(half)])
    with pytest.raises(errors.UsageError, match="do not cover each of its elements exactly once"):
        job_of(tmp_path, catalog, [laid(cut_pieces(catalog, [((6,), [((0,), (4,), (0,)), ((0,), (2,), (3,))])]))])
    fine = laid(Pieces.whole(catalog, np.array([0])))
    for wrong in (
        FileMap("m", fine.size - 1, fine.literals, fine.pieces, fine.start),
        FileMap("m", fine.size, ((3, b"123"),), fine.pieces, fine.start),
        FileMap("m", 4, ((-1, b"123"),), no_pieces(1), np.empty(0, np.int64)),
    ):
        with pytest.raises(errors.UsageError, match="'m'"):
            job_of(tmp_path, catalog, [wrong])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "open"])
def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path, monkeypatch, call):
    catalog, _ = large(tmp_path)
    job = job_of(tmp_path, catalog, [laid(Pieces.whole(catalog, np.array([0])), name="model.bin")])
    real = getattr(os, call)

    def failing(first, *rest, **named):
        if call != "open" or str(first).endswith("/out"):
            raise OSError(5, "Input/output error")
        return real(first, *rest, **named)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(errors.WriteError, match=r"'model.bin'.*Input/output error"):
        job.run([str(tmp_path / "out")])
    monkeypatch.undo()


def test_short_writes_go_on_where_they_stopped(tmp_path, monkeypatch):
    dense = np.arange(100_000, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((0,), (100_000,))])
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:7777], at))
    job_of(tmp_path, catalog, [laid(Pieces.whole(catalog, np.array([0])), gap=3)]).run([str(tmp_path / "out")])
    assert (tmp_path / "out").read_bytes() == b"\xee" * 3 + dense.tobytes()
