"""The twentieth half: forty resumes in which nothing went wrong, each of a kind that looks as if something had."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import Loop, variant
from tests.lab.opened20_nets import (
    T5,
    AdamMini,
    AdEMAMix,
    Conformer,
    Convnext,
    Dcn,
    Dense,
    Detr,
    Forge,
    Galore,
    Gan,
    Gin,
    Lookahead,
    Lstm,
    Mixed,
    Moco,
    Nerf,
    Ppo,
    Sac,
    Scaled,
    Seek,
    Talk,
    Tensor,
    Tts,
    Unet,
    Vq,
    by,
    flat_rate,
    memory,
    noise,
    stack,
)
from tests.lab.optimizers import AdamW8bit, Optimizer, Prodigy

__all__ = ["HEALTHY20"]


class Physics(Forge):
    """A small network by L-BFGS: its history is one flat list under the first parameter."""

    layouts = ("torch_save", "folder")
    clip = 0.0

    def make(self) -> nn.Module:
        return stack(20, 16, 1, act=nn.Tanh)

    def error(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.module(x)[:, 0], x[:, 0] * x[:, 1].sin())

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.module.parameters(), lr=0.1, max_iter=3, history_size=4)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def apply(self) -> None:
        x = self.tokens()

        def again() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        self.optimizers[0].step(again)


class Swa(Forge):
    """From the twelfth update on a plain mean of the weights is kept as well."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["swa"] = {
            "n_averaged": 0,
            "module": {n: w.detach().clone() for n, w in self.module.named_parameters()},
        }

    def update(self) -> None:
        super().update()
        held = self.extra["swa"]
        if self.step >= 12:
            with torch.no_grad():
                for n, w in self.module.named_parameters():
                    held["module"][n] += (w - held["module"][n]) / (held["n_averaged"] + 1)
            held["n_averaged"] += 1


class Revived(Vq):
    """Every ninth update the code that is least in use is replaced by a sample."""

    def update(self) -> None:
        super().update()
        if self.step % 9 == 0:
            book, n = self.module["quantizer"], self.step
            with torch.no_grad():
                at = int(book.cluster_size.argmin())
                book.embedding[at] = book.embed_avg[at] = noise(n, 8)
                book.cluster_size[at] = 1.0


class HardTargets(Sac):
    """Targets are copied every fifteenth update, and stand still between."""

    def update(self) -> None:
        Forge.update(self)
        if self.step % 15 == 0:
            for name in ("qf1", "qf2"):
                self.module[f"{name}_target"].load_state_dict(self.module[name].state_dict())


class Thirds(Gan):
    """The generator is updated once for three updates of the critic."""

    def apply(self) -> None:
        both = list(zip(self.optimizers, self.schedules, strict=True))
        for one, schedule in both if self.step % 3 == 0 else both[1:]:
            one.step()
            schedule.step()


class LayerDrop(Talk):
    """One of four layers gets no gradient in most updates, another each time."""

    layers = 4
    deep = 16

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if n.startswith(f"layers.{self.step * 7 % 5}."):
                w.grad = None
        super().gradients()


class Sparse(Dcn):
    """Tables by SparseAdam, whose moments move only where a row was asked for."""

    clip = 0.0

    def make(self) -> nn.Module:
        found = super().make()
        for table in found["tables"].values():
            table.sparse = True
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        rest = [w for n, w in m.named_parameters() if not n.startswith("tables")]
        return [torch.optim.SparseAdam(list(m["tables"].parameters()), lr=lr), torch.optim.Adam(rest, lr=lr)]


class Clamped(Gan):
    """The critic's weights are cut to ±0.1 after every update."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in self.module["critic"].parameters():
                w.clamp_(-0.1, 0.1)


class Sphere(Dense):
    """Rows of all matrices are brought back to length 1 after every update."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in self.module.parameters():
                if w.ndim == 2:
                    w.copy_(F.normalize(w, dim=1))


