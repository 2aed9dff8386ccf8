"""``wb.dcp.install``, ``Monitor`` and ``wb.seal``: for trainers whose saves cannot be changed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner, filesystem, state_dict_saver

import workbench as wb
from tests.rank_jobs import ROOT
from tests.test_manifest import ALL, copied, flip
from workbench import errors
from workbench.analysis import manifest
from workbench.cli import main
from workbench.dcp import installed

FAULTY = ("loss_spike/step-240-echo.pt", "torch_save/odd.pt")  #: samples whose values are wrong: sealed without deep
STATE = {"w": torch.arange(600.0).reshape(20, 30), "lr": 0.5}


@pytest.fixture
def restored():
    theirs = filesystem.FileSystemWriter, default_planner.DefaultSavePlanner
    yield
    wb.dcp.uninstall()
    assert (filesystem.FileSystemWriter, default_planner.DefaultSavePlanner) == theirs
    assert (dcp.FileSystemWriter, state_dict_saver.DefaultSavePlanner) == theirs


def has_manifest(path: Path) -> bool:
    return wb.verify(path, deep=True).exit_code == 0 and (path / ".workbench-manifest.json").exists()


def test_install_replaces_both_by_path_and_by_class(tmp_path, restored, capsys):
    found = wb.dcp.install(thread_count=3)
    assert "torch.distributed.checkpoint.FileSystemWriter" in found
    assert "torch.distributed.checkpoint.state_dict_saver.DefaultSavePlanner" in found
    assert "torch.distributed.checkpoint.FileSystemWriter" in capsys.readouterr().out
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "path")
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(tmp_path / "class", True, True, 1))
    assert dcp.FileSystemWriter(tmp_path, True, True, 1).thread_count == 3
    assert not dcp.FileSystemWriter(tmp_path, overwrite=False).overwrite
    for name in ("path", "class"):
        assert has_manifest(tmp_path / name)
    theirs = dcp.FileSystemWriter(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    assert not isinstance(theirs, wb.dcp.Writer)
    wb.dcp.uninstall()
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "after")
    assert not has_manifest(tmp_path / "after")


def test_install_with_accelerate(tmp_path, restored):
    """Its own function, which constructs the writer and the planner inside."""
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    state = pytest.importorskip("accelerate.state")
    wb.dcp.install()
    source = Path(fsdp_utils.__file__).read_text()
    assert "storage_writer=dist_cp.FileSystemWriter(ckpt_dir)" in source and "planner=DefaultSavePlanner()" in source
    state.PartialState(cpu=True)
    plugin = __import__("accelerate").FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap", reshard_after_forward=False
    )
    fsdp_utils.save_fsdp_model(plugin, __import__("accelerate").Accelerator(cpu=True), torch.nn.Linear(3, 2), tmp_path)
    (folder,) = [one.parent for one in tmp_path.rglob(".metadata")]
    assert has_manifest(folder)


def test_install_is_for_tested_versions_and_known_options(monkeypatch, restored):
    with pytest.raises(errors.UsageError, match="no option speed"):
        wb.dcp.install(speed=3)
    monkeypatch.setattr(installed, "TESTED", ("1.0",))
    with pytest.raises(errors.UsageError, match=r"tested with torch 1\.0"):
        wb.dcp.install()


def test_a_planner_that_derives_from_ours_and_plans_itself(tmp_path, restored):
    """As a trainer's own planner does that is defined after install()."""
    wb.dcp.install()

    class Own(default_planner.DefaultSavePlanner):
        def create_local_plan(self):
            return default_planner.create_default_local_save_plan(self.state_dict, self.is_coordinator)

    dcp.save(dict(STATE), checkpoint_id=tmp_path / "a", planner=Own(flatten_state_dict=False))
    assert has_manifest(tmp_path / "a")


def test_the_monitor_sees_saves_and_loads_of_any_writer(tmp_path):
    with wb.dcp.Monitor() as monitor:
        dcp.save(dict(STATE), checkpoint_id=tmp_path / "a")
        dcp.load({"w": torch.zeros(20, 30)}, checkpoint_id=tmp_path / "a")
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load({"missing": torch.zeros(2)}, checkpoint_id=tmp_path / "a")
    count = len(monitor.phases)
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "b")
    assert len(monitor.phases) == count
    frame = monitor.frame()
    assert {"local_step", "global_step", "write_data", "finish_checkpoint", "save", "load", "read_data"} <= set(
        frame.name
    )
    whole = frame[frame.name == "save"].iloc[0]
    parts = frame[frame.name.isin(["write_data", "finish_checkpoint"]) & (frame.checkpoint == str(tmp_path / "a"))]
    assert 0 < parts.seconds.sum() <= whole.seconds and not whole.error
    assert any("missing" in one for one in frame.error)
    assert monitor.to_dict()["phases"][0]["rank"] == 0


