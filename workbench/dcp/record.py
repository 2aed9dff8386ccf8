"""The record of what each rank wrote, packed for the gather; from it follow the items' places and the manifest.

::

    a rank     item  file  kind  offset  length  crc      27 bytes per item, and 16 for each block of 4 MiB
    rank 0     + the plan of all ranks  ──►  storage_data of ``.metadata``
                                        ──►  Manifest: segments, their digests, fingerprints of tensors

The bytes around a payload depend on the tensor's type and shape and on the CRC alone, so their digests are not sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from workbench.analysis.manifest_entries import FileEntry, Manifest, TensorEntry
from workbench.analysis.segments import Labels
from workbench.core.blocks import DIGEST
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BLOCK, BlockDigests, combine
from workbench.core.words import plural
from workbench.dcp.datafile import OPAQUE, TENSOR, WrittenItem, archive_of
from workbench.errors import UnsupportedFormatError, WriteError
from workbench.names.steps import step_of

LIVE = 0x80  #: added to the kind of an item whose bytes are known to be those of the trainer
NAMED = 100  #: tensors named in the record of a save
_ITEM = np.dtype(
    [("item", "<u4"), ("file", "<u2"), ("kind", "u1"), ("offset", "<u8"), ("length", "<u8"), ("crc", "<u4")]
)


@dataclass(frozen=True)
class Phase:
    """A part of a save on one rank.

    Attributes:
        name: ``stage``, ``plan``, ``serialise``, ``hash``, ``write``, ``sync``, ``gather`` or ``metadata``. Seconds of
            ``serialise`` to ``sync`` are added up over the threads of a rank.
        start: seconds since the epoch.
    """

    name: str
    start: float
    seconds: float
    nbytes: int = 0


@dataclass(frozen=True)
class RankRecord:
    """The record of what one rank wrote.

    Attributes:
        folder: the folder; ranks whose plan is from an older save may disagree.
        files: name and size of each data file.
        columns: packed items; see the module.
        digests: digests of the blocks, in the order of the items.
        phases: of this rank.
        names: digest of the names and offsets of the written items.
        items: the written items, if the planner may have changed them after the global plan.
        notes: sentences for the record of the save.
    """

    folder: str
    files: tuple[tuple[str, int], ...]
    columns: bytes
    digests: bytes
    phases: tuple[Phase, ...]
    names: bytes
    items: tuple[WriteItem, ...] | None = None
    notes: tuple[str, ...] = ()


def packed(items: Sequence[tuple[int, int, WrittenItem]]) -> tuple[bytes, bytes]:
    """Return the columns and the digests of items: position in the rank's plan, file, and what was written."""
    columns = np.empty(len(items), _ITEM)
    for row, (number, file, one) in enumerate(items):
        columns[row] = number, file, one.kind | (LIVE if one.live else 0), one.offset, one.length, one.crc
    return columns.tobytes(), b"".join(one.digests for _, _, one in items)


def names_digest(items: Sequence[WriteItem]) -> bytes:
    """Return a digest of the names and offsets of items, in their order."""
    hasher = xxhash.xxh3_128()
    for item in items:
        hasher.update(f"{item.index.fqn}\0{item.index.offset}\0".encode("utf-8", "surrogatepass"))
    return hasher.digest()


def storage_data(records: Sequence[RankRecord], plans: Sequence[Sequence[WriteItem]]) -> dict[MetadataIndex, Any]:
    """Return where each item is, in the form that torch's readers expect.

    Raises:
        WriteError: the ranks wrote items other than the planned ones.
    """
    found: dict[MetadataIndex, Any] = {}
    planned = 0
    for record, plan in zip(records, plans, strict=True):
        rows = np.frombuffer(record.columns, _ITEM)
        planned += len(plan)
        if len(rows) != len(plan) or names_digest(plan) != record.names:
            raise WriteError(
                f"a rank wrote {plural(len(rows), 'item')} that differ from the {plural(len(plan), 'planned one')}; "
                "nothing was committed. Its planner changed the plan after the global plan was made"
            )
        for number, file, _, offset, length, _ in rows.tolist():
            found[plan[number].index] = _StorageInfo(record.files[file][0], offset, length)
    if len(found) != planned:
        twice = planned - len(found)
        raise WriteError(f"{plural(twice, 'item')} of the plan with the name of another item; nothing was committed")
    return found


def live_of(records: Sequence[RankRecord], plans: Sequence[Sequence[WriteItem]]) -> dict[str, Any]:
    """Return which tensors were written as the trainer held them, for the manifest: JSON types."""
    every: dict[str, bool] = {}
    for record, plan in zip(records, plans, strict=True):
        rows = np.frombuffer(record.columns, _ITEM)
        for number, kind in zip(rows["item"].tolist(), rows["kind"].tolist(), strict=True):
            if plan[number].type != WriteItemType.BYTE_IO:
                key = plan[number].index.fqn
                every[key] = every.get(key, True) and bool(kind & LIVE)
    unknown = [key for key, equal in every.items() if not equal]
    return {"tensors": len(every), "equal": len(every) - len(unknown), "not_compared": sorted(unknown)[:NAMED]}


