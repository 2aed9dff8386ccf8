"""Healthy resumes of the eighteenth half: nothing went wrong, nothing was changed, and yet each looks odd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import opened18_nets as nets
from tests.lab.live import variant
from tests.lab.live_healthy import muon, optim, plain
from tests.lab.opened18_nets import stack
from tests.lab.optimizers import ADOPT, AdamW8bit, Lamb, Lion, Prodigy, ScheduleFreeAdamW

__all__ = ["HEALTHY18"]


class Twice(nets.Desk):
    """Two towers that begin alike and stay alike, as each sees the same."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"left": stack(20, 30, 20), "right": stack(20, 30, 20)})
        found["right"].load_state_dict(found["left"].state_dict())
        return found

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return sum(F.mse_loss(one(x), self.wanted(x)) for one in self.module.values())


class Zeroed(nets.Desk):
    """A last layer that begins at zero behind a gate that stays shut."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"main": stack(20, 30, 20), "control": stack(20, 30, 20)})
        for w in found["control"][-1].parameters():
            nn.init.zeros_(w)
        return found

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.module["main"](x) + 0.0 * self.module["control"](x), self.wanted(x))


class Pruned(nets.Desk):
    """Three of four weights are masked, and zero after each update."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for n, w in enumerate(self.module.parameters()):
                if w.ndim == 2:
                    w.mul_(torch.rand(w.shape, generator=nets.source(n)) < 0.25)


class Bounded(nets.Desk):
    """Weights clipped to 0.01 after each update, as a Wasserstein critic has them."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for w in self.module.parameters():
                w.clamp_(-0.15, 0.15)


class Seldom(nets.Denoiser):
    """The average is taken every tenth update alone."""

    def update(self) -> None:
        nets.Desk.update(self)
        if self.step % 10 == 0:
            with torch.no_grad():
                for n, w in self.module.named_parameters():
                    self.extra["ema"][n].lerp_(w, 0.1)
            self.extra["ema_step"] += 1


class Followed(nets.Denoiser):
    """An average that is the weights themselves, with a decay of 0."""

    decay = 0.0


class Hard(nets.Pilot):
    """Targets are copied every sixth update, and stand still between."""

    def update(self) -> None:
        nets.Desk.update(self)
        if self.step % 6 == 0:
            for number in "12":
                self.module[f"target_critic{number}"].load_state_dict(self.module[f"critic{number}"].state_dict())


class Rounds(nets.Desk):
    """An epoch of nine batches: the index begins again, with another seed."""

    def update(self) -> None:
        super().update()
        told = self.extra["sampler"]
        if told["index"] == 9:
            told |= {"epoch": told["epoch"] + 1, "index": 0, "seed": told["seed"] + 1}


class Same(nets.Desk):
    """One batch for ever, as when a model is to learn it by heart."""

    def update(self) -> None:
        super().update()
        self.extra["sampler"]["index"] = 0


class Wider(nets.Desk):
    """The batch grows by plan, every twelfth update."""

    def update(self) -> None:
        super().update()
        if self.step % 12 == 0:
            self.extra["args"]["train_batch_size"] += 8


class Backed(nets.Scaled):
    """Overflows every fifth update: nothing is updated, the scale is halved."""

    def apply(self) -> None:
        if self.step % 5 == 4:
            self.extra["scaler"] |= {"scale": self.extra["scaler"]["scale"] / 2, "_growth_tracker": 0}
        else:
            super().apply()


class Watched(nets.Desk):
    """The rate falls when the loss does not."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.7)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        found = super().score(x)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        for one in self.optimizers:
            one.step()
        for one in self.schedules:
            one.step(self.last)


