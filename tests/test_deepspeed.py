"""DeepSpeed: real saves equal their truth, layouts that no sample has, and what can be wrong with one."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import workbench as wb
from tests.fresh import deepspeed_like as like
from tests.reader_suite import check_catalog, check_frames, check_objects, check_slices, raw, refused, same_bits
from workbench import errors
from workbench.formats.deepspeed import flat
from workbench.formats.deepspeed.merge import _match

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "sample_ckpts" / "deepspeed_zero1"
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
ROLES = {"fp32_param": "master", "fp32": "master"}
SHAPES = {"wte.weight": (13, 6), "odd": (7, 3), "h.0.w": (5, 4), "ln.weight": (6,), "ln.bias": (1,), "scalar": ()}
NAMES = [["wte.weight", "odd", "h.0.w"], ["ln.weight", "ln.bias", "scalar"]]


def check_states(ckpt: wb.Checkpoint, truth: dict[tuple[str, str], torch.Tensor]) -> None:
    """The shared suite, for truth by role and parameter."""
    by_key = {}
    for (role, name), want in truth.items():
        tensor = ckpt.param(name, role=role)
        assert tensor.fqn == name and tensor.role == role and tensor.key not in by_key
        same_bits(tensor.torch(), want, tensor.key)
        assert tensor.numpy().tobytes() == raw(want)
        by_key[tensor.key] = want
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    check_slices(ckpt, by_key)
    plain = wb.open(ckpt.path, io="pread", cache=False)
    for key in list(by_key)[:5]:
        same_bits(plain[key].torch(), by_key[key], key)


def by_meaning(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for key, want in load_file(path).items():
        state, name = key.split(".", 1)
        found[ROLES.get(state, state), name] = want
    return found


def meanings(truth: dict, names: list[list[str]] | None = None) -> dict[tuple[str, str], torch.Tensor]:
    wanted = None if names is None else {n for group in names for n in group}
    return {
        (ROLES.get(state, state), name): tensor
        for state, row in truth.items()
        for name, tensor in row.items()
        if wanted is None or name in wanted
    }


# ---- real saves ----------------------------------------------------------------------------------------------------


def weights_of(folder: Path, file: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / file, weights_only=True)["module"]


def check_zero1(run: Path, truth: dict[tuple[str, str], torch.Tensor]) -> None:
    ckpt = wb.open(run / "global_step4", cache=False)
    check_states(ckpt, truth)
    module = weights_of(run / "global_step4", "mp_rank_00_model_states.pt")
    assert {key for key in ckpt if key.startswith("module.")} == {f"module.{name}" for name in module}
    for name, want in module.items():
        role = "buffer" if name == "mask_buf" else "param"
        same_bits(ckpt.param(name, role).torch(), want, name)
        if role == "param":  # what a healthy save promises: weights are the rounded masters
            same_bits(ckpt.param(name, "master").torch().bfloat16(), want, name)
            same_bits(ckpt.param(name, "step").torch(), torch.tensor(4.0), "step")
    assert (ckpt.step, ckpt.world_size, ckpt.notes) == (4, 2, [])
    assert ckpt.mesh["axes"] == {"dp": 2, "pp": 1, "tp": 1}
    assert ckpt.mesh["ranks"]["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"] == {"dp": 1, "pp": 0, "tp": 0}
    assert ckpt.objects["my_note"] == "client state" and ckpt.objects["lr_scheduler"] == {"last_batch_iteration": 3}
    groups = ckpt.objects["optim_states"]["optimizer_state_dict"]
    assert groups["group_paddings"] == [0, 0] and "module" not in ckpt.objects
    assert ckpt["optim.group0.step"].num_replicas == 2


def test_the_sample_equals_its_truth():
    check_zero1(HERE, by_meaning(ROOT / "tests/truth/deepspeed_zero1.safetensors"))
    ckpt = wb.open(HERE)
    assert ckpt.format == "deepspeed" and ckpt.step == 4
    assert ckpt.notes == ["opened 'global_step4': the tracker 'latest' names it"]


def test_padding_is_never_read():
    """The moments of the last rank have 3 elements of padding, the masters none: every byte range stops before."""
    catalog = wb.open(HERE).catalog
    end = catalog.inner + catalog.chunk_nbytes
    for state, tail in (("fp32", 0), ("exp_avg", 12)):
        rows = [r for r in range(catalog.chunks) if catalog.keys[catalog.tensor[r]].startswith(state + ".")]
        last = [r for r in rows if catalog.files[catalog.file[r]].startswith("bf16_zero_pp_rank_1")]
        last = [r for r in last if catalog.stop[r] - catalog.start[r] > 400_000]
        # the storage of the master is 12 bytes longer than the part of it that was saved
        assert max(end[last] - (catalog.stop[last] - catalog.start[last])) == -12, (state, tail)


@pytest.mark.skipif(not OUTSIDE, reason="set WORKBENCH_SAMPLES to the folder of larger real samples")
def test_samples_outside_the_repository():
    base = Path(OUTSIDE or "") / "deepspeed"
    check_zero1(base / "zero1_dp2_bf16", by_meaning(base / "zero1_dp2_bf16/truth.safetensors"))

    run = base / "zero3_dp2_bf16"
    ckpt = wb.open(run / "global_step4", cache=False)
    check_states(ckpt, by_meaning(run / "truth.safetensors"))
    assert set(ckpt.roles) == {"master", "exp_avg", "exp_avg_sq", "step", "buffer"}  # stage 3 stores no weights
    buffer = weights_of(run / "global_step4", "zero_pp_rank_1_mp_rank_00_model_states.pt")["mask_buf"]
    same_bits(ckpt["module.mask_buf"].replica(1).torch(), buffer, "mask_buf")
    same_bits(ckpt.param("h.3.fc2.weight", "step").torch(), torch.tensor(4.0), "step")
    assert (ckpt.step, ckpt.world_size, ckpt.notes) == (4, 2, [])

    run = base / "zero1_dp2_bf16_universal"
    ckpt = wb.open(run, cache=False)
    assert ckpt.format == "deepspeed_universal" and ckpt.step == 4
    assert ckpt.notes == ["opened 'global_step4_universal': the tracker 'latest_universal' names it"]
    check_states(ckpt, by_meaning(base / "zero1_dp2_bf16/truth.safetensors"))
    for name, want in weights_of(run / "global_step4_universal", "mp_rank_00_model_states.pt").items():
        same_bits(ckpt[f"module.{name}"].torch(), want, name)
    same_bits(ckpt.param("mask_buf", "master").torch(), ckpt.param("mask_buf", "buffer").torch(), "mask_buf")
    same_bits(ckpt["step.odd"].torch(), torch.tensor(4.0), "step")
    assert ckpt.objects["optimizer_state"]["group_paddings"] == [0, 0]


# ---- stages 1 and 2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["zero", "bf16", "elastic"])
@pytest.mark.parametrize("dp", [1, 2, 5, 16])
def test_partitions_of_every_optimizer_class(tmp_path, style, dp):
    """dp 16 leaves whole ranks of padding for the group of eight elements."""
    truth = like.full(SHAPES, dp)
    like.save_zero12(tmp_path, NAMES, SHAPES, truth, dp, style=style)
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))
    for name, want in truth["fp32"].items():
        same_bits(ckpt.param(name).torch(), want.bfloat16(), name)
    assert not ckpt.notes and ckpt.world_size == dp


@pytest.mark.parametrize("prefix", ["", "fp16_", "bf16_"])
@pytest.mark.parametrize(("pads", "align"), [(3, 2), (0, 1), (0, 8)])
def test_prefixes_and_paddings(tmp_path, prefix, pads, align):
    """``param_alignment_paddings`` after parameters; alignments other than 2, which group_paddings vouch for."""
    truth = like.full(SHAPES)
    like.save_zero12(tmp_path, NAMES, SHAPES, truth, 3, pads=pads, prefix=prefix, align=align)
    check_states(wb.open(tmp_path, cache=False), meanings(truth))


def test_a_group_that_pads_every_rank(tmp_path):
    """Seven elements in parts of eight: no rank shows the part's length, the paddings do."""
    shapes = {"w": (7,)}
    truth = like.full(shapes)
    like.save_zero12(tmp_path, [["w"]], shapes, truth, 5, style="elastic", align=8)
    check_states(wb.open(tmp_path, cache=False), meanings(truth))


