"""torch.save's zip archives inside a byte range: where each storage's bytes are, and their CRC. Only the
requested bytes are read.

::

    start ┌ PK 03 04  local header ─ name ─ padding      sizes and CRC are 0 here
          │ payload                                      and follow it in the data descriptor,
          │ PK 07 08  data descriptor: CRC, sizes        so the file cannot be walked forward
          ├ …                     archive/data.pkl    the object, storages as persistent ids
          │                       archive/byteorder   "little" or "big"; absent in old files: little
          │                       archive/data/0 …    one storage each, STORED
    stop  └ PK 01 02 … central directory and end records

One record: ziprecord.py; the directory: zipdirectory.py. Read from torch 2.13
(``caffe2/serialize/inline_container.cc``, miniz 3) and APPNOTE.TXT 6.3. The archive's folder is ``archive``
or the file's stem. Alignment is relative to ``start`` only: in a ``.distcp`` file most payloads are
unaligned. All offsets here are relative to the buffer, which must be exactly the archive's byte range.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.dtypes import by_name
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import Opaque, StorageRef, TensorRef, short
from workbench.core.pickles.unpickle import loads
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.core.zipdirectory import find_directory, read_records
from workbench.core.ziprecord import DEFLATED, STORED, ZipRecord, inflate, locate
from workbench.errors import CorruptError, UnsupportedFormatError, quoted

# Records that are never empty so that a CRC of 0 was never computed.
MARKERS = ("byteorder", "version", ".format_version", ".storage_alignment")
_TEMPLATE_LIMIT = 4096
# data.pkl → its content: the chunks of one tensor mostly have identical ones.
_TEMPLATES: dict[bytes, TensorRef] = {}


class Item(NamedTuple):
    """The tensor of a one-tensor archive.

    Its storage is bytes ``[start, start + nbytes)`` of the buffer; ``storage_offset`` and ``stride`` count
    elements within it. ``crc`` is the CRC-32 of the whole storage, None when the file has no checksums. ``conj`` and
    ``neg`` say that it is a conjugate or negative view so signs have to be flipped.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    start: int
    nbytes: int
    crc: int | None
    byteorder: str
    conj: bool = False
    neg: bool = False


@dataclass(slots=True, eq=False)
class Archive:
    """The directory of an archive; payloads stay where they are.

    ``prefix`` is the folder that holds data.pkl, None when the zip has none (then it is not of torch.save).
    ``has_checksums`` is False when the writer left all CRCs at 0
    (``torch.serialization.set_crc32_options(False)``).
    """

    view: memoryview | LazyBytes
    what: str
    records: dict[str, ZipRecord]
    prefix: str | None
    has_checksums: bool

    @property
    def byteorder(self) -> str:
        """``little`` or ``big``, of every payload. Raises CorruptError for another word."""
        record = self.find("byteorder")
        if record is None:
            return "little"
        word = self.read(record)
        if word not in (b"little", b"big"):
            raise CorruptError(
                f"{self.what}: record {record.name!r} contains {word[:20]!r}, neither 'little' nor 'big'; the "
                "file is damaged"
            )
        return word.decode()

    def find(self, name: str) -> ZipRecord | None:
        """Return the record ``name`` of the archive's folder, such as ``data/0``."""
        return self.records.get(f"{self.prefix}/{name}")

    def fetch_headers(self) -> None:
        """Fetch the local headers of all records at once, if the archive is in a store; :meth:`payload` reads them."""
        if isinstance(self.view, LazyBytes):
            self.view.fetch([record.offset for record in self.records.values()])

    def payload(self, record: ZipRecord) -> tuple[int, int]:
        """Return ``(start, stop)`` of a STORED record's bytes in the buffer.

        Raises:
            CorruptError: the local header contradicts the directory; UnsafeError: encrypted;
            UnsupportedFormatError: compressed, so the file does not contain its bytes unchanged.
        """
        if record.method != STORED:
            raise UnsupportedFormatError(
                f"{self.what}: record {record.name!r} is compressed (zip method {record.method}); torch.save "
                "stores payloads uncompressed, so the file was repacked: unpack it and save it with "
                "torch.save"
            )
        return locate(self.view, record, self.what)

    def read(self, record: ZipRecord) -> bytes:
        """Read a small record, inflated if necessary, and check its CRC. Raises like `payload`; UnsafeError: a zip
        bomb.
        """
        start, stop = locate(self.view, record, self.what)
        if record.method == STORED:
            content = bytes(self.view[start:stop])
        elif record.method == DEFLATED:
            content = inflate(self.view[start:stop], record, self.what)
        else:
            raise UnsupportedFormatError(
                f"{self.what}: record {record.name!r} uses zip method {record.method}, which torch.save "
                "never writes; unpack the file and save it with torch.save"
            )
        if self.has_checksums and zlib.crc32(content) != record.crc:
            raise CorruptError(
                f"{self.what}: record {record.name!r}, bytes {start:,} to {stop:,}: CRC-32 is "
                f"{zlib.crc32(content):#010x}, the directory says {record.crc:#010x}; the file is damaged"
            )
        return content


