"""Megatron checkpoints: real samples, and layouts that the samples lack, written with torch alone."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_files import HOLE, Model, Saver, write_dist, write_legacy
from reader_suite import check_catalog, check_frames, check_objects, check_slices, same_bits
from safetensors.torch import load_file

import workbench as wb
from workbench import formats, runs
from workbench.core.place import Place
from workbench.formats.megatron import flat as flat_buffers
from workbench.formats.megatron import layout
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.layout import Split

HERE = Path(__file__).resolve().parents[1]
SAMPLES = os.environ.get("WORKBENCH_SAMPLES")
ROLES = {"fp32_param": "master"}


def check(path: Path, truth: dict[tuple[str, str], torch.Tensor], *, notes: int = 0) -> wb.Checkpoint:
    """The shared suite by meaning: every tensor of the truth whole, in slices, and with its fqn and role."""
    ckpt = wb.open(path)
    assert len(ckpt.notes) == notes, ckpt.notes
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    if ckpt.catalog.views is not None:
        ckpt.catalog.views.check()
    found = {}
    for (fqn, role), want in truth.items():
        tensor = found[f"{role} {fqn}"] = ckpt.param(fqn, role=role)
        assert (tensor.fqn, tensor.role) == (fqn, role)
        same_bits(tensor.torch(), want, f"{role} {fqn}")
    check_slices(found, {f"{role} {fqn}": want for (fqn, role), want in truth.items()})
    read = {tensor.key for tensor in found.values()}
    for key in ckpt:  # what is listed is the truth and what belongs to no parameter, nothing else
        tensor = ckpt[key]
        if key not in read and tensor.fqn is not None and tensor.dtype == torch.float32 and tensor.role != "step":
            assert not (tensor.torch() == HOLE).any(), key
    plain = wb.open(path, io="pread", cache=False)
    for fqn, role in list(truth)[:: max(1, len(truth) // 5)]:
        same_bits(plain.param(fqn, role=role).torch(), truth[fqn, role], fqn)
    return ckpt


def sample_truth(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for key, tensor in load_file(path).items():
        role, _, fqn = key.partition(".")
        found[fqn, ROLES.get(role, role)] = tensor
    return found


def spelled(model: Model, truth: dict[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """The truth under the names of the run's own modules."""
    if not model.grouped:
        return truth
    return {(re.sub(r"local_experts\.(\d+)\.(.+)", r"\2\1", fqn), role): want for (fqn, role), want in truth.items()}


# ---- real checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(SAMPLES is None, reason="WORKBENCH_SAMPLES is not set: the samples are not part of the project")
@pytest.mark.parametrize(
    "name", ["torch_dist_tp2pp2", "torch_dist_tp2dp2_dp_reshardable", "legacy_tp2pp2", "legacy_tp2dp2_distopt"]
)
def test_samples_equal_their_truth(name, tmp_path):
    folder = Path(SAMPLES) / "megatron" / name
    ckpt = check(
        folder / "iter_0000010",
        sample_truth(folder / "truth.safetensors"),
        notes=1 if name == "legacy_tp2dp2_distopt" else 0,  # flat buffers record no cuts
    )
    assert (ckpt.step, ckpt.world_size, ckpt.mesh["axes"]["tp"]) == (10, 4, 2)
    assert ckpt.mesh["axes"]["pp"] * ckpt.mesh["axes"]["dp"] == 2
    shutil.copytree(folder, tmp_path / "run", ignore=lambda _, names: [n for n in names if n.startswith("truth")])
    assert wb.open(tmp_path / "run").step == 10 and "tracker" in wb.open(tmp_path / "run").notes[0]
    assert "tensor_model_parallel_size" in ckpt.objects["args"].fields
    info = json.loads((folder / "truth_tp_info.json").read_text())
    for fqn, facts in info.items():
        assert list(ckpt.param(fqn).shape) == facts["full_shape"]
        if not facts["tp"] and ckpt.format == "megatron_legacy":
            assert set(ckpt.param(fqn).chunks["replica"]) == {0, 1}


def test_the_sample_of_the_project_equals_its_truth():
    folder = HERE / "sample_ckpts/megatron_dp_reshardable"
    truth = sample_truth(HERE / "tests/truth/megatron_dp_reshardable.safetensors")
    ckpt = check(folder, truth)
    assert (ckpt.format, ckpt.step, ckpt.world_size) == ("megatron_dist", 10, 4)
    assert len(ckpt) == len(truth)
    bucket = "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    assert bucket not in list(ckpt) and ckpt[bucket].shape == (95040,)
    stack = ckpt["decoder.layers.mlp.linear_fc1.weight"].torch()
    same_bits(stack[2], truth["decoder.layers.2.mlp.linear_fc1.weight", "param"], "stack")
    assert ckpt.objects["iteration"] == 10
    assert set(ckpt.objects["rng_state"]) == {"0.0", "0.1"}
    assert ckpt.objects["optimizer.distributed.dp_group_idx_0.optimizer"]["param_groups"][0]["step"] == 10.0


# ---- legacy, layouts that the samples lack -------------------------------------------------------------------------

