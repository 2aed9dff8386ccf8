"""Faults of the fifteenth set: what a load brings back wrong, in small trainings of many kinds.

``WORDS`` lists phrases for each fault; a diagnosis that contains one of them helps a person.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.fault import Fault
from tests.lab.live import Groups, Loop, fault
from tests.lab.live_healthy import Sheltered, Tied, optim, plain
from tests.lab.opened15_nets import (
    FILES,
    Adafactor,
    AdamW8bit,
    Adapters,
    Attends,
    Averaged,
    Conv,
    Lion,
    Lookahead,
    Mixed,
    Recurrent,
    Remembers,
    Rows,
    Told,
    Twin,
    noise,
    states,
)

WORDS: dict[str, tuple[str, ...]] = {}
FAULTS15: list[Fault] = []
ALL, LOAD = "echo next early", "echo"


def ua(id: str, cause: str, text: str, where: str, words: str, **more: Any) -> None:
    WORDS[id] = tuple(words.split("|"))
    FAULTS15.append(fault(id, cause, text, where, **more))


def edited(change: Any, *names: str) -> Any:
    """For ``loaded``: change tensors of the state of every parameter of the first optimizer."""

    def loaded(self: Loop) -> None:
        with torch.no_grad():
            for _, _, state in states(self):
                for name in names:
                    if name in state:
                        state[name] = change(state[name])

    return loaded


def swapped(self: Loop, one: str, two: str, weights: bool, moments: bool) -> None:
    """Exchange what two parts of a module hold, by parts of names."""
    held = dict(self.module.named_parameters())
    told = {name: state for name, _, state in states(self)}
    with torch.no_grad():
        for name in held:
            if one in name:
                mate = name.replace(one, two)
                if weights:
                    kept = held[name].clone()
                    held[name].copy_(held[mate])
                    held[mate].copy_(kept)
                if moments:
                    kept = dict(told[name])
                    told[name].update(told[mate])
                    told[mate].update(kept)


def rows_moved(order: Any, part: str, *, weights: bool = True, moments: bool = True) -> Any:
    """For ``loaded``: put tensors whose name has that part through ``order``."""

    def loaded(self: Loop) -> None:
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if part in name and weights:
                    weight.copy_(order(weight.clone()))
            for name, _, state in states(self):
                if part in name and moments:
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = order(state[key].clone())

    return loaded


# ---- A: what was not loaded ------------------------------------------------------------------------------------------


class Wrapped(Loop):
    """Saved as DDP names it; loaded leniently into a bare model."""

    layouts = ("torch_save",)
    wrapped = True

    def content(self) -> dict[str, Any]:
        found = super().content()
        if self.wrapped:
            found["model"] = {f"module.{name}": tensor for name, tensor in found["model"].items()}
        return found

    def take(self, weights: dict[str, Any]) -> None:
        self.wrapped = False
        self.module.load_state_dict(weights, strict=False)


def lenient(*parts: str) -> Any:
    """For ``take``: what has one of these parts in its name is not loaded."""

    def take(self: Loop, weights: dict[str, Any]) -> None:
        kept = {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}
        self.module.load_state_dict(kept, strict=False)

    return take


def doubled(self: Loop) -> dict[str, Any]:
    found = dict(self.module.state_dict())
    if getattr(self, "copies", False):
        found |= {f"teacher.{name}": tensor.clone() for name, tensor in found.items()}
    return found


ua(
    "ua01_ddp_prefix",
    "A1",
    "saved as DDP names it, loaded leniently: no weight was loaded",
    ALL,
    "none of them were loaded|weights were renamed|renamed|prefix",
    base=Wrapped,
    also=("A2",),
)
ua(
    "ua02_head_kept_fresh",
    "A2",
    "the classifier's head was left out of a lenient load",
    ALL,
    "was not loaded|not loaded|initial value|not restored",
    base=Rows,
    take=lenient("5."),
)
ua(
    "ua03_norms_named_gamma",
    "A3",
    "norms have other names in the file and stay at 1",
    ALL,
    "norm weights were not loaded|not loaded|initial value",
    take=lenient("norm"),
    also=("A2",),
)
ua(
    "ua04_batchnorm_statistics",
    "A5",
    "running statistics of batch norm begin anew",
    ALL,
    "buffers were not|running statistics|running_mean|not restored",
    base=Conv,
    take=lenient("running", "num_batches"),
)


def teacher_copied(self: Any) -> None:
    self.copies = True


ua(
    "ua05_second_copy_saved",
    "A4",
    "a teacher's copy is saved inside the model from now on",
    ALL,
    "did not hold before|tensors that|was added|were added|appeared",
    base=Rows,
    weights=doubled,
    loaded=teacher_copied,
)


class Observed(Rows):
    """Fake quantisation by the largest magnitude seen."""

    def net(self) -> nn.Module:
        found = super().net()
        found.register_buffer("observer_max", torch.zeros(1))
        found.register_buffer("observer_count", torch.zeros((), dtype=torch.long))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        m.observer_max.copy_(torch.maximum(m.observer_max, x.abs().max()))
        m.observer_count += 1
        scale = m.observer_max / 127
        x = x + ((x / scale).round() * scale - x).detach()
        return F.cross_entropy(m(x), self.labels(x))


ua(
    "ua06_observers_fresh",
    "A5",
    "observers of fake quantisation begin anew",
    ALL,
    "buffers were not|observer|not restored|restarted",
    base=Observed,
    take=lenient("observer"),
)


class Targets(Rows):
    """A value network with a slowly following target, which is stored beside it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["target_network"] = {n: t.clone() for n, t in self.module.state_dict().items()}

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        goal = torch.func.functional_call(self.module, self.extra["target_network"], (x.flip(0),)).amax(1)
        return F.smooth_l1_loss(self.module(x)[:, 0], x[:, 0] + 0.9 * goal.detach())

    def apply(self) -> None:
        super().apply()
        for name, tensor in self.module.state_dict().items():
            self.extra["target_network"][name].lerp_(tensor, 0.02)


