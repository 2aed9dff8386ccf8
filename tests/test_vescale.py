"""Legacy veScale: no sample exists, so torch's DCP writes the folders and the class is renamed in the pickle.

``vescale.checkpoint`` 2024 stores with DCP's own file system writer, copied; its ``_StorageInfo`` has the fields of
torch's. Optimizer keys are what ``flatten_state_dict`` makes of ``{torch.float32: {(chunk, name): {state: …}}}``.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import workbench as wb
from tests.reader_suite import check_catalog, check_frames, check_objects, check_slices, refused, same_bits
from workbench import errors

HERE, THERE = b"torch.distributed.checkpoint.filesystem", b"vescale.checkpoint.storage.filesystem"
SHAPES = {"layers.0.w.weight": (6, 4), "layers.0.b": (4,), "layers.1.w.weight": (6, 4), "norm.weight": (4,)}


def save(folder: Path, state: dict) -> None:
    """Save with torch, then name veScale's class."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    data = (folder / ".metadata").read_bytes()
    assert data.count(HERE) == 1
    at = data.index(HERE)
    assert data[at - 2 : at] == b"\x8c" + bytes([len(HERE)])
    data = data[: at - 1] + bytes([len(THERE)]) + THERE + data[at + len(HERE) :]
    if data[2:3] == b"\x95":  # the frame is shorter by the difference
        size = int.from_bytes(data[3:11], "little") + len(THERE) - len(HERE)
        data = data[:3] + size.to_bytes(8, "little") + data[11:]
    (folder / ".metadata").write_bytes(data)


def distributed(names, moments, *, chunk=0, master=False):
    """``DistributedOptimizer.state_dict()`` of a stage."""
    states = {}
    for name in names:
        states[(chunk, name)] = {"step": torch.tensor(4.0), "exp_avg": moments[name], "exp_avg_sq": moments[name] ** 2}
        if master:
            states[(chunk, name)]["shard_casted_float16_groups"] = moments[name] + 1
    return {"param_group_meta": [{"lr": 0.5, "params": [0]}], torch.float32: states}


@pytest.fixture
def run(tmp_path):
    """Two stages; the first also has masters."""
    torch.manual_seed(0)
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    moments = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    names = list(SHAPES)
    save(tmp_path / "model", model)
    save(tmp_path / "optimizer/pp_0", distributed(names[:2], moments, master=True))
    save(tmp_path / "optimizer/pp_1", distributed(names[2:], moments))
    return tmp_path, model, moments


def test_the_pickle_names_vescales_class(run):
    with pytest.raises(ModuleNotFoundError, match="vescale"), open(run[0] / "model/.metadata", "rb") as handle:
        pickle.load(handle)  # our own file: torch itself could not read it


def test_model_and_stages_are_one_checkpoint(run):
    folder, model, moments = run
    ckpt = wb.open(folder, cache=False)
    assert ckpt.format == "vescale" and ckpt.notes == [] and ckpt.step is None and ckpt.world_size is None
    truth = {}
    for name in SHAPES:
        for role, want in (("param", model[name]), ("exp_avg", moments[name]), ("exp_avg_sq", moments[name] ** 2)):
            tensor = ckpt.param(name, role=role)
            assert tensor.fqn == name
            same_bits(tensor.torch(), want, tensor.key)
            truth[tensor.key] = want
        assert ckpt.param(name, role="step").torch().item() == 4.0
    same_bits(ckpt.param("layers.0.b", role="master").torch(), moments["layers.0.b"] + 1, "master")
    assert ckpt["optimizer.torch.float32.(0, 'layers.0.b').exp_avg"].role == "exp_avg"
    assert len(ckpt) == 4 + 4 * 3 + 2
    assert ckpt.objects["optimizer.pp_1.param_group_meta.0.lr"] == 0.5
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    check_slices(ckpt, truth)


def test_the_mesh_says_the_stages_and_what_is_unknown(run):
    ckpt = wb.open(run[0], cache=False)
    assert ckpt.mesh["axes"] == {"pp": 2} and ckpt.mesh["unknown"] == ["dp", "tp", "cp", "ep"]
    assert ckpt.mesh["ranks"]["optimizer/pp_1"] == {"pp": 1}
    ranks = ckpt.catalog.rank
    assert set(ranks[[f.startswith("model") for f in (ckpt.catalog.files[i] for i in ckpt.catalog.file)]].tolist()) == {
        0
    }
    assert -1 in ranks  # a stage's files count ranks within their group


