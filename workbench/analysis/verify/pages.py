"""Pages of a file left zero by a lost write.

::

    file    ┊ 4096        8192        12288       16384 ┊        pages of the file, not of the tensor
    tensor    ▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓             zeros from page to page: lost
    tensor    ▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░░░░░░▓▓▓▓▓▓▓▓▓▓             zeros from row to row: a token never seen

Zeros are common: padded rows of a vocabulary, moments of tokens and experts that never occurred, masks. A lost write is
recognised by where its zeros begin and end. For a run of zeros, ``chance`` is the probability that natural zeros begin
and end on pages like this run: 16/4096 per end (zero bytes of neighbouring numbers blur an end), row/4096 if rows are
aligned with pages. The run is reported if ``chance`` times the number of such runs in the tensor is below
:data:`ALARM`; a tensor full of natural zeros therefore causes no false alarm.

The pass inspects some bytes of each page while the page is in the cache; only pages that look empty are read again.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from workbench.analysis.verify.log import Examined, advice
from workbench.core import codecs
from workbench.core.arrays import Array
from workbench.core.catalog import Catalog, is_row_major, reach, row_major
from workbench.core.payload import Payloads
from workbench.core.scan import PIECE, Piece
from workbench.core.source import Source
from workbench.errors import WorkbenchError

PAGE = 4096  #: bytes; file systems lose whole pages
FUZZ = 16  #: bytes by which natural zeros next to a lost page can extend the run
ALARM = 1 / 50
EDGE = 256  #: minimum bytes of a page in a piece to evaluate the page
STEP = 1 << 16  #: bytes read at a time when following a run
REACH = 1 << 30  #: maximum bytes to follow a run beyond the tensor


class Pages:
    """A finder of possibly empty pages."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads

    def look(self, found: list[tuple[int, int]], piece: Piece) -> None:
        """Add the runs of file pages ``[first, last)`` in this piece that look empty."""
        at = position(self._payloads, piece.row)
        if at is None:
            return
        catalog, row = self._payloads.catalog, piece.row
        if flat(self._payloads, row):
            tensor = int(catalog.tensor[row])
            if catalog.dtype_of(tensor).packed:
                at += piece.start
            else:
                ndim = int(catalog.ndim[tensor])
                local = (piece.offsets[:ndim] - catalog.offsets[row, :ndim]).tolist()
                steps = row_major(catalog.sizes[row, :ndim].tolist())
                first = sum(a * b for a, b in zip(local, steps, strict=True)) + piece.start
                at += first * piece.bits.dtype.itemsize
            _empty_pages(found, piece.bits.view(np.uint8), at)
        elif piece.start == 0 and (piece.offsets[: catalog.offsets.shape[1]] == catalog.offsets[row]).all():
            low, high = extent(self._payloads, row)
            base = int(catalog.start[row])
            for at in range(low, high, PIECE):
                part = self._payloads.stored(row)[at - base : min(at + PIECE, high) - base]
                _empty_pages(found, np.frombuffer(part, np.uint8), at)


def check_pages(subject: Examined, pages: dict[int, list[tuple[int, int]]], zero: Array) -> None:
    """Evaluate the pages that look empty: their runs of zeros, and what these cut."""
    catalog = subject.catalog
    of_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, runs in pages.items():
        of_file[int(catalog.file[row])] += runs
    for file, runs in sorted(of_file.items()):
        try:
            source = subject.payloads.pool.source(file)
        except WorkbenchError as error:
            subject.log.add("read.failed", "error", catalog.files[file], str(error), advice(error))
            continue
        _judge_file(subject, file, [_follow(source, *run) for run in _joined(source, runs)], source.size, zero)


def position(payloads: Payloads, row: int) -> int | None:
    """Return the file offset of a chunk's first element; ``None`` if it is encoded."""
    catalog = payloads.catalog
    codec, start = codecs.TABLE[catalog.codec[row]], int(catalog.start[row])
    if not codec.in_file:
        return None
    inner = 0 if catalog.inner is None else int(catalog.inner[row])
    if codec.raw:
        return start + inner
    item, _ = payloads.item(row)
    itemsize = catalog.dtype_of(int(catalog.tensor[row])).itemsize
    return start + item.start + item.storage_offset * itemsize + inner


def flat(payloads: Payloads, row: int) -> bool:
    """Return whether a chunk's elements are contiguous in the file."""
    catalog = payloads.catalog
    ndim, codec = int(catalog.ndim[catalog.tensor[row]]), codecs.TABLE[catalog.codec[row]]
    sizes = catalog.sizes[row, :ndim].tolist()
    if codec.zip and codec.in_file:
        item, _ = payloads.item(row)
        if codec.part or not is_row_major(item.shape, item.stride):
            return is_row_major(item.shape, item.stride)
    return catalog.strides is None or is_row_major(sizes, catalog.strides[row, :ndim].tolist())


def extent(payloads: Payloads, row: int) -> tuple[int, int]:
    """Return the byte range of the file from a chunk's first element to the end of its last."""
    catalog = payloads.catalog
    tensor = int(catalog.tensor[row])
    ndim, dtype = int(catalog.ndim[tensor]), catalog.dtype_of(tensor)
    at = position(payloads, row) or 0
    sizes = catalog.sizes[row, :ndim].tolist()
    if dtype.packed or flat(payloads, row):
        return at, at + int(catalog.chunk_nbytes[row])
    if codecs.BITS[catalog.codec[row]] and catalog.strides is not None:
        steps = catalog.strides[row, :ndim].tolist()
        return at, at + reach(sizes, steps) * dtype.itemsize
    item, _ = payloads.item(row)
    base = int(catalog.start[row]) + item.start
    return base, base + item.nbytes


