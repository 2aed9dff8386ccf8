"""What the stored values themselves tell: one pass over the bytes (:mod:`.counts`), and all rules judged from it.

::

    NaN, Inf            in what a resume needs; a mask holds -Inf rightly
    exp_avg_sq < 0      impossible: it is a mean of squares
    master's low bits   healthy 2^-16 are zero; all, where it was rebuilt from bf16
    zero pages          pages.py
    all zero            a tensor whose like in every other layer is not
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

from workbench.analysis.verify.counts import SQUARES, NumberScan, Seen
from workbench.analysis.verify.log import Subject, advice, names, plural
from workbench.analysis.verify.pages import check_pages
from workbench.core.scan import Tick, scan
from workbench.core.work import chunk_work
from workbench.errors import UnsupportedFormatError, WorkbenchError

__all__ = ["check_values", "values_nbytes"]

Array = np.ndarray[Any, Any]
LOW_SHARE = 0.01  #: share of masters with zero low bits from which they cannot be by chance
LOW_LEAST = 1024  #: elements of a tensor below which its share tells nothing
SECTION = 4096
FAMILY = 3  #: layers that a tensor must be alike with
#: Roles whose NaN or infinity breaks a resume.
VITAL = {"param", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "ema", "scale", "lora_A", "lora_B"}
_MASK = re.compile(r"mask|alibi|rel_pos_bias|attn_bias", re.I)


def values_nbytes(subject: Subject) -> int:
    """Bytes that :func:`check_values` reads, about."""
    return int(subject.catalog.chunk_nbytes.sum())


def check_values(subject: Subject, tick: Tick | None = None, *, numbers: bool = True) -> None:
    """Read every stored chunk once, and judge what was counted; without ``numbers`` only zeros and empty pages."""
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
    sick: dict[int, Seen] = {}  # a state a chunk would be a lot of memory for a million of them
    low = np.zeros((len(catalog), 2), np.int64)
    for row, state in scan(work, NumberScan(subject, numbers), threads=subject.threads, tick=tick, on_error=failed):
        if subject.lost[row]:
            continue  # of what was read before it failed nothing is said
        read[row], zero[row] = True, not state.nonzero
        if state.nan or state.posinf or state.neginf or state.negative or (state.pages and state.nonzero):
            sick[row] = state
        if catalog.replica[row] == 0:
            low[catalog.tensor[row]] += (state.low, state.full)
    if refused:
        more = f"; so are {len(refused) - 1:,} more chunks" if len(refused) > 1 else ""
        log.add("read.refused", "warn", subject.key(refused[0]), catalog.not_checked(refused[0]) + more)
        log.not_checked["expanded tensors"] = f"{plural(len(refused), 'chunk')} of far more bytes than are stored"
    known = _not_squares(subject, sick, read)
    for row in sorted(sick):
        _numbers(subject, row, sick[row], known)
    _masters(subject, low)
    _zeros(subject, read, zero)
    check_pages(subject, {row: state.pages for row, state in sick.items() if state.pages}, zero)
    size = int(catalog.chunk_nbytes[read].sum())
    what = "NaN, infinities, signs, zero pages, low bits" if numbers else "zero pages"
    log.checked["values"] = f"{size:,} bytes of {plural(int(read.sum()), 'chunk')}: {what}"
    packed = [catalog.keys[t] for t in range(len(catalog)) if catalog.dtype_of(t).packed]
    if packed:
        log.not_checked["packed types"] = f"{plural(len(packed), 'tensor')} whose elements share bytes: {names(packed)}"


# ---- judging -------------------------------------------------------------------------------------------------------


def _not_squares(subject: Subject, sick: dict[int, Seen], read: Array) -> bool:
    """Whether the optimizer means something else by this name: every such tensor has negative numbers in plenty."""
    catalog = subject.catalog
    wanted = np.array([role in SQUARES for role in subject.ckpt.roles], bool)
    many = {row for row, state in sick.items() if state.negative * 4 > state.count}
    rows = np.flatnonzero(read & wanted[catalog.tensor] & (catalog.chunk_nbytes >= SECTION // 4))
    odd = len(rows) > 0 and many.issuperset(rows.tolist())
    if odd:
        subject.log.add(
            "values.not_squares",
            "info",
            "",
            "a quarter or more of every exp_avg_sq is negative: this optimizer keeps something else under that name",
        )
    return odd


def _numbers(subject: Subject, row: int, state: Seen, not_squares: bool) -> None:
    tensor = int(subject.catalog.tensor[row])
    key, role = subject.catalog.keys[tensor], subject.ckpt.roles[tensor]
    first = list(state.first or ())[: int(subject.catalog.ndim[tensor])]
    place: dict[str, Any] = {"file": subject.file(row), "first": first, "box": subject.box(row)}
    at = f", first at {first} in {subject.file(row)!r}"
    if state.nan:
        severity = "error" if role in VITAL else "warn"
        subject.log.add(
            "values.nan",
            severity,
            key,
            f"{state.nan:,} of {state.count:,} elements are NaN{at}",
            "training from here yields NaN: use an earlier step"
            if role in VITAL
            else "no weight or moment: whether NaN may stand there depends on what reads it",
            nan=state.nan,
            **place,
        )
    if state.posinf or state.neginf:
        severity = "info" if role not in VITAL or _MASK.search(key) else "error"
        subject.log.add(
            "values.inf",
            severity,
            key,
            f"{state.posinf + state.neginf:,} of {state.count:,} elements are "
            f"infinite ({state.posinf:,} up, {state.neginf:,} down){at}",
            "a mask holds -inf rightly; a weight or a moment does not",
            posinf=state.posinf,
            neginf=state.neginf,
            **place,
        )
    if state.negative and not not_squares:
        subject.log.add(
            "values.negative_square",
            "error",
            key,
            f"{state.negative:,} of {state.count:,} elements of "
            f"{role} are negative, which a mean of squares cannot be{at}",
            "a bit was flipped, or these are another tensor's bytes: restore the file",
            negative=state.negative,
            **place,
        )


def _masters(subject: Subject, counts: Array) -> None:
    """Masters whose low bits are zero were made again from weights of 16 bits."""
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
            f"0.002 %): {names(keys)}",
            "they were rebuilt from weights of 16 bits: what they had beyond those is lost",
            tensors=keys[:100],
            share=low / full,
        )


def _zeros(subject: Subject, read: Array, zero_rows: Array) -> None:
    """Tensors, or large chunks of one, that hold nothing but zeros."""
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
                f"holds only zeros; {len(members) - len(zero)} of the {len(members)} tensors like it do not",
                "a part that was never written, or never trained",
                files=_files(subject, tensor),
            )
        info += [catalog.keys[tensor] for tensor in zero if not odd]
    if info:
        subject.log.add(
            "values.all_zero",
            "info",
            "",
            f"{plural(len(info), 'tensor')} of zeros only: {names(info)}",
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
                f"{subject.file(row)!r} holds only zeros, the rest of the tensor does not",
                "a write was lost: restore the file",
                file=subject.file(row),
                box=subject.box(row),
            )


def _files(subject: Subject, tensor: int) -> list[str]:
    rows = range(*subject.catalog.rows_of(tensor).indices(subject.catalog.chunks))
    return sorted({subject.file(row) for row in rows})
