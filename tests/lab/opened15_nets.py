"""Modules, optimizers and loops that the fifteenth set shares: small vision, sequence, policy, codebook trainings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.live import Decoder, Groups, Loop
from tests.lab.optimizers import Optimizer

Tensor = torch.Tensor
FILES = ("torch_save", "folder", "lightning")


def noise(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5000 + step))


def states(loop: Loop, number: int = 0) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """``(name, weight, state)`` of what an optimizer holds."""
    names = {id(weight): name for name, weight in loop.module.named_parameters()}
    held = loop.optimizers[number]
    weights = [weight for group in held.param_groups for weight in group["params"]]
    return [(names.get(id(w), "?"), w, held.state[w]) for w in weights if w in held.state]


def rebuilt(loop: Loop, net: nn.Module, *, keep: bool = True, rename: Callable[[str], str] = lambda name: name) -> None:
    """Another module after the load; its optimizer gets the old state by name where shapes fit."""
    old = {name: state for name, _, state in states(loop)} if keep else {}
    told = [schedule.state_dict() for schedule in loop.schedules]
    loop.module = net
    loop.optimizers = loop.made()
    loop.schedules = [one for one in map(loop.schedule, loop.optimizers) if one is not None]
    for name, weight in net.named_parameters():
        state = old.get(rename(name))
        if state and weight.requires_grad and all(t.shape == weight.shape for t in state.values() if _sized(t)):
            loop.optimizers[0].state[weight] = copy.deepcopy(state)
    for schedule, state in zip(loop.schedules, told, strict=False):
        schedule.last_epoch, schedule._step_count = state["last_epoch"], state["_step_count"]
        for group, factor in zip(schedule.optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(schedule.last_epoch)
        schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def _sized(value: Any) -> bool:
    return torch.is_tensor(value) and value.ndim > 0


class Rows(Loop):
    """A classifier of rows; the data of a step is always the same."""

    layouts = FILES
    width, classes, rows = 24, 6, 32

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.width, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 6)
        )

    def tokens(self) -> Tensor:
        return noise(self.step, self.rows, self.width)

    def labels(self, x: Tensor) -> Tensor:
        return (x[:, : self.classes] + x[:, self.classes : 2 * self.classes] ** 2).argmax(1)

    def loss(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x), self.labels(x))


class Twin(Rows):
    """An encoder of two equal blocks."""

    def net(self) -> nn.Module:
        block = lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))  # noqa: E731
        return nn.ModuleDict({"inp": nn.Linear(24, 32), "one": block(), "two": block(), "head": nn.Linear(32, 6)})

    def loss(self, x: Tensor) -> Tensor:
        m = self.module
        h = m["inp"](x).relu()
        h = h + m["one"](h)
        h = h + m["two"](h)
        return F.cross_entropy(m["head"](h), self.labels(x))


class Conv(Rows):
    """Convolutions with batch norm."""

    width = 48

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (3, 4, 4)),
            nn.Conv2d(3, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 6),
        )


class Fused(nn.Module):
    """One attention with a fused qkv, as GPT-NeoX groups it by head, and a fused gate and up."""

    def __init__(self, h: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, h)
        self.query_key_value = nn.Linear(h, 3 * h)
        self.dense = nn.Linear(h, h)
        self.gate_up_proj = nn.Linear(h, 4 * h, bias=False)
        self.down_proj = nn.Linear(2 * h, h, bias=False)
        self.norm = nn.LayerNorm(h)
        self.head = nn.Linear(h, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        rows, length, width = h.shape
        q, k, v = self.query_key_value(h).view(rows, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        h = h + self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up_proj(self.norm(h)).chunk(2, -1)
        return self.head((h + self.down_proj(F.silu(gate) * up)).mean(1))


class Attends(Rows):
    """Classifies rows of six tokens."""

    def net(self) -> nn.Module:
        return nn.ModuleDict({"transformer": Fused()})

    def tokens(self) -> Tensor:
        return noise(self.step, 16, 48)

    def loss(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module["transformer"](x.view(len(x), 6, 8)), self.labels(x))


class Recurrent(Rows):
    """A tagger: an LSTM over random symbols, its embedding tied to nothing."""

    def net(self) -> nn.Module:
        return nn.ModuleDict({"emb": nn.Embedding(30, 16), "rnn": nn.LSTM(16, 24, batch_first=True),
                              "out": nn.Linear(24, 30)})  # fmt: skip

    def tokens(self) -> Tensor:
        return torch.randint(30, (8, 12), generator=torch.Generator().manual_seed(self.step)).cumsum(1) % 30

    def loss(self, x: Tensor) -> Tensor:
        found = self.module["out"](self.module["rnn"](self.module["emb"](x))[0])
        return F.cross_entropy(found[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Averaged(Loop):
    """With averaged weights under their own key."""

    layouts = FILES
    decay = 0.95

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def rate(self) -> float:
        return self.decay

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                mean = self.extra["ema"][name]
                mean.lerp_(tensor.float(), 1 - self.rate()) if mean.is_floating_point() else mean.copy_(tensor)


class Told(Loop):
    """Stores its arguments, as launchers do."""

    layouts = FILES
    arguments: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        self.extra["args"] = {
            "learning_rate": c.lr,
            "weight_decay": c.weight_decay,
            "train_batch_size": c.batch,
            "gradient_accumulation_steps": 1,
            "max_grad_norm": self.clip,
            "seed": 1234,
            "dropout": 0.0,
            "seq_length": c.length,
            "rope_theta": c.rope_theta,
            "world_size": 8,
            "data_path": "corpus_a",
        } | self.arguments


class Remembers(Loop):
    """Keeps its last eight states in memory, for faults that bring an older one back."""

    past: list[dict[str, Any]] = []  # noqa: RUF012

    def update(self) -> None:
        type(self).past = [*type(self).past, copy.deepcopy(self.content())][-8:]
        super().update()


class Adapters(Loop):
    """Adapters alone are trained; the base is stored too."""

    layouts = FILES
    rank = 4

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=self.rank)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found

    def config_after(self) -> Config:
        return self.config


# ---- optimizers ------------------------------------------------------------------------------------------------------


class MasterAdam(Optimizer):
    """Transformer Engine's FusedAdam with fp32 masters in the state, and the counter in the group."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, bias_correction=True, betas=betas, eps=1e-8, weight_decay=weight_decay, step=0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(weight, dtype=torch.float32)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "master_param": weight.detach().float().clone()}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        g, t = gradient.float(), group["step"]
        state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
        under = (state["exp_avg_sq"] / (1 - b2**t)).sqrt().add_(group["eps"])
        step = state["exp_avg"] / (1 - b1**t) / under + group["weight_decay"] * state["master_param"]
        state["master_param"].sub_(step, alpha=group["lr"])
        weight.copy_(state["master_param"])


