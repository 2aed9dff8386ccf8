"""Training loops in plain torch of the third sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR

from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Experts, Tied, muon, one_cycle, optim, plain
from tests.lab.opened2_live import (
    ByHand,
    Filtered,
    Mastered,
    Newton,
    Referred,
    ademamix,
    called,
    changed,
    cumulative,
    exchange,
    lambdas,
    marked,
    mars,
    moments,
    normed_spectrum,
    pruned,
    set_to,
    state_of,
    two_norms,
    unscheduled,
    wide_table,
)
from tests.lab.opened_live import (
    Averaged,
    Looking,
    Noisy,
    Normed,
    Rival,
    kahan,
    layerwise,
    lost,
    net,
    ruled,
    shampoo,
    transformer,
    turned,
    zeros,
)
from tests.lab.optimizers import AdamW8bit, Lion, Prodigy, ScheduleFreeAdamW, StableAdamW

__all__ = ["OPENED3_LIVE"]

Tensor = torch.Tensor
Held = dict[str, Any]
TORCH, RATES = torch.optim, torch.optim.lr_scheduler


# ---- optimizers ------------------------------------------------------------------------------------------------------


def soap(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """nikhilvyas/SOAP: Adam in the eigenbases of Shampoo's factors, which are renewed now and then."""
    if w.ndim > 1:
        if "GG" not in state:
            state["GG"] = [torch.zeros(len(w), len(w)), torch.zeros(w.shape[1], w.shape[1])]
        for factor, new in zip(state["GG"], (g @ g.T, g.T @ g), strict=True):
            factor.lerp_(new, 1 - group["shampoo_beta"])
        if state["step"] % group["frequency"] == 0:
            state["Q"] = [torch.linalg.eigh(factor)[1] for factor in state["GG"]]
        left, right = state["Q"]
        first, under = moments(left.T @ g @ right, state, group)
        step = left @ (first / under) @ right.T
    else:
        first, under = moments(g, state, group)
        step = first / under
    w.sub_(step, alpha=group["lr"])


