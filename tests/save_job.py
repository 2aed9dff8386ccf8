"""Saves that die at a system call: ``python -m tests.save_job FOLDER STEP [PEER]`` tries each STEP-th one, in forks.

A save of *b* over *a*, or into nothing, dies before its n-th call that changes the file system, in one of these ways.
Then torch alone loads what is visible, and ``wb.verify`` checks it: *a* or *b*, to the bit, with the manifest of that
one. At last the same save is run to its end.

    kill      SIGKILL
    term      SIGTERM
    torn      SIGKILL, with half of the bytes of this write
    unsynced  as after a power cut: what was not synced is lost, files and names; renames are not lost
    ENOSPC, EIO, EROFS, EDQUOT   the call fails

Peers: ``torch`` is torch's own writer, ``hf`` its ``HuggingFaceStorageWriter``, and ``torch_checkpointing`` a library
that must be installed, and refuses to save over a checkpoint. Their own readers load, and what is visible and wrong is
counted.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import workbench as wb
from tests.save_loader import raw
from workbench.dcp import datafile
from workbench.export.atomic import transaction

CALLS = ("open", "pwritev", "ftruncate", "fdatasync", "fsync", "replace", "rename", "unlink", "mkdir")
CODES = ("ENOSPC", "EIO", "EROFS", "EDQUOT")
HOWS = ("kill", "term", "torn", "unsynced", *CODES)
PEERS = ("torch", "hf", "torch_checkpointing")
DIED = 77


def state(letter: str) -> dict[str, Any]:
    made = torch.Generator().manual_seed(ord(letter))
    tensors = {f"{n}.weight": torch.randn(100, 50 + n, generator=made) for n in range(16)}
    return {"model": tensors, "step": ord(letter)}


def save(folder: Path, letter: str, commit: str) -> None:
    if commit == "torch":
        dcp.save(state(letter), checkpoint_id=folder)
    elif commit == "hf":
        dcp.save(tensors(letter), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    elif commit == "torch_checkpointing":
        manager().save(str(folder), {"model": tensors(letter)})
    else:
        dcp.save(state(letter), storage_writer=wb.dcp.Writer(folder, commit=commit), planner=wb.dcp.Planner())


def tensors(letter: str) -> dict[str, torch.Tensor]:
    """A state for those who save tensors only."""
    made = state(letter)
    return made["model"] | {"step": torch.tensor(made["step"])}


def manager() -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # which fails on some file systems
    return CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()


class Injector:
    """Counts the calls of this process that change files, and ends it at one of them."""

    def __init__(self, which: int, how: str) -> None:
        self.count, self._which, self._how = 0, which, how
        self._dirty: dict[int, str] = {}  # inodes with bytes that were not synced, and the files' folders
        self._fresh: dict[int, str] = {}  # … with names that were not synced
        self._real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._wrapped(name, self._real[name]))
        for name in ("rename_noreplace", "rename_exchange"):
            setattr(transaction, name, self._wrapped(name, getattr(transaction, name)))
        self._open = io.open
        io.open = builtins.open = self._opened  # what pathlib calls, and torch by it

    def _opened(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode or isinstance(path, int):
            return self._open(path, mode, *args, **kwargs)
        injector = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                injector._dirty[os.fstat(self.fileno()).st_ino] = os.path.dirname(path)
                injector._event("pwritev", (self.fileno(), [data], self.tell()))
                return super().write(data)

        self._event("open", (path, os.O_WRONLY))
        raw = File(path, "w")
        self._fresh[os.fstat(raw.fileno()).st_ino] = os.path.dirname(path)
        return io.BufferedWriter(raw)

    def _event(self, name: str, args: Any) -> None:
        self.count += 1
        if self.count == self._which:
            self._end(name, args)

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            flags = args[1] if name == "open" and len(args) > 1 else 0
            changes = name != "open" or flags & (os.O_WRONLY | os.O_RDWR)
            if changes:
                self._event(name, args)
            result = real(*args, **kwargs)
            if name == "open" and changes:
                inode, folder = os.fstat(result).st_ino, os.path.dirname(args[0])
                self._dirty[inode] = folder
                if flags & os.O_CREAT:
                    self._fresh[inode] = folder
            if name in ("fsync", "fdatasync"):
                self._synced(args[0])
            if name in ("replace", "rename"):
                self._fresh.pop(os.stat(args[1]).st_ino, None)
            return result

        return call

    def _synced(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self._dirty.pop(os.fstat(fd).st_ino, None)
        self._fresh = {inode: folder for inode, folder in self._fresh.items() if folder != path}

    def _end(self, name: str, args: Any) -> None:
        if self._how in CODES:
            number = getattr(errno, self._how)
            raise OSError(number, os.strerror(number))
        if self._how == "torn" and name == "pwritev":
            fd, parts, at = args
            whole = b"".join(parts)
            self._real["pwritev"](fd, [whole[: len(whole) // 2]], at)
        if self._how == "unsynced":
            self._lose()
        os.kill(os.getpid(), signal.SIGTERM if self._how == "term" else signal.SIGKILL)

    def _lose(self) -> None:
        for folder in {*self._dirty.values(), *self._fresh.values()}:
            for entry in list(os.scandir(folder)) if os.path.isdir(folder) else []:
                if entry.inode() in self._fresh and entry.name not in (".metadata", ".workbench-manifest.json"):
                    self._real["unlink"](entry.path)
                elif entry.inode() in self._dirty:
                    os.truncate(entry.path, 0)


def attempt(folder: Path, commit: str, which: int, how: str) -> int:
    """Run the save in a fork; the number of its calls if it ends well, else 0."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            injector = Injector(which, how)
            try:
                save(folder, "b", commit)
            except BaseException as error:
                if how not in CODES or (commit not in PEERS and not isinstance(error, dcp.api.CheckpointException)):
                    traceback.print_exc()
                    os._exit(1)
                os._exit(DIED)
            os.write(writing, str(injector.count).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, DIED, -signal.SIGKILL, -signal.SIGTERM), (how, which, code)
    return int(told) if code == 0 else 0