# ---- finding -------------------------------------------------------------------------------------------------------


def _empty_pages(found: list[tuple[int, int]], data: Array, at: int) -> None:
    """Return runs of pages that are empty as far as ``data``, at byte ``at`` of the file, shows."""
    size = len(data)
    first, last = -(-at // PAGE), (at + size) // PAGE
    if last < first:  # within one page
        if size >= EDGE and not data.any():
            _add(found, last, last + 1)
        return
    head, tail = first * PAGE - at, at + size - last * PAGE
    if head >= EDGE and not data[:head].any():
        _add(found, first - 1, first)
    if last > first:
        base = data[head:]
        full = (last - first) * PAGE
        seen = base[5:full:PAGE] | base[1030:full:PAGE] | base[2051:full:PAGE] | base[3076:full:PAGE]
        for page in np.flatnonzero(seen == 0).tolist():
            if not base[page * PAGE : (page + 1) * PAGE].any():
                _add(found, first + page, first + page + 1)
    if tail >= EDGE and not data[size - tail :].any():
        _add(found, last, last + 1)


def _add(found: list[tuple[int, int]], first: int, last: int) -> None:
    if found and found[-1][1] >= first:
        found[-1] = (found[-1][0], max(found[-1][1], last))
    else:
        found.append((first, last))


def _joined(source: Source, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the byte ranges that are zero in the file too, in order, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(set(runs)):
        # only pages at the ends may have been seen in part
        for page in range(first, last) if last - first < 3 else (first, last - 1):
            if source.read(page * PAGE, min((page + 1) * PAGE, source.size)).any():
                first, last = (page + 1, last) if page == first else (first, min(last, page))
        if last > first:
            _add(found, first, last)
    return [(first * PAGE, min(last * PAGE, source.size)) for first, last in found]


def _follow(source: Source, start: int, stop: int) -> tuple[int, int]:
    """Return the full run of zero bytes that contains a run of pages."""
    limit = start - REACH
    while start > max(limit, 0):
        low = max(start - STEP, 0)
        hits = np.flatnonzero(source.read(low, start))
        if len(hits):
            start = low + int(hits[-1]) + 1
            break
        start = low
    limit = stop + REACH
    while stop < min(limit, source.size):
        high = min(stop + STEP, source.size)
        hits = np.flatnonzero(source.read(stop, high))
        if len(hits):
            stop += int(hits[0])
            break
        stop = high
    return start, stop


# ---- judging -------------------------------------------------------------------------------------------------------


def _judge_file(subject: Examined, file: int, runs: list[tuple[int, int]], size: int, zero: Array) -> None:
    catalog = subject.catalog
    rows = np.flatnonzero((catalog.file == file) & codecs.IN_FILE[catalog.codec] & ~subject.lost)
    spans = np.array([extent(subject.payloads, row) for row in rows.tolist()], np.int64).reshape(-1, 2)
    cuts: dict[int, list[tuple[tuple[int, int], float]]] = defaultdict(list)
    for run in dict.fromkeys(runs):
        inside = np.flatnonzero((spans[:, 0] < run[1]) & (spans[:, 1] > run[0]))
        for at in inside.tolist():
            if not zero[rows[at]]:
                cuts[int(rows[at])].append((run, _chance(catalog, int(rows[at]), spans[at], run, size)))
    for row, found in cuts.items():
        for (start, stop), chance in found:
            if chance * len(found) < ALARM:
                subject.log.add(
                    "values.zero_pages",
                    "warn",
                    subject.key(row),
                    f"bytes {start:,} to {stop:,} of {subject.file(row)!r} are zero from page start to page end"
                    f"{', to the end of the file' if stop == size else ''}, inside a chunk that is not",
                    "a write was lost in a crash, or the file was overwritten while it was saved: restore it",
                    file=subject.file(row),
                    start=start,
                    stop=stop,
                    chance=chance,
                    box=subject.box(row),
                )
    if runs:
        subject.log.checked["zero pages"] = "runs of zeros that begin and end at page boundaries of the file"


def _chance(catalog: Catalog, row: int, span: Array, run: tuple[int, int], size: int) -> float:
    """Return the probability that natural zeros are aligned like this run; 1 if they must be."""
    tensor = int(catalog.tensor[row])
    ndim = int(catalog.ndim[tensor])
    sizes = catalog.sizes[row, :ndim].tolist()
    dtype = catalog.dtype_of(tensor)
    line = max(sizes[-1] if sizes else 1, 1) * dtype.bits // 8 or 1
    low, high = int(span[0]), int(span[1])
    chance, ends = 1.0, 0
    for cut, byte, into in ((run[0] > low, run[0], -1), (run[1] < high, run[1], 1)):
        if not cut:
            continue
        ends += 1
        on_page = (-byte) % PAGE < FUZZ if into < 0 else byte % PAGE < FUZZ
        rest = (byte - low) % line
        on_row = (line - rest) % line < FUZZ if into < 0 else rest < FUZZ
        if on_page:
            chance *= min(1.0, line / PAGE) if on_row else FUZZ / PAGE
        elif run[1] == size and into < 0 and not on_row:
            chance *= FUZZ / PAGE  # a tail that begins anywhere, in the middle of a row
        else:
            return 1.0
    return chance if ends else 1.0
