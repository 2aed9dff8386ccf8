"""How llama.cpp's converter names and changes the weights of a Hugging Face model: tensors of a GGUF as boxes of atoms.

::

    GGUF                          atom (Hugging Face)                 change by the converter
    blk.3.attn_q, attn_k          layers.3.self_attn.q_proj, k_proj   llama: rows i and i + d/2 of a head of d rows
                                                                      become rows 2i and 2i + 1
    blk.3.attn_norm               layers.3.input_layernorm            gemma: plus 1
    blk.3.ffn_gate_exps[5]        layers.3.mlp.experts.5.w1           stacked
    blk.3.attn_qkv                q_proj, k_proj, v_proj              one above the other (phi3: one tensor in both)
    output                        lm_head                             absent if it is the embedding

Vectors and norms are stored as float32. Shapes are reversed in the file; the reader restores them.

Sources: llama.cpp's ``conversion/`` as in llama_cpp_python 0.3.36 (``llama.py``, ``qwen.py``, ``gemma.py``, ``phi.py``,
``base.py``); gguf 0.19 ``constants.py``, ``tensor_mapping.py``; files that these wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.names.frameworks import Link

#: Tensors that the converter computes from the configuration.
MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LEFT_OUT = ".rotary_emb.inv_freq"  #: a tensor that it leaves out; old checkpoints have it in every layer

_GLOBAL = {"token_embd": "embed_tokens", "output": "lm_head", "output_norm": "norm"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
#: Names in a block; whether q and k are permuted; the number added to norms.
_KNOWN: dict[str, tuple[Mapping[str, str], bool, float]] = {
    "llama": (_LLAMA, True, 0),
    "mistral3": (_LLAMA, True, 0),
    "qwen2": (_LLAMA, False, 0),
    "qwen3": (_LLAMA, False, 0),
    "qwen2moe": (_LLAMA, False, 0),
    "qwen3moe": (_LLAMA, False, 0),
    "gemma": (_LLAMA, False, 1),
    "gemma2": (_GEMMA2, False, 1),
    "gemma3": (_GEMMA2, False, 1),
    "phi3": (_PHI3, False, 0),
}
ARCHITECTURES = tuple(_KNOWN)  #: values of ``general.architecture`` whose conversion is known

MOST = 1 << 20  #: rows of q or k, and experts, up to which they are mapped
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
_EXPERTS = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}


@dataclass(frozen=True)
class Conversion:
    """The conversion of a GGUF file, as its metadata describes it.

    Attributes:
        architecture: ``general.architecture``.
        heads, groups, head_dim: of attention; ``None`` if the file has none, or another for each layer.
        weighted: whether the types were chosen with an importance matrix.
        plain: ignore the converter's changes of values: no permutation, nothing added.
    """

    architecture: str
    heads: int | None
    groups: int | None
    head_dim: int | None
    weighted: bool = False
    plain: bool = False

    def links(self, key: str, shape: tuple[int, ...]) -> list[Link] | str:
        """Return the boxes of a tensor as boxes of atoms, or a sentence that explains why they are unknown."""
        if self.architecture not in _KNOWN:
            named = repr(self.architecture[:80]) if self.architecture else "not stored"
            return f"general.architecture is {named}; how it is converted is known for {', '.join(ARCHITECTURES)}"
        if key in MADE:
            return "the converter computes it from the configuration"
        names, permuted, more = _KNOWN[self.architecture]
        stem, _, leaf = key.rpartition(".")
        if stem in _GLOBAL and leaf in ("weight", "bias"):
            return [_whole(f"{_GLOBAL[stem]}.{leaf}", shape, self._more(more, stem, leaf))]
        found = _BLOCK.fullmatch(key)
        if found is None:
            return f"no weight of {self.architecture} has this name"
        layer, name, expert, leaf = found.groups()
        prefix = f"layers.{layer}"
        if expert is not None or name.endswith("_exps"):
            return self._experts(key, shape, prefix, name, expert)
        if name == "attn_qkv" and name not in names:
            return self._qkv(key, shape, f"{prefix}.self_attn", leaf, permuted)
        if name not in names:
            return f"no weight of {self.architecture} has this name"
        atom = f"{prefix}.{names[name]}.{leaf}"
        if permuted and name in ("attn_q", "attn_k") and not self.plain:
            return self._rotary(key, atom, shape, 0, shape[0], self.heads if name == "attn_q" else self.groups)
        return [_whole(atom, shape, self._more(more, name, leaf))]

    def _more(self, more: float, name: str, leaf: str) -> float:
        return more if name.endswith("norm") and leaf == "weight" and not self.plain else 0.0

    def _rotary(
        self, key: str, atom: str, shape: tuple[int, ...], start: int, rows: int, heads: int | None
    ) -> list[Link] | str:
        """Link the rows of each head: the first half of a head is in the even rows, the second half in the odd rows."""
        if heads is None:
            count = f"{self.architecture}.attention.head_count"
            return f"{count} is not one number, but it determines how the rows of q and k are permuted"
        if not 0 < rows <= MOST or rows % (2 * heads):
            return f"{key}: {rows} rows are not {heads} heads of an even size"
        half, rest, axes = rows // heads // 2, shape[1:], tuple(range(len(shape)))
        zeros, ones = (0,) * len(rest), (1,) * len(rest)
        return [
            Link(
                atom,
                (start + 2 * half * head + side, *zeros),
                (half, *rest),
                (2 * half * head + half * side, *zeros),
                axes,
                (2, *ones),
            )
            for head in range(heads)
            for side in (0, 1)
        ]

    def _qkv(self, key: str, shape: tuple[int, ...], prefix: str, leaf: str, permuted: bool) -> list[Link] | str:
        if self.heads is None or self.groups is None or self.head_dim is None:
            return f"{self.architecture}.attention: the heads or their size are not one number; q, k, v are unknown"
        if shape[0] != (self.heads + 2 * self.groups) * self.head_dim:
            return f"{key}: {shape[0]} rows are not {self.heads} heads and {self.groups} groups of {self.head_dim}"
        found: list[Link] = []
        start, zeros = 0, (0,) * (len(shape) - 1)
        for side, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
            rows, atom = heads * self.head_dim, f"{prefix}.{side}_proj.{leaf}"
            if permuted and side != "v" and not self.plain:
                part = self._rotary(key, atom, shape, start, rows, heads)
                if isinstance(part, str):
                    return part
                found += part
            else:
                axes = tuple(range(len(shape)))
                found.append(Link(atom, (start, *zeros), (rows, *shape[1:]), (0, *zeros), axes))
            start += rows
        return found

    def _experts(
        self, key: str, shape: tuple[int, ...], prefix: str, name: str, expert: str | None
    ) -> list[Link] | str:
        """Link a stack of experts or, from older converters, one expert."""
        name = name.removesuffix("_exps")
        if name not in _EXPERTS or (expert is None and (len(shape) != 3 or shape[0] > MOST)):
            return f"{key}: shape {shape} is not a stack of experts"
        if expert is not None:
            return [_whole(f"{prefix}.mlp.experts.{expert}.{_EXPERTS[name]}.weight", shape)]
        return [
            Link(f"{prefix}.mlp.experts.{e}.{_EXPERTS[name]}.weight", (e, 0, 0), (1, *shape[1:]), (0, 0), (1, 2))
            for e in range(shape[0])
        ]


def conversion(objects: Mapping[str, Any], *, plain: bool = False) -> Conversion:
    """Return what the metadata of a GGUF file says about its conversion."""
    stated = objects.get("general.architecture")
    architecture = stated if isinstance(stated, str) else ""

    def number(name: str) -> int | None:
        value = objects.get(f"{architecture}.{name}")
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # one for each layer, all the same
            value = value[0]
        return value if type(value) is int and value > 0 else None

    heads, width = number("attention.head_count"), number("embedding_length")
    several = objects.get(f"{architecture}.attention.head_count_kv")
    groups = number("attention.head_count_kv") if several is not None else heads
    own = width // heads if heads and width else None
    weighted = any(key.startswith("quantize.imatrix.") for key in objects)
    return Conversion(architecture, heads, groups, number("attention.key_length") or own, weighted, plain)


def _whole(atom: str, shape: tuple[int, ...], more: float = 0.0) -> Link:
    zeros = (0,) * len(shape)
    return Link(atom, zeros, shape, zeros, tuple(range(len(shape))), (), more)
