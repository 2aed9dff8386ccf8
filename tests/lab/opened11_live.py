"""The eleventh half, sealed until 2026-11-27, by a stranger to the rules: faults as public reports tell them, odd
healthy runs, and changes on purpose.
"""

# ruff: noqa: E501

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.data import batch
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Frozen, Tied, muon, optim, plain
from tests.lab.model import LORA_SCALE, is_norm
from tests.lab.state import State

__all__ = ["OPENED11_LIVE"]

TORCH = torch.optim
FILES = ("torch_save", "folder", "lightning")
ONE = ("torch_save", "lightning")
RANKS = ("dcp_sharded", "megatron", "deepspeed")


# ---- models and loops ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A GRU language model, as of speech and translation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab = config.vocab
        self.embed = nn.Embedding(config.padded, config.hidden)
        self.rnn = nn.GRU(config.hidden, config.hidden, batch_first=True)
        self.out = nn.Linear(config.hidden, config.padded)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = self.out(self.rnn(self.embed(tokens[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1)), {}


class Convolved(nn.Module):
    """Convolutions with batch norms, whose running statistics are buffers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        h = config.hidden
        self.embed = nn.Embedding(config.padded, h)
        self.conv1, self.bn1 = nn.Conv1d(h, h, 3), nn.BatchNorm1d(h)
        self.conv2, self.bn2 = nn.Conv1d(h, h, 3), nn.BatchNorm1d(h)
        self.head = nn.Linear(h, config.padded)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = F.pad(self.embed(tokens[:, :-1]).transpose(1, 2), (4, 0))
        x = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), tokens[:, 1:].reshape(-1)), {}


class Gated(nn.Module):
    """One block with fused qkv and fused gate and up, biases and LayerNorms."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        h, f = config.hidden, config.ffn
        self.heads = config.heads
        self.wte = nn.Embedding(config.padded, h)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(h), nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv_proj, self.o_proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.gate_up_proj, self.down_proj = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)
        self.lm_head = nn.Linear(h, config.padded, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.wte(tokens[:, :-1])
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv_proj(self.ln_1(x)).chunk(3, -1)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.ln_2(x)).chunk(2, -1)
        x = x + self.down_proj(F.silu(gate) * up)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), tokens[:, 1:].reshape(-1)), {}


class Gru(Loop):
    def net(self) -> nn.Module:
        return Recurrent(self.config)


class Conv(Loop):
    def net(self) -> nn.Module:
        return Convolved(self.config)


class Block(Loop):
    def net(self) -> nn.Module:
        return Gated(self.config)


class Averaged(Loop):
    """With an exponential average of the weights in the file."""

    decay = 0.95

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}
        self.extra["ema_updates"] = 0

    def apply(self) -> None:
        super().apply()
        self.extra["ema_updates"] += 1
        decay = min(self.decay, (1 + self.extra["ema_updates"]) / (10 + self.extra["ema_updates"]))
        for name, weight in self.module.named_parameters():
            self.extra["ema"][name].lerp_(weight.detach(), 1 - decay)


class Lora(Loop):
    """Adapters on q and v; the base is frozen."""

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found


class Balanced(Loop):
    """A mixture without auxiliary loss: a bias an expert, moved by a fixed step each update."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found, self.load_ = self.module(tokens)
        return found

    def apply(self) -> None:
        super().apply()
        for name, bias in self.module.named_buffers():
            load = self.load_[name]
            bias.add_(0.001 * torch.sign(load.mean() - load))


class Reading(Loop):
    """The position in the data is the loader's own state; an epoch has ten batches."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {"epoch": 0, "batch": 0, "consumed_samples": 0, "seed": 1234}

    def tokens(self) -> torch.Tensor:
        told = self.extra["dataloader"]
        found = batch(self.config, told["epoch"] * 10 + told["batch"], told["seed"])
        told["batch"] += 1
        told["consumed_samples"] += len(found)
        if told["batch"] == 10:
            told["epoch"], told["batch"] = told["epoch"] + 1, 0
        return found


class Long(Reading):
    """The same in one long epoch."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {"samples_seen": 0, "batches_seen": 0}

    def tokens(self) -> torch.Tensor:
        told = self.extra["dataloader"]
        found = batch(self.config, told["batches_seen"], 1234)
        told["batches_seen"] += 1
        told["samples_seen"] += len(found)
        return found


class Ranks(Loop):
    """Random states of four ranks, each used once an update."""

    ranks = 4

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        made = [torch.Generator().manual_seed(100 + rank) for rank in range(self.ranks)]
        self.extra["rng_states"] = [one.get_state() for one in made]

    def apply(self) -> None:
        super().apply()
        states = self.extra["rng_states"]
        for rank, state in enumerate(states):
            one = torch.Generator()
            one.set_state(state)
            torch.rand(3, generator=one)
            states[rank] = one.get_state()


class Scaled(Loop):
    """fp16's scaler: 65536 overflows until it has come down to 1024."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        told = self.extra["scaler"]
        if told["scale"] > 1024:
            told |= {"scale": told["scale"] * 0.5, "_growth_tracker": 0}
            return
        super().apply()
        told["_growth_tracker"] += 1


class Policy(Loop):
    """DPO: a frozen reference beside the policy."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["reference_model"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


class Layered(Loop):
    """A learning rate a layer: half of the one above."""

    def groups(self) -> Groups:
        sets: dict[int, list[Any]] = {}
        for name, weight in self.module.named_parameters():
            depth = 0 if "embed" in name else 1 + int(name.split(".")[2]) if ".layers." in name else 3
            sets.setdefault(depth, []).append(weight)
        return [
            {"params": ws, "lr": self.config.lr * 0.5 ** (3 - depth), "lr_scale": 0.5 ** (3 - depth)}
            for depth, ws in sorted(sets.items())
        ]


class Mup(Loop):
    """muP: hidden matrices at lr / width multiplier."""

    def groups(self) -> Groups:
        named = dict(self.module.named_parameters())
        inner = [w for n, w in named.items() if w.ndim == 2 and ".layers." in n]
        rest = [w for n, w in named.items() if w.ndim != 2 or ".layers." not in n]
        lr = self.config.lr
        return [{"params": inner, "lr": lr / 8, "width_mult": 8.0}, {"params": rest, "lr": lr, "width_mult": 1.0}]


class Plateau(Loop):
    """ReduceLROnPlateau by a loss that stagnates."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return TORCH.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=4, threshold=0.05)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.seen_ = float(found)
        return found

    def apply(self) -> None:
        for one in self.optimizers:
            one.step()
        for schedule in self.schedules:
            schedule.step(self.seen_)


class MixedState(other.Optimizer):
    """AdamW with fp32 moments beside bf16 weights, as of Transformer Engine and torchao."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(weight, dtype=torch.float32)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone(), "master_param": weight.float()}

    def update(self, weight: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        gradient = gradient.float()
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        right = 1 - second ** state["step"]
        under = (state["exp_avg_sq"].float() / right).sqrt().add_(group["eps"])
        step = state["exp_avg"].float() / under / (1 - first ** state["step"])
        state["master_param"].mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=group["lr"])
        weight.copy_(state["master_param"])


class Rounding(other.Optimizer):
    """bf16 weights with stochastic rounding, fp32 moments."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(weight, dtype=torch.float32)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(self, weight: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        gradient = gradient.float()
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        t = state["step"]
        under = (state["exp_avg_sq"] / (1 - second**t)).sqrt().add_(group["eps"])
        new = weight.float() - group["lr"] / (1 - first**t) * state["exp_avg"] / under
        bits = new.view(torch.int32) + torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
        weight.copy_((bits & -65536).view(torch.float32))


