"""The transformers class of a set of weights, proved by their names and shapes, and that class's ``config.json``.

::

    o_proj.bias  q_proj.bias  q_norm  experts  shared_expert        class
        –            –           –       –          –               LlamaForCausalLM
       yes          yes          –       –          –               LlamaForCausalLM, attention_bias
        –           yes          –       –          –               Qwen2ForCausalLM
      both or none              yes      –          –               Qwen3ForCausalLM
        –            –           –      yes         –               MixtralForCausalLM
        –           yes          –      yes        yes              Qwen2MoeForCausalLM
      both or none              yes     yes         –               Qwen3MoeForCausalLM

A config is made only of stored facts, and only if exactly the weights of the class exist, each in its shape.
Source: transformers 5.23; the fields are those that 4.x reads too (``torch_dtype``, ``rope_theta`` at the top).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.export.hf.facts import ModelFacts

Shapes = Mapping[str, tuple[int, ...]]
_REQUIRED = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)
_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def is_mixtral(atoms: set[str]) -> bool:
    """Return whether experts are named as in Mixtral, rather than as in Qwen."""
    return _class(atoms)[0] == "MixtralForCausalLM"


def misfit(shapes: Shapes) -> str | None:
    """Explain what is wrong with the shapes of atoms: a transposed linear, or a first MLP layer that is not [gate; up].

    Every convention is inferred from names; this checks that the names did not mislead.
    """
    if "embed_tokens.weight" not in shapes:
        return None
    hidden = shapes["embed_tokens.weight"][-1]
    for name, shape in shapes.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", ".gate.weight")) and shape[-1] != hidden:
            return f"{name} would have shape {shape}, which does not take {hidden} inputs"
        if name.endswith("o_proj.weight") and shape[0] != hidden:
            return f"{name} would have shape {shape}, which does not produce {hidden} outputs"
        for up, down in (("gate_proj.weight", "down_proj.weight"), ("w1.weight", "w2.weight")):
            other = shapes.get(name.removesuffix(up) + down) if name.endswith(up) else None
            if other is not None and other != shape[::-1]:
                return f"{name} would have shape {shape} and {down} {other}, which is not a gated MLP"
    return None


def model_config(shapes: Shapes, facts: ModelFacts, dtype: str | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Create ``config.json`` of the atoms' model, or return ``None`` and the reason why it cannot be created.

    Args:
        shapes: shape of every atom.
        dtype: torch's name of the common element type; ``None`` if they differ.
    """
    name, traits = _class(set(shapes))
    if name is None:
        return None, [f"no config.json: no known model class combines {', '.join(sorted(traits))}"]
    if facts.unlike:
        return None, [f"no config.json: {name} does not support {', '.join(facts.unlike)}"]
    fields = {"tie_word_embeddings": False} if "lm_head.weight" in shapes else {}
    fields = {**facts.fields, **fields}
    required = [*_REQUIRED, "tie_word_embeddings"]
    if "experts" in traits:
        required += (
            ["num_experts_per_tok"] if name == "MixtralForCausalLM" else ["num_experts_per_tok", "norm_topk_prob"]
        )
    missing = [field for field in required if field not in fields]
    missing += [] if "rope_theta" in fields or "rope_parameters" in fields else ["rope_theta"]
    if missing:
        return None, [f"no config.json: the checkpoint does not store {', '.join(missing)}"]
    if name == "MixtralForCausalLM" and not fields.pop("norm_topk_prob", True):
        return None, [
            "no config.json: Mixtral normalises the weights of the chosen experts to sum to 1, but this model does not"
        ]
    sizes = _sizes(shapes)
    expected = _expected(fields, sizes, traits)
    wrong = [atom for atom in sorted(expected.keys() | shapes.keys()) if expected.get(atom) != shapes.get(atom)]
    if wrong:
        atom = wrong[0]
        return None, [
            f"no config.json: {name} expects {atom} of shape {expected.get(atom)}, the checkpoint has "
            f"{shapes.get(atom)}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
        ]
    made = {"architectures": [name], "model_type": _TYPES[name], **sizes, **fields, **_flags(name, traits, sizes)}
    # unknown: the class's defaults would be wrong
    made |= {token: fields.get(token) for token in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return made | ({"torch_dtype": dtype} if dtype else {}), []


def _class(atoms: set[str]) -> tuple[str | None, set[str]]:
    """Return the class (``None`` if unknown) and the evidence for it."""
    marks = {
        "qkv_bias": "self_attn.q_proj.bias",
        "o_bias": "self_attn.o_proj.bias",
        "norm": "self_attn.q_norm.weight",
        "experts": "mlp.experts.0.w1.weight",
        "shared": "mlp.shared_expert.gate_proj.weight",
        "mlp_bias": "mlp.down_proj.bias",
    }
    traits = {mark for mark, leaf in marks.items() if any(atom.endswith(f".{leaf}") for atom in atoms)}
    biases = traits & {"qkv_bias", "o_bias", "mlp_bias"}
    attention = biases in (set(), {"qkv_bias", "o_bias"})
    experts = traits & {"experts", "shared"}
    name = None
    if not experts:
        if "norm" in traits:
            name = "Qwen3ForCausalLM" if attention else None
        elif biases == {"qkv_bias"}:
            name = "Qwen2ForCausalLM"
        elif biases - {"mlp_bias"} in (set(), {"qkv_bias", "o_bias"}):
            name = "LlamaForCausalLM"
    elif experts == {"experts"}:
        if "norm" in traits:
            name = "Qwen3MoeForCausalLM" if attention else None
        elif not biases:
            name = "MixtralForCausalLM"
    elif biases == {"qkv_bias"} and "norm" not in traits:
        name = "Qwen2MoeForCausalLM"
    return name, traits


def _sizes(shapes: Shapes) -> dict[str, Any]:
    """Return the fields that follow from the shapes alone."""
    layers = {int(atom.split(".")[1]) for atom in shapes if atom.startswith("layers.")}
    vocab, hidden = shapes.get("embed_tokens.weight", (0, 0))
    found: dict[str, Any] = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": len(layers)}
    for atom, field in (
        ("mlp.down_proj.weight", "intermediate_size"),
        ("mlp.experts.0.w2.weight", "moe_intermediate_size"),
        ("mlp.shared_expert.down_proj.weight", "shared_expert_intermediate_size"),
    ):
        sizes = {shape[-1] for name, shape in shapes.items() if name.endswith(f".{atom}")}
        if len(sizes) == 1:
            found[field] = sizes.pop()
    routers = {shape[0] for name, shape in shapes.items() if name.endswith(".mlp.gate.weight")}
    return found | ({"num_experts": routers.pop()} if len(routers) == 1 else {})


def _expected(fields: Mapping[str, Any], sizes: Mapping[str, Any], traits: set[str]) -> dict[str, tuple[int, ...]]:
    """Return every atom of the class with its shape."""
    hidden, rows = sizes["hidden_size"], fields["head_dim"]
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (sizes["vocab_size"], hidden), "norm.weight": (hidden,)}
    if not fields["tie_word_embeddings"]:
        found["lm_head.weight"] = (sizes["vocab_size"], hidden)
    queries, keys = fields["num_attention_heads"] * rows, fields["num_key_value_heads"] * rows
    for layer in range(sizes["num_hidden_layers"]):
        at = f"layers.{layer}."
        attn, mlp = at + "self_attn.", at + "mlp."
        found |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        for side, width in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{attn}{side}_proj.weight"] = (width, hidden)
            if "qkv_bias" in traits:
                found[f"{attn}{side}_proj.bias"] = (width,)
        found[attn + "o_proj.weight"] = (hidden, queries)
        if "o_bias" in traits:
            found[attn + "o_proj.bias"] = (hidden,)
        if "norm" in traits:
            found |= {attn + "q_norm.weight": (rows,), attn + "k_norm.weight": (rows,)}
        if "experts" not in traits:
            found |= _gated(mlp, sizes.get("intermediate_size", 0), hidden, "mlp_bias" in traits)
            continue
        found[mlp + "gate.weight"] = (sizes.get("num_experts", 0), hidden)
        inner = sizes.get("moe_intermediate_size", 0)
        for expert in range(sizes.get("num_experts", 0)):
            one = f"{mlp}experts.{expert}."
            found |= {one + "w1.weight": (inner, hidden), one + "w3.weight": (inner, hidden)}
            found[one + "w2.weight"] = (hidden, inner)
        if "shared" in traits:
            found |= _gated(mlp + "shared_expert.", sizes.get("shared_expert_intermediate_size", 0), hidden, False)
            found[mlp + "shared_expert_gate.weight"] = (1, hidden)
    return found


def _gated(prefix: str, inner: int, hidden: int, bias: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for side, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        found[f"{prefix}{side}_proj.weight"] = shape
        if bias:
            found[f"{prefix}{side}_proj.bias"] = shape[:1]
    return found


def _flags(name: str, traits: set[str], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a class that its tensors decide."""
    if name == "LlamaForCausalLM":
        return {"attention_bias": "o_bias" in traits, "mlp_bias": "mlp_bias" in traits}
    if name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        return {"attention_bias": "o_bias" in traits}
    if name == "MixtralForCausalLM":
        return {"intermediate_size": sizes["moe_intermediate_size"], "num_local_experts": sizes["num_experts"]}
    return {}
