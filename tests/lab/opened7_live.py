"""Training loops in plain torch of the seventh sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Experts, muon, optim, plain

__all__ = ["OPENED7_LIVE"]

TORCH = torch.optim
LR = torch.optim.lr_scheduler
Change = Callable[[Loop], None]
#: Layouts that store the state as it is; DCP would make up what is missing.
PLAIN = ("torch_save", "folder", "lightning")
BLOCKS = {"hidden": 48, "ffn": 144, "heads": 4, "groups": 2}  #: wide enough for states of eight bits
PLENTY = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def states(loop: Loop, number: int = 0) -> list[dict[str, Any]]:
    return list(loop.optimizers[number].state.values())


def stated(change: Callable[[dict[str, Any]], dict[str, Any]], number: int = 0) -> Change:
    """For `Loop.loaded`: these parts of every parameter's state are other ones."""

    def loaded(self: Loop) -> None:
        for state in states(self, number):
            state |= change(state)

    return loaded


def zeroed(*names: str) -> Change:
    return stated(lambda state: {name: torch.zeros_like(state[name]) for name in names if name in state})


def grouped(**values: Any) -> Change:
    """For `Loop.loaded`: these settings of every param group are other ones."""

    def loaded(self: Loop) -> None:
        for group in self.optimizers[0].param_groups:
            group |= values

    return loaded


def weight(loop: Loop, name: str) -> torch.Tensor:
    return dict(loop.module.named_parameters())[name]


# ---- optimizers and schedules ----------------------------------------------------------------------------------------


class NovoGrad(other.Optimizer):
    """NVIDIA's NovoGrad: one second moment a tensor, the gradient divided before it is averaged."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.95, 0.98), eps=1e-8, weight_decay=0.0, grad_averaging=False)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros(())}

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        first, second = group["betas"]
        square = gradient.pow(2).sum()
        state["exp_avg_sq"].copy_(square if state["step"] == 0 else state["exp_avg_sq"].lerp(square, 1 - second))
        state["step"] += 1
        divided = gradient / (state["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * weight
        state["exp_avg"].mul_(first).add_(divided)
        weight.add_(state["exp_avg"], alpha=-group["lr"])


def muon_rmsprop(self: Loop) -> list[torch.optim.Optimizer]:
    named = dict(self.module.named_parameters())
    inner = [w for name, w in named.items() if w.ndim == 2 and ".layers." in name]
    rest = [w for name, w in named.items() if w.ndim != 2 or ".layers." not in name]
    return [TORCH.Muon(inner, lr=4 * self.config.lr), TORCH.RMSprop(rest, lr=self.config.lr / 4, momentum=0.5)]


def one_each(self: Loop) -> list[torch.optim.Optimizer]:
    """An optimizer for each layer, and one for what is outside of them."""
    parts: dict[str, list[nn.Parameter]] = {"0": [], "1": [], "": []}
    for name, held in self.module.named_parameters():
        parts[name.split(".layers.")[1][0] if ".layers." in name else ""].append(held)
    return [TORCH.AdamW(held, lr=self.config.lr, betas=self.config.betas) for held in parts.values()]


def stages(self: Loop) -> Groups:
    """As two pipeline stages are grouped: for each, what decays and what does not."""
    found: Groups = []
    for number in range(2):
        named = [
            (name, held)
            for name, held in self.module.named_parameters()
            if (f".layers.{number}." in name) or (".layers." not in name and number == int("norm" in name))
        ]
        for wide, decay in ((True, self.config.weight_decay), (False, 0.0)):
            found.append({"params": [held for _, held in named if (held.ndim > 1) == wide], "weight_decay": decay})
    return found


def rising(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.LinearLR(optimizer, 0.1, total_iters=self.config.total)


def stable(self: Loop, optimizer: torch.optim.Optimizer, total: int | None = None) -> Any:
    """A warm-up, a constant, and a root's decay in the last 40 updates."""
    c = self.config
    end = total or c.total

    def factor(done: int) -> float:
        if done < c.warmup:
            return (done + 1) / c.warmup
        left = min(1.0, max(0.0, (done - end + 40) / 40))
        return max(0.02, 1 - math.sqrt(left))

    return LR.LambdaLR(optimizer, factor)


