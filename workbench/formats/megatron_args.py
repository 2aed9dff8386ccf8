"""The ``args`` that Megatron stores with a checkpoint: what they say about the run, or that they do not say it.

::

    args = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, world_size=8, num_layers=24, …)

    rank 0 1 2 3 4 5 6 7          tp fastest, then cp, dp, pp; with use_tp_pp_dp_mapping pp before dp
    tp   0 1 0 1 0 1 0 1
    dp   0 0 1 1 0 0 1 1
    pp   0 0 0 0 1 1 1 1

Nothing that is stored is believed unseen: a number is one that can be multiplied by others, or unknown.
Read from megatron-core 0.16.1 and 0.20.0dev.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AXIS_ARGS", "Run"]

AXIS_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
MAX_RANKS = 4096  #: ranks whose coordinates are listed


@dataclass(frozen=True)
class Run:
    """What the stored ``args`` say; every question is answered ``None`` where they do not.

    Attributes:
        args: the namespace's attributes, inert values only; empty when no file holds one.
    """

    args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: object) -> Run:
        """From an unpickled ``argparse.Namespace`` (a stand-in), a dict, or whatever was stored instead."""
        found = stored if isinstance(stored, Mapping) else getattr(stored, "state", None)
        return cls(found if isinstance(found, Mapping) else {})

    def number(self, name: str) -> int | None:
        """A whole number that is not negative."""
        value = self.args.get(name)
        return value if type(value) is int and 0 <= value < 1 << 48 else None

    def size(self, axis: str) -> int | None:
        """Size of a mesh axis: ``tp`` … ``etp``; ``vpp`` counts model chunks a stage."""
        found = self.number(AXIS_ARGS[axis])
        return found if found else None

    def known(self, axis: str, default: int = 1) -> int:
        """As :meth:`size`, with what Megatron assumes where nothing was asked for."""
        return self.size(axis) or default

    @property
    def mesh(self) -> dict[str, Any]:
        """Axes, and every rank's coordinates by Megatron's order of ranks (tp fastest, then cp, dp, pp)."""
        axes = {axis: size for axis in AXIS_ARGS if (size := self.size(axis)) is not None}
        found: dict[str, Any] = {
            "axes": axes,
            "unknown": [axis for axis in AXIS_ARGS if axis not in axes and axis != "vpp"],
        }
        order = ["tp", "cp", "pp", "dp"] if self.args.get("use_tp_pp_dp_mapping") else ["tp", "cp", "dp", "pp"]
        world = self.number("world_size")
        total = 1
        for axis in order:
            total *= axes.get(axis, 0)
        if world and world == total and world <= MAX_RANKS:
            found["ranks"] = {str(rank): _coordinates(rank, order, axes) for rank in range(world)}
        return found

    @property
    def vocab(self) -> dict[str, int]:
        """Rows of the vocabulary as asked for and as padded; rows beyond the first number are dummies."""
        names = {"vocab_size": "vocab_size", "padded_vocab_size": "padded"}
        return {to: size for name, to in names.items() if (size := self.number(name))}


def _coordinates(rank: int, order: Sequence[str], axes: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for axis in order:
        rank, found[axis] = divmod(rank, axes[axis])
    return found
