"""What the unpickler promises for honest pickles. Truth is ``pickle.loads``, numpy and torch."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import gc
import io
import json
import math
import multiprocessing
import pathlib
import pickle
import sys
import threading
import types
import uuid
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.garbage import uncollected
from workbench.core.jsonable import jsonable
from workbench.core.pickles import guard as pickle_guard
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.guard import Ends, follow
from workbench.core.pickles.standins import DTypeRef, Opaque, Record, TensorRef, not_run
from workbench.core.pickles.unpickle import load_prefix, loads, loads_with_globals, nested
from workbench.errors import CorruptError, TruncatedError, UnsafeError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
plain = st.recursive(
    hashable | st.complex_numbers(allow_nan=False) | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.tuples(inner)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


class Colour(enum.Enum):
    RED = 1


class Config:
    def __init__(self) -> None:
        self.width = 3


class Bag(list):
    pass


@given(plain, st.sampled_from(PROTOCOLS))
@settings(max_examples=300, deadline=None)
def test_plain_data_comes_back_as_pickle_itself_reads_it(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    truth = pickle.loads(data)
    assert loads(data, what="x") == truth
    assert load_prefix(b"junk" + data + data, 4, what="x") == (truth, 4 + len(data))


@given(plain, st.sampled_from(PROTOCOLS))
@settings(max_examples=100, deadline=None)
def test_the_opcode_walk_ends_where_the_pickle_ends(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert pickle_guard.walk(memoryview(data + b"tail"), 0, "x").stop == len(data)


@given(plain)
@settings(max_examples=100, deadline=None)
def test_anything_decoded_becomes_json(value: object) -> None:
    json.dumps(jsonable(loads(pickle.dumps(value), what="x")), allow_nan=False).encode()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "dtype", ["i1", "<i4", ">i4", "u8", "f2", "f4", ">f8", "c16", "?", "S5", "U3", "M8[s]", "m8[3h]"]
)
def test_numpy_arrays_and_scalars_of_every_plain_kind(dtype: str, protocol: int) -> None:
    base = np.arange(12).astype("i8" if dtype[0] in "Mm" else dtype).astype(dtype)
    for array in (
        base,
        base.reshape(3, 4),
        np.asfortranarray(base.reshape(3, 4)),
        base[:0],
        base[0],
        base[::2],
    ):
        data = pickle.dumps(array, protocol)
        found = loads(data, what="x")
        truth = pickle.loads(data)
        assert found.dtype == truth.dtype and found.shape == truth.shape
        assert np.array_equal(found, truth)


def test_an_array_is_read_only_and_one_of_objects_or_records_is_not_built() -> None:
    with pytest.raises(ValueError, match="read-only"):
        loads(pickle.dumps(np.arange(3)), what="x").fill(1)
    for odd in (np.array([None, {}]), np.zeros(2, [("a", "i4"), ("b", "f4")])):
        found = loads(pickle.dumps(odd), what="x")
        assert found.size == 0 and isinstance(found.refused, Opaque)
        assert jsonable(found)["type"] == "numpy.ndarray, not decoded"


def test_the_rng_states_that_trainers_keep() -> None:
    state = np.random.RandomState(7).get_state()
    found = loads(pickle.dumps(state), what="x")
    assert found[0] == state[0] and np.array_equal(found[1], state[1]) and found[2:] == state[2:]
    found = loads_with_globals(pickle.dumps(np.random.default_rng(0)), what="x")
    assert isinstance(found.value, Opaque) and not found.globals


def test_python_2_strings_are_latin1() -> None:
    data = b"\x80\x02U\x03a\xe9b."  # SHORT_BINSTRING
    assert loads(data, what="x") == pickle.loads(data, encoding="latin1") == "a\xe9b"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_known_classes_become_readable_leaves_and_are_not_foreign(protocol: int) -> None:
    values = {
        "ns": argparse.Namespace(lr=0.1),
        "sn": types.SimpleNamespace(a=1),
        "path": pathlib.PurePosixPath("a/b"),
        "when": datetime.timedelta(days=3),
        "id": uuid.UUID(int=5),
        "dec": decimal.Decimal("1.5"),
        "dd": collections.defaultdict(list, {"a": [1]}),
        "count": collections.Counter("aab"),
    }
    found = loads_with_globals(pickle.dumps(values, protocol), what="x")
    value = found.value
    assert not found.globals
    assert isinstance(value["ns"], Record) and value["ns"].fields == {"lr": 0.1}
    assert value["sn"].fields == {"a": 1}
    assert value["path"] == "a/b"
    assert value["dd"] == {"a": [1]} and "list" in value["dd"].factory
    assert value["count"] == {"a": 2, "b": 1}
    assert value["dec"].args == ("1.5",) and "Decimal" in repr(value["dec"])
    assert value["when"].name == "datetime.timedelta" and value["id"].name == "uuid.UUID"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_foreign_classes_stay_closed_and_are_named(protocol: int) -> None:
    bag = Bag([1, 2])
    bag.label = "b"
    found = loads_with_globals(pickle.dumps([Colour.RED, Config(), bag, Config], protocol), what="x")
    colour, config, opened, class_ = found.value
    assert found.globals == {f"{__name__}.{name}" for name in ("Colour", "Config", "Bag")}
    assert colour.args == (1,) and colour.qualname == "Colour"
    assert config.state == {"width": 3} and config.module == __name__
    # protocols 0 and 1 hand the list over as an argument of copyreg._reconstructor, later ones append
    assert (opened.items or list(opened.args[0])) == [1, 2] and opened.state == {"label": "b"}
    assert type(config) is class_
    with pytest.raises(UnsafeError, match=r"foreign global .*Co"):
        loads(pickle.dumps([Colour.RED, Config()], protocol), what="'.metadata'", strict=True)


def test_opaque_classes_are_made_afresh_for_each_load() -> None:
    data = pickle.dumps(Config())
    first, second = loads(data, what="x"), loads(data, what="x")
    assert type(first) is not type(second) and first != second and len({first, second}) == 2


def test_the_callers_own_stand_in_is_handed_back_as_it_is() -> None:
    made = []
    states: list[object] = []

    class Collect:
        __slots__ = ()
        __setstate__ = states.append

        def __new__(cls) -> Collect:
            made.append(cls)
            return object.__new__(cls)

    key = (__name__, "Config")
    loads(pickle.dumps([Config(), Config()]), what="x", allow={key: Collect}, strict=True)
    assert made == [Collect, Collect] and states == [{"width": 3}, {"width": 3}]
    assert loads(pickle.dumps(Config), what="x", allow={key: Collect}) is Collect


def archive(value: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    with zipfile.ZipFile(io.BytesIO(buffer.getvalue())) as file:
        return file.read("archive/data.pkl")


def test_tensors_come_back_as_places_in_a_storage() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(base.t()[1:], requires_grad=False)
    parameter.partition_dim = 1
    values = {
        "view": base[1:, 2:],
        "par": parameter,
        "fp8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "size": base.shape,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "conj": torch.zeros(2, dtype=torch.cfloat).conj(),
    }
    found = loads_with_globals(archive(values), what="x", persistent_load=torch_storage)
    assert not found.globals
    value = found.value
    view = value["view"]
    assert (view.dtype, view.shape, view.stride, view.storage_offset) == ("float32", (3, 4), (6, 1), 8)
    assert (view.storage.key, view.storage.numel, view.storage.dtype) == ("0", 24, "float32")
    assert value["par"].storage.key == "0" and value["par"].stride == (1, 6) and value["par"].requires_grad is False
    assert value["par"].attrs == {"partition_dim": 1} and value["par"].kind.endswith("Parameter")
    assert (
        value["fp8"].dtype == "float8_e4m3fn" and value["fp8"].storage.dtype is None and value["fp8"].storage.numel == 3
    )
    assert value["size"] == (4, 6) and value["dtype"] == DTypeRef("bfloat16") and value["device"].args == ("cpu",)
    assert value["conj"].attrs == {"metadata": {"conj": True}}
    json.dumps(jsonable(value))


def test_a_state_dict_keeps_its_metadata_attribute() -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    found = loads(archive(state), what="x", persistent_load=torch_storage)
    assert list(found) == list(state) and found.attrs["_metadata"] == state._metadata


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")  # torch's own plans
def test_sparse_quantised_and_meta_tensors_are_leaves_by_name() -> None:
    values = [
        torch.eye(3).to_sparse(),
        torch.empty(2, 3, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    ]
    found = loads_with_globals(archive(values), what="x", persistent_load=torch_storage)
    assert [leaf.qualname for leaf in found.value] == [
        "_rebuild_sparse_tensor",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_qtensor",
    ]
    assert isinstance(found.value[0].args[1][0], TensorRef) and not found.globals


def test_the_pickles_of_a_legacy_file_in_a_row() -> None:
    buffer = io.BytesIO()
    value = {"w": torch.arange(6, dtype=torch.bfloat16), "v": torch.arange(3)}
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    data, at, parts = buffer.getvalue(), 0, []
    for _ in range(5):
        part, at = load_prefix(data, at, what="x", persistent_load=torch_storage)
        parts.append(part)
    assert parts[0] == 0x1950A86A20F9469CFC6C and parts[1] == 1001 and parts[2]["little_endian"] is True
    assert parts[3]["w"].shape == (6,) and parts[3]["v"].dtype == "int64"
    assert sorted(parts[4]) == sorted(ref.storage.key for ref in parts[3].values())
    first = {ref.storage.key: name for name, ref in parts[3].items()}[parts[4][0]]
    assert int.from_bytes(data[at : at + 8], "little") == value[first].numel()  # the data begin right there


def test_frames_do_not_blur_where_a_pickle_ends() -> None:
    big = [f"name {i}" for i in range(40_000)]  # several frames
    data = pickle.dumps(big, 4)
    assert data.count(b"\x95") > 2
    stream = data + pickle.dumps("second", 4) + pickle.dumps("third", 2)
    first, at = load_prefix(stream, 0, what="x")
    second, at = load_prefix(stream, at, what="x")
    third, at = load_prefix(stream, at, what="x")
    assert (first, second, third, at) == (big, "second", "third", len(stream))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_longer_than_the_first_window_ends_exactly_too(protocol: int) -> None:
    value = [{"name": f"layers.{i}", "at": (i, 1.5), "b": b"x" * 300} for i in range(500)]
    data = pickle.dumps(value, protocol)
    for kind in (bytes, memoryview):
        assert load_prefix(kind(b"ab" + data + b"tail"), 2, what="x") == (value, 2 + len(data))
    for cut in (len(data) - 1, len(data) - 9, 5000, 5001, 5002):
        with pytest.raises(TruncatedError):
            loads(data[:cut], what="x")


@given(plain, st.sampled_from(PROTOCOLS))
@settings(max_examples=200, deadline=None)
def test_the_walk_of_long_arguments_ends_where_the_pickle_ends(value: object, protocol: int) -> None:
    data = pickle.dumps([value, "long" * 100, 1 << 3000, b"b" * 300], protocol)
    assert follow(data + b"tail")[0] == len(data)
    with pytest.raises(Ends):
        follow(data[:-1])


def test_nested_pickles_are_decoded_on_request_only() -> None:
    inner = pickle.dumps({"a": Config()})
    found = loads_with_globals(pickle.dumps({"blob": inner}), what="x")
    assert found.value == {"blob": inner} and not found.globals
    assert nested(found.value["blob"], "'blob'")["a"].state == {"width": 3}
    with pytest.raises(CorruptError, match="not the bytes of a pickle"):
        nested("text", "'blob'")


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    loads(pickle.dumps(1), what="x")
    assert gc.isenabled()
    with pytest.raises(CorruptError):
        loads(b"}}b.", what="x")  # BUILD on a dict: the C unpickler itself fails
    assert gc.isenabled()
    gc.disable()
    try:
        loads(pickle.dumps(1), what="x")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_messages_say_which_file_which_byte_and_stay_on_one_line() -> None:
    with pytest.raises(TruncatedError, match=r"'a.pt' \(data.pkl\) ends at byte 9, within the opcode at byte 2 "):
        loads(pickle.dumps([1, "long text"])[:9], what="'a.pt' (data.pkl)")
    with pytest.raises(CorruptError, match="byte 2: not a pickle opcode: 0xff") as caught:
        loads(b"\x80\x04\xff", what="'a'")
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsafeError) as caught:
        loads(b"cos\x1b[31m\nsys\rtem\n.", what="'a'", strict=True)
    assert str(caught.value).isprintable()


def test_jsonable_bounds_cycles_depth_nodes_and_odd_values() -> None:
    cycle: list[object] = [1]
    cycle.append(cycle)
    assert jsonable(cycle) == [1, "… the object that contains this one"]
    shared = [1]
    assert jsonable([shared, shared]) == [[1], [1]]
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    assert "nested deeper than 64" in json.dumps(jsonable(deep), ensure_ascii=False)
    laughs: list[object] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    assert len(json.dumps(jsonable(laughs, max_nodes=1000))) < 50_000
    assert jsonable(list(range(2000)), max_nodes=100)[-1] == "… 1,901 more"
    assert jsonable([math.nan, math.inf, -math.inf]) == ["nan", "inf", "-inf"]
    assert jsonable({1: "a", "1": "b"}) == {"1": "a", "1 (key 2)": "b"}
    assert jsonable({(1, 2): {3}}) == {"(1, 2)": [3]}
    assert jsonable(np.float32(1.5)) == 1.5 and jsonable(np.int64(3)) == 3 and jsonable(np.bool_(True)) is True
    assert jsonable(np.arange(3))["values"] == [0, 1, 2]
    assert jsonable("\ud800") == "\\ud800"
    assert len(jsonable("x" * 1_000_000)) < 11_000
    assert isinstance(jsonable(1 << 5000), str)


def test_what_is_torchs_own_is_not_called_foreign() -> None:
    assert not_run({"torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"}) == not_run(()) == ""
    assert not_run({"torch.Size", "os.system"}) == "; it names the foreign globals ['os.system'], which were not run"


def test_no_collection_happens_in_one_thread_because_another_has_finished() -> None:
    """The time of a collection, seconds in a large process, would count against the limit of a small pickle."""
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with uncollected():
            entered.set()
            left.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(20)
    with uncollected():
        left.set()
        thread.join(20)
        assert not thread.is_alive() and not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where threads run
def test_a_forked_process_collects_though_a_thread_of_its_parent_does_not() -> None:
    context = multiprocessing.get_context("fork")
    with uncollected():
        child = context.Process(target=lambda: sys.exit(not gc.isenabled()))
        child.start()
        child.join(20)
    assert child.exitcode == 0
