"""Faults of the twenty-second half: two in three happen in the same load as a change that is innocent.

``words`` is what a right report says of it, as a pattern; ``beside`` is the innocent change.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.lab import opened22_nets as nets
from tests.lab import optimizers as other
from tests.lab.fault import Fault, Lab, seen
from tests.lab.hugging import made, trained
from tests.lab.live import fault
from tests.lab.opened22_nets import (
    acts,
    all_groups,
    aux_head,
    by,
    crossed,
    field,
    kept_of,
    laid,
    moved,
    new_batch,
    new_clip,
    new_lr,
    older,
    own_group,
    stateless,
    states,
    unread,
    weights,
)
from tests.lab.state import State

__all__ = ["BESIDE", "FAULTS22", "WORDS"]

Tensor = torch.Tensor
ALL = "echo next early"
SOON = "echo next"
SHORT, LONG = {"betas": (0.9, 0.95)}, {"betas": (0.9, 0.999)}
WORDS: dict[str, str] = {}
BESIDE: dict[str, str] = {}


def ill(id: str, cause: str, where: str, text: str, words: str, *, beside: str = "", **more: Any) -> Fault:
    """A fault of a loop, with the words of a right report and the innocent change beside it."""
    WORDS[id], BESIDE[id] = words, beside
    return fault(id, cause, text, where, **more)


# ---- single acts -----------------------------------------------------------------------------------------------------


def per_part(self: Any) -> None:
    """From now on two parts an update; the schedule is stepped after each."""
    self.parts = self.stepped = 2


def apply_often(self: Any) -> None:
    for optimizer in self.optimizers:
        optimizer.step()
    for schedule in self.schedules:
        for _ in range(getattr(self, "stepped", 1)):
            schedule.step()


def heads_to_blocks(x: Tensor) -> Tensor:
    """Rows of q, k and v of each head become all q, all k, all v."""
    return x.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2)


def swapped_halves(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, 1)[::-1], 1)


def same_generators(self: Any) -> None:
    self.extra["rng_states"] = [self.extra["rng_states"][0].clone() for _ in range(self.ranks)]


def masters_rounded(self: Any) -> None:
    for w in self.module.parameters():
        kept_of(self, w)["master_param"] = w.detach().float()


def head_apart(self: Any) -> None:
    """The head becomes a copy that nobody trains."""
    self.module.lm_head.weight = nn.Parameter(self.module.lm_head.weight.clone())


def of_another(self: Any) -> None:
    """The optimizer's state is that of a run of the same model from another seed."""
    with torch.enable_grad():
        twin = type(self)(self.config.but(seed=self.config.seed + 77))
        twin.run(self.step)
    for mine, theirs in zip(self.optimizers, twin.optimizers, strict=True):
        mine.load_state_dict(theirs.state_dict())


def stale_average(self: Any) -> None:
    self.extra["ema"] = copy.deepcopy(self.earlier(7)["ema"])


def scales_rolled(self: Any) -> None:
    """Largest magnitudes of the blocks are off by one block."""
    count = 0
    for w in self.module.parameters():
        kept = kept_of(self, w)
        for key in ("absmax1", "absmax2"):
            if key in kept and len(kept[key]) > 1:
                kept[key], count = kept[key].roll(1), count + 1
    assert count


def flat_shift(self: Any) -> None:
    """All moments, one after the other, are 24 elements late."""
    ws = [w for w in self.module.parameters() if kept_of(self, w)]
    for key in ("exp_avg", "exp_avg_sq"):
        flat = torch.cat([kept_of(self, w)[key].flatten() for w in ws]).roll(24)
        for w, part in zip(ws, flat.split([w.numel() for w in ws]), strict=True):
            kept_of(self, w)[key] = part.view_as(w).clone()


def floor_for_ceil(x: Tensor) -> Tensor:
    """48 rows were split as 10 10 10 10 8 and are joined as if the first two had 9; the end is filled with zeros."""
    return torch.cat([x[0:9], x[10:19], x[20:30], x[30:40], x[40:48], torch.zeros_like(x[:2])])


def step_back(self: Any) -> None:
    self.step -= 4


