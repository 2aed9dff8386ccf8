"""Copies of a state dict for an asynchronous save, in reusable buffers, with digests of the copy.

::

    async_save ──► stage: live state ─copy, hash─► buffers, digests         the training waits for this
                   upload: buffers ─hash─► compared, then written           in a thread or another process

Host memory is copied and hashed piece by piece, while a piece is in the processor's cache, which takes little more than
the copy alone. What a GPU copies is hashed group by group, while it copies the next ones.

A buffer is free again once the state dict that was staged in it is released. While all are in use, a save gets
fresh memory, which costs a page fault for every 4 KiB, which takes longer than the copy.

Source: torch 2.13 ``distributed/checkpoint/staging.py`` (``BlockingAsyncStager``),
``distributed/_state_dict_utils.py``.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from workbench.core.arrays import Array
from workbench.core.executors import cores
from workbench.core.fingerprint import BlockDigests
from workbench.core.transfer.streams import BLOCK
from workbench.dcp.datafile import bytes_of
from workbench.errors import WriteError

COPIED = 16 << 20  #: bytes that are copied from a device at a time to be hashed
PART = 4 * BLOCK  #: bytes that one thread hashes; whole blocks
PIECE = 1 << 20  #: bytes that are copied, then hashed; they fit into the cache of a core
GROUP = 32 << 20  #: bytes from a GPU that are waited for together

#: by fqn: bytes of the local tensor, the digests of its blocks, and its address, 0 if it is not contiguous there
Digests = Mapping[str, tuple[int, list[bytes], int]]


class _StagedState(dict[str, Any]):
    """A staged state dict; its buffers are in use as long as it lives."""


class _Pool:
    """Buffers of this process, by the structure of the state dicts that they hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[Any, list[dict[str, Any]]] = {}

    def take(self, key: Any) -> dict[str, Any] | None:
        with self._lock:
            free = self._free.get(key)
            return free.pop() if free else None

    def lend(self, key: Any, buffer: dict[str, Any], staged: _StagedState, limit: int) -> None:
        """Reclaim the buffer when ``staged`` is released; up to ``limit`` buffers are kept per structure."""
        weakref.finalize(staged, self._back, key, buffer, limit).atexit = False

    def _back(self, key: Any, buffer: dict[str, Any], limit: int) -> None:
        with self._lock:
            for other in [one for one in self._free if one != key]:
                del self._free[other]  # the structure of the trainer's state has changed
            free = self._free.setdefault(key, [])
            if len(free) < limit:
                free.append(buffer)


_POOL = _Pool()


class _Group:
    """Copies from a GPU that are waited for together; ``event`` is behind the last one."""

    nbytes = 0
    event: Any = None


