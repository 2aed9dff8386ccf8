# ruff: noqa: E501
"""The fourteenth sealed set, faults of ranks and partitions: flat masters, replicas, stages, and what savers write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.model import is_norm
from tests.lab.state import State

__all__ = ["STATE14", "STATE_WORDS14"]

Named = dict[str, torch.Tensor]
STATE_WORDS14: dict[str, tuple[str, ...]] = {}
MIXED = ("torch_save", "dcp", "dcp_sharded", "megatron", "deepspeed")


def bad(id: str, cause: str, text: str, where: str, words: tuple[str, ...], **more: Any) -> Fault:
    STATE_WORDS14[id] = words
    return Fault(id, cause, text, seen(where), **more)


def _flat(tensors: Named, names: list[str]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def _unflat(flat: torch.Tensor, like: Named, names: list[str]) -> Named:
    parts = flat.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape).clone() for name, part in zip(names, parts, strict=True)}


def masters_shifted(state: State, lab: Lab) -> State:
    """From the middle of the partition on, everything lies sixteen numbers further: padding was counted twice."""
    names = list(state.masters)
    flat = _flat(state.masters, names)
    middle = len(flat) // 2
    shifted = torch.cat([flat[:middle], torch.zeros(16), flat[middle:-16]])
    return replace(state, masters=_unflat(shifted, state.masters, names))


def moments_of_second_half(state: State, lab: Lab) -> State:
    """Both moments were flattened in the order of names, and are read in the model's."""
    names = state.trained()
    ordered = sorted(names)
    found = {}
    for where in ("exp_avg", "exp_avg_sq"):
        held = getattr(state, where)
        found[where] = _unflat(_flat(held, ordered), held, names)
    return replace(state, **found)


def drifted(state: State, lab: Lab) -> State:
    """Rank 1's norms, which nobody reduces."""
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 20))
    for name, master in state.masters.items():
        if is_norm(name):
            master.add_(torch.randn(master.shape, generator=made) * 0.03)
            state.params[name] = master.to(state.params[name].dtype)
    return state


def older_moments(state: State, lab: Lab) -> State:
    old = lab.run.recent
    return replace(state, exp_avg=old.exp_avg, exp_avg_sq=old.exp_avg_sq)


def older_masters_of_last(state: State, lab: Lab) -> State:
    """The last layer's masters, moments and weights right but for the masters: they are of the checkpoint before."""
    old, last = lab.run.recent, f"layers.{state.config.layers - 1}."
    return replace(state, masters={n: old.masters[n] if last in n else w for n, w in state.masters.items()})


def halved_norms(state: State, lab: Lab) -> State:
    """Replicas were added up with zeros of a rank that had none, then divided."""
    for name in state.params:
        if is_norm(name):
            for held in (state.params, state.masters):
                if name in held:
                    held[name] = held[name] / 2
    return state


def stages_rotated(state: State, lab: Lab) -> State:
    """Layer n has what layer n + 1 had: weights, masters and moments."""
    count = state.config.layers

    def moved(tensors: Named) -> Named:
        found = {}
        for name in tensors:
            source = name
            if "layers." in name:
                number = int(name.split("layers.")[1].split(".")[0])
                source = name.replace(f"layers.{number}.", f"layers.{(number + 1) % count}.")
            found[name] = tensors[source]
        return found

    return replace(state, **{w: moved(getattr(state, w)) for w in ("params", "masters", "exp_avg", "exp_avg_sq")})


def one_matrix_rows_of_ranks(state: State, lab: Lab) -> State:
    """Both halves of every v and o were joined in the other order."""
    for held in (state.params, state.masters):
        for name in held:
            if "v_proj" in name:
                held[name] = torch.cat(held[name].chunk(2)[::-1])
    return state


def overflowed(state: State, lab: Lab) -> State:
    """Second moments went through fp16: the small ones are gone."""
    return replace(state, exp_avg_sq={n: v.half().to(v.dtype) for n, v in state.exp_avg_sq.items()})


