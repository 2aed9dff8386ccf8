"""Read tensors onto a device, whole or as one rank's shards, at the speed of the bus.

::

    files ──pread by many threads──► ring of pinned buffers ──side stream──► results
                                                          └──► scratch ──cast, cut out──► results

Nothing is allocated until everything is planned and known to fit. Contiguous bytes are copied directly to their place;
parts that must be cast or cut out of rows go through a scratch buffer on the device. A CPU takes the same path, without
pinned memory and streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import ALL, PACKED, DType, nbytes_of
from workbench.core.executors import cores
from workbench.core.mesh.cut import Locals
from workbench.core.mesh.layout import TensorLayout
from workbench.core.mesh.mesh import Mesh
from workbench.core.payload import Payloads
from workbench.core.scan import Progress
from workbench.core.transfer.regions import BoxRequests, Regions
from workbench.core.words import plural
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.casts import cast_codes
from workbench.export.selection import ExportSelection, choose
from workbench.export.sharding.rules import Rules
from workbench.export.sharding.target import Target
from workbench.load.onto_device.lane import device_of
from workbench.load.onto_device.memory import check_room, reserve
from workbench.load.onto_device.results import DeviceResults
from workbench.load.onto_device.ring import BUFFER, PARTS, fill

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALLEST = 4 << 10  #: bytes of a buffer


def to_device(
    ckpt: Checkpoint,
    device: str | torch.device,
    *,
    select: str | Sequence[str] | None = None,
    role: str | None = "model",
    mesh: Mesh | Mapping[str, int] | str | None = None,
    rules: Rules | None = None,
    rank: int | None = None,
    mesh_coord: Mapping[str, int] | None = None,
    device_mesh: DeviceMesh | None = None,
    dtype: object | None = None,
    threads: int | None = None,
    buffer: int = BUFFER,
    buffers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Read tensors onto a device: by stored name, in the checkpoint's order, bit for bit as stored.

    Without a mesh, whole tensors are returned. With ``mesh``, the local tensors of one of its ranks are returned,
    chosen by its coordinate ``mesh_coord`` (axes not named are at 0) or its number ``rank``; tensors of other pipeline
    stages are left out. With torch's ``device_mesh``, the local tensors of this process are returned as DTensors.

    Types that torch lacks are returned raw, as by :meth:`LazyTensor.torch`.

    Args:
        device: ``cuda``, ``cuda:1``, ``cpu`` …
        select: regular expressions; only tensors whose key contains a match of one of them.
        role: ``model`` for everything that a model loads, one role (``exp_avg`` …), or ``all`` or ``None`` for every
            tensor.
        mesh: the ranks by named axes: ``Mesh(tp=2, pp=2)``, ``{"tp": 2}`` or ``"tp=2,pp=2"``.
        rules: how tensors are placed on the mesh; by default inferred from their names.
        dtype: cast 16, 32 and 64-bit floats to this type on the device, as torch does.
        threads: number of reading threads; by default the cores available to this process, up to 8.
        buffer: bytes per host buffer, 4 KiB or more.
        buffers: number of host buffers, by default four more than threads; they take ``buffer · buffers`` bytes of host
            memory.
        progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.

    Returns:
        tensors that work queued on the current stream may use without synchronisation.

    Raises:
        UsageError: nothing is selected, arguments contradict each other, the device has no memory (``meta``), or a
            layout cannot be expressed as a DTensor.
        UnsupportedFormatError: a cast is not supported, or elements that share bytes would have to be split.
        DeviceMemoryError: the device has too little free memory; nothing was allocated.
        HoleError: an element is not stored; nothing was read.
        OpenError: a chunk cannot be read, or chunks contradict each other; all memory is freed.
    """
    where = device_of(device)
    if buffer < SMALLEST or (buffers is not None and buffers < 1):
        count = "" if buffers is None else f"{buffers} "
        raise UsageError(
            f"{count}buffers of {plural(buffer, 'byte')}: one or more buffers of {SMALLEST:,} bytes or more are needed"
        )
    mesh, number = _rank(None if mesh is None else Mesh.of(mesh), rules, rank, mesh_coord, device_mesh)
    chosen = choose(ckpt, select=select, role=role, mesh=mesh, rules=rules)
    if dtype is not None:  # only a cast: 8-bit weights keep their scales
        chosen = replace(chosen, codes=cast_codes(chosen.codes, dtype))
    work = _Work.of(chosen, number)
    wrapping = None
    if device_mesh is not None:
        from workbench.load.onto_device.dtensor import Wrapping

        wrapping = Wrapping.of(work.target, work.locals, device_mesh, where)
    tensors = work.carry_out(where, threads=threads or cores(), buffer=buffer, buffers=buffers, progress=progress)
    if wrapping is not None:
        tensors = wrapping(tensors)
    return {chosen.names[t]: one for t, one in zip(work.locals.tensor.tolist(), tensors, strict=True)}


