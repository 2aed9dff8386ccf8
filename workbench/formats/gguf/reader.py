"""GGUF: one file, or the parts of a split one.

::

    model.gguf                         metadata and tensors
    model-00001-of-00003.gguf          split: the first part has the metadata, the others split.no, split.count and
    model-00002-of-00003.gguf          split.tensors.count alone; the first part may hold no tensor

Keys are ggml's names (``blk.0.attn_q.weight``), shapes are in numpy's order. Quantised tensors have the block types of
:data:`workbench.core.dtypes.BLOCKS` and are returned as stored; :mod:`workbench.core.decoding` decodes them. The
metadata are the objects, by key.

Converters change values as well as names, see :mod:`workbench.names.gguf`. This reader returns them as stored.

Sources: gguf 0.19; llama.cpp ``gguf-split``; files of llama.cpp's converter and of gguf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from operator import getitem
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.garbage import uncollected
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import short
from workbench.core.place import Place, lacking
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, NotACheckpointError
from workbench.formats import Format
from workbench.formats.gguf.header import MAGIC, GgufHeader, begin, parse

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
COUNT, TENSORS, NUMBER = "split.count", "split.tensors.count", "split.no"


def detect(place: Place) -> bool:
    """Return whether the file begins like GGUF, or the folder holds such files."""
    if place.file is None:
        return any(name.endswith(SUFFIX) for name in place.files)
    return place.file.endswith(SUFFIX) or place.head(place.file, 4) == MAGIC


def is_collection(place: Place) -> bool:
    """Return whether a folder's files are several models, or a model and its projector."""
    if place.file is not None:
        return False
    names = [name for name in place.files if name.endswith(SUFFIX)]
    return len({_stem(name) for name in names}) > 1


def missing(place: Place) -> str:
    """Describe the parts of a split file that are missing.

    Raises:
        CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError: a file on a disk does not begin like GGUF.
    """
    names = [place.file] if place.file is not None else [name for name in place.files if name.endswith(SUFFIX)]
    for name in names:
        lost = [part for part in _parts(name) if not place.exists(part)]
        if lost:
            return f"{lacking(len(lost), len(_parts(name)), 'parts')}, first {lost[0]!r}"
        if place.local:  # a store would be asked for each file
            begin(place, name)
    return ""


@uncollected()
def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every tensor of every part.

    Raises:
        CorruptError, UnsafeError: a header contradicts itself or the other parts.
        TruncatedError: a header ends beyond the end of its file.
        NotACheckpointError: the folder holds several models.
        UnsupportedFormatError: an unknown version or element type.
    """
    names = _files(place)
    present = [name for name in names if place.exists(name)]
    headers = {name: parse(place, name) for name in present or names}
    builder = CatalogBuilder("gguf", place)
    notes: list[str] = []
    facts: dict[str, Any] = {"step": None, "notes": notes}
    lost = [name for name in names if name not in headers]
    if lost:
        facts["incomplete"] = (
            f"{lacking(len(lost), len(names), 'parts')}, first {lost[0]!r}; restore it, or open the rest with "
            "partial=True"
        )
    tensors: list[int] = []
    for name, header in headers.items():
        number = builder.file(name, metadata=True)
        _check_split(name, header, len(names))
        tensors.append(len(header.tensors))
        _add(builder, name, number, header, notes)
    stated = next((header.metadata[TENSORS] for header in headers.values() if TENSORS in header.metadata), None)
    if not lost and stated is not None and stated != sum(tensors):
        raise CorruptError(
            f"{TENSORS} of {names[0]!r} is {short(stated)}, but the {plural(len(names), 'part', 'hold')} "
            f"{plural(sum(tensors), 'tensor')}; a part is from another model"
        )
    versions = sorted({header.version for header in headers.values()})
    return builder.build(facts | {"version": versions[-1]})


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the metadata of all parts by key; the keys of a split (``split.no``) are those of the first part."""

    @cache
    def stored() -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for name in catalog.metadata_files:
            for key, value in parse(place, name, metadata_only=True).metadata.items():
                merged.setdefault(key, value)
        return merged

    return LazyMap({key: partial(_value, stored, key) for key in stored()})


def _value(stored: Any, key: str) -> Any:
    return getitem(stored(), key)


# ---- files -----------------------------------------------------------------------------------------------------------


def _stem(name: str) -> str:
    match = _PART.fullmatch(name)
    return f"{match[1]}-of-{match[3]}" if match else name


def _parts(name: str) -> list[str]:
    """Return the names of all parts of a split file, or this name if it is not split."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}{SUFFIX}" for number in range(1, int(match[3]) + 1)]


def _files(place: Place) -> list[str]:
    if place.file is not None:
        return _parts(place.file)
    names = [name for name in place.files if name.endswith(SUFFIX)]
    if is_collection(place):
        raise NotACheckpointError(f"{place.path!r} holds several models: {some_of(names)}; open one of the files")
    if not names:
        raise NotACheckpointError(f"{place.path!r} holds no {SUFFIX} file")
    return _parts(names[0])


def _check_split(name: str, header: GgufHeader, parts: int) -> None:
    """Check that a part's number agrees with its name."""
    match = _PART.fullmatch(name)
    stated = header.metadata.get(COUNT), header.metadata.get(NUMBER)
    if match is None or stated == (None, None):
        return
    if stated != (parts, int(match[2]) - 1):
        raise CorruptError(
            f"{name!r} is named as part {int(match[2])} of {parts}, but its {NUMBER} is {stated[1]} (counted from 0) "
            f"and its {COUNT} {stated[0]}; parts were swapped or renamed"
        )


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _add(builder: CatalogBuilder, name: str, number: int, header: GgufHeader, notes: list[str]) -> None:
    """Declare the tensors of one part, as columns: files of 100,000 tensors exist."""
    found = header.tensors
    for one in found:
        if one.name in builder:
            raise CorruptError(f"tensor {one.name!r} is in {name!r} and in another part")
    rows = np.array([builder.tensor(one.name, one.dtype, one.shape) for one in found], np.int64)
    dims = max([1, *(len(one.shape) for one in found)])
    sizes = np.ones((len(found), dims), np.int64)
    for row, one in enumerate(found):
        sizes[row, : len(one.shape)] = one.shape
    codec = np.full(len(found), codecs.RAW, np.int64)
    if header.big:
        codec[:] = [codecs.OPAQUE if one.dtype.packed else codecs.RAW_BE for one in found]
        if packed := sum(one.dtype.packed for one in found):
            notes.append(f"{name!r} is big endian: its {plural(packed, 'quantised tensor', 'are')} listed but not read")
    start, stop = (np.array([getattr(one, side) for one in found], np.int64) for side in ("start", "stop"))
    builder.block(rows, np.zeros_like(sizes), sizes, number, start, stop, codec=codec)


FORMAT = Format(
    name="gguf",
    title="GGUF (llama.cpp)",
    marks="*.gguf",
    read_from="GGUF 1 – 3, gguf 0.19",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    is_collection=is_collection,
    single_file=True,
    suffixes=(SUFFIX,),
    beside=(SUFFIX,),
    own_bytes=True,
)
