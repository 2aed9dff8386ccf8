"""Faults of the nineteenth half: forty beside an innocent change of the same load, twenty alone.

Texts of the forty begin with ``beside``. What ``seen`` leaves out shows nothing there by any law that holds exactly:
momentum of twenty updates ago, a reset of a few steps' length, a rounding that twenty gradients cover.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.lab import opened19_nets as nets
from tests.lab import optimizers as other
from tests.lab.fault import Fault, Lab, seen
from tests.lab.hugging import made, trained
from tests.lab.live import fault
from tests.lab.opened19_nets import adam, begun, crossed, does, entries, forgot, iced, named, opt, put, rate, rows
from tests.lab.opened19_nets import turned as turn
from tests.lab.opened19_nets import words as more_words
from tests.lab.state import State

__all__ = ["FAULTS19"]

ALL = "echo next early"


def pairs(*stems: tuple[str, str]) -> list[tuple[str, str]]:
    return [(f"{a}.{leaf}", f"{b}.{leaf}") for a, b in stems for leaf in ("weight", "bias")]


def block(part: int) -> list[str]:
    leaves = ("ln_1", "ln_2", "attn.qkv", "attn.proj", "mlp.down_proj")
    return [f"blocks.{part}.{leaf}.{kind}" for leaf in leaves for kind in ("weight", "bias")] + [
        f"blocks.{part}.mlp.gate_up_proj.weight"
    ]


def swapped_decay(self: Any) -> None:
    one, two = self.optimizers[0].param_groups[:2]
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def foreign_moments(self: Any) -> None:
    theirs = nets.stranger(self)
    for mine, that in zip(named(self).values(), theirs.module.parameters(), strict=False):
        self.optimizers[0].state[mine] = copy.deepcopy(theirs.optimizers[0].state[that])


def detached(self: Any) -> None:
    """The schedule steps an optimizer that trains nothing."""
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))], "lr": g["lr"], "initial_lr": g["initial_lr"]}
        for g in self.optimizers[0].param_groups
    ]
    self.schedules[0].optimizer = torch.optim.SGD(groups, lr=0.1)


class Twice(nets.Vit):
    """Steps its schedule in the loop and in a callback, once it was resumed."""

    resumed = False

    def apply(self) -> None:
        super().apply()
        for one in self.schedules if self.resumed else ():
            one.step()


def twice(self: Any) -> None:
    self.resumed = True


def rewound(self: Any) -> None:
    self.step = 0


def shorter(self: Any) -> None:
    self.schedules[0].T_max = max(5, self.schedules[0].T_max // 4)


def cosine(self: Any, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total)


def z_lost(self: Any) -> None:
    for w in named(self).values():
        nets.state_of(self, w)["z"] = w.detach().clone()


def muon(self: Any) -> list[torch.optim.Optimizer]:
    inner = [w for n, w in self.module.named_parameters() if w.ndim == 2 and n.startswith("h.")]
    rest = [w for n, w in self.module.named_parameters() if w.ndim != 2 or not n.startswith("h.")]
    lr = self.config.lr
    return [torch.optim.Muon(inner, lr=4 * lr, weight_decay=0.01), torch.optim.AdamW(rest, lr=lr)]


def absmax_crossed(self: Any) -> None:
    for w in named(self).values():
        found = nets.state_of(self, w)
        if "absmax1" in found:
            found["absmax1"], found["absmax2"] = found["absmax2"], found["absmax1"]


def same_random(self: Any) -> None:
    self.extra["rng_states"] = [self.extra["rng_states"][0].clone() for _ in range(3)]


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """``[q; k; v]`` as if each head had its own three."""
    return x.view(3, 4, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def gate_last(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def rotary(self: Any) -> None:
    def how(heads: int) -> Any:
        return lambda x: x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)

    turn("q_proj", how(self.config.heads))(self)
    turn("k_proj", how(self.config.groups))(self)


def repeated_layer(self: Any) -> None:
    held = dict(self.module.named_parameters())
    for name, w in named(self, r"^h\.2\.").items():
        w.copy_(held[name.replace("h.2.", "h.1.")])


def flat_shift(self: Any) -> None:
    """Every moment from one flat buffer that is read 16 numbers too early."""
    for key in ("exp_avg", "exp_avg_sq"):
        held = [nets.state_of(self, w) for w in named(self).values()]
        flat = torch.cat([one[key].flatten() for one in held]).roll(16)
        parts = flat.split([one[key].numel() for one in held])
        for one, part in zip(held, parts, strict=True):
            one[key] = part.view(one[key].shape).clone()


def averaged(self: Any) -> None:
    for name, w in named(self).items():
        w.copy_(self.extra["ema"]["shadow"][name])


def untied(self: Any) -> None:
    self.module.lm_head.weight = nn.Parameter(self.module.wte.weight.detach().clone())
    self.optimizers[0].param_groups[0]["params"].append(self.module.lm_head.weight)


def merged_in(self: Any) -> None:
    for name in ("up_proj", "mid_proj", "down_proj"):
        one = self.module[name]
        one.base_layer.weight += 2 * one.lora_B["default"].weight @ one.lora_A["default"].weight


def revision(self: Any) -> None:
    for n, w in enumerate(named(self, r"(up|mid)_proj\.base_layer\.weight").values()):
        w += 0.01 * nets.dice(60 + n, *w.shape)


def page(self: Any) -> None:
    self.module.wte.weight.view(-1)[512 : 512 + 1024] = 0


def exponent(self: Any) -> None:
    self.module.wpe.weight[29, 7] *= 2.0**64


def second_bit(self: Any) -> None:
    w = self.module["visual"][0].weight
    nets.state_of(self, w)["exp_avg_sq"][11, 3] = nets.state_of(self, w)["exp_avg_sq"][11, 3].clamp(min=1e-9) * 2.0**32


def whole_save(self: Any) -> None:
    self.load(copy.deepcopy(self.past(6)))


def no_optimizer(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()
    (folder / "scheduler.pt").unlink()


def stale_rank(state: State, lab: Lab) -> State:
    found, old = state.clone(), lab.run.recent
    found.exp_avg, found.exp_avg_sq = old.exp_avg, old.exp_avg_sq
    return found


def drifted(state: State, lab: Lab) -> State:
    found = state.clone()
    for name, w in found.params.items():
        if "norm" in name:
            w.mul_(1.05)
            if name in found.masters:
                found.masters[name].mul_(1.05)
    return found


def no_amax(state: State, lab: Lab) -> State:
    found = state.clone()
    for name, one in found.buffers.items():
        one.copy_(torch.zeros_like(one) if "amax" in name else torch.ones_like(one))
    return found


def hugged(folder: Path, rng: random.Random, k: int) -> None:
    trained(partial(made, "Qwen2"), folder, rng, k, spoil=no_optimizer)


ams = opt(torch.optim.AdamW, amsgrad=True, betas=(0.9, 0.99))
V = adam(0.9, 0.999)
NN = adam(0.9, 0.99)

FAULTS19 = [
    fault(
        "wa01_vit_norms",
        "A3",
        "beside a lower lr: layer norms' weights stay at 1, their names were old ones",
        "echo next",
        base=nets.Vit,
        also=("A2", "A1"),
        loaded=does(begun(r"ln_\d\.weight"), rate(0.5)),
        why="blocks.N.ln_N.weight of the echo is 1; after 20 updates a reset of a few steps' length is covered",
    ),
    fault(
        "wa02_vit_positions",
        "A2",
        "beside a new head: pos_embed is not loaded",
        ALL,
        base=nets.Vit,
        loaded=does(begun("pos_embed"), nets.head),
        why="pos_embed is another random table, 0.28 away",
    ),
    fault(
        "wa03_vae_decoder",
        "A2",
        "the decoder of an autoencoder by RMSprop is not loaded",
        ALL,
        base=nets.Vae,
        also=("A1",),
        loaded=does(begun("decoder")),
        why="decoder.* is random, the encoder's is before's",
    ),
    fault(
        "wa04_speech_statistics",
        "A5",
        "beside a frozen LSTM: a batch norm's statistics begin anew",
        ALL,
        base=nets.Speaker,
        loaded=does(begun(r"frontend\.1\.(running|num)"), iced("lstm")),
        why="num_batches_tracked is 0, then k",
    ),
    fault(
        "wa05_q_statistics",
        "A5",
        "beside a larger batch: the statistics of observations begin anew",
        ALL,
        base=nets.Dqn,
        loaded=does(begun("running|count"), rows(2)),
        why="count is 1e-4, then k batches",
    ),
    fault(
        "wa06_head_state",
        "B1",
        "beside a new stage: the head's optimizer state is not loaded",
        ALL,
        base=nets.Chat,
        also=("B2", "B3"),
        loaded=does(forgot("lm_head"), nets.stage),
        why="no state of lm_head; its step is k later, elsewhere start + k",
    ),
    fault(
        "wa07_words_in_front",
        "B5",
        "beside more words: moments got the new rows in front, weights at the end",
        ALL,
        base=nets.Chat,
        needs=NN,
        also=("E13", "F7"),
        loaded=does(more_words("wte|lm_head", 8, shift=True)),
        why="exp_avg_sq of the echo is before's eight rows down; after 20 updates below 0.99^20 of before's",
    ),
    fault(
        "wa08_graph_by_name",
        "B5",
        "moments are given out in the order of the names",
        ALL,
        base=nets.Graphs,
        needs=V,
        loaded=does(crossed(pairs(*((f"convs.{n}.lin_src", f"convs.{n}.lin_dst") for n in range(3))))),
        why="lin_src holds lin_dst's moments of before and the other way",
    ),
    fault(
        "wa09_group_order",
        "B5",
        "beside a moved group: its blocks get each other's moments",
        ALL,
        base=nets.Vit,
        needs=NN,
        also=("E13", "E9"),
        loaded=does(crossed(list(zip(block(0), block(1), strict=True))), nets.own_group(r"blocks\.1")),
        why="blocks.0 holds the moments of blocks.1 of before",
    ),
    fault(
        "wa10_adagrad_sums",
        "B4",
        "sums of squares of the tables begin at 0, counters do not",
        ALL,
        base=nets.Shop,
        also=("B3", "B1"),
        loaded=does(entries("sum", nets.zeros, "emb_l")),
        why="sum falls, which it cannot",
    ),
    fault(
        "wa11_momentum_lost",
        "B1",
        "beside a larger batch: SGD's momentum is not loaded",
        "echo next",
        base=nets.Spotter,
        also=("B3",),
        loaded=does(forgot(), rows(2)),
        why="no momentum_buffer in the echo; a tenth of it after one update; nothing is left of it after 20",
    ),
    fault(
        "wa12_amsgrad_squares",
        "B4",
        "beside other betas: both second moments of AMSGrad are lost",
        ALL,
        base=nets.Vit,
        optimizer=ams,
        also=("B3",),
        loaded=does(entries("exp_avg_sq max_exp_avg_sq", nets.zeros), nets.group_set(betas=(0.95, 0.99))),
        why="max_exp_avg_sq falls, which it cannot",
    ),
    fault(
        "wa13_old_optimizer",
        "G6",
        "the optimizer's file is six updates older than the weights",
        ALL,
        base=nets.Clip,
        remembers=True,
        also=("C9", "B6"),
        loaded=does(nets.older("", 6, "moments")),
        why="optimizer steps are 6 below the trainer's, in all files",
    ),
    fault(
        "wa14_old_shard",
        "G6",
        "beside a higher lr: one layer's optimizer state is six updates old",
        ALL,
        base=nets.Chat,
        remembers=True,
        also=("C9", "B6"),
        loaded=does(nets.older(r"^h\.2\.", 6, "moments"), rate(1.5)),
        why="its steps are 6 below all others'",
    ),
    fault(
        "wa15_counted_twice",
        "C9",
        "beside more weight decay: optimizer steps are doubled",
        ALL,
        base=nets.Clip,
        also=("B2", "C3"),
        loaded=does(entries("step", lambda t: 2 * t), nets.group_set(weight_decay=lambda old: 2 * old + 0.01)),
        why="step of every parameter is twice the trainer's",
    ),
    fault(
        "wa16_nadam_counters",
        "B2",
        "beside a lower lr: NAdam's counters begin at 0",
        ALL,
        base=nets.Graphs,
        optimizer=opt(torch.optim.NAdam),
        loaded=does(entries("step", nets.zeros), rate(0.5)),
        why="step is 0, then k; moments are before's",
    ),
    fault(
        "wa17_muon_layers",
        "B5",
        "Muon's momentum of two layers is exchanged",
        "echo next",
        base=nets.Chat,
        made=muon,
        layouts=("torch_save", "folder"),
        also=("E9", "E13"),
        loaded=does(
            crossed([("h.0.attn.qkv.weight", "h.1.attn.qkv.weight"), ("h.0.attn.proj.weight", "h.1.attn.proj.weight")])
        ),
        why="each holds the other's momentum; 0.95^20 of it is covered by gradients",
    ),
    fault(
        "wa18_decay_groups",
        "B7",
        "beside a frozen table: the groups' weight decays are exchanged",
        ALL,
        base=nets.Chat,
        loaded=does(swapped_decay, iced("wpe")),
        why="param_groups: the vectors' has the decay",
    ),
    fault(
        "wa19_other_models_state",
        "B5",
        "beside a lower lr: the optimizer of another model is loaded",
        ALL,
        base=nets.Clip,
        needs=V,
        also=("B6", "G6"),
        loaded=does(foreign_moments, rate(0.7)),
        why="moments of the echo resemble nothing of before; exp_avg_sq falls below 0.98 of before's later",
    ),
    fault(
        "wa20_absmax_shifted",
        "B11",
        "beside a larger batch: 8-bit moments get the next block's absmax",
        ALL,
        base=nets.Coded,
        also=("B5", "E7"),
        loaded=does(entries("absmax1 absmax2", lambda x: x.roll(1)), rows(2)),
        why="absmax is before's, one block on, codes are before's",
    ),
    fault(
        "wa21_absmax_crossed",
        "B11",
        "absmax of first and second moments are exchanged",
        ALL,
        base=nets.Coded,
        loaded=does(absmax_crossed),
        why="absmax1 of the echo is before's absmax2 and the other way; absmax2 is a hundred times larger ever after",
    ),
    fault(
        "wa22_lr_held",
        "B8",
        "beside a larger batch: the schedule steps another optimizer object",
        "next early",
        base=nets.Clip,
        also=("C2",),
        loaded=does(detached, rows(2)),
        why="lr of the groups stays while _last_lr of the schedule goes on",
    ),
    fault(
        "wa23_z_lost",
        "B3",
        "schedule-free: z is made anew from the weights",
        "echo next",
        also=("B1", "B6"),
        base=nets.Bench,
        optimizer=opt(other.ScheduleFreeAdamW, 2.0),
        schedule=nets.no_schedule,
        loaded=does(z_lost),
        why="z equals the weights",
    ),
    fault(
        "wa24_actor_critic",
        "B5",
        "actor and critic get each other's optimizer state",
        ALL,
        base=nets.Duel,
        loaded=does(crossed(pairs(("actor.0", "critic.0"), ("actor.2", "critic.2")))),
        why="each holds the other's moments; the groups are right",
    ),
    fault(
        "wa25_moments_zero",
        "B3",
        "beside a new head: moments are zeros, counters are kept",
        ALL,
        base=nets.Clip,
        needs=V,
        also=("B1", "B4"),
        loaded=does(entries("exp_avg exp_avg_sq", nets.zeros), nets.head),
        why="both moments are 0 at the old step; exp_avg_sq falls below 0.98 of before's",
    ),
    fault(
        "wa26_stepped_twice",
        "C3",
        "beside a larger batch: the schedule is stepped twice an update",
        "next early",
        base=Twice,
        loaded=does(twice, rows(1.5)),
        why="last_epoch grows by 2k, the step by k",
    ),
    fault(
        "wa27_schedule_anew",
        "C1",
        "beside more words: the schedule is not loaded",
        ALL,
        base=nets.Chat,
        also=("C2",),
        fresh=("scheduler",),
        loaded=does(more_words("wte|lm_head", 6)),
        why="last_epoch is 0, then k",
    ),
    fault(
        "wa28_data_anew",
        "C6",
        "beside frozen layers: the sampler begins at the first batch",
        ALL,
        base=nets.Vit,
        loaded=does(put("sampler", index=0), iced(r"blocks\.0")),
        why="sampler.index is 0, then k, while consumed_samples goes on",
    ),
    fault(
        "wa29_order_anew",
        "C7",
        "beside a lower lr: the order of the data is drawn with another seed",
        ALL,
        base=nets.Graphs,
        loaded=does(put("sampler", seed=4242), rate(0.6)),
        why="sampler.seed is another",
    ),
    fault(
        "wa30_ranks_alike",
        "C8",
        "beside a higher lr: every rank gets the first one's generator",
        ALL,
        base=nets.Ranks,
        loaded=does(same_random, rate(2.0)),
        why="three equal rng_states, which differed before",
    ),
    fault(
        "wa31_trainer_step",
        "C9",
        "beside a smaller batch: the trainer counts from 0",
        ALL,
        base=nets.Speaker,
        loaded=does(rewound, rows(0.5)),
        why="step is 0, then k; optimizer, schedule and sampler go on",
    ),
    fault(
        "wa32_cosine_length",
        "C4",
        "the cosine's length is computed from a quarter of the epochs",
        ALL,
        base=nets.Clip,
        schedule=cosine,
        also=("C2",),
        loaded=does(shorter),
        why="T_max is a quarter",
    ),
    fault(
        "wa33_masters_rounded",
        "D1",
        "beside a lower lr: masters are cast from the bf16 weights",
        "echo next",
        base=nets.Half,
        loaded=does(entries("master_param", nets.rounded), rate(0.5)),
        why="every master is a bf16 number; after one update it is off before's by more than its step",
    ),
    fault(
        "wa34_moments_rounded",
        "D4",
        "beside a larger batch: moments went through bf16",
        "echo",
        base=nets.Vit,
        loaded=does(entries("exp_avg exp_avg_sq", nets.rounded), rows(2)),
        why="fp32 moments are bf16 numbers",
    ),
    fault(
        "wa35_frozen_stale",
        "D3",
        "beside a frozen embedding: its bf16 weights are six updates old",
        ALL,
        base=nets.Half,
        remembers=True,
        also=("G6", "A2"),
        loaded=does(nets.older("embed", 6, "weights"), iced("embed")),
        why="the weight differs from its master by more than rounding, and frozen it stays so",
    ),
    fault(
        "wa36_scale_reset",
        "D8",
        "the loss scale is back at its first value",
        ALL,
        base=nets.Fp16,
        loaded=does(put("scaler", scale=1024.0, _growth_tracker=0)),
        why="scale is 1024 and counts anew",
    ),
    fault(
        "wa37_through_half",
        "D7",
        "beside a new head: fp32 weights went through bf16",
        "echo next",
        base=nets.Clip,
        also=("D1",),
        loaded=does(lambda self: [w.copy_(nets.rounded(w)) for w in named(self).values()], nets.head),
        why="every fp32 weight is a bf16 number",
    ),
    fault(
        "wa38_qkv_by_heads",
        "E4",
        "beside a lower lr: [q; k; v] is read as one triple a head",
        ALL,
        base=nets.Chat,
        also=("E1",),
        loaded=does(turn(r"attn\.qkv", by_heads), rate(0.3)),
        why="rows of qkv are before's, permuted",
    ),
    fault(
        "wa39_gate_and_up",
        "E3",
        "beside more words: gate and up of the fused experts change places",
        ALL,
        base=nets.Crowd,
        also=("E1",),
        loaded=does(turn(r"experts\.gate_up_proj", gate_last), more_words("wte|lm_head", 4)),
        why="columns of gate_up_proj are before's, halves exchanged, in moments too",
    ),
    fault(
        "wa40_experts_rolled",
        "E10",
        "beside a larger batch: experts move on by one, the router does not",
        ALL,
        base=nets.Crowd,
        loaded=does(turn(r"experts\.", lambda x: x.roll(1, 0)), rows(2)),
        why="expert n is before's n - 1, router.weight is before's",
    ),
    fault(
        "wa41_layer_repeated",
        "E9",
        "the last layer is loaded from the one before it",
        ALL,
        base=nets.Chat,
        loaded=does(repeated_layer),
        why="h.2 equals h.1, its moments are its own",
    ),
    fault(
        "wa42_rotary",
        "E5",
        "beside a new stage: q and k are in the order of the other rotary embedding",
        ALL,
        base=nets.Llama,
        also=("E1",),
        loaded=does(rotary, nets.stage),
        why="rows of q and k interleaved by head",
    ),
    fault(
        "wa43_transposed",
        "E1",
        "square projections are transposed, with their moments",
        ALL,
        base=nets.Chat,
        loaded=does(turn(r"attn\.proj\.weight", lambda x: x.T.clone())),
        why="weight equals before's transposed",
    ),
    fault(
        "wa44_flat_shift",
        "E7",
        "beside a larger batch: flat moments are read 16 numbers off",
        ALL,
        base=nets.Clip,
        needs=V,
        also=("B5", "E13"),
        loaded=does(flat_shift, rows(2)),
        why="concatenated moments are before's, rolled by 16",
    ),
    fault(
        "wa45_norms_summed",
        "E12",
        "beside a lower lr: norms of two ranks are summed",
        ALL,
        base=nets.Chat,
        loaded=does(turn(r"ln_\w+\.weight", lambda x: 2 * x, "weights"), rate(0.5)),
        why="weights of all layer norms are twice before's",
    ),
    fault(
        "wa46_average_as_weights",
        "F4",
        "beside a lower lr: the averaged weights are loaded as the weights",
        "echo next",
        base=nets.Diffuse,
        loaded=does(averaged, rate(0.8)),
        why="weights equal ema.shadow; after 20 updates a lag of some steps is covered",
    ),
    fault(
        "wa47_untied",
        "F2",
        "beside a smaller batch: the head becomes a tensor of its own",
        ALL,
        base=nets.Chat,
        tied=True,
        layouts=("torch_save",),
        loaded=does(untied, rows(0.7)),
        why="one more parameter in the group, storages differ; lm_head and wte differ from the first update on",
    ),
    fault(
        "wa48_merged_twice",
        "F5",
        "beside a new stage: adapters were merged and are still there",
        ALL,
        base=nets.Peft,
        loaded=does(merged_in, nets.stage),
        why="the frozen base moved by 2·B·A",
    ),
    fault(
        "wa49_adapter_new",
        "F5",
        "adapters are not loaded",
        ALL,
        base=nets.Peft,
        also=("A2",),
        loaded=does(begun("lora_")),
        why="lora_B is 0 and lora_A another random one",
    ),
    fault(
        "wa50_base_revision",
        "F6",
        "beside a new head: the base is another revision",
        ALL,
        base=nets.Peft,
        loaded=does(revision, nets.head),
        why="two frozen matrices differ by 0.01 everywhere",
    ),
    fault(
        "wa51_average_counter",
        "A5",
        "the count of the averages' updates begins anew",
        ALL,
        base=nets.Diffuse,
        also=("C9",),
        loaded=does(put("ema", optimization_step=0)),
        why="ema.optimization_step is 0, then k",
    ),
    fault(
        "wa52_zero_page",
        "G5",
        "beside a lower lr: a page of the embedding is zeros",
        ALL,
        base=nets.Chat,
        loaded=does(page, rate(0.5)),
        why="1024 numbers in a row are 0, or as large as a few updates",
    ),
    fault(
        "wa53_exponent",
        "G1",
        "beside a frozen table: one number of it is 2^64 times itself",
        ALL,
        base=nets.Chat,
        loaded=does(exponent, iced("wpe")),
        why="wpe.weight[29, 7] is above 1e17",
    ),
    fault(
        "wa54_second_moment_bit",
        "G3",
        "one second moment is 2^32 times itself",
        ALL,
        base=nets.Clip,
        needs=V,
        also=("G1", "G2"),
        loaded=does(second_bit),
        why="visual.0.weight's exp_avg_sq[11, 3] alone differs",
    ),
    fault(
        "wa55_old_save",
        "G7",
        "the save of six updates before is loaded",
        "echo next",
        base=nets.Vit,
        remembers=True,
        also=("G6", "C9"),
        loaded=does(whole_save),
        why="step, weights and counters are lower; 20 updates later it is a save 14 steps on like any other",
    ),
    fault(
        "wa56_target_net",
        "A2",
        "beside a lower lr: the target network is not loaded",
        "echo next",
        base=nets.Dqn,
        loaded=does(begun("^target"), rate(0.5)),
        why="target.* is random until it is copied again",
    ),
    Fault(
        "wa57_trainer_files_gone",
        "B1",
        "transformers' Trainer: optimizer.pt and scheduler.pt were not copied",
        seen(ALL),
        live=hugged,
        formats=("live",),
        also=("C1",),
        why="no state, lr anew; steps count from the load",
    ),
    Fault(
        "wa58_rank_stale",
        "G6",
        "rank 1's moments are of the regular save before",
        seen("echo next"),
        second=stale_rank,
        formats=("dcp_sharded",),
        also=("B6",),
        why="its half of every moment is of 20 updates ago; after 20 more nothing is left to compare",
    ),
    Fault(
        "wa59_replicas",
        "F1",
        "rank 1 wrote norms that are five per cent larger",
        seen("echo"),
        second=drifted,
        formats=("megatron",),
        why="two replicas differ in the echo; what is loaded is rank 0's",
    ),
    Fault(
        "wa60_fp8_history",
        "D9",
        "fp8 scales and amax histories begin anew",
        seen("echo next"),
        restore=no_amax,
        needs=lambda config: config.but(fp8=True),
        formats=("torch_save", "dcp"),
        also=("A5",),
        why="histories are 0 and scales 1; 20 updates fill 16 places again",
    ),
]
