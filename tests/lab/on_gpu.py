"""Loops that need a GPU, healthy but for one: autocast, fused and capturable kernels, a GradScaler, its generator.

Kernels of a GPU add in another order, fuse, and round otherwise, so that a healthy run there is not one on a CPU.
``python -m tests.lab.accuracy --half gpu --device cuda`` runs these and all loops of `live`. Some need the CPU (a
generator of their own, say): those cannot be made there, and are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab.fault import Fault
from tests.lab.live import Loop, fault, variant
from tests.lab.live_healthy import optim
from tests.lab.model import loss_and_load

__all__ = ["ON_GPU"]

TORCH = torch.optim


class Rounded(Loop):
    """Autocast to bf16 over float32 weights."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().loss(tokens).float()


class Scaled(Loop):
    """Autocast to float16 with torch's own GradScaler, whose state is stored."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=8)
        self.extra["scaler"] = self.scaler.state_dict()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        tokens = self.tokens().to(self.device)
        with torch.device(self.device):
            with torch.autocast("cuda", torch.float16):
                loss = self.loss(tokens)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizers[0])
            self.gradients()
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
        for schedule in self.schedules:
            schedule.step()
        self.step += 1
        self.extra["scaler"] = self.scaler.state_dict()

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        self.scaler.load_state_dict(content["scaler"])


class Dropping(Loop):
    """Dropout by the generator of the device, whose state is stored."""

    restored = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.device == "cuda":
            torch.cuda.manual_seed(config.seed)
        self.kept()

    def kept(self) -> None:
        self.extra["rng_state"] = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = {name: weight.float() for name, weight in self.module.named_parameters()}
        name = "model.embed_tokens.weight"
        weights[name] = nn.functional.dropout(weights[name], 0.1)
        return loss_and_load(self.config, weights, {}, tokens)[0]

    def update(self) -> None:
        super().update()
        self.kept()

    def load(self, content: dict[str, Any]) -> None:
        super().load(content)
        if self.restored:
            torch.cuda.set_rng_state_all(content["rng_state"]["cuda"])
            torch.set_rng_state(content["rng_state"]["cpu"])
        self.kept()


class Reseeded(Dropping):
    """The generators are not restored, but seeded."""

    restored = False

    def loaded(self) -> None:
        torch.manual_seed(5)
        self.kept()


class Tf32(Loop):
    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        return super().loss(tokens)


class Halves(Loop):
    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)


ON_GPU: list[Fault] = [
    variant("gpu_adamw_fused", "fused AdamW", optimizer=optim(TORCH.AdamW, fused=True)),
    variant("gpu_adamw_foreach", "AdamW, foreach", optimizer=optim(TORCH.AdamW, foreach=True)),
    variant("gpu_adamw_capturable", "AdamW whose counters are on the device",
            optimizer=optim(TORCH.AdamW, capturable=True)),
    variant("gpu_adamw_amsgrad_fused", "fused AdamW with amsgrad",
            optimizer=optim(TORCH.AdamW, fused=True, amsgrad=True)),
    variant("gpu_adam_fused", "fused Adam", optimizer=optim(TORCH.Adam, fused=True)),
    variant("gpu_sgd_fused", "fused SGD", optimizer=optim(TORCH.SGD, factor=20.0, momentum=0.9, fused=True)),
    variant("gpu_bf16_fused", "bf16 weights and moments, fused",
            base=Halves, true=("D5",), optimizer=optim(TORCH.AdamW, fused=True)),
    variant("gpu_bf16_foreach", "bf16 weights and moments",
            base=Halves, true=("D5",), optimizer=optim(TORCH.AdamW, foreach=True)),
    variant("gpu_autocast", "autocast to bf16", base=Rounded),
    variant("gpu_autocast_fused", "autocast to bf16, fused", base=Rounded, optimizer=optim(TORCH.AdamW, fused=True)),
    variant("gpu_scaler", "GradScaler", base=Scaled, layouts=("torch_save", "lightning")),
    variant("gpu_tf32", "TF32", base=Tf32),
    variant("gpu_nadam_foreach", "NAdam, foreach", optimizer=optim(TORCH.NAdam, foreach=True)),
    variant("gpu_radam_capturable", "RAdam, capturable", optimizer=optim(TORCH.RAdam, capturable=True)),
    variant("gpu_adamax_capturable", "Adamax, capturable", optimizer=optim(TORCH.Adamax, capturable=True)),
    variant("gpu_dropout", "dropout, generators stored", base=Dropping, layouts=("torch_save", "lightning", "folder")),
    fault("gpu_reseeded", "C8", "the generators are seeded again", "echo", base=Reseeded,
          layouts=("torch_save", "lightning", "folder")),
]  # fmt: skip
