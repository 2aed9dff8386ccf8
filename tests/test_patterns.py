"""The recogniser: what is planted is named with its numbers and proved bit for bit; what is random has no name.

Truth is numpy's and torch's: changes are planted with their functions, and ``apply`` must give every bit back.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import workbench as wb
from tests.properties import examples
from tests.test_reading import lazy, stored
from workbench.analysis.patterns import Sibling, recognise
from workbench.analysis.patterns import read as patterns_read
from workbench.analysis.patterns.found import NAMES
from workbench.analysis.patterns.local import SMALL, Difference

FLOATS = ["bfloat16", "float16", "float32", "float8_e4m3fn"]
ALL = [*FLOATS, "float8_e5m2", "float64", "int8", "int32"]
SLOW = os.environ.get("WORKBENCH_SLOW") == "1"


def raw(tensor: torch.Tensor) -> np.ndarray:
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(carrier).numpy().view(f"<u{tensor.element_size()}")


def random(shape, dtype, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        info = torch.iinfo(kind)
        return torch.randint(max(info.min, -(10**6)), min(info.max, 10**6) + 1, shape, generator=generator, dtype=kind)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)


@pytest.fixture
def tensor(tmp_path_factory):
    """Stores a dense array (of torch's, or raw bits with their type) and gives it back as a lazy tensor."""

    def make(dense, dtype=None, chunks=None):
        if isinstance(dense, torch.Tensor):
            dense, dtype = raw(dense), str(dense.dtype).removeprefix("torch.")
        chunks = chunks or [((0,) * dense.ndim, dense.shape)]
        folder = tmp_path_factory.mktemp("stored")
        return lazy(folder, stored(folder, dense, chunks, dtype=dtype))

    return make


def proved(found, a, b) -> None:
    """The name's function gives every bit of ``b``, and the rest is plain JSON."""
    made, wanted = found.apply(a.numpy(), b.numpy()), b.numpy()
    assert made.shape == wanted.shape and made.dtype == wanted.dtype
    assert (made.view(b.element.raw) == wanted.view(b.element.raw)).all()
    assert found.name in NAMES
    assert json.loads(json.dumps(found.to_dict()))["name"] == found.name
    assert found.sentence and "\n" not in found.sentence


# ---- planted: orders -------------------------------------------------------------------------------------------------


def halves(x):
    return np.roll(x, len(x) // 2, 0)


def qkv(x, p=3, r=8):
    return x.reshape(-1, p, r, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def rope(x, hd=16):
    return x.reshape(-1, 2, hd // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def unrope(x, hd=16):
    return x.reshape(-1, hd // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def ranks(x, order=(2, 0, 5, 1, 3, 4)):
    return x.reshape(len(order), -1, *x.shape[1:])[list(order)].reshape(x.shape)


def gqa(x, groups=4, parts=(4, 1, 1), unit=4):
    grouped = x.reshape(groups, sum(parts), unit, *x.shape[1:])
    return np.concatenate([part.reshape(-1, *x.shape[1:]) for part in np.split(grouped, np.cumsum(parts)[:-1], 1)])


def ungqa(x, groups=4, parts=(4, 1, 1), unit=4):
    sizes = np.cumsum([groups * n * unit for n in parts])[:-1]
    made = [p.reshape(groups, n * unit, *x.shape[1:]) for p, n in zip(np.split(x, sizes), parts, strict=True)]
    return np.concatenate(made, 1).reshape(x.shape)


def swapped(x, one=slice(30, 40), two=slice(50, 60)):
    y = x.copy()
    y[one], y[two] = x[two], x[one]
    return y


def some_rope(x):
    return np.concatenate([rope(x[:48]), x[48:]])


def each_halves(x):
    return x.reshape(8, 2, 6, *x.shape[1:])[:, ::-1].reshape(x.shape)


ORDERS = {
    "halves": (halves, "halves", {"size": 48, "order": [1, 0]}),
    "rolled": (lambda x: np.roll(x, 5, 0), "rolled", {"by": 5}),
    "rolled back": (lambda x: np.roll(x, -7, 0), "rolled", {"by": -7}),
    "reversed": (lambda x: x[::-1].copy(), "reversed", {"n": 96}),
    "qkv grouped to contiguous": (qkv, "interleave", {"outer": 1, "groups": 4, "each": 3, "unit": 8}),
    "half-split to interleaved": (rope, "interleave", {"outer": 6, "groups": 2, "each": 8, "unit": 1}),
    "interleaved to half-split": (unrope, "interleave", {"outer": 6, "groups": 8, "each": 2, "unit": 1}),
    "half-split of some": (some_rope, "interleave", {"within": [0, 48], "groups": 2, "each": 8}),
    "rank order": (ranks, "blocks", {"n": 6, "size": 16, "order": [2, 0, 5, 1, 3, 4]}),
    "rank order of 4": (lambda x: ranks(x, (1, 3, 0, 2)), "blocks", {"n": 4, "order": [1, 3, 0, 2]}),
    "grouped queries": (gqa, "regroup", {"groups": 4, "parts": [4, 1, 1], "unit": 4, "to": "contiguous"}),
    "queries to groups": (ungqa, "regroup", {"groups": 4, "parts": [4, 1, 1], "unit": 4, "to": "grouped"}),
    "two rows": (lambda x: swapped(x, [3], [17]), "swap", {"first": 3, "second": 17, "size": 1}),
    "two ranges": (swapped, "swap", {"first": 30, "second": 50, "size": 10}),
    "halves of each": (each_halves, "halves", {"times": 8, "size": 6}),
    "any": (lambda x: x[np.random.default_rng(3).permutation(96)], "order", {"n": 96}),
}


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("case", ORDERS)
def test_orders_of_rows_are_named_with_their_numbers(tensor, case, dtype):
    change, name, detail = ORDERS[case]
    x = random((96, 24), dtype)
    a, b = tensor(x), tensor(change(raw(x)), dtype)
    found = recognise(a, b)
    assert found is not None and found.name == name, found
    assert found.detail["axis"] == 0 and detail.items() <= found.detail.items(), found.detail
    proved(found, a, b)


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((24, 96), 1), ((96,), 0), ((96, 3, 5), 0), ((3, 96, 5), 1), ((2, 7, 96), 2)]
)
def test_orders_are_found_along_any_axis(tensor, case, shape, axis):
    change, name, detail = ORDERS[case]
    x = random(shape, "float32")
    y = np.ascontiguousarray(np.moveaxis(change(np.ascontiguousarray(np.moveaxis(raw(x), axis, 0))), 0, axis))
    a, b = tensor(x), tensor(y, "float32")
    found = recognise(a, b)
    if len(shape) == 1 and name == "swap" and detail["size"] == 1:
        assert found is None  # two numbers are too little evidence
        return
    assert found is not None and (found.name, found.detail["axis"]) == (name, axis), found
    assert detail.items() <= found.detail.items()
    proved(found, a, b)


@pytest.mark.parametrize("shape", [(2048, 2048), (1 << 19, 8), (16, 512, 512)])
def test_large_tensors(tensor, shape):
    x = random(shape, "bfloat16")
    bits = raw(x)
    a = tensor(x)
    for axis, n in enumerate(shape):
        if n < 64:
            continue
        y = bits.reshape(*shape[:axis], -1, 2, 16, *shape[axis + 1 :]).swapaxes(axis + 1, axis + 2).reshape(shape)
        b = tensor(y, "bfloat16")
        found = recognise(a, b)
        assert found is not None and found.name == "interleave", found
        assert (found.detail["axis"], found.detail["outer"], found.detail["each"]) == (axis, n // 32, 16)
        proved(found, a, b)


def test_long_flat_tensors_are_looked_at_in_units(tensor):
    x = raw(random((1 << 22,), "bfloat16"))
    a = tensor(x, "bfloat16")
    for y, name, detail in (
        (ranks(x, (2, 0, 3, 1)), "blocks", {"n": 4, "order": [2, 0, 3, 1]}),
        (np.roll(x, 1 << 21), "halves", {}),
        (np.roll(x, 4096), "rolled", {"by": 4096 // 8}),
        (np.roll(x, 4096) ^ np.uint16(1), None, {}),
    ):
        b = tensor(y, "bfloat16")
        found = recognise(a, b)
        assert (found and found.name) == name, found
        if found:
            assert found.detail["unit_of"] == 8 and detail.items() <= found.detail.items()
            proved(found, a, b)


@examples(60, 1000)
@given(st.data())
def test_any_interleave_and_any_order_of_blocks_is_proved(tensor, data):
    x, p, q, r = (data.draw(st.integers(low, 6)) for low in (1, 2, 2, 1))
    dense = raw(random((x * p * q * r, 5), data.draw(st.sampled_from(ALL)), data.draw(st.integers(0, 99))))
    dense[data.draw(st.lists(st.integers(0, len(dense) - 1), max_size=4))] = 0  # some equal rows
    dtype = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64"}[dense.itemsize]
    y = dense.reshape(x, p, q, r, 5).swapaxes(1, 2).reshape(dense.shape)
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(range(p)))
        y = dense.reshape(p, -1, 5)[list(order)].reshape(dense.shape)
    a, b = tensor(dense, dtype), tensor(y, dtype)
    found = recognise(a, b)
    if (dense == y).all():
        assert found is None
        return
    if found is None or found.name not in NAMES[:8]:  # too little evidence, or equal rows tell another story
        assert dense.size < 100 or (dense != y).sum() < 60, found
    if found is not None:
        proved(found, a, b)


def test_an_order_that_holds_in_a_band_of_the_other_axis_only(tensor):
    x = random((32, 40), "float32")
    y = raw(x).copy()
    y[:, 8:16] = np.roll(y[:, 8:16], 3, 0)
    a, b = tensor(x), tensor(y, "float32")
    found = recognise(a, b)
    assert found.name == "rolled" and found.detail["by"] == 3
    assert (found.detail["offsets"], found.detail["sizes"]) == ([0, 8], [32, 8])
    proved(found, a, b)


def test_equal_rows_may_stand_for_each_other(tensor):
    x = raw(random((64, 16), "bfloat16"))
    x[[3, 9, 30, 31, 40, 63]] = 0  # padding rows
    x[7] = x[50]
    a = tensor(x, "bfloat16")
    for y, name in ((np.roll(x, 32, 0), "halves"), (rope(x), "interleave"), (np.roll(x, 11, 0), "rolled")):
        b = tensor(y, "bfloat16")
        found = recognise(a, b)
        assert found.name == name
        proved(found, a, b)


def test_rows_that_only_look_alike_at_first_are_told_apart(tensor):
    x = raw(random((32, 2000), "float32"))
    x[:, :1500] = x[0, :1500]  # the first columns are the same everywhere
    a = tensor(x, "float32")
    b = tensor(ranks(x, (3, 1, 0, 2)), "float32")
    found = recognise(a, b)
    assert found.name == "blocks" and found.detail["order"] == [3, 1, 0, 2]
    proved(found, a, b)


def test_orders_that_fail_on_one_element_are_not_named(tensor):
    x = raw(random((96, 600), "float32"))
    for change in (halves, qkv, gqa):
        y = change(x)
        y[95, 599] ^= 1
        assert recognise(tensor(x, "float32"), tensor(y, "float32")) is None


# ---- planted: moves, shapes, other tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("axis", [0, 1])
def test_shifts_and_other_lengths(tensor, dtype, axis):
    x = np.moveaxis(raw(random((50, 30), dtype)), 0, axis)
    new = np.moveaxis(raw(random((3, 30), dtype, seed=1)), 0, axis)
    cut = np.ascontiguousarray
    rest = np.take(x, range(3, 50), axis)
    head = np.take(x, range(47), axis)
    cases = [
        (np.concatenate([rest, new], axis), "shift", {"by": -3, "kept": [0, 47], "new": [[47, 50, "new"]]}),
        (np.concatenate([new, head], axis), "shift", {"by": 3, "kept": [3, 50], "new": [[0, 3, "new"]]}),
        (np.concatenate([x, 0 * new], axis), "resized", {"before": 50, "after": 53, "new": [[50, 53, "zero"]]}),
        (np.concatenate([new, x], axis), "resized", {"by": 3, "after": 53, "new": [[0, 3, "new"]]}),
        (rest, "resized", {"by": -3, "after": 47, "new": []}),
    ]
    a = tensor(cut(x), dtype)
    for y, name, detail in cases:
        b = tensor(cut(y), dtype)
        found = recognise(a, b)
        assert found is not None and found.name == name, (found, name)
        assert found.detail["axis"] == axis and detail.items() <= found.detail.items(), found.detail
        proved(found, a, b)


@pytest.mark.parametrize("dtype", ALL)
def test_transposed_and_reshaped(tensor, dtype):
    x = raw(random((48, 48), dtype))
    flat = raw(random((30, 44), dtype))
    deep = raw(random((6, 10, 4), dtype))
    cases = [
        (x, x.T, "transposed", {"axes": [1, 0]}),
        (flat, flat.T, "transposed", {"axes": [1, 0]}),
        (deep, deep.transpose(2, 0, 1), "transposed", {"axes": [2, 0, 1]}),
        (flat, flat.reshape(60, 22), "reshaped", {"after": [60, 22]}),
        (deep, deep.reshape(60, 4), "reshaped", {"after": [60, 4]}),
    ]
    for before, after, name, detail in cases:
        a, b = tensor(before, dtype), tensor(np.ascontiguousarray(after), dtype)
        found = recognise(a, b)
        assert found is not None and found.name == name and detail.items() <= found.detail.items(), found
        proved(found, a, b)


def test_a_sibling_is_named_by_its_key(tmp_path):
    tensors = {f"layers.{k}.w": random((20, 30), "bfloat16", seed=k) for k in range(5)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"layers.1.w": tensors["layers.3.w"]}, tmp_path / "b.safetensors")
    before, after = wb.open(tmp_path / "a.safetensors"), wb.open(tmp_path / "b.safetensors")
    siblings = [Sibling(before[key]) for key in before if key != "layers.1.w"]
    found = recognise(before["layers.1.w"], after["layers.1.w"], siblings=siblings)
    assert found.name == "sibling" and found.detail["keys"] == ["layers.3.w"] and "'layers.3.w'" in found.sentence
    proved(found, before["layers.1.w"], after["layers.1.w"])
    assert recognise(before["layers.1.w"], after["layers.1.w"], siblings=siblings[:2]) is None


# ---- large tensors: a few boxes come first ---------------------------------------------------------------------------


def some(n, share, seed=5):
    return np.random.default_rng(seed).permutation(n)[: int(n * share)]


def other(x, key, seed=9):
    """``x`` with other random elements at one place, as bits of the same numbers in another order."""
    y = x.copy()
    y[key] = np.random.default_rng(seed).permuted(y[key], axis=-1)
    return y


LARGE = {
    "a few flips": (lambda x: np.where(np.arange(x.size).reshape(x.shape) == x.size // 3, x ^ 64, x), "bit_flip"),
    "half of the rows": (lambda x: other(x, some(len(x), 0.5)), "replaced"),
    "every other row": (lambda x: other(x, slice(1, None, 2)), "replaced"),
    "the upper half": (lambda x: other(x, slice(0, len(x) // 2)), "replaced"),
    "the middle": (lambda x: other(x, slice(len(x) // 4, 3 * len(x) // 4)), "replaced"),
    "columns": (lambda x: np.moveaxis(other(np.moveaxis(x, -1, 0), some(x.shape[-1], 0.4)), 0, -1), "replaced"),
    "all zero": (lambda x: np.zeros_like(x), "zero_run"),
    "a constant": (lambda x: np.full_like(x, 0x3F80), "fill"),
    "the last quarter zero": (lambda x: np.concatenate([x[: len(x) * 3 // 4], 0 * x[len(x) * 3 // 4 :]]), "zero_run"),
    "signs": (lambda x: x ^ np.uint16(0x8000), "ratio"),
    "bytes": (lambda x: x.byteswap(), "byteswap"),
    "halved": (lambda x: raw(torch.from_numpy(x.view("<i2")).view(torch.bfloat16) / 2), "ratio"),
    "rows in another order": (lambda x: x[np.random.default_rng(3).permutation(len(x))], "order"),
    "rows moved": (lambda x: np.concatenate([x[len(x) // 8 :], other(x, slice(None))[: len(x) // 8]]), "shift"),
    "columns rolled": (lambda x: np.roll(x, 3, -1), "rolled"),
    "noise": (lambda x: x + np.random.default_rng(1).integers(1, 9, x.shape).astype("<u2"), None),
    "sparse noise": (lambda x: x + (np.random.default_rng(1).random(x.shape) < 0.05).astype("<u2"), None),
}


@pytest.mark.parametrize("shape", [(512, 300), (16, 48, 130), (300, 640), (2, 3, 4, 70, 60)], ids=str)
@pytest.mark.parametrize("case", LARGE)
def test_a_change_of_a_large_tensor_is_found_although_a_few_boxes_come_first(tensor, case, shape):
    change, name = LARGE[case]
    dense = raw(random(shape, "bfloat16", seed=2))
    if shape[0] < 16 and case in ("half of the rows", "rows moved", "rows in another order"):
        dense = dense.reshape(-1, shape[-1])  # two "rows" have no order worth a name
    a, b = tensor(dense, "bfloat16"), tensor(np.ascontiguousarray(change(dense)), "bfloat16")
    assert a.numel() >= SMALL
    found = recognise(a, b)
    assert (found and found.name) == name, found
    if found is not None:
        proved(found, a, b)


def test_noise_is_refuted_by_a_few_boxes(tensor, monkeypatch):
    dense = raw(random((4096, 512), "bfloat16"))
    a, b = tensor(dense, "bfloat16"), tensor(LARGE["noise"][0](dense), "bfloat16")
    monkeypatch.setattr(Difference, "run", lambda *_: pytest.fail("the whole tensor was compared"))
    assert recognise(a, b) is None


# ---- planted: element by element -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0, 0.25, 3.0, 1 / 3, 0.1, -1.5, 0.9, 2**0.5, 1 / 128, 0.7071])
def test_ratios(tensor, dtype, factor):
    x = random((40, 50), dtype)
    a, b = tensor(x), tensor(x * factor)
    found = recognise(a, b)
    assert found is not None and found.name == "ratio", found
    assert found.detail["ratio"] == pytest.approx(factor, rel=1e-3 if dtype != "float64" else 1e-9)
    if factor in (0.5, 2.0, -1.0, 0.25, 3.0, 1 / 128, -1.5):
        assert found.detail["ratio"] == factor
    proved(found, a, b)


def test_a_division_by_ranks_is_a_ratio_too(tensor):
    for n in (3, 5, 6, 7, 48):
        for dtype in ("bfloat16", "float32"):
            x = random((64, 64), dtype)
            found = recognise(tensor(x), tensor(x / n))
            assert found is not None and found.name == "ratio", found
            assert found.detail["ratio"] == pytest.approx(1 / n, rel=1e-7)
            proved(found, tensor(x), tensor(x / n))


@pytest.mark.parametrize("through", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_round_trips(tensor, through):
    for dtype in ("float32", "float64", "float16"):
        if through == dtype:
            continue
        x = random((40, 50), dtype)
        a, b = tensor(x), tensor(x.to(getattr(torch, through)).to(x.dtype))
        found = recognise(a, b)
        assert found is not None and (found.name, found.detail["through"]) == ("rounded", through), found
        proved(found, a, b)


def test_truncation_and_saturation_are_told_apart_from_rounding(tensor):
    x = random((40, 50), "float32")
    b = tensor(raw(x) & 0xFFFF0000, "float32")
    found = recognise(tensor(x), b)
    assert (found.name, found.detail["rounding"]) == ("rounded", "truncated")
    proved(found, tensor(x), b)
    x *= 300
    b = tensor(x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    found = recognise(tensor(x), b)
    assert (found.detail["through"], found.detail["rounding"]) == ("float8_e4m3fn", "saturating")
    proved(found, tensor(x), b)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("to", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_the_same_numbers_in_another_type(tensor, dtype, to):
    if dtype == to:
        return
    x = random((30, 40), dtype)
    b = tensor(x.to(getattr(torch, to)))
    found = recognise(tensor(x), b)
    assert found is not None and (found.name, found.detail["to"]) == ("cast", to), found
    exact = (x.to(getattr(torch, to)).double() == x.double()).sum().item()
    assert found.detail["changed"] == x.numel() - exact
    proved(found, tensor(x), b)
    other = random((30, 40), dtype, seed=1)
    assert recognise(tensor(other), b) is None


def test_integers_in_another_type(tensor):
    x = torch.arange(1000).reshape(10, 100) % 120
    for to in (torch.int32, torch.int8, torch.float32, torch.bfloat16):
        found = recognise(tensor(x), tensor(x.to(to)))
        assert found.name == "cast" and found.detail["changed"] == 0
        proved(found, tensor(x), tensor(x.to(to)))
    assert recognise(tensor(x * 3), tensor((x * 3).to(torch.int8))) is None  # wrapped around


def test_reversed_bytes(tensor):
    x = raw(random((30, 40), "float32"))
    a, b = tensor(x, "float32"), tensor(x.byteswap(), "float32")
    found = recognise(a, b)
    assert found.name == "byteswap"
    proved(found, a, b)


# ---- planted: places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_every_bit_of_an_element_is_named_when_it_flips(tensor, dtype):
    x = raw(random((20, 30), dtype))
    a = tensor(x, dtype)
    width = x.itemsize * 8
    mantissa = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52, "float8_e4m3fn": 3, "float8_e5m2": 2}
    for bit in range(width):
        y = x.copy()
        y[7, 11] ^= x.dtype.type(1 << bit)
        b = tensor(y, dtype)
        found = recognise(a, b)
        (flip,) = found.detail["flips"]
        assert (found.name, flip["index"], flip["bit"]) == ("bit_flip", [7, 11], bit)
        if dtype in mantissa:
            kind = "sign" if bit == width - 1 else "mantissa" if bit < mantissa[dtype] else "exponent"
            assert flip["kind"] == kind
        assert int(flip["bits"][0], 16) == int(x[7, 11]) and int(flip["bits"][1], 16) == int(y[7, 11])
        proved(found, a, b)


def test_a_few_flips_are_listed_and_nine_are_not(tensor):
    x = raw(random((40, 50), "float32"))
    rng = np.random.default_rng(5)
    for count in range(2, 10):
        y = x.copy()
        for at in rng.choice(2000, count, replace=False):
            y.reshape(-1)[at] ^= np.uint32(1 << int(rng.integers(32)))
        found = recognise(tensor(x, "float32"), tensor(y, "float32"))
        if count == 9:
            assert found is None
            continue
        assert found.name == "bit_flips" and len(found.detail["flips"]) == count
        proved(found, tensor(x, "float32"), tensor(y, "float32"))


def test_a_counter_that_counts_is_no_flipped_bit(tensor):
    for shape in ((), (1,), (8,)):
        x = torch.full(shape, 4, dtype=torch.int64)
        assert recognise(tensor(x), tensor(x + 1)) is None


@pytest.mark.parametrize("dtype", ALL)
def test_runs_that_became_one_value(tensor, dtype):
    x = raw(random((40, 50), dtype))
    x[x == 0] = 1
    one = raw(torch.ones(1).to(getattr(torch, dtype)))[0]
    for value, name in ((0, "zero_run"), (one, "fill")):
        for start, length in ((333, 777), (0, 512), (1500, 500), (0, 2000)):
            y = x.copy()
            y.reshape(-1)[start : start + length] = value
            at, stop = start, start + length
            while at and y.reshape(-1)[at - 1] == value:
                at -= 1
            while stop < 2000 and y.reshape(-1)[stop] == value:
                stop += 1
            a, b = tensor(x, dtype), tensor(y, dtype)
            found = recognise(a, b)
            assert found is not None and found.name == name, found
            assert (found.detail["start"], found.detail["length"]) == (at, stop - at)
            proved(found, a, b)


def test_blocks_and_rows_that_were_filled_or_replaced(tensor):
    x = raw(random((40, 50), "bfloat16"))
    other = raw(random((40, 50), "bfloat16", seed=1))
    y = x.copy()
    y[10:20, 5:30] = 0x7FC0
    found = recognise(tensor(x, "bfloat16"), tensor(y, "bfloat16"))
    assert (found.name, found.detail["offsets"], found.detail["sizes"]) == ("fill", [10, 5], [10, 25])
    assert "nan" in found.sentence
    proved(found, tensor(x, "bfloat16"), tensor(y, "bfloat16"))
    for key, detail in (
        ((slice(10, 20), slice(5, 30)), {"offsets": [10, 5], "sizes": [10, 25]}),
        ((slice(3, 5),), {"offsets": [3, 0], "sizes": [2, 50]}),
        ((slice(None), slice(7, 8)), {"offsets": [0, 7], "sizes": [40, 1]}),
        (([1, 5, 33],), {"axis": 0, "indices": [1, 5, 33]}),
    ):
        y = x.copy()
        y[key] = np.where(other[key] == x[key], other[key] ^ 1, other[key])
        found = recognise(tensor(x, "bfloat16"), tensor(y, "bfloat16"))
        assert found is not None and found.name == "replaced" and detail.items() <= found.detail.items(), found
        proved(found, tensor(x, "bfloat16"), tensor(y, "bfloat16"))


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["safetensors", "torch_save", "dcp"])
def saved(request, tmp_path_factory):
    def make(tensors: dict[str, torch.Tensor]):
        folder = tmp_path_factory.mktemp(request.param)
        if request.param == "safetensors":
            save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        elif request.param == "torch_save":
            torch.save(tensors, folder / "model.pt")
            folder = folder / "model.pt"
        else:
            import torch.distributed.checkpoint as dcp

            dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        return wb.open(folder)

    return make


def test_names_do_not_depend_on_the_format(saved):
    x = random((96, 64), "bfloat16")
    bits = raw(x)
    zeroed = bits.copy()
    zeroed.reshape(-1)[100:3000] = 0
    flipped = bits.copy()
    flipped[3, 4] ^= 1 << 14
    planted = {
        "qkv": (qkv(bits), "interleave"),
        "gate_up": (halves(bits), "halves"),
        "columns": (np.roll(bits, 9, 1), "rolled"),
        "zero": (zeroed, "zero_run"),
        "flip": (flipped, "bit_flip"),
        "shift": (np.concatenate([bits[5:], raw(random((5, 64), "bfloat16", 2))]), "shift"),
        "half": (raw(x / 2), "ratio"),
        "turned": (np.ascontiguousarray(bits.T), "transposed"),
        "nothing": (raw(random((96, 64), "bfloat16", 3)), None),
    }
    before = saved({key: x.clone() for key in planted})
    after = saved({key: torch.from_numpy(y.view("<i2")).view(torch.bfloat16) for key, (y, _) in planted.items()})
    for key, (_, name) in planted.items():
        found = recognise(before[key], after[key])
        assert (found.name if found else None) == name, (key, found)
        if found:
            proved(found, before[key], after[key])


def test_shards_do_not_hide_an_order(samples, tmp_path):
    """A sharded checkpoint beside one file of reordered tensors, and the other way round."""
    with wb.open(samples / "dcp_fsdp2") as sharded:
        key = max((k for k in sharded if len(sharded[k].shape) == 2), key=lambda k: len(sharded[k].chunks))
        a = sharded[key]
        assert len(a.chunks) > 1
        x = a.torch()
        n = x.shape[0]
        save_file({key: x.roll(3, 0).contiguous()}, tmp_path / "m.safetensors")
        with wb.open(tmp_path / "m.safetensors") as other:
            found, back = recognise(a, other[key]), recognise(other[key], a)
            assert (found.name, found.detail["by"] % n) == ("rolled", 3)
            assert (back.name, back.detail["by"] % n) == ("rolled", n - 3)
            proved(found, a, other[key])
            proved(back, other[key], a)


def test_a_lost_page_of_a_column_shard_is_one_run_of_its_chunk(tensor):
    x = raw(random((256, 128), "float32"))
    y = x.copy()
    part = np.ascontiguousarray(y[:, 64:])
    part.reshape(-1)[1024:3072] = 0
    y[:, 64:] = part
    chunks = [((0, 0), (256, 64)), ((0, 64), (256, 64))]
    a, b = tensor(x, "float32"), tensor(y, "float32", chunks)
    found = recognise(a, b)
    assert found.name == "zero_run" and found.detail["offsets"] == [0, 64]
    assert (found.detail["start"], found.detail["length"]) == (1024, 2048)
    proved(found, a, b)
    assert found.detail["byte_stop"] - found.detail["byte_start"] == 8192


def test_the_bytes_of_a_zero_run_are_those_of_the_file(tmp_path):
    x = random((256, 128), "float32")
    save_file({"pad": torch.ones(7, dtype=torch.uint8), "w": x}, tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    header = struct.unpack("<Q", data[:8])[0]
    page = (8 + header + 4096) // 4096 * 4096 + 4096
    data[page : page + 8192] = bytes(8192)
    (tmp_path / "b.safetensors").write_bytes(data)
    with wb.open(tmp_path / "a.safetensors") as before, wb.open(tmp_path / "b.safetensors") as after:
        found = recognise(before["w"], after["w"])
        assert found.name == "zero_run"
        at, stop = found.detail["byte_start"], found.detail["byte_stop"]
        assert not any(data[at:stop]) and (at, stop) == (page, page + 8192)
        assert found.detail["aligned"] and found.detail["file"].endswith("b.safetensors")
        proved(found, before["w"], after["w"])


# ---- likely causes ---------------------------------------------------------------------------------------------------


def test_causes_are_told_from_names_and_never_as_facts(tmp_path):
    x = random((96, 64), "bfloat16")
    bits = raw(x)
    planted = {
        "layers.0.mlp.gate_up_proj.weight": (halves(bits), "gate and up"),
        "layers.0.self_attn.q_proj.weight": (rope(bits), "half-split → interleaved"),
        "layers.0.self_attn.k_proj.weight": (unrope(bits), "interleaved → half-split"),
        "layers.0.self_attn.qkv_proj.weight": (gqa(bits), "query, key and value"),
        "layers.0.mlp.down_proj.weight": (halves(bits), "ranks"),
    }
    save_file({key: x.clone() for key in planted}, tmp_path / "a.safetensors")
    changed = {key: torch.from_numpy(y.view("<i2").copy()).view(torch.bfloat16) for key, (y, _) in planted.items()}
    save_file(changed, tmp_path / "b.safetensors")
    with wb.open(tmp_path / "a.safetensors") as before, wb.open(tmp_path / "b.safetensors") as after:
        for key, (_, words) in planted.items():
            found = recognise(before[key], after[key])
            assert words in found.likely and words not in found.sentence, (key, found)


# ---- nothing to name -------------------------------------------------------------------------------------------------


def unchanged_or_unreadable(tensor):
    same = random((20, 20), "float32")
    yield tensor(same), tensor(same)
    yield tensor(torch.zeros(0, 4)), tensor(torch.zeros(0, 4))
    yield tensor(torch.ones(64, 64)), tensor(torch.full((64, 64), 2.0))  # a ratio, a fill, anything
    yield tensor(torch.ones(64, 32)), tensor(torch.ones(32, 64))
    yield tensor(torch.tensor(1.0)), tensor(torch.tensor(2.0))
    yield tensor(torch.tensor([1.0, 2.0])), tensor(torch.tensor([2.0, 1.0]))
    yield tensor(torch.eye(3)), tensor(torch.eye(3).flip(0))
    yield tensor(same), tensor(random((20, 21), "float32"))
    yield tensor(same), tensor(random((20, 20), "bfloat16", seed=1))
    yield tensor(same), tensor(random((20,), "float32"))


def test_what_has_many_stories_has_no_name(tensor):
    for a, b in unchanged_or_unreadable(tensor):
        assert recognise(a, b) is None


def random_pair(rng: np.random.Generator, seed: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A change as training makes them; nothing in it has a form."""
    dtype = rng.choice(["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
    dims = int(rng.integers(1, 4))
    tiny = rng.random() < 0.4
    shape = tuple(int(n) for n in rng.integers(1, 5 if tiny else {1: 3000, 2: 80, 3: 16}[dims], dims))
    x = random(shape, dtype, seed)
    y = random(shape, dtype, seed + 1_000_000)
    noise = torch.from_numpy(rng.normal(size=shape))
    kind = rng.choice(["independent", "epsilon", "adam", "sign step", "sparse", "quantised", "mixed rows"])
    if not x.is_floating_point() or kind == "independent":
        return "independent", x, y
    wide = x.double()
    if kind == "epsilon":
        return kind, x, (wide + 10 ** rng.uniform(-6, -1) * noise).to(x.dtype)
    if kind == "adam":
        decayed = wide * (1 - 1e-3)
        return kind, x, (decayed - 1e-2 * noise / (noise.abs() + 0.1)).to(x.dtype)
    if kind == "sign step":
        return kind, x, (wide - 1e-2 * noise.sign()).to(x.dtype)
    if kind == "sparse":
        where = torch.from_numpy(rng.random(shape) < rng.uniform(0.05, 0.5))
        return kind, x, torch.where(where, y.double(), wide).to(x.dtype)
    if kind == "quantised":
        levels = int(rng.integers(2, 6))
        pick = [torch.from_numpy(rng.integers(0, levels, shape)).double() for _ in "ab"]
        return kind, pick[0].to(x.dtype), pick[1].to(x.dtype)
    order = torch.from_numpy(rng.integers(0, shape[0], shape[0]))  # rows drawn with replacement, and noise
    return kind, x, (wide[order] + 0.01 * noise).to(x.dtype)


@pytest.mark.parametrize("part", range(10))
def test_random_changes_have_no_name(tensor, part):
    count = 100 if SLOW else 10
    for seed in range(part * 1000, part * 1000 + count):
        kind, x, y = random_pair(np.random.default_rng(seed), seed)
        found = recognise(tensor(x), tensor(y))
        assert found is None, (kind, seed, tuple(x.shape), x.dtype, found)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_tensor(tensor, monkeypatch):
    monkeypatch.setattr(patterns_read, "READ", 1 << 16)
    monkeypatch.setattr(patterns_read, "ELEMENTS", 1 << 14)
    x = raw(random((1024, 2048), "bfloat16"))
    changes = [halves(x), np.roll(x, 5, 1), raw(random((1024, 2048), "bfloat16", 1)), x ^ np.uint16(0x8000)]
    a, pairs = tensor(x, "bfloat16"), [tensor(y, "bfloat16") for y in changes]
    names = []
    for b in pairs:
        tracemalloc.start()
        found = recognise(a, b)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        names.append(found and found.name)
        assert peak < 3 << 20, (names, peak)
    assert names == ["halves", "rolled", None, "ratio"]


def test_every_name_is_explained():
    page = (Path(__file__).resolve().parents[1] / "docs" / "patterns.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(NAMES)