ua(
    "ua07_target_fresh",
    "A2",
    "the target network was not loaded and stays random",
    ALL,
    "target_network|target network|not loaded|not restored|initial value",
    base=Targets,
    also=("A5",),
    fresh=("target_network",),
)


class Queue(Rows):
    """Contrast with a queue of 512 keys, a buffer with its pointer."""

    def net(self) -> nn.Module:
        found = super().net()
        found.register_buffer("queue", F.normalize(torch.randn(512, 6), dim=1))
        found.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        q, k = (F.normalize(m(x + 0.1 * noise(self.step + 9, *x.shape)), dim=1), F.normalize(m(x), dim=1).detach())
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone().T], 1) / 0.2
        at = int(m.queue_ptr)
        m.queue[at : at + len(k)] = k
        m.queue_ptr[0] = (at + len(k)) % 512
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


ua(
    "ua08_queue_fresh",
    "A5",
    "the queue of negatives and its pointer begin anew",
    "echo next",
    "queue|buffers were not|not restored",
    base=Queue,
    take=lenient("queue"),
)


def average_restarted(self: Any) -> None:
    self.extra["ema"] = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


ua(
    "ua09_average_restarted",
    "A2",
    "the average was not restored and begins at the weights",
    "echo next",
    "average|ema",
    base=Averaged,
    decay=0.995,
    loaded=average_restarted,
    also=("A5", "F4"),
)
ua(
    "ua10_lora_not_loaded",
    "F5",
    "the adapters were not loaded",
    ALL,
    "adapter|lora",
    base=Adapters,
    take=lenient("lora_"),
    also=("A2",),
)

# ---- B: the optimizer ------------------------------------------------------------------------------------------------

ua(
    "ua11_momentum_lost",
    "B1",
    "SGD's momentum was not restored",
    LOAD,
    "optimizer state was not restored|momentum|not restored",
    base=Conv,
    fresh=("optimizer",),
    clip=0.0,
    optimizer=optim(torch.optim.SGD, factor=10.0, momentum=0.9),
    also=("B3",),
)
ua(
    "ua12_steps_reset",
    "B2",
    "the counters were reset, the moments kept",
    ALL,
    "step counters|counters were reset|counter",
    base=Recurrent,
    loaded=edited(lambda t: torch.zeros_like(t), "step"),
)
ua(
    "ua13_moments_zero",
    "B3",
    "both moments zero, counters kept",
    ALL,
    "moments were lost|moments",
    base=Twin,
    loaded=edited(torch.zeros_like, "exp_avg", "exp_avg_sq"),
    also=("B1",),
)
ua(
    "ua14_second_moment_zero",
    "B4",
    "second moments were zeroed",
    ALL,
    "exp_avg_sq was lost|second moment|exp_avg_sq",
    base=Attends,
    loaded=edited(torch.zeros_like, "exp_avg_sq"),
)
ua(
    "ua15_blocks_states_exchanged",
    "B5",
    "the states of two equal blocks are exchanged",
    ALL,
    "wrong parameter|assigned to|exchanged|another parameter|other parameter",
    base=Twin,
    loaded=lambda self: swapped(self, "one.", "two.", False, True),
    also=("E13",),
)


