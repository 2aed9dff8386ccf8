"""Healthy ways to train that the trials know, and changes on purpose that the files show."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, variant
from tests.lab.model import LORA_SCALE

__all__ = ["LIVE_HEALTHY", "Experts", "Sheltered", "only", "optim"]


def optim(kind: Any, *, factor: float = 1.0, **more: Any) -> Any:
    """For `Loop.optimizer`: that class at the run's learning rate, times a factor."""
    return lambda self, groups: kind(groups, lr=self.config.lr * factor, **more)


def only(groups: Groups, *names: str) -> Groups:
    """Param groups without what an optimizer does not know."""
    return [{name: value for name, value in group.items() if name in ("params", *names)} for group in groups]


def plain(kind: Any, *, factor: float = 1.0, **more: Any) -> Any:
    """As `optim`, for optimizers without weight decay."""
    return lambda self, groups: kind(only(groups), lr=self.config.lr * factor, **more)


def muon(self: Loop) -> list[torch.optim.Optimizer]:
    """Matrices of the layers by Muon, the rest by AdamW."""
    named = dict(self.module.named_parameters())
    inner = [w for name, w in named.items() if w.ndim == 2 and ".layers." in name]
    rest = [w for name, w in named.items() if w.ndim != 2 or ".layers." not in name]
    c = self.config
    return [torch.optim.Muon(inner, lr=5 * c.lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=c.lr, betas=c.betas)]


class Experts(Loop):
    """A mixture whose experts without tokens get no gradient at all, as where each is called with its tokens alone."""

    def tokens(self) -> torch.Tensor:
        return super().tokens()[: 1 if self.step % 3 else 4, :8]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        loss, self.load_ = self.module(tokens)
        return loss

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if ".experts." in name:
                layer, _, rest = name.partition(".experts.")
                if self.load_[f"{layer}.gate.expert_bias"][int(rest.split(".")[0])] == 0:
                    weight.grad = None
        super().gradients()


class Guarded(Loop):
    """Skips the update whose gradient is not finite; nothing of it is stored but the steps."""

    def gradients(self) -> None:
        super().gradients()
        self.skipped = self.step % 7 == 3

    def apply(self) -> None:
        if not self.skipped:
            super().apply()


class Unfrozen(Loop):
    """The first layer gets gradients from the fifth update on."""

    def gradients(self) -> None:
        if self.step < 5:
            for name, weight in self.module.named_parameters():
                if ".layers.0." in name:
                    weight.grad = None
        super().gradients()


class Frozen(Loop):
    """Embedding and first layer are never trained."""

    def net(self) -> nn.Module:
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_(".layers.0." not in name and "embed" not in name)
        return found


class Tied(Loop):
    """Embedding and head are one parameter under two names."""

    def net(self) -> nn.Module:
        found = Decoder(self.config)
        found.put("lm_head.weight", dict(found.named_parameters())["model.embed_tokens.weight"])
        return found


