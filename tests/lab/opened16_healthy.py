"""Healthy runs of the sixteenth sealed half: training that looks odd, and is as it should be."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.lab import opened16_nets as nets
from tests.lab.data import batch
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import Decoder, Loop, variant
from tests.lab.live_healthy import Experts, optim, plain
from tests.lab.opened16_nets import Free, Lora, draws, mlp, seeded

__all__ = ["HEALTHY16"]

T = torch.optim
NO_DCP = ("torch_save", "torch_save", "folder", "lightning")
TWO = ("torch_save", "lightning")


class Sam(Loop):
    """Sharpness-aware: the gradient of the place uphill; nothing of it is stored."""

    def gradients(self) -> None:
        weights = [w for w in self.module.parameters() if w.grad is not None]
        norm = torch.stack([w.grad.norm() for w in weights]).norm()
        steps = [w.grad * 0.05 / (norm + 1e-12) for w in weights]
        with torch.no_grad():
            for w, e in zip(weights, steps, strict=True):
                w.add_(e)
        self.module.zero_grad()
        self.loss(self.tokens()).backward()
        with torch.no_grad():
            for w, e in zip(weights, steps, strict=True):
                w.sub_(e)
        super().gradients()


class Sphere(Loop):
    """nGPT: rows are brought back to length 1 after each update."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for w in self.module.parameters():
                if w.ndim == 2:
                    w.copy_(F.normalize(w, dim=-1))


class Gan(Free):
    """Two optimizers; the generator moves every third update."""

    layouts = TWO
    every, clipped = 3, 0.0
    betas = (0.0, 0.9)

    def build(self) -> nn.Module:
        return nn.ModuleDict({"generator": mlp(16, 48, 16), "critic": mlp(16, 48, 48, 1, norm=False)})

    def made(self) -> list[T.Optimizer]:
        g, d = self.module["generator"].parameters(), self.module["critic"].parameters()
        return [T.Adam(g, lr=1e-4, betas=self.betas), T.Adam(d, lr=4e-4, betas=self.betas)]

    def schedule(self, optimizer: Any) -> Any:
        return None

    def gradients(self) -> None:
        pass

    def update(self) -> None:
        x = self.tokens()
        g, d = self.module["generator"], self.module["critic"]
        fake = g(draws(99_000 + self.step, self.rows, 16))
        self.optimizers[1].zero_grad()
        (F.softplus(-d(self.target(x))).mean() + F.softplus(d(fake.detach())).mean()).backward()
        self.optimizers[1].step()
        if self.clipped:
            with torch.no_grad():
                for w in d.parameters():
                    w.clamp_(-self.clipped, self.clipped)
        if self.step % self.every == 0:
            self.optimizers[0].zero_grad()
            F.softplus(-d(fake)).mean().backward()
            self.optimizers[0].step()
            if "g_ema" in self.extra:
                for name, w in g.state_dict().items():
                    self.extra["g_ema"][name].lerp_(w, 0.05)
        self.step += 1


class Wgan(Gan):
    clipped = 0.05

    def made(self) -> list[T.Optimizer]:
        g, d = self.module["generator"].parameters(), self.module["critic"].parameters()
        return [T.RMSprop(g, lr=5e-5), T.RMSprop(d, lr=5e-5)]


class GanAverage(Gan):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["g_ema"] = copy.deepcopy(self.module["generator"].state_dict())


