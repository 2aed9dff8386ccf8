"""What the twenty-first half trains: small networks, optimizers, and what happens to them between a load and a save."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.live import Loop
from tests.lab.optimizers import Optimizer

Tensor = torch.Tensor
Act = Callable[[Any], None]


def randn(number: int, *shape: int) -> Tensor:
    """Normal numbers; the same for the same number."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1_000 + number))


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with activations between."""
    parts: list[nn.Module] = []
    for n in range(len(sizes) - 1):
        parts += [nn.Linear(sizes[n], sizes[n + 1])] + ([act()] if n < len(sizes) - 2 else [])
    return nn.Sequential(*parts)


class Bench(Loop):
    """A loop that stores its config, the place of its sampler and the samples seen.

    Attributes:
        width: numbers of a sample; rows: samples of an update; epoch: samples of an epoch.
        keeps: remember each state, for faults that read an older save.
    """

    layouts = ("torch_save", "torch_save", "folder", "lightning")
    width = 24
    rows = 12
    epoch = 1 << 30
    keeps = False
    kept: ClassVar[dict[str, dict[int, Any]]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["config"] = {
            "learning_rate": config.lr,
            "weight_decay": config.weight_decay,
            "batch_size": self.rows,
            "max_grad_norm": self.clip,
            "max_steps": config.total,
        }
        self.extra["sampler"] = {"epoch": 0, "next_index": 0, "seed": 77}
        self.extra["samples_seen"] = 0

    def build(self) -> nn.Module:
        return mlp(self.width, 40, 40, self.width)

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return self.build()

    @property
    def size(self) -> int:
        return int(self.extra["config"]["batch_size"])

    def place(self) -> int:
        told = self.extra["sampler"]
        return 1_000_003 * told["seed"] + 50_021 * told["epoch"] + told["next_index"]

    def tokens(self) -> Tensor:
        return randn(self.place(), self.size, self.width)

    def target(self, x: Tensor) -> Tensor:
        return torch.sin(x @ randn(1, self.width, self.width) / 3) + 0.1 * x

    def error(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x), self.target(x))

    def loss(self, x: Tensor) -> Tensor:
        found, more = self.error(x), getattr(self.module, "probe", None)
        return found if more is None else found + 0.1 * (more(x[:, :6].float() / 9) - 0.4).pow(2).mean()

    def update(self) -> None:
        size = self.size
        super().update()
        told = self.extra["sampler"]
        told["next_index"] += size
        if told["next_index"] >= self.epoch:
            told |= {"epoch": told["epoch"] + 1, "next_index": 0}
        self.extra["samples_seen"] += size
        if self.keeps:
            shelf = self.kept.setdefault(type(self).__name__, {})
            if self.step == 1:
                shelf.clear()
            shelf[self.step] = copy.deepcopy(self.content())

    def ago(self, updates: int) -> Any:
        return self.kept[type(self).__name__][self.step - updates]


class Text(Bench):
    """A language model on the lab's tokens; the sampler counts rows."""

    rows = 4
    layers = 2
    tied = False

    def build(self) -> nn.Module:
        return Gpt(self.config.padded, self.layers, self.tied)

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return batch(self.config.but(batch=self.size), told["next_index"] + 5000 * told["epoch"], told["seed"])

    def error(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


# ---- language models -------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """GPT-2's linear layer: the matrix is in × out."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(a, b) / math.sqrt(a)), nn.Parameter(torch.zeros(b))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = True) -> Tensor:
    """Attention of as many heads; fewer key heads are repeated."""
    d = q.shape[-1] // heads
    q, k, v = (one.unflatten(-1, (-1, d)).transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(heads // one.shape[1], 1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(width, 3 * width), "c_proj": Conv1D(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(width, 4 * width), "c_proj": Conv1D(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        x = x + self.attn["c_proj"](attend(q, k, v, 4))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab: int, layers: int, tied: bool, width: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab, width), "wpe": nn.Embedding(32, width)})
        self.transformer["h"] = nn.ModuleList(GptBlock(width) for _ in range(layers))
        self.transformer["ln_f"] = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.transformer["wte"].weight, std=0.3)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        t = self.transformer
        x = t["wte"](tokens) + t["wpe"].weight[: tokens.shape[1]]
        for block in t["h"]:
            x = block(x)
        return self.lm_head(t["ln_f"](x))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


def turned(x: Tensor, heads: int) -> Tensor:
    """Rotary embedding, halves of each head."""
    d, length = x.shape[-1] // heads, x.shape[1]
    angle = torch.outer(torch.arange(length).float(), 50.0 ** -(torch.arange(0, d, 2) / d))[:, None]
    a, b = x.unflatten(-1, (heads, d)).chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(2).to(x.dtype)


class Bank(nn.Module):
    """Experts in two tensors, in × out as gpt-oss keeps them; gate and up are neighbours in the columns."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, width, 2 * inner) / math.sqrt(width))
        self.down_proj = nn.Parameter(torch.randn(count, inner, width) / math.sqrt(inner))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        both = torch.einsum("bli,eio->belo", x, self.gate_up_proj)
        inner = F.silu(both[..., ::2]) * both[..., 1::2]
        return torch.einsum("belo,eoi,ble->bli", inner, self.down_proj, weight)


class MoeMlp(nn.Module):
    def __init__(self, width: int, inner: int, count: int, fused: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.fused = fused
        self.experts: nn.Module = (
            Bank(width, inner, count) if fused else nn.ModuleList(Gated(width, inner) for _ in range(count))
        )

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).softmax(-1)
        top = score.topk(2, -1).indices
        weight = score * torch.zeros_like(score).scatter(-1, top, 1.0)
        weight = weight / weight.sum(-1, keepdim=True)
        if self.fused:
            return self.experts(x, weight)
        return sum(weight[..., e : e + 1] * one(x) for e, one in enumerate(self.experts))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedGated(nn.Module):
    """Gate over up in one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, ffn: nn.Module, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width), RmsNorm(width)
        sizes = {"q_proj": width, "k_proj": width // 2, "v_proj": width // 2, "o_proj": width}
        if fused:
            sizes = {"qkv_proj": 2 * width, "o_proj": width}
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, out, bias=False) for name, out in sizes.items()})
        self.mlp = ffn

    def forward(self, x: Tensor) -> Tensor:
        h, m = self.input_layernorm(x), self.self_attn
        if self.fused:
            q, k, v = m["qkv_proj"](h).split([x.shape[-1], x.shape[-1] // 2, x.shape[-1] // 2], -1)
        else:
            q, k, v = m["q_proj"](h), m["k_proj"](h), m["v_proj"](h)
        x = x + m["o_proj"](attend(turned(q, self.heads), turned(k, self.heads // 2), v, self.heads))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaNet(nn.Module):
    def __init__(self, vocab: int, layers: int, width: int, heads: int, ffn: Any, fused: bool) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(vocab, width), "norm": RmsNorm(width)})
        self.model["layers"] = nn.ModuleList(LlamaBlock(width, heads, ffn(width), fused) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x)
        return self.lm_head(self.model["norm"](x))


class Llama(Text):
    """Grouped queries; ``ffn`` makes the MLP of a width."""

    heads = 4
    deep = 32
    fused = False
    layers = 3

    def ffn(self, width: int) -> nn.Module:
        return Gated(width, 2 * width)

    def build(self) -> nn.Module:
        return LlamaNet(self.config.padded, self.layers, self.deep, self.heads, self.ffn, self.fused)


class Phi(Llama):
    fused = True

    def ffn(self, width: int) -> nn.Module:
        return FusedGated(width, 2 * width)


class Mixtral(Llama):
    layers = 2

    def ffn(self, width: int) -> nn.Module:
        return MoeMlp(width, width, 4, False)


class Oss(Mixtral):
    def ffn(self, width: int) -> nn.Module:
        return MoeMlp(width, width, 4, True)


class MambaNet(nn.Module):
    """A diagonal state-space model in small, with the names of Mamba."""

    def __init__(self, vocab: int, width: int = 20, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.norm_f = nn.Embedding(vocab, width), RmsNorm(width)
        parts: Callable[[], dict[str, nn.Module]] = lambda: {  # noqa: E731
            "norm": RmsNorm(width),
            "in_proj": nn.Linear(width, 2 * width, bias=False),
            "conv1d": nn.Conv1d(width, width, 3, groups=width, padding=2),
            "dt_proj": nn.Linear(width, width),
            "out_proj": nn.Linear(width, width, bias=False),
        }
        self.layers = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(layers))
        for layer in self.layers:
            layer.register_parameter("A_log", nn.Parameter(torch.log(torch.arange(1, width + 1).float() / 4)))
            layer.register_parameter("D", nn.Parameter(torch.ones(width)))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for m in self.layers:
            h, z = m["in_proj"](m["norm"](x)).chunk(2, -1)
            h = F.silu(m["conv1d"](h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            keep = torch.exp(-F.softplus(m["dt_proj"](h)) * m.A_log.exp())
            held, found = torch.zeros_like(h[:, 0]), []
            for t in range(x.shape[1]):
                held = keep[:, t] * held + (1 - keep[:, t]) * h[:, t]
                found.append(held)
            x = x + m["out_proj"]((torch.stack(found, 1) + m.D * h) * F.silu(z))
        return self.lm_head(self.norm_f(x))


class Mamba(Text):
    def build(self) -> nn.Module:
        return MambaNet(self.config.padded)


class BartNet(nn.Module):
    """Encoder and decoder of GRUs with attention between them; one embedding for both."""

    def __init__(self, vocab: int, width: int = 24) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.encoder, self.decoder = (
            nn.GRU(width, width, 1, batch_first=True),
            nn.GRU(width, width, 1, batch_first=True),
        )
        self.cross_attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.layer_norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(tokens)
        seen, held = self.encoder(x[:, :6])
        y, _ = self.decoder(x, held)
        return self.out(self.layer_norm(y + self.cross_attn(y, seen, seen, need_weights=False)[0]))


class Bart(Text):
    def build(self) -> nn.Module:
        return BartNet(self.config.padded)


# ---- vision, diffusion, detection ------------------------------------------------------------------------------------


class VitNet(nn.Module):
    def __init__(self, width: int = 24, depth: int = 3, classes: int = 6) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 3, 3)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 5, width))
        parts: Callable[[], dict[str, nn.Module]] = lambda: {  # noqa: E731
            "norm1": nn.LayerNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "proj": nn.Linear(width, width),
            "norm2": nn.LayerNorm(width),
            "fc1": nn.Linear(width, 2 * width),
            "fc2": nn.Linear(2 * width, width),
        }
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for m in self.blocks:
            q, k, v = m["qkv"](m["norm1"](x)).chunk(3, -1)
            x = x + m["proj"](attend(q, k, v, 4, False))
            x = x + m["fc2"](F.gelu(m["fc1"](m["norm2"](x))))
        return self.head(self.norm(x)[:, 0])


class Image(Bench):
    """Classifies 6 × 6 pictures of three channels."""

    width = 3 * 36

    def build(self) -> nn.Module:
        return VitNet()

    def error(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x.view(-1, 3, 6, 6) + 0.5), (x @ randn(2, self.width, 6)).argmax(1))


class Residual(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(a, b, 3, padding=1, bias=False), nn.Conv2d(b, b, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(b), nn.BatchNorm2d(b)
        self.downsample = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.downsample(x))


class ResNet(Image):
    def build(self) -> nn.Module:
        parts = {"conv1": nn.Conv2d(3, 12, 3, padding=1), "layer1": Residual(12, 12), "layer2": Residual(12, 16)}
        return _Stages(parts, 16, 6)


class _Stages(nn.Module):
    """Stages by name, a mean over the picture, and ``fc``."""

    def __init__(self, parts: dict[str, nn.Module], width: int, classes: int) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.stages, self.fc = tuple(parts), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


class DitNet(nn.Module):
    """A denoiser of tokens whose norms are steered by the time."""

    def __init__(self, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = nn.Linear(9, width), mlp(4, width, width, act=nn.SiLU)
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, 4, width))
        parts: Callable[[], dict[str, nn.Module]] = lambda: {  # noqa: E731
            "qkv": nn.Linear(width, 3 * width),
            "proj": nn.Linear(width, width),
            "adaLN_modulation": nn.Linear(width, 4 * width),
            "fc1": nn.Linear(width, 2 * width),
            "fc2": nn.Linear(2 * width, width),
        }
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(depth))
        self.final_layer = nn.Linear(width, 9)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, c = self.x_embedder(x) + self.pos_embed, self.t_embedder(t)
        for m in self.blocks:
            a, b, d, e = m["adaLN_modulation"](F.silu(c))[:, None].chunk(4, -1)
            q, k, v = m["qkv"](F.layer_norm(h, h.shape[-1:]) * (1 + a) + b).chunk(3, -1)
            h = h + m["proj"](attend(q, k, v, 4, False))
            h = h + m["fc2"](F.gelu(m["fc1"](F.layer_norm(h, h.shape[-1:]) * (1 + d) + e)))
        return self.final_layer(F.layer_norm(h, h.shape[-1:]))


