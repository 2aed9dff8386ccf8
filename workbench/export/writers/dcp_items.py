"""Data files of torch's distributed checkpoint: one per rank, items back to back.

::

    __0_0.distcp    │ object │ object │ chunk │ chunk │ …      each item a separate torch.save archive;
    __1_0.distcp    │ chunk │ chunk │ …                        objects are in the first rank's file only

Shared by the formats whose data files these are (DCP, Megatron ``torch_dist``).

Source: torch 2.13 ``torch/distributed/checkpoint/filesystem.py`` (``_write_files_from_queue``, ``_write_item``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.dtypes import ALL
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.filemap import FileMap, Finish, Literal, Pieces, join, literals
from workbench.export.moving.pieces import Chunks, chunk_pieces
from workbench.export.selection import ExportSelection
from workbench.export.writers.flatten import FlatLeaf, archive
from workbench.export.writers.tensor_archive import TensorArchive


class Chunk(NamedTuple):
    """A chunk of a tensor: its element type (a code), the tensor's shape, its box, and where its item is."""

    key: str
    code: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Blob(NamedTuple):
    """An object, and where its item is."""

    key: str
    file: str
    start: int
    length: int


class WrittenItems(NamedTuple):
    """The data files, by rank, and their contents, in stored order."""

    maps: list[FileMap]
    blobs: list[Blob]
    chunks: list[Chunk]


def lay_out(selection: ExportSelection, leaves: Sequence[FlatLeaf]) -> WrittenItems:
    """Return the data files of a selection.

    Args:
        leaves: non-tensor state; tensors in it become tensors of the checkpoint, in the first file.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load; names the tensor.
        UsageError: two tensors or objects of one name.
    """
    check_names([*selection.names, *(leaf.key for leaf in leaves)])
    maps: list[FileMap] = []
    blobs: list[Blob] = []
    chunks: list[Chunk] = []
    for rank, mine in enumerate(chunk_pieces(selection)):
        name = f"__{rank}_0.distcp"
        stored = [(leaf.key, archive(leaf.value)) for leaf in leaves if leaf.literal is None] if not rank else []
        known = [leaf.literal for leaf in leaves if leaf.literal is not None] if not rank else []
        at = 0
        heads: list[tuple[int, bytes]] = []
        for key, data in stored:
            heads.append((at, data))
            blobs.append(Blob(key, name, at, len(data)))
            at += len(data)
        pieces = join([mine.pieces, literals(known, mine.pieces.shape.shape[1])]) if known else mine.pieces
        one, starts, lengths = _file(pieces, name, heads, at)
        maps.append(one)
        chunks += rows(selection, mine, pieces, known, name, starts, lengths)
    return WrittenItems(maps, blobs, chunks)


def _file(pieces: Pieces, name: str, heads: list[tuple[int, bytes]], at: int) -> tuple[FileMap, Ints, Ints]:
    """Return the file of these pieces after ``at`` bytes of objects, and each item's first byte and length."""
    kinds, kind = np.unique(
        np.concatenate([pieces.dtype[:, None], pieces.ndim[:, None], pieces.shape], axis=1), axis=0, return_inverse=True
    )
    kind = kind.reshape(-1)
    archives = []
    for number, (code, ndim, *shape) in enumerate(kinds.tolist()):
        try:
            archives.append(TensorArchive.of(ALL[code], tuple(shape[:ndim])))
        except UnsupportedFormatError as error:
            first = pieces.names[int(np.flatnonzero(kind == number)[0])]
            raise UnsupportedFormatError(f"tensor {first!r}: {error}") from None
    lengths = np.array([one.size for one in archives], np.int64)[kind]
    starts = at + np.cumsum(lengths) - lengths
    before = np.array([len(one.head) for one in archives], np.int64)[kind]
    size = at + int(lengths.sum())
    heads += [(start, archives[k].head) for start, k in zip(starts.tolist(), kind.tolist(), strict=True)]
    begin = starts + before
    finish = _finish([archives[k] for k in kind.tolist()], begin + pieces.nbytes)
    return FileMap(name, size, tuple(heads), pieces, begin, finish), starts, lengths


def _finish(archives: list[TensorArchive], ends: Ints) -> Finish:
    def finish(crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        return [(end, one.tail(crc)) for end, one, crc in zip(ends.tolist(), archives, crcs, strict=True)]

    return finish


def rows(
    selection: ExportSelection,
    mine: Chunks,
    pieces: Pieces,
    known: Sequence[Literal],
    file: str,
    starts: Ints,
    lengths: Ints,
) -> list[Chunk]:
    """List the items of a file: the chunks of ``mine``, then the whole tensors ``known``."""
    whole = [selection.shape_of(t) for t in mine.tensor.tolist()] + [one.shape for one in known]
    offsets = mine.offsets.tolist() + [[0] * len(one.shape) for one in known]
    return [
        Chunk(key, code, shape, tuple(low[:n]), tuple(size[:n]), file, start, length)
        for key, code, n, shape, low, size, start, length in zip(
            pieces.names,
            pieces.dtype.tolist(),
            pieces.ndim.tolist(),
            whole,
            offsets,
            pieces.shape.tolist(),
            starts.tolist(),
            lengths.tolist(),
            strict=True,
        )
    ]


def check_names(names: Sequence[str]) -> None:
    """Raise if two names are equal.

    Raises:
        UsageError: the message shows the name.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"two entries would be named {name!r}; rename one of them, or leave it out")
        seen.add(name)
