"""Training loops in plain torch of the sixth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.live import Groups, Loop, fault, variant
from tests.lab.live_healthy import Experts, Sheltered, Tied, muon, only, optim, plain

__all__ = ["OPENED6_LIVE"]

TORCH = torch.optim
LR = torch.optim.lr_scheduler
Change = Callable[[Loop], None]
Hook = Callable[[Loop, torch.optim.Optimizer], Any]
#: Layouts that store the state as it is; DCP would make up what is missing.
PLAIN = ("torch_save", "folder", "lightning")
PLENTY = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def states(loop: Loop, number: int = 0) -> list[dict[str, Any]]:
    return list(loop.optimizers[number].state.values())


def zeroed(*names: str) -> Change:
    """For `Loop.loaded`: these tensors of the optimizer's state are zeros."""

    def loaded(self: Loop) -> None:
        for state in states(self):
            state |= {name: torch.zeros_like(state[name]) for name in names if name in state}

    return loaded


def cleared(number: int = 0) -> Change:
    """For `Loop.loaded`: this optimizer's state was not restored."""
    return lambda self: self.optimizers[number].state.clear()


def grouped(**values: Any) -> Change:
    """For `Loop.loaded`: these settings of every param group are other ones."""

    def loaded(self: Loop) -> None:
        for group in self.optimizers[0].param_groups:
            group |= values

    return loaded


def without(*words: str) -> Callable[[Loop, dict[str, Any]], None]:
    """For `Loop.take`: a lenient load of a file in which these names have other ones."""

    def take(self: Loop, weights: dict[str, Any]) -> None:
        kept = {name: value for name, value in weights.items() if not any(word in name for word in words)}
        self.module.load_state_dict(kept, strict=False)

    return take


# ---- schedules -------------------------------------------------------------------------------------------------------


