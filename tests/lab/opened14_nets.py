"""Nets, trainers and optimizers of the fourteenth set that no other set has."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.config import Config
from tests.lab.live import Groups, Loop
from tests.lab.optimizers import Optimizer

__all__ = [
    "Actor",
    "AdEMAMix",
    "Adan",
    "Agent",
    "Clip",
    "Conv",
    "Fine",
    "GaLore",
    "Gan",
    "Gpt",
    "Mini",
    "Pair",
    "Recur",
    "Remembering",
    "Shampoo",
    "Sophia",
    "Ssm",
    "Vq",
    "held",
    "net",
]

Tensor = torch.Tensor
Told = tuple[Tensor, dict[str, Tensor]]


def net(kind: Any, **more: Any) -> Any:
    """For `Loop.net`."""
    return lambda self: _seeded(self.config, kind, more)


def _seeded(config: Config, kind: Any, more: dict[str, Any]) -> nn.Module:
    """From the config's seed, without a change of the global generator."""
    state = torch.get_rng_state()
    torch.manual_seed(config.seed)
    try:
        return kind(config, **more)
    finally:
        torch.set_rng_state(state)


def held(self: Loop, name: str) -> dict[str, Any]:
    """The optimizer's state of a parameter."""
    weight = dict(self.module.named_parameters())[name]
    return next(one.state[weight] for one in self.optimizers if weight in one.state)


