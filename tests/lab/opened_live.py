"""Trainers in plain torch that were sealed once: they were counted, then opened, and are tuned on now."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Experts, Sheltered, muon, optim
from tests.lab.optimizers import AdamW8bit, Lion, Optimizer, ScheduleFreeAdamW

__all__ = ["OPENED_LIVE"]

Tensor = torch.Tensor
Held = dict[str, Any]
Update = Callable[[Tensor, Tensor, Held, Held], None]


# ---- optimizers ------------------------------------------------------------------------------------------------------


def ruled(begin: Callable[[Tensor], Held], update: Update, **defaults: Any) -> Any:
    """An optimizer of these two functions; ``update(weight, gradient, state, group)``."""

    class Ruled(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr, **({"weight_decay": 0.0} | defaults))

        def begin(self, weight: Tensor, group: Held) -> Held:
            return begin(weight)

        def update(self, weight: Tensor, gradient: Tensor, state: Held, group: Held) -> None:
            update(weight, gradient, state, group)

    return Ruled


def zeros(*names: str, **more: Any) -> Callable[[Tensor], Held]:
    return lambda weight: dict(more) | {name: torch.zeros_like(weight) for name in names}


def adan(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """sail-sg/Adan."""
    a, b, c = group["betas"]
    state["step"] += 1
    t = state["step"]
    last = state.setdefault("neg_pre_grad", -g)
    change = last + g
    state["exp_avg"].lerp_(g, 1 - a)
    state["exp_avg_diff"].lerp_(change, 1 - b)
    seen = g + b * change
    state["exp_avg_sq"].mul_(c).addcmul_(seen, seen, value=1 - c)
    under = (state["exp_avg_sq"] / (1 - c**t)).sqrt_().add_(group["eps"])
    w.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - a**t))
    w.addcdiv_(state["exp_avg_diff"], under, value=-group["lr"] * b / (1 - b**t))
    w.div_(1 + group["lr"] * group["weight_decay"])
    state["neg_pre_grad"] = -g


def lars(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Momentum in proportion to the weight's norm."""
    g = g + group["weight_decay"] * w
    ratio = group["trust_coefficient"] * w.norm() / (g.norm() + group["eps"]) if w.ndim > 1 else 1.0
    state["momentum_buffer"].mul_(group["momentum"]).add_(g * ratio)
    w.add_(state["momentum_buffer"], alpha=-group["lr"])


