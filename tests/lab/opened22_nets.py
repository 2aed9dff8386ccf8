"""What the twenty-second half trains: networks, optimizers, and acts between a load and the next save."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
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
    """Normal numbers that the number decides."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(900_000 + number))


def dense(*sizes: int, act: Callable[[], nn.Module] = nn.SiLU) -> nn.Sequential:
    """Linear layers with activations between."""
    parts: list[nn.Module] = []
    for n, (a, b) in enumerate(itertools.pairwise(sizes)):
        parts += ([act()] if n else []) + [nn.Linear(a, b)]
    return nn.Sequential(*parts)


class Rig(Loop):
    """A loop that stores its arguments, where its data loader is, and how many samples it consumed.

    Attributes:
        wide: numbers of a sample; rows: samples of an update; epoch: samples of an epoch.
        shelved: keep every state in memory, for faults that read an older save.
    """

    layouts = ("torch_save", "torch_save", "folder", "lightning")
    wide = 20
    rows = 10
    epoch = 1 << 30
    shelved = False
    shelves: ClassVar[dict[str, dict[int, Any]]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["args"] = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "train_batch_size": self.rows,
            "grad_clip": self.clip,
            "max_steps": config.total,
            "seed": 31,
        }
        self.extra["dataloader"] = {"epoch": 0, "samples_yielded": 0, "shuffle_seed": 31}
        self.extra["consumed_samples"] = 0

    def model(self) -> nn.Module:
        return dense(self.wide, 36, 36, self.wide)

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return self.model()

    @property
    def size(self) -> int:
        return int(self.extra["args"]["train_batch_size"])

    def at(self) -> int:
        told = self.extra["dataloader"]
        return 700_001 * told["shuffle_seed"] + 30_011 * told["epoch"] + told["samples_yielded"]

    def tokens(self) -> Tensor:
        return noise(self.at(), self.size, self.wide)

    def wanted(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ noise(5, self.wide, self.wide) / 2) + 0.2 * x

    def fit(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x), self.wanted(x))

    def loss(self, x: Tensor) -> Tensor:
        found = self.fit(x)
        side = self.module._modules.get("aux_head")
        if side is not None:
            found = found + 0.05 * (side(x[:, :5].float() / 7).cos() - 0.2).square().mean()
        return found

    def update(self) -> None:
        size = self.size
        super().update()
        told = self.extra["dataloader"]
        told["samples_yielded"] += size
        if told["samples_yielded"] >= self.epoch:
            told |= {"epoch": told["epoch"] + 1, "samples_yielded": 0}
        self.extra["consumed_samples"] += size
        if self.shelved:
            shelf = self.shelves.setdefault(type(self).__name__, {})
            if self.step == 1:
                shelf.clear()
            shelf[self.step] = copy.deepcopy(self.content())

    def earlier(self, updates: int) -> Any:
        """What was saved so many updates ago."""
        return self.shelves[type(self).__name__][self.step - updates]


class Words(Rig):
    """A language model on the lab's tokens."""

    rows = 4
    tied = False
    depth = 2
    broad = 32

    def tokens(self) -> Tensor:
        told = self.extra["dataloader"]
        return batch(self.config.but(batch=self.size), told["samples_yielded"] + told["epoch"], told["shuffle_seed"])

    def fit(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


class Pictures(Rig):
    """Classifies 8 × 8 pictures of two channels."""

    wide = 2 * 64
    rows = 8

    def fit(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x.view(-1, 2, 8, 8) + 0.4), (x @ noise(6, self.wide, 5)).argmax(1))


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Attention of ``rows × length × heads × width``; fewer key heads serve neighbouring query heads."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def rotary(x: Tensor) -> Tensor:
    """Rotary embedding, halves of each head."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1]).float(), 30.0 ** -(torch.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class Scale(nn.Module):
    """RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


# ---- language models -------------------------------------------------------------------------------------------------


class NeoLayer(nn.Module):
    """GPT-NeoX: q, k and v of a head are neighbours in one matrix; attention and MLP side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"query_key_value": nn.Linear(width, 3 * width)})
        self.attention["dense"] = nn.Linear(width, width)
        self.mlp = nn.ModuleDict({"dense_h_to_4h": nn.Linear(width, 4 * width)})
        self.mlp["dense_4h_to_h"] = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention["query_key_value"](self.input_layernorm(x)).unflatten(-1, (self.heads, -1))
        q, k, v = qkv.chunk(3, -1)
        side = self.attention["dense"](attention(rotary(q), rotary(k), v))
        return x + side + self.mlp["dense_4h_to_h"](F.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x))))


class NeoNet(nn.Module):
    def __init__(self, vocab: int, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.gpt_neox = nn.ModuleDict({"embed_in": nn.Embedding(vocab, width)})
        self.gpt_neox["layers"] = nn.ModuleList(NeoLayer(width, heads) for _ in range(depth))
        self.gpt_neox["final_layer_norm"] = nn.LayerNorm(width)
        self.embed_out = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.gpt_neox["embed_in"].weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gpt_neox["embed_in"](tokens)
        for layer in self.gpt_neox["layers"]:
            x = layer(x)
        return self.embed_out(self.gpt_neox["final_layer_norm"](x))


class Neo(Words):
    def model(self) -> nn.Module:
        return NeoNet(self.config.padded, self.broad, self.depth)


class Swiglu(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedSwiglu(nn.Module):
    """Gate over up in one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Routed(nn.Module):
    """Experts in fused tensors (gate over up, out × in) or one by one; a shared expert; a balanced router."""

    def __init__(self, width: int, inner: int, count: int, fused: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(count))
        self.shared_experts, self.fused = Swiglu(width, inner), fused
        if fused:
            bank = nn.Module()
            bank.register_parameter("w13", nn.Parameter(torch.randn(count, 2 * inner, width) / math.sqrt(width)))
            bank.register_parameter("w2", nn.Parameter(torch.randn(count, width, inner) / math.sqrt(inner)))
            self.experts: nn.Module = bank
        else:
            self.experts = nn.ModuleList(Swiglu(width, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).sigmoid()
        picked = (score + self.gate.e_score_correction_bias).topk(2, -1).indices
        share = score * torch.zeros_like(score).scatter(-1, picked, 1.0)
        if self.training:
            with torch.no_grad():
                load = torch.zeros_like(score).scatter(-1, picked, 1.0).mean((0, 1))
                self.gate.e_score_correction_bias += 0.01 * (load.mean() - load).sign()
        share = share / share.sum(-1, keepdim=True)
        if self.fused:
            gate, up = torch.einsum("bli,eoi->belo", x, self.experts.w13).chunk(2, -1)
            out = torch.einsum("belo,eio,ble->bli", F.silu(gate) * up, self.experts.w2, share)
        else:
            out = sum(share[..., n : n + 1] * one(x) for n, one in enumerate(self.experts))
        return out + self.shared_experts(x)


class QwenLayer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, ffn: nn.Module) -> None:
        super().__init__()
        self.d = width // heads
        self.input_layernorm, self.post_attention_layernorm = Scale(width), Scale(width)
        outs = {"q_proj": width, "k_proj": groups * self.d, "v_proj": groups * self.d, "o_proj": width}
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, out, bias=False) for name, out in outs.items()})
        self.self_attn["q_norm"], self.self_attn["k_norm"] = Scale(self.d), Scale(self.d)
        self.mlp = ffn

    def forward(self, x: Tensor) -> Tensor:
        m, h = self.self_attn, self.input_layernorm(x)
        q, k, v = (m[f"{name}_proj"](h).unflatten(-1, (-1, self.d)) for name in "qkv")
        x = x + m["o_proj"](attention(rotary(m["q_norm"](q)), rotary(m["k_norm"](k)), v))
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenNet(nn.Module):
    def __init__(self, vocab: int, width: int, depth: int, heads: int, groups: int, ffn: Any, tied: bool) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(vocab, width), "norm": Scale(width)})
        self.model["layers"] = nn.ModuleList(QwenLayer(width, heads, groups, ffn(width)) for _ in range(depth))
        self.lm_head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.3)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x)
        return self.lm_head(self.model["norm"](x))