class Sheltered(Loop):
    """With a scaler whose state is stored, as fp16 training keeps it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 10,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        told = self.extra["scaler"]
        if self.step % 11 == 9:  # an overflow
            told |= {"scale": told["scale"] * 0.5, "_growth_tracker": 0}
            return
        super().apply()
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": told["scale"] * 2, "_growth_tracker": 0}


def one_cycle(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, self.config.lr, total_steps=self.config.total + 60)


def cyclic(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    lr = self.config.lr
    return torch.optim.lr_scheduler.CyclicLR(optimizer, lr / 10, lr, step_size_up=7, cycle_momentum=False)


def halves(self: Loop) -> nn.Module:
    return Decoder(self.config).to(torch.bfloat16)


# ---- on purpose ------------------------------------------------------------------------------------------------------


def lowered(self: Loop) -> None:
    for schedule in self.schedules:
        schedule.base_lrs = [lr / 10 for lr in schedule.base_lrs]
    for group in self.optimizers[0].param_groups:
        group["lr"] /= 10
        group["initial_lr"] /= 10


def other_betas(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["betas"] = (0.9, 0.9)


class Extended(Loop):
    """Eight tokens are added to the vocabulary; the optimizer begins anew."""

    fresh = ("optimizer",)

    def config_after(self) -> Any:
        return self.config

    def take(self, weights: dict[str, Any]) -> None:
        held = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, old in weights.items():
                target = held[name]
                if target.shape != old.shape:
                    added = torch.randn(8, old.shape[1], generator=torch.Generator().manual_seed(3)) * 0.02
                    old = torch.cat([old, added])
                    target.data = old.clone()
                target.copy_(old)
        self.config = self.config.but(padded=self.config.padded + 8)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]

    def loaded(self) -> None:
        assert isinstance(self.module, Decoder)
        self.module.config = self.config


class Valued(Loop):
    """A value head is added after the load, with a group of its own."""

    def loaded(self) -> None:
        assert isinstance(self.module, Decoder)
        self.module.put("value_head.weight", nn.Parameter(torch.randn(1, self.config.hidden) * 0.02))
        self.module.put("value_head.bias", nn.Parameter(torch.zeros(1)))
        head = [weight for name, weight in self.module.named_parameters() if "value_head" in name]
        self.optimizers[0].add_param_group({"params": head, "weight_decay": 0.0, "initial_lr": self.config.lr})
        schedule = self.schedules[0]
        schedule.base_lrs.append(self.config.lr)
        schedule.lr_lambdas.append(schedule.lr_lambdas[0])

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        named = dict(self.module.named_parameters())
        if "value_head.weight" in named:
            inner = named["model.embed_tokens.weight"][tokens[0, 0]]
            found = found + 0.1 * (inner @ named["value_head.weight"][0] + named["value_head.bias"][0] - 1) ** 2
        return found


class Adapted(Loop):
    """Adapters on q and v; the base is frozen. After the load they are merged and the whole model is trained."""

    layouts = ("torch_save", "lightning")
    fresh = ("optimizer", "scheduler", "model")

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        weights = content["model"]
        for name in [name for name in weights if "lora_A" in name]:
            stem = name.removesuffix("lora_A.weight")
            ab = LORA_SCALE * weights.pop(f"{stem}lora_B.weight") @ weights.pop(name)
            weights[f"{stem}weight"] = weights[f"{stem}weight"] + ab
        self.config = self.config.but(lora=0)
        self.module = Decoder(self.config)
        self.module.load_state_dict(weights)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


def other_data(self: Loop) -> torch.Tensor:
    from tests.lab.data import batch

    return batch(self.config, self.step, 1234 if self.step < getattr(self, "switched", 1 << 30) else 99)


def switched(self: Any) -> None:
    self.switched = self.step


def lr_tensor(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=torch.tensor(self.config.lr), betas=self.config.betas, capturable=False)


TORCH = torch.optim

LIVE_HEALTHY: list[Fault] = [
    variant("v01_adamw", "torch AdamW, all in one"),
    variant("v02_adam", "torch Adam, decay in the gradient", optimizer=optim(TORCH.Adam)),
    variant("v03_adamw_fused", "fused AdamW: counters are tensors", optimizer=optim(TORCH.AdamW, fused=True)),
    variant("v03b_adamw_fused_on_cuda", "fused AdamW as CUDA's kernel rounds", optimizer=optim(other.FusedOnCuda)),
    variant("v04_adamw_amsgrad", "AdamW with amsgrad", optimizer=optim(TORCH.AdamW, amsgrad=True)),
    variant("v05_adamw_maximize", "AdamW that maximises the negative loss",
            optimizer=optim(TORCH.AdamW, maximize=True), loss=lambda self, tokens: -Loop.loss(self, tokens)),
    variant("v06_adamax", "Adamax", optimizer=optim(TORCH.Adamax)),
    variant("v07_nadam", "NAdam", optimizer=optim(TORCH.NAdam)),
    variant("v08_radam", "RAdam", optimizer=optim(TORCH.RAdam)),
    variant("v09_adafactor", "torch Adafactor: rows and columns", optimizer=optim(TORCH.Adafactor, factor=3.0)),
    variant("v10_rmsprop", "RMSprop, centered, with momentum",
            optimizer=optim(TORCH.RMSprop, factor=0.3, momentum=0.9, centered=True)),
    variant("v11_adagrad", "Adagrad", optimizer=optim(TORCH.Adagrad, factor=4.0)),
    variant("v12_adadelta", "Adadelta", optimizer=optim(TORCH.Adadelta, factor=100.0)),
    variant("v13_sgd", "SGD without momentum: no state", optimizer=optim(TORCH.SGD, factor=50.0)),
    variant("v14_sgd_momentum", "SGD with momentum",
            optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9, nesterov=True)),
    variant("v15_rprop", "Rprop", optimizer=plain(TORCH.Rprop)),
    variant("v16_asgd", "averaged SGD", optimizer=optim(TORCH.ASGD, factor=30.0), clip=0.5),
    variant("v17_muon", "Muon beside AdamW: two optimizers", made=muon, layouts=("torch_save", "dcp", "lightning")),
    variant("v18_lr_tensor", "the learning rate is a tensor", optimizer=lr_tensor, schedule=lambda self, one: None),
    variant("v19_stable_adamw", "StableAdamW of pytorch_optimizer", optimizer=optim(other.StableAdamW)),
    variant("v20_adopt", "ADOPT", optimizer=optim(other.ADOPT)),
    variant("v21_qhadam", "QHAdam", optimizer=plain(other.QHAdam)),
    variant("v22_yogi", "Yogi", optimizer=plain(other.Yogi)),
    variant("v23_lion", "Lion", optimizer=optim(other.Lion, factor=0.2)),
    variant("v24_lamb", "Lamb", optimizer=optim(other.Lamb)),
    variant("v25_adabelief", "AdaBelief", optimizer=optim(other.AdaBelief)),
    variant("v26_schedule_free", "schedule-free AdamW", optimizer=optim(other.ScheduleFreeAdamW),
            schedule=lambda self, one: None),
    variant("v27_adamw_8bit", "bitsandbytes' AdamW8bit as stored", optimizer=plain(other.AdamW8bit),
            layouts=("torch_save", "folder", "lightning")),
    variant("v28_prodigy", "Prodigy", optimizer=lambda self, groups: other.Prodigy(
        [{"params": [w for group in groups for w in group["params"]]}], lr=1.0), schedule=lambda self, one: None),
    variant("v29_experts", "experts without tokens have no gradient", base=Experts, needs={"experts": 4}),
    variant("v30_skipped", "updates with a gradient that is not finite are skipped", base=Guarded),
    variant("v31_accumulated", "four micro-batches an update", parts=4),
    variant("v32_unfrozen", "a layer is trained from the fifth update on", base=Unfrozen),
    variant("v33_frozen", "embedding and a layer are never trained", base=Frozen),
    variant("v34_one_cycle", "OneCycle, which cycles the betas too", schedule=one_cycle),
    variant("v35_cyclic", "a cyclic learning rate", schedule=cyclic),
    variant("v36_pure_bf16", "bf16 weights and moments", net=halves, true=("D5", "D6")),
    variant("v37_scaler", "a loss scale that grows and backs off, and skipped updates", base=Sheltered),
    variant("v38_tied_safetensors", "tied embeddings, which safetensors stores under one name", base=Tied,
            needs={"tied": True}, layouts=("folder", "folder", "torch_save")),
    variant("v39_unclipped_constant", "no clipping, no schedule", clip=0.0, schedule=lambda self, one: None),
    variant("d01_rewarm", "the schedule is begun anew on purpose", kind="deliberate", fresh=("scheduler",),
            true=("C1", "H1"),
            why="true: the learning rate is at its start again"),
    variant("d02_lower_lr", "the operator divides the lr by ten", kind="deliberate", loaded=lowered,
            true=("H1",),
            why="true: the lr is a tenth of before"),
    variant("d03_betas", "beta2 is lowered on purpose", kind="deliberate", loaded=other_betas,
            true=("H1",), why="true: betas changed"),
    variant("d04_vocabulary_extended", "eight tokens are added, the optimizer begins anew", base=Extended,
            kind="deliberate", layouts=("torch_save", "folder", "lightning"),
            true=("F7", "B1", "H1"), why="true: the vocabulary has more rows, the optimizer is new"),
    variant("d05_value_head", "a value head is added", base=Valued, kind="deliberate",
            layouts=("torch_save", "folder", "lightning"), true=("H1",),
            why="true: two tensors were added"),
    variant("d06_fresh_optimizer", "the optimizer is made anew on purpose", kind="deliberate",
            fresh=("optimizer", "scheduler"), true=("B1", "C1", "H1"), why="true: the optimizer's state is new"),
    variant("d07_lora_merged", "adapters merged, then the whole model trained", base=Adapted, kind="deliberate",
            true=("B1", "C1", "H1"), why="true: adapters are gone, and the base moved by their product"),
    variant("d08_continued", "continued pretraining: other data, schedule anew", kind="deliberate",
            fresh=("scheduler",), tokens=other_data, loaded=switched, true=("C1", "C7", "H1"),
            why="true: the schedule begins anew"),
]  # fmt: skip
