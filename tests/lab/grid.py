"""Faults of a load by construction: every stored quantity × what its values became × which part of it.

::

    quantity   weights  masters  exp_avg  codes  averages  counters  lr  schedule  scaler …
    form       zero  of another  reordered  scaled  rounded  older  of another run  not finite  shifted …
    part       all  one  a layer  a kind  the rows of a rank

A cell changes the content of one ``torch.save`` file: before as it is, the echo with the change. Its answers follow
from the definitions of the causes in the catalogue, by quantity and form alone: :data:`ANSWERS`.
``python -m tests.lab.grid [WORDS …]`` runs the cells whose name has all of the words, and lists the wrong ones.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.live import Loop
from tests.lab.model import is_norm
from tests.lab.run import run
from tests.lab.save_torch import content

__all__ = ["ANSWERS", "Cell", "Result", "cells", "healthy_cells", "judge"]

Path_ = tuple[Any, ...]
Places = Callable[[dict[str, Any]], Iterable[Path_]]
Change = Callable[["Slot"], torch.Tensor | None]
SMALL = Config(layers=2, hidden=32, ffn=96, heads=4, groups=2, vocab=60, padded=64, resume=60, warmup=10, total=200)
WIDE = SMALL.but(hidden=64, ffn=192)  # codes need a thousand elements


@dataclass(frozen=True)
class Base:
    """A run's file, with the states that forms draw on.

    Attributes:
        saved: the content of the file; before, ahead: a few updates earlier and later; foreign: of another run.
        begun: of a process that has made no update; its optimizer's state is zeros where it begins as such.
        names: number of a parameter in the optimizer → its name.
    """

    name: str
    saved: dict[str, Any]
    earlier: dict[str, Any]
    ahead: dict[str, Any]
    foreign: dict[str, Any]
    begun: dict[str, Any]
    names: dict[int, str]


@dataclass(frozen=True)
class Slot:
    """A tensor of a quantity: its place in the file, its parameter, and the others of the same quantity."""

    base: Base
    at: Path_
    name: str
    others: Sequence[Path_] = ()
    twin: Path_ | None = None

    @property
    def old(self) -> torch.Tensor:
        return get(self.base.saved, self.at)

    def of(self, state: Mapping[str, Any]) -> torch.Tensor | None:
        try:
            found = get(state, self.at)
        except (KeyError, IndexError):
            return None
        return found.to(self.old.dtype) if found.shape == self.old.shape else None


def get(state: Any, at: Path_) -> Any:
    for word in at:
        state = state[word]
    return state


def put(state: Any, at: Path_, value: Any) -> None:
    owner = get(state, at[:-1])
    if value is None:
        del owner[at[-1]]
    else:
        owner[at[-1]] = value


# ---- bases -----------------------------------------------------------------------------------------------------------


class _Loop(Loop):
    """AdamW, and running statistics beside the weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.module.add_module("norm_in", torch.nn.BatchNorm1d(config.hidden, affine=False))

    def apply(self) -> None:
        super().apply()
        noise = torch.Generator().manual_seed(self.step + 7)
        for name, buffer in self.module.named_buffers():
            if not buffer.is_floating_point():
                buffer += 1
                continue
            drawn = torch.randn(buffer.shape, generator=noise)
            buffer.lerp_(drawn if name.endswith("mean") else 2 + drawn.abs(), 0.1)


