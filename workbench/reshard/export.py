"""Exports: a checkpoint of any readable format as files of another, whole or resharded, bit for bit.

::

    checkpoint ─choose─► selection ─writer─► file maps ─engine─► temp ─check─► rename ─► dest
                 names, types, mesh   no tensor byte is read until here

Whatever can be refused is refused before the first byte is written: names that collide, types the target lacks, holes,
a target that exists, a disk without room.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from workbench import formats
from workbench.analysis.manifest import write as write_manifest
from workbench.analysis.manifest_file import INSIDE
from workbench.checkpoint import Checkpoint
from workbench.checkpoint import open as open_checkpoint
from workbench.core.dtypes import ALL
from workbench.core.fingerprint import BLOCK
from workbench.core.place import Place
from workbench.core.scan import Tick
from workbench.errors import OpenError, UnsupportedFormatError, UsageError, WriteError
from workbench.reshard.atomic.transaction import Staging, check_free, check_room, staging
from workbench.reshard.atomic.writing import sync_folder, writing
from workbench.reshard.mesh import Mesh
from workbench.reshard.moving.check import check_pieces, check_reader
from workbench.reshard.moving.engine import Job, prepare
from workbench.reshard.moving.journal import Written
from workbench.reshard.report import ExportReport, FileReport, TensorReport
from workbench.reshard.rules import Rules
from workbench.reshard.selection import Rename, Selection, choose, with_objects
from workbench.reshard.writers.passing import passed
from workbench.reshard.writers.plain import plain_objects
from workbench.reshard.writers.registry import Options, Writer, writer
from workbench.reshard.writers.safetensors import MAX_SHARD_SIZE

if TYPE_CHECKING:
    from workbench.reshard.hf.convert import Renamed

__all__ = ["export"]

#: Objects that say how the source is stored or was written, nothing of the model or its training.
_HOW_STORED = re.compile(r"__metadata__|save_log|.*\.safetensors\.index")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


def export(
    ckpt: Checkpoint,
    dest: str | os.PathLike[str],
    format: str = "safetensors",
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
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    manifest: bool = True,
    threads: int | None = None,
    tick: Tick | None = None,
    dry_run: bool = False,
) -> ExportReport:
    """Write tensors of a checkpoint into files of another format, and prove that they are the same.

    The target appears under its name only when it is complete and on the disk; a failure, a signal or a kill leaves
    what was there before.

    Args:
        dest: a folder; for ``safetensors`` also one file where the name ends in ``.safetensors``, for ``torch`` a file
            unless there is a mesh.
        format: a name of :data:`workbench.reshard.writers.registry.WRITERS`.
        select: regular expressions; tensors whose key matches one of them somewhere.
        role: ``model`` for all that a model loads (parameters, buffers, scales, adapters), one role (``exp_avg`` …), or
            ``all`` (``None`` is the same) for every tensor.
        rename: key → name, as a mapping (others keep theirs) or a function; ``fqn`` for parameters' own names; ``hf``
            for the names and shapes of transformers' models (:func:`workbench.reshard.hf.convert.as_hf`).
        hf_config: with ``hf``, fields of the model's ``config.json`` for facts that the checkpoint does not store; with
            a ``model_type``, all of it.
        dtype: cast floats of 16, 32 and 64 bits, and FP8 weights times their scales, to ``bfloat16``, ``float16`` or
            ``float32``; or quantise the weights of linear layers: ``fp8`` (a scale for each 128 × 128, as DeepSeek-V3
            and transformers have it) or ``fp8-tensor`` (one a weight, as compressed-tensors has it).
        lora: PEFT adapters that are merged into their weights, one after the other: W + s·B·A.
        unscaled: with ``dtype``, FP8 weights that have no scale are cast by the values of their codes.
        mesh: cut every tensor for the ranks of a mesh, ``Mesh(tp=2, pp=2)``, ``{"tp": 2}`` or ``"tp=2,pp=2"``: one file
            a rank.
        rules: how tensors lie on the mesh, where it is not as :mod:`workbench.reshard.rules` tells from their names.
        objects: carry non-tensor state (step, schedulers …) where the format has a place for it and its values are
            plain; by default with ``role="all"``.
        max_shard_size: bytes of tensors a file, or ``5GB``, ``500MB``, ``2GiB``; safetensors without a mesh only.
        overwrite: replace a checkpoint or file that has the name.
        resume: go on with what a killed or failed run of the same export wrote, after reading it again; and keep what
            this one wrote, out of sight beside the target, should it fail.
        verify: read the target again before it is made visible, and compare every fingerprint.
        manifest: keep the fingerprints in the folder, as ``.workbench-manifest.json``; a target that is one file, or
            whose files are checkpoints of their own, has none.
        threads: how many work side by side; by default as many as this process may use cores, at most 8.
        tick: told the share of bytes that is done, in the caller's thread; raising there ends the export.
        dry_run: only plan; everything that would be refused is refused.

    Raises:
        UnsupportedFormatError: a format that is not written, or an element type that it lacks.
        UsageError: names that collide, nothing selected, rules that do not fit, a target that contains the source.
        WriteError: the target exists, there is no room, or the system refuses.
        HoleError, OpenError: a tensor cannot be read.
    """
    began = time.perf_counter()
    target, made_by = os.fsdecode(dest), writer(format)
    named = _as_hf(ckpt, rename, hf_config)
    with ExitStack() as opened:
        merged = [_opened(one, opened) for one in _several(lora)]
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
        state = [name for name in ckpt.objects if not _HOW_STORED.fullmatch(name)]
        left = dict.fromkeys(state, "")
        if made_by.objects and (role in (None, "all") if objects is None else objects):
            kept, left = plain_objects(ckpt.objects, state, tensors=made_by.tensors_in_objects)
            selection = with_objects(selection, kept)
            notes += [f"object {name!r} is left out: {why}" for name, why in left.items()]
        _check_quantised(selection, format, made_by.objects)
        folder = made_by.is_folder(target, selection)
        real = _real(target)
        _check_place([ckpt, *merged], real, folder, overwrite)
        copied = passed(selection, notes, named) if made_by.passes and folder else []
        maps = [*made_by.maps(selection, Options(os.path.basename(real), _size(max_shard_size))), *copied]
        job = prepare(selection.ckpt.payloads, maps)
        written: list[list[Written]] | None = None
        if dry_run:
            check_room(os.path.dirname(real), job.nbytes)
        else:
            plan = job.plan(os.path.realpath(ckpt.path)) if resume else None
            with staging(real, folder=folder, nbytes=job.nbytes, overwrite=overwrite, plan=plan) as made:
                written = _write(made, job, threads, tick)
                if verify:
                    _verify(made, made_by, selection, job, written, threads)
                if manifest and folder and made_by.merges:
                    _keep(made.path, made_by, job, written, threads)
            notes += made.notes
    return ExportReport(
        path=target,
        format=format,
        files=tuple(FileReport(one.name, one.size, len(one.pieces)) for one in maps),
        tensors=_tensors(job, selection, made_by.keys(selection), written),
        read_nbytes=job.read_nbytes,
        copies=len(job.copies.row),
        peak_nbytes=job.peak_nbytes(threads),
        copied=tuple(one.name for one in copied),
        carried=tuple(selection.objects),
        renamed_out={} if named is None else dict(named.left),
        left_out=tuple(name for name in left if f"{name}.json" not in {one.name for one in copied}),
        mesh=None if selection.target is None else str(selection.mesh),
        verified=verify and not dry_run,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        notes=tuple(notes),
    )


# ---- what is written -------------------------------------------------------------------------------------------------


def _as_hf(ckpt: Checkpoint, rename: Rename | None, config: Mapping[str, Any] | None) -> Renamed | None:
    if isinstance(rename, str) and rename == "hf":
        from workbench.reshard.hf.convert import as_hf

        return as_hf(ckpt, config)
    if config is not None:
        raise UsageError("hf_config= completes what rename='hf' needs to know; without it nothing asks for it")
    return None


def _check_quantised(selection: Selection, format: str, objects: bool) -> None:
    """Refuse codes of torch's quantised tensors without their scale, zero point and scheme, which are objects."""
    keys = selection.catalog.keys
    held = selection.catalog.meta.get("quantised", {})
    wanted = [keys[tensor] for tensor in selection.tensors.tolist()]
    lost = [key for key in wanted if key in held and held[key] not in selection.objects]
    if lost:
        many = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        carry = ", carry the objects (objects=True, --objects)" if objects and all(held[key] for key in lost) else ""
        raise UnsupportedFormatError(
            f"tensor {lost[0]!r}{many}: of a quantised type of torch, whose scale, zero point and scheme are not all "
            f"stored as tensors, so that {format} would lose them; save tensor.dequantize() instead{carry}, or leave "
            "it out (select=)"
        )


