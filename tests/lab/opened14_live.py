# ruff: noqa: E501
"""The fourteenth sealed set, faults of loops: answers and words were written before the doctor saw any of them.

``WORDS14`` are phrases by case: a person is helped if the report has at least one of them.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.lab import optimizers as other
from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault
from tests.lab.live import Decoder, Groups, Loop, fault
from tests.lab.live_healthy import muon, only, optim
from tests.lab.opened14_nets import (
    Adan,
    AdEMAMix,
    Agent,
    Clip,
    Conv,
    Fine,
    GaLore,
    Gan,
    Gpt,
    Mini,
    Recur,
    Remembering,
    Shampoo,
    Sophia,
    Ssm,
    Vq,
    held,
    net,
)

__all__ = ["FAULTS14", "PLAIN", "WORDS14", "Averaged", "Configured", "Positioned", "Weighed", "Zoomed", "named"]

TORCH = torch.optim
PLAIN = ("torch_save", "folder", "lightning")
WORDS14: dict[str, tuple[str, ...]] = {}
FOUR: dict[str, Any] = {"heads": 4, "groups": 2, "hidden": 32, "ffn": 64}


def bad(id: str, cause: str, text: str, where: str, words: tuple[str, ...], **more: Any) -> Fault:
    WORDS14[id] = words
    return fault(id, cause, text, where, **more)


def named(self: Loop) -> dict[str, torch.Tensor]:
    return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}


def changed(*parts: str, by: Any) -> Any:
    """For `Loop.loaded`: each weight whose name has one of the parts becomes what ``by`` makes of it."""

    @torch.no_grad()
    def loaded(self: Loop) -> None:
        found = [(name, weight) for name, weight in named(self).items() if any(part in name for part in parts)]
        assert found, parts
        for _, weight in found:
            weight.copy_(by(weight.clone()))

    return loaded


def initial_again(*parts: str) -> Any:
    """For `Loop.take`: these weights stay as the process made them."""

    def take(self: Loop, weights: dict[str, Any]) -> None:
        left = {name: value for name, value in weights.items() if not any(part in name for part in parts)}
        assert len(left) < len(weights), parts
        self.module.load_state_dict(left, strict=False)

    return take


def states(*keys: str, by: Any, parts: tuple[str, ...] = ("",), least: int = 0) -> Any:
    """For `Loop.loaded`: what the optimizer holds under these keys becomes what ``by`` makes of it."""

    @torch.no_grad()
    def loaded(self: Loop) -> None:
        count = 0
        for name, weight in self.module.named_parameters():
            for one in self.optimizers:
                state = one.state.get(weight, {})
                for key in keys:
                    if key in state and any(part in name for part in parts) and weight.ndim >= least:
                        state[key] = by(state[key])
                        count += 1
        assert count, keys

    return loaded


def zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


def swapped(one: str, two: str, keys: tuple[str, ...]) -> Any:
    """For `Loop.loaded`: the optimizer's state of two parameters is exchanged."""

    def loaded(self: Loop) -> None:
        a, b = held(self, one), held(self, two)
        for key in keys:
            a[key], b[key] = b[key], a[key]

    return loaded


def groups_of(**values: Any) -> Any:
    """For `Loop.loaded`: settings of all param groups."""

    def loaded(self: Loop) -> None:
        for one in self.optimizers:
            for group in one.param_groups:
                group.update({name: value for name, value in values.items() if name in group})

    return loaded


# ---- loops -----------------------------------------------------------------------------------------------------------


class Averaged(Loop):
    """An exponential average of the weights in the checkpoint."""

    decay = 0.97

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = copy.deepcopy(self.module.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        for name, value in self.module.state_dict().items():
            if value.is_floating_point():
                self.extra["ema"][name].lerp_(value, 1 - self.decay)


class Adapters(Loop):
    """Adapters on a frozen base; both are in the file."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found


class Positioned(Loop):
    """The loader's position and the order's seed are stored, and used."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["sampler"] = {"epoch": 0, "consumed_samples": 0, "seed": 1234}

    def tokens(self) -> torch.Tensor:
        told = self.extra["sampler"]
        return batch(self.config, told["consumed_samples"] // self.config.batch, told["seed"])

    def update(self) -> None:
        super().update()
        self.extra["sampler"]["consumed_samples"] += self.config.batch


class Scaled(Loop):
    """A loss scale that doubles every fifth update."""

    layouts = PLAIN

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["scaler"] = {
            "scale": 1024.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 5,
            "_growth_tracker": 0,
        }

    def update(self) -> None:
        super().update()
        told = self.extra["scaler"]
        told["_growth_tracker"] += 1
        if told["_growth_tracker"] == 5:
            told |= {"scale": min(told["scale"] * 2, 2.0**24), "_growth_tracker": 0}


class Configured(Loop):
    """A config of the model beside it, as transformers writes it."""

    layouts = ("folder",)
    net = net(Gpt)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        self.told: dict[str, Any] = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5,
            "n_embd": c.hidden,
            "n_head": c.heads,
            "n_layer": 3,
            "n_positions": c.length,
            "vocab_size": c.padded,
            "torch_dtype": "float32",
        }

    def save(self, folder: Path, layout: str) -> None:
        super().save(folder, layout)
        (folder / f"checkpoint-{self.step}" / "config.json").write_text(json.dumps(self.told, indent=2))


class Llama(Configured):
    net = Loop.net

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        self.told = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": c.hidden,
            "intermediate_size": c.ffn,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.groups,
            "num_hidden_layers": c.layers,
            "vocab_size": c.padded,
            "rms_norm_eps": 1e-6,
            "rope_theta": c.rope_theta,
            "max_position_embeddings": 64,
            "tie_word_embeddings": c.tied,
        }


