"""A synthetic ZeRO-3 checkpoint of any size, saved by torch; ``python benchmarks/synthetic_deepspeed.py FOLDER``.

Rank 0's two files are written with ``torch.save``, the other ranks' are sparse copies of them: payloads are zeros, so
that 512 ranks × 2,000 parameters take ~0.4 GB of disk (placeholders of every parameter in every rank's model_states, as
DeepSpeed writes them). Run as a program it also opens the checkpoint and prints CPU seconds and peak memory.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path

LAYER = {
    "q": (512, 512),
    "k": (128, 512),
    "v": (128, 512),
    "o": (512, 512),
    "gate": (1792, 512),
    "up": (1792, 512),
    "down": (512, 1792),
    "norm_1": (512,),
    "norm_2": (512,),
    "odd": (77, 13),
}
HOLE = 4096  #: zeros that become a hole


def write_zero3(folder: str | Path, layers: int = 200, ranks: int = 512) -> int:
    """``global_step4`` of a model of ``10 × layers`` parameters; returns pieces: parameters × ranks × 3 states."""
    import torch

    tag = Path(folder) / "global_step4"
    tag.mkdir(parents=True, exist_ok=True)
    shapes = OrderedDict(
        (f"model.layers.{i}.block.{name}.weight", torch.Size(shape))
        for i in range(layers)
        for name, shape in LAYER.items()
    )
    module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in shapes)
    module["rotary.inv_freq"] = torch.ones(64)
    model = {
        "module": module,
        "buffer_names": ["rotary.inv_freq"],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 4,
        "global_samples": 4 * ranks,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 3}},
        "ds_version": "0.19.8",
    }
    length = sum(-(-shape.numel() // ranks) for shape in shapes.values())
    state = {name: torch.zeros(length) for name in ("exp_avg", "exp_avg_sq")}
    optim = {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": [torch.zeros(length)],
            "optimizer_state_dict": {
                "state": {0: {"step": torch.tensor(4.0), **state}},
                "param_groups": [{"params": [0]}],
            },
        },
        "ds_config": model["ds_config"],
        "ds_version": "0.19.8",
    }
    for content, name in (
        (model, "zero_pp_rank_{}_mp_rank_00_model_states.pt"),
        (optim, "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
    ):
        first = tag / name.format(0)
        torch.save(content, first)
        whole = first.read_bytes()
        for rank in range(1, ranks):
            _sparse(tag / name.format(rank), whole)
    (Path(folder) / "latest").write_text("global_step4")
    return len(shapes) * ranks * 3


def _sparse(path: Path, content: bytes) -> None:
    with open(path, "wb") as handle:
        at = 0
        zeros = bytes(HOLE)
        for begin in range(0, len(content), HOLE):
            block = content[begin : begin + HOLE]
            if block != zeros[: len(block)]:
                os.pwrite(handle.fileno(), block, begin)
            at = begin + len(block)
        os.ftruncate(handle.fileno(), at)


def main(folder: Path) -> None:
    from harness import best

    if not (folder / "latest").exists():
        write_zero3(folder)
    code = f"""
import workbench as wb
with timed():
    ckpt = wb.open({str(folder)!r}, cache=False)
assert len(ckpt) == 6002, len(ckpt)
"""
    found = best({"open": code}, 3)["open"]
    print(f"{found['cpu']:.1f} CPU-s, {found['wall']:.1f} s wall, peak anonymous memory {found['anon']:,.0f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
