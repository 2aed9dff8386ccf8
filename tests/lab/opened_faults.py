"""Faults of the lab's own trainer that were sealed once: they were counted, then opened, and are tuned on now."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.lab.changes import (
    ALIKE,
    ARGUED,
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
    matrices,
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
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.model import initial, is_norm
from tests.lab.split import axis_of, halves
from tests.lab.state import State
from tests.lab.train import train
from tests.lab.trials import other_run

__all__ = ["OPENED_FAULTS"]

TABLES = ends("embed_tokens", "lm_head")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


# ---- optimizer -------------------------------------------------------------------------------------------------------


def shifted_index(state: State, lab: Lab) -> State:
    """Numbered state one place on, wherever the shapes allow it: a parameter was added in front."""
    for found in fields(state, MOMENTS):
        old, names = dict(found), list(found)
        for before, name in itertools.pairwise(names):
            if old[before].shape == old[name].shape:
                found[name] = old[before].clone()
            else:
                found[name] = torch.zeros_like(old[name])
    return state


def largest_variance(state: State, lab: Lab) -> State:
    """The running maximum loaded in the place of the second moment."""
    older = [lab.run.at(step).exp_avg_sq for step in (lab.run.config.stale, lab.run.config.resume - 20)]
    for name, now in state.exp_avg_sq.items():
        state.exp_avg_sq[name] = torch.stack([now, *(one[name] for one in older)]).amax(0)
    return state


def one_counter(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.step if not is_norm(name)])
    state.step[name] = 0.0
    return state


def next_optimizer(state: State, lab: Lab) -> State:
    """An asynchronous save took the weights first, and the optimizer an update later."""
    later, _, _ = train(state, 1)
    return replace(state, exp_avg=later.exp_avg, exp_avg_sq=later.exp_avg_sq, step=later.step)


def zero_rows_of_variance(state: State, lab: Lab) -> State:
    name = lab.rng.choice([n for n in state.exp_avg_sq if ends("gate_proj", "q_proj")(n)])
    state.exp_avg_sq[name] = state.exp_avg_sq[name].clone()
    state.exp_avg_sq[name][: len(state.exp_avg_sq[name]) // 4] = 0
    return state


def crossed_moments(state: State, lab: Lab) -> State:
    """First moments of gate beside second moments of up, and the reverse."""
    return moved(_partner("gate_proj", "up_proj"), ends("gate_proj", "up_proj"), ("exp_avg",))(state, lab)


def _partner(one: str, other: str) -> Callable[[str, Config], str]:
    return lambda name, config: name.replace(one, "\0").replace(other, one).replace("\0", other)


# ---- masters ---------------------------------------------------------------------------------------------------------


def late_masters(state: State, lab: Lab) -> State:
    return replace(state, masters=lab.run.previous.masters)


def cut_weights(state: State, lab: Lab) -> State:
    """bf16 by cutting bits off instead of rounding."""
    for name, master in state.masters.items():
        state.params[name] = (master.view(torch.int32) & -65536).view(torch.float32).to(state.params[name].dtype)
    return state


def half_masters(state: State, lab: Lab) -> State:
    for name in list(state.masters)[::2]:
        state.masters[name] = state.params[name].float()
    return state


def master_of_neighbour(state: State, lab: Lab) -> State:
    names = [name for name in state.masters if ends("down_proj")(name)]
    first, second = names[:2]
    state.masters[first], state.masters[second] = state.masters[second], state.masters[first]
    return state


# ---- layout ----------------------------------------------------------------------------------------------------------


def wrong_axis(tensor: torch.Tensor) -> torch.Tensor:
    """Columns that two ranks shared, put one under the other and read as if they were whole rows."""
    return torch.cat(tensor.chunk(2, 1), 0).reshape(tensor.shape)


def interleaved_pairs(state: State, lab: Lab) -> State:
    """gate_0, up_0, gate_1, up_1 … cut in the middle."""
    for found in fields(state, ALIKE):
        for name in filter(ends("gate_proj"), list(found)):
            other = name.replace("gate_proj", "up_proj")
            mixed = torch.stack([found[name], found[other]], 1).reshape(-1, found[name].shape[1])
            found[name], found[other] = (part.clone() for part in mixed.chunk(2))
    return state


def groups_turned(*sides: str) -> Restore:
    """Rows of these by key group, in another order of groups."""

    def restore(state: State, lab: Lab) -> State:
        groups = state.config.groups

        def turn(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(groups, -1, tensor.shape[1]).roll(1, 0).reshape(tensor.shape)

        return mapped(turn, ends(*sides))(state, lab)

    return restore


def lexicographic(number: int, layers: int) -> int:
    return int(sorted(str(n) for n in range(layers))[number])


def doubled_half(state: State, lab: Lab) -> State:
    """Rank 0's part read for both ranks."""
    for found in fields(state, ALIKE):
        for name in found:
            if (axis := axis_of(name)) is not None and (found[name].shape[axis] % 2 == 0):
                found[name] = torch.cat([halves(name, found[name])[0]] * 2, axis)
    return state


