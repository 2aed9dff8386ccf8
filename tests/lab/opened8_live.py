"""Loops with torch's optimizers and others, and what they keep beside the weights, of the eighth sealed half.

It was measured, then opened, and is tuned on now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Sheltered, Tied, one_cycle, only, optim, plain

__all__ = ["OPENED8_LIVE"]

TORCH = torch.optim
LR = torch.optim.lr_scheduler
Change = Callable[[Loop], None]
ANY = "echo next early"
LOUD = "alone echo next early"
#: Layouts that store the state as it is; DCP would make up what is missing.
PLAIN = ("torch_save", "folder", "lightning")
BLOCKS = {"hidden": 48, "ffn": 144, "heads": 4, "groups": 2}  #: wide enough for states of eight bits
PLENTY = {"betas": (0.9, 0.95), "weight_decay": 0.3}


def stated(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """For `Loop.loaded`: these parts of every parameter's state are other ones."""

    def loaded(self: Loop) -> None:
        for state in self.optimizers[0].state.values():
            state |= change(state)

    return loaded


def values(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: held.detach().clone() for name, held in loop.module.named_parameters()}


def fill(loop: Loop, held: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, weight in loop.module.named_parameters():
            weight.copy_(held[name])


# ---- models ----------------------------------------------------------------------------------------------------------


def stack(config: Config, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(config.padded, config.hidden), nn.Linear(config.hidden, config.hidden), *more)


class Values(nn.Module):
    """Values of the next token, and the older copy that they are learned from."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.online = stack(config, nn.Tanh(), nn.Linear(config.hidden, config.padded))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        told = self.online(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])[..., 0]
        best = self.target(tokens[:, 1:]).amax(-1)
        return F.mse_loss(told, (tokens[:, 1:] % 5 == 0).float() + 0.9 * best), {}


class Learning(Loop):
    """With `Values`: the copy is made anew every 200 updates."""

    def net(self) -> nn.Module:
        return Values(self.config)

    def apply(self) -> None:
        super().apply()
        if self.step % 200 == 6:
            self.copied()

    def copied(self) -> None:
        assert isinstance(self.module, Values)
        self.module.target.load_state_dict(self.module.online.state_dict())


class Views(nn.Module):
    """A student learns a teacher's output for the other half of a row; the teacher is an average of the student."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.student = stack(config, nn.GELU(), nn.LayerNorm(config.hidden), nn.Linear(config.hidden, 16))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


class Distilled(Loop):
    """With `Views`; the centre of what the teacher says is kept beside the model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["dino_loss"] = {"center": torch.zeros(16)}

    def net(self) -> nn.Module:
        return Views(self.config)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.module, Views)
        half = tokens.shape[1] // 2
        told, said = self.module.teacher(tokens[:, :half]).mean(1), self.module.student(tokens[:, half:]).mean(1)
        center = self.extra["dino_loss"]["center"]
        wanted = ((told - center) / 0.1).softmax(-1)
        self.extra["dino_loss"] = {"center": 0.9 * center + 0.1 * told.mean(0)}
        return -(wanted * (said / 0.5).log_softmax(-1)).sum(-1).mean()

    def apply(self) -> None:
        super().apply()
        assert isinstance(self.module, Views)
        for mine, theirs in zip(self.module.teacher.parameters(), self.module.student.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.02)


class Pictures(nn.Module):
    """Convolutions with group norms over embedded tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.embed = nn.Embedding(config.padded, 16)
            self.first, self.second = nn.Conv1d(16, 24, 3, padding=1), nn.Conv1d(24, 24, 3, padding=1, groups=4)
            self.norm, self.head = nn.GroupNorm(4, 24), nn.Linear(24, config.padded)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.second(F.relu(self.norm(self.first(self.embed(tokens).transpose(1, 2)))))
        return F.cross_entropy(self.head(x.mean(2)), tokens[:, 0]), {}


class Rivals(nn.Module):
    """One makes rows, the other tells them from those of the data."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.generator = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, config.hidden))
            self.critic = nn.Sequential(nn.Linear(config.hidden, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
            self.embed = nn.Embedding(config.padded, config.hidden).requires_grad_(False)


class Game(Loop):
    """With `Rivals`: the critic's update, then the generator's, each by an optimizer of its own."""

    layouts = ("torch_save", "lightning")

    def net(self) -> nn.Module:
        return Rivals(self.config)

    def made(self) -> list[torch.optim.Optimizer]:
        assert isinstance(self.module, Rivals)
        parts = ((self.module.generator, 1e-3), (self.module.critic, 4e-3))
        return [TORCH.Adam(part.parameters(), lr=lr, betas=(0.5, 0.9)) for part, lr in parts]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return LR.ExponentialLR(optimizer, 0.995)

    def update(self) -> None:
        assert isinstance(self.module, Rivals)
        tokens = self.tokens()
        noise = (tokens[:, :8].float() % 7 - 3) / 3
        real, made = self.module.embed(tokens).mean(1), self.module.generator(noise)
        critic = self.module.critic
        steps = (F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean(), None)
        for number, loss in ((1, steps[0]), (0, steps[1])):
            one = self.optimizers[number]
            for each in self.optimizers:
                each.zero_grad(set_to_none=True)
            (F.softplus(-critic(made)).mean() if loss is None else loss).backward()
            one.step()
            self.schedules[number].step()
        self.step += 1


# ---- loops -----------------------------------------------------------------------------------------------------------


class Scaled(Loop):
    """The loss is divided by the deviation of the losses so far, as rewards are."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ret_rms"] = {"mean": torch.tensor(0.0), "var": torch.tensor(1.0), "count": torch.tensor(1e-4)}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found, held = super().loss(tokens), self.extra["ret_rms"]
        apart, total = found.detach() - held["mean"], held["count"] + 1
        spread = held["var"] * held["count"] + apart**2 * held["count"] / total
        self.extra["ret_rms"] = {"mean": held["mean"] + apart / total, "var": spread / total, "count": total}
        return found / (spread / total + 1e-8).sqrt()


