"""Read a target back: every byte that was to be written, and the checkpoint that the reader finds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from workbench.checkpoint import open_place
from workbench.core.executors import in_order
from workbench.core.fingerprint import combine, range_digests
from workbench.core.place import Place
from workbench.core.plan import plan_reads
from workbench.core.scan import workers
from workbench.core.storage import SourcePool
from workbench.errors import CorruptError
from workbench.export.atomic.journal import Written
from workbench.export.filemap import FileMap
from workbench.export.selection import ExportSelection


def check_pieces(
    place: Place, name: str, one: FileMap, written: Sequence[Written], *, threads: int | None = None
) -> None:
    """Compare each piece of a file with the fingerprint of the written bytes.

    Args:
        place, name: where the file is now, whatever its final name.
        written: the result of each of its pieces.

    Raises:
        CorruptError: a piece differs; the message names it and its bytes.
        OpenError: the file cannot be read, or is shorter.
    """
    pool = SourcePool(place, [name], [place.stat(name)], "pread")
    source = pool.source(0)

    def check(at: int) -> None:
        start, nbytes = int(one.start[at]), int(one.pieces.nbytes[at])
        blocks = range_digests(source, start, start + nbytes)
        found = combine(one.pieces.dtype_of(at), one.pieces.shape_of(at), blocks).hex
        if found != written[at].target.hex:
            raise CorruptError(
                f"tensor {one.pieces.names[at]!r} in {one.name!r}, bytes {start:,} to {start + nbytes:,}, differs from "
                f"what was written: fingerprint {found} instead of {written[at].target.hex}; the disk or its driver "
                "failed; export again, to another disk"
            )

    with ThreadPoolExecutor(workers(pool, threads), thread_name_prefix="workbench-check") as tasks:
        for _ in in_order(tasks, check, range(len(one.pieces))):
            pass


def check_reader(place: Place, reader: str, selection: ExportSelection, keys: Sequence[str]) -> None:
    """Open a target and compare its contents with the selection: names, shapes, element types, no holes.

    Args:
        keys: the name of each tensor of the selection in the target.

    Raises:
        CorruptError: they differ; the message names the first tensor.
        HoleError: an element is missing.
        OpenError: it cannot be opened.
    """
    with open_place(place, format=reader, cache=False) as again:
        catalog = again.catalog
        catalog.check()
        for at, name in enumerate(keys):
            position = catalog.index.get(name)
            if position is None:
                raise CorruptError(
                    f"tensor {name!r} is not in what was written to {place.name!r}; this is a "
                    "defect of the writer: please report it"
                )
            found = catalog.shape_of(position), catalog.dtype_of(position).name
            expected = selection.shape_of(at), selection.dtype_of(at).name
            if found != expected:
                raise CorruptError(
                    f"tensor {name!r} was written as {found} and should be {expected}; this is a "
                    "defect of the writer: please report it"
                )
        positions = np.array([catalog.index[name] for name in keys], np.int64)
        shapes = catalog.shape[positions].astype(np.int64)
        plan_reads(catalog, positions, np.zeros_like(shapes), shapes)  # no element is missing
