"""One part of a ByteCheckpoint save (``model/`` or ``optimizer/``) as a catalog.

::

    .metadata   chunk (offsets, sizes) ─▶ item (file, offset, length) ─▶ inner tensor (dtype, size, stride, start)
                                                                         the chunk's ``inner`` and ``strides`` columns

Notes list files that the metadata does not account for: nothing else shows that another save wrote into the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.arrays import Array
from workbench.core.box import row_major
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.codecs import OPAQUE, RAW
from workbench.core.dtypes import ALL, nbytes_of_codes
from workbench.core.place import Place, stat_or_absent
from workbench.core.words import plural
from workbench.errors import CorruptError, IncompleteError
from workbench.formats.bytecheckpoint import metadata

METADATA = ".metadata"
NAMED = 8  #: maximum ranks or files in a note
_DATA = re.compile(r"__(\d{1,9})_(\d{1,9})\.distcp")


@dataclass(frozen=True, eq=False)
class PartFile:
    """One part's catalog, the paths of its keys, and other facts in its metadata."""

    name: str
    folder: str
    catalog: Catalog
    paths: Mapping[str, tuple[Any, ...]]
    version: str | None
    user: Mapping[str, Any]


def read_part(root: Place, place: Place, name: str, folder: str) -> PartFile:
    what = repr(f"{folder}/{METADATA}" if folder else METADATA)
    data = place.read(METADATA)
    if not data:
        raise IncompleteError(f"{root.path!r}: {what} is empty; the save was interrupted, use an earlier step")
    found = metadata.decode(data, what=what)
    del data
    catalog = _catalog(place, found, folder)
    return PartFile(name, folder, catalog, dict(found.dcp.paths or {}), found.version, found.user)


def ranks_of(place: Place) -> dict[int, list[str]]:
    """Return the data files of a part by the rank in their names."""
    found: dict[int, list[str]] = {}
    for name in place.files:
        if match := _DATA.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    return found


def _catalog(place: Place, found: metadata.ByteMetadata, folder: str) -> Catalog:
    meta = found.dcp
    stored = np.flatnonzero(meta.item >= 0)
    item, owner = meta.item[stored], np.repeat(np.arange(len(meta.keys)), np.diff(meta.row_ptr))[stored]
    offsets, sizes = meta.offsets[stored], meta.sizes[stored]
    dtype, inner, strides, codec, notes = _lay_out(found, item, owner, offsets, sizes)
    ranks = np.array([_rank(name) for name in meta.files] or [-1], np.int32)
    stats = [stat_or_absent(place, name) for name in meta.files]
    position = np.array([p for _, p in meta.objects], np.int64)
    where = f"{folder!r}: " if folder else ""
    lost = len(meta.item) - len(stored)
    if lost:
        notes.append(f"{plural(lost, 'chunk')} of the metadata without a stored item: the elements are holes")
    if meta.orphans:
        notes.append(f"{plural(meta.orphans, 'stored item', 'belong')} to no tensor of the metadata")
    return Catalog(
        format="bytecheckpoint",
        keys=meta.keys,
        dtype=dtype,
        ndim=meta.ndim.astype(np.uint8),
        shape=meta.shape,
        row_ptr=np.searchsorted(owner, np.arange(len(meta.keys) + 1)).astype(np.int64),
        offsets=offsets,
        sizes=sizes,
        file=meta.file[item],
        start=meta.start[item],
        stop=meta.start[item] + meta.length[item],
        codec=codec,
        rank=ranks[meta.file[item]] if meta.files else np.empty(0, np.int32),
        replica=np.zeros(len(stored), np.int16),
        inner=inner,
        strides=strides,
        files=meta.files,
        file_stats=stats,
        metadata_files=[METADATA],
        objects=ObjectTable(
            [key for key, _ in meta.objects],
            meta.file[position],
            meta.start[position],
            meta.start[position] + meta.length[position],
            np.full(len(position), RAW, np.uint8),
        ),
        meta={"notes": [where + note for note in [*notes, *_odd_files(place, meta, stats)]]},
    )


def _rank(file: str) -> int:
    match = _DATA.fullmatch(file)
    return int(match[1]) if match else -1