def visible(folder: Path) -> str:
    """Which state torch loads: ``a``, ``b``, or nothing; anything else is an error."""
    if not (folder / ".metadata").exists():
        return ""
    found = state("a") | {"step": 0}
    for one in found["model"].values():
        one.zero_()
    dcp.load(found, checkpoint_id=folder)
    letter = chr(found["step"])
    wrong = [key for key, one in state(letter)["model"].items() if raw(one) != raw(found["model"][key])]
    assert letter in "ab" and not wrong, (letter, wrong)
    report = wb.verify(folder, deep=True)
    assert report.count("error") == 0, [str(one.message) for one in report]
    assert "manifest" in report.checked or not list(folder.glob("*.????????.distcp")), report.checked
    return letter


def visible_to_peer(folder: Path, commit: str) -> str:
    """Which state the reader of a peer loads; an exception if it fails, or if what it loads is neither."""
    there = folder.exists() if commit == "torch_checkpointing" else bool(list(folder.glob("*.safetensors")))
    if not there:
        return ""
    found = {key: torch.zeros_like(one) for key, one in tensors("a").items()}
    if commit == "hf":
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    else:
        found = dict(manager().load(str(folder), into={"model": found})["model"])
    letter = chr(int(found["step"]))
    assert letter in "ab" and all(raw(one) == raw(found[key]) for key, one in tensors(letter).items())
    return letter


def prepared(target: Path, old: Path | None) -> Path:
    """The folder of a run, with a step in it or none."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    if old is not None:
        shutil.copytree(old, target)
    return target


def outcome(folder: Path, before: str, commit: str) -> str:
    """What is visible; an error if it is neither the old state nor the new one, unless a peer's are counted."""
    try:
        found = visible(folder) if commit not in PEERS[1:] else visible_to_peer(folder, commit)
        assert found in {before, "b"}, found
    except (Exception, dcp.api.CheckpointException):
        if commit not in PEERS:
            raise
        return "wrong"
    return found


def main(folder: Path, step: int, *commits: str) -> None:
    datafile.WRITE, datafile.COPIED = 6_000, 4_096  # several writes to a small file
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    told: dict[str, int] = {"deaths": 0, "old": 0, "new": 0, "wrong": 0}
    number = 0
    for commit in commits or ("metadata", "rename"):
        old = folder / f"old-{commit}"
        save(old, "a", commit)
        assert outcome(old, "a", commit) == "a"
        for before in ("a", "") if commit != "torch_checkpointing" else ("",):
            target = folder / "run" / "step-1"
            calls = attempt(prepared(target, old if before else None), commit, 0, "kill")
            for how in HOWS:
                for which in range(1, calls + 1):
                    number += 1
                    if number % step:
                        continue
                    done = attempt(prepared(target, old if before else None), commit, which, how)
                    found = outcome(target, before, commit)
                    assert found == "b" or not done
                    if not done:
                        told["deaths"] += 1
                        told[{"b": "new", before: "old"}.get(found, "wrong")] += 1
                    if commit not in PEERS:
                        save(target, "b", commit)
                        assert outcome(target, before, commit) == "b"
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
