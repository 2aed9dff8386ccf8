"""Rules on stored values: one pass over the bytes (:mod:`.counts`), from which all rules are evaluated.

::

    NaN, Inf            in tensors that a resume needs; -Inf in a mask is fine
    exp_avg_sq < 0      impossible for a mean of squares
    master's low bits   zero in 2^-16 of healthy ones; in all, if rebuilt from bf16
    zero pages          pages.py
    all zero            a tensor whose counterparts in every other layer are not
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

from workbench.analysis.verify.counts import SQUARES, ChunkCounts, NumberScan
from workbench.analysis.verify.log import Examined, advice
from workbench.analysis.verify.pages import check_pages
from workbench.core.arrays import Array
from workbench.core.checksums import Summed
from workbench.core.scan import Progress, scan
from workbench.core.words import plural, some_of
from workbench.core.work import chunk_work
from workbench.errors import UnsupportedFormatError, WorkbenchError

LOW_SHARE = 0.01  #: share of masters with zero low bits above which chance is excluded
LOW_LEAST = 1024  #: minimum number of elements for a meaningful share
SECTION = 4096
FAMILY = 3  #: minimum number of layers with a counterpart
#: Roles whose NaN or infinity breaks a resume.
VITAL = {"param", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "ema", "scale", "lora_A", "lora_B"}
_MASK = re.compile(r"mask|alibi|rel_pos_bias|attn_bias", re.I)


def values_nbytes(subject: Examined) -> int:
    """Return about how many bytes :func:`check_values` reads."""
    return int(subject.catalog.chunk_nbytes.sum())


def check_values(subject: Examined, summed: Summed, progress: Progress | None = None, *, numbers: bool = True) -> None:
    """Read every stored chunk once and evaluate the counts; without ``numbers``, only zeros and empty pages.

    The CRC-32 of the chunks that ``summed`` asks for is recorded there.
    """
    catalog, log = subject.catalog, subject.log
    work = chunk_work(subject.payloads, replica=None, group=np.arange(catalog.chunks))
    work = work.take(np.flatnonzero(~subject.lost[work.sides[0].row])) if len(work) else work

    refused: list[int] = []

    def failed(side: int, row: int, error: WorkbenchError) -> None:
        subject.lost[row] = True
        if subject.catalog.inflated[row]:
            refused.append(row)
            return
        if isinstance(error, UnsupportedFormatError):
            subject.unread(row)
            return
        log.add(
            "read.failed",
            "error",
            subject.key(row),
            str(error),
            advice(error),
            file=subject.file(row),
        )

    read, zero = np.zeros(catalog.chunks, bool), np.zeros(catalog.chunks, bool)
    suspects: dict[int, ChunkCounts] = {}  # one state per chunk would take too much memory for a million chunks
    low = np.zeros((len(catalog), 2), np.int64)
    for row, state in scan(
        work, NumberScan(subject, numbers, summed.rows), threads=subject.threads, progress=progress, on_error=failed
    ):
        if subject.lost[row]:
            continue  # data read before the failure is not reported
        read[row], zero[row] = True, not state.nonzero
        summed.add(row, state.at, state.nbytes, state.crc)
        if state.nan or state.posinf or state.neginf or state.negative or (state.pages and state.nonzero):
            suspects[row] = state
        if catalog.replica[row] == 0:
            low[catalog.tensor[row]] += (state.low, state.full)
    if refused:
        more = f"; so are {len(refused) - 1:,} more chunks" if len(refused) > 1 else ""
        log.add("read.refused", "warn", subject.key(refused[0]), catalog.not_checked(refused[0]) + more)
        log.not_checked["expanded tensors"] = f"{plural(len(refused), 'chunk')} much larger than the stored bytes"
    known = _not_squares(subject, suspects, read)
    for row in sorted(suspects):
        _numbers(subject, row, suspects[row], known)
    _masters(subject, low)
    _zeros(subject, read, zero)
    check_pages(subject, {row: state.pages for row, state in suspects.items() if state.pages}, zero)
    size = int(catalog.chunk_nbytes[read].sum())
    what = "NaN, infinities, signs, zero pages, low bits" if numbers else "zero pages"
    log.checked["values"] = f"{plural(size, 'byte')} of {plural(int(read.sum()), 'chunk')}: {what}"
    packed = [catalog.keys[t] for t in range(len(catalog)) if catalog.dtype_of(t).packed]
    if packed:
        log.not_checked["packed types"] = f"{plural(len(packed), 'tensor')} of packed types: {some_of(packed)}"


# ---- judging -------------------------------------------------------------------------------------------------------


def _not_squares(subject: Examined, suspects: dict[int, ChunkCounts], read: Array) -> bool:
    """Return whether the optimizer uses this name for something else: every such tensor has many negative numbers."""
    catalog = subject.catalog
    is_square = np.array([role in SQUARES for role in subject.ckpt.roles], bool)
    many = {row for row, state in suspects.items() if state.negative * 4 > state.count}
    rows = np.flatnonzero(read & is_square[catalog.tensor] & (catalog.chunk_nbytes >= SECTION // 4))
    odd = len(rows) > 0 and many.issuperset(rows.tolist())
    if odd:
        subject.log.add(
            "values.not_squares",
            "info",
            "",
            "a quarter or more of every exp_avg_sq is negative: this optimizer keeps something else under that name",
        )
    return odd


def _numbers(subject: Examined, row: int, state: ChunkCounts, not_squares: bool) -> None:
    tensor = int(subject.catalog.tensor[row])
    key, role = subject.catalog.keys[tensor], subject.ckpt.roles[tensor]

    def place(first: tuple[int, ...] | None) -> tuple[str, dict[str, Any]]:
        at = list(first or ())[: int(subject.catalog.ndim[tensor])]
        where = {"file": subject.file(row), "first": at, "box": subject.box(row)}
        return f", first at {at} in {subject.file(row)!r}", where

    if state.nan:
        at, where = place(state.first_nan)
        severity = "error" if role in VITAL else "warn"
        subject.log.add(
            "values.nan",
            severity,
            key,
            f"{state.nan:,} of {state.count:,} elements are NaN{at}",
            "training from here yields NaN: use an earlier step"
            if role in VITAL
            else "not a weight or moment: whether NaN is valid depends on its use",
            nan=state.nan,
            **where,
        )
    if state.posinf or state.neginf:
        at, where = place(state.first_inf)
        severity = "info" if role not in VITAL or _MASK.search(key) else "error"
        subject.log.add(
            "values.inf",
            severity,
            key,
            f"{state.posinf + state.neginf:,} of {state.count:,} elements are "
            f"infinite ({state.posinf:,} positive, {state.neginf:,} negative){at}",
            "-inf is valid in a mask, but not in a weight or a moment",
            posinf=state.posinf,
            neginf=state.neginf,
            **where,
        )
    if state.negative and not not_squares:
        at, where = place(state.first_negative)
        subject.log.add(
            "values.negative_square",
            "error",
            key,
            f"{state.negative:,} of {state.count:,} elements of "
            f"{role} are negative, which is impossible for a mean of squares{at}",
            "a bit was flipped, or these are another tensor's bytes: restore the file",
            negative=state.negative,
            **where,
        )


def _masters(subject: Examined, counts: Array) -> None:
    """Report masters whose low bits are zero: they were rebuilt from 16-bit weights."""
    bad = np.flatnonzero((counts[:, 1] >= LOW_LEAST) & (counts[:, 0] > LOW_SHARE * counts[:, 1]))
    if len(bad):
        low, full = counts[bad].sum(axis=0).tolist()
        keys = [subject.catalog.keys[t] for t in bad.tolist()]
        subject.log.add(
            "master.low_bits",
            "warn",
            keys[0] if len(keys) == 1 else "",
            f"{low / full:.1%} of the "
            f"masters of {plural(len(keys), 'tensor')} have only zeros in their low bits (by chance: "
            f"0.002 %): {some_of(keys)}",
            "they were rebuilt from 16-bit weights: their extra precision is lost",
            tensors=keys[:100],
            share=low / full,
        )


def _zeros(subject: Examined, read: Array, zero_rows: Array) -> None:
    """Report tensors, or large chunks of one, that contain only zeros."""
    catalog = subject.catalog
    whole = np.zeros(len(catalog), bool)
    whole[catalog.tensor[read]] = True
    whole[catalog.tensor[~zero_rows]] = False
    families: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tensor in np.unique(catalog.tensor[read]).tolist():
        if catalog.numel[tensor] > 1:
            like = re.sub(r"(?<![^._])\d+(?![^._])", "#", catalog.keys[tensor])
            families[like, subject.ckpt.roles[tensor]].append(tensor)
    info: list[str] = []
    for (like, role), members in families.items():
        zero = [tensor for tensor in members if whole[tensor]]
        odd = 0 < len(zero) <= len(members) / 4 and len(members) >= FAMILY and role in VITAL and "expert" not in like
        for tensor in zero if odd else []:
            subject.log.add(
                "values.all_zero",
                "warn",
                catalog.keys[tensor],
                f"contains only zeros; {len(members) - len(zero)} of its {len(members)} counterparts do not",
                "it was never written, or never trained",
                files=_files(subject, tensor),
            )
        info += [catalog.keys[tensor] for tensor in zero if not odd]
    if info:
        subject.log.add(
            "values.all_zero",
            "info",
            "",
            f"{plural(len(info), 'tensor')} with only zeros: {some_of(info)}",
            tensors=info[:100],
        )
    for row in np.flatnonzero(zero_rows).tolist():
        tensor = int(catalog.tensor[row])
        large = int(catalog.chunk_nbytes[row]) >= SECTION and subject.ckpt.roles[tensor] in ("param", "master")
        # the last rows of a vocabulary are padding; experts may be untrained
        last = bool(catalog.offsets[row, 0] + catalog.sizes[row, 0] >= catalog.shape[tensor, 0])
        if large and not whole[tensor] and not last and "expert" not in catalog.keys[tensor]:
            subject.log.add(
                "values.zero_chunk",
                "warn",
                catalog.keys[tensor],
                f"the chunk {subject.box(row)} in "
                f"{subject.file(row)!r} contains only zeros, the rest of the tensor does not",
                "a write was lost: restore the file",
                file=subject.file(row),
                box=subject.box(row),
            )


def _files(subject: Examined, tensor: int) -> list[str]:
    rows = range(*subject.catalog.rows_of(tensor).indices(subject.catalog.chunks))
    return sorted({subject.file(row) for row in rows})
