"""What a worker does besides computing, seen by an audit hook: files, imports, code, processes, sockets.

The hook stays for the life of the process and looks only while a case is under way. What starts a process or opens a
connection is stopped; the rest is noted, and fails the case.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults import SAMPLES_ROOT

#: Nothing of these belongs into reading a checkpoint.
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.kill",
    "os.killpg",
    "subprocess.Popen",
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "socket.send",
    "socket.getaddrinfo",
    "socket.gethostby",
    "socket.__new__",
    "urllib.Request",
    "webbrowser.open",
    "ftplib.",
    "smtplib.",
    "http.client.",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "code.__new__",
    "pickle.find_class",
    "builtins.input",
    "syslog.",
)
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.setxattr",
    "shutil.rmtree",
    "shutil.move",
    "shutil.copyfile",
    "tempfile.mkstemp",
    "tempfile.mkdtemp",
)
LOOKS = ("os.listdir", "os.scandir", "os.walk", "glob.glob")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SYSTEM = (
    f"/proc/{os.getpid()}/",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/",
    "/proc/sys/kernel/random/boot_id",
    "/dev/null",
    "/dev/urandom",
)
MOST = 20  #: notes of a case


class Forbidden(BaseException):
    """Raised inside of what must not go on; no ``except Exception`` of a reader hides it."""


class Watch:
    """The hook.

    Args:
        read: folders that may be read: of the mutated checkpoint, and of the healthy ones.
        out: folders that may be written to, and read.
    """

    def __init__(self, read: list[Path], out: list[Path]) -> None:
        self._read = tuple(os.path.realpath(folder) + os.sep for folder in read)
        self._out = tuple(os.path.realpath(folder) + os.sep for folder in out)
        roots = {
            sys.prefix,
            sys.base_prefix,
            *(os.fspath(SAMPLES_ROOT.parent / name) for name in ("workbench", "tests", "sample_ckpts")),
        }
        roots |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
        self._code = tuple(os.path.realpath(root) + os.sep for root in roots)
        self._known = frozenset(name.partition(".")[0] for name in sys.modules) | sys.stdlib_module_names
        self._armed = False
        self._inside = threading.local()
        self.noted: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while a case is under way; what was seen is in ``noted``."""
        self.noted.clear()
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed or getattr(self._inside, "hook", False):
            return
        self._inside.hook = True
        try:
            said = self._judge(event, arguments)
        finally:
            self._inside.hook = False
        if said is not None:
            if len(self.noted) < MOST:
                self.noted.append(said)
            if event.startswith(FORBIDDEN):
                raise Forbidden(said)

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int):
                return None
            allowed = self._out if flags & WRITING else (*self._read, *self._out, *self._code, *SYSTEM)
            return None if self._within(path, allowed) else f"{'writes to' if flags & WRITING else 'reads'} {path!r}"
        if event in LOOKS:
            path = arguments[0] if arguments[0] is not None else "."
            if isinstance(path, int) or self._within(path, (*self._read, *self._out, *self._code)):
                return None
            return f"{event} {path!r}"
        if event.startswith(CHANGES):
            paths = [path for path in arguments[:2] if isinstance(path, (str, bytes, os.PathLike))]
            return None if all(self._within(path, self._out) for path in paths) else f"{event} {paths!r}"
        if event == "import":
            name = arguments[0].partition(".")[0]
            return None if name in self._known else f"imports {arguments[0]!r}"
        if event == "exec":
            file = getattr(arguments[0], "co_filename", "?")
            known = file.startswith("<frozen") or self._within(file, self._code)
            return None if known else f"executes code of {file!r}"
        if event == "compile":
            file = arguments[1] if isinstance(arguments[1], (str, bytes)) else "?"
            return None if self._within(file, self._code) else f"compiles {str(arguments[0])[:80]!r}"
        return f"{event} {str(arguments)[:100]}" if event.startswith(FORBIDDEN) else None

    def _within(self, path: Any, folders: tuple[str, ...]) -> bool:
        """Whether a path, its links followed, lies in one of some folders, or is one."""
        real = os.path.realpath(os.fsdecode(path)) + os.sep
        return real.startswith(folders)
