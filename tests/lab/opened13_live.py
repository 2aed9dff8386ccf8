"""The thirteenth half, sealed until 2026-11-27: faults, healthy runs and changes on purpose, by somebody who has not read the doctor.

``why`` begins with the words that a right diagnosis must say. ``also`` are ids that a fair reader of the titles would
accept; where no title fits, the nearest ones are accepted and the words count.
"""

# ruff: noqa: E501, RUF012, B007, C416

from __future__ import annotations

import copy
import io
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.hugging import made, trained
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import only, optim
from tests.lab.model import LORA_SCALE, is_norm
from tests.lab.state import State

__all__ = ["OPENED13"]

TORCH = torch.optim
FILES = ("torch_save", "folder", "lightning")


# ---- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(h, 3 * h), "c_proj": nn.Linear(h, h)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(h, 4 * h), "c_proj": nn.Linear(4 * h, h)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, h = x.shape
        sides = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        q, k, v = (s.view(rows, length, self.heads, -1).transpose(1, 2) for s in sides)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, h)
        x = x + self.attn["c_proj"](mixed)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """GPT-2's names: fused c_attn, learned positions, biases, a tied head without a name."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        h = config.hidden
        self.wte, self.wpe = nn.Embedding(config.padded, h), nn.Embedding(64, h)
        nn.init.normal_(self.wte.weight, std=0.05)
        nn.init.normal_(self.wpe.weight, std=0.05)
        self.h = nn.ModuleList([Block(h, config.heads) for _ in range(config.layers)])
        self.ln_f = nn.LayerNorm(h)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.wte(tokens[:, :-1]) + self.wpe.weight[: tokens.shape[1] - 1]
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), {}


class Conv(nn.Module):
    """Causal convolutions with batch norms, as speech encoders have."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        h = config.hidden
        self.embed = nn.Embedding(config.padded, h)
        self.convs = nn.ModuleList([nn.Conv1d(h, h, 3) for _ in range(3)])
        self.bns = nn.ModuleList([nn.BatchNorm1d(h) for _ in range(3)])
        self.head = nn.Linear(h, config.padded)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embed(tokens[:, :-1]).transpose(1, 2)
        for conv, bn in zip(self.convs, self.bns, strict=True):
            x = x + F.gelu(bn(conv(F.pad(x, (2, 0)))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Ssm(nn.Module):
    """A state-space model with Mamba's names, and a buffer of positions that is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        h = config.hidden
        self.embedding = nn.Embedding(config.padded, h)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList()
        for _ in range(config.layers):
            mixer = nn.Module()
            mixer.in_proj, mixer.out_proj = nn.Linear(h, 2 * h, bias=False), nn.Linear(h, h, bias=False)
            mixer.conv1d = nn.Conv1d(h, h, 4, groups=h, padding=3)
            mixer.A_log = nn.Parameter(torch.log(torch.arange(1, h + 1).float()))
            mixer.D, mixer.dt_bias = nn.Parameter(torch.ones(h)), nn.Parameter(torch.full((h,), -3.0))
            mixer.norm = nn.RMSNorm(h)
            self.layers.append(mixer)
        self.norm_f = nn.RMSNorm(h)
        self.lm_head = nn.Linear(h, config.padded, bias=False)
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, h, 2) / h))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embedding(tokens[:, :-1])
        angle = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq)
        x = x + 0.1 * torch.cat([angle.sin(), angle.cos()], -1)
        for m in self.layers:
            u, z = m.in_proj(m.norm(x)).chunk(2, -1)
            u = F.silu(m.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            dt = F.softplus(m.dt_bias)
            decay, held, out = torch.exp(-torch.exp(m.A_log) * dt), torch.zeros_like(u[:, 0]), []
            for t in range(x.shape[1]):
                held = decay * held + dt * u[:, t]
                out.append(held)
            x = x + m.out_proj((torch.stack(out, 1) + m.D * u) * F.silu(z))
        return F.cross_entropy(self.lm_head(self.norm_f(x)).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Pair(nn.Module):
    """Actor and critic (or generator and discriminator) of one shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.actor, self.critic = Decoder(config), Decoder(config.but(seed=config.seed + 7))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.actor(tokens)[0] + self.critic(tokens.flip(1))[0], {}


def gpt(self: Loop) -> nn.Module:
    return Gpt(self.config)


def conv(self: Loop) -> nn.Module:
    return Conv(self.config)


def ssm(self: Loop) -> nn.Module:
    return Ssm(self.config)


# ---- handles ---------------------------------------------------------------------------------------------------------


def named(self: Loop) -> dict[str, torch.Tensor]:
    return {name: weight.data for name, weight in self.module.named_parameters()}


def held(self: Loop, name: str) -> dict[str, Any]:
    weight = dict(self.module.named_parameters())[name]
    return next(one.state[weight] for one in self.optimizers if weight in one.state)


def states(self: Loop) -> list[dict[str, Any]]:
    return [state for one in self.optimizers for state in one.state.values()]


def every(self: Loop) -> list[dict[str, Any]]:
    return [group for one in self.optimizers for group in one.param_groups]


def put(self: Loop, name: str, tensor: torch.Tensor) -> None:
    named(self)[name].copy_(tensor.clone())


class Kept(Loop):
    """Keeps what it was some updates ago, for loads that take a part from there."""

    past: dict[int, Any] = {}

    def update(self) -> None:
        super().update()
        type(self).past[self.step] = copy.deepcopy(self.content())

    def ago(self, content: dict[str, Any], updates: int) -> dict[str, Any]:
        return copy.deepcopy(type(self).past[content["step"] - updates])


class Resumed(Loop):
    """Knows that it was resumed."""

    resumed = False

    def loaded(self) -> None:
        self.resumed = True


# ---- trainers with more to keep ----------------------------------------------------------------------------------------


class Averaged(Kept):
    """An average of the weights, with its decay and its count."""

    rate, ramp = 0.95, False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {"decay": self.rate, "num_updates": 0, "shadow": self.copied()}

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in named(self).items()}

    def apply(self) -> None:
        super().apply()
        told = self.extra["ema"]
        told["num_updates"] += 1
        n = told["num_updates"]
        rate = min(told["decay"], (1 + n) / (10 + n)) if self.ramp else told["decay"]
        for name, weight in named(self).items():
            told["shadow"][name].lerp_(weight, 1 - rate)


class Swa(Loop):
    """torch.optim.swa_utils.AveragedModel: every fifth update, an equal mean."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.swa = torch.optim.swa_utils.AveragedModel(self.module)

    def apply(self) -> None:
        super().apply()
        if self.step % 5 == 4:
            self.swa.update_parameters(self.module)

    def content(self) -> dict[str, Any]:
        return super().content() | {"swa_model": self.swa.state_dict()}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.swa.load_state_dict(content["swa_model"])


class Lora(Kept):
    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found

    def loaded(self) -> None:
        self.config = self.config.but(lora=4)


@torch.no_grad()
def merge(self: Loop) -> None:
    for name, a in named(self).items():
        if "lora_A" in name:
            stem = name.removesuffix("lora_A.weight")
            named(self)[f"{stem}weight"].add_(LORA_SCALE * named(self)[f"{stem}lora_B.weight"] @ a)


class Two(Kept):
    """Muon for the matrices of the layers, AdamW for the rest, a schedule each."""

    layouts = ("torch_save", "lightning")

    def made(self) -> list[torch.optim.Optimizer]:
        names = dict(self.module.named_parameters())
        inner = [w for n, w in names.items() if w.ndim == 2 and ".layers." in n]
        rest = [w for n, w in names.items() if w.ndim != 2 or ".layers." not in n]
        c = self.config
        return [TORCH.Muon(inner, lr=4 * c.lr, weight_decay=0.01), TORCH.AdamW(rest, lr=c.lr, betas=c.betas)]


class Both(Kept):
    """Two nets and two optimizers of one shape."""

    layouts = ("torch_save", "lightning")

    def net(self) -> nn.Module:
        return Pair(self.config)

    def made(self) -> list[torch.optim.Optimizer]:
        c, pair = self.config, self.module
        return [TORCH.AdamW(part.parameters(), lr=c.lr, betas=c.betas) for part in (pair.actor, pair.critic)]


class Fed(Resumed):
    """A loader with a state of its own: epoch, order, position."""

    rows = 4
    length = 40  # batches of an epoch

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {"epoch": 0, "seed": 1234, "batches_yielded": 0, "samples_seen": 0}

    def tokens(self) -> torch.Tensor:
        told = self.extra["dataloader"]
        found = batch(self.config, told["batches_yielded"], told["seed"] + told["epoch"])[: self.rows]
        told["batches_yielded"] += 1
        told["samples_seen"] += len(found)
        if told["batches_yielded"] == self.length:
            told |= {"epoch": told["epoch"] + 1, "batches_yielded": 0}
        return found


class Chance(Loop):
    """Four ranks' random states; rank 0's also makes gradient noise."""

    layouts = ("torch_save", "lightning")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.made_ = [torch.Generator().manual_seed(100 + rank) for rank in range(4)]

    def gradients(self) -> None:
        for one in self.made_:
            noise = torch.randn(1, generator=one)
        for weight in self.module.parameters():
            weight.grad.mul_(1 + 0.01 * noise)
        super().gradients()

    def content(self) -> dict[str, Any]:
        return super().content() | {"rng_states": {f"rank{n}": one.get_state() for n, one in enumerate(self.made_)}}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        for n, one in enumerate(self.made_):
            one.set_state(content["rng_states"][f"rank{n}"])


class Scaled(Loop):
    """A loss scale that doubles every third update."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == 3:
            told |= {"scale": told["scale"] * 2, "_growth_tracker": 0}


class Apex(Kept):
    """bf16 weights; the optimizer updates fp32 masters, which are stored by name."""

    layouts = ("torch_save", "folder")

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    def made(self) -> list[torch.optim.Optimizer]:
        self.masters = {n: w.detach().float().clone().requires_grad_() for n, w in self.module.named_parameters()}
        ws = list(self.masters.values())
        return [self.optimizer([{"params": [w for w in ws if w.ndim > 1]}, {"params": [w for w in ws if w.ndim < 2]}])]

    def apply(self) -> None:
        for name, weight in self.module.named_parameters():
            self.masters[name].grad = weight.grad.float()
        super().apply()
        for name, weight in named(self).items():
            weight.copy_(self.masters[name].detach())

    def content(self) -> dict[str, Any]:
        return super().content() | {"master_params": {n: w.detach().clone() for n, w in self.masters.items()}}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        for name, value in content["master_params"].items():
            self.masters[name].data.copy_(value)


class Routed(Loop):
    """Experts balanced by a bias that moves by a fixed amount."""

    def update(self) -> None:
        super().update()
        for name, load in self.load_.items():
            self.module.get_buffer(name).add_((load.mean() - load).sign(), alpha=1e-3)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        loss, self.load_ = self.module(tokens)
        return loss


class Told(Resumed):
    """Arguments of the launch are stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["args"] = {
            "rope_theta": config.rope_theta,
            "max_steps": config.total,
            "seq_length": 16,
            "max_grad_norm": 1.0,
            "micro_batch_size": 4,
            "attention_dropout": 0.0,
            "data_path": "/data/web-v2",
        }


class Policy(Kept):
    """RLHF: a frozen reference, a normaliser of returns, a controller of the KL penalty."""

    layouts = ("torch_save", "lightning")
    sync = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra |= {
            "ref_model": {n: w.clone() for n, w in named(self).items()},
            "value_norm": {"mean": torch.zeros(1), "var": torch.ones(1), "count": 0},
            "kl_ctl": {"value": 0.2, "target": 6.0},
        }

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        norm, kl = self.extra["value_norm"], self.extra["kl_ctl"]
        norm["count"] += 1
        norm["mean"] += (found.detach() - norm["mean"]) / norm["count"]
        norm["var"] = norm["var"] * 0.9 + 0.1 * (found.detach() - norm["mean"]) ** 2
        kl["value"] *= 1.03
        far = sum(((w - self.extra["ref_model"][n]) ** 2).sum() for n, w in self.module.named_parameters())
        return found + 1e-3 * kl["value"] * far

    def apply(self) -> None:
        super().apply()
        if self.sync and self.step % self.sync == self.sync - 1:
            self.extra["ref_model"] = {n: w.clone() for n, w in named(self).items()}


class Teacher(Loop):
    """BYOL or DINO: a momentum teacher inside the module."""

    sync = 0

    def net(self) -> nn.Module:
        found = nn.Module()
        found.student, found.teacher = Decoder(self.config), Decoder(self.config.but(seed=self.config.seed))
        found.teacher.requires_grad_(False)
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module.student(tokens)[0]

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for mine, theirs in zip(self.module.teacher.parameters(), self.module.student.parameters(), strict=True):
            if self.sync == 0:
                mine.lerp_(theirs, 0.04)
            elif self.step % self.sync == self.sync - 1:
                mine.copy_(theirs)


class Extra(Decoder):
    """TransformerEngine's extra state: a pickle in a byte tensor."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fp8 = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(64, 3), "recipe": "delayed"}

    def get_extra_state(self) -> torch.Tensor:
        stream = io.BytesIO()
        torch.save(self.fp8, stream)
        return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.fp8 = torch.load(io.BytesIO(state.numpy().tobytes()))


class Engine(Loop):
    layouts = ("torch_save", "folder")

    def net(self) -> nn.Module:
        return Extra(self.config)

    def apply(self) -> None:
        super().apply()
        told = self.module.fp8
        largest = torch.stack([w.abs().max() for n, w in named(self).items() if "down_proj" in n or "embed" in n][:3])
        told["amax_history_fwd"] = torch.cat([largest[None], told["amax_history_fwd"][:-1]])
        told["scale_fwd"] = 448 / told["amax_history_fwd"].amax(0).clamp(min=1e-6)


# ---- optimizers --------------------------------------------------------------------------------------------------------


class Shampoo(other.Optimizer):
    """Preconditioners of both sides, which only grow."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, epsilon=1e-4, weight_decay=0.0)

    def begin(self, weight: Any, group: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"step": 0, "momentum_buffer": torch.zeros_like(weight)}
        if weight.ndim == 2:
            return found | {f"precond_{n}": torch.eye(s) * group["epsilon"] for n, s in enumerate(weight.shape)}
        return found | {"sum": torch.zeros_like(weight)}

    def update(self, weight: Any, gradient: Any, state: Any, group: Any) -> None:
        state["step"] += 1
        if weight.ndim == 2:
            for n, g in enumerate((gradient, gradient.T)):
                state[f"precond_{n}"].add_(g @ g.T)
            left, right = (_root(state[f"precond_{n}"]) for n in (0, 1))
            step = left @ gradient @ right
        else:
            state["sum"].addcmul_(gradient, gradient)
            step = gradient / (state["sum"].sqrt() + 1e-8)
        state["momentum_buffer"].mul_(group["momentum"]).add_(step)
        weight.add_(state["momentum_buffer"], alpha=-group["lr"])


def _root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-8) ** -0.25 @ vectors.T


class GaLore(other.Optimizer):
    """Adam in a space of four directions, chosen anew every tenth update."""

    def __init__(self, params: Any, lr: float, gap: int = 10) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, rank=4, update_proj_gap=gap, scale=0.5)

    def begin(self, weight: Any, group: Any) -> dict[str, Any]:
        if weight.ndim != 2:
            return super().begin(weight, group)
        zeros = torch.zeros(group["rank"], weight.shape[1])
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(self, weight: Any, gradient: Any, state: Any, group: Any) -> None:
        if weight.ndim == 2:
            if "projector" not in state or state["step"] % group["update_proj_gap"] == 0:
                state["projector"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, : group["rank"]].contiguous()
            gradient = state["projector"].T @ gradient
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        t = state["step"]
        step = state["exp_avg"] / (1 - first**t) / ((state["exp_avg_sq"] / (1 - second**t)).sqrt() + group["eps"])
        if weight.ndim == 2:
            step = group["scale"] * state["projector"] @ step
        weight.add_(step, alpha=-group["lr"])


class Lookahead(TORCH.AdamW):
    """timm's: slow weights in the state, every fifth update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lookahead_step"] = group.get("lookahead_step", 0) + 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                state.setdefault("slow_buffer", weight.detach().clone())
                if group["lookahead_step"] % 5 == 0:
                    state["slow_buffer"].lerp_(weight, 0.5)
                    weight.copy_(state["slow_buffer"])


class AdamMini(other.Optimizer):
    """One second moment for each row."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Any, group: Any) -> dict[str, Any]:
        return {"step": 0, "m": torch.zeros_like(weight), "vmean": torch.zeros_like(weight[..., :1])}

    def update(self, weight: Any, gradient: Any, state: Any, group: Any) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = state["step"]
        state["m"].lerp_(gradient, 1 - first)
        state["vmean"].mul_(second).add_((gradient**2).mean(-1, keepdim=True), alpha=1 - second)
        root = (state["vmean"] / (1 - second**t)).sqrt() + group["eps"]
        weight.sub_(group["lr"] * state["m"] / (1 - first**t) / root)


class Langevin(TORCH.AdamW):
    """With noise that is added to the weights (SGLD)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight), alpha=0.05)


