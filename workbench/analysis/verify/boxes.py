"""Check that the chunks of each tensor cover it: every element is in exactly one box and has its own bytes.

::

    ┌──────┬─────┐
    │  a   │  b  │      overlap: rows 2:3 of columns 0:4 are in a and in c
    ├──────┤     │      hole:    rows 4:5 of columns 4:6 are in no chunk
    │  c   ├─────┘
    └──────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from workbench.analysis.layout.coverage import coverage
from workbench.analysis.verify.log import Examined
from workbench.core import box, codecs
from workbench.core.box import row_major
from workbench.core.words import plural
from workbench.formats import record

HOLES = 4  #: boxes listed per tensor


def check_boxes(subject: Examined) -> None:
    """Report holes, overlaps, and byte ranges that two tensors claim."""
    catalog, log = subject.catalog, subject.log
    log.checked["coverage"] = (
        f"whether {plural(catalog.chunks, 'chunk')} {'covers' if catalog.chunks == 1 else 'cover'} "
        f"{plural(len(catalog), 'tensor')}, each element once"
    )
    if not len(catalog):
        return
    found = coverage(catalog)
    for _, low, size, a, b in found.overlaps:
        log.add(
            "coverage.overlap",
            "error",
            subject.key(a),
            f"{_slices(low, size)} is in two chunks: at {_start(subject, a)} and at {_start(subject, b)}",
            "the metadata mixes two saves, or is damaged: it is unknown which of the two is valid",
            box=[list(low), list(size)],
            files=[subject.file(a), subject.file(b)],
        )
    named: Counter[int] = Counter()
    for tensor, low, size in found.holes:
        named[tensor] += 1
        if named[tensor] > HOLES:
            continue
        log.add(
            "coverage.hole",
            "error",
            catalog.keys[tensor],
            f"{_slices(low, size)} of {list(catalog.shape_of(tensor))} is stored in no chunk",
            "a rank's part is missing from the metadata: restore it, or use another step",
            box=[list(low), list(size)],
            shape=list(catalog.shape_of(tensor)),
        )
    for tensor in found.tangled:
        count = int(np.count_nonzero(catalog.tensor == tensor))
        log.add(
            "coverage.hole",
            "error",
            catalog.keys[tensor],
            f"its {plural(count, 'chunk', 'have')} more overlaps or holes than can be checked: it is unknown which "
            "elements are stored",
            "the metadata is damaged, or crafted to be slow: use another save",
        )
    if record(catalog.format).own_bytes:
        _shared_bytes(subject)


def _shared_bytes(subject: Examined) -> None:
    """Report contiguous chunks whose bytes overlap.

    A part of an archive is placed as if its payload began where the archive does; parts that overlap then do overlap.
    """
    catalog = subject.catalog
    whole = codecs.WHOLE_ITEM[catalog.codec]
    parts = (codecs.RAW_BYTES | codecs.ZIP)[catalog.codec] & ~whole
    if catalog.strides is not None:
        parts &= ((catalog.strides == row_major(catalog.sizes)) | (catalog.sizes <= 1)).all(axis=1)
    rows = np.flatnonzero(
        (whole | parts) & ~subject.lost & (catalog.stop > catalog.start) & (box.volume(catalog.sizes) > 0)
    )
    start, stop = catalog.start[rows].astype(np.int64), catalog.stop[rows].astype(np.int64)
    start += 0 if catalog.inner is None else np.where(parts[rows], catalog.inner[rows], 0)
    stop = np.where(parts[rows], start + catalog.chunk_nbytes[rows], stop)
    order = np.lexsort((stop, start, catalog.file[rows]))
    rows, start, stop = rows[order], start[order], stop[order]
    file = catalog.file[rows].astype(np.int64)
    span = int(stop.max(initial=0)) + 1
    reach = np.maximum.accumulate(file * span + stop)
    hit = np.flatnonzero((file * span + start)[1:] < reach[:-1]) + 1
    for at in hit.tolist():
        a, b = int(rows[at - 1]), int(rows[at])
        one_tensor = "of the same tensor " if catalog.tensor[a] == catalog.tensor[b] else f"of {subject.key(a)!r} "
        subject.log.add(
            "coverage.shared_bytes",
            "error",
            subject.key(b),
            f"bytes {int(start[at]):,} to {int(min(stop[at], stop[at - 1])):,} of {subject.file(b)!r} also hold a "
            f"chunk {one_tensor}at {_start(subject, a)}",
            "the metadata is damaged: one of the two chunks reads the other's bytes",
            file=subject.file(b),
            start=int(start[at]),
            stop=int(stop[at]),
            other=subject.key(a),
        )


def _start(subject: Examined, row: int) -> str:
    offsets, sizes = subject.box(row)
    return f"{offsets} + {sizes} in {subject.file(row)!r}"


def _slices(low: Sequence[int], extent: Sequence[int]) -> str:
    parts = [f"{a}:{a + n}" for a, n in zip(low, extent, strict=True)]
    return f"[{', '.join(parts)}]" if parts else "the only element"
