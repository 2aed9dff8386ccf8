"""Checkpoints under Hugging Face's names: against transformers itself, and against dense cuts of real runs' truth."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.properties import examples
from workbench.core.storage import SourcePool
from workbench.export.hf.convert import as_hf

pytest.importorskip("transformers")
import hf_twins as twins
from hf_twins import ARGS, CLASSES, EXPERTS, GROUPS, HEADS, HIDDEN, LAYERS, ROWS, SIZES
from megatron_files import write_dist, write_legacy

OWN = Path(__file__).resolve().parents[1] / "sample_ckpts"
TRUTH = Path(__file__).resolve().parent / "truth"
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")


@pytest.mark.parametrize("layout", ["legacy tp2 pp2", "torch_dist tp2 pp2"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_megatron_run_is_the_model_of_transformers(tmp_path, name, layout):
    hf = twins.twin(tmp_path / "twin", name)
    truth = load_file(hf / "model.safetensors")
    model, args = twins.megatron(twins.in_megatron(truth)), ARGS | CLASSES[name][1]
    tp, pp = (1, 2) if name == "Qwen2Moe" else (2, 2)  # the gate of a shared expert has one row
    if layout.startswith("legacy"):
        run = wb.open(write_legacy(tmp_path / "run", model, tp=tp, pp=pp, args=args))
    else:
        run = wb.open(write_dist(tmp_path / "run", model, tp=tp, pp=pp, optimizer="float16", args=args))
    found = as_hf(run)
    assert set(found.ckpt) == set(truth)
    for key, want in truth.items():
        assert torch.equal(found.ckpt[key].torch(), want), key
        assert found.ckpt[key].fqn == key and found.ckpt[key].role == "param"
    assert found.config is not None, found.notes
    assert found.config["architectures"] == [f"{name.split()[0]}ForCausalLM"]
    assert any("pad the vocabulary are removed" in note for note in found.notes)
    assert set(found.left) >= {key for key in run if run[key].role != "param"}
    assert torch.equal(twins.logits(twins.exported(found, tmp_path / "out")), twins.logits(hf))


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_of_expert_parallel_ranks(tmp_path, grouped):
    truth = load_file(twins.twin(tmp_path / "twin", "Mixtral") / "model.safetensors")
    model = twins.megatron(twins.in_megatron(truth))
    model.grouped = grouped  # TEGroupedMLP numbers weights, not modules
    args = ARGS | CLASSES["Mixtral"][1] | {"moe_grouped_gemm": grouped}
    legacy = wb.open(write_legacy(tmp_path / "legacy", model, tp=2, ep=2, args=args))
    dist = wb.open(write_dist(tmp_path / "dist", model, ep=2, optimizer="none", args=args))
    for run in (legacy, dist):
        found = as_hf(run)
        assert set(found.ckpt) == set(truth) and found.config is not None, found.notes
        assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in truth.items())


# ---- real checkpoints against their own truth ------------------------------------------------------------------------


def dense(params: dict[str, torch.Tensor], heads: int, groups: int, rows: int, vocab: int) -> dict[str, torch.Tensor]:
    """Megatron's truth under Hugging Face's names, by dense cutting."""
    found = {
        "model.embed_tokens.weight": params["embedding.word_embeddings.weight"][:vocab],
        "lm_head.weight": params["output_layer.weight"][:vocab],
        "model.norm.weight": params["decoder.final_layernorm.weight"],
    }
    each = heads // groups
    for name, weight in params.items():
        if not name.startswith("decoder.layers."):
            continue
        _, _, n, rest = name.split(".", 3)
        p, leaf = f"model.layers.{n}.", name.rpartition(".")[2]
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            by_group = weight.unflatten(0, (groups, each + 2, rows))
            for side, part in (("q", by_group[:, :each]), ("k", by_group[:, each]), ("v", by_group[:, each + 1])):
                found[f"{p}self_attn.{side}_proj.{leaf}"] = part.reshape(-1, *weight.shape[1:])
        elif rest == "mlp.linear_fc1.weight":
            found[p + "mlp.gate_proj.weight"], found[p + "mlp.up_proj.weight"] = weight.chunk(2)
        else:
            found[
                p
                + {
                    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
                    "input_layernorm.weight": "input_layernorm.weight",
                    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
                    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
                    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
                }[rest]
            ] = weight
    return found


@pytest.mark.parametrize(
    "name", ["megatron_dp_reshardable", "torch_dist_tp2pp2", "legacy_tp2pp2", "legacy_tp2dp2_distopt"]
)
def test_a_real_megatron_run(tmp_path, name):
    if name == "megatron_dp_reshardable":
        at, truth = OWN / name, TRUTH / f"{name}.safetensors"
    elif OUTSIDE is None:
        pytest.skip("WORKBENCH_SAMPLES is not set")
    else:
        at = Path(OUTSIDE) / "megatron" / name
        truth = at / "truth.safetensors"
    params = {k.removeprefix("param."): v for k, v in load_file(truth).items() if k.startswith("param.")}
    found, want = as_hf(wb.open(at)), dense(params, 8, 4, 8, 501)  # 500 given, and Megatron's own end of a document
    assert set(found.ckpt) == set(want)
    assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in want.items())
    assert found.config["architectures"] == ["Qwen2ForCausalLM"] and found.config["vocab_size"] == 501
    assert twins.logits(twins.exported(found, tmp_path / "out")).isfinite().all()


def test_linears_of_paddle_are_turned_round():
    truth = load_file(TRUTH / "paddlenlp_legacy.safetensors")
    found = as_hf(wb.open(OWN / "paddlenlp_legacy"))
    assert len(found.ckpt) == 39
    for key in found.ckpt:
        stored = truth["param." + key.replace("model.", "llama.", 1)]
        turned = key.endswith("_proj.weight") or key == "lm_head.weight"
        assert torch.equal(found.ckpt[key].torch(), stored.T if turned else stored), key
    assert found.config is None and "the checkpoint does not store num_attention_heads" in found.notes[0]


def test_wrappers_are_taken_off():
    truth = load_file(TRUTH / "dcp_fsdp2.safetensors")
    found = as_hf(wb.open(OWN / "dcp_fsdp2"))
    want = {key.removeprefix("model."): value for key, value in truth.items() if key.startswith("model.")}
    assert set(found.ckpt) == set(want) and found.config is None
    assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in want.items())
    assert as_hf(wb.open(OWN / "dcp_fsdp2"), {"model_type": "llama"}).config == {"model_type": "llama"}
    flat = as_hf(wb.open(OWN / "bytecheckpoint_fsdp1_flat"))
    assert "model.layers.0.self_attn.q_proj.weight" in flat.ckpt and "lm_head.weight" in flat.ckpt


def test_names_of_hugging_face_stay():
    ckpt = wb.open(OWN / "hf_llama_tied_fp32")
    found = as_hf(ckpt)
    assert found.ckpt is ckpt and found.notes == ["the names already are Hugging Face's"]
    assert found.config == json.loads((OWN / "hf_llama_tied_fp32/config.json").read_text())


def test_a_rename_reads_no_weight(tmp_path, monkeypatch):
    weights = twins.in_megatron(load_file(twins.twin(tmp_path / "twin", "Llama") / "model.safetensors"))
    run = twins.plain(tmp_path / "m", weights)

    def never(*_: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(SourcePool, "source", never)
    monkeypatch.setattr(SourcePool, "private", never)
    assert len(as_hf(run, SIZES | {"hidden_act": "silu"}).ckpt) == 21


def test_experts_fused_in_memory_are_cut(tmp_path):
    truth = load_file(twins.twin(tmp_path / "twin", "Qwen3Moe") / "model.safetensors")
    fused = {f"model.{key}": value for key, value in truth.items() if ".experts." not in key}
    for n in range(LAYERS):
        at = f"model.layers.{n}.mlp.experts."
        gate, up, down = (
            torch.stack([truth[f"{at}{e}.{side}_proj.weight"] for e in range(EXPERTS)])
            for side in ("gate", "up", "down")
        )
        fused |= {f"model.{at}gate_up_proj": torch.cat([gate, up], 1), f"model.{at}down_proj": down}
    found = as_hf(twins.plain(tmp_path / "fused", fused))
    assert set(found.ckpt) == set(truth)
    assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in truth.items())


# ---- Meta, torchtitan ------------------------------------------------------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As ``convert_llama_weights_to_hf.py`` (transformers) and torchtitan's ``Llama3StateDictAdapter`` have it."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def test_a_run_of_torchtitan_with_a_config(tmp_path):
    truth = load_file(TRUTH / "titan_run/step-4.safetensors")
    run = wb.open(OWN / "titan_run/step-4")
    config = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "hidden_act": "silu"}
    found = as_hf(run, config)
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    for n in range(2):
        for old, new in names.items():
            want = truth[f"layers.{n}.attention.{old}.weight"]
            want = permuted(want, 4) if old in ("wq", "wk") else want
            assert torch.equal(found.ckpt[f"model.layers.{n}.self_attn.{new}.weight"].torch(), want)
        assert torch.equal(
            found.ckpt[f"model.layers.{n}.mlp.up_proj.weight"].torch(), truth[f"layers.{n}.feed_forward.w3.weight"]
        )
    assert found.config["architectures"] == ["LlamaForCausalLM"] and found.config["hidden_size"] == 32
    assert twins.logits(twins.exported(found, tmp_path / "out")).isfinite().all()


@examples(40, 400)
@given(st.data())
def test_rotary_pairs_are_permuted_as_transformers_does(tmp_path_factory, data):
    groups, each, half = (data.draw(st.integers(1, 4)) for _ in range(3))
    heads, rows, width = groups * each, 2 * half, data.draw(st.integers(1, 5))
    weights = {
        "tok_embeddings.weight": torch.randn(9, width),
        "norm.weight": torch.randn(width),
        "layers.0.attention.wq.weight": torch.randn(heads * rows, width),
        "layers.0.attention.wk.weight": torch.randn(groups * rows, width),
        "rope.freqs": torch.randn(half),  # what a head's rows are told from
    }
    folder = tmp_path_factory.mktemp("meta")
    save_file(weights, folder / "consolidated.safetensors")
    found = as_hf(wb.open(folder))
    q, k = (found.ckpt[f"model.layers.0.self_attn.{side}_proj.weight"].torch() for side in "qk")
    assert torch.equal(q, permuted(weights["layers.0.attention.wq.weight"], heads))
    assert torch.equal(k, permuted(weights["layers.0.attention.wk.weight"], groups))
    assert "rope.freqs" in found.left

    # and what the order is for: scores are the same, each with its own rotary embedding
    x, angles = torch.randn(3, width), torch.outer(torch.arange(3.0), torch.rand(half))
    turned = torch.polar(torch.ones_like(angles), angles)
    pairs = [(x @ weights[f"layers.0.attention.w{side}.weight"].T).view(3, -1, half, 2) for side in "qk"]
    theirs = [torch.view_as_real(torch.view_as_complex(y) * turned[:, None]).flatten(2) for y in pairs]
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    flat = [(x @ w.T).view(3, -1, rows) for w in (q, k)]
    ours = [y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin for y in flat]
    scores = [torch.einsum("ihd,jhd->hij", a, b.repeat_interleave(each, 1)) for a, b in (theirs, ours)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_meta_with_its_params(tmp_path):
    hf = twins.twin(tmp_path / "twin", "Llama")
    truth = load_file(hf / "model.safetensors")
    back = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "embed_tokens": "tok_embeddings",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    made = {}
    for key, value in truth.items():
        name = key.removeprefix("model.")
        for ours, theirs in back.items():
            name = name.replace(ours + ".", theirs + ".")
        if name.endswith(("wq.weight", "wk.weight")):  # the other way round
            heads = value.shape[0] // ROWS
            value = value.view(heads, 2, ROWS // 2, HIDDEN).transpose(1, 2).reshape(value.shape)
        made[name] = value.contiguous()
    folder = tmp_path / "meta"
    folder.mkdir()
    save_file(made, folder / "consolidated.safetensors")
    params = {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": GROUPS, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps(params | {"rope_theta": 50_000.0, "vocab_size": -1}))
    found = as_hf(wb.open(folder))
    assert all(torch.equal(found.ckpt[key].torch(), value) for key, value in truth.items())
    assert found.config is None and found.notes == [
        "no config.json: the checkpoint does not store max_position_embeddings, hidden_act"
    ]


def test_an_export_for_hugging_face_has_its_config(tmp_path):
    """``rename="hf"`` from the command line to transformers, from a run that stores no Hugging Face file at all."""
    from transformers import AutoModelForCausalLM

    source = Path(__file__).parents[1] / "sample_ckpts" / "megatron_dp_reshardable"
    with wb.open(source) as ckpt:
        report = wb.export(ckpt, tmp_path / "out", rename="hf")
    assert report.identical and "config.json" in [file.name for file in report.files]
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
