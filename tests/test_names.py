"""What names mean, against tables written by hand from the architectures and the trainers' own naming."""

from __future__ import annotations

import shutil

import pandas as pd
import pytest
import torch
import torch.distributed.checkpoint as dcp

import workbench as wb
from workbench.doctor.facts.gather import gather
from workbench.names.steps import parse_name, step_of
from workbench.names.weights import kinds, parse, tied_pairs

QKV, KV, MLP, LATENT = ("q", "k", "v"), ("k", "v"), ("gate", "up"), ("kv_a", "k_rope")

#: Name, stack, layer, expert, kind, leaf; and parts, where a weight fuses several.
WEIGHTS = [
    # Llama
    ("model.embed_tokens.weight", "", None, None, "embed", "weight"),
    ("model.layers.0.self_attn.q_proj.weight", "model.layers", 0, None, "q", "weight"),
    ("model.layers.0.self_attn.k_proj.weight", "model.layers", 0, None, "k", "weight"),
    ("model.layers.0.self_attn.v_proj.weight", "model.layers", 0, None, "v", "weight"),
    ("model.layers.31.self_attn.o_proj.weight", "model.layers", 31, None, "o", "weight"),
    ("model.layers.31.mlp.gate_proj.weight", "model.layers", 31, None, "gate", "weight"),
    ("model.layers.31.mlp.up_proj.weight", "model.layers", 31, None, "up", "weight"),
    ("model.layers.31.mlp.down_proj.weight", "model.layers", 31, None, "down", "weight"),
    ("model.layers.31.input_layernorm.weight", "model.layers", 31, None, "norm", "weight"),
    ("model.layers.31.post_attention_layernorm.weight", "model.layers", 31, None, "norm", "weight"),
    ("model.norm.weight", "", None, None, "norm", "weight"),
    ("lm_head.weight", "", None, None, "head", "weight"),
    ("model.layers.4.self_attn.rotary_emb.inv_freq", "model.layers", 4, None, "rotary", "inv_freq"),
    # Qwen 2 and 3
    ("model.layers.5.self_attn.q_proj.bias", "model.layers", 5, None, "q", "bias"),
    ("model.layers.5.self_attn.q_norm.weight", "model.layers", 5, None, "norm", "weight"),
    ("model.layers.5.self_attn.k_norm.weight", "model.layers", 5, None, "norm", "weight"),
    ("model.layers.5.mlp.gate.weight", "model.layers", 5, None, "router", "weight"),
    ("model.layers.5.mlp.experts.127.gate_proj.weight", "model.layers", 5, 127, "gate", "weight"),
    ("model.layers.5.mlp.experts.gate_up_proj", "model.layers", 5, None, "gate_up", "", MLP),
    ("model.layers.5.mlp.experts.down_proj", "model.layers", 5, None, "down", ""),
    ("model.layers.5.mlp.shared_expert.down_proj.weight", "model.layers", 5, None, "down", "weight"),
    ("model.layers.5.mlp.shared_expert_gate.weight", "model.layers", 5, None, "shared_gate", "weight"),
    ("model.layers.5.linear_attn.in_proj_qkvz.weight", "model.layers", 5, None, "ssm_in", "weight"),
    ("model.layers.5.linear_attn.out_proj.weight", "model.layers", 5, None, "ssm_out", "weight"),
    ("model.layers.5.linear_attn.conv1d.weight", "model.layers", 5, None, "conv", "weight"),
    ("visual.blocks.7.attn.qkv.bias", "visual.blocks", 7, None, "qkv", "bias", QKV),
    ("visual.blocks.7.attn.proj.weight", "visual.blocks", 7, None, "o", "weight"),
    ("visual.patch_embed.proj.weight", "", None, None, "patch", "weight"),
    # Gemma 2 and 3
    ("model.layers.9.pre_feedforward_layernorm.weight", "model.layers", 9, None, "norm", "weight"),
    ("model.layers.9.post_feedforward_layernorm.weight", "model.layers", 9, None, "norm", "weight"),
    ("language_model.model.layers.9.self_attn.o_proj.weight", "language_model.model.layers", 9, None, "o", "weight"),
    ("vision_tower.vision_model.encoder.layers.2.self_attn.out_proj.weight",
     "vision_tower.vision_model.encoder.layers", 2, None, "o", "weight"),
    ("vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight",
     "vision_tower.vision_model.encoder.layers", 2, None, "up", "weight"),
    ("vision_tower.vision_model.embeddings.patch_embedding.weight", "", None, None, "patch", "weight"),
    ("vision_tower.vision_model.embeddings.position_embedding.weight", "", None, None, "position", "weight"),
    # Mixtral
    ("model.layers.3.block_sparse_moe.gate.weight", "model.layers", 3, None, "router", "weight"),
    ("model.layers.3.block_sparse_moe.experts.5.w1.weight", "model.layers", 3, 5, "gate", "weight"),
    ("model.layers.3.block_sparse_moe.experts.5.w2.weight", "model.layers", 3, 5, "down", "weight"),
    ("model.layers.3.block_sparse_moe.experts.5.w3.weight", "model.layers", 3, 5, "up", "weight"),
    # DeepSeek V3, in transformers and in its own code
    ("model.layers.3.self_attn.q_a_proj.weight", "model.layers", 3, None, "q_a", "weight"),
    ("model.layers.3.self_attn.q_a_layernorm.weight", "model.layers", 3, None, "norm", "weight"),
    ("model.layers.3.self_attn.q_b_proj.weight", "model.layers", 3, None, "q_b", "weight"),
    ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers", 3, None, "kv_a", "weight", LATENT),
    ("model.layers.3.self_attn.kv_a_layernorm.weight", "model.layers", 3, None, "norm", "weight"),
    ("model.layers.3.self_attn.kv_b_proj.weight", "model.layers", 3, None, "kv_b", "weight", KV),
    ("model.layers.3.mlp.gate.e_score_correction_bias", "model.layers", 3, None, "router", "e_score_correction_bias"),
    ("model.layers.3.mlp.experts.255.up_proj.weight", "model.layers", 3, 255, "up", "weight"),
    ("model.layers.3.mlp.experts.255.up_proj.weight_scale_inv", "model.layers", 3, 255, "up", "weight_scale_inv"),
    ("model.layers.3.mlp.shared_experts.gate_proj.weight", "model.layers", 3, None, "gate", "weight"),
    ("model.layers.61.eh_proj.weight", "model.layers", 61, None, "mtp_proj", "weight"),
    ("model.layers.61.enorm.weight", "model.layers", 61, None, "norm", "weight"),
    ("model.layers.61.embed_tokens.weight", "model.layers", 61, None, "embed", "weight"),
    ("layers.3.attn.wq_a.weight", "layers", 3, None, "q_a", "weight"),
    ("layers.3.attn.wq_b.weight", "layers", 3, None, "q_b", "weight"),
    ("layers.3.attn.wkv_a.weight", "layers", 3, None, "kv_a", "weight", LATENT),
    ("layers.3.attn.wkv_b.weight", "layers", 3, None, "kv_b", "weight", KV),
    ("layers.3.ffn.gate.weight", "layers", 3, None, "router", "weight"),
    ("layers.3.ffn.experts.9.w3.weight", "layers", 3, 9, "up", "weight"),
    ("layers.3.ffn.shared_experts.w2.weight", "layers", 3, None, "down", "weight"),
    ("head.weight", "", None, None, "head", "weight"),
    ("embed.weight", "", None, None, "embed", "weight"),
    # GPT-2
    ("transformer.wte.weight", "", None, None, "embed", "weight"),
    ("transformer.wpe.weight", "", None, None, "position", "weight"),
    ("transformer.h.11.ln_1.weight", "transformer.h", 11, None, "norm", "weight"),
    ("transformer.h.11.attn.c_attn.weight", "transformer.h", 11, None, "qkv", "weight", QKV),
    ("transformer.h.11.attn.c_proj.weight", "transformer.h", 11, None, "o", "weight"),
    ("transformer.h.11.mlp.c_fc.bias", "transformer.h", 11, None, "up", "bias"),
    ("transformer.h.11.mlp.c_proj.weight", "transformer.h", 11, None, "down", "weight"),
    ("transformer.h.11.crossattention.c_attn.weight", "transformer.h", 11, None, "kv", "weight", KV),
    ("transformer.h.11.crossattention.q_attn.weight", "transformer.h", 11, None, "q", "weight"),
    ("transformer.ln_f.bias", "", None, None, "norm", "bias"),
    # GPT-NeoX
    ("gpt_neox.embed_in.weight", "", None, None, "embed", "weight"),
    ("gpt_neox.layers.2.attention.query_key_value.weight", "gpt_neox.layers", 2, None, "qkv", "weight", QKV),
    ("gpt_neox.layers.2.attention.dense.weight", "gpt_neox.layers", 2, None, "o", "weight"),
    ("gpt_neox.layers.2.mlp.dense_h_to_4h.weight", "gpt_neox.layers", 2, None, "fc1", "weight", MLP),
    ("gpt_neox.layers.2.mlp.dense_4h_to_h.bias", "gpt_neox.layers", 2, None, "down", "bias"),
    ("gpt_neox.final_layer_norm.weight", "", None, None, "norm", "weight"),
    ("embed_out.weight", "", None, None, "head", "weight"),
    # Falcon, BLOOM
    ("transformer.word_embeddings.weight", "", None, None, "embed", "weight"),
    ("transformer.word_embeddings_layernorm.weight", "", None, None, "norm", "weight"),
    ("transformer.h.2.self_attention.query_key_value.weight", "transformer.h", 2, None, "qkv", "weight", QKV),
    ("transformer.h.2.self_attention.dense.weight", "transformer.h", 2, None, "o", "weight"),
    ("transformer.h.2.ln_attn.weight", "transformer.h", 2, None, "norm", "weight"),
    # Phi 2 and 3, GPT-J, OPT, MPT, Baichuan
    ("model.layers.2.self_attn.dense.weight", "model.layers", 2, None, "o", "weight"),
    ("model.layers.2.mlp.fc2.weight", "model.layers", 2, None, "down", "weight"),
    ("model.layers.2.self_attn.qkv_proj.weight", "model.layers", 2, None, "qkv", "weight", QKV),
    ("model.layers.2.mlp.gate_up_proj.weight", "model.layers", 2, None, "gate_up", "weight", MLP),
    ("transformer.h.2.attn.out_proj.weight", "transformer.h", 2, None, "o", "weight"),
    ("transformer.h.2.mlp.fc_in.weight", "transformer.h", 2, None, "up", "weight"),
    ("transformer.h.2.mlp.fc_out.weight", "transformer.h", 2, None, "down", "weight"),
    ("model.decoder.layers.2.fc1.bias", "model.decoder.layers", 2, None, "up", "bias"),
    ("model.decoder.embed_positions.weight", "", None, None, "position", "weight"),
    ("transformer.blocks.2.attn.Wqkv.weight", "transformer.blocks", 2, None, "qkv", "weight", QKV),
    ("transformer.blocks.2.norm_1.weight", "transformer.blocks", 2, None, "norm", "weight"),
    ("model.layers.2.self_attn.W_pack.weight", "model.layers", 2, None, "qkv", "weight", QKV),
    # OLMo, as first released: x, gate = ff_proj(x).chunk(2)
    ("model.transformer.blocks.2.att_proj.weight", "model.transformer.blocks", 2, None, "qkv", "weight", QKV),
    ("model.transformer.blocks.2.attn_out.weight", "model.transformer.blocks", 2, None, "o", "weight"),
    ("model.transformer.blocks.2.ff_proj.weight", "model.transformer.blocks", 2, None, "gate_up", "weight",
     ("up", "gate")),
    ("model.transformer.blocks.2.ff_out.weight", "model.transformer.blocks", 2, None, "down", "weight"),
    ("model.transformer.ff_out.weight", "", None, None, "head", "weight"),
    # T5
    ("shared.weight", "", None, None, "embed", "weight"),
    ("encoder.block.2.layer.0.SelfAttention.q.weight", "encoder.block", 2, None, "q", "weight"),
    ("encoder.block.2.layer.0.SelfAttention.o.weight", "encoder.block", 2, None, "o", "weight"),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "encoder.block", 0, None, "relative_bias",
     "weight"),
    ("encoder.block.2.layer.0.layer_norm.weight", "encoder.block", 2, None, "norm", "weight"),
    ("encoder.block.2.layer.1.DenseReluDense.wi.weight", "encoder.block", 2, None, "up", "weight"),
    ("decoder.block.2.layer.1.EncDecAttention.k.weight", "decoder.block", 2, None, "k", "weight"),
    ("decoder.block.2.layer.2.DenseReluDense.wi_0.weight", "decoder.block", 2, None, "gate", "weight"),
    ("decoder.block.2.layer.2.DenseReluDense.wi_1.weight", "decoder.block", 2, None, "up", "weight"),
    ("decoder.block.2.layer.2.DenseReluDense.wo.weight", "decoder.block", 2, None, "down", "weight"),
    # BERT, DistilBERT
    ("bert.embeddings.word_embeddings.weight", "", None, None, "embed", "weight"),
    ("bert.embeddings.position_embeddings.weight", "", None, None, "position", "weight"),
    ("bert.embeddings.token_type_embeddings.weight", "", None, None, "token_type", "weight"),
    ("bert.embeddings.LayerNorm.weight", "", None, None, "norm", "weight"),
    ("bert.encoder.layer.1.attention.self.query.weight", "bert.encoder.layer", 1, None, "q", "weight"),
    ("bert.encoder.layer.1.attention.self.value.bias", "bert.encoder.layer", 1, None, "v", "bias"),
    ("bert.encoder.layer.1.attention.output.dense.weight", "bert.encoder.layer", 1, None, "o", "weight"),
    ("bert.encoder.layer.1.attention.output.LayerNorm.weight", "bert.encoder.layer", 1, None, "norm", "weight"),
    ("bert.encoder.layer.1.intermediate.dense.weight", "bert.encoder.layer", 1, None, "up", "weight"),
    ("bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer", 1, None, "down", "weight"),
    ("bert.pooler.dense.weight", "", None, None, "pooler", "weight"),
    ("cls.predictions.decoder.weight", "", None, None, "head", "weight"),
    ("classifier.weight", "", None, None, "classifier", "weight"),
    ("distilbert.transformer.layer.1.attention.q_lin.weight", "distilbert.transformer.layer", 1, None, "q", "weight"),
    ("distilbert.transformer.layer.1.ffn.lin2.weight", "distilbert.transformer.layer", 1, None, "down", "weight"),
    # ViT and Swin in timm, CLIP in open_clip
    ("cls_token", "", None, None, "token", ""),
    ("pos_embed", "", None, None, "position", ""),
    ("patch_embed.proj.bias", "", None, None, "patch", "bias"),
    ("blocks.0.attn.qkv.weight", "blocks", 0, None, "qkv", "weight", QKV),
    ("blocks.0.attn.proj.weight", "blocks", 0, None, "o", "weight"),
    ("blocks.0.mlp.fc1.weight", "blocks", 0, None, "up", "weight"),
    ("blocks.0.mlp.fc2.bias", "blocks", 0, None, "down", "bias"),
    ("blocks.0.ls1.gamma", "blocks", 0, None, "layer_scale", "gamma"),
    ("layers.1.blocks.3.attn.relative_position_bias_table", "layers.1.blocks", 3, None, "relative_bias", ""),
    ("visual.transformer.resblocks.3.attn.in_proj_weight", "visual.transformer.resblocks", 3, None, "qkv", "weight",
     QKV),
    ("visual.transformer.resblocks.3.mlp.c_fc.weight", "visual.transformer.resblocks", 3, None, "up", "weight"),
    # Mamba, Jamba
    ("backbone.embedding.weight", "", None, None, "embed", "weight"),
    ("backbone.layers.8.mixer.in_proj.weight", "backbone.layers", 8, None, "ssm_in", "weight"),
    ("backbone.layers.8.mixer.x_proj.weight", "backbone.layers", 8, None, "ssm_x", "weight"),
    ("backbone.layers.8.mixer.dt_proj.bias", "backbone.layers", 8, None, "ssm_dt", "bias"),
    ("backbone.layers.8.mixer.conv1d.weight", "backbone.layers", 8, None, "conv", "weight"),
    ("backbone.layers.8.mixer.A_log", "backbone.layers", 8, None, "ssm_a", ""),
    ("backbone.layers.8.mixer.D", "backbone.layers", 8, None, "ssm_d", ""),
    ("backbone.layers.8.mixer.out_proj.weight", "backbone.layers", 8, None, "ssm_out", "weight"),
    ("backbone.norm_f.weight", "", None, None, "norm", "weight"),
    ("model.layers.8.mamba.in_proj.weight", "model.layers", 8, None, "ssm_in", "weight"),
    ("model.layers.8.feed_forward.router.weight", "model.layers", 8, None, "router", "weight"),
    # Megatron
    ("embedding.word_embeddings.weight", "", None, None, "embed", "weight"),
    ("embedding.position_embeddings.weight", "", None, None, "position", "weight"),
    ("decoder.layers.3.self_attention.linear_qkv.weight", "decoder.layers", 3, None, "qkv", "weight", QKV),
    ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers", 3, None, "norm", "weight"),
    ("decoder.layers.3.self_attention.linear_proj.weight", "decoder.layers", 3, None, "o", "weight"),
    ("decoder.layers.3.self_attention.linear_kv_up_proj.weight", "decoder.layers", 3, None, "kv_b", "weight", KV),
    ("decoder.layers.3.self_attention.linear_q_down_proj.weight", "decoder.layers", 3, None, "q_a", "weight"),
    ("decoder.layers.3.cross_attention.linear_kv.weight", "decoder.layers", 3, None, "kv", "weight", KV),
    ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers", 3, None, "fc1", "weight", MLP),
    ("decoder.layers.3.mlp.linear_fc2.bias", "decoder.layers", 3, None, "down", "bias"),
    ("decoder.layers.3.mlp.linear_fc1._extra_state", "decoder.layers", 3, None, "fc1", "_extra_state", MLP),
    ("decoder.layers.3.mlp.router.weight", "decoder.layers", 3, None, "router", "weight"),
    ("decoder.layers.3.mlp.router.expert_bias", "decoder.layers", 3, None, "router", "expert_bias"),
    ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight", "decoder.layers", 3, 7, "down", "weight"),
    ("decoder.layers.3.mlp.experts.linear_fc1.weight12", "decoder.layers", 3, 12, "fc1", "weight", MLP),
    ("decoder.layers.3.mlp.experts.experts.linear_fc2.weight", "decoder.layers", 3, None, "down", "weight"),
    ("decoder.layers.3.mlp.shared_experts.linear_fc2.weight", "decoder.layers", 3, None, "down", "weight"),
    ("decoder.layers.3.mlp.shared_experts.gate_weight", "decoder.layers", 3, None, "shared_gate", "weight"),
    ("decoder.final_layernorm.weight", "", None, None, "norm", "weight"),
    ("output_layer.weight", "", None, None, "head", "weight"),
    ("language_model.encoder.layers.3.attention.query_key_value.weight", "language_model.encoder.layers", 3, None,
     "qkv", "weight", QKV),
    # torchtitan, Meta
    ("tok_embeddings.weight", "", None, None, "embed", "weight"),
    ("layers.3.attention.wq.weight", "layers", 3, None, "q", "weight"),
    ("layers.3.attention.wo.weight", "layers", 3, None, "o", "weight"),
    ("layers.3.attention_norm.weight", "layers", 3, None, "norm", "weight"),
    ("layers.3.feed_forward.w1.weight", "layers", 3, None, "gate", "weight"),
    ("layers.3.feed_forward.w13.weight", "layers", 3, None, "gate_up", "weight", MLP),
    ("layers.3.moe.router.gate.weight", "layers", 3, None, "router", "weight"),
    ("layers.3.moe.experts.w2", "layers", 3, None, "down", ""),
    ("output.weight", "", None, None, "head", "weight"),
    # PaddleNLP
    ("llama.layers.3.self_attn.qkv_proj.weight", "llama.layers", 3, None, "qkv", "weight", QKV),
    ("llama.layers.3.mlp.gate_up_fused_proj.weight", "llama.layers", 3, None, "gate_up", "weight", MLP),
    ("ernie.gpt_layers.3.self_attn.o_proj.weight", "ernie.gpt_layers", 3, None, "o", "weight"),
    # DeepSpeed, adapters, quantised weights, gpt-oss, MoE elsewhere
    ("model.layers.3.mlp.deepspeed_moe.experts.deepspeed_experts.2.down_proj.weight", "model.layers", 3, 2, "down",
     "weight"),
    ("base_model.model.model.layers.3.self_attn.v_proj.lora_A.default.weight", "base_model.model.model.layers", 3, None,
     "v", "lora_A"),
    ("base_model.model.model.layers.3.mlp.up_proj.lora_B.weight", "base_model.model.model.layers", 3, None, "up",
     "lora_B"),
    ("base_model.model.model.layers.3.mlp.up_proj.base_layer.weight", "base_model.model.model.layers", 3, None, "up",
     "weight"),
    ("model.layers.3.mlp.down_proj.qweight", "model.layers", 3, None, "down", "qweight"),
    ("model.layers.3.mlp.down_proj.input_scale", "model.layers", 3, None, "down", "input_scale"),
    ("model.layers.3.mlp.experts.gate_up_proj_blocks", "model.layers", 3, None, "gate_up", "blocks", MLP),
    ("model.layers.3.mlp.experts.down_proj_bias", "model.layers", 3, None, "down", "bias"),
    ("model.layers.3.self_attn.sinks", "model.layers", 3, None, "sink", ""),
    ("model.layers.3.mlp.router.bias", "model.layers", 3, None, "router", "bias"),
    ("transformer.blocks.3.ffn.router.layer.weight", "transformer.blocks", 3, None, "router", "weight"),
    ("model.layers.3.mlp.gate.wg.weight", "model.layers", 3, None, "router", "weight"),
    # what no table knows
    ("something.else", "", None, None, "other", ""),
    ("net.0.weight", "", None, None, "other", "weight"),
]  # fmt: skip


