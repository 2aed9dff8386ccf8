"""The twentieth half: sixty faults, twenty alone and forty beside an innocent change of the same load."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.lab.fault import Fault, seen
from tests.lab.hugging import made, trained
from tests.lab.live import Loop, fault
from tests.lab.opened20_nets import (
    T5,
    Act,
    Bundled,
    Conformer,
    Convnext,
    Dcn,
    Dense,
    Detr,
    Dropped,
    Gan,
    Gin,
    Lora,
    Lstm,
    Mixed,
    Moco,
    Narrow,
    Nerf,
    Ppo,
    Sac,
    Scaled,
    Seek,
    Talk,
    Tensor,
    Unet,
    Vq,
    acts,
    betas,
    by,
    flat_rate,
    from_ago,
    frozen,
    halved,
    layout,
    longer,
    lost,
    memory,
    more_rows,
    moved,
    new_batch,
    new_clip,
    new_group,
    new_head,
    new_lr,
    noise,
    rolled,
    state,
    swapped,
    told,
    unread,
    weights,
    widened,
)
from tests.lab.optimizers import AdamW8bit, ScheduleFreeAdamW

__all__ = ["FAULTS20"]

zeroed = torch.zeros_like
SGD = by(torch.optim.SGD, 15.0, momentum=0.9, weight_decay=1e-4)
BITS = ("torch_save", "folder", "lightning")
PLAIN = ("torch_save", "lightning")


def untied(self: Any) -> None:
    """Leave the head a matrix of its own, which the optimizer does not know."""
    self.module.lm_head.weight = nn.Parameter(0.2 * noise(5, *self.module.shared.weight.shape))


def lexical(self: Any) -> None:
    """Read layers in the order of their names as text: 0, 1, 10, 11, 2 …"""
    count = len(self.module.layers)
    order = sorted(range(count), key=str)
    held = dict(self.module.named_parameters())
    old = {n: (w.clone(), dict(memory(self, w))) for n, w in held.items()}
    for to, source in enumerate(order):
        for name, w in held.items():
            if name.startswith(f"layers.{to}."):
                value, kept = old[name.replace(f"layers.{to}.", f"layers.{source}.", 1)]
                w.copy_(value)
                memory(self, w).update(kept)


def halves_exchanged(self: Any) -> None:
    """Give each of two ranks the other's half of the flat moments."""
    ws = [w for g in self.optimizers[0].param_groups for w in g["params"]]
    for key in ("exp_avg", "exp_avg_sq"):
        flat = torch.cat([memory(self, w)[key].flatten() for w in ws])
        middle, place = len(flat) // 2, 0
        flat = torch.cat([flat[middle:], flat[:middle]])
        for w in ws:
            memory(self, w)[key] = flat[place : place + w.numel()].view(w.shape).clone()
            place += w.numel()


def heads_first(x: Tensor) -> Tensor:
    """Rows (head, qkv, width) that were taken for (qkv, head, width)."""
    return x.unflatten(0, (3, 4, -1)).transpose(0, 1).reshape(x.shape)


def interleaved(heads: int) -> Any:
    """Rows of each head's two halves, which are now taken in turns."""
    return lambda x: x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def merged(times: float) -> Act:
    """Base weights get the adapters' product; the adapters stay active."""

    def act(self: Any) -> None:
        for one in self.module.values():
            product = one.lora_B["default"].weight @ one.lora_A["default"].weight
            one.base_layer.weight += 1.5 * times * product

    return act


def averaged(self: Any) -> None:
    """Load the averages as the weights."""
    for n, w in self.module.named_parameters():
        w.copy_(self.extra["ema"]["shadow_params"][n])


def same_dice(self: Any) -> None:
    held = self.extra["rng_states"]
    for name in held:
        held[name] = held["rank_0"].clone()


def step_in_parts(self: Any) -> None:
    """Count the three micro-batches of each update."""
    self.step *= 3


def resumed(self: Any) -> None:
    self.again = True


def twice(self: Any) -> None:
    """For `Loop.apply`: the schedule goes on by two an update, after the load."""
    Loop.apply(self)
    if getattr(self, "again", False):
        for one in self.schedules:
            one.step()


