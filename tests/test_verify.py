"""Every rule of verify by a checkpoint made for it, and silence on every healthy sample."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import workbench as wb
from tests.faults import checked_records
from tests.megatron_files import Model, write_legacy
from workbench import errors
from workbench.analysis.verify import stored as stored_module
from workbench.analysis.verify import verify
from workbench.core import checksums as checksums_module
from workbench.core import scan as scan_module

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
#: Samples that hold what a rule is for: made so by whoever wrote them.
SICK = {
    "torch_save/odd.pt": {"values.nan", "values.inf"},  # specials of bfloat16, on purpose
    "fp8": {"values.nan"},  # its tensor is named BAD
    # random numbers in the place of second moments
    "round2/misc/megatron_zarr": {"values.negative_square", "master.differs"},
    "round2/misc/megatron_zarr/iter_0000003": {"values.negative_square", "master.differs"},
    "loss_spike/step-240-echo.pt": {"master.differs"},  # masters of an older step, which the doctor has to find
}
H = 3600


def healthy() -> list[tuple[Path, str]]:
    found = []
    for root in (ROOT / "sample_ckpts", *([Path(OUTSIDE)] if OUTSIDE else [])):
        for path in wb.discover(root, depth=6)["path"]:
            if not path.startswith("logs"):
                found.append((root, path))
    return found


@pytest.mark.parametrize(("root", "path"), healthy(), ids=lambda value: getattr(value, "name", value))
def test_a_healthy_sample_is_clean_at_every_depth(root, path):
    for deep in (False, True):
        report = verify(root / path, deep=deep, threads=2)
        told = {one.rule for one in report if one.severity != "info"}
        assert told == (SICK.get(path, set()) if deep else set()), report
        assert report.checked and "values" in (report.checked if deep else report.not_checked)
        assert repr(report).splitlines()[0].endswith("; values not checked") is not deep


def test_outside_samples_were_there():
    if not OUTSIDE:
        pytest.skip("WORKBENCH_SAMPLES is not set: only the committed samples were verified")
    assert len(healthy()) > 40


# ---- helpers -------------------------------------------------------------------------------------------------------


def model(layers: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            found[f"model.layers.{layer}.{name}.weight"] = torch.randn(64, 64).to(dtype)
    return found


def sharded(folder: Path, tensors: dict[str, torch.Tensor], files: int = 4) -> Path:
    """An index and its files, each of some of the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: f"model-{k % files + 1:05d}-of-{files:05d}.safetensors" for k, name in enumerate(tensors)}
    for file in set(weights.values()):
        save_file({name: tensors[name] for name, where in weights.items() if where == file}, folder / file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def save(tensors: dict[str, torch.Tensor], path: Path, dcp: bool) -> None:
    """A folder of safetensors, or of DCP; what was there is gone."""
    shutil.rmtree(path, ignore_errors=True)
    if dcp:
        torch.distributed.checkpoint.save(tensors, checkpoint_id=path, no_dist=True)
    else:
        path.mkdir()
        save_file(tensors, path / "model.safetensors")


def trained(weight: torch.dtype = torch.float32) -> dict:
    """model and optimizer of one torch.save file, names told by the optimizer."""
    params = model(3, weight)
    return {
        "model": params,
        "optimizer": {
            "state": {
                name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.rand(64, 64)}
                for name in params
            },
            "param_groups": [{"lr": 1e-3, "params": list(params)}],
        },
    }


def told(report, rule):
    """The findings of a rule."""
    return [one for one in report if one.rule == rule]


def one(report, rule):
    """The finding of a rule: there is one, and nothing graver than a remark beside it."""
    found = told(report, rule)
    assert len(found) == 1, report
    assert [f.rule for f in report if f.severity != "info"] in ([rule], []), report
    return found[0]


# ---- opening -------------------------------------------------------------------------------------------------------


def test_nothing_at_the_path_is_raised_and_damage_is_reported(tmp_path):
    with pytest.raises(errors.NotACheckpointError):
        verify(tmp_path / "absent")
    (tmp_path / "x.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{]      ")
    report = verify(tmp_path / "x.safetensors", deep=True)
    assert report.exit_code == 2 and report[0].rule == "open.corrupt"
    assert "everything else" in report.not_checked


def test_what_opens_in_part_is_checked_in_part(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/dcp_fsdp2", tmp_path / "c")
    (folder / "__2_0.distcp").unlink()
    report = verify(folder, deep=True)
    assert {f.rule for f in report if f.severity != "info"} == {"files.missing"}
    lost = told(report, "files.missing")[0]
    assert lost.where == "__2_0.distcp" and lost.evidence["chunks"] > 100
    assert "values" in report.checked and "checksums" in report.checked


def test_a_checkpoint_that_is_open_already_is_verified_as_it_is(tmp_path):
    with wb.open(sharded(tmp_path / "c", model())) as ckpt:
        assert verify(ckpt, deep=True).exit_code == 0


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_is_rewritten_meanwhile_is_not_called_damaged(tmp_path, deep):
    path = tmp_path / "copy"
    shutil.copytree(ROOT / "sample_ckpts/dcp_fsdp2", path)
    ckpt, file = wb.open(path, cache=False), path / "__0_0.distcp"
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(1, 1))
    found = {one.rule: one for one in verify(ckpt, deep=deep) if one.severity == "error"}
    assert found.keys() == {"read.failed"}
    assert "was rewritten after" in found["read.failed"].message and "verify it again" in found["read.failed"].hint


def test_one_file_hours_older_than_its_siblings(tmp_path):
    folder = sharded(tmp_path / "c", model())
    assert verify(folder).exit_code == 0
    os.utime(folder / "model-00003-of-00004.safetensors", (1e9, 1e9))
    found = one(verify(folder), "files.age")
    assert found.where == "model-00003-of-00004.safetensors" and found.severity == "warn"
    for number in range(1, 5):  # a slow copy: every file 50 minutes after the one before
        os.utime(folder / f"model-{number:05d}-of-00004.safetensors", (1e9 + number * 3000, 1e9 + number * 3000))
    assert verify(folder).exit_code == 0


