# ruff: noqa: E501
"""The fourteenth sealed set: healthy trainers that do unusual things, and changes on purpose."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, variant
from tests.lab.live_healthy import only, optim
from tests.lab.opened14_live import (
    PLAIN,
    Averaged,
    Balanced,
    Interpolating,
    Llama,
    Plateaued,
    Positioned,
    Ranked,
    Scaled,
    Spectral,
    Stalled,
    Weighed,
    Zoomed,
    named,
)
from tests.lab.opened14_nets import (
    Adan,
    AdEMAMix,
    Agent,
    Clip,
    Conv,
    Fine,
    GaLore,
    Gan,
    Gpt,
    Mini,
    Recur,
    Shampoo,
    Sophia,
    Ssm,
    Vq,
    net,
)

__all__ = ["HEALTHY14"]

TORCH = torch.optim


class Sharp(Loop):
    """SAM: the gradient is taken at a worse point nearby."""

    def gradients(self) -> None:
        weights = [w for w in self.module.parameters() if w.grad is not None]
        norm = torch.stack([w.grad.norm() for w in weights]).norm() + 1e-12
        kept = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w in weights:
                w.add_(w.grad, alpha=float(0.05 / norm))
        self.module.zero_grad()
        self.loss(self.tokens()).backward()
        with torch.no_grad():
            for w, old in zip(weights, kept, strict=True):
                w.copy_(old)
        super().gradients()


class Swa(Loop):
    """torch's AveragedModel, every fifth update from the tenth on."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["swa"] = {"n_averaged": 0, "module": copy.deepcopy(self.module.state_dict())}

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        told = self.extra["swa"]
        if self.step >= 10 and self.step % 5 == 0:
            for name, value in self.module.state_dict().items():
                if told["n_averaged"] == 0:
                    told["module"][name].copy_(value)
                else:
                    told["module"][name].add_((value - told["module"][name]) / (told["n_averaged"] + 1))
            told["n_averaged"] += 1


class Swapped(Averaged):
    """Saves the average as the model, for evaluation; the weights that are trained are beside it, and are loaded."""

    layouts = PLAIN

    def content(self) -> dict[str, Any]:
        found = super().content()
        raw, found["model"] = found["model"], found["ema"]
        return found | {"raw": raw}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.extra["ema"] = content["model"]
        self.module.load_state_dict(content["raw"])

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            Loop.update(self)
        for name, value in self.module.state_dict().items():
            self.extra["ema"][name].lerp_(value, 0.03)


class Warmed(Averaged):
    """An average whose decay grows with the updates, as timm's."""

    layouts = PLAIN

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            Loop.update(self)
        decay = min(0.9999, (1 + self.step) / (10 + self.step))
        for name, value in self.module.state_dict().items():
            self.extra["ema"][name].lerp_(value, 1 - decay)


class Noisy(Loop):
    """Noise on gradients that becomes less with the updates."""

    def gradients(self) -> None:
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.grad.add_(torch.randn_like(weight), alpha=0.01 / (1 + self.step) ** 0.55)
        super().gradients()


class Deep(Loop):
    """Stochastic depth: a layer that is left out has no gradient."""

    net = net(Gpt)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        model, x = self.module, self.module.wte(tokens[:, :-1])
        x = x + model.wpe.weight
        for n, block in enumerate(model.h):
            if torch.rand(()) > 0.2 * n:
                x = block(x)
        logits = model.lm_head(model.ln_f(x))[..., : self.config.vocab]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


