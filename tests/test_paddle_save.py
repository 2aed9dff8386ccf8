"""Paddle's pickles and its C++ layout, against the numpy arrays that went into them; and bad ones."""

from __future__ import annotations

import math
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import workbench as wb
from tests.paddle_files import TABLE, Dense, Pair, flat, numbers, same, save
from tests.reader_suite import check_catalog, check_objects
from workbench.core import codecs
from workbench.core.place import Place
from workbench.errors import (
    CorruptError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
    WorkbenchError,
)
from workbench.formats.paddle import names as paddle_names
from workbench.formats.paddle import pickle as paddle_pickle

# ---- pickles ---------------------------------------------------------------------------------------------------------

DTYPES = ("float32", "float64", "float16", "uint16", "int8", "uint8", "bool", "int64", "complex64", ">f4", ">i8")


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    array = np.frombuffer(data, np.uint8).copy() & 1 if dtype.kind == "b" else np.frombuffer(data, dtype).copy()
    array = array.astype(dtype).reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) else array


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["b", "<", "f4", "w", "latin1", "fc.weight", "ünïcode", "x" * 300]), arrays(), max_size=5
    ),
    st.sampled_from([2, 3, 4, 5]),
    st.booleans(),
)
def test_any_arrays_in_any_protocol_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, np.ndarray], protocol: int, pairs: bool
) -> None:
    tree = {"model": {k: Pair("p_" + k, v) for k, v in state.items()}} if pairs else flat(state)
    path = save(tmp_path_factory.mktemp("p") / "x.pdparams", tree, protocol)
    ckpt = wb.open(path, cache=False)
    ckpt.catalog.check()
    assert set(ckpt) == {f"model.{key}" if pairs else key for key in state}
    for key, want in state.items():
        tensor = ckpt[f"model.{key}" if pairs else key]
        if protocol == 2 and want.dtype.byteorder == ">" and want.size:
            with pytest.raises(UnsupportedFormatError):
                tensor.numpy()
            continue
        same(tensor, want)


def test_protocol_2_reads_every_byte_value_and_slices(tmp_path: Path) -> None:
    want = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 48)
    halves = numbers(33, 7, dtype="uint16")
    ckpt = wb.open(save(tmp_path / "x.pdparams", flat({"w": want, "h": halves, "one": want[:1, :1].copy()}), 2))
    same(ckpt["w"], want)
    same(ckpt["h"], halves)
    same(ckpt["one"], want[:1, :1])
    assert np.array_equal(ckpt["w"][3:9, ::-5].numpy(), want[3:9, ::-5])


def test_opening_reads_no_tensor_byte(tmp_path: Path) -> None:
    big = np.zeros(64 << 20, np.uint8)
    for protocol in (3, 4):
        path = save(tmp_path / f"{protocol}.pdparams", flat({"a": big, "b": big[: 32 << 20].copy()}), protocol)
        wb.open(path, cache=False)  # imports
        tracemalloc.start()
        ckpt = wb.open(path, cache=False)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert ckpt["a"].nbytes == 64 << 20
        data, spans = paddle_pickle.thin(memoryview(path.read_bytes()), "x")
        assert len(data) < 2000 and sum(s.stop - s.start for s in spans if not isinstance(s, str)) >= 96 << 20


def test_arrays_outside_and_inside_frames_and_shared_ones(tmp_path: Path) -> None:
    big, small = numbers(300, 300), numbers(4)
    state = {"a": big, "s": small, "tied": big, "list": [small, {"deep": big}]}
    ckpt = wb.open(save(tmp_path / "x.pdckpt", state))
    assert list(ckpt) == ["a", "s", "tied", "list.0", "list.1.deep"]
    for key in ("a", "tied", "list.1.deep"):
        same(ckpt[key], big)
    assert ckpt.catalog.meta["aliases"] == [["a", "tied", "list.1.deep"], ["s", "list.0"]]


