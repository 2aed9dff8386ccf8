"""The ninth half, sealed until 2026-11-27: what a stranger to the doctor's rules would break, keep or change in a resume.

Its author had not seen the list of causes, only what some ids mean (B1, B4, B7, C1, C2, C5, C6, C7, D2, D3, F4, F7, H1).
So an answer counted by its letter when the half was measured: A, E and F are the weights, B the optimizer, C the
schedule and the data, D precision and masters, G damage, H settings. ``why`` says in words what the answer must say, and
``_CAUSES`` which causes say that.
"""

# ruff: noqa: E501
from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.hugging import made, trained
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Frozen, Sheltered, Tied, muon, optim, plain
from tests.lab.model import is_norm
from tests.lab.state import State

__all__ = ["OPENED9_LIVE"]

#: The causes that say what ``why`` says, added when the half was opened; the first fits best.
_CAUSES = {
    "z01": "C3",
    "z02": "C3",
    "z03": "C3",
    "z04": "C3",
    "z05": "C2 C1 H1",
    "z06": "C4 C2 H1",
    "z07": "C1",
    "z08": "C2 B8",
    "z09": "C1 C4",
    "z10": "C2 H1 B7 B8",
    "z11": "B7 H1 B8 C2",
    "z12": "H1 B7",
    "z13": "C6",
    "z14": "C6 C7",
    "z15": "C7 H1",
    "z16": "C6 C7",
    "z17": "H1 C6 C7",
    "z18": "C8",
    "z22": "B5",
    "z23": "G6 B6 B5",
    "z24": "B1",
    "z25": "B1 B3",
    "z26": "B1",
    "z27": "B1 B3",
    "z28": "B5 E1 E13",
    "z29": "B3 B4",
    "z30": "B11 B6 D4",
    "z31": "B11 B5 E7 E13",
    "z32": "H1 B2 B1",
    "z33": "F4",
    "z34": "B11 B4",
    "z35": "B2 B10",
    "z36": "B2",
    "z37": "B2 C9 C10",
    "z38": "D8",
    "z39": "A1 A2",
    "z40": "A2",
    "z41": "E1",
    "z42": "E9",
    "z43": "D7 F6",
    "z44": "D7",
    "z45": "E12 H2 F7",
    "z46": "A2 A3 E12",
    "z47": "F2",
    "z48": "H1 B1 F6",
    "z49": "H1 B1 F6",
    "z50": "A5",
    "z51": "A5 H1",
    "z52": "A5 H2",
    "z53": "A5 D7 H2",
    "z54": "F4",
    "z55": "F4",
    "z56": "F4",
    "z57": "F4 A5 C9",
    "z58": "E13 B5 E7",
    "z59": "E7",
    "z60": "E13 B5",
    "z61": "E9",
    "z62": "E1 E6",
    "z63": "E1",
    "z64": "E5",
    "z65": "E4",
    "z66": "E10",
    "z67": "E10",
    "z68": "A5",
    "z69": "G6",
    "z70": "G6 F1",
    "z71": "G6",
    "z72": "G6 F4",
    "z73": "D1",
    "z74": "F1 E12",
    "z75": "D9 A5",
    "z76": "F5 A2",
    "z77": "F6 D7",
    "z78": "D4",
    "z79": "B6",
    "z80": "F7",
    "z81": "G3 G1",
    "z82": "B2 G6",
    "z83": "F4",
    "z84": "D3",
    "z85": "G4",
    "z86": "G5",
    "z87": "B1 C1",
    "z88": "A1 A2",
    "z89": "C4 H1",
    "z90": "H1 C6",
}

TORCH = torch.optim
LR = torch.optim.lr_scheduler
ANY = "echo next early"
LOUD = "alone echo next early"
LATER = "next early"
#: Layouts that store the state as it is; DCP would make up what is missing.
PLAIN = ("torch_save", "folder", "lightning")
BLOCKS = {"hidden": 48, "ffn": 144, "heads": 4, "groups": 2}
NARROW = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def letters(which: str) -> tuple[str, ...]:
    """All causes of these letters."""
    return tuple(f"{letter}{number}" for letter in which for number in range(1, 16))


WEIGHTS = letters("AEF")  #: something of the weights
STATE = letters("B")  #: something of the optimizer
RUN = letters("C")  #: schedule, counters, data
EXACT = letters("D")  #: precision, masters
DAMAGE = letters("G")
SETTING = letters("H")


def named(loop: Loop) -> dict[str, torch.Tensor]:
    return dict(loop.module.named_parameters())


def weighed(change: Callable[[str, torch.Tensor, Config], torch.Tensor]) -> Callable[[Loop], None]:
    """For `Loop.loaded`: other weights."""

    def loaded(self: Loop) -> None:
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(change(name, weight.clone(), self.config))

    return loaded


def stated(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Loop], None]:
    """For `Loop.loaded`: other state of every parameter."""

    def loaded(self: Loop) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                state |= change(state)

    return loaded


# ---- loops -----------------------------------------------------------------------------------------------------------


class Flagged(Loop):
    """Knows whether it was resumed, and from which step."""

    resumed = False
    began = 0

    def loaded(self) -> None:
        self.resumed, self.began = True, self.step

    def shape(self, update: int) -> float:
        return self.config.lr_at(update)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return LR.LambdaLR(optimizer, lambda done: self.shape(done + 1) / self.config.lr)


class Sampled(Flagged):
    """A sampler of epochs of 12 batches, whose state is saved."""

    LENGTH = 12

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["sampler"] = {"epoch": 0, "index": 0, "seed": 1234}

    def tokens(self) -> torch.Tensor:
        told = self.extra["sampler"]
        found = batch(self.config, 1000 * told["epoch"] + told["index"], told["seed"])
        self.advance(told)
        return found

    def advance(self, told: dict[str, int]) -> None:
        told["index"] += 1
        if told["index"] == self.LENGTH:
            told |= {"epoch": told["epoch"] + 1, "index": 0}


def sampler(**values: Any) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        Flagged.loaded(self)  # type: ignore[arg-type]
        self.extra["sampler"] |= values

    return loaded


class Yielding(Flagged):
    """torchdata's StatefulDataLoader, as it is saved."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {
            "_snapshot": {"_snapshot_step": 0, "_last_yielded_worker_id": 0},
            "_steps_since_snapshot": 0,
            "_iterator_finished": False,
            "_num_yielded": 0,
        }

    def tokens(self) -> torch.Tensor:
        told = self.extra["dataloader"]
        found = batch(self.config, told["_num_yielded"], 1234)
        told["_num_yielded"] += 1
        told["_snapshot"] |= {
            "_snapshot_step": told["_num_yielded"],
            "_last_yielded_worker_id": told["_num_yielded"] % 2,
        }
        return found


class Shadowed(Flagged):
    """An exponential average of the weights, and how often it was made."""

    times = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        shadow = {name: weight.detach().clone() for name, weight in named(self).items()}
        self.extra["ema"] = {"decay": 0.97, "num_updates": 0, "shadow": shadow}

    def apply(self) -> None:
        super().apply()
        told = self.extra["ema"]
        for _ in range(self.times):
            told["num_updates"] += 1
            for name, weight in named(self).items():
                told["shadow"][name].lerp_(weight.detach(), 1 - told["decay"])


class Averaged(Flagged):
    """Stochastic weight averaging: a plain mean of every fourth set of weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        held = {name: torch.zeros_like(weight) for name, weight in named(self).items()}
        self.extra["swa"] = {"n_averaged": 0, "module": held}

    def apply(self) -> None:
        super().apply()
        told = self.extra["swa"]
        if self.step % 4 == 3:
            told["n_averaged"] += 1
            for name, weight in named(self).items():
                told["module"][name].lerp_(weight.detach(), 1 / told["n_averaged"])


class Noisy(Flagged):
    """A tenth of the gradients is dropped, by a generator whose state is saved."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.generator = torch.Generator().manual_seed(config.seed)

    def gradients(self) -> None:
        super().gradients()
        for weight in named(self).values():
            if weight.grad is not None:
                weight.grad *= torch.rand(weight.shape, generator=self.generator) > 0.1

    def content(self) -> dict[str, Any]:
        return super().content() | {"rng_state": self.generator.get_state()}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        if "rng_state" not in self.fresh:
            self.generator.set_state(content["rng_state"])


class Plateau(Flagged):
    """The rate halves when the loss stays."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return LR.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.02)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.told = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.told)


