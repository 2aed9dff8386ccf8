"""The usual cause of a pattern, inferred from the tensor's name: a guess, separate from the facts.

A name alone proves nothing: two exchanged halves of a tensor named ``gate_up`` are very likely gate and up; in one
named ``o_proj`` they may be two ranks. Names as in transformers 5, Megatron-core 0.16, torchtitan 0.2 and vLLM 0.11.
"""

from __future__ import annotations

from workbench.analysis.patterns.found import Pattern
from workbench.names.weights import Weight, parse
from workbench.tensor import LazyTensor

_VOCABULARY = ("embed", "head")
_REORDERED = {"halves", "swap", "rolled", "interleave", "blocks", "regroup", "order"}


def likely(found: Pattern, b: LazyTensor) -> str:
    """Return a likely cause in a few words, or ``""``."""
    weight = parse(b.fqn or b.key)
    if found.name in _REORDERED:
        return _reordered(found, weight)
    if found.name in ("bit_flip", "bit_flips"):
        return "a fault of memory or storage; an update would have changed more"
    if found.name == "zero_run" and found.detail.get("aligned"):
        return "pages lost by storage or an interrupted copy"
    if found.name in ("resized", "shift") and weight.kind in _VOCABULARY:
        return "the vocabulary was padded, cut or shifted"
    if found.name == "ratio":
        return _ratio(found)
    if found.name == "rounded":
        return f"saved or restored in {found.detail['through']} in between"
    if found.name == "transposed" and len(found.detail["axes"]) == 2:
        return "a linear layer stored as (in, out) by one side and (out, in) by the other"
    if found.name == "sibling":
        return "two tensors were exchanged, or one was loaded under two names"
    return ""


def _reordered(found: Pattern, weight: Weight) -> str:
    detail = found.detail
    pairs = found.name == "interleave" and 2 in (detail["groups"], detail["each"])
    if found.name == "halves" and weight.block == "mlp" and len(weight.parts) > 1:
        return "gate and up exchanged"
    if pairs and weight.block == "mlp" and len(weight.parts) > 1:
        return "gate and up interleaved on one side, consecutive on the other"
    if weight.kind == "qkv" and found.name in ("interleave", "regroup", "blocks", "order"):
        return "query, key and value grouped by head on one side, contiguous on the other"
    if pairs and weight.kind in ("q", "k", "q_b") and detail.get("unit") == 1:
        both = detail["groups"] == detail["each"] == 2
        way = "half-split → interleaved" if detail["groups"] == 2 else "interleaved → half-split"
        return f"the rotary layout{'' if both else f': {way}'}"
    if (weight.routed or weight.kind == "router") and found.name in ("blocks", "swap", "order", "rolled"):
        return "experts in another order; the router's rows must have followed"
    if weight.kind in _VOCABULARY:
        return "token ids of another vocabulary, or shards joined in another order"
    if weight.kind == "o" and detail.get("axis") == 1 and found.name == "interleave":
        return "heads in another order; query, key and value must have followed"
    if found.name in ("halves", "blocks"):
        return "shards joined in another order of ranks"
    return ""


def _ratio(found: Pattern) -> str:
    factor = abs(float(found.detail["ratio"]))
    if found.detail["ratio"] == -1.0:
        return ""
    if factor < 1 and abs(1 / factor - round(1 / factor)) < 1e-6:
        return f"a mean over {1 / factor:,.0f} applied once too often, or a loss or gradient scale"
    if factor > 1 and factor.is_integer():
        return f"a sum over {factor:,.0f} ranks or steps where a mean was meant, or a scale that was not undone"
    return "scaled in between, for example by weight decay" if 0.9 < factor < 1 else "scaled in between"
