"""The twenty-third half: sixty faults, fifteen alone and forty-five beside an innocent change of the same load."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.hugging import SIZE, made, trained
from tests.lab.live import Loop, fault
from tests.lab.model import is_norm
from tests.lab.opened20_nets import (
    Act,
    Tensor,
    acts,
    betas,
    by,
    flat_rate,
    from_ago,
    frozen,
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
    state,
    told,
    unread,
    weights,
)
from tests.lab.opened23_nets import (
    Ads,
    Amp,
    Clip,
    Cycle,
    Dino,
    Dit,
    Dora,
    Dqn,
    Gat,
    Glow,
    Gru,
    HalfNet,
    Lars,
    Mamba,
    Mixtral,
    Nano,
    Peft,
    Phi,
    Philox,
    Res,
    Soap,
    Style,
    Vit,
    exponential,
    inverse_root,
    one_cycle,
    plateau,
    polynomial,
    two_parts,
)
from tests.lab.optimizers import AdaBelief, Lamb, Lion, Prodigy
from tests.lab.save_deepspeed import merged
from tests.lab.state import State

__all__ = ["FAULTS23"]

zeroed = torch.zeros_like
FILES = ("torch_save", "timm", "mm", "fairseq", "composer")


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def micro_batches(self: Any) -> None:
    """Set the schedule to four times its place, as if micro-batches were updates."""
    schedule = self.schedules[0]
    for _ in range(3 * self.step):
        schedule.step()


def strange_masters(self: Any) -> None:
    """Make the fp32 copies from the weights that the process began with."""
    config = self.config
    self.config = config.but(seed=config.seed + 5)
    new = dict(self.net().named_parameters())
    self.config = config
    for n, w in self.module.named_parameters():
        memory(self, w)["master_param"] = new[n].detach().float()


def by_head(x: Tensor) -> Tensor:
    """All q, all k, all v, taken for q, k and v of a head after the other."""
    return x.unflatten(0, (3, 4, -1)).transpose(0, 1).reshape(x.shape)


def zero_page(self: Any) -> None:
    for w in weights(self, r"h\.1\.mlp\.c_fc\.weight").values():
        memory(self, w)["exp_avg_sq"].view(-1)[1024:2048] = 0


def exchanged_optimizers(self: Any) -> None:
    """Load each generator's optimizer from the other's file."""
    one, two = (copied(each) for each in self.optimizers[:2])
    self.optimizers[0].load_state_dict(two)
    self.optimizers[1].load_state_dict(one)


def copied(optimizer: torch.optim.Optimizer) -> Any:
    held = optimizer.state_dict()
    return {"state": {n: dict(one) for n, one in held["state"].items()}, "param_groups": held["param_groups"]}


def estimate_lost(self: Any) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"d": group["d0"], "d_max": group["d0"], "d_numerator": 0.0}


def untied_copy(self: Any) -> None:
    """Give the head a copy of the table, which the optimizer does not know."""
    self.module.lm_head.weight = nn.Parameter(self.module.transformer["wte"].weight.clone())


def average_anew(self: Any) -> None:
    """Begin the average of the generator from its weights."""
    self.extra["g_ema"] = {n: w.detach().clone() for n, w in self.module.g.named_parameters()}


def averages_in_half(self: Any) -> None:
    """Load the fp16 averages, as a release file has them, for the weights."""
    for n, w in self.module.named_parameters():
        w.copy_(self.extra["ema"][n].half())


def magnitudes_of_base(self: Any) -> None:
    for layer in self.module["layers"]:
        layer.lora_magnitude_vector.copy_(layer.base_layer.weight.norm(dim=1))


def in_eight_bits(self: Any) -> None:
    """Load a base that went through int8."""
    for w in weights(self, r"base_layer").values():
        step = w.abs().amax(1, keepdim=True) / 127
        w.copy_((w / step).round() * step)


def statistics_anew(self: Any) -> None:
    self.extra["obs_normalizer"] = {"mean": torch.zeros(20), "var": torch.ones(20), "count": 1e-4}


def one_group(self: Any) -> None:
    """Let everything decay: what had no decay is put into the first group."""
    first, second = self.optimizers[0].param_groups
    first["params"] = first["params"] + second["params"]
    del self.optimizers[0].param_groups[1]
    schedule = self.schedules[0]
    schedule.base_lrs, schedule.lr_lambdas = schedule.base_lrs[:1], schedule.lr_lambdas[:1]
    schedule._last_lr = schedule._last_lr[:1]


class ByHand(Vit):
    """The loop sets the groups' lr itself, from what each began with."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for group in self.optimizers[0].param_groups:
            group["initial_lr"] = group["lr"]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def apply(self) -> None:
        super().apply()
        for group in self.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] * self.config.lr_at(self.step + 2) / self.config.lr


