"""NVRx local checkpoints: the ranks are joined by their stored boxes, against the tensors before the cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.megatron_local_files import BasicTensorAwareStateDict, state, truth, write, write_session
from tests.reader_suite import check_reader, refused, same_bits
from workbench.errors import CorruptError, IncompleteError, UnsupportedFormatError, WorkbenchError


@pytest.mark.parametrize("tp", [2, 1])
def test_the_ranks_of_a_session_are_one_checkpoint(tmp_path: Path, tp: int) -> None:
    ckpt = check_reader(write_session(tmp_path / "run7", tp), truth())
    assert ckpt.format == "megatron_local" and ckpt.step == 10 and ckpt.world_size == 2
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    roles = {"param": 1, "exp_avg": 2, "exp_avg_sq": 3, "master": 1}
    for role, scale in roles.items():
        assert torch.equal(ckpt.param(name, role=role).torch(), truth()[name] * scale)
    assert ckpt["decoder.layers.mlp.linear_fc2.weight"].shape == (3, 4, 6)
    assert sorted(ckpt[name].chunks["rank"]) == ([0, 1] if tp == 2 else [1])
    assert ckpt.objects["iteration"] == 10 and set(ckpt.objects) == {
        "args",
        "iteration",
        "checkpoint_version",
        "rng_state",
    }
    cells = ckpt.objects["rng_state"]
    last = cells["0.1"] if tp == 2 else cells
    assert last["torch"].tolist() == [n + (tp == 2) for n in range(4)]
    report = wb.verify(ckpt, deep=True)
    assert report.exit_code == 0 and not ckpt.notes[tp - 1 :], ckpt.notes
    found = wb.discover(tmp_path)
    assert found[["path", "format", "step", "complete"]].values.tolist() == [["run7", "megatron_local", 10, True]]


def test_a_rank_without_a_file_is_an_error_and_its_parts_are_holes(tmp_path: Path) -> None:
    folder = write_session(tmp_path)
    shutil.rmtree(folder / "1")
    refused(IncompleteError, folder, "no file of rank 1 at iteration 10")
    ckpt = wb.open(folder, partial=True)
    key = "embedding.word_embeddings.weight"
    assert torch.equal(ckpt[key][:4], truth()[key][:4])
    with pytest.raises(WorkbenchError, match=r"embedding\.word_embeddings\.weight"):
        ckpt[key][3:5]
    alone = wb.open(folder / "0" / "iter_0000010_0_local.pt")
    assert alone.format == "megatron_local" and "rank 1 stored are holes" in " ".join(alone.notes)
    assert torch.equal(alone[key][:4], truth()[key][:4])
    (folder / "1").mkdir()


def test_a_replica_stands_in_for_a_lost_node(tmp_path: Path) -> None:
    folder = write_session(tmp_path)
    (folder / "1" / "iter_0000010_1_local.pt").rename(folder / "0" / "iter_0000010_1_local.pt")
    (folder / "1").rmdir()
    ckpt = wb.open(folder)
    for key, want in truth().items():
        same_bits(ckpt[key].torch(), want, key)
    write(folder / "1" / "iter_0000010_0_local.pt", state(0))
    assert any("1 replicas of other ranks' files were not read" in note for note in wb.open(folder).notes)


def test_the_iteration_that_the_manager_would_load_is_opened(tmp_path: Path) -> None:
    folder = write_session(write_session(tmp_path), iteration=20)
    assert wb.open(folder).step == 20
    (folder / "1" / "iter_0000020_1_local.pt").rename(folder / "1" / "iter_0000020_1_local.dirty.pt")
    ckpt = wb.open(folder)
    assert ckpt.step == 10 and "iteration 10 was opened, the newest with a file of every rank" in ckpt.notes[0]
    assert wb.discover(tmp_path)[["step", "complete"]].values.tolist() == [[10, True]]


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    folder = write_session(tmp_path)
    other = folder / "1" / "iter_0000010_1_local.pt"
    key = "embedding.word_embeddings.weight"
    for change, error, said in (
        ({"global_shape": (12, 4)}, CorruptError, "different saves"),
        ({"global_offset": (6, 4)}, CorruptError, key),
        ({"local_shape": (5, 4)}, CorruptError, "should have the shape"),
        ({"prepend_axis_num": 1}, CorruptError, "cannot be at"),
        ({"flattened_range": slice(0, 4)}, UnsupportedFormatError, "flattened"),
        ({"global_shape": (-8, 4)}, CorruptError, "not a tuple of sizes"),
    ):
        damaged = state(1)
        vars(damaged.sharded_state_dict["model"][key]).update(change)
        write(other, damaged)
        refused(error, folder, said)
    write(other, state(0))
    refused(CorruptError, folder, "its args are of rank 0")
    hollow = state(1)
    hollow._is_hollow = True
    write(other, hollow)
    refused(CorruptError, folder, "hollow")


def test_a_rank_of_plain_nvrx_is_shown_by_itself(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    moments = {"step": torch.tensor(3.0), "exp_avg": weight * 2, "exp_avg_sq": weight * weight}
    tree = {
        "model": {"fc.weight": weight},
        "optim": {"state": {"fc.weight": moments}, "param_groups": [{"lr": 0.1, "params": ["fc.weight"]}]},
        "iteration": 10,
    }
    path = write(tmp_path / "0" / "iter_0000010_0_local.pt", BasicTensorAwareStateDict(tree))
    want = {"model.fc.weight": weight} | {f"optim.state.fc.weight.{name}": value for name, value in moments.items()}
    ckpt = check_reader(path, want)
    assert ckpt.format == "torch_save" and ckpt.step == 10
    assert ckpt.tensors.fqn.unique().tolist() == ["fc.weight"]
    assert ckpt.roles == ["param", "step", "exp_avg", "exp_avg_sq"]
    assert "does not store how many ranks" in ckpt.notes[0]
    assert ckpt.objects["optim"]["param_groups"][0]["lr"] == 0.1
    assert wb.discover(tmp_path)["format"].tolist() == ["torch_save"]
