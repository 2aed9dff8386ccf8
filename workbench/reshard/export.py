"""Exports: a checkpoint of any readable format as files of another, whole tensors, bit for bit.

::

    checkpoint ─select, role─► tensors ─rename, dtype─► pieces ─writer─► file maps ─engine─► temp ─rename─► dest
                                                             no tensor byte is read until here

Whatever can be refused is refused before the first byte is written: names that collide, types the target lacks, holes,
a target that exists, a disk without room.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from workbench import formats
from workbench.checkpoint import Checkpoint, open
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.place import Place
from workbench.core.scan import Tick
from workbench.core.storage import SourcePool
from workbench.errors import CorruptError, OpenError, UnsupportedFormatError, UsageError, WriteError
from workbench.naming import STATES
from workbench.reshard import casts
from workbench.reshard.engine import Job, Written, prepare
from workbench.reshard.filemap import FileMap, Pieces, no_pieces
from workbench.reshard.report import ExportReport, FileReport, TensorReport
from workbench.reshard.transaction import Staging, check_free, check_room, staging
from workbench.reshard.write_safetensors import MAX_SHARD_SIZE, one_file, shards
from workbench.reshard.write_torch import torch_file

__all__ = ["FORMATS", "Rename", "export"]

FORMATS = ("safetensors", "torch")
Rename = Mapping[str, str] | Callable[[str], str] | str
#: Files beside Hugging Face weights that belong to the model, not to how it is stored.
PASSED = re.compile(
    r"(?:config|generation_config|adapter_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|"
    r"special_tokens_map|added_tokens|vocab|chat_template)\.json|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|"
    r"merges\.txt|vocab\.txt|chat_template\.jinja"
)
MAX_PASSED = 256 << 20  #: bytes
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
    dtype: object | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    verify: bool = False,
    threads: int | None = None,
    tick: Tick | None = None,
    dry_run: bool = False,
) -> ExportReport:
    """Write whole tensors of a checkpoint into files of another format.

    The target appears under its name only when it is complete and on the disk; a failure, a signal or a kill leaves
    what was there before.

    Args:
        dest: for ``safetensors`` a folder, or one file where the name ends in ``.safetensors``; for ``torch`` a file.
        format: ``safetensors`` or ``torch`` (a ``torch.save`` of a flat dict).
        select: regular expressions; tensors whose key matches one of them somewhere.
        role: ``model`` for all that a model loads (parameters, buffers, scales, adapters), one role (``exp_avg`` …), or
            ``None`` for every tensor.
        rename: key → name, as a mapping (others keep theirs) or a function; or ``fqn`` for parameters' own names.
        dtype: cast floats of 16, 32 and 64 bits to ``bfloat16``, ``float16`` or ``float32``.
        max_shard_size: bytes of tensors a file, or ``5GB``, ``500MB``, ``2GiB``; safetensors folders only.
        overwrite: replace a checkpoint or file that has the name.
        verify: read the target again before it is made visible, and compare every fingerprint.
        threads: how many work side by side; by default as many as this process may use cores, at most 8.
        tick: told the share of bytes that is done, in the caller's thread; raising there ends the export.
        dry_run: only plan; everything that would be refused is refused.

    Raises:
        UnsupportedFormatError: a format that is not written, or an element type that it lacks.
        UsageError: names that collide, nothing selected, a target that contains the source.
        WriteError: the target exists, there is no room, or the system refuses.
        HoleError, OpenError: a tensor cannot be read.
    """
    began = time.perf_counter()
    target = os.fspath(dest)
    folder = format == "safetensors" and not target.endswith(".safetensors")
    if format not in FORMATS:
        raise UnsupportedFormatError(f"cannot write format {format!r}; choose {', '.join(FORMATS)}")
    real = os.path.realpath(os.path.expanduser(target))
    _check_place(ckpt, real, folder, overwrite)
    pieces, positions = _pieces(ckpt, select, role, rename, dtype)
    notes: list[str] = []
    copied = _passed(ckpt, positions, pieces, notes) if folder else []
    if format == "torch":
        maps = [torch_file(pieces, os.path.basename(real))]
    elif folder:
        maps = [*shards(pieces, max_shard_size=_size(max_shard_size)), *copied]
    else:
        maps = [one_file(pieces, os.path.basename(real))]
    direct = SourcePool(Place(ckpt.path), ckpt.catalog.files, ckpt.catalog.file_stats, "pread")
    job = prepare(ckpt.payloads, maps, direct)

    written: list[list[Written]] | None = None
    if dry_run:
        check_room(os.path.dirname(real), job.nbytes)
    else:
        with staging(real, folder=folder, nbytes=job.nbytes, overwrite=overwrite) as made:
            paths = [os.path.join(made.path, one.name) for one in maps] if folder else [made.path]
            written = job.run(paths, threads=threads, tick=tick)
            if verify:
                _verify(made, format, maps, written, threads)
    return ExportReport(
        path=target,
        format=format,
        files=tuple(FileReport(one.name, one.size, len(one.pieces)) for one in maps),
        tensors=_tensors(job, written),
        read_nbytes=job.read_nbytes,
        copied=tuple(one.name for one in copied),
        left_out=tuple(ckpt.objects),
        verified=verify and not dry_run,
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
        notes=tuple(notes),
    )


# ---- what is written -------------------------------------------------------------------------------------------------


def _pieces(
    ckpt: Checkpoint, select: str | Sequence[str] | None, role: str | None, rename: Rename | None, dtype: object | None
) -> tuple[Pieces, list[int]]:
    catalog = ckpt.catalog
    keep = np.array([_has_role(f, r, role) for f, r in zip(ckpt.fqns, ckpt.roles, strict=True)], bool)
    if select is not None:
        patterns = [select] if isinstance(select, str) else list(select)
        try:
            hits = [catalog.match(pattern) for pattern in patterns]
        except re.error as error:
            raise UsageError(f"select={select!r} is no regular expression: {error}") from None
        keep &= np.isin(np.arange(len(catalog)), np.concatenate([np.empty(0, np.int64), *hits]))
    positions = np.flatnonzero(keep)
    if not len(positions):
        roles = ", ".join(sorted(set(ckpt.roles))) or "none"
        raise UsageError(f"no tensor is selected by select={select!r}, role={role!r}; roles that are there: {roles}")
    names = [_name(catalog.keys[t], ckpt.fqns[t], rename) for t in positions.tolist()]
    codes = catalog.dtype[positions].copy()
    if dtype is not None:
        wanted = casts.target(dtype)
        codes[np.array([ALL[code].name in casts.SOURCES for code in codes.tolist()])] = wanted.code
    return Pieces.whole(catalog, positions, names=names, dtype=codes), positions.tolist()


def _has_role(fqn: str | None, role: str, wanted: str | None) -> bool:
    if wanted != "model":
        return wanted is None or role == wanted
    return role not in _NOT_MODEL and (role != "other" or fqn is not None)


def _name(key: str, fqn: str | None, rename: Rename | None) -> str:
    if rename is None:
        return key
    if isinstance(rename, str):
        if rename != "fqn":
            raise UsageError(f"rename={rename!r}: choose 'fqn', or give a mapping or a function")
        return fqn or key
    new = rename.get(key, key) if isinstance(rename, Mapping) else rename(key)
    if not isinstance(new, str) or not new:
        raise UsageError(f"rename makes {new!r} of {key!r}; it has to be a text")
    return new


def _size(text: int | str) -> int:
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)?\s*", text, re.IGNORECASE)
        if match is None:
            raise UsageError(f"max_shard_size={text!r}: bytes, or a number with KB, MB, GB, TB, KiB … TiB")
        return int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    return text


def _passed(ckpt: Checkpoint, positions: list[int], pieces: Pieces, notes: list[str]) -> list[FileMap]:
    """The model's small files, as maps of literals; ``config.json`` names the new element type after a cast."""
    place = Place(ckpt.path)
    if place.file is not None:
        return []
    found = []
    for name, stat in place.files.items():
        if not PASSED.fullmatch(name) or stat.size > MAX_PASSED:
            continue
        data = place.read(name)
        if name == "config.json":
            data = _retyped(ckpt.catalog, positions, pieces, data, notes)
        none = no_pieces(pieces.shape.shape[1])
        found.append(FileMap(name, len(data), ((0, data),), none, none.ndim))
    return found


