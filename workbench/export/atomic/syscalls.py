"""Three Linux calls that Python does not offer; each reports failure, and the caller does without.

``fallocate``      reserve space now, so a full disk shows before hours of writing; it also makes writing
                   into a file in any order cheap. ``os.posix_fallocate`` would, on file systems without it (NFS 3,
                   some FUSE), write one byte into each block instead.
``sync_file_range``  start writing back dirty pages, so a later ``fdatasync`` has less to wait for.
``renameat2``      ``RENAME_EXCHANGE`` swaps two names in one step, ``RENAME_NOREPLACE`` never overwrites.

Source: man-pages 6.9, fallocate(2), sync_file_range(2), renameat2(2); linux/fs.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
_SYNC_WRITE = 2  #: SYNC_FILE_RANGE_WRITE
#: errors that mean "not here" rather than "failed"
_NOT_HERE = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}


def allocate(fd: int, size: int) -> None:
    """Give a file its size, with space for all of it if the file system can guarantee that.

    Raises:
        OSError: no room, or the disk failed.
    """
    call = _libc("fallocate")
    if size and call is not None:
        if not call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            return
        number = ctypes.get_errno()
        if number not in _NOT_HERE:
            raise OSError(number, os.strerror(number))
    os.ftruncate(fd, size)


def start_writeback(fd: int, start: int, size: int) -> None:
    """Begin to write a range of a file to the disk, without waiting for it; does nothing if that is not supported."""
    call = _libc("sync_file_range")
    if call is not None:
        call(fd, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_WRITE))


def rename_exchange(a: str, b: str) -> bool:
    """Swap two names atomically; ``False`` if the file system cannot."""
    return _renameat2(a, b, _EXCHANGE)


def rename_noreplace(old: str, new: str) -> bool:
    """Rename unless the new name is taken (then ``FileExistsError``); ``False`` if the file system cannot."""
    return _renameat2(old, new, _NOREPLACE)


def _renameat2(a: str, b: str, flag: int) -> bool:
    call = _libc("renameat2")
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(flag)):
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), a, None, b)


@cache
def _libc(name: str) -> Any:
    if ctypes.sizeof(ctypes.c_void_p) != 8:  # offsets would have another width
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)
