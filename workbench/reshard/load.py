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
from contextlib import suppress
from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.core.scan import Tick, cores
from workbench.namemap import NameMap
from workbench.reshard.loading.asked import Asked
from workbench.reshard.loading.check import Told, agree
from workbench.reshard.loading.chunks import Handing, undone_whole
from workbench.reshard.loading.exchange import describe, exchange, share
from workbench.reshard.loading.fill import Batch
from workbench.reshard.loading.names import Renaming
from workbench.reshard.loading.ranks import Ranks
from workbench.reshard.loading.report import LoadReport
from workbench.reshard.writers.plain import plain

__all__ = ["load"]


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
        asked = Asked.of(state_dict, path, name_map)
        told = Told.of(
            asked.stored, asked.positions, asked.missing, asked.mismatched, strict=strict, broadcast=broadcast
        )
    unexpected = agree(ranks, told, asked.stored)

    loading = _shared if broadcast and ranks.size > 1 else _each
    read, received = loading(asked, ranks, threads or cores(), tick)
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


def _each(asked: Asked, ranks: Ranks, threads: int, tick: Tick | None) -> tuple[int, int]:
    """Every rank reads what it holds. Returns the bytes read and received."""
    with ranks.together():
        reads, twins = asked.plan(asked.primary), asked.plan(asked.twins, compare=True)
    with ranks.together():
        return _run(reads, threads, tick) + _run(twins, threads, None), 0


def _shared(asked: Asked, ranks: Ranks, threads: int, tick: Tick | None) -> tuple[int, int]:
    """As :func:`_each`, but replicas are read by one rank and sent to the others."""
    whole = undone_whole(asked.stored.catalog)[asked.positions]
    boxes = [at for at in asked.primary if not whole[at]]
    chunks = [at for at in asked.primary if whole[at]]
    sharing = share(ranks.gather(describe(asked.boxes, asked.positions, asked.nbytes, boxes)), ranks.rank)
    with ranks.together():
        reads, twins = asked.plan(sharing.read), asked.plan(asked.twins, compare=True)
        handing = Handing(asked.payloads, asked.boxes, asked.positions, asked.tensors, chunks)
    with ranks.together():
        read = _run(reads, threads, tick)
    received = exchange(sharing, asked.tensors, ranks)
    handed = handing.run(ranks, threads)
    with ranks.together():
        read += _run(twins, threads, None)
    return read + handed[0], received + handed[1]


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


def _set_objects(asked: Asked) -> None:
    for leaf, value in asked.objects:
        if isinstance(leaf.holder, MutableMapping | list):
            with suppress(ValueError):  # no plain value: the caller has it in the report
                leaf.holder[leaf.key] = plain(value)
