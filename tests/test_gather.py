"""Whole tensors and boxes read at once, against dense arrays and torch's own files."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.properties import boxes, chunkings, examples, shapes
from tests.test_reading import any_stored, stored
from workbench import errors
from workbench.core.build import CatalogBuilder
from workbench.core.codecs import RAW_BE, TORCH_PART
from workbench.core.dtypes import by_name
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.core.transfer import arrays
from workbench.core.transfer.regions import BoxRequests


def payloads(folder, catalog, io="mmap"):
    return Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, io))


def gathered(folder, catalog, io="mmap", threads=2):
    return arrays.gather(payloads(folder, catalog, io), np.arange(len(catalog)), threads=threads)


@examples(300)
@given(st.data())
def test_any_chunking_in_pieces_of_any_size_is_the_dense_array(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    dense, catalog = any_stored(data, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "MIN_PIECE", data.draw(st.integers(1, 50)))  # elements are cut in two as well
        patch.setattr(arrays, "PIECE", data.draw(st.integers(50, 200)))
        (got,) = gathered(folder, catalog, data.draw(st.sampled_from(["mmap", "pread"])), data.draw(st.integers(1, 3)))
    assert got.shape == dense.shape and got.flags.c_contiguous and (got == dense).all()


@examples(300)
@given(st.data())
def test_boxes_go_to_any_place_of_any_buffer_and_nothing_else_is_touched(tmp_path_factory, data):
    """Boxes of a dense array into views of larger, permuted buffers; runs of any length are read one by one."""
    shape = data.draw(shapes(max_dims=4))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    chunks = data.draw(chunkings(shape)) if all(shape) else [((0,) * len(shape), shape)]
    folder = tmp_path_factory.mktemp("case")
    catalog = stored(folder, dense, chunks, big=data.draw(st.booleans()))
    width = catalog.shape.shape[1]
    wanted, buffers, views, asked = [], [], [], 0
    for _ in range(data.draw(st.integers(0, 3))):
        low, size = data.draw(boxes(shape))
        axes = data.draw(st.permutations(range(len(shape))))
        room = np.full([size[axis] + data.draw(st.integers(0, 2)) for axis in axes], -1, np.int32)
        margins = tuple(slice(room.shape[k] - size[axis], None) for k, axis in enumerate(axes))
        view = room[margins].transpose(np.argsort(axes)) if shape else room
        steps = [step // 4 for step in view.strides]
        at = (view.__array_interface__["data"][0] - room.__array_interface__["data"][0]) // 4 if view.size else 0
        pad = width - len(shape)
        wanted.append((0, [*low, *[0] * pad], [*size, *[1] * pad], len(buffers), at, [*steps, *[1] * pad]))
        buffers.append(room)
        views.append((view, dense[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]))
        asked += view.nbytes
    columns = (
        [np.array(column, np.int64) for column in zip(*wanted, strict=True)]
        if wanted
        else [np.zeros((0, width) if k in (1, 2, 5) else 0, np.int64) for k in range(6)]
    )
    side = payloads(folder, catalog, data.draw(st.sampled_from(["mmap", "pread"])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "MIN_PIECE", data.draw(st.integers(1, 50)))
        patch.setattr(arrays, "PIECE", data.draw(st.integers(50, 200)))
        patch.setattr(arrays, "RUN", data.draw(st.integers(1, 50)))
        flat = [room.reshape(-1).view(np.uint8) for room in buffers]
        regions = arrays.planned(side, BoxRequests(*columns))
        read = arrays.transfer(side, regions, flat, threads=data.draw(st.integers(1, 2)))
    for room, (view, want) in zip(buffers, views, strict=True):
        assert (view == want).all()
        assert (room == -1).sum() == room.size - view.size
    assert read == asked or (catalog.codec == RAW_BE).any()


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_many_tensors_in_files_of_torch_and_bare_ones(tmp_path, io):
    """Archives whole and in part, transposed and offset views, big endian, scalars, empty ones and bytes."""
    builder, truth, blob = CatalogBuilder("test", Place(tmp_path)), {}, b"\xff" * 5
    places = []

    def put(key, dense, boxes, codec=0, saved=None):
        nonlocal blob
        name = str(dense.dtype).removeprefix("torch.")
        builder.tensor(key, by_name(name), tuple(dense.shape))
        truth[key] = dense
        for low, size, payload, more in boxes:
            places.append((key, low, size, len(blob), len(blob) + len(payload), more | {"codec": codec}))
            blob += payload

    def archive(tensor):
        path = tmp_path / "item.pt"
        torch.save(tensor, path)
        data = path.read_bytes()
        path.unlink()
        return data

    weight = torch.randn(7, 6).bfloat16()
    put("rows", weight, [((a, 0), (n, 6), archive(weight[a : a + n].clone()), {}) for a, n in ((0, 3), (3, 4))], 2)
    put("columns", weight, [((0, a), (7, 3), archive(weight[:, a : a + 3].clone()), {}) for a in (0, 3)], 2)
    put("view", weight, [((a, 0), (n, 6), archive(weight[a : a + n]), {}) for a, n in ((0, 3), (3, 4))], 2)
    put("transposed", weight.T, [((0, 0), (6, 7), archive(weight.T), {})], 2)
    stack = torch.arange(60, dtype=torch.int64).reshape(5, 12)
    whole = archive(stack)
    put("part", stack[2:3], [((0, 0), (1, 12), whole, {"inner": 2 * 12 * 8})], TORCH_PART)
    put("scalar", torch.tensor(3.5), [((), (), torch.tensor(3.5).numpy().tobytes(), {})])
    put("empty", torch.empty(0, 4), [((0, 0), (0, 4), b"", {})])
    put("flags", torch.tensor([True, False]), [((0,), (2,), b"\1\0", {})])
    pairs = torch.randn(4, dtype=torch.complex128)
    put("pairs", pairs, [((0,), (4,), pairs.numpy().tobytes(), {})])
    put("big", torch.arange(9, dtype=torch.int16), [((0,), (9,), np.arange(9, dtype=">i2").tobytes(), {})], RAW_BE)
    (tmp_path / "data.bin").write_bytes(blob)
    for key, low, size, start, stop, more in places:
        builder.chunk(key, low, size, "data.bin", start, stop, **more)
    catalog = builder.build()
    catalog.check()
    for threads in (1, 2):
        for key, got in zip(catalog.keys, gathered(tmp_path, catalog, io, threads), strict=True):
            assert got.shape == tuple(truth[key].shape)
            assert got.tobytes() == (truth[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()), key


def test_chunks_that_overlap_are_compared(tmp_path):
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "f").write_bytes(bytes([0, 1, 2, 3, 2, 3, 4, 5, 9, 9]))
    for key, second in (("alone", None), ("same", 4), ("other", 5)):
        builder.tensor(key, by_name("uint8"), (6,) if second else (4,))
        builder.chunk(key, (0,), (4,), "f", 0, 4)
        if second:
            builder.chunk(key, (2,), (4,), "f", second, second + 4)
    catalog = builder.build()
    got = arrays.gather(payloads(tmp_path, catalog), np.array([1, 0]), threads=2)
    assert [array.tolist() for array in got] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    with pytest.raises(errors.CorruptError, match=r"'other'.*overlaps"):
        gathered(tmp_path, catalog)


def test_a_hole_a_cut_and_a_change_are_errors_that_name_the_file(tmp_path):
    dense = np.arange(400_000, dtype=np.int32).reshape(1000, 400)
    halves = [((0, 0), (500, 400)), ((500, 0), (500, 400))]
    with pytest.raises(errors.HoleError, match=r"'t'.*500:1000"):
        gathered(tmp_path, stored(tmp_path, dense, halves, skip={1}))
    catalog = stored(tmp_path, dense, halves)
    path = tmp_path / "data.bin"
    blob = path.read_bytes()
    opened_before = payloads(tmp_path, catalog)
    assert (arrays.gather(opened_before, np.array([0]), threads=2)[0] == dense).all()
    path.write_bytes(blob[:-5])
    for opened in (opened_before, payloads(tmp_path, catalog)):
        with pytest.raises(errors.ChangedError, match=r"data\.bin.*1,600,005.*1,600,000"):
            arrays.gather(opened, np.array([0]), threads=2)
    path.write_bytes(blob)
    os.utime(path, ns=(1, 1))
    with pytest.raises(errors.ChangedError, match="rewritten"):
        arrays.gather(opened_before, np.array([0]), threads=1)


def test_an_archive_of_another_shape_or_type_is_refused_before_it_is_copied(tmp_path):
    torch.save(torch.zeros(4, 3), tmp_path / "item.pt")
    size = (tmp_path / "item.pt").stat().st_size
    for shape, dtype, words in (((3, 4), "float32", "shape"), ((4, 3), "int32", "int32")):
        builder = CatalogBuilder("test", Place(tmp_path))
        builder.tensor("t", by_name(dtype), shape)
        builder.chunk("t", (0, 0), shape, "item.pt", 0, size, codec=2)
        with pytest.raises(errors.CorruptError, match=rf"'t'.*{words}"):
            gathered(tmp_path, builder.build())


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize(("inner", "stride"), [(12, 1), (0, 2)])
def test_a_part_that_reaches_out_of_its_archive_is_refused(tmp_path, io, inner, stride):
    torch.save(torch.zeros(6), tmp_path / "item.pt")
    size = (tmp_path / "item.pt").stat().st_size
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("t", by_name("float32"), (4,))
    builder.chunk("t", (0,), (4,), "item.pt", 0, size, codec=TORCH_PART, inner=inner, strides=(stride,))
    with pytest.raises(
        errors.CorruptError, match=r"'t'.*'item.pt' contains 6 elements but the metadata says 7 or more"
    ):
        gathered(tmp_path, builder.build(), io)


def test_a_state_dict_is_what_torch_saved_and_each_tensor_is_alone_in_its_memory(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {f"w{i}": torch.randn(1300, 1024) for i in range(3)} | {"step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for io in ("mmap", "pread"):
        got = wb.open(tmp_path / "c", io=io).state_dict(threads=2)
        assert list(got) == list(wb.open(tmp_path / "c"))
        assert all(torch.equal(got[key], want) for key, want in state.items())
        got["w0"].zero_()
        assert torch.equal(got["w1"], state["w1"]) and torch.equal(wb.open(tmp_path / "c")["w0"].torch(), state["w0"])