class Qwen(Words):
    """Grouped queries with norms of q and k."""

    heads = 4
    shared = 2
    depth = 3

    def ffn(self, width: int) -> nn.Module:
        return Swiglu(width, 2 * width)

    def model(self) -> nn.Module:
        return QwenNet(self.config.padded, self.broad, self.depth, self.heads, self.shared, self.ffn, self.tied)


class FusedQwen(Qwen):
    def ffn(self, width: int) -> nn.Module:
        return FusedSwiglu(width, 2 * width)


class Moe(Qwen):
    """Experts fused in two tensors a layer."""

    depth = 2
    broad = 24
    fused = True

    def ffn(self, width: int) -> nn.Module:
        return Routed(width, width, 4, self.fused)


class BertNet(nn.Module):
    """Encoder with BERT's names; the decoder of masked words is tied to their embedding."""

    def __init__(self, vocab: int, width: int, depth: int) -> None:
        super().__init__()
        tables = nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, width)})
        tables["position_embeddings"], tables["LayerNorm"] = nn.Embedding(32, width), nn.LayerNorm(width)
        self.bert = nn.ModuleDict({"embeddings": tables, "layer": nn.ModuleList()})
        for _ in range(depth):
            part = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value", "output")})
            part["attention_norm"], part["intermediate"] = nn.LayerNorm(width), nn.Linear(width, 2 * width)
            part["dense"], part["output_norm"] = nn.Linear(2 * width, width), nn.LayerNorm(width)
            self.bert["layer"].append(part)
        self.decoder = nn.Linear(width, vocab)
        nn.init.normal_(tables["word_embeddings"].weight, std=0.2)
        self.decoder.weight = tables["word_embeddings"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        t = self.bert["embeddings"]
        x = t["LayerNorm"](t["word_embeddings"](tokens) + t["position_embeddings"].weight[: tokens.shape[1]])
        for m in self.bert["layer"]:
            q, k, v = (m[name](x).unflatten(-1, (4, -1)) for name in ("query", "key", "value"))
            x = m["attention_norm"](x + m["output"](attention(q, k, v, False)))
            x = m["output_norm"](x + m["dense"](F.gelu(m["intermediate"](x))))
        return self.decoder(x)


class Bert(Words):
    """Every fifth word is masked."""

    def model(self) -> nn.Module:
        return BertNet(self.config.padded, self.broad, self.depth)

    def fit(self, x: Tensor) -> Tensor:
        hidden = torch.arange(x.shape[1]) % 5 == 2
        seen = torch.where(hidden, torch.zeros_like(x), x)
        return F.cross_entropy(self.module(seen)[:, hidden].flatten(0, 1), x[:, hidden].flatten())


class LstmNet(nn.Module):
    def __init__(self, vocab: int, width: int, tied: bool) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(vocab, width), nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, vocab)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(tokens))[0])


class Lstm(Words):
    broad = 24

    def model(self) -> nn.Module:
        return LstmNet(self.config.padded, self.broad, self.tied)