class Codes(nn.Module):
    """An encoder, a decoder and a codebook that an average moves."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 48, 8), mlp(8, 48, 16)
        self.register_buffer("codebook", torch.randn(size, 8))
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed_avg", self.codebook.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        code = torch.cdist(z, self.codebook).argmin(-1)
        q = self.codebook[code]
        if self.training:
            with torch.no_grad():
                one = F.one_hot(code, len(self.codebook)).float()
                self.cluster_size.mul_(0.95).add_(one.sum(0), alpha=0.05)
                self.embed_avg.mul_(0.95).add_(one.T @ z, alpha=0.05)
                self.codebook.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-2)[:, None])
        return F.mse_loss(self.decoder(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q.detach())


class Vq(Free):
    """Dead codes are set to inputs every ninth update."""

    def build(self) -> nn.Module:
        return Codes()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def apply(self) -> None:
        super().apply()
        m = self.module
        if self.step % 9 == 8:
            dead = m.cluster_size < 0.05
            if dead.any():
                with torch.no_grad():
                    z = m.encoder(self.tokens())[: int(dead.sum())]
                    rows = dead.nonzero()[: len(z), 0]
                    m.codebook[rows], m.embed_avg[rows], m.cluster_size[rows] = z, z, 1.0


class Contrast(nn.Module):
    """MoCo: a query encoder, a key encoder that follows it, and a ring of keys."""

    def __init__(self, size: int = 128) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = mlp(16, 48, 8), mlp(16, 48, 8)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for k, q in zip(self.encoder_k.parameters(), self.encoder_q.parameters(), strict=True):
                k.lerp_(q, 0.01)
            key = F.normalize(self.encoder_k(x + 0.1), dim=-1)
        query = F.normalize(self.encoder_q(x), dim=-1)
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
        with torch.no_grad():
            at = int(self.queue_ptr)
            self.queue[:, at : at + len(key)] = key.T
            self.queue_ptr[0] = (at + len(key)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Moco(Free):
    def build(self) -> nn.Module:
        return Contrast()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Dino(Free):
    """Student, teacher, a centre; momentum and weight decay rise by a schedule."""

    def build(self) -> nn.Module:
        found = nn.Module()
        found.student, found.teacher = mlp(16, 48, 24), mlp(16, 48, 24)
        found.teacher.load_state_dict(found.student.state_dict())
        found.teacher.requires_grad_(False)
        found.register_buffer("center", torch.zeros(1, 24))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        with torch.no_grad():
            raw = m.teacher(x)
            t = ((raw - m.center) / 0.07).softmax(-1)
            m.center.lerp_(raw.mean(0, keepdim=True), 0.1)
        return -(t * (m.student(x + 0.1) / 0.1).log_softmax(-1)).sum(-1).mean()

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            if group["weight_decay"]:
                group["weight_decay"] = 0.4 - 0.18 * (1 + math.cos(math.pi * self.step / 200))
        super().apply()
        rate = 0.5 * 0.004 * (1 + math.cos(math.pi * self.step / 200))
        with torch.no_grad():
            for t, s in zip(self.module.teacher.parameters(), self.module.student.parameters(), strict=True):
                t.lerp_(s, rate)


class Clip(Free):
    """Two towers and a temperature that is held below ln 100."""

    def build(self) -> nn.Module:
        found = nn.Module()
        found.image, found.text = mlp(16, 48, 8), mlp(16, 48, 8)
        found.logit_scale = nn.Parameter(torch.tensor(4.59))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        a, b = F.normalize(m.image(x), dim=-1), F.normalize(m.text(self.target(x)), dim=-1)
        logits = m.logit_scale.exp() * a @ b.T
        return F.cross_entropy(logits, torch.arange(len(x)))

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            self.module.logit_scale.clamp_(max=math.log(100))


class Ema(Free):
    """An average whose decay warms up by its own counter."""

    top = 0.999

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shadow = {name: w.detach().clone() for name, w in self.module.named_parameters()}
        self.extra["ema"] = {"decay": self.top, "num_updates": 0, "shadow_params": shadow}

    def apply(self) -> None:
        super().apply()
        told = self.extra["ema"]
        told["num_updates"] += 1
        rate = 1 - min(told["decay"], (1 + told["num_updates"]) / (10 + told["num_updates"]))
        with torch.no_grad():
            for name, w in self.module.named_parameters():
                told["shadow_params"][name].lerp_(w, rate)


class Diffusion(Ema):
    """Noise is predicted; timesteps come from the batch's own generator."""

    def build(self) -> nn.Module:
        return mlp(17, 64, 64, 16)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        made_ = seeded(31_000 + self.step)
        t, noise = torch.rand(len(x), 1, generator=made_), torch.randn(len(x), 16, generator=made_)
        noised = (1 - t).sqrt() * self.target(x) + t.sqrt() * noise
        return F.mse_loss(self.module(torch.cat([noised, t], 1)), noise)


class Ddpg(Free):
    """Actor, critic and their targets; the replay memory is part of the file, and the critic learns twice as often."""

    layouts = TWO

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["replay"] = {"state": torch.zeros(256, 16), "reward": torch.zeros(256), "pos": 0, "full": False}

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"actor": mlp(16, 48, 4), "critic": mlp(20, 48, 1)})
        for name in ("actor", "critic"):
            found[f"{name}_target"] = copy.deepcopy(found[name]).requires_grad_(False)
        return found

    def made(self) -> list[T.Optimizer]:
        return [T.Adam(self.module["actor"].parameters(), lr=1e-4), T.Adam(self.module["critic"].parameters(), lr=1e-3)]

    def schedule(self, optimizer: Any) -> Any:
        return None

    def update(self) -> None:
        m, memory = self.module, self.extra["replay"]
        x = self.tokens()
        at = memory["pos"]
        memory["state"][at : at + len(x)] = x
        memory["reward"][at : at + len(x)] = self.target(x).mean(-1)
        memory["pos"] = (at + len(x)) % 256
        memory["full"] |= memory["pos"] == 0
        pick = torch.randint(256 if memory["full"] else memory["pos"] or 256, (32,), generator=seeded(self.step))
        s, r = memory["state"][pick], memory["reward"][pick]
        with torch.no_grad():
            y = r[:, None] + 0.9 * m["critic_target"](torch.cat([s, m["actor_target"](s)], 1))
        self.optimizers[1].zero_grad()
        F.mse_loss(m["critic"](torch.cat([s, m["actor"](s).detach()], 1)), y).backward()
        self.optimizers[1].step()
        if self.step % 2:
            self.optimizers[0].zero_grad()
            (-m["critic"](torch.cat([s, m["actor"](s)], 1)).mean()).backward()
            self.optimizers[0].step()
            with torch.no_grad():
                for name in ("actor", "critic"):
                    for t, w in zip(m[f"{name}_target"].parameters(), m[name].parameters(), strict=True):
                        t.lerp_(w, 0.005)
        self.step += 1