def rescheduled(self: Loop, total: int) -> None:
    """The schedule of another length, with the state and the learning rates of the old one."""
    told, rates = self.schedules[0].state_dict(), [group["lr"] for group in self.optimizers[0].param_groups]
    self.schedules = [stable(self, self.optimizers[0], total)]
    self.schedules[0].load_state_dict(told)
    for group, rate in zip(self.optimizers[0].param_groups, rates, strict=True):
        group["lr"] = rate


def in_steps(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.StepLR(optimizer, 13, 0.7)


def polynomial(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.PolynomialLR(optimizer, self.config.total, 2.0)


def restarts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return LR.CosineAnnealingWarmRestarts(optimizer, 11, 2)


def constant(self: Loop, optimizer: torch.optim.Optimizer) -> None:
    return None


# ---- models ----------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """A contrastive loss pairs the two halves of each row; its scale is learned and its temperature falls."""

    temperature: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        h = config.hidden
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.embed = nn.Embedding(config.padded, h)
            self.first, self.second = nn.Linear(h, h), nn.Linear(h, h)
            self.norm = nn.LayerNorm(h)
            self.branch = nn.Linear(h, h)
        self.gamma = nn.Parameter(torch.full((h,), 1e-5))  # of the branch, as vision models scale theirs
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10)))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embed(tokens)
        x = self.norm(x + self.gamma * torch.tanh(self.branch(x)))
        a, b = (part.mean(1) for part in x.split([tokens.shape[1] // 2, tokens.shape[1] - tokens.shape[1] // 2], 1))
        likeness = F.normalize(self.first(a), dim=-1) @ F.normalize(self.second(b), dim=-1).T
        logits = self.logit_scale.exp() * likeness / self.temperature
        return F.cross_entropy(logits, torch.arange(len(tokens))), {}


class Contrastive(Loop):
    """With `Towers`."""

    def net(self) -> nn.Module:
        return Towers(self.config)

    def apply(self) -> None:
        super().apply()
        assert isinstance(self.module, Towers)
        with torch.no_grad():
            self.module.logit_scale.clamp_(max=math.log(100))
        self.module.temperature.mul_(0.98).clamp_(min=0.2)


class Quantised(nn.Module):
    """Tokens through a codebook that follows what is assigned to it; its first entries are from the first batch."""

    codebook: torch.Tensor
    sizes: torch.Tensor
    sums: torch.Tensor
    begun: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        h = config.hidden
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.embed, self.inner = nn.Embedding(config.padded, h), nn.Linear(h, h)
            self.head = nn.Linear(h, config.padded)
        for name, shape in (("codebook", (16, h)), ("sizes", (16,)), ("sums", (16, h))):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("begun", torch.tensor(False), persistent=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = torch.tanh(self.inner(self.embed(tokens[:, :-1]))).flatten(0, 1)
        held = x.detach()
        if not self.begun:
            self.codebook.copy_(held[:16])
            self.sizes.fill_(1.0)
            self.sums.copy_(self.codebook)
            self.begun.fill_(True)
        nearest = F.one_hot(torch.cdist(held, self.codebook).argmin(1), 16).to(held.dtype)
        code = nearest @ self.codebook
        self.sizes.lerp_(nearest.sum(0), 0.05)
        self.sums.lerp_(nearest.T @ held, 0.05)
        self.codebook.copy_(self.sums / self.sizes.clamp(min=1e-3)[:, None])
        out = self.head(x + (code - x).detach())
        loss = F.cross_entropy(out, tokens[:, 1:].flatten()) + 0.25 * F.mse_loss(x, code)
        return loss, {}


class Coded(Loop):
    """With `Quantised`; whether the codebook has begun is known to the file by its step alone."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        return Quantised(self.config)

    def loaded(self) -> None:
        assert isinstance(self.module, Quantised)
        self.module.begun.fill_(True)


class ActorCritic(nn.Module):
    """A policy, and a critic with weights of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.actor = Decoder(config)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed + 7)
            self.critic = nn.Sequential(
                nn.Embedding(config.padded, config.hidden),
                nn.Linear(config.hidden, config.hidden),
                nn.Tanh(),
                nn.Linear(config.hidden, 1),
            )

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, _ = self.actor(tokens)
        value = self.critic(tokens[:, :-1])[..., 0]
        return loss + F.mse_loss(value, (tokens[:, 1:] % 7).float() / 7), {}


class Rewarded(Loop):
    """With `ActorCritic`, and running statistics of what was observed."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["obs_rms"] = {"mean": torch.zeros(8), "var": torch.ones(8), "count": torch.tensor(1e-4)}

    def net(self) -> nn.Module:
        return ActorCritic(self.config)

    def update(self) -> None:
        super().update()
        seen, held = self.tokens()[:, :8].float(), self.extra["obs_rms"]
        total = held["count"] + len(seen)
        held["mean"] = held["mean"] + (seen.mean(0) - held["mean"]) * len(seen) / total
        held["var"] = (held["var"] * held["count"] + seen.var(0, unbiased=False) * len(seen)) / total
        held["count"] = total


class Rotary(Loop):
    """The frequencies of the rotary embedding are stored with the weights."""

    def net(self) -> nn.Module:
        found = super().net()
        width = self.config.head_dim
        rotary = nn.Module()
        frequencies = self.config.rope_theta ** -(torch.arange(0, width, 2) / width)
        rotary.register_buffer("inv_freq", frequencies)
        found.get_submodule("model").add_module("rotary_emb", rotary)
        return found


# ---- loops -----------------------------------------------------------------------------------------------------------


class ByHand(Loop):
    """The loop writes the learning rate: one over the root of the step, after a warm-up."""

    begin = 0

    def schedule(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def apply(self) -> None:
        done = (self.step - self.begin + 1) / self.config.warmup
        for group in self.optimizers[0].param_groups:
            group["lr"] = self.config.lr * min(done, done**-0.5)
        super().apply()


class Counted(Loop):
    """Counts the rows that were used; two ranks have half of them each."""

    ranks = 2

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["consumed_samples"] = 0

    def tokens(self) -> torch.Tensor:
        return super().tokens()[: self.config.batch // 2 * self.ranks]

    def update(self) -> None:
        super().update()
        self.extra["consumed_samples"] += self.config.batch // 2 * self.ranks


class Drawing(Loop):
    """Gradients are dropped by a generator whose state is stored."""

    layouts = PLAIN
    held: torch.Tensor | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.generator = torch.Generator().manual_seed(config.seed)

    def gradients(self) -> None:
        for one in self.module.parameters():
            if one.grad is not None:
                one.grad *= torch.rand(one.shape, generator=self.generator) > 0.1
        super().gradients()

    def content(self) -> dict[str, Any]:
        state = self.generator.get_state() if self.held is None else self.held
        return super().content() | {"rng_state": state}

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.generator.set_state(content["rng_state"])


class Followed(Loop):
    """An exponential average of the weights, stored by name."""

    rate = 0.03

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: held.detach().clone() for name, held in self.module.named_parameters()}

    def share(self) -> float:
        return self.rate

    def apply(self) -> None:
        super().apply()
        share = self.share()
        for name, held in self.module.named_parameters():
            self.extra["ema"][name].lerp_(held.detach(), share)


class Warmed(Followed):
    """The average forgets more at its beginning, by a counter that is stored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema_updates"] = 0

    def share(self) -> float:
        self.extra["ema_updates"] += 1
        return 1 - min(0.999, (1 + self.extra["ema_updates"]) / (10 + self.extra["ema_updates"]))


class Uncounted(Followed):
    """As `Warmed`; the counter is an attribute that no file holds."""

    done = 0

    def share(self) -> float:
        self.done += 1
        return 1 - min(0.999, (1 + self.done) / (10 + self.done))


class Evaluated(Followed):
    """Every seventh update is followed by an evaluation of the average, in the place of the weights."""

    def evaluates(self) -> bool:
        return self.step % 7 == 3

    def apply(self) -> None:
        super().apply()
        if self.evaluates():
            backup = {name: held.detach().clone() for name, held in self.module.named_parameters()}
            self.fill(self.extra["ema"])
            self.fill(backup)

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, held in self.module.named_parameters():
                held.copy_(values[name])


class Forgetful(Evaluated):
    """The evaluation that follows the first update after a resume does not put the weights back."""

    resumed = False

    def loaded(self) -> None:
        self.resumed = True

    def apply(self) -> None:
        Followed.apply(self)
        if self.resumed:
            self.fill(self.extra["ema"])
            self.resumed = False


class Stages(Loop):
    """The first stage's table and the last one's are one weight, held twice: their gradients are added."""

    synchronised = True

    def net(self) -> nn.Module:
        found = super().net()
        held = dict(found.named_parameters())
        with torch.no_grad():
            held["lm_head.weight"].copy_(held["model.embed_tokens.weight"])
        return found

    def gradients(self) -> None:
        if self.synchronised:
            first, last = weight(self, "model.embed_tokens.weight"), weight(self, "lm_head.weight")
            assert first.grad is not None and last.grad is not None
            first.grad = last.grad = first.grad + last.grad
        super().gradients()


class Adapters(Loop):
    """Adapters on q and v are trained, the base is not."""

    layouts = ("torch_save", "lightning")

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, held in found.named_parameters():
            held.requires_grad_("lora_" in name)
        return found


class Preferring(Adapters):
    """Beside the adapters of the policy, those of the reference: where the policy began."""

    def net(self) -> nn.Module:
        found = super().net()
        assert isinstance(found, Decoder)
        drawn = torch.Generator().manual_seed(self.config.seed)
        for name, held in list(found.named_parameters()):
            if "lora_" in name:
                with torch.no_grad():
                    held.copy_(0.05 * torch.randn(held.shape, generator=drawn))
                frozen = nn.Parameter(held.detach().clone(), requires_grad=False)
                found.put(name.replace(".weight", ".reference.weight"), frozen)
        return found


class Alike(Loop):
    """An optimizer for each layer."""

    layouts = PLAIN

    def made(self) -> list[torch.optim.Optimizer]:
        return one_each(self)


class Sharing(Alike):
    """Each layer's optimizer is given the first one's state, and none of them copies it."""

    def load(self, content: dict[str, Any]) -> None:
        content["optimizers"][1] = content["optimizers"][0]
        super().load(content)


# ---- faults ----------------------------------------------------------------------------------------------------------


def by_position(self: Loop) -> None:
    """State is numbered group by group, and read in the order of the module's parameters, where shapes allow it."""
    optimizer = self.optimizers[0]
    numbered = [held for group in optimizer.param_groups for held in group["params"]]
    old = {number: optimizer.state[held] for number, held in enumerate(numbered)}
    for number, held in enumerate(self.module.parameters()):
        if old[number]["exp_avg"].shape == held.shape:
            optimizer.state[held] = old[number]
        else:
            del optimizer.state[held]


def second_stage_exchanged(self: Loop) -> None:
    """The groups of the first stage alone were stored, and the second one has them in another order."""
    wide, narrow = self.optimizers[0].param_groups[2:]
    wide["weight_decay"], narrow["weight_decay"] = narrow["weight_decay"], wide["weight_decay"]


def made_after_the_load(self: Loop) -> None:
    """The schedule is made after the optimizer was loaded: its first factor is applied to what was loaded."""
    told = self.schedules[0].state_dict()
    self.schedules = [self.schedule(self.optimizers[0])]
    self.schedules[0].load_state_dict(told)


def nearly_over(self: Loop) -> None:
    rescheduled(self, self.step + 10)


def counts_anew(self: Loop) -> None:
    assert isinstance(self, ByHand)
    self.begin = self.step


def half_of_the_ranks(self: Loop) -> None:
    assert isinstance(self, Counted)
    self.ranks = 1


def random_state_held(self: Loop) -> None:
    assert isinstance(self, Drawing)
    self.held = self.generator.get_state()


def actor_alone(self: Loop, weights: dict[str, Any]) -> None:
    kept = {name: held for name, held in weights.items() if name.startswith("actor.")}
    self.module.load_state_dict(kept, strict=False)


def scale_anew(self: Loop) -> None:
    """The class has another initial value than the run's config, and sets it after the load."""
    with torch.no_grad():
        weight(self, "logit_scale").fill_(math.log(1 / 0.07))


def gamma_anew(self: Loop) -> None:
    with torch.no_grad():
        weight(self, "gamma").fill_(1e-5)


def temperature_anew(self: Loop) -> None:
    assert isinstance(self.module, Towers)
    self.module.temperature.fill_(1.0)


def begins_again(self: Loop) -> None:
    """The flag is not among what is stored."""
    assert isinstance(self.module, Quantised)
    self.module.begun.fill_(False)


def frequencies_in_bf16(self: Loop) -> None:
    held = dict(self.module.named_buffers())["model.rotary_emb.inv_freq"]
    held.copy_(held.bfloat16())


def apart(self: Loop) -> None:
    assert isinstance(self, Stages)
    self.synchronised = False


def base_trained(self: Loop) -> None:
    """Who loads an adapter does not freeze its base, and the optimizer is given all that can be trained."""
    base = [held for held in self.module.parameters() if not held.requires_grad]
    for held in base:
        held.requires_grad_(True)
    group = self.optimizers[0].param_groups[0]
    self.optimizers[0].add_param_group({"params": base} | {k: v for k, v in group.items() if k != "params"})
    schedule = self.schedules[0]
    schedule.base_lrs.append(schedule.base_lrs[0])
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])


def policy_for_reference(self: Loop, weights: dict[str, Any]) -> None:
    """Only the order in which adapters were loaded distinguishes them."""

    def exchanged(name: str) -> str:
        if ".reference." in name:
            return name.replace(".reference.", ".")
        return name.replace(".weight", ".reference.weight") if "lora_" in name else name

    self.module.load_state_dict({exchanged(name): held for name, held in weights.items()})


def all_in_bf16(self: Loop) -> None:
    """The type is taken from the config of the save; the optimizer's state follows its weights."""
    self.module.to(torch.bfloat16)
    self.optimizers[0].load_state_dict(self.optimizers[0].state_dict())


# ---- on purpose ------------------------------------------------------------------------------------------------------


def warm_again_lower(self: Loop) -> None:
    """Another warm-up, to half of the learning rate."""
    for group in self.optimizers[0].param_groups:
        group["initial_lr"] = self.config.lr / 2
    schedule = self.schedules[0]
    schedule.base_lrs = [self.config.lr / 2] * len(schedule.base_lrs)
    for group in self.optimizers[0].param_groups:
        group["lr"] = schedule.lr_lambdas[0](0) * self.config.lr / 2


def longer_average(self: Loop) -> None:
    assert isinstance(self, Followed)
    self.rate = 0.005


def adopt(self: Loop) -> None:
    told = self.schedules[0].state_dict()
    self.optimizers = [other.ADOPT(self.groups(), lr=self.config.lr)]
    rate = told["_last_lr"]
    self.schedules = [self.schedule(self.optimizers[0])]
    self.schedules[0].load_state_dict(told)
    for group, one in zip(self.optimizers[0].param_groups, rate, strict=True):
        group["lr"] = one


def all_decay(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.05


def cooled_down(self: Loop) -> None:
    rescheduled(self, self.step + 40)


def momentum(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.SGD(groups, lr=8 * self.config.lr, momentum=0.9)


def nesterov(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return TORCH.SGD(groups, lr=8 * self.config.lr, momentum=0.9, nesterov=True)


def in_bf16(self: Loop) -> nn.Module:
    return Decoder(self.config).to(torch.bfloat16)


OPENED7_LIVE: list[Fault] = [
    fault("svl01_adopt_counters", "B2", "ADOPT's counters begin again: its first update moves nothing",
          "alone echo next early", optimizer=optim(other.ADOPT),
          loaded=stated(lambda state: {"step": torch.tensor(0.0)})),
    fault("svl02_counter_of_groups", "B2", "StableAdamW's counter, which its groups keep, begins again",
          "alone echo next early", optimizer=optim(other.StableAdamW), loaded=grouped(step=0), also=("B1",),
          why="the first update then takes the new gradient alone, as a new optimizer does"),
    fault("svl03_weights_of_averages", "B2", "QHAdam's weights of its averages begin again",
          "alone echo next early", optimizer=plain(other.QHAdam),
          loaded=stated(lambda state: {"beta1_weight": 0.0, "beta2_weight": 0.0}), also=("B1",),
          why="as above: the averages are then the new gradient"),
    fault("svl04_belief", "B4", "AdaBelief's variances are zeros", "alone echo next early", also=("B3",),
          optimizer=optim(other.AdaBelief), loaded=zeroed("exp_avg_var")),
    fault("svl05_yogi", "B1", "Yogi's state was not restored", "alone echo next early", layouts=PLAIN,
          optimizer=plain(other.Yogi), loaded=lambda self: self.optimizers[0].state.clear()),
    fault("svl06_lamb_average", "B3", "LAMB's averages are zeros, its squares are right", "alone echo next",
          optimizer=optim(other.Lamb), loaded=zeroed("exp_avg"), also=("B6",)),
    fault("svl07_one_square_each", "B4", "NovoGrad's second moments are zeros", "alone echo next early",
          optimizer=optim(NovoGrad), loaded=zeroed("exp_avg_sq"), also=("B3",)),
    fault("svl08_scales_in_bf16", "D4", "scales of 8-bit state are cast to the type of the weights", "alone echo",
          optimizer=plain(other.AdamW8bit), layouts=PLAIN, needs=BLOCKS, also=("B11",),
          loaded=stated(lambda state: {n: s.bfloat16().float() for n, s in state.items() if n.startswith("absmax")})),
    fault("svl09_muon_in_bf16", "D4", "Muon's momentum is cast to the type of the gradients", "alone echo",
          made=muon, layouts=PLAIN,
          loaded=stated(lambda state: {"momentum_buffer": state["momentum_buffer"].bfloat16().float()})),
    fault("svl10_shared_state", "B9", "two layers' optimizers share the state of one", "alone echo next early",
          base=Sharing, also=("B5", "E13", "E9"), why="state of the other layer, counted twice an update"),
    fault("svl11_by_position", "B5", "state in the order of the module, where it was numbered by groups",
          "alone echo next early", loaded=by_position, layouts=PLAIN, needs={"heads": 2, "groups": 2},
          also=("E13", "B1"), why="others' state where the shapes allow it, none elsewhere"),
    fault("svl12_second_stage", "B7", "groups of the second stage have each other's decay", "echo next early",
          groups=stages, loaded=second_stage_exchanged, needs=PLENTY),
    fault("svl13_made_after_the_load", "B8", "LinearLR is made after the load and multiplies what was loaded",
          "alone echo next early", schedule=rising, loaded=made_after_the_load, also=("C2",)),
    fault("svl14_nearly_over", "C4", "the decay begins at once: the number of updates is a smaller one",
          "next early", schedule=stable, loaded=nearly_over, needs={"warmup": 5}, also=("C2", "H1")),
    fault("svl15_counts_anew", "C1", "the loop counts the updates of this process for the learning rate", "next",
          base=ByHand, loaded=counts_anew, needs={"warmup": 10}, also=("C2", "H1")),
    fault("svl16_half_of_the_ranks", "C10", "one rank of two went on", "next early", base=Counted,
          loaded=half_of_the_ranks, also=("H1", "C6")),
    fault("svl17_random_state_held", "C8", "saves repeat the random state of the load", "next early", base=Drawing,
          loaded=random_state_held, also=("G6", "G7")),
    fault("svl18_actor_alone", "A2", "the critic was not loaded", "echo next early", base=Rewarded, take=actor_alone,
          also=("A1",)),
    fault("svl19_scale_anew", "A2", "the learned scale of the logits begins again", "echo next early", base=Contrastive,
          loaded=scale_anew),
    fault("svl20_gamma_anew", "A2", "gains of the residual branch begin again", "alone echo next", base=Contrastive,
          loaded=gamma_anew, also=("A3",), why="gains, as those of a norm are"),
    fault("svl21_temperature_anew", "A5", "the temperature begins again", "echo next early", base=Contrastive,
          loaded=temperature_anew, also=("A2", "C1")),
    fault("svl22_codebook_anew", "A5", "the codebook is taken from the first batch once more", "next early",
          base=Coded, loaded=begins_again, also=("A2", "F4")),
    fault("svl23_frequencies_in_bf16", "A5", "rotary frequencies are cast with the module", "echo next early",
          base=Rotary, loaded=frequencies_in_bf16, also=("D7", "H2"), why="a buffer, rounded"),
    fault("svl24_average_warms_again", "F4", "the average's own warm-up begins again, and no file counts it", "next",
          base=Uncounted),
    fault("svl25_not_put_back", "F4", "after an evaluation the average stays in the model", "next", base=Forgetful),
    fault("svl26_apart", "F3", "tables of the first and the last stage are no longer kept alike", "next early",
          base=Stages, loaded=apart, needs={"tied": False}, also=("F2",)),
    fault("svl27_base_trained", "H1", "the base under the adapters is trained too", "echo next early",
          base=Adapters, loaded=base_trained, also=("B7", "F6", "F5"),
          why="a param group more; then a base that moves"),
    fault("svl28_policy_for_reference", "F5", "adapters of policy and reference exchanged", "echo next early",
          base=Preferring, take=policy_for_reference, also=("F6", "G6"), why="adapters of an older time"),
    fault("svl29_all_in_bf16", "D7", "weights and state go on in bf16", "echo next early", loaded=all_in_bf16,
          also=("D6", "D1", "D4"), layouts=PLAIN),
    # healthy
    variant("svh20_adopt", "ADOPT under a falling step", optimizer=optim(other.ADOPT), schedule=in_steps),
    variant("svh21_stable", "StableAdamW under warm restarts", optimizer=optim(other.StableAdamW), schedule=restarts),
    variant("svh22_qhadam", "QHAdam, a polynomial", optimizer=plain(other.QHAdam), schedule=polynomial),
    variant("svh23_belief", "AdaBelief, three parts", optimizer=optim(other.AdaBelief), parts=3),
    variant("svh24_yogi", "Yogi, experts without gradients", base=Experts, optimizer=plain(other.Yogi),
            needs={"experts": 4}, layouts=PLAIN),
    variant("svh25_lamb", "LAMB, nothing clipped", optimizer=optim(other.Lamb), clip=0.0),
    variant("svh26_novograd", "NovoGrad", optimizer=optim(NovoGrad)),
    variant("svh27_eight_bits", "AdamW in eight bits, a rising rate", optimizer=plain(other.AdamW8bit),
            schedule=rising, layouts=PLAIN, needs=BLOCKS),
    variant("svh28_muon_rmsprop", "Muon beside RMSprop", made=muon_rmsprop, layouts=PLAIN),
    variant("svh29_one_each", "an optimizer a layer", base=Alike),
    variant("svh30_nesterov", "SGD with momentum, a rising rate", optimizer=nesterov, schedule=rising),
    variant("svh31_stable_decay", "warm-up, stable, decay", schedule=stable),
    variant("svh32_by_hand", "a learning rate that the loop writes", base=ByHand),
    variant("svh33_counted", "rows are counted", base=Counted),
    variant("svh34_drawing", "gradients are dropped by a stored generator", base=Drawing),
    variant("svh35_rewarded", "a critic, and running statistics of observations", base=Rewarded),
    variant("svh36_contrastive", "a learned scale that is bounded, a falling temperature", base=Contrastive),
    variant("svh37_coded", "a codebook", base=Coded),
    variant("svh38_rotary", "rotary frequencies among the weights", base=Rotary),
    variant("svh39_warmed", "an average with a stored counter", base=Warmed),
    variant("svh40_evaluated", "the average in the model's place now and then", base=Evaluated),
    variant("svh41_stages", "one weight of two stages", base=Stages, needs={"tied": False}),
    variant("svh42_preferring", "adapters of policy and reference", base=Preferring),
    variant("svh43_halves", "bf16 weights by SGD with momentum", net=in_bf16, optimizer=momentum, true=("D6",)),
    # on purpose
    variant("svd20_warm_again_lower", "another warm-up, to half of the rate", kind="deliberate",
            fresh=("scheduler",), loaded=warm_again_lower, true=("C1", "C2", "C4", "H1", "B8")),
    variant("svd21_longer_average", "an average of more updates", kind="deliberate", base=Followed,
            loaded=longer_average, true=("F4", "H1")),
    variant("svd22_adopt", "ADOPT goes on where AdamW was", kind="deliberate", loaded=adopt, layouts=PLAIN,
            true=("B1", "H1", "B8", "C1", "C2")),
    variant("svd23_cooler", "the temperature begins again on purpose", kind="deliberate", base=Contrastive,
            loaded=temperature_anew, true=("A5", "A2", "C1", "H1")),
    variant("svd24_all_decay", "one decay for everything", kind="deliberate", needs=PLENTY, loaded=all_decay,
            true=("H1", "B7", "C5")),
    variant("svd25_half_of_the_ranks", "half of the ranks", kind="deliberate", base=Counted,
            loaded=half_of_the_ranks, true=("C10", "H1", "C6")),
    variant("svd26_nesterov", "SGD with Nesterov's momentum from here on", kind="deliberate", optimizer=momentum,
            loaded=grouped(nesterov=True), true=("H1",)),
    variant("svd27_cool_down", "the decay begins now", kind="deliberate", schedule=stable, loaded=cooled_down,
            needs={"warmup": 5}, true=("C2", "C4", "H1", "B8")),
]  # fmt: skip
