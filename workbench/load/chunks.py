"""Compressed chunks in a load with broadcast: one rank decompresses each and sends it to all ranks that need a part.

::

    chunk, rows 0:129     rank 0 needs rows 0:86 of it and rank 1 rows 86:129
                          rank 0 reads and decompresses it, sends 129 rows to rank 1; each takes its part

Equal boxes need not be equal chunks: without this, every rank would decompress whole chunks to use a few rows. Tensors
are processed in rounds, to limit each rank to STAGE bytes of chunks (or those of one tensor) at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.executors import in_order
from workbench.core.mesh.cut import Locals
from workbench.core.payload import Payloads
from workbench.core.ranks import Ranks
from workbench.core.region import Region
from workbench.core.storage import SourcePool
from workbench.core.transfer.arrays import planned
from workbench.load.boxes import HeldTensor, boxes_of
from workbench.load.exchange import WISH, exchange, share
from workbench.load.fill import STAGE, batches


class Handing:
    """This rank's tensors with such chunks; planned, not read."""

    def __init__(
        self, payloads: Payloads, found: Locals, positions: Ints, tensors: Sequence[HeldTensor], members: Sequence[int]
    ) -> None:
        """Take the arguments of :func:`batches`.

        Raises:
            HoleError: an element is not stored.
        """
        self._payloads = _Handed(payloads.catalog, payloads.pool)
        self._found, self._positions, self._tensors, self._members = found, positions, tensors, members
        regions = planned(payloads, boxes_of(found, members, positions))
        self._rows = np.flatnonzero(np.bincount(regions.row))

    def run(self, ranks: Ranks, threads: int) -> tuple[int, int]:
        """Read, send and fill on all ranks together; return the bytes read and received.

        Raises:
            OpenError: a chunk cannot be read, on this or another rank.
        """
        catalog = self._payloads.catalog
        rows = [
            (b"%d" % row, row, nbytes) for row, nbytes in zip(self._rows, catalog.chunk_nbytes[self._rows], strict=True)
        ]
        wishes = ranks.gather(np.array(rows, WISH))
        turn = _turns(catalog, np.concatenate(wishes)["tensor"])
        read = received = 0
        for now in range(int(turn.max(initial=-1)) + 1):
            sharing = share([one[turn[catalog.tensor[one["tensor"]]] == now] for one in wishes], ranks.rank)
            with ranks.together():
                with ThreadPoolExecutor(threads) as pool:
                    undone = in_order(pool, lambda row: np.array(self._payloads.region(row).load()), sharing.read)
                    chunks = dict(zip(sharing.read, undone, strict=True))
                read += int((catalog.stop - catalog.start)[sharing.read].sum())
                chunks |= {row: self._room(row) for coming in sharing.receive.values() for row in coming}
            received += exchange(sharing, {row: _held(chunk) for row, chunk in chunks.items()}, ranks)
            with ranks.together():
                self._payloads.chunks = chunks
                mine = [at for at in self._members if turn[self._positions[at]] == now]
                for batch in batches(self._payloads, self._found, self._positions, self._tensors, mine):
                    batch.run(threads)
        return read, received

    def _room(self, row: int) -> Array:
        catalog = self._payloads.catalog
        tensor = int(catalog.tensor[row])
        return np.empty(catalog.sizes[row, : catalog.ndim[tensor]], catalog.dtype_of(tensor).raw)


class _Handed(Payloads):
    """Payloads with some chunks already in memory."""

    def __init__(self, catalog: Catalog, pool: SourcePool) -> None:
        super().__init__(catalog, pool)
        self.chunks: dict[int, Array] = {}

    def region(self, row: int) -> Region:
        found = self.chunks.get(row)
        return super().region(row) if found is None else Region.of(found)


def _turns(catalog: Catalog, rows: Ints) -> Ints:
    """Return ``(T,)``: the round in which each tensor is read, based on the bytes of its requested chunks."""
    wanted = np.flatnonzero(np.bincount(rows, minlength=catalog.chunks))
    nbytes = np.bincount(catalog.tensor[wanted], catalog.chunk_nbytes[wanted], len(catalog))
    turn = np.where(nbytes > 0, np.cumsum(nbytes) // STAGE, -1)
    return np.asarray(np.unique(turn, return_inverse=True)[1] - int((turn < 0).any()), np.int64)


def _held(chunk: Array) -> HeldTensor:
    import torch

    flat = torch.from_numpy(chunk.reshape(-1).view(np.uint8))
    return HeldTensor("", flat, tuple(flat.shape))
