"""The seventeenth sealed set: what goes wrong in a load. Where a text has ``; ``, what follows it is done on purpose.

``WORDS17`` are what a right first answer has to say: a regular expression for each meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.live import Loop, fault
from tests.lab.model import LORA_SCALE
from tests.lab.opened16_nets import Lora, Remember, draws
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
    crossed,
    forgotten,
    freeze,
    groups,
    less_decay,
    more_decay,
    named,
    rate,
    relaid,
    rows,
    sampler,
    state,
    states,
    stranger,
    unloaded,
)
from tests.lab.state import State

__all__ = ["FAULTS17", "WORDS17"]

Tensor = torch.Tensor
FAULTS17: list[Fault] = []
WORDS17: dict[str, tuple[str, ...]] = {}
ALL = "echo next early"
NEAR = "echo next"
FILES = ("torch_save", "torch_save", "folder", "lightning")


def bad(
    id: str,
    cause: str,
    text: str,
    where: str,
    words: tuple[str, ...],
    *changes: Change,
    base: type[Loop] = Book,
    **more: Any,
) -> None:
    """A loop's fault: ``changes`` are what happens right after the load, the innocent ones among them."""
    WORDS17[id] = words
    if changes:
        more["loaded"] = chain(*changes)
    FAULTS17.append(fault(id, cause, text, where, base=base, **more))


def ranks(
    id: str,
    cause: str,
    text: str,
    where: str,
    words: tuple[str, ...],
    restore: Callable[[State, Lab], State],
    **more: Any,
) -> None:
    """A fault of what a layout of several ranks brings back."""
    WORDS17[id] = words
    FAULTS17.append(Fault(id, cause, text, seen(where), restore=restore, **more))


NOT_LOADED = r"not (loaded|restored)|initial|missing|another (model|run)|begin|random|fresh"
LOST = r"not restored|lost|zero|reset|gone|began anew|fresh|missing"

# ---- partial loads and wrong tensors ---------------------------------------------------------------------------------

bad(
    "sa01_positions",
    "A2",
    "the table of positions was not loaded",
    ALL,
    (r"wpe|position", NOT_LOADED),
    unloaded(r"^wpe"),
    base=Nano,
)
bad(
    "sa02_tower",
    "A2",
    "the text tower was not loaded; the rate is halved on purpose",
    ALL,
    (r"text", NOT_LOADED),
    unloaded(r"^text\."),
    rate(0.5),
    base=Towers,
    also=("A1",),
)
bad(
    "sa03_upper_lstm",
    "A2",
    "the second layer of an LSTM was not loaded; twice the rows on purpose",
    ALL,
    (r"l1", NOT_LOADED),
    unloaded(r"rnn\..*_l1"),
    rows(2),
    base=Tagger,
)
bad(
    "sa04_layernorms",
    "A3",
    "layer norms are at 1 and 0; other betas on purpose",
    NEAR,
    (r"norm|ln_", r"1|initial"),
    unloaded(r"ln_"),
    groups(betas=(0.85, 0.97)),
    base=Nano,
    also=("A2",),
)
bad(
    "sa05_temperature",
    "A2",
    "the temperature of two towers is at its first value",
    NEAR,
    (r"logit_scale", NOT_LOADED),
    unloaded(r"logit_scale"),
    base=Towers,
)
bad(
    "sa06_prefixed",
    "A1",
    "all but the head has another prefix and is not loaded; the schedule anew on purpose",
    ALL,
    (r"weights|tensor", NOT_LOADED),
    unloaded(r"^(wte|wpe|h\.|ln_f)"),
    anew,
    base=Nano,
    tied=False,
    also=("A2",),
)
bad(
    "sa07_sibling",
    "A1",
    "no weight of a convolutional net was loaded, the optimizer was; more decay on purpose",
    ALL,
    (r"weights", NOT_LOADED + r"|different|revision|saves"),
    unloaded(r"."),
    more_decay,
    base=Pictures,
    also=("A2", "F6", "G6"),
)
bad(
    "sa08_quarter",
    "A2",
    "half of the rows of a matrix were not read from their shard",
    ALL,
    (r"c_fc|mlp", NOT_LOADED + r"|rows|shard"),
    lambda self: named(self, r"h\.1\.mlp\.c_fc\.weight")["h.1.mlp.c_fc.weight"][32:].copy_(
        stranger(self)["h.1.mlp.c_fc.weight"][32:]
    ),
    base=Nano,
    also=("E8", "G6", "E1"),
)

