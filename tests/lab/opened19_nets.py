"""What the nineteenth half trains, and what its cases do to a trainer right after a load."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.live import Loop
from tests.lab.optimizers import AdamW8bit, Optimizer

Tensor = torch.Tensor
Step = Callable[[Any], None]


def dice(number: int, *shape: int) -> Tensor:
    """Normal numbers that depend on nothing but ``number``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def mlp(*sizes: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    found: list[nn.Module] = []
    for n in range(len(sizes) - 1):
        found += [nn.Linear(sizes[n], sizes[n + 1]), act()]
    return nn.Sequential(*found[:-1])


class Bench(Loop):
    """A trainer that stores its hyperparameters, its place in the data and the samples that it saw.

    Attributes:
        width: numbers of a sample. batch_size: samples of an update. shelf: old saves, where ``remembers`` is set.
    """

    layouts = ("torch_save", "torch_save", "folder", "lightning")
    width = 24
    batch_size = 20
    remembers = False
    shelf: ClassVar[dict[str, dict[int, Any]]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["hparams"] = {
            "learning_rate": config.lr,
            "weight_decay": config.weight_decay,
            "batch_size": self.batch_size,
            "gradient_clip_val": self.clip,
        }
        self.extra["sampler"] = {"epoch": 0, "index": 0, "seed": 77}
        self.extra["consumed_samples"] = 0

    def build(self) -> nn.Module:
        return mlp(self.width, 40, 40, self.width)

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return self.build()

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return dice(told["seed"] * 7919 + told["index"], self.extra["hparams"]["batch_size"], self.width)

    def target(self, x: Tensor) -> Tensor:
        return torch.sin(x @ dice(5, self.width, self.width) / 5) + 0.3 * x.roll(1, 1)

    def score(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x), self.target(x))

    def loss(self, x: Tensor) -> Tensor:
        found = self.score(x)
        extra = getattr(self.module, "new_head", None)
        return found if extra is None else found + 0.05 * (extra(x[:, :6].float()) - 1).pow(2).mean()

    def update(self) -> None:
        super().update()
        self.extra["sampler"]["index"] += 1
        self.extra["consumed_samples"] += self.extra["hparams"]["batch_size"]
        if self.remembers:
            kept = self.shelf.setdefault(type(self).__name__, {})
            if self.step == 1:
                kept.clear()
            kept[self.step] = copy.deepcopy(self.content())

    def past(self, by: int) -> Any:
        return self.shelf[type(self).__name__][self.step - by]


# ---- networks --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with q, k and v in one matrix, one after the other, and an MLP or experts."""

    def __init__(self, width: int, heads: int, experts: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        parts = {"gate_up_proj": nn.Linear(width, 4 * width, bias=False), "down_proj": nn.Linear(2 * width, width)}
        self.mlp = Routed(width, experts) if experts else nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            one.view(rows, length, self.heads, -1).transpose(1, 2)
            for one in self.attn["qkv"](self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.attn["proj"](mixed.transpose(1, 2).reshape(rows, length, width))
        if isinstance(self.mlp, Routed):
            return x + self.mlp(self.ln_2(x))
        gate, up = self.mlp["gate_up_proj"](self.ln_2(x)).chunk(2, -1)
        return x + self.mlp["down_proj"](F.silu(gate) * up)


class Routed(nn.Module):
    """Experts in two tensors, inputs first; a token visits two of them."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(torch.randn(count, width, 2 * width) / math.sqrt(width)),
                "down_proj": nn.Parameter(torch.randn(count, width, width) / math.sqrt(width)),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).softmax(-1)
        kept = score * torch.zeros_like(score).scatter(-1, score.topk(2, -1).indices, 1.0)
        gate, up = torch.einsum("blh,ehf->eblf", x, self.experts["gate_up_proj"]).chunk(2, -1)
        out = torch.einsum("eblf,efh->eblh", F.silu(gate) * up, self.experts["down_proj"])
        return torch.einsum("eblh,ble->blh", out, kept)


class Gpt(nn.Module):
    def __init__(self, vocab: int, tied: bool, experts: int, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(32, width)
        nn.init.normal_(self.wte.weight, std=0.2)
        nn.init.normal_(self.wpe.weight, std=0.2)
        self.h = nn.ModuleList(Block(width, 4, experts, True) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens[:, :-1]) + self.wpe.weight[: tokens.shape[1] - 1]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Chat(Bench):
    """A language model on the lab's tokens."""

    tied = False
    experts = 0
    batch_size = 6

    def build(self) -> nn.Module:
        return Gpt(self.config.padded, self.tied, self.experts)

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        rows = self.extra["hparams"]["batch_size"]
        return batch(self.config.but(batch=rows), told["index"], told["seed"])

    def score(self, x: Tensor) -> Tensor:
        return self.module(x)


class Crowd(Chat):
    experts = 4


class Llama(Chat):
    """The lab's decoder: q, k, v, gate and up apart, rotary."""

    def net(self) -> nn.Module:
        return Loop.net(self)

    def score(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


class Vision(nn.Module):
    """A transformer on nine patches with a class token."""

    def __init__(self, classes: int = 6, width: int = 32) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 2, 2)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, 10, width))
        self.blocks = nn.ModuleList(Block(width, 4, 0, False) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Vit(Bench):
    width = 3 * 36

    def build(self) -> nn.Module:
        return Vision()

    def score(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x.view(-1, 3, 6, 6)), (x @ dice(3, self.width, 6)).argmax(1))


class Convs(nn.Module):
    """Strided convolutions with batch norms, a pyramid's side branch, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.layer1 = nn.Sequential(nn.Conv2d(12, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.lateral = nn.Conv2d(16, 16, 1)
        self.cls_head, self.reg_head = nn.Linear(16, 5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.layer1(self.stem(x))
        inner = (self.layer2(inner) + self.lateral(inner)).mean((2, 3))
        return self.cls_head(inner), self.reg_head(inner)


class Spotter(Bench):
    """A detector by SGD with Nesterov's momentum; the stem and layers at half the rate."""

    width = 3 * 36

    def build(self) -> nn.Module:
        return Convs()

    def groups(self) -> Any:
        held = list(self.module.named_parameters())
        inner = [w for n, w in held if not n.startswith(("cls_head", "reg_head"))]
        rest = [w for n, w in held if n.startswith(("cls_head", "reg_head"))]
        return [{"params": inner, "lr": 6 * self.config.lr}, {"params": rest, "lr": 12 * self.config.lr}]

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def score(self, x: Tensor) -> Tensor:
        label, box = self.module(x.view(-1, 3, 6, 6) * 1.3 + 0.4)
        return F.cross_entropy(label, (x @ dice(4, self.width, 5)).argmax(1)) + F.smooth_l1_loss(box, x[:, :4].tanh())


class Diffuse(Bench):
    """A denoiser with group norms; averages of its weights warm up as timm's and diffusers' do."""

    most = 0.995

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {"decay": self.most, "optimization_step": 0, "shadow": {}}
        self.extra["ema"]["shadow"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def build(self) -> nn.Module:
        parts = {"temb": mlp(6, 24, 24, act=nn.SiLU), "enc": mlp(48, 48, 32, act=nn.SiLU), "mid": nn.GroupNorm(4, 32)}
        return nn.ModuleDict({**parts, "dec": mlp(32, 48, 24, act=nn.SiLU)})

    def score(self, x: Tensor) -> Tensor:
        m, t = self.module, x[:, 6:12].sigmoid()
        noise = x.roll(1, 0)
        noisy = x * t[:, :1].sqrt() + noise * (1 - t[:, :1]).sqrt()
        return F.mse_loss(m["dec"](F.silu(m["mid"](m["enc"](torch.cat([noisy, m["temb"](t)], 1))))), noise)

    def update(self) -> None:
        super().update()
        told = self.extra["ema"]
        told["optimization_step"] += 1
        decay = min(told["decay"], (1 + told["optimization_step"]) / (10 + told["optimization_step"]))
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                if n in told["shadow"]:
                    told["shadow"][n].lerp_(w, 1 - decay)


class Dqn(Bench):
    """Q-learning: an online and a target net, copied every tenth update; running statistics of observations."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"online": mlp(24, 40, 40, 5), "target": mlp(24, 40, 40, 5)})
        found["target"].load_state_dict(found["online"].state_dict())
        found["target"].requires_grad_(False)
        for name, value in (("running_mean", torch.zeros(24)), ("running_var", torch.ones(24))):
            found.register_buffer(name, value)
        found.register_buffer("count", torch.tensor(1e-4))
        return found

    def score(self, x: Tensor) -> Tensor:
        m, x = self.module, 1.5 * x + 0.7
        with torch.no_grad():
            n = len(x)
            total = m.count + n
            delta = x.mean(0) - m.running_mean
            spread = m.running_var * m.count + x.var(0) * n + delta.pow(2) * m.count * n / total
            m.running_mean += delta * n / total
            m.running_var.copy_(spread / total)
            m.count.copy_(total)
        x = (x - m.running_mean) / (m.running_var + 1e-5).sqrt()
        act = (x[:, 0].abs() * 3).long() % 5
        with torch.no_grad():
            want = x[:, 1].tanh() + 0.9 * m["target"](x.roll(1, 0)).amax(1)
        return F.smooth_l1_loss(m["online"](x).gather(1, act[:, None])[:, 0], want)

    def update(self) -> None:
        super().update()
        if self.step % 10 == 0:
            self.module["target"].load_state_dict(self.module["online"].state_dict())


class Duel(Bench):
    """Two networks of the same shape by two optimizers: an actor, and a critic at three times the rate."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"actor": mlp(24, 36, 12), "critic": mlp(24, 36, 12)})

    def made(self) -> list[torch.optim.Optimizer]:
        lr, m = self.config.lr, self.module
        actor = torch.optim.Adam(m["actor"].parameters(), lr=lr, betas=(0.9, 0.999))
        return [actor, torch.optim.Adam(m["critic"].parameters(), lr=3 * lr, betas=(0.9, 0.999))]

    def score(self, x: Tensor) -> Tensor:
        value = self.module["critic"](x)
        gain = (self.module["actor"](x).softmax(1) * value.detach()).sum(1).mean()
        return F.mse_loss(value, 2 * x[:, :12].sin()) - gain


class Graphs(Bench):
    """Messages along a ring, weighed by attention, with batch norms."""

    def build(self) -> nn.Module:
        one = [nn.ModuleDict({"lin_src": nn.Linear(24, 24), "lin_dst": nn.Linear(24, 24)}) for _ in range(3)]
        return nn.ModuleDict(
            {
                "convs": nn.ModuleList(one),
                "bns": nn.ModuleList(nn.BatchNorm1d(24) for _ in one),
                "out": nn.Linear(24, 24),
            }
        )

    def score(self, x: Tensor) -> Tensor:
        m, h = self.module, x
        for conv, norm in zip(m["convs"], m["bns"], strict=True):
            near = torch.stack([h.roll(1, 0), h.roll(-1, 0)])
            share = (near * conv["lin_dst"](h)).sum(-1, keepdim=True).div(5).softmax(0)
            h = h + F.relu(norm(conv["lin_src"]((share * near).sum(0)) + conv["lin_dst"](h)))
        return F.mse_loss(m["out"](h), self.target(x))


class Shop(Bench):
    """A recommender: tables by Adagrad, the rest by SGD with momentum."""

    def build(self) -> nn.Module:
        tables = nn.ModuleList(nn.Embedding(n, 10) for n in (60, 60, 40))
        return nn.ModuleDict({"emb_l": tables, "bot_l": mlp(24, 32, 10, act=nn.ReLU), "top_l": mlp(40, 32, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        rest = [*m["bot_l"].parameters(), *m["top_l"].parameters()]
        return [
            torch.optim.Adagrad(m["emb_l"].parameters(), lr=10 * lr),
            torch.optim.SGD(rest, lr=10 * lr, momentum=0.9),
        ]

    def score(self, x: Tensor) -> Tensor:
        m = self.module
        ids = [(x[:, n].abs() * 25).long() % table.num_embeddings for n, table in enumerate(m["emb_l"])]
        parts = [table(one) for table, one in zip(m["emb_l"], ids, strict=True)]
        found = m["top_l"](torch.cat([m["bot_l"](x), *parts], 1))[:, 0]
        return F.mse_loss(found, torch.sin(ids[0].float()) * torch.cos(ids[1].float() / 3))


class Speaker(Bench):
    """A convolution with batch norm, an LSTM in both directions and a classifier of every frame."""

    width = 8 * 8

    def build(self) -> nn.Module:
        front = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
        return nn.ModuleDict(
            {"frontend": front, "lstm": nn.LSTM(16, 16, bidirectional=True, batch_first=True), "ctc": nn.Linear(32, 6)}
        )

    def score(self, x: Tensor) -> Tensor:
        rows = 1.4 * x.view(-1, 8, 8) + 0.5
        found = self.module["ctc"](self.module["lstm"](self.module["frontend"](rows).transpose(1, 2))[0])
        return F.cross_entropy(found.flatten(0, 1), (rows.transpose(1, 2) @ dice(6, 8, 6)).argmax(-1).flatten())


class Clip(Bench):
    """Two towers and a learned temperature."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"visual": mlp(24, 40, 16), "textual": mlp(24, 40, 16)})
        found.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
        return found

    def score(self, x: Tensor) -> Tensor:
        m = self.module
        a, b = F.normalize(m["visual"](x)), F.normalize(m["textual"](x.roll(2, 1) + 0.3 * x))
        logits = m.logit_scale.exp() * a @ b.T
        want = torch.arange(len(x))
        return (F.cross_entropy(logits, want) + F.cross_entropy(logits.T, want)) / 2


class Vae(Bench):
    """A variational autoencoder by RMSprop; its noise is drawn from torch's own generator."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"encoder": mlp(24, 40, 16), "decoder": mlp(8, 40, 24)})

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        plain = [{"params": g["params"]} for g in groups]
        return torch.optim.RMSprop(plain, lr=self.config.lr / 2, alpha=0.98, momentum=0.5)

    def score(self, x: Tensor) -> Tensor:
        mean, log = self.module["encoder"](x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return F.mse_loss(self.module["decoder"](z), x) + 0.01 * (mean.pow(2) + log.exp() - log - 1).mean()


class Scan(nn.Module):
    """A state-space layer in small: a causal convolution and a decaying sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv1d = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, width + 1) / 4.0))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.in_proj(x).chunk(2, -1)
        inner = F.silu(self.conv1d(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        decay, state, out = torch.exp(-self.A_log.exp() / 4), torch.zeros_like(inner[:, 0]), []
        for t in range(x.shape[1]):
            state = decay * state + (1 - decay) * inner[:, t]
            out.append(state)
        return x + self.out_proj((torch.stack(out, 1) + self.D * inner) * F.silu(gate))


class Mamba(Bench):
    width = 10 * 8

    def build(self) -> nn.Module:
        layers = nn.ModuleList(Scan(16) for _ in range(2))
        return nn.ModuleDict({"embed": nn.Linear(8, 16), "layers": layers, "head": nn.Linear(16, 8)})

    def score(self, x: Tensor) -> Tensor:
        x = x.view(-1, 10, 8)
        inner = self.module["embed"](x)
        for layer in self.module["layers"]:
            inner = layer(inner)
        return F.mse_loss(self.module["head"](inner), x.cumsum(1) / 3)


class Low(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, a: int, b: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(a, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, b, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


class Peft(Bench):
    def build(self) -> nn.Module:
        return nn.ModuleDict({"up_proj": Low(24, 40), "mid_proj": Low(40, 40), "down_proj": Low(40, 24)})

    def score(self, x: Tensor) -> Tensor:
        m = self.module
        return F.mse_loss(m["down_proj"](F.gelu(m["mid_proj"](F.gelu(m["up_proj"](x))))), self.target(x))


class Doubled(Optimizer):
    """AdamW that keeps fp32 copies of 16-bit weights in its state."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=1e-8, weight_decay=weight_decay)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **zeros, "master_param": weight.detach().float()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g, lr = group["betas"], gradient.float(), group["lr"]
        state["step"] += 1
        t = float(state["step"])
        state["exp_avg"].lerp_(g, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        master = state["master_param"].mul_(1 - lr * group["weight_decay"])
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - two**t)).add_(group["eps"])
        master.addcdiv_(state["exp_avg"], under, value=-lr / (1 - one**t))
        weight.copy_(master)


class Half(Llama):
    """bf16 weights beside fp32 copies."""

    def net(self) -> nn.Module:
        return Loop.net(self).to(torch.bfloat16)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Doubled(groups, self.config.lr, self.config.betas, self.config.weight_decay)


class Fp16(Bench):
    """A loss scale that doubles every five updates."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}
        self.extra["scaler"]["_growth_tracker"] = 0

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": 2 * told["scale"], "_growth_tracker": 0}


class Ranks(Bench):
    """Three ranks with dropout of their own, whose generators are stored side by side."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_states"] = [torch.Generator().manual_seed(50 + n).get_state() for n in range(3)]

    def score(self, x: Tensor) -> Tensor:
        found = []
        for n, part in enumerate(x.chunk(3)):
            made = torch.Generator()
            made.set_state(self.extra["rng_states"][n])
            keep = torch.rand(part.shape, generator=made) > 0.15
            self.extra["rng_states"][n] = made.get_state()
            found.append(F.mse_loss(self.module(part * keep), self.target(part)))
        return sum(found) / 3


class Coded(Chat):
    """A language model by an optimizer with 8-bit moments."""

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return AdamW8bit(groups, lr=self.config.lr)


# ---- what goes wrong after a load ------------------------------------------------------------------------------------


def does(*steps: Step) -> Step:
    """For `Loop.loaded`."""

    def loaded(self: Any) -> None:
        with torch.no_grad():
            for one in steps:
                one(self)

    return loaded


def named(self: Any, pattern: str = "") -> dict[str, Tensor]:
    found = {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}
    assert found, pattern
    return found


def state_of(self: Any, w: Tensor) -> dict[str, Any]:
    return next((one.state[w] for one in self.optimizers if w in one.state), {})


def stranger(self: Any, by: int = 3) -> Any:
    """A trainer with another seed that went as far, for what comes from another run."""
    found = type(self)(self.config.but(seed=self.config.seed + by))
    found.remembers = False
    with torch.enable_grad():
        found.run(self.step)
    return found


def begun(pattern: str) -> Step:
    """These stay as a new process makes them."""

    def change(self: Any) -> None:
        mine = self.config
        self.config = mine.but(seed=mine.seed + 1)
        fresh, now = self.net().state_dict(), self.module.state_dict()
        self.config = mine
        hit = [n for n in now if re.search(pattern, n)]
        assert hit, pattern
        for n in hit:
            now[n].copy_(fresh[n])

    return change


def entries(keys: str, how: Callable[[Tensor], Any], pattern: str = "") -> Step:
    """These entries of the optimizer's state become others."""

    def change(self: Any) -> None:
        done = 0
        for w in named(self, pattern).values():
            found = state_of(self, w)
            for key in keys.split():
                if key in found:
                    found[key] = how(found[key])
                    done += 1
        assert done, keys

    return change


def forgot(pattern: str = "") -> Step:
    def change(self: Any) -> None:
        for w in named(self, pattern).values():
            for one in self.optimizers:
                one.state.pop(w, None)

    return change


def turned(pattern: str, how: Callable[[Tensor], Tensor], what: str = "all") -> Step:
    """Weights and moments (``all``), or the weights alone, in another order."""

    def change(self: Any) -> None:
        for w in named(self, pattern).values():
            for one in state_of(self, w).values() if what != "weights" else ():
                if torch.is_tensor(one) and one.shape == w.shape:
                    one.copy_(how(one.clone()))
            if what != "moments":
                w.copy_(how(w.clone()))

    return change


def crossed(pairs: Sequence[tuple[str, str]], what: str = "moments") -> Step:
    """Each first name's state, or weight, goes to the second and back."""

    def change(self: Any) -> None:
        held = dict(self.module.named_parameters())
        for one, two in pairs:
            a, b = held[one], held[two]
            if what == "moments":
                s, t = state_of(self, a), state_of(self, b)
                for key in s:
                    s[key], t[key] = t[key], s[key]
            else:
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

    return change


def older(pattern: str, by: int, what: str = "all") -> Step:
    """These are read from an older save."""

    def change(self: Any) -> None:
        old, now = self.past(by), self.module.state_dict()
        for n in now if what != "moments" else ():
            if re.search(pattern, n):
                now[n].copy_(old["model"][n])
        if what != "weights":
            one, told = self.optimizers[0], copy.deepcopy(old["optimizer"])
            theirs = [number for group in told["param_groups"] for number in group["params"]]
            mine = [id(w) for group in one.param_groups for w in group["params"]]
            number = dict(zip(mine, theirs, strict=False))
            for w in named(self, pattern).values():
                one.state[w] = told["state"][number[id(w)]]

    return change


def put(key: str, **fields: Any) -> Step:
    """Fields of something that is kept beside the model; a callable gets the old value."""

    def change(self: Any) -> None:
        for name, value in fields.items():
            told = self.extra[key]
            told[name] = value(told[name]) if callable(value) else value

    return change


# ---- what is innocent ------------------------------------------------------------------------------------------------


def rate(by: float) -> Step:
    """Another learning rate, everywhere that one is kept."""

    def change(self: Any) -> None:
        for one in self.schedules:
            one.base_lrs = [lr * by for lr in one.base_lrs]
            one._last_lr = [lr * by for lr in one._last_lr]
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] *= by
        self.extra["hparams"]["learning_rate"] *= by

    return change


def rows(by: float) -> Step:
    """Another batch size."""

    def change(self: Any) -> None:
        self.extra["hparams"]["batch_size"] = int(self.extra["hparams"]["batch_size"] * by)

    return change


def group_set(**fields: Any) -> Step:
    """Fields of every param group that has them; a callable gets the old value."""

    def change(self: Any) -> None:
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key, value in fields.items():
                if key in group:
                    group[key] = value(group[key]) if callable(value) else value
        if "weight_decay" in fields:
            value, old = fields["weight_decay"], self.extra["hparams"]["weight_decay"]
            self.extra["hparams"]["weight_decay"] = value(old) if callable(value) else value

    return change


def iced(pattern: str) -> Step:
    """No gradient from here on."""

    def change(self: Any) -> None:
        for w in named(self, pattern).values():
            w.requires_grad_(False)

    return change


def stage(self: Any) -> None:
    """A new schedule, from its beginning."""
    self.schedules = []
    for one in self.optimizers:
        for group in one.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        made = self.schedule(one)
        self.schedules += [made] if made is not None else []


def words(pattern: str, count: int, *, shift: bool = False) -> Step:
    """A table gets more rows at its end, and its moments zeros; ``shift``: which came first there by mistake."""

    def change(self: Any) -> None:
        for n, w in enumerate(named(self, pattern).values()):
            found = state_of(self, w)
            for key, one in list(found.items()):
                if torch.is_tensor(one) and one.shape == w.shape:
                    parts = [one, torch.zeros(count, *one.shape[1:], dtype=one.dtype)]
                    found[key] = torch.cat(parts[::-1] if shift else parts)
            w.data = torch.cat([w.data, 0.02 * dice(80 + n, count, *w.shape[1:]).to(w.dtype)])

    return change


def head(self: Any) -> None:
    """A new head, in a param group of its own."""
    self.module.add_module("new_head", nn.Linear(6, 4))
    optimizer, first = self.optimizers[0], self.optimizers[0].param_groups[0]
    made = [w.requires_grad_(True) for w in self.module.new_head.parameters()]
    lr = first.get("initial_lr", first["lr"])
    rest = {k: v for k, v in first.items() if k not in ("params", "initial_lr")}
    optimizer.add_param_group({**rest, "params": made, "initial_lr": lr})
    for one in self.schedules[:1]:
        one.base_lrs.append(lr)
        if hasattr(one, "lr_lambdas"):
            one.lr_lambdas.append(one.lr_lambdas[0])
        one._last_lr = [g["lr"] for g in optimizer.param_groups]


def own_group(pattern: str, by: float = 0.5) -> Step:
    """These move to a new param group with a learning rate of its own."""

    def change(self: Any) -> None:
        one = self.optimizers[0]
        hit = {id(w) for w in named(self, pattern).values()}
        moved = [w for g in one.param_groups for w in g["params"] if id(w) in hit]
        first = next(g for g in one.param_groups if any(id(w) in hit for w in g["params"]))
        for g in one.param_groups:
            g["params"] = [w for w in g["params"] if id(w) not in hit]
        new = {**first, "params": moved, "lr": first["lr"] * by}
        if "initial_lr" in first:
            new["initial_lr"] = first["initial_lr"] * by
        one.param_groups.append(new)
        for told in self.schedules[:1]:
            told.base_lrs.append(new["initial_lr"])
            told.lr_lambdas.append(told.lr_lambdas[0])
            told._last_lr = [g["lr"] for g in one.param_groups]

    return change


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def opt(kind: Any, by: float = 1.0, **more: Any) -> Any:
    """For `Loop.optimizer`: that class, at so many times the run's learning rate, without the groups' own decay."""

    def optimizer(self: Any, groups: Any) -> torch.optim.Optimizer:
        return kind([{"params": g["params"]} for g in groups], lr=self.config.lr * by, **more)

    return optimizer


def no_schedule(self: Any, optimizer: torch.optim.Optimizer) -> None:
    """For `Loop.schedule`."""


def adam(one: float = 0.9, two: float = 0.999) -> dict[str, Any]:
    """For ``needs``: these betas."""
    return {"betas": (one, two)}