class Pruned(Convnext):
    """More and more of the smallest weights are set to 0; masks are buffers."""

    def make(self) -> nn.Module:
        found = super().make()
        for block in found.blocks:
            block["pwconv1"].register_buffer("weight_mask", torch.ones_like(block["pwconv1"].weight))
        return found

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for block in self.module.blocks:
                layer = block["pwconv1"]
                if self.step % 6 == 0:
                    share = min(0.8, self.step / 60)
                    layer.weight_mask.copy_((layer.weight.abs() > layer.weight.abs().flatten().quantile(share)).float())
                layer.weight.mul_(layer.weight_mask)


class Observed(Gin):
    """Quantisation-aware training: observers keep the extremes, and scales of them."""

    def make(self) -> nn.Module:
        found = super().make()
        for layer in found["layers"]:
            for name, value in (("min_val", torch.inf), ("max_val", -torch.inf), ("scale", 1.0)):
                layer.register_buffer(name, torch.tensor(value))
            layer.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))
        return found

    def error(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for n, layer in enumerate(self.module["layers"]):
                seen = layer(x * (1 + n))
                layer.min_val.copy_(torch.minimum(layer.min_val, seen.min()))
                layer.max_val.copy_(torch.maximum(layer.max_val, seen.max()))
                layer.scale.copy_((layer.max_val - layer.min_val) / 255)
                layer.zero_point.copy_((-layer.min_val / layer.scale).round().int())
        return super().error(x)


def restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=11, T_mult=2)


class Plateau(Convnext):
    """The lr falls to a tenth where a stored metric has not improved for eight updates."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=8)

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(1.0 + 0.01 * (self.step % 10))


class Stormy(Scaled):
    """Every third update overflows: it is skipped, and the scale is halved."""

    def apply(self) -> None:
        if self.step % 3 == 1:
            self.extra["scaler"] |= {"scale": self.extra["scaler"]["scale"] / 2, "_growth_tracker": 0}
        else:
            super().apply()


class Ramp(Lstm):
    """The batch grows by two every sixth update."""

    def update(self) -> None:
        super().update()
        self.extra["args"]["batch_size"] = self.rows + 2 * (self.step // 6)


class Epochs(Convnext):
    """An epoch has seven batches; the loader begins again at 0 with each."""

    def update(self) -> None:
        super().update()
        held = self.extra["dataloader"]
        if held["batches_yielded"] == 7:
            held |= {"epoch": held["epoch"] + 1, "batches_yielded": 0}


class Micro(Dense):
    """The trainer counts micro-batches, four an update."""

    def update(self) -> None:
        super().update()
        self.step += 3

    def run(self, updates: int) -> None:
        for _ in range(updates):
            self.update()


class Sam(Optimizer):
    """Sharpness-aware SGD: old weights are kept in the state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, rho=0.05, adaptive=False)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(weight), "old_p": weight.clone(), "e_w": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["old_p"].copy_(weight)
        state["e_w"].copy_(gradient * (group["rho"] / (gradient.norm() + 1e-12)))
        state["momentum_buffer"].mul_(group["momentum"]).add_(gradient + state["e_w"])
        weight.sub_(state["momentum_buffer"], alpha=group["lr"])


class PopArt(Ppo):
    """The value's last layer is rescaled whenever the statistics of returns move."""

    def make(self) -> nn.Module:
        found = super().make()
        found["vf"].register_buffer("mu", torch.zeros(1))
        found["vf"].register_buffer("sigma", torch.ones(1))
        return found

    def update(self) -> None:
        super().update()
        vf, back = self.module["vf"], 3 * noise(self.step, 16) + 2
        with torch.no_grad():
            mu, sigma = 0.9 * vf.mu + 0.1 * back.mean(), 0.9 * vf.sigma + 0.1 * back.std()
            last = vf[2]
            last.weight.mul_(vf.sigma / sigma)
            last.bias.copy_((vf.sigma * last.bias + vf.mu - mu) / sigma)
            vf.mu.copy_(mu)
            vf.sigma.copy_(sigma)


class Reptile(Forge):
    """Meta-learning: weights go a tenth of the way to where three inner steps end."""

    def update(self) -> None:
        start = [w.detach().clone() for w in self.module.parameters()]
        for _ in range(3):
            super().update()
            self.step -= 1
        self.step += 1
        with torch.no_grad():
            for w, old in zip(self.module.parameters(), start, strict=True):
                w.copy_(old.lerp(w, 0.1))