class Quantised(Loop):
    """Weights pass through eight bits, under scales that are trained; activations' ranges are buffers."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        found = Decoder(self.config)
        for name, weight in list(found.named_parameters()):
            if "down_proj" in name:
                found.put(name.replace("weight", "step_size"), nn.Parameter(weight.detach().abs().mean() / 32))
                found.get_submodule(name.rsplit(".", 1)[0]).register_buffer("max_val", torch.tensor(0.0))
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        from tests.lab.model import loss_and_load

        found = dict(self.module.named_parameters())
        for name in [name for name in found if name.endswith("step_size")]:
            key, step = name.replace("step_size", "weight"), found[name].abs() + 1e-6
            scaled = (found[key] / step).clamp(-128, 127)
            found[key] = (scaled + (scaled.round() - scaled).detach()) * step
            with torch.no_grad():
                named(self)[name.replace("step_size", "max_val")].lerp_(found[key].abs().max(), 0.1)
        return loss_and_load(self.config, found, {}, tokens)[0]


class Thawing(Loop):
    """Layers are thawed from the last to the first, one every twelve updates."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if "layers." in name:
                number = int(name.split("layers.")[1].split(".")[0])
                if self.step < 12 * (self.config.layers - number):
                    weight.grad = None
            elif "embed" in name and self.step < 40:
                weight.grad = None
        super().gradients()


