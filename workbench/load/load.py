"""Load a checkpoint of any readable format into the live tensors of a job, whatever mesh it was saved from.

::

    state dict ─names─▶ stored tensors ─placements─▶ this rank's boxes ─plan─▶ bytes, directly into its tensors
                        │                            │
                        all ranks compare            broadcast: equal boxes are read by one rank, and sent

No tensor is modified until every rank has found everything that it requests, with the right shape and type and without
holes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from workbench.analysis.name_map import NameMap
from workbench.checkpoint import Checkpoint
from workbench.core.executors import cores
from workbench.core.ranks import Ranks
from workbench.core.remote.url import with_options
from workbench.core.scan import Progress
from workbench.export.writers.plain import plain
from workbench.load.asked import Asked
from workbench.load.check import RankSummary, agree
from workbench.load.chunks import Handing
from workbench.load.exchange import describe, exchange, share
from workbench.load.fill import Batch, undone_whole
from workbench.load.names import Renaming
from workbench.load.report import LoadReport


def load(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | Checkpoint,
    *,
    strict: bool = True,
    process_group: Any = None,
    name_map: Renaming | NameMap | None = None,
    broadcast: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fill the tensors of a state dict in place, bit for bit; each rank reads only what it holds.

    In a distributed job every rank of the group must call it; an error on one rank is raised on all. Errors found
    before reading leave every tensor unchanged; an error while reading (a file is truncated or lost in the meantime)
    may leave some of them filled.

    Args:
        state_dict: names to tensors and DTensors of any mesh and placements, on any device; may be nested, as returned
            by ``get_state_dict``. Other values are placeholders: see the report's ``objects``.
        path: a checkpoint's folder or file, or an open checkpoint (for example opened with ``partial=True``).
        strict: raise an error for a name that the checkpoint lacks, a tensor of another shape or type, and a stored
            tensor that was not requested; otherwise they are only listed in the report. Nothing is ever cast.
        process_group: the ranks that load together; by default all, if ``torch.distributed`` is initialised.
        name_map: for differing names: name → key, as a mapping (other names are unchanged) or a function, or a
            :class:`NameMap` from the checkpoint to a checkpoint with the model's names.
        broadcast: read boxes that several ranks need only once, and send them over the network.
        threads: number of reading threads; by default the cores available to this process, up to 8.
        progress: called in the caller's thread with the fraction of this rank's bytes read; raise an exception to
            cancel.
        storage_options: for the URL of a checkpoint, as in ``wb.open``.

    Raises:
        TensorNotFoundError, UsageError: names are missing, mismatched or unexpected; up to eight of each are listed.
        UsageError: a tensor cannot be filled (``Partial``, meta, expanded), or ranks open different checkpoints.
        HoleError: a requested element is not stored.
        OpenError: the checkpoint cannot be opened or read.
    """
    began = time.perf_counter()
    ranks = Ranks(process_group)
    with ranks.together(), with_options(storage_options, path):
        asked = Asked.of(state_dict, path, name_map)
        summary = RankSummary.of(
            asked.stored, asked.requested, asked.missing, asked.mismatched, strict=strict, broadcast=broadcast
        )
    unexpected = agree(ranks, summary, asked.stored)

    loading = _shared if broadcast and ranks.size > 1 else _each
    read, received = loading(asked, ranks, threads or cores(), progress)
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


def _each(asked: Asked, ranks: Ranks, threads: int, progress: Progress | None) -> tuple[int, int]:
    """Read on every rank what it holds; return the bytes read and received."""
    with ranks.together():
        reads, twins = asked.plan(asked.primary), asked.plan(asked.twins, compare=True)
    with ranks.together():
        return _run(reads, threads, progress) + _run(twins, threads, None), 0


def _shared(asked: Asked, ranks: Ranks, threads: int, progress: Progress | None) -> tuple[int, int]:
    """Do the same as :func:`_each`, but let one rank read replicas and send them to the others."""
    whole = undone_whole(asked.stored.catalog)[asked.positions]
    boxes = [at for at in asked.primary if not whole[at]]
    chunks = [at for at in asked.primary if whole[at]]
    sharing = share(ranks.gather(describe(asked.boxes, asked.positions, asked.nbytes, boxes)), ranks.rank)
    with ranks.together():
        reads, twins = asked.plan(sharing.read), asked.plan(asked.twins, compare=True)
        handing = Handing(asked.payloads, asked.boxes, asked.positions, asked.tensors, chunks)
    with ranks.together():
        read = _run(reads, threads, progress)
    received = exchange(sharing, asked.tensors, ranks)
    handed = handing.run(ranks, threads)
    with ranks.together():
        read += _run(twins, threads, None)
    return read + handed[0], received + handed[1]


def _run(reads: list[Batch], threads: int, progress: Progress | None) -> int:
    total = max(sum(one.nbytes for one in reads), 1)
    count = 0
    for one in reads:
        before = count

        def report(nbytes: int, before: int = before) -> None:
            if progress is not None:
                progress(min((before + nbytes) / total, 1.0))

        count += one.run(threads, report)
    devices = {one.local.device for read in reads for one in read.tensors if one.local.is_cuda}
    if devices:  # the last copies are in progress: on return, the tensors are filled for every stream
        import torch

        for device in devices:
            torch.cuda.current_stream(device).synchronize()
    if progress is not None:
        progress(1.0)
    return count


def _set_objects(asked: Asked) -> None:
    for leaf, value in asked.objects:
        if isinstance(leaf.holder, MutableMapping | list):
            with suppress(ValueError):  # not a plain value: the caller finds it in the report
                leaf.holder[leaf.key] = plain(value)