LEGACY = {
    "tp2_pp2": ({}, {"tp": 2, "pp": 2}),
    "tp1": ({}, {}),
    "tp4_splits_a_query_group": ({"vocab": 48}, {"tp": 4}),
    "te_names": ({"te": True}, {"tp": 2, "pp": 2}),
    "vpp2": ({"layers": 8}, {"pp": 2, "tp": 2, "stages": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}),
    "vpp2_flat": ({"layers": 8}, {"pp": 2, "optimizer": "flat", "stages": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}),
    "uneven_ends": (
        {"layers": 7},
        {
            "tp": 2,
            "pp": 3,
            "stages": [[[0], [1, 2, 3, 4], [5, 6]]],
            "args": {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2},
        },
    ),
    "own_layout": (
        {"layers": 5},
        {"pp": 2, "stages": [[[0], [1, 2]], [[3], [4]]], "args": {"pipeline_model_parallel_layout": "Et|tt|t|tL"}},
    ),
    "embedding_counts_as_a_layer": (
        {"layers": 6},
        {
            "pp": 4,
            "stages": [[[0], [1, 2], [3, 4], [5]]],
            "args": {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        },
    ),
    "flat": ({}, {"tp": 2, "optimizer": "flat"}),
    "flat_dp3": ({}, {"tp": 2, "pp": 2, "optimizer": "flat", "dp": 3}),
    "flat_tied": ({"tied": True}, {"tp": 2, "pp": 2, "optimizer": "flat"}),
    "float16_tied": ({"tied": True}, {"tp": 2, "pp": 2}),
    "flat_buckets": (
        {},
        {
            "tp": 2,
            "optimizer": "flat",
            "bucket_size": 700,
            "args": {"overlap_grad_reduce": True, "ddp_bucket_size": 700},
        },
    ),
    "experts": ({"experts": 4}, {"tp": 2, "ep": 2}),
    "experts_pp": ({"experts": 4}, {"pp": 2, "ep": 2}),
    "experts_flat": ({"experts": 4}, {"tp": 2, "ep": 2, "pp": 2, "optimizer": "flat"}),
    "experts_grouped": ({"experts": 6, "grouped": True}, {"tp": 2, "ep": 2}),
    "experts_grouped_flat": ({"experts": 6, "grouped": True}, {"ep": 3, "optimizer": "flat"}),
    "experts_without_ep": ({"experts": 2}, {"tp": 2}),
    "no_attributes": ({}, {"tp": 2, "attributes": False}),
    "fp32": ({}, {"tp": 2, "optimizer": "fp32"}),
    "weights_only": ({}, {"tp": 2, "pp": 2, "optimizer": "none"}),
}
RULED = {
    "vpp2_flat": 0,
    "no_attributes": 1,
    "fp32": 1,
    "weights_only": 1,
    "flat": 1,
    "flat_dp3": 1,
    "flat_tied": 1,
    "flat_buckets": 1,
    "experts_flat": 1,
}


@pytest.mark.parametrize("name", LEGACY)
def test_legacy_layouts(tmp_path, name):
    kind, how = LEGACY[name]
    model = Model(**kind)
    write_legacy(tmp_path / "iter_0000010", model, **how)
    optimizer = how.get("optimizer", "float16")
    truth = {
        (fqn, role): tensor
        for (fqn, role), tensor in model.truth().items()
        if role == "param" or (optimizer != "none" and (role != "master" or optimizer != "fp32"))
    }
    truth = spelled(model, truth)
    ckpt = check(tmp_path / "iter_0000010", truth, notes=RULED.get(name, 0))
    assert ckpt.format == "megatron_legacy" and ckpt.step == 10
    if optimizer == "float16":
        name = "router" if model.experts else "linear_fc1"
        assert ckpt.param(f"decoder.layers.1.mlp.{name}.weight", role="step").torch() == 10.0
    if model.tied and how.get("pp", 1) > 1:
        same_bits(ckpt["output_layer.weight"].torch(), model.params["embedding.word_embeddings.weight"], "tied copy")
    assert ckpt.catalog.meta["vocab"] == {"vocab_size": model.vocab - 3, "padded": model.vocab}


def test_legacy_without_args_is_merged_by_shapes_and_order(tmp_path):
    model = Model()
    write_legacy(tmp_path / "it", model, tp=2, pp=2, no_args=True)
    ckpt = wb.open(tmp_path / "it")
    for (fqn, role), want in model.truth().items():
        same_bits(ckpt.param(fqn, role=role).torch(), want, fqn)
    assert any("layers are numbered in order of the stages" in note for note in ckpt.notes)
    assert ckpt.world_size is None and ckpt.mesh["unknown"]


def test_replicas_of_norms_and_the_dense_part_of_experts(tmp_path):
    write_legacy(tmp_path / "it", Model(experts=4), tp=2, ep=2)
    ckpt = wb.open(tmp_path / "it")
    assert sorted(ckpt.param("decoder.final_layernorm.weight").chunks["replica"]) == [0, 1, 2, 3]
    assert sorted(ckpt.param("output_layer.weight").chunks["replica"]) == [0, 0, 1, 1]
    assert set(ckpt.param("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight").chunks["replica"]) == {0}
    assert ckpt.mesh["folders"]["mp_rank_01_001"] == {"tp": 1, "ep": 1}


def test_q_k_v_are_views_of_the_grouped_rows(tmp_path):
    model = Model()
    write_legacy(tmp_path / "it", model, tp=2)
    ckpt = wb.open(tmp_path / "it")
    fused = model.params["decoder.layers.1.self_attention.linear_qkv.weight"]
    per = model.heads // model.groups
    rows = fused.reshape(model.groups, per + 2, model.kv, model.hidden)
    prefix = "decoder.layers.1.self_attention.linear_"
    same_bits(ckpt[f"{prefix}q.weight"].torch(), rows[:, :per].reshape(-1, model.hidden), "q")
    same_bits(ckpt[f"{prefix}k.weight"].torch(), rows[:, per].reshape(-1, model.hidden), "k")
    same_bits(ckpt[f"{prefix}v.weight"].torch(), rows[:, per + 1].reshape(-1, model.hidden), "v")
    assert f"{prefix}q.weight" not in list(ckpt)
    master = ckpt.param(f"{prefix}v.bias", role="master").torch()
    bias = model.states["decoder.layers.1.self_attention.linear_qkv.bias"]["fp32_param"]
    same_bits(master, bias.reshape(model.groups, per + 2, model.kv)[:, per + 1].reshape(-1), "v bias")


@pytest.mark.parametrize("te", [False, True])
def test_both_spellings_of_the_norms_resolve(tmp_path, te):
    model = Model(te=te)
    write_legacy(tmp_path / "a", model, tp=2)
    write_dist(tmp_path / "b", model, tp=2)
    for ckpt in (wb.open(tmp_path / "a"), wb.open(tmp_path / "b")):
        for plain, fused in layout.SPELLINGS:
            mine = f"decoder.layers.2.{fused if te else plain}weight"
            for role in ("param", "exp_avg"):
                want = model.truth()[mine, role]
                for name in (plain, fused):
                    same_bits(ckpt.param(f"decoder.layers.2.{name}weight", role=role).torch(), want, name)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_resolve_by_themselves_and_stacked(tmp_path, grouped):
    model = Model(experts=4, grouped=grouped)
    write_legacy(tmp_path / "a", model, tp=2, ep=2)
    write_dist(tmp_path / "b", model, tp=2, ep=2)
    name = "decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight"
    for ckpt in (wb.open(tmp_path / "a"), wb.open(tmp_path / "b")):
        for role in ("param", "exp_avg_sq"):
            want = model.truth()[name, role]
            if not grouped or ckpt.format == "megatron_legacy":
                same_bits(ckpt.param(name, role=role).torch(), want, ckpt.format)
            if grouped or ckpt.format == "megatron_legacy":
                other = "decoder.layers.3.mlp.experts.linear_fc1.weight2"
                same_bits(ckpt.param(other, role=role).torch(), want, "grouped")
            stack = ckpt.param("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", role=role)
            assert stack.shape == (4, 2 * model.ffn, model.hidden)
            same_bits(stack[2], want, "stack")


# ---- legacy, bad input ---------------------------------------------------------------------------------------------


def test_a_missing_tp_rank_is_named_and_the_rest_can_be_read(tmp_path):
    model = Model()
    write_legacy(tmp_path / "it", model, tp=2, pp=2)
    shutil.rmtree(tmp_path / "it/mp_rank_01_001")
    with pytest.raises(wb.errors.MissingFileError, match=r"mp_rank_01_001/model_optim_rng\.pt.*is missing"):
        wb.open(tmp_path / "it")
    ckpt = wb.open(tmp_path / "it", partial=True)
    (grid,) = [one for one in wb.verify(ckpt) if one.rule == "ranks.grid"]
    assert grid.message.startswith("1 of 4 ranks") and grid.evidence["lost"] == [{"pp": 1, "tp": 1}]
    assert any("(tp 1, pp 1, ep 0)" in note for note in ckpt.notes)
    same_bits(
        ckpt.param("decoder.layers.1.mlp.linear_fc1.weight").torch(),
        model.params["decoder.layers.1.mlp.linear_fc1.weight"],
        "other stage",
    )
    same_bits(
        ckpt.param("decoder.layers.3.input_layernorm.weight").torch(),
        model.params["decoder.layers.3.input_layernorm.weight"],
        "replica",
    )
    half = ckpt["decoder.layers.3.self_attention.linear_qkv.weight"][:24]
    same_bits(half, model.params["decoder.layers.3.self_attention.linear_qkv.weight"][:24], "half")
    with pytest.raises(wb.errors.MissingFileError, match="mp_rank_01_001"):
        ckpt["decoder.layers.3.self_attention.linear_qkv.weight"].torch()


def test_the_last_rank_is_missed_by_the_sizes_in_args(tmp_path):
    """The numbers of the other folders are complete without it."""
    write_legacy(tmp_path / "it", Model(), tp=2)
    assert [found.complete for found in runs.discover(tmp_path)] == [True]
    shutil.rmtree(tmp_path / "it/mp_rank_01")
    assert [found.why for found in runs.discover(tmp_path)] == ["1 of 2 mp_rank folders is missing"]


def test_a_missing_expert_rank_is_named(tmp_path):
    model = Model(experts=4)
    write_legacy(tmp_path / "it", model, ep=2)
    shutil.rmtree(tmp_path / "it/mp_rank_00_001")
    with pytest.raises(wb.errors.MissingFileError, match="mp_rank_00_001"):
        wb.open(tmp_path / "it")
    ckpt = wb.open(tmp_path / "it", partial=True)
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    same_bits(ckpt[name.format(1)].torch(), model.params[name.format(1)], "expert 1")
    same_bits(ckpt["output_layer.weight"].torch(), model.params["output_layer.weight"], "dense")
    with pytest.raises(wb.errors.MissingFileError, match="mp_rank_00_001"):
        ckpt[name.format(2)].torch()


def test_a_missing_stage_names_its_coordinates(tmp_path):
    write_legacy(tmp_path / "it", Model(), tp=2, pp=2)
    for t in (0, 1):
        shutil.rmtree(tmp_path / f"it/mp_rank_0{t}_001")
    with pytest.raises(wb.errors.IncompleteError, match=r"2 of 4 ranks.*\(tp 0, pp 1, ep 0\)"):
        wb.open(tmp_path / "it")


def test_folders_of_two_runs(tmp_path):
    write_legacy(tmp_path / "it", Model(), tp=2)
    write_legacy(tmp_path / "other", Model(), tp=2, pp=2)
    shutil.copytree(tmp_path / "other/mp_rank_01_000", tmp_path / "it/mp_rank_01_000")
    with pytest.raises(wb.errors.CorruptError, match=r"mp_rank_01_000.*two runs"):
        wb.open(tmp_path / "it")


def test_ranks_left_from_a_larger_run(tmp_path):
    write_legacy(tmp_path / "it", Model(vocab=48), tp=4)
    for t in (0, 1):
        shutil.rmtree(tmp_path / f"it/mp_rank_0{t}")
    write_legacy(tmp_path / "new", Model(vocab=48), tp=2)
    for t in (0, 1):
        shutil.copytree(tmp_path / f"new/mp_rank_0{t}", tmp_path / f"it/mp_rank_0{t}")
    with pytest.raises(wb.errors.CorruptError, match=r"world size 4.*world size 8.*mixed"):
        wb.open(tmp_path / "it")


def test_a_part_from_another_step(tmp_path):
    write_legacy(tmp_path / "it", Model(), tp=2)
    path = tmp_path / "it/mp_rank_01/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["iteration"] = 20
    torch.save(state, path)
    with pytest.raises(wb.errors.CorruptError, match=r"iteration 10.*mp_rank_01.*20"):
        wb.open(tmp_path / "it")


def test_a_stage_that_is_not_the_args(tmp_path):
    write_legacy(tmp_path / "it", Model(layers=5), pp=2, stages=[[[0, 1, 2], [3, 4]]], args={"num_layers": 4})
    with pytest.raises(wb.errors.CorruptError, match=r"stage 0, model chunk 0 holds 3 layers.*should hold 2"):
        wb.open(tmp_path / "it")


def test_a_flat_buffer_of_another_model_stays_without_names(tmp_path):
    model = Model()
    write_legacy(tmp_path / "it", model, optimizer="flat")
    path = tmp_path / "it/mp_rank_00/distrib_optim.pt"
    state = torch.load(path, weights_only=False)
    kind = (torch.bfloat16, torch.float32)
    state[0][kind] = {k: v[:-7] if isinstance(v, torch.Tensor) else v for k, v in state[0][kind].items()}
    length = len(state[0][kind]["param"])
    torch.save(state, path)
    ckpt = wb.open(tmp_path / "it")
    assert any(f"{length:,} elements" in note and f"{length + 7:,}" in note for note in ckpt.notes), ckpt.notes
    lost = [key for key in ckpt if "exp_avg" in key]
    assert lost and all(ckpt[key].fqn is None for key in lost)
    same_bits(ckpt["output_layer.weight"].torch(), model.params["output_layer.weight"], "weights")


def test_an_optimizer_of_another_order_stays_without_names(tmp_path):
    write_legacy(tmp_path / "it", Model())
    path = tmp_path / "it/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    copies = state["optimizer"]["fp32_from_fp16_params"][0]
    copies[0], copies[1] = copies[1], copies[0]
    torch.save(state, path)
    ckpt = wb.open(tmp_path / "it")
    assert any("does not match" in note for note in ckpt.notes)
    assert not [key for key in ckpt if ckpt[key].role == "exp_avg" and ckpt[key].fqn is not None]


def test_a_weight_that_no_rule_names_keeps_its_ranks_apart(tmp_path):
    write_legacy(tmp_path / "it", Model(), tp=2, optimizer="none")
    for t in (0, 1):
        path = tmp_path / f"it/mp_rank_0{t}/model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
        state["model"]["decoder.layers.0.strange.weight"] = torch.full((3, 3), float(t))
        torch.save(state, path)
    ckpt = wb.open(tmp_path / "it")
    assert any("neither stored nor known" in note for note in ckpt.notes)
    assert ckpt["mp_rank_01/decoder.layers.0.strange.weight"].torch().eq(1).all()
    assert "decoder.layers.0.strange.weight" not in ckpt


def test_a_damaged_rank_is_named(tmp_path):
    write_legacy(tmp_path / "it", Model(), tp=2)
    path = tmp_path / "it/mp_rank_01/model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(wb.errors.CorruptError, match=r"mp_rank_01/model_optim_rng\.pt"):
        wb.open(tmp_path / "it")


def test_hostile_trees_end_in_our_errors_and_soon(tmp_path):
    write_legacy(tmp_path / "it", Model(), attributes=False)
    path = tmp_path / "it/mp_rank_00/model_optim_rng.pt"
    shared: list = [torch.zeros(1)]
    for _ in range(60):
        shared = [shared, shared]

    def edited(**changes):
        state = torch.load(path.with_suffix(".first"), weights_only=False)
        for name, change in changes.items():
            change(state) if callable(change) else state.update({name: change})
        torch.save(state, path)

    path.rename(path.with_suffix(".first"))
    edited(rng_state=shared, optimizer=shared)
    assert len(wb.open(tmp_path / "it"))
    edited(x=lambda s: s["optimizer"]["optimizer"]["param_groups"][0]["params"].__setitem__(0, []))
    assert any("does not match" in note for note in wb.open(tmp_path / "it").notes)
    edited(x=lambda s: s["model"].update({f"decoder.layers.{'9' * 5000}.mlp.x": torch.zeros(2)}))
    assert len(wb.open(tmp_path / "it"))
    edited(x=lambda s: setattr(s["args"], "tensor_model_parallel_size", 1 << 40))
    with pytest.raises(wb.errors.CorruptError, match="no run has"):
        wb.open(tmp_path / "it")
    edited(x=lambda s: setattr(s["args"], "tensor_model_parallel_size", 1 << 18))
    with pytest.raises(wb.errors.IncompleteError, match="262,143 of 262,144"):
        wb.open(tmp_path / "it")
    edited(x=lambda s: setattr(s["args"], "pipeline_model_parallel_size", 1 << 46))
    with pytest.raises(wb.errors.CorruptError, match="no run has"):
        wb.open(tmp_path / "it")
    edited(model={"a": {"b": [torch.zeros(2), {"c": torch.ones(3)}]}}, args=None)
    assert wb.open(tmp_path / "it")["a.b.1.c"].torch().eq(1).all()
    edited(x=lambda s: s.pop("model"))
    with pytest.raises(wb.errors.CorruptError, match="holds no model"):
        wb.open(tmp_path / "it")


def test_hostile_metadata_of_a_stack(tmp_path):
    saver = Saver(tmp_path / "it")
    saver.chunk("decoder.layers.mlp.linear_fc2.weight", (1 << 40, 2, 2), (0, 0, 0), torch.zeros(1, 2, 2), 0)
    saver.chunk(
        "decoder.layers.mlp.experts.experts.linear_fc2.weight", (2, 1 << 30, 2), (0, 0, 0), torch.zeros(1, 1, 2), 0
    )
    saver.chunk("decoder.layers.1.self_attention.linear_qkv.weight", ((1 << 40) * 3, 2), (0, 0), torch.zeros(1, 2), 0)
    facts = {
        "num_attention_heads": 1 << 40,
        "num_query_groups": 1 << 40,
        "kv_channels": 1,
        "group_query_attention": True,
    }
    saver.object("common_state/shard_0_1", {"args": argparse.Namespace(**facts)})
    saver.write({"sharded_backend": "torch_dist"})
    ckpt = wb.open(tmp_path / "it")
    assert "decoder.layers.mlp.linear_fc2.weight" in list(ckpt)


def test_flattened_optimizer_tensors_belong_to_no_parameter(tmp_path):
    saver = Saver(tmp_path / "it")
    saver.chunk("output_layer.weight", (6, 4), (0, 0), torch.zeros(6, 4), 0)
    saver.chunk("optimizer.state.fp32_param.output_layer.weight", (2, 1, 12), (0, 0, 0), torch.zeros(2, 1, 12), 0)
    saver.write({"sharded_backend": "torch_dist"})
    ckpt = wb.open(tmp_path / "it")
    assert any("flattened by TP rank" in note for note in ckpt.notes)
    assert ckpt["optimizer.state.fp32_param.output_layer.weight"].fqn is None


def test_args_of_an_unknown_class_are_inert(tmp_path):
    write_legacy(tmp_path / "it", Model(), tp=2, args={"strange": pytest.approx(1)})
    ckpt = wb.open(tmp_path / "it")
    assert "pytest" in repr(ckpt.objects["args"].fields["strange"])


# ---- torch_dist, layouts that the samples lack ---------------------------------------------------------------------

DIST = {
    "float16": ({}, {"tp": 2, "pp": 2, "optimizer": "float16"}),
    "float16_object": ({}, {"tp": 2, "pp": 2, "optimizer": "float16", "common": "object"}),
    "fully": ({}, {"tp": 2, "pp": 2}),
    "fully_te_object": ({"te": True}, {"tp": 2, "common": "object"}),
    "layered": ({}, {"tp": 2, "pp": 2, "layered": True}),
    "experts": ({"experts": 4}, {"tp": 2, "ep": 2}),
    "experts_layered": ({"experts": 4}, {"tp": 2, "ep": 2, "layered": True}),
    "dp": ({}, {"tp": 2, "pp": 2, "optimizer": "dp"}),
    "dp_object": ({}, {"tp": 2, "optimizer": "dp", "common": "object"}),
    "dp_te": ({"te": True}, {"tp": 2, "pp": 2, "optimizer": "dp"}),
    "dp3_buckets": ({}, {"tp": 2, "dp": 3, "optimizer": "dp", "bucket_size": 700}),
    "dp_vpp": ({"layers": 8}, {"pp": 2, "tp": 2, "optimizer": "dp", "stages": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}),
    "dp_uneven": (
        {"layers": 5},
        {"pp": 2, "optimizer": "dp", "stages": [[[0, 1, 2], [3, 4]]], "args": {"decoder_last_pipeline_num_layers": 2}},
    ),
    "dp_tied": ({"tied": True}, {"tp": 2, "pp": 2, "optimizer": "dp"}),
    "dp_experts": ({"experts": 4}, {"tp": 2, "pp": 2, "ep": 2, "optimizer": "dp"}),
    "dp_experts_te": ({"experts": 4, "te": True}, {"tp": 2, "ep": 2, "optimizer": "dp"}),
    "dp_experts_grouped": ({"experts": 6, "grouped": True}, {"tp": 2, "ep": 2, "optimizer": "dp"}),
    "dp_layered": ({}, {"tp": 2, "pp": 2, "optimizer": "dp", "layered": True}),
    "weights_only": ({}, {"tp": 2, "optimizer": "none"}),
}


@pytest.mark.parametrize("name", DIST)
def test_dist_layouts(tmp_path, name):
    kind, how = DIST[name]
    model = Model(**kind)
    write_dist(tmp_path / "it", model, **how)
    truth = {
        key: tensor for key, tensor in model.truth().items() if key[1] == "param" or how.get("optimizer") != "none"
    }
    ckpt = check(tmp_path / "it", spelled(model, truth))
    assert (ckpt.format, ckpt.step, ckpt.world_size) == (
        "megatron_dist",
        10,
        how.get("tp", 1) * how.get("pp", 1) * how.get("dp", 2),
    )
    assert ckpt.objects["iteration"] == 10 and ckpt.objects["opt_param_scheduler"] == {"num_steps": 80}
    assert "common_state" not in ckpt.objects
    assert ckpt.objects["decoder.layers.0.mlp.linear_fc1._extra_state"] == b"state of layer 0"
    assert ckpt.catalog.meta["consumed_train_samples"] == 80
    if how.get("optimizer") == "float16":
        assert ckpt["optimizer.optimizer.state.common_step"].torch() == 10.0
        assert ckpt.param("decoder.layers.2.input_layernorm.weight", role="step").torch() == 10.0
    if not how.get("layered"):
        key = "decoder.layers.self_attention.linear_qkv.weight"
        stack = torch.stack(
            [model.params[f"decoder.layers.{n}.self_attention.linear_qkv.weight"] for n in range(model.layers)]
        )
        same_bits(ckpt[key].torch(), stack, key)
        assert key not in list(ckpt)
    if name == "dp_tied":  # the last stage's copy has a state of its own, as its buffer does
        same_bits(
            ckpt.param("output_layer.weight", role="exp_avg").torch(),
            model.states["embedding.word_embeddings.weight"]["exp_avg"],
            "copy",
        )


def test_a_chunk_of_several_layers(tmp_path):
    whole = torch.randn(4, 6, 5)
    saver = Saver(tmp_path / "it")
    saver.chunk("decoder.layers.mlp.linear_fc2.weight", (4, 6, 5), (0, 0, 0), whole[:3], 0)
    saver.chunk("decoder.layers.mlp.linear_fc2.weight", (4, 6, 5), (3, 0, 0), whole[3:, :, :2].clone(), 0)
    saver.chunk("decoder.layers.mlp.linear_fc2.weight", (4, 6, 5), (3, 0, 2), whole[3:, :, 2:].clone(), 1)
    saver.object("common_state/shard_0_1", {"iteration": 3})
    saver.write({"sharded_backend": "torch_dist"})
    ckpt = wb.open(tmp_path / "it")
    check_catalog(ckpt.catalog)
    for n in range(4):
        same_bits(ckpt[f"decoder.layers.{n}.mlp.linear_fc2.weight"].torch(), whole[n], str(n))
    same_bits(ckpt["decoder.layers.2.mlp.linear_fc2.weight"][1:5, ::2], whole[2][1:5, ::2], "slice")


def test_name_map_between_the_formats_needs_no_weight(tmp_path):
    model = Model()
    a = wb.open(write_legacy(tmp_path / "a", model, tp=2, pp=2))
    b = wb.open(write_dist(tmp_path / "b", model, tp=1, optimizer="float16"))
    mapped = wb.name_map(a, b)
    params = [key for key in b if b[key].role == "param"]
    moved = mapped.apply()
    for key in params:
        same_bits(moved[key].torch(), b[key].torch(), key)


# ---- torch_dist, bad input -----------------------------------------------------------------------------------------


def test_zarr_is_refused_by_name(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "decoder.layers.weight").mkdir()
    with pytest.raises(wb.errors.UnsupportedFormatError, match="zarr"):
        wb.open(tmp_path)


def test_an_unknown_backend_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "new\\u0007one"}')
    with pytest.raises(wb.errors.UnsupportedFormatError, match=r"new\\x07one"):
        wb.open(tmp_path)


