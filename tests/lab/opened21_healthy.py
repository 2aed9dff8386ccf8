"""Forty healthy resumes of the twenty-first half, each with a habit that a naive checker would take for a fault."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import variant
from tests.lab.opened21_nets import (
    Adan,
    Amp,
    Bart,
    Bench,
    Ctc,
    Dit,
    Flow,
    Fno,
    Half,
    Image,
    Llama,
    Mamba,
    Mixtral,
    Norms,
    Oss,
    Peft,
    Phi,
    ResNet,
    Retina,
    Sage,
    Shampoo,
    Sophia,
    Td3,
    Tensor,
    Text,
    Tower,
    Wgan,
    beta,
    bf16,
    mlp,
    muon,
    steady,
    with_,
)

__all__ = ["HEALTHY21"]

T = ("torch_save",)


class Follower(Dit):
    """Its average has a decay of 0: it is the weights."""

    decay = 0.0


class Epochs(Sage):
    """An epoch is five updates long, after which the sampler is at 0 again."""

    epoch = 60


class HardTargets(Td3):
    """Targets are copies, renewed every ten updates."""

    def update(self) -> None:
        Bench.update(self)
        if self.step % 10 == 0:
            for name in ("actor", "critic_1", "critic_2"):
                self.module[f"{name}_target"].load_state_dict(self.module[name].state_dict())


class Pruned(Bench):
    """Most of a matrix is masked; its first rows are zeros altogether."""

    def build(self) -> nn.Module:
        found = mlp(24, 64, 64, 24)
        found.register_buffer("mask", (torch.arange(64 * 64) >= 2048).float().view(64, 64))
        with torch.no_grad():
            found[2].weight *= found.mask
        return found

    def gradients(self) -> None:
        super().gradients()
        self.module[2].weight.grad *= self.module.mask


class Masked(Bench):
    """Minus infinity above the diagonal, in a buffer that is stored."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"body": mlp(24, 36, 24), "mix": nn.Linear(6, 6)})
        found.register_buffer("attn_mask", torch.full((6, 6), -torch.inf).triu(1))
        return found

    def error(self, x: Tensor) -> Tensor:
        weight = (self.module["mix"].weight + self.module.attn_mask).softmax(-1)
        mixed = torch.einsum("ij,bjd->bid", weight, x.view(-1, 6, 4)).flatten(1)
        return F.mse_loss(self.module["body"](mixed + self.module["mix"].bias.mean()), self.target(x))


class NeverBest(Ctc):
    """No validation was run yet: the best loss is infinite, the last one not a number."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["best"] = {"loss": float("inf"), "last": float("nan"), "step": -1}


class OneLayer(nn.Module):
    """One layer used three times under three names."""

    def __init__(self) -> None:
        super().__init__()
        first = mlp(24, 48, 24)
        self.layers = nn.ModuleList([first, first, first])
        self.head = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.layer_norm(x + layer(x), x.shape[-1:])
        return self.head(x)


class Albert(Bench):
    layouts = T

    def build(self) -> nn.Module:
        return OneLayer()


class Relora(Peft):
    """Merges its adapters every twelve updates, and begins new ones with new moments."""

    def update(self) -> None:
        super().update()
        if self.step % 12 == 0:
            one = self.optimizers[0]
            with torch.no_grad():
                for m in self.module.values():
                    a, b = m.lora_A["default"].weight, m.lora_B["default"].weight
                    m.base_layer.weight += 2.0 * b @ a
                    b.zero_()
                    for w in (a, b):
                        for key in ("exp_avg", "exp_avg_sq"):
                            one.state[w][key].zero_()


class Revived(Bench):
    """A few units are made anew every nine updates, as for codes that nobody uses."""

    def update(self) -> None:
        super().update()
        if self.step % 9 == 0:
            rows = torch.randn(4, self.width, generator=torch.Generator().manual_seed(self.step)) / 5
            with torch.no_grad():
                self.module[0].weight[:4] = rows


class RoundBase(Peft):
    """The frozen base came as bf16 and is stored as fp32."""

    def build(self) -> nn.Module:
        found = super().build()
        with torch.no_grad():
            for m in found.values():
                m.base_layer.weight.copy_(bf16(m.base_layer.weight))
        return found


class Late(Text):
    """The rate is 0 until the fiftieth update; moments grow all the same."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, max(0.0, (done - 50) / 10)))


class TurnTaking(Wgan):
    """The critic is updated four times as often as the generator."""

    def apply(self) -> None:
        for n, optimizer in enumerate(self.optimizers):
            if n == 1 or self.step % 4 == 0:
                optimizer.step()
        for schedule in self.schedules:
            schedule.step()


class Growing(Tower):
    """The batch grows by eight rows every fifteen updates."""

    def update(self) -> None:
        super().update()
        if self.step % 15 == 0:
            self.extra["config"]["batch_size"] += 8


class Overflowing(Amp):
    """Every thirteenth update overflows: it is skipped, and the scale halved."""

    def apply(self) -> None:
        told = self.extra["grad_scaler"]
        if self.step % 13 == 7:
            told |= {"scale": told["scale"] / 2, "_growth_tracker": 0}
            return
        super().apply()


