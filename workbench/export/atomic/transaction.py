"""Atomic targets: written beside their place under another name, synced, then renamed in one step.

::

    /ckpts ┌ .out.tmp-HOST.BOOT.PID.START.RANDOM/   locked (flock) by its writer
           │ ├── journal                            only if resumable
           │ └── out                                being written
           │     │ rename, only if the name is free; to overwrite, the two names are exchanged
           └ out ◄┘ visible only when it is complete and on the disk

At any time, the name shows either the old state or the new one (but see the last paragraph). An
exception or a signal removes the temp; after a kill -9 or a power cut it stays, and the next run into the same target
removes it, once nobody holds its lock and the process that its name records is gone (a process on another machine is
gone if it gave no sign of life for a day).

With a plan the temp stays after exceptions and signals, too, and the next run of the same plan takes it over: by
renaming it to its own name. One run wins, and a stalled writer that resumes finds its temp gone.

If a file system cannot exchange names (NFS, some FUSE), a folder is overwritten by two renames: the old one to
``.out.old-…``, then the new one to ``out``. A crash between them leaves the old state under that name, and the next
run restores it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from workbench.core.words import plural
from workbench.errors import WorkbenchError, WriteError
from workbench.export.atomic import leftovers, owners
from workbench.export.atomic.journal import Journal
from workbench.export.atomic.leftovers import clean, remove
from workbench.export.atomic.signals import Signals
from workbench.export.atomic.syscalls import rename_exchange, rename_noreplace
from workbench.export.atomic.writing import sync_folder, writing

SPARE = 16 << 20  #: bytes that are left free: names, journals
#: where a file system has no hard links
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
GO_ON = "; completed files were kept: run the same export with resume to continue from there"


@dataclass
class Staging:
    """A target that is being written.

    Attributes:
        target: its real path.
        work: the temp folder.
        path: the folder inside it to be filled and synced, or the file.
        journal: the journal of an earlier run of the same plan, or a new one; ``None`` without a plan.
        removed: number of unfinished targets of other plans that were removed.
    """

    target: str
    work: str
    folder: bool
    overwrite: bool
    journal: Journal | None = None
    removed: int = 0

    @property
    def path(self) -> str:
        return os.path.join(self.work, os.path.basename(self.target))

    @property
    def notes(self) -> list[str]:
        """Sentences on leftovers of earlier runs, for a report."""
        if self.journal is None:
            return []
        removed = f"removed unfinished exports of other data into this target: {self.removed}"
        return [*([removed] if self.removed else []), *self.journal.notes]

    @property
    def resumable(self) -> bool:
        """Whether a later run can resume from the current state."""
        return self.journal is not None and self.journal.useful and os.path.lexists(self.path)

    def commit(self) -> None:
        """Make the target visible; everything in it is on disk."""
        parent, name = os.path.split(self.target)
        with writing(name):
            for folder, _, _ in os.walk(self.path, topdown=False):  # none for a file
                sync_folder(folder)
            if self.overwrite and os.path.lexists(self.target):
                if self.journal is not None:
                    self.journal.discard()  # the old state takes the place of the new one and must not be resumed
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
                raise exists(self.target) from None
            raise

    def _move_without_help(self) -> None:
        if not self.folder:
            try:
                os.link(self.path, self.target)
                os.unlink(self.path)
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        if os.path.lexists(self.target):
            raise exists(self.target)
        os.rename(self.path, self.target)

    def _swap(self) -> None:
        if not self.folder:
            os.replace(self.path, self.target)
        elif not rename_exchange(self.path, self.target):  # else the temp has the old state now
            token = os.path.basename(self.work).rpartition(leftovers.TEMP)[2]
            aside = leftovers.beside(self.target, leftovers.ASIDE, token)
            os.rename(self.target, aside)
            try:
                os.rename(self.path, self.target)
            except BaseException:
                os.rename(aside, self.target)
                raise
            sync_folder(os.path.dirname(self.target))  # the new name is on disk before the old state is removed
            remove(aside)


@contextmanager
def staging(
    target: str | os.PathLike[str], *, folder: bool, nbytes: int, overwrite: bool = False, plan: str | None = None
) -> Iterator[Staging]:
    """Provide a temp next to the target for the block to fill; it becomes visible when the block ends and is removed if
    it raises.

    Leftover temps of dead processes are removed first. SIGINT, SIGTERM and SIGHUP, unless they are handled,
    raise inside the block; during the last step they wait until it is done.

    Args:
        target: a path whose parent exists. It may be an empty folder.
        folder: whether to create a folder or a file.
        nbytes: bytes that will be written.
        overwrite: replace an existing target in one step.
        plan: the identity of the job, from :meth:`workbench.export.moving.engine.ExportJob.plan`. A dead run's temp of
            this plan is resumed, and this run's data stays if the block raises after something was recorded.

    Raises:
        WriteError: the target exists, the parent does not, there is no room, or the system refuses; with a plan also
            when another process is writing the same target.
    """
    real = os.path.realpath(os.path.expanduser(os.fspath(target)))
    parent, name = os.path.split(real)
    if not os.path.isdir(parent):
        raise WriteError(f"folder {parent!r} does not exist; make it with: mkdir -p")
    with Signals() as signals, ExitStack() as held:
        token = owners.token()
        owners.ACTIVE.add(token)
        made = Staging(real, leftovers.beside(real, leftovers.TEMP, token), folder, overwrite)
        try:
            if plan is not None and leftovers.adopt(real, plan, made.work):
                made.journal = Journal(made.work, plan)
            if plan is not None:
                made.removed = leftovers.others(real, plan)
            clean(real)
            check_free(real, folder=folder, overwrite=overwrite)
            check_room(parent, nbytes - _allocated(made.work))
            with writing(name):
                if made.journal is None:
                    os.mkdir(made.work)
                held.enter_context(owners.locked(made.work))
                held.enter_context(owners.signs_of_life(made.work))
                if not folder:
                    os.close(os.open(made.path, os.O_WRONLY | os.O_CREAT, 0o666))
                elif not os.path.isdir(made.path):
                    os.mkdir(made.path)
            if plan is not None and made.journal is None:
                made.journal = Journal(made.work, plan)
            yield made
            with signals.deferred():
                made.commit()
        except BaseException as error:
            if made.resumable:
                add_note(error, GO_ON)
            raise
        finally:
            with signals.deferred():
                if not made.resumable:
                    remove(made.work)
                if made.journal is not None:
                    made.journal.close()
                held.close()
                owners.ACTIVE.discard(token)


def check_free(target: str, *, folder: bool, overwrite: bool) -> None:
    """Raise :class:`WriteError` if a target exists that must not be replaced."""
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise WriteError(f"{target!r} cannot be accessed: {error.strerror}") from None
    if stat.S_ISDIR(mode) != folder or not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        kind = "folder" if folder else "file"
        raise WriteError(f"{target!r} exists and is not a {kind}; choose another name, or remove it yourself")
    try:
        free = overwrite or (folder and not os.listdir(target))
    except OSError as error:
        raise WriteError(f"{target!r} cannot be accessed: {error.strerror}") from None
    if not free:
        raise exists(target)


def check_room(folder: str, nbytes: int) -> None:
    """Raise :class:`WriteError` unless a folder's file system has that many bytes free."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise WriteError(f"the free space in {folder!r} cannot be determined: {error.strerror}") from None
    free = found.f_bavail * found.f_frsize
    if free < nbytes + SPARE:
        raise WriteError(
            f"not enough space in {folder!r}: {plural(nbytes + SPARE, 'byte', 'are')} needed and {free:,} are free, "
            f"{nbytes + SPARE - free:,} too few; free some space, or choose another disk"
        )


def exists(target: str) -> WriteError:
    """Return the error for a target that may not be replaced."""
    return WriteError(f"{target!r} exists; nothing was changed. Choose another name, or replace it with overwrite=True")


def _allocated(folder: str) -> int:
    """Return the bytes on disk that the files in a folder already occupy."""
    return sum(
        os.lstat(os.path.join(inside, name)).st_blocks * 512 for inside, _, names in os.walk(folder) for name in names
    )


def add_note(error: BaseException, text: str) -> None:
    """Add a sentence to an error's message, or to its notes if it is not a workbench error."""
    if isinstance(error, WorkbenchError):
        error.args = (f"{error}{text}",)
    else:
        error.add_note(text.removeprefix("; "))
