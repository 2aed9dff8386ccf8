"""The pass against dense arrays: every element exactly once, where it says, whatever the chunking, cuts and threads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import chunkings, examples, shapes
from tests.test_reading import any_stored, lazy, stored
from workbench import errors
from workbench.core import scan as scan_module
from workbench.core import storage
from workbench.core import work as work_module
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.scan import scan
from workbench.core.storage import SourcePool
from workbench.core.work import chunk_work, pair_work


def payloads(folder, catalog, io="mmap"):
    return Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, io))


@dataclass
class Seen:
    """Where each element was met, and what it was."""

    order: list = field(default_factory=list)
    places: list = field(default_factory=list)
    values: list = field(default_factory=list)
    others: list = field(default_factory=list)


class Remember:
    def begin(self, dtype, other):
        return Seen()

    def fold(self, state, piece):
        state.order.append(piece.row)
        state.places += [piece.where(k) for k in range(len(piece.bits))]
        state.values += piece.bits.tolist()
        state.others += piece.other.tolist() if piece.other is not None else []

    def merge(self, state, later):
        for name in vars(state):
            getattr(state, name).extend(getattr(later, name))


def dense_of(shape, seen, values):
    got = np.full(shape, -1, np.int64)
    for place, value in zip(seen.places, values, strict=True):
        at = place[: len(shape)]
        assert got[at] == -1, f"{at} was met twice"
        got[at] = value
    return got


@pytest.fixture
def small(monkeypatch):
    """Pieces and tasks of a few elements, so that small tensors are cut everywhere."""
    monkeypatch.setattr(scan_module, "PIECE", 12)
    monkeypatch.setattr(work_module, "TASK", 40)
    monkeypatch.setattr(work_module, "BOX_COST", 8)


@examples(75)
@given(st.data())
def test_each_element_is_met_once_at_its_place(small, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    dense, catalog = any_stored(data, folder, overlaps=2)
    threads, io = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(["mmap", "pread"]))
    found = dict(scan(chunk_work(payloads(folder, catalog, io)), Remember(), threads=threads))
    if dense.size == 0:
        assert found == {}
        return
    assert (dense_of(dense.shape, found[0], found[0].values) == dense).all()


@examples(75)
@given(st.data())
def test_two_chunkings_meet_element_by_element(small, tmp_path_factory, data):
    shape = data.draw(shapes(min_side=1))
    left = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    right = left + 1000
    folders = [tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")]
    orders = st.none() | st.permutations(range(len(shape)))
    catalogs = [
        stored(folder, dense, data.draw(chunkings(shape)), order=data.draw(orders))
        for folder, dense in zip(folders, (left, right), strict=True)
    ]
    sides = [payloads(folder, catalog) for folder, catalog in zip(folders, catalogs, strict=True)]
    tensors = np.array([0, 0])  # the same pair listed twice is compared twice
    found = dict(scan(pair_work(*sides, tensors, tensors), Remember(), threads=2))
    for group in (0, 1):
        assert (dense_of(shape, found[group], found[group].values) == left).all()
        assert (dense_of(shape, found[group], found[group].others) == right).all()


def test_merging_keeps_the_order_of_the_file_for_any_number_of_threads(small, tmp_path):
    dense = np.arange(4096, dtype=np.int32).reshape(64, 64)
    catalog = stored(tmp_path, dense, [((0, 0), (40, 64)), ((40, 0), (24, 64))])
    results = [dict(scan(chunk_work(payloads(tmp_path, catalog)), Remember(), threads=n))[0] for n in (1, 2, 5)]
    assert results[0].values == list(range(4096))
    assert results[0] == results[1] == results[2]


def test_a_group_is_given_out_when_its_last_box_is_done(small, tmp_path):
    dense = np.arange(64, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((at,), (16,)) for at in (0, 16, 32, 48)])
    groups = np.array([7, 8, 7, 9])
    work = chunk_work(payloads(tmp_path, catalog), group=groups)
    assert [group for group, _ in scan(work, Remember(), threads=2)] == [8, 7, 9]
    work = chunk_work(payloads(tmp_path, catalog), group=groups, order="group")
    assert [group for group, _ in scan(work, Remember(), threads=2)] == [7, 8, 9]


def test_every_stored_copy_is_met_when_replicas_are_asked_for(tmp_path):
    dense = np.arange(8, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((0,), (8,)), ((0,), (8,))])
    assert catalog.replica.tolist() == [0, 1]
    once = dict(scan(chunk_work(payloads(tmp_path, catalog)), Remember()))
    both = dict(scan(chunk_work(payloads(tmp_path, catalog), replica=None), Remember()))
    assert once[0].values == list(range(8)) and both[0].values == 2 * list(range(8))


def test_an_unreadable_box_is_told_and_the_rest_is_read(small, tmp_path):
    dense = np.arange(64, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((0,), (32,)), ((32,), (32,))])
    catalog.stop[1] += 1000
    with pytest.raises(errors.TruncatedError):
        list(scan(chunk_work(payloads(tmp_path, catalog)), Remember()))
    told = []
    work = chunk_work(payloads(tmp_path, catalog))
    found = dict(scan(work, Remember(), on_error=lambda side, row, error: told.append((side, row, type(error)))))
    assert found[0].values == list(range(32))
    assert set(told) == {(0, 1, errors.TruncatedError)}


def test_the_pass_tells_its_progress_and_can_be_stopped(small, tmp_path):
    dense = np.arange(4096, dtype=np.int32)
    catalog = stored(tmp_path, dense, [((0,), (4096,))])
    told = []
    dict(scan(chunk_work(payloads(tmp_path, catalog)), Remember(), progress=told.append))
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 10

    class Stop(Exception):
        pass

    def stop(share):
        if share > 0.3:
            raise Stop

    met = []

    class Count(Remember):
        def fold(self, state, piece):
            met.append(len(piece.bits))

    with pytest.raises(Stop):
        dict(scan(chunk_work(payloads(tmp_path, catalog)), Count(), threads=1, progress=stop))
    assert sum(met) < 2500


@pytest.mark.parametrize("order", [None, (1, 0)])
def test_without_maps_a_cut_reads_its_own_bytes_only(small, tmp_path, monkeypatch, order):
    dense = np.arange(4096, dtype=np.int32).reshape(64, 64)
    catalog = stored(tmp_path, dense, [((0, 0), (64, 64))], order=order)
    read = []
    plain = storage.PreadSource.read_into
    monkeypatch.setattr(
        storage.PreadSource,
        "read_into",
        lambda self, buffer, start: read.append(len(buffer)) or plain(self, buffer, start),
    )
    found = dict(scan(chunk_work(payloads(tmp_path, catalog, "pread")), Remember()))[0]
    assert (dense_of(dense.shape, found, found.values) == dense).all() and len(read) > 64
    if order is None:
        assert sum(read) == dense.nbytes
    else:  # elements of a row lie apart: what is between them is read as well, what is around them is not
        assert max(read) <= dense.nbytes - 63 * 4
    read.clear()
    assert (lazy(tmp_path, catalog, "pread").lazy[3:5].numpy() == dense[3:5]).all()
    assert sum(read) == (2 * 64 * 4 if order is None else 63 * 64 * 4 + 8)


def test_a_pass_holds_the_files_open_that_it_reads(tmp_path):
    catalog = stored(tmp_path, np.arange(64, dtype=np.int32), [((0,), (64,))])
    names = [f"data{number}.bin" for number in range(64)]
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / "data.bin").read_bytes())
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("t", catalog.dtype_of(0), (64, 64))
    for number, name in enumerate(names):
        builder.chunk("t", (number, 0), (1, 64), name, 3, 259)
    side = payloads(tmp_path, builder.build())

    class Count(Remember):
        def fold(self, state, piece):
            state.order.append(len(os.listdir("/proc/self/fd")))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files are counted in /proc")
    before = len(os.listdir("/proc/self/fd"))
    counts = dict(scan(chunk_work(side), Count(), threads=1))[0].order
    assert len(counts) == 64 and max(counts) <= before + 2 and len(os.listdir("/proc/self/fd")) == before


def test_boxes_larger_than_a_task_are_cut_beside_those_whose_elements_share_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(work_module, "TASK", 64)
    (tmp_path / "f").write_bytes(bytes(200))
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("long", by_name("int16"), (5, 10))
    builder.chunk("long", (0, 0), (5, 10), "f", 0, 100)
    builder.tensor("packed", by_name("float4_e2m1fn"), (10, 20))
    builder.chunk("packed", (0, 0), (10, 20), "f", 100, 200)
    builder.file("f")
    found = work_module.cut(chunk_work(payloads(tmp_path, builder.build())))
    boxes = list(zip(found.group.tolist(), found.offsets.tolist(), found.sizes.tolist(), strict=True))
    assert boxes == [(0, [0, 0], [3, 10]), (0, [3, 0], [2, 10]), (1, [0, 0], [10, 20])]