def manifest_of(
    name: str,
    metadata: Metadata,
    data: bytes,
    records: Sequence[RankRecord],
    plans: Sequence[Sequence[WriteItem]],
    step: int | None,
    save: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of a checkpoint from the digests taken while it was written; no file is read.

    Args:
        name: name of the checkpoint's folder.
        metadata: as it is stored, and ``data``, its bytes.
        step: the step in the state; otherwise the name's.
        save: the record of the save.
    """
    labels = Labels()
    chunks: dict[str, list[_HashedChunk]] = {}
    entries: dict[str, FileEntry] = {}
    for record, plan in zip(records, plans, strict=True):
        files = [_Segments() for _ in record.files]
        at = 0
        for number, file, kind, offset, length, crc in np.frombuffer(record.columns, _ITEM).tolist():
            item, segments, kind = plan[number], files[file], kind & ~LIVE
            fqn = item.index.fqn
            if kind != TENSOR:
                count = -(-length // BLOCK)
                digests = record.digests[at : at + count * DIGEST]
                label = labels.of("object" if item.type == WriteItemType.BYTE_IO else "archive", fqn)
                segments.add(offset, length, label, digests)
                if kind == OPAQUE:
                    chunks.setdefault(fqn, []).append(_HashedChunk(item.tensor_data, None))
            else:
                head, nbytes, tail = _around(*_element(item), crc)
                count = -(-nbytes // BLOCK)
                digests = record.digests[at : at + count * DIGEST]
                label = labels.of("archive", fqn)
                if nbytes:
                    segments.add(offset, len(head), label, _digest(head))
                    segments.add(offset + len(head), nbytes, labels.of("tensor", fqn), digests)
                    segments.add(offset + len(head) + nbytes, len(tail), label, _digest(tail))
                else:
                    segments.add(offset, length, labels.of("tensor", fqn), _digest(head + tail))
                chunks.setdefault(fqn, []).append(_HashedChunk(item.tensor_data, digests))
            at += count * DIGEST
        entries |= {name: one.entry(size, "data") for (name, size), one in zip(record.files, files, strict=True)}
    hasher, own = BlockDigests(), _Segments()
    hasher.update(np.frombuffer(data, np.uint8))
    own.add(0, len(data), labels.of("rest"), b"".join(hasher.digests()))
    entries = {".metadata": own.entry(len(data), "metadata")} | entries
    return Manifest(
        None,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        name,
        "dcp",
        step_of(name) if step is None else step,
        0,
        labels,
        dict(sorted(entries.items())),
        {
            key: entry
            for key, one in metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata) and (entry := _tensor(one, chunks.get(key, [])))
        },
        {},
        save,
    )


# ---- segments --------------------------------------------------------------------------------------------------------


class _Segments:
    """Segments of one file."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, bytes]] = []

    def add(self, start: int, length: int, label: int, digests: bytes) -> None:
        if length:
            self._rows.append((start, length, label, digests))

    def entry(self, size: int, kind: str) -> FileEntry:
        rows = sorted(self._rows, key=lambda row: row[0])
        return FileEntry(
            size,
            kind,
            np.array([row[1] for row in rows], np.int64),
            np.array([row[2] for row in rows], np.int32),
            np.frombuffer(b"".join(row[3] for row in rows), np.uint8).reshape(-1, DIGEST),
        )


def _element(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def _around(dtype: torch.dtype, shape: tuple[int, ...], crc: int) -> tuple[bytes, int, bytes]:
    """Return the archive of a tensor: the bytes before its payload, their number, and the bytes after it."""
    archive = archive_of(dtype, shape)
    assert archive is not None  # an item of the kind TENSOR was made from it
    return archive.head, archive.nbytes, archive.tail(crc)


@lru_cache(maxsize=4096)
def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


# ---- fingerprints ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HashedChunk:
    """A stored chunk and the digests of its payload's blocks; ``None`` if these are unknown."""

    data: Any
    digests: bytes | None
    sizes: tuple[int, ...] = field(init=False)
    offsets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.data.chunk.sizes))
        object.__setattr__(self, "offsets", tuple(self.data.chunk.offsets))


def _tensor(stored: TensorStorageMetadata, chunks: Sequence[_HashedChunk]) -> TensorEntry | None:
    """Return the entry of a tensor, with its fingerprint if the blocks of its chunks are blocks of the whole tensor.

    Return ``None`` for an element type that the workbench does not know; its bytes are still covered.
    """
    shape = tuple(stored.size)
    try:
        dtype = by_name(stored.properties.dtype)
    except UnsupportedFormatError:
        return None
    chunks = sorted((one for one in chunks if prod(one.sizes)), key=lambda one: one.offsets)
    row = prod(shape[1:]) * dtype.itemsize
    end = 0
    for one in chunks:
        if one.digests is None:
            return TensorEntry(dtype.name, shape, None, "it is not a single array of elements in row-major order")
        whole_rows = one.sizes[1:] == shape[1:]
        if not whole_rows or (one.offsets or (0,))[0] != end or (end * row) % BLOCK:
            why = (
                f"the blocks of its {plural(len(chunks), 'chunk')} are not those of the whole tensor; "
                "seal the checkpoint"
            )
            return TensorEntry(dtype.name, shape, None, why)
        end += (one.sizes or (1,))[0]
    if end != (shape or (1,))[0] and prod(shape):
        return TensorEntry(dtype.name, shape, None, "some of its elements are not stored")
    digests = b"".join(one.digests or b"" for one in chunks)
    blocks = [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]
    return TensorEntry(dtype.name, shape, combine(dtype, shape, blocks).hex)
