"""Training loops in plain torch of the fifth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Tied, muon, optim, plain

__all__ = ["OPENED5_LIVE"]

TORCH = torch.optim
SCHEDULES = torch.optim.lr_scheduler
#: Layouts that store the state as it is; DCP would make up what is missing.
PLAIN = ("torch_save", "folder", "lightning")


def states(loop: Loop, number: int = 0) -> list[dict[str, Any]]:
    return list(loop.optimizers[number].state.values())


def zeroed(*names: str, number: int = 0) -> Callable[[Loop], None]:
    """For `Loop.loaded`: these tensors of the optimizer's state are zeros."""

    def loaded(self: Loop) -> None:
        for state in states(self, number):
            for name in names:
                if isinstance(state.get(name), torch.Tensor):
                    state[name] = torch.zeros_like(state[name])

    return loaded


def dropped(self: Loop) -> None:
    self.optimizers[0].state.clear()


# ---- trainers --------------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Predicts a token from the four before it: table, a matrix with bias, batch norm, head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(config.seed)
        self.config = config
        self.table = nn.Embedding(config.padded, config.hidden)
        self.inner = nn.Linear(4 * config.hidden, config.ffn)
        self.norm = nn.BatchNorm1d(config.ffn)
        self.head = nn.Linear(config.ffn, config.padded)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim > 1:
                    weight.copy_(torch.randn(weight.shape, generator=made) * weight.shape[-1] ** -0.5)
            for layer in (self.inner, self.head):
                layer.bias.zero_()

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = tokens.unfold(1, 5, 1).reshape(-1, 5)
        x = self.table(rows[:, :4]).flatten(1)
        logits = self.head(torch.relu(self.norm(self.inner(x))))
        return nn.functional.cross_entropy(logits, rows[:, 4]), {}


class Mixed(Loop):
    def net(self) -> nn.Module:
        return Mixer(self.config)


class Layerwise(Loop):
    """Each layer's groups have a rate of their own."""

    def groups(self) -> Groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for name, weight in self.module.named_parameters():
            depth = int(name.split(".")[2]) + 1 if ".layers." in name else 0 if "embed" in name else 3
            parts.setdefault(0.7 ** (3 - depth), []).append(weight)
        return [{"params": ws, "lr": self.config.lr * share} for share, ws in parts.items()]


class Plateau(Loop):
    """The rate falls when the loss does not."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return SCHEDULES.ReduceLROnPlateau(
            optimizer, factor=0.7, patience=1, threshold=0.3, cooldown=2, min_lr=self.config.lr / 50
        )

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step(self.last)


class Averaged(Loop):
    """Stochastic weight averaging of torch."""

    layouts = ("torch_save", "torch_save", "lightning")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.average = torch.optim.swa_utils.AveragedModel(self.module)

    def apply(self) -> None:
        super().apply()
        self.average.update_parameters(self.module)

    def content(self) -> dict[str, Any]:
        return super().content() | {"swa_model": self.average.state_dict()}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.average.load_state_dict(content["swa_model"])


class Shadowed(Loop):
    """An exponential average by name."""

    layouts = ("torch_save", "folder", "lightning")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                self.extra["ema"][name].lerp_(weight, 0.02)

    def content(self) -> dict[str, Any]:
        return super().content() | {"ema": dict(self.extra["ema"])}


class Scaled(Loop):
    """A loss scale that doubles every seventh update."""

    layouts = ("torch_save", "folder")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        told = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}
        self.extra["scaler"] = told | {"_growth_tracker": 0}

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": told["scale"] * 2, "_growth_tracker": 0}


class Positioned(Loop):
    """The position in the data is that of torchdata's StatefulDataLoader."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {
            "_sampler_iter_yielded": 0,
            "_num_yielded": 0,
            "_IterableDataset_len_called": None,
            "_shared_seed": None,
            "fetcher_state": None,
            "dataset_state": None,
            "_iterator_finished": False,
        }

    def tokens(self) -> torch.Tensor:
        from tests.lab.data import batch

        told = self.extra["dataloader"]
        found = batch(self.config, told["_num_yielded"], 1234)
        told["_num_yielded"] += 1
        told["_sampler_iter_yielded"] += 1
        return found