class T5Net(nn.Module):
    """Encoder and decoder of one block each, a table of relative positions, one embedding for both."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        for name in ("encoder", "decoder"):
            part = nn.ModuleDict({one: nn.Linear(width, width, bias=False) for one in ("q", "k", "v", "o")})
            if name == "decoder":
                for one in ("q", "k", "v", "o"):
                    part[f"cross_{one}"] = nn.Linear(width, width, bias=False)
                part["cross_norm"] = Scale(width)
            part["relative_attention_bias"], part["layer_norm"] = nn.Embedding(64, 4), Scale(width)
            part["wi"], part["wo"] = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
            part["ff_norm"], part["final_layer_norm"] = Scale(width), Scale(width)
            self.add_module(name, part)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def block(self, m: Any, x: Tensor, seen: Tensor | None) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = m["relative_attention_bias"]((places[:, None] - places + 32).clamp(0, 63)).permute(2, 0, 1)
        if seen is not None:
            bias = bias.masked_fill(places[:, None] < places, -1e4)
        h = m["layer_norm"](x)
        q, k, v = (m[name](h).unflatten(-1, (4, -1)).transpose(1, 2) for name in "qkv")
        x = x + m["o"](F.scaled_dot_product_attention(q, k, v, bias[None]).transpose(1, 2).flatten(2))
        if seen is not None:
            q = m["cross_q"](m["cross_norm"](x)).unflatten(-1, (4, -1))
            k, v = (m[f"cross_{name}"](seen).unflatten(-1, (4, -1)) for name in "kv")
            x = x + m["cross_o"](attention(q, k, v, False))
        return m["final_layer_norm"](x + m["wo"](F.relu(m["wi"](m["ff_norm"](x)))))

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.block(self.encoder, self.shared(tokens[:, :8]), None)
        return self.lm_head(self.block(self.decoder, self.shared(tokens), seen))


class T5(Words):
    broad = 24

    def model(self) -> nn.Module:
        return T5Net(self.config.padded, self.broad)


# ---- vision, diffusion, detection ------------------------------------------------------------------------------------


class ConvNext(nn.Module):
    """Depthwise convolutions and layer scales, then a head; ``batch`` puts batch norms there."""

    def __init__(self, width: int = 20, depth: int = 3, classes: int = 5, batch: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 2, 2)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            part = nn.ModuleDict({"dwconv": nn.Conv2d(width, width, 3, padding=1, groups=width)})
            part["norm"] = nn.BatchNorm2d(width) if batch else nn.GroupNorm(1, width)
            part["pwconv1"], part["pwconv2"] = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
            part.register_parameter("gamma", nn.Parameter(0.3 * torch.ones(width)))
            self.blocks.append(part)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for m in self.blocks:
            h = m["norm"](m["dwconv"](x)).permute(0, 2, 3, 1)
            x = x + (m.gamma * m["pwconv2"](F.gelu(m["pwconv1"](h)))).permute(0, 3, 1, 2)
        return self.head(self.norm(x.mean((2, 3))))


class Convs(Pictures):
    batchnorm = False

    def model(self) -> nn.Module:
        return ConvNext(batch=self.batchnorm)


class BnConvs(Convs):
    batchnorm = True


class Mixer(Pictures):
    """MLPs over places and over channels, in turn."""

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"stem": nn.Conv2d(2, 16, 2, 2), "head": nn.Linear(16, 5), "norm": nn.LayerNorm(16)})
        parts = (
            {"token_mixing": dense(16, 24, 16), "channel_mixing": dense(16, 24, 16), "norm": nn.LayerNorm(16)}
            for _ in range(3)
        )
        found["mixer_blocks"] = nn.ModuleList(nn.ModuleDict(one) for one in parts)
        return found

    def fit(self, x: Tensor) -> Tensor:
        m, h = self.module, self.module["stem"](x.view(-1, 2, 8, 8)).flatten(2)
        for one in m["mixer_blocks"]:
            h = h + one["token_mixing"](h)
            h = h + one["channel_mixing"](one["norm"](h.transpose(1, 2))).transpose(1, 2)
        want = (x @ noise(6, self.wide, 5)).argmax(1)
        return F.cross_entropy(m["head"](m["norm"](h.mean(2))), want)


class UNetNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv1d(3, width, 3, padding=1), nn.Conv1d(width, 3, 3, padding=1)
        self.time_embedding = dense(4, width, width)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        for a, b, where in (
            (width, width, "down"),
            (width, 2 * width, "down"),
            (4 * width, width, "up"),
            (2 * width, width, "up"),
        ):
            part = nn.ModuleDict({"conv": nn.Conv1d(a, b, 3, padding=1), "norm": nn.GroupNorm(4, b)})
            part["time_emb_proj"] = nn.Linear(width, b)
            (self.down_blocks if where == "down" else self.up_blocks).append(part)
        self.mid_block = nn.Conv1d(2 * width, 2 * width, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c, x, held = self.time_embedding(t), self.conv_in(x), []
        for m in self.down_blocks:
            x = F.silu(m["norm"](m["conv"](x)) + m["time_emb_proj"](c)[..., None])
            held.append(x)
        x = self.mid_block(x)
        for m in self.up_blocks:
            x = torch.cat([x, held.pop()], 1)
            x = F.silu(m["norm"](m["conv"](x)) + m["time_emb_proj"](c)[..., None])
        return self.conv_out(x)


class UNet(Rig):
    """Diffusion of short signals; an average of the weights is stored under ``ema``, by name."""

    wide = 3 * 12
    slow = 0.96

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.state_dict().items()}
        self.extra["ema_config"] = {"decay": self.slow, "num_updates": 0}

    def model(self) -> nn.Module:
        return UNetNet()

    def fit(self, x: Tensor) -> Tensor:
        clean, t = x.view(-1, 3, 12).cumsum(2) / 2, x[:, :4].sigmoid()
        dirt = x.roll(1, 0).view(-1, 3, 12)
        return F.mse_loss(self.module(clean * t[:, :1, None] + dirt * (1 - t[:, :1, None]), t), dirt)

    def update(self) -> None:
        super().update()
        told = self.extra["ema_config"]
        told["num_updates"] += 1
        for n, w in self.module.state_dict().items():
            if n in self.extra["ema"]:
                self.extra["ema"][n].lerp_(w, 1 - told["decay"])


class VqVae(Rig):
    """Codes that running sums of what chose them set, without gradients."""

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"encoder": dense(20, 32, 8), "decoder": dense(8, 32, 20), "quantize": nn.Module()})
        book = torch.randn(8, 16)
        for name, one in (("embed", book), ("cluster_size", torch.ones(16)), ("embed_avg", book.clone())):
            found["quantize"].register_buffer(name, one)
        return found

    def fit(self, x: Tensor) -> Tensor:
        m, q = self.module, self.module["quantize"]
        z = m["encoder"](x)
        with torch.no_grad():
            chosen = F.one_hot(torch.cdist(z, q.embed.T).argmin(1), 16).float()
            q.cluster_size.lerp_(chosen.sum(0), 0.05)
            q.embed_avg.lerp_(z.T @ chosen, 0.05)
            q.embed.copy_(q.embed_avg / q.cluster_size.clamp(min=1e-2))
        near = chosen @ q.embed.T
        return F.mse_loss(m["decoder"](z + (near - z).detach()), x) + 0.25 * F.mse_loss(z, near)


class Moco(Rig):
    """A query encoder, its slow copy, and a queue of keys with the place of the next one."""

    rows = 8

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"encoder_q": dense(20, 36, 12), "encoder_k": dense(20, 36, 12)})
        found["encoder_k"].load_state_dict(found["encoder_q"].state_dict())
        found["encoder_k"].requires_grad_(False)
        found.register_buffer("queue", F.normalize(torch.randn(12, 48), dim=0))
        found.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        return found

    def fit(self, x: Tensor) -> Tensor:
        m = self.module
        q = F.normalize(m["encoder_q"](x + 0.3 * x.roll(1, 1)), dim=1)
        with torch.no_grad():
            for a, b in zip(m["encoder_k"].parameters(), m["encoder_q"].parameters(), strict=True):
                a.lerp_(b, 0.03)
            k = F.normalize(m["encoder_k"](x), dim=1)
        found = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone()], 1) / 0.3
        with torch.no_grad():
            where = (int(m.queue_ptr) + torch.arange(len(k))) % 48
            m.queue[:, where] = k.T
            m.queue_ptr.copy_((m.queue_ptr + len(k)) % 48)
        return F.cross_entropy(found, torch.zeros(len(x), dtype=torch.long))


class DetrNet(nn.Module):
    """Queries that attend to places, with torch's fused projections."""

    def __init__(self, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.input_proj, self.query_embed = nn.Conv2d(2, width, 2, 2), nn.Embedding(6, width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(depth)
        )
        self.class_embed, self.bbox_embed = nn.Linear(width, 5), dense(width, width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.input_proj(x).flatten(2).transpose(1, 2)
        h = self.query_embed.weight.expand(len(x), -1, -1)
        for layer in self.decoder:
            h = layer(h, seen)
        return self.class_embed(h), self.bbox_embed(h)


class Detr(Pictures):
    def model(self) -> nn.Module:
        return DetrNet()

    def fit(self, x: Tensor) -> Tensor:
        kinds, boxes = self.module(x.view(-1, 2, 8, 8))
        want = (x @ noise(7, self.wide, 30)).view(-1, 6, 5).argmax(2)
        return F.cross_entropy(kinds.flatten(0, 1), want.flatten()) + F.l1_loss(boxes, x[:, :24].view(-1, 6, 4).tanh())


class Nerf(Rig):
    """A table of features by place, then MLPs of density and colour."""

    rows = 24

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"encoding": nn.Embedding(128, 6)})
        found["sigma_net"], found["color_net"] = dense(12, 24, 9, act=nn.ReLU), dense(12, 24, 3, act=nn.ReLU)
        return found

    def fit(self, x: Tensor) -> Tensor:
        m = self.module
        cells = ((x[:, :2].abs() * 40).long() % 64) + torch.tensor([0, 64])
        h = m["sigma_net"](m["encoding"](cells).flatten(1))
        seen = m["color_net"](torch.cat([h[:, 1:], x[:, 2:6]], 1)).sigmoid() * F.softplus(h[:, :1])
        return F.mse_loss(seen, (x[:, :3] * 3).sin().abs())