class Dit(Bench):
    """Diffusion; an average of the weights is stored beside them as a state dict of its own."""

    width = 36
    decay = 0.97

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema_model"] = {n: w.detach().clone() for n, w in self.module.state_dict().items()}
        self.extra["ema_state"] = {"decay": self.decay, "optimization_step": 0}

    def build(self) -> nn.Module:
        return DitNet()

    def error(self, x: Tensor) -> Tensor:
        t, clean = x[:, :4].sigmoid(), x.view(-1, 4, 9).cumsum(1) / 2
        dirt = x.roll(1, 0).view(-1, 4, 9)
        mixed = clean * t[:, :1, None] + dirt * (1 - t[:, :1, None])
        return F.mse_loss(self.module(mixed, t), dirt)

    def update(self) -> None:
        super().update()
        told = self.extra["ema_state"]
        told["optimization_step"] += 1
        decay = min(told["decay"], (1 + told["optimization_step"]) / (10 + told["optimization_step"]))
        for n, w in self.module.state_dict().items():
            if n in self.extra["ema_model"]:
                self.extra["ema_model"][n].lerp_(w, 1 - decay)


class RetinaNet(nn.Module):
    """A backbone, a pyramid of two levels, towers shared by the levels."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"conv1": nn.Conv2d(3, width, 3, padding=1), "bn1": nn.BatchNorm2d(width)})
        self.body["conv2"], self.body["bn2"] = nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width)
        self.fpn = nn.ModuleDict({"inner_blocks": nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))})
        self.fpn["layer_blocks"] = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.cls_logits, self.bbox_reg = nn.Conv2d(width, 5, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        b, f = self.body, self.fpn
        one = F.relu(b["bn1"](b["conv1"](x)))
        two = F.relu(b["bn2"](b["conv2"](one)))
        low, high = f["inner_blocks"][0](one), f["inner_blocks"][1](two)
        low = low + F.interpolate(high, scale_factor=2)
        levels = [f["layer_blocks"][n](h) for n, h in enumerate((low, high))]
        return [(self.cls_logits(h).mean((2, 3)), self.bbox_reg(h).mean((2, 3))) for h in levels]


class Retina(Image):
    rows = 8

    def build(self) -> nn.Module:
        return RetinaNet()

    def error(self, x: Tensor) -> Tensor:
        want = (x @ randn(3, self.width, 5)).argmax(1)
        found = self.module(x.view(-1, 3, 6, 6) * 1.3 + 0.6)
        return sum(F.cross_entropy(c, want) + F.smooth_l1_loss(b, x[:, 9:13].tanh()) for c, b in found)


class Dino(Bench):
    """A student, an averaged teacher and the centre of its outputs."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"student": mlp(24, 40, 10), "teacher": mlp(24, 40, 10)})
        found["teacher"].load_state_dict(found["student"].state_dict())
        found["teacher"].requires_grad_(False)
        found.register_buffer("center", torch.zeros(1, 10))
        return found

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        with torch.no_grad():
            t = m["teacher"](x)
            want = ((t - m.center) / 0.3).softmax(-1)
            m.center.lerp_(t.mean(0, keepdim=True), 0.1)
        return F.cross_entropy(m["student"](x + 0.2 * x.roll(1, 1)) / 0.5, want) + self.target(x)[:, :10].mean() * 0

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for a, b in zip(self.module["teacher"].parameters(), self.module["student"].parameters(), strict=True):
                a.lerp_(b, 0.03)


