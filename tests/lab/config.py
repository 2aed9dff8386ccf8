"""What a run of the lab is made of: model, optimizer, schedule, precision. Two runs of one `Config` are equal.

::

    lr      peak   ___
                 /     \\__               update n (from 1) uses lr_at(n): a linear warm-up, then half a cosine
            0  _/         \\___ floor     down to `min_lr` at update `total`
               1  warmup      total
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["PRECISIONS", "Config", "random_config"]

#: Stored weights, and what the optimizer updates: bf16 beside fp32 masters, fp32 alone, bf16 alone (moments as well).
PRECISIONS = ("mixed", "fp32", "bf16")


@dataclass(frozen=True)
class Config:
    """A decoder, its optimizer and its data.

    Attributes:
        vocab, padded: tokens that occur, and rows of the embedding; logits beyond the first are left out of the loss,
            so that those rows never see a gradient.
        experts: routed experts a layer, two of which a token visits; 0 for a dense model.
        clip: bound of the global gradient norm, 0 for none.
        ema, fp8: keep averaged weights; quantise `down_proj` by an amax history.
        lora: rank of adapters that are trained alone, 0 for none.
        rope_theta: base of the rotary embedding.
        scaler: keep a dynamic loss scale, which doubles now and then.
        unstored: what this trainer's files never hold, such as ``scheduler`` or ``optimizer``.
        resume: the step whose checkpoint is resumed from.
    """

    seed: int = 0
    layers: int = 3
    hidden: int = 48
    ffn: int = 192
    heads: int = 4
    groups: int = 2
    vocab: int = 90
    padded: int = 96
    experts: int = 0
    tied: bool = True
    precision: str = "mixed"
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    lr: float = 4e-3
    min_lr: float = 4e-4
    weight_decay: float = 0.1
    clip: float = 1.0
    batch: int = 8
    length: int = 24
    warmup: int = 40
    total: int = 480
    ema: bool = False
    fp8: bool = False
    lora: int = 0
    rope_theta: float = 1e4
    scaler: bool = False
    unstored: tuple[str, ...] = ()
    resume: int = 240

    def __post_init__(self) -> None:
        assert self.precision in PRECISIONS and self.optimizer in ("adamw", "adam")
        assert self.hidden % self.heads == 0 and self.heads % self.groups == 0 and self.head_dim % 2 == 0
        assert self.vocab <= self.padded and self.layers >= 2 and self.resume >= 40

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def stale(self) -> int:
        """The step of an older checkpoint of the run."""
        return self.resume * 3 // 4

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def lr_at(self, update: int) -> float:
        """Learning rate of an update, counted from 1."""
        if update <= self.warmup:
            return self.lr * update / self.warmup
        done = min(1.0, (update - self.warmup) / max(1, self.total - self.warmup))
        return self.min_lr + 0.5 * (self.lr - self.min_lr) * (1 + math.cos(math.pi * done))

    def but(self, **changes: Any) -> Config:
        return replace(self, **changes)


def random_config(seed: int) -> Config:
    """A small run that nobody chose: size, betas, clipping, tying, precision and schedule drawn from ``seed``."""
    rng = random.Random(seed)
    heads, groups = rng.choice([(4, 2), (4, 4), (8, 2), (6, 2), (2, 2)])
    hidden = heads * rng.choice([8, 12])
    ffn = max(4 * hidden, 8192 // hidden // 16 * 16 + 16)  # a rank's half of a bf16 matrix holds a whole page
    vocab = rng.randrange(70, 120)
    lr = rng.choice([1e-3, 2e-3, 4e-3])
    return Config(
        seed=rng.randrange(1 << 20),
        layers=rng.choice([2, 2, 3]),
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        vocab=vocab,
        padded=(vocab // 16 + 1) * 16,
        experts=rng.choice([0, 0, 0, 4]),
        tied=rng.random() < 0.6,
        precision=rng.choice(["mixed", "mixed", "mixed", "fp32"]),
        optimizer=rng.choice(["adamw", "adamw", "adamw", "adam"]),
        betas=rng.choice([(0.9, 0.95), (0.9, 0.95), (0.9, 0.98), (0.9, 0.999), (0.8, 0.95)]),
        lr=lr,
        min_lr=lr / 10,
        weight_decay=rng.choice([0.1, 0.05, 0.01]),
        clip=rng.choice([1.0, 1.0, 0.5, 0.0]),
        batch=rng.choice([4, 8]),
        warmup=rng.randrange(20, 40),
        total=rng.randrange(250, 450),
        resume=rng.randrange(80, 160),
    )
