"""The twenty-third half: forty resumes in which nothing went wrong, by trainers that do more than an optimizer does."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import Loop, variant
from tests.lab.opened20_nets import Tensor, by, flat_rate, memory, noise
from tests.lab.opened23_nets import (
    Adan,
    Ads,
    Amp,
    Came,
    Clip,
    Cycle,
    Dit,
    Dqn,
    Gat,
    Glow,
    Gru,
    HalfNet,
    Kahan,
    Lars,
    Mamba,
    Nano,
    Peft,
    Phi,
    Res,
    RowAdagrad,
    Soap,
    Sophia,
    Style,
    Tiny,
    Vit,
    one_cycle,
    plateau,
    steps_down,
    two_parts,
)
from tests.lab.optimizers import ADOPT, Optimizer, QHAdam, ScheduleFreeAdamW

__all__ = ["HEALTHY23"]


class Relora(Peft):
    """Every tenth update the adapters are added to the base and begin anew; nine tenths of their state go."""

    def update(self) -> None:
        super().update()
        if self.step % 10:
            return
        with torch.no_grad():
            for n, one in enumerate(self.module["unet"].values()):
                if not hasattr(one, "lora_A"):
                    continue
                a, b = one.lora_A["default"].weight, one.lora_B["default"].weight
                one.base_layer.weight += 2.0 * b @ a
                a.copy_(0.2 * noise(1000 * self.step + n, *a.shape))
                b.zero_()
                for w in (a, b):
                    keep = noise(1000 * self.step + n + 500, *w.shape) > 1.28
                    for key in ("exp_avg", "exp_avg_sq"):
                        memory(self, w)[key].mul_(keep)


class Lisa(Nano):
    """One layer of four is trained at a time, another one every five updates; the others have no gradient."""

    layers = 4
    deep = 16

    def gradients(self) -> None:
        now = self.step // 5 * 3 % 4
        for n, w in self.module.named_parameters():
            if ".h." in n and f".h.{now}." not in n:
                w.grad = None
        super().gradients()


class Thawing(Res):
    """Layers are unfrozen from the head down as the run goes on; frozen ones have no state yet."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            wait = 40 if n.startswith(("conv1", "bn1")) else 20 if n.startswith("layer1") else 0
            if self.step < wait:
                w.grad = None
        super().gradients()


class Skipping(Phi):
    """Updates with a gradient norm above a bound are skipped: neither weights nor moments nor schedule move."""

    clip = 0.0

    def apply(self) -> None:
        total = sum(float(w.grad.pow(2).sum()) for w in self.module.parameters() if w.grad is not None)
        self.extra["skipped"] = self.extra.get("skipped", 0) + int(math.sqrt(total) > 2.0 - 0.3 * (self.step % 3))
        if math.sqrt(total) <= 2.0 - 0.3 * (self.step % 3):
            super().apply()

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["skipped"] = 0


class Lawa(Gru):
    """The last three weights, four updates apart, are kept for a mean."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["lawa"] = {f"slot{n}": self.copy() for n in range(3)}

    def copy(self) -> Any:
        return {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def update(self) -> None:
        super().update()
        if self.step % 4 == 0:
            self.extra["lawa"] = dict(self.extra["lawa"]) | {f"slot{self.step // 4 % 3}": self.copy()}


class Clamped(Clip):
    """The temperature is held below a bound that it would pass."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            self.module.logit_scale.clamp_(0.0, 2.01)


class Evolved(Tiny):
    """Evolution: a step along random directions, no gradient and no moments."""

    def update(self) -> None:
        x, parts = self.tokens(), list(self.module.parameters())
        with torch.no_grad():
            for n in range(4):
                blur = [0.05 * noise(10_000 + 40 * self.step + 8 * n + i, *w.shape) for i, w in enumerate(parts)]
                losses = []
                for sign in (1, -2):
                    for w, b in zip(parts, blur, strict=True):
                        w.add_(b, alpha=sign)
                    losses.append(float(self.error(x)))
                for w, b in zip(parts, blur, strict=True):
                    w.add_(b, alpha=1 - 4.0 * (losses[0] - losses[1]))
        for one in self.schedules:
            self.optimizers[0].step()
            one.step()
        self.step += 1
        self.extra["dataloader"]["batches_yielded"] += 1
        self.extra["samples_seen"] += len(x)


