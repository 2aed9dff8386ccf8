"""The seventeenth sealed set: healthy ways to train that are not usual."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.fault import Fault
from tests.lab.live import Loop, variant
from tests.lab.opened16_nets import AdamLike, Lora, draws, mlp, seeded
from tests.lab.opened17_nets import (
    Agent,
    Averaged,
    Book,
    Dropped,
    Nano,
    Pictures,
    Shop,
    Tagger,
    Towers,
    Vectors,
    named,
)

__all__ = ["HEALTHY17"]

Tensor = torch.Tensor
HEALTHY17: list[Fault] = []
PICKLED = ("torch_save", "torch_save", "lightning")


def well(id: str, text: str, base: type[Loop], **more: Any) -> None:
    HEALTHY17.append(variant(id, text, base=base, **more))


# ---- optimizers ------------------------------------------------------------------------------------------------------


class Each(torch.optim.Optimizer):
    """Calls `one` for every parameter with a gradient."""

    fields: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **self.fields})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.before(group)
            for w in group["params"]:
                if w.grad is not None:
                    self.one(w, w.grad, self.state[w], group)

    def before(self, group: dict[str, Any]) -> None:
        pass

    def one(self, w: Tensor, g: Tensor, s: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Dog(Each):
    """Distance over gradients: no learning rate, the first weights are kept."""

    def before(self, group: dict[str, Any]) -> None:
        ws = [w for w in group["params"] if w.grad is not None]
        for w in ws:
            self.state[w].setdefault("init_buffer", w.clone())
        far = math.sqrt(sum(float((w - self.state[w]["init_buffer"]).pow(2).sum()) for w in ws))
        group["rbar"] = max(group.get("rbar", 1e-3), far)
        group["G"] = group.get("G", 1e-8) + sum(float(w.grad.pow(2).sum()) for w in ws)
        group["eta"] = group["rbar"] / math.sqrt(group["G"])

    def one(self, w, g, s, group):
        w.add_(g, alpha=-group["eta"])


class Hypergradient(Each):
    """The rate of each tensor follows the product of two gradients in a row."""

    def one(self, w, g, s, group):
        if not s:
            s |= {"prev_grad": torch.zeros_like(w), "rate": torch.tensor(10 * group["lr"])}
        s["rate"].add_((g * s["prev_grad"]).sum() * 1e-3).clamp_(1e-4, 0.5)
        s["prev_grad"].copy_(g)
        w.sub_(s["rate"] * g)


class TopK(AdamLike):
    """Only the largest tenth of a step is made; the rest waits in a residual."""

    def direction(self, u, w, g, s, group):
        rest = s.setdefault("residual", torch.zeros_like(w))
        rest.add_(u)
        least = rest.abs().flatten().kthvalue(max(1, int(0.9 * rest.numel()))).values
        out = rest * (rest.abs() >= least)
        rest.sub_(out)
        return out


class SignedPower(Each):
    """Power-sign: a step grows where gradient and momentum agree."""

    def one(self, w, g, s, group):
        m = s.setdefault("m", torch.zeros_like(w))
        m.lerp_(g, 0.1)
        w.sub_(10 * group["lr"] * torch.exp(m.sign() * g.sign()) * g)


class Madam(Each):
    """Multiplicative updates."""

    fields: dict[str, Any] = {"p_scale": 3.0, "g_bound": 10.0}  # noqa: RUF012

    def one(self, w, g, s, group):
        if not s:
            s |= {"step": 0, "max": 3 * w.abs().mean() + 1e-3, "exp_avg_sq": torch.zeros_like(w)}
        s["step"] += 1
        s["exp_avg_sq"].mul_(0.999).addcmul_(g, g, value=0.001)
        scaled = (g / (s["exp_avg_sq"] / (1 - 0.999 ** s["step"])).sqrt()).nan_to_num().clamp(-10, 10)
        w.mul_(torch.exp(-group["lr"] * scaled * w.sign())).clamp_(-s["max"], s["max"])


class Nesterovized(AdamLike):
    """Adan's thought in Adam's state: the last step is kept and half of it is made again."""

    def direction(self, u, w, g, s, group):
        last = s.setdefault("last_step", torch.zeros_like(w))
        out = u + 0.5 * last
        last.copy_(u)
        return out


class Factored(Each):
    """One curvature for each row, one for each column, their product's root divides (as in Shampoo's diagonal)."""

    def one(self, w, g, s, group):
        if w.ndim < 2:
            s.setdefault("diag", torch.full_like(w, 1e-6)).add_(g * g)
            w.sub_(10 * group["lr"] * g / s["diag"].sqrt())
            return
        g2 = g.flatten(1)
        s.setdefault("left", torch.full((len(g2),), 1e-6)).add_(g2.pow(2).sum(1))
        s.setdefault("right", torch.full((g2.shape[1],), 1e-6)).add_(g2.pow(2).sum(0))
        w.sub_(3 * group["lr"] * (g2 / (s["left"][:, None] * s["right"]).pow(0.25)).view_as(w))


def by(kind: Any, **more: Any) -> Any:
    return lambda self, groups: kind(groups, lr=self.config.lr, **more)


well(
    "sb01_dog",
    "distance over gradients, without a schedule",
    Vectors,
    optimizer=by(Dog),
    schedule=lambda s, o: None,
    layouts=PICKLED,
)
well("sb02_hypergradient", "rates that are learned, one a tensor", Pictures, optimizer=by(Hypergradient))
well("sb03_top_tenth", "a tenth of each step is made, the rest kept as a residual", Nano, optimizer=by(TopK))
well("sb04_power_sign", "PowerSign", Tagger, optimizer=by(SignedPower))
well("sb05_multiplied", "multiplicative updates in a box", Towers, optimizer=by(Madam))
well("sb06_step_again", "half of the last step is made again", Nano, optimizer=by(Nesterovized))
well("sb07_rows_columns", "sums of squares by row and column", Pictures, optimizer=by(Factored))

# ---- trainers --------------------------------------------------------------------------------------------------------


def clamped(self: Any) -> None:
    Vectors.update(self)
    with torch.no_grad():
        self.module.logit_scale.clamp_(max=math.log(15))


well("sb08_clamped_temperature", "a temperature that is held below a bound", Towers, update=clamped)


class Zeroth(Vectors):
    """MeZO: two forward passes along a direction from a seed, no gradients and no state."""

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.config.lr)

    def update(self) -> None:
        tokens, ws = self.tokens(), list(self.module.parameters())
        zs = [draws(9_000_000 + 100 * self.step + i, *w.shape) for i, w in enumerate(ws)]
        with torch.no_grad():
            found = []
            for by in (1e-3, -2e-3):
                for w, z in zip(ws, zs, strict=True):
                    w.add_(z, alpha=by)
                found.append(float(self.loss(tokens)))
            slope = (found[0] - found[1]) / 2e-3
            for w, z in zip(ws, zs, strict=True):
                w.add_(z, alpha=1e-3)
                w.grad = z * slope / 50
        self.apply()
        self.step += 1
        self.extra["sampler"]["index"] += 1
        self.extra["consumed_samples"] += self.extra["args"]["batch_size"]


well("sb09_mezo", "no gradients: two losses along a random direction", Zeroth)


class Local(Vectors):
    """Every layer has a target and an optimizer of its own; nothing is propagated between them."""

    layouts = PICKLED

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def made(self) -> list[torch.optim.Optimizer]:
        kinds = (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD)
        pairs = zip(kinds, self.module, strict=True)
        return [kind(one.parameters(), lr=self.config.lr * (1 + 9 * i)) for i, (kind, one) in enumerate(pairs)]

    def loss(self, x: Tensor) -> Tensor:
        want, total = self.target(x), torch.zeros(())
        for one in self.module:
            x = one(x.detach()).tanh()
            total = total + F.mse_loss(x, want)
        return total


well("sb10_local_losses", "a loss and an optimizer for each layer", Local)


def polyak(self: Any) -> None:
    with torch.no_grad():
        norm = sum(float(w.grad.pow(2).sum()) for w in self.module.parameters())
        for group in self.optimizers[0].param_groups:
            group["lr"] = min(0.1, 0.05 * self.seen / (norm + 1e-6))
    self.optimizers[0].step()


def noted(self: Any, tokens: Tensor) -> Tensor:
    found = Vectors.loss(self, tokens)
    self.seen = float(found.detach())
    return found


well(
    "sb11_polyak",
    "the rate comes from the loss and the gradient's norm",
    Vectors,
    apply=polyak,
    loss=noted,
    optimizer=lambda self, groups: torch.optim.SGD(groups, lr=0.01),
    schedule=lambda self, one: None,
)


def on_grid(self: Any) -> None:
    Nano.update(self)
    with torch.no_grad():
        for w in self.module.parameters():
            w.copy_((w * 1024).round() / 1024)


well("sb12_grid", "weights are rounded to multiples of 1/1024 after each update", Nano, update=on_grid)


def anderson(self: Any) -> None:
    Vectors.update(self)
    flat = torch.cat([w.detach().flatten() for w in self.module.parameters()])
    self.extra["iterates"] = torch.cat([self.extra["iterates"][1:], flat[None]]) if self.step > 1 else flat.repeat(3, 1)
    if self.step % 6 == 0:
        a, b, c = self.extra["iterates"]
        best, at = c + 0.5 * (c - b) - 0.1 * (b - a), 0
        with torch.no_grad():
            for w in self.module.parameters():
                w.copy_(best[at : at + w.numel()].view_as(w))
                at += w.numel()


class Extrapolated(Vectors):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["iterates"] = torch.zeros(3, sum(w.numel() for w in self.module.parameters()))


well("sb13_extrapolated", "every sixth update the weights jump along the last three", Extrapolated, update=anderson)


def blocks_in_turn(self: Any) -> None:
    """BAdam: a block a time; the state of the others is thrown away."""
    turn = self.step // 5 % 3
    for n, w in named(self).items():
        if n.startswith("h.") and not n.startswith(f"h.{turn}."):
            w.grad = None
            self.optimizers[0].state.pop(w, None)
    Loop.gradients(self)


well(
    "sb14_badam",
    "a block is trained at a time, the others have no state",
    Nano,
    gradients=blocks_in_turn,
    layouts=("torch_save", "lightning"),
)


class Backtracking(Vectors):
    """An update that makes the batch's loss larger is taken back, and the rate shrinks."""

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.5)

    def schedule(self, optimizer: Any) -> Any:
        return None

    def update(self) -> None:
        tokens = self.tokens()
        with torch.no_grad():
            old = [w.clone() for w in self.module.parameters()]
            first = float(self.loss(tokens))
        super().update()
        with torch.no_grad():
            worse = float(self.loss(tokens)) > first
            for group in self.optimizers[0].param_groups:
                group["lr"] *= 0.7 if worse else 1.05
            if worse:
                for w, was in zip(self.module.parameters(), old, strict=True):
                    w.copy_(was)


