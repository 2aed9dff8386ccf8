"""The facts about a model that a checkpoint stores beside the weights, in the terms of Hugging Face's ``config.json``.

::

    Megatron's args         num_query_groups=4  rotary_base=10000  swiglu=True  apply_layernorm_1p=False …
    Meta's params.json      n_heads  n_kv_heads  norm_eps  rope_theta; or the table of rotary angles beside the weights
    PaddleNLP's config.json num_attention_heads  rms_norm_eps …

Only what is stored is a fact; nothing has a default here. Sources: megatron-core 0.16.1 (``training/arguments.py``,
``models/common/embeddings/rotary_pos_embedding.py`` for the constants of Llama 3's scaling), Megatron-DeepSpeed
(``num_key_value_heads``), llama-models (``params.json``), PaddleNLP 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.names.frameworks import Geometry, geometry


@dataclass(frozen=True)
class ModelFacts:
    """Attributes:
    geometry: heads, query groups, rows per head, rows of the vocabulary without padding.
    fields: entries of ``config.json``.
    unlike: why no class of transformers computes the same as this model.
    refused: why the rows of the weights are not those that transformers expects.
    """

    geometry: Geometry = field(default_factory=Geometry)
    fields: Mapping[str, Any] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def filled(self, other: ModelFacts) -> ModelFacts:
        """Return these facts, with missing ones taken from ``other``."""
        return replace(self, geometry=self.geometry.filled(other.geometry), fields={**other.fields, **self.fields})


def facts(ckpt: Checkpoint, config: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the facts of a checkpoint; those it does not store come from a ``config.json`` that the user passed."""
    stored = _stored(ckpt)
    return stored if config is None else stored.filled(_of_config(config))


def _stored(ckpt: Checkpoint) -> ModelFacts:
    objects = ckpt.objects
    args = objects.get("args")
    args = args if isinstance(args, Mapping) else getattr(args, "state", None)
    if isinstance(args, Mapping):
        return _of_megatron(args, objects.get("checkpoint_version"))
    params, config = objects.get("params"), objects.get("config")
    if isinstance(params, Mapping) and "n_heads" in params:
        return _of_meta(params)
    if isinstance(config, Mapping):
        return _of_config(config)
    return ModelFacts(Geometry(head_dim=_rows_of_angles(ckpt)))


# ---- Megatron --------------------------------------------------------------------------------------------------------

#: Arguments that must have one of these values, if they are stored, for a class of the Llama family to fit.
_LIKE_LLAMA: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm", "rmsnorm"),
    "rotary_percent": (1.0, None),
    "window_size": (None,),
    "rotary_seq_len_interpolation_factor": (None,),
    "rope_type": (None, "rope"),
    "no_rope_freq": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "quick_geglu": (False,),
    "multi_latent_attention": (False,),
    "mrope_section": (None,),
    "attention_output_gate": (False,),
    "softmax_scale": (None,),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None,),
    "moe_router_num_groups": (None,),
    "moe_apply_probs_on_input": (False,),
    "swiglu": (True,),
}
#: Arguments that change the stored numbers; cutting does not undo them.
_REFUSED = {
    "rotary_interleaved": "interleaved rotary pairs",
    "layernorm_zero_centered_gamma": "norms are stored less 1",
    "apply_layernorm_1p": "norms are stored less 1",
    "moe_mlp_glu_interleave_size": "gate and up alternate in blocks of rows",
    "moe_glu_interleave_size": "gate and up alternate in blocks of rows",
}