def orphaned(self: Any) -> None:
    """Make the optimizer anew after its schedule, which goes on to write into the old one's groups."""
    old = self.optimizers[0]
    new = self.optimizer(self.groups())
    for group, mine in zip(old.param_groups, new.param_groups, strict=True):
        mine["params"] = group["params"]
        mine["initial_lr"] = group["initial_lr"]
    new.state = old.state
    self.optimizers = [new]


def exchanged_decays(self: Any) -> None:
    first, second = self.optimizers[0].param_groups
    first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]


def next_layer(self: Any) -> None:
    """Layer n gets what layer n + 1 was, and the last the first."""
    held = dict(self.module.named_parameters())
    old = {n: (w.clone(), dict(memory(self, w))) for n, w in held.items()}
    for name, w in held.items():
        if name.startswith("layers."):
            number = name.split(".")[1]
            value, kept = old[name.replace(f".{number}.", f".{(int(number) + 1) % 4}.", 1)]
            w.copy_(value)
            memory(self, w).update(kept)


def experts_rolled(self: Any) -> None:
    """Expert n gets what expert n − 1 was, with its moments; the router stays."""
    held = dict(self.module.named_parameters())
    old = {n: (w.clone(), dict(memory(self, w))) for n, w in held.items()}
    for name, w in held.items():
        if ".mlp.experts." in name:
            number = int(name.split(".experts.")[1].split(".")[0])
            value, kept = old[name.replace(f".experts.{number}.", f".experts.{(number - 1) % 4}.")]
            w.copy_(value)
            memory(self, w).update(kept)


def evaluated(self: Any) -> None:
    """Load what evaluation uses: the average x, not the y that training goes on from."""
    for group in self.optimizers[0].param_groups:
        for w in group["params"]:
            if "z" in self.optimizers[0].state[w]:
                w.lerp_(self.optimizers[0].state[w]["z"], 1 - 1 / group["betas"][0])


def z_from_weights(self: Any) -> None:
    for w in self.module.parameters():
        if "z" in memory(self, w):
            memory(self, w)["z"] = w.clone()


def foreign(self: Any) -> None:
    """Load the optimizer's state of another run."""
    other = type(self)(self.config.but(seed=self.config.seed + 9))
    other.extra["dataloader"]["seed"] = 555
    with torch.enable_grad():
        other.run(self.step)
    self.optimizers[0].load_state_dict(copy.deepcopy(other.optimizers[0].state_dict()))


def older_second(self: Any) -> None:
    from_ago(min(9, self.step - 2), "", weight=False, keys="exp_avg_sq")(self)


def older_masters(self: Any) -> None:
    from_ago(min(10, self.step - 2), "", weight=False, keys="master_param")(self)


def older_layer(self: Any) -> None:
    from_ago(min(12, self.step - 2), r"layers\.0\.")(self)


def padded_by_rank(self: Any) -> None:
    """Read two ranks' halves, each with its padding behind it, though all padding was at the end."""
    vocab, padded = self.config.vocab, self.config.padded
    half, more = vocab // 2, (padded - vocab) // 2

    def how(x: Tensor) -> Tensor:
        return torch.cat([x[:half], x[vocab : vocab + more], x[half:vocab], x[vocab + more :]])

    layout("embed_(in|out)", how)(self)


def bit_in_exponent(self: Any) -> None:
    """Flip a high bit of one exponent, in a row that no token asks for."""
    self.module.embed_in.weight[self.config.vocab, 7] *= 2.0**64


def page_of_zeros(pattern: str, at: int = 0) -> Act:
    def act(self: Any) -> None:
        for w in weights(self, pattern).values():
            w.view(-1)[at : at + 1024] = 0

    return act


def other_base(self: Any) -> None:
    """Freeze another revision's base under the adapters."""
    for n, w in enumerate(weights(self, "base_layer.weight").values()):
        w.add_(0.01 * noise(40 + n, *w.shape))


def muon(self: Any) -> list[torch.optim.Optimizer]:
    """Matrices of the layers by Muon, all else by AdamW."""
    held = dict(self.module.named_parameters())
    inner = [w for n, w in held.items() if w.ndim == 2 and n.startswith("layers")]
    rest = [w for n, w in held.items() if not (w.ndim == 2 and n.startswith("layers"))]
    lr = self.config.lr
    return [torch.optim.Muon(inner, lr=4 * lr, weight_decay=0.01), torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98))]


