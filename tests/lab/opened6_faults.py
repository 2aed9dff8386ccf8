"""Resumes of the lab's own trainer of the sixth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.lab.changes import (
    ARGUED,
    BARE,
    EXTRA,
    FLAT,
    MOMENTS,
    WEIGHTS,
    Restore,
    anything,
    both,
    fields,
    layered,
    mapped,
    moved,
    set_weights,
    steps,
    told,
    vectors,
    with_,
)
from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.healthy import exact
from tests.lab.model import LORA_SCALE, initial, is_norm
from tests.lab.split import axis_of, halves
from tests.lab.state import Named, State

__all__ = ["OPENED6_FAULTS"]

ANY = "echo next early"
#: Layouts whose files hold the position of the data as a loader tells it.
LOADED = ("torch_save", "dcp", "dcp_sharded")
#: Layouts that store the schedule's counter beside the learning rate of the param groups.
PACED = ("torch_save", "dcp", "dcp_sharded", "folder", "lightning", "accelerate")
#: Layouts of one process whose optimizer state has a counter for each parameter.
COUNTED = ("torch_save", "dcp", "folder", "lightning", "accelerate")

fp32 = with_(precision="fp32")
NONE: frozenset[str] = frozenset()


def where(pick: Callable[[str], bool], names: Named) -> list[str]:
    return [name for name in names if pick(name)]


def inside(*words: str) -> Callable[[str], bool]:
    return lambda name: any(word in name for word in words)


def inner(name: str) -> bool:
    """Weights of an attention or a dense MLP: they get a gradient in every update."""
    return ".layers." in name and not is_norm(name) and ".experts." not in name and "mlp.gate.weight" not in name


# ---- weights that did not come back ----------------------------------------------------------------------------------


def older_upper_half(state: State, lab: Lab) -> State:
    """The file of the last pipeline stage is that of the checkpoint before."""
    old, first = lab.run.recent, state.config.layers // 2
    late = [f".layers.{n}." for n in range(first, state.config.layers)]
    for name in where(inside(*late, "model.norm", "lm_head"), state.params):
        state.params[name] = old.params[name]
        for mine, theirs in zip(fields(state, ("masters", *MOMENTS)), fields(old, ("masters", *MOMENTS)), strict=True):
            mine[name] = theirs[name]
        state.step[name] = old.step[name]
    return state


# ---- adapters --------------------------------------------------------------------------------------------------------


def merged_and_kept(state: State, lab: Lab) -> State:
    """The base was saved merged, and the adapters are put on top of it again."""
    for name in where(lambda n: "lora_A" in n, state.params):
        base, second = name.replace("lora_A.", ""), name.replace("lora_A", "lora_B")
        a, b = state.params[name].float(), state.params[second].float()
        state.params[base] = (state.params[base].float() + LORA_SCALE * b @ a).to(state.params[base].dtype)
    return state


def other_base(state: State, lab: Lab) -> State:
    """A base that was trained a little further: every matrix is another one, and nearly the same."""
    noise = torch.Generator().manual_seed(5)
    for name in where(lambda n: "lora_" not in n and not is_norm(n), state.params):
        tensor = state.params[name].float()
        change = torch.randn(tensor.shape, generator=noise) * 0.02 * tensor.std()
        state.params[name] = (tensor + change).to(state.params[name].dtype)
    return state


# ---- layouts ---------------------------------------------------------------------------------------------------------


def by_layer(change: Callable[[Named, str, Config], None], *names: str) -> Restore:
    """``change`` the tensors of each layer, in these fields."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, names or (*WEIGHTS, *MOMENTS)):
            for n in range(state.config.layers):
                change(found, f"model.layers.{n}.", state.config)
        return state

    return restore