well("sb15_backtracking", "updates that do not help are taken back", Backtracking)


class TwoAverages(Averaged):
    """Two averages of another length, each with a name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema_long"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                self.extra["ema_long"][n].lerp_(w, 1 / (1 + self.extra["ema_updates"]) ** 0.7)


well("sb16_two_averages", "two averages of other lengths", TwoAverages)


class Prioritised(Vectors):
    """Rows are drawn by their last losses, which are stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["priorities"] = torch.ones(64)

    def tokens(self) -> Tensor:
        made = seeded(31 * self.extra["sampler"]["index"] + 7)
        self.picked = torch.multinomial(self.extra["priorities"], 24, generator=made)
        return draws(88, 64, self.wide)[self.picked]

    def loss(self, x: Tensor) -> Tensor:
        each = (self.module(x) - self.target(x)).pow(2).mean(1)
        self.extra["priorities"][self.picked] = each.detach() + 0.05
        return each.mean()


well("sb17_priorities", "rows are drawn by their last losses", Prioritised)


class Energy(Vectors):
    """An energy whose negative samples live in a buffer and walk by Langevin steps."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"net": mlp(16, 32, 1)})
        found.register_buffer("samples", draws(3, 64, 16))
        return found

    def loss(self, x: Tensor) -> Tensor:
        net, buffer = self.module["net"], self.module.samples
        at = torch.randperm(64, generator=seeded(self.step))[:16]
        walk = buffer[at].clone().requires_grad_(True)
        slope = torch.autograd.grad(net(walk).sum(), walk)[0]
        moved = (walk - 0.1 * slope).detach() + 0.05 * draws(12_000 + self.step, 16, 16)
        with torch.no_grad():
            buffer[at] = moved
        low, high = net(x), net(moved)
        return low.mean() - high.mean() + 0.1 * (low.pow(2).mean() + high.pow(2).mean())


well("sb18_energy_buffer", "negative samples walk in a buffer", Energy)


class Historical(Vectors):
    """A graph net that keeps the embeddings of nodes it has not visited."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
        found.register_buffer("history", torch.zeros(50, 16))
        found.register_buffer("adjacency", (draws(6, 50, 50) > 1.3).float())
        return found

    def loss(self, x: Tensor) -> Tensor:
        at = torch.randperm(50, generator=seeded(self.step))[:12]
        nodes = draws(2, 50, 16)
        inner = self.module["a"](nodes[at]).relu()
        seen = self.module.history.clone()
        seen[at] = inner
        with torch.no_grad():
            self.module.history[at] = inner
        return F.mse_loss(self.module["b"](self.module.adjacency[at] @ seen / 5), self.target(nodes)[at])


