"""The tenth half, sealed until 2026-11-27, by a stranger to the rules: what goes wrong, looks wrong or is changed when
runs are resumed. Its author had the list of causes.

``why`` of each case is what a right answer says, fixed before the doctor saw any of them; of healthy runs it is that
nothing is wrong.
"""

from __future__ import annotations

import copy
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import optimizers as packaged
from tests.lab.data import batch
from tests.lab.fault import Fault, masters, seen
from tests.lab.hugging import SIZE, made, trained
from tests.lab.live import Decoder, Groups, Loop, fault, variant
from tests.lab.live_healthy import Sheltered, muon, optim, plain
from tests.lab.model import is_norm

__all__ = ["OPENED10_LIVE"]

Tensor = torch.Tensor
TORCH = torch.optim
FILES = ("torch_save", "folder", "lightning")
ONE = ("torch_save", "lightning")


# ---- pieces ----------------------------------------------------------------------------------------------------------


class Live(Loop):
    """Knows whether it is the resumed one, and finds its parameters by name."""

    resumed = False

    def loaded(self) -> None:
        self.resumed = True

    def named(self, *parts: str) -> dict[str, Tensor]:
        return {n: w for n, w in self.module.named_parameters() if all(part in n for part in parts)}

    def held(self, weight: Tensor) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if weight in optimizer.state:
                return optimizer.state[weight]
        return {}

    def states(self) -> list[dict[str, Any]]:
        return [state for one in self.optimizers for state in one.state.values()]


def after(action: Any) -> Any:
    """For `loaded`: do that, without gradients."""

    def loaded(self: Live) -> None:
        self.resumed = True
        with torch.no_grad():
            action(self)

    return loaded


class Other(Live):
    """A model that is not the decoder."""

    layouts = ("torch_save", "torch_save", "folder", "lightning", "dcp")
    kind: Any = None

    def built(self) -> nn.Module:
        return self.kind(self.config)

    def net(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return self.built()


def pixels(tokens: Tensor) -> Tensor:
    waves = torch.tensor([0.11, 0.37, 0.73])
    return torch.sin(tokens[:, None, :16].float() * waves[None, :, None]).view(-1, 3, 4, 4)


class ConvNet(nn.Module):
    def __init__(self, config: Any, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8, momentum=momentum)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8, momentum=momentum)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))


class Vision(Other):
    kind = ConvNet

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.module(pixels(tokens)), tokens[:, 16] % 5)


class Lstm(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, config.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.embed(tokens[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Direct(Other):
    """The module returns the loss."""

    def loss(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)


class Recurrent(Direct):
    kind = Lstm


class Blocks(nn.Module):
    """torch's own encoder layers, with a fused in_proj and biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, config.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) * 4
        mask = torch.full((x.shape[1],) * 2, -math.inf).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Encoder(Direct):
    kind = Blocks


class Pair(nn.Module):
    """Generator and discriminator of equal shapes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


class Gan(Other):
    """Two optimizers; the discriminator learns at every update, the generator as often as ``rare`` says."""

    kind = Pair
    layouts = ONE
    rare = 1
    clip = 0.0

    def made(self) -> list[torch.optim.Optimizer]:
        return [
            TORCH.Adam(self.module.get_submodule(name).parameters(), lr=2e-3, betas=(0.5, 0.99))
            for name in ("generator", "discriminator")
        ]

    def loss(self, tokens: Tensor) -> Tensor:
        real = torch.sin(tokens[:, :16].float())
        noise = torch.cos(tokens[:, 1:17].float() * 1.7)
        net = self.module
        judge = lambda x: net.discriminator(x).mean(1)  # noqa: E731
        fake = net.generator(noise)
        generator = F.softplus(-judge(fake)).mean()
        grads = torch.autograd.grad(generator, list(net.generator.parameters()))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        self.kept = list(zip(net.generator.parameters(), grads, strict=True))
        return loss

    def gradients(self) -> None:
        for weight, gradient in self.kept:
            weight.grad = gradient if self.step % self.rare == 0 else None


class Averaged(Live):
    """With an exponential average of the weights, stored beside them."""

    decay = 0.95
    every = 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}
        self.extra["ema_updates"] = 0

    def rate(self) -> float:
        return self.decay

    def apply(self) -> None:
        super().apply()
        if (self.step + 1) % self.every == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        self.extra["ema_updates"] += 1
        for name, weight in self.module.named_parameters():
            self.extra["ema"][name].lerp_(weight.to(self.extra["ema"][name].dtype), 1 - self.rate())


class Balanced(Live):
    """A mixture whose router's bias balances the load without a loss."""

    def loss(self, tokens: Tensor) -> Tensor:
        loss, self.load_ = self.module(tokens)
        return loss

    @torch.no_grad()
    def apply(self) -> None:
        with torch.enable_grad():
            super().apply()
        for name, buffer in self.module.named_buffers():
            load = self.load_[name].float()
            buffer += 1e-3 * (load.mean() - load).sign()


class Grouped(Live):
    """Learning rates that fall with the depth: a group for the embedding, each layer and the rest."""

    def share(self, name: str) -> float:
        return 0.36 if "embed" in name else 0.6 if ".layers.0." in name else 1.0

    def groups(self) -> Groups:
        found: dict[float, list[Tensor]] = {}
        for name, weight in self.module.named_parameters():
            found.setdefault(self.share(name), []).append(weight)
        lr = self.config.lr
        return [{"params": ws, "lr": lr * share, "weight_decay": 0.01, "share": share} for share, ws in found.items()]


class Looped(Live):
    """Stores where its data loader is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["dataloader"] = {"epoch": 0, "batches_yielded": 0, "samples_yielded": 0, "seed": 1234}

    def tokens(self) -> Tensor:
        told = self.extra["dataloader"]
        return batch(self.config, told["epoch"] * 6 + told["batches_yielded"], told["seed"])

    def apply(self) -> None:
        super().apply()
        told = self.extra["dataloader"]
        told["batches_yielded"] += 1
        told["samples_yielded"] += self.config.batch
        if told["batches_yielded"] == 6:
            told |= {"epoch": told["epoch"] + 1, "batches_yielded": 0}


# ---- faults: names and weights that did not come back ----------------------------------------------------------------


def regional_compile(self: Live) -> None:
    """The blocks were compiled one by one, so their names have ``_orig_mod`` and nothing is loaded into them."""
    fresh = dict(type(self)(self.config.but(seed=self.config.seed + 1)).module.named_parameters())
    for name, weight in self.named(".layers.").items():
        weight.copy_(fresh[name])


def zeroed(self: Live) -> None:
    """A parameter was on the meta device, was materialised, and never filled."""
    next(iter(self.named(".layers.1.", "down_proj").values())).zero_()


def norms_less_one(self: Live) -> None:
    for weight in self.named("norm.weight").values():
        weight.sub_(1.0)


class Towers(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Embedding(config.vocab, 16)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, tokens: Tensor) -> Tensor:
        image = F.normalize(self.image(pixels(tokens).flatten(1)), dim=-1)
        text = F.normalize(self.text(tokens[:, :8]).mean(1), dim=-1)
        logits = self.logit_scale.exp() * image @ text.T
        wanted = torch.arange(len(tokens))
        return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2


class Clip(Direct):
    kind = Towers


def scale_lost(self: Live) -> None:
    self.module.logit_scale.fill_(math.log(1 / 0.07))


def discriminator_fresh(self: Live) -> None:
    for weight in self.named("discriminator").values():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.2)


class Normed(nn.Module):
    """Weight norm: a magnitude and a direction of each row."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, 16)
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))
        self.outer = nn.utils.parametrizations.weight_norm(nn.Linear(32, config.vocab))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.outer(torch.tanh(self.inner(self.embed(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class WeightNorm(Direct):
    kind = Normed


def magnitudes_recomputed(self: Live) -> None:
    """``g`` is made anew from ``v``, as when weight norm is removed and applied again on the direction alone."""
    for name, weight in self.named("original0").items():
        direction = dict(self.module.named_parameters())[name.replace("original0", "original1")]
        weight.copy_(direction.norm(dim=1, keepdim=True))


class Adapters(Live):
    """A frozen base, adapters, and a trained copy of the head beside the base's."""

    def net(self) -> nn.Module:
        self.config = self.config.but(lora=4, tied=False)
        found = Decoder(self.config)
        for name, weight in found.named_parameters():
            weight.requires_grad_("lora_" in name or "lm_head" in name)
        return found


def head_of_base(self: Live) -> None:
    """``modules_to_save`` was not loaded: the head is that of the pretrained base."""
    fresh = torch.Generator().manual_seed(11)
    head = self.module.lm_head.weight
    head.copy_(torch.randn(head.shape, generator=fresh) * 0.02)


def nf4_base(self: Live) -> None:
    """The base was loaded in 4 bit and dequantised again."""
    levels = torch.tensor([-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338,
                           0.441, 0.563, 0.723, 1.0])  # fmt: skip
    for name, weight in self.module.named_parameters():
        if ".layers." in name and weight.ndim == 2 and "lora_" not in name:
            large = weight.abs().amax(1, keepdim=True)
            near = ((weight / large)[..., None] - levels).abs().argmin(-1)
            weight.copy_(levels[near] * large)


class Policies(nn.Module):
    """A base with a policy's and a reference's adapter, as preference training holds them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, 16)
        self.base = nn.Linear(16, config.vocab)
        for one in ("policy", "reference"):
            self.register_parameter(f"lora_A_{one}", nn.Parameter(torch.randn(4, 16) * 0.2))
            self.register_parameter(f"lora_B_{one}", nn.Parameter(torch.randn(config.vocab, 4) * 0.02))
        for name, weight in self.named_parameters():
            weight.requires_grad_("policy" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens[:, :-1]))
        logits = self.base(x) + x @ self.lora_A_policy.T @ self.lora_B_policy.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Preference(Direct):
    kind = Policies


def adapters_exchanged(self: Live) -> None:
    named = dict(self.module.named_parameters())
    for side in "AB":
        one, two = named[f"lora_{side}_policy"], named[f"lora_{side}_reference"]
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)


def rows_again(self: Live) -> None:
    """The table was resized after the load, and its last eight rows were initialised as new tokens."""
    for name, weight in self.named().items():
        if "embed" in name or "lm_head" in name:
            rows = slice(self.config.vocab - 8, self.config.vocab)
            weight[rows] = weight.mean(0) + torch.randn(8, weight.shape[1]) * 1e-3


class TwoTables(Live):
    """Encoder and decoder share a table under two names; the optimizer knows it once."""

    layouts = ("torch_save", "lightning", "dcp")

    def net(self) -> nn.Module:
        found = Decoder(self.config.but(tied=False))
        found.put("lm_head.weight", dict(found.named_parameters())["model.embed_tokens.weight"])
        return found


def copied_table(self: Live) -> None:
    """A move to the device copied each name: the copy is not in the optimizer."""
    self.module.put("lm_head.weight", nn.Parameter(self.module.model.embed_tokens.weight.clone()))


# ---- faults: buffers -------------------------------------------------------------------------------------------------


def bias_transient(self: Live) -> None:
    """The router's bias is registered as a buffer that is not saved."""
    for module in self.module.modules():
        if "expert_bias" in module._buffers:
            module._non_persistent_buffers_set.add("expert_bias")


def statistics_frozen(self: Live) -> None:
    """A validation right after the load left the model in eval mode."""
    self.module.eval()


class CumulativeNorm(Vision):
    def built(self) -> nn.Module:
        return ConvNet(self.config, momentum=None)


def count_lost(self: Live) -> None:
    for name, buffer in self.module.named_buffers():
        if "num_batches" in name:
            buffer.zero_()


class Spectral(Direct):
    class kind(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocab, 16)
            self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32))
            self.outer = nn.Linear(32, config.vocab)

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.outer(torch.tanh(self.inner(self.embed(tokens[:, :-1]))))
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def vectors_new(self: Live) -> None:
    for name, buffer in self.module.named_buffers():
        if name.endswith(("_u", "_v")):
            fresh = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name)))
            buffer.copy_(F.normalize(fresh, dim=0))


