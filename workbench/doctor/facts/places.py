"""What a parameter is, by its name in any framework: layer, block and kind.

::

    model.layers.3.self_attn.q_proj.weight               layer 3   attn   q
    decoder.layers.3.self_attention.linear_qkv.weight    layer 3   attn   q k v
    transformer.h.3.mlp.c_fc.weight                      layer 3   mlp    up
    model.embed_tokens.weight                            –         embed  embed
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["KINDS", "block_of", "expert", "kinds", "kinds_of", "layer_of"]

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer|block|gpt_layers)\.(\d+)(?:\.|$)")
_EXPERT = re.compile(r"(?<!shared_)experts?[._]")
#: Words of a name → kinds; the first that fits.
_KINDS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), found)
    for pattern, found in (
        (r"lora_|adapter", ("lora",)),
        (r"amax|scale_inv|_extra_state|\bscale$", ("scale",)),
        (r"expert_bias|e_score_correction", ("router",)),
        (r"router|mlp\.gate\.|block_sparse_moe\.gate\.|\bgate\.weight$|\.gate\.wg", ("router",)),
        (r"norm|ln_\w|\bln\d?\.", ("norm",)),
        (r"lm_head|output_layer|embed_out|^(?:model\.)?output\.weight", ("head",)),
        (r"embed|\bwte\b|tok_emb|\bwpe\b", ("embed",)),
        (r"linear_qkv|query_key_value|qkv|c_attn|\bWqkv\b", ("q", "k", "v")),
        (r"\bkv_proj|linear_kv", ("k", "v")),
        (r"q_proj|\bwq\b|\bquery\b|to_q\b|linear_q\b", ("q",)),
        (r"k_proj|\bwk\b|\bkey\b|to_k\b", ("k",)),
        (r"v_proj|\bwv\b|\bvalue\b|to_v\b", ("v",)),
        (r"o_proj|\bwo\b|att\w*\.linear_proj|self_attention\.dense|attn\.c_proj|out_proj|attention\.output", ("o",)),
        (r"gate_up|linear_fc1|dense_h_to_4h|\bw13\b|gate_and_up", ("gate", "up")),
        (r"gate_proj|\bw1\b", ("gate",)),
        (r"up_proj|\bw3\b|c_fc|\bfc1\b", ("up",)),
        (r"down_proj|\bw2\b|linear_fc2|dense_4h_to_h|mlp\.c_proj|\bfc2\b", ("down",)),
    )
)
_BLOCKS = {
    "q": "attn", "k": "attn", "v": "attn", "o": "attn", "gate": "mlp", "up": "mlp", "down": "mlp",
    "router": "mlp", "norm": "norm", "embed": "embed", "head": "embed", "lora": "lora", "scale": "scale",
}  # fmt: skip
#: Every kind.
KINDS = (*_BLOCKS, "other")


@lru_cache(maxsize=1 << 16)
def kinds_of(fqn: str) -> tuple[str, ...]:
    """What a parameter holds; several of a fused one, ``("other",)`` where its name does not tell."""
    return next((found for pattern, found in _KINDS if pattern.search(fqn)), ("other",))


def block_of(fqn: str) -> str:
    """``attn``, ``mlp``, ``norm``, ``embed``, ``lora``, ``scale`` or ``other``."""
    return _BLOCKS.get(kinds_of(fqn)[0], "other")


def expert(fqn: str) -> bool:
    """Whether it belongs to one of several experts."""
    return _EXPERT.search(fqn) is not None


def layer_of(fqn: str) -> int | None:
    found = _LAYER.search(fqn)
    return int(found[1]) if found else None


def kinds(fqns: Iterable[str]) -> frozenset[str]:
    """All that several parameters hold."""
    return frozenset(kind for fqn in fqns for kind in kinds_of(fqn))
