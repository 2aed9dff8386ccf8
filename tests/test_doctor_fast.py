"""The doctor's compiled passes against numpy's: equal counts on whatever bits, sums to within rounding."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import lab
from tests.properties import boxes, examples
from tests.test_doctor_values import state
from tests.test_lab import SMALL
from tests.test_reading import any_stored, lazy
from workbench.analysis.numbers import Decoder
from workbench.core.dtypes import by_name
from workbench.core.read import read_boxes
from workbench.doctor.facts.evidence import Evidence
from workbench.doctor.laws import bounds as laws
from workbench.doctor.laws.bounds import PIECE
from workbench.doctor.passes.blocks import SlotBlock, TensorSlot
from workbench.doctor.passes.one import OneFold
from workbench.doctor.passes.pair import PairFold, PairState, Update
from workbench.doctor.passes.profiles import Sums
from workbench.doctor.rules.values import check_one, check_pair
from workbench.errors import MissingExtraError

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
ROLES = ("master", "exp_avg", "exp_avg_sq")
NAMES = [(side, role) for side in (0, 1) for role in ROLES]
#: NaN with either sign, infinities, zeros, ones, the largest and smallest numbers, subnormals.
ODD = np.array(
    [
        0x7FC00001,
        0xFFC00000,
        0x7F800000,
        0xFF800000,
        0,
        0x80000000,
        0x3F800000,
        0xBF800000,
        0x7F7FFFFF,
        1,
        0x80000001,
        0x00800000,
        0x007FFFFF,
        0x3F801000,
        0x3F810000,
    ],
    np.uint32,
)
UPDATES = [
    Update(1, (0.9, 0.95), 1e-8, 99, 100, (1e-3, 1e-3), True, (0.0, 0.1)),
    Update(1, (0.9, 0.999), 1e-8, 0, 1, (1e-3, 1.1e-3), True, (0.1,), decoupled=True),
    Update(20, (0.9, 0.95), 1e-8, 100, 120, (0.0, 1e-3), False, ()),
    Update(500, (0.9, 0.999), 1e-8, None, None, (1e-4, 1e-4), True, (0.1,), decoupled=False),
    Update(1, (0.9, 0.95), 1e-8, 99, 100, (0.0, 0.0), True, (0.1,)),
    Update(0, (0.9, 0.95), 1e-8, 99, 99, (1e-3, 1e-3), True),
    Update(3, None, None, None, None, None),
]


class Plain:
    """As much of a tensor as a fold asks about."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.element, self.shape = by_name(name), shape