class Partial(Res):
    """Gradients of the last part of a batch are held over to the next update."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["held"] = {n: torch.zeros_like(w) for n, w in self.module.named_parameters()}

    def gradients(self) -> None:
        held = self.extra["held"]
        for n, w in self.module.named_parameters():
            both = w.grad + held[n]
            held[n] = 0.5 * both
            w.grad.copy_(0.5 * both)
        super().gradients()


class Growing(Mamba):
    """Sequences and batches grow as the run goes on, as its arguments say."""

    def update(self) -> None:
        super().update()
        self.extra["args"]["batch_size"] = 4 + self.step // 9

    def tokens(self) -> Tensor:
        return super().tokens()[:, : 9 + self.step // 6]


class Copied(Dqn):
    """The target is copied every eleventh update and stands still between."""

    def update(self) -> None:
        kept = {n: w.clone() for n, w in self.module["q_net_target"].state_dict().items()}
        super().update()
        self.module["q_net_target"].load_state_dict(self.module["q_net"].state_dict() if self.step % 11 == 0 else kept)


class Lazy(Ads):
    """Sparse gradients of tables, by SparseAdam; rows that nobody asks for stand still."""

    sparse = True
    clip = 0.0

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        tables = torch.optim.SparseAdam(list(m["embedding_bags"].parameters()), lr=2 * lr)
        return [tables, torch.optim.Adam(m["over"].parameters(), lr=lr)]


class Pruned(Vit):
    """Half of the MLPs' weights are held at 0 by masks that are drawn again every eighth update."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, block in enumerate(self.module.blocks):
                w = block.mlp["fc1"].weight
                w.mul_(noise(300 + n + self.step // 8, *w.shape) > 0)


class Cumulative(Res):
    """Batch norms average over all batches since the beginning, by their count."""

    def make(self) -> nn.Module:
        found = super().make()
        for one in found.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.momentum = None
        return found


class Warm(Dit):
    """The average's decay warms up with a count of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema_updates"] = 0

    def update(self) -> None:
        kept = {n: w.clone() for n, w in self.extra["ema"].items()}
        super().update()
        self.extra["ema_updates"] += 1
        decay = min(0.99, (1 + self.extra["ema_updates"]) / (8 + self.extra["ema_updates"]))
        with torch.no_grad():
            self.extra["ema"] = {n: kept[n].lerp(w, 1 - decay) for n, w in self.module.named_parameters()}


class HalfAverage(Style):
    """The average is kept in bf16, so that it often stands still."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["g_ema"] = {n: w.bfloat16() for n, w in self.extra["g_ema"].items()}

    def update(self) -> None:
        with torch.no_grad():
            kept = {n: w.clone() for n, w in self.extra["g_ema"].items()}
        self.extra["g_ema"] = {n: w.float() for n, w in kept.items()}
        super().update()
        self.extra["g_ema"] = {
            n: kept[n].float().lerp(w.detach(), 0.02).bfloat16() for n, w in self.module.g.named_parameters()
        }


class Reset(Cycle):
    """The critic's last layer begins anew every fifteenth update, as against overfitting; its moments do not."""

    def update(self) -> None:
        super().update()
        if self.step % 15 == 0:
            with torch.no_grad():
                self.module["netD"][2].weight.copy_(0.2 * noise(self.step, 1, 16))


class Overflows(Amp):
    """Every fifth update overflows: it is skipped, and the scale is halved."""

    def apply(self) -> None:
        if self.step % 5 == 2:
            told = self.extra["amp"]["loss_scaler0"]
            told |= {"loss_scale": told["loss_scale"] / 2, "unskipped": 0}
        else:
            super().apply()


class Short(Gat):
    """An epoch has nine batches; the sampler is seeded anew with each."""

    def update(self) -> None:
        super().update()
        held = self.extra["dataloader"]
        if held["batches_yielded"] == 9:
            held |= {"epoch": held["epoch"] + 1, "batches_yielded": 0, "seed": 4242 + held["epoch"] + 1}


class Noisy(Tiny):
    """Private training: noise beyond the clipped gradient, whose share of the budget is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["accountant"] = {"history": [[0.8, 0.01, 0]], "mechanism": "rdp"}

    def gradients(self) -> None:
        super().gradients()
        for n, w in enumerate(self.module.parameters()):
            w.grad.add_(noise(31 * self.step + n, *w.shape), alpha=0.3)
        self.extra["accountant"]["history"][0][2] += 1


class Recycled(Gru):
    """Units of the last layer that do little are drawn anew every thirteenth update, with moments of 0."""

    def update(self) -> None:
        super().update()
        if self.step % 13 == 0:
            w = self.module.out.weight
            with torch.no_grad():
                dull = w.abs().sum(0).topk(4, largest=False).indices
                w[:, dull] = 0.3 * noise(self.step, 5, 4)
                for key in ("exp_avg", "exp_avg_sq"):
                    memory(self, w)[key][:, dull] = 0


class Gain(Optimizer):
    """Adam with a gain for every weight, which grows while signs agree and is cut by half where they do not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-8, gain_range=(0.1, 4.0))

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return super().begin(weight, group) | {"gain": torch.ones_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), low, high = group["betas"], *group["gain_range"]
        state["step"] += 1
        t, same = state["step"], state["exp_avg"] * gradient > 0
        state["gain"] = torch.where(same, state["gain"] + 0.05, state["gain"] / 2).clamp(low, high)
        state["exp_avg"].lerp_(gradient, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        move = state["exp_avg"] / (1 - one**t) / ((state["exp_avg_sq"] / (1 - two**t)).sqrt() + group["eps"])
        weight.sub_(state["gain"] * move, alpha=group["lr"])


def cyclic(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    lr = self.config.lr
    return torch.optim.lr_scheduler.CyclicLR(
        optimizer, base_lr=0.05 * lr, max_lr=10 * lr, step_size_up=7, mode="triangular2"
    )


def stable_then_down(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    """Warm-up, a plain, and a fall to 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 8, 1.0, max(0.0, (75 - n) / 25)))


def on_plateau(self: Any) -> None:
    self.optimizers[0].step()
    self.schedules[0].step(1.0 + 0.05 * (self.step % 11))


def hybrid(self: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices of the blocks, Lion-like signs for the rest by SGD."""
    held = dict(self.module.named_parameters())
    inner = [w for n, w in held.items() if w.ndim == 2 and ".h." in n]
    rest = [w for n, w in held.items() if not (w.ndim == 2 and ".h." in n)]
    lr = self.config.lr
    return [
        torch.optim.Muon(inner, lr=5 * lr, weight_decay=0.1, nesterov=False),
        torch.optim.NAdam(rest, lr=lr, decoupled_weight_decay=True),
    ]


def half(self: Any) -> nn.Module:
    return Nano.net(self).to(torch.bfloat16)


def _hf(id: str, text: str, name: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


PLAIN = ("torch_save", "timm", "mm", "fairseq", "composer")

HEALTHY23: list[Fault] = [
    variant("vb01_soap", "moments in eigenbases that are found again every six updates", base=Phi, optimizer=by(Soap)),
    variant("vb02_sophia", "a Hessian that moves every fourth update", base=Nano, optimizer=by(Sophia, 0.3)),
    variant("vb03_adan", "the gradient before is kept, negated", base=Gru, optimizer=by(Adan), layouts=PLAIN),
    variant("vb04_came", "four factors a matrix", base=Vit, optimizer=by(Came, 0.3)),
    variant("vb05_rprop", "a step size for every weight", base=Tiny, optimizer=by(torch.optim.Rprop)),
    variant("vb06_adamax", "the largest gradient decays", base=Mamba, optimizer=by(torch.optim.Adamax, 2.0)),
    variant("vb07_adopt", "the first update moves nothing", base=Clip, optimizer=by(ADOPT), schedule=two_parts),
    variant("vb08_qhadam", "averages weighted by sums, without a counter", base=Gat, optimizer=by(QHAdam)),
    variant("vb09_private", "noise beyond the clipped gradient, and what it cost", base=Noisy),
    variant("vb10_lars", "steps in proportion to norms", base=Res, optimizer=by(Lars, 20.0), schedule=steps_down),
    variant("vb11_row_sums", "one sum of squares a row", base=Ads, optimizer=by(RowAdagrad, 10.0)),
    variant("vb12_sparse_adam", "rows stand still until they are asked for", base=Lazy),
    variant("vb13_kahan", "bf16 weights with what rounding lost", base=Nano, net=half, optimizer=by(Kahan)),
    variant("vb14_fp16_masters", "fp16 weights, fp32 copies", base=HalfNet, dtype=torch.float16, layouts=PLAIN),
    variant("vb15_gains", "a gain for every weight", base=Glow, optimizer=by(Gain, 0.5)),
    variant("vb16_one_cycle", "lr and β1 go up and down against each other", base=Gru, schedule=one_cycle),
    variant(
        "vb17_triangles",
        "lr and momentum in triangles, each half as high",
        base=Res,
        optimizer=by(torch.optim.SGD, 1.0, momentum=0.9, nesterov=True),
        schedule=cyclic,
    ),
    variant("vb18_down_to_zero", "the lr falls to 0 and stays there", base=Nano, schedule=stable_then_down),
    variant(
        "vb19_plateau", "the lr is halved where a metric stands still", base=Gat, schedule=plateau, apply=on_plateau
    ),
    variant(
        "vb20_schedule_free",
        "weights between two sequences",
        base=Vit,
        optimizer=by(ScheduleFreeAdamW, 2.0),
        schedule=flat_rate,
    ),
    variant("vb21_hybrid", "Muon beside NAdam", base=Nano, made=hybrid, layouts=PLAIN),
    variant("vb22_relora", "adapters are merged and begin anew every ten updates", base=Relora),
    variant("vb23_lisa", "layers are trained by turns", base=Lisa),
    variant("vb24_thawing", "layers get state when their turn comes", base=Thawing),
    variant("vb25_skipped", "updates are skipped where gradients are large", base=Skipping),
    variant("vb26_latest_weights", "three older weights are kept in a ring", base=Lawa),
    variant("vb27_clamped_scale", "a temperature stands at its bound", base=Clamped),
    variant("vb28_evolution", "weights move along random directions", base=Evolved),
    variant("vb29_held_over", "half of each gradient is held over", base=Partial, layouts=PLAIN),
    variant("vb30_growing", "batches and sequences grow", base=Growing),
    variant("vb31_copied_target", "the target jumps every eleven updates", base=Copied),
    variant("vb32_drawn_masks", "masks are drawn again every eight updates", base=Pruned),
    variant("vb33_cumulative_norms", "batch norms average over all batches", base=Cumulative, layouts=("dcp",)),
    variant("vb34_warm_average", "the average's decay warms up", base=Warm),
    variant("vb35_average_in_bf16", "an average that often stands still", base=HalfAverage, layouts=PLAIN),
    variant("vb36_layer_reset", "a critic's layer begins anew every fifteen updates", base=Reset),
    variant("vb37_overflows", "a fifth of the updates is skipped", base=Overflows),
    variant("vb38_short_epochs", "the sampler begins anew and is seeded anew every nine batches", base=Short),
    variant("vb39_recycled", "dull units are drawn anew", base=Recycled),
    _hf(
        "vb40_trainer_adafactor",
        "transformers' Trainer: GPT-2 by Adafactor, inverse square root, accumulated",
        "gpt2",
        optim="adafactor",
        lr_scheduler_type="inverse_sqrt",
        gradient_accumulation_steps=3,
    ),
]
