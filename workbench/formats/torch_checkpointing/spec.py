"""How a rank's local tensor is placed in a global one: from ``metadata.pkl``, or from the DTensor in the file itself.

::

    metadata.pkl   {"type": "DTensorShardingMetadata", "data": {global_shape, dtype, mesh_spec, placements}}
                   {"type": "default_tensor_v1", "data": {global_shape, global_offsets, local_offsets, local_sizes}}
    {item}_R.pt    _rebuild_wrapper_subclass(DTensor, dtype, shape, …)  state: _local_tensor, _spec (mesh, placements)

Placements are those of torch: one per mesh axis. ``StridedShard`` (FSDP2 over TP) means that the shards of the mesh
axes to its right come first; they are applied first here, after which it is an ordinary shard.

A sub-mesh has no list of its ranks in the file, only strides over those of the root mesh; the coordinate of the rank
that wrote the file is stored (``_coordinate_on_dim``) and suffices.

Sources: torch_checkpointing 0.1.1 ``dtensor_metadata.py``, ``default_metadata.py``; torch 2.13
``distributed/tensor/_dtensor_spec.py``, ``placement_types.py``, ``distributed/device_mesh.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from workbench.core.build import MAX_AXES
from workbench.core.dtypes import DType, by_name
from workbench.core.mesh.cut import cut
from workbench.core.mesh.mesh import MAX_RANKS
from workbench.core.mesh.placement import Placement, Replicate, Shard, StridedShard
from workbench.core.pickles.standins import DTypeRef, Opaque, TensorRef, short
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError, UsageError

Ints = tuple[int, ...]
Boxes = tuple[tuple[Ints, Ints, Ints], ...]  #: offsets in the global tensor, sizes, offsets in the local one
_LARGEST = 1 << 55
MAX_PARTS = 1 << 14  #: boxes of a rank's part of one tensor; torch cuts as many as a mesh axis has ranks


@dataclass(frozen=True, slots=True)
class Spec:
    """The placement of one rank's local tensor.

    Attributes:
        shape: the global shape.
        dtype: type of the elements.
        local: shape of the local tensor, or ``None`` if only :attr:`boxes` are stored.
        boxes: the parts of the global tensor that it holds.
        mesh: size of each mesh axis; empty if no mesh is stored.
        names: names of the mesh axes, if stored.
        placements: as text, to compare two specs.
        coordinate: coordinate of the rank along each mesh axis.
    """

    shape: Ints
    dtype: DType
    local: Ints | None
    boxes: Boxes
    mesh: Ints = ()
    names: tuple[str, ...] = ()
    placements: str = ""
    coordinate: Ints = ()


def from_metadata(group: object, rank: int, what: str, position: Callable[[Sequence[object], int], int | None]) -> Spec:
    """Return the spec of a group in ``metadata.pkl`` for one of its ranks; ``position`` finds a rank in a list of them.

    Raises:
        CorruptError: the group contradicts itself.
        UnsupportedFormatError: a kind of sharding or placement that this reader does not know.
    """
    kind = group.get("type") if isinstance(group, dict) else None
    data = group.get("data") if isinstance(group, dict) else None
    if not isinstance(data, dict):
        raise CorruptError(f"{what} has no sharding metadata")
    shape, dtype = _ints(data.get("global_shape"), f"{what}: global_shape"), by_name(data.get("dtype"))
    if kind == "default_tensor_v1":
        columns = [_rows(data.get(name), f"{what}: {name}") for name in ("global_offsets", "local_sizes")]
        inside = _rows(data.get("local_offsets"), f"{what}: local_offsets")
        if len({len(rows) for rows in (*columns, inside)}) > 1:
            raise CorruptError(f"{what} has {len(columns[0])} global_offsets and {len(inside)} local_offsets")
        boxes = tuple(zip(*columns, inside, strict=True))
        for offsets, sizes, at in boxes:
            fits = len(offsets) == len(sizes) == len(at) == len(shape)
            if not fits or any(a + n > size for a, n, size in zip(offsets, sizes, shape, strict=True)):
                raise CorruptError(f"{what} has a shard of {sizes} at {offsets}, outside of its global shape {shape}")
        return Spec(shape, dtype, None, boxes)
    if kind != "DTensorShardingMetadata":
        raise UnsupportedFormatError(f"{what} has sharding metadata of an unknown type {short(kind)}")
    mesh_spec = data.get("mesh_spec")
    mesh = _ints(mesh_spec.get("mesh_shape") if isinstance(mesh_spec, dict) else None, f"{what}: mesh_shape")
    ranks = mesh_spec.get("mesh_data") if isinstance(mesh_spec, dict) else None
    if not isinstance(ranks, (tuple, list)):
        raise CorruptError(f"{what}: mesh_data is not a list of ranks")
    at = position(ranks, rank)
    if len(ranks) != prod(mesh) or at is None:
        raise CorruptError(f"{what} is on a mesh of {plural(len(ranks), 'rank')} and shape {mesh}, without rank {rank}")
    coordinate = _unravel(at, mesh)
    found = data.get("placements")
    placements = [_placement(one, one.get("type"), what) for one in found] if isinstance(found, list) else []
    names = mesh_spec.get("mesh_dim_names") if isinstance(mesh_spec, dict) else None
    return _made(shape, dtype, mesh, _names(names), coordinate, placements, what)


def from_dtensor(node: Opaque, rank: int, what: str) -> tuple[Spec, TensorRef] | None:
    """Return the spec of a DTensor in the file of ``rank``, and its local tensor; ``None`` if its mesh lacks this rank.

    Raises:
        CorruptError: the DTensor contradicts itself, or was saved by another rank.
        UnsupportedFormatError: a placement that this reader does not know.
    """
    state = _state(node)
    local, outer = state.get("_local_tensor"), _fields(state.get("_spec"))
    mesh_state = _fields(outer.get("mesh"))
    if len(node.args) < 3 or not isinstance(local, TensorRef) or not isinstance(node.args[1], DTypeRef):
        raise CorruptError(f"{what} is a DTensor without a local tensor or an element type")
    shape, dtype = _ints(node.args[2], f"{what}: global shape"), by_name(node.args[1].name)
    mesh = mesh_of(node)
    found = outer.get("placements")
    if not mesh or not isinstance(found, tuple):
        raise CorruptError(f"{what} is a DTensor without a mesh or placements")
    writer = mesh_state.get("_rank")
    if type(writer) is int and writer != rank:
        raise CorruptError(
            f"{what} was saved by rank {writer}, but its file is named as rank {rank}'s: files of two "
            "ranks were swapped"
        )
    coordinate_on_dim = mesh_state.get("_coordinate_on_dim")
    if coordinate_on_dim is None:
        return None
    placements = [_placement(_fields(one), getattr(one, "qualname", ""), what) for one in found]
    names = mesh_state.get("_mesh_dim_names", mesh_state.get("mesh_dim_names"))
    coordinate = _ints(coordinate_on_dim, f"{what}: coordinate on the mesh")
    if len(coordinate) != len(mesh) or any(at >= size for at, size in zip(coordinate, mesh, strict=True)):
        raise CorruptError(f"{what} has the coordinate {coordinate} on a mesh of shape {mesh}")
    if local.dtype != dtype.name:
        raise CorruptError(f"{what} is a DTensor of {dtype} with a local tensor of {local.dtype}")
    return _made(shape, dtype, mesh, _names(names), coordinate, placements, what), local


def mesh_of(node: Opaque) -> Ints:
    """Return the shape of a pickled DTensor's mesh, empty if it has none. Before torch 2.13 the mesh is a tensor."""
    mesh = _fields(_fields(_state(node).get("_spec")).get("mesh"))
    axes = _fields(mesh.get("_layout")).get("axes")
    if isinstance(axes, tuple) and len(axes) <= 8:
        shapes = [_fields(axis).get("shape") for axis in axes]
        if all(isinstance(one, tuple) and all(type(n) is int and 0 < n <= MAX_RANKS for n in one) for one in shapes):
            return tuple(prod(one) for one in shapes if isinstance(one, tuple))
    tensor = mesh.get("mesh", mesh.get("_mesh"))
    return tensor.shape if isinstance(tensor, TensorRef) and len(tensor.shape) <= 8 else ()


