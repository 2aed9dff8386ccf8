"""The command that ckpt-chaos kills and starts again: two exports into one target, one after the other.

    python -m tests.chaos_job sources FOLDER            makes the two checkpoints
    python -m tests.chaos_job run FOLDER OUT FORMAT     exports one, then the other over it, from wherever it was left
    python -m tests.chaos_job digest OUT FORMAT         what a reader of that format finds there

FORMAT is ``safetensors``, ``torch``, or ``careless``: one file written in place and never synced, which has to fail.

ckpt-chaos 0.1.8 sees what goes through ``open()``, ``torch.save`` and safetensors' ``save_file``. We write through
descriptors and rename through the C library: :func:`seen` tells it of these, so that they are torn and lost as well.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def tensors(letter: str) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(ord(letter))
    return {f"{n}.weight": chance.standard_normal((100, 50 + n), np.float32) for n in range(5)}


def digest_of(found: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(key.encode() + found[key].tobytes() for key in sorted(found))).hexdigest()


def digest(target: Path, format: str) -> str:
    if not target.exists():
        return "absent"
    if format == "torch":
        return digest_of(saved_by_torch(target))
    found: dict[str, np.ndarray] = {}
    for path in target.glob("*.safetensors"):
        found |= load_file(path)
    return digest_of(found)


def saved_by_torch(path: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a ``torch.save``, read without torch: it takes longer to import than all else here."""
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None

        class Reader(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return {"_rebuild_tensor_v2": tensor, "OrderedDict": dict}.get(name, name)

            def persistent_load(self, stored: Any) -> np.ndarray:
                assert stored[:2] == ("storage", "FloatStorage"), stored
                return np.frombuffer(file.read(f"{top}/data/{stored[2]}"), np.float32)

        def tensor(storage: np.ndarray, offset: int, size: tuple[int, ...], *rest: Any) -> np.ndarray:
            return storage[offset:][: math.prod(size)].reshape(size)

        top = file.namelist()[0].partition("/")[0]
        with file.open(f"{top}/data.pkl") as pickled:
            found: dict[str, np.ndarray] = Reader(pickled).load()
    return found


def target_in(out: Path, format: str) -> Path:
    return out / ("ckpt.pt" if format == "torch" else "ckpt")


def run(folder: Path, out: Path, format: str) -> None:
    import workbench as wb
    from workbench.core.transfer import streams
    from workbench.export.export import export
    from workbench.export.moving import check, engine, kept

    seen()
    for module in (engine, check, kept):  # in one order: a crash point is the n-th event of a run like the first one
        module.ThreadPoolExecutor = InTurn
    streams.TASK, engine.RECORD = 20_000, 20_000
    out.mkdir(exist_ok=True)
    target = target_in(out, format)
    states = {digest_of(tensors(letter)): letter for letter in "ab"} | {"absent": ""}
    done = states[digest(target, format)]  # an error ends the job: what is visible is neither
    print("found", done or "nothing")
    for letter in {"": "ab", "a": "b", "b": ""}[done]:
        if format == "careless":
            write_in_place(target, folder / letter / "model.safetensors")
            continue
        ckpt = wb.open(folder / letter, cache=False)
        size = 50_000 if format == "safetensors" else None
        report = export(
            ckpt, target, format, overwrite=True, resume=True, threads=1, max_shard_size=size, manifest=False
        )
        print(*report.notes)


class InTurn(ThreadPoolExecutor):
    """A pool that does what it is given at once, in the thread that gives it."""

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


def write_in_place(target: Path, source: Path) -> None:
    target.mkdir(exist_ok=True)
    fd = os.open(str(target / source.name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.pwrite(fd, source.read_bytes(), 0)
    os.close(fd)
    os.close(os.open(str(target / "done"), os.O_WRONLY | os.O_CREAT))


def seen() -> None:
    """Tell the injector, if there is one, of descriptors opened for writing, and of renames by the C library."""
    if "CKPT_CHAOS_WATCH" not in os.environ or "CKPT_CHAOS_LOG" not in os.environ:
        return
    from ckpt_chaos import inject

    from workbench.export.atomic import transaction

    state, lock = inject._state, threading.Lock()
    torn: dict[int, str] = {}
    real_open, real_close = os.open, os.close

    def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR) or dir_fd is not None or not inject._under(path):
            return real_open(path, flags, mode, dir_fd=dir_fd)
        with lock:
            tear = inject._event("os.open", path, tornable=True)
            if state["unsynced"]:
                inject._note_open_for_write(inject._norm(path))
            with inject._quietly():
                fd = real_open(path, flags, mode)
            state["fd_path"][fd] = inject._norm(path)
            if tear:
                torn[fd] = path
        return fd

    def close(fd: int) -> None:
        state["fd_path"].pop(fd, None)
        real_close(fd)
        if fd in torn:
            inject._tear(torn[fd])
            os._exit(137)

    def told(real: Callable[[str, str], bool], exchange: bool) -> Callable[[str, str], bool]:
        def rename(a: str, b: str) -> bool:
            inject._event("rename", a, tornable=False)
            done = real(a, b)
            if done:
                follow(inject._norm(a), inject._norm(b), exchange)
            return done

        return rename

    def follow(a: str, b: str, exchange: bool) -> None:
        """What was not synced under the old name is lost under the new one."""

        def moved(path: str) -> str:
            for old, new in ((a, b), (b, a))[: 2 if exchange else 1]:
                if path == old or path.startswith(old + os.sep):
                    return new + path[len(old) :]
            return path

        state["durable"] = {moved(path): data for path, data in state["durable"].items()}
        for name in ("dirty", "zero"):
            state[name] = {moved(path) for path in state[name]}

    os.open, os.close = open_, close
    transaction.rename_noreplace = told(transaction.rename_noreplace, False)
    transaction.rename_exchange = told(transaction.rename_exchange, True)


if __name__ == "__main__":
    what, *args = sys.argv[1:]
    if what == "sources":
        for one in "ab":
            (Path(args[0]) / one).mkdir(parents=True)
            save_file(tensors(one), Path(args[0]) / one / "model.safetensors")
    elif what == "run":
        run(Path(args[0]), Path(args[1]), args[2])
    else:
        print(digest(target_in(Path(args[0]), args[1]), args[1]))
