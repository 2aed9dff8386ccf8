"""How frameworks name and fuse the same weights: tensors as boxes of *atoms*.

An atom is the smallest unfused weight, under its Hugging Face name without the leading ``model.``. A link says which
box of a stored tensor is which box of an atom; atoms make two checkpoints comparable, whatever each of them fuses::

    Megatron                                              atoms                        Hugging Face
    decoder.layers.3.self_attention.linear_qkv.weight ──▶ layers.3.self_attn.q_proj  ◀── model.layers.3.self_attn.q_proj
      group 0 │ q q k v │ group 1 │ q q k v │         ──▶ layers.3.self_attn.k_proj  ◀── …
    decoder.layers.3.mlp.linear_fc1.weight [gate; up]  ──▶ layers.3.mlp.gate_proj     ◀──
    decoder.layers.3.mlp.experts.local_experts.5.…     ──▶ layers.3.mlp.experts.5.w1  ◀── mlp.experts.gate_up_proj[5]

GGUF, whose converter also changes values: :mod:`workbench.names.gguf`.

Sources: megatron-core 0.16.1 (``transformer/attention.py`` for the grouped QKV order, ``transformer/mlp.py`` for
[gate; up]), transformers 5.23 (Llama, Qwen 2/3, Mixtral; fused experts in memory, ``w1/w3/w2`` on disk).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model's configuration says about the rows of its weights; ``None`` if no file states it.

    Attributes:
        heads: number of query heads.
        groups: number of key and value heads.
        head_dim: rows per head.
        vocab: rows of the vocabulary.
        interleaved: whether a Hugging Face stack ``experts.gate_up_proj`` has gate and up row by row (gpt-oss), or one
            after the other, as every other model does.
    """

    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    interleaved: bool | None = None

    def filled(self, other: Geometry) -> Geometry:
        """Return these facts, with missing ones taken from ``other``."""
        mine = (getattr(self, name) for name in self.__slots__)
        theirs = (getattr(other, name) for name in self.__slots__)
        return Geometry(*(a if a is not None else b for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Link:
    """A box of a tensor that is a box of an atom.

    Attributes:
        atom: name of the atom.
        offsets, sizes: the box in the tensor's axes.
        at: first element in the atom, in the atom's axes.
        axes: the tensor's axis for each axis of the atom; the others have size 1 in the box.
        steps: in the tensor, for each of its axes: 2 if the box has every other element; empty if all are 1.
        more: the number by which the tensor's elements exceed the atom's.
    """

    atom: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...] = ()
    more: float = 0.0


def geometry(objects: Mapping[str, Any]) -> Geometry:
    """Return the geometry that a checkpoint's own objects describe: Hugging Face's ``config``, Megatron's ``args``."""
    config = objects.get("config")
    if isinstance(config, Mapping):
        heads, hidden = _int(config, "num_attention_heads"), _int(config, "hidden_size")
        own = hidden // heads if heads and hidden else None
        groups = _int(config, "num_key_value_heads") or heads
        head_dim, vocab = _int(config, "head_dim") or own, _int(config, "vocab_size")
        return Geometry(heads, groups, head_dim, vocab, _interleaved(config))
    args = objects.get("args")
    facts = args if isinstance(args, Mapping) else getattr(args, "state", None)
    if isinstance(facts, Mapping):
        heads = _int(facts, "num_attention_heads")
        groups = _int(facts, "num_query_groups") if facts.get("group_query_attention") else heads
        return Geometry(heads, groups, _int(facts, "kv_channels"), _int(facts, "vocab_size"))
    return Geometry()


def links(fqn: str, shape: tuple[int, ...], facts: Geometry) -> list[Link] | str:
    """Return the boxes of a parameter as boxes of atoms, or a sentence that explains why they are unknown."""
    for pattern, atom in _MEGATRON:
        found = pattern.fullmatch(fqn)
        if found:
            return _megatron(fqn, shape, facts, found.groupdict(), atom)
    found = _FUSED_EXPERTS.fullmatch(fqn)
    if found and len(shape) == 3 and not facts.interleaved:  # gpt-oss's stacks are atoms: no other names are in use
        return _fused_experts(shape, found["layer"], found["what"])
    found = _MIXTRAL.fullmatch(fqn)
    if found:
        fqn = f"layers.{found['layer']}.mlp.{found['rest']}"
    fqn = fqn.removeprefix("model.")
    found = _QWEN_EXPERT.fullmatch(fqn)
    if found:
        name = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[found["what"]]
        fqn = f"{found['head']}{name}.weight"
    return [_whole(fqn, shape)]


_LAYER = r"decoder\.layers\.(?P<layer>\d+)\."
_MEGATRON: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), atom)
    for pattern, atom in (
        (r"embedding\.word_embeddings\.weight", "embed_tokens.weight"),
        (r"output_layer\.weight", "lm_head.weight"),
        (r"decoder\.final_layernorm\.(?P<leaf>weight|bias)", "norm.{leaf}"),
        (_LAYER + r"self_attention\.linear_qkv\.(?P<leaf>weight|bias)", "qkv"),
        (_LAYER + r"self_attention\.linear_proj\.(?P<leaf>weight|bias)", "layers.{layer}.self_attn.o_proj.{leaf}"),
        (_LAYER + r"self_attention\.(?P<side>[qk])_layernorm\.weight", "layers.{layer}.self_attn.{side}_norm.weight"),
        (
            _LAYER + r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)(?P<leaf>weight|bias)",
            "layers.{layer}.input_layernorm.{leaf}",
        ),
        (
            _LAYER + r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(?P<leaf>weight|bias)",
            "layers.{layer}.post_attention_layernorm.{leaf}",
        ),
        (_LAYER + r"mlp\.linear_fc1\.(?P<leaf>weight|bias)", "gate_up"),
        (_LAYER + r"mlp\.linear_fc2\.(?P<leaf>weight|bias)", "layers.{layer}.mlp.down_proj.{leaf}"),
        (_LAYER + r"mlp\.router\.weight", "layers.{layer}.mlp.gate.weight"),
        (_LAYER + r"mlp\.shared_experts\.linear_fc1\.(?P<leaf>weight)", "shared_gate_up"),
        (_LAYER + r"mlp\.shared_experts\.linear_fc2\.weight", "layers.{layer}.mlp.shared_expert.down_proj.weight"),
        (_LAYER + r"mlp\.shared_experts\.gate_weight", "layers.{layer}.mlp.shared_expert_gate.weight"),
        (
            _LAYER
            + r"mlp\.experts\.(?:local_experts\.(?P<expert>\d+)\.linear_fc1\.weight|linear_fc1\.weight(?P<te>\d+))",
            "expert_gate_up",
        ),
        (
            _LAYER
            + r"mlp\.experts\.(?:local_experts\.(?P<expert>\d+)\.linear_fc2\.weight|linear_fc2\.weight(?P<te>\d+))",
            "layers.{layer}.mlp.experts.{expert}.w2.weight",
        ),
        (_LAYER + r"mlp\.experts\.experts\.linear_fc(?P<fc>[12])\.weight", "stacked_experts"),
    )
]
_FUSED_EXPERTS = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<what>gate_up_proj|down_proj)")
_MIXTRAL = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.block_sparse_moe\.(?P<rest>.+)")
_QWEN_EXPERT = re.compile(r"(?P<head>layers\.\d+\.mlp\.experts\.\d+\.)(?P<what>gate_proj|up_proj|down_proj)\.weight")