def test_an_interrupted_save(tmp_path):
    write_dist(tmp_path / "it", Model(), tp=2)
    (tmp_path / "it/metadata.json").unlink()
    with pytest.raises(wb.errors.IncompleteError, match=r"no metadata\.json"):
        wb.open(tmp_path / "it")
    (tmp_path / "it/metadata.json").write_text("")
    with pytest.raises(wb.errors.OpenError, match=r"metadata\.json"):
        wb.open(tmp_path / "it")


def test_a_lost_metadata(tmp_path):
    write_dist(tmp_path / "it", Model(), tp=2)
    (tmp_path / "it/.metadata").unlink()
    with pytest.raises(wb.errors.MissingFileError, match=r"'\.metadata' is missing"):
        wb.open(tmp_path / "it")


def test_a_lost_common_file_is_noted(tmp_path):
    model = Model()
    write_dist(tmp_path / "it", model, tp=2, optimizer="dp")
    (tmp_path / "it/common.pt").unlink()
    ckpt = wb.open(tmp_path / "it")
    assert any("common.pt is missing" in note for note in ckpt.notes)
    assert any("do not store which layers" in note for note in ckpt.notes)
    for name, want in model.params.items():
        same_bits(ckpt.param(name).torch(), want, name)


def test_a_damaged_common_file(tmp_path):
    write_dist(tmp_path / "it", Model())
    path = tmp_path / "it/common.pt"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(wb.errors.CorruptError, match=r"'common\.pt'"):
        wb.open(tmp_path / "it")