class Wrapped(Loop):
    """Weights are saved under a wrapper's prefix."""

    prefix = "module."
    layouts = PLAIN

    def weights(self) -> dict[str, Any]:
        return {f"{self.prefix}{name}": tensor for name, tensor in super().weights().items()}

    def take(self, weights: dict[str, Any]) -> None:
        super().take({name.removeprefix("module."): tensor for name, tensor in weights.items()})


class Wide(other.Optimizer):
    """AdamW whose moments are fp32 whatever the weights are."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros(weight.shape)
        return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = float(state["step"])
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradient.to(m.dtype), 1 - first)
        v.mul_(second).add_(gradient.to(v.dtype).square(), alpha=1 - second)
        under = (v.float() / (1 - second**t)).sqrt_().add_(group["eps"])
        new = weight.float() * (1 - group["lr"] * group["weight_decay"])
        weight.copy_(new - group["lr"] / (1 - first**t) * m.float() / under)


class Half(Loop):
    """bf16 weights beside fp32 moments."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return Wide(groups, lr=self.config.lr)


class Ladder(Loop):
    """Warm-up, then steps, one schedule after another."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        rise = SCHEDULES.LinearLR(optimizer, 0.1, total_iters=6)
        fall = SCHEDULES.CosineAnnealingLR(optimizer, self.config.total)
        return SCHEDULES.SequentialLR(optimizer, [rise, fall], [6])


class Noisy(Loop):
    """Dropout on the table's gradient; the generator is saved."""

    layouts = ("torch_save", "lightning")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.chance = torch.Generator().manual_seed(config.seed)
        self.extra["rng_state"] = self.chance.get_state()

    def gradients(self) -> None:
        table = dict(self.module.named_parameters())["model.embed_tokens.weight"]
        assert table.grad is not None
        table.grad *= torch.rand(table.shape[0], 1, generator=self.chance) > 0.1
        super().gradients()
        self.extra["rng_state"] = self.chance.get_state()

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.chance.set_state(content["rng_state"])


def by_layers(self: Loop) -> list[torch.optim.Optimizer]:
    """One optimizer a layer, one for the rest."""
    named = list(self.module.named_parameters())
    inner = [[w for name, w in named if f".layers.{n}." in name] for n in range(self.config.layers)]
    rest = [w for name, w in named if ".layers." not in name]
    return [torch.optim.AdamW(ws, lr=self.config.lr, betas=self.config.betas) for ws in (*inner, rest)]


def schedule_of(kind: Any, **more: Any) -> Any:
    return lambda self, optimizer: kind(optimizer, **more)


def named(self: Loop) -> Groups:
    return [{"params": list(self.module.named_parameters())}]


# ---- mistakes --------------------------------------------------------------------------------------------------------


def product_lost(self: Loop) -> None:
    for state in states(self):
        state["mu_product"] = torch.ones_like(state["mu_product"])


def counters_zero(self: Loop) -> None:
    for state in states(self):
        state["step"] = torch.zeros_like(state["step"])


def exchanged(self: Loop) -> None:
    one, two = self.optimizers[:2]
    content = one.state_dict(), two.state_dict()
    one.load_state_dict(content[1])
    two.load_state_dict(content[0])


def z_of_weights(self: Loop) -> None:
    for weight, state in self.optimizers[0].state.items():
        state["z"] = weight.detach().clone()