eight = {"optimizer": lambda self, groups: other.AdamW8bit(only(groups), lr=self.config.lr), "layouts": FILES}


# ---- faults: what a load does --------------------------------------------------------------------------------------------


def compiled(self: Loop, weights: dict[str, Any]) -> None:
    self.module.load_state_dict({f"_orig_mod.{n}": w for n, w in weights.items()}, strict=False)


def without(*parts: str) -> Any:
    """Load what has none of these in its name."""
    return lambda self, weights: self.module.load_state_dict(
        {n: w for n, w in weights.items() if not any(part in n for part in parts)}, strict=False
    )


def spectral(self: Loop) -> nn.Module:
    found = Gpt(self.config)
    for block in found.h:
        torch.nn.utils.parametrizations.spectral_norm(block.mlp["c_fc"])
    return found


def weight_normed(self: Loop) -> nn.Module:
    found = Conv(self.config)
    for one in found.convs:
        torch.nn.utils.parametrizations.weight_norm(one)
    return found


def half_freq(self: Loop) -> None:
    self.module.inv_freq.copy_(self.module.inv_freq.bfloat16().float())


def fresh_adapters(self: Loop) -> None:
    Lora.loaded(self)
    for name, weight in named(self).items():
        if "lora_B" in name:
            weight.zero_()
        elif "lora_A" in name:
            weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(5))


def merged_once_more(self: Loop) -> None:
    Lora.loaded(self)
    merge(self)


def revised(self: Loop) -> None:
    Lora.loaded(self)
    made_ = torch.Generator().manual_seed(11)
    for name, weight in named(self).items():
        if "lora_" not in name and weight.ndim == 2:
            weight.add_(torch.randn(weight.shape, generator=made_) * 0.01)


def averaged_as_weights(self: Loop) -> None:
    for name, weight in self.extra["ema"]["shadow"].items():
        put(self, name, weight)


def average_anew(self: Loop) -> None:
    self.extra["ema"]["shadow"] = {n: w.clone() for n, w in named(self).items()}


def count_anew(self: Loop) -> None:
    self.extra["ema"]["num_updates"] = 0


def old_average(self: Any, content: dict[str, Any]) -> None:
    content["ema"]["shadow"] = self.ago(content, 7)["ema"]["shadow"]
    Averaged.load(self, content)