def _loss(logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    return F.cross_entropy(logits[..., :vocab].reshape(-1, vocab), tokens[:, 1:].reshape(-1))


class Conv(nn.Module):
    """Causal convolutions with batch norms."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h, self.config = config.hidden, config
        self.embed = nn.Embedding(config.padded, h)
        self.convs = nn.ModuleList(nn.Conv1d(h, h, 3) for _ in range(2))
        self.bns = nn.ModuleList(nn.BatchNorm1d(h) for _ in range(2))
        self.head = nn.Linear(h, config.padded)

    def forward(self, tokens: Tensor) -> Told:
        x = self.embed(tokens[:, :-1]).transpose(1, 2)
        for conv, bn in zip(self.convs, self.bns, strict=True):
            x = x + F.relu(bn(conv(F.pad(x, (2, 0)))))
        return _loss(self.head(x.transpose(1, 2)), tokens, self.config.vocab), {}


class _Block(nn.Module):
    def __init__(self, config: Config, interleaved: bool, swiglu: bool, scale: float) -> None:
        super().__init__()
        h, f, self.heads = config.hidden, config.ffn, config.heads
        self.interleaved, self.swiglu = interleaved, swiglu
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attn = nn.ModuleDict({"query_key_value": nn.Linear(h, 3 * h), "dense": nn.Linear(h, h)})
        first = {"gate_up_proj": nn.Linear(h, 2 * f, bias=False)} if swiglu else {"c_fc": nn.Linear(h, f)}
        self.mlp = nn.ModuleDict({**first, "down_proj": nn.Linear(f, h)})
        if scale:
            self.ls_1, self.ls_2 = (nn.Parameter(torch.full((h,), scale)) for _ in range(2))
        self.scaled, self.approximate = bool(scale), "none"

    def forward(self, x: Tensor) -> Tensor:
        rows, length, h = x.shape
        fused = self.attn["query_key_value"](self.ln_1(x))
        if self.interleaved:  # q k v of each head
            q, k, v = fused.view(rows, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (one.view(rows, length, self.heads, -1).transpose(1, 2) for one in fused.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, h)
        out = self.attn["dense"](out)
        x = x + (out * self.ls_1 if self.scaled else out)
        inner = self.ln_2(x)
        if self.swiglu:
            gate, up = self.mlp["gate_up_proj"](inner).chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(self.mlp["c_fc"](inner), approximate=self.approximate)
        out = self.mlp["down_proj"](inner)
        return x + (out * self.ls_2 if self.scaled else out)


class Gpt(nn.Module):
    """Learned positions, layer norms with biases, fused attention; ``scale`` of a LayerScale."""

    def __init__(
        self, config: Config, interleaved: bool = False, swiglu: bool = False, scale: float = 0.0, layers: int = 3
    ) -> None:
        super().__init__()
        h, self.config = config.hidden, config
        self.wte, self.wpe = nn.Embedding(config.padded, h), nn.Embedding(config.length, h)
        self.h = nn.ModuleList(_Block(config, interleaved, swiglu, scale) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(h), nn.Linear(h, config.padded, bias=False)
        nn.init.normal_(self.wte.weight, std=0.3)
        nn.init.normal_(self.wpe.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Told:
        x = self.wte(tokens[:, :-1])
        x = x + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return _loss(self.lm_head(self.ln_f(x)), tokens, self.config.vocab), {}


class Recur(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h, self.config = config.hidden, config
        self.encoder, self.rnn = nn.Embedding(config.padded, h), nn.LSTM(h, h, 2, batch_first=True)
        self.decoder = nn.Linear(h, config.padded)

    def forward(self, tokens: Tensor) -> Told:
        return _loss(self.decoder(self.rnn(self.encoder(tokens[:, :-1]))[0]), tokens, self.config.vocab), {}


class _Mixer(nn.Module):
    def __init__(self, h: int, states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(h, 2 * h, bias=False), nn.Linear(h, h, bias=False)
        self.conv1d = nn.Conv1d(h, h, 3, groups=h)
        self.A_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(h, 1))
        self.D, self.dt_bias = nn.Parameter(torch.ones(h)), nn.Parameter(torch.rand(h) * 2 - 3)
        self.x_proj = nn.Linear(h, 2 * states, bias=False)
        self.norm = nn.RMSNorm(h)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        inner = F.silu(self.conv1d(F.pad(inner.transpose(1, 2), (2, 0))).transpose(1, 2))
        b, c = self.x_proj(inner).chunk(2, -1)
        dt = F.softplus(inner + self.dt_bias)
        keep = (-dt[..., None] * self.A_log.exp()).exp()
        state, out = torch.zeros(x.shape[0], x.shape[2], b.shape[-1]), []
        for t in range(x.shape[1]):
            state = state * keep[:, t] + (dt[:, t] * inner[:, t])[..., None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1))
        return x + self.out_proj((torch.stack(out, 1) + inner * self.D) * F.silu(gate))


class Ssm(nn.Module):
    """A selective state space, as Mamba's parameters are named."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h, self.config = config.hidden, config
        self.backbone = nn.ModuleDict(
            {"embedding": nn.Embedding(config.padded, h), "layers": nn.ModuleList(_Mixer(h) for _ in range(2))}
        )
        self.norm_f, self.lm_head = nn.RMSNorm(h), nn.Linear(h, config.padded, bias=False)

    def forward(self, tokens: Tensor) -> Told:
        x = self.backbone["embedding"](tokens[:, :-1])
        for layer in self.backbone["layers"]:
            x = layer(x)
        return _loss(self.lm_head(self.norm_f(x)), tokens, self.config.vocab), {}


class Vq(nn.Module):
    """A codebook that follows its inputs; no gradient reaches it. Dead codes are replaced by inputs."""

    def __init__(self, config: Config, revive: bool = False) -> None:
        super().__init__()
        h, self.config, self.revive, codes = config.hidden, config, revive, 24
        self.encoder = nn.Sequential(nn.Embedding(config.padded, h), nn.Linear(h, h), nn.GELU(), nn.Linear(h, h))
        self.decoder = nn.Sequential(nn.Linear(h, 2 * h), nn.GELU(), nn.Linear(2 * h, config.padded))
        self.register_buffer("codebook", torch.randn(codes, h) * 0.3)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.codebook.clone())

    def forward(self, tokens: Tensor) -> Told:
        x = self.encoder(tokens[:, :-1])
        flat = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            picks = torch.cdist(flat, self.codebook).argmin(1)
            found = self.codebook[picks]
            hot = F.one_hot(picks, len(self.codebook)).float()
            self.cluster_size.mul_(0.95).add_(hot.sum(0), alpha=0.05)
            self.embed_avg.mul_(0.95).add_(hot.T @ flat, alpha=0.05)
            if self.revive:
                dead = (self.cluster_size < 0.3).nonzero()[:, 0]
                if len(dead):
                    fresh = flat[torch.randperm(len(flat))[: len(dead)]]
                    self.embed_avg[dead[: len(fresh)]] = fresh
                    self.cluster_size[dead[: len(fresh)]] = 1.0
            self.codebook.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-3)[:, None])
        through = x + (found.view_as(x) - x).detach()
        loss = _loss(self.decoder(through), tokens, self.config.vocab)
        return loss + 0.25 * (flat - found).pow(2).mean(), {}


