"""Faults of loading: the files are right, and the state that comes back is not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.model import initial, is_norm
from tests.lab.split import axis_of, halves
from tests.lab.state import Named, State

__all__ = ["LOADER_FAULTS", "every"]

Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def every(state: State) -> list[Named]:
    """Weights, masters and moments: what a layout error hits alike."""
    return [found for found in (state.params, state.masters, state.exp_avg, state.exp_avg_sq) if found]


# ---- optimizer -----------------------------------------------------------------------------------------------------


def drop_optimizer(state: State, lab: Lab) -> State:
    return reset_steps(drop_moments(state, lab), lab)


def drop_moments(state: State, lab: Lab) -> State:
    for name in state.exp_avg:
        state.exp_avg[name].zero_()
    return drop_second_moment(state, lab)


def drop_second_moment(state: State, lab: Lab) -> State:
    for name in state.exp_avg_sq:
        state.exp_avg_sq[name].zero_()
    return state


def reset_steps(state: State, lab: Lab) -> State:
    state.step = dict.fromkeys(state.step, 0.0)
    return state


def permute_moments(state: State, lab: Lab) -> State:
    queries = [name for name in state.exp_avg if name.endswith("q_proj.weight")]
    gated = [name for name in state.exp_avg if name.endswith(("gate_proj.weight", "up_proj.weight"))]
    for moments in (state.exp_avg, state.exp_avg_sq):
        for names in (queries, gated):
            moments |= dict(zip(names, [moments[name] for name in (names[-1], *names[:-1])], strict=True))
    return state


def round_moments(state: State, lab: Lab) -> State:
    for moments in (state.exp_avg, state.exp_avg_sq):
        for name, moment in moments.items():
            moments[name] = moment.bfloat16().to(moment.dtype)
    return state


# ---- masters -------------------------------------------------------------------------------------------------------


def masters_from_weights(state: State, lab: Lab) -> State:
    state.masters = {name: weight.float() for name, weight in state.params.items()}
    return state


def stale_masters(state: State, lab: Lab) -> State:
    state.masters = lab.run.stale.masters
    return state


def random_masters(state: State, lab: Lab) -> State:
    state.masters = lab.run.fresh().masters
    return state


# ---- layout --------------------------------------------------------------------------------------------------------


def swap_gate_up(state: State, lab: Lab) -> State:
    return _gated(state, lambda gate, up: (up, gate))


def naive_gate_up(state: State, lab: Lab) -> State:
    """Two ranks' [gate; up] put one under the other, and cut in the middle."""

    def mixed(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gate_0, gate_1), (up_0, up_1) = gate.chunk(2), up.chunk(2)
        return torch.cat([gate_0, up_0]), torch.cat([gate_1, up_1])

    return _gated(state, mixed)


def contiguous_qkv(state: State, lab: Lab) -> State:
    """Rows by query group, [q q k v] after [q q k v], read as [Q; K; V]."""
    config = state.config
    for found in every(state):
        for name in [name for name in found if name.endswith("q_proj.weight")]:
            names = [name.replace("q_proj", f"{side}_proj") for side in "qkv"]
            sides = [found[side].reshape(config.groups, -1, config.hidden) for side in names]
            rows = torch.cat(sides, 1).reshape(-1, config.hidden).split([len(found[side]) for side in names])
            found |= {side: part.clone() for side, part in zip(names, rows, strict=True)}
    return state


def swap_ranks(state: State, lab: Lab) -> State:
    for found in every(state):
        for name in found:
            if (axis := axis_of(name)) is not None:
                found[name] = torch.cat(halves(name, found[name])[::-1], axis)
    return state


def interleave_rope(state: State, lab: Lab) -> State:
    width = state.config.head_dim
    order = torch.arange(width).view(2, -1).T.reshape(-1)
    for found in every(state):
        for name in found:
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                found[name] = found[name].view(-1, width, state.config.hidden)[:, order].reshape(found[name].shape)
    return state


def swap_layers(state: State, lab: Lab) -> State:
    for found in every(state):
        for name in [name for name in found if ".layers.0." in name]:
            other = name.replace(".layers.0.", ".layers.1.")
            found[name], found[other] = found[other], found[name]
    return state


def repeat_layer(state: State, lab: Lab) -> State:
    last = state.config.layers - 1
    for found in every(state):
        for name in [name for name in found if f".layers.{last}." in name]:
            found[name] = found[name.replace(f".layers.{last}.", f".layers.{last - 1}.")].clone()
    return state


def _gated(state: State, change: Change) -> State:
    for found in every(state):
        for name in [name for name in found if name.endswith("gate_proj.weight")]:
            other = name.replace("gate_proj", "up_proj")
            found[name], found[other] = change(found[name], found[other])
    return state


# ---- missing, tied, averaged ---------------------------------------------------------------------------------------