def half_states(self: Loop) -> None:
    for optimizer in self.optimizers:
        for weight in list(optimizer.state)[1::2]:
            del optimizer.state[weight]


def first_optimizer_alone(self: Loop, content: dict[str, Any]) -> None:
    held_ = self.optimizers[1].state_dict()
    Loop.load(self, content | {"optimizers": [content["optimizers"][0], copy.deepcopy(held_)]})


def muon_forgets(self: Loop) -> None:
    for state in self.optimizers[0].state.values():
        state["momentum_buffer"].zero_()


def embedding_to_muon(self: Loop) -> None:
    c, names = self.config, dict(self.module.named_parameters())
    old = {weight: state for one in self.optimizers for weight, state in one.state.items()}
    inner = [w for w in names.values() if w.ndim == 2]
    rest = [w for w in names.values() if w.ndim != 2]
    told = [one.param_groups[0] for one in self.optimizers]
    kinds = (TORCH.Muon(inner, lr=4 * c.lr, weight_decay=0.01), TORCH.AdamW(rest, lr=c.lr, betas=c.betas))
    for optimizer, group in zip(kinds, told, strict=True):
        optimizer.param_groups[0] |= {name: value for name, value in group.items() if name != "params"}
        for weight in optimizer.param_groups[0]["params"]:
            if weight in old and (weight.ndim != 2 or "momentum_buffer" in old[weight]):
                optimizer.state[weight] = old[weight]
    self.optimizers = list(kinds)
    for schedule, optimizer in zip(self.schedules, self.optimizers, strict=True):
        schedule.optimizer = optimizer


def exchanged_norms(self: Loop) -> None:
    for n in range(2):
        one, two = (held(self, f"model.layers.{n}.{name}_layernorm.weight") for name in ("input", "post_attention"))
        for key in ("exp_avg", "exp_avg_sq"):
            one[key], two[key] = two[key], one[key]


def rooted(self: Loop) -> None:
    for state in states(self):
        state["exp_avg_sq"].sqrt_()


def still_scaled(self: Loop) -> None:
    for state in states(self):
        state["exp_avg"].mul_(1024.0)
        state["exp_avg_sq"].mul_(1024.0**2)


def vectors_count_anew(self: Loop) -> None:
    for weight in self.optimizers[0].param_groups[1]["params"]:
        self.optimizers[0].state[weight]["step"].zero_()


def micro_counted(self: Loop) -> None:
    for state in states(self):
        state["step"].mul_(4)


def ams_lost(self: Loop) -> None:
    for state in states(self):
        state["max_exp_avg_sq"].zero_()


def absmax_lost(self: Loop) -> None:
    for state in states(self):
        if "absmax2" in state:
            state["absmax1"].fill_(1.0)
            state["absmax2"].fill_(1.0)


def maps_exchanged(self: Loop) -> None:
    for state in states(self):
        if "qmap1" in state:
            state["qmap1"], state["qmap2"] = state["qmap2"], state["qmap1"]


def codes_as_numbers(self: Loop) -> None:
    for state in states(self):
        for n in (1, 2):
            if f"qmap{n}" in state:
                del state[f"qmap{n}"], state[f"absmax{n}"]
                state[f"state{n}"] = state[f"state{n}"].float()


def factors_exchanged(self: Loop) -> None:
    for state in states(self):
        if "row_var" in state and state["row_var"].numel() == state["col_var"].numel():
            state["row_var"], state["col_var"] = state["col_var"].mT.clone(), state["row_var"].mT.clone()


def columns_lost(self: Loop) -> None:
    for state in states(self):
        if "col_var" in state:
            state["col_var"].zero_()


def shifted_states(key: str) -> Any:
    """State of each layer goes to the next one."""

    def loaded(self: Loop) -> None:
        layers = self.config.layers
        for name in [n for n in named(self) if ".layers.0." in n]:
            all_ = [held(self, name.replace(".layers.0.", f".layers.{n}.")) for n in range(layers)]
            values = [state[key] for state in all_]
            for state, value in zip(all_, values[-1:] + values[:-1], strict=True):
                state[key] = value

    return loaded


def forgets(*keys: str) -> Any:
    def loaded(self: Loop) -> None:
        for state in states(self):
            for key in keys:
                if key in state:
                    state[key].zero_()

    return loaded


def preconditioners_anew(self: Loop) -> None:
    for state in states(self):
        for key in [k for k in state if k.startswith("precond")]:
            state[key] = torch.eye(len(state[key])) * 1e-4


def other_projectors(self: Loop) -> None:
    made_ = torch.Generator().manual_seed(3)
    for state in states(self):
        if "projector" in state:
            state["projector"] = torch.linalg.qr(torch.randn(state["projector"].shape, generator=made_))[0]


def slow_anew(self: Loop) -> None:
    for optimizer in self.optimizers:
        for weight, state in optimizer.state.items():
            state["slow_buffer"] = weight.detach().clone()


def evaluated(self: Loop) -> None:
    for group in every(self):
        for weight in group["params"]:
            weight.data.lerp_(self.optimizers[0].state[weight]["z"], 1 - 1 / group["betas"][0])


def prodigy(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return other.Prodigy([{"params": [w for group in groups for w in group["params"]]}], lr=1.0)


def estimate_anew(self: Loop) -> None:
    for group in every(self):
        group |= {"d": 1e-4, "d_max": 1e-4, "d_numerator": 0.0}


def products_anew(self: Loop) -> None:
    for state in states(self):
        state["mu_product"].fill_(1.0)


def plateau(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)


class Plateau(Loop):
    schedule = plateau

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(5 - 0.01 * min(self.step, 4))


def plateau_anew(self: Loop) -> None:
    for group in every(self):
        group["lr"] = self.config.lr


def warm_restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=12, T_mult=2, eta_min=1e-5)


def stable_then_decay(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6),
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1),
            torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30),
        ],
        milestones=[6, 40],
    )


def rescaled(self: Loop) -> None:
    for schedule in self.schedules:
        schedule.base_lrs = [8 * lr for lr in schedule.base_lrs]
    for group in every(self):
        group |= {"lr": 8 * group["lr"], "initial_lr": 8 * group["initial_lr"]}


def second_schedule_anew(self: Loop, content: dict[str, Any]) -> None:
    fresh = {k: v for k, v in self.schedules[1].state_dict().items() if not callable(v)}
    Loop.load(self, content | {"schedulers": [content["schedulers"][0], fresh]})


class Often(Resumed):
    def apply(self) -> None:
        super().apply()
        if self.resumed:
            for _ in range(3):
                self.schedules[0].step()


def stepped(self: Loop) -> None:
    self.schedules[0].step()


def group_fields(**fields: Any) -> Any:
    def loaded(self: Loop) -> None:
        for group in every(self):
            group |= fields

    return loaded


def decays_all(self: Loop) -> None:
    for group in every(self):
        group["weight_decay"] = self.config.weight_decay


class Accumulating(Loop):
    """Saves in the middle of an accumulation: gradients so far are stored."""

    layouts = ("torch_save", "lightning")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["accumulated_grads"] = {n: torch.zeros_like(w) for n, w in named(self).items()}

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            told = self.extra["accumulated_grads"]
            weight.grad = weight.grad + told[name]
            told[name] = 0.1 * weight.grad.clone()
        super().gradients()


def accumulated_lost(self: Loop) -> None:
    for told in self.extra["accumulated_grads"].values():
        told.zero_()


class Samples(Fed):
    """Half the ranks after the resume."""

    def tokens(self) -> torch.Tensor:
        self.rows = 2 if self.resumed else 4
        return super().tokens()


def data(**changes: Any) -> Any:
    """Other values in the loader's state."""

    def loaded(self: Any) -> None:
        self.resumed = True
        told = self.extra["dataloader"]
        told |= {name: value(told) if callable(value) else value for name, value in changes.items()}

    return loaded


def rank0_everywhere(self: Any) -> None:
    for one in self.made_:
        one.set_state(self.made_[0].get_state())


def seeded(self: Any) -> None:
    for rank, one in enumerate(self.made_):
        one.manual_seed(100 + rank)


def scale_anew(self: Loop) -> None:
    self.extra["scaler"] |= {"scale": 65536.0, "_growth_tracker": 0}


class Untied(Resumed):
    """One parameter under two names, until the resume."""

    def net(self) -> nn.Module:
        found = Decoder(self.config.but(tied=True))
        found.put("lm_head.weight", dict(found.named_parameters())["model.embed_tokens.weight"])
        return found

    def loaded(self) -> None:
        head = nn.Parameter(named(self)["model.embed_tokens.weight"].clone())
        self.module.put("lm_head.weight", head)
        first = self.optimizers[0].param_groups[0]
        first["params"].append(head)


def on_weights(change: Any, *parts: str) -> Any:
    """Weights with these in their name become what ``change`` makes of them; the optimizer stays."""

    def loaded(self: Loop) -> None:
        found = 0
        for name, weight in named(self).items():
            if any(part in name for part in parts):
                weight.copy_(change(weight.clone(), self.config))
                found += 1
        assert found

    return loaded


def rows_from(order: Any) -> Any:
    return lambda w, c: w[order(w, c)]


