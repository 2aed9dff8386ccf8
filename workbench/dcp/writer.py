"""The writer of ``dcp.save`` and ``dcp.async_save``: durable, visible in one step, hashed while writing.

::

    each rank   plan ──► data files: space allocated, items written and hashed, fdatasync, folder synced
                     ──► one packed record to rank 0 (torch's own gather)
    rank 0      records ──► manifest ──► .metadata, replaced in one step ──► files of the replaced save removed

torch calls ``finish`` on rank 0 only if no rank raised, so ``finish`` is the commit, and the broadcast after it informs
the other ranks.

Source: torch 2.13 ``distributed/checkpoint/state_dict_saver.py`` (``_save_state_dict``), ``filesystem.py``.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from workbench.core.fingerprint import BLOCK
from workbench.core.remote.objects import WRITABLE
from workbench.core.remote.url import current_options, is_url, on_disk, parse
from workbench.dcp.balance import spread
from workbench.dcp.commit import METADATA, DiskFolder, SaveFolder, data_file
from workbench.dcp.datafile import TENSOR, DataFile, WrittenItem, archive_of
from workbench.dcp.outputs import Output
from workbench.dcp.planner import Planner
from workbench.dcp.record import Phase, RankRecord, live_of, manifest_of, names_digest, packed, storage_data
from workbench.dcp.staging import Digests, devices_of, digests_of, stage, wait_for
from workbench.dcp.store import StoreFolder
from workbench.errors import UsageError, WriteError
from workbench.export.atomic import leftovers, owners
from workbench.export.atomic.transaction import Staging, exists
from workbench.export.atomic.writing import writing
from workbench.export.writers.dcp_metadata import VERSION
from workbench.names.steps import find_step

THREADS = 2  #: data files that a rank writes at once
FILE = 8 << 20  #: bytes per file that a rank must have before it writes another file


class Writer(FileSystemWriter):
    """Write a checkpoint in torch's distributed format: atomically, durably, with a manifest.

    ::

        dcp.save(state_dict, storage_writer=wb.dcp.Writer("ckpts/step-100"), planner=wb.dcp.Planner())
        dcp.async_save(state_dict, storage_writer=wb.dcp.Writer("ckpts/step-100"), planner=wb.dcp.Planner())

    The checkpoint can be loaded by torch's ``dcp.load`` without this package. A save into a folder that holds a
    checkpoint leaves that checkpoint intact until the new one is complete and on disk, and replaces it in one step;
    then its files are removed. A save that fails or is killed leaves it unchanged.

    Every payload gets its CRC-32, as torch writes it. With ``manifest``, every byte gets an XXH3-128 digest in the
    same pass, and ``.workbench-manifest.json`` in the folder records them, so ``wb.verify`` finds any later change and
    ``wb.diff`` compares without reading. The manifest also records the phases of the save on each rank.

    In ``dcp.async_save`` the writer also copies the state dict to host memory. The memory is reused by later saves,
    including those of other writers. The copy is hashed, and a tensor whose copy changes before it is written is an
    error.

    Args:
        path: the folder, or its URL: ``s3://``, ``gs://`` or ``az://`` (``memory://`` for one process). Objects are
            uploaded while they are produced, in parts that the store verifies.
        thread_count: data files that a rank writes at once, if it has 8 MiB or more for each. By default, 2; and 1 in
            an asynchronous save to a disk, which then uses one thread in all, to leave the processor to the training.
        commit: ``"metadata"`` makes the save visible by replacing ``.metadata``. ``"rename"`` writes into a folder
            beside the path and renames it, so the path itself does not exist before the save is complete; it needs the
            ranks to communicate (``use_collectives``) and a disk.
        manifest: compute digests, and write the manifest.
        echo: hash the trainer's tensors first, and compare the written bytes with these digests. A save that would
            differ fails and names the tensor; the manifest records what was compared, so ``wb.verify`` and
            ``wb.doctor`` can tell a bad save from a bad load. It costs one more pass over the state, and tensors on a
            device are copied twice.
        buffers: copies of the state dict whose memory is kept between asynchronous saves.
        overwrite: replace a checkpoint in the folder; otherwise it is an error.
        sync_files: sync everything to disk before the save becomes visible.
        direct: bypass the page cache (``O_DIRECT``), which leaves it to the training. If the file system does not
            support this, files are written as usual, and the manifest records it.
        storage_options: for URLs: passed to the library that handles the scheme, as in ``wb.open``.
            ``AsyncCheckpointerType.PROCESS`` pickles the writer with these options, but not credentials in the
            environment.
        single_file_per_rank, per_thread_copy_ahead, cache_staged_state_dict: accepted, without effect.
        options: the other arguments of torch's ``FileSystemWriter`` (stream extensions, the serialization format). They
            are refused unless they have their defaults.

    Raises:
        UsageError: a URL that cannot be written to, an unknown ``commit``, or an option that is refused.
        MissingExtraError: the library that knows a URL's scheme is not installed.
        WriteError: in a save (inside torch's ``CheckpointException``, by rank): the system refuses, a tensor changed
            between staging and writing, or the folder holds a checkpoint that may not be overwritten. The message
            names the file and the phase.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        *,
        commit: str = "metadata",
        manifest: bool = True,
        buffers: int = 1,
        echo: bool = False,
        direct: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if commit not in ("metadata", "rename"):
            raise UsageError(f'commit is {commit!r}; use "metadata" or "rename"')
        self._quiet = thread_count is None
        thread_count = THREADS if thread_count is None else thread_count
        if thread_count < 1 or buffers < 0:
            raise UsageError(f"thread_count is {thread_count} and buffers is {buffers}; use 1 or more, and 0 or more")
        if echo and not manifest:
            raise UsageError("echo=True records its result in the manifest; pass manifest=True")
        refused = {name for name, value in options.items() if value not in (None, (), [])}
        if getattr(options.get("serialization_format"), "name", "") == "TORCH_SAVE":  # an enumeration since torch 2.8
            refused.discard("serialization_format")
        if refused:
            names = ", ".join(sorted(refused))
            raise UsageError(f"wb.dcp.Writer does not support {names}; use torch's FileSystemWriter")
        super().__init__("", sync_files=sync_files, thread_count=thread_count, overwrite=overwrite)
        self._commit, self._manifest, self._buffers, self._direct = commit, manifest, buffers, direct
        self._echo = echo
        self._options = dict(current_options() if storage_options is None else storage_options)
        self._to(path)
        self._staged: _StagedDigests | None = None
        self._compared: _StagedDigests | None = None
        self._phases: list[Phase] = []
        self._begun = time.time()
        self._plans: list[Sequence[WriteItem] | None] = []
        self._differences: list[str] = []
        self._step: int | None = None
        self._work: _RenamedFolder | None = None
        self._cleanup: weakref.finalize | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cleanup": None, "_work": None, "_plans": [], "_folder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._to(self._given)

    def _to(self, path: str | os.PathLike[str]) -> None:
        """Save to this path from now on."""
        self._given = on_disk(os.fspath(path))
        if is_url(self._given):
            if self._commit == "rename":
                raise UsageError('nothing can be renamed in a store; use commit="metadata"')
            self._folder: SaveFolder = StoreFolder(self._given, self._options)
            self.path = self._folder.shown
        else:
            self.path = self.fs.init_path(self._given)
            self._folder = DiskFolder(os.fspath(self.path), direct=self._direct)

    # ---- staging ----

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict to host memory, for ``dcp.async_save``.

        Raises:
            UsageError: the save runs in another process, and the planner or this writer cannot be pickled.
            WriteError: with ``echo``, a copy differs from the trainer's tensor.
        """
        _check_pickles(self)
        begin, clock = time.time(), time.perf_counter()
        staged, digests, live = stage(state_dict, buffers=self._buffers, hashed=self._manifest, echo=self._echo)
        self._staged = _StagedDigests(digests, os.getpid(), live)
        nbytes = sum(nbytes for nbytes, *_ in digests.values())
        self._phases = [Phase("stage", begin, time.perf_counter() - clock, nbytes)]
        return staged

    # ---- plan ----

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to another path if one is given."""
        if checkpoint_id:
            self._to(checkpoint_id)
        super().reset()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a save can go to this path or URL."""
        text = on_disk(os.fspath(checkpoint_id))
        if is_url(text):
            return parse(text).scheme in WRITABLE
        return bool(super().validate_checkpoint_id(text))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; leftovers of an earlier, failed save of this writer are removed."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.rank: int = kwargs.get("rank") or 0
        self.use_collectives = kwargs.get("use_collectives", True)
        if self._commit == "rename" and not self.use_collectives:
            raise UsageError('commit="rename" needs use_collectives=True: one rank must know when all ranks are done')
        if self._cleanup is not None:
            self._cleanup()
        self.save_id = str(uuid.uuid4())
        self._compared, self._staged = self._staged, None
        if self._compared is None:
            self._phases = []
        self._begun = time.time()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder, unless it holds a checkpoint that may not be overwritten."""
        path = self._folder.shown
        if not self.overwrite and self._folder.has(self._metadata_name()):
            raise exists(path)
        with writing(path):
            if self._commit == "metadata":
                self._folder.make()
            else:
                os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)
        if not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=_Generation(self.save_id, path, self.rank))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the id of the save, and the folder to write into."""
        folder = self._folder.shown
        if self._commit == "rename":
            self._work = _RenamedFolder(folder, self.overwrite)
            folder = self._work.staging.path
            self._cleanup = weakref.finalize(self, self._work.remove, os.getpid())
        else:
            arguments = os.getpid(), self._folder, self._metadata_name(), self.save_id
            self._cleanup = weakref.finalize(self, _remove_generation, *arguments)
        # Plans that a planner has kept are not sent again: empty, until write_data asks the planner.
        kept = [not getattr(plan, "usable", True) or getattr(plan.planner_data, "kept", False) for plan in plans]
        self._plans = [None if mine else plan.items for plan, mine in zip(plans, kept, strict=True)]
        return [
            dataclasses.replace(
                plan, storage_data=_Generation(self.save_id, folder, rank if self.use_collectives else self.rank)
            )
            for rank, plan in enumerate(plans)
        ]

    # ---- data ----

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data files and sync them to disk.

        Raises:
            WriteError: the system refuses, or a tensor changed after it was staged. No file of this rank remains.
        """
        if None in self._plans:
            self._plans = [
                whole.items if plan is None else plan
                for plan, whole in zip(self._plans, planner.global_plan, strict=True)
            ]
        self._differences = list(getattr(planner, "differences", ()))
        flat = getattr(planner, "state_dict", {})
        wait_for(devices_of(flat))
        self._step = find_step({key: one for key, one in flat.items() if not isinstance(one, torch.Tensor)}, "")
        where: _Generation = plan.storage_data
        folder = DiskFolder(where.folder, direct=self._direct) if self._commit == "rename" else self._folder
        now = time.time()
        self._phases.append(Phase("plan", self._begun, now - self._begun))
        if self._echo and self._compared is None:
            clock, digests = time.perf_counter(), digests_of(flat, device=True)
            self._compared = _StagedDigests(digests, os.getpid(), frozenset(digests))
            nbytes = sum(nbytes for nbytes, *_ in digests.values())
            self._phases.append(Phase("echo", now, time.perf_counter() - clock, nbytes))
            now = time.time()
        quiet = self._quiet and not is_url(self._given) and any(one.name == "stage" for one in self._phases)
        buckets = _buckets(plan.items, 1 if quiet else self.thread_count)
        hashed = self._manifest or self._compared is not None
        sizes = [sum(_archive_size(plan.items[at]) for at in bucket) for bucket in buckets]
        files = _Files(folder, hashed, beside=not quiet)
        try:
            with files:
                files.create(where, self.save_id, sizes)
                written = self._write_files(plan.items, planner, files, buckets)
                if self._compared is not None and _writes_what_it_holds(planner):
                    written = self._compared.once_more(plan.items, flat, written)
                if self.sync_files:
                    with writing(folder.shown):
                        folder.sync()
        except BaseException as error:
            folder.remove(file.name for file in files.opened)
            if isinstance(error, WriteError):
                raise WriteError(f"rank {where.rank}, writing data: {error}") from error
            raise
        record = self._record(plan.items, planner, folder.shown, files, written, now)
        result = WriteResult(MetadataIndex(""), sum(size for _, size in record.files), record)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        self._compared = None
        return future

    def _write_files(
        self, items: Sequence[WriteItem], planner: SavePlanner, files: _Files, buckets: list[list[int]]
    ) -> list[list[tuple[int, WrittenItem]]]:
        stop = threading.Event()

        def write(number: int) -> list[tuple[int, WrittenItem]]:
            found = []
            try:
                with writing(files.opened[number].name):
                    data = files.opened[number].data
                    for at in buckets[number]:
                        if stop.is_set():
                            break
                        found.append((at, self._write_item(data, items[at], planner)))
                    data.flush(sync=self.sync_files)
            except BaseException:
                stop.set()
                raise
            return found

        if len(buckets) <= 1:
            return [write(number) for number in range(len(buckets))]
        with ThreadPoolExecutor(len(buckets), thread_name_prefix="workbench-save") as pool:
            return list(pool.map(write, range(len(buckets))))

    def _write_item(self, file: DataFile, item: WriteItem, planner: SavePlanner) -> WrittenItem:
        with file.timed("serialise"):
            value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            return file.opaque(value.getbuffer())
        data = item.tensor_data
        value = value.detach()
        written = file.tensor(value, (data.properties.dtype, tuple(data.chunk.sizes)))
        if self._compared is not None and written.kind == TENSOR:
            live = self._compared.check(item.index.fqn, value, written.digests)
            written = written._replace(live=live)
        return written

    def _record(
        self,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        folder: str,
        files: _Files,
        written: list[list[tuple[int, WrittenItem]]],
        begun: float,
    ) -> RankRecord:
        data = [file.data for file in files.opened]
        rows = [(at, number, one) for number, found in enumerate(written) for at, one in found]
        nbytes = sum(one.size for one in data)
        for name in ("serialise", "hash", "write", "sync"):
            self._phases.append(Phase(name, begun, sum(one.seconds[name] for one in data), nbytes))
        self._phases.append(Phase("data", begun, time.time() - begun, nbytes))
        known = type(planner).finish_plan in (Planner.finish_plan, DefaultSavePlanner.finish_plan)
        return RankRecord(
            folder,
            tuple((file.name, one.size) for file, one in zip(files.opened, data, strict=True)),
            *packed(rows),
            tuple(self._phases),
            names_digest(items),
            None if known else tuple(items),
            ("the file system refused O_DIRECT",) * any(getattr(one.out, "refused", False) for one in files.opened),
        )

    # ---- commit ----

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the save visible, then remove the files that it replaced.

        Raises:
            WriteError: the system refuses, or the ranks wrote something other than planned. What was visible
                before still is.
        """
        begin = time.time()
        records: list[RankRecord] = [one.storage_data for several in results for one in several]
        folder = self._folder if self._work is None else DiskFolder(self._work.staging.path)
        plans = [
            (plan or ()) if record.items is None else record.items
            for plan, record in zip(self._plans, records, strict=True)
        ]
        if other := next((one.folder for one in records if one.folder != folder.shown), None):
            raise WriteError(
                f"a rank wrote into {other!r} instead of {folder.shown!r}: its plan is from an earlier save; use "
                "wb.dcp.Planner, or a planner without enable_plan_caching"
            )
        if "version" in Metadata.__dataclass_fields__:  # not in torch 2.6
            metadata.version = VERSION
        metadata.storage_data = storage_data(records, plans)
        metadata.storage_meta = self.storage_meta()
        data = pickle.dumps(metadata)
        manifest = None
        if self._manifest and self.use_collectives:
            shown = self._folder.shown
            name = os.path.basename(shown if is_url(shown) else os.path.realpath(shown))
            manifest = manifest_of(
                name, metadata, data, records, plans, self._step, self._save_record(records, plans, begin)
            )
        files = [name for record in records for name, _ in record.files]
        folder.commit(self._metadata_name(), data, manifest, files)
        if self._work is not None:
            self._work.staging.commit()
        if self._cleanup is not None and self._work is None:
            self._cleanup.detach()
        elif self._cleanup is not None:
            self._cleanup()
        self._cleanup = self._work = None

    def _save_record(
        self, records: Sequence[RankRecord], plans: Sequence[Sequence[WriteItem]], begun: float
    ) -> dict[str, Any]:
        """Return how the checkpoint was saved, for the manifest, as JSON types."""
        ends = [one.start + one.seconds for one in records[0].phases if one.name == "data"]
        own = [Phase("gather", end, begun - end) for end in ends] + [Phase("metadata", begun, time.time() - begun)]
        return {
            "save_id": self.save_id,
            "torch": torch.__version__,
            "ranks": len(records),
            "staged": any(p.name == "stage" for one in records for p in one.phases),
            "differences": self._differences,
            **({"echo": live_of(records, plans)} if self._echo else {}),
            "notes": [f"rank {rank}: {note}" for rank, record in enumerate(records) for note in record.notes],
            "phases": [
                {"rank": rank} | dataclasses.asdict(phase)
                for rank, record in enumerate(records)
                for phase in (*record.phases, *(own if rank == 0 else ()))
            ],
        }

    def _metadata_name(self) -> str:
        return METADATA if self.use_collectives else f"__{self.rank}{METADATA}"


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Generation:
    """The message to each rank with its plan: the id of the save, where to write, and its rank."""

    save_id: str
    folder: str
    rank: int


@dataclass(frozen=True)
class _StagedDigests:
    """Digests of the data to write: of the staged copy or of the trainer's tensors, and the process that has them.

    Attributes:
        live: names of tensors whose digests are known to be those of the trainer's values.
    """

    digests: Digests
    pid: int
    live: frozenset[str]

    def check(self, fqn: str, tensor: torch.Tensor, written: bytes) -> bool:
        """Compare the written bytes with the digests; return whether they equal the trainer's value.

        Raises:
            WriteError: they differ.
        """
        nbytes, blocks, address = self.digests.get(fqn, (0, [], 0))
        if b"".join(blocks) == written:
            return fqn in self.live
        here = os.getpid() == self.pid
        start = tensor.data_ptr() - address if here else tensor.storage_offset() * tensor.element_size()
        if not address or not 0 <= start <= nbytes - tensor.nbytes:
            return False  # another tensor: a planner has changed it, or the digests are of an abandoned save
        if not tensor.is_contiguous() or start % BLOCK:
            return False  # not a run of the blocks that were hashed
        if start + tensor.nbytes != nbytes and tensor.nbytes % BLOCK:
            return False
        first = start // BLOCK
        staged = b"".join(blocks[first : first + -(-tensor.nbytes // BLOCK)])
        if staged != written:
            raise self._changed(fqn)
        return fqn in self.live

    def once_more(
        self, items: Sequence[WriteItem], state: Mapping[str, Any], written: list[list[tuple[int, WrittenItem]]]
    ) -> list[list[tuple[int, WrittenItem]]]:
        """Hash those tensors again whose parts are not runs of blocks: were they the same meanwhile?

        Returns:
            ``written``, with what is known of the trainer's values.

        Raises:
            WriteError: they changed.
        """
        names = {items[at].index.fqn for found in written for at, one in found if one.kind == TENSOR and not one.live}
        again = digests_of({name: state[name] for name in names & self.live if name in state}, device=True)
        for name, (nbytes, blocks, _) in again.items():
            if (nbytes, blocks) != self.digests[name][:2]:
                raise self._changed(name)
        return [
            [
                (at, one._replace(live=one.live or (one.kind == TENSOR and items[at].index.fqn in again)))
                for at, one in found
            ]
            for found in written
        ]

    def _changed(self, fqn: str) -> WriteError:
        return WriteError(
            f"tensor {fqn!r} changed between staging and writing; nothing was committed. Either something "
            "wrote into the staged copy, such as a stager that reuses its buffers too early, or training continued "
            "during a synchronous save"
        )


class _RenamedFolder:
    """The folder beside the path that ``commit="rename"`` writes into."""

    def __init__(self, path: str, overwrite: bool) -> None:
        real = os.path.realpath(path)
        leftovers.clean(real)
        self._token = owners.token()
        self.staging = Staging(real, leftovers.beside(real, leftovers.TEMP, self._token), True, overwrite)
        owners.ACTIVE.add(self._token)
        with writing(self.staging.work):
            os.makedirs(self.staging.path)

    def remove(self, pid: int) -> None:
        if pid == os.getpid():
            leftovers.remove(self.staging.work)
            owners.ACTIVE.discard(self._token)


@dataclass
class _OpenFile:
    name: str
    out: Output
    data: DataFile


class _Files:
    """Data files of a rank, new and empty."""

    def __init__(self, folder: SaveFolder, hashed: bool, *, beside: bool) -> None:
        self.opened: list[_OpenFile] = []
        self._folder, self._hashed, self._beside = folder, hashed, beside

    def create(self, where: _Generation, own: str, sizes: Sequence[int]) -> None:
        """Create files of about these sizes; ``own`` is the id of this save."""
        for number, size in enumerate(sizes):
            name = data_file(where.rank, number, where.save_id)
            with writing(name):
                try:
                    out = self._folder.create(name, size)
                except FileExistsError:  # the plan is that of an earlier save, which a planner kept
                    name = data_file(where.rank, number, own)
                    out = self._folder.create(name, size)
            self.opened.append(_OpenFile(name, out, DataFile(out, hashed=self._hashed, beside=self._beside)))

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.opened:
            one.data.close()
            one.out.close()


def _check_pickles(writer: Writer) -> None:
    """Raise the error that ``AsyncCheckpointerType.PROCESS`` would only report by ``result()``.

    torch pickles the planner and the writer in a thread, and passes neither the planner nor the kind of the save to the
    writer; they are read from the frame of ``dcp.async_save``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "async_save":
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    if getattr(given.get("async_checkpointer_type"), "name", "") != "PROCESS":
        return
    for what, one in (("planner", given.get("planner")), ("writer", writer)):
        try:
            ForkingPickler.dumps(one)
        except Exception as error:
            raise UsageError(
                f"AsyncCheckpointerType.PROCESS pickles the {what}, which cannot be pickled: {error}. Define its class "
                "in a module, and keep no open files, locks or lambdas in it; or use AsyncCheckpointerType.THREAD"
            ) from error


