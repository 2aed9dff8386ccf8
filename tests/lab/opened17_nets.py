"""What the seventeenth half trains, and what its cases do to a loop right after a load."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.live import Loop
from tests.lab.opened16_nets import Free, draws, mlp, seeded

Tensor = torch.Tensor
Change = Callable[[Any], None]


class Book(Loop):
    """Keeps its arguments, its position in the data and a count of samples beside the model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = self.config
        self.extra["args"] = {
            "learning_rate": c.lr,
            "weight_decay": c.weight_decay,
            "batch_size": c.batch,
            "clip": self.clip,
        }
        self.extra["sampler"] = {"epoch": 0, "index": 0, "seed": 1234}
        self.extra["consumed_samples"] = 0

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return batch(self.config.but(batch=self.extra["args"]["batch_size"]), told["index"], told["seed"])

    def update(self) -> None:
        super().update()
        self.extra["sampler"]["index"] += 1
        self.extra["consumed_samples"] += self.extra["args"]["batch_size"]


class Vectors(Book, Free):
    """The same on rows of numbers."""

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return draws(told["seed"] * 1000 + told["index"], 8 * self.extra["args"]["batch_size"], self.wide)


# ---- networks --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            one.view(rows, length, self.heads, -1).transpose(1, 2)
            for one in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.attn["c_proj"](mixed)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """GPT-2 in small, its head tied to the table."""

    def __init__(self, rows: int, width: int = 32, layers: int = 3, heads: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows, width), nn.Embedding(32, width)
        nn.init.normal_(self.wte.weight, std=0.2)
        nn.init.normal_(self.wpe.weight, std=0.5)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, rows, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens[:, :-1]) + self.wpe.weight[: tokens.shape[1] - 1]
        for one in self.h:
            x = one(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Nano(Book):
    """`Gpt` on the lab's tokens."""

    tied = True

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return Gpt(self.config.padded, tied=self.tied)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)


