"""The lab's own loops on a GPU: ``python -m tests.lab.on_gpu [--seed N] [--kinds healthy …] [--json FILE]``.

Kernels of a GPU add in another order, fuse, and use TF32 or bf16, so that a healthy run there is not one on a CPU.
Loops that need the CPU (a generator of their own, say) cannot be made, and are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.lab.accuracy import Trial, _line, _tables, totals, tried
from tests.lab.catalogue import EVERY
from tests.lab.fault import Fault
from tests.lab.live import Loop, fault, variant
from tests.lab.live_healthy import LIVE_HEALTHY, optim

WAYS = ("echo", "pair1", "pair20")
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
        from tests.lab.model import loss_and_load

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


def _one(id: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    Loop.device = "cuda"
    known = EVERY | {one.id: one for one in ON_GPU}
    trial = tried(known[id], seed, ways=WAYS)
    return asdict(trial)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--kinds", nargs="*", default=["healthy", "deliberate", "fault"])
    parser.add_argument("--only", nargs="*", default=[], help="first letters of their ids")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so many")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    live = [*ON_GPU, *LIVE_HEALTHY, *(one for one in EVERY.values() if one.live and one.formats == ("live",))]
    chosen = {one.id: one for one in live if one.kind in options.kinds}
    if options.only:
        chosen = {id: one for id, one in chosen.items() if id.startswith(tuple(options.only))}
    jobs = [(id, options.seed + n) for n in range(options.seeds) for id in chosen]
    begun, trials = time.monotonic(), []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_one, *job) for job in jobs]
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            trials.append(done.result())
            if time.monotonic() - begun > options.seconds:
                for one in waiting:
                    one.cancel()
    if options.json:
        options.json.write_text(json.dumps(trials))
    shown(trials, len(jobs))
    return 0


def shown(trials: list[dict[str, Any]], asked: int) -> None:
    """Print what was found, and every healthy case that was not silent."""
    from tests.lab.accuracy import Told

    made = [Trial(**one | {"told": {way: Told(**told) for way, told in one["told"].items()}}) for one in trials]
    good = [one for one in made if not one.failed]
    for one in good:
        loud = any(one.told[way].code or one.told[way].crash for way in WAYS)
        if (one.kind != "fault" and loud) or one.fault.startswith("gpu_"):
            print(_line(one, WAYS))
            for way in WAYS:
                if one.told[way].code and one.kind != "fault":
                    print(f"    {way}: {one.told[way].verdict[:300]}")
    failed = [one for one in made if one.failed]
    print("\n".join(_tables(totals(good, WAYS))))
    print(f"{len(made)} of {asked} cases, {len(failed)} could not be made")
    for one in failed:
        print(f"  {one.fault}: {one.failed.strip().splitlines()[-1][:140]}")


if __name__ == "__main__":
    sys.exit(main())