class Ppo(Free):
    """Policy and value heads; running statistics of observations in float64; an adaptive KL coefficient."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["kl_ctl"] = {"value": 0.2, "n_steps": 0}

    def build(self) -> nn.Module:
        found = nn.Module()
        found.body, found.policy, found.value = mlp(16, 48), nn.Linear(48, 4), nn.Linear(48, 1)
        found.log_std = nn.Parameter(torch.zeros(4))
        for name, value in (("mean", 0.0), ("var", 1.0)):
            found.register_buffer(f"obs_{name}", torch.full((16,), value, dtype=torch.float64))
        found.register_buffer("obs_count", torch.tensor(1e-4, dtype=torch.float64))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        with torch.no_grad():
            n, total = len(x), m.obs_count + len(x)
            delta = x.double().mean(0) - m.obs_mean
            m.obs_var.copy_(
                (m.obs_var * m.obs_count + x.double().var(0) * n + delta**2 * m.obs_count * n / total) / total
            )
            m.obs_mean.add_(delta * n / total)
            m.obs_count.copy_(total)
        h = m.body(((x - m.obs_mean.float()) / (m.obs_var.float() + 1e-8).sqrt()).clamp(-5, 5))
        aim = self.target(x)
        p = torch.distributions.Normal(m.policy(h), m.log_std.exp())
        kl = self.extra["kl_ctl"]
        loss = -p.log_prob(aim[:, :4]).sum(-1).mean() + 0.5 * F.mse_loss(m.value(h)[:, 0], aim.mean(-1))
        kl["value"] *= 1 + 0.1 * max(-0.2, min(0.2, loss.item() / 6 - 1))
        kl["n_steps"] += n
        return loss


class Referred(Loop):
    """DPO: the model that began the stage lies beside the policy in the file."""

    def net(self) -> nn.Module:
        found = nn.Module()
        found.policy, found.reference = Decoder(self.config), Decoder(self.config.but(seed=5))
        found.reference.requires_grad_(False)
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        m = self.module
        with torch.no_grad():
            base = m.reference(tokens)[0] - m.reference(tokens.flip(0).roll(1, 1))[0]
        gap = m.policy(tokens)[0] - m.policy(tokens.flip(0).roll(1, 1))[0]
        return -F.logsigmoid(0.1 * (base - gap))


class Taught(Loop):
    """Distillation: a teacher of another size in the file, a temperature that falls."""

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            found = nn.Module()
            found.student, found.teacher = mlp(16, 24, 16), mlp(16, 64, 64, 16).requires_grad_(False)
            return found

    def tokens(self) -> torch.Tensor:
        return draws(self.step, 32, 16)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        hot = max(1.0, 4 - self.step / 20)
        with torch.no_grad():
            aim = (self.module.teacher(x) / hot).softmax(-1)
        return hot**2 * F.kl_div((self.module.student(x) / hot).log_softmax(-1), aim, reduction="batchmean")


class ActNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loc, self.log_scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))
        self.inner = mlp(8, 32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.initialized:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
                self.initialized.fill_(1)
        x = (x + self.loc) * self.log_scale.exp()
        a, b = x.chunk(2, -1)
        shift, scale = self.inner(a).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a], -1), self.log_scale.sum() + scale.sum(-1)


class Flow(Free):
    def build(self) -> nn.Module:
        return nn.ModuleList([ActNorm() for _ in range(3)])

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for part in self.module:
            x, logdet = part(x)
            total = total + logdet
        return (0.5 * x.pow(2).sum(-1) - total).mean()


class Spectral(Free):
    def build(self) -> nn.Module:
        made_ = [parametrizations.spectral_norm(nn.Linear(a, b)) for a, b in ((16, 48), (48, 48), (48, 16))]
        return nn.Sequential(made_[0], nn.LeakyReLU(0.1), made_[1], nn.LeakyReLU(0.1), made_[2])


class Weighted(Free):
    def build(self) -> nn.Module:
        made_ = [parametrizations.weight_norm(nn.Linear(a, b)) for a, b in ((16, 48), (48, 16))]
        return nn.Sequential(made_[0], nn.ELU(), made_[1])


class Conv(Free):
    """Batch norms whose running statistics are no longer moved from the twentieth update on."""

    stop = 20

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 8, 3),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Conv1d(8, 8, 3, groups=8),
            nn.BatchNorm1d(8, momentum=None),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(96, 16),
        )

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.module.modules():
            if isinstance(one, nn.BatchNorm1d):
                one.train(self.step < self.stop)
        return F.mse_loss(self.module(x[:, None]), self.target(x))


class Observer(nn.Linear):
    """A linear map through int8: the range of its input is observed, then held."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.register_buffer("min_val", torch.tensor(math.inf))
        self.register_buffer("max_val", torch.tensor(-math.inf))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.observer_enabled.item():
            with torch.no_grad():
                low, high = x.min(), x.max()
                self.min_val.copy_(low if self.min_val.isinf() else self.min_val * 0.99 + low * 0.01)
                self.max_val.copy_(high if self.max_val.isinf() else self.max_val * 0.99 + high * 0.01)
                self.scale.copy_(((self.max_val - self.min_val) / 255).clamp(min=1e-8))
        x = torch.fake_quantize_per_tensor_affine(x, float(self.scale), 0, -128, 127)
        return super().forward(x)