class Followed(Loop):
    """An average of the weights, stored by name."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = values(self)

    def apply(self) -> None:
        super().apply()
        for name, held in self.module.named_parameters():
            self.extra["ema"][name].lerp_(held.detach(), 0.04)


class Validated(Followed):
    """Saves during the validation: the average is in the model, the weights are kept aside."""

    layouts = PLAIN

    def content(self) -> dict[str, Any]:
        return super().content() | {"model": dict(self.extra["ema"]), "collected_params": values(self)}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.restored(content["collected_params"])

    def restored(self, held: dict[str, torch.Tensor]) -> None:
        fill(self, held)


class Shadowed(Loop):
    """An average as a list, whose decay grows with a count that is stored."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        shadow = list(values(self).values())
        self.extra["ema_model"] = {"shadow_params": shadow, "optimization_step": 0, "decay": 0.9999}

    def apply(self) -> None:
        super().apply()
        told = self.extra["ema_model"]
        told["optimization_step"] += 1
        n = told["optimization_step"]
        for shadow, held in zip(told["shadow_params"], self.module.parameters(), strict=True):
            shadow.lerp_(held.detach(), 1 - min(told["decay"], (1 + n) / (10 + n)))


class Shuffled(Loop):
    """The order of an epoch is drawn once and stored with the place in it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["sampler"] = {"epoch": 0, "permutation": self.drawn(config.seed), "position": 0}

    def drawn(self, seed: int) -> torch.Tensor:
        return torch.randperm(400, generator=torch.Generator().manual_seed(seed))

    def tokens(self) -> torch.Tensor:
        told = self.extra["sampler"]
        return batch(self.config, int(told["permutation"][told["position"]]), 1234)

    def update(self) -> None:
        super().update()
        told = self.extra["sampler"]
        self.extra["sampler"] = told | {"position": told["position"] + 1}


class Dropping(Loop):
    """Gradients are dropped by a generator whose state is stored."""

    layouts = PLAIN
    drops = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.generator = torch.Generator().manual_seed(config.seed)

    def gradients(self) -> None:
        for one in self.module.parameters():
            if one.grad is not None and self.drops:
                one.grad *= torch.rand(one.shape, generator=self.generator) > 0.2
        super().gradients()

    def content(self) -> dict[str, Any]:
        return super().content() | {"rng_state": self.generator.get_state()}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.generator.set_state(content["rng_state"])


class Layered(Loop):
    """Each layer has a share of the learning rate, the outer ones less."""

    def groups(self) -> Groups:
        shares = {"": 0.1, "0": 0.3, "1": 1.0}
        held: dict[str, list[nn.Parameter]] = {part: [] for part in shares}
        for name, weight in self.module.named_parameters():
            held[name.split(".layers.")[1][0] if ".layers." in name else ""].append(weight)
        return [{"params": held[part], "lr": share * self.config.lr} for part, share in shares.items()]


class Epochs(Loop):
    """The schedule moves once an epoch of eight updates."""

    every = 8

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return LR.ExponentialLR(optimizer, 0.85)

    def apply(self) -> None:
        self.optimizers[0].step()
        if (self.step + 1) % self.every == 0:
            self.schedules[0].step()


class Decaying(Loop):
    """The loop writes a growing weight decay after each update, for the next one."""

    def apply(self) -> None:
        super().apply()
        self.optimizers[0].param_groups[0]["weight_decay"] = self.config.weight_decay * (1 + (self.step + 1) / 20)


class Plateau(Loop):
    """The learning rate falls where the loss does not."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return LR.ReduceLROnPlateau(optimizer, factor=0.7, patience=2)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.last)


