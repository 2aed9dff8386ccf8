"""Healthy resumes of the nineteenth half: each has something that looks like a fault to who knows little."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.lab import opened19_nets as nets
from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import variant
from tests.lab.opened19_nets import Bench, Tensor, mlp, opt

__all__ = ["HEALTHY19"]


class OldNorms(nets.Chat):
    """Layer norms were never trained."""

    def build(self) -> nn.Module:
        found = super().build()
        for n, w in found.named_parameters():
            w.requires_grad_("ln_" not in n)
        return found


class Gan(Bench):
    """The discriminator has every update, the generator every third."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"generator": mlp(8, 32, 24), "discriminator": mlp(24, 32, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.module[p].parameters(), self.config.lr, (0.0, 0.99)) for p in self.module]

    def score(self, x: Tensor) -> Tensor:
        m, fake = self.module, self.module["generator"](x[:, :8])
        return F.softplus(m["discriminator"](fake)).mean() + F.softplus(-m["discriminator"](x)).mean()

    def apply(self) -> None:
        if self.step % 3 == 0:
            self.optimizers[0].step()
        self.optimizers[1].step()
        for one in self.schedules:
            one.step()


class Rare(Bench):
    """Tables whose gradients are sparse."""

    clip = 0.0
    layouts = ("torch_save", "folder")

    def build(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(300, 8, sparse=True), "net": mlp(8, 24, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        lr, m = self.config.lr, self.module
        table, rest = m["table"].parameters(), m["net"].parameters()
        return [torch.optim.SparseAdam(list(table), lr=lr), torch.optim.AdamW(rest, lr=lr)]

    def score(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs() * 100).long() % 300
        return F.mse_loss(self.module["net"](self.module["table"](ids))[:, 0], ids.float().sin())


class Albert(Bench):
    """One block that is used three times and stored three times."""

    layouts = ("torch_save", "lightning")

    def build(self) -> nn.Module:
        one = mlp(24, 40, 24)
        return nn.ModuleDict({"layers": nn.ModuleList([one, one, one]), "out": nn.Linear(24, 24)})

    def score(self, x: Tensor) -> Tensor:
        h = x
        for one in self.module["layers"]:
            h = h + one(h)
        return F.mse_loss(self.module["out"](h), self.target(x))


class Spectral(Bench):
    def build(self) -> nn.Module:
        found = mlp(24, 40, 40, 24)
        parametrizations.spectral_norm(found[2])
        return found


class Weighted(Bench):
    def build(self) -> nn.Module:
        found = mlp(24, 40, 40, 24)
        for n in (0, 2, 4):
            parametrizations.weight_norm(found[n])
        return found


class Depth(nets.Vit):
    """A block gets no gradient in some updates, as with stochastic depth."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if n.startswith(f"blocks.{self.step % 3}."):
                w.grad = None
        super().gradients()


class Skips(nets.Fp16):
    """Every ninth gradient overflows."""

    def apply(self) -> None:
        if self.step % 9 == 7:
            told = self.extra["scaler"]
            told |= {"scale": told["scale"] / 2, "_growth_tracker": 0}
            return
        super().apply()


class Lookahead(Bench):
    """Weights go half the way back to slow ones every fifth update."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["slow_weights"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.named_parameters() if self.step % 5 == 0 else ():
                w.copy_(self.extra["slow_weights"][n].lerp_(w, 0.5))


class Swa(Bench):
    """An equal average of the weights of every seventh update."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["swa"] = {"n_averaged": 0, "weights": {}}
        self.extra["swa"]["weights"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def update(self) -> None:
        super().update()
        told = self.extra["swa"]
        if self.step % 7 == 0:
            told["n_averaged"] += 1
            for n, w in self.module.named_parameters():
                told["weights"][n] += (w.detach() - told["weights"][n]) / told["n_averaged"]


class Dead(Bench):
    """Half of the units never fire."""

    def build(self) -> nn.Module:
        found = mlp(24, 40, 24, act=nn.ReLU)
        with torch.no_grad():
            found[0].bias[::2] = -50
        return found


class Pauses(Bench):
    """The learning rate is 0 in every other stretch of four updates."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: float(n // 4 % 2))


class Deep(Bench):
    """Everything in float64."""

    def build(self) -> nn.Module:
        return super().build().double()

    def tokens(self) -> Tensor:
        return super().tokens().double()

    def target(self, x: Tensor) -> Tensor:
        return super().target(x.float()).double()

    def loss(self, x: Tensor) -> Tensor:
        return self.score(x)


class Strange(Bench):
    """Buffers that are infinite, empty, of bits, complex or not a number."""

    layouts = ("torch_save", "lightning")

    def build(self) -> nn.Module:
        found = super().build()
        found.register_buffer("causal_mask", torch.full((6, 6), -math.inf).triu(1))
        found.register_buffer("unset", torch.full((4,), math.nan))
        found.register_buffer("nothing", torch.zeros(0, 5))
        found.register_buffer("keep", torch.arange(9) % 2 == 0)
        found.register_buffer("freqs_cis", torch.polar(torch.ones(8), torch.arange(8.0)))
        return found


class Queue(Bench):
    """A queue of keys that is written over from its beginning again and again."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"query": mlp(24, 32, 12)})
        found.register_buffer("queue", F.normalize(torch.randn(60, 12)))
        found.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        return found

    def score(self, x: Tensor) -> Tensor:
        m, q = self.module, F.normalize(self.module["query"](x))
        key = F.normalize(self.module["query"](x + 0.1)).detach()
        logits = torch.cat([(q * key).sum(1, True), q @ m.queue.clone().T], 1) / 0.2
        at = int(m.queue_ptr)
        found = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        m.queue[at : at + 20] = key[:20]
        m.queue_ptr[0] = (at + 20) % 60
        return found


class Replay(nets.Dqn):
    """With the replay memory in the save: zeros where nothing was written yet."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["replay_buffer"] = {"observations": torch.zeros(400, 24), "pos": 0, "full": False}

    def score(self, x: Tensor) -> Tensor:
        told = self.extra["replay_buffer"]
        told["observations"][told["pos"] : told["pos"] + len(x)] = x
        told["pos"] += len(x)
        if told["pos"] >= 400:
            told |= {"pos": 0, "full": True}
        return super().score(x)


class Pruned(Bench):
    """Seven weights of ten are held at 0 by a mask."""

    def build(self) -> nn.Module:
        found = super().build()
        found.register_buffer("mask", (torch.rand(40, 40) > 0.7).float())
        return found

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            self.module[2].weight *= self.module.mask


class Coarse(Bench):
    """fp32 tensors whose numbers are bf16 ones after every update."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in self.module.parameters():
                w.copy_(nets.rounded(w))


class Epochs(Bench):
    """Eleven batches an epoch, after which the sampler's index is 0 again."""

    def update(self) -> None:
        super().update()
        told = self.extra["sampler"]
        if told["index"] == 11:
            told |= {"index": 0, "epoch": told["epoch"] + 1, "seed": 77 + told["epoch"] + 1}


class Ramp(Bench):
    """The batch grows by two samples every sixth update."""

    def update(self) -> None:
        super().update()
        if self.step % 6 == 0:
            self.extra["hparams"]["batch_size"] += 2


class Thaw(nets.Vit):
    """The second block is trained from update 12 on; until then it has no state."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if self.step < 12 and n.startswith("blocks.1"):
                w.grad = None
        super().gradients()


class Copied(nets.Diffuse):
    """Averages of decay 0: the same numbers as the weights."""

    most = 0.0


class ByEpoch(Bench):
    """The schedule counts epochs of nine updates."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)

    def apply(self) -> None:
        self.optimizers[0].step()
        if (self.step + 1) % 9 == 0:
            self.schedules[0].step()


class Plateau(Bench):
    """The rate falls when the loss does not, and the schedule says so."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

    def loss(self, x: Tensor) -> Tensor:
        found = super().loss(x)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.last)


class Cumulative(nets.Spotter):
    """Batch norms that average over all batches."""

    def build(self) -> nn.Module:
        found = super().build()
        for one in found.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.momentum = None
        return found


class Unused(nets.Peft):
    """One adapter is never trained: its B is 0, it has no state."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if n.startswith("mid_proj"):
                w.grad = None
        super().gradients()


class Twins(Bench):
    """Two branches that began equal and get equal gradients: all their numbers are equal for ever."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"left": mlp(24, 32, 24), "right": mlp(24, 32, 24)})
        found["right"].load_state_dict(found["left"].state_dict())
        return found

    def score(self, x: Tensor) -> Tensor:
        return F.mse_loss((self.module["left"](x) + self.module["right"](x)) / 2, self.target(x))


class Dropped(Bench):
    """With dropout from torch's own generator, which no file holds."""

    def score(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(F.dropout(x, 0.2)), self.target(x))


def one_cycle(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * self.config.lr, total_steps=self.config.total + 80)


def restarts(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7, T_mult=2)


def sequence(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    own = torch.optim.lr_scheduler
    parts = [own.LinearLR(optimizer, 0.1, 1.0, 10), own.ExponentialLR(optimizer, 0.99)]
    return own.SequentialLR(optimizer, parts, [10])


def hugged(folder: Path, rng: random.Random, k: int) -> None:
    trained(
        partial(made, "Llama"),
        folder,
        rng,
        k,
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=0.1,
        gradient_accumulation_steps=3,
    )


def well(id: str, text: str, base: Any, **more: Any) -> Fault:
    return variant(id, text, base=base, **more)


HEALTHY19 = [
    well("wb01_norms_untrained", "layer norms were never trained and are 1 and 0", OldNorms),
    well(
        "wb02_rare_words",
        "most rows of the vocabulary never occur, nothing decays",
        nets.Chat,
        needs={"padded": 128},
        groups=lambda self: [{"params": list(self.module.parameters()), "weight_decay": 0.0}],
    ),
    well("wb03_one_cycle", "one cycle: rate and beta1 change in every update", Bench, schedule=one_cycle),
    well("wb04_warm_restarts", "the rate jumps back to its peak by schedule", nets.Clip, schedule=restarts),
    well("wb05_plateau", "the rate is halved when the loss stands still", Plateau),
    well("wb06_gan", "two optimizers; one makes a third of the updates", Gan),
    well("wb07_asgd", "averaged SGD with eta, mu and ax of its own", Bench, optimizer=opt(torch.optim.ASGD, 8.0)),
    well("wb08_rprop", "Rprop: a step size of each weight, and no use for lr", Bench, optimizer=opt(torch.optim.Rprop)),
    well(
        "wb09_adadelta", "Adadelta at a learning rate of about one", Bench, optimizer=opt(torch.optim.Adadelta, 300.0)
    ),
    well("wb10_sparse_rows", "rows of a table without a gradient keep weight and moments", Rare),
    well("wb11_shared_block", "one block under three names", Albert),
    well("wb12_spectral", "buffers of a power iteration move in every forward pass", Spectral),
    well("wb13_weight_norm", "weights are stored as size and direction", Weighted),
    well("wb14_depth", "blocks without a gradient in some updates: counters differ", Depth),
    well("wb15_overflows", "updates are skipped and the loss scale falls", Skips),
    well("wb16_lookahead", "weights jump back every fifth update", Lookahead),
    well("wb17_swa", "an equal average that is updated now and then", Swa),
    well("wb18_dead_units", "half of the rows have moments that are exactly 0", Dead),
    well(
        "wb19_maximize",
        "an optimizer that maximizes",
        Bench,
        optimizer=opt(torch.optim.AdamW, maximize=True),
        score=lambda self, x: -Bench.score(self, x),
    ),
    well("wb20_rate_zero", "a rate of 0 in half of the updates", Pauses),
    well("wb21_float64", "everything is float64", Deep),
    well("wb22_odd_buffers", "infinite, empty, complex and NaN buffers", Strange),
    well("wb23_queue", "a queue whose pointer goes round", Queue),
    well("wb24_replay", "a replay memory that is mostly zeros", Replay),
    well("wb25_pruned", "most of a matrix is exactly 0", Pruned),
    well("wb26_coarse", "fp32 weights that are bf16 numbers", Coarse),
    well("wb27_adafactor", "factored second moments", nets.Chat, optimizer=opt(torch.optim.Adafactor, 3.0)),
    well(
        "wb28_lion_large",
        "Lion with a decay of one half",
        nets.Clip,
        optimizer=lambda self, groups: other.Lion([{**g, "weight_decay": 0.5} for g in groups], lr=self.config.lr),
    ),
    well("wb29_prodigy", "Prodigy estimates its own step size", Bench, optimizer=opt(other.Prodigy, 100.0)),
    well("wb30_epochs", "the sampler's index is 0 again in every epoch, with a new seed", Epochs),
    well("wb31_batch_ramp", "the batch grows while it trains", Ramp),
    well("wb32_thawed", "a block that is trained from update 12 on", Thaw),
    well("wb33_average_is_weight", "averages that equal the weights", Copied),
    well("wb34_by_epoch", "the schedule counts epochs", ByEpoch),
    well("wb35_cumulative", "batch norms without a momentum", Cumulative),
    well("wb36_unused_adapter", "one adapter is untrained", Unused),
    well("wb37_twins", "two branches of equal numbers", Twins),
    well(
        "wb38_sequence",
        "a warm-up and a decay in one schedule of schedules; betas near one",
        nets.Clip,
        schedule=sequence,
        needs={"betas": (0.98, 0.9999)},
        layouts=("torch_save", "dcp"),
    ),
    well("wb39_dropout", "dropout whose generator is not in the save", Dropped, layouts=("dcp", "folder")),
    Fault(
        "wb40_trainer_constant",
        "healthy",
        "transformers' Trainer: constant rate, hard clipping",
        frozenset(),
        live=hugged,
        formats=("live",),
        kind="healthy",
    ),
]
