"""Local tensors as DTensors: the workbench's layouts as torch placements, if they can be expressed that way.

::

    Mesh(fsdp=2, tp=2)      ours, in the order of application     torch's, in the order of the mesh
    q_proj.weight           tp Shard(0), fsdp Shard(0)            (_StridedShard(0, split_factor=2), Shard(0))
    o_proj.weight           tp Shard(1), fsdp Shard(0)            (Shard(0), Shard(1))
    norm.weight             fsdp Shard(0)                         (Shard(0), Replicate())

A tensor of one pipeline stage is a DTensor on the mesh of that stage: the axes along which it is not everywhere are
left out. Sources: torch 2.13 ``distributed/tensor/placement_types.py``, ``distributed/fsdp/_fully_shard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from workbench.core.catalog import row_major
from workbench.core.mesh.cut import Locals, cut
from workbench.core.mesh.layout import Steps
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Only, Placement, Replicate, Shard, StridedShard, of_torch
from workbench.errors import UsageError
from workbench.export.sharding.target import Target


@dataclass(frozen=True, eq=False)
class Wrapping:
    """How each local tensor becomes a DTensor: its mesh (``None``: it stays a plain tensor), placements, shape."""

    how: list[tuple[DeviceMesh | None, tuple[Any, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, target: Target, found: Locals, device_mesh: DeviceMesh, device: torch.device) -> Wrapping:
        """Create the wrapping after checking it, before a byte is read.

        Raises:
            UsageError: a layout that no DTensor can have, or a mesh of another kind of device.
        """
        if device_mesh.device_type != device.type:
            raise UsageError(f"device_mesh has device type {device_mesh.device_type!r}, but device={str(device)!r}")
        known: dict[tuple[Steps, tuple[int, ...]], tuple[DeviceMesh | None, tuple[Any, ...]]] = {}
        how = []
        for tensor in found.tensor.tolist():
            steps, shape = target.layouts[tensor].steps, target.catalog.shape_of(tensor)
            if (steps, shape) not in known:
                try:
                    axes, placements = torch_placements(steps, target.mesh, shape)
                except UsageError as error:
                    key = target.catalog.keys[tensor]
                    raise UsageError(
                        f"tensor {key!r} cannot be a DTensor: {error}; give rules=, or mesh= and rank="
                    ) from None
                known[steps, shape] = _part(device_mesh, target.mesh, axes), placements
            how.append((*known[steps, shape], shape))
        return cls(how)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the DTensors of this process."""
        return [
            one
            if mesh is None
            else DTensor.from_local(
                one, mesh, placements, run_check=False, shape=torch.Size(shape), stride=row_major(shape)
            )
            for one, (mesh, placements, shape) in zip(tensors, self.how, strict=True)
        ]


def torch_placements(steps: Steps, mesh: Mesh, shape: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Express a layout in torch's terms: the mesh axes along which the tensor is everywhere, and a placement for each.

    Raises:
        UsageError: torch has no placements for it; the message says why.
    """
    placed = dict(steps)
    axes = tuple(axis for axis in mesh.axes if not isinstance(placed.get(axis), Only))
    order = [axis for axis, _ in steps]
    found = tuple(
        _torch_placement(axis, placed.get(axis, Replicate()), placed, order, mesh, len(shape)) for axis in axes
    )
    if [axis for axis in order if axis in axes] != [axis for axis in axes if axis in order]:
        _check_same(steps, axes, found, mesh, shape)
    return axes, found


def _torch_placement(
    axis: str, one: Placement, placed: dict[str, Placement], order: list[str], mesh: Mesh, ndim: int
) -> Any:
    if isinstance(one, Replicate):
        return TorchReplicate()
    if not isinstance(one, Shard | StridedShard):
        raise UsageError(f"torch has no placement equivalent to {one} along {axis!r}")
    dim = one.dim % ndim
    if isinstance(one, StridedShard):
        return _StridedShard(dim, split_factor=one.split_factor)
    # placements that are applied before but come later in the mesh have already cut the axis into parts
    later = mesh.axes[mesh.axes.index(axis) + 1 :]
    before = [a for a in order[: order.index(axis)] if a in later and _cuts(placed[a], dim, ndim)]
    parts = prod(mesh.size(a) for a in before)
    return _StridedShard(dim, split_factor=parts) if parts > 1 else TorchShard(dim)


def _cuts(one: Placement, dim: int, ndim: int) -> bool:
    return isinstance(one, Shard | StridedShard) and one.dim % ndim == dim


def _check_same(
    steps: Steps, axes: tuple[str, ...], found: tuple[Any, ...], mesh: Mesh, shape: tuple[int, ...]
) -> None:
    """Check that each rank holds the same elements in the device mesh's order as in ours; some uneven pieces differ."""
    coordinates = mesh.coordinates()
    ours = [(axis, one) for axis, one in steps if axis in axes]
    theirs = [(axis, of_torch(one)) for axis, one in zip(axes, found, strict=True)]
    sizes = np.array([shape], np.int64)
    one, other = (
        cut(
            sizes,
            len(shape),
            [(placement, mesh.size(axis)) for axis, placement in placements],
            coordinates[:, [mesh.axes.index(axis) for axis, _ in placements]],
        )
        for placements in (ours, theirs)
    )
    for name in ("shape", "ptr", "offsets", "sizes", "at"):
        if not np.array_equal(getattr(one, name), getattr(other, name)):
            ours_text = ", ".join(f"{axis} {placement}" for axis, placement in ours)
            raise UsageError(
                f"torch applies placements in the order of the mesh axes ({', '.join(axes)}), and "
                f"{', '.join(map(str, found))} splits its shape {shape} differently from {ours_text}"
            )


def _part(device_mesh: DeviceMesh, mesh: Mesh, axes: tuple[str, ...]) -> DeviceMesh | None:
    """Return the submesh of some axes that contains this process."""
    if axes == mesh.axes:
        return device_mesh
    return device_mesh[axes] if axes else None
