"""Faults of the eighteenth half: more than half of them happen together with an innocent change.

``WORDS`` has for each what a right sentence must contain, ``BESIDE`` the innocent change. In a pair a fault of moments
counts as shown after one update, where gradients from both moments must agree, and after twenty only where beta2 is
.999 and many second moments are less than one that only decayed; weights count where they moved further than twenty
rates allow.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.lab import opened18_nets as nets
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.hugging import made, trained
from tests.lab.live import fault
from tests.lab.live_healthy import optim, plain
from tests.lab.opened18_nets import (
    after,
    bf16,
    exchanged,
    grown,
    held,
    initial,
    larger,
    lost,
    moments,
    ordered,
    paced,
    placed,
    probed,
    regrouped,
    regularised,
    restarted,
    stale,
    still,
    weights,
)
from tests.lab.optimizers import AdamW8bit, Lion, ScheduleFreeAdamW
from tests.lab.state import State

__all__ = ["BESIDE", "FAULTS18", "WORDS"]

WORDS: dict[str, str] = {}
BESIDE: dict[str, str] = {}

SLOW = {"lr": 1e-3}
LONG = {"betas": (0.9, 0.999)}
HEADS = {"heads": 4, "groups": 2, "hidden": 32, "ffn": 64, "lr": 1e-3}
ALWAYS, LOAD, NEAR, FAR = "echo next early", "echo", "echo next", "echo next early"
FILES = ("torch_save", "lightning")


def case(id: str, cause: str, text: str, where: str, words: str, *, beside: str = "", **more: Any) -> Fault:
    WORDS[id.split("_")[0]] = words
    if beside:
        BESIDE[id.split("_")[0]] = beside
    return fault(id, cause, f"{text}; {beside}" if beside else text, where, **more)


def other(id: str, words: str, beside: str, made: Fault) -> Fault:
    """Record the words and the innocent change of a fault that is not made by :func:`case`."""
    WORDS[id] = words
    if beside:
        BESIDE[id] = beside
    return made


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def averaged(self: Any) -> None:
    for n, w in weights(self).items():
        w.copy_(self.extra["ema"][n])


def average_anew(self: Any) -> None:
    self.extra["ema"] = {n: w.detach().clone() for n, w in weights(self).items()}


def taught(self: Any) -> None:
    for n, w in weights(self, "^student").items():
        w.copy_(dict(self.module.named_parameters())[n.replace("student", "teacher")])


def ticked(self: Any) -> None:
    """The schedule is stepped once for the load and once for the epoch."""
    for one in self.schedules:
        one.step()
        one.step()


def untied(self: Any) -> None:
    self.module.embed_out.weight = nn.Parameter(self.module.embed_in.weight.detach().clone())


def merged_again(self: Any) -> None:
    for layer in self.module.values():
        layer.base_layer.weight += 2 * layer.lora_B.weight @ layer.lora_A.weight


def revised(self: Any) -> None:
    for n, (name, w) in enumerate(weights(self, "base_layer").items()):
        assert name
        w += 0.03 * nets.normal(600 + n, *w.shape)


def strange_state(self: Any) -> None:
    """The optimizer's file is that of another run of the same shape."""
    run = type(self)(self.config.but(seed=self.config.seed + 9))
    with torch.enable_grad():
        run.extra["sampler"]["seed"] = 77
        run.run(self.step)
    for mine, theirs in zip(self.module.parameters(), run.module.parameters(), strict=True):
        self.optimizers[0].state[mine] = run.optimizers[0].state[theirs]


def rebuilt(self: Any) -> None:
    for w in weights(self).values():
        held(self, w)["master_param"] = w.detach().float()


def masters_kept(self: Any) -> None:
    """The weights come from an older save, the masters from this one: they fit again after an update."""
    old = self.older()["model"]
    for n, w in weights(self).items():
        w.copy_(old[n])


def same_noise(self: Any) -> None:
    told = self.extra["rng_state"]
    told["rank1"] = told["rank0"].clone()


