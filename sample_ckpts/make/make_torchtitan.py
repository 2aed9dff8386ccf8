"""``titan_run/step-2`` and ``step-4``: DCP folders under torchtitan's keys, FSDP2 on two gloo ranks.

The layout is that of torchtitan 0.3 ``CheckpointManager``: model FQNs flat at the top, then
``optimizer.state.<fqn>.…``, ``optimizer.param_groups.<fqn>.…``, ``lr_scheduler.…``, ``train_state.…`` and
``dataloader.dp_rank_N`` (a pickle inside an item). Written without the torchtitan package, with torch's own
state-dict functions that it calls.
"""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import TinyLlama, check_dcp, publish, spawn, train_step, truth_of, write_truth
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, TOKENS_A_STEP = 256, 4 * 16


def worker() -> None:
    model = TinyLlama(VOCAB)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)

    for step in range(1, 5):
        train_step(model, optimizer, VOCAB, seed=100 * step + dist.get_rank())
        scheduler.step()
        if step % 2 == 0:
            _save(model, optimizer, scheduler, step)


def _save(model, optimizer, scheduler, step: int) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    loaders = [
        {f"dp_rank_{r}": pickle.dumps({"sample_idx": 4 * step, "rank": r})} for r in range(dist.get_world_size())
    ]
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"},
        "train_state": {
            "step": torch.tensor(step, dtype=torch.int32),
            "ntokens_seen": torch.tensor(step * TOKENS_A_STEP * dist.get_world_size(), dtype=torch.int64),
        },
        "dataloader": loaders[dist.get_rank()] | {"world_size": dist.get_world_size()},
    }
    truth = truth_of(state)
    dcp.save(state, checkpoint_id=f"titan_run/step-{step}")
    if dist.get_rank() == 0:
        write_truth(f"titan_run/step-{step}", truth)


def _warmup(step: int) -> float:
    return min(1.0, (step + 1) / 3)


if __name__ == "__main__":
    with publish("titan_run"):
        spawn(worker, 2)
        check_dcp("titan_run/step-2")
        check_dcp("titan_run/step-4")
