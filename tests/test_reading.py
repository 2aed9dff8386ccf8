"""Plans and slices against a dense array, over random chunkings, codecs, strides and keys."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import boxes, chunkings, examples, keys, shapes
from workbench import errors
from workbench.core import memory, plan, region, source
from workbench.core.build import CatalogBuilder
from workbench.core.codecs import CODECS, RAW_BE
from workbench.core.dtypes import by_name
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.tensor import LazyTensor


def lazy(folder, catalog, io="mmap", key="t"):
    pool = SourcePool(Place(folder), catalog.files, catalog.file_stats, io)
    return LazyTensor(Payloads(catalog, pool), catalog.index[key], key, "param")


def stored(folder, dense, chunks, *, dtype="int32", order=None, big=False, skip=()):
    """Write each chunk of a dense array to its own place of one file; ``order`` is the axes' order in memory."""
    builder = CatalogBuilder("test", Place(folder))
    builder.tensor("t", by_name(dtype), dense.shape)
    blob = b"\xff" * 3  # nothing is aligned
    for position, (low, size) in enumerate(chunks):
        piece = dense[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
        axes = tuple(order) if order and len(order) == dense.ndim else tuple(range(dense.ndim))
        laid = np.ascontiguousarray(piece.transpose(axes))
        strides = [0] * dense.ndim
        for at, axis in enumerate(axes):
            strides[axis] = laid.strides[at] // laid.itemsize if laid.size else 1
        raw = laid.astype(laid.dtype.newbyteorder(">")).tobytes() if big else laid.tobytes()
        if position not in skip:
            codec = {"codec": RAW_BE} if big else {}
            builder.chunk("t", low, size, "data.bin", len(blob), len(blob) + len(raw), strides=strides, **codec)
        blob += raw + b"\xff"
    (folder / "data.bin").write_bytes(blob)
    builder.file("data.bin")
    catalog = builder.build()
    catalog.check()
    return catalog


def any_stored(data, folder, *, factor=1, overlaps=0):
    """A dense array of any shape, and its catalog: any chunking, order of the axes in memory, and byte order.

    Up to ``overlaps`` chunks more hold what others hold too.
    """
    shape = data.draw(shapes())
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape) * np.int32(factor)
    chunks = data.draw(chunkings(shape)) if all(shape) else [((0,) * len(shape), shape)]
    chunks = chunks + data.draw(st.lists(boxes(shape), max_size=overlaps))
    order = data.draw(st.none() | st.permutations(range(len(shape))))
    return dense, stored(folder, dense, chunks, order=order, big=data.draw(st.booleans()))