@pytest.mark.parametrize("row", WEIGHTS, ids=[row[0] for row in WEIGHTS])
def test_a_weight_is_what_its_architecture_says(row):
    name, stack, layer, expert, kind, leaf, *parts = row
    found = parse(name)
    assert (found.stack, found.layer, found.expert, found.kind, found.leaf) == (stack, layer, expert, kind, leaf)
    assert found.parts == (parts[0] if parts else (kind,))
    assert found.routed == ("experts." in name and "shared_experts" not in name)


def test_the_table_of_weights_is_long_and_has_no_name_twice():
    assert len({row[0] for row in WEIGHTS}) == len(WEIGHTS) >= 120


def test_a_name_without_its_numbers_and_the_owner_of_a_weight():
    one, two = (parse(f"model.layers.{n}.mlp.experts.{n + 4}.w1.weight") for n in (1, 2))
    assert one.pattern == two.pattern == "model.layers.*.mlp.experts.*.w1.weight"
    assert one.owner == parse("model.layers.1.mlp.experts.5.w3.weight").owner != two.owner
    assert (one.module, one.name, one.inside) == ("mlp.experts.*.w1", "w1", "mlp.experts.*.w1.weight")
    assert parse("a.self_attention.linear_qkv.weight").grouped and not parse("a.attn.qkv.weight").grouped
    assert kinds(["layers.0.mlp.linear_fc1.weight", "lm_head.weight"]) == {"gate", "up", "head"}


