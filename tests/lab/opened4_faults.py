"""Resumes of the lab's own trainer of the fourth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.lab.config import Config
from tests.lab.corruption import flip
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.formats import FORMATS, PLAIN
from tests.lab.loader_faults import every
from tests.lab.model import LORA_SCALE, initial, is_norm
from tests.lab.state import Named, State
from tests.lab.train import train

__all__ = ["OPENED4_FAULTS"]

Tensor = torch.Tensor
Restore = Callable[[State, Lab], State]
Saver = Callable[[State, State], State]

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = ("params", "masters")
ALL = WEIGHTS + MOMENTS
COUNTED = tuple(name for name in (*FORMATS, *PLAIN) if name != "deepspeed")  #: one counter a parameter
EXTRA = ("torch_save", "dcp", *PLAIN)  #: averages, adapters, fp8
LOADER = ("torch_save", "dcp", "dcp_sharded", "deepspeed")  #: the data loader's own state

LOUD = seen("alone echo next early")
AFTER = seen("echo next early")
FIRST = seen("alone echo next")
LATER = seen("next early")
NONE = seen("")


# ---- pieces ----------------------------------------------------------------------------------------------------------


def each(change: Callable[[Tensor], Tensor], names: Callable[[str], bool], where: Sequence[str] = ALL) -> Restore:
    """Change every tensor with such a name."""

    def restore(state: State, lab: Lab) -> State:
        for held in (getattr(state, field) for field in where):
            for name in [name for name in held if names(name)]:
                held[name] = change(held[name]).to(held[name].dtype).reshape(held[name].shape).contiguous().clone()
        return state

    return restore


def ends(*ending: str) -> Callable[[str], bool]:
    return lambda name: name.removesuffix(".weight").endswith(ending)


def any_(name: str) -> bool:
    return True


def with_(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: config.but(**changes)


def told(change: Callable[[State, Lab], dict[str, Any]]) -> Restore:
    """Other counters."""
    return lambda state, lab: state.told(**change(state, lab))


def stepped(change: Callable[[float], float], names: Callable[[str], bool] = any_) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        state.step = {name: change(step) if names(name) else step for name, step in state.step.items()}
        return state

    return restore


def then(*restores: Restore) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        for one in restores:
            state = one(state, lab)
        return state

    return restore


def taken(source: Callable[[State, str], str], names: Callable[[str], bool], where: Sequence[str] = ALL) -> Restore:
    """Put under each such name what another name held."""

    def restore(state: State, lab: Lab) -> State:
        for held in (getattr(state, field) for field in where):
            held |= {name: held[source(state, name)].clone() for name in held if names(name)}
        return state

    return restore


def layer_of(name: str) -> int:
    return int(name.split(".")[2]) if ".layers." in name else -1


def in_layer(name: str, number: int) -> str:
    return name.replace(f".layers.{layer_of(name)}.", f".layers.{number}.")


def of_layers(name: str) -> bool:
    return ".layers." in name


def weights_set(state: State, weights: Named) -> State:
    for name, weight in weights.items():
        state.updated[name] = weight.to(state.updated[name].dtype)
        state.params[name] = weight.to(state.params[name].dtype)
    return state


# ---- optimizer -------------------------------------------------------------------------------------------------------


def layer_state_lost(state: State, lab: Lab) -> State:
    """A partial load: one layer's optimizer state is as it was made."""
    lost = lab.rng.randrange(state.config.layers)
    for name in [name for name in state.exp_avg if layer_of(name) == lost]:
        state.exp_avg[name].zero_()
        state.exp_avg_sq[name].zero_()
        state.step[name] = 0.0
    return state


def weights_as_moments(state: State, lab: Lab) -> State:
    state.exp_avg = {name: state.updated[name].to(held.dtype).clone() for name, held in state.exp_avg.items()}
    return state


def shifted_flat(state: State, lab: Lab) -> State:
    """The flat lines of the moments are read with an offset that is off by some padding."""
    names = list(state.exp_avg)
    begin, pad = lab.rng.randrange(1, len(names) - 2), lab.rng.randrange(1, 8)
    for held in (state.exp_avg, state.exp_avg_sq):
        tail = names[begin:]
        line = torch.cat([held[name].reshape(-1) for name in tail]).roll(pad)
        sizes = [held[name].numel() for name in tail]
        for name, part in zip(tail, line.split(sizes), strict=True):
            held[name] = part.reshape(held[name].shape).clone()
    return state


