"""The contents of a manifest, and the bytes of each of its digests.

::

    segments of a file      header │ a │ b │    c    │ …           lengths and labels
    runs                    header   a   b  │   c    │             small neighbors joined, up to the grain
    blocks                  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒│▒▒▒▒             up to 4 MiB, one digest each
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.analysis.segments import Label
from workbench.core.arrays import Array, Ints
from workbench.core.blocks import FileBlocks
from workbench.core.fingerprint import BLOCK
from workbench.core.words import plural


@dataclass(frozen=True, eq=False)
class FileEntry:
    """One file.

    Attributes:
        size: bytes.
        kind: ``data`` (holds elements), ``metadata`` (a source of the catalog), ``other``.
        lengths: ``(S,) int64`` bytes of its segments, in order.
        owners: ``(S,) int32`` their positions in the manifest's labels.
        digests: ``(B, 16) uint8`` of the blocks in :meth:`blocks`.
    """

    size: int
    kind: str
    lengths: Ints
    owners: Array
    digests: Array

    def blocks(self, name: str, grain: int) -> FileBlocks:
        """Return the blocks of the digests: segments, with small neighbors joined up to ``grain`` bytes, in blocks."""
        return FileBlocks(name, *cut(runs(self.lengths, grain)))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; ``fingerprint`` is ``None`` if it has none (a hole), and ``why`` is the reason."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None
    why: str = ""


@dataclass(frozen=True, eq=False)
class Manifest:
    """The state of a checkpoint when the manifest was written.

    Attributes:
        path: path of the manifest's file, if it has one.
        made: time, ISO 8601 in UTC.
        name, format, step: of the checkpoint.
        grain: bytes up to which neighboring segments share a digest; 0 if each has its own.
        labels: labels of segments: ``(kind, name)``, with more names if tensors share bytes.
        files, tensors: by name.
        left_out: entries of the folder that are not covered → the reason.
        save: how the checkpoint was saved, if its writer recorded that: ranks, phases, replicas that differ.
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
    save: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def __repr__(self) -> str:
        digests = sum(len(entry.digests) for entry in self.files.values())
        return (
            f"Manifest({self.name!r}, {self.format}, {plural(len(self.files), 'file')}, {plural(self.nbytes, 'byte')}, "
            f"{plural(len(self.tensors), 'tensor')}, {plural(digests, 'digest')}, made {self.made})"
        )


def grain_for(columns: Iterable[Ints], budget: int) -> int:
    """Return the smallest grain with which all files together have up to about ``budget`` digests."""
    columns = list(columns)
    for grain in (0, *(1 << bits for bits in range(12, 23))):
        if sum(len(cut(runs(lengths, grain))[0]) for lengths in columns) <= budget:
            return grain
    return BLOCK


def runs(lengths: Ints, grain: int) -> Ints:
    """Return the bytes of each run of segments hashed together; a run ends once it has ``grain`` bytes."""
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
    """Return begin and end of blocks of up to :data:`BLOCK` bytes; each run is cut from its beginning."""
    counts = -(-lengths // BLOCK)
    ends = np.cumsum(lengths)
    run = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (ends - lengths)[run] + within * BLOCK
    return starts.astype(np.int64), np.minimum(starts + BLOCK, ends[run]).astype(np.int64)