def older_first(self: Any) -> None:
    old = type(self).past[0]["optimizer"]["state"]
    for (_, _, state), number in zip(states(self), sorted(old), strict=True):
        state["exp_avg"] = old[number]["exp_avg"].clone()


ua(
    "ua16_first_moment_older",
    "B6",
    "first moments come from a save eight updates older",
    "echo next",
    "different steps|different saves|another save|older|come from",
    base=type("R16", (Remembers, Twin), {}),
    loaded=older_first,
    also=("G6",),
)


def decays_exchanged(self: Loop) -> None:
    one, two = self.optimizers[0].param_groups
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


ua(
    "ua17_decays_exchanged",
    "B7",
    "weight decay goes to the vectors, the matrices get none",
    ALL,
    "weight decay",
    loaded=decays_exchanged,
    also=("H1",),
)


def unlinked(self: Loop) -> None:
    """The schedule goes on with the groups of an optimizer that is no longer used."""
    schedule = self.schedules[0]
    schedule.optimizer = copy.copy(self.optimizers[0])
    schedule.optimizer.param_groups = [dict(group) for group in self.optimizers[0].param_groups]


ua(
    "ua18_schedule_unlinked",
    "B8",
    "the schedule sets the lr of groups that nobody uses",
    "next early",
    "not the one that its schedule|learning rate",
    base=Rows,
    loaded=unlinked,
    needs={"total": 90, "warmup": 5},
)


def rates_reversed(self: Loop) -> None:
    groups = self.optimizers[0].param_groups
    told = [(group["lr"], group["initial_lr"]) for group in groups]
    for group, (lr, initial) in zip(groups, told[::-1], strict=True):
        group["lr"], group["initial_lr"] = lr, initial
    self.schedules[0].base_lrs = self.schedules[0].base_lrs[::-1]


class Layerwise(Twin):
    """Lower learning rates further down."""

    def groups(self) -> Groups:
        names = ("inp", "one", "two", "head")
        return [{"params": list(self.module[name].parameters()), "lr": self.config.lr * 0.6 ** (3 - i)}
                for i, name in enumerate(names)]  # fmt: skip


ua(
    "ua19_layer_rates_reversed",
    "B8",
    "layer-wise learning rates in the reverse order",
    ALL,
    "learning rate|param group",
    base=Layerwise,
    loaded=rates_reversed,
    also=("B7", "H1"),
)


def louder(self: Loop, tokens: torch.Tensor) -> torch.Tensor:
    return Rows.loss(self, tokens) * (16.0 if getattr(self, "summed", False) else 1.0)


def summing(self: Any) -> None:
    self.summed = True


ua(
    "ua20_loss_summed",
    "B10",
    "the resumed run sums the loss where it was averaged: gradients are 16 times larger",
    "early",
    "lag behind|gradients of another scale|gradients are|gradients grew|larger gradients",
    base=Rows,
    clip=0.0,
    loss=louder,
    loaded=summing,
    also=("C10",),
)


def older_scales(self: Any) -> None:
    old = type(self).past[0]["optimizer"]["state"]
    for (_, _, state), number in zip(states(self), sorted(old), strict=True):
        if "absmax1" in state:
            state["absmax2"] = old[number]["absmax2"].clone() * 0.5