def test_a_lost_data_file_and_the_rest(tmp_path):
    model = Model()
    write_dist(tmp_path / "it", model, tp=2, pp=2, dp=1)
    (tmp_path / "it/__3_0.distcp").unlink()
    with pytest.raises(wb.errors.MissingFileError, match=r"__3_0\.distcp"):
        wb.open(tmp_path / "it")
    ckpt = wb.open(tmp_path / "it", partial=True)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    same_bits(ckpt[name].torch(), model.params[name], name)


def test_a_missing_cell_of_an_object_grid_is_noted(tmp_path):
    write_dist(tmp_path / "it", Model(), tp=2, pp=2, edit=lambda saver: saver.objects.pop("rng_state/shard_1.0_2.2"))
    ckpt = wb.open(tmp_path / "it")
    assert any("'rng_state': 1 of the 2 × 2 cells" in note and "(1, 0)" in note for note in ckpt.notes), ckpt.notes
    assert set(ckpt.objects["rng_state"]) == {"0.0", "0.1", "1.1"}


def test_buckets_that_do_not_fit_stay_as_they_are(tmp_path):
    model = Model()
    write_dist(tmp_path / "it", model, tp=2, optimizer="dp", args={"num_layers": 3})
    ckpt = wb.open(tmp_path / "it")
    assert any("stay without names" in note for note in ckpt.notes), ckpt.notes
    left = [key for key in ckpt if "dp_group_idx" in key]
    assert len(left) == 6 and all(ckpt[key].fqn is None and ckpt[key].role == "other" for key in left)