@examples(200)
@given(st.data())
def test_a_slice_of_any_chunking_is_the_slice_of_the_dense_array(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    dense, catalog = any_stored(data, folder)
    tensor = lazy(folder, catalog, data.draw(st.sampled_from(["mmap", "pread"])))
    assert tensor.shape == dense.shape
    assert (tensor.numpy() == dense).all()
    for _ in range(3):
        key = data.draw(keys(dense.shape))
        got = tensor.lazy[key].numpy()
        assert got.shape == dense[key].shape and (got == dense[key]).all(), key


@examples(200)
@given(st.data())
def test_elements_at_any_strides_are_read_in_spans_of_any_size(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    dense, catalog = any_stored(data, folder)
    tensor = lazy(folder, catalog)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.Source, "span", data.draw(st.integers(4, 200)))
        patch.setattr(source.Source, "gap", data.draw(st.integers(0, 100)))
        patch.setattr(region, "RUN", data.draw(st.integers(1, 100)))
        assert (tensor.numpy() == dense).all()
        for _ in range(3):
            key = data.draw(keys(dense.shape))
            got = tensor.lazy[key].numpy()
            assert got.shape == dense[key].shape and (got == dense[key]).all(), key


def test_a_column_of_a_wide_matrix_does_not_read_the_matrix(tmp_path, monkeypatch):
    dense = np.arange(64 << 16, dtype=np.int32).reshape(64, 1 << 16)
    read, real = [], source.PreadSource._fill

    def counted(self, left, at):
        read.append(len(left))
        real(self, left, at)

    monkeypatch.setattr(source.PreadSource, "_fill", counted)
    for order in (None, (1, 0)):
        tensor = lazy(tmp_path, stored(tmp_path, dense, [((0, 0), (64, 1 << 16))], order=order))
        read.clear()
        assert (tensor.lazy[:, 7].numpy() == dense[:, 7]).all() and sum(read) == 256
        assert (tensor.lazy[[9, 3, 9], :].numpy() == dense[[9, 3, 9]]).all()
        read.clear()
        assert (tensor.lazy[::8, [70, 7, 50_000]].numpy() == dense[::8, [70, 7, 50_000]]).all()
        assert sum(read) < 32 << 10
    read.clear()
    assert (tensor.lazy[:, 100:200].numpy() == dense[:, 100:200]).all() and len(read) == 1  # one run: transposed


@examples(100)
@given(st.data())
def test_keys_compose(tmp_path_factory, data):
    shape = data.draw(shapes(min_side=1))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("case")
    tensor = lazy(folder, stored(folder, dense, data.draw(chunkings(shape))))
    first = data.draw(keys(shape, arrays=False))
    second = data.draw(keys(dense[first].shape))
    got = tensor.lazy[first].lazy[second]
    want = dense[first][second]
    assert got.shape == want.shape and (got.numpy() == want).all(), (first, second)


@examples(200)
@given(st.data())
def test_many_requests_planned_at_once_copy_every_wanted_element_once(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    builder = CatalogBuilder("test", Place(folder))
    (folder / "f").write_bytes(b"\0" * 4096)
    wholes = data.draw(st.lists(shapes(min_side=1).filter(len), min_size=1, max_size=3))
    for t, shape in enumerate(wholes):
        builder.tensor(f"t{t}", by_name("uint8"), shape)
        for low, size in data.draw(chunkings(shape)):
            builder.chunk(f"t{t}", low, size, "f", 0, int(np.prod(size)))
    catalog = builder.build()
    dims = catalog.shape.shape[1]
    wanted = []
    for t, shape in enumerate(wholes):
        wanted += [(t, *data.draw(boxes(shape))) for _ in range(data.draw(st.integers(0, 3)))]
    tensors = np.array([t for t, *_ in wanted], np.int64)
    offsets = np.array([(*o, *[0] * (dims - len(o))) for _, o, _ in wanted], np.int64).reshape(-1, dims)
    sizes = np.array([(*s, *[1] * (dims - len(s))) for _, _, s in wanted], np.int64).reshape(-1, dims)
    reads = plan.plan_reads(catalog, tensors, offsets, sizes)
    for k, (t, low, size) in enumerate(wanted):
        count = np.zeros(size, int)
        mine = reads.request == k
        for row, src, dst, n in zip(
            reads.row[mine], reads.source[mine], reads.dest[mine], reads.sizes[mine], strict=True
        ):
            assert catalog.tensor[row] == t
            nd = len(size)
            count[tuple(slice(a, a + b) for a, b in zip(dst[:nd], n[:nd], strict=True))] += 1
            # the copy's place in the global tensor is the same seen from the chunk and from the request
            assert (catalog.offsets[row][:nd] + src[:nd] == np.array(low) + dst[:nd]).all()
        assert (count == 1).all()
    files = list(zip(catalog.file[reads.row].tolist(), catalog.start[reads.row].tolist(), strict=True))
    assert files == sorted(files)


@examples(100)
@given(st.data())
def test_a_hole_is_an_error_that_names_it_and_the_rest_reads(tmp_path_factory, data):
    shape = data.draw(shapes(min_side=1).filter(len))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    chunks = data.draw(chunkings(shape))
    lost = data.draw(st.integers(0, len(chunks) - 1))
    folder = tmp_path_factory.mktemp("case")
    tensor = lazy(folder, stored(folder, dense, chunks, skip={lost}))
    with pytest.raises(errors.HoleError, match=r"'t'.*hole: \[.*\d:\d"):
        tensor.numpy()
    for position, (low, size) in enumerate(chunks):
        key = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
        if position != lost:
            assert (tensor.lazy[key].numpy() == dense[key]).all()
        else:
            with pytest.raises(errors.HoleError):
                tensor.lazy[key].numpy()


def test_overlapping_chunks_read_where_they_agree_and_raise_where_not(tmp_path):
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "f").write_bytes(bytes([0, 1, 2, 3, 2, 3, 4, 5, 9, 9]))
    for key, second in (("same", 4), ("other", 5)):
        builder.tensor(key, by_name("uint8"), (6,))
        builder.chunk(key, (0,), (4,), "f", 0, 4)
        builder.chunk(key, (2,), (4,), "f", second, second + 4)
    catalog = builder.build()
    assert lazy(tmp_path, catalog, key="same").numpy().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(errors.CorruptError, match=r"'other'.*overlaps"):
        lazy(tmp_path, catalog, key="other").numpy()


@pytest.mark.parametrize("codec", range(len(CODECS)))
@pytest.mark.parametrize(("column", "words"), [("inner", "starts before its payload"), ("strides", "negative strides")])
def test_a_chunk_that_runs_backwards_is_refused_whatever_its_codec(tmp_path, codec, column, words):
    (tmp_path / "f").write_bytes(bytes(64))
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("t", by_name("uint8"), (4,))
    builder.chunk("t", (0,), (4,), "f", 0, 64, codec=codec, inner=1, strides=(2,))
    catalog = builder.build()
    catalog.check()
    getattr(catalog, column)[:] = -1
    with pytest.raises(errors.CorruptError, match=f"'t' has a chunk .*{words}"):
        catalog.check()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (7, "out of range"),
        ((0, 0, 0), "too many indices: 3"),
        ((..., ...), "one ellipsis"),
        (None, "new axes"),
        ([0, 9], "out of range"),
        ([True, False], "mask of length 2"),
        (([0], [0]), "only one axis"),
        (1.5, "is not a valid index"),
        ("x", "is not a valid index"),
        (True, "is not a valid index"),
        ([[0]], "is not a valid index"),
        (slice(None, None, 0), "zero"),
    ],
)
def test_a_key_that_does_not_fit_is_named(tmp_path, key, words):
    dense = np.zeros((3, 4), np.int32)
    tensor = lazy(tmp_path, stored(tmp_path, dense, [((0, 0), (3, 4))]))
    with pytest.raises(errors.SelectionError, match=words) as caught:
        tensor[key]
    assert isinstance(caught.value, IndexError)


