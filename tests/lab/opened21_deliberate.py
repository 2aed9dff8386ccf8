"""Forty changes on purpose of the twenty-first half: a doctor may ask about them, and must not call them an error.

``true`` are the causes that may be named: what they say did happen.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import variant
from tests.lab.opened21_nets import (
    Amp,
    Bart,
    Bench,
    Ctc,
    Dino,
    Dit,
    Flow,
    Half,
    Image,
    Llama,
    Mamba,
    Mixtral,
    Noisy,
    Norms,
    Oss,
    Peft,
    Phi,
    ResNet,
    Retina,
    Sage,
    Td3,
    Text,
    Tower,
    apart,
    averaged,
    beta,
    clip_at,
    cosine,
    extra,
    freeze,
    groups,
    held_by,
    lr_times,
    new_rows,
    no_state,
    probe,
    randn,
    reset_schedule,
    rows_times,
    steady,
    stretched,
    then,
    with_,
)

__all__ = ["DELIBERATE21"]

T = ("torch_save",)
DELIBERATE21: list[Fault] = []


def meant(id: str, text: str, true: str, *acts: Any, **more: Any) -> None:
    """Add a change on purpose; ``true`` are causes with slashes."""
    if acts:
        more["loaded"] = then(*acts)
    DELIBERATE21.append(variant(id, text, kind="deliberate", true=tuple(true.split("/")), why=text, **more))


def remade(self: Any) -> None:
    """Optimizer and schedule are made again for the module as it is."""
    self.optimizers = self.made()
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def switched(make: Any) -> Any:
    """The run goes on with another optimizer."""

    def act(self: Any) -> None:
        self.optimizer = lambda groups: make(self, groups)
        remade(self)

    return act


def noted(**fields: Any) -> Any:
    """New fields of the stored config."""
    return lambda self: self.extra["config"].update(fields)


class Deepened(Text):
    """Its layers are counted by an attribute, so that a grown one can be told."""


def deepened(self: Any) -> None:
    """Each layer is followed by a copy of itself; the optimizer begins anew."""
    t = self.module.transformer
    t["h"] = nn.ModuleList(copy.deepcopy(one) for block in t["h"] for one in (block, block))
    self.extra["config"]["num_layers"] = len(t["h"])
    with torch.enable_grad():
        remade(self)


def more_experts(self: Any) -> None:
    """Each expert gets a copy; router rows are copied with a little noise."""
    for n, layer in enumerate(self.module.model["layers"]):
        m = layer.mlp
        m.experts = nn.ModuleList([*m.experts, *(copy.deepcopy(one) for one in m.experts)])
        old = m.router.weight.detach()
        m.router = nn.Linear(old.shape[1], 2 * len(old), bias=False)
        m.router.weight.copy_(torch.cat([old, old + 0.01 * randn(40 + n, *old.shape)]))
    with torch.enable_grad():
        remade(self)


class Classes(Image):
    """The number of classes is an attribute of the head."""

    def error(self, x: Any) -> Any:
        count = self.module.head.out_features
        want = (x @ randn(2, self.width, count)).argmax(1)
        return nn.functional.cross_entropy(self.module(x.view(-1, 3, 6, 6) + 0.5), want)


def other_classes(self: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(23)
        old, self.module.head = self.module.head, nn.Linear(24, 9)
    one = self.optimizers[0]
    for a, b in zip(old.parameters(), self.module.head.parameters(), strict=True):
        b.requires_grad_(True)
        one.state.pop(a, None)
        for group in one.param_groups:
            group["params"] = [b if w is a else w for w in group["params"]]


def narrowed(self: Any) -> None:
    """Go on in bf16, moments too."""
    self.module.to(torch.bfloat16)
    for w in self.module.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            held_by(self, w)[key] = held_by(self, w)[key].to(torch.bfloat16)


class Wider(Text):
    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)


def widened(self: Any) -> None:
    """Go on in fp32: weights and moments are widened."""
    self.module.float()
    for w in self.module.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            held_by(self, w)[key] = held_by(self, w)[key].float()


class Folded(Peft):
    """After the load adapters are in the base, and the base is trained."""

    layouts = T


def folded(self: Any) -> None:
    for name, m in list(self.module.items()):
        base = nn.Linear(m.base_layer.in_features, m.base_layer.out_features, bias=False)
        base.weight.copy_(m.base_layer.weight + 2.0 * m.lora_B["default"].weight @ m.lora_A["default"].weight)
        self.module[name] = base
        base.weight.requires_grad_(True)
    with torch.enable_grad():
        remade(self)


def second_adapter(self: Any) -> None:
    """An adapter of another name is trained from here on; the first one stays."""
    fresh = []
    for n, m in enumerate(self.module.values()):
        for side in (m.lora_A, m.lora_B):
            side["second"] = copy.deepcopy(side["default"])
            side["default"].requires_grad_(False)
            side["second"].weight.requires_grad_(True)
            fresh.append(side["second"].weight)
        m.lora_A["second"].weight.copy_(0.2 * randn(60 + n, *m.lora_A["second"].weight.shape))
        m.lora_B["second"].weight.zero_()
        m.forward = partial(_both, m)
    one = self.optimizers[0]
    one.add_param_group({"params": fresh, "weight_decay": 0.0, "initial_lr": self.config.lr, "lr": self.config.lr})
    schedule = self.schedules[0]
    schedule.base_lrs.append(self.config.lr)
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])


def _both(m: Any, x: Any) -> Any:
    parts = (m.lora_B[name](m.lora_A[name](x)) for name in m.lora_A)
    return m.base_layer(x) + 2.0 * sum(parts)


def untied_anew(self: Any) -> None:
    self.module.lm_head.weight = nn.Parameter(self.module.lm_head.weight.clone())
    self.extra["config"]["tie_word_embeddings"] = False
    with torch.enable_grad():
        remade(self)


def average_again(self: Any) -> None:
    self.extra["ema_model"] = {n: w.detach().clone() for n, w in self.module.state_dict().items()}
    self.extra["ema_state"]["optimization_step"] = 0


def no_average(self: Any) -> None:
    del self.extra["ema_model"], self.extra["ema_state"]


class MayLoseAverage(Dit):
    def update(self) -> None:
        if "ema_state" in self.extra:
            super().update()
        else:
            Bench.update(self)


def average_then_anew(self: Any) -> None:
    averaged(self)
    with torch.enable_grad():
        remade(self)


def pruned(self: Any) -> None:
    """The smaller half of the inner matrix is cut; its mask is stored."""
    w = self.module[2].weight
    mask = (w.abs() > w.abs().median()).float()
    self.module.register_buffer("pruning_mask", mask)
    w *= mask
    held_by(self, w)["exp_avg"] *= mask
    self.extra["config"]["sparsity"] = 0.5


class Prunable(Bench):
    def gradients(self) -> None:
        super().gradients()
        mask = getattr(self.module, "pruning_mask", None)
        if mask is not None:
            self.module[2].weight.grad *= mask

    def update(self) -> None:
        super().update()
        mask = getattr(self.module, "pruning_mask", None)
        if mask is not None:
            with torch.no_grad():
                self.module[2].weight *= mask


def four_ranks(self: Any) -> None:
    """Two ranks become four."""
    more = [torch.Generator().manual_seed(160 + n).get_state() for n in range(2)]
    self.extra["rng_state"] = [*self.extra["rng_state"], *more]
    self.ranks = 4
    self.extra["config"]["world_size"] = 4


def hf(id: str, text: str, true: str, model: str, **more: Any) -> None:
    live = partial(trained, partial(made, model), **more)
    causes = tuple(true.split("/"))
    one = Fault(
        id, "healthy", text, frozenset(), live=live, formats=("live",), kind="deliberate", also=causes, why=text
    )
    DELIBERATE21.append(one)


def constant(self: Any) -> None:
    """No schedule from here on; the rate stays as it is."""
    self.schedules = []
    self.extra["config"]["lr_scheduler"] = "constant"


SGD = with_(torch.optim.SGD, 5.0, momentum=0.9)

meant("yc01_higher_rate", "three times the rate", "H1", lr_times(3.0), base=Text, optimizer=with_(other.Lion, 0.2))
meant("yc02_larger_batch", "four times the batch, twice the rate", "C10/H1", rows_times(4), lr_times(2.0), base=Tower)
meant("yc03_probe", "a small head is added", "H1/A4", probe, base=Sage, layouts=("torch_save", "lightning"))
meant("yc04_vocabulary", "sixteen tokens are added", "F7/H1", new_rows("wte|lm_head", 16), base=Text, layouts=T)
meant(
    "yc05_new_optimizer", "optimizer and schedule begin anew", "B1/C1/H1", base=Mamba, fresh=("optimizer", "scheduler")
)
meant(
    "yc06_second_stage",
    "the schedule begins anew at a third of the rate",
    "C1/H1",
    reset_schedule,
    lr_times(1 / 3),
    base=Retina,
)
meant("yc07_longer_run", "three times as many updates", "C4/H1", stretched(3.0), base=Llama)
meant("yc08_frozen_body", "the body is frozen", "H1", freeze("body|fpn"), base=Retina, optimizer=SGD)
meant(
    "yc09_to_bf16",
    "weights and moments become bf16",
    "D7/D4/D5/D6/H1",
    narrowed,
    base=Text,
    layouts=T,
    optimizer=with_(torch.optim.AdamW, 1.0, foreach=False),
)
meant("yc10_to_fp32", "bf16 weights and moments are widened", "H1/D7/D5/D6", widened, base=Wider, layouts=T)
meant("yc11_more_decay", "four times the weight decay", "H1", groups(weight_decay=lambda d: 4 * d), base=Ctc)
meant("yc12_other_betas", "a slower second moment", "H1", groups(betas=(0.9, 0.99)), base=Flow, needs=beta(0.9, 0.95))
meant("yc13_tighter_clip", "gradients are clipped at a tenth", "H1", clip_at(0.1), base=Bart)
meant(
    "yc14_to_sgd",
    "Adam is exchanged for SGD",
    "B1/C1/H1",
    switched(lambda self, g: torch.optim.SGD([{"params": x["params"]} for x in g], lr=self.config.lr, momentum=0.9)),
    base=Image,
    layouts=("torch_save", "lightning"),
)
meant(
    "yc15_to_lion",
    "AdamW is exchanged for Lion",
    "B1/C1/H1",
    switched(lambda self, g: other.Lion([{"params": x["params"]} for x in g], lr=self.config.lr / 5)),
    base=Phi,
    layouts=T,
)
meant("yc16_adapters_folded", "adapters are merged, the whole is trained", "B1/C1/H1/F5/A4", folded, base=Folded)
meant(
    "yc17_nine_classes",
    "the classifier is exchanged for one of nine classes",
    "F7/B1/A2/H1/A4",
    other_classes,
    base=Classes,
    layouts=("torch_save", "lightning"),
)
meant(
    "yc18_other_mixture",
    "another data set, from its beginning",
    "C6/C7/H1",
    extra("sampler", next_index=0, epoch=0, seed=901),
    noted(dataset="mixture-v2"),
    base=Text,
)
meant(
    "yc19_skipped_rows",
    "a stretch of bad samples is skipped",
    "C6/C7/H1",
    extra("sampler", next_index=lambda n: n + 480),
    base=Ctc,
)
meant("yc20_average_again", "the average begins again at the weights", "F4/A2/H1", average_again, base=Dit, layouts=T)
meant(
    "yc21_slower_average",
    "the average gets a longer memory",
    "H1",
    extra("ema_state", decay=0.995),
    base=Dit,
    layouts=T,
)
meant(
    "yc22_from_average",
    "the averaged weights are tuned with a new optimizer",
    "F4/B1/C1/H1",
    average_then_anew,
    base=Dit,
    layouts=T,
)
meant(
    "yc23_untied",
    "the head is untied, the optimizer begins anew",
    "F2/B1/C1/A4/H1",
    untied_anew,
    base=Text,
    tied=True,
    layouts=T,
)
meant("yc24_twice_as_deep", "each layer is followed by its copy", "E9/B1/C1/A4/H1", deepened, base=Deepened, layouts=T)
meant("yc25_twice_the_experts", "each expert gets a copy", "E10/B1/C1/A4/F7/H1", more_experts, base=Mixtral, layouts=T)
meant(
    "yc26_new_state_of_embedding",
    "the embedding's state begins anew with new rows",
    "B1/F7/H1",
    new_rows("embed_tokens|lm_head", 12),
    no_state("embed_tokens|lm_head"),
    base=Llama,
    layouts=T,
)
meant("yc27_pruned", "half a matrix is cut, and its mask stored", "G5/A4/H1", pruned, base=Prunable, layouts=T)
meant(
    "yc28_moved_group",
    "positions get a group with half the rate",
    "H1/B7",
    apart("pos_embed|cls_token"),
    base=Image,
    layouts=("torch_save", "lightning"),
)
meant(
    "yc29_smaller_scale",
    "the loss scale is lowered by hand",
    "D8/H1",
    extra("grad_scaler", scale=1024.0, growth_interval=50),
    base=Amp,
)
meant("yc30_less_momentum", "momentum is lowered", "H1", groups(momentum=0.8), base=ResNet, optimizer=SGD)
meant(
    "yc31_constant",
    "the schedule is dropped, the rate stays",
    "C2/H1",
    constant,
    base=Norms,
    schedule=cosine,
    layouts=T,
)
meant(
    "yc32_second_adapter", "a second adapter is trained from here on", "A4/H1/B1", second_adapter, base=Peft, layouts=T
)
meant("yc33_four_ranks", "two ranks become four", "C8/A4/H1", four_ranks, base=Noisy, layouts=T)
meant("yc34_no_average", "the average is given up", "A4/H1", no_average, base=MayLoseAverage, layouts=T)
meant(
    "yc35_frozen_experts",
    "router and embedding are frozen, the rate halved",
    "H1",
    freeze("router|embed_tokens"),
    lr_times(0.5),
    base=Oss,
    needs=beta(0.9, 0.95),
)
meant(
    "yc36_teacher_slower",
    "a field of the config is new; the rate is lower",
    "H1",
    noted(label_smoothing=0.1),
    lr_times(0.2),
    base=Dino,
    optimizer=with_(torch.optim.RMSprop, 0.3, centered=True),
)
meant(
    "yc37_masters_decay",
    "decay and rate of a bf16 run are lowered",
    "H1",
    groups(weight_decay=0.001),
    lr_times(0.5),
    base=Half,
)
meant("yc38_larger_epsilon", "ε is raised against spikes", "H1/D10", groups(eps=1e-6), base=Td3, schedule=steady)
hf(
    "yc39_trainer_rate",
    "transformers' Trainer: a lower rate and more steps",
    "H1/C4/C10",
    "Qwen2",
    other_args={"learning_rate": 5e-4, "max_steps": 200},
)
hf(
    "yc40_trainer_batch",
    "transformers' Trainer: twice the batch",
    "C10/H1/C6/C4",
    "gpt2",
    other_args={"per_device_train_batch_size": 8, "weight_decay": 0.0},
)