def test_round_robin_gradients_follow_param_shapes_and_say_so(tmp_path):
    """deepspeed 0.19.8 writes param_slice_mappings in the order before the shuffle; ds_to_universal believes it."""
    truth = like.full(SHAPES)
    shuffled = [list(reversed(group)) for group in NAMES]
    like.save_zero12(tmp_path, shuffled, SHAPES, truth, 2, order=NAMES)
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))
    assert len(ckpt.notes) == 1 and "round_robin_gradients" in ckpt.notes[0] and "param_slice_mappings" in ckpt.notes[0]
    like.save_zero12(tmp_path, NAMES, SHAPES, truth, 2, order=NAMES)
    assert wb.open(tmp_path, cache=False).notes == []
    # as deepspeed 0.19.8 wrote four layers on two ranks: each rank's list is in the order of param_shapes
    shapes = dict.fromkeys("abcd", (4, 4))
    truth = like.full(shapes)
    like.save_zero12(tmp_path, [list("acbd")], shapes, truth, 2, order=[list("abcd")], style="bf16")
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))
    assert len(ckpt.notes) == 1 and "round_robin_gradients" in ckpt.notes[0]


def test_shared_parameters_become_views(tmp_path):
    truth = like.full(SHAPES)
    weight = truth["fp32"]["wte.weight"].bfloat16()
    module = OrderedDict((n, truth["fp32"][n].bfloat16()) for group in NAMES for n in group)
    module |= {"wte.weight": weight, "head.weight": weight}
    shared = {"head.weight": "wte.weight"}
    like.save_zero12(tmp_path, NAMES, SHAPES, truth, 2, module=module, shared_params=shared)
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))
    assert "module.head.weight" not in list(ckpt) and "module.head.weight" in ckpt
    same_bits(ckpt.param("head.weight").torch(), weight, "alias")
    for state in like.STATES:
        tensor = ckpt.param("head.weight", ROLES.get(state, state))
        same_bits(tensor[3:9, ::2], truth[state]["wte.weight"][3:9, ::2], state)
    # a clone saved under the alias is bytes of its own, so it is listed
    module["head.weight"] = weight.clone()
    like.save_zero12(tmp_path, NAMES, SHAPES, truth, 2, module=module, shared_params=shared)
    assert "module.head.weight" in list(wb.open(tmp_path, cache=False))


def test_frozen_parameters_and_client_tensors_of_stage_1(tmp_path):
    truth = like.full(SHAPES)
    frozen = {"emb.weight": torch.randn(9, 5).bfloat16(), "emb.bias": torch.randn(9).bfloat16()}
    module = OrderedDict((n, truth["fp32"][n].bfloat16()) for group in NAMES for n in group)
    module["emb.weight"] = frozen["emb.weight"]  # the bias was left out of the module
    state = torch.get_rng_state()
    like.save_zero12(
        tmp_path,
        NAMES,
        SHAPES,
        truth,
        2,
        module=module,
        frozen_param_fragments=OrderedDict(frozen),
        frozen_param_shapes=OrderedDict((n, t.shape) for n, t in frozen.items()),
        rng={"torch": state},
        epoch=3,
    )
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth) | {("param", n): t for n, t in frozen.items()})
    same_bits(ckpt["client.rng.torch"].torch(), state, "rng")
    assert ckpt["client.rng.torch"].fqn is None and ckpt.objects["epoch"] == 3


