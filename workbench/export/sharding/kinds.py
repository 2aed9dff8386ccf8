"""Parallelism by kind of weight: the axis that tensor parallelism cuts, and the end of the pipeline that holds it.

::

    column    y = x Wᵀ, outputs cut: q k v, gate, up      weight rows, bias        tp Shard(0)
    row       inputs cut: o, down                         weight columns           tp Shard(1), bias whole
    vocab     embedding and output layer                  rows                     tp Shard(0)
    gate_up   two column weights one above the other      rows of each half        tp StridedShard(0, 2)
    thirds    q, k, v of one size one above the other     rows of each third       tp StridedShard(0, 3)
    qkv       q, k, v of their own sizes                  rows of each             tp PartedShard(0, …)
    experts   [expert, …] stacks of the above             axis 0                   ep Shard(0)
    same      norms, routers, positions, latents                                   whole

Megatron's grouped qkv (queries, key and value of one group after the other) is a plain column: its groups stay whole.

Sources: megatron-core 0.16.1 (``core/tensor_parallel/layers.py``, ``transformer/attention.py``, ``mlp.py``),
transformers 5.23 (Llama, Qwen 2/3, Mixtral, DeepSeek 2/3, Phi 3, GPT-2, GPT-NeoX, BERT, gpt-oss), torchtitan 0.3.
"""

from __future__ import annotations

from workbench.core.mesh.placement import Placement, Replicate, Shard, StridedShard
from workbench.names.weights import Weight, parse

#: How tp places the weight and the bias of a kind.
CUTS: dict[str, tuple[Placement, Placement]] = {
    "column": (Shard(0), Shard(0)),
    "row": (Shard(1), Replicate()),
    "vocab": (Shard(0), Shard(0)),
    "gate_up": (StridedShard(0, 2), StridedShard(0, 2)),
    "thirds": (StridedShard(0, 3), StridedShard(0, 3)),
    "same": (Replicate(), Replicate()),
    # GPT-2's Conv1D holds (inputs, outputs)
    "column transposed": (Shard(1), Shard(0)),
    "row transposed": (Shard(0), Replicate()),
    "thirds transposed": (StridedShard(1, 3), StridedShard(0, 3)),
    # stacks of experts: (expert, outputs, inputs)
    "experts column": (Shard(1), Shard(1)),
    "experts row": (Shard(2), Replicate()),
    "experts gate_up": (StridedShard(1, 2), StridedShard(1, 2)),
    "experts same": (Replicate(), Replicate()),
}

#: The cut of each kind of weight, if the kind alone decides.
_CUT_OF = {
    **dict.fromkeys(("norm", "router", "shared_gate", "position", "token_type", "rotary", "pooler", "sink"), "same"),
    **dict.fromkeys(("q_a", "kv_a"), "same"),
    **dict.fromkeys(("q", "k", "v", "kv", "q_b", "kv_b", "gate", "up", "mtp_proj"), "column"),
    **dict.fromkeys(("o", "down"), "row"),
    **dict.fromkeys(("embed", "head"), "vocab"),
    "gate_up": "gate_up",
    "fc1": "fc1",
}
#: Stacks of experts, by the end of their module's name.
_STACKS = {
    "experts.gate_up_proj": "stack gate_up",
    "experts.down_proj": "stack down",
    "experts.linear_fc1": "stack fc1",
    "experts.linear_fc2": "experts row",
    "experts.w2": "experts row",
    "experts.w1": "experts column",
    "experts.w3": "experts column",
}
_THIRDS = ("W_pack", "qkv", "in_proj", "c_attn")  #: q, k and v of one size
_FINAL = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm")


def kind_of(fqn: str) -> tuple[str, bool] | None:
    """Return how a parameter is cut, and whether it is a bias; ``None`` for an unknown name.

    Beside the kinds of :data:`CUTS`: ``fc1`` (gated or not, according to shapes), ``qkv`` (according to geometry), and
    ``stack gate_up``, ``stack down``, ``stack fc1`` (orientation according to shapes).
    """
    weight = parse(fqn)
    kind = _cut_of(weight) if weight.leaf in ("weight", "bias", "") else None
    return None if kind is None else (kind, weight.leaf == "bias")


def end_of(fqn: str) -> str | None:
    """Return ``first`` for embeddings, ``last`` for weights after the layers, and ``None`` for others."""
    weight = parse(fqn)
    if weight.leaf not in ("weight", "bias", "") or weight.layer is not None:
        return None
    if weight.kind in ("embed", "position", "token_type", "patch", "token") or "embeddings" in weight.module:
        return "first"
    return "last" if weight.kind == "head" or (weight.kind == "norm" and weight.name in _FINAL) else None


def _cut_of(weight: Weight) -> str | None:
    if weight.routed and weight.expert is None and (stack := _stack_of(weight)):
        return stack
    cut, gpt = _CUT_OF.get(weight.kind), weight.stack.split(".")[-1] == "h"
    if (gpt and weight.module.startswith("crossattention.")) or weight.name == "gate_up_fused_proj":
        return None  # GPT-2's [k; v] as Conv1D, and PaddleNLP's halves, which interleave by rank
    if weight.kind == "qkv":
        if weight.stack == "transformer.encoder.layers":  # ChatGLM's queries come before its few keys and values
            return None
        cut = "column" if weight.grouped else "thirds" if weight.name in _THIRDS else "qkv"
    # GPT-2's Conv1D
    return f"{cut} transposed" if gpt and weight.name.startswith("c_") else cut


def _stack_of(weight: Weight) -> str | None:
    inner = ".".join(weight.module.split(".")[-2:])
    if weight.name.startswith("linear_") and not weight.module.endswith(f"mlp.experts.{inner}"):
        return None
    return _STACKS.get(inner)
