"""What usually stands behind a pattern, told from the tensor's name. Guesses, kept apart from the facts.

A name alone proves nothing: two halves exchanged in a tensor called ``gate_up`` are very likely gate and up, in one
called ``o_proj`` they may be two ranks. Names as in transformers 5, Megatron-core 0.16, torchtitan 0.2 and vLLM 0.11.
"""

from __future__ import annotations

import re

from workbench.analysis.patterns.found import Pattern
from workbench.tensor import LazyTensor

__all__ = ["likely"]

_GATE_UP = re.compile(r"gate_up|gate_and_up|linear_fc1|w13|wi_fused|dense_h_to_4h|swiglu", re.I)
_FUSED_QKV = re.compile(r"qkv|query_key_value|c_attn|in_proj", re.I)
_Q_OR_K = re.compile(r"(^|[._])(q|k|wq|wk|query|key)(_proj|_rope|_nope|_layer|_a_proj|_b_proj)?([._]|$)", re.I)
_OUT = re.compile(r"(^|[._])(o_proj|wo|out_proj|linear_proj|dense|c_proj)([._]|$)", re.I)
_EMBEDDING = re.compile(r"embed|wte|lm_head|output_layer|tok_emb", re.I)
_EXPERTS = re.compile(r"expert|router|moe|gate\.weight", re.I)
_REORDERED = {"halves", "swap", "rolled", "interleave", "blocks", "regroup", "order"}


def likely(found: Pattern, b: LazyTensor) -> str:
    """A likely cause in a few words, or ``""``."""
    name = b.fqn or b.key
    if found.name in _REORDERED:
        return _reordered(found, name)
    if found.name in ("bit_flip", "bit_flips"):
        return "a fault of memory or storage; an update would have changed more"
    if found.name == "zero_run" and found.detail.get("aligned"):
        return "pages lost by storage or an interrupted copy"
    if found.name in ("resized", "shift") and _EMBEDDING.search(name):
        return "the vocabulary was padded, cut or shifted"
    if found.name == "ratio":
        return _ratio(found)
    if found.name == "rounded":
        return f"saved or restored in {found.detail['through']} on the way"
    if found.name == "transposed" and len(found.detail["axes"]) == 2:
        return "a linear layer stored as (in, out) by one side and (out, in) by the other"
    if found.name == "sibling":
        return "two tensors were exchanged, or one was loaded under two names"
    return ""


def _reordered(found: Pattern, name: str) -> str:
    detail = found.detail
    pairs = found.name == "interleave" and 2 in (detail["groups"], detail["each"])
    if found.name == "halves" and _GATE_UP.search(name):
        return "gate and up exchanged"
    if pairs and _GATE_UP.search(name):
        return "gate and up interleaved by one side, one after the other by the other side"
    if _FUSED_QKV.search(name) and found.name in ("interleave", "regroup", "blocks", "order"):
        return "query, key and value grouped by head on one side, contiguous on the other"
    if pairs and _Q_OR_K.search(name) and detail.get("unit") == 1:
        both = detail["groups"] == detail["each"] == 2
        way = "half-split → interleaved" if detail["groups"] == 2 else "interleaved → half-split"
        return f"the rotary layout{'' if both else f': {way}'}"
    if _EXPERTS.search(name) and found.name in ("blocks", "swap", "order", "rolled"):
        return "experts in another order; the router's rows must have followed"
    if _EMBEDDING.search(name):
        return "token ids of another vocabulary, or shards joined in another order"
    if _OUT.search(name) and detail.get("axis") == 1 and found.name == "interleave":
        return "heads in another order; query, key and value must have followed"
    if found.name in ("halves", "blocks"):
        return "shards joined in another order of ranks"
    return ""


def _ratio(found: Pattern) -> str:
    factor = abs(float(found.detail["ratio"]))
    if found.detail["ratio"] == -1.0:
        return ""
    if factor < 1 and abs(1 / factor - round(1 / factor)) < 1e-6:
        return f"a mean over {1 / factor:,.0f} taken once too often, or of a loss or gradient scale"
    if factor > 1 and factor.is_integer():
        return f"a sum over {factor:,.0f} ranks or steps where a mean was meant, or a scale that was not undone"
    return "scaled on the way, by weight decay, say" if 0.9 < factor < 1 else "scaled on the way"