class Langevin(Forge):
    """Noise is added to every weight, from a generator that is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["noise_rng"] = torch.Generator().manual_seed(8).get_state()

    def update(self) -> None:
        super().update()
        made = torch.Generator()
        made.set_state(self.extra["noise_rng"])
        with torch.no_grad():
            for w in self.module.parameters():
                w.add_(torch.randn(w.shape, generator=made), alpha=0.01)
        self.extra["noise_rng"] = made.get_state()


class Still(Gin):
    """A group has the learning rate 0; its moments go on."""

    def groups(self) -> Any:
        inner, rest = (
            [w for n, w in self.module.named_parameters() if n.startswith("norms") is one] for one in (True, False)
        )
        return [{"params": inner, "lr": 0.0, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.02}]


class Averaged(Forge):
    """The file's ``model`` is the average, as evaluation wants it; what is trained is beside it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mean = {n: w.detach().clone() for n, w in self.module.state_dict().items()}
        self.extra["model_raw"] = self.module.state_dict()

    def weights(self) -> dict[str, Any]:
        return dict(self.mean)

    def content(self) -> dict[str, Any]:
        self.extra["model_raw"] = {n: w.clone() for n, w in self.module.state_dict().items()}
        return super().content()

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.module.load_state_dict(content["model_raw"])

    def take(self, weights: dict[str, Any]) -> None:
        self.mean = dict(weights)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                self.mean[n].lerp_(w, 0.03)


