"""One array of zarr 2 or 3, by its description.

::

    params.embedder.embedding/
      .zarray      zarr 2: {"shape": [100, 24], "chunks": [50, 12], "dtype": "<f4", "compressor": {"id": "zstd", …},
                   "order": "C", "fill_value": null, "filters": null, "dimension_separator": "."}
      0.0  0.1     chunks by their place in the grid; "0" of an array without axes
      1.0  1.1     a chunk at the edge has the full size; its elements outside of the array are meaningless

      zarr.json    zarr 3: {"shape": [100, 24], "chunk_grid": {… {"chunk_shape": [50, 12]}}, "data_type": "float32",
                   "codecs": [{"name": "bytes", …}, {"name": "zstd", …}], "chunk_key_encoding": {"name": "default", …}}
      c/0/0 …      with the codec sharding_indexed, each of these is a shard of inner chunks and the index of them:

      inner chunk │ inner chunk │ … │ first byte, bytes (2 × u64) of each, row by row; 2^64-1: absent │ CRC-32C u32

Sources: zarr specifications 2 and 3 with the codecs bytes, transpose, gzip, zstd, crc32c and sharding-indexed;
orbax-checkpoint 0.12.8 with tensorstore 0.1.86; zarr 2.18 and 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from workbench.core import codecs, jsonsafe
from workbench.core.catalog import MAX_ELEMENTS, row_major
from workbench.core.dtypes import DType, by_name
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError

DESCRIPTIONS = (".zarray", "zarr.json")
LARGEST = 8 << 30  #: maximum bytes of a chunk
MAX_AXES = 32
_DTYPE = re.compile(r"([<>|])([fiubc])(\d{1,2})")
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True, slots=True)
class Shards:
    """How the chunks of an array are cut into inner chunks.

    Attributes:
        chunk: shape of an inner chunk, elements.
        first: whether the index is at the beginning of a shard.
        checked: whether a CRC-32C follows the index.
    """

    chunk: tuple[int, ...]
    first: bool
    checked: bool

    def grid(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the number of inner chunks along each axis of a shard."""
        return tuple(n // size for n, size in zip(whole, self.chunk, strict=True))


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The description of an array.

    Attributes:
        shape, chunk: elements; the chunk is that of the grid, a whole shard if the array is sharded.
        strides: strides of the payload of a chunk, or of an inner one if there are shards, in elements.
        codec: of :mod:`workbench.core.codecs`, of a chunk or an inner one; big elements that are compressed are opaque.
        tail: bytes of a checksum that follow a stored chunk, or an inner one.
        more: bytes of a checksum that ends the decoded stream. ``verify --deep`` compares both, a read neither.
        prefix, separator: the form of the keys of chunks: ``c/0/1`` or ``0.1``.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    codec: int
    separator: str
    prefix: bool = False
    tail: int = 0
    more: int = 0
    shards: Shards | None = None

    @property
    def payload(self) -> tuple[int, ...]:
        """Shape of a stored unit: a chunk, or an inner one."""
        return self.chunk if self.shards is None else self.shards.chunk

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of such a payload, before it is compressed."""
        return prod(self.payload) * self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunk, strict=True))

    def place(self, key: str) -> tuple[int, ...] | None:
        """Return the place in the grid that the key of a chunk represents; ``None`` for another key.

        Raises:
            CorruptError: outside of the grid; the message begins with "is".
        """
        if self.prefix:
            head, separator, key = key.partition(self.separator)
            if head != "c" or bool(separator) != bool(self.shape):
                return None
        parts = key.split(self.separator) if key else []
        if not all(re.fullmatch(r"\d{1,18}", part) for part in parts):
            return None
        at = tuple(map(int, parts))
        if not self.shape and at == (() if self.prefix else (0,)):
            return ()
        if len(at) != len(self.shape) or any(a >= n for a, n in zip(at, self.grid, strict=True)):
            raise CorruptError(f"is outside of the array's grid of {list(self.grid)} chunks")
        return at


def read_array(data: bytes | memoryview, name: str) -> ZarrArray:
    """Decode a description; ``name`` is its file or key, for messages.

    Raises:
        CorruptError: it contradicts itself.
        UnsupportedFormatError: another version, element type, or order.
    """
    metadata = jsonsafe.loads(data, what=repr(name))
    version = metadata.get("zarr_format") if isinstance(metadata, dict) else None
    if version != (2 if name.endswith(".zarray") else 3):
        raise UnsupportedFormatError(f"{name!r} is not of zarr version 2 or 3")
    return _second(metadata, name) if version == 2 else _third(metadata, name)


def _second(metadata: Mapping[str, Any], name: str) -> ZarrArray:
    shape, chunk = _sizes(metadata, "shape", name), _sizes(metadata, "chunks", name)
    dtype, big = _dtype(metadata.get("dtype"), name)
    order = metadata.get("order", "C")
    if order not in ("C", "F"):
        raise UnsupportedFormatError(f"{name!r} has the order {str(order)[:20]!r}; C and F are known")
    strides = row_major(chunk) if order == "C" else tuple(reversed(row_major(chunk[::-1])))
    separator = _separator(metadata.get("dimension_separator", "."), name)
    found = ZarrArray(shape, chunk, strides, dtype, _codec(metadata, big), separator)
    return _consistent(found, name)


def _third(metadata: Mapping[str, Any], name: str) -> ZarrArray:
    if metadata.get("node_type") != "array":
        raise UnsupportedFormatError(f"{name!r} describes no array")
    grid, keys = _named(metadata.get("chunk_grid"), name), _named(metadata.get("chunk_key_encoding"), name)
    if grid[0] != "regular" or keys[0] not in ("default", "v2"):
        raise UnsupportedFormatError(f"{name!r} has the chunk grid {grid[0]!r} and chunk keys {keys[0]!r}")
    shape, chunk = _sizes(metadata, "shape", name), _sizes(grid[1], "chunk_shape", name)
    default = keys[0] == "default"
    separator = _separator(keys[1].get("separator", "/" if default else "."), name)
    dtype = by_name(metadata.get("data_type"))
    if dtype.packed:
        raise UnsupportedFormatError(f"{name!r} has elements of type {dtype}, which share bytes")
    found = ZarrArray(shape, chunk, (), dtype, codecs.RAW, separator, default)
    if metadata.get("storage_transformers"):
        return _consistent(replace(found, codec=codecs.OPAQUE), name)
    chain = _chain(metadata, "codecs", name)
    if chain and chain[0][0] == "sharding_indexed":
        inner = _chain(chain[0][1], "codecs", name)
        index = _chain(chain[0][1], "index_codecs", name)
        where = chain[0][1].get("index_location", "end")
        simple = [one for one, _ in index] in (["bytes"], ["bytes", "crc32c"]) and not _big(index[0][1])
        if len(chain) > 1 or not simple or where not in ("start", "end"):
            return _consistent(replace(found, codec=codecs.OPAQUE), name)
        shards = Shards(_sizes(chain[0][1], "chunk_shape", name), where == "start", len(index) == 2)
        if len(shards.chunk) != len(chunk) or 0 in shards.chunk or any(map(int.__mod__, chunk, shards.chunk)):
            raise CorruptError(
                f"{name!r} has inner chunks of {shards.chunk} in shards of {chunk}, which they do not fill"
            )
        found, chain = replace(found, shards=shards), inner
    return _consistent(_coded(found, chain), name)


def _coded(found: ZarrArray, chain: list[tuple[str, Mapping[str, Any]]]) -> ZarrArray:
    """Return the array with the layout and codec of a chain of codecs; opaque if the chain cannot be decoded."""
    shape, axes = found.payload, list(range(len(found.payload)))
    if chain and chain[0][0] == "transpose":
        order = chain[0][1].get("order")
        if not isinstance(order, list) or not all(type(axis) is int for axis in order) or sorted(order) != axes:
            return replace(found, codec=codecs.OPAQUE)
        axes, chain = order, chain[1:]
    stored = dict(zip(axes, row_major([shape[axis] for axis in axes]), strict=True))
    found = replace(found, strides=tuple(stored[axis] for axis in range(len(shape))))
    names = [name for name, _ in chain]
    if not names or names[0] != "bytes":
        return replace(found, codec=codecs.OPAQUE)
    big = _big(chain[0][1]) and found.dtype.itemsize > 1
    if tail := 4 * (names[-1] == "crc32c"):
        names.pop()
    if more := 4 * (names[1:2] == ["crc32c"]):
        del names[1]
    known: dict[tuple[str, ...], int]
    if big:
        known = {(): codecs.RAW_BE}
    else:
        known = {(): codecs.RAW, ("zstd",): codecs.ZSTD, ("gzip",): codecs.GZIP}
    return replace(found, codec=known.get(tuple(names[1:]), codecs.OPAQUE), tail=tail, more=more)


def _consistent(array: ZarrArray, name: str) -> ZarrArray:
    shape, chunk = array.shape, array.chunk
    if len(shape) != len(chunk) or 0 in chunk or prod(shape) > MAX_ELEMENTS:
        raise CorruptError(
            f"{name!r} has the shape {shape} in chunks of {chunk}: a chunk needs as many axes as the shape, none of "
            f"size 0, and an array has at most {MAX_ELEMENTS:,} elements; restore the file"
        )
    if array.chunk_nbytes > LARGEST:
        raise CorruptError(f"{name!r} has chunks of {plural(array.chunk_nbytes, 'byte')}, over {LARGEST:,}")
    return array if array.strides or not array.payload else replace(array, strides=row_major(array.payload))


def _named(value: object, file: str) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of an extension point of zarr 3."""
    if isinstance(value, str):
        return value, {}
    name = value.get("name") if isinstance(value, dict) else None
    more = value.get("configuration") or {} if isinstance(value, dict) else {}
    if not isinstance(name, str) or not isinstance(more, dict):
        raise CorruptError(f"{file!r} has a codec, a grid or chunk keys without a name")
    return name[:40], more


def _chain(fields: Mapping[str, Any], name: str, file: str) -> list[tuple[str, Mapping[str, Any]]]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise CorruptError(f"{file!r} has no valid {name}")
    return [_named(one, file) for one in value]


def _big(fields: Mapping[str, Any]) -> bool:
    return fields.get("endian") == "big"


def _separator(value: object, file: str) -> str:
    if value not in (".", "/"):
        raise CorruptError(f"{file!r} has the dimension separator {str(value)[:20]!r}")
    return str(value)


def _sizes(fields: Mapping[str, Any], name: str, file: str) -> tuple[int, ...]:
    value = fields.get(name)
    good = isinstance(value, list) and len(value) <= MAX_AXES
    if not good or not all(type(n) is int and 0 <= n < MAX_ELEMENTS for n in value or ()):
        raise CorruptError(f"{file!r} has no valid {name}")
    return tuple(value or ())


def _dtype(value: object, file: str) -> tuple[DType, bool]:
    """Return the element type, and whether it is big endian; types that numpy lacks have torch's names."""
    match = _DTYPE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        dtype = by_name(value)
    else:
        dtype = by_name("bool" if match[2] == "b" else f"{_KINDS[match[2]]}{8 * int(match[3])}")
    if dtype.packed:
        raise UnsupportedFormatError(f"{file!r} has elements of type {dtype}, which share bytes")
    return dtype, match is not None and match[1] == ">" and dtype.itemsize > 1


def _codec(metadata: Mapping[str, Any], big: bool) -> int:
    """Return the codec of a chunk's file; chunks whose filters and compressors are not supported are listed, never
    read.
    """
    compressor = metadata.get("compressor")
    if metadata.get("filters"):
        return codecs.OPAQUE
    if compressor is None:
        return codecs.RAW_BE if big else codecs.RAW
    name = compressor.get("id") if isinstance(compressor, dict) else None
    known = {"zstd": codecs.ZSTD, "gzip": codecs.GZIP, "zlib": codecs.GZIP}
    return codecs.OPAQUE if big or not isinstance(name, str) else known.get(name, codecs.OPAQUE)