class Ramped(Positioned):
    """The batch grows; the loader counts samples."""

    layouts = PLAIN

    def tokens(self) -> torch.Tensor:
        rows = 2 + 2 * (self.step // 20)
        return batch(self.config.but(batch=rows), self.step, 1234)

    def update(self) -> None:
        Loop.update(self)
        self.extra["sampler"]["consumed_samples"] += 2 + 2 * ((self.step - 1) // 20)


class Taught(Loop):
    """A teacher in the same module, which the student replaces every ten updates."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        found = nn.ModuleDict({"student": Decoder(self.config), "teacher": Decoder(self.config)})
        found["teacher"].requires_grad_(False)
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        student, teacher = self.module["student"], self.module["teacher"]
        near = sum((a - b).pow(2).mean() for a, b in zip(student.parameters(), teacher.parameters(), strict=True))
        return student(tokens)[0] + 0.1 * near

    def update(self) -> None:
        super().update()
        if self.step % 10 == 0:
            self.module["teacher"].load_state_dict(self.module["student"].state_dict())


class Longer(Loop):
    """Rows become longer with the updates."""

    def tokens(self) -> torch.Tensor:
        return super().tokens()[:, : min(17, 6 + self.step // 4)]


class Delayed(Loop):
    """The head has an optimizer of its own that begins at update 45."""

    layouts = PLAIN
    net = net(Gpt)

    def made(self) -> list[torch.optim.Optimizer]:
        head = [w for name, w in self.module.named_parameters() if "lm_head" in name]
        rest = [w for name, w in self.module.named_parameters() if "lm_head" not in name]
        return [torch.optim.AdamW(rest, lr=self.config.lr), torch.optim.AdamW(head, lr=self.config.lr)]

    def apply(self) -> None:
        self.optimizers[0].step()
        if self.step >= 45:
            self.optimizers[1].step()
        for schedule in self.schedules:
            schedule.step()


class Sparse(Loop):
    """A sparse embedding under SparseAdam: rows that do not occur stand still, with their moments."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        found = net(Recur)(self)
        found.encoder.sparse = True
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        rest = [w for name, w in self.module.named_parameters() if "encoder" not in name]
        lr = self.config.lr
        return [torch.optim.AdamW(rest, lr=lr), torch.optim.SparseAdam([self.module.encoder.weight], lr=lr)]

    def gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.optimizers[0].param_groups[0]["params"], 1.0)


class Clamped(Loop):
    """Weights are clipped to a box after every update, as a Wasserstein critic's."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for weight in self.module.parameters():
            if weight.ndim > 1:
                weight.clamp_(-0.25, 0.25)


class Projected(Loop):
    """Rows of matrices are put back to length one after every update."""

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for weight in self.module.parameters():
            if weight.ndim > 1:
                weight.copy_(F.normalize(weight, dim=-1))


class Capped(Loop):
    """The temperature of two towers is kept below a bound that it soon touches."""

    net = net(Clip)

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        self.module.logit_scale.clamp_(0, 2.67)


class Signed(Loop):
    """One bit a number: signs of the gradient, and what they left out is added the next time."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["error_feedback"] = {n: torch.zeros_like(w) for n, w in self.module.named_parameters()}

    def gradients(self) -> None:
        super().gradients()
        for name, weight in self.module.named_parameters():
            whole = weight.grad + self.extra["error_feedback"][name]
            weight.grad = whole.sign() * whole.abs().mean()
            self.extra["error_feedback"][name] = whole - weight.grad


class Outer(Loop):
    """DiLoCo: every eighth update an outer Nesterov step from where the last one ended."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        start = {n: w.detach().clone() for n, w in self.module.named_parameters()}
        self.extra["outer"] = {"weights": start, "momentum": {n: torch.zeros_like(w) for n, w in start.items()}}

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        if self.step % 8 == 0:
            told = self.extra["outer"]
            for name, weight in self.module.named_parameters():
                delta = told["weights"][name] - weight
                told["momentum"][name].mul_(0.9).add_(delta)
                told["weights"][name].sub_(delta + 0.9 * told["momentum"][name], alpha=0.5)
                weight.copy_(told["weights"][name])


class Local(Loop):
    """Local SGD: every seventh update the weights are the mean of this worker's and another one's."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["peer"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        old = {n: w.detach().clone() for n, w in self.module.named_parameters()}
        with torch.enable_grad():
            super().update()
        for name, weight in self.module.named_parameters():
            peer = self.extra["peer"][name]
            peer.add_((weight - old[name]) * (0.5 + torch.rand_like(weight)))
            if self.step % 7 == 0:
                peer.add_(weight).mul_(0.5)
                weight.copy_(peer)


class Scheduled(Loop):
    """Weight decay follows a cosine of its own, as DINO's."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            if group["weight_decay"]:
                group["weight_decay"] = 0.04 + 0.18 * (1 - math.cos(math.pi * min(1, self.step / 150)))
        super().apply()


class Heavier(Loop):
    """beta2 grows with the updates."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            group["betas"] = (0.9, min(0.999, 1 - 1 / (10 + self.step)))
        super().apply()


class Rounded(Loop):
    """bf16 weights, rounded up or down by chance."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    @torch.no_grad()
    def apply(self) -> None:
        weights = list(self.module.parameters())
        kept = [w.float() for w in weights]
        super().apply()
        for weight, old in zip(weights, kept, strict=True):
            new = old + (weight.float() - old)
            bits = new.view(torch.int32) + torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
            weight.copy_((bits & ~0xFFFF).view(torch.float32))


class Rewinding(Loop):
    """Goes back to a copy in memory, weights and optimizer, when a loss is bad; the steps go on."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["snapshot"] = self._now()

    def _now(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.module.state_dict(), "optimizer": self.optimizers[0].state_dict()})

    def update(self) -> None:
        super().update()
        if self.step % 9 == 0:
            self.extra["snapshot"] = self._now()
        elif self.step % 9 == 4:  # a bad loss
            self.module.load_state_dict(self.extra["snapshot"]["model"])
            lrs = [g["lr"] for g in self.optimizers[0].param_groups]
            self.optimizers[0].load_state_dict(copy.deepcopy(self.extra["snapshot"]["optimizer"]))
            for group, lr in zip(self.optimizers[0].param_groups, lrs, strict=True):
                group["lr"] = lr


class Merging(Loop):
    """ReLoRA: adapters are merged into the base every sixteen updates and begin anew; the optimizer goes on."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        if self.step % 16 == 0:
            found = named(self)
            for name in [name for name in found if name.endswith("lora_A.weight")]:
                stem = name.removesuffix("lora_A.weight")
                found[f"{stem}weight"].add_(2.0 * found[f"{stem}lora_B.weight"] @ found[name])
                found[f"{stem}lora_B.weight"].zero_()
                found[name].normal_(std=1 / math.sqrt(self.config.hidden))


class Growing(Loop):
    """Progressive growing: the last block fades in from update 30 on, under a buffer that says how far."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        found = net(Gpt)(self)
        found.register_buffer("fade", torch.tensor(0.0))
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        model, x = self.module, self.module.wte(tokens[:, :-1])
        x = x + model.wpe.weight
        model.fade.fill_(min(1.0, max(0.0, (self.step - 30) / 15)))
        for n, block in enumerate(model.h):
            if n < 2:
                x = block(x)
            elif model.fade > 0:
                x = x.lerp(block(x), float(model.fade))
        logits = model.lm_head(model.ln_f(x))[..., : self.config.vocab]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