# ---- control, graphs, recommendation, speech, adapters ---------------------------------------------------------------


class Td3(Bench):
    """Twin critics and an actor, averaged targets of all, an optimizer for each of both sides."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"actor": mlp(24, 32, 4), "critic_1": mlp(28, 32, 1), "critic_2": mlp(28, 32, 1)})
        for name in list(found):
            found[f"{name}_target"] = copy.deepcopy(found[name]).requires_grad_(False)
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        critics = [*m["critic_1"].parameters(), *m["critic_2"].parameters()]
        return [torch.optim.Adam(m["actor"].parameters(), lr=lr), torch.optim.Adam(critics, lr=2 * lr)]

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        with torch.no_grad():
            after = torch.cat([x.roll(1, 1), m["actor_target"](x.roll(1, 1)).tanh()], 1)
            want = x[:, :1].sin() + 0.9 * torch.minimum(m["critic_1_target"](after), m["critic_2_target"](after))
        done = torch.cat([x, x[:, 4:8].tanh()], 1)
        fit = F.mse_loss(m["critic_1"](done), want) + F.mse_loss(m["critic_2"](done), want)
        return fit - 0.05 * m["critic_1"](torch.cat([x, m["actor"](x).tanh()], 1)).mean()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for name in ("actor", "critic_1", "critic_2"):
                pairs = zip(self.module[f"{name}_target"].parameters(), self.module[name].parameters(), strict=True)
                for a, b in pairs:
                    a.lerp_(b, 0.02)


class Norms(Bench):
    """A policy gradient on observations that running statistics standardise."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"policy": mlp(24, 32, 5, act=nn.Tanh), "value": mlp(24, 32, 1, act=nn.Tanh)})
        for name, one in (("obs_mean", torch.zeros(24)), ("obs_var", torch.ones(24)), ("obs_count", torch.zeros(1))):
            found.register_buffer(name, one)
        return found

    def error(self, x: Tensor) -> Tensor:
        m, x = self.module, 1.7 * x + 0.8
        with torch.no_grad():
            m.obs_count += len(x)
            share = len(x) / m.obs_count
            m.obs_mean.lerp_(x.mean(0), float(share))
            m.obs_var.lerp_((x - m.obs_mean).pow(2).mean(0), float(share))
        x = (x - m.obs_mean) / (m.obs_var + 1e-6).sqrt()
        gain = (x[:, 1] - m["value"](x)[:, 0]).detach()
        acts = (x[:, 0].abs() * 5).long() % 5
        return (
            F.mse_loss(m["value"](x)[:, 0], x[:, 2].cos()) + 0.3 * (gain * F.cross_entropy(m["policy"](x), acts)).mean()
        )


