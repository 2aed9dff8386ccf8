"""The twelfth half, sealed until 2026-11-27, loops: faults, healthy runs and deliberate changes by somebody who had not seen the doctor.

``why`` of a fault begins with the words that a right diagnosis must say, whatever cause it names.
"""

# ruff: noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as other
from tests.lab.data import batch
from tests.lab.fault import Fault, seen
from tests.lab.hugging import made, trained
from tests.lab.live import Decoder, Loop, fault, variant
from tests.lab.live_healthy import Experts, Sheltered, Tied, muon, only, optim
from tests.lab.model import LORA_SCALE
from tests.lab.opened12_state import OPENED12_STATE

__all__ = ["OPENED12"]

TORCH = torch.optim
PLAIN = ("torch_save", "folder", "lightning")
ALL = "echo next early"


# ---- helpers ---------------------------------------------------------------------------------------------------------


def param(self: Loop, part: str) -> nn.Parameter:
    return next(weight for name, weight in self.module.named_parameters() if part in name)


def held(self: Loop, part: str) -> dict[str, Any]:
    """Optimizer state of the first parameter with that in its name."""
    weight = param(self, part)
    return next(one.state[weight] for one in self.optimizers if weight in one.state)


def states(self: Loop) -> list[dict[str, Any]]:
    return [
        one.state[w] for one in self.optimizers for group in one.param_groups for w in group["params"] if w in one.state
    ]


def swapped(a: str, b: str, *keys: str) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        one, two = held(self, a), held(self, b)
        for key in keys:
            one[key], two[key] = two[key].clone(), one[key].clone()

    return loaded


def zeroed(*keys: str, value: float = 0.0) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        for state in states(self):
            for key in keys:
                if key in state:
                    state[key] = (
                        torch.full_like(state[key], value) if torch.is_tensor(state[key]) else type(state[key])(value)
                    )

    return loaded


def grouped(**changes: Any) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        for one in self.optimizers:
            for group in one.param_groups:
                group.update(changes)

    return loaded


@torch.no_grad()
def put(weight: torch.Tensor, value: torch.Tensor) -> None:
    weight.copy_(value)


def mark(self: Any) -> None:
    self.resumed = True


def is_resumed(self: Any) -> bool:
    return bool(getattr(self, "resumed", False))


# ---- other models ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """GPT-2's block with a fused qkv and a fused [gate; up]."""

    def __init__(self, h: int, heads: int, f: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(h, 3 * h), "c_proj": nn.Linear(h, h)})
        self.mlp = nn.ModuleDict({"gate_up_proj": nn.Linear(h, 2 * f, bias=False), "down_proj": nn.Linear(f, h)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, h = x.shape
        parts = self.attn["c_attn"](self.ln_1(x)).split(h, -1)
        q, k, v = (one.view(rows, length, self.heads, -1).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(rows, length, h))
        gate, up = self.mlp["gate_up_proj"](self.ln_2(x)).chunk(2, -1)
        return x + self.mlp["down_proj"](F.silu(gate) * up)


class Gpt(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        torch.manual_seed(c.seed)
        self.c = c
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c.padded, c.hidden),
                "wpe": nn.Embedding(64, c.hidden),
                "h": nn.ModuleList(Block(c.hidden, c.heads, c.ffn) for _ in range(c.layers)),
                "ln_f": nn.LayerNorm(c.hidden),
            }
        )
        self.lm_head = nn.Linear(c.hidden, c.padded, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ins, t = tokens[:, :-1], self.transformer
        x = t["wte"](ins) + t["wpe"](torch.arange(ins.shape[1]))
        for block in t["h"]:
            x = block(x)
        return F.cross_entropy(self.lm_head(t["ln_f"](x)).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Conv(nn.Module):
    """A causal convolution over tokens with batch norms, as of a speech encoder."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        torch.manual_seed(c.seed)
        h = c.hidden
        self.embed = nn.Embedding(c.padded, h)
        self.conv = nn.ModuleList(nn.Conv1d(h, h, 3) for _ in range(2))
        self.bn = nn.ModuleList(nn.BatchNorm1d(h) for _ in range(2))
        self.head = nn.Linear(h, c.padded)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.embed(tokens[:, :-1]).transpose(1, 2)
        for conv, norm in zip(self.conv, self.bn, strict=True):
            x = x + F.relu(norm(conv(F.pad(x, (2, 0)))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), tokens[:, 1:].flatten()), {}


class Mixer(nn.Module):
    """Mamba's names: a gated linear recurrence."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h)
        self.in_proj, self.out_proj = nn.Linear(h, 2 * h, bias=False), nn.Linear(h, h, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, h + 1).float()))
        self.D, self.dt_bias = nn.Parameter(torch.ones(h)), nn.Parameter(torch.full((h,), -3.0))
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(h).float() / h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, z = self.in_proj(self.norm(x)).chunk(2, -1)
        keep = torch.exp(-F.softplus(self.dt_bias) * torch.exp(self.A_log))
        state, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            state = keep * state + (1 - keep) * u[:, t]
            out.append(state + self.D * u[:, t] + 0.1 * torch.sin(t * self.inv_freq))
        return x + self.out_proj(torch.stack(out, 1) * F.silu(z))


class Ssm(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        torch.manual_seed(c.seed)
        self.backbone = nn.ModuleDict({"embeddings": nn.Embedding(c.padded, c.hidden)})
        self.backbone["layers"] = nn.ModuleList(Mixer(c.hidden) for _ in range(2))
        self.lm_head = nn.Linear(c.hidden, c.padded, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.backbone["embeddings"](tokens[:, :-1])
        for layer in self.backbone["layers"]:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten()), {}


def gpt(self: Loop) -> nn.Module:
    return Gpt(self.config)


def conv(self: Loop) -> nn.Module:
    return Conv(self.config)


def ssm(self: Loop) -> nn.Module:
    return Ssm(self.config)


# ---- loops with more to store ----------------------------------------------------------------------------------------


class Averaged(Loop):
    """timm's ModelEmaV3 in a field of its own."""

    warm = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema"] = {
            "decay": 0.97,
            "num_updates": 0,
            "shadow": {name: weight.detach().clone() for name, weight in self.module.named_parameters()},
        }

    def apply(self) -> None:
        super().apply()
        self.average()

    def average(self) -> None:
        ema = self.extra["ema"]
        ema["num_updates"] += 1
        n = ema["num_updates"]
        decay = min(ema["decay"], (1 + n) / (10 + n)) if self.warm else ema["decay"]
        for name, weight in self.module.named_parameters():
            ema["shadow"][name].lerp_(weight.detach(), 1 - decay)