def first_noise(self: Any) -> None:
    self.extra["rng_state"] = {f"rank{n}": nets.source(self.config.seed + n).get_state() for n in range(2)}


def scale_anew(self: Any) -> None:
    self.extra["scaler"] |= {"scale": 65536.0, "_growth_tracker": 0}


def flat(by: int) -> nets.Change:
    """The flat buffer of each moment is read from a place further on."""

    def change(self: Any) -> None:
        ws = list(weights(self).values())
        for key in ("exp_avg", "exp_avg_sq"):
            whole = torch.cat([held(self, w)[key].flatten() for w in ws]).roll(-by)
            for w, part in zip(ws, whole.split([w.numel() for w in ws]), strict=True):
                held(self, w)[key] = part.view(w.shape).clone()

    return change


def half_rate(self: Any) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] *= 0.25


def stretched(self: Any) -> None:
    for one in self.schedules:
        one.T_max = 3 * one.T_max


def cosine(self: Any, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total)


def counted(by: Any) -> nets.Change:
    def change(self: Any) -> None:
        self.step = by(self.step)

    return change


def flipped(self: Any) -> None:
    """The top bit of one exponent."""
    w = self.module["rnn"].weight_hh_l0
    bits = w.data.view(torch.int32)
    bits[3, 5] ^= 1 << 30


def fused(w: torch.Tensor) -> torch.Tensor:
    """Rows head by head, read as all of q, all of k, all of v."""
    return w.view(3, 4, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)


def paired(w: torch.Tensor) -> torch.Tensor:
    """Halves of a head become neighbours."""
    return w.view(-1, 2, 4, w.shape[1]).transpose(1, 2).reshape(w.shape)


