"""Atomic targets: made beside their place under another name, synced, then renamed in one step.

::

    /ckpts ┌ .out.tmp-HOST.BOOT.PID.START.RANDOM    being written; locked (flock) by who writes it
           │          │ rename, only if nothing has the name; to overwrite: the two names are exchanged
           └ out ◄────┘ visible only when it is complete and on the disk

Whatever happens at whichever point, the name shows the old state or the new one (but see the last paragraph). An
exception or a signal removes the temp; after a kill -9 or a power cut it stays, and the next run into the same target
removes it, once nobody holds its lock and the process that its name records is gone (processes on machines it cannot
see: once nothing in it changed for a day).

Where a file system cannot exchange names (NFS, some FUSE), a folder is overwritten by two renames: the old one to
``.out.old-…``, the new one in. A death between the two leaves the old state under that name, and the next run puts it
back.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from workbench.errors import WriteError
from workbench.reshard import owners
from workbench.reshard.signals import Signals
from workbench.reshard.syscalls import rename_exchange, rename_noreplace
from workbench.reshard.writing import sync_folder, writing

__all__ = ["Staging", "check_room", "clean", "staging"]

SPARE = 16 << 20  #: bytes that are left free: names, journals


@dataclass
class Staging:
    """A target under way.

    Attributes:
        target: its real path.
        path: the temp folder, or the temp file, to be filled and synced.
    """

    target: str
    path: str
    folder: bool
    overwrite: bool

    def commit(self) -> None:
        """Make it visible; everything in it is on the disk."""
        parent, name = os.path.split(self.target)
        with writing(name):
            if self.folder:
                sync_folder(self.path)
            if self.overwrite and os.path.lexists(self.target):
                self._swap()
            else:
                self._move()
            sync_folder(parent)

    def _move(self) -> None:
        try:
            if self.folder and os.path.isdir(self.target):
                os.rename(self.path, self.target)  # over an empty folder, or it fails
            elif not rename_noreplace(self.path, self.target):
                self._move_without_help()
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise _exists(self.target) from None
            raise

    def _move_without_help(self) -> None:
        if self.folder:
            if os.path.lexists(self.target):
                raise _exists(self.target)
            os.rename(self.path, self.target)
            return
        os.link(self.path, self.target)
        os.unlink(self.path)

    def _swap(self) -> None:
        if not self.folder:
            os.replace(self.path, self.target)
        elif not rename_exchange(self.path, self.target):  # else the temp's name has the old state now
            aside = self.path.replace(".tmp-", ".old-")
            os.rename(self.target, aside)
            try:
                os.rename(self.path, self.target)
            except BaseException:
                os.rename(aside, self.target)
                raise
            try:
                sync_folder(os.path.dirname(self.target))  # the new name is on the disk before the old state goes
            finally:
                _remove(aside)


@contextmanager
def staging(target: str | os.PathLike[str], *, folder: bool, nbytes: int, overwrite: bool = False) -> Iterator[Staging]:
    """A temp beside the target for the block to fill, made visible when the block ends, removed when it raises.

    Left-over temps of dead processes are removed first. SIGINT, SIGTERM and SIGHUP, unless somebody handles them,
    raise inside the block; during the last step they wait until it is done.

    Args:
        target: a path whose parent exists. An empty folder may lie there.
        folder: make a folder, or a file.
        nbytes: what will be written.
        overwrite: replace what has the name, in one step.

    Raises:
        WriteError: the target exists, the parent does not, there is no room, or the system refuses.
    """
    real = os.path.realpath(os.path.expanduser(os.fspath(target)))
    parent, name = os.path.split(real)
    if not os.path.isdir(parent):
        raise WriteError(f"folder {parent!r} does not exist; make it with: mkdir -p")
    clean(real)
    check_free(real, folder=folder, overwrite=overwrite)
    check_room(parent, nbytes)
    with Signals() as signals:
        token = owners.token()
        path = os.path.join(parent, f".{owners.short(name)}.tmp-{token}")
        lock = -1
        owners.ACTIVE.add(token)
        try:
            with writing(name):
                if folder:
                    os.mkdir(path)
                else:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                lock = os.open(path, os.O_RDONLY)
                owners.lock(lock)
            made = Staging(real, path, folder, overwrite)
            yield made
            with signals.deferred():
                made.commit()
        finally:
            with signals.deferred():
                _remove(path)
                if lock >= 0:
                    os.close(lock)
                owners.ACTIVE.discard(token)


def check_free(target: str, *, folder: bool, overwrite: bool) -> None:
    """Raise :class:`WriteError` when something has the name already that may not be replaced."""
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise WriteError(f"{target!r} cannot be looked at: {error.strerror}") from None
    if stat.S_ISDIR(mode) != folder or not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        kind = "folder" if folder else "file"
        raise WriteError(f"{target!r} exists and is no {kind}; choose another name, or remove it yourself")
    if not overwrite and not (folder and not os.listdir(target)):
        raise _exists(target)


def check_room(folder: str, nbytes: int) -> None:
    """Raise :class:`WriteError` unless a folder's file system has so many bytes free."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise WriteError(f"the free space in {folder!r} cannot be asked for: {error.strerror}") from None
    free = found.f_bavail * found.f_frsize
    if free < nbytes + SPARE:
        raise WriteError(
            f"no room in {folder!r}: {nbytes + SPARE:,} bytes are needed and {free:,} are free, "
            f"{nbytes + SPARE - free:,} too few; free some space, or choose another disk"
        )


def clean(target: str) -> list[str]:
    """Remove what dead runs into the same target left behind, and put back what they had moved aside.

    Returns:
        the names that are gone.
    """
    parent, name = os.path.split(target)
    gone = []
    short = owners.short(name)
    try:
        names = sorted(os.listdir(parent))
    except OSError:  # what lies there cannot be known, so nothing is removed
        return []
    for entry in names:
        for kind in (".old-", ".tmp-"):
            if entry.startswith(f".{short}{kind}"):
                path = os.path.join(parent, entry)
                if owners.is_dead(path, entry[len(short) + 1 + len(kind) :]):
                    if kind == ".old-" and not os.path.lexists(target):
                        with writing(entry):
                            os.rename(path, target)
                    else:
                        _remove(path)
                    gone.append(entry)
    return gone


def _exists(target: str) -> WriteError:
    return WriteError(f"{target!r} exists; nothing was changed. Choose another name, or overwrite (overwrite=True)")


def _remove(path: str) -> None:
    """Whatever has the name; what cannot be removed now is removed by the next run."""
    with suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