ua(
    "ua21_scales_of_8bit",
    "B11",
    "the scales of 8-bit second moments come from an older save",
    LOAD,
    "compressed state|8-bit|scale|absmax",
    base=type("R21", (Remembers,), {"layouts": FILES}),
    optimizer=plain(AdamW8bit),
    loaded=older_scales,
    also=("B6", "G6"),
    needs={"heads": 4, "groups": 2, "hidden": 48},
)
ua(
    "ua22_8bit_lost",
    "B1",
    "bitsandbytes' state was not restored",
    ALL,
    "optimizer state was not restored|not restored",
    base=type("R22", (Loop,), {"layouts": FILES}),
    optimizer=plain(AdamW8bit),
    fresh=("optimizer",),
)
ua(
    "ua23_amsgrad_maximum_lost",
    "B11",
    "AMSGrad's maximum was lost",
    ALL,
    "amsgrad|max_exp_avg_sq|largest second moment|maximum",
    optimizer=optim(torch.optim.AdamW, amsgrad=True),
    loaded=edited(torch.zeros_like, "max_exp_avg_sq"),
    also=("B3", "B1", "B4"),
)
ua(
    "ua24_lion_lost",
    "B1",
    "Lion's average was lost",
    "echo next",
    "optimizer state was not restored|moment|not restored|average",
    base=Rows,
    optimizer=optim(Lion, factor=0.2),
    fresh=("optimizer",),
    also=("B3",),
)
ua(
    "ua25_adafactor_steps",
    "B2",
    "Adafactor's counters were reset",
    ALL,
    "step counters|counters were reset|counter",
    base=Attends,
    optimizer=optim(Adafactor, factor=3.0),
    loaded=edited(torch.zeros_like, "step"),
)
ua(
    "ua26_momentum_exchanged",
    "B5",
    "SGD's momenta of two equal blocks are exchanged",
    LOAD,
    "wrong parameter|assigned to|exchanged|another parameter|other parameter",
    base=Twin,
    clip=0.0,
    optimizer=optim(torch.optim.SGD, factor=10.0, momentum=0.95),
    loaded=lambda self: swapped(self, "one.", "two.", False, True),
)


def slow_fresh(self: Any) -> None:
    for _, weight, state in states(self):
        state["slow_buffer"] = torch.randn_like(weight) * 0.2


ua(
    "ua27_lookahead_slow_fresh",
    "B1",
    "Lookahead's slow weights are those of the new model",
    LOAD,
    "slow|not restored|optimizer state",
    base=Rows,
    optimizer=optim(Lookahead),
    loaded=slow_fresh,
    also=("A2", "B3", "B6", "B11", "G6"),
)


class Quasi(Rows):
    """L-BFGS, whose state is a history of directions."""

    layouts = ("torch_save", "lightning")
    clip = 0.0

    def groups(self) -> Groups:
        return [{"params": list(self.module.parameters())}]

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(groups, lr=0.2, max_iter=3, history_size=5)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def update(self) -> None:
        x = self.tokens()

        def closure() -> torch.Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        self.optimizers[0].step(closure)
        self.step += 1


ua(
    "ua28_lbfgs_history_lost",
    "B1",
    "L-BFGS begins without its history",
    ALL,
    "optimizer state was not restored|history|not restored",
    base=Quasi,
    fresh=("optimizer",),
    also=("B2", "B3"),
)


class Adversary(Rows):
    """A generator and a critic with an optimizer each."""

    layouts = ("torch_save", "lightning")

    def net(self) -> nn.Module:
        gen = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24))
        return nn.ModuleDict(
            {"gen": gen, "critic": nn.Sequential(nn.Linear(24, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))}
        )

    def made(self) -> list[torch.optim.Optimizer]:
        lr = self.config.lr
        return [
            torch.optim.Adam(self.module[name].parameters(), lr=lr, betas=(0.5, 0.99)) for name in ("gen", "critic")
        ]

    def update(self) -> None:
        x, (gen, critic) = self.tokens(), self.optimizers
        fake = self.module["gen"](noise(self.step + 77, len(x), 8))
        critic.zero_grad()
        (
            F.softplus(-self.module["critic"](x.tanh())) + F.softplus(self.module["critic"](fake.detach()))
        ).mean().backward()
        critic.step()
        if self.step % 2:
            gen.zero_grad()
            F.softplus(-self.module["critic"](fake)).mean().backward()
            gen.step()
        for schedule in self.schedules:
            schedule.step()
        self.step += 1


def critic_fresh(self: Loop) -> None:
    self.optimizers[1].state.clear()


ua(
    "ua29_critic_optimizer_fresh",
    "B1",
    "of a GAN's two optimizers the critic's was not restored",
    ALL,
    "optimizer state was not restored|not restored",
    base=Adversary,
    loaded=critic_fresh,
    also=("B2",),
)

# ---- C: schedules, data, counters ------------------------------------------------------------------------------------

