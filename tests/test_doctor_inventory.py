"""Whatever is stored beside the tensors: changed in the echo, the doctor says so.

One value, one key or one file of a healthy echo is changed at a time, whatever it means. Tensors are the subject of
:mod:`tests.lab.grid`. What may differ between two saves of one state is listed in :data:`PASSING`, with the reason.
"""

from __future__ import annotations

import copy
import importlib
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.lab.catalogue import EVERY
from tests.lab.drawn import draw
from tests.properties import SLOW

evidence = importlib.import_module("workbench.doctor.facts.evidence")  # wb.doctor is a function, too
SHARE = 1.0 if SLOW else 0.5  #: of the changes, drawn at random
#: Case → layout of the lab, or the trainer that wrote it.
QUICK = {"h0_exact": ("torch_save", "folder"), "v40_trainer_llama": ("",)}
MORE = {"h0_exact": ("lightning", "deepspeed", "torch_masters", "accelerate"), "v46_accelerate": ("",)}
CASES = [(case, layout) for table in (QUICK, MORE if SLOW else {}) for case, some in table.items() for layout in some]
PASSING = {
    r"version": "another release of the same program writes another one",
    r"rank|world_size|host": "where the launch runs",
    r"dir$|path|file|run_name": "where the launch writes",
    r"should_\w+$": "what the trainer is about to do at this moment",
    r"param_groups.*(?:foreach|fused|capturable|differentiable|params)": "kernels, and numbers of the parameters",
    r"README\.md": "for readers",
    r"buffer_names|param_shapes|frozen_param|group_paddings": "DeepSpeed's description of its tensors, not a value",
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Places in nested containers, each with what can be done there."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
        key = list(value)[len(value) // 2] if value and path else None
        if key is not None and (not isinstance(value[key], (dict, list, tuple)) or value[key]):
            yield (*path, key), "drop"
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from leaves(one, (*path, number))
        if len({one for one in value if isinstance(one, (int, float, str))}) > 1:
            yield path, "reverse"
    elif isinstance(value, (bool, int, float, str, bytes)) or value is None:
        yield path, "value"


def changed(value: Any, path: tuple[Any, ...], how: str) -> Any:
    """A copy with one place changed."""
    if how == "drop" and len(path) == 1:
        return {key: one for key, one in value.items() if key != path[0]}
    if path:
        out = list(value) if isinstance(value, (list, tuple)) else copy.copy(value)
        out[path[0]] = changed(value[path[0]], path[1:], how)
        return tuple(out) if isinstance(value, tuple) else out
    if how == "reverse":
        return type(value)(list(value)[::-1])
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return 0 if value is None else value + type(value)(b"x" if isinstance(value, bytes) else "x")


def load(file: Path) -> Any:
    """The content of a file that the lab wrote; nothing of weights, whose values are the grid's."""
    if file.suffix == ".safetensors" or file.name == "README.md":
        return {}
    if file.suffix == ".json":
        return json.loads(file.read_text())
    return torch.load(file, map_location="cpu", weights_only=False)


def store(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value)) if file.suffix == ".json" else torch.save(value, file)


def places(before: Path) -> list[tuple[str, tuple[Any, ...], str]]:
    """File, place in it and change; of places that differ only in numbers, one."""
    files = [before] if before.is_file() else sorted(file for file in before.rglob("*") if file.is_file())
    found = {}
    for file in files:
        name = str(file.relative_to(before)) if before.is_dir() else ""
        some = [*leaves(load(file))]
        random.Random(7).shuffle(some)
        for path, how in some:
            found.setdefault(re.sub(r"\d+", "0", f"{name} {path} {how}"), (name, path, how))
    return list(found.values())


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_a_value_that_changed_in_the_load_is_reported(tmp_path, case, layout):
    before = draw(EVERY[case], 1, [layout] if layout else []).before
    todo = places(before)
    assert len(todo) > 20
    silent = []
    for number, (name, path, how) in enumerate(todo):
        words = f"{name} {'.'.join(map(str, path))}"
        if any(re.search(pattern, words) for pattern in PASSING) or random.Random(number).random() > SHARE:
            continue
        echo = tmp_path / "echo" / before.name
        shutil.rmtree(tmp_path / "echo", ignore_errors=True)
        echo.parent.mkdir()
        if before.is_file():
            shutil.copy(before, echo)
        else:
            shutil.copytree(before, echo)
        file = echo / name if name else echo
        store(file, changed(load(file), path, how))
        try:
            found = wb.doctor(before, echo=echo, deep=False)
        except wb.errors.OpenError:
            continue  # that is an answer too
        if not any("echo" in where for where in found.findings["where"]):
            silent.append(f"{words}: {how}")
    assert not silent


@pytest.mark.parametrize("change", ["changed", "removed", "added"])
@pytest.mark.parametrize("name", ["shuffle.bin", "sampler/rank_0.npy", "notes.json", "critic.pt"])
def test_a_file_that_no_reader_opens_is_compared(tmp_path, name, change):
    source = draw(EVERY["h0_exact"], 1, ["folder"]).before
    before, echo = (shutil.copytree(source, tmp_path / side / source.name) for side in ("before", "echo"))
    for folder, number in ((before, 3), (echo, 4 if change == "changed" else 3)):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if name.endswith(".npy"):
            np.save(file, np.arange(40) * number)
        elif name.endswith(".json"):
            file.write_text(json.dumps({"seen": {"batches": number}}))
        elif name.endswith(".pt"):
            torch.save({"state": {0: {"exp_avg": torch.arange(4.0) * number}}}, file)
        else:
            file.write_bytes(bytes(range(64)) * number)
    if change != "changed":
        ((echo if change == "removed" else before) / name).unlink()
    found = wb.doctor(before, echo=echo)
    assert not found.verdict.startswith("No fault found")
    assert name in " ".join(found.findings["evidence"].map(str))


def test_a_file_is_not_taken_for_the_object_of_another_with_its_name(tmp_path):
    source = draw(EVERY["h0_exact"], 1, ["folder"]).before
    before, echo = (shutil.copytree(source, tmp_path / side / source.name) for side in ("before", "echo"))
    assert wb.open(before).objects.keys() >= {"scheduler"}
    for folder, number in ((before, 3), (echo, 4)):
        (folder / "scheduler.bin").write_bytes(bytes([number]) * 20)
    assert "scheduler.bin differs" in wb.doctor(before, echo=echo).verdict


def test_a_large_file_is_counted_and_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "LARGEST", 100)
    source = draw(EVERY["h0_exact"], 1, ["folder"]).before
    before, echo = (shutil.copytree(source, tmp_path / side / source.name) for side in ("before", "echo"))
    for folder, number in ((before, 3), (echo, 4)):
        (folder / "shuffle.bin").write_bytes(bytes([number]) * 200)
    assert "1 further file not compared" in wb.doctor(before, echo=echo).verdict
    (before / "much.bin").write_bytes(bytes(90))  # only here: there is less room for what both have
    (echo / "shuffle.bin").write_bytes(bytes(80))
    (before / "shuffle.bin").write_bytes(bytes(range(80)))
    assert "1 further file not compared" in wb.doctor(before, echo=echo).verdict
    (before / "much.bin").unlink()
    (before / "shuffle.bin").write_bytes(bytes(200))
    (echo / "shuffle.bin").write_bytes(bytes(201))
    assert "shuffle.bin has 200 bytes → 201 bytes" in wb.doctor(before, echo=echo).verdict


@pytest.mark.parametrize("name", ["bytecheckpoint_fsdp1_flat", "deepspeed_zero1", "megatron_dp_reshardable", "orbax"])
def test_a_copy_of_a_sample_differs_in_nothing(samples, tmp_path, name):
    found = wb.doctor(samples / name, echo=shutil.copytree(samples / name, tmp_path / name), deep=False)
    assert "R17" in found.checked and not set(found.findings["rule"]) & {"R11", "R16", "R17", "N1"}


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    source = draw(EVERY["h0_exact"], 1, ["folder"]).before
    before, echo = (shutil.copytree(source, tmp_path / side / source.name) for side in ("before", "echo"))
    for folder in (before, echo):
        (folder / "shuffle.bin").symlink_to(outside / "secret.bin")
        (folder / "sampler").symlink_to(outside)
    for content in (b"one", b"two"):
        (outside / "secret.bin").write_bytes(content)
        found = wb.doctor(before, echo=echo)
        assert set(found.findings["rule"]) == {"V01"} and "secret" not in str(found)  # verify refuses them