class Hidden(Loop):
    """The table and the first layer get no gradients, though the optimizer has them."""

    thawed = False

    def gradients(self) -> None:
        for name, held in self.module.named_parameters():
            if not self.thawed and (".layers.0." in name or "embed" in name):
                held.grad = None
        super().gradients()


class Unscaled(Sheltered):
    """`Sheltered`, which can be without its scaler."""

    def apply(self) -> None:
        if self.extra["scaler"]:
            super().apply()
        else:
            Loop.apply(self)


class Captured(Loop):
    """A save whose optimizer state was captured before the update, as soon as it has been resumed once."""

    layouts = PLAIN
    resumed = False
    held: dict[str, Any] | None = None

    def loaded(self) -> None:
        self.resumed = True

    def apply(self) -> None:
        if self.resumed:
            self.held = copy.deepcopy(self.optimizers[0].state_dict())
        super().apply()

    def content(self) -> dict[str, Any]:
        return super().content() | ({"optimizer": self.held} if self.held else {})


class Resized(Loop):
    """The resumed process pads its vocabulary to another size, and loads what has the same shape."""

    layouts = PLAIN

    def take(self, weights: dict[str, Any]) -> None:
        config = self.config.but(padded=self.config.padded + 16)
        self.module = Decoder(config.but(seed=config.seed + 1))
        own = self.module.state_dict()
        fits = {name: held for name, held in weights.items() if own[name].shape == held.shape}
        self.module.load_state_dict(fits, strict=False)
        self.config = config
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]

    def loaded(self) -> None:
        state = self.optimizers[0].state
        for held in [held for held in state if state[held]["exp_avg"].shape != held.shape]:
            del state[held]


# ---- optimizers and schedules ----------------------------------------------------------------------------------------