def peak_rate(self: Any) -> None:
    """The arguments' rate is written over the optimizer's after the load."""
    for group in all_groups(self):
        group["lr"] = self.extra["args"]["lr"]


def pairs_to_halves(x: Tensor) -> Tensor:
    """Rows of each head of 8 go from halves to neighbours."""
    return x.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)


def heads_by_turns(x: Tensor) -> Tensor:
    """Four heads of 8 rows: those of a key group are neighbours no more."""
    return x.unflatten(0, (2, 2, 8)).transpose(0, 1).flatten(0, 2)


def front_rows(self: Any) -> None:
    """Two tokens are put before all others; every row moves down by two."""
    m = self.module
    for n, w in enumerate((m.bert["embeddings"]["word_embeddings"].weight, m.decoder.bias)):
        kept = kept_of(self, w)
        for key, one in list(kept.items()):
            if torch.is_tensor(one) and one.shape == w.shape:
                kept[key] = torch.cat([torch.zeros(2, *one.shape[1:]), one])
        w.data = torch.cat([0.05 * nets.noise(n, 2, *w.shape[1:]), w.data])


def flipped(bit: int, index: int, near: float) -> Any:
    """One bit of the first element from ``index`` on that is larger than ``near``."""

    def how(x: Tensor) -> Tensor:
        flat = x.clone().flatten()
        place = index + int((flat[index:].abs() > near).nonzero()[0])
        flat.view(torch.int32)[place] ^= 1 << bit
        return flat.view_as(x)

    return how


def emptied(x: Tensor) -> Tensor:
    flat = x.clone().flatten()
    flat[1024:2048] = 0
    return flat.view_as(x)


def whole_older(self: Any) -> None:
    """Model and optimizer are those of nine updates ago; everything else is new."""
    old = copy.deepcopy(self.earlier(7))
    self.module.load_state_dict(old["model"])
    self.optimizers[0].load_state_dict(old["optimizer"])


def as_evaluated(self: Any) -> None:
    """The schedule-free average, which is what is evaluated, becomes the weights to be trained."""
    for w in self.module.parameters():
        w.copy_(w.lerp(kept_of(self, w)["z"], 1 - 1 / 0.9))


def sides_crossed(self: Any) -> None:
    """Square matrices: statistics of rows go to the columns, and the reverse."""
    count = 0
    for w in self.module.parameters():
        kept = kept_of(self, w)
        if "row_var" in kept and w.shape[0] == w.shape[1]:
            kept["row_var"], kept["col_var"] = kept["col_var"].T.clone(), kept["row_var"].T.clone()
            count += 1
    assert count


def targets_as_critics(self: Any) -> None:
    for name in ("qf1", "qf2"):
        self.module[name].load_state_dict(self.module[f"{name}_target"].state_dict())


def group_lost(self: Any) -> None:
    """The rates of the groups are all the first one's."""
    first = self.optimizers[0].param_groups[0]
    for group in all_groups(self):
        group["lr"] = first["lr"]


# ---- states that several ranks write ---------------------------------------------------------------------------------


def drifted(state: State, lab: Lab) -> State:
    """Rank 1 has norms of its own."""
    found = state.clone()
    for where in (found.params, found.masters):
        for name, one in where.items():
            if name.endswith("norm.weight"):
                one += (0.02 * nets.noise(len(name), *one.shape)).to(one.dtype)
    return found


def amax_lost(state: State, lab: Lab) -> State:
    """fp8 begins with empty histories."""
    found = state.clone()
    for name, one in found.buffers.items():
        if "amax_history" in name:
            one.zero_()
        elif name.endswith("_scale"):
            one.fill_(1)
    return found


# ---- transformers' Trainer -------------------------------------------------------------------------------------------


def no_schedule_file(folder: Path) -> None:
    (folder / "scheduler.pt").unlink()


