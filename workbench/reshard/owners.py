"""Whose temp it is, and whether that process still lives: told by a lock, and by the temp's own name.

::

    HOST.BOOT.PID.START.RANDOM     digests of the machine's name and of this start of it, then in hexadecimal the
                                   process and when it was started; what tells its temps apart
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from contextlib import suppress

__all__ = ["ACTIVE", "is_dead", "lock", "short", "token"]

DAY = 86_400  #: seconds after which a temp of a process we cannot see counts as left behind
ACTIVE: set[str] = set()  #: tokens of this process's own temps that are under way
_TOKEN = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9a-f]+)\.([0-9a-f]+)\.[0-9a-f]{12}")


def token() -> str:
    """Which machine, which start of it, which process, and which of its temps."""
    pid = os.getpid()
    return f"{_digest(socket.gethostname())}.{_boot()}.{pid:x}.{_started(pid) or 0:x}.{secrets.token_hex(6)}"


def short(name: str) -> str:
    """Names that leave no room for the token are cut; a digest keeps them apart."""
    raw = os.fsencode(name)
    return name if len(raw) <= 160 else os.fsdecode(raw[:120]) + "~" + hashlib.sha256(raw).hexdigest()[:16]


def is_dead(path: str, token: str) -> bool:
    found = _TOKEN.fullmatch(token)
    if found is None or _is_locked(path):
        return False
    host, boot, pid, started = found[1], found[2], int(found[3], 16), int(found[4], 16)
    if boot == _boot():
        now = _started(pid)
        if pid == os.getpid() and now == started:
            return token not in ACTIVE
        return now is None or bool(now and started and now != started)
    if host == _digest(socket.gethostname()) and not _in_container():
        return True  # this machine, before it was started anew
    return _age(path) > DAY


def _age(path: str) -> float:
    """Seconds since anything in a temp changed."""
    newest = 0.0
    with suppress(OSError):
        newest = os.lstat(path).st_mtime
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                newest = max([newest, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    return time.time() - newest


def _boot() -> str:
    """This start of this machine, and who can see whose processes on it."""
    told = [str(os.stat("/proc/self/ns/pid").st_ino)] if os.path.exists("/proc/self/ns/pid") else []
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as handle:
        told.append(handle.read())
    return _digest("".join(told) or socket.gethostname())


def _in_container() -> bool:
    """Whether other processes of this machine may be out of sight: not the first namespace (linux/proc_ns.h)."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC
    return True


def _started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; ``None`` if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
    except OSError:
        return 0
    try:  # no /proc: alive or not is all that can be known
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return 0
    return 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def lock(fd: int) -> None:
    with suppress(ImportError, OSError):  # NFS and others lock no folders: then the process alone tells
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: str) -> bool:
    try:
        import fcntl

        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
