"""Faults of two checkpoints by construction: each quantity that a run stores, in each form that a fault leaves it in.

::

    quantity   weights  first  second  both moments  counters  settings  schedule  data  buffers  averages  masters
    form       zero  other  rows  transposed  scaled  negated  rounded  older  a layer  a shard  NaN  frozen  absent
    optimizer  AdamW  SGD  Lion  Adafactor  RMSprop
                   │
    start ─ before ─▶ changed ─ k updates ─▶ after        the same k updates without the change ─▶ healthy

A cell counts only if the change is larger in the later files than what the healthy updates moved: `Made.shown`.

``python -m tests.lab.grid_pairs [--only words …] [--k 1 20]`` prints the cells that are not named right.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.lab.optimizers import Lion

__all__ = ["CELLS", "EVERY", "Cell", "Made", "healthy", "made", "started", "told"]

WORDS, WIDTH, BLOCKS = 61, 24, 3
START, EARLIER = 60, 20
Tensors = dict[str, torch.Tensor]
Content = dict[str, Any]
#: First and second moments by optimizer, by their stored names.
FIRST = {"adamw": "exp_avg", "sgd": "momentum_buffer", "lion": "exp_avg", "rmsprop": "momentum_buffer"}
SECOND = {"adamw": ("exp_avg_sq",), "rmsprop": ("square_avg",), "adafactor": ("row_var", "col_var", "variance")}
COUNTED = ("adamw", "adafactor", "rmsprop")
EVERY = ("adamw", "sgd", "lion", "adafactor", "rmsprop")


class Net(nn.Module):
    """An embedding, blocks with square and other matrices and running statistics, and a head, tied if asked for."""

    def __init__(self, seed: int, tied: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tok = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {
                        "norm": nn.LayerNorm(WIDTH),
                        "mix": nn.Linear(WIDTH, WIDTH, bias=False),
                        "up": nn.Linear(WIDTH, 2 * WIDTH, bias=False),
                        "stats": nn.BatchNorm1d(2 * WIDTH),
                        "down": nn.Linear(2 * WIDTH, WIDTH),
                    }
                )
                for _ in range(BLOCKS)
            )
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens[:, :-1])
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            x = x + block["mix"](mean)
            inner = block["up"](block["norm"](x))
            inner = block["stats"](inner.flatten(0, 1).float()).view(inner.shape).to(x.dtype)
            x = x + block["down"](F.gelu(inner))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def _tokens(step: int) -> torch.Tensor:
    """Sentences of a language with regularities: a token depends on the two before."""
    draw = torch.Generator().manual_seed(step)
    found = [torch.randint(WORDS, (16,), generator=draw) for _ in range(2)]
    for _ in range(11):
        noise = torch.randint(3, (16,), generator=draw)
        found.append((3 * found[-1] + 5 * found[-2] + noise) % WORDS)
    return torch.stack(found, 1)


class Run:
    """A training loop; flags in ``odd`` make its updates wrong."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind, self.step, self.odd = kind, 0, dict[str, Any]()
        self.optimizer_kind = kind.partition("-")[0]
        self.mixed = kind.endswith("-mixed")
        self.net = Net(seed, kind.endswith("-tied"))
        self.masters: dict[str, nn.Parameter] = {}
        if self.mixed:
            self.masters = {name: nn.Parameter(w.detach().clone()) for name, w in self.net.named_parameters()}
            for name, weight in self.net.named_parameters():
                weight.data = weight.data.bfloat16() if "stats" not in name else weight.data
        trained = self.trained()
        groups = [
            {"params": [w for w in trained.values() if w.ndim > 1], "weight_decay": 0.1},
            {"params": [w for w in trained.values() if w.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = _optimizer(self.optimizer_kind, groups)
        recursive = self.optimizer_kind in ("sgd", "rmsprop")
        self.schedule: Any = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 240)
            if recursive
            else torch.optim.lr_scheduler.LambdaLR(self.optimizer, _warm)
        )
        self.ema = {name: weight.detach().clone() for name, weight in trained.items()}
        self.scale, self.grown = 1024.0, 0
        self.rng = torch.Generator().manual_seed(seed)

    def trained(self) -> dict[str, nn.Parameter]:
        return self.masters or dict(self.net.named_parameters())

    def update(self) -> None:
        odd, trained = self.odd, self.trained()
        if not odd.get("summed"):
            for weight in (*self.net.parameters(), *trained.values()):
                weight.grad = None
        self.net(_tokens(self.step + odd.get("data", 0))).backward()
        torch.rand(1, generator=self.rng)
        for name, weight in self.net.named_parameters():
            assert weight.grad is not None
            target = trained[name]
            gradient = weight.grad.to(target.dtype) * odd.get("times", 1.0)
            target.grad = gradient
            if odd.get("frozen", "-") in name:
                target.grad = None
        if not odd.get("unclipped"):
            nn.utils.clip_grad_norm_(trained.values(), 1.0 * odd.get("clip", 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] *= odd.get("rate", 1.0)
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= odd.get("decay", 1.0)
        self.optimizer.step()
        for group, decay in zip(self.optimizer.param_groups, kept, strict=True):
            group["weight_decay"] = decay
            group["lr"] /= odd.get("rate", 1.0)
        self.schedule.step()
        with torch.no_grad():
            for name, weight in self.net.named_parameters():
                weight.copy_(trained[name])
            for name, average in self.ema.items():
                average.lerp_(trained[name].float(), 0.02)
        self.step += 1

    def run(self, updates: int) -> None:
        for _ in range(updates):
            self.update()

    def content(self) -> Content:
        schedule = {name: value for name, value in self.schedule.state_dict().items() if not callable(value)}
        found = {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": schedule,
            "step": self.step,
            "consumed_samples": 16 * self.step,
            "rng_state": self.rng.get_state(),
            "scaler": {
                "scale": self.scale,
                "growth_factor": 2.0,
                "growth_interval": 2000,
                "_growth_tracker": self.step,
            },
            "ema": self.ema,
        }
        if self.masters:
            found["master_weights"] = {name: weight.detach() for name, weight in self.masters.items()}
        return copy.deepcopy(found)

    def load(self, content: Content) -> None:
        content = copy.deepcopy(content)
        self.net.load_state_dict(content["model"])
        for name, weight in self.masters.items():
            weight.data = content["master_weights"][name]
        if content["optimizer"].get("state") or not content["optimizer"].get("fresh"):
            self.optimizer.load_state_dict(content["optimizer"])
        if content["scheduler"]:
            self.schedule.load_state_dict(content["scheduler"])
        self.step, self.ema = content["step"], content["ema"]
        self.rng.set_state(content["rng_state"])


def _warm(done: int) -> float:
    return min(1.0, (done + 1) / 12) * (0.55 + 0.45 * math.cos(math.pi * min(done, 240) / 240))


def _optimizer(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    if kind == "sgd":
        return torch.optim.SGD([group | {"weight_decay": 1e-3} for group in groups], lr=0.15, momentum=0.9)
    if kind == "lion":
        return Lion(groups, lr=4e-4)
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    return torch.optim.RMSprop([group | {"weight_decay": 0.0} for group in groups], lr=1e-3, alpha=0.95, momentum=0.9)


@lru_cache
def _trained(kind: str) -> tuple[Content, Content, Content]:
    """What the run holds 20 updates before the save, at the save, and what another process begins with."""
    torch.manual_seed(0)
    run = Run(kind)
    run.run(START - EARLIER)
    older = run.content()
    run.run(EARLIER)
    return older, run.content(), Run(kind, seed=1).content()


# ---- quantities ------------------------------------------------------------------------------------------------------


def _held(content: Content, kind: str, quantity: str) -> Iterator[tuple[Any, Any, str, torch.Tensor]]:
    """Yield ``(container, key, name, tensor)`` of a quantity."""
    names = _order(kind)
    if quantity in ("weights", "buffers"):
        buffers = ("running_mean", "running_var")
        for key, tensor in content["model"].items():
            if quantity == "buffers" if key.endswith(buffers) else quantity == "weights" and key in names:
                yield content["model"], key, key, tensor
    elif quantity in ("averages", "masters"):
        held = content["ema" if quantity == "averages" else "master_weights"]
        for key, tensor in held.items():
            yield held, key, key, tensor
    else:
        family = kind.partition("-")[0]
        roles = {"first": (FIRST.get(family, ""),), "second": SECOND.get(family, ())}
        wanted = roles.get(quantity) or (*roles["first"], *roles["second"])
        for number, state in content["optimizer"]["state"].items():
            for role in wanted:
                if role in state:
                    yield state, role, f"{names[number]}:{role}", state[role]


@lru_cache
def _order(kind: str) -> tuple[str, ...]:
    """Names of the parameters in the optimizer's order."""
    run = Run(kind)
    names = {id(weight): name for name, weight in run.trained().items()}
    return tuple(names[id(weight)] for group in run.optimizer.param_groups for weight in group["params"])


# ---- forms -----------------------------------------------------------------------------------------------------------

#: Of one tensor.
FORMS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero": torch.zeros_like,
    "fill": torch.ones_like,
    "doubled": lambda x: 2 * x,
    "eighth": lambda x: x / 8,
    "eightfold": lambda x: 8 * x,
    "negated": lambda x: -x,
    "rooted": lambda x: x.clamp(min=0).sqrt(),
    "rounded": lambda x: x.bfloat16().to(x.dtype),
    "rows": lambda x: x.roll(len(x) // 2, 0) if x.ndim > 1 else x,
    "columns": lambda x: x.roll(x.shape[-1] // 2, -1) if x.ndim > 1 else x,
    "transposed": lambda x: x.T.contiguous() if x.ndim == 2 and x.shape[0] == x.shape[1] else x,
    "shifted": lambda x: x.flatten().roll(5).view_as(x) if x.ndim > 1 else x,
    "nan": lambda x: torch.where(torch.arange(x.numel()).view_as(x) == 7, math.nan, x),
}
LAYER = "blocks.1."


def _changed(content: Content, kind: str, quantity: str, form: str) -> None:
    """Apply a form to all tensors of a quantity; of a layer, of a shard and by another source if it says so."""
    older, _, initial = _trained(kind)
    base, _, where = form.partition("@")
    others = {name: x for _, _, name, x in _held(older, kind, quantity)}
    new = {name: x for _, _, name, x in _held(initial, kind, quantity)}
    places = list(_held(content, kind, quantity))
    shapes: dict[tuple[Any, ...], list[int]] = {}
    for number, (_, key, _, x) in enumerate(places):
        role = key if quantity in ("first", "second", "moments") else key.rpartition(".")[2]
        shapes.setdefault((role, tuple(x.shape)), []).append(number)
    result = []
    for number, (_, key, name, x) in enumerate(places):
        if base == "others":
            role = key if quantity in ("first", "second", "moments") else key.rpartition(".")[2]
            alike = shapes[role, tuple(x.shape)]
            made = places[alike[(alike.index(number) + 1) % len(alike)]][3]
        elif base == "older":
            made = others[name]
        elif base == "initial":
            made = new[name]
        elif base == "averaged":
            made = content["ema"][name].to(x.dtype)
        else:
            made = FORMS[base](x)
        made = made.clone()
        if where == "layer" and LAYER not in name:
            made = x
        if where == "shard" and x.ndim > 1:
            made[: len(made) // 2] = x[: len(made) // 2]
        if where == "one" and not name.startswith("blocks.1.up.weight"):
            made = x
        result.append(made)
    for (held, key, _, _), made in zip(places, result, strict=True):
        held[key] = made


@dataclass(frozen=True)
class Cell:
    """A fault: ``load`` changes what is loaded, ``odd`` how the run goes on, ``save`` what it writes.

    ``causes`` are those that a careful expert could name; ``ks``: the distances at which it can show.
    """

    quantity: str
    form: str
    kind: str
    causes: tuple[str, ...]
    load: Callable[[Content], None] | None = None
    odd: Mapping[str, Any] | None = None
    save: Callable[[Content, Content], None] | None = None
    ks: tuple[int, ...] = (1, 20)
    sure: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.quantity}/{self.form}"


@dataclass(frozen=True)
class Made:
    """The contents of two checkpoints."""

    cell: Cell | None
    k: int
    before: Content
    after: Content

    @property
    def shown(self) -> bool:
        """Whether something stored is farther from the healthy run than that run is from one with other data."""
        assert self.cell is not None
        exact = {"adamw": "", "sgd": ".model", "lion": ".model", "rmsprop": ".model"}  # what one update determines
        sure = exact.get(self.cell.kind.partition("-")[0], "-") if self.k == 1 else "-"
        old, new, well = (_flat(one) for one in (self.before, self.after, healthy(self.cell.kind, self.k)))
        other = _flat(healthy(self.cell.kind, self.k, 1000))
        if new.keys() != well.keys():
            return True
        room: dict[str, torch.Tensor] = {}
        far: dict[str, list[torch.Tensor]] = {}
        for path, right in well.items():
            wrong = new[path]
            if not isinstance(right, torch.Tensor):
                if wrong != right:
                    return True
            elif right.is_floating_point() and right.numel() > 1:
                if wrong.shape != right.shape or not wrong.isfinite().all():
                    return True
                was = old[path].float()
                off, moved = (wrong.float() - right.float()).norm(), (right.float() - was).norm()
                if off > (0.02 if path.startswith(sure) else 3.0) * moved + 1e-12:
                    return True
                if torch.equal(wrong, old[path]) and moved > 0:
                    return True
                role = path.split(".")[1] + path.rpartition(".")[2]
                traits = [_traits(was, one.float()) for one in (right, other[path], wrong)]
                room[role] = torch.maximum(room.get(role, torch.zeros(4)), (traits[1] - traits[0]).abs())
                far.setdefault(role, []).append((traits[2] - traits[0]).abs())
            elif not torch.equal(wrong, right) and path != ".rng_state":
                return True
        return any((one > 2 * room[role] + 0.02).any() for role, every in far.items() for one in every)


def _traits(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How a tensor relates to its past: share that is left, size, cosine, and what nearly all elements keep."""
    x, y = old.flatten(), new.flatten()
    size = x.norm().clamp(min=1e-20)
    kept = (y / x)[x > 0]
    least = kept.quantile(0.05) if len(kept) > 16 and (x >= 0).all() and (y >= 0).all() else x.new_zeros(())
    return torch.stack([x @ y / size**2, y.norm() / size, x @ y / (size * y.norm().clamp(min=1e-20)), least])


def _flat(content: Any, path: str = "") -> dict[str, Any]:
    if isinstance(content, Mapping):
        return {key: leaf for name, value in content.items() for key, leaf in _flat(value, f"{path}.{name}").items()}
    if isinstance(content, list):
        return _flat(dict(enumerate(content)), path)
    return {path: content}


def started(kind: str) -> Content:
    """The checkpoint that is resumed from."""
    return _trained(kind)[1]


@lru_cache(maxsize=32)
def healthy(kind: str, k: int, data: int = 0) -> Content:
    """The later checkpoint if nothing went wrong."""
    run = Run(kind)
    run.load(_trained(kind)[1])
    run.odd = {"data": data}
    run.run(k)
    return run.content()


def made(cell: Cell, k: int) -> Made:
    """Make a cell; nothing is written."""
    _, before, _ = _trained(cell.kind)
    content = copy.deepcopy(before)
    if cell.load is not None:
        cell.load(content)
    run = Run(cell.kind, seed=1)
    run.load(content)
    run.odd = dict(cell.odd or {})
    run.run(k)
    after = run.content()
    after["consumed_samples"] = content["consumed_samples"] + 16 * k
    after["scaler"]["scale"] = content["scaler"]["scale"]
    if cell.save is not None:
        cell.save(after, before)
    return Made(cell, k, before, after)


def told(one: Made) -> Any:
    """Return the diagnosis of the two checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "step-60.pt", Path(folder) / "after.pt"
        torch.save(one.before, before)
        torch.save(one.after, after)
        return wb.doctor(before, after)


# ---- the cells -------------------------------------------------------------------------------------------------------


def _tensors(quantity: str, form: str, causes: str, *kinds: str) -> Iterator[Cell]:
    for kind in kinds:

        def load(content: Content, kind: str = kind) -> None:
            _changed(content, kind, quantity, form)

        # what 20 updates hide: they move weights as far as that, and keep an eighth of a momentum
        fades = quantity in ("weights", "first") and form.startswith(("older", "averaged", "rounded"))
        if quantity == "first" and kind != "lion" and not form.startswith(("fill", "eightfold", "nan")):
            fades = True
        yield Cell(quantity, form, kind, tuple(causes.split()), load, ks=(1,) if fades else (1, 20))


def _numbers(quantity: str, form: str, causes: str, load: Callable[[Content], None], *kinds: str) -> Iterator[Cell]:
    for kind in kinds:
        yield Cell(quantity, form, kind, tuple(causes.split()), load)


def _odd(form: str, causes: str, odd: Mapping[str, Any], *kinds: str) -> Iterator[Cell]:
    for kind in kinds:
        # how large the gradients were before is not known from a momentum alone
        hidden = form.startswith("gradients") and kind in ("sgd", "lion")
        yield Cell("updates", form, kind, tuple(causes.split()), odd=odd, ks=(20,) if hidden else (1, 20))


def _saved(
    quantity: str, form: str, causes: str, save: Callable[[Content, Content], None], *kinds: str
) -> Iterator[Cell]:
    rare = (quantity, form) == ("averages", "frozen")  # averages may be updated less often
    for kind in kinds:
        yield Cell(quantity, form, kind, tuple(causes.split()), save=save, ks=(20,) if rare else (1, 20))


def _states(content: Content) -> list[dict[str, Any]]:
    return list(content["optimizer"]["state"].values())


def _counters(by: Callable[[torch.Tensor], torch.Tensor], part: int = 1) -> Callable[[Content], None]:
    def load(content: Content) -> None:
        for state in _states(content)[::part]:
            state["step"] = by(state["step"]).clone()

    return load


def _group(**fields: Callable[[Any], Any]) -> Callable[[Content], None]:
    def load(content: Content) -> None:
        for group in content["optimizer"]["param_groups"]:
            group |= {name: change(group[name]) for name, change in fields.items()}

    return load


def _decays_swapped(content: Content) -> None:
    one, two = content["optimizer"]["param_groups"]
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def _scheduled(restart: bool = False, by: int = 0, **fields: Any) -> Callable[[Content], None]:
    def load(content: Content) -> None:
        told = content["scheduler"]
        told |= fields
        done = 0 if restart else told["last_epoch"] + by
        told |= {"last_epoch": done, "_step_count": done + 1}
        if restart or by:
            for group, base in zip(content["optimizer"]["param_groups"], told["base_lrs"], strict=True):
                cosine = 0.5 * (1 + math.cos(math.pi * done / 240))
                group["lr"] = base * (cosine if "T_max" in told else _warm(done))
            told["_last_lr"] = [group["lr"] for group in content["optimizer"]["param_groups"]]

    return load


def _raised(content: Content) -> None:
    told = content["scheduler"]
    told["base_lrs"] = [3 * lr for lr in told["base_lrs"]]
    told["_last_lr"] = [3 * lr for lr in told["_last_lr"]]
    for group in content["optimizer"]["param_groups"]:
        group |= {"lr": 3 * group["lr"], "initial_lr": 3 * group["initial_lr"]}


def _cleared(content: Content) -> None:
    content["optimizer"]["state"] = {}


def _cleared_some(content: Content) -> None:
    for number in list(content["optimizer"]["state"])[::3]:
        del content["optimizer"]["state"][number]


def _swapped(content: Content) -> None:
    for state in _states(content):
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def _batches(content: Content) -> None:
    for name, tensor in content["model"].items():
        if name.endswith("num_batches_tracked"):
            content["model"][name] = torch.zeros_like(tensor)


def _put(**values: Any) -> Callable[[Content], None]:
    return lambda content: content.update(values)


def _keep(*paths: str) -> Callable[[Content, Content], None]:
    """The save repeats what it held before under these paths, each a name or a name and a word in the keys."""

    def save(after: Content, before: Content) -> None:
        for path in paths:
            part, _, word = path.partition(":")
            if not word:
                after[part] = copy.deepcopy(before[part])
                continue
            for key in after[part]:
                if word in key:
                    after[part][key] = copy.deepcopy(before[part][key])

    return save


def _drop(*names: str) -> Callable[[Content, Content], None]:
    def save(after: Content, before: Content) -> None:
        for name in names:
            after.pop(name)

    return save


def _drop_buffers(after: Content, before: Content) -> None:
    for name in [name for name in after["model"] if ".running_" in name or "num_batches" in name]:
        del after["model"][name]


def _untie(after: Content, before: Content) -> None:
    head = after["model"]["head.weight"].clone()
    after["model"]["head.weight"] = head + 1e-3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))


def _scale_reset(content: Content) -> None:
    content["scaler"]["scale"] = 65536.0


def _mixed_stale(after: Content, before: Content) -> None:
    for name in _order("adamw-mixed"):
        after["model"][name] = before["model"][name].clone()


ADAM, MIXED = "adamw", "adamw-mixed"
EIGHTFOLD = {"times": 8.0, "unclipped": True}
FIRSTS, SECONDS = tuple(FIRST), tuple(SECOND)
CELLS: tuple[Cell, ...] = (
    # the weights
    *_tensors("weights", "zero@layer", "G5 A2", *EVERY),
    *_tensors("weights", "initial", "A1 A2", *EVERY),
    *_tensors("weights", "initial@one", "A2", *EVERY),
    *_tensors("weights", "initial@layer", "A2", *EVERY),
    *_tensors("weights", "others", "E9 E1", *EVERY),
    *_tensors("weights", "rows", "E1 E2 E3 E4 E7", *EVERY),
    *_tensors("weights", "columns", "E1 E6", *EVERY),
    *_tensors("weights", "transposed", "E1", *EVERY),
    *_tensors("weights", "shifted", "E7 E1 E13", *EVERY),
    *_tensors("weights", "doubled", "E12", *EVERY),
    *_tensors("weights", "doubled@layer", "E12 F5", *EVERY),
    *_tensors("weights", "negated@layer", "E12 A2 G1", ADAM, "sgd"),
    *_tensors("weights", "rounded", "D7", *EVERY),
    *_tensors("weights", "older", "G6 G7 F4", *EVERY),
    *_tensors("weights", "older@layer", "G6 A2", *EVERY),
    *_tensors("weights", "older@shard", "G6", *EVERY),
    *_tensors("weights", "initial@shard", "G6 A2 E8", *EVERY),
    *_tensors("weights", "zero@shard", "G5 A2 E8 G6", *EVERY),
    *_tensors("weights", "averaged", "F4 G6", *EVERY),
    *_tensors("weights", "nan@one", "G1", *EVERY),
    # first moments
    *_tensors("first", "zero", "B3 B1 B6", *FIRSTS),
    *_tensors("first", "zero@layer", "B3 B1 G5 B11 G6", *FIRSTS),
    *_tensors("first", "zero@shard", "B3 B1 G5 B11 G6 E8 E13", *FIRSTS),
    *_tensors("first", "fill", "B1 B3 B6", *FIRSTS),
    *_tensors("first", "others", "B5 E13 B6", *FIRSTS),
    *_tensors("first", "rows", "B5 E13 E1 B6", *FIRSTS),
    *_tensors("first", "transposed", "B5 E13 E1 B6", *FIRSTS),
    *_tensors("first", "shifted", "E7 E13 B5 B6", *FIRSTS),
    *_tensors("first", "eighth", "B6 E12 B3 B1", *FIRSTS),  # hardly more than zero is left
    *_tensors("first", "eightfold", "B6 E12", *FIRSTS),
    *_tensors("first", "negated", "B6", *FIRSTS),
    *_tensors("first", "rounded", "D4", *FIRSTS),
    *_tensors("first", "older", "G6 B6", *FIRSTS),
    *_tensors("first", "nan@one", "G1", *FIRSTS),
    # second moments
    *_tensors("second", "zero", "B4 B1 B3", *SECONDS),
    *_tensors("second", "zero@layer", "B4 B3 B1 G5 B11 G6", *SECONDS),
    *_tensors("second", "zero@shard", "B4 B3 B1 G5 B11 G6 E8 E13", *SECONDS),
    *_tensors("second", "fill", "B4 B1 B3 B6", *SECONDS),
    *_tensors("second", "others", "B5 E13 B6 B11", *SECONDS),
    *_tensors("second", "rows", "B5 E13 E1 B6 B11", *SECONDS),
    *_tensors("second", "transposed", "B5 E13 E1 B6 B11", *SECONDS),
    *_tensors("second", "shifted", "E7 E13 B5 B6 B11", *SECONDS),
    *_tensors("second", "eighth", "B6 E12 B4 B11", *SECONDS),
    *_tensors("second", "eightfold", "B6 E12 B11", *SECONDS),
    *_tensors("second", "rooted", "B6 B11", *SECONDS),
    *_tensors("second", "rounded", "D4", *SECONDS),
    *_tensors("second", "older", "G6 B6 B11", *SECONDS),
    *_tensors("second", "nan@one", "G1 G3", *SECONDS),
    # both
    *_numbers("moments", "absent", "B1", _cleared, ADAM, "sgd", "lion", "rmsprop"),
    *_numbers("moments", "absent", "B1 B2", _cleared, "adafactor"),
    *_numbers("moments", "absent@some", "B1 B3 G6 A2", _cleared_some, ADAM, "sgd", "lion", "rmsprop"),
    *_numbers("moments", "absent@some", "B1 B3 B2 G6 A2", _cleared_some, "adafactor"),
    *_tensors("moments", "zero", "B3 B1", ADAM, "rmsprop"),
    *_tensors("moments", "zero@layer", "B3 B1 G5 G6", ADAM, "rmsprop"),
    *_tensors("moments", "others", "B5 E13", ADAM, "rmsprop"),
    *_tensors("moments", "rows", "B5 E13 E1", ADAM, "rmsprop"),
    *_tensors("moments", "transposed", "B5 E13 E1", ADAM, "rmsprop"),
    *_tensors("moments", "shifted", "E7 E13 B5", ADAM, "rmsprop"),
    *_tensors("moments", "eighth", "B6 E12", ADAM, "rmsprop"),
    *_tensors("moments", "eightfold", "B6 E12", ADAM, "rmsprop"),
    *_tensors("moments", "older", "G6 B6", ADAM, "rmsprop"),
    *_tensors("moments", "older@layer", "G6 B6", ADAM, "rmsprop"),
    *_tensors("moments", "older@shard", "G6 B6", ADAM, "rmsprop"),
    *_tensors("moments", "rounded", "D4", ADAM, "rmsprop"),
    *_numbers("moments", "swapped", "B6", _swapped, ADAM),
    # counters and settings
    *_numbers("counters", "zero", "B2", _counters(torch.zeros_like), ADAM, "rmsprop"),
    # Adafactor's first update keeps nothing of its state
    *_numbers("counters", "zero", "B2 B1", _counters(torch.zeros_like), "adafactor"),
    *_numbers("counters", "zero@some", "B2 G6 C9", _counters(torch.zeros_like, 3), *COUNTED),
    *_numbers("counters", "ahead", "C9", _counters(lambda x: x + 20), *COUNTED),
    *_numbers("counters", "behind", "C9 G6", _counters(lambda x: x - 20), *COUNTED),
    *_numbers("counters", "fourfold", "C9", _counters(lambda x: 4 * x), *COUNTED),
    *_numbers("settings", "lr-tenfold", "B8 C1 C2 H1", _group(lr=lambda x: 10 * x), *EVERY),
    *_numbers("settings", "lr-tenth", "B8 C1 C2 H1", _group(lr=lambda x: x / 10), *EVERY),
    *_numbers("settings", "lr-base", "C2 C4 B8 H1", _raised, *EVERY),
    *_numbers("settings", "betas", "H1", _group(betas=lambda x: (0.8, 0.999)), ADAM, "lion"),
    *_numbers("settings", "momentum", "H1", _group(momentum=lambda x: 0.5), "sgd", "rmsprop"),
    *_numbers("settings", "alpha", "H1", _group(alpha=lambda x: 0.8), "rmsprop"),
    *_numbers("settings", "eps", "H1 D10", _group(eps=lambda x: 1e-3), ADAM, "rmsprop"),
    *_numbers("settings", "no-decay", "H1 B7 C5", _group(weight_decay=lambda x: 0.0), ADAM, "sgd", "lion"),
    *_numbers("settings", "decays-swapped", "B7", _decays_swapped, ADAM, "lion", "adafactor"),
    # schedule, data, trainer
    *_numbers("schedule", "restarted", "C1", _scheduled(restart=True), *EVERY),
    *_numbers("schedule", "ahead", "C3", _scheduled(by=30), *EVERY),
    *_numbers("schedule", "behind", "C1 C3 C9", _scheduled(by=-30), *EVERY),
    *_numbers("schedule", "longer", "C4 C2 H1", _scheduled(T_max=2400), "sgd", "rmsprop"),
    *_saved("schedule", "absent", "C1", _drop("scheduler"), *EVERY),
    *_numbers("data", "restarted", "C6", _put(consumed_samples=0), ADAM, "sgd"),
    *_numbers("data", "ahead", "C6 C7 H1", _put(consumed_samples=3200), ADAM, "sgd"),
    *_saved("data", "frozen", "C6", _keep("consumed_samples"), ADAM, "sgd"),
    *_saved("data", "absent", "C6", _drop("consumed_samples"), ADAM, "sgd"),
    *_numbers("trainer", "ahead", "C9", _put(step=67), *EVERY),
    *_numbers("trainer", "restarted", "C9", _put(step=0), *EVERY),
    *_saved("generators", "absent", "C8", _drop("rng_state"), ADAM, "sgd"),
    *_numbers("scaler", "reset", "D8", _scale_reset, ADAM, "sgd"),
    *_saved("scaler", "absent", "D8", _drop("scaler"), ADAM, "sgd"),
    # buffers and averages
    *_tensors("buffers", "initial", "A5", ADAM, "sgd"),
    *_tensors("buffers", "zero", "A5 G5", ADAM, "sgd"),
    *_tensors("buffers", "others", "A5 E9 B5", ADAM, "sgd"),
    *_tensors("buffers", "eightfold", "A5 E12", ADAM, "sgd"),
    *_tensors("buffers", "initial@layer", "A5", ADAM, "sgd"),
    *_tensors("buffers", "nan", "G1", ADAM, "sgd"),
    *_numbers("buffers", "batches", "A5", _batches, ADAM, "sgd"),
    *_saved("buffers", "frozen", "A5", _keep("model:.running_", "model:num_batches"), ADAM, "sgd"),
    *_saved("buffers", "absent", "A5", _drop_buffers, ADAM, "sgd"),
    *_tensors("averages", "zero", "F4 G5 A5", ADAM, "sgd"),
    *_numbers("averages", "weights", "F4", lambda content: content.update(
        ema={name: content["model"][name].clone() for name in content["ema"]}), ADAM, "sgd"),
    *_tensors("averages", "initial", "F4 A2", ADAM, "sgd"),
    *_tensors("averages", "others", "F4 E9", ADAM, "sgd"),
    *_tensors("averages", "doubled", "F4 E12", ADAM, "sgd"),
    *_tensors("averages", "older", "F4 G6", ADAM, "sgd"),
    *_saved("averages", "frozen", "F4", _keep("ema"), ADAM, "sgd"),
    *_saved("averages", "absent", "F4", _drop("ema"), ADAM, "sgd"),
    # masters, ties
    *_tensors("masters", "rounded", "D1", MIXED),
    *_tensors("masters", "older", "D2 G6", MIXED),
    *_tensors("masters", "older@layer", "D2 G6", MIXED),
    *_tensors("masters", "initial", "D2 A1 A2", MIXED),
    *_tensors("masters", "initial@one", "D2 A2", MIXED),
    *_tensors("masters", "others", "D2 E9 B5 E1", MIXED),
    *_tensors("masters", "rows", "D2 E1 E13", MIXED),
    *_tensors("masters", "doubled", "D2 E12", MIXED),
    *_tensors("masters", "zero@layer", "D2 G5", MIXED),
    *_saved("masters", "alone", "D3 G6", _mixed_stale, MIXED),
    *_saved("masters", "absent", "D1 D2", _drop("master_weights"), MIXED),
    *_saved("ties", "untied", "F2", _untie, "adamw-tied", "sgd-tied"),
    # updates
    *_odd("gradients-eightfold", "B10 C10 D8 H1 E12", EIGHTFOLD, ADAM, "sgd", "lion", "rmsprop"),
    *_odd("gradients-eightfold", "B10 C10 D8 H1 E12 B6", EIGHTFOLD, "adafactor"),
    *_odd("gradients-eighth", "B10 C10 D8 H1 E12", {"times": 0.125}, *EVERY),
    *_odd("gradients-summed", "B10 C10 D8 H1", {"summed": True, "unclipped": True}, *EVERY),
    *_odd("rate-fivefold", "B8 C2", {"rate": 5.0}, *EVERY),
    *_odd("rate-fifth", "B8 C1", {"rate": 0.2}, *EVERY),
    *_odd("no-decay", "B7 C5 H1", {"decay": 0.0}, ADAM, "sgd", "lion"),
    *_odd("layer-frozen", "H1", {"frozen": "blocks.1."}, *EVERY),
    *_saved("updates", "save-repeated", "G7 G6", _keep("model", "optimizer", "ema"), *EVERY),
    *_saved("updates", "weights-repeated", "G7 G6", _keep("model"), *EVERY),
    *_saved("updates", "optimizer-repeated", "G7 G6", _keep("optimizer"), *EVERY),
    *_saved("updates", "layer-repeated", "G6 G7 H1", _keep("model:blocks.1."), *EVERY),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="run only cells whose id contains one of these words")
    parser.add_argument("--k", nargs="*", type=int, default=[1, 20])
    parser.add_argument("--every", type=int, default=1, help="only every n-th cell")
    parser.add_argument("--all", action="store_true", help="print the cells that are named right too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[tuple[int, str], int] = {}
    for cell in CELLS[:: options.every]:
        if options.only and not any(word in cell.id for word in options.only):
            continue
        for k in set(options.k) & set(cell.ks):
            one = made(cell, k)
            found = told(one)
            first = found.causes[0].cause if found.causes else ""
            outcome = "right" if first in cell.causes else "wrong" if first else "missed"
            outcome = outcome if one.shown else "not shown"
            silent = not first and found.verdict.startswith("No fault found")
            for word in (outcome, *(["no fault found"] if silent and one.shown else [])):
                counts[k, word] = counts.get((k, word), 0) + 1
            if options.all or outcome in ("wrong", "missed"):
                causes = " ".join(f"{c.cause}{c.certainty[0]}{c.severity[0]}" for c in found.causes[:4])
                note = "NO FAULT" if silent else ""
                print(f"{outcome:9} k{k:<3}{cell.id:38} {'/'.join(cell.causes):20} {causes} {note}", flush=True)
    for (k, word), count in sorted(counts.items()):
        print(f"k={k:<3} {word:15} {count}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
