"""Healthy trainings and deliberate changes of the fifteenth set: an error would be wrong for any of them.

``true`` of a deliberate change are the causes that a question may name.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, variant
from tests.lab.live_healthy import Experts, Sheltered, Tied, only, optim
from tests.lab.model import LORA_SCALE
from tests.lab.opened15_live import Adversary, Fed, Layerwise, Observed, Patient, Quasi, Queue, Targets
from tests.lab.opened15_nets import (
    FILES,
    SM3,
    Adafactor,
    AdamW8bit,
    Adan,
    Adapters,
    AdEMAMix,
    Attends,
    Averaged,
    Conv,
    GaLore,
    KahanAdam,
    Langevin,
    Lion,
    Lookahead,
    Mixed,
    Recurrent,
    Rows,
    Sophia,
    Told,
    Twin,
    noise,
    rebuilt,
    states,
)
from tests.lab.optimizers import ScheduleFreeAdamW

HEALTHY15: list[Fault] = []
TORCH = torch.optim
Tensor = torch.Tensor


def ub(id: str, text: str, **more: Any) -> None:
    HEALTHY15.append(variant(id, text, **more))


def uc(id: str, text: str, true: str, **more: Any) -> None:
    more.setdefault("layouts", FILES)
    HEALTHY15.append(variant(id, text, kind="deliberate", true=tuple(true.split()), **more))


def named(loop: Loop) -> dict[str, nn.Parameter]:
    return dict(loop.module.named_parameters())


# ---- optimizers and schedules ----------------------------------------------------------------------------------------

ub("ub01_lookahead", "Lookahead over AdamW", base=Rows, optimizer=optim(Lookahead))
ub("ub02_sophia", "Sophia: a Hessian every tenth update", base=Attends, optimizer=optim(Sophia))
ub("ub03_adan", "Adan", base=Conv, optimizer=optim(Adan))
ub("ub04_ademamix", "AdEMAMix", base=Recurrent, optimizer=optim(AdEMAMix))
ub(
    "ub05_sm3",
    "SM3: an accumulator for each axis",
    base=Attends,
    optimizer=lambda self, groups: SM3(only(groups), lr=10 * self.config.lr),
)
ub("ub06_galore", "GaLore: subspaces found anew every fifteenth update", base=Twin, optimizer=optim(GaLore))
ub("ub07_langevin", "SGD with Langevin noise", base=Rows, optimizer=optim(Langevin, factor=10.0))
ub(
    "ub08_kahan_bf16",
    "bf16 weights with Kahan compensation",
    layouts=FILES,
    net=lambda self: Decoder(self.config).to(torch.bfloat16),
    optimizer=optim(KahanAdam),
    true=("D5", "D6"),
)
ub("ub09_lbfgs", "L-BFGS", base=Quasi)
ub("ub10_masters_in_state", "bf16 weights, masters in the optimizer's state", base=Mixed)
ub("ub11_layerwise", "layer-wise learning rates", base=Layerwise)
ub("ub12_plateau", "a plateau schedule", base=Patient)


def restarts(self: Loop, optimizer: TORCH.Optimizer) -> Any:
    return TORCH.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 11, 2, eta_min=1e-5)


def triangular(self: Loop, optimizer: TORCH.Optimizer) -> Any:
    return TORCH.lr_scheduler.CyclicLR(optimizer, 1e-3, 5e-2, step_size_up=6, mode="triangular2")


def chained(self: Loop, optimizer: TORCH.Optimizer) -> Any:
    s = TORCH.lr_scheduler
    return s.SequentialLR(optimizer, [s.LinearLR(optimizer, 0.1, total_iters=9), s.ExponentialLR(optimizer, 0.97)], [9])


def steps(self: Loop, optimizer: TORCH.Optimizer) -> Any:
    return TORCH.lr_scheduler.MultiStepLR(optimizer, [10, 20, 30, 45, 60], 0.1)


ub("ub13_warm_restarts", "cosine with warm restarts", base=Rows, schedule=restarts)
ub(
    "ub14_triangular_momentum",
    "a triangular rate, momentum against it",
    base=Conv,
    schedule=triangular,
    optimizer=optim(TORCH.SGD, momentum=0.9),
)
ub("ub15_sequential", "linear warm-up, then exponential decay, chained", base=Recurrent, schedule=chained)
ub(
    "ub16_multistep",
    "the rate falls to a tenth five times",
    base=Conv,
    schedule=steps,
    optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9, nesterov=True),
)


class Scheduled(Twin):
    """Weight decay rises by a cosine, as DINO's does, and beta2 rises too; both set in the groups."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            if group["weight_decay"]:
                group["weight_decay"] = 0.04 + 0.36 * 0.5 * (1 - math.cos(math.pi * min(1.0, self.step / 80)))
            group["betas"] = (0.9, min(0.999, 0.9 + 0.002 * self.step))
        super().apply()


class Sharpness(Rows):
    """SAM: the gradient of a point uphill, the step from where it was."""

    def gradients(self) -> None:
        with torch.no_grad():
            weights = list(self.module.parameters())
            norm = torch.stack([w.grad.norm() for w in weights]).norm()
            ups = [0.05 * w.grad / norm for w in weights]
            for w, up in zip(weights, ups, strict=True):
                w.add_(up)
                w.grad = None
        self.loss(self.tokens()).backward()
        with torch.no_grad():
            for w, up in zip(weights, ups, strict=True):
                w.sub_(up)


class Late(Rows):
    """The head's group joins the optimizer at update 52."""

    def net(self) -> nn.Module:
        found = super().net()
        found[5].requires_grad_(False)
        return found

    def groups(self) -> Groups:
        return [{"params": [w for n, w in self.module.named_parameters() if not n.startswith("5.")]}]

    def joined(self) -> None:
        if len(self.optimizers[0].param_groups) == 1:
            head = list(self.module[5].requires_grad_(True).parameters())
            self.optimizers[0].add_param_group({"params": head, "initial_lr": self.config.lr})
            self.schedules[0].base_lrs.append(self.config.lr)
            self.schedules[0].lr_lambdas.append(self.schedules[0].lr_lambdas[0])

    def load(self, content: dict[str, Any]) -> None:
        if content["step"] > 52:
            self.joined()
        super().load(content)

    def update(self) -> None:
        if self.step == 52:
            self.joined()
        super().update()


class Noisy(Rows):
    """DP-SGD's way: clipped gradients, Gaussian noise on them."""

    def gradients(self) -> None:
        super().gradients()
        for n, w in enumerate(self.module.parameters()):
            w.grad.add_(0.02 * noise(31 * self.step + n, *w.shape))


class Centred(Conv):
    """Gradients of matrices lose their mean; gradients are clipped elementwise, then by AGC."""

    def gradients(self) -> None:
        for w in self.module.parameters():
            if w.ndim > 1:
                w.grad -= w.grad.flatten(1).mean(1).view(-1, *[1] * (w.ndim - 1))
            w.grad.clamp_(-0.01, 0.01)


