"""The pass into a store: files are written on disk as usual, a few at a time, sent, and removed.

::

    write   group 1 │ group 2      │ group 3          about 1 GiB of files each, or one larger file
    send            │ group 1      │ group 2          two files at a time, each in parts
    disk    1       │ 1, 2         │ 2, 3             two groups, whatever the size of the export
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from workbench.core.place import Place
from workbench.core.remote.objects import PARTS_AT_ONCE, SENT_AT_ONCE
from workbench.core.scan import Progress
from workbench.core.source import FileStat
from workbench.core.words import plural
from workbench.export.atomic import leftovers, owners
from workbench.export.atomic.journal import Written
from workbench.export.atomic.store import StoreStaging
from workbench.export.atomic.transaction import check_room
from workbench.export.atomic.writing import writing
from workbench.export.filemap import FileMap
from workbench.export.moving.engine import ExportJob, prepare

GROUP = 1 << 30  #: bytes of files that are written before they are sent
FILES = 2  #: files that are sent at the same time
SENDING = FILES * (PARTS_AT_ONCE + 1) * SENT_AT_ONCE  #: bytes of memory that sending takes
SPOOL = "workbench-export"  #: name in the folder for temporary files; leftovers of dead runs under it are removed


def spool_folder() -> str:
    """Return the folder for temporary files, ``TMPDIR``."""
    return tempfile.gettempdir()


@contextmanager
def spool() -> Iterator[str]:
    """Provide a folder for the files of a store until they are sent."""
    base = os.path.join(spool_folder(), SPOOL)
    leftovers.clean(base)
    token = owners.token()
    made = leftovers.beside(base, leftovers.TEMP, token)
    owners.ACTIVE.add(token)
    try:
        with writing(made):
            os.mkdir(made, 0o700)
        with owners.locked(made), owners.signs_of_life(made):
            yield made
    finally:
        leftovers.remove(made)
        owners.ACTIVE.discard(token)


def room_for(maps: Sequence[FileMap]) -> None:
    """Raise :class:`~workbench.errors.WriteError` unless the folder for temporary files has room for two groups."""
    sizes = [sum(maps[at].size for at in group) for group in _groups(maps, range(len(maps)))]
    check_room(spool_folder(), max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0))


class Sender:
    """Writes and sends files of a job.

    Attributes:
        written: by file of the job, the result of each of its pieces, once it is written.
    """

    def __init__(
        self, made: StoreStaging, job: ExportJob, folder: str, threads: int | None, progress: Progress | None
    ) -> None:
        """Create a sender; ``folder`` contains the files until they are sent."""
        self._made, self._job, self._folder = made, job, folder
        self._threads, self._progress = threads, progress
        self.written: dict[int, list[Written]] = {}
        self._held: dict[str, tuple[FileStat, str, bool]] = {}  # as `Destination.place_of` takes it
        self._sent: dict[Future[FileStat], tuple[str, str, Sequence[Written]]] = {}
        self._pool = ThreadPoolExecutor(FILES, thread_name_prefix="workbench-send")
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._total = 2 * max(job.nbytes, 1)  # the files that are written, and then sent
        self._done = 0
        for file, one in enumerate(job.maps):
            stat, found = made.kept.get(one.name, (None, []))
            if stat is not None and stat.size == one.size and len(found) == len(one.pieces):
                self.written[file] = found
                self._held[one.name] = stat, made.key(one.name), True
                self._done += 2 * one.size
        if self.written:
            files, nbytes = len(self.written), sum(job.maps[file].size for file in self.written)
            made.notes.append(
                f"resumed an unfinished export: {files:,} of {len(job.maps):,} files, {plural(nbytes, 'byte')}, were "
                "in the store already, as they were recorded, and kept"
            )

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # transfers in progress are abandoned
        self._pool.shutdown(wait=True, cancel_futures=True)

    def write(self, files: Sequence[int]) -> None:
        """Write some of the files; they stay on disk."""
        for group in self._groups(files):
            self._write(group)

    def write_and_send(self, files: Sequence[int]) -> None:
        """Write some of the files, and send each group while the next one is written."""
        last: list[Future[FileStat]] = []
        for group in self._groups(files):
            self._write(group)
            self._finish(last)
            last = [self._begin(file) for file in group]
        self._finish(last)

    def send(self, files: Sequence[int]) -> None:
        """Send those of the files that are still on disk, one after the other."""
        for file in files:
            if not self._held[self._job.maps[file].name][2]:
                self._finish([self._begin(file)])

    def add(self, name: str) -> None:
        """Send a file that the caller wrote into the folder."""
        path = os.path.join(self._folder, name)
        self._total += os.path.getsize(path)
        self._finish([self._submit(name, path, [])])

    def place(self) -> Place:
        """Return the written files as a reader will find them: in the store, or still on disk."""
        file = None if self._made.folder else self._made.destination.name
        return Place.of(self._made.destination.place_of(self._held, file))

    # ---- one group ----

    def _groups(self, files: Sequence[int]) -> list[list[int]]:
        return _groups(self._job.maps, [file for file in files if file not in self.written])

    def _write(self, group: Sequence[int]) -> None:
        job = prepare(self._job.payloads, [self._job.maps[file] for file in group])
        paths = [os.path.join(self._folder, one.name) for one in job.maps]
        for path in sorted({os.path.dirname(path) for path in paths}):
            with writing(os.path.relpath(path, self._folder)):
                os.makedirs(path, exist_ok=True)
        nbytes = job.nbytes

        def progress(share: float) -> None:
            self._report_progress(int(share * nbytes))

        found = job.run(paths, threads=self._threads, progress=progress if self._progress is not None else None)
        with self._lock:
            self._done += nbytes
        for file, path, results in zip(group, paths, found, strict=True):
            self.written[file] = results
            info = os.stat(path)
            self._held[self._job.maps[file].name] = FileStat(info.st_size, info.st_mtime_ns), path, False

    def _begin(self, file: int) -> Future[FileStat]:
        name = self._job.maps[file].name
        return self._submit(name, self._held[name][1], self.written[file])

    def _submit(self, name: str, path: str, results: Sequence[Written]) -> Future[FileStat]:
        key = self._made.key(name)
        future = self._pool.submit(self._made.destination.send, key, path, self._stop, self._count)
        self._sent[future] = name, path, results
        return future

    def _finish(self, futures: Sequence[Future[FileStat]]) -> None:
        """Wait until files are in the store; record them, and remove them from the disk."""
        left = set(futures)
        while left:
            ready, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in ready:
                name, path, results = self._sent.pop(future)
                stat = future.result()
                self._held[name] = stat, self._made.key(name), True
                self._made.record(name, stat, results)
                leftovers.remove(path)
            self._report_progress(0)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    def _report_progress(self, more: int) -> None:
        if self._progress is not None:
            self._progress(min((self._done + more) / self._total, 1.0))


def _groups(maps: Sequence[FileMap], files: Sequence[int]) -> list[list[int]]:
    """Group files in order, about :data:`GROUP` bytes at a time."""
    found: list[list[int]] = []
    nbytes = GROUP
    for file in files:
        if nbytes + maps[file].size > GROUP:
            found.append([])
            nbytes = 0
        found[-1].append(file)
        nbytes += maps[file].size
    return found