def test_big_parameters_cut_into_slices_are_one_tensor(tmp_path: Path) -> None:
    want = numbers(7, 5, 3)
    parts = {f"w@@.{n}": want.reshape(-1)[n * 32 : (n + 1) * 32].copy() for n in range(4)}
    facts = {"w": {"OriginShape": want.shape, "slices": list(parts)}}
    for protocol in (2, 3):
        state = {"first": numbers(2), **parts, TABLE: {"w": "linear_0.w_0"}, "UnpackBigParamInfor@@": facts}
        ckpt = wb.open(save(tmp_path / f"{protocol}.pdparams", state, protocol))
        assert list(ckpt) == ["first", "w"] and ckpt["w"].fqn == "w"
        same(ckpt["w"], want)
        assert np.array_equal(ckpt["w"][1:6, 2, ::2].numpy(), want[1:6, 2, ::2])
        check_catalog(ckpt.catalog)
    del state["w@@.2"]
    with pytest.raises(CorruptError, match=r"'w' was split into 4 slices, but 'w@@.2' is missing"):
        wb.open(save(tmp_path / "lost.pdparams", state))
    state["w@@.2"] = numbers(31)
    with pytest.raises(CorruptError, match=r"4 slices of 'w' hold 104 elements; its shape \(7, 5, 3\) has 105"):
        wb.open(save(tmp_path / "short.pdparams", state))


def test_a_dense_tensor_is_recognised_and_eval_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = numbers(3, 4)
    path = save(tmp_path / "x.pdparams", {"fc_0.w_0": Dense("data", {"data": want}), "plain": numbers(2)})
    monkeypatch.setattr("builtins.eval", lambda *_: pytest.fail("eval was called"))
    ckpt = wb.open(path)
    same(ckpt["fc_0.w_0"], want)
    assert not ckpt.catalog.meta["foreign_globals"]


@pytest.mark.parametrize(
    "args",
    [
        ("__import__('os').system('touch {mark}')",),
        ("data", {"data": "no array"}),
        ("data", {"data": np.zeros(2), "more": 1}),
        ("open('{mark}', 'w')", {"data": np.zeros(2)}),
        ("data", {"data": np.zeros(2)}, {}),
    ],
)
def test_any_other_eval_is_an_inert_leaf_and_called_hostile(tmp_path: Path, args: tuple[Any, ...]) -> None:
    mark = tmp_path / "mark"
    args = tuple(arg.format(mark=mark) if isinstance(arg, str) else arg for arg in args)
    ckpt = wb.open(save(tmp_path / "x.pdparams", flat({"w": numbers(3), "evil": Dense(*args)})))
    same(ckpt["w"], numbers(3))
    assert "evil" not in ckpt and "builtins.eval" in ckpt.catalog.meta["foreign_globals"]
    assert any("hostile" in note and "builtins.eval" in note for note in ckpt.notes)
    assert ckpt.objects["evil"].name == "builtins.eval" and not mark.exists()
    check_objects(ckpt)


def test_uint16_is_bfloat16_and_int8_may_be_float8(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xBF80, 0x7FC1, 0x8000], np.uint16)
    ckpt = wb.open(save(tmp_path / "x.pdparams", flat({"w": bits, "q": np.arange(-4, 4, dtype=np.int8)})))
    assert ckpt["w"].dtype == torch.bfloat16
    assert ckpt["w"].torch().view(torch.uint16).tolist() == bits.tolist(), "bits are not touched, NaN payloads included"
    assert ckpt["q"].dtype == torch.int8
    notes = " ".join(ckpt.notes)
    assert "1 tensor is stored as uint16" in notes and "float8 as int8" in notes


def test_master_weights_and_moments_join_by_static_names(tmp_path: Path) -> None:
    table = {"fc.weight": "linear_0.w_0", "fc.bias": "linear_0.b_0"}
    save(tmp_path / "m.pdparams", flat({"fc.weight": numbers(3, 2, dtype="uint16"), "fc.bias": numbers(2)}, table))
    save(
        tmp_path / "m.pdopt",
        {
            "linear_0.w_0_fp32_master_0_moment1_0": Pair("linear_0.w_0_fp32_master_0_moment1_0", numbers(3, 2)),
            "linear_0.b_0_velocity_0": Pair("v", numbers(2)),
            "linear_9.w_0_moment2_0": Pair("x", numbers(5)),
            "master_weights": {"linear_0.w_0": Pair("linear_0.w_0_fp32_master_0", numbers(3, 2, seed=4))},
            "LR_Scheduler": {"last_epoch": 2},
        },
    )
    ckpt = wb.open(tmp_path)
    assert ckpt.param("fc.weight", role="exp_avg").key == "optimizer.linear_0.w_0_fp32_master_0_moment1_0"
    same(ckpt.param("fc.weight", role="master"), numbers(3, 2, seed=4))
    assert ckpt.param("fc.bias", role="momentum").key == "optimizer.linear_0.b_0_velocity_0"
    stranger = ckpt["optimizer.linear_9.w_0_moment2_0"]
    assert stranger.fqn is None and stranger.role == "exp_avg_sq"