class Sage(Bench):
    """A graph network: own features and the mean of the neighbours, with batch norms."""

    def build(self) -> nn.Module:
        convs = nn.ModuleList(nn.ModuleDict({"lin_l": nn.Linear(24, 24), "lin_r": nn.Linear(24, 24)}) for _ in range(3))
        norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(3))
        return nn.ModuleDict({"convs": convs, "norms": norms, "lin": nn.Linear(24, 24)})

    def error(self, x: Tensor) -> Tensor:
        m, h = self.module, x + 0.3
        for conv, norm in zip(m["convs"], m["norms"], strict=True):
            near = (h.roll(1, 0) + h.roll(2, 0) + h.roll(-3, 0)) / 3
            h = F.relu(norm(conv["lin_l"](near) + conv["lin_r"](h)))
        return F.mse_loss(m["lin"](h), self.target(x))


class Tower(Bench):
    """A recommender: tables of users and items, a tower each."""

    rows = 32

    def build(self) -> nn.Module:
        tables = nn.ModuleDict({"user": nn.Embedding(60, 12), "item": nn.Embedding(60, 12)})
        towers = nn.ModuleDict({"user": mlp(36, 24, 8, act=nn.ReLU), "item": mlp(36, 24, 8, act=nn.ReLU)})
        return nn.ModuleDict({"embedding": tables, "tower": towers})

    def error(self, x: Tensor) -> Tensor:
        ids = {"user": (x[:, 0].abs() * 25).long() % 60, "item": (x[:, 1].abs() * 25).long() % 60}
        m = self.module
        u, v = (m["tower"][n](torch.cat([m["embedding"][n](ids[n]), x], 1)) for n in ("user", "item"))
        return F.mse_loss((u * v).sum(1) / 3, torch.cos(ids["user"].float()) + torch.sin(ids["item"].float()))