def test_stage_0_joins_the_optimizers_numbers(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    module = OrderedDict((n, t.detach().clone()) for n, t in model.state_dict().items())
    content = like.model_states([], {}, module, 2, optimizer=optimizer.state_dict(), param_shapes=None)
    like.save(content, tmp_path / "mp_rank_00_model_states.pt")
    ckpt = wb.open(tmp_path, cache=False)
    state = optimizer.state_dict()["state"]
    truth = {("param", n): t for n, t in module.items()}
    for number, name in enumerate(module):
        truth |= {(kind, name): state[number][kind] for kind in ("exp_avg", "exp_avg_sq", "step")}
    check_states(ckpt, truth)
    assert ckpt["optimizer.state.1.exp_avg"].fqn == "0.bias"


def test_stage_0_with_masters_and_frozen_parameters(tmp_path):
    """As DeepSpeed 0.19 stores bf16 at stage 0: masters in lists by group, and torch's state dict in its own."""
    truth, frozen = (
        like.full(SHAPES),
        {"f.weight": torch.randn(11, 23).bfloat16(), "f.bias": torch.randn(11).bfloat16()},
    )
    names = [name for group in NAMES for name in group]
    module = OrderedDict((n, truth["fp32"][n].bfloat16()) for n in names[:2])
    module |= frozen | {n: truth["fp32"][n].bfloat16() for n in names[2:]}
    state = {
        i: {s: truth[s][n] for s in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(4.0)}
        for i, n in enumerate(names)
    }
    optimizer = {
        "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(names)))}]},
        "fp32_groups": [[truth["fp32"][n] for n in names]],
    }
    content = like.model_states([], {}, module, 2, optimizer=optimizer, param_shapes=None)
    like.save(content, tmp_path / "mp_rank_00_model_states.pt")
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth) | {("param", name): tensor for name, tensor in module.items()})
    assert not ckpt.notes and "6 weights of bfloat16" in wb.verify(ckpt, deep=True).checked["masters"]
    twin = {"f.scalar": torch.randn(())}  # one of two scalars is frozen, and nothing tells which
    like.save(content | {"module": module | twin}, tmp_path / "mp_rank_00_model_states.pt")
    assert "6 of its parameters are numbered" in " ".join(wb.open(tmp_path, cache=False).notes)


# ---- stage 3 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2, 4, 7, 40])
def test_stage_3_pieces_of_every_parameter(tmp_path, dp):
    """dp 40: most parameters have fewer elements than there are ranks, so that some ranks hold padding alone."""
    truth = like.full(SHAPES, dp)
    like.save_zero3(tmp_path, NAMES, SHAPES, truth, dp)
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))
    assert "param" not in ckpt.roles and set(ckpt.chunks["rank"].dropna()) == set(range(dp))


def test_stage_3_groups_that_cut_parameters(tmp_path):
    """Old files: param_shapes by param group, flat tensors by sub group, a parameter across two of them."""
    truth = like.full(SHAPES)
    total = sum(-(-truth["fp32"][n].numel() // 3) for group in NAMES for n in group)
    like.save_zero3(tmp_path, NAMES, SHAPES, truth, 3, sub_groups=[10, 0, 21, total - 31])
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))


def test_stage_3_frozen_persistent_shared_and_buffers(tmp_path):
    truth = like.full(SHAPES)
    frozen = {"f.weight": torch.randn(11, 3).bfloat16(), "f.one": torch.randn(1).bfloat16()}
    buffers = {"mask": torch.ones(5, 5), "empty_buffer": torch.empty(0)}
    whole = {"ln.weight": truth["fp32"]["ln.weight"].bfloat16()}  # below stage3_param_persistence_threshold
    like.save_zero3(
        tmp_path,
        NAMES,
        SHAPES,
        truth,
        4,
        frozen=frozen,
        buffers=buffers,
        whole=whole,
        shared_params={"head.weight": "wte.weight"},
    )
    ckpt = wb.open(tmp_path, cache=False)
    more = {("param", n): t for n, t in [*frozen.items(), *whole.items()]} | {
        ("buffer", n): t for n, t in buffers.items()
    }
    check_states(ckpt, meanings(truth) | more)
    assert ckpt["module.mask"].num_replicas == ckpt["module.ln.weight"].num_replicas == 4
    assert ckpt["module.f.weight"].num_replicas == 1 and len(ckpt["module.f.weight"].chunks) >= 4
    same_bits(ckpt.param("head.weight", "exp_avg").torch(), truth["exp_avg"]["wte.weight"], "alias")
    assert ckpt["optim.group0.step"].num_replicas == 4


def test_stage_3_decodes_one_pickle_where_ranks_differ_by_their_device(tmp_path, monkeypatch):
    truth = like.full(SHAPES)
    like.save_zero3(tmp_path, NAMES, SHAPES, truth, 4, buffers={"mask": torch.ones(2)})
    for rank in range(4):  # as GPUs write: the location of a storage names the local rank
        file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        content = torch.load(file, weights_only=False)
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage, rank=rank: f"cuda:{rank}")
            torch.save(content, file)
    from workbench.core.pickles import unpickle

    calls = []
    plain = unpickle.loads
    monkeypatch.setattr(unpickle, "loads", lambda *args, **more: calls.append(more["what"]) or plain(*args, **more))
    ckpt = wb.open(tmp_path, cache=False)
    assert sum("model_states" in what for what in calls) == 1
    check_states(ckpt, meanings(truth))
    assert ckpt["module.mask"].num_replicas == 4