class Clip(nn.Module):
    """Two towers and a temperature."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h = config.hidden
        self.image, self.text = (
            nn.Sequential(nn.Embedding(config.padded, h), nn.Linear(h, h), nn.GELU(), nn.Linear(h, h)) for _ in range(2)
        )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, tokens: Tensor) -> Told:
        one, two = (F.normalize(tower(part).mean(1), dim=-1)
                    for tower, part in ((self.image, tokens[:, :8]), (self.text, tokens[:, 8:])))  # fmt: skip
        logits = self.logit_scale.exp() * one @ two.T
        aim = torch.arange(len(tokens))
        return (F.cross_entropy(logits, aim) + F.cross_entropy(logits.T, aim)) / 2, {}


class Actor(nn.Module):
    """Values and those of a target network, a temperature, running statistics of what is observed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h = config.hidden
        made = [nn.Sequential(nn.Linear(h, 2 * h), nn.ReLU(), nn.Linear(2 * h, 8)) for _ in range(2)]
        self.online, self.target = made
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("table", torch.randn(config.padded, h) * 2 + 0.5)
        self.register_buffer("obs_mean", torch.zeros(h))
        self.register_buffer("obs_var", torch.ones(h))
        self.register_buffer("obs_count", torch.tensor(1e-4))

    def forward(self, tokens: Tensor) -> Told:
        seen = self.table[tokens]
        with torch.no_grad():
            flat = seen.reshape(-1, seen.shape[-1])
            whole = self.obs_count + len(flat)
            delta = flat.mean(0) - self.obs_mean
            spread = self.obs_var * self.obs_count + flat.var(0) * len(flat)
            self.obs_var.copy_((spread + delta**2 * self.obs_count * len(flat) / whole) / whole)
            self.obs_mean.add_(delta * len(flat) / whole)
            self.obs_count.copy_(whole)
            seen = (seen - self.obs_mean) / self.obs_var.sqrt()
            aim = (tokens[:, 1:] % 7).float() / 7 + 0.9 * self.target(seen[:, 1:]).amax(-1)
        q = self.online(seen[:, :-1])
        picked = q.gather(-1, (tokens[:, :-1] % 8)[..., None])[..., 0]
        entropy = q.detach().softmax(-1).clamp(min=1e-6)
        entropy = -(entropy * entropy.log()).sum(-1).mean()
        return F.huber_loss(picked, aim) + self.log_alpha * (entropy - 1.5), {}


class Agent(Loop):
    """Trains `Actor`; the target follows slowly, or is copied every ``copies`` updates."""

    net = net(Actor)
    copies = 0

    def update(self) -> None:
        super().update()
        pairs = zip(self.module.target.parameters(), self.module.online.parameters(), strict=True)
        with torch.no_grad():
            for target, online in pairs:
                if not self.copies:
                    target.lerp_(online, 0.05)
                elif self.step % self.copies == 0:
                    target.copy_(online)


class Pair(nn.Module):
    """A generator and its critic."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        h = config.hidden
        self.generator = nn.Sequential(nn.Linear(8, h), nn.ReLU(), nn.Linear(h, h))
        self.critic = nn.Sequential(nn.Linear(h, 2 * h), nn.LeakyReLU(0.2), nn.Linear(2 * h, 1))
        self.register_buffer("real", torch.randn(config.padded, h))


class Gan(Loop):
    """Two optimizers; the generator's turn is every other update."""

    net = net(Pair)
    layouts = ("torch_save", "folder", "lightning")
    every = 2

    def made(self) -> list[torch.optim.Optimizer]:
        lr = self.config.lr
        return [
            torch.optim.Adam(self.module.generator.parameters(), lr=lr / 2, betas=(0.5, 0.99)),
            torch.optim.Adam(self.module.critic.parameters(), lr=lr, betas=(0.5, 0.99)),
        ]

    def update(self) -> None:
        tokens = self.tokens()
        made = self.module.generator(torch.randn(16, 8))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        real = self.module.real[tokens[0, :16]]
        loss = F.softplus(-self.module.critic(real)).mean() + F.softplus(self.module.critic(made.detach())).mean()
        loss.backward()
        self.optimizers[1].step()
        if self.step % self.every == 0:
            F.softplus(-self.module.critic(made)).mean().backward()
            self.optimizers[0].step()
        for schedule in self.schedules:
            schedule.step()
        self.step += 1


class Remembering(Loop):
    """Keeps what it held some updates earlier; an object of the same class finds it in the class."""

    past: dict[str, Any]
    every = 6

    def update(self) -> None:
        if self.step and self.step % self.every == 0:
            type(self).past = copy.deepcopy(self.content())
        super().update()


# ---- optimizers ------------------------------------------------------------------------------------------------------