class Ctc(Bench):
    """Speech: convolutions, a GRU in both directions, a batch norm and a classifier of frames."""

    width = 8 * 8
    rows = 8

    def build(self) -> nn.Module:
        convs = nn.ModuleList([nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)])
        rnn = nn.GRU(16, 12, 1, batch_first=True, bidirectional=True)
        return nn.ModuleDict({"convs": convs, "norm": nn.BatchNorm1d(16), "rnn": rnn, "fc": nn.Linear(24, 7)})

    def error(self, x: Tensor) -> Tensor:
        m, rows = self.module, x.view(-1, 8, 8) * 1.4 + 0.4
        h = F.gelu(m["convs"][1](F.gelu(m["convs"][0](rows))))
        h = m["fc"](m["rnn"](m["norm"](h).transpose(1, 2))[0])
        return F.cross_entropy(h.flatten(0, 1), (rows.transpose(1, 2) @ randn(4, 8, 7)).argmax(-1).flatten())


class Low(nn.Module):
    """A frozen matrix and a low-rank one beside it, under peft's names."""

    def __init__(self, a: int, b: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(a, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, b, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Peft(Bench):
    def build(self) -> nn.Module:
        return nn.ModuleDict({"q_proj": Low(24, 32), "v_proj": Low(32, 32), "down_proj": Low(32, 24)})

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        return F.mse_loss(m["down_proj"](F.silu(m["v_proj"](F.silu(m["q_proj"](x))))), self.target(x))


class Flow(Bench):
    """Affine couplings with an activation norm that the first batch sets."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"nets": nn.ModuleList(mlp(12, 28, 24, act=nn.ReLU) for _ in range(3))})
        found.register_parameter("loc", nn.Parameter(torch.zeros(24)))
        found.register_parameter("log_scale", nn.Parameter(torch.zeros(24)))
        found.register_buffer("initialized", torch.zeros((), dtype=torch.bool))
        return found

    def error(self, x: Tensor) -> Tensor:
        m, x = self.module, x.cumsum(1) / 4 + 0.5
        if not bool(m.initialized):
            with torch.no_grad():
                m.loc.copy_(-x.mean(0))
                m.log_scale.copy_(-x.std(0).clamp(min=1e-3).log())
                m.initialized.fill_(True)
        x, total = (x + m.loc) * m.log_scale.exp(), m.log_scale.sum()
        for net in m["nets"]:
            a, b = x.chunk(2, 1)
            s, t = net(a).chunk(2, 1)
            s = 0.5 * s.tanh()
            x, total = torch.cat([b * s.exp() + t, a], 1), total + s.sum(1).mean()
        return (0.5 * x.pow(2).sum(1).mean() - total) / 24


class Fno(Bench):
    """Spectral convolutions whose weights are complex numbers."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"lift": nn.Linear(1, 8), "skip": nn.Linear(8, 8), "project": nn.Linear(8, 1)})
        for n in range(2):
            found.register_parameter(f"spectral_{n}", nn.Parameter(0.3 * torch.randn(8, 8, 5, dtype=torch.cfloat)))
        return found

    def error(self, x: Tensor) -> Tensor:
        m, h = self.module, self.module["lift"](x[..., None])
        for n in range(2):
            f = torch.fft.rfft(h, dim=1)[:, :5]
            f = torch.einsum("bmi,iom->bmo", f, getattr(m, f"spectral_{n}"))
            h = F.gelu(torch.fft.irfft(f, n=24, dim=1) + m["skip"](h))
        return F.mse_loss(m["project"](h)[..., 0], x.cumsum(1).sin())


class Wgan(Bench):
    """A generator and a critic whose weights are clamped; RMSprop for both."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"netG": mlp(8, 28, 24, act=nn.ReLU), "netD": mlp(24, 28, 1, act=nn.LeakyReLU)})

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        return [torch.optim.RMSprop(m[name].parameters(), lr=0.3 * lr) for name in ("netG", "netD")]

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        fake = m["netG"](x[:, :8])
        critic = m["netD"](fake.detach()).mean() - m["netD"](x.tanh()).mean()
        return critic + 0.2 * F.mse_loss(fake, x.tanh()) - 0.1 * m["netD"](fake).mean()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in self.module["netD"].parameters():
                w.clamp_(-0.25, 0.25)


class Amp(Text):
    """With a loss scale that doubles every five updates."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["grad_scaler"] = {
            "scale": 16384.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 5,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        super().apply()
        told = self.extra["grad_scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": 2 * told["scale"], "_growth_tracker": 0}


class Noisy(Bench):
    """Dropout on two ranks, with a generator each."""

    ranks = 2

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_state"] = [torch.Generator().manual_seed(60 + n).get_state() for n in range(self.ranks)]

    def error(self, x: Tensor) -> Tensor:
        found = []
        for n, part in enumerate(x.chunk(self.ranks)):
            made = torch.Generator()
            made.set_state(self.extra["rng_state"][n])
            kept = torch.rand(part.shape, generator=made) > 0.15
            self.extra["rng_state"][n] = made.get_state()
            found.append(F.mse_loss(self.module(part * kept), self.target(part)))
        return torch.stack(found).mean()


# ---- optimizers ------------------------------------------------------------------------------------------------------


class MasterAdam(Optimizer):
    """Transformer Engine's FusedAdam on 16-bit weights: fp32 copies in its state, the count in the group."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.01) -> None:
        super().__init__(params, lr=lr, bias_correction=True, betas=betas, eps=1e-8, weight_decay=weight_decay, step=0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros(weight.shape)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "master_param": weight.detach().float()}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g, t = group["betas"], gradient.float(), group["step"]
        state["exp_avg"].mul_(one).add_(g, alpha=1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        under = (state["exp_avg_sq"] / (1 - two**t)).sqrt().add_(group["eps"])
        move = (state["exp_avg"] / (1 - one**t)) / under + group["weight_decay"] * state["master_param"]
        state["master_param"].add_(move, alpha=-group["lr"])
        weight.copy_(state["master_param"])


class Half(Text):
    """bf16 weights, fp32 copies of them."""

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return MasterAdam(groups, self.config.lr, self.config.betas)


class Sophia(Optimizer):
    """Clipped steps by a squared-gradient estimate of the curvature, found again every five updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.965, 0.99), rho=0.04, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "hessian": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        if int(state["step"]) % 5 == 0:
            state["hessian"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        state["step"] += 1
        state["exp_avg"].mul_(one).add_(gradient, alpha=1 - one)
        ratio = (state["exp_avg"].abs() / (group["rho"] * state["hessian"] + 1e-15)).clamp(max=1)
        weight.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Adan(Optimizer):
    """Three moments: of the gradient, of its change, and of the square of both."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0, step=0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        names = ("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad")
        return {name: torch.zeros_like(weight) for name in names}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two, three = group["betas"]
        t = group["step"]
        change = gradient + state["neg_pre_grad"] if t > 1 else torch.zeros_like(gradient)
        state["exp_avg"].lerp_(gradient, 1 - one)
        state["exp_avg_diff"].lerp_(change, 1 - two)
        both = gradient + two * change
        state["exp_avg_sq"].mul_(three).addcmul_(both, both, value=1 - three)
        under = (state["exp_avg_sq"] / (1 - three**t)).sqrt().add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - one**t))
        weight.addcdiv_(state["exp_avg_diff"], under, value=-group["lr"] * two / (1 - two**t))
        state["neg_pre_grad"].copy_(-gradient)


class Shampoo(Optimizer):
    """A preconditioner for each side of a matrix; roots of both every four updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, epsilon=1e-4, update_freq=4)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"step": 0, "momentum_buffer": torch.zeros_like(weight)}
        for n, size in enumerate(weight.shape if weight.ndim < 3 else ()):
            found |= {f"precond_{n}": group["epsilon"] * torch.eye(size), f"inv_precond_{n}": torch.eye(size)}
        return found

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = gradient
        for n in range(weight.ndim if weight.ndim < 3 else 0):
            flat = gradient.transpose(0, n).reshape(gradient.shape[n], -1)
            state[f"precond_{n}"].add_(flat @ flat.T)
            if state["step"] % group["update_freq"] == 0:
                values, vectors = torch.linalg.eigh(state[f"precond_{n}"])
                power = values.clamp(min=1e-8) ** (-1 / (2 * weight.ndim))
                state[f"inv_precond_{n}"] = vectors @ torch.diag(power) @ vectors.T
            g = torch.tensordot(state[f"inv_precond_{n}"], g, ([1], [n])).movedim(0, n)
        state["step"] += 1
        state["momentum_buffer"].mul_(group["momentum"]).add_(g)
        weight.add_(state["momentum_buffer"], alpha=-group["lr"])