# ---- the optimizer's state -------------------------------------------------------------------------------------------

bad(
    "sa09_gate_up_states",
    "B5",
    "the states of gate and up are exchanged",
    ALL,
    (r"optimizer|moment", r"wrong parameter|another parameter|other parameter|exchanged|swapped|different map"),
    crossed("gate_proj", "up_proj", weights=False),
    also=("E13", "E3"),
)
bad(
    "sa10_adagrad_sums",
    "B1",
    "sums of the tables' Adagrad are lost; the deep part's rate is lowered on purpose",
    ALL,
    (r"optimizer|sum|state", LOST),
    forgotten(r"users|goods"),
    lambda self: self.optimizers[1].param_groups[0].update(lr=self.optimizers[1].param_groups[0]["lr"] / 2),
    base=Shop,
    also=("B2", "B3", "B4"),
)
bad(
    "sa11_vectors_state",
    "B1",
    "the state of the vectors' group is lost; a third of the rate on purpose",
    ALL,
    (r"optimizer|moment|state", LOST),
    forgotten(r"norm"),
    rate(0.34),
    also=("B2", "B3"),
)
bad(
    "sa12_first_zero",
    "B3",
    "first moments are zero, the second are kept",
    NEAR,
    (r"moment|exp_avg", LOST),
    states("", "exp_avg", torch.zeros_like),
    base=Nano,
    also=("B1",),
)
bad(
    "sa13_counters_one",
    "B2",
    "counters begin at 1; half the decay on purpose",
    ALL,
    (r"counter|step", LOST),
    states("", "step", torch.ones_like),
    less_decay,
    base=Nano,
)
bad(
    "sa14_group_order",
    "B7",
    "the decay of matrices and vectors is exchanged",
    ALL,
    (r"weight decay", r"group|wrong|swapped|exchanged|moved"),
    lambda self: [
        group.update(weight_decay=decay)
        for group, decay in zip(
            self.optimizers[0].param_groups,
            [one["weight_decay"] for one in self.optimizers[0].param_groups][::-1],
            strict=True,
        )
    ],
    base=Towers,
    needs={"weight_decay": 0.1},
    also=("H1",),
)


class Deep(Nano):
    """A rate by depth: a group each."""

    def groups(self) -> list[dict[str, Any]]:
        lr, held = self.config.lr, named(self)
        parts = [[w for n, w in held.items() if n.startswith(f"h.{i}.")] for i in range(3)]
        rest = [w for n, w in held.items() if not n.startswith("h.")]
        found = [{"params": ws, "lr": lr * 0.5 ** (3 - i), "weight_decay": 0.05} for i, ws in enumerate(parts)]
        return [*found, {"params": rest, "lr": lr, "weight_decay": 0.0}]


def one_rate(self: Any) -> None:
    self.schedules[0].base_lrs = [self.config.lr] * 4
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.optimizers[0].param_groups[-1]["lr"]


bad(
    "sa15_rates_by_depth",
    "B8",
    "every layer has the head's rate after the load",
    ALL,
    (r"learning rate|lr",),
    one_rate,
    base=Deep,
    also=("B7", "C2", "H1"),
)
bad(
    "sa16_columns",
    "B4",
    "column statistics of Adafactor are zero",
    NEAR,
    (r"col_var|second|statistic", LOST),
    states(r"c_fc|c_proj|c_attn", "col_var", torch.zeros_like),
    base=Nano,
    also=("B11", "B3", "B1"),
    optimizer=lambda self, groups: torch.optim.Adafactor(groups, lr=3 * self.config.lr),
)
bad(
    "sa17_muon_velocity",
    "B1",
    "Muon's momentum is lost, AdamW's state is kept; another decay on purpose",
    "echo",
    (r"optimizer|momentum", LOST),
    lambda self: self.optimizers[0].state.clear(),
    more_decay,
    base=Nano,
    also=("B3",),
    layouts=("torch_save", "lightning"),
    made=lambda self: [
        torch.optim.Muon(list(named(self, r"h\..*(c_fc|c_attn|c_proj)\.weight").values()), lr=0.01),
        torch.optim.AdamW(
            [w for n, w in named(self).items() if not n.startswith("h.") or w.ndim < 2], lr=self.config.lr
        ),
    ],
)
bad(
    "sa18_rolled_states",
    "B5",
    "a layer was inserted in the code: moments of each block lie at the next; twice the rows on purpose",
    ALL,
    (r"optimizer|moment", r"wrong|another|other|next|shifted|different map"),
    crossed("h.0.", "h.1.", weights=False),
    crossed("h.1.", "h.2.", weights=False),
    rows(2),
    base=Nano,
    also=("E13",),
)
bad(
    "sa19_epsilon",
    "D10",
    "epsilon is 1e-2 by a new default",
    ALL,
    (r"eps|ε",),
    groups(eps=1e-2),
    base=Nano,
    also=("H1",),
)