class AdEMAMix(Optimizer):
    """apple/ml-ademamix: a second, slow average of gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999, 0.9999), alpha=2.0, eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like
        return {"step": 0, "exp_avg_fast": zeros(weight), "exp_avg_slow": zeros(weight), "exp_avg_sq": zeros(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second, third = group["betas"]
        state["step"] += 1
        t = state["step"]
        state["exp_avg_fast"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_slow"].mul_(third).add_(gradient, alpha=1 - third)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**t)).add_(group["eps"])
        step = (state["exp_avg_fast"] / (1 - first**t) + group["alpha"] * state["exp_avg_slow"]) / under
        weight.add_(step + group["weight_decay"] * weight, alpha=-group["lr"])


class Adan(Optimizer):
    """sail-sg/Adan: also an average of the gradients' differences."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.02, no_prox=False)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        names = ("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad")
        return {name: torch.zeros_like(weight) for name in names}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second, third = group["betas"]
        t = group["step"]
        diff = gradient + state["neg_pre_grad"] if t > 1 else torch.zeros_like(gradient)
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_diff"].mul_(second).add_(diff, alpha=1 - second)
        both = gradient + second * diff
        state["exp_avg_sq"].mul_(third).addcmul_(both, both, value=1 - third)
        under = state["exp_avg_sq"].sqrt() / math.sqrt(1 - third**t) + group["eps"]
        step = state["exp_avg"] / (1 - first**t) + second * state["exp_avg_diff"] / (1 - second**t)
        weight.addcdiv_(step, under, value=-group["lr"]).div_(1 + group["lr"] * group["weight_decay"])
        state["neg_pre_grad"] = -gradient


class Sophia(Optimizer):
    """Liuhong99/Sophia: a curvature that is looked at every tenth update."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.965, 0.99), rho=0.04, weight_decay=0.1, maximize=False)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "hessian": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if state["step"] % 10 == 0:
            state["hessian"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        state["step"] += 1
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        ratio = (state["exp_avg"].abs() / (group["rho"] * 64 * state["hessian"] + 1e-15)).clamp(max=1)
        weight.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Shampoo(Optimizer):
    """Kronecker factors of each matrix, whose roots are made every fifth update; Adagrad's square for vectors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=0.0, epsilon=1e-4, update_freq=5)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"step": 0, "momentum_buffer": torch.zeros_like(weight)}
        for n, size in enumerate(weight.shape):
            found[f"precond_{n}"] = group["epsilon"] * torch.eye(size)
            found[f"inv_precond_{n}"] = torch.eye(size)
        return found

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        made = gradient
        for n in range(weight.ndim):
            flat = gradient.movedim(n, 0).reshape(weight.shape[n], -1)
            state[f"precond_{n}"].add_(flat @ flat.T)
            if state["step"] % group["update_freq"] == 0:
                values, vectors = torch.linalg.eigh(state[f"precond_{n}"])
                root = values.clamp(min=1e-8) ** (-1 / (2 * weight.ndim))
                state[f"inv_precond_{n}"] = (vectors * root) @ vectors.T
            made = (
                (state[f"inv_precond_{n}"] @ made.movedim(n, 0).reshape(weight.shape[n], -1))
                .view(made.movedim(n, 0).shape)
                .movedim(0, n)
            )
        state["step"] += 1
        state["momentum_buffer"].mul_(group["momentum"]).add_(made)
        weight.add_(state["momentum_buffer"], alpha=-group["lr"])


class GaLore(Optimizer):
    """jiaweizzhao/GaLore: Adam in a subspace of four directions that is found anew every 15 updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rank=4, update_proj_gap=15)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        shape = (group["rank"], weight.shape[1]) if weight.ndim == 2 else weight.shape
        return {"step": 0, "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if weight.ndim == 2:
            if state["step"] % group["update_proj_gap"] == 0:
                state["ortho_matrix"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, : group["rank"]].clone()
            gradient = state["ortho_matrix"].T @ gradient
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        step = step * (math.sqrt(1 - second**t) / (1 - first**t))
        weight.add_(state["ortho_matrix"] @ step if weight.ndim == 2 else step, alpha=-group["lr"])


class Mini(Optimizer):
    """zyushun/Adam-mini: one second moment a row."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "m": torch.zeros_like(weight), "vmean": torch.zeros_like(weight[..., :1])}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = state["step"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["m"].mul_(first).add_(gradient, alpha=1 - first)
        state["vmean"].mul_(second).add_(gradient.pow(2).mean(-1, keepdim=True), alpha=1 - second)
        under = (state["vmean"] / (1 - second**t)).sqrt() + group["eps"]
        weight.addcdiv_(state["m"], under.expand_as(weight), value=-group["lr"] / (1 - first**t))


class Apex(Optimizer):
    """apex's FusedAdam with master weights: bf16 parameters, everything else in fp32."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=1e-8, weight_decay=0.0, bias_correction=True)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros(weight.shape)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone(), "master_param": weight.detach().float()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        gradient, master = gradient.float(), state["master_param"]
        state["step"] += 1
        t = state["step"]
        master.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        under = (state["exp_avg_sq"] / (1 - second**t)).sqrt() + group["eps"]
        master.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - first**t))
        weight.copy_(master)


class Fine(Loop):
    """bf16 weights whose masters are in the optimizer's state."""

    layouts = ("torch_save", "folder", "lightning")

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return Apex(groups, self.config.lr, self.config.betas)
