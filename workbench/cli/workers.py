"""Where the passes of a command run: in this process, in a pool, on a Dask cluster, or in parts of a job array."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from workbench.analysis.folder import files_of
from workbench.checkpoint import Checkpoint
from workbench.cli.common import PLACES, note, print_json, say
from workbench.core.executors import using
from workbench.core.parts import PartialRun, part_name, write_part
from workbench.core.place import stat_or_absent
from workbench.core.remote.url import shown
from workbench.errors import ChangedError, MissingExtraError, UsageError, WorkerError, WriteError
from workbench.views.names import safe

CONNECT = 10.0  #: seconds to wait for a scheduler
#: Options that determine where and how a command runs, not its result. Those of the storage may also be secret.
_HOW = {"run", "workers", "dask", "part", "part_file", "threads", "json", "merged"}
_HOW |= {"no_cache", "cache_dir", "storage_option"}


@contextmanager
def workers(options: argparse.Namespace) -> Iterator[Executor | None]:
    """Return the executor that the options name, to be used while the block runs; ``None`` for this process.

    Raises:
        UsageError: both ``--workers`` and ``--dask``.
        MissingExtraError: ``--dask`` without the extra.
        WorkerError: there is no scheduler at the address.
    """
    if getattr(options, "merged", None) is not None:
        yield options.merged
    elif options.workers is not None and options.dask is not None:
        raise UsageError("give either --workers or --dask")
    elif options.workers is not None:
        with _pool(options.workers) as pool:
            yield pool
    elif options.dask is not None:
        with _cluster(options.dask) as executor:
            yield executor
    else:
        yield None


@contextmanager
def _pool(count: int) -> Iterator[Executor]:
    # spawn: a forked process cannot use a store, and inherits locks that threads hold
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=signal.signal, initargs=_IGNORE_INTERRUPTS)
    try:
        yield pool
    except BaseException:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()  # do not wait for running tasks
        raise
    finally:
        pool.shutdown(cancel_futures=True)


#: Ctrl-C reaches every process of the terminal; the command ends its workers itself.
_IGNORE_INTERRUPTS = (signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("--dask needs the package distributed: pip install 'ckpt-workbench[dask]'") from None
    try:
        _in_a_thread(lambda: asyncio.run(_scheduler_answers(Client, address)))
    except Exception as error:  # what an address may lead to is anything: garbage ends in a MemoryError
        raise WorkerError(
            f"no Dask scheduler answers at {address!r}: {_reason(error)}; give the address that the scheduler prints "
            "when it starts"
        ) from None
    with Client(address, timeout=CONNECT, set_as_default=False) as client:
        note(f"Dask dashboard: {client.dashboard_link}")
        yield client.get_executor()


def _in_a_thread(call: Callable[[], None]) -> None:
    """Make a call in a thread of its own: in this one an event loop may run, as in a notebook."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="workbench-dask", daemon=True)
    thread.start()
    thread.join()  # an interrupt ends the wait, not the thread
    done.result()


async def _scheduler_answers(client_class: Any, address: str) -> None:
    """Connect once and disconnect: unlike a client that has threads of its own, this one can be stopped in time."""
    client = client_class(address, asynchronous=True, timeout=0.9 * CONNECT, set_as_default=False)
    try:
        await asyncio.wait_for(client, CONNECT)
    finally:
        await client.close()


def _reason(error: BaseException) -> str:
    """Return why there is no connection, if possible in the operating system's words."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    words = getattr(first, "strerror", None) or " ".join(str(error).split())
    if not words or not isinstance(error, (OSError, ValueError, TypeError)):
        return "what listens there does not answer as a scheduler does"
    return str(words)


def _identity(ckpt: Checkpoint) -> str:
    """Return a digest of a checkpoint's catalog and of the identity of all its files."""
    place = ckpt.place.again()
    stats = [(name, stat_or_absent(place, name)) for name in files_of(ckpt)[0]]
    return hashlib.blake2b(
        f"{ckpt.catalog.digest()} {stats}".encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()


def check_pins(options: argparse.Namespace, ckpt: Checkpoint) -> None:
    """Check that a checkpoint is the one whose parts are merged; without a merge, do nothing.

    Raises:
        ChangedError: it was replaced after its parts were computed.
    """
    if getattr(options, "merged", None) is not None and _identity(ckpt) != options.pins:
        raise ChangedError(f"{ckpt.path!r} changed after its parts were computed; run all parts again")


def run_part(options: argparse.Namespace, ckpt: Checkpoint, call: Callable[[], object]) -> int:
    """Run one part of a command, write its states to a file, and print the file's name.

    The file names URLs without their secrets: others may read it, and the merge has credentials of its own.

    Raises:
        UsageError: the file would be in the checkpoint's folder, or an executor is named too.
        WriteError: the file cannot be written.
    """
    if options.workers is not None or options.dask is not None:
        raise UsageError("--part runs in this process: leave out --workers and --dask")
    number, count = options.part
    command = options.run[1]
    name = ckpt.place.file or os.path.basename(ckpt.place.root.rstrip("/"))
    path = options.part_file or part_name(name, command, number, count)
    inside = os.path.realpath(path)
    if ckpt.place.local and inside.startswith(ckpt.place.root + os.sep) and ckpt.place.file is None:
        raise UsageError(f"{path!r} is inside the checkpoint and would change it; name another file with --part-file")
    if not os.path.isdir(os.path.dirname(inside)):
        raise WriteError(f"the folder of {path!r} does not exist; make it with: mkdir -p")
    what = {name: _public(value) if name in PLACES else value for name, value in vars(options).items()}
    what = {name: value for name, value in what.items() if name not in _HOW}
    header: dict[str, Any] = {"command": command, "options": what, "pins": _identity(ckpt)}
    part = PartialRun(number, count)
    with using(part):
        call()
    write_part(path, part, header)
    if options.json:
        print_json({"part": path, "number": number, "of": count, "tasks": len(part.found)})
    else:
        say(safe(path))
    return 0


def _public(value: Any) -> Any:
    if isinstance(value, list):
        return [_public(one) for one in value]
    return shown(value) if isinstance(value, str) else value
