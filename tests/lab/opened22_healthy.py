"""Healthy resumes of the twenty-second half: each has something that looks like a fault and is how it trains."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import opened22_nets as nets
from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import Loop, variant
from tests.lab.opened22_nets import Rig, by, dense

__all__ = ["HEALTHY22"]

Tensor = torch.Tensor
schedulers = torch.optim.lr_scheduler
TORCH = torch.optim


class Normed(nets.Qwen):
    """After every update the rows of all inner matrices are brought to length 1."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in nets.hit(self, r"_proj").values():
                w.copy_(F.normalize(w, dim=1))


class HardTargets(Rig):
    """DQN: the target network becomes the network every seven updates, and stays in between."""

    def model(self) -> nn.Module:
        found = nn.ModuleDict({"q_net": dense(20, 32, 6)})
        found["q_net_target"] = copy.deepcopy(found["q_net"]).requires_grad_(False)
        return found

    def fit(self, x: Tensor) -> Tensor:
        m, done = self.module, (x[:, 0].abs() * 4).long() % 6
        want = x[:, 1].sin() + 0.9 * m["q_net_target"](x.roll(1, 1)).max(1).values
        return F.smooth_l1_loss(m["q_net"](x).gather(1, done[:, None])[:, 0], want)

    def update(self) -> None:
        super().update()
        if self.step % 7 == 0:
            self.module["q_net_target"].load_state_dict(self.module["q_net"].state_dict())


class Slow(nets.Vocoder):
    """The discriminator is updated every third time."""

    def apply(self) -> None:
        self.optimizers[0].step()
        if self.step % 3 == 0:
            self.optimizers[1].step()
        for one in self.schedules:
            one.step()


class Pruned(Rig):
    """Half of the weights are masked; the masks are buffers beside the originals."""

    def model(self) -> nn.Module:
        found = super().model()
        for n in (0, 2):
            nn.utils.prune.random_unstructured(found[n], "weight", 0.5)
        return found


class Thin(Rig):
    """Soft thresholds after each update keep many weights at exactly zero."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in nets.hit(self, "weight").values():
                w.copy_(w.sign() * (w.abs() - 4e-3).clamp(min=0))


class Overflowing(nets.Scaled):
    """Every fifth update overflows: the scale is halved and nothing is updated, schedule included."""

    def apply(self) -> None:
        if self.step % 5 == 2:
            self.extra["scaler"] |= {"scale": self.extra["scaler"]["scale"] / 2, "_growth_tracker": 0}
            return
        super().apply()


class Thawed(nets.Qwen):
    """Layers are trained in turn, one for four updates."""

    def gradients(self) -> None:
        for n, w in self.module.named_parameters():
            if ".layers." in n and f".layers.{self.step // 4 % 3}." not in n:
                w.grad = None
        super().gradients()


class Shared(nets.Neo):
    """ALBERT: one layer under three names."""

    def model(self) -> nn.Module:
        found = super().model()
        layers = found.gpt_neox["layers"]
        found.gpt_neox["layers"] = nn.ModuleList([layers[0], layers[0], layers[0]])
        return found


class Grown(nets.Neo):
    """Depth by copying: both layers began as one, and the copy is not yet trained."""

    def model(self) -> nn.Module:
        found = super().model()
        layers = found.gpt_neox["layers"]
        layers[1].load_state_dict(layers[0].state_dict())
        layers.requires_grad_(False)
        return found


class Control(nets.UNet):
    """A zero convolution, whose weights are still zeros: its input is multiplied by zero."""

    def model(self) -> nn.Module:
        found = super().model()
        found.add_module("zero_conv", nn.Conv1d(3, 3, 1))
        nn.init.zeros_(found.zero_conv.weight)
        nn.init.zeros_(found.zero_conv.bias)
        return found

    def fit(self, x: Tensor) -> Tensor:
        return super().fit(x) + 0.0 * self.module.zero_conv(x.view(-1, 3, 12)).square().mean()


class Swa(Rig):
    """Torch's averaged model beside it, which takes part every six updates."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["swa_model"] = copy.deepcopy(self.module.state_dict())
        self.extra["n_averaged"] = 0

    def update(self) -> None:
        super().update()
        if self.step % 6 == 0:
            count = self.extra["n_averaged"] = self.extra["n_averaged"] + 1
            for n, w in self.module.state_dict().items():
                self.extra["swa_model"][n].lerp_(w, 1 / count)


