"""Faults of the trials by strangers (u01 … u60), where the first 62 have no such one.

The others are: u04 w09, u07 w08, u09b f12, u14b w14, u18 f19, u20 f02, u24 f09, u28 c13, u35 w16, u38 f17, u39b f04,
u39c f03, u53b w11, u57 f25, u60 f10; u34, which is no injected one, is in `reports`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tests.lab.changes import (
    ARGUED,
    EXTRA,
    FLAT,
    MOMENTS,
    WEIGHTS,
    Restore,
    both,
    ends,
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
from tests.lab.loader_faults import masters_from_weights, stale_masters
from tests.lab.model import ADAPTED, E4M3_MAX, LORA_SCALE, initial, is_norm
from tests.lab.run import run
from tests.lab.split import halves, merged
from tests.lab.state import State
from tests.lab.train import step_optimizer

__all__ = ["TRIALS", "interleaved", "other_run"]

OPTIMIZER = ("exp_avg", "exp_avg_sq", "step")


def interleaved(state: State, tensor: torch.Tensor) -> torch.Tensor:
    width = state.config.head_dim
    order = torch.arange(width).view(2, -1).T.reshape(-1)
    return tensor.view(-1, width, state.config.hidden)[:, order].reshape(tensor.shape)


def other_run(lab: Lab) -> State:
    """Of a run of the same kind with another seed, at the same step."""
    return run(lab.run.config.but(seed=lab.run.config.seed + 7)).resumed


def rope_of_weights(state: State, lab: Lab) -> State:
    return mapped(lambda t: interleaved(state, t), ends("q_proj", "k_proj"), WEIGHTS)(state, lab)


def rope_of_one_key(state: State, lab: Lab) -> State:
    return mapped(lambda t: interleaved(state, t), lambda name: ".layers.0." in name and "k_proj" in name)(state, lab)


def averaged_unseen(state: State, lab: Lab) -> State:
    return set_weights(state, dict(state.ema))


def shuffled_tail(state: State, lab: Lab) -> State:
    vocab = state.config.vocab
    tail = list(range(vocab // 2, vocab))
    order = [*range(vocab // 2), *lab.rng.sample(tail, len(tail)), *range(vocab, state.config.padded)]
    return mapped(lambda t: t[order], ends("embed_tokens", "lm_head"))(state, lab)


def stale_rows(state: State, lab: Lab) -> State:
    older = lab.run.recent
    return merged(state, replace(state, params=older.params, masters=older.masters))


def merged_twice(state: State, lab: Lab) -> State:
    for name in [name for name in state.params if name.endswith(tuple(f"{side}.weight" for side in ADAPTED))]:
        stem = name.removesuffix("weight")
        a, b = state.params[f"{stem}lora_A.weight"].float(), state.params[f"{stem}lora_B.weight"].float()
        state.params[name] = (state.params[name].float() + 2 * LORA_SCALE * b @ a).to(state.params[name].dtype)
    return state


def turned_shards(tensor: torch.Tensor) -> torch.Tensor:
    """Four parts along the rows, joined by the file's name and not by rank: the last comes first."""
    parts = tensor.chunk(4)
    return torch.cat([parts[-1], *parts[:-1]])


def fp8_codes(only: bool) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        names = [name for name in state.params if ".mlp." in name and name.endswith("_proj.weight")]
        codes = {}
        for name in names[:1] if only else names:
            weight = state.updated[name].float()
            codes[name] = (weight * (E4M3_MAX / weight.abs().max())).to(torch.float8_e4m3fn).float()
        return set_weights(state, codes)

    return restore


def shuffled(count: int, lab: Lab) -> list[int]:
    """An order in which something is elsewhere."""
    while (order := lab.rng.sample(range(count), count)) == sorted(order):
        continue
    return order


def shuffled_experts(state: State, lab: Lab) -> State:
    order = shuffled(state.config.experts, lab)

    def source(name: str, config: Config) -> str:
        head, _, rest = name.partition(".experts.")
        number, _, side = rest.partition(".")
        return f"{head}.experts.{order[int(number)]}.{side}"

    return moved(source, lambda name: ".experts." in name)(state, lab)


def shuffled_routers(state: State, lab: Lab) -> State:
    order = shuffled(state.config.experts, lab)
    return mapped(lambda t: t[order], ends("mlp.gate"))(state, lab)


