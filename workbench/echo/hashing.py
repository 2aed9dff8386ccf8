"""Fingerprints of live tensors, on any device and any mesh, equal to those of the same tensors in a file.

::

    plain tensor, every rank       hashed where it is, 4 MiB at a time
    DTensor                        plan.py: blocks on a single rank, there; others are assembled by one of their ranks
    all                            digests (16 bytes a block) are gathered, and combined on every rank

No tensor is gathered: only a few blocks are in memory, and only blocks that several ranks share are sent, once. Copies
(replicas, plain tensors on several ranks) are hashed separately to show where they differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from workbench.core.arrays import Array
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BlockDigests, combine
from workbench.core.ranks import Ranks
from workbench.core.scan import Progress
from workbench.echo.listing import Listing, gather_alike
from workbench.echo.plan import BlockPiece, Copy, Unit, copies, units
from workbench.load.boxes import HeldTensor
from workbench.load.exchange import device_of

if TYPE_CHECKING:
    import torch

WINDOW = 8  #: blocks that a rank assembles at a time
STEP = 16 << 20  #: bytes that come from a device at a time


class Content(NamedTuple):
    """The content of a tensor.

    Attributes:
        hex: its fingerprint, of the first copy if there are several.
        copies: rank (the first of those that hold a copy) → fingerprint, if copies differ; otherwise empty.
    """

    hex: str
    copies: dict[str, str]


def fingerprints(listing: Listing, ranks: Ranks, progress: Progress | None = None) -> dict[str, Content]:
    """Return the content of every readable tensor; every rank of the group calls it and gets the same result.

    Args:
        progress: called with the fraction done of the bytes that this rank holds.
    """
    import torch

    total, done = max(sum(one.nbytes for one in listing.held.values()), 1), 0

    def hashed(one: HeldTensor) -> None:
        nonlocal done
        done += one.nbytes
        if progress is not None:
            progress(done / total)

    with torch.no_grad():
        plain = {}
        for name, one in listing.held.items():
            if listing.rows[name].mesh is None and name not in listing.why:
                plain[name] = _whole(one)
                hashed(one)
        blocks = _sharded(listing, ranks, hashed)
    made: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, rank_hashes in enumerate(gather_alike(plain, ranks)):
        for name, found in rank_hashes.items():
            made[name][rank] = found
    digests: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
    for rank_blocks in ranks.gather(blocks):
        for key, some in rank_blocks.items():
            digests[key] |= some
    for (name, first), some in digests.items():
        row = listing.every[name]
        made[name][first] = combine(by_name(row.dtype), row.shape, [some[at] for at in sorted(some)]).hex
    found = {}
    for name, row in listing.every.items():
        own = made.get(row.tied or name)
        if own and name not in listing.why and (row.tied or name) not in listing.why:
            differ = len(set(own.values())) > 1
            found[name] = Content(own[min(own)], {str(r): h for r, h in sorted(own.items())} if differ else {})
    return found


def _whole(one: HeldTensor) -> str:
    """Return the fingerprint of a plain tensor."""
    dtype, local = by_name(str(one.local.dtype)), one.local
    hasher = BlockDigests()
    if local.is_contiguous():
        flat = local.reshape(-1)
        step = STEP // local.element_size()
        for at in range(0, flat.numel(), step):
            hasher.update(_bytes(flat[at : at + step]))
    else:
        for unit in units(copies(one.shape, (), (0,))[0], one.shape, local.element_size()):
            hasher.update(_together(local, unit, 0, {}))
    return combine(dtype, one.shape, hasher.digests()).hex


# ---- sharded ---------------------------------------------------------------------------------------------------------


def _sharded(
    listing: Listing, ranks: Ranks, hashed: Callable[[HeldTensor], None]
) -> dict[tuple[str, int], dict[int, bytes]]:
    """Return digests of the blocks that this rank hashes: ``(name, first rank of the copy)`` → block → digest.

    Copies are processed by their ranks and names, in the same order on all ranks: no two ranks wait for each other.
    """
    todo: dict[tuple[int, ...], list[tuple[str, Copy]]] = defaultdict(list)
    cut: dict[Any, list[Copy]] = {}
    for name in sorted(listing.held):
        row = listing.rows[name]
        if row.mesh is None or name in listing.why:
            continue
        key = row.shape, row.steps, row.mesh
        if key not in cut:
            cut = {key: copies(row.shape, row.steps, row.mesh)}  # neighbours in name often have the same layout
        for copy in cut[key]:
            if ranks.rank in copy.members:
                todo[copy.members].append((name, copy))
    found: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
    for members in sorted(todo):
        exchange = _Exchange(members, members.index(ranks.rank), ranks, found)
        for name, copy in todo[members]:
            found.setdefault((name, min(members)), {})
            one = listing.held[name]
            for unit in units(copy, one.shape, one.local.element_size()):
                exchange.add((name, min(members)), one.local, unit)
            hashed(one)
        exchange.flush()
    return found


class _Exchange:
    """Blocks of one group of ranks: blocks on a single rank are hashed, others wait until a window is full."""

    def __init__(
        self, members: tuple[int, ...], me: int, ranks: Ranks, found: dict[tuple[str, int], dict[int, bytes]]
    ) -> None:
        self._members, self._me, self._ranks, self._found = members, me, ranks, found
        self._open: list[tuple[tuple[str, int], torch.Tensor, Unit]] = []

    def add(self, key: tuple[str, int], local: torch.Tensor, unit: Unit) -> None:
        if any(piece.member != unit.owner for piece in unit.pieces):
            self._open.append((key, local, unit))
            if len(self._open) >= WINDOW * len(self._members):
                self.flush()
        elif unit.owner == self._me:
            self._hash(key, local, unit, {})

    def flush(self) -> None:
        """Send and receive the pieces of the window, and hash this rank's blocks."""
        import torch
        import torch.distributed as dist

        if not self._open:
            return
        group = self._ranks.group
        device = device_of(group)
        out: dict[int, list[torch.Tensor]] = defaultdict(list)
        coming: dict[int, int] = defaultdict(int)
        for _, local, unit in self._open:
            for piece in unit.pieces:
                if piece.member == self._me != unit.owner:
                    out[unit.owner].append(_flat(local[piece.source]).to(device))
                elif unit.owner == self._me != piece.member:
                    coming[piece.member] += piece.numel * local.element_size()
        sent = {peer: torch.cat(parts) for peer, parts in out.items()}
        received = {peer: torch.empty(count, dtype=torch.uint8, device=device) for peer, count in coming.items()}
        messages = []
        for make, buffers in ((dist.isend, sent), (dist.irecv, received)):
            for peer, buffer in sorted(buffers.items()):
                rank = dist.get_global_rank(group, self._members[peer])
                messages.append(dist.P2POp(make, buffer, rank, group))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        streams = {peer: _SentStream(buffer.cpu().numpy()) for peer, buffer in received.items()}
        for key, local, unit in self._open:
            if unit.owner == self._me:
                self._hash(key, local, unit, streams)
        self._open = []

    def _hash(self, key: tuple[str, int], local: torch.Tensor, unit: Unit, streams: Mapping[int, _SentStream]) -> None:
        self._found[key][unit.block] = xxhash.xxh3_128_digest(_together(local, unit, self._me, streams))