class Dormant(Rig):
    """Every eleven updates the three units that matter least are made anew, with their state."""

    def update(self) -> None:
        super().update()
        if self.step % 11 == 0:
            with torch.no_grad():
                one, two = self.module[0], self.module[2]
                weak = two.weight.abs().sum(0).argsort()[:3]
                one.weight[weak] = 0.2 * nets.noise(self.step, 3, self.wide)
                two.weight[:, weak] = 0.0
                for w, where in ((one.weight, (weak,)), (two.weight, (slice(None), weak))):
                    for key in ("exp_avg", "exp_avg_sq"):
                        self.optimizers[0].state[w][key][where] = 0.0


class Stochastic(nets.Neo):
    """bf16 weights without masters; what is rounded away is drawn by a stored generator."""

    exact = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["rounding_rng"] = torch.Generator().manual_seed(8).get_state()

    def update(self) -> None:
        super().update()
        drawn = torch.Generator()
        drawn.set_state(self.extra["rounding_rng"])
        with torch.no_grad():
            for w in self.module.parameters():
                bits = w.view(torch.int32) + torch.randint(0, 1 << 16, w.shape, generator=drawn, dtype=torch.int32)
                w.copy_((bits & -65536).view(torch.float32))
        self.extra["rounding_rng"] = drawn.get_state()


class Observed(Rig):
    """Quantisation-aware: observers keep the range of what they saw."""

    def model(self) -> nn.Module:
        found = super().model()
        for name in ("min_val", "max_val"):
            found.register_buffer(name, torch.full((), math.inf if name == "min_val" else -math.inf))
        found.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8))
        return found

    def fit(self, x: Tensor) -> Tensor:
        m = self.module
        with torch.no_grad():
            m.min_val.copy_(torch.minimum(m.min_val, x.min()))
            m.max_val.copy_(torch.maximum(m.max_val, x.max()))
        step = (m.max_val - m.min_val) / 255
        return super().fit((x / step).round() * step)


class Sam(Rig):
    """Sharpness-aware: the gradient is that of a worse place nearby."""

    def gradients(self) -> None:
        ws = [w for w in self.module.parameters() if w.grad is not None]
        size = torch.stack([w.grad.norm() for w in ws]).norm() + 1e-12
        moves = [0.05 * w.grad / size for w in ws]
        with torch.no_grad():
            for w, move in zip(ws, moves, strict=True):
                w.add_(move)
        self.module.zero_grad()
        self.loss(self.tokens()).backward()
        with torch.no_grad():
            for w, move in zip(ws, moves, strict=True):
                w.sub_(move)


class Plateau(Rig):
    """The rate is halved when the loss does not fall; what it saw is stored."""

    def schedule(self, optimizer: Any) -> Any:
        return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.02)

    def fit(self, x: Tensor) -> Tensor:
        found = super().fit(x)
        self.seen = float(found)
        return found

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(self.seen)


class Cumulative(nets.BnConvs):
    """Batch norms that average over all batches alike."""

    def model(self) -> nn.Module:
        found = super().model()
        for m in found.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.momentum = None
        return found


class Spectral(Rig):
    """Spectral norm: the vectors of the power iteration are buffers."""

    def model(self) -> nn.Module:
        found = super().model()
        nn.utils.spectral_norm(found[2])
        return found