class Qat(Free):
    def build(self) -> nn.Module:
        return nn.Sequential(Observer(16, 48), nn.ReLU(), Observer(48, 16))

    def apply(self) -> None:
        super().apply()
        if self.step == 25:
            for one in self.module:
                if isinstance(one, Observer):
                    one.observer_enabled.zero_()


class Swa(Free):
    """Weights are averaged every fifth update from the tenth on, while the learning rate goes up and down."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        state = T.swa_utils.AveragedModel(self.module).state_dict()
        self.extra["swa_state_dict"] = {k: v.clone() for k, v in state.items()}

    def schedule(self, optimizer: Any) -> Any:
        c = self.config
        return T.lr_scheduler.CyclicLR(
            optimizer, c.lr / 20, c.lr, step_size_up=1, step_size_down=4, cycle_momentum=False
        )

    def apply(self) -> None:
        super().apply()
        if self.step >= 10 and self.step % 5 == 0:
            told = self.extra["swa_state_dict"]
            n = told["n_averaged"]
            for name, w in self.module.state_dict().items():
                a = told[f"module.{name}"]
                a.copy_(w if n == 0 else a + (w - a) / (n + 1))
            n += 1


class Pruned(Free):
    """Every eighth update more of the smallest weights are masked (``weight_orig`` and ``weight_mask``)."""

    def build(self) -> nn.Module:
        found = mlp(16, 48, 48, 16)
        for one in found:
            if isinstance(one, nn.Linear):
                prune.identity(one, "weight")
        return found

    def apply(self) -> None:
        super().apply()
        if self.step % 8 == 7:
            share = min(0.8, 0.02 * self.step)
            for one in self.module:
                if isinstance(one, nn.Linear):
                    size = one.weight_orig.detach().abs().flatten()
                    one.weight_mask.copy_(
                        (one.weight_orig.abs() > size.kthvalue(max(1, int(share * len(size)))).values).float()
                    )


class Rigl(Free):
    """Every tenth update a tenth of the weights is dropped and as many grow from zero, their moments too."""

    def apply(self) -> None:
        super().apply()
        if self.step % 10 == 9:
            with torch.no_grad():
                for w in self.module.parameters():
                    if w.ndim == 2:
                        number = w.numel() // 10
                        at = w.abs().flatten().topk(number, largest=False).indices
                        for one in (w, *[self.optimizers[0].state[w][n] for n in ("exp_avg", "exp_avg_sq")]):
                            one.view(-1)[at] = 0


class Relora(Lora):
    """Every twelfth update the adapters are merged, begun anew, and nine tenths of their moments are set to zero."""

    def apply(self) -> None:
        super().apply()
        if self.step % 12 == 11:
            named = dict(self.module.named_parameters())
            made_ = seeded(self.step)
            with torch.no_grad():
                for name in [n for n in named if "lora_A" in n]:
                    a, b = named[name], named[name.replace("lora_A", "lora_B")]
                    named[name.replace("lora_A.", "")].add_(2.0 * b @ a)
                    a.copy_(torch.randn(a.shape, generator=made_) / math.sqrt(a.shape[1]))
                    b.zero_()
                    for w in (a, b):
                        for part in ("exp_avg", "exp_avg_sq"):
                            one = self.optimizers[0].state[w][part]
                            one.mul_((torch.rand(one.shape, generator=made_) > 0.9).float())


class Merged(nn.Module):
    """A linear map with a frozen weight and what is trained beside it."""

    def __init__(self, a: int, b: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(b, a) / math.sqrt(a), requires_grad=False)
        if kind == "dora":
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(4, a) / 4), nn.Parameter(torch.zeros(b, 4))
            self.lora_magnitude_vector = nn.Parameter(self.weight.norm(dim=1).clone())
        elif kind == "vera":
            self.register_buffer("vera_A", torch.randn(8, a))
            self.register_buffer("vera_B", torch.randn(b, 8))
            self.vera_lambda_d, self.vera_lambda_b = nn.Parameter(torch.full((8,), 0.1)), nn.Parameter(torch.zeros(b))
        elif kind == "ia3":
            self.ia3_l = nn.Parameter(torch.ones(b))
        else:
            self.bias = nn.Parameter(torch.zeros(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "dora":
            w = self.weight + 2 * self.lora_B @ self.lora_A
            return x @ (w * (self.lora_magnitude_vector / w.norm(dim=1).detach())[:, None]).T
        if self.kind == "vera":
            return x @ self.weight.T + self.vera_lambda_b * ((self.vera_lambda_d * (x @ self.vera_A.T)) @ self.vera_B.T)
        return x @ self.weight.T * self.ia3_l if self.kind == "ia3" else x @ self.weight.T + self.bias


def beside(kind: str) -> Any:
    return lambda self: nn.Sequential(
        Merged(16, 48, kind), nn.GELU(), Merged(48, 48, kind), nn.GELU(), Merged(48, 16, kind)
    )


def plus(self: Any) -> Any:
    """LoRA+: B learns sixteen times as fast."""
    named = [(n, w) for n, w in self.module.named_parameters() if w.requires_grad]
    lr = self.config.lr / 4
    groups = [
        {"params": [w for n, w in named if part in n], "lr": lr * factor, "weight_decay": 0.0}
        for part, factor in (("lora_A", 1), ("lora_B", 16))
    ]
    return groups


class Prompt(Free):
    """A prompt alone is trained; the network is in the file and never moves."""

    def build(self) -> nn.Module:
        found = nn.Module()
        found.base = mlp(16, 48, 16).requires_grad_(False)
        found.prompt_embeddings = nn.Parameter(torch.zeros(4, 16))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        return F.mse_loss(m.base(x + (x @ m.prompt_embeddings.T).softmax(-1) @ m.prompt_embeddings), self.target(x))


class DiLoCo(Free):
    """Every seventh update the outer Nesterov moves from where the round began; its state is in the file."""

    layouts = TWO
    rate, momentum = 0.7, 0.9

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        begin = {n: w.detach().clone() for n, w in self.module.named_parameters()}
        self.extra["outer"] = {
            "params": begin,
            "momentum": {n: torch.zeros_like(w) for n, w in begin.items()},
            "round": 0,
        }

    def apply(self) -> None:
        super().apply()
        if self.step % 7 == 6:
            told = self.extra["outer"]
            with torch.no_grad():
                for n, w in self.module.named_parameters():
                    p, m = told["params"][n], told["momentum"][n]
                    d = p - w
                    m.mul_(self.momentum).add_(d)
                    p.sub_(self.rate * (d + self.momentum * m))
                    w.copy_(p)
            told["round"] += 1


class Federated(Free):
    """A round is six updates of a client that begins Adam anew; the server averages with the last round."""

    def apply(self) -> None:
        if self.step % 6 == 0:
            self.begin = None
            self.extra["server"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}
            self.optimizers[0].state.clear()
        super().apply()
        if self.step % 6 == 5:
            with torch.no_grad():
                for n, w in self.module.named_parameters():
                    w.lerp_(self.extra["server"][n], 0.5)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["server"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


class Freezing(Loop):
    """From the bottom up a layer is frozen every tenth update (FreezeOut); its counters stay behind."""

    def gradients(self) -> None:
        for name, w in self.module.named_parameters():
            if (self.step >= 8 and "embed" in name) or (self.step >= 18 and ".layers.0." in name):
                w.grad = None
        super().gradients()


class Warmed(Loop):
    """Sequence length and batch size rise; tokens and samples are counted; the rate goes by tokens."""

    layouts = NO_DCP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["progress"] = {"consumed_samples": 0, "consumed_tokens": 0, "seq_length": 6, "global_batch_size": 1}

    def tokens(self) -> torch.Tensor:
        rows, length = min(4, 1 + self.step // 12), min(17, 6 + self.step // 4)
        found = super().tokens()[:rows, :length]
        told = self.extra["progress"]
        told |= {"seq_length": length, "global_batch_size": rows}
        told["consumed_samples"] += rows
        told["consumed_tokens"] += rows * length
        return found

    def schedule(self, optimizer: Any) -> Any:
        return T.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) * math.sqrt(min(4, 1 + n // 12) / 4))


class Plateau(Loop):
    """The rate falls where the loss does not; every fourth update is an evaluation."""

    def schedule(self, optimizer: Any) -> Any:
        return T.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.6, patience=1, threshold=0.2, cooldown=1)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.last = found.item()
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        if self.step % 4 == 3:
            self.schedules[0].step(self.last)


def restarts(self: Any, optimizer: Any) -> Any:
    return T.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=9, T_mult=2, eta_min=1e-5)


def sequence(self: Any, optimizer: Any) -> Any:
    s = T.lr_scheduler
    return s.SequentialLR(
        optimizer,
        [
            s.LinearLR(optimizer, 0.1, total_iters=8),
            s.CosineAnnealingLR(optimizer, 25),
            s.ConstantLR(optimizer, 0.1, total_iters=10**6),
        ],
        milestones=[8, 33],
    )


def stepped(self: Any, optimizer: Any) -> Any:
    return T.lr_scheduler.MultiStepLR(optimizer, [6, 14, 24, 34, 44, 54, 64], gamma=0.5)


def by_layer(self: Any) -> Any:
    """A group for each parameter, its rate by depth and by width, the names told."""
    found = []
    for n, (name, w) in enumerate(self.module.named_parameters()):
        found.append(
            {
                "params": [w],
                "lr": self.config.lr * 0.9 ** (12 - n % 12),
                "param_names": [name],
                "weight_decay": 0.0 if w.ndim < 2 else self.config.weight_decay * (1 + n % 3),
            }
        )
    return found


class Betas(Loop):
    """beta2 goes by 1 − t^−0.8 and beta1 warms up, in the param groups."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            group["betas"] = (min(0.95, 0.8 + self.step / 200), min(0.999, 1 - (self.step + 2) ** -0.8))
        super().apply()


