"""Sixty faults of the twenty-first half; two thirds of them beside something innocent in the same load.

`BESIDE` names the innocent change; `WORDS` is what a right report says somewhere of the first cause, as a pattern.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.lab import optimizers as other
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.hugging import made, trained
from tests.lab.live import fault
from tests.lab.model import is_norm
from tests.lab.opened21_nets import (
    Adan,
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
    Tensor,
    Text,
    Tower,
    apart,
    averaged,
    beta,
    bf16,
    clip_at,
    cosine,
    crossed_decay,
    exchanged,
    extra,
    found,
    freeze,
    from_older,
    groups,
    held_by,
    in_state,
    lr_times,
    merged,
    mlp,
    muon,
    new_rows,
    no_state,
    not_read,
    probe,
    randn,
    rearranged,
    reset_schedule,
    rows_times,
    shuffled,
    steady,
    stretched,
    then,
    untied,
    with_,
)
from tests.lab.state import State

__all__ = ["BESIDE", "FAULTS21", "WORDS"]

BESIDE: dict[str, str] = {}
WORDS: dict[str, str] = {}
FAULTS21: list[Fault] = []
ALL = "echo next early"


def ill(id: str, cause: str, text: str, where: str, words: str, *acts: Any, beside: str = "", **more: Any) -> None:
    """Add a fault of a loop; ``cause`` may be several with slashes, the first the best."""
    best, *rest = cause.split("/")
    if acts:
        more["loaded"] = then(*acts)
    FAULTS21.append(fault(id, best, text, where, also=tuple(rest), **more))
    WORDS[id] = words
    if beside:
        BESIDE[id] = beside


# ---- loops that go on differently ------------------------------------------------------------------------------------


class Resumed(Bench):
    """Knows that it was loaded."""

    resumed = False

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.resumed = True


class Twice(Resumed, Text):
    """The resumed loop steps its schedule at two places."""

    def apply(self) -> None:
        super().apply()
        if self.resumed:
            for one in self.schedules:
                one.step()


class Dead(Image):
    """The schedule of the resumed loop steps an optimizer that was replaced."""


def dead(self: Any) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]
    self.schedules[0].optimizer = copy.copy(self.optimizers[0])
    self.schedules[0].optimizer.param_groups = [dict(g) for g in self.optimizers[0].param_groups]


class Doubled(Ctc):
    """The trainer adds the optimizer's count to its own."""


def doubled(self: Any) -> None:
    self.step *= 2


def of_other_run(self: Any) -> None:
    """The optimizer's state is that of another run of the same model."""
    twin = type(self)(self.config.but(seed=self.config.seed + 40))
    with torch.enable_grad():
        twin.run(self.step)
    told = twin.optimizers[0].state_dict()["state"]
    mine = self.optimizers[0].state_dict()
    self.optimizers[0].load_state_dict({**mine, "state": told})


class Prefixed(Resumed, Text):
    """Saves under DDP's prefix; the resumed one is no DDP, and its load is not strict."""

    def weights(self) -> dict[str, Any]:
        held = super().weights()
        return held if self.resumed else {f"module.{n}": w for n, w in held.items()}

    def take(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict(weights, strict=False)


class Apart3(Td3):
    """Each critic has an optimizer of its own."""

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        return [torch.optim.Adam(m[name].parameters(), lr=lr) for name in ("actor", "critic_1", "critic_2")]


def shared(self: Any) -> None:
    """The second critic's optimizer was given the very tensors of the first's."""
    one, two = self.optimizers[1:]
    for a, b in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        two.state[b] = {**two.state[b], "exp_avg": one.state[a]["exp_avg"], "exp_avg_sq": one.state[a]["exp_avg_sq"]}


class Summed(Resumed):
    """Gradients of sixteen workers are summed after the load; before they were averaged."""

    clip = 0.0

    def gradients(self) -> None:
        if self.resumed:
            for w in self.module.parameters():
                w.grad.mul_(16)


class Wide(Bench):
    """Layers of one shape."""

    width = 24

    def build(self) -> torch.nn.Module:
        return mlp(24, 48, 48, 48, 24)


class Kept(Llama):
    keeps = True


class KeptImage(Image):
    keeps = True


class KeptHalf(Half):
    keeps = True


class KeptWide(Wide):
    keeps = True


class KeptSage(Sage):
    keeps = True


def older_masters(updates: int) -> Any:
    return from_older(updates, "", weight=False, keys="master_param")


def older_weights(self: Any) -> None:
    old = self.ago(5)["model"]
    for n, w in self.module.state_dict().items():
        w.copy_(old[n])


def rewound(self: Any) -> None:
    """Weights, optimizer, schedule and sampler of six updates ago, under the new step."""
    step = self.step
    with torch.enable_grad():
        self.load(copy.deepcopy(self.ago(6)))
    self.step = step


def interleaved_heads(x: Tensor) -> Tensor:
    """Rows [q; k; v] as if each of four heads had its q, k and v together."""
    return x.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def rotary(x: Tensor) -> Tensor:
    """Halves of a head become neighbours."""
    return x.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2).contiguous()