class Lonely(Seek):
    """Experts that no token visited have no gradient; one is never visited."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if ".experts.3." in n or (".experts.1." in n and self.step % 4):
                w.grad = None
        super().gradients()


class Stochastic(Optimizer):
    """Adam on bf16 weights without copies, rounded by chance; the generator's seed is the step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros(weight.shape), "exp_avg_sq": torch.zeros(weight.shape)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g = group["betas"], gradient.float()
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].lerp_(g, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        move = state["exp_avg"] / (1 - one**t) / ((state["exp_avg_sq"] / (1 - two**t)).sqrt() + group["eps"])
        exact = weight.float() - group["lr"] * move
        dice = torch.randint(0, 1 << 16, exact.shape, generator=torch.Generator().manual_seed(t), dtype=torch.int32)
        weight.copy_(((exact.view(torch.int32) + dice) & -65536).view(torch.float32))


class Rounded(Talk):
    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Stochastic(groups, self.config.lr)


class Switched(Unet):
    """The optimizer's counts of one tensor lag behind: it had no gradient in every fifth update."""

    def gradients(self) -> None:
        if self.step % 5 == 4:
            for w in self.module.time_embed.parameters():
                w.grad = None
        super().gradients()


class Halved(Nerf):
    """Moments are halved by the trainer itself every tenth update, as when a table is pruned."""

    def update(self) -> None:
        super().update()
        if self.step % 10 == 0:
            for table in self.module["encoding"]:
                memory(self, table)["exp_avg"].mul_(0.5)
                memory(self, table)["exp_avg_sq"].mul_(0.5)


def muon(self: Any) -> list[torch.optim.Optimizer]:
    held = dict(self.module.named_parameters())
    inner = [w for n, w in held.items() if w.ndim == 2 and ".layers." in n]
    rest = [w for n, w in held.items() if not (w.ndim == 2 and ".layers." in n)]
    lr = self.config.lr
    return [torch.optim.Muon(inner, lr=6 * lr, momentum=0.9, weight_decay=0.0), torch.optim.AdamW(rest, lr=lr)]


def asgd(self: Any, groups: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(self.module.parameters(), lr=40 * self.config.lr, t0=20, weight_decay=1e-6)


def prodigy(self: Any, groups: Any) -> torch.optim.Optimizer:
    return Prodigy([w for g in groups for w in g["params"]], lr=1.0)


def _hf(id: str, text: str, name: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


PLAIN = ("torch_save", "lightning")

HEALTHY20: list[Fault] = [
    variant("xb01_lbfgs", "L-BFGS, whose state is a history of flat vectors", base=Physics),
    variant("xb02_galore", "moments in a subspace that changes every seven updates", base=Talk, optimizer=by(Galore)),
    variant("xb03_ademamix", "three moments, one of them very slow", base=Conformer, optimizer=by(AdEMAMix, 0.3)),
    variant("xb04_adam_mini", "one second moment a tensor", base=Detr, optimizer=by(AdamMini)),
    variant("xb05_lookahead", "weights go back to a slow copy every five updates", base=Gin, optimizer=by(Lookahead)),
    variant("xb06_swa", "a plain mean of the weights begins late", base=Swa, layouts=("dcp",)),
    variant("xb07_queue", "a queue of keys is written over in a ring", base=Moco),
    variant("xb08_codes_revived", "codes out of use are replaced at random", base=Revived),
    variant("xb09_hard_targets", "targets jump every fifteen updates", base=HardTargets),
    variant("xb10_three_to_one", "one optimizer is stepped a third as often", base=Thirds),
    variant("xb11_layer_drop", "layers are left out by turns", base=LayerDrop),
    variant("xb12_sparse_adam", "moments of rows stand still until they are asked for", base=Sparse),
    variant("xb13_clamped", "weights are cut after every update", base=Clamped),
    variant("xb14_sphere", "rows are brought back to length 1", base=Sphere, layouts=("dcp",)),
    variant("xb15_pruned", "more and more weights become 0", base=Pruned, layouts=("torch_save", "folder")),
    variant("xb16_observers", "extremes that begin at infinity", base=Observed),
    variant("xb17_warm_restarts", "the schedule restarts by design", base=Talk, schedule=restarts),
    variant("xb18_plateau", "the lr falls to a tenth where the metric stands still", base=Plateau),
    variant("xb19_overflows", "a third of the updates is skipped", base=Stormy),
    variant("xb20_batch_ramp", "the batch grows in training", base=Ramp),
    variant("xb21_short_epochs", "the loader begins anew every seven batches", base=Epochs),
    variant("xb22_micro_steps", "the trainer's step counts micro-batches", base=Micro),
    variant("xb23_sam", "old weights and perturbations are in the state", base=Convnext, optimizer=by(Sam, 10.0)),
    variant("xb24_popart", "the value's last layer is rescaled outside the optimizer", base=PopArt),
    variant("xb25_reptile", "weights move a tenth of what the optimizer did", base=Reptile),
    variant("xb26_langevin", "noise beyond the lr is added to every weight", base=Langevin),
    variant("xb27_group_at_zero", "a group's lr is 0", base=Still, layouts=("dcp",)),
    variant("xb28_tied_t5", "three users of one matrix, stored once", base=T5, layouts=("folder",)),
    variant("xb29_lion_masters", "Lion on fp32 copies of bf16 weights", base=Mixed, layouts=("torch_save", "folder")),
    variant(
        "xb30_rmsprop_tiny_eps",
        "RMSprop with momentum, a tiny ε and no first moment",
        base=Nerf,
        optimizer=by(torch.optim.RMSprop, 0.5, alpha=0.9, eps=1e-15, momentum=0.3),
    ),
    variant("xb31_muon", "Muon beside AdamW", base=Dense, made=muon, layouts=PLAIN),
    variant(
        "xb32_average_is_the_model",
        "the file's model is the average, the raw weights are beside it",
        base=Averaged,
        layouts=("torch_save", "folder"),
    ),
    variant("xb33_lonely_experts", "experts without tokens have no state or an old one", base=Lonely),
    variant("xb34_prodigy", "the step size is estimated and grows", base=Tts, optimizer=prodigy, schedule=flat_rate),
    variant(
        "xb35_8bit_lstm", "8-bit moments beside small ones in fp32", base=Lstm, optimizer=by(AdamW8bit), layouts=PLAIN
    ),
    _hf(
        "xb36_trainer_restarts",
        "transformers' Trainer: cosine with hard restarts",
        "Qwen2",
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 4},
    ),
    variant("xb37_asgd", "averaged SGD: lr and averages of its own", base=Lstm, optimizer=asgd),
    variant(
        "xb38_stochastic_rounding",
        "bf16 weights without copies, rounded by chance",
        base=Rounded,
        layouts=PLAIN,
        true=("D5", "D6"),
    ),
    variant("xb39_late_tensors", "counts of one part lag behind", base=Switched),
    variant("xb40_moments_halved", "the trainer halves moments itself", base=Halved),
]