@pytest.mark.parametrize("part", ["layers.", "experts.", "norm", "att.output", "a.", "weight_"])
def test_a_name_of_a_megabyte_is_no_models(part):
    assert parse(part * (1_000_000 // len(part))).kind == "other"


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (("model.embed_tokens.weight", "lm_head.weight"), 1),
        (("model.model.embed_tokens.weight", "model.lm_head.weight"), 1),
        (("embedding.word_embeddings.weight", "output_layer.weight"), 1),
        (("transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"), 1),
        (("policy.model.embed_tokens.weight", "critic.lm_head.weight"), 0),
        (("model.embed_tokens.weight", "model.layers.61.embed_tokens.weight", "lm_head.weight", "lm_head.bias"), 1),
    ],
)
def test_the_ends_that_a_model_ties(names, pairs):
    assert len(tied_pairs(names)) == pairs


# ---- steps -----------------------------------------------------------------------------------------------------------

STEPS = {
    "step-100": 100, "step_00000100": 100, "step100": 100, "step=100": 100, "step-100.pt": 100, "Step-7": 7,
    "step100-ema": 100, "train_step_100": 100, "model_step_100.safetensors": 100, "steps_100": 100,
    "iteration_100": 100, "iter_0000100": 100, "iter_0000100.pt": 100, "iter-000100-ckpt.pth": 100, "iter_100.pth": 100,
    "globalstep7": 7, "global_step100": 100, "global_step_100": 100, "global_step100_hf": 100,
    "epoch=3-step=100.ckpt": 100, "epoch=3-step=100-v1.ckpt": 100, "epoch=3-step=100-last.ckpt": 100,
    "megatron_gpt--val_loss=5.00-step=100-consumed_samples=800.0.ckpt": 100, "ep0-ba100-rank0.pt": 100,
    "stage1-step1000-tokens5B": 1000, "step143000": 143000, "checkpoint-3-step-100": 100, "step-100-checkpoint-3": 100,
    "checkpoint-100": 100, "checkpoint_100": 100, "checkpoint_0": 0, "ckpt_100.pt": 100, "llama-ckpt-7.pt": 7,
    "model.ckpt-100": 100, "checkpoint_1_5000.pt": 5000, "checkpoint-100-best": 100,
    "epoch_2": 2, "epoch=3.ckpt": 3, "100": 100, "0000100": 100,
    # nothing that counts: parts, sizes, dates, versions, ranks, words that end alike
    "model": None, "final": None, "release": None, "latest": None, "v2": None, "step-": None, "footstep-3": None,
    "timestep_100": None, "rng_state_0.pth": None, "mp_rank_00": None, "ckpt-00001-of-00004.bin": None,
    "llama-ckpt-7b": None, "step-50K-105b": None, "ckpt_20240131_120000.pt": None, "ckpt_2024-01-31": None,
    "20240131": None, "0.pt": None, "llama-2-7": None, "global_step" + "9" * 30: None, "9" * 13: None,
}  # fmt: skip