def adabound(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Luolc/AdaBound."""
    a, b = group["betas"]
    state["step"] += 1
    t = state["step"]
    state["exp_avg"].mul_(a).add_(g, alpha=1 - a)
    state["exp_avg_sq"].mul_(b).addcmul_(g, g, value=1 - b)
    size = group["lr"] * math.sqrt(1 - b**t) / (1 - a**t)
    low = group["final_lr"] * (1 - 1 / (group["gamma"] * t + 1))
    high = group["final_lr"] * (1 + 1 / (group["gamma"] * t))
    w.sub_((size / state["exp_avg_sq"].sqrt().add(group["eps"])).clamp_(low, high) * state["exp_avg"])


def adamp(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """clovaai/AdamP: the part of the step along the weight is taken away."""
    a, b = group["betas"]
    state["step"] += 1
    t = state["step"]
    state["exp_avg"].mul_(a).add_(g, alpha=1 - a)
    state["exp_avg_sq"].mul_(b).addcmul_(g, g, value=1 - b)
    step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() / math.sqrt(1 - b**t)).add_(group["eps"])
    if w.ndim > 1 and F.cosine_similarity(g.flatten(), w.flatten(), 0).abs() < group["delta"] / math.sqrt(w[0].numel()):
        unit = w / (w.norm(dim=1, keepdim=True) + group["eps"])
        step = step - unit * (unit * step).sum(1, keepdim=True)
    w.add_(step, alpha=-group["lr"] / (1 - a**t))


def madgrad(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """facebookresearch/madgrad: dual averaging."""
    k = group.setdefault("k", 0)
    lamb = group["lr"] * math.sqrt(k + 1)
    state.setdefault("x0", w.clone())
    state["grad_sum_sq"].addcmul_(g, g, value=lamb)
    state["s"].add_(g, alpha=lamb)
    z = state["x0"] - state["s"] / state["grad_sum_sq"].pow(1 / 3).add_(group["eps"])
    w.lerp_(z, 1 - group["momentum"])


def counted(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    madgrad(w, g, state, group)
    state["calls"] = state.get("calls", 0) + 1
    group["k"] = state["calls"] if w is group["params"][-1] else group["k"]


def novograd(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """One second moment a tensor."""
    a, b = group["betas"]
    norm = g.pow(2).sum()
    state["exp_avg_sq"] = norm if state["step"] == 0 else state["exp_avg_sq"] * b + norm * (1 - b)
    state["step"] += 1
    g = g / (state["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * w
    state["exp_avg"].mul_(a).add_(g)
    w.add_(state["exp_avg"], alpha=-group["lr"])


def sophia(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Liuhong99/Sophia: a clipped step by an estimate of the Hessian, renewed now and then."""
    a, b = group["betas"]
    state["step"] += 1
    w.mul_(1 - group["lr"] * group["weight_decay"])
    state["exp_avg"].mul_(a).add_(g, alpha=1 - a)
    if int(state["step"]) % 5 == 1:
        state["hessian"].mul_(b).addcmul_(g, g, value=1 - b)
    ratio = (state["exp_avg"].abs() / (group["rho"] * 32 * state["hessian"] + 1e-15)).clamp(max=1)
    w.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


def tiger(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    state["exp_avg"].lerp_(g, 1 - group["beta"])
    w.add_(state["exp_avg"].sign(), alpha=-group["lr"])


def adashift(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Second moments of older gradients, which wait in a queue."""
    state["step"] += 1
    queue = state.setdefault("grad_queue", [])
    queue.append(g.clone())
    if len(queue) <= group["keep_num"]:
        return
    old = queue.pop(0)
    b = group["betas"][1]
    t = state["step"] - group["keep_num"]
    state["exp_avg_sq"].mul_(b).addcmul_(old, old, value=1 - b)
    under = (state["exp_avg_sq"] / (1 - b**t)).sqrt_().add_(group["eps"])
    state["exp_avg"] = sum(queue) / len(queue)
    w.addcdiv_(state["exp_avg"], under, value=-group["lr"])


def came(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Factored second moments, and factored trust in the step."""
    a, b, c = group["betas"]
    state["step"] += 1
    square = g * g + 1e-30
    if w.ndim > 1:
        state.setdefault("exp_avg_sq_row", torch.zeros(w.shape[0])).lerp_(square.mean(1), 1 - b)
        state.setdefault("exp_avg_sq_col", torch.zeros(w.shape[1])).lerp_(square.mean(0), 1 - b)
        row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        step = g * ((row / row.mean()).rsqrt()[:, None] * col.rsqrt())
    else:
        state.setdefault("exp_avg_sq", torch.zeros_like(w)).lerp_(square, 1 - b)
        step = g * state["exp_avg_sq"].rsqrt()
    step = step / max(1.0, float(step.pow(2).mean().sqrt()))
    state["exp_avg"].lerp_(step, 1 - a)
    if w.ndim > 1:
        rest = (step - state["exp_avg"]).pow(2) + 1e-16
        state.setdefault("exp_avg_res_row", torch.zeros(w.shape[0])).lerp_(rest.mean(1), 1 - c)
        state.setdefault("exp_avg_res_col", torch.zeros(w.shape[1])).lerp_(rest.mean(0), 1 - c)
    w.add_(state["exp_avg"], alpha=-group["lr"])


def shampoo(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Kronecker factors of matrices, Adagrad of vectors."""
    state["step"] += 1
    if w.ndim > 1:
        left = state.setdefault("precond_0", 1e-2 * torch.eye(w.shape[0])).addmm_(g, g.T)
        right = state.setdefault("precond_1", 1e-2 * torch.eye(w.shape[1])).addmm_(g.T, g)
        if int(state["step"]) % 10 == 1:
            state["inv_precond_0"], state["inv_precond_1"] = _root(left), _root(right)
        g = state["inv_precond_0"] @ g @ state["inv_precond_1"]
    state["momentum_buffer"].mul_(0.9).add_(g, alpha=0.1)
    w.add_(state["momentum_buffer"], alpha=-group["lr"])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6).pow(-0.25)) @ vectors.T


def amos(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """Adam whose first step is taken by the gradient alone; decay through a state of its own."""
    state["step"] += 1
    t, b = int(state["step"]), group["beta"]
    square = g.pow(2).mean()
    state["exp_avg_sq"] = state.get("exp_avg_sq", torch.zeros(())) * b + square * (1 - b)
    rate = group["lr"] / (state["exp_avg_sq"] / (1 - b**t)).sqrt().add(1e-12)
    state["decay"] = state.get("decay", torch.zeros(())) + rate * rate * square
    w.sub_(rate / (1 + state["decay"]).sqrt() * g)


def kahan(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
    """bf16 weights with what was lost in rounding beside them."""
    a, b = group["betas"]
    state["step"] += 1
    t = int(state["step"])
    state["exp_avg"].mul_(a).add_(g.float(), alpha=1 - a)
    state["exp_avg_sq"].mul_(b).addcmul_(g.float(), g.float(), value=1 - b)
    under = (state["exp_avg_sq"] / (1 - b**t)).sqrt_().add_(group["eps"])
    state["compensation"].sub_((state["exp_avg"] / under).to(w.dtype), alpha=group["lr"] / (1 - a**t))
    old = w.clone()
    w.add_(state["compensation"])
    state["compensation"].add_(old - w)


ADAM = {"betas": (0.9, 0.98), "eps": 1e-8}
M_V = ("exp_avg", "exp_avg_sq")


# ---- other models ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, whatever is between, a head with a bias: ``forward`` gives the loss."""

    def __init__(self, vocab: int, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(vocab, width), inner, nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        x = self.inner(self.embed(tokens[:, :-1]))
        x = x[0] if isinstance(x, tuple) else x
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten()), None


class Normed(nn.Module):
    """A convolution and running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=2), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x.transpose(1, 2))[..., :-2])).transpose(1, 2)


def net(inner: Callable[[int], nn.Module]) -> Callable[[Loop], nn.Module]:
    return lambda self: Net(self.config.padded, 24, inner(24))


def transformer(dropout: float) -> Callable[[int], nn.Module]:
    return lambda width: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 2, 48, dropout, batch_first=True, activation="gelu"), 2
    )


def spectral(width: int) -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(width, 48)),
        nn.GELU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(48, width)),
    )


def qat(width: int) -> nn.Module:
    """Observers beside the weights, as quantisation-aware training has them."""

    class Observed(nn.Linear):
        def __init__(self, size: int) -> None:
            super().__init__(size, size)
            self.register_buffer("min_val", torch.tensor(math.inf))
            self.register_buffer("max_val", torch.tensor(-math.inf))
            self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))

        def forward(self, x: Tensor) -> Tensor:
            self.min_val = torch.minimum(self.min_val, x.detach().min())
            self.max_val = torch.maximum(self.max_val, x.detach().max())
            return super().forward(x)

    return nn.Sequential(Observed(width), nn.Tanh(), Observed(width))


# ---- loops -----------------------------------------------------------------------------------------------------------


class Wrapped(Loop):
    """A module inside a wrapper, whose names have its prefix in every save."""

    layouts = ("torch_save", "lightning")
    prefix = "module."

    def weights(self) -> Held:
        return {self.prefix + name: tensor for name, tensor in super().weights().items()}

    def take(self, weights: Held) -> None:
        super().take({name.removeprefix(self.prefix): tensor for name, tensor in weights.items()})


class Averaged(Loop):
    """Keeps a moving average, stored with its own count."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}
        self.extra["ema_updates"] = 0

    def apply(self) -> None:
        super().apply()
        self.extra["ema_updates"] += 1
        decay = min(0.99, (1 + self.extra["ema_updates"]) / (10 + self.extra["ema_updates"]))
        for name, weight in self.module.named_parameters():
            self.extra["ema"][name].lerp_(weight.detach(), 1 - decay)


class Looking(Loop):
    """Lookahead: slow weights follow every five updates."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["slow"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if self.step % 5 == 4:
            with torch.no_grad():
                for name, weight in self.module.named_parameters():
                    weight.copy_(self.extra["slow"][name].lerp_(weight, 0.5))


class Sharp(Loop):
    """Sharpness-aware: the gradient is taken a little uphill."""

    def gradients(self) -> None:
        named = [w for w in self.module.parameters() if w.grad is not None]
        size = torch.stack([w.grad.norm() for w in named if w.grad is not None]).norm()
        moves = [w.grad * (0.05 / (size + 1e-12)) for w in named if w.grad is not None]
        with torch.no_grad():
            for weight, move in zip(named, moves, strict=True):
                weight.add_(move)
        self.module.zero_grad()
        self.loss(self.tokens()).backward()
        with torch.no_grad():
            for weight, move in zip(named, moves, strict=True):
                weight.sub_(move)
        super().gradients()


class Noisy(Loop):
    """Noise on the gradients, by a generator that is stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.made_ = torch.Generator().manual_seed(5)
        self.extra["noise_state"] = self.made_.get_state()

    def load(self, content: Held) -> None:
        super().load(content)
        self.made_.set_state(self.extra["noise_state"])

    def gradients(self) -> None:
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.grad += 1e-3 * torch.randn(weight.shape, generator=self.made_)
        self.extra["noise_state"] = self.made_.get_state()
        super().gradients()


class Growing(Loop):
    """The batch grows, and rows get longer, as training goes on."""

    def tokens(self) -> Tensor:
        return super().tokens()[: 2 if self.step < 20 else 4, : 8 + min(8, self.step // 5)]


class Constrained(Loop):
    """Weights are put back into a box, and rows of q to length one, after each update."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if "q_proj" in name:
                    weight.div_(weight.norm(dim=1, keepdim=True))
                elif weight.ndim > 1:
                    weight.clamp_(-0.3, 0.3)


class Rival(Loop):
    """Two players: the last norm and head are trained by an optimizer of their own, every other update."""

    def made(self) -> list[torch.optim.Optimizer]:
        named = dict(self.module.named_parameters())
        late = [w for name, w in named.items() if name.startswith(("model.norm", "lm_head"))]
        rest = [w for name, w in named.items() if not name.startswith(("model.norm", "lm_head"))]
        c = self.config
        return [torch.optim.Adam(rest, lr=c.lr, betas=(0.5, 0.9)), torch.optim.RMSprop(late, lr=c.lr / 4)]

    def apply(self) -> None:
        self.optimizers[self.step % 2].step()
        for schedule in self.schedules:
            schedule.step()


class Staged(Loop):
    """Layers are frozen in turn: each update trains one of them."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if ".layers." in name and f".layers.{self.step // 8 % 2}." not in name:
                weight.grad = None
        super().gradients()


class Plateau(Loop):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        (optimizer,) = self.optimizers
        self.schedules = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)]

    def loss(self, tokens: Tensor) -> Tensor:
        found = super().loss(tokens)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.last)


class Rounding(Loop):
    """bf16 weights that are rounded by chance, fp32 moments."""

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        def update(w: Tensor, g: Tensor, state: Held, group: Held) -> None:
            a, b = group["betas"]
            state["step"] += 1
            t, g = state["step"], g.float()
            state["exp_avg"].mul_(a).add_(g, alpha=1 - a)
            state["exp_avg_sq"].mul_(b).addcmul_(g, g, value=1 - b)
            under = (state["exp_avg_sq"] / (1 - b**t)).sqrt_().add_(group["eps"])
            exact = w.float() - group["lr"] / (1 - a**t) * state["exp_avg"] / under
            bits = exact.view(torch.int32) + torch.randint(0, 1 << 16, w.shape, dtype=torch.int32)
            w.copy_((bits & -65536).view(torch.float32).bfloat16())

        made = ruled(
            lambda w: {"step": 0, "exp_avg": torch.zeros(w.shape), "exp_avg_sq": torch.zeros(w.shape)}, update, **ADAM
        )
        return made(groups, self.config.lr)


def layerwise(self: Loop) -> Groups:
    """A learning rate for each layer, smaller below."""
    held: dict[str, list[Tensor]] = {}
    for name, weight in self.module.named_parameters():
        key = ".".join(name.split(".")[:3]) if ".layers." in name else "ends"
        held.setdefault(key, []).append(weight)
    return [
        {"params": ws, "lr": self.config.lr * 0.5**n, "weight_decay": 0.01 * n} for n, ws in enumerate(held.values())
    ]


def restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 11, 2, self.config.lr / 50)


def sequence(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    parts = torch.optim.lr_scheduler
    return parts.SequentialLR(
        optimizer, [parts.LinearLR(optimizer, 0.05, total_iters=9), parts.ExponentialLR(optimizer, 0.99)], [9]
    )


def stable_decay(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) * (1.0 if n < 40 else 0.5))


def by_value(self: Loop) -> None:
    torch.nn.utils.clip_grad_value_(self.module.parameters(), 0.01)


def more_decay(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] *= 3


def other_eps(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["eps"] = 1e-6


def freeze(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        weight.requires_grad_("embed" not in name)


def other_optimizer(self: Loop) -> None:
    self.optimizers, self.schedules = [TORCH.SGD(self.module.parameters(), lr=0.05)], []


def experts_lost(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if ".experts." in name:
            self.optimizers[0].state.pop(weight, None)


# ---- faults ----------------------------------------------------------------------------------------------------------


def lost(*names: str) -> Callable[[Loop], None]:
    """For `Loop.loaded`: these states of every optimizer begin at 0."""

    def loaded(self: Loop) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for name in [name for name in names if isinstance(state.get(name), Tensor)]:
                    state[name] = torch.zeros_like(state[name])

    return loaded


def second_lost(self: Loop) -> None:
    """Of two optimizers the second was made anew."""
    self.optimizers[1].state.clear()


def crossed_scales(self: Loop) -> None:
    for state in self.optimizers[0].state.values():
        if "absmax1" in state:
            state["absmax1"] = state["absmax1"].roll(1) * 2


def codes_turned(self: Loop) -> None:
    for state in self.optimizers[0].state.values():
        if "qmap1" in state:
            state["state1"], state["state2"] = state["state2"], state["state1"]


def statistics(self: Loop) -> None:
    for name, buffer in self.module.named_buffers():
        if name.endswith(("running_mean", "num_batches_tracked")):
            buffer.zero_()
        elif name.endswith("running_var"):
            buffer.fill_(1)


def turned(*names: str) -> Callable[[Loop], None]:
    """States of parameters of one shape handed on to the next."""

    def loaded(self: Loop) -> None:
        for optimizer in self.optimizers:
            shapes: dict[Any, list[Held]] = {}
            for weight, state in optimizer.state.items():
                shapes.setdefault(weight.shape, []).append(state)
            for states in shapes.values():
                for name in names:
                    old = [state.get(name) for state in states]
                    for state, value in zip(states, [*old[1:], old[0]], strict=True):
                        if value is not None:
                            state[name] = value

    return loaded


def scaled_back(self: Loop) -> None:
    self.extra["scaler"] = dict(self.extra["scaler"], scale=2.0**40, _growth_tracker=0)


def stale_average(self: Loop) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            weight.copy_(self.extra["ema"][name])


def plateaued(self: Loop) -> None:
    (optimizer,) = self.optimizers
    for group in optimizer.param_groups:
        group["lr"] = self.config.lr / 64


def normed(self: Loop) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            if name.endswith(("norm1.weight", "norm2.weight")):
                weight.fill_(1.0)


def unshifted(self: Loop) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            if name.endswith("in_proj_weight"):
                weight.copy_(weight.roll(len(weight) // 3, 0))


ECHO = "echo next early"
LOUD = "alone echo next early"
TORCH = torch.optim
SGD = optim(TORCH.SGD, factor=20.0, momentum=0.9)
PLAIN: Any = {"layouts": ("torch_save", "folder", "lightning")}

OPENED_LIVE: list[Fault] = [
    variant("t01_adan", "Adan", optimizer=optim(
        ruled(zeros(*M_V, "exp_avg_diff", step=0), adan, betas=(0.98, 0.92, 0.99), eps=1e-8)), **PLAIN),
    variant("t02_lars", "LARS", optimizer=optim(ruled(
        zeros("momentum_buffer"), lars, momentum=0.9, trust_coefficient=0.1, eps=1e-8), factor=5.0)),
    variant("t03_adabound", "AdaBound", optimizer=optim(ruled(
        zeros(*M_V, step=0), adabound, betas=(0.9, 0.999), final_lr=0.1, gamma=1e-3, eps=1e-8)), **PLAIN),
    variant("t04_adamp", "AdamP", optimizer=optim(ruled(
        zeros(*M_V, step=0), adamp, betas=(0.9, 0.999), eps=1e-8, delta=0.1, wd_ratio=0.1, nesterov=False)), **PLAIN),
    variant("t05_madgrad", "MADGRAD", optimizer=optim(ruled(
        zeros("grad_sum_sq", "s"), counted, momentum=0.9, eps=1e-6)), schedule=lambda self, one: None, **PLAIN),
    variant("t06_novograd", "NovoGrad", optimizer=optim(ruled(
        lambda w: {"step": 0, "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros(())}, novograd,
        betas=(0.95, 0.98), eps=1e-8), factor=0.3), **PLAIN),
    variant("t07_sophia", "Sophia", optimizer=optim(ruled(
        lambda w: {"step": torch.tensor(0.0)} | zeros("exp_avg", "hessian")(w), sophia, betas=(0.965, 0.99), rho=0.04),
        factor=0.3)),
    variant("t08_tiger", "Tiger", optimizer=optim(ruled(zeros("exp_avg"), tiger, beta=0.95), factor=0.2)),
    variant("t09_adashift", "AdaShift, with gradients in a queue", optimizer=optim(ruled(
        zeros(*M_V, step=0), adashift, betas=(0.9, 0.99), keep_num=5, eps=1e-8), factor=0.3), layouts=("torch_save",)),
    variant("t10_came", "CAME", optimizer=optim(ruled(
        zeros("exp_avg", step=0), came, betas=(0.9, 0.999, 0.9999)), factor=0.2), **PLAIN),
    variant("t11_shampoo", "Shampoo", optimizer=optim(ruled(zeros("momentum_buffer", step=0), shampoo), factor=0.3),
            **PLAIN),
    variant("t12_amos", "Amos", optimizer=optim(ruled(lambda w: {"step": 0}, amos, beta=0.99), factor=0.1), **PLAIN),
    variant("t13_kahan", "bf16 with a compensation", net=lambda self: Decoder(self.config).to(torch.bfloat16),
            optimizer=optim(ruled(lambda w: {
                "step": 0, "exp_avg": torch.zeros(w.shape), "exp_avg_sq": torch.zeros(w.shape),
                "compensation": torch.zeros_like(w)}, kahan, **ADAM)), layouts=("torch_save", "lightning"),
            true=("D6",)),
    variant("t14_stochastic", "bf16 rounded by chance", base=Rounding, layouts=("torch_save", "lightning"),
            true=("D6",)),
    variant("t15_lookahead", "Lookahead over AdamW", base=Looking),
    variant("t16_sharp", "sharpness-aware", base=Sharp),
    variant("t17_average", "a moving average with a warm-up of its own", base=Averaged),
    variant("t18_noise", "noise on the gradients", base=Noisy),
    variant("t19_growing", "batch and rows grow", base=Growing),
    variant("t20_constrained", "weights put back into a box", base=Constrained),
    variant("t21_rivals", "two optimizers that take turns", base=Rival, needs={"tied": False}),
    variant("t22_in_turn", "layers trained in turn", base=Staged),
    variant("t23_plateau", "the lr falls at a plateau", base=Plateau),
    variant("t24_layerwise", "a learning rate a layer", groups=layerwise),
    variant("t25_warm_restarts", "cosine with warm restarts", schedule=restarts),
    variant("t26_sequence", "warm-up, then exponential", schedule=sequence),
    variant("t27_stable_decay", "warm-up, stable, half", schedule=stable_decay),
    variant("t28_value_clip", "gradients clipped by value", gradients=by_value),
    variant("t29_ddp_prefix", "names with module. in every save", base=Wrapped),
    variant("t30_compiled_prefix", "names with _orig_mod. in every save", base=Wrapped, prefix="_orig_mod."),
    variant("t31_lstm", "an LSTM by Adam", net=net(lambda width: nn.LSTM(width, width, 2, batch_first=True)),
            optimizer=optim(TORCH.Adam)),
    variant("t32_batch_norm", "a convolution with running statistics", net=net(Normed)),
    variant("t33_encoder", "torch's own transformer: biases, LayerNorm, fused rows", net=net(transformer(0.0))),
    variant("t34_dropout", "dropout: random states decide", net=net(transformer(0.2))),
    variant("t35_weight_norm", "weights as length and direction", net=net(spectral)),
    variant("t36_observers", "observers of quantisation-aware training", net=net(qat), **PLAIN),
    variant("t37_experts_lion", "experts without gradients, by Lion", base=Experts, optimizer=optim(Lion, factor=0.2),
            needs={"experts": 4}),
    variant("t38_late_start", "resumed within the first updates of warm-up", schedule=sequence, parts=2),
    variant("t39_betas_extreme", "beta1 of 0", optimizer=lambda self, groups: TORCH.AdamW(
        groups, lr=self.config.lr, betas=(0.0, 0.99))),
    variant("t40_sgd_dampened", "SGD with dampening and decay", optimizer=optim(
        TORCH.SGD, factor=10.0, momentum=0.8, dampening=0.5)),
    variant("e01_more_decay", "the operator raises the weight decay", kind="deliberate", loaded=more_decay,
            why="true: weight decay changed", true=("H1", "B7")),
    variant("e02_frozen_on_purpose", "the embedding is frozen from here on", kind="deliberate",
            loaded=freeze, needs={"tied": False},
            why="true: one weight stands still", true=("H1", "D6")),
    variant("e03_other_optimizer", "SGD goes on where AdamW was", kind="deliberate", fresh=("optimizer", "scheduler"),
            loaded=other_optimizer, **PLAIN, why="true: another optimizer",
            true=("B1", "C1", "H1")),
    variant("e04_eps", "a larger eps on purpose", kind="deliberate", loaded=other_eps, why="true: eps changed",
            true=("H1",)),
    # ---- faults
    fault("s90_momentum_lost", "B1", "SGD's momentum begins at 0", LOUD, optimizer=SGD,
          loaded=lost("momentum_buffer"), also=("B3",), why="state lost, as zeros"),
    fault("s91_adagrad_lost", "B1", "Adagrad's sums begin at 0", LOUD, optimizer=optim(TORCH.Adagrad, factor=4.0),
          loaded=lost("sum"), also=("B3", "B4"), why="state lost, as zeros"),
    fault("s92_rmsprop_lost", "B4", "RMSprop's squares begin at 0, its momentum goes on", LOUD,
          optimizer=optim(TORCH.RMSprop, factor=0.3, momentum=0.9), loaded=lost("square_avg"), also=("B1", "B3", "B11"),
          why="a second moment was lost"),
    fault("s93_lion_lost", "B1", "Lion's average begins at 0", LOUD, optimizer=optim(Lion, factor=0.2),
          loaded=lost("exp_avg"), also=("B3",), why="state lost, as zeros"),
    fault("s94_amsgrad_lost", "B11", "the largest second moments begin at 0", LOUD,
          optimizer=optim(TORCH.AdamW, amsgrad=True), loaded=lost("max_exp_avg_sq"), also=("B4", "B1", "B3"),
          why="one of three states was lost"),
    fault("s95_adafactor_rows", "B11", "Adafactor's rows begin at 0", LOUD,
          optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=lost("row_var"), also=("B1", "B3", "B4"),
          why="a factor of a second moment was lost"),
    fault("s96_scales_turned", "B11", "scales of 8-bit moments are those of other blocks", ECHO,
          optimizer=lambda self, groups: AdamW8bit(groups, self.config.lr), loaded=crossed_scales,
          also=("G6", "B5", "E7"), why="codes and scales of different places", **PLAIN),
    fault("s97_codes_exchanged", "B6", "codes of the two 8-bit moments exchanged", ECHO,
          optimizer=lambda self, groups: AdamW8bit(groups, self.config.lr), loaded=codes_turned, also=("B11", "B5"),
          why="each moment has the other's codes", **PLAIN),
    fault("s98_running_statistics", "A5", "running statistics begin anew", LOUD, net=net(Normed), loaded=statistics),
    fault("s99_z_lost", "B1", "the z of schedule-free AdamW begins at 0", ECHO,
          optimizer=optim(ScheduleFreeAdamW), schedule=lambda self, one: None, loaded=lost("z"), also=("B3", "A2"),
          why="state lost, as zeros"),
    fault("s100_muon_lost", "B1", "of Muon and AdamW the second has no state", LOUD, made=muon,
          loaded=second_lost, why="state lost", layouts=("torch_save", "lightning")),
    fault("s101_momentum_turned", "B5", "SGD's momentum bound to the next parameter of its shape", ECHO,
          optimizer=SGD, loaded=turned("momentum_buffer"), also=("E13",), why="state of other parameters"),
    fault("s102_nadam_turned", "B5", "NAdam's moments bound to the next parameter of their shape", ECHO,
          optimizer=optim(TORCH.NAdam), loaded=turned("exp_avg", "exp_avg_sq"), also=("E13",),
          why="state of other parameters"),
    fault("s103_scale_too_large", "D8", "the loss scale is 2 to the 40", ECHO, base=Sheltered, loaded=scaled_back),
    fault("s104_average_loaded", "F4", "the moving average loaded as the weights", "alone echo next", base=Averaged,
          loaded=stale_average),
    fault("s105_plateau_lost", "C2", "the lr of a plateau's schedule is a 64th", ECHO, base=Plateau, loaded=plateaued,
          also=("C1", "B8", "H1"), why="an lr that the schedule did not set"),
    fault("s106_layer_norms", "A3", "LayerNorms left at 1", LOUD, net=net(transformer(0.0)), loaded=normed,
          also=("A2",), why="tensors that were not loaded"),
    fault("s107_fused_rows", "E4", "rows of in_proj in the order v, q, k", ECHO, net=net(transformer(0.0)),
          loaded=unshifted, also=("E1", "E6"), why="fused rows in another order"),
    fault("s108_experts_state", "B1", "experts' state is new, the rest goes on", ECHO, base=Experts,
          needs={"experts": 4}, loaded=experts_lost,
          also=("B2", "G6"), why="state of some parameters lost; their counters begin anew"),
]  # fmt: skip