class _Copies:
    """What happens to the buffers of a staged state dict, by address.

    Attributes:
        sources: buffers in host memory, with the tensors that are copied to them when they are hashed.
    """

    def __init__(self, *, hashed: bool) -> None:
        self.sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hashed = hashed
        self._groups: dict[int, _Group] = {}
        self._open: dict[torch.device, _Group] = {}

    def fill(self, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; bytes in host memory, in the same order, are left to the pass that hashes."""
        if value.is_cuda:
            buffer.copy_(value, non_blocking=True)
            group = self._groups[buffer.data_ptr()] = self._open.setdefault(value.device, _Group())
            group.nbytes += buffer.nbytes
            if group.nbytes >= GROUP:
                self._close(value.device)
        elif self._hashed and type(value) is torch.Tensor and _is_bytes(value) and value.numel():
            self.sources[buffer.data_ptr()] = buffer, value
        else:
            buffer.copy_(value)
        return buffer

    def close(self) -> None:
        """Call this after the last copy."""
        for device in list(self._open):
            self._close(device)

    def wait(self, address: int) -> None:
        """Return once a buffer is filled, if a GPU fills it."""
        if (group := self._groups.get(address)) is not None:
            group.event.synchronize()

    def _close(self, device: torch.device) -> None:
        event = torch.cuda.Event(blocking=True)  # waiting must not take a core from the threads that hash
        event.record(torch.cuda.current_stream(device))
        self._open.pop(device).event = event


def stage(
    state_dict: Mapping[str, Any], *, buffers: int, hashed: bool, echo: bool
) -> tuple[_StagedState, Digests, frozenset[str]]:
    """Copy a state dict to host memory.

    Args:
        buffers: number of copies whose memory is kept for later saves.
        hashed: compute the digests of the copy.
        echo: hash the tensors of the trainer before, too.

    Returns:
        the copy, its digests, and, with ``echo``, the names of the tensors that are equal to the trainer's.

    Raises:
        WriteError: a copy differs from the trainer's tensor.
    """
    devices = devices_of(state_dict)
    if echo:
        wait_for(devices)
    live = digests_of(state_dict, device=True) if echo else {}
    key = tuple(_structure(state_dict))
    buffer = _POOL.take(key)
    if buffer is None:
        buffer = _buffers(state_dict)
    copies = _Copies(hashed=hashed)
    staged = _StagedState(_copied(state_dict, buffer, copies))
    copies.close()
    if buffers:
        _POOL.lend(key, buffer, staged, buffers)
    digests = digests_of(staged, copies=copies) if hashed else {}  # while the copies from a GPU are in progress
    wait_for(devices)
    for kept, value in copies.sources.values():  # in an object that is pickled, such as a tuple: it has no digest
        kept.copy_(value)
    for name, (nbytes, blocks, _) in live.items():
        if name in digests and digests[name][:2] != (nbytes, blocks):
            raise WriteError(
                f"tensor {name!r}: the staged copy differs from the trainer's; nothing was written. It was "
                "changed in the meantime, or memory is damaged"
            )
    return staged, digests, frozenset(live.keys() & digests.keys())


def devices_of(value: Any) -> set[torch.device]:
    """Return the GPUs that hold tensors of a state dict."""
    if isinstance(value, Mapping):
        return set().union(*map(devices_of, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(devices_of, value))
    if isinstance(value, ShardedTensor):
        return devices_of([one.tensor for one in value.local_shards()])
    return {value.device} if isinstance(value, torch.Tensor) and value.device.type == "cuda" else set()


def wait_for(devices: Iterable[torch.device]) -> None:
    """Return once all that is queued on these GPUs is done. Threads of ours do not share the caller's stream."""
    for device in devices:
        torch.cuda.synchronize(device)


def digests_of(
    state_dict: Mapping[str, Any],
    *,
    device: bool = False,
    copies: _Copies | None = None,
) -> Digests:
    """Return the digests of every local tensor, by the name that the planner gives it.

    Args:
        device: hash tensors on a device, too; they are copied, some MiB at a time.
        copies: how the tensors are filled; those that are copied here are removed from it.
    """
    copies = copies or _Copies(hashed=False)
    found = _local_tensors(flatten_state_dict(dict(state_dict))[0])
    tensors = {name: local for name, local in found if device or local.device.type == "cpu"}
    jobs = [(name, job) for name, local in tensors.items() for job in _jobs(local, copies)]
    blocks: dict[str, list[bytes]] = {name: [] for name in tensors}
    with ThreadPoolExecutor(cores(), thread_name_prefix="workbench-stage") as pool:
        for (name, _), digests in zip(jobs, pool.map(lambda one: one[1](), jobs), strict=True):
            blocks[name] += digests
    return {name: (one.nbytes, blocks[name], one.data_ptr() * one.is_contiguous()) for name, one in tensors.items()}


def _local_tensors(flat: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of a flat state dict, and the local ones of DTensors."""
    for name, value in flat.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        plain = type(local) is torch.Tensor or type(local) is torch.nn.Parameter
        if plain and local.layout == torch.strided:
            yield name, local


def _buffers(value: Any) -> Any:
    """Allocate memory for the tensors of a state dict, in the same nesting."""
    if isinstance(value, Mapping):
        return {name: _buffers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_buffers(one) for one in value]
    if isinstance(value, DTensor):  # torch 2.6 takes the live tensor itself for its copy, 2.13 does so for scalars
        made = value.detach().clone().to("cpu")
        made._local_tensor = _empty(value.to_local())
        return made
    if isinstance(value, ShardedTensor):
        return _create_cpu_state_dict({"": value})[""]
    return _empty(value) if _is_strided(value) else None


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


def _copied(value: Any, buffer: Any, copies: _Copies) -> Any:
    """Copy tensors into their buffers, and other values as a whole."""
    if not _has_tensors(value):
        return copy.deepcopy(value)
    if isinstance(value, Mapping):
        return {name: _copied(one, buffer[name], copies) for name, one in value.items()}
    if isinstance(value, list | tuple):
        made = [_copied(one, inner, copies) for one, inner in zip(value, buffer, strict=True)]
        if isinstance(value, tuple):
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        return made
    if isinstance(value, DTensor):
        copies.fill(buffer._local_tensor, value.to_local().detach())
        return buffer
    if isinstance(value, ShardedTensor):
        return _copy_state_dict({"": value}, {"": buffer}, type_check=False)[""]
    if _is_strided(value):
        return copies.fill(buffer, value.detach())
    return value.detach().to("cpu", copy=True)


def _has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a container that has one."""
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor | ShardedTensor)


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values follow each other in memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _jobs(tensor: torch.Tensor, copies: _Copies) -> Iterator[Callable[[], list[bytes]]]:
    """Yield functions that return the digests of a tensor's blocks, part by part."""
    if not _is_bytes(tensor):
        yield partial(_hashed, tensor)
        return
    address = tensor.data_ptr()
    flat, source = bytes_of(tensor), copies.sources.pop(address, None)
    given = None if source is None else bytes_of(source[1])
    for at in range(0, len(flat), PART):
        part = None if given is None else given[at : at + PART]
        yield partial(_filled, flat[at : at + PART], part, partial(copies.wait, address))


def _filled(flat: Array, source: Array | None, wait: Callable[[], None]) -> list[bytes]:
    """Hash bytes, after copying them from ``source``, if given."""
    hasher = BlockDigests()
    wait()
    if source is None:
        hasher.update(flat)
        return hasher.digests()
    for at in range(0, len(flat), PIECE):
        piece = flat[at : at + PIECE]
        piece[:] = source[at : at + PIECE]
        hasher.update(piece)
    return hasher.digests()


def _hashed(tensor: torch.Tensor) -> list[bytes]:
    hasher, flat = BlockDigests(), tensor.detach().contiguous().reshape(-1)
    step = max(COPIED // flat.element_size(), 1) if flat.device.type != "cpu" else max(flat.numel(), 1)
    for start in range(0, flat.numel(), step):
        hasher.update(bytes_of(flat[start : start + step].cpu()))
    return hasher.digests()


def _structure(value: Any, path: str = "") -> Iterator[Any]:
    """Yield the structure that two state dicts must have in common to share a buffer."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _structure(one, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        yield path, type(value), len(value)
        for at, one in enumerate(value):
            yield from _structure(one, f"{path}.{at}")
    elif isinstance(value, DTensor):
        yield path, value.dtype, tuple(value.shape), value.placements, value.device_mesh, tuple(value.to_local().shape)
    elif isinstance(value, torch.Tensor):
        yield path, type(value), value.dtype, tuple(value.shape)
    else:
        yield path, type(value)
