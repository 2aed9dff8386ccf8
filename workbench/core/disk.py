"""The files of one folder on disk, none of them reached by a path or a link that leads out of it.

The one link that may leave is the Hugging Face hub's cache, whose snapshots are links into their own repository::

    models--org--name/snapshots/<revision>/model.safetensors → ../../blobs/<sha256>     (huggingface_hub 0.8+)
"""

from __future__ import annotations

import os
import stat as stat_module
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import BinaryIO

from workbench.core.source import FileStat, PreadSource, Source, cannot_open
from workbench.core.words import plural
from workbench.errors import MissingFileError, NotACheckpointError, UnsafeError


class Disk:
    """A folder, or the folder of a single file together with that file's name.

    Attributes:
        shown: the path as given by the user (for messages).
        root: its real path; for a single file, the real path of its folder.
        file: the file's name if the path is that of a file, otherwise ``None``.
    """

    at_once = 1  #: files that are worth reading at the same time, whatever the number of cores

    def __init__(self, path: str) -> None:
        self.shown = path
        self._paths: dict[str, str] = {}  # of files that were found inside
        if "\0" in path:
            raise NotACheckpointError("the path contains a NUL byte")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise NotACheckpointError(f"{path!r} contains a lone surrogate, invalid in a file name") from None
        real = os.path.realpath(os.path.expanduser(path))
        try:
            mode = os.stat(real).st_mode
        except FileNotFoundError:
            raise NotACheckpointError(f"{path!r} does not exist") from None
        except OSError as error:
            raise NotACheckpointError(f"{path!r} cannot be accessed: {error.strerror}") from None
        self.file: str | None = None
        if stat_module.S_ISDIR(mode):
            self.root = real
        elif stat_module.S_ISREG(mode):
            self.root, self.file = os.path.split(real)
        else:
            raise NotACheckpointError(f"{path!r} is neither a folder nor a regular file")

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(os.path.expanduser(self.shown)))

    def listing(self) -> tuple[dict[str, FileStat], list[str]]:
        """Return the regular files directly in the folder by name, and the names of its folders; links are followed."""
        files: dict[str, FileStat] = {}
        folders: list[str] = []
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    try:
                        info = entry.stat()
                    except OSError:  # a dangling link: listed nowhere so that it is "absent" and named so
                        continue
                    if stat_module.S_ISDIR(info.st_mode):
                        folders.append(entry.name)
                    elif stat_module.S_ISREG(info.st_mode):
                        files[entry.name] = FileStat(info.st_size, info.st_mtime_ns)
        except OSError as error:
            raise cannot_open(f"folder {self.shown!r}", error, "listed") from None
        return files, folders

    def sub(self, relative: str) -> Disk:
        inner = Disk(self._jailed(relative))
        inner.shown = os.path.join(self.shown, relative)
        return inner

    def exists(self, relative: str) -> bool:
        try:
            return os.path.exists(self._jailed(relative))
        except UnsafeError:
            return False

    def is_link(self, relative: str) -> bool:
        return os.path.islink(os.path.join(self.root, relative))

    def resolve(self, relative: str) -> str:
        """Return the absolute path of a regular file inside."""
        real = self._jailed(relative)
        try:
            mode = os.stat(real).st_mode
        except OSError as error:
            raise MissingFileError(
                f"file {relative!r} of {self.shown!r} is missing ({error.strerror}); restore it or save again"
            ) from None
        if not stat_module.S_ISREG(mode):
            raise MissingFileError(f"{relative!r} in {self.shown!r} is not a regular file")
        return real

    def stat(self, relative: str) -> FileStat:
        info = os.stat(self.resolve(relative))
        return FileStat(info.st_size, info.st_mtime_ns)

    def now(self, relative: str) -> FileStat:
        """Return the current size and time of a file that existed before.

        Whether its path stays inside was checked when it was first used; afterwards, one call to the file system is
        enough.
        """
        try:
            info = os.stat(self._path(relative))
        except OSError as error:
            raise MissingFileError(f"file {relative!r} is gone ({error.strerror}); open the checkpoint again") from None
        return FileStat(info.st_size, info.st_mtime_ns)

    def source(self, relative: str) -> Source:
        return PreadSource(self._path(relative), relative)

    traffic = None

    def ahead(self) -> None:
        """Do nothing: a disk is near."""

    def uncached(self) -> AbstractContextManager[None]:
        return nullcontext()

    def again(self) -> Disk:
        return Disk(self.shown)

    def above(self) -> Disk | None:
        parent = self.root if self.file is not None else os.path.dirname(self.root)
        return None if self.file is None and parent == self.root else Disk(parent)

    def _path(self, relative: str) -> str:
        path = self._paths.get(relative)
        if path is None:
            path = self._paths[relative] = self.resolve(relative)
        return path

    def _jailed(self, relative: str) -> str:
        parts = relative.replace("\\", "/").split("/") if os.sep == "\\" else relative.split("/")
        if os.path.isabs(relative) or "\0" in relative or ".." in parts or relative == "":
            raise UnsafeError(f"path {relative!r} leaves the checkpoint {self.shown!r}; refused")
        try:
            os.fsencode(relative)
        except UnicodeEncodeError:
            raise UnsafeError(f"path {relative!r} contains a lone surrogate, invalid in a file name; refused") from None
        real = os.path.realpath(os.path.join(self.root, relative))
        if not any(_inside(real, jail) for jail in self._jails):
            raise UnsafeError(f"{relative!r} is a symlink out of the checkpoint {self.shown!r}; refused")
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


def keep(path: str, write: Callable[[BinaryIO], object]) -> bool:
    """Write a file of a cache, which appears whole or not at all; return whether it did. A failure is not an error."""
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as out:
                write(out)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return True
    return False


def read_limited(path: str, *, what: str, limit: int) -> bytes:
    """Read all of a manifest or an echo.

    Raises:
        MissingFileError: it cannot be read.
        UnsafeError: it has more than ``limit`` bytes.
    """
    try:
        with open(path, "rb") as handle:
            check_size(os.fstat(handle.fileno()).st_size, what=what, limit=limit)
            return handle.read(limit + 1)
    except OSError as error:
        raise cannot_open(what, error, "read") from None


def check_size(size: int, *, what: str, limit: int) -> None:
    """Raise UnsafeError if a file has more than ``limit`` bytes."""
    if size > limit:
        raise UnsafeError(
            f"{what} has {plural(size, 'byte')}, over the limit of {limit:,}; it was not read, write it again"
        )
