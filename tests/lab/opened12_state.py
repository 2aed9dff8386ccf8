"""The twelfth half, sealed until 2026-11-27, states: what a load brings back wrong in the lab's layouts of several ranks and files.

``why`` begins with the words that a right diagnosis must say.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.model import is_norm
from tests.lab.state import State

__all__ = ["OPENED12_STATE"]

ALL = "echo next early"
TENSORS = ("params", "masters", "exp_avg", "exp_avg_sq", "ema")
OPTIMIZER = ("masters", "exp_avg", "exp_avg_sq")


def exchanged(state: State, a: str, b: str, where: tuple[str, ...]) -> State:
    """What is under names with ``a`` goes to those with ``b``, and the reverse."""
    for field in where:
        tensors = getattr(state, field)
        for name in [name for name in tensors if a in name]:
            two = name.replace(a, b)
            if two in tensors and tensors[two].shape == tensors[name].shape:
                tensors[name], tensors[two] = tensors[two], tensors[name]
    return state


def mapped(
    state: State, part: str, change: Callable[[torch.Tensor], torch.Tensor], where: tuple[str, ...] = TENSORS
) -> State:
    for field in where:
        tensors = getattr(state, field)
        for name in tensors:
            if part in name:
                tensors[name] = change(tensors[name]).contiguous()
    return state


def experts(config: Config) -> Config:
    return config.but(experts=4)


def fp8(config: Config) -> Config:
    return config.but(fp8=True)


def averaged(config: Config) -> Config:
    return config.but(ema=True)


def narrow(config: Config) -> Config:
    return config.but(precision="fp32")


def untied(config: Config) -> Config:
    return config.but(tied=False)


# ---- loads -----------------------------------------------------------------------------------------------------------


def stage_offset(state: State, lab: Lab) -> State:
    return exchanged(state, ".layers.0.", ".layers.1.", ("exp_avg", "exp_avg_sq"))


def stages_exchanged(state: State, lab: Lab) -> State:
    return exchanged(state, ".layers.0.", ".layers.1.", TENSORS)


def scales_lost(state: State, lab: Lab) -> State:
    for name, buffer in state.buffers.items():
        state.buffers[name] = torch.ones_like(buffer) if name.endswith("_scale") else torch.zeros_like(buffer)
    return state


def experts_rotated(state: State, lab: Lab) -> State:
    for field in TENSORS:
        tensors = getattr(state, field)
        old = dict(tensors)
        for name in old:
            if ".experts." in name:
                head, _, tail = name.partition(".experts.")
                number, _, rest = tail.partition(".")
                tensors[name] = old[f"{head}.experts.{(int(number) + 1) % 4}.{rest}"]
    return state


def interleaved(state: State, lab: Lab) -> State:
    width = lab.run.config.head_dim

    def change(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2, width // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    for part in ("q_proj.weight", "k_proj.weight"):
        mapped(state, part, change)
    return state


def norms_summed(state: State, lab: Lab) -> State:
    return mapped(state, "norm.weight", lambda x: x * 2, ("params", "masters"))


def rebuilt(state: State, lab: Lab) -> State:
    for name in state.masters:
        state.masters[name] = state.params[name].float()
    return state


def masters_of_then(state: State, lab: Lab) -> State:
    return replace(state, masters=lab.run.recent.masters)


def weight_of_start(state: State, lab: Lab) -> State:
    name = "model.layers.1.self_attn.o_proj.weight"
    state.params[name] = lab.run.fresh().params[name]
    return state


def through_fp16(state: State, lab: Lab) -> State:
    return mapped(state, "", lambda x: (x * 1e-2).half().float() * 1e2, ("exp_avg_sq",))


def moment_of_then(state: State, lab: Lab) -> State:
    return replace(state, exp_avg=lab.run.recent.exp_avg)


def shifted_vocabulary(state: State, lab: Lab) -> State:
    for part in ("embed_tokens", "lm_head"):
        mapped(state, part, lambda x: x.roll(1, 0))
    return state


def ranks_reversed(state: State, lab: Lab) -> State:
    return mapped(state, "self_attn.o_proj", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1))


def gate_up(state: State, lab: Lab) -> State:
    return exchanged(state, "gate_proj", "up_proj", TENSORS)


def keys_exchanged(state: State, lab: Lab) -> State:
    return mapped(state, "k_proj.weight", lambda x: torch.cat(x.chunk(lab.run.config.groups)[::-1]))


def flat_shift(state: State, lab: Lab) -> State:
    for field in OPTIMIZER:
        tensors = getattr(state, field)
        flat = torch.cat([x.flatten() for x in tensors.values()]).roll(16) if tensors else None
        at = 0
        for name, x in tensors.items():
            assert flat is not None
            tensors[name] = flat[at : at + x.numel()].view(x.shape).clone()
            at += x.numel()
    return state


def last_rows(state: State, lab: Lab) -> State:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[lab.run.config.vocab - 9 : lab.run.config.vocab] = 0
        return x

    return mapped(state, "embed_tokens", change)


def cached_moments(resumed: State, after: State) -> State:
    return replace(after, exp_avg=resumed.clone().exp_avg, exp_avg_sq=resumed.clone().exp_avg_sq)


def average_as_weights(state: State, lab: Lab) -> State:
    for name, x in state.ema.items():
        state.params[name] = x.to(state.params[name].dtype)
        if name in state.masters:
            state.masters[name] = x.clone()
    return state


def average_of_start(state: State, lab: Lab) -> State:
    return replace(state, ema=lab.run.fresh().ema)


def through_bf16(state: State, lab: Lab) -> State:
    return mapped(state, "", lambda x: x.bfloat16().float(), ("params",))


def counters_fresh_moments(state: State, lab: Lab) -> State:
    return mapped(state, "", torch.zeros_like, ("exp_avg", "exp_avg_sq"))


def no_squares(state: State, lab: Lab) -> State:
    return mapped(state, ".layers.1.", torch.zeros_like, ("exp_avg_sq",))


def weights_of_then(state: State, lab: Lab) -> State:
    old = lab.run.recent
    return replace(state, params=old.params, masters=old.masters)


def stale_page(state: State, lab: Lab) -> State:
    """4 KiB of a moment are those of the checkpoint before."""
    old, name = lab.run.recent.exp_avg_sq, "model.layers.0.mlp.gate_proj.weight"
    name = name if name in old else next(one for one in old if "gate_proj" in one)
    state.exp_avg_sq[name].view(-1)[1024:2048] = old[name].view(-1)[1024:2048]
    return state


def one_low_bit(state: State, lab: Lab) -> State:
    name = "model.layers.1.self_attn.q_proj.weight"
    state.exp_avg[name].view(-1).view(torch.int32)[101] ^= 1 << 19
    return state


def stepped_schedule(state: State, lab: Lab) -> State:
    return state.told(scheduler=0)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def rank_of_then(state: State, lab: Lab) -> State:
    return lab.run.recent


def rank_without_moments(state: State, lab: Lab) -> State:
    return mapped(state.clone(), "", torch.zeros_like, ("exp_avg", "exp_avg_sq"))


def rank_norms(state: State, lab: Lab) -> State:
    state = state.clone()
    for name in state.params:
        if is_norm(name):
            made = torch.Generator().manual_seed(len(name))
            for field in ("params", "masters"):
                tensors = getattr(state, field)
                if name in tensors:
                    moved = tensors[name].float() + 0.05 * torch.randn(tensors[name].shape, generator=made)
                    tensors[name] = moved.to(tensors[name].dtype)
    return state


def state(id: str, cause: str, text: str, where: str, restore: object = None, why: str = "", **more: object) -> Fault:
    return Fault(id, cause, text, seen(where), restore=restore, why=why, **more)  # type: ignore[arg-type]


TWO = ("dcp_sharded", "megatron", "deepspeed")

OPENED12_STATE: tuple[Fault, ...] = (
    state("xs01_stage_offset_moments", "E13", "moments of layers 0 and 1 exchanged", "echo next", stage_offset,
          "moments belong to other parameters/layers", also=("B5", "E9")),
    state("xs02_stages_exchanged", "E9", "layers 0 and 1 exchanged", ALL, stages_exchanged, "layers swapped"),
    state("xs03_fp8_scales", "D9", "fp8 scales and histories lost", "echo next", scales_lost,
          "fp8 scale/amax lost", needs=fp8),
    state("xs04_experts_rotated", "E10", "experts rotated, the router is not", ALL, experts_rotated,
          "experts permuted", needs=experts),
    state("xs05_rope_interleaved", "E5", "q and k interleaved", ALL, interleaved, "rows of q and k in rope order"),
    state("xs06_norms_summed", "E12", "two ranks' norms summed", ALL, norms_summed, "norms doubled/summed"),
    state("xs07_masters_rebuilt", "D1", "masters from the bf16 weights", "echo", rebuilt, "masters rebuilt from weights",
          needs=masters),
    state("xs08_masters_stale", "D2", "masters of 20 steps before", "echo next", masters_of_then,
          "masters do not match the weights", also=("G6",), needs=masters),
    state("xs09_weight_stale_master_right", "D3", "one bf16 weight is new, its master right", "echo", weight_of_start,
          "weight of o_proj does not match its master", also=("A2",), needs=masters),
    state("xs10_squares_through_fp16", "D4", "exp_avg_sq through fp16: small ones are 0", "echo next", through_fp16,
          "exp_avg_sq rounded to fp16/underflow", also=("B4",)),
    state("xs11_first_moments_stale", "B6", "exp_avg of the checkpoint before", "echo next", moment_of_then,
          "exp_avg from another step", also=("G6",)),
    state("xs12_vocabulary_shifted", "F7", "rows of the vocabulary shifted by one", ALL, shifted_vocabulary,
          "rows shifted", also=("E1",)),
    state("xs13_halves_of_o_proj", "E1", "row-parallel shards joined in reverse", ALL, ranks_reversed,
          "column blocks of o_proj in another order", also=("E6",)),
    state("xs14_gate_and_up", "E3", "gate and up exchanged", ALL, gate_up, "gate and up swapped"),
    state("xs15_key_groups", "E6", "key heads in reverse, values are not", ALL, keys_exchanged,
          "heads of k in another order", also=("E1", "E4"), needs=lambda c: c.but(groups=2)),
    state("xs16_flat_shift", "E7", "flat state shifted by 16 elements", "echo next", flat_shift,
          "state is shifted relative to the parameters", also=("E13", "D2")),
    state("xs17_last_rows_zero", "E8", "the last rows of the embedding are 0", ALL, last_rows,
          "rows of embed_tokens are 0/not read", also=("G5", "F7")),
    state("xs18_moments_saved_again", "G7", "the saver repeats the moments", "next early", None,
          "moments repeat the older save", also=("G6",), saver=cached_moments),
    state("xs19_average_as_weights", "F4", "averaged weights loaded", "echo next", average_as_weights,
          "weights are the average", needs=averaged),
    state("xs20_average_of_start", "A2", "the average is new", "echo next", average_of_start,
          "average/ema not loaded", needs=averaged),
    state("xs21_weights_through_bf16", "D7", "fp32 weights through bf16", "echo", through_bf16,
          "weights rounded to bf16", needs=narrow),
    state("xs22_moments_zero", "B3", "moments are 0, counters kept", "echo next", counters_fresh_moments,
          "moments lost, counters kept"),
    state("xs23_layer_without_squares", "B4", "exp_avg_sq of a layer is 0", "echo next", no_squares,
          "exp_avg_sq lost"),
    state("xs24_weights_of_then", "G6", "weights are of the checkpoint before, the optimizer is right", "echo next",
          weights_of_then, "weights are older than the optimizer's state"),
    state("xs25_stale_page", "G6", "a page of a moment is the older one", "echo", stale_page,
          "a few numbers of exp_avg_sq differ/stale", also=("G2", "G10", "B6", "G5")),
    state("xs26_low_bit", "G2", "a bit of a first moment", "echo", one_low_bit, "a bit flipped", also=("G1", "G10")),
    state("xs27_schedule_zero", "C1", "the schedule counts from 0", ALL, stepped_schedule, "schedule restarted",
          formats=("torch_save", "dcp", "megatron", "deepspeed", "lightning", "folder")),
    Fault("xs28_rank_of_then", "G6", "rank 1's file is of the checkpoint before", seen("echo next"),
          second=rank_of_then, formats=TWO, why="one rank's part is older"),
    Fault("xs29_rank_without_moments", "B3", "rank 1 lost its moments", seen("echo next"), second=rank_without_moments,
          formats=TWO, also=("B1", "G5", "G6"), why="moments of one rank/half lost, 0"),
    Fault("xs30_replicas_of_norms", "F1", "norms of the two ranks differ", seen("alone echo"), second=rank_norms,
          formats=("megatron",), also=("G6",), why="replicas differ"),
    Fault("xs31_elsewhere", "healthy", "goes on in another layout", frozenset(), restore=lambda state, lab: state,
          elsewhere=True, kind="healthy"),
    Fault("xs32_elsewhere_masters", "healthy", "goes on in another layout, mixed precision", frozenset(),
          restore=lambda state, lab: state, elsewhere=True, kind="healthy", needs=masters,
          formats=("megatron", "deepspeed", "dcp_sharded")),
)  # fmt: skip
