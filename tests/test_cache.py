"""The catalog cache: used when it holds, rebuilt when anything differs, never in the checkpoint, never trusted."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from workbench.core import cache
from workbench.core.place import Place


@pytest.fixture
def folder(tmp_path, cache_dir, monkeypatch):
    """Two safetensors files, and a threshold under which even they are cached."""
    monkeypatch.setattr(cache, "MIN_CHUNKS", 1)
    path = tmp_path / "ckpt"
    path.mkdir()
    save_file({"a": torch.arange(6.0).reshape(2, 3), "ünï": torch.ones(2)}, path / "model-1.safetensors")
    save_file({"b": torch.zeros(4, dtype=torch.bfloat16), "s": torch.tensor(3)}, path / "model-2.safetensors")
    return path


def kept(cache_dir):
    return sorted(cache_dir.glob("*"))


def columns(catalog):
    found = {name: value for name, value in vars(catalog).items() if name != "meta"}
    found = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in found.items() if n in Compared}
    return found | {"objects": catalog.objects.keys, "meta": json.loads(json.dumps(dict(catalog.meta)))}


Compared = {
    "format",
    "keys",
    "dtype",
    "ndim",
    "shape",
    "row_ptr",
    "offsets",
    "sizes",
    "file",
    "start",
    "stop",
    "codec",
    "rank",
    "replica",
    "inner",
    "strides",
    "files",
    "file_stats",
    "metadata_files",
    "fqns",
    "roles",
}


def test_the_cached_catalog_is_the_catalog(folder, cache_dir):
    first = wb.open(folder)
    assert len(kept(cache_dir)) == 1 and kept(cache_dir)[0].suffix == ".ckwb"
    again = cache.load(Place(folder), "safetensors")
    assert again is not None and columns(again) == columns(first.catalog)
    again.check()
    assert (wb.open(folder)["a"].torch() == torch.arange(6.0).reshape(2, 3)).all()
    assert sorted(path.name for path in folder.iterdir()) == ["model-1.safetensors", "model-2.safetensors"]


def test_small_catalogs_and_cache_false_leave_nothing_behind(folder, cache_dir, monkeypatch):
    wb.open(folder, cache=False)
    assert not kept(cache_dir)
    monkeypatch.setattr(cache, "MIN_CHUNKS", 20_000)
    wb.open(folder)
    assert not kept(cache_dir)


@pytest.mark.parametrize("change", ["rewritten", "touched", "added", "removed", "moved"])
def test_a_stale_cache_is_rebuilt(folder, cache_dir, change):
    wb.open(folder)
    if change == "rewritten":
        save_file({"a": torch.full((2, 3), 7.0), "ünï": torch.ones(2)}, folder / "model-1.safetensors")
    elif change == "touched":
        os.utime(folder / "model-1.safetensors", ns=(5, 5))
    elif change == "added":
        save_file({"c": torch.ones(1)}, folder / "model-3.safetensors")
    elif change == "removed":
        (folder / "model-2.safetensors").unlink()
    else:
        folder = folder.rename(folder.parent / "elsewhere")
    assert cache.load(Place(folder), "safetensors") is None
    ckpt = wb.open(folder)
    assert ("c" in ckpt) == (change == "added") and ("b" in ckpt) == (change != "removed")
    assert (ckpt["a"][0, 0] == 7) == (change == "rewritten")


def test_every_damaged_byte_is_noticed(folder, cache_dir):
    wb.open(folder)
    path = kept(cache_dir)[0]
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 400)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert cache.load(Place(folder), "safetensors") is None, at
    for cut in (0, 5, 23, 24, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert cache.load(Place(folder), "safetensors") is None, cut
    assert len(wb.open(folder)) == 4  # rebuilt, and kept again
    assert path.read_bytes() == whole


def test_a_foreign_cache_file_is_not_used(folder, cache_dir, tmp_path):
    wb.open(folder)
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin)  # same bytes and times, another place
    path = kept(cache_dir)[0]
    path.rename(cache._path(Place(twin), "safetensors"))
    assert cache.load(Place(twin), "safetensors") is None


def test_a_cache_folder_that_cannot_be_written_is_no_error(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file" / "sub"))
    assert len(wb.open(folder)) == 4


def test_the_cache_is_private_to_its_user(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "new"))
    wb.open(folder)
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept(tmp_path / "new"))
