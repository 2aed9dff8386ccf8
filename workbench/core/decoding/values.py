"""Catalogs and payloads of decoded tensors.

::

    t[5:7, ::300]   Region: bytes 81,920 + … of the decoded tensor
                      ValueSource.read_into(buffer, 81,920)
                        elements 20,480 … in units of 256        Recipe.decode(stored, first, stop)
                          bytes 11,520 … of the stored tensor    StoredParts.elements

The catalog of the decoded tensors names the same files: a decoded row has the byte range of its first stored tensor,
for messages and for the order of reads, and the codec ``decoded``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.core.arrays import Array, Ints
from workbench.core.box import row_major as box_strides
from workbench.core.catalog import Catalog, row_major
from workbench.core.decoding import ggml
from workbench.core.decoding.floats import widened
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.payload import Payloads
from workbench.core.read import read_selection, single_chunk
from workbench.core.region import Region
from workbench.core.select import whole
from workbench.core.source import FileStat, Source
from workbench.core.storage import SourcePool
from workbench.core.words import plural
from workbench.errors import CorruptError

NEAR = 1 << 10  #: two elements up to this many bytes apart are decoded together with everything between them
PIECE = 1 << 18  #: elements that are decoded at once, if a unit is not larger
HALVES = ("float16", "bfloat16")
KEPT = 64 << 20  #: bytes of scales and the like that are kept between two reads


@dataclass(frozen=True)
class Recipe:
    """How one tensor is decoded.

    Attributes:
        key: name of the decoded tensor.
        scheme: name of the quantisation, such as ``Q4_K`` or ``GPTQ``.
        stored: keys of the stored tensors that it is decoded from, the one with the quantised numbers first. They are
            not tensors of the decoded checkpoint.
        dtype, shape: of the decoded tensor.
        unit: elements, in row-major order, that are decoded together; it divides the elements of the tensor.
        decode: ``decode(stored, first, stop)`` returns elements ``[first, stop)``, both multiples of the unit, as one
            axis of the raw type. It is sent to workers, so no closure.
        strides: in elements, if ``decode`` counts them in another order than the row-major one of ``shape``.
    """

    key: str
    scheme: str
    stored: tuple[str, ...]
    dtype: DType
    shape: tuple[int, ...]
    unit: int
    decode: Callable[[StoredParts, int, int], Array]
    strides: tuple[int, ...] | None = None


class StoredParts:
    """The stored tensors that recipes read, by key."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self._kept: dict[str, Array] = {}

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        catalog = self._payloads.catalog
        return catalog.shape_of(catalog.index[key])

    def itemsize(self, key: str) -> int:
        """Return the bytes of a stored element; 1 for packed types."""
        catalog = self._payloads.catalog
        return catalog.dtype_of(catalog.index[key]).raw.itemsize

    def elements(self, key: str, first: int, stop: int) -> Array:
        """Return elements ``[first, stop)`` of a tensor in row-major order, in the raw type; of packed types, bytes.

        Raises:
            as :meth:`LazyTensor.__getitem__`.
        """
        payloads = self._payloads
        tensor = payloads.catalog.index[key]
        row = single_chunk(payloads, tensor)
        if row is None:
            return self.whole(key).reshape(-1)[first:stop]
        region = payloads.region(row)
        if not region.contiguous:
            return self.whole(key).reshape(-1)[first:stop]
        return region.flat(first, stop, np.empty((stop - first) * region.raw.itemsize, np.uint8))

    def whole(self, key: str) -> Array:
        """Return a whole tensor in the raw type; small ones are kept. Raises as :meth:`elements`."""
        found = self._kept.get(key)
        if found is None:
            catalog = self._payloads.catalog
            tensor = catalog.index[key]
            found = read_selection(self._payloads, tensor, whole(catalog.shape_of(tensor)))
            if found.nbytes + sum(one.nbytes for one in self._kept.values()) <= KEPT:
                self._kept[key] = found
        return found