def test_buckets_in_another_order_are_not_named_by_their_length(tmp_path):
    def turned(params):
        return sorted(params, key=lambda h: -h.param.numel())

    model = Model(hidden=64, ffn=32, kv=16, vocab=64)  # no holes: every order fills the bucket
    write_dist(tmp_path / "it", model, tp=2, optimizer="dp", order=turned)
    ckpt = wb.open(tmp_path / "it")
    assert any("stay without names" in note for note in ckpt.notes), ckpt.notes
    assert not [key for key in ckpt if ckpt[key].role in ("master", "exp_avg")]


def test_a_lost_optimizer_group_is_a_hole_with_a_name(tmp_path):
    def drop(saver):
        for key in [k for k in saver.shapes if "dp_group_idx_1." in k]:
            del saver.shapes[key], saver.chunks[key]

    model = Model()
    write_dist(tmp_path / "it", model, tp=2, optimizer="dp", edit=drop)
    ckpt = wb.open(tmp_path / "it")
    assert any("1 of 2 (tp, pp) groups is missing, first (1, 0)" in note for note in ckpt.notes), ckpt.notes
    norm = "decoder.layers.0.input_layernorm.weight"
    same_bits(ckpt.param(norm, role="exp_avg").torch(), model.states[norm]["exp_avg"], norm)
    with pytest.raises(wb.errors.HoleError, match="linear_qkv"):
        ckpt.param("decoder.layers.0.self_attention.linear_qkv.weight", role="exp_avg").torch()