class Backward(Loop):
    """An optimizer a parameter, as where each steps within the backward pass."""

    layouts = PLAIN

    def made(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([w], lr=self.config.lr) for w in self.module.parameters()]


class Anchored(Loop):
    """Weights are drawn to where they began, which the file holds."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["anchor"] = copy.deepcopy(self.module.state_dict())

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for name, weight in self.module.named_parameters():
            weight.lerp_(self.extra["anchor"][name], 0.02)


class Amplified(Loop):
    """Grokfast: slow parts of gradients are made larger."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["grads"] = {n: torch.zeros_like(w) for n, w in self.module.named_parameters()}

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            self.extra["grads"][name].mul_(0.95).add_(weight.grad, alpha=0.05)
            weight.grad.add_(self.extra["grads"][name], alpha=2.0)
        super().gradients()


class Centred(Loop):
    """Gradients of matrices without their mean; each row's bounded by the row's length."""

    clip = 0.0

    @torch.no_grad()
    def gradients(self) -> None:
        for weight in self.module.parameters():
            if weight.ndim > 1:
                weight.grad.sub_(weight.grad.mean(-1, keepdim=True))
                bound = 0.02 * weight.norm(dim=-1, keepdim=True).clamp(min=1e-3)
                weight.grad.mul_((bound / weight.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6)).clamp(max=1))


class Kept(Loop):
    """Saves in the middle of an accumulation: gradients of the first half are in the file."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["accumulated"] = {n: torch.zeros_like(w) for n, w in self.module.named_parameters()}

    def update(self) -> None:
        tokens, told = self.tokens(), self.extra["accumulated"]
        self.module.zero_grad()
        self.loss(tokens).backward()
        for name, weight in self.module.named_parameters():
            told[name].add_(weight.grad, alpha=0.5)
        if self.step % 2:
            for name, weight in self.module.named_parameters():
                weight.grad = told[name].clone()
                told[name].zero_()
            self.apply()
        self.step += 1


class Scaling(Loop):
    """muP: matrices have a lr in proportion to the width, embedding and vectors another one; warm-up by group."""

    layouts = PLAIN

    def groups(self) -> Groups:
        sets: dict[float, list[Any]] = {}
        for name, weight in self.module.named_parameters():
            scale = 4.0 if "embed" in name or weight.ndim < 2 else 16 / weight.shape[1]
            sets.setdefault(scale, []).append(weight)
        return [
            {"params": ws, "lr": self.config.lr * scale, "weight_decay": 0.01 / scale} for scale, ws in sets.items()
        ]


class Contrary(Loop):
    """Rare tokens: batches of single rows, so that most rows of the embedding have no gradient at all."""

    def tokens(self) -> torch.Tensor:
        return super().tokens()[:1, :5]


class Alternating(Loop):
    """Odd updates train attention, even ones everything else."""

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if ("self_attn" in name) != bool(self.step % 2):
                weight.grad = None
        super().gradients()


class Checkpointed(Loop):
    """Activations are computed again in the backward pass, with dropout's random state kept."""

    net = net(Gpt)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        model, x = self.module, self.module.wte(tokens[:, :-1])
        for block in model.h:
            x = checkpoint(lambda y, b=block: F.dropout(b(y), 0.1), x, use_reentrant=False)
        logits = model.lm_head(model.ln_f(x))[..., : self.config.vocab]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


def finder(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.06)


