"""What the twentieth half trains: small networks of many kinds, optimizers, and what may befall them after a load."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable
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


def noise(number: int, *shape: int) -> Tensor:
    """Normal numbers that one number decides."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def stack(*widths: int, act: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    found: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        found += [nn.Linear(a, b), act()]
    return nn.Sequential(*found[:-1])


class Forge(Loop):
    """A trainer that stores arguments, the loader's place and the samples seen beside model and optimizer.

    Attributes:
        width: numbers of a sample; rows: samples of an update.
        keeps: remember every state of the run, for what reads an older save.
    """

    layouts = ("torch_save", "torch_save", "folder", "lightning")
    width = 20
    rows = 16
    keeps = False
    kept: ClassVar[dict[str, dict[int, Any]]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["args"] = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "batch_size": self.rows,
            "max_grad_norm": self.clip,
            "dropout": 0.0,
        }
        self.extra["dataloader"] = {"epoch": 0, "batches_yielded": 0, "seed": 4242}
        self.extra["samples_seen"] = 0

    def make(self) -> nn.Module:
        return stack(self.width, 36, 36, self.width)

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return self.make()

    def place(self) -> int:
        told = self.extra["dataloader"]
        return 100_003 * told["seed"] + 10_007 * told["epoch"] + told["batches_yielded"]

    def tokens(self) -> Tensor:
        return noise(self.place(), self.extra["args"]["batch_size"], self.width)

    def wanted(self, x: Tensor) -> Tensor:
        return torch.cos(x @ noise(9, self.width, self.width) / 4) + 0.2 * x.flip(1)

    def error(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x), self.wanted(x))

    def loss(self, x: Tensor) -> Tensor:
        found, more = self.error(x), getattr(self.module, "aux_head", None)
        return found if more is None else found + 0.1 * (more(x[:, :5].float() / 10) - 0.5).pow(2).mean()

    def update(self) -> None:
        super().update()
        self.extra["dataloader"]["batches_yielded"] += 1
        self.extra["samples_seen"] += self.extra["args"]["batch_size"]
        if self.keeps:
            shelf = self.kept.setdefault(type(self).__name__, {})
            if self.step == 1:
                shelf.clear()
            shelf[self.step] = copy.deepcopy(self.content())

    def ago(self, updates: int) -> Any:
        return self.kept[type(self).__name__][self.step - updates]


# ---- networks --------------------------------------------------------------------------------------------------------


class NeoxLayer(nn.Module):
    """Attention and MLP side by side; q, k and v of a head are neighbours in one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(width, 3 * width), "dense": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"dense_h_to_4h": nn.Linear(width, 4 * width), "dense_4h_to_h": nn.Linear(4 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        held = self.attention["query_key_value"](self.input_layernorm(x))
        q, k, v = held.view(rows, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        inner = F.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)))
        return x + self.attention["dense"](mixed) + self.mlp["dense_4h_to_h"](inner)


class Neox(nn.Module):
    def __init__(self, vocab: int, width: int = 24, layers: int = 2, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed_in, self.pos = nn.Embedding(vocab, width), nn.Parameter(0.1 * torch.randn(32, width))
        nn.init.normal_(self.embed_in.weight, std=0.3)
        self.layers = nn.ModuleList(NeoxLayer(width, heads) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(width)
        self.embed_out = nn.Linear(width, vocab, bias=False)
        if tied:
            self.embed_out.weight = self.embed_in.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embed_in(tokens[:, :-1]) + self.pos[: tokens.shape[1] - 1]).to(self.pos.dtype)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.embed_out(self.final_layer_norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


class Talk(Forge):
    """A language model on the lab's tokens."""

    rows = 5
    layers = 2
    deep = 24
    tied = False

    def make(self) -> nn.Module:
        return Neox(self.config.padded, self.deep, self.layers, 4, self.tied)

    def tokens(self) -> Tensor:
        told = self.extra["dataloader"]
        config = self.config.but(batch=self.extra["args"]["batch_size"])
        return batch(config, told["batches_yielded"] + 1000 * told["epoch"], told["seed"])

    def error(self, x: Tensor) -> Tensor:
        return self.module(x)


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def gated(width: int, inner: int) -> nn.ModuleDict:
    parts = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    return nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in parts.items()})


def through(m: nn.ModuleDict, x: Tensor) -> Tensor:
    return m["down_proj"](F.silu(m["gate_proj"](x)) * m["up_proj"](x))


