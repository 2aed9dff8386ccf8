"""Casts against torch's own, over every pattern of 16 bits and random ones of 32 and 64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench import errors
from workbench.core.dtypes import by_name
from workbench.export.casts import FLOATS, SOURCES, CastError, cast, target
from workbench.tensor import as_torch


def patterns(name: str) -> np.ndarray:
    """Bits of a type: all of 16; of the wider ones random bits, plus the neighbourhoods of every bfloat16 tie."""
    dtype = by_name(name)
    if dtype.bits == 16:
        return np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(5)
    if dtype.bits == 32:
        ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000)
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        near = [ties - 1, ties, ties + 1, halves, halves + 0x1000, halves + 0x0FFF, halves + 0x1001]
        return np.concatenate([rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32), *near]).astype(np.uint32)
    small = patterns("float32").view(np.float32)
    small = np.concatenate([small[np.isfinite(small)].astype(np.float64), [np.inf, -np.inf, np.nan, 1e300, -1e39]])
    return np.concatenate(
        [small.view(np.uint64), small.view(np.uint64) + 1, rng.integers(0, 1 << 63, 1 << 16).view("u8")]
    )


@pytest.mark.parametrize("new", FLOATS)
@pytest.mark.parametrize("old", SOURCES)
def test_every_cast_is_torchs_and_counts_what_it_changes(old, new):
    source, wanted = by_name(old), by_name(new)
    raw = patterns(old)
    got, error = cast(raw, source, wanted)
    truth = as_torch(raw.copy(), source).to(wanted.torch)
    ours = as_torch(got, wanted)
    nan = torch.isnan(truth)
    assert torch.equal(torch.isnan(ours), nan)
    carrier = torch.int32 if wanted.bits == 32 else torch.int16
    same = ours.view(carrier) == truth.view(carrier)
    assert bool((same | nan).all()), (raw[~(same | nan).numpy()][:4], old, new)

    before, after = as_torch(raw.copy(), source).double(), truth.double()
    differ = (before != after) & ~(torch.isnan(before) & torch.isnan(after))
    finite = differ & torch.isfinite(after)
    assert error.elements == len(raw)
    assert error.changed == int(differ.sum())
    assert error.overflowed == int((differ & torch.isfinite(before) & torch.isinf(after)).sum())
    assert error.max_abs == _largest(before - after, finite)


def _largest(gaps: torch.Tensor, where: torch.Tensor) -> float:
    return float(gaps[where].abs().max()) if bool(where.any()) else 0.0


@pytest.mark.parametrize("new", FLOATS)
@pytest.mark.parametrize("old", SOURCES)
def test_the_cost_of_finite_values_is_counted_alike(old, new):
    source, wanted = by_name(old), by_name(new)
    raw = patterns(old)
    values = as_torch(raw.copy(), source)
    raw = raw[torch.isfinite(values.to(wanted.torch)).numpy()]
    got, error = cast(raw, source, wanted)
    gaps = (as_torch(raw.copy(), source).double() - as_torch(got, wanted).double()).abs()
    assert (error.changed, error.overflowed, error.max_abs) == (int((gaps > 0).sum()), 0, float(gaps.max()))


@pytest.mark.parametrize("new", ["bfloat16", "float16"])
def test_nan_keep_their_sign_and_never_become_infinite(new):
    raw = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    got, error = cast(raw, by_name("float32"), by_name(new))
    values = as_torch(got, by_name(new)).double()
    assert bool(torch.isnan(values).all()) and error.changed == 0
    assert (got >> 15).tolist() == (raw >> 31).tolist()


def test_errors_of_parts_add_up():
    total = CastError(3, 2, 0, 0.5)
    total.merge(CastError(4, 1, 1, 0.25))
    assert total == CastError(7, 3, 1, 0.5)


def test_what_can_be_asked_for():
    assert [target(name).name for name in ("bf16", "f16", "f32", torch.bfloat16, "half", "F32")] == [
        "bfloat16",
        "float16",
        "float32",
        "bfloat16",
        "float16",
        "float32",
    ]
    for name in ("float64", "float8_e4m3fn", "int8", "no such"):
        with pytest.raises(errors.UsageError):
            target(name)
