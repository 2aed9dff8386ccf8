"""Load a checkpoint of any readable format into the live tensors of a job, whatever its ranks and mesh were.

::

    state dict ─names─▶ stored tensors ─placements─▶ this rank's boxes ─plan─▶ bytes, straight into its tensors
                        │                            │
                        all ranks compare            broadcast: of equal boxes each is read by one rank, and sent

Until every rank has found what it asks for, of the right shape and type and without holes, no tensor is touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint, open
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.scan import Tick, cores
from workbench.core.storage import SourcePool
from workbench.errors import UsageError
from workbench.namemap import NameMap
from workbench.reshard.cut import Locals
from workbench.reshard.load_boxes import Held, cut_held, held
from workbench.reshard.load_check import Told, agree
from workbench.reshard.load_exchange import describe, exchange, share
from workbench.reshard.load_fill import Batch, batches
from workbench.reshard.load_names import Leaf, Renaming, Stored, find_object, flatten, is_plain, renamed
from workbench.reshard.load_ranks import Ranks
from workbench.reshard.load_report import LoadReport

__all__ = ["load"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


def load(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    strict: bool = True,
    process_group: Any = None,
    name_map: Renaming | NameMap | None = None,
    broadcast: bool = False,
    threads: int | None = None,
    tick: Tick | None = None,
) -> LoadReport:
    """Fill the tensors of a state dict in place, bit for bit, each rank reading what it holds and no more.

    In a distributed job every rank of the group calls it; an error on one is raised on all. Errors that are found
    before reading leave every tensor as it was; one while reading (a file that is cut or lost meanwhile) does not.

    Args:
        state_dict: names to tensors and DTensors of any mesh and placements, on any device; also nested, as
            ``get_state_dict`` gives it. Other values are placeholders: see the report's ``objects``.
        path: a checkpoint's folder or file, or an open one (with ``partial=True``, say).
        strict: whether a name that the checkpoint lacks, a tensor of another shape or type, and a stored tensor that
            nobody asked for are errors; else they are listed in the report, and nothing is ever cast.
        process_group: the ranks that load together; by default all, where ``torch.distributed`` is initialised.
        name_map: where names differ: name → key, as a mapping (others keep theirs) or a function, or a
            :class:`NameMap` from the checkpoint to one of the model's names.
        broadcast: read equal boxes of several ranks once, and send them over the network.
        threads: how many read side by side; by default as many as this process may use cores, at most 8.
        tick: told the share of tensors' bytes that this rank has read, in the caller's thread; raising there ends it.

    Raises:
        TensorNotFoundError, UsageError: missing, mismatched and unexpected names, up to eight of each.
        UsageError: a tensor that cannot be filled (``Partial``, meta, expanded); ranks that open other checkpoints.
        HoleError: an element that is wanted is stored nowhere.
        OpenError: the checkpoint cannot be opened or read.
    """
    began = time.perf_counter()
    ranks = Ranks(process_group)
    with ranks.together():
        asked = _Asked.of(state_dict, path, name_map)
    unexpected = agree(ranks, asked.told(strict=strict, broadcast=broadcast), asked.stored)

    mine = asked.primary
    sharing = None
    if broadcast and ranks.size > 1:
        wishes = ranks.gather(describe(asked.boxes, asked.positions, asked.nbytes, mine))
        sharing = share(wishes, ranks.rank)
        mine = sharing.read
    with ranks.together():
        reads, twins = asked.plan(mine), asked.plan(asked.twins, compare=True)
    with ranks.together():
        read = _run(reads, threads or cores(), tick)
    received = exchange(sharing, asked.tensors, ranks) if sharing is not None else 0
    with ranks.together():
        read += _run(twins, threads or cores(), None)
    _set_objects(asked)
    return LoadReport(
        loaded=tuple(asked.loaded),
        missing=asked.missing,
        mismatched=asked.mismatched,
        unexpected=tuple(unexpected),
        objects={leaf.name: value for leaf, value in asked.objects},
        read_nbytes=read,
        received_nbytes=received,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, eq=False)
class _Asked:
    """What this rank asks for, and where it is stored.

    Attributes:
        tensors, positions: those to be filled, and where each is in ``stored.catalog``.
        boxes: theirs.
        primary: tensors that have their memory for themselves, or are the first in it.
        twins: tensors tied to one of these, but stored apart.
        loaded: names of tensors that will be filled, those tied to one of these included.
    """

    ckpt: Checkpoint
    stored: Stored
    tensors: list[Held]
    positions: Ints
    boxes: Locals
    primary: list[int]
    twins: list[int]
    loaded: list[str]
    missing: dict[str, str]
    mismatched: dict[str, str]
    objects: list[tuple[Leaf, Any]]

    @classmethod
    def of(
        cls,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str] | Checkpoint,
        name_map: Renaming | NameMap | None,
    ) -> _Asked:
        import torch

        ckpt = _opened(path, name_map)
        names = None if isinstance(name_map, NameMap) else name_map
        leaves = flatten(state_dict)
        asked = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        stored = Stored(ckpt)
        live = [held(leaf.name, leaf.value) for leaf in asked]
        found = stored.find([leaf.name for leaf in asked], [leaf.path for leaf in asked], names)

        missing: dict[str, str] = {}
        mismatched: dict[str, str] = {}
        objects: list[tuple[Leaf, Any]] = []
        tensors: list[Held] = []
        positions: list[int] = []
        for one, at in zip(live, found, strict=True):
            if isinstance(at, str):
                continue
            if why := one.differs(stored.catalog.dtype_of(at), stored.catalog.shape_of(at)):
                mismatched[one.name] = why
                continue
            tensors.append(one)
            positions.append(at)
        first: dict[Any, int] = {}
        primary: list[int] = []
        twins: list[int] = []
        for number, one in enumerate(tensors):
            at = first.setdefault(one.memory, number)
            if at == number:
                primary.append(number)
            elif positions[at] != positions[number]:
                twins.append(number)
        loaded = [one.name for one in tensors]
        for leaf, one, at in zip(asked, live, found, strict=True):
            if isinstance(at, str) and one.memory in first:
                loaded.append(one.name)  # tied: what it shares its memory with is stored
            elif isinstance(at, str):
                there, _ = find_object(ckpt.objects, leaf.path)
                missing[one.name] = "is an object there, and no tensor" if there else at
        for leaf in leaves:
            if isinstance(leaf.value, torch.Tensor):
                continue
            new = renamed(leaf.name, names)
            there, value = find_object(ckpt.objects, leaf.path if new == leaf.name else (new,))
            if there:
                objects.append((leaf, value))
            else:
                is_tensor = new in ckpt
                missing[leaf.name] = "is a tensor there: put one in its place" if is_tensor else "is no object of it"
        return cls(
            ckpt, stored, tensors, np.array(positions, np.int64),
            cut_held(tensors, stored.catalog.shape.shape[1]),
            primary, twins, loaded, missing, mismatched, objects,
        )  # fmt: skip

    @property
    def nbytes(self) -> Ints:
        return np.array([one.nbytes for one in self.tensors], np.int64)

    def told(self, *, strict: bool, broadcast: bool) -> Told:
        found = self.stored, self.positions, self.missing, self.mismatched
        return Told.of(*found, strict=strict, broadcast=broadcast)

    def plan(self, members: list[int], *, compare: bool = False) -> list[Batch]:
        catalog = self.stored.catalog
        direct = SourcePool(Place(self.ckpt.path), catalog.files, catalog.file_stats, "pread")
        own = self.ckpt.payloads
        payloads = own if own.catalog is catalog and own.pool.mapped else Payloads(catalog, direct.maps())
        return batches(payloads, direct, self.boxes, self.positions, self.tensors, members, compare=compare)


def _opened(path: str | os.PathLike[str] | Checkpoint, name_map: Renaming | NameMap | None) -> Checkpoint:
    ckpt = path if isinstance(path, Checkpoint) else open(path)
    if isinstance(name_map, NameMap):
        if os.path.realpath(name_map.a.path) != os.path.realpath(ckpt.path):
            raise UsageError(
                f"name_map is from {name_map.a.path!r}, but {ckpt.path!r} is loaded; make it from that one"
            )
        return name_map.apply()
    return ckpt


def _run(reads: list[Batch], threads: int, tick: Tick | None) -> int:
    total = max(sum(one.nbytes for one in reads), 1)
    count = 0
    for one in reads:
        before = count

        def told(nbytes: int, before: int = before) -> None:
            if tick is not None:
                tick(min((before + nbytes) / total, 1.0))

        count += one.run(threads, told)
    if tick is not None:
        tick(1.0)
    return count


def _set_objects(asked: _Asked) -> None:
    for leaf, value in asked.objects:
        if is_plain(value) and isinstance(leaf.holder, MutableMapping | list):
            leaf.holder[leaf.key] = value