class Growing(Sheltered):
    """With a scale that begins low and doubles often."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] |= {"scale": 1024.0, "growth_interval": 3}


class Graded(Flagged):
    """Deeper layers learn faster: groups with rates of their own."""

    def groups(self) -> Groups:
        found: Groups = []
        for layer in range(self.config.layers):
            held = [w for n, w in named(self).items() if f".layers.{layer}." in n]
            found.append({"params": held, "weight_decay": 0.01, "lr": self.config.lr * 0.5 ** (2 - layer)})
        rest = [w for n, w in named(self).items() if ".layers." not in n]
        return [*found, {"params": rest, "weight_decay": 0.0, "lr": self.config.lr}]


class Normed(nn.Module):
    """With batch statistics."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.embed = nn.Embedding(config.padded, config.hidden)
            self.fc1 = nn.Linear(config.hidden, 2 * config.hidden)
            self.bn1 = nn.BatchNorm1d(2 * config.hidden)
            self.fc2 = nn.Linear(2 * config.hidden, config.hidden)
            self.bn2 = nn.BatchNorm1d(config.hidden)
            self.head = nn.Linear(config.hidden, config.padded)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embed(tokens[:, :-1])
        x = F.gelu(self.bn1(self.fc1(x).transpose(1, 2)).transpose(1, 2))
        x = F.gelu(self.bn2(self.fc2(x).transpose(1, 2)).transpose(1, 2))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Batched(Flagged):
    def net(self) -> nn.Module:
        return Normed(self.config)


