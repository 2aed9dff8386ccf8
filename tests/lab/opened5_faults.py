"""Resumes of the lab's own trainer of the fifth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.lab.changes import (
    ALIKE,
    BARE,
    EXTRA,
    FLAT,
    MOMENTS,
    WEIGHTS,
    Restore,
    ends,
    fields,
    layered,
    mapped,
    moved,
    of_layers,
    set_weights,
    steps,
    told,
    vectors,
    with_,
)
from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen, unchanged
from tests.lab.model import initial, is_norm
from tests.lab.state import State

__all__ = ["OPENED5_FAULTS"]

NONE: frozenset[str] = frozenset()
RANKED = ("dcp_sharded", "megatron", "deepspeed")
#: Layouts that store the arguments and the number of samples.
COUNTED = ("torch_save", "dcp", "dcp_sharded", "torch_masters")
OPTIMIZER = ("exp_avg", "exp_avg_sq")


# ---- needs -----------------------------------------------------------------------------------------------------------


def fp32(config: Config) -> Config:
    return config.but(precision="fp32")


def tied(yes: bool, after: Callable[[Config], Config] = unchanged) -> Callable[[Config], Config]:
    return lambda config: after(config).but(tied=yes)


def mixture(config: Config) -> Config:
    return config.but(experts=config.experts or 4)


def averaged(precision: str) -> Callable[[Config], Config]:
    return lambda config: config.but(ema=True, precision=precision)


def unrolled(config: Config) -> Config:
    """Every query head has a key of its own."""
    return config.but(groups=config.heads)


# ---- optimizer state -------------------------------------------------------------------------------------------------


def reset(state: State, names: list[str], *, step: bool = True) -> State:
    """Moments 0, and the counter too."""
    for name in names:
        state.exp_avg[name] = torch.zeros_like(state.exp_avg[name])
        state.exp_avg_sq[name] = torch.zeros_like(state.exp_avg_sq[name])
        if step:
            state.step[name] = 0.0
    return state


def second_group_new(state: State, lab: Lab) -> State:
    return reset(state, [name for name in state.step if is_norm(name)])


def one_layer_kept_step(state: State, lab: Lab) -> State:
    layer = lab.rng.randrange(state.config.layers)
    return reset(state, [name for name in state.step if of_layers(layer)(name)], step=False)


def other_rank_new(state: State, lab: Lab) -> State:
    return reset(state, list(state.step), step=lab.rng.random() < 0.5)


def first_moment_lost(state: State, lab: Lab) -> State:
    return mapped(torch.zeros_like, where=("exp_avg",))(state, lab)


def counters_of_vectors(state: State, lab: Lab) -> State:
    return steps(lambda step: 0.0, vectors)(state, lab)


def counters_by_part(state: State, lab: Lab) -> State:
    parts = lab.rng.choice([2, 4, 8])
    return steps(lambda step: step * parts)(state, lab)


def moments_of_next_layer(state: State, lab: Lab) -> State:
    by = lab.rng.randrange(1, state.config.layers)
    return moved(layered(lambda n, count: (n + by) % count), where=MOMENTS)(state, lab)


def moments_of_siblings(state: State, lab: Lab) -> State:
    """Keys and values, gate and up: each pair has one shape, and a dict in another order exchanges them."""
    pairs = {"k_proj": "v_proj", "v_proj": "k_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}

    def source(name: str, config: Config) -> str:
        return re.sub("|".join(pairs), lambda found: pairs[found[0]], name)

    return moved(source, where=MOMENTS)(state, lab)


def optimizer_of_recent(state: State, lab: Lab) -> State:
    older = lab.run.recent
    return replace(state, exp_avg=older.exp_avg, exp_avg_sq=older.exp_avg_sq, step=older.step)


def moments_by_heads(state: State, lab: Lab) -> State:
    """The state went through the converter, the weights came by another way: heads of q in reverse."""
    for found in fields(state, MOMENTS):
        for name in [name for name in found if name.endswith("q_proj.weight")]:
            found[name] = by_heads(found[name], state.config, lambda heads: heads.flip(0))
    return state


def to_half(kind: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(kind).float()


# ---- masters and precision -------------------------------------------------------------------------------------------


def masters_rounded(pick: Callable[[str], bool]) -> Restore:
    return mapped(lambda t: t.to(torch.bfloat16).float(), pick, ("masters",))


def export_narrow(state: State, lab: Lab) -> State:
    kind = lab.rng.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    return mapped(lambda t: t.to(kind).float(), where=("params",))(state, lab)


def through_fp8(state: State, lab: Lab) -> State:
    def quantised(tensor: torch.Tensor) -> torch.Tensor:
        scale = 448.0 / tensor.float().abs().max().clamp(min=1e-12)
        return (tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale

    return mapped(quantised, lambda name: ".mlp." in name and name.endswith("_proj.weight"), ("params",))(state, lab)


# ---- weights: missing ------------------------------------------------------------------------------------------------


def initial_of(pick: Callable[[str], bool]) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        new = initial(state.config, lab.rng.randrange(1000, 9999))
        return set_weights(state, {name: weight for name, weight in new.items() if pick(name)})

    return restore


def teacher_in_file(state: State, lab: Lab) -> State:
    older = lab.run.recent
    state.buffers |= {f"teacher.{name}": weight.clone() for name, weight in older.params.items()}
    return state


def scales_one(state: State, lab: Lab) -> State:
    return replace(
        state, buffers={n: torch.ones_like(b) if n.endswith("_scale") else b for n, b in state.buffers.items()}
    )


# ---- weights: moved --------------------------------------------------------------------------------------------------


def by_heads(tensor: torch.Tensor, config: Config, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return how(tensor.reshape(-1, config.head_dim, tensor.shape[-1])).reshape(tensor.shape).contiguous()


def transposed(state: State, lab: Lab) -> State:
    """Conv1D's layout taken for Linear's where a matrix is square."""
    side = lab.rng.choice(["q_proj", "o_proj"])
    return mapped(lambda t: t.T, ends(side))(state, lab)


def values_for_keys(state: State, lab: Lab) -> State:
    """[q; v; k] read as [q; k; v]."""
    turn = {"k_proj": "v_proj", "v_proj": "k_proj"}
    return moved(lambda name, _: re.sub("k_proj|v_proj", lambda found: turn[found[0]], name), where=ALIKE)(state, lab)


def per_head_qkv(state: State, lab: Lab) -> State:
    """Q, K and V one after another, read as q k v of every head."""
    heads = state.config.heads
    for found in fields(state, ALIKE):
        for name in [name for name in found if name.endswith("q_proj.weight")]:
            names = [name.replace("q_proj", f"{side}_proj") for side in "qkv"]
            whole = torch.cat([found[one] for one in names]).reshape(heads, 3, -1, state.config.hidden)
            for number, one in enumerate(names):
                found[one] = whole[:, number].reshape(found[one].shape).contiguous()
    return state


def keys_turned(state: State, lab: Lab) -> State:
    """Key and value heads are in reverse order, their queries are not."""
    how = mapped(lambda t: by_heads(t, state.config, lambda heads: heads.flip(0)), ends("k_proj", "v_proj"))
    return how(state, lab)


def fc1_of_four(state: State, lab: Lab) -> State:
    """[gate; up] of four ranks, joined as they are."""
    for found in fields(state, ALIKE):
        for name in [name for name in found if name.endswith("gate_proj.weight")]:
            other = name.replace("gate_proj", "up_proj")
            sides = [found[name].chunk(4), found[other].chunk(4)]
            line = torch.cat([part for rank in range(4) for part in (sides[0][rank], sides[1][rank])])
            found[name], found[other] = (half.clone() for half in line.chunk(2))
    return state


def layers_late(state: State, lab: Lab) -> State:
    """An offset of one: layer n has what n - 1 had, and the first is as a new process made it."""
    state = moved(layered(lambda n, count: max(0, n - 1)))(state, lab)
    return initial_of(of_layers(0))(state, lab)


def experts_of_ranks(state: State, lab: Lab) -> State:
    """Experts of two expert-parallel ranks joined in turn: 0 2 1 3."""
    count = state.config.experts
    order = [*range(0, count, 2), *range(1, count, 2)]

    def source(name: str, config: Config) -> str:
        return re.sub(r"experts\.(\d+)\.", lambda found: f"experts.{order[int(found[1])]}.", name)

    return moved(source, lambda name: ".experts." in name)(state, lab)


def flat_weights_shifted(state: State, lab: Lab) -> State:
    """A flat parameter of FSDP: the reader leaves out an alignment gap after one of the tensors."""
    names = state.groups()[0][1]
    by = lab.rng.randrange(1, 16)
    start = sum(state.params[name].numel() for name in names[: lab.rng.randrange(1, len(names) - 1)])
    for found in fields(state, WEIGHTS):
        line = torch.cat([found[name].reshape(-1) for name in names])
        line = torch.cat([line[:start], line[start + by :], line.new_zeros(by)])
        for name, part in zip(names, line.split([found[name].numel() for name in names]), strict=True):
            found[name] = part.reshape(found[name].shape).clone()
    return state


def partitions_turned(state: State, lab: Lab) -> State:
    """ZeRO's two partitions read in the wrong order of ranks."""
    for found in fields(state, ("masters", *MOMENTS)):
        for _, names in state.groups():
            line = torch.cat([found[name].reshape(-1) for name in names])
            line = torch.cat([line[(len(line) + 1) // 2 :], line[: (len(line) + 1) // 2]])
            for name, part in zip(names, line.split([found[name].numel() for name in names]), strict=True):
                found[name] = part.reshape(found[name].shape).clone()
    return state


def last_rows_repeated(state: State, lab: Lab) -> State:
    """Three ranks of a vocabulary that three do not divide: the last shard is read from too early a row."""
    rows = state.config.padded
    part = -(-rows // 3)

    def how(table: torch.Tensor) -> torch.Tensor:
        return torch.cat([table[: 2 * part], table[2 * part - 2 : rows - 2]])

    return mapped(how, ends("embed_tokens", "lm_head"))(state, lab)


def padding_first(state: State, lab: Lab) -> State:
    pad = state.config.padded - state.config.vocab
    return mapped(lambda t: t.roll(pad, 0), ends("embed_tokens", "lm_head"))(state, lab)


def tokens_sorted(state: State, lab: Lab) -> State:
    """The tokenizer was rebuilt from a sorted list; rows were moved, the optimizer's were not."""
    vocab = state.config.vocab
    order = [*lab.rng.sample(range(vocab), vocab), *range(vocab, state.config.padded)]
    return mapped(lambda t: t[order], ends("embed_tokens", "lm_head"), WEIGHTS)(state, lab)


def padding_cut(state: State, lab: Lab) -> State:
    """resize_token_embeddings(len(tokenizer)) cuts the padding off."""
    vocab = state.config.vocab
    return mapped(lambda t: t[:vocab], ends("embed_tokens", "lm_head"))(state.declared(padded=vocab), lab)


def head_of_embedding(state: State, lab: Lab) -> State:
    return set_weights(state, {"lm_head.weight": state.updated["model.embed_tokens.weight"].clone()})


# ---- averages, adapters ----------------------------------------------------------------------------------------------


def average_restarted(state: State, lab: Lab) -> State:
    return replace(state, ema={name: weight.float().clone() for name, weight in state.updated.items()})


def average_initial(state: State, lab: Lab) -> State:
    return replace(state, ema=initial(state.config, lab.rng.randrange(1000, 9999)))


def average_in_halves(state: State, lab: Lab) -> State:
    """The 16-bit weights are the average, their masters are not."""
    return replace(state, params={name: weight.to(state.params[name].dtype) for name, weight in state.ema.items()})


def adapter_new(state: State, lab: Lab) -> State:
    return initial_of(lambda name: "lora_" in name)(state, lab)


def adapter_a_new(state: State, lab: Lab) -> State:
    return initial_of(lambda name: "lora_A" in name)(state, lab)


# ---- corruption ------------------------------------------------------------------------------------------------------


def first_rank_of_recent(state: State, lab: Lab) -> State:
    older = lab.run.recent
    return replace(state, exp_avg=older.exp_avg, exp_avg_sq=older.exp_avg_sq)


def weights_of_recent(state: State, lab: Lab) -> State:
    older = lab.run.recent
    return replace(state, params=older.params, masters=older.masters)


# ---- what later saves write ------------------------------------------------------------------------------------------


def half_from_before(resumed: State, later: State) -> State:
    """The copy to the host went on while the next save began: half of the layers are those of the resume."""
    found = later.clone()
    for where in ("params", "masters", *MOMENTS):
        new, old = getattr(found, where), getattr(resumed, where)
        new |= {name: old[name].clone() for name in new if of_layers(*range(0, later.config.layers, 2))(name)}
    return found


def weights_from_before(resumed: State, later: State) -> State:
    return replace(later, params=resumed.clone().params)


def narrow_saved(resumed: State, later: State) -> State:
    return replace(later, params={name: w.to(torch.bfloat16).float() for name, w in later.params.items()})


def same(state: State, lab: Lab) -> State:
    return state


# ---- counters --------------------------------------------------------------------------------------------------------


def epoch_for_step(state: State, lab: Lab) -> State:
    return state.told(scheduler=state.trainer.step // lab.rng.choice([10, 20, 40]))


def steps_per_process(state: State, lab: Lab) -> State:
    return state.told(silent=(("schedule", lab.rng.choice([2, 4, 8])),))


def scaled_again(state: State, lab: Lab) -> State:
    ranks = lab.rng.choice([2, 4, 8])
    return state.declared(lr=state.config.lr * ranks, min_lr=state.config.min_lr * ranks)


def rate_hidden(state: State, lab: Lab) -> State:
    return state.told(silent=(("lr", lab.rng.choice([0.1, 0.25, 4.0])),))


def gradients_larger(state: State, lab: Lab) -> State:
    """Losses of micro-batches are summed and not averaged; nothing is clipped."""
    return state.told(silent=(("gradient", lab.rng.choice([4.0, 8.0])),))


def decay_off(state: State, lab: Lab) -> State:
    return state.declared(weight_decay=0.0)


def fewer_parts(state: State, lab: Lab) -> State:
    return state.declared(batch=state.config.batch // 2)


def position_unseen(state: State, lab: Lab) -> State:
    """The file knows no position, and the data begins anew."""
    return state.told(data_index=0)


def longer_context(state: State, lab: Lab) -> State:
    return state.declared(rope_theta=lab.rng.choice([5e4, 5e5, 1e6]))


def _fault(
    id: str, cause: str, text: str, where: str, restore: Restore | None = None, also: str = "", **more: object
) -> Fault:
    return Fault(id, cause, text, seen(where), restore, also=tuple(also.split()), **more)  # type: ignore[arg-type]


def _well(id: str, text: str, restore: Restore = same, **more: object) -> Fault:
    return Fault(id, "healthy", text, NONE, restore, kind="healthy", **more)  # type: ignore[arg-type]


def _meant(id: str, text: str, true: str, restore: Restore, **more: object) -> Fault:
    return Fault(id, "healthy", text, NONE, restore, kind="deliberate", also=tuple(true.split()), **more)  # type: ignore[arg-type]


_FAULTS = [
    # optimizer state
    _fault("i01_second_group_new", "B1", "the loop over param groups restores the first one alone",
           "alone echo next early", second_group_new),
    _fault("i02_layer_moments_lost", "B3", "moments of one layer are zeros, its counters are not",
           "alone echo next early", one_layer_kept_step, "B1 G5", why="zeros may be an unwritten part of a file too"),
    _fault("i03_rank_state_new", "B1", "the second rank's optimizer file was not found",
           "alone echo next early", second=other_rank_new, also="B3 G5 G6", formats=RANKED,
           why="half of the moments are 0; counters of what both ranks hold are rank 0's"),
    _fault("i04_first_moment_lost", "B3", "exp_avg is zeros, exp_avg_sq and the counters are right",
           "alone echo next", first_moment_lost, "B6"),
    _fault("i05_counters_of_vectors", "B2", "the counters of one param group are zeros",
           "alone echo next early", counters_of_vectors, "C9 G6", formats=FLAT,
           why="counters that disagree with one another"),
    _fault("i06_counters_by_part", "C9", "the optimizer's counters are those of the micro-batches",
           "alone echo next early", counters_by_part, "B2", formats=FLAT, why="the optimizer counts more than the run"),
    _fault("i07_moments_next_layer", "B5", "moments are numbered by the layers of a pipeline stage",
           "echo next early", moments_of_next_layer, "E13 E9", why="the optimizer's map of layers is another one"),
    _fault("i08_moments_siblings", "B5", "k and v, gate and up come in another order of the parameters",
           "echo next early", moments_of_siblings, "E13 E3", formats=("torch_save", "dcp", *BARE),
           why="whole tensors of the state belong to siblings"),
    _fault("i09_optimizer_older", "G6", "the optimizer's file is the one of the save before",
           "alone echo next early", optimizer_of_recent, "B2 C9", formats=FLAT,
           why="its counters are older than the trainer's"),
    _fault("i10_moments_by_heads", "E13", "the state passed through a converter that turns the heads, the weights not",
           "echo next early", moments_by_heads, "B5 E6", formats=("torch_save", "dcp", *BARE)),
    _fault("i11_variance_half", "D4", "exp_avg_sq is saved as fp16 and loses what is smaller than 6e-8",
           "alone echo next", mapped(to_half(torch.float16), where=("exp_avg_sq",)), "B4"),
    # masters and precision
    _fault("i12_masters_layers", "D1", "masters of the layers are rebuilt from bf16, those of the table are kept",
           "alone echo next", masters_rounded(lambda name: ".layers." in name), needs=masters),
    _fault("i13_export_narrow", "D7", "an export in 16 bits is resumed in fp32", "alone echo next",
           export_narrow, "D1", needs=fp32),
    _fault("i14_export_fp8", "D7", "MLPs pass through fp8 and back", "alone echo next", through_fp8, needs=fp32,
           formats=("torch_save", "dcp", "folder", "lightning", "accelerate")),
    # weights that are missing
    _fault("i15_layers_renamed", "A1", "no layer's name matches, table and last norm do",
           "echo next early", initial_of(lambda name: ".layers." in name), "A2 D2"),
    _fault("i16_teacher", "A4", "a teacher is saved as part of the model", "echo next early", teacher_in_file,
           formats=("torch_save", "dcp", "folder", "lightning"), needs=fp32),
    _fault("i17_fp8_scales", "D9", "fp8 scales are ones, the histories are right", "alone echo", scales_one,
           needs=with_(fp8=True, experts=0), formats=("torch_save", "dcp")),
    # weights that moved
    _fault("i18_transposed", "E1", "square matrices are transposed, as Conv1D holds them",
           "echo next early", transposed),
    _fault("i19_values_for_keys", "E4", "[q; v; k] read as [q; k; v]", "echo next early", values_for_keys, "E1 E6"),
    _fault("i20_per_head", "E4", "contiguous Q, K, V read head by head", "echo next early", per_head_qkv, "E1 E6",
           needs=unrolled),
    _fault("i21_keys_turned", "E6", "key and value heads are reversed, queries are not",
           "echo next early", keys_turned, "E1"),
    _fault("i22_fc1_of_four", "E2", "[gate; up] of four ranks joined as they are", "echo next early", fc1_of_four,
           "E1 E3", formats=("torch_save", "dcp", "dcp_sharded", "megatron", "folder", "accelerate"),
           needs=with_(experts=0)),
    _fault("i23_layers_late", "E9", "layers are shifted by one, the first is new", "echo next early", layers_late,
           "A2"),
    _fault("i24_experts_of_ranks", "E10", "experts of two ranks joined in turn", "echo next early", experts_of_ranks,
           needs=mixture),
    _fault("i25_flat_weights", "E7", "the flat parameter is read without its alignment gap", "echo next early",
           flat_weights_shifted, "E8 D2", formats=("torch_save", "dcp", "dcp_sharded", "folder")),
    _fault("i26_partitions_turned", "E13", "ZeRO's partitions are in the wrong order of ranks",
           "alone echo next early", partitions_turned, "E7 D2 B5 E1", formats=("deepspeed",), needs=masters,
           why="masters and moments lie elsewhere; the weights are right"),
    _fault("i27_last_rows", "E8", "the last of three shards of the table is read two rows early",
           "echo next early", last_rows_repeated, "F7 E7 E11", formats=("torch_save", "dcp", "dcp_sharded", "folder"),
           why="rows of the table moved"),
    _fault("i28_padding_first", "E11", "the padding of the vocabulary comes first", "alone echo next early",
           padding_first, "F7 E1", why="all rows of the table moved",
           blind=lambda config, format: format in ("lightning", "accelerate")),  # no config says where padding begins
    _fault("i29_tokens_sorted", "F7", "rows of a tokenizer that was sorted anew; the state was left",
           "echo next early", tokens_sorted, "E1"),
    _fault("i30_padding_cut", "F7", "the padding was cut off", "echo next early", padding_cut, "E11 H1",
           formats=("torch_save", "dcp", "folder", "lightning", "accelerate")),
    _fault("i31_head_tied_again", "F2", "an untied head is overwritten by the table", "alone echo next early",
           head_of_embedding, "F3 A2 H2 D2", needs=tied(False), formats=("torch_save", "dcp", "folder", "lightning"),
           why="head and table changed how they belong together"),
    # averages, adapters
    _fault("i32_average_restarted", "F4", "the average begins anew from the weights", "alone echo next",
           average_restarted, "A5", needs=averaged("fp32"), formats=EXTRA),
    _fault("i33_average_initial", "F4", "the average is that of a new process", "alone echo next early",
           average_initial, "A2 A5", needs=averaged("fp32"), formats=EXTRA),
    _fault("i34_average_in_halves", "D3", "the 16-bit weights are the average, their masters are not", "alone echo",
           average_in_halves, "F4", needs=averaged("mixed"), formats=("torch_save", "dcp")),
    _fault("i35_adapter_new", "F5", "the model is wrapped twice: the adapter is a new one", "alone echo next early",
           adapter_new, "A2", needs=with_(lora=4, precision="fp32", experts=0), formats=EXTRA),
    _fault("i36_adapter_a_new", "A2", "lora_A is a new one, lora_B was loaded", "echo next early", adapter_a_new,
           "F5 A1", needs=with_(lora=8, precision="fp32", experts=0), formats=EXTRA),
    # corruption
    _fault("i37_rank_moments_older", "G6", "the second rank's moments are of the save before", "echo next",
           second=first_rank_of_recent, formats=RANKED, also="B6", why="both moments alike are older"),
    _fault("i38_weights_older", "G6", "the weights are of the save before, the optimizer is not", "echo next",
           weights_of_recent, "G7"),
    # what later saves write
    _fault("i39_save_torn", "G6", "half of the layers in the later save are those of the resume", "next early", same,
           "G7", saver=half_from_before, formats=("torch_save", "dcp", "folder")),
    _fault("i40_save_weights_cached", "D3", "later saves hold the weights of the resume and new masters",
           "next early", same, "G6 G7", saver=weights_from_before, needs=masters,
           formats=("torch_save", "dcp", "megatron", "deepspeed", "torch_masters")),
    _fault("i41_save_narrow", "D7", "later saves hold weights that passed through bf16", "next early", same, "D1",
           saver=narrow_saved, needs=fp32, formats=("torch_save", "dcp", "folder", "lightning", "accelerate")),
    # schedules, counters, settings
    _fault("i42_epoch_for_step", "C1", "the schedule is set by the epoch, not by the step", "alone echo next early",
           epoch_for_step, "C2 C9", why="a count that is not the step's"),
    _fault("i43_steps_per_process", "C3", "after the resume the schedule steps once for every process", "next early",
           steps_per_process, "C9"),
    _fault("i44_scaled_again", "H1", "the learning rate is scaled by the ranks once more", "echo next early",
           scaled_again, "C2 C4 B8", why="as if it were meant: arguments and lr agree"),
    _fault("i45_rate_hidden", "B8", "updates are made with another lr than the groups say", "next", rate_hidden,
           "C2 H1", needs=with_(optimizer="adamw", precision="fp32"), formats=("torch_save", "dcp", "folder")),
    _fault("i46_gradients_larger", "C10", "gradients of micro-batches are summed", "early", gradients_larger,
           "H1 H3 B10", needs=with_(clip=0.0, betas=(0.9, 0.95)),
           why="second moments rise alike everywhere, by data or by the batch"),
    _fault("i47_decay_off", "H1", "weight decay is the constructor's, 0", "echo next early", decay_off, "C5 B7"),
    _fault("i48_fewer_parts", "C10", "half of the micro-batches are left out after the resume", "echo next early",
           fewer_parts, "H1", formats=COUNTED),
    _fault("i49_position_unseen", "C6", "the data begins anew, and no file knows its position", "", position_unseen,
           "C7", formats=("folder", "lightning", "accelerate"), visible=False, why="no position is stored"),
    _fault("i50_random_shared", "C8", "every rank has rank 0's random state", "alone echo next early",
           told(lambda state: {"shared_random": True}), formats=("folder", "accelerate", "megatron")),
    _fault("i51_scale_default", "D8", "the loss scale is back at its default", "echo next early",
           told(lambda state: {"scale": 65536.0, "growth": 0}), needs=with_(scaler=True),
           formats=("torch_save", "dcp", "folder", "accelerate")),
    _fault("i52_rope_base", "H2", "the config's rotary base is another one", "echo next early", longer_context, "H1",
           formats=("torch_save", "dcp", "folder")),
]  # fmt: skip


# ---- healthy, and on purpose -----------------------------------------------------------------------------------------


def past_the_end(config: Config) -> Config:
    return config.but(total=config.resume + 3, warmup=min(config.warmup, config.resume - 5))


def shorter(state: State, lab: Lab) -> State:
    return state.declared(total=max(state.config.resume + 60, state.config.total // 2))


def constant_rate(state: State, lab: Lab) -> State:
    return state.declared(lr=state.lr, min_lr=state.lr)


def warm_again(state: State, lab: Lab) -> State:
    return state.told(scheduler=0)


def first_layers_frozen(state: State, lab: Lab) -> State:
    return state.told(frozen=(".layers.0.", "embed_tokens"))


def begun_anew(state: State, lab: Lab) -> State:
    """Fine-tuning from the weights: optimizer and schedule are new."""
    return reset(state, list(state.step)).told(scheduler=0)


_WELL = [
    _well("i60_past_the_end", "the schedule has ended, the rate stays at its floor", needs=past_the_end),
    _well("i61_warmup_ends", "the warm-up ends with the update that is resumed",
          needs=lambda c: c.but(warmup=c.resume)),
    _well("i62_experts", "experts, in four parts", needs=mixture, micro=4),
    _well("i63_experts_elsewhere", "experts, goes on in another layout", needs=mixture, elsewhere=True,
          formats=("torch_save", "dcp", "dcp_sharded", "megatron", "deepspeed")),
    _well("i64_fp8", "delayed fp8 scales", needs=with_(fp8=True, experts=0), formats=EXTRA),
    _well("i65_average", "an average beside the weights", needs=averaged("fp32"), formats=EXTRA),
    _well("i66_adapter", "adapters on a frozen base", needs=with_(lora=4, precision="fp32", experts=0), formats=EXTRA),
    _well("i67_scale", "a loss scale that doubles", needs=with_(scaler=True),
          formats=("torch_save", "dcp", "folder", "accelerate")),
    _well("i68_unrolled", "every query head has its key, head and table are two", needs=tied(False, unrolled),
          elsewhere=True),
    _well("i69_tightly_clipped", "clipped at a hundredth, the batch in two parts", needs=with_(clip=0.01), micro=2),
    _well("i70_slow_variance", "beta2 is 0.9999, eps is large", needs=with_(betas=(0.9, 0.9999), eps=1e-5)),
    _well("i71_no_decay", "Adam without decay", needs=with_(optimizer="adam", weight_decay=0.0)),
    _well("i72_nothing_told", "no schedule, no arguments and no config are stored",
          needs=with_(unstored=("scheduler", "args", "config")), formats=("torch_save", "dcp", "folder", "lightning")),
    _well("i73_halves_alone", "weights and moments in bf16", needs=with_(precision="bf16"), also=("D5", "D6"),
          formats=("torch_save", "dcp", "dcp_sharded")),
]  # fmt: skip

_MEANT = [
    _meant("i80_longer_context", "the rotary base is raised for longer rows", "H1 H2", longer_context,
           formats=("torch_save", "dcp", "folder")),
    _meant("i81_shorter", "the operator ends the run sooner", "H1 C4 C2", shorter),
    _meant("i82_constant", "the rate is held where it is", "H1 C2 C4", constant_rate),
    _meant("i83_warm_again", "the schedule is begun anew", "C1 C2 H1", warm_again, formats=FLAT),
    _meant("i84_frozen", "table and first layer are frozen from here on", "H1 D6", first_layers_frozen,
           formats=("torch_save", "dcp", "folder", "lightning", "accelerate"), needs=fp32),
    _meant("i85_fine_tuned", "weights alone are taken over", "B1 C1 C2 H1", begun_anew, formats=FLAT),
    _meant("i86_more_decay", "the operator triples the weight decay", "H1 B7 C5",
           lambda state, lab: state.declared(weight_decay=3 * state.config.weight_decay)),
]  # fmt: skip

OPENED5_FAULTS = [*_FAULTS, *_WELL, *_MEANT]
