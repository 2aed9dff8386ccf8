"""A folder on disk that keeps bytes fetched from stores: reading them again needs no request.

::

    DIR/workbench-payload/ 3f/ 3f9c…e2/ 0-65536            a range of an object: its bytes, and their CRC-32
                                        1048576-9437184
        └ digest of the object's URL, size and ETag         another content of the object is another folder

Several processes may use a folder at a time: a file appears under its name only when it is complete, and one that
another process removed is fetched again. The least recently used files are removed first, and so are damaged files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import zlib
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from workbench.core.disk import keep
from workbench.errors import UsageError

DEFAULT_SIZE = 16 << 30  #: bytes that a folder may hold
FOLDER = "workbench-payload"
CRC = 4  #: bytes of the checksum at the end of a file
LOW = 0.9  #: share of the size to which files are trimmed
NEAR = 64  #: ranges of an object that are searched for one with the requested bytes
CHECKED = 16  #: share of the size after whose writing it is checked again


T = TypeVar("T", int, "_Range")


class _Range(NamedTuple):
    start: int
    stop: int


class PayloadCache:
    """Ranges of objects on disk.

    Args:
        folder: is made if it does not exist.
        size: maximum number of bytes of all files together.

    Raises:
        UsageError: the folder cannot be written.
    """

    def __init__(self, folder: str, size: int = DEFAULT_SIZE) -> None:
        self._root, self._size = os.path.join(os.path.abspath(os.path.expanduser(folder)), FOLDER), size
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._root):
                pass
            owner = os.stat(self._root).st_uid
        except OSError as error:
            raise UsageError(f"the cache folder {folder!r} cannot be written: {error.strerror}") from None
        if hasattr(os, "getuid") and owner != os.getuid():
            raise UsageError(f"the cache folder {self._root!r} belongs to another user; choose another folder")
        self._lock = threading.Lock()
        self._ranges: dict[str, list[_Range]] = {}
        self._written = size  # existing files are examined before the first one is added

    def find(self, url: str, size: int, pin: str, start: int, stop: int) -> memoryview | None:
        """Return bytes ``[start, stop)`` of an object of that size and ETag, or ``None`` if no file has all of them."""
        folder = self._folder(url, size, pin)
        with self._lock:
            known = self._known(folder)
            near = up_to(known, _Range(start, 1 << 63), NEAR)
            holding = next((one for one in near if one.stop >= stop), None)
        if holding is None:
            return None
        data = _read(os.path.join(folder, f"{holding.start}-{holding.stop}"), holding.stop - holding.start)
        if data is None:
            self._forget(folder, holding)
            return None
        return data[start - holding.start : stop - holding.start]

    def keep(self, url: str, size: int, pin: str, start: int, data: memoryview) -> None:
        """Keep bytes of an object; a failure to write them (a full disk) is not an error."""
        if not len(data) or len(data) > self._size // 4:
            return
        folder, one = self._folder(url, size, pin), _Range(start, start + len(data))

        def write(out: BinaryIO) -> None:
            out.write(data)
            out.write(zlib.crc32(data).to_bytes(CRC, "little"))

        if not keep(os.path.join(folder, f"{one.start}-{one.stop}"), write):
            return
        with self._lock:
            known = self._known(folder)
            if one not in known:
                insort(known, one)
            self._written += len(data)
            full = self._written >= self._size // CHECKED
            self._written = 0 if full else self._written
        if full:
            self._trim()

    def _folder(self, url: str, size: int, pin: str) -> str:
        name = hashlib.blake2b(f"{url}\0{size}\0{pin}".encode("utf-8", "surrogatepass"), digest_size=16)
        return os.path.join(self._root, name.hexdigest()[:2], name.hexdigest())

    def _known(self, folder: str) -> list[_Range]:
        """Return the ranges of an object in the order of their starts, from a listing the first time."""
        if folder not in self._ranges:
            found = []
            with suppress(OSError):
                for name in os.listdir(folder):
                    start, _, stop = name.partition("-")
                    if start.isdecimal() and stop.isdecimal():
                        found.append(_Range(int(start), int(stop)))
            self._ranges[folder] = sorted(found)
        return self._ranges[folder]

    def _forget(self, folder: str, one: _Range) -> None:
        with self._lock, suppress(ValueError):
            self._ranges[folder].remove(one)

    def _trim(self) -> None:
        """Remove the least recently used files until the others fit."""
        files = sorted(_files(self._root))
        total = sum(nbytes for _, nbytes, _ in files)
        if total <= self._size:
            return
        for _, nbytes, path in files:
            with suppress(OSError):
                os.unlink(path)
            total -= nbytes
            folder, name = os.path.split(path)
            start, _, stop = name.partition("-")
            if folder in self._ranges and stop.isdecimal():
                self._forget(folder, _Range(int(start), int(stop)))
            if total <= LOW * self._size:
                return


_caches: dict[tuple[str, int], PayloadCache] = {}
_lock = threading.Lock()


def cache_of(options: dict[str, Any]) -> PayloadCache | None:
    """Take ``cache_dir`` and ``cache_size`` from storage options and return that cache: one for all of this process.

    Raises:
        UsageError: the size is not a number of bytes, or the folder cannot be written.
    """
    folder, size = options.pop("cache_dir", None), options.pop("cache_size", DEFAULT_SIZE)
    if not folder:
        return None
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"cache_dir is {folder!r}; give the path of a folder")
    folder = os.fsdecode(folder)
    try:
        size = int(size)
    except (TypeError, ValueError):
        raise UsageError(f"cache_size is {size!r}; give a number of bytes") from None
    with _lock:
        if (folder, size) not in _caches:
            _caches[folder, size] = PayloadCache(folder, size)
        return _caches[folder, size]


def up_to(ascending: list[T], last: T, most: int) -> list[T]:
    """Return up to ``most`` items that are not above ``last``, the nearest first.

    >>> up_to([10, 20, 30, 40], 30, 2)
    [30, 20]
    """
    at = bisect_right(ascending, last)
    return ascending[max(at - most, 0) : at][::-1]


def _read(path: str, nbytes: int) -> memoryview | None:
    """Return the bytes kept in a file, or ``None`` if it is gone or damaged."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != nbytes + CRC:
                raise OSError
            data = memoryview(np.empty(nbytes, np.uint8))
            if file.readinto(data) != nbytes or zlib.crc32(data) != int.from_bytes(file.read(CRC), "little"):
                raise OSError
        os.utime(path)  # used now: _trim sorts by this time
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        return None
    return data


def _files(root: str) -> Iterator[tuple[int, int, str]]:
    """Yield time of last use, size and path of each file."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with suppress(OSError):
                stat = os.stat(path)
                yield stat.st_mtime_ns, stat.st_size, path