# ---- placements ----------------------------------------------------------------------------------------------------


def _made(
    shape: Ints,
    dtype: DType,
    mesh: Ints,
    names: tuple[str, ...],
    coordinate: Ints,
    placements: Sequence[Placement],
    what: str,
) -> Spec:
    if len(placements) != len(mesh) or prod(mesh) > MAX_RANKS or 0 in mesh:
        raise CorruptError(f"{what} has {plural(len(placements), 'placement')} on a mesh of shape {mesh}")
    try:
        local, boxes = _boxes(shape, mesh, coordinate, tuple(placements))
    except UsageError as error:
        raise CorruptError(f"{what}: {error}") from None
    shown = ", ".join(map(str, placements))
    return Spec(shape, dtype, local, boxes, mesh, names, shown, coordinate)


@lru_cache(4096)
def _boxes(shape: Ints, mesh: Ints, coordinate: Ints, placements: tuple[Placement, ...]) -> tuple[Ints, Boxes]:
    """Return the shape of the local tensor at a coordinate of the mesh, and its boxes."""
    order, steps, parts = [], [], 1
    strided = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            later = [
                mesh[other]
                for other in range(axis + 1, len(mesh))
                if getattr(placements[other], "dim", None) == placement.dim
            ]
            if placement.split_factor == prod(later) and later:
                strided.append((axis, Shard(placement.dim)))
                continue
            if (parts := parts * max(placement.split_factor, 1)) > MAX_PARTS:
                raise UsageError(f"{placement} has more than {MAX_PARTS:,} parts")
        order.append(axis)
        steps.append((placement, mesh[axis]))
    for axis, shard in reversed(strided):
        order.append(axis)
        steps.append((shard, mesh[axis]))
    if not shape:
        if any(not isinstance(placement, Replicate) for placement in placements):
            raise UsageError("a tensor without axes cannot be sharded")
        return (), (((), (), ()),)
    found = cut(np.array([shape]), len(shape), steps, np.array([[coordinate[axis] for axis in order]]))
    local = tuple(found.shape[0].tolist())
    rows = zip(found.offsets.tolist(), found.sizes.tolist(), found.at.tolist(), strict=True)
    return local, tuple((tuple(offsets), tuple(sizes), _unravel(at, local)) for offsets, sizes, at in rows)