def fresh_embedding(state: State, lab: Lab) -> State:
    """The first stage was begun anew: embedding with its master and state of nothing."""
    name, new = "model.embed_tokens.weight", lab.run.fresh()
    state.params[name] = new.params[name]
    if name in state.masters:
        state.masters[name] = new.masters[name]
    state.exp_avg[name] = torch.zeros_like(state.exp_avg[name])
    state.exp_avg_sq[name] = torch.zeros_like(state.exp_avg_sq[name])
    return state


def norms_only_first(state: State, lab: Lab) -> State:
    """All norms have the first one's values: one flat buffer was given to each."""
    source = next(name for name in state.params if is_norm(name))
    for held in (state.params, state.masters):
        for name in held:
            if is_norm(name):
                held[name] = held[source].clone()
    return state


def three(config: Config) -> Config:
    return config.but(layers=3)


def stale_average(resumed: State, after: State) -> State:
    """The saver's buffer of first moments was never filled again."""
    return replace(after, exp_avg={n: v.clone() for n, v in resumed.exp_avg.items()})


def stale_weights(resumed: State, after: State) -> State:
    """The saver gathers masters and moments, and takes weights from its cache."""
    return replace(after, params={n: v.clone() for n, v in resumed.params.items()})


STATE14: list[Fault] = [
    bad("vs01_masters_shifted", "E7", "half of the masters lie sixteen numbers further", "echo next early",
        ("shift", "partition"), restore=masters_shifted, needs=masters, formats=("deepspeed", "dcp"), also=("D2",)),
    bad("vs02_moments_by_name", "E13", "moments flattened by name, read by the model's order", "echo next",
        ("order", "map", "partition", "wrong param"), restore=moments_of_second_half, formats=("deepspeed", "torch_save"),
        also=("B5", "E7")),
    bad("vs03_replicas_drifted", "F1", "the two ranks' norms are different ones", "echo",
        ("replica", "ranks", "drift"), second=drifted, needs=masters, formats=("megatron",), also=("G6",)),
    bad("vs04_rank_older_moments", "G6", "one rank's moments are of the checkpoint before", "echo next",
        ("different saves", "older", "earlier", "rank", "part"), second=older_moments, formats=("megatron", "deepspeed"),
        also=("B6",)),
    bad("vs05_masters_older_layer", "D2", "the last layer's masters are of the checkpoint before", "echo next",
        ("master",), restore=older_masters_of_last, needs=masters, formats=MIXED, also=("G6",)),
    bad("vs06_norms_halved", "E12", "norms are half of what they were", "echo next early",
        ("half", "averag", "0.5", "factor", "replica"), restore=halved_norms, formats=("megatron", "dcp")),
    bad("vs07_stages_rotated", "E9", "every layer, with all its state, one place on", "echo next early",
        ("layer", "shifted"), restore=stages_rotated, needs=three, formats=("torch_save", "dcp", "dcp_sharded")),
    bad("vs08_v_halves", "E1", "halves of v in the other order, weights and masters", "echo next early",
        ("order", "blocks", "rows"), restore=one_matrix_rows_of_ranks, formats=("megatron", "dcp_sharded", "torch_save"),
        also=("E6",)),
    bad("vs09_second_moments_fp16", "D4", "second moments went through fp16", "echo",
        ("fp16", "float16", "16 bits"), restore=overflowed, formats=("torch_save", "deepspeed", "dcp"), also=("B4",)),
    bad("vs10_first_stage_anew", "A2", "embedding, its master and its moments are as at the start", "echo next early",
        ("embed",), restore=fresh_embedding, formats=("torch_save", "dcp", "megatron")),
    bad("vs11_one_norm_for_all", "E9", "all norms have the first one's values", "echo next",
        ("norm",), restore=norms_only_first, formats=("torch_save", "dcp"), also=("A3", "E1")),
    bad("vs12_average_not_refreshed", "G6", "saved first moments are those of the load, all else is new", "next early",
        ("different saves", "older", "same", "unchanged", "did not change", "equal"), saver=stale_average,
        formats=("torch_save", "dcp"), also=("B6", "G7")),
    bad("vs13_weights_not_refreshed", "D3", "saved 16-bit weights are those of the load, masters are new", "next early",
        ("stale", "master"), saver=stale_weights, needs=masters, formats=("torch_save", "dcp", "deepspeed"),
        also=("G6", "G7")),
]  # fmt: skip