def absent_shard(state: State, lab: Lab) -> State:
    """The third of four row shards was not found: its rows are as initialised."""
    new, made = initial(state.config, seed=77), {}
    for name in filter(ends("q_proj", "gate_proj", "o_proj"), state.params):
        parts = list(state.updated[name].chunk(4))
        parts[2] = new[name].chunk(4)[2].to(parts[2].dtype)
        made[name] = torch.cat(parts)
    return set_weights(state, made)


def experts_dealt(state: State, lab: Lab) -> State:
    """Experts written by two expert-parallel ranks in turn, and read in blocks."""
    count = state.config.experts
    order = [*range(0, count, 2), *range(1, count, 2)]

    def source(name: str, config: Config) -> str:
        head, _, rest = name.partition(".experts.")
        number, _, side = rest.partition(".")
        return f"{head}.experts.{order[int(number)]}.{side}"

    return moved(source, lambda name: ".experts." in name)(state, lab)


def balance_turned(state: State, lab: Lab) -> State:
    for name in [name for name in state.buffers if name.endswith("expert_bias")]:
        state.buffers[name] = state.buffers[name].roll(1) + 0.0
        if torch.equal(state.buffers[name], state.buffers[name].roll(1)):
            state.buffers[name] = -state.buffers[name]
    return state


# ---- vocabulary, averages, adapters ----------------------------------------------------------------------------------


def two_tokens(state: State, lab: Lab) -> State:
    one, two = lab.rng.sample(range(state.config.vocab), 2)

    def exchange(table: torch.Tensor) -> torch.Tensor:
        order = list(range(len(table)))
        order[one], order[two] = two, one
        return table[order]

    return mapped(exchange, TABLES)(state, lab)


def sorted_tokens(state: State, lab: Lab) -> State:
    vocab = state.config.vocab
    order = [*sorted(range(vocab), key=str), *range(vocab, state.config.padded)]
    return mapped(lambda table: table[order], TABLES)(state, lab)


def last_tokens_average(state: State, lab: Lab) -> State:
    """The table was cut and grown again: its last rows are the mean of the others."""
    count = state.config.vocab // 6
    for found in fields(state, WEIGHTS):
        for name in filter(TABLES, found):
            found[name] = found[name].clone()
            last = slice(state.config.vocab - count, state.config.vocab)
            found[name][last] = found[name][: last.start].float().mean(0).to(found[name].dtype)
    return state


def tied_wrongly(state: State, lab: Lab) -> State:
    """The head of an untied model set to its embedding."""
    return set_weights(state, {HEAD: state.updated[EMBEDDING].clone()})


def swapped_average(state: State, lab: Lab) -> State:
    average, raw = dict(state.ema), {name: w.float().clone() for name, w in state.updated.items()}
    return replace(set_weights(state, average), ema=raw)


def averaged_saves(state: State, lab: Lab) -> State:
    """The mean of the last three saves."""
    saves = [lab.run.at(step).updated for step in (lab.run.config.resume - 40, lab.run.config.resume - 20)]
    return set_weights(
        state,
        {name: (w.float() + sum(one[name].float() for one in saves)) / 3 for name, w in state.updated.items()},
    )