class _Adamax(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return torch.optim.AdamW(groups, lr=self.config.lr, betas=self.config.betas, amsgrad=True)


class _Momentum(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


class _Belief(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return other.AdaBelief(groups, lr=1e-3)


class _RMSprop(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True)


class _Adafactor(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return torch.optim.Adafactor(groups, lr=1e-2)


class _Prodigy(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return other.Prodigy(groups, lr=1.0)


class _Eight(_Loop):
    def optimizer(self, groups: Any) -> Any:
        return other.AdamW8bit(groups, lr=1e-3)


_LOOPS: dict[str, tuple[type[Loop], Config]] = {
    "adamw": (_Adamax, SMALL.but(precision="fp32", tied=False)),
    "sgd": (_Momentum, SMALL.but(precision="fp32")),
    "adabelief": (_Belief, SMALL.but(precision="fp32")),
    "rmsprop": (_RMSprop, SMALL.but(precision="fp32")),
    "adafactor": (_Adafactor, SMALL.but(precision="fp32")),
    "prodigy": (_Prodigy, SMALL.but(precision="fp32")),
    "eight": (_Eight, WIDE.but(precision="fp32")),
}
_RUNS: dict[str, Config] = {
    "masters": SMALL.but(ema=True, scaler=True, tied=False, clip=0.0),
    "adapters": SMALL.but(lora=4, precision="fp32"),
    "experts": SMALL.but(experts=4, precision="fp32", fp8=False),
}
AHEAD = 3


@cache
def base(name: str) -> Base:
    if name in _LOOPS:
        kind, config = _LOOPS[name]
        torch.manual_seed(3)
        loop, stranger = kind(config), kind(config.but(seed=config.seed + 5))
        begun = copy.deepcopy(kind(config.but(seed=config.seed + 1)).content())
        loop.run(config.resume - 20)
        states = [copy.deepcopy(loop.content())]
        for updates in (20, AHEAD):
            loop.run(updates)
            states.append(copy.deepcopy(loop.content()))
        stranger.run(config.resume)
        held = {id(weight): name for name, weight in loop.module.named_parameters()}
        names = [held[id(one)] for group in loop.optimizers[0].param_groups for one in group["params"]]
        extra = {"rng_state": torch.get_rng_state()}
        return Base(
            name,
            states[1] | extra,
            states[0] | extra,
            states[2] | extra,
            copy.deepcopy(stranger.content()) | extra,
            begun | extra,
            dict(enumerate(names)),
        )
    config = _RUNS[name]
    made = run(config)
    states = [made.resumed, made.at(config.resume - 20), made.at(config.resume - 1)]
    stranger = run(config.but(seed=config.seed + 5)).resumed
    order = [name for _, names in made.resumed.groups() for name in names]
    kept = [copy.deepcopy(content(state)) for state in (*states, stranger, made.fresh())]
    return Base(name, *kept, dict(enumerate(order)))


# ---- quantities ------------------------------------------------------------------------------------------------------

#: Quantity → bases that have it, and whose answers it takes.
TENSORS: dict[str, tuple[tuple[str, ...], str]] = {
    "weights": (("adamw", "sgd"), "weights"),
    "trained": (("masters",), "trained"),  # weights and masters alike
    "everything": (("adamw", "masters"), "everything"),
    "copies": (("masters",), "copies"),  # 16-bit weights alone
    "masters": (("masters",), "masters"),
    "exp_avg": (("adamw", "masters", "adabelief"), "first"),
    "momentum_buffer": (("sgd",), "momentum"),
    "exp_avg_sq": (("adamw", "masters"), "second"),
    "max_exp_avg_sq": (("adamw",), "largest"),
    "exp_avg_var": (("adabelief",), "second"),
    "square_avg": (("rmsprop",), "second"),
    "grad_avg": (("rmsprop",), "first"),
    "momenta": (("rmsprop",), "momentum"),
    "factors": (("adafactor",), "second"),
    "estimates": (("prodigy",), "state"),
    "moments": (("adamw", "masters"), "moments"),
    "codes": (("eight",), "codes"),
    "absmax": (("eight",), "codes"),
    "averages": (("masters",), "averages"),
    "buffers": (("adamw", "experts"), "buffers"),
    "adapters": (("adapters",), "adapters"),
    "base": (("adapters",), "base"),
}
_STATES = {
    "exp_avg": ("exp_avg",),
    "momentum_buffer": ("momentum_buffer",),
    "exp_avg_sq": ("exp_avg_sq",),
    "exp_avg_var": ("exp_avg_var",),
    "max_exp_avg_sq": ("max_exp_avg_sq",),
    "masters": ("master_param",),
    "trained": ("master_param",),
    "moments": ("exp_avg", "exp_avg_sq"),
    "everything": ("master_param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "square_avg": ("square_avg",),
    "grad_avg": ("grad_avg",),
    "momenta": ("momentum_buffer",),
    "factors": ("row_var", "col_var", "variance"),
    "estimates": ("s", "p0"),
    "codes": ("state1", "state2"),
    "absmax": ("absmax1", "absmax2"),
}
_MODEL = ("weights", "trained", "everything", "copies", "adapters", "base")


def slots(base: Base, quantity: str) -> list[Slot]:
    """Return the tensors of a quantity, each with those that could be taken for it."""
    saved, found = base.saved, []
    trained = set(base.names.values())
    if quantity in _MODEL:
        chosen = [name for name in saved["model"] if name in trained]
        if quantity == "base":
            chosen = [name for name in saved["model"] if name not in trained]
        found += [(("model", name), name) for name in chosen]
    if quantity == "buffers":
        known = ("running_mean", "running_var", "expert_bias")
        found += [(("model", name), name) for name in saved["model"] if name.endswith(known)]
    if quantity == "averages":
        found += [(("ema", name), name) for name in saved["ema"]]
    for number, name in base.names.items():
        state = saved["optimizer"]["state"].get(number, {})
        found += [(("optimizer", "state", number, word), name) for word in _STATES.get(quantity, ()) if word in state]
    numbers = {name: number for number, name in base.names.items()}
    made = []
    for at, name in found:
        others = [
            place
            for place, _ in found
            if place != at and (place[-1] == at[-1] or at[0] != "optimizer") and place[0] == at[0]
            if get(saved, place).shape == get(saved, at).shape
        ]
        twin: Path_ | None = ("model", name) if at[-1] == "master_param" else None
        if quantity == "copies":
            twin = ("optimizer", "state", numbers[name], "master_param")
        made.append(Slot(base, at, name, others, twin))
    return made


# ---- parts -----------------------------------------------------------------------------------------------------------

ONE = "layers.1.mlp.down_proj"
PARTS: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "one": lambda name: ONE in name,
    "layer": lambda name: ".layers.1." in name,
    "kind": lambda name: "mlp.up_proj" in name or name.endswith("running_mean"),
    "norms": is_norm,
    "table": lambda name: "embed_tokens" in name,
    "rank": lambda name: True,
}


# ---- forms -----------------------------------------------------------------------------------------------------------


def _rng(slot: Slot) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, slot.name)) + 1)


def _other(slot: Slot) -> torch.Tensor | None:
    """Those of the next layer, as far as there are layers."""
    if not slot.others:
        return None
    order = sorted([*slot.others, slot.at], key=str)
    return get(slot.base.saved, order[(order.index(slot.at) + 1) % len(order)]).clone()


def _matrix(change: Callable[[torch.Tensor, Slot], torch.Tensor | None]) -> Change:
    return lambda slot: change(slot.old, slot) if slot.old.ndim > 1 and slot.old.dtype != torch.uint8 else None


def _float(change: Callable[[torch.Tensor, Slot], torch.Tensor | None]) -> Change:
    def changed(slot: Slot) -> torch.Tensor | None:
        if not slot.old.is_floating_point():
            return None
        made = change(slot.old.float(), slot)
        return None if made is None else made.to(slot.old.dtype)

    return changed


def _grid(old: torch.Tensor, slot: Slot) -> torch.Tensor | None:
    if old.numel() < 256:
        return None
    step = old.abs().max() / 127
    return (old / step).round() * step


def _flipped(slot: Slot) -> torch.Tensor | None:
    old = slot.old.clone()
    if not old.is_floating_point() or old.numel() < 100:
        return None
    words = old.view(torch.int32 if old.element_size() == 4 else torch.int16).view(-1)
    at = int(old.abs().view(-1).argmax())
    words[at] ^= 1 << (21 if old.element_size() == 4 else 5)
    return old


def _spoilt(value: float) -> Change:
    def changed(slot: Slot) -> torch.Tensor | None:
        if not slot.old.is_floating_point():
            return None
        made = slot.old.clone()
        made.view(-1)[made.numel() // 2] = value
        return made

    return changed


def _ranks(old: torch.Tensor, slot: Slot) -> torch.Tensor | None:
    return torch.cat([old.chunk(4)[rank] for rank in (0, 2, 1, 3)]) if len(old) % 4 == 0 else None


def _mean(old: torch.Tensor, slot: Slot) -> torch.Tensor | None:
    earlier = slot.of(slot.base.earlier)
    return None if earlier is None else (old + earlier.float()) / 2


def _noise(old: torch.Tensor, slot: Slot) -> torch.Tensor | None:
    return old + 0.1 * old.std() * torch.randn(old.shape, generator=_rng(slot)) if old.numel() > 1 else None


def _tail(slot: Slot) -> torch.Tensor | None:
    """Three quarters, and zeros for the rest."""
    made = slot.old.clone()
    made[-(len(made) // 4) :] = 0
    return made if slot.old.ndim > 1 and len(made) >= 8 else None


def _repeated(slot: Slot) -> torch.Tensor | None:
    old = slot.old
    return torch.cat([old[: len(old) // 2]] * 2) if old.ndim > 1 and len(old) % 2 == 0 else None


def _twin(slot: Slot) -> torch.Tensor | None:
    """An older copy of the same weight kept elsewhere."""
    if slot.twin is None:
        return None
    return get(slot.base.earlier, slot.twin).to(slot.old.dtype)


FORMS: dict[str, Change] = {
    "zero": lambda slot: torch.zeros_like(slot.old),
    "begun": lambda slot: slot.of(slot.base.begun),
    "other": _other,
    "rows": _matrix(lambda old, slot: old[torch.randperm(len(old), generator=_rng(slot))]),
    "ranks": _matrix(_ranks),
    "columns": _matrix(lambda old, slot: old[:, torch.randperm(old.shape[1], generator=_rng(slot))]),
    "axis": _matrix(lambda old, slot: torch.cat(old.chunk(2, 1)).reshape(old.shape) if old.shape[1] % 2 == 0 else None),
    "transposed": _matrix(lambda old, slot: old.T.contiguous() if old.shape[0] == old.shape[1] else None),
    "reshaped": _matrix(lambda old, slot: old.T.reshape(old.shape) if old.shape[0] != old.shape[1] else None),
    "rolled": _matrix(lambda old, slot: old.roll(3, 0)),
    "line": _matrix(lambda old, slot: old.reshape(-1).roll(5).reshape(old.shape)),
    "doubled": _float(lambda old, slot: old * 2),
    "scaled": _float(lambda old, slot: old * 0.7),
    "debiased": _float(lambda old, slot: old / (1 - 0.95**60)),
    "by_rows": _matrix(lambda old, slot: old * torch.linspace(0.5, 1.5, len(old))[:, None].to(old.dtype)),
    "negated": _float(lambda old, slot: -old),
    "bf16": _float(lambda old, slot: old.bfloat16().float()),
    "fp16": _float(lambda old, slot: old.half().float()),
    "int8": _float(_grid),
    "clipped": _float(lambda old, slot: old.clamp(-float(old.std()), float(old.std())) if old.numel() > 64 else None),
    "earlier": lambda slot: slot.of(slot.base.earlier),
    "ahead": lambda slot: slot.of(slot.base.ahead),
    "foreign": lambda slot: slot.of(slot.base.foreign),
    "mean": _float(_mean),
    "noise": _float(_noise),
    "tail": _tail,
    "repeated": _repeated,
    "nan": _spoilt(math.nan),
    "inf": _spoilt(math.inf),
    "flip": _flipped,
    "squared": _float(lambda old, slot: old * old),
    "root": _float(lambda old, slot: old.abs().sqrt()),
    "twin": _twin,
    "absent": lambda slot: None,
}

#: Quantity → form → causes; "" for all forms that have no row of their own.
_SHARDS = "E1 E6 E8"
_SHIFT = "E7 E13 E1"
ANSWERS: dict[str, dict[str, str]] = {
    "weights": {
        "": "A2",
        "zero": "A1 A2 G5",
        "begun": "A1 A2",
        "other": "E9 E10 A1 E4 E3 E2",
        "rows": f"{_SHARDS} E5 E4",
        "ranks": f"{_SHARDS} E5 E4",
        "columns": _SHARDS,
        "axis": "E1",
        "transposed": "E1",
        "reshaped": "E1 E7",
        "rolled": "E1 E6 E7 E5 F7",
        "line": _SHIFT,
        "doubled": "E12",
        "scaled": "E12",
        "debiased": "E12",
        "by_rows": "E12 A2 G6",
        "negated": "E12 G6 A2",
        "bf16": "D7",
        "fp16": "D7",
        "int8": "D7",
        "clipped": "D7 A2 G6 E12",
        "earlier": "F4 G6 G7 A2",
        "ahead": "F4 G6 G7 A2 C9",
        "foreign": "A1 A2 G6",
        "mean": "F4 G6 E12 A2",
        "noise": "A2 G6 F4 D7",
        "tail": "G5 E8 A2 G4",
        "repeated": "E8 E1 E9 E6 G6 A2 G10",
        "nan": "G1",
        "inf": "G1",
        "flip": "G2 G1",
        "squared": "A2 G6 E12",
        "root": "A2 G6 E12",
        "absent": "A1 A2 F2",
    },
    "first": {
        "": "B6 G6",
        "zero": "B3 B1 B6 G5",
        "begun": "B3 B1 B6 G5",
        "other": "B5 E13",
        "rows": "E13 B5 E1",
        "ranks": "E13 B5 E1",
        "columns": "E13 B5 E1",
        "axis": "E13 B5 E1",
        "transposed": "E13 B5 E1",
        "reshaped": "E13 B5 E7 E1",
        "rolled": "E13 B5 E7 E1",
        "line": "E7 E13 B5",
        "doubled": "B6 E12",
        "scaled": "B6 E12",
        "debiased": "B6 E12",
        "by_rows": "B6 E12 G6",
        "negated": "B6",
        "bf16": "D4",
        "fp16": "D4",
        "int8": "D4 B11",
        "earlier": "B6 G6",
        "foreign": "B6 G6 B5",
        "mean": "B6 G6 E12",
        "tail": "G5 B3 E13 G4",
        "repeated": "E13 B5 G10 E8 G6",
        "nan": "G1",
        "inf": "G1",
        "flip": "G2 G1",
        "absent": "B1 B3",
    },
    "buffers": {
        "": "A5",
        "nan": "A5 G1",
        "inf": "A5 G1",
        "flip": "A5 G2 G1",
        "bf16": "A5 D7",
        "fp16": "A5 D7",
    },
    "averages": {"": "F4", "nan": "F4 G1", "inf": "F4 G1", "flip": "F4 G2 G1", "other": "F4 E9", "tail": "F4 G5"},
}
_SHARED = ("bf16", "fp16", "int8", "axis", "line", "doubled")
ANSWERS["averages"] |= {form: f"F4 {ANSWERS['weights'][form]}" for form in _SHARED}
ANSWERS["momentum"] = ANSWERS["first"]
ANSWERS["trained"] = ANSWERS["weights"] | dict.fromkeys(("bf16", "fp16", "int8"), "D7 D1")
ANSWERS["second"] = ANSWERS["first"] | {
    "zero": "B4 B3 G5",
    "begun": "B4 B3 G5",
    "absent": "B4 B1",
    "flip": "G3 G1 G2",
    "nan": "G1 G3",
    "inf": "G1 G3",
    "tail": "G5 B4 E13 G4",
    "negated": "B6 G3",
    "squared": "B6",
    "root": "B6",
}
ANSWERS["largest"] = {form: f"{causes} B11" for form, causes in ANSWERS["second"].items()}
ANSWERS["moments"] = ANSWERS["first"] | {"flip": "G2 G3 G1", "nan": "G1 G3", "inf": "G1 G3", "tail": "G5 B3 E13 G4"}
ANSWERS["moments"] |= {"zero": "B3 B1 G5", "begun": "B3 B1 G5", "earlier": "G6 B6", "absent": "B1"}
ANSWERS["state"] = {form: f"{causes} B11 B1" for form, causes in ANSWERS["second"].items()}
ANSWERS["codes"] = {form: f"{causes} B11" for form, causes in ANSWERS["first"].items()}
_OF_MASTERS = {
    "G6": ("", "earlier"),
    "G5": ("zero", "tail"),
    "D1": ("bf16", "fp16", "int8", "absent", "twin"),
    "B5 E13": ("other", "rows", "ranks", "columns", "rolled", "line", "reshaped", "axis", "transposed", "repeated"),
    "G1": ("nan", "inf"),
    "G2 G1": ("flip",),
    "E12": ("doubled", "scaled", "debiased"),
}
ANSWERS["masters"] = {
    form: " ".join(dict.fromkeys(f"D2 {causes} {ANSWERS['weights'].get(form, '')}".split()))
    for causes, forms in _OF_MASTERS.items()
    for form in forms
}
ANSWERS["copies"] = {form: f"D3 {causes}" for form, causes in ANSWERS["weights"].items()}
_ORDERS = ("rows", "ranks", "columns", "axis", "transposed", "reshaped", "rolled", "line", "repeated")
ANSWERS["everything"] = {
    "": "G6 G7",
    "zero": "A1 A2 G5 B1 B3",
    "begun": "A1 A2 B1 B3",
    "absent": "A1 A2 B1",
    "other": ANSWERS["weights"]["other"],
    "foreign": "G6 A1 A2",
    "doubled": "E12",
    "scaled": "E12 B6",
    "debiased": "E12 B6",
    "mean": "G6 G7 E12 F4",
    "tail": "G5 E8 G6 G4",
    "bf16": "D7 D1 D4",
    "fp16": "D7 D1 D4",
    "int8": "D7 D1 D4",
    "earlier": "G6 G7",
    "ahead": "G6 G7 C9",
    "flip": "G1 G2 G3",
    "inf": "G1 G3",
    "nan": "G1 G3",
    **{form: ANSWERS["weights"][form] for form in _ORDERS},
}
ANSWERS["adapters"] = {form: f"F5 {causes}" for form, causes in ANSWERS["weights"].items()}
ANSWERS["base"] = {form: f"F6 F5 {causes}" for form, causes in ANSWERS["weights"].items()}


@dataclass(frozen=True)
class Cell:
    """A change of a load and the causes that name it.

    Attributes:
        name: ``base/quantity/form/part``.
        make: returns the content of the echo, ``None`` if the change cannot be made.
    """

    name: str
    base: str
    make: Callable[[], dict[str, Any] | None]
    answers: frozenset[str] = frozenset()
    quantity: str = ""
    form: str = ""
    kind: str = "fault"


def _of_rank(slot: Slot, form: str, new: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor with the second half of its rows changed, where a rank's rows alone can have the form."""
    if new.ndim < 2 or form in (*_ORDERS, "nan", "inf", "flip", "tail"):
        return None
    half = len(new) // 2
    rest = _grid(slot.old[half:].float(), slot) if form == "int8" else new[half:]  # a rank has scales of its own
    return None if rest is None else torch.cat([slot.old[:half], rest.to(slot.old.dtype)])


def _tensor_cell(base_name: str, quantity: str, form: str, part: str) -> dict[str, Any] | None:
    held = base(base_name)
    echo = copy.deepcopy(held.saved)
    touched = 0
    for slot in slots(held, quantity):
        if not PARTS[part](slot.name):
            continue
        new = FORMS[form](slot)
        if form == "absent":
            put(echo, slot.at, None)
            touched += 1
            continue
        if new is not None and part == "rank":  # the second rank's rows of every matrix
            new = _of_rank(slot, form, new)
        if new is None or torch.equal(new, slot.old):
            continue
        put(echo, slot.at, new.clone())
        touched += 1
    return echo if touched else None


SPARSE = {"nan": ("one",), "inf": ("one",), "flip": ("one",)}
PARTS_OF = {"buffers": ("all", "kind"), "adapters": ("all", "layer"), "base": ("all", "layer", "table")}


def cells() -> Iterator[Cell]:
    """Yield every cell, those of tensors first."""
    for quantity, (bases, row) in TENSORS.items():
        for base_name, form in product(bases, FORMS):
            if form == "twin" and quantity not in ("masters", "copies"):
                continue
            if form in ("negated", "noise", "squared", "root") and quantity == "everything":
                continue  # nothing does that to all of it
            for part in SPARSE.get(form, PARTS_OF.get(quantity, tuple(PARTS))):
                name = f"{base_name}/{quantity}/{form}/{part}"
                made = partial(_tensor_cell, base_name, quantity, form, part)
                yield Cell(name, base_name, made, frozenset(_answers(row, form, part).split()), row, form)
    yield from _value_cells()


def _answers(row: str, form: str, part: str) -> str:
    """Return the causes of a form, with those that the part allows as well."""
    causes = ANSWERS[row].get(form, ANSWERS[row][""])
    if part != "all" and form in ("earlier", "ahead", "foreign", "mean", "begun"):
        causes += " G6"
    if part == "norms" and row in (*_HELD, "adapters", "masters"):
        causes += " A3"
    if part == "table" and row in (*_HELD, "base") and form in ("begun", "foreign", "tail", *_ORDERS):
        causes += " F7"
    if part == "table" and row in (*_HELD, "base") and form in ("begun", "other"):
        causes += " F2"
    return causes


_HELD = ("weights", "trained", "everything", "copies")


def _value_cells() -> Iterator[Cell]:
    """Counters, settings and what a trainer keeps beside tensors."""
    state, groups = ("optimizer", "state"), ("optimizer", "param_groups")

    def over(paths: Places, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
        def made(echo: dict[str, Any]) -> None:
            for at in list(paths(echo)):
                put(echo, at, change(get(echo, at)))

        return made

    def counters(echo: dict[str, Any]) -> Iterable[Path_]:
        return [(*state, n, "step") for n, one in echo["optimizer"]["state"].items() if "step" in one]

    def some(echo: dict[str, Any]) -> Iterable[Path_]:
        return list(counters(echo))[::2]

    def field_of(name: str, every: bool = True) -> Places:
        most = None if every else 1
        return lambda echo: [(*groups, n, name) for n in range(len(echo["optimizer"]["param_groups"]))][:most]

    def exchanged(echo: dict[str, Any]) -> None:
        for group, decay in zip(echo["optimizer"]["param_groups"], (0.0, 0.1), strict=True):
            group["weight_decay"] = decay

    def doubled(rates: list[float]) -> list[float]:
        return [2 * rate for rate in rates]

    def at(*path: Any) -> Places:
        return lambda echo: [path]

    values: list[tuple[str, str, str, Any, str]] = []
    for name in ("adamw", "masters"):
        values += [
            (name, "counters", "zero", over(counters, lambda step: step * 0), "B2"),
            (name, "counters", "one", over(counters, lambda step: step * 0 + 1), "B2 C9"),
            (name, "counters", "plus1", over(counters, lambda step: step + 1), "C9"),
            (name, "counters", "double", over(counters, lambda step: step * 2), "C9"),
            (name, "counters", "earlier", over(counters, lambda step: step - 20), "C9 G6"),
            (name, "counters", "half zero", over(some, lambda step: step * 0), "B2 G6"),
            (name, "counters", "half earlier", over(some, lambda step: step - 20), "G6 C9 B2"),
            (name, "group lr", "tenth", over(field_of("lr"), lambda lr: lr / 10), "C1 C2 B8 H1"),
            (name, "group lr", "peak", over(field_of("lr"), lambda lr: lr * 3), "C2 C1 B8 H1"),
            (name, "group lr", "zero", over(field_of("lr"), lambda lr: 0.0), "C1 C2 B8 H1"),
            (name, "group lr", "one group", over(field_of("lr", False), lambda lr: lr / 2), "C1 C2 B7 B8 H1"),
            (name, "group betas", "other", over(field_of("betas"), lambda b: (0.5, 0.9)), "H1"),
            (name, "group eps", "other", over(field_of("eps"), lambda eps: eps * 1e3), "H1"),
            (name, "group decay", "other", over(field_of("weight_decay"), lambda d: d + 0.3), "H1 C5 B7"),
            (name, "schedule", "zero", over(at("scheduler", "last_epoch"), lambda n: 0), "C1"),
            (name, "schedule", "plus1", over(at("scheduler", "last_epoch"), lambda n: n + 1), "C3"),
            (name, "schedule", "double", over(at("scheduler", "last_epoch"), lambda n: n * 2), "C3"),
            (name, "schedule", "earlier", over(at("scheduler", "last_epoch"), lambda n: n - 20), "C1 C3 G6"),
            (name, "schedule", "base", over(at("scheduler", "base_lrs"), doubled), "C2 C4 H1"),
            (
                name,
                "schedule",
                "last",
                over(at("scheduler", "_last_lr"), doubled),
                "C2 C1 C4 B8 H1",
            ),
            (name, "schedule", "count", over(at("scheduler", "_step_count"), lambda n: 1), "C1 C3"),
            (name, "schedule", "absent", over(at("scheduler"), lambda n: None), "C1"),
            (name, "step", "zero", over(at("step"), lambda n: 0), "C9 G7 C6"),
            (name, "step", "plus1", over(at("step"), lambda n: n + 1), "C9"),
            (name, "step", "earlier", over(at("step"), lambda n: n - 20), "C9"),
            (name, "generator", "absent", over(at("rng_state"), lambda n: None), "C8"),
        ]
    values += [
        ("sgd", "group momentum", "zero", over(field_of("momentum"), lambda m: 0.0), "H1"),
        ("sgd", "group nesterov", "off", over(field_of("nesterov"), lambda m: False), "H1"),
        ("sgd", "group decay", "exchanged", exchanged, "B7 C5 H1"),
        ("masters", "loader", "zero", over(at("dataloader", "batches"), lambda n: 0), "C6"),
        ("masters", "loader", "ahead", over(at("dataloader", "batches"), lambda n: n + 9), "C6 H1"),
        ("masters", "loader", "seed", over(at("dataloader", "seed"), lambda n: n + 9), "C7"),
        ("masters", "loader", "absent", over(at("dataloader"), lambda n: None), "C6"),
        ("masters", "samples", "zero", over(at("consumed_samples"), lambda n: 0), "C6 C9"),
        ("masters", "scaler", "reset", over(at("scaler", "scale"), lambda n: n * 4), "D8"),
        ("masters", "scaler", "tracker", over(at("scaler", "_growth_tracker"), lambda n: n + 3), "D8"),
        ("masters", "scaler", "interval", over(at("scaler", "growth_interval"), lambda n: n + 3), "D8 H1"),
        ("masters", "scaler", "absent", over(at("scaler"), lambda n: None), "D8"),
        ("masters", "averages", "absent all", over(at("ema"), lambda n: None), "F4"),
    ]
    for base_name, what, form, change, causes in values:

        def made(b: str = base_name, c: Any = change) -> dict[str, Any] | None:
            echo = copy.deepcopy(base(b).saved)
            c(echo)
            return echo

        yield Cell(f"{base_name}/{what}/{form}", base_name, made, frozenset(causes.split()), what, form)


def healthy_cells() -> Iterator[Cell]:
    """Yield loads that change nothing that matters."""

    def made(base_name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[], dict[str, Any]]:
        def build() -> dict[str, Any]:
            echo = copy.deepcopy(base(base_name).saved)
            return change(echo) or echo

        return build

    def wrapped(echo: dict[str, Any]) -> None:
        echo["model"] = {f"module.{name}": one for name, one in echo["model"].items()}

    def wider(echo: dict[str, Any]) -> None:
        echo["model"] = {name: one.double() for name, one in echo["model"].items()}

    def drawn(echo: dict[str, Any]) -> None:
        echo["rng_state"] = torch.Generator().manual_seed(5).get_state()

    def ordered(echo: dict[str, Any]) -> None:
        echo["model"] = dict(reversed(echo["model"].items()))

    def same(echo: dict[str, Any]) -> None:
        return None

    changes = {"same": same, "wrapped": wrapped, "wider": wider, "drawn": drawn, "ordered": ordered}
    for base_name, (name, change) in product((*_LOOPS, *_RUNS), changes.items()):
        cell = Cell(f"{base_name}/healthy/{name}", base_name, made(base_name, change), quantity="healthy", form=name)
        yield replace(cell, kind="healthy")


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What the doctor said of a cell."""

    cell: Cell
    causes: tuple[tuple[str, str, str], ...] = field(default_factory=tuple)
    verdict: str = ""

    @property
    def right(self) -> bool:
        if self.cell.kind == "healthy":
            return not any(how == "error" for *_, how in self.causes)
        return bool(self.causes) and self.causes[0][0] in self.cell.answers

    @property
    def sure(self) -> bool:
        return bool(self.causes) and self.causes[0][1] == "certain"

    def line(self) -> str:
        mark = "+" if self.right else "x" if self.causes else "-"
        told = " ".join(f"{cause}{'!' if sure == 'certain' else ''}{how[0]}" for cause, sure, how in self.causes[:3])
        return f"{mark} {self.cell.name:44} {'/'.join(sorted(self.cell.answers)):24} {told or '·'}  {self.verdict[:70]}"


def judge(cell: Cell, folder: Path) -> Result | None:
    """Return what the doctor says of a cell with an echo; ``None`` if the change cannot be made."""
    echo = cell.make()
    if echo is None:
        return None
    before, after = folder / f"before-{cell.base}.pt", folder / "echo.pt"
    if not before.exists():
        torch.save(base(cell.base).saved, before)
    torch.save(echo, after)
    found = wb.doctor(before, echo=after, threads=1)
    causes = tuple((str(one.cause), str(one.certainty), str(one.severity)) for one in found.causes)
    return Result(cell, causes, str(found.verdict))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cells; all must occur")
    parser.add_argument("--every", action="store_true", help="list the right ones too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for cell in (*cells(), *healthy_cells()):
            if not all(word in f"{cell.name}/" for word in options.words):
                continue
            result = judge(cell, Path(folder))
            if result is None:
                continue
            outcome = "right" if result.right else "wrong, certain" if result.sure else "wrong"
            outcome = outcome if result.causes or result.right else "missed"
            counts["all", outcome] += 1
            counts[cell.quantity, outcome] += 1
            if options.every or not result.right:
                print(result.line(), flush=True)
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"{name:16}", {outcome: count for (one, outcome), count in counts.items() if one == name})


if __name__ == "__main__":
    main()
