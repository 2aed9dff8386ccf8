"""Keras: ``.keras`` archives, ``.weights.h5``, and whole models in HDF5 (``.h5``, ``.hdf5``).

::

    net.keras            zip archive: metadata.json │ config.json │ model.weights.h5, which is stored and read in place
    net.weights.h5       layers/dense_1/vars/0 … │ optimizer/vars/N
    net.h5               attributes model_config, training_config │ model_weights/<layer>/<variable> │ optimizer_weights

A key is the path in the HDF5 file; :mod:`.names` states what it means, :mod:`.hdf5` how the file is read. numpy has no
bfloat16: Keras stores it as two opaque bytes with the attribute ``dtype="bfloat16"``, and without it in whole models.
A data set in one piece is read in place, one in chunks chunk by chunk. A chunk that was never written is a hole.

Sources: keras 3.15, h5py 3.16; see :mod:`.hdf5` and :mod:`.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from workbench.core import codecs, jsonsafe, ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog, row_major
from workbench.core.dtypes import by_name
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.words import plural, some_of
from workbench.core.ziparchive import Archive
from workbench.core.ziprecord import STORED, locate
from workbench.errors import NotACheckpointError, OpenError, UnsafeError, UnsupportedFormatError
from workbench.formats.format import Format
from workbench.formats.keras.hdf5 import MAGIC, DataSet, Hdf5
from workbench.formats.keras.names import legacy_meaning, meaning

WEIGHTS = "model.weights.h5"
DOCUMENTS = ("config.json", "metadata.json")
JSON_LIMIT = 64 << 20  #: maximum bytes of a document
TEXT_LIMIT = 16 << 20  #: maximum bytes of a data set of text that is shown
NOTED = 5
_ITERATION, _RATE = "optimizer/vars/0", "optimizer/vars/1"


def _open(place: Place) -> tuple[Hdf5, Archive | None]:
    """Open the HDF5 file, and the archive that contains it."""
    if place.file is None:
        raise NotACheckpointError(f"{place.path!r} is a folder; open one of its .keras or .h5 files")
    view = place.window(place.file)
    if bytes(view[: len(MAGIC)]) == MAGIC:
        return Hdf5(view, place.file), None
    archive = ziparchive.read_directory(view, what=repr(place.file))
    record = archive.records.get(WEIGHTS)
    if record is None:
        raise UnsupportedFormatError(
            f"{place.file!r} does not contain {WEIGHTS}; weights in shards or in numpy's format are not read"
        )
    if record.method != STORED:
        raise UnsupportedFormatError(
            f"{place.file!r}: {WEIGHTS} is compressed (zip method {record.method}), which Keras never does; unpack the "
            "archive and open the member"
        )
    start, stop = locate(view, record, repr(place.file))
    return Hdf5(view.part(start, stop), place.file, start), archive


def _document(archive: Archive | None, name: str) -> Any:
    record = archive.records.get(name) if archive is not None else None
    if archive is None or record is None:
        return None
    what = f"{archive.what}: {name!r}"
    if record.usize > JSON_LIMIT:
        raise UnsafeError(
            f"{what} has {plural(record.usize, 'byte')} of JSON, over the limit of {JSON_LIMIT:,}; refused"
        )
    return jsonsafe.loads(archive.read(record), what=what)


def detect(place: Place) -> bool:
    """Return whether the file is HDF5, or a zip archive with Keras' weights."""
    if place.file is None:
        return False
    try:
        head = place.read(place.file, length=min(len(MAGIC), place.stat(place.file).size))
        if head == MAGIC:
            return True
        if not head.startswith(b"PK\x03\x04"):
            return False
        return WEIGHTS in ziparchive.read_directory(place.window(place.file), what=repr(place.file)).records
    except OpenError:
        return False


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every data set.

    Raises:
        CorruptError, TruncatedError: the file contradicts itself.
        UnsafeError: an impossible count or length.
        UnsupportedFormatError: a required part has an unsupported version or kind.
    """
    file5, archive = _open(place)
    file = place.file or ""
    sets: list[DataSet] = []
    names: dict[str, str] = {}
    weights: dict[str, list[str]] = {}
    root: dict[str, Any] = {}
    for one in file5.walk():
        if isinstance(one, DataSet):
            sets.append(one)
            continue
        attributes = file5.attributes(one)
        if one.path == "":
            root = attributes
        owner, _, last = one.path.rpartition("/")
        if last == "vars" and isinstance(attributes.get("name"), str):
            names[owner] = attributes["name"]
        listed = _parts(attributes, "weight_names")
        if listed is not None:
            weights[one.path] = listed
    builder = CatalogBuilder("keras", place)
    builder.file(file, metadata=True, end=None if archive is not None else file5.end)
    shown = [one for one in sets if not one.why and one.element.name not in ("text", "texts")]
    if weights:
        documents = [_json(root.get(name), name, file) for name in ("model_config", "training_config")]
        meanings, odd = legacy_meaning([one.path for one in shown], weights, *documents), ""
    else:
        shapes = {one.path: one.shape or () for one in shown}
        meanings, odd = meaning(shapes, names, _document(archive, "config.json"))
    notes, raw, holes = [odd] if odd else [], [], []
    largest = 0
    for one in shown:
        element = one.element.name
        if element in ("bits8", "bits16"):
            if element == "bits16" and file5.attributes(one).get("dtype") == "bfloat16":
                element = "bfloat16"
            else:
                raw.append(one.path)
        fqn, role = meanings[one.path]
        tensor = builder.tensor(one.path, by_name(element), one.shape or (), fqn=fqn, role=role)
        largest = max(largest, _add(builder, tensor, one, file))
        if one.start < 0 and one.chunk is None and 0 not in (one.shape or ()):
            holes.append(one.path)
    left = [f"{short(one.path)} {one.why} and is left out" for one in sets if one.why]
    if raw:
        notes.append(
            f"the type of {some_of(raw, 3)} is not stored (opaque bytes, "
            "as h5py writes bfloat16 and float8): shown as bits"
        )
    if holes:
        notes.append(f"{some_of(holes, 1)}: never written, so a hole")
    notes += file5.notes
    if file5.left_out > len(file5.notes):
        notes.append(f"{file5.left_out - len(file5.notes):,} more such things are left out")
    notes += left[:NOTED]
    if len(left) > NOTED:
        notes.append(f"{len(left) - NOTED:,} more data sets are left out for similar reasons")
    texts = {one.path: one.at for one in sets if one.element.name in ("text", "texts") and not one.why}
    facts: dict[str, Any] = {"step": None, "notes": notes, "largest_chunk": largest, "archive": "the archive"}
    return builder.build(facts | {"objects": list(texts)}, named=True)


def _parts(attributes: Mapping[str, Any], name: str) -> list[str] | None:
    """Read a list of strings that may be stored in parts (``weight_names0``, ``weight_names1`` …), as headers are
    short.
    """
    parts = [attributes[name]] if name in attributes else []
    while f"{name}{len(parts)}" in attributes and name not in attributes:
        parts.append(attributes[f"{name}{len(parts)}"])
    good = all(isinstance(part, list) and all(isinstance(one, str) for one in part) for part in parts)
    return [one for part in parts for one in part] if parts and good else None


def _json(text: Any, name: str, file: str) -> Any:
    return jsonsafe.loads(text.encode(), what=f"{file!r}: attribute {name!r}") if isinstance(text, str) else None


def _add(builder: CatalogBuilder, tensor: int, one: DataSet, file: str) -> int:
    """Add the chunks of a data set; returns the bytes of one that has to be decoded whole."""
    shape, size, big = one.shape or (), one.element.size, one.element.big
    if one.chunk is None:
        if one.start >= 0 or not prod(shape):
            codec = codecs.RAW_BE if big else codecs.RAW
            start, stop = (one.start, one.stop) if one.start >= 0 else (0, 0)
            builder.chunk(one.path, [0] * len(shape), shape, file, start, stop, codec=codec)
        return 0
    if 0 in shape:
        builder.chunk(one.path, [0] * len(shape), shape, file, 0, 0)
        return 0
    known = {
        int(mask): codecs.filtered(tuple(name for n, name in enumerate(one.filters) if not int(mask) >> n & 1), big)
        for mask in np.unique(one.masks)
    }
    used = np.array([known[int(mask)] for mask in one.masks], np.int64)
    sizes = np.minimum(np.array(shape, np.int64) - one.offsets, np.array(one.chunk, np.int64))
    builder.block(
        np.full(len(used), tensor),
        one.offsets,
        sizes,
        builder.file(file),
        one.starts,
        one.starts + one.sizes,
        codec=used,
        strides=np.broadcast_to(np.array(row_major(one.chunk), np.int64), sizes.shape),
    )
    return prod(one.chunk) * size + 4 * bool(one.filters)


# ---- objects ---------------------------------------------------------------------------------------------------------


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the archive's documents, the file's attributes and text, the iteration and the learning rate."""
    file5, archive = _open(place)
    found: dict[str, Any] = {
        name.partition(".")[0]: partial(_document, archive, name)
        for name in DOCUMENTS
        if archive is not None and name in archive.records
    }
    walk = file5.walk()
    top = next(walk)
    sets = cache(lambda: {one.path: one for one in walk if isinstance(one, DataSet)})
    attributes = file5.attributes(top)
    for name, value in attributes.items():
        is_json = name.endswith("_config") and isinstance(value, str)
        found[name] = partial(_json, value, name, place.file or "") if is_json else partial(_identity, value)
    for name, key in _scalars(catalog).items():
        found[name] = partial(_scalar, place, catalog, key)
    for key in catalog.meta.get("objects", []):
        found[key] = partial(_text, place, file5, sets, key)
    return LazyMap(found)