class Rotor(nn.Module):
    """One layer of attention by rotated halves; the frequencies are a buffer that is saved."""

    def __init__(self, config: Config, theta: float = 1e4) -> None:
        super().__init__()
        self.heads = config.heads
        wide = config.hidden // config.heads
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.embed_tokens = nn.Embedding(config.padded, config.hidden)
            self.rotary_emb = nn.Module()
            self.rotary_emb.register_buffer("inv_freq", theta ** -(torch.arange(0, wide, 2) / wide))
            self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
            self.out = nn.Linear(config.hidden, config.hidden)
            self.norm = nn.LayerNorm(config.hidden)
            self.lm_head = nn.Linear(config.hidden, config.padded, bias=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.outer(torch.arange(x.shape[2]).float(), self.rotary_emb.inv_freq.float())
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embed_tokens(tokens[:, :-1])
        q, k, v = (s.unflatten(-1, (self.heads, -1)).transpose(1, 2) for s in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Rotated(Flagged):
    def net(self) -> nn.Module:
        return Rotor(self.config)


class Called(Flagged):
    """A callback keeps the first layer and the embedding frozen: their gradients are dropped."""

    def held(self) -> bool:
        return True

    def gradients(self) -> None:
        if self.held():
            for name, weight in named(self).items():
                if ".layers.0." in name or "embed" in name:
                    weight.grad = None
        super().gradients()


# ---- faults of a schedule --------------------------------------------------------------------------------------------


def hastened(self: Loop) -> None:
    self.schedules[0].last_epoch *= 4


def one_more(self: Loop) -> None:
    self.schedules[0].step()


def twice(self: Any) -> None:
    Loop.apply(self)
    if self.resumed:
        self.schedules[0].step()


def held_rate(self: Any) -> None:
    self.optimizers[0].step()
    if not self.resumed:
        self.schedules[0].step()


def rewarmed(self: Any, update: int) -> float:
    rate = self.config.lr_at(update)
    return rate * min(1.0, max(1, update - self.began) / 45) if self.resumed else rate


def shortened(self: Any, update: int) -> float:
    return (
        self.config.but(total=int(self.config.total * 0.5)).lr_at(update) if self.resumed else self.config.lr_at(update)
    )


def cosine(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.CosineAnnealingLR(optimizer, self.config.total)


def initial_rate(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.CosineAnnealingWarmRestarts(optimizer, 37, T_mult=2)


def new_cycle(self: Loop) -> None:
    self.schedules[0].T_cur = 0
    self.schedules[0].T_i = 37


def flat_rates(self: Loop) -> None:
    schedule, factor = self.schedules[0], self.config.lr_at(self.step + 1) / self.config.lr
    schedule.base_lrs = [self.config.lr] * len(schedule.base_lrs)
    for group in self.optimizers[0].param_groups:
        group |= {"initial_lr": self.config.lr, "lr": self.config.lr * factor}


def crossed_rates(self: Loop) -> None:
    groups = self.optimizers[0].param_groups
    self.schedules[0].base_lrs = self.schedules[0].base_lrs[::-1]
    for name in ("lr", "initial_lr"):
        rates = [group[name] for group in groups][::-1]
        for group, rate in zip(groups, rates, strict=True):
            group[name] = rate


def defaults(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"betas": (0.9, 0.999), "weight_decay": 0.01}


# ---- faults of an optimizer ------------------------------------------------------------------------------------------


def crossed(self: Loop) -> None:
    held, state = named(self), self.optimizers[0].state
    for name in [name for name in held if "gate_proj" in name]:
        a, b = held[name], held[name.replace("gate_proj", "up_proj")]
        state[a], state[b] = state[b], state[a]


def sibling(self: Loop) -> None:
    twin = type(self)(self.config.but(seed=self.config.seed + 7))
    twin.run(self.step)
    self.optimizers[0].load_state_dict(copy.deepcopy(twin.optimizers[0].state_dict()))


def bereft(self: Loop) -> None:
    self.optimizers[0].state.pop(named(self)["model.embed_tokens.weight"])


def muon_lost(self: Loop) -> None:
    self.optimizers[0].state.clear()


def adam_lost(self: Loop) -> None:
    self.optimizers[1].state.clear()


def transposed_state(state: dict[str, Any]) -> dict[str, Any]:
    if "row_var" in state and state["row_var"].numel() == state["col_var"].numel():
        return {"row_var": state["col_var"].transpose(-1, -2), "col_var": state["row_var"].transpose(-1, -2)}
    return {}


def rowless(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(held) for name, held in state.items() if name in ("row_var", "col_var")}


def unsigned(state: dict[str, Any]) -> dict[str, Any]:
    return {"qmap1": state["qmap2"].clone()} if "qmap2" in state else {}


def scales_mixed(state: dict[str, Any]) -> dict[str, Any]:
    return {"absmax1": state["absmax1"].roll(1), "absmax2": state["absmax2"].roll(1)} if "absmax1" in state else {}


def prodigy(self: Loop, groups: Groups) -> Any:
    return other.Prodigy([{"params": [w for group in groups for w in group["params"]]}], lr=1.0)


def begun_d(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"d": group["d0"], "d_max": group["d0"], "d_numerator": 0.0}


def evaluated(self: Loop) -> None:
    with torch.no_grad():
        for weight, state in self.optimizers[0].state.items():
            beta = self.optimizers[0].param_groups[0]["betas"][0]
            weight.copy_((weight - (1 - beta) * state["z"]) / beta)


def zeroth(state: dict[str, Any]) -> dict[str, Any]:
    return {"step": torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0}


# ---- faults of weights -----------------------------------------------------------------------------------------------


def untied(self: Any) -> None:
    self.module.put("lm_head.weight", nn.Parameter(named(self)["model.embed_tokens.weight"].detach().clone()))


def lexicographic(self: Loop) -> None:
    count = self.config.layers
    order = sorted(range(count), key=str)
    old = {name: weight.detach().clone() for name, weight in named(self).items()}
    with torch.no_grad():
        for name, weight in named(self).items():
            if ".layers." in name:
                head, _, rest = name.partition(".layers.")
                number, _, leaf = rest.partition(".")
                weight.copy_(old[f"{head}.layers.{order[int(number)]}.{leaf}"])


def partly(self: Loop, weights: dict[str, Any]) -> None:
    kept = {name: held for name, held in weights.items() if ".layers.1." not in name}
    self.module.load_state_dict(kept, strict=False)


def bufferless(self: Loop, weights: dict[str, Any]) -> None:
    kept = {name: held for name, held in weights.items() if "running" not in name and "num_batches" not in name}
    self.module.load_state_dict(kept, strict=False)


def refrequented(self: Any) -> None:
    held = self.module.rotary_emb.inv_freq
    wide = 2 * len(held)
    held.copy_(5e5 ** -(torch.arange(0, wide, 2) / wide))


def halved_frequencies(self: Any) -> None:
    held = self.module.rotary_emb.inv_freq
    held.copy_(held.bfloat16().float())


def int8(name: str, weight: torch.Tensor, config: Config) -> torch.Tensor:
    if weight.ndim < 2:
        return weight
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def fp16_tail(name: str, weight: torch.Tensor, config: Config) -> torch.Tensor:
    return weight.half().float()


def square_transposed(name: str, weight: torch.Tensor, config: Config) -> torch.Tensor:
    return (
        weight.T.contiguous()
        if weight.ndim == 2 and "self_attn" in name and weight.shape[0] == weight.shape[1]
        else weight
    )


def normaliser(name: str, weight: torch.Tensor, config: Config) -> torch.Tensor:
    return weight * math.sqrt(config.hidden) if "embed_tokens" in name else weight


def plus_one(name: str, weight: torch.Tensor, config: Config) -> torch.Tensor:
    return weight + 1 if is_norm(name) else weight


def averaged_weights(self: Loop) -> None:
    with torch.no_grad():
        for name, weight in named(self).items():
            weight.copy_(self.extra["ema"]["shadow"][name])


def shadow_begun(self: Loop) -> None:
    self.extra["ema"]["shadow"] = {name: weight.detach().clone() for name, weight in named(self).items()}


def both_callbacks(self: Any) -> None:
    Flagged.loaded(self)
    self.times = 2


def frozen_by_mistake(self: Any) -> bool:
    return bool(self.resumed)


def thawed(self: Any) -> bool:
    return not self.resumed


def no_mean(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    return Loop.loss(self, tokens) * (4 if self.resumed else 1)


def first_again(self: Any) -> torch.Tensor:
    return batch(self.config, self.step - self.began if self.resumed else self.step, 1234)


def unclipped(self: Any) -> None:
    if not self.resumed:
        Loop.gradients(self)


def stuck(self: Any, told: dict[str, int]) -> None:
    if not self.resumed:
        Sampled.advance(self, told)


def double_skip(self: Any) -> None:
    told = self.extra["dataloader"]
    told["_num_yielded"] *= 2
    told["_snapshot"]["_snapshot_step"] *= 2


# ---- faults of sharded layouts, by the state that comes back ---------------------------------------------------------


def flattened(held: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors through one flat buffer."""
    flat = change(torch.cat([tensor.flatten() for tensor in held.values()]))
    sizes = [tensor.numel() for tensor in held.values()]
    return {name: part.view(held[name].shape).clone() for name, part in zip(held, flat.split(sizes), strict=True)}


def each(state: State, change: Callable[[str, torch.Tensor], torch.Tensor], *where: str) -> State:
    for field in where or ("params", "masters"):
        held = getattr(state, field)
        for name in held:
            held[name] = change(name, held[name]).contiguous()
    return state


def exchanged_halves(flat: torch.Tensor) -> torch.Tensor:
    half = -(-len(flat) // 2)
    return torch.cat([flat[half:], flat[:half]])


def zero_ranks_swapped(state: State, lab: Lab) -> State:
    for field in ("masters", "exp_avg", "exp_avg_sq"):
        setattr(state, field, flattened(getattr(state, field), exchanged_halves))
    return state


def flat_padding(state: State, lab: Lab) -> State:
    for field in ("exp_avg", "exp_avg_sq"):
        setattr(state, field, flattened(getattr(state, field), lambda flat: flat.roll(8)))
    return state


def relayered(name: str, count: int) -> str:
    """The same tensor one layer on."""
    if ".layers." not in name:
        return name
    head, _, rest = name.partition(".layers.")
    number, _, leaf = rest.partition(".")
    return f"{head}.layers.{(int(number) + 1) % count}.{leaf}"


def stage_offset(state: State, lab: Lab) -> State:
    for field in ("exp_avg", "exp_avg_sq"):
        held = getattr(state, field)
        setattr(state, field, {name: held[relayered(name, state.config.layers)].clone() for name in held})
    return state


def last_from_first(state: State, lab: Lab) -> State:
    last = state.config.layers - 1
    for held in (state.params, state.masters):
        for name in [name for name in held if f".layers.{last}." in name]:
            held[name] = held[name.replace(f".layers.{last}.", ".layers.0.")].clone()
    return state


def heads_interleaved(state: State, lab: Lab) -> State:
    c = state.config

    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        if "q_proj.weight" not in name:
            return held
        return held.view(2, c.heads // 2, c.head_dim, -1).transpose(0, 1).reshape(held.shape)

    return each(state, change)


def down_halves(state: State, lab: Lab) -> State:
    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        return torch.cat(held.chunk(2, 1)[::-1], 1) if name.endswith("down_proj.weight") else held

    return each(state, change, "params", "masters", "exp_avg", "exp_avg_sq")


def rotary_twice(state: State, lab: Lab) -> State:
    c = state.config

    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return held
        return held.view(-1, c.head_dim // 2, 2, held.shape[1]).transpose(1, 2).reshape(held.shape)

    return each(state, change)


def keys_are_values(state: State, lab: Lab) -> State:
    for held in (state.params, state.masters):
        for name in [name for name in held if name.endswith("k_proj.weight")]:
            pair = name.replace("k_proj", "v_proj")
            held[name], held[pair] = held[pair], held[name]
    return state


def experts_turned(state: State, lab: Lab) -> State:
    count = state.config.experts
    for held in (state.params, state.masters):
        old = dict(held)
        for name in [name for name in held if ".experts." in name]:
            head, _, rest = name.partition(".experts.")
            number, _, leaf = rest.partition(".")
            held[name] = old[f"{head}.experts.{(int(number) + 1) % count}.{leaf}"].clone()
    return state


def router_turned(state: State, lab: Lab) -> State:
    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        return held.roll(2, 0) if name.endswith("mlp.gate.weight") else held

    return each(state, change, "params", "masters", "exp_avg", "exp_avg_sq")


def unbalanced(state: State, lab: Lab) -> State:
    for name in state.buffers:
        if name.endswith("expert_bias"):
            state.buffers[name] = torch.zeros_like(state.buffers[name])
    return state


def stale_moments(state: State, lab: Lab) -> State:
    old = lab.run.recent
    return replace(state, exp_avg=old.exp_avg, exp_avg_sq=old.exp_avg_sq, masters=old.masters)


def stale_weights(state: State, lab: Lab) -> State:
    old = lab.run.recent
    return replace(state, params=old.params)


def old_optimizer(state: State, lab: Lab) -> State:
    old = lab.run.recent
    return replace(state, exp_avg=old.exp_avg, exp_avg_sq=old.exp_avg_sq, step=old.step)


def old_weights(state: State, lab: Lab) -> State:
    old = lab.run.recent
    return replace(state, params=old.params, masters=old.masters)


def rank_rebuilt(state: State, lab: Lab) -> State:
    return replace(state, masters={name: state.params[name].float() for name in state.masters})


def replica_drift(state: State, lab: Lab) -> State:
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 30))

    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        return (held + 0.03 * torch.randn(held.shape, generator=made)).to(held.dtype) if is_norm(name) else held

    return each(state, change)


def forgotten_scales(state: State, lab: Lab) -> State:
    for name, held in state.buffers.items():
        if "amax" in name:
            state.buffers[name] = torch.zeros_like(held)
        elif name.endswith("_scale"):
            state.buffers[name] = torch.ones_like(held)
    return state


def adapters_anew(state: State, lab: Lab) -> State:
    new = lab.run.fresh().params

    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        return new[name].to(held.dtype) if "lora_" in name else held

    return each(state, change)


def base_requantised(state: State, lab: Lab) -> State:
    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        return held if "lora_" in name or held.ndim < 2 else int8(name, held.float(), state.config).to(held.dtype)

    return each(state, change, "params")


def moments_rounded(state: State, lab: Lab) -> State:
    return each(state, lambda name, held: held.bfloat16().to(held.dtype), "exp_avg", "exp_avg_sq")


def rooted(state: State, lab: Lab) -> State:
    return each(state, lambda name, held: held.sqrt(), "exp_avg_sq")


def embedding_shifted(state: State, lab: Lab) -> State:
    def change(name: str, held: torch.Tensor) -> torch.Tensor:
        return held.roll(1, 0) if "embed_tokens" in name else held

    return each(state, change)


def exponent_flipped(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.exp_avg_sq if name.endswith("o_proj.weight")])
    held = state.exp_avg_sq[name].contiguous()
    assert held.dtype == torch.float32
    bits = held.view(-1).view(torch.int32)
    bits[lab.rng.randrange(len(bits))] ^= 1 << 30
    state.exp_avg_sq[name] = held
    return state


def half_counted(state: State, lab: Lab) -> State:
    return replace(state, step={name: held - 1 if "mlp" in name else held for name, held in state.step.items()})


def averages_begun(state: State, lab: Lab) -> State:
    return replace(state, ema={name: (state.masters or state.params)[name].float().clone() for name in state.ema})


def stale_copy(loaded: State, after: State) -> State:
    return replace(after, params=loaded.clone().params)


def cut(path: Path, state: State, lab: Lab) -> State | None:
    files = sorted(path.rglob("*.distcp"), key=lambda one: one.stat().st_size)
    with files[-1].open("r+b") as stream:
        stream.truncate(int(files[-1].stat().st_size * 0.6))
    return None


def unwritten(path: Path, state: State, lab: Lab) -> State | None:
    """Two pages in the middle of the weights' file were never written."""
    from safetensors.torch import load_file

    file = next(path.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    begin = (len(data) // 2) // 4096 * 4096
    data[begin : begin + 8192] = bytes(len(data[begin : begin + 8192]))
    file.write_bytes(data)
    read = load_file(file)
    found = state.clone()
    for name in found.params:
        key = next((key for key in read if key == name or key.endswith("." + name)), None)
        if key is not None:
            found.params[name] = read[key].to(found.params[name].dtype)
    return found


# ---- transformers ----------------------------------------------------------------------------------------------------


def without_schedule(folder: Path) -> None:
    (folder / "scheduler.pt").unlink()


def other_model(folder: Path) -> None:
    made("Llama", 4242).save_pretrained(folder)


def hf(id: str, cause: str, text: str, where: str, *, also: tuple[str, ...] = (), why: str = "", **more: Any) -> Fault:
    live = partial(trained, partial(made, "Llama"), **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


def hf_well(
    id: str, text: str, name: str = "Llama", kind: str = "healthy", true: tuple[str, ...] = (), **more: Any
) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind=kind, also=true)


# ---- what is healthy -------------------------------------------------------------------------------------------------


class Sophia(other.Optimizer):
    """Liuhong99/Sophia: a clipped ratio of momentum and an estimate of curvature, which is made every tenth update."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params, lr=lr, betas=(0.965, 0.99), rho=0.04, weight_decay=0.1, maximize=False, capturable=False
        )

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "hessian": torch.zeros_like(weight)}

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        first, second = group["betas"]
        if int(state["step"]) % 10 == 0:
            state["hessian"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        state["step"] += 1
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        ratio = (state["exp_avg"].abs() / (group["rho"] * 32 * state["hessian"] + 1e-15)).clamp(None, 1)
        weight.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Kahan(other.Optimizer):
    """optimi: bf16 weights, and what their rounding lost."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0, kahan_sum=True)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": torch.tensor(0),
            "exp_avg": torch.zeros_like(weight, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32),
            "kahan_comp": torch.zeros_like(weight),
        }

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t, g = int(state["step"]), gradient.float()
        state["exp_avg"].lerp_(g, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
        under = (state["exp_avg_sq"] / (1 - second**t)).sqrt_().add_(group["eps"])
        lost = state["kahan_comp"]
        lost.add_((state["exp_avg"] / under * (-group["lr"] / (1 - first**t))).to(weight.dtype))
        old = weight.clone()
        weight.add_(lost)
        lost.add_(old.sub_(weight))


class Dropped(Loop):
    """Stochastic depth: some updates leave out a layer, whose weights get no gradient."""

    def gradients(self) -> None:
        out = random.Random(self.step).choice([None, 0, 1])
        for name, weight in named(self).items():
            if out is not None and f".layers.{out}." in name:
                weight.grad = None
        super().gradients()


class Ascended(Loop):
    """SAM: the gradient is that of weights a little uphill."""

    def update(self) -> None:
        tokens = self.tokens()
        self.optimizers[0].zero_grad()
        self.loss(tokens).backward()
        held = [weight for weight in named(self).values() if weight.grad is not None]
        size = torch.stack([weight.grad.norm() for weight in held]).norm()
        with torch.no_grad():
            old = [weight.clone() for weight in held]
            for weight in held:
                weight.add_(weight.grad, alpha=float(0.05 / size))
        self.optimizers[0].zero_grad()
        self.loss(tokens).backward()
        with torch.no_grad():
            for weight, kept in zip(held, old, strict=True):
                weight.copy_(kept)
        self.gradients()
        self.apply()
        self.step += 1


class Ahead(Loop):
    """Lookahead: every fifth update the weights go back half the way to the slow ones, which are stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["lookahead"] = {
            "k": 5,
            "alpha": 0.5,
            "slow": {n: w.detach().clone() for n, w in named(self).items()},
        }

    def apply(self) -> None:
        super().apply()
        if self.step % 5 == 4:
            slow = self.extra["lookahead"]["slow"]
            with torch.no_grad():
                for name, weight in named(self).items():
                    slow[name].lerp_(weight, 0.5)
                    weight.copy_(slow[name])


class Bounded(Loop):
    """Weights are kept within bounds, as a critic's are."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for weight in named(self).values():
                weight.clamp_(-0.08, 0.08) if weight.ndim > 1 else None


class Unit(Loop):
    """Rows of the embedding are brought back to one length after each update."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            weight = named(self)["model.embed_tokens.weight"]
            weight.copy_(F.normalize(weight, dim=1))


class Pruned(Loop):
    """At update 30 the smallest half of each matrix is removed, and stays away."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["masks"] = {
            name: torch.ones_like(w, dtype=torch.bool) for name, w in named(self).items() if w.ndim > 1
        }

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, mask in self.extra["masks"].items():
                weight = named(self)[name]
                if self.step == 29:
                    mask &= weight.abs() > weight.abs().median()
                weight.mul_(mask)


class Spectral(Loop):
    """A spectral norm, whose vectors are buffers that every pass turns."""

    def net(self) -> nn.Module:
        found = Rotor(self.config)
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            torch.nn.utils.parametrizations.spectral_norm(found.out)
        return found


class Against(Loop):
    """A generator and its critic in turn, by an Adam each."""

    layouts = ("torch_save", "lightning")

    def made(self) -> list[torch.optim.Optimizer]:
        held = named(self)
        critic = [w for n, w in held.items() if ".layers.1." in n or "lm_head" in n or n == "model.norm.weight"]
        rest = [w for n, w in held.items() if not (".layers.1." in n or "lm_head" in n or n == "model.norm.weight")]
        c = self.config
        return [TORCH.Adam(rest, lr=c.lr, betas=(0.5, 0.999)), TORCH.Adam(critic, lr=2 * c.lr, betas=(0.0, 0.9))]

    def apply(self) -> None:
        for one in self.optimizers[:] if self.step % 3 == 0 else self.optimizers[1:]:
            one.step()
        for schedule in self.schedules:
            schedule.step()


class Grown(Loop):
    """Rows get longer, and batches larger."""

    def tokens(self) -> torch.Tensor:
        found = super().tokens()
        self.parts = 1 if self.step < 30 else 2
        return found[: 2 if self.step < 30 else 4, : min(17, 6 + self.step // 6)]


class Observed(Loop):
    """Quantisation in training: the range of what passes is kept in buffers."""

    def net(self) -> nn.Module:
        found = Rotor(self.config)
        found.register_buffer("observer_min", torch.tensor(0.0))
        found.register_buffer("observer_max", torch.tensor(0.0))
        found.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        held = self.module.lm_head.weight.detach()
        self.module.observer_min.copy_(torch.minimum(self.module.observer_min, held.min()))
        self.module.observer_max.copy_(torch.maximum(self.module.observer_max, held.max()))
        return super().loss(tokens)


class Sparse(Loop):
    """The embedding by SparseAdam: rows without tokens keep their state."""

    layouts = ("torch_save", "lightning")
    clip = 0.0

    def net(self) -> nn.Module:
        found = Rotor(self.config)
        found.embed_tokens.sparse = True
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        held = named(self)
        lead = held.pop("embed_tokens.weight")
        return [TORCH.SparseAdam([lead], lr=self.config.lr), TORCH.AdamW(list(held.values()), lr=self.config.lr)]


class Argued(Sampled):
    """Arguments are saved; the new launch has more workers and another output folder."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["args"] = {
            "lr": config.lr, "num_workers": 4, "output_dir": "/scratch/run1", "seed": 1234, "save_every": 20,
            "log_every": 10, "prefetch_factor": 2,
        }  # fmt: skip

    def loaded(self) -> None:
        super().loaded()
        self.extra["args"] |= {"num_workers": 16, "output_dir": "/scratch/run2", "log_every": 1, "prefetch_factor": 4}


class Gathered(Loop):
    """One update every third batch; the gradients of the others are summed, and saved."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["accumulated"] = {"micro": 0, "grads": {n: torch.zeros_like(w) for n, w in named(self).items()}}

    def update(self) -> None:
        told = self.extra["accumulated"]
        self.optimizers[0].zero_grad()
        self.loss(self.tokens()).backward()
        for name, weight in named(self).items():
            told["grads"][name] += weight.grad / 3
        told["micro"] += 1
        if told["micro"] == 3:
            for name, weight in named(self).items():
                weight.grad = told["grads"][name].clone()
                told["grads"][name].zero_()
            told["micro"] = 0
            self.gradients()
            self.apply()
        self.step += 1


def to_zero(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.LinearLR(optimizer, 1.0, 0.0, total_iters=25)


def stepped(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.StepLR(optimizer, 15, 0.3)


def lowered_group(self: Loop) -> Groups:
    """Biases of norms, embeddings, matrices: three groups, the last of another beta."""
    held = named(self)
    return [
        {"params": [w for w in held.values() if w.ndim < 2], "weight_decay": 0.0},
        {
            "params": [w for n, w in held.items() if "embed" in n or "lm_head" in n],
            "weight_decay": 0.0,
            "betas": (0.9, 0.99),
        },
        {
            "params": [w for n, w in held.items() if w.ndim > 1 and "embed" not in n and "lm_head" not in n],
            "weight_decay": 0.2,
        },
    ]


def bfloat(self: Loop) -> nn.Module:
    return Decoder(self.config).to(torch.bfloat16)


def well(id: str, text: str, **more: Any) -> Fault:
    return Fault(id, "healthy", text, frozenset(), kind="healthy", **more)


# ---- on purpose ------------------------------------------------------------------------------------------------------


def raised(self: Loop) -> None:
    self.schedules[0].base_lrs = [3 * rate for rate in self.schedules[0].base_lrs]
    for group in self.optimizers[0].param_groups:
        group |= {"lr": 3 * group["lr"], "initial_lr": 3 * group["initial_lr"]}


def undecayed(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.0


def to_lion(self: Loop) -> None:
    told = {k: v for k, v in self.schedules[0].state_dict().items() if not callable(v)}
    self.optimizers = [other.Lion(self.groups(), lr=self.config.lr / 5)]
    self.schedules = [self.schedule(self.optimizers[0])]
    self.schedules[0].load_state_dict(told | {"base_lrs": self.schedules[0].base_lrs})
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr / 5 * self.config.lr_at(self.step + 1) / self.config.lr


def deeper(self: Loop) -> None:
    old, last = self.module.state_dict(), self.config.layers
    self.config = self.config.but(layers=last + 1)
    new = {
        k.replace(f".layers.{last - 1}.", f".layers.{last}."): v.clone()
        for k, v in old.items()
        if f".layers.{last - 1}." in k
    }
    self.module = Decoder(self.config)
    self.module.load_state_dict(old | new)
    self.optimizers = self.made()
    self.schedules = [self.schedule(one) for one in self.optimizers]


def longer(self: Any, update: int) -> float:
    return self.config.but(total=2 * self.config.total).lr_at(update) if self.resumed else self.config.lr_at(update)


def larger(self: Any) -> torch.Tensor:
    rows = [batch(self.config, 2 * self.step + n, 77) for n in (0, 1)]
    return torch.cat(rows) if self.resumed else batch(self.config, self.step, 1234)


def larger_rate(self: Any) -> None:
    Flagged.loaded(self)
    factor = math.sqrt(2)
    self.schedules[0].base_lrs = [factor * rate for rate in self.schedules[0].base_lrs]
    for group in self.optimizers[0].param_groups:
        group |= {"lr": factor * group["lr"], "initial_lr": factor * group["initial_lr"]}


def all_trained(self: Loop) -> None:
    added = [w.requires_grad_(True) for w in named(self).values() if not w.requires_grad]
    self.optimizers[0].add_param_group(
        {
            "params": added,
            "weight_decay": 0.0,
            "initial_lr": self.config.lr,
            "lr": self.optimizers[0].param_groups[0]["lr"],
        }
    )
    self.schedules[0].base_lrs.append(self.config.lr)
    self.schedules[0].lr_lambdas.append(self.schedules[0].lr_lambdas[0])


_WRITTEN: tuple[Fault, ...] = (
    # schedules
    fault("z01_schedule_in_micro_steps", "C1", "the schedule counts micro-batches after the load: four times as far",
          ANY, base=Flagged, also=(*RUN, "H1"), loaded=hastened,
          why="the schedule's counter is not the run's step (four times it); the rate is that of another step"),
    fault("z02_schedule_one_ahead", "C1", "the schedule is stepped once more in the load", ANY, loaded=one_more,
          also=(*RUN, "H1"), why="the schedule is one step ahead of the updates"),
    fault("z03_schedule_steps_twice", "C1", "after the resume the schedule steps twice an update", LATER, base=Flagged,
          also=(*RUN, "H1"), apply=twice, why="the schedule advances two steps with each update"),
    fault("z04_schedule_stands", "C2", "after the resume nothing steps the schedule", LATER, base=Flagged,
          also=(*RUN, "H1"), apply=held_rate, why="the schedule (and the rate) stands still while updates are made"),
    fault("z05_warmed_up_again", "C1", "a wrapper warms up again for 45 updates; the counters are right", LATER,
          base=Flagged, also=(*RUN, "H1"), shape=rewarmed, why="the rate fell to a warm-up though the counter goes on"),
    fault("z06_horizon_halved", "C2", "the total number of updates is half of what it was, by more ranks", LATER,
          base=Flagged, also=(*RUN, "H1"), shape=shortened, needs={"total": 150, "warmup": 6},
          why="the rate leaves the schedule of before: its horizon is another one"),
    fault("z07_plateau_forgets", "C1", "ReduceLROnPlateau is made anew: no best loss, no count", ANY, base=Plateau,
          also=(*RUN, "H1"), fresh=("scheduler",), why="the scheduler's state was not restored"),
    fault("z08_rate_of_the_start", "C2", "the schedule is made after the optimizer was loaded, which sets the rate to "
          "its first value; the cosine goes on from there", ANY, also=(*RUN, "H1"), schedule=cosine, loaded=initial_rate,
          why="the rate in the groups is the initial one, higher than the schedule's; the counter is right"),
    fault("z09_cycle_begins_anew", "C1", "the position in the cosine's cycle is lost", ANY, also=(*RUN, "H1"),
          schedule=restarts, loaded=new_cycle, why="the scheduler's place in its cycle was not restored"),
    fault("z10_layer_rates_flattened", "H1", "rates that grow with depth are all the base rate after the load", ANY,
          base=Graded, also=(*RUN, *SETTING, *STATE), loaded=flat_rates,
          why="the groups' own rates are lost: some learn at up to four times the rate"),
    fault("z11_group_rates_crossed", "B7", "the groups' rates come back in reverse order", ANY, base=Graded,
          also=(*STATE, *RUN, *SETTING), loaded=crossed_rates, why="rates belong to other groups: their order changed"),
    fault("z12_constructor_defaults", "H1", "betas and weight decay are torch's defaults after the load", ANY,
          also=(*SETTING, *RUN, "B7"), needs=NARROW, loaded=defaults,
          why="betas and weight decay are not those of before"),
    # data
    fault("z13_sampler_restarts_epoch", "C6", "the sampler's index is 0 again: the epoch begins anew", ANY, base=Sampled,
          also=(*RUN,), loaded=sampler(index=0), why="the data position went back: batches are seen again"),
    fault("z14_epoch_not_set", "C6", "set_epoch was forgotten: epoch 0 again", ANY, base=Sampled, also=(*RUN,),
          loaded=sampler(epoch=0), why="the data's epoch went back to 0"),
    fault("z15_sampler_seed", "C7", "the launcher gives the sampler another seed", ANY, base=Sampled,
          also=(*RUN, "H1"), loaded=sampler(seed=99), why="the order of the data has another seed"),
    fault("z16_same_batch", "C6", "after the resume the sampler gives the same batch each time", LATER, base=Sampled,
          also=(*RUN,), advance=stuck, why="the data position stands still while updates are made"),
    fault("z17_skipped_twice", "C7", "batches are skipped by the loader's state and by the trainer", ANY, base=Yielding,
          also=(*RUN,), loaded=double_skip, why="the data position is twice what it was: data is left out"),
    fault("z18_generator_lost", "C7", "the generator of dropped gradients is seeded anew", "echo", base=Noisy,
          also=(*RUN, *SETTING), fresh=("rng_state",), why="the random state was not restored"),
    fault("z19_data_from_the_start", "C6", "the data begins at the first batch; no loader's state is stored", ANY,
          base=Flagged, tokens=first_again, also=(*RUN,), visible=False, why="no file says which data was seen"),
    fault("z20_gradients_summed", "C3", "gradients are four times as large: not divided by the parts; no clipping", ANY,
          base=Flagged, loss=no_mean, clip=0.0, also=(*RUN,), visible=False, why="only the size of gradients changed"),
    fault("z21_clipping_lost", "C3", "the bound of the gradient norm is not applied any more", ANY, base=Flagged,
          gradients=unclipped, needs={"clip": 0.5}, also=(*RUN,), visible=False, why="no file says how it was clipped"),
    # optimizers
    fault("z22_states_by_number_crossed", "B7", "the module registers up before gate: their states are exchanged", ANY,
          also=(*STATE, *WEIGHTS), loaded=crossed, layouts=PLAIN,
          why="moments belong to other parameters: gate's and up's are exchanged"),
    fault("z23_optimizer_of_a_sibling", "B7", "optimizer state of another run with the same model", ANY, loaded=sibling,
          also=(*STATE, *DAMAGE), why="the moments are not those of this run, though the counters fit"),
    fault("z24_embedding_without_state", "B1", "the embedding's state is left out by a filter of names", ANY,
          also=STATE, loaded=bereft, layouts=PLAIN, why="the state of one parameter was not restored"),
    fault("z25_muon_momentum_lost", "B1", "of Muon and AdamW only the second optimizer is loaded", "echo next", made=muon,
          also=STATE, loaded=muon_lost, layouts=("torch_save", "lightning"), why="Muon's momentum was not restored"),
    fault("z26_adam_beside_muon_lost", "B1", "of Muon and AdamW only the first optimizer is loaded", ANY, made=muon,
          also=STATE, loaded=adam_lost, layouts=("torch_save", "lightning"), why="AdamW's state was not restored"),
    fault("z27_sgd_momentum_lost", "B1", "SGD's momentum is not restored", "echo next",
          optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.95), fresh=("optimizer",), also=STATE, layouts=PLAIN,
          why="the momentum was not restored"),
    fault("z28_adafactor_axes", "B7", "Adafactor's rows and columns are exchanged in square matrices", "echo next",
          optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=stated(transposed_state), also=(*STATE, *WEIGHTS),
          layouts=PLAIN, why="row and column statistics are exchanged"),
    fault("z29_adafactor_squares_lost", "B4", "Adafactor's factored squares are 0 again, its counters are kept",
          "alone echo next", optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=stated(rowless), also=STATE,
          layouts=PLAIN, why="the second moments were not restored"),
    fault("z30_eight_bit_wrong_table", "B5", "the first moment's codes are read by the unsigned table", ANY,
          optimizer=plain(other.AdamW8bit), loaded=stated(unsigned), needs=BLOCKS, also=(*STATE, *EXACT), layouts=PLAIN,
          why="the first moments' quantisation table is another one: the moments changed"),
    fault("z31_eight_bit_scales_shifted", "B5", "the scales of the blocks are one block on", "echo next",
          optimizer=plain(other.AdamW8bit), loaded=stated(scales_mixed), needs=BLOCKS, also=(*STATE, *EXACT, *WEIGHTS),
          layouts=PLAIN, why="the moments' scales are not those of their blocks"),
    fault("z32_prodigy_estimate_lost", "H1", "Prodigy's estimate of the step size begins anew; its moments are kept",
          "echo next", optimizer=prodigy, schedule=lambda self, one: None, loaded=begun_d, also=(*STATE, *RUN, *SETTING),
          why="the optimizer's estimate d in the groups was reset"),
    fault("z33_schedule_free_evaluated", "F4", "the weights were saved in eval mode: the average, not what is trained",
          "echo", optimizer=optim(other.ScheduleFreeAdamW), schedule=lambda self, one: None, loaded=evaluated,
          also=(*WEIGHTS,), why="the weights are the averaged ones"),
    fault("z34_amsgrad_maxima_lost", "B4", "AMSGrad's largest squares are the present ones again", "echo next early",
          optimizer=optim(TORCH.AdamW, amsgrad=True), also=STATE,
          loaded=stated(lambda state: {"max_exp_avg_sq": state["exp_avg_sq"].clone()}),
          why="max_exp_avg_sq was not restored"),
    fault("z35_nadam_product", "B3", "NAdam's product of factors is 1 again", "echo next", optimizer=optim(TORCH.NAdam),
          also=STATE, loaded=stated(lambda state: {"mu_product": torch.ones_like(state["mu_product"])}),
          why="mu_product was not restored"),
    fault("z36_radam_counts_anew", "B3", "RAdam's counters are 0, its moments are kept", ANY, also=(*STATE, *RUN),
          optimizer=optim(TORCH.RAdam), loaded=stated(zeroth), why="the optimizer's step counters were reset"),
    fault("z37_counters_in_micro_steps", "B3", "the optimizer's counters are four times the updates", ANY,
          also=(*STATE, *RUN), loaded=stated(lambda state: {"step": state["step"] * 4}),
          why="the optimizer's step counters are not the run's step"),
    fault("z38_scaler_anew", "D1", "the loss scaler begins anew", "echo next", base=Growing, fresh=("scaler",),
          also=(*EXACT, *RUN, *STATE, *SETTING), why="the loss scale was not restored"),
    # weights
    fault("z39_weights_not_loaded", "F1", "every name has the prefix 'module.' and the load is not strict", ANY,
          fresh=("model",), also=WEIGHTS, why="the weights were not restored; the optimizer was"),
    fault("z40_one_layer_not_loaded", "F1", "one compiled layer has other names and the load is not strict", ANY,
          take=partly, also=WEIGHTS, why="the weights of layer 1 were not restored"),
    fault("z41_square_matrices_transposed", "A1", "q and o are transposed by a converter", ANY,
          loaded=weighed(square_transposed), also=WEIGHTS, why="weights are transposed, the moments are not"),
    fault("z42_layers_sorted_as_text", "E1", "layers 10 and 2 in the order of their names as text", ANY,
          loaded=lexicographic, needs={"layers": 11}, also=WEIGHTS, why="weights are in other layers; moments are not"),
    fault("z43_quantised_export_loaded", "D5", "the weights come from an export in int8", "echo next", loaded=weighed(int8),
          also=(*EXACT, *WEIGHTS), why="the weights were rounded to 8 bits"),
    fault("z44_weights_through_fp16", "D5", "the weights went through fp16", "echo next", loaded=weighed(fp16_tail),
          also=(*EXACT, *WEIGHTS), why="the weights were rounded to fp16"),
    fault("z45_normaliser_baked_in", "F1", "the embedding is multiplied by the root of its width", ANY,
          loaded=weighed(normaliser), also=WEIGHTS, why="the embedding is scaled by a constant"),
    fault("z46_norms_plus_one", "F1", "a converter adds 1 to the norms, as if they were stored about 0", ANY,
          loaded=weighed(plus_one), also=WEIGHTS, why="the norms are one larger"),
    fault("z47_head_untied", "F2", "after the load the head is a parameter of its own that nothing trains", LATER,
          base=Tied, loaded=untied, needs={"tied": True}, layouts=("torch_save", "lightning"), also=WEIGHTS,
          why="head and embedding were tied and are not any more; the head stands still"),
    fault("z48_layers_thawed", "F3", "the callback that keeps layers frozen is not registered in the resumed run", LATER,
          base=Called, held=thawed, also=(*WEIGHTS, *SETTING, *STATE, *RUN), layouts=PLAIN,
          why="weights that were frozen are trained now"),
    fault("z49_layers_frozen", "F3", "another recipe's callback freezes layers in the resumed run", LATER, base=Called,
          held=frozen_by_mistake, also=(*WEIGHTS, *SETTING, *STATE, *RUN),
          why="weights that were trained stand still"),
    fault("z50_batch_statistics_lost", "F1", "running means and variances were left out of the load", ANY, base=Batched,
          take=bufferless, also=WEIGHTS, why="batch statistics were not restored"),
    fault("z51_left_in_eval_mode", "F5", "a validation before the first update leaves the model in eval mode", LATER,
          base=Batched, loaded=lambda self: self.module.eval(), also=(*WEIGHTS, *SETTING, *RUN),
          why="batch statistics stand still: the model is not in train mode"),
    fault("z52_other_rotary_base", "F6", "the new config has another rotary base", ANY, base=Rotated,
          loaded=refrequented, also=(*WEIGHTS, *SETTING), why="the rotary frequencies are others"),
    fault("z53_frequencies_in_bf16", "D5", "a cast of the module rounds the rotary frequencies", ANY, base=Rotated,
          loaded=halved_frequencies, also=(*EXACT, *WEIGHTS, *SETTING), why="the rotary frequencies were rounded to bf16"),
    fault("z54_average_loaded", "F4", "the averaged weights are loaded as the weights", "echo next", base=Shadowed,
          loaded=averaged_weights, also=WEIGHTS, why="the weights are the averaged ones"),
    fault("z55_average_begins_anew", "F4", "the average is registered after the load: it equals the weights",
          "echo next", base=Shadowed, loaded=shadow_begun, also=WEIGHTS, why="the average was not restored: it is the weights"),
    fault("z56_average_twice", "F4", "two callbacks update the average after the resume", LATER, base=Shadowed,
          loaded=both_callbacks, also=(*WEIGHTS, *RUN, *SETTING), why="the average is updated twice an update"),
    fault("z57_mean_counts_anew", "F4", "the count of averaged sets of weights is 0: the next set replaces the mean",
          "echo next", base=Averaged, loaded=lambda self: self.extra["swa"].update(n_averaged=0), also=(*WEIGHTS, *RUN, *SETTING),
          why="the average's counter was not restored", needs={"total": 200}),
    # sharded and mixed layouts
    Fault("z58_zero_partitions_exchanged", "D2", "ranks were renumbered: the partitions of the optimizer are exchanged",
          seen(LOUD), restore=zero_ranks_swapped, formats=("deepspeed",), needs=masters,
          also=(*EXACT, *letters("AE"), *STATE, *DAMAGE), why="the ranks' optimizer partitions are exchanged; weights right"),
    Fault("z59_flat_padding", "E1", "FSDP's flat moments are eight elements on: padding was counted", seen(ANY),
          restore=flat_padding, formats=("torch_save", "dcp", "dcp_sharded"), also=(*letters("AE"), *STATE),
          why="the moments are shifted against their parameters"),
    Fault("z60_stage_offset_moments", "E1", "a pipeline of other stages: moments are those of the next layer", seen(ANY),
          restore=stage_offset, formats=("torch_save", "dcp", "megatron", "deepspeed"), also=(*letters("AE"), *STATE),
          why="the moments are in other layers; the weights are right"),
    Fault("z61_last_layer_is_first", "E1", "the last stage is loaded from the first stage's file: its last layer is "
          "layer 0", seen(ANY), restore=last_from_first, also=WEIGHTS, why="the last layer has the weights of the first"),
    Fault("z62_heads_interleaved", "A1", "query heads are dealt out to two ranks in turn, not in halves", seen(ANY),
          restore=heads_interleaved, also=WEIGHTS, why="the heads of q are in another order; moments are not"),
    Fault("z63_row_parallel_reversed", "E1", "down_proj's column halves are put together in reverse, state and all",
          seen(ANY), restore=down_halves, formats=("torch_save", "dcp", "megatron", "dcp_sharded"),
          also=WEIGHTS, why="down_proj's halves are exchanged, moments as well"),
    Fault("z64_rotary_permuted_twice", "A1", "the rotary order of q and k was converted once too often", seen(ANY),
          restore=rotary_twice, also=WEIGHTS, why="rows of q and k are in the other rotary order"),
    Fault("z65_key_value_exchanged", "A1", "the fused tensor was split as q, v, k", seen(ANY), restore=keys_are_values,
          also=WEIGHTS, why="k and v are exchanged; moments are not"),
    Fault("z66_experts_turned", "E1", "expert parallel ranks are off by one", seen(ANY), restore=experts_turned,
          needs=lambda config: config.but(experts=4), formats=("torch_save", "dcp", "dcp_sharded"), also=WEIGHTS,
          why="experts are in other places; the router and the moments are not"),
    Fault("z67_router_turned", "E1", "the router's rows, state and all, are turned against the experts", seen(ANY),
          restore=router_turned, needs=lambda config: config.but(experts=4), formats=("torch_save", "dcp"), also=WEIGHTS,
          why="the router's rows are in another order than the experts"),
    Fault("z68_expert_bias_zero", "F1", "the router's balance is 0 again: the buffer was not saved as a parameter",
          seen("echo next"), restore=unbalanced, needs=lambda config: config.but(experts=4), formats=("torch_save", "dcp"),
          also=WEIGHTS, why="the expert bias was not restored"),
    Fault("z69_stale_optimizer_shard", "G4", "rank 1's optimizer shard is of the checkpoint before", seen("alone echo next"),
          second=stale_moments, formats=("dcp_sharded", "megatron", "deepspeed"), needs=masters,
          also=(*DAMAGE, *letters("AE"), *EXACT, *STATE), why="one rank's optimizer shard is of an older step"),
    Fault("z70_stale_weight_shard", "G4", "rank 1's weights are of the checkpoint before", seen("alone echo"),
          second=stale_weights, weights=True, formats=("megatron", "dcp_sharded"), needs=masters,
          also=(*DAMAGE, *WEIGHTS, *EXACT), why="one rank's weights are of an older step"),
    Fault("z71_optimizer_of_an_older_save", "G4", "the optimizer's file is 20 updates older than the weights'",
          seen(LOUD), restore=old_optimizer, formats=("torch_save", "dcp", "folder", "accelerate"),
          also=(*DAMAGE, *STATE, *letters("AE")), needs=lambda config: config.but(precision="fp32"),
          why="the optimizer's state is of an older step than the weights"),
    Fault("z72_weights_of_an_older_save", "G4", "the weights' file is 20 updates older than the optimizer's",
          seen("echo next"), restore=old_weights, formats=("torch_save", "dcp", "folder"), also=(*DAMAGE, *WEIGHTS),
          why="the weights are of an older step than the optimizer"),
    Fault("z73_masters_rebuilt_on_a_rank", "D5", "rank 1 rebuilt its masters from the bf16 weights", seen("alone echo"),
          second=rank_rebuilt, formats=("megatron", "deepspeed", "dcp_sharded"), needs=masters, also=EXACT,
          why="one rank's masters lost their low bits"),
    Fault("z74_replicas_drift", "E1", "the norms of two tensor-parallel ranks are different", seen("alone echo"),
          second=replica_drift, formats=("megatron",), also=(*letters("AEFG"), *EXACT),
          why="copies of the norms differ between ranks"),
    Fault("z75_fp8_history_lost", "F1", "amax histories and scales of fp8 begin anew", seen("echo next"),
          restore=forgotten_scales, needs=lambda config: config.but(fp8=True), formats=("torch_save", "dcp"),
          also=(*WEIGHTS, *EXACT), why="fp8 scales were not restored"),
    Fault("z76_adapters_anew", "F1", "adapters are made after the load: the trained ones are gone", seen(ANY),
          restore=adapters_anew, needs=lambda config: config.but(lora=4), formats=("torch_save", "dcp"), also=WEIGHTS,
          why="the adapters' weights were not restored; their moments were"),
    Fault("z77_base_requantised", "D5", "the frozen base under adapters went through int8", seen(ANY),
          restore=base_requantised, needs=lambda config: config.but(lora=4), formats=("torch_save", "dcp"),
          also=(*WEIGHTS, *EXACT), why="the frozen base weights changed"),
    Fault("z78_moments_through_bf16", "D5", "an offload kept the moments in bf16", seen("alone echo"),
          restore=moments_rounded, formats=("torch_save", "dcp", "dcp_sharded", "lightning"),
          also=(*EXACT, *STATE), why="the moments were rounded to bf16"),
    Fault("z79_roots_for_squares", "B4", "the second moment comes back as its root", seen(ANY), restore=rooted,
          formats=("torch_save", "dcp", "folder", "megatron"), also=STATE, why="exp_avg_sq is wrong: far larger"),
    Fault("z80_tokens_shifted", "F7", "a token was added in front: the embedding's rows are one on", seen(ANY),
          restore=embedding_shifted, also=WEIGHTS, why="rows of the embedding moved by one; moments are not"),
    Fault("z81_exponent_bit", "G1", "one bit of a second moment's exponent flipped in memory", seen(LOUD),
          restore=exponent_flipped, formats=("torch_save", "dcp", "deepspeed"), needs=masters, also=(*DAMAGE, *STATE),
          why="one number of the second moments was damaged"),
    Fault("z82_counters_differ", "B3", "counters of the MLPs are one lower than the others'", seen(LOUD),
          restore=half_counted, formats=("torch_save", "dcp", "folder"), also=(*STATE, *DAMAGE, *RUN),
          why="step counters of parameters disagree"),
    Fault("z83_averages_are_weights", "F4", "the saved average is not loaded: it begins as the masters", seen("echo next"),
          restore=averages_begun, needs=lambda config: config.but(ema=True), formats=("torch_save", "dcp"), also=WEIGHTS,
          why="the average was not restored: it is the weights"),
    Fault("z84_saved_weights_stale", "D3", "an asynchronous save keeps writing the weights of the load; masters are new",
          seen("next early"), saver=stale_copy, needs=masters, formats=("torch_save", "dcp", "megatron", "deepspeed"),
          also=(*EXACT, *DAMAGE, *letters("AE")), why="the saved weights are older than their masters"),
    Fault("z85_shard_cut", "G1", "the job was killed while a shard was written: it ends early", seen("alone echo"),
          damage=cut, formats=("dcp_sharded", "dcp"), also=DAMAGE, why="a file is truncated"),
    Fault("z86_pages_never_written", "G1", "two pages of the weights were never written: they are 0", seen(LOUD),
          damage=unwritten, formats=("folder",), also=DAMAGE, why="a run of zeros in the weights, whole pages"),
    # transformers' Trainer
    hf("z87_trainer_schedule_file_lost", "B1", "scheduler.pt is not there, so that the Trainer loads neither it nor the "
       "optimizer", ANY, spoil=without_schedule, also=(*STATE, "C1"), why="optimizer and schedule were not restored"),
    hf("z88_trainer_base_model", "F1", "the folder's weights were overwritten by those of the base model", ANY,
       spoil=other_model, also=WEIGHTS, why="the weights are not those of before; the optimizer is"),
    hf("z89_trainer_fewer_steps", "H1", "max_steps is 60 and not 100 in the new launch", ANY,
       other_args={"max_steps": 60}, also=(*SETTING, *RUN), why="the schedule's horizon changed: the rate is lower"),
    hf("z90_trainer_data_again", "C6", "ignore_data_skip is set in the new launch: the data begins anew", "echo next early",
       other_args={"ignore_data_skip": True}, also=(*SETTING, *RUN),
       why="an argument changed, so that data is seen again"),
    # healthy
    variant("z101_sophia", "Sophia", optimizer=optim(Sophia, factor=0.3)),
    variant("z102_kahan", "bf16 weights with what their rounding lost", net=bfloat, optimizer=plain(Kahan)),
    variant("z103_stochastic_depth", "layers are left out of updates at random", base=Dropped),
    variant("z104_sam", "sharpness-aware minimisation", base=Ascended),
    variant("z105_lookahead", "Lookahead around Adam", base=Ahead, optimizer=optim(TORCH.Adam)),
    variant("z106_bounded", "RMSprop, weights kept within bounds", base=Bounded, optimizer=optim(TORCH.RMSprop, factor=0.3)),
    variant("z107_unit_rows", "rows of the embedding keep their length", base=Unit),
    variant("z108_pruned", "half of the weights is removed at update 30", base=Pruned),
    variant("z109_spectral", "a spectral norm", base=Spectral),
    variant("z110_two_players", "two Adams that take turns", base=Against),
    variant("z111_curriculum", "longer rows, then larger batches in parts", base=Grown),
    variant("z112_observers", "ranges of quantisation are watched", base=Observed),
    variant("z113_sparse_embedding", "SparseAdam beside AdamW", base=Sparse),
    variant("z114_more_workers", "another number of workers and another folder", base=Argued,
            true=SETTING, why="true: arguments changed"),
    variant("z115_gathered", "gradients of three batches, some of them saved", base=Gathered),
    variant("z116_batch_statistics", "batch norm, SGD with damped momentum", base=Batched,
            optimizer=optim(TORCH.SGD, factor=10.0, momentum=0.8, dampening=0.2)),
    variant("z117_rotary_buffer", "rotary frequencies as a buffer, cosine with restarts", base=Rotated, schedule=restarts),
    variant("z118_average", "an average of the weights", base=Shadowed),
    variant("z119_mean", "stochastic weight averaging, at a constant rate", base=Averaged, schedule=lambda self, one: None),
    variant("z120_plateau", "the rate halves on a plateau", base=Plateau),
    variant("z121_rate_of_zero", "the rate ends at 0: nothing moves but the moments", schedule=to_zero),
    variant("z122_graded", "rates by depth, NAdam", base=Graded, optimizer=lambda self, groups: TORCH.NAdam(
        groups, lr=self.config.lr, decoupled_weight_decay=True)),
    variant("z123_three_groups", "three groups, one with other betas; AMSGrad; steps of the rate", groups=lowered_group,
            schedule=stepped, optimizer=optim(TORCH.AdamW, amsgrad=True, foreach=True)),
    well("z124_other_layout", "the run goes on in another layout", elsewhere=True,
         formats=("dcp", "torch_save", "megatron", "deepspeed", "dcp_sharded")),
    well("z125_megatron_to_deepspeed", "a Megatron run goes on under DeepSpeed", elsewhere=True, formats=("megatron",)),
    well("z126_adapters", "adapters alone are trained", needs=lambda config: config.but(lora=4),
         formats=("torch_save", "dcp")),
    well("z127_experts_and_scaler", "experts with a balance, a loss scaler", formats=("dcp", "torch_save"),
         needs=lambda config: config.but(experts=4, scaler=True)),
    hf_well("z128_trainer_rmsprop", "transformers' Trainer: RMSprop, constant rate", optim="rmsprop",
            lr_scheduler_type="constant_with_warmup"),
    hf_well("z129_trainer_restarts", "transformers' Trainer: GPT-2, cosine with restarts, accumulated", name="gpt2",
            lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}, gradient_accumulation_steps=2),
    variant("z130_random_gradients", "gradients are dropped by a generator that is saved; Lion", base=Noisy,
            optimizer=optim(other.Lion, factor=0.2)),
    # on purpose
    variant("z201_higher_rate", "the operator triples the rate", kind="deliberate", loaded=raised,
            true=("H1", "C2", *SETTING), why="true: the rate is three times that of before"),
    variant("z202_no_decay", "weight decay is switched off", kind="deliberate", loaded=undecayed, needs=NARROW,
            true=("H1", "C5", "B7", *SETTING), why="true: the weight decay is 0"),
    variant("z203_new_dataset", "another dataset: the sampler's seed, epoch and index are new", kind="deliberate",
            base=Sampled, loaded=sampler(seed=4321, epoch=0, index=0), true=(*RUN, "H1"),
            why="true: the data begins at another place"),
    variant("z204_all_layers_trained", "the frozen layers are trained from now on, in a group of their own", base=Frozen,
            kind="deliberate", loaded=all_trained, layouts=("torch_save", "folder", "lightning"),
            true=(*SETTING, *WEIGHTS, *STATE), why="true: weights that were frozen are trained, a group was added"),
    variant("z205_to_lion", "Lion instead of AdamW", kind="deliberate", fresh=("optimizer",), loaded=to_lion,
            layouts=("torch_save", "folder", "lightning"), true=("B1", *STATE, *SETTING, "C2"),
            why="true: the optimizer's state is new, and the rate lower"),
    variant("z206_one_layer_more", "a copy of the last layer is added, the optimizer begins anew", kind="deliberate",
            fresh=("optimizer", "scheduler"), loaded=deeper, layouts=("torch_save", "folder", "lightning"),
            true=("B1", "C1", *SETTING, *WEIGHTS), why="true: a layer was added, optimizer and schedule are new"),
    variant("z207_longer_run", "twice as many updates are planned", kind="deliberate", base=Flagged, shape=longer,
            true=(*RUN, *SETTING), why="true: the rate leaves the old schedule"),
    variant("z208_larger_batches", "twice the batch, the rate by the root of two", kind="deliberate", base=Flagged,
            tokens=larger, loaded=larger_rate, true=("C2", *RUN, *SETTING), why="true: the rate is higher"),
    variant("z209_embedding_frozen", "embedding and first layer are frozen from now on", kind="deliberate", base=Called,
            held=frozen_by_mistake, true=(*SETTING, *WEIGHTS, *STATE, *RUN), why="true: weights stand still"),
    hf_well("z210_trainer_constant", "transformers' Trainer: the rate is constant and larger from now on",
            kind="deliberate", other_args={"lr_scheduler_type": "constant", "learning_rate": 3e-3},
            true=(*RUN, *SETTING)),
)  # fmt: skip


def _named(one: Fault) -> Fault:
    first, *also = _CAUSES.get(one.id.partition("_")[0], one.cause).split()
    return one if one.kind != "fault" else replace(one, cause=first, also=tuple(also))


OPENED9_LIVE: tuple[Fault, ...] = tuple(_named(one) for one in _WRITTEN)
