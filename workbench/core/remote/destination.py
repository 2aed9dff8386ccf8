"""A place in a store to write to: objects are sent, copied and removed, each visible only once it is complete.

Keys are relative to the bucket. Every call runs in a thread of :mod:`~workbench.core.remote.requests`: the caller's
thread can be interrupted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

from workbench.core.arrays import Array
from workbench.core.remote.bucket import Bucket, Tree
from workbench.core.remote.connection import Connection
from workbench.core.remote.objects import (
    SENT_AT_ONCE,
    WRITABLE,
    Version,
    WritableStore,
    complete,
    listing_of,
    mapping,
)
from workbench.core.remote.requests import GRACE, POLL, StoreCall, UnansweredError, alone, together
from workbench.core.remote.url import current_options, parse
from workbench.core.source import FileStat
from workbench.core.words import plural
from workbench.errors import ChangedError, MissingFileError, NotACheckpointError, OpenError, UsageError, WriteError

R = TypeVar("R")
_behind: dict[str, list[StoreCall[Any]]] = {}  # by store
#: Time limit of a request: a part is answered after all of it was sent, a copy after it was made.
PATIENCE = timedelta(minutes=5)


class CanceledError(Exception):
    """The object was not to be sent after all."""


class Destination:
    """A key of a store, the objects below it and beside it.

    Attributes:
        shown: its URL without secrets.
        key: its key in the bucket.
        within: seconds that a call may take, from the next one on; ``None``: as long as its requests are tried again.
        behind: calls of this process that send to the same store, for which nobody waits any more.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, what: str = "an export") -> None:
        """Connect; nothing is requested yet.

        Raises:
            UsageError: the scheme cannot be written to, or the URL names no object.
            MissingExtraError: the library that knows the scheme is not installed.
        """
        at = parse(url)
        if at.scheme not in WRITABLE:
            raise UsageError(
                f"{what} is not written to {at.shown!r}: only s3://, gs://, az:// and memory:// can be written to; "
                "name one of these or a local path"
            )
        if not at.key:
            raise UsageError(f"{at.shown!r} names a bucket: name a folder or an object in it")
        given = dict(current_options() if options is None else options)
        if at.scheme != "memory":
            own = mapping(given, "client_options")
            given["client_options"] = {"timeout": PATIENCE, "read_timeout": PATIENCE} | own
        self._connection = Connection(at, given)
        self._at = self._connection.at = at.public
        self._objects = cast(WritableStore, self._connection.objects)
        self.shown, self.key, self.name = at.shown, at.key, at.name
        self.within: float | None = None
        self.behind = _behind.setdefault(f"{at.scheme}://{at.host}", [])

    def beside(self, name: str) -> str:
        """Return the key of another name in the same folder."""
        above = self.key.rpartition("/")[0]
        return f"{above}/{name}" if above else name

    def files(self, folder: str) -> dict[str, FileStat]:
        """Return every object below a key by its path relative to it."""
        skip = len(folder) + 1
        found = self._asked(lambda: list(self._objects.walk(folder)))
        return {key[skip:]: stat for key, stat in found if stat is not None}

    def settle(self) -> None:
        """Wait for the end of calls that were left behind: they could still make an object visible."""
        while self.behind:
            if wait(self.behind[-1:], POLL).done:
                self.behind.pop()

    def stat(self, key: str) -> FileStat | None:
        """Return the identity of an object, or ``None``."""
        return self._asked(lambda: self._objects.head(key))

    def version(self, key: str) -> Version | None:
        """Return the version that :meth:`put` takes to replace exactly the current object."""
        return self._asked(lambda: self._objects.version(key))

    def put(self, key: str, data: bytes, only: Version | None = None) -> Version:
        """Send a small object; raises as :meth:`~workbench.core.remote.objects.WritableStore.put`."""
        return self._asked(lambda: self._objects.put(key, data, only))

    def whole(self, data: bytes) -> None:
        """Send the object of the URL itself."""
        parts = (data[at : at + SENT_AT_ONCE] for at in range(0, len(data), SENT_AT_ONCE))
        self._asked(lambda: self._objects.send(self.key, len(data), parts))

    def read_all(self, stats: Mapping[str, FileStat]) -> list[bytes | None]:
        """Read small objects like :meth:`read`, several at a time."""
        found: list[bytes | None] = []

        def one(item: tuple[str, FileStat]) -> bytes | None:
            try:
                return bytes(self._objects.get(item[0], item[0], 0, item[1].size, item[1])) if item[1].size else b""
            except (MissingFileError, ChangedError):
                return None

        if stats:
            found = self._asked(lambda: together(one, stats.items()))
        return found

    def read(self, key: str, stat: FileStat, start: int = 0) -> bytes | None:
        """Read an object from ``start`` on; ``None`` if it was deleted or replaced meanwhile."""

        def get() -> bytes | None:
            with suppress(MissingFileError, ChangedError):
                return bytes(self._objects.get(key, key, start, stat.size, stat))
            return None

        return self._asked(get) if start < stat.size else b""

    def send(self, key: str, path: str, stop: threading.Event, sent: Callable[[int], None]) -> FileStat:
        """Send a file, in parts that the store checks and that are sent again one by one; not in the main thread.

        Args:
            stop: when it is set, the object is abandoned and its sent parts are removed.
            sent: called with the number of bytes of each part that is passed on.

        Returns:
            the identity of the object.

        Raises:
            WriteError: the store refuses.
            CanceledError: ``stop`` was set.
        """

        def parts() -> Iterator[bytes]:
            with open(path, "rb") as handle:
                while data := handle.read(SENT_AT_ONCE):
                    if stop.is_set():
                        raise CanceledError(key)
                    sent(len(data))
                    yield data

        return self.stream(key, os.path.getsize(path), parts(), stop)

    def stream(self, key: str, about: int, parts: Iterator[bytes], stop: threading.Event) -> FileStat:
        """Send an object of about that many bytes while it is made, as :meth:`send` does with a file; ``parts`` raises
        :class:`CanceledError` once ``stop`` is set.
        """
        size, first = 0, []

        def counted() -> Iterator[bytes]:
            nonlocal size
            for part in parts:
                size += len(part)
                yield part

        rest = counted()
        self._connection.traffic.count(requests=1)
        try:
            for part in rest:  # an object that fits into one request is sent in one, whatever size was expected
                first.append(part)
                if size > SENT_AT_ONCE:
                    break
            about, whole = max(size, about if size > SENT_AT_ONCE else 0), chain(first, rest)
            self._watched(lambda: self._objects.send(key, about, whole), stop)
            stat = self._watched(lambda: self._objects.head(key), stop)
        except BaseException:
            if stop.is_set():
                raise CanceledError(key) from None
            raise
        if stat is None or stat.size != size:
            kept = "no object" if stat is None else plural(stat.size, "byte")
            raise WriteError(f"{key!r}: {plural(size, 'byte', 'were')} sent and the store has {kept}; try again")
        return stat

    def _watched(self, call: Callable[[], R], stop: threading.Event) -> R:
        """Make a call, and leave it behind if it does not end by itself once ``stop`` is set."""
        made = alone(call)
        while not stop.is_set() and not wait([made], POLL).done:
            pass
        try:
            return made.wanted(GRACE if stop.is_set() else None)
        except UnansweredError:
            self.behind.append(made)
            raise

    def copy(self, pairs: Sequence[tuple[str, str, FileStat]]) -> None:
        """Copy objects inside the store, several at a time: ``(key, new key, identity)``."""
        self._asked(lambda: together(lambda one: self._objects.copy(*one), pairs), sends=True)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove those of the objects that exist."""
        if keys:
            self._asked(lambda: self._objects.remove(list(keys)))

    def place_of(self, held: Mapping[str, tuple[FileStat, str, bool]], file: str | None) -> Bucket:
        """Return the files of the target as a reader will find them, regardless of where they are until then.

        Args:
            held: by name, the identity of a file, its key in the bucket or else its path on disk, and which of these.
            file: the name of a target that is one object.
        """
        connection = self._connection.again(cached=False)  # the sent objects are to be read back
        at = self._at if file is None else self._at.above()
        prefix = f"{at.key}/" if at.key else ""
        connection.objects = _Scattered(self._objects, {prefix + name: one for name, one in held.items()})
        made = Bucket.__new__(Bucket)
        made._become(connection, at, Tree(listed=False) if file is None else Tree({file: held[file][0]}), file)
        return made

    def _asked(self, call: Callable[[], R], *, sends: bool = False) -> R:
        self._connection.traffic.count(requests=1)
        try:
            try:
                asked = alone(call)
            except RuntimeError:  # the interpreter is shutting down and starts no threads
                return call()
            try:
                return asked.wanted(self.within)
            finally:
                if sends and not asked.done():
                    self.behind.append(asked)
        except WriteError:
            raise
        except NotACheckpointError as error:  # as a reader sees a missing bucket
            raise WriteError(str(error)) from None
        except OpenError as error:
            raise WriteError(f"{self.shown!r} cannot be written: {error}") from None


class _Scattered:
    """Objects under the keys that they will have; some are under other keys, some still on disk."""

    pin = ""

    def __init__(self, objects: Any, held: Mapping[str, tuple[FileStat, str, bool]]) -> None:
        self._objects, self._held = objects, held

    def head(self, key: str) -> FileStat | None:
        return self._held[key][0] if key in self._held else None

    def look(self, key: str, nbytes: int) -> None:
        return None

    def get(self, key: str, name: str, start: int, stop: int, stat: FileStat, into: Array | None = None) -> memoryview:
        _, where, remote = self._held[key]
        if remote:
            found: memoryview = self._objects.get(where, name, start, stop, stat, into)
            return found
        with open(where, "rb") as handle:
            handle.seek(start)
            return complete((handle.read(stop - start),), start, stop, name, into)

    def walk(self, folder: str) -> Iterator[tuple[str, FileStat | None]]:
        yield from ((key, one[0]) for key, one in self._held.items() if key.startswith(f"{folder}/"))

    def listing(self, folder: str) -> tuple[dict[str, FileStat | None], list[str]]:
        return listing_of(self.walk(folder), folder)


def put_whole(data: bytes, url: str, what: str) -> None:
    """Write one object, which replaces another of its name when it is complete.

    Raises:
        UsageError: the scheme cannot be written to.
        WriteError: the store refuses.
    """
    to = Destination(url, None, what)
    to.whole(data)