def trained(seed: int, size: int, update: Update) -> dict[tuple[int, str], np.ndarray]:
    """Two states of one AdamW, some elements of which never saw a gradient."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(0.02 * torch.randn(size, generator=random))
    betas = update.betas or (0.9, 0.95)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=betas, weight_decay=0.1)
    silent = torch.rand(size, generator=random) < 0.2
    found = {}
    for side, steps in ((0, 3), (1, min(update.k, 20))):
        for _ in range(steps):
            weight.grad = torch.randn(size, generator=random).masked_fill(silent, 0.0)
            optimizer.step()
        held = {"master": weight.detach()} | optimizer.state[weight]
        found |= {(side, role): held[role].clone().numpy() for role in ROLES}
    return found


@st.composite
def damaged(draw: Any, seeds: int = 1 << 30) -> tuple[Update, dict[tuple[int, str], np.ndarray]]:
    """… some elements of which were overwritten by odd or by any numbers, or scaled; or a tensor of which is lost."""
    size = draw(st.sampled_from([1, 7, 4095, 4096, 4097, 9000, PIECE + 3]))
    update = draw(st.sampled_from(UPDATES))
    values = trained(draw(st.integers(0, seeds)), size, update)
    random = np.random.default_rng(draw(st.integers(0, seeds)))
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=4)):
        where = random.integers(0, size, draw(st.integers(1, 40)))
        how = draw(st.sampled_from(["odd", "bits", "scaled", "negative"]))
        bits = values[name].view(np.uint32)
        if how == "odd":
            bits[where] = random.choice(ODD, len(where))
        elif how == "bits":
            bits[where] = random.integers(0, 1 << 32, len(where), dtype=np.uint32)
        else:
            with np.errstate(over="ignore"):  # bits of before may be near the largest number
                values[name][where] *= np.float32(16 if how == "scaled" else -1)
    lost = draw(st.sampled_from([None, None, None, *NAMES]))
    return update, {name: one for name, one in values.items() if name != lost}


def same(a: Any, b: Any, where: str = "") -> None:
    """Equal integers, texts and worst ratios; sums to within rounding."""
    if is_dataclass(a) and not isinstance(a, type):
        a, b = asdict(a), asdict(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            if key == "du" or key == "dw" or key == "uw" or key == "ab" or key == "xy":  # terms cancel
                squares = {
                    "du": ("dd", "uu"),
                    "dw": ("dd", "ww"),
                    "uw": ("uu", "ww"),
                    "ab": ("aa", "bb"),
                    "xy": ("xx", "yy"),
                }[key]
                size = np.sqrt(a[squares[0]]) * np.sqrt(a[squares[1]])
                np.testing.assert_allclose(a[key], b[key], rtol=1e-10, atol=1e-10 * size if np.isfinite(size) else 0)
            else:
                same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, float) and not where.endswith((".worst", ".ratio")):
        np.testing.assert_allclose(a, b, rtol=1e-10, err_msg=where)
    else:
        assert a == b, where


@needs_numba
@examples(60, slow=3000)
@given(damaged())
def test_a_pair_gives_the_same_counts(case):
    update, values = case
    size = len(next(iter(values.values())))
    with np.errstate(all="ignore"):
        slot = TensorSlot("w", {name: Plain("float32", (size,)) for name in values})
        found = []
        for fast in (False, True):
            fold = PairFold({"w": update}, fast)
            whole = fold.begin(slot)
            for start, stop in ((0, size // 3), (size // 3, size)):  # as two blocks
                part = fold.begin(slot)
                if stop > start:
                    block = {name: one[start:stop] for name, one in values.items()}
                    fold.fold(part, slot, SlotBlock(start, block, block))
                fold.merge(whole, part)
            found.append(whole)
        same(*found)


@needs_numba
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{'AB'[name[0]]}-{name[1]}")
def test_each_odd_value_in_each_tensor(name, update):
    values = trained(1, len(ODD), update)
    values[name].view(np.uint32)[:] = ODD
    slot = TensorSlot("w", {one: Plain("float32", ODD.shape) for one in values})
    for at in range(len(ODD)):  # alone, for the worst hides the others
        block = {one: held[at : at + 1] for one, held in values.items()}
        found = []
        for fast in (False, True):
            fold = PairFold({"w": update}, fast)
            one = fold.begin(slot)
            fold.fold(one, slot, SlotBlock(at, block, block))
            found.append(one)
        same(*found)


@needs_numba
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64"])
def test_other_types_of_moments_and_weights(kind):
    for seed, update in enumerate(UPDATES):
        values = trained(seed, 5000, update)
        rounded = {name: torch.from_numpy(one).to(getattr(torch, kind)) for name, one in values.items()}
        numbers = {n: (t.double() if kind == "float64" else t.float()).numpy() for n, t in rounded.items()}
        slot = TensorSlot("w", {name: Plain(kind, (5000,)) for name in values})
        found = []
        for fast in (False, True):
            fold = PairFold({"w": update}, fast)
            one = fold.begin(slot)
            fold.fold(one, slot, SlotBlock(0, numbers, numbers))
            found.append(one)
        assert found[0].count == 5000
        same(*found)


@needs_numba
def test_rulers_and_first_updates_are_seen_by_both():
    """So that equality above is not that of two empty sums."""
    values = trained(3, 6000, UPDATES[1])
    slot = TensorSlot("w", {name: Plain("float32", (6000,)) for name in values})
    values[1, "master"] = (values[0, "master"] * np.float32(1 - 1.1e-4) - np.float32(1.02e-3)).astype(np.float32)
    for fast in (False, True):
        fold = PairFold({"w": UPDATES[1]}, fast)
        one: PairState = fold.begin(slot)
        fold.fold(one, slot, SlotBlock(0, values, values))
        assert 900 < one.ruler.count < 1500 and one.same > 5900 and one.replay.count == 6000 and one.reach.of == 6000


@needs_numba
@examples(80, slow=5000)
@given(st.data())
def test_one_checkpoint_gives_the_same_numbers_bit_for_bit(data):
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    size = data.draw(st.sampled_from([1, 8, 4095, 4096, 4099, PIECE + 5]))
    how = data.draw(st.sampled_from(["normal", "bits", "constant"]))
    bits = {
        "normal": random.standard_normal(size).astype(np.float32).view(np.uint32),
        "bits": random.integers(0, 1 << 32, size, dtype=np.uint32),
        "constant": np.full(size, random.choice(ODD), np.uint32),
    }[how].copy()
    for _ in range(data.draw(st.integers(0, 3))):
        bits[random.integers(0, size, 5)] = random.choice(ODD, 5)
    if data.draw(st.booleans()):
        bits[: size // 2] &= np.uint32(data.draw(st.sampled_from([0xFFFF0000, 0xFFFFE000])))
    values, start = bits.view(np.float32), data.draw(st.integers(0, 1 << 40))
    with np.errstate(all="ignore"):
        kind = data.draw(st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn"]))
        weight = torch.from_numpy(values.copy()).to(by_name(kind).torch)
        weight = weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.itemsize]).numpy()
        weight = weight.view(by_name(kind).raw).copy()
        weight[random.integers(0, size, 3)] += weight.dtype.type(data.draw(st.integers(0, 100)))
        v = np.square(values) * random.choice(np.array([0.1, 1, 3, 100], np.float32), size)
        master = data.draw(st.booleans())
        held = {"param": weight, "exp_avg": bits, "exp_avg_sq": v.view(np.uint32)} | (
            {"master": bits} if master else {}
        )
        numbers = {role: one.view(np.float32) for role, one in held.items() if role != "param"}
        numbers["param"] = Decoder(by_name(kind)).numbers(weight.view(by_name(kind).numpy)).copy()
        kinds = {(0, role): Plain(kind if role == "param" else "float32", (size,)) for role in held}
        slot, found = TensorSlot("w", kinds), []
        block = [{(0, role): one for role, one in side.items()} for side in (held, numbers)]
        for fast in (False, True):
            fold = OneFold((0.9, 0.95), laws.bound((0.9, 0.95)), fast=fast)
            state = fold.begin(slot)
            fold.fold(state, slot, SlotBlock(start, *block))
            found.append(state)
        assert found[0].low or kind == "float32"
        total = [one.numbers["exp_avg_sq"].total for one in found]
        np.testing.assert_allclose(*total, rtol=1e-10)
        for one in found:
            one.numbers["exp_avg_sq"].total = 0.0
        assert repr(found[0]) == repr(found[1])
        for role in held:
            assert (found[0].numbers[role].octaves == found[1].numbers[role].octaves).all()


@needs_numba
@pytest.mark.parametrize("shape, block", [((300, 700), 93), ((16, 16), 16), ((40, 4099), 15), ((2, 20, 33), 40)])
@pytest.mark.parametrize("idle", [False, True])
def test_sums_by_row_and_column_agree(shape, block, idle):
    random = np.random.default_rng(5)
    width = shape[-1]
    weights = random.standard_normal(shape).astype(np.float32).reshape(-1, width)
    v = np.exp(random.standard_normal((len(weights), 1)) + random.standard_normal((len(weights), width)))
    v = v.astype(np.float32)
    v[7, 3] *= 1 << 20
    if idle:
        v[5:9], weights[2, 3] = 0, np.inf
    slot = TensorSlot("layers.0.q_proj.weight", {(0, "param"): Plain("float32", shape)})
    found = []
    for fast in (False, True):
        sums = Sums.of(slot)
        assert sums is not None
        for first in range(0, len(weights), block):
            part = Sums.of(slot)
            here = slice(first, first + block)
            start = SlotBlock(first * width, {}, {})
            part.take(start, weights[here].reshape(-1), v[here].reshape(-1), fast=fast)
            sums.merge(part)
        found.append(sums.close(slot.fqn))
    a, b = found
    assert (a.at, a.idle, a.shape) == (b.at, b.idle, b.shape) and (a.drawn is None) == (b.drawn is None) == idle
    assert idle == bool(a.idle) and (idle or a.at == 7 * width + 3)
    for name in ("above", "next", "spread", "rows"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-4, err_msg=name)
    if a.drawn is not None and b.drawn is not None:
        np.testing.assert_allclose(
            [a.drawn.rows, a.drawn.columns, a.drawn.tails], [b.drawn.rows, b.drawn.columns, b.drawn.tails], atol=1e-3
        )


@needs_numba
@pytest.mark.parametrize("fault", ["h0_exact", "f03_drop_v", "f12_rope_layout", "c13_nan_m"])
def test_a_case_of_the_lab_has_the_same_signs(fault):
    case = lab.case(fault, SMALL, "dcp", k=1)
    assert case.after is not None
    before, echo, after = (state(path) for path in (case.before, case.echo, case.after))
    pair = Evidence(before, after).pair("before", "after")
    found = [check_pair(pair, fast=fast, threads=threads) for fast, threads in ((False, 1), (True, 1), (True, 3))]
    alone = [check_one(echo, before, fast=fast, threads=threads) for fast, threads in ((False, 1), (True, 2))]
    for other in found[1:]:
        assert [sign.rule for sign in other.signs] == [sign.rule for sign in found[0].signs]
        for fqn, sums in other.states.items():
            same(found[0].states[fqn], sums, fqn)
    assert alone[0].signs == alone[1].signs
    assert repr(found[1].states) == repr(found[2].states), "a result depends on the number of threads"


def test_without_numba_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    before = state(lab.case("h0_exact", SMALL, "dcp", k=1).before)
    with pytest.raises(MissingExtraError, match="numba"):
        check_one(before, fast=True)
    assert not check_one(before).signs


@examples(60, slow=3000)
@given(st.data())
def test_boxes_read_together_are_the_boxes_of_the_dense_array(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("case")
    dense, catalog = any_stored(data, folder, overlaps=2)
    tensor = lazy(folder, catalog, data.draw(st.sampled_from(["mmap", "pread"])))
    wanted = [data.draw(boxes(dense.shape)) for _ in range(data.draw(st.integers(1, 4)))]
    offsets, sizes = (np.array([one[k] for one in wanted], np.int64).reshape(len(wanted), dense.ndim) for k in (0, 1))
    count = 0
    for (low, size), found in zip(wanted, tensor.boxes(offsets, sizes), strict=True):
        want = dense[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
        assert found.shape == want.shape and found.dtype == want.dtype and (found == want).all()
        assert not found.flags.writeable
        count += 1
    assert count == len(wanted)
    assert len(list(read_boxes(tensor._payloads, 0, offsets, sizes))) == count


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """64 MB of a pair of 270 MB at most: blocks of every tensor, a few threads', and what numpy makes of them."""
    size = (2400, 4096)
    kept = {}
    for name, step in (("a", 100.0), ("b", 101.0)):
        random = torch.Generator().manual_seed(int(step))
        m = torch.randn(size, generator=random)
        held = {"exp_avg": m * 0.1, "exp_avg_sq": m * m, "master_param": m, "step": torch.tensor(step)}
        group = {"params": [0], "param_names": ["w"], "betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3}
        saved = {"model": {"w": m.bfloat16()}, "optimizer": {"state": {0: held}, "param_groups": [group]}, "step": step}
        torch.save(saved, tmp_path / f"{name}.pt")
        kept[name] = state(tmp_path / f"{name}.pt")
        del m, held, saved
    pair = Evidence(kept["a"], kept["b"]).pair("before", "after")
    for fast in (False, True) if HAS_NUMBA else (False,):
        check_pair(pair, threads=1, fast=fast)  # whatever is made once
        assert peak_of(lambda fast=fast: check_pair(pair, threads=4, fast=fast)) < 64 << 20, fast
        assert peak_of(lambda fast=fast: check_one(kept["a"], threads=4, fast=fast)) < 64 << 20, fast


def peak_of(run: Callable[[], object]) -> int:
    """Anonymous bytes above those at the start, at most."""
    base = peak = anonymous()
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run()
    finally:
        stop.set()
        thread.join()
    return peak - base


def anonymous() -> int:
    """Bytes of anonymous memory of this process (Linux)."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10
    except OSError:
        pytest.skip("anonymous memory is read from Linux' /proc")
