"""Replicas: data that several ranks need is read by one of them and sent to the others.

::

    HSDP 2×2      rank 0, 2 need rows 0:4   ─▶  rank 0 reads some of these tensors, rank 2 the others,
                  rank 1, 3 need rows 4:8       about as many bytes each; then they send each other what they read
    step s        rank r sends to r + s and receives from r − s, in messages of up to MESSAGE bytes

The exchange needs only two message buffers of memory. Every rank computes which rank reads what, from the requests of
all ranks. The technique is ByteCheckpoint's and MegaScale's (eliminating redundant reads of DP replicas).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.arrays import Array, Ints
from workbench.core.mesh.cut import Locals
from workbench.core.ranks import Ranks
from workbench.errors import UsageError
from workbench.load.boxes import HeldTensor
from workbench.load.fill import flat

if TYPE_CHECKING:
    import torch

MESSAGE = 32 << 20  #: bytes
WISH = np.dtype([("digest", "S16"), ("tensor", "<i8"), ("nbytes", "<i8")])


@dataclass(frozen=True)
class Sharing:
    """One rank's part of the exchange.

    Attributes:
        read: tensors that this rank reads itself.
        send, receive: for each other rank, the tensors exchanged with it, in message order.
    """

    read: list[int]
    send: dict[int, list[int]]
    receive: dict[int, list[int]]


def describe(found: Locals, positions: Ints, nbytes: Ints, members: Sequence[int]) -> Array:
    """Describe what a rank needs, one row per non-empty tensor: equal digests mean equal elements in equal order.

    A second tensor with the same elements counts as a different one.
    """
    seen: dict[bytes, int] = defaultdict(int)
    rows = []
    wanted = set(members)
    for at, tensor in enumerate(found.tensor.tolist()):
        if tensor not in wanted or not nbytes[tensor]:
            continue
        boxes = slice(found.ptr[at], found.ptr[at + 1])
        digest = hashlib.blake2b(positions[tensor].tobytes(), digest_size=15)
        for column in (found.offsets, found.sizes, found.at, found.strides):
            digest.update(np.ascontiguousarray(column[boxes]).tobytes())
        key = digest.digest()
        digest.update(seen[key].to_bytes(8, "little"))
        seen[key] += 1
        rows.append((digest.digest() + b"\x01", tensor, nbytes[tensor]))  # numpy drops zeros at the end of a string
    return np.array(rows, WISH)


def share(wishes: Sequence[Array], rank: int) -> Sharing:
    """Decide which rank reads what: among those that need it, the one with the fewest bytes so far.

    The result is the same on every rank.

    Args:
        wishes: the requests of every rank.
    """
    every = np.concatenate(wishes)
    who = np.repeat(np.arange(len(wishes)), [len(one) for one in wishes])
    _, group, count = np.unique(every["digest"], return_inverse=True, return_counts=True)
    alone = count[group] == 1
    load = np.bincount(who[alone], every["nbytes"][alone], len(wishes))
    read = every["tensor"][alone & (who == rank)].tolist()
    send: dict[int, list[int]] = defaultdict(list)
    receive: dict[int, list[int]] = defaultdict(list)
    rows = np.flatnonzero(~alone)
    rows = rows[np.lexsort((who[rows], group[rows], -every["nbytes"][rows]))]  # largest first
    for members in np.split(rows, np.flatnonzero(np.diff(group[rows])) + 1) if len(rows) else []:
        ranks = who[members]
        reader = int(ranks[np.argmin(load[ranks])])
        load[reader] += every["nbytes"][members[0]]
        if rank not in ranks:
            continue
        mine = int(every["tensor"][members[ranks == rank][0]])
        if reader == rank:
            read.append(mine)
            for other in ranks[ranks != rank].tolist():
                send[other].append(mine)
        else:
            receive[reader].append(mine)
    return Sharing(sorted(read), dict(send), dict(receive))


def exchange(sharing: Sharing, tensors: Sequence[HeldTensor] | Mapping[int, HeldTensor], ranks: Ranks) -> int:
    """Send what this rank read and fill what others read; return the bytes received.

    Args:
        tensors: indexed by their numbers in ``sharing``.

    Raises:
        UsageError: host tensors in a process group that supports only device tensors.
    """
    import torch
    import torch.distributed as dist

    device = device_of(ranks.group)
    if not sharing.send and not sharing.receive:
        return 0
    buffers = torch.empty(2, MESSAGE, dtype=torch.uint8, device=device)
    received = 0
    for step in range(1, ranks.size):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        sent, coming = (
            [tensors[at] for at in one.get(peer, [])] for one, peer in ((sharing.send, to), (sharing.receive, source))
        )
        left = [sum(one.nbytes for one in many) for many in (sent, coming)]
        pack, unpack = _moving(sent, fill=False), _moving(coming, fill=True)
        next(pack), next(unpack)
        while any(left):
            out, into = (buffer[: min(size, MESSAGE)] for buffer, size in zip(buffers, left, strict=True))
            left = [left[0] - len(out), left[1] - len(into)]
            messages = []
            if len(out):
                pack.send(out)
                messages.append(dist.P2POp(dist.isend, out, dist.get_global_rank(ranks.group, to), ranks.group))
            if len(into):
                messages.append(dist.P2POp(dist.irecv, into, dist.get_global_rank(ranks.group, source), ranks.group))
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            if len(into):
                unpack.send(into)
            received += len(into)
    return received


def _moving(tensors: Iterable[HeldTensor], *, fill: bool) -> Generator[None, torch.Tensor, None]:
    """Copy the bytes of tensors, one after the other, to each buffer that is sent here; with ``fill``, from it."""
    buffer, done = (yield), 0
    for one in tensors:
        whole, at = flat(one.local), 0
        while at < len(whole):
            if done == len(buffer):
                buffer, done = (yield), 0
            count = min(len(buffer) - done, len(whole) - at)
            here, there = whole[at : at + count], buffer[done : done + count]
            (here if fill else there).copy_(there if fill else here)
            at, done = at + count, done + count
        if fill and not one.local.is_contiguous():
            one.local.copy_(whole.view(one.local.dtype).reshape(one.local.shape))
    yield


def device_of(group: Any) -> torch.device:
    """Return the device on which a group's messages must be."""
    import torch
    import torch.distributed as dist

    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if backends.get("cuda") == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu" in backends:
        return torch.device("cpu")
    raise UsageError(
        f"cannot exchange tensors over a process group with backend {', '.join(backends)}: pass a gloo or NCCL group"
    )
