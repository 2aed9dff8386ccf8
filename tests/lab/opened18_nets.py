"""What the eighteenth half trains, and what its cases do to a loop right after a load."""

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
Change = Callable[[Any], None]


def source(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source(number))


def stack(*sizes: int, norm: bool = False) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        found += [nn.Linear(a, b), nn.SiLU()] + ([nn.LayerNorm(b)] if norm else [])
    return nn.Sequential(*found[: -2 if norm else -1])


class Desk(Loop):
    """A trainer on rows of numbers that stores its arguments, its place in the data and what it consumed.

    Attributes:
        wide: numbers of a row. keeps: hold what was saved every second update, for cases that load something older.
    """

    layouts = ("torch_save", "folder", "lightning")
    wide = 20
    keeps = False
    past: ClassVar[dict[str, dict[int, Any]]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["args"] = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "train_batch_size": 24,
            "max_grad_norm": self.clip,
        }
        self.extra["sampler"] = {"epoch": 0, "index": 0, "seed": 311}
        self.extra["consumed_samples"] = 0

    def build(self) -> nn.Module:
        return stack(self.wide, 44, 44, self.wide, norm=True)

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return self.build()

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return normal(told["seed"] * 4099 + told["index"], self.extra["args"]["train_batch_size"], self.wide)

    def wanted(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ normal(9, self.wide, self.wide) / 4) + 0.2 * x.roll(3, 1)

    def score(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x), self.wanted(x))

    def loss(self, x: Tensor) -> Tensor:
        found = self.score(x)
        if hasattr(self.module, "probe"):
            found = found + 0.1 * self.module.probe(self.features(x)).pow(2).sub(1).pow(2).mean()
        return found

    def features(self, x: Tensor) -> Tensor:
        return x[:, :8].float()

    def update(self) -> None:
        super().update()
        self.extra["sampler"]["index"] += 1
        self.extra["consumed_samples"] += self.extra["args"]["train_batch_size"]
        if self.keeps and self.step % 2 == 0:
            held = self.past.setdefault(type(self).__name__, {})
            if self.step == 2:
                held.clear()
            held[self.step] = copy.deepcopy(self.content())

    def older(self, by: int = 6) -> Any:
        """What was there that many updates ago."""
        held = self.past[type(self).__name__]
        return held[max(step for step in held if step <= self.step - by)]


# ---- networks --------------------------------------------------------------------------------------------------------


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Experts(nn.Module):
    """Four fused experts, with gate and up in one tensor. Each token visits two, and a bias balances the load."""

    def __init__(self, width: int, inner: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, width) / math.sqrt(width))
        self.down_proj = nn.Parameter(torch.randn(count, width, inner) / math.sqrt(inner))
        self.register_buffer("score_correction_bias", torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x).sigmoid()
        chosen = torch.zeros_like(score).scatter(-1, (score + self.score_correction_bias).topk(2, -1).indices, 1.0)
        if self.training:
            with torch.no_grad():
                load = chosen.flatten(0, -2).mean(0)
                self.score_correction_bias += 0.01 * torch.sign(load.mean() - load)
        gate, up = torch.einsum("blh,efh->eblf", x, self.gate_up_proj).chunk(2, -1)
        out = torch.einsum("eblf,ehf->eblh", F.silu(gate) * up, self.down_proj)
        return torch.einsum("eblh,ble->blh", out, score * chosen)


