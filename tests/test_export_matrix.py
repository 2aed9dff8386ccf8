"""Every readable format × every writer × every mesh: opened again with us and with the owning library, bit for bit.

In ``make test`` each sample goes to each writer under one mesh, another for each, and each mesh to every other writer;
the whole product is slow.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.properties import SLOW
from tests.reader_suite import same_bits
from tests.resharding import dense_piece
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Only
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.export.sharding.target import Target

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
SAMPLES = sorted(path.stem for path in (ROOT / "tests" / "truth").glob("*.safetensors"))
WRITERS = ("safetensors", "ranks", "dcp", "torch", "bytecheckpoint", "torch_dist")
MESHES = {
    "1": Mesh(),
    "tp2": Mesh(tp=2),
    "tp4": Mesh(tp=4),
    "pp2": Mesh(pp=2),
    "dp3 uneven": Mesh(fsdp=3),
    "tp2 pp2": Mesh(pp=2, tp=2),
    "fsdp4": Mesh(fsdp=4),
    "hsdp 2x2": Mesh(dp_replicate=2, dp_shard=2),
    "ep2": Mesh(ep=2),
}
PAIRS = list(itertools.product(SAMPLES, WRITERS))
CASES = (
    [(sample, writer, mesh) for (sample, writer), mesh in itertools.product(PAIRS, MESHES)]
    if SLOW
    else [(sample, writer, list(MESHES)[at % len(MESHES)]) for at, (sample, writer) in enumerate(PAIRS)]
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Four experts a layer, under Mixtral's names, uneven in every axis that can be."""
    rows = {"w1": (22, 10), "w3": (22, 10), "w2": (10, 22)}
    tensors = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight": torch.randn(shape).bfloat16()
        for layer in range(3)
        for expert in range(4)
        for name, shape in rows.items()
    }
    tensors |= {f"model.layers.{layer}.block_sparse_moe.gate.weight": torch.randn(4, 10) for layer in range(3)}
    tensors |= {"model.embed_tokens.weight": torch.randn(31, 10), "lm_head.weight": torch.randn(31, 10)}
    path = tmp_path_factory.mktemp("moe") / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("writer", "mesh"),
    [
        pytest.param(writer, mesh, marks=[pytest.mark.slow] if (row + column) % 2 else [])
        for row, mesh in enumerate(MESHES)
        for column, writer in enumerate(WRITERS)
    ],
)
def test_experts_on_every_mesh(moe, tmp_path, writer, mesh):
    truth = load_file(moe)
    with wb.open(moe) as ckpt:
        carry(ckpt, truth, tmp_path / "out", writer, MESHES[mesh])


@pytest.mark.parametrize(("sample", "writer", "mesh"), CASES)
def test_every_sample(samples, tmp_path, sample, writer, mesh):
    with wb.open(samples / sample) as ckpt:
        truth = truth_of(ckpt, load_file(samples.parent / "tests/truth" / f"{sample}.safetensors"))
        carry(ckpt, truth, tmp_path / "out", writer, MESHES[mesh])


def truth_of(ckpt: wb.Checkpoint, truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By stored key; truths of merged ranks name tensors by role and parameter."""
    found = {}
    for name, tensor in truth.items():
        role, _, fqn = name.partition(".")
        key = name if name in ckpt else ckpt.param(fqn, {"fp32_param": "master"}.get(role, role)).key
        if key in set(ckpt):  # the others are views of what is stored
            found[key] = tensor
    assert len(found) > 0.7 * len(truth)
    return found


def carry(ckpt: wb.Checkpoint, truth: dict[str, torch.Tensor], out: Path, writer: str, mesh: Mesh) -> None:
    """Export, and compare what everybody reads with the truth."""
    if writer == "safetensors":  # whole tensors; a mesh is another matter
        report = wb.export(ckpt, out, role=None, max_shard_size="100KB")
        whole_files(out, truth)
    else:
        format = "safetensors" if writer == "ranks" else writer
        # what has no layers has no stages either: all of it on the first, by a rule
        rules = None if any(".0." in key for key in ckpt) else Rules((PlacementRule(".", {"pp": Only((0,))}),))
        rules = rules if "pp" in mesh.axes else None
        report = wb.export(ckpt, out, format, role=None, mesh=mesh, rules=rules, objects=False)
        if writer in ("ranks", "torch"):
            rank_files(ckpt, truth, out, mesh, rules)
        else:
            dcp_load(out, truth) if writer != "bytecheckpoint" else None
    assert report.identical
    if writer == "torch":
        return  # each file is a checkpoint of its own
    called = {one.key: one.name for one in report.tensors}
    assert set(called) == set(ckpt)
    with wb.open(out) as again:
        assert set(again) == set(called.values())
        for key, name in called.items():  # of what has no truth, what the source says
            same_bits(again[name].torch(), truth[key] if key in truth else ckpt[key].torch(), key)


def whole_files(out: Path, truth: dict[str, torch.Tensor]) -> None:
    got = {name: one for file in out.glob("*.safetensors") for name, one in load_file(file).items()}
    for key, tensor in truth.items():
        same_bits(got[key], tensor, key)


def rank_files(ckpt: wb.Checkpoint, truth: dict[str, torch.Tensor], out: Path, mesh: Mesh, rules: Rules | None) -> None:
    """Each rank's file, read by its library, against placements applied one after the other."""
    layouts = dict(zip(ckpt, Target.of(ckpt, mesh, rules).layouts, strict=True))
    for rank in range(mesh.world_size):
        (file,) = out.glob(f"model-rank-{rank:05d}-of-*")
        got = torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)
        for key, tensor in truth.items():
            want = dense_piece(tensor, layouts[key].steps, mesh, rank)
            assert (key in got) == (want is not None), (key, rank)
            if want is not None:
                same_bits(got[key], want, f"{key} on rank {rank}")


def dcp_load(out: Path, truth: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    known = FileSystemReader(out).read_metadata().state_dict_metadata
    state = {key: torch.zeros_like(tensor) for key, tensor in truth.items() if key in known}
    assert len(state) > 0.7 * len(truth)
    load(state, checkpoint_id=out, no_dist=True)
    for key, tensor in state.items():
        same_bits(tensor, truth[key], key)