well("sb19_node_history", "a graph net with stored embeddings of nodes", Historical)


class Distilled(Vectors):
    """Its own snapshot of every fifteenth update teaches it; the snapshot is among the weights."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"student": mlp(16, 32, 16), "snapshot": mlp(16, 32, 16)})
        found["snapshot"].load_state_dict(found["student"].state_dict())
        return found.requires_grad_(True)

    def groups(self) -> Any:
        self.module["snapshot"].requires_grad_(False)
        return super().groups()

    def loss(self, x: Tensor) -> Tensor:
        out = self.module["student"](x)
        return F.mse_loss(out, self.target(x)) + 0.3 * F.mse_loss(out, self.module["snapshot"](x))

    def update(self) -> None:
        super().update()
        if self.step % 15 == 0:
            self.module["snapshot"].load_state_dict(self.module["student"].state_dict())


well("sb20_own_snapshot", "its own snapshot teaches it", Distilled)


class Ranked(Lora, Book):
    """AdaLoRA: the importance of each rank is averaged, the least are set to zero."""

    layouts = ("torch_save", "lightning", "folder")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["importance"] = {n: torch.zeros(4) for n in named(self, "lora_A")}

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in named(self, "lora_A").items():
                held = self.extra["importance"][n]
                held.mul_(0.85).add_((w * w.grad).abs().sum(1))
                if self.step % 8 == 0:
                    w[held.argmin()] = 0


well("sb21_adalora", "the least ranks of adapters are set to zero now and then", Ranked)


class Ia3(Book):
    """Vectors on the norms alone are trained; the optimizer never sees the rest."""

    def net(self) -> nn.Module:
        found = super().net()
        for n, w in found.named_parameters():
            w.requires_grad_("layernorm" in n)
        return found

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adamax(groups, lr=5 * self.config.lr)


well("sb22_gains_alone", "gains alone, by Adamax", Ia3)


def mixed_up(self: Any, x: Tensor) -> Tensor:
    made = torch.Generator()
    made.set_state(self.extra["generator"])
    share = torch.rand(len(x), 1, generator=made)
    order = torch.randperm(len(x), generator=made)
    self.extra["generator"] = made.get_state()
    y = self.target(x)
    return F.mse_loss(self.module(share * x + (1 - share) * x[order]), share * y + (1 - share) * y[order])


well("sb23_mixup", "mixup by a stored generator", Dropped, loss=mixed_up)


class Ternary(Vectors):
    """BitNet: the forward pass sees -1, 0 and 1 times a scale that is stored as a buffer."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"a": nn.Linear(16, 40), "b": nn.Linear(40, 16)})
        for one in found.values():
            one.register_buffer("scale", one.weight.detach().abs().mean())
        return found

    def loss(self, x: Tensor) -> Tensor:
        for i, one in enumerate(self.module.values()):
            with torch.no_grad():
                one.scale.lerp_(one.weight.abs().mean(), 0.3)
                coarse = (one.weight / one.scale).round().clamp(-1, 1) * one.scale
            x = F.linear(x, one.weight + (coarse - one.weight).detach(), one.bias)
            x = F.gelu(x) if i == 0 else x
        return F.mse_loss(x, self.target(torch.ones(1, self.wide)).expand_as(x))