ua(
    "ua30_schedule_restarted",
    "C1",
    "the schedule was not loaded",
    ALL,
    "schedule restarted|restarted|schedule",
    base=Recurrent,
    fresh=("scheduler",),
)


def twice(self: Loop) -> None:
    Rows.apply(self)
    if getattr(self, "twice_", False):
        self.schedules[0].step()


def doubling(self: Any) -> None:
    self.twice_ = True


ua(
    "ua31_schedule_twice",
    "C3",
    "the resumed run steps its schedule twice an update",
    "next early",
    "stepped more often|twice|schedule",
    base=Rows,
    apply=twice,
    loaded=doubling,
)


def stopped(self: Loop) -> None:
    self.schedules = []
    self.extra["scheduler"] = self.told


def kept_told(self: Any) -> None:
    self.told = {k: v for k, v in self.schedules[0].state_dict().items() if not callable(v)}
    stopped(self)


ua(
    "ua32_schedule_not_stepped",
    "C3",
    "the schedule is loaded and never stepped again",
    "next early",
    "less often|did not advance|not advance|schedule",
    base=Conv,
    loaded=kept_told,
    also=("B8",),
)


def cosine(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total)


def shortened(self: Loop) -> None:
    self.schedules[0].T_max = self.config.total // 2 + 17


ua(
    "ua33_schedule_shortened",
    "C4",
    "the schedule's length is another one after the load",
    ALL,
    "length of the schedule|T_max|length",
    base=Rows,
    schedule=cosine,
    loaded=shortened,
    also=("H1",),
)


def lost_schedule(self: Loop) -> None:
    self.schedules = []
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr


ua(
    "ua34_schedule_gone",
    "C2",
    "the schedule is gone, the lr back at its peak for good",
    ALL,
    "schedule was lost|back at its peak|schedule",
    base=Recurrent,
    loaded=lost_schedule,
    also=("B8", "C1"),
    needs={"warmup": 60, "total": 200},
)


class Fed(Rows):
    """Stores the position of its data loader, the sampler's seed and the generators."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {"epoch": 0, "position": 0, "seed": 4321}
        self.extra["rng_state"] = torch.Generator().manual_seed(2024).get_state()

    def tokens(self) -> torch.Tensor:
        told = self.extra["dataloader"]
        return noise(100 * told["seed"] + told["position"], self.rows, self.width)

    def apply(self) -> None:
        super().apply()
        self.extra["dataloader"]["position"] += 1
        generator = torch.Generator()
        generator.set_state(self.extra["rng_state"])
        torch.rand(3, generator=generator)
        self.extra["rng_state"] = generator.get_state()


def begun(self: Loop) -> None:
    self.extra["dataloader"] = {"epoch": 0, "position": 0, "seed": 4321}


def reseeded(self: Loop) -> None:
    self.extra["dataloader"]["seed"] = 99


def drawn_anew(self: Loop) -> None:
    self.extra["rng_state"] = torch.Generator().manual_seed(7).get_state()


ua(
    "ua35_data_from_start",
    "C6",
    "the loader's position was not restored",
    ALL,
    "data restarted|from the beginning|position",
    base=Fed,
    loaded=begun,
)
ua(
    "ua36_sampler_seed",
    "C7",
    "the sampler has another seed",
    ALL,
    "order of the data|seed",
    base=Fed,
    loaded=reseeded,
    also=("H1",),
)
ua(
    "ua37_generator_seeded",
    "C8",
    "the generator was seeded again instead of restored",
    ALL,
    "random|generator|rng",
    base=Fed,
    loaded=drawn_anew,
)


def ahead(self: Loop) -> None:
    self.step += 6


ua(
    "ua38_step_ahead",
    "C9",
    "the trainer's step was read six updates late",
    ALL,
    "trainer's step|step is not|global_step|updates apart|counter",
    base=Attends,
    loaded=ahead,
)


def larger_batch(self: Loop) -> None:
    self.extra["args"]["train_batch_size"] *= 4


ua(
    "ua39_batch_size",
    "C10",
    "the batch is four times larger by a new default",
    ALL,
    "batch size",
    base=Told,
    loaded=larger_batch,
    also=("H1",),
)


def betas_default(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["betas"] = (0.9, 0.9995)


ua("ua40_betas_default", "H1", "betas are those of a new default", ALL, "betas", base=Twin, loaded=betas_default)


def other_theta(self: Loop) -> None:
    self.extra["args"]["rope_theta"] = 5e5
    self.module.config = self.module.config.but(rope_theta=5e5)


ua(
    "ua41_rope_theta",
    "H2",
    "the rotary base is another one by a new default",
    ALL,
    "rope|config changed|rotary",
    base=Told,
    loaded=other_theta,
    also=("H1",),
)


class Patient(Rows):
    """A plateau schedule."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found = super().loss(x)
        self.told = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.told)


