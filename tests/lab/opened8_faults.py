"""The eighth sealed half, measured and then opened: what loads and saves make of a run's state.

Most are mistakes that public reports describe; what a fault leaves in which files follows from how it is made.
"""

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
    layered,
    mapped,
    moved,
    reborn,
    steps,
    told,
    vectors,
    with_,
)
from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.healthy import exact
from tests.lab.model import ADAPTED, LORA_SCALE, is_norm
from tests.lab.state import State
from tests.lab.train import EMA_DECAY, train

__all__ = ["OPENED8_FAULTS"]

ANY = "echo next early"
LOUD = "alone echo next early"
WHOLE = (*WEIGHTS, *MOMENTS)
#: Layouts whose files hold the position of the data as a loader tells it.
LOADED = ("torch_save", "dcp", "dcp_sharded")
#: Layouts of one process whose optimizer state has a counter for each parameter.
COUNTED = ("torch_save", "dcp", "folder", "lightning", "accelerate")
#: Layouts whose param groups and schedule are both stored.
PACED = (*COUNTED, "dcp_sharded")

HEADS = {"heads": 4, "groups": 2, "hidden": 48, "ffn": 192}
adapters = with_(lora=4, precision="fp32")
routed = with_(experts=4)
averaged = with_(ema=True)
NONE: frozenset[str] = frozenset()


def inside(*words: str) -> Callable[[str], bool]:
    return lambda name: any(word in name for word in words)


def rearranged(change: Callable[[torch.Tensor, Config], torch.Tensor], *words: str) -> Restore:
    """Weights and state of what is called so become ``change(tensor, config)``."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, WHOLE):
            for name in filter(inside(*words), dict(found)):
                found[name] = change(found[name], state.config).contiguous().clone()
        return state

    return restore


# ---- weights ---------------------------------------------------------------------------------------------------------


def rows_averaged(state: State, lab: Lab) -> State:
    """The table is resized after the load, which makes the tokens that were added to the base once more."""
    end = state.config.vocab
    for found in fields(state, WEIGHTS):
        for name in filter(inside("embed_tokens", "lm_head"), found):
            table = found[name].clone()
            table[end - 8 : end] = table[: end - 8].float().mean(0).to(table.dtype)
            found[name] = table
    return state


def two_tokens(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Another tokenizer gives the end and the padding each other's number."""
    return torch.cat([rows[:1], rows[2:3], rows[1:2], rows[3:]])


# ---- layouts ---------------------------------------------------------------------------------------------------------


def stacked(matrix: torch.Tensor, config: Config) -> torch.Tensor:
    """Ranks' columns are put under each other, and the whole is viewed in the shape that was expected."""
    return torch.cat(matrix.chunk(2, 1)).reshape(matrix.shape)


def fused_of_four(state: State, lab: Lab) -> State:
    """[gate; up] of four ranks joined as they are, and cut in the middle."""
    for found in fields(state, WHOLE):
        for gate in [name for name in found if name.endswith("gate_proj.weight")]:
            up = gate.replace("gate_proj", "up_proj")
            pairs = zip(found[gate].chunk(4), found[up].chunk(4), strict=True)
            line = torch.cat([part for pair in pairs for part in pair])
            found[gate], found[up] = (half.clone() for half in line.chunk(2))
    return state


def gates_exchanged(state: State, lab: Lab) -> State:
    """The conversion exchanges the weights; the optimizer's state is restored from elsewhere, by name."""
    for found in fields(state, WEIGHTS):
        for gate in [name for name in found if name.endswith("gate_proj.weight")]:
            up = gate.replace("gate_proj", "up_proj")
            found[gate], found[up] = found[up], found[gate]
    return state


