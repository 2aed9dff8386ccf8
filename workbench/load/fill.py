"""Read a rank's boxes into its tensors: directly into contiguous host memory, otherwise through a buffer.

::

    host, contiguous        file ──pread──▶ tensor
    GPU, contiguous         file ──▶ tensor, as :mod:`workbench.load.device` reads
    strided                 file ──pread──▶ buffer of the host ──copy_──▶ tensor          up to STAGE bytes at a time
    strided, GPU            file ──pread──▶ pinned buffer ──copy_──▶ tensor               the same; it copies meanwhile
    tied to another tensor  file ──pread──▶ buffer … compared with the other one's values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.core import codecs, memory
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.mesh.cut import Locals
from workbench.core.payload import Payloads
from workbench.core.transfer.arrays import planned, transfer
from workbench.core.transfer.regions import BoxRequests, Regions
from workbench.errors import UsageError
from workbench.load.boxes import HeldTensor, boxes_of

if TYPE_CHECKING:
    import torch

STAGE = 256 << 20  #: host bytes through which other tensors are read; a larger tensor is read alone
ALIGNED = 16  #: bytes: the largest element


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors that are read together; planned, not read.

    Attributes:
        staged: whether they are read through separate buffers; otherwise directly, all of them in host memory or all on
            one GPU.
        compare: instead of copying out of the buffers, check that the tensors already have these values.
    """

    tensors: tuple[HeldTensor, ...]
    payloads: Payloads
    boxes: BoxRequests
    regions: Regions
    staged: bool
    compare: bool

    @property
    def nbytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(one.nbytes for one in self.tensors)

    def run(self, threads: int, progress: Callable[[int], None] | None = None) -> int:
        """Read the tensors; return the bytes requested from the files.

        Raises:
            UsageError: tied tensors are stored with different values; otherwise as :func:`transfer`.
        """
        if not self.staged and self.tensors[0].local.is_cuda:
            return self._through_ring(threads, progress)
        if not self.staged:
            buffers = [flat(one.local).numpy() for one in self.tensors]
            return transfer(self.payloads, self.regions, buffers, threads=threads, progress=progress)
        buffers = self._buffers()
        arrays = [one.numpy() for one in buffers]
        count = transfer(self.payloads, self.regions, arrays, threads=threads, progress=progress)
        import torch

        for one, buffer in zip(self.tensors, buffers, strict=True):
            if not one.nbytes:
                continue
            new = buffer.view(one.local.dtype).reshape(one.local.shape)
            if not self.compare:  # out of pinned memory, while the next batch is read
                one.local.copy_(new, non_blocking=one.local.is_cuda)
            elif not torch.equal(flat(one.local).cpu(), flat(new)):
                raise UsageError(
                    f"tensor {one.name!r} shares its memory with another one, but the stored values differ; "
                    "load into a model that does not tie them, or leave one of them out"
                )
        return count

    def _through_ring(self, threads: int, progress: Callable[[int], None] | None) -> int:
        from workbench.load.onto_device import ring
        from workbench.load.onto_device.results import DeviceResults

        local = [one.local for one in self.tensors]
        results = DeviceResults.over(local, ring.BUFFER // ring.PARTS)
        return ring.fill(
            results,
            self.payloads,
            self.boxes,
            self.regions,
            local[0].device,
            threads=threads,
            buffer=ring.BUFFER,
            progress=progress,
        )

    def _buffers(self) -> list[torch.Tensor]:
        """Return host memory for each tensor; pinned, if a GPU is to copy from it.

        The slices are of torch's own pinned memory, which torch does not hand out again before the copies are done.
        """
        import torch

        ends = np.cumsum([-(-one.nbytes // ALIGNED) * ALIGNED for one in self.tensors]).tolist()
        if ends[-1] <= STAGE and any(one.local.is_cuda for one in self.tensors):
            block = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
            starts = [0, *ends[:-1]]
            return [block[at : at + one.nbytes] for at, one in zip(starts, self.tensors, strict=True)]
        made = [memory.empty((one.nbytes,), np.dtype(np.uint8)) for one in self.tensors]
        return [torch.from_numpy(one) for one in made]


def batches(
    payloads: Payloads,
    found: Locals,
    positions: Ints,
    tensors: Sequence[HeldTensor],
    members: Sequence[int],
    *,
    compare: bool = False,
) -> list[Batch]:
    """Plan the reads of some of the tensors.

    Args:
        found: the boxes of all tensors.
        positions: positions of all tensors in the catalog.
        members: the tensors to read.

    Raises:
        HoleError: an element is not stored.
    """
    whole = undone_whole(payloads.catalog)  # decoded by the host
    direct: dict[torch.device, list[int]] = {}
    staged: list[list[int]] = []
    filled = STAGE + 1
    for at in members:
        one = tensors[at]
        if one.straight and not compare and not (one.local.is_cuda and whole[positions[at]]):
            direct.setdefault(one.local.device, []).append(at)
            continue
        if filled + one.nbytes > STAGE:
            staged.append([])
            filled = 0
        staged[-1].append(at)
        filled += one.nbytes
    made = []
    for groups, through_buffers in ((direct.values(), False), (staged, True)):
        for group in groups:
            boxes = boxes_of(found, group, positions)
            some = tuple(tensors[at] for at in group)
            made.append(Batch(some, payloads, boxes, planned(payloads, boxes), through_buffers, compare))
    return made


def undone_whole(catalog: Catalog) -> Array:
    """Return ``(T,)``: whether reading a part of a tensor requires decoding whole chunks."""
    parts = catalog.tensor[~codecs.UNDONE_WHOLE[catalog.codec]]
    return (np.diff(catalog.row_ptr) > 0) & (np.bincount(parts, minlength=len(catalog)) == 0)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order: its own memory if it is contiguous, otherwise a copy."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