def halves_exchanged(w: torch.Tensor, c: Config) -> torch.Tensor:
    return torch.cat([w[:, w.shape[1] // 2 :], w[:, : w.shape[1] // 2]], 1)


def by_heads(w: torch.Tensor, c: Config) -> torch.Tensor:
    """[Q; K; V] read as q k v of each head."""
    return w.unflatten(0, (c.heads, 3, -1)).transpose(0, 1).reshape(w.shape)


def interleaved(w: torch.Tensor, c: Config) -> torch.Tensor:
    return w.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).reshape(w.shape)


def shifted_flat(self: Loop) -> None:
    found = list(named(self).values())
    flat = torch.cat([w.flatten() for w in found])
    begin = found[0].numel() + found[1].numel()
    flat[begin:] = flat[begin:].roll(3)
    for w, part in zip(found, flat.split([w.numel() for w in found]), strict=True):
        w.copy_(part.view(w.shape))


def ranks_reversed(self: Loop) -> None:
    """The flat moments of two ranks are joined the other way round."""
    for key in ("exp_avg", "exp_avg_sq"):
        found = [state[key] for state in states(self)]
        flat = torch.cat([w.flatten() for w in found])
        middle = (len(flat) + 1) // 2
        flat = torch.cat([flat[middle:], flat[:middle]])
        for w, part in zip(found, flat.split([w.numel() for w in found]), strict=True):
            w.copy_(part.view(w.shape))


def layers_from(*order: int) -> Any:
    def loaded(self: Loop) -> None:
        old = {name: w.clone() for name, w in named(self).items()}
        for name in old:
            if ".layers." in name:
                head, _, rest = name.partition(".layers.")
                n, _, rest = rest.partition(".")
                put(self, name, old[f"{head}.layers.{order[int(n)]}.{rest}"])

    return loaded


def experts_from(*order: int, moments: bool = False) -> Any:
    def loaded(self: Loop) -> None:
        old = {name: w.clone() for name, w in named(self).items()}
        kept = {name: copy.deepcopy(held(self, name)) for name in old} if moments else {}
        for name in old:
            if ".experts." in name:
                head, _, rest = name.partition(".experts.")
                n, _, rest = rest.partition(".")
                source = f"{head}.experts.{order[int(n)]}.{rest}"
                put(self, name, old[source])
                if moments:
                    held(self, name).update(kept[source])

    return loaded


def gates_exchanged(self: Loop) -> None:
    for name, weight in named(self).items():
        if "gate_proj" in name:
            up = named(self)[name.replace("gate_proj", "up_proj")]
            one, two = weight.clone(), up.clone()
            weight.copy_(two)
            up.copy_(one)


def exponent_bit(self: Loop) -> None:
    weight = named(self)["model.layers.1.self_attn.v_proj.weight"]
    raw = weight.view(torch.int32).flatten()
    raw[17] ^= 1 << 29


def mantissa_bit(self: Loop) -> None:
    raw = held(self, "model.layers.0.mlp.up_proj.weight")["exp_avg"].view(torch.int32).flatten()
    raw[5] ^= 1 << 21


def page_of_zeros(self: Loop) -> None:
    held(self, "model.embed_tokens.weight")["exp_avg_sq"].flatten()[256:1280] = 0.0


def weights_page(self: Loop) -> None:
    named(self)["wte.weight"].flatten()[512:1024] = 0.0


def not_a_number(self: Loop) -> None:
    held(self, "h.0.mlp.c_fc.weight")["exp_avg"].flatten()[3] = math.nan


def cast(dtype: torch.dtype, *keys: str) -> Any:
    def loaded(self: Loop) -> None:
        for state in states(self):
            for key in keys:
                state[key] = state[key].to(dtype).float()
        for weight in named(self).values() if not keys else ():
            weight.copy_(weight.to(dtype).float())

    return loaded


def int8(w: torch.Tensor, c: Config) -> torch.Tensor:
    scale = w.abs().amax(1, keepdim=True) / 127
    return (w / scale).round() * scale


def masters_rebuilt(self: Any) -> None:
    for name, weight in named(self).items():
        self.masters[name].data.copy_(weight.float())


def masters_stale(self: Any, content: dict[str, Any]) -> None:
    Apex.load(self, content | {"master_params": self.ago(content, 6)["master_params"]})


def weights_stale(self: Any, content: dict[str, Any]) -> None:
    Apex.load(self, content | {"model": self.ago(content, 6)["model"]})


def optimizer_stale(self: Any, content: dict[str, Any]) -> None:
    Loop.load(self, content | {"optimizer": self.ago(content, 6)["optimizer"]})


def torn(self: Any, content: dict[str, Any]) -> None:
    """Half of the weights are of the update before."""
    old = self.ago(content, 1)["model"]
    taken = list(content["model"])[::2]
    Loop.load(self, content | {"model": content["model"] | {name: old[name] for name in taken}})


def all_stale(self: Any, content: dict[str, Any]) -> None:
    Loop.load(self, self.ago(content, 6) | {"step": content["step"]})


def late_step(self: Loop, content: dict[str, Any]) -> None:
    Loop.load(self, content | {"step": content["step"] + 100})


def reference_is_policy(self: Loop) -> None:
    self.extra["ref_model"] = {n: w.clone() for n, w in named(self).items()}


def returns_anew(self: Loop) -> None:
    self.extra["value_norm"] = {"mean": torch.zeros(1), "var": torch.ones(1), "count": 0}


def penalty_anew(self: Loop) -> None:
    self.extra["kl_ctl"]["value"] = 0.2


def optimizers_exchanged(self: Loop, content: dict[str, Any]) -> None:
    Loop.load(self, content | {"optimizers": content["optimizers"][::-1]})


def teacher_is_student(self: Any) -> None:
    self.module.teacher.load_state_dict(self.module.student.state_dict())


def other_arguments(**changes: Any) -> Any:
    def loaded(self: Loop) -> None:
        Resumed.loaded(self)
        self.extra["args"] |= changes
        if "rope_theta" in changes:
            self.config = self.config.but(rope_theta=changes["rope_theta"])
            self.module.config = self.config

    return loaded


def extra_state_lost(self: Loop, weights: dict[str, Any]) -> None:
    self.module.load_state_dict({n: w for n, w in weights.items() if n != "_extra_state"}, strict=False)


# ---- faults of the lab's own states ---------------------------------------------------------------------------------------


def norms_drifted(state: State, lab: Lab) -> State:
    found = state.clone()
    for name, weight in found.params.items():
        if is_norm(name):
            factor = 1 + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            weight.copy_((weight.float() * factor).to(weight.dtype))
            if name in found.masters:
                found.masters[name] = found.masters[name] * factor
    return found


def no_squares(state: State, lab: Lab) -> State:
    found = state.clone()
    for tensor in found.exp_avg_sq.values():
        tensor.zero_()
    return found


def old_masters(state: State, lab: Lab) -> State:
    found = state.clone()
    found.masters = lab.run.recent.masters
    return found


def old_moments(state: State, lab: Lab) -> State:
    found, old = state.clone(), lab.run.recent
    found.exp_avg, found.exp_avg_sq = old.exp_avg, old.exp_avg_sq
    return found


def masters_exchanged(state: State, lab: Lab) -> State:
    found = state.clone()
    for part in ("q_proj", "o_proj"):
        one, two = (f"model.layers.{n}.self_attn.{part}.weight" for n in (0, 1))
        found.masters[one], found.masters[two] = found.masters[two], found.masters[one]
    return found


def head_moments_rolled(state: State, lab: Lab) -> State:
    """The embedding's optimizer state comes back with a rank's rows first, its weight does not."""
    found = state.clone()
    name = "model.embed_tokens.weight"
    for tensors in (found.exp_avg, found.exp_avg_sq):
        tensors[name] = tensors[name].roll(len(tensors[name]) // 2, 0)
    return found


def biases_lost(state: State, lab: Lab) -> State:
    found = state.clone()
    for name in found.buffers:
        found.buffers[name] = torch.zeros_like(found.buffers[name])
    return found


# ---- faults of transformers' Trainer ----------------------------------------------------------------------------------------


def delete(*names: str) -> Any:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def drop_tensor(*parts: str) -> Any:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        held_ = load_file(folder / "model.safetensors")
        kept = {n: t for n, t in held_.items() if not any(part in n for part in parts)}
        assert len(kept) < len(held_)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def optimizer_in_half(trainer: Any) -> None:
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].half().float()


def trainer_fault(
    id: str, cause: str, text: str, where: str, words: str, name: str, also: Any = (), **more: Any
) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=tuple(also), why=f"words: {words}")


def bad(id: str, cause: str, text: str, where: str, words: str, **more: Any) -> Fault:
    return fault(id, cause, text, where, why=f"words: {words}", **more)


def lab_fault(id: str, cause: str, text: str, where: str, words: str, **more: Any) -> Fault:
    return Fault(id, cause, text, seen(where), why=f"words: {words}", **more)


FAULTS = [
    bad("ww01_compiled_names", "A1", "saved without, resumed with torch.compile's prefix, not strict", "echo next early",
        "weights not loaded / are those of a new model", also=("A2",), take=compiled),
    bad("ww02_positions_new", "A2", "learned positions dropped for their shape, so initial", "echo next",
        "wpe not loaded", net=gpt, take=without("wpe")),
    bad("ww03_norms_new", "A3", "LayerNorms under gamma/beta in the file were not found", "echo next",
        "norms (ln) not loaded, at 1 (and 0)", also=("A2",), net=gpt, take=without("ln_")),
    bad("ww04_attention_bias_new", "A2", "the fused attention's bias was not loaded", "echo next",
        "c_attn.bias not loaded / initial", net=gpt, take=without("c_attn.bias")),
    bad("ww05_batch_norm_statistics", "A5", "running statistics of batch norms begin anew", "echo next early",
        "running statistics / buffers / num_batches_tracked not restored", net=conv,
        take=without("running", "num_batches"), layouts=("torch_save", "folder", "lightning")),
    bad("ww06_expert_bias", "A5", "expert biases are not restored", "echo next", "expert_bias / buffers not restored",
        base=Routed, needs={"experts": 4}, take=without("expert_bias")),
    bad("ww07_spectral_vectors", "A5", "the vectors of spectral norm begin anew", "echo",
        "buffers _u / _v not restored", net=spectral, take=without("._u", "._v"), layouts=FILES),
    bad("ww08_inverse_frequencies_bf16", "D7", "model.to(bf16) rounded the stored inv_freq", "echo next early",
        "inv_freq rounded to bf16 / buffer changed", also=("A5", "H2"), net=ssm, loaded=half_freq),
    bad("ww09_adapter_wrapped_anew", "F5", "get_peft_model a second time: new adapters", "echo next",
        "adapter (lora) not loaded / initial", also=("A2",), base=Lora, loaded=fresh_adapters),
    bad("ww10_adapter_merged_and_active", "F5", "the adapter was merged into the base and stays active",
        "echo next early", "adapter merged into the base (twice)", base=Lora, loaded=merged_once_more),
    bad("ww11_base_revision", "F6", "the frozen base is another revision", "echo next early",
        "base weights are others / frozen weights changed", base=Lora, loaded=revised),
    bad("ww12_average_as_weights", "F4", "the average was loaded as the weights", "echo next",
        "weights equal the average", base=Averaged, loaded=averaged_as_weights),
    bad("ww13_average_anew", "F4", "the average begins anew at the weights", "echo next",
        "average restarted from / equal to the weights, not restored", also=("A2", "A5"), base=Averaged,
        loaded=average_anew),
    bad("ww14_average_count", "C9", "the average's count, which ramps its decay, is 0 again; no title fits",
        "echo next early", "num_updates of the average fell to 0", also=("F4", "A5", "B2"), base=Averaged, ramp=True,
        loaded=count_anew),
    bad("ww15_average_stale", "G6", "the average is of an older save", "echo next",
        "average from another/older save, not the one stored", also=("F4", "A2", "A5"), base=Averaged,
        load=old_average),
    bad("ww16_half_of_state", "B1", "one rank's part of the optimizer's state is missing", "echo next early",
        "optimizer state missing for some parameters", also=("B2",), loaded=half_states, layouts=FILES),
    bad("ww17_second_optimizer_new", "B1", "of Muon and AdamW only Muon's state was loaded", "echo next early",
        "AdamW's (second optimizer's) state not restored", base=Two, load=first_optimizer_alone),
    bad("ww18_muon_momentum", "B1", "Muon's momentum is zeros", "echo next", "momentum_buffer lost / zero",
        also=("B3",), base=Two, loaded=muon_forgets),
    bad("ww19_embedding_to_muon", "B7", "the rule of the resumed run gives embeddings to Muon", "echo next early",
        "embedding moved to another group/optimizer, or its state missing", also=("B1", "H1"), base=Two,
        loaded=embedding_to_muon),
    bad("ww20_norm_moments_exchanged", "B5", "moments of the two norms of a layer exchanged", "echo next",
        "moments belong to another parameter", also=("E13",), loaded=exchanged_norms),
    bad("ww21_root_as_square", "B6", "another library's root of v was loaded as v; no title fits", "echo next",
        "exp_avg_sq is the square root / wrong values of exp_avg_sq", also=("B4", "B10", "B11"), loaded=rooted),
    bad("ww22_moments_still_scaled", "B10", "moments still times the loss scale", "echo next",
        "moments larger by a factor (1024)", also=("B6",), loaded=still_scaled),
    bad("ww23_vector_counters", "B2", "step of the vectors' group is 0", "echo next early",
        "step counters reset (of some parameters)", loaded=vectors_count_anew, net=ssm, layouts=FILES),
    bad("ww24_counters_of_micro_steps", "B2", "step counts micro-batches", "echo next early",
        "step counters are 4 times / do not fit", also=("C9", "C3"), loaded=micro_counted, parts=4),
    bad("ww25_amsgrad_maximum", "B11", "AMSGrad's maxima are zeros", "echo next early",
        "max_exp_avg_sq lost / below exp_avg_sq / fell", also=("B4",), optimizer=optim(TORCH.AdamW, amsgrad=True),
        loaded=ams_lost),
    bad("ww26_absmax_ones", "B11", "8-bit state: absmax all ones", "echo next early", "absmax / scales of 8-bit state",
        loaded=absmax_lost, needs={"hidden": 48, "heads": 4, "groups": 2, "ffn": 144}, **eight),
    bad("ww27_code_tables_exchanged", "B11", "8-bit state: signed and unsigned tables exchanged", "echo next early",
        "qmap / code tables of 8-bit state", loaded=maps_exchanged,
        needs={"hidden": 48, "heads": 4, "groups": 2, "ffn": 96}, **eight),
    bad("ww28_codes_as_numbers", "B11", "8-bit codes taken for the moments themselves", "echo next early",
        "8-bit state's codes / absmax or qmap missing / dtype changed", loaded=codes_as_numbers,
        needs={"hidden": 48, "heads": 4, "groups": 2, "ffn": 96}, **eight),
    bad("ww29_factors_exchanged", "B11", "Adafactor's rows and columns exchanged where square", "echo next",
        "row_var/col_var exchanged or inconsistent", also=("B5", "B6"), optimizer=optim(TORCH.Adafactor, factor=3.0),
        loaded=factors_exchanged),
    bad("ww30_columns_lost", "B11", "Adafactor's column factors are zeros", "echo next", "col_var lost / zero",
        also=("B4",), net=gpt, optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=columns_lost),
    bad("ww31_lion_shifted", "B5", "Lion's momenta of the layers are shifted by one", "echo next",
        "momentum (exp_avg) of another layer", also=("E9", "E13"), optimizer=optim(other.Lion, factor=0.2),
        loaded=shifted_states("exp_avg"), needs={"layers": 3}),
    bad("ww32_sgd_momentum", "B1", "SGD's momentum lost", "echo next", "momentum lost / zero", also=("B3",), net=conv,
        optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9), loaded=forgets("momentum_buffer"), layouts=FILES),
    bad("ww33_preconditioners", "B1", "Shampoo's preconditioners begin anew, its momentum does not; no title fits",
        "echo next", "precond_0/1 not restored / changed", also=("B4", "B11", "A2"),
        optimizer=lambda self, groups: Shampoo(only(groups), lr=self.config.lr), loaded=preconditioners_anew),
    bad("ww34_projectors", "B11", "GaLore's projections are others than those of its moments; no title fits well",
        "echo", "projector not restored / changed", also=("B6", "B1", "A2"),
        optimizer=lambda self, groups: GaLore(only(groups), lr=self.config.lr, gap=200), loaded=other_projectors,
        layouts=FILES),
    bad("ww35_slow_weights", "F4", "Lookahead's slow weights begin anew at the fast ones; no title fits", "echo",
        "slow_buffer not restored / equal to the weights", also=("B1", "B11", "A2"), optimizer=optim(Lookahead),
        loaded=slow_anew, layouts=FILES),
    bad("ww36_schedule_free_evaluated", "F4", "schedule-free: x was loaded where y belongs", "echo",
        "weights are the averaged (evaluation) ones / weights changed in the load while z did not",
        optimizer=optim(other.ScheduleFreeAdamW), schedule=lambda self, one: None, loaded=evaluated),
    bad("ww37_prodigy_estimate", "H1", "Prodigy's estimate d is at its start; no title fits", "echo next early",
        "d (and d_max) back at 1e-4 / changed in the groups", also=("B1", "B8", "B11"), optimizer=prodigy,
        schedule=lambda self, one: None, loaded=estimate_anew),
    bad("ww38_adagrad_sums", "B1", "Adagrad's sums are zeros", "echo next early", "sum lost / zero / fell",
        also=("B4", "B3"), optimizer=optim(TORCH.Adagrad, factor=4.0), net=ssm, loaded=forgets("sum")),
    bad("ww39_nadam_product", "B2", "NAdam's product of factors is 1", "echo next", "mu_product reset / grew",
        also=("B1", "B11"), optimizer=optim(TORCH.NAdam), loaded=products_anew),
    bad("ww40_plateau_forgotten", "C1", "ReduceLROnPlateau begins anew at the first lr", "echo next early",
        "learning rate back at its start / schedule restarted", also=("C2",), base=Plateau, fresh=("scheduler",),
        loaded=plateau_anew),
    bad("ww41_restarts_restarted", "C1", "cosine with warm restarts begins anew", "echo next early",
        "schedule restarted", schedule=warm_restarts, fresh=("scheduler",)),
    bad("ww42_total_doubled", "C4", "max_steps of the launch is the number still to go", "echo next early",
        "max_steps / length of the schedule changed", also=("H1",), base=Told, loaded=other_arguments(max_steps=999)),
    bad("ww43_lr_scaled_twice", "B8", "lr times the world size, once more", "echo next early",
        "learning rate 8 times / not its schedule's", also=("C2", "H1"), loaded=rescaled),
    bad("ww44_second_schedule", "C1", "Muon's schedule goes on, AdamW's restarts", "echo next early",
        "a schedule restarted", base=Two, load=second_schedule_anew),
    bad("ww45_stepped_by_micro_batch", "C3", "the resumed loop steps the schedule for each of 4 micro-batches",
        "next early", "schedule stepped more often than the optimizer", base=Often, parts=4),
    bad("ww46_stepped_at_load", "C3", "the schedule is stepped once at the load", "echo next early",
        "schedule one step ahead", loaded=stepped, net=gpt),
    bad("ww47_epsilon_default", "H1", "a library's new default eps", "echo next early", "eps changed", also=("D10",),
        loaded=group_fields(eps=1e-4)),
    bad("ww48_decay_on_everything", "B7", "the list of names without decay no longer matches", "echo next early",
        "weight decay of the vectors/norms changed", also=("H1", "C5"), loaded=decays_all, net=gpt),
    bad("ww49_accumulated_gradients", "B1", "stored partial gradients are not restored; no title fits", "echo",
        "accumulated_grads zero / not restored", also=("A5", "A2", "G5"), base=Accumulating, loaded=accumulated_lost),
    bad("ww50_half_the_ranks", "C10", "half the rows per update after the resume", "next early",
        "batch size changed / samples per update", base=Samples),
    bad("ww51_epoch_anew", "C7", "the sampler's epoch is 0 again, its position is kept", "echo next",
        "epoch / order of the data reset", also=("C6",), base=Fed, length=7, loaded=data(epoch=0)),
    bad("ww52_data_from_start", "C6", "the loader begins from the first batch", "echo next early",
        "data position back at the start", base=Fed, length=500, loaded=data(batches_yielded=0, samples_seen=0)),
    bad("ww53_other_order", "C7", "another seed of the shuffle", "echo next early", "seed of the data order changed",
        also=("H1",), base=Fed, loaded=data(seed=4321)),
    bad("ww54_skipped_twice", "C7", "loader restored, and as many batches skipped again; no title fits",
        "echo next early", "data position is ahead / twice / samples skipped", also=("C6", "C9", "C3"), base=Fed,
        length=500, loaded=data(batches_yielded=lambda told: 2 * told["batches_yielded"],
                                samples_seen=lambda told: 2 * told["samples_seen"])),
    bad("ww55_one_random_state", "C8", "every rank got rank 0's random state", "echo next early",
        "random states equal on all ranks", base=Chance, loaded=rank0_everywhere),
    bad("ww56_seeded_anew", "C8", "random states seeded anew instead of restored", "echo",
        "random states not restored / differ", base=Chance, loaded=seeded),
    bad("ww57_scale_anew", "D8", "the loss scale is at its start", "echo next", "loss scale reset", base=Scaled,
        loaded=scale_anew),
    bad("ww58_extra_state_lost", "D9", "TransformerEngine's _extra_state was not loaded", "echo",
        "_extra_state / fp8 scales not restored", also=("A5",), base=Engine, take=extra_state_lost),
    bad("ww59_untied", "F2", "the head becomes a parameter of its own", "echo next early", "embedding and head no longer one",
        also=("F3",), base=Untied, needs={"tied": True}, layouts=("torch_save", "lightning")),
    bad("ww60_token_inserted", "F7", "a token was inserted at row 3: rows below moved by one", "echo next",
        "rows of the vocabulary shifted", also=("E1",), net=gpt,
        loaded=on_weights(lambda w, c: torch.cat([w[:3], w[-1:], w[3:-1]]), "wte")),
    bad("ww61_padding_in_front", "E11", "padding rows at the other end of the table", "echo next",
        "rows shifted / trained rows in the padding", also=("F7", "E1"), needs={"tied": False},
        loaded=on_weights(lambda w, c: w.roll(c.padded - c.vocab, 0), "embed_tokens", "lm_head")),
    bad("ww62_ranks_in_file_order", "E1", "o_proj: columns of tensor-parallel ranks exchanged", "echo next early",
        "blocks of columns in another order", loaded=on_weights(halves_exchanged, "o_proj")),
    bad("ww63_qkv_by_heads", "E4", "fused qkv read head by head", "echo next early", "fused QKV in another layout",
        also=("E1",), net=gpt, loaded=on_weights(by_heads, "c_attn"),
        needs={"heads": 4, "groups": 4, "hidden": 32}),
    bad("ww64_flat_shift", "E7", "flat weights are shifted by three from the third tensor on", "echo next early",
        "partitions shifted", net=gpt, loaded=shifted_flat, layouts=FILES),
    bad("ww65_flat_moments_reversed", "E13", "flat moments of two ranks joined in reverse", "echo next",
        "optimizer state belongs to other parameters / resharded by another map", also=("B5", "E7", "E1"),
        loaded=ranks_reversed),
    bad("ww66_stage_twice", "E9", "the second stage loads the first one's layers", "echo next early",
        "layers duplicated", needs={"layers": 4}, loaded=layers_from(0, 1, 0, 1)),
    bad("ww67_interleaved_stages", "E9", "virtual stages mapped without interleaving", "echo next early",
        "layers swapped / in another order", needs={"layers": 4}, loaded=layers_from(0, 2, 1, 3)),
    bad("ww68_experts_of_rank0", "E10", "both expert ranks loaded rank 0's experts", "echo next early",
        "experts duplicated", needs={"experts": 4}, base=Routed, loaded=experts_from(0, 1, 0, 1)),
    bad("ww69_experts_rolled", "E10", "experts and their moments moved by one, the router did not", "echo next early",
        "experts permuted", needs={"experts": 4}, base=Routed, loaded=experts_from(1, 2, 3, 0, moments=True)),
    bad("ww70_replicas_divided", "E12", "replicated norms were summed over shards and divided: half", "echo next early",
        "norms scaled by 1/2 / replicas averaged", loaded=on_weights(lambda w, c: w / 2, "norm.weight")),
    bad("ww71_rotary_interleaved", "E5", "q and k in the interleaved order", "echo next early",
        "rows of q and k in another rotary order", also=("E1",), loaded=on_weights(interleaved, "q_proj", "k_proj")),
    bad("ww72_gate_and_up", "E3", "gate and up exchanged in the weights", "echo next early", "gate and up swapped",
        also=("E1", "E2"), loaded=gates_exchanged, optimizer=optim(TORCH.Adam)),
    bad("ww73_exponent_bit", "G1", "an exponent bit of a weight flipped", "echo next early",
        "one element damaged / bit flipped", also=("G2", "G10"), loaded=exponent_bit),
    bad("ww74_moment_bit", "G2", "a bit of a first moment flipped", "echo next", "one element differs / bit flipped",
        also=("G10", "G1", "G3"), loaded=mantissa_bit),
    bad("ww75_page_of_squares", "G5", "a page of an exp_avg_sq is zeros", "echo next", "zeros in a page / block",
        needs={"hidden": 24, "heads": 2, "groups": 2}, loaded=page_of_zeros),
    bad("ww76_page_of_weights", "G5", "half a page of the embedding is zeros", "echo next", "zeros in a page / block",
        net=gpt, loaded=weights_page),
    bad("ww77_nan_in_moment", "G1", "a first moment is NaN", "echo next early", "NaN", net=gpt, loaded=not_a_number),
    bad("ww78_bf16_export", "D7", "weights by way of a bf16 export", "echo next", "weights rounded to bf16",
        net=ssm, loaded=cast(torch.bfloat16)),
    bad("ww79_moments_in_half", "D4", "moments by way of float16", "echo next", "moments rounded to 16 bits",
        net=gpt, loaded=cast(torch.float16, "exp_avg", "exp_avg_sq")),
    bad("ww80_int8_export", "D7", "matrices by way of an int8 export; title says narrower type", "echo next",
        "weights quantised / rounded to int8 / weights differ slightly everywhere", loaded=on_weights(int8, "_proj")),
    bad("ww81_masters_rebuilt", "D1", "masters rebuilt from bf16 weights", "echo next", "masters rebuilt from weights",
        base=Apex, loaded=masters_rebuilt),
    bad("ww82_masters_stale", "D2", "masters of an older save", "echo next", "masters do not match / older",
        also=("G6",), base=Apex, load=masters_stale),
    bad("ww83_weights_stale", "D3", "bf16 weights of an older save; masters right", "echo",
        "weights do not match their masters", also=("G6",), base=Apex, load=weights_stale),
    bad("ww84_optimizer_stale", "G6", "the optimizer's file is of an older save", "echo next early",
        "optimizer from another save / its step is older", also=("C9",), base=Kept, load=optimizer_stale,
        layouts=FILES),
    bad("ww85_torn_save", "G6", "half of the tensors are of the update before", "echo next",
        "parts from different saves / some weights differ by an update", base=Kept, load=torn),
    bad("ww86_older_under_new_step", "G7", "everything but the step is of an older save", "echo next early",
        "older state under a newer step / step does not fit", also=("G6", "G8", "C9"), base=Kept, load=all_stale,
        layouts=FILES),
    bad("ww87_step_of_name", "C9", "the trainer's step was read from another name: 100 too many", "echo next early",
        "trainer's step is not that of the state", load=late_step, layouts=("torch_save", "dcp", "lightning")),
    bad("ww88_reference_is_policy", "F6", "the reference became the policy at the resume; no title fits",
        "echo next early", "ref_model changed / equals the policy", also=("F4", "A2"), base=Policy,
        loaded=reference_is_policy),
    bad("ww89_return_statistics", "A5", "running statistics of the returns begin anew", "echo next early",
        "value_norm (mean, count) reset", also=("C9",), base=Policy, loaded=returns_anew),
    bad("ww90_penalty_anew", "H1", "the KL penalty's coefficient is at its start; no title fits", "echo",
        "kl_ctl value changed", also=("A5", "C1", "C9"), base=Policy, loaded=penalty_anew),
    bad("ww91_optimizers_exchanged", "B5", "actor's and critic's optimizers exchanged", "echo next",
        "optimizer state belongs to other parameters / other optimizer", also=("E13",), base=Both,
        load=optimizers_exchanged),
    bad("ww92_teacher_is_student", "F4", "the momentum teacher was set to the student; no title fits", "echo next",
        "teacher weights equal the student / not loaded", also=("A2", "F6"), base=Teacher, loaded=teacher_is_student),
    bad("ww93_rope_base", "H2", "another rope_theta in the new launch", "echo next early", "rope_theta changed",
        also=("H1",), base=Told, loaded=other_arguments(rope_theta=5e5)),
    lab_fault("ww94_norm_replicas", "F1", "rank 1's norms have drifted", "echo", "replicas differ between ranks",
              second=norms_drifted, formats=("megatron",)),
    lab_fault("ww95_rank1_squares", "B4", "rank 1's part of exp_avg_sq is zeros", "echo next",
              "exp_avg_sq lost/zero (in a rank's part)", also=("G5",), second=no_squares, formats=("dcp_sharded",)),
    lab_fault("ww96_rank1_masters", "D2", "rank 1's masters are of an older save", "echo next",
              "masters older / do not match (one rank)", also=("G6",), second=old_masters, formats=("deepspeed",),
              needs=masters),
    lab_fault("ww97_rank1_moments", "G6", "rank 1's moments are of an older save", "echo next",
              "parts (a rank's optimizer state) from an older save", also=("B6",), second=old_moments,
              formats=("dcp_sharded", "deepspeed")),
    lab_fault("ww98_masters_exchanged", "D2", "masters of two layers exchanged", "echo next",
              "masters do not match / belong to another layer", also=("E9", "B5", "E13"), restore=masters_exchanged,
              formats=("torch_masters",), needs=masters),
    lab_fault("ww99_embedding_moments_rolled", "E13", "the embedding's moments with a rank's rows first", "echo next",
              "optimizer state resharded differently / rows of moments moved", also=("E1", "B5"),
              restore=head_moments_rolled, formats=("dcp", "accelerate", "lightning")),
    trainer_fault("wy01_no_optimizer_file", "B1", "transformers: no scheduler.pt, so neither file is loaded",
                  "echo next early", "optimizer not restored (and schedule restarted)", "Llama", also=("C1",),
                  spoil=delete("scheduler.pt")),
    trainer_fault("wy02_no_random_state", "C8", "transformers: rng_state.pth is missing", "echo",
                  "random state not restored", "gpt2", spoil=delete("rng_state.pth")),
    trainer_fault("wy03_batch_doubled", "C10", "transformers: per-device batch 8 where it was 4", "echo next early",
                  "batch size changed", "Llama", also=("C6", "C7", "H1"),
                  other_args={"per_device_train_batch_size": 8}),
    trainer_fault("wy04_final_norm", "A3", "transformers: the final norm is not in the file", "echo next",
                  "model.norm not loaded, at 1", "Qwen2", also=("A2",), spoil=drop_tensor("model.norm.")),
    trainer_fault("wy05_second_moments_half", "D4", "transformers: exp_avg_sq through float16", "echo next",
                  "second moments rounded to 16 bits (float16)", "Llama", loaded=optimizer_in_half),
]  # fmt: skip


