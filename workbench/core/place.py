"""A folder (or one file) that a checkpoint may not leave.

Every path that a checkpoint names (an index, a ``.metadata``, a tracker) goes through :meth:`Place.resolve`: absolute
paths, ``..``, NUL bytes and symbolic links out of the folder are refused, and only regular files are opened, so that
a FIFO or a device planted under a shard's name cannot hang or feed us.

The one link that may leave is the Hugging Face hub's cache, whose snapshots are links into their own repository::

    models--org--name/snapshots/<revision>/model.safetensors → ../../blobs/<sha256>     (huggingface_hub 0.8+)
"""

from __future__ import annotations

import os
import stat as stat_module
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.core import jsonsafe
from workbench.core.source import LazyBytes, PreadSource, cannot_open, changed, rewritten
from workbench.errors import MissingFileError, NotACheckpointError, OpenError, TruncatedError, UnsafeError

__all__ = ["FileStat", "Place", "lacking", "stat_or_absent"]

METADATA_LIMIT = 4 << 30  #: bytes of the largest metadata file we are ready to read whole
JSON_LIMIT = 512 << 20  #: bytes of the largest JSON file (an index of 1M tensors has ~100 MB)


@dataclass(frozen=True, slots=True)
class FileStat:
    """Identity of a file's content as far as the file system tells: bytes and modification time."""

    size: int
    mtime_ns: int