class Clip(Rig):
    """Two towers and the logarithm of a temperature."""

    rows = 12

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"visual": dense(20, 32, 32, 12), "textual": dense(20, 32, 32, 12)})
        found.register_parameter("logit_scale", nn.Parameter(torch.tensor(1.5)))
        return found

    def fit(self, x: Tensor) -> Tensor:
        m = self.module
        one, two = F.normalize(m["visual"](x), dim=1), F.normalize(m["textual"](self.wanted(x)), dim=1)
        found, right = m.logit_scale.exp() * one @ two.T, torch.arange(len(x))
        return F.cross_entropy(found, right) + F.cross_entropy(found.T, right)


# ---- control, graphs, recommendation, speech, adapters ---------------------------------------------------------------


class Sac(Rig):
    """An actor, twin critics with slow targets, a temperature; an Adam for each of the three."""

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"actor": dense(20, 30, 8), "qf1": dense(24, 30, 1), "qf2": dense(24, 30, 1)})
        for name in ("qf1", "qf2"):
            found[f"{name}_target"] = copy.deepcopy(found[name]).requires_grad_(False)
        found.register_parameter("log_alpha", nn.Parameter(torch.zeros(1)))
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        sides = [m["actor"].parameters(), [*m["qf1"].parameters(), *m["qf2"].parameters()], [m.log_alpha]]
        return [torch.optim.Adam(list(ws), lr=lr * times) for ws, times in zip(sides, (1, 2, 0.5), strict=True)]

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.module["actor"](x).chunk(2, 1)
        told = (mean + log.clamp(-3, 1).exp() * x[:, :4]).tanh()
        return told, (-log - (1 - told**2 + 1e-3).log()).sum(1)

    def fit(self, x: Tensor) -> Tensor:
        m, alpha = self.module, self.module.log_alpha.exp()
        told, chance = self.act(x)
        with torch.no_grad():
            after = torch.cat([x.roll(1, 1), told], 1)
            want = x[:, :1].sin() + 0.9 * torch.minimum(m["qf1_target"](after), m["qf2_target"](after))
        done = torch.cat([x, x[:, 8:12].tanh()], 1)
        fit = F.mse_loss(m["qf1"](done), want) + F.mse_loss(m["qf2"](done), want)
        gain = m["qf1"](torch.cat([x, told], 1))[:, 0]
        return fit + 0.1 * (alpha.detach() * chance - gain).mean() - (alpha * (chance.detach() - 2)).mean() * 0.1

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for name in ("qf1", "qf2"):
                sides = (self.module[f"{name}_target"], self.module[name])
                for a, b in zip(*(one.parameters() for one in sides), strict=True):
                    a.lerp_(b, 0.03)