def sm3(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """google-research/sm3: one sum a row and one a column."""
    sums = [state.setdefault(f"accumulator_{axis}", torch.zeros(size)) for axis, size in enumerate(w.shape)]
    over = sums[0] if w.ndim < 2 else torch.minimum(sums[0][:, None], sums[1])
    over = over + g * g
    for axis in range(w.ndim):
        state[f"accumulator_{axis}"] = over if w.ndim < 2 else over.amax(1 - axis)
    state["momentum_buffer"].lerp_(g / over.sqrt().clamp(min=1e-30), 1 - group["momentum"])
    w.add_(state["momentum_buffer"], alpha=-group["lr"])


def ranger(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """lessw2020/Ranger: slow weights within the optimizer."""
    slow = state.setdefault("slow_buffer", w.clone())
    first, under = moments(g, state, group)
    w.addcdiv_(first, under, value=-group["lr"])
    if int(state["step"]) % group["k"] == 0:
        w.copy_(slow.lerp_(w, group["alpha"]))


def without_eps(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Adam by an arc tangent instead of a division."""
    a, b = group["betas"]
    state["step"] += 1
    t = int(state["step"])
    state["exp_avg"].lerp_(g, 1 - a)
    state["exp_avg_sq"].mul_(b).addcmul_(g, g, value=1 - b)
    w.sub_(torch.atan2(state["exp_avg"] / (1 - a**t), (state["exp_avg_sq"] / (1 - b**t)).sqrt()), alpha=group["lr"])


def of_tensorflow(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """timm's RMSpropTF: squares begin at 1, eps is under the root, the lr within the momentum."""
    state["square_avg"].lerp_(g * g, 1 - group["alpha"])
    state["momentum_buffer"].mul_(group["momentum"])
    state["momentum_buffer"].addcdiv_(g, (state["square_avg"] + group["eps"]).sqrt(), value=group["lr"])
    w.sub_(state["momentum_buffer"])


def followed(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """FTRL-proximal: the weight is what two sums say."""
    old = state["n"].sqrt()
    state["n"].addcmul_(g, g)
    state["z"].add_(g - (state["n"].sqrt() - old) / group["alpha"] * w)
    w.copy_(-state["z"] * group["alpha"] / state["n"].sqrt())


def begins_followed(w: Tensor) -> Held:
    return {"n": torch.full_like(w, 0.04), "z": -w * 0.2 / 0.01}


def grams(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Adam's size, the gradient's sign."""
    first, under = moments(g, state, group)
    w.sub_((first / under).abs() * g.sign(), alpha=group["lr"])


def clipped_to_size(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Adam whose step is never larger than one on the mean."""
    first, under = moments(g, state, group)
    step = first / under
    w.sub_(step / max(1.0, float(step.pow(2).mean().sqrt()) / group["threshold"]), alpha=group["lr"])


def eight_bit_lion(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Lion whose average is codes and one largest magnitude a row."""
    a, b = group["betas"]
    size = state["absmax1"][..., None] if w.ndim > 1 else state["absmax1"]
    average = state["state1"].float() / 127 * size
    w.sub_((average * a + g * (1 - a)).sign(), alpha=group["lr"])
    average = average * b + g * (1 - b)
    size = average.abs().amax(-1, keepdim=w.ndim > 1).clamp(min=1e-30)
    state["state1"] = (average / size * 127).round().to(torch.int8)
    state["absmax1"] = size[..., 0] if w.ndim > 1 else size


def begins_eight_bit(w: Tensor) -> Held:
    return {
        "state1": torch.zeros(w.shape, dtype=torch.int8),
        "absmax1": torch.full(w.shape[:-1] if w.ndim > 1 else (), 1e-30),
    }  # fmt: skip


def wide_moments(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Moments of 64 bits, weights of 32."""
    first, under = moments(g.double(), state, group)
    w.sub_((first / under).float(), alpha=group["lr"])


ADAM = {"betas": (0.9, 0.98), "eps": 1e-8}
M_V = ("exp_avg", "exp_avg_sq")


def held_directions(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """GaLore whose directions are those of the first gradient."""
    if w.ndim > 1:
        if "projector" not in state:
            state["projector"] = torch.linalg.svd(g, full_matrices=False)[2][: group["rank"]].contiguous()
        g = g @ state["projector"].T
    for name in M_V:
        state.setdefault(name, torch.zeros_like(g))
    first, under = moments(g, state, group)
    step = first / under
    w.sub_(step @ state["projector"] if w.ndim > 1 else step, alpha=group["lr"])


def three_kinds(self: Loop) -> list[torch.optim.Optimizer]:
    """SGD for the tables, Lion for matrices, Adam for vectors."""
    named, lr = dict(self.module.named_parameters()), self.config.lr
    tables = [w for n, w in named.items() if "embed" in n or "lm_head" in n]
    rest = [w for n, w in named.items() if "embed" not in n and "lm_head" not in n]
    return [
        TORCH.SGD(tables, lr=10 * lr, momentum=0.9), Lion([w for w in rest if w.ndim > 1], lr=0.2 * lr),
        TORCH.Adam([w for w in rest if w.ndim < 2], lr=lr),
    ]  # fmt: skip


# ---- models ----------------------------------------------------------------------------------------------------------


class Waves(nn.Module):
    """A matrix of complex numbers, one number, and a parameter without elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat) / width**0.5)
        self.scale, self.spare = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (x.to(torch.cfloat) @ self.mix).real + self.spare.sum()


class Crossed(nn.Module):
    """Attention whose keys and values have widths of their own, with learned ones added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, 10)
        self.attention = nn.MultiheadAttention(width, 2, kdim=10, vdim=10, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        other = self.narrow(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attention(x, other, other, attn_mask=mask, need_weights=False)[0]


class Counting(nn.Module):
    """A layer with a counter, a table of whole numbers and a mask among its buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.slope = nn.Bilinear(width, width, width), nn.PReLU(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.randperm(width))
        self.register_buffer("usage", torch.zeros(width, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.slope((x + self.inner(x, x[..., self.order]) / 24).transpose(1, 2)).transpose(1, 2)
        self.usage += (y.detach() > 0).float().mean((0, 1)).half()
        return y


class Low(nn.Module):
    """Matrices as products of narrow ones, the first of which is never trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 6, bias=False), nn.Linear(6, width, bias=False)
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(3)])
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = x + gate * torch.tanh(self.up(self.down(x)))
        return x


def recurrent(width: int) -> nn.Module:
    return nn.RNN(width, width, 2, batch_first=True, dropout=0.1)


def transposed(width: int) -> nn.Module:
    class Turned(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)

    return Turned(nn.ConvTranspose1d(width, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv1d(16, width, 1))


class Taught(nn.Module):
    """A net and one that follows it, both among the weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.online, self.target = Decoder(config), Decoder(config)
        self.target.requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        own, other = (dict(one.named_parameters())["model.norm.weight"] for one in (self.online, self.target))
        return self.online(tokens)[0] + 0.1 * (own - other).pow(2).sum(), None


# ---- loops -----------------------------------------------------------------------------------------------------------


class Following(Loop):
    """A teacher that is a moving average of its pupil."""

    def net(self) -> nn.Module:
        return Taught(self.config)

    def apply(self) -> None:
        super().apply()
        assert isinstance(self.module, Taught)
        with torch.no_grad():
            for mine, other in zip(self.module.target.parameters(), self.module.online.parameters(), strict=True):
                mine.lerp_(other, 0.05)


class Compressed(Loop):
    """Gradients of one bit; what was not sent is added to the next ones."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["worker_error"] = {name: torch.zeros_like(w) for name, w in self.module.named_parameters()}

    def gradients(self) -> None:
        super().gradients()
        for name, weight in self.module.named_parameters():
            if weight.grad is not None:
                whole = weight.grad + self.extra["worker_error"][name]
                weight.grad = whole.sign() * whole.abs().mean()
                self.extra["worker_error"][name] = whole - weight.grad


class Delayed(Loop):
    """Each update is made with the gradient of the one before."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["waiting"] = {name: torch.zeros_like(w) for name, w in self.module.named_parameters()}

    def gradients(self) -> None:
        super().gradients()
        for name, weight in self.module.named_parameters():
            if weight.grad is not None:
                new = weight.grad.clone()
                weight.grad = self.extra["waiting"][name].clone()
                self.extra["waiting"][name] = new


class Anchored(Loop):
    """Weights are drawn back to where they began, which is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["anchor"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def loss(self, tokens: Tensor) -> Tensor:
        away = sum((w - self.extra["anchor"][name]).pow(2).sum() for name, w in self.module.named_parameters())
        return super().loss(tokens) + 1e-2 * away


class Spheres(Loop):
    """Rows of every matrix have length one after each update."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for weight in self.module.parameters():
                if weight.ndim > 1:
                    weight.copy_(F.normalize(weight, dim=1))


class Thinned(Loop):
    """Each update trains a tenth of the rows, by chance."""

    def gradients(self) -> None:
        super().gradients()
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.grad *= (torch.rand(len(weight)) < 0.1).float().view(-1, *[1] * (weight.ndim - 1))


class Centred(Loop):
    """The mean of each row is taken out of the gradient, which is then scaled to the weight."""

    def gradients(self) -> None:
        for weight in self.module.parameters():
            if weight.grad is not None and weight.ndim > 1:
                weight.grad -= weight.grad.mean(1, keepdim=True)
                weight.grad *= 0.01 * weight.detach().norm() / weight.grad.norm().clamp(min=1e-12)


class Halved(Loop):
    """A moving average in 16 bits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: w.detach().half() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        for name, weight in self.module.named_parameters():
            old = self.extra["ema"][name].float()
            self.extra["ema"][name] = old.lerp(weight.detach(), 0.1).half()


class Trailing(Looking):
    """Slow weights that follow every five updates, and are not given back."""

    def apply(self) -> None:
        Loop.apply(self)
        if self.step % 5 == 4:
            for name, weight in self.module.named_parameters():
                self.extra["slow"][name].lerp_(weight.detach(), 0.5)


class Chanced(Mastered):
    """bf16 weights that are rounded from their masters by chance."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                bits = self.copies[name].detach().view(torch.int32) + torch.randint(0, 1 << 16, weight.shape).int()
                weight.copy_((bits & -65536).view(torch.float32).bfloat16())


class Skipping(Loop):
    """The schedule moves on where an update is left out."""

    def gradients(self) -> None:
        super().gradients()
        self.out = self.step % 5 == 2

    def apply(self) -> None:
        if not self.out:
            self.optimizers[0].step()
        self.schedules[0].step()


class Seldom(Loop):
    """The embedding is trained by every fourth update alone."""

    def gradients(self) -> None:
        if self.step % 4:
            for name, weight in self.module.named_parameters():
                if "embed" in name:
                    weight.grad = None
        super().gradients()


class Resetting(Loop):
    """The optimizer's state is dropped every few updates, on purpose."""

    def apply(self) -> None:
        if self.step % 9 == 8:
            for optimizer in self.optimizers:
                optimizer.state.clear()
        super().apply()


class Rising(ByHand):
    """The loop sets the next update's weight decay after each update."""

    def wanted(self, group: Held) -> None:
        pass

    def apply(self) -> None:
        super().apply()
        for group in self.optimizers[0].param_groups:
            group["weight_decay"] = 0.05 + 0.005 * (self.step + 1)


class Laden(Loop):
    """A loop that may write another model's weights beside its own."""

    layouts = ("torch_save", "folder", "lightning")
    resumed = False

    def weights(self) -> Held:
        own = super().weights()
        more = {f"teacher.{name}": tensor.clone() for name, tensor in own.items()} if self.resumed else {}
        return own | more


class Grown(Loop):
    """A copy of the last layer is put on top; the optimizer begins anew."""

    layouts = ("torch_save", "folder", "lightning")
    fresh = ("optimizer",)

    def take(self, weights: Held) -> None:
        last = self.config.layers - 1
        more = {n.replace(f".{last}.", f".{last + 1}."): w.clone() for n, w in weights.items() if f".{last}." in n}
        self.config = self.config.but(layers=self.config.layers + 1)
        self.module = Decoder(self.config)
        self.module.load_state_dict(weights | more)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


# ---- schedules -------------------------------------------------------------------------------------------------------


def waves(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    """A cosine that goes up again."""
    return RATES.CosineAnnealingLR(optimizer, 13, self.config.lr / 20)


def multiplied(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return RATES.MultiplicativeLR(optimizer, lambda n: 0.97 if n % 3 else 1.05)


def long_cycle(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return RATES.CosineAnnealingWarmRestarts(optimizer, 70, 1, self.config.lr / 50)


def averaging(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return SWALR(optimizer, swa_lr=self.config.lr / 10, anneal_epochs=25)


def two_parts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    """A warm-up, then a cosine by its own count."""
    wave = RATES.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(n / 40))
    return RATES.SequentialLR(optimizer, [RATES.LinearLR(optimizer, 0.1, total_iters=5), wave], [5])


# ---- faults ----------------------------------------------------------------------------------------------------------


def estimate_anew(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"d": group["d0"], "d_max": group["d0"], "d_numerator": 0.0, "k": 0}


def groups_set(**values: Any) -> Callable[[Loop], None]:
    """For `Loop.loaded`: every param group has these."""

    def loaded(self: Loop) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group |= values

    return loaded


def all_lost(self: Loop) -> None:
    for optimizer in self.optimizers:
        optimizer.state.clear()


def map_of_signed(self: Loop) -> None:
    for state in state_of(self):
        if "qmap2" in state:
            state["qmap2"] = state["qmap1"].clone()


def preconditioners_anew(self: Loop) -> None:
    for state in state_of(self):
        for name in [name for name in state if "precond" in name]:
            state[name] = 1e-2 * torch.eye(len(state[name]))


def bases_anew(self: Loop) -> None:
    for state in state_of(self):
        if "Q" in state:
            state["Q"] = [torch.eye(len(basis)) for basis in state["Q"]]


def from_policy(self: Loop) -> None:
    """The reference is a copy of what is trained, taken at the resume."""
    self.extra["target"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}


def teacher_anew(self: Loop) -> None:
    assert isinstance(self.module, Taught)
    self.module.target.load_state_dict(self.module.online.state_dict())


def average_in_halves(self: Loop) -> None:
    self.extra["ema"] = {name: tensor.half().float() for name, tensor in self.extra["ema"].items()}


def slow_for_weights(self: Loop) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            weight.copy_(self.extra["slow"][name])


def untied(self: Loop) -> None:
    """The head is made a tensor of its own, which the optimizer does not hold."""
    assert isinstance(self.module, Decoder)
    table = dict(self.module.named_parameters())["model.embed_tokens.weight"]
    self.module.put("lm_head.weight", nn.Parameter(table.detach().clone()))


def counts_anew(self: Loop) -> None:
    for name, buffer in self.module.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.zero_()


def statistics_exchanged(self: Loop) -> None:
    held = dict(self.module.named_buffers())
    for name in [name for name in held if "inner.0.norm.running" in name]:
        first, second = held[name], held[name.replace("inner.0.", "inner.1.")]
        old = first.clone()
        first.copy_(second)
        second.copy_(old)


def rates_exchanged(self: Loop) -> None:
    """Each of two schedules, and each group, has the other's lr."""
    one, two = self.schedules
    one.base_lrs, two.base_lrs = two.base_lrs, one.base_lrs
    first, second = (optimizer.param_groups[0] for optimizer in self.optimizers)
    for name in ("lr", "initial_lr"):
        first[name], second[name] = second[name], first[name]


def layers_reversed(self: Loop) -> None:
    """Groups of the layers have each other's settings."""
    (schedule,), groups = self.schedules, self.optimizers[0].param_groups
    schedule.base_lrs = schedule.base_lrs[::-1]
    for name in ("lr", "initial_lr", "weight_decay"):
        for group, value in zip(groups, [group[name] for group in groups][::-1], strict=True):
            group[name] = value


def no_decay_of_tables(self: Loop) -> Groups:
    """Tables and vectors do not decay."""
    named = list(self.module.named_parameters())
    flat = [w for n, w in named if w.ndim < 2 or "embed" in n or "lm_head" in n]
    inner = [w for n, w in named if not (w.ndim < 2 or "embed" in n or "lm_head" in n)]
    return [{"params": inner, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]


def tables_decay(self: Loop) -> None:
    inner, flat = self.optimizers[0].param_groups
    moved = [w for w in flat["params"] if w.ndim > 1]
    inner["params"] = [*inner["params"], *moved]
    flat["params"] = [w for w in flat["params"] if w.ndim < 2]


def decay_of_start(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.0


def lr_of_start(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def longer_cycle(self: Loop) -> None:
    (schedule,) = self.schedules
    schedule.total_steps *= 2
    for phase in schedule._schedule_phases:
        phase["end_step"] = 2 * phase["end_step"] + 1


def cycle_anew(self: Loop) -> None:
    self.schedules[0].T_cur = 0


def inner_anew(self: Loop) -> None:
    """Of a sequence of schedules the last one counts from 0 again."""
    last = self.schedules[0]._schedulers[-1]
    last.last_epoch, last._step_count = 0, 1


def other_masks(mask: Tensor) -> Tensor:
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(11))
    return mask.flatten()[order].view(mask.shape)


def other_vector(vector: Tensor) -> Tensor:
    return F.normalize(torch.randn(vector.shape, generator=torch.Generator().manual_seed(12)), dim=0)


def row_of_padding(table: Tensor) -> Tensor:
    table[3] = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(13))
    return table


def one_groups_defaults(self: Loop) -> None:
    self.optimizers[0].param_groups[1] |= {"betas": (0.7, 0.9), "eps": 1e-6}


def table_lost(self: Loop) -> None:
    state = self.optimizers[0].state[dict(self.module.named_parameters())["model.embed_tokens.weight"]]
    state |= {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def each_part(self: Any) -> None:
    """For `Loop.apply`: after the resume the schedule is stepped for every micro-batch."""
    Loop.apply(self)
    for _ in range(self.parts - 1 if getattr(self, "resumed", False) else 0):
        self.schedules[0].step()


def smoothed(self: Any, tokens: Tensor) -> Tensor:
    """Half a loss more of something else, after the resume; it pulls all logits together."""
    found = Loop.loss(self, tokens)
    if not getattr(self, "resumed", False):
        return found
    head = next(w for n, w in reversed(list(self.module.named_parameters())) if "embed" in n or "lm_head" in n)
    return found + 1e-3 * head.pow(2).sum()


def halved_sums(self: Loop) -> None:
    """What two ranks held alike was averaged as if one of them had nothing."""
    for state in state_of(self):
        state["sum"] = state["sum"] / 2


def moments_of_experts(self: Loop) -> None:
    """Experts' averages handed on to the next expert of the layer."""
    named = dict(self.module.named_parameters())
    states = self.optimizers[0].state
    for side in ("gate", "up", "down"):
        for layer in range(self.config.layers):
            names = [f"model.layers.{layer}.mlp.experts.{e}.{side}_proj.weight" for e in range(self.config.experts)]
            held = [states[named[name]] for name in names if named[name] in states]
            old = [copy.deepcopy(state) for state in held]
            for state, other in zip(held, [*old[1:], *old[:1]], strict=True):
                state |= other


# ---- on purpose ------------------------------------------------------------------------------------------------------


def fewer_steps(self: Loop) -> None:
    (schedule,) = self.schedules
    schedule.base_lrs = [0.5 * lr for lr in schedule.base_lrs]
    self.clip = 0.2


def other_beta_of_sgd(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"momentum": 0.5, "nesterov": True}


def by_sgd(self: Loop) -> None:
    self.optimizers = [TORCH.SGD(self.module.parameters(), lr=0.05, momentum=0.9)]
    self.schedules = [self.schedule(self.optimizers[0])]


def head_anew(self: Loop) -> None:
    """The head is begun anew on purpose, with new state."""
    head = dict(self.module.named_parameters())["lm_head.weight"]
    with torch.no_grad():
        head.copy_(0.02 * torch.randn(head.shape, generator=torch.Generator().manual_seed(21)))
    self.optimizers[0].state.pop(head)


def average_restarts(self: Loop) -> None:
    self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}
    self.extra["ema_updates"] = 0


ECHO = "echo next early"
LOUD = "alone echo next early"
SOON = "alone echo next"
BRIEF = "echo next"
LATER = "next early"
PLAIN: Any = {"layouts": ("torch_save", "folder", "lightning")}
BARE: Any = {"layouts": ("torch_save", "lightning")}
DCP: Any = {"layouts": ("dcp",)}
SGD = optim(TORCH.SGD, factor=20.0, momentum=0.9)

WELL = [
    variant("m30_soap", "SOAP", optimizer=optim(ruled(
        zeros(*M_V, step=0), soap, shampoo_beta=0.95, frequency=10, **ADAM)), **BARE),
    variant("m31_sm3", "SM3", optimizer=optim(ruled(zeros("momentum_buffer"), sm3, momentum=0.9)), **PLAIN),
    variant("m32_ranger", "Ranger", optimizer=optim(ruled(zeros(*M_V, step=0), ranger, k=6, alpha=0.5, **ADAM)),
            **PLAIN),
    variant("m33_without_eps", "Adam by an arc tangent", optimizer=optim(ruled(
        zeros(*M_V, step=0), without_eps, betas=(0.9, 0.98)))),
    variant("m34_of_tensorflow", "RMSprop in TensorFlow's way", optimizer=optim(ruled(
        lambda w: {"square_avg": torch.ones_like(w), "momentum_buffer": torch.zeros_like(w)}, of_tensorflow,
        alpha=0.9, eps=1e-10, momentum=0.9), factor=0.5), **PLAIN),
    variant("m35_followed", "FTRL", optimizer=optim(ruled(begins_followed, followed, alpha=0.01)),
            schedule=unscheduled, **PLAIN),
    variant("m36_grams", "Adam's size, the gradient's sign", optimizer=optim(ruled(
        zeros(*M_V, step=0), grams, **ADAM))),
    variant("m37_clipped_to_size", "Adam with steps of bounded size", optimizer=optim(ruled(
        zeros(*M_V, step=0), clipped_to_size, threshold=0.3, **ADAM)), **PLAIN),
    variant("m38_eight_bit_lion", "Lion in eight bits", optimizer=optim(ruled(
        begins_eight_bit, eight_bit_lion, betas=(0.9, 0.99)), factor=0.2), **PLAIN),
    variant("m39_wide_moments", "moments of 64 bits", optimizer=optim(ruled(
        lambda w: {"step": 0, "exp_avg": torch.zeros(w.shape).double(), "exp_avg_sq": torch.zeros(w.shape).double()},
        wide_moments, **ADAM)), **PLAIN),
    variant("m40_three_kinds", "SGD, Lion and Adam in one run", made=three_kinds, **BARE),
    variant("m41_foreach", "Adam, foreach, amsgrad, maximised", optimizer=optim(
        TORCH.Adam, foreach=True, amsgrad=True, maximize=True), loss=lambda self, tokens: -Loop.loss(self, tokens)),
    variant("m42_adagrad_decays", "Adagrad from a start, its lr decays", optimizer=optim(
        TORCH.Adagrad, factor=4.0, lr_decay=0.01, initial_accumulator_value=0.1)),
    variant("m43_adadelta", "Adadelta of a long memory", optimizer=optim(TORCH.Adadelta, factor=200.0, rho=0.99)),
    variant("m44_bare_rmsprop", "RMSprop without momentum", optimizer=optim(TORCH.RMSprop, factor=0.3), **DCP),
    variant("m45_muon_decays", "Muon with decay, in a distributed checkpoint", made=muon, parts=2, **DCP),
    variant("m46_following", "a teacher among the weights", base=Following),
    variant("m47_compressed", "gradients of one bit", base=Compressed),
    variant("m48_delayed", "gradients an update late", base=Delayed),
    variant("m49_anchored", "drawn back to the begin", base=Anchored),
    variant("m50_spheres", "rows of length one", base=Spheres),
    variant("m51_thinned", "a tenth of the rows an update", base=Thinned),
    variant("m52_centred", "gradients without their mean, scaled to the weights", base=Centred, clip=0.0),
    variant("m53_halved_average", "an average in 16 bits", base=Halved),
    variant("m54_chanced", "bf16 rounded from masters by chance", base=Chanced, true=("D2", "D3")),
    variant("m55_skipping", "the schedule does not wait for left out updates", base=Skipping, true=("C3", "C9")),
    variant("m56_seldom", "a table that is trained now and then", base=Seldom, **DCP),
    variant("m57_rising", "weight decay that rises", base=Rising, true=("H1",), why="true: weight decay changed"),
    variant("m58_waves", "a cosine up and down", schedule=waves),
    variant("m59_multiplied", "an lr times something each update", schedule=multiplied),
    variant("m60_averaging", "the lr of weight averaging", schedule=averaging),
    variant("m61_pauses", "phases without any lr", schedule=lambdas(lambda n, group: float(n % 12 < 8))),
    variant("m62_two_parts", "a warm-up, then a cosine with a count of its own", schedule=two_parts),
    variant("m63_complex", "complex numbers, a number, an empty parameter", net=net(Waves), layouts=("torch_save",)),
    variant("m64_crossed", "attention of several widths", net=net(Crossed)),
    variant("m65_counting", "buffers of whole and of half numbers", net=net(Counting), **BARE),
    variant("m66_low", "frozen factors, a list of gains", net=net(Low), optimizer=optim(TORCH.NAdam)),
    variant("m67_recurrent", "a recurrent net with dropout", net=net(recurrent), optimizer=optim(TORCH.RAdam)),
    variant("m68_transposed", "transposed convolutions by SGD", net=net(transposed), optimizer=SGD, **DCP),
]  # fmt: skip

MEANT = [
    variant("p10_resetting", "the optimizer is dropped now and then", base=Resetting, kind="deliberate",
            true=("B1", "B2", "B3", "H1"), why="true: its state is new from time to time"),
    variant("p11_grown", "a layer is put on top", base=Grown, kind="deliberate",
            true=("E9", "B1", "B8", "C1", "A4", "H1"), why="true: a layer is there twice, the optimizer is new"),
    variant("p12_half_of_lr", "half of the lr, and a tighter clip", kind="deliberate", loaded=fewer_steps,
            true=("H1", "C2", "B8"), why="true: the lr is another one"),
    variant("p13_less_momentum", "less momentum, nesterov", kind="deliberate", optimizer=SGD,
            loaded=other_beta_of_sgd, true=("H1",), why="true: settings of the groups changed"),
    variant("p14_sgd", "SGD with momentum goes on where Adam was", kind="deliberate",
            fresh=("optimizer", "scheduler"), loaded=by_sgd, true=("B1", "C1", "H1"), why="true: another optimizer",
            **PLAIN),
    variant("p15_head_anew", "the head begins anew", kind="deliberate", loaded=head_anew, needs={"tied": False},
            true=("A2", "B1", "B2", "F2", "F7", "H1"), why="true: a tensor and its state are new", **PLAIN),
    variant("p16_average_restarts", "the average begins anew", base=Averaged, kind="deliberate",
            loaded=average_restarts, true=("F4", "A5", "C9"), why="true: the average is that of the resume"),
]  # fmt: skip

ILL = [
    # optimizers
    fault("j01_estimate_anew", "B1", "Prodigy's step size is estimated anew", ECHO, schedule=unscheduled,
          optimizer=lambda self, groups: Prodigy([{"params": [w for g in groups for w in g["params"]]}], lr=1.0),
          loaded=estimate_anew, also=("B2", "B8", "B11", "C1", "H1"), why="state in the groups was lost"),
    fault("j02_counter_of_groups", "B2", "the groups' own counter begins at 0", LOUD, optimizer=optim(StableAdamW),
          loaded=groups_set(step=0), also=("C9", "H1"), why="the counter is in the groups"),
    fault("j03_weights_of_average", "B1", "schedule-free training forgets what its average weighs", ECHO,
          optimizer=optim(ScheduleFreeAdamW), schedule=unscheduled,
          loaded=groups_set(k=0, weight_sum=0.0, lr_max=-1.0), also=("B2", "B11", "C1", "F4", "H1"),
          why="state in the groups was lost"),
    fault("j04_muon_turned", "B5", "Muon's momentum bound to the next matrix of its shape", ECHO, made=muon,
          loaded=turned("momentum_buffer"), also=("E13", "E9"), why="state of other parameters", **BARE),
    fault("j05_means_lost", "B11", "centered RMSprop's means begin at 0", LOUD,
          optimizer=optim(TORCH.RMSprop, factor=0.3, centered=True), loaded=lost("grad_avg"),
          also=("B1", "B3", "B6"), why="one of two states was lost"),
    fault("j06_last_signs", "B1", "Rprop's last gradients are 0", "alone echo", optimizer=plain(TORCH.Rprop),
          loaded=lost("prev"), also=("B3", "B11"), why="one of two states was lost"),
    fault("j07_newton_anew", "B1", "L-BFGS has no history", ECHO, base=Newton,
          net=net(lambda width: nn.Linear(width, width)), loaded=all_lost, also=("B2",), why="state lost"),
    fault("j08_slow_average_lost", "B11", "AdEMAMix' slow average begins at 0", LOUD, optimizer=optim(ruled(
        zeros(*M_V, "exp_avg_slow", step=0), ademamix, betas=(0.9, 0.98, 0.999), alpha=2.0, eps=1e-8)),
          loaded=lost("exp_avg_slow"), also=("B1", "B3"), why="one of three states was lost", **PLAIN),
    fault("j09_last_gradient_lost", "B11", "MARS' last gradient is 0", "alone echo", optimizer=optim(ruled(
        zeros(*M_V, "last_grad", step=0), mars, betas=(0.95, 0.99), gamma=0.025, eps=1e-8)),
          loaded=lost("last_grad"), also=("B1", "B3", "A5"), why="one of three states was lost", **PLAIN),
    fault("j10_directions_turned", "B11", "GaLore's directions are the next matrix'", BRIEF, optimizer=optim(ruled(
        lambda w: {"step": 0}, held_directions, rank=4, **ADAM)), loaded=turned("projector"),
          also=("B5", "B6", "E13"), why="parts of a state of different parameters", **BARE),
    fault("j11_factored_counter", "B2", "Adafactor's counters begin at 0", LOUD,
          optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=lost("step"), also=("C9",),
          why="the counters are what is wrong"),
    fault("j12_map_of_signed", "B11", "codes of 8-bit second moments are read by the first one's map", LOUD,
          optimizer=lambda self, groups: AdamW8bit(groups, self.config.lr), loaded=map_of_signed,
          also=("B4", "B6", "G3"), why="codes and map of different states", **PLAIN),
    fault("j13_preconditioners_anew", "B11", "Shampoo's factors begin anew", ECHO, optimizer=optim(ruled(
        zeros("momentum_buffer", step=0), shampoo), factor=0.3), loaded=preconditioners_anew,
          also=("B1", "B3", "B4"), why="a part of the state was lost", **PLAIN),
    fault("j14_compensation_lost", "B11", "what bf16 weights lost in rounding was not kept", "alone echo",
          net=lambda self: Decoder(self.config).to(torch.bfloat16), optimizer=optim(ruled(lambda w: {
              "step": 0, "exp_avg": torch.zeros(w.shape), "exp_avg_sq": torch.zeros(w.shape),
              "compensation": torch.zeros_like(w)}, kahan, **ADAM)), loaded=lost("compensation"),
          also=("B1", "B3", "D1", "A5"), why="one of three states was lost; the low bits of weights", **BARE),
    fault("j15_bases_anew", "B11", "SOAP's bases are no bases of its factors", BRIEF, optimizer=optim(ruled(
        zeros(*M_V, step=0), soap, shampoo_beta=0.95, frequency=100, **ADAM)), loaded=bases_anew, also=("B1", "B6"),
          why="a part of the state was lost", **BARE),
    fault("j16_sums_halved", "E12", "Adagrad's sums were averaged over two ranks", ECHO,
          optimizer=optim(TORCH.Adagrad, factor=4.0), loaded=halved_sums, also=("B6", "B4", "B11", "E13", "G6"),
          why="one factor for all sums, which cannot become smaller"),
    fault("j17_experts_turned", "B5", "experts' averages are those of the next expert", ECHO, base=Experts,
          optimizer=optim(TORCH.Adam), needs={"experts": 4}, loaded=moments_of_experts, also=("E10", "E13", "E9"),
          why="state of other experts"),
    fault("j18_table_lost", "B1", "state of the embedding is new, in a distributed checkpoint", LOUD,
          loaded=table_lost, also=("B2", "B3", "G6"), why="one parameter's state was lost, its counter too", **DCP),
    # what a loop keeps
    fault("j20_errors_lost", "A5", "what one-bit gradients did not send was lost", "alone echo", base=Compressed,
          fresh=("worker_error",), also=("B1", "B3", "B11"), why="tensors beside the weights were not restored"),
    fault("j21_slow_gradients_lost", "A5", "slow gradients begin at 0", "alone echo", base=Filtered,
          fresh=("slow_grads",), also=("B1", "B3", "B11"), why="tensors beside the weights were not restored"),
    fault("j22_reference_of_policy", "F6", "the reference is a copy of what was trained so far", ECHO, base=Referred,
          loaded=from_policy, also=("A5", "F4", "A2", "G6"), why="frozen weights that changed"),
    fault("j23_teacher_anew", "F4", "the teacher is its pupil again", SOON, base=Following, loaded=teacher_anew,
          also=("A2", "A5", "E9", "F2", "G6"), why="an average that was not restored"),
    fault("j24_average_in_halves", "F4", "the average went through 16 bits", "alone echo", base=Averaged,
          loaded=average_in_halves, also=("D4", "D7"), why="rounding, of the average alone"),
    fault("j25_slow_for_weights", "F4", "slow weights beside the weights are trained on", BRIEF, base=Trailing,
          loaded=slow_for_weights, also=("A2", "D2", "G6"), why="an average in the weights' place"),
    fault("j26_head_untied", "F2", "the head became a tensor that no optimizer holds", LATER, base=Tied,
          needs={"tied": True}, loaded=untied, also=("A4", "B8", "D6", "H1"),
          why="two tables where one was, and one stands still", **BARE),
    fault("j27_counts_anew", "A5", "a batch norm's count begins at 0", LOUD, net=net(cumulative), loaded=counts_anew,
          also=("B2", "C9"), why="a buffer that was not restored"),
    fault("j28_statistics_exchanged", "A5", "two batch norms have each other's statistics", "echo",
          net=net(two_norms), loaded=statistics_exchanged, also=("E9", "G6"), why="buffers of another module"),
    fault("j29_biases_zero", "A2", "all biases are 0", LOUD, net=net(transformer(0.0)),
          loaded=changed(called("bias"), torch.zeros_like), also=("A3", "G5"), why="tensors that were not loaded"),
    fault("j30_table_in_halves", "D7", "the embedding went through 16 bits", BRIEF,
          loaded=changed(called("embed_tokens.weight"), lambda t: t.half().float()), also=("D1", "G2"),
          why="the weights are their own masters"),
    fault("j31_other_masks", "A5", "masks of pruning were drawn anew", ECHO, net=net(pruned),
          loaded=changed(called("weight_mask"), other_masks), also=("A2", "G6"), why="buffers that were not restored",
          **PLAIN),
    fault("j32_other_vectors", "A5", "a spectral norm's vectors are another process's", "echo",
          net=net(normed_spectrum), loaded=changed(called("._u", "._v"), other_vector), also=("A2", "G6"),
          why="buffers that were not restored"),
    fault("j33_row_of_padding", "F7", "the padding token's row is random", ECHO, net=wide_table,
          loaded=changed(called("embed.weight"), row_of_padding), also=("A2", "E11", "G1", "G2", "G6"),
          why="one row that is new"),
    fault("j34_teacher_written", "A4", "saves after the resume hold the teacher among the weights", ECHO, base=Laden,
          loaded=marked, also=("H1",), why="tensors were added"),
    fault("j35_noise_anew", "C8", "the noise's generator begins anew", "echo", base=Noisy, fresh=("noise_state",),
          also=("A5", "C7"), why="a random state that was not restored"),
    fault("j36_kernels_exchanged", "E9", "convolutions of two blocks exchanged, norms right", BRIEF,
          net=net(lambda width: nn.Sequential(Normed(width), Normed(width))),
          loaded=exchange("inner.0.conv.", "inner.1.conv."), also=("A2", "E3", "G6", "B5"),
          why="whole tensors elsewhere"),
    # settings and schedules
    fault("j40_rates_exchanged", "C2", "two optimizers have each other's lr", ECHO, base=Rival,
          needs={"tied": False}, loaded=rates_exchanged, also=("B7", "B8", "C1", "H1"),
          why="lrs of another optimizer"),
    fault("j41_layers_reversed", "B7", "groups of the layers have each other's lr and decay", ECHO, groups=layerwise,
          loaded=layers_reversed, also=("B8", "C2", "H1"), why="the groups tell the new values"),
    fault("j42_tables_decay", "B7", "tables are in the group that decays", ECHO, groups=no_decay_of_tables,
          loaded=tables_decay, also=("H1",), why="parameters in another group", **DCP),
    fault("j43_decay_of_start", "C5", "the first update has the weight decay of the run's begin", BRIEF, base=Rising,
          loaded=decay_of_start, also=("B7", "H1"), why="the groups tell the old value, for one update"),
    fault("j44_lr_of_start", "B8", "the first update has the lr's highest value", SOON,
          needs={"warmup": 5, "total": 150}, loaded=lr_of_start, also=("C1", "C2", "H1"),
          why="an lr that the schedule did not set, for one update"),
    fault("j45_longer_cycle", "C4", "OneCycle is twice as long", ECHO, schedule=one_cycle, loaded=longer_cycle,
          also=("C2", "H1"), why="another length"),
    fault("j46_cycle_anew", "C1", "a cosine with restarts is at its cycle's begin", ECHO, schedule=long_cycle,
          loaded=cycle_anew, also=("B8", "C2", "C9"), why="a part of the schedule's position was lost"),
    fault("j47_inner_anew", "C1", "of a sequence of schedules the last one begins anew", ECHO, schedule=two_parts,
          loaded=inner_anew, also=("B8", "C2", "C9"), why="a part of the schedule's position was lost"),
    fault("j48_one_groups_defaults", "H1", "one group has other betas and another eps", ECHO,
          loaded=one_groups_defaults),
    fault("j49_schedule_of_parts", "C3", "the schedule is stepped for each of four micro-batches", LATER, parts=4,
          apply=each_part, loaded=marked, also=("B8", "C1", "C2"), why="the schedule is ahead of the step"),
    fault("j50_other_loss", "H1", "the loss has another term, and no file says so", LATER, loss=smoothed,
          loaded=marked, visible=False),
    fault("j51_no_epsilon", "H1", "RMSprop has another memory and eps", ECHO,
          optimizer=optim(TORCH.RMSprop, factor=0.3), loaded=groups_set(alpha=0.9, eps=1e-3), also=("D10",),
          why="settings of the groups"),
    fault("j52_ones_for_squares", "B4", "RMSprop's squares are 1", LOUD,
          optimizer=optim(TORCH.RMSprop, factor=0.3, momentum=0.9), loaded=set_to("square_avg", 1.0),
          also=("B1", "B3", "B6", "B11", "A2"), why="a second moment is fresh"),
]  # fmt: skip

OPENED3_LIVE: list[Fault] = [*WELL, *MEANT, *ILL]
