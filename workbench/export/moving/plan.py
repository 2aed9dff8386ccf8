"""The pieces of all target files as streams, and what has to hold before any is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.box import row_major
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL, PACKED
from workbench.core.transfer.regions import BoxRequests
from workbench.core.transfer.streams import Streams
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.atomic.journal import FORMAT
from workbench.export.casts import FLOATS, SOURCES
from workbench.export.change import Change
from workbench.export.filemap import FileMap, Pieces


def streams_of(catalog: Catalog, many: Sequence[Pieces]) -> Streams:
    """Plan the pieces of all files as streams, numbered consecutively, of the types that are read.

    A literal is a stream without elements.

    Raises:
        HoleError: an element is not stored.
        UnsupportedFormatError: elements that share bytes are in several chunks or would be cast, or a cast is not
            supported.
        UsageError: the boxes of a piece do not cover it exactly, or a change has other types than its piece.
    """
    base = np.cumsum([0, *(len(pieces) for pieces in many)])
    numbered = list(zip(base.tolist(), many, strict=False))
    dims = catalog.shape.shape[1]
    shape = _stack([pieces.shape for pieces in many], dims)
    literal = np.array([at + k for at, pieces in numbered for k in pieces.literal], np.int64)
    shape[literal] = 0
    piece = _join([pieces.piece + at for at, pieces in numbered])
    read = ~np.isin(piece, literal)
    piece, tensor = piece[read], _join([pieces.tensor for pieces in many])[read]
    offsets, sizes, dest = (
        _stack([getattr(pieces, name) for pieces in many], dims)[read] for name in ("offsets", "sizes", "dest")
    )
    written = _join([pieces.dtype for pieces in many])
    names = [name for pieces in many for name in pieces.names]
    _check(names, piece, dest, sizes, shape)
    changes = {at + k: change for at, pieces in numbered for k, change in pieces.change.items()}
    code = _types(catalog, names, piece, tensor, written, changes)
    changed = written != code
    changed[list(changes)] = True
    steps = row_major(shape)[piece]
    boxes = BoxRequests(tensor, offsets, sizes, piece, (dest * steps).sum(axis=1), steps)
    streams = Streams.of(catalog, code, shape, boxes)
    _check_packed(catalog, names, streams, changed)
    return streams


def _check(names: list[str], piece: Ints, dest: Ints, sizes: Ints, shape: Ints) -> None:
    """Check that the boxes of a piece cover each of its elements exactly once."""
    inside = ((dest >= 0) & (dest + sizes <= shape[piece])).all(axis=1)
    filled = np.bincount(piece, box.volume(sizes), len(names)).astype(np.int64) == box.volume(shape)
    i, _ = box.overlapping(piece, dest, sizes, limit=1)
    bad = {*piece[~inside].tolist(), *np.flatnonzero(~filled).tolist(), *piece[i].tolist()}
    if bad:
        raise UsageError(f"the boxes of piece {names[min(bad)]!r} do not cover each of its elements exactly once")


def _types(
    catalog: Catalog, names: list[str], piece: Ints, tensor: Ints, written: Array, changes: Mapping[int, Change]
) -> Ints:
    code = written.astype(np.int64)
    code[piece] = catalog.dtype[tensor]
    mixed = np.flatnonzero(code[piece] != catalog.dtype[tensor])
    if len(mixed):
        raise UsageError(f"piece {names[piece[mixed[0]]]!r} joins tensors of several element types")
    for at, change in changes.items():
        if (change.source.code, change.wanted.code) != (code[at], written[at]):
            raise UsageError(
                f"piece {names[at]!r} has type {ALL[code[at]]} and is written as {ALL[written[at]]}, but its change "
                f"converts from {change.source} to {change.wanted}"
            )
    for at in np.flatnonzero(code != written).tolist():
        if at in changes:
            continue
        old, new = ALL[code[at]], ALL[written[at]]
        if old.name not in SOURCES or new.name not in FLOATS:
            raise UnsupportedFormatError(f"tensor {names[at]!r}: casting from {old} to {new} is not supported")
    return code


def _check_packed(catalog: Catalog, names: list[str], streams: Streams, changed: Array) -> None:
    """Check that elements that share bytes are copied whole, and unchanged, from a chunk that is stored whole."""
    refused = changed | ~streams.regions.uncut(catalog, streams.shape)
    for at in np.flatnonzero(PACKED[streams.code] & (streams.nbytes > 0) & refused).tolist():
        raise UnsupportedFormatError(
            f"tensor {names[at]!r}: its elements share bytes, so it can only be written whole, from a single chunk "
            "that is stored whole"
        )


def _join(columns: list[Any]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *columns]).astype(np.int64)


def _stack(columns: list[Ints], dims: int) -> Ints:
    return np.concatenate([np.empty((0, dims), np.int64), *columns])


def plan_of(path: str, catalog: Catalog, streams: Streams, maps: Sequence[FileMap]) -> str:
    """Return a digest of everything that determines the written bytes: the source's files, each byte's place and
    origin.

    Args:
        path: the source's real path. Its files count as unchanged while size and modification time are the same.
    """
    hasher = hashlib.sha256(f"workbench journal {FORMAT}\n".encode())

    def fold(*values: object) -> None:
        for value in values:
            if isinstance(value, np.ndarray):
                raw = np.ascontiguousarray(value)
                hasher.update(f"{raw.dtype.str}{raw.shape}".encode() + raw.tobytes())
            elif isinstance(value, bytes):
                hasher.update(b"%d:" % len(value) + value)
            elif isinstance(value, Mapping):  # of pieces: the changes of their elements, or their bytes
                for at, one in value.items():
                    fold(at, one if isinstance(one, bytes | np.ndarray) else one.identity)
            else:
                fold(repr(value).encode())

    fold(os.fsencode(path), list(zip(catalog.files, catalog.file_stats, strict=True)))
    fold(*streams.columns())
    columns = (catalog.file, catalog.start, catalog.stop, catalog.codec, catalog.inner, catalog.strides)
    fold(*(column if column is None else column[streams.regions.row] for column in columns))
    for one in maps:
        fold(one.name, one.size, one.start, one.finish is not None)
        fold(*(part for literal in one.literals for part in literal))
        fold(*(getattr(one.pieces, field.name) for field in fields(one.pieces)))
    return hasher.hexdigest()
