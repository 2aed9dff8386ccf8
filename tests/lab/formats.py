"""The layouts that the lab saves in, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.lab import save_dcp, save_deepspeed, save_megatron, save_plain, save_torch
from tests.lab.config import Config
from tests.lab.split import merged
from tests.lab.state import State

__all__ = ["FORMATS", "LAYOUTS", "PLAIN", "Format"]


@dataclass(frozen=True)
class Format:
    """A saver and what goes with it.

    Attributes:
        save: ``(folder, state, what rank 1 wrote instead)`` → the path to open.
        merged: the state that a loader gets when the two ranks wrote different ones.
        ranks: processes that write; with one of them there is no second.
        shared_weights: the weights are written once, ranks write the optimizer alone.
        replicas: both ranks are tensor-parallel ones and store the norms.
        bare: bf16 weights without masters can be stored.
        copies: fp32 masters can be stored; only: nothing else than such runs can.
        extras: averaged weights, adapters and fp8 buffers can be stored.
    """

    save: Callable[[Path, State, State | None], Path]
    merged: Callable[[State, State], State] = merged
    ranks: int = 1
    shared_weights: bool = False
    replicas: bool = False
    bare: bool = True
    copies: bool = True
    only: bool = False
    extras: bool = True

    def refuses(self, config: Config) -> str | None:
        """Why a run is never stored in this layout."""
        if config.groups % 2 and self.replicas:
            return f"two tensor-parallel ranks cannot share {config.groups} query groups"
        if config.precision == "bf16" and not self.bare:
            return "its bf16 weights always have masters"
        if config.precision == "mixed" and not self.copies:
            return "its trainers keep no masters"
        if config.precision != "mixed" and self.only:
            return "it is a file with masters"
        if (config.ema or config.fp8 or config.lora) and not self.extras:
            return "the lab writes no averages, fp8 buffers or adapters in this layout"
        return None


FORMATS = {
    "torch_save": Format(save_torch.save),
    "dcp": Format(save_dcp.save),
    "dcp_sharded": Format(save_dcp.save_sharded, ranks=2, extras=False),
    "megatron": Format(save_megatron.save, ranks=2, replicas=True, bare=False, extras=False),
    "deepspeed": Format(
        save_deepspeed.save, save_deepspeed.merged, ranks=2, shared_weights=True, bare=False, extras=False
    ),
}

#: One process without masters: what transformers, Lightning and accelerate write.
PLAIN = {
    "folder": Format(save_plain.save_folder, copies=False),
    "lightning": Format(save_plain.save_lightning, copies=False),
    "accelerate": Format(save_plain.save_accelerate, copies=False),
}
LAYOUTS = {
    **FORMATS,
    **PLAIN,
    "torch_masters": Format(save_plain.save_masters, only=True),
}