class Curriculum(Loop):
    """Three sources, each with its position; the mixture changes at the fifteenth and thirtieth update."""

    layouts = NO_DCP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["dataset_state"] = {"web": 0, "code": 0, "math": 0, "stage": 0}

    def tokens(self) -> torch.Tensor:
        told = self.extra["dataset_state"]
        told["stage"] = min(2, self.step // 15)
        name = ("web", "code", "math")[(self.step * (1 + told["stage"])) % 3 if told["stage"] else 0]
        told[name] += 1
        return batch(self.config, told[name], {"web": 1, "code": 2, "math": 3}[name])


class Balanced(Experts):
    """Loss-free balancing moves the biases; tokens an expert got since the last log are counted and set to zero."""

    layouts = NO_DCP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["tokens_per_expert"] = torch.zeros(config.experts)

    def apply(self) -> None:
        super().apply()
        counts = self.extra["tokens_per_expert"]
        if self.step % 10 == 0:
            counts.zero_()
        for name, buffer in self.module.named_buffers():
            load = self.load_[name]
            buffer.add_(0.001 * (load.mean() - load).sign())
            counts.add_(load)


class Ewc(Free):
    """The Fisher information and the weights of the last task are buffers; at the thirtieth update the task changes."""

    def build(self) -> nn.Module:
        found = nn.Module()
        found.net = mlp(16, 48, 16)
        for name, w in list(found.net.named_parameters()):
            for kind, value in (("fisher", torch.zeros_like(w)), ("star", w.detach().clone())):
                found.register_buffer(f"{kind}_{name.replace('.', '_')}", value.detach().clone())
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        aim = self.target(x) if self.step < 30 else self.target(-x.roll(1, -1))
        found = F.mse_loss(m.net(x), aim)
        for name, w in m.net.named_parameters():
            key = name.replace(".", "_")
            found = found + 10 * (getattr(m, f"fisher_{key}") * (w - getattr(m, f"star_{key}")) ** 2).sum()
        return found

    def gradients(self) -> None:
        super().gradients()
        if self.step % 30 == 29:
            for name, w in self.module.net.named_parameters():
                key = name.replace(".", "_")
                getattr(self.module, f"fisher_{key}").add_(w.grad**2)
                getattr(self.module, f"star_{key}").copy_(w.detach())


class Primacy(Free):
    """The last layer and its moments begin anew every ninth update, as in reinforcement learning against primacy."""

    def apply(self) -> None:
        super().apply()
        if self.step % 9 == 8:
            last = self.module[-1]
            with torch.no_grad():
                last.weight.copy_(draws(self.step, *last.weight.shape) / 7)
                last.bias.zero_()
            for w in last.parameters():
                self.optimizers[0].state.pop(w, None)


class Rollback(Loop):
    """After a spike the trainer skipped batches: its position in the data is ahead of its steps."""

    layouts = NO_DCP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra |= {"data_index": 0, "skipped": [], "consumed_samples": 0}

    def tokens(self) -> torch.Tensor:
        if self.step % 6 == 5:
            self.extra["skipped"].append(self.extra["data_index"])
            self.extra["data_index"] += 3
        self.extra["data_index"] += 1
        self.extra["consumed_samples"] += 4
        return batch(self.config, self.extra["data_index"], 1234)


class Dropped(Free):
    """Dropout by a generator whose state is in the file."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["generator"] = torch.Generator().manual_seed(3).get_state()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        made_ = torch.Generator()
        made_.set_state(self.extra["generator"])
        keep = (torch.rand(x.shape, generator=made_) > 0.1).float()
        self.extra["generator"] = made_.get_state()
        return F.mse_loss(self.module(x * keep / 0.9), self.target(x))


class Masters(Loop):
    """fp16 weights beside fp32 masters in the file; the optimizer updates the masters; a scale that backs off."""

    layouts = TWO

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 2.0**14,
            "_growth_tracker": 0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 8,
        }

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.float16)

    def made(self) -> list[T.Optimizer]:
        self.masters = [w.detach().float().clone().requires_grad_() for w in self.module.parameters()]
        return [T.AdamW(self.masters, lr=self.config.lr, betas=self.config.betas)]

    def content(self) -> dict[str, Any]:
        return super().content() | {"fp32_from_fp16": [w.detach() for w in self.masters]}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        with torch.no_grad():
            for w, old in zip(self.masters, content["fp32_from_fp16"], strict=True):
                w.copy_(old)

    def gradients(self) -> None:
        for m, w in zip(self.masters, self.module.parameters(), strict=True):
            m.grad = None if w.grad is None else w.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)

    def apply(self) -> None:
        told = self.extra["scaler"]
        if self.step % 9 == 4:
            told |= {"scale": told["scale"] / 2, "_growth_tracker": 0}
        else:
            super().apply()
            told["_growth_tracker"] += 1
            if told["_growth_tracker"] == 8:
                told |= {"scale": told["scale"] * 2, "_growth_tracker": 0}
        with torch.no_grad():
            for m, w in zip(self.masters, self.module.parameters(), strict=True):
                w.copy_(m)

    def update(self) -> None:
        self.module.zero_grad(set_to_none=True)
        super().update()


class Bfgs(Free):
    """L-BFGS: up to four evaluations an update, history in the state."""

    layouts = TWO

    def groups(self) -> Any:
        return list(self.module.parameters())

    def optimizer(self, groups: Any) -> Any:
        return T.LBFGS(groups, lr=0.3, max_iter=4, history_size=6)

    def schedule(self, optimizer: Any) -> Any:
        return None

    def apply(self) -> None:
        x = self.tokens()

        def closure() -> torch.Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        self.optimizers[0].step(closure)


class Tables(Free):
    """A recommender: SparseAdam updates its tables, whose rows are seldom seen, and AdamW the rest."""

    layouts = TWO

    def build(self) -> nn.Module:
        return nn.ModuleDict({"users": nn.Embedding(200, 8, sparse=True), "top": mlp(8, 32, 1)})

    def made(self) -> list[T.Optimizer]:
        return [
            T.SparseAdam(list(self.module["users"].parameters()), lr=1e-2),
            T.AdamW(self.module["top"].parameters()),
        ]

    def gradients(self) -> None:
        pass

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        who = (x[:, 0].abs() * 60).long().clamp(max=199)
        return F.mse_loss(self.module["top"](self.module["users"](who))[:, 0], x[:, 0].sin())


class Shifted(Loop):
    """A rare language appears late: parts of the gradient become a thousand times larger from the fifteenth update."""

    clip = 0.0

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(tokens) * (1.0 if self.step < 15 else 1000.0)


class Evolved(Free):
    """Population-based training: every tenth update the rate is perturbed and weights come from a better member."""

    layouts = TWO

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["members"] = [
            {n: w.detach() + 0.1 * draws(m, *w.shape) for n, w in self.module.named_parameters()} for m in range(2)
        ]

    def schedule(self, optimizer: Any) -> Any:
        return None

    def apply(self) -> None:
        super().apply()
        if self.step % 10 == 9:
            with torch.no_grad():
                for n, w in self.module.named_parameters():
                    other = self.extra["members"][self.step // 10 % 2][n]
                    kept = w.clone()
                    w.copy_(other)
                    other.copy_(kept)
            for group in self.optimizers[0].param_groups:
                group["lr"] *= 0.8 if self.step % 20 == 9 else 1.25


class Lstm(Free):
    """Truncated backpropagation: the hidden state goes from batch to batch and is in the file."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["hidden"] = [torch.zeros(1, 8, 24), torch.zeros(1, 8, 24)]

    def build(self) -> nn.Module:
        return nn.ModuleDict({"rnn": nn.LSTM(4, 24, batch_first=True), "out": nn.Linear(24, 4)})

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(8, -1, 4)
        found, hidden = self.module["rnn"](x[:, :-1], tuple(self.extra["hidden"]))
        self.extra["hidden"] = [one.detach() for one in hidden]
        return F.mse_loss(self.module["out"](found), x[:, 1:])


class Ademix(Loop):
    layouts = NO_DCP


def hugging(id: str, text: str, name: str = "Llama", **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


HEALTHY16: tuple[Fault, ...] = (
    variant("tb01_cautious", "cautious AdamW: masked, scaled up", optimizer=optim(nets.Cautious)),
    variant("tb02_sam", "sharpness-aware AdamW", base=Sam),
    variant("tb03_lookahead", "Lookahead over AdamW", optimizer=optim(nets.Lookahead), layouts=NO_DCP),
    variant("tb04_ademamix", "AdEMAMix: a third moment", optimizer=optim(nets.AdEMAMix, factor=0.2), layouts=NO_DCP),
    variant("tb05_adan", "Adan", optimizer=plain(nets.Adan), layouts=NO_DCP),
    variant("tb06_novograd", "NovoGrad: a second moment a tensor", optimizer=plain(nets.NovoGrad), layouts=NO_DCP),
    variant("tb07_sophia", "Sophia", optimizer=plain(nets.Sophia, factor=0.3), layouts=NO_DCP),
    variant("tb08_galore", "GaLore: projected moments", optimizer=plain(nets.Galore), layouts=NO_DCP),
    variant("tb09_adam_mini", "Adam-mini", optimizer=plain(nets.AdamMini), layouts=NO_DCP),
    variant("tb10_lars", "LARS", optimizer=plain(nets.Lars, factor=100.0), layouts=NO_DCP),
    variant("tb11_lbfgs", "L-BFGS", base=Bfgs),
    variant("tb12_tables", "sparse tables by SparseAdam", base=Tables),
    variant("tb13_kahan", "bf16 with Kahan's compensation", optimizer=optim(nets.Kahan), layouts=NO_DCP,
            net=lambda self: Decoder(self.config).to(torch.bfloat16), true=("D5", "D6")),
    variant("tb14_langevin", "noise after each update", optimizer=optim(nets.Langevin), layouts=NO_DCP),
    variant("tb15_sphere", "nGPT: rows are normalised after each update", base=Sphere),
    variant("tb16_wgan", "a critic whose weights are clipped, three steps to the generator's one", base=Wgan),
    variant("tb17_gan_average", "a GAN with beta1 = 0 and an averaged generator", base=GanAverage),
    variant("tb18_vq", "a codebook moved by averages; dead codes are revived", base=Vq),
    variant("tb19_moco", "a queue of keys, a momentum encoder", base=Moco),
    variant("tb20_dino", "a teacher, a centre, rising weight decay", base=Dino, true=("H1",)),
    variant("tb21_clip", "a temperature at its bound", base=Clip),
    variant("tb22_diffusion", "diffusion with a warmed-up average", base=Diffusion),
    variant("tb23_ddpg", "targets, two rates of learning, a replay memory", base=Ddpg),
    variant("tb24_ppo", "value head, running statistics, a KL coefficient", base=Ppo),
    variant("tb25_dpo", "a reference model in the file", base=Referred),
    variant("tb26_taught", "a teacher in the file", base=Taught),
    variant("tb27_flow", "a flow with norms that the data initialise", base=Flow),
    variant("tb28_spectral", "spectral norms", base=Spectral),
    variant("tb29_weight_norm", "weight norms", base=Weighted),
    variant("tb30_frozen_norms", "batch norms that stop", base=Conv),
    variant("tb31_qat", "quantisation-aware: observers that stop", base=Qat),
    variant("tb32_swa", "averaged weights under a cyclic rate", base=Swa),
    variant("tb33_pruned", "gradual pruning by masks", base=Pruned),
    variant("tb34_rigl", "connections dropped and grown", base=Rigl),
    variant("tb35_relora", "ReLoRA: merged and begun anew again and again", base=Relora),
    variant("tb36_dora", "DoRA", base=Free, build=beside("dora")),
    variant("tb37_lora_plus", "LoRA+: B at sixteen times the rate", base=Lora, groups=plus),
    variant("tb38_vera", "VeRA: random projections that are shared", base=Free, build=beside("vera")),
    variant("tb39_bitfit", "biases alone", base=Free, build=beside("bias")),
    variant("tb40_prompt", "a prompt alone", base=Prompt),
    variant("tb41_diloco", "DiLoCo: an outer optimizer", base=DiLoCo),
    variant("tb42_federated", "clients begin Adam anew every round", base=Federated),
    variant("tb43_freezing", "layers are frozen from the bottom up", base=Freezing),
    variant("tb44_warmed", "length, batch and rate rise", base=Warmed),
    variant("tb45_plateau", "the rate falls at a plateau", base=Plateau, layouts=NO_DCP),
    variant("tb46_restarts", "warm restarts", schedule=restarts),
    variant("tb47_sequence", "three schedules in a row", schedule=sequence, layouts=NO_DCP),
    variant("tb48_by_layer", "a group a parameter, the rates fall by depth", groups=by_layer, schedule=stepped,
            layouts=NO_DCP),
    variant("tb49_betas", "betas that follow a schedule", base=Betas, true=("H1",)),
    variant("tb50_curriculum", "three sources and stages", base=Curriculum),
    variant("tb51_balanced", "experts balanced by biases, counters set to zero", base=Balanced, needs={"experts": 4}),
    variant("tb52_ewc", "tasks one after the other, with Fisher information", base=Ewc),
    variant("tb53_primacy", "the last layer begins anew every ninth update", base=Primacy, layouts=NO_DCP),
    variant("tb54_rollback", "batches skipped after spikes", base=Rollback),
    variant("tb55_dropout", "dropout by a stored generator", base=Dropped),
    variant("tb56_masters", "fp16 weights, masters, a loss scale", base=Masters),
    variant("tb57_shifted", "the loss is a thousand times larger from an update on", base=Shifted, true=("B10",)),
    variant("tb58_evolved", "population-based: weights and rates come from other members", base=Evolved),
    variant("tb59_recurrent", "a hidden state that goes from batch to batch", base=Lstm),
    variant("tb60_scaled", "steps scaled by the size of the parameter", optimizer=optim(nets.Scaled)),
    variant("tb61_grokfast", "amplified slow gradients", optimizer=optim(nets.Grok), layouts=NO_DCP),
    variant("tb62_mars", "MARS: corrected gradients", optimizer=optim(nets.Mars), layouts=NO_DCP),
    hugging("tb63_trainer_polynomial", "Trainer: polynomial decay, no warm-up, accumulated", "Qwen2",
            lr_scheduler_type="polynomial", warmup_steps=0, gradient_accumulation_steps=3),
    hugging("tb64_trainer_neftune", "Trainer: GPT-2 with noise on embeddings, cosine with restarts", "gpt2",
            neftune_noise_alpha=5.0, lr_scheduler_type="cosine_with_restarts",
            lr_scheduler_kwargs={"num_cycles": 4}),
)  # fmt: skip
