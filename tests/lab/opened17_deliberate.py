"""The seventeenth sealed set: what people change on purpose when they resume."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.live import Loop, variant
from tests.lab.opened16_nets import Lora, Rebuilt, draws, seeded
from tests.lab.opened17_nets import (
    Agent,
    Averaged,
    Book,
    Change,
    Dropped,
    Nano,
    Pictures,
    Shop,
    Tagger,
    Towers,
    Vectors,
    anew,
    chain,
    copied,
    freeze,
    groups,
    named,
    rate,
    rows,
    sampler,
    state,
    states,
)

__all__ = ["DELIBERATE17"]

Tensor = torch.Tensor
DELIBERATE17: list[Fault] = []
PICKLED = ("torch_save", "torch_save", "lightning")
FILES = ("torch_save", "torch_save", "folder", "lightning")


def meant(id: str, text: str, base: type[Loop], *changes: Change, true: tuple[str, ...] = ("H1",), **more: Any) -> None:
    if changes:
        more["loaded"] = chain(*changes)
    DELIBERATE17.append(variant(id, text, base=base, kind="deliberate", true=true, **more))


# ---- rates, settings, data -------------------------------------------------------------------------------------------

meant(
    "sc01_locked_tower",
    "the image tower is locked, the text tower goes on at half the rate",
    Towers,
    freeze(r"^image\."),
    rate(0.5),
)
meant(
    "sc02_temperature_set",
    "the temperature is set to 1/0.05 and is not trained any more",
    Towers,
    lambda self: self.module.logit_scale.fill_(math.log(20)),
    freeze("logit_scale"),
    true=("H1", "A2"),
)
meant(
    "sc03_smaller_steps",
    "a tenth of the rate, four times the rows, a longer memory",
    Nano,
    rate(0.1),
    rows(4),
    groups(betas=(0.9, 0.99)),
    true=("H1", "C10"),
)
meant(
    "sc04_no_schedule",
    "the schedule is taken off and the rate held where it is",
    Nano,
    lambda self: self.schedules.clear(),
    true=("H1", "C2", "B8", "C3"),
)
meant(
    "sc05_cosine_to_step",
    "StepLR in place of the warm-up and cosine",
    Nano,
    lambda self: setattr(self, "schedules", [torch.optim.lr_scheduler.StepLR(self.optimizers[0], 10, 0.8)]),
    true=("H1", "C1", "C2", "C4"),
)
meant(
    "sc06_other_mixture",
    "another mixture from its beginning, the epoch counted on",
    Nano,
    lambda self: self.extra["sampler"].update(index=0, seed=77, epoch=1),
    true=("H1", "C6", "C7"),
)
meant(
    "sc07_skip_ahead",
    "three hundred batches are skipped after a spike",
    Nano,
    sampler(index=lambda told: told["index"] + 300),
    true=("H1", "C6", "C7", "C9"),
)
meant(
    "sc08_step_zero",
    "a new stage counts from 0, weights and moments are kept",
    Towers,
    lambda self: setattr(self, "step", 0),
    lambda self: self.extra.update(consumed_samples=0),
    sampler(index=0),
    anew,
    true=("H1", "C1", "C6", "C7", "C9"),
)
meant(
    "sc09_decay_by_group",
    "matrices decay by .3 and vectors by .02 from here on",
    Towers,
    lambda self: self.optimizers[0].param_groups[0].update(weight_decay=0.3),
    lambda self: self.optimizers[0].param_groups[1].update(weight_decay=0.02),
    true=("H1", "B7"),
)
meant(
    "sc10_eps_and_clip",
    "epsilon of 1e-6, no clipping, half of the rows",
    Pictures,
    groups(eps=1e-6),
    lambda self: self.extra["args"].update(clip=0.0, batch_size=2),
    true=("H1", "C10"),
)
meant(
    "sc11_noise_seed",
    "noise is drawn by another seed on purpose, as for a second run of a sweep",
    Dropped,
    lambda self: self.extra.update(generator=torch.Generator().manual_seed(99).get_state()),
    rate(0.5),
    true=("H1", "C8"),
)
meant(
    "sc12_maximum_kept",
    "AMSGrad is switched on, its maxima begin at zero",
    Nano,
    groups(amsgrad=True),
    lambda self: [state(self, w).update(max_exp_avg_sq=torch.zeros_like(w)) for w in named(self).values()],
)
meant(
    "sc13_momentum_up",
    "SGD's momentum is .95 and Nesterov's from here on",
    Pictures,
    groups(momentum=0.95, nesterov=True),
    optimizer=lambda self, gs: torch.optim.SGD(gs, lr=20 * self.config.lr, momentum=0.8),
)

# ---- the optimizer ---------------------------------------------------------------------------------------------------


def exchanged(make: Any, keep: tuple[str, ...] = ()) -> Change:
    """Another optimizer from here on; ``keep``: what of the state goes on."""

    def change(self: Any) -> None:
        old = self.optimizers[0].state
        self.optimizers = [make(self, self.groups())]
        for w in (w for group in self.optimizers[0].param_groups for w in group["params"]):
            if keep and w in old:
                self.optimizers[0].state[w] = {key: copied(old[w][key]) for key in keep}
        self.schedules = [self.schedule(one) for one in self.optimizers]

    return change


NEW = ("H1", "B1", "B2", "B3", "B4", "C1")
meant(
    "sc14_to_adamax",
    "AdamW becomes Adamax",
    Nano,
    exchanged(lambda self, gs: torch.optim.Adamax(gs, lr=self.config.lr)),
    true=NEW,
)
meant(
    "sc15_to_rmsprop",
    "AdamW becomes RMSprop, the schedule begins anew",
    Agent,
    exchanged(lambda self, gs: torch.optim.RMSprop(gs, lr=self.config.lr / 4)),
    true=NEW,
)
meant(
    "sc16_to_lamb",
    "AdamW becomes LAMB, moments and counters go on",
    Nano,
    exchanged(lambda self, gs: other.Lamb(gs, lr=self.config.lr), ("step", "exp_avg", "exp_avg_sq")),
    true=NEW,
)
meant(
    "sc17_tables_to_adam",
    "the tables' Adagrad becomes SparseAdam's dense brother, Adam",
    Shop,
    lambda self: self.optimizers.__setitem__(
        0, torch.optim.Adam([w for n, w in named(self).items() if not n.startswith("deep")], lr=self.config.lr)
    ),
    lambda self: setattr(self, "schedules", [self.schedule(one) for one in self.optimizers]),
    layouts=PICKLED,
    true=NEW,
)
meant(
    "sc18_quarter_moments",
    "first moments are halved after a spike and the rate is lowered",
    Nano,
    states("", "exp_avg", lambda one: one / 2),
    rate(0.5),
    true=("H1", "B3"),
)
meant(
    "sc19_groups_split",
    "two groups become four by depth, the state goes on",
    Nano,
    lambda self: regrouped(self),
    layouts=PICKLED,
    true=("H1", "B7", "B8"),
)


def regrouped(self: Any) -> None:
    old, held = self.optimizers[0], named(self)
    was = old.param_groups[0]
    parts = [[w for n, w in held.items() if n.startswith(f"h.{i}.")] for i in range(3)]
    parts.append([w for n, w in held.items() if not n.startswith("h.")])
    new = [
        {"params": ws, "lr": was["lr"] * 0.8 ** (3 - i), "initial_lr": was["initial_lr"] * 0.8 ** (3 - i)}
        for i, ws in enumerate(parts)
    ]
    one = torch.optim.AdamW(new, lr=was["lr"], betas=was["betas"], eps=was["eps"], weight_decay=0.03)
    one.state = old.state
    last = self.schedules[0].last_epoch
    self.optimizers = [one]
    c = self.config
    self.schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda done: c.lr_at(done + 1) / c.lr, last_epoch=last - 1)
    ]


# ---- averages and agents ---------------------------------------------------------------------------------------------

meant(
    "sc20_average_shorter",
    "the average forgets faster and begins at the weights again",
    Averaged,
    lambda self: setattr(self, "decay", 0.8),
    lambda self: self.extra.update(ema={n: w.clone() for n, w in named(self).items()}, ema_updates=0),
    true=("H1", "F4", "A5", "A2", "B2", "C9"),
)
meant(
    "sc21_average_only",
    "the average becomes the weights for the last phase, with a new optimizer",
    Averaged,
    lambda self: [w.copy_(self.extra["ema"][n]) for n, w in named(self).items()],
    exchanged(lambda self, gs: torch.optim.AdamW(gs, lr=self.config.lr / 5)),
    true=("F4", *NEW),
)
meant(
    "sc22_target_synced",
    "the target critic is set to the critic and follows more slowly",
    Agent,
    lambda self: self.module.target_critic.load_state_dict(self.module.critic.state_dict()),
    lambda self: setattr(self, "tau", 0.01),
    rate(0.5),
    true=("H1", "A2", "A5"),
)
meant(
    "sc23_other_reward",
    "another task: statistics and critic begin anew, the actor goes on at a new optimizer",
    Agent,
    lambda self: self.module.critic.load_state_dict(type(self.module)().critic.state_dict()),
    lambda self: (self.module.obs_mean.zero_(), self.module.obs_var.fill_(1), self.module.obs_count.fill_(1e-4)),
    exchanged(lambda self, gs: torch.optim.AdamW(gs, lr=self.config.lr / 2)),
    true=("A2", "A5", *NEW),
)
meant(
    "sc24_norms_stop",
    "batch norms are frozen for fine-tuning: momentum 0, their gains too; a lower rate",
    Pictures,
    lambda self: [setattr(one, "momentum", 0.0) for one in self.module.modules() if hasattr(one, "momentum")],
    freeze(r"\.1\.(weight|bias)"),
    rate(0.3),
)

# ---- the network becomes another -------------------------------------------------------------------------------------


class Grown(Nano):
    """Loads into a net whose `grow` changed the weights; state that still fits goes on."""

    layouts = FILES
    tied = False

    def grow(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        return held

    def put(self, held: dict[str, Tensor]) -> None:
        for n, w in held.items():
            *path, leaf = n.split(".")
            owner = self.module.get_submodule(".".join(path))
            if getattr(owner, leaf).shape != w.shape:
                owner._parameters[leaf] = nn.Parameter(w.clone())
        self.module.load_state_dict(held)

    def load(self, content: dict[str, Any]) -> None:
        names = {id(w): n for n, w in self.module.named_parameters()}
        order = [names[id(w)] for group in self.optimizers[0].param_groups for w in group["params"]]
        self.step = content["step"]
        self.put(self.grow({n: w.clone() for n, w in content["model"].items()}))
        self.optimizers = self.made()
        optimizer, held = self.optimizers[0], named(self)
        for i, n in enumerate(order):
            one = content["optimizer"]["state"].get(i)
            if one and n in held and one["exp_avg"].shape == held[n].shape:
                optimizer.state[held[n]] = copied(one)
        self.schedules = [self.schedule(optimizer)]
        self.schedules[0].load_state_dict(content["scheduler"])
        for group, lr in zip(optimizer.param_groups, self.schedules[0].get_last_lr(), strict=True):
            group["lr"] = lr
        self.extra |= {name: content[name] for name in self.extra if name in content}


def longer(self: Any, held: dict[str, Tensor]) -> dict[str, Tensor]:
    table = held["wpe.weight"]
    held["wpe.weight"] = F.interpolate(table.T[None], size=64, mode="linear", align_corners=True)[0].T.contiguous()
    return held


def more_tokens(self: Any, held: dict[str, Tensor]) -> dict[str, Tensor]:
    for n in ("wte.weight", "lm_head.weight"):
        held[n] = torch.cat([held[n], held[n].mean(0, keepdim=True) + 0.01 * draws(4, 20, 32)])
    return held


def fewer_tokens(self: Any, held: dict[str, Tensor]) -> dict[str, Tensor]:
    for n in ("wte.weight", "lm_head.weight"):
        held[n] = held[n][: self.config.vocab].clone()
    return held


meant(
    "sc25_positions_stretched",
    "positions are stretched to twice as many, all other state goes on",
    Grown,
    grow=longer,
    true=("H1", "B1", "B3", "A2", "F7"),
)
meant(
    "sc26_twenty_tokens",
    "twenty tokens more at the mean of the others, all other state goes on",
    Grown,
    grow=more_tokens,
    true=("H1", "B1", "B3", "A2", "F7"),
)
meant(
    "sc27_padding_cut",
    "rows of padding are cut off, the other state goes on, the rate is halved",
    Grown,
    rate(0.5),
    grow=fewer_tokens,
    true=("H1", "B1", "B3", "A2", "F7"),
)


def new_head(self: Any) -> None:
    w = self.module.fc.weight
    w.copy_(draws(8, *w.shape) * 0.05)
    self.module.fc.bias.zero_()
    for one in (w, self.module.fc.bias):
        for value in state(self, one).values():
            value.zero_()


meant(
    "sc28_head_drawn_again",
    "the head is drawn again with its moments for other classes, more is frozen",
    Pictures,
    new_head,
    freeze(r"^stem"),
    rate(0.5),
    true=("H1", "A2", "B1", "B2", "B3"),
)


def pruned(self: Any) -> None:
    for w in named(self, r"weight$").values():
        if w.ndim > 1:
            least = w.abs().flatten().kthvalue(w.numel() // 3).values
            w.mul_(w.abs() > least)


meant(
    "sc29_pruned",
    "the smallest third of the weights becomes zero, the optimizer begins anew at a lower rate",
    Tagger,
    pruned,
    exchanged(lambda self, gs: torch.optim.AdamW(gs, lr=self.config.lr / 3)),
    true=("A2", *NEW),
)


class Narrow(Tagger):
    """Goes on in bf16, its moments as well."""

    layouts = PICKLED

    def loss(self, x: Tensor) -> Tensor:
        return Tagger.loss(self, x.to(next(self.module.parameters()).dtype)).float()


def in_bf16(self: Any) -> None:
    for w in self.module.parameters():
        s = state(self, w)
        w.data = w.data.bfloat16()
        for key in ("exp_avg", "exp_avg_sq"):
            s[key] = s[key].bfloat16()


meant("sc30_to_bf16", "weights and moments go on in bf16", Narrow, in_bf16, true=("D4", "D5", "D6", "D7", "H1"))


class Adapted(Book):
    layouts = PICKLED


def low_rank(self: Any) -> None:
    """Adapters are put on, the base is frozen, the optimizer is new."""
    self.config = self.config.but(lora=4)
    self.module.config = self.config
    with torch.enable_grad():
        for n in [n for n in named(self) if n.endswith(("q_proj.weight", "v_proj.weight"))]:
            w, stem = named(self)[n], n.removesuffix("weight")
            self.module.put(f"{stem}lora_A.weight", nn.Parameter(draws(len(n), 4, w.shape[1]) / 6))
            self.module.put(f"{stem}lora_B.weight", nn.Parameter(torch.zeros(len(w), 4)))
    for n, w in named(self).items():
        w.requires_grad_("lora_" in n)


meant(
    "sc31_adapters_on",
    "adapters are put on, the base is frozen, optimizer and schedule are new",
    Adapted,
    low_rank,
    exchanged(lambda self, gs: torch.optim.AdamW(gs, lr=2 * self.config.lr, weight_decay=0.0)),
    true=("A4", "F5", *NEW),
)


class Second(Lora, Book):
    layouts = PICKLED


def stronger(self: Any) -> None:
    for w in named(self, "lora_B").values():
        w.mul_(0.5)


meant(
    "sc32_adapters_damped",
    "adapters of a first task are halved for a second, the optimizer is new",
    Second,
    stronger,
    exchanged(lambda self, gs: torch.optim.AdamW(gs, lr=self.config.lr)),
    true=("F5", "A2", *NEW),
)


class Three(Rebuilt):
    def change(self, weights: Any, config: Any) -> Any:
        found = {n: w for n, w in weights.items() if ".layers.1." not in n}
        found = {n.replace(".layers.2.", ".layers.1."): w for n, w in found.items()}
        return found, config.but(layers=2)

    def source(self, name: str) -> str:
        return name.replace(".layers.1.", ".layers.2.")


meant(
    "sc33_middle_layer_out",
    "the middle layer of three is taken out, the state moves with its layer",
    Three,
    needs={"layers": 3},
    true=("H1", "E9", "A2", "B5"),
)


class Fewer(Rebuilt):
    """Two of four experts are kept with their rows of the router."""

    keep = False

    def change(self, weights: Any, config: Any) -> Any:
        found = {}
        for n, w in weights.items():
            if ".experts.0." in n or ".experts.2." in n:
                continue
            n = n.replace(".experts.1.", ".experts.0.").replace(".experts.3.", ".experts.1.")
            found[n] = w[[1, 3]].clone() if ".mlp.gate." in n else w
        return found, config.but(experts=2)


meant(
    "sc34_two_experts",
    "two of four experts are kept, the optimizer begins anew",
    Fewer,
    needs={"experts": 4},
    true=("E10", "A2", "A5", *NEW),
)


class Observers(Vectors):
    """Quantisation-aware from here on: ranges are buffers."""


def observed(self: Any) -> None:
    for i in (0, 2):
        self.module[i].register_buffer("weight_range", self.module[i].weight.abs().max().clone())


meant(
    "sc35_ranges_added",
    "ranges of weights are stored from here on, a tenth of the rate",
    Observers,
    observed,
    rate(0.1),
    layouts=PICKLED,
    true=("H1", "A4"),
)
meant(
    "sc36_merged_mean",
    "the mean of this run's weights and a brother's, moments cleared, warm-up anew",
    Towers,
    lambda self: [w.add_(0.01 * torch.randn(w.shape, generator=seeded(i))) for i, w in enumerate(named(self).values())],
    exchanged(lambda self, gs: torch.optim.AdamW(gs, lr=self.config.lr)),
    true=("A2", "A1", "F6", *NEW),
)