# ---- model parallel ------------------------------------------------------------------------------------------------

INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*dense_4h_to_h\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.h_to_4h\.weight"],
    "parameter_with_sub_params": [{"patterns": [r".*qkv\.weight"], "shape": [[8, 4, 4], -1], "partition_dim": 0}],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "original_vocab_size": 9,
}
WHOLE = {
    "embed.weight": (10, 6),
    "0.qkv.weight": (16, 6),
    "0.dense.bias": (8,),
    "0.h_to_4h.weight": (12, 6),
    "0.dense_4h_to_h.weight": (6, 8),
    "0.norm.weight": (6,),
}


def tp_piece(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """What tensor-parallel rank ``rank`` holds, by torch."""
    if "norm" in name:
        return tensor.clone()
    if "4h_to_h" in name:
        return tensor.chunk(tp, 1)[rank].contiguous()
    fused = {"qkv": [8, 4, 4], "h_to_4h": [6, 6]}
    sizes = next((s for key, s in fused.items() if key in name), [tensor.shape[0]])
    return torch.cat([part.chunk(tp)[rank] for part in tensor.split(sizes)])


def save_tp(folder: Path, truth: dict, tp: int, dp: int, **more: object) -> None:
    for rank in range(tp):
        mine = {s: {n: tp_piece(n, t, tp, rank) for n, t in row.items()} for s, row in truth.items()}
        shapes = {n: tuple(t.shape) for n, t in mine["fp32"].items()}
        dims = {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp}, "mp_world_size": tp}
        like.save_zero12(folder, [list(WHOLE)], shapes, mine, dp, mp=rank, **dims, **more)


def test_tensor_parallel_ranks_are_merged_by_the_stored_patterns(tmp_path):
    truth = like.full(WHOLE)
    save_tp(tmp_path, truth, 2, 3, universal_checkpoint_info=INFO)
    ckpt = wb.open(tmp_path, cache=False)
    weights = {("param", n): t.bfloat16() for n, t in truth["fp32"].items()}
    check_states(ckpt, meanings(truth) | weights)
    assert ckpt["fp32.0.norm.weight"].num_replicas == 2 and ckpt["fp32.0.qkv.weight"].num_replicas == 1
    same_bits(ckpt["fp32.0.norm.weight"].replica(1).torch(), truth["fp32"]["0.norm.weight"], "replica")
    assert ckpt.mesh["axes"] == {"dp": 3, "pp": 1, "tp": 2} and ckpt.world_size == 6
    assert ckpt.mesh["ranks"]["bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt"] == {"dp": 2, "pp": 0, "tp": 1}
    same_bits(ckpt.param("0.qkv.weight", "step").torch(), torch.tensor(4.0), "step")


def test_tensor_parallel_ranks_of_stage_3(tmp_path):
    truth = like.full(WHOLE)
    dims = {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}, "mp_world_size": 2}
    for rank in range(2):
        mine = {s: {n: tp_piece(n, t, 2, rank) for n, t in row.items()} for s, row in truth.items()}
        shapes = {n: tuple(t.shape) for n, t in mine["fp32"].items()}
        like.save_zero3(tmp_path, [list(WHOLE)], shapes, mine, 3, tp=rank, universal_checkpoint_info=INFO, **dims)
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth))
    assert ckpt["exp_avg.0.norm.weight"].num_replicas == 2 and not ckpt.notes


def test_tensor_parallel_ranks_without_patterns_stay_apart(tmp_path):
    truth = like.full(WHOLE)
    save_tp(tmp_path, truth, 2, 2)
    ckpt = wb.open(tmp_path, cache=False)
    check_catalog(ckpt.catalog)
    assert any("universal_checkpoint_info" in note and "6 parameters" in note for note in ckpt.notes)
    for rank in range(2):
        for name, want in truth["exp_avg"].items():
            tensor = ckpt[f"exp_avg.mp_rank_{rank:02d}.{name}"]
            same_bits(tensor.torch(), tp_piece(name, want, 2, rank), tensor.key)
            assert (tensor.fqn, tensor.role) == (name, "exp_avg")
    with pytest.raises(errors.TensorNotFoundError, match="2 tensors of role 'exp_avg'"):
        ckpt.param("0.qkv.weight", "exp_avg")


def test_a_stored_pattern_that_could_run_for_ever_is_not_run():
    assert _match([r"(a+)+$", r"(x|x)*y", r".*.*.*.*b", "a" * 400], "a" * 60) is None
    assert _match([r"^layers\.\d+\.attn\.w[0-9]+.*$"], "layers.12.attn.w3.weight") is not None