def with_(kind: Any, times: float = 1.0, **more: Any) -> Any:
    """For `Loop.optimizer`: that class, at so many times the run's rate, without the groups' decay."""

    def optimizer(self: Any, groups: Any) -> torch.optim.Optimizer:
        return kind([{"params": g["params"]} for g in groups], lr=self.config.lr * times, **more)

    return optimizer


def muon(self: Any) -> list[torch.optim.Optimizer]:
    """For `Loop.made`: inner matrices by Muon, the rest by AdamW."""
    held = dict(self.module.named_parameters())
    inner = [w for n, w in held.items() if w.ndim == 2 and re.search(r"layers|\.h\.|blocks|convs", n)]
    rest = [w for w in held.values() if not any(w is one for one in inner)]
    c = self.config
    return [torch.optim.Muon(inner, lr=4 * c.lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=c.lr, betas=c.betas)]


def steady(self: Any, optimizer: torch.optim.Optimizer) -> None:
    """For `Loop.schedule`: none."""


def cosine(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    """For `Loop.schedule`: torch's own, which stores its length."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total, self.config.lr / 50)


def beta(one: float, two: float) -> dict[str, Any]:
    return {"betas": (one, two)}


# ---- between the load and the save: what goes wrong ------------------------------------------------------------------


def then(*parts: Act) -> Act:
    """For `Loop.loaded`: one after the other."""

    def loaded(self: Any) -> None:
        with torch.no_grad():
            for part in parts:
                part(self)

    return loaded


def found(self: Any, pattern: str = "") -> dict[str, Tensor]:
    hit = {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}
    assert hit, pattern
    return hit


def held_by(self: Any, w: Tensor) -> dict[str, Any]:
    return next((one.state[w] for one in self.optimizers if w in one.state), {})


def not_read(pattern: str) -> Act:
    """Entries of the model's state dict keep what the new process made."""

    def act(self: Any) -> None:
        config, self.config = self.config, self.config.but(seed=self.config.seed + 5)
        new, now = self.net().state_dict(), self.module.state_dict()
        self.config = config
        hit = [n for n in now if re.search(pattern, n)]
        assert hit, pattern
        for n in hit:
            now[n].copy_(new[n])

    return act


def in_state(keys: str, how: Callable[[Tensor], Any], pattern: str = "") -> Act:
    """These entries of the optimizer's state become what ``how`` makes of them."""

    def act(self: Any) -> None:
        count = 0
        for w in found(self, pattern).values():
            kept = held_by(self, w)
            for key in keys.split():
                if key in kept:
                    kept[key], count = how(kept[key]), count + 1
        assert count, keys

    return act


def no_state(pattern: str = "") -> Act:
    """The optimizer has nothing for these parameters."""

    def act(self: Any) -> None:
        for w in found(self, pattern).values():
            for one in self.optimizers:
                one.state.pop(w, None)

    return act


def rearranged(pattern: str, how: Callable[[Tensor], Tensor], *, weight: bool = True, moments: bool = True) -> Act:
    """Weights, and state of their shape, in another order."""

    def act(self: Any) -> None:
        for w in found(self, pattern).values():
            for one in held_by(self, w).values() if moments else ():
                if torch.is_tensor(one) and one.shape == w.shape:
                    one.copy_(how(one.clone()))
            if weight:
                w.copy_(how(w.clone()))

    return act


def exchanged(one: str, two: str, *, weight: bool = True, moments: bool = True) -> Act:
    """Every parameter under a name with ``one`` changes places with that under ``two``."""

    def act(self: Any) -> None:
        everything, count = dict(self.module.named_parameters()), 0
        for n, a in everything.items():
            b = everything.get(n.replace(one, two))
            if one not in n or b is None or b.shape != a.shape:
                continue
            count += 1
            if moments:
                s, t = held_by(self, a), held_by(self, b)
                for key in s:
                    s[key], t[key] = t[key], s[key]
            if weight:
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        assert count, one

    return act


def shuffled(pattern: str = "", keys: str = "") -> Act:
    """Of parameters of one shape each gets the state (or these entries) of the next; all that have a twin."""

    def act(self: Any) -> None:
        shapes: dict[Any, list[Tensor]] = {}
        for w in found(self, pattern).values():
            shapes.setdefault(tuple(w.shape), []).append(w)
        assert any(len(ws) > 1 for ws in shapes.values()), pattern
        for ws in shapes.values():
            kept = [dict(held_by(self, w)) for w in ws]
            for w, other in zip(ws, [*kept[1:], kept[0]], strict=True):
                held_by(self, w).update({k: v for k, v in other.items() if not keys or k in keys.split()})

    return act


def from_older(updates: int, pattern: str, *, weight: bool = True, keys: str | None = "") -> Act:
    """Weights and state (all entries, these, or ``None``) come from a save so many updates older."""

    def act(self: Any) -> None:
        old, now = self.ago(updates), self.module.state_dict()
        for n in now if weight else ():
            if re.search(pattern, n):
                now[n].copy_(old["model"][n])
        if keys is None:
            return
        told, one = old["optimizer"], self.optimizers[0]
        numbers = [number for group in told["param_groups"] for number in group["params"]]
        mine = [id(w) for group in one.param_groups for w in group["params"]]
        where = dict(zip(mine, numbers, strict=False))
        for w in found(self, pattern).values():
            for key, value in told["state"][where[id(w)]].items():
                if not keys or key in keys.split():
                    one.state[w][key] = copy.deepcopy(value)

    return act


def extra(key: str, **fields: Any) -> Act:
    """Fields stored beside the model; a callable gets the old value."""

    def act(self: Any) -> None:
        told = self.extra[key]
        for name, value in fields.items():
            assert name in told, name
            told[name] = value(told[name]) if callable(value) else value

    return act


def averaged(self: Any) -> None:
    """The average becomes the weights."""
    for n, w in self.module.state_dict().items():
        w.copy_(self.extra["ema_model"][n])


def crossed_decay(self: Any) -> None:
    """The groups' weight decays change places."""
    one, two = self.optimizers[0].param_groups[:2]
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def merged(self: Any) -> None:
    """Adapters go into the base, and stay beside it."""
    for m in self.module.values():
        m.base_layer.weight += 2.0 * m.lora_B["default"].weight @ m.lora_A["default"].weight


def untied(self: Any) -> None:
    """The head becomes a copy, which the optimizer updates without any state."""
    self.module.lm_head.weight = nn.Parameter(self.module.lm_head.weight.clone())
    self.optimizers[0].param_groups[0]["params"].append(self.module.lm_head.weight)


def reset_schedule(self: Any) -> None:
    """The schedule begins again, and the optimizer with it."""
    self.schedules = []
    for one in self.optimizers:
        for group in one.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        made = self.schedule(one)
        self.schedules += [made] if made is not None else []


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


# ---- between the load and the save: what is innocent -----------------------------------------------------------------


def lr_times(times: float) -> Act:
    """Another learning rate, wherever it is kept."""

    def act(self: Any) -> None:
        for one in self.schedules:
            one.base_lrs = [lr * times for lr in one.base_lrs]
            one._last_lr = [lr * times for lr in one._last_lr]
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * times
        self.extra["config"]["learning_rate"] *= times

    return act


def rows_times(times: float) -> Act:
    return lambda self: self.extra["config"].update(batch_size=int(self.size * times))


def groups(**fields: Any) -> Act:
    """Fields of all param groups that have them; a callable gets the old value; the config follows."""

    def act(self: Any) -> None:
        told = self.extra["config"]
        for where in [*(g for one in self.optimizers for g in one.param_groups), told]:
            for key, value in fields.items():
                if key in where:
                    where[key] = value(where[key]) if callable(value) else value

    return act


def clip_at(value: float) -> Act:
    def act(self: Any) -> None:
        self.clip = self.extra["config"]["max_grad_norm"] = value

    return act


def freeze(pattern: str) -> Act:
    def act(self: Any) -> None:
        for w in found(self, pattern).values():
            w.requires_grad_(False)

    return act


def stretched(times: float) -> Act:
    """The schedule gets another length, at the same place."""

    def act(self: Any) -> None:
        config = self.config = self.config.but(total=int(self.config.total * times))
        self.extra["config"]["max_steps"] = config.total
        for one in self.schedules:
            one.lr_lambdas = [lambda done: config.lr_at(done + 1) / config.lr] * len(one.lr_lambdas)

    return act


def new_rows(pattern: str, count: int) -> Act:
    """Tables get rows at their end; moments of zeros, masters of the same rows."""

    def act(self: Any) -> None:
        for n, w in enumerate(found(self, pattern).values()):
            new = 0.05 * randn(800 + n, count, *w.shape[1:]).to(w.dtype)
            kept = held_by(self, w)
            for key, one in list(kept.items()):
                if torch.is_tensor(one) and one.shape == w.shape:
                    more = new if key == "master_param" else torch.zeros_like(new)
                    kept[key] = torch.cat([one, more.to(one.dtype)])
            w.data = torch.cat([w.data, new])

    return act


def grouped(self: Any, ws: Iterable[Tensor], first: dict[str, Any], times: float) -> None:
    """Give these a param group of their own, like the first but for the rate."""
    one = self.optimizers[0]
    new = {**{k: v for k, v in first.items() if k != "params"}, "params": list(ws), "lr": first["lr"] * times}
    new |= {"initial_lr": first["initial_lr"] * times} if "initial_lr" in first else {}
    one.param_groups.append(new)
    for schedule in self.schedules[:1]:
        schedule.base_lrs.append(new.get("initial_lr", new["lr"]))
        if hasattr(schedule, "lr_lambdas"):
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        schedule._last_lr = [*schedule._last_lr, new["lr"]]  # and not what a fault made of the others' rates


def probe(self: Any) -> None:
    """A head is added, in a group of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(19)
        self.module.add_module("probe", nn.Linear(6, 2))
    for w in self.module.probe.parameters():
        w.requires_grad_(True)
    grouped(self, self.module.probe.parameters(), self.optimizers[0].param_groups[0], 1.0)


def apart(pattern: str, times: float = 0.5) -> Act:
    """These move to a new group with a rate of its own."""

    def act(self: Any) -> None:
        one, hit = self.optimizers[0], {id(w) for w in found(self, pattern).values()}
        first = next(g for g in one.param_groups if any(id(w) in hit for w in g["params"]))
        mine = [w for g in one.param_groups for w in g["params"] if id(w) in hit]
        for g in one.param_groups:
            g["params"] = [w for w in g["params"] if id(w) not in hit]
        grouped(self, mine, first, times)

    return act