class Plateau(Retina):
    """The rate halves whenever the loss does not fall."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)

    def error(self, x: Tensor) -> Tensor:
        found = super().error(x)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.last)


class Swa(Image):
    """Averages every fifth state from the fifteenth on; before, the average is empty zeros."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        zeros = {n: torch.zeros_like(w) for n, w in self.module.state_dict().items()}
        self.extra["swa"] = {"n_averaged": 0, "module": zeros}

    def update(self) -> None:
        super().update()
        told = self.extra["swa"]
        if self.step >= 15 and self.step % 5 == 0:
            told["n_averaged"] += 1
            for n, w in self.module.state_dict().items():
                told["module"][n].lerp_(w, 1 / told["n_averaged"])


class Lisa(Llama):
    """Each update trains one layer alone; the others have no gradient, and counters of their own."""

    def gradients(self) -> None:
        super().gradients()
        for n, w in self.module.named_parameters():
            if ".layers." in n and f".layers.{self.step // 3 % self.layers}." not in n:
                w.grad = None


class Sphere(Bench):
    """Rows of all matrices go back to length 1 after each update."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in self.module.parameters():
                if w.ndim == 2:
                    w.copy_(F.normalize(w, dim=1))


class SparseTables(Tower):
    """Rows that no sample touched keep weights and moments: SparseAdam beside Adam."""

    def build(self) -> nn.Module:
        found = super().build()
        for one in found["embedding"].values():
            one.sparse = True
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        tables = torch.optim.SparseAdam(list(m["embedding"].parameters()), lr=3 * lr)
        return [tables, torch.optim.Adam(m["tower"].parameters(), lr=lr)]

    def gradients(self) -> None:
        return


class Ascent(Bench):
    """Sharpness-aware: each update goes uphill first, and back."""

    def gradients(self) -> None:
        ws = list(self.module.parameters())
        before = [w.detach().clone() for w in ws]
        norm = torch.stack([w.grad.norm() for w in ws]).norm()
        with torch.no_grad():
            for w in ws:
                w.add_(w.grad, alpha=0.05 / float(norm))
        x = self.tokens()
        for w in ws:
            w.grad = None
        self.error(x).backward()
        with torch.no_grad():
            for w, old in zip(ws, before, strict=True):
                w.copy_(old)


class Replayed(Norms):
    """The buffer of replayed samples is stored, and older than the weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["replay"] = {"data": torch.zeros(40, 24), "pos": 0, "full": False}

    def tokens(self) -> Tensor:
        told, new = self.extra["replay"], super().tokens()
        for row in new[:5]:
            told["data"][told["pos"]] = row
            told["pos"] = (told["pos"] + 1) % 40
            told["full"] = told["full"] or told["pos"] == 0
        return torch.cat([new[5:], told["data"][:5]])


class Twins(nn.Module):
    """Two branches that began equal and get equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left = mlp(24, 32, 24)
        self.right = copy.deepcopy(self.left)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.left(x) + self.right(x))


class Copies(Bench):
    def build(self) -> nn.Module:
        return Twins()


class Zeroed(Dit):
    """Modulations and the last layer begin at zero, and biases of the last stay there."""

    def build(self) -> nn.Module:
        found = super().build()
        with torch.no_grad():
            for block in found.blocks:
                block["adaLN_modulation"].weight.zero_()
                block["adaLN_modulation"].bias.zero_()
            found.final_layer.weight.zero_()
            found.final_layer.bias.zero_()
        found.final_layer.bias.requires_grad_(False)
        return found


class Reseeded(Bench):
    """The sampler's seed changes with each epoch."""

    epoch = 48

    def update(self) -> None:
        before = self.extra["sampler"]["epoch"]
        super().update()
        if self.extra["sampler"]["epoch"] != before:
            self.extra["sampler"]["seed"] += 1000


