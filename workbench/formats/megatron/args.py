"""The ``args`` that Megatron stores with a checkpoint, and the facts about the run that they contain.

::

    args = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, world_size=8, num_layers=24, …)

    rank 0 1 2 3 4 5 6 7          tp fastest, then cp, dp, pp; with use_tp_pp_dp_mapping pp before dp
    tp   0 1 0 1 0 1 0 1
    dp   0 0 1 1 0 0 1 1
    pp   0 0 0 0 1 1 1 1

Stored values are validated: a number that is not a non-negative integer counts as unknown.
Read from megatron-core 0.16.1 and 0.20.0dev.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AXIS_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
MAX_RANKS = 4096  #: maximum ranks to list coordinates for


@dataclass(frozen=True)
class RunArgs:
    """The stored ``args``; every fact that they do not contain is ``None``.

    Attributes:
        args: the namespace's attributes, inert values only; empty if no file holds a namespace.
    """

    args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: object) -> RunArgs:
        """Create from an unpickled ``argparse.Namespace`` (a stand-in), a dict, or any other stored value."""
        found = stored if isinstance(stored, Mapping) else getattr(stored, "state", None)
        return cls(found if isinstance(found, Mapping) else {})

    def number(self, name: str) -> int | None:
        """Return an argument if it is a non-negative integer."""
        value = self.args.get(name)
        return value if type(value) is int and 0 <= value < 1 << 48 else None

    def size(self, axis: str) -> int | None:
        """Return the size of a mesh axis: ``tp`` … ``etp``; ``vpp`` counts model chunks per stage."""
        found = self.number(AXIS_ARGS[axis])
        return found if found else None

    def known(self, axis: str, default: int = 1) -> int:
        """Return :meth:`size`, or the default that Megatron assumes."""
        return self.size(axis) or default

    @property
    def mesh(self) -> dict[str, Any]:
        """Axes, and every rank's coordinates in Megatron's order (tp fastest, then cp, dp, pp)."""
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
        """Rows of the vocabulary as requested and as padded; rows beyond the first number are padding."""
        names = {"vocab_size": "vocab_size", "padded_vocab_size": "padded"}
        return {to: size for name, to in names.items() if (size := self.number(name))}


def _coordinates(rank: int, order: Sequence[str], axes: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for axis in order:
        rank, found[axis] = divmod(rank, axes[axis])
    return found