class Fed(Loop):
    """A sampler, a packing buffer and a random state per rank beside the tensors, and the launch's arguments."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["sampler"] = {"epoch": 0, "seed": 1234, "consumed_samples": 0, "num_replicas": 4}
        self.extra["rng_states"] = [torch.Generator().manual_seed(rank).get_state() for rank in range(4)]
        self.extra["packer"] = {"documents": 0, "leftover": torch.zeros(5, dtype=torch.long)}
        self.extra["curriculum"] = {"stage": 0, "seq_len": 9}
        self.extra["workers"] = [{"worker_id": n, "offset": 0} for n in range(4)]
        self.extra["args"] = {"global_batch_size": 4, "micro_batch_size": 1, "gradient_accumulation_steps": 1}

    def tokens(self) -> torch.Tensor:
        told, packer = self.extra["sampler"], self.extra["packer"]
        number = told["epoch"] * 20 + told["consumed_samples"] // 4 % 20
        found = batch(self.config, number, told["seed"])[:, : self.extra["curriculum"]["seq_len"]]
        told["consumed_samples"] += self.extra["args"]["global_batch_size"]
        told["epoch"] = told["consumed_samples"] // 80
        packer["documents"] += 7
        packer["leftover"] = found[0, -5:].clone()
        if (self.step + 1) % 6 == 0:
            self.extra["curriculum"]["stage"] += 1
            self.extra["curriculum"]["seq_len"] = min(17, 9 + self.extra["curriculum"]["stage"])
        for worker in self.extra["workers"]:
            worker["offset"] += 1
        moved = []
        for state in self.extra["rng_states"]:
            generator = torch.Generator()
            generator.set_state(state)
            torch.rand(3, generator=generator)
            moved.append(generator.get_state())
        self.extra["rng_states"] = moved
        return found


def fed(part: str, **changes: Any) -> Callable[[Loop], None]:
    return lambda self: self.extra[part].update(changes)


class Lora(Loop):
    """Adapters on q and v alone are trained; the base is stored beside them."""

    layouts = PLAIN
    boost = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["adapter_config"] = {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
        }

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name)
        return found

    def gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if "lora_" in name and weight.grad is not None:
                weight.grad.mul_(self.boost)
        super().gradients()


class Preferred(Loop):
    """DPO: a policy, and a frozen reference stored beside it."""

    layouts = PLAIN

    def net(self) -> nn.Module:
        both = nn.ModuleDict({"policy": Decoder(self.config), "reference": Decoder(self.config)})
        both["reference"].requires_grad_(False)
        return both

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.module, nn.ModuleDict)
        chosen, rejected = tokens, tokens.flip(1)
        ratio = [
            self.module["policy"](one)[0] - self.module["reference"](one)[0].detach() for one in (chosen, rejected)
        ]
        return -F.logsigmoid(0.5 * (ratio[1] - ratio[0])) + 0.2 * self.module["policy"](chosen)[0]


class ActorCritic(Loop):
    """PPO: actor and critic with an optimizer each, an adaptive KL coefficient, and normalised returns."""

    layouts = PLAIN

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["kl_ctl"] = {"value": 0.2, "target": 6.0, "horizon": 100}

    def net(self) -> nn.Module:
        both = nn.ModuleDict(
            {"actor": Decoder(self.config), "critic": Decoder(self.config.but(seed=self.config.seed + 7))}
        )
        both["critic"].register_buffer("return_mean", torch.zeros(1))
        both["critic"].register_buffer("return_var", torch.ones(1))
        both["critic"].register_buffer("return_count", torch.zeros(1))
        return both

    def made(self) -> list[torch.optim.Optimizer]:
        c = self.config
        return [
            torch.optim.AdamW(self.module[part].parameters(), lr=c.lr * share, betas=c.betas, weight_decay=0.0)
            for part, share in (("actor", 0.5), ("critic", 1.0))
        ]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        one, two = self.module["actor"](tokens)[0], self.module["critic"](tokens.flip(1))[0]
        critic, told = self.module["critic"], self.extra["kl_ctl"]
        with torch.no_grad():
            critic.return_count += 1
            delta = one.detach() - critic.return_mean
            critic.return_mean += delta / critic.return_count
            critic.return_var += 0.05 * (delta**2 - critic.return_var)
        told["value"] *= 1 + 0.03 * math.tanh(float(one.detach()) - 3.0)
        return one * (1 + told["value"]) + two


def cosine(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.config.total, eta_min=self.config.lr / 10)


def sequential(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    lr = torch.optim.lr_scheduler
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=5), lr.ExponentialLR(optimizer, 0.99)]
    return lr.SequentialLR(optimizer, parts, milestones=[5])


class Plateau(Loop):
    """ReduceLROnPlateau, told the loss of each update."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=2)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().loss(tokens)
        self.last = float(found.detach())
        return found

    def apply(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.schedules[0].step(self.last)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def second_cleared(self: Loop) -> None:
    self.optimizers[1].state.clear()


def z_from_weights(self: Loop) -> None:
    for one in self.optimizers:
        for weight, state in one.state.items():
            state["z"] = weight.detach().clone()


def rolled_blocks(self: Loop) -> None:
    for state in states(self):
        for key in ("absmax1", "absmax2"):
            if key in state:
                state[key] = state[key].roll(1)


def rounded_blocks(self: Loop) -> None:
    for state in states(self):
        for key in ("absmax1", "absmax2"):
            if key in state:
                state[key] = state[key].bfloat16().float()


def moments_exchanged(self: Loop) -> None:
    for state in states(self):
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].clone(), state["exp_avg"].abs().clone()


def orphaned(self: Loop) -> None:
    """A cast makes a new parameter that the optimizer does not hold."""
    assert isinstance(self.module, Decoder)
    name = "model.layers.1.self_attn.o_proj.weight"
    self.module.put(name, nn.Parameter(param(self, name).detach().clone()))


def unscaled(self: Loop) -> None:
    Loop.gradients(self)
    if is_resumed(self):
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.grad.mul_(128.0)


def summed(self: Loop, tokens: torch.Tensor) -> torch.Tensor:
    return Loop.loss(self, tokens) * (16.0 if is_resumed(self) else 1.0)


