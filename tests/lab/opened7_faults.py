"""Resumes of the lab's own trainer of the seventh sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.lab.changes import (
    ARGUED,
    EXTRA,
    FLAT,
    MOMENTS,
    WEIGHTS,
    Restore,
    anything,
    both,
    fields,
    mapped,
    matrices,
    moved,
    reborn,
    set_weights,
    steps,
    told,
    with_,
)
from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.healthy import exact
from tests.lab.model import ADAPTED, LORA_SCALE, initial, is_norm
from tests.lab.split import axis_of
from tests.lab.state import Named, State

__all__ = ["OPENED7_FAULTS"]

ANY = "echo next early"
WHOLE = (*WEIGHTS, *MOMENTS)
#: Layouts whose files hold the position of the data as a loader tells it.
LOADED = ("torch_save", "dcp", "dcp_sharded")
#: Layouts of one process whose optimizer state has a counter for each parameter.
COUNTED = ("torch_save", "dcp", "folder", "lightning", "accelerate")
#: Layouts whose param groups and schedule are both stored.
PACED = (*COUNTED, "dcp_sharded")
#: Layouts whose optimizer state can be absent.
BARE = ("torch_save", "folder", "lightning", "accelerate")

fp32 = with_(precision="fp32")
adapters = with_(lora=4, precision="fp32")
routed = with_(experts=4)
NONE: frozenset[str] = frozenset()


def inside(*words: str) -> Callable[[str], bool]:
    return lambda name: any(word in name for word in words)


def upper(state: State) -> Callable[[str], bool]:
    """What the last of two pipeline stages holds; a tied table belongs to the first one."""
    layers = range(state.config.layers // 2, state.config.layers)
    return inside(*(f".layers.{n}." for n in layers), "model.norm", "lm_head")


def changed(change: Callable[[Named, str], torch.Tensor], pick: Callable[[str], bool], *names: str) -> Restore:
    """Each picked tensor becomes ``change(tensors, its name)``."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, names or WHOLE):
            old = dict(found)
            found |= {name: change(old, name).contiguous().clone() for name in filter(pick, old)}
        return state

    return restore


def by_config(change: Callable[[torch.Tensor, Config], torch.Tensor], *ends: str) -> Restore:
    """Each tensor whose name ends so becomes ``change(tensor, config)``."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, WHOLE):
            for name in [name for name in found if name.endswith(tuple(f"{end}.weight" for end in ends))]:
                found[name] = change(found[name], state.config).contiguous().clone()
        return state

    return restore


# ---- weights ---------------------------------------------------------------------------------------------------------


def last_stage_initial(state: State, lab: Lab) -> State:
    """The output layer of the last stage has another name: its norm and its head are as they were made."""
    return reborn(inside("model.norm", "lm_head"))(state, lab)


def norms_of_the_upper(state: State, lab: Lab) -> State:
    late = upper(state)
    return mapped(torch.ones_like, lambda name: is_norm(name) and late(name), WEIGHTS)(state, lab)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def first_ranks_experts(found: Named, name: str) -> torch.Tensor:
    """Both expert-parallel ranks number their experts from 0, and one file remains."""
    for number in (2, 3):
        name = name.replace(f".experts.{number}.", f".experts.{number - 2}.")
    return found[name]


def ranks_of_experts(name: str, config: Config) -> str:
    head, found, rest = name.partition(".experts.")
    number, _, rest = rest.partition(".")
    return f"{head}{found}{(int(number) + 2) % 4}.{rest}"


def one_key_for_all(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """More ranks than key groups: each rank's copy was taken for a group of its own, and the first ones were kept."""
    first = rows.chunk(config.groups)[0]
    return torch.cat([first] * config.groups)