def test_pipeline_stages_layers_and_tied_embeddings(tmp_path):
    """Two stages; the tied embedding lies at another place of each stage's line, so their boxes differ."""
    shapes = {"tied_modules.embed.weight": (9, 4), "1.weight": (5, 4), "2.weight": (3, 7), "2.bias": (3,)}
    truth = like.full(shapes)
    stages = [["tied_modules.embed.weight", "1.weight"], ["2.weight", "2.bias", "tied_modules.embed.weight"]]
    dims = {"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}, "mp_world_size": 1}
    for stage, names in enumerate(stages):
        like.save_zero12(tmp_path, [names], shapes, truth, 2, mp=stage, style="bf16", module=None, **dims)
    rounded = {n: t.bfloat16() for n, t in truth["fp32"].items()}
    layers = {
        0: {"weight": rounded["tied_modules.embed.weight"]},
        1: {"weight": rounded["1.weight"]},
        2: {"weight": rounded["2.weight"], "bias": rounded["2.bias"]},
    }
    for layer, content in layers.items():
        like.save(OrderedDict(content), tmp_path / f"layer_{layer:02d}-model_states.pt")
    ckpt = wb.open(tmp_path, cache=False)
    weights = {("param", f"{i}.{n}"): t for i, content in layers.items() for n, t in content.items()}
    check_states(ckpt, meanings(truth) | weights)
    tied = ckpt["exp_avg.tied_modules.embed.weight"]
    assert tied.num_replicas == 2
    same_bits(tied.replica(1).torch(), truth["exp_avg"]["tied_modules.embed.weight"], "the last stage's copy")
    assert ckpt.mesh["axes"] == {"dp": 2, "pp": 2, "tp": 1} and ckpt.world_size == 4
    same_bits(ckpt.param("tied_modules.embed.weight").torch(), rounded["tied_modules.embed.weight"], "by its own name")
    for state in ("master", "exp_avg", "exp_avg_sq"):
        want = truth["fp32" if state == "master" else state]["tied_modules.embed.weight"]
        same_bits(ckpt.param("0.weight", state).torch(), want, "of the layer")
    assert not [finding for finding in wb.verify(ckpt, deep=True) if finding.rule.startswith("state.")]


@pytest.mark.parametrize("data_first", [False, True])
def test_experts_have_global_numbers_and_their_own_ranks(tmp_path, data_first):
    """Four ranks, groups of two that hold two experts each; masters of expert 2 are on ranks 1 and 3 (or 2 and 3)."""
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts"
    dense = {"w": (5, 3), "gate": (4, 3)}
    experts = {f"{prefix}.{e}.fc.weight": (3, 5) for e in range(4)}
    truth = like.full(dense | experts)
    local = [f"{prefix}.{e}.fc.weight" for e in range(2)]
    names = [list(dense), local]
    needs = [sum(truth["fp32"][n].numel() for n in dense), 30]
    for rank in range(4):
        group, place = (rank // 2, rank % 2) if data_first else (rank % 2, rank // 2)
        held = [f"{prefix}.{group * 2 + e}.fc.weight" for e in range(2)]
        parts = [
            {s: like.split_line([truth[s][n] for n in dense], 4) for s in like.STATES},
            {s: like.split_line([truth[s][n] for n in held], 2) for s in like.STATES},
        ]
        content = like.optim_12(parts, rank, 4, needs=needs, counts=[4, 2], places=[rank, place], moe=[False, True])
        like.save_optim(content, tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    shapes = dense | dict.fromkeys(local, (3, 5))
    module = OrderedDict((n, truth["fp32"][n].bfloat16()) for n in dense)
    config = {"use_data_before_expert_parallelism": True} if data_first else {}
    like.save(like.model_states(names, shapes, module, 4, ds_config=config), tmp_path / "mp_rank_00_model_states.pt")
    for e, name in enumerate(experts):
        like.save({name: truth["fp32"][name].bfloat16()}, tmp_path / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth) | {("param", n): t.bfloat16() for n, t in truth["fp32"].items()})
    ranks = set(ckpt[f"fp32.{prefix}.2.fc.weight"].chunks["rank"])
    assert ranks <= ({2, 3} if data_first else {1, 3}) and ranks


# ---- universal -----------------------------------------------------------------------------------------------------


def save_universal(folder: Path, truth: dict, *, flat_tensors: bool) -> None:
    for state, row in truth.items():
        for name, tensor in row.items():
            content = tensor.reshape(-1).clone() if flat_tensors else {"cat_dim": 0, "param": tensor}
            like.save(content, folder / "zero" / name / f"{state}.pt")
            if not flat_tensors:
                like.save(torch.tensor(4.0), folder / "zero" / name / "step.pt")
    like.save(
        {"zero_stage": 3 if flat_tensors else 1, "blob": torch.zeros(1000)}, folder / "zero" / "optimizer_state.pt"
    )


@pytest.mark.parametrize("flat_tensors", [False, True])
def test_universal_in_both_shapes(tmp_path, flat_tensors):
    truth = like.full(SHAPES)
    save_universal(tmp_path, truth, flat_tensors=flat_tensors)
    module = OrderedDict((n, torch.empty(0)) for group in NAMES for n in group)
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    like.save(like.model_states(NAMES, SHAPES, module, 2, shared_params={"head": "odd"}), tmp_path / file)
    ckpt = wb.open(tmp_path, cache=False)
    assert ckpt.format == "deepspeed_universal" and not ckpt.notes and ckpt.step == 4
    check_states(ckpt, meanings(truth))
    same_bits(ckpt.param("head", "master").torch(), truth["fp32"]["odd"], "alias")
    assert ckpt.objects["optimizer_state"] == {"zero_stage": 3 if flat_tensors else 1}


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_with_frozen_parameters(tmp_path, stage):
    """Of stage 3 the ranks' pieces stay in the model_states; ``--inject_missing_state`` writes fp32.pt for stage 1."""
    truth, frozen = like.full(SHAPES), {"f.weight": torch.randn(11, 23), "f.bias": torch.randn(11)}
    if stage == 3:
        like.save_zero3(tmp_path, NAMES, SHAPES, truth, 4, frozen=frozen, dp_world_size=4)
        for file in tmp_path.glob("*optim_states.pt"):
            file.unlink()
    else:
        module = OrderedDict({n: truth["fp32"][n] for group in NAMES for n in group} | frozen)
        states = like.model_states(NAMES, SHAPES, module, 2)
        like.save(states, tmp_path / "mp_rank_00_model_states.pt")
        for name, tensor in frozen.items():
            like.save({"param": tensor}, tmp_path / "zero" / name / "fp32.pt")
    save_universal(tmp_path, truth, flat_tensors=stage == 3)
    ckpt = wb.open(tmp_path, cache=False)
    check_states(ckpt, meanings(truth) | {("param", n): t for n, t in frozen.items()})
    assert not ckpt.notes and wb.verify(ckpt).exit_code == 0
    if stage == 1:  # what a trained parameter lacks is still told
        for state in ("exp_avg", "exp_avg_sq", "step"):
            (tmp_path / "zero" / "odd" / f"{state}.pt").unlink()
        found = wb.verify(tmp_path)
        assert {finding.where for finding in found if finding.rule == "state.partner"} == {"odd"}


def test_universal_that_is_not_whole(tmp_path):
    truth = like.full(SHAPES)
    save_universal(tmp_path, truth, flat_tensors=True)
    assert any("6 parameters are stored flat" in n or "flat" in n for n in wb.open(tmp_path, cache=False).notes)
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    like.save(like.model_states(NAMES, SHAPES | {"odd": (7, 4)}, {}, 2), file)
    refused(errors.CorruptError, tmp_path, "odd", "21", "(7, 4)", "28")
    like.save(like.model_states(NAMES, SHAPES, {}, 2), file)
    shutil.rmtree(tmp_path / "zero" / "odd")
    (tmp_path / "zero" / "ln.bias" / "exp_avg.pt").unlink()
    notes = " ".join(wb.open(tmp_path, cache=False).notes)
    assert "no folder in 'zero', such as 'odd'" in notes and "'ln.bias': exp_avg" in notes


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.fixture
def zero1(tmp_path):
    like.save_zero12(tmp_path, NAMES, SHAPES, like.full(SHAPES), 4)
    return tmp_path


@pytest.fixture
def zero3(tmp_path):
    like.save_zero3(tmp_path, NAMES, SHAPES, like.full(SHAPES), 4)
    return tmp_path


def edit(path: Path, change) -> None:
    with like.fake_deepspeed():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


MODEL_1, MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM_1, OPTIM_3 = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def test_missing_ranks_are_named_and_the_rest_can_be_read(zero1):
    truth = like.full(SHAPES)
    (zero1 / OPTIM_1.format(1)).unlink()
    refused(errors.IncompleteError, zero1, "1 of 4 optimizer files", "ranks 1;", "partial=True")
    ckpt = wb.open(zero1, cache=False, partial=True)
    same_bits(ckpt.param("odd").torch(), truth["fp32"]["odd"].bfloat16(), "weights")
    same_bits(ckpt["fp32.wte.weight"][:4], truth["fp32"]["wte.weight"][:4], "rank 0's part")
    with pytest.raises(errors.MissingFileError, match="zero_pp_rank_1"):
        ckpt["fp32.wte.weight"].torch()
    for rank in (2, 3):
        (zero1 / OPTIM_1.format(rank)).unlink()
    refused(errors.IncompleteError, zero1, "3 of 4", "ranks 1, 2, 3", partial=True)


def test_missing_ranks_of_stage_3(zero3):
    truth = like.full(SHAPES)
    (zero3 / OPTIM_3.format(3)).unlink()
    (zero3 / MODEL_3.format(0)).unlink()  # every other rank's says the same
    refused(errors.IncompleteError, zero3, "1 of 4", "ranks 3;")
    ckpt = wb.open(zero3, cache=False, partial=True)
    same_bits(ckpt["exp_avg.wte.weight"][:9], truth["exp_avg"]["wte.weight"][:9], "ranks 0 to 2")
    with pytest.raises(errors.MissingFileError, match="zero_pp_rank_3"):
        ckpt["exp_avg.wte.weight"][-1]


def test_model_states_missing_or_of_another_model_parallel_size(zero1):
    edit(zero1 / MODEL_1, lambda c: c.update(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 2}))
    refused(errors.IncompleteError, zero1, "model-parallel ranks 1, 2, 3 of 4")
    (zero1 / MODEL_1).unlink()
    refused(errors.IncompleteError, zero1, "mp_rank 00", "names and shapes of parameters are unknown")


@pytest.mark.parametrize("fixture", ["zero1", "zero3"])
def test_param_shapes_that_do_not_add_up(fixture, request):
    folder = request.getfixturevalue(fixture)

    def grow(content):
        content["param_shapes"][0]["odd"] = torch.Size((70, 3))
        content["module"]["odd"] = torch.empty(0 if fixture == "zero3" else (70, 3))

    for file in folder.glob("*model_states.pt"):
        edit(file, grow)
    words = ["308", "120", "188 too few"] if fixture == "zero1" else ["82", "35", "47 too few", "4 ranks"]
    refused(errors.CorruptError, folder, *words)


def test_files_of_two_saves_in_one_folder(zero1, tmp_path):
    truth = like.full(SHAPES)
    other = tmp_path / "other"
    like.save_zero12(other, NAMES, SHAPES, truth, 6)
    shutil.copy(other / OPTIM_1.format(5), zero1)  # beyond this save's ranks
    assert any("ranks that this save did not have (4 ranks)" in n for n in wb.open(zero1, cache=False).notes)
    shutil.copy(other / OPTIM_1.format(2), zero1)
    refused(errors.CorruptError, zero1, "has 6 ranks", "has 4 and 2", "different saves")
    shutil.copy(zero1 / OPTIM_1.format(0), zero1 / OPTIM_3.format(0))
    refused(errors.CorruptError, zero1, "same rank", "two saves")


def test_a_shorter_partition_and_other_groups(zero1):
    def shorten(content):
        base = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        base["exp_avg"] = base["exp_avg"][:-5].clone()
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(20)

    edit(zero1 / OPTIM_1.format(1), shorten)
    refused(errors.CorruptError, zero1, "zero_pp_rank_1", "20", "10 fewer than the 30")
    for file in zero1.glob("*model_states.pt"):
        edit(file, lambda c: c["param_shapes"].pop())
    refused(errors.CorruptError, zero1, "1 group,", "has 2")


def test_ranks_of_another_step_and_other_shapes(zero3):
    edit(zero3 / MODEL_3.format(2), lambda c: c.update(global_steps=8))
    notes = wb.open(zero3, cache=False).notes
    assert len(notes) == 1 and "has step 8, not 4" in notes[0]
    edit(zero3 / MODEL_3.format(2), lambda c: c["param_shapes"][0].update(odd=torch.Size((3, 7))))
    refused(errors.CorruptError, zero3, "rank_2", "different param_shapes")


def test_no_param_shapes_no_module_no_optimizer(zero1):
    edit(zero1 / MODEL_1, lambda c: c.pop("param_shapes"))
    refused(errors.IncompleteError, zero1, "no param_shapes")
    edit(zero1 / MODEL_1, lambda c: c.pop("module"))
    refused(errors.CorruptError, zero1, "no 'module'")
    edit(zero1 / OPTIM_1.format(0), lambda c: c.pop("optimizer_state_dict"))
    refused(errors.CorruptError, zero1, "rank_0", "no optimizer_state_dict")


def test_a_module_that_nests_its_tensors(zero1):
    """As Megatron-DeepSpeed's ``state_dict_for_save_checkpoint`` does: no tensor is passed over."""
    with wb.open(zero1, cache=False) as ckpt:
        flat = {key: ckpt[key].torch() for key in ckpt.select(role="param")}

    def nest(content):
        tree = {}
        for name, tensor in content["module"].items():
            *parents, leaf = name.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = tensor
        content["module"] = tree

    edit(zero1 / MODEL_1, nest)
    with wb.open(zero1, cache=False) as ckpt:
        assert set(ckpt.select(role="param")) == set(flat)
        for key, tensor in flat.items():
            assert torch.equal(ckpt[key].torch(), tensor), key
    edit(zero1 / MODEL_1, lambda c: c["module"].update({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}))
    refused(errors.CorruptError, zero1, "two tensors of the module have the name 'a.b'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.update(partition_count=[10**9, 10**9]), ["partition_count"]),
        (lambda o: o.update(partition_count=None), ["partition_count"]),
        (lambda o: o.update(group_paddings=["x", 1]), ["group_paddings"]),
        (lambda o: o.update(single_partition_of_fp32_groups="x"), ["lacks the list of flat tensors"]),
        (lambda o: o.update(base_optimizer_state=[[], []]), []),
    ],
)
def test_odd_optimizer_files(zero1, change, words):
    for rank in range(4):
        edit(zero1 / OPTIM_1.format(rank), lambda c: change(c["optimizer_state_dict"]))
    if words:
        refused(errors.CorruptError, zero1, "rank_0", *words)
    else:
        assert set(wb.open(zero1, cache=False).roles) == {"param", "master"}


