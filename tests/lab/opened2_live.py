"""Training loops in plain torch of the second sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Frozen, Sheltered, Tied, muon, one_cycle, optim, plain
from tests.lab.opened_live import (
    Averaged,
    Looking,
    Net,
    Normed,
    Plateau,
    Wrapped,
    layerwise,
    lost,
    net,
    qat,
    ruled,
    spectral,
    transformer,
    zeros,
)
from tests.lab.optimizers import AdamW8bit, Lion, ScheduleFreeAdamW

__all__ = ["OPENED2_LIVE"]

Tensor = torch.Tensor
Held = dict[str, Any]
TORCH, RATES = torch.optim, torch.optim.lr_scheduler


# ---- optimizers ------------------------------------------------------------------------------------------------------


def moments(g: Tensor, state: Held, group: Held) -> tuple[Tensor, Tensor]:
    """Adam's, moved on; returns them without their bias."""
    a, b = group["betas"][:2]
    state["step"] += 1
    t = int(state["step"])
    state["exp_avg"].mul_(a).add_(g, alpha=1 - a)
    state["exp_avg_sq"].mul_(b).addcmul_(g, g, value=1 - b)
    return state["exp_avg"] / (1 - a**t), (state["exp_avg_sq"] / (1 - b**t)).sqrt_().add_(group["eps"])


