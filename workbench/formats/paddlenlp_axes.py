"""Which axis tensor parallelism cut, where ``config.json`` proves it.

A rank's piece has the parameter's own shape but for one axis that is ``tp`` times shorter; ``model_meta.json`` says
whether a parameter was cut, not where. The shapes of the usual decoder follow from its configuration (paddle's linear
weights are ``[in, out]``)::

    hidden 32, vocabulary 64, tp 2:      embed_tokens.weight   (64, 32)   piece (32, 32)   → axis 0
    intermediate 64                      down_proj.weight      (64, 32)   piece (32, 32)   → axis 0
                                         gate_proj.weight      (32, 64)   piece (32, 32)   → axis 1
                                         k_proj.weight         (32, ?)    piece (32, 16)   → axis 1

An axis counts only if every other axis is whole and it alone is short by exactly ``tp``. Fused weights (``qkv_proj``,
``gate_up_fused_proj``) interleave what they hold and are in no row below: their pieces stay apart.
Source: PaddleNLP 3.0.0b4 ``transformers/llama/modeling.py`` (``_get_tensor_parallel_mappings``), ``configuration.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["REPLICATED", "full_shape", "proven_axis"]

REPLICATED = -1
#: Leaf of a name → its axes as sizes of the configuration; ``?`` is not told by it.
SHAPES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("vocab", "hidden"), "lm_head.weight": ("hidden", "vocab"),
    "q_proj.weight": ("hidden", "q"), "k_proj.weight": ("hidden", "kv"), "v_proj.weight": ("hidden", "kv"),
    "o_proj.weight": ("q", "hidden"), "q_proj.bias": ("q",), "k_proj.bias": ("kv",), "v_proj.bias": ("kv",),
    "gate_proj.weight": ("hidden", "inner"), "up_proj.weight": ("hidden", "inner"),
    "down_proj.weight": ("inner", "hidden"), "o_proj.bias": ("hidden",), "down_proj.bias": ("hidden",),
    "norm.weight": ("hidden",), "norm.bias": ("hidden",),
}  # fmt: skip
_LEAF = re.compile(r"(?:.*[._])?((?:embed_tokens|lm_head|[qkvo]_proj|gate_proj|up_proj|down_proj)\.(?:weight|bias))")
_NORM = re.compile(r"(?:.*\.)?\w*norm\.(weight|bias)")


def full_shape(name: str, config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """The parameter's shape by the configuration, ``None`` for axes (or all) that it does not tell."""
    leaf = (
        match[1] if (match := _LEAF.fullmatch(name)) else f"norm.{match[1]}" if (match := _NORM.fullmatch(name)) else ""
    )
    if leaf not in SHAPES:
        return None
    sizes = _sizes(config)
    return tuple(sizes.get(axis) for axis in SHAPES[leaf])


def proven_axis(name: str, local: tuple[int, ...], tp: int, config: Mapping[str, Any], *, cut: bool) -> int | None:
    """The axis that was cut, :data:`REPLICATED` for a piece that is whole, ``None`` where nothing proves either.

    ``cut`` says that the parameter is known to be cut; then one axis that the configuration does not tell is the one,
    if all others are whole.
    """
    full = full_shape(name, config)
    if full is None or len(full) != len(local):
        return None
    if None not in full and full == local:
        return REPLICATED
    short = [axis for axis, size in enumerate(full) if size != local[axis]]
    if len(short) != 1:
        return None
    size = full[short[0]]
    if size is None:
        return short[0] if cut and len(full) > 1 else None
    return short[0] if size == local[short[0]] * tp else None


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    def told(key: str) -> int | None:
        value = config.get(key)
        return value if type(value) is int and value > 0 else None

    hidden, heads = told("hidden_size"), told("num_attention_heads")
    kv, width = told("num_key_value_heads") or heads, told("head_dim")
    if width is None and hidden and heads and hidden % heads == 0:
        width = hidden // heads
    found = {
        "hidden": hidden, "vocab": told("vocab_size"), "inner": told("intermediate_size"),
        "q": heads * width if heads and width else None, "kv": kv * width if kv and width else None,
    }  # fmt: skip
    return {name: size for name, size in found.items() if size}