class Sparse(Rows):
    """An embedding with sparse gradients by SparseAdam, the rest by Adam."""

    layouts = ("torch_save", "lightning")
    clip = 0.0

    def net(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(400, 12, sparse=True), "out": nn.Linear(12, 6)})

    def made(self) -> list[TORCH.Optimizer]:
        lr = self.config.lr
        return [
            TORCH.SparseAdam(self.module["table"].parameters(), lr=lr),
            TORCH.Adam(self.module["out"].parameters(), lr),
        ]

    def loss(self, x: Tensor) -> Tensor:
        ids = (x[:, :5] * 30).long() % 400
        return F.cross_entropy(self.module["out"](self.module["table"](ids).mean(1)), ids[:, 0] % 6)


class Unused(Twin):
    """A second head that is used in every fifth update alone."""

    def net(self) -> nn.Module:
        found = super().net()
        found["aux"] = nn.Linear(32, 6)
        return found

    def loss(self, x: Tensor) -> Tensor:
        found = super().loss(x)
        if self.step % 5 == 4:
            found = found + F.cross_entropy(self.module["aux"](self.module["inp"](x)), self.labels(x)) * 0.3
        return found


class NanGuard(Recurrent):
    """Two updates of nine have gradients that are not finite: nothing is done then, the schedule goes on."""

    def apply(self) -> None:
        if self.step % 9 in (2, 3):
            self.schedules[0].step()
            return
        super().apply()


def lr_range(self: Loop) -> None:
    """A learning-rate finder in the middle of the run, all restored at its end."""
    if self.step % 15 == 6:
        kept = copy.deepcopy((self.module.state_dict(), self.optimizers[0].state_dict()))
        for power in range(5):
            for group in self.optimizers[0].param_groups:
                group["lr"] = 1e-5 * 10**power
            self.optimizers[0].zero_grad()
            self.loss(self.tokens()).backward()
            self.optimizers[0].step()
        self.module.load_state_dict(kept[0])
        self.optimizers[0].load_state_dict(kept[1])
    Rows.update(self)


ub("ub17_decay_and_beta_scheduled", "weight decay and beta2 follow schedules", base=Scheduled)
ub("ub18_sam", "SAM", base=Sharpness)
ub("ub19_group_joins_late", "a group joins the optimizer at update 52", base=Late)
ub("ub20_dp_noise", "noise on clipped gradients", base=Noisy)
ub("ub21_centred_clamped", "centred, clamped gradients", base=Centred)
ub("ub22_sparse_adam", "SparseAdam on an embedding", base=Sparse, schedule=lambda self, one: None)
ub("ub23_rarely_used_head", "a head that only every fifth update uses", base=Unused)
ub("ub24_nan_guard_schedule_on", "skipped updates, the schedule goes on", base=NanGuard)
ub("ub25_lr_finder", "a learning-rate finder that restores all", base=Rows, update=lr_range)
ub("ub26_scaler_own", "a loss scale with skips, of a tagger", base=type("S26", (Sheltered, Recurrent), {}))
ub("ub27_plain_sgd_bn", "SGD without momentum, batch norm", base=Conv, optimizer=optim(TORCH.SGD, factor=30.0))
ub("ub28_adamax_lstm", "Adamax on an LSTM", base=Recurrent, optimizer=optim(TORCH.Adamax))
ub(
    "ub29_rmsprop_policy",
    "RMSprop with a slowly following target",
    base=Targets,
    optimizer=optim(TORCH.RMSprop, factor=0.2, alpha=0.95),
)

# ---- averages, cycles ------------------------------------------------------------------------------------------------


class Warming(Averaged):
    """An average whose decay warms up, counted beside it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema_updates"] = 0

    def rate(self) -> float:
        self.extra["ema_updates"] += 1
        n = self.extra["ema_updates"]
        return min(0.999, (1 + n) / (10 + n))


class Stochastic(Rows):
    """SWA by torch: from update 10 on, every third update; stored as AveragedModel stores it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.swa = TORCH.swa_utils.AveragedModel(self.module)
        self.extra["swa_model"] = self.swa.state_dict()

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.swa.load_state_dict(content["swa_model"])
        self.extra["swa_model"] = self.swa.state_dict()

    def apply(self) -> None:
        super().apply()
        if self.step >= 10 and self.step % 3 == 0:
            self.swa.update_parameters(self.module)


class Latest(Rows):
    """LAWA: the mean of the latest four kept weights, five updates apart, with the four themselves."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra |= {"lawa_queue": [], "lawa_mean": {}}

    def apply(self) -> None:
        super().apply()
        if self.step % 5 == 0:
            now = {n: t.clone() for n, t in self.module.state_dict().items()}
            queue = [*self.extra["lawa_queue"], now][-4:]
            mean = {n: torch.stack([q[n] for q in queue]).mean(0) for n in now}
            self.extra |= {"lawa_queue": queue, "lawa_mean": mean}


class Swapping(Averaged):
    """Evaluates with the averaged weights every fourth update and swaps back."""

    def apply(self) -> None:
        super().apply()
        if self.step % 4 == 0:
            kept = copy.deepcopy(self.module.state_dict())
            self.module.load_state_dict(self.extra["ema"])
            with torch.no_grad():
                self.loss(self.tokens())
            self.module.load_state_dict(kept)


class Outer(Rows):
    """DiLoCo: AdamW inside; every tenth update an outer Nesterov step from the anchor, which is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["outer"] = {"anchor": {n: w.detach().clone() for n, w in named(self).items()},
                               "momentum": {n: torch.zeros_like(w) for n, w in named(self).items()}}  # fmt: skip

    def apply(self) -> None:
        super().apply()
        if self.step % 10 == 9:
            with torch.no_grad():
                for name, w in named(self).items():
                    anchor, m = (self.extra["outer"][part][name] for part in ("anchor", "momentum"))
                    delta = anchor - w
                    m.mul_(0.9).add_(delta)
                    anchor.sub_(0.7 * (delta + 0.9 * m))
                    w.copy_(anchor)


class Branches(Rows):
    """Two branches trained on different data, merged every eighth update."""

    def net(self) -> nn.Module:
        return nn.ModuleList([super(Branches, self).net() for _ in range(2)])

    def loss(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2)
        return sum(
            F.cross_entropy(net(part), self.labels(part)) for net, part in zip(self.module, (one, two), strict=True)
        )

    def apply(self) -> None:
        super().apply()
        if self.step % 8 == 7:
            with torch.no_grad():
                for a, b in zip(self.module[0].parameters(), self.module[1].parameters(), strict=True):
                    a.lerp_(b, 0.5)
                    b.copy_(a)