def _megatron(
    fqn: str, shape: tuple[int, ...], facts: Geometry, part: dict[str, str | None], atom: str
) -> list[Link] | str:
    part = part | {"expert": part.get("expert") or part.get("te")}
    layer = f"layers.{part.get('layer')}"
    if atom == "qkv":
        return _qkv(fqn, shape, facts, f"{layer}.self_attn", str(part["leaf"]))
    if atom in ("gate_up", "shared_gate_up"):
        owner = "mlp" if atom == "gate_up" else "mlp.shared_expert"
        names = [f"{layer}.{owner}.{side}_proj.{part['leaf']}" for side in ("gate", "up")]
        return _halves(fqn, shape, 0, names)
    if atom == "expert_gate_up":
        names = [f"{layer}.mlp.experts.{part['expert']}.{name}.weight" for name in ("w1", "w3")]
        return _halves(fqn, shape, 0, names)
    if atom == "stacked_experts":
        return _fused_experts(shape, str(part["layer"]), "gate_up_proj" if part["fc"] == "1" else "down_proj")
    return [_whole(atom.format(**part), shape)]


def _qkv(fqn: str, shape: tuple[int, ...], facts: Geometry, prefix: str, leaf: str) -> list[Link] | str:
    """Link fused QKV rows, ordered by query group: the group's queries, then its key, then its value."""
    heads, groups, rows = facts.heads, facts.groups, facts.head_dim
    if heads is None or groups is None or rows is None:
        return f"{fqn}: neither checkpoint stores heads, query groups and head size; the rows of q, k, v are unknown"
    if groups <= 0 or heads % groups or shape[0] != (heads + 2 * groups) * rows:
        return f"{fqn}: {shape[0]} rows are not {heads} heads and {groups} groups of {rows}"
    each = heads // groups
    found, rest, zeros = [], shape[1:], (0,) * (len(shape) - 1)
    axes = tuple(range(len(shape)))
    for group in range(groups):
        start = group * (each + 2) * rows
        for side, first, count in (("q", 0, each), ("k", each, 1), ("v", each + 1, 1)):
            at = group * count * rows
            box = ((start + first * rows, *zeros), (count * rows, *rest))
            found.append(Link(f"{prefix}.{side}_proj.{leaf}", *box, (at, *zeros), axes))
    return found