class Shampoo(other.Optimizer):
    """Two accumulated preconditioners a matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, epsilon=1e-4, weight_decay=0.0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        found = {"step": 0, "momentum_buffer": torch.zeros_like(weight)}
        return found | {f"precond_{n}": group["epsilon"] * torch.eye(size) for n, size in enumerate(weight.shape)}

    def update(self, weight: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1
        found = gradient
        for n in range(gradient.ndim):
            flat = gradient.transpose(0, n).flatten(1) if gradient.ndim > 1 else gradient[:, None]
            state[f"precond_{n}"].add_(flat @ flat.T)
            values, vectors = torch.linalg.eigh(state[f"precond_{n}"])
            root = vectors * values.clamp(min=1e-12) ** (-1 / (2 * gradient.ndim)) @ vectors.T
            found = (root @ found.transpose(0, n)).transpose(0, n) if gradient.ndim > 1 else root @ found
        state["momentum_buffer"].mul_(group["momentum"]).add_(found)
        weight.sub_(state["momentum_buffer"], alpha=group["lr"])


class Lookahead(other.Optimizer):
    """SGD whose weights return to slow ones every five updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, lookahead_alpha=0.5, lookahead_k=5, lookahead_step=0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(weight), "slow_buffer": weight.clone()}

    def before(self, group: dict[str, Any]) -> None:
        group["lookahead_step"] += 1

    def update(self, weight: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["momentum_buffer"].mul_(0.9).add_(gradient)
        weight.sub_(state["momentum_buffer"], alpha=group["lr"])
        if group["lookahead_step"] % group["lookahead_k"] == 0:
            state["slow_buffer"].lerp_(weight, group["lookahead_alpha"])
            weight.copy_(state["slow_buffer"])


# ---- what goes wrong after a load ------------------------------------------------------------------------------------


def named(self: Loop) -> dict[str, nn.Parameter]:
    return dict(self.module.named_parameters())


def state(self: Loop, name: str) -> dict[str, Any]:
    weight = named(self)[name]
    return next(one.state[weight] for one in self.optimizers if weight in one.state)


def write(self: Loop, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            found = change(name, weight.detach().clone())
            if found is not None:
                weight.copy_(found)


def states(self: Loop, change: Callable[[str, str, Any], Any]) -> None:
    """A change of ``None`` leaves it; otherwise it takes its place."""
    for name, weight in self.module.named_parameters():
        for one in self.optimizers:
            for key, value in list(one.state.get(weight, {}).items()):
                found = change(name, key, value)
                if found is not None:
                    one.state[weight][key] = found


def takes(keep: Callable[[str], bool]) -> Any:
    """For `Loop.take`: only tensors whose names are kept are loaded."""

    def take(self: Loop, weights: dict[str, Any]) -> None:
        self.module.load_state_dict({n: w for n, w in weights.items() if keep(n)}, strict=False)

    return take


def exchanged(*pairs: tuple[str, str]) -> Any:
    def loaded(self: Loop) -> None:
        held = named(self)
        for name in list(held):
            for one, two in pairs:
                if one in name:
                    a, b = held[name], held[name.replace(one, two)]
                    table = self.optimizers[0].state
                    table[a], table[b] = table[b], table[a]

    return loaded


def group0_alone(self: Loop) -> None:
    for weight in self.optimizers[0].param_groups[1]["params"]:
        self.optimizers[0].state.pop(weight)


def cast_moments(self: Loop) -> None:
    states(self, lambda n, k, v: v.bfloat16() if k in ("exp_avg", "exp_avg_sq") else None)


def half_moments(self: Loop) -> None:
    states(self, lambda n, k, v: v.half().float() if k in ("exp_avg", "exp_avg_sq") else None)


def stuck(self: Loop) -> None:
    self.resumed = True


def apply_stuck(self: Any) -> None:
    """The schedule counts and says its rate, the groups that the optimizer uses never hear of it."""
    rates = [group["lr"] for group in self.optimizers[0].param_groups]
    Loop.apply(self)
    if getattr(self, "resumed", False):
        for group, lr in zip(self.optimizers[0].param_groups, rates, strict=True):
            group["lr"] = lr


def apply_twice(self: Any) -> None:
    if getattr(self, "resumed", False):
        self.optimizers[0].step()
    Loop.apply(self)


def apply_fourfold(self: Any) -> None:
    Loop.apply(self)
    if getattr(self, "resumed", False):
        for _ in range(3):
            self.schedules[0].step()


def update_micro(self: Any) -> None:
    """Accumulation is forgotten: every micro-batch is an update, the trainer counts one."""
    if not getattr(self, "resumed", False):
        return Loop.update(self)
    for part in self.tokens().chunk(4):
        self.optimizers[0].zero_grad(set_to_none=True)
        self.loss(part).backward()
        self.gradients()
        self.optimizers[0].step()
    self.schedules[0].step()
    self.step += 1
    return None


def one_group(self: Loop) -> None:
    """The rule of names finds no norm any more: all weights in one group that decays."""
    kept = self.optimizers[0].state
    lr = self.optimizers[0].param_groups[0]["lr"]
    c = self.config
    weights = [w for group in self.optimizers[0].param_groups for w in group["params"]]
    made = TORCH.AdamW(
        [{"params": weights, "weight_decay": c.weight_decay, "initial_lr": c.lr}], lr=c.lr, betas=c.betas, eps=c.eps
    )
    made.param_groups[0]["lr"] = lr
    made.state.update(kept)
    self.optimizers = [made]
    told = self.schedules[0].state_dict()
    self.schedules = [self.schedule(made)]
    self.schedules[0].load_state_dict(
        {
            **told,
            "base_lrs": told["base_lrs"][:1],
            "_last_lr": told["_last_lr"][:1],
            "lr_lambdas": told["lr_lambdas"][:1],
        }
    )
    made.param_groups[0]["lr"] = lr


def ema_is_weights(self: Any) -> None:
    self.extra["ema"] = {n: w.data for n, w in self.module.named_parameters()}


def ema_anew(self: Any) -> None:
    self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}
    self.extra["ema_updates"] = 0


def ema_taken(self: Any) -> None:
    write(self, lambda name, w: self.extra["ema"][name])


def one_cycle(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return TORCH.lr_scheduler.OneCycleLR(optimizer, self.config.lr, total_steps=self.config.total + 60)


def cycle_begins(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]
        group["betas"] = (0.95, group["betas"][1])


def sequential(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    sched = TORCH.lr_scheduler
    parts = [sched.LinearLR(optimizer, 0.1, total_iters=5), sched.CosineAnnealingLR(optimizer, self.config.total)]
    return sched.SequentialLR(optimizer, parts, milestones=[5])


def inner_lost(self: Any) -> None:
    inner = self.schedules[0]._schedulers[1]
    inner.last_epoch = 0
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]
    inner._last_lr = self.schedules[0]._last_lr = [group["lr"] for group in self.optimizers[0].param_groups]


def cosine(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return TORCH.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total, self.config.min_lr)


def remaining(self: Any) -> None:
    self.schedules[0].T_max = max(self.config.total - self.step, 30)


def wsd(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    def at(done: int) -> float:
        return min(1.0, (done + 1) / 6) if done < 40 else max(0.02, 1 - (done - 40) / 60)

    return TORCH.lr_scheduler.LambdaLR(optimizer, at)


def warm_restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return TORCH.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=12, T_mult=2)


def restart_lost(self: Any) -> None:
    self.schedules[0].T_cur = 0
    self.schedules[0].T_i = 12
    self.schedules[0].last_epoch = 0
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]
    self.schedules[0]._last_lr = [group["lr"] for group in self.optimizers[0].param_groups]


def loader_zero(self: Any) -> None:
    for name in self.extra["dataloader"]:
        self.extra["dataloader"][name] = 0


def epoch_zero(self: Any) -> None:
    self.extra["dataloader"] |= {"seed": 77}


def samples_double(self: Any) -> None:
    told = self.extra["dataloader"]
    told |= {"samples_seen": told["samples_seen"] * 4, "batches_seen": told["batches_seen"] * 4}


def ranks_equal(self: Any) -> None:
    self.extra["rng_states"] = [self.extra["rng_states"][0].clone() for _ in range(4)]


def ranks_seeded(self: Any) -> None:
    self.extra["rng_states"] = [torch.Generator().manual_seed(100 + rank).get_state() for rank in range(4)]


def step_ahead(self: Loop) -> None:
    self.step += 1


def step_zero(self: Loop) -> None:
    self.step = 0


def scaler_new(self: Any) -> None:
    self.extra["scaler"] |= {"scale": 65536.0, "_growth_tracker": 0}


def rounded(self: Loop) -> None:
    write(self, lambda name, w: w.bfloat16().float())


def interleaved(self: Loop) -> None:
    c = self.config

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "q_proj" not in name and "k_proj" not in name:
            return None
        return w.view(-1, 2, c.head_dim // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    write(self, change)


def experts_rotated(self: Loop) -> None:
    held = {n: w.detach().clone() for n, w in self.module.named_parameters()}
    kept = {n: copy.deepcopy(dict(self.optimizers[0].state.get(w, {}))) for n, w in self.module.named_parameters()}
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            if ".experts." in name:
                head, _, rest = name.partition(".experts.")
                number, tail = rest.split(".", 1)
                source = f"{head}.experts.{(int(number) + 1) % 4}.{tail}"
                weight.copy_(held[source])
                if kept[source]:
                    self.optimizers[0].state[weight] = kept[source]


def experts_one(self: Loop) -> None:
    held = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if ".experts." not in name:
            return None
        head, _, rest = name.partition(".experts.")
        return held[f"{head}.experts.0.{rest.split('.', 1)[1]}"]

    write(self, change)


def gate_up_joined(self: Loop) -> None:
    """Two ranks hold [gate; up] each; joined as [g0 u0 g1 u1] and read as [gate; up]."""

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "gate_up" not in name:
            return None
        g, u = w.chunk(2)
        (g0, g1), (u0, u1) = g.chunk(2), u.chunk(2)
        return torch.cat([g0, u0, g1, u1])

    write(self, change)


def qkv_by_head(self: Loop) -> None:
    """The fused rows are written per head [q k v] and read as [Q; K; V]."""
    heads = self.config.heads

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "qkv_proj" not in name:
            return None
        return w.unflatten(0, (3, heads, -1)).transpose(0, 1).reshape(w.shape)

    write(self, change)


def gru_gates(self: Loop) -> None:
    """Keras keeps the gates as z r n, torch as r z n."""

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "rnn" not in name:
            return None
        r, z, n = w.chunk(3)
        return torch.cat([z, r, n])

    write(self, change)


def token_added(self: Loop) -> None:
    write(self, lambda n, w: torch.cat([w[:3], w[3:].roll(1, 0)]) if "embed" in n or "lm_head" in n else None)


def padding_by_rank(self: Loop) -> None:
    """Padding of each of two ranks is put behind its own rows."""
    c = self.config

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "embed" not in name and "lm_head" not in name:
            return None
        rows, pad = w[: c.vocab], w[c.vocab :]
        half, cut = c.vocab // 2, len(pad) // 2
        return torch.cat([rows[:half], pad[:cut], rows[half:], pad[cut:]])

    write(self, change)


def layer_twice(self: Loop) -> None:
    held = {n: w.detach().clone() for n, w in self.module.named_parameters()}
    write(self, lambda n, w: held[n.replace(".1.", ".0.")] if ".layers.1." in n else None)


def norms_summed(self: Loop) -> None:
    write(self, lambda n, w: 2 * w if is_norm(n) else None)


def flat_shift(self: Loop) -> None:
    """The flat state was padded to a multiple of 8 by another rule: everything is 5 places on."""
    weights = self.optimizers[0].param_groups[0]["params"]
    table = self.optimizers[0].state
    for key in ("exp_avg", "exp_avg_sq"):
        flat = torch.cat([table[w][key].flatten() for w in weights]).roll(5)
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            table[weight][key] = part.view_as(weight).clone()


def tail_rows(self: Loop) -> None:
    """The last, uneven shard of the vocabulary is not read: rows stay as they were made."""
    made = torch.Generator().manual_seed(11)

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "embed" not in name:
            return None
        w[-len(w) // 4 :] = torch.randn(w[-len(w) // 4 :].shape, generator=made) * 0.02
        return w

    write(self, change)


def untied(self: Loop) -> None:
    assert isinstance(self.module, Decoder)
    head = self.module.get_submodule("lm_head")
    head.register_parameter("weight", nn.Parameter(named(self)["model.embed_tokens.weight"].detach().clone()))


def merged_again(self: Loop) -> None:
    held = named(self)

    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        stem = name.removesuffix("weight")
        if f"{stem}lora_B.weight" not in held:
            return None
        return w + LORA_SCALE * held[f"{stem}lora_B.weight"].detach() @ held[f"{stem}lora_A.weight"].detach()

    write(self, change)


def other_base(self: Loop) -> None:
    made = torch.Generator().manual_seed(5)
    write(self, lambda n, w: None if "lora" in n else w + 0.01 * w.std() * torch.randn(w.shape, generator=made))


def reference_is_policy(self: Any) -> None:
    self.extra["reference_model"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


def moment_nan(self: Loop) -> None:
    name = next(n for n in named(self) if "o_proj" in n)
    state(self, name)["exp_avg"][0, 0] = math.nan


def variance_negative(self: Loop) -> None:
    name = next(n for n in named(self) if "down_proj" in n)
    state(self, name)["exp_avg_sq"][1, 1] *= -1


def page_zero(self: Loop) -> None:
    def change(name: str, w: torch.Tensor) -> torch.Tensor | None:
        if "embed" not in name:
            return None
        flat = w.flatten()
        flat[512 : 512 + 1024] = 0
        return flat.view_as(w)

    write(self, change)


class Torn(Loop):
    """An asynchronous save takes the weights at once and the optimizer's state as it was an update earlier."""

    layouts = FILES

    def update(self) -> None:
        self.earlier = copy.deepcopy(self.optimizers[0].state_dict())
        super().update()

    def content(self) -> dict[str, Any]:
        found = super().content()
        return found | {"optimizer": self.earlier} if not getattr(self, "resumed", False) else found


class Repeated(Loop):
    """The tensors of the save after the load are written again and again; the step is new."""

    layouts = FILES

    def content(self) -> dict[str, Any]:
        found = super().content()
        if not getattr(self, "resumed", False):
            return found
        if not hasattr(self, "kept"):
            self.kept = copy.deepcopy({"model": found["model"], "optimizer": found["optimizer"]})
        return found | self.kept


class HalfOld(Loop):
    """The first layer's weights in a save are those that were staged for the save before."""

    layouts = FILES

    def content(self) -> dict[str, Any]:
        found = super().content()
        if not getattr(self, "resumed", False):
            return found
        if not hasattr(self, "kept"):
            self.kept = {n: w.clone() for n, w in found["model"].items() if ".layers.0." in n}
        return found | {"model": dict(found["model"]) | self.kept}


class Told(Loop):
    """Its arguments are in the file, as a config."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["config"] = {
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_size": config.hidden,
            "num_attention_heads": config.heads,
            "num_hidden_layers": config.layers,
        }


def theta(self: Any) -> None:
    self.extra["config"]["rope_theta"] = 500000.0
    self.config = self.config.but(rope_theta=5e5)
    self.module.config = self.config


def mup_lost(self: Any) -> None:
    rest = self.optimizers[0].param_groups[1]
    self.optimizers[0].param_groups[0]["lr"] = rest["lr"]
    self.optimizers[0].param_groups[0]["initial_lr"] = rest["initial_lr"]
    self.schedules[0].base_lrs = [rest["initial_lr"]] * 2


def eps_large(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["eps"] = 1e-2


def detached(self: Any) -> None:
    Loop.gradients(self)
    if getattr(self, "resumed", False):
        for name, weight in self.module.named_parameters():
            if ".layers.0." in name or "embed" in name:
                weight.grad = None


class DecayRamp(Loop):
    """Weight decay grows along a schedule of its own, as DINO's and Megatron's."""

    def apply(self) -> None:
        super().apply()
        self.optimizers[0].param_groups[0]["weight_decay"] = 0.04 + 0.36 * min(1.0, (self.step + 1) / 60)


def decay_start(self: Loop) -> None:
    self.optimizers[0].param_groups[0]["weight_decay"] = 0.04


def prodigy(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return other.Prodigy([{"params": [w for group in groups for w in group["params"]]}], lr=1.0)


def d_lost(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"d": group["d0"], "d_max": group["d0"], "d_numerator": 0.0}


def z_anew(self: Loop) -> None:
    for name in named(self):
        state(self, name)["z"] = named(self)[name].detach().clone()


def summed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    found = Loop.loss(self, tokens)
    return found * tokens.numel() if getattr(self, "resumed", False) else found


def copy_kept(self: Any) -> None:
    """The saver's wrapper holds a second copy of the model as a submodule."""
    self.module.add_module("teacher", Decoder(self.config.but(seed=1)))
    self.module.get_submodule("teacher").load_state_dict(
        {n: w for n, w in self.module.state_dict().items() if not n.startswith("teacher")}
    )
    self.module.get_submodule("teacher").requires_grad_(False)


def teacher_out(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    from tests.lab.model import loss_and_load

    weights = {n: w for n, w in self.module.named_parameters() if not n.startswith("teacher")}
    return loss_and_load(self.config, weights, {}, tokens)[0]


# ---- faults of the lab's states, in sharded layouts ------------------------------------------------------------------

ALL_STATES = ("params", "masters", "exp_avg", "exp_avg_sq", "ema")
OPT = ("masters", "exp_avg", "exp_avg_sq")


def over(found: State, fields: tuple[str, ...], change: Callable[[dict[str, Any]], None]) -> State:
    for where in fields:
        table = getattr(found, where)
        if table:
            change(table)
    return found


def swaps(found: State, fields: tuple[str, ...], one: str, two: str) -> State:
    def change(table: dict[str, Any]) -> None:
        for name in list(table):
            if one in name and name.replace(one, two) in table:
                mate = name.replace(one, two)
                table[name], table[mate] = table[mate], table[name]

    return over(found, fields, change)


def each(found: State, fields: tuple[str, ...], match: Callable[[str], bool], make: Callable[[Any], Any]) -> State:
    def change(table: dict[str, Any]) -> None:
        for name in table:
            if match(name):
                table[name] = make(table[name]).contiguous().clone()

    return over(found, fields, change)


def bare(name: str) -> bool:
    return True


def kv_heads(found: State, lab: Lab) -> State:
    size = found.config.head_dim
    return each(
        found,
        ALL_STATES,
        lambda n: "k_proj" in n or "v_proj" in n,
        lambda t: t.unflatten(0, (-1, size)).flip(0).flatten(0, 1),
    )


def flat(found: State, lab: Lab) -> State:
    def change(table: dict[str, Any]) -> None:
        whole = torch.cat([t.flatten() for t in table.values()]).roll(2)
        for (name, t), part in zip(list(table.items()), whole.split([t.numel() for t in table.values()]), strict=True):
            table[name] = part.view_as(t).clone()

    return over(found, OPT, change)


def from_ema(found: State, lab: Lab) -> State:
    for name, average in found.ema.items():
        if found.masters:
            found.masters[name] = average.float().clone()
        found.params[name] = average.to(found.params[name].dtype).clone()
    return found


def stale_masters(found: State, lab: Lab) -> State:
    found.masters = lab.run.recent.masters
    return found


def stale_weights(found: State, lab: Lab) -> State:
    old = lab.run.recent.params
    found.params |= {n: old[n] for n in found.params if "self_attn" in n}
    return found


def stale_variance(found: State, lab: Lab) -> State:
    found.exp_avg_sq = lab.run.stale.exp_avg_sq
    return found


def masters_embed(found: State, lab: Lab) -> State:
    return each(found, ("masters",), lambda n: "embed" in n or "lm_head" in n, lambda t: t.bfloat16().float())


def no_buffers(found: State, lab: Lab) -> State:
    found.buffers = {n: torch.ones_like(b) if "scale" in n else torch.zeros_like(b) for n, b in found.buffers.items()}
    return found


def mtp_lost(found: State, lab: Lab) -> State:
    """The last layer's MLP stays as another process made it, weights and masters."""
    made = lab.run.fresh()
    last = f".layers.{found.config.layers - 1}.mlp"
    for where in ("params", "masters"):
        table, new = getattr(found, where), getattr(made, where)
        table.update({n: new[n] for n in table if last in n and n in new})
    return found


def st(id: str, cause: str, text: str, where: str, why: str, **more: Any) -> Fault:
    return Fault(id, cause, text, seen(where), why=why, **more)


RATED = "echo next early"

OPENED11_LIVE: list[Fault] = [
    # ---- A
    fault("yy01_adapters_not_loaded", "F5", "PEFT prefix differs: adapters stay new, their optimizer is loaded", RATED,
          base=Lora, also=("A1", "A2"), take=takes(lambda n: "lora_" not in n),
          why="the adapters were not loaded; the base is right"),
    fault("yy02_head_not_loaded", "A2", "the head has another name and stays new", RATED, needs={"tied": False},
          also=("A1", "F2"), take=takes(lambda n: "lm_head" not in n), why="lm_head was not loaded"),
    fault("yy03_router_bias_lost", "A5", "expert_bias of aux-free balancing is not persistent", "echo next",
          base=Balanced, needs={"experts": 4}, take=takes(lambda n: "expert_bias" not in n), layouts=FILES,
          why="the router's bias buffers were reset"),
    fault("yy04_running_statistics_lost", "A5", "only named_parameters are restored: BatchNorm's statistics begin anew",
          RATED, base=Conv, take=takes(lambda n: "running" not in n and "num_batches" not in n),
          why="running statistics and their count were reset"),
    fault("yy05_norms_not_loaded", "A3", "norm keys are named otherwise; they stay at 1", "echo next",
          also=("A2",), take=takes(lambda n: not is_norm(n)), why="norm weights kept their initial 1"),
    fault("yy06_last_layer_not_loaded", "A2", "the loader counts layers from 1: the last stays new", RATED,
          also=("A1", "E9"), take=takes(lambda n: ".layers.1." not in n), why="layer 1 was not loaded"),
    fault("yy07_second_model_saved", "A4", "a copy of the model became a submodule and is saved too", RATED,
          layouts=ONE, loaded=copy_kept, loss=teacher_out, why="tensors teacher.* do not belong in the file"),
    fault("yy08_conv_reinitialised", "A2", "post_init runs after the load: convolutions are new, moments are loaded",
          RATED, base=Conv, take=takes(lambda n: "conv" not in n or "bias" in n), optimizer=optim(TORCH.NAdam),
          also=("A1",), why="conv weights kept their initial value"),
    # ---- B
    fault("yy09_nadam_fresh", "B1", "NAdam begins anew, schedule and weights are loaded", RATED, layouts=FILES,
          optimizer=optim(TORCH.NAdam), fresh=("optimizer",), why="the optimizer's state was not restored"),
    fault("yy10_lion_fresh", "B1", "Lion's average is zero after the load", "echo next", also=("B3",),
          optimizer=optim(other.Lion, factor=0.2), why="the optimizer's average was lost",
          loaded=lambda self: states(self, lambda n, k, v: torch.zeros_like(v))),
    fault("yy11_adafactor_fresh", "B1", "Adafactor begins anew", RATED, layouts=FILES, base=Gru,
          optimizer=optim(TORCH.Adafactor, factor=3.0), fresh=("optimizer",),
          why="the optimizer's state was not restored"),
    fault("yy12_sgd_momentum_lost", "B1", "SGD's momentum is lost", "echo", also=("B3",), base=Conv, layouts=FILES,
          optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9), why="momentum buffers were not restored",
          loaded=lambda self: self.optimizers[0].state.clear()),
    fault("yy13_muon_lost", "B1", "of two optimizers only AdamW is restored, Muon's momentum is lost", "echo",
          also=("B3",), made=muon, layouts=ONE, why="the state of the first optimizer (Muon) was not restored",
          loaded=lambda self: self.optimizers[0].state.clear()),
    fault("yy14_second_group_fresh", "B1", "the loader handles param group 0 alone: norms begin anew", RATED,
          also=("B2",), layouts=FILES, loaded=group0_alone, why="state of the second group was not restored"),
    fault("yy15_absmax_lost", "B11", "8-bit Adam: codes are restored, absmax is not", RATED, also=("B3",),
          optimizer=plain(other.AdamW8bit), layouts=FILES, why="scales of the 8-bit state were lost",
          loaded=lambda self: states(self, lambda n, k, v: torch.zeros_like(v) if "absmax" in k else None)),
    fault("yy16_group_step_reset", "B2", "StableAdamW counts in the group, and begins at 0", RATED,
          optimizer=optim(other.StableAdamW), why="the optimizer's counter was reset, moments are right",
          loaded=lambda self: [group.update(step=0) for group in self.optimizers[0].param_groups]),
    fault("yy17_amsgrad_maxima_lost", "B11", "AMSGrad's maxima are zero after the load", RATED, also=("B1",),
          optimizer=optim(TORCH.AdamW, amsgrad=True), why="max_exp_avg_sq was not restored",
          loaded=lambda self: states(self, lambda n, k, v: torch.zeros_like(v) if "max" in k else None)),
    fault("yy18_state_of_k_and_v", "B5", "parameters in another order: state of k and v exchanged", RATED,
          also=("E13",), loaded=exchanged(("k_proj", "v_proj")), why="state of k_proj belongs to v_proj"),
    fault("yy19_state_of_layers", "B5", "groups per layer in reverse order: states of the layers are exchanged", RATED,
          base=Layered, also=("E13",), loaded=exchanged((".layers.0.", ".layers.1.")),
          why="state of layer 0 belongs to layer 1"),
    fault("yy20_step_per_micro_batch", "C10", "accumulation is forgotten: four optimizer steps a trainer step",
          "next early", also=("C9", "C3", "H1"), update=update_micro, loaded=stuck, parts=4,
          why="the optimizer makes four updates for each step of the trainer: accumulation is off"),
    fault("yy21_step_twice", "C9", "a hook steps the optimizer once more each update", "next early",
          also=("C10", "C3", "H1"), apply=apply_twice, loaded=stuck,
          why="the optimizer counts two updates for each step of trainer and schedule"),
    fault("yy22_rate_stuck", "B8", "the schedule refers to old groups: the rate stays", "next early",
          loaded=stuck, apply=apply_stuck, why="the groups' lr is not the schedule's"),
    fault("yy23_one_group", "B7", "the rule for no decay finds nothing: norms decay too", RATED, also=("H1",),
          layouts=ONE, loaded=one_group, why="norms moved to the group with weight decay"),
    fault("yy24_moments_cast", "D4", "load_state_dict casts fp32 moments to the bf16 of the weights", RATED,
          optimizer=lambda self, groups: MixedState([{"params": g["params"]} for g in groups], lr=self.config.lr),
          net=lambda self: Decoder(self.config).to(torch.bfloat16), loaded=cast_moments, layouts=FILES,
          why="the moments are bf16 now"),
    fault("yy25_moments_half", "D4", "moments went through float16", "echo next", loaded=half_moments,
          why="moments were rounded to 16 bits"),
    fault("yy26_prodigy_d_lost", "B1", "Prodigy's estimate begins anew, moments are kept", "echo next",
          also=("B8", "B11", "H1"), optimizer=prodigy, schedule=lambda self, one: None, loaded=d_lost,
          why="d, the step size, was reset to its start"),
    fault("yy27_schedule_free_z", "B1", "schedule-free: z is rebuilt from the weights", "echo",
          also=("B11", "B6", "A2", "B3"), optimizer=optim(other.ScheduleFreeAdamW), schedule=lambda self, one: None,
          loaded=z_anew, why="z was not restored and is a copy of the weights"),
    fault("yy28_shampoo_preconditioners", "B1", "Shampoo: preconditioners begin anew, momentum is kept", "echo next",
          also=("B11", "B3", "B6"), base=Block, optimizer=plain(Shampoo, factor=0.3), layouts=FILES,
          why="preconditioners were not restored",
          loaded=lambda self: states(self, lambda n, k, v: 1e-4 * torch.eye(len(v)) if "precond" in k else None)),
    fault("yy29_slow_weights", "B1", "Lookahead: slow weights are copied from the fast ones on load", "echo",
          also=("B11", "A2", "B6", "B3"), optimizer=plain(Lookahead, factor=10.0), schedule=lambda self, one: None,
          why="slow_buffer was not restored; it equals the weights",
          loaded=lambda self: [state(self, n).update(slow_buffer=w.detach().clone()) for n, w in named(self).items()]),
    fault("yy30_loss_summed", "B10", "after the resume the loss is summed over tokens", "early", also=("H1", "C10"),
          clip=0.0, loss=summed, loaded=stuck, why="gradients are some 70 times larger than second moments know"),
    fault("yy31_variance_alone_lost", "B4", "exp_avg_sq is zero in one group", RATED, base=Block,
          loaded=lambda self: states(self, lambda n, k, v: torch.zeros_like(v)
                                     if k == "exp_avg_sq" and v.ndim > 1 else None),
          why="exp_avg_sq was lost, exp_avg kept"),
    # ---- C
    fault("yy32_wsd_restarts", "C1", "a warm-up-stable-decay schedule begins anew", RATED, schedule=wsd,
          fresh=("scheduler",), why="the schedule restarted", also=("C2",),
          loaded=lambda self: [group.update(lr=group["initial_lr"] / 6) for group in self.optimizers[0].param_groups]),
    fault("yy33_one_cycle_first_rate", "B8", "making OneCycle anew sets lr and beta of its start; the next step is right",
          "echo next", also=("C1", "C2", "H1"), schedule=one_cycle, loaded=cycle_begins, layouts=("dcp",),
          why="the first update had the learning rate and the momentum of the cycle's start"),
    fault("yy34_schedule_per_process", "C3", "the schedule steps once a process: four times an update", "next early",
          apply=apply_fourfold, loaded=stuck, why="the schedule is stepped four times an update"),
    fault("yy35_plateau_lost", "C1", "ReduceLROnPlateau forgets its best and its counts", RATED, base=Plateau,
          fresh=("scheduler",), why="the plateau's state was not restored"),
    fault("yy36_sequential_inner", "C1", "SequentialLR: the inner cosine begins anew, the outer count is right", RATED,
          also=("C2", "C3", "B8"), schedule=sequential, loaded=inner_lost,
          why="the cosine inside restarted; the rate is back at its peak"),
    fault("yy37_decay_of_the_rest", "C4", "the schedule's length is computed from the remaining steps", RATED,
          also=("C2", "H1"), schedule=cosine, loaded=remaining, why="T_max became shorter"),
    fault("yy38_warm_restarts_lost", "C1", "CosineAnnealingWarmRestarts begins anew", RATED, also=("C2",),
          schedule=warm_restarts, loaded=restart_lost, why="the schedule restarted"),
    fault("yy39_loader_begins", "C6", "the loader's position is zero", RATED, base=Long, loaded=loader_zero,
          also=("C7",), why="the data begins anew"),
    fault("yy40_sampler_seed", "C7", "the sampler's seed is another one", RATED, base=Reading, loaded=epoch_zero,
          also=("H1",), why="the order of the data changed: another seed"),
    fault("yy41_samples_times_ranks", "C7", "consumed samples are multiplied by the ranks once more", RATED, base=Long,
          also=("C6", "C10"), loaded=samples_double, why="the position in the data jumped ahead fourfold"),
    fault("yy42_random_of_rank_0", "C8", "every rank loads rank 0's random state", RATED, base=Ranks,
          loaded=ranks_equal, why="all ranks have equal random states"),
    fault("yy43_random_seeded", "C8", "random states are seeded again on load", "echo", base=Ranks,
          loaded=ranks_seeded, why="random states were not restored"),
    fault("yy44_step_one_ahead", "C9", "the trainer resumes one step ahead of its optimizer", "echo", also=("C3",),
          loaded=step_ahead, why="the trainer's step is one more than the optimizer's"),
    fault("yy45_step_zero", "C9", "the trainer counts from 0, all else is loaded", RATED, also=("C6",),
          loaded=step_zero, layouts=FILES, why="the trainer's step is 0 while the optimizer's is not"),
    fault("yy46_scaler_new", "D8", "the scaler is new: 65536 overflows six times", "echo next", base=Scaled,
          loaded=scaler_new, why="the loss scale was reset"),
    fault("yy47_decay_ramp", "C5", "weight decay of the first update is that of the ramp's start", "echo next",
          also=("H1", "B7"), base=DecayRamp, loaded=decay_start, layouts=("dcp",),
          why="weight decay was stale (0.04) in the first update"),
    # ---- D
    fault("yy48_export_resumed", "D7", "the weights come from a bf16 export, the optimizer from the save", "echo next",
          base=Block, loaded=rounded, why="weights were rounded to bf16"),
    # ---- E
    fault("yy49_rope_interleaved", "E5", "q and k are in the interleaved order", RATED, also=("E1", "E6"),
          loaded=interleaved, why="rows of q and k are in the other rotary order"),
    fault("yy50_experts_rotated", "E10", "experts sit one rank on, routers stay", RATED, also=("E9",),
          needs={"experts": 4}, loaded=experts_rotated, why="experts were permuted without their router"),
    fault("yy51_experts_all_one", "E10", "every rank loads the first expert", RATED, also=("E9", "E12", "F1", "E1"),
          needs={"experts": 4}, loaded=experts_one, why="all experts are copies of expert 0"),
    fault("yy52_gate_up_of_ranks", "E2", "[gate; up] of two ranks joined as one", RATED, also=("E1",), base=Block,
          loaded=gate_up_joined, why="gate_up_proj's blocks are interleaved by rank"),
    fault("yy53_qkv_by_head", "E4", "fused qkv in the order of heads", RATED, also=("E1", "E6"), base=Block,
          loaded=qkv_by_head, needs={"heads": 4, "groups": 4, "hidden": 32}, why="qkv_proj is in another layout"),
    fault("yy54_gru_gates", "E1", "the gates of a GRU in Keras' order", RATED, also=("E3",), base=Gru,
          loaded=gru_gates, why="blocks of rows of the GRU are in another order"),
    fault("yy55_token_inserted", "F7", "a special token was inserted: rows from 3 on are one further", RATED,
          also=("E1",), loaded=token_added, why="rows of the vocabulary are shifted by one"),
    fault("yy56_padding_of_ranks", "E11", "padding of the vocabulary lies between the ranks' rows", RATED,
          also=("F7", "E1", "E8"), needs={"vocab": 84, "padded": 96}, loaded=padding_by_rank,
          why="vocabulary padding moved into the middle: rows behind it are shifted"),
    fault("yy57_layer_twice", "E9", "both pipeline stages load the first layer", RATED, loaded=layer_twice,
          why="layer 1 is a copy of layer 0"),
    fault("yy58_norms_summed", "E12", "norms, replicated on two ranks, were summed", RATED, loaded=norms_summed,
          why="norm weights were doubled"),
    fault("yy59_flat_state_shifted", "E7", "the flat optimizer state is five places on", RATED,
          also=("E13", "B5"), loaded=flat_shift, why="moments are shifted against the parameters"),
    fault("yy60_last_shard_unread", "E8", "the last rows of the vocabulary stay new", RATED, also=("A2", "F7"),
          loaded=tail_rows, why="the last quarter of the embedding's rows was not loaded"),
    # ---- F
    fault("yy61_average_is_the_weights", "B9", "the average is a reference to the weights", RATED,
          also=("F4", "A2", "A5"), base=Averaged, loaded=ema_is_weights,
          why="the average was lost: it equals the weights"),
    fault("yy62_average_anew", "A2", "the average is made anew from the weights on load", "echo next",
          also=("F4", "A5"), base=Averaged, loaded=ema_anew, why="the average was not restored"),
    fault("yy63_average_taken", "F4", "the average was loaded as the weights", "echo next", base=Averaged,
          loaded=ema_taken, why="the weights are the averaged ones"),
    fault("yy64_head_untied", "F2", "the head becomes a tensor of its own that the optimizer never sees", "next early",
          base=Tied, needs={"tied": True}, layouts=ONE, loaded=untied, also=("F3",),
          why="embedding and head are no longer one"),
    fault("yy65_merged_and_active", "F5", "adapters merged into the base and still active", RATED, base=Lora,
          loaded=merged_again, also=("F6",), why="the base holds the adapters' product once more"),
    fault("yy66_other_base", "F6", "adapters on another revision of the base", RATED, base=Lora, loaded=other_base,
          also=("F5",), why="the frozen base changed"),
    fault("yy67_reference_overwritten", "F6", "DPO: the reference is made from the loaded policy", "echo", base=Policy,
          loaded=reference_is_policy, also=("A2", "F4", "A5"), why="the frozen reference was replaced by the policy"),
    # ---- G
    fault("yy68_moment_nan", "G1", "a moment is NaN", RATED, also=("G3",), loaded=moment_nan,
          why="a NaN in exp_avg, which spreads"),
    fault("yy69_variance_negative", "G3", "a second moment is negative", RATED, also=("G1",),
          loaded=variance_negative, why="a second moment's sign is flipped"),
    fault("yy70_page_zero", "G5", "4096 bytes of the embedding are zero after the load", RATED, loaded=page_zero,
          why="a page of the embedding was replaced by zeros"),
    fault("yy71_torn_save", "G6", "the optimizer's state in the save is one update older than the weights", "",
          base=Torn, loaded=stuck, also=("C9",), visible=False, why="not visible: a skipped update leaves the same counters, and a later update starts from what is stored"),
    fault("yy72_save_repeated", "G7", "the saver writes the tensors of the load again", "next early", base=Repeated,
          loaded=stuck, also=("C9",), why="the later save repeats the older tensors"),
    fault("yy73_layer_of_older_save", "G6", "the first layer's weights in the later save are the older ones",
          "next early", base=HalfOld, loaded=stuck, also=("G7",),
          why="layer 0's weights are of the earlier save, its moments are not"),
    # ---- H
    fault("yy74_rope_theta", "H2", "another rope base in the resumed config", RATED, base=Told, loaded=theta,
          also=("H1",), why="rope_theta changed"),
    fault("yy75_mup_lost", "B8", "muP's width multiplier is lost: hidden matrices at the full rate", RATED, base=Mup,
          loaded=mup_lost, also=("H1", "C2"), why="the first group's learning rate is 8 times as large"),
    fault("yy76_eps_large", "H1", "eps parsed wrongly: 1e-2", RATED, also=("D10",), loaded=eps_large,
          why="eps changed to 1e-2"),
    fault("yy77_detached", "H1", "gradients of embedding and layer 0 are None after the resume", "next early",
          loaded=stuck, gradients=detached, also=("B2", "G6"),
          why="layer 0 and embedding are no longer trained"),
    # ---- sharded layouts
    st("yy80_masters_of_embedding", "D1", "masters of the vocabulary are rebuilt from bf16", "echo",
       "masters of embedding and head lost their low bits", restore=masters_embed, needs=masters,
       formats=("megatron", "deepspeed", "torch_masters", "dcp")),
    st("yy81_masters_stale", "D2", "masters are of the checkpoint before, weights are right", "echo next",
       "masters do not match the weights", restore=stale_masters, needs=masters, also=("G6",),
       formats=("megatron", "deepspeed", "torch_save")),
    st("yy82_attention_stale", "D3", "bf16 weights of attention are of the checkpoint before; masters are right",
       "echo", "16-bit weights do not match their masters", restore=stale_weights, needs=masters, also=("G6",),
       formats=("megatron", "deepspeed", "dcp")),
    st("yy83_variance_stale", "B6", "exp_avg_sq of a much older save", "echo next",
       "exp_avg and exp_avg_sq come from different saves", restore=stale_variance, also=("G6",)),
    st("yy84_moments_zero", "B3", "moments are zero, counters kept", RATED, "moments were lost, counters kept",
       restore=lambda s, lab: each(s, ("exp_avg", "exp_avg_sq"), bare, torch.zeros_like), formats=RANKS, also=("B1",)),
    st("yy85_counters_zero", "B2", "counters begin at 0, moments are kept", RATED, "counters were reset",
       restore=lambda s, lab: State(**{**s.__dict__, "step": dict.fromkeys(s.step, 0.0)})),
    st("yy86_rank_one_older", "G6", "rank 1's file is one update older", "echo next",
       "parts come from different saves", second=lambda s, lab: lab.run.previous, formats=RANKS),
    st("yy87_last_mlp_new", "A2", "the last layer's MLP was not loaded", RATED, "the last layer's mlp was not loaded",
       restore=mtp_lost, also=("A1",)),
    st("yy88_gate_and_up", "E3", "gate and up exchanged, moments too", RATED, "gate and up were swapped",
       restore=lambda s, lab: swaps(s, ALL_STATES, "gate_proj", "up_proj"), needs=lambda c: c.but(experts=0)),
    st("yy89_kv_heads", "E6", "key and value heads in reverse, query heads stay", RATED,
       "query heads are in the wrong key groups", restore=kv_heads, also=("E1", "E4"),
       needs=lambda c: c.but(heads=4, groups=2, hidden=32)),
    st("yy90_flat_partition", "E7", "ZeRO's flat partitions are two places on", RATED,
       "flat partitions are shifted against the parameters", restore=flat, also=("E13",), needs=masters,
       formats=("deepspeed", "megatron")),
    st("yy91_average_loaded", "F4", "averaged weights were loaded as weights and masters", "echo next",
       "the weights are the averaged ones", restore=from_ema, needs=lambda c: c.but(ema=True)),
    st("yy92_fp8_state", "D9", "fp8 scales and histories are new", "echo next", "fp8 extra state was lost",
       restore=no_buffers, needs=lambda c: c.but(fp8=True, experts=0), also=("A5",)),
    st("yy93_optimizer_other_map", "E13", "optimizer state of layers 0 and 1 exchanged by resharding", RATED,
       "state is resharded with another map than the weights", also=("B5", "D2"), formats=RANKS,
       restore=lambda s, lab: swaps(s, OPT if s.masters else ("exp_avg", "exp_avg_sq"), ".layers.0.", ".layers.1.")),
    st("yy94_schedule_double", "C3", "the schedule counts twice the updates", RATED, "the schedule is ahead",
       restore=lambda s, lab: s.told(scheduler=2 * s.trainer.scheduler), also=("C2",), formats=RANKS),
    st("yy95_schedule_zero", "C1", "Megatron's --finetune: the schedule begins anew", RATED, "the schedule restarted",
       restore=lambda s, lab: s.told(scheduler=0), formats=("megatron", "deepspeed", "dcp")),
    st("yy96_data_begins", "C6", "consumed samples are 0", RATED, "the data begins anew", also=("C7",),
       restore=lambda s, lab: s.told(data_index=0, samples=0, loader=0), formats=("megatron", "dcp", "torch_save")),
]  # fmt: skip


# ---- healthy, though it looks odd ------------------------------------------------------------------------------------


class Ngpt(Loop):
    """Rows of every matrix are set to length 1 after each update."""

    def apply(self) -> None:
        super().apply()
        write(self, lambda n, w: F.normalize(w, dim=1) if w.ndim == 2 else None)


class Clamped(Loop):
    """WGAN: weights are clipped after each update."""

    def apply(self) -> None:
        super().apply()
        write(self, lambda n, w: w.clamp(-0.3, 0.3) if w.ndim == 2 else None)


class Pruned(Loop):
    """Half of each matrix of the MLP is masked to zero."""

    def apply(self) -> None:
        super().apply()
        for name, w in self.module.named_parameters():
            if ".mlp." in name:
                w.data[:, ::2] = 0


class Dropped(Loop):
    """Stochastic depth: a layer in turn gets no gradient at all."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if f".layers.{self.step % 3}." in name:
                weight.grad = None
        super().gradients()


class Spiky(Loop):
    """One batch in twelve has gradients a hundred times as large."""

    clip = 0.0

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(tokens) * (100.0 if self.step % 12 == 5 else 1.0)


class Target(Loop):
    """A target network: copied from the weights every ten updates."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["target_model"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if self.step % 10 == 9:
            self.extra["target_model"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


class Unfreezing(Loop):
    """Gradual unfreezing: another part every fifteen updates."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if ("embed" in name and self.step < 30) or (".layers.0." in name and self.step < 15):
                weight.grad = None
        super().gradients()


class Upcycled(Loop):
    """Experts begin as copies of one."""

    def net(self) -> nn.Module:
        found = Decoder(self.config)
        held = dict(found.named_parameters())
        with torch.no_grad():
            for name, weight in held.items():
                if ".experts." in name:
                    head, _, rest = name.partition(".experts.")
                    weight.copy_(held[f"{head}.experts.0.{rest.split('.', 1)[1]}"])
        return found


class Lazy(Loop):
    """Rows of the embedding that a batch lacks are not touched, nor their moments (SparseAdam)."""

    def apply(self) -> None:
        weight = named(self)["model.embed_tokens.weight"]
        idle = weight.grad.abs().sum(1) == 0
        table = self.optimizers[0].state.get(weight, {})
        kept = [t.clone() for t in (weight.data, *(table[k] for k in ("exp_avg", "exp_avg_sq") if k in table))]
        super().apply()
        table = self.optimizers[0].state[weight]
        for target, old in zip((weight.data, table["exp_avg"], table["exp_avg_sq"]), kept, strict=False):
            target[idle] = old[idle]


class Nothing(Loop):
    """Overflow after overflow: updates are skipped most of the time."""

    def apply(self) -> None:
        if self.step % 5 in (0, 3):
            super().apply()
        else:
            for schedule in self.schedules:
                schedule.step()


class Batched(Loop):
    """The batch grows along the run, as Megatron's ramp-up."""

    def tokens(self) -> torch.Tensor:
        return super().tokens()[: 1 + min(3, self.step // 12)]


class Whole(Loop):
    """The average of the whole run, plainly: SWA with its count."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["swa"] = {n: torch.zeros_like(w) for n, w in self.module.named_parameters()}
        self.extra["n_averaged"] = 0

    def apply(self) -> None:
        super().apply()
        if self.step >= 10 and self.step % 4 == 0:
            self.extra["n_averaged"] += 1
            for n, w in self.module.named_parameters():
                self.extra["swa"][n].lerp_(w.detach(), 1 / self.extra["n_averaged"])


def sharp_drop(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return TORCH.lr_scheduler.MultiStepLR(optimizer, [12, 24, 36, 48, 60], gamma=0.3)


def mixed_groups(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return MixedState([{"params": g["params"]} for g in groups], lr=self.config.lr)


def rounding_groups(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return Rounding([{"params": g["params"]} for g in groups], lr=self.config.lr)


def bf16(self: Loop) -> nn.Module:
    return Decoder(self.config).to(torch.bfloat16)


OPENED11_LIVE += [
    variant("yyh01_gru_rmsprop", "a GRU by RMSprop", base=Gru, optimizer=optim(TORCH.RMSprop, factor=0.3, momentum=0.9)),
    variant("yyh02_batch_norm", "a convolutional net with running statistics, SGD", base=Conv,
            optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9)),
    variant("yyh03_aux_free_routing", "expert biases move by a fixed step", base=Balanced, needs={"experts": 4}),
    variant("yyh04_mup", "muP: groups with rates of their own", base=Mup),
    variant("yyh05_layer_rates", "a rate a layer", base=Layered),
    variant("yyh06_sequential", "SequentialLR", schedule=sequential, layouts=FILES),
    variant("yyh07_warm_restarts", "warm restarts: the rate jumps to its peak", schedule=warm_restarts),
    variant("yyh08_plateau", "ReduceLROnPlateau", base=Plateau),
    variant("yyh09_average", "an average whose decay warms up", base=Averaged),
    variant("yyh10_lora", "adapters, frozen base", base=Lora),
    variant("yyh11_wsd", "warm-up, stable, decay", schedule=wsd),
    variant("yyh12_unfreezing", "gradual unfreezing", base=Unfreezing),
    variant("yyh13_stochastic_depth", "layers without gradient in turn", base=Dropped),
    variant("yyh14_spikes", "a batch in twelve with huge gradients", base=Spiky, true=("H3", "B10")),
    variant("yyh15_stochastic_rounding", "bf16 weights, stochastic rounding", optimizer=rounding_groups, net=bf16,
            layouts=FILES),
    variant("yyh16_lazy_rows", "rows of idle tokens are not touched", base=Lazy),
    variant("yyh17_ngpt", "rows are normalised after each update", base=Ngpt),
    variant("yyh18_clamped", "weights are clipped after each update", base=Clamped,
            optimizer=optim(TORCH.RMSprop, factor=0.3)),
    variant("yyh19_pruned", "masked weights are set to zero after each update", base=Pruned),
    variant("yyh20_target_network", "a target network, copied every ten updates", base=Target),
    variant("yyh21_dpo", "a frozen reference beside the policy", base=Policy),
    variant("yyh22_rank_randoms", "random states of four ranks", base=Ranks),
    variant("yyh23_scaler_comes_down", "a scale that backs off at the start", base=Scaled),
    variant("yyh24_epochs", "a loader whose position begins anew each epoch", base=Reading),
    variant("yyh25_shampoo", "Shampoo", base=Block, optimizer=plain(Shampoo, factor=0.3), layouts=FILES),
    variant("yyh26_lookahead", "weights return to slow ones", optimizer=plain(Lookahead, factor=10.0),
            schedule=lambda self, one: None),
    variant("yyh27_mostly_skipped", "three of five updates are skipped, the schedule counts all", base=Nothing),
    variant("yyh28_batch_ramp", "the batch grows", base=Batched),
    variant("yyh29_swa", "averaged weights with their count", base=Whole),
    variant("yyh30_upcycled", "experts that began as copies", base=Upcycled, needs={"experts": 4}),
    variant("yyh31_multi_step", "a rate that drops to a third every twelve updates", schedule=sharp_drop,
            optimizer=optim(TORCH.Adam)),
    variant("yyh32_bf16_with_masters", "bf16 weights beside fp32 masters in the optimizer's state",
            optimizer=mixed_groups, net=bf16, layouts=FILES),
    variant("yyh33_decay_ramp", "weight decay along a schedule", base=DecayRamp),
]  # fmt: skip


# ---- on purpose ------------------------------------------------------------------------------------------------------


def rate_up(self: Any) -> None:
    self.schedules[0].base_lrs = [3 * lr for lr in self.schedules[0].base_lrs]
    for group in self.optimizers[0].param_groups:
        group["lr"] *= 3
        group["initial_lr"] *= 3


def frozen_now(self: Any) -> None:
    self.resumed = True


def two_ranks(self: Any) -> None:
    self.extra["rng_states"] = self.extra["rng_states"][:2]


def longer(self: Any) -> None:
    self.schedules[0].T_max *= 3


def no_decay(self: Any) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.3 if group["weight_decay"] else 0.0


def thawed(self: Any) -> None:
    held = [w for w in self.module.parameters() if not w.requires_grad]
    for weight in held:
        weight.requires_grad_(True)
    self.optimizers[0].add_param_group({"params": held, "weight_decay": 0.0, "initial_lr": self.config.lr})
    schedule = self.schedules[0]
    schedule.base_lrs.append(self.config.lr)
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])


def to_lion(self: Any) -> None:
    self.optimizers = [other.Lion([{"params": list(self.module.parameters())}], lr=self.config.lr / 5)]
    self.schedules = [self.schedule(self.optimizers[0])]


def new_corpus(self: Any) -> None:
    self.extra["dataloader"] = {"epoch": 0, "batch": 0, "consumed_samples": 0, "seed": 4321}


def larger_batch(self: Any) -> None:
    self.config = self.config.but(batch=2 * self.config.batch)


def average_begun(self: Any) -> None:
    self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


OPENED11_LIVE += [
    variant("yyd01_rate_tripled", "the operator triples the rate", kind="deliberate", loaded=rate_up,
            true=("H1", "C2"), why="true: the rate is three times as large"),
    variant("yyd02_layer_frozen", "embedding and a layer are frozen from now on", kind="deliberate",
            loaded=frozen_now, gradients=detached, true=("H1",), why="true: they are no longer trained"),
    variant("yyd03_world_size", "two ranks instead of four", base=Ranks, kind="deliberate", loaded=two_ranks,
            true=("H1", "C8"), why="true: random states of two ranks"),
    variant("yyd04_longer", "the run is made longer: three times T_max", kind="deliberate", schedule=cosine,
            loaded=longer, true=("H1", "C4", "C2"), why="true: the schedule's length changed"),
    variant("yyd05_decay", "another weight decay", kind="deliberate", loaded=no_decay, true=("H1",),
            why="true: weight decay changed"),
    variant("yyd06_thawed", "frozen layers are trained from now on", base=Frozen, kind="deliberate", layouts=FILES,
            loaded=thawed, true=("H1",), why="true: a group was added"),
    variant("yyd07_to_lion", "AdamW is replaced by Lion", kind="deliberate", layouts=FILES,
            loaded=to_lion, true=("H1", "B1", "C1"), why="true: the optimizer is another one and new"),
    variant("yyd08_new_corpus", "other data from its beginning", base=Reading, kind="deliberate", loaded=new_corpus,
            true=("H1", "C6", "C7"), why="true: the data is another one and begins anew"),
    variant("yyd09_batch_doubled", "the batch is doubled", base=Long, kind="deliberate", loaded=larger_batch,
            true=("H1", "C10"), why="true: more samples an update"),
    variant("yyd10_average_begun", "an average is kept from now on", kind="deliberate", loaded=average_begun,
            true=("H1", "A4"), why="true: averaged weights were added"),
]  # fmt: skip