def test_a_static_name_of_two_parameters_joins_nothing(tmp_path: Path) -> None:
    state = {
        "gen": {"fc.weight": Pair("linear_0.w_0", numbers(2))},
        "disc": {"out.weight": Pair("linear_0.w_0", numbers(2))},
        "opt": {"linear_0.w_0_moment1_0": Pair("m", numbers(2))},
    }
    ckpt = wb.open(save(tmp_path / "x.pdckpt", state))
    assert ckpt["opt.linear_0.w_0_moment1_0"].fqn is None and ckpt["opt.linear_0.w_0_moment1_0"].role == "exp_avg"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([0.999, 0.95, 0.98, 0.99]))
def test_powers_of_beta_tell_the_step_or_nothing(step: int, beta2: float) -> None:
    powers = {}
    for name, beta in (("beta1_pow", 0.9), ("beta2_pow", beta2)):
        value = np.float32(1)  # multiplied after each update, in float32
        value = np.multiply.reduce(np.full(step + 1, beta, np.float32), dtype=np.float32, initial=value)
        powers[name] = float(value)
    told = paddle_names._step(powers, 0.9, beta2)
    assert told in (step, None)
    assert told == step or step > 600, "float32 does not run out that early"


def test_powers_that_disagree_tell_no_step(tmp_path: Path) -> None:
    def opt(steps: list[int]) -> dict[str, Any]:
        return {
            f"linear_{n}.w_0_beta{b}_pow_acc_0": np.array([beta ** (t + 1)], np.float32)
            for n, t in enumerate(steps)
            for b, beta in ((1, 0.9), (2, 0.999))
        }

    agreed = wb.open(save(tmp_path / "a.pdopt", opt([7, 7])))
    assert agreed.step == 7 and agreed.objects["beta_pow"]["steps"] == {"7": 2}
    mixed = wb.open(save(tmp_path / "b.pdopt", opt([7, 9])))
    assert mixed.step is None and mixed.objects["beta_pow"]["steps"] == {"7": 1, "9": 1}
    reset = wb.open(save(tmp_path / "c.pdopt", {"x.w_0_beta1_pow_acc_0": np.zeros(1, np.float32)}))
    assert reset.step is None


# ---- paddle's C++ layout ---------------------------------------------------------------------------------------------


def binary(array: np.ndarray, code: int, lod: bytes = b"", packed: bool = False) -> bytes:
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    dims = b"".join(map(varint, array.shape))
    desc = b"\x08" + varint(code)
    desc += b"\x12" + varint(len(dims)) + dims if packed else b"".join(b"\x10" + varint(n) for n in array.shape)
    levels = struct.pack("<Q", 1) + struct.pack("<Q", len(lod)) + lod if lod else struct.pack("<Q", 0)
    return struct.pack("<I", 0) + levels + struct.pack("<Ii", 0, len(desc)) + desc + array.tobytes()


def test_the_binary_layout(tmp_path: Path) -> None:
    one = numbers(4, 600)
    (tmp_path / "w").write_bytes(binary(one, 5))
    single = wb.open(tmp_path / "w")
    assert single.format == "paddle_save" and list(single) == ["tensor"] and single.fqns == [None]
    same(single["tensor"], one)
    half, whole = numbers(3, dtype="uint16"), np.arange(6).reshape(2, 3)
    many = tmp_path / "x.pdiparams"
    many.write_bytes(binary(half, 22, packed=True) + binary(whole, 3, lod=b"12345678") + binary(np.float64(3), 6))
    several = wb.open(many)
    same(several["tensor.0"], half)
    same(several["tensor.1"], whole)
    assert several["tensor.2"].torch().item() == 3
    many.write_bytes(many.read_bytes()[:-3])
    with pytest.raises(TruncatedError, match=r"'x.pdiparams': the tensor of shape \(\) at byte .* the file at"):
        wb.open(many)
    (tmp_path / "odd").write_bytes(binary(one, 77))
    with pytest.raises(UnsupportedFormatError, match="element type 77"):
        wb.open(tmp_path / "odd")


# ---- bad pickles -----------------------------------------------------------------------------------------------------