def _halves(fqn: str, shape: tuple[int, ...], axis: int, names: list[str]) -> list[Link] | str:
    if shape[axis] % 2:
        return f"{fqn}: {shape[axis]} rows are not [gate; up]"
    half = shape[axis] // 2
    size = (*shape[:axis], half, *shape[axis + 1 :])
    axes, zeros = tuple(range(len(shape))), (0,) * len(shape)
    starts = [zeros, (*zeros[:axis], half, *zeros[axis + 1 :])]
    return [Link(name, start, size, zeros, axes) for name, start in zip(names, starts, strict=True)]


def _fused_experts(shape: tuple[int, ...], layer: str, what: str) -> list[Link] | str:
    """Link fused experts: ``[experts, 2·inter, hidden]`` is w1 above w3, ``[experts, hidden, inter]`` is w2."""
    if len(shape) != 3 or (what == "gate_up_proj" and shape[1] % 2):
        return f"layers.{layer}.mlp.experts.{what}: shape {shape} is not a stack of experts"
    found = []
    for expert in range(shape[0]):
        prefix = f"layers.{layer}.mlp.experts.{expert}"
        if what == "down_proj":
            found.append(Link(f"{prefix}.w2.weight", (expert, 0, 0), (1, *shape[1:]), (0, 0), (1, 2)))
            continue
        half = shape[1] // 2
        for side, name in enumerate(("w1", "w3")):
            box = ((expert, side * half, 0), (1, half, shape[2]))
            found.append(Link(f"{prefix}.{name}.weight", *box, (0, 0), (1, 2)))
    return found


def _whole(atom: str, shape: tuple[int, ...]) -> Link:
    zeros = (0,) * len(shape)
    return Link(atom, zeros, shape, zeros, tuple(range(len(shape))))


def _interleaved(config: Mapping[str, Any]) -> bool | None:
    """Return whether a configuration is gpt-oss's, or that of a model with other modalities around it."""
    names = []
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            listed = part.get("architectures")
            names += [part.get("model_type"), *(listed if isinstance(listed, list) else ())]
    known = [name.replace("_", "").lower() for name in names if isinstance(name, str)]
    return any(name.startswith("gptoss") for name in known) if known else None


def _int(facts: Mapping[Any, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