class Ppo(Rig):
    """A policy and a value on observations that running statistics standardise."""

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"policy": dense(20, 32, 6, act=nn.Tanh), "vf": dense(20, 32, 1, act=nn.Tanh)})
        found["obs_rms"] = nn.Module()
        for name, one in (("mean", torch.zeros(20)), ("var", torch.ones(20)), ("count", torch.full((1,), 1e-4))):
            found["obs_rms"].register_buffer(name, one)
        return found

    def fit(self, x: Tensor) -> Tensor:
        m, x = self.module, 2.1 * x - 0.7
        told = m["obs_rms"]
        with torch.no_grad():
            told.count += len(x)
            share = float(len(x) / told.count)
            told.mean.lerp_(x.mean(0), share)
            told.var.lerp_((x - told.mean).square().mean(0), share)
        x = (x - told.mean) / (told.var + 1e-8).sqrt()
        gain = (x[:, 0].sin() - m["vf"](x)[:, 0]).detach()
        picked = (x[:, 1].abs() * 4).long() % 6
        return (
            F.mse_loss(m["vf"](x)[:, 0], x[:, 0].sin()) + 0.2 * (gain * F.cross_entropy(m["policy"](x), picked)).mean()
        )


class Gat(Rig):
    """Graph attention on a ring with chords."""

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"convs": nn.ModuleList(), "out": nn.Linear(20, 20)})
        for _ in range(3):
            one = nn.ModuleDict({"lin": nn.Linear(20, 20, bias=False)})
            for name in ("att_src", "att_dst"):
                one.register_parameter(name, nn.Parameter(0.3 * torch.randn(1, 4, 5)))
            one.register_parameter("bias", nn.Parameter(torch.zeros(20)))
            found["convs"].append(one)
        return found

    def fit(self, x: Tensor) -> Tensor:
        h = x
        for one in self.module["convs"]:
            v = one["lin"](h).unflatten(1, (4, 5))
            near = torch.stack([v, v.roll(1, 0), v.roll(-2, 0)])
            score = F.leaky_relu((near * one.att_src).sum(-1) + (v * one.att_dst).sum(-1), 0.2).softmax(0)
            h = F.elu((score[..., None] * near).sum(0).flatten(1) + one.bias) + h
        return F.mse_loss(self.module["out"](h), self.wanted(x))


class Dlrm(Rig):
    """Tables of three features, MLPs below and above their products."""

    rows = 32

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"emb_l": nn.ModuleList(nn.Embedding(48, 10) for _ in range(3))})
        found["bot_l"], found["top_l"] = dense(20, 24, 10, act=nn.ReLU), dense(16, 24, 1, act=nn.ReLU)
        return found

    def fit(self, x: Tensor) -> Tensor:
        m = self.module
        ids = [(x[:, n].abs() * 30).long() % 48 for n in range(3)]
        h = torch.stack([m["bot_l"](x), *(one(i) for one, i in zip(m["emb_l"], ids, strict=True))], 1)
        pairs = (h @ h.transpose(1, 2))[:, *torch.tril_indices(4, 4, -1)]
        want = ((ids[0] * 7 + ids[1] * 3) % 5 < 2).float()
        return F.binary_cross_entropy_with_logits(m["top_l"](torch.cat([h[:, 0], pairs], 1))[:, 0], want)


class Conformer(Rig):
    """Speech: attention, a depthwise convolution with a batch norm, a classifier of frames."""

    wide = 8 * 10
    rows = 6

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"subsample": nn.Linear(8, 16), "layers": nn.ModuleList(), "ctc": nn.Linear(16, 6)})
        for _ in range(2):
            one = nn.ModuleDict(
                {name: nn.Linear(16, 16) for name in ("linear_q", "linear_k", "linear_v", "linear_out")}
            )
            one["depthwise_conv"] = nn.Conv1d(16, 16, 3, padding=1, groups=16)
            one["batch_norm"], one["norm"], one["feed_forward"] = (
                nn.BatchNorm1d(16),
                nn.LayerNorm(16),
                dense(16, 32, 16),
            )
            found["layers"].append(one)
        return found

    def fit(self, x: Tensor) -> Tensor:
        frames = x.view(-1, 10, 8) * 1.3 + 0.2
        h = self.module["subsample"](frames)
        for m in self.module["layers"]:
            q, k, v = (m[f"linear_{name}"](m["norm"](h)).unflatten(-1, (4, -1)) for name in "qkv")
            h = h + m["linear_out"](attention(q, k, v, False))
            h = h + F.silu(m["batch_norm"](m["depthwise_conv"](h.transpose(1, 2)))).transpose(1, 2)
            h = h + 0.5 * m["feed_forward"](h)
        want = (frames @ noise(8, 8, 6)).argmax(2)
        return F.cross_entropy(self.module["ctc"](h).flatten(0, 1), want.flatten())


class Vocoder(Rig):
    """A generator of weight-normed convolutions and a discriminator, an AdamW and a decaying rate for each."""

    wide = 24

    def model(self) -> nn.Module:
        pre, post = nn.Conv1d(1, 10, 5, padding=2), nn.Conv1d(10, 1, 5, padding=2)
        parts = {"conv_pre": pre, "resblock": nn.Conv1d(10, 10, 3, padding=1), "conv_post": post}
        found = nn.ModuleDict({"generator": nn.ModuleDict(parts), "discriminator": dense(24, 28, 1, act=nn.LeakyReLU)})
        for one in found["generator"].values():
            nn.utils.weight_norm(one)
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, c = self.module, self.config
        sides = [list(m[name].parameters()) for name in ("generator", "discriminator")]
        return [torch.optim.AdamW(ws, lr=c.lr, betas=(0.8, 0.99), weight_decay=0.01) for ws in sides]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)

    def fit(self, x: Tensor) -> Tensor:
        m, g = self.module, self.module["generator"]
        wave = x.cumsum(1)[:, None] / 4
        h = F.leaky_relu(g["conv_pre"](wave + 0.1 * x[:, None]), 0.1)
        fake = g["conv_post"](h + F.leaky_relu(g["resblock"](h), 0.1)).tanh()[:, 0]
        d, real = m["discriminator"], wave[:, 0].tanh()
        fool = (1 - d(fake)).square().mean()
        return F.l1_loss(fake, real) * 5 + fool + (1 - d(real)).square().mean() + d(fake.detach()).square().mean()