class ValueSource(Source):
    """The bytes of one decoded tensor, row by row, decoded as they are read."""

    def __init__(self, recipe: Recipe, stored: StoredParts, what: str) -> None:
        self._recipe, self._stored, self._what = recipe, stored, what
        itemsize = recipe.dtype.itemsize
        self.stat = FileStat(prod(recipe.shape) * itemsize, 0)
        self.gap = max(recipe.unit * itemsize, NEAR)  # whatever shares a unit is decoded together

    def read_into(self, buffer: Array, start: int) -> None:
        """Fill a ``uint8`` buffer from byte ``start`` of the decoded tensor on.

        Raises:
            CorruptError: the recipe returns another number of elements.
        """
        recipe, itemsize = self._recipe, self._recipe.dtype.itemsize
        numel, unit = prod(recipe.shape), recipe.unit
        first = start // itemsize // unit * unit
        last = min(-(-(start + len(buffer)) // (itemsize * unit)) * unit, numel)
        step = max(PIECE // unit, 1) * unit
        for low in range(first, last, step):
            high = min(low + step, last)
            piece = np.ascontiguousarray(recipe.decode(self._stored, low, high)).reshape(-1).view(np.uint8)
            if len(piece) != (high - low) * itemsize:
                raise CorruptError(
                    f"{self._what}: its parts decode to {plural(len(piece) // itemsize, 'element')} where "
                    f"{high - low:,} are needed; their shapes do not fit each other"
                )
            begin, end = max(low * itemsize, start), min(high * itemsize, start + len(buffer))
            buffer[begin - start : end - start] = piece[begin - low * itemsize : end - low * itemsize]


class _OneSource:
    """The part of a pool that a region needs, for a source that is not a file."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def source(self, file: int) -> Source:
        """Return the source, whatever the id."""
        return self._source


class DecodedPayloads(Payloads):
    """Payloads of a catalog some of whose tensors are decoded; the others are read as they are stored."""

    def __init__(
        self, catalog: Catalog, pool: SourcePool, stored: Payloads, recipes: Mapping[tuple[int, int], Recipe]
    ) -> None:
        """Create the payloads of decoded tensors.

        Args:
            stored: payloads of the catalog whose tensors the recipes name.
            recipes: recipes by file and first byte of their first stored tensor.
        """
        super().__init__(catalog, pool)
        self._recipes, self._stored = recipes, StoredParts(stored)
        self._stored_payloads = stored

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedPayloads, (self.catalog, self.pool, self._stored_payloads, self._recipes)

    def over(self, catalog: Catalog) -> Payloads:
        return DecodedPayloads(catalog, self.pool, self._stored_payloads, self._recipes)

    def region(self, row: int) -> Region:
        c = self.catalog
        if c.codec[row] != codecs.DECODED:
            return super().region(row)
        dtype, sizes, inner, strides = self._layout(row)
        if 0 in sizes:
            return Region.of(np.empty(sizes, dtype.raw))
        recipe = self._recipes.get((int(c.file[row]), int(c.start[row])))
        if recipe is None:  # decoded beneath
            return self._stored_payloads.over(c).region(row)
        source = ValueSource(recipe, self._stored, self.describe(row))
        steps = row_major(sizes) if strides is None else strides
        in_bytes = tuple(step * dtype.itemsize for step in steps)
        return Region(_OneSource(source), 0, inner, sizes, in_bytes, dtype.raw)

    def ahead(self, rows: Ints, first: Ints, last: Ints) -> AbstractContextManager[None]:
        plain = self.catalog.codec[rows] != codecs.DECODED  # a recipe requests what it needs
        return super().ahead(rows[plain], first[plain], last[plain])


class Decoding:
    """The decoded tensors of a checkpoint."""

    def __init__(self, payloads: Payloads, recipes: Callable[[], Sequence[Recipe]] | None = None) -> None:
        """Create the decoding of stored tensors; recipes are looked up when they are first needed.

        Args:
            payloads: of the stored tensors.
            recipes: returns the format's recipes; those of block types follow from the catalog.
        """
        self.stored, self._find = payloads, recipes

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, (self.stored, self._find)

    @cached_property
    def recipes(self) -> list[Recipe]:
        """The recipes in the order of their first stored tensor.

        Raises:
            CorruptError: the stored tensors of a recipe contradict each other.
        """
        found = [*_blocks(self.stored.catalog), *(self._find() if self._find is not None else ())]
        index = self.stored.catalog.index
        return sorted(found, key=lambda recipe: index[recipe.stored[0]])

    @cached_property
    def names(self) -> dict[str, str]:
        """Key of each stored tensor that takes part → key of the decoded one."""
        return {part: recipe.key for recipe in self.recipes for part in recipe.stored}

    @cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Key of each decoded tensor → keys of the stored ones."""
        return {recipe.key: recipe.stored for recipe in self.recipes}

    @cached_property
    def payloads(self) -> Payloads:
        """Payloads of the decoded tensors, and of those that are stored as they are."""
        return _carried_out(self.stored, self.recipes)


def shifted(payloads: Payloads, by: Mapping[int, float]) -> Payloads:
    """Return the payloads with a number added to every element of some tensors, as ``float32``.

    The sum is taken as llama.cpp's converter takes it: in float32, or in float16 if the tensor is of that type.

    Args:
        by: the number for each position.

    Raises:
        UnsupportedFormatError: on reading, if an element type is not a float of up to 32 bits.
    """
    catalog, out = payloads.catalog, by_name("float32")
    recipes = [
        Recipe(
            key := catalog.keys[t],
            "shifted",
            (key,),
            out,
            catalog.shape_of(t),
            1,
            _Shifted(key, catalog.dtype_of(t).name, more),
        )
        for t, more in by.items()
    ]
    return _carried_out(payloads, recipes)


def cells(payloads: Payloads) -> Payloads:
    """Return, for each element, the range of numbers that its stored value represents: ``complex64``, from and to.

    Tensors of types without such cells (:data:`workbench.core.decoding.ggml.HAS_CELLS`, float16 and bfloat16 have them)
    are left as they are.

    Args:
        payloads: of the stored tensors.
    """
    catalog, recipes = payloads.catalog, []
    for t, key in enumerate(catalog.keys):
        dtype = catalog.dtype_of(t)
        if dtype.name in ggml.HAS_CELLS or dtype.name in HALVES:
            recipes.append(
                Recipe(
                    key,
                    "cells",
                    (key,),
                    by_name("complex64"),
                    catalog.shape_of(t),
                    dtype.block or 1,
                    _Cells(key, dtype.name),
                )
            )
    return _carried_out(payloads, recipes)


def _carried_out(stored: Payloads, recipes: Sequence[Recipe]) -> Payloads:
    catalog = stored.catalog
    made = _catalog(catalog, recipes)
    first = [catalog.rows_of(catalog.index[recipe.stored[0]]).start for recipe in recipes]
    by_place = {
        (int(catalog.file[row]), int(catalog.start[row])): recipe
        for row, recipe in zip(first, recipes, strict=True)
        if prod(recipe.shape)
    }
    return DecodedPayloads(made, stored.pool, stored, by_place)


def _blocks(catalog: Catalog) -> list[Recipe]:
    """Return recipes for the tensors whose element type is a ggml block."""
    found = []
    for tensor in np.flatnonzero(np.isin(catalog.dtype, ggml.CODES)).tolist():
        dtype, shape = catalog.dtype_of(tensor), catalog.shape_of(tensor)
        key = catalog.keys[tensor]
        found.append(Recipe(key, dtype.name, (key,), by_name("float32"), shape, dtype.block, _Blocks(key, dtype.name)))
    return found


@dataclass(frozen=True)
class _Blocks:
    """Decode a tensor of blocks."""

    key: str
    name: str

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        dtype = by_name(self.name)
        low, high = nbytes_of(dtype, first), nbytes_of(dtype, stop)
        return ggml.decode(self.name, stored.elements(self.key, low, high)).view(np.uint32)


@dataclass(frozen=True)
class _Cells:
    """Ends of the cell of each element of a block type, or of a float of 16 bits."""

    key: str
    name: str

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        dtype = by_name(self.name)
        if dtype.packed:
            data = stored.elements(self.key, nbytes_of(dtype, first), nbytes_of(dtype, stop))
            return ggml.cells(self.name, data).view(np.uint64)
        bits = stored.elements(self.key, first, stop).reshape(-1)
        value = widened(bits, dtype).astype(np.float64)
        size = (bits & 0x7FFF).astype(np.uint16)  # the neighbours of a float are those of its bits
        beside = (np.maximum(size, 1) - 1).astype(np.uint16), size + np.uint16(1)
        below, above = (widened(n, dtype).astype(np.float64) for n in beside)
        near = np.abs(value)
        low, high = (near + np.where(size == 0, -above, below)) / 2, (near + above) / 2
        negative = (bits & 0x8000) != 0
        ends = np.stack([np.where(negative, -high, low), np.where(negative, -low, high)], axis=-1)
        return ends.astype(np.float32).view(np.uint64)


@dataclass(frozen=True)
class _Shifted:
    """Add a number to every element."""

    key: str
    name: str
    more: float

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        dtype = by_name(self.name)
        values = widened(stored.elements(self.key, first, stop).reshape(-1), dtype)
        kind = np.dtype("float16" if self.name == "float16" else "float32")
        moved: Array = values.astype(kind) + np.array(self.more, kind)
        return moved.astype(np.float32).view(np.uint32)


def _catalog(catalog: Catalog, recipes: Sequence[Recipe]) -> Catalog:
    """Return a catalog with each decoded tensor in the place of its first stored tensor."""
    by_first = {catalog.index[recipe.stored[0]]: recipe for recipe in recipes}
    gone = {catalog.index[part] for recipe in recipes for part in recipe.stored[1:]}
    kept = np.array([t for t in range(len(catalog)) if t not in gone or t in by_first], np.int64)
    made = catalog.take(kept).widened(max([1, *(len(recipe.shape) for recipe in recipes)]))
    position = {old: new for new, old in enumerate(kept.tolist())}
    rows = np.ones(made.chunks, bool)
    columns = {name: getattr(made, name).copy() for name in ("dtype", "ndim", "shape", "offsets", "sizes", "codec")}
    inner = None if made.inner is None else made.inner.copy()
    strides = None if made.strides is None else made.strides.copy()
    if strides is None and any(recipe.strides is not None for recipe in recipes):
        strides = box_strides(made.sizes)
    keys = list(made.keys)
    for tensor, recipe in by_first.items():
        t = position[tensor]
        a, b = int(made.row_ptr[t]), int(made.row_ptr[t + 1])
        keys[t] = recipe.key
        full = (*recipe.shape, *[1] * (made.shape.shape[1] - len(recipe.shape)))
        columns["dtype"][t], columns["ndim"][t], columns["shape"][t] = recipe.dtype.code, len(recipe.shape), full
        rows[a + 1 : b] = False
        if a < b:
            columns["offsets"][a], columns["sizes"][a], columns["codec"][a] = 0, full, codecs.DECODED
            if inner is not None:
                inner[a] = 0
            if strides is not None:
                steps = recipe.strides or row_major(recipe.shape)
                strides[a] = (*steps, *[1] * (len(full) - len(steps)))
    renamed = keys != made.keys
    counts = np.add.reduceat(np.append(rows, False), made.row_ptr[:-1]) if len(keys) else np.empty(0)
    counts = np.where(np.diff(made.row_ptr) > 0, counts, 0)
    chunk_columns = ("file", "start", "stop", "rank", "replica")
    return replace(
        made,
        keys=keys,
        dtype=columns["dtype"],
        ndim=columns["ndim"],
        shape=columns["shape"],
        row_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        offsets=columns["offsets"][rows],
        sizes=columns["sizes"][rows],
        codec=columns["codec"][rows],
        inner=None if inner is None else inner[rows],
        strides=None if strides is None else strides[rows],
        fqns=None if renamed else made.fqns,
        roles=None if renamed else made.roles,
        views=None,
        **{name: getattr(made, name)[rows] for name in chunk_columns},
    )
