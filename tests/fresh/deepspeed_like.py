"""Folders as DeepSpeed lays them out, made with torch alone: flatten, pad, chunk, save.

What deepspeed 0.19.8 does to tensors is a few lines (``stage_1_and_2.py``: ``flatten_dense_tensors_aligned``,
``get_data_parallel_partitions``; ``stage3.py``: ``partition_param``). The classes that it pickles are made here under
its module names and taken away again, so that a reader that imported them would fail.
"""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

STATES = ("fp32", "exp_avg", "exp_avg_sq")


@contextmanager
def fake_deepspeed():
    """``deepspeed`` with the classes that its checkpoints pickle, for the time of a save."""
    names = {
        "deepspeed.runtime.fp16.loss_scaler": ["LossScaler"],
        "deepspeed.utils.tensor_fragment": ["fragment_address"],
    }
    made = {}
    for path, classes in names.items():
        parts = path.split(".")
        for n in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
        for name in classes:
            made[path].__dict__[name] = type(name, (), {"__module__": path})
    sys.modules.update(made)
    try:
        yield made
    finally:
        for name in made:
            del sys.modules[name]


def full(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """The three states of every parameter: the truth."""
    made = torch.Generator().manual_seed(seed)
    return {state: {name: torch.randn(shape, generator=made) for name, shape in shapes.items()} for state in STATES}


def save(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def model_states(names: list[list[str]], shapes: dict[str, tuple[int, ...]], module: Any, dp: int, **more: Any) -> dict:
    found = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(shapes[n])) for n in group) for group in names],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": 3},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 4,
        "global_samples": 16,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8",
    }
    return found | more


def split_line(
    tensors: list[torch.Tensor], dp: int, pads: list[int] | None = None, align: int = 2
) -> list[torch.Tensor]:
    """Stages 1 and 2: end to end, padded to ``align × dp``, in equal parts."""
    pieces = [
        torch.cat([t.reshape(-1), torch.full((pad,), 7.0)])
        for t, pad in zip(tensors, pads or [0] * len(tensors), strict=True)
    ]
    line = torch.cat(pieces)
    rest = -len(line) % (align * dp)
    return list(torch.cat([line, torch.full((rest,), 9.0)]).chunk(dp))


def lean(part: torch.Tensor, padding: int) -> torch.Tensor:
    return part[: len(part) - padding].clone()


