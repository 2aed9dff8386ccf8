"""Stored weights as pieces of Hugging Face's: one dialect per checkpoint, inferred from its names.

::

    dialect       recognised by                           rows that move
    Megatron      decoder.layers.0.self_attention.…       grouped QKV and [gate; up] are cut, experts unstacked
    Meta          layers.0.attention.wq.weight            q and k: rotary pairs 2i, 2i+1 of a head become i, i + rows/2
    PaddleNLP     llama.layers.0.self_attn.…, Paddle      linears are [in, out]: axes swapped
    HuggingFace   model.layers.0.self_attn.…              none; fused experts are cut

Inside, weights are *atoms*: Hugging Face's names without ``model.`` (see :mod:`workbench.names.frameworks`).

Sources: megatron-core 0.16.1 and Megatron-LM before core (``language_model.encoder``), Megatron-DeepSpeed;
torchtitan's ``Llama3StateDictAdapter`` and transformers' ``convert_llama_weights_to_hf.py`` for the rotary pairs (its
``Qwen3StateDictAdapter`` moves no rows); PaddleNLP 3.0 ``transformers/llama/modeling.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.checkpoint import Checkpoint
from workbench.core.rebox import ComposedBox
from workbench.names.frameworks import Geometry, links


@dataclass(frozen=True, slots=True)
class AtomPart:
    """A piece of an atom; ``piece.tensor`` is the source's position."""

    atom: str
    piece: ComposedBox


#: ``(tensor, fqn, shape, geometry)`` to the parts of a tensor, or the reason why they are unknown.
Dialect = Callable[[int, str, tuple[int, ...], Geometry], list[AtomPart] | str]


def dialect(ckpt: Checkpoint) -> tuple[str, Dialect] | None:
    """Return how the parameters of a checkpoint are named; ``None`` if they follow no known convention."""
    names = {fqn for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True) if fqn is not None and role == "param"}
    if any(_MEGATRON.match(name) for name in names):
        return "Megatron", _megatron
    if any(_META.match(name) for name in names):
        normed = any(name.endswith(".attention.q_norm.weight") for name in names)
        return "Meta", _meta_as_is if normed else _meta
    if ckpt.format.startswith("paddle"):
        return ("PaddleNLP", _paddle) if any(_PADDLE.match(name) for name in names) else None
    config = ckpt.objects.get("config")
    from_transformers = isinstance(config, Mapping) and "transformers_version" in config
    return ("HuggingFace", _hugging_face) if from_transformers or any(_HF.match(name) for name in names) else None


def is_atom(name: str) -> bool:
    """Return whether a name is one of the Llama family's."""
    return _ATOM.fullmatch(name) is not None


def hf_name(atom: str, mixtral: bool) -> str:
    """Return Hugging Face's name of an atom; experts are named as in Mixtral or as in Qwen."""
    if not _INNER.match(atom):
        return atom
    layer, _, rest = atom.partition(".mlp.")
    if mixtral and (rest == "gate.weight" or rest.startswith("experts.")):
        return f"model.{layer}.block_sparse_moe.{rest}"
    found = _EXPERT.fullmatch(atom)
    return f"model.{found['head']}{_QWEN[found['w']]}_proj.weight" if found and not mixtral else f"model.{atom}"


_EXPERT = re.compile(r"(?P<head>layers\.\d+\.mlp\.experts\.\d+\.)w(?P<w>[123])\.weight")
_QWEN = {"1": "gate", "3": "up", "2": "down"}
_MLP = r"(?:gate|up|down)_proj\.(?:weight|bias)"
_ATOM = re.compile(
    r"embed_tokens\.weight|norm\.weight|lm_head\.(?:weight|bias)|layers\.\d+\.(?:"
    r"(?:input|post_attention)_layernorm\.weight|self_attn\.(?:[qkvo]_proj\.(?:weight|bias)|[qk]_norm\.weight)|"
    rf"mlp\.(?:{_MLP}|gate\.weight|experts\.\d+\.w[123]\.weight|shared_expert\.{_MLP}|shared_expert_gate\.weight))"
)
_INNER = re.compile(r"(?:layers|embed_tokens|norm)\.")
_MEGATRON = re.compile(
    r"decoder\.layers\.\d+\.self_attention\.|(?:module\.)?language_model\.(?:encoder|transformer)\.layers\.\d+\."
)
_META = re.compile(r"layers\.\d+\.attention\.w[qkvo]\.")
_HF = re.compile(r"(?:model\.)?layers\.\d+\.self_attn\.")
_PADDLE = re.compile(r"(?:\w+\.)?layers\.\d+\.self_attn\.")


def _whole(atom: str, tensor: int, shape: tuple[int, ...], swapped: bool = False) -> AtomPart:
    zeros, axes = (0,) * len(shape), tuple(range(len(shape)))
    return AtomPart(atom, ComposedBox(tensor, zeros, shape, zeros, axes[::-1] if swapped else axes))


