"""Faults beyond the first 42: experts, flat partitions, fp8, adapters, averages, asynchronous saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, seen
from tests.lab.loader_faults import drop_moments, every
from tests.lab.model import ADAPTED, LORA_SCALE, is_norm
from tests.lab.state import Named, State

__all__ = ["WIDER_FAULTS"]


def lost_amax(state: State, lab: Lab) -> State:
    for name, buffer in state.buffers.items():
        state.buffers[name] = torch.zeros_like(buffer) if name.endswith("amax_history") else torch.ones_like(buffer)
    return state


def permuted_experts(state: State, lab: Lab) -> State:
    """Experts of one layer move on by one, and the router stays."""
    head, count = "model.layers.0.mlp.experts.", state.config.experts
    for found in every(state):
        for side in ("gate", "up", "down"):
            names = [f"{head}{e}.{side}_proj.weight" for e in range(count)]
            found |= dict(zip(names, [found[name] for name in (names[-1], *names[:-1])], strict=True))
    return state


def lost_expert_bias(state: State, lab: Lab) -> State:
    state.buffers = {name: torch.zeros_like(buffer) for name, buffer in state.buffers.items()}
    return state


def shifted_line(state: State, lab: Lab) -> State:
    """ZeRO's flat state read as if there were alignment padding after one parameter."""
    names = state.groups()[0][1]
    by = lab.rng.randrange(1, 64)
    start = sum(state.updated[name].numel() for name in names[: lab.rng.randrange(1, len(names) // 2)])

    def shift(line: torch.Tensor) -> torch.Tensor:
        return torch.cat([line[:start], torch.zeros(by), line[start:-by]])

    for found in _partitioned(state):
        _cut_anew(found, names, names, shift)
    return state


def round_robin(state: State, lab: Lab) -> State:
    """ZeRO's flat state written with parameters dealt to ranks in turn, and read in the model's order."""
    names = state.groups()[0][1]
    for found in _partitioned(state):
        _cut_anew(found, [*names[::2], *names[1::2]], names, lambda line: line)
    return state


def padding_by_rank(state: State, lab: Lab) -> State:
    """Each of two ranks' halves of the vocabulary padded for itself."""
    vocab, spare = state.config.vocab, state.config.padded - state.config.vocab
    half, pad = vocab // 2, spare // 2
    rows = [*range(half), *range(vocab, vocab + pad), *range(half, vocab), *range(vocab + pad, vocab + spare)]
    for found in every(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in found:
                found[name] = found[name][rows]
    return state


def merged_adapter(state: State, lab: Lab) -> State:
    """Adapters merged into the base, and active still."""
    for name in [name for name in state.params if name.endswith(tuple(f"{side}.weight" for side in ADAPTED))]:
        stem = name.removesuffix("weight")
        a, b = state.params[f"{stem}lora_A.weight"].float(), state.params[f"{stem}lora_B.weight"].float()
        state.params[name] = (state.params[name].float() + LORA_SCALE * b @ a).to(state.params[name].dtype)
    return state


def average_as_weights(state: State, lab: Lab) -> State:
    for name, average in state.ema.items():
        state.updated[name] = average.to(state.updated[name].dtype)
    state.round_weights()
    return state


def reset_loader(state: State, lab: Lab) -> State:
    return state.told(data_index=0, loader=0)


def mixed_snapshot(state: State, lab: Lab) -> State:
    """An asynchronous save that copied every other parameter an update too early."""
    before = lab.run.previous
    for found, older in zip(every(state), every(before), strict=True):
        for name in list(found)[::2]:
            found[name] = older[name]
    return state


def absent_optimizer(state: State, lab: Lab) -> State:
    state.exp_avg, state.exp_avg_sq, state.step = {}, {}, {}
    return state


def dummy_step(state: State, lab: Lab) -> State:
    """A step with zero gradients that made the state, and counted."""
    state = drop_moments(state, lab)
    state.step = dict.fromkeys(state.step, 1.0)
    return state


def stale_checkpoint(state: State, lab: Lab) -> State:
    """An older save's tensors under a new step's name."""
    older = lab.run.stale
    older.trainer = state.trainer
    return older


def nothing_matched(state: State, lab: Lab) -> State:
    """Weights left as a fresh process made them: no key was found, and that was allowed."""
    new = lab.run.fresh()
    state.params, state.masters = new.params, new.masters
    return state


def permuted_heads(state: State, lab: Lab) -> State:
    """Query heads in reverse order, keys and values as they were."""
    config = state.config
    for found in every(state):
        for name in [name for name in found if name.endswith("q_proj.weight")]:
            heads = found[name].view(config.heads, config.head_dim, config.hidden)
            found[name] = heads.flip(0).reshape(found[name].shape)
    return state


def halved_norms(state: State, lab: Lab) -> State:
    """What two ranks hold alike, averaged as if one of them had none."""
    for name in [name for name in state.params if is_norm(name)]:
        state.updated[name] = state.updated[name] / 2
        state.params[name] = state.updated[name].to(state.params[name].dtype)
    return state


def late_counter(state: State, lab: Lab) -> State:
    return state.told(step=state.trainer.step + 3)


def orphan_groups(state: State, lab: Lab) -> State:
    return state.told(held_lr=state.lr)


def other_variance(state: State, lab: Lab) -> State:
    state.exp_avg_sq = lab.run.stale.exp_avg_sq
    return state


def truncate(path: Path, state: State, lab: Lab) -> None:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(sorted(files), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size * 7 // 8)


def _partitioned(state: State) -> list[Named]:
    return [state.updated, state.exp_avg, state.exp_avg_sq]


def _cut_anew(
    found: Named, written: list[str], read: list[str], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Lay tensors end to end in one order, change the line, and cut it in another order."""
    line = change(torch.cat([found[name].reshape(-1) for name in written]))
    sizes = [found[name].numel() for name in read]
    shapes = [found[name].shape for name in read]
    for name, shape, part in zip(read, shapes, line.split(sizes), strict=True):
        found[name] = part.reshape(shape).clone()


def _without_copies(config: Config, format: str) -> bool:
    return config.precision != "mixed" and format != "deepspeed"


_SINGLE = ("torch_save", "dcp")

WIDER_FAULTS = [
    Fault("w01_fp8_amax", "D9", "fp8 amax histories lost: zeros, scales 1",
          seen("alone echo manifest"), lost_amax, needs=lambda c: c.but(fp8=True), formats=_SINGLE),
    Fault("w02_expert_permutation", "E10", "experts of a layer moved by one, router as it was",
          seen("echo next early"), permuted_experts, needs=lambda c: c.but(experts=c.experts or 4)),
    Fault("w03_zero_shift", "E7", "flat optimizer state shifted from one parameter on",
          seen("alone echo next early"), shifted_line, also=("E13", "D2", "B5"),
          why="a flat line read wrongly: state and masters land elsewhere", blind=_without_copies),
    Fault("w04_round_robin", "E13", "flat optimizer state cut in another order of parameters",
          seen("alone echo next early"), round_robin, also=("E7", "D2", "B5"),
          why="as w03, by whole parameters", blind=_without_copies),
    Fault("w05_padded_vocab", "E11", "vocabulary padded rank by rank: trained rows among the padding",
          seen("alone echo next early"), padding_by_rank, also=("F7",), needs=lambda c: c.but(padded=c.padded + 16),
          why="rows of the vocabulary moved"),
    Fault("w06_expert_bias", "A5", "expert_bias missing: zeros", seen("alone echo"), lost_expert_bias,
          needs=lambda c: c.but(experts=c.experts or 4)),
    Fault("w07_lora_twice", "F5", "adapters merged into the base and still active",
          seen("echo next early"), merged_adapter, needs=lambda c: c.but(lora=4), formats=_SINGLE),
    Fault("w08_ema_as_weights", "F4", "the averaged weights loaded as the raw ones",
          seen("alone echo next early"), average_as_weights, needs=lambda c: c.but(ema=True), formats=_SINGLE),
    Fault("w09_loader_reset", "C6", "the data loader's state is new, consumed samples are kept",
          seen("alone echo"), reset_loader,
          formats=("torch_save", "dcp", "dcp_sharded", "deepspeed")),
    Fault("w10_async_mixed", "G6", "every other parameter of one step earlier",
          seen("echo next"), mixed_snapshot, also=("D2",),
          why="masters of an update before"),
    Fault("w11_opt_absent", "B1", "no optimizer state at all in the save after the load",
          seen("alone echo next early late"), absent_optimizer),
    Fault("w12_dummy_step", "B1", "optimizer state made by a dummy step: moments 0, step 1",
          seen("alone echo next early late"), dummy_step),
    Fault("w13_stale_checkpoint", "G7", "an older save's tensors under the new step",
          seen("alone echo next early"), stale_checkpoint, also=("G6", "C9"),
          why="older tensors under a newer step"),
    Fault("w14_nothing_matched", "A1", "no weight loaded: all at random initial values",
          seen("echo next early"), nothing_matched, also=("A2", "D2"),
          why="every tensor was missing; after an update, masters at random values look the same"),
    Fault("w15_head_permutation", "E6", "query heads permuted without their key groups",
          seen("echo next early"), permuted_heads, needs=lambda c: c.but(heads=4, groups=2, hidden=48)),
    Fault("w16_norms_halved", "E12", "replicated norms halved", seen("echo next early"), halved_norms),
    Fault("w17_truncated", "G4", "the largest file ends early", seen("alone echo manifest"), damage=truncate),
    Fault("w18_late_step", "C9", "the trainer's step counts three more than the optimizer's",
          seen("echo next early"), late_counter),  # alone it looks like updates that a guard left out
    Fault("w19_orphan_groups", "B8", "the schedule steps param groups that the optimizer does not use",
          seen("early late"), orphan_groups),
    Fault("w20_mixed_moments", "B6", "exp_avg_sq of an older step beside right exp_avg",
          seen("echo next early"), other_variance),
]  # fmt: skip
