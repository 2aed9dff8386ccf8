"""One array of zarr 2: a folder with ``.zarray`` and a file for each chunk.

::

    params.embedder.embedding/
      .zarray      {"shape": [100, 24], "chunks": [50, 12], "dtype": "<f4", "compressor": {"id": "zstd", …},
                    "order": "C", "fill_value": null, "filters": null, "dimension_separator": "."}
      0.0  0.1     chunks by their place in the grid; "0" of an array without axes
      1.0  1.1     a chunk at the edge has the full size in its file, and its elements outside of the array mean nothing

Sources: zarr 2 specification; orbax-checkpoint 0.12.8 with tensorstore 0.1.86; zarr 2.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from workbench.core import codecs
from workbench.core.catalog import MAX_ELEMENTS, row_major
from workbench.core.dtypes import DType, by_name
from workbench.core.place import Place
from workbench.errors import CorruptError, UnsupportedFormatError

__all__ = ["ARRAY", "ZarrArray", "ZarrChunk", "chunks", "read_array"]

ARRAY = ".zarray"
LARGEST = 8 << 30  #: bytes of a chunk
MAX_AXES = 32
_DTYPE = re.compile(r"([<>|])([fiubc])(\d{1,2})")
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The description of an array: shapes in elements, ``strides`` of a chunk's payload, in elements."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    codec: int
    separator: str

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a whole chunk, as it is before it is compressed."""
        return prod(self.chunk) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ZarrChunk:
    """A chunk's file, and its box in the array."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def read_array(place: Place, folder: str) -> ZarrArray:
    """Read ``.zarray`` of a folder.

    Raises:
        CorruptError: it contradicts itself.
        UnsupportedFormatError: another version, element type, or order.
    """
    name = f"{folder}/{ARRAY}"
    told = place.read_json(name)
    if not isinstance(told, dict) or told.get("zarr_format") != 2:
        raise UnsupportedFormatError(f"{name!r} is not of zarr version 2")
    shape, chunk = _sizes(told, "shape", name), _sizes(told, "chunks", name)
    if len(shape) != len(chunk) or 0 in chunk or prod(shape) > MAX_ELEMENTS:
        raise CorruptError(
            f"{name!r} has the shape {shape} in chunks of {chunk}: a chunk needs as many axes as the shape, none of "
            f"size 0, and an array has at most {MAX_ELEMENTS:,} elements; restore the file"
        )
    dtype, big = _dtype(told.get("dtype"), name)
    if prod(chunk) * dtype.itemsize > LARGEST:
        raise CorruptError(f"{name!r} has chunks of {prod(chunk) * dtype.itemsize:,} bytes, over {LARGEST:,}")
    order = told.get("order", "C")
    if order not in ("C", "F"):
        raise UnsupportedFormatError(f"{name!r} has the order {str(order)[:20]!r}; C and F are known")
    strides = row_major(chunk) if order == "C" else tuple(reversed(row_major(chunk[::-1])))
    separator = told.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CorruptError(f"{name!r} has the dimension separator {str(separator)[:20]!r}")
    return ZarrArray(shape, chunk, strides, dtype, _codec(told, big), separator)


def chunks(place: Place, folder: str, array: ZarrArray) -> Iterator[ZarrChunk]:
    """Yield the chunks whose files exist.

    Raises:
        CorruptError: a file that is named like a chunk is outside of the array's grid.
    """
    axes = len(array.shape)
    grid = [-(-n // size) for n, size in zip(array.shape, array.chunk, strict=True)]
    for name in _files(place.sub(folder), axes if array.separator == "/" else 1):
        parts = name.split(array.separator)
        if not all(re.fullmatch(r"\d{1,18}", part) for part in parts):
            continue
        at = tuple(map(int, parts)) if axes else ()
        if len(at) != axes or (not axes and name != "0") or any(a >= n for a, n in zip(at, grid, strict=True)):
            raise CorruptError(f"{folder + '/' + name!r} is outside of the array's grid of {grid} chunks")
        offsets = tuple(a * size for a, size in zip(at, array.chunk, strict=True))
        box = tuple(min(n - o, c) for n, o, c in zip(array.shape, offsets, array.chunk, strict=True))
        yield ZarrChunk(f"{folder}/{name}", offsets, box)


def _files(place: Place, depth: int) -> Iterator[str]:
    yield from place.files
    if depth > 1:
        for folder in place.folders:
            if folder.isdecimal():
                yield from (f"{folder}/{name}" for name in _files(place.sub(folder), depth - 1))


def _sizes(told: Mapping[str, Any], name: str, file: str) -> tuple[int, ...]:
    value = told.get(name)
    good = isinstance(value, list) and len(value) <= MAX_AXES
    if not good or not all(type(n) is int and 0 <= n < MAX_ELEMENTS for n in value or ()):
        raise CorruptError(f"{file!r} has no valid {name}")
    return tuple(value or ())


def _dtype(value: object, file: str) -> tuple[DType, bool]:
    """The element type, and whether it is big endian; types that numpy lacks have torch's names."""
    match = _DTYPE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        dtype = by_name(value)
    else:
        dtype = by_name("bool" if match[2] == "b" else f"{_KINDS[match[2]]}{8 * int(match[3])}")
    if dtype.packed:
        raise UnsupportedFormatError(f"{file!r} has elements of type {dtype}, which share bytes")
    return dtype, match is not None and match[1] == ">" and dtype.itemsize > 1


def _codec(told: Mapping[str, Any], big: bool) -> int:
    """The codec of a chunk's file; filters and compressors that cannot be undone here are listed, never read."""
    compressor = told.get("compressor")
    if told.get("filters"):
        return codecs.OPAQUE
    if compressor is None:
        return codecs.RAW_BE if big else codecs.RAW
    name = compressor.get("id") if isinstance(compressor, dict) else None
    known = {"zstd": codecs.ZSTD, "gzip": codecs.GZIP, "zlib": codecs.GZIP}
    return codecs.OPAQUE if big or not isinstance(name, str) else known.get(name, codecs.OPAQUE)