def _of_megatron(args: Mapping[str, Any], version: object) -> ModelFacts:
    heads, rows = _count(args, "num_attention_heads"), _count(args, "kv_channels")
    groups = _count(args, "num_key_value_heads") or heads  # Megatron-DeepSpeed's name
    if args.get("group_query_attention"):
        groups = _count(args, "num_query_groups")
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": rows,
        "rms_norm_eps": _number(args, "norm_epsilon") or _number(args, "layernorm_epsilon"),
        "rope_theta": _number(args, "rotary_base"),
        "rope_scaling": _scaling(args),
        "max_position_embeddings": _count(args, "max_position_embeddings"),
        "hidden_act": "silu" if args.get("swiglu") is True else None,
    }
    untied = args.get("untie_embeddings_and_output_weights")
    fields["tie_word_embeddings"] = not untied if isinstance(untied, bool) else None
    unlike = [f"{name}={args[name]!r}" for name, good in _LIKE_LLAMA.items() if name in args and args[name] not in good]
    if _count(args, "num_experts"):
        fields["num_experts_per_tok"] = _count(args, "moe_router_topk")
        early = args.get("moe_router_pre_softmax")  # softmax of all experts, then the best: they do not add up to 1
        fields["norm_topk_prob"] = not early if isinstance(early, bool) else None
        unlike += [] if isinstance(early, bool) else ["a router whose order of softmax and top-k is not stored"]
    if args.get("position_embedding_type") != "rope" and args.get("use_rotary_position_embeddings") is not True:
        unlike.append(f"position_embedding_type={args.get('position_embedding_type')!r}")
    if args.get("use_rope_scaling") is True and fields["rope_scaling"] is None:
        unlike.append("rope_scaling with a factor that is not stored")
    refused = [f"{name}={args[name]!r}: {why}" for name, why in _REFUSED.items() if args.get(name)]
    if not isinstance(version, int | float) or version < 2:  # before 2.0 the rows of QKV had another order
        refused.append(f"checkpoint_version={version!r}: the order of q, k and v is known only from version 2.0 on")
    return ModelFacts(
        Geometry(heads, groups, rows, _vocabulary(args)),
        {name: value for name, value in fields.items() if value is not None},
        tuple(unlike),
        tuple(refused),
    )


def _scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Llama 3's scaling for ``--use-rope-scaling``; all but the factor is constant in megatron-core."""
    factor = _number(args, "rope_scaling_factor")
    if args.get("use_rope_scaling") is not True or factor is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _vocabulary(args: Mapping[str, Any]) -> int | None:
    """Return the rows of the vocabulary before padding; ``None`` if not stored, or if they do not pad to the stored
    rows.
    """
    size = _count(args, "vocab_size")
    if size is None:
        return None
    if args.get("tokenizer_type") in ("NullTokenizer", "NullMultimodalTokenizer"):
        size += 1  # it adds an end-of-document token to the given size
    padded, unit = _count(args, "padded_vocab_size"), _count(args, "make_vocab_size_divisible_by")
    if padded and unit:
        unit *= _count(args, "tensor_model_parallel_size") or 1
        if -(-size // unit) * unit != padded:
            return None
    return size


# ---- others ----------------------------------------------------------------------------------------------------------

_FIELDS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "tie_word_embeddings",
    "num_experts_per_tok",
    "norm_topk_prob",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def _of_config(config: Mapping[str, Any]) -> ModelFacts:
    fields = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    rows = _count(config, "head_dim") or (hidden // heads if heads and hidden else None)
    groups = _count(config, "num_key_value_heads") or heads
    fields |= {name: value for name, value in (("head_dim", rows), ("num_key_value_heads", groups)) if value}
    unlike = [f"{name}={config[name]!r}" for name in ("rope_scaling_factor", "rope_scaling_type") if config.get(name)]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        unlike.append(f"sliding_window={config['sliding_window']!r}")
    return ModelFacts(geometry({"config": config}), fields, tuple(unlike))


def _of_meta(params: Mapping[str, Any]) -> ModelFacts:
    heads, width = _count(params, "n_heads"), _count(params, "dim")
    groups = _count(params, "n_kv_heads") or heads
    rows = _count(params, "head_dim") or (width // heads if heads and width else None)
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": rows,
        "rms_norm_eps": _number(params, "norm_eps"),
        "rope_theta": _number(params, "rope_theta"),
    }
    unlike = ("use_scaled_rope: its factor is not stored",) if params.get("use_scaled_rope") else ()
    stored = {name: value for name, value in fields.items() if value is not None}
    return ModelFacts(Geometry(heads, groups, rows), stored, unlike)


def _rows_of_angles(ckpt: Checkpoint) -> int | None:
    """Return the rows of a head from ``rope.freqs`` ``(rows / 2,)`` or a complex ``freqs_cis`` ``(positions, rows /
    2)``.
    """
    for tensor, fqn in enumerate(ckpt.fqns):
        shape, kind = ckpt.catalog.shape_of(tensor), ckpt.catalog.dtype_of(tensor).name
        if (fqn == "rope.freqs" and len(shape) == 1) or (
            fqn == "freqs_cis" and len(shape) == 2 and kind.startswith("complex")
        ):
            return 2 * shape[-1]
    return None


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if type(value) is int and 0 < value < 1 << 48 else None


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
