"""The parts of a weight's name, in any framework: its layer, its expert, and which weight of a layer it is.

::

    name                                               stack            layer  expert  kind      parts
    model.layers.3.self_attn.q_proj.weight             model.layers       3            q         q
    decoder.layers.3.self_attention.linear_qkv.weight  decoder.layers     3            qkv       q k v
    decoder.layers.3.mlp.linear_fc1.weight             decoder.layers     3            fc1       gate up
    model.layers.3.mlp.experts.11.down_proj.weight     model.layers       3      11    down      down
    layers.3.moe.experts.w2                            layers             3            down      down     stacked
    transformer.h.3.attn.c_proj.weight                 transformer.h      3            o         o
    encoder.block.3.layer.1.DenseReluDense.wo.weight   encoder.block      3            down      down
    model.embed_tokens.weight                          –                               embed     embed
    something.else                                     –                               other     other

Only the name is parsed: ``fc1`` stands for [gate; up] as well as for an MLP without a gate, which shapes
distinguish. What a kind implies (how tensor parallelism shards it, say) is up to the caller.

Sources: transformers 5.23, megatron-core 0.16.1 and Megatron-LM before core, torchtitan 0.3, timm 1.0, OLMo, mamba_ssm,
DeepSeek-V3's own inference code, PaddleNLP 3.0, peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

#: Kind of weight by the end of its module's name, without case; the first that fits.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(rf"(?:.*\.)?(?:{names})", re.I | re.S))
    for kind, names in (
        ("norm", r"[^.]*norm[^.]*|ln_\w+|ln\d?|\w+_ln"),
        ("shared_gate", r"shared_experts?(?:_gate|\.gate)"),
        ("router", r"[^.]*(?:mlp|moe|ffn|feed_forward)\.gate|router(?:\.(?:gate|layer|classifier))?|gate\.wg"),
        ("rotary", r"rotary\w*|freqs_cis"),
        ("position", r"wpe|pos(?:ition)?_?emb[^.]*|embed_positions"),
        ("relative_bias", r"relative_(?:attention_bias|position_bias_table)"),  # a column per head
        ("token_type", r"token_?type_embeddings"),
        ("token", r"(?:cls|class|mask|dist|reg|register)_tokens?|class_embedding"),
        ("patch", r"patch_embed[^.]*(?:\.proj|\.projection)?"),
        (
            "head",
            r"lm_head(?:\.decoder)?|output_layer|embed_out|word_embeddings_for_head|proj_out"
            r"|predictions\.decoder",
        ),
        ("embed", r"embed_tokens|embed_in|wte|word_embeddings|tok\w*_emb[^.]*|emb|embed|embeddings?"),
        ("pooler", r"pooler(?:\.dense)?"),
        ("classifier", r"classifier|score|qa_outputs|seq_relationship"),
        ("layer_scale", r"ls\d|layer_scale\w*"),
        ("sink", r"sinks"),
        ("mtp_proj", r"eh_proj"),
        ("ssm_in", r"(?:mixer|mamba\w*|ssm|linear_attn)\.in_proj\w*"),
        ("ssm_out", r"(?:mixer|mamba\w*|ssm|linear_attn)\.out_proj"),
        ("ssm_x", r"x_proj"),
        ("ssm_dt", r"dt_proj|dt"),
        ("ssm_a", r"A_log"),
        ("ssm_d", r"(?:mixer|mamba\w*|ssm)\.D"),
        ("conv", r"[^.]*conv[^.]*"),
        ("q_a", r"(?:linear_)?q_(?:a|down)_proj|wq_a"),
        ("q_b", r"(?:linear_)?q_(?:b|up)_proj|wq_b"),
        ("kv_a", r"(?:linear_)?kv_(?:a|down)_proj(?:_with_mqa)?|wkv_a"),
        ("kv_b", r"(?:linear_)?kv_(?:b|up)_proj|wkv_b"),
        ("kv", r"linear_kv|key_value|kv_proj|crossattention\.c_attn"),
        ("qkv", r"(?:linear_|to_|W)?qkv|qkv_proj|query_key_value|W_pack|c_attn|att_proj|[^.]*att[^.]*\.in_proj"),
        ("q", r"q_proj|wq|query|linear_q(?:_proj)?|to_q|q_lin|q_attn|q"),
        ("k", r"k_proj|wk|key|to_k|k_lin|k"),
        ("v", r"v_proj|wv|value|to_v|v_lin|v"),
        ("gate", r"gate_proj|w1|wi_0"),
        ("up", r"up_proj|w3|wi_1|c_fc|fc1|fc_in|intermediate\.dense|lin1|linear1|DenseReluDense\.wi"),
        ("gate_up", r"gate_up(?:_fused)?_proj|gate_and_up_proj|w13|wi_fused|wi|ff_proj"),
        ("fc1", r"linear_fc1|dense_h_to_4h"),
        ("down", r"(?:mlp|ffn|feed_forward|DenseReluDense|DenseGatedActDense)\.wo"),
        (
            "o",
            r"o_proj|wo|out_proj|linear_proj|out_lin|attn_out|to_out(?:\.0)?"
            r"|[^.]*att[^.]*\.(?:dense|c_proj|proj|out|o|output\.dense)",
        ),
        ("down", r"down_proj|w2|linear_fc2|dense_4h_to_h|c_proj|fc2|fc_out|output\.dense|lin2|linear2|ff_out"),
    )
)
#: Kinds by modules outside of the layers; inside they mean something else, or nothing.
_OUTER = {"output": "head", "head": "head", "shared": "embed", "ff_out": "head"}
#: Parts of fused weights, in stored order; a few modules have another order.
_PARTS = {
    "qkv": ("q", "k", "v"),
    "kv": ("k", "v"),
    "kv_a": ("kv_a", "k_rope"),
    "kv_b": ("k", "v"),
    "gate_up": ("gate", "up"),
    "fc1": ("gate", "up"),
}
_PARTS_OF = {"ff_proj": ("up", "gate")}
_BLOCKS = {
    **dict.fromkeys(("q", "k", "v", "o", "qkv", "kv", "q_a", "q_b", "kv_a", "kv_b"), "attn"),
    **dict.fromkeys(("gate", "up", "down", "gate_up", "fc1", "router", "shared_gate"), "mlp"),
    "norm": "norm",
    "embed": "embed",
    "head": "embed",
}

_FC1 = re.compile(r"(.*\.)(linear_fc1|dense_h_to_4h)\.(weight|bias)(\d*)", re.S)
_FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_LIMIT = 1000  #: maximum characters of a name that is parsed; no model has longer ones
_LAYER = re.compile(
    r"(?<![^.])((?:layers|stages)\.\d+\.blocks|layers|layer|h|blocks|block|gpt_layers|resblocks)\.(\d{1,9})(?![^.])"
)
_EXPERT = re.compile(r"(?:^|(?<=\.))((?:local_|deepspeed_)?experts)\.(\d{1,9})(?=\.|$)")
_ROUTED = re.compile(r"(?:^|\.)(?:local_|deepspeed_)?experts\.")
_LEAF = re.compile(
    r"(?P<module>.+?)(?:\.(?:base_layer|original_module|modules_to_save(?:\.\w+)?))?(?:"
    r"\.(?P<adapter>lora_(?:embedding_)?[AB]|lora_magnitude_vector|ia3_l)(?:\.\w+)*"
    r"|[._](?P<plain>weight|bias)(?P<number>\d*)"
    r"|\.(?P<odd>gamma|beta|inv_freq|e_score_correction_bias|expert_bias|_extra_state|amax_history\w*|q(?:weight|zeros)"
    r"|g_idx|SCB|\w*scale|weight_\w+)|_(?P<packed>blocks|scales)|\.(?P<scales>scales))?",
    re.S,
)


@dataclass(frozen=True, slots=True)
class Weight:
    """The parts of a parameter's name.

    Attributes:
        stack: name of the list of layers, ``model.layers``; empty outside of layers.
        layer: number in that list.
        expert: number of the routed expert that it belongs to alone.
        inside: the name within its layer, the expert's number as ``*``; outside of layers, the whole name.
        module: ``inside`` without the leaf.
        leaf: ``weight``, ``bias``, ``lora_A``, ``weight_scale_inv`` …; empty for a parameter without one.
        kind: one of the kinds of this module, or ``other``.
        parts: kinds that it holds: several if the weight is fused, in order.
        routed: whether it belongs to routed experts, one or a stack of all.
    """

    stack: str
    layer: int | None
    expert: int | None
    inside: str
    module: str
    leaf: str
    kind: str
    parts: tuple[str, ...]
    routed: bool

    @property
    def name(self) -> str:
        """Last component of the module: ``q_proj``."""
        return self.module.rpartition(".")[2]

    @property
    def owner(self) -> tuple[str, int | None, int | None, str]:
        """The key shared by the weights of one attention or one MLP."""
        return self.stack, self.layer, self.expert, self.module.rpartition(".")[0]

    @property
    def pattern(self) -> str:
        """The name with ``*`` for the numbers of layer and expert."""
        return self.inside if self.layer is None else f"{self.stack}.*.{self.inside}"

    @property
    def block(self) -> str:
        """Part of a layer or model: ``attn``, ``mlp``, ``norm``, ``embed`` or ``other``."""
        return _BLOCKS.get(self.kind, "other")

    @property
    def grouped(self) -> bool:
        """Whether q, k and v are fused group by group of heads, as Megatron, GPT-NeoX and BLOOM do."""
        return self.name in ("linear_qkv", "query_key_value")


@lru_cache(maxsize=1 << 16)
def parse(name: str) -> Weight:
    """Parse a parameter's name."""
    if len(name) > _LIMIT:
        return Weight("", None, None, name, name, "", "other", ("other",), False)
    found = _LAYER.search(name)
    stack, layer, inside = (name[: found.end(1)], int(found[2]), name[found.end() + 1 :]) if found else ("", None, name)
    number = _EXPERT.search(inside) if "experts." in inside else None
    if number:
        inside = f"{inside[: number.start(2)]}*{inside[number.end(2) :]}"
    module, leaf, kind, grouped_expert = _inside(inside, layer is not None)
    routed = number is not None or _ROUTED.search(inside) is not None
    expert = int(number[2]) if number else int(grouped_expert) if routed and grouped_expert else None
    parts = _PARTS_OF.get(module.rpartition(".")[2]) or _PARTS.get(kind, (kind,))
    return Weight(stack, layer, expert, inside, module, leaf, kind, parts, routed)


