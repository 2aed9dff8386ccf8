"""Training loops in plain torch of the fourth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.model import is_norm

__all__ = ["OPENED4_LIVE"]

Tensor = torch.Tensor
Content = dict[str, Any]
TORCH = torch.optim
RATES = torch.optim.lr_scheduler
FILES = ("torch_save", "folder", "lightning")  #: one process, state by number


# ---- pieces ----------------------------------------------------------------------------------------------------------


def by(kind: Any, factor: float = 1.0, **more: Any) -> Any:
    """For `Loop.optimizer`: that class at the run's learning rate, times a factor."""
    return lambda self, groups: kind(groups, lr=self.config.lr * factor, **more)


def bare(kind: Any, factor: float = 1.0, **more: Any) -> Any:
    """As `by`, for an optimizer that knows no weight decay."""
    return lambda self, groups: kind([{"params": g["params"]} for g in groups], lr=self.config.lr * factor, **more)


def states(self: Loop, number: int = 0) -> dict[str, Content]:
    """The state of each parameter by its name."""
    held = self.optimizers[number].state
    return {name: held[weight] for name, weight in self.module.named_parameters() if weight in held}


def zeroed(*fields: str) -> Any:
    """For `Loop.loaded`: these tensors of every parameter's state become 0."""

    def loaded(self: Loop) -> None:
        for state in states(self).values():
            for field in fields:
                state[field].zero_()

    return loaded


def grouped(**values: Any) -> Any:
    """For `Loop.loaded`: settings of every param group."""

    def loaded(self: Loop) -> None:
        for group in self.optimizers[0].param_groups:
            group |= values

    return loaded


def remade(self: Loop) -> None:
    """The schedule is built after the load, on the loaded optimizer, and starts there."""
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def orphaned(self: Loop) -> None:
    """The schedule holds the optimizer that it was made with, and another one trains."""
    self.schedules[0].optimizer = copy.deepcopy(self.optimizers[0])


def rated(make: Any) -> Any:
    """For `Loop.schedule`."""
    return lambda self, optimizer: make(optimizer)


def constant(self: Loop, optimizer: Any) -> None:
    return None


# ---- models ----------------------------------------------------------------------------------------------------------