def halves_of_columns(x: Tensor) -> Tensor:
    """Neighbouring gate and up columns are read as two halves."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def heads_1_2(x: Tensor) -> Tensor:
    return x.unflatten(0, (4, -1))[[0, 2, 1, 3]].flatten(0, 1).contiguous()


def columns_1_2(x: Tensor) -> Tensor:
    return heads_1_2(x.T).T.contiguous()


def last_shard(x: Tensor) -> Tensor:
    """The last of eight shards has four rows of eight; the loader reads it from the four before."""
    return torch.cat([x[:-4], x[-8:-4]])


def next_row(x: Tensor) -> Tensor:
    return torch.cat([0 * x[:1], x[:-1]])


def flipped(bit: int, at: int, pattern: str, key: str = "") -> Any:
    """One bit of one number is another."""

    def act(self: Any) -> None:
        w = next(iter(found(self, pattern).values()))
        one = held_by(self, w)[key] if key else w.data
        one.view(-1).view(torch.int32)[at] ^= 1 << bit

    return act


def page(x: Tensor) -> Tensor:
    x.view(-1)[1024:2048] = 0
    return x


def reset_betas(self: Any) -> None:
    for group in self.optimizers[0].param_groups:
        group["betas"], group["eps"] = (0.9, 0.999), 1e-8


def other_base(self: Any) -> None:
    for n, m in enumerate(self.module.values()):
        m.base_layer.weight += 0.03 * randn(300 + n, *m.base_layer.weight.shape)


def z_from_weights(self: Any) -> None:
    for w in found(self).values():
        held_by(self, w)["z"] = w.detach().clone()


def no_schedule(self: Any) -> None:
    self.schedules = []
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def one_generator(self: Any) -> None:
    self.extra["rng_state"] = [self.extra["rng_state"][0].clone() for _ in self.extra["rng_state"]]


def fresh_average(self: Any) -> None:
    config, self.config = self.config, self.config.but(seed=self.config.seed + 9)
    self.extra["ema_model"] = {n: w.detach().clone() for n, w in self.net().state_dict().items()}
    self.config = config


def shorter(self: Any) -> None:
    self.schedules[0].T_max = self.schedules[0].T_max // 3


def adam(self: Any, groups: Any) -> torch.optim.Optimizer:
    c = self.config
    return torch.optim.Adam([{"params": g["params"]} for g in groups], lr=c.lr, betas=c.betas)


SGD = with_(torch.optim.SGD, 5.0, momentum=0.9)
T = ("torch_save",)

ill(
    "ya01_average_is_weights",
    "F4",
    "the average is loaded as the weights",
    "echo next",
    "average|ema",
    averaged,
    lr_times(0.5),
    beside="lr",
    base=Dit,
    needs=beta(0.9, 0.95),
)
ill(
    "ya02_state_of_next_layer",
    "B5",
    "each layer has the next one's state",
    ALL,
    "layers",
    shuffled("layers"),
    rows_times(2),
    beside="batch",
    base=Llama,
    optimizer=adam,
    needs=beta(0.9, 0.95),
    layouts=("torch_save", "dcp"),
)
ill(
    "ya03_schedule_twice",
    "C3",
    "the schedule is stepped at two places",
    "next early",
    "schedul",
    new_rows("wte|lm_head", 6),
    beside="vocabulary",
    base=Twice,
    layouts=("torch_save", "lightning"),
)
ill(
    "ya04_stale_block",
    "G6",
    "a block with its state is seven updates older",
    ALL,
    r"blocks\.1",
    from_older(7, r"blocks\.1\."),
    probe,
    beside="new head",
    base=KeptImage,
    layouts=T,
)
ill(
    "ya05_qkv_by_head",
    "E4/E1",
    "q, k and v are read as if they were together in each head",
    ALL,
    "qkv",
    rearranged(r"qkv", interleaved_heads),
    lr_times(2.0),
    beside="lr",
    base=Image,
)
ill(
    "ya06_gate_up_columns",
    "E1/E2/E3",
    "neighbouring gate and up columns are read as halves",
    ALL,
    "gate_up",
    rearranged("gate_up_proj", halves_of_columns),
    freeze("router"),
    beside="frozen router",
    base=Oss,
)
ill(
    "ya07_sampler_restarted",
    "C6",
    "the sampler begins again",
    ALL,
    "data|sampler",
    extra("sampler", epoch=0, next_index=0),
    lr_times(0.3),
    beside="lr",
    base=Retina,
)
ill(
    "ya08_scaler_lost",
    "D8",
    "the loss scale is the one of a new scaler",
    ALL,
    "scale",
    extra("grad_scaler", scale=16384.0, _growth_tracker=0),
    rows_times(2),
    beside="batch",
    base=Amp,
)
ill(
    "ya09_one_generator",
    "C8",
    "both ranks drop the same",
    ALL,
    "random|generator",
    one_generator,
    clip_at(0.4),
    beside="clip",
    base=Noisy,
)
ill(
    "ya10_masters_from_bf16",
    "D1",
    "masters are made of the bf16 weights",
    "echo next",
    "master",
    in_state("master_param", bf16),
    lr_times(0.5),
    beside="lr",
    base=Half,
    needs=beta(0.9, 0.95),
)
ill(
    "ya11_decay_crossed",
    "B7",
    "norms decay and matrices do not",
    ALL,
    "decay",
    crossed_decay,
    new_rows("embed_tokens|lm_head", 8),
    beside="vocabulary",
    base=Llama,
    layouts=("torch_save", "folder"),
)
ill(
    "ya12_untied",
    "F2",
    "the head is a copy of the embedding",
    ALL,
    "lm_head|head",
    untied,
    base=Text,
    tied=True,
    layouts=T,
)
ill(
    "ya13_running_statistics",
    "A5",
    "running statistics begin again",
    ALL,
    "running",
    not_read("running_|num_batches"),
    freeze("layer1"),
    beside="frozen layer",
    base=ResNet,
    optimizer=SGD,
)
ill(
    "ya14_merged_and_kept",
    "F5",
    "adapters are merged, and applied once more",
    ALL,
    "base_layer|adapter",
    merged,
    lr_times(0.5),
    beside="lr",
    base=Peft,
)
ill(
    "ya15_state_of_other_run",
    "B5/G6/B6",
    "the optimizer's state is another run's",
    ALL,
    "exp_avg|moment|state",
    of_other_run,
    base=Sage,
    needs=beta(0.9, 0.98),
    layouts=("torch_save", "dcp"),
)
ill(
    "ya16_step_doubled",
    "C9",
    "the trainer counts every step twice",
    ALL,
    "step",
    doubled,
    lr_times(0.5),
    beside="lr",
    base=Doubled,
    layouts=T,
)
ill(
    "ya17_average_not_read",
    "A2/A5",
    "the average is a new process's",
    "echo next",
    "ema|average",
    fresh_average,
    base=Dit,
    layouts=T,
)
ill(
    "ya18_scales_of_next",
    "B11/B5",
    "absmax of another layer beside right codes",
    ALL,
    "absmax|8-bit|code|compress",
    shuffled("attn|mlp", "absmax1 absmax2"),
    lr_times(0.5),
    beside="lr",
    base=Text,
    optimizer=with_(other.AdamW8bit),
    layouts=T,
)
ill(
    "ya21_no_optimizer",
    "B1",
    "the optimizer is new",
    ALL,
    "optimizer",
    no_state(),
    probe,
    beside="new head",
    base=Mamba,
    optimizer=with_(torch.optim.NAdam),
    layouts=("torch_save", "lightning"),
)
ill(
    "ya22_moments_zero",
    "B3",
    "moments are zeros, counters are kept",
    ALL,
    "moment|exp_avg",
    in_state("exp_avg exp_avg_sq", torch.zeros_like),
    new_rows("shared", 5),
    beside="vocabulary",
    base=Bart,
    optimizer=adam,
    needs=beta(0.9, 0.98),
    layouts=T,
)
ill(
    "ya23_second_moment_zero",
    "B4",
    "second moments are zeros",
    ALL,
    "exp_avg_sq",
    in_state("exp_avg_sq", torch.zeros_like),
    rows_times(0.5),
    beside="batch",
    base=Tower,
    optimizer=adam,
    needs=beta(0.9, 0.99),
)
ill(
    "ya24_first_moment_of_next",
    "B6/B5",
    "first moments are another layer's",
    ALL,
    "exp_avg",
    shuffled("nets", "exp_avg"),
    base=Flow,
    needs=beta(0.9, 0.95),
)
ill(
    "ya25_dead_optimizer",
    "B8",
    "the schedule steps an optimizer that is gone",
    ALL,
    "learning rate|lr",
    dead,
    groups(weight_decay=lambda d: d / 2),
    beside="weight decay",
    base=Dead,
)
ill(
    "ya26_schedule_again",
    "C1",
    "the schedule begins again",
    ALL,
    "schedul",
    reset_schedule,
    rows_times(2),
    beside="batch",
    base=Text,
    optimizer=SGD,
)
ill(
    "ya27_at_peak",
    "C2/C1/B8",
    "no schedule any more: the rate is its peak",
    ALL,
    "schedul|learning rate",
    no_schedule,
    new_rows("embed_tokens|lm_head", 4),
    beside="vocabulary",
    base=Llama,
    layouts=T,
)
ill(
    "ya28_shorter_cosine",
    "C4",
    "the cosine has a third of its length",
    ALL,
    "length|schedul|T_max",
    shorter,
    freeze(r"body\.conv1|body\.bn1"),
    beside="frozen layers",
    base=Retina,
    schedule=cosine,
)
ill(
    "ya29_other_shuffle",
    "C7",
    "the sampler has another seed",
    ALL,
    "order|seed|shuffl",
    extra("sampler", seed=78),
    lr_times(0.5),
    beside="lr",
    base=Sage,
)
ill(
    "ya30_half_a_batch",
    "C10",
    "the batch is that of one of two workers",
    ALL,
    "batch",
    rows_times(0.5),
    base=Flow,
    needs=beta(0.9, 0.98),
)
ill(
    "ya31_weights_older",
    "D3/G6",
    "bf16 weights are five updates older than their masters",
    "echo",
    "master",
    older_weights,
    clip_at(0.5),
    beside="clip",
    base=KeptHalf,
    layouts=T,
)
ill(
    "ya32_moments_rounded",
    "D4",
    "moments went through bf16",
    "echo next",
    "16|round",
    in_state("exp_avg exp_avg_sq", bf16),
    base=Dino,
    optimizer=adam,
    needs=beta(0.9, 0.98),
)
ill(
    "ya33_weights_rounded",
    "D7",
    "weights went through bf16",
    "echo next",
    "16|round|narrow|type",
    rearranged("", bf16, moments=False),
    probe,
    beside="new head",
    base=Ctc,
    needs=beta(0.9, 0.95),
)
ill(
    "ya35_other_rotary",
    "E5/E1",
    "rows of q and k in the order of another rotary embedding",
    ALL,
    "q_proj",
    rearranged("q_proj|k_proj", rotary),
    lr_times(0.5),
    beside="lr",
    base=Llama,
)
ill(
    "ya36_heads_in_other_groups",
    "E6/E1",
    "the middle query heads changed places",
    ALL,
    "q_proj",
    rearranged("q_proj", heads_1_2),
    rearranged("o_proj", columns_1_2),
    apart("embed_tokens"),
    beside="moved group",
    base=Llama,
    layouts=("torch_save", "lightning"),
)
ill(
    "ya37_layers_exchanged",
    "E9",
    "two layers changed places, with their state",
    ALL,
    r"h\.0|h\.1|layer",
    exchanged(".h.0.", ".h.1."),
    stretched(2.0),
    beside="longer schedule",
    base=Text,
    layers=3,
)
ill(
    "ya38_experts_exchanged",
    "E10",
    "two experts changed places, the router did not",
    ALL,
    "expert",
    exchanged("experts.0.", "experts.3."),
    freeze("embed_tokens"),
    beside="frozen embedding",
    base=Mixtral,
)
ill(
    "ya40_state_by_other_map",
    "E13/B5/E4",
    "the state of q, k, v is in another order than the weights",
    ALL,
    "qkv",
    rearranged(
        "qkv_proj", lambda x: x.unflatten(0, (2, 4, 8)).transpose(0, 1).flatten(0, 2).contiguous(), weight=False
    ),
    base=Phi,
    needs=beta(0.9, 0.95),
)
ill(
    "ya41_last_shard",
    "E8/E1/F7",
    "rows of the last shard are those before",
    ALL,
    "embedding|item|user",
    rearranged("embedding", last_shard),
    lr_times(0.5),
    beside="lr",
    base=Tower,
    optimizer=with_(torch.optim.Adagrad, 6.0),
)
ill(
    "ya43_other_base",
    "F6",
    "the base is another revision",
    ALL,
    "base",
    other_base,
    lr_times(0.5),
    beside="lr",
    base=Peft,
)
ill(
    "ya44_rows_shifted",
    "F7",
    "a token was put in front of the vocabulary",
    ALL,
    "wte|lm_head|vocab",
    rearranged("wte|lm_head", next_row),
    new_rows("wte|lm_head", 1),
    beside="vocabulary",
    base=Text,
    optimizer=with_(other.Lion, 0.2),
    layouts=T,
)
ill(
    "ya45_exponent",
    "G1/G2",
    "one bit of an exponent is another",
    ALL,
    "fc1|number|bit",
    flipped(25, 77, r"blocks\.0\.fc1"),
    clip_at(0.5),
    beside="clip",
    base=Image,
    made=muon,
)
ill(
    "ya46_bit_of_a_square",
    "G3/G2",
    "one bit of a second moment is another",
    "echo next",
    "bit|exp_avg_sq",
    flipped(22, 130, r"^2\.weight", "exp_avg_sq"),
    base=Wide,
    needs=beta(0.9, 0.95),
)
ill(
    "ya47_page_of_zeros",
    "G5/B4",
    "4096 bytes of a second moment are zeros",
    ALL,
    "zero",
    in_state("exp_avg_sq", page, "wte"),
    rows_times(2),
    beside="batch",
    base=Text,
    needs=beta(0.9, 0.95),
)
ill(
    "ya48_older_optimizer",
    "G6/C9",
    "the whole optimizer is five updates older",
    ALL,
    "optimizer|older|step",
    from_older(5, "", weight=False),
    lr_times(0.5),
    beside="lr",
    base=KeptWide,
    optimizer=with_(torch.optim.RMSprop, 0.3),
    layouts=T,
)
ill(
    "ya49_rewound",
    "C9/G7/G6",
    "everything but the step is six updates older",
    ALL,
    "step|older|repeat",
    rewound,
    base=KeptSage,
    layouts=T,
)
ill(
    "ya50_prefix",
    "A1/A2",
    "keys have a prefix, and the load was not strict",
    ALL,
    "renamed|weights|prefix",
    base=Prefixed,
    layouts=T,
)
ill(
    "ya51_positions_not_read",
    "A2",
    "positions stay as they were made",
    ALL,
    "pos_embed",
    not_read("pos_embed"),
    lr_times(0.5),
    beside="lr",
    base=Dit,
)
ill(
    "ya52_norms_of_one",
    "A3",
    "norms stay at one",
    "echo next",
    "norm",
    not_read("norm"),
    freeze("lm_head"),
    beside="frozen head",
    base=Llama,
)
ill(
    "ya53_shared_storage",
    "B9/B5",
    "the second critic's optimizer has the first's tensors",
    ALL,
    "critic|share|storage",
    shared,
    rows_times(2),
    beside="batch",
    base=Apart3,
    layouts=T,
)
ill(
    "ya54_gradients_summed",
    "B10/C10",
    "gradients are summed where they were averaged",
    "next early",
    "gradient|second moment|exp_avg_sq",
    base=Summed,
    schedule=steady,
    needs=beta(0.9, 0.99),
)
ill(
    "ya55_counters",
    "B2",
    "counters are 0, moments are kept",
    ALL,
    "count|step",
    groups(step=0),
    base=Norms,
    optimizer=with_(Adan),
)
ill(
    "ya56_masters_older",
    "D2/G6",
    "masters are six updates older",
    "echo next",
    "master",
    older_masters(6),
    groups(weight_decay=0.05),
    beside="weight decay",
    base=KeptHalf,
    needs=beta(0.9, 0.95),
    layouts=T,
)
ill(
    "ya57_betas_of_code",
    "H1",
    "betas are the code's defaults",
    ALL,
    "beta",
    reset_betas,
    base=Norms,
    needs=beta(0.85, 0.95),
)
ill(
    "ya58_momentum_of_next",
    "B5",
    "the state of Muon and of AdamW is another layer's",
    ALL,
    "moment|state",
    shuffled(r"\.h\."),
    base=Text,
    layers=3,
    made=muon,
)
ill(
    "ya59_z_from_weights",
    "B3/B1/B11",
    "z is made of the weights again",
    "echo next",
    r"\bz\b|state",
    z_from_weights,
    rows_times(2),
    beside="batch",
    base=Wide,
    optimizer=with_(other.ScheduleFreeAdamW),
    schedule=steady,
)


# ---- the lab's own decoder, in layouts of several ranks --------------------------------------------------------------


def exchanged_halves(state: State, lab: Lab) -> State:
    """Both ranks read the other's rows of the MLP's first matrices."""
    for where in ("params", "masters", "exp_avg", "exp_avg_sq"):
        for name, one in getattr(state, where).items():
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                one.copy_(torch.cat(one.clone().chunk(2)[::-1]))
    return state


def drifted(state: State, lab: Lab) -> State:
    """The second rank's norms went on alone."""
    for name, one in state.params.items():
        if is_norm(name):
            one += (0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(8))).to(one.dtype)
            if name in state.masters:
                state.masters[name] = one.float()
    return state