def test_links_of_the_hubs_cache_may_be_of_any_age(tmp_path):
    repo = tmp_path / "models--a--b"
    sharded(repo / "blobs", model())
    snapshot = repo / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((repo / "blobs").iterdir())):
        os.utime(path, (1e9 + number * number * 10 * H,) * 2)
        (snapshot / path.name).symlink_to(path)
    assert verify(snapshot, deep=True).exit_code == 0


def test_permissions_leftovers_and_unlisted_shards(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/dcp_fsdp2", tmp_path / "c")
    (folder / "__1_0.distcp").chmod(0o600)
    (folder / ".metadata.tmp").write_bytes(b"x")
    (folder / "__9_0.distcp").write_bytes(b"of a run with more ranks")
    (folder / "__8_0.distcp").write_bytes(b"")  # an empty rank's file is no remainder
    report = verify(folder)
    rules = {f.rule: f.where for f in report if f.severity == "warn"}
    assert rules == {
        "files.permissions": "__1_0.distcp",
        "files.leftover": ".metadata.tmp",
        "files.unlisted": "__9_0.distcp",
    }


def test_a_linked_folder_is_not_listed(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/dcp_fsdp2", tmp_path / "c")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / ".metadata.tmp").write_bytes(b"x")
    (folder / "logs").symlink_to(tmp_path / "outside")
    assert "files.leftover" not in {found.rule for found in verify(folder)}
    (folder / "logs").unlink()
    (tmp_path / "outside").rename(folder / "logs")
    assert one(verify(folder), "files.leftover").where == "logs/.metadata.tmp"


def test_a_file_that_may_not_be_read_is_one_finding(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/dcp_fsdp2", tmp_path / "c")
    (folder / "__1_0.distcp").chmod(0)
    code = "import sys, os, json, zlib, workbench.formats.dcp.reader as _, workbench.core.checksums as _\n"
    code += "from workbench.analysis import manifest_check as _\nfrom workbench.analysis.verify import verify\n"
    if os.geteuid() == 0:  # who may read every file
        for path in (folder, *folder.parents):
            if path.is_relative_to(gettempdir()) and path != Path(gettempdir()):
                path.chmod(path.stat().st_mode | 0o055)
        for path in folder.iterdir():
            path.chmod(0 if path.name == "__1_0.distcp" else 0o644)
        code += "os.seteuid(65534)\n"
    code += "print(json.dumps([verify(sys.argv[1], deep=d, threads=1).to_dict()['findings'] for d in (False, True)]))"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for findings in json.loads(done.stdout):
        graver = [(f["rule"], f["where"]) for f in findings if f["severity"] != "info"]
        assert graver == [("files.unreadable", "__1_0.distcp")]


def test_bytes_after_the_last_item(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/dcp_fsdp2", tmp_path / "c")
    with open(folder / "__3_0.distcp", "ab") as handle:
        handle.write(b"of a larger save")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    assert one(verify(folder), "files.trailing").where == "__3_0.distcp"


def test_bytes_after_a_legacy_file(tmp_path):
    shared = torch.randn(8)
    for name in ("x.pt", "f/pytorch_model.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        torch.save({"v": shared[1:3], "w": torch.ones(3), "n": 1}, path, _use_new_zipfile_serialization=False)
        where = path if name == "x.pt" else path.parent
        assert verify(where, deep=True).exit_code == 0
        with open(path, "ab") as handle:
            handle.write(b"junk")
        found = one(verify(where), "files.trailing")
        assert (found.where, found.severity) == (path.name, "warn") and "has 4 bytes after" in found.message


@pytest.mark.parametrize("rank", ["mp_rank_00_model_states.pt", "mp_rank_00/model_optim_rng.pt"])
def test_bytes_after_a_rank_s_legacy_file(tmp_path, rank):
    folder = tmp_path / ("global_step4" if "states" in rank else "iter_0000010")
    if "states" in rank:
        shutil.copytree(ROOT / "sample_ckpts/deepspeed_zero1/global_step4", folder)
    else:
        write_legacy(folder, Model(layers=1))
    torch.save(torch.load(folder / rank, weights_only=False), folder / rank, _use_new_zipfile_serialization=False)
    assert not told(verify(folder), "files.trailing")
    with open(folder / rank, "ab") as handle:
        handle.write(b"junk")
    found = one(verify(folder), "files.trailing")
    assert (found.where, found.severity) == (rank, "warn") and "has 4 bytes after" in found.message


def test_a_hole_on_disk_is_named_with_its_bytes(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.randn(1 << 18), "z": torch.zeros(4)}, path)
    size = path.stat().st_size
    data = path.read_bytes()
    with open(path, "wb") as handle:
        handle.truncate(size)
        handle.write(data[: 1 << 18])
        handle.seek(1 << 19)
        handle.write(data[1 << 19 :])
    if path.stat().st_blocks * 512 >= size:
        pytest.skip("this file system keeps no holes")
    found = one(verify(path), "files.sparse")
    assert found.severity == "warn" and found.evidence["start"] == 1 << 18 and found.evidence["stop"] == 1 << 19
    assert found.evidence["tensors"] == ["w"]
    deep = told(verify(path, deep=True), "values.zero_pages")[0]
    assert deep.evidence["start"] <= 1 << 18 < 1 << 19 <= deep.evidence["stop"]


def test_the_tracker_of_the_run(tmp_path):
    run = shutil.copytree(ROOT / "sample_ckpts/deepspeed_zero1", tmp_path / "run")
    assert verify(run / "global_step4").exit_code == 0
    (run / "latest").write_text("global_step9")
    found = verify(run / "global_step4")
    assert one(found, "commit.tracker").where == "../latest" and "'latest'" in found.checked["commit"]
    (run / "latest").unlink()
    assert "tracker" not in verify(run / "global_step4").checked["commit"]


# ---- index ---------------------------------------------------------------------------------------------------------


def test_an_index_that_lists_less_or_claims_more(tmp_path):
    folder = sharded(tmp_path / "c", model())
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["metadata"]["total_size"] += 4
    path.write_text(json.dumps(document))
    found = one(verify(folder), "index.total_size")
    assert found.evidence["claimed"] - found.evidence["stored"] == 4
    document["metadata"]["total_size"] -= 4 + 64 * 64 * 4
    del document["weight_map"]["model.layers.2.k.weight"]
    path.write_text(json.dumps(document))
    assert one(verify(folder), "index.unlisted").evidence["tensors"] == ["model.layers.2.k.weight"]


def test_a_tensor_in_two_files(tmp_path):
    tensors = model()
    folder = sharded(tmp_path / "c", tensors)
    other = {n: tensors[n] for n in tensors if n.endswith(".k.weight")} | {"model.layers.0.q.weight": torch.ones(2)}
    save_file(other, folder / "model-00002-of-00004.safetensors")
    assert one(verify(folder), "index.duplicate").evidence["tensors"] == ["model.layers.0.q.weight"]


# ---- names, state, ranks, steps ------------------------------------------------------------------------------------


def test_a_stack_that_lacks_a_layer_and_a_type_that_stands_out(tmp_path):
    tensors = {n: t for n, t in model(6).items() if ".layers.3." not in n}
    save_file(tensors, tmp_path / "gap.safetensors")
    assert one(verify(tmp_path / "gap.safetensors"), "names.layer_gap").where == "model.layers.3"
    half = model(6, torch.bfloat16)
    half["model.layers.2.v.weight"] = half["model.layers.2.v.weight"].to(torch.float16)
    save_file(half, tmp_path / "half.safetensors")
    assert one(verify(tmp_path / "half.safetensors"), "names.dtype").where == "model.layers.2.v.weight"
    # a Sequential with activations between, and pipeline stages that begin anywhere, are no gaps
    save_file({f"net.{k}.weight": torch.randn(4) for k in (0, 2, 4)}, tmp_path / "net.safetensors")
    assert verify(tmp_path / "net.safetensors").exit_code == 0


NAMES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")


def stack(layers, names=NAMES):
    """A stack of layers; ``names`` is what each of them has, or a function of its number."""
    of = names if callable(names) else lambda layer: names
    return {f"model.layers.{k}.{name}.weight": torch.randn(4, 4) for k in layers for name in of(k)}


@pytest.mark.parametrize("dcp", [False, True])
@pytest.mark.parametrize(
    ("there", "absent"),
    [
        ([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [5]),
        ([0, 1, 3], [2]),
        ([0, 1, 2, 4, 5, 6], [3]),
        ([4, 5, 7], [6]),
    ],
)
def test_a_stack_that_lacks_a_layer(tmp_path, there, absent, dcp):
    for names in (NAMES, NAMES[:2]):
        save(stack(there, names), tmp_path / "c", dcp)
        found = one(verify(tmp_path / "c"), "names.layer_gap")
        assert (found.severity, found.evidence["absent"]) == ("warn", absent)


@pytest.mark.parametrize("there", [[0, 1, 50], [0, 1, 20, 31], [2, 5, 100_000]])
def test_layers_between_which_most_are_absent_are_a_remark(tmp_path, there):
    """Whether they were selected or the others were lost, their names do not say."""
    save(stack(there), tmp_path / "c", False)
    report = verify(tmp_path / "c")
    found = one(report, "names.layer_gap")
    lost = there[-1] - there[0] + 1 - len(there)
    assert (found.severity, report.exit_code) == ("info", 0) and f"{lost:,} of {lost + len(there):,}" in found.message
    assert len(found.evidence["absent"]) == min(lost, 1000)


@pytest.mark.parametrize("dcp", [False, True])
def test_a_layer_that_lacks_what_its_neighbours_have(tmp_path, dcp):
    save(stack(range(12), lambda k: NAMES[2:3] if k == 5 else NAMES), tmp_path / "c", dcp)
    found = one(verify(tmp_path / "c"), "names.layer_part")
    assert (found.severity, found.where) == ("warn", "model.layers.5") and "lacks 3 of the 4 tensors" in found.message
    save(stack(range(12), lambda k: NAMES[:3] if k == 5 else NAMES), tmp_path / "c", dcp)
    assert one(verify(tmp_path / "c"), "names.layer_part").evidence["absent"] == ["mlp.down_proj.weight"]
    save(stack(range(12), lambda k: NAMES[2:3] if k == 11 else NAMES), tmp_path / "c", dcp)
    assert one(verify(tmp_path / "c"), "names.layer_part").where == "model.layers.11"


MAMBA = ("mixer.in_proj", "mixer.conv1d", "mixer.out_proj")


@pytest.mark.parametrize(
    "tensors",
    [
        stack([1, 2, 3]),  # a pipeline stage
        stack([0, 1, 2, 3, 8, 9, 10, 11]),  # the first rank of an interleaved pipeline
        stack([0, 2, 4, 6]),
        stack(range(12), lambda k: NAMES if k % 4 == 3 else MAMBA),  # hybrids
        stack([k for k in range(12) if k != 3], lambda k: NAMES if k % 4 == 3 else MAMBA + NAMES[2:])
        | stack([3], NAMES),
        stack(range(12), lambda k: NAMES if k < 8 else (NAMES[0], *NAMES[2:])),  # keys and values of earlier layers
        stack(range(6), lambda k: NAMES[1:] if k == 0 else NAMES),  # no norm before the first
        stack(range(6), lambda k: (*NAMES, "mlp.gate") if k > 1 else NAMES),  # experts from the third layer on
        stack(range(6), lambda k: NAMES[:2] + (NAMES[2:] if k < 1 else tuple(f"mlp.experts.{e}.up" for e in (0, 1)))),
        {f"net.layers.{k}.{leaf}": torch.randn(4) for k in (0, 1, 3, 5, 6, 7) for leaf in ("weight", "bias")},
    ],
    ids=range(10),
)
def test_stacks_that_are_as_they_should_be(tmp_path, tensors):
    save_file(tensors, tmp_path / "c.safetensors")
    assert not [f for f in verify(tmp_path / "c.safetensors") if f.rule.startswith("names.layer")]


def test_numbers_of_any_size_are_counted(tmp_path):
    for count in (2, 100_000, 99_999_999_999, 10**30):
        folder = tmp_path / str(count)
        folder.mkdir()
        save_file({"w": torch.ones(2)}, folder / f"model-00001-of-{count:05d}.safetensors")
        assert f"{count - 1:,} of {count:,} files 'model'" in one(verify(folder), "commit.incomplete").message
    for last in (2, 10**12):
        folder = tmp_path / f"rng{last}"
        folder.mkdir()
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text("{}")
        for rank in (0, last):
            torch.save({}, folder / f"rng_state_{rank}.pth")
        found = one(verify(folder), "ranks.gap")
        assert found.where == "rng_state_1.pth" and len(found.evidence["lost"]) == min(last - 1, 1000)


def test_state_that_a_parameter_lacks(tmp_path):
    state = trained()
    del state["optimizer"]["state"]["model.layers.1.k.weight"]["exp_avg_sq"]
    torch.save(state, tmp_path / "c.pt")
    found = one(verify(tmp_path / "c.pt"), "state.partner")
    assert found.evidence == {"role": "exp_avg_sq"} and "layers.1.k" in found.where
    state = trained()
    del state["optimizer"]["state"]["model.layers.1.k.weight"]  # frozen
    torch.save(state, tmp_path / "c.pt")
    assert verify(tmp_path / "c.pt").exit_code == 0 and told(verify(tmp_path / "c.pt"), "state.none")
    state = trained()
    del state["model"]["model.layers.1.k.weight"]
    torch.save(state, tmp_path / "c.pt")
    assert one(verify(tmp_path / "c.pt"), "state.orphan")
    state = trained()
    state["optimizer"]["state"]["model.layers.1.k.weight"]["exp_avg"] = torch.randn(3)
    torch.save(state, tmp_path / "c.pt")
    assert one(verify(tmp_path / "c.pt"), "state.shape")


def test_one_optimizer_step_that_differs(tmp_path):
    state = trained()
    state["optimizer"]["state"]["model.layers.1.k.weight"]["step"] = torch.tensor(5.0)
    torch.save(state, tmp_path / "c.pt")
    found = one(verify(tmp_path / "c.pt"), "steps.optimizer")
    assert found.evidence["step"] == 5 and found.evidence["usual"] == 7


def test_trainer_optimizer_and_folder_tell_one_step(tmp_path):
    state = trained() | {"global_step": 7}
    torch.save(state, tmp_path / "step-7.pt")
    assert verify(tmp_path / "step-7.pt").exit_code == 0
    torch.save(state, tmp_path / "step-9000.pt")
    assert one(verify(tmp_path / "step-9000.pt"), "steps.folder").evidence == {"named": 9000, "stored": 7}
    torch.save(state | {"global_step": 70}, tmp_path / "c.pt")
    assert one(verify(tmp_path / "c.pt"), "steps.trainer").severity == "warn"
    # a gradient scaler skips steps
    torch.save(state | {"global_step": 70, "scaler": {"scale": 65536.0}}, tmp_path / "c.pt")
    assert verify(tmp_path / "c.pt").exit_code == 0


def test_a_trainers_step_may_count_the_steps_of_all_optimizers(tmp_path):
    one_of = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}}, "param_groups": [{"params": [0]}]}
    states = [one_of | {"state": {0: {k: v.clone() for k, v in one_of["state"][0].items()}}} for _ in range(4)]
    torch.save({"optimizer_states": states, "global_step": 12}, tmp_path / "c.pt")
    assert not told(verify(tmp_path / "c.pt"), "steps.trainer")
    torch.save({"optimizer_states": states, "global_step": 40}, tmp_path / "c.pt")
    assert told(verify(tmp_path / "c.pt"), "steps.trainer")


def test_ranks_that_disagree_and_ranks_that_are_gone(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/bytecheckpoint_fsdp1_flat/global_step_3", tmp_path / "global_step_3")
    (folder / "extra_state/extra_state_rank_2.pt").unlink()
    found = told(verify(folder), "ranks.gap")[0]
    assert found.where == "extra_state/extra_state_rank_2.pt" and found.evidence["lost"] == [2]
    shutil.copy(folder / "extra_state/extra_state_rank_3.pt", folder / "extra_state/extra_state_rank_2.pt")
    state = torch.load(folder / "extra_state/extra_state_rank_2.pt", weights_only=False)
    torch.save(state | {"global_step": 2}, folder / "extra_state/extra_state_rank_2.pt")
    assert told(verify(folder), "steps.parts")[0].where == "extra_state_rank_2"


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "complex64", "complex128"]
)
@pytest.mark.parametrize(("value", "rule"), [("nan", "values.nan"), ("inf", "values.inf"), ("-inf", "values.inf")])
def test_nan_and_infinities_of_every_type_are_found_where_they_are(tmp_path, dtype, value, rule):
    tensor = torch.randn(33, 31, dtype=torch.float32).to(getattr(torch, dtype))
    raw = tensor.view(torch.uint8) if "float8" in dtype else tensor
    bad = torch.tensor(float(value)).to(getattr(torch, dtype))
    raw[20, 7] = bad.view(torch.uint8) if "float8" in dtype else bad
    torch.save({"w": tensor}, tmp_path / "c.pt")
    found = one(verify(tmp_path / "c.pt", deep=True), rule)
    assert found.severity == "error" and found.where == "w" and found.evidence["first"] == [20, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_each_finding_names_the_first_of_its_own_elements(tmp_path, dtype):
    tensor = torch.ones(100, dtype=dtype)
    tensor[3], tensor[50], tensor[60] = torch.nan, -torch.inf, torch.inf
    torch.save({"w": tensor}, tmp_path / "c.pt")
    report = verify(tmp_path / "c.pt", deep=True)
    nan, inf = told(report, "values.nan")[0], told(report, "values.inf")[0]
    assert nan.evidence["first"] == [3] and "first at [3]" in nan.message
    assert inf.evidence["first"] == [50] and "2 of 100 elements are infinite" in inf.message
    assert "first at [50]" in inf.message
    state = {"exp_avg_sq": torch.tensor([0.0, torch.nan, -1.0, *[1.0] * 9]), "step": torch.tensor(1.0)}
    model = {"w": torch.ones(12)}
    optimizer = {"state": {0: state | {"exp_avg": torch.ones(12)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "d.pt")
    report = verify(tmp_path / "d.pt", deep=True)
    for rule, first in (("values.nan", [1]), ("values.negative_square", [2])):
        assert [found.evidence["first"] for found in told(report, rule)] == [first], rule


def test_a_complex_number_is_one_element(tmp_path):
    nan, inf = float("nan"), float("inf")
    halves = ((1, 2), (nan, nan), (nan, 0), (0, nan), (inf, nan), (inf, 0), (0, -inf), (inf, -inf), (-inf, 3))
    tensor = torch.tensor([complex(*one) for one in halves])
    torch.save({"w": tensor}, tmp_path / "c.pt")
    report = verify(tmp_path / "c.pt", deep=True)
    assert told(report, "values.nan")[0].evidence["nan"] == int(tensor.isnan().sum()) == 4
    inf = told(report, "values.inf")[0].evidence
    assert inf["posinf"] + inf["neginf"] == int((tensor.isinf() & ~tensor.isnan()).sum()) == 4


def test_nan_of_types_without_infinity(tmp_path):
    codes = [("float8_e4m3fn", 0x7F), ("float8_e4m3fn", 0xFF), ("float8_e4m3fnuz", 0x80), ("float8_e5m2fnuz", 0x80)]
    if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7: no sign, and one NaN
        codes.append(("float8_e8m0fnu", 0xFF))
    for dtype, code in codes:
        tensor = torch.randint(0, 100, (300,), dtype=torch.uint8)
        tensor[255] = code
        torch.save({"w": tensor.view(getattr(torch, dtype))}, tmp_path / "c.pt")
        assert one(verify(tmp_path / "c.pt", deep=True), "values.nan").evidence["nan"] == 1, dtype


def test_every_finite_float16_and_bfloat16_is_fine_and_every_other_counted(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        everything = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        torch.save({"w": everything}, tmp_path / "c.pt")
        report = verify(tmp_path / "c.pt", deep=True)
        assert told(report, "values.nan")[0].evidence["nan"] == int(everything.isnan().sum())
        inf = told(report, "values.inf")[0].evidence
        assert (inf["posinf"], inf["neginf"]) == (1, 1)
        torch.save({"w": everything[everything.isfinite()].clone()}, tmp_path / "c.pt")
        assert verify(tmp_path / "c.pt", deep=True).exit_code == 0


def test_infinity_in_a_mask_is_a_remark(tmp_path):
    save_file(
        {"layers.0.attn.mask": torch.full((4, 4), -torch.inf), "layers.0.w": torch.ones(2)}, tmp_path / "c.safetensors"
    )
    report = verify(tmp_path / "c.safetensors", deep=True)
    assert report.exit_code == 0 and told(report, "values.inf")[0].severity == "info"


def test_a_negative_second_moment(tmp_path):
    state = trained()
    state["optimizer"]["state"]["model.layers.1.k.weight"]["exp_avg_sq"][5, 6] *= -1
    state["optimizer"]["state"]["model.layers.0.k.weight"]["exp_avg_sq"][5, 6] = -0.0  # a zero
    torch.save(state, tmp_path / "c.pt")
    found = one(verify(tmp_path / "c.pt", deep=True), "values.negative_square")
    assert found.evidence["first"] == [5, 6] and found.evidence["negative"] == 1


def test_a_tensor_of_zeros_among_others(tmp_path):
    tensors = model(5)
    tensors["model.layers.3.o.weight"] = torch.zeros(64, 64)
    save_file(tensors, tmp_path / "c.safetensors")
    assert one(verify(tmp_path / "c.safetensors", deep=True), "values.all_zero").where == "model.layers.3.o.weight"
    save_file({n: torch.zeros(4) if ".o." in n else t for n, t in tensors.items()}, tmp_path / "c.safetensors")
    assert verify(tmp_path / "c.safetensors", deep=True).exit_code == 0  # all alike: fresh LoRA, biases


# ---- zero pages ----------------------------------------------------------------------------------------------------


def zeroed(tmp_path: Path, tensor: torch.Tensor, start: int, stop: int) -> Path:
    """A safetensors file with bytes of the *file* zeroed."""
    path = tmp_path / "c.safetensors"
    save_file({"w": tensor}, path)
    data = bytearray(path.read_bytes())
    data[start : min(stop, len(data))] = bytes(min(stop, len(data)) - start)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("width", [100, 64, 1000, 4097])
def test_a_lost_page_is_found_in_any_shape(tmp_path, dtype, width):
    torch.manual_seed(1)
    tensor = (torch.randn(200_000 // width, width) * 1000 + 1).to(dtype)
    for page, count in ((5, 1), (17, 3)):
        found = told(
            verify(zeroed(tmp_path, tensor, page * 4096, (page + count) * 4096), deep=True), "values.zero_pages"
        )
        assert len(found) == 1, (page, count)
        assert found[0].where == "w" and found[0].evidence["file"] == "c.safetensors"
        assert found[0].evidence["start"] <= page * 4096 and found[0].evidence["stop"] >= (page + count) * 4096
        assert found[0].evidence["stop"] - found[0].evidence["start"] < count * 4096 + 32


def test_a_lost_tail_is_found_and_padded_rows_are_not(tmp_path):
    tensor = torch.randn(1000, 300)
    path = zeroed(tmp_path, tensor, 900_001, 1 << 30)
    assert one(verify(path, deep=True), "values.zero_pages").evidence["stop"] == path.stat().st_size
    tensor[900:] = 0  # a vocabulary padded to a round number
    tensor[100:120] = 0  # tokens that never came up
    save_file({"w": tensor}, path)
    assert verify(path, deep=True).exit_code == 0


def test_thousands_of_natural_zero_rows_raise_nothing(tmp_path):
    rng = np.random.default_rng(0)
    for width in (1024, 512, 128, 333, 2048):
        tensor = torch.randn(4000, width)
        tensor[torch.from_numpy(rng.random(4000) < 0.9)] = 0  # moments of tokens never seen
        torch.save({"w": tensor}, tmp_path / "c.pt")
        save_file({"w": tensor}, tmp_path / "c.safetensors")
        for name in ("c.pt", "c.safetensors"):
            assert verify(tmp_path / name, deep=True).exit_code == 0, (width, name)
    triangle = torch.tril(torch.randn(3000, 3000))  # a mask of its own kind
    save_file({"w": triangle}, tmp_path / "c.safetensors")
    assert verify(tmp_path / "c.safetensors", deep=True).exit_code == 0


def test_a_lost_page_in_a_strided_tensor_and_in_an_item_of_dcp(tmp_path):
    torch.save({"w": torch.randn(500, 400).t()}, tmp_path / "c.pt")
    path = tmp_path / "c.pt"
    data = bytearray(path.read_bytes())
    data[9 * 4096 : 10 * 4096] = bytes(4096)
    path.write_bytes(data)
    report = verify(path, deep=True)
    assert {f.rule for f in report} == {"values.zero_pages", "checksum.mismatch"}


# ---- pairs ---------------------------------------------------------------------------------------------------------


def test_masters_that_are_not_what_the_weights_are_rounded_from(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/deepspeed_zero1", tmp_path / "run") / "global_step4"
    with wb.open(folder) as ckpt:
        key = next(k for k in ckpt if ckpt[k].role == "param" and ckpt[k].numel() > 4096)
        row = int(ckpt.catalog.row_ptr[ckpt.catalog.index[key]])
        inner = 0 if ckpt.catalog.inner is None else int(ckpt.catalog.inner[row])
        at = int(ckpt.catalog.start[row]) + inner
        file = folder / ckpt.catalog.files[ckpt.catalog.file[row]]
    data = bytearray(file.read_bytes())
    data[at + 100] ^= 4
    file.write_bytes(data)
    found = told(verify(folder, deep=True), "master.differs")[0]
    assert found.where == key and found.evidence["differ"] == 1 and found.evidence["ulps"] == 4


def test_where_masters_first_differ_is_said_on_the_axes_of_the_tensor(tmp_path):
    """A position in a vector is one number, even beside a matrix."""
    weights = {"a.weight": torch.ones(4, 5), "a.bias": torch.ones(3)}
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["a.weight"][2, 3] = other["a.bias"][2] = 2
    state = {name: {"exp_avg": torch.zeros_like(w), "master_param": w} for name, w in other.items()}
    halves = {name: weight.half() for name, weight in weights.items()}
    stored = {"model": halves, "optimizer": {"state": state, "param_groups": [{"params": list(weights)}]}}
    torch.save(stored, tmp_path / "c.pt")
    found = told(verify(tmp_path / "c.pt", deep=True), "master.differs")
    assert [finding.evidence["first"] for finding in found] == [[2, 3], [2]]
    assert found[1].message.endswith("first at [2]")


def test_rounding_is_torchs_for_every_kind_of_number():
    from workbench.analysis.verify.pairs import Rounding

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    edge = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16) | np.array(
        [0, 0x7FFF, 0x8000, 0x8001], np.uint32
    )
    for numbers in (bits, edge.reshape(-1)):
        wide = numbers.view(np.float32)
        wide = wide[~np.isnan(wide)]
        for half, dtype in ((False, torch.bfloat16), (True, torch.float16)):
            want = torch.from_numpy(wide.copy()).to(dtype).view(torch.uint16).numpy()
            assert (Rounding.rounded(2, half, wide.view(np.uint32)) == want).all(), dtype


def masters(weight: torch.Tensor, master: torch.Tensor) -> dict:
    return {
        "model": {"a.weight": weight},
        "optimizer": {
            "state": {"a.weight": {"exp_avg": torch.randn_like(master), "master_param": master}},
            "param_groups": [{"params": ["a.weight"]}],
        },
    }


def test_stochastic_rounding_is_a_warning_and_rebuilt_masters_too(tmp_path):
    master = torch.randn(100, 100)
    weight = master.to(torch.bfloat16)
    torch.save(masters(weight, master), tmp_path / "c.pt")
    report = verify(tmp_path / "c.pt", deep=True)
    assert report.exit_code == 0 and "bfloat16" in report.checked["masters"]
    other = (weight.view(torch.int16) + torch.randint(0, 2, weight.shape, dtype=torch.int16)).view(torch.bfloat16)
    torch.save(masters(other, master), tmp_path / "c.pt")
    assert one(verify(tmp_path / "c.pt", deep=True), "master.rounding")
    torch.save(masters(weight, weight.float()), tmp_path / "c.pt")
    assert one(verify(tmp_path / "c.pt", deep=True), "master.low_bits").evidence["share"] == 1
    ones = torch.ones(100, 100)
    torch.save(masters(ones.to(torch.bfloat16), ones), tmp_path / "c.pt")  # a norm that was never trained
    assert verify(tmp_path / "c.pt", deep=True).exit_code == 0


def test_tied_tensors_that_differ(tmp_path):
    embed = torch.randn(50, 8)
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone()}
    folder = sharded(tmp_path / "c", tensors, files=1)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    report = verify(folder, deep=True)
    assert report.exit_code == 0 and "ties" in report.checked
    tensors["lm_head.weight"][3, 3] += 1
    sharded(folder, tensors, files=1)
    assert one(verify(folder, deep=True), "tied.differ").where == "lm_head.weight"
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert verify(folder, deep=True).exit_code == 0


# ---- what was written down -----------------------------------------------------------------------------------------


def test_integrity_json_and_the_hubs_digests(tmp_path):
    folder = shutil.copytree(ROOT / "sample_ckpts/megatron_dp_reshardable", tmp_path / "c")
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    report = verify(folder, deep=True)
    assert report.exit_code == 0 and "digests" in report.checked
    (folder / "metadata.json").write_text((folder / "metadata.json").read_text() + "\n")
    assert one(verify(folder, deep=True), "digest.mismatch").where == "metadata.json"

    folder = sharded(tmp_path / "hub", model(), files=2)
    notes = folder / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    for path in folder.glob("*.safetensors"):
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        (notes / f"{path.name}.metadata").write_text(f"{'0' * 40}\n{etag}\n1700000000.0\n")
    report = verify(folder, deep=True)
    assert report.exit_code == 0 and "flips" not in report.not_checked
    path = folder / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert one(verify(folder, deep=True), "digest.mismatch").where == path.name


def test_without_checksums_the_report_says_how_many_tensors_may_be_flipped(tmp_path):
    folder = sharded(tmp_path / "c", model())
    assert "in 16 of 16 tensors" in verify(folder, deep=True).not_checked["flips"]
    torch.save(model(), tmp_path / "c.pt")
    assert "flips" not in verify(tmp_path / "c.pt", deep=True).not_checked
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(model(), tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path / "c.pt", deep=True)
    assert report.exit_code == 0 and "in 16 of 16 tensors" in report.not_checked["flips"]


#: Files and items that hold objects and, but for the controls, no tensor of the catalog.
OBJECTS = (
    ("trainer_run/checkpoint-3", "rng_state.pth"),
    ("trainer_run/checkpoint-3", "scheduler.pt"),
    ("trainer_run/checkpoint-3", "training_args.bin"),
    ("bytecheckpoint_fsdp1_flat/global_step_3", "extra_state/extra_state_rank_1.pt"),
    ("bytecheckpoint_fsdp1_flat/global_step_3", "optimizer/__0_0.distcp"),  # param_groups, before tensors without CRC
    ("megatron_dp_reshardable", "common.pt"),
    ("titan_run/step-2", "__0_0.distcp"),  # dataloader.dp_rank_0 comes first
)


def accelerate_state(folder: Path) -> Path:
    """Write what ``Accelerator.save_state`` writes: archives of torch.save that end in ``.bin`` and ``.pkl``."""
    folder.mkdir()
    save_file(model(1), folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "optimizer.bin")
    torch.save({"last_epoch": 3, "_last_lr": [0.1]}, folder / "scheduler.bin")
    torch.save({"torch_manual_seed": torch.get_rng_state(), "step": 3}, folder / "random_states_0.pkl")
    torch.save({"counter": 4}, folder / "custom_checkpoint_0.pkl")
    return folder


def check_every_record(checkpoint: Path, name: str, most: int = 12) -> int:
    """Flip a bit in each of the first records of a file: deep verify names it, with its bytes and both CRCs."""
    path, chance = checkpoint / name, random.Random(name)
    whole, stat = path.read_bytes(), path.stat()
    records = checked_records(whole)[:most]
    for record, start, stop in records:
        at = chance.randrange(start, stop)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        report = verify(checkpoint, deep=True, threads=1)
        (found,) = told(report, "checksum.mismatch")
        place = {key: found.evidence[key] for key in ("file", "record", "start", "stop")}
        assert place == {"file": name, "record": record, "start": start, "stop": stop}
        assert found.evidence["computed"] == zlib.crc32(path.read_bytes()[start:stop])
        assert found.evidence["stored"] == zlib.crc32(whole[start:stop])
        assert repr(record) in found.message and f"{start:,} to {stop:,} of {name!r}" in found.message
        assert (
            f"{found.evidence['stored']:08x}" in found.message and f"{found.evidence['computed']:08x}" in found.message
        )
        assert report.exit_code == 2
    path.write_bytes(whole)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return len(records)


@pytest.mark.parametrize(("sample", "name"), OBJECTS)
def test_every_record_of_files_and_items_without_tensors_is_compared(tmp_path, sample, name):
    shutil.copytree(ROOT / "sample_ckpts" / sample, tmp_path / "c")
    assert check_every_record(tmp_path / "c", name) >= 5
    assert verify(tmp_path / "c", deep=True).exit_code == 0


def test_every_record_of_accelerates_states_is_compared(tmp_path):
    folder = accelerate_state(tmp_path / "c")
    for name in ("scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        assert check_every_record(folder, name) >= 5
    assert verify(folder, deep=True).exit_code == 0


def test_one_file_without_tensors_is_a_checkpoint_that_is_compared_too(tmp_path):
    torch.save({"epoch": 3, "name": "run"}, tmp_path / "state.pt")
    path = tmp_path / "state.pt"
    data = path.read_bytes()
    start = next(start for name, start, _ in checked_records(data) if name.endswith("/.data/serialization_id"))
    path.write_bytes(data[:start] + bytes([data[start] ^ 8]) + data[start + 1 :])
    assert one(verify(path, deep=True), "checksum.mismatch").evidence["start"] == start


def test_long_records_of_such_files_are_cut_and_combined(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums_module, "TASK", 1000)
    shutil.copytree(ROOT / "sample_ckpts/trainer_run/checkpoint-3", tmp_path / "c")
    assert check_every_record(tmp_path / "c", "rng_state.pth") >= 5


def test_a_file_of_objects_without_checksums_is_not_called_damaged(tmp_path):
    folder = accelerate_state(tmp_path / "c")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"last_epoch": 3, "_last_lr": [0.1]}, folder / "scheduler.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(folder, deep=True)
    assert report.exit_code == 0
    assert report.not_checked["checksums"] == "'scheduler.bin': saved without checksums"
    data = (folder / "scheduler.bin").read_bytes()
    assert b"last_epoch" in data
    (folder / "scheduler.bin").write_bytes(data.replace(b"last_epoch", b"lost_epoch"))
    assert not told(verify(folder, deep=True), "checksum.mismatch")


def test_what_is_no_part_of_the_checkpoint_is_not_judged_by_its_archives(tmp_path):
    """A shard of an older save and a save that still runs are reported by name; neither is damage of this one."""
    folder = tmp_path / "c"
    shutil.copytree(ROOT / "sample_ckpts/dcp_hsdp_2x2", folder)
    shutil.copy(folder / "__0_0.distcp", folder / "__9_0.distcp")
    (folder / "meta.pt.tmp").write_bytes((folder / "__0_0.distcp").read_bytes()[:3000])
    report = verify(folder, deep=True)
    assert {f.rule for f in report if f.severity != "info"} == {"files.unlisted", "files.leftover"}
    assert report.not_checked["checksums"].startswith("'__9_0.distcp': no metadata gives the positions")
    # of these tensors there is nothing in some of the files, each a chain of archives
    assert not told(verify(wb.open(folder).select("norm"), deep=True), "checksum.damaged")


def test_an_object_is_not_shown_when_its_records_do_not_match(tmp_path):
    folder = accelerate_state(tmp_path / "c")
    path = folder / "random_states_0.pkl"
    whole = path.read_bytes()
    assert wb.open(folder, cache=False).objects["random_states_0"]["step"] == 3
    for record, start, _ in checked_records(whole):
        if record.endswith(("/data.pkl", "/data/0")):
            path.write_bytes(whole[: start + 9] + bytes([whole[start + 9] ^ 2]) + whole[start + 10 :])
            with pytest.raises(errors.CorruptError, match=f"{record.rpartition('/')[2]}.*CRC-32 is"):
                wb.open(folder, cache=False).objects["random_states_0"]


# ---- the pass ------------------------------------------------------------------------------------------------------


def test_pieces_and_threads_do_not_change_what_is_found(tmp_path, monkeypatch):
    tensor = torch.randn(700, 600)
    tensor[333, 444] = torch.nan
    path = zeroed(tmp_path, tensor, 50 * 4096, 52 * 4096)
    whole = verify(path, deep=True, threads=1).to_dict()["findings"]
    assert {f["rule"] for f in whole} == {"values.nan", "values.zero_pages"}
    monkeypatch.setattr(scan_module, "PIECE", 5000)
    assert verify(path, deep=True, threads=3).to_dict()["findings"] == whole


def test_tick_runs_to_the_end_and_ends_the_check_by_raising(tmp_path):
    folder = sharded(tmp_path / "c", model())
    shares: list[float] = []
    verify(folder, deep=True, progress=shares.append)
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(folder, deep=True, progress=stop)


def test_every_rule_is_on_the_page_and_the_reverse():
    page = set(re.findall(r"`((?:[a-z]+)\.(?:[a-z_]+|\*))`", (ROOT / "docs/verify.md").read_text()))
    code = set()
    for path in (ROOT / "workbench/analysis").glob("verify/*.py"):
        text = path.read_text()
        code |= set(re.findall(r"\.add\(\s*\"([a-z]+\.[a-z_]+)\"", text))
        code |= set(re.findall(r"\"((?:open|headers)\.[a-z]+)\"", text))
    assert code == {rule for rule in page if not rule.endswith((".json", ".save", ".*"))}


# ---- progress --------------------------------------------------------------------------------------------------------


def test_progress_weighs_each_pass_by_the_bytes_it_reads(tmp_path, monkeypatch):
    tensors = {f"w{n}": torch.full((1 << 22,), 1.0) for n in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    plain = []
    verify(tmp_path / "model.safetensors", deep=True, threads=1, progress=plain.append)
    assert plain == sorted(plain) and plain[0] <= 0.25 and plain[-1] == pytest.approx(1.0), plain
    torch.save(tensors, tmp_path / "x.pt")
    summed = []
    monkeypatch.setattr(stored_module, "_not_covered", lambda subject, covered: summed.append("stored"))
    verify(tmp_path / "x.pt", deep=True, threads=1, progress=summed.append)
    assert summed[summed.index("stored") - 2] == pytest.approx(1.0, abs=0.02)  # the values' bytes are read once


def test_advice_fits_the_cause(tmp_path):
    nan = torch.tensor([1.0, float("nan")])
    save_file({"layers.0.w": nan, "running_mean": nan.clone()}, tmp_path / "c.safetensors")
    found = told(verify(tmp_path / "c.safetensors", deep=True), "values.nan")
    hints = {one.where: (one.severity, one.hint) for one in found}
    assert hints["layers.0.w"] == ("error", "training from here yields NaN: use an earlier step")
    assert hints["running_mean"][0] == "warn" and "training" not in hints["running_mean"][1]
    ckpt = wb.open(tmp_path / "c.safetensors", cache=False)
    os.utime(tmp_path / "c.safetensors", (1e9, 1e9))
    assert {"verify it again" in one.hint for one in told(verify(ckpt, True), "read.failed")} == {True}
    (tmp_path / "c.safetensors").write_bytes(b"\x08" + bytes(7) + b"[[[[[[[[")
    for how, rule, words in (
        ({"format": "dcp"}, "open.unrecognised", "give the path of a checkpoint"),
        ({}, "open.corrupt", "restore the named files"),
    ):
        [found] = told(verify(tmp_path / "c.safetensors", **how), rule)
        assert words in found.hint


def test_one_is_not_many(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "c.safetensors")
    checked = verify(tmp_path / "c.safetensors").checked
    assert checked["coverage"] == "whether 1 chunk covers 1 tensor, each element once"
