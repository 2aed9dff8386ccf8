"""Tensors of a checkpoint onto a device, whole or a rank's piece of each, at the speed of the bus.

::

    files ──pread by many threads──► ring of pinned buffers ──side stream──► results
                                                          └──► scratch ──cast, cut out──► results

Nothing is allocated before all of it is planned and known to fit. What is one run of bytes is copied to its place;
what has to be cast or cut out of rows goes through a scratch buffer on the device. On a CPU the same path is taken,
without pinned memory and streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import ALL, DType, nbytes_of
from workbench.core.payload import Payloads
from workbench.core.scan import Tick, cores
from workbench.errors import UsageError
from workbench.reshard.layouts.layout import Layout
from workbench.reshard.mesh import Mesh
from workbench.reshard.onto_device.lane import device_of, lane_to
from workbench.reshard.onto_device.loads import loads
from workbench.reshard.onto_device.memory import check_room, reserve
from workbench.reshard.onto_device.results import Results
from workbench.reshard.onto_device.ring import Slot, run
from workbench.reshard.onto_device.windows import Filled, windows
from workbench.reshard.rules import Rules
from workbench.reshard.selection import Selection, choose
from workbench.reshard.target import Planned, Target
from workbench.reshard.values.casts import cast_codes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["BUFFER", "BUFFERS", "to_device"]

BUFFER = 32 << 20  #: bytes of a buffer: long copies, and four of them are little beside what they carry
BUFFERS = 4
PARTS = 4  #: loads that fill a buffer, at least: its end stays empty where the next one does not fit
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
    buffers: int = BUFFERS,
    tick: Tick | None = None,
) -> dict[str, torch.Tensor]:
    """Read tensors onto a device: by stored name, in the order of the checkpoint, bits as stored.

    Without a mesh every tensor comes whole. With one, the local tensors of one of its ranks come: of the coordinate
    ``mesh_coord`` (axes that are not named are at 0) or the number ``rank``; tensors of other stages are left out.
    With torch's ``device_mesh`` they are those of this process, as DTensors.

    Types that torch lacks come as :meth:`LazyTensor.torch` gives them: raw.

    Args:
        device: ``cuda``, ``cuda:1``, ``cpu`` …
        select: regular expressions; tensors whose key matches one of them somewhere.
        role: ``model`` for all that a model loads, one role (``exp_avg`` …), ``all`` or ``None`` for every
            tensor.
        mesh: the ranks, by named axes: ``Mesh(tp=2, pp=2)``, ``{"tp": 2}`` or ``"tp=2,pp=2"``.
        rules: how tensors lie on the mesh; by default as their names say.
        dtype: cast floats of 16, 32 and 64 bits on the device, as torch casts them.
        threads: how many read; by default as many as this process may use cores, at most 8.
        buffer: bytes of a host buffer, 4 KiB or more.
        buffers: how many there are; host memory is ``buffer · buffers``.
        tick: told the share of bytes that is done, in the caller's thread; raising there ends the pass.

    Returns:
        tensors that work queued on the current stream may use; nothing has to be waited for.

    Raises:
        UsageError: nothing is selected, arguments that contradict each other, a device without memory (``meta``), a
            layout that a DTensor cannot have.
        UnsupportedFormatError: a cast that is not offered; elements that share bytes are to be cut.
        DeviceMemoryError: the device has less free than is needed; nothing was allocated.
        HoleError: an element is stored nowhere; nothing was read.
        OpenError: a chunk cannot be read, or chunks contradict each other; nothing stays allocated.
    """
    where = device_of(device)
    if buffer < SMALLEST or buffers < 1:
        raise UsageError(f"{buffers} buffers of {buffer:,} bytes: at least one of {SMALLEST:,} bytes is needed")
    mesh, number = _rank(None if mesh is None else Mesh.of(mesh), rules, rank, mesh_coord, device_mesh)
    chosen = choose(ckpt, select=select, role=role, mesh=mesh, rules=rules)
    if dtype is not None:  # a cast and no more: weights of 8 bits stay with their scales
        chosen = replace(chosen, codes=cast_codes(chosen.codes, dtype))
    work = _Work.of(chosen, number)
    wrapping = None
    if device_mesh is not None:
        from workbench.reshard.onto_device.dtensor import Wrapping

        wrapping = Wrapping.of(work.target, work.planned.locals, device_mesh, where)
    tensors = work.carry_out(where, threads=threads or cores(), buffer=buffer, buffers=buffers, tick=tick)
    if wrapping is not None:
        tensors = wrapping(tensors)
    return {chosen.names[t]: one for t, one in zip(work.planned.locals.tensor.tolist(), tensors, strict=True)}


def _rank(
    mesh: Mesh | None,
    rules: Rules | None,
    rank: int | None,
    mesh_coord: Mapping[str, int] | None,
    device_mesh: DeviceMesh | None,
) -> tuple[Mesh | None, int]:
    """The mesh, and which of its ranks is meant."""
    if device_mesh is not None:
        if mesh is not None or rank is not None or mesh_coord is not None:
            raise UsageError(
                "device_mesh= says which ranks there are and which is this; leave out mesh, rank, mesh_coord"
            )
        mesh, own = Mesh.like(device_mesh), device_mesh.get_coordinate()
        if own is None:
            raise UsageError("this process is not in device_mesh; it has no piece of its tensors")
        return mesh, mesh.rank(**dict(zip(mesh.axes, own, strict=True)))
    if mesh is None:
        if rank is not None or mesh_coord is not None or rules is not None:
            raise UsageError("rank, mesh_coord and rules are about a mesh; give it with mesh=, as in mesh=Mesh(tp=2)")
        return None, 0
    if (rank is None) == (mesh_coord is None) and mesh.world_size > 1:
        raise UsageError(f"{mesh!r} has {mesh.world_size} ranks; say which one is meant with mesh_coord= or rank=")
    return mesh, mesh.rank(**mesh_coord) if mesh_coord is not None else rank or 0


@dataclass(frozen=True, eq=False)
class _Work:
    """Everything planned; nothing read or allocated.

    Attributes:
        target: of the selected tensors only.
        payloads: of these tensors.
        planned: for one rank; ``L`` local tensors.
        old, new: ``L`` element types, stored and wanted.
    """

    target: Target
    payloads: Payloads
    planned: Planned
    old: list[DType]
    new: list[DType]

    @classmethod
    def of(cls, chosen: Selection, rank: int) -> _Work:
        ckpt, catalog = chosen.ckpt, chosen.catalog
        target = chosen.target or Target(catalog, chosen.mesh, [Layout((), "whole")] * len(catalog), [])
        planned = target.plan(ranks=[rank])
        tensors = planned.locals.tensor
        old, new = ([ALL[code] for code in codes[tensors].tolist()] for codes in (catalog.dtype, chosen.codes))
        return cls(target, Payloads(catalog, ckpt.payloads.pool), planned, old, new)

    def carry_out(
        self, device: torch.device, *, threads: int, buffer: int, buffers: int, tick: Tick | None
    ) -> list[torch.Tensor]:
        """The local tensors, in the order of the plan."""
        most = buffer // PARTS
        parts = loads(self.payloads, self.planned, most)
        results = Results([self._shape(at) for at in range(len(self.old))], self.old, self.new)
        reserve(device, check_room(device, results.sizes, scratch=most))
        done, total = 0, max(sum(self._stored(at) for at in range(len(self.old))), 1)

        def send(window: Filled, slot: Slot) -> None:
            nonlocal done
            for at, load in window.loads:
                results.put(load, slot.host[at : at + load.nbytes])
                done += load.wanted
            if tick is not None and done < total:
                tick(done / total)

        try:
            results.allocate(device, scratch=most)
            lane = lane_to(device)
            lane.begin()
            filled = windows(parts, self.payloads.pool, nbytes=buffer, threads=threads)
            run(filled, send, lane, nbytes=buffer, count=buffers, threads=threads)
            if tick is not None:
                tick(1.0)
            return results.take()
        finally:
            results.release()

    def _shape(self, at: int) -> tuple[int, ...]:
        found = self.planned.locals
        return tuple(found.shape[at, : int(found.ndim[at])].tolist())

    def _stored(self, at: int) -> int:
        return nbytes_of(self.old[at], int(self.planned.locals.numel[at]))