def _several(lora: Any) -> list[Any]:
    return list(lora) if isinstance(lora, Sequence) and not isinstance(lora, str) else [lora]


def _opened(adapter: str | os.PathLike[str] | Checkpoint, opened: ExitStack) -> Checkpoint:
    return adapter if isinstance(adapter, Checkpoint) else opened.enter_context(open_checkpoint(adapter))


def _size(text: int | str) -> int:
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)?\s*", text, re.IGNORECASE)
        if match is None:
            raise UsageError(f"max_shard_size={text!r}: bytes, or a number with KB, MB, GB, TB, KiB … TiB")
        return int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    return text


# ---- where it goes ---------------------------------------------------------------------------------------------------


def _real(target: str) -> str:
    try:
        os.fsencode(target)
        return os.path.realpath(os.path.expanduser(target))
    except ValueError:  # a NUL byte, or a lone surrogate
        raise UsageError(f"the target {target!r} is not a name that a file system can hold; choose another") from None


def _check_place(sources: Sequence[Checkpoint], real: str, folder: bool, overwrite: bool) -> None:
    for one in sources:
        source = os.path.realpath(os.path.expanduser(one.path))
        if source == real or source.startswith(real.rstrip(os.sep) + os.sep):
            raise UsageError(f"the target {real!r} is, or contains, the checkpoint that is exported; choose another")
        if real.startswith(source.rstrip(os.sep) + os.sep):
            raise UsageError(
                f"the target {real!r} lies inside the checkpoint that is exported, {source!r}, and would become part "
                "of it; choose a place outside"
            )
    if not os.path.isdir(os.path.dirname(real)):
        raise WriteError(f"folder {os.path.dirname(real)!r} does not exist; make it with: mkdir -p")
    check_free(real, folder=folder, overwrite=overwrite)
    if overwrite and folder and os.path.isdir(real) and os.listdir(real):
        try:
            known = formats.detect(Place(real))
        except OpenError:  # a damaged one is one all the same
            return
        if known is None:
            raise WriteError(
                f"{real!r} is no checkpoint, so that it is not overwritten; choose another name, or remove it yourself"
            )
        if other := _stranger(real):
            raise WriteError(
                f"{real!r} holds the folder {other!r}, which the checkpoint there does not name: it would be lost; "
                "move it, or choose another name"
            )