def interleaved(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Rows of each head from halves to pairs, as rotary embeddings are stored elsewhere."""
    return rows.view(-1, 2, config.head_dim // 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def keys_first(state: State, lab: Lab) -> State:
    """Fused by key group as [q q k v], and taken apart as [k v q q]."""
    c = state.config
    each, width = c.heads // c.groups, c.head_dim
    for found in fields(state, WHOLE):
        for n in range(c.layers):
            q, k, v = (f"model.layers.{n}.self_attn.{side}_proj.weight" for side in "qkv")
            parts = [found[name].view(c.groups, -1, width, c.hidden) for name in (q, k, v)]
            line = torch.cat(parts, 1)
            for name, part in zip((k, v, q), line.split([1, 1, each], 1), strict=True):
                found[name] = part.reshape(found[name].shape).clone()
    return state


def named_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Twelve ranks' parts in the order of their names: 0 1 10 11 2 3 …"""
    axis = axis_of(name)
    if axis is None or tensor.shape[axis] % 12:
        return tensor
    parts = tensor.chunk(12, axis)
    return torch.cat([parts[int(number)] for number in sorted(map(str, range(12)))], axis)


def ranks_by_name(state: State, lab: Lab) -> State:
    return changed(lambda found, name: named_ranks(found[name], name), anything)(state, lab)


def reversed_mlps(name: str, config: Config) -> str:
    head, number, rest = name.split(".layers.")[0], *name.split(".layers.")[1].split(".", 1)
    return f"{head}.layers.{config.layers - 1 - int(number)}.{rest}"


def exchanged_gates(found: Named, name: str) -> torch.Tensor:
    other = name.replace("gate_proj", "\0").replace("up_proj", "gate_proj").replace("\0", "up_proj")
    return found[other]


def line_anew(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Restore:
    """The decayed group's tensors as one line, changed, and cut again."""

    def restore(state: State, lab: Lab) -> State:
        group = state.groups()[0][1]
        for found in fields(state, names):
            line = change(torch.cat([found[name].flatten() for name in group]))
            parts = line.split([found[name].numel() for name in group])
            for name, part in zip(group, parts, strict=True):
                found[name] = part.view(found[name].shape).clone()
        return state

    return restore


def gap_of_a_norm(state: State, lab: Lab) -> State:
    """The reader's line has a norm in it after the first tensor; the writer's had none."""
    first = state.exp_avg[state.groups()[0][1][0]].numel()
    by = state.config.hidden

    def change(line: torch.Tensor) -> torch.Tensor:
        return torch.cat([line[:first], line[first + by :], line.new_zeros(by)])

    return line_anew(change, "masters", *MOMENTS)(state, lab)


def four_partitions(line: torch.Tensor) -> torch.Tensor:
    """Of four ranks, 0 2 1 3: the ranks of two nodes, counted node by node."""
    part = len(line) // 4
    return torch.cat([line[:part], line[2 * part : 3 * part], line[part : 2 * part], line[3 * part :]])


def last_shard_again(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """The last of four ranks read the file of the one before."""
    part = len(rows) // 4
    return torch.cat([rows[: 3 * part], rows[2 * part : 3 * part], rows[4 * part :]])


def padded_by_four(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Each of four ranks' tokens with a padding of its own behind them."""
    tokens, padding = rows[: config.vocab], rows[config.vocab :]
    parts = zip(tokens.chunk(4), padding.chunk(4), strict=True)
    return torch.cat([part for pair in parts for part in pair])


def added_tokens_by_name(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """The last seven tokens were added later; another tokenizer numbers them in another order."""
    order = torch.tensor([3, 0, 5, 1, 6, 2, 4]) + config.vocab - 7
    return torch.cat([rows[: config.vocab - 7], rows[order], rows[config.vocab :]])


# ---- adapters --------------------------------------------------------------------------------------------------------


def other_tables(state: State, lab: Lab) -> State:
    """A base with the same layers, whose table was trained on for another language."""
    noise = torch.Generator().manual_seed(9)
    for name in filter(inside("embed_tokens", "lm_head"), state.params):
        table = state.params[name]
        state.params[name] = table + 0.1 * table.std() * torch.randn(table.shape, generator=noise)
    return state


def merged_and_new(state: State, lab: Lab) -> State:
    """The adapters were merged into the base, and new ones are put on top of it."""
    new = initial(state.config, 41)
    for name in [name for name in state.params if name.endswith(tuple(f"{side}.weight" for side in ADAPTED))]:
        stem = name.removesuffix("weight")
        a, b = state.params[f"{stem}lora_A.weight"], state.params[f"{stem}lora_B.weight"]
        state.params[name] = state.params[name] + LORA_SCALE * b @ a
    return set_weights(state, {name: tensor for name, tensor in new.items() if "lora_" in name})


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def no_state(state: State, lab: Lab) -> State:
    state.exp_avg, state.exp_avg_sq, state.step = {}, {}, {}
    return state


def new_state(pick: Callable[[str], bool]) -> Restore:
    return both(mapped(torch.zeros_like, pick, MOMENTS), steps(lambda step: 0.0, pick))


def moments_of_the_upper(state: State, lab: Lab) -> State:
    return mapped(torch.zeros_like, upper(state), MOMENTS)(state, lab)


def squares_of_averages(state: State, lab: Lab) -> State:
    """The second moment was made from the first one, where it was not in the file."""
    state.exp_avg_sq = {name: moment * moment for name, moment in state.exp_avg.items()}
    return state


def older_first_moment(state: State, lab: Lab) -> State:
    state.exp_avg = lab.run.recent.exp_avg
    return state


def brain_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def half_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float()


# ---- masters, averages, buffers --------------------------------------------------------------------------------------


def masters_of_the_begin(state: State, lab: Lab) -> State:
    """Masters of the last stage were made before its weights were loaded."""
    new, late = initial(state.config), upper(state)
    state.masters |= {name: new[name].clone() for name in filter(late, state.masters)}
    return state


def older_table(state: State, lab: Lab) -> State:
    name = "model.embed_tokens.weight"
    state.params[name] = lab.run.previous.params[name]
    return state


def evaluated_in_half(state: State, lab: Lab) -> State:
    """What is stored is the average in 16 bits; both the weights and the average are taken from it."""
    state.ema = {name: half_float(tensor) for name, tensor in state.ema.items()}
    return set_weights(state, {name: tensor.clone() for name, tensor in state.ema.items()})


def histories_of_next(state: State, lab: Lab) -> State:
    """fp8 state was stored as a list, and its order is another one."""
    old, names = dict(state.buffers), [name for name in state.buffers if name.endswith("amax_history")]
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        state.buffers[name] = old[other].clone()
        scale = ".weight_scale"
        mine, theirs = name.replace(".amax_history", scale), other.replace(".amax_history", scale)
        state.buffers[mine] = old[theirs].clone()
    return state


def balance_in_bf16(state: State, lab: Lab) -> State:
    """The module was cast as a whole, and its balancing bias with it."""
    state.buffers = {name: brain_float(tensor) for name, tensor in state.buffers.items()}
    return state


def other_balance(state: State, lab: Lab) -> State:
    state = state.clone()
    for name in filter(inside("expert_bias"), state.buffers):
        state.buffers[name] = state.buffers[name] + 1e-3 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    return state


def next_layers_average(name: str, config: Config) -> str:
    head, found, rest = name.partition(".layers.")
    if not found:
        return name
    number, _, rest = rest.partition(".")
    return f"{head}{found}{(int(number) + 1) % config.layers}.{rest}"


# ---- schedules, settings, data ---------------------------------------------------------------------------------------


def lr_of_the_save_before(state: State, lab: Lab) -> State:
    """The learning rate of the param groups is that of the save before, and no schedule writes it any more."""
    return state.told(held_lr=lab.run.recent.lr)


def counted_since_the_resume(state: State, lab: Lab) -> State:
    """The loader counts from the last resume, which was a third of the way back."""
    done = state.trainer.loader // 3
    return state.told(data_index=done, loader=done)


def fetched_ahead(state: State, lab: Lab) -> State:
    """The loader's state counts what its workers had fetched, eight batches more than were used."""
    told = state.trainer
    return state.told(data_index=told.data_index + 8, loader=told.loader + 8)


def _growing(config: Config) -> Config:
    return config.but(scaler=True, resume=config.resume // 10 * 10 + 7)


# ---- saves -----------------------------------------------------------------------------------------------------------

Saver = Callable[[State, State], State]


def saves(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Saver:
    """The save after the updates writes these tensors otherwise; the run itself is right."""

    def saver(loaded: State, after: State) -> State:
        after = after.clone()
        for found in fields(after, names):
            found |= {name: change(tensor) for name, tensor in found.items()}
        return after

    return saver


def counters_torn(loaded: State, after: State) -> State:
    """The writer shares memory with the trainer: every other counter is that of the next update."""
    after = after.clone()
    after.step |= {name: after.step[name] + 1 for name in list(after.step)[::2]}
    return after


def momentum_offloaded(loaded: State, after: State) -> State:
    """The writer kept the address of exp_avg, which has moved since the first save."""
    return replace(after.clone(), exp_avg=loaded.clone().exp_avg)


def gradients_as_well(loaded: State, after: State) -> State:
    after = after.clone()
    for name in filter(matrices, dict(after.params)):
        after.buffers[f"main_grad.{name.replace('.', '_')}"] = after.exp_avg[name] - loaded.exp_avg[name]
    return after


# ---- files -----------------------------------------------------------------------------------------------------------


def weights_unwritten(folder: Path, state: State, lab: Lab) -> State | None:
    """The marker was moved on before the file of the weights was there."""
    (folder / "model.safetensors").unlink()
    return None


def stripe_again(field: str) -> Restore:
    """A stripe of a file came back as the one before it."""

    def restore(state: State, lab: Lab) -> State:
        found = getattr(state, field)
        name = lab.rng.choice([n for n in found if n.endswith(("down_proj.weight", "up_proj.weight"))])
        line = found[name].flatten().clone()
        begin = 256 * lab.rng.randrange(1, len(line) // 256)
        line[begin : begin + 256] = line[begin - 256 : begin]
        found[name] = line.view(found[name].shape)
        return state

    return restore


def spoilt(field: str, change: Callable[[torch.Tensor, int], None]) -> Restore:
    """One element of one inner matrix."""

    def restore(state: State, lab: Lab) -> State:
        found = getattr(state, field)
        name = lab.rng.choice([n for n in found if ".self_attn." in n and "lora_" not in n])
        line = found[name].flatten().clone()
        change(line, lab.rng.randrange(len(line)))
        found[name] = line.view(found[name].shape)
        return state

    return restore


def not_a_number(line: torch.Tensor, at: int) -> None:
    line[at] = torch.nan


def exponent_bit(line: torch.Tensor, at: int) -> None:
    line.view(torch.int32)[at] ^= 1 << 25


OPENED7_FAULTS = [
    # weights
    Fault("sv01_last_stage", "A2", "last norm and head have other names: both as they were made", seen(ANY),
          last_stage_initial, needs=with_(tied=False), also=("A3", "F2"),
          why="a norm and a head that were not loaded"),
    Fault("sv02_upper_norms", "A3", "norms of the last stage stay at one", seen("alone echo next"),
          norms_of_the_upper, also=("A2",)),
    # layouts
    Fault("sv03_first_ranks_experts", "E10", "experts of the second rank are those of the first one",
          seen("alone echo next early"), changed(first_ranks_experts, inside(".experts.")), needs=routed,
          also=("E9", "E8"), why="modules that are there twice, or one rank's part read for both"),
    Fault("sv04_ranks_of_experts", "E10", "ranks of experts in each other's place, routers stay", seen(ANY),
          moved(ranks_of_experts, inside(".experts.")), needs=routed, also=("E9", "E1")),
    Fault("sv05_one_key_for_all", "E6", "every key group has the first one's keys and values",
          seen("alone echo next early"), by_config(one_key_for_all, "k_proj", "v_proj"),
          needs=with_(heads=4, groups=2, hidden=48, ffn=192), also=("E8", "E9", "E1"),
          why="heads in other groups, or one rank's part read for all"),
    Fault("sv06_values_rotated", "E5", "values reordered for interleaved rotary embeddings as queries and keys are",
          seen(ANY), by_config(interleaved, "q_proj", "k_proj", "v_proj"), also=("E6", "E1", "E4"), formats=FLAT),
    Fault("sv07_keys_first", "E4", "[q q k v] taken apart as [k v q q]", seen(ANY), keys_first,
          needs=with_(heads=4, groups=2, hidden=48, ffn=192), formats=FLAT, also=("E6", "E1")),
    Fault("sv08_ranks_by_name", "E1", "twelve ranks in the order of their names", seen(ANY), ranks_by_name,
          needs=with_(heads=4, groups=2, hidden=48, ffn=192), also=("E7", "E8")),
    Fault("sv09_reversed_mlps", "E9", "MLPs of the layers in reverse order, the rest is right", seen(ANY),
          moved(reversed_mlps, inside(".mlp.")), needs=with_(layers=4, experts=0)),
    Fault("sv10_gates_of_experts", "E3", "gate and up of every expert exchanged", seen(ANY),
          changed(exchanged_gates, inside("gate_proj", "up_proj")), needs=routed, also=("E1",)),
    Fault("sv11_gap_of_a_norm", "E7", "flat state and masters read as if there were a norm among them", seen(ANY),
          gap_of_a_norm, also=("E13", "B5", "D2")),
    Fault("sv12_four_partitions", "E13", "four partitions of the moments in the order 0 2 1 3", seen(ANY),
          line_anew(four_partitions, *MOMENTS), also=("E7", "B5")),
    Fault("sv13_last_shard_again", "E8", "the last quarter of the vocabulary is the third one", seen(ANY),
          by_config(last_shard_again, "embed_tokens", "lm_head"), also=("F7", "E9", "G6"),
          why="rows of one shard twice"),
    Fault("sv14_padded_by_four", "E11", "four ranks padded their tokens one by one", seen(ANY),
          by_config(padded_by_four, "embed_tokens", "lm_head"), needs=with_(vocab=88, padded=112),
          also=("F7", "E1", "E8"), why="rows of tokens moved, some of them into the padding"),
    Fault("sv15_added_tokens", "F7", "seven added tokens in another order", seen(ANY),
          by_config(added_tokens_by_name, "embed_tokens", "lm_head"), also=("E8", "E1")),
    # adapters
    Fault("sv16_adapters_averaged", "F5", "the adapters' B was averaged over two ranks, and one rank had no adapters",
          seen("echo next"), mapped(lambda tensor: tensor / 2, inside("lora_B"), WEIGHTS), needs=adapters,
          formats=EXTRA, also=("E12",), why="half of the values is what both say"),
    Fault("sv17_other_tables", "F6", "the base's tables are those of another language's", seen(ANY), other_tables,
          needs=adapters, formats=EXTRA, also=("F7", "G6"), why="frozen tensors of another model"),
    Fault("sv18_merged_and_new", "F5", "adapters merged into the base, and new ones on top", seen(ANY),
          merged_and_new, needs=adapters, formats=EXTRA, also=("F6", "A2"),
          why="base and adapters are both other ones"),
    # the optimizer
    Fault("sv19_weights_alone", "B1", "only the weights were loaded", seen("alone echo next early"), no_state,
          needs=with_(optimizer="adam"), formats=BARE),
    Fault("sv20_routers_new", "B1", "the routers' state was never stored", seen("alone echo next early"),
          new_state(inside("mlp.gate.weight")), needs=routed, formats=COUNTED),
    Fault("sv21_upper_moments", "B3", "moments of the last stage are zeros, its counters are right",
          seen("alone echo next early"), moments_of_the_upper),
    Fault("sv22_row_parallel_squares", "B4", "exp_avg_sq of row-parallel matrices is zeros",
          seen("alone echo next early"), mapped(torch.zeros_like, inside("o_proj", "down_proj"), ("exp_avg_sq",)),
          also=("B3",)),
    Fault("sv23_expert_counters", "B2", "counters of the experts' optimizer begin again",
          seen("alone echo next early"), steps(lambda step: 0.0, inside(".experts.")), needs=routed, formats=COUNTED),
    Fault("sv24_squares_of_averages", "B6", "exp_avg_sq is the square of exp_avg", seen("alone echo next"),
          squares_of_averages, also=("B4",)),
    Fault("sv25_older_first_moment", "B6", "exp_avg is that of the save before", seen("echo next"),
          older_first_moment, also=("G6",)),
    Fault("sv26_table_in_bf16", "D4", "moments of the table were offloaded as bf16", seen("alone echo"),
          mapped(brain_float, inside("embed_tokens"), MOMENTS)),
    # masters
    Fault("sv27_masters_of_the_begin", "D2", "masters of the last stage are the run's first weights",
          seen("alone echo next early"), masters_of_the_begin, needs=masters, also=("A2", "G6"),
          why="without an echo, weights that were not loaded or are older look the same"),
    Fault("sv28_older_table", "D3", "the table's 16-bit copy is an update older than its master", seen("alone echo"),
          older_table, needs=masters, also=("G6",)),
    Fault("sv29_matrices_in_half", "D7", "matrices went through fp16, vectors did not", seen("alone echo next"),
          mapped(half_float, matrices, ("params",)), needs=fp32, also=("D1",)),
    # averages and buffers
    Fault("sv30_evaluated_in_half", "F4", "weights and average are the average in fp16", seen("echo next"),
          evaluated_in_half, needs=with_(ema=True, precision="fp32"), formats=EXTRA, also=("D7",)),
    Fault("sv31_next_layers_average", "F4", "each layer has the average of the next one", seen(ANY),
          moved(next_layers_average, anything, ("ema",)), needs=with_(ema=True), formats=EXTRA, also=("E9",),
          why="averages that are not of these weights; layers shifted"),
    Fault("sv32_histories_of_next", "D9", "fp8 histories and scales of the next layer", seen("echo next"),
          histories_of_next, needs=with_(fp8=True, experts=0), formats=EXTRA, also=("A5", "E9")),
    Fault("sv33_balance_in_bf16", "A5", "the experts' balancing bias was cast to bf16", seen("echo next"),
          balance_in_bf16, needs=routed, also=("D7",), why="a buffer, rounded"),
    # schedules, settings, data
    Fault("sv34_warm_again", "C1", "the schedule begins again", seen("alone echo next early"),
          told(lambda s: {"scheduler": 0}), needs=with_(unstored=("args",)), formats=PACED, also=("C2",)),
    Fault("sv35_lr_of_the_save_before", "B8", "the groups have the learning rate of the save before, and keep it",
          seen("alone echo next early"), lr_of_the_save_before, formats=PACED, also=("C2", "H1")),
    Fault("sv36_an_epoch_ahead", "C3", "the schedule is 32 steps further", seen("alone echo next early"),
          told(lambda s: {"scheduler": s.trainer.scheduler + 32}), also=("C2",)),
    Fault("sv37_warm_up_not_counted", "C4", "the length of the schedule without its warm-up", seen(ANY),
          lambda state, lab: state.declared(total=state.config.total + state.config.warmup), formats=ARGUED,
          also=("H1", "C2")),
    Fault("sv38_counted_since_the_resume", "C6", "the data's position counts from the resume before",
          seen("alone echo next early"), counted_since_the_resume, formats=LOADED, also=("C7",)),
    Fault("sv39_fetched_ahead", "C6", "eight fetched batches are left out", seen("alone echo next early"),
          fetched_ahead, formats=LOADED, also=("C7", "H1")),
    Fault("sv40_growth_begins", "D8", "the scaler's count of good updates begins again", seen("echo next"),
          told(lambda s: {"growth": 0}), needs=_growing, formats=("torch_save", "dcp", "folder", "accelerate")),
    Fault("sv41_step_of_parts", "C9", "the step is taken for one of micro-batches, and multiplied by four",
          seen(ANY), told(lambda s: {"step": 4 * s.trainer.step}), formats=COUNTED, also=("B2", "C3")),
    Fault("sv42_gradients_vanish", "B10", "the loss is divided by the number of all tokens once more",
          seen("next early"), told(lambda s: {"silent": (("gradient", 1e-6),)}),
          needs=with_(clip=0.0, betas=(0.9, 0.95), optimizer="adamw"), also=("C10", "D10", "D8", "H1"),
          why="gradients of another scale, whatever made them so"),
    # saves
    Fault("sv43_bf16_masters_saved", "D1", "the save writes the masters in the type of the weights",
          seen("next early"), exact, saver=saves(lambda tensor: tensor.bfloat16(), "masters"), needs=masters,
          formats=("torch_save", "dcp", "dcp_sharded")),
    Fault("sv44_counters_torn", "G6", "half of the counters in the save are those of the next update",
          seen("next early"), exact, saver=counters_torn, formats=COUNTED, also=("C9", "B2")),
    Fault("sv45_momentum_offloaded", "G6", "the save writes the exp_avg of the first save", seen("next early"), exact,
          saver=momentum_offloaded, also=("B6", "G7")),
    Fault("sv46_gradients_saved", "A4", "the save holds the gradients' buffers among the weights",
          seen("next early"), exact, saver=gradients_as_well, needs=with_(lora=0),
          formats=("torch_save", "dcp", "folder", "lightning", "accelerate")),
    # files
    Fault("sv47_weights_unwritten", "G8", "the file of the weights is not there", seen("alone echo"),
          damage=weights_unwritten, formats=("folder", "accelerate"), also=("G4",)),
    Fault("sv48_stripe_again", "G10", "256 elements of a weight are the 256 before them", seen("echo next"),
          stripe_again("params"), needs=fp32, also=("G5", "G6")),
    Fault("sv49_exponent_of_a_square", "G3", "an exponent bit of one exp_avg_sq: a factor of 16", seen("echo"),
          spoilt("exp_avg_sq", exponent_bit)),
    Fault("sv50_nan_square", "G1", "one NaN in exp_avg_sq", seen("alone echo next early"),
          spoilt("exp_avg_sq", not_a_number), also=("G3",)),
    Fault("sv51_other_balance", "F1", "the ranks' balancing biases differ", seen("alone echo"), second=other_balance,
          needs=routed, formats=("megatron",), also=("A5",)),
    # healthy
    Fault("svh01_experts", "healthy", "experts and a head of their own, Adam, the batch in two parts", NONE, exact,
          micro=2, needs=with_(experts=4, tied=False, optimizer="adam"), kind="healthy"),
    Fault("svh02_constant", "healthy", "a constant learning rate, much decay, masters", NONE, exact,
          needs=lambda config: config.but(min_lr=config.lr, weight_decay=0.5, precision="mixed"), kind="healthy"),
    Fault("svh03_young_averages", "healthy", "betas of 0.97 and 0.98", NONE, exact,
          needs=with_(betas=(0.97, 0.98), eps=1e-6), kind="healthy"),
    Fault("svh04_six_layers", "healthy", "six layers, goes on in another layout", NONE, exact, elsewhere=True,
          needs=with_(layers=6), kind="healthy"),
    Fault("svh05_scaler_and_average", "healthy", "a loss scale beside averages", NONE, exact,
          needs=with_(scaler=True, ema=True), formats=("torch_save", "dcp", "folder", "accelerate"), kind="healthy"),
    Fault("svh06_wide_adapters", "healthy", "adapters of rank eight, a small clipping norm", NONE, exact,
          needs=with_(lora=8, clip=0.05, precision="fp32"), formats=EXTRA, kind="healthy"),
    # on purpose
    Fault("svd01_longer_memory", "healthy", "a longer memory of squares, and half of the batch", NONE,
          lambda state, lab: state.declared(betas=(state.config.betas[0], 0.997), batch=state.config.batch // 2),
          kind="deliberate", also=("H1", "C10")),
    Fault("svd02_bad_stretch", "healthy", "fifty bad batches are left out", NONE,
          told(lambda s: {"data_index": s.trainer.data_index + 50, "loader": s.trainer.loader + 50}),
          kind="deliberate", formats=LOADED, also=("C6", "C7", "H1")),
    Fault("svd03_no_decay", "healthy", "no weight decay from here on", NONE,
          lambda state, lab: state.declared(weight_decay=0.0), kind="deliberate", also=("H1", "B7", "C5")),
    Fault("svd04_norms_frozen", "healthy", "norms are not trained from here on", NONE,
          told(lambda s: {"frozen": ("norm",)}), kind="deliberate", also=("H1",)),
]  # fmt: skip
