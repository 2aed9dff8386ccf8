"""The contract of ``wb.open`` and what it returns, beyond what the reader suite checks of every format."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import workbench as wb


def test_discover_is_a_table_of_the_checkpoints_under_a_folder(samples):
    found = wb.discover(samples).set_index("path")
    assert list(found.columns) == ["format", "step", "nbytes", "mtime", "complete", "why"]
    assert found.loc["titan_run/step-4", "step"] == 4 and found.loc["titan_run/step-4", "format"] == "dcp"
    assert found.loc["trainer_run/checkpoint-3", "format"] == "hf_trainer"
    real = sum(f.stat().st_size for f in (samples / "dcp_fsdp2").iterdir())
    assert found.loc["dcp_fsdp2", "nbytes"] == real
    assert list(found.index[~found["complete"]]) == ["logs/hf_trainer/out/checkpoint-120"]  # a state without weights


def test_a_run_folder_opens_its_newest_complete_step_and_says_so(samples):
    ckpt = wb.open(samples / "titan_run")
    assert ckpt.step == 4 and any("step-4" in note for note in ckpt.notes)
    assert wb.open(samples / "titan_run" / "step-2").notes == []


def test_a_step_that_cannot_be_read_is_none_not_the_folders(tmp_path):
    folder = tmp_path / "step-4"
    dcp.save({"w": torch.ones(2), "train_state": {"step": 5}}, checkpoint_id=str(folder), no_dist=True)
    catalog = wb.open(folder).catalog
    assert wb.open(folder).step == 5
    (row,) = range(len(catalog.objects.keys))
    with open(folder / catalog.files[catalog.objects.file[row]], "r+b") as file:
        file.seek(int(catalog.objects.start[row]))
        file.write(bytes(int(catalog.objects.stop[row] - catalog.objects.start[row])))
    ckpt = wb.open(folder)
    assert ckpt.step is None and "step-4" in repr(ckpt)
    with pytest.raises(wb.errors.CorruptError, match="train_state"):
        ckpt.objects["train_state.step"]


def test_a_tracker_says_that_a_folder_is_a_run_whatever_else_lies_there(samples, tmp_path):
    shutil.copytree(samples / "titan_run" / "step-2", tmp_path / "step-2")
    (tmp_path / "latest").write_text("step-2")
    save_file({"a": torch.ones(1)}, tmp_path / "beside.safetensors")
    ckpt = wb.open(tmp_path)
    assert ckpt.format == "dcp" and ckpt.step == 2 and "a" not in ckpt


def test_a_path_may_be_bytes(samples, tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.safetensors"  # no UTF-8, as a file system may have it
    save_file({"w": torch.ones(2)}, os.fsdecode(name))
    ckpt = wb.open(name)
    assert len(ckpt) and ckpt.path == os.fsdecode(name)
    with os.scandir(os.fsencode(tmp_path)) as entries:
        assert list(wb.open(next(entries))) == list(ckpt)
    assert wb.verify(name).exit_code == 0 and wb.diff(name, name).same and len(wb.discover(name)) == 1
    assert len(wb.timeline(name)) == len(wb.timeline([name])) == 1
    for wrong in (3, None, ["x"]):
        with pytest.raises(TypeError, match="expected str, bytes or"):
            wb.open(wrong)


def test_selections_narrow_and_share_everything_else(samples):
    ckpt = wb.open(samples / "dcp_fsdp2")
    part = ckpt.select(r"layers\.1\.", role="exp_avg")
    assert len(part) == 9 and all("layers.1." in key and part[key].role == "exp_avg" for key in part)
    assert part.step == ckpt.step == 3 and part.path == ckpt.path and part.objects is ckpt.objects
    key = next(iter(part))
    assert torch.equal(part[key].torch(), ckpt[key].torch())
    assert len(part.select("mlp").select("nothing of the kind")) == 0
    assert len(part.tensors) == 9 and len(part.chunks) == part.tensors["chunks"].sum()
    with pytest.raises(wb.errors.UsageError, match="regular expression"):
        ckpt.select("(")


def test_unknown_names_suggest_close_ones(samples):
    ckpt = wb.open(samples / "dcp_fsdp2")
    with pytest.raises(wb.errors.TensorNotFoundError, match=r"did you mean 'model\.lm_head\.weight'"):
        ckpt["model.lm_haed.weight"]
    with pytest.raises(wb.errors.TensorNotFoundError, match="its stored roles are exp_avg, exp_avg_sq, param, step"):
        ckpt.param("lm_head.weight", role="momentum")
    with pytest.raises(wb.errors.TensorNotFoundError, match=r"did you mean 'model\.lm_head\.weight'"):
        ckpt["lm_head"]  # a part of the name is not close in spelling
    with pytest.raises(wb.errors.TensorNotFoundError, match=r"no parameter 'lm_heed.weight'.*'lm_head\.weight'"):
        ckpt.param("lm_heed.weight")
    with pytest.raises(wb.errors.ObjectNotFoundError, match=r"no object 'train_state.stop' .*'train_state\.step'"):
        ckpt.objects["train_state.stop"]
    with pytest.raises(KeyError, match="no view 'anything' among 0"):
        ckpt.views["anything"]
    with pytest.raises(wb.errors.UsageError, match=r"'exp_av'; roles present: exp_avg, .*; did you mean 'exp_avg'"):
        ckpt.select(role="exp_av")
    assert ckpt.get("lm_head") is None and ckpt.objects.get("train_state.stop", 3) == 3


def test_state_dict_is_every_tensor(samples):
    got = wb.open(samples / "dcp_fsdp2").state_dict()
    truth = load_file(samples.parent / "tests/truth" / "dcp_fsdp2.safetensors")
    assert all(torch.equal(got[key], value) for key, value in truth.items())


def test_a_closed_checkpoint_keeps_what_was_read_and_opens_again(samples):
    with wb.open(samples / "hf_llama_bf16_sharded") as ckpt:
        kept = ckpt["model.embed_tokens.weight"].torch()
    assert torch.equal(kept, ckpt["model.embed_tokens.weight"].torch())


def test_equality_is_identity_and_reads_nothing(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    ckpt = wb.open(tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").unlink()
    tensor = ckpt["w"]
    assert ckpt == ckpt and ckpt != ckpt.select("w") and len({ckpt, ckpt}) == 1
    assert tensor == tensor and tensor != ckpt["w"]


def test_a_lazy_tensor_is_taken_where_arrays_are(tmp_path):
    stored = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(stored, tmp_path / "m.safetensors")
    ckpt = wb.open(tmp_path / "m.safetensors")
    for key, tensor in stored.items():
        for convert in (torch.as_tensor, torch.tensor, torch.from_dlpack):
            assert torch.equal(convert(ckpt[key]), tensor), (key, convert)
    assert np.from_dlpack(ckpt["w"]).tolist() == np.asarray(ckpt["w"]).tolist() == stored["w"].tolist()


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_small_floats_keep_their_bits_in_torch_and_numpy(tmp_path, io):
    every = torch.arange(256, dtype=torch.uint8)
    types = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    tensors = {str(t).removeprefix("torch."): every.clone().view(t) for t in types}
    tensors["nan"] = torch.tensor([0x7FC1, 0xFFC0, 0x7F81, 0x8000], dtype=torch.uint16).view(torch.bfloat16)
    save_file(tensors, tmp_path / "x.safetensors")
    ckpt = wb.open(tmp_path / "x.safetensors", io=io)
    for key, want in tensors.items():
        assert ckpt[key].dtype == want.dtype
        assert torch.equal(ckpt[key].torch().view(torch.uint8), want.view(torch.uint8))
        assert ckpt[key].numpy().tobytes() == want.view(torch.uint8).numpy().tobytes()
    assert ckpt["nan"].numpy().dtype == np.uint16


def test_not_a_checkpoint_says_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "absent", tmp_path / "a\0b", "/dev/null"):
        with pytest.raises(wb.errors.NotACheckpointError) as caught:
            wb.open(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(wb.errors.UsageError, match="unknown format"):
        wb.open(tmp_path, format="tape")
    with pytest.raises(wb.errors.UsageError, match="mmap"):
        wb.open(_saved(tmp_path), io="carrier pigeon")


def _saved(folder):
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    return folder / "one.safetensors"


def test_a_link_out_of_the_checkpoint_is_refused_but_the_hubs_cache_opens(tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert wb.open(snapshot)["w"].torch().tolist() == [1, 1, 1]
    save_file({"secret": torch.ones(1)}, tmp_path / "outside.safetensors")
    (snapshot / "model-2.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(wb.errors.UnsafeError, match=r"model-2\.safetensors"):
        wb.open(snapshot)


@pytest.mark.parametrize(
    "name",
    [
        "hf_llama_bf16_sharded",
        "dcp_fsdp2",
        "torch_save/ckpt.pt",
        "trainer_run/checkpoint-3",
        "deepspeed_zero1",
        "megatron_dp_reshardable",
        "paddle_save",
        "paddle_dist",
        "paddlenlp_legacy",
        "bytecheckpoint_fsdp1_flat",
    ],
)
def test_a_checkpoint_can_be_pickled(samples, name):
    import pickle

    ckpt = wb.open(samples / name, cache=False)
    [str(ckpt.objects[one]) for one in ckpt.objects]  # what was looked at is not pickled
    again, part = pickle.loads(pickle.dumps((ckpt, ckpt.select(next(iter(ckpt))))))
    assert list(again) == list(ckpt) and list(again.objects) == list(ckpt.objects) == list(part.objects)
    key = next(iter(ckpt))
    assert torch.equal(again[key].torch(), ckpt[key].torch()) and torch.equal(part[key].torch(), ckpt[key].torch())
    assert [str(again.objects[one]) for one in again.objects] == [str(ckpt.objects[one]) for one in ckpt.objects]


def test_results_can_be_pickled(samples, tmp_path):
    import pickle

    a, b = (wb.open(samples / name) for name in ("titan_run/step-2", "titan_run/step-4"))
    results = {
        "stats": wb.stats(a, progress=lambda share: None),
        "verify": wb.verify(a, progress=lambda share: None),
        "diff": wb.diff(a, b, progress=lambda share: None),
        "layout": wb.layout(a, progress=lambda share: None),
        "doctor": wb.doctor(a, b, progress=lambda share: None),
        "export": wb.export(a, tmp_path / "e", progress=lambda share: None),
        "names": wb.name_map(a, b),
        "plan": wb.plan_memory(a, 4, 80),
        "tensor": a[next(iter(a))],
    }
    for name, result in results.items():
        again = pickle.loads(pickle.dumps(result))
        assert str(again) == str(result), name
        assert str(getattr(again, "to_dict", str)()) == str(getattr(result, "to_dict", str)()), name
    row = pickle.loads(pickle.dumps(results["diff"])).changed_rows[0]
    assert torch.equal(row.sides()[1].torch(), b[row.key_b].torch()) and row.again(None) is not None
    x = torch.randn(64, 64)
    for name, tensor in (("x", x), ("y", x.flip(0))):
        torch.save({"w": tensor}, tmp_path / f"{name}.pt")
    [found] = wb.diff(tmp_path / "x.pt", tmp_path / "y.pt").changed_rows
    assert found.pattern is not None and pickle.loads(pickle.dumps(found)).pattern.sentence == found.pattern.sentence


def test_calls_that_take_a_checkpoint_take_its_path(samples, tmp_path):
    path = samples / "dcp_single_odd"
    ckpt = wb.open(path)
    assert wb.stats(path).equals(wb.stats(ckpt))
    assert wb.layout(str(path)).summary == wb.layout(ckpt).summary
    assert wb.plan_memory(samples / "dcp_fsdp2", 8, 1.0).fits
    assert wb.export(path, tmp_path / "x", role=None, objects=False, dry_run=True).to_dict()["tensors"]
    for call in (
        wb.stats,
        wb.layout,
        lambda one: wb.export(one, tmp_path / "y"),
        lambda one: wb.plan_memory(one, 8, 1),
    ):
        with pytest.raises(wb.errors.NotACheckpointError):
            call(tmp_path / "nothing")