class Mixed(Loop):
    """bf16 weights, fp32 masters."""

    layouts = ("torch_save", "lightning")

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return MasterAdam(groups, lr=self.config.lr, betas=self.config.betas)


class Sophia(Optimizer):
    """A diagonal Hessian every tenth update; the update is clipped elementwise."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=(0.965, 0.99), rho=0.04, weight_decay=weight_decay)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "hessian": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        if int(state["step"]) % 10 == 0:
            state["hessian"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        state["step"] += 1
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].mul_(b1).add_(gradient, alpha=1 - b1)
        ratio = (state["exp_avg"].abs() / (group["rho"] * 32 * state["hessian"] + 1e-15)).clamp(max=1)
        weight.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Adan(Optimizer):
    """sail-sg/Adan: three averages and the previous gradient, negated."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=weight_decay, step=0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad")}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        change = state["neg_pre_grad"] + gradient if group["step"] > 1 else torch.zeros_like(gradient)
        both = gradient + b2 * change
        state["exp_avg"].lerp_(gradient, 1 - b1)
        state["exp_avg_diff"].lerp_(change, 1 - b2)
        state["exp_avg_sq"].mul_(b3).addcmul_(both, both, value=1 - b3)
        under = state["exp_avg_sq"].sqrt() / math.sqrt(1 - b3 ** group["step"]) + group["eps"]
        weight.addcdiv_(state["exp_avg"] + b2 * state["exp_avg_diff"], under, value=-group["lr"])
        weight.div_(1 + group["lr"] * group["weight_decay"])
        state["neg_pre_grad"] = -gradient.clone()