def test_truncated_empty_and_foreign_files(zero1):
    file = zero1 / OPTIM_1.format(2)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(errors.TruncatedError, zero1, "zero_pp_rank_2")
    file.write_bytes(b"")
    refused(errors.TruncatedError, zero1, "zero_pp_rank_2", "empty")
    file.write_bytes(b"no checkpoint")
    refused(errors.CorruptError, zero1, "zero_pp_rank_2")
    torch.save([1, 2], file)
    refused(errors.CorruptError, zero1, "zero_pp_rank_2", "list")


def test_weights_without_their_optimizer(zero1):
    for rank in range(4):
        (zero1 / OPTIM_1.format(rank)).unlink()
    ckpt = wb.open(zero1, cache=False)
    assert set(ckpt.roles) == {"param"} and any("no optimizer file" in note for note in ckpt.notes)


def test_stage_3_without_any_optimizer_file_has_no_weights(zero3):
    for rank in range(4):
        (zero3 / OPTIM_3.format(rank)).unlink()
    refused(errors.IncompleteError, zero3, "stage 3", "optimizer files")


def test_a_run_and_its_trackers(tmp_path):
    truth = like.full(SHAPES)
    for step in (4, 8):
        like.save_zero12(tmp_path / f"global_step{step}", NAMES, SHAPES, truth, 2, global_steps=step)
    (tmp_path / "zero_to_fp32.py").write_text("raise SystemExit('never run')")
    (tmp_path / "latest").write_text("global_step4")
    assert wb.open(tmp_path, cache=False).step == 4
    (tmp_path / "latest").write_text("global_step12")
    ckpt = wb.open(tmp_path, cache=False)
    assert ckpt.step == 8 and "'global_step12', which does not exist" in ckpt.notes[0]
    (tmp_path / "global_step8" / OPTIM_1.format(0)).unlink()
    assert wb.open(tmp_path, cache=False).step == 4