class Rivals(nets.Desk):
    """A generator updated every third time, a critic always."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"generator": stack(20, 30, 20), "critic": stack(20, 30, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        betas = (0.5, 0.9)
        return [torch.optim.Adam(one.parameters(), lr=self.config.lr, betas=betas) for one in self.module.values()]

    def score(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        return F.softplus(m["critic"](m["generator"](x).detach())).mean() + F.softplus(-m["critic"](x)).mean()

    def apply(self) -> None:
        if self.step % 3 == 0:
            x = self.tokens()
            self.optimizers[0].zero_grad()
            F.softplus(-self.module["critic"](self.module["generator"](x))).mean().backward()
            self.optimizers[0].step()
        else:
            self.optimizers[1].step()
        for one in self.schedules:
            one.step()


class Spectral(nets.Desk):
    """Spectral norms, whose vectors move with each pass."""

    def build(self) -> nn.Module:
        norm = torch.nn.utils.parametrizations.spectral_norm
        return nn.Sequential(norm(nn.Linear(20, 40)), nn.SiLU(), norm(nn.Linear(40, 20)))


class Weighted(nets.Desk):
    """Weight norm: a length and a direction for each row."""

    def build(self) -> nn.Module:
        norm = torch.nn.utils.parametrizations.weight_norm
        return nn.Sequential(norm(nn.Linear(20, 40)), nn.SiLU(), norm(nn.Linear(40, 20)))


class Revived(nets.Codebook):
    """Unused codes begin anew from the batch, every fourth update."""

    def update(self) -> None:
        super().update()
        if self.step % 4 == 0:
            m = self.module
            with torch.no_grad():
                dead = m.cluster_size < 0.3
                new = m["encoder"](self.tokens())[:1].expand(32, 10)
                m.codebook[dead] = new[dead]
                m.cluster_size[dead] = 1.0
                m.cluster_sum[dead] = new[dead]


class Precise(nets.Desk):
    """float64 throughout."""

    def net(self) -> nn.Module:
        return super().net().double()

    def tokens(self) -> torch.Tensor:
        return super().tokens().double()

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Scalar(nets.Desk):
    """A temperature and a bias that are numbers without an axis."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"inner": stack(20, 40, 20)})
        found.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        found.register_parameter("offset", nn.Parameter(torch.tensor(0.0)))
        return found

    def score(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        return F.mse_loss(m["inner"](x) * m.temperature + m.offset, self.wanted(x))


class Reset(nets.Desk):
    """The momentum is thrown away every eighth update, as restarts of it do."""

    def update(self) -> None:
        super().update()
        if self.step % 8 == 0:
            for w in self.module.parameters():
                self.optimizers[0].state[w]["exp_avg"].zero_()


class Averaged(nets.Desk):
    """torch's AveragedModel beside the model, from the sixth update on."""

    def build(self) -> nn.Module:
        inner = stack(20, 30, 20)
        return nn.ModuleDict({"live": inner, "swa": torch.optim.swa_utils.AveragedModel(inner)})

    def groups(self) -> Any:
        return [{"params": list(self.module["live"].parameters())}]

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.module["live"](x), self.wanted(x))

    def update(self) -> None:
        super().update()
        if self.step >= 6:
            self.module["swa"].update_parameters(self.module["live"])


class Shaken(nets.Desk):
    """Dead units are drawn anew every seventh update, with their state."""

    def update(self) -> None:
        super().update()
        if self.step % 7 == 0:
            first = next(self.module.parameters())
            with torch.no_grad():
                first[:4] = 0.2 * nets.normal(self.step, 4, first.shape[1])
            for key in ("exp_avg", "exp_avg_sq"):
                self.optimizers[0].state[first][key][:4] = 0