def read_directory(buf: object, *, what: str) -> Archive:
    """Read the central directory of the zip archive that fills ``buf`` (bytes, memoryview, a uint8 array, or a window
    of a file).

    Raises:
        TruncatedError: starts like an archive but has no end record.
        CorruptError: no zip archive, or one that contradicts itself.
        UnsafeError: encrypted, record names that leave the archive, absurd record counts.
    """
    view = _view(buf)
    start, stop, count = find_directory(view, what)
    records = read_records(view, start, stop, count, what)
    prefix = None
    for name in records:
        if name.endswith("/data.pkl") and name.count("/") == 1:
            if prefix is not None:
                raise CorruptError(
                    f"{what} has two objects, {prefix + '/data.pkl'!r} and {name!r}; torch.save writes one, "
                    "so do not trust the file"
                )
            prefix = name[:-9]
    return Archive(view, what, records, prefix, _has_checksums(records, prefix))


def single_tensor(buf: object, *, what: str) -> Item:
    """Locate the one tensor of a ``.distcp`` item (torch.save of a tensor) in ``buf``.

    Raises:
        CorruptError: no archive of one tensor, or dtype, shape, stride and payload do not fit each other.
        UnsupportedFormatError: an element type without whole bytes, a tensor of a special class, or a
        compressed payload.
    """
    archive = read_directory(buf, what=what)
    pickled = archive.find("data.pkl")
    if pickled is None:
        raise CorruptError(
            f"{what} is a zip archive without data.pkl, not from torch.save; the item's byte range may be wrong"
        )
    content = archive.read(pickled)
    tensor = _TEMPLATES.get(content)
    if tensor is None:
        tensor = _one_tensor(content, what)
        if len(content) < 4096:  # real ones have about 200 bytes
            if len(_TEMPLATES) >= _TEMPLATE_LIMIT:
                _TEMPLATES.clear()
            _TEMPLATES[content] = tensor
    record = archive.find(f"data/{tensor.storage.key}")
    if record is None:
        raise CorruptError(
            f"{what}: data.pkl names storage {quoted(tensor.storage.key)}, but there is no such record; the "
            "file is damaged"
        )
    start, stop = archive.payload(record)
    _check_extent(tensor, stop - start, what)
    return Item(
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        tensor.storage_offset,
        start,
        stop - start,
        record.crc if archive.has_checksums else None,
        archive.byteorder,
        *lazy_view(tensor, what),
    )


def _one_tensor(content: bytes, what: str) -> TensorRef:
    value = loads(content, what=f"{what} (data.pkl)", persistent_load=torch_storage)
    if isinstance(value, Opaque) and (kind := _own_class(value)):
        raise UnsupportedFormatError(
            f"{what} is a tensor of class {kind!r}, which is not a single array of elements; it is listed but not "
            "read. Load it with the program that wrote it; an export can leave it out (select=)"
        )
    if not isinstance(value, TensorRef) or not isinstance(value.storage, StorageRef):
        raise CorruptError(f"{what} contains {short(value, 60)}, not a tensor; the item's byte range may be wrong")
    return value


def _own_class(value: Opaque) -> str:
    """Return the class of a tensor that needs special rebuilding (quantised, or a wrapper around others), or ""."""
    if not value.qualname.startswith("_rebuild_"):
        return ""
    named = [arg.qualname for arg in value.args[:2] if isinstance(arg, type) and issubclass(arg, Opaque)]
    return (named or [value.qualname.removeprefix("_rebuild_")])[0]


def lazy_view(tensor: TensorRef, what: str) -> tuple[bool, bool]:
    """Return whether a tensor is a conjugate and whether it is a negative view.

    Raises:
        UnsupportedFormatError: its bytes differ from its values in an unknown way.
    """
    facts = tensor.attrs.get("metadata") or {}
    if not isinstance(facts, dict) or not set(facts) <= {"conj", "neg"} or by_name(tensor.dtype).kind not in "cf":
        if facts:
            raise UnsupportedFormatError(f"the bytes of {what} are not its values ({short(facts, 40)})")
        return False, False
    return bool(facts.get("conj")), bool(facts.get("neg"))


def _check_extent(tensor: TensorRef, nbytes: int, what: str) -> None:
    storage = tensor.storage
    try:
        itemsize = by_name(tensor.dtype).itemsize
        stored = storage.numel if storage.dtype is None else storage.numel * by_name(storage.dtype).itemsize
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{what}: {error}") from None
    if stored != nbytes:
        raise CorruptError(
            f"{what}: data.pkl says storage {storage.key!r} has {plural(stored, 'byte')}, the record has {nbytes:,}; "
            "the file is damaged"
        )
    last = tensor.storage_offset
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size == 0:
            return
        last += (size - 1) * stride
    if (last + 1) * itemsize > nbytes:
        raise CorruptError(
            f"{what}: a tensor of shape {list(tensor.shape)}, stride {list(tensor.stride)} at element "
            f"{tensor.storage_offset:,} ends at byte {(last + 1) * itemsize:,} of a storage of {nbytes:,}; "
            "the file is damaged"
        )


def _view(buf: object) -> memoryview | LazyBytes:
    if isinstance(buf, LazyBytes):
        return buf
    view = buf if type(buf) is memoryview else memoryview(buf)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _has_checksums(records: dict[str, ZipRecord], prefix: str | None) -> bool:
    for marker in MARKERS:
        if record := records.get(f"{prefix}/{marker}"):
            return record.crc != 0
    return any(record.crc for record in records.values())