class Adapter(nn.Module):
    """A frozen matrix with a low-rank one beside it, under peft's names."""

    def __init__(self, a: int, b: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(a, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, b, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Lora(Rig):
    def model(self) -> nn.Module:
        return nn.ModuleDict({name: Adapter(20, 20) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})

    def fit(self, x: Tensor) -> Tensor:
        m, h = self.module, x
        for name in ("q_proj", "k_proj", "v_proj"):
            h = F.silu(m[name](h)) + h
        return F.mse_loss(m["o_proj"](h), self.wanted(x))


class Scaled(Neo):
    """With the state of torch's GradScaler; the scale doubles every six updates."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 4096.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 6,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == 6:
            told |= {"scale": 2 * told["scale"], "_growth_tracker": 0}


class Dropping(Rig):
    """Dropout on four ranks, each with a generator of its own."""

    ranks = 4
    rows = 12

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_states"] = [torch.Generator().manual_seed(11 + n).get_state() for n in range(self.ranks)]

    def fit(self, x: Tensor) -> Tensor:
        found = []
        for n, part in enumerate(x.chunk(self.ranks)):
            drawn = torch.Generator()
            drawn.set_state(self.extra["rng_states"][n])
            kept = torch.rand(part.shape, generator=drawn) > 0.1
            self.extra["rng_states"][n] = drawn.get_state()
            found.append(F.mse_loss(self.module(part * kept), self.wanted(part)))
        return torch.stack(found).mean()


# ---- optimizers ------------------------------------------------------------------------------------------------------


class FusedAdam(Optimizer):
    """Transformer Engine's on bf16 weights: fp32 copies in its state, the count in the group."""

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
        state["master_param"].mul_(1 - group["lr"] * group["weight_decay"])
        state["master_param"].addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - one**t))
        weight.copy_(state["master_param"])


class HalfNeo(Neo):
    """bf16 weights, fp32 copies of them."""

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return FusedAdam(groups, self.config.lr, self.config.betas)


class HalfQwen(Qwen):
    """bf16 weights, fp32 copies of them."""

    optimizer = HalfNeo.optimizer

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)


class AdEMAMix(Optimizer):
    """Apple's: a fast and a very slow first moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999, 0.995), alpha=2.0, eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        names = ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")
        return {"step": 0, **{name: torch.zeros_like(weight) for name in names}}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two, three = group["betas"]
        state["step"] += 1
        t = state["step"]
        state["exp_avg_fast"].lerp_(gradient, 1 - one)
        state["exp_avg_slow"].lerp_(gradient, 1 - three)
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        under = (state["exp_avg_sq"] / (1 - two**t)).sqrt().add_(group["eps"])
        weight.addcdiv_(state["exp_avg_fast"] / (1 - one**t) + 2.0 * state["exp_avg_slow"], under, value=-group["lr"])


class AdamMini(Optimizer):
    """One second moment for all of a tensor's row."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "m": torch.zeros_like(weight), "vmean": torch.zeros(weight.shape[:1])}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        state["step"] += 1
        t = state["step"]
        state["m"].lerp_(gradient, 1 - one)
        state["vmean"].mul_(two).add_(
            gradient.square().flatten(1).mean(1) if gradient.ndim > 1 else gradient.square(), alpha=1 - two
        )
        under = (state["vmean"] / (1 - two**t)).sqrt().add_(group["eps"])
        under = under.view(-1, *[1] * (weight.ndim - 1))
        weight.addcdiv_(state["m"], under.expand_as(weight), value=-group["lr"] / (1 - one**t))


class GaLore(Optimizer):
    """Adam of gradients projected to four dimensions; the projection is found again every ten updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-8, rank=4, update_proj_gap=10, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if weight.ndim != 2 or min(weight.shape) < 5:
            return super().begin(weight, group)
        zeros = torch.zeros(4, weight.shape[1])
        return {"step": 0, "ortho_matrix": torch.zeros(len(weight), 4), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        if "ortho_matrix" in state:
            if state["step"] % group["update_proj_gap"] == 0:
                state["ortho_matrix"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, :4].contiguous()
            gradient = state["ortho_matrix"].T @ gradient
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].lerp_(gradient, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        move = state["exp_avg"] / (1 - one**t) / ((state["exp_avg_sq"] / (1 - two**t)).sqrt() + group["eps"])
        weight.sub_(state["ortho_matrix"] @ move if "ortho_matrix" in state else move, alpha=group["lr"])


class Lookahead(torch.optim.AdamW):
    """AdamW that is drawn back to slow weights every five updates; these are in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None and "slow_buffer" not in self.state[w]:
                    self.starting = {**getattr(self, "starting", {}), w: w.clone()}
        super().step()
        for group in self.param_groups:
            for w in group["params"]:
                kept = self.state[w]
                if not kept:
                    continue
                if "slow_buffer" not in kept:
                    kept["slow_buffer"] = self.starting[w]
                if int(kept["step"]) % 5 == 0:
                    kept["slow_buffer"].lerp_(w, 0.5)
                    w.copy_(kept["slow_buffer"])


def by(kind: Any, times: float = 1.0, **more: Any) -> Any:
    """For `Loop.optimizer`: that class at so many times the run's rate, without decay of the groups' own."""

    def optimizer(self: Any, groups: Any) -> torch.optim.Optimizer:
        return kind([{"params": one["params"]} for one in groups], lr=self.config.lr * times, **more)

    return optimizer


def muon(self: Any) -> list[torch.optim.Optimizer]:
    """For `Loop.made`: matrices of the layers by Muon, the rest by AdamW."""
    named, c = dict(self.module.named_parameters()), self.config
    inner = [w for n, w in named.items() if w.ndim == 2 and re.search(r"layers?\.|blocks\.|convs\.", n)]
    known = {id(w) for w in inner}
    rest = [w for w in named.values() if id(w) not in known]
    return [torch.optim.Muon(inner, lr=4 * c.lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=c.lr, betas=c.betas)]


def steady(self: Any, optimizer: torch.optim.Optimizer) -> None:
    """For `Loop.schedule`: none."""