class Relora(Adapters):
    """ReLoRA: every twelfth update adapters are merged into the base and begin anew, with a short warm-up."""

    def apply(self) -> None:
        super().apply()
        if self.step % 12 == 11:
            held = named(self)
            with torch.no_grad():
                for name in [name for name in held if "lora_A" in name]:
                    stem = name.removesuffix("lora_A.weight")
                    a, b = held[name], held[f"{stem}lora_B.weight"]
                    held[f"{stem}weight"].add_(LORA_SCALE * b @ a)
                    a.copy_(noise(self.step, *a.shape) * 0.1)
                    b.zero_()
                for _, _, state in states(self):
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].mul_(0.001)


class Federated(Rows):
    """A round an update: three clients with plain SGD from the same weights, their mean by a server's momentum."""

    clip = 0.0

    def optimizer(self, groups: Groups) -> TORCH.Optimizer:
        return TORCH.SGD(groups, lr=1.0, momentum=0.5)

    def schedule(self, optimizer: TORCH.Optimizer) -> Any:
        return None

    def update(self) -> None:
        begin = copy.deepcopy(self.module.state_dict())
        total = {name: torch.zeros_like(w) for name, w in named(self).items()}
        for client in range(3):
            self.module.load_state_dict(begin)
            local = TORCH.SGD(self.module.parameters(), lr=0.1)
            for turn in range(4):
                local.zero_grad()
                self.loss(noise(self.step * 97 + client * 10 + turn, 16, self.width)).backward()
                local.step()
            for name, w in named(self).items():
                total[name] += (begin[name] - w.detach()) / 3
        self.module.load_state_dict(begin)
        for name, w in named(self).items():
            w.grad = total[name]
        self.optimizers[0].step()
        self.step += 1


class Evolved(Rows):
    """Evolution strategies: the gradient is an estimate from twelve antithetic pairs."""

    def update(self) -> None:
        held, x = named(self), self.tokens()
        with torch.no_grad():
            for w in held.values():
                w.grad = torch.zeros_like(w)
            for pair in range(12):
                noises = {n: noise(self.step * 501 + 31 * pair + i, *w.shape) for i, (n, w) in enumerate(held.items())}
                sides = []
                for sign in (1, -1):
                    moved = {n: w + sign * 0.05 * noises[n] for n, w in held.items()}
                    out = torch.func.functional_call(self.module, moved, (x,))
                    sides.append(float(F.cross_entropy(out, self.labels(x))))
                for n, w in held.items():
                    w.grad += (sides[0] - sides[1]) / (0.1 * 12) * noises[n]
        self.apply()
        self.step += 1


ub("ub30_average_warms_up", "an average whose decay warms up", base=Warming)
ub("ub31_swa", "SWA, every third update from the tenth on", base=Stochastic)
ub("ub32_latest_average", "the mean of the latest four kept weights", base=Latest)
ub("ub33_evaluates_with_average", "evaluation with averaged weights, swapped back", base=Swapping)
ub("ub34_diloco", "DiLoCo: an outer step every tenth update", base=Outer)
ub("ub35_branches_merged", "two branches merged every eighth update", base=Branches)
ub("ub36_relora", "ReLoRA: adapters merged every twelfth update", base=Relora)
ub("ub37_federated", "federated averaging with a server's momentum", base=Federated)
ub("ub38_evolution", "evolution strategies by AdamW", base=Evolved)

# ---- what a trainer sets by itself -----------------------------------------------------------------------------------


def after_each(change: Any, every: int = 1, phase: int = 0) -> Any:
    """For ``apply``: the usual update, then a change of weights by the trainer."""

    def apply(self: Any) -> None:
        Loop.apply(self)
        if self.step % every == phase:
            with torch.no_grad():
                change(self)

    return apply


def unit_rows(self: Loop) -> None:
    for w in self.module.parameters():
        if w.ndim == 2:
            w.copy_(F.normalize(w, dim=1))


def boxed(self: Loop) -> None:
    for w in self.module["critic"].parameters():
        w.clamp_(-0.1, 0.1)


class Boxed(Adversary):
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            boxed(self)


def revive(self: Loop) -> None:
    """ReDo: the least used units of the first layer are drawn anew, their outgoing weights and moments are 0."""
    one, two = self.module[0], self.module[3]
    least = (one.weight.norm(dim=1)).argsort()[:3]
    one.weight[least] = noise(self.step, 3, one.weight.shape[1]) * 0.2
    two.weight[:, least] = 0
    for name, _, state in states(self):
        if name == "0.weight":
            state["exp_avg"][least] = 0
            state["exp_avg_sq"][least] = 0


def shrink_perturb(self: Loop) -> None:
    for n, w in enumerate(self.module.parameters()):
        w.mul_(0.8).add_(noise(self.step + n, *w.shape) * 0.02)


class Tempered(Rows):
    """A temperature that the trainer anneals: a parameter without gradient; a Gumbel noise of that size."""

    def net(self) -> nn.Module:
        found = super().net()
        found.register_parameter("temperature", nn.Parameter(torch.tensor(1.0), requires_grad=False))
        return found

    def loss(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x) / self.module.temperature, self.labels(x))

    def apply(self) -> None:
        super().apply()
        self.module.temperature.data.fill_(max(0.1, 0.97 ** (self.step // 3)))


class Normalised(Rows):
    """Observations are whitened by running statistics in float64 whose count grows by the batch."""

    def net(self) -> nn.Module:
        found = super().net()
        for name, value in (
            ("obs_mean", torch.zeros(24)),
            ("obs_var", torch.ones(24)),
            ("obs_count", torch.tensor(1e-4)),
        ):
            found.register_buffer(name, value.double())
        return found

    def loss(self, x: Tensor) -> Tensor:
        m = self.module
        n, seen = len(x), m.obs_count.clone()
        delta = x.mean(0).double() + 0.02 * self.step - m.obs_mean
        total = seen + n
        m.obs_var.copy_((m.obs_var * seen + x.var(0).double() * n + delta**2 * seen * n / total) / total)
        m.obs_mean.add_(delta * n / total)
        m.obs_count.copy_(total)
        return F.cross_entropy(m(((x - m.obs_mean) / m.obs_var.sqrt()).float()), self.labels(x))


class Hard(Targets):
    """The target is set to the weights every tenth update."""

    def apply(self) -> None:
        Loop.apply(self)
        if self.step % 10 == 9:
            self.extra["target_network"] = {n: t.clone() for n, t in self.module.state_dict().items()}


class Teacher(Rows):
    """BYOL's way: a teacher inside the module with a momentum that rises to 1, and a centre."""

    def net(self) -> nn.Module:
        student = super().net()
        teacher = copy.deepcopy(student).requires_grad_(False)
        found = nn.ModuleDict({"student": student, "teacher": teacher})
        found.register_buffer("center", torch.zeros(1, 6))
        return found

    def loss(self, x: Tensor) -> Tensor:
        m = self.module
        goal = m["teacher"](x + 0.1 * noise(self.step + 3, *x.shape))
        found = -(((goal - m.center) / 0.5).softmax(1) * (m["student"](x) / 0.7).log_softmax(1)).sum(1).mean()
        m.center.mul_(0.9).add_(goal.mean(0, keepdim=True), alpha=0.1)
        return found

    def apply(self) -> None:
        super().apply()
        rate = 1 - 0.04 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / 100)))
        with torch.no_grad():
            for t, s in zip(self.module["teacher"].parameters(), self.module["student"].parameters(), strict=True):
                t.lerp_(s, 1 - rate)