def test_integrity_file_is_noted(tmp_path):
    write_dist(tmp_path / "it", Model())
    (tmp_path / "it/integrity.json").write_text('{"algorithm": "sha256", "files": {"common.pt": "00"}}')
    facts = wb.open(tmp_path / "it").catalog.meta["integrity"]
    assert facts == {"file": "integrity.json", "algorithm": "sha256", "files": 1}
    (tmp_path / "it/integrity.json").write_text("[]")
    assert any("integrity.json is invalid" in note for note in wb.open(tmp_path / "it").notes)


def test_a_run_opens_the_step_of_its_tracker(tmp_path):
    write_dist(tmp_path / "iter_0000010", Model())
    write_legacy(tmp_path / "iter_0000020", Model())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert wb.open(tmp_path).path.endswith("iter_0000010")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    ckpt = wb.open(tmp_path)
    assert ckpt.path.endswith("iter_0000020") and "'30', which does not exist" in ckpt.notes[0]
    (tmp_path / "iter_0000030").mkdir()
    (tmp_path / "iter_0000030/__0_0.distcp").write_bytes(b"PK")
    assert "'iter_0000030'" in wb.open(tmp_path).notes[0]


# ---- scale ---------------------------------------------------------------------------------------------------------


def cpu(make) -> float:
    """Seconds of CPU of the quickest of three runs."""
    seen = []
    for _ in range(3):
        start = time.process_time()
        make()
        seen.append(time.process_time() - start)
    return min(seen)