def test_a_changed_file_is_noticed_before_its_bytes_are_used(tmp_path):
    dense = np.arange(12, dtype=np.int32).reshape(3, 4)
    for change in ("shorter", "rewritten", "gone", "replaced by a link"):
        catalog = stored(tmp_path, dense, [((0, 0), (3, 4))])
        tensor = lazy(tmp_path, catalog)
        assert (tensor.numpy() == dense).all()
        path = tmp_path / "data.bin"
        blob = path.read_bytes()
        if change == "shorter":
            path.write_bytes(blob[:-5])
        elif change == "rewritten":
            path.write_bytes(blob[::-1])
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
            if change.startswith("replaced"):
                (tmp_path.parent / "outside.bin").write_bytes(blob)
                path.symlink_to(tmp_path.parent / "outside.bin")
        with pytest.raises((errors.ChangedError, errors.MissingFileError, errors.UnsafeError), match=r"data\.bin"):
            tensor.numpy()
        path.unlink(missing_ok=True)


def test_a_view_is_private_to_its_holder(tmp_path):
    dense = np.arange(1 << 16, dtype=np.int32)
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "data.bin").write_bytes(b"\0" * 64 + dense.tobytes())
    builder.tensor("t", by_name("int32"), dense.shape)
    builder.chunk("t", (0,), dense.shape, "data.bin", 64, 64 + dense.nbytes)
    tensor = lazy(tmp_path, builder.build())
    first = tensor.torch(copy=False)
    first.zero_()
    assert (tensor.torch(copy=False).numpy() == dense).all()
    assert (tmp_path / "data.bin").read_bytes()[64:] == dense.tobytes()