# ---- counters, schedules and rates -----------------------------------------------------------------------------------

bad(
    "sa20_one_cycle",
    "C4",
    "OneCycle is as long as the rest of the run alone",
    ALL,
    (r"schedule|total",),
    lambda self: setattr(self.schedules[0], "total_steps", self.schedules[0].total_steps - self.step),
    base=Nano,
    also=("H1",),
    schedule=lambda self, one: torch.optim.lr_scheduler.OneCycleLR(
        one, self.config.lr, total_steps=300, cycle_momentum=False
    ),
)


def every_other(self: Any) -> None:
    self.halves = self.step


def slow_apply(self: Any) -> None:
    for one in self.optimizers:
        one.step()
    if not hasattr(self, "halves") or (self.step - self.halves) % 2 == 0:
        for schedule in self.schedules:
            schedule.step()


bad(
    "sa21_half_speed",
    "C3",
    "the schedule moves at every other update; more decay on purpose",
    "early",
    (r"schedule", r"less often|fewer|more often|step"),
    every_other,
    more_decay,
    base=Nano,
    apply=slow_apply,
    also=("B8",),
)


def by_ranks(self: Any) -> None:
    one = self.schedules[0]
    one.last_epoch *= 4
    for group, base, how in zip(self.optimizers[0].param_groups, one.base_lrs, one.lr_lambdas, strict=True):
        group["lr"] = base * how(one.last_epoch)
    one._last_lr = [group["lr"] for group in self.optimizers[0].param_groups]


bad(
    "sa22_times_ranks",
    "C3",
    "the schedule is four times as far as the optimizer; half the decay on purpose",
    ALL,
    (r"schedule", r"more often|ahead|step"),
    by_ranks,
    less_decay,
    base=Nano,
    also=("C2",),
)


def peak(self: Any) -> None:
    self.schedules = []
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr


bad(
    "sa23_at_peak",
    "C2",
    "no schedule any more, the rate at its peak; positions are frozen on purpose",
    ALL,
    (r"schedule|learning rate", r"peak|lost|restart|not the one|another"),
    peak,
    freeze("^wpe"),
    base=Nano,
    also=("B8", "C1"),
)
bad(
    "sa24_cycle_anew",
    "C1",
    "the place within a warm restart's cycle is 0 again",
    ALL,
    (r"schedule", r"restart|reset"),
    lambda self: setattr(self.schedules[0], "T_cur", 0),
    base=Nano,
    also=("C3", "C4"),
    schedule=lambda self, one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 73),
)
bad(
    "sa25_samples_as_step",
    "C9",
    "the trainer's step is the count of samples; other betas on purpose",
    ALL,
    (r"step",),
    lambda self: setattr(self, "step", self.step * 4),
    groups(betas=(0.8, 0.93)),
    base=Nano,
)
bad(
    "sa26_no_warm_up",
    "C1",
    "the schedule counts from 0 again, the rest goes on; dropout is raised on purpose",
    ALL,
    (r"schedule", r"restart"),
    anew,
    lambda self: self.extra["args"].update(dropout=0.2),
    base=Towers,
    also=("C2",),
)

# ---- data and generators ---------------------------------------------------------------------------------------------