class Codebook(Rows):
    """A VQ codebook by averages; codes that nobody uses are set to a row of the batch."""

    def net(self) -> nn.Module:
        found = nn.ModuleDict({"enc": nn.Linear(24, 16), "dec": nn.Linear(16, 24)})
        book = torch.randn(40, 16)
        for name, value in (("embed", book), ("embed_avg", book.clone()), ("cluster_size", torch.ones(40))):
            found.register_buffer(name, value)
        return found

    def loss(self, x: Tensor) -> Tensor:
        m = self.module
        z = m["enc"](x)
        with torch.no_grad():
            hot = F.one_hot(torch.cdist(z, m.embed).argmin(1), 40).float()
            code = hot @ m.embed
            m.cluster_size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            m.embed_avg.mul_(0.9).add_(hot.T @ z, alpha=0.1)
            m.embed.copy_(m.embed_avg / (m.cluster_size[:, None] + 1e-5))
            dead = m.cluster_size < 0.2
            m.embed[dead] = z[torch.arange(int(dead.sum())) % len(z)]
            m.embed_avg[dead] = m.embed[dead]
            m.cluster_size[dead] = 1.0
        return F.mse_loss(m["dec"](z + (code - z).detach()), x) + 0.25 * F.mse_loss(z, code)


class Spectral(Rows):
    def net(self) -> nn.Module:
        found = super().net()
        parametrizations.spectral_norm(found[0])
        parametrizations.weight_norm(found[3])
        return found


class Orthogonal(Rows):
    def net(self) -> nn.Module:
        found = super().net()
        parametrizations.orthogonal(found[3])
        return found


class Pruned(Twin):
    """Magnitude pruning by torch: masks are buffers, half the elements are 0 from the beginning on."""

    def net(self) -> nn.Module:
        found = super().net()
        for part in ("one", "two"):
            prune.random_unstructured(found[part][0], "weight", amount=0.5)
        return found


class Rigged(Rows):
    """RigL: every tenth update the smallest weights are dropped and others grown from 0, with no moments."""

    def net(self) -> nn.Module:
        found = super().net()
        found[3].register_buffer("mask", (torch.rand(40, 40) < 0.3).float())
        with torch.no_grad():
            found[3].weight.mul_(found[3].mask)
        return found

    def gradients(self) -> None:
        super().gradients()
        self.full = self.module[3].weight.grad.clone()
        self.module[3].weight.grad.mul_(self.module[3].mask)

    def apply(self) -> None:
        super().apply()
        layer = self.module[3]
        with torch.no_grad():
            if self.step % 10 == 3:
                alive = layer.mask.bool()
                drop = (layer.weight.abs() + 9 * (1 - layer.mask)).flatten().argsort()[:60]
                grow = (self.full.abs() * ~alive).flatten().argsort(descending=True)[:60]
                layer.mask.view(-1)[drop] = 0
                layer.mask.view(-1)[grow] = 1
                state = self.optimizers[0].state[layer.weight]
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].mul_(layer.mask)
                    state[key].view(-1)[grow] = 0
            layer.weight.mul_(layer.mask)


class Balanced(Experts):
    """Experts with a bias that balances them, moved by its sign, and set about 0 now and then."""

    def apply(self) -> None:
        super().apply()
        for name, bias in self.module.named_buffers():
            if name.endswith("expert_bias") and name in self.load_:
                load = self.load_[name].float()
                bias.add_(0.01 * (load.mean() - load).sign())
                bias.sub_(bias.mean())


class Weighted(Twin):
    """GradNorm's way: task weights are parameters that the trainer scales to a sum of 2 after each update."""

    def net(self) -> nn.Module:
        found = super().net()
        found["aux"] = nn.Linear(32, 1)
        found.register_parameter("task_weights", nn.Parameter(torch.ones(2)))
        return found

    def loss(self, x: Tensor) -> Tensor:
        w = self.module.task_weights
        other_ = F.mse_loss(self.module["aux"](self.module["inp"](x))[:, 0], x[:, 0])
        return w[0] * super().loss(x) + w[1] * other_

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            w = self.module.task_weights
            w.clamp_(min=0.05).mul_(2 / w.sum())


class Actor(Rows):
    """An actor with a log std, an adaptive KL coefficient and a replay ring stored beside it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra |= {"kl_coef": 0.2, "replay": {"obs": torch.zeros(96, 24), "ptr": 0, "full": False}}

    def net(self) -> nn.Module:
        found = super().net()
        found.register_parameter("log_std", nn.Parameter(torch.zeros(6)))
        return found

    def loss(self, x: Tensor) -> Tensor:
        ring = self.extra["replay"]
        at = ring["ptr"]
        ring["obs"][at : at + 32] = x
        ring |= {"ptr": (at + 32) % 96, "full": ring["full"] or at == 64}
        mean, std = self.module(ring["obs"][: 96 if ring["full"] else at + 32]), self.module.log_std.exp()
        kl = 0.5 * (mean**2 + std**2 - 1).mean() - self.module.log_std.mean()
        self.extra["kl_coef"] *= 1.5 if float(kl.detach()) > 0.3 else 1 / 1.5
        self.extra["kl_coef"] = min(max(self.extra["kl_coef"], 1e-3), 10.0)
        return F.mse_loss(mean[:, 0], ring["obs"][: len(mean), 0]) + self.extra["kl_coef"] * kl


class Three(Rows):
    """Soft actor-critic: actor, critic and a temperature by an optimizer each, two critics' targets inside."""

    layouts = ("torch_save", "lightning")

    def net(self) -> nn.Module:
        found = nn.ModuleDict(
            {"actor": nn.Linear(24, 4), "critic": nn.Linear(28, 1), "critic_target": nn.Linear(28, 1)}
        )
        found["critic_target"].requires_grad_(False)
        found.register_parameter("log_alpha", nn.Parameter(torch.zeros(())))
        return found

    def made(self) -> list[TORCH.Optimizer]:
        m, lr = self.module, self.config.lr
        return [TORCH.Adam(m["actor"].parameters(), lr), TORCH.Adam(m["critic"].parameters(), 2 * lr),
                TORCH.Adam([m.log_alpha], lr)]  # fmt: skip

    def schedule(self, optimizer: TORCH.Optimizer) -> Any:
        return None

    def update(self) -> None:
        m, x = self.module, self.tokens()
        act = m["actor"](x).tanh()
        goal = x[:, :1] + 0.9 * m["critic_target"](torch.cat([x.flip(0), act.detach().flip(0)], 1))
        losses = (
            m.log_alpha.exp().detach() * act.pow(2).mean() - m["critic"](torch.cat([x, act], 1)).mean(),
            F.mse_loss(m["critic"](torch.cat([x, act.detach()], 1)), goal.detach()),
            -(m.log_alpha * (act.detach().pow(2).mean() - 0.3)),
        )
        held = [[w for group in one.param_groups for w in group["params"]] for one in self.optimizers]
        found = [torch.autograd.grad(loss, ws, retain_graph=True) for loss, ws in zip(losses, held, strict=True)]
        for optimizer, weights, gradients in zip(self.optimizers, held, found, strict=True):
            for w, gradient in zip(weights, gradients, strict=True):
                w.grad = gradient
            optimizer.step()
        with torch.no_grad():
            for t, s in zip(m["critic_target"].parameters(), m["critic"].parameters(), strict=True):
                t.lerp_(s, 0.05)
        self.step += 1