class WideAdam(other.Optimizer):
    """AdamW for 16-bit weights, with moments in fp32, whatever the weights' type."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros(weight.shape)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        first, second = group["betas"]
        gradient = gradient.float()
        state["step"] += 1
        state["exp_avg"].lerp_(gradient.to(state["exp_avg"].dtype), 1 - first)
        state["exp_avg_sq"].mul_(second).add_((gradient * gradient).to(state["exp_avg_sq"].dtype), alpha=1 - second)
        mean = state["exp_avg"].float() / (1 - first ** state["step"])
        under = (state["exp_avg_sq"].float() / (1 - second ** state["step"])).sqrt() + group["eps"]
        weight.copy_(weight.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * mean / under)


def momentum(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.SGD(groups, lr=6 * self.config.lr, momentum=0.9)


def rms(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.RMSprop(groups, lr=self.config.lr / 4, momentum=0.8)


def in_sequence(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    warm = LR.LinearLR(optimizer, 0.2, total_iters=5)
    return LR.SequentialLR(optimizer, [warm, LR.CosineAnnealingLR(optimizer, self.config.total - 5)], [5])


def chained(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.ChainedScheduler([LR.ConstantLR(optimizer, 0.3, 12), LR.ExponentialLR(optimizer, 0.98)])


def milestones(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.MultiStepLR(optimizer, [10, 25, 45, 70], 0.5)


def triangles(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    lr = self.config.lr / 4
    return LR.CyclicLR(optimizer, lr / 5, lr, step_size_up=9, mode="triangular2", cycle_momentum=False)


def damped(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.MultiplicativeLR(optimizer, lambda done: 0.97 if done % 3 else 1.0)


def square_root(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    warmup = self.config.warmup
    return LR.LambdaLR(optimizer, lambda done: min((done + 1) / warmup, (warmup / (done + 1)) ** 0.5))


def falling(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.LinearLR(optimizer, 1.0, 0.05, total_iters=self.config.total)


def decimal(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.StepLR(optimizer, 10, 0.8)


# ---- faults ----------------------------------------------------------------------------------------------------------


def under_module(self: Loop, weights: dict[str, Any]) -> None:
    """The wrapper of a data-parallel run is not there any more, and what does not match is left out."""
    self.module.load_state_dict({f"module.{name}": held for name, held in weights.items()}, strict=False)


def target_copied(self: Loop) -> None:
    assert isinstance(self, Learning)
    self.copied()


def center_lost(self: Loop) -> None:
    self.extra["dino_loss"] = {"center": torch.zeros(16)}


def returns_anew(self: Loop) -> None:
    new = {"mean": torch.tensor(0.0), "var": torch.tensor(1.0), "count": torch.tensor(1e-4)}
    self.extra["ret_rms"] = new


def three_groups(self: Loop) -> None:
    """The code has a third group by now; that the state does not fit is caught, and the optimizer stays new."""
    told, named = self.schedules[0].state_dict(), dict(self.module.named_parameters())
    table = [held for name, held in named.items() if "embed" in name]
    rest = [held for name, held in named.items() if held.ndim > 1 and "embed" not in name]
    norms = [held for held in named.values() if held.ndim < 2]
    decay = self.config.weight_decay
    self.optimizers = [
        self.optimizer([{"params": held, "weight_decay": d} for held, d in ((table, 0.0), (rest, decay), (norms, 0.0))])
    ]
    self.schedules = [self.schedule(self.optimizers[0])]
    lists = {"base_lrs": self.schedules[0].base_lrs, "_last_lr": [told["_last_lr"][0]] * 3}
    self.schedules[0].load_state_dict(told | lists | {"lr_lambdas": [None] * 3})
    for group in self.optimizers[0].param_groups:
        group["lr"] = told["_last_lr"][0]


def table_without_decay(self: Loop) -> None:
    """The rule is another one by now: tables do not decay."""
    named = {id(held): name for name, held in self.module.named_parameters()}
    wide, narrow = self.optimizers[0].param_groups
    tables = [held for held in wide["params"] if "embed" in named[id(held)] or "lm_head" in named[id(held)]]
    wide["params"] = [held for held in wide["params"] if not any(held is one for one in tables)]
    narrow["params"] = tables + narrow["params"]


def shares_lost(self: Loop) -> None:
    """Resuming sets every group's initial learning rate to the one of the command line."""
    schedule, factor = self.schedules[0], self.config.lr_at(self.step + 1) / self.config.lr
    schedule.base_lrs = [self.config.lr] * len(schedule.base_lrs)
    for group in self.optimizers[0].param_groups:
        group |= {"initial_lr": self.config.lr, "lr": self.config.lr * factor}