def transposed(folder: Path) -> None:
    """Write Conv1D weights as Linear ones."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for name, w in held.items():
        if name.endswith("attn.c_proj.weight"):
            held[name] = w.T.contiguous()
    save_file(held, file, metadata={"format": "pt"})


def without_optimizer(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def no_counts(self: Any) -> None:
    state("step", lambda s: torch.zeros_like(s))(self)


def queue_lost(self: Any) -> None:
    unread(r"^queue")(self)


GATES = [
    (f"model.layers.{n}.mlp.experts.{e}.gate_proj.weight", f"model.layers.{n}.mlp.experts.{e}.up_proj.weight")
    for n in range(2)
    for e in range(4)
]
ATTENTION = [
    (f"model.layers.{n}.self_attn.{a}_proj.weight", f"model.layers.{n}.self_attn.{b}_proj.weight")
    for n in range(2)
    for a, b in ("qo", "kv")
]
ADAM = by(torch.optim.Adam, amsgrad=True)

ALONE: list[Fault] = [
    fault(
        "xa01_router_bias_reset",
        "A5",
        "the bias that balances the experts begins at 0",
        "echo next",
        base=Seek,
        loaded=acts(lambda self: [b.zero_() for n, b in self.module.named_buffers() if "bias" in n]),
        why="e_score_correction_bias moves by 0.01 an update at most; it is 0 at the load",
    ),
    fault(
        "xa02_sgd_momentum_zero",
        "B1",
        "SGD's momentum buffers are zeros",
        "echo",
        base=Convnext,
        optimizer=SGD,
        also=("B3",),
        loaded=acts(state("momentum_buffer", zeroed)),
        why="momentum_buffer is 0; weights are equal",
    ),
    fault(
        "xa03_targets_unread",
        "A2",
        "target critics keep their initial values",
        "echo next early",
        base=Sac,
        loaded=acts(unread("target")),
        why="targets move by 1% of the gap an update, and are far away at once",
    ),
    fault(
        "xa04_scaler_lost",
        "D8",
        "the loss scale begins anew",
        "echo next early",
        base=Scaled,
        loaded=acts(told("scaler", scale=65536.0, _growth_tracker=0)),
        why="scale fell though no update was skipped",
    ),
    fault(
        "xa05_untied",
        "F2",
        "the head is a new matrix beside the embedding",
        "echo next early",
        base=T5,
        also=("A2",),
        loaded=acts(untied),
        why="lm_head and shared were equal, and now are not",
    ),
    fault(
        "xa06_states_by_other_order",
        "B5",
        "q has o's state and k has v's, and the other way round",
        "echo next early",
        base=Dense,
        needs=betas(0.9, 0.98),
        layouts=("dcp",),
        loaded=acts(swapped(*ATTENTION)),
        why="moments are equal to another parameter's, bit for bit; v falls below what β2 allows",
    ),
    fault(
        "xa07_average_count_lost",
        "A5",
        "the count of the averages begins at 0, so they follow the weights",
        "echo next early",
        base=Unet,
        also=("B2", "C9", "H1"),
        loaded=acts(told("ema", num_updates=0)),
        why="ema.num_updates is less than before",
    ),
    fault(
        "xa08_experts_transposed",
        "E1",
        "square matrices of the experts' second layer were transposed, their moments were not",
        "echo next early",
        base=Bundled,
        loaded=acts(layout("experts_w2", lambda x: x.transpose(1, 2).contiguous(), moments=False)),
        why="each expert's matrix is the transpose of the old one",
    ),
    fault(
        "xa09_masters_from_bf16",
        "D1",
        "fp32 copies are made from the bf16 weights",
        "echo next",
        base=Mixed,
        loaded=acts(state("master_param", halved)),
        layouts=("torch_save", "lightning", "folder"),
        why="low bits of the masters are 0 at the load; Lion moves each by exactly lr",
    ),
    fault(
        "xa10_scales_of_next_block",
        "B11",
        "each block of 8-bit moments has the next block's scale",
        "echo next early",
        base=Talk,
        optimizer=by(AdamW8bit),
        layouts=BITS,
        loaded=acts(state("absmax1 absmax2", lambda x: x.roll(1))),
        why="absmax are those of other blocks",
    ),
    fault(
        "xa11_z_from_weights",
        "B6",
        "schedule-free's z is made from the weights",
        "echo next",
        base=Gin,
        also=("B1", "B3", "B11"),
        optimizer=by(ScheduleFreeAdamW, 2.0),
        schedule=flat_rate,
        loaded=acts(z_from_weights),
        why="z is equal to the weights bit for bit, which it was not",
    ),
    fault(
        "xa12_optimizer_of_another_model",
        "G6",
        "the optimizer's state is that of another run, as long",
        "echo next early",
        base=Gin,
        also=("B5", "B6"),
        needs=betas(0.9, 0.999),
        loaded=acts(foreign),
        why="no moment is one of the old ones, at any place; counts are equal",
    ),
    fault(
        "xa13_codebook_averages_lost",
        "A5",
        "sizes and sums of the codebook begin anew",
        "echo next",
        base=Vq,
        loaded=acts(unread("embed_avg|cluster_size")),
        why="buffers are a new process's; the codes follow them",
    ),
    fault(
        "xa14_queue_lost",
        "A5",
        "the queue of keys and its place begin anew",
        "echo next early",
        base=Moco,
        rows=24,
        loaded=acts(queue_lost),
        why="queue_ptr is not where 24 keys an update put it",
    ),
    fault(
        "xa15_qkv_by_kind",
        "E4",
        "q, k and v per head were read as all q, all k, all v",
        "echo next early",
        base=Talk,
        also=("E1",),
        loaded=acts(layout(r"query_key_value", heads_first)),
        why="rows of query_key_value are in another order, moments as well",
    ),
    fault(
        "xa16_flat_halves_exchanged",
        "E13",
        "two ranks took each other's half of the flat moments",
        "echo next early",
        base=Dense,
        also=("B5", "E7"),
        needs=betas(0.9, 0.999),
        loaded=acts(halves_exchanged),
        why="the flat moments are shifted by half of their length, the weights are equal",
    ),
    fault(
        "xa17_layers_as_text",
        "E9",
        "twelve layers were read in the order of their names as text",
        "echo next early",
        base=Talk,
        layers=12,
        deep=12,
        layouts=("dcp",),
        loaded=acts(lexical),
        why="layer 2 is the old 10",
    ),
    fault(
        "xa18_counts_doubled",
        "B2",
        "the optimizer counts twice as many updates",
        "echo next early",
        base=Dense,
        also=("C9",),
        loaded=acts(state("step", lambda s: s * 2)),
        why="step is 2n where the trainer's is n",
    ),
    fault(
        "xa19_adapters_merged_and_active",
        "F5",
        "adapters were merged into the base, and stay active",
        "echo next early",
        base=Lora,
        loaded=acts(merged(1.0)),
        why="frozen base grew by 1.5 BA",
    ),
    fault(
        "xa20_one_generator_for_all",
        "C8",
        "four ranks draw the same dropout",
        "echo next early",
        base=Dropped,
        loaded=acts(same_dice),
        why="the four generator states are equal",
    ),
]

BESIDE: list[Fault] = [
    fault(
        "xa21_older_second_moments",
        "B6",
        "v from nine updates ago; the lr is halved",
        "echo next early",
        base=Talk,
        keeps=True,
        also=("G6",),
        needs=betas(0.9, 0.999),
        loaded=acts(older_second, new_lr(0.5)),
        why="v was still growing; an old one is below 0.999 v",
    ),
    fault(
        "xa22_cross_attention_unread",
        "A2",
        "a decoder's cross-attention is new; the vocabulary grew",
        "echo next early",
        base=T5,
        loaded=acts(unread(r"decoder\.\d\.parts\.EncDec"), more_rows("shared", 6)),
        why="eight matrices are a new process's; six rows more are innocent",
    ),
    fault(
        "xa23_experts_rolled",
        "E10",
        "experts moved by one, the router did not; the batch is doubled",
        "echo next early",
        base=Seek,
        loaded=acts(experts_rolled, new_batch(2)),
        why="expert n is the old n - 1",
    ),
    fault(
        "xa24_group_norms_unread",
        "A3",
        "group norms begin at 1 and 0; the lr is a third",
        "echo next",
        base=Unet,
        also=("A2",),
        loaded=acts(unread("norm_"), new_lr(1 / 3)),
        why="norms are exactly 1 and 0",
    ),
    fault(
        "xa25_states_shifted_by_head",
        "B5",
        "moments moved to the next of the same shape; a head is new",
        "echo next early",
        base=Detr,
        needs=betas(0.9, 0.999),
        loaded=acts(rolled(), new_head),
        why="moments are those of other parameters bit for bit",
    ),
    fault(
        "xa26_batch_norms_reset",
        "A5",
        "running statistics begin anew; the front end is frozen",
        "echo next early",
        base=Conformer,
        loaded=acts(unread("running|num_batches"), frozen("subsample")),
        why="num_batches_tracked is less than before",
    ),
    fault(
        "xa27_ids_shifted",
        "F7",
        "users are shifted by one row; the lr is halved",
        "echo next early",
        base=Dcn,
        also=("E1",),
        loaded=acts(layout("tables.user", lambda x: x.roll(1, 0)), new_lr(0.5)),
        why="row n is the old row n - 1, in weights and sums",
    ),
    fault(
        "xa28_temperature_state_lost",
        "B1",
        "the third optimizer begins anew; the lr is lower",
        "echo next early",
        base=Sac,
        loaded=acts(lost("log_alpha"), new_lr(0.6)),
        why="the count of log_alpha begins at 0",
    ),
    fault(
        "xa29_schedule_twice",
        "C3",
        "the schedule is stepped twice an update; clipping is tighter",
        "next early",
        base=Talk,
        apply=twice,
        loaded=acts(resumed, new_clip(0.4)),
        why="last_epoch grows by 2 an update",
    ),
    fault(
        "xa30_decays_exchanged",
        "B7",
        "vectors decay and matrices do not; clipping is off",
        "echo next early",
        base=Convnext,
        loaded=acts(exchanged_decays, new_clip(0.0)),
        why="the groups' weight_decay changed places",
    ),
    fault(
        "xa31_average_for_the_weights",
        "F4",
        "averages are loaded as the weights; the batch is doubled",
        "echo next",
        base=Unet,
        loaded=acts(averaged, new_batch(2)),
        why="weights are equal to shadow_params bit for bit",
    ),
    fault(
        "xa32_layers_shifted",
        "E9",
        "each layer is the next one; decay is raised",
        "echo next early",
        base=Gin,
        loaded=acts(next_layer, new_group(weight_decay=lambda old: 4 * old)),
        why="layer n is the old n + 1, moments as well",
    ),
    fault(
        "xa33_weights_beside_masters",
        "D3",
        "a layer's bf16 weights are new, their masters right; batch doubled",
        "echo",
        base=Mixed,
        also=("A2",),
        layouts=("torch_save", "lightning", "folder"),
        loaded=acts(unread(r"layers\.1\..*weight"), new_batch(2)),
        why="weights of layer 1 are not their rounded masters; the first update writes them again",
    ),
    fault(
        "xa34_counts_reset",
        "B2",
        "the optimizer's counts begin at 0; bf16 weights and moments are widened to fp32",
        "echo next early",
        base=Narrow,
        needs=betas(0.9, 0.98),
        layouts=BITS,
        loaded=acts(no_counts, widened),
        why="step is 0, moments are kept",
    ),
    fault(
        "xa35_observations_reset",
        "A5",
        "mean and variance of observations begin anew; more environments",
        "echo next early",
        base=Ppo,
        loaded=acts(unread(r"obs_rms\.(mean|var)"), new_batch(2)),
        why="mean is 0 and var 1 under a large count",
    ),
    fault(
        "xa36_row_factors_zero",
        "B11",
        "Adafactor's row factors are zeros; the lr is halved",
        "echo next",
        base=T5,
        also=("B3", "B4"),
        optimizer=by(torch.optim.Adafactor, 4.0),
        loaded=acts(state("row_var", zeroed), new_lr(0.5)),
        why="row_var is 0 beside col_var as it was",
    ),
    fault(
        "xa37_muon_momentum_zero",
        "B3",
        "Muon's momentum is zeros, AdamW's state right; the vocabulary grew",
        "echo",
        base=Talk,
        also=("B1",),
        made=muon,
        layouts=("torch_save", "lightning"),
        loaded=acts(state("momentum_buffer", zeroed), more_rows("embed_(in|out)", 8)),
        why="momentum_buffer of the layers' matrices is 0",
    ),
    fault(
        "xa38_weights_for_evaluation",
        "F4",
        "schedule-free's averages are taken for the weights; batch doubled",
        "echo next",
        base=Convnext,
        also=("B6",),
        optimizer=by(ScheduleFreeAdamW, 2.0),
        schedule=flat_rate,
        loaded=acts(evaluated, new_batch(2)),
        why="weights are x = y + (1 - 1/β1)(z - y) bit for bit",
    ),
    fault(
        "xa39_moments_in_bf16",
        "D4",
        "moments were rounded to bf16; the count of parts is four",
        "echo",
        base=Detr,
        loaded=acts(state("exp_avg exp_avg_sq", halved), lambda self: setattr(self, "parts", 4)),
        why="every moment has 16 low bits of 0 in the echo",
    ),
    Fault(
        "xa40_conv1d_as_linear",
        "E1",
        "a converter transposed square Conv1D weights, not their moments; decay is lower",
        seen("echo next early"),
        live=partial(trained, partial(made, "gpt2"), spoil=transposed, other_args={"weight_decay": 0.01}),
        formats=("live",),
        why="attn.c_proj.weight is the old one's transpose",
    ),
    fault(
        "xa41_schedule_restarted",
        "C1",
        "the schedule begins anew; a head is new",
        "echo next early",
        base=Lstm,
        fresh=("scheduler",),
        loaded=acts(new_head),
        why="last_epoch is 0, the optimizer counts on",
    ),
    fault(
        "xa42_sums_of_other_table",
        "B5",
        "users have the items' sums and items the users'; batch doubled",
        "echo next early",
        base=Dcn,
        loaded=acts(swapped(("tables.user.weight", "tables.item.weight")), new_batch(2)),
        why="sums are the other table's bit for bit; they can only grow",
    ),
    fault(
        "xa43_stale_shard",
        "G6",
        "layer 0 comes from an older save, weights and state; the schedule is longer",
        "echo next early",
        base=Talk,
        keeps=True,
        layouts=("torch_save", "dcp"),
        also=("B6",),
        loaded=acts(older_layer, longer(1.5)),
        why="counts of layer 0 are lower than the others",
    ),
    fault(
        "xa44_data_restarted",
        "C6",
        "the loader begins at the first batch; dropout is another",
        "echo next early",
        base=Talk,
        loaded=acts(told("dataloader", batches_yielded=0), told("args", dropout=0.1)),
        why="batches_yielded is 0",
    ),
    Fault(
        "xa45_optimizer_file_missing",
        "B1",
        "optimizer.pt was not copied, so that optimizer and schedule begin anew; a lower lr was asked for",
        seen("echo next early"),
        live=partial(trained, partial(made, "Qwen2"), spoil=without_optimizer, other_args={"learning_rate": 1e-3}),
        formats=("live",),
        also=("C1",),
        why="no state at the load, and counts from 1",
    ),
    fault(
        "xa46_rotary_order",
        "E5",
        "rows of q and k are interleaved; the lr is halved",
        "echo next early",
        base=Dense,
        also=("E1",),
        layouts=("dcp",),
        loaded=acts(layout("q_proj", interleaved(4)), layout("k_proj", interleaved(2)), new_lr(0.5)),
        why="rows within each head changed places, in weights and moments",
    ),
    fault(
        "xa47_base_of_other_revision",
        "F6",
        "the frozen base is another revision; the lr is doubled",
        "echo next early",
        base=Lora,
        loaded=acts(other_base, new_lr(2.0)),
        why="what is frozen changed a little",
    ),
    fault(
        "xa48_weights_from_export",
        "D7",
        "fp32 weights come from a bf16 export; a head is new",
        "echo",
        base=Convnext,
        optimizer=SGD,
        layouts=BITS,
        loaded=acts(layout("", halved, moments=False), new_head),
        why="16 low bits of every old weight are 0 in the echo, those of the momentum are not",
    ),
    fault(
        "xa49_gate_and_up_swapped",
        "E3",
        "gate and up of the experts changed places; the router is frozen",
        "echo next early",
        base=Seek,
        loaded=acts(swapped(*GATES, weight=True), frozen(r"mlp\.gate\.")),
        why="gate is the old up and up the old gate, moments as well",
    ),
    fault(
        "xa50_step_in_micro_batches",
        "C9",
        "the trainer's step counts micro-batches; decay is lower",
        "echo next early",
        base=Dense,
        loaded=acts(step_in_parts, new_group(weight_decay=lambda old: old / 5)),
        why="step is 3n, the optimizer's n",
    ),
    fault(
        "xa51_spectral_vectors_new",
        "A5",
        "vectors of the spectral norm are new; the lr is halved",
        "echo",
        base=Gan,
        loaded=acts(unread(r"_u$|_v$"), new_lr(0.5)),
        why="buffers _u and _v are a new process's",
    ),
    fault(
        "xa52_amsgrad_maximum_lost",
        "B11",
        "AMSGrad's maximum is zeros; dropout is another",
        "echo next",
        base=Conformer,
        optimizer=ADAM,
        also=("B3", "B4"),
        loaded=acts(state("max_exp_avg_sq", zeroed), told("args", dropout=0.2)),
        why="a maximum can only grow",
    ),
    fault(
        "xa53_exponent_bit",
        "G1",
        "a bit of an exponent flipped in an embedding; the vocabulary grew",
        "echo next early",
        base=Talk,
        also=("G2",),
        loaded=acts(bit_in_exponent, more_rows("embed_(in|out)", 4)),
        why="one number is 2^64 times what it was",
    ),
    fault(
        "xa54_page_of_zeros",
        "G5",
        "4096 bytes of a matrix are zeros; the lr is halved",
        "echo next early",
        base=Talk,
        loaded=acts(page_of_zeros("layers.1.mlp.dense_4h_to_h.weight", 512), new_lr(0.5)),
        why="1024 neighbours are 0, then near 0",
    ),
    fault(
        "xa55_masters_of_older_save",
        "D2",
        "fp32 copies are ten updates old, the bf16 weights right; the batch is doubled",
        "echo next",
        base=Mixed,
        keeps=True,
        also=("G6", "B6"),
        layouts=PLAIN,
        loaded=acts(older_masters, new_batch(2)),
        why="weights are not the rounded masters; after the update they are, and have gone back",
    ),
    fault(
        "xa56_norms_summed",
        "E12",
        "norms of two ranks were summed; the stem is frozen",
        "echo next early",
        base=Convnext,
        loaded=acts(layout(r"norm\.(weight|bias)", lambda x: 2 * x, moments=False), frozen("stem")),
        why="norm weights are exactly twice what they were",
    ),
    fault(
        "xa57_padding_by_rank",
        "E11",
        "the vocabulary was padded rank by rank; the lr is halved",
        "echo next early",
        base=Talk,
        also=("F7",),
        loaded=acts(padded_by_rank, new_lr(0.5)),
        why="the second half is some rows further down, in weights and moments",
    ),
    fault(
        "xa58_second_moments_zero",
        "B4",
        "v is zeros, m is right; the batch is doubled",
        "echo next early",
        base=Gin,
        needs=betas(0.9, 0.999),
        loaded=acts(state("exp_avg_sq", zeroed), new_batch(2)),
        why="exp_avg_sq is 0 beside exp_avg as it was",
    ),
    fault(
        "xa59_orphaned_schedule",
        "B8",
        "the optimizer was made after its schedule, which no longer reaches it; a tighter clip",
        "echo next early",
        base=Lstm,
        loaded=acts(orphaned, new_clip(0.5)),
        why="the groups' lr is the peak and stays, the schedule's _last_lr goes on",
    ),
    fault(
        "xa60_moved_without_state",
        "B1",
        "what moved to a group of its own lost its state",
        "echo next early",
        base=Nerf,
        loaded=acts(moved("encoding"), lost("encoding")),
        why="counts of the tables begin at 0",
    ),
]

FAULTS20 = [*ALONE, *BESIDE]
