"""Check that a device has room before anything is allocated on it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

from workbench.core.words import plural
from workbench.errors import DeviceMemoryError

BLOCK = 512  #: bytes: the rounding of torch's CUDA allocator (``c10/cuda/CUDACachingAllocator.cpp``, 2.13)


def check_room(device: torch.device, results: Iterable[int], scratch: int) -> int:
    """Return the bytes that tensors of ``results`` bytes each take on a device, without ``scratch``.

    Raises:
        DeviceMemoryError: they and ``scratch`` exceed the free memory; the message has the numbers. Devices that do not
            report free memory are not checked.
    """
    count, needed = 0, 0
    for nbytes in results:
        count, needed = count + 1, needed + -(-nbytes // BLOCK) * BLOCK
    free = _free(device)
    if free is not None and needed + scratch > free:
        raise DeviceMemoryError(
            f"{plural(count, 'tensor', 'need')} {plural(needed, 'byte')} and {plural(scratch, 'byte')} of "
            f"scratch on {device}, which has {free:,} "
            f"free: {needed + scratch - free:,} too few; select fewer tensors, cast with dtype=, or shard with mesh="
        )
    return needed


def reserve(device: torch.device, nbytes: int) -> None:
    """Request the memory of many tensors from the driver at once: each request takes longer than copying a small
    tensor.

    torch keeps the block and cuts the tensors from it. (transformers 5 does so too: ``caching_allocator_warmup``.)
    """
    if device.type == "cuda":
        with suppress(torch.OutOfMemoryError):  # free, but not in one piece
            torch.empty(nbytes, dtype=torch.uint8, device=device)


def _free(device: torch.device) -> int | None:
    """Return the bytes that can be allocated; ``None`` if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type == "cpu":
        try:
            with open("/proc/meminfo") as lines:
                return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):  # not Linux
            return None
    return None