def test_a_view_costs_no_memory_until_it_is_touched(tmp_path):
    size = 1 << 28
    with open(tmp_path / "data.bin", "wb") as handle:
        handle.truncate(size)
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("t", by_name("uint8"), (size,))
    builder.chunk("t", (0,), (size,), "data.bin", 0, size)
    tensor = lazy(tmp_path, builder.build())

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    before = anonymous()
    held = tensor.torch(copy=False)
    assert held.shape == (size,) and anonymous() - before < 32 << 20
    assert int(held[12345]) == 0


def test_a_tensor_that_does_not_fit_into_memory_is_an_error_of_ours(tmp_path, monkeypatch):
    def full(*_, **__):
        raise MemoryError

    size = 1 << 22
    (tmp_path / "data.bin").write_bytes(bytes(size))
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("t", by_name("uint8"), (size,))
    builder.chunk("t", (0,), (size,), "data.bin", 0, size)
    tensor = lazy(tmp_path, builder.build())
    monkeypatch.setattr(memory, "_ADVICE", None)
    monkeypatch.setattr(memory, "np", SimpleNamespace(empty=full, prod=np.prod, int64=np.int64))
    with pytest.raises(errors.OpenError, match="not enough memory to read 4,194,304 bytes"):
        tensor[...]


@pytest.mark.parametrize(
    "low, size, starts",
    [
        ([(0, 0)], (6, 4), [0]),  # whole
        ([(2, 0)], (3, 4), [8]),  # rows follow each other
        ([(1, 1)], (2, 2), [5, 9]),
        ([(0, 0), (4, 0)], (2, 4), [0, 16]),
    ],
)
def test_small_boxes_of_one_chunk_are_read_without_a_plan(tmp_path, monkeypatch, low, size, starts):
    dense = np.arange(24, dtype=np.int32).reshape(6, 4)
    tensor = lazy(tmp_path, stored(tmp_path, dense, [((0, 0), (6, 4))]))
    seen = []
    plain = source.PreadSource.read_runs
    monkeypatch.setattr(
        source.PreadSource, "read_runs", lambda one, rows, at: seen.extend(list(at)) or plain(one, rows, at)
    )
    monkeypatch.setattr("workbench.core.read.plan_reads", None)
    found = list(tensor.boxes(np.array(low), np.array([size] * len(low))))
    for (row, column), one in zip(low, found, strict=True):
        assert (one == dense[row : row + size[0], column : column + size[1]]).all() and not one.flags.writeable
    assert [(at - seen[0]) // 4 for at in seen] == [at - starts[0] for at in starts]


def test_a_small_whole_tensor_is_read_without_a_plan(tmp_path, monkeypatch):
    dense = np.arange(24, dtype=np.int32).reshape(6, 4)
    tensor = lazy(tmp_path, stored(tmp_path, dense, [((0, 0), (6, 4))]))
    monkeypatch.setattr("workbench.core.read.plan_reads", None)
    found = tensor.numpy()
    assert (found == dense).all() and found.flags.writeable and found.flags.c_contiguous
    with pytest.raises(TypeError):
        tensor[1:3]


def test_boxes_of_several_chunks_are_planned(tmp_path, monkeypatch):
    dense = np.arange(24, dtype=np.int32).reshape(6, 4)
    halves = lazy(tmp_path, stored(tmp_path, dense, [((0, 0), (3, 4)), ((3, 0), (3, 4))]))
    assert (next(halves.boxes(np.array([(2, 0)]), np.array([(2, 4)]))) == dense[2:4]).all()
    monkeypatch.setattr("workbench.core.read.plan_reads", None)
    with pytest.raises(TypeError):
        next(halves.boxes(np.array([(2, 0)]), np.array([(2, 4)])))
