"""Moments against dense float64 references, for every element type, any bits, any cutting, with and without numba."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import chunkings, examples, shapes
from tests.test_reading import stored
from tests.test_scan import payloads
from workbench.analysis import plain_stats
from workbench.analysis.bit_patterns import LAYOUTS
from workbench.analysis.moment import Moment
from workbench.analysis.moments import ACCURACY, Moments
from workbench.core import scan as scan_module
from workbench.core import work as work_module
from workbench.core.dtypes import ALL, by_name
from workbench.core.scan import scan
from workbench.core.work import chunk_work

ROOT = Path(__file__).resolve().parents[1]
FLOATS = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126, "float64": 2.0**-1022,
            "float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14, "float8_e4m3fnuz": 2.0**-7,
            "float8_e5m2fnuz": 2.0**-15, "float8_e8m0fnu": 0.0}  # fmt: skip  # torch.finfo(…).smallest_normal


def engines():
    try:
        import numba  # noqa: F401
    except ImportError:
        return ["numpy"]
    return ["numpy", "numba"]


ENGINES = engines()
LEAST = 1e-323  #: two steps of float64 above zero


def as_float64(dtype, bits):
    """The values by torch (numpy for integers), which share no code with ours."""
    if dtype.kind == "f":
        signed = torch.from_numpy(bits.copy().view(f"i{bits.itemsize}"))
        return signed.view(dtype.torch).to(torch.float64).numpy()
    return bits.view(np.uint8) != 0 if dtype.name == "bool" else bits.view(dtype.numpy)


def of(dtype, bits, engine, cuts=()):
    """The moments of a few pieces, each folded into a state of its own and merged."""
    reducer = Moments(engine)
    whole = reducer.begin(dtype)
    edges = [0, *sorted(cuts), len(bits)]
    for start, stop in pairwise(edges):
        state = reducer.begin(dtype)
        reducer.fold_bits(state, bits[start:stop])
        reducer.merge(whole, state)
    return whole


def check(dtype, bits, found):
    values = as_float64(dtype, bits)
    assert found.count == len(bits)
    assert found.zero == np.count_nonzero(values == 0)
    if dtype.kind != "f":
        whole = [int(value) for value in values]
        assert (found.min, found.max) == ((min(whole), max(whole)) if whole else (None, None))
        assert (found.total or 0, found.l1) == (sum(whole), sum(map(abs, whole)))
        finite, rough = np.array(whole, np.longdouble), 1e-9
    else:
        wide = np.abs(values.astype(np.longdouble))
        assert found.nan == np.isnan(values).sum()
        assert found.posinf == (values == np.inf).sum() and found.neginf == (values == -np.inf).sum()
        assert found.subnormal == ((wide < SMALLEST[dtype.name]) & (wide > 0)).sum()
        finite = values[np.isfinite(values)].astype(np.longdouble)
        if len(finite):
            assert (found.min, found.max) == (finite.min(), finite.max())
        rough = ACCURACY
    assert found.finite == len(finite)
    spoilt = len(finite) < len(values)
    if spoilt:  # a norm is of all elements
        assert all(np.isnan(one) if np.isnan(values).any() else one == np.inf for one in (found.norm, found.rms))
    if not len(finite):
        assert found.average is found.std is found.absmean is None
        assert spoilt or found.norm is found.rms is None
        return
    n = len(finite)
    mean = finite.sum() / n
    m2 = ((finite - mean) ** 2).sum()
    l1, l2 = np.abs(finite).sum(), np.sqrt((finite**2).sum())
    assert abs(found.average - mean) <= rough * l1 / n + LEAST
    with np.errstate(over="ignore"):
        assert found.std == pytest.approx(
            float(np.sqrt(m2 / n)), rel=rough, abs=float(rough * abs(mean) * 1e-6) + LEAST
        )
        assert found.absmean == pytest.approx(float(l1 / n), rel=rough, abs=LEAST)
        assert spoilt or l2 > 1e308 or found.norm == pytest.approx(float(l2), rel=rough, abs=LEAST)


def patterns(dtype):
    """Lists of bit patterns: anything, or runs of ordinary numbers with an odd one among them."""
    top = (1 << dtype.bits) - 1
    sign = 1 << (dtype.bits - 1)
    odd = [0, 1, sign, sign + 1, top, sign - 1]
    if dtype.name in LAYOUTS:
        layout = LAYOUTS[dtype.name]
        odd += [layout.special, layout.special + sign, layout.special - 1, layout.normal, layout.normal - 1]
    one = st.integers(0, top) | st.sampled_from(odd)
    return st.lists(one, max_size=60) | st.tuples(one, st.integers(0, 300)).map(lambda pair: [pair[0]] * pair[1])


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few elements, so that short arrays are cut everywhere."""
    monkeypatch.setattr(plain_stats, "BLOCK", 16)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FLOATS + INTEGERS)
