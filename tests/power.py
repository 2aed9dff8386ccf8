"""Power cuts: what may be on a disk afterwards, from a record of the calls that changed it.

A call is certain once what it changed was synced: a file's bytes and size by a sync of the file, a name by a sync of
the folder that has it. Of all others any may have reached the disk, in any order, and bytes also in part; a rename
takes what it moves along. This is what POSIX leaves open; file systems with a journal lose less.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.export.atomic import syscalls, transaction
from workbench.export.moving import engine

Tree = dict[str, Any]  #: name → bytes of a file, or the tree of a folder
NAMED = ("create", "mkdir", "remove", "rename")  #: changes of names; the others change a file


@dataclass
class Call:
    kind: str
    inode: int
    folder: int = -1  #: whose sync makes it certain
    name: str = ""
    at: int = 0
    data: bytes = b""
    source: tuple[int, str] = (-1, "")  #: of a rename
    other: int | None = None  #: what an exchange puts there


@dataclass
class Record:
    """Calls below a folder, in their order, and what was there before."""

    root: Path
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._ids: dict[int, int] = {}  # a number of the file system may be used again
        self._last = 0
        self.before: dict[int, dict[str, int] | bytes] = {}
        self.top = self._take(self.root)

    def _take(self, path: Path) -> int:
        inode = self._new(path)
        if path.is_dir():
            self.before[inode] = {one.name: self._take(one) for one in path.iterdir()}
        else:
            self.before[inode] = path.read_bytes()
        return inode

    def _new(self, path: Any) -> int:
        self._last += 1
        self._ids[os.lstat(path).st_ino] = self._last
        return self._last

    def _id(self, path: Any, dir_fd: int | None = None) -> int:
        info = os.fstat(path) if isinstance(path, int) else os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        return self._ids.get(info.st_ino, -1)

    def _where(self, path: Any, dir_fd: int | None = None) -> tuple[int, str]:
        above, name = os.path.split(os.fspath(path))
        return (self._id(dir_fd) if dir_fd is not None else self._id(above)), name

    def install(self, patch: Any) -> None:
        """Record from now on; ``patch`` is pytest's monkeypatch."""
        for name in ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "link", "unlink", "rmdir"):
            patch.setattr(os, name, self._recorded(getattr(self, f"_{name}"), getattr(os, name)))
        exchange, noreplace = syscalls.rename_exchange, syscalls.rename_noreplace
        patch.setattr(transaction, "rename_exchange", self._recorded(self._exchange, exchange))
        patch.setattr(transaction, "rename_noreplace", self._recorded(self._rename, noreplace))
        patch.setattr(engine, "allocate", self._recorded(self._allocate, engine.allocate))

    def _recorded(self, note: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self._lock:
                return note(real, *args, **named)

        return call

    def _open(self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder, name = self._where(path, dir_fd) if flags & os.O_CREAT else (-1, "")
        new = folder >= 0 and not os.path.lexists(path)
        fd = int(real(path, flags, mode, dir_fd=dir_fd))
        if new:
            self.calls.append(Call("create", self._new(path), folder, name))
        elif folder >= 0 and flags & os.O_TRUNC:
            self.calls.append(Call("size", self._id(fd)))
        return fd

    def _pwrite(self, real: Any, fd: int, data: Any, at: int) -> int:
        count = int(real(fd, data, at))
        self.calls.append(Call("write", self._id(fd), at=at, data=bytes(data[:count])))
        return count

    def _allocate(self, real: Any, fd: int, size: int) -> None:
        real(fd, size)
        self.calls.append(Call("size", self._id(fd), at=size))

    def _fsync(self, real: Any, fd: int) -> None:
        real(fd)
        self.calls.append(Call("sync", self._id(fd)))

    def _mkdir(self, real: Any, path: Any, mode: int = 0o777) -> None:
        real(path, mode)
        folder, name = self._where(path)
        self.calls.append(Call("mkdir", self._new(path), folder, name))

    def _unlink(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        inode, (folder, name) = self._id(path, dir_fd), self._where(path, dir_fd)
        real(path, dir_fd=dir_fd)
        self.calls.append(Call("remove", inode, folder, name))

    _rmdir = _unlink

    def _rename(self, real: Any, a: Any, b: Any) -> Any:
        inode, source = self._id(a), self._where(a)
        done = real(a, b)
        if done is not False:
            folder, name = self._where(b)
            self.calls.append(Call("rename", inode, folder, name, source=source))
        return done

    _replace = _rename

    def _exchange(self, real: Any, a: Any, b: Any) -> Any:
        inode, other, source = self._id(a), self._id(b), self._where(a)
        done = real(a, b)
        if done:
            folder, name = self._where(b)
            self.calls.append(Call("rename", inode, folder, name, source=source, other=other))
        return done

    def _link(self, real: Any, a: Any, b: Any) -> None:
        real(a, b)
        folder, name = self._where(b)
        self.calls.append(Call("create", self._id(a), folder, name))

    def after(self, count: int, chance: random.Random) -> Tree:
        """What may be there when the power goes after so many calls."""
        synced: dict[int, int] = {}
        for at, call in enumerate(self.calls[:count]):
            if call.kind == "sync":
                synced[call.inode] = at
        likely = chance.choice([0.0, 0.3, 0.7, 1.0])
        inodes = {inode: dict(one) if isinstance(one, dict) else bytearray(one) for inode, one in self.before.items()}
        for at, call in enumerate(self.calls[:count]):
            by = call.folder if call.kind in NAMED else call.inode
            certain = synced.get(by, -1) > at
            if certain or chance.random() < likely:
                _apply(inodes, call, 1.0 if certain or chance.random() < likely else chance.random())
        return _tree(inodes, self.top)


def _apply(inodes: dict[int, Any], call: Call, part: float) -> None:
    if call.kind in ("create", "mkdir"):
        inodes.setdefault(call.inode, {} if call.kind == "mkdir" else bytearray())
    elif call.kind in ("write", "size"):
        held = inodes.setdefault(call.inode, bytearray())
        data = call.data[: int(len(call.data) * part)]
        size = max(len(held), call.at + len(data)) if call.kind == "write" else call.at
        held.extend(bytes(max(size - len(held), 0)))
        del held[size:]
        held[call.at : call.at + len(data)] = data
    folder = inodes.setdefault(call.folder, {}) if call.kind in NAMED else {}
    if call.kind in ("create", "mkdir", "rename"):
        folder[call.name] = call.inode
    elif call.kind == "remove" and folder.get(call.name) == call.inode:
        del folder[call.name]
    if call.kind == "rename":
        above, name = call.source
        held = inodes.setdefault(above, {})
        if call.other is not None:
            held[name] = call.other
        elif held.get(name) == call.inode and (above, name) != (call.folder, call.name):
            del held[name]


def _tree(inodes: dict[int, Any], inode: int) -> Any:
    held = inodes.get(inode, b"")
    return {name: _tree(inodes, one) for name, one in held.items()} if isinstance(held, dict) else bytes(held)


def tree_of(path: Path) -> Any:
    """What is on the disk now."""
    return {one.name: tree_of(one) for one in path.iterdir()} if path.is_dir() else path.read_bytes()


def put(tree: Any, path: Path) -> None:
    """Make it so."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, one in tree.items():
        put(one, path / name)
