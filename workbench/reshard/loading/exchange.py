"""Replicas: what several ranks want is read by one of them and sent to the others.

::

    HSDP 2×2      rank 0, 2 want rows 0:4   ─▶  rank 0 reads some of these tensors, rank 2 the others,
                  rank 1, 3 want rows 4:8       about as many bytes each; then they send each other what they read
    step s        rank r sends to r + s and receives from r − s, in messages of at most MESSAGE bytes

Two buffers of one message are all the memory that it takes. Which rank reads what is told from what all ranks want,
in the same way on each. The trick is ByteCheckpoint's and MegaScale's (redundant reads of DP replicas eliminated).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UsageError
from workbench.reshard.layouts.cut import Locals
from workbench.reshard.loading.boxes import Held
from workbench.reshard.loading.fill import flat
from workbench.reshard.loading.ranks import Ranks

if TYPE_CHECKING:
    import torch

__all__ = ["Sharing", "describe", "device_of", "exchange", "share"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
MESSAGE = 32 << 20  #: bytes
WISH = np.dtype([("digest", "S16"), ("tensor", "<i8"), ("nbytes", "<i8")])


@dataclass(frozen=True)
class Sharing:
    """One rank's part.

    Attributes:
        read: tensors that it reads itself.
        send, receive: for each other rank the tensors that are exchanged with it, in the order of the messages.
    """

    read: list[int]
    send: dict[int, list[int]]
    receive: dict[int, list[int]]


def describe(found: Locals, positions: Ints, nbytes: Ints, members: Sequence[int]) -> Array:
    """What a rank wants, one row a tensor that is not empty: equal digests are equal elements in equal order.

    The second tensor of the same elements counts as another one.
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
        rows.append((digest.digest() + b"\x01", tensor, nbytes[tensor]))  # numpy drops zeros at the end of a text
    return np.array(rows, WISH)


def share(wishes: Sequence[Array], rank: int) -> Sharing:
    """Who reads what, the same on every rank: of those that want it, the one with the fewest bytes so far.

    Args:
        wishes: of every rank.
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
    rows = rows[np.lexsort((who[rows], group[rows], -every["nbytes"][rows]))]  # the largest first
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


def exchange(sharing: Sharing, tensors: Sequence[Held] | Mapping[int, Held], ranks: Ranks) -> int:
    """Send what was read and fill what others read. Returns the bytes received.

    Args:
        tensors: by the numbers that they have in ``sharing``.

    Raises:
        UsageError: tensors of the host in a group that moves those of devices only.
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
        out = _Stream([tensors[at] for at in sharing.send.get(to, [])])
        into = _Stream([tensors[at] for at in sharing.receive.get(source, [])])
        while out.left or into.left:
            sent, coming = buffers[0, : min(out.left, MESSAGE)], buffers[1, : min(into.left, MESSAGE)]
            messages = []
            if len(sent):
                out.move(sent, fill_tensors=False)
                messages.append(dist.P2POp(dist.isend, sent, dist.get_global_rank(ranks.group, to), ranks.group))
            if len(coming):
                peer = dist.get_global_rank(ranks.group, source)
                messages.append(dist.P2POp(dist.irecv, coming, peer, ranks.group))
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            into.move(coming, fill_tensors=True)
            received += len(coming)
    return received


class _Stream:
    """The bytes of tensors one after the other, moved to or from buffers piece by piece."""

    def __init__(self, tensors: Sequence[Held]) -> None:
        self._tensors = [one.local for one in tensors]
        self.left = sum(one.nbytes for one in tensors)
        self._number, self._at = 0, 0
        self._bytes: torch.Tensor | None = None

    def move(self, buffer: torch.Tensor, *, fill_tensors: bool) -> None:
        """The next bytes, as many as the buffer has."""
        done = 0
        while done < len(buffer):
            tensor = self._tensors[self._number]
            if self._bytes is None:
                self._bytes = flat(tensor)
            count = min(len(buffer) - done, len(self._bytes) - self._at)
            here, there = self._bytes[self._at : self._at + count], buffer[done : done + count]
            if fill_tensors:
                here.copy_(there)
            else:
                there.copy_(here)
            done, self._at = done + count, self._at + count
            if self._at == len(self._bytes):
                if fill_tensors and not tensor.is_contiguous():
                    tensor.copy_(self._bytes.view(tensor.dtype).reshape(tensor.shape))
                self._number, self._at, self._bytes = self._number + 1, 0, None
        self.left -= len(buffer)


def device_of(group: Any) -> torch.device:
    """Where messages of a group have to lie."""
    import torch
    import torch.distributed as dist

    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if backends.get("cuda") == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu" in backends:
        return torch.device("cpu")
    raise UsageError(f"messages over a group for {', '.join(backends)}: give a gloo or NCCL group")