def _lay_out(
    found: metadata.ByteMetadata, item: Array, owner: Array, offsets: Array, sizes: Array
) -> tuple[Array, Array | None, Array | None, Array, list[str]]:
    """Return how each chunk is laid out: the tensors' dtypes, ``inner``, ``strides``, ``codec``, and notes.

    Raises:
        CorruptError: an inner tensor's shape differs from its chunk's, or chunks of one tensor differ in dtype.
    """
    meta, layouts = found.dcp, found.layouts
    number = found.layout[item]
    dtype = meta.dtype.astype(np.uint8)
    codec = np.full(len(item), RAW, np.uint8)
    known = np.flatnonzero(number >= 0)
    notes: list[str] = []
    if len(known) < len(item):  # then the length must leave no other possibility
        bare = np.flatnonzero(number < 0)
        need = nbytes_of_codes(dtype[owner[bare]], np.prod(sizes[bare], axis=1))
        _first(meta, owner, offsets, bare[meta.length[item[bare]] != need], "has no layout in all_tensor_metadata")
        notes.append(
            f"{plural(len(bare), 'chunk', 'have')} no layout in all_tensor_metadata; by their length they are row-major"
        )
    if not len(known):
        return dtype, None, None, codec, notes
    number, rows = number[known], known
    dims = max(sizes.shape[1], layouts.sizes.shape[1])
    mine = box.padded(sizes[rows], dims, 1)
    theirs = box.padded(layouts.sizes, dims, 1)
    same = (mine == theirs[number]).all(axis=1) & (meta.ndim[owner[rows]] == layouts.ndim[number])
    _first(meta, owner, offsets, rows[~same], "is stored with a shape that differs from the one in the metadata")

    stated = np.full(len(meta.keys), -1, np.int64)
    stated[owner[rows]] = layouts.dtype[number]
    mixed = rows[stated[owner[rows]] != layouts.dtype[number]]
    _first(meta, owner, offsets, mixed, "differs in dtype from the tensor's other chunks")
    changed = np.flatnonzero((stated >= 0) & (stated != dtype))
    if len(changed):
        first = int(changed[0])
        notes.append(
            f"{plural(len(changed), 'tensor', 'are')} not stored in the dtype of their properties, first "
            f"{meta.keys[first]!r} in {ALL[stated[first]]} instead of {ALL[dtype[first]]}; the stored dtype is used"
        )
        dtype[changed] = stated[changed]
    codec[rows[layouts.odd[number]]] = OPAQUE
    if layouts.odd.any():
        notes.append(
            "some tensors are lazily conjugated or negated: their bytes are not their values, so they are not read"
        )

    inner = None
    if layouts.start.any():
        inner = np.zeros(len(item), np.int64)
        inner[rows] = layouts.start[number]
    plain = row_major(layouts.sizes)
    steps = np.where(layouts.sizes > 1, layouts.strides, plain)  # an axis of one element may have any stride
    steps[(layouts.sizes == 0).any(axis=1)] = plain[(layouts.sizes == 0).any(axis=1)]
    strides = None
    if (steps != plain).any():
        strides = row_major(sizes)
        strides[rows] = steps[number][:, : sizes.shape[1]]
    return dtype, inner, strides, codec, notes


def _first(meta: Any, owner: Array, offsets: Array, bad: Array, text: str) -> None:
    if len(bad):
        row = int(bad[0])
        tensor = int(owner[row])
        where = tuple(offsets[row, : int(meta.ndim[tensor])].tolist())
        who = f"tensor {meta.keys[tensor]!r}: its chunk at {where}"
        raise CorruptError(f"{who} {text}; the .metadata contradicts itself")


def _odd_files(place: Place, meta: Any, stats: list[Any]) -> list[str]:
    """Return notes about files that the metadata does not account for: they are from another save."""
    notes = []
    end = np.zeros(len(meta.files), np.int64)
    np.maximum.at(end, meta.file, meta.start + meta.length)
    longer = [(n, s.size - e) for n, s, e in zip(meta.files, stats, end.tolist(), strict=True) if s.size > e]
    if longer:
        name, more = longer[0]
        notes.append(
            f"{plural(len(longer), 'file', 'are')} longer than the metadata states, first {name!r} by "
            f"{plural(more, 'byte')}: another save may have written to the folder"
        )
    known = set(meta.files)
    stray = [name for name, stat in place.files.items() if _DATA.fullmatch(name) and name not in known and stat.size]
    if stray:
        notes.append(
            f"{plural(len(stray), 'data file', 'do')} not belong to this save, first {stray[0]!r}; they are not read"
        )
    if ".metadata.tmp" in place.files:
        notes.append(".metadata.tmp is left over: a later save to this folder was interrupted")
    ranks = sorted(ranks_of(place))
    absent = sorted(set(range(ranks[-1] + 1)) - set(ranks)) if ranks and ranks[-1] < 1 << 20 else []
    if absent:
        notes.append(f"ranks {absent[:NAMED]} have no data file, although every rank writes one")
    return notes
