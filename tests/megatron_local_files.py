"""NVRx local checkpoints as Megatron-core writes them: stand-ins for its classes, under its names, pickled by torch.

Of a state with TP 2, the opcodes of ``data.pkl`` were compared with those that megatron-core 0.16.1 and
nvidia-resiliency-ext 0.4.1 wrote (``MCoreTensorAwareStateDict.from_state_dict``, ``LocalCheckpointManager.save`` on two
gloo ranks): they are equal, but for the numbers under which pickle remembers objects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LAYERS = 3
MAPPING = "megatron.core.dist_checkpointing.mapping"
STATE = "megatron.core.dist_checkpointing.tensor_aware_state_dict"
NVRX = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict"
STATES = {
    "": 1.0,
    "optimizer.state.exp_avg.": 2.0,
    "optimizer.state.exp_avg_sq.": 3.0,
    "optimizer.state.fp32_param.": 1.0,
}


class ShardedTensor:
    def __init__(
        self,
        key: str,
        data: torch.Tensor,
        *cuts: tuple[int, int, int],
        replica_id: Any,
        prepended: int = 0,
        mismatch: bool = False,
    ) -> None:
        """``cuts``: axis of the global tensor, which part of it, of how many (``ShardedTensor.from_rank_offsets``)."""
        shape, offset, parts = (
            [1] * prepended + [*data.shape],
            [0] * (prepended + data.ndim),
            [1] * (prepended + data.ndim),
        )
        for axis, part, count in cuts:
            offset[axis], parts[axis] = part * shape[axis], count
            shape[axis] *= count
        self.key, self.data, self.dtype, self.local_shape = key, data, data.dtype, tuple(data.shape)
        self.global_shape, self.global_offset, self.axis_fragmentations = tuple(shape), tuple(offset), tuple(parts)
        self.replica_id, self.prepend_axis_num, self.allow_shape_mismatch = replica_id, prepended, mismatch
        self.flattened_range = None


class ShardedObject:
    def __init__(self, key: str, data: object, global_shape: Any, global_offset: Any, replica_id: Any) -> None:
        self.key, self.data, self.global_shape = key, data, global_shape
        self.global_offset, self.replica_id = global_offset, replica_id


class MCoreTensorAwareStateDict:
    def __init__(self, common: Any, sharded_state_dict: Any) -> None:
        self.common, self.sharded_state_dict, self._is_hollow = common, sharded_state_dict, False


class BasicTensorAwareStateDict:
    def __init__(self, state_dict: Any) -> None:
        self.state_dict, self._is_hollow = state_dict, False


CLASSES = {
    ShardedTensor: MAPPING,
    ShardedObject: MAPPING,
    MCoreTensorAwareStateDict: STATE,
    BasicTensorAwareStateDict: NVRX,
}


@contextmanager
def library() -> Iterator[None]:
    """Let pickle find the stand-ins under the library's names."""
    known = dict(sys.modules)
    try:
        for kind, module in CLASSES.items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            setattr(sys.modules[module], kind.__name__, kind)
            kind.__module__ = module
        yield
    finally:
        for kind in CLASSES:
            kind.__module__ = __name__
        for name in sys.modules.keys() - known.keys():
            del sys.modules[name]


def truth() -> dict[str, torch.Tensor]:
    """The global tensors by listed key."""
    found = {}
    for prefix, scale in STATES.items():
        found[f"{prefix}embedding.word_embeddings.weight"] = _numbers(99, 8, 4) * scale
        for layer in range(LAYERS):
            found[f"{prefix}decoder.layers.{layer}.mlp.linear_fc2.weight"] = _numbers(layer, 4, 6) * scale
            found[f"{prefix}decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"] = _numbers(layer, 4) * scale
    return found


def state(rank: int, tp: int = 2, iteration: int = 10) -> MCoreTensorAwareStateDict:
    """What a rank of two saves: TP 2, or with ``tp=1`` its half of a data-parallel group (``fully_parallel``)."""
    part, copy = (rank, 0) if tp == 2 else (0, rank)
    args = argparse.Namespace(
        world_size=2, tensor_model_parallel_size=tp, pipeline_model_parallel_size=1, rank=rank, num_layers=LAYERS
    )
    sharded: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for prefix, scale in STATES.items():
        tree = sharded["model"] if not prefix else sharded["optimizer"]["state"].setdefault(prefix, {})
        name = "embedding.word_embeddings.weight"
        data = (_numbers(99, 8, 4) * scale).chunk(tp, 0)[part].clone()
        tree[name] = ShardedTensor(prefix + name, data, (0, part, tp), replica_id=(0, 0, copy), mismatch=True)
        for layer in range(LAYERS):
            fc2, norm = _numbers(layer, 4, 6) * scale, _numbers(layer, 4) * scale
            tree[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = ShardedTensor(
                prefix + "decoder.layers.mlp.linear_fc2.weight",
                fc2.chunk(tp, 1)[part].clone(),
                (0, layer, LAYERS),
                (2, part, tp),
                replica_id=(0, 0, copy),
                prepended=1,
            )
            tree[f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"] = ShardedTensor(
                prefix + "decoder.layers.mlp.linear_fc1.layer_norm_weight",
                norm.clone(),
                (0, layer, LAYERS),
                replica_id=(0, part, copy),
                prepended=1,
            )
    if tp == 1:  # each rank keeps every other tensor
        for tree in (sharded["model"], *sharded["optimizer"]["state"].values()):
            for position, tensor in enumerate(tree.values()):
                if position % 2 != rank:
                    tensor.data = None
    generator = [{"random_rng_state": (3, (1, 2), None), "torch": torch.arange(4, dtype=torch.uint8) + rank}]
    sharded["rng_state"] = ShardedObject("rng_state", generator, (1, tp), (0, part), copy)
    return MCoreTensorAwareStateDict({"args": args, "iteration": iteration, "checkpoint_version": 3.0}, sharded)


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with library():
        torch.save(value, path)
    return path


def write_session(folder: Path, tp: int = 2, iteration: int = 10) -> Path:
    for rank in range(2):
        write(folder / str(rank) / f"iter_{iteration:07}_{rank}_local.pt", state(rank, tp, iteration))
    return folder


def _numbers(first: int, *shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + 1000 * first).reshape(shape)
