"""Megatron's ``torch_dist`` of ours: opened as Megatron's again, and loaded by torch alone."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import workbench as wb
from tests.megatron_files import Model, write_dist, write_legacy
from tests.reader_suite import check_catalog, raw
from tests.writing import everything, write
from workbench.core.mesh.mesh import Mesh
from workbench.export.writers.torch_dist import torch_dist_files, torch_dist_notes

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"
SOURCE = SAMPLES / "megatron_dp_reshardable"
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("torch_dist") / "iter_0000010"
    with wb.open(SOURCE) as ckpt:
        selection = everything(ckpt, Mesh(pp=2, tp=2))
        return write(selection, torch_dist_files(selection), out)


def test_it_opens_as_its_source_did(exported):
    with wb.open(SOURCE) as ckpt, wb.open(exported) as again:
        assert again.format == "megatron_dist" and list(again) == list(ckpt)
        assert (again.fqns, again.roles) == (ckpt.fqns, ckpt.roles)
        assert (again.step, again.mesh) == (ckpt.step, ckpt.mesh)
        check_catalog(again.catalog)
        for key in ckpt:
            assert raw(again[key].torch()) == raw(ckpt[key].torch()), key
        assert wb.verify(again, deep=True).findings.empty
        assert again.catalog.meta["notes"] == []
        for name, value in everything(ckpt).objects.items():
            if name not in ("optimizer", "content_metadata"):
                assert str(again.objects[name]) == str(value), name  # arrays are tensors


def test_tensors_are_those_that_the_framework_gathered(exported):
    truth = load_file(SAMPLES.parent / "tests/truth" / "megatron_dp_reshardable.safetensors")
    with wb.open(SOURCE) as ckpt, wb.open(exported) as again:
        compared = 0
        for key in truth.keys() & set(ckpt):
            assert raw(again[key].torch()) == raw(truth[key]), key
            compared += 1
        by_role = {
            f"{'fp32_param' if one == 'master' else one}.{fqn}": key
            for key, fqn, one in zip(again, again.fqns, again.roles, strict=True)
        }
        for name in truth.keys() & by_role.keys():
            assert raw(again[by_role[name]].torch()) == raw(truth[name]), name
            compared += 1
    assert compared > 50


def test_torch_alone_loads_every_tensor_of_it(exported):
    meta = pickle.loads((exported / ".metadata").read_bytes())
    state = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in meta.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=exported, no_dist=True)
    with wb.open(SOURCE) as ckpt:
        assert list(state) == list(ckpt)
        assert all(raw(state[key]) == raw(ckpt[key].torch()) for key in ckpt)


def test_files_are_those_that_megatron_looks_for(exported):
    names = {one.name for one in exported.iterdir()}
    assert names == {".metadata", "common.pt", "metadata.json", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert json.loads((exported / "metadata.json").read_text()) == json.loads((SOURCE / "metadata.json").read_text())
    common = torch.load(exported / "common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"]) == (10, 3.0)
    assert vars(common["args"])["hidden_size"] == 64
    assert common["optimizer"] == {"param_state_sharding_type": "fully_reshardable"}
    assert common["content_metadata"]["non_homogeneous_layers"] is True
    meta = pickle.loads((exported / ".metadata").read_bytes())
    objects = {key for key in meta.state_dict_metadata if "/shard_" in key}
    assert {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"} < objects
    assert "decoder.layers.3.mlp.linear_fc1._extra_state/shard_0_1" in objects


def test_what_megatron_still_needs_is_told():
    with wb.open(SOURCE) as ckpt:
        notes = torch_dist_notes(everything(ckpt))
        assert "iter_0000010" in notes[0] and notes[1].startswith("only the ") and len(notes) == 2
    with wb.open(SAMPLES / "torch_save" / "ckpt.pt") as ckpt:
        assert "85 of 85 names" in torch_dist_notes(everything(ckpt))[-1]


def test_a_model_alone_has_what_megatron_asks_for(tmp_path):
    with wb.open(SAMPLES / "hf_llama_bf16_sharded") as ckpt:
        selection = dataclasses.replace(everything(ckpt), objects={})
        write(selection, torch_dist_files(selection), tmp_path / "out")
        notes = torch_dist_notes(selection)
    assert "iter_0000000" in notes[0] and "are not Megatron's" in notes[1]
    common = torch.load(tmp_path / "out" / "common.pt", weights_only=True)
    assert common == {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}
    truth = load_file(SAMPLES.parent / "tests/truth" / "hf_llama_bf16_sharded.safetensors")
    with wb.open(tmp_path / "out") as again:
        assert again.format == "megatron_dist" and set(again) == set(truth)
        assert all(raw(again[key].torch()) == raw(want) for key, want in truth.items())


def test_extra_states_of_experts_keep_their_grid(tmp_path):
    """Megatron asks for one cell an expert, ``shard_0_4`` … ``shard_3_4``, of each layer."""
    name = "mlp.experts.experts.linear_fc1._extra_state"

    def grid(saver):
        for layer, expert in np.ndindex(4, 4):
            saver.object(f"decoder.layers.{name}/shard_{layer}.{expert}_4.4", f"{layer} {expert}".encode())

    source = write_dist(tmp_path / "in", Model(experts=4), ep=2, optimizer="none", edit=grid)
    wb.export(wb.open(source), tmp_path / "out", "torch_dist", role="all", verify=True)
    again = wb.open(tmp_path / "out")
    stored = {key for key in again.catalog.objects.keys if "experts" in key}
    assert stored == {f"decoder.layers.{n}.{name}/shard_{e}_4" for n in range(4) for e in range(4)}
    assert again.objects[f"decoder.layers.2.{name}"] == {str(e): f"2 {e}".encode() for e in range(4)}


def test_names_of_local_layers_are_pointed_out(tmp_path):
    write_legacy(tmp_path / "in", Model(), tp=2)
    report = wb.export(wb.open(tmp_path / "in"), tmp_path / "out", "torch_dist")
    assert any("names have input_layernorm, for example 'decoder.layers.0." in note for note in report.notes)


@pytest.mark.skipif(OUTSIDE is None, reason="WORKBENCH_SAMPLES names no folder of samples")
def test_a_common_step_stays_in_the_common_state(tmp_path):
    source = Path(OUTSIDE or "") / "megatron" / "torch_dist_tp2pp2" / "iter_0000010"
    with wb.open(source) as ckpt:
        selection = everything(ckpt, Mesh(tp=2))
        write(selection, torch_dist_files(selection), tmp_path / "out")
        with wb.open(tmp_path / "out") as again:
            assert set(again) == set(ckpt) and dict(zip(again, again.roles, strict=True)) == dict(
                zip(ckpt, ckpt.roles, strict=True)
            )
            assert all(raw(again[key].torch()) == raw(ckpt[key].torch()) for key in ckpt)
            fqn = "decoder.final_layernorm.weight"
            assert again.param(fqn, role="step").torch().item() == 10
