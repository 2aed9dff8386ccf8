"""Export a checkpoint of any readable format to files of another, whole or resharded, bit for bit.

::

    checkpoint ─choose─► selection ─writer─► file maps ─engine─► temp ─check─► rename ─► dest
                 names, types, mesh   no tensor byte is read until here

Everything that can be refused is refused before the first byte is written: names that collide, types that the target
lacks, holes, an existing target, a full disk.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from workbench import formats
from workbench.analysis.manifest import write as write_manifest
from workbench.analysis.manifest_file import INSIDE
from workbench.checkpoint import Checkpoint, as_checkpoint, open_place
from workbench.checkpoint import open as open_checkpoint
from workbench.core.dtypes import ALL
from workbench.core.executors import using
from workbench.core.fingerprint import BLOCK
from workbench.core.mesh.mesh import Mesh
from workbench.core.place import UNFINISHED, Place
from workbench.core.remote.destination import Destination
from workbench.core.remote.url import is_url, on_disk, with_options
from workbench.core.scan import Progress
from workbench.core.words import some_of
from workbench.errors import NotACheckpointError, OpenError, UnsupportedFormatError, UsageError, WriteError
from workbench.export.atomic.journal import Written
from workbench.export.atomic.store import staging_in_store
from workbench.export.atomic.transaction import Staging, check_free, check_room, exists, staging
from workbench.export.atomic.writing import sync_folder, writing
from workbench.export.moving.check import check_pieces, check_reader
from workbench.export.moving.engine import ExportJob, prepare
from workbench.export.moving.sending import SENDING, Sender, room_for, spool
from workbench.export.report import ExportReport, FileReport, TensorReport
from workbench.export.selection import ExportSelection, Rename, choose, with_objects
from workbench.export.sharding.rules import Rules
from workbench.export.writers.passing import passed
from workbench.export.writers.plain import plain_objects
from workbench.export.writers.registry import WRITERS, ExportWriter, Options, target_format
from workbench.export.writers.safetensors import MAX_SHARD_SIZE

if TYPE_CHECKING:
    from workbench.export.hf.convert import Renamed

#: Objects that describe how the source is stored or was written, not the model or its training.
_HOW_STORED = re.compile(r"__metadata__|save_log|.*\.safetensors\.index")
#: Kind of tensor, as in a catalog's ``meta`` → what objects describe it, and what needs no objects.
_DESCRIBED = {
    "quantised": (
        "has a quantised torch dtype, and its scale, zero point and scheme",
        "tensor.dequantize()",
    ),
    "sparse": ("is part of a sparse tensor, whose shape and layout", "tensor.to_dense()"),
}
#: What a report says of a changed tensor.
_COUNTED = ("changed", "overflowed", "max_abs", "updated", "max_update")
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def export(
    ckpt: Checkpoint | str | os.PathLike[str],
    dest: str | os.PathLike[str],
    format: str | None = None,
    *,
    select: str | Sequence[str] | None = None,
    role: str | None = "model",
    rename: Rename | None = None,
    hf_config: Mapping[str, Any] | None = None,
    dtype: object | None = None,
    lora: str | os.PathLike[str] | Checkpoint | Sequence[str | os.PathLike[str] | Checkpoint] = (),
    unscaled: bool = False,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    rules: Rules | None = None,
    objects: bool | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    manifest: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> ExportReport:
    """Write tensors of a checkpoint to files of another format, and prove that they are the same.

    The target appears under its name only when it is complete and synced to disk; after a failure, a signal or a kill,
    whatever was there before is unchanged. In a store, the object that completes the target is uploaded last.

    Args:
        ckpt: a checkpoint, a selection of one, or a path or URL.
        dest: a folder; for ``safetensors`` also a single file if the name ends in ``.safetensors``; for ``torch`` a
            file unless there is a mesh, usually ``.pt``. A path, or a URL (``s3://``, ``gs://``, ``az://``): files are
            then written to ``TMPDIR`` a few at a time, uploaded, and removed; ``TMPDIR`` needs room for 2 GiB, or for
            two of the largest files.
        format: a name of :data:`workbench.export.writers.registry.WRITERS`; by default the one that the name of
            ``dest`` stands for (``.safetensors``, ``.pt``), otherwise ``safetensors``.
        select: regular expressions; only tensors whose key contains a match of one of them.
        role: ``model`` for everything that a model loads (parameters, buffers, scales, adapters), one role
            (``exp_avg`` …), or ``all`` or ``None`` for every tensor.
        rename: key → name, as a mapping (other names are unchanged) or a function; ``fqn`` for the fully qualified
            names of the parameters; ``hf`` for the names and shapes of transformers' models
            (:func:`workbench.export.hf.convert.as_hf`).
        hf_config: with ``hf``, fields of the model's ``config.json`` for facts that the checkpoint does not store; with
            a ``model_type``, all of it.
        dtype: cast floats of 16, 32 and 64 bits, and FP8 weights times their scales, to ``bfloat16``, ``float16`` or
            ``float32``; or quantise the weights of linear layers: ``fp8`` (one scale for each block of 128 × 128, as in
            DeepSeek-V3 and transformers) or ``fp8-tensor`` (one scale for each weight, as in compressed-tensors).
        lora: PEFT adapters to merge into their weights, one after the other: W + s·B·A.
        unscaled: with ``dtype``, take the codes of FP8 weights without a scale as values.
        mesh: shard every tensor for the ranks of a mesh, ``Mesh(tp=2, pp=2)``, ``{"tp": 2}`` or ``"tp=2,pp=2"``: one
            file per rank.
        rules: how tensors are placed on the mesh, if the placement that :mod:`workbench.export.sharding.rules` infers
            is wrong.
        objects: also write non-tensor state (step, schedulers …) if the format has a place for it and its values are
            plain; by default with ``role="all"``.
        max_shard_size: maximum bytes of tensors per file, or ``5GB``, ``500MB``, ``2GiB``; for a folder of safetensors
            that is written without a mesh, where it is 5 GB by default.
        overwrite: replace an existing checkpoint or file of that name.
        resume: resume an interrupted or failed run of the same export, after reading back what it wrote. If this run
            fails too, what it wrote is kept in a hidden folder next to the target. In a store, uploaded files that are
            unchanged are kept and not uploaded again.
        verify: read the target back before it becomes visible, and compare every fingerprint.
        manifest: write the fingerprints into the folder, as ``.workbench-manifest.json``; a target that is a single
            file, or whose files are separate checkpoints, has none.
        threads: number of threads; by default the cores available to this process, up to 8.
        progress: called with the fraction of bytes done, in the caller's thread; raise an exception to cancel.
        dry_run: only plan; everything that an export would refuse is still refused.
        storage_options: for the URLs of ``dest`` and ``lora``: passed to the library that handles the scheme.
        executor: a ``concurrent.futures.Executor`` whose workers read and write: a process pool with the start method
            ``spawn``, or ``distributed.Client(…).get_executor()``. They write parts of the same hidden folder, so they
            must see the target's file system under the same path. The files are the same, byte for byte.

    Raises:
        UnsupportedFormatError: the format lacks an element type.
        UsageError: the format cannot be written, or ``dest`` is a name for another one; names collide, nothing is
            selected, rules do not fit, the target contains the source, or its URL cannot be written to.
        WriteError: the target exists, there is not enough space, or the system or the store refuses.
        HoleError, OpenError: a tensor cannot be read.
        WorkerError: the executor lost its workers or its scheduler.
    """
    began = time.perf_counter()
    target = on_disk(os.fsdecode(dest))
    format = target_format(os.path.basename(target), format, sharded=mesh is not None)
    if max_shard_size is not None and (mesh is not None or format != "safetensors" or target.endswith(".safetensors")):
        raise UsageError("max_shard_size= is for a folder of safetensors that is written without a mesh; leave it out")
    shard_size = MAX_SHARD_SIZE if max_shard_size is None else _size(max_shard_size)
    ckpt, made_by = as_checkpoint(ckpt), WRITERS[format]
    named = _as_hf(ckpt, rename, hf_config)
    with ExitStack() as opened:
        opened.enter_context(using(executor))
        opened.enter_context(with_options(storage_options, target, lora))
        store = Destination(target) if is_url(target) else None
        merged = [_opened(one, opened) for one in _as_list(lora)]
        selection = choose(
            ckpt if named is None else named.ckpt,
            select=select,
            role=role,
            rename=rename if named is None else None,
            dtype=dtype,
            adapters=merged,
            unscaled=unscaled,
            mesh=None if mesh is None else Mesh.of(mesh),
            rules=rules,
            threads=threads,
        )
        notes = [*(named.notes if named is not None else ()), *(selection.edited.notes if selection.edited else ())]
        notes += [*(selection.target.notes if selection.target is not None else ()), *made_by.notes(selection)]
        notes += _untied(selection)
        state = [name for name in ckpt.objects if not _HOW_STORED.fullmatch(name)]
        left = dict.fromkeys(state, "")
        if made_by.objects and (role in (None, "all") if objects is None else objects):
            kept, left = plain_objects(ckpt.objects, state, tensors=made_by.tensors_in_objects)
            selection = with_objects(selection, kept)
            notes += [f"object {name!r} is left out: {why}" for name, why in left.items()]
        _check_described(selection, format, made_by.objects)
        folder = made_by.is_folder(target, selection)
        if store is None:
            real = _real(target)
            _check_place([ckpt, *merged], real, folder, overwrite)
        else:
            target = real = store.shown
            _check_store([ckpt, *merged], store, folder, overwrite, dry_run)
        copied = passed(selection, notes, named) if made_by.passes and folder else []
        maps = [*made_by.maps(selection, Options(os.path.basename(real), shard_size)), *copied]
        job = prepare(selection.ckpt.payloads, maps)
        written: list[list[Written]] | None = None
        if store is not None:
            room_for(maps)
            if not dry_run:
                written, found = _send(
                    store,
                    made_by,
                    selection,
                    job,
                    job.plan(_identity(ckpt)),
                    threads,
                    progress,
                    folder=folder,
                    overwrite=overwrite,
                    resume=resume,
                    verify=verify,
                    manifest=manifest,
                )
                notes += found
        elif dry_run:
            check_room(os.path.dirname(real), job.nbytes)
        else:
            plan = job.plan(_identity(ckpt)) if resume else None
            with staging(real, folder=folder, nbytes=job.nbytes, overwrite=overwrite, plan=plan) as made:
                written = _write(made, job, threads, progress)
                if verify:
                    _verify(Place(made.path), made_by, selection, job, written, threads)
                if manifest and folder and made_by.merges:
                    _keep(Place(made.path), made_by, job, written, threads)
            notes += made.notes
    return ExportReport(
        path=target,
        format=format,
        files=tuple(FileReport(one.name, one.size, len(one.pieces)) for one in maps),
        tensors=_tensors(job, selection, made_by.keys(selection), written),
        read_nbytes=job.read_nbytes,
        copies=len(job.streams.regions),
        peak_nbytes=job.peak_nbytes(threads) + (SENDING if store is not None else 0),
        copied=tuple(one.name for one in copied),
        carried=tuple(selection.objects),
        renamed_out={} if named is None else dict(named.left),
        left_out=tuple(name for name in left if f"{name}.json" not in {one.name for one in copied}),
        unselected=selection.unselected,
        mesh=None if selection.target is None else str(selection.mesh),
        verified=verify and not dry_run,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        notes=tuple(notes),
    )


# ---- what is written -------------------------------------------------------------------------------------------------


def _as_hf(ckpt: Checkpoint, rename: Rename | None, config: Mapping[str, Any] | None) -> Renamed | None:
    if isinstance(rename, str) and rename == "hf":
        from workbench.export.hf.convert import as_hf

        return as_hf(ckpt, config)
    if config is not None:
        raise UsageError("hf_config= is used only with rename='hf'; add rename='hf' or leave out hf_config=")
    return None


def _check_described(selection: ExportSelection, format: str, objects: bool) -> None:
    """Refuse quantised and sparse torch tensors that are described by objects which are not exported."""
    for kind, (what, instead) in _DESCRIBED.items():
        keys, held = selection.catalog.keys, selection.catalog.meta.get(kind, {})
        wanted = [keys[tensor] for tensor in selection.tensors.tolist()] if held else []
        lost = [key for key in wanted if key in held and held[key] not in selection.objects]
        if lost:
            carried = objects and all(held[key] for key in lost)
            carry = ", carry the objects (objects=True)" if carried else ""
            raise UnsupportedFormatError(
                f"tensor {some_of(lost, 1)}: {what} are not all stored as tensors: {format} would lose them. "
                f"Save {instead} instead{carry}, or leave the tensor out (select=)"
            )


def _as_list(lora: Any) -> list[Any]:
    return list(lora) if isinstance(lora, Sequence) and not isinstance(lora, str) else [lora]


def _opened(adapter: str | os.PathLike[str] | Checkpoint, opened: ExitStack) -> Checkpoint:
    return adapter if isinstance(adapter, Checkpoint) else opened.enter_context(open_checkpoint(adapter))


def _identity(ckpt: Checkpoint) -> str:
    """Return where a checkpoint is: its real path, or its URL."""
    return os.path.realpath(ckpt.path) if ckpt.place.local else ckpt.path


def _untied(selection: ExportSelection) -> list[str]:
    """Return a note for each set of tensors that share one storage in the source: a target has a copy of each."""
    keys = {selection.catalog.keys[at] for at in selection.tensors.tolist()}
    groups = [[key for key in group if key in keys] for group in selection.catalog.meta.get("aliases", [])]
    return [
        f"{' and '.join(map(repr, group))} share one storage in the source, and are separate in the target; tie them "
        "again after loading"
        for group in groups
        if len(group) > 1
    ]


def _size(text: int | str) -> int:
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)?\s*", text, re.IGNORECASE)
        if match is None:
            raise UsageError(
                f"max_shard_size={text!r}: give a number of bytes, or a number with KB, MB, GB, TB, KiB … TiB"
            )
        return int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    return text


# ---- where it goes ---------------------------------------------------------------------------------------------------


def _real(target: str) -> str:
    try:
        os.fsencode(target)
        return os.path.realpath(os.path.expanduser(target))
    except ValueError:  # a NUL byte, or a lone surrogate
        raise UsageError(f"the target {target!r} is not a valid file name; choose another") from None


def _check_place(sources: Sequence[Checkpoint], real: str, folder: bool, overwrite: bool) -> None:
    for one in sources:
        if one.place.local:
            _check_apart(os.path.realpath(os.path.expanduser(one.path)), real)
    if not os.path.isdir(os.path.dirname(real)):
        raise WriteError(f"folder {os.path.dirname(real)!r} does not exist; make it with: mkdir -p")
    check_free(real, folder=folder, overwrite=overwrite)
    if overwrite and folder and os.path.isdir(real) and os.listdir(real):
        _check_overwritten(Place(real))


def _check_store(
    sources: Sequence[Checkpoint], store: Destination, folder: bool, overwrite: bool, dry_run: bool
) -> None:
    for one in sources:
        if not one.place.local:
            _check_apart(one.path, store.shown)
    if dry_run and not overwrite:  # otherwise checked once this run has the target
        existing = store.files(store.key) if folder else store.stat(store.key)
        if existing and not (isinstance(existing, dict) and UNFINISHED in existing):
            raise exists(store.shown)
    if not (overwrite and folder):
        return
    try:
        place = Place(store.shown)
    except NotACheckpointError:  # nothing there
        return
    if not formats.unfinished(place):
        _check_overwritten(place)


def _check_apart(source: str, target: str) -> None:
    if source == target or source.startswith(target.rstrip("/") + "/"):
        raise UsageError(f"the target {target!r} is, or contains, the checkpoint being exported; choose another")
    if target.startswith(source.rstrip("/") + "/"):
        raise UsageError(
            f"the target {target!r} is inside the checkpoint being exported, {source!r}, and would become part "
            "of it; choose a path outside it"
        )


def _check_overwritten(place: Place) -> None:
    """Refuse to overwrite a folder that is not a checkpoint, or has something else in it."""
    try:
        known = formats.detect(place)
    except OpenError:  # a damaged checkpoint is still a checkpoint
        return
    if known is None:
        raise WriteError(
            f"{place.path!r} is not a checkpoint, so it is not overwritten; choose another name, or remove it yourself"
        )
    if other := _foreign_folder(place, known):
        raise WriteError(
            f"{place.path!r} contains the folder {other!r}, which is not part of the checkpoint there and would be "
            "lost; move it, or choose another name"
        )


def _foreign_folder(place: Place, known: str) -> str | None:
    """Return a non-empty folder inside a checkpoint's folder that contains none of the checkpoint's files."""
    try:
        with open_place(place, cache=False, partial=True) as held:
            own = {name.split("/")[0] for name in held.catalog.files}
    except OpenError:  # damaged: it is unknown which folders are its own
        own = set()
    for name in place.folders:
        if name not in own and not formats.record(known).owns(name) and not place.is_link(name):
            inner = place.sub(name)
            if inner.files or inner.folders:
                return name
    return None


def _write(made: Staging, job: ExportJob, threads: int | None, progress: Progress | None) -> list[list[Written]]:
    """Write every file, and sync the names."""
    paths = _paths(made, job)
    inner = sorted({os.path.dirname(path) for path in paths} - {made.path}) if made.folder else []
    for path in inner:
        with writing(os.path.relpath(path, made.path)):
            os.makedirs(path, exist_ok=True)
    written = job.run(paths, threads=threads, progress=progress, journal=made.journal)
    for path in reversed(inner):
        with writing(os.path.relpath(path, made.path)):
            sync_folder(path)
    return written


def _paths(made: Staging, job: ExportJob) -> list[str]:
    return [os.path.join(made.path, one.name) for one in job.maps] if made.folder else [made.path]


def _send(
    store: Destination,
    made_by: ExportWriter,
    selection: ExportSelection,
    job: ExportJob,
    plan: str,
    threads: int | None,
    progress: Progress | None,
    *,
    folder: bool,
    overwrite: bool,
    resume: bool,
    verify: bool,
    manifest: bool,
) -> tuple[list[list[Written]], list[str]]:
    """Write every file on disk and send it: data, then small files, last the files that make it a checkpoint."""
    files = range(len(job.maps))
    last = [at for at in files if re.fullmatch(made_by.marker, job.maps[at].name)]
    aside = verify and not last  # a tensor file is the last: it is not shown before it was read back
    last = last or [max(at for at in files if len(job.maps[at].pieces) or at == files[0])]
    first = sorted(set(files) - set(last), key=lambda at: not len(job.maps[at].pieces))
    manifest = manifest and folder and made_by.merges
    names = [job.maps[at].name for at in first] + [INSIDE] * manifest + [job.maps[at].name for at in last]
    with (
        spool() as held,
        staging_in_store(
            store, folder=folder, names=names, plan=plan, overwrite=overwrite, resume=resume, aside=aside
        ) as made,
        Sender(made, job, held, threads, progress) as sender,
    ):
        sender.write_and_send(first)
        sender.write(last)
        if made.aside:  # nothing of it is visible yet
            sender.send(last)
        written = [sender.written[at] for at in files]
        if verify:
            _verify(sender.place(), made_by, selection, job, written, threads)
        if manifest:
            _keep(sender.place(), made_by, job, written, threads, os.path.join(held, INSIDE))
            sender.add(INSIDE)
        sender.send(last)
    if progress is not None:
        progress(1.0)
    return written, made.notes


def _verify(
    made: Place,
    made_by: ExportWriter,
    selection: ExportSelection,
    job: ExportJob,
    written: list[list[Written]],
    threads: int | None,
) -> None:
    """Read every byte back, and then the whole target through its reader."""
    for one, results in zip(job.maps, written, strict=True):
        if len(one.pieces):
            check_pieces(made, made.file or one.name, one, results, threads=threads)
    if made_by.merges or selection.target is None:
        check_reader(made, made_by.reader, selection, made_by.keys(selection))


def _keep(
    made: Place,
    made_by: ExportWriter,
    job: ExportJob,
    written: list[list[Written]],
    threads: int | None,
    path: str | None = None,
) -> None:
    """Save the manifest of the exported files, inside or at ``path``, from the block hashes computed when they were
    written.
    """
    known: dict[str, dict[tuple[int, int], bytes]] = {}
    for one, results in zip(job.maps, written, strict=True):
        known[one.name] = mine = {}
        for start, nbytes, result in zip(one.start.tolist(), one.pieces.nbytes.tolist(), results, strict=True):
            for low, digest in zip(range(start, start + nbytes, BLOCK), result.target.blocks, strict=True):
                mine[low, min(low + BLOCK, start + nbytes)] = digest
    try:
        with open_place(made, format=made_by.reader, cache=False) as again, writing(INSIDE):
            write_manifest(again, path, inside=path is None, known=known, threads=threads)
    except (OpenError, UsageError) as error:
        raise WriteError(f"no manifest could be made for the written files, so they were not kept: {error}") from None


def _tensors(
    job: ExportJob, selection: ExportSelection, keys: Sequence[str], written: list[list[Written]] | None
) -> tuple[TensorReport, ...]:
    """Report tensors by position in the source, then file, under the names by which the target's reader finds them."""
    catalog, found = job.payloads.catalog, []
    called = dict(zip(selection.tensors.tolist(), keys, strict=True))
    named = dict(zip(selection.names, selection.tensors.tolist(), strict=True))
    for file, one in enumerate(job.maps):
        pieces = one.pieces
        first = dict(zip(pieces.piece.tolist()[::-1], pieces.tensor.tolist()[::-1], strict=True))
        for at, name in enumerate(pieces.names):
            tensor = first.get(at, named.get(name, -1))  # pieces without elements have no box
            if tensor < 0:  # an object
                continue
            result = written[file][at] if written is not None else None
            error = None if result is None else result.cast
            found.append(
                (
                    tensor,
                    TensorReport(
                        catalog.keys[tensor],
                        called[tensor],
                        one.name,
                        ALL[catalog.dtype[tensor]].name,
                        pieces.dtype_of(at).name,
                        pieces.shape_of(at),
                        int(pieces.nbytes[at]),
                        None if result is None else result.source.hex,
                        None if result is None else result.target.hex,
                        **({} if error is None else {name: getattr(error, name) for name in _COUNTED}),
                    ),
                )
            )
    return tuple(one for _, one in sorted(found, key=lambda pair: pair[0]))