def older_optimizer(state: State, lab: Lab) -> State:
    older = lab.run.recent
    return replace(state, exp_avg=older.exp_avg, exp_avg_sq=older.exp_avg_sq, step=older.step)


def stale_variance(state: State, lab: Lab) -> State:
    return replace(state, exp_avg_sq=lab.run.stale.exp_avg_sq)


# ---- masters and precision -------------------------------------------------------------------------------------------


def rebuilt(state: State, lab: Lab) -> State:
    return replace(state, masters={name: state.params[name].float() for name in state.masters})


def random_weights(state: State, lab: Lab) -> State:
    return replace(state, params=lab.run.fresh().params)


def through_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def through_tf32(tensor: Tensor) -> Tensor:
    return (tensor.view(torch.int32) & -(1 << 13)).view(torch.float32)


# ---- layout ----------------------------------------------------------------------------------------------------------


def qkv_by_rank(state: State, lab: Lab) -> State:
    """Two ranks' [Q; K; V], one under the other, cut as if they were one."""
    for held in every(state):
        for name in [name for name in held if name.endswith("q_proj.weight")]:
            names = [name.replace("q_proj", f"{side}_proj") for side in "qkv"]
            halves = [held[one].chunk(2) for one in names]
            rows = torch.cat([side[rank] for rank in range(2) for side in halves])
            parts = rows.split([len(held[one]) for one in names])
            held |= {one: part.clone() for one, part in zip(names, parts, strict=True)}
    return state


def keys_interleaved(state: State, lab: Lab) -> State:
    width = state.config.head_dim
    order = torch.arange(width).view(2, -1).T.reshape(-1)
    return each(lambda t: t.view(-1, width, t.shape[-1])[:, order], ends("k_proj"))(state, lab)


