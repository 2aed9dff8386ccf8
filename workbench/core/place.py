"""A folder (or one file) that confines a checkpoint: on disk, or in a store.

Every path that a checkpoint names (an index, a ``.metadata``, a tracker) goes through a place: absolute paths, ``..``,
NUL bytes and symbolic links out of the folder are refused, and only regular files are opened so that a FIFO or a device
planted under a shard's name cannot block the reader or feed it data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

from workbench.core import jsonsafe
from workbench.core.disk import Disk
from workbench.core.remote.url import is_url, on_disk
from workbench.core.source import FileStat, LazyBytes, Source, compared
from workbench.core.words import plural
from workbench.errors import MissingFileError, OpenError, TruncatedError, UnsafeError, UsageError

UNFINISHED = ".workbench-unfinished"  #: in a folder of a store while an export into it is not complete
METADATA_LIMIT = 4 << 30  #: bytes of the largest metadata file that is read whole
JSON_LIMIT = 512 << 20  #: bytes of the largest JSON file (an index of 1M tensors has ~100 MB)


class Files(Protocol):
    """Where a place's files are: :class:`~workbench.core.disk.Disk`, or a store.

    Paths are relative to the folder; one that leaves it raises UnsafeError, an absent file MissingFileError.
    """

    shown: str  #: the folder's or file's path or URL, for messages
    root: str  #: the real path, or the URL, of the folder
    file: str | None  #: the file's name if the path is that of a file
    at_once: int  #: reads that are worth running at the same time, whatever the number of cores

    @property
    def name(self) -> str:
        """Last component of the path."""

    def listing(self) -> tuple[dict[str, FileStat], list[str]]:
        """Return the regular files directly in the folder by name, and the names of its subfolders."""

    def sub(self, relative: str) -> Files:
        """Return a folder or file inside."""

    def exists(self, relative: str) -> bool:
        """Return whether a path inside exists."""

    def is_link(self, relative: str) -> bool:
        """Return whether a path inside is a symbolic link."""

    def stat(self, relative: str) -> FileStat:
        """Return a file's identity."""

    def now(self, relative: str) -> FileStat:
        """Return the identity of a file that was there before, quickly; stores compare it with each read instead."""

    def source(self, relative: str) -> Source:
        """Open a file."""

    @property
    def traffic(self) -> dict[str, int] | None:
        """Requests and bytes so far, of a store."""

    def ahead(self) -> None:
        """Announce that a reader is about to look at the files."""

    def uncached(self) -> AbstractContextManager[None]:
        """Read the files themselves meanwhile, not what a cache on disk holds of them."""

    def again(self) -> Files:
        """Return the same files with fresh identities."""

    def above(self) -> Files | None:
        """Return the folder that holds this one, or ``None`` at the top."""