def _stranger(folder: str) -> str | None:
    """A folder in a checkpoint's folder, with something in it, of which the checkpoint has no file."""
    try:
        with open_checkpoint(folder, cache=False, partial=True) as held:
            own = {name.split("/")[0] for name in held.catalog.files}
    except OpenError:  # damaged: nothing tells which folders are its own
        own = set()
    with os.scandir(folder) as entries:
        inner = sorted(one.name for one in entries if one.is_dir(follow_symlinks=False) and one.name not in own)
    return next((name for name in inner if os.listdir(os.path.join(folder, name))), None)


def _write(made: Staging, job: Job, threads: int | None, tick: Tick | None) -> list[list[Written]]:
    """Every file, and what makes its name last."""
    paths = _paths(made, job)
    inner = sorted({os.path.dirname(path) for path in paths} - {made.path}) if made.folder else []
    for path in inner:
        with writing(os.path.relpath(path, made.path)):
            os.makedirs(path, exist_ok=True)
    written = job.run(paths, threads=threads, tick=tick, journal=made.journal)
    for path in reversed(inner):
        with writing(os.path.relpath(path, made.path)):
            sync_folder(path)
    return written


def _paths(made: Staging, job: Job) -> list[str]:
    return [os.path.join(made.path, one.name) for one in job.maps] if made.folder else [made.path]


def _verify(
    made: Staging, made_by: Writer, selection: Selection, job: Job, written: list[list[Written]], threads: int | None
) -> None:
    """Every byte again, and then the whole through its reader."""
    for path, one, results in zip(_paths(made, job), job.maps, written, strict=True):
        if len(one.pieces):
            check_pieces(path, one, results, threads=threads)
    if made_by.merges or selection.target is None:
        check_reader(made.path, made_by.reader, selection, made_by.keys(selection))


def _keep(made: str, made_by: Writer, job: Job, written: list[list[Written]], threads: int | None) -> None:
    """The manifest of what was written; the blocks of every piece were hashed when they were."""
    known: dict[str, dict[tuple[int, int], bytes]] = {}
    for one, results in zip(job.maps, written, strict=True):
        known[one.name] = mine = {}
        for start, nbytes, result in zip(one.start.tolist(), one.pieces.nbytes.tolist(), results, strict=True):
            for low, digest in zip(range(start, start + nbytes, BLOCK), result.target.blocks, strict=True):
                mine[low, min(low + BLOCK, start + nbytes)] = digest
    try:
        with open_checkpoint(made, format=made_by.reader, cache=False) as again, writing(INSIDE):
            write_manifest(again, inside=True, known=known, threads=threads)
    except (OpenError, UsageError) as error:
        raise WriteError(f"what was written has got no manifest, and was not kept: {error}") from None


def _tensors(
    job: Job, selection: Selection, keys: Sequence[str], written: list[list[Written]] | None
) -> tuple[TensorReport, ...]:
    """By position in the source, then file; under the names by which the target's reader finds them."""
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
            found.append((tensor, TensorReport(
                catalog.keys[tensor], called[tensor], one.name, ALL[catalog.dtype[tensor]].name,
                pieces.dtype_of(at).name, pieces.shape_of(at), int(pieces.nbytes[at]),
                None if result is None else result.source.hex, None if result is None else result.target.hex,
                *((error.changed, error.overflowed, error.max_abs) if error is not None else ()),
            )))  # fmt: skip
    return tuple(one for _, one in sorted(found, key=lambda pair: pair[0]))
