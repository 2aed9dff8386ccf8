"""What every format must pass: the one suite that all readers share.

``check_reader(path, truth)`` takes a checkpoint and its truth (full tensors by stored key, made by the framework that
wrote it or by its own library, never by us).
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.core import box
from workbench.core.catalog import Catalog

SLICES = 200 if os.environ.get("WORKBENCH_SLOW") == "1" else 60
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_reader(
    path: Path, truth: Mapping[str, torch.Tensor], *, rest: bool = False, decoded: bool = False
) -> wb.Checkpoint:
    """Run the suite; ``rest`` allows the checkpoint to hold tensors that the truth does not have, and with ``decoded``
    the truth is that of quantised tensors as numbers.
    """

    def opened(**how: Any) -> wb.Checkpoint:
        return wb.open(path, **how).decode() if decoded else wb.open(path, **how)

    ckpt = opened()
    check_mapping(ckpt, truth, rest)
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    for key, want in truth.items():
        same_bits(ckpt[key].torch(), want, key)
        as_numpy = ckpt[key].numpy()
        assert as_numpy.shape == tuple(want.shape) and as_numpy.tobytes() == raw(want), f"{key}: numpy bits differ"
    check_slices(ckpt, truth)
    check_pread(opened, truth)
    check_state_dict(opened, truth)
    return ckpt


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    assert raw(got) == raw(want), f"{what}: bits differ"


def raw(tensor: torch.Tensor) -> bytes:
    """Bytes in row-major order, whatever the dtype (NaN equals itself, -0 is not 0)."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def check_mapping(ckpt: wb.Checkpoint, truth: Mapping[str, torch.Tensor], rest: bool) -> None:
    assert all(key in ckpt for key in truth)
    assert rest or set(truth) == set(ckpt)
    assert len(ckpt) == len(list(ckpt)) == len(set(ckpt))
    assert "no such tensor" not in ckpt
    try:
        ckpt["no such tensor"]
    except wb.errors.TensorNotFoundError as error:
        assert isinstance(error, KeyError) and "no such tensor" in str(error)
    else:
        raise AssertionError("an unknown key was found")


def check_catalog(catalog: Catalog) -> None:
    """Columns are consistent, files exist, every element of every tensor has exactly one writer, replicas apart."""
    catalog.check()
    catalog.check_files()
    first = catalog.replica == 0
    volume = np.bincount(catalog.tensor[first], box.volume(catalog.sizes[first]), minlength=len(catalog))
    assert (volume == catalog.numel).all(), "chunks do not cover their tensors exactly"
    i, _ = box.overlapping(catalog.tensor[first], catalog.offsets[first], catalog.sizes[first])
    assert not len(i), "chunks of one replica overlap"
    assert catalog.metadata_files, "nothing keys the cache"


def check_frames(ckpt: wb.Checkpoint) -> None:
    tensors, chunks = ckpt.tensors, ckpt.chunks
    assert list(tensors.columns) == [
        "key",
        "fqn",
        "role",
        "dtype",
        "shape",
        "numel",
        "nbytes",
        "chunks",
        "files",
        "replicas",
    ]
    assert list(chunks.columns) == [
        "key",
        "offsets",
        "sizes",
        "dtype",
        "file",
        "start",
        "stop",
        "rank",
        "replica",
        "codec",
    ]
    assert tensors["key"].tolist() == list(ckpt) and len(chunks) == tensors["chunks"].sum()
    for key, fqn, role in zip(tensors["key"], tensors["fqn"], tensors["role"], strict=True):
        assert ckpt[key].role == role and (ckpt[key].fqn == fqn or (ckpt[key].fqn is None and fqn != fqn))
        if ckpt[key].fqn is not None and list(zip(ckpt.fqns, ckpt.roles, strict=True)).count((fqn, role)) == 1:
            assert ckpt.param(fqn, role=role).key == key
    for role in set(ckpt.roles):
        assert set(ckpt.select(role=role).roles) == {role}


def check_objects(ckpt: wb.Checkpoint) -> None:
    from workbench.core.jsonable import jsonable

    for name in ckpt.objects:
        json.dumps(jsonable(ckpt.objects[name]))
    assert ckpt.step is None or isinstance(ckpt.step, int)
    assert len(repr(ckpt)) and "<" in ckpt._repr_html_()


def check_slices(ckpt: wb.Checkpoint, truth: Mapping[str, torch.Tensor]) -> None:
    """Random slices over all tensors of a checkpoint: at least one a tensor, ``SLICES`` in all."""
    chance = random.Random(0)
    names = list(truth)
    chosen = names + [chance.choice(names) for _ in range(max(0, SLICES - len(names)))] if names else []
    for name in chosen:
        want = truth[name].contiguous()
        key = random_key(tuple(want.shape), chance)
        if want.element_size() not in BITS:
            continue  # complex128: numpy slices it below as pairs would; covered whole above
        dense = want.view(BITS[want.element_size()]).numpy()
        expected = torch.from_numpy(np.array(dense[key], copy=True, order="C")).view(want.dtype)
        same_bits(ckpt[name][key], expected, f"{name}[{key}]")


def check_pread(opened: Callable[..., wb.Checkpoint], truth: Mapping[str, torch.Tensor]) -> None:
    plain = opened(io="pread", cache=False)
    for key in list(truth)[:5]:
        same_bits(plain[key].torch(), truth[key], key)


def check_state_dict(opened: Callable[..., wb.Checkpoint], truth: Mapping[str, torch.Tensor]) -> None:
    for io in ("mmap", "pread"):
        ckpt = opened(io=io, cache=False)
        state = ckpt.select(f"^({'|'.join(map(re.escape, truth))})$").state_dict(threads=2)
        for key, want in truth.items():
            if key in ckpt.catalog.index:  # not one of the views, which are not listed
                same_bits(state[key], want, f"{key} of the state dict, {io}")


def random_key(shape: tuple[int, ...], chance: random.Random) -> tuple[Any, ...]:
    key: list[Any] = []
    for n in shape:
        kind = chance.randrange(5)
        if kind == 0 and n:
            key.append(chance.randrange(-n, n))
        elif kind == 1:
            key.append(slice(None))
        elif kind == 2:
            key.append(slice(chance.randint(-n - 1, n + 1), chance.randint(-n - 1, n + 1), chance.choice([1, 2, 3])))
        elif kind == 3:
            key.append(slice(None, None, -chance.choice([1, 2, 7])))
        else:
            a, b = sorted((chance.randint(0, n), chance.randint(0, n)))
            key.append(slice(a, b))
    return tuple(key)


def refused(kind: type[wb.errors.WorkbenchError], path: Path, *words: str, read: str | None = None, **how: Any) -> None:
    """Opening (or reading ``read``) raises one line of the kind that holds every word."""
    with pytest.raises(kind) as caught:
        ckpt = wb.open(path, cache=False, **how)
        if read:
            ckpt[read].torch()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for word in words:
        assert word in message, message
