"""Carry out a plan in memory: the local tensors of every rank, from the bytes of the checkpoint's files."""

from __future__ import annotations

import numpy as np
import torch

from workbench.core.mesh.layout import Steps
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Only, PartedShard, Replicate, Shard, StridedShard
from workbench.core.payload import Payloads
from workbench.export.sharding.target import Planned


def dense_piece(tensor: torch.Tensor, steps: Steps, mesh: Mesh, rank: int) -> torch.Tensor | None:
    """What a rank holds of a whole tensor, by placing it axis after axis with ``torch.chunk``; ``None`` for nothing."""
    coordinate = mesh.coordinate(rank)
    for axis, placement in steps:
        count, at = mesh.size(axis), coordinate[axis]
        match placement:
            case Replicate():
                pass
            case Only(coordinates):
                if at not in coordinates:
                    return None
            case Shard(dim):
                tensor = _chunk(tensor, dim, count, at)
            case StridedShard(dim, parts):
                tensor = torch.cat([_chunk(part, dim, count, at) for part in tensor.chunk(parts, dim)], dim)
            case PartedShard(dim, sizes):
                tensor = torch.cat([_chunk(part, dim, count, at) for part in tensor.split(list(sizes), dim)], dim)
            case _:
                raise AssertionError(f"no dense reference for {placement}")
    return tensor.contiguous()


def _chunk(tensor: torch.Tensor, dim: int, count: int, at: int) -> torch.Tensor:
    parts = tensor.chunk(count, dim)
    return parts[at] if at < len(parts) else tensor.narrow(dim, 0, 0)


def assembled(payloads: Payloads, planned: Planned) -> dict[tuple[int, int], np.ndarray]:
    """Local tensors by ``(tensor, rank)`` in the raw types of ``payloads``' catalog; every element written once."""
    found, reads = planned
    catalog = payloads.catalog
    owner = found.owner
    buffers = [np.zeros(int(n), np.uint64) for n in found.numel]
    written = [np.zeros(int(n), np.int64) for n in found.numel]
    itemsize: dict[int, np.dtype] = {}
    places = [(int(catalog.file[row]), int(catalog.start[row])) for row in reads.row]
    assert places == sorted(places), "not in the order of the files"
    for step, (request, row) in enumerate(zip(reads.request.tolist(), reads.row.tolist(), strict=True)):
        local, dims = int(owner[request]), int(catalog.ndim[catalog.tensor[row]])
        source = payloads.array(row)
        low, size = reads.source[step, :dims].tolist(), reads.sizes[step, :dims].tolist()
        piece = source[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
        itemsize[local] = piece.dtype
        begin = int(found.at[request] + (reads.dest[step] * found.strides[request]).sum())
        steps = tuple(8 * s for s in found.strides[request, :dims].tolist())
        view = np.lib.stride_tricks.as_strided(buffers[local][begin:], piece.shape, steps)
        view[...] = piece
        np.lib.stride_tricks.as_strided(written[local][begin:], piece.shape, steps)[...] += 1
    assert all((one == 1).all() for one in written), "an element is written not once"
    return {
        (int(found.tensor[k]), int(found.rank[k])): buffers[k]
        .astype(itemsize.get(k, np.uint8))
        .reshape(found.shape[k, : found.ndim[k]])
        for k in range(len(found))
    }