well("sb24_ternary", "ternary weights, latent ones are stored", Ternary)


class Hyper(Vectors):
    """A network that writes another one's weights."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"code": nn.Embedding(4, 6), "write": nn.Linear(6, 16 * 16)})

    def loss(self, x: Tensor) -> Tensor:
        w = self.module["write"](self.module["code"].weight).view(4, 16, 16)
        parts = x[: len(x) // 4 * 4].chunk(4)
        return sum(
            F.mse_loss(p @ one.T, self.target(p) * (i + 1)) for i, (p, one) in enumerate(zip(parts, w, strict=True))
        )


well(
    "sb25_hypernetwork",
    "a network that writes weights, SGD with momentum that OneCycle moves",
    Hyper,
    optimizer=lambda self, groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    schedule=lambda self, one: torch.optim.lr_scheduler.OneCycleLR(one, 0.2, total_steps=400),
)


class Fixed(Vectors):
    """Deep equilibrium: the last fixed point begins the next search, and is stored."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"f": nn.Linear(16, 16), "out": nn.Linear(16, 16)})

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["fixed_point"] = torch.zeros(16)

    def loss(self, x: Tensor) -> Tensor:
        z = self.extra["fixed_point"].expand(len(x), 16)
        for _ in range(6):
            z = (0.5 * self.module["f"](z) + x).tanh()
        self.extra["fixed_point"] = z.detach().mean(0)
        return F.mse_loss(self.module["out"](z), self.target(x))