def test_cut_files_say_where(tmp_path: Path) -> None:
    whole = pickle.dumps(flat({"w": numbers(200, 100)}), 4)
    for cut, words in (
        (len(whole) // 2, "inside 80,000 bytes from byte"),
        (len(whole) - 1, "without the end"),
        (0, "empty"),
    ):
        (tmp_path / "x.pdparams").write_bytes(whole[:cut])
        with pytest.raises(TruncatedError, match=words):
            wb.open(tmp_path / "x.pdparams")


def test_every_damage_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    path = tmp_path / "x.pdparams"
    for protocol in (2, 4):
        state = {
            **flat({"w": numbers(9, 3), "b": np.zeros(1, bool)}),
            "o": [1, ("a", {2}), OrderedDict(c=np.float32(2))],
        }
        good = pickle.dumps(state, protocol)
        for _ in range(400):
            bad = bytearray(good)
            for at in chance.integers(2, len(good), chance.integers(1, 4)):
                bad[at] = chance.integers(0, 256)
            path.write_bytes(bad[: chance.integers(len(bad) // 2, len(bad) + 1)])
            try:
                ckpt = wb.open(path, format="paddle_save", cache=False)
                for key in ckpt:
                    ckpt[key].numpy()
                dict(ckpt.objects)
            except WorkbenchError:
                pass


def test_foreign_globals_become_leaves(tmp_path: Path) -> None:
    evil = b"cos\nsystem\n(X\x04\0\0\0truetR"
    body = pickle.dumps(flat({"w": numbers(3)}), 2)[:-2]  # without SETITEMS, STOP
    (tmp_path / "x.pdparams").write_bytes(body + b"X\x04\0\0\0evil" + evil + b"u.")
    ckpt = wb.open(tmp_path / "x.pdparams")
    same(ckpt["w"], numbers(3))
    assert ckpt.objects["evil"].name == "os.system" and ckpt.catalog.meta["foreign_globals"] == ["os.system"]
    assert len(body) and set(ckpt) == {"w"}


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"\x80\x04K\x01Q.", CorruptError, "persistent id, which paddle does not write"),
        (b"\x80\x02Pabc\n.", CorruptError, "persistent id"),
        (b"\x80\x04\xff.", CorruptError, "byte 2: 0xff is not a pickle opcode"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", UnsafeError, "memo index"),
        (b"\x80\x04\x82\x01.", UnsafeError, "extension registry"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", TruncatedError, "it is truncated"),
    ],
)
def test_pickles_that_paddle_never_writes(tmp_path: Path, data: bytes, error: type[Exception], words: str) -> None:
    (tmp_path / "x.pdparams").write_bytes(data)
    with pytest.raises(error, match=words):
        wb.open(tmp_path / "x.pdparams")


def test_a_shape_that_its_bytes_do_not_fill(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.zeros(77, np.uint8)}, 4).replace(b"K\x01KM\x85", b"K\x01KN\x85")
    (tmp_path / "x.pdparams").write_bytes(data)
    with pytest.raises(CorruptError, match=r"shape \(78,\) and uint8 has 77 bytes, not 78"):
        wb.open(tmp_path / "x.pdparams")


def test_objects_arrays_and_records_are_left_out_with_a_note(tmp_path: Path) -> None:
    record = np.zeros(2, [("a", "i4"), ("b", "f8")])
    ckpt = wb.open(
        save(tmp_path / "x.pdparams", flat({"w": numbers(2), "o": np.array([None, {}], object), "r": record}))
    )
    assert list(ckpt) == ["w"] and sum("Python objects or records" in note for note in ckpt.notes) == 2


def test_strangers_are_not_taken_for_paddle(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    save(tmp_path / "c.pkl", {"a": 1})
    save_file({"w": torch.zeros(2)}, tmp_path / "d.pdparams")  # paddle.save(safetensors=True)
    for name, want in (("a.pt", "torch_save"), ("b.pt", "torch_save"), ("c.pkl", None), ("d.pdparams", "safetensors")):
        assert wb.formats.detect(Place(tmp_path / name)) == want
    assert wb.formats.detect(Place(save(tmp_path / "e.any", flat({"w": numbers(2)})))) == "paddle_save"


def test_the_text_codec_has_a_name_and_checks_its_bytes(tmp_path: Path) -> None:
    assert codecs.CODECS[codecs.LATIN1_TEXT] == "latin1_text"
    path = save(tmp_path / "x.pdparams", flat({"w": np.full(300, 200, np.uint8)}), 2)
    raw = path.read_bytes()
    at = raw.index(b"\xc3\x88" * 300)
    path.write_bytes(raw[:at] + b"\xc4" + raw[at + 1 :])  # a character beyond latin-1
    with pytest.raises(CorruptError, match=r"'w': item at byte .* is not text with one character per byte"):
        wb.open(path)["w"].numpy()