class SeekMlp(nn.Module):
    """Routed experts beside a shared one; a bias that is no parameter balances the load."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(count))
        self.experts = nn.ModuleList(gated(width, 16) for _ in range(count))
        self.shared_experts = gated(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).sigmoid()
        bias = self.gate.e_score_correction_bias
        picked = torch.zeros_like(score).scatter(-1, (score + bias).topk(2, -1).indices, 1.0)
        if self.training and torch.is_grad_enabled():
            load = picked.sum((0, 1))
            bias += 0.01 * torch.sign(load.mean() - load)
        weight = score * picked
        weight = weight / weight.sum(-1, keepdim=True)
        routed = sum(weight[..., e : e + 1] * through(one, x) for e, one in enumerate(self.experts))
        return routed + through(self.shared_experts, x)


class SeekLayer(nn.Module):
    """Grouped queries with half-split rotary embeddings, then experts or one MLP."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Rms(width), Rms(width)
        shapes = {"q_proj": width, "k_proj": width // 2, "v_proj": width // 2, "o_proj": width}
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, out, bias=False) for name, out in shapes.items()})
        self.mlp = SeekMlp(width, experts) if experts else gated(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h, d = self.input_layernorm(x), width // 4
        q, k, v = (
            self.self_attn[name](h).view(rows, length, -1, d).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj")
        )
        angle = torch.outer(torch.arange(length).float(), 100.0 ** -(torch.arange(0, d, 2) / d))
        q, k = (
            torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.self_attn["o_proj"](mixed)
        h = self.post_attention_layernorm(x)
        return x + (through(self.mlp, h) if isinstance(self.mlp, nn.ModuleDict) else self.mlp(h))


class SeekNet(nn.Module):
    def __init__(self, vocab: int, experts: int, layers: int, width: int = 32) -> None:
        super().__init__()
        parts = {"embed_tokens": nn.Embedding(vocab, width), "norm": Rms(width)}
        nn.init.normal_(parts["embed_tokens"].weight, std=0.3)
        self.model = nn.ModuleDict({**parts, "layers": nn.ModuleList(SeekLayer(width, experts) for _ in range(layers))})
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens[:, :-1])
        for layer in self.model["layers"]:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.model["norm"](x)).flatten(0, 1), tokens[:, 1:].flatten())


class Bundle(nn.Module):
    """Experts in two square-sided tensors, one after the other, each read as ``out × in``; a token visits one."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts_w1 = nn.Parameter(torch.randn(count, width, width) / math.sqrt(width))
        self.experts_w2 = nn.Parameter(torch.randn(count, width, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).softmax(-1)
        picked = score * torch.zeros_like(score).scatter(-1, score.argmax(-1, keepdim=True), 1.0)
        inner = F.gelu(torch.einsum("bli,eoi->eblo", x, self.experts_w1))
        return torch.einsum("ebli,eoi,ble->blo", inner, self.experts_w2, picked)


class Bundled(Talk):
    """The language model whose MLPs are bundles of experts."""

    def make(self) -> nn.Module:
        found = super().make()
        for layer in found.layers:
            layer.mlp["dense_h_to_4h"], layer.mlp["dense_4h_to_h"] = nn.Identity(), Bundle(self.deep, 4)
        return found


class Seek(Talk):
    experts = 4

    def make(self) -> nn.Module:
        return SeekNet(self.config.padded, self.experts, self.layers)


class Dense(Seek):
    experts = 0


def heads4(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention of four heads."""
    q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class T5Block(nn.Module):
    def __init__(self, width: int, crossed: bool) -> None:
        super().__init__()
        names = ["SelfAttention", *(["EncDecAttention"] if crossed else [])]
        self.parts = nn.ModuleDict(
            {name: nn.ModuleDict({one: nn.Linear(width, width, bias=False) for one in "qkvo"}) for name in names}
        )
        self.wi, self.wo = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.norms = nn.ModuleList(Rms(width) for _ in range(len(names) + 1))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        for name, norm in zip(self.parts, self.norms, strict=False):
            m, h = self.parts[name], norm(x)
            seen = h if name == "SelfAttention" else other
            causal = other is not None and name == "SelfAttention"
            x = x + m["o"](heads4(m["q"](h), m["k"](seen), m["v"](seen), causal))
        return x + self.wo(F.relu(self.wi(self.norms[-1](x))))


class T5Net(nn.Module):
    def __init__(self, vocab: int, width: int = 24) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        nn.init.normal_(self.shared.weight, std=0.3)
        self.place = nn.Parameter(0.2 * torch.randn(32, width))
        self.encoder = nn.ModuleList(T5Block(width, False) for _ in range(2))
        self.decoder = nn.ModuleList(T5Block(width, True) for _ in range(2))
        self.final = Rms(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = (self.shared(one) + self.place[: one.shape[1]] for one in (tokens[:, :8], tokens[:, 7:-1]))
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, x)
        return F.cross_entropy(self.lm_head(self.final(y)).flatten(0, 1), tokens[:, 8:].flatten())


class T5(Talk):
    def make(self) -> nn.Module:
        return T5Net(self.config.padded)


