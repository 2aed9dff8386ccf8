"""torch's distributed checkpoint: one process through ``dcp.save``, and two ranks' shards as DCP lays them out.

::

    dcp          {"model": …, "optimizer": …} by get_state_dict, "scheduler" …    __0_0.distcp                .metadata
    dcp_sharded  rows or columns in two chunks                                    __0_0.distcp  __1_0.distcp  .metadata

``dcp.save`` puts a random id and the folder's name into ``.metadata``; here both are fixed, so that equal states have
equal bytes. Masters are the optimizer's ``master_param``, as Transformer Engine's FusedAdam keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.lab import facts
from tests.lab.split import axis_of
from tests.lab.state import State
from tests.megatron_files import Saver

__all__ = ["save", "save_sharded"]


def save(folder: Path, state: State, second: State | None = None) -> Path:
    """Write through ``dcp.save``; one process wrote it, so that there is no second rank's."""
    assert second is None
    model, optimizer = _live(state)
    weights, moments = get_state_dict(model, optimizer) if state.exp_avg else (model.state_dict(), _bare(state))
    content = {"model": weights, "optimizer": moments, **_rest(state)}
    dcp.save(facts.kept(state, content), storage_writer=_Writer(folder), no_dist=True)
    return folder


def save_sharded(folder: Path, state: State, second: State | None = None) -> Path:
    """Write two ranks' shards; rank 1 writes its part of ``second`` where that is another."""
    saver = Saver(folder)
    for rank, own in enumerate((state, second or state)):
        for key, axis, tensor in _keyed(own):
            part, at = tensor, [0] * tensor.ndim
            if axis is not None:
                part = tensor.chunk(2, axis)[rank]
                at[axis] = rank * part.shape[axis]
            saver.chunk(key, tuple(tensor.shape), tuple(at), part, rank)
    for number, (decay, names) in enumerate(state.groups()):
        for what, value in (facts.group_facts(state, decay, names) | {"params": names}).items():
            saver.objects[f"optimizer.param_groups.{number}.{what}"] = value, 0
    for name, value in _rest(state).items():
        if isinstance(value, dict):
            for what, one in value.items():
                saver.objects[f"{name}.{what}"] = one, 0
    return saver.write(None)


class _Writer(dcp.FileSystemWriter):
    """One that makes up no id of its own."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id="lab", save_id="lab")


def _live(state: State) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module with these parameters, and an optimizer that holds their state."""
    model = nn.Module()
    for name, tensor in (state.params | state.buffers).items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if name in state.buffers:
            module.register_buffer(leaf, tensor)
        else:
            module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=name in state.trained()))
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[name] for name in names], **facts.group_facts(state, decay, names)}
        for decay, names in state.groups()
    ]
    kind = torch.optim.AdamW if state.config.optimizer == "adamw" else torch.optim.Adam
    optimizer = kind(groups)
    for name, moment in state.exp_avg.items():
        held = {"step": torch.tensor(state.step[name]), "exp_avg": moment, "exp_avg_sq": state.exp_avg_sq[name]}
        held |= {"master_param": state.masters[name]} if name in state.masters else {}
        optimizer.state[params[name]] = held
    return model, optimizer


def _bare(state: State) -> dict[str, Any]:
    """An optimizer that was saved before it had any moments: ``get_state_dict`` would make them up."""
    groups = [{"params": names, **facts.group_facts(state, decay, names)} for decay, names in state.groups()]
    return {"state": {n: {"master_param": t} for n, t in state.masters.items()}, "param_groups": groups}


def _rest(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scheduler": facts.scheduler(state),
        "train_state": {"step": state.trainer.step, "consumed_samples": state.trainer.samples},
        "dataloader": facts.loader(state),
        "args": facts.arguments(state),
        "config": facts.model_config(state),
        "rng_state": facts.random_state(state),
    }
    found |= {"ema": state.ema} if state.ema else {}
    return facts.kept(state, found | ({"scaler": facts.scaler(state)} if state.config.scaler else {}))


def _keyed(state: State) -> list[tuple[str, int | None, torch.Tensor]]:
    """``(key, the axis that ranks share, tensor)``, named as ``dcp.save`` would."""
    found = [(f"model.{name}", axis_of(name), tensor) for name, tensor in state.params.items()]
    found += [(f"model.{name}", None, tensor) for name, tensor in state.buffers.items()]
    stored = {"master_param": state.masters, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    for what, tensors in stored.items():
        found += [(f"optimizer.state.{name}.{what}", axis_of(name), tensor) for name, tensor in tensors.items()]
    return found + [(f"optimizer.state.{name}.step", None, torch.tensor(step)) for name, step in state.step.items()]
