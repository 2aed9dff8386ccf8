"""Statistics of checkpoints against torch over their tensors; the table on a terminal; results kept between runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests.test_moments import ENGINES
from tests.test_reading import stored
from workbench import errors
from workbench.analysis import stats as module
from workbench.analysis.stats import NUMBERS, stats
from workbench.cli import main
from workbench.cli import stats as cli_stats
from workbench.views.lines import laid_out
from workbench.views.names import columns
from workbench.views.stats import anomaly_words, stats_lines

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = sorted(
    path for path in (ROOT / "sample_ckpts").iterdir() if path.is_dir() and path.name not in ("make", "logs")
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


def dense(ckpt, key):
    """The finite values as float64 and the whole as stored, by torch."""
    whole = ckpt[key].torch().reshape(-1)
    values = whole.to(torch.complex128).abs() if whole.is_complex() else whole.double()
    values = values.numpy()
    return values[np.isfinite(values)], values


def agrees(row, finite, values):
    assert row["zero"] == (values == 0).sum() and row["nan"] == np.isnan(values).sum()
    assert row["posinf"] == (values == np.inf).sum() and row["neginf"] == (values == -np.inf).sum()
    if not len(finite):
        assert all(np.isnan(row[name]) for name in ("min", "max", "mean", "std", "absmean"))
        assert row["norm"] == row["rms"] == np.inf or (np.isnan(row["norm"]) and np.isnan(row["rms"]))
        return
    if values.dtype != object:
        assert (row["min"], row["max"]) == (finite.min(), finite.max())
    size = np.abs(finite).mean()
    assert row["mean"] == pytest.approx(finite.mean(), abs=1e-6 * size)
    assert row["std"] == pytest.approx(finite.std(), rel=1e-6, abs=1e-12 * size)
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are in both, as torch has it
        assert row["norm"] == pytest.approx(np.sqrt((values**2).sum()), rel=1e-6, nan_ok=True)
        assert row["rms"] == pytest.approx(np.sqrt((values**2).mean()), rel=1e-6, nan_ok=True)
    assert row["absmean"] == pytest.approx(size, rel=1e-6)


def openable(folder):
    try:
        return wb.open(folder, cache=False)
    except errors.NotACheckpointError:
        return None


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda path: path.name)
def test_every_tensor_of_the_samples(folder):
    ckpt = openable(folder)
    if ckpt is None:
        ckpt = wb.open(next(path for path in sorted(folder.iterdir()) if openable(path) is not None), cache=False)
    frame = stats(ckpt, quantiles=True)
    assert frame["key"].tolist() == list(ckpt) and frame["error"].isna().all()
    plain = stats(ckpt)
    for at, row in enumerate(frame.to_dict("records")):
        if ckpt[row["key"]].element.torch_name is None:
            continue
        finite, values = dense(ckpt, row["key"])
        agrees(row, finite, values)
        agrees(plain.iloc[at], finite, values)
        if len(finite):
            quantiles = np.quantile(finite, [0.01, 0.25, 0.5, 0.75, 0.99])
            got = [row[name] for name in ("q01", "q25", "q50", "q75", "q99")]
            wide = ckpt[row["key"]].element.bits > 16
            spread = 0.004 * np.abs(finite).max() if wide else 1e-12
            np.testing.assert_allclose(got, quantiles, rtol=1e-12, atol=spread)


def test_modules_are_the_sum_of_their_tensors():
    ckpt = wb.open(ROOT / "sample_ckpts" / "hf_llama_bf16_sharded", cache=False)
    frame = stats(ckpt, "module").set_index("module")
    for path, row in frame.iterrows():
        keys = [key for key in ckpt if not path or key.startswith(f"{path}.")]
        parts = [dense(ckpt, key)[1] for key in keys]
        whole = np.concatenate(parts)
        assert row["tensors"] == len(keys) and row["numel"] == len(whole)
        agrees(row, whole[np.isfinite(whole)], whole)
    assert "" in frame.index and "model.layers.0" in frame.index and frame.index.is_unique
    assert "model.embed_tokens.weight" not in frame.index  # a tensor


@pytest.mark.parametrize("by", ["tensor", "shard", "module"])
@pytest.mark.parametrize("quantiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_over_nan_is_nan(by, quantiles, dtype, tmp_path):
    values = torch.ones(8, dtype=dtype)
    values[2] = torch.nan
    large = torch.ones(8, dtype=dtype)
    large[1] = -torch.inf
    save_file(
        {"m.bad": values, "n.inf": large, "o.fine": torch.ones(4, dtype=dtype), "p.all": values[2:3].clone()},
        tmp_path / "model.safetensors",
    )
    frame = stats(wb.open(tmp_path), by, quantiles=quantiles and by != "module")
    rows = frame.set_index("module" if by == "module" else "key")
    for name in ("norm", "rms"):
        names = ("m", "n", "o", "p") if by == "module" else ("m.bad", "n.inf", "o.fine", "p.all")
        bad, large, fine, only = (rows.loc[one, name] for one in names)
        assert np.isnan(bad) and large == np.inf and fine == (2 if name == "norm" else 1) and np.isnan(only)
    assert rows.iloc[0]["nan"] == (2 if by == "module" else 1)
    assert by != "module" or np.isnan(rows.loc["", "norm"])


def test_modules_count_integers_but_do_not_mix_them_in(tmp_path):
    save_file(
        {"m.w": torch.tensor([1.0, 3.0]), "m.steps": torch.tensor([10_000]), "n.ids": torch.arange(4)},
        tmp_path / "model.safetensors",
    )
    frame = stats(wb.open(tmp_path), "module").set_index("module")
    assert frame.loc["m", "numel"] == 3 and frame.loc["m", "max"] == 3 and frame.loc["m", "mean"] == 2
    assert frame.loc["n", "numel"] == 4 and np.isnan(frame.loc["n", "max"])
    assert frame.loc["", "tensors"] == 3 and frame.loc["", "std"] == 1


def test_shards_are_told_apart_and_elements_are_counted_once():
    ckpt = wb.open(ROOT / "sample_ckpts" / "dcp_hsdp_2x2", cache=False)
    shards, tensors = stats(ckpt, "shard", quantiles=True), stats(ckpt).set_index("key")
    assert len(shards) == ckpt.catalog.chunks
    payloads = ckpt.payloads
    for at, row in enumerate(shards.to_dict("records")):
        bits = payloads.array(at)
        assert row["numel"] == bits.size
        if row["dtype"] == "float32":
            values = np.ascontiguousarray(bits).view("f4").astype("f8").reshape(-1)
            agrees(row, values, values)
    for key, rows in shards[shards["replica"] == 0].groupby("key", observed=True):
        assert rows["numel"].sum() == tensors.loc[key, "numel"] and rows["zero"].sum() == tensors.loc[key, "zero"]


def test_threads_change_nothing():
    ckpt = wb.open(ROOT / "sample_ckpts" / "dcp_fsdp2", cache=False)
    one, three = (stats(ckpt, threads=n, cache=False) for n in (1, 3))
    pd.testing.assert_frame_equal(one, three, check_exact=True)


def test_a_lost_part_is_told_and_the_rest_is_computed(tmp_path):
    save_file({"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 7}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-400])
    ckpt = wb.open(tmp_path, partial=True)
    for by in ("tensor", "shard"):
        frame = stats(ckpt, by).set_index("key")
        assert frame.loc["a", "max"] == 999 and frame["error"].isna().loc["a"]
        assert "400" in frame.loc["b", "error"] or "ends" in frame.loc["b", "error"]
        assert np.isnan(frame.loc["b", "max"])
    root = stats(ckpt, "module").iloc[0]
    assert root["max"] == 999 and "'b'" in root["error"]


def test_a_hole_is_told(tmp_path):
    catalog = stored(
        tmp_path, np.arange(10, dtype=np.float32), [((0,), (4,)), ((4,), (6,))], dtype="float32", skip=(1,)
    )
    some = wb.open(ROOT / "sample_ckpts" / "dcp_fsdp2", cache=False)
    from workbench.checkpoint import Checkpoint
    from workbench.core.place import Place
    from workbench.core.storage import SourcePool

    place = Place(tmp_path)
    ckpt = Checkpoint(place, catalog, SourcePool(place, catalog.files, catalog.file_stats), some.objects)
    row = stats(ckpt).iloc[0]
    assert row["max"] == 3 and "6 of 10 elements" in row["error"] and "not stored" in row["error"]


def test_results_are_kept_as_long_as_the_files_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WORTH_KEEPING", 0)
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(100.0), "i": torch.arange(5)}, path)
    for by, quantiles in (("tensor", False), ("tensor", True), ("shard", False)):
        first = stats(wb.open(path), by, quantiles=quantiles)
        again = stats(wb.open(path), by, quantiles=quantiles)
        assert first.attrs["engine"] != "cache" and again.attrs["engine"] == "cache"
        pd.testing.assert_frame_equal(first, again, check_exact=True)
    assert stats(wb.open(path), "module").attrs["engine"] == "cache"  # made from the tensors'
    assert stats(wb.open(path), cache=False).attrs["engine"] != "cache"
    assert stats(wb.open(path).select("w")).attrs["engine"] != "cache"
    kept = sorted((tmp_path / "cache").glob("stats-*.npz"))
    assert kept and not list((tmp_path / "cache").glob("*.tmp"))
    for one in kept:  # damaged: computed again, and no error
        one.write_bytes(one.read_bytes()[:-30] + b"\0" * 30)
    assert stats(wb.open(path)).attrs["engine"] != "cache"
    save_file({"w": torch.arange(100.0) + 1, "i": torch.arange(5)}, path)
    os.utime(path, ns=(1, 1))
    changed = stats(wb.open(path))
    assert changed.attrs["engine"] != "cache" and changed.set_index("key").loc["w", "max"] == 100


def test_what_makes_no_sense_is_refused():
    ckpt = wb.open(ROOT / "sample_ckpts" / "dcp_single_odd", cache=False)
    with pytest.raises(errors.UsageError, match="tensor"):
        stats(ckpt, "rank")
    with pytest.raises(errors.UsageError, match="module"):
        stats(ckpt, "module", quantiles=True)


def test_it_can_be_stopped():
    ckpt = wb.open(ROOT / "sample_ckpts" / "dcp_fsdp2", cache=False)

    def stop(share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stats(ckpt, progress=stop, cache=False)


def test_torch_is_not_imported_for_types_that_numpy_can_do():
    code = (
        "import sys, workbench as wb\n"
        "from workbench.analysis.stats import stats\n"
        f"print(len(stats(wb.open({str(ROOT / 'sample_ckpts' / 'hf_llama_bf16_sharded')!r}), quantiles=True)))\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("quantiles", [False, True])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, quantiles):
    """1 GiB in 512 tensors (a sparse file) takes less than 64 MiB of anonymous memory over what imports take."""
    shapes = {
        f"layers.{k}.w": {"dtype": "BF16", "shape": [1 << 20], "data_offsets": [k << 21, (k + 1) << 21]}
        for k in range(512)
    }
    header = json.dumps(shapes).encode()
    header += b" " * (-len(header) % 8)
    with open(tmp_path / "model.safetensors", "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + (512 << 21))
    code = (
        "import threading, time, workbench as wb, pandas\n"
        "from workbench.analysis.stats import stats\n"
        "def anon():\n"
        "    with open('/proc/self/status') as f:\n"
        "        return next(int(line.split()[1]) for line in f if line.startswith('RssAnon'))\n"
        f"ckpt = wb.open({str(tmp_path)!r})\n"
        "base, peak = anon(), [0]\n"
        f"frame = stats(ckpt, quantiles={quantiles}, threads=2, progress=lambda share: peak.append(anon()))\n"
        "assert frame['zero'].sum() == 512 << 20\n"
        "print((max(peak) - base) >> 10)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64, done.stdout


# ---- on a terminal ---------------------------------------------------------------------------------------------------


def options(path, **more):
    given = {
        "path": str(path),
        "pattern": [],
        "by": "tensor",
        "quantiles": False,
        "role": None,
        "sort": None,
        "threads": None,
        "json": False,
        "format": None,
        "no_cache": False,
        "io": "mmap",
        "partial": False,
    }
    given |= {"workers": None, "dask": None, "part": None}
    return argparse.Namespace(**(given | more))


@pytest.mark.parametrize("folder", ["dcp_fsdp2", "dcp_single_odd", "hf_deepseek_fp8_block", "trainer_run"])
@pytest.mark.parametrize("by, quantiles", [("tensor", False), ("tensor", True), ("shard", True), ("module", False)])
def test_the_table_fits_100_columns_of_a_terminal(folder, by, quantiles, capsys):
    with laid_out(100, 100):
        code = cli_stats.stats(options(ROOT / "sample_ckpts" / folder, by=by, quantiles=quantiles))
    out = capsys.readouterr().out
    assert code == 0 and len(out.splitlines()) > 2
    assert all(columns(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("folder", ["dcp_fsdp2", "paddle_save"])
def test_in_a_pipe_every_name_is_whole(folder, capsys):
    assert main(["stats", str(ROOT / "sample_ckpts" / folder)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines if not line.startswith(" ")][:5] == list(
        wb.open(ROOT / "sample_ckpts" / folder)
    )[:5]
    assert all(key in "\n".join(lines) for key in wb.open(ROOT / "sample_ckpts" / folder))


def test_on_a_terminal_every_name_keeps_its_layer(capsys):
    with laid_out(100, 100):
        cli_stats.stats(options(ROOT / "sample_ckpts" / "dcp_fsdp2", role="param"))
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(set(names)) == len(names) == 39
    for name, key in zip(names, wb.open(ROOT / "sample_ckpts" / "dcp_fsdp2").select(role="param"), strict=False):
        assert re.findall(r"\d+", key) == re.findall(r"\d+", name), (name, key)


def test_the_table_counts_nan_where_there_is_one(tmp_path, capsys):
    bad = torch.ones(4)
    bad[1] = torch.nan
    save_file({"bad": bad, "fine": torch.ones(4)}, tmp_path / "model.safetensors")
    cli_stats.stats(options(tmp_path))
    head, first, odd, second, _ = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["norm", "nan"] and odd.strip() == "NaN!"
    assert first.split()[-2:] == ["nan", "1"] and second.split()[-2:] == ["2", "0"]
    save_file({"fine": torch.ones(4)}, tmp_path / "model.safetensors")
    cli_stats.stats(options(tmp_path))
    assert "nan" not in capsys.readouterr().out


def test_json_has_a_row_each_and_no_nan(capsys):
    path = ROOT / "sample_ckpts" / "dcp_single_odd"
    assert cli_stats.stats(options(path, json=True, quantiles=True)) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert [row["key"] for row in document["rows"]] == list(wb.open(path))
    assert set(NUMBERS) <= set(document["rows"][0]) and document["by"] == "tensor"


def test_the_sick_are_marked_in_words(tmp_path, capsys):
    bad = torch.ones(8)
    bad[:3], bad[3] = torch.nan, torch.inf
    save_file(
        {
            "bad": bad,
            "zero": torch.zeros(4),
            "all": torch.full((2,), torch.nan),
            "fine": torch.ones(2),
            "one": torch.zeros(1),
        },
        tmp_path / "model.safetensors",
    )
    assert cli_stats.stats(options(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "NaN! ×3, +Inf!" in out and "all zeros" in out and "all NaN!" in out
    assert "3 tensors of 5 with unusual values" in out
    rows = {row["key"]: anomaly_words(row) for row in stats(wb.open(tmp_path)).to_dict("records")}
    assert rows["fine"] == rows["one"] == []


def test_a_part_that_cannot_be_read_exits_with_3(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(1000.0), "b": torch.arange(1000.0)}, path)
    path.write_bytes(path.read_bytes()[:-400])
    assert cli_stats.stats(options(tmp_path, partial=True)) == 3
    told = capsys.readouterr()
    assert "1 tensor could not be read completely" in told.err and "1,000 of 1,000 elements" in told.out


def test_sorting_and_choosing(capsys):
    path = ROOT / "sample_ckpts" / "hf_llama_bf16_sharded"
    cli_stats.stats(options(path, json=True, sort="std", pattern=["norm", "q_proj"], role="param"))
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and all("norm" in row["key"] or "q_proj" in row["key"] for row in rows)
    assert [row["std"] for row in rows] == sorted((row["std"] for row in rows), reverse=True)
    with pytest.raises(errors.UsageError, match="choose one of"):
        cli_stats.stats(options(path, sort="size"))


def test_names_are_shortened_and_harmless(tmp_path):
    save_file({"x\x1b[2J" + "y" * 300: torch.ones(3), "模型" * 80: torch.ones(3)}, tmp_path / "model.safetensors")
    for width in (100, 60, 40):
        with laid_out(100, width):
            lines = list(stats_lines(stats(wb.open(tmp_path))))
        assert all(line.isprintable() and columns(line) <= width for line in lines), width


@pytest.mark.skipif("WORKBENCH_SAMPLES" not in os.environ, reason="WORKBENCH_SAMPLES is not set")
def test_every_tensor_of_the_larger_samples(monkeypatch):
    found = wb.discover(os.environ["WORKBENCH_SAMPLES"], depth=4)
    assert len(found) > 10
    for path in found[found["complete"]]["path"]:
        full = Path(os.environ["WORKBENCH_SAMPLES"]) / path
        ckpt = wb.open(full, cache=False)
        for engine in ENGINES:
            monkeypatch.setattr(module, "engine", lambda nbytes, how=engine: how)
            frame = stats(ckpt, cache=False)
            assert frame["error"].isna().all(), (path, frame["error"].dropna().iloc[0])
            for row in frame[frame["numel"] < 1 << 20].to_dict("records"):
                if ckpt[row["key"]].element.torch_name is not None:
                    agrees(row, *dense(ckpt, row["key"]))


def test_a_module_counts_each_tensor_once_and_only_floats_have_statistics(tmp_path):
    tensors = {"..": torch.ones(2), ".a": torch.ones(3), "": torch.ones(4), "m.w": torch.full((5,), 2.0)}
    torch.save(tensors | {"m.i": torch.zeros(6, dtype=torch.int64)}, tmp_path / "x.pt")
    rows = stats(wb.open(tmp_path / "x.pt"), "module").set_index("module")
    assert rows.loc["", ["tensors", "numel"]].tolist() == [5, 20]
    assert rows.loc["m", ["tensors", "numel", "min", "zero"]].tolist() == [2, 11, 2.0, 0]
