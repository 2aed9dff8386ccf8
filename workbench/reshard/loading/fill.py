"""Read a rank's boxes into its tensors: straight where the host's memory is in order, else through a buffer.

::

    host, contiguous        file ──pread──▶ tensor
    device, or strided      file ──pread──▶ buffer of the host ──copy_──▶ tensor          at most STAGE bytes at a time
    tied to another tensor  file ──pread──▶ buffer … compared with what the other one brought
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core import memory
from workbench.core.gather import Filling
from workbench.core.payload import Payloads
from workbench.errors import UsageError
from workbench.reshard.layouts.cut import Locals
from workbench.reshard.loading.boxes import Held, boxes_of

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "batches", "flat"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
STAGE = 256 << 20  #: bytes of the host that tensors elsewhere are read through; a larger tensor goes alone


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors that are read in one go; planned, not read.

    Attributes:
        staged: through buffers of their own.
        compare: instead of copying out of the buffers, insist on what is there already.
    """

    tensors: tuple[Held, ...]
    filling: Filling
    staged: bool
    compare: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(one.nbytes for one in self.tensors)

    def run(self, threads: int, tick: Callable[[int], None] | None = None) -> int:
        """Read; returns the bytes asked of the files.

        Raises:
            UsageError: tied tensors that are stored with different values; else as :meth:`Filling.run`.
        """
        if not self.staged:
            return self.filling.run([flat(one.local).numpy() for one in self.tensors], threads=threads, tick=tick)
        buffers = [memory.empty((one.nbytes,), np.dtype(np.uint8)) for one in self.tensors]
        count = self.filling.run(buffers, threads=threads, tick=tick)
        import torch

        for one, buffer in zip(self.tensors, buffers, strict=True):
            new = torch.from_numpy(buffer).view(one.local.dtype).reshape(one.local.shape)
            if not self.compare:
                one.local.copy_(new)
            elif not torch.equal(flat(one.local).cpu(), flat(new)):
                raise UsageError(
                    f"tensor {one.name!r} shares its memory with another one, but is stored with other values; "
                    "load into a model that does not tie them, or leave one of them out"
                )
        return count


def batches(
    payloads: Payloads, found: Locals, positions: Ints, tensors: Sequence[Held],
    members: Sequence[int], *, compare: bool = False,
) -> list[Batch]:  # fmt: skip
    """Plan the reads of some of the tensors.

    Args:
        found: the boxes of all tensors.
        positions: of all tensors in the catalog.
        members: which of them.

    Raises:
        HoleError: some element is stored nowhere.
    """
    groups: list[tuple[bool, list[int]]] = []
    if straight := [at for at in members if tensors[at].straight and not compare]:
        groups.append((False, straight))
    filled = STAGE + 1
    for at in members:
        if tensors[at].straight and not compare:
            continue
        if filled + tensors[at].nbytes > STAGE:
            groups.append((True, []))
            filled = 0
        groups[-1][1].append(at)
        filled += tensors[at].nbytes
    return [
        Batch(
            tuple(tensors[at] for at in group),
            Filling.plan(payloads, boxes_of(found, group, positions)),
            staged, compare,
        )
        for staged, group in groups
    ]  # fmt: skip


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order: its own memory where it is contiguous, else a copy."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