@examples(20, slow=3000)
@given(data=st.data())
def test_any_bits_in_any_pieces(small, name, engine, data):
    dtype = by_name(name)
    bits = np.array(data.draw(patterns(dtype)), dtype.raw)
    cuts = data.draw(st.lists(st.integers(0, len(bits)), max_size=3))
    if data.draw(st.booleans()):  # as in a file: at any byte, not writable
        blob = b"x" + bits.tobytes()
        bits = np.frombuffer(blob, np.uint8)[1:].view(dtype.raw)
    check(dtype, bits, of(dtype, bits, engine, cuts))


CASES = {
    "weights": lambda n, r: r.normal(0, 0.02, n),
    "norm weights": lambda n, r: r.normal(1, 0.004, n),
    "far from zero": lambda n, r: r.normal(240, 0.3, n),
    "second moments": lambda n, r: r.normal(0, 3e-9, n) ** 2,
    "tiny": lambda n, r: r.normal(0, 1e-30, n),
    "huge": lambda n, r: r.normal(0, 1e30, n),
    "wide": lambda n, r: np.exp(r.normal(0, 12, n)) * r.choice([-1, 1], n),
    "mostly zero": lambda n, r: r.normal(0, 1, n) * (r.random(n) < 0.01),
    "steps up": lambda n, r: np.repeat([0.0, 1e-3, 5.0, -300.0], -(-n // 4))[:n] + r.normal(0, 1e-3, n),
    "constant": lambda n, r: np.full(n, 0.1),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_what_checkpoints_hold(name, case, engine):
    dtype, n = by_name(name), 300_001
    values = CASES[case](n, np.random.default_rng(len(case)))
    tensor = torch.from_numpy(values).to(dtype.torch)
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).numpy()
    bits = bits.view(dtype.raw)
    check(dtype, bits, of(dtype, bits, engine, [131_073, 200_000]))
    odd = bits.copy()
    odd[[5, 150_000, 299_999]] = LAYOUTS[name].special  # and with a few infinities or NaN
    check(dtype, odd, of(dtype, odd, engine, [131_073]))


@pytest.mark.skipif("numba" not in ENGINES, reason="numba is not installed")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
@examples(20, slow=3000)
@given(data=st.data())
def test_numba_finds_what_numpy_finds(name, data):
    dtype = by_name(name)
    some = np.array(data.draw(patterns(dtype)), dtype.raw)
    bits = np.concatenate([some, np.resize(some, 9000 * bool(len(some))), some[::-1]])
    plain, fast = of(dtype, bits, "numpy"), of(dtype, bits, "numba")
    for field in ("count", "nan", "posinf", "neginf", "zero", "subnormal", "finite", "min", "max"):
        assert getattr(plain, field) == getattr(fast, field), field
    check(dtype, bits, fast)


@pytest.mark.skipif("numba" not in ENGINES, reason="numba is not installed")
@pytest.mark.parametrize("native", [True, False])
def test_every_half_is_converted_exactly(native):
    import numba

    from workbench.core import fast_numbers

    if native and not fast_numbers._converts_halves():
        pytest.skip("this processor has no half → float conversion")
    half = fast_numbers._half_native if native else fast_numbers._half_plain

    @numba.njit
    def convert(bits, out):
        for k in range(len(bits)):
            out[k] = half(bits[k])

    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7C00) != 0x7C00]
    out = np.empty(len(bits), np.float32)
    convert(bits, out)
    assert (out.view("u4") == bits.view("f2").astype("f4").view("u4")).all()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_type_passes_through(dtype, tmp_path):
    if dtype.packed:
        return  # below, through a scan: a piece of them is bytes
    bits = np.frombuffer(np.random.default_rng(0).bytes(64 * dtype.itemsize), dtype.raw)
    state = of(dtype, bits, "numpy")
    assert state.count == 64
    assert state.finite == 0 if dtype.name == "float4_e2m1fn_x2" else state.finite + state.nan + state.posinf > 0