class HandDecay(Rig):
    """Weights decay by hand, after the update, far more than the groups say."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for w in nets.hit(self, "weight").values():
                w.mul_(0.985)


class Annealed(Rig):
    """A temperature falls from update to update, in a buffer."""

    def model(self) -> nn.Module:
        found = super().model()
        found.register_buffer("temperature", torch.tensor(5.0))
        return found

    def fit(self, x: Tensor) -> Tensor:
        self.module.temperature.mul_(0.97)
        return super().fit(x) / self.module.temperature


class Lbfgs(Rig):
    """LBFGS keeps lists of its last steps."""

    clip = 0.0

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return TORCH.LBFGS(list(self.module.parameters()), lr=0.2, max_iter=2, history_size=4)

    def schedule(self, optimizer: Any) -> None:
        return None

    def apply(self) -> None:
        x = self.tokens()

        def again() -> Tensor:
            self.module.zero_grad()
            found = self.loss(x)
            found.backward()
            return found

        self.optimizers[0].step(again)


class Sparse(nets.Dlrm):
    """Tables with sparse gradients by SparseAdam, the rest by Adam."""

    clip = 0.0

    def model(self) -> nn.Module:
        found = super().model()
        for one in found["emb_l"]:
            one.sparse = True
        return found

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        rest = [*m["bot_l"].parameters(), *m["top_l"].parameters()]
        return [TORCH.SparseAdam(list(m["emb_l"].parameters()), lr=3 * lr), TORCH.Adam(rest, lr=lr)]


class Relora(nets.Lora):
    """Every nine updates the adapters go into the base and begin anew, and so does their state."""

    def update(self) -> None:
        super().update()
        if self.step % 9 == 0:
            with torch.no_grad():
                for n, m in enumerate(self.module.values()):
                    a, b = m.lora_A["default"].weight, m.lora_B["default"].weight
                    m.base_layer.weight += 2.0 * b @ a
                    a.copy_(0.2 * nets.noise(10 * self.step + n, *a.shape))
                    b.zero_()
                    for w in (a, b):
                        for key in ("exp_avg", "exp_avg_sq"):
                            self.optimizers[0].state[w][key].zero_()


class Unused(nets.Moe):
    """An expert that the router never picks: its state is there, of zeros, and its weights only decay."""

    def model(self) -> nn.Module:
        found = super().model()
        for layer in found.model["layers"]:
            layer.mlp.gate.e_score_correction_bias[3] = -50.0
        return found


class SignSgd(Rig):
    """A rate so large that every weight crosses zero now and then, by sign."""

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return other.Lion(groups, lr=self.config.lr * 3)


def warm_restarts(self: Loop, optimizer: Any) -> Any:
    return schedulers.CosineAnnealingWarmRestarts(optimizer, 8, 2, self.config.lr / 50)


def from_zero(self: Loop, optimizer: Any) -> Any:
    """A rate of exactly zero in the first twelve updates, and again at times."""
    return schedulers.LambdaLR(optimizer, lambda n: 0.0 if n < 12 or n % 10 == 0 else 1.0)


def chained(self: Loop, optimizer: Any) -> Any:
    warm = schedulers.LinearLR(optimizer, 0.05, 1.0, 10)
    late = schedulers.PolynomialLR(optimizer, 150, 0.9)
    return schedulers.SequentialLR(optimizer, [warm, late], [10])


def cycle(self: Loop, optimizer: Any) -> Any:
    return schedulers.OneCycleLR(optimizer, self.config.lr, 320, base_momentum=0.8, max_momentum=0.97)


def named(self: Rig, groups: Any) -> torch.optim.Optimizer:
    """Groups hold the names of their parameters."""
    c = self.config
    return TORCH.AdamW(self.module.named_parameters(), lr=c.lr, betas=c.betas, weight_decay=c.weight_decay)


def backwards(self: Rig) -> Any:
    """Parameters are handed over last first."""
    return [{"params": list(self.module.parameters())[::-1], "weight_decay": self.config.weight_decay}]


def three_groups(self: Rig) -> Any:
    """The second group is frozen, though the optimizer knows it."""
    ws = list(self.module.parameters())
    for w in ws[2:4]:
        w.requires_grad_(False)
    return [{"params": ws[:2]}, {"params": ws[2:4], "lr": 0.0}, {"params": ws[4:]}]


def hugging(id: str, text: str, name: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


FLAT = ("torch_save", "lightning")

HEALTHY22: tuple[Fault, ...] = (
    variant("zb01_unit_rows", "rows are brought to length 1 after each update", base=Normed),
    variant("zb02_hard_targets", "a target network jumps every seven updates", base=HardTargets),
    variant("zb03_slow_discriminator", "one optimizer of two steps every third time", base=Slow, layouts=FLAT),
    variant("zb04_pruned", "masks beside original weights", base=Pruned),
    variant("zb05_thin", "most weights are exactly zero", base=Thin),
    variant("zb06_overflows", "a fifth of the updates is skipped, the scale falls", base=Overflowing),
    variant("zb07_layers_in_turn", "counters of layers differ by dozens", base=Thawed),
    variant("zb08_one_layer_thrice", "a layer under three names", base=Shared, layouts=FLAT),
    variant("zb09_frozen_twins", "two layers are equal and frozen", base=Grown),
    variant("zb10_zero_convolution", "a layer of zeros with moments of zeros", base=Control),
    variant("zb11_averaged_model", "an average that moves every sixth update", base=Swa),
    variant("zb12_units_anew", "dormant units are made anew as part of the training", base=Dormant),
    variant("zb13_stochastic_rounding", "fp32 files of bf16 values", base=Stochastic, true=("D7",)),
    variant("zb14_observers", "ranges in buffers, infinite at first", base=Observed),
    variant("zb15_sharpness", "two gradients an update", base=Sam),
    variant("zb16_plateau", "a rate that falls with the loss", base=Plateau),
    variant("zb17_cumulative_norms", "batch norms without a momentum", base=Cumulative),
    variant("zb18_spectral_norm", "vectors of a power iteration", base=Spectral),
    variant("zb19_decay_by_hand", "weights shrink by 1.5 % an update", base=HandDecay),
    variant("zb20_temperature", "a buffer that falls by itself", base=Annealed),
    variant("zb21_lbfgs", "LBFGS: one state for all", base=Lbfgs, layouts=FLAT),
    variant("zb22_sparse_adam", "sparse gradients: most rows untouched", base=Sparse, layouts=FLAT, rows=6),
    variant("zb23_relora", "adapters are merged every nine updates, as planned", base=Relora),
    variant("zb24_expert_never_picked", "an expert without tokens", base=Unused),
    variant("zb25_lion_large", "Lion at a large rate", base=SignSgd),
    variant("zb26_warm_restarts", "the rate jumps up at restarts", base=nets.Convs, schedule=warm_restarts),
    variant("zb27_rate_of_zero", "many updates at a rate of zero", base=nets.Mixer, schedule=from_zero),
    variant("zb28_sequential", "a schedule of schedules", base=nets.T5, schedule=chained),
    variant("zb29_one_cycle", "betas that move with the rate", base=nets.Conformer, schedule=cycle),
    variant("zb30_named_groups", "groups with names of parameters", base=nets.Bert, optimizer=named),
    variant(
        "zb31_last_first",
        "parameters in reverse",
        base=nets.Detr,
        groups=backwards,
        layouts=("torch_save", "dcp", "lightning"),
    ),
    variant("zb32_frozen_group", "a group at rate 0 without state", base=Rig, groups=three_groups),
    variant("zb33_short_epochs", "epochs of four updates: the sampler's place falls", base=nets.Gat, epoch=40),
    variant("zb34_rate_each", "a group for each parameter, in parts", base=nets.Clip, groups=nets.layered, parts=3),
    variant("zb35_adam_mini", "one second moment a row", base=nets.Gat, optimizer=by(nets.AdamMini)),
    variant("zb36_galore", "moments of a projection", base=Rig, optimizer=by(nets.GaLore)),
    variant("zb37_lookahead", "weights drawn back to slow ones", base=nets.Ppo, optimizer=by(nets.Lookahead)),
    hugging(
        "zb38_trainer_restarts",
        "Trainer: cosine with restarts, accumulated",
        "Llama",
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 6},
        gradient_accumulation_steps=3,
    ),
    hugging(
        "zb39_trainer_rmsprop",
        "Trainer: RMSprop at a constant rate",
        "gpt2",
        optim="rmsprop",
        lr_scheduler_type="constant",
    ),
    variant(
        "zb40_codes", "a codebook without gradients, by Adafactor", base=nets.VqVae, optimizer=by(TORCH.Adafactor, 2.0)
    ),
)