def missing_matrix(state: State, lab: Lab) -> State:
    name = next(name for name in state.params if ".layers.1." in name and name.endswith("down_proj.weight"))
    return _set(state, {name: initial(state.config, seed=77)[name]})


def missing_norms(state: State, lab: Lab) -> State:
    return _set(state, {name: torch.ones(weight.shape) for name, weight in state.params.items() if is_norm(name)})


def fresh_head(state: State, lab: Lab) -> State:
    embedding = "model.embed_tokens.weight"
    made = torch.Generator().manual_seed(5)
    weight = torch.randn(state.params[embedding].shape, generator=made) * 0.02
    for found in every(state):
        found["lm_head.weight"] = torch.zeros_like(found[embedding])
    state.step["lm_head.weight"] = 0.0
    return _set(state, {"lm_head.weight": weight})


def copied_head(state: State, lab: Lab) -> State:
    for found in every(state):
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    state.step["lm_head.weight"] = state.step["model.embed_tokens.weight"]
    return state


def shift_vocabulary(state: State, lab: Lab) -> State:
    for found in every(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in found:
                found[name] = found[name].roll(1, 0)
    return state


def averaged_weights(state: State, lab: Lab) -> State:
    older = lab.run.stale.updated
    return _set(state, {name: (w.float() + older[name].float()) / 2 for name, w in state.updated.items()})


def _set(state: State, weights: Named) -> State:
    """Weights, and masters where there are any."""
    for name, weight in weights.items():
        state.updated[name] = weight.to(state.updated[name].dtype)
        state.params[name] = weight.to(state.params[name].dtype)
    return state


def _tied(config: Config) -> Config:
    return config.but(tied=True)


LOADER_FAULTS = [
    Fault("f01_drop_opt", "B1", "optimizer state not loaded: moments 0, step 0",
          seen("alone echo next early late"), drop_optimizer),
    Fault("f02_step_reset", "B2", "moments kept, every parameter's step reset to 0",
          seen("alone echo next early late"), reset_steps),
    Fault("f03_drop_v", "B4", "exp_avg_sq zeroed, exp_avg and step kept",
          seen("alone echo next early late"), drop_second_moment),
    Fault("f04_drop_mv_keep_step", "B3", "moments zeroed, step kept: no bias correction",
          seen("alone echo next early"), drop_moments),
    Fault("f05_master_from_bf16", "D1", "fp32 masters made anew from bf16 weights",
          seen("alone echo next"), masters_from_weights, needs=masters),
    Fault("f06_stale_master", "D2", "masters of an older step beside right weights",
          seen("alone echo next early"), stale_masters, needs=masters),
    Fault("f07_random_master", "D2", "masters left at random initial values",
          seen("alone echo next early"), random_masters, needs=masters),
    Fault("f08_gate_up_swap", "E3", "gate and up exchanged in every layer",
          seen("echo next early"), swap_gate_up),
    Fault("f09_gate_up_naive", "E2", "[gate; up] of two ranks put together naively",
          seen("echo next early"), naive_gate_up),
    Fault("f10_qkv_contig", "E4", "grouped QKV read as contiguous [Q; K; V]",
          seen("echo next early"), contiguous_qkv, needs=lambda c: c.but(groups=max(2, c.groups))),
    Fault("f11_tp_order", "E1", "tensor-parallel ranks put together in the wrong order",
          seen("echo next early"), swap_ranks),
    Fault("f12_rope_layout", "E5", "rows of q and k permuted from half-split to interleaved rope",
          seen("echo next early"), interleave_rope),
    Fault("f13_layer_swap", "E9", "layers 0 and 1 exchanged", seen("echo next early"), swap_layers),
    Fault("f14_layer_dup", "E9", "a layer loaded into the next one as well",
          seen("alone echo next early"), repeat_layer),
    Fault("f15_pg_perm_qo", "B5", "moments of parameters of one shape rotated",
          seen("echo next early"), permute_moments),
    Fault("f16_missing_layer", "A2", "one down_proj missing: left at its random initial value",
          seen("echo next early"), missing_matrix),
    Fault("f17_missing_norm", "A3", "all norms missing: left at 1.0", seen("alone echo next early"), missing_norms),
    Fault("f18_untied_init", "F2", "tied head becomes an lm_head of its own, freshly initialised",
          seen("alone echo next early late"), fresh_head, needs=_tied),
    Fault("f19_untied_copy", "F2", "tied head becomes a separate copy, which drifts",
          seen("alone echo next early late"), copied_head, needs=_tied),
    Fault("f20_vocab_shift", "F7", "rows of the vocabulary shifted by one", seen("echo next early"), shift_vocabulary),
    Fault("f21_ema_loaded", "F4", "averaged weights loaded instead of the raw ones",
          seen("echo next early"), averaged_weights),
    Fault("f22_v_bf16", "D4", "moments passed through bf16", seen("alone echo next"), round_moments, needs=masters),
]  # fmt: skip