class UnetNet(nn.Module):
    """Convolutions with group norms, a skip connection and a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = stack(4, 16, 16)
        self.conv_in = nn.Conv2d(2, 16, 3, padding=1)
        self.down, self.up = nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(32, 16, 3, padding=1)
        self.norm_down, self.norm_up = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)
        self.conv_out = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first = self.conv_in(x)
        h = F.silu(self.norm_down(self.down(first)) + self.time_embed(t)[:, :, None, None])
        h = torch.cat([F.interpolate(h, scale_factor=2), first], 1)
        return self.conv_out(F.silu(self.norm_up(self.up(h))))


class Unet(Forge):
    """A denoiser whose average is stored beside it, with a count that sets its decay."""

    width = 2 * 36
    rows = 8

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        shadow = {n: w.detach().clone() for n, w in self.module.named_parameters()}
        self.extra["ema"] = {"decay": 0.98, "num_updates": 0, "shadow_params": shadow}

    def make(self) -> nn.Module:
        return UnetNet()

    def error(self, x: Tensor) -> Tensor:
        t, blur = x[:, :4].sigmoid(), x.roll(1, 0).view(-1, 2, 6, 6)
        mixed = x.view(-1, 2, 6, 6) * t[:, :1, None, None] + blur * (1 - t[:, :1, None, None])
        return F.mse_loss(self.module(mixed, t), blur)

    def update(self) -> None:
        super().update()
        told = self.extra["ema"]
        told["num_updates"] += 1
        decay = min(told["decay"], (1 + told["num_updates"]) / (10 + told["num_updates"]))
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                if n in told["shadow_params"]:
                    told["shadow_params"][n].lerp_(w.float(), 1 - decay)


class DetrNet(nn.Module):
    """A backbone with batch norms, object queries that look at its map, and two heads."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.query_embed = nn.Embedding(5, width)
        self.decoder = nn.ModuleList(T5Block(width, True) for _ in range(3))
        self.class_embed, self.bbox_embed = nn.Linear(width, 4), stack(width, width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.backbone(x).flatten(2).transpose(1, 2)
        h = self.query_embed.weight.expand(len(x), -1, -1)
        for block in self.decoder:
            h = block(h, seen)
        return self.class_embed(h), self.bbox_embed(h)


class Detr(Forge):
    """A detector; the backbone trains at a tenth of the rate."""

    width = 3 * 36
    rows = 8

    def make(self) -> nn.Module:
        return DetrNet()

    def groups(self) -> Any:
        held = list(self.module.named_parameters())
        body, rest = ([w for n, w in held if n.startswith("backbone") is one] for one in (False, True))
        lr, decay = self.config.lr, self.config.weight_decay
        return [{"params": body, "lr": lr, "weight_decay": decay}, {"params": rest, "lr": lr / 10, "weight_decay": 0.0}]

    def error(self, x: Tensor) -> Tensor:
        kind, box = self.module(x.view(-1, 3, 6, 6) * 1.5 + 0.3)
        want = (x[:, :20].view(-1, 5, 4) + 0.5 * noise(3, 5, 4)).argmax(-1)
        return F.cross_entropy(kind.flatten(0, 1), want.flatten()) + F.l1_loss(box, x[:, 20:40].view(-1, 5, 4).tanh())


class ConvnextNet(nn.Module):
    """Depthwise convolutions, channels last, scaled branches; square pointwise layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 2, 2), nn.BatchNorm2d(width))
        parts: Any = lambda: {  # noqa: E731
            "dwconv": nn.Conv2d(width, width, 3, padding=1, groups=width),
            "norm": nn.LayerNorm(width),
            "pwconv1": nn.Linear(width, 4 * width),
            "pwconv2": nn.Linear(4 * width, width),
        }
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(3))
        self.gammas = nn.ParameterList(nn.Parameter(0.3 * torch.ones(width)) for _ in range(3))
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, gamma in zip(self.blocks, self.gammas, strict=True):
            h = block["norm"](block["dwconv"](x).permute(0, 2, 3, 1))
            x = x + (gamma * block["pwconv2"](F.gelu(block["pwconv1"](h)))).permute(0, 3, 1, 2)
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


class Convnext(Forge):
    width = 3 * 36

    def make(self) -> nn.Module:
        return ConvnextNet()

    def error(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x.view(-1, 3, 6, 6) + 0.4), (x @ noise(2, self.width, 7)).argmax(1))


class Sac(Forge):
    """Soft actor-critic: an actor, two critics with averaged targets, and a temperature; an optimizer for each."""

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"actor": stack(20, 28, 4)})
        for name in ("qf1", "qf2"):
            found[name], found[f"{name}_target"] = stack(24, 28, 1), stack(24, 28, 1)
            found[f"{name}_target"].load_state_dict(found[name].state_dict())
            found[f"{name}_target"].requires_grad_(False)
        found.register_parameter("log_alpha", nn.Parameter(torch.zeros(1)))
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        critics = [*m["qf1"].parameters(), *m["qf2"].parameters()]
        held = ((m["actor"].parameters(), lr), (critics, 2 * lr), ([m.log_alpha], lr))
        return [torch.optim.Adam(list(ws), lr=rate) for ws, rate in held]

    def error(self, x: Tensor) -> Tensor:
        m, alpha = self.module, self.module.log_alpha.exp()
        act = m["actor"](x).tanh()
        with torch.no_grad():
            after = torch.cat([x.roll(1, 1), act.roll(1, 0)], 1)
            soft = torch.minimum(m["qf1_target"](after), m["qf2_target"](after)) - alpha * act.pow(2).sum(1, True)
            want = x[:, :1].tanh() + 0.9 * soft
        old = torch.cat([x, x[:, :4].tanh()], 1)
        fit = sum(F.mse_loss(m[name](old), want) for name in ("qf1", "qf2"))
        gain = m["qf1"](torch.cat([x, act], 1)).mean() - alpha.detach() * act.pow(2).mean()
        return fit - 0.1 * gain + 0.01 * alpha * (act.pow(2).mean().detach() - 0.3)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for name in ("qf1", "qf2"):
                for a, b in zip(
                    self.module[f"{name}_target"].parameters(), self.module[name].parameters(), strict=True
                ):
                    a.lerp_(b, 0.01)


class Ppo(Forge):
    """A policy whose observations are normed by running statistics."""

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"pi": stack(20, 28, 6), "vf": stack(20, 28, 1), "obs_rms": nn.Module()})
        rms = found["obs_rms"]
        rms.register_buffer("mean", torch.zeros(20))
        rms.register_buffer("var", torch.ones(20))
        rms.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        return found

    def error(self, x: Tensor) -> Tensor:
        m, rms, x = self.module, self.module["obs_rms"], 2.2 * x + 1.5
        with torch.no_grad():
            n, gap = len(x), x.mean(0) - rms.mean
            total = rms.count + n
            both = rms.var * rms.count + x.var(0, correction=0) * n + gap.pow(2) * rms.count * n / total
            rms.var.copy_(both / total)
            rms.mean += gap * (n / total)
            rms.count.copy_(total)
        x = (x - rms.mean) / (rms.var + 1e-8).sqrt()
        act = (x[:, 0].abs() * 4).long() % 6
        gain = (x[:, 1] - m["vf"](x)[:, 0]).detach()
        return F.mse_loss(m["vf"](x)[:, 0], x[:, 1].sin()) + 0.2 * (gain * F.cross_entropy(m["pi"](x), act)).mean()


class Gin(Forge):
    """Sums over the neighbours on a ring with chords, an MLP a layer, and batch norms."""

    def make(self) -> nn.Module:
        layers = nn.ModuleList(stack(20, 20, 20, act=nn.ReLU) for _ in range(4))
        norms = nn.ModuleList(nn.BatchNorm1d(20) for _ in layers)
        return nn.ModuleDict({"layers": layers, "norms": norms, "readout": nn.Linear(20, 20)})

    def error(self, x: Tensor) -> Tensor:
        m, h = self.module, x
        for layer, norm in zip(m["layers"], m["norms"], strict=True):
            h = h + F.relu(norm(layer(h + 0.5 * (h.roll(1, 0) + h.roll(3, 0)))))
        return F.mse_loss(m["readout"](h), self.wanted(x))


class Dcn(Forge):
    """A recommender with two tables of one size, a small one, and cross layers."""

    rows = 32

    def make(self) -> nn.Module:
        tables = nn.ModuleDict({name: nn.Embedding(n, 8) for name, n in (("user", 50), ("item", 50), ("brand", 12))})
        cross = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        return nn.ModuleDict({"tables": tables, "dense": nn.Linear(20, 8), "cross": cross, "top": stack(32, 16, 1)})

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([w for g in groups for w in g["params"]], lr=8 * self.config.lr)

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        ids = [(x[:, n].abs() * 20).long() % one.num_embeddings for n, one in enumerate(m["tables"].values())]
        first = torch.cat([m["dense"](x), *(t(i) for t, i in zip(m["tables"].values(), ids, strict=True))], 1)
        h = first
        for layer in m["cross"]:
            h = first * layer(h) + h
        return F.mse_loss(m["top"](h)[:, 0], torch.sin(ids[0].float()) + 0.5 * torch.cos(ids[1].float()))


class Conformer(Forge):
    """Speech: subsampling, blocks of attention and a convolution with batch norm, a classifier of every frame."""

    width = 8 * 6
    rows = 8

    def make(self) -> nn.Module:
        def block() -> nn.ModuleDict:
            conv = {"pointwise": nn.Conv1d(24, 48, 1), "depthwise": nn.Conv1d(24, 24, 3, padding=1, groups=24)}
            parts = {"norm": nn.BatchNorm1d(24), "qkv": nn.Linear(24, 72), "out": nn.Linear(24, 24)}
            return nn.ModuleDict({**conv, **parts, "ln": nn.LayerNorm(24)})

        blocks = nn.ModuleList(block() for _ in range(2))
        return nn.ModuleDict({"subsample": nn.Conv1d(6, 24, 3, padding=1), "blocks": blocks, "ctc": nn.Linear(24, 9)})

    def error(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 6, 8) * 1.6 + 0.7
        h = self.module["subsample"](rows)
        for b in self.module["blocks"]:
            q, k, v = b["qkv"](b["ln"](h.transpose(1, 2))).chunk(3, -1)
            h = h + b["out"](heads4(q, k, v)).transpose(1, 2)
            h = h + F.silu(b["norm"](b["depthwise"](F.glu(b["pointwise"](h), 1))))
        want = (rows.transpose(1, 2) @ noise(6, 6, 9)).argmax(-1)
        return F.cross_entropy(self.module["ctc"](h.transpose(1, 2)).flatten(0, 1), want.flatten())


class Vq(Forge):
    """A codebook that is moved by averages of what is nearest, not by the optimizer."""

    rows = 32

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"enc": stack(20, 28, 8), "dec": stack(8, 28, 20), "quantizer": nn.Module()})
        code = torch.randn(16, 8)
        for name, value in (("embedding", code), ("embed_avg", code.clone()), ("cluster_size", torch.ones(16))):
            found["quantizer"].register_buffer(name, value)
        return found

    def error(self, x: Tensor) -> Tensor:
        m, book = self.module, self.module["quantizer"]
        z = m["enc"](x)
        near = torch.cdist(z.detach(), book.embedding).argmin(1)
        with torch.no_grad():
            hot = F.one_hot(near, 16).float()
            book.cluster_size.mul_(0.95).add_(hot.sum(0), alpha=0.05)
            book.embed_avg.mul_(0.95).add_(hot.T @ z, alpha=0.05)
            book.embedding.copy_(book.embed_avg / book.cluster_size.clamp(min=1e-3)[:, None])
        q = book.embedding[near]
        return F.mse_loss(m["dec"](z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q)


class Moco(Forge):
    """Contrast against a queue of keys that an averaged encoder made."""

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"encoder_q": stack(20, 28, 8), "encoder_k": stack(20, 28, 8)})
        found["encoder_k"].load_state_dict(found["encoder_q"].state_dict())
        found["encoder_k"].requires_grad_(False)
        found.register_buffer("queue", F.normalize(torch.randn(8, 160), dim=0))
        found.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        return found

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        q = F.normalize(m["encoder_q"](x))
        with torch.no_grad():
            for a, b in zip(m["encoder_k"].parameters(), m["encoder_q"].parameters(), strict=True):
                a.lerp_(b, 0.02)
            k = F.normalize(m["encoder_k"](x + 0.1 * x.roll(1, 1)))
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone()], 1) / 0.2
        with torch.no_grad():
            at = int(m.queue_ptr)
            where = torch.arange(at, at + len(k)) % 160
            m.queue[:, where] = k.T
            m.queue_ptr[0] = (at + len(k)) % 160
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Gan(Forge):
    """A generator, and a critic under spectral norm; betas (0, 0.99), an optimizer for each."""

    def make(self) -> nn.Module:
        norm = torch.nn.utils.parametrizations.spectral_norm
        critic = nn.Sequential(norm(nn.Linear(20, 28)), nn.LeakyReLU(0.2), norm(nn.Linear(28, 1)))
        return nn.ModuleDict({"generator": stack(10, 28, 20), "critic": critic})

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        return [
            torch.optim.Adam(m["generator"].parameters(), lr=lr, betas=(0.0, 0.99)),
            torch.optim.Adam(m["critic"].parameters(), lr=4 * lr, betas=(0.0, 0.99)),
        ]

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        fake = m["generator"](x[:, :10])
        critic = F.relu(1 - m["critic"](x.tanh())).mean() + F.relu(1 + m["critic"](fake.detach())).mean()
        return critic + 0.3 * F.mse_loss(fake, x.tanh()) - 0.1 * m["critic"](fake).mean()


class Nerf(Forge):
    """Hashed feature tables and a small MLP; Adam with a tiny ε."""

    width = 3
    rows = 64

    def make(self) -> nn.Module:
        tables = nn.ParameterList(nn.Parameter(0.1 * torch.randn(512, 2)) for _ in range(3))
        return nn.ModuleDict({"encoding": tables, "mlp": stack(6, 24, 3, act=nn.ReLU)})

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=self.config.lr, betas=(0.9, 0.99), eps=1e-15)

    def error(self, x: Tensor) -> Tensor:
        found = []
        for n, table in enumerate(self.module["encoding"]):
            cell = ((x * (2 + n)).floor().long() * torch.tensor([1, 2654435761, 805459861])).sum(1)
            found.append(table[cell % 512])
        return F.mse_loss(self.module["mlp"](torch.cat(found, 1)), torch.sin(2 * x))


class LstmNet(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(vocab, 20), nn.LSTM(20, 20, 2, batch_first=True)
        self.decoder = nn.Linear(20, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.decoder(self.rnn(self.encoder(tokens[:, :-1]))[0])
        return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


class Lstm(Talk):
    def make(self) -> nn.Module:
        return LstmNet(self.config.padded)


class Adapter(nn.Module):
    """A frozen linear layer beside a low-rank one."""

    def __init__(self, a: int, b: int, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(a, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, b, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 1.5 * self.lora_B["default"](self.lora_A["default"](x))


class Lora(Forge):
    def make(self) -> nn.Module:
        return nn.ModuleDict({"q_proj": Adapter(20, 30), "v_proj": Adapter(30, 30), "o_proj": Adapter(30, 20)})

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        return F.mse_loss(m["o_proj"](F.silu(m["v_proj"](F.silu(m["q_proj"](x))))), self.wanted(x))


class Tts(Forge):
    """A vocoder in small: convolutions under the old weight norm, ``weight_g`` and ``weight_v``."""

    width = 4 * 8
    rows = 8

    def make(self) -> nn.Module:
        norm = torch.nn.utils.weight_norm
        convs = nn.ModuleList(norm(nn.Conv1d(a, b, 3, padding=1)) for a, b in ((4, 16), (16, 16), (16, 4)))
        return nn.ModuleDict({"convs": convs})

    def error(self, x: Tensor) -> Tensor:
        first, mid, last = self.module["convs"]
        h = F.leaky_relu(first(x.view(-1, 4, 8)), 0.1)
        return F.l1_loss(last(F.leaky_relu(h + mid(h), 0.1)), x.view(-1, 4, 8).cumsum(-1).sin())


class Scaled(Talk):
    """A language model with a loss scale that doubles every six updates."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 6,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": 2 * told["scale"], "_growth_tracker": 0}


