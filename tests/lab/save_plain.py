"""What common trainers write without shards: by hand, in their words.

::

    folder         transformers' Trainer   model.safetensors  optimizer.pt  scheduler.pt  trainer_state.json
    accelerate     save_state              model.safetensors  optimizer.bin  scheduler.bin  random_states_0.pkl
    lightning      ModelCheckpoint         one .ckpt: state_dict  optimizer_states  lr_schedulers  loops
    torch_masters  a loop of one's own     one file with fp32 copies by name under ``master_weights``

The optimizer numbers its parameters, group after group, and none of these files says their names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.lab import facts
from tests.lab.save_torch import content, optimizer_state
from tests.lab.state import State

__all__ = ["save_accelerate", "save_folder", "save_lightning", "save_masters", "spelt_out"]

ROWS = 1000  #: batches in an epoch
#: What a param group of torch 2.13's AdamW holds beside its numbers.
GROUP = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def save_folder(folder: Path, state: State, second: State | None = None) -> Path:
    """``checkpoint-N`` of transformers; two ranks' random states."""
    assert second is None
    folder = folder / f"checkpoint-{state.trainer.step}"
    _weights(folder, state)
    (folder / "config.json").write_text(json.dumps(facts.model_config(state)))
    (folder / "trainer_state.json").write_text(json.dumps(_trainer_state(state)))
    _parts(folder, state, {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"})
    for rank in range(2):
        torch.save({"cpu": facts.random_state(state, rank)}, folder / f"rng_state_{rank}.pth")
    return folder


def save_accelerate(folder: Path, state: State, second: State | None = None) -> Path:
    """What ``Accelerator.save_state`` leaves; its step is that of the random states."""
    assert second is None
    folder = folder / f"checkpoint_{state.trainer.step}"
    _weights(folder, state)
    _parts(folder, state, {"optimizer": "optimizer.bin", "scheduler": "scheduler.bin", "scaler": "scaler.pt"})
    for rank in range(2):
        states = {"step": state.trainer.step, "torch_manual_seed": facts.random_state(state, rank)}
        torch.save(states, folder / f"random_states_{rank}.pkl")
    return folder


def save_lightning(folder: Path, state: State, second: State | None = None) -> Path:
    assert second is None
    folder.mkdir(parents=True)
    step = state.trainer.step
    whole = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"model.{name}": tensor for name, tensor in (state.params | state.buffers).items()},
        "loops": {"fit_loop": {"epoch_loop.state_dict": {"_batches_that_stepped": step}}},
        "callbacks": {},
        "optimizer_states": [spelt_out(state)],
        "lr_schedulers": [facts.scheduler(state)],
        "hyper_parameters": facts.arguments(state),
    }
    names = {"optimizer": "optimizer_states", "scheduler": "lr_schedulers", "args": "hyper_parameters"}
    for name in state.config.unstored:
        whole.pop(names.get(name, name), None)
    if state.ema and "ema" not in state.config.unstored:
        whole["callbacks"] = {"WeightAveraging": {"average": state.ema}}
    torch.save(whole, folder / f"epoch=0-step={step}.ckpt")
    return folder / f"epoch=0-step={step}.ckpt"


def save_masters(folder: Path, state: State, second: State | None = None) -> Path:
    assert second is None
    folder.mkdir(parents=True)
    whole = content(replace(state, masters={})) | {"master_weights": state.masters}
    torch.save(whole, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def spelt_out(state: State) -> dict[str, Any]:
    """The optimizer with everything that torch's param groups hold."""
    found = optimizer_state(state)
    kind = GROUP | {"decoupled_weight_decay": state.config.optimizer == "adamw"}
    return found | {"param_groups": [kind | {"initial_lr": state.config.lr} | one for one in found["param_groups"]]}


def _weights(folder: Path, state: State) -> None:
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in (state.params | state.buffers).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _parts(folder: Path, state: State, files: dict[str, str]) -> None:
    held = {"optimizer": spelt_out(state), "scheduler": facts.scheduler(state)}
    held |= {"scaler": facts.scaler(state)} if state.config.scaler else {}
    if state.ema and "ema" not in state.config.unstored:
        torch.save(state.ema, folder / "ema.pt")
    for name, value in facts.kept(state, held).items():
        torch.save(value, folder / files[name])


def _trainer_state(state: State) -> dict[str, Any]:
    """What transformers 5 writes; the last log line has the learning rate of the last update."""
    c, told, epoch = state.config, state.trainer, state.trainer.step / ROWS
    last = {"step": told.step, "learning_rate": state.lr, "grad_norm": 0.5, "loss": 2.0, "epoch": epoch}
    return {
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": epoch,
        "eval_steps": 500,
        "global_step": told.step,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [last],
        "logging_steps": 10,
        "max_steps": c.total,
        "num_train_epochs": 1,
        "save_steps": 20,
        "stateful_callbacks": {},
        "total_flos": 0.0,
        "train_batch_size": c.batch,
        "trial_name": None,
        "trial_params": None,
    }
