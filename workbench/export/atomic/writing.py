"""Writes that either complete or name the file that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from workbench.errors import WriteError

_ADVICE = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "the quota is used up; free some space, or choose another disk",
    errno.EIO: "the disk failed; check the kernel log",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "ask the folder's owner for write permission",
}


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Raise errors of the operating system while a file is written as errors that name the file.

    Raises:
        WriteError: instead of any ``OSError``.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        raise WriteError(
            f"{name!r} cannot be written: {error.strerror or error}{f'; {advice}' if advice else ''}"
        ) from error


def write_all(fd: int, data: memoryview, at: int) -> None:
    """Repeat ``pwrite`` until every byte is written."""
    while data:
        count = os.pwrite(fd, data, at)
        at, data = at + count, data[count:]


def sync_folder(path: str) -> None:
    """Sync the names in a folder to disk, on file systems that sync folders."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