def ademamix(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """apple/ml-ademamix: a second, slow average of gradients."""
    first, under = moments(g, state, group)
    state["exp_avg_slow"].lerp_(g, 1 - group["betas"][2])
    w.addcdiv_(first + group["alpha"] * state["exp_avg_slow"], under, value=-group["lr"])


def mars(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """AGI-Arena/MARS: moments of the gradient with a part of its change."""
    a = group["betas"][0]
    seen = g + group["gamma"] * a / (1 - a) * (g - state["last_grad"])
    state["last_grad"] = g.clone()
    first, under = moments(seen / max(1.0, float(seen.norm())), state, group)
    w.addcdiv_(first, under, value=-group["lr"])


def cautious(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """kyleliang919/C-Optim: only elements whose step goes down the gradient."""
    first, under = moments(g, state, group)
    mask = (first * g > 0).float()
    w.addcdiv_(first * mask / mask.mean().clamp(min=1e-3), under, value=-group["lr"])


def mini(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """zyushun/Adam-mini: one second moment a row."""
    a, b = group["betas"]
    state["step"] += 1
    t = int(state["step"])
    square = g.pow(2).mean(-1, keepdim=True) if g.ndim > 1 else g.pow(2).mean()
    state["m"].lerp_(g, 1 - a)
    state["vmean"] = state.get("vmean", torch.zeros_like(square)) * b + square * (1 - b)
    w.addcdiv_(state["m"] / (1 - a**t), (state["vmean"] / (1 - b**t)).sqrt().add(group["eps"]), value=-group["lr"])


def galore(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """jiaweizzhao/GaLore: moments of the gradient's projection on a few directions, renewed now and then."""
    if w.ndim > 1:
        if state["step"] % 15 == 0:
            state["projector"] = torch.linalg.svd(g, full_matrices=False)[2][:4].contiguous()
        g = g @ state["projector"].T
    for name in ("exp_avg", "exp_avg_sq"):
        state.setdefault(name, torch.zeros_like(g))
    first, under = moments(g, state, group)
    step = first / under
    w.sub_(step @ state["projector"] if w.ndim > 1 else step, alpha=group["lr"])


def laprop(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Z-T-WANG/LaProp: the average is of gradients that were divided already."""
    a, b = group["betas"]
    state["step"] += 1
    t = state["step"]
    state["exp_avg_sq"].mul_(b).addcmul_(g, g, value=1 - b)
    state["exp_avg_lr_1"] = state.get("exp_avg_lr_1", 0.0) * a + (1 - a) * group["lr"]
    under = (state["exp_avg_sq"] / (1 - b**t)).sqrt_().add_(group["eps"])
    state["exp_avg"].mul_(a).addcdiv_(g, under, value=(1 - a) * group["lr"])
    w.sub_(state["exp_avg"] / (1 - a**t))


def signum(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    state["momentum_buffer"].lerp_(g, 1 - group["momentum"])
    w.add_(state["momentum_buffer"].sign(), alpha=-group["lr"])


def halved(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Adam whose moments are kept in bf16."""
    a, b = group["betas"]
    state["step"] += 1
    t = int(state["step"])
    first = state["exp_avg"].float() * a + g * (1 - a)
    second = state["exp_avg_sq"].float() * b + g * g * (1 - b)
    w.addcdiv_(first / (1 - a**t), (second / (1 - b**t)).sqrt_().add_(group["eps"]), value=-group["lr"])
    state["exp_avg"], state["exp_avg_sq"] = first.bfloat16(), second.bfloat16()


def bowl(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Second moments that only grow: AdamW with the largest in the place of the last."""
    a, b = group["betas"]
    state["step"] += 1
    state["exp_avg"].lerp_(g, 1 - a)
    state["exp_avg_sq"] = torch.maximum(state["exp_avg_sq"] * b, g * g)
    w.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])


ADAM = {"betas": (0.9, 0.98), "eps": 1e-8}
M_V = ("exp_avg", "exp_avg_sq")


def thin(w: Tensor) -> Held:
    return {"step": 0, "exp_avg": torch.zeros(w.shape).bfloat16(), "exp_avg_sq": torch.zeros(w.shape).bfloat16()}


def sparse(self: Loop) -> list[torch.optim.Optimizer]:
    named = dict(self.module.named_parameters())
    table = named.pop("embed.weight")
    return [TORCH.SparseAdam([table], lr=self.config.lr), TORCH.AdamW(named.values(), lr=self.config.lr)]


def each_layer(self: Loop) -> list[torch.optim.Optimizer]:
    """An optimizer for each layer, and one for the rest."""
    parts: dict[str, list[Tensor]] = {}
    for name, weight in self.module.named_parameters():
        parts.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(weight)
    return [TORCH.AdamW(parts[key], lr=self.config.lr, betas=self.config.betas) for key in ("0", "1", "rest")]


def alone(self: Loop) -> Groups:
    """A group for every tensor."""
    return [{"params": [w], "weight_decay": 0.02 * (w.ndim > 1)} for w in self.module.parameters()]


# ---- models ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Blocks behind scalars that begin at 0, a table of angles that is no weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)
        self.alpha, self.gain = nn.Parameter(torch.zeros(())), nn.Parameter(torch.full((width,), 1e-4))
        self.register_buffer("freqs", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("position_ids", torch.arange(64))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(F.gelu(self.up(x)))
        return x + self.alpha * inner + self.gain * inner


class Shared(nn.Module):
    """One layer, passed three times under three names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.layers = nn.ModuleList([layer, layer, layer])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Pictures(nn.Module):
    """Convolutions over rows and columns with group norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=(2, 1)), nn.GroupNorm(2, 4)
        self.back = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.silu(self.norm(self.conv(x[:, None])[:, :, :-2])))[:, 0]


def pruned(width: int) -> nn.Module:
    """Seven of ten weights masked, for good."""
    made = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
    for layer in (made[0], made[2]):
        prune.random_unstructured(layer, "weight", amount=0.7)
    return made


def normed_spectrum(width: int) -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(width, 32)), nn.GELU(), nn.Linear(32, width))


def orthogonal(width: int) -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(width, width)), nn.Tanh(), nn.Linear(width, width))


def two_norms(width: int) -> nn.Module:
    return nn.Sequential(Normed(width), Normed(width))


def cumulative(width: int) -> nn.Module:
    made = Normed(width)
    made.norm.momentum = None
    return made


def wide_table(self: Loop) -> nn.Module:
    """Most of the tokens never occur, and one is padding."""
    made = Net(6 * self.config.padded, 16, nn.Linear(16, 16))
    made.embed.padding_idx = 3
    return made


def sparse_table(self: Loop) -> nn.Module:
    made = Net(self.config.padded, 16, nn.Linear(16, 16))
    made.embed.sparse = True
    return made


def doubles(self: Loop) -> nn.Module:
    return Net(self.config.padded, 24, nn.Linear(24, 24)).double()


def autocast(self: Loop, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.module(tokens)[0]


# ---- loops -----------------------------------------------------------------------------------------------------------


class Mastered(Loop):
    """bf16 weights, and copies of 32 bits that the loop itself keeps and stores."""

    layouts = ("torch_save", "folder")

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    def made(self) -> list[torch.optim.Optimizer]:
        self.copies = {name: w.detach().float().requires_grad_(True) for name, w in self.module.named_parameters()}
        self.extra["master_weights"] = {name: copy.detach() for name, copy in self.copies.items()}
        return [TORCH.AdamW(list(self.copies.values()), lr=self.config.lr, betas=self.config.betas)]

    def load(self, content: Held) -> None:
        super().load(content)
        known = content["master_weights"] if "master_weights" not in self.fresh else content["model"]
        with torch.no_grad():
            for name, copy in self.copies.items():
                copy.copy_(known[name])
        self.extra["master_weights"] = {name: copy.detach() for name, copy in self.copies.items()}

    def apply(self) -> None:
        for name, weight in self.module.named_parameters():
            self.copies[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        super().apply()
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(self.copies[name])


class Swung(Loop):
    """Stochastic weight averaging: from an update on, every third one enters an equal mean."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["swa"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}
        self.extra["n_averaged"] = 0

    def apply(self) -> None:
        super().apply()
        if self.step > 4 and self.step % 3 == 0:
            for name, weight in self.module.named_parameters():
                self.extra["swa"][name].lerp_(weight.detach(), 1 / (self.extra["n_averaged"] + 1))
            self.extra["n_averaged"] += 1


class Targeted(Loop):
    """A second net that is set to the first one every seven updates."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.follow()

    def follow(self) -> None:
        self.extra["target"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if self.step % 7 == 6:
            self.follow()


class Referred(Targeted):
    """A reference that never moves, as preferences are trained against."""

    def apply(self) -> None:
        Loop.apply(self)


class Filtered(Loop):
    """Gradients with more of their slow part: Grokfast."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["slow_grads"] = {name: torch.zeros_like(w) for name, w in self.module.named_parameters()}

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if weight.grad is not None:
                self.extra["slow_grads"][name].lerp_(weight.grad, 0.02)
                weight.grad += 2 * self.extra["slow_grads"][name]
        super().gradients()


class Changing(Loop):
    """More micro-batches as training goes on."""

    def update(self) -> None:
        self.parts = 1 + self.step // 10 % 4
        super().update()


class Dropping(Loop):
    """Each update leaves out a layer by chance."""

    def gradients(self) -> None:
        out = int(torch.randint(3, ()))
        for name, weight in self.module.named_parameters():
            if f".layers.{out}." in name:
                weight.grad = None
        super().gradients()


class Wary(Loop):
    """Updates with an unusually large gradient are left out, and counted."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra |= {"skipped_steps": 0, "usual": 0.0}

    def gradients(self) -> None:
        size = float(nn.utils.clip_grad_norm_(self.module.parameters(), 1.0))
        self.leave = self.step > 3 and size > 1.05 * self.extra["usual"]
        self.extra["usual"] = 0.8 * self.extra["usual"] + 0.2 * size if self.step else size

    def apply(self) -> None:
        if self.leave:
            self.extra["skipped_steps"] += 1
        else:
            super().apply()


class Late(Loop):
    """From the top down, a part is trained later than the other."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if (self.step < 30 and ".layers.0." in name) or (self.step < 45 and "embed" in name):
                weight.grad = None
        super().gradients()


class ByHand(Loop):
    """No schedule is stored: the loop sets what it wants before each update."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            self.wanted(group)
        super().apply()

    def wanted(self, group: Held) -> None:
        group["lr"] = self.config.lr / (1 + 0.05 * self.step)


class Newton(Loop):
    """L-BFGS, which looks at the loss several times an update."""

    layouts = ("torch_save",)

    def groups(self) -> Groups:
        return [{"params": list(self.module.parameters())}]

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return TORCH.LBFGS(groups, lr=0.1, max_iter=3, history_size=4)

    def update(self) -> None:
        tokens, (optimizer,) = self.tokens(), self.optimizers

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(tokens)
            loss.backward()
            return loss

        optimizer.step(closure)
        for schedule in self.schedules:
            schedule.step()
        self.step += 1


class Doubling(Sheltered):
    """A loss scale that doubles every fourth update."""

    def apply(self) -> None:
        Loop.apply(self)
        told = self.extra["scaler"]
        told["_growth_tracker"] = (told["_growth_tracker"] + 1) % 4
        told["scale"] *= 1 if told["_growth_tracker"] else 2


def decaying_more(self: ByHand, group: Held) -> None:
    group["weight_decay"] = 0.02 + 0.002 * self.step


def slower(self: ByHand, group: Held) -> None:
    group["betas"] = (0.9, 1 - (self.step + 2) ** -0.8)


def lambdas(rule: Callable[[int, int], float]) -> Callable[[Loop, torch.optim.Optimizer], Any]:
    """A schedule by ``rule(update, number of the group)``."""

    def schedule(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
        count = len(optimizer.param_groups)
        return RATES.LambdaLR(optimizer, [lambda n, number=number: rule(n, number) for number in range(count)])

    return schedule


def polynomial(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return RATES.PolynomialLR(optimizer, total_iters=25, power=2.0)


def exponential(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return RATES.ExponentialLR(optimizer, 0.98)


def stairs(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return RATES.StepLR(optimizer, 7, 0.6)


def chained(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return RATES.ChainedScheduler(
        [RATES.LinearLR(optimizer, 0.1, total_iters=6), RATES.MultiStepLR(optimizer, [12, 33], 0.5)]
    )


def breathing(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    lr = self.config.lr
    return RATES.CyclicLR(optimizer, lr / 5, lr, step_size_up=5, mode="triangular2", base_momentum=0.7)


def unscheduled(self: Loop, optimizer: torch.optim.Optimizer) -> None:
    return None


# ---- faults ----------------------------------------------------------------------------------------------------------


def state_of(self: Loop) -> list[Held]:
    return [state for optimizer in self.optimizers for state in optimizer.state.values()]


def set_to(name: str, value: float) -> Callable[[Loop], None]:
    """For `Loop.loaded`: that state is this number everywhere."""

    def loaded(self: Loop) -> None:
        for state in state_of(self):
            if name in state:
                state[name] = torch.full_like(state[name], value)

    return loaded


def times(name: str, *factors: float) -> Callable[[Loop], None]:
    """For `Loop.loaded`: that state times one of these factors, which the run's seed draws."""

    def loaded(self: Loop) -> None:
        factor = random.Random(self.config.seed).choice(factors)
        for state in state_of(self):
            if name in state:
                state[name] = state[name] * factor

    return loaded


def step_sizes(self: Loop) -> None:
    set_to("step_size", self.optimizers[0].param_groups[0]["lr"])(self)


def counters_of_vectors(self: Loop) -> None:
    for state in state_of(self):
        if state["exp_avg"].ndim < 2:
            state["step"] = torch.zeros_like(state["step"])


def observers_anew(self: Loop) -> None:
    for name, buffer in self.module.named_buffers():
        if name.endswith("_val"):
            buffer.fill_(math.inf if name.endswith("min_val") else -math.inf)


def first_lost(self: Loop) -> None:
    self.optimizers[0].state.clear()


def decay_exchanged(self: Loop) -> None:
    first, second = self.optimizers[0].param_groups
    first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]


def largest_is_last(self: Loop) -> None:
    for state in state_of(self):
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


def for_use(self: Loop) -> None:
    """The weights that schedule-free training evaluates, in the place of those that it trains."""
    for group in self.optimizers[0].param_groups:
        for weight in group["params"]:
            weight.data.lerp_(self.optimizers[0].state[weight]["z"], 1 - 1 / group["betas"][0])


def lr_times(*factors: float) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        factor = random.Random(self.config.seed).choice(factors)
        for group in self.optimizers[0].param_groups:
            group["lr"] *= factor

    return loaded


def back_at_base(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def one_lr(self: Loop) -> None:
    (schedule,), (optimizer,) = self.schedules, self.optimizers
    now = optimizer.param_groups[0]["lr"]
    schedule.base_lrs = [self.config.lr] * len(schedule.base_lrs)
    for group in optimizer.param_groups:
        group |= {"lr": now, "initial_lr": self.config.lr}


def changed(pick: Callable[[str], bool], change: Callable[[Tensor], Tensor]) -> Callable[[Loop], None]:
    """For `Loop.loaded`: weights and buffers of that name become something else."""

    def loaded(self: Loop) -> None:
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                if pick(name):
                    tensor.copy_(change(tensor.clone()))

    return loaded


def called(*words: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(words)


def exchange(one: str, other: str) -> Callable[[Loop], None]:
    """For `Loop.loaded`: tensors with these words in their names change places."""

    def loaded(self: Loop) -> None:
        held = dict(self.module.state_dict())
        for name in [name for name in held if one in name and name.replace(one, other) in held]:
            first, second = held[name], held[name.replace(one, other)]
            old = first.clone()
            first.copy_(second)
            second.copy_(old)

    return loaded


def gates(tensor: Tensor) -> Tensor:
    """An LSTM's gates in another library's order."""
    i, f, g, o = tensor.chunk(4)
    return torch.cat([i, g, f, o])


def per_head(tensor: Tensor) -> Tensor:
    """[Q; K; V] as rows of q, k, v head by head."""
    return tensor.view(3, 2, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def reversed_states(self: Loop, content: Held) -> None:
    """States of several optimizers, in the order of another start."""
    first, second, *rest = content["optimizers"]
    Loop.load(self, content | {"optimizers": [second, first, *rest]})


def without_head(self: Loop, weights: Held) -> None:
    self.module.load_state_dict({name: w for name, w in weights.items() if "lm_head" not in name}, strict=False)


def none_matches(self: Loop, weights: Held) -> None:
    self.module.load_state_dict(weights, strict=False)


def wrapped_again(self: Any) -> None:
    self.prefix *= 2


def orphans(pick: Callable[[str], bool]) -> Callable[[Loop], None]:
    """For `Loop.loaded`: parameters made anew behind the optimizer's back."""

    def loaded(self: Loop) -> None:
        for path, module in list(self.module.named_modules()):
            for name, weight in list(module._parameters.items()):
                if weight is not None and pick(f"{path}.{name}"):
                    module._parameters[name] = nn.Parameter(weight.detach().clone())

    return loaded


def frozen_layer(self: Loop) -> None:
    number = random.Random(self.config.seed).randrange(2)
    for name, weight in self.module.named_parameters():
        weight.requires_grad_(f".layers.{number}." not in name)


def marked(self: Any) -> None:
    self.resumed = True


def summed(self: Any, tokens: Tensor) -> Tensor:
    return Loop.loss(self, tokens) * (4.0 if getattr(self, "resumed", False) else 1.0)


def unclipped(self: Loop) -> None:
    self.clip = 0.0


def evaluated(self: Loop) -> None:
    self.module.eval()


def masters_random(self: Any) -> None:
    other = Decoder(self.config.but(seed=self.config.seed + 9))
    with torch.no_grad():
        for name, weight in other.named_parameters():
            self.copies[name].copy_(weight)


# ---- on purpose ------------------------------------------------------------------------------------------------------


def thawed(self: Loop) -> None:
    """What was frozen is trained too, in a group of its own."""
    more = [w.requires_grad_(True) for w in self.module.parameters() if not w.requires_grad]
    self.optimizers[0].add_param_group({"params": more, "weight_decay": 0.0, "initial_lr": self.config.lr / 10})
    (schedule,) = self.schedules
    schedule.base_lrs.append(self.config.lr / 10)
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])


def by_lion(self: Loop) -> None:
    self.optimizers = [Lion(self.groups(), lr=self.config.lr / 10)]
    self.schedules = [self.schedule(self.optimizers[0])]


def from_average(self: Loop) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            weight.copy_(self.extra["ema"][name])


def no_decay(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.0


def more_momentum(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["momentum"] = 0.95


def tripled(self: Loop) -> None:
    for schedule in self.schedules:
        schedule.base_lrs = [3 * lr for lr in schedule.base_lrs]
    for group in self.optimizers[0].param_groups:
        group |= {"lr": 3 * group["lr"], "initial_lr": 3 * group["initial_lr"]}


def with_largest(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["amsgrad"] = True
    for state in state_of(self):
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


class Cut(Loop):
    """The last rows of the vocabulary's padding are taken away; the optimizer begins anew."""

    fresh = ("optimizer",)
    layouts = ("torch_save", "folder", "lightning")

    def take(self, weights: Held) -> None:
        rows = self.config.vocab
        self.config = self.config.but(padded=rows)
        self.module = Decoder(self.config)
        self.module.load_state_dict(
            {n: w[:rows] if n.startswith(("lm_head", "model.embed")) else w for n, w in weights.items()}
        )
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


ECHO = "echo next early"
LOUD = "alone echo next early"
SOON = "alone echo next"
LATER = "next early"
PLAIN: Any = {"layouts": ("torch_save", "folder", "lightning")}
DCP: Any = {"layouts": ("dcp",)}
SGD = optim(TORCH.SGD, factor=20.0, momentum=0.9)

WELL = [
    variant("k30_ademamix", "AdEMAMix", optimizer=optim(ruled(
        zeros(*M_V, "exp_avg_slow", step=0), ademamix, betas=(0.9, 0.98, 0.999), alpha=2.0, eps=1e-8)), **PLAIN),
    variant("k31_mars", "MARS", optimizer=optim(ruled(
        zeros(*M_V, "last_grad", step=0), mars, betas=(0.95, 0.99), gamma=0.025, eps=1e-8)), **PLAIN),
    variant("k32_cautious", "cautious AdamW", optimizer=optim(ruled(zeros(*M_V, step=0), cautious, **ADAM)), **PLAIN),
    variant("k33_adam_mini", "Adam-mini", optimizer=optim(ruled(zeros("m", step=0), mini, **ADAM)), **PLAIN),
    variant("k34_galore", "GaLore: moments of other shapes", optimizer=optim(ruled(
        lambda w: {"step": 0}, galore, rank=4, update_proj_gap=15, **ADAM)), layouts=("torch_save", "lightning")),
    variant("k35_laprop", "LaProp", optimizer=optim(ruled(zeros(*M_V, step=0), laprop, **ADAM)), **PLAIN),
    variant("k36_signum", "Signum", optimizer=optim(ruled(zeros("momentum_buffer"), signum, momentum=0.9), factor=0.1)),
    variant("k37_halved_moments", "moments in bf16, weights in fp32", optimizer=optim(ruled(thin, halved, **ADAM)),
            true=("D4", "D5"), **PLAIN),
    variant("k38_infinity", "second moments by the largest gradient", optimizer=optim(ruled(
        zeros(*M_V, step=0), bowl, betas=(0.9, 0.99), eps=1e-8), factor=0.3), **PLAIN),
    variant("k39_adamax_decay", "Adamax with decay", optimizer=optim(TORCH.Adamax, betas=(0.95, 0.99))),
    variant("k40_nadam_decoupled", "NAdam with decoupled decay", optimizer=optim(
        TORCH.NAdam, decoupled_weight_decay=True)),
    variant("k41_radam_decoupled", "RAdam with decoupled decay, beta2 of 0.9", optimizer=optim(
        TORCH.RAdam, betas=(0.8, 0.9), decoupled_weight_decay=True)),
    variant("k42_sparse", "SparseAdam for the table, AdamW for the rest", made=sparse, net=sparse_table, clip=0.0,
            layouts=("torch_save", "lightning")),
    variant("k43_lbfgs", "L-BFGS", base=Newton, net=net(lambda width: nn.Linear(width, width))),
    variant("k44_doubles", "weights of 64 bits", net=doubles),
    variant("k45_masters_of_the_loop", "bf16 weights and masters that the loop keeps", base=Mastered),
    variant("k46_equal_mean", "stochastic weight averaging", base=Swung),
    variant("k47_target", "a net that follows now and then", base=Targeted),
    variant("k48_reference", "a net that never moves", base=Referred),
    variant("k49_slow_gradients", "gradients with more of their slow part", base=Filtered),
    variant("k50_parts_change", "the number of micro-batches changes", base=Changing),
    variant("k51_layers_left_out", "each update leaves out a layer by chance", base=Dropping),
    variant("k52_wary", "updates with large gradients are left out", base=Wary),
    variant("k53_late_parts", "parts of the model are trained later", base=Late),
    variant("k54_lr_to_zero", "an lr that reaches 0 and stays there", schedule=polynomial),
    variant("k55_inverse_root", "warm-up, then one over the root", schedule=lambdas(
        lambda n, group: min((n + 1) / 12, (12 / (n + 1)) ** 0.5))),
    variant("k56_groups_apart", "a schedule for each group", schedule=lambdas(
        lambda n, group: 0.97**n if group else min(1.0, (n + 1) / 20))),
    variant("k57_saw", "an lr that jumps up and down", schedule=lambdas(lambda n, group: (0.2, 1.0, 0.5)[n % 3])),
    variant("k58_begins_at_zero", "a warm-up whose first lr is 0", schedule=lambdas(lambda n, group: min(1.0, n / 30))),
    variant("k59_chained", "two schedules multiplied", schedule=chained),
    variant("k60_breathing", "lr and beta1 go up and down", schedule=breathing),
    variant("k61_lr_by_hand", "the loop sets the lr", base=ByHand),
    variant("k62_decay_by_hand", "the loop raises the weight decay", base=ByHand, wanted=decaying_more),
    variant("k63_beta_by_hand", "the loop raises beta2", base=ByHand, wanted=slower),
    variant("k64_pruned", "seven of ten weights are masked", net=net(pruned), **PLAIN),
    variant("k65_spectral", "a spectral norm with its vectors", net=net(normed_spectrum)),
    variant("k66_orthogonal", "an orthogonal matrix by parametrisation", net=net(orthogonal),
            layouts=("torch_save", "lightning")),
    variant("k67_unseen_tokens", "most rows of the table are never trained", net=wide_table),
    variant("k68_shared_layers", "one layer under three names", net=net(Shared), **PLAIN),
    variant("k69_scalars", "scalars that begin at 0, buffers of other types", net=net(Scaled),
            layouts=("torch_save", "lightning")),
    variant("k70_pictures", "convolutions with group norms", net=net(Pictures), optimizer=optim(TORCH.Adam)),
    variant("k71_cumulative", "running statistics as equal means", net=net(cumulative)),
    variant("k72_gru", "a GRU by RMSprop", net=net(lambda width: nn.GRU(width, width, batch_first=True)),
            optimizer=optim(TORCH.RMSprop, factor=0.3)),
    variant("k73_autocast", "autocast to bf16 and dropout", net=net(transformer(0.1)), loss=autocast),
    variant("k74_group_each", "a param group for every tensor", groups=alone, **DCP),
    variant("k75_optimizer_each_layer", "an optimizer for each layer", made=each_layer,
            layouts=("torch_save", "dcp", "lightning")),
    variant("k76_tied_dcp", "tied tables in a distributed checkpoint", base=Tied, needs={"tied": True},
            optimizer=optim(TORCH.AdamW, foreach=True), **DCP),
    variant("k77_experts_dcp", "experts, by SGD, in a distributed checkpoint", needs={"experts": 8},
            optimizer=SGD, **DCP),
    variant("k78_frozen_accumulated", "frozen parts, three micro-batches", base=Frozen, parts=3, **DCP),
    variant("k79_doubling", "a loss scale that doubles on and on", base=Doubling),
]  # fmt: skip

MEANT = [
    variant("o10_tripled", "the operator triples the lr", kind="deliberate", loaded=tripled, true=("H1", "C2"),
            why="true: three times the lr"),
    variant("o11_thawed", "what was frozen is trained from here on, in a group of its own", base=Frozen,
            kind="deliberate", loaded=thawed, true=("H1",), why="true: a param group was added", **PLAIN),
    variant("o12_lion", "Lion goes on where AdamW was", kind="deliberate", fresh=("optimizer", "scheduler"),
            loaded=by_lion, true=("B1", "C1", "H1"), why="true: another optimizer", **PLAIN),
    variant("o13_from_average", "training goes on from the average", base=Averaged, kind="deliberate",
            loaded=from_average, true=("F4",), why="true: the average became the weights"),
    variant("o14_moments_dropped", "the moments are dropped on purpose", kind="deliberate", fresh=("optimizer",),
            true=("B1", "B8", "C1", "H1"), why="true: the optimizer's state is new", **PLAIN),
    variant("o15_no_decay", "no weight decay from here on", kind="deliberate", loaded=no_decay, true=("H1", "B7"),
            why="true: weight decay changed"),
    variant("o16_more_momentum", "more momentum from here on", kind="deliberate", optimizer=SGD, loaded=more_momentum,
            true=("H1",), why="true: momentum changed"),
    variant("o17_largest_kept", "amsgrad from here on", kind="deliberate", loaded=with_largest, true=("H1", "B11"),
            why="true: a state was added"),
    variant("o18_vocabulary_cut", "padding is cut from the vocabulary, the optimizer begins anew", base=Cut,
            kind="deliberate", true=("F7", "E11", "B1", "B8", "C1", "H1"),
            why="true: the vocabulary has fewer rows, the optimizer is new"),
    variant("o19_more_parts", "two micro-batches from here on, and another clipping norm", kind="deliberate",
            loaded=lambda self: self.__dict__.update(parts=2, clip=0.3), true=("H1",),
            why="true: smaller gradients, which no file explains"),
]  # fmt: skip

ILL = [
    # state of optimizers
    fault("y01_decay_exchanged", "B7", "the groups' weight decay in each other's place", ECHO, loaded=decay_exchanged,
          needs={"weight_decay": 0.1}, also=("H1",), why="the groups tell the new values"),
    fault("y02_states_exchanged", "B5", "two layers' optimizers have each other's state", ECHO, made=each_layer,
          load=reversed_states, also=("E13", "E9"), why="state of other parameters, by layers",
          layouts=("torch_save", "lightning")),
    fault("y03_radam_counters", "B2", "RAdam's counters begin at 0", LOUD, optimizer=optim(TORCH.RAdam),
          loaded=lost("step"), also=("C9",), why="the counters are what is wrong"),
    fault("y04_nadam_product", "B11", "NAdam's product of momenta begins at 1", LOUD, optimizer=optim(TORCH.NAdam),
          loaded=set_to("mu_product", 1.0), also=("B1", "B2"), why="one of four states was lost"),
    fault("y05_adamax_lost", "B4", "Adamax' largest gradients begin at 0", LOUD, optimizer=optim(TORCH.Adamax),
          loaded=lost("exp_inf"), also=("B1", "B3", "B11"), why="a second moment was lost"),
    fault("y06_adadelta_lost", "B11", "Adadelta's squared steps begin at 0", LOUD,
          optimizer=optim(TORCH.Adadelta, factor=100.0), loaded=lost("acc_delta"), also=("B1", "B3", "B4"),
          why="one of two states was lost"),
    fault("y07_rprop_sizes", "B1", "Rprop's step sizes begin anew", SOON, optimizer=plain(TORCH.Rprop),
          loaded=step_sizes, also=("B3", "B11"), why="a state was lost"),
    fault("y08_asgd_average", "B1", "ASGD's average begins at zero", LOUD, clip=0.5,
          optimizer=optim(TORCH.ASGD, factor=30.0, t0=2.0), loaded=lost("ax"), also=("B3", "B11", "F4"),
          why="a state was lost", **PLAIN),
    fault("y09_momentum_summed", "E12", "SGD's momentum was added over ranks", "echo next", optimizer=SGD,
          loaded=times("momentum_buffer", 4.0, 8.0, 16.0), also=("D8", "E13", "B10"), why="one factor for all states"),
    fault("y10_largest_is_last", "B11", "amsgrad's largest second moments are the last ones", ECHO,
          optimizer=optim(TORCH.AdamW, amsgrad=True), loaded=largest_is_last, also=("B4", "B6"),
          why="one of three states was lost"),
    fault("y11_muon_lost", "B1", "of Muon and AdamW the first has no state", SOON, made=muon, loaded=first_lost,
          also=("B3",), why="state lost", layouts=("torch_save", "lightning")),
    fault("y12_weights_for_use", "F4", "schedule-free weights as they are evaluated, not as they are trained",
          "echo next", optimizer=optim(ScheduleFreeAdamW), schedule=unscheduled, loaded=for_use, also=("H1", "G6"),
          why="an average took the weights' place", **PLAIN),
    fault("y13_scales_of_one", "B11", "scales of the 8-bit second moments are 1", LOUD,
          optimizer=lambda self, groups: AdamW8bit(groups, self.config.lr), loaded=set_to("absmax2", 1.0),
          also=("B4", "B6", "B3", "D10"), why="a part of a second moment was lost", **PLAIN),
    fault("y14_adafactor_exchanged", "B11", "Adafactor's second moments of vectors are zero", LOUD,
          optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=lost("variance"), also=("B1", "B3", "B4"),
          why="second moments of some parameters were lost"),
    fault("y15_dcp_made_up", "B1", "a new optimizer, whose state the save makes up", LOUD, fresh=("optimizer",),
          also=("B2",), why="state lost; its counter too", **DCP),
    fault("y16_dcp_counters", "B2", "counters of the vectors begin at 0", LOUD, loaded=counters_of_vectors,
          also=("C9", "G6"), why="counters disagree", **DCP),
    # schedules
    fault("y20_one_cycle_again", "C1", "OneCycle begins anew", LOUD, schedule=one_cycle, fresh=("scheduler",),
          also=("C2", "B8"), why="the lr starts again"),
    fault("y21_decayed_twice", "B8", "an exponential schedule goes on from a factor of its lr", LOUD,
          schedule=exponential, loaded=lr_times(0.1, 0.5, 2.0), also=("C2", "C3", "H1"),
          why="an lr that the schedule did not set"),
    fault("y22_stairs_forgotten", "C2", "the lr is back at the top of its stairs", LOUD, schedule=stairs,
          loaded=back_at_base, also=("C1", "B8", "H1"), why="an lr that the schedule did not set"),
    fault("y23_plateau_anew", "C1", "a plateau's schedule begins anew, the lr is kept", LOUD, base=Plateau,
          fresh=("scheduler",), also=("C2", "A5", "B8", "C9"), why="the schedule's own memory was lost"),
    fault("y24_one_lr", "H1", "one lr for all layers, where each had its own", ECHO, groups=layerwise, loaded=one_lr,
          also=("B8", "C2"), why="the groups tell the new values"),
    fault("y25_scale_again", "D8", "the loss scale begins anew", ECHO, base=Doubling, fresh=("scaler",)),
    # averages, other nets
    fault("y30_slow_weights", "A5", "Lookahead's slow weights are another process's", LOUD, base=Looking,
          fresh=("slow",), also=("A2", "B1", "F4"), why="a copy beside the weights was not restored"),
    fault("y31_average_counts_anew", "F4", "the average's count begins at 0", LOUD, base=Averaged,
          fresh=("ema_updates",), also=("C9",), why="a counter of the average alone"),
    fault("y32_average_of_new_process", "F4", "the average is another process's", LOUD, base=Averaged, fresh=("ema",),
          also=("A2", "A5"), why="tensors that were not loaded"),
    fault("y33_mean_counts_anew", "F4", "an equal mean counts from 0 again", ECHO, base=Swung, fresh=("n_averaged",),
          also=("C9",), why="a counter of the average alone"),
    fault("y34_other_reference", "F6", "the reference is another process's", ECHO, base=Referred, fresh=("target",),
          also=("A2", "A5", "F4"), why="frozen weights that changed"),
    # masters, precision
    fault("y35_masters_from_bf16", "D1", "the loop's masters made anew from bf16", SOON, base=Mastered,
          fresh=("master_weights",)),
    fault("y36_masters_random", "D2", "the loop's masters are another process's", LOUD, base=Mastered,
          loaded=masters_random, also=("A2",), why="tensors that were not loaded"),
    fault("y37_doubles_rounded", "D7", "weights of 64 bits went through 32", SOON, net=doubles,
          loaded=changed(lambda name: True, lambda t: t.float().double()), also=("D1",),
          why="weights are their own masters"),
    # layouts
    fault("y40_gates", "E4", "an LSTM's gates in another order", ECHO,
          net=net(lambda width: nn.LSTM(width, width, batch_first=True)),
          loaded=changed(lambda name: "inner." in name, gates), also=("E1", "E2", "E3", "E6"),
          why="fused rows in another order"),
    fault("y41_taps", "E1", "a convolution's taps in the other order", ECHO, net=net(Normed),
          loaded=changed(called("conv.weight"), lambda t: t.flip(2)), also=("E4", "E6", "A2"), why="another axis"),
    fault("y42_rows_per_head", "E4", "rows of in_proj as head by head", ECHO, net=net(transformer(0.0)),
          loaded=changed(called("in_proj_weight", "in_proj_bias"), per_head), also=("E1", "E6"),
          why="fused rows in another order"),
    fault("y43_norms_turned", "E9", "statistics and weights of two norms exchanged", "echo next", net=net(two_norms),
          loaded=exchange("inner.0.norm.", "inner.1.norm."), also=("A5", "G6", "A2", "E3"),
          why="whole tensors elsewhere"),
    fault("y44_lengths", "A2", "lengths of normed weights are 1", LOUD, net=net(spectral),
          loaded=changed(called("original0"), torch.ones_like), also=("A3", "E12", "A5"),
          why="tensors that were not loaded"),
    # missing
    fault("y50_affine_anew", "A3", "a batch norm's weight is 1, its bias 0", SOON, net=net(Normed),
          loaded=changed(called("norm.weight", "norm.bias"), lambda t: torch.full_like(t, float(t.mean() > 0.5))),
          also=("A2",), why="tensors that were not loaded"),
    fault("y51_masks_lost", "A5", "masks of pruning are 1", ECHO, net=net(pruned),
          loaded=changed(called("weight_mask"), torch.ones_like), also=("A2",), why="buffers that were not loaded",
          **PLAIN),
    fault("y52_observers_lost", "A5", "observers begin anew", LOUD, net=net(qat), loaded=observers_anew,
          also=("D9", "G1"), why="buffers that were not loaded; they are infinite", **PLAIN),
    fault("y53_head_not_loaded", "A2", "the head was not in what was loaded", ECHO, take=without_head,
          needs={"tied": False}, also=("F2", "F7", "E8"), why="a tensor that was not loaded", **DCP),
    fault("y54_none_matches", "A1", "all names have a prefix, and none was loaded", ECHO, base=Wrapped,
          take=none_matches, also=("A2", "D2"), why="tensors that were not loaded"),
    fault("y55_wrapped_again", "A1", "saves have the wrapper's prefix twice", ECHO, base=Wrapped, loaded=wrapped_again,
          also=("A4",), why="names alone changed"),
    # the loop
    fault("y60_orphans", "B8", "the model was made anew behind the optimizer's back: nothing is trained", LATER,
          loaded=orphans(lambda name: True), also=("G7", "G6", "D6", "H1", "C9"),
          why="weights and state stand still, as in a save that repeats an older one", **PLAIN),
    fault("y61_orphan_table", "B8", "the embedding was made anew behind the optimizer's back", LATER,
          loaded=orphans(lambda name: "embed" in name), needs={"tied": False}, also=("H1", "D6", "G6"),
          why="a weight that stands still", **PLAIN),
    fault("y62_frozen_layer", "H1", "a layer gets no gradient any more", LATER, loaded=frozen_layer,
          also=("D6", "B8", "G6"), why="weights that stand still", **PLAIN),
    fault("y63_parts_summed", "C10", "losses of micro-batches are added, not averaged", LATER, clip=0.0, parts=4,
          loss=summed, loaded=marked, also=("B10", "D8", "H1", "H3", "H4", "G9"),
          why="second moments grow; larger gradients do the same"),
    fault("y64_unclipped", "H1", "nobody clips any more, and no file says so", LATER, loaded=unclipped, visible=False),
    fault("y65_no_dropout", "H1", "dropout is off, and no file says so", LATER, net=net(transformer(0.3)),
          loaded=evaluated, visible=False),
]  # fmt: skip

OPENED2_LIVE: list[Fault] = [*WELL, *MEANT, *ILL]
