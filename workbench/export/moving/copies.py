"""The copies that fill the pieces of all target files: one read plan, in the order of each piece's bytes.

::

    piece (row-major stream of elements)   0 ─────────── lo ════════ hi ──────── numel
    copy, a run on both sides              its chunk's elements are stored in the file as in the piece: bytes are read
    from the file directly to their destination
    copy, not a run                        columns of a tensor, say: gathered through a view of the file
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL, PACKED
from workbench.core.plan import plan_reads
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.atomic.journal import FORMAT
from workbench.export.casts import FLOATS, SOURCES
from workbench.export.change import Change
from workbench.export.filemap import FileMap, Pieces


@dataclass(frozen=True, eq=False)
class Copies:
    """``M`` copies from chunks to pieces; pieces of all files are numbered consecutively.

    Attributes:
        ptr: ``(P+1,)`` CSR over the copies.
        code: ``(P,)`` element type of each piece's source.
        numel: ``(P,)`` elements; 0 for a literal.
        run: ``(M,)`` whether it is one run of elements on both sides.
        twice: ``(P,)`` whether chunks overlap in it, so elements stored twice have to be compared.
        row: ``(M,)`` chunk row of the catalog.
        lo, hi: ``(M,)`` its elements are in ``[lo, hi)`` of the piece's stream (exactly these for a run).
        at: ``(M,)`` elements of the chunk's own stream before it, if it is a run.
        source, dest, sizes: ``(M, D)`` its box in the chunk, and in the piece.
    """

    ptr: Ints
    code: Ints
    numel: Ints
    run: Array
    twice: Array
    row: Ints
    lo: Ints
    hi: Ints
    at: Ints
    source: Ints
    dest: Ints
    sizes: Ints

    def of_pieces(self, index: Ints) -> Copies:
        """Return the copies of some pieces, numbered in that order."""
        counts = self.ptr[index + 1] - self.ptr[index]
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.repeat(self.ptr[index] - ends[:-1], counts) + np.arange(int(ends[-1]))
        by_piece = {name: getattr(self, name)[index] for name in ("code", "numel", "twice")}
        columns = ("run", "row", "lo", "hi", "at", "source", "dest", "sizes")
        return Copies(ptr=ends, **by_piece, **{name: getattr(self, name)[rows] for name in columns})

    @classmethod
    def of(cls, catalog: Catalog, many: Sequence[Pieces]) -> Copies:
        """Plan everything.

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
        piece = _join([pieces.piece + at for at, pieces in numbered])
        read = ~np.isin(piece, literal)
        piece, tensor = piece[read], _join([pieces.tensor for pieces in many])[read]
        offsets, sizes, dest = (
            _stack([getattr(pieces, name) for pieces in many], dims)[read] for name in ("offsets", "sizes", "dest")
        )
        written = _join([pieces.dtype for pieces in many])
        names = [name for pieces in many for name in pieces.names]
        numel = box.volume(shape)
        numel[literal] = 0
        _check(names, piece, dest, sizes, shape, numel)
        changes = {at + k: change for at, pieces in numbered for k, change in pieces.change.items()}
        code = _types(catalog, names, piece, tensor, written, changes)
        changed = written != code
        changed[list(changes)] = True

        plan = plan_reads(catalog, tensor, offsets, sizes)
        owner, begin = piece[plan.request], plan.dest + dest[plan.request]
        have = np.bincount(owner, box.volume(plan.sizes), len(names)).astype(np.int64)
        lo = _flat(shape[owner], begin)
        hi = _flat(shape[owner], begin + plan.sizes - 1) + 1
        order = np.lexsort((lo, owner))
        plan, owner, begin, lo, hi = plan.take(order), owner[order], begin[order], lo[order], hi[order]
        chunk = catalog.sizes[plan.row].astype(np.int64)
        run = _is_run(shape[owner], plan.sizes) & _is_run(chunk, plan.sizes)
        packed = PACKED[code] & (numel > 0)
        _check_packed(catalog, names, packed, owner, plan.sizes, chunk, shape, changed)
        return cls(
            np.searchsorted(owner, np.arange(len(names) + 1)),
            code,
            numel,
            run,
            have > numel,
            plan.row,
            lo,
            hi,
            _flat(chunk, plan.source),
            plan.source,
            begin,
            plan.sizes,
        )


def _check(names: list[str], piece: Ints, dest: Ints, sizes: Ints, shape: Ints, numel: Ints) -> None:
    """Check that the boxes of a piece cover each of its elements exactly once."""
    inside = ((dest >= 0) & (dest + sizes <= shape[piece])).all(axis=1)
    filled = np.bincount(piece, box.volume(sizes), len(names)).astype(np.int64) == numel
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


def _check_packed(
    catalog: Catalog,
    names: list[str],
    packed: Array,
    owner: Ints,
    sizes: Ints,
    chunk: Ints,
    shape: Ints,
    changed: Array,
) -> None:
    if not packed.any():
        return
    count = np.bincount(owner, minlength=len(names))
    split = (sizes != chunk).any(axis=1) | (sizes != shape[owner]).any(axis=1)
    for at in np.flatnonzero(packed).tolist():
        if count[at] != 1 or split[owner == at].any() or changed[at]:
            raise UnsupportedFormatError(
                f"tensor {names[at]!r}: its elements share bytes, so it can only be written whole, from a single chunk "
                "that is stored whole"
            )


def _flat(shapes: Ints, offsets: Ints) -> Ints:
    """Return the position of an element in its row-major stream."""
    steps = np.ones_like(shapes)
    steps[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return np.asarray((offsets * steps).sum(axis=1), np.int64)


def _is_run(shapes: Ints, sizes: Ints) -> Array:
    """Return, for each box, whether it is one run of its tensor: cut along one axis, single steps on outer axes, whole
    on inner ones.
    """
    inner = np.cumsum(sizes > 1, axis=1) - (sizes > 1) > 0
    return np.asarray(((sizes == shapes) | ~inner).all(axis=1))


def _join(columns: list[Any]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *columns]).astype(np.int64)


def _stack(columns: list[Ints], dims: int) -> Ints:
    return np.concatenate([np.empty((0, dims), np.int64), *columns])


def plan_of(path: str, catalog: Catalog, copies: Copies, maps: Sequence[FileMap]) -> str:
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
    fold(*(getattr(copies, field.name) for field in fields(copies)))
    columns = (catalog.file, catalog.start, catalog.stop, catalog.codec, catalog.inner, catalog.strides)
    fold(*(column if column is None else column[copies.row] for column in columns))
    for one in maps:
        fold(one.name, one.size, one.start, one.finish is not None)
        fold(*(part for literal in one.literals for part in literal))
        fold(*(getattr(one.pieces, field.name) for field in fields(one.pieces)))
    return hasher.hexdigest()