class Codebook(nn.Module):
    """A codebook that averages what is assigned to each code."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(48, 8)
        self.decoder = nn.Linear(8, 48)
        self.register_buffer("codebook", torch.randn(12, 8))
        self.register_buffer("cluster_size", torch.ones(12))
        self.register_buffer("embed_avg", self.codebook.clone())

    def forward(self, tokens: Tensor) -> Tensor:
        x = pixels(tokens).flatten(1)
        z = self.encoder(x)
        code = torch.cdist(z, self.codebook).argmin(1)
        with torch.no_grad():
            one = F.one_hot(code, 12).float()
            self.cluster_size.mul_(0.9).add_(one.sum(0), alpha=0.1)
            self.embed_avg.mul_(0.9).add_(one.T @ z, alpha=0.1)
            self.codebook.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-3)[:, None])
        near = self.codebook[code]
        return F.mse_loss(self.decoder(z + (near - z).detach()), x) + 0.25 * F.mse_loss(z, near)


class Quantised(Direct):
    kind = Codebook


def sums_lost(self: Live) -> None:
    self.module.embed_avg.zero_()


class Contrast(nn.Module):
    """A momentum encoder and a queue of its outputs with a pointer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8))
        self.target = copy.deepcopy(self.online)
        for weight in self.target.parameters():
            weight.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 240), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        x = pixels(tokens).flatten(1)
        query = F.normalize(self.online(x), dim=1)
        with torch.no_grad():
            key = F.normalize(self.target(x.flip(1)), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
        with torch.no_grad():
            at = int(self.queue_ptr)
            self.queue[:, at : at + len(key)] = key.T
            self.queue_ptr[0] = (at + len(key)) % 240
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Momentum(Direct):
    kind = Contrast

    @torch.no_grad()
    def apply(self) -> None:
        with torch.enable_grad():
            super().apply()
        for mine, theirs in zip(self.module.target.parameters(), self.module.online.parameters(), strict=True):
            mine.lerp_(theirs, 0.01)


def pointer_lost(self: Live) -> None:
    self.module.queue_ptr.zero_()


def target_recopied(self: Live) -> None:
    for mine, theirs in zip(self.module.target.parameters(), self.module.online.parameters(), strict=True):
        mine.copy_(theirs)


# ---- faults: layouts -------------------------------------------------------------------------------------------------


def contiguous_qkv(self: Live) -> None:
    """The source has q k v of each head in turn; it was read as contiguous, or the reverse."""
    for name, weight in self.module.named_parameters():
        if "in_proj" in name:
            shape = weight.shape
            weight.copy_(weight.view(3, 4, 4, -1).transpose(0, 1).reshape(shape))


def kernels_turned(self: Live) -> None:
    for weight in self.named("conv").values():
        weight.copy_(weight.transpose(2, 3).clone())


def gates_reordered(self: Live) -> None:
    """From i f g o to i f o g, as other libraries have it; the moments stay."""
    for weight in self.named("lstm").values():
        i, f, g, o = weight.clone().chunk(4)
        weight.copy_(torch.cat([i, f, o, g]))


def local_experts(self: Live) -> None:
    """Every expert-parallel rank loaded the first rank's experts."""
    named = dict(self.module.named_parameters())
    for name, weight in named.items():
        for mine, theirs in ((2, 0), (3, 1)):
            if f".experts.{mine}." in name:
                weight.copy_(named[name.replace(f".experts.{mine}.", f".experts.{theirs}.")])


def shared_group(self: Live) -> None:
    """With more ranks than key heads, each rank took the first key head."""
    for name, weight in self.module.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            half = len(weight) // 2
            weight[half:] = weight[:half].clone()


def flat_shifted(self: Live) -> None:
    """The flat moments of each layer are cut two elements late, as without the padding of the save."""
    for n in range(2):
        weights = list(self.named(f".layers.{n}.").values())
        for key in ("exp_avg", "exp_avg_sq"):
            parts = [self.held(w)[key] for w in weights]
            flat = torch.cat([one.flatten() for one in parts]).roll(-2)
            for one, piece in zip(parts, flat.split([one.numel() for one in parts]), strict=True):
                one.copy_(piece.view(one.shape))


def second_reversed(self: Live) -> None:
    """The flat exp_avg_sq was filled from the last parameter to the first, the rest from the first."""
    weights = list(self.named().values())
    parts = [self.held(w)["exp_avg_sq"] for w in weights]
    flat = torch.cat([one.flatten().clone() for one in parts[::-1]])
    for one, piece in zip(parts, flat.split([one.numel() for one in parts]), strict=True):
        one.copy_(piece.view(one.shape))


def moments_of_layers(self: Live) -> None:
    """Virtual stages: the optimizer's layers 1 and 2 are exchanged, the weights are not."""
    named = dict(self.module.named_parameters())
    for name in [name for name in named if ".layers.1." in name]:
        one, two = self.held(named[name]), self.held(named[name.replace(".layers.1.", ".layers.2.")])
        for key in ("exp_avg", "exp_avg_sq"):
            kept = one[key].clone()
            one[key].copy_(two[key])
            two[key].copy_(kept)


def block_misread(self: Live) -> None:
    """A read of 4 KiB returned the 4 KiB before."""
    weight = max(self.named("mlp").values(), key=lambda w: w.numel()).view(-1)
    size = min(256, len(weight) // 4)
    weight[2 * size : 3 * size] = weight[size : 2 * size].clone()


# ---- faults: the optimizer's state -----------------------------------------------------------------------------------


def reordered(self: Live, content: dict[str, Any]) -> None:
    """A refactored attention registers o before q; the state goes by number."""
    groups = self.groups()
    named = {id(w): name for name, w in self.module.named_parameters()}
    other = dict(self.module.named_parameters())
    for group in groups:
        for at, weight in enumerate(group["params"]):
            name = named[id(weight)]
            if "q_proj" in name or "o_proj" in name:
                twin = name.replace("q_proj", "?").replace("o_proj", "q_proj").replace("?", "o_proj")
                group["params"][at] = other[twin]
    self.optimizers = [self.optimizer(groups)]
    self.schedules = [self.schedule(self.optimizers[0])]
    Loop.load(self, content)


class Halves(TORCH.Optimizer):
    """AdamW with fp32 moments beside bf16 weights; torch's load casts them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    zeros = torch.zeros(weight.shape)
                    state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
                state["step"] += 1
                g, t = weight.grad.float(), float(state["step"])
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.copy_(m.float().lerp(g, 1 - first))
                v.copy_(v.float() * second + g * g * (1 - second))
                under = (v.float() / (1 - second**t)).sqrt() + group["eps"]
                new = weight.float() * (1 - group["lr"] * group["weight_decay"])
                weight.copy_(new - group["lr"] / (1 - first**t) * m.float() / under)


def table_rounded(self: Live) -> None:
    """``half()`` over the state reached the quantisation tables and the blocks' magnitudes."""
    for state in self.states():
        for key in [key for key in state if key.startswith(("qmap", "absmax"))]:
            state[key] = state[key].half().float()


def magnitudes_lost(self: Live) -> None:
    for state in self.states():
        if "absmax2" in state:
            state["absmax2"].zero_()


def factors_exchanged(self: Live) -> None:
    """Rows' and columns' factors of square matrices are exchanged, as for weights stored transposed."""
    for state in self.states():
        if "row_var" in state and state["row_var"].numel() == state["col_var"].numel():
            row, column = state["row_var"].clone(), state["col_var"].clone()
            state["row_var"].copy_(column.view_as(row))
            state["col_var"].copy_(row.view_as(column))


class Soap(packaged.Optimizer):
    """Adam in the eigenbasis of the gradients' covariance, which is found again every ten updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.95, 0.95), shampoo_beta=0.95, eps=1e-8, weight_decay=0.01,
                         precondition_frequency=10, max_precond_dim=10000, merge_dims=False, normalize_grads=False,
                         correct_bias=True)  # fmt: skip

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        found = super().begin(weight, group)
        if weight.ndim == 2 and len(weight) <= 64:
            found |= {"GG": torch.zeros(len(weight), len(weight)), "Q": torch.eye(len(weight))}
        return found

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = state["step"]
        basis = state.get("Q")
        if basis is not None:
            state["GG"].lerp_(gradient @ gradient.T, 1 - group["shampoo_beta"])
            if t % group["precondition_frequency"] == 1:
                state["Q"] = torch.linalg.eigh(state["GG"] + 1e-30 * torch.eye(len(weight)))[1].flip(1)
                basis = state["Q"]
        turned = gradient if basis is None else basis.T @ gradient
        state["exp_avg"].lerp_(turned, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(turned, turned, value=1 - second)
        step = state["exp_avg"] / (1 - first**t) / ((state["exp_avg_sq"] / (1 - second**t)).sqrt() + group["eps"])
        step = step if basis is None else basis @ step
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=group["lr"])


def basis_lost(self: Live) -> None:
    for state in self.states():
        if "Q" in state:
            state["Q"].copy_(torch.eye(len(state["Q"])))
            state["GG"].zero_()


def second_optimizer_forgotten(self: Live, content: dict[str, Any]) -> None:
    """Only the first of the two optimizers is restored."""
    kept = self.optimizers[1].state_dict()
    Loop.load(self, content)
    self.optimizers[1].load_state_dict(kept)


def optimizers_exchanged(self: Live, content: dict[str, Any]) -> None:
    content["optimizers"] = content["optimizers"][::-1]
    Loop.load(self, content)


def max_from_running(self: Live) -> None:
    for state in self.states():
        state["max_exp_avg_sq"].copy_(state["exp_avg_sq"] * 0.5)


def momentum_dropped(self: Live) -> None:
    for state in self.states():
        state["momentum_buffer"] = None


def sums_anew(self: Live) -> None:
    for state in self.states():
        state["sum"].fill_(0.0)


def z_from_weights(self: Live) -> None:
    for weight, state in self.optimizers[0].state.items():
        state["z"].copy_(weight)


def estimate_anew(self: Live) -> None:
    """Arguments of the launch were written over the groups' fields."""
    for group in self.optimizers[0].param_groups:
        group |= {"d": group["d0"], "d_max": group["d0"], "d_numerator": 0.0}


def product_anew(self: Live) -> None:
    for state in self.states():
        state["mu_product"].fill_(1.0)


def group_step_anew(self: Live) -> None:
    for group in self.optimizers[0].param_groups:
        group["step"] = 0


def counters_summed(self: Live) -> None:
    """Merging two ranks' optimizer files added what both hold, the counter too."""
    for state in self.states():
        state["step"] *= 2


def second_quartered(self: Live) -> None:
    """Four replicas of the second moments were averaged where three of them were empty."""
    for state in self.states():
        state["exp_avg_sq"].mul_(0.25)


def optimizer_older(self: Live, content: dict[str, Any]) -> None:
    """The weights are the last ones, optimizer.pt is of the save five updates earlier."""
    Loop.load(self, content)
    old = type(self)(self.config)
    old.run(content["step"] - 5)
    self.optimizers[0].load_state_dict(copy.deepcopy(old.optimizers[0].state_dict()))


def decays_biases(self: Live) -> None:
    """The new rule lets the biases of the attention decay too."""
    matrices, vectors = self.optimizers[0].param_groups
    moved = [w for n, w in self.module.named_parameters() if "self_attn" in n and n.endswith("bias")]
    for weight in moved:
        vectors["params"] = [one for one in vectors["params"] if one is not weight]
    matrices["params"] = matrices["params"] + moved


def coupled(self: Live) -> None:
    """Adam where AdamW was: the decay goes into the gradient."""
    for group in self.optimizers[0].param_groups:
        group["decoupled_weight_decay"] = False


# ---- faults: schedules -----------------------------------------------------------------------------------------------


class Keeps:
    """A schedule of one's own that keeps the groups it was made with."""

    def __init__(self, optimizer: Any, config: Any) -> None:
        self.groups, self.config, self.last_epoch = optimizer.param_groups, config, -1
        self.step()

    def step(self) -> None:
        self.last_epoch += 1
        for group in self.groups:
            group["lr"] = self.config.lr_at(self.last_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_last_lr": [self.config.lr_at(self.last_epoch + 1)] * len(self.groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]


def keeps(self: Loop, optimizer: Any) -> Any:
    return Keeps(optimizer, self.config)


def synced(self: Live) -> None:
    """The schedule is stepped once at the load, to set the optimizer's rate."""
    with torch.enable_grad():
        for schedule in self.schedules:
            schedule.step()


def per_process(self: Live) -> None:
    Loop.apply(self)
    for schedule in self.schedules if self.resumed else ():
        for _ in range(3):
            schedule.step()


def per_epoch(self: Live) -> None:
    if self.resumed:
        for optimizer in self.optimizers:
            optimizer.step()
    else:
        Loop.apply(self)


class Plateau(Live):
    """Falls when the loss does not; the number that it watches is the step's own wave."""

    def schedule(self, optimizer: Any) -> Any:
        return TORCH.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=4)

    def apply(self) -> None:
        self.optimizers[0].step()
        self.schedules[0].step(3.0 - 0.01 * min(self.step, 14) + 0.02 * math.sin(self.step))


def warm_restarts(self: Loop, optimizer: Any) -> Any:
    return TORCH.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=9, T_mult=2, eta_min=1e-5)


def position_lost(self: Live) -> None:
    self.schedules[0].T_cur, self.schedules[0].T_i = 0, 9


def one_cycle(self: Loop, optimizer: Any) -> Any:
    return TORCH.lr_scheduler.OneCycleLR(optimizer, self.config.lr, total_steps=self.config.total)


def longer_cycle(self: Live) -> None:
    """The new epochs times batches: three times as many."""
    for schedule in self.schedules:
        old = schedule.total_steps
        schedule.total_steps = 3 * old
        for phase in schedule._schedule_phases:
            phase["end_step"] = (phase["end_step"] + 1) * 3 - 1


def warm_then_cosine(self: Loop, optimizer: Any) -> Any:
    made = TORCH.lr_scheduler
    warm = made.LinearLR(optimizer, start_factor=0.1, total_iters=self.config.warmup)
    fall = made.CosineAnnealingLR(optimizer, T_max=self.config.total)
    return made.SequentialLR(optimizer, [warm, fall], milestones=[self.config.warmup])


def outer_lost(self: Live) -> None:
    """Inner schedules are restored, the outer count is not: it warms up once more."""
    for schedule in self.schedules:
        schedule.last_epoch = 0


def compounded(self: Live, content: dict[str, Any]) -> None:
    """The schedule is made after the load, on the decayed rate as its base, at the right place."""
    Loop.load(self, content)
    c, done = self.config, content["step"]
    for group in self.optimizers[0].param_groups:
        group["initial_lr"] = group["lr"]
    self.schedules = [
        TORCH.lr_scheduler.LambdaLR(self.optimizers[0], lambda n: c.lr_at(n + 1) / c.lr, last_epoch=done - 1)
    ]


def one_rate(self: Live) -> None:
    """``for group in param_groups: group["lr"] = lr`` after the load."""
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.optimizers[0].param_groups[-1]["lr"]


def one_base(self: Live) -> None:
    for schedule in self.schedules:
        schedule.base_lrs = [self.config.lr] * len(schedule.base_lrs)


def beyond_the_end(self: Loop, optimizer: Any) -> Any:
    """The resumed schedule counts epochs as steps: its end is behind it, and its factor is 0."""
    c = self.config
    return TORCH.lr_scheduler.LambdaLR(
        optimizer, lambda done: 0.0 if getattr(self, "resumed", False) else c.lr_at(done + 1) / c.lr
    )


def twice_as_far(self: Live) -> None:
    """Half as many processes: the count of steps was scaled by it."""
    for schedule in self.schedules:
        schedule.last_epoch *= 2
        schedule._last_lr = [self.config.lr_at(schedule.last_epoch + 1)] * len(schedule.base_lrs)
        for group, lr in zip(self.optimizers[0].param_groups, schedule._last_lr, strict=True):
            group["lr"] = lr


# ---- faults: counters, data, random states ---------------------------------------------------------------------------


class Ranks(Live):
    """Stores a generator state of each of four ranks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["rng_states"] = [self.of(rank) for rank in range(4)]

    def of(self, rank: int) -> dict[str, Any]:
        return {"torch": torch.Generator().manual_seed(100 + rank).get_state(), "python": (3, rank * 7 + 1, None)}

    def apply(self) -> None:
        super().apply()
        for one in self.extra["rng_states"]:
            generator = torch.Generator()
            generator.set_state(one["torch"])
            torch.rand(3, generator=generator)
            one["torch"] = generator.get_state()


def first_rank_everywhere(self: Live) -> None:
    self.extra["rng_states"] = [copy.deepcopy(self.extra["rng_states"][0]) for _ in range(4)]


def epoch_lost(self: Live) -> None:
    self.extra["dataloader"]["epoch"] = 0


def stuck_loader(self: Looped) -> None:
    """``next(iter(loader))`` in the loop: the first batch, again and again."""
    kept = dict(self.extra["dataloader"])
    Looped.apply(self)
    if self.resumed:
        self.extra["dataloader"] = kept


class Consumed(Live):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["consumed_train_samples"] = 0

    def apply(self) -> None:
        super().apply()
        self.extra["consumed_train_samples"] += self.config.batch


def consumed_again(self: Live) -> None:
    """The step times the new batch size."""
    self.extra["consumed_train_samples"] *= 4


class Curriculum(Live):
    """Sequences grow."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["curriculum"] = {"current_difficulty": 6, "steps": 0, "max_difficulty": 17}

    def tokens(self) -> Tensor:
        return super().tokens()[:, : self.extra["curriculum"]["current_difficulty"]]

    def apply(self) -> None:
        super().apply()
        told = self.extra["curriculum"]
        told["steps"] += 1
        told["current_difficulty"] = min(17, 6 + told["steps"] // 3)


def easy_again(self: Live) -> None:
    self.extra["curriculum"] |= {"current_difficulty": 6, "steps": 0}


class Rewarded(Live):
    """A running mean and variance of rewards, which scale the loss."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["reward_normalizer"] = {"mean": torch.zeros(1), "var": torch.ones(1), "count": torch.zeros(1)}

    def loss(self, tokens: Tensor) -> Tensor:
        loss = self.module(tokens)[0]
        told = self.extra["reward_normalizer"]
        told["count"] += 1
        told["mean"] += (loss.detach() * 2 - told["mean"]) / told["count"]
        told["var"] = told["var"] * 0.95 + 0.05 * (loss.detach() * 2 - told["mean"]) ** 2
        return loss / (told["var"].sqrt() + 0.1)


def normaliser_anew(self: Live) -> None:
    self.extra["reward_normalizer"] = {"mean": torch.zeros(1), "var": torch.ones(1), "count": torch.zeros(1)}


class Async(Live):
    """An asynchronous save that shares the weights' memory: they are of the update before."""

    def update(self) -> None:
        self.before_ = {name: w.detach().clone() for name, w in self.module.state_dict().items()}
        super().update()
        self.moved = self.resumed

    def weights(self) -> dict[str, Any]:
        return self.before_ if getattr(self, "moved", False) else super().weights()


class Cached(Live):
    """The resumed run's later save writes the tensors staged at its first save, with the new step."""

    kept: dict[str, Any] | None = None

    def content(self) -> dict[str, Any]:
        found = super().content()
        if self.resumed:
            if self.kept is None:
                self.kept = copy.deepcopy(found)
            return {**self.kept, "step": found["step"]}
        return found


def counts_micro(self: Live) -> None:
    Loop.update(self)
    if self.resumed:
        self.step += 3


def twice(self: Live) -> None:
    """The engine's step and the loop's own: each update is made two times."""
    Loop.apply(self)
    if self.resumed:
        for optimizer in self.optimizers:
            optimizer.step()


# ---- faults: gradients and scales ------------------------------------------------------------------------------------


def summed(self: Live) -> None:
    """The loss is no longer divided by its sixteen parts."""
    if self.resumed:
        for weight in self.module.parameters():
            weight.grad.mul_(16)


def scaled(self: Live) -> None:
    """The loss scale is never taken out of the gradients."""
    if self.resumed:
        for weight in self.module.parameters():
            weight.grad.mul_(self.extra["scaler"]["scale"])


class Scaled(Live, Sheltered):
    pass


class Overflowing(Scaled):
    """After the load every update overflows; each is skipped and the scale halves."""

    def apply(self) -> None:
        if self.resumed:
            told = self.extra["scaler"]
            told |= {"scale": told["scale"] * 0.5, "_growth_tracker": 0}
            for schedule in self.schedules:
                schedule.step()
            return
        super().apply()


def infinite_norm(self: Live) -> None:
    """One infinite gradient makes the clipping's factor 0 and the product NaN."""
    if self.resumed and self.step % 2 == self.odd:
        next(self.module.parameters()).grad[0, 0] = math.inf
    torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)


def odd_of(self: Live) -> None:
    self.odd = self.step % 2


def no_gradient(self: Live) -> None:
    """Reentrant checkpointing without an input that needs a gradient: the first block gets none."""
    Loop.gradients(self)
    if self.resumed:
        for weight in self.named(".layers.0.").values():
            weight.grad = None


def wild_row(self: Live) -> None:
    """A defective device: one row of one gradient is wrong in the first update."""
    if self.resumed and self.first:
        next(iter(self.named(".layers.0.", "up_proj").values())).grad[1].mul_(3e4).add_(50.0)
        self.first = False


def first_of(self: Live) -> None:
    self.first = True


def bad_batch(self: Live) -> None:
    """A document of junk in the fifth update after the load."""
    if self.resumed:
        self.count = getattr(self, "count", 0) + 1
        if self.count == 5:
            for weight in self.module.parameters():
                weight.grad.mul_(300)


def never_zeroed(self: Live) -> None:
    if not self.resumed:
        return Loop.update(self)
    for part in self.tokens().chunk(self.parts):
        self.loss(part).backward()
    self.gradients()
    self.apply()
    self.step += 1
    return None


# ---- faults: precision, averages, mixed saves ------------------------------------------------------------------------


def through_half(self: Live) -> None:
    for weight in self.module.parameters():
        weight.copy_(weight.half().float())


class Scan(nn.Module):
    """A selective scan with A_log, D and dt_bias, which are to stay fp32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, 16)
        self.in_proj = nn.Linear(16, 32, bias=False)
        self.conv1d = nn.Conv1d(16, 16, 3, groups=16, padding=2)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, 17).float()))
        self.D = nn.Parameter(torch.ones(16))
        self.dt_bias = nn.Parameter(torch.randn(16) * 0.1)
        self.out_proj = nn.Linear(16, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, gate = self.in_proj(self.embed(tokens[:, :-1]) * 4).chunk(2, -1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step = F.softplus(x + self.dt_bias)
        state, out = torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = state * torch.exp(-step[:, at] * self.A_log.exp()) + step[:, at] * x[:, at]
            out.append(state + self.D * x[:, at])
        logits = self.out_proj(torch.stack(out, 1) * F.silu(gate))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Mamba(Direct):
    kind = Scan


def kept_in_half(self: Live) -> None:
    """``model.to(bfloat16)`` and back reached the parameters that are to stay fp32."""
    for name in ("A_log", "D", "dt_bias"):
        weight = getattr(self.module, name)
        weight.copy_(weight.bfloat16().float())


def average_from_weights(self: Live) -> None:
    """The average is made from the model when the trainer is made, and its file is never read."""
    self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}
    self.extra["ema_updates"] = 0


def average_detached(self: Averaged) -> None:
    """The average follows the module before it was wrapped: it moves no more."""
    if not self.resumed:
        Averaged.average(self)


def average_in_half(self: Live) -> None:
    self.extra["ema"] = {name: w.bfloat16() for name, w in self.extra["ema"].items()}


def average_of_saves(self: Live, content: dict[str, Any]) -> None:
    """The mean of the last saves was exported under the name of the last one."""
    old = type(self)(self.config)
    old.run(content["step"] - 6)
    found = {name: w.clone() for name, w in old.weights().items()}
    for _ in range(2):
        old.run(3)
        for name, weight in old.weights().items():
            found[name] += weight
    content["model"] = {name: w / 3 for name, w in found.items()}
    Loop.load(self, content)


def embedding_older(self: Live, content: dict[str, Any]) -> None:
    """The embedding is kept on a host of its own, whose save is six updates older."""
    old = type(self)(self.config)
    old.run(content["step"] - 6)
    Loop.load(self, content)
    with torch.no_grad():
        self.module.model.embed_tokens.weight.copy_(old.module.model.embed_tokens.weight)


# ---- healthy, and odd ------------------------------------------------------------------------------------------------


class Karras(Averaged):
    """The average's decay grows as a power of the count; it is made every fifth update."""

    every = 5

    def rate(self) -> float:
        return (1 - 1 / (self.extra["ema_updates"] + 1)) ** 7.94


class Lookahead(Live):
    """Every fifth update the weights go half of the way back to slow ones, which are stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["slow_weights"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        if self.step % 5 == 4:
            with torch.no_grad():
                for name, weight in self.module.named_parameters():
                    slow = self.extra["slow_weights"][name]
                    slow.lerp_(weight, 0.5)
                    weight.copy_(slow)


class Outer(Live):
    """DiLoCo: every eighth update an outer Nesterov step from the anchor, with a large rate."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        named = dict(self.module.named_parameters())
        self.extra["anchor"] = {name: w.detach().clone() for name, w in named.items()}
        self.extra["outer_momentum"] = {name: torch.zeros_like(w) for name, w in named.items()}

    def apply(self) -> None:
        super().apply()
        if self.step % 8 == 7:
            with torch.no_grad():
                for name, weight in self.module.named_parameters():
                    anchor, speed = self.extra["anchor"][name], self.extra["outer_momentum"][name]
                    delta = anchor - weight
                    speed.mul_(0.9).add_(delta)
                    anchor.sub_(delta + 0.9 * speed, alpha=0.7)
                    weight.copy_(anchor)


class Spheric(Live):
    """nGPT: after each update, the rows of each matrix are normalised."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for weight in self.module.parameters():
                if weight.ndim == 2:
                    weight.copy_(F.normalize(weight, dim=1))


class Clamped(Gan):
    """WGAN: the discriminator's weights are cut to a box; the generator learns every fifth update."""

    rare = 5

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for weight in self.module.discriminator.parameters():
                weight.clamp_(-0.12, 0.12)


class ReLora(Live):
    """Every twelfth update the optimizer's state is pruned to a hundredth, on purpose."""

    def apply(self) -> None:
        super().apply()
        if self.step % 12 == 11:
            for state in self.states():
                for key in ("exp_avg", "exp_avg_sq"):
                    kept = state[key].abs() >= state[key].abs().flatten().kthvalue(int(0.9 * state[key].numel()))[0]
                    state[key].mul_(kept)


class Sparse(Direct):
    """An embedding with sparse gradients beside the rest: rows that do not occur are not touched."""

    layouts = ONE
    clip = 0.0

    class kind(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.table = nn.Embedding(config.vocab, 16, sparse=True)
            self.head = nn.Linear(16, config.vocab)

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(torch.tanh(self.table(tokens[:1, :4])))
            return F.cross_entropy(logits.flatten(0, 1), tokens[:1, 1:5].flatten())

    def made(self) -> list[torch.optim.Optimizer]:
        lr = self.config.lr
        return [TORCH.SparseAdam([self.module.table.weight], lr=lr), TORCH.AdamW(self.module.head.parameters(), lr=lr)]


class Dropped(Live):
    """LayerDrop: a layer is left out of some updates, by a draw from the step."""

    def gradients(self) -> None:
        if random.Random(self.step).random() < 0.4:
            for weight in self.named(".layers.1.").values():
                weight.grad = None
        super().gradients()


class Pruned(Live):
    """Half of each matrix is held at zero by a mask that is stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mask()

    def mask(self) -> None:
        with torch.no_grad():
            for name, weight in self.named("proj").items():
                draw = torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name)))
                weight.mul_(draw > 0.5)

    def apply(self) -> None:
        super().apply()
        self.mask()


class Stochastic(Live):
    """bf16 weights without masters, rounded stochastically by the trainer's own generator, which is stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["rounding_rng"] = torch.Generator().manual_seed(77).get_state()

    def net(self) -> nn.Module:
        return Decoder(self.config).to(torch.bfloat16)

    def made(self) -> list[torch.optim.Optimizer]:
        return [Halves([{"params": list(self.module.parameters())}], lr=self.config.lr)]

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        for weight, saved in zip(self.module.parameters(), content["optimizer"]["state"].values(), strict=True):
            self.optimizers[0].state[weight] |= {key: saved[key].clone() for key in ("exp_avg", "exp_avg_sq")}

    def apply(self) -> None:
        draw = torch.Generator()
        draw.set_state(self.extra["rounding_rng"])
        old = [w.detach().float().clone() for w in self.module.parameters()]
        super().apply()
        with torch.no_grad():
            for weight, was in zip(self.module.parameters(), old, strict=True):
                state = self.held(weight)
                step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                new = was - self.config.lr * 0.1 * step
                noise = torch.randint(0, 1 << 16, new.shape, generator=draw, dtype=torch.int32)
                weight.copy_(((new.view(torch.int32) + noise) & -65536).view(torch.float32))
        self.extra["rounding_rng"] = draw.get_state()


class Observed(Vision):
    """Quantisation-aware: observers keep minimum and maximum in buffers, and stop at the twentieth update."""

    class kind(ConvNet):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("observer_min", torch.tensor(math.inf))
            self.register_buffer("observer_max", torch.tensor(-math.inf))
            self.register_buffer("observer_count", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            with torch.no_grad():
                if self.observer_count < 20:
                    self.observer_count += 1
                    self.observer_min.copy_(torch.minimum(self.observer_min, out.min()))
                    self.observer_max.copy_(torch.maximum(self.observer_max, out.max()))
            scale = (self.observer_max - self.observer_min).clamp(min=1e-3) / 255
            return out + ((out / scale).round() * scale - out).detach()


class Target(Direct):
    """A target network that is copied every tenth update."""

    class kind(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.q = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 4))
            self.q_target = copy.deepcopy(self.q)
            for weight in self.q_target.parameters():
                weight.requires_grad_(False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = pixels(tokens).flatten(1)
            with torch.no_grad():
                wanted = torch.cos(tokens[:, 0].float()) + 0.9 * self.q_target(x.roll(1, 0)).amax(1)
            return F.smooth_l1_loss(self.q(x).gather(1, tokens[:, 1:2] % 4)[:, 0], wanted)

    def apply(self) -> None:
        super().apply()
        if self.step % 10 == 9:
            self.module.q_target.load_state_dict(self.module.q.state_dict())


class Ramped(Live):
    """The batch grows: one, two, then four parts."""

    def update(self) -> None:
        self.parts = 1 if self.step < 15 else 2 if self.step < 30 else 4
        super().update()


class Galore(packaged.Optimizer):
    """Adam in a projection to four directions, which is found again every tenth update."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rank=4, update_proj_gap=10,
                         scale=0.25, proj_type="std", correct_bias=True)  # fmt: skip

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if weight.ndim != 2:
            return super().begin(weight, group)
        zeros = torch.zeros(4, weight.shape[1])
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone(), "projector": torch.zeros(len(weight), 4)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if "projector" in state:
            if state["step"] % 10 == 0:
                state["projector"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, :4].contiguous()
            gradient = state["projector"].T @ gradient
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step = state["exp_avg"] / (1 - first**t) / ((state["exp_avg_sq"] / (1 - second**t)).sqrt() + group["eps"])
        if "projector" in state:
            step = 0.25 * state["projector"] @ step
        weight.sub_(step, alpha=group["lr"])


class Sharp(Live):
    """SAM: the gradient is taken at a point further up."""

    def gradients(self) -> None:
        weights = [w for w in self.module.parameters() if w.grad is not None]
        norm = torch.stack([w.grad.norm() for w in weights]).norm()
        ups = [0.05 * w.grad / (norm + 1e-12) for w in weights]
        with torch.no_grad():
            for weight, up in zip(weights, ups, strict=True):
                weight.add_(up)
                weight.grad = None
        self.loss(self.tokens()).backward()
        with torch.no_grad():
            for weight, up in zip(weights, ups, strict=True):
                weight.sub_(up)
        super().gradients()


class Centred(Live):
    """The embedding's mean is taken out after each update, and an unused row is held at zero."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            table = self.module.model.embed_tokens.weight
            table.sub_(table.mean(0))
            table[0].zero_()


class Capped(Clip):
    """The temperature is held at its bound."""

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            self.module.logit_scale.clamp_(max=math.log(1 / 0.07))


class Swa(Averaged):
    """Stochastic weight averaging: begins late, each average counts the same; as `AveragedModel` names it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["n_averaged"] = torch.tensor(0)

    def average(self) -> None:
        if self.step >= 12 and self.step % 4 == 0:
            with torch.no_grad():
                count = int(self.extra["n_averaged"])
                for name, weight in self.module.named_parameters():
                    self.extra["ema"][name].lerp_(weight, 1 / (count + 1))
                self.extra["n_averaged"] = torch.tensor(count + 1)


class Elsewhere(Live):
    """Resumed by another program, which saves in another layout."""

    def save(self, folder: Path, layout: str) -> None:
        super().save(folder, "dcp" if self.resumed else layout)


def short_end(self: Loop, optimizer: Any) -> Any:
    """Linear to zero at the fortieth update, and zero from then on."""
    return TORCH.lr_scheduler.LambdaLR(optimizer, lambda done: max(0.0, 1 - done / 40))


def stable_then_fall(self: Loop, optimizer: Any) -> Any:
    return TORCH.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0 if done < 25 else max(0.0, 1 - (done - 25) / 60))


def stairs(self: Loop, optimizer: Any) -> Any:
    return TORCH.lr_scheduler.MultiStepLR(optimizer, [15, 30, 45, 60, 75], gamma=0.3)


def zero_rate_group(self: Loop) -> Groups:
    """The embedding is in a group with the rate 0, which is how some freeze it."""
    named = dict(self.module.named_parameters())
    lr = self.config.lr
    return [
        {"params": [w for n, w in named.items() if "embed" in n], "lr": 0.0, "weight_decay": 0.1},
        {"params": [w for n, w in named.items() if "embed" not in n], "lr": lr, "weight_decay": 0.1},
    ]


class Lars(packaged.Optimizer):
    """Momentum with a rate of each layer, of no package."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.02)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"mu": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step = gradient + group["weight_decay"] * weight
        if weight.ndim > 1:
            step = step * (group["trust_coefficient"] * weight.norm() / (step.norm() + 1e-9)) * 50
        state["mu"].mul_(group["momentum"]).add_(step)
        weight.sub_(state["mu"], alpha=group["lr"])


# ---- on purpose ------------------------------------------------------------------------------------------------------


class Argued(Live):
    """Stores its arguments, as launchers do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["args"] = {
            "lr": config.lr,
            "global_batch_size": config.batch,
            "world_size": 8,
            "data_path": "corpus-a",
            "train_iters": config.total,
            "dropout": 0.0,
        }


def other_args(action: Any = None, **changes: Any) -> Any:
    def loaded(self: Live) -> None:
        self.resumed = True
        self.extra["args"] = self.extra["args"] | changes
        if action is not None:
            action(self)

    return loaded


def halved_lr(self: Live) -> None:
    for schedule in self.schedules:
        schedule.base_lrs = [lr / 2 for lr in schedule.base_lrs]
    for group in self.optimizers[0].param_groups:
        group["lr"] /= 2
        group["initial_lr"] /= 2
    self.extra["args"]["lr"] /= 2


def larger_batch(self: Live) -> Tensor:
    tokens = batch(self.config, self.step, 1234)
    return torch.cat([tokens, batch(self.config, self.step, 4321)]) if self.resumed else tokens


def new_corpus(self: Live) -> Tensor:
    return batch(self.config, self.step, 999 if self.resumed else 1234)


def fewer_ranks(self: Live) -> None:
    self.extra["rng_states"] = self.extra["rng_states"][:2]


def freeze_layer(self: Live) -> None:
    for weight in self.named(".layers.0.").values():
        weight.requires_grad_(False)


def weaker_decay(self: Live) -> None:
    for group in self.optimizers[0].param_groups:
        group["weight_decay"] *= 0.1


class Relion(Live):
    """The optimizer is another one from the resume on."""

    layouts = FILES
    fresh = ("optimizer", "scheduler")

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.optimizers = [packaged.Lion(self.groups(), lr=self.config.lr * 0.2)]
        self.schedules = [self.schedule(self.optimizers[0])]


class Classified(Recurrent):
    """The head is another one, for another task, and its state anew."""

    layouts = ONE
    fresh = ("optimizer",)

    def take(self, weights: dict[str, Any]) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.module.head = nn.Linear(24, 7)
        kept = {name: w for name, w in weights.items() if not name.startswith("head")}
        self.module.load_state_dict(kept, strict=False)
        self.resumed = True
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]

    def loss(self, tokens: Tensor) -> Tensor:
        if not self.resumed:
            return self.module(tokens)
        out = self.module.head(self.module.lstm(self.module.embed(tokens[:, :-1]))[0][:, -1])
        return F.cross_entropy(out, tokens[:, -1] % 7)


class NewlyAveraged(Live):
    """From the resume on an average is kept."""

    layouts = FILES

    def loaded(self) -> None:
        self.resumed = True
        self.extra["ema"] = {name: w.detach().clone() for name, w in self.module.named_parameters()}

    def apply(self) -> None:
        super().apply()
        with torch.no_grad():
            for name, weight in self.module.named_parameters() if self.resumed else ():
                self.extra["ema"][name].lerp_(weight, 0.01)


# ---- transformers' Trainer -------------------------------------------------------------------------------------------


def of_trainer(id: str, cause: str, text: str, where: str, also: tuple[str, ...], why: str, **more: Any) -> Fault:
    build = more.pop("build", None) or partial(made, more.pop("model", "Llama"))
    live = partial(trained, build, **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


def without_schedule(folder: Path) -> None:
    (folder / "scheduler.pt").unlink()


def numbers_by_name(folder: Path) -> None:
    """optimizer.pt was converted with the parameters' names sorted: q and o changed places in each layer."""
    told = torch.load(folder / "optimizer.pt", weights_only=False)
    shapes = {n: tuple(s["exp_avg"].shape) for n, s in told["state"].items()}
    square = [n for n, shape in shapes.items() if shape == (32, 32)]
    for one, two in zip(square[::2], square[1::2], strict=False):
        told["state"][one], told["state"][two] = told["state"][two], told["state"][one]
    torch.save(told, folder / "optimizer.pt")


def exported_weights(folder: Path) -> None:
    """The weights are those of an export in bf16."""
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    save_file({n: w.bfloat16() for n, w in held.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def step_back(folder: Path) -> None:
    """trainer_state.json is of five steps before."""
    path = folder / "trainer_state.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"global_step": told["global_step"] - 5}))


def t5(seed: int) -> Any:
    import transformers as hf

    torch.manual_seed(seed)
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.1,
                    decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
    )  # fmt: skip


def neox(seed: int) -> Any:
    import transformers as hf

    torch.manual_seed(seed)
    return hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=64, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def tied_qwen(seed: int) -> Any:
    import transformers as hf

    torch.manual_seed(seed)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZE, tie_word_embeddings=True))


def well(id: str, text: str, build: Any, why: str = "nothing is wrong", **more: Any) -> Fault:
    live = partial(trained, build, **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy", why=why)


# ---- states of the lab's other layouts -------------------------------------------------------------------------------


def truncated(state: Any, lab: Any) -> Any:
    for name, master in state.masters.items():
        state.params[name] = (master.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    return state


def masters_of_half(state: Any, lab: Any) -> Any:
    for name, master in state.masters.items():
        state.masters[name] = master.half().float()
    return state


def counter_doubled(state: Any, lab: Any) -> Any:
    state.step = {name: 2 * step for name, step in state.step.items()}
    return state


def scale_kept_history_lost(state: Any, lab: Any) -> Any:
    for name, buffer in state.buffers.items():
        if name.endswith("amax_history"):
            buffer.zero_()
    return state


def without_moments(state: Any, lab: Any) -> Any:
    state = state.clone()
    for moments in (state.exp_avg, state.exp_avg_sq):
        for moment in moments.values():
            moment.zero_()
    return state


def older_norms(state: Any, lab: Any) -> Any:
    state, old = state.clone(), lab.run.recent
    for name in state.params:
        if is_norm(name):
            state.params[name] = old.params[name]
            if name in state.masters:
                state.masters[name] = old.masters[name]
    return state


def quantised(config: Any) -> Any:
    return config.but(fp8=True)


# ---- the cases -------------------------------------------------------------------------------------------------------

_FAULTS = [
    # names and weights
    fault("zz01_blocks_compiled", "A1", "blocks compiled one by one: nothing is loaded into them", "echo next early",
          base=Live, also=("A2",), loaded=after(regional_compile),
          why="the weights of the layers were not loaded (names differ); embedding and norm were"),
    fault("zz02_materialised_empty", "A2", "a parameter on meta is never filled and stays zero", "echo next early",
          base=Live, also=("G5",), loaded=after(zeroed), why="layer 1's down_proj is all zeros / was not loaded"),
    fault("zz03_norms_less_one", "A3", "norms by the convention 1 + w, of the other by w", "echo next early",
          base=Live, also=("A2", "H2", "E1"), loaded=after(norms_less_one),
          why="only the norm weights came back wrong, each less by 1"),
    fault("zz04_temperature_lost", "A2", "a scalar parameter is left out of the load", "echo", base=Clip,
          needs={"batch": 8}, loaded=after(scale_lost), why="logit_scale was not loaded, it is at its initial value"),
    fault("zz05_discriminator_fresh", "A2", "the generator is loaded, the discriminator is not", "echo next early",
          base=Gan, also=("A1",), loaded=after(discriminator_fresh), why="the discriminator's weights were not loaded"),
    fault("zz06_weight_norm_magnitude", "A2", "magnitudes of weight norm made anew from the direction", "echo next",
          base=WeightNorm, also=("E12", "F4"), loaded=after(magnitudes_recomputed),
          why="original0 (g) alone differs: it was not loaded or was recomputed"),
    fault("zz07_head_of_base", "A2", "modules_to_save not loaded: the head is the base's", "echo next",
          base=Adapters, also=("F5", "F6"), loaded=after(head_of_base),
          why="the trained head was not loaded, adapters were"),
    fault("zz08_base_in_4_bit", "F6", "the frozen base went through 4 bit", "echo next early", base=Adapters,
          also=("D7",), loaded=after(nf4_base),
          why="frozen base weights changed (rounded to few values / another base), adapters are right"),
    fault("zz09_adapters_exchanged", "F5", "policy's and reference's adapters exchanged", "echo next early",
          base=Preference, also=("A2", "E1", "E9"), loaded=after(adapters_exchanged),
          why="the two adapters changed places"),
    fault("zz10_rows_again", "F7", "the last eight rows of the tables are initialised again", "echo next",
          base=Live, also=("A2", "E11"), needs={"tied": False}, loaded=after(rows_again),
          why="the last eight used rows of embedding and head were re-initialised"),
    fault("zz11_table_copied", "F2", "the shared table is copied, the copy is not trained", "next early",
          base=TwoTables, layouts=ONE, loaded=after(copied_table),
          why="embedding and head are two tensors now, and only one moves"),
    # buffers
    fault("zz12_bias_transient", "A5", "the router's bias is no longer saved", "echo next early", base=Balanced,
          needs={"experts": 4}, layouts=FILES, loaded=after(bias_transient),
          why="expert_bias is missing in the later save"),
    fault("zz13_statistics_frozen", "A5", "eval mode after a validation: running statistics stand still", "next early",
          base=Vision, also=("H1", "H2"), loaded=after(statistics_frozen),
          why="running_mean, running_var and num_batches_tracked no longer change"),
    fault("zz14_count_lost", "A5", "num_batches_tracked of cumulative statistics lost", "echo next early",
          base=CumulativeNorm, loaded=after(count_lost), why="num_batches_tracked was reset, means were kept"),
    fault("zz15_spectral_vectors", "A5", "spectral norm's vectors are new", "echo", base=Spectral,
          loaded=after(vectors_new), why="_u and _v buffers were not restored"),
    fault("zz16_codebook_sums", "A5", "the codebook's sums are lost, its codes and counts kept", "echo next early",
          base=Quantised, loaded=after(sums_lost), why="embed_avg is zero / not restored"),
    fault("zz17_queue_pointer", "A5", "the queue is restored, its pointer is not", "echo next", base=Momentum,
          loaded=after(pointer_lost), why="queue_ptr was reset"),
    fault("zz18_target_recopied", "A2", "the momentum encoder is a copy of the online one", "echo next",
          base=Momentum, also=("F4", "A5"), loaded=after(target_recopied),
          why="the target encoder was not loaded; it equals the online encoder"),
    fault("zz19_rewards_anew", "A5", "the running mean and variance of rewards are lost", "echo next early",
          base=Rewarded, also=("H1",), loaded=after(normaliser_anew),
          why="the reward normaliser was reset"),
    # layouts
    fault("zz20_in_proj_heads", "E4", "torch's in_proj read by heads", "echo next early", base=Encoder, also=("E1",),
          loaded=after(contiguous_qkv), why="rows of in_proj are permuted: qkv layout"),
    fault("zz21_kernels_turned", "E1", "convolutions' height and width exchanged", "echo next early", base=Vision,
          loaded=after(kernels_turned), why="convolution weights are transposed in their two last axes"),
    fault("zz22_gates_reordered", "E1", "an LSTM's gates in another library's order", "echo next early", base=Recurrent,
          also=("E3", "E4"), loaded=after(gates_reordered), why="gate blocks of the LSTM weights are permuted"),
    fault("zz23_local_experts", "E10", "all ranks loaded the first rank's experts", "echo next early", base=Live,
          also=("E1", "E9"), needs={"experts": 4}, loaded=after(local_experts),
          why="experts 2 and 3 are copies of 0 and 1"),
    fault("zz24_shared_group", "E6", "both key groups hold the first one's rows", "echo next early", base=Live,
          also=("E1", "E4"), needs={"heads": 4, "groups": 2, "hidden": 32, "ffn": 64}, loaded=after(shared_group),
          why="the second half of k and v is a copy of the first"),
    fault("zz25_flat_shifted", "E7", "flat moments are cut two elements late", "echo next", base=Live, also=("E13",),
          loaded=after(flat_shifted), why="moments are shifted against the parameters, weights are right"),
    fault("zz26_second_reversed", "E13", "exp_avg_sq filled in the reverse order of parameters", "echo next early",
          base=Live, also=("B5", "B6", "E7"), loaded=after(second_reversed),
          why="exp_avg_sq alone is assigned to other parameters"),
    fault("zz27_moments_of_layers", "B5", "the optimizer's layers 1 and 2 exchanged", "echo next", base=Live,
          also=("E13", "E9"), needs={"layers": 4}, loaded=after(moments_of_layers),
          why="moments of layers 1 and 2 changed places, the weights did not"),
    fault("zz28_block_misread", "G10", "a block of a file was read twice", "echo next early", base=Live,
          also=("G1", "G2", "G5", "E1"), loaded=after(block_misread),
          why="a run of elements in one tensor is wrong (a copy of its neighbours); all else is right"),
    # the optimizer's state
    fault("zz29_registered_otherwise", "B5", "o is registered before q; the state goes by number", "echo next",
          base=Live, also=("E13",), layouts=("dcp",), load=reordered, why="q's and o's moments are exchanged"),
    fault("zz30_moments_cast", "D4", "torch casts fp32 moments to the bf16 weights' type", "echo next early", base=Live,
          layouts=FILES, net=lambda self: Decoder(self.config).to(torch.bfloat16),
          optimizer=lambda self, groups: Halves([{"params": g["params"]} for g in groups], lr=self.config.lr),
          why="the moments became bf16"),
    fault("zz31_tables_in_half", "B11", "8 bit: tables and magnitudes rounded to fp16", "echo next early", base=Live,
          also=("D4",),
          optimizer=plain(packaged.AdamW8bit), layouts=FILES, loaded=after(table_rounded),
          why="qmap and absmax of the 8-bit state were rounded; codes are right"),
    fault("zz32_magnitudes_lost", "B11", "8 bit: absmax of the second moment is zero", "echo next", base=Live,
          also=("B4",), optimizer=plain(packaged.AdamW8bit), layouts=FILES, loaded=after(magnitudes_lost),
          why="absmax2 is zero: the second moments are lost"),
    fault("zz33_factors_exchanged", "B11", "Adafactor's rows and columns exchanged", "echo next", base=Live,
          also=("B6", "B5"), optimizer=optim(TORCH.Adafactor, factor=3.0), loaded=after(factors_exchanged),
          why="row and column factors of square matrices are exchanged"),
    fault("zz34_basis_lost", "B11", "SOAP's basis is the identity again, moments are kept", "echo", base=Live,
          also=("B1", "B3"), optimizer=optim(Soap), layouts=FILES, loaded=after(basis_lost),
          why="Q and GG were not restored, moments were"),
    fault("zz35_second_optimizer", "B1", "of two optimizers only Muon is restored", "echo next early", base=Live,
          made=muon, layouts=ONE, load=second_optimizer_forgotten, why="AdamW's state is missing, Muon's is there"),
    fault("zz36_optimizers_exchanged", "B5", "generator's and discriminator's optimizers exchanged", "echo next early",
          base=Gan, also=("G6",), load=optimizers_exchanged, why="the two optimizers' states changed places"),
    fault("zz37_maximum_lowered", "B11", "AMSGrad's maximum is below what it was", "echo next early", base=Live,
          also=("B4", "B6"), optimizer=optim(TORCH.AdamW, amsgrad=True), loaded=after(max_from_running),
          why="max_exp_avg_sq is wrong: it can only grow"),
    fault("zz38_momentum_none", "B1", "SGD's momentum buffers are None", "echo", base=Live, also=("B3",),
          optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9), layouts=FILES, loaded=after(momentum_dropped),
          why="momentum was not restored"),
    fault("zz39_sums_anew", "B1", "Adagrad's sums begin at 0", "echo next", base=Live, also=("B4", "B3"),
          optimizer=optim(TORCH.Adagrad, factor=4.0), loaded=after(sums_anew),
          why="Adagrad's sums were reset; they can only grow"),
    fault("zz40_z_from_weights", "B11", "schedule-free: z made from the weights", "echo next", base=Live,
          also=("B1", "B6"), optimizer=optim(packaged.ScheduleFreeAdamW), schedule=lambda self, one: None,
          layouts=FILES, loaded=after(z_from_weights), why="z was not restored: it equals the weights"),
    fault("zz41_estimate_anew", "B1", "Prodigy's estimate d starts over", "echo next early", base=Live,
          also=("B8", "B11", "H1", "B2"), layouts=FILES, loaded=after(estimate_anew),
          schedule=lambda self, one: None,
          optimizer=lambda self, groups: packaged.Prodigy(
              [{"params": [w for group in groups for w in group["params"]]}], lr=1.0),
          why="d, d_max and d_numerator of the groups were reset, moments kept"),
    fault("zz42_product_anew", "B2", "NAdam's product of factors is 1 again", "echo next early", base=Live,
          also=("B11",), optimizer=optim(TORCH.NAdam), loaded=after(product_anew),
          why="mu_product was reset, the rest was kept"),
    fault("zz43_group_step_anew", "B2", "StableAdamW's counter in the groups is 0 again", "echo next early", base=Live,
          optimizer=optim(packaged.StableAdamW), layouts=FILES, loaded=after(group_step_anew),
          why="the groups' step was reset"),
    fault("zz44_counters_summed", "C9", "a merge of two ranks added the counters", "echo next early", base=Live,
          also=("B2", "E12"), loaded=after(counters_summed), why="the optimizer counts twice the trainer's steps"),
    fault("zz45_second_quartered", "E12", "the second moments are a quarter", "echo next", base=Live,
          also=("B6", "B4", "B11"), loaded=after(second_quartered),
          why="exp_avg_sq was multiplied by 1/4, all else is right"),
    fault("zz46_optimizer_older", "G6", "the optimizer is of five updates before the weights", "echo next early",
          base=Live, also=("C9", "B6"), load=optimizer_older, why="weights and optimizer come from different saves"),
    fault("zz47_biases_decay", "B7", "attention's biases are in the group that decays", "echo next early", base=Encoder,
          loaded=after(decays_biases), why="parameters moved to another group, so decay applies to other ones"),
    fault("zz48_coupled_decay", "H1", "Adam with decay in the gradient where AdamW was", "echo next early", base=Live,
          also=("B7",), needs={"weight_decay": 0.1}, loaded=after(coupled),
          why="decoupled_weight_decay is off / Adam instead of AdamW"),
    # schedules
    fault("zz49_stale_groups", "B8", "a schedule of one's own holds the groups that the load replaced", "next early",
          base=Live, schedule=keeps, why="the optimizer's lr no longer follows the schedule, it is constant"),
    fault("zz50_stepped_to_sync", "C3", "stepped once at the load", "echo next early", base=Live, loaded=after(synced),
          why="the schedule is one step ahead of the optimizer"),
    fault("zz51_stepped_per_process", "C3", "four steps of the schedule an update", "next early", base=Live,
          apply=per_process, why="the schedule goes four times as fast as the updates"),
    fault("zz52_interval_epoch", "B8", "the schedule is no longer stepped", "next early", base=Live,
          also=("C2", "C3", "C4"), apply=per_epoch, why="the schedule stands still and the lr is constant"),
    fault("zz53_plateau_anew", "C1", "ReduceLROnPlateau begins anew", "echo next early", base=Plateau,
          fresh=("scheduler",), why="the schedule's state (best, bad epochs, count) was not restored"),
    fault("zz54_restart_position", "C1", "warm restarts: position and period of the first cycle", "echo next early",
          base=Live, also=("C2",), schedule=warm_restarts, loaded=after(position_lost),
          why="T_cur and T_i are those of the start, last_epoch is right"),
    fault("zz55_longer_cycle", "C4", "OneCycle of three times the steps", "echo next early", base=Live,
          also=("C2", "H1"), schedule=one_cycle, loaded=after(longer_cycle), why="total_steps of the schedule changed"),
    fault("zz56_outer_count", "C1", "SequentialLR's own count is lost, its parts' are not", "echo next early",
          base=Live,
          also=("C2",), schedule=warm_then_cosine, loaded=after(outer_lost), why="the outer last_epoch was reset"),
    fault("zz57_compounded", "C2", "the schedule is made on the decayed rate", "echo next early", base=Live,
          also=("B8", "C1", "H1"), load=compounded,
          why="base_lrs/initial_lr is the current lr instead of the peak: the factor is applied twice"),
    fault("zz58_one_rate", "B8", "one rate for all groups at the load", "echo next", base=Grouped,
          also=("C2", "H1"), loaded=after(one_rate), why="the groups' lrs became equal; the schedule's are not"),
    fault("zz59_one_base", "C2", "one base rate for all groups in the schedule", "echo next early", base=Grouped,
          also=("B8", "H1", "C1"), loaded=after(one_base), why="base_lrs of the groups became equal"),
    fault("zz60_beyond_the_end", "C2", "the schedule is past its end and gives 0", "next early", base=Live,
          also=("B8", "C4", "H1"), schedule=beyond_the_end, why="the lr is 0 after the resume"),
    fault("zz61_twice_as_far", "C3", "the schedule's count is doubled", "echo next early", base=Live,
          also=("C2", "C4"), loaded=after(twice_as_far), why="the schedule is far ahead of the updates"),
    # counters, data, random states
    fault("zz62_first_rank_everywhere", "C8", "all ranks have rank 0's generators", "echo next early", base=Ranks,
          layouts=ONE, loaded=after(first_rank_everywhere), why="random states are equal on all ranks"),
    fault("zz63_epoch_lost", "C7", "the sampler's epoch is 0, its place in the epoch is kept", "echo next early",
          base=Looped, also=("C6",), loaded=after(epoch_lost), why="the loader's epoch was reset"),
    fault("zz64_stuck_loader", "C6", "the loader gives its first batch again and again", "next early", base=Looped,
          also=("C7",), apply=stuck_loader, why="the loader's position no longer advances"),
    fault("zz65_consumed_again", "C7", "consumed samples are the step times a new batch size", "echo next early",
          base=Consumed, also=("C6", "C10", "C9"), loaded=after(consumed_again), why="consumed samples jumped"),
    fault("zz66_easy_again", "H1", "the curriculum begins anew", "echo next early", base=Curriculum,
          also=("C6", "C7"), loaded=after(easy_again), why="the curriculum's state was reset"),
    fault("zz67_steps_in_parts", "C9", "the trainer counts micro-batches from the resume on", "next early", base=Live,
          also=("C10", "C3"), update=counts_micro, why="the trainer's step runs ahead of the optimizer's count"),
    fault("zz68_stepped_twice", "C9", "each update is made twice", "next early", base=Live, also=("B2", "C3"),
          apply=twice, why="the optimizer counts two updates where the trainer counts one"),
    fault("zz69_async_shared", "G6", "the save has the weights of the update before", "next", base=Async, layouts=FILES,
          also=("G7", "C9"), why="weights did not move while the optimizer did: parts of different moments"),
    fault("zz70_cached_save", "G7", "the save writes what was staged at the first save", "next early", base=Cached,
          also=("C9", "G6"), layouts=FILES, why="the later save repeats the earlier one under a new step"),
    # gradients and scales
    fault("zz71_sixteen_times", "B10", "gradients are summed over sixteen parts", "next early", base=Live, clip=0.0,
          needs={"clip": 0.0}, gradients=summed, why="gradients are far larger than before the resume"),
    fault("zz72_never_unscaled", "B10", "the loss scale stays in the gradients", "next early", base=Scaled,
          also=("D8", "G1"), gradients=scaled, why="gradients are larger by about the loss scale"),
    fault("zz73_overflowing", "C9", "every update is skipped, the scale halves each time", "next early",
          base=Overflowing, also=("D8", "C3"), why="no update was applied since the resume; the loss scale collapses"),
    fault("zz74_infinite_norm", "G1", "an infinite gradient, clipped to NaN", "next early", base=Live,
          also=("H4", "G9"), gradients=infinite_norm, loaded=after(odd_of),
          why="NaN since the resume, not in the load"),
    fault("zz75_reentrant", "H1", "the first block gets no gradient after the resume", "next early", base=Live,
          gradients=no_gradient, why="layer 0 is not trained any more: weights, moments, counts stand"),
    fault("zz76_wild_row", "G9", "one row of one gradient is wild in the first update", "next early", base=Live,
          also=("H3", "B10", "G1", "G3"), gradients=wild_row, loaded=after(first_of),
          why="exp_avg(_sq) of a row of one weight is absurdly large: a wrong gradient"),
    fault("zz77_bad_batch", "H3", "junk in the fifth update", "early", base=Live, also=("H4", "B10", "G9"), clip=0.0,
          faulty=False, gradients=bad_batch, why="gradients were very large for a moment, the load is not at fault"),
    fault("zz78_never_zeroed", "B10", "gradients pile up", "early", base=Live, also=("H4",), clip=0.0,
          faulty=False, update=never_zeroed, why="gradients grow and are far larger than before"),
    # precision, averages, mixed saves
    fault("zz79_through_half", "D7", "weights through fp16 and back", "echo", base=Live, loaded=after(through_half),
          why="fp32 weights were rounded to fp16"),
    fault("zz80_scan_in_half", "D7", "A_log, D and dt_bias through bf16", "echo", base=Mamba,
          loaded=after(kept_in_half),
          why="three parameters were rounded to bf16"),
    fault("zz81_average_from_weights", "A2", "the average is made from the loaded weights", "echo next early",
          base=Averaged, also=("F4", "A5"), loaded=after(average_from_weights),
          why="the average was not restored, it equals the weights"),
    fault("zz82_average_detached", "G6", "the average stands still", "next early", base=Averaged,
          also=("F4", "G7", "H1", "A5"),
          average=average_detached, why="the average no longer follows the weights"),
    fault("zz83_average_in_half", "D7", "the average is bf16 from the resume on", "echo next early", base=Averaged,
          also=("D4", "F4", "A5"), loaded=after(average_in_half), why="the average was cast to bf16"),
    fault("zz84_average_of_saves", "F4", "the mean of the last three saves was loaded", "echo", base=Live,
          also=("G6",), load=average_of_saves, why="all weights differ a little: they are not those of this save"),
    fault("zz85_embedding_older", "G6", "the embedding is of six updates before", "echo", base=Live,
          also=("A2", "G7"), load=embedding_older, why="the embedding alone is of another save"),
    # transformers' Trainer
    of_trainer("zz86_trainer_no_schedule", "B1", "scheduler.pt is gone: the Trainer then skips optimizer.pt too",
               "echo next early", ("C1",), "optimizer and schedule were not restored", spoil=without_schedule),
    of_trainer("zz87_trainer_by_name", "B5", "optimizer.pt was renumbered by name", "echo next", ("E13",),
               "states of parameters of one shape are exchanged", spoil=numbers_by_name),
    of_trainer("zz88_trainer_export", "D7", "the weights are those of a bf16 export", "echo", (),
               "fp32 weights were rounded to bf16", spoil=exported_weights, model="Qwen2"),
    of_trainer("zz89_trainer_shorter", "C4", "max_steps of 60 instead of 100", "echo next early", ("H1", "C2"),
               "the schedule's length changed", other_args={"max_steps": 60}),
    of_trainer("zz90_trainer_constant", "C2", "another kind of schedule", "echo next early", ("H1", "C4", "B8"),
               "the lr goes back to its peak and is constant", other_args={"lr_scheduler_type": "constant"}),
    of_trainer("zz95_trainer_neox", "A2", "transformers 5.23 does not load GPT-NeoX's embed_out on a resume",
               "echo next early", ("A1",), "embed_out (the head) was not loaded, all else was", build=neox),
    # the lab's other layouts
    Fault("zz91_truncated_weights", "D3", "weights cut from the masters instead of rounded", seen("alone echo"),
          restore=truncated, needs=masters, why="the 16-bit weights are not the rounded masters"),
    Fault("zz92_masters_through_half", "D2", "masters went through fp16", seen("echo"), restore=masters_of_half,
          needs=masters, also=("D1", "D7"), why="the masters alone were rounded"),
    Fault("zz93_merged_counters", "C9", "megatron's or deepspeed's counters added over two ranks",
          seen("alone echo next early"),
          restore=counter_doubled, also=("B2", "E12"), formats=("megatron", "deepspeed", "dcp_sharded"),
          why="the optimizer counts twice the trainer's steps"),
    Fault("zz94_history_lost", "D9", "fp8: amax histories are zero, scales are right", seen("echo"),
          restore=scale_kept_history_lost, also=("A5",), needs=quantised, formats=("torch_save", "dcp", "folder"),
          why="the amax history was lost"),
    Fault("zz96_rank_without_moments", "B3", "rank 1 was given no moments, counters it was", seen("alone echo next"),
          second=without_moments, also=("B1", "B4", "G5", "G6"), formats=("dcp_sharded",),
          why="the moments of rank 1's half are zero / were not loaded; rank 0's are right"),
    Fault("zz97_norms_drift", "F1", "rank 1's norms are of an older save", seen("alone echo"), second=older_norms,
          also=("G6",), formats=("megatron",), why="the ranks' copies of the norms are not equal"),
]  # fmt: skip

_HEALTHY = [
    variant("zzh01_karras", "an average by a power of the count, each fifth update", base=Karras),
    variant("zzh02_lookahead", "Lookahead: weights go back half of the way", base=Lookahead),
    variant("zzh03_outer", "DiLoCo's outer steps", base=Outer),
    variant("zzh04_spheric", "rows are normalised after each update", base=Spheric),
    variant("zzh05_clamped", "WGAN: clamped weights, and a generator that learns rarely", base=Clamped),
    variant("zzh06_relora", "the optimizer's state is pruned every twelfth update", base=ReLora, layouts=FILES),
    variant("zzh07_sparse", "an embedding by SparseAdam", base=Sparse),
    variant("zzh08_layer_drop", "a layer is left out of some updates", base=Dropped),
    variant("zzh09_pruned", "half of each matrix is held at zero", base=Pruned),
    variant("zzh10_stochastic", "bf16 rounded stochastically, no masters", base=Stochastic, layouts=FILES, clip=0.0),
    variant("zzh11_observed", "quantisation-aware, observers that stop", base=Observed),
    variant("zzh12_target", "a target network copied every tenth update", base=Target),
    variant("zzh13_ramped", "the batch grows", base=Ramped),
    variant("zzh14_galore", "GaLore with a projector", base=Live, optimizer=optim(Galore), layouts=FILES),
    variant("zzh15_soap", "SOAP", base=Live, optimizer=optim(Soap), layouts=FILES),
    variant("zzh16_sharp", "SAM", base=Sharp),
    variant("zzh17_centred", "a centred embedding with a row of zeros", base=Centred, needs={"tied": False}),
    variant("zzh18_capped", "CLIP with its temperature at the bound", base=Capped, needs={"batch": 8}),
    variant("zzh19_swa", "an average that has not begun, or counts its parts", base=Swa),
    variant("zzh20_elsewhere", "resumed by a program that saves as DCP", base=Elsewhere, layouts=ONE),
    variant("zzh21_to_zero", "linear to zero, and on with zero", base=Live, schedule=short_end),
    variant("zzh22_stable_then_fall", "warm, stable, fall", base=Live, schedule=stable_then_fall),
    variant("zzh23_stairs", "steps of 0.3", base=Live, schedule=stairs),
    variant("zzh24_warm_restarts", "warm restarts: the rate jumps to its peak", base=Live, schedule=warm_restarts),
    variant("zzh25_zero_rate", "a group of rate 0", base=Live, groups=zero_rate_group, needs={"tied": False}),
    variant("zzh26_lars", "LARS of no package", base=Live, optimizer=optim(Lars, factor=5.0)),
    variant("zzh27_batch_norm", "convolutions with batch norm, cumulative statistics", base=CumulativeNorm),
    variant("zzh28_balanced", "a mixture balanced by its bias", base=Balanced, needs={"experts": 4}),
    variant("zzh29_layerwise", "rates by depth", base=Grouped),
    variant("zzh30_weight_norm", "weight norm", base=WeightNorm),
    variant("zzh31_plateau", "ReduceLROnPlateau", base=Plateau),
    well("zzh32_trainer_t5", "transformers' Trainer: T5 with dropout", t5),
    well("zzh33_trainer_mistral", "transformers' Trainer: Mistral, linear schedule", partial(made, "Mistral"),
         lr_scheduler_type="linear"),
    well("zzh34_trainer_tied", "transformers' Trainer: Qwen2 tied, warm restarts", tied_qwen,
         lr_scheduler_type="cosine_with_restarts", gradient_accumulation_steps=2),
    Fault("zzh35_other_layout", "healthy", "goes on in another layout", frozenset(), elsewhere=True, kind="healthy",
          formats=("megatron", "deepspeed", "dcp_sharded", "dcp"), why="nothing is wrong"),
    Fault("zzh36_in_parts", "healthy", "two parts an update from the resume on", frozenset(), micro=2, kind="healthy",
          formats=("megatron", "deepspeed", "dcp_sharded"), why="nothing is wrong"),
]  # fmt: skip

_DELIBERATE = [
    variant("zzd01_halved_lr", "half of the lr", base=Argued, kind="deliberate", loaded=halved_lr, true=("H1", "C2",
          "B8"),
            why="the lr changed: was that meant?"),
    variant("zzd02_larger_batch", "twice the batch", base=Argued, kind="deliberate", tokens=larger_batch,
            loaded=other_args(global_batch_size=8), true=("H1", "C10"), why="the batch size changed"),
    variant("zzd03_world_size", "two ranks instead of four", base=type("RankedArgs", (Ranks, Argued), {}),
            kind="deliberate", layouts=ONE, loaded=other_args(fewer_ranks, world_size=4), true=("H1", "C8"),
            why="the number of ranks changed"),
    variant("zzd04_new_corpus", "other data", base=Argued, kind="deliberate", tokens=new_corpus,
            loaded=other_args(data_path="corpus-b"), true=("H1", "C7", "C6"), why="the data changed"),
    variant("zzd05_layer_frozen", "a layer is frozen", base=Argued, kind="deliberate", layouts=FILES,
            loaded=other_args(freeze_layer, freeze="layers.0"), true=("H1",),
            why="layer 0 does not move: was that meant?"),
    variant("zzd06_weaker_decay", "a tenth of the decay", base=Argued, kind="deliberate",
            loaded=other_args(weaker_decay), true=("H1", "B7", "C5"), why="weight decay changed"),
    variant("zzd07_other_optimizer", "Lion instead of AdamW", base=Relion, kind="deliberate",
            true=("H1", "B1", "C1", "B11"), why="the optimizer is another one and began anew"),
    variant("zzd08_other_task", "a new head for another task", base=Classified, kind="deliberate",
            true=("H1", "B1", "F7", "A2", "C1"), why="the head has another size, the optimizer began anew"),
    variant("zzd09_newly_averaged", "an average is kept from now on", base=NewlyAveraged, kind="deliberate",
            true=("H1", "A4"), why="tensors were added"),
    variant("zzd10_unclipped", "no clipping, and longer", base=Argued, kind="deliberate",
            loaded=other_args(lambda self: setattr(self, "clip", 0.0), clip_grad=0.0, train_iters=5000),
            true=("H1", "C4"), why="arguments changed"),
]  # fmt: skip

OPENED10_LIVE: tuple[Fault, ...] = (*_FAULTS, *_HEALTHY, *_DELIBERATE)