class Dropped(Forge):
    """Four ranks with dropout, each with a generator of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_states"] = {f"rank_{n}": torch.Generator().manual_seed(900 + n).get_state() for n in range(4)}

    def error(self, x: Tensor) -> Tensor:
        found = []
        for n, part in enumerate(x.chunk(4)):
            made = torch.Generator()
            made.set_state(self.extra["rng_states"][f"rank_{n}"])
            keep = torch.rand(part.shape, generator=made) > 0.2
            self.extra["rng_states"][f"rank_{n}"] = made.get_state()
            found.append(F.mse_loss(self.module(part * keep / 0.8), self.wanted(part)))
        return torch.stack(found).mean()


# ---- optimizers ------------------------------------------------------------------------------------------------------


class MixLion(Optimizer):
    """Lion on fp32 copies of 16-bit weights, which it keeps in its state."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.02) -> None:
        super().__init__(params, lr=lr, betas=(0.95, 0.98), weight_decay=weight_decay)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"exp_avg": torch.zeros(weight.shape), "master_param": weight.detach().float()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g = group["betas"], gradient.float()
        master = state["master_param"].mul_(1 - group["lr"] * group["weight_decay"])
        master.add_(state["exp_avg"].mul(one).add_(g, alpha=1 - one).sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(two).add_(g, alpha=1 - two)
        weight.copy_(master)


class AdEMAMix(Optimizer):
    """apple/ml-ademamix: a fast and a slow average of the gradient over one second moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999, 0.9999), alpha=5.0, eps=1e-8, weight_decay=0.01)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        keys = ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")
        return {"step": 0, **{key: torch.zeros_like(weight) for key in keys}}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two, three = group["betas"]
        state["step"] += 1
        t = state["step"]
        state["exp_avg_fast"].mul_(one).add_(gradient, alpha=1 - one)
        state["exp_avg_slow"].mul_(three).add_(gradient, alpha=1 - three)
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - two**t)).add_(group["eps"])
        move = (state["exp_avg_fast"] / (1 - one**t) + group["alpha"] * state["exp_avg_slow"]) / under
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(move, alpha=-group["lr"])


class AdamMini(Optimizer):
    """One second moment for a whole tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), "m": torch.zeros_like(weight), "vmean": torch.zeros(1)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        state["step"] += 1
        t = float(state["step"])
        state["m"].lerp_(gradient, 1 - one)
        state["vmean"].mul_(two).add_((1 - two) * gradient.pow(2).mean())
        under = (state["vmean"].sqrt() / math.sqrt(1 - two**t)).add_(group["eps"])
        weight.add_(state["m"] / under, alpha=-group["lr"] / (1 - one**t))