ua(
    "ua42_plateau_restarted",
    "C1",
    "the plateau schedule forgot its best value and its count",
    ALL,
    "schedule restarted|restarted|schedule",
    base=Patient,
    fresh=("scheduler",),
)

# ---- D: precision ----------------------------------------------------------------------------------------------------


def through(dtype: torch.dtype) -> Any:
    return lambda t: t.to(dtype).to(t.dtype)


def weights_rounded(self: Loop) -> None:
    with torch.no_grad():
        for weight in self.module.parameters():
            weight.copy_(weight.to(torch.bfloat16).float())


ua(
    "ua43_moments_bf16",
    "D4",
    "moments went through bfloat16",
    "echo next",
    "moments were rounded|rounded|16 bit|16-bit|bf16|bfloat16",
    base=Twin,
    loaded=edited(through(torch.bfloat16), "exp_avg", "exp_avg_sq"),
)
ua(
    "ua44_moments_fp16",
    "D4",
    "moments went through float16, small ones became 0",
    ALL,
    "moments were rounded|rounded|16 bit|16-bit|float16",
    base=Attends,
    clip=0.02,
    loaded=edited(through(torch.float16), "exp_avg", "exp_avg_sq"),
    also=("B4",),
)
ua(
    "ua45_weights_bf16",
    "D7",
    "fp32 weights went through bfloat16",
    "echo next",
    "narrower type|rounded|cast|bf16|bfloat16",
    base=Recurrent,
    loaded=weights_rounded,
)


def masters_rebuilt(self: Loop) -> None:
    for _, weight, state in states(self):
        state["master_param"] = weight.detach().float().clone()


def masters_older(self: Any) -> None:
    old = type(self).past[0]["optimizer"]["state"]
    for (_, _, state), number in zip(states(self), sorted(old), strict=True):
        state["master_param"] = old[number]["master_param"].clone()


def weights_older(self: Any) -> None:
    self.module.load_state_dict(type(self).past[0]["model"])


ua(
    "ua46_masters_rebuilt",
    "D1",
    "masters were rebuilt from the bf16 weights",
    "echo next",
    "masters were rebuilt|rebuilt|low bits|master",
    base=Mixed,
    loaded=masters_rebuilt,
)
ua(
    "ua47_masters_stale",
    "D2",
    "masters come from eight updates before",
    "echo next",
    "master",
    base=type("R47", (Remembers, Mixed), {}),
    loaded=masters_older,
    also=("G6",),
)
ua(
    "ua48_weights_stale",
    "D3",
    "the bf16 weights come from eight updates before, masters are right",
    LOAD,
    "do not match their|master",
    base=type("R48", (Remembers, Mixed), {}),
    loaded=weights_older,
    also=("G6", "D2"),
)


def scale_reset(self: Loop) -> None:
    self.extra["scaler"] |= {"scale": 2.0**24, "_growth_tracker": 0}


ua(
    "ua49_loss_scale_reset",
    "D8",
    "the loss scale is at its first value again",
    ALL,
    "loss scale|scale was reset",
    base=Sheltered,
    loaded=scale_reset,
)


class Eight(Rows):
    """Keeps amax histories and scales as delayed scaling does."""

    def net(self) -> nn.Module:
        found = super().net()
        for number in (0, 3):
            found[number].register_buffer("amax_history", torch.zeros(16))
            found[number].register_buffer("weight_scale", torch.ones(1))
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        named = dict(self.module.named_parameters())
        for number in (0, 3):
            weight, scale = named[f"{number}.weight"], self.module[number].weight_scale
            small = (weight * scale).to(torch.float8_e4m3fn).float() / scale
            named[f"{number}.weight"] = weight + (small - weight).detach()
        return F.cross_entropy(torch.func.functional_call(self.module, named, (x,)), self.labels(x))

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for layer in (self.module[0], self.module[3]):
                layer.amax_history.copy_(layer.amax_history.roll(1))
                layer.amax_history[0] = layer.weight.abs().max()
                layer.weight_scale.copy_(448 / layer.amax_history.max())


