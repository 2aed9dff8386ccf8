"""Tiny models of transformers, and the same weights as Megatron holds them, by dense cutting."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from megatron_files import STATES, Model
from safetensors.torch import save_file

import workbench as wb
from workbench.checkpoint import Checkpoint
from workbench.export.export import export
from workbench.export.hf.convert import Renamed

LAYERS, HIDDEN, INNER, HEADS, GROUPS, ROWS, VOCAB, PAD, EXPERTS = 2, 32, 24, 4, 2, 8, 41, 7, 4

#: What Megatron-LM stores of a model like Llama, with the names of megatron-core 0.16.1's arguments.
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": INNER,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "group_query_attention": True,
    "kv_channels": ROWS,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "rotary_base": 50_000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "padded_vocab_size": VOCAB + PAD,
    "untie_embeddings_and_output_weights": True,
    "use_rope_scaling": False,
    "apply_layernorm_1p": False,
    "window_size": None,
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": ROWS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROUTED = {"num_experts": EXPERTS, "moe_router_topk": 2, "moe_router_pre_softmax": False}
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "decoder_sparse_step": 1}
SHARED = {"shared_expert_intermediate_size": 16, "norm_topk_prob": False}
#: architecture → its config beyond SIZES, Megatron's args beyond ARGS
CLASSES = {
    "Llama": ({}, {}),
    "Llama tied, scaled": (
        {
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"untie_embeddings_and_output_weights": False, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    ),
    "Llama biased": ({"attention_bias": True, "mlp_bias": True}, {}),
    "Qwen2": ({}, {}),
    "Qwen3": ({}, {}),
    "Mixtral": ({"num_local_experts": EXPERTS, "num_experts_per_tok": 2}, ROUTED),
    "Qwen3Moe": (MOE | {"norm_topk_prob": True}, ROUTED),
    "Qwen2Moe": (MOE | SHARED, ROUTED | {"moe_router_pre_softmax": True}),
}


def twin(folder: Path, name: str) -> Path:
    """A random model as ``save_pretrained`` writes it."""
    kind = name.split()[0]
    config = getattr(transformers, f"{kind}Config")(**SIZES | CLASSES[name][0])
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    return folder


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows by query group: ``[q … q k v]`` (megatron-core's ``transformer/attention.py``)."""
    parts = [side.reshape(GROUPS, -1, *side.shape[1:]) for side in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def in_megatron(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's weights as megatron-core names and fuses them, by dense cutting."""
    pad = torch.full((PAD, HIDDEN), 9.0, dtype=torch.bfloat16)
    found = {"embedding.word_embeddings.weight": torch.cat([hf["model.embed_tokens.weight"], pad])}
    for n in range(LAYERS):
        p, m = f"model.layers.{n}.", f"decoder.layers.{n}."
        a = m + "self_attention."
        found[m + "input_layernorm.weight"] = hf[p + "input_layernorm.weight"]
        for leaf in ("weight", "bias"):
            if p + f"self_attn.o_proj.{leaf}" in hf:
                found[a + f"linear_proj.{leaf}"] = hf[p + f"self_attn.o_proj.{leaf}"]
            if p + f"self_attn.q_proj.{leaf}" in hf:
                found[a + f"linear_qkv.{leaf}"] = grouped(*(hf[p + f"self_attn.{s}_proj.{leaf}"] for s in "qkv"))
        for side in "qk":
            if p + f"self_attn.{side}_norm.weight" in hf:
                found[a + f"{side}_layernorm.weight"] = hf[p + f"self_attn.{side}_norm.weight"]
        found[m + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"]
        moe = p + ("block_sparse_moe." if p + "block_sparse_moe.gate.weight" in hf else "mlp.")
        if moe + "gate.weight" in hf:
            found[m + "mlp.router.weight"] = hf[moe + "gate.weight"]
        for e in range(EXPERTS if moe + "gate.weight" in hf else 0):
            names = ("w1", "w3", "w2") if "sparse" in moe else ("gate_proj", "up_proj", "down_proj")
            w1, w3, w2 = (hf[f"{moe}experts.{e}.{w}.weight"] for w in names)
            found[m + f"mlp.experts.local_experts.{e}.linear_fc1.weight"] = torch.cat([w1, w3])
            found[m + f"mlp.experts.local_experts.{e}.linear_fc2.weight"] = w2
        for hf_name, name in (("mlp.", "mlp."), ("mlp.shared_expert.", "mlp.shared_experts.")):
            for leaf in ("weight", "bias"):
                if p + f"{hf_name}up_proj.{leaf}" in hf:
                    sides = [hf[p + f"{hf_name}{side}_proj.{leaf}"] for side in ("gate", "up")]
                    found[m + f"{name}linear_fc1.{leaf}"] = torch.cat(sides)
                    found[m + f"{name}linear_fc2.{leaf}"] = hf[p + f"{hf_name}down_proj.{leaf}"]
        if p + "mlp.shared_expert_gate.weight" in hf:
            found[m + "mlp.shared_experts.gate_weight"] = hf[p + "mlp.shared_expert_gate.weight"]
    found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if "lm_head.weight" in hf:
        found["output_layer.weight"] = torch.cat([hf["lm_head.weight"], pad])
    return found


def megatron(weights: dict[str, torch.Tensor]) -> Model:
    experts = EXPERTS if any(".experts." in name for name in weights) else 0
    made = Model(layers=LAYERS, hidden=HIDDEN, experts=experts, tied="output_layer.weight" not in weights)
    made.params, made.states = weights, {n: {s: w.float() for s in STATES} for n, w in weights.items()}
    return made


def exported(renamed: Renamed, folder: Path) -> Path:
    """The folder that an export makes: tensors by the export itself, ``config.json`` as told."""
    export(renamed.ckpt, folder)
    (folder / "config.json").write_text(json.dumps(renamed.config))
    return folder


def logits(folder: Path) -> torch.Tensor:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.no_grad():
        return model.eval()(torch.arange(12)[None] % VOCAB).logits


def plain(folder: Path, weights: dict[str, torch.Tensor]) -> Checkpoint:
    """A file of nothing but weights."""
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return wb.open(folder)