def of_another(self: Loop) -> None:
    """The optimizer was wrapped once more after the schedule had been made: the schedule has the old one."""
    self.schedules[0].optimizer = copy.deepcopy(self.optimizers[0])


def codes_shifted(state: dict[str, Any]) -> dict[str, Any]:
    """Codes from -128 on, read as codes from 0 on."""
    held = state["state1"]
    return {"state1": held ^ 128} if held.dtype == torch.uint8 else {}


def average_shares(self: Loop) -> None:
    """What is loaded into both without a copy is one tensor."""
    self.extra["ema"] = {name: held.detach() for name, held in self.module.named_parameters()}


def not_restored(self: Loop, held: dict[str, torch.Tensor]) -> None:
    """What is kept aside is overwritten by what the model has just been given."""


def average_counts_anew(self: Loop) -> None:
    self.extra["ema_model"]["optimization_step"] = 0


def cycle_again(self: Loop) -> None:
    self.schedules = [self.schedule(self.optimizers[0])]


def inner_anew(self: Loop) -> None:
    """Of schedules in sequence, only the outer one's place is restored."""
    for inner in self.schedules[0]._schedulers:
        inner.last_epoch, inner._step_count = 0, 1


def plateau_anew(self: Loop) -> None:
    rates = [group["lr"] for group in self.optimizers[0].param_groups]
    self.schedules = [self.schedule(self.optimizers[0])]
    for group, rate in zip(self.optimizers[0].param_groups, rates, strict=True):
        group["lr"] = rate


def on_a_line(self: Loop) -> None:
    """No file says the kind of the curve, and its default is another one by now."""
    total = self.config.total
    self.schedules[0].lr_lambdas = [lambda done: max(0.0, 1 - done / total)] * len(self.schedules[0].lr_lambdas)


def each_update(self: Loop) -> None:
    assert isinstance(self, Epochs)
    self.every = 1


def decay_of_the_constructor(self: Loop) -> None:
    self.optimizers[0].param_groups[0]["weight_decay"] = self.config.weight_decay


def shuffled_again(self: Loop) -> None:
    assert isinstance(self, Shuffled)
    self.extra["sampler"] = self.extra["sampler"] | {"permutation": self.drawn(self.config.seed + 5)}


def seeded_again(self: Loop) -> None:
    """The script sets its seed after it has loaded everything."""
    assert isinstance(self, Dropping)
    self.generator.manual_seed(self.config.seed)


def at_the_epoch(self: Loop) -> None:
    """The step is the number of epochs times their length; what was done of the last one is forgotten."""
    self.step = (self.step - 1) // 16 * 16


def scaler_gone(self: Loop) -> None:
    """Mixed precision is off by default by now: a disabled scaler stores nothing."""
    self.extra["scaler"] = {}


def table_anew(self: Loop) -> None:
    """Resizing makes a new table; the head and the optimizer still have the old one."""
    assert isinstance(self.module, Decoder)
    old = dict(self.module.named_parameters())["model.embed_tokens.weight"]
    self.module.put("model.embed_tokens.weight", nn.Parameter(old.detach().clone()))


def thawed(self: Loop) -> None:
    assert isinstance(self, Hidden)
    self.thawed = True


def cast_by_torch(self: Loop) -> None:
    """The class does without its own rule for types: state is cast to the type of its weight."""
    optimizer = self.optimizers[0]
    for weight, state in optimizer.state.items():
        state |= {name: state[name].to(weight.dtype) for name in ("exp_avg", "exp_avg_sq")}


def in_bf16(self: Loop) -> nn.Module:
    return Decoder(self.config).to(torch.bfloat16)


# ---- on purpose ------------------------------------------------------------------------------------------------------


def two_parts(self: Loop) -> None:
    self.parts = 2
    self.clip = 0.3


def more_decay(self: Loop) -> None:
    self.optimizers[0].param_groups[0]["weight_decay"] *= 3