ua(
    "ua50_amax_lost",
    "D9",
    "amax histories and scales were not restored",
    "echo next",
    "amax|fp8|buffers were not",
    base=Eight,
    take=lenient("amax", "scale"),
    also=("A5",),
)

# ---- E: layouts ------------------------------------------------------------------------------------------------------


def halves_exchanged(t: torch.Tensor) -> torch.Tensor:
    return torch.cat(t.chunk(2)[::-1])


def contiguous(t: torch.Tensor) -> torch.Tensor:
    """Grouped by head to [Q; K; V]."""
    return t.view(4, 3, 8, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def interleaved(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1, 2, t.shape[0] // 4, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


ua(
    "ua51_gate_up",
    "E3",
    "gate and up are exchanged in the fused matrix",
    ALL,
    "gate and up|gate|different order|blocks of rows",
    base=Attends,
    loaded=rows_moved(halves_exchanged, "gate_up"),
    also=("E1",),
)
ua(
    "ua52_qkv_contiguous",
    "E4",
    "grouped qkv was read as contiguous",
    ALL,
    "qkv|query_key_value|different order|blocks of rows",
    base=Attends,
    loaded=rows_moved(contiguous, "query_key_value"),
    also=("E1",),
)
ua(
    "ua53_rotary_rows",
    "E5",
    "rows of q and k are in interleaved order",
    ALL,
    "rotary|rows of q and k|different order",
    needs={"heads": 2, "groups": 2, "hidden": 24},
    loaded=lambda self: (rows_moved(interleaved, "q_proj")(self), rows_moved(interleaved, "k_proj")(self)),
    also=("E1",),
)
ua(
    "ua54_transposed",
    "E1",
    "square matrices came back transposed",
    ALL,
    "along a different axis|transposed|axis|different order",
    base=Twin,
    loaded=lambda self: (
        rows_moved(lambda t: t.T.contiguous(), "one.0.weight")(self),
        rows_moved(lambda t: t.T.contiguous(), "two.0.weight")(self),
    ),
)
ua(
    "ua55_moments_transposed",
    "E13",
    "the moments of square matrices came back transposed",
    ALL,
    "transposed|different map|axis|moments",
    base=Twin,
    also=("E1", "B5"),
    loaded=rows_moved(lambda t: t.T.contiguous() if t.ndim > 1 else t, "one.", weights=False),
)
ua(
    "ua56_layers_exchanged",
    "E9",
    "two layers are exchanged, with their moments",
    ALL,
    "layers are|swapped|exchanged",
    loaded=lambda self: swapped(self, "layers.0.", "layers.1.", True, True),
)


def experts_rolled(self: Loop) -> None:
    held, told = dict(self.module.named_parameters()), {n: s for n, _, s in states(self)}
    for name in [name for name in held if ".experts.0." in name]:
        names = [name.replace(".experts.0.", f".experts.{e}.") for e in range(4)]
        kept = [(held[n].detach().clone(), dict(told.get(n, {}))) for n in names]
        with torch.no_grad():
            for n, (weight, state) in zip(names, kept[1:] + kept[:1], strict=True):
                held[n].copy_(weight)
                if state:
                    self.optimizers[0].state[held[n]] = state


ua(
    "ua57_experts_rolled",
    "E10",
    "experts are each at the next place, the router is as it was",
    ALL,
    "expert",
    needs={"experts": 4},
    loaded=experts_rolled,
)


def scaled(factor: float) -> Any:
    def loaded(self: Loop) -> None:
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    weight.mul_(factor)

    return loaded


ua(
    "ua58_replicas_summed",
    "E12",
    "replicated norms were summed over two ranks",
    ALL,
    "summed|averaged|multiple|twice|scaled|2 times",
    loaded=scaled(2.0),
)


def flat_shifted(self: Loop) -> None:
    parts = [w for _, w, _ in states(self)]
    told = [s for _, _, s in states(self)]
    for lists in ([w.data for w in parts], [s["exp_avg"] for s in told], [s["exp_avg_sq"] for s in told]):
        flat = torch.cat([t.flatten() for t in lists]).roll(8)
        for tensor, piece in zip(lists, flat.split([t.numel() for t in lists]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


ua(
    "ua59_flat_shifted",
    "E7",
    "flat partitions are read eight elements too early",
    ALL,
    "shifted|flat partition|offset",
    base=Recurrent,
    loaded=flat_shifted,
)

# ---- F, G: copies, bytes ---------------------------------------------------------------------------------------------


def untied(self: Loop) -> None:
    held = dict(self.module.named_parameters())["model.embed_tokens.weight"]
    self.module.put("lm_head.weight", nn.Parameter(torch.randn_like(held) * 0.02))


ua(
    "ua60_head_recreated",
    "F2",
    "a tied head is a parameter of its own after the load, with random values",
    ALL,
    "no longer one tensor|untied|tied|head",
    base=Tied,
    needs={"tied": True},
    loaded=untied,
    layouts=("torch_save", "lightning"),
)


def takes_average(self: Loop) -> None:
    self.module.load_state_dict(self.extra["ema"])


ua(
    "ua61_average_as_weights",
    "F4",
    "the averaged weights were loaded as the weights",
    ALL,
    "averaged weights|average",
    base=Averaged,
    loaded=takes_average,
)
ua(
    "ua62_base_revision",
    "F6",
    "the base under the adapters is another one",
    ALL,
    "base model|base under|base",
    base=Adapters,
    take=lambda self, weights: self.module.load_state_dict(
        {
            n: (t if "lora_" in n else t + 0.02 * torch.randn(t.shape, generator=torch.Generator().manual_seed(5)))
            for n, t in weights.items()
        }
    ),
)
ua(
    "ua63_vocabulary_shifted",
    "F7",
    "rows of the vocabulary are shifted by three",
    ALL,
    "vocabulary|rows",
    base=Recurrent,
    loaded=lambda self: (
        rows_moved(lambda t: t.roll(3, 0), "emb.weight")(self),
        rows_moved(lambda t: t.roll(3, 0), "out.weight")(self),
    ),
    also=("E1",),
)


def nan_moment(self: Loop) -> None:
    states(self)[0][2]["exp_avg"].view(-1)[5] = float("nan")


def exponent(self: Loop) -> None:
    weight = next(w for w in self.module.parameters() if w.ndim > 1)
    with torch.no_grad():
        weight.view(-1).view(torch.int32)[11] ^= 1 << 22


ua(
    "ua64_nan_in_moment",
    "G1",
    "a first moment became NaN",
    ALL,
    "nan|not a number|not finite|damaged",
    base=Attends,
    loaded=nan_moment,
)
ua(
    "ua65_mantissa_bit",
    "G2",
    "the highest bit of a weight's mantissa is flipped",
    "echo next",
    "bit is flipped|flipped|one bit",
    base=Twin,
    loaded=exponent,
    also=("G1",),
)


def zeroed_page(self: Loop) -> None:
    with torch.no_grad():
        weight = max(self.module.parameters(), key=lambda w: w.numel())
        weight.view(-1)[: 1024 if weight.numel() > 1024 else 256] = 0


ua(
    "ua66_page_of_zeros",
    "G5",
    "a page of a weight is zeros",
    ALL,
    "zeros|replaced by zero",
    base=Attends,
    loaded=zeroed_page,
    also=("G4",),
)


def half_older(self: Any) -> None:
    old = next(one for one in type(self).past if one["optimizer"]["state"])  # not that of before the first update
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            if name.startswith("two."):
                weight.copy_(old["model"][name])
    for number, (name, _, state) in enumerate(states(self)):
        if name.startswith("two."):
            key = sorted(old["optimizer"]["state"])[number]
            state.update(copy.deepcopy(old["optimizer"]["state"][key]))


ua(
    "ua67_half_older",
    "G6",
    "one block, with all its state, comes from a save eight updates older",
    ALL,
    "different saves|older|another save",
    base=type("R67", (Remembers, Twin), {}),
    loaded=half_older,
)


class Repeats(Rows):
    """After the resume every save writes what was loaded, under the new step."""

    def loaded(self) -> None:
        self.kept = copy.deepcopy(self.content())

    def content(self) -> dict[str, Any]:
        found = super().content()
        return found if not hasattr(self, "kept") or self.step == self.kept["step"] else self.kept | {
            "step": self.step}  # fmt: skip


ua(
    "ua68_save_repeats",
    "G7",
    "every save after the resume repeats the state that was loaded",
    "next early",
    "repeats|older|written again|did not change|not change",
    base=Repeats,
)