def _writes_what_it_holds(planner: SavePlanner) -> bool:
    """Return whether a planner writes parts of its state dict's tensors, rather than new tensors made from them."""
    kind = type(planner)
    if not isinstance(planner, DefaultSavePlanner):
        return False
    known = kind.resolve_data in (Planner.resolve_data, DefaultSavePlanner.resolve_data)
    return known and kind.transform_object is DefaultSavePlanner.transform_object


def _remove_generation(pid: int, folder: SaveFolder, name: str, save_id: str) -> None:
    """Remove the leftovers of a save; do nothing in a fork of the process that began it."""
    if pid == os.getpid():
        folder.remove_generation(name, save_id)


def _buckets(items: Sequence[WriteItem], most: int) -> list[list[int]]:
    """Return the positions of the items of each file: objects first, tensors spread by their bytes."""
    sizes = [_archive_size(item) for item in items]
    count = max(1, min(most, sum(sizes) // FILE))
    chosen = spread([0] * count, sizes, [range(count)] * len(items))
    found = [[at for at, file in enumerate(chosen) if file == number] for number in range(count)]
    for bucket in found:
        bucket.sort(key=lambda at: items[at].type != WriteItemType.BYTE_IO)
    return [bucket for bucket in found if bucket]


def _archive_size(item: WriteItem) -> int:
    """Return the bytes of an item in its file, approximate if only ``torch.save`` knows them; 0 for objects."""
    if item.tensor_data is None:
        return 0
    dtype, sizes = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    archive = archive_of(dtype, sizes)
    return int(prod(sizes) * dtype.itemsize if archive is None else archive.size)