def _retyped(catalog: Catalog, positions: list[int], pieces: Pieces, data: bytes, notes: list[str]) -> bytes:
    """``config.json`` with the type that its tensors were cast to; unchanged where it named another to begin with."""
    changed = {
        (ALL[old].name, ALL[new].name)
        for old, new in zip(catalog.dtype[positions].tolist(), pieces.dtype.tolist(), strict=True)
        if old != new
    }
    try:
        config = json.loads(data)
    except ValueError:
        return data
    for key in ("torch_dtype", "dtype"):
        new = next((new for old, new in changed if isinstance(config, dict) and config.get(key) == old), None)
        if new is not None:
            notes.append(f"config.json: {key} is {new} now, was {config[key]}")
            config[key] = new
            data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return data


# ---- where it goes ---------------------------------------------------------------------------------------------------


def _check_place(ckpt: Checkpoint, real: str, folder: bool, overwrite: bool) -> None:
    source = os.path.realpath(os.path.expanduser(ckpt.path))
    if source == real or source.startswith(real.rstrip(os.sep) + os.sep):
        raise UsageError(f"the target {real!r} is, or contains, the checkpoint that is exported; choose another")
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


def _verify(
    made: Staging, format: str, maps: Sequence[FileMap], written: list[list[Written]], threads: int | None
) -> None:
    """Read everything again, through the reader."""
    reader = "torch_save" if format == "torch" else "safetensors"
    with open(made.path, format=reader, cache=False) as again:
        found = {again.catalog.keys[t]: one.hex for t, one in tensor_fingerprints(again.payloads, threads=threads)}
    for one, results in zip(maps, written, strict=True):
        for name, result in zip(one.pieces.names, results, strict=True):
            if found.get(name) != result.target.hex:
                raise CorruptError(
                    f"tensor {name!r} in {one.name!r} is not what was written: fingerprint {found.get(name)} "
                    f"instead of {result.target.hex}; the disk or its driver failed, and nothing was kept"
                )


def _tensors(job: Job, written: list[list[Written]] | None) -> tuple[TensorReport, ...]:
    """By position in the source."""
    catalog, found = job.payloads.catalog, []
    for file, one in enumerate(job.maps):
        pieces = one.pieces
        for at, name in enumerate(pieces.names):
            tensor = int(pieces.tensor[at])  # whole tensors: one box each
            result = written[file][at] if written is not None else None
            error = None if result is None else result.cast
            found.append((tensor, TensorReport(
                catalog.keys[tensor], name, one.name, catalog.dtype_of(tensor).name, pieces.dtype_of(at).name,
                pieces.shape_of(at), int(pieces.nbytes[at]),
                None if result is None else result.source.hex, None if result is None else result.target.hex,
                *((error.changed, error.overflowed, error.max_abs) if error is not None else ()),
            )))  # fmt: skip
    return tuple(one for _, one in sorted(found, key=lambda pair: pair[0]))


#: Roles of the optimizer, of averages and of the trainer.
_NOT_MODEL: frozenset[str] = frozenset({*STATES.values(), "ema", "rng"})
