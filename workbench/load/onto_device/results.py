"""Tensors on a device while they are being filled: by bytes, by elements, and through a scratch buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from workbench.core.dtypes import DType, nbytes_of
from workbench.errors import DeviceMemoryError
from workbench.load.onto_device.loads import Load

Shape = tuple[int, ...]
#: Elements that are not cast are moved as these types, so every type takes the same path, bit for bit.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class DeviceResults:
    """Local tensors, planned first and allocated later.

    Attributes:
        sizes: bytes of each.
    """

    def __init__(self, shapes: Sequence[Shape], old: Sequence[DType], new: Sequence[DType]) -> None:
        """Create the results; ``old`` are the stored element types, ``new`` the requested ones.

        Raises:
            UnsupportedFormatError: this version of torch lacks a type that later versions have.
        """
        self._shapes = [_bytes_shape(s, one) if one.packed else s for s, one in zip(shapes, old, strict=True)]
        self._types = [_torch(one) for one in new]
        self._cast = [_torch(a) if a != b else None for a, b in zip(old, new, strict=True)]
        self.sizes = [_volume(s) * one.itemsize for s, one in zip(self._shapes, self._types, strict=True)]
        self._tensors: list[torch.Tensor] = []
        self._bytes: list[torch.Tensor] = []
        self._elements: list[torch.Tensor] = []
        self._scratch: torch.Tensor | None = None

    @classmethod
    def over(cls, tensors: Sequence[torch.Tensor], scratch: int) -> Self:
        """Return results that are in contiguous tensors already; ``scratch`` as in :meth:`allocate`."""
        made = cls([], [], [])
        made._cast = [None] * len(tensors)
        made._scratch = torch.empty(scratch, dtype=torch.uint8, device=tensors[0].device)
        made._bytes = [one.view(-1).view(torch.uint8) for one in tensors]
        made._elements = [one.view(CARRIERS[one.itemsize]) for one in tensors]
        return made

    def allocate(self, device: torch.device, *, scratch: int) -> None:
        """Allocate the memory, and ``scratch`` bytes on the device for loads that are not a run of bytes.

        Raises:
            DeviceMemoryError: the device has enough memory, but it is too fragmented.
        """
        try:
            self._scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
            for shape, dtype, cast in zip(self._shapes, self._types, self._cast, strict=True):
                one = _empty(shape, dtype, device)
                self._tensors.append(one)
                self._bytes.append(one.view(-1).view(torch.uint8))
                self._elements.append(one if cast is not None else one.view(CARRIERS[one.itemsize]))
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{device} has enough free memory, but it is too fragmented ({str(error).splitlines()[0]}); "
                "free tensors that you do not need and call torch.cuda.empty_cache()"
            ) from None

    def put(self, load: Load, host: torch.Tensor) -> None:
        """Queue the copies of one load, whose bytes are in ``host``."""
        cast = self._cast[load.local]
        if cast is None and load.dense:
            at = load.at * load.itemsize
            self._bytes[load.local][at : at + load.nbytes].copy_(host, non_blocking=True)
            return
        assert self._scratch is not None
        # one scratch buffer suffices: copies are queued in order, and the next copy into it follows this copy out of it
        scratch = self._scratch[: load.nbytes]
        scratch.copy_(host, non_blocking=True)
        elements = scratch.view(cast or CARRIERS[load.itemsize]).as_strided(load.sizes, load.source)
        self._elements[load.local].as_strided(load.sizes, load.dest, load.at).copy_(elements)

    def take(self) -> list[torch.Tensor]:
        """Return the tensors, which then belong to the caller."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def release(self) -> None:
        """Release all memory: a traceback keeps this object alive for as long as the error is held."""
        for one in (self._tensors, self._bytes, self._elements):
            one.clear()
        self._scratch = None


def _empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype is torch.complex32:  # torch warns on creation that such tensors support few operations
        return torch.empty(shape, dtype=CARRIERS[4], device=device).view(dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _torch(dtype: DType) -> Any:
    """Return the ``torch.dtype`` of a result; types that torch lacks become unsigned integers of the same size."""
    if dtype.torch_name is not None:
        return dtype.torch
    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[dtype.raw.itemsize]


def _bytes_shape(shape: Shape, dtype: DType) -> Shape:
    """Return the shape in bytes of a tensor whose elements share bytes; flat if the last axis is not a whole number of
    bytes.
    """
    if shape and shape[-1] % dtype.block == 0:
        return (*shape[:-1], nbytes_of(dtype, shape[-1]))
    return (nbytes_of(dtype, _volume(shape)),)


def _volume(shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64))
