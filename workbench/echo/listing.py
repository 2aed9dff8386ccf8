"""The tensors of every rank, exchanged between all ranks once: names, shapes, meshes and placements, no elements.

::

    rank 0   model.norm.weight   bfloat16 (4096,)   mesh (0, 1, 2, 3) of (4,), Shard(0)
    rank 1   as rank 0           equal lists are sent once, whatever the number of ranks
    rank 2   step                int64 ()           no mesh: all of it, as other ranks may have
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.core.dtypes import by_name
from workbench.core.mesh.placement import Placement
from workbench.core.ranks import Ranks
from workbench.errors import UsageError, WorkbenchError
from workbench.load.boxes import HeldTensor, held

if TYPE_CHECKING:
    import torch


class ListedTensor(NamedTuple):
    """One tensor of one rank.

    Attributes:
        mesh: ranks of its mesh in row-major order; ``None`` if it is a plain tensor.
        steps: one placement per mesh axis, with the axis' size.
        tied: name of the tensor whose memory it shares.
        why: why it cannot be read.
    """

    dtype: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...] | None
    steps: tuple[tuple[Placement, int], ...]
    tied: str | None
    why: str


@dataclass(frozen=True, eq=False)
class Listing:
    """The tensors of all ranks.

    Attributes:
        held: this rank's readable tensors, tied ones once.
        rows: the rows of this rank.
        ranks: the rows of each rank; equal ones are one object.
        every: name → row of the first rank that has it, in order.
        why: name → why it cannot be read, on any rank.
    """

    held: dict[str, HeldTensor]
    rows: dict[str, ListedTensor]
    ranks: list[dict[str, ListedTensor]]
    every: dict[str, ListedTensor]
    why: dict[str, str]


def list_all(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Listing:
    """List the tensors of all ranks; every rank of the group calls it."""
    own: dict[str, HeldTensor] = {}
    rows: dict[str, ListedTensor] = {}
    memories: dict[Any, str] = {}
    for name, tensor in tensors.items():
        rows[name] = _row(name, tensor, own, memories, ranks)
    gathered = gather_alike(rows, ranks)
    every: dict[str, ListedTensor] = {}
    why: dict[str, str] = {}
    by_list: dict[int, tuple[dict[str, ListedTensor], set[int]]] = {}
    for rank, theirs in enumerate(gathered):
        by_list.setdefault(id(theirs), (theirs, set()))[1].add(rank)
    holders: dict[tuple[str, ListedTensor], set[int]] = defaultdict(set)
    for theirs, who in by_list.values():
        for name, row in theirs.items():
            holders[name, row] |= who
    for theirs, who in by_list.values():
        for name, row in theirs.items():
            first = every.setdefault(name, row)
            if row.why:
                why.setdefault(name, row.why)
            elif (row.dtype, row.shape) != (first.dtype, first.shape):
                why.setdefault(
                    name,
                    f"is {first.dtype} {first.shape} on one rank and {row.dtype} {row.shape} on "
                    f"rank {min(who)}: shards that are not DTensors cannot be joined",
                )
            elif row.mesh is not None and not set(row.mesh) <= holders[name, row]:
                why.setdefault(
                    name,
                    "is placed differently on some ranks of its mesh, or some of these ranks are not in process_group",
                )
    return Listing(own, rows, gathered, every, why)


def gather_alike(value: Any, ranks: Ranks) -> list[Any]:
    """Gather a value from every rank; equal values are sent once and become one object."""
    if ranks.size == 1:
        return [value]
    data = pickle.dumps(value)
    digests = ranks.gather(hashlib.blake2b(data, digest_size=16).digest())
    first = digests.index(digests[ranks.rank]) == ranks.rank
    made = {digest: one for digest, one in zip(digests, ranks.gather(value if first else None), strict=True) if one}
    return [made.get(digest, type(value)()) for digest in digests]


def _row(
    name: str, tensor: torch.Tensor, own: dict[str, HeldTensor], memories: dict[Any, str], ranks: Ranks
) -> ListedTensor:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    try:
        if by_name(dtype).packed:
            raise UsageError(f"elements of {dtype} share bytes")
        one = held(name, tensor)
        mesh = _mesh(tensor, ranks) if one.steps else None
    except WorkbenchError as error:
        return ListedTensor(dtype, shape, None, (), None, str(error))
    tied = memories.setdefault(one.memory, name)
    if tied == name:
        own[name] = one
    return ListedTensor(dtype, shape, mesh, one.steps, None if tied == name else tied, "")


def _mesh(tensor: Any, ranks: Ranks) -> tuple[int, ...]:
    """Return the ranks of a DTensor's mesh, as numbered in the group."""
    import torch.distributed as dist

    found = tensor.device_mesh.mesh.flatten().tolist()
    if ranks.group is None or ranks.group is dist.group.WORLD:
        return tuple(found)
    members = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(ranks.group))}
    if not set(found) <= members.keys():
        raise UsageError("its mesh has ranks that are not in process_group")
    return tuple(members[rank] for rank in found)
