"""Resumes of the lab's own trainer of the third sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.lab.changes import (
    ALIKE,
    ARGUED,
    BARE,
    EXTRA,
    FLAT,
    MOMENTS,
    WEIGHTS,
    Restore,
    both,
    ends,
    fields,
    layered,
    mapped,
    moved,
    of_layers,
    reborn,
    set_weights,
    steps,
    told,
    vectors,
    with_,
)
from tests.lab.config import Config
from tests.lab.corruption import flip
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.model import E4M3_MAX, LORA_SCALE, initial_buffers, is_norm
from tests.lab.opened2_faults import (
    CUT,
    EMBEDDING,
    HEAD,
    TABLES,
    exchanged,
    in_weights,
    meant,
    one_of,
    same,
    turned,
    well,
)
from tests.lab.opened_faults import wrong_axis
from tests.lab.split import axis_of, halves
from tests.lab.state import State
from tests.lab.train import train
from tests.lab.trials import interleaved

__all__ = ["OPENED3_FAULTS"]

Tensor = torch.Tensor
EXPERT = ".mlp.experts."


# ---- the optimizer's state -------------------------------------------------------------------------------------------


def in_eight_bits(tensor: Tensor) -> Tensor:
    """e4m3 with one scale for the whole tensor."""
    scale = E4M3_MAX / tensor.abs().max().clamp(min=1e-30)
    return (tensor * scale).to(torch.float8_e4m3fn).float() / scale


def narrow_optimizer(state: State, lab: Lab) -> State:
    """A saver that casts every number of the optimizer to bf16, counters included."""
    state = mapped(lambda t: t.bfloat16().float(), where=MOMENTS)(state, lab)
    return steps(lambda step: float(torch.tensor(step).bfloat16()))(state, lab)


def late(config: Config) -> Config:
    """Resumed at a step that bf16 does not have."""
    return config.but(resume=301, total=max(config.total, 400))


def local_experts(name: str, config: Config) -> str:
    """The same tensor of the expert that has this one's number on the first of two ranks."""
    head, _, rest = name.partition(EXPERT)
    number, _, side = rest.partition(".")
    return f"{head}{EXPERT}{int(number) % (config.experts // 2)}.{side}"


def padded_parts(tensor: Tensor) -> Tensor:
    """Cut for five ranks, each part padded to eight elements, and read as if nothing were."""
    parts = tensor.reshape(-1).split(-(-tensor.numel() // 5))
    line = torch.cat([torch.nn.functional.pad(part, (0, -len(part) % 8)) for part in parts])
    return line[: tensor.numel()].view(tensor.shape)


def without_bias(state: State, lab: Lab) -> State:
    """Moments stored as they are used: divided by what their start at 0 takes from them."""
    for found, beta in zip((state.exp_avg, state.exp_avg_sq), state.config.betas, strict=True):
        found |= {name: tensor / (1 - beta ** state.step[name]) for name, tensor in found.items()}
    return state


def absent_vectors(state: State, lab: Lab) -> State:
    """The second param group's state is not in the file."""
    for found in (state.exp_avg, state.exp_avg_sq, state.step):
        for name in list(filter(vectors, found)):
            del found[name]
    return state


def ungrouped(state: State, lab: Lab) -> State:
    """Moments by query group read as [Q; K; V]."""
    c = state.config
    for found in fields(state, MOMENTS):
        for name in filter(ends("q_proj"), list(found)):
            names = [name.replace("q_proj", f"{side}_proj") for side in "qkv"]
            rows = torch.cat([found[side].reshape(c.groups, -1, c.hidden) for side in names], 1).reshape(-1, c.hidden)
            parts = rows.split([len(found[side]) for side in names])
            found |= {side: part.clone() for side, part in zip(names, parts, strict=True)}
    return state


def pairs(change: Callable[[Tensor, Tensor], Tensor], where: Sequence[str]) -> Restore:
    """gate and up become the halves of what ``change`` makes of both."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, where):
            for name in filter(ends("gate_proj"), list(found)):
                other = name.replace("gate_proj", "up_proj")
                found[name], found[other] = (half.clone() for half in change(found[name], found[other]).chunk(2))
        return state

    return restore


def four_of_each(gate: Tensor, up: Tensor) -> Tensor:
    """[gate; up] of four ranks, one under the other."""
    return torch.cat([part for pair in zip(gate.chunk(4), up.chunk(4), strict=True) for part in pair])


def blocks_in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Sixteen rows of gate, sixteen of up, and so on."""
    return torch.stack([gate.view(-1, 16, gate.shape[1]), up.view(-1, 16, up.shape[1])], 1).reshape(-1, gate.shape[1])


def rope_of_moments(state: State, lab: Lab) -> State:
    return mapped(lambda t: interleaved(state, t), ends("q_proj", "k_proj"), MOMENTS)(state, lab)


def older_squares(state: State, lab: Lab) -> State:
    return replace(state, exp_avg_sq=lab.run.recent.exp_avg_sq)


def doubled_gradients(state: State, lab: Lab) -> State:
    """The tied table's moments, as if both of its uses had counted twice."""
    state.exp_avg[EMBEDDING] = state.exp_avg[EMBEDDING] * 2
    state.exp_avg_sq[EMBEDDING] = state.exp_avg_sq[EMBEDDING] * 4
    return state


# ---- masters ---------------------------------------------------------------------------------------------------------


def without_borrow(state: State, lab: Lab) -> State:
    """Masters put together of the bf16 weight and 16 more bits, as if the weight had not been rounded."""
    for name, master in state.masters.items():
        high = state.params[name].float().contiguous().view(torch.int32)
        state.masters[name] = (high | (master.contiguous().view(torch.int32) & 0xFFFF)).view(torch.float32)
    return state


def without_masters(state: State, lab: Lab) -> State:
    """The run goes on in bf16 alone."""
    moments = {where: {n: t.bfloat16() for n, t in getattr(state, where).items()} for where in MOMENTS}
    return replace(state, masters={}, **moments).declared(precision="bf16")


# ---- layouts ---------------------------------------------------------------------------------------------------------


def first_rows_twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.chunk(2)[0]] * 2)