def adapters_crossed(state: State, lab: Lab) -> State:
    """B of q's adapter loaded for v, and the reverse; where heads and groups are as many."""
    pick = ends("q_proj.lora_A", "v_proj.lora_A", "q_proj.lora_B", "v_proj.lora_B")
    return moved(_partner("q_proj", "v_proj"), pick, WEIGHTS)(state, lab)


def older_adapters(state: State, lab: Lab) -> State:
    older = lab.run.stale.updated
    return set_weights(state, {name: older[name] for name in older if "lora_" in name})


def other_base(state: State, lab: Lab) -> State:
    other = initial(lab.run.config, seed=lab.run.config.seed + 7)
    weights = {name: w.float() + 0.1 * other[name] for name, w in state.params.items() if "lora_" not in name}
    return set_weights(state, {name: w for name, w in weights.items() if not is_norm(name)})


# ---- values ----------------------------------------------------------------------------------------------------------


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Through eight bits with one scale a row, as a quantised export has them."""
    if weight.ndim < 2:
        return weight
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight.float() / scale).round() * scale


def souped(state: State, lab: Lab) -> State:
    other = other_run(lab).updated
    return set_weights(state, {name: (w.float() + other[name].float()) / 2 for name, w in state.updated.items()})


def scaled_table(state: State, lab: Lab) -> State:
    factor = math.sqrt(state.config.hidden)
    return set_weights(state, {EMBEDDING: state.updated[EMBEDDING].float() * factor})


def swapped_bytes(state: State, lab: Lab) -> State:
    """One matrix read with the bytes of each element in the other order."""
    name = lab.rng.choice([name for name in state.params if ends("o_proj")(name)])
    tensor = state.updated[name]
    turned = tensor.contiguous().view(torch.uint8).view(-1, tensor.element_size()).flip(1).contiguous()
    state.updated[name] = turned.view(tensor.dtype).view(tensor.shape)
    if state.masters:
        state.params[name] = state.updated[name].to(state.params[name].dtype)
    return state


def misread_type(state: State, lab: Lab) -> State:
    """bf16 bytes of one matrix taken for fp16."""
    name = lab.rng.choice([name for name in state.params if ends("up_proj")(name)])
    wrong = state.updated[name].bfloat16().view(torch.float16).float()
    return set_weights(state, {name: wrong.nan_to_num(0.0)})


def nan_row(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.params if ends("k_proj")(name)])
    weight = state.updated[name].clone()
    weight[lab.rng.randrange(len(weight))] = math.nan
    return set_weights(state, {name: weight})


def stale_layer(state: State, lab: Lab) -> State:
    older = lab.run.recent
    for where in ALIKE:
        for name in filter(of_layers(0), getattr(state, where)):
            getattr(state, where)[name] = getattr(older, where)[name]
    return state


def stale_norms(state: State, lab: Lab) -> State:
    older = lab.run.stale.updated
    return set_weights(state, {name: older[name] for name in older if is_norm(name)})


def norms_of_other_run(state: State, lab: Lab) -> State:
    other = other_run(lab).updated
    return set_weights(state, {name: other[name] for name in other if is_norm(name)})


def exchanged_pages(path: Path, state: State, lab: Lab) -> State:
    """Two runs of 2 KiB within one tensor of a file have changed places."""
    name = lab.rng.choice([name for name in state.exp_avg if ends("up_proj")(name)])
    tensor = state.updated[name].clone()
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    half = 2048
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        content = file.read_bytes() if file.is_file() else b""
        at = content.find(data)
        if at >= 0:
            first, last = content[at : at + half], content[at + len(data) - half : at + len(data)]
            changed = last + content[at + half : at + len(data) - half] + first
            file.write_bytes(content[:at] + changed + content[at + len(data) :])
            state.updated[name] = torch.frombuffer(bytearray(changed), dtype=tensor.dtype).view(tensor.shape)
            state.round_weights()
            return state
    raise ValueError("no file holds the tensor whole")


def lagging_weights(resumed: State, later: State) -> State:
    """The saver writes the weights that it copied when the run began, beside today's optimizer."""
    found = later.clone()
    found.params, found.masters = resumed.clone().params, resumed.clone().masters
    return found