class AdEMAMix(Optimizer):
    """Apple's AdEMAMix: a fast and a slow average; alpha grows with the steps."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999, 0.9999), alpha=2.0, T_alpha=100, eps=1e-8,
                         weight_decay=weight_decay)  # fmt: skip

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0} | {n: torch.zeros_like(weight) for n in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        state["step"] += 1
        t = state["step"]
        state["exp_avg_fast"].lerp_(gradient, 1 - b1)
        state["exp_avg_slow"].lerp_(gradient, 1 - b3)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        alpha = min(t / group["T_alpha"], 1.0) * group["alpha"]
        under = (state["exp_avg_sq"] / (1 - b2**t)).sqrt().add_(group["eps"])
        weight.addcdiv_(state["exp_avg_fast"] / (1 - b1**t) + alpha * state["exp_avg_slow"], under, value=-group["lr"])


class SM3(Optimizer):
    """Google's SM3: one accumulator for each axis."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, eps=1e-30)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        shapes = [[n if i == axis else 1 for i, n in enumerate(weight.shape)] for axis in range(weight.ndim)]
        return {"step": 0, "momentum_buffer": torch.zeros_like(weight)} | {
            f"accumulator_{axis}": torch.zeros(shape) for axis, shape in enumerate(shapes)
        }

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1
        both = state["accumulator_0"]
        for axis in range(1, weight.ndim):
            both = torch.minimum(both, state[f"accumulator_{axis}"])
        both = both + gradient**2
        for axis in range(weight.ndim):
            rest = [i for i in range(weight.ndim) if i != axis]
            state[f"accumulator_{axis}"] = both.amax(rest, keepdim=True) if rest else both.clone()
        state["momentum_buffer"].lerp_(gradient / both.add(group["eps"]).sqrt(), 0.1)
        weight.sub_(state["momentum_buffer"], alpha=group["lr"])


class GaLore(Optimizer):
    """Adam in a subspace of rank 4, which is found anew every fifteenth update."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, rank=4, gap=15)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        if weight.ndim == 2 and min(weight.shape) > group["rank"]:
            if state["step"] % group["gap"] == 0:
                state["ortho_matrix"] = torch.linalg.svd(gradient, full_matrices=False)[2][: group["rank"]].contiguous()
            gradient = gradient @ state["ortho_matrix"].T
        if "exp_avg" not in state:
            state |= {"exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].mul_(b1).add_(gradient, alpha=1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        step = state["exp_avg"] / (1 - b1**t) / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"])
        weight.sub_(step @ state["ortho_matrix"] if "ortho_matrix" in state else step, alpha=group["lr"])


class Langevin(Optimizer):
    """SGD with noise of the temperature; no state."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, temperature=1e-4, weight_decay=weight_decay)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient, alpha=-group["lr"])
        weight.add_(torch.randn_like(weight), alpha=math.sqrt(2 * group["lr"] * group["temperature"]))


class KahanAdam(Optimizer):
    """AdamW of optimi for bf16: what the weights lose is kept in a buffer."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=weight_decay, kahan_sum=True)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(weight)
        return {"step": torch.tensor(0), "exp_avg": zeros, "exp_avg_sq": zeros.clone(), "kahan_comp": zeros.clone()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        state["step"] += 1
        t = int(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - b1)
        state["exp_avg_sq"].lerp_(gradient * gradient, 1 - b2)
        step = state["exp_avg"] / (1 - b1**t) / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"])
        state["kahan_comp"].sub_(step, alpha=group["lr"])
        held = weight.clone()
        weight.add_(state["kahan_comp"])
        state["kahan_comp"].add_(held - weight)


class Lookahead(torch.optim.AdamW):
    """AdamW whose weights go half the way back to slow ones every fifth update; these are in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and "slow_buffer" not in self.state[weight]:
                    self.state[weight]["slow_buffer"] = weight.clone()
                    self.state[weight] |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight),
                                           "exp_avg_sq": torch.zeros_like(weight)}  # fmt: skip
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if state and int(state["step"]) % 5 == 0:
                    state["slow_buffer"].lerp_(weight, 0.5)
                    weight.copy_(state["slow_buffer"])


AdamW8bit, Lion, Adafactor = other.AdamW8bit, other.Lion, torch.optim.Adafactor