def _identity(value: Any) -> Any:
    return value


def _scalars(catalog: Catalog) -> dict[str, str]:
    """Return the names and keys of the optimizer's scalars, stored beside its slots."""
    roles = catalog.roles or []
    steps = [key for key, role in zip(catalog.keys, roles, strict=True) if role == "step"]
    if len(steps) != 1:
        return {}
    found = {"iteration": steps[0]}
    rate = _RATE if steps[0] == _ITERATION else f"{steps[0].rpartition('/')[0]}/learning_rate"
    if rate in catalog.index and catalog.ndim[catalog.index[rate]] == 0:
        found["learning_rate"] = rate
    return found


def _scalar(place: Place, catalog: Catalog, key: str) -> Any:
    """Read the value of a data set with one element."""
    tensor = catalog.index[key]
    row = int(catalog.row_ptr[tensor])
    dtype = catalog.dtype_of(tensor)
    if row == catalog.row_ptr[tensor + 1] or not codecs.BITS[catalog.codec[row]] or dtype.numpy is None:
        return None
    data = place.read(place.file or "", start=int(catalog.start[row]), length=dtype.itemsize)
    found = np.frombuffer(data, dtype.numpy)[0]
    return (found.byteswap() if codecs.TABLE[catalog.codec[row]].big else found).item()


def _text(place: Place, file5: Hdf5, sets: Callable[[], dict[str, DataSet]], key: str) -> Any:
    """Read a data set of strings, as nested lists."""
    one = sets()[key]
    length = max(one.stop - one.start, 0)
    if one.chunk is not None or one.start < 0:
        raise UnsupportedFormatError(f"{place.file!r}: {key!r} is text in chunks or never written, which is not read")
    if length > TEXT_LIMIT:
        raise UnsafeError(f"{place.file!r}: {key!r} has {plural(length, 'byte')} of text, over {TEXT_LIMIT:,}; refused")
    return file5.values(place.read(place.file or "", start=one.start, length=length), one.element, one.shape or ())


FORMAT = Format(
    name="keras",
    title="Keras (.keras, HDF5)",
    marks="*.keras, *.weights.h5, *.h5",
    read_from="keras 3.15, h5py 3.16",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    single_file=True,
    suffixes=(".keras", ".weights.h5"),
    own_bytes=True,
)