def _rank(
    mesh: Mesh | None,
    rules: Rules | None,
    rank: int | None,
    mesh_coord: Mapping[str, int] | None,
    device_mesh: DeviceMesh | None,
) -> tuple[Mesh | None, int]:
    """Return the mesh and the chosen rank."""
    if device_mesh is not None:
        if mesh is not None or rank is not None or mesh_coord is not None:
            raise UsageError(
                "device_mesh= already defines the ranks and which one this is; leave out mesh, rank and mesh_coord"
            )
        mesh, own = Mesh.like(device_mesh), device_mesh.get_coordinate()
        if own is None:
            raise UsageError("this process is not in device_mesh, so it holds no part of the tensors")
        return mesh, mesh.rank(**dict(zip(mesh.axes, own, strict=True)))
    if mesh is None:
        if rank is not None or mesh_coord is not None or rules is not None:
            raise UsageError("rank, mesh_coord and rules need a mesh; pass one with mesh=, as in mesh=Mesh(tp=2)")
        return None, 0
    if (rank is None) == (mesh_coord is None) and mesh.world_size > 1:
        raise UsageError(f"{mesh!r} has {mesh.world_size} ranks; choose one with mesh_coord= or rank=")
    return mesh, mesh.rank(**mesh_coord) if mesh_coord is not None else rank or 0


@dataclass(frozen=True, eq=False)
class _Work:
    """Everything planned; nothing read or allocated.

    Attributes:
        target: sharding target of only the selected tensors.
        payloads: access to their bytes.
        locals: ``L`` local tensors of one rank.
        boxes, regions: what they consist of.
        old, new: ``L`` element types, stored and requested.
    """

    target: Target
    payloads: Payloads
    locals: Locals
    boxes: BoxRequests
    regions: Regions
    old: list[DType]
    new: list[DType]

    @classmethod
    def of(cls, chosen: ExportSelection, rank: int) -> _Work:
        ckpt, catalog = chosen.ckpt, chosen.catalog
        target = chosen.target or Target(catalog, chosen.mesh, [TensorLayout((), "whole")] * len(catalog), [])
        found = target.locals([rank])
        tensors = found.tensor
        owner = found.owner
        boxes = BoxRequests(tensors[owner], found.offsets, found.sizes, owner, found.at, found.strides)
        regions = Regions.of(catalog, boxes)
        cut = ~regions.uncut(catalog, found.shape) | (found.shape != catalog.shape[tensors]).any(axis=1)
        for tensor in tensors[cut & PACKED[catalog.dtype[tensors]] & (found.numel > 0)].tolist():
            raise UnsupportedFormatError(
                f"tensor {catalog.keys[tensor]!r}: elements of {catalog.dtype_of(tensor)} share bytes, so it can "
                "only be read whole, from a single chunk; place it with a rule as Replicate(), or leave it out"
            )
        old, new = ([ALL[code] for code in codes[tensors].tolist()] for codes in (catalog.dtype, chosen.codes))
        return cls(target, ckpt.payloads.over(catalog), found, boxes, regions, old, new)

    def carry_out(
        self, device: torch.device, *, threads: int, buffer: int, buffers: int | None, progress: Progress | None
    ) -> list[torch.Tensor]:
        """Return the local tensors, in the order of the plan."""
        results = DeviceResults([self._shape(at) for at in range(len(self.old))], self.old, self.new)
        scratch = buffer // PARTS
        reserve(device, check_room(device, results.sizes, scratch=scratch))
        total = max(sum(self._stored(at) for at in range(len(self.old))), 1)

        def report(done: int) -> None:
            if progress is not None and done < total:
                progress(done / total)

        try:
            results.allocate(device, scratch=scratch)
            fill(
                results,
                self.payloads,
                self.boxes,
                self.regions,
                device,
                buffer=buffer,
                buffers=buffers,
                threads=threads,
                progress=report,
            )
            if progress is not None:
                progress(1.0)
            return results.take()
        finally:
            results.release()

    def _shape(self, at: int) -> tuple[int, ...]:
        found = self.locals
        return tuple(found.shape[at, : int(found.ndim[at])].tolist())

    def _stored(self, at: int) -> int:
        return nbytes_of(self.old[at], int(self.locals.numel[at]))