def accumulating(self: Loop) -> None:
    if not is_resumed(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
    self.loss(self.tokens()).backward()
    self.gradients()
    self.apply()
    self.step += 1


def decays_swapped(self: Loop) -> None:
    one, two = self.optimizers[0].param_groups
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


def vector_steps(self: Loop) -> None:
    optimizer = self.optimizers[0]
    for weight in optimizer.param_groups[1]["params"]:
        optimizer.state[weight]["step"] = torch.zeros_like(optimizer.state[weight]["step"])


def steps_times(self: Loop) -> None:
    for state in states(self):
        state["step"] = state["step"] * 8


def squares_rounded(self: Loop) -> None:
    for state in states(self):
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()


def reordered(self: Loop) -> None:
    for n in range(2):
        for key in ("exp_avg", "exp_avg_sq"):
            one, two = held(self, f"layers.{n}.self_attn.q_proj"), held(self, f"layers.{n}.self_attn.o_proj")
            one[key], two[key] = two[key].clone(), one[key].clone()
            one, two = held(self, f"layers.{n}.mlp.gate_proj"), held(self, f"layers.{n}.mlp.up_proj")
            one[key], two[key] = two[key].clone(), one[key].clone()


def stepped_twice(self: Loop) -> None:
    for schedule in self.schedules:
        for _ in range(3):
            schedule.step()


def per_micro(self: Loop) -> None:
    Loop.apply(self)
    if is_resumed(self):
        for _ in range(3):
            for schedule in self.schedules:
                schedule.step()


def longer(self: Loop) -> None:
    self.schedules[0].T_max *= 3


def new_initial(self: Loop) -> None:
    """The schedule is made after the optimizer was loaded, and takes its decayed lr for the peak."""
    for group in self.optimizers[0].param_groups:
        group["initial_lr"] = group["lr"]
    self.schedules = [self.schedule(self.optimizers[0])]


def detached(self: Loop) -> None:
    old = self.optimizers[0]
    self.optimizers = [self.optimizer(self.groups())]
    self.optimizers[0].load_state_dict(old.state_dict())


def inner_new(self: Loop) -> None:
    for one in self.schedules[0]._schedulers:
        one.last_epoch = 0


def scaled_again(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] *= 4
        group["initial_lr"] *= 4
    self.schedules[0].base_lrs = [4 * one for one in self.schedules[0].base_lrs]


def shadow_anew(self: Loop) -> None:
    self.extra["ema"]["shadow"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}


def evaluated(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        put(weight, self.extra["ema"]["shadow"][name])


def no_average(self: Loop) -> None:
    if not is_resumed(self):
        Averaged.average(self)  # type: ignore[arg-type]


def one_rank(self: Loop) -> None:
    self.extra["rng_states"] = [self.extra["rng_states"][0].clone() for _ in range(4)]


def no_random(self: Loop) -> None:
    self.extra["rng_states"] = []


def fewer_workers(self: Loop) -> None:
    self.extra["workers"] = [{"worker_id": n, "offset": 0} for n in range(2)]


def adapters_anew(self: Loop) -> None:
    fresh = dict(Decoder(self.config.but(seed=99)).named_parameters())
    for name, weight in self.module.named_parameters():
        if "lora_" in name:
            put(weight, fresh[name].detach())


def merged_and_active(self: Loop) -> None:
    named = dict(self.module.named_parameters())
    for name in named:
        if "lora_A" in name:
            stem = name.removesuffix("lora_A.weight")
            put(
                named[f"{stem}weight"],
                named[f"{stem}weight"] + LORA_SCALE * named[f"{stem}lora_B.weight"] @ named[name],
            )


def four_bits(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if "lora_" not in name and weight.ndim == 2:
            large = weight.detach().abs().amax(1, keepdim=True) / 7
            put(weight, (weight.detach() / large).round() * large)


def alpha_doubled(self: Loop) -> None:
    self.extra["adapter_config"]["lora_alpha"] = 16
    self.boost = 2.0  # type: ignore[attr-defined]


def b_lost(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if "lora_B" in name:
            put(weight, torch.zeros_like(weight))


def copied_into(target: str, source: str) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        named = dict(self.module.named_parameters())
        for name, weight in named.items():
            if name.startswith(target):
                put(weight, named[source + name.removeprefix(target)].detach())

    return loaded


def actor_for_critic(self: Loop) -> None:
    one, two = self.optimizers
    first = [one.state[w] for w in one.param_groups[0]["params"]]
    second = [two.state[w] for w in two.param_groups[0]["params"]]
    for a, b in zip(first, second, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            a[key], b[key] = b[key].clone(), a[key].clone()


def critic_anew(self: Loop) -> None:
    fresh = dict(Decoder(self.config.but(seed=4711)).named_parameters())
    for name, weight in self.module["critic"].named_parameters():  # type: ignore[index]
        put(weight, fresh[name].detach())


def buffers_anew(**values: float) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        for name, buffer in self.module.named_buffers():
            leaf = name.rsplit(".", 1)[-1]
            if leaf in values:
                buffer.fill_(values[leaf])

    return loaded


def reshaped(part: str, change: Callable[[Loop, torch.Tensor], torch.Tensor]) -> Callable[[Loop], None]:
    """Weights and moments of every parameter with that in its name."""

    def loaded(self: Loop) -> None:
        for name, weight in self.module.named_parameters():
            if part in name:
                state = self.optimizers[0].state[weight]
                put(weight, change(self, weight.detach().clone()))
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = change(self, state[key].clone())

    return loaded


def per_head(self: Loop, x: torch.Tensor) -> torch.Tensor:
    """[q; k; v] as [q k v] of one head after another."""
    heads = self.config.heads
    return x.view(3, heads, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape).contiguous()


def two_ranks(self: Loop, x: torch.Tensor) -> torch.Tensor:
    """[gate; up] as [gate0; up0; gate1; up1]."""
    a, b, c, d = x.chunk(4)
    return torch.cat([a, c, b, d])


def halves_exchanged(self: Loop, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2)
    return torch.cat([b, a])


def offset_rows(self: Loop, x: torch.Tensor) -> torch.Tensor:
    return x.roll(2, 0)


def initialised_again(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if name.endswith("A_log"):
            put(weight, torch.log(torch.arange(1, len(weight) + 1).float()))
        elif name.endswith("dt_bias"):
            put(weight, torch.full_like(weight, -3.0))


def low_frequencies(self: Loop) -> None:
    for name, buffer in self.module.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16().float())


class Compiled(Loop):
    """The resumed process compiles, saves the wrapped names, and loaded nothing by them."""

    layouts = PLAIN

    def take(self, weights: dict[str, Any]) -> None:
        self.resumed = True

    def weights(self) -> dict[str, Any]:
        prefix = "_orig_mod." if is_resumed(self) else ""
        return {prefix + name: weight for name, weight in super().weights().items()}


def untied(self: Loop) -> None:
    assert isinstance(self.module, Decoder)
    head = nn.Parameter(param(self, "embed_tokens").detach().clone())
    self.module.put("lm_head.weight", head)
    self.optimizers[0].param_groups[0]["params"].append(head)


def copies_of_first(self: Loop) -> None:
    named = dict(self.module.named_parameters())
    for name, weight in named.items():
        for number in (2, 3):
            if f".experts.{number}." in name:
                put(weight, named[name.replace(f".experts.{number}.", f".experts.{number - 2}.")].detach())


def router_anew(self: Loop) -> None:
    for name, weight in self.module.named_parameters():
        if name.endswith("mlp.gate.weight"):
            put(weight, torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.1)


def step_zero(self: Loop) -> None:
    self.step = 0


class Cached(Loop):
    """An asynchronous saver that was given the weights before the run went on."""

    def loaded(self) -> None:
        self.kept = {name: weight.detach().clone() for name, weight in self.module.state_dict().items()}

    def weights(self) -> dict[str, Any]:
        return getattr(self, "kept", None) or super().weights()


def older_layer(self: Loop) -> None:
    """One layer's weights are as they were at the start: they were left out by a filter on names."""
    fresh = dict(Decoder(self.config.but(seed=self.config.seed)).named_parameters())
    for name, weight in self.module.named_parameters():
        if ".layers.1.mlp." in name:
            put(weight, fresh[name].detach())


def page_zeroed(self: Loop) -> None:
    weight = param(self, "layers.0.mlp.down_proj").detach().view(-1)
    weight[64:192] = 0.0


def flipped(part: str, bit: int, key: str | None = None) -> Callable[[Loop], None]:
    def loaded(self: Loop) -> None:
        tensor = param(self, part).detach() if key is None else held(self, part)[key]
        flat = tensor.view(-1).view(torch.int32)
        flat[37] ^= (1 << bit) if bit < 31 else -(1 << 31)

    return loaded


def lost(*names: str, where: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def prefixed(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(folder / "model.safetensors")
    save_file(
        {f"module.{name}": w for name, w in found.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def layer_missing(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    found = {n: w for n, w in load_file(folder / "model.safetensors").items() if ".layers.1.mlp." not in n}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def hugging(
    id: str, cause: str, text: str, where: str, model: str, why: str, also: tuple[str, ...] = (), **more: Any
) -> Fault:
    live = partial(trained, partial(made, model), **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


def schedule_free(self: Loop, groups: Any) -> Any:
    return other.ScheduleFreeAdamW(groups, lr=self.config.lr)


def prodigy(self: Loop, groups: Any) -> Any:
    return other.Prodigy([{"params": [w for group in groups for w in group["params"]]}], lr=1.0)


def codes(self: Loop, groups: Any) -> Any:
    return other.AdamW8bit(only(groups), lr=self.config.lr)


def none(self: Loop, optimizer: Any) -> Any:
    return None


FAULTS: list[Fault] = [
    # several optimizers, and others than Adam
    fault("xx01_muon_adamw_second_new", "B1", "Muon is restored, the AdamW beside it begins anew", ALL, made=muon,
          layouts=PLAIN, loaded=second_cleared, why="state of part of the parameters (AdamW) was not restored"),
    fault("xx02_muon_layers_exchanged", "B5", "momentum of layer 0's q is layer 1's", "echo next", made=muon,
          layouts=PLAIN, loaded=swapped("layers.0.self_attn.q", "layers.1.self_attn.q", "momentum_buffer"),
          also=("E9", "E13"), why="momentum belongs to other parameters: exchanged, wrong parameter"),
    fault("xx03_schedule_free_z", "B1", "z is made from the weights again", "echo next", optimizer=schedule_free,
          schedule=none, loaded=z_from_weights, layouts=PLAIN, also=("B6", "B11"), why="z changed/was not restored"),
    fault("xx04_schedule_free_counts", "B2", "k and weight_sum begin anew", ALL, optimizer=schedule_free,
          schedule=none, loaded=grouped(k=0, weight_sum=0.0, lr_max=-1.0), layouts=PLAIN, also=("B1", "C1"),
          why="k or weight_sum or the counter was reset"),
    fault("xx05_prodigy_d", "B8", "Prodigy's estimate d is back at d0", ALL, optimizer=prodigy, schedule=none,
          loaded=grouped(d=1e-4, d_max=1e-4, d_numerator=0.0), layouts=PLAIN, also=("B1", "B2"),
          why="d (d_max, d_numerator) was reset; no title fits"),
    fault("xx06_adafactor_step", "B2", "Adafactor's steps are 0", ALL, optimizer=optim(TORCH.Adafactor, factor=3.0),
          loaded=zeroed("step"), layouts=PLAIN, why="the step counter was reset"),
    fault("xx07_adafactor_rows", "B5", "row factors of q and o exchanged", "echo next", also=("B11",),
          optimizer=optim(TORCH.Adafactor, factor=3.0), layouts=PLAIN,
          loaded=swapped("layers.0.self_attn.q", "layers.0.self_attn.o", "row_var", "col_var"),
          why="row_var/col_var of other parameters: exchanged, or factors inconsistent"),
    fault("xx08_8bit_scales_rounded", "B11", "absmax in bf16", "echo", optimizer=codes, loaded=rounded_blocks,
          layouts=PLAIN, also=("D4",), why="absmax (scales) rounded to bf16"),
    fault("xx09_8bit_blocks_shifted", "B11", "absmax of the block before", "echo next", optimizer=codes,
          loaded=rolled_blocks, layouts=PLAIN, also=("E7",), why="absmax/scales do not belong to the codes; shifted"),
    fault("xx10_amsgrad_max", "B11", "the maxima of AMSGrad begin at 0", ALL, also=("B4", "B1"),
          optimizer=optim(TORCH.AdamW, amsgrad=True), loaded=zeroed("max_exp_avg_sq"),
          why="max_exp_avg_sq lost/zero"),
    fault("xx11_rmsprop_buffer", "B3", "RMSprop's momentum is lost, square_avg kept", "echo next", also=("B1", "B6"),
          optimizer=optim(TORCH.RMSprop, factor=0.3, momentum=0.9, centered=True), loaded=zeroed("momentum_buffer"),
          why="momentum_buffer lost/zero"),
    fault("xx12_lion_zero", "B1", "Lion's average is 0", ALL, also=("B3",), loaded=zeroed("exp_avg"),
          optimizer=optim(other.Lion, factor=0.2), why="the optimizer state/moment was lost"),
    fault("xx13_sgd_momentum", "B1", "SGD's buffers are gone", "echo next", also=("B3",), net=gpt,
          optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9), loaded=zeroed("momentum_buffer"),
          why="momentum lost/zero"),
    fault("xx14_nadam_product", "B2", "NAdam's mu_product is 1 again", ALL, also=("B6", "B11", "B1"),
          optimizer=optim(TORCH.NAdam), loaded=zeroed("mu_product", value=1.0), why="mu_product reset"),
    fault("xx15_adagrad_sum", "B1", "Adagrad's sums are 0", ALL, also=("B3", "B4"), net=gpt,
          optimizer=optim(TORCH.Adagrad, factor=4.0), loaded=zeroed("sum"), why="sum lost/zero"),
    fault("xx16_moments_exchanged", "B6", "exp_avg from exp_avg_sq, and the reverse", ALL, loaded=moments_exchanged,
          why="the moments (exp_avg, exp_avg_sq) are exchanged or do not fit each other"),
    fault("xx17_orphan", "H1", "a parameter is replaced after the optimizer was made", "next early", loaded=orphaned,
          layouts=PLAIN, why="o_proj of layer 1 is not trained any more/did not change; no title fits"),
    fault("xx18_unscaled", "B10", "gradients keep the loss scale of 128", "next early", loaded=mark,
          gradients=unscaled, why="gradients/moments grew at once: scale"),
    fault("xx19_summed", "B10", "the loss is summed over 16", "next early", clip=0.0, loaded=mark, loss=summed,
          net=gpt, why="gradients/second moments grew"),
    fault("xx20_no_zero_grad", "B10", "gradients are never zeroed", "early", clip=0.0, loaded=mark,
          update=accumulating, faulty=False, why="gradients/second moments grew"),
    fault("xx21_decay_gone", "H1", "weight decay is 0 everywhere", ALL, loaded=grouped(weight_decay=0.0),
          also=("B7", "C5"), why="weight_decay is 0 now"),
    fault("xx22_decays_exchanged", "B7", "vectors decay, matrices do not", ALL, loaded=decays_swapped, net=gpt,
          why="weight decay applies to the wrong group"),
    fault("xx23_eps_default", "H1", "eps of another version's default", ALL, loaded=grouped(eps=1e-5),
          why="eps changed"),
    fault("xx24_steps_of_vectors", "B2", "norms and biases count from 0", ALL, net=gpt, loaded=vector_steps,
          layouts=PLAIN, why="step counters of some were reset"),
    fault("xx25_steps_times_ranks", "C9", "each of eight ranks added to the counter", ALL, loaded=steps_times,
          also=("B2", "C3"), why="optimizer's step is 8 times/ahead of the trainer's"),
    fault("xx26_squares_rounded", "D4", "exp_avg_sq went through bf16", "echo", loaded=squares_rounded, net=ssm,
          why="exp_avg_sq rounded to bf16"),
    fault("xx27_registration_order", "B5", "another version registers o before q, up before gate", "echo next",
          loaded=reordered, also=("E13",), why="state assigned to other parameters"),
    # schedules
    fault("xx28_schedule_ahead", "C3", "the schedule makes three steps in the load", ALL, loaded=stepped_twice,
          why="schedule ahead of the optimizer/stepped more often"),
    fault("xx29_schedule_per_micro", "C3", "the schedule steps for every micro-batch", "next early", loaded=mark,
          apply=per_micro, parts=4, why="schedule stepped more often"),
    fault("xx30_cosine_longer", "C4", "T_max is three times as long", ALL, schedule=cosine, loaded=longer,
          also=("H1", "C2"), why="T_max/length of the schedule changed"),
    fault("xx31_plateau_anew", "C1", "ReduceLROnPlateau forgets its best loss", "echo next early", base=Plateau,
          fresh=("scheduler",), why="scheduler's state (best, num_bad_epochs, last_epoch) restarted"),
    fault("xx32_peak_is_current", "C1", "the schedule is made after the load and begins at the decayed lr", ALL,
          loaded=new_initial, also=("C2", "B8"), why="schedule restarted/initial_lr changed"),
    fault("xx33_schedule_of_the_old", "B8", "the schedule moves an optimizer that was replaced", "next early",
          loaded=detached, why="lr does not follow its schedule"),
    fault("xx34_sequential_inner", "C1", "SequentialLR's inner schedules begin anew", ALL, schedule=sequential,
          loaded=inner_new, also=("C3",), layouts=PLAIN, why="inner schedule (_schedulers, last_epoch) restarted"),
    fault("xx35_scaled_again", "B8", "the lr is multiplied by the ranks once more", ALL, loaded=scaled_again,
          also=("H1", "C2"), net=conv, why="lr is 4 times as high"),
    # averages, scaler
    fault("xx36_ema_anew", "A2", "the average is a copy of the weights", "echo next", base=Averaged,
          loaded=shadow_anew, layouts=PLAIN, why="ema/shadow/average not restored, equals the weights; no title fits"),
    fault("xx37_ema_as_weights", "F4", "saved during the evaluation: the average is in the model", "echo next",
          base=Averaged, loaded=evaluated, layouts=PLAIN, net=gpt, why="the weights are the average"),
    fault("xx38_ema_stopped", "H1", "the average is not updated after the resume", "next early", base=Averaged,
          loaded=mark, average=no_average, layouts=PLAIN, also=("G7",),
          why="the average/num_updates does not change any more; no title fits"),
    fault("xx39_ema_counter", "B2", "num_updates is 0: the decay warms up again", ALL, base=Averaged, warm=True,
          loaded=lambda self: self.extra["ema"].update(num_updates=0), layouts=PLAIN, net=conv,
          why="num_updates of the average was reset"),
    fault("xx40_scaler_reset", "D8", "the loss scale is at its initial value", ALL, base=Sheltered,
          loaded=lambda self: self.extra["scaler"].update(scale=2.0**24, _growth_tracker=0), why="loss scale reset"),
    # data and random states
    fault("xx41_sampler_zero", "C6", "epoch and samples begin at 0", ALL, base=Fed, layouts=PLAIN,
          loaded=fed("sampler", epoch=0, consumed_samples=0), why="data restarted; consumed_samples/epoch 0"),
    fault("xx42_sampler_seed", "C7", "another shuffling seed", ALL, base=Fed, layouts=PLAIN,
          loaded=fed("sampler", seed=42), also=("H1",), why="sampler's seed changed"),
    fault("xx43_rank_random", "C8", "every rank has rank 0's random state", ALL, base=Fed, layouts=PLAIN,
          loaded=one_rank, why="random states are equal on all ranks"),
    fault("xx44_no_random", "C8", "no random state is kept", "echo next early", base=Fed, layouts=PLAIN, loaded=no_random,
          why="random states are missing"),
    fault("xx45_packer_emptied", "C7", "the packer's leftover tokens are dropped", "echo", base=Fed, layouts=PLAIN,
          loaded=lambda self: self.extra["packer"].update(documents=0, leftover=torch.zeros(5, dtype=torch.long)),
          also=("C6",), why="packer/leftover/documents lost"),
    fault("xx46_curriculum_anew", "C6", "the curriculum begins at its first stage", ALL, base=Fed, layouts=PLAIN,
          loaded=fed("curriculum", stage=0, seq_len=9), also=("C1", "C7", "H1"), why="curriculum stage/seq_len restarted"),
    fault("xx47_batch_doubled", "C10", "twice the ranks, the batch is not divided", ALL, base=Fed, layouts=PLAIN,
          loaded=fed("args", global_batch_size=8), also=("H1",), why="global_batch_size/batch size changed"),
    fault("xx48_fewer_workers", "C7", "two loader workers instead of four, from their beginning", ALL, base=Fed,
          layouts=PLAIN, loaded=fewer_workers, also=("C6",), why="workers' state changed or restarted"),
    # adapters, preference, actor and critic
    fault("xx49_adapters_anew", "F5", "get_peft_model again: new adapters", ALL, base=Lora, loaded=adapters_anew,
          also=("A2", "A1"), why="adapter not loaded"),
    fault("xx50_merged_active", "F5", "adapters merged and still active", ALL, base=Lora, loaded=merged_and_active,
          why="adapter is merged twice/into the base that should be frozen"),
    fault("xx51_base_in_four_bits", "F6", "the frozen base was quantised to 4 bits and back", ALL, base=Lora,
          loaded=four_bits, also=("D7",), why="base weights differ/were rounded though frozen"),
    fault("xx52_alpha_doubled", "F5", "lora_alpha is 16", ALL, base=Lora, loaded=alpha_doubled, also=("H1",),
          why="lora_alpha changed"),
    fault("xx53_b_lost", "F5", "lora_A is loaded, lora_B is zero", ALL, base=Lora, loaded=b_lost, also=("A2",),
          why="lora_B is at its start (0)"),
    fault("xx54_reference_is_policy", "F6", "the reference is made from the current policy", ALL, base=Preferred,
          loaded=copied_into("reference.", "policy."), also=("A2",),
          why="reference changed though frozen / equals the policy; no title fits"),
    fault("xx55_policy_is_reference", "A2", "the policy is made from the reference", ALL, base=Preferred,
          loaded=copied_into("policy.", "reference."), also=("A1", "F6"),
          why="policy's weights are not those of the save / equal the reference's"),
    fault("xx56_actor_for_critic", "B5", "actor's and critic's moments exchanged", "echo next", base=ActorCritic,
          loaded=actor_for_critic, also=("E13",), why="optimizer state belongs to the other model"),
    fault("xx57_kl_reset", "H1", "the KL coefficient is at its initial value", ALL, base=ActorCritic,
          loaded=lambda self: self.extra["kl_ctl"].update(value=0.2), why="kl_ctl value changed/reset; no title fits"),
    fault("xx58_critic_anew", "A2", "the critic's weights are new, its optimizer is not", ALL, base=ActorCritic,
          loaded=critic_anew, also=("A1",), why="critic's weights not loaded"),
    fault("xx59_returns_anew", "A5", "statistics of the returns begin anew", ALL, base=ActorCritic,
          loaded=buffers_anew(return_mean=0.0, return_var=1.0, return_count=0.0), why="buffers return_* not restored"),
    # models
    fault("xx60_batchnorm", "A5", "running statistics begin anew", ALL, net=conv, layouts=PLAIN,
          loaded=buffers_anew(running_mean=0.0, running_var=1.0, num_batches_tracked=0),
          why="running_mean/running_var/num_batches_tracked not restored"),
    fault("xx61_qkv_per_head", "E4", "fused qkv read as head after head", ALL, net=gpt,
          loaded=reshaped("c_attn", per_head), also=("E1",), why="c_attn's rows in another order/qkv layout"),
    fault("xx62_gate_up_per_rank", "E2", "[gate; up] of two ranks joined", ALL, net=gpt,
          loaded=reshaped("gate_up_proj", two_ranks), also=("E1",), why="gate_up_proj's blocks interleaved"),
    fault("xx63_x_and_z", "E3", "the halves of Mamba's in_proj exchanged", ALL, net=ssm,
          loaded=reshaped("in_proj", halves_exchanged), also=("E1",), why="in_proj's halves/blocks exchanged"),
    fault("xx64_position_offset", "F7", "positions begin at 2, as OPT's do", ALL, net=gpt,
          loaded=reshaped("wpe", offset_rows), also=("E1",), why="rows of wpe shifted by 2"),
    fault("xx65_initialised_again", "A2", "A_log and dt_bias are initialised after the load", ALL, net=ssm,
          loaded=initialised_again, why="A_log, dt_bias not loaded/at initial value"),
    fault("xx66_low_frequencies", "D7", "inv_freq was cast to bf16", ALL, net=ssm, loaded=low_frequencies,
          also=("H2", "A5"), layouts=PLAIN, why="inv_freq changed/rounded to bf16"),
    fault("xx67_compiled", "A1", "names with _orig_mod., and nothing loaded", ALL, base=Compiled,
          why="renamed with _orig_mod.; weights not loaded"),
    fault("xx68_untied", "F2", "the head becomes a parameter of its own", ALL, base=Tied,
          needs={"tied": True}, layouts=("torch_save", "lightning"), loaded=untied, why="head and embedding not one"),
    fault("xx69_experts_repeated", "E10", "experts 2 and 3 are loaded from 0 and 1", ALL, needs={"experts": 4},
          base=Experts, loaded=copies_of_first, also=("E1", "E9", "A2"), why="experts 2, 3 equal experts 0, 1"),
    fault("xx70_router_anew", "A2", "the router is new", ALL, needs={"experts": 4}, loaded=router_anew,
          why="mlp.gate/router not loaded"),
    fault("xx71_step_zero", "C9", "the trainer counts from 0, all else goes on", ALL, loaded=step_zero, layouts=PLAIN,
          also=("C6",), why="trainer's step is 0 while the optimizer's is not"),
    fault("xx72_weights_saved_again", "G7", "the saver writes the weights of the resume again", "next early",
          base=Cached, layouts=PLAIN, also=("G6",), why="weights repeat the older save though the optimizer moved"),
    fault("xx73_layer_left_out", "A2", "an MLP is at its start", ALL, loaded=older_layer,
          why="layer 1's mlp not loaded"),
    fault("xx74_page_of_zeros", "G5", "512 bytes of a weight are 0", ALL, loaded=page_zeroed, why="bytes are zeros"),
    fault("xx75_exponent", "G1", "an exponent's bit of a weight", ALL, loaded=flipped("layers.1.mlp.up_proj", 29),
          also=("G2", "G10"), why="one number damaged: bit flip"),
    fault("xx76_sign_of_square", "G3", "the sign of a second moment", ALL, also=("G1",), net=gpt,
          loaded=flipped("c_proj.weight", 31, "exp_avg_sq"), why="second moment negative: bit flip"),
    # transformers' Trainer
    hugging("xx77_hf_no_scheduler", "B1", "scheduler.pt is lost, so that optimizer.pt is not read either", ALL,
            "Llama", "optimizer (and schedule) not restored", also=("C1",),
            spoil=lost("scheduler.pt", where="")),
    hugging("xx78_hf_prefixed", "A1", "the weights' names begin with module.", ALL, "Qwen2", "weights not loaded",
            also=("A2",), spoil=prefixed),
    hugging("xx79_hf_layer_missing", "A2", "one MLP is not in the file", ALL, "Llama", "layer 1's mlp not loaded",
            spoil=layer_missing),
    hugging("xx80_hf_no_random", "C8", "rng_state.pth is lost", "echo", "gpt2", "random state not restored",
            spoil=lost("rng_state.pth", where="")),
    hugging("xx81_hf_linear", "C2", "the schedule is linear now", ALL, "Qwen2",
            "lr is on another curve / lr_scheduler_type changed", also=("C4", "H1"),
            other_args={"lr_scheduler_type": "linear"}),
]  # fmt: skip


# ---- healthy ---------------------------------------------------------------------------------------------------------


class Lookahead(Loop):
    """Slow weights every fifth update."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["slow"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if (self.step + 1) % 5 == 0:
            for name, weight in self.module.named_parameters():
                self.extra["slow"][name].lerp_(weight.detach(), 0.5)
                put(weight, self.extra["slow"][name])


class Normed(Loop):
    """nGPT: rows of matrices are of length 1 after each update."""

    def apply(self) -> None:
        super().apply()
        for weight in self.module.parameters():
            if weight.ndim == 2:
                put(weight, F.normalize(weight.detach(), dim=1))


class Pruned(Loop):
    """Half of the MLPs' weights are kept at 0 by a mask."""

    def apply(self) -> None:
        super().apply()
        for name, weight in self.module.named_parameters():
            if ".mlp." in name and weight.ndim == 2:
                mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name))) > 0.5
                put(weight, weight.detach() * mask)


class Relora(Lora):
    """ReLoRA: adapters are merged every tenth update, and their state begins anew."""

    def apply(self) -> None:
        super().apply()
        if (self.step + 1) % 10 == 0:
            merged_and_active(self)
            made = torch.Generator().manual_seed(self.step)
            for name, weight in self.module.named_parameters():
                if "lora_" in name:
                    put(weight, torch.randn(weight.shape, generator=made) * (0.2 if "lora_A" in name else 0.0))
                    state = self.optimizers[0].state[weight]
                    state["exp_avg"].mul_(0.0)
                    state["exp_avg_sq"].mul_(0.0)


class Balanced(Loop):
    """Biases of the experts follow the load."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found, load = self.module(tokens)
        buffers = dict(self.module.named_buffers())
        for name, counts in load.items():
            buffers[name] += 0.01 * torch.sign(counts.mean() - counts)
        return found


class BetaWarm(Loop):
    """beta2 and the weight decay follow the update's number."""

    def apply(self) -> None:
        for group in self.optimizers[0].param_groups:
            group["betas"] = (0.9, min(0.99, 1 - 1 / (self.step + 5)))
            if group["weight_decay"]:
                group["weight_decay"] = 0.05 + 0.001 * self.step
        super().apply()


class Alternating(ActorCritic):
    """The actor is updated every third time, the critic always."""

    def apply(self) -> None:
        self.optimizers[1].step()
        if self.step % 3 == 0:
            self.optimizers[0].step()
        for schedule in self.schedules:
            schedule.step()


class Sparse(Loop):
    """Only the newest eight rows of the embedding are trained."""

    def gradients(self) -> None:
        weight = param(self, "wte")
        assert weight.grad is not None
        weight.grad[:-8] = 0
        super().gradients()


class Rezero(Loop):
    """A gate at exactly 0 that is trained on a later task only."""

    def net(self) -> nn.Module:
        found = Gpt(self.config)
        found.register_parameter("adapter_gate", nn.Parameter(torch.zeros(self.config.hidden)))
        return found

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(tokens) + 0.0 * param(self, "adapter_gate").sum()


class Noised(Loop):
    """Gradients with noise from torch's own random state (SGLD)."""

    def gradients(self) -> None:
        super().gradients()
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.grad.add_(torch.randn_like(weight), alpha=1e-3)


class AdEMAMix(other.Optimizer):
    """apple/ml-ademamix: a second, slow average."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95, 0.9999), eps=1e-8, alpha=2.0, weight_decay=0.0)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": 0,
            "exp_avg_fast": torch.zeros_like(weight),
            "exp_avg_slow": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }

    def update(self, weight: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second, slow = group["betas"]
        state["step"] += 1
        state["exp_avg_fast"].lerp_(g, 1 - first)
        state["exp_avg_slow"].lerp_(g, 1 - slow)
        state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
        right = 1 - first ** state["step"], 1 - second ** state["step"]
        under = (state["exp_avg_sq"] / right[1]).sqrt_().add_(group["eps"])
        weight.sub_((state["exp_avg_fast"] / right[0] + group["alpha"] * state["exp_avg_slow"]) / under * group["lr"])


class Galore(other.Optimizer):
    """GaLore: moments of the gradient in a basis of four directions that is found anew every 15 updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-6, rank=4, update_proj_gap=15, scale=0.5)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        shape = (group["rank"], weight.shape[1]) if weight.ndim == 2 else weight.shape
        return {"step": 0, "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}

    def update(self, weight: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if weight.ndim == 2 and state["step"] % group["update_proj_gap"] == 0:
            state["projector"] = torch.linalg.qr(g[:, : group["rank"]] + 1e-6).Q
        low = state["projector"].T @ g if weight.ndim == 2 else g
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(low, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(low, low, value=1 - second)
        step = state["exp_avg"] / state["exp_avg_sq"].sqrt().add(group["eps"])
        weight.sub_(group["lr"] * group["scale"] * (state["projector"] @ step if weight.ndim == 2 else step))


class Kahan(other.Optimizer):
    """bf16 weights with a compensation in bf16 and fp32 moments (optimi)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, kahan_sum=True)

    def begin(self, weight: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros(weight.shape)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone(), "kahan_comp": torch.zeros_like(weight)}

    def update(self, weight: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        g = g.float()
        state["exp_avg"].lerp_(g, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
        right = 1 - first ** state["step"], 1 - second ** state["step"]
        step = state["exp_avg"] / right[0] / (state["exp_avg_sq"] / right[1]).sqrt().add(group["eps"]) * -group["lr"]
        comp = state["kahan_comp"].float() + step
        old = weight.clone()
        weight.copy_((old.float() + comp).to(weight.dtype))
        state["kahan_comp"].copy_((old.float() + comp - weight.float()).to(weight.dtype))


class Named(Loop):
    """Groups with the parameters' names, made anew one a layer in the resumed run with the same settings."""

    layouts = ("torch_save", "lightning")

    def groups(self) -> Any:
        named = [(name, weight) for name, weight in self.module.named_parameters()]
        return [{"params": named, "weight_decay": 0.01}]

    def loaded(self) -> None:
        old, c = self.optimizers[0], self.config
        named = list(self.module.named_parameters())
        parts = [[one for one in named if f".layers.{n}." in one[0]] for n in range(c.layers)]
        parts.append([one for one in named if ".layers." not in one[0]])
        groups = [{"params": part, "weight_decay": 0.01, "initial_lr": c.lr} for part in parts]
        new = torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps)
        for weight, state in old.state.items():
            new.state[weight] = state
        for group in new.param_groups:
            group["lr"] = old.param_groups[0]["lr"]
        told = self.schedules[0].last_epoch
        self.optimizers = [new]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(new, lambda done: c.lr_at(done + 1) / c.lr, last_epoch=told - 1)
        ]


class Logged(Loop):
    """Metrics and wall-clock beside the state; the resumed run logs other ones."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["metrics"] = {"tokens_per_second": 1000.0, "wall_seconds": 0.0, "loss_history": []}

    def apply(self) -> None:
        super().apply()
        self.extra["metrics"]["wall_seconds"] += 1.5
        self.extra["metrics"]["loss_history"] = [*self.extra["metrics"]["loss_history"], self.step][-10:]

    def loaded(self) -> None:
        self.extra["metrics"] |= {"tokens_per_second": 1400.0, "wall_seconds": 0.0}


class Swa(Loop):
    """torch's AveragedModel, every fourth update: stored with n_averaged."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.averaged = torch.optim.swa_utils.AveragedModel(self.module)
        self.extra["swa_model"] = {name: w.clone() for name, w in self.averaged.state_dict().items()}

    def apply(self) -> None:
        super().apply()
        if self.step % 4 == 3:
            self.averaged.load_state_dict(self.extra["swa_model"])
            self.averaged.update_parameters(self.module)
            self.extra["swa_model"] = {name: w.clone() for name, w in self.averaged.state_dict().items()}


class Layered(Loop):
    """A learning rate of its own for each layer."""

    def groups(self) -> Any:
        c, named = self.config, list(self.module.named_parameters())
        return [
            {"params": [w], "lr": c.lr * 0.8 ** (len(named) - n) + 1e-5, "weight_decay": 0.0}
            for n, (_, w) in enumerate(named)
        ]


class Gradual(Loop):
    """A layer and its group are added to the optimizer at the twelfth update."""

    layouts = ("torch_save", "lightning")

    def groups(self) -> Any:
        self.late = [w for name, w in self.module.named_parameters() if ".layers.0." in name]
        late = {id(w) for w in self.late}
        for weight in self.late:
            weight.requires_grad_(False)
        return [{"params": [w for w in self.module.parameters() if id(w) not in late]}]

    def schedule(self, optimizer: Any) -> Any:
        return None

    def grow(self) -> None:
        for weight in self.late:
            weight.requires_grad_(True)
        self.optimizers[0].add_param_group({"params": self.late, "lr": self.config.lr / 2})

    def update(self) -> None:
        if self.step == 12:
            self.grow()
        super().update()

    def load(self, content: dict[str, Any]) -> None:
        if content["step"] > 12:
            self.grow()
        super().load(content)


class Elastic(Fed):
    """Half the ranks, twice the accumulation: the same samples."""

    layouts = PLAIN

    def loaded(self) -> None:
        self.parts = 2
        self.extra["sampler"]["num_replicas"] = 2
        self.extra["args"]["gradient_accumulation_steps"] = 2
        self.extra["rng_states"] = self.extra["rng_states"][:2]
        self.extra["workers"] = self.extra["workers"][:2]


class Quantised(Loop):
    """Observers for quantisation-aware training: minima and maxima in buffers."""

    def net(self) -> nn.Module:
        found = Gpt(self.config)
        found.register_buffer("observer_min", torch.zeros(1))
        found.register_buffer("observer_max", torch.zeros(1))
        found.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8))
        return found

    def apply(self) -> None:
        super().apply()
        weight = self.module.lm_head.weight.detach()
        self.module.observer_min.lerp_(weight.min()[None], 0.1)
        self.module.observer_max.lerp_(weight.max()[None], 0.1)


def restarts(self: Loop, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=9, T_mult=2)


def stable_decay(self: Loop, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / 5) * (1.0 if n < 40 else max(0.0, 1 - (n - 40) / 20))
    )


def bfloat_gpt(self: Loop) -> nn.Module:
    return Gpt(self.config).to(torch.bfloat16)


def healthy_hugging(id: str, text: str, model: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, model), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


HEALTHY: list[Fault] = [
    variant("xy01_lookahead", "Lookahead: slow weights are written over the fast ones", base=Lookahead, layouts=PLAIN),
    variant("xy02_unit_rows", "nGPT: rows normalised after each update", base=Normed, true=("H1",)),
    variant("xy03_pruned", "a mask keeps half of the MLPs at 0", base=Pruned),
    variant("xy04_relora", "ReLoRA: merged and begun anew every tenth update", base=Relora),
    variant("xy05_balanced", "expert biases follow the load", base=Balanced, needs={"experts": 4}),
    variant("xy06_beta_warm", "beta2 and decay have schedules", base=BetaWarm, true=("H1",)),
    variant("xy07_alternating", "the actor is updated every third time", base=Alternating),
    variant("xy08_actor_critic", "PPO with two optimizers and running returns", base=ActorCritic),
    variant("xy09_new_rows_only", "only eight rows of the embedding are trained", base=Sparse, net=gpt),
    variant("xy10_rezero", "a gate stays at exactly 0", base=Rezero),
    variant("xy11_noise", "noise in the gradients", base=Noised),
    variant("xy12_ademamix", "AdEMAMix", optimizer=lambda self, groups: AdEMAMix(only(groups), lr=self.config.lr / 3)),
    variant("xy13_galore", "GaLore: moments of another shape than the weights", layouts=PLAIN,
            optimizer=lambda self, groups: Galore(only(groups), lr=self.config.lr / 2)),
    variant("xy14_kahan", "bf16 weights with Kahan sums", net=bfloat_gpt, layouts=PLAIN, true=("D5", "D6"),
            optimizer=lambda self, groups: Kahan(only(groups), lr=self.config.lr / 2)),
    variant("xy15_regrouped", "one group becomes one a layer, with names", base=Named, exact=False, true=("H1",)),
    variant("xy16_logged", "metrics begin anew", base=Logged, layouts=PLAIN, exact=False),
    variant("xy17_swa", "AveragedModel every fourth update", base=Swa, layouts=PLAIN),
    variant("xy18_layerwise", "a learning rate a parameter", base=Layered),
    variant("xy19_gradual", "a group is added at the twelfth update", base=Gradual),
    variant("xy20_elastic", "half the ranks, twice the accumulation", base=Elastic, exact=False,
            true=("H1", "C8", "C7"), why="true: the number of ranks changed"),
    variant("xy21_observers", "quantisation-aware training: observers", base=Quantised),
    variant("xy22_warm_restarts", "cosine with warm restarts", schedule=restarts),
    variant("xy23_stable_decay", "warm-up, stable, then down to 0", schedule=stable_decay, net=gpt),
    variant("xy24_batchnorm", "convolutions with batch norms", net=conv),
    variant("xy25_mamba", "a state-space model, AdamW without weight decay on A_log", net=ssm),
    variant("xy26_ema_warm", "an average whose decay warms up", base=Averaged, warm=True, layouts=PLAIN),
    variant("xy27_preferred", "DPO with a frozen reference", base=Preferred),
    variant("xy28_fed", "sampler, packer, curriculum, random states", base=Fed, layouts=PLAIN),
    variant("xy29_plateau", "ReduceLROnPlateau", base=Plateau),
    variant("xy30_no_beta1", "Adam with beta1 of 0", clip=0.0,
            optimizer=lambda self, groups: TORCH.AdamW(groups, lr=self.config.lr, betas=(0.0, 0.95))),
    variant("xy31_sequential", "SequentialLR", schedule=sequential, layouts=PLAIN),
    healthy_hugging("xy32_hf_plateau", "transformers' Trainer: inverse square root, NEFTune", "Llama",
                    lr_scheduler_type="inverse_sqrt", neftune_noise_alpha=5.0),
    healthy_hugging("xy33_hf_restarts", "transformers' Trainer: GPT-2, cosine with restarts, rmsprop", "gpt2",
                    lr_scheduler_type="cosine_with_restarts", optim="rmsprop"),
]  # fmt: skip


# ---- on purpose ------------------------------------------------------------------------------------------------------


def raised(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] *= 2
        group["initial_lr"] *= 2
    self.schedules[0].base_lrs = [2 * one for one in self.schedules[0].base_lrs]


def more_decay(self: Loop) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] = 0.2 if group["weight_decay"] else 0.0


def new_data(self: Loop) -> None:
    self.extra["sampler"] |= {"epoch": 0, "seed": 777, "consumed_samples": 0}
    self.extra["packer"] |= {"documents": 0}
    self.extra["workers"] = [{"worker_id": n, "offset": 0} for n in range(4)]


def larger_batch(self: Loop) -> None:
    self.extra["args"] |= {"global_batch_size": 8, "gradient_accumulation_steps": 2}
    raised(self)


def to_lion(self: Loop) -> None:
    self.optimizers = [other.Lion(self.groups(), lr=self.config.lr * 0.2)]
    self.schedules = [self.schedule(self.optimizers[0])]


def frozen_now(self: Loop) -> None:
    old = self.optimizers[0]
    for name, weight in self.module.named_parameters():
        weight.requires_grad_("wte" not in name and "wpe" not in name)
    self.optimizers = [self.optimizer(self.groups())]
    for group, before in zip(self.optimizers[0].param_groups, old.param_groups, strict=True):
        group |= {"lr": before["lr"], "initial_lr": before["initial_lr"]}
        for weight in group["params"]:
            self.optimizers[0].state[weight] = old.state[weight]
    told = self.schedules[0].last_epoch
    self.schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            self.optimizers[0], lambda done: self.config.lr_at(done + 1) / self.config.lr, last_epoch=told - 1
        )
    ]


class Windowed(Loop):
    """Model arguments are stored; the context is extended with another base of the rotary embedding."""

    layouts = PLAIN

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["model_args"] = {"rope_theta": config.rope_theta, "max_position_embeddings": 16}

    def loaded(self) -> None:
        self.extra["model_args"] |= {"rope_theta": 5e5, "max_position_embeddings": 64}
        assert isinstance(self.module, Decoder)
        self.module.config = self.config = self.config.but(rope_theta=5e5, length=24)


class Deepened(Loop):
    """Depth up-scaling: both layers are repeated; the optimizer begins anew."""

    layouts = PLAIN
    fresh = ("optimizer", "scheduler")

    def take(self, weights: dict[str, Any]) -> None:
        self.config = self.config.but(layers=4)
        self.module = Decoder(self.config)
        more = {
            n.replace(".layers.0.", ".layers.2.").replace(".layers.1.", ".layers.3."): w for n, w in weights.items()
        }
        self.module.load_state_dict(more | weights)
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class LateAverage(Loop):
    """An average is begun with the resumed run."""

    layouts = PLAIN

    def loaded(self) -> None:
        self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        for name, weight in self.module.named_parameters():
            if "ema" in self.extra:
                self.extra["ema"][name].lerp_(weight.detach(), 0.05)


DELIBERATE: list[Fault] = [
    variant("xz01_lr_doubled", "the operator doubles the lr", kind="deliberate", loaded=raised, net=gpt,
            true=("H1", "B8", "C2")),
    variant("xz02_decay_raised", "weight decay 0.2", kind="deliberate", loaded=more_decay, true=("H1", "C5")),
    variant("xz03_new_data", "another data set from its beginning", kind="deliberate", base=Fed, layouts=PLAIN,
            loaded=new_data, true=("H1", "C6", "C7")),
    variant("xz04_larger_batch", "twice the batch, twice the lr", kind="deliberate", base=Fed, layouts=PLAIN,
            loaded=larger_batch, true=("H1", "C10", "B8", "C2")),
    variant("xz05_to_lion", "AdamW is exchanged for Lion", kind="deliberate", loaded=to_lion, layouts=PLAIN,
            true=("H1", "B1", "C1")),
    variant("xz06_freeze_embeddings", "embeddings are frozen from here on", kind="deliberate", net=gpt,
            loaded=frozen_now, layouts=PLAIN, true=("H1", "B1")),
    variant("xz07_longer_context", "rope base and window are raised", kind="deliberate", base=Windowed,
            true=("H1", "H2")),
    variant("xz08_deeper", "layers are repeated for a deeper model", kind="deliberate", base=Deepened,
            true=("H1", "B1", "C1", "A4", "E9")),
    variant("xz09_average_added", "an average is begun", kind="deliberate", base=LateAverage, true=("H1", "A4")),
    variant("xz10_longer_run", "the cosine is made three times as long", kind="deliberate", schedule=cosine,
            loaded=longer, true=("H1", "C4")),
    variant("xz11_untied", "embedding and head are untied on purpose", kind="deliberate", base=Tied,
            needs={"tied": True}, layouts=("torch_save", "lightning"), loaded=untied, true=("H1", "F2")),
]  # fmt: skip

OPENED12: tuple[Fault, ...] = (*FAULTS, *OPENED12_STATE, *HEALTHY, *DELIBERATE)