class Pair(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(16, 40, 24), mlp(16, 40, 24)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        logits = self.logit_scale.exp() * a @ b.T
        want = torch.arange(len(x))
        return (F.cross_entropy(logits, want) + F.cross_entropy(logits.T, want)) / 2


class Towers(Vectors):
    def build(self) -> nn.Module:
        return Pair()

    def loss(self, x: Tensor) -> Tensor:
        return self.module(x, self.target(x) + 0.1 * x)


class Seen(nn.Module):
    """Convolutions with batch norms over a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.fc = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x)
        return self.fc((x + self.last(x)).mean((2, 3)))


class Pictures(Vectors):
    wide = 3 * 6 * 6

    def build(self) -> nn.Module:
        return Seen()

    def loss(self, x: Tensor) -> Tensor:
        want = (x @ draws(5, self.wide, 6)).argmax(1)
        return F.cross_entropy(self.module(x.view(-1, 3, 6, 6) + x.mean(1)[:, None, None, None]), want)


class Tagger(Vectors):
    """A recurrent net over eight steps."""

    wide = 8 * 10

    def build(self) -> nn.Module:
        return nn.ModuleDict({"rnn": nn.LSTM(10, 20, 2, batch_first=True), "out": nn.Linear(20, 10)})

    def loss(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8, 10)
        return F.mse_loss(self.module["out"](self.module["rnn"](rows)[0]), rows.cumsum(1).roll(1, -1) / 2)


class Shop(Vectors):
    """Tables by Adagrad, the rest by AdamW."""

    layouts = ("torch_save", "lightning", "dcp")

    def build(self) -> nn.Module:
        return nn.ModuleDict({"users": nn.Embedding(60, 12), "goods": nn.Embedding(80, 12), "deep": mlp(24, 32, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        c, named = self.config, dict(self.module.named_parameters())
        tables = [w for n, w in named.items() if not n.startswith("deep")]
        deep = [w for n, w in named.items() if n.startswith("deep")]
        return [torch.optim.Adagrad(tables, lr=10 * c.lr), torch.optim.AdamW(deep, lr=c.lr, betas=c.betas)]

    def loss(self, x: Tensor) -> Tensor:
        u, i = (x[:, 0].abs() * 25).long() % 60, (x[:, 1].abs() * 33).long() % 80
        score = self.module["deep"](torch.cat([self.module["users"](u), self.module["goods"](i)], 1))[:, 0]
        return F.mse_loss(score, torch.sin(u.float()) + torch.cos(i.float()))


class Averaged(Vectors):
    """An average of the weights, as diffusion has it, and how often it was made."""

    decay = 0.97

    def build(self) -> nn.Module:
        return nn.ModuleDict({"time": mlp(4, 24, 24), "inner": mlp(40, 48, 16)})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}
        self.extra["ema_updates"] = 0

    def loss(self, x: Tensor) -> Tensor:
        t = x[:, :4].sigmoid()
        noisy = x * t[:, :1] + torch.roll(x, 1, 0) * (1 - t[:, :1])
        return F.mse_loss(self.module["inner"](torch.cat([noisy, self.module["time"](t)], 1)), x.tanh())

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                self.extra["ema"][n].lerp_(w, 1 - self.decay)
        self.extra["ema_updates"] += 1


class Dropped(Vectors):
    """Noise from a generator whose state is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["generator"] = seeded(config.seed).get_state()

    def loss(self, x: Tensor) -> Tensor:
        made = torch.Generator()
        made.set_state(self.extra["generator"])
        keep = torch.rand(x.shape, generator=made) > 0.1
        self.extra["generator"] = made.get_state()
        return F.mse_loss(self.module(x * keep), self.target(x))


class Observed(nn.Module):
    """An actor and a critic on observations that running statistics whiten."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic, self.target_critic = mlp(16, 32, 8), mlp(16, 32, 1), mlp(16, 32, 1)
        self.register_buffer("obs_mean", torch.zeros(16))
        self.register_buffer("obs_var", torch.ones(16))
        self.register_buffer("obs_count", torch.tensor(1e-4))
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.target_critic.requires_grad_(False)


class Agent(Vectors):
    tau = 0.05

    def build(self) -> nn.Module:
        return Observed()

    def loss(self, x: Tensor) -> Tensor:
        m, x = self.module, 3 * x + 2
        with torch.no_grad():
            total = m.obs_count + len(x)
            step = x.mean(0) - m.obs_mean
            m.obs_mean += step * len(x) / total
            m.obs_var += (x.var(0) - m.obs_var) * len(x) / total
            m.obs_count.copy_(total)
        x = (x - m.obs_mean) / (m.obs_var + 1e-5).sqrt()
        act = m.actor(x).tanh()
        reward = -(act - x[:, :8].tanh()).pow(2).mean(1, keepdim=True)
        with torch.no_grad():
            want = reward + 0.9 * m.target_critic(torch.roll(x, 1, 0))
        return F.mse_loss(m.critic(x), want) - reward.mean()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            pairs = zip(self.module.target_critic.parameters(), self.module.critic.parameters(), strict=True)
            for a, b in pairs:
                a.lerp_(b, self.tau)


# ---- what is done after a load ---------------------------------------------------------------------------------------


def chain(*changes: Change) -> Change:
    def loaded(self: Any) -> None:
        with torch.no_grad():
            for one in changes:
                one(self)

    return loaded


def named(self: Any, pattern: str = "") -> dict[str, Tensor]:
    return {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}


def state(self: Any, w: Tensor) -> dict[str, Any]:
    return next((one.state[w] for one in self.optimizers if w in one.state), {})


def stranger(self: Any, shift: int = 1) -> dict[str, Tensor]:
    """Weights and buffers of a process that begins with another seed."""
    mine = self.config
    self.config = mine.but(seed=mine.seed + shift)
    found = self.net().state_dict()
    self.config = mine
    return found


def unloaded(pattern: str) -> Change:
    def change(self: Any) -> None:
        new, held = stranger(self), self.module.state_dict()
        hit = [n for n in held if re.search(pattern, n)]
        assert hit, pattern
        for n in hit:
            held[n].copy_(new[n])

    return change


def relaid(pattern: str, how: Callable[[Tensor], Tensor], *, weights: bool = True, only: str = "") -> Change:
    """Weights and moments of the same shape in another order; ``only``: the state of that name alone."""

    def change(self: Any) -> None:
        hit = named(self, pattern)
        assert hit, pattern
        for w in hit.values():
            for key, one in state(self, w).items():
                if torch.is_tensor(one) and one.shape == w.shape and (not only or key == only) and one.ndim:
                    one.copy_(how(one.clone()))
            if weights:
                w.copy_(how(w.clone()))

    return change


def crossed(one: str, two: str, *, weights: bool = True, moments: bool = True) -> Change:
    """What belongs to names with ``one`` and those with ``two`` in its place is exchanged."""

    def change(self: Any) -> None:
        held = named(self)
        pairs = [(w, held[n.replace(one, two)]) for n, w in held.items() if one in n and n.replace(one, two) in held]
        pairs = [(a, b) for a, b in pairs if a.shape == b.shape]
        assert pairs, (one, two)
        for a, b in pairs:
            if weights:
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
            if moments:
                s, t = state(self, a), state(self, b)
                for key in s:
                    s[key], t[key] = t[key], s[key]

    return change


def states(pattern: str, key: str, how: Callable[[Tensor], Tensor]) -> Change:
    """That entry of the optimizer's state becomes another."""

    def change(self: Any) -> None:
        done = 0
        for w in named(self, pattern).values():
            s = state(self, w)
            if key in s:
                s[key] = how(s[key])
                done += 1
        assert done, (pattern, key)

    return change


def forgotten(pattern: str) -> Change:
    def change(self: Any) -> None:
        for w in named(self, pattern).values():
            for one in self.optimizers:
                one.state.pop(w, None)

    return change


# innocent, and done every day


def rate(by: float) -> Change:
    def change(self: Any) -> None:
        for one in self.schedules:
            one.base_lrs = [lr * by for lr in one.base_lrs]
            one._last_lr = [lr * by for lr in one._last_lr]
        for group in (g for one in self.optimizers for g in one.param_groups):
            group["lr"] *= by
            if "initial_lr" in group:
                group["initial_lr"] *= by
        if "args" in self.extra:
            self.extra["args"]["learning_rate"] *= by

    return change


def groups(**fields: Any) -> Change:
    """Fields of every param group; a callable gets the old value."""

    def change(self: Any) -> None:
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key, value in fields.items():
                if key in group:
                    group[key] = value(group[key]) if callable(value) else value
        if "args" in self.extra and "weight_decay" in fields:
            self.extra["args"]["weight_decay"] = fields["weight_decay"](self.config.weight_decay)

    return change


def rows(by: int) -> Change:
    def change(self: Any) -> None:
        self.extra["args"]["batch_size"] *= by

    return change


def anew(self: Any) -> None:
    """The schedule begins again."""
    self.schedules = []
    for one in self.optimizers:
        for group in one.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        self.schedules.append(self.schedule(one))


def freeze(pattern: str) -> Change:
    """Parameters that get no gradient from here on."""

    def change(self: Any) -> None:
        for w in named(self, pattern).values():
            w.requires_grad_(False)

    return change


def sampler(**fields: Any) -> Change:
    def change(self: Any) -> None:
        for key, value in fields.items():
            self.extra["sampler"][key] = value(self.extra["sampler"]) if callable(value) else value

    return change


more_decay = groups(weight_decay=lambda old: 2 * old)
less_decay = groups(weight_decay=lambda old: old / 2)


def copied(content: Any) -> Any:
    return copy.deepcopy(content)