def a_tensor_less(folder: Path) -> None:
    """The resharding script lost one tensor."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    held = load_file(path)
    name = next(n for n in held if re.search(r"layers\.1\.mlp\.up_proj", n))
    del held[name]
    save_file(held, path, metadata={"format": "pt"})


def hugging(
    id: str, cause: str, where: str, text: str, words: str, name: str, *, beside: str = "", also: Any = (), **more: Any
) -> Fault:
    WORDS[id], BESIDE[id] = words, beside
    live = partial(trained, partial(made, name), **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also)


FAULTS22: tuple[Fault, ...] = (
    ill(
        "za01_average_as_weights",
        "F4",
        SOON,
        "diffusion: the EMA is copied into the model before training goes on; half the rate",
        "averag|EMA|ema",
        beside="lr",
        base=nets.UNet,
        loaded=acts(nets.averages, new_lr(0.5)),
    ),
    ill(
        "za02_state_by_sorted_name",
        "B5",
        ALL,
        "the loader sorts names, the optimizer counts in the module's order; a doubled batch",
        "wrong param|another param|other param|assigned",
        beside="batch",
        base=nets.Convs,
        needs=LONG,
        loaded=acts(nets.by_name(), new_batch(2)),
    ),
    ill(
        "za03_schedule_run_forward",
        "C3",
        ALL,
        "the restored schedule is stepped once more for every update that was done; new tokens",
        "schedule",
        beside="rows",
        base=nets.Neo,
        loaded=acts(nets.more_rows("embed_", 6), nets.forwarded(lambda done: done)),
    ),
    ill(
        "za04_schedule_by_part",
        "C3",
        "next early",
        "half the batch in two parts; from now on the schedule is stepped after each part",
        "schedule.*(twice|more often|2)",
        beside="batch",
        base=nets.Qwen,
        apply=apply_often,
        loaded=acts(new_batch(0.5), per_part),
    ),
    ill(
        "za05_layer_of_an_older_save",
        "G6",
        ALL,
        "a shard with the second layer and its state is of seven updates ago; the embedding is frozen",
        "different saves|older|another save|step",
        beside="frozen",
        base=nets.Moe,
        shelved=True,
        loaded=acts(older(7, r"layers\.1\."), nets.frozen("embed_tokens")),
    ),
    ill(
        "za06_qkv_of_neox",
        "E4",
        ALL,
        "q, k and v of each head are read as blocks of all heads, moments too; a doubled rate",
        "QKV|qkv|query_key_value",
        beside="lr",
        base=nets.Neo,
        layouts=("dcp",),
        loaded=acts(laid("query_key_value", heads_to_blocks), new_lr(2.0)),
    ),
    ill(
        "za07_w13_swapped",
        "E3",
        ALL,
        "up over gate in the fused experts, the moments as they were; another clipping",
        "gate and up|gate.*up",
        beside="clip",
        base=nets.Moe,
        loaded=acts(laid("w13", swapped_halves, state=False), new_clip(0.4)),
    ),
    ill(
        "za08_w2_transposed",
        "E1",
        ALL,
        "the square second matrices of the experts are transposed",
        "transposed|axis|axes|order",
        base=nets.Moe,
        loaded=acts(laid("w2", lambda x: x.transpose(1, 2).contiguous())),
    ),
    ill(
        "za09_sampler_from_the_start",
        "C6",
        ALL,
        "the data loader begins at its first sample; a third of the rate",
        "data.*(restart|begin|start)",
        beside="lr",
        base=nets.Bert,
        loaded=acts(field("dataloader", samples_yielded=0), new_lr(0.3)),
    ),
    ill(
        "za10_scaler_new",
        "D8",
        ALL,
        "the GradScaler is a new one; another clipping",
        "loss scale",
        beside="clip",
        base=nets.Scaled,
        loaded=acts(field("scaler", scale=4096.0, _growth_tracker=0), new_clip(0.3)),
    ),
    ill(
        "za11_one_generator_for_all",
        "C8",
        ALL,
        "every rank gets rank 0's generator of dropout; a doubled batch",
        "[Rr]andom",
        beside="batch",
        base=nets.Dropping,
        loaded=acts(same_generators, new_batch(2)),
    ),
    ill(
        "za12_masters_of_bf16",
        "D1",
        SOON,
        "masters are cast from the bf16 weights",
        "master.*(rebuilt|rounded|bf16|16-bit)",
        base=nets.HalfNeo,
        loaded=acts(masters_rounded),
    ),
    ill(
        "za13_decay_of_the_other_group",
        "B7",
        ALL,
        "the two groups' weight decays are exchanged; a longer schedule",
        "[Ww]eight decay",
        beside="length",
        base=nets.Detr,
        layouts=("torch_save", "dcp"),
        loaded=acts(nets.decays_crossed, nets.new_length(1.5)),
    ),
    ill(
        "za14_head_untied",
        "F2",
        "next early",
        "the tied head becomes a copy that the optimizer does not know; a layer is frozen",
        "one tensor|tied|untied",
        beside="frozen",
        base=nets.Qwen,
        tied=True,
        layouts=("torch_save",),
        loaded=acts(head_apart, nets.frozen(r"layers\.0\.")),
    ),
    ill(
        "za15_batch_norms_new",
        "A5",
        ALL,
        "statistics of the batch norms are not restored; a doubled rate",
        "[Bb]uffer|running",
        beside="lr",
        base=nets.BnConvs,
        loaded=acts(unread("running_|num_batches"), new_lr(2.0)),
    ),
    ill(
        "za16_adapters_merged_again",
        "F5",
        ALL,
        "adapters are merged into the base and kept beside it; half the rate",
        "adapter|LoRA|lora",
        beside="lr",
        base=nets.Lora,
        loaded=acts(nets.merged_again, new_lr(0.5)),
    ),
    ill(
        "za17_optimizer_of_another_run",
        "B5",
        ALL,
        "the optimizer's state is that of a run with another seed; a head is added",
        "different saves|another run|wrong param|another param",
        beside="head",
        base=nets.Gat,
        needs=LONG,
        also=("G6", "B6"),
        loaded=acts(of_another, aux_head),
        why="m and v belong together and to other weights of the same model, at the same step",
    ),
    ill(
        "za18_steps_counted_twice",
        "C9",
        ALL,
        "the optimizer's counters are doubled; the temperature gets a group of its own",
        "step|counter",
        beside="group",
        base=nets.Clip,
        also=("B2",),
        loaded=acts(states("step", lambda s: s * 2), own_group("logit_scale")),
    ),
    ill(
        "za19_average_of_an_older_save",
        "G6",
        SOON,
        "the EMA comes from seven updates ago; a doubled batch",
        "averag|EMA|ema",
        beside="batch",
        base=nets.UNet,
        shelved=True,
        loaded=acts(stale_average, new_batch(2)),
    ),
    ill(
        "za20_scales_of_other_blocks",
        "B11",
        ALL,
        "8-bit state: the blocks' largest magnitudes are off by one; a layer is frozen",
        "absmax|compressed|scale",
        beside="frozen",
        base=nets.Rig,
        optimizer=by(other.AdamW8bit),
        loaded=acts(scales_rolled, nets.frozen(r"^0\.")),
    ),
    Fault(
        "za21_norms_drifted",
        "F1",
        "two tensor-parallel ranks have norms of their own",
        seen("alone echo next early"),
        second=drifted,
        formats=("megatron",),
    ),
    ill(
        "za22_flat_moments_late",
        "E7",
        ALL,
        "flat moments are cut 24 elements late",
        "shift|partition",
        base=nets.Conformer,
        needs=LONG,
        also=("E13", "B5"),
        loaded=acts(flat_shift),
    ),
    ill(
        "za23_uneven_rows",
        "E8",
        ALL,
        "48 rows on five ranks are joined with the sizes of another split; half the rate",
        "shard|uneven",
        beside="lr",
        base=nets.Detr,
        also=("E7", "E1"),
        loaded=acts(laid(r"linear1\.weight", floor_for_ceil), new_lr(0.5)),
    ),
    ill(
        "za24_layers_off_by_one",
        "E9",
        ALL,
        "each layer is the next one's, the last is there twice; a doubled batch",
        "[Ll]ayer",
        beside="batch",
        base=nets.Neo,
        depth=4,
        layouts=("dcp", "torch_save"),
        loaded=acts(moved(lambda n: min(n + 1, 3), r"layers\.(\d+)\."), new_batch(2)),
    ),
    ill(
        "za25_targets_as_critics",
        "F4",
        SOON,
        "the critics are loaded from their slow targets; half the rate",
        "averag|target|EMA",
        beside="lr",
        base=nets.Sac,
        loaded=acts(targets_as_critics, new_lr(0.5)),
    ),
    ill(
        "za26_critics_state_exchanged",
        "B5",
        ALL,
        "the twin critics have each other's moments",
        "wrong param|another param|other param|assigned",
        base=nets.Sac,
        loaded=acts(crossed("qf1.", "qf2.", model=False)),
    ),
    ill(
        "za27_trainer_four_steps_back",
        "C9",
        ALL,
        "the trainer counts from four updates earlier; model and optimizer are right",
        "step",
        base=nets.Nerf,
        loaded=acts(step_back),
    ),
    ill(
        "za28_rate_of_the_arguments",
        "B8",
        ALL,
        "the arguments' rate is written over the restored one; another clipping",
        "learning rate",
        beside="clip",
        base=nets.T5,
        schedule=nets.cosine,
        also=("C2",),
        loaded=acts(peak_rate, new_clip(0.5)),
    ),
    ill(
        "za29_schedule_anew",
        "C1",
        ALL,
        "the schedule is not restored; new tokens",
        "schedule",
        beside="rows",
        base=nets.Lstm,
        also=("C2",),
        loaded=acts(nets.rebegun, nets.more_rows("encoder|decoder", 5)),
    ),
    ill(
        "za30_squares_lost",
        "B4",
        ALL,
        "second moments are zeros",
        "exp_avg_sq",
        base=nets.Conformer,
        needs=LONG,
        layouts=("dcp", "lightning"),
        loaded=acts(states("exp_avg_sq", torch.zeros_like)),
    ),
    ill(
        "za31_moments_of_tables_lost",
        "B3",
        ALL,
        "moments of both tables are zeros, their counters are right; half the rate",
        "moment",
        beside="lr",
        base=nets.Neo,
        needs=LONG,
        loaded=acts(states("exp_avg exp_avg_sq", torch.zeros_like, "embed_"), new_lr(0.5)),
    ),
    ill(
        "za32_squares_of_an_older_save",
        "B6",
        ALL,
        "second moments are of seven updates ago; the boxes' head is frozen",
        "exp_avg_sq|different steps|different saves",
        beside="frozen",
        base=nets.Detr,
        needs=SHORT,
        shelved=True,
        also=("G6",),
        layouts=("dcp", "torch_save"),
        loaded=acts(older(7, "", model=False, keys="exp_avg_sq"), nets.frozen("bbox_embed")),
    ),
    ill(
        "za33_moments_through_bf16",
        "D4",
        SOON,
        "moments went through bf16; the head gets a group of its own",
        "moment.*(round|16)",
        beside="group",
        base=nets.Qwen,
        loaded=acts(states("exp_avg exp_avg_sq", nets.rounded), own_group("lm_head")),
    ),
    ill(
        "za34_weights_through_bf16",
        "D7",
        SOON,
        "weights were exported as bf16 and read again",
        "narrower|round|bf16|16-bit",
        base=nets.Clip,
        layouts=("dcp", "torch_save"),
        loaded=acts(weights("", nets.rounded)),
    ),
    ill(
        "za35_weights_older_than_masters",
        "D3",
        "echo",
        "the bf16 weights are of six updates ago, masters are right; another clipping",
        "master",
        beside="clip",
        base=nets.HalfQwen,
        shelved=True,
        also=("D2", "G6"),
        loaded=acts(older(6, "", keys=None), new_clip(0.5)),
        why="the next update writes the masters over the weights",
    ),
    ill(
        "za36_rotary_pairs",
        "E5",
        ALL,
        "q and k were converted for neighbouring pairs, their moments too; a doubled batch",
        "rotary",
        beside="batch",
        base=nets.Qwen,
        loaded=acts(laid(r"(q|k)_proj", pairs_to_halves), new_batch(2)),
    ),
    ill(
        "za37_query_heads_by_turns",
        "E6",
        ALL,
        "query heads are dealt to the key groups in turns; Lion keeps its moments in bf16 from now on",
        "head|group|block",
        beside="precision",
        base=nets.Qwen,
        optimizer=by(other.Lion, 0.3),
        also=("E1",),
        loaded=acts(laid("q_proj", heads_by_turns), states("exp_avg", lambda m: m.to(torch.bfloat16))),
    ),
    ill(
        "za38_experts_in_turn",
        "E10",
        ALL,
        "experts are one place on, the router is not; half the batch",
        "[Ee]xpert",
        beside="batch",
        base=nets.Moe,
        fused=False,
        loaded=acts(moved(lambda n: (n + 1) % 4, r"mlp\.experts\.(\d+)\."), new_batch(0.5)),
    ),
    ill(
        "za39_biases_summed",
        "E12",
        ALL,
        "biases behind row-parallel matrices are summed over two ranks; half the rate",
        "summed|averaged|twice|double|replica",
        beside="lr",
        base=nets.Neo,
        layouts=("dcp", "torch_save"),
        loaded=acts(weights(r"(attention\.dense|dense_4h_to_h)\.bias", lambda x: 2 * x), new_lr(0.5)),
    ),
    ill(
        "za40_rows_moved_down",
        "F7",
        ALL,
        "two special tokens come before all others, so every row moves by two; the vocabulary is two longer",
        "[Rr]ows|vocabulary",
        beside="rows",
        base=nets.Bert,
        loaded=acts(front_rows),
    ),
    ill(
        "za41_square_flipped",
        "G1",
        ALL,
        "an exponent bit of one second moment is flipped",
        "damaged|flipped|bit",
        base=nets.Convs,
        needs=LONG,
        also=("G2", "G3"),
        loaded=acts(states("exp_avg_sq", flipped(29, 40, 1e-12), r"blocks\.1\.pwconv1\.weight")),
    ),
    ill(
        "za42_a_page_of_zeros",
        "G5",
        ALL,
        "1,024 weights in a row are zeros; a doubled batch",
        "zero",
        beside="batch",
        base=nets.Neo,
        loaded=acts(weights(r"layers\.1\.mlp\.dense_h_to_4h\.weight", emptied), new_batch(2)),
    ),
    ill(
        "za43_older_save_whole",
        "G7",
        ALL,
        "model and optimizer are those of seven updates ago, the trainer's counters are new; half the rate",
        "older|different saves|step",
        beside="lr",
        base=nets.Mixer,
        shelved=True,
        also=("G6", "C9"),
        loaded=acts(whole_older, new_lr(0.5)),
    ),
    ill(
        "za44_other_order",
        "C7",
        ALL,
        "the sampler's seed is drawn anew, the arguments' is the old one; half the rate",
        "order|data|seed",
        beside="lr",
        base=nets.Dlrm,
        optimizer=by(torch.optim.Adagrad, 6.0),
        loaded=acts(field("dataloader", shuffle_seed=5150), new_lr(0.5)),
    ),
    ill(
        "za45_norms_are_ones",
        "A3",
        ALL,
        "norms are not in the converted checkpoint; a head is added",
        "[Nn]orm",
        beside="head",
        base=nets.Qwen,
        layouts=("torch_save", "lightning"),
        loaded=acts(weights("norm", torch.ones_like), aux_head),
    ),
    ill(
        "za46_queries_new",
        "A2",
        ALL,
        "the queries' table is not loaded, its moments are; the classifier is exchanged",
        "not loaded|initial|query_embed",
        beside="head",
        base=nets.Detr,
        layouts=("torch_save", "lightning"),
        loaded=acts(unread("query_embed"), nets.new_head("class_embed")),
    ),
    ill(
        "za47_no_weight_loaded",
        "A1",
        ALL,
        "no name matched: all weights are new, the optimizer is restored",
        "renamed|none of them|not loaded",
        base=nets.Mixer,
        also=("A2",),
        loaded=acts(unread("")),
    ),
    ill(
        "za48_second_optimizer_new",
        "B1",
        ALL,
        "the discriminator's optimizer is not restored; a lower rate",
        "optimizer.*(state|restored)",
        beside="lr",
        base=nets.Vocoder,
        layouts=("torch_save", "lightning"),
        loaded=acts(stateless("discriminator"), new_lr(0.7)),
    ),
    ill(
        "za50_momentum_lost",
        "B1",
        "echo",
        "SGD begins without its momentum; the last matrix gets a group of its own",
        "optimizer|momentum",
        beside="group",
        base=nets.Gat,
        optimizer=lambda self, groups: torch.optim.SGD(groups, lr=8 * self.config.lr, momentum=0.9),
        also=("B3",),
        loaded=acts(stateless(), own_group("^out")),
    ),
    ill(
        "za51_codebook_new",
        "A5",
        SOON,
        "the codebook's buffers are not restored",
        "[Bb]uffer",
        base=nets.VqVae,
        also=("A2",),
        loaded=acts(unread("quantize")),
    ),
    ill(
        "za52_queue_new",
        "A5",
        SOON,
        "the queue of keys and its pointer begin anew; a lower rate",
        "[Bb]uffer|queue",
        beside="lr",
        base=nets.Moco,
        also=("A2",),
        loaded=acts(unread("^queue"), new_lr(0.5)),
    ),
    ill(
        "za53_evaluated_weights",
        "F4",
        SOON,
        "schedule-free: the averaged weights of the evaluation are trained on; a doubled batch",
        "averag",
        beside="batch",
        base=nets.Rig,
        optimizer=by(other.ScheduleFreeAdamW),
        schedule=nets.steady,
        loaded=acts(as_evaluated, new_batch(2)),
    ),
    ill(
        "za54_rows_for_columns",
        "B11",
        SOON,
        "Adafactor's statistics of rows and columns are exchanged where the matrix is square",
        "row|column|compressed",
        base=nets.Gat,
        optimizer=by(torch.optim.Adafactor, 3.0),
        also=("B5", "E1", "E13"),
        loaded=acts(sides_crossed),
    ),
    ill(
        "za55_state_of_the_next_layer",
        "B5",
        ALL,
        "Muon and AdamW: each layer's state is the next one's; another clipping",
        "wrong param|another param|other param|assigned|[Ll]ayer",
        beside="clip",
        base=nets.Qwen,
        needs=LONG,
        made=nets.muon,
        layouts=("torch_save", "lightning"),
        also=("E9", "E13"),
        loaded=acts(moved(lambda n: (n + 1) % 3, r"layers\.(\d+)\.", model=False), new_clip(0.5)),
    ),
    ill(
        "za56_slow_moment_lost",
        "B3",
        SOON,
        "AdEMAMix: the slow moment is zeros; half the rate",
        "moment|state",
        beside="lr",
        base=nets.Rig,
        optimizer=by(nets.AdEMAMix),
        also=("B1",),
        loaded=acts(states("exp_avg_slow", torch.zeros_like), new_lr(0.5)),
    ),
    ill(
        "za58_a_bit_of_a_weight",
        "G2",
        SOON,
        "one mantissa bit of one weight is flipped",
        "bit|damaged|flipped",
        base=nets.Convs,
        also=("G1",),
        loaded=acts(weights(r"blocks\.0\.pwconv2\.weight", flipped(21, 300, 0.05))),
    ),
    hugging(
        "za59_trainer_without_schedule",
        "B1",
        ALL,
        "Trainer: scheduler.pt is missing, so that the optimizer is not read either; a doubled batch",
        "optimizer|schedule",
        "Llama",
        beside="batch",
        also=("C1",),
        spoil=no_schedule_file,
        other_args={"per_device_train_batch_size": 8},
    ),
    hugging(
        "za60_trainer_lost_a_tensor",
        "A2",
        ALL,
        "Trainer: one matrix is not in the file, and keeps what the process made",
        "not loaded|initial|up_proj",
        "Qwen2",
        spoil=a_tensor_less,
    ),
    Fault(
        "za49_fp8_histories_lost",
        "D9",
        "fp8 scales and histories begin anew",
        seen(SOON),
        restore=amax_lost,
        needs=lambda config: config.but(fp8=True),
        formats=("torch_save", "dcp"),
    ),
    ill(
        "za57_rates_of_groups_lost",
        "B8",
        ALL,
        "layer-wise rates: all groups have the first one's after the load; another clipping",
        "learning rate",
        beside="clip",
        base=nets.Convs,
        groups=nets.layered,
        schedule=nets.stairs,
        also=("C2",),
        loaded=acts(group_lost, new_clip(0.5)),
    ),
)
WORDS |= {"za21_norms_drifted": "drift|replica|rank", "za49_fp8_histories_lost": "fp8|amax"}
BESIDE |= {"za21_norms_drifted": "", "za49_fp8_histories_lost": ""}