def test_packed_types_are_counted(tmp_path):
    from workbench.core.build import CatalogBuilder
    from workbench.core.place import Place

    (tmp_path / "f").write_bytes(bytes(range(60)))
    builder = CatalogBuilder("test", Place(tmp_path))
    for key, name, shape, stop in (("a", "float4_e2m1fn", (9, 5), 23), ("b", "float6_e3m2fn", (8,), 6)):
        builder.tensor(key, by_name(name), shape)
        builder.chunk(key, (0,) * len(shape), shape, "f", 0, stop)
    catalog = builder.build()
    found = dict(scan(chunk_work(payloads(tmp_path, catalog)), Moments("numpy")))
    assert [(found[at].count, found[at].finite, found[at].min) for at in (0, 1)] == [(45, 0, None), (8, 0, None)]


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex_numbers_are_seen_by_their_magnitude(name):
    dtype = by_name(name)
    parts = np.array([3, 4, 0, -0.0, 0, -2, np.nan, 1, np.inf, 0], f"f{dtype.itemsize // 2}")
    state = of(dtype, parts.view(dtype.raw), "numpy")
    assert (state.min, state.max, state.zero, state.nan, state.posinf, state.neginf) == (0, 5, 1, 1, 1, 0)
    assert state.average == pytest.approx(7 / 3) and state.subnormal == 0


@examples(75)
@given(st.data())
def test_a_scan_of_any_chunking_with_any_threads(tmp_path_factory, data):
    shape = data.draw(shapes(min_side=1))
    folder = tmp_path_factory.mktemp("case")
    raw = data.draw(st.binary(min_size=4 * int(np.prod(shape)), max_size=4 * int(np.prod(shape))))
    dense = np.frombuffer(raw, "<u4").reshape(shape)
    catalog = stored(folder, dense, data.draw(chunkings(shape)), dtype="float32", big=data.draw(st.booleans()))
    old = scan_module.PIECE, work_module.TASK, work_module.BOX_COST
    try:
        scan_module.PIECE, work_module.TASK, work_module.BOX_COST = 12, 40, 8
        work = chunk_work(payloads(folder, catalog))
        one, three = (dict(scan(work, Moments("numpy"), threads=n))[0] for n in (1, 3))
    finally:
        scan_module.PIECE, work_module.TASK, work_module.BOX_COST = old
    assert one == three  # to the last bit: the order of merging does not depend on threads
    check(by_name("float32"), dense.reshape(-1), one)


def test_integers_that_meet_floats_become_floats():
    whole = of(by_name("int64"), np.array([1, 2, 3], "<i8").view("<u8"), "numpy")
    part = of(by_name("float32"), np.array([0.5], "<f4").view("<u4"), "numpy")
    for first, second in ((whole, part), (part, whole)):
        both = Moment()
        both.merge(first)
        both.merge(second)
        assert both.dtype is None and both.count == 4 and both.total is None
        assert both.average == pytest.approx(6.5 / 4) and both.norm == pytest.approx(14.25**0.5)
        assert (both.min, both.max, both.l1) == (0.5, 3, 6.5)


LOST = """
import sys
import numpy as np
from workbench.analysis.moments import ACCURACY, Moments
from workbench.core.dtypes import by_name
for first, every in ((1, 512), (8, 512), (512, 4096), (1, 2048), (2048, 4096)):  # whatever is added up together
    values = np.full(1 << 16, 0.999 * 2**-24, np.float32)  # 1 plus such a number is 1 in float32
    values.reshape(-1, every)[:, :first] = 1
    state = (reducer := Moments(sys.argv[1])).begin(by_name("float32"))
    reducer.fold_bits(state, values.view(np.uint32))
    wide = values.astype(np.float64)
    want = wide.mean(), wide.mean(), wide.std(), np.sqrt((wide**2).mean())
    for found, exact in zip((state.absmean, state.average, state.std, state.rms), want, strict=True):
        assert abs(found / exact - 1) < ACCURACY, (first, every, found, exact)
"""


@pytest.mark.parametrize(
    ("engine", "processor"), [(engine, "native") for engine in ENGINES] + [("numba", "generic")] * ("numba" in ENGINES)
)
def test_small_numbers_beside_large_ones_are_not_lost(engine, processor, tmp_path):
    """Sums in float32 lose them: on a processor without wide instructions, 64 at a time."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    if processor == "generic":
        env |= {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", LOST, engine], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