def cosine(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    """For `Loop.schedule`: torch's own, which computes each rate from the last one."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total, self.config.lr / 40)


def stairs(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    """For `Loop.schedule`: a factor every nine updates."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.8)


def layered(self: Any) -> Any:
    """For `Loop.groups`: one for each parameter, deeper ones faster."""
    named = [(n, w) for n, w in self.module.named_parameters() if w.requires_grad]
    decay = self.config.weight_decay
    return [
        {"params": [w], "lr": self.config.lr * 0.9 ** (len(named) - n), "weight_decay": decay if w.ndim > 1 else 0.0}
        for n, (_, w) in enumerate(named)
    ]


# ---- acts: what goes wrong -------------------------------------------------------------------------------------------


def acts(*parts: Act) -> Act:
    """For `Loop.loaded`: one after the other."""

    def loaded(self: Any) -> None:
        with torch.no_grad():
            for part in parts:
                part(self)

    return loaded


def hit(self: Any, pattern: str = "") -> dict[str, Tensor]:
    found = {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}
    assert found, pattern
    return found


def kept_of(self: Any, w: Tensor) -> dict[str, Any]:
    return next((one.state[w] for one in self.optimizers if w in one.state), {})


def all_groups(self: Any) -> Iterator[dict[str, Any]]:
    for one in self.optimizers:
        yield from one.param_groups


def unread(pattern: str) -> Act:
    """Entries of the model keep what this process made."""

    def act(self: Any) -> None:
        config, self.config = self.config, self.config.but(seed=self.config.seed + 9)
        new, now = self.net().state_dict(), self.module.state_dict()
        self.config = config
        names = [n for n in now if re.search(pattern, n)]
        assert names, pattern
        for n in names:
            now[n].copy_(new[n])

    return act


def weights(pattern: str, how: Callable[[Tensor], Tensor]) -> Act:
    """Weights and buffers of these names alone become what ``how`` makes of them."""

    def act(self: Any) -> None:
        names = [n for n in self.module.state_dict() if re.search(pattern, n)]
        assert names, pattern
        for n in names:
            w = self.module.state_dict()[n]
            w.copy_(how(w.clone()))

    return act


def states(keys: str, how: Callable[[Any], Any], pattern: str = "") -> Act:
    """These entries of the optimizer's state become what ``how`` makes of them."""

    def act(self: Any) -> None:
        count = 0
        for w in hit(self, pattern).values():
            kept = kept_of(self, w)
            for key in keys.split():
                if key in kept:
                    kept[key], count = how(kept[key]), count + 1
        assert count, keys

    return act


def stateless(pattern: str = "") -> Act:
    """The optimizer has nothing for these."""

    def act(self: Any) -> None:
        for w in hit(self, pattern).values():
            for one in self.optimizers:
                one.state.pop(w, None)

    return act


def laid(pattern: str, how: Callable[[Tensor], Tensor], *, model: bool = True, state: bool = True) -> Act:
    """Weights, and state of their shape, in another order."""

    def act(self: Any) -> None:
        for w in hit(self, pattern).values():
            for one in kept_of(self, w).values() if state else ():
                if torch.is_tensor(one) and one.shape == w.shape:
                    one.copy_(how(one.clone()))
            if model:
                w.copy_(how(w.clone()))

    return act


def moved(order: Callable[[int], int], pattern: str, *, model: bool = True, state: bool = True) -> Act:
    """Layers (the number that the pattern's group finds) take the place of others; ``order`` says whose."""

    def act(self: Any) -> None:
        named = {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}
        assert named, pattern
        old = {n: (w.clone(), copy.copy(kept_of(self, w))) for n, w in named.items()}
        count = 0
        for n, w in named.items():
            place = re.search(pattern, n)
            assert place is not None
            source = n[: place.start(1)] + str(order(int(place.group(1)))) + n[place.end(1) :]
            if source == n or source not in old:
                continue
            count += 1
            if model:
                w.copy_(old[source][0])
            if state and old[source][1]:
                kept_of(self, w).update(copy.deepcopy(old[source][1]))
        assert count, pattern

    return act


def crossed(one: str, two: str, *, model: bool = True, state: bool = True) -> Act:
    """Parameters under a name with ``one`` change places with those with ``two``."""

    def act(self: Any) -> None:
        named, count = dict(self.module.named_parameters()), 0
        for n, a in named.items():
            b = named.get(n.replace(one, two))
            if one not in n or b is None or b.shape != a.shape:
                continue
            count += 1
            if state:
                s, t = kept_of(self, a), kept_of(self, b)
                for key in s:
                    s[key], t[key] = t[key], s[key]
            if model:
                saved = a.clone()
                a.copy_(b)
                b.copy_(saved)
        assert count, one

    return act


def by_name(pattern: str = "", keys: str = "") -> Act:
    """State goes to parameters of the same shape in the order of sorted names, not in that of the module."""

    def act(self: Any) -> None:
        shapes: dict[Any, list[str]] = {}
        named = hit(self, pattern)
        for n, w in named.items():
            if kept_of(self, w):
                shapes.setdefault(tuple(w.shape), []).append(n)
        count = 0
        for names in shapes.values():
            old = {n: dict(kept_of(self, named[n])) for n in names}
            for n, source in zip(names, sorted(names), strict=True):
                count += n != source
                chosen = {k: v for k, v in old[source].items() if not keys or k in keys.split()}
                kept_of(self, named[n]).update(copy.deepcopy(chosen))
        assert count, "the module's order is that of the names"

    return act


def older(updates: int, pattern: str = "", *, model: bool = True, keys: str | None = "") -> Act:
    """Weights and state (all entries, these, or ``None``) come from an older save."""

    def act(self: Any) -> None:
        old, now = self.earlier(updates), self.module.state_dict()
        for n in now if model else ():
            if re.search(pattern, n):
                now[n].copy_(old["model"][n])
        told = old.get("optimizers") or [old["optimizer"]]
        for one, from_ in zip(self.optimizers, told, strict=True) if keys is not None else ():
            numbers = [number for group in from_["param_groups"] for number in group["params"]]
            mine = [id(w) for group in one.param_groups for w in group["params"]]
            where = dict(zip(mine, numbers, strict=False))
            for w in hit(self, pattern).values():
                for key, value in from_["state"].get(where.get(id(w), -1), {}).items():
                    if not keys or key in keys.split():
                        one.state[w][key] = copy.deepcopy(value)

    return act


def field(key: str, **fields: Any) -> Act:
    """Fields stored beside the model; a callable gets the old value."""

    def act(self: Any) -> None:
        for name, value in fields.items():
            assert name in self.extra[key], name
            self.extra[key][name] = value(self.extra[key][name]) if callable(value) else value

    return act


def averages(self: Any) -> None:
    """The average becomes the weights."""
    for n, w in self.module.state_dict().items():
        w.copy_(self.extra["ema"][n])


def decays_crossed(self: Any) -> None:
    one, two = self.optimizers[0].param_groups[:2]
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def merged_again(self: Any) -> None:
    """Adapters go into the base, and stay beside it."""
    for m in self.module.values():
        m.base_layer.weight += 2.0 * m.lora_B["default"].weight @ m.lora_A["default"].weight


def rebegun(self: Any) -> None:
    """The schedules begin again, and the optimizers with them."""
    self.schedules = []
    for one in self.optimizers:
        for group in one.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        made = self.schedule(one)
        self.schedules += [made] if made is not None else []


def forwarded(updates: Callable[[int], int]) -> Act:
    """The restored schedule is stepped on by so many updates."""

    def act(self: Any) -> None:
        for schedule in self.schedules:
            for _ in range(updates(self.step)):
                schedule.step()

    return act


def rate(times: float, which: Callable[[int], bool] = lambda n: True) -> Act:
    """The rate of param groups is another one; the schedule does not know."""

    def act(self: Any) -> None:
        for n, group in enumerate(all_groups(self)):
            if which(n):
                group["lr"] *= times

    return act


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def noised(size: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + size * x.std() * noise(x.numel(), *x.shape).to(x.dtype)


# ---- acts: what is innocent ------------------------------------------------------------------------------------------


def new_lr(times: float) -> Act:
    """Another learning rate, wherever it is kept."""

    def act(self: Any) -> None:
        for one in self.schedules:
            one.base_lrs = [lr * times for lr in one.base_lrs]
            one._last_lr = [lr * times for lr in one._last_lr]
        for group in all_groups(self):
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * times
        self.extra["args"]["lr"] *= times

    return act


def new_batch(times: float) -> Act:
    return lambda self: self.extra["args"].update(train_batch_size=int(self.size * times))


def new_clip(value: float) -> Act:
    def act(self: Any) -> None:
        self.clip = self.extra["args"]["grad_clip"] = value

    return act


def new_field(**fields: Any) -> Act:
    """Fields of all param groups that have them, and of the arguments; a callable gets the old value."""

    def act(self: Any) -> None:
        for where in (*all_groups(self), self.extra["args"]):
            for key, value in fields.items():
                if key in where:
                    where[key] = value(where[key]) if callable(value) else value

    return act


def new_length(times: float) -> Act:
    """The schedule gets another length, at the same place."""

    def act(self: Any) -> None:
        config = self.config = self.config.but(total=int(self.config.total * times))
        self.extra["args"]["max_steps"] = config.total
        for one in self.schedules:
            one.lr_lambdas = [lambda done: config.lr_at(done + 1) / config.lr] * len(one.lr_lambdas)

    return act


def frozen(pattern: str) -> Act:
    def act(self: Any) -> None:
        for w in hit(self, pattern).values():
            w.requires_grad_(False)

    return act


def more_rows(pattern: str, count: int) -> Act:
    """Tables get rows at their end; their moments get zeros."""

    def act(self: Any) -> None:
        for n, w in enumerate(hit(self, pattern).values()):
            kept = kept_of(self, w)
            for key, one in list(kept.items()):
                if torch.is_tensor(one) and one.shape == w.shape:
                    kept[key] = torch.cat([one, torch.zeros(count, *one.shape[1:], dtype=one.dtype)])
            w.data = torch.cat([w.data, 0.04 * noise(n, count, *w.shape[1:]).to(w.dtype)])

    return act


def _joined(self: Any, ws: list[Tensor], like: dict[str, Any], times: float) -> None:
    """Give these a param group like another but for the rate."""
    new = {**{k: v for k, v in like.items() if k != "params"}, "params": ws, "lr": like["lr"] * times}
    new |= {"initial_lr": like["initial_lr"] * times} if "initial_lr" in like else {}
    self.optimizers[0].param_groups.append(new)
    for schedule in self.schedules[:1]:
        schedule.base_lrs.append(new.get("initial_lr", new["lr"]))
        if hasattr(schedule, "lr_lambdas"):
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        schedule._last_lr = [group["lr"] for group in self.optimizers[0].param_groups]


def aux_head(self: Any) -> None:
    """A head is added, in a group of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(23)
        self.module.add_module("aux_head", nn.Linear(5, 3))
    ws = [w.requires_grad_(True) for w in self.module.aux_head.parameters()]
    _joined(self, ws, self.optimizers[0].param_groups[0], 1.0)


def own_group(pattern: str, times: float = 0.3) -> Act:
    """These move to a new group with a rate of its own."""

    def act(self: Any) -> None:
        known = {id(w) for w in hit(self, pattern).values()}
        groups = self.optimizers[0].param_groups
        like = next(g for g in groups if any(id(w) in known for w in g["params"]))
        mine = [w for g in groups for w in g["params"] if id(w) in known]
        for g in groups:
            g["params"] = [w for w in g["params"] if id(w) not in known]
        _joined(self, mine, like, times)

    return act


def new_stage(self: Any) -> None:
    """A new stage on other data: the order has another seed and begins at its start, and the arguments say so."""
    self.extra["dataloader"].update(shuffle_seed=77, samples_yielded=0, epoch=0)
    self.extra["args"]["seed"] = 77


def new_head(pattern: str) -> Act:
    """A head is exchanged: new weights, and no state for them."""
    return acts(unread(pattern), stateless(pattern))
