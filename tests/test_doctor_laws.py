"""The laws hold for torch's own optimizers, whatever the gradients, and not for states that were tampered with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.lab.optimizers import FusedOnCuda
from workbench.doctor.laws import bounds as laws
from workbench.doctor.laws import exact as laws_exact

N = 96


def run(
    betas: tuple[float, float],
    steps: list[int],
    *,
    seed: int = 0,
    lr: float = 1e-2,
    decay: float = 0.1,
    kind: Any = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    tail: float = 1.0,
    clip: float = 0.0,
    amsgrad: bool = False,
) -> list[dict[str, Any]]:
    """States of torch's optimizer after those numbers of steps, on gradients with wide tails, zeros and sparse rows."""
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(rng.normal(size=N)).to(dtype).requires_grad_(True)
    optimizer = kind([w], lr=lr, betas=betas, eps=1e-8, weight_decay=decay, amsgrad=amsgrad)
    scale = 10.0 ** rng.uniform(-12, 4, size=N)
    rare = rng.random(N) < 0.2
    found = []
    for number in range(1, max(steps) + 1):
        g = rng.standard_t(1.1, size=N) * scale * tail + 0.3 * scale
        g[rare & (rng.random(N) < 0.9)] = 0.0
        g[:4] = 0.0  # never a gradient
        w.grad = torch.from_numpy(g).to(dtype)
        if clip:
            torch.nn.utils.clip_grad_norm_([w], clip)
        optimizer.step()
        if number in steps:
            state = optimizer.state[w]
            found.append(
                {
                    "w": w.detach().numpy().copy(),
                    "m": state["exp_avg"].numpy().copy(),
                    "v": state["exp_avg_sq"].numpy().copy(),
                    "step": number,
                }
            )
    return found


BETAS = st.tuples(st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95]), st.sampled_from([0.95, 0.98, 0.99, 0.999]))