def test_nothing_of_deepspeed_is_imported_or_needed(zero1):
    import sys

    wb.open(zero1, cache=False)
    assert not [name for name in sys.modules if name.split(".")[0] == "deepspeed"]


ODD = [
    None,
    5,
    -1,
    2**70,
    1.5,
    "x",
    "",
    [],
    {},
    (),
    True,
    b"y",
    [[1]],
    {"a": 1},
    torch.ones(3),
    torch.ones(2, 2),
    (1, 2),
    torch.Size((5,)),
    {0: []},
    [torch.ones(4)],
    [None],
]


def places(value):
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def test_odd_values_anywhere_end_in_our_errors_or_open(tmp_path):
    """Files with one entry replaced, dropped or renamed: whatever opens can be listed, what fails says why."""
    truth, whole = like.full(SHAPES), like.full(WHOLE)
    like.save_zero12(tmp_path / "1", NAMES, SHAPES, truth, 2, pads=2, order=NAMES)
    like.save_zero3(tmp_path / "3", NAMES, SHAPES, truth, 2, frozen={"f": torch.ones(3)}, shared_params={"h": "odd"})
    save_tp(tmp_path / "tp", whole, 2, 1, universal_checkpoint_info=INFO)
    save_universal(tmp_path / "u", truth, flat_tensors=True)
    like.save(like.model_states(NAMES, SHAPES, {}, 2), tmp_path / "u" / MODEL_3.format(0))
    files = sorted(tmp_path.rglob("*states.pt"))
    chance, outcomes = random.Random(0), Counter()
    for _ in range(150):
        file = chance.choice(files)
        whole_file = file.read_bytes()

        def change(content):
            owner, key = chance.choice(list(places(content)))
            kind = chance.randrange(8)
            if kind == 0 and isinstance(owner, dict):
                del owner[key]
            elif kind == 1 and isinstance(owner, dict):
                owner[chance.choice([5, None, ("a",), "zz"])] = owner.pop(key)
            else:
                owner[key] = chance.choice(ODD)

        edit(file, change)
        try:
            ckpt = wb.open(tmp_path / file.relative_to(tmp_path).parts[0], cache=False)
            assert len(ckpt.tensors) == len(ckpt) and repr(ckpt) and ckpt.mesh["axes"] is not None
            assert len(dict(ckpt.objects)) == len(ckpt.objects)
            outcomes["opened"] += 1
        except errors.OpenError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            outcomes[type(error).__name__] += 1
        file.write_bytes(whole_file)
    assert outcomes["opened"] > 30 and outcomes["CorruptError"] > 10, outcomes