class Carried(Recurrent):
    """Truncated backpropagation: the hidden state is carried over the updates, and stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["hidden"] = [torch.zeros(1, 8, 24), torch.zeros(1, 8, 24)]

    def loss(self, x: Tensor) -> Tensor:
        out, hidden = self.module["rnn"](self.module["emb"](x), tuple(self.extra["hidden"]))
        self.extra["hidden"] = [h.detach().clone() for h in hidden]
        return F.cross_entropy(self.module["out"](out)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Rolls(Fed):
    """The loader comes to the end of an epoch every seventh update: position 0, another seed."""

    def apply(self) -> None:
        super().apply()
        told = self.extra["dataloader"]
        if told["position"] == 7:
            told |= {"epoch": told["epoch"] + 1, "position": 0, "seed": 4321 + told["epoch"] + 1}


class Grows(Told):
    """The batch grows with the steps, and so do the rows; samples are counted."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["consumed_samples"] = 0

    def tokens(self) -> Tensor:
        found = batch(self.config.but(batch=2 + self.step // 3), self.step, 1234)
        self.extra["consumed_samples"] += len(found)
        return found[:, : 9 + min(self.step // 10, 8)]


class Dropped(Rows):
    """Dropout and stochastic depth by the global generator, whose state is stored."""

    def net(self) -> nn.Module:
        found = super().net()
        found.insert(3, nn.Dropout(0.2))
        return found

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_state"] = torch.Generator().manual_seed(77).get_state()

    def update(self) -> None:
        torch.set_rng_state(self.extra["rng_state"])
        super().update()
        self.extra["rng_state"] = torch.get_rng_state()


class Snapshots(Rows):
    """A snapshot ensemble: at the end of each cycle the weights are kept, the rate begins anew."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["snapshots"] = []

    def apply(self) -> None:
        super().apply()
        if self.step % 12 == 11:
            self.extra["snapshots"].append({n: t.clone() for n, t in self.module.state_dict().items()})


class Fades(Conv):
    """Progressive growing: a second path fades in by a buffer that counts up to 1."""

    def net(self) -> nn.Module:
        found = nn.ModuleDict({"old": super().net(), "new": nn.Linear(48, 6)})
        found.register_buffer("alpha", torch.zeros(()))
        return found

    def loss(self, x: Tensor) -> Tensor:
        m = self.module
        m.alpha.add_(0.02).clamp_(max=1.0)
        return F.cross_entropy((1 - m.alpha) * m["old"](x) + m.alpha * m["new"](x), self.labels(x))


class Thaws(Twin):
    """Gradual unfreezing: head first, a block more every eighth update."""

    def gradients(self) -> None:
        order = ["head", "two", "one", "inp"]
        for name in order[1 + self.step // 8 :]:
            for w in self.module[name].parameters():
                w.grad = None
        super().gradients()


class Prompted(Loop):
    """Only the adapters are stored, as PEFT does."""

    layouts = FILES

    def net(self) -> nn.Module:
        return Adapters.net(self)  # type: ignore[arg-type]

    rank = 4

    def config_after(self) -> Config:
        return self.config

    def __init__(self, config: Config) -> None:
        super().__init__(config.but(seed=7))

    def weights(self) -> dict[str, Any]:
        return {n: t for n, t in self.module.state_dict().items() if "lora_" in n}

    def take(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict(weights, strict=False)


class Biases(Attends):
    """BitFit: biases and norms alone are trained."""

    def net(self) -> nn.Module:
        found = super().net()
        for w in found.parameters():
            w.requires_grad_(w.ndim < 2)
        return found


class Boundaries(Conv):
    """Learned step sizes that the trainer keeps above a floor; weights standardised in the forward pass."""

    def net(self) -> nn.Module:
        found = super().net()
        found.register_parameter("step_size", nn.Parameter(torch.tensor(0.05)))
        return found

    def loss(self, x: Tensor) -> Tensor:
        s = self.module.step_size
        q = x / s
        return F.cross_entropy(self.module((q + (q.round() - q).detach()) * s), self.labels(x))

    def apply(self) -> None:
        super().apply()
        self.module.step_size.data.clamp_(min=0.049)


class Alternates(Twin):
    """Block-coordinate training: odd updates train one block, even ones the other."""

    def gradients(self) -> None:
        still = "one" if self.step % 2 else "two"
        for w in self.module[still].parameters():
            w.grad = None
        super().gradients()


class Signed(Rows):
    """signSGD by a majority of four parts, with error feedback stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["residual"] = {n: torch.zeros_like(w) for n, w in named(self).items()}

    def gradients(self) -> None:
        for n, w in named(self).items():
            r = self.extra["residual"][n]
            r.add_(w.grad)
            w.grad = r.sign() * r.abs().mean()
            r.sub_(w.grad)


ub(
    "ub39_unit_rows",
    "rows of all matrices are set to length 1 after each update",
    base=Rows,
    apply=after_each(unit_rows),
)
ub("ub40_weight_clipping", "a critic whose weights are clipped", base=Boxed)
ub("ub41_gan", "a GAN, the generator every second update", base=Adversary)
ub("ub42_dead_units", "dead units drawn anew every eleventh update", base=Rows, apply=after_each(revive, 11, 4))
ub("ub43_shrink_perturb", "shrink and perturb every twelfth update", base=Rows, apply=after_each(shrink_perturb, 12, 2))
ub("ub44_temperature", "a temperature that the trainer anneals", base=Tempered)
ub("ub45_running_normaliser", "observations whitened by running statistics", base=Normalised)
ub("ub46_hard_target", "a target set to the weights every tenth update", base=Hard)
ub("ub47_teacher_momentum", "a teacher with a momentum schedule, and a centre", base=Teacher)
ub("ub48_codebook_revival", "a codebook with dead codes revived", base=Codebook)
ub("ub49_spectral_weight_norm", "spectral norm and weight norm", base=Spectral)
ub("ub50_orthogonal", "an orthogonal matrix by its parametrization", base=Orthogonal)
ub("ub51_pruned", "pruned by masks", base=Pruned)
ub("ub52_rigl", "RigL: masks change every tenth update", base=Rigged)
ub("ub53_experts_balanced", "experts balanced by a bias", base=Balanced, needs={"experts": 4})
ub("ub54_task_weights", "task weights scaled to a sum after each update", base=Weighted)
ub("ub55_actor_replay", "an actor, an adaptive coefficient, a replay ring", base=Actor)
ub("ub56_three_optimizers", "soft actor-critic: three optimizers", base=Three)
ub("ub57_hidden_carried", "a hidden state is carried over updates", base=Carried)
ub("ub58_epochs_roll", "the loader comes to the end of its epochs", base=Rolls)
ub("ub59_batch_grows", "batch and length grow", base=Grows)
ub("ub60_dropout", "dropout with a stored generator", base=Dropped)
ub(
    "ub61_snapshots",
    "snapshot ensemble with warm restarts",
    base=Snapshots,
    schedule=lambda self, one: TORCH.lr_scheduler.CosineAnnealingWarmRestarts(one, 12),
)
ub("ub62_fades_in", "a second path fades in", base=Fades)
ub("ub63_gradual_unfreezing", "gradual unfreezing", base=Thaws)
ub("ub64_adapters_alone", "adapters alone are stored", base=Prompted)
ub("ub65_biases_only", "biases alone are trained", base=Biases)
ub("ub66_learned_step_size", "a learned step size with a floor", base=Boundaries)
ub("ub67_block_coordinate", "blocks are trained in turns", base=Alternates)
ub("ub68_error_feedback", "compressed gradients with error feedback", base=Signed)
ub("ub69_momentum_queue", "a queue of negatives", base=Queue)
ub("ub70_qat_observers", "observers of fake quantisation", base=Observed)
ub(
    "ub71_tied_tagger",
    "tied embeddings, saved under both names",
    base=Tied,
    needs={"tied": True},
    layouts=("torch_save", "lightning"),
)
ub("ub72_amsgrad_conv", "AMSGrad with decay in the gradient", base=Conv, optimizer=optim(TORCH.Adam, amsgrad=True))

# ---- changes on purpose ----------------------------------------------------------------------------------------------

OPT = "B1 B2 B3 H1 C1 C2 C4 B8 A4 B7"


def inner(rename: Any, **changes: Any) -> Any:
    """For ``loaded``: a decoder with another config, its weights by ``rename`` of names, state kept where it fits."""

    def loaded(self: Loop) -> None:
        old = self.module.state_dict()
        self.config = self.config.but(**changes)
        net = Decoder(self.config)
        with torch.no_grad():
            for name, weight in net.named_parameters():
                source = old.get(rename(name))
                if source is not None and source.shape == weight.shape:
                    weight.copy_(source)
        rebuilt(self, net, rename=rename)

    return loaded


uc(
    "uc01_layer_dropped",
    "the last layer is dropped to make a smaller model",
    "H1 A2 A4 E9",
    loaded=inner(lambda name: name, layers=2),
    needs={"layers": 3},
)
uc(
    "uc02_depth_grown",
    "depth up-scaling: two layers more, copies of the last two",
    "H1 A4 E9 A2",
    loaded=inner(lambda name: name.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1."), layers=4),
)


def head_exchanged(self: Loop) -> None:
    net = copy.deepcopy(self.module)
    net["head"] = nn.Linear(32, 4)
    rebuilt(self, net)


def to_four(self: Loop, x: Tensor) -> Tensor:
    return Rows.labels(self, x) % self.module["head"].out_features


uc(
    "uc03_head_exchanged",
    "a head of four classes instead of six, the optimizer's state of the body kept",
    "A2 H1 B1 A4 F7",
    base=Twin,
    loaded=head_exchanged,
    labels=to_four,
)


def tokens_exchanged(self: Loop) -> None:
    held = named(self)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name in ("emb.weight", "out.weight", "out.bias"):
            held[name].copy_(held[name][order])
        held["emb.weight"][20:] = noise(1, 10, 16) * 0.1
    rebuilt(self, copy.deepcopy(self.module), keep=False)


uc(
    "uc04_tokenizer_exchanged",
    "another tokenizer: rows in its order, ten drawn anew, a fresh optimizer",
    "F7 E1 A2 B1 H1 G6",
    base=Recurrent,
    loaded=tokens_exchanged,
)


def shrunk(self: Loop) -> None:
    old = self.module
    told = {n: s for n, _, s in states(self)}
    net = nn.ModuleDict({"emb": nn.Embedding(24, 16), "rnn": old["rnn"], "out": nn.Linear(24, 24)})
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(dict(old.named_parameters())[name][: len(weight)])
    rebuilt(self, net)
    for name, weight in net.named_parameters():
        if name.startswith(("emb", "out")):
            cut = {k: t[: len(weight)].clone() if t.ndim else t for k, t in told[name].items()}
            self.optimizers[0].state[weight] = cut


uc(
    "uc05_vocabulary_shrunk",
    "six symbols are dropped, with their moments",
    "F7 H1 A2",
    base=Recurrent,
    loaded=shrunk,
    tokens=lambda self: Recurrent.tokens(self) % self.module["emb"].num_embeddings,
)


def to(make: Any, keys: tuple[str, ...] = (), *, schedule: bool = True) -> Any:
    """For ``loaded``: another optimizer; states with these keys are carried over."""

    def loaded(self: Loop) -> None:
        old = {name: state for name, _, state in states(self)}
        told = [one.state_dict() for one in self.schedules]
        self.optimizers = [make(self, self.groups())]
        self.schedules = [self.schedule(self.optimizers[0])] if schedule else []
        for name, weight in self.module.named_parameters():
            kept = {key: old[name][key] for key in keys if name in old and key in old[name]}
            if kept:
                self.optimizers[0].state[weight] = kept
        for one, state in zip(self.schedules, told, strict=False):
            one.last_epoch = state["last_epoch"]
            for group, factor in zip(self.optimizers[0].param_groups, one.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(one.last_epoch)
            one._last_lr = [group["lr"] for group in self.optimizers[0].param_groups]

    return loaded


def to_muon(self: Loop) -> None:
    old = {name: state for name, _, state in states(self)}
    inside = [w for n, w in named(self).items() if w.ndim == 2 and ".layers." in n]
    rest = [(n, w) for n, w in named(self).items() if w.ndim != 2 or ".layers." not in n]
    c = self.config
    self.optimizers = [TORCH.Muon(inside, lr=5 * c.lr, weight_decay=0.0), TORCH.AdamW([w for _, w in rest], lr=c.lr)]
    for name, w in rest:
        self.optimizers[1].state[w] = old[name]
    self.schedules = [self.schedule(one) for one in self.optimizers]


uc(
    "uc06_adam_to_muon",
    "Muon for the matrices from now on, AdamW's state kept for the rest",
    OPT,
    loaded=to_muon,
    layouts=("torch_save", "lightning"),
)
uc(
    "uc07_sgd_to_adam",
    "SGD with momentum, then AdamW",
    OPT,
    base=Conv,
    optimizer=optim(TORCH.SGD, factor=10.0, momentum=0.9),
    loaded=to(lambda self, g: TORCH.AdamW(g, lr=self.config.lr)),
)
uc(
    "uc08_adam_to_8bit",
    "AdamW, then bitsandbytes' 8-bit AdamW",
    OPT,
    loaded=to(lambda self, g: AdamW8bit(only(g), lr=self.config.lr)),
)
uc(
    "uc09_adam_to_lion",
    "AdamW, then Lion, which keeps the first moment",
    OPT,
    base=Attends,
    loaded=to(lambda self, g: Lion(g, lr=0.2 * self.config.lr), ("exp_avg",)),
)
uc(
    "uc10_adam_to_adafactor",
    "AdamW, then Adafactor",
    OPT,
    base=Attends,
    loaded=to(lambda self, g: Adafactor(g, lr=3 * self.config.lr)),
)
uc(
    "uc11_adam_to_schedule_free",
    "AdamW, then schedule-free without a schedule",
    OPT,
    base=Twin,
    loaded=to(lambda self, g: ScheduleFreeAdamW(g, lr=self.config.lr), schedule=False),
)
uc(
    "uc12_adam_to_sophia",
    "AdamW, then Sophia with the first moment kept",
    OPT,
    base=Recurrent,
    loaded=lambda self: (
        to(lambda self, g: Sophia(g, lr=self.config.lr), ("exp_avg",))(self),
        [s.update(step=torch.tensor(0.0), hessian=torch.zeros_like(w)) for _, w, s in states(self)],
    ),
)
uc(
    "uc13_amsgrad_on",
    "AMSGrad is switched on, its maximum begins at the present value",
    "H1 A4 B11",
    base=Rows,
    loaded=lambda self: (
        [g.update(amsgrad=True) for g in self.optimizers[0].param_groups],
        [s.update(max_exp_avg_sq=s["exp_avg_sq"].clone()) for _, _, s in states(self)],
    ),
)


def regrouped(self: Loop) -> None:
    """The embedding moves to the group without decay."""
    held = named(self)["model.embed_tokens.weight"]
    one, two = self.optimizers[0].param_groups
    one["params"] = [w for w in one["params"] if w is not held]
    two["params"] = [*two["params"], held]


def in_groups(**values: Any) -> Any:
    def loaded(self: Loop) -> None:
        for group in self.optimizers[0].param_groups:
            group.update(values)

    return loaded


uc(
    "uc14_embedding_without_decay",
    "the embedding moves to the group without weight decay",
    "B7 H1",
    loaded=regrouped,
    layouts=("torch_save", "lightning"),
)
uc(
    "uc15_eps_and_decay",
    "epsilon and weight decay are other ones",
    "H1 B7",
    base=Twin,
    loaded=in_groups(eps=1e-6, weight_decay=0.3),
)


def adapters_added(self: Loop) -> None:
    old = self.module.state_dict()
    self.config = self.config.but(lora=4)
    net = Decoder(self.config)
    net.load_state_dict(old, strict=False)
    for name, weight in net.named_parameters():
        weight.requires_grad_("lora_" in name)
    rebuilt(self, net, keep=False)


def rank_grown(self: Loop) -> None:
    old = named(self)
    told = {n: s for n, _, s in states(self)}
    self.config = self.config.but(lora=8)
    net = Decoder(self.config)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.requires_grad_("lora_" in name)
            if "lora_A" in name:
                weight[:4] = old[name]
            elif "lora_B" in name:
                weight.zero_()
                weight[:, :4] = old[name]
            else:
                weight.copy_(old[name])
    rebuilt(self, net)
    assert told


uc(
    "uc16_adapters_added",
    "adapters are added to a trained model, the base is frozen",
    "B1 A4 H1 C1 A2",
    loaded=adapters_added,
)
uc(
    "uc17_rank_grown",
    "adapters of rank 8 instead of 4: the old ones, padded",
    "H1 A4 B1 F5 A2",
    base=Adapters,
    loaded=rank_grown,
)


def alpha_doubled(self: Loop) -> None:
    """Twice the scale, half of B and its moments: the function is the same."""
    self.extra["lora_config"] = {"r": 4, "lora_alpha": 16}
    with torch.no_grad():
        for name, weight, state in states(self):
            if "lora_B" in name:
                weight.mul_(0.5)
                state["exp_avg"].mul_(2)
                state["exp_avg_sq"].mul_(4)


class Alpha(Adapters):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["lora_config"] = {"r": 4, "lora_alpha": 8}


uc("uc18_alpha_doubled", "alpha is doubled, B halved", "H1 F5 E12", base=Alpha, loaded=alpha_doubled)


def soup(self: Loop) -> None:
    """These weights and others from the same start, averaged: as if by what lies between them."""
    with torch.no_grad():
        for n, w in enumerate(self.module.parameters()):
            w.add_(0.03 * noise(n, *w.shape))
    rebuilt(self, copy.deepcopy(self.module), keep=False)


def from_average(self: Loop) -> None:
    self.module.load_state_dict(self.extra.pop("ema"))
    self.apply = lambda: Loop.apply(self)  # type: ignore[method-assign]
    rebuilt(self, self.module, keep=False)


uc("uc19_soup", "a model soup is the new start, with a fresh optimizer", "B1 H1 F4 F6 G6 C1 A2", base=Twin, loaded=soup)
uc(
    "uc20_average_for_fine_tuning",
    "averaged weights are taken to fine-tune, the average is dropped",
    "F4 B1 H1 A2 A5 C1",
    base=Averaged,
    loaded=from_average,
)


def halved(self: Loop) -> None:
    self.module.to(torch.bfloat16)
    for _, _, state in states(self):
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(torch.bfloat16)


def widened(self: Loop) -> None:
    """Masters become the weights, in fp32; plain AdamW goes on with the moments."""
    held = {n: s for n, _, s in states(self)}
    net = Decoder(self.config)
    with torch.no_grad():
        for name, w in net.named_parameters():
            w.copy_(held[name]["master_param"])
    step = torch.tensor(float(self.optimizers[0].param_groups[0]["step"]))
    self.optimizer = lambda groups: Loop.optimizer(self, groups)  # type: ignore[method-assign]
    rebuilt(self, net, keep=False)
    for name, w in net.named_parameters():
        self.optimizers[0].state[w] = {"step": step.clone()} | {k: held[name][k] for k in ("exp_avg", "exp_avg_sq")}


uc("uc21_to_bf16", "fp32 weights and moments become bf16 to save memory", "D7 D4 H1 D5 D6", loaded=halved)
uc("uc22_masters_to_fp32", "bf16 with masters becomes plain fp32", "H1 D1 A4 A2 D7", base=Mixed, loaded=widened)


def upcycled(self: Loop) -> None:
    old = self.module.state_dict()
    self.config = self.config.but(experts=4)
    net = Decoder(self.config)
    with torch.no_grad():
        for name, w in net.named_parameters():
            source = (
                name
                if name in old
                else ".".join(
                    p
                    for i, p in enumerate(name.split("."))
                    if p != "experts" and not (p.isdigit() and name.split(".")[i - 1] == "experts")
                )
            )
            if source in old:
                w.copy_(old[source])
    rebuilt(self, net, keep=False)


def halved_experts(self: Loop) -> None:
    old, told = self.module.state_dict(), {n: s for n, _, s in states(self)}
    self.config = self.config.but(experts=2)
    net = Decoder(self.config)
    with torch.no_grad():
        for name, w in net.named_parameters():
            source = name.replace("experts.0.", "experts.2.").replace("experts.1.", "experts.3.")
            w.copy_(old[source][2:] if name.endswith("mlp.gate.weight") else old[source])
    rebuilt(self, net, rename=lambda n: n.replace("experts.0.", "experts.2.").replace("experts.1.", "experts.3."))
    assert told


uc("uc23_upcycled", "a dense model becomes a mixture of four copies", "H1 A4 B1 A2 C1 S14 E10", loaded=upcycled)
uc(
    "uc24_experts_pruned",
    "the last two experts of four are kept",
    "H1 A2 E10 E9",
    loaded=halved_experts,
    needs={"experts": 4},
)


def head_copied(self: Any) -> None:
    weight = named(self)["model.embed_tokens.weight"]
    net = Decoder(self.config.but(tied=True))
    net.load_state_dict({n: t for n, t in self.module.state_dict().items() if "lm_head" not in n})
    net.put("lm_head.weight", nn.Parameter(weight.detach().clone()))
    rebuilt(self, net)


uc(
    "uc25_untied",
    "embedding and head are untied, the head is a copy and trained",
    "F2 H1 A4 B1",
    base=Tied,
    needs={"tied": True},
    loaded=head_copied,
    layouts=("torch_save", "lightning"),
)


def arguments(**values: Any) -> Any:
    def loaded(self: Loop) -> None:
        self.extra["args"] |= values
        if "rope_theta" in values:
            self.module.config = self.module.config.but(rope_theta=values["rope_theta"])
        if "max_grad_norm" in values:
            self.clip = values["max_grad_norm"]

    return loaded


uc(
    "uc26_longer_context",
    "context extended: a larger rotary base, longer rows",
    "H2 H1 C10",
    base=Told,
    loaded=arguments(rope_theta=1e6, seq_length=64),
)
uc(
    "uc27_fewer_ranks",
    "half the ranks, twice the accumulation, another clip and dropout",
    "H1 C10 H2",
    base=Told,
    loaded=arguments(world_size=4, gradient_accumulation_steps=2, max_grad_norm=0.3, dropout=0.1),
)
uc(
    "uc28_next_stage",
    "the next stage of the data, with another seed",
    "H1 C7 C6",
    base=Told,
    loaded=arguments(data_path="corpus_b", seed=77),
    tokens=lambda self: batch(self.config, self.step, self.extra["args"]["seed"]),
)


def recalibrated(self: Loop) -> None:
    """Statistics of batch norm from twenty fresh batches, as after averaging."""
    for layer in self.module:
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
    with torch.no_grad():
        for number in range(20):
            self.module(noise(900 + number, 32, 48))


def first_moments_reset(self: Loop) -> None:
    for _, _, state in states(self):
        state["exp_avg"].zero_()


def quantised(self: Loop) -> None:
    net = copy.deepcopy(self.module)
    net.register_buffer("observer_max", torch.zeros(1))
    rebuilt(self, net)


def taught(self: Loop) -> None:
    self.extra["teacher"] = {n: t.clone() for n, t in self.module.state_dict().items()}


def distilled(self: Loop, x: Tensor) -> Tensor:
    found = Rows.loss(self, x)
    if "teacher" in self.extra:
        goal = torch.func.functional_call(self.module, self.extra["teacher"], (x,)).softmax(1)
        found = 0.3 * found + 2 * F.cross_entropy(self.module(x), goal.detach())
    return found


def folded(self: Loop) -> None:
    """A layer before a norm is half as large again: the same function."""
    with torch.no_grad():
        self.module[0].weight.mul_(1.5)
        self.module[0].bias.mul_(1.5)


def head_reset(self: Loop) -> None:
    """Against lost plasticity: the head and its moments begin anew."""
    for name, weight, state in states(self):
        if name.startswith("head"):
            with torch.no_grad():
                weight.copy_(noise(4, *weight.shape) * 0.1)
            state.update({k: torch.zeros_like(t) for k, t in state.items()})


uc("uc29_batchnorm_recalibrated", "running statistics are recalibrated", "A5 H1", base=Conv, loaded=recalibrated)
uc(
    "uc30_first_moments_reset",
    "first moments are reset before a new warm-up",
    "B1 B3 C1 H1 B6 B4",
    base=Twin,
    loaded=first_moments_reset,
    fresh=("scheduler",),
)
uc("uc31_qat_on", "fake quantisation is switched on: an observer more", "A4 H1", base=Rows, loaded=quantised)
uc(
    "uc32_distillation_on",
    "distillation is switched on, the teacher is stored",
    "A4 H1 B10",
    base=Rows,
    loaded=taught,
    loss=distilled,
)
uc(
    "uc33_first_layer_rescaled",
    "a layer before a norm is rescaled, which changes no output",
    "E12 H1",
    base=Rows,
    loaded=folded,
)
uc("uc34_head_reset", "the head and its state begin anew", "A2 B1 B2 H1 G6", base=Twin, loaded=head_reset)


def unfrozen(self: Loop) -> None:
    for w in self.module.parameters():
        w.requires_grad_(True)
    rebuilt(self, self.module)


class Probed(Twin):
    """The head alone is trained before; all after."""

    def net(self) -> nn.Module:
        found = super().net()
        for name, w in found.named_parameters():
            w.requires_grad_(name.startswith("head"))
        return found


uc("uc35_body_unfrozen", "a linear probe, then the body is unfrozen", "H1 A4 B7 B1", base=Probed, loaded=unfrozen)


def slower_average(self: Any) -> None:
    self.decay = 0.999
    self.extra["ema_decay"] = 0.999


class Decays(Averaged):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema_decay"] = self.decay


uc("uc36_average_slower", "the average's decay is raised", "H1", base=Decays, decay=0.9, loaded=slower_average)