def by_all_heads(state: State, lab: Lab) -> State:
    """Rows of k permuted for a rope's order with the number of q's heads."""

    def permute(tensor: Tensor) -> Tensor:
        return tensor.view(state.config.heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)

    return mapped(permute, ends("k_proj"), WEIGHTS)(state, lab)


def half_of_rope(state: State, lab: Lab) -> State:
    """The first half of each head's rows in interleaved order, the rest as it was."""
    width = state.config.head_dim
    half = torch.arange(width // 2)
    order = torch.cat([half.view(2, -1).T.reshape(-1), torch.arange(width // 2, width)])

    def permute(tensor: Tensor) -> Tensor:
        return tensor.view(-1, width, tensor.shape[1])[:, order].reshape(tensor.shape)

    return mapped(permute, ends("q_proj", "k_proj"))(state, lab)


def across_groups(state: State, lab: Lab) -> State:
    """Query heads counted over the groups first: rows of q and columns of o alike."""
    c = state.config
    order = torch.arange(c.heads).view(c.groups, -1).T.reshape(-1)
    rows = mapped(lambda t: t.view(c.heads, -1, c.hidden)[order].reshape(t.shape), ends("q_proj"))
    columns = mapped(lambda t: t.view(c.hidden, c.heads, -1)[:, order].reshape(t.shape), ends("o_proj"))
    return both(rows, columns)(state, lab)


def two_axes_of_ranks(state: State, lab: Lab) -> State:
    """Four shards in the order 0 2 1 3, as where a grid of ranks is walked along its other axis."""
    for found in fields(state, ALIKE):
        for name in found:
            if (axis := axis_of(name)) is not None:
                a, b, c, d = found[name].chunk(4, axis)
                found[name] = torch.cat([a, c, b, d], axis)
    return state


def stacked_otherwise(name: str, config: Config) -> str:
    """Experts of all layers in one stack, expert by expert, read layer by layer."""
    head, _, rest = name.partition(EXPERT)
    number, _, side = rest.partition(".")
    layer = int(head.rpartition(".")[2])
    at = int(number) * config.layers + layer
    return f"model.layers.{at // config.experts}{EXPERT}{at % config.experts}.{side}"


def norm_of_layer(state: State, lab: Lab) -> State:
    name = f"model.layers.{state.config.layers - 1}.post_attention_layernorm.weight"
    return set_weights(state, {"model.norm.weight": state.updated[name].clone()})


def balance_summed(state: State, lab: Lab) -> State:
    state.buffers = {name: 8 * buffer for name, buffer in state.buffers.items()}
    return state


def drifted_routers(state: State, lab: Lab) -> State:
    """Rank 1's routers got gradients of their own."""
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 30))
    drifted = {
        name: master * (1 + 1e-3 * torch.randn(master.shape, generator=made))
        for name, master in state.masters.items()
        if ".mlp.gate." in name
    }
    return set_weights(state.clone(), drifted)


# ---- missing, vocabulary, adapters -----------------------------------------------------------------------------------


def repeated_padding(state: State, lab: Lab) -> State:
    """The table cut to the tokens, and grown again by its last row."""

    def change(table: Tensor) -> Tensor:
        table[state.config.vocab :] = table[state.config.vocab - 1]
        return table

    return tables(state, change)


def tokens_inserted(state: State, lab: Lab) -> State:
    """A few tokens new in the middle of the vocabulary; what follows moves on."""
    vocab, count = state.config.vocab, lab.rng.randrange(2, 7)
    at = lab.rng.randrange(vocab // 4, vocab // 2)
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 30))

    def change(table: Tensor) -> Tensor:
        new = torch.randn((count, table.shape[1]), generator=made) * 0.02
        return torch.cat([table[:at], new, table[at : vocab - count], table[vocab:]])

    return tables(state, change)


def tables(state: State, change: Callable[[Tensor], Tensor]) -> State:
    return set_weights(state, {n: change(w.float().clone()) for n, w in state.updated.items() if TABLES(n)})


def folded(state: State, lab: Lab) -> State:
    """Gains of the norms multiplied into the matrices behind them, as an export for inference has it."""
    held, made = {name: w.float() for name, w in state.updated.items()}, {}
    for n in range(state.config.layers):
        layer = f"model.layers.{n}."
        for norm, behind in (("input_layernorm", "qkv"), ("post_attention_layernorm", "mlp")):
            gain = held[f"{layer}{norm}.weight"]
            made[f"{layer}{norm}.weight"] = torch.ones_like(gain)
            for name in filter(of_layers(n), held):
                reads = ends("q_proj", "k_proj", "v_proj") if behind == "qkv" else ends("gate_proj", "up_proj", "gate")
                if reads(name):
                    made[name] = held[name] * gain
    made[HEAD] = held[HEAD] * held["model.norm.weight"]
    made["model.norm.weight"] = torch.ones_like(held["model.norm.weight"])
    return set_weights(state, made)


#: The sixteen values of bitsandbytes' NF4, rounded.
NF4 = torch.tensor([-1, -.6962, -.5251, -.3949, -.2844, -.1848, -.0911, 0, .0796, .1609, .2461, .3379, .4407, .5626,
                    .7230, 1])  # fmt: skip


def through_four_bits(tensor: Tensor) -> Tensor:
    """NF4 with a scale for every 64 elements."""
    flat = torch.nn.functional.pad(tensor.float().reshape(-1), (0, -tensor.numel() % 64)).view(-1, 64)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
    codes = (flat[..., None] / scale[..., None] - NF4).abs().argmin(-1)
    return (NF4[codes] * scale).reshape(-1)[: tensor.numel()].view(tensor.shape)


def average_of_vectors(state: State, lab: Lab) -> State:
    state.ema |= {name: state.updated[name].float().clone() for name in filter(vectors, state.ema)}
    return state


# ---- values ----------------------------------------------------------------------------------------------------------


def bit_of_counter(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.step if not is_norm(name)])
    state.step[name] = float(flip(torch.tensor([state.step[name]]), 0, lab.rng.choice([9, 10, 11])))
    return state


