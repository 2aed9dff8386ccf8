"""Counts of patterns against numpy over the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.test_moments import ENGINES, FLOATS, INTEGERS, as_float64, check, patterns
from tests.test_reading import stored
from tests.test_scan import payloads
from workbench.analysis.census import BOUND, Census, Counts
from workbench.core.dtypes import ALL, by_name
from workbench.core.scan import scan
from workbench.core.work import chunk_work

NARROW = [name for name in FLOATS + INTEGERS if by_name(name).bits <= 16]
WIDE = [name for name in FLOATS + INTEGERS if by_name(name).bits > 16]
WANTED = np.array([0, 0.01, 0.25, 0.5, 0.75, 0.99, 1])


def of(dtype, bits, engine, cut=0):
    reducer = Census(engine)
    whole = reducer.begin(dtype)
    for part in (bits[:cut], bits[cut:]):
        state = reducer.begin(dtype)
        reducer.fold_bits(state, part)
        reducer.merge(whole, state)
    return whole


def drawn(data, name, engine):
    """Bits of a type, what the census made of them, and the values that they are, as float64."""
    dtype = by_name(name)
    bits = np.array(data.draw(patterns(dtype)), dtype.raw)
    found = of(dtype, bits, engine, data.draw(st.integers(0, len(bits))))
    return bits, found, as_float64(dtype, bits).astype(np.float64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NARROW)
@examples(20, slow=2000)
@given(data=st.data())
def test_all_bits_of_narrow_types_are_told_exactly(name, engine, data):
    bits, found, values = drawn(data, name, engine)
    check(by_name(name), bits, found.moment())
    assert found.distinct == len(np.unique(values))  # numpy, too, takes all NaN for one and −0 for 0
    finite = values[np.isfinite(values)]
    if len(finite):
        np.testing.assert_allclose(found.quantiles(WANTED), np.quantile(finite, WANTED), rtol=1e-14)
        counts, edges = found.histogram(10)
        assert counts.sum() == len(finite) and edges[0] <= finite.min() and edges[-1] >= finite.max()
        if (np.diff(edges) > 0).all():
            assert (counts == np.histogram(finite, edges)[0]).all()
            np.testing.assert_allclose(np.diff(edges), (edges[-1] - edges[0]) / 10, rtol=1e-6)
    else:
        assert found.quantiles(WANTED) is None and found.histogram() is None
    if len(bits):
        share = np.unique(bits, return_counts=True)[1] / len(bits)
        assert found.entropy == pytest.approx(-(share * np.log2(share)).sum(), abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", WIDE)
@examples(20, slow=2000)
@given(data=st.data())
def test_order_statistics_of_wide_types_are_within_the_bound(name, engine, data):
    _, found, values = drawn(data, name, engine)
    finite = np.sort(values[np.isfinite(values)])
    assert found.distinct is found.entropy is None
    if not len(finite):
        assert found.quantiles(WANTED) is None
        return
    places = np.arange(len(finite)) / max(len(finite) - 1, 1)
    got = found.quantiles(places, finite[0], finite[-1])
    kept = np.clip(finite, -3.4028234663852886e38, 3.4028234663852886e38)
    # k / (n − 1) · (n − 1) may be k and a rounding more or less, which brings as much of the neighbours in
    gaps = np.abs(np.diff(kept, prepend=kept[:1])) + np.abs(np.diff(kept, append=kept[-1:]))
    bound = np.abs(kept) * BOUND * (1 + 1e-9) + gaps * len(kept) * 2.0**-52 + 1e-40
    assert (np.abs(got - kept) <= bound)[np.abs(finite) < 3e38].all()


def test_a_place_that_is_rounded_brings_a_rounding_of_its_neighbour():
    zeros_and_ones = np.array([0] * 8 + [1] * 18, np.uint32)
    found = of(by_name("int32"), zeros_and_ones, "numpy").quantiles(np.array([7 / 25]), 0, 1)
    truth = np.quantile(zeros_and_ones, 7 / 25)  # of element 7, a zero
    assert 0 < truth < 1e-15 and abs(found[0] - truth) <= truth * BOUND


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float32", "float64"])
def test_quantiles_of_a_normal_distribution(name, engine):
    dtype = by_name(name)
    tensor = torch.randn(400_001, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype.torch)
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).numpy()
    bits = bits.view(dtype.raw)
    values = tensor.double().numpy()
    found = of(dtype, bits, engine, 123_457)
    rough = 1e-14 if dtype.bits <= 16 else BOUND
    np.testing.assert_allclose(found.quantiles(WANTED), np.quantile(values, WANTED), rtol=rough, atol=1e-5)


def test_engines_count_alike():
    if "numba" not in ENGINES:
        pytest.skip("numba is not installed")
    for name in ("bfloat16", "uint8", "float32", "int64", "complex64"):
        dtype = by_name(name)
        bits = np.frombuffer(np.random.default_rng(3).bytes(30_001 * dtype.itemsize), dtype.raw)
        plain, fast = of(dtype, bits, "numpy"), of(dtype, bits, "numba")
        assert (plain.patterns == fast.patterns).all() and (plain.times == fast.times).all()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_type_passes_through(dtype):
    state = Census("numpy").begin(dtype)
    if dtype.packed or dtype.name == "float4_e2m1fn_x2":
        assert state is None
        return
    bits = np.frombuffer(np.random.default_rng(0).bytes(64 * dtype.itemsize), dtype.raw)
    Census("numpy").fold_bits(state, bits)
    assert int(state.open().sum()) == 64


def test_states_are_small_when_their_box_is_done(tmp_path):
    dense = np.arange(4096, dtype=np.int16).reshape(64, 64) % 7
    catalog = stored(tmp_path, dense, [((0, 0), (40, 64)), ((40, 0), (24, 64))], dtype="int16")
    found = dict(scan(chunk_work(payloads(tmp_path, catalog), order="group"), Census("numpy"), threads=2))[0]
    assert isinstance(found, Counts) and found.table is None
    assert found.patterns.tolist() == list(range(7)) and found.times.tolist() == np.bincount(dense.ravel()).tolist()