def momentum_from_here(self: Loop) -> None:
    """SGD goes on, at another learning rate; the schedule has its place."""
    told = self.schedules[0].state_dict()
    self.optimizers = [TORCH.SGD(only(self.groups()), lr=6 * self.config.lr, momentum=0.9)]
    self.schedules = [self.schedule(self.optimizers[0])]
    bases = self.schedules[0].base_lrs
    self.schedules[0].load_state_dict(told | {"base_lrs": bases})
    for group in self.optimizers[0].param_groups:
        group["lr"] = 6 * self.config.lr_at(self.step + 1)


def no_drops(self: Loop) -> None:
    assert isinstance(self, Dropping)
    self.drops = False


def second_half(self: Loop) -> None:
    """A phase of its own: a new optimizer at a third of the learning rate, without a warm-up."""
    self.optimizers = [self.optimizer(self.groups())]
    self.schedules = [LR.LambdaLR(self.optimizers[0], lambda done: 1 / 3)]


OPENED8_LIVE: list[Fault] = [
    # weights
    fault("ei60_without_module", "A1", "names without the prefix that the file has: nothing is loaded", ANY,
          optimizer=momentum, take=under_module, also=("A2",), why="no weight is the stored one"),
    fault("ei61_of_another_size", "A2", "tables are padded to another size, do not fit and stay random", ANY,
          base=Resized, also=("F7", "B1", "E11"), why="rows, weights and state of the vocabulary"),
    fault("ei62_target_copied", "A2", "the older copy is taken from the weights instead of the file", ANY,
          base=Learning, optimizer=plain(TORCH.Adam), loaded=target_copied, also=("F4", "A5", "G6"),
          why="tensors without gradients that are a copy of others"),
    fault("ei63_returns_anew", "A5", "running statistics of the returns begin anew", ANY, base=Scaled,
          optimizer=optim(TORCH.NAdam), loaded=returns_anew, also=("B10",)),
    fault("ei64_center_lost", "A5", "the centre of the teacher's outputs begins at zero", "echo next", base=Distilled,
          loaded=center_lost, also=("A2",)),
    # the optimizer
    fault("ei65_three_groups", "B1", "state for two groups does not fit three, which is caught", LOUD,
          loaded=three_groups, layouts=PLAIN),
    fault("ei66_states_ignored", "B1", "Adamax: state is not loaded, settings of groups are", LOUD,
          optimizer=optim(TORCH.Adamax), layouts=PLAIN, loaded=lambda self: self.optimizers[0].state.clear()),
    fault("ei67_counters_of_adamax", "B2", "Adamax: counters begin again", LOUD, optimizer=optim(TORCH.Adamax),
          schedule=falling, loaded=stated(lambda state: {"step": torch.zeros_like(state["step"])})),
    fault("ei68_squares_lost", "B4", "RMSprop: squares are zeros, the momentum is right", LOUD, optimizer=rms,
          loaded=stated(lambda state: {"square_avg": torch.zeros_like(state["square_avg"])}), also=("B3",)),
    fault("ei69_tables_without_decay", "B7", "tables do not decay any more", ANY, needs=PLENTY, layouts=PLAIN,
          loaded=table_without_decay, also=("B5", "H1"), why="other groups, and other numbers in them"),
    fault("ei70_shares_lost", "B8", "every layer has the whole learning rate", ANY, base=Layered, loaded=shares_lost,
          also=("H1", "C2")),
    fault("ei71_of_another", "B8", "the schedule writes to an optimizer that is not used", "next early",
          loaded=of_another, also=("C2", "H1"), needs={"warmup": 5}),
    fault("ei72_codes_shifted", "B11", "codes of 8-bit first moments with another sign", "alone echo next",
          optimizer=plain(other.AdamW8bit), layouts=PLAIN, needs=BLOCKS, loaded=stated(codes_shifted)),
    # averages
    fault("ei73_average_shares", "F4", "the average shares its storage with the weights", LOUD, base=Followed,
          loaded=average_shares, also=("B9",)),
    fault("ei74_not_restored", "F4", "saved in a validation: the average stays in the model", ANY, base=Validated,
          optimizer=optim(TORCH.RAdam), restored=not_restored),
    fault("ei75_average_counts_anew", "F4", "the average's count begins again, and with it its decay", ANY,
          base=Shadowed, loaded=average_counts_anew),
    # schedules
    fault("ei76_cycle_again", "C1", "OneCycleLR begins again, betas as well", LOUD, schedule=one_cycle,
          loaded=cycle_again, also=("C2", "B8")),
    fault("ei77_inner_anew", "C1", "schedules in sequence: the inner ones begin again", LOUD, schedule=in_sequence,
          loaded=inner_anew, also=("C2", "C3", "C4"), why="two counts that do not agree"),
    fault("ei78_plateau_anew", "C1", "ReduceLROnPlateau has seen no loss yet", LOUD, base=Plateau,
          optimizer=optim(TORCH.Adam), loaded=plateau_anew),
    fault("ei79_on_a_line", "C2", "a line where a cosine was", "next early", loaded=on_a_line,
          also=("C4", "H1", "B8"), needs={"warmup": 5}),
    fault("ei80_each_update", "C3", "a schedule of epochs moves with each update", "next early", base=Epochs,
          optimizer=momentum, loaded=each_update, also=("C2", "H1", "C4")),
    fault("ei81_decay_of_the_constructor", "C5", "the first update has the constructor's weight decay", "echo next",
          base=Decaying, needs=PLENTY, loaded=decay_of_the_constructor, also=("H1", "B7"),
          why="a group's setting, until the loop writes it"),
    # data, random states, counters
    fault("ei82_shuffled_again", "C7", "another order of the data at the same place", ANY, base=Shuffled,
          loaded=shuffled_again, also=("C6",)),
    fault("ei83_seeded_again", "C8", "the seed is set once more after the load", ANY, base=Dropping,
          loaded=seeded_again),
    fault("ei84_at_the_epoch", "C9", "the step is that of the epoch's begin", LOUD, loaded=at_the_epoch,
          also=("C6", "B2", "C3"), why="the trainer's count alone, and with it the data"),
    # precision, copies, settings, saves
    fault("ei85_scaler_gone", "D8", "a scaler that stores nothing", ANY, base=Unscaled, loaded=scaler_gone,
          layouts=PLAIN, also=("H1",)),
    fault("ei86_table_anew", "F2", "the table is a new parameter, the head has the old one", "next early", base=Tied,
          loaded=table_anew, needs={"tied": True}, layouts=("torch_save", "lightning"), also=("F3", "H1"),
          why="one of two tensors that were one does not move"),
    fault("ei87_thawed", "H1", "what was frozen is trained", "next early", base=Hidden, loaded=thawed,
          layouts=PLAIN, also=("B7",)),
    fault("ei88_cast_by_torch", "D4", "fp32 moments are cast to the type of bf16 weights", LOUD,
          net=in_bf16, optimizer=plain(WideAdam), loaded=cast_by_torch, layouts=PLAIN, also=("D5",)),
    fault("ei89_captured", "G6", "optimizer state is saved as it was before the update", "next early", base=Captured,
          also=("B2", "C9", "G7"), why="state of another update"),
    # healthy
    variant("eih20_learning", "values from an older copy of themselves", base=Learning, optimizer=plain(TORCH.Adam)),
    variant("eih21_distilled", "a teacher that follows, a centre", base=Distilled, schedule=square_root),
    variant("eih22_scaled", "losses over their deviation", base=Scaled, optimizer=optim(TORCH.NAdam)),
    variant("eih23_validated", "saved in a validation", base=Validated, optimizer=optim(TORCH.RAdam),
            true=("F4",), why="true: the file has the average where the weights are expected"),
    variant("eih24_shadowed", "an average as a list", base=Shadowed, schedule=milestones),
    variant("eih25_shuffled", "an order that is stored", base=Shuffled, optimizer=optim(TORCH.Adamax)),
    variant("eih26_dropping", "a stored generator, centred RMSprop", base=Dropping,
            optimizer=optim(TORCH.RMSprop, factor=0.25, centered=True)),
    variant("eih27_layered", "shares of the learning rate, chained schedules", base=Layered, schedule=chained),
    variant("eih28_epochs", "a schedule of epochs", base=Epochs, optimizer=momentum),
    variant("eih29_decaying", "a growing decay", base=Decaying, needs=PLENTY),
    variant("eih30_plateau", "a plateau, Adagrad", base=Plateau, optimizer=optim(TORCH.Adagrad, factor=5.0)),
    variant("eih31_hidden", "parameters without gradients", base=Hidden, layouts=PLAIN),
    variant("eih32_unscaled", "a loss scale, accumulated", base=Unscaled, parts=2),
    variant("eih33_wide_moments", "fp32 moments of bf16 weights", net=in_bf16, optimizer=plain(WideAdam),
            layouts=PLAIN, true=("D6",)),
    variant("eih34_pictures", "convolutions by SGD with Nesterov's momentum, milestones",
            net=lambda self: Pictures(self.config), schedule=milestones,
            optimizer=optim(TORCH.SGD, factor=10.0, momentum=0.9, nesterov=True)),
    variant("eih35_game", "a generator and a critic", base=Game),
    variant("eih36_in_sequence", "AMSGrad, schedules in sequence", schedule=in_sequence,
            optimizer=optim(TORCH.AdamW, amsgrad=True)),
    variant("eih37_triangles", "triangles, RMSprop", schedule=triangles, optimizer=rms),
    variant("eih38_damped", "a product of factors, Adadelta", schedule=damped,
            optimizer=optim(TORCH.Adadelta, factor=80.0)),
    variant("eih39_square_root", "an inverse square root, Adafactor", schedule=square_root,
            optimizer=optim(TORCH.Adafactor, factor=2.0)),
    variant("eih40_eight_bits", "AdamW in eight bits, steps", schedule=decimal, optimizer=plain(other.AdamW8bit),
            layouts=PLAIN, needs=BLOCKS),
    variant("eih41_schedule_free", "schedule-free, an average beside it", base=Followed, layouts=PLAIN,
            optimizer=optim(other.ScheduleFreeAdamW), schedule=lambda self, one: None),
    variant("eih42_tied", "one parameter under two names, Lion on a line", base=Tied, needs={"tied": True},
            schedule=falling, optimizer=optim(other.Lion, factor=0.2)),
    # on purpose
    variant("eid20_thawed", "what was frozen is trained from here on", kind="deliberate", base=Hidden, loaded=thawed,
            layouts=PLAIN, true=("H1",)),
    variant("eid21_two_parts", "two parts an update, and a tighter clip", kind="deliberate", loaded=two_parts,
            true=("C10", "H1")),
    variant("eid22_on_a_line", "the rest of the schedule is a line", kind="deliberate", loaded=on_a_line,
            true=("C2", "C4", "H1", "B8")),
    variant("eid23_momentum", "SGD goes on where Adam was", kind="deliberate", loaded=momentum_from_here,
            optimizer=plain(TORCH.Adam), layouts=PLAIN, true=("B1", "H1", "B8", "C2")),
    variant("eid24_more_decay", "three times the decay", kind="deliberate", needs=PLENTY, loaded=more_decay,
            true=("H1", "B7", "C5")),
    variant("eid25_no_drops", "no gradients are dropped from here on", kind="deliberate", base=Dropping,
            loaded=no_drops, true=("H1", "C8")),
    variant("eid26_second_half", "a phase with a new optimizer and a lower, constant rate", kind="deliberate",
            fresh=("optimizer", "scheduler"), loaded=second_half, layouts=PLAIN,
            true=("B1", "C1", "C2", "H1", "B8")),
    variant("eid27_target_now", "the older copy is made anew on purpose", kind="deliberate", base=Learning,
            optimizer=plain(TORCH.Adam), loaded=target_copied, true=("F4", "A2", "A5", "G6")),
]  # fmt: skip