def rates_reversed(self: Any) -> None:
    """Give the first layers the last layers' rates."""
    groups = self.optimizers[0].param_groups
    for key in ("lr", "initial_lr"):
        for group, value in zip(groups, [g[key] for g in groups][::-1], strict=True):
            group[key] = value


def at_peak(self: Any) -> None:
    """Let a new schedule set the lr once, before it is put at its place."""
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def hold_second(self: Any) -> None:
    self.held = self.optimizers[0].param_groups[1]["lr"]


def first_alone(self: Any) -> None:
    """For `Loop.apply`: after the load the schedule reaches the first group alone."""
    Loop.apply(self)
    if hasattr(self, "held"):
        self.optimizers[0].param_groups[1]["lr"] = self.held


def no_schedule(self: Any) -> None:
    """Go on without a schedule, at the rate that the arguments say."""
    at_peak(self)
    self.schedules = []


def half_as_long(self: Any) -> None:
    """Divide the length by the ranks once more."""
    self.schedules[0].total_iters //= 2


class DecayRamp(Dino):
    """Weight decay grows by half a cosine; the loop sets it after each update for the next one."""

    def apply(self) -> None:
        super().apply()
        group = self.optimizers[0].param_groups[0]
        group["weight_decay"] = 0.04 + 0.3 * min(1.0, (self.step + 1) / 120)


def first_decay(self: Any) -> None:
    self.optimizers[0].param_groups[0]["weight_decay"] = 0.04


class InEpochs(Res):
    """An epoch has six batches."""

    def update(self) -> None:
        super().update()
        held = self.extra["dataloader"]
        if held["batches_yielded"] == 6:
            held |= {"epoch": held["epoch"] + 1, "batches_yielded": 0}


def to_epoch(self: Any) -> None:
    """Take the step from the number of the epoch."""
    self.step -= self.step % 6 or 6


def resumed(self: Any) -> None:
    self.again = True


def summed(self: Any) -> None:
    """For `Loop.gradients`: after the load the gradients of four parts are added and not averaged."""
    if getattr(self, "again", False):
        for w in self.module.parameters():
            if w.grad is not None:
                w.grad.mul_(4)


def through_half(x: Tensor) -> Tensor:
    return x.half().to(x.dtype)


def by_file_name(x: Tensor) -> Tensor:
    """Columns of twelve ranks, in the order of their files' names as text."""
    return x.unflatten(1, (12, -1))[:, sorted(range(12), key=str)].reshape(x.shape)


def two_ranks(x: Tensor) -> Tensor:
    """[gate; up] as one, where each of two ranks has a [gate; up] of its own."""
    return x.unflatten(0, (2, 2, -1)).transpose(0, 1).reshape(x.shape)


def in_turns(heads: int) -> Any:
    """Rows of the two halves of a head, by turns."""
    return lambda x: x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def virtual_stages(self: Any) -> None:
    """Two ranks hold two parts each; these are joined rank after rank."""
    order = (0, 3, 1, 4, 2, 5)
    held = dict(self.module.named_parameters())
    old = {n: (w.clone(), {k: v.clone() for k, v in memory(self, w).items()}) for n, w in held.items()}
    for to, source in enumerate(order):
        for n, w in held.items():
            if f".h.{to}." in n:
                value, kept = old[n.replace(f".h.{to}.", f".h.{source}.")]
                w.copy_(value)
                memory(self, w).update(kept)


def first_experts(self: Any) -> None:
    """Every rank loads the experts of rank 0."""
    held = dict(self.module.named_parameters())
    for n, w in held.items():
        for to, source in ((2, 0), (3, 1)):
            if f".experts.{to}." in n:
                other = held[n.replace(f".experts.{to}.", f".experts.{source}.")]
                w.copy_(other)
                memory(self, w).update({k: v.clone() for k, v in memory(self, other).items()})