@settings(max_examples=60, deadline=None)
@given(
    betas=BETAS,
    first=st.integers(1, 60),
    k=st.integers(1, 120),
    seed=st.integers(0, 10**6),
    lr=st.sampled_from([1e-5, 1e-3, 0.1]),
    decay=st.sampled_from([0.0, 0.1]),
    clip=st.sampled_from([0.0, 1.0]),
    kind=st.sampled_from([torch.optim.AdamW, torch.optim.Adam, FusedOnCuda]),
    amsgrad=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(betas=(0.9, 0.999), first=2, k=1, seed=0, lr=1e-3, decay=0.1, clip=0.0, kind=FusedOnCuda, amsgrad=False,
         dtype=torch.float32)  # fmt: skip
def test_no_run_of_torchs_optimizers_breaks_a_law(betas, first, k, seed, lr, decay, clip, kind, amsgrad, dtype):
    if kind is FusedOnCuda:
        dtype = torch.float32
    a, b = run(
        betas, [first, first + k], seed=seed, lr=lr, decay=decay, clip=clip, kind=kind, amsgrad=amsgrad, dtype=dtype
    )
    name = str(dtype).removeprefix("torch.")
    for state in (a, b):
        assert laws.state_bound(state["m"], state["v"], laws.bound(betas), betas, name).broken == 0
    assert laws.floor(a["v"], b["v"], betas[1], k, name).broken == 0
    assert laws.transition(a["m"], a["v"], b["m"], b["v"], betas, k, name).broken == 0
    factor = 1.0 if kind is torch.optim.Adam else (1 - lr * decay) ** k
    most = laws.moved_by(betas, lr, k, first, name)
    assert laws.reach(a["w"], b["w"], most, (factor, factor), k, name).broken == 0
    assert laws.reach(a["w"], b["w"], laws.moved_by(betas, lr, k, None, name), (0.0, 1.0), k, name).broken == 0
    if kind is not torch.optim.Adam:
        silent = np.arange(N) < 4
        line = laws_exact.ruler(a["w"], b["w"], silent)
        assert line.slope == pytest.approx(factor, rel=1e-6 * k) and line.rest < 1e-6 * k


@settings(max_examples=40, deadline=None)
@given(
    betas=BETAS,
    first=st.integers(1, 200),
    seed=st.integers(0, 10**6),
    lr=st.sampled_from([1e-4, 1e-2]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_one_update_is_replayed_and_its_learning_rate_read_off(betas, first, seed, lr, decay):
    a, b = run(betas, [first, first + 1], seed=seed, lr=lr, decay=decay)
    sums = laws_exact.replay(a["w"], b["w"], b["m"], b["v"], betas, 1e-8, first + 1)
    found = sums.fit(decay)
    assert found is not None
    assert found[2] <= max(2e-6, sums.noise("float32")) and found[0] == pytest.approx(lr, rel=1e-3 + found[2])
    moved = a["w"].copy()
    moved[7] += 30 * lr
    broken = laws_exact.replay(moved, b["w"], b["m"], b["v"], betas, 1e-8, first + 1).fit(decay)
    assert broken is not None and broken[2] > 0.2


def test_the_constant_is_the_smallest():
    """Gradients ∝ (β1/β2)^j attain it; the paper's (1−β1)/√(1−β2) is far below."""
    for betas in ((0.9, 0.95), (0.9, 0.999), (0.8, 0.95)):
        m = v = 0.0
        steps = 400
        for i in range(1, steps + 1):
            g = (betas[0] / betas[1]) ** (steps - i)
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        assert m * m / v == pytest.approx(laws.bound(betas, steps), rel=1e-9)
        assert laws.bound(betas, 10**6) == pytest.approx(laws.bound(betas))
    assert math.sqrt(laws.bound((0.9, 0.95))) == pytest.approx(1.1650, abs=1e-4)
    assert math.sqrt(laws.bound((0.9, 0.999))) == pytest.approx(7.2703, abs=1e-4)
    assert laws.bound((0.99, 0.9)) == math.inf and laws.bound((0.9, 0.81), 7) == pytest.approx(7 * 0.01 / 0.19)
    assert laws.bias_factor((0.9, 0.999), 10) == pytest.approx(0.153, abs=1e-3)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("k", [1, 7, 30])
def test_tampered_states_break_them(betas, k):
    a, b = run(betas, [50, 50 + k])
    limit = laws.bound(betas)
    turned = np.roll(b["v"], 1)
    assert laws.transition(a["m"], a["v"], b["m"], turned, betas, k).broken > N // 4
    assert laws.floor(a["v"], turned, betas[1], k).broken > N // 8
    assert laws.floor(a["v"], np.zeros_like(b["v"]), betas[1], k).broken > N // 2
    assert laws.state_bound(b["m"], np.zeros_like(b["v"]), limit, betas).broken > N // 2
    flipped = b["v"].copy()
    flipped.view(np.uint32)[9] ^= np.uint32(1 << 31)
    found = laws.state_bound(b["m"], flipped, limit, betas)
    assert (found.broken, found.at) == (1, 9)
    wrong = (betas[0], 0.99)
    assert k > 7 or laws.transition(a["m"], a["v"], b["m"], b["v"], wrong, k).broken > N // 8
    w = b["w"].copy()
    w[5] += 1.1 * laws.moved_by(betas, 1e-2, k, 50) + abs(b["w"][5] - a["w"][5])
    found = laws.reach(a["w"], w, laws.moved_by(betas, 1e-2, k, 50), ((1 - 1e-3) ** k,) * 2, k)
    assert (found.broken, found.at) == (1, 5) and found.worst > 1


def test_a_changed_beta_keeps_the_larger_bound():
    for one, other in (((0.9, 0.95), (0.9, 0.999)), ((0.9, 0.999), (0.9, 0.95))):
        w = torch.zeros(N, requires_grad=True)
        optimizer = torch.optim.AdamW([w], betas=one)
        for number in range(60):
            if number == 40:
                optimizer.param_groups[0]["betas"] = other
            w.grad = torch.full((N,), 1.09**number)
            optimizer.step()
            state = optimizer.state[w]
            found = laws.state_bound(
                state["exp_avg"].numpy(), state["exp_avg_sq"].numpy(), max(map(laws.bound, (one, other))), one
            )
            assert found.broken == 0


def test_moments_of_bfloat16_keep_the_floor_and_leave_the_rest_unsaid():
    w = torch.zeros(N, requires_grad=True, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([w], betas=(0.9, 0.95))
    kept = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        w.grad = torch.randn(N, generator=generator).bfloat16()
        optimizer.step()
        kept.append(optimizer.state[w]["exp_avg_sq"].float().numpy().copy())
    for k in (1, 5, 20):
        assert laws.floor(kept[-1 - k], kept[-1], 0.95, k, "bfloat16").broken == 0
        assert laws.floor(kept[-1 - k], kept[-1] * 0.3, 0.95, k, "bfloat16").broken > 0
    assert "bfloat16" in (laws.has_slack((0.9, 0.95), "bfloat16") or "")
    assert laws.has_slack((0.9, 0.999), "float32") is None and laws.has_slack((0.9, 0.95), "uint8")


def test_masters_round_to_their_weights_as_torch_rounds():
    for dtype, half in ((torch.bfloat16, False), (torch.float16, True)):
        master = torch.randn(5000, generator=torch.Generator().manual_seed(1))
        weight = master.to(dtype)
        bits = master.numpy().view(np.uint32)
        kind = "float16" if half else "bfloat16"
        assert laws_exact.rounding(bits, weight.view(torch.int16).numpy().view(np.uint16), half) == (0, 0)
        odd = weight.view(torch.int16).numpy().view(np.uint16).copy()
        odd[17] += 3
        assert laws_exact.rounding(bits, odd, half) == (1, 3)
        assert laws_exact.low_bits(bits, kind)[0] < 15
        again = weight.float().numpy().view(np.uint32)
        low, full = laws_exact.low_bits(again, kind)
        assert low == full > 4900


def test_a_fresh_optimizer_moves_every_weight_by_the_learning_rate():
    (one,) = run((0.9, 0.95), [1], lr=1e-2, decay=0.0)
    start = np.random.default_rng(0).normal(size=N).astype(np.float32)
    assert laws_exact.same_step(start, one["w"], (1e-2, 1e-2), 0.0) > 0.5 * N
    a, b = run((0.9, 0.95), [50, 51], lr=1e-2, decay=0.0)
    assert laws_exact.same_step(a["w"], b["w"], (1e-2, 1e-2), 0.0) < 0.2 * N