def from_low(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-6)


def stepped(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=12),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60),
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.05, total_iters=1000),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [12, 60])


# ---- on purpose ------------------------------------------------------------------------------------------------------


def no_decay(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.0


class Exchanged(Loop):
    """The optimizer becomes SGD with momentum."""

    layouts = PLAIN
    fresh = ("optimizer", "scheduler")

    def loaded(self) -> None:
        self.optimizers = [torch.optim.SGD(self.module.parameters(), lr=self.config.lr * 10, momentum=0.9)]
        self.schedules = []


class Carried(Loop):
    """Lion goes on from AdamW's first moments."""

    layouts = PLAIN

    def loaded(self) -> None:
        old = self.optimizers[0].state
        made = other.Lion(only(self.optimizers[0].param_groups, "weight_decay"), lr=self.config.lr / 5)
        for weight, state in old.items():
            made.state[weight] = {"exp_avg": state["exp_avg"]}
        self.optimizers, self.schedules = [made], []


def larger(self: Any) -> None:
    self.config = self.config.but(batch=16)
    self.extra["args"] = {"per_device_train_batch_size": 16, "learning_rate": self.config.lr * 2}
    for schedule in self.schedules:
        schedule.base_lrs = [lr * 2 for lr in schedule.base_lrs]
    for group in self.optimizers[0].param_groups:
        group["lr"] *= 2
        group["initial_lr"] *= 2


class Argued(Loop):
    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["args"] = {"per_device_train_batch_size": config.batch, "learning_rate": config.lr}


class Shallower(Loop):
    """The last block is dropped; the optimizer begins anew."""

    layouts = PLAIN
    net = net(Gpt)
    fresh = ("optimizer",)

    def loaded(self) -> None:
        self.module.h = self.module.h[:2]
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class Deeper(Shallower):
    """Each block twice, as depth up-scaling does."""

    def loaded(self) -> None:
        self.module.h = nn.ModuleList(copy.deepcopy(block) for block in self.module.h for _ in (0, 1))
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class Headed(Shallower):
    """A new task: the head is made anew, everything else is frozen; the optimizer holds the head alone."""

    def loaded(self) -> None:
        self.module.requires_grad_(False)
        made = torch.Generator().manual_seed(4)
        self.module.lm_head.weight.data = torch.randn(self.module.lm_head.weight.shape, generator=made) * 0.02
        self.module.lm_head.weight.requires_grad_(True)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class Halved(Loop):
    """The run goes on in bf16, moments as well."""

    layouts = PLAIN

    def loaded(self) -> None:
        self.module.to(torch.bfloat16)
        for state in self.optimizers[0].state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16()


class Promoted(Averaged):
    """Goes on from the average, with an optimizer of its own."""

    layouts = PLAIN
    fresh = ("optimizer", "scheduler")

    def loaded(self) -> None:
        self.module.load_state_dict(self.extra["ema"])


def longer_context(self: Any) -> None:
    self.told |= {"rope_theta": 1e6, "max_position_embeddings": 256}
    self.config = self.config.but(rope_theta=1e6, length=24)
    self.module.config = self.config


def cooled(self: Loop) -> None:
    """From here on linearly to nothing, within 40 updates."""
    self.schedules = [torch.optim.lr_scheduler.LinearLR(self.optimizers[0], 1.0, 0.0, total_iters=40)]


class Adapted(Loop):
    """Full training ends; adapters are added and trained alone."""

    layouts = PLAIN
    fresh = ("optimizer", "scheduler")

    def loaded(self) -> None:
        weights = self.module.state_dict()
        self.config = self.config.but(lora=4)
        self.module = Decoder(self.config)
        self.module.load_state_dict(weights, strict=False)
        for name, weight in self.module.named_parameters():
            weight.requires_grad_("lora_" in name)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


HEALTHY14: list[Fault] = [
    variant("vb01_sam", "SAM over SGD", base=Sharp, optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9)),
    variant("vb02_swa", "torch's AveragedModel every fifth update", base=Swa),
    variant("vb03_average_as_model", "the average is stored as the model, the weights beside it", base=Swapped),
    variant("vb04_average_warmed", "an average whose decay grows", base=Warmed),
    variant("vb05_noisy_gradients", "noise on gradients", base=Noisy),
    variant("vb06_stochastic_depth", "blocks that are left out have no gradient", base=Deep),
    variant("vb07_weight_norm", "linear layers as direction and length", base=Weighed),
    variant("vb08_spectral_norm", "spectral norms with power iteration", base=Spectral),
    variant("vb09_quantisation_aware", "learned step sizes and running ranges", base=Quantised),
    variant("vb10_thawing", "layers are thawed one after the other", base=Thawing),
    variant("vb11_finder", "an exponential learning-rate finder", optimizer=from_low, schedule=finder),
    variant("vb12_warm_restarts", "warm restarts", base=Stalled),
    variant("vb13_batch_ramp", "the batch grows", base=Ramped),
    variant("vb14_teacher", "a teacher that the student replaces", base=Taught),
    variant("vb15_gan", "a generator and its critic, in turns", base=Gan),
    variant("vb16_target_copied", "a target network that is copied every twelve updates", base=Agent, copies=12,
            layouts=PLAIN),
    variant("vb17_target_follows", "a target network that follows", base=Agent, layouts=PLAIN),
    variant("vb18_longer_rows", "rows become longer", base=Longer),
    variant("vb19_delayed", "the head's optimizer begins late", base=Delayed),
    variant("vb20_sparse", "a sparse embedding", base=Sparse),
    variant("vb21_depth_decay", "a learning rate by depth", base=Zoomed),
    variant("vb22_foreach", "foreach AdamW, and differentiable is off", optimizer=optim(TORCH.AdamW, foreach=True)),
    variant("vb23_clamped", "weights are clipped to a box", base=Clamped),
    variant("vb24_projected", "rows are put back to length one", base=Projected),
    variant("vb25_capped_temperature", "a temperature at its bound", base=Capped),
    variant("vb26_codebook_revived", "codes that nobody uses are replaced", net=net(Vq, revive=True)),
    variant("vb27_batch_norms", "running statistics", net=net(Conv)),
    variant("vb28_layer_scale", "LayerScale", net=net(Gpt, scale=1e-3)),
    variant("vb29_galore", "moments in a subspace that is found anew", layouts=PLAIN,
            optimizer=lambda self, groups: GaLore(only(groups), lr=self.config.lr)),
    variant("vb30_shampoo", "Kronecker factors", layouts=PLAIN,
            optimizer=lambda self, groups: Shampoo(only(groups), lr=self.config.lr * 0.1)),
    variant("vb31_ademamix", "a slow average of gradients", layouts=PLAIN, optimizer=optim(AdEMAMix)),
    variant("vb32_adan", "Adan", layouts=PLAIN, optimizer=optim(Adan)),
    variant("vb33_sophia", "a curvature every tenth update", layouts=PLAIN, optimizer=optim(Sophia, factor=0.3)),
    variant("vb34_mini", "one second moment a row", layouts=PLAIN, optimizer=optim(Mini)),
    variant("vb35_error_feedback", "signs, and what they left out", base=Signed),
    variant("vb36_outer", "an outer optimizer every eighth update", base=Outer),
    variant("vb37_local", "the mean of two workers every seventh update", base=Local),
    variant("vb38_decay_schedule", "weight decay follows a cosine", base=Scheduled),
    variant("vb39_beta_schedule", "beta2 grows", base=Heavier),
    variant("vb40_rounded_by_chance", "bf16 weights, rounded by chance", base=Rounded, true=("D5", "D6")),
    variant("vb41_rewinding", "goes back to a copy in memory", base=Rewinding, true=("C9", "G6", "G7")),
    variant("vb42_relora", "adapters are merged and begin anew", base=Merging, true=("F5",)),
    variant("vb43_growing", "a block fades in", base=Growing),
    variant("vb44_an_optimizer_each", "an optimizer a parameter", base=Backward),
    variant("vb45_anchored", "weights are drawn to where they began", base=Anchored),
    variant("vb46_grokfast", "slow parts of gradients made larger", base=Amplified),
    variant("vb47_centred", "gradients without mean, bounded by row", base=Centred),
    variant("vb48_accumulated", "saved in the middle of an accumulation", base=Kept),
    variant("vb49_mup", "learning rates by width", base=Scaling),
    variant("vb50_single_rows", "most rows have no gradient", base=Contrary),
    variant("vb51_alternating", "parts are trained in turns", base=Alternating),
    variant("vb52_recomputed", "activations are computed again", base=Checkpointed),
    variant("vb53_sequential", "three schedules one after the other", schedule=stepped),
    variant("vb54_lookahead", "slow weights beside the state", base=Interpolating),
    variant("vb55_balanced", "a bias that balances experts", base=Balanced, needs={"experts": 4}),
    variant("vb56_apex", "bf16 weights, masters in the state", base=Fine),
    variant("vb57_mamba", "a state space by Lion", net=net(Ssm), optimizer=optim(other.Lion, factor=0.2)),
    variant("vb58_plateau", "the lr falls on a plateau", base=Plateaued),
    variant("vb59_loss_scale", "a loss scale that doubles", base=Scaled),
    variant("vb60_ranks", "random states of two ranks", base=Ranked),
    variant("vb61_config_beside", "config.json beside it", base=Llama),
    variant("vc01_no_decay", "weight decay is turned off", kind="deliberate", loaded=no_decay, true=("H1", "C5", "B7"),
            why="true: weight decay changed"),
    variant("vc02_sgd", "AdamW becomes SGD", kind="deliberate", base=Exchanged, true=("B1", "C1", "C2", "H1"),
            why="true: the optimizer is another one"),
    variant("vc03_lion", "AdamW becomes Lion, with its first moments", kind="deliberate", base=Carried,
            true=("B1", "B4", "B2", "C1", "C2", "B8", "H1"), why="true: second moments and counters are gone"),
    variant("vc04_larger_batch", "four times the batch, twice the lr", kind="deliberate", base=Argued, loaded=larger,
            true=("C10", "H1", "B8", "C2"), why="true: batch and lr changed"),
    variant("vc05_shallower", "a block is dropped", kind="deliberate", base=Shallower, true=("A2", "A4", "B1", "C1", "H1"),
            why="true: tensors are gone, the optimizer is new"),
    variant("vc06_deeper", "each block twice", kind="deliberate", base=Deeper, true=("A4", "B1", "C1", "E9", "H1"),
            why="true: layers are copies"),
    variant("vc07_new_head", "a new head on a frozen trunk", kind="deliberate", base=Headed, true=("A2", "B1", "C1", "H1", "F2"),
            why="true: the head is new"),
    variant("vc08_bf16", "the run goes on in bf16", kind="deliberate", base=Halved, true=("D7", "D4", "D5", "D6", "H1"),
            why="true: weights and moments were rounded"),
    variant("vc09_from_the_average", "goes on from the average", kind="deliberate", base=Promoted,
            true=("F4", "B1", "C1", "H1"), why="true: the weights are the average"),
    variant("vc10_longer_context", "a longer context, another rotary base", kind="deliberate", base=Llama,
            loaded=longer_context, true=("H1", "H2"), why="true: rope_theta changed"),
    variant("vc11_cooled", "the schedule ends in a cool-down", kind="deliberate", loaded=cooled,
            true=("C1", "C2", "C4", "H1", "B8"), why="true: another schedule"),
    variant("vc12_adapters_added", "adapters on what was trained whole", kind="deliberate", base=Adapted,
            true=("A4", "B1", "C1", "H1"), why="true: tensors were added, the optimizer is new"),
]  # fmt: skip