bad(
    "sa27_epoch_again",
    "C6",
    "the sampler begins its epoch again",
    ALL,
    (r"data|sampler", r"restart|beginning|again"),
    sampler(index=0),
    base=Towers,
)
bad(
    "sa28_rank_seed",
    "C7",
    "the sampler's seed is that of another rank; the rate is lowered on purpose",
    ALL,
    (r"data|order|seed", r"order|seed"),
    sampler(seed=1241),
    rate(0.7),
    base=Nano,
    also=("H1",),
)
bad(
    "sa29_skipped_twice",
    "C6",
    "batches were skipped twice: the position is doubled; a longer memory on purpose",
    ALL,
    (r"data|sampler|position|index",),
    sampler(index=lambda told: 2 * told["index"]),
    groups(betas=(0.9, 0.999)),
    base=Nano,
    needs={"betas": (0.9, 0.95)},
    also=("C7", "C9"),
)
bad(
    "sa30_noise_anew",
    "C8",
    "the generator of the noise begins at its seed; less decay on purpose",
    "echo",
    (r"generator|random",),
    lambda self: self.extra.update(generator=torch.Generator().manual_seed(self.config.seed).get_state()),
    less_decay,
    base=Dropped,
)


class Shuffled(Vectors):
    """An epoch's order is drawn once and stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        made = torch.Generator().manual_seed(config.seed)
        self.extra["sampler"]["permutation"] = torch.randperm(200, generator=made)

    def tokens(self) -> Tensor:
        told = self.extra["sampler"]
        return draws(500_000 + int(told["permutation"][told["index"] % 200]), 32, self.wide)


bad(
    "sa31_drawn_again",
    "C7",
    "the epoch's permutation was drawn again; more decay on purpose",
    ALL,
    (r"data|order|permutation",),
    sampler(permutation=lambda told: told["permutation"].roll(17).flip(0)),
    more_decay,
    base=Shuffled,
    also=("C6", "C8"),
)

# ---- averages and buffers --------------------------------------------------------------------------------------------


def live_from_average(self: Any) -> None:
    for n, w in named(self).items():
        w.copy_(self.extra["ema"][n])


def other_average(self: Any) -> None:
    new = stranger(self)
    self.extra["ema"] = {n: new[n].clone() for n in self.extra["ema"]}


class Past(Averaged, Remember):
    pass


def old_average(self: Any) -> None:
    self.extra["ema"] = copied(type(self).__mro__[0].past["ema"])


bad(
    "sa32_sampled_weights",
    "F4",
    "the average is loaded as the weights; half the rate on purpose",
    NEAR,
    (r"average",),
    live_from_average,
    rate(0.5),
    base=Averaged,
)
bad(
    "sa33_average_random",
    "A2",
    "the average is that of a new model",
    ALL,
    (r"average|ema", NOT_LOADED),
    other_average,
    base=Averaged,
    also=("F4", "A5"),
)
bad(
    "sa34_average_old",
    "G6",
    "the average is of an older save; more decay on purpose",
    "echo",
    (r"average|ema", r"older|other save|different|not restored|stale|earlier"),
    old_average,
    more_decay,
    base=Past,
    also=("F4", "A5", "A2"),
)
bad(
    "sa35_average_count",
    "A5",
    "how often the average was made is 0 again; a smaller epsilon on purpose",
    ALL,
    (r"average|ema|count|number",),
    lambda self: self.extra.update(ema_updates=0),
    groups(eps=1e-10),
    base=Averaged,
    also=("B2", "C9", "F4"),
)
bad(
    "sa36_whitening",
    "A5",
    "the statistics of observations begin anew; the rate is lowered on purpose",
    ALL,
    (r"buffer|statistic|obs", NOT_LOADED),
    unloaded(r"obs_"),
    rate(0.6),
    base=Agent,
)
bad(
    "sa37_target_now",
    "A2",
    "the target critic is a copy of the critic; twice the rows on purpose",
    NEAR,
    (r"target", NOT_LOADED + r"|copy|equal|same|other"),
    lambda self: self.module.target_critic.load_state_dict(self.module.critic.state_dict()),
    rows(2),
    base=Agent,
    also=("A5", "F4", "G6"),
)
bad(
    "sa38_variance_summed",
    "E12",
    "running variances are the sum over four ranks; twice the rows on purpose",
    "echo",
    (r"running_var|buffer|statistic|replica",),
    lambda self: [one.mul_(4) for n, one in self.module.named_buffers() if "running_var" in n],
    rows(2),
    base=Pictures,
    also=("A5",),
)


class Masked(Vectors):
    """Half of the inner weights are masked for good."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"a": nn.Linear(16, 40), "b": nn.Linear(40, 16)})
        for i, one in enumerate(found.values()):
            one.register_buffer("mask", (draws(40 + i, *one.weight.shape) > 0).float())
        return found

    def loss(self, x: Tensor) -> Tensor:
        a, b = self.module["a"], self.module["b"]
        inner = F.gelu(F.linear(x, a.weight * a.mask, a.bias))
        return F.mse_loss(F.linear(inner, b.weight * b.mask, b.bias), self.target(x))