def older_optimizer(*what: str) -> Restore:
    def restore(state: State, lab: Lab) -> State:
        return replace(state, **{name: getattr(lab.run.stale, name) for name in what})

    return restore


def older_weights(state: State, lab: Lab) -> State:
    return set_weights(state, lab.run.stale.updated)


def older_halves(state: State, lab: Lab) -> State:
    return replace(state, params=lab.run.stale.params)


def optimizer_of_other_run(state: State, lab: Lab) -> State:
    other = other_run(lab)
    return replace(state, exp_avg=other.exp_avg, exp_avg_sq=other.exp_avg_sq)


def weights_of_other_run(state: State, lab: Lab) -> State:
    return set_weights(state, other_run(lab).updated)


def infinite_weight(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.params if not is_norm(name)])
    weight = state.updated[name].clone()
    weight.view(-1)[lab.rng.randrange(weight.numel())] = math.inf
    return set_weights(state, {name: weight})


def zero_block(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.params if name.endswith("up_proj.weight")])
    weight = state.updated[name].clone()
    start = lab.rng.randrange(weight.numel() // 4, weight.numel() // 2)
    weight.view(-1)[start : start + weight.numel() // 5] = 0
    return set_weights(state, {name: weight})


def exchanged_pair(one: str, other: str) -> Restore:
    """Moments of two parameters of a layer exchanged."""
    return moved(
        lambda name, config: name.replace(one, "\0").replace(other, one).replace("\0", other),
        lambda name: ".layers.1." in name and (one in name or other in name),
        MOMENTS,
    )


def exchanged_moments(state: State, lab: Lab) -> State:
    return replace(state, exp_avg=state.exp_avg_sq, exp_avg_sq=state.exp_avg)


def untouched_step(state: State, lab: Lab) -> State:
    """One optimizer step with gradients of 0 after the load, to make the state exist."""
    optimizer, updated = step_optimizer(state)
    for tensor in updated.values():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    for name in state.trained():
        held = optimizer.state[updated[name]]
        state.exp_avg[name], state.exp_avg_sq[name] = held["exp_avg"], held["exp_avg_sq"]
        state.step[name] = float(held["step"])
    return set_weights(state, {name: updated[name] for name in state.trained()})


def lost_vectors(state: State, lab: Lab) -> State:
    return both(mapped(torch.zeros_like, vectors, MOMENTS), steps(lambda step: 0.0, vectors))(state, lab)


def reborn_rows(state: State, lab: Lab) -> State:
    name = "model.embed_tokens.weight"
    weight, half = state.updated[name].clone(), state.config.vocab // 2
    weight[half : state.config.vocab] = initial(state.config, seed=77)[name][half : state.config.vocab]
    return set_weights(state, {name: weight})


def half_zero(state: State, lab: Lab) -> State:
    for moments in (state.exp_avg, state.exp_avg_sq):
        for name in filter(matrices, moments):
            moments[name] = moments[name].clone()
            halves(name, moments[name])[1].zero_()
    return state


def shifted_moments(state: State, lab: Lab) -> State:
    by = lab.rng.randrange(3, 40)
    for moments in (state.exp_avg, state.exp_avg_sq):
        line = torch.cat([moment.reshape(-1) for moment in moments.values()]).roll(by)
        sizes = [moment.numel() for moment in moments.values()]
        for name, part in zip(list(moments), line.split(sizes), strict=True):
            moments[name] = part.reshape(moments[name].shape).clone()
    return state


def restarted_average(state: State, lab: Lab) -> State:
    return replace(state, ema={name: weight.float().clone() for name, weight in state.updated.items()})


def adapters_fresh(state: State, lab: Lab) -> State:
    return reborn(lambda name: "lora_" in name)(state, lab)


def _even(config: Config) -> Config:
    return config.but(layers=4)


def _expert(config: Config) -> Config:
    return config.but(experts=config.experts or 4)


def _untold(config: Config) -> Config:
    return config.but(unstored=("scheduler", "args"))


AFTER = seen("echo next early")
LORA = with_(lora=4, precision="fp32")

TRIALS = [
    Fault("u01_state_reversed", "B5", "moments of the layers bound in reverse order", AFTER,
          moved(layered(lambda n, count: count - 1 - n), where=MOMENTS), also=("E13", "E9"),
          why="state bound to other parameters; by layers, so that a map of layers fits as well"),
    Fault("u02_schedule_unstored", "C1", "no schedule is stored: warm-up starts again, seen in the groups' lr alone",
          AFTER, told(lambda s: {"scheduler": 0}), also=("C2",), needs=_untold, formats=FLAT,
          why="lr starts anew; without a stored schedule the curve is not known"),
    Fault("u03_scaler_reset", "D8", "the loss scale begins anew at 65536", seen("echo next early"),
          told(lambda s: {"scale": 65536.0, "growth": 0}), needs=with_(scaler=True), formats=EXTRA),
    Fault("u04b_loader_unstored", "C6", "the data starts again, and no file holds its position", AFTER,
          told(lambda s: {"data_index": 0}), visible=False, formats=("folder", "lightning", "accelerate")),
    Fault("u05_loader_skips", "C6", "the loader is 200 batches further than before", seen("alone echo next early"),
          told(lambda s: {"data_index": s.trainer.data_index + 200, "loader": s.trainer.loader + 200}),
          also=("C7", "H1"), formats=ARGUED, why="a skip can be an order or a setting as well"),
    Fault("u06_random_shared", "C8", "every rank has rank 0's random state", seen("alone echo next early"),
          told(lambda s: {"shared_random": True}), formats=("folder", "accelerate")),
    Fault("u07b_ema_unstored", "F4", "averaged weights loaded, and no file holds the average", seen("echo next"),
          averaged_unseen, needs=with_(ema=True, unstored=("ema",)), formats=EXTRA),
    Fault("u08b_weights_through_bf16", "D7", "fp32 weights through bf16", seen("echo next"),
          mapped(lambda t: t.bfloat16().float(), where=("params",)), also=("D1",), needs=with_(precision="fp32"),
          formats=FLAT, why="the weights are their own masters"),
    Fault("u09_rope_weights_only", "E5", "rows of q and k permuted for interleaved rope, moments as they were", AFTER,
          rope_of_weights, also=("E6",), why="rows moved within heads"),
    Fault("u09c_rope_one_key", "E5", "rows of one k_proj permuted for interleaved rope", AFTER, rope_of_one_key,
          also=("E6",), why="rows moved within heads"),
    Fault("u10_rope_theta", "H2", "another rope base in the config", AFTER,
          lambda state, lab: state.declared(rope_theta=1e6), also=("H1",),
          formats=(*ARGUED, "folder"), why="a setting that no tensor shows"),
    Fault("u11_vocabulary_weights_only", "F7", "rows of the vocabulary shifted, moments as they were", AFTER,
          mapped(lambda t: t.roll(1, 0), ends("embed_tokens", "lm_head"), WEIGHTS)),
    Fault("u11b_vocabulary_tail", "F7", "the later half of the vocabulary in another order", AFTER, shuffled_tail,
          also=("E8",), why="rows of one table; a shard's part of them"),
    Fault("u12_decay_on_norms", "B7", "norms decay too, and the param groups say so", AFTER,
          told(lambda s: {"vector_decay": s.config.weight_decay}), also=("H1",), why="the groups tell the new value"),
    Fault("u12b_decay_on_norms_silent", "B7", "norms decay too, and no group says so", seen("next"),
          told(lambda s: {"silent": (("vector_decay", s.config.weight_decay),)}), also=("H1", "C5"),
          needs=with_(weight_decay=0.1), why="decay other than the stated one"),
    Fault("u13_betas_eps", "H1", "other betas and eps in the groups", AFTER,
          lambda state, lab: state.declared(betas=(0.85, 0.97), eps=1e-6)),
    Fault("u14_missing_keys", "A2", "three matrices missing: left at random values", AFTER,
          reborn(lambda name: ".layers.0." in name and ends("q_proj", "o_proj", "k_proj")(name))),
    Fault("u15_layer_missing", "A2", "a whole layer left at random values", AFTER, reborn(of_layers(1))),
    Fault("u15b_head_missing", "A2", "the head left at random values", AFTER, reborn(ends("lm_head")),
          also=("F2", "F7"), needs=with_(tied=False), why="head or vocabulary made anew"),
    Fault("u16_stale_rows", "G6", "rank 1's part of every weight is of the checkpoint before", AFTER, stale_rows),
    Fault("u17_merged_twice", "F5", "adapters merged into the base twice, and active still", AFTER, merged_twice,
          needs=LORA, formats=EXTRA),
    Fault("u17b_adapters_not_loaded", "F5", "adapters left at their initial values", seen("alone echo next early"),
          adapters_fresh, also=("A2",), needs=LORA, formats=EXTRA, why="an adapter's tensors were missing"),
    Fault("u19_shards_turned", "E1", "four row shards joined in another order, states too", AFTER,
          mapped(turned_shards, matrices), also=("E7", "E8"), why="a wrong order of shards, of whatever kind"),
    Fault("u19b_shards_turned_weights", "E1", "four row shards of the weights joined in another order", AFTER,
          mapped(turned_shards, matrices, WEIGHTS), also=("E7", "E8"), why="as u19"),
    Fault("u20b_steps_ahead", "C9", "the optimizer's counters are 1000 too high", seen("alone echo next early"),
          steps(lambda step: step + 1000), also=("B2",), why="the optimizer's counters are what is wrong"),
    Fault("u20c_step_reset_vectors", "B2", "the step of the vectors' group begins at 0",
          seen("alone echo next early"), steps(lambda step: 0.0, vectors)),
    Fault("u21_clip_off", "H1", "clipping is switched off in the arguments", AFTER,
          lambda state, lab: state.declared(clip=0.0), needs=with_(clip=1.0), formats=(*ARGUED, "megatron")),
    Fault("u22_scale_not_removed", "D8", "gradients are not unscaled, which hardly changes Adam's updates", AFTER,
          told(lambda s: {"silent": (("gradient", 1024.0),)}), also=("B10", "G3", "H1"), needs=with_(clip=0.0),
          visible=False, why="as large gradients, whatever made them so"),
    Fault("u22b_gradients_summed", "C10", "gradients summed over eight ranks, not averaged", AFTER,
          told(lambda s: {"silent": (("gradient", 8.0),)}), also=("B10", "H1"), needs=with_(clip=0.0), visible=False,
          why="as large gradients, whatever made them so"),
    Fault("u23_fp8_codes", "D9", "weights of the MLPs loaded as fp8 codes, scales left out", AFTER, fp8_codes(False),
          also=("E12",), why="a factor for each tensor is what both say"),
    Fault("u23b_fp8_codes_one", "D9", "one weight loaded as fp8 codes, its scale left out", AFTER, fp8_codes(True),
          also=("E12", "A2"), why="as u23; one tensor that was not loaded rightly"),
    Fault("u25_experts_shuffled", "E10", "experts of every layer permuted, routers as they were", AFTER,
          shuffled_experts, also=("E9",), needs=_expert, why="whole modules elsewhere"),
    Fault("u25b_routers_shuffled", "E10", "rows of the routers permuted, experts as they were", AFTER,
          shuffled_routers, needs=_expert),
    Fault("u26_stages_exchanged", "E9", "two pipeline stages exchanged", AFTER,
          moved(layered(lambda n, count: (n + count // 2) % count)), needs=_even),
    Fault("u26b_layers_shifted", "E9", "every layer loaded into the next", AFTER,
          moved(layered(lambda n, count: (n + 1) % count))),
    Fault("u27_older_optimizer", "G6", "the optimizer of an older save under newer weights, counters too",
          seen("alone echo next early"), older_optimizer(*OPTIMIZER), also=("C9", "B6", "E13"),
          why="an optimizer of another step"),
    Fault("u27b_older_moments", "G6", "moments of an older save, counters right", AFTER, older_optimizer(*MOMENTS),
          also=("B6", "E13"), why="moments of another save"),
    Fault("u27c_older_weights", "G6", "weights and masters of an older save under the newer optimizer",
          seen("echo next"), older_weights, also=("D2", "D3"),
          why="parts of two saves; the weights' part is named"),
    Fault("u28b_infinite_weight", "G1", "one weight is infinite", seen("alone echo next early"), infinite_weight),
    Fault("u29_zero_block", "G5", "a fifth of a matrix is zero", AFTER, zero_block, also=("G4",),
          why="zeros where a file ends or was not written"),
    Fault("u30_pair_exchanged", "B5", "moments of q and o of a layer exchanged", AFTER,
          exchanged_pair("q_proj", "o_proj"), also=("E13",), why="the optimizer's map is another than the weights'"),
    Fault("u30b_norms_exchanged", "B5", "moments of a layer's two norms exchanged", AFTER,
          exchanged_pair("input_layernorm", "post_attention_layernorm"), also=("E13",), why="as u30"),
    Fault("u31_m_v_exchanged", "B6", "exp_avg and exp_avg_sq exchanged", seen("alone echo next early"),
          exchanged_moments, also=("B4", "G3", "B5"), why="negative second moments; states under other names"),
    Fault("u32_masters_from_bf16", "D1", "a file's own ``master_weights`` made anew from bf16",
          seen("alone echo next"), masters_from_weights, needs=masters, formats=("torch_masters",)),
    Fault("u32b_masters_stale", "D2", "a file's own ``master_weights`` are of an older step",
          seen("alone echo next early"), stale_masters, needs=masters, formats=("torch_masters",)),
    Fault("u32c_weights_stale", "D3", "bf16 weights of an older step beside right masters", seen("alone echo"),
          older_halves, needs=masters, also=("G6",), why="the weights are of another save than the rest"),
    Fault("u33_lr_doubled", "H1", "updates at twice the lr that the files say", seen("next"),
          told(lambda s: {"silent": (("lr", 2.0),)}), also=("C2", "B8"), why="the lr in use is another one"),
    Fault("u33b_lr_tripled", "H1", "updates at three times the lr; the schedule is not stored", seen("next"),
          told(lambda s: {"silent": (("lr", 3.0),)}), also=("C2", "B8"), needs=_untold, formats=FLAT, why="as u33"),
    Fault("u36_transposed", "E1", "o_proj of every layer transposed", AFTER,
          mapped(lambda t: t.T, ends("o_proj"), WEIGHTS), also=("E4", "A2"), why="another axis; not loaded rightly"),
    Fault("u39_exp_avg_lost", "B3", "exp_avg zeroed, the rest kept", seen("echo next early"),
          mapped(torch.zeros_like, where=("exp_avg",)), also=("B6", "B1", "B4"), why="one of two moments was lost"),
    Fault("u40_optimizer_of_other_run", "E13", "moments of another run", AFTER, optimizer_of_other_run,
          also=("B6", "G6", "B5"), why="moments that are not of these weights"),
    Fault("u41_weights_of_other_run", "A2", "weights of another run under this run's optimizer", AFTER,
          weights_of_other_run, also=("D2", "F6", "G6", "A1"), why="weights that were never this run's"),
    Fault("u43_dummy_step", "C9", "a step with zero gradients after the load", AFTER, untouched_step,
          also=("B1", "B2", "H1"), why="the optimizer is one update ahead of the trainer"),
    Fault("u44_maximize", "H1", "the groups say maximize: updates go uphill", AFTER,
          told(lambda s: {"maximize": True}), formats=FLAT),
    Fault("u46_adam_for_adamw", "H1", "Adam instead of AdamW: decay goes through the moments", AFTER,
          lambda state, lab: state.declared(optimizer="adam"), needs=with_(optimizer="adamw")),
    Fault("u47_frozen", "H1", "a layer is frozen by mistake", seen("next early"),
          told(lambda s: {"frozen": (".layers.0.",)}), also=("D6", "B8"), why="weights that stand still"),
    Fault("u53_state_lost_vectors", "B1", "moments and counters of the vectors' group are new",
          seen("alone echo next early"), lost_vectors),
    Fault("u54_rows_missing", "F7", "the later half of the embedding left at random values", AFTER, reborn_rows,
          also=("A2",), why="rows of the vocabulary that are new"),
    Fault("u55_half_of_moments_zero", "B1", "rank 1's part of all moments is zero", AFTER, half_zero,
          also=("B3", "B4", "G5", "E8"), why="a part of the state was lost, as zeros"),
    Fault("u56_moments_shifted", "E7", "moments in one line, shifted against the parameters", AFTER, shifted_moments,
          also=("E13", "B5"), why="a flat line of the optimizer alone"),
    Fault("u59_average_restarted", "F4", "the average begins again from the weights", seen("alone echo next"),
          restarted_average, needs=with_(ema=True), formats=EXTRA),
]  # fmt: skip