def keys_as_queries(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Keys are reordered for interleaved rotary embeddings as if there were as many of their heads as of queries."""
    return rows.view(config.heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def tiled(state: State, lab: Lab) -> State:
    """Heads in the order of a model whose keys are repeated as a whole: 0 2 1 3 of two groups of two."""
    c = state.config

    def turn(matrix: torch.Tensor) -> torch.Tensor:
        parts = matrix.view(c.groups, c.heads // c.groups, c.head_dim, -1)
        return parts.transpose(0, 1).reshape(matrix.shape)

    for found in fields(state, WHOLE):
        for name in [name for name in found if name.endswith(("q_proj.weight", "o_proj.weight"))]:
            matrix = found[name]
            found[name] = (turn(matrix) if "q_proj" in name else turn(matrix.T.contiguous()).T).contiguous()
    return state


def rounded_down(rows: torch.Tensor, config: Config) -> torch.Tensor:
    """Five ranks' rows, the last one's fewer; the reader takes as many as fit of each, and zeros at the end."""
    parts = rows.split(-(-len(rows) // 5))
    part = len(rows) // 5
    line = torch.cat([one[:part] for one in parts[:4]] + [parts[4]])
    return torch.cat([line, line.new_zeros(len(rows) - len(line), rows.shape[1])])


def interleaved_stages(state: State, lab: Lab) -> State:
    """Two stages of two virtual ones each hold layers 0 2 and 1 3; read as 0 1 and 2 3."""
    order = (0, 2, 1, 3)
    return moved(layered(lambda number, layers: order[number]))(state, lab)


def router_turned(state: State, lab: Lab) -> State:
    """The router's rows and the balance follow the order of the ranks' experts, the experts do not."""
    order = torch.tensor([0, 2, 1, 3])
    for found in [*fields(state, WHOLE), state.buffers]:
        for name in filter(inside("mlp.gate."), found):
            found[name] = found[name][order].clone()
    return state


def two_robins(state: State, lab: Lab) -> State:
    """Two ranks took the parameters in turn; the line is read as if they were in order."""
    names = state.groups()[0][1]
    for found in fields(state, ("masters", *MOMENTS)):
        old = [found[name].flatten() for name in names]
        line = torch.cat(old[0::2] + old[1::2])
        for name, part in zip(names, line.split([len(one) for one in old]), strict=True):
            found[name] = part.view(found[name].shape).clone()
    return state


# ---- adapters --------------------------------------------------------------------------------------------------------


def merged_and_active(state: State, lab: Lab) -> State:
    """The merged model is taken for the base, and the adapters are put on top of it."""
    for name in [name for name in state.params if name.endswith(tuple(f"{side}.weight" for side in ADAPTED))]:
        stem = name.removesuffix("weight")
        product = state.params[f"{stem}lora_B.weight"] @ state.params[f"{stem}lora_A.weight"]
        state.params[name] = state.params[name] + LORA_SCALE * product
    return state


def base_of_eight_bits(state: State, lab: Lab) -> State:
    """The base was quantised row by row, and its weights are what came back from that."""
    for name in [name for name in state.params if "lora_" not in name and not is_norm(name)]:
        weight = state.params[name]
        step = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        state.params[name] = (weight / step).round() * step
    return state


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def new_state(pick: Callable[[str], bool]) -> Restore:
    return both(mapped(torch.zeros_like, pick, MOMENTS), steps(lambda step: 0.0, pick))


def from_weights(state: State, lab: Lab) -> State:
    """Masters as they are made of 16-bit weights."""
    state.masters = {name: state.params[name].float() for name in state.masters}
    return state


def registered_otherwise(name: str, config: Config) -> str:
    """State is numbered; a class that registers k, o, q, v reads that of one which registers q, k, v, o."""
    for mine, theirs in zip("koqv", "qkvo", strict=True):
        if f"self_attn.{mine}_proj" in name:
            return name.replace(f"{mine}_proj", f"{theirs}_proj")
    return name


def adapters_exchanged(name: str, config: Config) -> str:
    if "lora_A" not in name:
        return name
    return name.replace("q_proj", "\0").replace("v_proj", "q_proj").replace("\0", "v_proj")


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Through e4m3 under a scale of the tensor's own, as optimizers that store their first moment so."""
    scale = 448.0 / tensor.abs().max().clamp(min=1e-30)
    return (tensor * scale).to(torch.float8_e4m3fn).float() / scale


def following_layer(name: str, config: Config) -> str:
    return layered(lambda number, layers: (number + 1) % layers)(name, config)


# ---- masters, averages, buffers --------------------------------------------------------------------------------------


def second_ranks_from_weights(state: State, lab: Lab) -> State:
    return from_weights(state.clone(), lab)


def cut_off(state: State, lab: Lab) -> State:
    """16 bits of each master, and no rounding."""
    for name, master in state.masters.items():
        state.params[name] = (master.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    return state


def average_of_the_loaded(state: State, lab: Lab) -> State:
    """The average is made as a copy of the weights, after they were loaded."""
    state.ema = {name: state.updated.get(name, state.params[name]).float().clone() for name in state.ema}
    return state


def half_of_the_history(state: State, lab: Lab) -> State:
    """Histories of another length: their newer half is kept."""
    for name in filter(inside("amax_history"), state.buffers):
        history = state.buffers[name].clone()
        history[len(history) // 2 :] = 0
        state.buffers[name] = history
    return state


# ---- saves -----------------------------------------------------------------------------------------------------------


def upper_half_ahead(loaded: State, after: State) -> State:
    """The run went on while the layers were written one by one: the upper ones are of an update later."""
    later, _, _ = train(after, 1)
    found = after.clone()
    late = inside(*(f".layers.{n}." for n in range(after.config.layers // 2, after.config.layers)))
    for name in filter(late, after.params):
        found.params[name] = later.params[name]
        for part in ("masters", *MOMENTS):
            if getattr(found, part):
                getattr(found, part)[name] = getattr(later, part)[name]
        found.step[name] = later.step[name]
    return found


def written_again(loaded: State, after: State) -> State:
    """Tensors that were gathered for the first save are written by every later one, with the trainer's new count."""
    return replace(loaded.clone(), trainer=after.trainer)


# ---- files -----------------------------------------------------------------------------------------------------------


def disk_full(folder: Path, state: State, lab: Lab) -> State | None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: 2 * len(data) // 3])
    return None


def no_metadata(folder: Path, state: State, lab: Lab) -> State | None:
    """The coordinator was stopped before it wrote the metadata."""
    (folder / ".metadata").unlink()
    return None


def endless_gain(state: State, lab: Lab) -> State:
    """One gain of a norm overflowed in a transfer."""
    name = lab.rng.choice([name for name in state.params if is_norm(name)])
    at = lab.rng.randrange(state.config.hidden)
    for found in fields(state, WEIGHTS):
        if name in found:
            gains = found[name].clone()
            gains[at] = torch.inf
            found[name] = gains
    return state


def negative_square(state: State, lab: Lab) -> State:
    """The sign bit of one second moment, of an element that has a gradient."""
    name = lab.rng.choice([name for name in state.exp_avg_sq if ".mlp." in name and "down_proj" in name])
    line = state.exp_avg_sq[name].flatten().clone()
    at = lab.rng.choice((line > 0).nonzero().flatten().tolist())
    line[at] = -line[at]
    state.exp_avg_sq[name] = line.view(state.exp_avg_sq[name].shape)
    return state


def last_rows_unflushed(state: State, lab: Lab) -> State:
    """The last pages of the table's second moments were never written."""
    square = state.exp_avg_sq["model.embed_tokens.weight"].clone()
    square[len(square) // 2 :] = 0
    state.exp_avg_sq["model.embed_tokens.weight"] = square
    return state


def previous_update(state: State, lab: Lab) -> State:
    return lab.run.previous


OPENED8_FAULTS = [
    # weights
    Fault("ei01_wrapped_mlps", "A1", "names of the MLPs alone have a wrapper's prefix: they are random", seen(ANY),
          reborn(inside(".mlp.")), also=("A2",), why="modules that were not found; renamed or missing looks the same"),
    Fault("ei02_values_new", "A2", "of fused rows the values were not copied: they are as they were made", seen(ANY),
          reborn(inside("v_proj.weight"))),
    Fault("ei03_rows_averaged", "F7", "the last eight tokens have the mean of all rows", seen(LOUD), rows_averaged,
          also=("A2",), why="rows of tokens; rows that are initialised anew"),
    Fault("ei04_two_tokens", "F7", "two special tokens have each other's row", seen(ANY),
          rearranged(two_tokens, "embed_tokens", "lm_head"), also=("E1",)),
    # layouts
    Fault("ei05_stacked", "E1", "columns of two ranks put under each other and reshaped", seen(ANY),
          rearranged(stacked, "o_proj", "down_proj"), also=("E8",)),
    Fault("ei06_fused_of_four", "E2", "[gate; up] of four ranks joined as they are, in every expert", seen(ANY),
          fused_of_four, needs=routed, also=("E1", "E3")),
    Fault("ei07_gates_exchanged", "E3", "gate and up exchanged in the weights, their state is not", seen(ANY),
          gates_exchanged, also=("E13", "B5"), why="weights exchanged, or state that belongs to others"),
    Fault("ei08_keys_as_queries", "E5", "keys reordered for rotary embeddings with the number of query heads",
          seen(ANY), rearranged(keys_as_queries, "k_proj"), needs=with_(**HEADS), formats=FLAT,
          also=("E6", "E1", "E4"), why="rows of keys across heads"),
    Fault("ei09_tiled", "E6", "queries in the order of tiled keys", seen(ANY), tiled, needs=with_(**HEADS),
          formats=FLAT, also=("E1", "E4", "E5"), why="heads of queries in other groups, by rows"),
    Fault("ei10_rounded_down", "E8", "rows of five ranks, as many as fit of each", seen(ANY),
          rearranged(rounded_down, "embed_tokens", "lm_head"), needs=with_(vocab=88, padded=112),
          also=("E11", "F7", "E1"), why="rows shifted from the first rank's end on, zeros at the end"),
    Fault("ei11_interleaved_stages", "E9", "layers of virtual stages in the order of real ones", seen(ANY),
          interleaved_stages, needs=with_(layers=4, experts=0)),
    Fault("ei12_router_turned", "E10", "routers in the order of the ranks, experts not", seen(ANY), router_turned,
          needs=routed, also=("E1",)),
    Fault("ei13_norms_summed", "E12", "moments of the norms are the sum over two ranks", seen("echo next"),
          mapped(lambda tensor: 2 * tensor, vectors, MOMENTS), also=("B6", "B10"),
          why="state of replicated tensors times the number of ranks"),
    Fault("ei14_two_robins", "E13", "two ranks' parameters in turn, their state and masters read in order", seen(LOUD),
          two_robins, needs=masters, also=("E7", "B5", "D2", "B6"), why="a flat line that is cut at other places"),
    # adapters
    Fault("ei15_merged_and_active", "F5", "adapters merged into the base, and still active", seen(ANY),
          merged_and_active, needs=adapters, formats=EXTRA, also=("F6",), why="a base that has changed"),
    Fault("ei16_base_of_eight_bits", "D7", "the frozen base went through eight bits", seen(ANY), base_of_eight_bits,
          needs=adapters, formats=EXTRA, also=("F6",), why="rounded; or a base of another revision"),
    Fault("ei17_adapters_exchanged", "B5", "state of the adapters of q and v exchanged", seen("echo next"),
          moved(adapters_exchanged, anything, MOMENTS), needs=adapters, formats=EXTRA, also=("E13",)),
    # the optimizer
    Fault("ei18_engine_without_state", "B1", "the engine loads the module alone: state is new, masters from weights",
          seen(LOUD), both(new_state(anything), from_weights), needs=masters, formats=("deepspeed",), also=("D1",),
          why="both happened"),
    Fault("ei19_names_of_layers", "B1", "state of layers is looked up by other names and is new", seen(LOUD),
          new_state(inside(".layers.")), formats=COUNTED),
    Fault("ei20_group_step", "B2", "the groups' step is not restored", seen(LOUD), steps(lambda step: 0.0),
          formats=("megatron", "deepspeed")),
    Fault("ei21_second_ranks_experts", "B3", "moments of the second half of the experts are zeros", seen(LOUD),
          mapped(torch.zeros_like, inside(".experts.2.", ".experts.3."), MOMENTS), needs=routed),
    Fault("ei22_registered_otherwise", "B5", "state numbered in the order of another class", seen("echo next"),
          moved(registered_otherwise, anything, MOMENTS), needs=with_(heads=4, groups=4, hidden=48, ffn=192),
          also=("E13",), why="state of tensors of one shape"),
    Fault("ei23_following_average", "B6", "exp_avg is that of the next layer, exp_avg_sq is right",
          seen("echo next"), moved(following_layer, anything, ("exp_avg",)), also=("B5", "E13", "E9"),
          why="one of two moments belongs to others"),
    Fault("ei24_summed_parts", "B10", "the loss is a sum over parts where it was their mean", seen("next early"),
          told(lambda s: {"silent": (("gradient", 16.0),)}), needs=with_(clip=0.0, optimizer="adamw"),
          also=("C10", "H1", "D8"), why="gradients of another scale, whatever made them so"),
    Fault("ei25_vectors_unscheduled", "B8", "the schedule does not reach the second group any more",
          seen("next early"), told(lambda s: {"vector_lr": s.lr}), formats=PACED, needs=with_(warmup=20),
          also=("C2", "H1")),
    # schedules, settings, data
    Fault("ei26_engine_without_schedule", "C1", "the engine's schedule begins again", seen(LOUD),
          told(lambda s: {"scheduler": 0}), formats=("deepspeed",), also=("C2",)),
    Fault("ei27_constant", "C2", "the decay is another one by default: none", seen(ANY),
          lambda state, lab: state.declared(min_lr=state.config.lr), formats=ARGUED, also=("H1", "C4", "B8"),
          why="a setting too"),
    Fault("ei28_counted_twice", "C3", "the position was taken for an increment", seen(LOUD),
          told(lambda s: {"scheduler": 2 * s.trainer.scheduler}), formats=("megatron",), also=("C2",)),
    Fault("ei29_length_in_parts", "C4", "the length of the schedule counts micro-batches", seen(ANY),
          lambda state, lab: state.declared(total=4 * state.config.total), formats=("megatron", "deepspeed"),
          also=("H1", "C2")),
    Fault("ei30_samples_for_batches", "C6", "a position in samples is read as one in batches", seen(ANY),
          told(lambda s: {"loader": s.trainer.loader * s.config.batch,
                          "data_index": s.trainer.loader * s.config.batch}),
          formats=LOADED, also=("C7", "H1")),
    Fault("ei31_samples_forgotten", "C6", "no consumed samples, the rest goes on", seen(LOUD),
          told(lambda s: {"samples": 0, "data_index": 0}), formats=("megatron",), also=("H1", "C9")),
    Fault("ei32_first_iteration", "C9", "the iteration begins again, optimizer and schedule go on", seen(LOUD),
          told(lambda s: {"step": 0}), formats=("megatron", "torch_save", "dcp"), also=("B2", "C6", "C3"),
          why="the trainer's own count alone"),
    Fault("ei33_twice_the_ranks", "C10", "twice the ranks with the same batch each", seen(ANY),
          lambda state, lab: state.declared(batch=2 * state.config.batch), formats=("deepspeed",),
          also=("H1", "C6", "C7")),
    Fault("ei34_clip_forgotten", "H1", "gradients are not clipped any more", seen(ANY),
          lambda state, lab: state.declared(clip=0.0), formats=(*ARGUED, "megatron"), needs=with_(clip=0.5)),
    # masters, averages, buffers
    Fault("ei35_second_rank_rounded", "D1", "the second rank made its masters from weights",
          seen("alone echo next"), second=second_ranks_from_weights, needs=masters, formats=("deepspeed",),
          also=("G6",), why="masters of one rank; parts that were written by different means"),
    Fault("ei36_following_masters", "D2", "masters of the next layer", seen(LOUD),
          moved(following_layer, anything, ("masters",)), needs=masters, also=("E9", "E13"),
          why="layers exchanged in the masters, and after an update in the weights"),
    Fault("ei37_cut_off", "D3", "weights are their masters' upper 16 bits, unrounded", seen("alone echo"), cut_off,
          needs=masters),
    Fault("ei38_moment_of_eight_bits", "D4", "first moments went through eight bits", seen("alone echo"),
          mapped(fp8, anything, ("exp_avg",)), also=("B11",), why="narrower than 16 bits"),
    Fault("ei39_half_of_the_history", "D9", "half of each amax history", seen("alone echo next"), half_of_the_history,
          needs=with_(fp8=True, experts=0), formats=EXTRA, also=("A5",)),
    Fault("ei40_average_twice", "F4", "the average follows twice an update", seen("next early"),
          told(lambda s: {"silent": (("ema", EMA_DECAY**2),)}), needs=averaged, formats=EXTRA, also=("H1",)),
    Fault("ei41_average_of_the_loaded", "F4", "the average is made from the loaded weights", seen(LOUD),
          average_of_the_loaded, needs=averaged, formats=EXTRA),
    # saves
    Fault("ei42_upper_half_ahead", "G6", "upper layers in the save are of an update later", seen("next early"), exact,
          saver=upper_half_ahead, formats=COUNTED, also=("C9", "B2"), why="parts of another update"),
    Fault("ei43_written_again", "G7", "later saves hold the tensors of the first one", seen("next early"), exact,
          saver=written_again, also=("G6", "C9", "H1"), why="nothing but counters has moved"),
    # files
    Fault("ei44_disk_full", "G4", "a third of the weights' file is missing", seen("alone echo"), damage=disk_full,
          formats=("folder", "accelerate"), also=("G8",)),
    Fault("ei45_no_metadata", "G8", "the metadata was never written", seen("alone echo"), damage=no_metadata,
          formats=("dcp", "dcp_sharded"), also=("G4",)),
    Fault("ei46_endless_gain", "G1", "one gain of a norm is infinite", seen(LOUD), endless_gain),
    Fault("ei47_negative_square", "G3", "one second moment is negative", seen(LOUD), negative_square,
          also=("G1", "G2")),
    Fault("ei48_last_rows_unflushed", "G5", "the second half of the table's exp_avg_sq is zeros", seen(LOUD),
          last_rows_unflushed, also=("B4", "E8", "G6"),
          why="zeros in the place of bytes; half of a tensor's second moments"),
    Fault("ei49_previous_update", "G6", "the second rank's file is of the update before", seen("alone echo"),
          second=previous_update, formats=("megatron", "dcp_sharded", "deepspeed"),
          blind=lambda config, format: format == "dcp_sharded"),
    # healthy
    Fault("eih01_multi_query", "healthy", "one key for all heads, a constant rate without warm-up", NONE, exact,
          needs=lambda c: c.but(heads=6, groups=1, hidden=72, ffn=288, min_lr=c.lr, warmup=1), kind="healthy"),
    Fault("eih02_elsewhere", "healthy", "a head of its own, goes on in another layout", NONE, exact, elsewhere=True,
          needs=with_(tied=False, betas=(0.95, 0.99)), kind="healthy"),
    Fault("eih03_bf16_alone", "healthy", "bf16 alone, two parts", NONE, exact, micro=2,
          needs=with_(precision="bf16", experts=0), formats=("torch_save", "dcp", "dcp_sharded"), kind="healthy",
          also=("D5", "D6")),
    Fault("eih04_no_decay", "healthy", "no weight decay at all, a large eps", NONE, exact,
          needs=with_(weight_decay=0.0, eps=1e-5), kind="healthy"),
    Fault("eih05_fp8_and_average", "healthy", "fp8 and averages, a head of its own", NONE, exact,
          needs=with_(fp8=True, ema=True, tied=False, experts=0), formats=EXTRA, kind="healthy"),
    Fault("eih06_late", "healthy", "experts at the end of the schedule", NONE, exact,
          needs=lambda c: c.but(experts=4, total=c.resume + 10, warmup=30), kind="healthy"),
    # on purpose
    Fault("eid01_further", "healthy", "the schedule is stretched, the batch is doubled", NONE,
          lambda state, lab: state.declared(total=2 * state.config.total, batch=2 * state.config.batch),
          kind="deliberate", formats=ARGUED, also=("C4", "C10", "C2", "H1", "C6", "C7")),
    Fault("eid02_mixture", "healthy", "another mixture of data, from its begin", NONE,
          told(lambda s: {"data_seed": 7, "data_index": 0, "loader": 0}), kind="deliberate", formats=LOADED,
          also=("C6", "C7", "H1")),
    Fault("eid03_queries_frozen", "healthy", "queries and keys are frozen from here on", NONE,
          told(lambda s: {"frozen": ("q_proj", "k_proj")}), kind="deliberate", also=("H1",)),
    Fault("eid04_tighter", "healthy", "a tighter clip and a larger eps", NONE,
          lambda state, lab: state.declared(clip=0.1, eps=1e-6), kind="deliberate", also=("H1", "B10")),
]  # fmt: skip