def test_a_model_alone_is_known_by_its_class(tmp_path):
    save(tmp_path / "model", {"w": torch.arange(6.0)})
    ckpt = wb.open(tmp_path, cache=False)
    assert ckpt.format == "vescale" and ckpt.param("w").key == "model.w" and ckpt.mesh["axes"] == {}
    dcp.save({"w": torch.arange(6.0)}, storage_writer=dcp.FileSystemWriter(tmp_path / "plain/model"), no_dist=True)
    assert wb.open(tmp_path / "plain", cache=False).format == "dcp"  # a run's folder with one checkpoint in it


def test_a_part_alone_and_new_vescale_are_plain_dcp(run):
    assert wb.open(run[0] / "model", cache=False).format == "dcp"
    same_bits(wb.open(run[0] / "model", cache=False)["norm.weight"].torch(), run[1]["norm.weight"], "norm.weight")


def test_discovery_lists_the_whole_not_its_parts(run):
    found = wb.discover(run[0])
    mine = found[found["format"] == "vescale"]
    assert len(mine) == 1 and mine["complete"].all() and len(found) == 1


def test_keys_that_two_stages_store_are_kept_apart_and_belong_to_nobody(tmp_path):
    one, two = torch.randn(3), torch.randn(3)
    save(tmp_path / "model", {"w": torch.randn(3)})
    save(tmp_path / "optimizer/pp_0", distributed(["w"], {"w": one}))
    save(tmp_path / "optimizer/pp_1", distributed(["w"], {"w": two}))
    ckpt = wb.open(tmp_path, cache=False)
    for stage, want in enumerate((one, two)):
        tensor = ckpt[f"optimizer.pp_{stage}.torch.float32.(0, 'w').exp_avg"]
        same_bits(tensor.torch(), want, tensor.key)
        assert tensor.fqn is None and tensor.role == "exp_avg"
    assert any("stored by several stages" in note for note in ckpt.notes)


def test_names_that_two_chunks_of_a_model_share_are_not_global(tmp_path):
    save(tmp_path / "model", {"w": torch.randn(3)})
    state = distributed(["w"], {"w": torch.randn(3)})
    state[torch.float32] |= distributed(["w"], {"w": torch.randn(3)}, chunk=1)[torch.float32]
    save(tmp_path / "optimizer/pp_0", state)
    ckpt = wb.open(tmp_path, cache=False)
    assert ckpt.fqns == ["w"] + [None] * 6 and ckpt.roles.count("exp_avg") == 2
    assert any("the parameters of 2 optimizer states are not certain" in note for note in ckpt.notes)


def test_numbered_state_of_the_basic_optimizer(tmp_path):
    want = torch.randn(3)
    save(tmp_path / "model", {"w": torch.randn(3)})
    save(tmp_path / "optimizer/pp_0", {"state": {0: {"exp_avg": want}}, "param_groups": [{"params": [0]}]})
    ckpt = wb.open(tmp_path, cache=False)
    same_bits(ckpt["optimizer.state.0.exp_avg"].torch(), want, "exp_avg")
    assert ckpt["optimizer.state.0.exp_avg"].fqn is None and ckpt["optimizer.state.0.exp_avg"].role == "exp_avg"


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_a_folder_without_parts_is_none(tmp_path):
    with pytest.raises(errors.NotACheckpointError, match="neither a model/ nor"):
        wb.open(tmp_path, format="vescale", cache=False)


def test_a_missing_stage_is_named(run):
    folder = run[0]
    (folder / "optimizer/pp_1").rename(folder / "optimizer/pp_3")
    refused(errors.IncompleteError, folder, "stages [1, 2]", "optimizer/pp_1", "found stages [0, 3]")


def test_an_interrupted_stage_or_model_is_named(run):
    folder = run[0]
    kept = (folder / "optimizer/pp_1/.metadata").read_bytes()
    (folder / "optimizer/pp_1/.metadata").unlink()
    refused(errors.IncompleteError, folder, "pp_1", "interrupted")
    assert not wb.discover(folder)["complete"].any()
    (folder / "optimizer/pp_1/.metadata").write_bytes(kept)
    (folder / "model/.metadata").unlink()
    refused(errors.IncompleteError, folder, "model", "interrupted")


def test_missing_and_truncated_data(run):
    folder = run[0]
    file = folder / "optimizer/pp_1/__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    refused(errors.TruncatedError, folder, "optimizer/pp_1/__0_0.distcp", "byte")
    file.unlink()
    refused(errors.MissingFileError, folder, "optimizer/pp_1/__0_0.distcp")
    kept = wb.open(folder, partial=True, cache=False)
    same_bits(kept.param("norm.weight").torch(), run[1]["norm.weight"], "norm.weight")


def test_without_a_model_the_optimizer_opens_and_says_so(run):
    folder = run[0]
    shutil.rmtree(folder / "model")
    ckpt = wb.open(folder, cache=False)
    assert ckpt.notes == ["the folder holds no model, only an optimizer"]
    assert ckpt.param("norm.weight", role="exp_avg").shape == (4,)