@pytest.mark.parametrize("buckets", [False, True])
def test_catalogs_are_built_in_time_linear_in_their_chunks(tmp_path, monkeypatch, buckets):
    monkeypatch.syspath_prepend(str(HERE / "benchmarks"))
    from synthetic_megatron import write_torch_dist

    counts, seconds = [], []
    for layers in (48, 256):
        how = (
            {"layers": layers, "experts": 0, "pp": 2, "buckets": True} if buckets else {"layers": layers, "experts": 4}
        )
        counts.append(write_torch_dist(tmp_path / str(layers), tp=4, **how))
        place = Place(tmp_path / str(layers))
        seconds.append(cpu(lambda place=place: formats.reader("megatron_dist").read_catalog(place)))
    assert counts[1] > 5 * counts[0]
    per_chunk = [s / n for s, n in zip(seconds, counts, strict=True)]
    assert per_chunk[1] < 2 * per_chunk[0], (counts, seconds)


# ---- arithmetic ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 4), st.data())
def test_pieces_put_every_rank_in_its_place(world, stride, each, dim, other, data):
    rows = world * stride * each
    full = torch.arange(rows * other).reshape((rows, other) if dim == 0 else (other, rows))
    rank = data.draw(st.integers(0, world - 1))
    local = torch.cat([part.chunk(world, dim)[rank] for part in full.chunk(stride, dim)], dim)
    shape, pieces = layout.local_pieces(tuple(local.shape), Split(dim, stride), rank, world)
    assert shape == tuple(full.shape)
    seen = 0
    for offsets, sizes, at in pieces:
        mine = local[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert torch.equal(mine, full[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))])
        seen += math.prod(sizes)
    assert seen == local.numel()


