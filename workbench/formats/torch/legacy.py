"""``torch.save`` before zip: a chain of pickles (torch 0.1.12 – 1.5, and ``_use_new_zipfile_serialization=False``).

::

    pickle   0x1950a86a20f9469cfc6c           the magic number
    pickle   1001                             protocol
    pickle   {"little_endian": True, …}       facts about the saving machine
    pickle   the object                       storages as ("storage", class, key, location, numel, view)
    pickle   ["94…", "94…"]                   keys of the storages, in the order of their data
    int64    numel │ numel elements           one per key, back to back, little endian, unaligned, no checksum
    …

and before that a tar archive (torch up to 0.1.11)::

    storages   pickle n; n × ( pickle (key, location, class) │ int64 numel │ elements ); pickle [views]
    tensors    pickle n; n × ( pickle (key, storage key, class) │ int32 ndim, 4 bytes, int64 sizes, strides, offset )
    pickle     the object                     tensors by key

A view is a part of another storage: (its key, root key, offset, numel), in elements.

Sources: torch 2.13 ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``, ``legacy_load``) and
``torch/csrc/serialization.cpp`` (elements are little endian on any machine).
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from workbench.core.dtypes import by_name
from workbench.core.pickles import unpickle
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.opcodes import end_of
from workbench.core.pickles.standins import StorageRef, StorageType, TensorRef, short
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsupportedFormatError

FIRST = 64 << 10  #: bytes of a pickle that are read first, then four times as many
MOST = 1 << 30  #: maximum bytes of a pickle
STOP = ord(".")
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_MAGIC_BYTES = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")  # LONG1 of 10 bytes, in any pickle protocol from 2 on
_MEMBERS = {"storages", "tensors", "pickle"}


@dataclass(slots=True)
class LegacyFile:
    """Contents of a file: the tree, with tensors as references, and the byte range of each storage.

    Attributes:
        storages: byte range in the file by storage key.
        big: whether elements are big endian.
        globals: foreign globals that the pickle names.
        notes: sentences about anything unusual.
        stop: where the contents of the file end; ``None`` if the format does not define the end.
    """

    tree: object
    storages: dict[str, tuple[int, int]]
    big: bool = False
    globals: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    stop: int | None = None


def is_legacy(head: bytes) -> bool:
    """Return whether a file with this beginning is a chain of torch's pickles."""
    return _MAGIC_BYTES in head[:32]


def is_tar(head: bytes) -> bool:
    """Return whether a file with this beginning (512 bytes) is a tar archive whose first member is torch's."""
    name = head[:100].rstrip(b"\0").decode("ascii", "replace").removeprefix("./")
    return len(head) >= 512 and name in _MEMBERS


def load_legacy(view: LazyBytes, *, what: str) -> LegacyFile:
    """Decode a chain of pickles.

    Raises:
        CorruptError, UnsafeError: a pickle cannot be trusted.
        TruncatedError: a storage ends beyond the end of the file.
    """
    magic, at = _next(view, 0, what)
    protocol, at = _next(view, at, what)
    if magic != MAGIC or protocol != PROTOCOL:
        raise CorruptError(f"{what} begins like torch.save's legacy format but has the protocol {short(protocol, 40)}")
    _, at = _next(view, at, f"{what} (system facts)")
    seen: dict[str, StorageRef] = {}
    loaded = _pickle(view, at, f"{what} (object)", _remember(seen))
    keys, at = _next(view, at + loaded.stop, f"{what} (storage keys)")
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise CorruptError(
            f"{what}: the object that ends at byte {at:,} should be the list of storage keys, but is {short(keys, 60)}"
        )
    storages: dict[str, tuple[int, int]] = {}
    for key in keys:
        if key not in seen:
            raise CorruptError(f"{what}: the storage {short(key, 40)} at byte {at:,} is not referenced by any tensor")
        span, at = _storage(view, at, key, seen[key].dtype, what, seen[key].numel)
        storages[key] = span
    _add_views(storages, seen, what)
    return LegacyFile(loaded.value, storages, globals=loaded.globals, stop=at)