class Convolved(nn.Module):
    """Tokens, two convolutions with batch norm, and the next token."""

    def __init__(self, vocab: int, width: int, seed: int, wrap: Any = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, width)
        self.conv1, self.bn1 = nn.Conv1d(width, 2 * width, 3, padding=1), nn.BatchNorm1d(2 * width)
        self.conv2, self.bn2 = nn.Conv1d(2 * width, width, 3, padding=1), nn.BatchNorm1d(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        if wrap is not None:
            wrap(self.head)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        x = F.relu(self.bn1(self.conv1(x)))
        found: Tensor = self.norm(self.bn2(self.conv2(x)).transpose(1, 2))
        return found

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.head(self.features(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), {}


class Images(Loop):
    """A convolutional model: biases, batch norms and their buffers."""

    wrap: Any = None
    layouts = FILES

    def net(self) -> nn.Module:
        return Convolved(self.config.padded, self.config.hidden, self.config.seed, type(self).wrap)


class Teacher(nn.Module):
    """A student, its momentum average and a queue of features, all in one module."""

    def __init__(self, vocab: int, width: int, seed: int) -> None:
        super().__init__()
        self.student = Convolved(vocab, width, seed)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", torch.randn(32, width, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _ = self.student(tokens)
        with torch.no_grad():
            self.keys = F.normalize(self.teacher.features(tokens).mean(1), dim=-1)
        asked = F.normalize(self.student.features(tokens).mean(1), dim=-1)
        queue = self.get_buffer("queue").clone()
        logits = torch.cat([(asked * self.keys).sum(1, keepdim=True), asked @ F.normalize(queue, dim=-1).T], 1)
        return loss + F.cross_entropy(logits / 0.2, torch.zeros(len(logits), dtype=torch.long)), {}


class Distilled(Loop):
    """MoCo's way: the teacher follows the student, the queue takes the newest features."""

    layouts = FILES

    def net(self) -> nn.Module:
        return Teacher(self.config.padded, self.config.hidden, self.config.seed)

    def apply(self) -> None:
        super().apply()
        module = self.module
        assert isinstance(module, Teacher)
        with torch.no_grad():
            for mine, theirs in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)
            at, queue = int(module.get_buffer("queue_ptr")), module.get_buffer("queue")
            queue[at : at + len(module.keys)] = module.keys
            module.get_buffer("queue_ptr").fill_((at + len(module.keys)) % len(queue))


class Averaged(Loop):
    """An average of the weights beside the model."""

    layouts = FILES
    decay = 0.98

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        for name, weight in self.module.named_parameters():
            self.extra["ema"][name].lerp_(weight.detach(), 1 - self.decay)


class Swa(Loop):
    """torch's AveragedModel, over every fourth update."""

    layouts = FILES

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.swa = torch.optim.swa_utils.AveragedModel(self.module)
        self.extra["swa_model"] = self.swa.state_dict()

    def load(self, content: Content) -> None:
        super().load(content)
        self.swa.load_state_dict(content["swa_model"])
        self.extra["swa_model"] = self.swa.state_dict()

    def apply(self) -> None:
        super().apply()
        if self.step % 4 == 0:
            self.swa.update_parameters(self.module)
        self.extra["swa_model"] = self.swa.state_dict()


class Scaled(Loop):
    """A dynamic loss scale that begins low and grows."""

    layouts = FILES

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        told = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}
        self.extra["scaler"] = told | {"_growth_tracker": 0}

    def apply(self) -> None:
        super().apply()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == told["growth_interval"]:
            told |= {"scale": told["scale"] * 2, "_growth_tracker": 0}


class Layered(Loop):
    """A param group a layer, the lower ones at lower rates."""

    def groups(self) -> Groups:
        found: dict[str, list[Tensor]] = {}
        for name, weight in self.module.named_parameters():
            key = name.split(".")[2] if ".layers." in name else "table" if "embed" in name else "top"
            found.setdefault(key, []).append(weight)
        rates = [self.config.lr * 0.7**n for n in range(len(found))][::-1]
        return [{"params": ws, "lr": lr} for ws, lr in zip(found.values(), rates, strict=True)]


class Two(Loop):
    """The first layer's optimizer, and one for the rest; rates of their own."""

    layouts = ("torch_save", "lightning", "dcp")
    parts_of: tuple[str, ...] = (".layers.0.", ".layers.1.")

    def made(self) -> list[torch.optim.Optimizer]:
        named = dict(self.module.named_parameters())
        held = [[w for n, w in named.items() if part in n] for part in self.parts_of]
        held.append([w for n, w in named.items() if not any(part in n for part in self.parts_of)])
        c = self.config
        return [
            TORCH.AdamW(ws, lr=c.lr / (n + 1), betas=c.betas, weight_decay=c.weight_decay) for n, ws in enumerate(held)
        ]


class Plateau(Loop):
    """The rate falls when the loss does not."""

    def schedule(self, optimizer: Any) -> Any:
        return RATES.ReduceLROnPlateau(optimizer, factor=0.7, patience=2)

    def loss(self, tokens: Tensor) -> Tensor:
        found = super().loss(tokens)
        self.seen_ = float(found.detach())
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.seen_)


class Decayed(Loop):
    """Weight decay grows with the steps, as DINO's does."""

    def decay_at(self, step: int) -> float:
        return 0.04 + 0.002 * step

    def apply(self) -> None:
        super().apply()
        self.optimizers[0].param_groups[0]["weight_decay"] = self.decay_at(self.step + 1)