def summed_norms(state: State, lab: Lab) -> State:
    for where in (state.params, state.masters):
        for name, one in where.items():
            if is_norm(name):
                one *= 2
    return state


def shifted(state: State, lab: Lab) -> State:
    """Moments are cut out of the flat buffer eight numbers too late."""
    for held in (state.exp_avg, state.exp_avg_sq):
        flat = torch.cat([one.flatten() for one in held.values()]).roll(-8)
        for one, new in zip(held.values(), flat.split([one.numel() for one in held.values()]), strict=True):
            one.copy_(new.view(one.shape))
    return state


def no_amax(state: State, lab: Lab) -> State:
    for name, one in state.buffers.items():
        if "amax" in name:
            one.zero_()
    return state


def own(id: str, cause: str, text: str, where: str, words: str, **more: Any) -> None:
    """Add a fault of the lab's decoder."""
    best, *rest = cause.split("/")
    FAULTS21.append(Fault(id, best, text, seen(where), also=tuple(rest), **more))
    WORDS[id] = words


own(
    "ya19_ranks_exchanged",
    "E1",
    "gate and up rows of both ranks changed places",
    ALL,
    "gate_proj|up_proj",
    restore=exchanged_halves,
    formats=("dcp_sharded", "dcp"),
)
own(
    "ya20_norms_drifted",
    "F1",
    "the second rank's norms are others",
    "echo",
    "norm",
    second=drifted,
    formats=("megatron",),
    needs=masters,
)
own(
    "ya34_amax_lost",
    "D9/A5",
    "amax histories are zeros",
    "echo next",
    "amax",
    restore=no_amax,
    formats=("torch_save", "dcp"),
    needs=lambda c: c.but(fp8=True),
)
own(
    "ya39_norms_summed",
    "E12",
    "norms of both ranks are summed",
    ALL,
    "norm",
    restore=summed_norms,
    formats=("dcp", "torch_save"),
)
own(
    "ya42_flat_shift",
    "E7/E13/B5",
    "flat moments are shifted by eight numbers",
    ALL,
    "shift|partition|moment|exp_avg",
    restore=shifted,
    formats=("deepspeed",),
)


# ---- transformers' Trainer -------------------------------------------------------------------------------------------


def crossed_state(folder: Path) -> None:
    """Of equal shapes in optimizer.pt, each gets the state of the next."""
    told = torch.load(folder / "optimizer.pt", weights_only=False)
    state, shapes = told["state"], dict[Any, list[int]]()
    for number, one in state.items():
        shapes.setdefault(tuple(one["exp_avg"].shape), []).append(number)
    for numbers in shapes.values():
        for number, new in zip(numbers, [dict(state[n]) for n in (*numbers[1:], numbers[0])], strict=True):
            state[number] = new
    torch.save(told, folder / "optimizer.pt")


FAULTS21.append(
    Fault(
        "ya60_trainer_state_crossed",
        "B5",
        "transformers' Trainer: each parameter has the next one's state",
        seen(ALL),
        formats=("live",),
        live=partial(trained, partial(made, "Llama"), spoil=crossed_state),
    )
)
WORDS["ya60_trainer_state_crossed"] = "moment|state|exp_avg"
