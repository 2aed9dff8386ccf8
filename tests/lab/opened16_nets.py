"""What the sixteenth half trains: optimizers that are almost Adam, small networks of other kinds, and rebuilds."""

from __future__ import annotations

import copy
import itertools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.config import Config
from tests.lab.live import Decoder, Loop
from tests.lab.model import LORA_SCALE, initial

__all__ = ["AdamLike", "Free", "Rebuilt", "Remember", "draws", "mlp", "seeded"]

Tensor = torch.Tensor


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def draws(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(number))


class AdamLike(torch.optim.AdamW):
    """AdamW's state and fields; `direction` may do otherwise with the step, `before` with the gradient."""

    def before(self, w: Tensor, g: Tensor, s: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g

    def direction(self, u: Tensor, w: Tensor, g: Tensor, s: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return u

    def after(self, w: Tensor, s: dict[str, Any], group: dict[str, Any]) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                s = self.state[w]
                if not s:
                    s["step"] = torch.tensor(0.0)
                    s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
                g = self.before(w, w.grad, s, group)
                s["step"] += 1
                t = s["step"].item()
                w.mul_(1 - group["lr"] * group["weight_decay"])
                s["exp_avg"].lerp_(g, 1 - first)
                s["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
                u = s["exp_avg"] / (1 - first**t) / ((s["exp_avg_sq"] / (1 - second**t)).sqrt() + group["eps"])
                w.add_(self.direction(u, w, g, s, group), alpha=-float(group["lr"]))
                self.after(w, s, group)


class Cautious(AdamLike):
    """C-AdamW: where the step and the gradient disagree nothing is done, the rest is scaled up."""

    def direction(self, u, w, g, s, group):
        mask = (u * g > 0).to(u.dtype)
        return u * mask / mask.mean().clamp_(min=1e-3)


class Scaled(AdamLike):
    """The step is scaled by the root mean square of the parameter, as Adafactor's and Moonlight's are."""

    def direction(self, u, w, g, s, group):
        return u * max(w.pow(2).mean().sqrt().item(), 1e-3) * 20


class Centralised(AdamLike):
    """Gradient centralisation before the moments."""

    def before(self, w, g, s, group):
        return g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g


class Mars(AdamLike):
    """MARS: the gradient is corrected by its difference from the last one, which is stored."""

    def before(self, w, g, s, group):
        last = s.setdefault("previous_grad", torch.zeros_like(g))
        c = g + 0.025 * (group["betas"][0] / (1 - group["betas"][0])) * (g - last)
        last.copy_(g)
        return c / max(1.0, c.norm().item())


class Grok(AdamLike):
    """Grokfast: the slow part of the gradient is amplified; its average is stored with the state."""

    def before(self, w, g, s, group):
        slow = s.setdefault("grad_ema", torch.zeros_like(g))
        slow.lerp_(g, 0.02)
        return g + 2 * slow


class Langevin(AdamLike):
    """Noise of the temperature's size after each update."""

    def direction(self, u, w, g, s, group):
        return u + 2 * torch.randn_like(u)


class Kahan(AdamLike):
    """bf16 weights with a compensation that holds the low bits."""

    def direction(self, u, w, g, s, group):
        rest = s.setdefault("compensation", torch.zeros_like(w))
        rest.add_(u, alpha=-float(group["lr"]))
        old = w.clone()
        w.add_(rest)
        rest.add_(old - w)
        return torch.zeros_like(u)


class AdEMAMix(AdamLike):
    """A third, slow moment: ``exp_avg_slow``."""

    def direction(self, u, w, g, s, group):
        slow = s.setdefault("exp_avg_slow", torch.zeros_like(w))
        slow.lerp_(g, 0.001)
        t, second = s["step"].item(), group["betas"][1]
        return u + 5 * slow / ((s["exp_avg_sq"] / (1 - second**t)).sqrt() + group["eps"])


class AdamMini(torch.optim.Optimizer):
    """One second moment a block: a row of a matrix, or a whole vector (``vmean``)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        super().__init__(params, {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                s, g = self.state[w], w.grad
                block = g.pow(2).mean(-1, keepdim=True) if g.ndim > 1 else g.pow(2).mean()
                if not s:
                    s["m"], s["vmean"], s["iteration"] = torch.zeros_like(w), torch.zeros_like(block), 0
                s["iteration"] += 1
                t = s["iteration"]
                s["m"].lerp_(g, 1 - group["beta1"])
                s["vmean"].lerp_(block, 1 - group["beta2"])
                h = (s["vmean"] / (1 - group["beta2"] ** t)).sqrt() + group["eps"]
                w.mul_(1 - group["lr"] * group["weight_decay"])
                w.add_(s["m"] / (1 - group["beta1"] ** t) / h, alpha=-group["lr"])


class Adan(torch.optim.Optimizer):
    """Adan: moments of the gradient, of its difference and of their sum; the counter is the group's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0.02, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            one, two, three = group["betas"]
            t = group["step"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                s, g = self.state[w], w.grad
                if not s:
                    s |= {n: torch.zeros_like(w) for n in ("exp_avg", "exp_avg_sq", "exp_avg_diff")}
                    s["neg_pre_grad"] = -g.clone()
                d = g + s["neg_pre_grad"]
                s["exp_avg"].lerp_(g, 1 - one)
                s["exp_avg_diff"].lerp_(d, 1 - two)
                n = g + two * d
                s["exp_avg_sq"].mul_(three).addcmul_(n, n, value=1 - three)
                u = s["exp_avg"] / (1 - one**t) + two * s["exp_avg_diff"] / (1 - two**t)
                w.add_(u / ((s["exp_avg_sq"] / (1 - three**t)).sqrt() + group["eps"]), alpha=-group["lr"])
                w.div_(1 + group["lr"] * group["weight_decay"])
                s["neg_pre_grad"] = -g.clone()


class NovoGrad(torch.optim.Optimizer):
    """NovoGrad: ``exp_avg_sq`` is one number a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": (0.95, 0.98),
                "eps": 1e-8,
                "weight_decay": 0.001,
                "grad_averaging": False,
                "amsgrad": False,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                s, g = self.state[w], w.grad
                norm = g.pow(2).sum()
                if not s:
                    s |= {"step": 0, "exp_avg": torch.zeros_like(w), "exp_avg_sq": norm.clone()}
                s["step"] += 1
                s["exp_avg_sq"].mul_(two).add_(norm, alpha=1 - two)
                s["exp_avg"].mul_(one).add_(g / (s["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * w)
                w.add_(s["exp_avg"], alpha=-group["lr"])


class Sophia(torch.optim.Optimizer):
    """SophiaG: a Hessian's diagonal, renewed every fifth update, bounds the momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": (0.965, 0.99),
                "rho": 0.04,
                "weight_decay": 0.1,
                "maximize": False,
                "capturable": False,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                s, g = self.state[w], w.grad
                if not s:
                    s |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(w), "hessian": torch.zeros_like(w)}
                if s["step"].item() % 5 == 0:
                    s["hessian"].mul_(two).addcmul_(g, g, value=1 - two)
                s["step"] += 1
                s["exp_avg"].lerp_(g, 1 - one)
                w.mul_(1 - group["lr"] * group["weight_decay"])
                ratio = (s["exp_avg"].abs() / (group["rho"] * 4 * s["hessian"] + 1e-15)).clamp(max=1)
                w.addcmul_(s["exp_avg"].sign(), ratio, value=-group["lr"])


class Galore(torch.optim.Optimizer):
    """GaLore: moments in a subspace of rank 4, whose basis is renewed every tenth update."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.0, "rank": 4, "update_proj_gap": 10}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                s, g = self.state[w], w.grad
                if not s:
                    s["step"] = 0
                if w.ndim == 2:
                    if s["step"] % group["update_proj_gap"] == 0:
                        s["ortho_matrix"] = torch.linalg.svd(g, full_matrices=False).Vh[: group["rank"]].contiguous()
                    g = g @ s["ortho_matrix"].T
                if "exp_avg" not in s:
                    s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
                s["step"] += 1
                t = s["step"]
                s["exp_avg"].lerp_(g, 1 - one)
                s["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
                u = s["exp_avg"] / (1 - one**t) / ((s["exp_avg_sq"] / (1 - two**t)).sqrt() + group["eps"])
                w.add_(u @ s["ortho_matrix"] if w.ndim == 2 else u, alpha=-group["lr"])


class Lars(torch.optim.Optimizer):
    """Momentum with a rate of each tensor's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 0.001})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                g = w.grad + group["weight_decay"] * w
                if w.ndim > 1:
                    g = g * group["trust_coefficient"] * w.norm() / (g.norm() + 1e-9)
                buffer = self.state[w].setdefault("mu", torch.zeros_like(w))
                buffer.mul_(group["momentum"]).add_(g)
                w.add_(buffer, alpha=-group["lr"])


class Lookahead(torch.optim.AdamW):
    """Every fifth update the weights go half way back to the slow ones, which are stored."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for w in group["params"]:
                    s = self.state[w]
                    slow = s.setdefault("slow_buffer", w.detach().clone())
                    if int(s["step"]) % 5 == 0:
                        slow.lerp_(w, 0.5)
                        w.copy_(slow)


# ---- networks ------------------------------------------------------------------------------------------------------


def mlp(*sizes: int, norm: bool = True) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        found += [nn.Linear(a, b), nn.GELU()] + ([nn.LayerNorm(b)] if norm and b != sizes[-1] else [])
    return nn.Sequential(*found[:-1])


class Free(Loop):
    """A network on vectors, drawn from the run's seed; `score` is its loss on rows of numbers."""

    rows, wide = 32, 16

    def build(self) -> nn.Module:
        return mlp(16, 48, 48, 16)

    def net(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return self.build()

    def tokens(self) -> Tensor:
        return draws(77_000 + self.step, self.rows, self.wide)

    def target(self, x: Tensor) -> Tensor:
        return torch.sin(x @ draws(5, self.wide, self.wide) / 3)

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x), self.target(x))


class Remember(Loop):
    """Keeps the content of an earlier step for a load that takes the wrong file."""

    past: ClassVar[dict[str, Any]] = {}

    def run(self, updates: int) -> None:
        if self.step:
            return super().run(updates)
        early = updates * 2 // 3
        super().run(early)
        type(self).past = copy.deepcopy(self.content())
        super().run(updates - early)
        return None


# ---- rebuilds ------------------------------------------------------------------------------------------------------

Named = dict[str, Tensor]


class Rebuilt(Remember):
    """Loads into another decoder: ``change`` maps the weights and the config; state that still fits is kept by name.

    Attributes:
        keep: whether the optimizer's state is carried over. scheduled: whether the schedule is.
        pad: fill state of another shape with zeros; else it is new.
    """

    layouts = ("torch_save", "torch_save", "folder", "lightning")
    keep, scheduled, pad = True, True, False

    def change(self, weights: Named, config: Config) -> tuple[Named, Config]:
        return weights, config

    def source(self, name: str) -> str:
        """The earlier name of a parameter, for its state."""
        return name

    def trainable(self, name: str) -> bool:
        return True

    def order(self) -> list[str]:
        names = {id(w): name for name, w in self.module.named_parameters()}
        return [names[id(w)] for group in self.optimizers[0].param_groups for w in group["params"]]

    def remodel(self, weights: Named) -> None:
        weights, self.config = self.change(weights, self.config)
        self.module = Decoder(self.config)
        held = {n for n, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        for name in weights.keys() - held:
            self.module.put(name, nn.Parameter(weights[name].clone()))
        self.module.load_state_dict(weights)

    def load(self, content: dict[str, Any]) -> None:
        old = dict(zip(self.order(), range(10**6), strict=False))
        self.step = content["step"]
        self.remodel({k: v.clone() for k, v in content["model"].items()})
        for name, w in self.module.named_parameters():
            w.requires_grad_(self.trainable(name))
        self.optimizers = self.made()
        self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]
        self.extra |= {name: content[name] for name in self.extra if name in content}
        if self.scheduled and self.schedules:
            told, wanted = self.schedules[0], len(self.optimizers[0].param_groups)
            told.load_state_dict(content["scheduler"])
            for listed in ("base_lrs", "_last_lr", "lr_lambdas"):
                values = getattr(told, listed)
                setattr(told, listed, (values + values[-1:] * wanted)[:wanted])
            for group, lr in zip(self.optimizers[0].param_groups, told.get_last_lr(), strict=True):
                group["lr"] = lr  # else the first update would have another rate than the schedule's: a fault
        if self.keep:
            optimizer = self.optimizers[0]
            for group in optimizer.param_groups:
                was = content["optimizer"]["param_groups"][0]
                group |= {k: v for k, v in was.items() if k not in ("params", "weight_decay")}
            states = content["optimizer"]["state"]
            for name, w in self.module.named_parameters():
                number = old.get(self.source(name))
                if number in states and w.requires_grad:
                    fitted = self.fitted(states[number], w)
                    if fitted:
                        optimizer.state[w] = fitted

    def fitted(self, state: dict[str, Any], w: Tensor) -> dict[str, Any]:
        found = {}
        for key, value in state.items():
            if not torch.is_tensor(value) or value.ndim == 0 or value.shape == w.shape:
                found[key] = copy.deepcopy(value)
            elif self.pad:
                whole = torch.zeros_like(w)
                part = tuple(slice(0, min(a, b)) for a, b in zip(value.shape, w.shape, strict=True))
                whole[part] = value[part]
                found[key] = whole
            else:
                return {}
        return found


def vocabulary(rows: int, at: int | None = None):
    """``rows`` more tokens, at the mean of the others; ``at``: not at the end."""

    def change(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
        for name in [n for n in weights if "embed" in n or "lm_head" in n]:
            w = weights[name]
            new = w.mean(0, keepdim=True) + 0.01 * draws(3, rows, w.shape[1])
            cut = len(w) if at is None else at
            weights[name] = torch.cat([w[:cut], new, w[cut:]])
        return weights, config.but(padded=config.padded + rows)

    return change


def layers(order: list[int], quiet: tuple[int, ...] = ()):
    """The layers become these copies of the old ones; those at ``quiet`` places do nothing at first."""

    def change(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
        found = {name: w for name, w in weights.items() if ".layers." not in name}
        for place, old in enumerate(order):
            for name, w in weights.items():
                if name.startswith(f"model.layers.{old}."):
                    w = w.clone()
                    if place in quiet and name.endswith(("o_proj.weight", "down_proj.weight")):
                        w.zero_()
                    found[name.replace(f"layers.{old}.", f"layers.{place}.")] = w
        return found, config.but(layers=len(order))

    return change


def upcycled(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
    """Every feed-forward becomes four experts, the router is new."""
    found: Named = {}
    for name, w in weights.items():
        if ".mlp." not in name:
            found[name] = w
            continue
        for e in range(4):
            found[name.replace(".mlp.", f".mlp.experts.{e}.")] = w.clone()
    for n in range(config.layers):
        found[f"model.layers.{n}.mlp.gate.weight"] = 0.02 * draws(8 + n, 4, config.hidden)
        found[f"model.layers.{n}.mlp.gate.expert_bias"] = torch.zeros(4)
    return found, config.but(experts=4)


def widened(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
    """Net2Net: the feed-forward doubles, and its output is halved."""
    for name in [n for n in weights if ".mlp." in n]:
        w = weights[name]
        weights[name] = torch.cat([w / 2, w / 2], 1) if "down" in name else torch.cat([w, w])
    return weights, config.but(ffn=2 * config.ffn)


def untied(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    return weights, config.but(tied=False)


def adapted(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
    """Adapters of rank 4 are put on."""
    config = config.but(lora=4)
    new = {n: w for n, w in initial(config).items() if "lora_" in n}
    return new | weights, config


def folded(weights: Named, scale: float = LORA_SCALE) -> Named:
    for name in [name for name in weights if "lora_A" in name]:
        stem = name.removesuffix("lora_A.weight")
        ab = scale * weights.pop(f"{stem}lora_B.weight") @ weights.pop(name)
        weights[f"{stem}weight"] = weights[f"{stem}weight"] + ab
    return weights


def again(self: Any, weights: Named, config: Config) -> tuple[Named, Config]:
    """Adapters are merged, and new ones put on."""
    return adapted(self, folded(weights), config)


class Lora(Loop):
    """Adapters of rank 4 alone are trained."""

    rank = 4

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=self.rank)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found