def swapped(w: torch.Tensor) -> torch.Tensor:
    return w.roll(w.shape[-2] // 2, -2)


def joined(w: torch.Tensor) -> torch.Tensor:
    """Of two ranks: gate, up, gate, up."""
    return w.view(2, 2, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)


def regated(w: torch.Tensor) -> torch.Tensor:
    r, z, n = w.chunk(3)
    return torch.cat([z, r, n])


def floored(w: torch.Tensor) -> torch.Tensor:
    """Four shards of 18, 18, 18 and 16 rows, each read as 17."""
    return torch.cat([w[0:17], w[18:35], w[36:53], w[54:70], 0.02 * nets.normal(4, 3, w.shape[1])])


def regrouped_heads(self: Any) -> None:
    """Query heads 1 and 2 change places, in the rows of q and the columns of o."""

    def rows(w: torch.Tensor) -> torch.Tensor:
        return w.view(4, 8, -1)[[0, 2, 1, 3]].reshape(w.shape)

    ordered("q_proj", rows)(self)
    ordered("o_proj", lambda w: rows(w.T).T)(self)


def muon(self: Any) -> list[torch.optim.Optimizer]:
    named, c = dict(self.module.named_parameters()), self.config
    inner = [w for n, w in named.items() if w.ndim == 2 and n.startswith("layers")]
    rest = [w for n, w in named.items() if w.ndim != 2 or not n.startswith("layers")]
    return [torch.optim.Muon(inner, lr=4 * c.lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=c.lr, betas=c.betas)]


def constant(self: Any, optimizer: Any) -> Any:
    return None


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


# ---- together with an innocent change --------------------------------------------------------------------------------

BOTH = [
    case(
        "va01_average_sampled",
        "F4",
        "the average is left in the model after sampling",
        NEAR,
        "averag|EMA",
        beside="half the learning rate",
        base=nets.Denoiser,
        loaded=after(averaged, paced(0.5)),
        needs=SLOW,
    ),
    case(
        "va02_graph_moments",
        "B5",
        "moments of the layers in reverse order",
        FAR,
        "wrong parameter|other parameter",
        beside="twice the batch",
        base=nets.Ring,
        layouts=("dcp",),
        needs=LONG,
        loaded=after(exchanged("convs.0", "convs.2", "moments"), larger()),
    ),
    case(
        "va03_schedule_twice",
        "C3",
        "the schedule is stepped twice on load",
        ALWAYS,
        "schedule",
        beside="embeddings frozen",
        base=nets.Writer,
        layouts=FILES,
        loaded=after(ticked, still("embed_in|position")),
    ),
    case(
        "va04_fused_by_head",
        "E4",
        "fused QKV read as q, k, v one after the other",
        FAR,
        "QKV",
        beside="a third of the learning rate",
        base=nets.Writer,
        needs=SLOW,
        loaded=after(ordered("query_key_value", fused), paced(1 / 3)),
    ),
    case(
        "va05_expert_gates",
        "E3",
        "gate and up of the fused experts are exchanged",
        FAR,
        "gate and up",
        beside="twice the batch",
        base=nets.Mixture,
        needs=SLOW,
        loaded=after(ordered("gate_up_proj", swapped), larger()),
    ),
    case(
        "va06_stale_shard",
        "G6",
        "the file of the last layer is of an older save, weights and moments",
        NEAR,
        "different saves|older|stale",
        beside="half the learning rate",
        base=nets.Writer,
        keeps=True,
        layouts=("torch_save",),
        loaded=after(stale(r"^layers\.2"), paced(0.5)),
        also=("G7",),
    ),
    case(
        "va07_data_again",
        "C6",
        "the sampler begins at 0",
        ALWAYS,
        "restarted|beginning",
        beside="1.5 times the learning rate",
        base=nets.Photos,
        loaded=after(placed(index=0), paced(1.5)),
    ),
    case(
        "va08_scale_lost",
        "D8",
        "the loss scale is that of a new scaler",
        LOAD,
        "loss scale",
        beside="twice the batch",
        base=nets.Scaled,
        loaded=after(scale_anew, larger()),
    ),
    case(
        "va09_noise_again",
        "C8",
        "the generators of the dropout begin anew",
        LOAD,
        "[Rr]andom",
        beside="half the learning rate",
        base=nets.Noisy,
        loaded=after(first_noise, paced(0.5)),
    ),
    case(
        "va10_masters_rebuilt",
        "D1",
        "the masters are cast from bf16",
        NEAR,
        "masters were rebuilt|rebuilt",
        beside="twice the weight decay",
        base=nets.Halved,
        layouts=FILES,
        loaded=after(rebuilt, regularised),
    ),
    case(
        "va11_decay_exchanged",
        "B7",
        "weight decay of the two groups is exchanged",
        ALWAYS,
        "group|weight decay",
        beside="the first layer frozen",
        base=nets.Writer,
        layouts=FILES,
        also=("C5",),
        loaded=after(still(r"^layers\.0"), lambda self: _decays_exchanged(self)),
    ),
    case(
        "va12_untied",
        "F2",
        "the head becomes a tensor of its own, which no optimizer has",
        "next early",
        "no longer one|Embedding and head|tied",
        beside="half the learning rate",
        base=nets.Writer,
        tied=True,
        layouts=FILES,
        loaded=after(paced(0.5), untied),
    ),
    case(
        "va13_statistics_lost",
        "A5",
        "running statistics of the batch norms are at their start",
        ALWAYS,
        "[Bb]uffer|running",
        beside="half the learning rate",
        base=nets.Photos,
        loaded=after(initial("running_|num_batches"), paced(0.5)),
    ),
    case(
        "va14_adapters_merged",
        "F5",
        "adapters are merged into the base and kept beside it too",
        ALWAYS,
        "merged|adapter",
        beside="twice the batch",
        base=nets.Tuned,
        needs=LONG,
        loaded=after(merged_again, larger()),
    ),
    case(
        "va15_strange_optimizer",
        "B6",
        "the optimizer's state is another run's",
        FAR,
        "moments|optimizer",
        beside="half the learning rate",
        base=nets.Desk,
        needs=LONG,
        also=("B5", "G6"),
        loaded=after(strange_state, paced(0.5)),
    ),
    case(
        "va16_counters_doubled",
        "C9",
        "counters of the optimizer are doubled",
        ALWAYS,
        "step|counter",
        beside="twice the batch",
        base=nets.Ring,
        layouts=("dcp",),
        also=("B2",),
        loaded=after(moments("step", lambda t: 2 * t), larger()),
    ),
    case(
        "va17_average_anew",
        "A5",
        "the average begins anew from the weights",
        NEAR,
        "averag|EMA",
        beside="half the learning rate",
        base=nets.Denoiser,
        also=("A2", "F4"),
        loaded=after(average_anew, paced(0.5)),
    ),
    case(
        "va18_absmax_shifted",
        "B11",
        "the scales of the 8-bit blocks are those of the next block",
        ALWAYS,
        "compressed|8-bit|scale|absmax",
        beside="half the learning rate",
        base=nets.Desk,
        also=("B5",),
        optimizer=plain(AdamW8bit),
        layouts=FILES,
        loaded=after(moments("absmax1 absmax2", lambda x: x.roll(1)), paced(0.5)),
    ),
    case(
        "va19_ranks_alike",
        "C8",
        "both ranks get rank 0's generator",
        "alone echo next early late",
        "[Rr]andom",
        beside="twice the batch",
        base=nets.Noisy,
        loaded=after(same_noise, larger()),
    ),
    case(
        "va20_layers_crossed",
        "E9",
        "two layers in each other's place, moments too",
        ALWAYS,
        "[Ll]ayers",
        beside="half the learning rate",
        base=nets.Writer,
        needs=SLOW,
        loaded=after(exchanged("layers.0", "layers.2"), paced(0.5)),
    ),
    case(
        "va21_experts_moved",
        "E10",
        "experts turned by one, the router as it was",
        ALWAYS,
        "[Ee]xperts",
        beside="twice the batch",
        base=nets.Mixture,
        needs=SLOW,
        loaded=after(ordered("gate_up_proj|down_proj", lambda w: w.roll(1, 0)), larger()),
    ),
    case(
        "va22_squares_lost",
        "B4",
        "exp_avg_sq is zero",
        FAR,
        "exp_avg_sq|second moment",
        beside="twice the weight decay",
        base=nets.Speech,
        needs=LONG,
        loaded=after(moments("exp_avg_sq", zeros), regularised),
    ),
    case(
        "va23_moments_lost",
        "B3",
        "moments are zero, counters kept",
        FAR,
        "moments",
        beside="the first convolution frozen",
        base=nets.Photos,
        needs=LONG,
        layouts=FILES,
        loaded=after(moments("exp_avg exp_avg_sq", zeros), still("^conv1")),
    ),
    case(
        "va24_counters_zero",
        "B2",
        "counters are zero, moments kept",
        ALWAYS,
        "counter|step",
        beside="half the learning rate",
        base=nets.Codebook,
        loaded=after(moments("step", zeros), paced(0.5)),
    ),
    case(
        "va25_critic_unloaded",
        "B1",
        "the critics' optimizer is new",
        ALWAYS,
        "optimizer|moments",
        beside="half the learning rate",
        base=nets.Pilot,
        also=("B3",),
        layouts=FILES,
        loaded=after(lost("^critic"), paced(0.5)),
    ),
    case(
        "va26_targets_initial",
        "A2",
        "the target critics keep random weights",
        NEAR,
        "not loaded|initial",
        beside="half the learning rate",
        base=nets.Pilot,
        also=("A5",),
        needs=SLOW,
        loaded=after(initial("^target_critic"), paced(0.5)),
    ),
    case(
        "va27_head_random",
        "A2",
        "the class head is not loaded, its momentum is",
        NEAR,
        "not loaded|initial",
        beside="twice the batch",
        base=nets.Boxes,
        needs=SLOW,
        loaded=after(initial("^cls_head"), larger()),
    ),
    case(
        "va28_rotary_pairs",
        "E5",
        "rows of q and k are those of the interleaved rotary embedding",
        FAR,
        "rotary",
        beside="twice the weight decay",
        base=nets.Plain,
        needs=HEADS,
        also=("E1",),
        loaded=after(ordered("q_proj|k_proj", paired), regularised),
    ),
    case(
        "va29_tokens_in_front",
        "F7",
        "new rows come before the old ones",
        ALWAYS,
        "vocabulary|[Rr]ows",
        beside="six more tokens",
        base=nets.Writer,
        needs=SLOW,
        layouts=FILES,
        loaded=after(grown("embed_in|embed_out", 6, "both")),
    ),
    case(
        "va30_moments_in_front",
        "E13",
        "new rows of the moments come before the old ones, of the weights after",
        ALWAYS,
        "moments|optimizer",
        beside="six more tokens",
        base=nets.Writer,
        needs=LONG,
        layouts=FILES,
        also=("B5", "F7", "E1"),
        loaded=after(grown("embed_in|embed_out", 6, "moments")),
    ),
    case(
        "va31_norms_at_one",
        "A3",
        "norm weights are 1",
        NEAR,
        "[Nn]orm",
        beside="a new head",
        base=nets.Writer,
        layouts=FILES,
        loaded=after(initial("norm"), probed),
    ),
    case(
        "va32_order_changed",
        "C7",
        "the sampler has another seed",
        ALWAYS,
        "order",
        beside="half the learning rate",
        base=nets.Market,
        layouts=FILES,
        loaded=after(placed(seed=902), paced(0.5)),
    ),
    case(
        "va33_balance_lost",
        "A5",
        "the bias that balances the experts is zero",
        LOAD,
        "[Bb]uffer|bias",
        beside="half the learning rate",
        base=nets.Mixture,
        loaded=after(initial("score_correction"), paced(0.5)),
    ),
    case(
        "va34_through_bf16",
        "D7",
        "fp32 weights come from a bf16 export",
        NEAR,
        "narrower|bf16|cast|rounded",
        beside="twice the batch",
        base=nets.Plain,
        loaded=after(ordered("", bf16, "weights"), larger()),
    ),
    case(
        "va35_moments_rounded",
        "D4",
        "moments were kept in bf16 on the way",
        NEAR,
        "rounded|16 bit",
        beside="half the learning rate",
        base=nets.Ring,
        loaded=after(moments("exp_avg exp_avg_sq", bf16), paced(0.5)),
    ),
    case(
        "va36_base_revised",
        "F6",
        "the frozen base is another revision",
        ALWAYS,
        "base|revision",
        beside="half the learning rate",
        base=nets.Tuned,
        loaded=after(revised, paced(0.5)),
    ),
    case(
        "va37_new_group_first",
        "B7",
        "a layer moves to the group without weight decay",
        ALWAYS,
        "group",
        beside="twice the batch",
        base=nets.Writer,
        layouts=FILES,
        loaded=after(regrouped(r"^layers\.1.*(dense|down)"), larger()),
    ),
    case(
        "va38_twin_states",
        "B5",
        "states of the twin critics are exchanged",
        FAR,
        "wrong parameter|other parameter",
        beside="new stage: the schedule begins anew",
        base=nets.Pilot,
        needs=LONG,
        layouts=FILES,
        loaded=after(exchanged("critic1", "critic2", "moments"), restarted),
    ),
]


def _decays_exchanged(self: Any) -> None:
    a, b = self.optimizers[0].param_groups
    a["weight_decay"], b["weight_decay"] = b["weight_decay"], a["weight_decay"]


# ---- alone -----------------------------------------------------------------------------------------------------------

ALONE = [
    case(
        "va39_convolutions_turned",
        "E1",
        "input and output channels of the convolutions change places",
        ALWAYS,
        "order|axis|transpos",
        base=nets.Photos,
        layouts=("dcp",),
        needs=SLOW,
        loaded=after(ordered("blocks.*conv", lambda w: w.transpose(0, 1))),
    ),
    case(
        "va40_gates_turned",
        "E1",
        "the GRU's first two gates are in another library's order",
        ALWAYS,
        "order|[Bb]locks",
        base=nets.Speech,
        needs=SLOW,
        also=("E3",),
        loaded=after(ordered("rnn", regated)),
    ),
    case(
        "va41_query_groups",
        "E6",
        "query heads of the two key groups change places",
        FAR,
        "groups|[Qq]uery",
        base=nets.Plain,
        needs=HEADS,
        also=("E1",),
        loaded=after(regrouped_heads),
    ),
    case(
        "va42_exponent",
        "G1",
        "the top bit of an exponent flips",
        "alone echo next early",
        "damaged|flipped|bit",
        base=nets.Speech,
        also=("G2",),
        clip=0.0,
        loaded=after(flipped),
    ),
    case(
        "va44_items_shifted",
        "F7",
        "the table of items is one row off, its sums are not",
        ALWAYS,
        "shift|[Rr]ows",
        base=nets.Market,
        also=("E1", "E13"),
        layouts=FILES,
        loaded=after(ordered("tables.item", lambda w: w.roll(1, 0), "weights")),
    ),
    case(
        "va45_muon_crossed",
        "B5",
        "Muon's momentum of two layers is exchanged",
        LOAD,
        "wrong parameter|other parameter",
        base=nets.Writer,
        made=muon,
        layouts=FILES,
        loaded=after(
            exchanged("layers.0.dense", "layers.2.dense", "moments"),
            exchanged("layers.0.gate_up", "layers.2.gate_up", "moments"),
        ),
    ),
    case(
        "va46_lion_new",
        "B3",
        "Lion's average is zero",
        LOAD,
        "moment|optimizer|exp_avg",
        base=nets.Ring,
        also=("B1",),
        optimizer=plain(Lion, factor=0.2),
        loaded=after(moments("exp_avg", zeros)),
    ),
    case(
        "va47_free_point",
        "B6",
        "schedule-free's point z is set to the weights",
        LOAD,
        "z|moment|optimizer",
        base=nets.Desk,
        also=("B3", "B1"),
        optimizer=plain(ScheduleFreeAdamW),
        schedule=constant,
        layouts=FILES,
        loaded=after(lambda self: _points(self)),
    ),
    case(
        "va48_factors_crossed",
        "B5",
        "Adafactor's columns of two layers are exchanged",
        NEAR,
        "wrong parameter|other parameter",
        base=nets.Writer,
        also=("B6",),
        optimizer=optim(torch.optim.Adafactor),
        layouts=FILES,
        loaded=after(lambda self: _columns(self)),
    ),
    case(
        "va49_squares_rms",
        "B4",
        "RMSprop's squares are zero",
        ALWAYS,
        "square|second moment",
        base=nets.Photos,
        also=("B3", "B1"),
        optimizer=optim(torch.optim.RMSprop, momentum=0.9),
        loaded=after(moments("square_avg", zeros)),
    ),
    case(
        "va50_backbone_momentum",
        "B3",
        "momentum of the backbone alone is lost",
        LOAD,
        "moment|optimizer",
        base=nets.Boxes,
        also=("B1",),
        layouts=FILES,
        loaded=after(moments("momentum_buffer", zeros, "backbone")),
    ),
    case(
        "va51_rate_unset",
        "B8",
        "the optimizer's rate is a quarter of the schedule's until its next step",
        LOAD,
        "learning rate|schedule",
        base=nets.Ring,
        layouts=("dcp",),
        loaded=after(half_rate),
    ),
    case(
        "va52_longer",
        "C4",
        "the cosine is three times as long by a wrong count of epochs",
        ALWAYS,
        "length|longer|curve",
        base=nets.Speech,
        schedule=cosine,
        also=("H1",),
        layouts=("torch_save",),
        loaded=after(stretched),
    ),
    case(
        "va53_student_taught",
        "F4",
        "the student gets the teacher's weights",
        NEAR,
        "averag|EMA|teacher",
        base=nets.Siamese,
        needs=SLOW,
        also=("A2",),
        loaded=after(taught),
    ),
    case(
        "va54_queue_lost",
        "A5",
        "queue, its pointer and the centre are at their start",
        LOAD,
        "[Bb]uffer|queue",
        base=nets.Siamese,
        also=("A2",),
        loaded=after(initial("queue|center")),
    ),
    case(
        "va55_clusters_lost",
        "A5",
        "running sums of the code table are at their start",
        LOAD,
        "[Bb]uffer|cluster",
        base=nets.Codebook,
        also=("A2",),
        loaded=after(initial("cluster_")),
    ),
    case(
        "va56_steps_twice",
        "C9",
        "the trainer counts the steps of two ranks",
        ALWAYS,
        "step",
        base=nets.Denoiser,
        loaded=after(counted(lambda step: 2 * step)),
    ),
    case(
        "va57_weights_older",
        "D3",
        "the bf16 weights come from an older save, the masters do not",
        "echo alone",
        "match|masters",
        base=nets.Halved,
        keeps=True,
        layouts=("torch_save",),
        also=("G6", "D2"),
        loaded=after(masters_kept),
    ),
    case(
        "va58_flat_shifted",
        "E7",
        "the flat moments are read five numbers further on",
        FAR,
        "[Ff]lat|shift",
        base=nets.Desk,
        needs=LONG,
        also=("E13", "B5"),
        loaded=after(flat(5)),
    ),
]


def _points(self: Any) -> None:
    for w in weights(self).values():
        held(self, w)["z"] = w.detach().clone()


def _columns(self: Any) -> None:
    named = dict(self.module.named_parameters())
    for part in ("dense", "gate_up", "down", "query_key_value"):
        a, b = held(self, named[f"layers.0.{part}.weight"]), held(self, named[f"layers.1.{part}.weight"])
        a["col_var"], b["col_var"] = b["col_var"], a["col_var"]


# ---- other layouts and trainers --------------------------------------------------------------------------------------


def _drifted(state: State, lab: Lab) -> State:
    """Norms of the second replica went on from another gradient."""
    found = state.clone()
    for name in found.params:
        if name.endswith("layernorm.weight"):
            noise = torch.randn(found.params[name].shape, generator=nets.source(lab.rng.randrange(1 << 20)))
            found.params[name] = (found.params[name].float() * (1 + 0.02 * noise)).to(found.params[name].dtype)
    return found


def _recent(state: State, lab: Lab) -> State:
    """Masters and moments of the save before."""
    found, old = state.clone(), lab.run.recent
    found.masters, found.exp_avg, found.exp_avg_sq = old.masters, old.exp_avg, old.exp_avg_sq
    return found


def _squares(folder: Path) -> None:
    """The optimizer's file is written again without its squares."""
    path = folder / "optimizer.pt"
    held = torch.load(path, weights_only=True)
    for one in held["state"].values():
        one["exp_avg_sq"] = torch.zeros_like(one["exp_avg_sq"])
    torch.save(held, path)


def _hugging(folder: Path, rng: random.Random, k: int, name: str, **more: Any) -> None:
    trained(partial(made, name), folder, rng, k, **more)


OTHER = [
    other(
        "va43",
        "different saves|older|stale|masters",
        "",
        Fault(
            "va43_rank_of_last_week",
            "G6",
            "rank 1 of two ZeRO ranks reads its partition from the save before",
            seen(NEAR),
            second=_recent,
            formats=("deepspeed",),
            also=("D2",),
        ),
    ),
    other(
        "va59",
        "drift|[Rr]eplica",
        "",
        Fault(
            "va59_norms_drifted",
            "F1",
            "norms of the second tensor-parallel rank are others",
            seen("alone echo"),
            second=_drifted,
            formats=("megatron",),
            weights=True,
            needs=masters,
        ),
    ),
    other(
        "va60",
        "exp_avg_sq|second moment",
        "another batch size",
        Fault(
            "va60_trainer_squares",
            "B4",
            "the Trainer's optimizer.pt comes without squares; another batch size",
            seen(FAR),
            formats=("live",),
            live=partial(_hugging, name="Llama", spoil=_squares, other_args={"per_device_train_batch_size": 8}),
        ),
    ),
]

FAULTS18 = [*BOTH, *ALONE, *OTHER]
assert len(FAULTS18) == len(WORDS) == 60
