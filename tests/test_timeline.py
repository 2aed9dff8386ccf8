"""The steps of a run against norms and changes computed by torch."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from workbench import errors
from workbench.analysis.timeline import timeline


def test_a_run_of_two_steps_is_that_of_torch(samples):
    frame = timeline(samples / "titan_run")
    assert frame["step"].tolist() == [2, 4] and frame["complete"].all()
    steps = [wb.open(samples / f"titan_run/step-{n}") for n in (2, 4)]
    params = [{t.fqn: t.torch().double() for t in (s[k] for k in s) if t.role == "param"} for s in steps]
    norms = [sum(float((v**2).sum()) for v in p.values()) ** 0.5 for p in params]
    assert frame["norm_param"].tolist() == pytest.approx(norms)
    moved = sum(float(((params[1][k] - v) ** 2).sum()) for k, v in params[0].items()) ** 0.5
    assert frame["change"].isna().tolist() == [True, False]
    assert frame["change"][1] == pytest.approx(moved / norms[0])
    assert (frame["norm_exp_avg"] > 0).all() and frame["tensors"].tolist() == [86, 86]


def test_by_tensor_each_step_has_its_rows(samples):
    frame = timeline(samples / "titan_run", by="tensor")
    assert len(frame) == 2 * 86 and frame[frame["step"] == 2]["change"].isna().all()
    key = "layers.0.attention.wq.weight"
    a, b = (wb.open(samples / f"titan_run/step-{n}")[key].torch().double() for n in (2, 4))
    row = frame[(frame["step"] == 4) & (frame["key"] == key)].iloc[0]
    assert row["norm"] == pytest.approx(float(b.norm()))
    assert row["change"] == pytest.approx(float((b - a).norm() / a.norm()))


def test_incomplete_and_damaged_steps_are_rows_that_say_why(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        save_file({"w": torch.full((10,), float(step))}, str(tmp_path / f"step-{step}" / "model.safetensors"))
    (tmp_path / "step-2" / "model.safetensors").write_bytes(b"")
    frame = timeline(tmp_path)
    assert frame["step"].tolist() == [1, 2, 3] and frame["complete"].tolist() == [True, False, True]
    assert frame["why"][1] and frame["change"][2] == pytest.approx(2.0)  # against step 1, the complete one before
    bare = timeline(tmp_path, values=False)
    assert bare["norm_param"].isna().all() and bare["tensors"].tolist()[0] == 1


def test_nan_is_seen_in_the_norms_the_changes_and_a_count(tmp_path):
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step}").mkdir()
        tensors = {"v": torch.full((9,), float(step)), "w": torch.full((10,), float(step)), "none": torch.zeros(0)}
        if step > 2:
            tensors["w"][3] = float("nan")
        save_file(tensors, str(tmp_path / f"step-{step}" / "model.safetensors"))
    frame = timeline(tmp_path)
    assert frame["nan"].tolist() == [0, 0, 1, 1]
    assert frame["norm_param"].isna().tolist() == [False, False, True, True]
    assert frame["change"].isna().tolist() == [True, False, True, True]
    assert frame["norm_param"][1] == pytest.approx(2 * 19**0.5) and frame["change"][1] == pytest.approx(1.0)
    tensors = timeline(tmp_path, by="tensor").set_index(["step", "key"])
    assert tensors["norm"][3, "v"] == pytest.approx(9.0) and tensors["change"][3, "v"] == pytest.approx(0.5)
    assert torch.isnan(torch.tensor([tensors["norm"][3, "w"], tensors["change"][3, "w"]])).all()


def test_an_infinity_is_an_infinite_norm(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        w = torch.full((10,), float(step))
        w[0] = float("inf") if step == 2 else 1.0
        save_file({"w": w}, str(tmp_path / f"step-{step}" / "model.safetensors"))
    frame = timeline(tmp_path)
    assert frame["norm_param"][1] == float("inf") and frame["change"].isna().all() and not frame["nan"].any()


def test_a_list_of_checkpoints_is_a_run_too(samples):
    paths = [samples / "trainer_run/checkpoint-6", wb.open(samples / "trainer_run/checkpoint-3")]
    told = []
    frame = timeline(paths, progress=told.append)
    assert frame["step"].tolist() == [3, 6] and told == sorted(told) and told[-1] == 1.0
    with pytest.raises(errors.UsageError):
        timeline(paths, by="module")


def test_one_checkpoint_is_a_run_of_one(samples, tmp_path):
    import shutil

    file = samples / "torch_save/ckpt.pt"
    for path in (file, samples / "dcp_fsdp2", shutil.copy(file, tmp_path / "model.pt")):
        ckpt = wb.open(path)
        [row] = wb.timeline(path).to_dict("records")
        assert (row["tensors"], row["complete"], row["why"]) == (len(ckpt), True, "")
        assert set(wb.timeline(path, by="tensor")["key"]) == set(ckpt)
    (tmp_path / "none").mkdir()
    with pytest.raises(wb.errors.NotACheckpointError, match="no checkpoints"):
        wb.timeline(tmp_path / "none")
    shutil.copy(file, tmp_path / "other.pt")
    with pytest.raises(wb.errors.NotACheckpointError, match="with steps in their names"):
        wb.timeline(tmp_path)