class Layer(nn.Module):
    """Attention by one fused matrix whose rows go head by head, and a gated block or experts."""

    def __init__(self, width: int, heads: int, experts: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ffn_norm = Rms(width), Rms(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.dense = nn.Linear(width, width, bias=False)
        self.experts = Experts(width, width) if experts else None
        if not experts:
            self.gate_up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        fused = self.query_key_value(self.attn_norm(x)).view(rows, length, self.heads, 3, -1)
        q, k, v = fused.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.dense(mixed)
        inner = self.ffn_norm(x)
        if self.experts is not None:
            return x + self.experts(inner)
        gate, up = self.gate_up(inner).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Neo(nn.Module):
    """A language model in small."""

    def __init__(self, vocab: int, width: int, layers: int, tied: bool, experts: bool) -> None:
        super().__init__()
        self.embed_in, self.position = nn.Embedding(vocab, width), nn.Embedding(24, width)
        nn.init.normal_(self.embed_in.weight, std=0.3)
        nn.init.normal_(self.position.weight, std=0.4)
        self.layers = nn.ModuleList(Layer(width, 4, experts) for _ in range(layers))
        self.final_norm = Rms(width)
        self.embed_out = nn.Linear(width, vocab, bias=False)
        if tied:
            self.embed_out.weight = self.embed_in.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_in(tokens[:, :-1]) + self.position.weight[: tokens.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.embed_out(self.final_norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Writer(Desk):
    """`Neo` on the lab's tokens."""

    tied = False
    experts = False

    def build(self) -> nn.Module:
        return Neo(self.config.padded, 32, 3, self.tied, self.experts)

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        rows = self.extra["args"]["train_batch_size"] // 4
        return batch(self.config.but(batch=rows), told["index"], told["seed"])

    def score(self, x: Tensor) -> Tensor:
        return self.module(x)

    def features(self, x: Tensor) -> Tensor:
        return self.module.embed_in.weight[x[:, 0], :8]


class Mixture(Writer):
    experts = True


class Plain(Desk):
    """The lab's decoder, with q, k and v of their own."""

    def net(self) -> nn.Module:
        return Loop.net(self)

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return batch(self.config.but(batch=self.extra["args"]["train_batch_size"] // 6), told["index"], told["seed"])

    def score(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


class Resnet(nn.Module):
    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"conv": nn.Conv2d(wide, wide, 3, padding=1, bias=False), "bn": nn.BatchNorm2d(wide)})
            for _ in range(3)
        )
        self.head = nn.Linear(wide, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for one in self.blocks:
            x = x + F.relu(one["bn"](one["conv"](x)))
        return self.head(x.mean((2, 3)))


class Photos(Desk):
    """Pictures in seven classes."""

    wide = 3 * 5 * 5

    def build(self) -> nn.Module:
        return Resnet()

    def score(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(1.5 * x.view(-1, 3, 5, 5) + 0.3), (x @ normal(3, self.wide, 7)).argmax(1))


class Boxes(Desk):
    """A detector: a backbone at a tenth of the rate, a class head and a box head, by SGD with momentum."""

    def build(self) -> nn.Module:
        parts = {"backbone": stack(20, 40, 40, norm=True), "cls_head": nn.Linear(40, 5), "box_head": nn.Linear(40, 4)}
        return nn.ModuleDict(parts)

    def groups(self) -> Any:
        held = self.module.named_parameters()
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, w in held:
            parts[name.startswith("backbone")].append(w)
        return [{"params": parts[True], "lr": 2 * self.config.lr}, {"params": parts[False]}]

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=20 * self.config.lr, momentum=0.9, weight_decay=1e-4)

    def score(self, x: Tensor) -> Tensor:
        inner = self.module["backbone"](x)
        found = F.cross_entropy(self.module["cls_head"](inner), (x @ normal(4, 20, 5)).argmax(1))
        return found + F.smooth_l1_loss(self.module["box_head"](inner), x[:, :4].tanh())


class Denoiser(Desk):
    """Diffusion with an average of the weights and a count of how often it was made."""

    decay = 0.98

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}
        self.extra["ema_step"] = 0

    def build(self) -> nn.Module:
        return nn.ModuleDict({"time_embed": stack(6, 20, 20), "down": stack(40, 48, 24), "up": stack(24, 48, 20)})

    def score(self, x: Tensor) -> Tensor:
        t = x[:, :6].sigmoid()
        noisy = x * t[:, :1] + x.roll(1, 0) * (1 - t[:, :1])
        return F.mse_loss(
            self.module["up"](self.module["down"](torch.cat([noisy, self.module["time_embed"](t)], 1))), x
        )

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                self.extra["ema"][n].lerp_(w, 1 - self.decay)
        self.extra["ema_step"] += 1


class Pilot(Desk):
    """Soft actor-critic: twin critics with slow targets, and whitened observations; two optimizers."""

    tau = 0.04

    def build(self) -> nn.Module:
        parts = {name: stack(20, 36, 1) for name in ("critic1", "critic2", "target_critic1", "target_critic2")}
        found = nn.ModuleDict({"actor": stack(20, 36, 6), **parts})
        found.register_buffer("obs_mean", torch.zeros(20))
        found.register_buffer("obs_count", torch.tensor(1e-4))
        for number in "12":
            found[f"target_critic{number}"].load_state_dict(found[f"critic{number}"].state_dict())
            found[f"target_critic{number}"].requires_grad_(False)
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        c, held = self.config, dict(self.module.named_parameters())
        parts = [[w for n, w in held.items() if n.startswith(p)] for p in ("actor", "critic")]
        return [torch.optim.Adam(one, lr=c.lr, betas=c.betas) for one in parts]

    def score(self, x: Tensor) -> Tensor:
        m, x = self.module, 2 * x + 1
        with torch.no_grad():
            m.obs_count += len(x)
            m.obs_mean += (x.mean(0) - m.obs_mean) * len(x) / m.obs_count
        x = x - m.obs_mean
        act = m["actor"](x).tanh()
        reward = -(act - x[:, :6].tanh()).pow(2).mean(1, keepdim=True)
        with torch.no_grad():
            after = x.roll(1, 0)
            want = reward + 0.9 * torch.minimum(m["target_critic1"](after), m["target_critic2"](after))
        return F.mse_loss(m["critic1"](x), want) + F.mse_loss(m["critic2"](x), want) - reward.mean()

    def update(self) -> None:
        super().update()
        held = dict(self.module.named_parameters())
        with torch.no_grad():
            for n, w in held.items():
                if n.startswith("target_"):
                    w.lerp_(held[n.removeprefix("target_")], self.tau)


class Graph(nn.Module):
    """Two rounds of messages along a ring, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.ModuleDict({"self": nn.Linear(20, 20), "neighbour": nn.Linear(20, 20)}) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(20) for _ in range(3))
        self.readout = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv["self"](x) + conv["neighbour"]((x.roll(1, 0) + x.roll(-1, 0)) / 2)))
        return self.readout(x)


class Ring(Desk):
    def build(self) -> nn.Module:
        return Graph()


class Market(Desk):
    """A recommender: tables by Adagrad, towers by AdamW."""

    def build(self) -> nn.Module:
        parts = {"user": nn.Embedding(50, 12), "item": nn.Embedding(70, 12)}
        return nn.ModuleDict({"tables": nn.ModuleDict(parts), "tower": stack(24, 40, 40, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        c, held = self.config, dict(self.module.named_parameters())
        tables = [w for n, w in held.items() if n.startswith("tables")]
        rest = [w for n, w in held.items() if not n.startswith("tables")]
        return [torch.optim.Adagrad(tables, lr=8 * c.lr), torch.optim.AdamW(rest, lr=c.lr, betas=c.betas)]

    def score(self, x: Tensor) -> Tensor:
        u, i = (x[:, 0].abs() * 20).long() % 50, (x[:, 1].abs() * 30).long() % 70
        both = torch.cat([self.module["tables"]["user"](u), self.module["tables"]["item"](i)], 1)
        return F.mse_loss(self.module["tower"](both)[:, 0], torch.sin(u.float()) * torch.cos(i.float() / 5))


class Speech(Desk):
    """A convolution and two recurrent layers over ten frames."""

    wide = 10 * 8

    def build(self) -> nn.Module:
        parts = {"front": nn.Conv1d(8, 16, 3, padding=1), "rnn": nn.GRU(16, 24, 2, batch_first=True)}
        return nn.ModuleDict({**parts, "out": nn.Linear(24, 8)})

    def score(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8, 10)
        inner = self.module["front"](rows).relu().transpose(1, 2)
        told = rows.transpose(1, 2).cumsum(1).roll(1, -1) / 3
        return F.mse_loss(self.module["out"](self.module["rnn"](inner)[0]), told)


class Siamese(Desk):
    """A student, a teacher that follows it, a centre and a queue."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"student": stack(20, 40, 16), "teacher": stack(20, 40, 16)})
        found["teacher"].load_state_dict(found["student"].state_dict())
        found["teacher"].requires_grad_(False)
        found.register_buffer("center", torch.zeros(16))
        found.register_buffer("queue", F.normalize(torch.randn(64, 16), dim=1))
        found.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        return found

    def score(self, x: Tensor) -> Tensor:
        m = self.module
        mine = m["student"](x + 0.1 * x.roll(1, 1))
        with torch.no_grad():
            theirs = m["teacher"](x)
            m.center.lerp_(theirs.mean(0), 0.1)
            at = int(m.queue_ptr)
            m.queue[at : at + 8] = F.normalize(theirs[:8], dim=1)
            m.queue_ptr[0] = (at + 8) % 64
        logits = torch.cat([(F.normalize(mine) * F.normalize(theirs)).sum(1, True), F.normalize(mine) @ m.queue.T], 1)
        near = F.cross_entropy(logits / 0.3, torch.zeros(len(x), dtype=torch.long))
        return near - ((theirs - m.center) / 0.5).softmax(1).mul(mine.log_softmax(1)).sum(1).mean()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            pairs = zip(self.module["teacher"].parameters(), self.module["student"].parameters(), strict=True)
            for a, b in pairs:
                a.lerp_(b, 0.05)


class Codebook(Desk):
    """An autoencoder through a table that running sums move, as VQ-VAE has it."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"encoder": stack(20, 40, 10), "decoder": stack(10, 40, 20)})
        found.register_buffer("codebook", torch.randn(32, 10))
        found.register_buffer("cluster_size", torch.ones(32))
        found.register_buffer("cluster_sum", found.codebook.clone())
        return found

    def score(self, x: Tensor) -> Tensor:
        m = self.module
        z = m["encoder"](x)
        with torch.no_grad():
            nearest = F.one_hot(torch.cdist(z, m.codebook).argmin(1), 32).float()
            m.cluster_size.mul_(0.95).add_(nearest.sum(0), alpha=0.05)
            m.cluster_sum.mul_(0.95).add_(nearest.T @ z, alpha=0.05)
            m.codebook.copy_(m.cluster_sum / m.cluster_size.clamp(min=1e-3)[:, None])
        quantised = z + (nearest @ m.codebook - z).detach()
        return F.mse_loss(m["decoder"](quantised), x) + 0.25 * F.mse_loss(z, (nearest @ m.codebook).detach())


class Adapter(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, a: int, b: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b)
        self.lora_A, self.lora_B = nn.Linear(a, rank, bias=False), nn.Linear(rank, b, bias=False)
        self.base_layer.requires_grad_(False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))


class Tuned(Desk):
    """A frozen network with adapters."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"fc1": Adapter(20, 40), "fc2": Adapter(40, 40), "out": Adapter(40, 20)})

    def score(self, x: Tensor) -> Tensor:
        m = self.module
        return F.mse_loss(m["out"](F.silu(m["fc2"](F.silu(m["fc1"](x))))), self.wanted(x))


class Mastered(Optimizer):
    """AdamW on fp32 copies of bf16 weights, kept in its state."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=1e-8, weight_decay=weight_decay)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **zeros, "master_param": weight.float()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (first, second), gradient, lr = group["betas"], gradient.float(), group["lr"]
        state["step"] += 1
        t = float(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        master = state["master_param"].mul_(1 - lr * group["weight_decay"])
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**t)).add_(group["eps"])
        master.addcdiv_(state["exp_avg"], under, value=-lr / (1 - first**t))
        weight.copy_(master)


class Halved(Plain):
    """bf16 weights beside fp32 masters."""

    def net(self) -> nn.Module:
        return Loop.net(self).to(torch.bfloat16)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Mastered(groups, self.config.lr, self.config.betas, self.config.weight_decay)


class Scaled(Desk):
    """A loss scale that grows every eight updates."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}
        self.extra["scaler"]["_growth_tracker"] = 0

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": told["scale"] * 2, "_growth_tracker": 0}


class Noisy(Desk):
    """Two ranks with noise of their own, whose generators are stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_state"] = {f"rank{n}": source(config.seed + n).get_state() for n in range(2)}

    def score(self, x: Tensor) -> Tensor:
        found = []
        for (rank, held), part in zip(self.extra["rng_state"].items(), x.chunk(2), strict=True):
            made = torch.Generator()
            made.set_state(held)
            keep = torch.rand(part.shape, generator=made) > 0.1
            self.extra["rng_state"][rank] = made.get_state()
            found.append(F.mse_loss(self.module(part * keep), self.wanted(part)))
        return sum(found) / 2


# ---- what is done after a load ---------------------------------------------------------------------------------------


def after(*changes: Change) -> Change:
    def loaded(self: Any) -> None:
        with torch.no_grad():
            for one in changes:
                one(self)

    return loaded


def weights(self: Any, pattern: str = "") -> dict[str, Tensor]:
    found = {n: w for n, w in self.module.named_parameters() if re.search(pattern, n)}
    assert found, pattern
    return found


def held(self: Any, w: Tensor) -> dict[str, Any]:
    return next((one.state[w] for one in self.optimizers if w in one.state), {})


def foreign(self: Any, shift: int = 1) -> dict[str, Tensor]:
    """What a process with another seed begins with."""
    mine = self.config
    self.config = mine.but(seed=mine.seed + shift)
    found = self.net().state_dict()
    self.config = mine
    return found


def initial(pattern: str) -> Change:
    """These keep what the process began with."""

    def change(self: Any) -> None:
        new, now = foreign(self), self.module.state_dict()
        hit = [n for n in now if re.search(pattern, n)]
        assert hit, pattern
        for n in hit:
            now[n].copy_(new[n])

    return change


def ordered(pattern: str, how: Callable[[Tensor], Tensor], what: str = "both") -> Change:
    """Weights, moments or both in another order."""

    def change(self: Any) -> None:
        for w in weights(self, pattern).values():
            for one in held(self, w).values() if what != "weights" else ():
                if torch.is_tensor(one) and one.shape == w.shape:
                    one.copy_(how(one.clone()))
            if what != "moments":
                w.copy_(how(w.clone()))

    return change


def exchanged(one: str, two: str, what: str = "both") -> Change:
    def change(self: Any) -> None:
        named = dict(self.module.named_parameters())
        pairs = [(w, named[n.replace(one, two)]) for n, w in named.items() if n.startswith(one)]
        assert pairs, one
        for a, b in pairs:
            if what != "moments":
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
            if what != "weights":
                s, t = held(self, a), held(self, b)
                for key in s:
                    s[key], t[key] = t[key], s[key]

    return change


def moments(keys: str, how: Callable[[Tensor], Tensor], pattern: str = "") -> Change:
    """These entries of the optimizer's state become others."""

    def change(self: Any) -> None:
        done = 0
        for w in weights(self, pattern).values():
            state = held(self, w)
            for key in keys.split():
                if key in state:
                    state[key] = how(state[key])
                    done += 1
        assert done, keys

    return change


def lost(pattern: str = "") -> Change:
    def change(self: Any) -> None:
        for w in weights(self, pattern).values():
            for one in self.optimizers:
                one.state.pop(w, None)

    return change


def stale(pattern: str, by: int = 6, what: str = "both") -> Change:
    """These come from an older save."""

    def change(self: Any) -> None:
        old, now = self.older(by), self.module.state_dict()
        if what != "moments":
            for n in now:
                if re.search(pattern, n):
                    now[n].copy_(old["model"][n])
        if what != "weights":
            one, told = self.optimizers[0], copy.deepcopy(old["optimizer"])
            numbers = [number for group in told["param_groups"] for number in group["params"]]
            by_id = dict(zip([id(w) for group in one.param_groups for w in group["params"]], numbers, strict=True))
            for w in weights(self, pattern).values():
                one.state[w] = told["state"][by_id[id(w)]]

    return change


def placed(**fields: Any) -> Change:
    """Fields of the sampler; a callable gets the old value."""

    def change(self: Any) -> None:
        for key, value in fields.items():
            self.extra["sampler"][key] = value(self.extra["sampler"][key]) if callable(value) else value

    return change


def noted(key: str, how: Callable[[Any], Any]) -> Change:
    """Something that is kept beside the model becomes another."""

    def change(self: Any) -> None:
        self.extra[key] = how(self.extra[key])

    return change


# innocent, and done every day


def paced(by: float) -> Change:
    """Another learning rate, in groups, schedule and arguments."""

    def change(self: Any) -> None:
        for one in self.schedules:
            one.base_lrs = [lr * by for lr in one.base_lrs]
            one._last_lr = [lr * by for lr in one._last_lr]
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] *= by
        self.extra["args"]["lr"] *= by

    return change


def setting(**fields: Any) -> Change:
    """Fields of every param group; a callable gets the old value."""

    def change(self: Any) -> None:
        for group in (g for one in self.optimizers for g in one.param_groups):
            for key, value in fields.items():
                if key in group:
                    group[key] = value(group[key]) if callable(value) else value
        if "weight_decay" in fields:
            self.extra["args"]["weight_decay"] = fields["weight_decay"](self.extra["args"]["weight_decay"])

    return change


def larger(by: int = 2) -> Change:
    def change(self: Any) -> None:
        self.extra["args"]["train_batch_size"] *= by

    return change


def still(pattern: str) -> Change:
    """No gradient from here on."""

    def change(self: Any) -> None:
        for w in weights(self, pattern).values():
            w.requires_grad_(False)

    return change


def restarted(self: Any) -> None:
    """The schedule begins anew."""
    self.schedules = []
    for one in self.optimizers:
        for group in one.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        self.schedules.append(self.schedule(one))


def grown(pattern: str, rows: int, front: str = "") -> Change:
    """A table gets more rows, small ones, and its state zeros; ``front``: weights or moments get them first."""

    def change(self: Any) -> None:
        for w in weights(self, pattern).values():
            for key, one in held(self, w).items():
                if torch.is_tensor(one) and one.shape == w.shape:
                    parts = [one, torch.zeros(rows, *one.shape[1:])]
                    held(self, w)[key] = torch.cat(parts[::-1] if front in ("moments", "both") else parts)
            parts = [w.data, 0.02 * normal(8, rows, *w.shape[1:])]
            w.data = torch.cat(parts[::-1] if front in ("weights", "both") else parts)

    return change


def probed(self: Any) -> None:
    """A new head, in a param group of its own."""
    self.module.add_module("probe", nn.Linear(8, 3))
    optimizer, group = self.optimizers[0], self.optimizers[0].param_groups[0]
    rate = group.get("initial_lr", group["lr"])
    new = {"params": list(self.module.probe.parameters()), "initial_lr": rate}
    optimizer.add_param_group({k: v for k, v in group.items() if k not in ("params", "initial_lr")} | new)
    for weight in self.module.probe.parameters():
        weight.requires_grad_(True)
    for one in self.schedules:
        one.base_lrs.append(rate)
        if hasattr(one, "lr_lambdas"):
            one.lr_lambdas.append(one.lr_lambdas[0])
        one._last_lr = [g["lr"] for g in optimizer.param_groups]


def regrouped(pattern: str) -> Change:
    """Parameters move from the first param group to the second, on purpose or not."""

    def change(self: Any) -> None:
        one = self.optimizers[0].param_groups
        hit = {id(w) for w in weights(self, pattern).values()}
        moved = [w for w in one[0]["params"] if id(w) in hit]
        assert moved, pattern
        one[0]["params"] = [w for w in one[0]["params"] if id(w) not in hit]
        one[1]["params"] = [*one[1]["params"], *moved]

    return change


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def regularised(self: Any) -> None:
    """Twice the weight decay."""
    setting(weight_decay=lambda old: 2 * old)(self)
