"""Find the owner of a temp, and whether that process is alive, from a lock, the temp's name and its heartbeat.

::

    HOST.BOOT.PID.START.RANDOM     digests of the machine's name and its current boot, then in hexadecimal the
                                   process and its start time; a random part for each temp
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LAST = 0.5  #: seconds to wait for the last sign of life
BEAT = 60  #: seconds between two signs of life
QUIET = 600  #: seconds without one after which an unfinished export of an invisible process may be resumed
DAY = 86_400  #: … after which it may be removed
ACTIVE: set[str] = set()  #: tokens of the active temps of this process
_TOKEN = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9a-f]+)\.([0-9a-f]+)\.[0-9a-f]{12}")


def token() -> str:
    """Return a token of the machine, its boot, the process, and the temp."""
    pid = os.getpid()
    return f"{_digest(socket.gethostname())}.{_boot()}.{pid:x}.{_started(pid) or 0:x}.{secrets.token_hex(6)}"


def is_token(text: str) -> bool:
    """Return whether a name ends like those that :func:`token` makes; other names belong to someone else."""
    return _TOKEN.fullmatch(text) is not None


def short(name: str) -> str:
    """Shorten a name that leaves no room for the token; a digest keeps shortened names distinct."""
    raw = os.fsencode(name)
    return name if len(raw) <= 160 else os.fsdecode(raw[:120]) + "~" + hashlib.sha256(raw).hexdigest()[:16]


def is_dead(path: str, token: str, quiet: float = DAY) -> bool:
    """Return whether the process that made a temp is gone.

    Args:
        quiet: seconds without a sign of life after which a process that cannot be seen (on another machine or in
            another container) counts as gone.
    """
    return is_token(token) and not _is_locked(path) and is_gone(token, lambda: silence(path), quiet)


def is_gone(token: str, silent: Callable[[], float], quiet: float) -> bool:
    """Return whether an owner is gone, like :func:`is_dead`, if it cannot be locked; ``silent`` returns the seconds
    since its last sign of life.
    """
    found = _TOKEN.fullmatch(token)
    if found is None:
        return False
    host, boot, pid, started = found[1], found[2], int(found[3], 16), int(found[4], 16)
    if boot == _boot():
        now = _started(pid)
        if pid == os.getpid() and now == started:
            return token not in ACTIVE
        return now is None or bool(now and started and now != started)
    if host == _digest(socket.gethostname()) and not _in_container():
        return True  # this machine, before it was rebooted
    return silent() > quiet


def describe(token: str, silent: float) -> str:
    """Describe who made a temp, for an error."""
    found = _TOKEN.fullmatch(token)
    if found is not None and found[2] == _boot():
        return f"process {int(found[3], 16)} on this machine"
    return f"a process on another machine or in another container, last active {silent:,.0f} s ago"


def claim(path: str, beside: str) -> bool:
    """Take over a dead process's temp by renaming it; ``False`` if another process was faster.

    A stalled writer that resumes no longer finds the old name.
    """
    try:
        os.rename(path, beside)
    except OSError:
        return False
    return True


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold a folder's lock, if its file system supports locks (NFS and others do not: only the process is checked)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX)  # waits only for processes that check whether it is free
        yield
    finally:
        os.close(fd)


@contextmanager
def signs_of_life(folder: str) -> Iterator[None]:
    """Touch a folder every minute, even while nothing is written, for machines that cannot see this process."""

    def touch() -> None:
        with suppress(OSError):
            os.utime(folder)

    with every_minute(touch):
        yield


@contextmanager
def every_minute(call: Callable[[], None]) -> Iterator[None]:
    """Give a sign of life every minute, in another thread."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT):
            call()

    thread = threading.Thread(target=beat, name="workbench-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LAST)  # a store may not answer


def silence(path: str) -> float:
    """Return the seconds since the last sign of life."""
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _boot() -> str:
    """Identify this boot of this machine and its process namespace."""
    parts = [str(os.stat("/proc/self/ns/pid").st_ino)] if os.path.exists("/proc/self/ns/pid") else []
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as handle:
        parts.append(handle.read())
    return _digest("".join(parts) or socket.gethostname())


def _in_container() -> bool:
    """Return whether other processes here may be hidden: this is not the first namespace (linux/proc_ns.h)."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC
    return True


def _started(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks; ``None`` if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    except OSError:
        return 0
    try:  # no /proc: only whether it is alive can be known
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return 0
    return 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _is_locked(path: str) -> bool:
    try:
        import fcntl

        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two processes that check do not block each other
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