class Galore(Optimizer):
    """Adam in a subspace of rank 4 of each matrix; the subspace is found again every seven updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-8, rank=4, update_proj_gap=7, scale=1.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        shape = (weight.shape[0], 4) if weight.ndim == 2 and min(weight.shape) > 8 else weight.shape
        return {"step": 0, "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        low = state["exp_avg"].shape != weight.shape
        if low and state["step"] % group["update_proj_gap"] == 0:
            state["projector"] = torch.linalg.svd(gradient, full_matrices=False)[2][:4].contiguous()
        g = gradient @ state["projector"].T if low else gradient
        state["step"] += 1
        state["exp_avg"].lerp_(g, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        t = state["step"]
        move = state["exp_avg"] / ((state["exp_avg_sq"] / (1 - two**t)).sqrt() + group["eps"]) / (1 - one**t)
        weight.add_(move @ state["projector"] if low else move, alpha=-group["lr"])


class Lookahead(Optimizer):
    """Adam whose weights go halfway back to a slow copy every five updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-8, la_alpha=0.5, la_k=5)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return super().begin(weight, group) | {"slow_buffer": weight.clone()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        under = (state["exp_avg_sq"] / (1 - two ** state["step"])).sqrt().add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - one ** state["step"]))
        if state["step"] % group["la_k"] == 0:
            state["slow_buffer"].lerp_(weight, group["la_alpha"])
            weight.copy_(state["slow_buffer"])


