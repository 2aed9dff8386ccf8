"""The catalog: columns that record what is stored where.

Each row is a *chunk*: an n-d box of one global tensor and the byte range that contains it. Rows are ordered by tensor,
so ``row_ptr[t]:row_ptr[t+1]`` (CSR) are the chunks of tensor ``t``. Distinct names are kept once; there is no Python
object per chunk, so a million chunks take ~70 MB and a question about all of them takes milliseconds::

    keys      dtypes  shapes            tensor offsets  sizes    file start    stop
    wq        bf16    (8, 4)      ──▶   0      (0, 0)   (4, 4)   0    128      160
    wk        bf16    (2, 4)            0      (4, 0)   (4, 4)   1    128      160
                                        1      (0, 0)   (2, 4)   0    160      176

A *stored item* is the byte range ``[start, stop)`` of a file, encoded by a codec of :mod:`workbench.core.codecs`;
decoding it gives a payload. A chunk is a view of its payload: ``inner`` bytes from its beginning, with ``strides``
counted in elements. Both columns are ``None`` while every chunk is its whole payload in row-major order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.core import box, codecs
from workbench.core.arrays import Array
from workbench.core.dtypes import ALL, DType, nbytes_of_codes
from workbench.core.place import FileStat
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, IncompleteError, MissingFileError, OpenError, TruncatedError

MAX_ELEMENTS = 1 << 55  #: number of elements beyond which a shape is impossible
INFLATED = 64  #: a chunk is not read if its elements take more than this many times the stored bytes …
INFLATED_LEAST = 64 << 20  #: … and more bytes than this
INFLATED_FILE = 256  #: chunks are not read if all elements of their file take more than this many times its bytes …
INFLATED_FILE_LEAST = 4 << 30  #: … and more bytes than this


@dataclass(frozen=True, eq=False)
class ObjectTable:
    """Where the non-tensor items are stored, one row each (DCP's bytes items, sharded objects …)."""

    keys: list[str] = field(default_factory=list)
    file: Array = field(default_factory=lambda: np.empty(0, np.int32))
    start: Array = field(default_factory=lambda: np.empty(0, np.int64))
    stop: Array = field(default_factory=lambda: np.empty(0, np.int64))
    codec: Array = field(default_factory=lambda: np.empty(0, np.uint8))


@dataclass(frozen=True, eq=False)
class Catalog:
    """Columns of a checkpoint; treat them as read-only.

    Attributes:
        format: the reader's name, ``dcp``.
        keys: stored names, distinct, ``T`` of them.
        dtype: ``(T,) uint8`` codes of :mod:`workbench.core.dtypes`.
        ndim: ``(T,) uint8``.
        shape: ``(T, D) int64`` elements, padded on the right with 1.
        row_ptr: ``(T+1,) int64``, CSR over the chunk columns.
        offsets, sizes: ``(N, D) int64`` elements; the box of each chunk in its global tensor.
        file: ``(N,) int32`` index into ``files``.
        start, stop: ``(N,) int64`` bytes of the stored item in its file.
        codec: ``(N,) uint8`` codes of :mod:`workbench.core.codecs`.
        rank: ``(N,) int32`` rank that wrote the chunk, ``-1`` if unknown.
        replica: ``(N,) int16``, 0 for the first copy of a box.
        inner: ``(N,) int64`` bytes into the decoded payload, or ``None`` for all 0.
        strides: ``(N, D) int64`` elements, or ``None`` for all row-major.
        files: names relative to the checkpoint's folder.
        file_stats: size and modification time of each file when the catalog was made.
        metadata_files: files from which the catalog was made (they key its cache).
        fqns, roles: by key, if the reader knows them better than :mod:`workbench.names.roles`; otherwise ``None``.
        objects: the non-tensor items.
        meta: plain JSON facts of the reader: ``step``, ``world_size``, ``notes``, ``expected`` …
        views: tensors that are views of the bytes of the listed ones (q of a fused qkv, a stack of layers): found by
            key, but not listed, summed or scanned. They use the same files and file ids.
    """

    format: str
    keys: list[str]
    dtype: Array
    ndim: Array
    shape: Array
    row_ptr: Array
    offsets: Array
    sizes: Array
    file: Array
    start: Array
    stop: Array
    codec: Array
    rank: Array
    replica: Array
    files: list[str]
    file_stats: list[FileStat]
    metadata_files: list[str]
    inner: Array | None = None
    strides: Array | None = None
    fqns: list[str | None] | None = None
    roles: list[str] | None = None
    objects: ObjectTable = field(default_factory=ObjectTable)
    meta: Mapping[str, Any] = field(default_factory=dict)
    views: Catalog | None = None

    def digest(self) -> str:
        """Return a digest (32 hex digits) of all that determines the reads: names, columns, files, identities."""
        found = hashlib.blake2b(digest_size=16)
        stats = [(stat.size, stat.mtime_ns, stat.tag) for stat in self.file_stats]
        texts = (self.format, self.keys, self.files, stats, self.objects.keys)
        found.update(repr(texts).encode("utf-8", "surrogatepass"))
        for name in ("dtype", "ndim", "shape", "row_ptr", *CHUNK_COLUMNS):
            column = getattr(self, name)
            found.update(f"{name}{None if column is None else column.shape}".encode())
            found.update(b"" if column is None else np.ascontiguousarray(column))
        return found.hexdigest()

    # ---- sizes ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def chunks(self) -> int:
        """Number of chunk rows."""
        return len(self.start)

    @property
    def nbytes(self) -> int:
        """Memory used by the columns in bytes (excluding names)."""
        columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        return sum(column.nbytes for column in columns)

    @cached_property
    def tensor(self) -> Array:
        """``(N,) int32`` tensor of each chunk row."""
        return np.repeat(np.arange(len(self.keys), dtype=np.int32), np.diff(self.row_ptr))

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each key."""
        return {key: position for position, key in enumerate(self.keys)}

    @cached_property
    def numel(self) -> Array:
        """``(T,) int64`` elements of each global tensor."""
        return box.volume(self.shape)

    @cached_property
    def tensor_nbytes(self) -> Array:
        """``(T,) int64`` bytes of each global tensor, stored once."""
        return nbytes_of_codes(self.dtype, self.numel)

    @cached_property
    def chunk_nbytes(self) -> Array:
        """``(N,) int64`` bytes of each chunk's elements (not of its stored item)."""
        return nbytes_of_codes(self.dtype[self.tensor], box.volume(self.sizes))

    @cached_property
    def inflated(self) -> Array:
        """``(N,) bool`` chunks whose elements take far more bytes than are stored: listed, never read.

        Strides of 0, and tensors that share bytes, let a small file describe terabytes. Reading them would fill memory
        or take days.
        """
        nbytes, stored = self.chunk_nbytes, self.stop - self.start
        located = ~codecs.COMPRESSED[self.codec]  # known once it is decompressed
        found = located & (nbytes > INFLATED * stored) & (nbytes > INFLATED_LEAST)
        known = np.array([stat.size for stat in self.file_stats], np.int64)
        for doubtful in (nbytes > stored, np.ones(len(found), bool)):  # what is expanded goes first
            rest = located & ~found
            total = np.bincount(self.file[rest], nbytes[rest], len(known))
            implausible = (total > INFLATED_FILE * np.maximum(known, 1)) & (total > INFLATED_FILE_LEAST)
            if not implausible.any():
                break
            found |= rest & doubtful & implausible[self.file]
        return np.asarray(found)

    def not_checked(self, row: int) -> str:
        """Return why an :attr:`inflated` chunk is not read."""
        nbytes, stored = int(self.chunk_nbytes[row]), int(self.stop[row] - self.start[row])
        name = f"tensor {self.keys[self.tensor[row]]!r} was not read: "
        if inflates(nbytes, stored):
            return f"{name}its logical size of {plural(nbytes, 'byte')} is stored in {stored:,}; {_EXPANDED}"
        file = int(self.file[row])
        total = int(self.chunk_nbytes[self.file == file].sum())
        return (
            f"{name}the tensors of {self.files[file]!r} have a logical size of {plural(total, 'byte')}, stored in "
            f"{self.file_stats[file].size:,}; {_EXPANDED}"
        )

    # ---- one tensor ----------------------------------------------------------------------------------------------

    def dtype_of(self, tensor: int) -> DType:
        """Return the element type of a tensor."""
        return ALL[self.dtype[tensor]]

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return tuple(self.shape[tensor, : self.ndim[tensor]].tolist())

    def rows_of(self, tensor: int) -> slice:
        """Return the chunk rows of a tensor."""
        return slice(int(self.row_ptr[tensor]), int(self.row_ptr[tensor + 1]))

    # ---- narrower views ------------------------------------------------------------------------------------------

    def match(self, pattern: str) -> Array:
        """Return the tensors whose key contains a match of a regular expression, as sorted indices."""
        search = re.compile(pattern).search
        return np.flatnonzero(np.fromiter((search(key) is not None for key in self.keys), bool, len(self.keys)))

    def take(self, tensors: Array) -> Catalog:
        """Return a catalog of only these tensors, in the given order, with the same files and objects."""
        tensors = np.asarray(tensors, np.int64)
        counts = np.diff(self.row_ptr)[tensors]
        ends = np.cumsum(counts)
        rows = np.repeat(self.row_ptr[tensors] - (ends - counts), counts) + np.arange(int(counts.sum()))
        columns: dict[str, Any] = {name: getattr(self, name)[tensors] for name in ("dtype", "ndim", "shape")}
        columns |= {name: _rows(getattr(self, name), rows) for name in CHUNK_COLUMNS}
        return replace(
            self,
            keys=[self.keys[t] for t in tensors.tolist()],
            row_ptr=np.concatenate([[0], ends]).astype(np.int64),
            fqns=None if self.fqns is None else [self.fqns[t] for t in tensors.tolist()],
            roles=None if self.roles is None else [self.roles[t] for t in tensors.tolist()],
            **columns,
        )

    def widened(self, dims: int) -> Catalog:
        """Return the same catalog with columns padded to ``dims`` axes, if they have fewer."""
        more = dims - self.shape.shape[1]
        if more <= 0:
            return self
        wide: dict[str, Any] = {
            name: np.pad(column, ((0, 0), (0, more)), constant_values=fill)
            for name, fill in (("shape", 1), ("offsets", 0), ("sizes", 1), ("strides", 0))
            if (column := getattr(self, name)) is not None
        }
        return replace(self, **wide)

    # ---- trust ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless the columns are consistent, as every reader guarantees and every cache must prove.

        Raises:
            CorruptError: a shape, box, range or index is impossible; the message names the first such tensor.
        """
        tensors = len(self.shape)
        if len(self.index) != tensors:
            twice = next(key for position, key in enumerate(self.keys) if self.index[key] != position)
            raise CorruptError(f"tensor {twice!r} occurs twice; it is unknown which one is valid")
        counts = np.diff(self.row_ptr)
        if len(self.row_ptr) != tensors + 1 or self.row_ptr[0] != 0 or self.row_ptr[-1] != self.chunks:
            raise CorruptError("the catalog's row index is inconsistent")
        self._first_bad(_any(self.shape < 0), "has a negative size in its shape {shape}")
        self._first_bad(self.dtype >= len(ALL), "has an element type that is not in the table")
        logs = np.log2(np.maximum(self.shape, 1)).sum(axis=1)
        self._first_bad(logs > np.log2(MAX_ELEMENTS), "has an impossible shape {shape} (more than 2^55 elements)")
        if (counts < 0).any():
            raise CorruptError("the catalog's row index runs backwards")
        owner = self.tensor
        whole = self.shape[owner]
        out = (self.offsets < 0) | (self.sizes < 0) | (self.sizes > whole) | (self.offsets > whole - self.sizes)
        self._first_bad(
            _any(out), "has a chunk outside its shape {shape}: offsets {offsets}, sizes {sizes}", chunk=True
        )
        odd = (self.start < 0) | (self.stop < self.start)
        self._first_bad(odd, "has a chunk with byte range {start:,} to {stop:,}", chunk=True)
        invalid = (self.file < 0) | (self.file >= len(self.files)) | (self.codec >= len(codecs.TABLE))
        self._first_bad(invalid, "refers to a file or codec that does not exist", chunk=True)
        table = self.objects
        backwards = np.flatnonzero((table.start < 0) | (table.stop < table.start))
        if len(backwards):
            row = int(backwards[0])
            raise CorruptError(f"object {table.keys[row]!r} has byte range {table.start[row]:,} to {table.stop[row]:,}")
        self._check_extents(owner)

    def check_files(self) -> None:
        """Raise if a file is absent, or shorter than its byte ranges.

        Raises:
            IncompleteError, MissingFileError, CorruptError: the reader found that something is lost
                (:data:`LOST_FACTS`).
            MissingFileError, TruncatedError: data is missing; the message names the first lost tensor or object.
        """
        for fact, kind in LOST_FACTS.items():
            if isinstance(why := self.meta.get(fact), str):
                raise kind(why)
        sizes = np.array([stat.size for stat in self.file_stats], np.int64)
        if not len(sizes):
            return
        beyond = np.flatnonzero(self.stop > sizes[self.file])
        if len(beyond):
            raise self.truncated(int(beyond[0]))
        beyond = np.flatnonzero(self.objects.stop > sizes[self.objects.file]) if self.objects.keys else beyond
        if len(beyond):
            row = int(beyond[0])
            raise TruncatedError(
                f"object {self.objects.keys[row]!r} ends at byte {self.objects.stop[row]:,} but "
                f"{self.files[self.objects.file[row]]!r} has {sizes[self.objects.file[row]]:,}; {_CUT}"
            )

    def lost(self) -> str:
        """Return which chunks absent or short files leave unreadable, as a note; "" if none."""
        sizes = np.array([stat.size for stat in self.file_stats], np.int64)
        if not len(sizes):
            return ""
        rows = np.flatnonzero(self.stop > sizes[self.file])
        if not len(rows):
            return ""
        files = [self.files[file] for file in np.unique(self.file[rows]).tolist()]
        return (
            f"opened in part: {len(rows):,} of {plural(self.chunks, 'chunk')} cannot be read; absent or truncated: "
            f"{some_of(files)}"
        )

    def truncated(self, row: int) -> OpenError:
        """Return the error for a chunk that is beyond the end of its file, or whose file is absent."""
        if self.file_stats[self.file[row]].size < 0:
            return MissingFileError(
                f"file {self.files[self.file[row]]!r} is missing or unreadable; tensor {self.keys[self.tensor[row]]!r} "
                f"and {plural(int((self.file == self.file[row]).sum()) - 1, 'other chunk')} are in it; restore it, or "
                "open with partial=True to read the rest"
            )
        where = tuple(self.offsets[row, : self.ndim[self.tensor[row]]].tolist())
        file = int(self.file[row])
        return TruncatedError(
            f"tensor {self.keys[self.tensor[row]]!r}: chunk at {where} ends at byte {self.stop[row]:,} but "
            f"{self.files[file]!r} has {self.file_stats[file].size:,}; {_CUT}"
        )

    def _check_extents(self, owner: Array) -> None:
        if self.strides is not None:
            self._first_bad(_any(self.strides < 0), "has a chunk with negative strides", chunk=True)
        if self.inner is not None:
            self._first_bad(self.inner < 0, "has a chunk that starts before its payload", chunk=True)
        raw = codecs.BITS[self.codec]  # other payloads have a length that is known only after decoding
        if not raw.any():
            return
        need = self.chunk_nbytes
        if self.strides is not None:
            full = ~_any(self.sizes == 0)
            overreaching = full[:, None] & (self.sizes > 1) & (self.strides > (self.stop - self.start)[:, None])
            self._first_bad(raw & _any(overreaching), "has strides longer than its payload", chunk=True)
            reach = np.where(full, ((self.sizes - 1) * self.strides).sum(axis=1) + 1, 0)
            need = nbytes_of_codes(self.dtype[owner], reach)
        if self.inner is not None:
            need = need + np.where(need > 0, self.inner, 0)
        short = raw & (need > self.stop - self.start)
        self._first_bad(short, "needs more bytes than its range {start:,} to {stop:,} of {file!r} holds", chunk=True)

    def _first_bad(self, bad: Array, text: str, *, chunk: bool = False) -> None:
        where = np.flatnonzero(bad)
        if not len(where):
            return
        row = int(where[0])
        tensor = int(self.tensor[row]) if chunk else row
        facts: dict[str, Any] = {"shape": self.shape_of(tensor)}
        if chunk:
            dims = int(self.ndim[tensor])
            facts |= {"offsets": tuple(self.offsets[row, :dims].tolist())}
            facts |= {"sizes": tuple(self.sizes[row, :dims].tolist())}
            facts |= {"start": int(self.start[row]), "stop": int(self.stop[row])}
            facts |= {"file": self.files[self.file[row]] if 0 <= self.file[row] < len(self.files) else "?"}
        raise CorruptError(f"tensor {self.keys[tensor]!r} {text.format(**facts)}")


CHUNK_COLUMNS = ("offsets", "sizes", "file", "start", "stop", "codec", "rank", "replica", "inner", "strides")
#: Facts (``meta``) that state what is lost; such a checkpoint is only opened in part. The error of each otherwise.
LOST_FACTS: dict[str, type[OpenError]] = {
    "incomplete": IncompleteError,  # all files of some ranks are absent
    "absent": MissingFileError,  # a file whose tensors are known by name alone
    "contradiction": CorruptError,  # an index and its files disagree
}
_CUT = "the file is truncated or from another save; restore it, or open with partial=True to read the rest"


_EXPANDED = "it was expanded before the save (strides of 0, shared bytes): load it with the program that wrote it"


def inflates(nbytes: int, stored: int) -> bool:
    """Return whether ``nbytes`` bytes of elements are too many to come from ``stored`` stored bytes."""
    return nbytes > INFLATED_LEAST and nbytes > INFLATED * stored


def _any(columns: Array) -> Array:
    """Return, for each row, whether any column is true."""
    return np.asarray(columns.any(axis=1))


def _rows(column: Array | None, rows: Array) -> Array | None:
    return None if column is None else column[rows]


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous box of these sizes."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements follow each other in order; the stride of an axis of one element does not matter."""
    return all(n <= 1 or a == b for n, a, b in zip(sizes, strides, row_major(sizes), strict=True))


def reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first one of a strided box to its last, both included."""
    return 0 if 0 in sizes else 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