# ---- healthy -----------------------------------------------------------------------------------------------------------------


class Switched(Averaged):
    """The weights are set to their average every seventh update (switch EMA)."""

    def apply(self) -> None:
        super().apply()
        if self.step % 7 == 6:
            averaged_as_weights(self)


class Normalised(Loop):
    """nGPT: rows of unit length after every update."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for name, weight in named(self).items():
            if weight.ndim == 2:
                weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=1e-6))


class Perturbed(Loop):
    """Shrink and perturb every ninth update."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        if self.step % 9 == 8:
            for weight in named(self).values():
                if weight.ndim == 2:
                    weight.mul_(0.8).add_(torch.randn_like(weight), alpha=0.02)


class Pruned(Loop):
    """The smallest weights of the MLPs are zeros, more of them over time."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        share = min(0.5, 0.01 * self.step)
        for name, weight in named(self).items():
            if "mlp" in name:
                weight[weight.abs() < weight.abs().flatten().quantile(share)] = 0.0


class ReLora(Lora):
    """Every eighth update the adapters are merged and begin anew, their moments too."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        if self.step % 8 == 7:
            merge(self)
            for name, weight in named(self).items():
                if "lora_B" in name:
                    weight.zero_()
                if "lora_" in name:
                    held(self, name)["exp_avg"].mul_(0.01)
                    held(self, name)["exp_avg_sq"].mul_(0.01)