# ---- Megatron --------------------------------------------------------------------------------------------------------

#: Names before megatron-core → current names.
_OLD = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?:module\.)?language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\.", "decoder.final_layernorm."),
        (r"(?:module\.)?language_model\.(?:encoder|transformer)\.", "decoder."),
        (r"(?:module\.)?language_model\.", ""),
        (r"(decoder\.layers\.\d+\.)attention\.", r"\1self_attention."),
        (r"(decoder\.layers\.\d+\.)post_attention_(?:layer)?norm\.", r"\1pre_mlp_layernorm."),
        (r"(decoder\.layers\.\d+\.)input_norm\.", r"\1input_layernorm."),
        (r"(.*\.self_attention\.)query_key_value\.", r"\1linear_qkv."),
        (r"(.*\.self_attention\.)dense\.", r"\1linear_proj."),
        (r"(.*\.mlp\.)dense_h_to_4h\.", r"\1linear_fc1."),
        (r"(.*\.mlp\.)dense_4h_to_h\.", r"\1linear_fc2."),
    )
]


def _megatron(tensor: int, fqn: str, shape: tuple[int, ...], geometry: Geometry) -> list[AtomPart] | str:
    name = fqn
    for pattern, new in _OLD:
        name = pattern.sub(new, name, count=1) if pattern.match(name) else name
    if "position_embeddings" in name:
        return "learned position embeddings as in GPT-2, an architecture that is not supported"
    return _linked(tensor, name, shape, geometry)


def _linked(tensor: int, fqn: str, shape: tuple[int, ...], geometry: Geometry) -> list[AtomPart] | str:
    found = links(fqn, shape, geometry)
    if isinstance(found, str):
        return found
    return [AtomPart(link.atom, ComposedBox(tensor, link.offsets, link.sizes, link.at, link.axes)) for link in found]


# ---- Meta, torchtitan ------------------------------------------------------------------------------------------------

_META_NAMES = {
    "tok_embeddings.weight": "embed_tokens.weight",
    "norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_META_LAYER = re.compile(r"(layers\.\d+\.)(.+)", re.S)


def _meta(tensor: int, fqn: str, shape: tuple[int, ...], geometry: Geometry) -> list[AtomPart] | str:
    found = _meta_as_is(tensor, fqn, shape, geometry)
    if isinstance(found, str) or not found[0].atom.endswith((".q_proj.weight", ".k_proj.weight")):
        return found
    rows = geometry.head_dim
    if rows is None:
        return "the rows per head, which order the rotary pairs of q and k, are not stored; give a config with head_dim"
    if rows % 2 or len(shape) != 2 or shape[0] % rows:
        return f"shape {shape} does not divide into heads of {rows} rows"
    half, width = rows // 2, shape[1]
    return [
        AtomPart(
            found[0].atom, ComposedBox(tensor, (head + side, 0), (half, width), (head + side * half, 0), (0, 1), (2, 1))
        )
        for head in range(0, shape[0], rows)
        for side in (0, 1)
    ]


def _meta_as_is(tensor: int, fqn: str, shape: tuple[int, ...], geometry: Geometry) -> list[AtomPart] | str:
    """Rename only: if q and k have norms (Qwen 3 in torchtitan), angles come by halves as in Hugging Face."""
    layer = _META_LAYER.fullmatch(fqn)
    atom = _META_NAMES.get(layer[2] if layer else fqn)
    return [] if atom is None else [_whole((layer[1] if layer else "") + atom, tensor, shape)]


# ---- the others ------------------------------------------------------------------------------------------------------


_PADDLE_PREFIX = re.compile(r"\w+\.(?=layers\.|embed_tokens\.|norm\.)")
_PADDLE_LINEAR = re.compile(r"layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj\.weight")


def _paddle(tensor: int, fqn: str, shape: tuple[int, ...], geometry: Geometry) -> list[AtomPart] | str:
    atom = _PADDLE_PREFIX.sub("", fqn, count=1) if _PADDLE_PREFIX.match(fqn) else fqn
    if atom == "lm_head.weight":
        if len(shape) != 2 or shape[0] == shape[1]:
            return f"shape {shape}: rows and columns may be swapped"
        return [_whole(atom, tensor, shape, swapped=shape[0] != geometry.vocab)]
    if _PADDLE_LINEAR.fullmatch(atom):
        return [_whole(atom, tensor, shape, swapped=True)]
    return [_whole(atom, tensor, shape)] if len(shape) == 1 or atom == "embed_tokens.weight" else []


def _hugging_face(tensor: int, fqn: str, shape: tuple[int, ...], geometry: Geometry) -> list[AtomPart] | str:
    found = _linked(tensor, fqn, shape, geometry)
    if isinstance(found, str) or any(is_atom(part.atom) for part in found):
        return found
    return [_whole(fqn, tensor, shape)]