# ---- seal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcp_fsdp2", "hf_peft_lora", "paddle_save", "deepspeed_zero1"])
def test_seal_writes_the_manifest_of_what_is_intact(tmp_path, samples, name):
    source = samples / name
    path = shutil.copytree(source, tmp_path / name)
    made = wb.seal(path)
    assert made.save["sealed"] and made.save["deep"] and manifest.load(made.path).save == made.save
    assert Path(made.path).is_relative_to(path)  # of a run's folder, in the step
    assert wb.verify(path, deep=True).count("error") == 0
    wb.seal(path)


def test_the_seal_of_a_file_is_next_to_it(tmp_path, samples):
    path = Path(shutil.copy(samples / "torch_save" / "ckpt.pt", tmp_path))
    assert wb.seal(path).path == f"{path}.manifest.json"


def test_seal_refuses_damage_and_never_covers_it_up(tmp_path, samples):
    path = shutil.copytree(samples / "hf_peft_lora", tmp_path / "lora")
    file = path / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(errors.WorkbenchError):
        wb.seal(path)
    assert not (path / ".workbench-manifest.json").exists()
    file.write_bytes(whole)
    wb.seal(path)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = (path / ".workbench-manifest.json").read_bytes()
    with pytest.raises(errors.CorruptError, match=r"manifest\.changed"):
        wb.seal(path)
    assert (path / ".workbench-manifest.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_any_flip_in_a_sealed_checkpoint_is_found_and_named(tmp_path, name):
    """1,000 flips over all samples, in any file of the checkpoint, the manifest among them."""
    path = copied(name, tmp_path)
    made = wb.seal(path, deep=name not in FAULTY)
    errors_before = wb.verify(path, deep=True).count("error")
    assert bool(errors_before) == (name in FAULTY)
    ckpt = wb.open(path, cache=False)
    root, catalog = Path(ckpt.place.root), ckpt.catalog
    files = {file: os.path.getsize(root / file) for file in made.files if made.files[file].size}
    chance = random.Random(name)
    for number in range(-(-1000 // len(ALL))):
        file = chance.choice(list(files)) if number % 3 else chance.choices(list(files), list(files.values()))[0]
        at = chance.randrange(files[file])
        bit = chance.randrange(8)
        flip(root / file, at, bit)
        found = [one for one in wb.verify(path, deep=True) if one.rule == "manifest.changed"]
        flip(root / file, at, bit)
        assert len(found) == 1, (file, at, bit)
        evidence = found[0].evidence
        assert evidence["file"] == file and evidence["start"] <= at < evidence["stop"], (file, at, bit)
        in_file = catalog.file == (catalog.files.index(file) if file in catalog.files else -1)
        rows = np.flatnonzero(in_file & (catalog.start <= at) & (at < catalog.stop) & (catalog.chunk_nbytes > 0))
        there = {catalog.keys[catalog.tensor[row]] for row in rows.tolist()}
        named = {one for _, *names in evidence["parts"] for one in names}  # as a tensor, or as what is around it
        between = all(catalog.stop[rows] - catalog.start[rows] > catalog.chunk_nbytes[rows])  # elements of a view
        assert not there or there & named or (between and evidence["parts"][0][0] == "record"), (file, at, evidence)
    assert made.path is not None
    for _ in range(5):
        at = chance.randrange(os.path.getsize(made.path))
        flip(Path(made.path), at, 3)
        assert wb.verify(path, deep=True).exit_code, at
        flip(Path(made.path), at, 3)
    assert wb.verify(path, deep=True).count("error") == errors_before


def test_seal_keeps_the_record_of_the_save(tmp_path):
    dcp.save(dict(STATE), storage_writer=wb.dcp.Writer(tmp_path / "a"))
    record = manifest.load(tmp_path / "a").save
    assert wb.seal(tmp_path / "a").save.items() >= record.items()


def test_the_command(tmp_path, samples, capsys):
    path = shutil.copytree(samples / "hf_peft_lora", tmp_path / "lora")
    assert main(["seal", str(path)]) == 0
    assert "sealed: " in capsys.readouterr().out
    assert main(["seal", str(path), "--quick", "--beside", "--json"]) == 0
    assert (tmp_path / "lora.manifest.json").exists()
    file = path / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["seal", str(path)]) == 2
    assert "is not sealed" in capsys.readouterr().err


def test_wb_dcp_is_imported_on_first_use():
    code = (
        "import sys, workbench as wb; assert 'torch' not in sys.modules; wb.dcp.Writer; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