def heads_by_group(state: State, lab: Lab) -> State:
    """Query heads counted across the groups instead of within them."""
    c = state.config
    return each(
        lambda t: t.view(c.groups, c.heads // c.groups, c.head_dim, t.shape[-1]).transpose(0, 1), ends("q_proj")
    )(state, lab)


def glu_in_blocks(state: State, lab: Lab) -> State:
    """[gate; up] in turns of sixteen rows, read as halves."""
    for held in every(state):
        for name in [name for name in held if name.endswith("gate_proj.weight")]:
            other = name.replace("gate_proj", "up_proj")
            both = torch.stack([held[name], held[other]])
            rows = both.view(2, -1, 16, both.shape[-1]).transpose(0, 1).reshape(2, *held[name].shape)
            held[name], held[other] = rows[0].clone(), rows[1].clone()
    return state


def padding_by_rank(state: State, lab: Lab) -> State:
    """Each of two ranks padded its half of the vocabulary; the rows are read as if only the last had."""
    c = state.config
    half = -(-c.vocab // 2)
    space = c.padded // 2 - half

    def spread(table: Tensor) -> Tensor:
        pads = table[c.vocab :]
        return torch.cat([table[:half], pads[:space], table[half : c.vocab], pads[space:]])

    return each(spread, ends("embed_tokens", "lm_head"))(state, lab)


def _room(config: Config) -> Config:
    return config.but(vocab=config.padded - 8)


def _grouped(config: Config) -> Config:
    return config if config.heads > config.groups > 1 else config.but(heads=4, groups=2)


# ---- missing and added -----------------------------------------------------------------------------------------------


def at_init(names: Callable[[str], bool]) -> Restore:
    """Weights that were not loaded; the optimizer's state was."""

    def restore(state: State, lab: Lab) -> State:
        found = initial(state.config, seed=lab.rng.randrange(1 << 20))
        return weights_set(state, {name: found[name] for name in state.updated if names(name)})

    return restore


def head_is_embedding(state: State, lab: Lab) -> State:
    table = "model.embed_tokens.weight"
    return weights_set(state, {"lm_head.weight": state.updated[table].clone()})


def padding_repeats(state: State, lab: Lab) -> State:
    """A resize filled the padding with the last row."""

    def repeat(table: Tensor) -> Tensor:
        last = state.config.vocab
        return torch.cat([table[:last], table[last - 1 : last].expand(len(table) - last, -1)])

    return each(repeat, ends("embed_tokens", "lm_head"), WEIGHTS)(state, lab)


def bias_zero(state: State, lab: Lab) -> State:
    biases = {name: torch.zeros_like(held) for name, held in state.buffers.items() if name.endswith("expert_bias")}
    return replace(state, buffers=state.buffers | biases)


def amax_truncated(state: State, lab: Lab) -> State:
    for name in [name for name in state.buffers if name.endswith("amax_history")]:
        state.buffers[name] = torch.cat([state.buffers[name][:1], torch.zeros(len(state.buffers[name]) - 1)])
        scale = name.replace(".amax_history", ".weight_scale")
        state.buffers[scale] = torch.ones_like(state.buffers[scale])
    return state


def merged_again(state: State, lab: Lab) -> State:
    for name in [name for name in state.params if "lora_A" in name]:
        stem, other = name.removesuffix("lora_A.weight"), name.replace("lora_A", "lora_B")
        product = LORA_SCALE * state.params[other].float() @ state.params[name].float()
        base = state.params[f"{stem}weight"]
        state.params[f"{stem}weight"] = (base.float() + product).to(base.dtype)
    return state


# ---- counters, averages ----------------------------------------------------------------------------------------------


def epoch_begun(state: State, lab: Lab) -> dict[str, Any]:
    """The data goes on at the first batch of the epoch, not where it was."""
    length = lab.rng.choice([rows for rows in range(30, 61) if state.trainer.loader % rows])
    first = state.trainer.loader // length * length
    return {"loader": first, "data_index": first}


def average_restarted(state: State, lab: Lab) -> State:
    return replace(state, ema={name: state.updated[name].float().clone() for name in state.ema})


# ---- bytes -----------------------------------------------------------------------------------------------------------


def truncated(path: Path, state: State, lab: Lab) -> State | None:
    """The largest file ends too early; nothing can be loaded."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    file = max(sorted(files), key=lambda one: one.stat().st_size)
    keep = int(file.stat().st_size * lab.rng.uniform(0.3, 0.95)) // 512 * 512
    with open(file, "r+b") as stream:
        stream.truncate(keep)
    return None


def misdirected(state: State, lab: Lab) -> State:
    """A page of one tensor was written over another's."""
    able = [name for name in state.updated if name.endswith(("gate_proj.weight", "up_proj.weight"))]
    target, source = lab.rng.sample(able, 2)
    held, other = state.updated[target].clone(), state.updated[source]
    count = 4096 // held.element_size()
    at = lab.rng.randrange(held.numel() // count) * count if held.numel() > count else 0
    held.view(-1)[at : at + count] = other.reshape(-1)[at : at + count]
    state.updated[target] = held
    return state


def three_bits(state: State, lab: Lab) -> State:
    names = [name for name in state.exp_avg if ".layers." in name and not is_norm(name)]
    for name in lab.rng.sample(names, 3):
        index = int(state.exp_avg[name].abs().argmax()) if lab.rng.random() < 0.5 else 0
        index = index if state.exp_avg[name].view(-1)[index] != 0 else int(state.exp_avg[name].abs().argmax())
        state.exp_avg[name] = flip(state.exp_avg[name], index, 1)
    return state


# ---- saves -----------------------------------------------------------------------------------------------------------


def optimizer_repeated(resumed: State, after: State) -> State:
    return replace(after, exp_avg=resumed.exp_avg, exp_avg_sq=resumed.exp_avg_sq, step=resumed.step)


def weights_repeated(resumed: State, after: State) -> State:
    return replace(after, params=resumed.params)


def torn(resumed: State, after: State) -> State:
    """An asynchronous save copied the second half of the tensors after the next update."""
    found, later = after.clone(), train(after, 1)[0]
    names = list(after.updated)
    for name in names[len(names) // 2 :]:
        for where in ALL:
            if name in getattr(found, where):
                getattr(found, where)[name] = getattr(later, where)[name]
        found.step[name] = later.step[name]
    return found


def average_stored(resumed: State, after: State) -> State:
    """The average was put into the model for an evaluation, and the save came before it was taken out."""
    return weights_set(after.clone(), {name: after.ema[name] for name in after.updated})


# ---- the table -------------------------------------------------------------------------------------------------------

EXPERTS = with_(experts=4)
ADAPTERS = with_(lora=4)

FAULTS = [
    # optimizer
    Fault("q01_layer_state_lost", "B1", "optimizer state of one layer as it was made", LOUD, layer_state_lost,
          also=("A2",), formats=COUNTED, why="a part of the state was not restored"),
    Fault("q02_dummy_step", "B1", "fresh state, advanced by the step that made it", LOUD,
          then(each(torch.zeros_like, any_, MOMENTS), stepped(lambda step: 1.0)),
          why="nothing of the state was restored; the counter is 1"),
    Fault("q03_first_moment_lost", "B3", "exp_avg zeroed, exp_avg_sq and step kept", FIRST,
          each(torch.zeros_like, any_, ("exp_avg",)), also=("B6",), why="one moment was lost"),
    Fault("q04_norm_counters", "B2", "counters of the norms reset to 0", LOUD, stepped(lambda step: 0.0, is_norm),
          why="the counters of a group"),
    Fault("q05_keys_and_values", "B5", "moments of k and v exchanged", AFTER,
          taken(lambda state, name: name.replace("k_proj", "x").replace("v_proj", "k_proj").replace("x", "v_proj"),
                ends("k_proj", "v_proj"), MOMENTS), also=("E13", "E4"), why="states of other parameters"),
    Fault("q06_state_transposed", "E13", "moments of square matrices transposed, weights not", AFTER,
          each(lambda t: t.T, ends("q_proj", "o_proj"), MOMENTS), also=("B5", "E1"), why="a map for the weights alone"),
    Fault("q07_state_of_layer_before", "E13", "moments of each layer are those of the one before", AFTER,
          taken(lambda s, name: in_layer(name, (layer_of(name) - 1) % s.config.layers), of_layers, MOMENTS),
          also=("B5", "E9"), why="whole states elsewhere"),
    Fault("q08_first_moment_bf16", "D4", "exp_avg through bf16", FIRST, each(through_bf16, any_, ("exp_avg",)),
          why="one of two moments"),
    Fault("q09_variance_of_a_rank", "G6", "rank 1's exp_avg_sq is of an older save", AFTER, second=stale_variance,
          also=("B6",), why="a second moment of another step"),
    Fault("q10_half_the_table", "E8", "moments of the second half of the embedding are zero", AFTER,
          each(lambda t: torch.cat([t[: len(t) // 2], torch.zeros_like(t[len(t) // 2 :])]), ends("embed_tokens"),
               MOMENTS), also=("B1", "B3", "E13", "G5"), why="zeros where state was"),
    Fault("q11_weights_in_moments", "B6", "exp_avg holds the weights", LOUD, weights_as_moments, also=("B5", "E13"),
          why="a first moment that cannot belong to its second"),
    Fault("q12_default_betas", "H1", "betas are the optimizer's defaults", AFTER,
          lambda state, lab: state.declared(betas=(0.9, 0.999)), needs=with_(betas=(0.9, 0.95)),
          why="a setting was not restored"),
    Fault("q13_default_eps", "H1", "eps is another one", AFTER, lambda state, lab: state.declared(eps=1e-5),
          also=("D10",), why="a setting was not restored"),
    Fault("q14_flat_shift", "E7", "flat moments read with an offset", AFTER, shifted_flat, also=("E13", "B5"),
          why="states that are shifted"),
    Fault("q15_older_optimizer", "G6", "the optimizer is of the save before", LOUD, older_optimizer,
          also=("C9",), why="parts of two steps"),
    # masters and precision
    Fault("q16_rank_rebuilt", "D1", "rank 1 made its masters from bf16", FIRST, second=rebuilt, needs=masters,
          why="half of the masters"),
    Fault("q17_norm_masters_one", "D2", "masters of the norms are 1", FIRST,
          each(torch.ones_like, is_norm, ("masters",)), needs=masters, also=("A3", "A2"), why="masters not loaded"),
    Fault("q18_not_refreshed", "D3", "masters loaded, weights left random", seen("alone echo"), random_weights,
          needs=masters, also=("A1", "A2"), why="weights that were not loaded"),
    Fault("q19_embedding_bf16", "D7", "embedding and head through bf16 in an fp32 run", FIRST,
          each(through_bf16, ends("embed_tokens", "lm_head"), ("params",)), needs=with_(precision="fp32"),
          also=("D1",), why="low bits are gone"),
    Fault("q20_tf32", "D7", "weights cut to ten bits", FIRST, each(through_tf32, any_, ("params",)),
          needs=with_(precision="fp32"), why="low bits are gone"),
    # layout
    Fault("q21_qkv_by_rank", "E4", "two ranks' [Q; K; V] read as one", AFTER, qkv_by_rank, also=("E1",),
          why="rows of a fused matrix in another order"),
    Fault("q22_keys_interleaved", "E5", "rows of k alone in the other rotary order", AFTER, keys_interleaved,
          also=("E1",), why="half of a conversion"),
    Fault("q23_virtual_stages", "E9", "layers in the order of virtual stages", AFTER,
          taken(lambda s, name: in_layer(name, (0, 2, 1, 3)[layer_of(name)]), of_layers), needs=with_(layers=4),
          why="layers 1 and 2 exchanged"),
    Fault("q25_padding_by_rank", "E11", "padding in the middle of the vocabulary", AFTER, padding_by_rank,
          needs=_room, also=("E8", "F7", "E1"), why="rows that moved by the padding"),
    Fault("q26_heads_by_group", "E6", "query heads counted across groups", AFTER, heads_by_group, needs=_grouped,
          also=("E4", "E1"), why="heads in another order"),
    Fault("q27_glu_in_blocks", "E2", "gate and up in turns of sixteen rows", AFTER, glu_in_blocks, also=("E1",),
          why="rows of [gate; up] in another order"),
    Fault("q28_router_reversed", "E10", "rows of the router reversed, experts not", AFTER,
          each(lambda t: t.flip(0), ends("mlp.gate")), needs=EXPERTS, also=("E1",), why="rows of the router"),
    Fault("q30_norms_summed", "E12", "norms of two ranks were added", AFTER,
          each(lambda t: t * 2, is_norm, WEIGHTS), why="twice what it was"),
    # missing and added
    Fault("q31_layers_renamed", "A1", "no weight of the layers was found: they are random", LOUD, at_init(of_layers),
          also=("A2", "A3"), why="a prefix of the layers alone"),
    Fault("q33_head_tied", "A2", "an untied head became a copy of the embedding", FIRST, head_is_embedding,
          needs=with_(tied=False), also=("F2", "E9"), why="another tensor's values"),
    Fault("q34_padding_repeats", "E11", "padding rows repeat the last row", AFTER, padding_repeats,
          needs=_room, also=("F7",), why="rows of the padding"),
    Fault("q35_balance_lost", "A5", "expert_bias is zero", seen("echo next"), bias_zero, needs=EXPERTS,
          why="a buffer was not restored"),
    Fault("q36_amax_truncated", "D9", "amax histories of one entry, scales of 1", FIRST, amax_truncated,
          needs=with_(fp8=True), formats=EXTRA, also=("A5",), why="buffers of fp8"),
    Fault("q37_adapter_half", "F5", "lora_B left at zero", FIRST, each(torch.zeros_like, ends("lora_B"), WEIGHTS),
          needs=ADAPTERS, formats=EXTRA, also=("A2",), why="adapters that do nothing"),
    Fault("q38_merged_again", "F5", "adapters merged into the base, and kept", AFTER, merged_again, needs=ADAPTERS,
          formats=EXTRA, also=("F6",), why="the base moved by the adapters' product"),
    # counters
    Fault("q39_position_by_processes", "C3", "the schedule's position times the number of processes", LOUD,
          told(lambda s, lab: {"scheduler": s.trainer.scheduler * lab.rng.choice([2, 4, 8])}), also=("C2", "C9"),
          why="a position that is too far"),
    Fault("q40_one_step_more", "C3", "the schedule is stepped once at the load", LOUD,
          told(lambda s, lab: {"scheduler": s.trainer.scheduler + 1}), why="a position that is one too far"),
    Fault("q41_position_in_epochs", "C1", "the schedule's position in epochs of some steps", LOUD,
          told(lambda s, lab: {"scheduler": s.trainer.scheduler // lab.rng.choice([8, 10, 16])}), also=("C2", "C9"),
          why="a position near its start"),
    Fault("q42_vectors_at_peak", "B8", "the second param group is back at the peak", AFTER,
          told(lambda s, lab: {"vector_lr": s.config.lr}), also=("C2", "H1"), why="a rate no schedule set"),
    Fault("q43_step_zero", "C9", "the trainer counts from 0, all else was restored", LOUD,
          told(lambda s, lab: {"step": 0}), why="one counter"),
    Fault("q44_epoch_begun", "C6", "the data goes on at the beginning of its epoch", LOUD, told(epoch_begun),
          formats=LOADER, also=("C7",), why="batches are seen again"),
    Fault("q46_no_generator", "C8", "the random generator's state is not stored any more", AFTER,
          lambda state, lab: state.declared(unstored=("rng_state",)), formats=("torch_save", "dcp"),
          why="it is missing"),
    Fault("q47_scale_reset", "D8", "the loss scale begins at 256", AFTER,
          told(lambda s, lab: {"scale": 256.0, "growth": 0}), needs=with_(scaler=True),
          formats=("torch_save", "dcp", "folder", "accelerate"), why="the scale"),
    # averages
    Fault("q48_average_restarted", "F4", "the average begins again from the weights", FIRST, average_restarted,
          needs=with_(ema=True), formats=EXTRA, also=("A5",), why="an average that is the weights"),
    Fault("q49_average_away", "F4", "the average moves away from the weights", LATER,
          told(lambda s, lab: {"silent": (("ema", 1.01),)}), needs=with_(ema=True), formats=EXTRA,
          also=("G9",), why="no average goes there"),
    # bytes
    Fault("q50_truncated", "G4", "the largest file ends too early", seen("alone echo manifest"), damage=truncated,
          formats=("torch_save", *PLAIN), why="a file that is too short"),
    Fault("q51_misdirected", "G10", "a page of a tensor holds another tensor's", AFTER, misdirected,
          also=("E1", "E7"), why="bytes of another place"),
    Fault("q52_three_bits", "G1", "top exponent bits of three first moments flipped", LOUD, three_bits,
          also=("G2",), why="numbers that are too large"),
    # saves
    Fault("q53_optimizer_repeated", "G6", "every save repeats the first one's optimizer", LATER,
          saver=optimizer_repeated, also=("C9", "G7"), why="parts of two steps"),
    Fault("q54_weights_repeated", "D3", "the stored weights are those of the load, masters are new", LATER,
          saver=weights_repeated, needs=masters, also=("G6",), why="weights that are not their masters"),
    Fault("q55_torn", "G6", "half of the tensors were copied an update later", LATER, saver=torn, formats=COUNTED,
          also=("C9",), why="parts of two steps; the counters show it too"),
    Fault("q56_average_stored", "F4", "the save holds the average in the weights' place", LATER,
          saver=average_stored, needs=with_(ema=True), formats=EXTRA, why="weights that are the average"),
]  # fmt: skip


# ---- healthy, and on purpose -----------------------------------------------------------------------------------------


def exact(state: State, lab: Lab) -> State:
    return state


def healthy(id: str, text: str, **more: Any) -> Fault:
    return Fault(id, "healthy", text, NONE, exact, kind="healthy", **more)


def deliberate(id: str, text: str, true: tuple[str, ...], restore: Restore, **more: Any) -> Fault:
    return Fault(id, "healthy", text, NONE, restore, kind="deliberate", also=true, **more)


WELL = [
    healthy("g01_experts_elsewhere", "experts, goes on in another layout", needs=EXPERTS, elsewhere=True),
    healthy("g02_thirds", "sums in another order", micro=3),
    healthy("g03_average", "with an average", needs=with_(ema=True), formats=EXTRA),
    healthy("g04_adapters", "adapters are trained, the base is not", needs=ADAPTERS, formats=EXTRA),
    healthy("g05_fp8", "fp8 by amax history", needs=with_(fp8=True), formats=EXTRA),
    healthy("g06_untied_adam", "untied, Adam, no decay", needs=with_(tied=False, optimizer="adam", weight_decay=0.0)),
]
MEANT = [
    deliberate("l01_floor_raised", "the floor of the schedule is raised", ("H1", "C4"),
               lambda state, lab: state.declared(min_lr=state.config.lr / 2)),
    deliberate("l02_other_betas", "betas are changed", ("H1",), lambda state, lab: state.declared(betas=(0.95, 0.99))),
    deliberate("l03_rewarmed", "the schedule is begun anew", ("C1", "H1"), told(lambda s, lab: {"scheduler": 0})),
    deliberate("l04_new_data", "other data from its first batch", ("C6", "C7", "H1"),
               told(lambda s, lab: {"data_seed": 4321, "data_index": 0, "loader": 0})),
    deliberate("l05_half_batch", "half of the batch", ("H1", "C10"),
               lambda state, lab: state.declared(batch=state.config.batch // 2)),
    deliberate("l06_decay_raised", "weight decay is raised tenfold", ("H1", "B7", "C5"),
               lambda state, lab: state.declared(weight_decay=state.config.weight_decay * 10)),
    deliberate("l07_average_dropped", "the average is given up", ("H1", "F4"),
               lambda state, lab: replace(state.declared(ema=False), ema={}), needs=with_(ema=True), formats=EXTRA),
]  # fmt: skip

OPENED4_FAULTS: list[Fault] = FAULTS + WELL + MEANT