class Observed(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.net = Gpt(config)
        self.register_buffer("min_val", torch.tensor(math.inf))
        self.register_buffer("max_val", torch.tensor(-math.inf))
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))

    def forward(self, tokens: torch.Tensor) -> Any:
        largest = self.net.wte.weight.detach()
        self.min_val.copy_(torch.minimum(self.min_val, largest.min()))
        self.max_val.copy_(torch.maximum(self.max_val, largest.max()))
        return self.net(tokens)


class Thawed(Loop):
    """Layers are frozen from below as training goes on."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if (".layers.0." in name and self.step > 15) or ("embed" in name and self.step > 10):
                weight.grad = None
        super().gradients()


class Rebalanced(Routed):
    """Every tenth update experts change places, with their router rows, biases and state."""

    def update(self) -> None:
        super().update()
        if self.step % 10 == 9:
            experts_from(1, 2, 3, 0, moments=True)(self)
            for name, weight in named(self).items():
                if name.endswith("mlp.gate.weight"):
                    weight.copy_(weight.roll(-1, 0).clone())
                    for key in ("exp_avg", "exp_avg_sq"):
                        held(self, name)[key].copy_(held(self, name)[key].roll(-1, 0).clone())
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffer.roll(-1, 0).clone())


class Sparse(Loop):
    """SparseAdam for the embedding, AdamW for the rest."""

    layouts = ("torch_save", "lightning")
    clip = 0.0

    def net(self) -> nn.Module:
        found = Conv(self.config)
        found.embed.sparse = True
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        c = self.config
        rest = [w for n, w in self.module.named_parameters() if not n.startswith("embed")]
        return [TORCH.SparseAdam([self.module.embed.weight], lr=c.lr), TORCH.AdamW(rest, lr=c.lr)]


class Ramped(Fed):
    """The batch grows from two rows to four at update 20."""

    def tokens(self) -> torch.Tensor:
        self.rows = 2 if self.step < 20 else 4
        return super().tokens()


class Longer(Loop):
    """Sequences grow; how long they are, and how many tokens were seen, is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["curriculum"] = {"seqlen": 8, "consumed_tokens": 0}

    def tokens(self) -> torch.Tensor:
        told = self.extra["curriculum"]
        told["seqlen"] = min(16, 8 + self.step // 5)
        found = super().tokens()[:, : told["seqlen"] + 1]
        told["consumed_tokens"] += found.numel()
        return found


class Logged(Loop):
    """Meters that begin anew every tenth update, a best loss, and the best weights so far."""

    layouts = ("torch_save", "lightning")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra |= {"meters": {"loss_sum": 0.0, "count": 0}, "best": {"metric": 1e9, "weights": {}}}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        meters, best = self.extra["meters"], self.extra["best"]
        if meters["count"] == 10:
            meters |= {"loss_sum": 0.0, "count": 0}
        meters |= {"loss_sum": meters["loss_sum"] + float(found), "count": meters["count"] + 1}
        if float(found) < best["metric"]:
            best |= {"metric": float(found), "weights": {n: w.clone() for n, w in named(self).items()}}
        return found


class Replayed(Loop):
    """A ring buffer of rollouts that is stored."""

    layouts = ("torch_save", "lightning")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["replay_buffer"] = {"obs": torch.zeros(24, 17, dtype=torch.long), "pos": 0, "full": False}

    def tokens(self) -> torch.Tensor:
        found, ring = super().tokens(), self.extra["replay_buffer"]
        for row in found:
            ring["obs"][ring["pos"]] = row
            ring["pos"] = (ring["pos"] + 1) % 24
            ring["full"] |= ring["pos"] == 0
        return found


class Forgetting(Loop):
    """Adam's state is emptied every fifteenth update, by the trainer."""

    layouts = ("torch_save", "folder", "lightning")

    def apply(self) -> None:
        super().apply()
        if self.step % 15 == 14:
            self.optimizers[0].state.clear()


class Stochastic(Loop):
    """bf16 weights, rounded by chance."""

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    @torch.no_grad()
    def apply(self) -> None:
        old = {n: w.clone() for n, w in named(self).items()}
        super().apply()
        for name, weight in named(self).items():
            exact = old[name].float() + (weight.float() - old[name].float())
            raw = exact.view(torch.int32) + torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
            weight.copy_((raw & -65536).view(torch.float32))


class Prefixed(Loop):
    """Compiled before and after: every name has the prefix."""

    def weights(self) -> dict[str, Any]:
        return {f"_orig_mod.{n}": w for n, w in self.module.state_dict().items()}

    def take(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict({n.removeprefix("_orig_mod."): w for n, w in weights.items()})


def layerwise(self: Loop) -> Groups:
    """A group for every parameter, with a learning rate by depth; the embedding's is 0."""
    found = []
    for name, weight in self.module.named_parameters():
        depth = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 1
        lr = 0.0 if "embed" in name else self.config.lr * 0.7 ** (2 - depth)
        found.append({"params": [weight], "lr": lr, "weight_decay": 0.0 if weight.ndim < 2 else 0.1})
    return found


class Sharp(Loop):
    """SAM: the gradient is taken beside the weights."""

    def gradients(self) -> None:
        grads = [w.grad.clone() for w in self.module.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
        kept = [w.detach().clone() for w in self.module.parameters()]
        with torch.no_grad():
            for w, g in zip(self.module.parameters(), grads, strict=True):
                w.add_(g, alpha=0.05 / float(norm))
        self.optimizers[0].zero_grad()
        self.loss(batch(self.config, self.step, 1234)).backward()
        with torch.no_grad():
            for w, old in zip(self.module.parameters(), kept, strict=True):
                w.copy_(old)
        super().gradients()


class Clipped(Loop):
    """Weights are kept within a box after each update (WGAN), and A_log is clamped."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for weight in named(self).values():
            weight.clamp_(-0.25, 0.25)


class QkClip(Loop):
    """Muon's qk-clip: q and k are scaled down where their logits are large."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for name, weight in named(self).items():
            if "q_proj" in name or "k_proj" in name:
                for head in weight.unflatten(0, (-1, self.config.head_dim)):
                    head.mul_(min(1.0, 2.2 / float(head.norm())))


class Mixed(Loop):
    """Weights of the data's sources, by their losses (DoReMi)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["mixture"] = {"weights": torch.full((3,), 1 / 3), "draws": torch.zeros(3, dtype=torch.long)}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found, told = super().loss(tokens), self.extra["mixture"]
        told["draws"][self.step % 3] += 1
        told["weights"][self.step % 3] *= float(found.detach()) / 4
        told["weights"] /= told["weights"].sum()
        return found


def well(id: str, text: str, **more: Any) -> Fault:
    return variant(id, text, **more)


def trainer_well(id: str, text: str, name: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


HEALTHY_ = [
    well("wh01_gpt", "GPT-2's names with biases", net=gpt),
    well("wh02_batch_norm", "batch norms", net=conv, layouts=FILES),
    well("wh03_ssm", "a state-space model with a stored buffer", net=ssm),
    well("wh04_muon_and_adamw", "Muon and AdamW, decay and a schedule each", base=Two),
    well("wh05_shampoo", "Shampoo", optimizer=lambda self, groups: Shampoo(only(groups), lr=self.config.lr)),
    well("wh06_galore", "GaLore, projections chosen anew every tenth update",
         optimizer=lambda self, groups: GaLore(only(groups), lr=self.config.lr), layouts=FILES),
    well("wh07_lookahead", "Lookahead pulls the weights back every fifth update", optimizer=optim(Lookahead),
         layouts=FILES),
    well("wh08_switch_ema", "weights set to their average every seventh update", base=Switched),
    well("wh09_unit_rows", "rows are normalised after each update", base=Normalised),
    well("wh10_spectral", "spectral norm", net=spectral, layouts=FILES),
    well("wh11_weight_norm", "weight norm on convolutions with batch norms", net=weight_normed, layouts=FILES),
    well("wh12_shrink_perturb", "shrink and perturb", base=Perturbed),
    well("wh13_pruned", "gradual magnitude pruning", base=Pruned),
    well("wh14_relora", "ReLoRA merges and restarts", base=ReLora),
    well("wh15_observers", "quantisation-aware training with observers", layouts=FILES,
         net=lambda self: Observed(self.config)),
    well("wh16_frozen_from_below", "layers are frozen as training goes on", base=Thawed),
    well("wh17_rebalanced_experts", "experts change places with all that belongs to them", base=Rebalanced,
         needs={"experts": 4}),
    well("wh18_sparse_embedding", "SparseAdam for the embedding", base=Sparse),
    well("wh19_sam", "sharpness-aware minimisation", base=Sharp),
    well("wh20_batch_ramp", "the batch grows", base=Ramped),
    well("wh21_length_curriculum", "sequences grow", base=Longer),
    well("wh22_meters", "meters that reset, best weights that are kept", base=Logged),
    well("wh23_scale_grows", "the loss scale doubles every third update", base=Scaled, net=gpt),
    well("wh24_reference_synced", "the reference is synced every tenth update", base=Policy, sync=10),
    well("wh25_target_network", "a target network is copied every eighth update", base=Teacher, sync=8),
    well("wh26_momentum_teacher", "a momentum teacher", base=Teacher),
    well("wh27_replay", "a ring buffer", base=Replayed),
    well("wh28_epochs", "short epochs: positions fall, epochs rise", base=Fed, length=9),
    well("wh29_warm_restarts", "cosine with warm restarts", schedule=warm_restarts),
    well("wh30_plateau", "ReduceLROnPlateau", base=Plateau, layouts=("torch_save", "folder", "lightning")),
    well("wh31_layerwise_lr", "a group for each parameter, the embedding's lr is 0", groups=layerwise),
    well("wh32_langevin", "noise is added to the weights", optimizer=optim(Langevin)),
    well("wh33_stochastic_rounding", "bf16 weights with stochastic rounding", base=Stochastic, true=("D5",)),
    well("wh34_state_emptied", "the trainer empties Adam's state every fifteenth update", base=Forgetting,
         true=("B1", "B2")),
    well("wh35_compiled", "the compile prefix before and after", base=Prefixed, layouts=("torch_save", "lightning")),
    well("wh36_adam_mini", "Adam-mini", optimizer=lambda self, groups: AdamMini(only(groups), lr=self.config.lr)),
    well("wh37_swa", "an equal mean of every fifth update", base=Swa, layouts=("torch_save", "lightning")),
    well("wh38_partial_gradients", "partial gradients are stored", base=Accumulating),
    well("wh39_clipped_weights", "weights stay in a box", base=Clipped),
    well("wh40_qk_clip", "q and k are scaled down by head", base=QkClip),
    well("wh41_mixture", "weights of the sources change", base=Mixed, layouts=("torch_save", "folder", "lightning")),
    well("wh42_random_states", "random states of four ranks", base=Chance),
    well("wh43_actor_critic", "actor and critic with an optimizer each", base=Both),
    Fault("wh44_elsewhere", "healthy", "resumed into another layout with two micro-batches", frozenset(),
          elsewhere=True, micro=2, kind="healthy"),
    trainer_well("wh45_mistral_adagrad", "transformers: Mistral by Adagrad", "Mistral", optim="adagrad"),
    trainer_well("wh46_gemma_rmsprop", "transformers: Llama by RMSprop, constant lr", "Llama", optim="rmsprop",
                 lr_scheduler_type="constant"),
]  # fmt: skip


# ---- on purpose ----------------------------------------------------------------------------------------------------------------


def embedding_lr(self: Loop) -> None:
    for schedule in self.schedules:
        schedule.base_lrs[1] *= 0.3
    group = every(self)[1]
    group |= {"lr": 0.3 * group["lr"], "initial_lr": 0.3 * group["initial_lr"]}


class Context(Told):
    """Longer sequences with another rope base."""

    def tokens(self) -> torch.Tensor:
        return batch(self.config.but(length=32), self.step, 1234) if self.resumed else super().tokens()


class NewData(Fed):
    """Another dataset from its start."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["dataloader"]["path"] = "/data/web-v2"


class Smaller(Loop):
    """The first layer is frozen, the optimizer made for the rest alone, with its state."""

    layouts = FILES

    def loaded(self) -> None:
        old = {w: s for w, s in self.optimizers[0].state.items()}
        told = every(self)
        for name, weight in self.module.named_parameters():
            weight.requires_grad_(".layers.0." not in name)
        self.optimizers = self.made()
        for group, was in zip(every(self), told, strict=True):
            group |= {n: v for n, v in was.items() if n != "params"}
            for weight in group["params"]:
                self.optimizers[0].state[weight] = old[weight]
        self.schedules[0].optimizer = self.optimizers[0]

    def gradients(self) -> None:
        for weight in self.module.parameters():
            if not weight.requires_grad:
                weight.grad = None
        super().gradients()


class ToLion(Loop):
    layouts = FILES
    fresh = ("optimizer",)

    def loaded(self) -> None:
        step = self.schedules[0].state_dict()
        self.optimizers = [other.Lion(self.groups(), lr=0.2 * self.config.lr)]
        self.schedules = [self.schedule(self.optimizers[0])]
        self.schedules[0].load_state_dict({k: v for k, v in step.items() if not callable(v)})


class Deeper(Loop):
    """Depth up-scaling: the last layer is copied once more, the optimizer begins anew."""

    layouts = FILES
    fresh = ("optimizer", "scheduler")

    def take(self, weights: dict[str, Any]) -> None:
        last = self.config.layers - 1
        for name in [n for n in weights if f".layers.{last}." in n]:
            weights[name.replace(f".layers.{last}.", f".layers.{last + 1}.")] = weights[name].clone()
        self.config = self.config.but(layers=last + 2)
        self.module = Decoder(self.config)
        self.module.load_state_dict(weights)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class Larger(Samples):
    """The batch is doubled on purpose."""

    def tokens(self) -> torch.Tensor:
        self.rows = 4 if self.resumed else 2
        return Fed.tokens(self)


def meant(id: str, text: str, true: tuple[str, ...], **more: Any) -> Fault:
    return variant(id, text, kind="deliberate", true=true, why="true: it changed, on purpose", **more)


MEANT = [
    meant("wd01_lr_of_vectors", "the vectors' lr times 0.3", ("H1", "B8", "C2"), loaded=embedding_lr),
    meant("wd02_longer_context", "longer sequences, another rope base", ("H1", "H2"), base=Context,
          loaded=other_arguments(rope_theta=1e6, seq_length=32)),
    meant("wd03_new_data", "another dataset, from its start", ("C6", "C7", "H1"), base=NewData,
          loaded=data(path="/data/code-v1", batches_yielded=0, epoch=0, seed=99)),
    meant("wd04_layer_frozen", "a layer is frozen from now on", ("H1", "B1", "B7"), base=Smaller),
    meant("wd05_to_lion", "AdamW is replaced by Lion", ("B1", "H1", "B4", "C2", "B8"), base=ToLion),
    meant("wd06_no_decay", "weight decay set to 0", ("H1", "B7", "C5"), loaded=group_fields(weight_decay=0.0), net=gpt),
    meant("wd07_deeper", "a layer is copied on top, optimizer anew", ("B1", "C1", "H1", "A4", "E9"), base=Deeper),
    meant("wd08_larger_batch", "the batch is doubled", ("C10", "H1"), base=Larger),
    meant("wd09_average_adopted", "the average is taken as the weights for the last phase", ("F4", "H1"), base=Averaged,
          loaded=averaged_as_weights),
    meant("wd10_plateau_to_constant", "the scheduler is dropped, lr set by hand", ("C2", "B8", "H1", "C1"),
          base=Plateau, layouts=("torch_save", "folder", "lightning"), loaded=group_fields(lr=1e-4)),
    meant("wd11_clip_and_dropout", "another clip and dropout", ("H1", "H2"), base=Told,
          loaded=other_arguments(max_grad_norm=0.3, attention_dropout=0.1)),
]  # fmt: skip

OPENED13: list[Fault] = [*FAULTS, *HEALTHY_, *MEANT]
assert len({one.id for one in OPENED13}) == len(OPENED13) and random