def _together(local: torch.Tensor, unit: Unit, me: int, streams: Mapping[int, _SentStream]) -> Array:
    """Join the bytes of a block from this rank's pieces and the received ones."""
    itemsize = local.element_size()
    if len(unit.pieces) == 1:
        return _bytes(local[unit.pieces[0].source])
    buffer = np.empty(unit.numel * itemsize, np.uint8)
    for piece in unit.pieces:
        own = piece.member == me
        data = _bytes(local[piece.source]) if own else streams[piece.member].take(piece.numel * itemsize)
        _place(buffer, data, piece, itemsize)
    return buffer


class _SentStream:
    """The bytes that a rank sent, piece after piece."""

    def __init__(self, data: Array) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> Array:
        self._at += count
        return self._data[self._at - count : self._at]


def _flat(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a part's elements, row-major, on its device."""
    import torch

    return part.contiguous().reshape(-1).view(torch.uint8)


def _bytes(part: torch.Tensor) -> Array:
    """Return the bytes of a part's elements, row-major, on the host, copied only if necessary."""
    found: Array = _flat(part).cpu().numpy()
    return found


def _place(buffer: Array, data: Array, piece: BlockPiece, itemsize: int) -> None:
    """Put a piece's bytes at their place in the block."""
    begin, count = piece.begin * itemsize, math.prod(piece.shape) * itemsize
    whole = buffer[begin : begin + count].reshape(*piece.shape, itemsize)
    part = whole[piece.dest]
    part[...] = data.reshape(part.shape)
