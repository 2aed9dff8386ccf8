"""What a manifest holds, and which bytes each of its digests is of.

::

    segments of a file      header │ a │ b │    c    │ …           lengths, and what each one is
    runs                    header   a   b  │   c    │             small neighbours together, up to the grain
    blocks                  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒│▒▒▒▒             4 MiB at most: a digest each
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.segments import Label
from workbench.core.blocks import Blocks
from workbench.core.fingerprint import BLOCK

__all__ = ["FileEntry", "Manifest", "TensorEntry", "cut", "grain_for", "runs"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class FileEntry:
    """One file.

    Attributes:
        size: bytes.
        kind: ``data`` (holds elements), ``metadata`` (the catalog is made from it), ``other``.
        lengths: ``(S,) int64`` bytes of its segments, one after the other.
        owners: ``(S,) int32`` their positions in the manifest's labels.
        digests: ``(B, 16) uint8``, of the blocks that :meth:`blocks` gives.
    """

    size: int
    kind: str
    lengths: Ints
    owners: Array
    digests: Array

    def blocks(self, name: str, grain: int) -> Blocks:
        """What each digest is of: segments, small neighbours together until they have ``grain`` bytes, in blocks."""
        return Blocks(name, *cut(runs(self.lengths, grain)))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; ``fingerprint`` is ``None`` where it has none (a hole), and then ``why`` says so."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None
    why: str = ""


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a checkpoint was when the manifest was written.

    Attributes:
        path: of the manifest's file, where it has one.
        made: time, ISO 8601 in UTC.
        name, format, step: of the checkpoint.
        grain: bytes up to which neighbouring segments share a digest; 0 where each has its own.
        labels: what segments are: ``(kind, name)``, with more names where tensors share bytes.
        files, tensors: by name.
        left_out: what lies in the folder but is not covered, with the reason.
    """

    path: str | None
    made: str
    name: str
    format: str
    step: int | None
    grain: int
    labels: list[Label]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    left_out: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def __repr__(self) -> str:
        digests = sum(len(entry.digests) for entry in self.files.values())
        return (
            f"Manifest({self.name!r}, {self.format}, {len(self.files):,} files, {self.nbytes:,} bytes, "
            f"{len(self.tensors):,} tensors, {digests:,} digests, made {self.made})"
        )


def grain_for(columns: Iterable[Ints], budget: int) -> int:
    """The smallest grain with which all files together have at most about ``budget`` digests."""
    columns = list(columns)
    for grain in (0, *(1 << bits for bits in range(12, 23))):
        if sum(len(cut(runs(lengths, grain))[0]) for lengths in columns) <= budget:
            return grain
    return BLOCK


def runs(lengths: Ints, grain: int) -> Ints:
    """Bytes of each run of segments that are hashed together: closed as soon as it has ``grain`` bytes."""
    if grain == 0 or not len(lengths):
        return lengths
    found: list[int] = []
    under_way = 0
    for length in lengths.tolist():
        under_way += length
        if under_way >= grain:
            found.append(under_way)
            under_way = 0
    return np.array([*found, under_way] if under_way else found, np.int64)


def cut(lengths: Ints) -> tuple[Ints, Ints]:
    """Where the blocks of at most :data:`BLOCK` bytes begin and end, each run cut from its own beginning."""
    counts = -(-lengths // BLOCK)
    ends = np.cumsum(lengths)
    run = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (ends - lengths)[run] + within * BLOCK
    return starts.astype(np.int64), np.minimum(starts + BLOCK, ends[run]).astype(np.int64)