def _placement(fields: Mapping[str, Any], kind: object, what: str) -> Placement:
    dim, factor = fields.get("dim"), fields.get("split_factor")
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard" and type(dim) is int:
        return Shard(dim)
    if kind in ("StridedShard", "_StridedShard") and type(dim) is int and type(factor) is int:
        return StridedShard(dim, factor)
    raise UnsupportedFormatError(
        f"{what} has the placement {short(kind)}, which does not describe stored elements, or is newer than this "
        "workbench"
    )


def _unravel(position: int, shape: Ints) -> Ints:
    found = []
    for size in reversed(shape):
        found.append(position % size)
        position //= size
    return tuple(reversed(found))


# ---- what is stored ------------------------------------------------------------------------------------------------


def _state(node: Opaque) -> Mapping[str, Any]:
    """Return the attributes of a wrapper subclass: the part of its state with its local tensor."""
    states = node.state if isinstance(node.state, tuple) else (node.state,)
    return next((one for one in states if isinstance(one, dict) and "_local_tensor" in one), {})


def _fields(node: object) -> Mapping[str, Any]:
    state = node.state if isinstance(node, Opaque) else None
    return state if isinstance(state, dict) else {}


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(one)[:60] for one in value) if isinstance(value, (tuple, list)) else ()


def _ints(value: object, what: str) -> Ints:
    sizes: Sequence[Any] = value if isinstance(value, (tuple, list)) and len(value) <= MAX_AXES else (None,)
    if not all(type(one) is int and 0 <= one < _LARGEST for one in sizes):
        raise CorruptError(f"{what} is not a list of sizes")
    return tuple(sizes)


def _rows(value: object, what: str) -> list[Ints]:
    if not isinstance(value, (tuple, list)):
        raise CorruptError(f"{what} is not a list of shards")
    return [_ints(row, what) for row in value]