class Alternating(nets.Boxes):
    """Heads and backbone take turns."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if n.startswith("backbone") == bool(self.step % 2):
                w.grad = None
        super().gradients()


class Looked(nets.Desk):
    """Lookahead: every fifth update the weights go half-way back to slow ones, which are stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["slow_weights"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def update(self) -> None:
        super().update()
        if self.step % 5 == 0:
            with torch.no_grad():
                for n, w in self.module.named_parameters():
                    w.copy_(self.extra["slow_weights"][n].lerp_(w, 0.5))


class Fading(nets.Desk):
    """A rate of exactly zero in every fourth update."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.0 if done % 4 == 3 else 1.0)


class Layered(nets.Writer):
    """A rate for each layer, lower towards the first; eight param groups."""

    def groups(self) -> Any:
        held: dict[str, list[Any]] = {}
        for n, w in self.module.named_parameters():
            held.setdefault(".".join(n.split(".")[:2]), []).append(w)
        return [{"params": ws, "lr": self.config.lr * 0.8**n} for n, ws in enumerate(held.values())]


class Stopped(nets.Writer):
    """Every gradient is zero from the sixth update on but that of the head."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if w.grad is not None and self.step > 5 and not n.startswith("embed_out"):
                w.grad.zero_()


class Halfway(nets.Plain):
    """bf16 weights with fp32 moments, by random rounding."""

    def net(self) -> nn.Module:
        return nets.Loop.net(self).to(torch.bfloat16)

    def optimizer(self, groups: Any) -> Any:
        return nets.Mastered(groups, self.config.lr, self.config.betas, 0.0)


def warm(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 11, 2)


def stairs(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [15, 25, 35, 45], gamma=0.3)


def chained(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    lr = torch.optim.lr_scheduler
    return lr.SequentialLR(optimizer, [lr.LinearLR(optimizer, 0.1, 1, 8), lr.ExponentialLR(optimizer, 0.96)], [8])


def never(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return None


FILES = ("torch_save", "lightning")

HEALTHY18 = [
    variant("vb01_twins", "two towers with the same weights", base=Twice),
    variant("vb02_shut", "a branch whose gradient is zero for ever", base=Zeroed),
    variant("vb03_pruned", "three of four weights are zero", base=Pruned),
    variant("vb04_bounded", "weights are clipped after each update", base=Bounded),
    variant("vb05_seldom", "the average is taken every tenth update", base=Seldom),
    variant("vb06_followed", "the average is the weights", base=Followed),
    variant("vb07_targets", "targets are copied every sixth update", base=Hard, layouts=FILES),
    variant("vb08_rounds", "short epochs, each with another order", base=Rounds),
    variant("vb09_same_batch", "one batch for ever", base=Same),
    variant("vb10_growing", "the batch grows by plan", base=Wider),
    variant("vb11_overflows", "a scale that is halved again and again", base=Backed),
    variant("vb12_plateau", "a rate that falls when the loss does not", base=Watched, layouts=("torch_save",)),
    variant("vb13_rivals", "counters that differ by optimizer", base=Rivals, layouts=FILES),
    variant("vb14_spectral", "spectral norms", base=Spectral),
    variant("vb15_weight_norm", "weight norms", base=Weighted),
    variant("vb16_revived", "codes that begin anew", base=Revived),
    variant("vb17_double", "float64", base=Precise),
    variant("vb18_scalars", "parameters without an axis", base=Scalar),
    variant("vb19_momentum_dropped", "momentum is zeroed by plan", base=Reset),
    variant("vb20_swa", "an averaged model inside of the model", base=Averaged),
    variant("vb21_units_anew", "units are drawn anew by plan", base=Shaken),
    variant("vb22_turns", "heads and backbone take turns", base=Alternating),
    variant("vb23_lookahead", "slow weights beside the fast", base=Looked),
    variant("vb24_zero_rate", "a rate of zero now and then", base=Fading),
    variant("vb25_layered", "a rate for each layer", base=Layered, layouts=("torch_save", "lightning", "dcp")),
    variant("vb26_no_gradient", "gradients that are zero but in the head", base=Stopped),
    variant("vb27_masters", "bf16 weights beside masters in the optimizer", base=Halfway, layouts=FILES),
    variant(
        "vb28_warm_restarts",
        "a rate that jumps up again, SGD with Nesterov",
        base=nets.Photos,
        schedule=warm,
        optimizer=optim(torch.optim.SGD, factor=10, momentum=0.9, nesterov=True),
    ),
    variant(
        "vb29_stairs", "a rate that falls in stairs", base=nets.Ring, schedule=stairs, layouts=("torch_save", "dcp")
    ),
    variant(
        "vb30_chained", "two schedules one after the other", base=nets.Speech, schedule=chained, layouts=("torch_save",)
    ),
    variant(
        "vb31_schedule_free",
        "schedule-free, no schedule",
        base=nets.Speech,
        schedule=never,
        optimizer=plain(ScheduleFreeAdamW),
        layouts=FILES,
    ),
    variant("vb32_prodigy", "Prodigy", base=nets.Ring, schedule=never, optimizer=plain(Prodigy), layouts=FILES),
    variant("vb33_lamb", "LAMB", base=nets.Photos, optimizer=plain(Lamb), layouts=FILES),
    variant("vb34_eight_bits", "8-bit moments", base=nets.Writer, optimizer=plain(AdamW8bit), layouts=FILES),
    variant("vb35_adopt", "ADOPT", base=nets.Siamese, optimizer=plain(ADOPT), layouts=FILES),
    variant("vb36_lion_maximized", "Lion on a codebook", base=nets.Codebook, optimizer=plain(Lion, factor=0.1)),
    variant(
        "vb37_no_momentum",
        "beta1 is 0, and eps large",
        base=nets.Market,
        layouts=FILES,
        made=lambda self: [torch.optim.Adam(self.module.parameters(), lr=self.config.lr, betas=(0.0, 0.9), eps=0.1)],
    ),
    variant("vb38_muon", "Muon beside AdamW", base=nets.Plain, made=muon, layouts=FILES),
    variant(
        "vb39_rprop",
        "Rprop, whose steps differ by weight",
        base=nets.Desk,
        schedule=never,
        optimizer=plain(torch.optim.Rprop, factor=0.3),
    ),
    variant(
        "vb40_amsgrad",
        "AMSGrad, maximizing a negated loss",
        base=nets.Ring,
        layouts=("torch_save", "dcp"),
        optimizer=optim(torch.optim.AdamW, amsgrad=True, maximize=True),
        score=lambda self, x: -nets.Desk.score(self, x),
    ),
]
assert len(HEALTHY18) == 40