class Wide(other.Optimizer):
    """fp32 moments beside bf16 weights; moments are used in the type in which they are held."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Tensor, group: Content) -> Content:
        return {"step": 0, "exp_avg": torch.zeros_like(weight).float(), "exp_avg_sq": torch.zeros_like(weight).float()}

    def update(self, weight: Tensor, gradient: Tensor, state: Content, group: Content) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = state["step"]
        for field, beta, value in (("exp_avg", first, gradient), ("exp_avg_sq", second, gradient.float() ** 2)):
            state[field] = state[field].mul(beta).add(value.to(state[field].dtype), alpha=1 - beta)
        under = (state["exp_avg_sq"].float() / (1 - second**t)).sqrt() + group["eps"]
        weight.add_((state["exp_avg"].float() / under).to(weight.dtype), alpha=-group["lr"] / (1 - first**t))


def halved_net(self: Loop) -> nn.Module:
    return Decoder(self.config).to(torch.bfloat16)


def cast_moments(self: Loop) -> None:
    """What `Optimizer.load_state_dict` of torch does: states take the type of the weight."""
    for state in states(self).values():
        for field in ("exp_avg", "exp_avg_sq"):
            state[field] = state[field].bfloat16()


# ---- faults ----------------------------------------------------------------------------------------------------------


class Unbuffered(Images):
    """The model is rebuilt from its parameters alone."""

    def take(self, weights: Content) -> None:
        kept = {name for name, _ in self.module.named_parameters()}
        self.module.load_state_dict({n: t for n, t in weights.items() if n in kept}, strict=False)


def biases_left(self: Images) -> None:
    """Biases are what another process began with."""
    fresh = dict(self.net().named_parameters())
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            if name.endswith(".bias") and not name.startswith(("bn", "norm")):
                weight.copy_(fresh[name] + 0.0)


def norms_left(self: Images) -> None:
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            if name.startswith(("bn", "norm")):
                weight.fill_(1.0 if name.endswith("weight") else 0.0)


def batches_zero(self: Images) -> None:
    for name, buffer in self.module.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.zero_()


def teacher_copied(self: Distilled) -> None:
    module = self.module
    assert isinstance(module, Teacher)
    module.teacher.load_state_dict(module.student.state_dict())


def queue_fresh(self: Distilled) -> None:
    module = self.module
    assert isinstance(module, Teacher)
    made = torch.Generator().manual_seed(self.config.seed)
    module.get_buffer("queue").copy_(torch.randn(module.get_buffer("queue").shape, generator=made))
    module.get_buffer("queue_ptr").zero_()


class Aliased(Averaged):
    """After the load, the average's tensors are the weights themselves."""

    aliased = False

    def loaded(self) -> None:
        self.aliased = True
        self.extra["ema"] = {name: w.detach() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if self.aliased:
            self.loaded()


def swa_counter(self: Swa) -> None:
    self.swa.n_averaged.zero_()
    self.extra["swa_model"] = self.swa.state_dict()


class SwaEvery(Swa):
    """After every update, so that the first one after the load shows."""

    def apply(self) -> None:
        Loop.apply(self)
        self.swa.update_parameters(self.module)
        self.extra["swa_model"] = self.swa.state_dict()


def one_rate(self: Loop) -> None:
    """Every group has the first one's rate: a schedule was made with one base."""
    groups = self.optimizers[0].param_groups
    self.schedules[0].base_lrs = [self.schedules[0].base_lrs[-1]] * len(groups)
    for group in groups:
        group["lr"] = groups[-1]["lr"]


def optimizers_crossed(self: Two) -> None:
    one, two = (copy.deepcopy(self.optimizers[n].state_dict()) for n in range(2))
    one["param_groups"], two["param_groups"] = two["param_groups"], one["param_groups"]
    self.optimizers[0].load_state_dict(two)
    self.optimizers[1].load_state_dict(one)


class FirstAlone(Two):
    """Only the first of three optimizers is loaded."""

    def load(self, content: Content) -> None:
        fresh = [copy.deepcopy(one.state_dict()) for one in self.optimizers]
        super().load(content)
        for optimizer, state in list(zip(self.optimizers, fresh, strict=True))[1:]:
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def absmax_rolled(self: Loop) -> None:
    """Scales of blocks come from the neighbouring block."""
    for state in states(self).values():
        for field in [field for field in state if field.startswith("absmax")]:
            state[field] = state[field].roll(1)


def rows_and_columns(self: Loop) -> None:
    for name, state in states(self).items():
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            state["row_var"], state["col_var"] = state["col_var"].T.clone(), state["row_var"].T.clone()


def estimate_lost(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group |= {"d": group["d0"], "d_max": group["d0"], "d_numerator": 0.0}


def average_of_z(self: Loop) -> None:
    """Saved in evaluation mode: the weights are the average, the optimizer trains on as if they were not."""
    held = states(self)
    with torch.no_grad():
        for name, weight in self.module.named_parameters():
            weight.lerp_(held[name]["z"], 1 - 1 / self.optimizers[0].param_groups[0]["betas"][0])


def rates_at_peak(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def decay_of_matrices(self: Loop) -> None:
    """The group without decay got the other's."""
    groups = self.optimizers[0].param_groups
    groups[1]["weight_decay"] = groups[0]["weight_decay"]


def decay_stale(self: Decayed) -> None:
    self.optimizers[0].param_groups[0]["weight_decay"] = self.decay_at(0)


class Counting(Loop):
    """Keeps where its data is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["sampler"] = {"seed": 77, "epoch": 3, "position": 0}

    def apply(self) -> None:
        super().apply()
        self.extra["sampler"]["position"] += 1


def sampler_fresh(self: Counting) -> None:
    self.extra["sampler"] |= {"epoch": 0, "seed": 0}


ILL = [
    fault("q60_sgd_no_buffers", "B1", "SGD: momentum not loaded", "alone echo", fresh=("optimizer",),
          optimizer=by(TORCH.SGD, 20.0, momentum=0.9), also=("B3",), layouts=FILES, schedule=constant,
          why="no state in the echo"),
    fault("q61_adagrad_sums", "B1", "Adagrad: sums not loaded", "alone echo next early", fresh=("optimizer",),
          optimizer=by(TORCH.Adagrad, 4.0), layouts=FILES, why="sums can only grow"),
    fault("q62_rmsprop_squares", "B4", "RMSprop: squares zeroed, steps and momentum kept", "echo next early",
          optimizer=by(TORCH.RMSprop, 0.3, momentum=0.9), loaded=zeroed("square_avg"), also=("B3",),
          why="a second moment was lost"),
    fault("q64_nadam_product", "B2", "NAdam: mu_product is 1 again, the steps are not", "alone echo next early",
          optimizer=by(TORCH.NAdam), loaded=lambda self: [s["mu_product"].fill_(1.0) for s in states(self).values()],
          also=("B1",), layouts=FILES, why="it goes with the step"),
    fault("q65_amsgrad_largest", "B11", "amsgrad: the largest second moments are 0", "alone echo next early",
          optimizer=by(TORCH.AdamW, amsgrad=True), loaded=zeroed("max_exp_avg_sq"), also=("B4", "B3"),
          why="the largest is below the newest"),
    fault("q66_absmax_rolled", "B11", "8-bit moments with their neighbours' scales", "echo",
          optimizer=bare(other.AdamW8bit), loaded=absmax_rolled, layouts=FILES, needs={"ffn": 64},
          also=("B5", "E7"), why="codes and scales do not belong together"),
    fault("q67_lion_lost", "B3", "Lion: momentum zeroed", "alone echo", optimizer=by(other.Lion, 0.2),
          loaded=zeroed("exp_avg"), also=("B1",), why="the one moment was lost"),
    fault("q68_first_alone", "B1", "of three optimizers, the first was loaded", "alone echo next early",
          base=FirstAlone, why="states and counters of two are new"),
    fault("q69_optimizers_crossed", "B5", "two layers' optimizers have each other's state", "echo next early",
          base=Two, loaded=optimizers_crossed, also=("E13", "E9"), why="states of other parameters"),
    fault("q71_radam_steps", "B2", "RAdam: steps reset, moments kept", "alone echo next early",
          optimizer=by(TORCH.RAdam), loaded=lambda self: [s["step"].zero_() for s in states(self).values()],
          why="the counters alone"),
    fault("q72_factors_crossed", "B11", "Adafactor: rows and columns exchanged", "echo",
          optimizer=by(TORCH.Adafactor, 3.0), loaded=rows_and_columns, also=("E1", "E13"), layouts=FILES,
          why="factors of the other axis"),
    fault("q74_adadelta_updates", "B3", "Adadelta: acc_delta zeroed, squares kept", "echo next",
          optimizer=by(TORCH.Adadelta, 100.0), loaded=zeroed("acc_delta"), also=("B6", "B1"),
          why="one of two averages"),
    fault("q75_estimate_lost", "B1", "Prodigy: the estimate of its step size begins anew", "echo",
          optimizer=lambda self, groups: other.Prodigy([{"params": [w for g in groups for w in g["params"]]}], lr=1.0),
          schedule=constant, loaded=estimate_lost, also=("H1",), layouts=FILES,
          why="a part of the optimizer's state, kept in its groups"),
    fault("q76_average_of_z", "F4", "schedule-free: the average was saved as the weights", "echo next",
          optimizer=by(other.ScheduleFreeAdamW), schedule=constant, loaded=average_of_z,
          layouts=FILES, why="the average of z in the weights' place"),
    fault("q77_moments_cast", "D4", "fp32 moments cast to the bf16 of their weights", "echo next early",
          net=halved_net, optimizer=lambda self, groups: Wide(groups, lr=self.config.lr), loaded=cast_moments,
          also=("D5",), layouts=("torch_save", "lightning"), why="the stored type changed"),
    fault("q78_schedule_remade", "C1", "the schedule was built after the load", "alone echo next early",
          fresh=("scheduler",), loaded=remade, why="rate and position are those of the start"),
    fault("q79_milestones", "B8", "MultiStepLR: rates at the peak, position past a milestone", "alone echo next early",
          schedule=rated(lambda one: RATES.MultiStepLR(one, [5], 0.1)), loaded=rates_at_peak, also=("C2", "H1"),
          why="the rate is not that of the position"),
    fault("q80_orphaned", "B8", "the schedule moves another optimizer's rates", "next early", loaded=orphaned,
          also=("C2",), why="the rate stands, the position moves"),
    fault("q81_plateau_fresh", "C1", "ReduceLROnPlateau begins anew, the rate was kept", "alone echo next early",
          base=Plateau, fresh=("scheduler",), why="its best and its counters are new"),
    fault("q83_one_rate", "B8", "all layers have the last group's rate", "echo next early", base=Layered,
          loaded=one_rate, also=("C2", "H1"), layouts=FILES, why="rates of groups"),
    fault("q85_norms_decay", "B7", "the group without decay got the other's", "echo next early",
          loaded=decay_of_matrices, also=("H1",), needs={"weight_decay": 0.1}, why="a setting of a group"),
    fault("q86_decay_stale", "C5", "the first update has the first weight decay", "echo next", base=Decayed,
          loaded=decay_stale, also=("H1",), why="for one update"),
    fault("q88_no_buffers", "A5", "batch norm: running statistics not loaded", "alone echo next early",
          base=Unbuffered, also=("A2",), why="buffers as they were made"),
    fault("q89_batches_tracked", "A5", "batch norm: batches counted from 0", "alone echo next early", base=Images,
          loaded=batches_zero, why="a buffer"),
    fault("q90_biases_left", "A2", "biases not loaded", "echo next", base=Images, loaded=biases_left,
          why="as another process began"),
    fault("q91_norms_left", "A3", "weights and biases of norms not loaded", "alone echo next", base=Images,
          loaded=norms_left, also=("A2",), why="ones and zeros"),
    fault("q92_teacher_copied", "F4", "the teacher is a copy of the student", "alone echo next", base=Distilled,
          loaded=teacher_copied, also=("A2", "E9"), why="an average that is the weights"),
    fault("q93_queue_fresh", "A5", "the queue begins anew", "echo next", base=Distilled, loaded=queue_fresh,
          also=("A2",), why="a buffer as it was made"),
    fault("q95_aliased", "F4", "the average shares the weights' storage", "alone echo next early", base=Aliased,
          also=("B9",), why="an average that is the weights"),
    fault("q96_swa_counter", "F4", "SWA: the number of averaged models is 0", "echo next early", base=SwaEvery,
          loaded=swa_counter, also=("A5",), why="the next update overwrites the average"),
    fault("q98_sampler_fresh", "C7", "the sampler's epoch and seed are 0", "echo next early", base=Counting,
          loaded=sampler_fresh, also=("C6",), layouts=FILES, why="the order of the data"),
]  # fmt: skip


# ---- healthy ---------------------------------------------------------------------------------------------------------


class Sharp(Loop):
    """SAM: the gradient is taken at a point a little uphill."""

    def update(self) -> None:
        for turn in range(2):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self.loss(self.tokens()).backward()
            weights = [w for w in self.module.parameters() if w.grad is not None]
            with torch.no_grad():
                if turn:
                    for weight, moved in self.moved:
                        weight.sub_(moved)
                else:
                    norm = torch.stack([w.grad.norm() for w in weights if w.grad is not None]).norm() + 1e-12
                    self.moved = [(w, w.grad * (0.05 / norm)) for w in weights if w.grad is not None]
                    for weight, moved in self.moved:
                        weight.add_(moved)
        self.apply()
        self.step += 1


class Sleepy(Loop):
    """Layers are dropped by chance: a dropped one has no gradient in that update."""

    def gradients(self) -> None:
        if self.step % 3 == 1:
            dropped = f".layers.{self.step % 2}."
            for name, weight in self.module.named_parameters():
                if dropped in name:
                    weight.grad = None
        super().gradients()


class Noisy(Loop):
    """Noise on the gradient, from the step."""

    def gradients(self) -> None:
        super().gradients()
        made = torch.Generator().manual_seed(self.step)
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.grad.add_(torch.randn(weight.shape, generator=made), alpha=1e-3)


class Centred(Loop):
    """Gradient centralisation, clipped by value."""

    clip = 0.0

    def gradients(self) -> None:
        for weight in self.module.parameters():
            if weight.grad is not None and weight.ndim > 1:
                weight.grad.sub_(weight.grad.mean(1, keepdim=True)).clamp_(-0.05, 0.05)


class Masked(Loop):
    """Some batches are masked to the last token: the gradient of them is 0."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * (0.0 if self.step % 5 == 2 else 1.0)


class Halting(Loop):
    """The step counts micro-batches; the optimizer moves at every second."""

    def update(self) -> None:
        self.loss(self.tokens()).backward()
        if self.step % 2 and self.step:
            self.gradients()
            self.apply()
            self.optimizers[0].zero_grad(set_to_none=True)
        self.step += 1

    def content(self) -> Content:
        held = super().content()
        return held | {"grad": {n: w.grad.clone() for n, w in self.module.named_parameters() if w.grad is not None}}

    def load(self, content: Content) -> None:
        super().load(content)
        for name, weight in self.module.named_parameters():
            weight.grad = content["grad"][name].clone() if name in content["grad"] else None


class Behind(Loop):
    """Lookahead: every fifth update the weights go half of the way back to where they were."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["slow"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if self.step % 5 == 4:
            with torch.no_grad():
                for name, weight in self.module.named_parameters():
                    self.extra["slow"][name].lerp_(weight, 0.5)
                    weight.copy_(self.extra["slow"][name])


class Beating(Loop):
    """Betas go up and down with the step."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            group["betas"] = (0.85 + 0.1 * (self.step % 10) / 10, 0.98)
        super().apply()


class Dropping(Loop):
    """Dropout on the embeddings, whose generator is stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.made_ = torch.Generator().manual_seed(config.seed)
        self.extra["rng_state"] = self.made_.get_state()

    def load(self, content: Content) -> None:
        super().load(content)
        self.made_.set_state(content["rng_state"])

    def tokens(self) -> Tensor:
        found = super().tokens().clone()
        found[torch.rand(found.shape, generator=self.made_) < 0.1] = 0
        self.extra["rng_state"] = self.made_.get_state()
        return found


def singly(self: Loop) -> Groups:
    """A group a parameter, as old detection code bases make them."""
    return [
        {"params": [w], "weight_decay": 0.0 if is_norm(name) else self.config.weight_decay}
        for name, w in self.module.named_parameters()
    ]


def warm_then_falling(one: Any) -> Any:
    first, then = RATES.LinearLR(one, 0.1, total_iters=10), RATES.ExponentialLR(one, 0.97)
    return RATES.SequentialLR(one, [first, then], [10])


def muon_and_sgd(self: Loop) -> list[Any]:
    named = dict(self.module.named_parameters())
    inner = [w for name, w in named.items() if w.ndim == 2 and ".layers." in name]
    rest = [w for name, w in named.items() if w.ndim != 2 or ".layers." not in name]
    lr = self.config.lr
    return [TORCH.Muon(inner, lr=4 * lr, weight_decay=0.01), TORCH.SGD(rest, lr=20 * lr, momentum=0.9)]


def weight_normed(head: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(head)


def spectral_normed(head: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(head)


def doubled(self: Loop) -> nn.Module:
    return Decoder(self.config).double()


WELL = [
    variant("g10_nadamw", "NAdam with decoupled decay", optimizer=by(TORCH.NAdam, decoupled_weight_decay=True)),
    variant("g13_sgd_dampened", "SGD with dampening", optimizer=by(TORCH.SGD, 30.0, momentum=0.95, dampening=0.5)),
    variant("g14_adagrad_decayed", "Adagrad that begins at a tenth, its rate falling",
            optimizer=by(TORCH.Adagrad, 4.0, lr_decay=0.01, initial_accumulator_value=0.1)),
    variant("g18_rprop", "Rprop with other factors", optimizer=bare(TORCH.Rprop, etas=(0.6, 1.1)), schedule=constant),
    variant("g19_adafactor", "Adafactor with a faster second moment",
            optimizer=by(TORCH.Adafactor, 3.0, beta2_decay=-0.6)),
    variant("g20_muon_sgd", "Muon beside SGD", made=muon_and_sgd, layouts=("torch_save", "lightning")),
    variant("g22_layered", "a lower rate for lower layers", base=Layered),
    variant("g23_singly", "a param group for each parameter", groups=singly, layouts=FILES),
    variant("g24_average", "an average beside the model", base=Averaged),
    variant("g25_swa", "torch's AveragedModel", base=Swa),
    variant("g26_batch_norms", "batch norms", base=Images),
    variant("g28_teacher", "a momentum teacher and a queue in the model", base=Distilled),
    variant("g29_weight_norm", "a head with weight norm", base=Images, wrap=staticmethod(weight_normed)),
    variant("g30_spectral_norm", "a head with spectral norm", base=Images, wrap=staticmethod(spectral_normed)),
    variant("g31_scaler", "a loss scale that doubles every fifth update", base=Scaled),
    variant("g32_sam", "sharpness-aware: two gradients an update", base=Sharp),
    variant("g33_layers_dropped", "a dropped layer has no gradient", base=Sleepy),
    variant("g34_noise", "noise on the gradients", base=Noisy),
    variant("g35_centred", "gradients centred and clipped by value", base=Centred),
    variant("g36_masked", "some batches have a gradient of 0", base=Masked),
    variant("g37_micro_steps", "the step counts micro-batches, the optimizer moves at every second", base=Halting,
            layouts=("torch_save", "lightning")),
    variant("g38_lookahead", "lookahead", base=Behind, layouts=FILES),
    variant("g39_betas_move", "betas that change with the step", base=Beating, true=("H1",)),
    variant("g40_tokens_dropped", "tokens are dropped by a stored generator", base=Dropping, layouts=FILES),
    variant("g41_decay_grows", "weight decay that grows", base=Decayed, true=("H1",)),
    variant("g43_restarts", "cosine with warm restarts, whose cycles double",
            schedule=rated(lambda one: RATES.CosineAnnealingWarmRestarts(one, 7, 2))),
    variant("g44_plateau", "ReduceLROnPlateau", base=Plateau),
    variant("g45_sequential", "a linear warm-up, then exponential decay", schedule=rated(warm_then_falling),
            layouts=("torch_save", "lightning")),
    variant("g46_double", "fp64", net=doubled, loss=lambda self, tokens: Loop.loss(self, tokens)),
    variant("g47_wide_moments", "bf16 weights, fp32 moments", net=halved_net, true=("D5", "D6"),
            optimizer=lambda self, groups: Wide(groups, lr=self.config.lr), layouts=("torch_save", "lightning")),
]  # fmt: skip


# ---- on purpose ------------------------------------------------------------------------------------------------------


def embedding_frozen(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if "embed" in name:
            weight.requires_grad_(False)
            weight.grad = None


class Switched(Loop):
    """SGD until the load, AdamW from there on."""

    layouts = ("torch_save", "folder")
    fresh = ("optimizer", "scheduler")
    optimizer = by(TORCH.SGD, 20.0, momentum=0.9)

    def loaded(self) -> None:
        c = self.config
        self.optimizers = [TORCH.AdamW(self.groups(), lr=c.lr, betas=c.betas)]
        self.schedules = [self.schedule(self.optimizers[0])]


def first_group_faster(self: Loop) -> None:
    for name in ("lr", "initial_lr"):
        self.optimizers[0].param_groups[0][name] *= 3
    self.schedules[0].base_lrs[0] *= 3


def linear_from_here(self: Loop) -> None:
    one = self.optimizers[0]
    for group in one.param_groups:
        group["initial_lr"] = group["lr"]
    self.schedules = [RATES.LinearLR(one, 1.0, 0.0, total_iters=100)]


def decay_tripled(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] *= 3


class Smoothed(Loop):
    """Another loss from the load on: the entropy of the embedding is added."""

    smooth = False

    def loss(self, tokens: Tensor) -> Tensor:
        found = super().loss(tokens)
        table = dict(self.module.named_parameters())["model.embed_tokens.weight"]
        return found + 0.1 * table.square().mean() if self.smooth else found

    def loaded(self) -> None:
        self.smooth = True


MEANT = [
    variant("l10_embedding_frozen", "the embedding is frozen from here on", kind="deliberate",
            loaded=embedding_frozen, layouts=FILES, true=("H1",), why="true: it stands still"),
    variant("l11_switched", "SGD until here, AdamW from here on", base=Switched, kind="deliberate",
            true=("B1", "C1", "H1"), why="true: optimizer and schedule are new"),
    variant("l12_group_faster", "three times the rate for one group", kind="deliberate", loaded=first_group_faster,
            true=("H1", "B8", "C2"), why="true: a rate that the schedule did not have"),
    variant("l13_smoothed", "another loss", base=Smoothed, kind="deliberate", true=("H1",), why="true: nothing shows"),
    variant("l14_linear", "linear decay from here on", kind="deliberate", loaded=linear_from_here, layouts=FILES,
            true=("C1", "C2", "C4", "H1"), why="true: another schedule from its start"),
    variant("l15_decay_tripled", "three times the weight decay", kind="deliberate", loaded=decay_tripled,
            needs={"weight_decay": 0.1}, true=("H1", "B7", "C5"), why="true: a setting changed"),
]  # fmt: skip

OPENED4_LIVE: list[Fault] = ILL + WELL + MEANT
