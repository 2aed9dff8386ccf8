"""The decoder: Llama's layout under Hugging Face's names, as a pure function of a dict of weights.

::

    model.embed_tokens ─▶ [ input_layernorm ─ q k v (rope, grouped queries) ─ o  ─▶ + ] ─▶ model.norm ─▶ lm_head
                          [ post_attention_layernorm ─ silu(gate)·up ─ down      ─▶ + ]   (or the embedding)

With experts, ``mlp.gate`` routes every token to two of ``mlp.experts.N`` by score plus ``expert_bias``, a buffer that
balances the load. With fp8, ``down_proj`` passes through e4m3 under a scale that an amax history sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F

from tests.lab.config import Config

__all__ = ["ADAPTED", "E4M3_MAX", "LORA_SCALE", "initial", "initial_buffers", "is_norm", "loss_and_load", "shapes"]

Tensors = Mapping[str, torch.Tensor]
ADAPTED = ("q_proj", "v_proj")  #: what LoRA adapts
LORA_SCALE = 2.0
E4M3_MAX = 448.0
HISTORY = 16  #: amaxes that fp8 keeps
TOP_K = 2


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter in the order in which the model registers it."""
    h, f, kv = config.hidden, config.ffn, config.groups * config.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.padded, h)}
    for n in range(config.layers):
        layer = f"model.layers.{n}."
        attention = {"q_proj": (h, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, h)}
        for name, shape in attention.items():
            found[f"{layer}self_attn.{name}.weight"] = shape
            if config.lora and name in ADAPTED:
                found[f"{layer}self_attn.{name}.lora_A.weight"] = (config.lora, h)
                found[f"{layer}self_attn.{name}.lora_B.weight"] = (shape[0], config.lora)
        heads = [f"{layer}mlp."]
        if config.experts:
            found[f"{layer}mlp.gate.weight"] = (config.experts, h)
            heads = [f"{layer}mlp.experts.{e}." for e in range(config.experts)]
        for head in heads:
            found |= {f"{head}gate_proj.weight": (f, h), f"{head}up_proj.weight": (f, h)}
            found[f"{head}down_proj.weight"] = (h, f)
        found |= {f"{layer}input_layernorm.weight": (h,), f"{layer}post_attention_layernorm.weight": (h,)}
    found["model.norm.weight"] = (h,)
    return found if config.tied else {**found, "lm_head.weight": (config.padded, h)}


def initial(config: Config, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Random weights in fp32; another ``seed`` than the config's gives what a fresh process would begin with."""
    made = torch.Generator().manual_seed(config.seed if seed is None else seed)
    found = {}
    for name, shape in shapes(config).items():
        if is_norm(name):
            found[name] = torch.ones(shape)
        elif "lora_B" in name:
            found[name] = torch.zeros(shape)
        else:
            std = 0.02 if "embed" in name or "lm_head" in name else 1 / math.sqrt(shape[1])
            if "o_proj" in name or "down_proj" in name:
                std /= math.sqrt(2 * config.layers)
            found[name] = torch.randn(shape, generator=made) * std
    return found


def initial_buffers(config: Config) -> dict[str, torch.Tensor]:
    found = {}
    for n in range(config.layers):
        if config.experts:
            found[f"model.layers.{n}.mlp.gate.expert_bias"] = torch.zeros(config.experts)
        for name in shapes(config) if config.fp8 else ():
            if name.startswith(f"model.layers.{n}.") and name.endswith("down_proj.weight"):
                found[name.replace(".weight", ".amax_history")] = torch.zeros(HISTORY)
                found[name + "_scale"] = torch.ones(1)
    return found


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def loss_and_load(config: Config, w: Tensors, buffers: Tensors, tokens: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Mean cross-entropy of the next token, and how many tokens each expert got by the name of its bias."""
    load: dict[str, torch.Tensor] = {}
    x = F.embedding(tokens[:, :-1], w["model.embed_tokens.weight"]) * math.sqrt(config.hidden) / 2
    for n in range(config.layers):
        layer = f"model.layers.{n}."
        x = x + _attention(config, w, layer, _norm(x, w[layer + "input_layernorm.weight"]))
        inner = _norm(x, w[layer + "post_attention_layernorm.weight"])
        if config.experts:
            bias = layer + "mlp.gate.expert_bias"
            out, load[bias] = _experts(config, w, buffers, layer, inner, buffers[bias])
            x = x + out
        else:
            x = x + _mlp(config, w, buffers, layer + "mlp.", inner)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    logits = (_norm(x, w["model.norm.weight"]) @ head.T)[..., : config.vocab]
    return F.cross_entropy(logits.reshape(-1, config.vocab), tokens[:, 1:].reshape(-1)), load


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _attention(config: Config, w: Tensors, layer: str, x: torch.Tensor) -> torch.Tensor:
    rows, length, width = x.shape[0], x.shape[1], config.head_dim
    sides = []
    for name, heads in (("q_proj", config.heads), ("k_proj", config.groups), ("v_proj", config.groups)):
        side = x @ _adapted(config, w, f"{layer}self_attn.{name}").T
        sides.append(side.view(rows, length, heads, width).transpose(1, 2))
    q, k, v = _rope(sides[0], config.rope_theta), _rope(sides[1], config.rope_theta), sides[2]
    each = config.heads // config.groups
    scores = q @ k.repeat_interleave(each, 1).transpose(-1, -2) / math.sqrt(width)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(each, 1)
    return mixed.transpose(1, 2).reshape(rows, length, config.hidden) @ w[f"{layer}self_attn.o_proj.weight"].T


def _adapted(config: Config, w: Tensors, name: str) -> torch.Tensor:
    if not config.lora or not name.endswith(ADAPTED):
        return w[f"{name}.weight"]
    return w[f"{name}.weight"] + LORA_SCALE * w[f"{name}.lora_B.weight"] @ w[f"{name}.lora_A.weight"]


def _rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of pairs ``(i, i + width / 2)``, Hugging Face's order."""
    cos, sin = _angles(x.shape[-2], x.shape[-1], theta)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@cache
def _angles(length: int, width: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, width, 2) / width))
    return angle.cos(), angle.sin()


def _mlp(config: Config, w: Tensors, buffers: Tensors, head: str, x: torch.Tensor) -> torch.Tensor:
    down = w[f"{head}down_proj.weight"]
    if config.fp8:
        down = _Fp8.apply(down, buffers[f"{head}down_proj.weight_scale"])
    return (F.silu(x @ w[f"{head}gate_proj.weight"].T) * (x @ w[f"{head}up_proj.weight"].T)) @ down.T


def _experts(
    config: Config, w: Tensors, buffers: Tensors, layer: str, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every expert sees every token and is weighed by 0 where it was not chosen: slow, and simple."""
    score = (x @ w[f"{layer}mlp.gate.weight"].T).softmax(-1)
    chosen = torch.zeros_like(score).scatter(-1, (score + bias).topk(TOP_K, -1).indices, 1.0)
    weight = score * chosen
    weight = weight / weight.sum(-1, keepdim=True)
    parts = [_mlp(config, w, buffers, f"{layer}mlp.experts.{e}.", x) for e in range(config.experts)]
    mixed = sum(weight[..., e : e + 1] * part for e, part in enumerate(parts))
    assert isinstance(mixed, torch.Tensor)
    return mixed, chosen.sum((0, 1))


class _Fp8(torch.autograd.Function):
    """Through e4m3 and back; the gradient passes as if it had not been."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (weight * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
