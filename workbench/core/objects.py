"""Non-tensor items stored as ``torch.save`` archives inside byte ranges, decoded on access.

Tensors inside such an object (generator states, small buffers) become ``torch.Tensor`` values; everything that the
pickle names beyond plain data stays an inert, named leaf (:mod:`workbench.core.pickles.unpickle`). An object is decoded
whole, so each record that it is made of is compared with its CRC-32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from workbench.core import codecs, ziparchive
from workbench.core.arrays import Array
from workbench.core.catalog import Catalog, reach
from workbench.core.dtypes import by_name
from workbench.core.lazymap import LazyMap
from workbench.core.payload import decompress
from workbench.core.pickles import unpickle
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import Opaque, StorageRef, TensorRef
from workbench.core.place import Place
from workbench.core.source import LazyBytes
from workbench.errors import CorruptError, TruncatedError

OBJECT_LIMIT = 1 << 30  #: bytes to which a compressed object may grow
MOST = 1024  #: small objects of a file that are fetched at once


def archive_objects(place: Place, catalog: Catalog) -> LazyMap:
    """Return the objects of a catalog by key; each is an archive in a byte range of one of its files."""
    fetched = _Fetched(place, catalog)
    return LazyMap({key: partial(_read, place, catalog, row, fetched) for row, key in enumerate(catalog.objects.keys)})


class _Fetched:
    """The files of a store whose small objects were fetched: an object is seldom read alone."""

    def __init__(self, place: Place, catalog: Catalog) -> None:
        self._place, self._table, self._files = place, catalog.objects, catalog.files
        self._done: set[int] = set()

    def around(self, row: int) -> None:
        """Fetch the small objects in the file of an object, all at once."""
        table, file = self._table, int(self._table.file[row])
        if self._place.at_once == 1 or file in self._done:  # a disk reads on demand
            return
        self._done.add(file)
        source = self._place.source(self._files[file])
        small = (table.file == file) & (table.stop - table.start <= source.block)
        source.fetch(list(zip(table.start[small].tolist(), table.stop[small].tolist(), strict=True))[:MOST])


def decode_archive(data: Array | LazyBytes, *, what: str, part: Callable[[Any], Any] | None = None) -> Any:
    """Decode the object in one ``torch.save`` archive.

    Args:
        part: selects a part of the tree; only its tensors are read.

    Raises:
        CorruptError: it is not such an archive, it is inconsistent, or a record does not match its CRC-32.
    """
    archive = ziparchive.read_directory(data, what=what)
    record = archive.records.get(f"{archive.prefix}/data.pkl")
    if record is None:
        raise CorruptError(f"{what} is an archive without data.pkl, so it is not a torch.save object")
    content = archive.read(record)
    value = unpickle.loads(content, what=f"{what} (data.pkl)", persistent_load=torch_storage)
    value = value if part is None else part(value)

    @cache  # tensors may share a storage; its CRC is computed once
    def storage(record: ziparchive.ZipRecord) -> bytearray:
        archive.payload(record)  # refuses a compressed storage: many small ones could inflate to any size
        return bytearray(archive.read(record))

    def made(ref: TensorRef | StorageRef) -> Any:
        if isinstance(ref, TensorRef):
            return _tensor(ref, archive, storage, what)
        return storage(_record(archive, ref, what))  # shared: a pickle may name one a million times

    return replace_tensors(value, made)


def replace_tensors(value: Any, make: Callable[[TensorRef | StorageRef], Any]) -> Any:
    """Replace every reference to a tensor or storage in containers and inert objects.

    Shared and cyclic containers remain shared and cyclic.
    """
    return _Replacer(make).visit(value)


class _Replacer:
    def __init__(self, make: Callable[[TensorRef | StorageRef], Any]) -> None:
        self._make = make
        self._done: dict[int, Any] = {}

    def visit(self, value: Any) -> Any:
        if isinstance(value, (TensorRef, StorageRef)):
            if id(value) not in self._done:
                self._done[id(value)] = self._make(value)
            return self._done[id(value)]
        if isinstance(value, dict):
            return self._dict(value)
        if type(value) is list:
            return self._list(value)
        if type(value) is tuple:
            if id(value) not in self._done:
                self._done[id(value)] = tuple(self.visit(item) for item in value)
            return self._done[id(value)]
        return self._opaque(value) if isinstance(value, Opaque) else value

    def _opaque(self, value: Opaque) -> Opaque:
        if id(value) not in self._done:
            self._done[id(value)] = value
            for name in ("args", "kwargs", "state", "items", "pairs"):
                setattr(value, name, self.visit(getattr(value, name)))
        return value

    def _dict(self, value: dict[Any, Any]) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        made: dict[Any, Any] = {}
        self._done[id(value)] = made
        for key, item in value.items():
            made[key] = self.visit(item)
        return made

    def _list(self, value: list[Any]) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        made: list[Any] = []
        self._done[id(value)] = made
        made.extend(self.visit(item) for item in value)
        return made


def _read(place: Place, catalog: Catalog, row: int, fetched: _Fetched) -> Any:
    table = catalog.objects
    file, start, stop = catalog.files[table.file[row]], int(table.start[row]), int(table.stop[row])
    what = f"object {table.keys[row]!r} at byte {start:,} of {file!r}"
    if stop > place.stat(file).size:
        raise TruncatedError(f"{what} ends at byte {stop:,}, beyond the end of the file")
    fetched.around(row)
    data = np.frombuffer(place.read(file, start=start, length=stop - start), np.uint8)
    if codecs.COMPRESSED[table.codec[row]]:
        data = decompress(data, OBJECT_LIMIT, what=what)
    try:
        return decode_archive(data, what=what)
    except RecursionError:
        raise CorruptError(f"{what} is nested too deeply to be shown") from None


def _record(archive: ziparchive.Archive, storage: StorageRef, what: str) -> ziparchive.ZipRecord:
    record = archive.records.get(f"{archive.prefix}/data/{storage.key}")
    if record is None:
        raise CorruptError(f"{what} refers to storage {storage.key!r}, which the archive does not contain")
    return record


def _tensor(
    ref: TensorRef, archive: ziparchive.Archive, storage_of: Callable[[ziparchive.ZipRecord], bytearray], what: str
) -> Any:
    import torch

    storage = ref.storage
    if not isinstance(storage, StorageRef):
        raise CorruptError(f"{what} contains a tensor without storage")
    content = storage_of(_record(archive, storage, what))
    dtype = by_name(ref.dtype)
    if (ref.storage_offset + reach(ref.shape, ref.stride)) * dtype.itemsize > len(content):
        raise CorruptError(f"{what}: a tensor of shape {ref.shape} extends past its storage {storage.key!r}")
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    if archive.byteorder == "big" and dtype.itemsize > 1:
        part = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        flat = flat.reshape(-1, part).flip(1).reshape(-1).contiguous()
    conj, neg = ziparchive.lazy_view(ref, what)
    found = flat.view(dtype.torch).as_strided(ref.shape, ref.stride, ref.storage_offset).clone()
    found = found.conj().resolve_conj() if conj else found
    return -found if neg else found