class Zoomed(Loop):
    """Each block has a learning rate of its own, lower the earlier it is; so have what comes before and after."""

    layouts = PLAIN

    def groups(self) -> Groups:
        found: Groups = []
        for name, weight in self.module.named_parameters():
            depth = (
                int(name.split("layers.")[1].split(".")[0]) + 1 if "layers." in name else 0 if "embed" in name else 3
            )
            scale = 0.6 ** (3 - depth)
            key = {"lr": self.config.lr * scale, "lr_scale": scale, "weight_decay": 0.05 if weight.ndim > 1 else 0.0}
            home = next((g for g in found if all(g[k] == v for k, v in key.items())), None)
            if home is None:
                found.append(home := {"params": [], **key})
            home["params"].append(weight)
        return found


class Weighed(Loop):
    """Linear layers as direction and length."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        found = _recast(self.config, Gpt)
        for block in found.h:
            for linear in (block.attn["dense"], block.mlp["down_proj"], block.mlp["c_fc"]):
                parametrizations.weight_norm(linear)
        return found


def _recast(config: Config, kind: Any) -> Any:
    state = torch.get_rng_state()
    torch.manual_seed(config.seed)
    found = kind(config)
    torch.set_rng_state(state)
    return found


class Spectral(Loop):
    """Spectral norms, whose vectors are buffers."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        state = torch.get_rng_state()
        torch.manual_seed(self.config.seed)
        found = Gpt(self.config)
        for block in found.h:
            parametrizations.spectral_norm(block.mlp["c_fc"])
        torch.set_rng_state(state)
        return found