well("sb26_equilibrium", "the last fixed point is stored", Fixed)
well("sb27_shop", "Adagrad with a falling rate for tables, AdamW for the rest, a row twice in a batch", Shop)


def delayed(self: Any) -> None:
    Agent.update(self)
    if self.step % 25 == 0:  # a reset of the statistics' weight, as when the task drifts
        self.module.obs_count.fill_(100.0)


well("sb28_drifting_task", "an agent whose statistics lose weight every 25 updates", Agent, update=delayed)


def thermostat(self: Any) -> None:
    """A controller holds the gradient's norm by the rate."""
    norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1e9))
    told = self.extra["controller"]
    told["integral"] = 0.9 * told["integral"] + (norm - 1.0)
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr * math.exp(-0.1 * max(-5.0, min(5.0, told["integral"])))


class Held(Nano):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["controller"] = {"integral": 0.0}


well(
    "sb29_controller",
    "a controller sets the rate by the gradient's norm",
    Held,
    gradients=thermostat,
    schedule=lambda self, one: None,
)


def untied_decay(self: Any) -> None:
    """Weight decay towards an average of the weights, not to zero."""
    Averaged.update(self)
    with torch.no_grad():
        for n, w in self.module.named_parameters():
            w.lerp_(self.extra["ema"][n], 0.02)


well(
    "sb30_pulled_to_average", "weights are pulled to their own average after each update", Averaged, update=untied_decay
)
well(
    "sb31_double",
    "a tagger in fp64 by NAdam under a triangular rate",
    Tagger,
    build=lambda self: Tagger.build(self).double(),
    loss=lambda self, x: Tagger.loss(self, x.double()),
    optimizer=lambda self, groups: torch.optim.NAdam(groups, lr=self.config.lr),
    schedule=lambda self, one: torch.optim.lr_scheduler.CyclicLR(
        one, self.config.lr / 5, self.config.lr, step_size_up=9, cycle_momentum=False
    ),
)
well(
    "sb32_one_row",
    "batch norms with a momentum of .5, RAdam, batches that alternate in size",
    Pictures,
    tokens=lambda self: Pictures.__mro__[1].tokens(self)[: 4 + 9 * (self.extra["sampler"]["index"] % 2)],
    optimizer=lambda self, groups: torch.optim.RAdam(groups, lr=self.config.lr, decoupled_weight_decay=True),
)