def optim_12(
    groups: list[dict[str, list[torch.Tensor]]],
    rank: int,
    dp: int,
    *,
    needs: list[int],
    counts: list[int] | None = None,
    places: list[int] | None = None,
    stage: int = 1,
    style: str = "zero",
    order: list[list[str]] | None = None,
    aligned: list[list[int]] | None = None,
    step: Any = None,
    moe: list[bool] | None = None,
) -> dict:
    """One rank's optimizer file. ``groups``: state → partitions; ``style``: zero, bf16 or elastic."""
    counts, places = counts or [dp] * len(groups), places or [rank] * len(groups)
    paddings = []
    for group, need, place in zip(groups, needs, places, strict=True):
        part = len(group["fp32"][0])
        paddings.append(min(part, max(0, (place + 1) * part - need)))
    base: Any = {
        "state": {},
        "param_groups": [
            {"lr": 0.1, "params": [g], **({"moe": True, "name": "ep_size_2"} if moe and moe[g] else {})}
            for g in range(len(groups))
        ],
    }
    for g, (group, place, padding) in enumerate(zip(groups, places, paddings, strict=True)):
        base["state"][g] = {"step": torch.tensor(4.0) if step is None else step}
        for state in ("exp_avg", "exp_avg_sq"):
            kept = group[state][place].clone()
            base["state"][g][state] = lean(kept, padding) if style == "elastic" else kept
    if style == "elastic":
        base = list(base["state"].values())
    masters = [
        group["fp32"][place].clone() if style == "bf16" else lean(group["fp32"][place], padding)
        for group, place, padding in zip(groups, places, paddings, strict=True)
    ]
    with fake_deepspeed() as made:
        scaler = made["deepspeed.runtime.fp16.loss_scaler"].LossScaler()
        scaler.cur_scale = 1.0
        fragment = made["deepspeed.utils.tensor_fragment"].fragment_address()
    found = {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "partition_count": counts,
        "ds_version": "0.19.8",
        "clip_grad": 1.0,
    }
    if style != "bf16":
        found |= {"zero_stage": stage, "loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}
    if order is not None:
        found["param_slice_mappings"] = [OrderedDict((name, fragment) for name in names) for names in order]
    if aligned is not None:
        found["param_alignment_paddings"] = aligned
    return {"optimizer_state_dict": found, "ds_config": {}, "ds_version": "0.19.8"}


def save_optim(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with fake_deepspeed() as made:
        optim = content["optimizer_state_dict"]
        if "loss_scaler" in optim:  # the class of this save, so that pickle finds it under its name
            scaler = made["deepspeed.runtime.fp16.loss_scaler"].LossScaler()
            scaler.__dict__.update(optim["loss_scaler"].__dict__)
            optim["loss_scaler"] = scaler
        for mapping in optim.get("param_slice_mappings", []):
            for name in mapping:
                mapping[name] = made["deepspeed.utils.tensor_fragment"].fragment_address()
        torch.save(content, path)


def save_zero12(
    folder: Path,
    names: list[list[str]],
    shapes: dict[str, tuple[int, ...]],
    truth: dict,
    dp: int,
    *,
    mp: int = 0,
    style: str = "zero",
    pads: int = 0,
    prefix: str = "bf16_",
    order: list[list[str]] | None = None,
    align: int = 2,
    module: Any = True,
    **more: Any,
) -> None:
    """All files of one model-parallel rank."""
    aligned = [[pads * (i % 2) for i in range(len(group))] for group in names] if pads else None
    groups, needs = [], []
    for g, group in enumerate(names):
        row = aligned[g] if aligned else None
        groups.append({s: split_line([truth[s][n] for n in group], dp, row, align) for s in STATES})
        needs.append(sum(truth["fp32"][n].numel() for n in group) + sum(row or []))
    weights = (
        OrderedDict((n, truth["fp32"][n].bfloat16()) for group in names for n in group) if module is True else module
    )
    save(model_states(names, shapes, weights, dp, **more), folder / f"mp_rank_{mp:02d}_model_states.pt")
    for rank in range(dp):
        told = order and [
            mapped(row, shapes, len(group["fp32"][0]), rank, aligned[g] if aligned else None)
            for g, (row, group) in enumerate(zip(order, groups, strict=True))
        ]
        content = optim_12(groups, rank, dp, needs=needs, style=style, order=told, aligned=aligned)
        save_optim(content, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")


def mapped(names: list[str], shapes: dict[str, tuple[int, ...]], part: int, rank: int, pads: list[int] | None) -> list:
    """What a rank's ``param_slice_mappings`` lists: the parameters that overlap its part if they lie in this order."""
    found, begin = [], 0
    for name, pad in zip(names, pads or [0] * len(names), strict=True):
        end = begin + math.prod(shapes[name])
        found += [name] if begin < (rank + 1) * part and rank * part < end else []
        begin = end + pad
    return found


def pieces(tensor: torch.Tensor, dp: int) -> list[torch.Tensor]:
    """Stage 3: one parameter, ``ceil(numel / dp)`` elements a rank, the last ones padded."""
    size = -(-tensor.numel() // dp)
    flat = torch.full((size * dp,), 5.0, dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.reshape(-1)
    return list(flat.split(size)) if size else [flat] * dp


def save_zero3(
    folder: Path,
    names: list[list[str]],
    shapes: dict[str, tuple[int, ...]],
    truth: dict,
    dp: int,
    *,
    sub_groups: list[int] | None = None,
    frozen: dict[str, torch.Tensor] | None = None,
    whole: dict | None = None,
    buffers: dict | None = None,
    prefix: str = "",
    tp: int = 0,
    **more: Any,
) -> None:
    """``sub_groups`` cuts a rank's flat line at other lengths than those of ``names``."""
    frozen, whole, buffers = frozen or {}, whole or {}, buffers or {}
    order = [n for group in names for n in group]
    for rank in range(dp):
        module = OrderedDict((n, torch.empty(0, dtype=torch.bfloat16)) for n in [*order, *frozen])
        module |= {**whole, **buffers}
        states = model_states(
            names,
            shapes,
            module,
            dp,
            buffer_names=list(buffers),
            frozen_param_shapes=OrderedDict((n, t.shape) for n, t in frozen.items()),
            frozen_param_fragments=OrderedDict((n, pieces(t, dp)[rank].clone()) for n, t in frozen.items()),
            **more,
        )
        save(states, folder / f"zero_pp_rank_{rank}_mp_rank_{tp:02d}_model_states.pt")
        line = {s: torch.cat([pieces(truth[s][n], dp)[rank] for n in order]) for s in STATES}
        lengths = sub_groups or [sum(-(-truth["fp32"][n].numel() // dp) for n in group) for group in names]
        cut = {s: [part.clone() for part in line[s].split(lengths)] for s in STATES}
        state = {g: {"step": torch.tensor(4.0), **{s: cut[s][g] for s in STATES[1:]}} for g in range(len(lengths))}
        optim = {
            "zero_stage": 3,
            "partition_count": dp,
            "fp32_flat_groups": cut["fp32"],
            "overflow": False,
            "optimizer_state_dict": {"state": state, "param_groups": [{"params": list(range(len(lengths)))}]},
        }
        save(
            {"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.8"},
            folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_{tp:02d}_optim_states.pt",
        )
