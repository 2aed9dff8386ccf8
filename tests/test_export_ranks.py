"""Exports cut for the ranks of a mesh: a rank's file is its piece of the truth, and the folder opens as the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.reader_suite import same_bits
from tests.resharding import dense_piece
from workbench import errors
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat, Replicate, Shard, StridedShard
from workbench.export.export import export
from workbench.export.sharding.rules import PlacementRule, Rules


@pytest.fixture
def model(tmp_path):
    tensors = {
        "layers.0.gate_up_proj.weight": torch.randn(12, 6),
        "layers.0.down_proj.weight": torch.randn(6, 7).bfloat16(),
        "norm.weight": torch.randn(6),
        "scale": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


RULES = Rules(
    (
        PlacementRule("gate_up", {"tp": StridedShard(0, 2)}),
        PlacementRule("down_proj", {"tp": Shard(1)}),
        PlacementRule("norm|scale|nothing", {"tp": Replicate()}),
    )
)
STEPS = {
    "layers.0.gate_up_proj.weight": StridedShard(0, 2),
    "layers.0.down_proj.weight": Shard(1),
    "norm.weight": Replicate(),
    "scale": Replicate(),
    "nothing": Replicate(),
}


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_each_rank_has_its_piece_and_the_folder_is_the_whole(model, tmp_path, format, tp):
    path, tensors = model
    mesh = Mesh(dp=2, tp=tp)
    with wb.open(path) as ckpt:
        report = export(ckpt, tmp_path / "out", format, mesh=mesh, rules=RULES, verify=True)
    assert report.identical and report.mesh == f"dp=2,tp={tp}" and len(report.files) == 2 * tp
    suffix = "pt" if format == "torch" else "safetensors"
    for rank in range(mesh.world_size):
        file = tmp_path / "out" / f"model-rank-{rank:05d}-of-{mesh.world_size:05d}.{suffix}"
        got = torch.load(file, weights_only=True) if format == "torch" else load_file(file)
        assert set(got) == set(tensors)
        for name, tensor in tensors.items():
            want = dense_piece(tensor, (("tp", STEPS[name]),), mesh, rank)
            same_bits(got[name], want, name)
    if format == "safetensors":
        with wb.open(tmp_path / "out") as again:
            assert again.world_size == 2 * tp and again.mesh["axes"] == {"dp": 2, "tp": tp}
            assert set(again) == set(tensors)
            for name, tensor in tensors.items():
                same_bits(again[name].torch(), tensor, name)
            copies = again.chunks.groupby("key")["replica"].max() + 1
            assert copies["norm.weight"] == 2 * tp and copies["layers.0.gate_up_proj.weight"] == 2  # along dp
            report = wb.verify(again, deep=True)
            assert not len(report.findings), report.findings


def test_torchs_own_reader_merges_files_of_single_boxes(model, tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    path, tensors = model
    rules = Rules((PlacementRule("gate_up", {"tp": Shard(0)}), *RULES.explicit[1:]))
    with wb.open(path) as ckpt:
        export(ckpt, tmp_path / "out", mesh="tp=2", rules=rules, select="proj|norm")
    state = {name: torch.zeros_like(one) for name, one in tensors.items() if "proj" in name or "norm" in name}
    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    for name, got in state.items():
        same_bits(got, tensors[name], name)


def test_what_a_rank_holds_of_boxes_is_in_its_metadata(model, tmp_path):
    path, _ = model
    with wb.open(path) as ckpt:
        export(ckpt, tmp_path / "out", mesh={"tp": 2}, rules=RULES)
    with safe_open(tmp_path / "out" / "model-rank-00001-of-00002.safetensors", "pt") as handle:
        facts = handle.metadata()
    assert (facts["rank"], facts["world_size"], facts["mesh"], facts["format"]) == ("1", "2", "tp=2", "pt")
    assert "DCP_SHARDING_INFO" not in facts  # one tensor is two boxes, which it cannot say
    boxes = json.loads(facts["workbench.boxes"])
    assert boxes["layers.0.gate_up_proj.weight"] == {
        "shape": [12, 6],
        "boxes": [[[3, 0], [3, 6], [0, 0]], [[9, 0], [3, 6], [3, 0]]],
    }


def test_a_lost_rank_is_told(model, tmp_path):
    path, tensors = model
    with wb.open(path) as ckpt:
        export(ckpt, tmp_path / "cut", mesh="tp=2", rules=RULES)
        export(ckpt, tmp_path / "copied", mesh="dp=2")
    for folder in ("cut", "copied"):
        (tmp_path / folder / "model-rank-00001-of-00002.safetensors").unlink()
    with pytest.raises(errors.IncompleteError, match=r"1 of 2 ranks have no file: 1; .*36 of 72 elements"):
        wb.open(tmp_path / "cut")
    with wb.open(tmp_path / "cut", partial=True) as ckpt, pytest.raises(errors.HoleError):
        ckpt["layers.0.down_proj.weight"].torch()
    with wb.open(tmp_path / "copied") as ckpt:
        assert "other files hold copies of all listed tensors" in " ".join(ckpt.notes)
        same_bits(ckpt["norm.weight"].torch(), tensors["norm.weight"], "norm.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b["norm.weight"].update(shape=[5]), "outside"),
        (lambda b: b["norm.weight"]["boxes"].pop(), "has boxes of 0 elements"),
        (lambda b: b["norm.weight"]["boxes"].append([[0], [6], [0]]), "has boxes of 12 elements"),
        (lambda b: b["norm.weight"].update(boxes=[[[0], [6]]]), "has no valid boxes of tensor 'norm.weight'"),
        (lambda b: b["norm.weight"].update(boxes=[[[-1], [6], [0]]]), "has no valid boxes of tensor 'norm.weight'"),
        (lambda b: b["norm.weight"].update(boxes=[[[0], [6], [1]]]), "outside"),
        (lambda b: b.pop("norm.weight"), "has no valid boxes of tensor 'norm.weight'"),
        (lambda b: b["norm.weight"].update(shape=[1 << 60]), "has no valid boxes of tensor 'norm.weight'"),
    ],
)
def test_boxes_that_contradict_the_file_are_refused(model, tmp_path, change, words):
    path, _ = model
    with wb.open(path) as ckpt:
        export(ckpt, tmp_path / "out", mesh="tp=1", rules=RULES, select="norm")
    file = tmp_path / "out" / "model-rank-00000-of-00001.safetensors"
    with safe_open(file, "pt") as handle:
        facts, tensors = handle.metadata(), {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    boxes = json.loads(facts["workbench.boxes"])
    change(boxes)
    save_file(tensors, file, facts | {"workbench.boxes": json.dumps(boxes)})
    with pytest.raises(errors.CorruptError, match=words):
        wb.open(tmp_path / "out")


def test_flat_ranges_have_no_shape_of_their_own(model, tmp_path):
    path, _ = model
    with wb.open(path) as ckpt, pytest.raises(errors.UnsupportedFormatError, match=r"gate_up.*flat ranges"):
        export(ckpt, tmp_path / "out", mesh="fsdp=2", rules=Rules((PlacementRule("gate_up", {"fsdp": Flat()}),)))
    assert not (tmp_path / "out").exists()


def test_files_of_two_exports_do_not_mix(model, tmp_path):
    path, _ = model
    with wb.open(path) as ckpt:
        export(ckpt, tmp_path / "two", mesh="tp=2", rules=RULES)
        export(ckpt, tmp_path / "three", mesh="tp=3", rules=RULES)
    Path(tmp_path / "three" / "model-rank-00002-of-00003.safetensors").rename(
        tmp_path / "two" / "model-rank-00002-of-00003.safetensors"
    )
    with pytest.raises(errors.CorruptError, match="different exports"):
        wb.open(tmp_path / "two")