def test_flipped_bits_outside_the_payloads(zero3):
    truth = like.full(SHAPES)
    file = zero3 / OPTIM_3.format(1)
    whole_file = file.read_bytes()
    catalog = wb.open(zero3, cache=False).catalog
    rows = [r for r in range(catalog.chunks) if catalog.files[catalog.file[r]] == file.name]
    payload = {at for r in rows for at in range(int(catalog.start[r]), int(catalog.stop[r]))}
    outside = [at for at in range(len(whole_file)) if at not in payload]
    chance, refusals = random.Random(1), 0
    for at in chance.sample(outside, 150):
        broken = bytearray(whole_file)
        broken[at] ^= 1 << chance.randrange(8)
        file.write_bytes(broken)
        try:
            got = wb.open(zero3, cache=False)["fp32.wte.weight"].torch()
        except errors.OpenError:
            refusals += 1
            continue
        same_bits(got, truth["fp32"]["wte.weight"], f"flip at {at}")
    assert refusals > 30


# ---- arithmetic ----------------------------------------------------------------------------------------------------

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def rebuilt(numel: list[int], ranges: flat.Ranges, lines: dict[tuple[int, int], np.ndarray]) -> list[np.ndarray]:
    """Every parameter from its ranges; -1 where none brings an element."""
    found = [np.full(n, -1) for n in numel]
    for p, r, s, at, a, b in zip(*(getattr(ranges, f) for f in ranges.__dataclass_fields__), strict=True):
        assert (found[p][a:b] == -1).all() and b > a
        found[p][a:b] = lines[r, s][at : at + b - a]
    return found


@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 9), st.integers(0, 3), st.integers(1, 3))
def test_by_line_is_what_flatten_pad_and_chunk_do(numel, dp, pad, align):
    tensors = [torch.arange(n) + 1000 * i for i, n in enumerate(numel)]
    pads = [pad * (i % 2) for i in range(len(numel))]
    parts = [p.long().numpy() for p in like.split_line([t.float() for t in tensors], dp, pads, align)]
    if len(parts) != dp or not len(parts[0]):
        return  # torch cuts an empty line into fewer parts
    ranges = flat.by_line(np.array(numel), np.array(pads), len(parts[0]), np.arange(dp), 0)
    found = rebuilt(numel, ranges, {(r, 0): part for r, part in enumerate(parts)})
    assert all((f == t.numpy()).all() for f, t in zip(found, tensors, strict=True))


@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 9), st.randoms())
def test_by_param_is_what_stage_3_does(numel, dp, chance):
    tensors = [torch.arange(n) + 1000 * i for i, n in enumerate(numel)]
    lines = [torch.cat([like.pieces(t, dp)[r] for t in tensors]).numpy() for r in range(dp)]
    cuts = sorted(chance.randint(0, len(lines[0])) for _ in range(chance.randint(0, 3)))
    edges = [0, *cuts, len(lines[0])]
    segments = np.diff(edges)
    ranges = flat.by_param(np.array(numel), segments, dp)
    table = {(r, s): lines[r][edges[s] : edges[s + 1]] for r in range(dp) for s in range(len(segments))}
    found = rebuilt(numel, ranges, table)
    assert all((f == t.numpy()).all() for f, t in zip(found, tensors, strict=True))
    assert (np.lexsort((ranges.start, ranges.param)) == np.arange(len(ranges.param))).all()