class Balanced(Loop):
    """Routers whose bias follows the load."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        loss, self.load_ = self.module(tokens)
        return loss

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        buffers = dict(self.module.named_buffers())
        for name, load in self.load_.items():
            buffers[name].add_((load.mean() - load).sign(), alpha=0.01)


class Plateaued(Loop):
    """The learning rate is halved whenever a metric has not become better; the metric is the step's digits."""

    layouts = PLAIN

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def apply(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.step % 3 == 2:
            self.schedules[0].step(1.0)


class Stalled(Loop):
    """Warm restarts."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 70, 2, eta_min=self.config.lr / 50)


class Interpolating(Loop):
    """timm's Lookahead: slow weights beside the optimizer's state, met every fifth update."""

    layouts = PLAIN

    @torch.no_grad()
    def apply(self) -> None:
        super().apply()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    state = optimizer.state[weight]
                    if "slow_buffer" not in state:
                        state["slow_buffer"] = weight.detach().clone()
                    if (self.step + 1) % 5 == 0:
                        state["slow_buffer"].lerp_(weight, 0.5)
                        weight.copy_(state["slow_buffer"])


class Repeating(Loop):
    """A saver that writes the dict it made for the save before, with the step of now."""

    layouts = ("torch_save", "folder")
    kept: dict[str, Any] | None = None

    def loaded(self) -> None:
        self.kept = copy.deepcopy(self.content())

    def content(self) -> dict[str, Any]:
        return super().content() if self.kept is None else self.kept | {"step": self.step}


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.T.contiguous() if weight.ndim == 2 and weight.shape[0] == weight.shape[1] else weight


def gates_reordered(weight: torch.Tensor) -> torch.Tensor:
    i, f, g, o = weight.chunk(4)
    return torch.cat([i, g, f, o])


def heads_contiguous(heads: int) -> Any:
    """Rows of ``[q k v]`` a head, taken for those of all q, all k, all v."""
    return lambda w: w.view(heads, 3, -1, *w.shape[1:]).transpose(0, 1).reshape(w.shape)


@torch.no_grad()
def qkv_read_otherwise(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if "query_key_value" in name:
            weight.copy_(heads_contiguous(self.config.heads)(weight.clone()))


def two_ranks(weight: torch.Tensor) -> torch.Tensor:
    """[gate; up] of two ranks, one after the other."""
    gate, up = weight.chunk(2)
    return torch.cat([gate.chunk(2)[0], up.chunk(2)[0], gate.chunk(2)[1], up.chunk(2)[1]])


@torch.no_grad()
def one_layer_for_all(self: Loop) -> None:
    blocks = self.module.h
    for block in blocks[1:]:
        block.load_state_dict(blocks[0].state_dict())


@torch.no_grad()
def blocks_exchanged(self: Loop) -> None:
    one, two = (copy.deepcopy(self.module.h[n].state_dict()) for n in (0, 2))
    self.module.h[0].load_state_dict(two)
    self.module.h[2].load_state_dict(one)


@torch.no_grad()
def head_from_embedding(self: Loop) -> None:
    self.module.lm_head.weight.copy_(self.module.wte.weight)


@torch.no_grad()
def rows_shifted(self: Loop) -> None:
    for weight in (self.module.wte.weight, self.module.lm_head.weight):
        weight.copy_(weight.roll(2, 0))


@torch.no_grad()
def average_taken(self: Loop) -> None:
    self.module.load_state_dict(self.extra["ema"])


@torch.no_grad()
def average_anew(self: Loop) -> None:
    self.extra["ema"] = copy.deepcopy(self.module.state_dict())


@torch.no_grad()
def merged_and_active(self: Loop) -> None:
    found = named(self)
    for name in [name for name in found if name.endswith("lora_A.weight")]:
        stem = name.removesuffix("lora_A.weight")
        found[f"{stem}weight"].add_(2.0 * found[f"{stem}lora_B.weight"] @ found[name])


@torch.no_grad()
def other_base(self: Loop) -> None:
    """A revision that was trained a little further."""
    made = torch.Generator().manual_seed(5)
    for name, weight in self.module.named_parameters():
        if "lora_" not in name and weight.ndim == 2:
            weight.add_(torch.randn(weight.shape, generator=made) * weight.std() * 0.1)


@torch.no_grad()
def adapters_moved(self: Loop) -> None:
    """Each layer has the adapters of the other one."""
    found = named(self)
    for name in [name for name in found if "lora_" in name and ".layers.0." in name]:
        one, two = found[name], found[name.replace(".layers.0.", ".layers.1.")]
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)


@torch.no_grad()
def one_expert_for_all(self: Loop) -> None:
    found = named(self)
    for name, weight in found.items():
        if ".experts." in name and ".experts.0." not in name:
            layer, _, rest = name.partition(".experts.")
            weight.copy_(found[f"{layer}.experts.0.{rest.split('.', 1)[1]}"])


@torch.no_grad()
def experts_turned(self: Loop) -> None:
    """Expert n's weights in place n + 1, as of ranks in another order; the optimizer's state stays."""
    kept = {name: weight.clone() for name, weight in self.module.named_parameters()}
    for name, weight in self.module.named_parameters():
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            number, rest = rest.split(".", 1)
            weight.copy_(kept[f"{layer}.experts.{(int(number) + 1) % self.config.experts}.{rest}"])


def interleaved_rows(width: int) -> Any:
    def by(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(-1, 2, width // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    return by


@torch.no_grad()
def rotary_order(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.copy_(interleaved_rows(self.config.head_dim)(weight.clone()))


@torch.no_grad()
def query_heads_moved(self: Loop) -> None:
    """Heads 0 1 2 3 as 0 2 1 3: those of two key groups, mixed."""
    for name, weight in self.module.named_parameters():
        if "q_proj" in name:
            weight.copy_(weight.clone().view(4, -1, weight.shape[1])[[0, 2, 1, 3]].reshape(weight.shape))
        elif "o_proj" in name:
            weight.copy_(weight.clone().view(weight.shape[0], 4, -1)[:, [0, 2, 1, 3]].reshape(weight.shape))


def masters_from_weights(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        held(self, name)["master_param"] = weight.detach().float()


class FinePast(Fine, Remembering):
    pass


def past_masters(self: Any) -> None:
    """Masters of the save before."""
    for number, state in self.past["optimizer"]["state"].items():
        weights = [w for g in self.optimizers[0].param_groups for w in g["params"]]
        self.optimizers[0].state[weights[number]]["master_param"] = state["master_param"].clone()


def past_weights(self: Any) -> None:
    self.module.load_state_dict(self.past["model"])


@torch.no_grad()
def masters_fresh_embedding(self: Loop) -> None:
    name = "model.embed_tokens.weight"
    made = torch.Generator().manual_seed(9)
    shape = held(self, name)["master_param"].shape
    held(self, name)["master_param"] = torch.randn(shape, generator=made) * 0.02


def past_optimizer(self: Any) -> None:
    self.optimizers[0].load_state_dict(copy.deepcopy(self.past["optimizer"]))
    for schedule in self.schedules:
        for group, lr in zip(self.optimizers[0].param_groups, schedule._last_lr, strict=True):
            group["lr"] = lr


def past_layer(self: Any) -> None:
    found = named(self)
    with torch.no_grad():
        for name, value in self.past["model"].items():
            if "layers.1." in name:
                found[name].copy_(value)


def past_moment(key: str) -> Any:
    def loaded(self: Any) -> None:
        weights = [w for g in self.optimizers[0].param_groups for w in g["params"]]
        for number, state in self.past["optimizer"]["state"].items():
            self.optimizers[0].state[weights[number]][key] = state[key].clone()

    return loaded


def past_all(self: Any) -> None:
    """The tracker says the newest step, what is read is the save before it."""
    step = self.step
    self.load(copy.deepcopy(self.past))
    self.step = step


def one_state_gone(self: Loop) -> None:
    """Parameters that were renamed find no state."""
    for name, weight in self.module.named_parameters():
        if "o_proj" in name:
            del self.optimizers[0].state[weight]


def first_only(self: Loop, content: dict[str, Any]) -> None:
    """The second optimizer is made anew."""
    kept = copy.deepcopy(self.optimizers[1].state_dict())
    Loop.load(self, content)
    lrs = [group["lr"] for group in self.optimizers[1].param_groups]
    self.optimizers[1].load_state_dict(kept)
    for group, lr in zip(self.optimizers[1].param_groups, lrs, strict=True):
        group["lr"] = lr


def one_lr(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"] = self.config.lr
    for schedule in self.schedules:
        schedule.base_lrs = [self.config.lr] * len(schedule.base_lrs)
    self.schedules[0]._last_lr = [g["lr"] for g in self.optimizers[0].param_groups]


def decay_for_all(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.1


def length_other(self: Loop) -> None:
    """One cycle over a third of the updates that were planned."""
    old = self.schedules[0]
    made = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 130)
    made.base_lrs, made.last_epoch = old.base_lrs, old.last_epoch
    made._step_count = old._step_count
    lrs = [base * (1 + math.cos(math.pi * min(1, made.last_epoch / 130))) / 2 for base in old.base_lrs]
    made._last_lr = lrs
    for group, lr in zip(self.optimizers[0].param_groups, lrs, strict=True):
        group["lr"] = lr
    self.schedules = [made]


def cosine(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)


def flat_at_peak(self: Loop) -> None:
    """A new default: no decay at all."""
    self.schedules = []
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr


def twice(self: Any) -> None:
    self.twice_ = True


def apply_twice(self: Any) -> None:
    Loop.apply(self)
    if getattr(self, "twice_", False):
        for schedule in self.schedules:
            schedule.step()


def overwritten_lr(self: Any) -> None:
    self.held_ = self.config.lr * 0.25
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.held_


def apply_overwritten(self: Any) -> None:
    Loop.apply(self)
    if hasattr(self, "held_"):
        for group in self.optimizers[0].param_groups:
            group["lr"] = self.held_


def order_other(self: Loop) -> None:
    self.extra["sampler"]["seed"] = 42


def half_batch(self: Loop) -> None:
    self.config = self.config.but(batch=2)
    self.extra["args"]["per_device_train_batch_size"] = 2


def summed(self: Any) -> None:
    self.summed_ = True


def loss_summed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    return self.module(tokens)[0] * (16 if getattr(self, "summed_", False) else 1)


def damaged(*, where: str, by: Any, key: str = "") -> Any:
    """For `Loop.loaded`: bytes of one tensor, or of one of its states."""

    @torch.no_grad()
    def loaded(self: Loop) -> None:
        name = next(name for name in named(self) if where in name)
        value = held(self, name)[key] if key else named(self)[name]
        by(value.data.view(-1))

    return loaded


def bit(number: int, place: int) -> Any:
    def by(flat: torch.Tensor) -> None:
        flat.view(torch.int32)[place] ^= (1 << number) if number < 31 else -(1 << 31)

    return by


def page(flat: torch.Tensor) -> None:
    flat[len(flat) // 4 : len(flat) // 4 + 128] = 0


def frozen_again(self: Loop) -> None:
    """What was thawed is frozen again by the launch script."""
    for name, weight in self.module.named_parameters():
        if ".layers." in name:
            weight.requires_grad_(False)


def lost_gradients(self: Any) -> None:
    self.lost_ = True


def gradients_lost(self: Any) -> None:
    if getattr(self, "lost_", False):
        named(self)["model.embed_tokens.weight"].grad = None
    Loop.gradients(self)


def tails_spread(self: Loop) -> None:
    """Rows of the vocabulary as of two ranks that each padded their half."""
    half, size = (self.config.vocab + 1) // 2, self.config.padded
    with torch.no_grad():
        for weight in {self.module.wte.weight, self.module.lm_head.weight}:
            kept, out = weight.clone(), torch.zeros_like(weight)
            ends = size // 2
            out[:half], out[ends : ends + self.config.vocab - half] = kept[:half], kept[half : self.config.vocab]
            spare = kept[self.config.vocab :]
            out[half:ends] = spare[: ends - half]
            rest = spare[ends - half :]
            if len(rest):
                out[size - len(rest) :] = rest
            weight.copy_(out)


def rope_other(self: Any) -> None:
    self.told["rope_theta"] = 500000.0
    self.config = self.config.but(rope_theta=5e5)
    self.module.config = self.config


def epsilon_other(self: Any) -> None:
    self.told["layer_norm_epsilon"] = 0.1
    for module in self.module.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.1


class Ranked(Loop):
    """Random states of two ranks, as accelerate keeps one a rank."""

    layouts = ("torch_save", "folder")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra |= {f"rng_state_{n}": torch.Generator().manual_seed(config.seed * 7 + n).get_state() for n in (0, 1)}

    def update(self) -> None:
        super().update()
        for name in ("rng_state_0", "rng_state_1"):
            made = torch.Generator()
            made.set_state(self.extra[name])
            torch.rand(5, generator=made)
            self.extra[name] = made.get_state()


def one_for_both(self: Loop) -> None:
    self.extra["rng_state_1"] = self.extra["rng_state_0"].clone()


def arguments(self: Loop) -> None:
    self.extra["args"] = {"per_device_train_batch_size": self.config.batch, "seed": 1234, "lr": self.config.lr}


class Argued(Loop):
    layouts = ("torch_save", "lightning", "folder")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        arguments(self)


def prodigy(self: Loop, groups: Groups) -> torch.optim.Optimizer:
    return other.Prodigy([{"params": [w for group in groups for w in group["params"]]}], lr=1.0)


def none(self: Loop, optimizer: torch.optim.Optimizer) -> None:
    return None


def mixed_absmax(value: torch.Tensor) -> torch.Tensor:
    return value.flip(0)


def quantised(weight: torch.Tensor) -> torch.Tensor:
    """int8, one scale a row, and back."""
    if weight.ndim < 2:
        return weight
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (weight / scale).round() * scale


def swap_experts_state(self: Loop) -> None:
    """Weights of experts are right, their optimizer state is that of the next one."""
    found = [n for n, _ in self.module.named_parameters() if ".experts." in n]
    kept = {n: {k: v.clone() for k, v in held(self, n).items() if torch.is_tensor(v) and v.ndim} for n in found}
    for name in found:
        layer, _, rest = name.partition(".experts.")
        number, rest = rest.split(".", 1)
        held(self, name).update(kept[f"{layer}.experts.{(int(number) + 1) % self.config.experts}.{rest}"])


def layers_state_shifted(self: Loop) -> None:
    """The state of the middle layer is that of the first: a stage's offset was left out."""
    for name, _ in self.module.named_parameters():
        if name.startswith("h.1."):
            source = held(self, name.replace("h.1.", "h.0."))
            held(self, name).update(exp_avg=source["exp_avg"].clone(), exp_avg_sq=source["exp_avg_sq"].clone())


def target_copied(self: Any) -> None:
    self.module.target.load_state_dict(self.module.online.state_dict())


def step_late(self: Loop) -> None:
    self.step += 3


def square(self: Loop) -> None:
    """Momentum of the square matrices as of a kernel that keeps them column by column."""
    for name, weight in self.module.named_parameters():
        if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
            state = held(self, name)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].T.contiguous()


