"""Single-tensor views: numbers equal to numpy's on the whole tensor, whatever the type, shape and layout."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import workbench as wb
from workbench.analysis import blocks as blocks_module
from workbench.analysis.heatmap import heatmap
from workbench.analysis.summary import histogram, profile, summarise
from workbench.core.decoding.floats import fp8_table
from workbench.tensor import LazyTensor

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.fixture
def lazy(tmp_path: Path):
    """A function that stores one tensor and opens it again."""

    def store(value: torch.Tensor) -> LazyTensor:
        path = tmp_path / "one.safetensors"
        save_file({"x": value.contiguous()}, path)
        return wb.open(path)["x"]

    return store


@pytest.mark.parametrize("name", FLOAT8)
def test_8_bit_tables_are_those_of_torch(name: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).to(torch.float32).numpy()
    assert np.array_equal(fp8_table(name), every, equal_nan=True)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", *FLOAT8[:4], "int8", "uint8", "int16", "int32", "int64", "bool"],
)
@pytest.mark.parametrize("shape", [(), (1,), (300_001,), (40, 17), (3, 1, 211, 7), (2, 140_000)])
def test_summary_is_numpys_of_the_whole(lazy, dtype: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    value = (torch.randn(shape, generator=generator) * 40).clamp(-100, 100)
    if dtype in ("uint8", "bool"):
        value = value.abs()
    value = value.to(getattr(torch, dtype))
    truth = value.to(torch.float64).numpy().reshape(-1)
    s = summarise(lazy(value))
    assert (s.numel, s.seen, s.exact, s.kind) == (truth.size, truth.size, True, "numbers")
    assert (s.min, s.max, s.zero) == (truth.min(), truth.max(), int((truth == 0).sum()))
    assert s.mean == pytest.approx(truth.mean(), rel=1e-12, abs=1e-12)
    assert s.std == pytest.approx(truth.std(), rel=1e-10, abs=1e-12)
    h = histogram(lazy(value), 16)
    assert h is not None and h.exact
    assert np.array_equal(h.counts, np.histogram(truth, h.edges)[0])


def test_what_is_not_finite_is_counted_and_left_out(lazy) -> None:
    value = torch.randn(1000, 300, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    value[17, 4] = value[999, 299] = float("nan")
    value[500, 0] = float("inf")
    value[3, 3] = value[4, 4] = value[5, 5] = float("-inf")
    truth = value.double().numpy()
    truth = truth[np.isfinite(truth)]
    s = summarise(lazy(value))
    assert (s.nan, s.posinf, s.neginf, s.finite) == (2, 1, 3, truth.size)
    assert (s.min, s.max) == (truth.min(), truth.max())
    assert s.std == pytest.approx(truth.std(), rel=1e-12)


def test_nothing_finite_and_nothing_at_all(lazy) -> None:
    for value in (torch.full((5,), float("nan")), torch.empty(0, 4)):
        s = summarise(lazy(value))
        assert (s.min, s.max, s.mean, s.std) == (None, None, None, None)
        assert s.exact and histogram(lazy(value)) is None


def test_64_bit_integers_are_exact(lazy) -> None:
    value = torch.tensor([2**63 - 1, -(2**63), 2**62 + 1, 2**62 + 3, 0])
    s = summarise(lazy(value))
    assert (s.min, s.max) == (-(2**63), 2**63 - 1)
    assert s.mean == sum(value.tolist()) / 5
    near = torch.tensor([2**62 + 1, 2**62 + 2, 2**62 + 3])
    assert summarise(lazy(near)).std == pytest.approx(np.std([1, 2, 3]))  # float64 could not tell them apart
    unsigned = torch.tensor([2**64 - 1, 2**64 - 3], dtype=torch.uint64)
    s = summarise(lazy(unsigned))
    assert (s.min, s.max, s.std) == (2**64 - 3, 2**64 - 1, 1.0)


def test_complex_numbers_by_magnitude(lazy) -> None:
    value = torch.tensor([3 + 4j, -6 + 8j, 0j, complex("nan"), complex(0, float("inf"))])
    s = summarise(lazy(value))
    assert s.kind == "magnitudes"
    assert (s.min, s.max, s.zero, s.nan, s.posinf) == (0.0, 10.0, 1, 1, 1)


def test_huge_and_tiny_numbers_do_not_overflow(lazy) -> None:
    s = summarise(lazy(torch.tensor([1.5e308, -1.5e308, 1e308], dtype=torch.float64)))
    truth = np.array([1.5, -1.5, 1.0])
    assert s.mean == pytest.approx(truth.mean() * 1e308) and s.std == pytest.approx(truth.std() * 1e308)
    for value in ([1.7e308, -1.7e308, 0.0], [5e-324, 0.0, 1e-323], [1e20, 1e20]):
        h = histogram(lazy(torch.tensor(value, dtype=torch.float64)), 8)
        assert h is not None and np.isfinite(h.edges).all() and h.counts.sum() == len(value)


def test_packed_types_have_no_numbers(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}'
    path = tmp_path / "f4.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    tensor = wb.open(path)["x"]
    s = summarise(tensor)
    assert (s.kind, s.seen, s.exact, s.min) == ("raw bytes", 0, False, None)
    assert heatmap(tensor).values.size == 0


def test_a_sample_says_that_it_is_one_and_reads_little(lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(3000, 1000, generator=torch.Generator().manual_seed(3))
    tensor = lazy(value)
    read = []
    original = blocks_module.MatrixBlocks._read

    def count(self, number):
        block = original(self, number)
        read.append(len(block.values))
        return block

    monkeypatch.setattr(blocks_module.MatrixBlocks, "_read", count)
    found = profile(tensor, limit=100_000)
    assert not found.summary.exact and found.histogram is not None and not found.histogram.exact
    assert found.summary.seen == sum(read) == found.histogram.counts.sum()  # once, for both
    assert 50_000 <= sum(read) <= 110_000
    assert found.summary.mean == pytest.approx(0, abs=0.02) and found.summary.std == pytest.approx(1, abs=0.02)


def test_memory_stays_bounded(lazy) -> None:
    tensor = lazy(torch.ones(64, 1 << 20, dtype=torch.bfloat16))  # 128 MiB
    tracemalloc.start()
    try:
        summarise(tensor)
        histogram(tensor)
        heatmap(tensor)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    seed=st.integers(0, 99),
    bad=st.integers(0, 2),
)
def test_heat_map_shows_the_extreme_of_every_cell(tmp_path_factory, shape, rows, cols, seed, bad) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    for _ in range(bad):
        value.reshape(-1)[int(torch.randint(value.numel(), (1,), generator=generator))] = float("nan")
    path = tmp_path_factory.mktemp("heat") / "x.safetensors"
    save_file({"x": value}, path)
    heat = heatmap(wb.open(path)["x"], rows, cols, top=4)
    dense = value.numpy().reshape(-1, shape[-1] if shape else 1)
    assert heat.shape == dense.shape and heat.row_edges[-1] == len(dense) and heat.col_edges[-1] == dense.shape[1]
    for r in range(len(heat.row_edges) - 1):
        for c in range(len(heat.col_edges) - 1):
            cell = dense[heat.row_edges[r] : heat.row_edges[r + 1], heat.col_edges[c] : heat.col_edges[c + 1]]
            if np.isnan(cell).any():
                assert np.isnan(heat.values[r, c])
            else:
                assert heat.values[r, c] == cell.reshape(-1)[np.abs(cell).argmax()]
    flat = value.numpy().reshape(-1)
    order = sorted(range(flat.size), key=lambda i: (not np.isnan(flat[i]), -abs(np.nan_to_num(flat[i])), i))[:4]
    assert [index for index, _ in heat.worst] == [tuple(map(int, np.unravel_index(i, value.shape))) for i in order]
    for index, number in heat.worst:
        assert np.array_equal(number, value[index].item(), equal_nan=True)


def test_heat_map_of_many_blocks_and_small_blocks(lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(50, 333, generator=torch.Generator().manual_seed(5)).to(torch.float64)
    value[49, 332] = -77.0
    value[0, 5] = 1e300  # beyond float32: shown as its largest number, listed as it is
    monkeypatch.setattr("workbench.analysis.blocks.READ", 700)
    monkeypatch.setattr("workbench.analysis.heatmap.BLOCK", 100)
    heat = heatmap(lazy(value), 7, 5, top=2)
    assert heat.values[-1, -1] == -77.0 and heat.values[0, 0] == np.finfo(np.float32).max
    assert heat.worst == [((0, 5), 1e300), ((49, 332), -77.0)]


def test_smallest_integer_is_the_worst(lazy) -> None:
    for dtype in (torch.int8, torch.int64):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        heat = heatmap(lazy(torch.tensor([[0, high], [low, 3]], dtype=dtype)), top=3)
        assert heat.worst == [((1, 0), low), ((0, 1), high), ((1, 1), 3)]


def test_a_hole_is_an_error_not_zeros(samples: Path, tmp_path: Path) -> None:
    from workbench.core.catalog import Catalog

    ckpt = wb.open(samples / "dcp_fsdp2")
    key = "model.model.embed_tokens.weight"
    position = ckpt.catalog.index[key]
    first = ckpt.catalog.rows_of(position).start
    catalog: Catalog = ckpt.catalog
    catalog.replica[first] = 1  # the first copy of these rows is stored nowhere any more
    with pytest.raises(wb.errors.HoleError, match="embed_tokens"):
        summarise(ckpt[key])
    assert "has a hole" in repr(ckpt[key])