def one_cycle(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.OneCycleLR(optimizer, self.config.lr, total_steps=self.config.total + 80, cycle_momentum=False)


def cycled_betas(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.OneCycleLR(optimizer, self.config.lr, total_steps=self.config.total + 80)


def warm_restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.CosineAnnealingWarmRestarts(optimizer, 17, 2, self.config.lr / 20)


def in_sequence(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    first = LR.LinearLR(optimizer, 0.1, total_iters=6)
    return LR.SequentialLR(optimizer, [first, LR.CosineAnnealingLR(optimizer, self.config.total)], [6])


def exponential(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.ExponentialLR(optimizer, 0.985)


def constant(self: Loop, optimizer: torch.optim.Optimizer) -> None:
    return None


def by(kind: Any, *arguments: Any, **more: Any) -> Hook:
    return lambda self, optimizer: kind(optimizer, *arguments, **more)


class Plateau(Loop):
    """The learning rate falls when the loss does not."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return LR.ReduceLROnPlateau(optimizer, factor=0.6, patience=4, cooldown=2)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step(self.last)


# ---- loops -----------------------------------------------------------------------------------------------------------


class Layered(Loop):
    """A learning rate for each layer, lower ones for lower layers."""

    def groups(self) -> Groups:
        found: dict[int, list[nn.Parameter]] = {}
        for name, weight in self.module.named_parameters():
            depth = int(name.split(".layers.")[1].split(".")[0]) + 1 if ".layers." in name else 0
            found.setdefault(depth, []).append(weight)
        return [{"params": ws, "lr": self.config.lr * 0.6 ** (2 - depth)} for depth, ws in sorted(found.items())]

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return TORCH.AdamW(groups, lr=self.config.lr, betas=self.config.betas)


class Network(nn.Module):
    """Convolutions over tokens, normalised over the batch."""

    def __init__(self, config: Config, spectral: bool) -> None:
        super().__init__()
        h = config.hidden
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.embed = nn.Embedding(config.padded, h)
            self.conv1, self.conv2 = nn.Conv1d(h, 2 * h, 3), nn.Conv1d(2 * h, h, 3)
            self.bn1, self.bn2 = nn.BatchNorm1d(2 * h), nn.BatchNorm1d(h)
            self.head = nn.Linear(h, config.padded)
            if spectral:
                self.conv2 = spectral_norm(self.conv2)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embed(tokens[:, :-1]).transpose(1, 2)
        x = F.relu(self.bn1(self.conv1(F.pad(x, (2, 0)))))
        x = F.relu(self.bn2(self.conv2(F.pad(x, (2, 0)))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Convolved(Loop):
    layouts = PLAIN

    def net(self) -> nn.Module:
        return Network(self.config, False)


class Spectral(Loop):
    layouts = PLAIN

    def net(self) -> nn.Module:
        return Network(self.config, True)


class Averaged(Loop):
    """Averages of the weights by torch's ``AveragedModel``, from the third update on."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.average = AveragedModel(self.module)

    def apply(self) -> None:
        super().apply()
        if self.step >= 2:
            self.average.update_parameters(self.module)

    def content(self) -> dict[str, Any]:
        return super().content() | {"swa_model": self.average.state_dict()}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.average.load_state_dict(content["swa_model"])


class Followed(Loop):
    """An exponential average of the weights, stored by name."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        for name, weight in self.module.named_parameters():
            self.extra["ema"][name].lerp_(weight.detach(), 0.03)


class InFloat(other.Optimizer):
    """AdamW with fp32 moments for bf16 weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(weight, dtype=torch.float32)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        first, second = group["betas"]
        state["step"] += 1
        g = gradient.float()
        state["exp_avg"].mul_(first).add_(g, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).add_(g * g, alpha=1 - second)
        right = math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
        step = state["exp_avg"].float() / state["exp_avg_sq"].float().sqrt().add(group["eps"]) * right
        weight.copy_(weight.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * step)


class Narrow(Loop):
    """bf16 weights, fp32 state."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        return InFloat(groups, 2 * self.config.lr)


class Decayed(Loop):
    """Weight decay rises over the run, as in self-distillation of vision models."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            if group["weight_decay"]:
                group["weight_decay"] = 0.04 + 0.36 * self.step / self.config.total
        super().apply()


class Alternate(Loop):
    """Two optimizers; the second one makes an update only at every third step."""

    layouts = PLAIN

    def made(self) -> list[torch.optim.Optimizer]:
        named = dict(self.module.named_parameters())
        inside = [weight for name, weight in named.items() if ".layers." in name]
        rest = [weight for name, weight in named.items() if ".layers." not in name]
        return [TORCH.Adam(inside, lr=self.config.lr), TORCH.RMSprop(rest, lr=self.config.lr / 3)]

    def apply(self) -> None:
        self.optimizers[0].step()
        if self.step % 3 == 2:
            self.optimizers[1].step()
        for schedule in self.schedules:
            schedule.step()


class Norms(Loop):
    """Nothing is trained but the norms."""

    def net(self) -> nn.Module:
        found = super().net()
        for name, weight in found.named_parameters():
            weight.requires_grad_("norm" in name)
        return found


class Remembering(Loop):
    """Keeps its optimizer's state of a few updates ago, as a folder with an older file does."""

    layouts = PLAIN
    kept: ClassVar[list[dict[str, Any]]] = []

    def update(self) -> None:
        type(self).kept = [*type(self).kept[-3:], copy.deepcopy(self.optimizers[0].state_dict())]
        super().update()


class Caching(Loop):
    """Its saves are written from what the first of them filled."""

    layouts = PLAIN
    filled: dict[str, Any] | None = None

    def loaded(self) -> None:
        self.filled = copy.deepcopy(super().content())

    def content(self) -> dict[str, Any]:
        return super().content() if self.filled is None else self.filled | {"step": self.step}


# ---- faults ----------------------------------------------------------------------------------------------------------


def counters_of_nadam(self: Loop) -> None:
    for state in states(self):
        state |= {"step": torch.tensor(0.0), "mu_product": torch.tensor(1.0)}


def as_a_set(self: Loop) -> None:
    """The parameters were given as a set: those of one shape come in another order."""
    optimizer = self.optimizers[0]
    for group in optimizer.param_groups:
        alike: dict[torch.Size, list[nn.Parameter]] = {}
        for weight in group["params"]:
            alike.setdefault(weight.shape, []).append(weight)
        for weights in alike.values():
            held = [optimizer.state[weight] for weight in weights]
            for weight, state in zip(weights, [*held[1:], held[0]], strict=True):
                optimizer.state[weight] = state


def state_in_bf16(self: Loop) -> None:
    """torch's own load casts the state to the type of the weights."""
    for state in states(self):
        state |= {name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")}


class Undecayed(Loop):
    """The first update after the load is made without weight decay."""

    first = False

    def loaded(self) -> None:
        self.first = True

    def apply(self) -> None:
        groups = self.optimizers[0].param_groups
        decays = [group["weight_decay"] for group in groups]
        if self.first:
            grouped(weight_decay=0.0)(self)
        super().apply()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        self.first = False


def evaluated(self: Loop) -> None:
    """The weights that were loaded are those of the evaluation."""
    with torch.no_grad():
        for group in self.optimizers[0].param_groups:
            for weight in group["params"]:
                weight.lerp_(self.optimizers[0].state[weight]["z"], 1 - 1 / group["betas"][0])


def no_scales(self: Loop) -> None:
    for state in states(self):
        state |= {name: torch.zeros_like(value) for name, value in state.items() if name.startswith("absmax")}


def inner_begin(self: Loop) -> None:
    """The outer schedule is restored, those that it consists of are not."""
    for inner in self.schedules[0]._schedulers:
        inner.last_epoch, inner._step_count = 0, 1


def stepped_again(self: Loop) -> None:
    self.schedules[0].step()


def bases_decayed(self: Loop) -> None:
    """The schedule was made after the load, from what the learning rate had come to."""
    optimizer = self.optimizers[0]
    self.schedules[0].base_lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]


def orphaned(self: Loop) -> None:
    """The schedule steps the optimizer that was wrapped before the load."""
    state = self.schedules[0].state_dict()
    self.schedules = [self.schedule(self.optimizer(self.groups()))]
    self.schedules[0].load_state_dict(state)


def flattened(self: Loop) -> None:
    """Every group has the one learning rate of the command line."""
    self.schedules[0].base_lrs = [self.config.lr] * len(self.optimizers[0].param_groups)
    for group in self.optimizers[0].param_groups:
        group["initial_lr"] = self.config.lr
        group["lr"] = self.config.lr_at(self.step + 1)


def own_head(self: Loop) -> None:
    head = nn.Parameter(dict(self.module.named_parameters())["model.embed_tokens.weight"].detach().clone())
    self.module.get_submodule("lm_head").weight = head


def count_begins(self: Loop) -> None:
    assert isinstance(self, Averaged)
    self.average.n_averaged.zero_()


def older_state(self: Loop) -> None:
    assert isinstance(self, Remembering)
    self.optimizers[0].load_state_dict(type(self).kept[0])


def of_the_best(self: Loop) -> None:
    self.step -= 5


def exchanged_decays(self: Loop) -> None:
    one, two = self.optimizers[0].param_groups
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def halved(self: Loop, weights: dict[str, Any]) -> None:
    """From an export in fp16."""
    self.module.load_state_dict({name: weight.half().to(weight.dtype) for name, weight in weights.items()})


# ---- on purpose ------------------------------------------------------------------------------------------------------


def third_of_rate(self: Loop) -> None:
    self.schedules[0].base_lrs = [base / 3 for base in self.schedules[0].base_lrs]
    for group in self.optimizers[0].param_groups:
        group |= {"lr": group["lr"] / 3, "initial_lr": group["initial_lr"] / 3}


def freeze_a_layer(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        weight.requires_grad_(".layers.0." not in name)


def more_decay(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] *= 3


def more_tokens(self: Loop) -> None:
    """Eight tokens more, at the mean of the others; their state is zeros."""
    optimizer = self.optimizers[0]
    for name, old in list(self.module.named_parameters()):
        if "embed" not in name and "lm_head" not in name:
            continue
        *path, leaf = name.split(".")
        new = nn.Parameter(torch.cat([old.detach(), old.detach().mean(0, keepdim=True).expand(8, -1)]))
        setattr(self.module.get_submodule(".".join(path)), leaf, new)
        for group in optimizer.param_groups:
            group["params"] = [new if weight is old else weight for weight in group["params"]]
        held = optimizer.state.pop(old)
        optimizer.state[new] = {
            key: torch.cat([value, value.new_zeros(8, value.shape[1])]) if value.ndim else value
            for key, value in held.items()
        }


def average_anew(self: Loop) -> None:
    self.extra["ema"] = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}


def amsgrad(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.AdamW(groups, lr=self.config.lr, betas=self.config.betas, amsgrad=True)


def sgd(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.SGD(groups, lr=10 * self.config.lr, momentum=0.9)


def nesterov(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.SGD(groups, lr=10 * self.config.lr, momentum=0.9, nesterov=True)


RMSPROP = optim(TORCH.RMSprop, factor=0.3, alpha=0.99, momentum=0.9)

OPENED6_LIVE: list[Fault] = [
    fault("sl01_adagrad_sums", "B3", "Adagrad's sums begin again, its counters do not", "alone echo next early",
          also=("B4",), optimizer=optim(TORCH.Adagrad, factor=3.0), loaded=zeroed("sum")),
    fault("sl02_rmsprop_squares", "B4", "RMSprop's squares are zeros", "alone echo next early", also=("B3",),
          optimizer=RMSPROP, loaded=zeroed("square_avg")),
    fault("sl03_adadelta_deltas", "B3", "Adadelta's updates are forgotten, its squares are not", "alone echo next",
          optimizer=optim(TORCH.Adadelta, factor=200.0), loaded=zeroed("acc_delta")),
    fault("sl04_nadam_counters", "B2", "NAdam's counters and products begin again", "alone echo next early",
          optimizer=optim(TORCH.NAdam), loaded=counters_of_nadam),
    fault("sl05_amsgrad_maxima", "B11", "AMSGrad's maxima are zeros", "alone echo next early", also=("B4", "B3"),
          optimizer=amsgrad, loaded=zeroed("max_exp_avg_sq")),
    fault("sl06_muon_momentum", "B1", "Muon was not restored, AdamW was", "alone echo", made=muon, loaded=cleared(),
          layouts=PLAIN, also=("B3",)),
    fault("sl07_as_a_set", "B5", "parameters in the order of a set", "echo next early", loaded=as_a_set,
          also=("E13", "E9")),
    fault("sl08_state_cast", "D4", "fp32 state is cast to the weights' bf16", "echo next early", base=Narrow,
          loaded=state_in_bf16),
    fault("sl09_undecayed", "C5", "the first update has no weight decay", "next", base=Undecayed, needs=PLENTY,
          also=("B7", "H1"), why="one update without decay is all that the files show"),
    fault("sl10_schedule_free", "F4", "schedule-free: the evaluation's weights are trained on", "echo next",
          optimizer=plain(other.ScheduleFreeAdamW), schedule=constant, loaded=evaluated, layouts=PLAIN),
    fault("sl11_no_scales", "B11", "8-bit state without the scales of its blocks", "alone echo next early",
          optimizer=plain(other.AdamW8bit), loaded=no_scales, layouts=PLAIN, also=("B3",),
          needs={"hidden": 48, "ffn": 144, "heads": 4, "groups": 2}),
    fault("sl12_one_cycle", "C1", "OneCycleLR begins again", "alone echo next early", schedule=one_cycle,
          fresh=("scheduler",)),
    fault("sl13_plateau", "C1", "ReduceLROnPlateau forgets its best value and its counters", "alone echo next early",
          base=Plateau, fresh=("scheduler",)),
    fault("sl14_inner_schedules", "C1", "a sequence of schedules whose parts begin again", "alone echo next early",
          schedule=in_sequence, loaded=inner_begin, also=("C2",)),
    fault("sl15_stepped_again", "C3", "ExponentialLR is stepped at the load", "alone echo next early",
          schedule=exponential, loaded=stepped_again),
    fault("sl16_bases_decayed", "C2", "the schedule starts from the decayed learning rate", "echo next early",
          loaded=bases_decayed, also=("H1", "B8"), why="initial_lr and base_lrs are other ones"),
    fault("sl17_orphaned", "B8", "the schedule steps another optimizer", "next early", loaded=orphaned),
    fault("sl18_flattened", "C2", "learning rates by layer become one", "echo next early", base=Layered,
          loaded=flattened, also=("B8", "H1"), why="initial_lr and base_lrs are other ones"),
    fault("sl19_own_head", "F2", "the head is no longer the embedding", "echo next early", base=Tied, loaded=own_head,
          layouts=PLAIN, also=("A4",)),
    fault("sl20_statistics", "A5", "running statistics begin again", "alone echo next early", base=Convolved,
          take=without("running_", "num_batches_tracked")),
    fault("sl21_scales_of_norms", "A3", "scales and shifts of the batch norms stay as they were made",
          "alone echo next", base=Convolved, take=without("bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"),
          also=("A2",)),
    fault("sl22_spectral", "A5", "vectors of the spectral norm are made anew", "echo", base=Spectral,
          take=without("._u", "._v")),
    fault("sl23_count_of_averages", "A5", "the averages are counted from 0 again", "echo next early", base=Averaged,
          loaded=count_begins, also=("F4", "B2"), why="a counter stored as a buffer: the next update is the average"),
    fault("sl24_older_optimizer", "G6", "the optimizer's file is four updates older", "alone echo next early",
          base=Remembering, loaded=older_state, also=("C9",)),
    fault("sl25_step_of_the_best", "C9", "the trainer counts from the step of the best model",
          "alone echo next early", loaded=of_the_best),
    fault("sl26_default_betas", "H1", "betas of the new version's default", "echo next early", needs=PLENTY,
          loaded=grouped(betas=(0.9, 0.999))),
    fault("sl27_exchanged_decays", "B7", "the param groups' decays exchanged", "echo next early", needs=PLENTY,
          loaded=exchanged_decays),
    fault("sl28_renamed_up", "A2", "a renamed projection of every layer stays random", "echo next early",
          take=without("up_proj"), also=("A1",)),
    fault("sl29_half", "D7", "fp32 weights from an export in fp16", "alone echo next", take=halved),
    fault("sl30_cached", "G7", "the save repeats the one before, under its own step", "next early", base=Caching,
          also=("G6", "C9")),
    fault("sl31_large_eps", "D10", "eps a thousandth, where gradients are smaller", "echo next early",
          loaded=grouped(eps=1e-3), also=("H1",)),
    # healthy
    variant("slh01_warm_restarts", "AdamW under warm restarts", schedule=warm_restarts),
    variant("slh02_amsgrad_steps", "AMSGrad under StepLR", optimizer=amsgrad, schedule=by(LR.StepLR, 9, 0.7)),
    variant("slh03_nesterov", "Nesterov's SGD under OneCycleLR", optimizer=nesterov, schedule=one_cycle),
    variant("slh04_centered", "centred RMSprop", schedule=exponential, layouts=PLAIN,
            optimizer=optim(TORCH.RMSprop, factor=0.3, centered=True)),
    variant("slh05_nadam", "NAdam with decoupled decay under PolynomialLR", schedule=by(LR.PolynomialLR, 300, 2.0),
            optimizer=optim(TORCH.NAdam, decoupled_weight_decay=True)),
    variant("slh06_radam", "RAdam in its first updates", optimizer=optim(TORCH.RAdam), schedule=by(LR.LinearLR)),
    variant("slh07_adamax", "Adamax", optimizer=optim(TORCH.Adamax), schedule=by(LR.ConstantLR)),
    variant("slh08_adagrad", "Adagrad with a decay of its own", schedule=constant,
            optimizer=optim(TORCH.Adagrad, factor=3.0, lr_decay=1e-2, initial_accumulator_value=0.1)),
    variant("slh09_adadelta", "Adadelta", optimizer=optim(TORCH.Adadelta, factor=200.0)),
    variant("slh10_rprop", "Rprop", schedule=constant, layouts=PLAIN,
            optimizer=lambda self, groups: TORCH.Rprop(only(groups), lr=self.config.lr / 10)),
    variant("slh11_asgd", "ASGD", optimizer=optim(TORCH.ASGD, factor=5.0), schedule=constant, layouts=PLAIN),
    variant("slh12_adafactor", "torch's Adafactor", optimizer=optim(TORCH.Adafactor, factor=3.0), layouts=PLAIN),
    variant("slh13_muon", "Muon beside AdamW, schedules in sequence", made=muon, schedule=in_sequence, layouts=PLAIN),
    variant("slh14_layered", "a learning rate for each layer", base=Layered),
    variant("slh15_followed", "an exponential average", base=Followed),
    variant("slh16_averaged", "AveragedModel", base=Averaged),
    variant("slh17_convolved", "batch norms", base=Convolved),
    variant("slh18_spectral", "a spectral norm", base=Spectral),
    variant("slh19_tied", "one parameter under two names, AMSGrad", base=Tied, optimizer=amsgrad, layouts=PLAIN),
    variant("slh20_sheltered", "a loss scale and its skipped updates", base=Sheltered),
    variant("slh21_experts", "experts without tokens, constant rate", base=Experts, schedule=constant,
            needs={"experts": 4}),
    variant("slh22_narrow", "bf16 weights with fp32 state", base=Narrow),
    variant("slh23_cycled_betas", "betas that OneCycleLR moves", schedule=cycled_betas),
    variant("slh24_decayed", "a weight decay that rises", base=Decayed),
    variant("slh25_lion", "Lion under OneCycleLR", optimizer=plain(other.Lion, factor=0.3), schedule=one_cycle,
            layouts=PLAIN),
    variant("slh26_norms_alone", "norms alone are trained", base=Norms),
    variant("slh27_plateau", "ReduceLROnPlateau", base=Plateau),
    variant("slh28_alternate", "two optimizers in turn", base=Alternate),
    # on purpose
    variant("sld01_new_phase", "a second phase with a fresh optimizer and warm-up", kind="deliberate",
            fresh=("optimizer", "scheduler"), layouts=PLAIN, true=("B1", "C1", "C2", "H1", "B8")),
    variant("sld02_beta2", "beta2 of .99", kind="deliberate", needs=PLENTY, loaded=grouped(betas=(0.9, 0.99)),
            true=("H1",)),
    variant("sld03_more_decay", "three times the decay", kind="deliberate", needs=PLENTY, loaded=more_decay,
            true=("H1", "B7", "C5")),
    variant("sld04_frozen", "the first layer is frozen", kind="deliberate", loaded=freeze_a_layer, layouts=PLAIN,
            true=("H1",)),
    variant("sld05_third", "a third of the learning rate", kind="deliberate", loaded=third_of_rate,
            true=("H1", "C2", "B8", "C4")),
    variant("sld06_more_tokens", "eight tokens more", kind="deliberate", loaded=more_tokens, layouts=PLAIN,
            true=("F7", "H1", "H2")),
    variant("sld07_momentum", "more momentum", kind="deliberate", optimizer=sgd, loaded=grouped(momentum=0.95),
            true=("H1",)),
    variant("sld08_average_anew", "the average begins again", kind="deliberate", base=Followed, loaded=average_anew,
            true=("F4", "A5", "A2")),
    variant("sld09_larger_batch", "twice the batch", kind="deliberate", true=("C10", "H1"),
            config_after=lambda self: self.config.but(batch=2 * self.config.batch)),
]  # fmt: skip