@given(
    st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 900)),
    st.integers(1, 7),
)
def test_buffers_are_laid_out_as_megatron_does(params, bucket, dp):
    from megatron_files import Held as Param
    from megatron_files import buffers

    stored = [
        Param(str(k), str(k), 0, torch.empty(numel), {}, False, shared) for k, (numel, shared) in enumerate(params)
    ]
    placed, done = buffers(stored, dp, bucket)
    base = [sum(n for _, _, n in done[:b]) for b in range(len(done))]
    want = [base[b] + start - done[b][0] for _, b, start in placed]
    numels, alone = [n for n, _ in params[::-1]], [shared for _, shared in params[::-1]]
    starts, total = flat_buffers.flat_layout(numels, alone, bucket)
    assert starts == want and total == sum(n for _, _, n in done)
    fit = flat_buffers.fill_buckets(numels, [n for _, _, n in done])
    assert fit == [(b, start - done[b][0]) for _, b, start in placed]
    assert flat_buffers.fill_buckets(numels, [n + 1 for _, _, n in done]) is None


def offset_in_megatron(layers, pp, vp, p, v, first, last, embedding, loss):
    """``get_transformer_layer_offset`` of megatron-core 0.16.1, by its own formulas."""
    if first is not None or last is not None:
        middle_stages = pp - sum(x is not None for x in (first, last))
        middle = layers - (first or 0) - (last or 0)
        middle_rank = p if first is None else p - 1
        if vp > 1:
            chunk = (first or 0) // vp + middle // vp + (last or 0) // vp
            if p == 0:
                return v * chunk
            return v * chunk + (first or 0) // vp + middle_rank * ((middle // vp) // max(middle_stages, 1))
        each = middle // middle_stages if middle_stages else 0
        return 0 if p == 0 else middle_rank * each + (first or 0)
    total = layers + embedding + loss
    each = total // pp
    offset = v * (total // vp) + p * (each // vp) if vp > 1 else p * each
    return offset - 1 if embedding and not (v == 0 and p == 0) else offset


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_layers_of_a_stage_are_megatrons(pp, vp, each, data):
    kind = data.draw(st.sampled_from(["even", "ends", "extra"]))
    first = last = None
    embedding = loss = False
    layers = pp * vp * each
    if kind == "ends":
        first, last = (vp * data.draw(st.integers(1, 3)) if data.draw(st.booleans()) else None for _ in range(2))
        layers = (first or 0) + (last or 0) + vp * each * (pp - (first is not None) - (last is not None))
    if kind == "extra":
        embedding, loss = data.draw(st.booleans()), data.draw(st.booleans())
        layers -= embedding + loss
    args = {
        "num_layers": layers,
        "pipeline_model_parallel_size": pp,
        "decoder_first_pipeline_num_layers": first,
        "virtual_pipeline_model_parallel_size": vp if vp > 1 else None,
        "decoder_last_pipeline_num_layers": last,
        "account_for_embedding_in_pipeline_split": embedding,
        "account_for_loss_in_pipeline_split": loss,
    }
    table = layout.stage_layers(RunArgs(args))
    if layers < 1:
        return
    assert table is not None and sum(map(sum, table)) == layers
    at = 0
    for v in range(vp):
        for p in range(pp):
            want = offset_in_megatron(layers, pp, vp, p, v, first, last, embedding, loss)
            assert table[v][p] == 0 or at == want, (p, v)
            at += table[v][p]


@pytest.mark.parametrize(
    ("text", "pp", "layers", "want"),
    [
        ("Ettt|(tt|)*2tL", 2, 8, [[3, 2], [2, 1]]),
        ("Et*3|t*2|tmL", 3, 6, [[3, 2, 1]]),
        ("E|t,t|t|L", 4, 3, [[0, 2, 1, 0]]),
        ("Et|tL", 2, 3, None),
        ("E(t|)*99999999L", 2, 3, None),
    ],
)
def test_a_layout_written_out(text, pp, layers, want):
    args = {"num_layers": layers, "pipeline_model_parallel_size": pp, "pipeline_model_parallel_layout": text}
    assert layout.stage_layers(RunArgs(args)) == want


def test_rank_coordinates_follow_megatrons_order():
    args = {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "data_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "world_size": 16,
    }
    ranks = RunArgs(args).mesh["ranks"]
    # generate_masked_orthogonal_rank_groups(16, …) for order tp-cp-ep-dp-pp
    for name, groups in {"tp": [[0, 1], [14, 15]], "cp": [[0, 2]], "dp": [[0, 4]], "pp": [[0, 8], [7, 15]]}.items():
        for group in groups:
            assert [ranks[str(r)][name] for r in group] == [0, 1]