class Curriculum(Mamba):
    """Sequences are four tokens long at first, and longer every ten updates."""

    def tokens(self) -> Tensor:
        return super().tokens()[:, : 5 + self.step // 10]


def restarts(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 9, 2)


def sequence(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    kinds = torch.optim.lr_scheduler
    parts = [
        kinds.LinearLR(optimizer, 0.1, 1.0, 10),
        kinds.ConstantLR(optimizer, 0.5, 15),
        kinds.ExponentialLR(optimizer, 0.9),
    ]
    return kinds.SequentialLR(optimizer, parts, [10, 30])


def steps(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [12, 22, 32, 42], 0.1)


def double(self: Any) -> nn.Module:
    return Bench.net(self).double()


def wide_tokens(self: Any) -> Tensor:
    return Bench.tokens(self).double()


def wide_target(self: Any, x: Tensor) -> Tensor:
    return torch.sin(x.sum(1, keepdim=True) / 3) + 0.1 * x


def amsgrad(self: Any, groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=self.config.lr, betas=(0.8, 0.999), amsgrad=True)


def trainer(id: str, text: str, model: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, model), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


HEALTHY21 = [
    variant("yb01_average_is_weights", "an average with a decay of 0", base=Follower, layouts=T),
    variant(
        "yb02_short_epochs",
        "the sampler is at 0 every five updates",
        base=Epochs,
        optimizer=with_(other.ScheduleFreeAdamW),
        schedule=steady,
    ),
    variant("yb03_warm_restarts", "the rate jumps to its peak again; bf16 and masters", base=Half, schedule=restarts),
    variant("yb04_complex", "complex weights", base=Fno, layouts=T),
    variant("yb05_clamped", "weights are clamped after each update", base=Wgan, layouts=("torch_save", "lightning")),
    variant("yb06_first_batch", "the first batch sets an activation norm", base=Flow),
    variant("yb07_statistics", "statistics of observations, whose share falls", base=Norms, needs=beta(0.9, 0.95)),
    variant("yb08_hard_targets", "targets jump to the weights every ten updates", base=HardTargets, layouts=T),
    variant("yb09_pruned", "half a matrix is zeros, and so are its moments", base=Pruned),
    variant("yb10_infinite_mask", "a stored buffer of minus infinities", base=Masked),
    variant("yb11_no_best_yet", "the best loss is infinite, the last is no number", base=NeverBest, layouts=T),
    variant("yb12_one_layer", "one layer under three names", base=Albert),
    variant("yb13_relora", "adapters are merged and begun anew in the run", base=Relora, layouts=T),
    variant("yb14_revived_rows", "rows are made anew every nine updates", base=Revived),
    variant("yb15_rounded_base", "a frozen base whose low bits are zeros", base=RoundBase),
    variant("yb16_no_state", "SGD without momentum has no state", base=ResNet, optimizer=with_(torch.optim.SGD, 10.0)),
    variant("yb17_rate_of_zero", "the rate is 0 until the fiftieth update", base=Late),
    variant("yb18_turns", "one optimizer steps four times as often", base=TurnTaking, layouts=T),
    variant("yb19_growing_batch", "the batch grows on a plan", base=Growing, optimizer=with_(torch.optim.Adagrad, 5.0)),
    variant("yb20_overflows", "overflows halve the scale and skip updates", base=Overflowing, layouts=T),
    variant("yb21_plateau", "the rate halves when the loss does not fall", base=Plateau, layouts=T),
    variant(
        "yb22_sequence",
        "three schedules one after the other",
        base=Bart,
        schedule=sequence,
        optimizer=with_(other.AdamW8bit),
        layouts=T,
    ),
    variant("yb23_late_average", "an average of zeros until the fifteenth update", base=Swa, layouts=T),
    variant("yb24_sophia", "a curvature that changes every five updates", base=Oss, optimizer=with_(Sophia, 0.3)),
    variant(
        "yb25_shampoo",
        "preconditioners and their roots",
        base=Wgan,
        made=lambda self: [Shampoo(self.module[name].parameters(), lr=self.config.lr) for name in ("netG", "netD")],
        layouts=T,
    ),
    variant("yb26_adan", "a negative gradient in the state", base=Ctc, optimizer=with_(Adan, 0.5)),
    variant("yb27_one_layer_at_a_time", "counters differ from layer to layer", base=Lisa),
    variant("yb28_lamb", "steps as large as the weights", base=Phi, optimizer=with_(other.Lamb, 2.0)),
    variant(
        "yb29_prodigy",
        "a rate that the optimizer finds",
        base=Image,
        optimizer=with_(other.Prodigy, 100.0),
        schedule=steady,
        layouts=T,
    ),
    variant("yb30_on_a_sphere", "rows have length 1 after each update", base=Sphere, optimizer=with_(torch.optim.Adam)),
    variant("yb31_sparse_tables", "rows without a sample keep their moments", base=SparseTables, layouts=T),
    variant("yb32_adafactor", "rows and columns of squares", base=Mixtral, optimizer=with_(torch.optim.Adafactor, 1.0)),
    variant(
        "yb33_uphill_first",
        "sharpness-aware updates",
        base=Ascent,
        optimizer=with_(torch.optim.SGD, 4.0, momentum=0.9, nesterov=True),
    ),
    variant("yb34_replay", "a stored buffer of samples that wraps around", base=Replayed, layouts=T),
    variant("yb35_double", "everything in float64", base=Bench, net=double, tokens=wide_tokens, target=wide_target),
    variant("yb36_twins", "two branches are equal in all", base=Copies, optimizer=amsgrad),
    variant("yb37_zero_at_first", "layers that begin at zero; a bias stays there", base=Zeroed, layouts=T),
    variant(
        "yb38_seed_of_epoch",
        "the sampler's seed changes with each epoch",
        base=Reseeded,
        schedule=steps,
        optimizer=with_(torch.optim.Rprop, 0.2),
    ),
    trainer(
        "yb39_trainer_restarts",
        "transformers' Trainer: GPT-2, restarts of the cosine, accumulated",
        "gpt2",
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 5},
        gradient_accumulation_steps=3,
    ),
    variant("yb40_longer_sequences", "sequences grow; Muon and AdamW", base=Curriculum, made=muon, layouts=T),
]
