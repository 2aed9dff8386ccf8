"""Trainers in plain torch: a module, real optimizers, a real schedule; saved, loaded into new objects, gone on with.

::

    loop ─ start updates ─▶ before ─▶ another loop, with other weights, loads ─▶ echo ─ k updates ─▶ after
      └──────────────────────────────── k updates ───────────────────────────────▶ must be equal, where nothing changed

A variant is a subclass that says what is different; `variant` makes a case of it.
"""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.lab.config import Config, random_config
from tests.lab.data import batch
from tests.lab.fault import Fault, seen
from tests.lab.model import initial, loss_and_load

__all__ = ["Decoder", "Loop", "fault", "variant"]

Groups = list[dict[str, Any]]


class Decoder(nn.Module):
    """The lab's decoder with parameters of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        for name, tensor in initial(config).items():
            self.put(name, nn.Parameter(tensor))
        for n in range(config.layers if config.experts else 0):
            self.get_submodule(f"model.layers.{n}.mlp.gate").register_buffer("expert_bias", torch.zeros(config.experts))

    def put(self, name: str, parameter: nn.Parameter) -> None:
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, parameter)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights = {name: weight.float() for name, weight in self.named_parameters()}
        loss, load = loss_and_load(self.config, weights, dict(self.named_buffers()), tokens)
        return loss, dict(load)


class Loop:
    """A training loop; each method is something that a variant may do otherwise.

    Attributes:
        layouts: how it may save. parts: micro-batches of an update. device: where it trains.
        exact: whether a resume changes nothing; faulty: or what it should not.
        fresh: leave out of the load, by the names of `content`.
    """

    layouts: Sequence[str] = ("torch_save", "torch_save", "dcp", "folder", "lightning")
    parts = 1
    device = "cpu"
    exact = True
    faulty = False
    clip = 1.0
    fresh: Sequence[str] = ()

    def __init__(self, config: Config) -> None:
        self.config, self.step, self.extra = config, 0, dict[str, Any]()
        self.module = self.net().to(self.device)
        self.optimizers = self.made()
        self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]

    # ---- what is trained, and how --------------------------------------------------------------------------------

    def net(self) -> nn.Module:
        return Decoder(self.config)

    def groups(self) -> Groups:
        """Matrices decay, vectors do not."""
        named = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        held = [[w for n, w in named if w.ndim > 1], [w for n, w in named if w.ndim < 2]]
        decays = (self.config.weight_decay, 0.0)
        return [{"params": ws, "weight_decay": decay} for ws, decay in zip(held, decays, strict=True) if ws]

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        c = self.config
        return torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps)

    def made(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer(self.groups())]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        c = self.config
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: c.lr_at(done + 1) / c.lr)

    def tokens(self) -> torch.Tensor:
        return batch(self.config, self.step, 1234)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)[0]

    def gradients(self) -> None:
        """After the backward pass, before the update."""
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)

    def apply(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        tokens = self.tokens().to(self.device)
        with nullcontext() if self.device == "cpu" else torch.device(self.device):
            for part in tokens.chunk(self.parts):
                (self.loss(part) * (len(part) / len(tokens))).backward()
            self.gradients()
            self.apply()
        self.step += 1

    def run(self, updates: int) -> None:
        for _ in range(updates):
            self.update()

    # ---- saves and loads -----------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        return self.module.state_dict()

    def content(self) -> dict[str, Any]:
        """Everything that a load needs, under a plain loop's names."""
        found: dict[str, Any] = {"model": self.weights(), "step": self.step}
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        found |= {"optimizer": states[0]} if len(states) == 1 else {"optimizers": states}
        told = [{k: v for k, v in one.state_dict().items() if not callable(v)} for one in self.schedules]
        found |= {"scheduler": told[0]} if len(told) == 1 else {"schedulers": told} if told else {}
        return found | self.extra

    def load(self, content: dict[str, Any]) -> None:
        self.step = content["step"]
        if "model" not in self.fresh:
            self.take(content["model"])
        if "optimizer" not in self.fresh:
            states = content.get("optimizers") or [content["optimizer"]]
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        if "scheduler" not in self.fresh:
            told = content.get("schedulers") or ([content["scheduler"]] if "scheduler" in content else [])
            for schedule, state in zip(self.schedules, told, strict=True):
                schedule.load_state_dict(state)
        self.extra |= {name: content[name] for name in self.extra if name in content and name not in self.fresh}

    def take(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict(weights)

    def loaded(self) -> None:
        """After the load: what is changed on purpose, or by a mistake."""

    def config_after(self) -> Config:
        """Of the resumed run."""
        return self.config

    def save(self, folder: Path, layout: str) -> None:
        content = self.content()
        if layout == "torch_save":
            folder.mkdir(parents=True)
            torch.save(content, folder / f"step-{self.step}.pt")
        elif layout == "dcp":
            weights, state = get_state_dict(self.module, self.optimizers)
            rest = {name: value for name, value in content.items() if name not in ("model", "optimizer", "optimizers")}
            dcp.save({"model": weights, "optimizer": state, **rest}, checkpoint_id=folder / "step", no_dist=True)
        elif layout == "folder":
            self._folder(folder / f"checkpoint-{self.step}", content)
        elif layout == "lightning":
            folder.mkdir(parents=True)
            torch.save(self._lightning(content), folder / f"epoch=0-step={self.step}.ckpt")
        else:
            raise ValueError(layout)

    def _folder(self, folder: Path, content: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        content = dict(content)
        kept = {name: tensor.contiguous() for name, tensor in content.pop("model").items()}
        save_file(_single(kept), folder / "model.safetensors", metadata={"format": "pt"})
        state = {"global_step": content.pop("step"), "max_steps": self.config.total, "log_history": [], "epoch": 0.0}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        for name, value in content.items():
            torch.save(value, folder / f"{name}.pt")

    def _lightning(self, content: dict[str, Any]) -> dict[str, Any]:
        rest = dict(content)
        states = rest.pop("optimizers", None) or [rest.pop("optimizer")]
        told = rest.pop("schedulers", None) or ([rest.pop("scheduler")] if "scheduler" in rest else [])
        return {
            "epoch": 0,
            "global_step": rest.pop("step"),
            "pytorch-lightning_version": "2.6.0",
            "loops": {},
            "state_dict": {f"net.{name}": tensor for name, tensor in rest.pop("model").items()},
            "optimizer_states": states,
            "lr_schedulers": told,
            "callbacks": rest,
            "hyper_parameters": {},
        }


def _single(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the second name of what is stored twice: safetensors refuses it, and trainers drop it."""
    found: dict[int, str] = {}
    for name, tensor in sorted(tensors.items()):
        found.setdefault(tensor.data_ptr() or id(tensor), name)
    return {name: tensors[name] for name in found.values()}


def _config(rng: random.Random) -> Config:
    """Smaller than the lab's runs: what is looked at here is the optimizer."""
    drawn = random_config(rng.randrange(1 << 30))
    heads, groups = rng.choice([(2, 2), (4, 2), (2, 1)])
    hidden = heads * rng.choice([8, 12])
    warmup, total = rng.randrange(5, 20), rng.randrange(90, 250)
    return drawn.but(
        heads=heads,
        groups=groups,
        hidden=hidden,
        ffn=hidden * rng.choice([2, 3]),
        layers=2,
        precision="fp32",
        batch=4,
        length=16,
        warmup=warmup,
        total=total,
        experts=0,
    )


def _made(kind: type[Loop], needs: dict[str, Any], folder: Path, rng: random.Random, k: int) -> None:
    config, start = _config(rng).but(**needs), rng.randrange(8, 61)
    layout = rng.choice(kind.layouts)
    torch.manual_seed(rng.randrange(1 << 30))
    loop = kind(config)
    loop.run(start)
    loop.save(folder / "before", layout)
    other = kind(config.but(seed=config.seed + 1))
    other.config = loop.config_after()
    random_state = torch.get_rng_state()
    _load(other, loop, folder / "before", layout)
    other.loaded()
    other.save(folder / "echo", layout)
    torch.set_rng_state(random_state)
    other.run(k)
    other.save(folder / "after", layout)
    exact = kind.exact and kind.device == "cpu"  # kernels of a GPU may add in another order each time
    if not kind.faulty and not exact:
        return
    torch.set_rng_state(random_state)
    loop.run(k)
    if kind.faulty:
        assert _bytes(loop.content()) != _bytes(other.content()), f"{kind.__name__} changes nothing"
    else:
        for (name, one), two in zip(loop.module.state_dict().items(), other.module.state_dict().values(), strict=True):
            assert torch.equal(one, two) or not one.isfinite().all(), f"{kind.__name__}: {name} is another one"


def _bytes(content: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _load(other: Loop, loop: Loop, before: Path, layout: str) -> None:
    if layout == "dcp" and other.exact:
        weights, state = get_state_dict(other.module, other.optimizers)
        whole = {"model": weights, "optimizer": state}
        dcp.load(whole, checkpoint_id=before / "step", no_dist=True)
        set_state_dict(
            other.module, other.optimizers, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"]
        )
        content = copy.deepcopy(loop.content())
        fresh, other.fresh = other.fresh, ("model", "optimizer", *other.fresh)
        other.load(content)
        other.fresh = fresh
    else:
        other.load(copy.deepcopy(loop.content()))


def variant(
    id: str,
    text: str,
    *,
    base: type[Loop] = Loop,
    kind: str = "healthy",
    needs: dict[str, Any] | None = None,
    why: str = "",
    true: tuple[str, ...] = (),
    **changes: Any,
) -> Fault:
    """A healthy way to train, or a deliberate change: a subclass of ``base`` with these methods and attributes.

    Args:
        true: causes that may be named, as a warning at most: what they say happened.
    """
    made = type(id, (base,), {"exact": kind == "healthy" and base.exact, **changes})
    return Fault(
        id, "healthy", text, frozenset(), live=_live(made, needs), formats=("live",), kind=kind, why=why, also=true
    )


def fault(
    id: str,
    cause: str,
    text: str,
    where: str,
    *,
    base: type[Loop] = Loop,
    also: tuple[str, ...] = (),
    why: str = "",
    needs: dict[str, Any] | None = None,
    visible: bool = True,
    **changes: Any,
) -> Fault:
    """A fault of a loop; ``where`` are the kinds of evidence that can show it."""
    made = type(id, (base,), {"exact": False, "faulty": True, **changes})
    return Fault(
        id, cause, text, seen(where), live=_live(made, needs), formats=("live",), also=also, why=why, visible=visible
    )


def _live(kind: type[Loop], needs: dict[str, Any] | None) -> Callable[[Path, random.Random, int], None]:
    return lambda folder, rng, k: _made(kind, needs or {}, folder, rng, k)