#: Files that discover does not list: a part, a trainer's file beside one, and one that makes its folder a checkpoint.
UNLISTED = ("rng_state_0.pth", "ckpt-00001-of-00004.bin", "model_step_100.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One checkpoint that stores no step, as DCP's folder and as a file."""
    root = tmp_path_factory.mktemp("made")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root / "folder", no_dist=True)
    torch.save({"w": torch.ones(3)}, root / "file.pt")
    return root


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_a_name_has_one_step(name, step):
    assert step_of(name) == step


@pytest.mark.parametrize(("name", "step"), [row for row in STEPS.items() if row[0] not in UNLISTED])
def test_discover_an_open_checkpoint_and_the_doctor_agree_on_it(made, tmp_path, name, step):
    place = tmp_path / name
    if place.suffix in (".pt", ".pth", ".ckpt"):
        shutil.copy(made / "file.pt", place)
    else:
        shutil.copytree(made / "folder", place)
    found = wb.discover(tmp_path)
    ckpt = wb.open(place, cache=False)
    assert found["path"].tolist() == [name]
    assert [None if pd.isna(one) else int(one) for one in found["step"]] == [ckpt.step] == [step]
    named = parse_name(name)
    assert gather(ckpt).step == (None if named and named.unit == "epoch" else step)  # the doctor counts updates


def test_the_table_of_steps_is_long():
    assert len(STEPS) >= 40


def test_what_a_name_counts():
    assert [parse_name(n).unit for n in ("iter_7", "ckpt-7", "epoch-7", "7")] == [
        "step",
        "save",
        "epoch",
        "number",
    ]
    assert step_of("step-5/epoch") == step_of("step-5/hf/model.safetensors") == 5
    assert step_of("runs/100") == 100 and step_of("2024/model.pt") is None