def load_tar(view: LazyBytes, *, what: str) -> LegacyFile:
    """Decode the tar format. Raises the exceptions of :func:`load_legacy`."""
    members = _members(view, what)
    start, stop = members["storages"]
    part = view.part(0, stop)
    count, at = _next(part, start, f"{what} (storages)")
    refs: dict[str, StorageRef] = {}
    storages: dict[str, tuple[int, int]] = {}
    for _ in range(_count(count, what)):
        row, at = _next(part, at, f"{what} (storages)")
        key, location, kind = _triple(row, what)
        if not isinstance(kind, StorageType):
            raise CorruptError(
                f"{what}: storage {short(key, 40)} has the class {short(kind, 60)}, which is not a storage"
            )
        span, at = _storage(part, at, str(key), kind.dtype, what, None)
        storages[str(key)] = span
        size = _width(kind.dtype)
        refs[str(key)] = StorageRef(kind.dtype, str(key), str(location), (span[1] - span[0]) // size)
    views, at = _next(part, at, f"{what} (views)")
    for row in views if isinstance(views, list) else []:
        if not (isinstance(row, tuple) and len(row) == 4 and all(type(n) is int for n in row) and str(row[1]) in refs):
            raise CorruptError(f"{what}: {short(row, 60)} is not a view of a storage")
        root = refs[str(row[1])]
        refs[str(row[0])] = StorageRef(root.dtype, root.key, root.location, root.numel, (str(row[0]), row[2], row[3]))
    _add_views(storages, refs, what)
    tensors = _tensors(view, members["tensors"], refs, what)
    start, stop = members["pickle"]
    tree = _pickle(view.part(0, stop), start, f"{what} (pickle)", _tensor_of(tensors))
    return LegacyFile(tree.value, storages, globals=tree.globals)


def module_or_storage(pid: object) -> object:
    """Resolve a persistent id: a storage, or the class of a module whose source was saved with it."""
    if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
        return pid[1]
    return torch_storage(pid)


# ---- pickles -------------------------------------------------------------------------------------------------------


def _next(view: LazyBytes, at: int, what: str) -> tuple[object, int]:
    """Decode the pickle at byte ``at``; return it and its end."""
    found = _pickle(view, at, what)
    return found.value, at + found.stop


def _pickle(
    view: LazyBytes, at: int, what: str, persistent_load: Callable[[object], object] | None = None
) -> unpickle.Unpickled:
    """Decode the pickle at byte ``at``. Its length is not stored: more is read until it ends."""
    size = FIRST
    while True:
        data = view[at : at + size]
        cut = len(data) == size and size < MOST  # there may be more of it
        if not cut or _ends(data):
            break
        size *= 4
    counted = f"{what}, counted from byte {at:,} of the file," if at else what
    return unpickle.loads_with_globals(data, what=counted, persistent_load=persistent_load)


def _ends(data: bytes | memoryview) -> bool:
    """Return whether the data hold a complete pickle, or none (then the unpickler reports why)."""
    at = 0
    try:
        while at < len(data):
            if data[at] == STOP:
                return True
            at = end_of(data, at)
    except IndexError:
        return False
    except KeyError:
        return True
    return False


# ---- storages ------------------------------------------------------------------------------------------------------


def _remember(seen: dict[str, StorageRef]) -> Callable[[object], object]:
    """Return a resolver that records storages; each tensor names one, and a view is named by its own key."""

    def load(pid: object) -> object:
        ref = module_or_storage(pid)
        if isinstance(ref, StorageRef):
            seen.setdefault(ref.key, StorageRef(ref.dtype, ref.key, ref.location, ref.numel))
            if ref.view is not None:
                seen.setdefault(ref.view[0], ref)
                return StorageRef(ref.dtype, ref.view[0], ref.location, ref.view[2])
        return ref

    return load


def _storage(
    view: LazyBytes, at: int, key: str, dtype: str | None, what: str, numel: int | None
) -> tuple[tuple[int, int], int]:
    """Return the byte range of the elements that follow their count, and its end."""
    if at + 8 > len(view):
        raise TruncatedError(
            f"{what} ends at byte {len(view):,}, before the size of storage {short(key, 40)} at {at:,}"
        )
    (count,) = struct.unpack("<q", view[at : at + 8])
    if count < 0 or (numel is not None and count != numel):
        raise CorruptError(
            f"{what}: storage {short(key, 40)} at byte {at:,} has {plural(count, 'element')}, but "
            f"{numel or 0:,} in the object"
        )
    stop = at + 8 + count * _width(dtype)
    if stop > len(view):
        raise TruncatedError(
            f"{what}: storage {short(key, 40)} ends at byte {stop:,}, {plural(stop - len(view), 'byte')} beyond the "
            "end of the file; it is truncated, copy it again"
        )
    return (at + 8, stop), stop


def _add_views(storages: dict[str, tuple[int, int]], seen: dict[str, StorageRef], what: str) -> None:
    for key, ref in seen.items():
        if ref.view is None or key in storages:
            continue
        root = storages.get(ref.key)
        size = _width(ref.dtype)
        start = (root[0] if root else 0) + ref.view[1] * size
        stop = start + ref.view[2] * size
        if root is None or ref.view[1] < 0 or ref.view[2] < 0 or stop > root[1]:
            raise CorruptError(
                f"{what}: storage {short(key, 40)} extends beyond {short(ref.key, 40)}, which contains it"
            )
        storages[key] = start, stop


# ---- tar -----------------------------------------------------------------------------------------------------------


def _members(view: LazyBytes, what: str) -> dict[str, tuple[int, int]]:
    """Return the byte ranges of the three members; nothing is extracted."""
    members: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(fileobj=_File(view), mode="r:") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name in _MEMBERS and member.isreg() and not member.sparse:
                    if name in members:
                        raise CorruptError(f"{what} has two members named {name!r}, which is ambiguous")
                    members[name] = member.offset_data, member.offset_data + member.size
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise CorruptError(f"{what} is a damaged tar archive: {short(str(error), 100)}") from None
    for name in sorted(_MEMBERS - set(members)):
        raise CorruptError(f"{what} is a tar archive without {name!r}, so not from torch.save")
    for name, (_, stop) in members.items():
        if stop > len(view):
            raise TruncatedError(
                f"{what}: member {name!r} ends at byte {stop:,} but the file has {plural(len(view), 'byte')}"
            )
    return members


def _tensors(view: LazyBytes, span: tuple[int, int], refs: dict[str, StorageRef], what: str) -> dict[str, TensorRef]:
    part = view.part(0, span[1])
    count, at = _next(part, span[0], f"{what} (tensors)")
    tensors: dict[str, TensorRef] = {}
    for _ in range(_count(count, what)):
        row, at = _next(part, at, f"{what} (tensors)")
        key, storage, _ = _triple(row, what)
        ref = refs.get(str(storage))
        if ref is None or ref.dtype is None:
            raise CorruptError(f"{what}: tensor {short(key, 40)} refers to the missing storage {short(storage, 40)}")
        try:
            (dims,) = struct.unpack("<i", part[at : at + 4])
            if not 0 <= dims <= 64:
                raise CorruptError(f"{what}: tensor {short(key, 40)} at byte {at:,} has {dims} dimensions")
            numbers = struct.unpack(f"<{2 * dims + 1}q", part[at + 8 : at + 16 * (dims + 1)])
        except struct.error:
            raise TruncatedError(f"{what}: tensor {short(key, 40)} at byte {at:,} extends beyond its member") from None
        at += 8 + 8 * len(numbers)
        if min(numbers) < 0:
            raise CorruptError(f"{what}: tensor {short(key, 40)} at byte {at:,} has a negative size, stride or offset")
        own = StorageRef(ref.dtype, str(storage), ref.location, ref.view[2] if ref.view else ref.numel)
        tensors[str(key)] = TensorRef(own, ref.dtype, numbers[-1], numbers[:dims], numbers[dims:-1])
    return tensors


def _tensor_of(tensors: dict[str, TensorRef]) -> Callable[[object], object]:
    def load(pid: object) -> object:
        if type(pid) is tuple and pid:
            return pid[0]  # a module's class and source
        if str(pid) not in tensors:
            raise ValueError(f"{short(pid)} is not a tensor of the archive")
        return tensors[str(pid)]

    return load


def _triple(row: object, what: str) -> tuple[Any, Any, Any]:
    if not isinstance(row, tuple) or len(row) != 3 or type(row[0]) not in (int, str):
        raise CorruptError(f"{what}: {short(row, 60)} is not a row of torch's tar format")
    return row


def _count(count: object, what: str) -> int:
    if type(count) is not int or not 0 <= count <= 10_000_000:
        raise CorruptError(f"{what}: {short(count, 40)} is not a number of rows")
    return count


class _File(BytesIO):
    """A read-only file over a window."""

    def __init__(self, view: LazyBytes) -> None:
        super().__init__()
        self._view, self._at = view, 0

    def read(self, size: int | None = -1, /) -> bytes:
        stop = len(self._view) if size is None or size < 0 else min(self._at + size, len(self._view))
        data = bytes(self._view[self._at : stop])
        self._at = max(self._at, stop)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence:
            raise UnsupportedFormatError("a tar archive only supports absolute seeks")
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at


def _width(dtype: str | None) -> int:
    """Return the bytes per unit of a storage's count: one for untyped and packed (quantized) storages."""
    return max(1, by_name(dtype).bits // 8) if dtype else 1