def by_sorted_names(self: Any) -> None:
    """Cut the flat moments as if they lay in the order of the names."""
    held = dict(self.module.named_parameters())
    for key in ("exp_avg", "exp_avg_sq"):
        flat, at = torch.cat([memory(self, held[n])[key].flatten() for n in sorted(held)]), 0
        for w in held.values():
            memory(self, w)[key] = flat[at : at + w.numel()].view(w.shape).clone()
            at += w.numel()


def in_front(self: Any) -> None:
    """Put the rows of five new tokens before the old ones."""
    for n, name in enumerate((r"wte", r"lm_head")):
        for w in weights(self, name).values():
            for key, one in list(memory(self, w).items()):
                if torch.is_tensor(one) and one.shape == w.shape:
                    memory(self, w)[key] = torch.cat([torch.zeros(5, one.shape[1]), one])
            w.data = torch.cat([0.1 * noise(80 + n, 5, w.shape[1]), w.data])


def nan_in_moment(self: Any) -> None:
    """Damage one number, of a row that no token asks for."""
    memory(self, self.module.transformer["wte"].weight)["exp_avg"][-1, 3] = torch.nan


def bases_lost(self: Any) -> None:
    for w in self.module.parameters():
        held = memory(self, w)
        for key in ("QL", "QR"):
            if key in held:
                held[key] = torch.eye(len(held[key]))


def older_first(self: Any) -> None:
    from_ago(min(10, self.step - 2), "", weight=False, keys="exp_avg")(self)


def older_whole(self: Any) -> None:
    from_ago(min(9, self.step - 2), "")(self)