def lagging_optimizer(resumed: State, later: State) -> State:
    """The saver writes the optimizer that it copied when the run began, beside today's weights."""
    found, old = later.clone(), resumed.clone()
    found.exp_avg, found.exp_avg_sq, found.step = old.exp_avg, old.exp_avg_sq, old.step
    return found


def rounded_save(resumed: State, later: State) -> State:
    """The saver casts fp32 weights to bf16 and back."""
    return replace(later, params={name: w.bfloat16().float() for name, w in later.params.items()})


def unchanged_state(state: State, lab: Lab) -> State:
    return state


def _twelve(config: Config) -> Config:
    return config.but(
        layers=11, heads=2, groups=2, hidden=16, ffn=64, batch=4, experts=0, resume=min(config.resume, 60)
    )


def _expert(config: Config) -> Config:
    return config.but(experts=config.experts or 4)


def _grouped(config: Config) -> Config:
    return config.but(heads=4, groups=2, hidden=config.hidden // config.heads * 4)


def _many(config: Config) -> Config:
    return config.but(heads=4, groups=4, hidden=config.hidden // config.heads * 4)


def _adapted(config: Config) -> Config:
    return _many(config).but(lora=4, precision="fp32")


AFTER = seen("echo next early")
LOUD = seen("alone echo next early")
LORA = with_(lora=4, precision="fp32")
WHOLE = ("torch_save", "torch_masters", "folder", "lightning", "accelerate")

OPENED_FAULTS = [
    # the optimizer's state
    Fault("s01_moments_summed", "E12", "moments added over two ranks that held the same", AFTER,
          mapped(lambda t: t * 2, where=MOMENTS), also=("E13", "B6"), why="copies were added; states not of this run"),
    Fault("s02_momentum_negated", "B6", "exp_avg with the other sign", AFTER,
          mapped(lambda t: -t, where=("exp_avg",)), also=("B5", "E12", "E13", "H1"),
          why="the first moment is not its own"),
    Fault("s03_root_of_variance", "B6", "exp_avg_sq stored as its root", AFTER,
          mapped(lambda t: t.sqrt(), where=("exp_avg_sq",)), also=("B11", "E13", "B4"),
          why="the second moment is not the optimizer's own"),
    Fault("s04_state_of_last_stage", "B1", "moments and counters of the last layer are new", LOUD,
          both(lambda s, lab: mapped(torch.zeros_like, of_layers(s.config.layers - 1), MOMENTS)(s, lab),
               lambda s, lab: steps(lambda step: 0.0, of_layers(s.config.layers - 1))(s, lab)),
          also=("B3", "G6"), formats=FLAT, why="a stage's state was lost; zeros say the same"),
    Fault("s05_state_of_embedding", "B3", "moments of the embedding zeroed", LOUD,
          mapped(torch.zeros_like, ends("embed_tokens"), MOMENTS), also=("B1", "G5"), why="state lost, as zeros"),
    Fault("s06_state_one_on", "B5", "numbered state bound one parameter further", AFTER, shifted_index,
          also=("E13", "B1", "B3"), formats=FLAT, why="bound elsewhere; what did not fit is zero"),
    Fault("s07_variance_of_one", "B4", "exp_avg_sq filled with 1", AFTER,
          mapped(torch.ones_like, where=("exp_avg_sq",)), also=("B1", "B6", "B3", "A2"),
          why="the second moment is fresh"),
    Fault("s08_largest_variance", "B11", "the maximum of exp_avg_sq loaded as exp_avg_sq", seen("echo"),
          largest_variance, also=("B6", "G6", "E13"), why="a second moment of other steps"),
    Fault("s09_counters_of_parts", "C9", "the optimizer's counters are four times as high", LOUD,
          steps(lambda step: 4 * step), also=("B2",), why="the counters are what is wrong"),
    Fault("s10_counters_one_back", "B2", "the optimizer's counters are one too low", AFTER,
          steps(lambda step: step - 1), also=("C9", "G6"), why="a counter that differs by a step"),
    Fault("s11_one_counter", "B2", "the counter of one matrix is 0", LOUD, one_counter, also=("G6",),
          formats=FLAT, why="one counter apart from the others is what mixed saves leave too"),
    Fault("s12_moments_through_fp16", "D4", "moments through fp16: small ones become 0", seen("echo"),
          mapped(lambda t: t.half().float(), where=MOMENTS), also=("B4", "B6"), needs=with_(precision="fp32"),
          formats=FLAT, why="rounding to 16 bits, by which second moments vanish"),
    Fault("s13_crossed_first_moments", "B5", "exp_avg of gate and up exchanged, exp_avg_sq not", AFTER,
          crossed_moments, also=("B6", "E3", "E13"), why="moments of two parameters; of one kind alone"),
    Fault("s14_optimizer_ahead", "G6", "the optimizer is an update ahead of the weights", AFTER, next_optimizer,
          also=("C9", "B6", "E13", "D2"), why="parts of two steps; the counters show it too"),
    Fault("s15_variance_rows_zero", "G5", "a quarter of the rows of one exp_avg_sq is zero", LOUD,
          zero_rows_of_variance, also=("B4", "B6", "G3"), why="zeros in a second moment"),
    Fault("s16_lexicographic_state", "B5", "state of 11 layers bound in the order of their names", AFTER,
          moved(layered(lexicographic), where=MOMENTS), also=("E13", "E9"), needs=_twelve, formats=FLAT,
          why="state of other parameters, by a map of layers"),
    # masters
    Fault("s17_masters_through_fp16", "D1", "masters through fp16", seen("alone echo next"),
          mapped(lambda t: t.half().float(), where=("masters",)), also=("D2", "D7"), needs=masters,
          why="masters of 16 bits; bf16 of them may differ"),
    Fault("s18_masters_late", "D2", "masters an update behind", seen("alone echo next"), late_masters, needs=masters,
          also=("G6", "D3"), why="parts of two steps"),
    Fault("s19_weights_cut", "D3", "weights are masters with bits cut off, not rounded", seen("alone echo"),
          cut_weights, needs=masters, also=("D2", "D7"), why="weights that are not their masters, by a last bit"),
    Fault("s20_half_of_masters", "D1", "every other master made anew from bf16", seen("alone echo next"),
          half_masters, needs=masters),
    Fault("s21_masters_exchanged", "D2", "masters of two layers' down_proj exchanged", LOUD, master_of_neighbour,
          needs=masters, also=("E9", "B5"), why="masters of another tensor"),
    Fault("s22_masters_of_average", "D2", "masters set to the average", seen("alone echo next"),
          lambda s, lab: replace(s, masters={name: s.ema[name].clone() for name in s.masters}), also=("F4",),
          needs=lambda c: c.but(ema=True, precision="mixed"), formats=("torch_save", "dcp"),
          why="an average in the masters' place"),
    # layouts
    Fault("s23_joined_on_rows", "E1", "row-parallel matrices joined along the wrong axis", AFTER,
          mapped(wrong_axis, ends("o_proj", "down_proj")), also=("E4", "A2"), why="another axis; as if not loaded"),
    Fault("s24_row_parallel_turned", "E1", "ranks of row-parallel matrices in the wrong order, the others right", AFTER,
          mapped(lambda t: torch.cat(t.chunk(2, 1)[::-1], 1), ends("o_proj", "down_proj")), also=("E6",),
          why="columns in another order; of o_proj they are heads"),
    Fault("s25_key_groups_turned", "E6", "key and value heads in another order than their queries", AFTER,
          groups_turned("k_proj", "v_proj"), also=("E4", "E1"), needs=_grouped, why="heads in another order"),
    Fault("s26_value_heads_turned", "E6", "value heads in another order", AFTER, groups_turned("v_proj"),
          also=("E4", "E1"), needs=_grouped, why="as s25"),
    Fault("s27_query_for_key", "E4", "q and k of fused rows exchanged", AFTER,
          moved(_partner("q_proj", "k_proj"), ends("q_proj", "k_proj")), also=("E6", "E9", "E3"), needs=_many,
          why="fused rows in another order; whole tensors exchanged"),
    Fault("s28_rows_in_turn", "E2", "gate and up taken in turn, read as halves", AFTER, interleaved_pairs, also=("E3",),
          why="[gate; up] read in another layout"),
    Fault("s29_embedding_for_head", "F2", "embedding and head exchanged", AFTER,
          moved(_partner("lm_head", "model.embed_tokens"), TABLES), also=("E9", "F3", "F7"),
          needs=with_(tied=False), why="two tables exchanged: whole tensors elsewhere"),
    Fault("s30_norms_crossed", "E9", "a layer's two norms exchanged, in every layer", AFTER,
          moved(_partner("input_layernorm", "post_attention_layernorm"),
                ends("input_layernorm", "post_attention_layernorm")), also=("E3", "A2", "B5"),
          why="whole tensors elsewhere"),
    Fault("s31_experts_in_turn", "E10", "experts dealt to ranks in turn, read in blocks", AFTER, experts_dealt,
          also=("E9",), needs=_expert, why="whole experts elsewhere"),
    Fault("s32_routers_exchanged", "E10", "routers of two layers exchanged", AFTER,
          moved(layered(lambda n, count: (1, 0)[n] if n < 2 else n), ends("mlp.gate")), also=("E9",), needs=_expert,
          why="whole tensors of other layers"),
    Fault("s33_balance_turned", "A5", "expert_bias in another order", seen("echo"), balance_turned, also=("E10",),
          needs=_expert, why="a buffer of the router's, not with its experts"),
    Fault("s34_stage_repeated", "E9", "the first half of the layers read for the second as well", LOUD,
          moved(layered(lambda n, count: n % (count // 2))), needs=with_(layers=4)),
    Fault("s35_layers_reversed", "E9", "layers in reverse order", AFTER,
          moved(layered(lambda n, count: count - 1 - n))),
    Fault("s36_lexicographic_layers", "E9", "11 layers in the order of their names", AFTER,
          moved(layered(lexicographic)), needs=_twelve, formats=FLAT),
    Fault("s37_half_repeated", "E8", "rank 0's part read for both ranks", AFTER, doubled_half, also=("E1", "G6", "G10"),
          why="a shard read in another's place"),
    Fault("s38_shard_absent", "A2", "rows of one shard of four left at random values", AFTER, absent_shard,
          also=("E8", "G6"), why="a part that was not loaded; of one rank"),
    # vocabulary, averages, adapters
    Fault("s39_two_tokens", "F7", "two tokens have each other's rows", AFTER, two_tokens, also=("E1", "E8"),
          why="rows of the vocabulary in another order"),
    Fault("s40_sorted_tokens", "F7", "tokens numbered in the order of their names", AFTER, sorted_tokens,
          also=("E1",), why="rows of the vocabulary in another order"),
    Fault("s41_last_tokens_mean", "F7", "the last sixth of the vocabulary set to the mean of the others", AFTER,
          last_tokens_average, also=("A2", "E8"), why="rows that are new"),
    Fault("s42_head_shifted", "F7", "rows of the head shifted by one, the embedding right", AFTER,
          mapped(lambda t: t.roll(-1, 0), ends("lm_head")), also=("E1",), needs=with_(tied=False),
          why="rows of the vocabulary in another order"),
    Fault("s43_tied_wrongly", "F2", "the head of an untied model set to its embedding", AFTER, tied_wrongly,
          also=("A2", "E9"), needs=with_(tied=False), why="two tables became one; another tensor's values"),
    Fault("s44_average_exchanged", "F4", "weights and their average exchanged", seen("echo next"), swapped_average,
          needs=with_(ema=True), formats=EXTRA),
    Fault("s45_average_stands", "F4", "the average is not moved any more", seen("next early"),
          told(lambda s: {"silent": (("ema", 1.0),)}), also=("G6",), needs=with_(ema=True),
          formats=EXTRA, why="the average's own state; a part of an older save"),
    Fault("s46_mean_of_saves", "F4", "the mean of the last three saves loaded", seen("echo next"), averaged_saves),
    Fault("s47_adapters_crossed", "F5", "adapters of q and v exchanged", AFTER, adapters_crossed,
          also=("E9", "A2", "B5", "E3"), needs=_adapted, formats=EXTRA, why="whole tensors elsewhere"),
    Fault("s48_adapters_older", "F5", "adapters of an older save", seen("echo next"), older_adapters, also=("G6", "D2"),
          needs=LORA, formats=EXTRA, why="parts of two saves"),
    Fault("s49_base_other", "F6", "the base is another revision", AFTER, other_base, also=("A2", "F5", "G6"),
          needs=LORA, formats=EXTRA, why="frozen weights that changed"),
    Fault("s50_base_through_int8", "F6", "the base went through eight bits", AFTER,
          mapped(int8, lambda name: "lora_" not in name, ("params",)), also=("D7", "F5", "G6"), needs=LORA,
          formats=EXTRA, why="frozen weights that changed; by rounding"),
    # values
    Fault("s51_weights_through_int8", "D7", "weights went through eight bits", seen("echo next"),
          mapped(int8, where=WEIGHTS), also=("G6", "D1"), why="an export was resumed from"),
    Fault("s52_souped", "F4", "weights averaged with those of another run", AFTER, souped,
          also=("E12", "A2", "G6", "F6"), why="an average, though not of this run alone"),
    Fault("s53_embedding_scaled", "E12", "the embedding times the root of its width", AFTER, scaled_table,
          why="one factor for a whole tensor"),
    Fault("s54_bytes_turned", "G1", "one matrix with its bytes in the other order", LOUD, swapped_bytes,
          also=("G2", "G10", "G6", "A2"), needs=with_(precision="fp32"), why="bytes that are not the stored ones"),
    Fault("s55_type_misread", "A2", "bf16 bytes of one matrix taken for fp16", AFTER, misread_type,
          also=("G1", "G6", "G10", "D7", "E12"), why="values that were not loaded rightly; near a factor"),
    Fault("s56_nan_row", "G1", "a row of one k_proj is NaN", LOUD, nan_row),
    Fault("s57_layer_older", "G6", "one layer with its state is of the checkpoint before", AFTER, stale_layer),
    Fault("s58_norms_older", "G6", "norms of an older save", seen("echo next"), stale_norms, also=("D2", "A2"),
          why="parts of two saves"),
    Fault("s59_norms_of_other_run", "G6", "norms of another run", seen("echo next"), norms_of_other_run,
          also=("A2", "D2", "F6"), why="parts that are not this run's"),
    Fault("s60_pages_exchanged", "G10", "two runs of bytes within a tensor exchanged", AFTER, damage=exchanged_pages,
          also=("G5", "G6", "E1", "G2", "G1"), needs=with_(precision="fp32"), formats=WHOLE[:1] + WHOLE[2:],
          why="bytes at other places of a file"),
    Fault("s61_last_norm_reborn", "A3", "one norm left at 1", LOUD, reborn(lambda name: name == "model.norm.weight"),
          also=("A2",), why="one tensor that was not loaded"),
    Fault("s62_moments_of_vectors_lost", "B3", "moments of the norms zeroed, counters kept", LOUD,
          mapped(torch.zeros_like, vectors, MOMENTS), also=("B1",), why="state lost, as zeros"),
    Fault("s63_moments_of_matrices_halved", "E12", "moments of the matrices divided by the ranks", AFTER,
          mapped(lambda t: t / 4, matrices, MOMENTS), also=("E13", "B6"), why="copies were averaged with nothing"),
    # the trainer
    Fault("s64_schedule_longer", "C4", "another length of the schedule, from a default", seen("next early echo"),
          lambda state, lab: state.declared(total=3 * state.config.total), also=("C2", "H1"),
          formats=(*ARGUED, "megatron"), why="another curve, by an argument"),
    Fault("s65_schedule_in_twos", "C3", "the schedule is stepped twice an update from the resume on",
          seen("next early"), told(lambda s: {"silent": (("schedule", 2),)}), also=("C1",),
          why="the schedule is ahead of the step"),
    Fault("s66_schedule_of_samples", "C3", "the schedule's position counts samples", LOUD,
          told(lambda s: {"scheduler": s.trainer.scheduler * s.config.batch}), also=("C2", "C1"),
          formats=FLAT, why="a position that is a multiple; the lr is at its end"),
    Fault("s67_lr_of_vectors", "B8", "the lr of one group is stuck at its peak", LOUD,
          told(lambda s: {"vector_lr": s.config.lr}), also=("C1", "C2"), formats=FLAT,
          why="a group beyond the schedule"),
    Fault("s68_loader_stands", "C6", "the loader's position does not move", seen("next early"),
          told(lambda s: {"silent": (("data", 0), ("loader", 0))}), also=("C7",), formats=ARGUED,
          why="the data's position is not the step's"),
    Fault("s69_trainer_behind", "C9", "the trainer's step is 20 behind all else", LOUD,
          told(lambda s: {"step": s.trainer.step - 20}), also=("G6", "B2"), why="counters disagree"),
    Fault("s70_random_unsaved", "C8", "random states are not saved any more", AFTER,
          lambda state, lab: state.declared(unstored=("rng_state",)), also=("A5",),
          formats=("torch_save", "dcp", "torch_masters"), why="state outside the model's tensors is gone"),
    Fault("s81_schedule_unsaved", "C1", "the schedule is not loaded, nor saved any more: the lr starts again", AFTER,
          lambda state, lab: state.declared(unstored=("scheduler",)).told(scheduler=0), also=("C2",), formats=WHOLE,
          why="lr starts anew; the curve is not stored"),
    Fault("s71_scale_of_one", "D8", "the loss scale is 1", AFTER, told(lambda s: {"scale": 1.0, "growth": 0}),
          needs=with_(scaler=True), formats=EXTRA),
    Fault("s72_eps_large", "H1", "eps is a thousandth", AFTER, lambda state, lab: state.declared(eps=1e-3),
          also=("D10",), why="a setting, by which updates vanish"),
    Fault("s73_decay_lost", "B7", "no weight decays any more", AFTER,
          lambda state, lab: state.declared(weight_decay=0.0), also=("H1", "C5"), why="the groups tell the new value"),
    Fault("s74_lr_tenth_silent", "H1", "updates at a tenth of the lr that the files say", seen("next"),
          told(lambda s: {"silent": (("lr", 0.1),)}), also=("C2", "B8", "C1"), why="the lr in use is another one"),
    Fault("s75_embedding_frozen", "H1", "the embedding is frozen by mistake", seen("next early"),
          told(lambda s: {"frozen": ("embed_tokens",)}), also=("D6", "B8"), why="a weight that stands still"),
    Fault("s76_batch_not_told", "C10", "the batch is another one, and no file says so", AFTER,
          told(lambda s: {"silent": (("gradient", 0.5),)}), needs=with_(clip=0.0), visible=False),
    Fault("s77_same_data_again", "C6", "one batch again and again, and no file holds the position", AFTER,
          told(lambda s: {"silent": (("data", 0),)}), visible=False, formats=("folder", "lightning", "accelerate")),
    # the saver
    Fault("s78_saver_keeps_weights", "G6", "each save holds the weights of the run's begin", seen("next early"),
          unchanged_state, saver=lagging_weights, also=("G7", "D2", "D6", "H1"), formats=FLAT,
          why="weights of another save; they stand still"),
    Fault("s79_saver_keeps_optimizer", "G6", "each save holds the optimizer of the run's begin", seen("next early"),
          unchanged_state, saver=lagging_optimizer, also=("C9", "G7", "B6", "B2"), formats=FLAT,
          why="an optimizer of another save; its counter says so"),
    Fault("s80_saver_rounds", "D7", "each save after the resume is cast to bf16", seen("next early"),
          unchanged_state, saver=rounded_save, also=("D1",), needs=with_(precision="fp32"), formats=FLAT,
          why="weights are their own masters"),
]  # fmt: skip
