"""Tensors of a live state dict: the part on this rank, as boxes of the global tensors, and where they are in memory.

::

    DTensor (515, 16), mesh 2×2, [_StridedShard(0, 2), Shard(0)]  ──cut──▶  rows 258:387 ──▶ local (129, 16)
    plain tensor                                                            the whole tensor

Source: torch 2.13 ``distributed/tensor/_api.py`` (``DTensor``), ``distributed/device_mesh.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.dtypes import DType
from workbench.core.mesh.cut import Locals, concatenate, cut
from workbench.core.mesh.placement import Placement, of_torch
from workbench.core.transfer.regions import BoxRequests
from workbench.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor of the state dict, as this rank holds it.

    Attributes:
        name: dotted name.
        local: the local plain tensor, without gradient.
        shape: shape of the global tensor.
        steps: one placement per mesh axis, with the size of the axis.
        coordinate: of this rank on these axes; ``None`` if the rank is outside the mesh and holds nothing.
    """

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    steps: tuple[tuple[Placement, int], ...] = ()
    coordinate: tuple[int, ...] | None = ()

    @property
    def memory(self) -> tuple[Any, ...]:
        """Key that is equal for tensors with the same memory (tied weights), including their empty shards."""
        local = self.local  # an empty tensor has no data address, but its storage has one
        return (
            local.untyped_storage()._cdata,
            local.storage_offset(),
            tuple(local.shape),
            local.stride(),
            local.dtype,
            self.shape,
            self.steps,
        )

    @property
    def nbytes(self) -> int:
        """Size of the local elements in bytes."""
        return int(self.local.numel() * self.local.element_size())

    @property
    def straight(self) -> bool:
        """Whether files can be read directly into it: memory of the host or of a GPU, in row-major order."""
        return self.local.device.type in ("cpu", "cuda") and self.local.is_contiguous()

    def differs(self, dtype: DType, shape: tuple[int, ...]) -> str | None:
        """Describe how a stored tensor differs in type or shape; ``None`` if it does not."""
        here = str(self.local.dtype).removeprefix("torch.")
        if here == dtype.torch_name and not dtype.packed and self.shape == shape:
            return None
        return f"is {here} {self.shape} here and {dtype} {shape} in the checkpoint"


def held(name: str, tensor: torch.Tensor) -> HeldTensor:
    """Return the part of a tensor or DTensor that this rank holds.

    Raises:
        UsageError: a pending reduction, a tensor without memory, an expanded tensor, or a tensor class whose memory
            layout is unknown.
    """
    import torch
    from torch.distributed.tensor import DTensor

    shape = tuple(tensor.shape)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            try:
                steps = tuple((of_torch(p), int(n)) for p, n in zip(tensor.placements, mesh.shape, strict=True))
            except UsageError as error:
                raise UsageError(f"tensor {name!r}: {error}") from None
            at = mesh.get_coordinate()
            made = HeldTensor(name, tensor.to_local().detach(), shape, steps, None if at is None else tuple(at))
        else:
            made = HeldTensor(name, tensor.detach(), shape)
    local = made.local
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        raise UsageError(
            f"tensor {name!r} is a {type(local).__name__} ({local.layout}); pass plain tensors or DTensors"
        )
    if local.is_meta:
        raise UsageError(f"tensor {name!r} is on the meta device and has no memory; call to_empty(device=…) first")
    if local.is_conj() or local.is_neg():
        raise UsageError(
            f"tensor {name!r} is a view that conjugates or negates; call resolve_conj().resolve_neg() first"
        )
    if any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)):
        raise UsageError(
            f"tensor {name!r} is expanded: several elements share memory; load into the tensor that it views"
        )
    return made


def cut_held(tensors: Sequence[HeldTensor], dims: int) -> Locals:
    """Return the boxes of all tensors, in order: ``tensor`` counts them, ``rank`` is 0.

    Args:
        dims: number of columns of the boxes.

    Raises:
        UsageError: a local tensor has another shape than its placements imply.
    """
    by_placement: dict[Any, list[int]] = defaultdict(list)
    for at, one in enumerate(tensors):
        if one.coordinate is not None:
            by_placement[one.steps, one.coordinate, len(one.shape)].append(at)
    parts = []
    for (steps, coordinate, ndim), members in by_placement.items():
        shapes = np.ones((len(members), dims), np.int64)
        shapes[:, :ndim] = [tensors[at].shape for at in members]
        try:
            found = cut(shapes, ndim, steps, np.array([coordinate], np.int64).reshape(1, -1))
        except UsageError as error:
            raise UsageError(f"tensor {tensors[members[0]].name!r}: {error}") from None
        parts.append(replace(found, tensor=np.array(members, np.int64)[found.tensor]))
    made = concatenate(parts) if parts else cut(np.ones((0, dims), np.int64), 0, [], np.zeros((1, 0), np.int64))
    for at, shape, ndim in zip(made.tensor.tolist(), made.shape.tolist(), made.ndim.tolist(), strict=True):
        if tuple(tensors[at].local.shape) != tuple(shape[:ndim]):
            raise UsageError(
                f"tensor {tensors[at].name!r}: its local shape on this rank is {tuple(tensors[at].local.shape)}, but "
                f"its placements imply {tuple(shape[:ndim])}"
            )
    return made


def boxes_of(found: Locals, members: Sequence[int], positions: Ints) -> BoxRequests:
    """Return the boxes of some tensors of :func:`cut_held`; buffers are numbered in the order of ``members``.

    Args:
        positions: position of every tensor in the catalog.
    """
    number = np.full(len(positions), -1, np.int64)
    number[np.asarray(members, np.int64)] = np.arange(len(members))
    owner = found.tensor[found.owner]
    rows = np.flatnonzero(number[owner] >= 0)
    return BoxRequests(
        positions[owner[rows]],
        found.offsets[rows],
        found.sizes[rows],
        number[owner[rows]],
        found.at[rows],
        found.strides[rows],
    )