bad(
    "sa39_masks_open",
    "A5",
    "the masks of a pruned net are all 1",
    ALL,
    (r"mask|buffer", NOT_LOADED),
    lambda self: [one.fill_(1) for n, one in self.module.named_buffers()],
    base=Masked,
)


class Waves(Vectors):
    """Frequencies of features are a buffer."""

    def build(self) -> nn.Module:
        found = nn.ModuleDict({"net": mlp_of(64)})
        found.register_buffer("inv_freq", 1e3 ** -(torch.arange(32) / 32))
        return found

    def loss(self, x: Tensor) -> Tensor:
        angle = x[:, :1] * self.module.inv_freq * 5
        return F.mse_loss(self.module["net"](torch.cat([angle.sin(), angle.cos()], 1)), self.target(x))


def mlp_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 40), nn.SiLU(), nn.Linear(40, 16))


bad(
    "sa40_frequencies",
    "H2",
    "frequencies were computed for another base",
    ALL,
    (r"inv_freq|buffer|rotary|config",),
    lambda self: self.module.inv_freq.copy_(1e4 ** -(torch.arange(32) / 32)),
    base=Waves,
    also=("A5", "H1"),
)

# ---- masters and precision -------------------------------------------------------------------------------------------


def rebuilt(state: State, lab: Lab) -> State:
    for name in state.masters:
        if "embed" in name or "mlp" in name:
            state.masters[name] = state.params[name].float()
    return state.declared(lr=state.config.lr / 2, min_lr=state.config.min_lr / 2)


def stale_layer(state: State, lab: Lab) -> State:
    old = lab.run.recent
    for name in state.masters:
        if ".layers.1." in name:
            state.masters[name] = old.masters[name]
    return state.declared(weight_decay=state.config.weight_decay / 2)


def through_fp8(state: State, lab: Lab) -> State:
    for name, one in state.exp_avg.items():
        state.exp_avg[name] = one.to(torch.bfloat16).to(one.dtype)
    return state


ranks(
    "sa41_masters_rebuilt",
    "D1",
    "masters of tables and MLPs are the bf16 weights; half the rate on purpose",
    NEAR,
    (r"master", r"rebuilt|bf16|16-bit|low bits"),
    rebuilt,
    needs=masters,
)
ranks(
    "sa42_masters_stale",
    "D2",
    "a layer's masters are 20 updates old; half the decay on purpose",
    NEAR,
    (r"master",),
    stale_layer,
    needs=masters,
    also=("G6",),
)
ranks(
    "sa43_first_moments_bf16",
    "D4",
    "first moments went through bf16",
    "echo",
    (r"moment|exp_avg", r"16|round"),
    through_fp8,
    needs=lambda config: config.but(precision="fp32"),
)
bad(
    "sa44_weights_fp16",
    "D7",
    "weights went through fp16; the schedule begins anew on purpose",
    "echo",
    (r"weight", r"16|narrow|cast|round"),
    lambda self: [w.copy_(w.half().float()) for w in named(self).values()],
    anew,
    base=Towers,
)


class Scaled(Nano):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 1024.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 5,
            "_growth_tracker": 0,
        }

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == 30:
            told.update(scale=told["scale"] * 2, _growth_tracker=0)


bad(
    "sa45_scale_of_one",
    "D8",
    "the loss scale is 1 after the load",
    ALL,
    (r"loss scale|scale",),
    lambda self: self.extra["scaler"].update(scale=1.0, _growth_tracker=0),
    base=Scaled,
)

# ---- layouts ---------------------------------------------------------------------------------------------------------


def gates(t: Tensor) -> Tensor:
    i, f, g, o = t.chunk(4)
    return torch.cat([i, f, o, g])