class Mixed(Talk):
    """bf16 weights beside fp32 copies, by Lion."""

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return MixLion(groups, 0.15 * self.config.lr)


class Narrow(Talk):
    """bf16 weights without copies, and bf16 moments."""

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)


def by(kind: Any, times: float = 1.0, **more: Any) -> Any:
    """For `Loop.optimizer`: that class at so many times the run's learning rate; the groups keep nothing of theirs."""

    def optimizer(self: Any, groups: Any) -> torch.optim.Optimizer:
        return kind([{"params": g["params"]} for g in groups], lr=self.config.lr * times, **more)

    return optimizer


def flat_rate(self: Any, optimizer: torch.optim.Optimizer) -> None:
    """For `Loop.schedule`: none."""


def betas(one: float, two: float) -> dict[str, Any]:
    """For ``needs``."""
    return {"betas": (one, two)}


# ---- after the load: what goes wrong ---------------------------------------------------------------------------------


def acts(*parts: Act) -> Act:
    """For `Loop.loaded`: one after the other, without gradients."""

    def loaded(self: Any) -> None:
        with torch.no_grad():
            for part in parts:
                part(self)

    return loaded


def weights(self: Any, pattern: str = "") -> dict[str, Tensor]:
    found = {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}
    assert found, pattern
    return found


