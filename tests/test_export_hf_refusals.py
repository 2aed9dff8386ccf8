"""What is not renamed for Hugging Face, or gets no config: each for the reason that it is; and Megatron before core."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from workbench.errors import UsageError
from workbench.export.hf.convert import as_hf

pytest.importorskip("transformers")
import hf_twins as twins
from hf_twins import ARGS, EXPERTS, HIDDEN, INNER, PAD, SIZES, VOCAB
from megatron_files import cut, write_legacy

OWN = Path(__file__).resolve().parents[1] / "sample_ckpts"
KNOWN = SIZES | {"hidden_act": "silu"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> dict[str, torch.Tensor]:
    return load_file(twins.twin(tmp_path_factory.mktemp("twin"), "Llama") / "model.safetensors")


def run(tmp_path: Path, truth: dict[str, torch.Tensor], edit: Any = None, **args: object) -> wb.Checkpoint:
    """A Megatron run of a Llama, changed."""
    weights = twins.in_megatron(truth)
    if edit is not None:
        edit(weights)
    return wb.open(write_legacy(tmp_path / "run", twins.megatron(weights), args=ARGS | args))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"rotary_interleaved": True}, "interleaved rotary pairs"),
        ({"apply_layernorm_1p": True}, "norms are stored less 1"),
        ({"layernorm_zero_centered_gamma": True}, "norms are stored less 1"),
        ({"moe_mlp_glu_interleave_size": 32}, "alternate in blocks"),
        ({"num_query_groups": None}, "query groups"),
        ({"kv_channels": 7}, "64 rows are not 4 heads and 2 groups of 7"),
    ],
)
def test_rows_that_are_not_those_of_transformers(tmp_path, truth, args, why):
    with pytest.raises(UsageError, match=why):
        as_hf(run(tmp_path, truth, **args))


def test_a_config_that_is_given_does_not_overrule_what_is_stored(tmp_path, truth):
    with pytest.raises(UsageError, match="interleaved rotary pairs"):
        as_hf(run(tmp_path, truth, rotary_interleaved=True), KNOWN)


def test_a_config_that_is_given_fills_what_is_not_stored(tmp_path, truth):
    found = as_hf(run(tmp_path, truth, rotary_base=None), KNOWN | {"rope_theta": 7.0, "rms_norm_eps": 1.0})
    assert found.config["rope_theta"] == 7.0 and found.config["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize("version", [None, 1.0])
def test_an_order_of_qkv_from_before_version_2(tmp_path, truth, version):
    at = tmp_path / "iter_0000010/mp_rank_00"
    at.mkdir(parents=True)
    state = {"model": twins.in_megatron(truth), "args": Namespace(**ARGS), "iteration": 10}
    torch.save(state | ({} if version is None else {"checkpoint_version": version}), at / "model_optim_rng.pt")
    with pytest.raises(UsageError, match=f"checkpoint_version={version}"):
        as_hf(wb.open(at.parent))


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda w: w.update({"embedding.position_embeddings.weight": torch.zeros(8, HIDDEN)}),
            "embeddings as in GPT-2",
        ),
        (lambda w: w.update({"decoder.final_layernorm.bias": torch.zeros(HIDDEN)}), "not a weight of the Llama fam"),
        (lambda w: w.update({"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(INNER, HIDDEN)}), "not a gated MLP"),
        (lambda w: w.update({"mtp.layers.0.eh_proj.weight": torch.zeros(HIDDEN, HIDDEN)}), "not a weight"),
    ],
)
def test_other_architectures(tmp_path, truth, edit, why):
    weights = twins.in_megatron(truth)
    edit(weights)
    with pytest.raises(UsageError, match=why):
        as_hf(twins.plain(tmp_path / "m", weights), KNOWN)


def test_linears_that_are_turned_round(tmp_path, truth):
    weights = twins.in_megatron(truth)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with pytest.raises(UsageError, match=r"would have shape \(24, 32\) and down_proj.weight \(24, 32\)"):
        as_hf(twins.plain(tmp_path / "m", weights | {name: weights[name].T}), KNOWN)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"rotary_base": None}, "the checkpoint does not store rope_theta"),
        (
            {"norm_epsilon": None, "max_position_embeddings": None},
            "the checkpoint does not store rms_norm_eps, max_position_embedd",
        ),
        ({"swiglu": False}, "does not support swiglu=False"),
        ({"normalization": "LayerNorm"}, "does not support normalization='LayerNorm'"),
        ({"position_embedding_type": "none"}, "does not support position_embedding_type='none'"),
        ({"window_size": (128, 0)}, "does not support window_size"),
        ({"use_rope_scaling": True}, "does not support rope_scaling with a factor that is not stored"),
    ],
)
def test_no_config_where_a_fact_is_missing_or_unlike(tmp_path, truth, args, why):
    found = as_hf(run(tmp_path, truth, **args))
    assert found.config is None and any(why in note for note in found.notes), found.notes
    assert "model.layers.1.self_attn.q_proj.weight" in found.ckpt


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"moe_router_pre_softmax": True}, "chosen experts to sum to 1"),
        ({"moe_router_score_function": "sigmoid"}, "does not support moe_router_score_function='sigmoid'"),
        ({"moe_router_topk": None}, "the checkpoint does not store num_experts_per_tok"),
        ({}, "order of softmax and top-k is not stored"),
    ],
)
def test_no_config_for_a_router_that_is_not_known(tmp_path, args, why):
    truth = load_file(twins.twin(tmp_path / "twin", "Mixtral") / "model.safetensors")
    model = twins.megatron(twins.in_megatron(truth))
    routed = {"num_experts": EXPERTS, "moe_router_topk": 2}
    routed |= {"moe_router_pre_softmax": False} if args else {}
    found = as_hf(wb.open(write_legacy(tmp_path / "run", model, args=ARGS | routed | args)))
    assert found.config is None and any(why in note for note in found.notes), found.notes
    assert set(found.ckpt) == set(truth)


def test_no_config_where_a_weight_is_not_there(tmp_path, truth):
    weights = twins.in_megatron(truth)
    del weights["decoder.layers.1.mlp.linear_fc2.weight"]
    found = as_hf(twins.plain(tmp_path / "m", weights), KNOWN)
    assert found.config is None
    assert (
        "LlamaForCausalLM expects layers.1.mlp.down_proj.weight of shape (32, 24), the checkpoint has None"
        in found.notes[-1]
    )


@pytest.mark.parametrize("stored", [{"vocab_size": None}, {"make_vocab_size_divisible_by": 128}])
def test_padding_of_unknown_size_stays_and_is_told(tmp_path, truth, stored):
    found = as_hf(run(tmp_path, truth, **stored))
    assert found.ckpt["lm_head.weight"].shape == (VOCAB + PAD, HIDDEN) and found.config["vocab_size"] == VOCAB + PAD
    assert "lm_head.weight keeps its 48 rows: the number of padding rows is not stored" in found.notes


def test_names_of_no_convention():
    with pytest.raises(UsageError, match=r"no known naming convention, such as 'odd', 'wte.weight'"):
        as_hf(wb.open(OWN / "deepspeed_zero1"))
    with pytest.raises(UsageError, match="the rows per head, which order the rotary pairs of q and k, are not stored"):
        as_hf(wb.open(OWN / "titan_run/step-4"))
    with pytest.raises(UsageError, match="no parameter"):
        as_hf(wb.open(OWN / "hf_peft_lora"))


def test_experts_fused_in_memory_of_a_class_that_is_not_known(tmp_path):
    at = "model.model.layers.0.mlp."
    weights = {
        at + "experts.gate_up_proj": torch.zeros(2, 8, 4),
        at + "experts.down_proj": torch.zeros(2, 4, 4),
        at + "router.weight": torch.zeros(2, 4),
        "model.model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
    }
    with pytest.raises(UsageError, match=r"mlp.router.weight': not a weight of the Llama family"):
        as_hf(twins.plain(tmp_path / "m", weights))


def test_quantised_weights_and_adapters(tmp_path):
    name = "model.model.layers.0.self_attn.q_proj."
    with pytest.raises(UsageError, match="quantised: stored as float8_e4m3fn"):
        as_hf(twins.plain(tmp_path / "a", {name + "weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}))
    beside = {f"base_model.{name}base_layer.weight": torch.zeros(4, 4)}
    lora = {f"base_model.{name}lora_{side}.weight": torch.zeros(2, 4) for side in "AB"}
    with pytest.raises(UsageError, match="lora_A of an adapter that is not merged into its weight"):
        as_hf(twins.plain(tmp_path / "b", beside | lora))


# ---- Megatron before core --------------------------------------------------------------------------------------------


def before_core(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of Megatron-LM's ``language_model``, which Megatron-DeepSpeed has kept."""
    found = {}
    for name, weight in weights.items():
        for new, old in (
            ("decoder.", "language_model.encoder."),
            ("embedding.", "language_model.embedding."),
            ("output_layer", "language_model.output_layer"),
            ("linear_qkv", "query_key_value"),
            ("linear_proj", "dense"),
            ("linear_fc1", "dense_h_to_4h"),
            ("linear_fc2", "dense_4h_to_h"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
        ):
            name = name.replace(new, old)
        found[name] = weight
    return found


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As ``TransformerLanguageModel.state_dict_for_save_checkpoint`` nests them."""
    inner: dict[str, Any] = {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}
    for name, weight in flat.items():
        part, rest = name.removeprefix("language_model.").split(".", 1)
        if part == "embedding":
            inner[part]["word_embeddings"]["weight"] = weight
        else:
            inner[part][rest] = weight
    return {"language_model": inner}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_of_megatron_before_core(tmp_path, truth, tp):
    weights = twins.in_megatron(truth)
    for rank in range(tp):
        at = tmp_path / f"iter_0000010/mp_rank_{rank:02d}"
        at.mkdir(parents=True)
        mine = before_core({name: cut(name, weight, rank, tp) for name, weight in weights.items()})
        args = Namespace(**ARGS, tensor_model_parallel_size=tp, world_size=tp)
        state = {"model": nested(mine), "args": args, "checkpoint_version": 3.0, "iteration": 10}
        torch.save(state, at / "model_optim_rng.pt")
    found = as_hf(wb.open(tmp_path / "iter_0000010"))
    assert set(found.ckpt) == set(truth)
    assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in truth.items())
    assert found.config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_under_deepspeed(tmp_path, truth, tp):
    """Whole weights are renamed; those that DeepSpeed holds in parts of tensor parallelism are not guessed at."""
    weights = twins.in_megatron(truth)
    for rank in range(tp):
        mine = before_core({name: cut(name, weight, rank, tp) for name, weight in weights.items()})
        state = {"module": mine, "args": Namespace(**ARGS), "checkpoint_version": 3.0, "iteration": 10}
        state |= {"optimizer": None, "dp_world_size": 1, "mp_world_size": tp, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(state | {"buffer_names": [], "param_shapes": None}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    if tp > 1:
        with pytest.raises(UsageError, match="one of 2 parts that the checkpoint does not join"):
            as_hf(wb.open(tmp_path))
        return
    found = as_hf(wb.open(tmp_path))
    assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in truth.items())
    assert set(found.ckpt) == set(truth) and found.config["architectures"] == ["LlamaForCausalLM"]