ORDER = ("order", "permut", "rows", "swapped", "layout", "blocks")

FAULTS14: list[Fault] = [
    # weights that were not loaded
    bad("va01_positions_initial", "A2", "learned positions have another length at first, and are left out of the load",
        "echo next early", ("wpe",), net=net(Gpt), take=initial_again("wpe")),
    bad("va02_a_log_initial", "A2", "an initialiser runs over A_log and dt_bias after the load",
        "echo next", ("A_log", "dt_bias"), net=net(Ssm), take=initial_again("A_log", "dt_bias"),
        why="A_log is the same in every process: it comes back at exactly its start"),
    bad("va03_layer_scale_initial", "A2", "LayerScale's factors are renamed, and stay at their start", "echo next",
        ("ls_1", "ls_2"), net=net(Gpt, scale=0.1), take=initial_again("ls_1", "ls_2"), also=("A3",)),
    bad("va04_norms_initial", "A3", "layer norms under another name, both weight and bias", "echo next",
        ("norm", "ln_"), net=net(Gpt), take=initial_again("ln_"), also=("A2",)),
    bad("va05_logit_scale_initial", "A2", "a scalar outside of the layers is left out of the load",
        "echo next", ("logit_scale",), net=net(Clip), take=initial_again("logit_scale")),
    bad("va06_direction_initial", "A2", "of direction and length of a weight norm only the length is loaded",
        "echo next early", ("original1",), base=Weighed, take=initial_again("original1")),
    bad("va07_running_statistics", "A5", "running statistics of batch norms are those of the first update",
        "echo next early", ("running", "buffer"), net=net(Conv), take=initial_again("running_", "num_batches")),
    bad("va08_codebook_statistics", "A5", "counts and sums of a codebook are left out; the codes are right",
        "echo next", ("cluster_size", "embed_avg", "buffer"), net=net(Vq), take=initial_again("cluster_size", "embed_avg"),
        also=("A2",)),
    bad("va09_spectral_vectors", "A5", "vectors of a spectral norm begin anew", "echo",
        ("buffer", "_u", "_v"), base=Spectral, take=initial_again("._u", "._v"), also=("A2",)),
    bad("va10_expert_bias", "A5", "the bias that balances experts is left out of the load", "echo next",
        ("expert_bias", "buffer"), base=Balanced, needs={"experts": 4}, take=initial_again("expert_bias")),
    bad("va11_observation_statistics", "A5", "mean, variance and count of observations begin anew",
        "echo next early", ("obs_", "buffer"), base=Agent, take=initial_again("obs_"), also=("A2",)),
    bad("va12_temperature", "A2", "the temperature of a soft actor-critic is at 0 again", "echo next",
        ("log_alpha",), base=Agent, take=initial_again("log_alpha"), layouts=PLAIN),
    bad("va13_target_is_online", "A2", "the target network is a copy of the online one: it is made after the load",
        "echo next", ("target",), base=Agent, loaded=target_copied, layouts=PLAIN, also=("F4", "E9"),
        why="no cause of its own"),
    bad("va14_router_initial", "A2", "routers are left out: their name has another prefix", "echo next early",
        ("gate",), base=Balanced, needs={"experts": 4}, take=initial_again("mlp.gate.weight")),
    bad("va15_renamed", "A1", "every name of the file has a prefix that the model has not, and the load is not strict",
        "echo next early", ("prefix", "renamed", "none of", "not loaded", "initial"), net=net(Ssm),
        take=lambda self, weights: self.module.load_state_dict({f"_orig_mod.{n}": w for n, w in weights.items()},
                                                                strict=False),
        also=("A2",)),
    # weights in another order
    bad("va16_gates", "E1", "gates of an LSTM in the order of another library", "echo next early", ORDER,
        net=net(Recur), loaded=changed("rnn.", by=gates_reordered)),
    bad("va17_transposed", "E1", "square matrices are stored as (in, out) and not transposed back", "echo next early",
        ("transpos",), net=net(Gpt), loaded=changed("attn.dense.weight", by=transposed)),
    bad("va18_kernels", "E1", "convolution kernels run backwards, as of a library that convolves",
        "echo next early", (*ORDER, "revers", "flip", "axis"), net=net(Conv),
        loaded=changed("convs.", by=lambda w: w.flip(-1) if w.ndim == 3 else w)),
    bad("va19_qkv_per_head", "E4", "q k v of each head taken for all q, all k, all v", "echo next early",
        ("fused", "qkv", "query_key_value"), net=net(Gpt, interleaved=True), loaded=qkv_read_otherwise, also=("E1",)),
    bad("va20_gate_up_swapped", "E3", "a fused gate_up_proj with the halves exchanged", "echo next early",
        ("gate",), net=net(Gpt, swiglu=True), also=("E1",),
        loaded=changed("gate_up_proj", by=lambda w: torch.cat(w.chunk(2)[::-1]))),
    bad("va21_gate_up_ranks", "E2", "the gate_up_proj of two ranks one after the other", "echo next early",
        ("gate", "ranks"), net=net(Gpt, swiglu=True), loaded=changed("gate_up_proj", by=two_ranks), also=("E1",)),
    bad("va22_rotary", "E5", "q and k for interleaved rotary pairs", "echo next early", ("rotary",),
        loaded=rotary_order),
    bad("va23_query_heads", "E6", "query heads of two groups mixed, with the columns of o", "echo next early",
        ("head", "group"), needs=FOUR, loaded=query_heads_moved, also=("E1",)),
    bad("va24_one_layer", "E9", "every layer has the first one's weights", "echo next early",
        ("layer",), net=net(Gpt), loaded=one_layer_for_all),
    bad("va25_layers_exchanged", "E9", "first and last layer exchanged, without their optimizer state",
        "echo next early", ("swapped", "exchanged", "layers"), net=net(Gpt), loaded=blocks_exchanged),
    bad("va26_one_expert", "E10", "every rank loaded the expert of the first", "echo next early", ("expert",),
        base=Balanced, needs={"experts": 4}, loaded=one_expert_for_all),
    bad("va27_experts_turned", "E10", "experts one place on; routers as they were", "echo next early", ("expert",),
        base=Balanced, needs={"experts": 4}, loaded=experts_turned),
    bad("va28_vocabulary_shifted", "F7", "two tokens were put before all others", "echo next early",
        ("vocab", "rows", "token"), net=net(Gpt), loaded=rows_shifted, also=("E1",)),
    bad("va29_vocabulary_ranks", "E11", "rows of the vocabulary as of two ranks that each padded their half",
        "echo next early", ("padding", "vocab"), net=net(Gpt), loaded=tails_spread, also=("F7", "E1", "E8"),
        needs={"vocab": 70, "padded": 96}),
    bad("va30_head_is_embedding", "F2", "the loader ties what was not tied: the head is the embedding",
        "echo next early", ("tied", "copy", "same as", "embedding", "wte"), net=net(Gpt), loaded=head_from_embedding,
        also=("A2", "E9")),
    bad("va31_norms_summed", "E12", "norms of two ranks were added up", "echo next early",
        ("sum", "twice", "2 times", "× 2", "scaled", "2×", "factor"), net=net(Gpt), loaded=changed("ln_", by=lambda w: w * 2)),
    # weights of another kind
    bad("va32_average_taken", "F4", "the average is loaded as the weights", "echo next", ("average", "ema"),
        base=Averaged, loaded=average_taken, layouts=PLAIN),
    bad("va33_average_anew", "A2", "the average begins anew from the weights", "echo next", ("ema", "average"),
        base=Averaged, loaded=average_anew, layouts=PLAIN, also=("F4", "A5")),
    bad("va34_average_initial", "A2", "the average is one of the initial weights of the new process",
        "echo next early", ("ema", "average"), base=Averaged, fresh=("ema",), layouts=PLAIN, also=("A5", "F4"), decay=0.995),
    bad("va35_adapters_zero", "F5", "adapters as they begin: B is zero", "echo next early", ("adapter", "lora"),
        base=Adapters, take=initial_again("lora_"), also=("A2",)),
    bad("va36_merged_and_active", "F5", "adapters merged into the base, and still there", "echo next early",
        ("merged", "adapter", "base"), base=Adapters, loaded=merged_and_active),
    bad("va37_other_base", "F6", "the base is of another revision", "echo next early", ("base", "revision"),
        base=Adapters, loaded=other_base),
    bad("va38_adapters_of_other_layer", "E9", "each layer has the other one's adapters", "echo next early",
        ("layer", "swapped"), base=Adapters, loaded=adapters_moved, also=("F5",)),
    bad("va39_bf16_weights", "D7", "an export in bf16 is what the run goes on from", "echo next",
        ("bf16", "bfloat16", "16 bits", "narrow", "rounded"), net=net(Ssm), loaded=changed("", by=lambda w: w.bfloat16())),
    bad("va40_int8_weights", "D7", "weights went through int8, a scale a row", "echo next",
        ("int8", "narrow", "rounded", "quanti", "levels"), net=net(Gpt), loaded=changed(".weight", by=quantised)),
    # masters
    bad("va41_masters_rebuilt", "D1", "apex's masters are made from the bf16 weights", "echo next",
        ("rebuilt", "low bits", "16-bit"), base=Fine, loaded=masters_from_weights),
    bad("va42_masters_stale", "D2", "apex's masters are of the save before", "echo next", ("master",), base=FinePast,
        loaded=past_masters, also=("G6",)),
    bad("va43_weights_stale", "D3", "bf16 weights of the save before beside the right masters", "echo",
        ("stale", "master"), base=FinePast, loaded=past_weights, also=("G6",),
        why="the first update writes the weights from the masters again"),
    bad("va44_master_of_embedding", "D2", "one master of another process: the embedding's", "echo next",
        ("master",), base=Fine, loaded=masters_fresh_embedding),
    # the optimizer
    bad("va45_lion_lost", "B1", "Lion's only moment is zero", "echo next", ("moment", "exp_avg", "zero"),
        optimizer=optim(other.Lion, factor=0.2), loaded=states("exp_avg", by=zero), also=("B3",)),
    bad("va46_muon_lost", "B1", "Muon begins anew, AdamW beside it does not", "echo next",
        ("momentum", "optimizer"), made=muon, layouts=PLAIN, also=("B3",),
        load=lambda self, content: Loop.load(self, content) or states("momentum_buffer", by=zero)(self)),
    bad("va47_critic_begins_anew", "B1", "of two optimizers the second is not restored", "echo next early",
        ("optimizer", "critic", "step"), base=Gan, load=first_only, also=("B2",)),
    bad("va48_state_of_some_gone", "B1", "o_proj was renamed: its weights were mapped, its state was not",
        "echo next early", ("o_proj", "step"), loaded=one_state_gone, layouts=("torch_save", "lightning"), also=("B2",)),
    bad("va49_nadam_steps", "B2", "NAdam's counters begin at 0, and the product of its momenta at 1",
        "echo next early", ("step", "counter"), optimizer=optim(TORCH.NAdam), layouts=PLAIN,
        loaded=lambda self: (states("step", by=zero)(self), states("mu_product", by=torch.ones_like)(self))),
    bad("va50_adan_steps", "B2", "Adan's counter, which its groups hold, is 0 again", "echo next early",
        ("step", "counter"), optimizer=optim(Adan), loaded=groups_of(step=0), layouts=PLAIN),
    bad("va51_slow_average_lost", "B3", "AdEMAMix's slow average is zero", "echo next early",
        ("slow",), optimizer=optim(AdEMAMix), loaded=states("exp_avg_slow", by=zero), layouts=PLAIN, also=("B6",),
        why="it forgets a ten-thousandth an update"),
    bad("va52_hessian_lost", "B4", "Sophia's curvature is zero, its average is right", "echo next early",
        ("hessian", "second moment"), optimizer=optim(Sophia, factor=0.3), loaded=states("hessian", by=zero),
        layouts=PLAIN, also=("B3",)),
    bad("va53_preconditioners_lost", "B4", "Shampoo's factors are small multiples of one again", "echo next early",
        ("precond",), optimizer=lambda self, groups: Shampoo(only(groups), lr=self.config.lr * 0.1), layouts=PLAIN,
        loaded=lambda self: [states(f"precond_{n}", by=lambda v: 1e-4 * torch.eye(len(v)))(self) for n in (0, 1)],
        also=("B3", "B1", "B11"), why="they only ever grow"),
    bad("va54_galore_projector", "B11", "GaLore's projector is another one than its moments are in", "echo next",
        ("ortho_matrix", "projec"), optimizer=lambda self, groups: GaLore(only(groups), lr=self.config.lr), layouts=PLAIN,
        loaded=states("ortho_matrix", by=lambda v: torch.linalg.qr(torch.randn(
            v.shape, generator=torch.Generator().manual_seed(1)))[0]), also=("B6", "B3")),
    bad("va55_mini_rows", "B5", "Adam-mini's moment of a row is that of another one", "echo next",
        ("vmean", "second moment", "order", "rows"), optimizer=optim(Mini), layouts=PLAIN,
        loaded=states("vmean", by=lambda v: v.flip(0), least=2), also=("E13", "B6", "E1")),
    bad("va56_gate_up_state", "B5", "the states of gate and up are exchanged: names were sorted otherwise",
        "echo next", ("wrong param", "exchanged", "swapped", "gate_proj"), also=("E3",),
        loaded=lambda self: [swapped(f"model.layers.{n}.mlp.gate_proj.weight", f"model.layers.{n}.mlp.up_proj.weight",
                                     ("exp_avg", "exp_avg_sq"))(self) for n in (0, 1)]),
    bad("va57_experts_state", "B5", "each expert has the optimizer state of the next one", "echo next",
        ("expert",), base=Balanced, needs={"experts": 4}, loaded=swap_experts_state, also=("E10", "E13")),
    bad("va58_stage_state", "B5", "the middle layer has the first one's optimizer state", "echo next",
        ("h.1", "layer"), net=net(Gpt), loaded=layers_state_shifted, also=("E9", "E13")),
    bad("va59_state_transposed", "B5", "moments of square matrices are transposed", "echo next",
        ("transpos",), loaded=square, also=("E1", "E13")),
    bad("va60_amsgrad_lost", "B11", "AMSGrad's largest moments are zero", "echo next early",
        ("max_exp_avg_sq", "amsgrad", "largest"), optimizer=optim(TORCH.AdamW, amsgrad=True),
        loaded=states("max_exp_avg_sq", by=zero), also=("B4",),
        why="after one update the maximum has fallen, which it cannot"),
    bad("va61_absmax", "B11", "8-bit moments with the scales of other blocks", "echo next",
        ("absmax", "scale", "block"), layouts=PLAIN, needs={"heads": 2, "groups": 2, "hidden": 24, "ffn": 72},
        optimizer=lambda self, groups: other.AdamW8bit(only(groups), lr=self.config.lr),
        loaded=states("absmax1", "absmax2", by=mixed_absmax), also=("B5",)),
    bad("va62_adafactor_columns", "B11", "Adafactor's columns are of the save before, its rows are not", "echo",
        ("col_var", "column", "factor"), base=type("AdafactorPast", (Remembering,), {}), layouts=PLAIN,
        optimizer=optim(TORCH.Adafactor, factor=3.0), also=("B6", "G6"),
        loaded=lambda self: [self.optimizers[0].state[w].update(col_var=s["col_var"].clone()) for s, w in zip(
            self.past["optimizer"]["state"].values(), [w for g in self.optimizers[0].param_groups for w in g["params"]],
            strict=True) if "col_var" in s]),
    bad("va63_rmsprop_square", "B4", "RMSprop's squares are zero, its momentum is right", "echo next early",
        ("square_avg", "second moment"), optimizer=optim(TORCH.RMSprop, factor=0.3, momentum=0.9),
        loaded=states("square_avg", by=zero), also=("B3",)),
    bad("va64_slow_weights_lost", "B6", "Lookahead's slow weights are random ones", "echo next",
        ("slow_buffer", "slow"), base=Interpolating, also=("A2", "D2"),
        loaded=states("slow_buffer", by=lambda v: torch.randn(v.shape, generator=torch.Generator().manual_seed(2)) * 0.05),
        why="no cause of its own"),
    bad("va65_z_is_x", "B3", "schedule-free: z is set to the weights", "echo next", ("z", ),
        optimizer=optim(other.ScheduleFreeAdamW), schedule=none, layouts=PLAIN, also=("B6", "B1", "B11"),
        loaded=lambda self: [self.optimizers[0].state[w].update(z=w.detach().clone())
                             for w in self.module.parameters()]),
    bad("va66_prodigy_estimate", "H1", "Prodigy's estimate of the step size is at its start again", "echo next",
        ("'d'", " d ", "d_max", "estimate"), optimizer=prodigy, schedule=none, layouts=PLAIN,
        loaded=groups_of(d=1e-4, d_max=1e-4, d_numerator=0.0), also=("B8", "B1", "B2", "C2")),
    bad("va67_moments_fp16", "D4", "moments went through fp16", "echo", ("fp16", "float16", "16 bits"),
        net=net(Gpt), loaded=states("exp_avg", "exp_avg_sq", by=lambda v: v.half().float())),
    bad("va68_second_only_bf16", "D4", "only second moments went through bf16", "echo",
        ("bf16", "bfloat16", "16 bits"), net=net(Conv), loaded=states("exp_avg_sq", by=lambda v: v.bfloat16().float())),
    bad("va69_moment_of_past", "B6", "second moments are of the save before, first ones are not", "echo next",
        ("different", "other step", "another", "exp_avg_sq", "second moment"),
        base=type("MomentPast", (Remembering,), {}), loaded=past_moment("exp_avg_sq"), also=("G6",)),
    # settings and schedules
    bad("va70_lrs_flattened", "B8", "every block has the lr of the last", "echo next early",
        ("lr", "learning rate"), base=Zoomed, loaded=one_lr, also=("C2", "H1", "C1")),
    bad("va71_decay_for_all", "B7", "the groups were built again without the rule for vectors", "echo next early",
        ("weight decay", "weight_decay"), net=net(Gpt), loaded=decay_for_all, also=("H1", "C5")),
    bad("va72_betas_default", "H1", "betas are the class's defaults", "echo next early", ("beta",),
        net=net(Conv), needs={"betas": (0.85, 0.97)}, loaded=groups_of(betas=(0.9, 0.999))),
    bad("va73_epsilon", "H1", "epsilon is that of another framework", "echo next early", ("eps",),
        net=net(Gpt), loaded=groups_of(eps=1e-3), also=("D10",)),
    bad("va74_momentum", "H1", "SGD without nesterov and with less momentum", "echo next early",
        ("momentum", "nesterov"), optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9, nesterov=True),
        loaded=groups_of(momentum=0.5, nesterov=False)),
    bad("va75_warm_restarts_anew", "C1", "warm restarts: the cycle begins anew", "echo next early",
        ("restart", "start"), base=Stalled, also=("C2", "H1"), layouts=PLAIN,
        loaded=lambda self: (setattr(self, "schedules", [self.schedule(self.optimizers[0])]))),
    bad("va76_twice", "C3", "the schedule is stepped once a process, of two", "next early",
        ("stepped", "twice", "more often", "schedule"), loaded=twice, apply=apply_twice),
    bad("va77_length", "C4", "the cosine is over a third of the updates", "echo next early",
        ("length", "T_max", "total", "curve"), schedule=cosine, loaded=length_other, also=("C2", "H1")),
    bad("va78_flat", "C2", "the schedule is gone, and the lr is the peak's", "echo next early",
        ("learning rate", "lr", "schedule"), net=net(Ssm), loaded=flat_at_peak, layouts=PLAIN, also=("C1", "B8", "H1")),
    bad("va79_plateau", "C2", "what a plateau had cut off the lr is back", "echo next early",
        ("learning rate", "lr", "schedule"), base=Plateaued, fresh=("scheduler",), also=("C1", "B8", "H1"),
        loaded=lambda self: groups_of(lr=self.config.lr)(self)),
    bad("va80_overwritten", "B8", "a launch argument overwrites the groups' lr after every scheduler's step",
        "echo next early", ("learning rate", "lr"), loaded=overwritten_lr, apply=apply_overwritten, also=("C2", "H1")),
    # data, counters, random states
    bad("va81_data_from_the_start", "C6", "the sampler's position is 0 again", "echo next early",
        ("data", "consumed"), base=Positioned, fresh=("sampler",), layouts=PLAIN),
    bad("va82_data_order", "C7", "the sampler's seed is another one", "echo next early", ("seed", "order", "data"),
        base=Positioned, loaded=order_other, layouts=PLAIN, also=("H1",)),
    bad("va83_random_states_equal", "C8", "both ranks have the first one's random state", "echo next early",
        ("random", "rng"), base=Ranked, loaded=one_for_both),
    bad("va84_half_batch", "C10", "half as many rows a batch", "echo next early", ("batch",), base=Argued,
        loaded=half_batch, also=("H1",)),
    bad("va85_loss_scale", "D8", "the loss scale is at its start again", "echo next", ("loss scale", "scaler", "scale"),
        base=Scaled, fresh=("scaler",)),
    bad("va86_step_late", "C9", "the trainer counts three steps that nobody made", "echo next early", ("step",),
        net=net(Gpt), loaded=step_late, layouts=("torch_save", "lightning")),
    # damage and mixtures
    bad("va87_stale_optimizer_file", "G6", "the optimizer is of the save before", "echo next early",
        ("different saves", "older", "earlier", "step"), base=type("OptimizerPast", (Remembering,), {}),
        layouts=("torch_save", "folder"), loaded=past_optimizer, also=("C9", "B6")),
    bad("va88_stale_layer", "G6", "one layer's weights are of an older save", "echo next",
        ("older", "different saves", "earlier", "stale"), base=type("LayerPast", (Remembering,), {"every": 7}),
        loaded=past_layer, also=("E9",),
        why="a person sees that only this layer differs in the echo; not that it is older"),
    bad("va89_older_under_new_step", "G7", "everything is of the save before, under the newer step",
        "echo next early", ("older", "earlier", "repeat"), base=type("AllPast", (Remembering,), {}), loaded=past_all,
        layouts=("torch_save", "folder"), also=("G6", "C9", "G8", "B2")),
    bad("va90_saved_again", "G7", "the saver writes the dict it made before, under the new step", "next early",
        ("repeat", "same", "older", "equal", "identical"), base=Repeating, also=("C9",)),
    bad("va91_exponent", "G1", "an exponent's bit of one weight", "echo next early",
        ("damaged", "exponent", "bit", "infinit", "nan"), net=net(Gpt), loaded=damaged(where="dense.weight", by=bit(30, 77)),
        also=("G2",)),
    bad("va92_sign", "G2", "the sign of one weight", "echo next", ("bit", "sign"), net=net(Ssm),
        loaded=damaged(where="in_proj", by=bit(31, 40)), also=("G1",)),
    bad("va93_negative_second_moment", "G3", "the sign of a second moment", "echo next early",
        ("negative", "bit", "nan"), net=net(Conv), loaded=damaged(where="head.weight", key="exp_avg_sq", by=bit(31, 99)),
        also=("G1",)),
    bad("va94_zero_page", "G5", "512 bytes of one matrix is zero", "echo next", ("zero",), net=net(Gpt),
        loaded=damaged(where="h.1.mlp.c_fc.weight", by=page)),
    bad("va95_zero_moments_page", "G5", "512 bytes of first moments is zero", "echo", ("zero",), net=net(Gpt),
        loaded=damaged(where="h.1.mlp.c_fc.weight", key="exp_avg", by=page), also=("B3",)),
    # what the trainer does otherwise
    bad("va96_frozen_again", "H1", "layers that were thawed are frozen again", "next early",
        ("frozen", "did not change", "not change", "no longer", "unchanged", "gradient"), loaded=frozen_again,
        why="nothing names it; weights and their state stand still", layouts=PLAIN),
    bad("va97_summed", "B10", "micro-batches are summed where they were averaged", "next early",
        ("gradient", "larger", "sum"), loaded=summed, loss=loss_summed, clip=0.0),
    bad("va98_rope_base", "H2", "config.json has another rope_theta", "echo next early", ("rope_theta", "rope"),
        base=Llama, loaded=rope_other, also=("H1",)),
    bad("va99_norm_epsilon", "H2", "config.json has another epsilon of norms", "echo next early",
        ("layer_norm_epsilon", "eps"), base=Configured, loaded=epsilon_other, also=("H1",)),
]  # fmt: skip