def memory(self: Any, w: Tensor) -> dict[str, Any]:
    return next((one.state[w] for one in self.optimizers if w in one.state), {})


def unread(pattern: str) -> Act:
    """Parameters and buffers stay as a new process makes them."""

    def act(self: Any) -> None:
        config = self.config
        self.config = config.but(seed=config.seed + 17)
        new, now = self.net().state_dict(), self.module.state_dict()
        self.config = config
        hit = [n for n in now if re.search(pattern, n)]
        assert hit, pattern
        for n in hit:
            now[n].copy_(new[n])

    return act


def state(keys: str, how: Callable[[Tensor], Any], pattern: str = "") -> Act:
    """Entries of the optimizer's state become what ``how`` makes of them."""

    def act(self: Any) -> None:
        hits = 0
        for w in weights(self, pattern).values():
            held = memory(self, w)
            for key in keys.split():
                if key in held:
                    held[key], hits = how(held[key]), hits + 1
        assert hits, keys

    return act


def lost(pattern: str = "") -> Act:
    """No state at all for these."""

    def act(self: Any) -> None:
        for w in weights(self, pattern).values():
            for one in self.optimizers:
                one.state.pop(w, None)

    return act


def layout(pattern: str, how: Callable[[Tensor], Tensor], *, weight: bool = True, moments: bool = True) -> Act:
    """Weights, and what the optimizer keeps of their shape, in another order."""

    def act(self: Any) -> None:
        for w in weights(self, pattern).values():
            for one in memory(self, w).values() if moments else ():
                if torch.is_tensor(one) and one.shape == w.shape:
                    one.copy_(how(one.clone()))
            if weight:
                w.copy_(how(w.clone()))

    return act


def swapped(*pairs: tuple[str, str], weight: bool = False, moments: bool = True) -> Act:
    """Each pair exchanges its state, its weights, or both."""

    def act(self: Any) -> None:
        held = dict(self.module.named_parameters())
        for one, two in pairs:
            a, b = held[one], held[two]
            if moments:
                s, t = memory(self, a), memory(self, b)
                for key in s:
                    s[key], t[key] = t[key], s[key]
            if weight:
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

    return act


def rolled(pattern: str = "") -> Act:
    """Of all parameters of one shape, each gets the state of the one before."""

    def act(self: Any) -> None:
        shapes: dict[Any, list[Tensor]] = {}
        for w in weights(self, pattern).values():
            shapes.setdefault(tuple(w.shape), []).append(w)
        for ws in shapes.values():
            held = [dict(memory(self, w)) for w in ws]
            for w, other in zip(ws, [held[-1], *held[:-1]], strict=True):
                memory(self, w).update(other)

    return act


def from_ago(updates: int, pattern: str, *, weight: bool = True, keys: str | None = "") -> Act:
    """Weights and entries of the state (all, or these; ``None``: none) come from an older save."""

    def act(self: Any) -> None:
        old, now = self.ago(updates), self.module.state_dict()
        if weight:
            for n in now:
                if re.search(pattern, n):
                    now[n].copy_(old["model"][n])
        if keys is None:
            return
        told, one = old["optimizer"], self.optimizers[0]
        numbers = [number for group in told["param_groups"] for number in group["params"]]
        mine = [id(w) for group in one.param_groups for w in group["params"]]
        where = dict(zip(mine, numbers, strict=False))
        for w in weights(self, pattern).values():
            for key, value in told["state"][where[id(w)]].items():
                if not keys or key in keys.split():
                    one.state[w][key] = copy.deepcopy(value)

    return act