def interleaved(t: Tensor) -> Tensor:
    return t.view(4, 3, 8, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


bad(
    "sa46_lstm_gates",
    "E1",
    "the LSTM's gates were read as i f o g; twice the rows on purpose",
    ALL,
    (r"order|rows|blocks|gate",),
    relaid(r"rnn", gates),
    rows(2),
    base=Tagger,
    also=("E3",),
)
bad(
    "sa47_fused_by_head",
    "E4",
    "fused q k v was read by head",
    ALL,
    (r"qkv|order|rows|layout|c_attn",),
    relaid(r"c_attn", interleaved),
    base=Nano,
    also=("E1",),
)
bad(
    "sa48_kernels_turned",
    "E1",
    "kernels of convolutions came back transposed in space; a lower rate on purpose",
    ALL,
    (r"order|axis|transpos|rows|axes",),
    relaid(r"(body|last|stem)\.0\.weight", lambda t: t.transpose(2, 3).contiguous()),
    rate(0.6),
    base=Pictures,
)


def interleave_heads(self: Any) -> None:
    wide = self.config.head_dim

    def rows_(t: Tensor) -> Tensor:
        return t.view(4, wide, -1)[[0, 2, 1, 3]].reshape(t.shape)

    relaid(r"q_proj", rows_)(self)
    relaid(r"o_proj", lambda t: rows_(t.T.contiguous()).T.contiguous())(self)


bad(
    "sa49_heads_to_groups",
    "E6",
    "query heads are in the order of another grouping; a lower rate on purpose",
    ALL,
    (r"head|order|rows",),
    interleave_heads,
    rate(0.5),
    needs={"heads": 4, "groups": 2, "hidden": 32, "ffn": 64},
    also=("E1",),
)


def experts_round(self: Any) -> None:
    for kind in ("gate_proj", "up_proj", "down_proj"):
        held = [named(self, rf"layers\.1\.mlp\.experts\.{e}\.{kind}") for e in range(4)]
        ws = [next(iter(one.values())) for one in held]
        values = [w.clone() for w in ws]
        kept = [copied(state(self, w)) for w in ws]
        for i, w in enumerate(ws):
            w.copy_(values[(i + 1) % 4])
            if kept[i]:
                state(self, w).update(kept[(i + 1) % 4])


bad(
    "sa50_experts_round",
    "E10",
    "a layer's experts are each at the next one's place; less decay on purpose",
    ALL,
    (r"expert",),
    experts_round,
    less_decay,
    needs={"experts": 4},
    also=("E9",),
)
bad(
    "sa51_attention_crossed",
    "E9",
    "attention of the first two blocks is exchanged, the MLPs are not",
    ALL,
    (r"layer|block|h\.",),
    crossed("h.0.attn", "h.1.attn"),
    base=Nano,
    also=("B5",),
)


def sorted_rows(self: Any) -> None:
    count = self.config.padded
    order = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    relaid(r"^wte|^lm_head", lambda t: t[order])(self)


bad(
    "sa52_tokens_sorted",
    "F7",
    "rows of the vocabulary are in another tokenizer's order; a higher rate on purpose",
    ALL,
    (r"vocabulary|rows|token", r"order|shift|permut|moved"),
    sorted_rows,
    rate(1.5),
    base=Nano,
    also=("E1",),
)
bad(
    "sa53_row_left_out",
    "F7",
    "from row 12 on each token has its neighbour's row in the table",
    ALL,
    (r"vocabulary|rows|token", r"shift|order|moved"),
    relaid(r"^wte", lambda t: torch.cat([t[:12], t[13:], t[12:13]])),
    base=Nano,
    also=("E1",),
)


def gate_up(state: State, lab: Lab) -> State:
    for name in [n for n in state.params if "gate_proj" in n]:
        other = name.replace("gate_proj", "up_proj")
        for held in (state.params, state.masters):
            if name in held:
                held[name], held[other] = held[other], held[name]
    return state


def halves_across(state: State, lab: Lab) -> State:
    for name, one in state.exp_avg.items():
        if "o_proj" in name or "down_proj" in name:
            state.exp_avg[name] = one.roll(one.shape[1] // 2, 1)
    return state.declared(lr=state.config.lr * 0.7, min_lr=state.config.min_lr * 0.7)


ranks(
    "sa54_up_gate",
    "E3",
    "gate and up of dense layers are exchanged, in masters too",
    ALL,
    (r"gate",),
    gate_up,
    needs=lambda config: config.but(experts=0),
    also=("E1",),
)
ranks(
    "sa55_moments_across",
    "E13",
    "halves of the columns of first moments are exchanged; a lower rate on purpose",
    NEAR,
    (r"moment|optimizer", r"reshard|order|map|blocks|wrong"),
    halves_across,
    also=("E1", "B5", "B6"),
)

# ---- stale and damaged -----------------------------------------------------------------------------------------------


class Headed(Nano, Remember):
    tied = False


def head_of_before(self: Any) -> None:
    old = type(self).past
    for n, w in named(self, r"^lm_head|^ln_f").items():
        w.copy_(old["model"][n])


bad(
    "sa56_old_head",
    "G6",
    "head and last norm are of an earlier save; a lower rate on purpose",
    "echo",
    (r"lm_head|ln_f|parts|tensor", r"save|older|earlier|not loaded|stale"),
    head_of_before,
    rate(0.8),
    base=Headed,
    also=("A2",),
)


def doubled(self: Any) -> None:
    w = named(self, r"h\.1\.mlp\.c_fc\.weight")["h.1.mlp.c_fc.weight"].view(-1)
    at = w.abs().argmax()
    w[at] *= 2


def page(self: Any) -> None:
    w = named(self, r"^wte")["wte.weight"]
    state(self, w)["exp_avg_sq"].view(-1)[:1024] = 0


def not_a_number(self: Any) -> None:
    self.module.get_submodule("body.1").running_var[3] = float("nan")


bad(
    "sa57_exponent_bit",
    "G2",
    "the lowest bit of one weight's exponent is flipped",
    NEAR,
    (r"bit|damaged",),
    doubled,
    base=Nano,
    also=("G1",),
)
bad(
    "sa58_page_of_squares",
    "G5",
    "the first 4096 bytes of a second moment are zero; another beta1 on purpose",
    NEAR,
    (r"zero",),
    page,
    groups(betas=lambda old: (0.85, old[1])),
    base=Nano,
    also=("B4",),
)
bad(
    "sa59_variance_nan",
    "G1",
    "a running variance is NaN; another decay on purpose",
    ALL,
    (r"nan|finite|damaged",),
    not_a_number,
    more_decay,
    base=Pictures,
)

# ---- adapters and ties -----------------------------------------------------------------------------------------------


class Adapters(Lora, Book):
    layouts = FILES


def side_a(self: Any) -> None:
    for n, w in named(self, r"lora_A").items():
        w.copy_(draws(len(n), *w.shape) / w.shape[1] ** 0.5)


def subtracted(self: Any) -> None:
    held = named(self)
    for n in [n for n in held if "lora_A" in n]:
        stem = n.removesuffix("lora_A.weight")
        held[f"{stem}weight"].sub_(LORA_SCALE * held[f"{stem}lora_B.weight"] @ held[n])


def head_apart(self: Any) -> None:
    """The head is a parameter of its own, with the values of the table."""
    with torch.enable_grad():
        copy = nn.Parameter(self.module.wte.weight.detach().clone())
        self.module.lm_head.weight = copy
    self.optimizers[0].param_groups[0]["params"].append(copy)
    self.optimizers[0].state[copy] = copied(state(self, self.module.wte.weight))


bad(
    "sa60_adapters_half",
    "F5",
    "of the adapters only B was loaded; a higher rate on purpose",
    ALL,
    (r"adapter|lora", NOT_LOADED),
    side_a,
    rate(1.4),
    base=Adapters,
    also=("A2",),
)
bad(
    "sa61_base_less_adapter",
    "F6",
    "the base is without the adapters' product, which it never had",
    ALL,
    (r"base|adapter",),
    subtracted,
    base=Adapters,
    also=("F5",),
)
bad(
    "sa62_tie_cut",
    "F2",
    "table and head are two parameters with equal values; less decay on purpose",
    ALL,
    (r"head|embedding|tie|one tensor",),
    head_apart,
    less_decay,
    base=Nano,
)
bad(
    "sa63_two_tables",
    "F2",
    "the head was not tied again and is random",
    ALL,
    (r"head|embedding|tie|one tensor",),
    lambda self: (head_apart(self), self.module.lm_head.weight.copy_(stranger(self, 3)["wte.weight"])),
    base=Nano,
    also=("A2",),
)