def key_rope_by_query_heads(found: Named, layer: str, config: Config) -> None:
    """Keys permuted to the interleaved rotary order, with the number of query heads for their own."""
    name = f"{layer}self_attn.k_proj.weight"
    rows = found[name]
    heads = config.heads if len(rows) % (2 * config.heads) == 0 else config.groups
    found[name] = rows.view(heads, 2, len(rows) // heads // 2, -1).transpose(1, 2).reshape(rows.shape).clone()


def strided_heads(found: Named, layer: str, config: Config) -> None:
    """Query heads dealt out to the key groups in turn, with their columns of the output; keys stay."""
    each = config.heads // config.groups
    order = torch.arange(config.heads).view(config.groups, each).T.flatten()
    if torch.equal(order, torch.arange(config.heads)):
        order = order.roll(1)
    rows = (order[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()
    query, out = f"{layer}self_attn.q_proj.weight", f"{layer}self_attn.o_proj.weight"
    found[query], found[out] = found[query][rows].clone(), found[out][:, rows].clone()


def router_rolled(found: Named, layer: str, config: Config) -> None:
    found[f"{layer}mlp.gate.weight"] = found[f"{layer}mlp.gate.weight"].roll(1, 0)


def exchanged(one: str, two: str) -> Callable[[Named, str, Config], None]:
    def change(found: Named, layer: str, config: Config) -> None:
        for name in where(lambda n: n.startswith(layer) and n.endswith(f"{one}.weight"), dict(found)):
            other = name.replace(one, two)
            if found[name].shape == found[other].shape:
                found[name], found[other] = found[other], found[name]

    return change


def ranks_exchanged(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        axis = axis_of(name)
        return tensor if axis is None else torch.cat(halves(name, tensor)[::-1], axis)

    return change


def ranks_reversed(pick: Callable[[str], bool], *names: str) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, names or (*WEIGHTS, *MOMENTS)):
            for name in where(pick, found):
                found[name] = ranks_exchanged(name)(found[name]).contiguous()
        return state

    return restore


def first_two_again(state: State, lab: Lab) -> State:
    """Each of two stages numbers its layers from 0."""
    return moved(layered(lambda number, layers: number % 2))(state, lab)


def shifted(amount: int, *names: str) -> Restore:
    """All tensors as one line, which is read a few elements too early."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, names):
            line = torch.cat([tensor.flatten() for tensor in found.values()]).roll(amount)
            parts = line.split([tensor.numel() for tensor in found.values()])
            found |= {name: part.view(found[name].shape).clone() for name, part in zip(found, parts, strict=True)}
        return state

    return restore


def vocabulary(change: Callable[[torch.Tensor, Config], torch.Tensor], *names: str) -> Restore:
    """Of the embedding, and of the head where there is one."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, names or (*WEIGHTS, *MOMENTS)):
            for name in where(inside("embed_tokens", "lm_head"), found):
                found[name] = change(found[name], state.config).contiguous()
        return state

    return restore


def last_third_late(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Three ranks share the rows, and the reader has another rounding of where the last one begins."""
    begin = 2 * (config.vocab // 3)
    return torch.cat([rows[:begin], rows[begin - 1 : -1]])


def padding_between(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Padding behind the rows of each of two ranks: the second half of the tokens lies further down."""
    half, spare = config.vocab // 2, config.padded - config.vocab
    first = spare // 2
    tokens, padding = rows[: config.vocab], rows[config.vocab :]
    return torch.cat([tokens[:half], padding[:first], tokens[half:], padding[first:]])


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def dummy_step(state: State, lab: Lab) -> State:
    """A fresh optimizer whose state was made by an update without gradients."""
    state = mapped(torch.zeros_like, anything, MOMENTS)(state, lab)
    return steps(lambda step: 1.0)(state, lab)


def fresh_group(pick: Callable[[str], bool]) -> Restore:
    return both(mapped(torch.zeros_like, pick, MOMENTS), steps(lambda step: 0.0, pick))


def first_is_second(state: State, lab: Lab) -> State:
    """Both moments were read from one key."""
    state.exp_avg = {name: tensor.clone() for name, tensor in state.exp_avg_sq.items()}
    return state


def half_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float()


def brain_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def one_infinite(state: State, lab: Lab) -> State:
    name = lab.rng.choice(where(inner, state.exp_avg))
    state.exp_avg[name].view(-1)[lab.rng.randrange(state.exp_avg[name].numel())] = torch.inf
    return state


def mantissa_bit(field: str, bit: int) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        held = getattr(state, field)
        name = lab.rng.choice(where(inner, held))
        flat = held[name].contiguous().view(-1).view(torch.int32)
        flat[lab.rng.randrange(len(flat))] ^= 1 << bit
        return state

    return restore


def stale_moments_of_a_rank(state: State, lab: Lab) -> State:
    old, second = lab.run.recent, state.clone()
    second.exp_avg, second.exp_avg_sq = old.exp_avg, old.exp_avg_sq
    return second


def other_moments_of_norms(state: State, lab: Lab) -> State:
    return mapped(lambda tensor: 1.001 * tensor, vectors, MOMENTS)(state.clone(), lab)


def older_copy(state: State, lab: Lab) -> State:
    """The 16-bit weights were captured an update before the masters."""
    state.params = lab.run.previous.params
    return state


# ---- averages and buffers --------------------------------------------------------------------------------------------


def exchanged_with_average(state: State, lab: Lab) -> State:
    """Averages were copied in for an evaluation; the backup was then stored as the average."""
    old = {name: tensor.float().clone() for name, tensor in state.updated.items()}
    state = set_weights(state, {name: tensor.clone() for name, tensor in state.ema.items()})
    state.ema = old
    return state


def average_of_fresh(state: State, lab: Lab) -> State:
    """The average is made of the model before the weights are loaded."""
    state.ema = {name: tensor.clone() for name, tensor in initial(state.config, 78).items()}
    return state


def average_among_the_weights(state: State, lab: Lab) -> State:
    state.buffers |= {f"ema_model.{name}": tensor.clone() for name, tensor in state.params.items()}
    return state


def short_history(state: State, lab: Lab) -> State:
    for name in where(inside("amax_history"), state.buffers):
        state.buffers[name] = state.buffers[name][:1].clone()
    return state


def no_bias_of_experts(state: State, lab: Lab) -> State:
    for name in where(inside("expert_bias"), state.buffers):
        state.buffers[name] = torch.zeros_like(state.buffers[name])
    return state


# ---- schedules and data ----------------------------------------------------------------------------------------------


def epoch_begins(state: State, lab: Lab) -> State:
    """The loader goes back to the beginning of the epoch; an epoch has 32 batches."""
    begin = (state.trainer.loader - 1) // 32 * 32
    return state.told(data_index=begin, loader=begin)


def schedule_gone(state: State, lab: Lab) -> State:
    return state.told(held_lr=state.config.lr)


def shorter_plan(state: State, lab: Lab) -> State:
    """Fewer rows in the data set: the trainer computes another number of updates."""
    done = state.trainer.step
    return state.declared(total=done + max(20, (state.config.total - done) // 2))


# ---- saves -----------------------------------------------------------------------------------------------------------

Saver = Callable[[State, State], State]


def saves(change: Callable[[torch.Tensor], torch.Tensor], pick: Callable[[str], bool], *names: str) -> Saver:
    """The save after the updates writes these tensors otherwise; the run itself is right."""

    def saver(loaded: State, after: State) -> State:
        after = after.clone()
        for found in fields(after, names):
            for name in where(pick, found):
                found[name] = change(found[name]).to(found[name].dtype).contiguous()
        return after

    return saver


def cached(*names: str) -> Saver:
    """The save writes these from the buffers that it filled for the save before."""
    return lambda loaded, after: replace(after.clone(), **{name: getattr(loaded.clone(), name) for name in names})


def average_as_weights(loaded: State, after: State) -> State:
    after = after.clone()
    return set_weights(after, {name: tensor.clone() for name, tensor in after.ema.items()})


def late_number(loaded: State, after: State) -> State:
    """The writer looks at the step when it comes to write, a few updates later."""
    return after.told(step=after.trainer.step + 3)


def first_stage_twice(loaded: State, after: State) -> State:
    """Both stages write under the names of their own count: the upper layers are the lower ones'."""
    after = after.clone()
    for found in fields(after, (*WEIGHTS, *MOMENTS)):
        for name in where(inside(".layers.1."), found):
            found[name] = found[name.replace(".layers.1.", ".layers.0.")].clone()
    return after


def gate_up_in_save(loaded: State, after: State) -> State:
    after = after.clone()
    for found in fields(after, (*WEIGHTS, *MOMENTS)):
        for n in range(after.config.layers):
            exchanged("gate_proj", "up_proj")(found, f"model.layers.{n}.", after.config)
    return after


# ---- files -----------------------------------------------------------------------------------------------------------


def cut_short(*names: str) -> Callable[[Path, State, Lab], State | None]:
    """The upload of one file ended early."""

    def damage(folder: Path, state: State, lab: Lab) -> State | None:
        files = [path for name in names for path in folder.glob(name)]
        assert files, f"{folder} has none of {names}"
        with files[0].open("r+b") as file:
            file.truncate(int(files[0].stat().st_size * lab.rng.uniform(0.3, 0.8)))
        return None

    return damage


OPENED6_FAULTS = [
    # weights
    Fault("sx01_final_norm", "A3", "the last norm is stored under another name, and stays at one",
          seen("alone echo next"), mapped(torch.ones_like, inside("model.norm."), WEIGHTS), also=("A2",),
          why="one norm of all: a tensor that was not loaded"),
    Fault("sx02_older_stage", "G6", "the upper layers' weights and state are of the checkpoint before",
          seen("alone echo next early"), older_upper_half, formats=COUNTED),
    Fault("sx03_merged_twice", "F5", "the base holds the adapters already, and they are applied again", seen(ANY),
          merged_and_kept, needs=with_(lora=4), formats=EXTRA, also=("F6",),
          why="by the files the base is another one, and by how much is what the adapters say"),
    Fault("sx04_base_revision", "F6", "the frozen base is a later revision", seen(ANY), other_base,
          needs=with_(lora=4), formats=EXTRA),
    # layouts
    Fault("sx05_rope_of_keys", "E5", "keys permuted with the number of query heads", seen(ANY),
          by_layer(key_rope_by_query_heads), formats=FLAT, also=("E1",)),
    Fault("sx06_heads_dealt_out", "E6", "query heads in turn over the key groups", seen(ANY), by_layer(strided_heads),
          needs=with_(heads=4, groups=2, hidden=48, ffn=192), formats=FLAT, also=("E1",)),
    Fault("sx07_moment_ranks", "E13", "the moments' ranks in the wrong order, the weights' in the right one",
          seen(ANY), ranks_reversed(inner, *MOMENTS), also=("E1", "B5")),
    Fault("sx08_stage_numbers", "E9", "layers 0 1 0 1", seen("alone echo next early"), first_two_again,
          needs=with_(layers=4)),
    Fault("sx09_router_rolled", "E10", "routers are off by one expert, the experts are not", seen(ANY),
          by_layer(router_rolled), needs=with_(experts=4), also=("E1",)),
    Fault("sx10_flat_moments", "E7", "the moments' line is read 8 elements too early", seen(ANY),
          shifted(8, *MOMENTS), also=("E13", "B5")),
    Fault("sx11_flat_masters", "E7", "the masters' line is read one element too early", seen("alone echo next early"),
          shifted(1, "masters"), needs=masters, also=("D2",)),
    Fault("sx12_uneven_vocabulary", "E8", "the last of three ranks begins one row too early", seen(ANY),
          vocabulary(last_third_late), also=("F7", "E1")),
    Fault("sx13_padding_between", "E11", "padding between the halves of the vocabulary", seen(ANY),
          vocabulary(padding_between), needs=with_(vocab=90, padded=112), also=("F7", "E1", "E8"),
          why="rows of tokens moved, some of them into the padding"),
    # the optimizer
    Fault("sx14_dummy_step", "B1", "a fresh optimizer that made one update without gradients",
          seen("alone echo next early"), dummy_step),
    Fault("sx15_vectors_fresh", "B1", "the state of the group without decay was not restored",
          seen("alone echo next early"), fresh_group(vectors), formats=COUNTED),
    Fault("sx16_attention_moments", "B3", "the moments of the attention are zeros, their counters are right",
          seen("alone echo next early"), mapped(torch.zeros_like, inside("self_attn"), MOMENTS)),
    Fault("sx17_one_key_for_both", "B6", "exp_avg was read from the key of exp_avg_sq", seen("alone echo next"),
          first_is_second),
    Fault("sx18_moments_fp16", "D4", "both moments passed through fp16: small ones vanish",
          seen("alone echo next early"), mapped(half_float, anything, MOMENTS), also=("B4",),
          why="most of exp_avg_sq is below what fp16 can hold"),
    Fault("sx19_gate_up_moments", "B5", "the moments of gate and up exchanged", seen(ANY),
          by_layer(exchanged("gate_proj", "up_proj"), *MOMENTS), also=("E3", "E13")),
    Fault("sx20_stale_rank_of_state", "G6", "rank 1's moments are of the checkpoint before", seen(ANY),
          second=stale_moments_of_a_rank, formats=("dcp_sharded", "deepspeed", "megatron"), also=("B6",)),
    Fault("sx21_infinite_moment", "G1", "one infinity in exp_avg", seen("alone echo next early"), one_infinite),
    Fault("sx22_bit_of_a_moment", "G2", "a low bit in the mantissa of one exp_avg", seen("echo"),
          mantissa_bit("exp_avg", 3), also=("G10",)),
    # masters
    Fault("sx23_masters_fp16", "D1", "masters rebuilt from an fp16 export", seen("alone echo next"),
          mapped(half_float, anything, ("masters",)), needs=masters),
    Fault("sx24_older_copy", "D3", "the 16-bit weights are an update older than their masters", seen("alone echo"),
          older_copy, needs=masters, also=("G6",)),
    # averages and buffers
    Fault("sx25_average_exchanged", "F4", "weights and averages changed places", seen("echo next"),
          exchanged_with_average, needs=with_(ema=True), formats=EXTRA),
    Fault("sx26_average_of_fresh", "A2", "the average is that of the model before the load",
          seen("alone echo next early"), average_of_fresh, needs=with_(ema=True), formats=EXTRA, also=("A5", "F4")),
    Fault("sx27_average_in_the_model", "A4", "a copy for the average is stored among the weights", seen(ANY),
          average_among_the_weights, formats=("torch_save", "dcp", "folder", "lightning", "accelerate")),
    Fault("sx28_short_history", "D9", "amax histories cut to one entry", seen(ANY), short_history,
          needs=with_(fp8=True, experts=0), formats=EXTRA, also=("A5",)),
    Fault("sx29_balance_gone", "A5", "the experts' balancing bias begins again", seen("alone echo next"),
          no_bias_of_experts, needs=with_(experts=4)),
    # schedules, settings, data
    Fault("sx30_vectors_orphaned", "B8", "no schedule reaches the vectors' group any more",
          seen("alone echo next early"), told(lambda s: {"vector_lr": 2 * s.config.lr}), formats=BARE),
    Fault("sx31_no_schedule", "C2", "no schedule is stored; the groups are at the peak", seen(ANY), schedule_gone,
          needs=with_(unstored=("scheduler",)), formats=PACED, also=("B8", "H1")),
    Fault("sx32_shorter_plan", "C4", "the number of updates was computed anew", seen("echo next early"), shorter_plan,
          formats=ARGUED, also=("H1", "C2"), why="the arguments of the files say another length"),
    Fault("sx33_decay_of_vectors", "B7", "vectors decay too, whatever their group says", seen("next"),
          told(lambda s: {"silent": (("vector_decay", 0.2),)}), needs=with_(optimizer="adamw", precision="fp32"),
          formats=("torch_save", "dcp", "dcp_sharded"), also=("C5", "H1")),
    Fault("sx34_epoch_begins", "C6", "the loader begins the epoch again", seen("alone echo next early"), epoch_begins,
          formats=LOADED, also=("C7",)),
    Fault("sx35_seed_of_the_data", "C7", "the data is shuffled by the default seed", seen(ANY),
          told(lambda s: {"data_seed": 42}), formats=ARGUED, also=("H1",)),
    Fault("sx36_scale_reset", "D8", "the loss scale is the default again", seen("echo next"),
          told(lambda s: {"scale": 65536.0, "growth": 0}), needs=with_(scaler=True),
          formats=("torch_save", "folder", "accelerate")),
    # saves
    Fault("sx37_optimizer_cached", "G6", "the save writes the optimizer of the save before", seen("next early"), exact,
          saver=cached("exp_avg", "exp_avg_sq", "step"), formats=COUNTED, needs=fp32, also=("G7", "C9")),
    Fault("sx38_weights_not_gathered", "D3", "the save writes 16-bit weights of the save before", seen("next early"),
          exact, saver=cached("params"), needs=masters, also=("G6",)),
    Fault("sx39_masters_as_saved", "D1", "the save rounds the masters to bf16", seen("next early"), exact,
          saver=saves(brain_float, anything, "masters"), needs=masters),
    Fault("sx40_average_as_weights", "F4", "the save writes the average as the weights", seen("next early"), exact,
          saver=average_as_weights, needs=with_(ema=True), formats=EXTRA),
    Fault("sx41_late_number", "C9", "the save has the step of a few updates later", seen("next early"), exact,
          saver=late_number, formats=COUNTED),
    Fault("sx42_stage_twice", "E9", "the save writes the first layer twice", seen("next early"), exact,
          saver=first_stage_twice),
    Fault("sx43_exchanged_in_save", "E3", "the save exchanges gate and up", seen("next early"), exact,
          saver=gate_up_in_save, also=("E1",)),
    # files
    Fault("sx44_optimizer_cut", "G4", "the optimizer's file ends early", seen("alone echo"),
          damage=cut_short("optimizer.pt", "optimizer.bin"), formats=("folder", "accelerate")),
    Fault("sx45_replica_of_a_moment", "F1", "rank 1 holds other moments of the norms", seen("alone echo"),
          second=other_moments_of_norms, formats=("megatron",)),
    # healthy
    Fault("sxh01_elsewhere", "healthy", "goes on in another layout, with experts", NONE, exact, elsewhere=True,
          needs=with_(experts=4), kind="healthy"),
    Fault("sxh02_parts", "healthy", "adapters, the batch in four parts", NONE, exact, micro=4, needs=with_(lora=4),
          formats=EXTRA, kind="healthy"),
    Fault("sxh03_averages", "healthy", "averages and fp8 beside fp32 weights", NONE, exact,
          needs=with_(ema=True, fp8=True, experts=0, precision="fp32"), formats=EXTRA, kind="healthy"),
    Fault("sxh04_scaler", "healthy", "a loss scale and Adam with decay in the gradient", NONE, exact,
          needs=with_(scaler=True, optimizer="adam"), formats=("torch_save", "folder", "accelerate"), kind="healthy"),
    # on purpose
    Fault("sxd01_batch_and_rate", "healthy", "twice the batch at 1.4 times the learning rate", NONE,
          lambda state, lab: state.declared(batch=2 * state.config.batch, lr=1.4 * state.config.lr), kind="deliberate",
          also=("H1", "C10", "C2", "C4")),
    Fault("sxd02_new_data", "healthy", "another data set, from its beginning", NONE,
          told(lambda s: {"data_index": 0, "loader": 0, "data_seed": 31}), kind="deliberate",
          formats=LOADED, also=("C6", "C7", "H1")),
    Fault("sxd03_annealed", "healthy", "the rest of the budget is annealed to almost zero", NONE,
          lambda state, lab: state.declared(min_lr=state.config.lr / 1000, total=state.trainer.step + 60),
          kind="deliberate", also=("C4", "C2", "H1", "B8")),
]  # fmt: skip