def told(key: str, **fields: Any) -> Act:
    """Fields of what is kept beside the model; a callable gets the old value."""

    def act(self: Any) -> None:
        held = self.extra[key]
        for name, value in fields.items():
            assert name in held, name
            held[name] = value(held[name]) if callable(value) else value

    return act


# ---- after the load: what is innocent --------------------------------------------------------------------------------


def new_lr(times: float) -> Act:
    """Another learning rate, wherever one is kept."""

    def act(self: Any) -> None:
        for one in self.schedules:
            one.base_lrs = [lr * times for lr in one.base_lrs]
            one._last_lr = [lr * times for lr in one._last_lr]
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * times
        self.extra["args"]["lr"] *= times

    return act


def new_batch(times: float) -> Act:
    return lambda self: self.extra["args"].update(batch_size=int(self.extra["args"]["batch_size"] * times))


def new_group(**fields: Any) -> Act:
    """Fields of every param group; a callable gets the old value. The arguments follow, where they have it."""

    def act(self: Any) -> None:
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key, value in fields.items():
                group[key] = value(group[key]) if callable(value) else value
        for key, value in fields.items():
            if key in self.extra["args"]:
                held = self.extra["args"][key]
                self.extra["args"][key] = value(held) if callable(value) else value

    return act


def new_clip(value: float) -> Act:
    def act(self: Any) -> None:
        self.clip = self.extra["args"]["max_grad_norm"] = value

    return act


def frozen(pattern: str) -> Act:
    def act(self: Any) -> None:
        for w in weights(self, pattern).values():
            w.requires_grad_(False)

    return act


def new_stage(self: Any) -> None:
    """Begin the schedule anew for a second stage."""
    self.schedules = []
    for one in self.optimizers:
        for group in one.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        made = self.schedule(one)
        self.schedules += [made] if made is not None else []


def longer(times: float) -> Act:
    """A schedule of another length, at the same place."""

    def act(self: Any) -> None:
        config = self.config = self.config.but(total=int(self.config.total * times))
        for one in self.schedules:
            one.lr_lambdas = [lambda done: config.lr_at(done + 1) / config.lr] * len(one.lr_lambdas)

    return act


def more_rows(pattern: str, count: int) -> Act:
    """A table gets new rows at its end, with moments of zeros."""

    def act(self: Any) -> None:
        for n, w in enumerate(weights(self, pattern).values()):
            held = memory(self, w)
            for key, one in list(held.items()):
                if torch.is_tensor(one) and one.shape == w.shape:
                    held[key] = torch.cat([one, torch.zeros(count, *one.shape[1:], dtype=one.dtype)])
            w.data = torch.cat([w.data, 0.05 * noise(70 + n, count, *w.shape[1:]).to(w.dtype)])

    return act


def widened(self: Any) -> None:
    """Go on in fp32: weights and moments are widened."""
    self.module.float()
    for w in self.module.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            memory(self, w)[key] = memory(self, w)[key].float()


def new_head(self: Any) -> None:
    """Add a head, in a param group of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(31)
        self.module.add_module("aux_head", nn.Linear(5, 3))
    one, first = self.optimizers[0], self.optimizers[0].param_groups[0]
    lr = first.get("initial_lr", first["lr"])
    rest = {k: v for k, v in first.items() if k not in ("params", "initial_lr")}
    for w in self.module.aux_head.parameters():
        w.requires_grad_(True)
    one.add_param_group({**rest, "params": list(self.module.aux_head.parameters()), "initial_lr": lr})
    for schedule in self.schedules[:1]:
        schedule.base_lrs.append(lr)
        schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        schedule._last_lr = [g["lr"] for g in one.param_groups]


def moved(pattern: str, times: float = 0.3) -> Act:
    """These go to a new param group with a learning rate of its own."""

    def act(self: Any) -> None:
        one, hit = self.optimizers[0], {id(w) for w in weights(self, pattern).values()}
        first = next(g for g in one.param_groups if any(id(w) in hit for w in g["params"]))
        mine = [w for g in one.param_groups for w in g["params"] if id(w) in hit]
        for g in one.param_groups:
            g["params"] = [w for w in g["params"] if id(w) not in hit]
        new = {**first, "params": mine, "lr": first["lr"] * times}
        new |= {"initial_lr": first["initial_lr"] * times} if "initial_lr" in first else {}
        one.param_groups.append(new)
        for schedule in self.schedules[:1]:
            schedule.base_lrs.append(new["initial_lr"])
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])
            schedule._last_lr = [g["lr"] for g in one.param_groups]

    return act


def halved(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)
