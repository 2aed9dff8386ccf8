"""Two tensors compared piece by piece against ten lines of torch on dense arrays: every type, both engines."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import chunkings, examples, shapes
from tests.test_reading import stored
from tests.test_scan import payloads
from workbench import errors
from workbench.analysis.compare import Compare, compare
from workbench.analysis.comparison import Comparison
from workbench.analysis.where import band_width
from workbench.core import scan as scan_module
from workbench.core import work as work_module
from workbench.core.dtypes import by_name

HAS_NUMBA = importlib.util.find_spec("numba") is not None
ENGINES = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")),
]
FLOATS = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
OTHERS = ["int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "complex128", "float8_e8m0fnu"]


def torch_of(bits, name):
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(bits.itemsize)
    if kind is None:
        return torch.from_numpy(bits.copy().view(np.complex128))
    flat = torch.from_numpy(bits.copy().view(f"i{bits.itemsize}" if bits.itemsize > 1 else np.uint8))
    return flat.view(by_name(name).torch)


def values(bits, name):
    bits = bits.reshape(-1)
    tensor = torch_of(bits, name)
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy()
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def side(folder, bits, name, chunks):
    folder.mkdir(exist_ok=True)
    return payloads(folder, stored(folder, bits, chunks, dtype=name))


def one(tmp, a, b, name, other=None, chunks=None, more=None, fast=False, threads=2, histograms=True):
    shape = a.shape
    whole = [((0,) * len(shape), shape)]
    left = side(tmp / "a", a, name, chunks or whole)
    right = side(tmp / "b", b, other or name, more or whole)
    got = dict(compare(left, right, np.array([0]), np.array([0]), threads=threads, fast=fast, histograms=histograms))
    return got[0]


def patterns(count, name, seed=0):
    """Random bits of a type, with special values among them."""
    rng = np.random.default_rng(seed)
    raw = by_name(name).raw
    if raw.kind == "V":
        return rng.standard_normal(2 * count).view(raw)
    bits = rng.integers(0, 1 << (8 * raw.itemsize) - 1, count, np.uint64, endpoint=True)
    bits ^= rng.integers(0, 2, count, np.uint64) << np.uint64(8 * raw.itemsize - 1)
    if name == "bool":
        bits &= np.uint64(1)
    return bits.astype(raw)


def check(got, a, b, name):
    """Against the dense arrays: the definitions, spelled out."""
    x, y = values(a, name).ravel(), values(b, name).ravel()
    changed = np.array([p.tobytes() != q.tobytes() for p, q in zip(a.ravel(), b.ravel(), strict=True)], bool)
    assert got.seen == a.size and got.changed == changed.sum() and got.equal == (not changed.any())
    if not changed.any():
        assert got.rel_l2 == 0.0 and got.cosine == 1.0 and got.max_at is None
        return
    good = np.isfinite(x) & np.isfinite(y)
    with np.errstate(all="ignore"):
        delta = (
            np.abs(y.astype(object) - x.astype(object))
            if x.dtype.kind in "iu"
            else np.abs(y ^ x)
            if (x.dtype.kind == "b")
            else np.abs(y - x)
        )
    delta = np.where(good, delta, 0)
    assert got.nan_a == np.isnan(x).sum() and got.nan_b == np.isnan(y).sum()
    assert got.nan_new == (np.isnan(y) & ~np.isnan(x)).sum()
    assert got.inf_a == (np.isinf(x) & ~np.isnan(x)).sum() and got.inf_b == (np.isinf(y) & ~np.isnan(y)).sum()
    assert got.same_number == (changed & ((x == y) | (np.isnan(x) & np.isnan(y)))).sum()
    top = max(delta.tolist(), default=0)
    if top > 0:
        at = np.ravel_multi_index(got.max_at, a.shape) if a.shape else 0
        limit = 2.0**128 if by_name(name).bits <= 32 else math.inf  # beyond float32 the first is taken
        assert math.isclose(min(float(delta[at]), limit), min(float(top), limit), rel_tol=1e-7)
        assert math.isclose(got.max_abs, delta[at], rel_tol=1e-15)
    xs, ys = np.where(good, x, 0), np.where(good, y, 0)
    kind = complex if xs.dtype.kind == "c" else float
    xs, ys = xs.astype(kind), ys.astype(kind)
    dd, aa, bb = (math.hypot(*np.abs(v).astype(float).tolist()) for v in (delta, xs, ys))
    for norm, want in ((got.l2, dd), (got.l2_a, aa), (got.l2_b, bb)):
        assert math.isclose(norm, want, rel_tol=1e-9)
    if max(dd, aa, bb) < 1e300:
        assert math.isclose(got.rel_l2, dd / aa if aa else math.inf if dd else 0.0, rel_tol=1e-9)
        if aa and bb and max(aa / bb, bb / aa) < 2**31:
            ratio = aa / bb + bb / aa
            cosine = np.vdot(xs / aa, ys / bb).real
            assert math.isclose(got.cosine, cosine, abs_tol=1e-13 * ratio)
        elif not (aa and bb) or max(aa / bb, bb / aa) > 2**33:
            assert got.cosine is None
    if by_name(name).kind == "f" and name != "float8_e8m0fnu":
        bits = 8 * a.itemsize
        keys = [[int(v) if int(v) < 1 << (bits - 1) else (1 << (bits - 1)) - int(v) for v in s.ravel()] for s in (a, b)]
        steps = [abs(p - q) for p, q, ok in zip(*keys, good, strict=True) if ok]
        assert got.ulp_max == max(steps, default=0)
        steps = [step.bit_length() for step in steps]
        assert got.ulps.tolist() == np.bincount(steps, minlength=66).tolist()
    narrow = by_name(name).bits <= 32 and by_name(name).kind == "f"
    with np.errstate(all="ignore"):
        shown = np.abs(ys.astype(np.float32) - xs.astype(np.float32)) if narrow else delta
    octaves = [min(max(math.frexp(d)[1] + 126, 0), 255) if d != math.inf else 255 for d in map(float, shown) if d]
    if not (x.dtype.kind in "iu" and top > 2**53):
        assert got.octaves.tolist() == np.bincount(octaves, minlength=256).tolist()
    places = np.argwhere(changed.reshape(a.shape)) if a.shape else np.empty((1, 0), int)
    for axis, size in enumerate(a.shape):
        want = np.bincount(places[:, axis] // band_width(size), minlength=64)
        assert got.bands[axis].tolist() == want.tolist()
    assert sum(got.chunks.values()) == got.changed


@pytest.fixture
def small(monkeypatch):
    """Pieces and tasks of a few elements, so that small tensors are cut everywhere."""
    monkeypatch.setattr(scan_module, "PIECE", 24)
    monkeypatch.setattr(work_module, "TASK", 80)
    monkeypatch.setattr(work_module, "BOX_COST", 8)


@pytest.mark.parametrize("fast", ENGINES)
@examples(50)
@given(st.data())
def test_a_comparison_is_that_of_the_dense_arrays(small, tmp_path_factory, fast, data):
    shape = data.draw(shapes(min_side=1, max_dims=4))
    name = data.draw(st.sampled_from(FLOATS + OTHERS))
    count = int(np.prod(shape))
    a = patterns(count, name, data.draw(st.integers(0, 1000)))
    b = a.copy()
    for at in data.draw(st.lists(st.integers(0, count - 1), max_size=8)):
        b[at] = patterns(1, name, data.draw(st.integers(0, 1000)))[0]
    if data.draw(st.booleans()):
        a, b = a.copy(), patterns(count, name, 7)
    a, b = a.reshape(shape), b.reshape(shape)
    chunks, more = data.draw(chunkings(shape)), data.draw(chunkings(shape))
    got = one(tmp_path_factory.mktemp("case"), a, b, name, chunks=chunks, more=more, fast=fast)
    check(got, a, b, name)


@pytest.mark.parametrize("fast", ENGINES)
@pytest.mark.parametrize("name", FLOATS + OTHERS)
def test_every_type_over_many_blocks(tmp_path, name, fast):
    a = patterns(70_000, name, 1).reshape(100, 700)
    near = a.copy()
    flip = np.random.default_rng(2).random(a.shape) < 0.3
    if by_name(name).raw.kind == "V":
        near[flip] = patterns(int(flip.sum()), name, 3)
    elif name == "bool":
        near[flip] ^= 1
    else:
        near[flip] = near[flip] + near.dtype.type(1)
    for b in (near, patterns(70_000, name, 5).reshape(a.shape)):
        check(one(tmp_path, a, b, name, fast=fast), a, b, name)


@pytest.mark.parametrize("fast", ENGINES)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_ordinary_weights_some_steps_apart(tmp_path, name, fast):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(513, 300, generator=generator) * 0.02
    sides = []
    for scale in (0.0, 1e-3):
        moved = weights + scale * torch.randn(weights.shape, generator=generator) * (torch.rand(weights.shape) < 0.9)
        tensor = moved.to(by_name(name).torch)
        sides.append(tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32).numpy())
    a, b = (s.view(by_name(name).raw) for s in sides)
    got = one(tmp_path, a, b, name, fast=fast)
    check(got, a, b, name)
    assert got.tail()[-1][1] == (got.changed - got.same_number) / got.seen
    assert [t for t, _ in got.tail()] == sorted((t for t, _ in got.tail()), reverse=True)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_both_engines_agree(tmp_path, name):
    a, b = patterns(300_000, name, 1), patterns(300_000, name, 2)
    slow, fast = (one(tmp_path, a, b, name, fast=chosen) for chosen in (False, True))
    for field in (
        "changed",
        "same_number",
        "finite",
        "nan_a",
        "nan_b",
        "nan_new",
        "inf_a",
        "inf_b",
        "max_at",
        "max_abs",
        "chunks",
    ):
        assert getattr(slow, field) == getattr(fast, field), field
    for field in ("ulps", "octaves", "bands"):
        assert (getattr(slow, field) == getattr(fast, field)).all(), field
    assert math.isclose(slow.l2, fast.l2, rel_tol=1e-12) and math.isclose(slow.rel_l2, fast.rel_l2, rel_tol=1e-12)


@pytest.mark.parametrize("fast", ENGINES)
@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64", "int32"])
def test_without_histograms_the_rest_is_the_same(tmp_path, name, fast):
    a, b = patterns(40_000, name, 1), patterns(40_000, name, 2)
    full, bare = (one(tmp_path, a, b, name, fast=fast, histograms=wanted) for wanted in (True, False))
    assert bare.ulps is None and bare.octaves is None and bare.tail() == []
    for field in set(vars(full)) - {"ulps", "octaves", "bands"}:
        assert getattr(full, field) == getattr(bare, field), field
    assert (full.bands == bare.bands).all()


def test_special_values_are_told_apart(tmp_path):
    nan, inf = np.nan, np.inf
    a = np.array([0.0, nan, nan, 1.0, inf, inf, -inf, 2.0, 5.0], np.float32)
    b = np.array([-0.0, nan, 1.0, nan, inf, -inf, 3.0, inf, 6.0], np.float32)
    a[1:2].view(np.uint32)[:] = 0x7FC00001  # another NaN than b's
    got = one(tmp_path, a.view(np.uint32), b.view(np.uint32), "float32")
    assert got.changed == 8 and got.same_number == 2  # the two zeros, the two NaNs
    assert (got.nan_a, got.nan_b, got.nan_new) == (2, 2, 1) and (got.inf_a, got.inf_b) == (3, 3)
    assert got.finite == 2 and got.max_abs == 1.0 and got.max_at == (8,)
    assert (got.max_a, got.max_b) == (5.0, 6.0)


def test_huge_and_tiny_float64_keep_their_norms(tmp_path):
    a, b = np.array([1e300, 3.0, 0.0]), np.array([-1e300, 3.0, 4e-300])
    got = one(tmp_path, a.view("u8"), b.view("u8"), "float64")
    assert got.l2 == pytest.approx(2e300) and got.rel_l2 == pytest.approx(2.0) and got.cosine == pytest.approx(-1.0)
    a, b = np.array([3e-300, 0.0]), np.array([3e-300, 4e-300])
    got = one(tmp_path, a.view("u8"), b.view("u8"), "float64")
    assert got.l2 == pytest.approx(4e-300) and got.rel_l2 == pytest.approx(4 / 3) and got.cosine == pytest.approx(0.6)
    top = np.finfo(np.float64).max
    got = one(tmp_path, np.array([top]).view("u8"), np.array([-top]).view("u8"), "float64")
    assert got.l2 == math.inf and got.l2_a == top and got.rel_l2 == pytest.approx(2.0)


def test_integers_differ_exactly(tmp_path):
    a = np.array([-(2**63), 5, 2**62 + 1], np.int64)
    b = np.array([2**63 - 1, 5, 2**62], np.int64)
    got = one(tmp_path, a.view("u8"), b.view("u8"), "int64")
    assert got.max_abs == 2**64 - 1 and got.changed == 2


def test_two_types_compare_as_numbers_and_after_rounding(tmp_path):
    wide = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    narrow = wide.to(torch.bfloat16)
    narrow[7] = 100.0
    a, b = wide.numpy().view(np.uint32), narrow.view(torch.int16).numpy().view(np.uint16)
    got = one(tmp_path, a, b, "float32", other="bfloat16")
    assert got.how == "numbers" and got.rounded == 4999
    assert got.changed == int((wide != narrow.float()).sum()) and got.max_at == (7,)
    assert got.l2 == pytest.approx(float((wide.double() - narrow.double()).norm()))
    assert got.ulps is None and got.ulp_max is None
    same = one(tmp_path, b, narrow.float().numpy().view(np.uint32), "bfloat16", other="float32")
    assert same.changed == 0 and same.equal and same.rounded == 5000


def test_types_that_share_bytes_are_compared_as_bytes(tmp_path):
    from workbench.core.build import CatalogBuilder
    from workbench.core.place import Place

    sides = []
    for number, blob in enumerate((bytes(range(8)), bytes([0, 1, 2, 3, 9, 9, 6, 7]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "f").write_bytes(blob)
        builder = CatalogBuilder("test", Place(folder))
        builder.tensor("t", by_name("float4_e2m1fn"), (4, 4))
        builder.chunk("t", (0, 0), (4, 4), "f", 0, 8)
        sides.append(payloads(folder, builder.build()))
    got = dict(compare(*sides, np.array([0]), np.array([0])))[0]
    assert got.how == "raw" and got.seen == 8 and got.changed == 2 and got.max_abs is None and got.rel_l2 is None


def test_states_merge_in_any_grouping_to_the_same_result(tmp_path):
    parts = []
    for seed in range(3):
        a, b = patterns(4000, "bfloat16", seed), patterns(4000, "bfloat16", seed + 10)
        parts.append((a, b))

    def states():
        return [one(tmp_path, a, b, "bfloat16") for a, b in parts]

    reducer = Compare.__new__(Compare)
    left = states()
    reducer.merge(left[0], left[1])
    reducer.merge(left[0], left[2])
    right = states()
    reducer.merge(right[1], right[2])
    reducer.merge(right[0], right[1])
    for name in vars(left[0]):
        p, q = getattr(left[0], name), getattr(right[0], name)
        assert (p == q).all() if isinstance(p, np.ndarray) else p == q, name


def test_the_place_of_a_change_shows_the_shard(tmp_path):
    a = np.zeros((128, 64), np.uint32)
    b = a.copy()
    b[64:96, 8:16] = 1
    halves = [((0, 0), (64, 64)), ((64, 0), (64, 64))]
    got = one(tmp_path, a, b, "float32", chunks=halves)
    assert got.chunks == {(1, 0): 32 * 8}
    assert got.bands[0].nonzero()[0].tolist() == list(range(32, 48))
    assert got.bands[1].nonzero()[0].tolist() == list(range(8, 16))


def test_threads_do_not_change_the_result(small, tmp_path):
    a, b = patterns(500, "float32", 1), patterns(500, "float32", 2)
    results = [one(tmp_path, a, b, "float32", threads=n) for n in (1, 2, 5)]
    for other in results[1:]:
        assert other.squares == results[0].squares and other.max_at == results[0].max_at


def test_an_unreadable_side_is_told(tmp_path):
    a = np.arange(64, dtype=np.uint32)
    left = side(tmp_path / "a", a, "float32", [((0,), (64,))])
    right = side(tmp_path / "b", a, "float32", [((0,), (32,)), ((32,), (32,))])
    right.catalog.stop[1] += 1000
    with pytest.raises(errors.TruncatedError):
        list(compare(left, right, np.array([0]), np.array([0])))
    told = []
    list(compare(left, right, np.array([0]), np.array([0]), on_error=lambda *what: told.append(what[:2])))
    assert told == [(1, 1)]


def test_progress_ends_at_one_and_never_falls(small, tmp_path):
    a = np.arange(400, dtype=np.uint32)
    b = a.copy()
    b[3] = 7
    left = side(tmp_path / "a", a, "float32", [((0,), (400,))])
    right = side(tmp_path / "b", b, "float32", [((0,), (400,))])
    told = []
    list(compare(left, right, np.array([0]), np.array([0]), progress=told.append))
    assert told == sorted(told) and told[-1] == 1.0


def test_equal_tensors_cost_no_numbers():
    state = Comparison(by_name("float32"), by_name("float32"), seen=10)
    assert state.equal and state.rel_l2 == 0.0 and state.cosine == 1.0 and state.ulp_max == 0 and state.tail() == []