class Place:
    """A checkpoint's folder, or the folder of a single-file checkpoint together with that file's name.

    Attributes:
        path: the path as given by the user (for messages).
        root: its real path; for a single file, the real path of its folder.
        file: the file's name if the checkpoint is a single file, otherwise ``None``.
        at_once: reads that are worth running at the same time, whatever the number of cores.
    """

    def __init__(self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        """Look at a path or URL; ``storage_options`` are passed to the library that reads the URL."""
        text = on_disk(os.fsdecode(path))
        if not text:  # of a shell's unset variable, for instance; the current directory is "."
            raise UsageError("the path is empty: name a checkpoint, a folder or a URL")
        if not is_url(text):
            if storage_options:
                raise UsageError(f"storage_options are for URLs, and {text!r} is a path")
            self._at(Disk(text))
        else:
            from workbench.core.remote.bucket import Bucket

            self._at(Bucket(text, storage_options))

    def _at(self, files: Files) -> None:
        self._files = files
        self.at_once = files.at_once
        self._first: dict[str, FileStat] = {}  # of each file, when first examined
        self.path, self.root, self.file = files.shown, files.root, files.file

    @classmethod
    def of(cls, files: Files) -> Place:
        """Return the place of files that are not found by a path."""
        made = cls.__new__(cls)
        made._at(files)
        return made

    @property
    def name(self) -> str:
        """Last component of the path as given: ``step-48000``."""
        return self._files.name

    @cached_property
    def _listing(self) -> tuple[dict[str, FileStat], list[str]]:
        files, folders = self._files.listing()
        return dict(sorted(files.items())), sorted(folders)

    @property
    def files(self) -> Mapping[str, FileStat]:
        """Regular files directly in the folder, by name (links are followed; reading one still checks it)."""
        if self.file is not None:
            return {self.file: self.stat(self.file)}
        return self._listing[0]

    @property
    def folders(self) -> list[str]:
        """Names of the folders directly in the folder."""
        return [] if self.file is not None else self._listing[1]

    def sub(self, relative: str) -> Place:
        """Return the place of a folder or file inside this one, confined in the same way."""
        return Place.of(self._files.sub(relative))

    def uncached(self) -> AbstractContextManager[None]:
        """Read the files themselves meanwhile, not what a cache on disk holds of them."""
        return self._files.uncached()

    def again(self) -> Place:
        """Return the same place with fresh identities; in a store, with the same connection."""
        return Place.of(self._files.again())

    def pinned(self, known: Mapping[str, FileStat]) -> Place:
        """Return the same place for another process, which requires the files to be the ones known here."""
        fresh = Place.__new__(Place)
        fresh._at(self._files)
        fresh._first = {**known, **{name: stat for name, stat in self._first.items() if name in known}}
        return fresh

    @property
    def traffic(self) -> dict[str, int] | None:
        """Requests to the store since it was opened, and bytes received, needed and cached; ``None`` on disk."""
        return self._files.traffic

    @property
    def above(self) -> Place | None:
        """The folder that holds this one, or ``None`` at the top."""
        files = self._files.above()
        return None if files is None else Place.of(files)

    @property
    def local(self) -> bool:
        """Whether the files are on disk, where they have permissions, blocks and links."""
        return isinstance(self._files, Disk)

    def exists(self, relative: str) -> bool:
        """Return whether a path inside exists; a path that leaves the place counts as absent."""
        return self._files.exists(relative)

    def is_link(self, relative: str) -> bool:
        """Return whether a path inside is a symbolic link."""
        return self._files.is_link(relative)

    def resolve(self, relative: str) -> str:
        """Return the absolute path of a regular file inside; a place in a store has none.

        Raises:
            UnsafeError: the path, or a link on it, leaves the folder.
            MissingFileError: it is absent or not a regular file.
            UsageError: the place is in a store.
        """
        if not isinstance(self._files, Disk):
            raise UsageError(f"{relative!r} of {self.path!r} is not a local file")
        return self._files.resolve(relative)

    def stat(self, relative: str) -> FileStat:
        """Return the identity of a file inside.

        Raises:
            UnsafeError: the path, or a link on it, leaves the folder.
            MissingFileError: it is absent or not a regular file.
        """
        found = self._files.stat(relative)
        self._first.setdefault(relative, found)
        return found

    def ahead(self) -> None:
        """Announce that a reader is about to examine the files: a store sends what it needs in one round."""
        self._files.ahead()

    def now(self, relative: str) -> FileStat:
        """Return the present identity of a file that was there before."""
        return self._files.now(relative)

    def source(self, relative: str) -> Source:
        """Open a file inside; raises as :meth:`stat`, and ChangedError if it is not the file of the first look."""
        source = self._files.source(relative)
        compared(relative, self._first.setdefault(relative, source.stat), source.stat)
        return source

    def read(self, relative: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Read a (metadata) file inside, whole or a range; raises if the file is shorter than requested."""
        source = self.source(relative)
        want = source.size - start if length is None else length
        if want > METADATA_LIMIT:
            raise UnsafeError(
                f"file {relative!r} has {plural(want, 'byte')} of metadata, over the limit of {METADATA_LIMIT:,}"
            )
        data = source.read_bytes(start, start + want)
        if len(data) < want:
            raise TruncatedError(
                f"file {relative!r} ends at byte {start + len(data):,}, {plural(want - len(data), 'byte')} too early"
            )
        return data

    def head(self, relative: str, length: int) -> bytes:
        """Return the first bytes of a file inside, fewer if it is shorter; none if it cannot be read.

        For the recognition of formats: what is wrong with the file is reported when it is read.
        """
        try:
            return self.source(relative).read_bytes(0, length)
        except OpenError:
            return b""

    def window(self, relative: str) -> LazyBytes:
        """Return the bytes of a file inside; a byte is read when it is first accessed. Raises as :meth:`source`."""
        source = self.source(relative)
        return LazyBytes(source, 0, source.size)

    def read_json(self, relative: str) -> Any:
        """Read a JSON file inside, decoded strictly (UTF-8, no duplicate keys, bounded size and depth)."""
        size = self.stat(relative).size
        if size > JSON_LIMIT:
            raise UnsafeError(f"file {relative!r} has {plural(size, 'byte')} of JSON, over the limit of {JSON_LIMIT:,}")
        return jsonsafe.loads(self.read(relative), what=repr(relative))

    def check(self) -> None:
        """Raise ChangedError if a file has changed since it was examined."""
        for name, known in self._first.items():
            compared(name, known, stat_or_absent(self, name, fresh=True))


def lacking(lost: int, count: int, what: str) -> str:
    """Format ``1 of 2 files 'model' is missing``."""
    return f"{lost:,} of {count:,} {what} {'is' if lost == 1 else 'are'} missing"


def stat_or_absent(place: Place, relative: str, *, fresh: bool = False) -> FileStat:
    """Return the identity of a file when the place first looked at it, which describes all that was read since then;
    with ``fresh``, its current identity. A size of -1 means that the file does not exist (its tensors cannot be read).

    Raises:
        UnsafeError: the path leaves the place; that is refused, not noted.
    """
    try:
        return (not fresh and place._first.get(relative)) or place.stat(relative)
    except MissingFileError:
        return FileStat(-1, 0)