class Place:
    """A checkpoint's folder, or the folder of a single-file checkpoint together with that file's name.

    Attributes:
        path: the path as the user gave it (for messages).
        root: its real path; for a single file, the real path of its folder.
        file: the file's name when the checkpoint is one file, else ``None``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        self._first: dict[str, FileStat] = {}  # of each file, when it was first looked at
        if "\0" in self.path:
            raise NotACheckpointError("the path holds a NUL byte")
        try:
            os.fsencode(self.path)
        except UnicodeEncodeError:
            raise NotACheckpointError(f"{self.path!r} holds a lone surrogate, which no file name can") from None
        real = os.path.realpath(os.path.expanduser(self.path))
        try:
            mode = os.stat(real).st_mode
        except FileNotFoundError:
            raise NotACheckpointError(f"{self.path!r} does not exist") from None
        except OSError as error:
            raise NotACheckpointError(f"{self.path!r} cannot be looked at: {error.strerror}") from None
        if stat_module.S_ISDIR(mode):
            self.root, self.file = real, None
        elif stat_module.S_ISREG(mode):
            self.root, self.file = os.path.split(real)
        else:
            raise NotACheckpointError(f"{self.path!r} is neither a folder nor a regular file")

    @property
    def name(self) -> str:
        """Last component of the path as given: ``step-48000``."""
        return os.path.basename(os.path.abspath(os.path.expanduser(self.path)))

    @cached_property
    def _listing(self) -> tuple[dict[str, FileStat], list[str]]:
        files: dict[str, FileStat] = {}
        folders: list[str] = []
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    try:
                        info = entry.stat()
                    except OSError:  # a dangling link: listed nowhere, so that it is "absent" and named so
                        continue
                    if stat_module.S_ISDIR(info.st_mode):
                        folders.append(entry.name)
                    elif stat_module.S_ISREG(info.st_mode):
                        files[entry.name] = FileStat(info.st_size, info.st_mtime_ns)
        except OSError as error:
            raise cannot_open(f"folder {self.path!r}", error, "listed") from None
        return dict(sorted(files.items())), sorted(folders)

    @property
    def files(self) -> Mapping[str, FileStat]:
        """Regular files directly in the folder, by name (links followed; :meth:`resolve` still judges them)."""
        if self.file is not None:
            return {self.file: self.stat(self.file)}
        return self._listing[0]

    @property
    def folders(self) -> list[str]:
        """Names of the folders directly in the folder."""
        return [] if self.file is not None else self._listing[1]

    def sub(self, relative: str) -> Place:
        """The place of a folder or file inside this one, jailed to it alike."""
        inner = Place(self._jailed(relative))
        inner.path = os.path.join(self.path, relative)
        return inner

    def exists(self, relative: str) -> bool:
        """Whether a path inside exists; a path that leaves the place counts as absent."""
        try:
            return os.path.exists(self._jailed(relative))
        except UnsafeError:
            return False

    def resolve(self, relative: str) -> str:
        """The absolute path of a regular file inside.

        Raises:
            UnsafeError: the path, or a link on it, leaves the folder.
            MissingFileError: it is absent or not a regular file.
        """
        real = self._jailed(relative)
        try:
            mode = os.stat(real).st_mode
        except OSError as error:
            raise MissingFileError(
                f"file {relative!r} of {self.path!r} is missing ({error.strerror}); restore it or save again"
            ) from None
        if not stat_module.S_ISREG(mode):
            raise MissingFileError(f"{relative!r} in {self.path!r} is not a regular file")
        return real

    def stat(self, relative: str) -> FileStat:
        """Size and modification time of a file inside; raises as :meth:`resolve`."""
        found = _stat_of(os.stat(self.resolve(relative)))
        self._first.setdefault(relative, found)
        return found

    def read(self, relative: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a (metadata) file inside, whole or a range; raises when the file is shorter than asked."""
        real = self.resolve(relative)
        try:
            with open(real, "rb") as handle:
                info = _stat_of(os.fstat(handle.fileno()))
                self._same(relative, info)
                want = info.size - start if length is None else length
                if want > METADATA_LIMIT:
                    raise UnsafeError(f"file {relative!r} has {want:,} bytes of metadata, over {METADATA_LIMIT:,}")
                handle.seek(start)
                data = handle.read(want)
        except OSError as error:
            raise self._unreadable(relative, error) from None
        if len(data) < want:
            raise TruncatedError(
                f"file {relative!r} ends at byte {start + len(data):,}, {want - len(data):,} bytes too early"
            )
        return data

    def window(self, relative: str) -> LazyBytes:
        """The bytes of a file inside; a byte is read when it is first accessed. Raises as :meth:`resolve`."""
        source = PreadSource(self.resolve(relative), relative)
        self._same(relative, FileStat(source.size, source.mtime_ns))
        return LazyBytes(source, 0, source.size)

    def read_json(self, relative: str) -> Any:
        """A JSON file inside, decoded strictly (UTF-8, no duplicate keys, bounded size and depth)."""
        size = self.stat(relative).size
        if size > JSON_LIMIT:
            raise UnsafeError(f"file {relative!r} has {size:,} bytes of JSON, over the limit of {JSON_LIMIT:,}")
        return jsonsafe.loads(self.read(relative), what=repr(relative))

    def _same(self, relative: str, now: FileStat) -> None:
        """Raise ChangedError for a file that was another one when it was first looked at through this place."""
        known = self._first.setdefault(relative, now)
        if now.size != known.size:
            raise changed(relative, known.size, now.size)
        if now.mtime_ns != known.mtime_ns:
            raise rewritten(relative)

    def check(self) -> None:
        """Raise ChangedError if a file that was looked at is another one now."""
        for name in self._first:
            self._same(name, stat_or_absent(self, name, fresh=True))

    def _unreadable(self, relative: str, error: OSError) -> OpenError:
        if isinstance(error, PermissionError):
            return MissingFileError(
                f"no permission to read {relative!r} in {self.path!r}; ask its owner for `chmod a+r`"
            )
        return cannot_open(f"file {relative!r}", error, "read")

    def _jailed(self, relative: str) -> str:
        parts = relative.replace("\\", "/").split("/") if os.sep == "\\" else relative.split("/")
        if os.path.isabs(relative) or "\0" in relative or ".." in parts or relative == "":
            raise UnsafeError(f"path {relative!r} leaves the checkpoint {self.path!r}; refused")
        try:
            os.fsencode(relative)
        except UnicodeEncodeError:
            raise UnsafeError(f"path {relative!r} holds a lone surrogate, which no file name can; refused") from None
        real = os.path.realpath(os.path.join(self.root, relative))
        if not any(_inside(real, jail) for jail in self._jails):
            raise UnsafeError(f"{relative!r} is a link out of the checkpoint {self.path!r}; refused")
        return real

    @cached_property
    def _jails(self) -> list[str]:
        jails = [self.root]
        repo, snapshots = os.path.split(os.path.dirname(self.root))
        if snapshots == "snapshots" and os.path.basename(repo).startswith(("models--", "datasets--", "spaces--")):
            jails.append(os.path.join(repo, "blobs"))
        return jails


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _stat_of(info: os.stat_result) -> FileStat:
    return FileStat(info.st_size, info.st_mtime_ns)


def lacking(lost: int, count: int, what: str) -> str:
    """``1 of 2 files 'model' is missing``."""
    return f"{lost:,} of {count:,} {what} {'is' if lost == 1 else 'are'} missing"


def stat_or_absent(place: Place, relative: str, *, fresh: bool = False) -> FileStat:
    """Size and modification time of a file when the place first looked at it: they describe what was read since then.
    With ``fresh``, those of now. A size of -1 for a file that is not there (its tensors cannot be read).

    Raises:
        UnsafeError: the path leaves the place; that is refused, not noted.
    """
    try:
        return (not fresh and place._first.get(relative)) or place.stat(relative)
    except MissingFileError:
        return FileStat(-1, 0)
