"""What a weight is, by its name: which of its axes tensor parallelism cuts, and at which end of the model it sits.

::

    column    y = x Wᵀ, outputs cut: q k v, gate, up      weight rows, bias        tp Shard(0)
    row       inputs cut: o, down                         weight columns           tp Shard(1), bias whole
    vocab     embedding and output layer                  rows                     tp Shard(0)
    gate_up   two column weights one above the other      rows of each half        tp StridedShard(0, 2)
    thirds    q, k, v of one size one above the other     rows of each third       tp StridedShard(0, 3)
    qkv       q, k, v of their own sizes                  rows of each             tp PartedShard(0, …)
    experts   [expert, …] stacks of the above             axis 0                   ep Shard(0)
    same      norms, routers, positions                                            whole

Megatron's grouped qkv (queries, key and value of one group after the other) is a plain column: its groups stay whole.

Sources: megatron-core 0.16.1 (``core/tensor_parallel/layers.py``, ``transformer/attention.py``, ``mlp.py``),
transformers 5.23 (Llama, Qwen 2/3, Mixtral, DeepSeek 2/3, Phi 3, GPT-2, GPT-NeoX, BERT, gpt-oss), torchtitan 0.3.
"""

from __future__ import annotations

import re
from functools import lru_cache

from workbench.reshard.placement import Placement, Replicate, Shard, StridedShard

__all__ = ["CUTS", "end_of", "expert_of", "kind_of", "layer_of"]

#: What tp does to the weight and to the bias of a kind.
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

#: Kind of a module by the end of its name; the first that matches counts.
_KINDS: list[tuple[str, re.Pattern[str]]] = [
    (kind, re.compile(names[1:] if names[0] == "^" else rf"(?:.*\.)?(?:{names})", re.S))
    for kind, names in (
        ("same", r"[^.]*norm[^.]*|ln_\w+|layer_norm_(?:weight|bias)|norm\d?|.*(?:mlp|moe|block_sparse_moe|ffn)\.gate"
                 r"|router|router\.gate|\w*expert_gate|wpe|position_embeddings?|embed_positions|pos_emb\w*|tokentype_embeddings"
                 r"|token_type_embeddings|pooler\.dense|(?:linear_)?(?:q|kv)_(?:down|a)_proj(?:_with_mqa)?|rotary_emb|sinks"),
        ("stack gate_up", r"experts\.gate_up_proj"),
        ("stack down", r"experts\.down_proj"),
        ("stack fc1", r"mlp\.experts\.experts\.linear_fc1"),
        ("experts row", r"mlp\.experts\.experts\.linear_fc2|experts\.w2"),
        ("experts column", r"experts\.w[13]"),
        ("vocab", r"embed_tokens|tok_embeddings|word_embeddings(?:_for_head)?|wte|lm_head|output_layer|embed_out"
                  r"|embed_in"),
        ("vocab", r"^(?:model\.)?output"),
        ("column", r"[qkv]_proj|w[qkv13]|gate_proj|up_proj|(?:q|kv)_b_proj|linear_qkv|linear_(?:q|kv)(?:_up)?(?:_proj)?"
                   r"|query_key_value|(?:self|attention|attn)\.(?:query|key|value)|query|key_value|intermediate\.dense"
                   r"|eh_proj|fc1|fc_in"),
        ("fc1", r"linear_fc1|dense_h_to_4h"),
        ("row", r"o_proj|wo|w2|down_proj|linear_proj|linear_fc2|dense_4h_to_h|fc2|fc_out|output\.dense"
                r"|(?:attention|self_attention|attn)\.dense|(?:self_attn|attn|attention|encoder_attn)\.out_proj"),
        ("gate_up", r"gate_up_proj"),
        ("qkv", r"qkv_proj"),
        ("thirds", r"W_pack|attn\.qkv|(?:self_attn|attn|attention)\.in_proj"),
        ("thirds transposed", r"h\.\d+\.attn\.c_attn"),
        ("column transposed", r"h\.\d+\.mlp\.c_fc"),
        ("row transposed", r"h\.\d+\.(?:attn|mlp)\.c_proj"),
    )
]  # fmt: skip
#: Models whose modules of the same names are made otherwise.
_OTHERWISE = re.compile(
    r"(?:.*\.)?transformer\.encoder\.layers\.\d+\.self_attention\.query_key_value.*", re.S
)  # ChatGLM
_LEAF = re.compile(r"(?P<module>.+?)(?:\.(?P<leaf>weight|bias)\d*|_(?P<joined>weight|bias))?", re.S)
_EXPERT = re.compile(r"(?:.*\.)?experts\.(?:(?:local_experts\.)?(\d+)\..*|linear_fc[12]\.(?:weight|bias)(\d+))", re.S)
_LAYER = re.compile(r"((?:\w+\.)*?(?:layers|layer|h|blocks|block))\.(\d{1,9})\.", re.S)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
_FIRST = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|word_embeddings|wte|wpe|embed_in|position_embeddings?|embed_positions"
    r"|tokentype_embeddings|token_type_embeddings|word_embeddings_layernorm|embeddings\.\w+)(?:\.(?:weight|bias))?",
    re.S,
)
_LAST = re.compile(
    r"(?:\w+\.){0,2}(?:lm_head|output_layer|embed_out|norm|ln_f|final_layernorm|final_layer_norm|final_norm|output)"
    r"(?:\.(?:weight|bias))?",
    re.S,
)


def kind_of(fqn: str) -> tuple[str, bool] | None:
    """Kind of a parameter and whether it is a bias; ``None`` for a name that we do not know.

    Beside the kinds of :data:`CUTS`: ``fc1`` (gated or not, as shapes tell), ``qkv`` (geometry tells), and
    ``stack gate_up``, ``stack down``, ``stack fc1`` (shapes tell which way round).
    """
    return _kind(_NUMBER.sub("0", fqn))


def expert_of(fqn: str) -> int | None:
    """Number of the expert that a parameter belongs to alone; ``None`` for all others, and for stacks."""
    found = _EXPERT.fullmatch(fqn) if "experts." in fqn else None
    return int(found[1] or found[2]) if found else None


def layer_of(fqn: str) -> tuple[str, int] | None:
    """The stack that a parameter's layer is in, and the layer's number: ``("model.layers", 3)``."""
    found = _LAYER.match(fqn)
    return (found[1], int(found[2])) if found else None


def end_of(fqn: str) -> str | None:
    """``first`` for embeddings, ``last`` for what follows the layers, ``None`` for neither."""
    return "first" if _FIRST.fullmatch(fqn) else "last" if _LAST.fullmatch(fqn) else None


@lru_cache(maxsize=1 << 14)
def _kind(name: str) -> tuple[str, bool] | None:
    leaf = _LEAF.fullmatch(name)
    if leaf is None or _OTHERWISE.fullmatch(name):
        return None
    bias = "bias" in (leaf["leaf"], leaf["joined"])
    for candidate in (leaf["module"], name):
        for kind, pattern in _KINDS:
            if pattern.fullmatch(candidate):
                return kind, bias
    return None