def copied_within(tensor: Tensor, lab: Lab) -> Tensor:
    """Sixteen elements are those of another place."""
    flat = tensor.view(-1)
    source, target = lab.rng.sample(range(len(flat) // 16), 2)
    flat[16 * target : 16 * target + 16] = flat[16 * source : 16 * source + 16].clone()
    return tensor


def scaled_row(tensor: Tensor, lab: Lab) -> Tensor:
    tensor[lab.rng.randrange(len(tensor))] *= 256
    return tensor


def nan_balance(state: State, lab: Lab) -> State:
    name = lab.rng.choice(sorted(state.buffers))
    state.buffers[name] = state.buffers[name].clone()
    state.buffers[name][lab.rng.randrange(state.config.experts)] = math.nan
    return state


def emptied(*names: str) -> Callable[[Path, State, Lab], None]:
    """Files that were made and never filled."""

    def damage(path: Path, state: State, lab: Lab) -> None:
        (file,) = [path / name for name in names if (path / name).exists()]
        os.truncate(file, 0)

    return damage


def half_a_text(path: Path, state: State, lab: Lab) -> None:
    file = path / "trainer_state.json"
    os.truncate(file, int(file.stat().st_size * lab.rng.uniform(0.2, 0.9)))


def shard_missing(path: Path, state: State, lab: Lab) -> None:
    lab.rng.choice(sorted(path.glob("*.distcp"))).unlink()


# ---- savers ----------------------------------------------------------------------------------------------------------


def swapped_in(resumed: State, later: State) -> State:
    """A save while the model holds the average for an evaluation."""
    return replace(later, params={name: later.ema[name].to(w.dtype) for name, w in later.params.items()})


def no_masters(resumed: State, later: State) -> State:
    return replace(later, masters={})


def first_balance(resumed: State, later: State) -> State:
    """Buffers as they were when they were registered; what the run uses are other tensors."""
    return replace(later, buffers=initial_buffers(later.config))


def last_layer_kept(resumed: State, later: State) -> State:
    """A buffer for copies that is not filled anew for the last layer."""
    found = later.clone()
    for where in ALIKE:
        mine, old = getattr(found, where), getattr(resumed, where)
        mine |= {name: old[name].clone() for name in filter(of_layers(later.config.layers - 1), mine)}
    return found


def first_rank_twice(resumed: State, later: State) -> State:
    """Both ranks write attention under one rank's number."""
    found = later.clone()
    for held in fields(found, ALIKE):
        for name in [name for name in held if ".self_attn." in name]:
            if (axis := axis_of(name)) is not None:
                held[name] = torch.cat([halves(name, held[name])[0]] * 2, axis)
    return found


def narrow_moments(resumed: State, later: State) -> State:
    moments = {w: {n: t.bfloat16().float() for n, t in getattr(later, w).items()} for w in MOMENTS}
    return replace(later, **moments)


def moments_of_next(resumed: State, later: State) -> State:
    """Moments that an update went on with while the save was written."""
    ahead, _, _ = train(later, 1)
    return replace(later, exp_avg=ahead.exp_avg, exp_avg_sq=ahead.exp_avg_sq)


def ungathered(resumed: State, later: State) -> State:
    """The later half of the weights is never gathered from the ranks that update it."""
    names = list(later.params)[len(later.params) // 2 :]
    return replace(later, params=later.params | {name: resumed.params[name].clone() for name in names})


# ---- runs ------------------------------------------------------------------------------------------------------------


def _expert(config: Config) -> Config:
    return config.but(experts=4)


def _grouped(config: Config) -> Config:
    return config.but(heads=4, groups=2, hidden=config.hidden // config.heads * 4)


def _several(config: Config) -> Config:
    return config.but(groups=max(2, config.groups))


def _spare(config: Config) -> Config:
    return config.but(padded=config.padded + 16)


def _without_copies(config: Config, format: str) -> bool:
    return config.precision != "mixed"


def lora(part: str) -> Callable[[str], bool]:
    return lambda name: part in name


def less(count: int) -> Restore:
    """All that the trainer counts is of an earlier save; what the optimizer counts is right."""
    return told(lambda s: {
        "step": s.trainer.step - count, "scheduler": s.trainer.scheduler - count,
        "data_index": s.trainer.data_index - count, "loader": s.trainer.loader - count,
        "samples": s.trainer.samples - count * s.config.batch,
    })  # fmt: skip


AFTER = seen("echo next early")
LOUD = seen("alone echo next early")
SOON = seen("alone echo next")
LATER = seen("next early")
BRIEF = seen("echo next")
SINGLE = ("torch_save", "dcp")
WITH_LORA: Any = {"needs": with_(lora=4, precision="fp32"), "formats": EXTRA}

OPENED3_STATE = [
    Fault("z01_state_on_rows", "E13", "moments of row-parallel matrices joined along the other axis, weights right",
          AFTER, mapped(wrong_axis, ends("o_proj", "down_proj"), MOMENTS), also=("E1", "E4", "E7", "B5"),
          why="the state alone was put together wrongly"),
    Fault("z02_vectors_summed", "E12", "moments of the norms added over eight ranks", AFTER,
          mapped(lambda t: 8 * t, vectors, MOMENTS), also=("E13", "B6"), why="copies were added"),
    Fault("z03_squares_in_eight_bits", "D4", "exp_avg_sq in e4m3, one scale a tensor", LOUD,
          mapped(in_eight_bits, where=("exp_avg_sq",)), also=("B4", "B6", "B11", "G3"),
          why="rounding, by which small second moments vanish", formats=("megatron", "dcp", "dcp_sharded")),
    Fault("z04_narrow_optimizer", "D4", "the optimizer went through bf16, counters too", LOUD, narrow_optimizer,
          also=("C9", "B2", "G6"), why="moments of few bits; a counter beside the step's", needs=late, formats=FLAT),
    Fault("z05_local_experts", "B5", "experts of the second rank have the state of the first one's", LOUD,
          moved(local_experts, lora(EXPERT), MOMENTS), also=("E13", "E10", "E8", "E9", "G6", "G10"),
          why="state of other experts, twice", needs=_expert),
    Fault("z06_padded_parts", "E7", "padding within each parameter's line was read as its elements", LOUD,
          mapped(padded_parts, where=("masters", *MOMENTS)), also=("E13", "E8", "D2", "B5"),
          why="lines shifted from part to part", needs=masters, formats=("deepspeed",)),
    Fault("z07_state_of_tables", "B5", "moments of embedding and head exchanged", AFTER,
          exchanged("lm_head", "model.embed_tokens", TABLES, MOMENTS), also=("E13", "E9"),
          why="state of another parameter", needs=with_(tied=False)),
    Fault("z08_state_transposed", "E13", "moments of o_proj transposed, weights right", AFTER,
          mapped(lambda t: t.T, ends("o_proj"), MOMENTS), also=("E1", "E4", "B5"),
          why="another axis, of the state alone"),
    Fault("z09_without_bias", "B6", "moments stored without the bias of their start", BRIEF, without_bias,
          also=("E12", "E13", "B11", "B4", "B10"), why="factors by which the moments are not the optimizer's own",
          needs=with_(betas=(0.9, 0.999))),
    Fault("z10_state_of_lora_a", "B1", "state of each adapter's A is new", LOUD,
          both(mapped(torch.zeros_like, lora("lora_A"), MOMENTS), steps(lambda step: 0.0, lora("lora_A"))),
          also=("B2", "B3", "G6"), why="a part of the state was lost; its counters too", **WITH_LORA),
    Fault("z11_group_absent", "B1", "the second param group's state is not in the file", LOUD, absent_vectors,
          also=("A2", "B2", "G6"), why="a part of the state was lost", formats=BARE),
    Fault("z12_state_ungrouped", "E13", "moments of fused rows by query group read as [Q; K; V]", AFTER, ungrouped,
          also=("E4", "E6", "E1", "B5"), why="fused rows of the state alone in another layout", needs=_several),
    Fault("z13_state_of_four", "E13", "moments of [gate; up] of four ranks put together naively", AFTER,
          pairs(four_of_each, MOMENTS), also=("E2", "E3", "E1", "B5"), why="as z12"),
    Fault("z14_rope_of_moments", "E13", "rows of q's and k's moments permuted for interleaved rope", AFTER,
          rope_of_moments, also=("E5", "E6", "E1", "B5"), why="rows of the state alone in another order"),
    Fault("z15_squares_of_rank", "G6", "rank 1's exp_avg_sq is of the checkpoint before", AFTER,
          second=older_squares, also=("B6", "E13"), why="parts of two saves; of one moment",
          formats=("dcp_sharded", "megatron")),
    Fault("z16_doubled_gradients", "E12", "moments of the tied table count its gradient twice", BRIEF,
          doubled_gradients, also=("E13", "B6"), why="a factor for one parameter's state", needs=with_(tied=True)),
    Fault("z17_lr_at_floor", "B8", "the groups' lr is the schedule's last one", LOUD,
          told(lambda s: {"held_lr": s.config.min_lr}), also=("C1", "C2", "C3"), formats=FLAT,
          why="an lr that the schedule did not set"),
    # masters
    Fault("z20_master_of_table", "D1", "the embedding's master made anew from bf16", SOON,
          mapped(lambda t: t.bfloat16().float(), ends("embed_tokens"), ("masters",)), needs=masters),
    Fault("z21_without_borrow", "D2", "masters of a weight and 16 bits, where rounding up was not undone", SOON,
          without_borrow, also=("D1", "D3"), why="masters that are off by a last bit of their weights", needs=masters),
    Fault("z22_without_masters", "D1", "no masters any more: the run goes on in bf16", AFTER, without_masters,
          also=("D2", "D4", "D5", "D6", "A2", "H1"), why="masters that were not loaded; everything is in 16 bits",
          needs=masters, formats=("torch_save", "dcp", "dcp_sharded")),
]  # fmt: skip

OPENED3_LAYOUT = [
    Fault("z30_experts_missing", "A2", "no expert was loaded, the rest was", AFTER, reborn(lora(EXPERT)),
          also=("A1",), why="tensors that were not loaded", needs=_expert),
    Fault("z31_routers_missing", "A2", "no router was loaded", AFTER, reborn(ends("mlp.gate")), also=("E10",),
          why="tensors that were not loaded; experts do not fit their router", needs=_expert),
    Fault("z32_queries_alone", "A2", "of fused rows the queries alone were loaded: k and v are zero", LOUD,
          mapped(torch.zeros_like, ends("k_proj", "v_proj"), WEIGHTS), also=("G5", "E4", "G10"),
          why="tensors that were not filled"),
    Fault("z33_blocks_in_turn", "E2", "gate and up in blocks of sixteen rows, read as halves", AFTER,
          pairs(blocks_in_turn, ALIKE), also=("E3", "E1"), why="[gate; up] read in another layout"),
    Fault("z34_by_all_heads", "E5", "rows of k permuted with the number of q's heads", AFTER, by_all_heads,
          also=("E6", "E1", "E4"), why="rows of keys in another order", needs=_grouped),
    Fault("z35_repeated_padding", "F7", "the vocabulary's padding repeats the last token's row", AFTER,
          repeated_padding, also=("E11", "A2", "E8"), why="rows that were made anew, among the padding", needs=_spare),
    Fault("z36_tokens_inserted", "F7", "some tokens are new in the middle of the vocabulary", AFTER, tokens_inserted,
          also=("A2", "E11", "E1", "E8"), why="rows shifted, and rows that are new"),
    Fault("z37_norm_of_layer", "E9", "the last norm is the last layer's", BRIEF, norm_of_layer,
          also=("A2", "A3", "B5", "G6"), why="a tensor of a layer elsewhere"),
    Fault("z38_stage_early", "E9", "the second stage begins a layer early: 0 1 1 2", LOUD,
          moved(layered(lambda n, count: (0, 1, 1, 2)[n])), needs=with_(layers=4)),
    Fault("z39_pairs_exchanged", "E9", "weights of neighbouring layers exchanged, state right", AFTER,
          moved(layered(lambda n, count: n ^ 1), where=WEIGHTS), also=("E13", "B5"),
          why="layers exchanged; the state is that of others", needs=with_(layers=4)),
    Fault("z40_grid_of_ranks", "E1", "four shards in the order 0 2 1 3", AFTER, two_axes_of_ranks,
          also=("E7", "E8", "E6"), why="shards in another order"),
    Fault("z41_stacked_otherwise", "E10", "experts of all layers in one stack, read along its other axis", AFTER,
          moved(stacked_otherwise, lora(EXPERT)), also=("E9",), why="whole experts in other layers", needs=_expert),
    Fault("z42_balance_summed", "E12", "the experts' balance was added over eight ranks", BRIEF, balance_summed,
          also=("A5", "E10"), why="a buffer that was added, not taken", needs=_expert),
    Fault("z43_inverse_scales", "D9", "fp8 scales are the inverse of what their histories say", seen("alone echo"),
          mapped(lambda t: 1 / t, lambda name: name.endswith("_scale"), ("buffers",)), also=("A5", "E12"),
          why="buffers that were not restored rightly", needs=with_(fp8=True), formats=(*SINGLE, "lightning")),
    Fault("z44_scaled_adapters", "F5", "the adapters' scale is in their B, and applied again", AFTER,
          mapped(lambda t: LORA_SCALE * t, lora("lora_B"), WEIGHTS), also=("E12",), why="a factor of adapters",
          **WITH_LORA),
    Fault("z45_adapters_turned", "F5", "each layer has the next one's adapters", AFTER,
          moved(layered(turned), lora("lora_"), WEIGHTS), also=("E9", "A2", "B5"), why="whole adapters elsewhere",
          **WITH_LORA),
    Fault("z46_base_in_four_bits", "F6", "the base went through four bits", AFTER,
          mapped(through_four_bits, lambda name: "lora_" not in name and not is_norm(name), ("params",)),
          also=("D7", "F5", "G6"), why="frozen weights that changed; by rounding", **WITH_LORA),
    Fault("z47_folded", "A3", "gains of the norms are in the matrices behind them, the norms are 1", LOUD, folded,
          also=("A2", "E12", "H2"), why="no cause says it: norms that are not those of the save",
          needs=with_(tied=False)),
    Fault("z48_across_groups", "E6", "query heads counted over the groups first, in q and o alike", AFTER,
          across_groups, also=("E1", "E4"), why="heads in another order", needs=_grouped),
    Fault("z49_half_of_rope", "E5", "half of each head permuted for interleaved rope", AFTER, half_of_rope,
          also=("E6", "E1"), why="rows moved within heads"),
    Fault("z50_more_heads", "H2", "the config says twice the heads, of half the width", AFTER,
          lambda state, lab: state.declared(heads=2 * state.config.heads, groups=2 * state.config.groups),
          also=("H1", "E6"), why="a setting that no tensor's shape shows", formats=(*ARGUED, "folder")),
    Fault("z51_average_of_vectors", "F4", "the norms' average begins again from their weights", SOON,
          average_of_vectors, also=("A5", "G6"), why="a part of the average was not restored", needs=with_(ema=True),
          formats=EXTRA),
    Fault("z52_table_of_first", "E8", "both halves of the vocabulary are the first rank's rows", AFTER,
          mapped(first_rows_twice, TABLES, WEIGHTS), also=("F7", "E1", "G6", "G10", "A2"),
          why="a part in another's place, of one kind of tensor"),
    Fault("z53_drifted_routers", "F1", "routers differ between the ranks", seen("alone echo"), second=drifted_routers,
          also=("G6",), why="copies that should be one", needs=with_(precision="mixed", experts=4),
          formats=("megatron",)),
]  # fmt: skip

OPENED3_REST = [
    Fault("z60_schedule_of_epochs", "C1", "the schedule's position counts sixteen updates as one", LOUD,
          told(lambda s: {"scheduler": s.trainer.scheduler // 16}), also=("C2", "C3", "C9", "G6"),
          why="a position far behind the step's"),
    Fault("z61_samples_twice", "C6", "consumed samples count twice: as many again are skipped", LOUD,
          told(lambda s: {"samples": 2 * s.trainer.samples, "data_index": 2 * s.trainer.data_index,
                          "loader": 2 * s.trainer.loader}), also=("C7", "C9", "C10", "H1"),
          why="a position ahead of the step's", formats=("megatron", "deepspeed")),
    Fault("z62_every_other_batch", "C6", "the loader gives one batch of two after the resume", LATER,
          told(lambda s: {"silent": (("data", 2), ("loader", 2))}), also=("C7", "C9", "C10", "H1"),
          why="a position that runs ahead of the step's", formats=ARGUED),
    Fault("z63_older_trainer", "G6", "the trainer's own counters are of the checkpoint before", LOUD, less(20),
          also=("C9", "C1", "C2", "C3", "C6", "B2"), why="parts of two saves; counters disagree"),
    Fault("z64_half_of_batch", "C10", "half of the ranks, and half of the batch", AFTER,
          lambda state, lab: state.declared(batch=state.config.batch // 2), also=("H1",),
          formats=(*ARGUED, "megatron"), why="an argument that may be meant"),
    Fault("z65_scaler_gone", "D8", "no loss scale is stored any more", AFTER,
          lambda state, lab: state.declared(scaler=False), also=("H1", "A5"), needs=with_(scaler=True), formats=EXTRA,
          why="the scaler was lost; or is not used any more"),
    Fault("z66_average_twice", "F4", "the average moves twice an update, and no file holds its decay", LATER,
          told(lambda s: {"silent": (("ema", 0.9801),)}), also=("H1",), needs=with_(ema=True), formats=EXTRA,
          visible=False),
    Fault("z67_other_order", "C7", "the data is in another order, and no file says which", AFTER,
          told(lambda s: {"data_seed": 77}), visible=False, formats=("folder", "lightning", "accelerate")),
    # savers
    Fault("z70_saver_without_masters", "D1", "saves after the resume hold no masters", LATER, same, saver=no_masters,
          also=("A2", "B1", "D2", "D6", "H1"), why="masters that were not saved", needs=masters,
          formats=(*SINGLE, "torch_masters")),
    Fault("z71_saver_first_balance", "A5", "saves after the resume hold the experts' balance as it began", LATER, same,
          saver=first_balance, also=("E10",), why="buffers that were not saved", needs=_expert),
    Fault("z72_saver_keeps_layer", "G6", "saves after the resume hold the last layer as it was then", LATER, same,
          saver=last_layer_kept, also=("G7", "B8", "D6", "H1"), why="parts of two saves; a layer stands still"),
    Fault("z73_saver_first_rank", "E8", "saves after the resume hold attention of the first rank twice", LATER, same,
          saver=first_rank_twice, also=("E1", "E6", "G6", "G10"), why="a part in another's place"),
    Fault("z74_saver_narrow_moments", "D4", "saves after the resume hold moments of bf16", LATER, same,
          saver=narrow_moments, formats=FLAT),
    Fault("z75_saver_next_moments", "G6", "saves after the resume hold the next update's moments", seen("next"), same,
          saver=moments_of_next, also=("B6", "C9", "E13", "B10"), why="parts of two steps", formats=FLAT),
    Fault("z76_saver_ungathered", "D3", "saves after the resume hold half of the bf16 weights as they were then",
          LATER, same, saver=ungathered, also=("D2", "D6", "G6", "G7"), why="weights that are not their masters",
          needs=masters, formats=(*SINGLE, "deepspeed")),
    Fault("z77_saver_evaluated", "D3", "a save after the resume while the average is in the model", LATER, same,
          saver=swapped_in, also=("F4", "D2"), why="weights that are not their masters; they are the average",
          needs=with_(ema=True, precision="mixed"), formats=SINGLE),
    # values, files
    Fault("z80_bit_of_counter", "G2", "a bit of one parameter's counter is flipped", LOUD, bit_of_counter,
          also=("B2", "C9", "G1", "G6"), why="a counter apart from the others, by whatever cause", formats=FLAT),
    Fault("z81_copied_within", "G10", "sixteen elements of a matrix are those of another place in it", SOON,
          one_of(CUT, copied_within, "updated"), also=("G1", "G2", "G5", "G6", "D2", "E1"),
          why="elements that are not the stored ones", blind=_without_copies),
    Fault("z82_scaled_row", "G1", "a row of one matrix is 256 times as large", AFTER, in_weights(CUT, scaled_row),
          also=("G2", "G6", "G10", "E12", "A2"), why="numbers off by a bit of their exponent, all of a row"),
    Fault("z83_nan_balance", "G1", "a number of the experts' balance is NaN", LOUD, nan_balance, also=("G9", "A5"),
          why="a number that is none, in a buffer", needs=_expert),
    Fault("z84_empty_optimizer", "G4", "the optimizer's file is empty", seen("alone echo"),
          damage=emptied("optimizer.pt", "optimizer.bin"), also=("G5", "G8"), why="a file that was not written",
          formats=("folder", "accelerate")),
    Fault("z85_half_a_text", "G4", "the trainer's file ends early", seen("alone echo"), damage=half_a_text,
          also=("G8",), why="a save that was not completed", formats=("folder",)),
    Fault("z86_shard_missing", "G8", "one rank's shards are not there", seen("alone echo"), damage=shard_missing,
          also=("G4",), why="a save that was not completed", formats=("dcp_sharded",)),
]  # fmt: skip


# ---- healthy ---------------------------------------------------------------------------------------------------------


def with_average(state: State, lab: Lab) -> State:
    average = {name: weight.float().clone() for name, weight in state.updated.items()}
    return replace(state, ema=average).declared(ema=True)


def without_average(state: State, lab: Lab) -> State:
    return replace(state, ema={}).declared(ema=False)


def with_fp8(state: State, lab: Lab) -> State:
    state = state.declared(fp8=True)
    return replace(state, buffers=state.buffers | initial_buffers(state.config))


def elsewhere_in_data(state: State, lab: Lab) -> State:
    told = state.trainer
    return state.told(
        data_index=told.data_index + 50, loader=told.loader + 50, samples=told.samples + 50 * state.config.batch,
        data_seed=4321,
    )  # fmt: skip


def smaller_run(state: State, lab: Lab) -> State:
    c = state.config
    return state.declared(batch=c.batch // 2, lr=c.lr / 2, min_lr=c.min_lr / 2)


OPENED3_WELL: list[Fault] = [
    well("m01_end_of_warmup", "resumed where the warm-up ends", lambda c: c.but(warmup=c.resume, total=3 * c.resume)),
    well("m02_quick_betas", "betas of 0.5 and 0.8", {"betas": (0.5, 0.8)}),
    well("m03_tiny_eps", "an eps of 1e-15", {"eps": 1e-15}),
    well("m04_constant", "a constant lr after warm-up", lambda c: c.but(min_lr=c.lr)),
    well("m05_one_group", "one query group", {"heads": 4, "groups": 1, "hidden": 48, "ffn": 192},
         formats=("torch_save", "dcp", "dcp_sharded", "deepspeed", "folder")),
    well("m06_experts_plain", "eight experts, without masters", {"experts": 8, "tied": False, "precision": "fp32"},
         formats=("folder", "lightning", "accelerate", "dcp")),
    well("m07_all_extras", "an average, fp8, a loss scale", {"ema": True, "fp8": True, "scaler": True},
         formats=("torch_save", "dcp")),
    well("m08_adapters_of_one", "adapters of rank one", {"lora": 1, "precision": "fp32"}, formats=EXTRA),
    well("m09_experts_in_bf16", "experts in bf16 alone", {"experts": 4, "precision": "bf16"},
         formats=("torch_save", "dcp", "dcp_sharded"), also=("D5", "D6")),
    well("m10_few_tokens", "one short row a batch", {"batch": 1, "length": 6}),
    well("m11_decay_in_gradient", "Adam with much decay, nothing clipped", {"optimizer": "adam", "weight_decay": 0.5,
                                                                           "clip": 0.0}),
    well("m12_average_elsewhere", "an average, another layout, two parts", {"ema": True}, elsewhere=True, micro=2,
         formats=("torch_save", "lightning")),
    well("m13_large_lr", "a large lr, hardly warmed up", {"lr": 1e-2, "min_lr": 1e-4, "warmup": 2}),
    well("m14_wide", "wide and flat", {"heads": 8, "groups": 4, "hidden": 128, "ffn": 512, "layers": 2}),
    meant("p01_average_begins", "an average is kept from here on", ("H1", "A4", "F4"), with_average, formats=EXTRA,
          why="true: tensors were added"),
    meant("p02_average_ends", "no average is kept any more", ("H1", "A5", "F4"), without_average,
          needs=with_(ema=True), formats=EXTRA, why="true: the average is gone"),
    meant("p03_smaller_run", "half of the batch and of the lr", ("H1", "C10", "C2"), smaller_run,
          formats=(*ARGUED, "megatron"), why="true: both changed"),
    meant("p04_frozen", "the tables are not trained any more", ("H1", "D6"),
          told(lambda s: {"frozen": ("embed_tokens", "lm_head")}), why="true: weights stand still"),
    meant("p05_other_end", "a shorter schedule that ends at zero", ("H1", "C4", "C2"),
          lambda state, lab: state.declared(total=state.config.resume + 60, min_lr=0.0),
          formats=(*ARGUED, "megatron"), why="true: another curve"),
    meant("p06_other_adam", "other betas and another eps", ("H1",),
          lambda state, lab: state.declared(betas=(0.95, 0.98), eps=1e-7), why="true: both changed"),
    meant("p07_other_data", "other data, and further on", ("H1", "C6", "C7"), elsewhere_in_data,
          why="true: another position and seed", formats=(*ARGUED, "megatron")),
    meant("p08_fp8_begins", "fp8 from here on", ("H1", "A4", "D9"), with_fp8, formats=SINGLE,
          why="true: buffers were added, as they begin"),
]  # fmt: skip

OPENED3_FAULTS: list[Fault] = [*OPENED3_STATE, *OPENED3_LAYOUT, *OPENED3_REST, *OPENED3_WELL]