def peak(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def top(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr


def constructed(self: Loop) -> None:
    """Only ``state`` was taken from the file; the groups are the constructor's until the schedule steps."""
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr_at(1)


def replayed(self: Loop) -> None:
    for schedule in self.schedules:
        for _ in range(self.step):
            schedule.step()


def flagged(self: Any) -> None:
    self.resumed = True


class PerPart(Loop):
    """Once resumed, the schedule steps with every micro-batch."""

    parts = 2

    def apply(self) -> None:
        super().apply()
        if getattr(self, "resumed", False):
            for schedule in self.schedules:
                for _ in range(self.parts - 1):
                    schedule.step()


def count_lost(self: Any) -> None:
    self.average.n_averaged.zero_()


def aliased(self: Any) -> None:
    self.extra["ema"] = {name: weight.data for name, weight in self.module.named_parameters()}


def statistics_lost(self: Any) -> None:
    self.module.norm.reset_running_stats()


def biases_lost(self: Any) -> None:
    with torch.no_grad():
        for layer in (self.module.inner, self.module.head):
            layer.bias.zero_()


def untied(self: Loop) -> None:
    assert isinstance(self.module, Decoder)
    table = dict(self.module.named_parameters())["model.embed_tokens.weight"]
    self.module.put("lm_head.weight", nn.Parameter(table.detach().clone()))


def assigned(self: Loop) -> None:
    """``load_state_dict(assign=True)`` after the optimizer was made: it holds what the model no longer has."""
    self.module.load_state_dict({n: t.clone() for n, t in self.module.state_dict().items()}, assign=True)
    for weight in self.module.parameters():
        weight.requires_grad_(True)


def decays_swapped(self: Loop) -> None:
    one, two = self.optimizers[0].param_groups
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def rates_alike(self: Loop) -> None:
    schedule, groups = self.schedules[0], self.optimizers[0].param_groups
    schedule.base_lrs = [self.config.lr] * len(groups)
    for group in groups:
        group["lr"] *= self.config.lr / group["initial_lr"]


class Cast(Half):
    """The state is loaded through torch, which casts it to the type of the weights."""

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        torch.optim.Optimizer.load_state_dict(self.optimizers[0], content["optimizer"])


class Unprefixed(Wrapped):
    """No name matches, and nothing was strict."""

    def take(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict(weights, strict=False)


def counter_shared(self: Loop) -> None:
    shared = states(self)[0]["step"].clone()
    for state in states(self):
        state["step"] = shared


# ---- on purpose ------------------------------------------------------------------------------------------------------


class ToSGD(Loop):
    """The run ends with SGD."""

    fresh = ("optimizer",)
    layouts = ("torch_save", "folder", "lightning")

    def loaded(self) -> None:
        self.optimizers = [torch.optim.SGD(self.module.parameters(), lr=self.config.lr * 10, momentum=0.9)]
        self.schedules = [self.schedule(self.optimizers[0])]


class ToHalf(Loop):
    """Weights and moments are bf16 from here on."""

    layouts = PLAIN

    def loaded(self) -> None:
        content = copy.deepcopy(self.optimizers[0].state_dict())
        self.module.to(torch.bfloat16)
        self.optimizers[0].load_state_dict(content)


class Later(Loop):
    """An average is begun after the resume."""

    layouts = ("torch_save", "lightning")

    def loaded(self) -> None:
        self.extra["ema"] = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, average in self.extra.get("ema", {}).items():
                average.lerp_(dict(self.module.named_parameters())[name], 0.02)


def table_slower(self: Loop) -> None:
    for schedule in self.schedules:
        schedule.base_lrs = [lr * share for lr, share in zip(schedule.base_lrs, (1.0, 0.1), strict=True)]
    group = self.optimizers[0].param_groups[1]
    group["lr"] *= 0.1
    group["initial_lr"] *= 0.1


def noisier(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"betas": (0.95, group["betas"][1]), "eps": 1e-6}


_FAULTS = [
    fault("ij01_sgd_momentum", "B1", "SGD: the momentum is not loaded", "alone echo", also=("B3",), loaded=dropped,
          optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9), layouts=PLAIN),
    fault("ij02_nadam_product", "B2", "NAdam: the product of momenta is 1 again", "alone echo next early",
          also=("B11", "B1"), loaded=product_lost, optimizer=optim(TORCH.NAdam), layouts=PLAIN,
          why="the product is a counter in another form"),
    fault("ij03_radam_counters", "B2", "RAdam: counters are 0, moments are right", "alone echo next early",
          also=("C9",), loaded=counters_zero, optimizer=optim(TORCH.RAdam), layouts=PLAIN),
    fault("ij04_adamax_norm", "B4", "Adamax: exp_inf is zeros", "alone echo next early", also=("B3",),
          loaded=zeroed("exp_inf"), optimizer=optim(TORCH.Adamax), layouts=PLAIN),
    fault("ij05_adagrad_sum", "B4", "Adagrad: the sums are zeros, the counters are not", "alone echo next early",
          also=("B3", "B1"), loaded=zeroed("sum"), optimizer=optim(TORCH.Adagrad, factor=4.0), layouts=PLAIN,
          why="the sum of squares is all its state"),
    fault("ij06_amsgrad_maximum", "B11", "AdamW: max_exp_avg_sq is zeros", "alone echo next early",
          also=("B4", "B3"), loaded=zeroed("max_exp_avg_sq"), optimizer=optim(TORCH.AdamW, amsgrad=True),
          layouts=PLAIN, why="a maximum below what it is the maximum of"),
    fault("ij07_adafactor_rows", "B4", "Adafactor: the rows' variances are zeros", "alone echo next early",
          also=("B11", "B3"), loaded=zeroed("row_var"), optimizer=optim(TORCH.Adafactor, factor=3.0), layouts=PLAIN),
    fault("ij08_muon_momentum", "B1", "two optimizers: the momentum of Muon is zeros", "alone echo",
          also=("B3",), loaded=zeroed("momentum_buffer"), made=muon, layouts=("torch_save", "lightning")),
    fault("ij09_optimizers_exchanged", "B5", "the states of two optimizers are exchanged", "echo next early",
          also=("E13", "E9"), loaded=exchanged, made=by_layers, layouts=("torch_save", "lightning"),
          why="each layer has an optimizer: its state is that of another layer"),
    fault("ij10_schedule_free_z", "B1", "schedule-free AdamW: z is taken from the weights", "alone echo",
          also=("B3", "F4", "B6"), loaded=z_of_weights, optimizer=optim(other.ScheduleFreeAdamW), layouts=PLAIN,
          schedule=lambda self, one: None, why="z was not restored; the weights are an average of it"),
    fault("ij11_codes_without_scale", "B4", "AdamW8bit: absmax of the second moment is zeros",
          "alone echo next early", also=("B11", "B3"), loaded=zeroed("absmax2"), optimizer=plain(other.AdamW8bit),
          layouts=PLAIN, needs={"hidden": 48, "heads": 4, "groups": 2, "ffn": 96}),
    fault("ij12_recursive_peak", "B8", "the optimizer is made after the schedule was loaded: lr is at its peak",
          "alone echo next early", also=("C2",), loaded=peak, layouts=PLAIN,
          schedule=schedule_of(SCHEDULES.CosineAnnealingLR, T_max=70)),
    fault("ij13_plateau_top", "C2", "the schedule by plateaus goes on, the rate is at the top",
          "alone echo next early", also=("B8", "C1"), base=Plateau, loaded=top, layouts=PLAIN),
    fault("ij14_steps_anew", "C1", "StepLR is new: the fallen rate falls again at other steps",
          "alone echo next early", also=("C2", "C9", "B8"), fresh=("scheduler",), layouts=PLAIN,
          schedule=schedule_of(SCHEDULES.StepLR, step_size=7, gamma=0.6)),
    fault("ij15_replayed", "C3", "the restored schedule is stepped up to the step once more",
          "alone echo next early", also=("C9", "C2", "C1"), loaded=replayed, layouts=PLAIN),
    fault("ij16_per_part", "C3", "after the resume the schedule steps with every micro-batch", "next early",
          also=("C9",), base=PerPart, loaded=flagged, layouts=PLAIN),
    fault("ij17_average_count", "F4", "AveragedModel: n_averaged is 0, the next update replaces the average",
          "alone echo next early", also=("A5", "B2"), base=Averaged, loaded=count_lost),
    fault("ij18_average_aliased", "F4", "the average shares its storage with the weights", "alone echo next early",
          also=("B9",), base=Shadowed, loaded=aliased),
    fault("ij19_statistics", "A5", "batch norm's running statistics are left out", "alone echo next early",
          base=Mixed, loaded=statistics_lost, layouts=PLAIN),
    fault("ij20_biases", "A2", "biases are not loaded and stay 0", "alone echo next", also=("A3",), base=Mixed,
          loaded=biases_lost, layouts=PLAIN),
    fault("ij21_scale", "D8", "the loss scale is back at its default", "echo next early", base=Scaled,
          fresh=("scaler",)),
    fault("ij22_position", "C6", "the data loader's state is left out", "alone echo next early", base=Positioned,
          fresh=("dataloader",), layouts=PLAIN),
    fault("ij23_untied", "F2", "assigning weights unties the head, which no optimizer holds", "alone echo next early",
          base=Tied, loaded=untied, needs={"tied": True}, layouts=PLAIN),
    fault("ij24_assigned", "G7", "the optimizer holds weights that the model no longer has: nothing moves",
          "next early", also=("C9", "B9", "D6"), loaded=assigned, layouts=PLAIN,
          why="all tensors are those of before under a later step"),
    fault("ij25_decays_swapped", "B7", "the two groups' weight decays are exchanged", "echo next early",
          also=("H1", "C5"), loaded=decays_swapped, layouts=PLAIN),
    fault("ij26_constructed", "B8", "groups are the constructor's for one update", "alone echo next",
          also=("C1", "C2", "H1"), loaded=constructed, layouts=PLAIN),
    fault("ij27_cast_to_weights", "D4", "the state is cast to the type of the weights", "echo next early",
          also=("D5",), base=Cast),
    fault("ij28_prefix", "A1", "names with a wrapper's prefix, loaded without strict", "echo next early",
          also=("A2",), base=Unprefixed),
    fault("ij29_counter_shared", "B9", "all parameters count in one tensor", "next early", also=("C9", "B2"),
          loaded=counter_shared, layouts=PLAIN),
    fault("ij30_rates_alike", "H1", "rates by layer are lost, all have the highest", "echo next early",
          also=("B8", "C2"), base=Layerwise, loaded=rates_alike, layouts=PLAIN),
]  # fmt: skip

_WELL = [
    variant("ij40_layerwise", "a rate of its own for each layer", base=Layerwise),
    variant("ij41_plateau", "a schedule by plateaus", base=Plateau, layouts=PLAIN),
    variant("ij42_steps", "StepLR", schedule=schedule_of(SCHEDULES.StepLR, step_size=7, gamma=0.6)),
    variant("ij43_ladder", "SequentialLR: warm-up, then cosine", base=Ladder, layouts=PLAIN),
    variant("ij44_restarts", "cosine with warm restarts",
            schedule=schedule_of(SCHEDULES.CosineAnnealingWarmRestarts, T_0=9, T_mult=2)),
    variant("ij45_exponential", "ExponentialLR, the table without decay",
            schedule=schedule_of(SCHEDULES.ExponentialLR, gamma=0.97)),
    variant("ij46_batch_norm", "batch norm and biases, SGD with decay", base=Mixed,
            optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9), layouts=PLAIN),
    variant("ij47_batch_norm_adam", "batch norm and biases, AdamW", base=Mixed),
    variant("ij48_averaged", "stochastic weight averaging", base=Averaged),
    variant("ij49_shadowed", "an exponential average by name", base=Shadowed),
    variant("ij50_by_layers", "one optimizer a layer", made=by_layers, layouts=("torch_save", "dcp", "lightning")),
    variant("ij51_named", "an optimizer of named parameters", groups=named),
    variant("ij52_nadam_decoupled", "NAdam with decoupled decay",
            optimizer=optim(TORCH.NAdam, decoupled_weight_decay=True)),
    variant("ij53_half", "bf16 weights beside fp32 moments", base=Half, true=("D6",)),
    variant("ij54_double", "weights and moments in fp64", net=lambda self: Decoder(self.config).double()),
    variant("ij55_scaled", "a loss scale that doubles", base=Scaled),
    variant("ij56_positioned", "a stateful data loader", base=Positioned, layouts=PLAIN),
    variant("ij57_wrapped", "weights under the prefix of DDP", base=Wrapped),
    variant("ij58_noisy", "rows of the gradient are dropped by a stored generator", base=Noisy),
]  # fmt: skip

_MEANT = [
    variant("ij60_to_sgd", "the run ends with SGD", base=ToSGD, kind="deliberate", true=("B1", "C1", "C2", "H1"),
            why="true: another optimizer, whose state is new"),
    variant("ij61_to_half", "bf16 from here on", base=ToHalf, kind="deliberate",
            true=("D7", "D4", "D5", "D6", "H1"), why="true: types are narrower"),
    variant("ij62_average_begun", "an average is begun", base=Later, kind="deliberate", true=("A4", "H1"),
            why="true: tensors were added"),
    variant("ij63_slower_group", "the vectors' rate is a tenth", loaded=table_slower, kind="deliberate",
            layouts=PLAIN, true=("H1", "C2", "B8"), why="true: one group's rate is lower"),
    variant("ij64_other_beta1", "beta1 and eps are raised", loaded=noisier, kind="deliberate", layouts=PLAIN,
            true=("H1",), why="true: betas and eps changed"),
    variant("ij65_new_epoch", "the data is begun anew", base=Positioned, kind="deliberate", fresh=("dataloader",),
            layouts=PLAIN, true=("C6", "C7", "H1"), why="true: the data is at its beginning"),
]  # fmt: skip

OPENED5_LIVE: list[Fault] = [*_FAULTS, *_WELL, *_MEANT]
