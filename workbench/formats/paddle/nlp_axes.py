"""Find the axis that tensor parallelism divided, if ``config.json`` proves it.

A rank's piece has the parameter's shape, except for one axis that is ``tp`` times shorter. ``model_meta.json`` stores
whether a parameter was divided, not along which axis. A usual decoder's shapes follow from its configuration (paddle's
linear weights are ``[in, out]``)::

    hidden 32, vocabulary 64, tp 2:      embed_tokens.weight   (64, 32)   piece (32, 32)   → axis 0
    intermediate 64                      down_proj.weight      (64, 32)   piece (32, 32)   → axis 0
                                         gate_proj.weight      (32, 64)   piece (32, 32)   → axis 1
                                         k_proj.weight         (32, ?)    piece (32, 16)   → axis 1

An axis is accepted only if it is shorter by exactly ``tp`` and every other axis is complete. Fused weights
(``qkv_proj``, ``gate_up_fused_proj``) interleave their parts and are not in the table: their pieces stay separate.
Source: PaddleNLP 3.0.0b4 ``transformers/llama/modeling.py`` (``_get_tensor_parallel_mappings``), ``configuration.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.names.weights import parse

REPLICATED = -1
#: Kind and leaf of a weight → its axes as sizes in the configuration.
SHAPES: dict[tuple[str, str], tuple[str, ...]] = {
    ("embed", "weight"): ("vocab", "hidden"),
    ("head", "weight"): ("hidden", "vocab"),
    ("q", "weight"): ("hidden", "q"),
    ("k", "weight"): ("hidden", "kv"),
    ("v", "weight"): ("hidden", "kv"),
    ("o", "weight"): ("q", "hidden"),
    ("q", "bias"): ("q",),
    ("k", "bias"): ("kv",),
    ("v", "bias"): ("kv",),
    ("gate", "weight"): ("hidden", "inner"),
    ("up", "weight"): ("hidden", "inner"),
    ("down", "weight"): ("inner", "hidden"),
    ("o", "bias"): ("hidden",),
    ("down", "bias"): ("hidden",),
    ("norm", "weight"): ("hidden",),
    ("norm", "bias"): ("hidden",),
}


def full_shape(name: str, config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """Return the parameter's shape by the configuration, with ``None`` for unknown axes (or an unknown shape)."""
    weight = parse(name)
    axes = SHAPES.get((weight.kind, weight.leaf))
    sizes = _sizes(config)
    return None if axes is None else tuple(sizes.get(axis) for axis in axes)


def proven_axis(name: str, local: tuple[int, ...], tp: int, config: Mapping[str, Any], *, cut: bool) -> int | None:
    """Return the divided axis, :data:`REPLICATED` for a complete piece, or ``None`` if neither is proved.

    ``cut`` states that the parameter is divided. Then a single axis of unknown size is the divided one, if all others
    are complete.
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
    def size_of(key: str) -> int | None:
        value = config.get(key)
        return value if type(value) is int and value > 0 else None

    hidden, heads = size_of("hidden_size"), size_of("num_attention_heads")
    kv, width = size_of("num_key_value_heads") or heads, size_of("head_dim")
    if width is None and hidden and heads and hidden % heads == 0:
        width = hidden // heads
    found = {
        "hidden": hidden,
        "vocab": size_of("vocab_size"),
        "inner": size_of("intermediate_size"),
        "q": heads * width if heads and width else None,
        "kv": kv * width if kv and width else None,
    }
    return {name: size for name, size in found.items() if size}