def kinds(names: Iterable[str]) -> frozenset[str]:
    """Return the kinds that several parameters hold, fused ones by their parts."""
    return frozenset(kind for name in names for kind in parse(name).parts)


def tied_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the embeddings and output layers that a model with tied weights shares: ``(embedding, output layer)``.

    An output layer belongs to the embeddings of its own model: ``critic.lm_head`` not to ``policy.embed_tokens``.
    """
    found: dict[str, list[tuple[str, str]]] = {"embed": [], "head": []}
    for name in names:
        weight = parse(name)
        if weight.kind in found and weight.leaf == "weight" and weight.layer is None:
            found[weight.kind].append((name, weight.module.rpartition(".")[0]))
    return [
        (name, other)
        for name, model in found["embed"]
        for other, prefix in found["head"]
        if not prefix or f"{model}.".startswith(f"{prefix}.")
    ]


def is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool | None:
    """Return whether an ``fc1`` has twice the rows that its partner has columns; ``None`` if unknown."""
    found = _FC1.fullmatch(name)
    if found is None or not shapes.get(name):
        return None
    other = shapes.get(f"{found[1]}{_FC2[found[2]]}.weight{found[4]}")
    rows = shapes[name][-1 if found[3] == "bias" else -2 :][0]
    return rows == 2 * other[-1] if other else None


@lru_cache(maxsize=1 << 14)
def _inside(name: str, layered: bool) -> tuple[str, str, str, str]:
    """Return ``(module, leaf, kind, number)`` of a name in a layer; Transformer Engine numbers experts in the leaf."""
    found = _LEAF.fullmatch(name)
    if found is None:
        return name, "", "other", ""
    module = found["module"]
    leaf = next((found[group] for group in ("adapter", "plain", "odd", "packed", "scales") if found[group]), "")
    last = module.rpartition(".")[2]
    if not layered and last in _OUTER:
        return module, leaf, _OUTER[last], ""
    kind = next((kind for kind, pattern in _KINDS if pattern.fullmatch(module)), "other")
    return module, leaf, kind, found["number"] or ""