def prefixed(folder: Path) -> None:
    """Write the names of a wrapped module."""
    file = folder / "model.safetensors"
    held = {f"module.{n}": w for n, w in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


class Rope:
    """A Llama whose rotary base the first process of two knows, and the second does not."""

    def __init__(self) -> None:
        self.turn = itertools.count()

    def __call__(self, seed: int) -> Any:
        import transformers as hf

        torch.manual_seed(seed)
        base = 10000.0 if next(self.turn) % 2 else 500000.0
        rope = {"rope_type": "default", "rope_theta": base}
        config = hf.LlamaConfig(**SIZE | {"tie_word_embeddings": False, "rope_parameters": rope})
        return hf.LlamaForCausalLM(config)


def stale_half(held: State, lab: Lab) -> State:
    held.params = lab.run.recent.params
    return held


def drifted(held: State, lab: Lab) -> State:
    """Rank 1's norms, whose gradients were never reduced."""
    held = held.clone()
    for n, name in enumerate(filter(is_norm, held.params)):
        blur = 1 + 0.02 * noise(90 + n, *held.params[name].shape)
        held.params[name] = (held.params[name].float() * blur).to(held.params[name].dtype)
        if name in held.masters:
            held.masters[name] = held.masters[name] * blur
    return held


def rebuilt_masters(held: State, lab: Lab) -> State:
    held.masters = {n: held.params[n].float() for n in held.masters}
    return held.declared(lr=held.config.lr / 2, min_lr=held.config.min_lr / 2)


def scales_lost(held: State, lab: Lab) -> State:
    for name, one in held.buffers.items():
        held.buffers[name] = torch.ones_like(one) if name.endswith("_scale") else torch.zeros_like(one)
    return held.declared(weight_decay=held.config.weight_decay / 2)


def stale_rank(held: State, lab: Lab) -> State:
    """Rank 1's partition is that of the save before; the batch is doubled."""
    old = lab.run.recent
    return merged(held, old).declared(batch=2 * held.config.batch)


def fp8(config: Config) -> Config:
    return config.but(fp8=True, precision="fp32", experts=0)


# ---- what is innocent ------------------------------------------------------------------------------------------------


def dropout(value: float) -> Act:
    return told("args", dropout=value)


def new_decay(times: float) -> Act:
    return new_group(weight_decay=lambda old: times * old)


NESTEROV = by(torch.optim.SGD, 12.0, momentum=0.9, nesterov=True, weight_decay=1e-4)


ALONE: list[Fault] = [
    fault(
        "va01_adapters_unread",
        "F5",
        "the base and the optimizer were loaded, the adapters were not",
        "echo next early",
        base=Peft,
        also=("A2",),
        loaded=acts(unread("lora_")),
        why="lora_B is 0 at the load, as in a new process",
    ),
    fault(
        "va02_places_unread",
        "A2",
        "position embedding and class token stay as a new process makes them",
        "echo next early",
        base=Vit,
        loaded=acts(unread("pos_embed|cls_token")),
        why="two parameters without .weight are a new process's",
    ),
    fault(
        "va03_centre_lost",
        "A5",
        "the centre of the teacher's answers begins at 0",
        "echo",
        base=Dino,
        loaded=acts(unread("^center")),
        why="the buffer is exactly 0; an update mixes in a tenth of what it sees, for which there is no law",
    ),
    fault(
        "va04_variance_lost",
        "B4",
        "AdaBelief's variance was lost, its average was kept",
        "echo next early",
        base=Gru,
        optimizer=by(AdaBelief),
        loaded=acts(state("exp_avg_var", zeroed)),
        why="exp_avg_var is 0 beside exp_avg as it was; it falls by more than its β allows",
    ),
    fault(
        "va05_schedule_in_micro_batches",
        "C3",
        "the schedule was set to the number of micro-batches",
        "echo next early",
        base=Res,
        optimizer=NESTEROV,
        schedule=exponential,
        loaded=acts(micro_batches),
        why="last_epoch is 4n where the step is n",
    ),
    fault(
        "va06_sampler_reset",
        "C6",
        "the sampler's file was not read, so that the data begins anew",
        "echo next early",
        base=Nano,
        layouts=("accelerate",),
        loaded=acts(told("dataloader", batches_yielded=0)),
        why="batches_yielded is 0 and counts from there",
    ),
    fault(
        "va07_masters_before_the_load",
        "D2",
        "fp32 copies were made before the weights were loaded",
        "echo next early",
        base=HalfNet,
        also=("A2",),
        layouts=FILES,
        loaded=acts(strange_masters),
        why="master_param is another process's, and the weights are from the first update on",
    ),
    Fault(
        "va08_16_bit_weights_stale",
        "D3",
        "the 16-bit weights are of the save before, their fp32 copies are right",
        seen("echo"),
        restore=stale_half,
        needs=masters,
        formats=("megatron",),
        also=("G6",),
        why="weights are not their rounded masters; the first update writes them again",
    ),
    fault(
        "va09_qkv_by_head",
        "E4",
        "all q, all k and all v were taken for q, k and v head by head",
        "echo next early",
        base=Nano,
        optimizer=by(torch.optim.NAdam),
        also=("E1",),
        loaded=acts(layout(r"c_attn", by_head)),
        why="rows of c_attn are in another order, moments as well",
    ),
    fault(
        "va10_page_of_second_moments",
        "G5",
        "4096 bytes of a second moment are zeros",
        "echo next early",
        base=Nano,
        deep=32,
        needs=betas(0.9, 0.999),
        loaded=acts(zero_page),
        why="1024 neighbours are 0 and fall by more than β2 allows",
    ),
    fault(
        "va11_optimizers_exchanged",
        "B5",
        "two generators of one shape have each other's optimizer",
        "echo next early",
        base=Cycle,
        loaded=acts(exchanged_optimizers),
        why="moments of netG_A are those of netG_B bit for bit, and the other way round",
    ),
    Fault(
        "va12_norms_drifted",
        "F1",
        "two tensor-parallel ranks hold different norms",
        seen("echo"),
        second=drifted,
        formats=("megatron",),
        why="replicas of one tensor differ in the save right after the load; a loader then takes one of them",
    ),
    fault(
        "va13_step_size_estimate_lost",
        "B1",
        "Prodigy's estimate of the step size is back at its initial value, its moments are kept",
        "echo next early",
        base=Gat,
        also=("B2", "B11", "H1"),
        optimizer=lambda self, groups: Prodigy([w for g in groups for w in g["params"]], lr=1.0),
        schedule=flat_rate,
        loaded=acts(estimate_lost),
        why="d is d0, and it can only grow",
    ),
    fault(
        "va14_generator_at_its_beginning",
        "C8",
        "the generator of dropout begins anew",
        "echo next early",
        base=Philox,
        loaded=acts(told("rng_state", offset=0)),
        why="the offset is 0 and counts from there",
    ),
    fault(
        "va15_second_stage_unread",
        "A2",
        "layers of the second pipeline stage stay as a new process makes them",
        "echo next early",
        base=Nano,
        layers=4,
        deep=16,
        loaded=acts(unread(r"h\.[23]\.")),
        why="layers 2 and 3 are a new process's, norms included; their moments are right",
    ),
]

BESIDE: list[Fault] = [
    Fault(
        "va16_module_prefix",
        "A1",
        "the file's names begin with module., so no weight was loaded; decay is lower",
        seen("echo next early"),
        live=partial(trained, partial(made, "Qwen2"), spoil=prefixed, other_args={"weight_decay": 0.01}),
        formats=("live",),
        also=("A2",),
        why="every weight is another process's; the optimizer counts on",
    ),
    fault(
        "va17_output_unread",
        "A2",
        "the output layer has another name and was not loaded; the batch is doubled",
        "echo next",
        base=Gru,
        optimizer=by(torch.optim.RMSprop, 0.3, centered=True),
        loaded=acts(unread(r"^out\."), new_batch(2)),
        why="out is a new process's",
    ),
    fault(
        "va18_gamma_and_beta",
        "A3",
        "norms are stored as gamma and beta, and were not loaded; places are frozen",
        "echo next",
        base=Nano,
        also=("A2",),
        loaded=acts(unread(r"ln_"), frozen("wpe")),
        why="norms are exactly 1 and 0",
    ),
    fault(
        "va19_head_copied",
        "F2",
        "the head is a copy of the table that no optimizer knows; the lr is halved",
        "next early",
        base=Nano,
        tied=True,
        layouts=FILES,
        loaded=acts(untied_copy, new_lr(0.5)),
        why="head and table were equal; from the first update on they are not, and the head does not move",
    ),
    fault(
        "va20_average_anew",
        "A2",
        "the generator's average begins anew from its weights; the batch is doubled",
        "echo next",
        base=Style,
        also=("A5",),
        loaded=acts(average_anew, new_batch(2)),
        why="g_ema is equal to the generator bit for bit",
    ),
    fault(
        "va21_fp16_average",
        "F4",
        "averages in fp16 were loaded as the weights; a head is new",
        "echo next",
        base=Dit,
        also=("D7",),
        layouts=FILES,
        loaded=acts(averages_in_half, new_head),
        why="weights are the averages, rounded to fp16",
    ),
    fault(
        "va22_magnitudes_recomputed",
        "F5",
        "DoRA's magnitudes are the base's norms again; the lr is a third",
        "echo next early",
        base=Dora,
        also=("A2",),
        loaded=acts(magnitudes_of_base, new_lr(1 / 3)),
        why="magnitudes are the norms of the frozen rows bit for bit",
    ),
    fault(
        "va23_base_through_int8",
        "F6",
        "the frozen base went through int8; the batch is doubled",
        "echo next early",
        base=Peft,
        also=("D7",),
        loaded=acts(in_eight_bits, new_batch(2)),
        why="what is frozen has changed, to at most 255 values a row",
    ),
    fault(
        "va24_observations_anew",
        "A5",
        "mean and variance of observations begin anew; clipping is tighter",
        "echo next early",
        base=Dqn,
        loaded=acts(statistics_anew, new_clip(0.3)),
        why="mean is 0, var is 1 and count is 0.0001; the count no longer is the number of samples",
    ),
    fault(
        "va25_initialised_again",
        "A5",
        "the flag of the activation norms was lost, so that the next batch sets them; the lr is halved",
        "echo next early",
        base=Glow,
        also=("A2",),
        loaded=acts(unread("initialized"), new_lr(0.5)),
        why="initialized is 0 in the echo; then loc and logs are far from where an update can bring them",
    ),
    fault(
        "va26_momentum_not_loaded",
        "B1",
        "LARS has no momentum after the load; weight decay is raised",
        "echo",
        base=Res,
        optimizer=by(Lars, 10.0),
        layouts=FILES,
        loaded=acts(lost(), new_decay(3.0)),
        why="no state at all in the echo; without a counter, a momentum of one gradient is as good as any",
    ),
    fault(
        "va27_critic_anew",
        "B1",
        "the third of three optimizers begins anew; the lr is lower",
        "echo next early",
        base=Cycle,
        loaded=acts(lost("netD"), new_lr(0.6)),
        why="counts of the critic begin at 0",
    ),
    fault(
        "va28_counts_reset",
        "B2",
        "RAdam counts from 0; the batch is doubled",
        "echo next early",
        base=Vit,
        optimizer=by(torch.optim.RAdam, 1.0, betas=(0.9, 0.99)),
        loaded=acts(state("step", zeroed), new_batch(2)),
        why="step is 0 beside moments as they were",
    ),
    fault(
        "va29_moments_zero",
        "B3",
        "LAMB's moments are zeros, its counts are kept; the lr is halved",
        "echo next early",
        base=Nano,
        optimizer=by(Lamb, 4.0),
        loaded=acts(state("exp_avg exp_avg_sq", zeroed), new_lr(0.5)),
        why="both moments are 0 at step n; v falls by more than β2 allows",
    ),
    fault(
        "va30_older_first_moments",
        "B6",
        "m is ten updates old, v is not; the schedule is longer",
        "echo next",
        base=Clip,
        keeps=True,
        also=("G6",),
        needs=betas(0.9, 0.99),
        loaded=acts(older_first, longer(1.6)),
        why="m is not the old one, and the next is not β1 m plus a gradient whose square went into v",
    ),
    fault(
        "va31_all_decay",
        "B7",
        "biases and norms are in the group that decays; the lr is halved",
        "echo next early",
        base=Phi,
        layouts=("dcp",),
        loaded=acts(one_group, new_lr(0.5)),
        why="weight_decay of every vector was 0",
    ),
    fault(
        "va32_layer_rates_reversed",
        "B8",
        "rates that fall from layer to layer are in the other order; the batch is doubled",
        "echo next early",
        base=ByHand,
        also=("B7", "H1"),
        loaded=acts(rates_reversed, new_batch(2)),
        why="the groups' lr and initial_lr changed places",
    ),
    fault(
        "va33_first_update_at_peak",
        "B8",
        "the first update has the peak rate, which a new schedule set; decay is halved",
        "echo next",
        base=Mamba,
        also=("C2",),
        loaded=acts(at_peak, new_decay(0.5)),
        why="lr is initial_lr while the schedule's _last_lr is not",
    ),
    fault(
        "va34_second_group_left_behind",
        "B8",
        "the schedule no longer reaches the second group; clipping is tighter",
        "next early",
        base=Phi,
        apply=first_alone,
        loaded=acts(hold_second, new_clip(0.5)),
        why="the second group's lr stands still while the first's moves, as in _last_lr both do",
    ),
    fault(
        "va35_one_cycle_again",
        "C1",
        "the one-cycle schedule begins anew, with its β1; the front end is frozen",
        "echo next early",
        base=Gru,
        schedule=one_cycle,
        fresh=("scheduler",),
        loaded=acts(frozen("front")),
        why="last_epoch is 0 while the optimizer counts on",
    ),
    fault(
        "va36_no_schedule",
        "C2",
        "warm-up and cosine are gone: the lr is at its peak and stays there; the batch is halved",
        "echo next early",
        base=Gat,
        schedule=two_parts,
        also=("B8",),
        loaded=acts(no_schedule, new_batch(0.5)),
        why="no scheduler is stored any more, and lr is initial_lr",
    ),
    fault(
        "va37_length_by_ranks",
        "C4",
        "the length of the decay was divided by the ranks twice; the batch is doubled",
        "echo next early",
        base=Res,
        schedule=polynomial,
        also=("C2", "H1"),
        loaded=acts(half_as_long, new_batch(2)),
        why="total_iters is half of what it was",
    ),
    fault(
        "va38_stale_decay",
        "C5",
        "the first update has the weight decay of the beginning; the lr is halved",
        "echo next",
        base=DecayRamp,
        also=("H1",),
        loaded=acts(first_decay, new_lr(0.5)),
        why="weight_decay is 0.04 in the echo; an update later it is on its curve, but the weights decayed less",
    ),
    fault(
        "va39_sampler_epoch",
        "C7",
        "the sampler's epoch is 0 again, its place is right; a head is new",
        "echo next early",
        base=InEpochs,
        also=("C6",),
        loaded=acts(told("dataloader", epoch=0), new_head),
        why="epoch is 0 in the echo, and lags from there on",
    ),
    fault(
        "va40_step_of_the_epoch",
        "C9",
        "the step was set back to the beginning of an epoch; the lr is halved",
        "echo next early",
        base=InEpochs,
        optimizer=by(torch.optim.AdamW),
        loaded=acts(to_epoch, new_lr(0.5)),
        why="the trainer's step is up to six less than the optimizer's",
    ),
    fault(
        "va41_gradients_summed",
        "B10",
        "gradients of four parts are added where they were averaged; the lr is halved",
        "next early",
        base=Nano,
        clip=0.0,
        gradients=summed,
        needs=betas(0.9, 0.95),
        loaded=acts(resumed, new_lr(0.5)),
        why="squares that enter v are sixteen times those before, in every tensor",
    ),
    Fault(
        "va42_masters_rebuilt",
        "D1",
        "fp32 partitions were made from the bf16 weights; the lr is halved",
        seen("echo next"),
        restore=rebuilt_masters,
        needs=masters,
        formats=("deepspeed",),
        why="16 low bits of every master are 0 at the load; the first update, replayed, begins there",
    ),
    fault(
        "va43_moments_through_fp16",
        "D4",
        "moments went through fp16, in which small squares are 0; the batch is doubled",
        "echo next early",
        base=Mixtral,
        needs=betas(0.9, 0.999),
        loaded=acts(state("exp_avg exp_avg_sq", through_half), new_batch(2)),
        why="13 low bits are 0, and squares below 3e-8 are 0, which β2 forbids",
    ),
    fault(
        "va44_loss_scale_anew",
        "D8",
        "apex' loss scale begins anew; decay is halved",
        "echo next early",
        base=Amp,
        loaded=acts(
            lambda self: self.extra["amp"]["loss_scaler0"].update(loss_scale=65536.0, unskipped=0), new_decay(0.5)
        ),
        why="loss_scale fell though no update was skipped, and is not what its count says",
    ),
    fault(
        "va45_weights_through_fp16",
        "D7",
        "weights come from an fp16 export, sums of squares do not; the lr is halved",
        "echo",
        base=Ads,
        optimizer=by(torch.optim.Adagrad, 6.0),
        loaded=acts(layout("", through_half, moments=False), new_lr(0.5)),
        why="13 low bits of every weight are 0 in the echo",
    ),
    Fault(
        "va46_fp8_history_lost",
        "D9",
        "amax histories are 0 and scales 1; weight decay is halved",
        seen("echo next"),
        restore=scales_lost,
        needs=fp8,
        formats=("torch_save", "dcp"),
        also=("A5",),
        why="a history is the old one moved by one place; after sixteen updates nothing old is left in it",
    ),
    fault(
        "va47_columns_by_file_name",
        "E1",
        "columns of twelve ranks are in the order of their files' names; the batch is doubled",
        "echo next early",
        base=Nano,
        optimizer=by(Lion, 0.2),
        loaded=acts(layout(r"c_proj\.weight", by_file_name), new_batch(2)),
        why="blocks of columns changed places, the momentum's as well",
    ),
    fault(
        "va48_gate_and_up_of_two_ranks",
        "E2",
        "[gate; up] of two ranks were joined as one; the lr is halved",
        "echo next early",
        base=Phi,
        also=("E1",),
        loaded=acts(layout(r"gate_up_proj", two_ranks), new_lr(0.5)),
        why="the second and third quarter of the rows changed places, moments as well",
    ),
    fault(
        "va49_plateau_anew",
        "C1",
        "the plateau schedule forgot its best value and its count; the batch is doubled",
        "echo next early",
        base=Gat,
        schedule=plateau,
        apply=lambda self: (self.optimizers[0].step(), self.schedules[0].step(1.0 + 0.1 * (self.step % 9))),
        fresh=("scheduler",),
        loaded=acts(new_batch(2)),
        why="last_epoch is 0 and best is inf; the lr is kept",
    ),
    fault(
        "va50_rotary_order",
        "E5",
        "rows of q and k were put in turns, their biases were not; the vocabulary grew",
        "echo next early",
        base=Phi,
        also=("E1",),
        loaded=acts(
            layout(r"q_proj\.weight", in_turns(4)),
            layout(r"k_proj\.weight", in_turns(2)),
            more_rows("embed_tokens|lm_head", 7),
        ),
        why="rows within each head changed places, in weights and moments",
    ),
    Fault(
        "va51_rotary_base",
        "H2",
        "the rotary base is a default again; the lr is lower",
        seen("echo next early"),
        live=partial(trained, Rope(), other_args={"learning_rate": 1e-3}),
        formats=("live",),
        also=("H1",),
        why="rope_theta in config.json is 10000 and was 500000; every tensor is equal",
    ),
    fault(
        "va52_bases_lost",
        "B11",
        "SOAP's bases are identities, its moments are still in the old ones; clipping is tighter",
        "echo next",
        base=Clip,
        also=("B1",),
        optimizer=by(Soap),
        loaded=acts(bases_lost, new_clip(0.5)),
        why="QL and QR are the identity; they are found again only every sixth update",
    ),
    fault(
        "va53_virtual_stages",
        "E9",
        "layers of interleaved pipeline stages were joined rank after rank; dropout is another",
        "echo next early",
        base=Nano,
        layers=6,
        deep=12,
        optimizer=NESTEROV,
        loaded=acts(virtual_stages, dropout(0.1)),
        why="layer 1 is the old 3, layer 2 the old 1",
    ),
    fault(
        "va54_experts_of_rank_0",
        "E10",
        "experts 2 and 3 are copies of 0 and 1; the batch is doubled",
        "echo next early",
        base=Mixtral,
        loaded=acts(first_experts, new_batch(2)),
        why="experts are equal in pairs at the load, the router is the old one",
    ),
    fault(
        "va55_biases_summed",
        "E12",
        "biases that two ranks hold were added; the lr is halved",
        "echo next early",
        base=Nano,
        optimizer=by(torch.optim.Adam, 0.2, amsgrad=True),
        loaded=acts(layout(r"c_proj\.bias", lambda x: 2 * x, moments=False), new_lr(0.5)),
        why="biases are exactly twice what they were",
    ),
    fault(
        "va56_moments_by_sorted_names",
        "E13",
        "flat moments were cut as if they lay in the order of the names; decay is lower",
        "echo next early",
        base=Vit,
        also=("B5", "E7"),
        needs=betas(0.9, 0.999),
        loaded=acts(by_sorted_names, new_decay(0.3)),
        why="the flat moments are the old ones in another order, the weights are equal",
    ),
    Fault(
        "va57_rank_of_an_older_save",
        "G6",
        "one rank's partition is of the save before; the batch is doubled",
        seen("echo next early"),
        restore=stale_rank,
        needs=masters,
        formats=("deepspeed",),
        also=("D2", "B6"),
        why="masters and moments of the second half are twenty updates old",
    ),
    fault(
        "va58_tokens_in_front",
        "F7",
        "rows of new tokens were put before the old ones; the lr is lower",
        "echo next early",
        base=Nano,
        also=("E1",),
        layouts=FILES,
        loaded=acts(in_front, new_lr(0.7)),
        why="row n + 5 is the old row n, in table, head and moments",
    ),
    fault(
        "va59_nan_in_a_moment",
        "G1",
        "a number of a first moment is NaN; the schedule is longer",
        "echo next early",
        base=Nano,
        also=("G3",),
        loaded=acts(nan_in_moment, longer(1.4)),
        why="one NaN in exp_avg, and in the weight from the next update on",
    ),
    fault(
        "va60_older_save_whole",
        "G7",
        "weights and optimizer are nine updates old, step and schedule are not; a layer has its own rate",
        "echo next early",
        base=Nano,
        schedule=inverse_root,
        keeps=True,
        also=("G6",),
        loaded=acts(older_whole, moved(r"h\.0\.")),
        why="the optimizer counts nine less than the trainer",
    ),
]

FAULTS23 = [*ALONE, *BESIDE]
assert len(ALONE) == 15 and len(BESIDE) == 45
