"""``paddle.distributed.save_state_dict``: shards of every rank, and one pickle that describes them.

::

    0.metadata       pickle of Metadata (dist_metadata.py): the file of each box of each tensor
    0_0.distcp       rank 0: a paddle.save dict of its shards under their bare keys │ 0_0.safetensors
    1_0.distcp

    flattened_range [a, b) counts in the row-major flattening of local_shape, whose box starts at global_offset:

        global (4, 6), local (4, 3) at (0, 3), range [4, 9):     . . . | . . .
                                                                 . . . | . a a
                                                                 . . . | b b b
                                                                 . . . | . . .

Every distinct shard is stored once, on the rank with the fewest so far, or with ``save_replicas=True`` on every rank
that has it. Paddle does not overwrite metadata, so a second save to a folder leaves the first one's metadata next to
its own data (paddle loads this silently). Therefore every shard is compared with its file.

Step, world size and mesh are not stored; ranks come from file names. PaddleFormers puts such folders into
``model_state/``, ``optimizer_state/``, ``master_weight/`` and ``ema_state/``; these names are prefixes of the keys.
Source: paddlepaddle 3.3.1 ``distributed/flex_checkpoint/dcp``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.build import CatalogBuilder, merge
from workbench.core.catalog import Catalog
from workbench.core.codecs import RAW
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place, stat_or_absent
from workbench.core.words import plural
from workbench.errors import (
    CorruptError,
    IncompleteError,
    NotACheckpointError,
    TruncatedError,
    UnsupportedFormatError,
)
from workbench.formats import Format
from workbench.formats.paddle import names as paddle_names
from workbench.formats.paddle import tree as paddle_tree
from workbench.formats.paddle.dist_metadata import Metadata, decode
from workbench.formats.paddle.pickle import load
from workbench.formats.safetensors import header as safetensors_header

PARTS = ("model_state", "optimizer_state", "master_weight", "ema_state")  #: PaddleFormers
MAX_NAMED = 4
_METADATA = re.compile(r"(\d+)\.metadata")
_DATA = re.compile(r"(\d+)_(\d+)\.(distcp|safetensors)")


@dataclass(frozen=True, slots=True)
class FileShard:
    """One shard as stored in a data file."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int
    codec: int = RAW
    strides: tuple[int, ...] | None = None


def detect(place: Place) -> bool:
    """Return whether the folder has ``N.metadata`` or ``R_N.distcp``, or PaddleFormers' subfolders with them."""
    if place.file is not None:
        return False
    return _is_save(place) or bool(_parts(place))


def missing(place: Place) -> str:
    """Return whether a finished save's metadata is missing."""
    if any(_METADATA.fullmatch(name) for name in place.files) or "model_state" in place.folders:
        return ""
    return "N.metadata is missing"


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every tensor.

    Raises:
        IncompleteError: there are data files but no metadata: the save was interrupted.
        CorruptError: the metadata contradicts itself, or is from another save than the data.
        UnsafeError: a bomb, or the metadata names a file outside the folder.
    """
    if _is_save(place):
        return _read(place)
    found = [(f"{name}.", name, _read(place.sub(name))) for name in _parts(place)]
    if not found:
        raise NotACheckpointError(f"{place.path!r} has no N.metadata, nor do any of the subfolders {', '.join(PARTS)}")
    notes = [f"{name}: {note}" for _, name, part in found for note in part.meta["notes"]]
    merged = merge("paddle_dist", found, {"step": None, "world_size": None, "notes": notes, "mesh": _mesh()})
    return _parts_named(merged, [(name, part) for _, name, part in found])


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the step inferred from the powers of beta (``beta_pow``); the format stores only tensors."""
    if not any(role in ("beta1_pow", "beta2_pow") for role in catalog.roles or []):
        return {}
    return LazyMap({"beta_pow": lambda: paddle_names.step_facts(place, catalog)})


# ---- files ---------------------------------------------------------------------------------------------------------


def _is_save(place: Place) -> bool:
    return any(
        _METADATA.fullmatch(name) or (_DATA.fullmatch(name) and name.endswith(".distcp")) for name in place.files
    )


def _parts(place: Place) -> list[str]:
    return [name for name in PARTS if name in place.folders and _is_save(place.sub(name))]


def _chosen(place: Place, notes: list[str]) -> str:
    """Return the metadata with the highest id, as paddle does, by full name (paddle's ``endswith`` takes 10 for 0)."""
    ids = sorted(int(match[1]) for name in place.files if (match := _METADATA.fullmatch(name)))
    if not ids:
        raise IncompleteError(
            f"{place.path!r} has .distcp files but no N.metadata: the save was interrupted before it was written; use "
            "an earlier step"
        )
    if len(ids) > 1:
        notes.append(f"the folder holds {len(ids)} saves ({', '.join(map(str, ids[:MAX_NAMED]))} …); {ids[-1]} is read")
    return next(name for name in place.files if (match := _METADATA.fullmatch(name)) and int(match[1]) == ids[-1])


# ---- data ----------------------------------------------------------------------------------------------------------


def _read(place: Place) -> Catalog:
    notes: list[str] = []
    name = _chosen(place, notes)
    meta = decode(place.read(name), repr(name))
    builder = CatalogBuilder("paddle_dist", place)
    builder.file(name, metadata=True)
    held = {file: _held(builder, place, file, notes) for file in dict.fromkeys(row[-1] for row in meta.rows)}
    _stale(meta, held, name, notes)
    dtypes: dict[str, DType] = {}
    for row in meta.rows:
        key, shards = row[0], held[row[-1]]
        if key not in meta.tensors:
            raise CorruptError(f"{name!r}: storage_metadata names {key!r}, which state_dict_metadata lacks")
        if shards is not None:
            dtypes[key] = _checked(name, row, shards[key], meta.tensors[key][1])
    dtypes |= {key: _dtype(dtype_name, name, key) for key, (_, dtype_name) in meta.tensors.items() if key not in dtypes}
    _chunks(builder, meta, held, dtypes)
    _add_notes(meta, notes, name)
    catalog = builder.build({"step": None, "world_size": None, "notes": notes, "mesh": _mesh()})
    fqns, roles = paddle_names.resolve(catalog.keys, meta.paths, {}, {})
    return replace(catalog, fqns=fqns, roles=roles)


def _held(builder: CatalogBuilder, place: Place, file: str, notes: list[str]) -> dict[str, FileShard] | None:
    """Return the shards of one data file by key; ``None`` if it is missing or truncated."""
    stat = stat_or_absent(place, file)
    builder.file(file, metadata=stat.size >= 0)
    if stat.size < 0:
        return None
    try:
        if file.endswith(".safetensors"):
            header = safetensors_header.parse(place, file, cut=True)
            return {
                entry.name: FileShard(_bf16(entry.dtype), entry.shape, entry.start, entry.stop)
                for entry in header.entries
            }
        loaded = load(place, file)
    except TruncatedError as error:
        notes.append(f"{error}: its shards are lost")
        return None
    found = {}
    for stored in paddle_tree.tensors(loaded, repr(file)):
        ref = stored.pieces[0]
        if len(stored.pieces) > 1:
            raise UnsupportedFormatError(f"{file!r}: shard {stored.key!r} is split into slices (pickle protocol 2)")
        found[stored.key] = FileShard(
            ref.element(), stored.shape, ref.span.start, ref.span.stop, ref.codec(), ref.strides()
        )
    return found


def _bf16(dtype: DType) -> DType:
    """Map uint16 to bfloat16: numpy lacks it, so paddle stores its bits as ``uint16``, also in some safetensors."""
    return by_name("bfloat16") if dtype.name == "uint16" else dtype


def _stale(meta: Metadata, held: Mapping[str, Any], name: str, notes: list[str]) -> None:
    """Report tensors that only the metadata or only the data file has."""
    expected: dict[str, set[str]] = {}
    for key, *_, file in meta.rows:
        expected.setdefault(file, set()).add(key)
    for file, keys in expected.items():
        if held[file] is None:
            continue
        gone, new = sorted(keys - set(held[file])), sorted(set(held[file]) - keys)
        if gone:
            extra = f" and holds {len(new)} others, first {new[0]!r}" if new else ""
            raise CorruptError(
                f"{name!r} is not the metadata of {file!r}: the file lacks {len(gone)} of its tensors, first "
                f"{gone[0]!r}{extra}; two saves were written to one folder, and paddle kept the metadata of the first"
            )
        if new:
            notes.append(
                f"{file!r} holds {plural(len(new), 'tensor')} that {name!r} lacks, first {new[0]!r}: two saves may "
                "have been written to one folder; the listed tensors have the shapes of the metadata"
            )


def _checked(name: str, row: tuple[Any, ...], shard: FileShard, dtype_name: str) -> DType:
    """Check the shard's shape and type in the file against the metadata, and return its type."""
    key, offset, local, flat, file = row
    if flat is not None and not 0 <= flat[0] <= flat[1] <= _numel(local):
        raise CorruptError(
            f"{name!r}: {key!r} at {offset}: range {list(flat)} is outside a shard of shape {list(local)}"
        )
    expected = local if flat is None else (flat[1] - flat[0],)
    # a flat range may be stored in any shape with as many elements, a scalar with or without an axis
    loose = flat is not None or _numel(expected) == 1
    if shard.shape != expected and not (loose and _numel(shard.shape) == _numel(expected)):
        raise CorruptError(
            f"{key!r} at {offset} has shape {list(expected)} in {name!r} but {list(shard.shape)} in {file!r}: "
            "two saves were written to one folder, and paddle kept the metadata of the first"
        )
    dtype = _dtype(dtype_name, name, key) if dtype_name else shard.dtype
    if dtype != shard.dtype and not (
        "float8" in dtype.name and shard.dtype.name in ("int8", "uint8")
    ):  # pickled as int8
        raise CorruptError(
            f"{key!r} is {dtype} in {name!r} but {shard.dtype} in {file!r}: they are from different saves"
        )
    return dtype


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _dtype(dtype_name: str, name: str, key: str) -> DType:
    try:
        return _bf16(by_name(dtype_name.removeprefix("paddle.")))
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{name!r}: tensor {key!r}: {error}") from None


def _chunks(
    builder: CatalogBuilder,
    meta: Metadata,
    held: Mapping[str, dict[str, FileShard] | None],
    dtypes: Mapping[str, DType],
) -> None:
    """Add rows of all shards; those of a missing or truncated file are beyond its end, so opening reports them."""
    position = {key: builder.tensor(key, dtypes[key], shape) for key, (shape, _) in meta.tensors.items()}
    ends = {file: max(stat_or_absent(builder.place, file).size, 0) for file in held}
    ranks = {file: int(match[1]) if (match := _DATA.fullmatch(file)) else -1 for file in held}
    for key, offset, local, flat, file in meta.rows:
        shard = (held[file] or {}).get(key)
        if shard is None:
            shard = FileShard(
                dtypes[key], local, ends[file], ends[file] + max(1, nbytes_of(dtypes[key], _numel(local)))
            )
        where = file, shard.start, shard.stop
        if flat is None:
            builder.chunk(key, offset, local, *where, codec=shard.codec, rank=ranks[file], strides=shard.strides)
            continue
        shape, base = local or (1,), offset or (0,)
        _, offsets, sizes, at = box.flat_ranges(np.array([shape]), np.array([flat[0]]), np.array([flat[1]]))
        builder.block(
            np.full(len(at), position[key]),
            offsets + np.array(base),
            sizes,
            builder.file(file),
            *where[1:],
            codec=shard.codec,
            rank=ranks[file],
            inner=(at - flat[0]) * dtypes[key].itemsize,
        )


def _add_notes(meta: Metadata, notes: list[str], name: str) -> None:
    if meta.lost:
        notes.append(f"{meta.lost} shards of {name!r} are not stored in any file: their elements are holes")
    if meta.inferred:
        notes.append(
            f"{meta.inferred} tensors have no global shape in {name!r} (older paddle); it is inferred from their shards"
        )


def _mesh() -> dict[str, Any]:
    return {
        "axes": {},
        "ranks": {},
        "unknown": ["dp", "pp", "sharding", "sep", "cp", "mp"],
        "source": "paddle.distributed stores no mesh; ranks come from file names",
    }


def _parts_named(merged: Catalog, found: list[tuple[str, Catalog]]) -> Catalog:
    """Name tensors across PaddleFormers' folders: match optimizer state and masters to the model's parameters."""
    fqns: list[str | None] = []
    roles: list[str] = []
    for name, part in found:
        for key, role in zip(part.keys, part.roles or [], strict=True):
            state = paddle_names.split_state(key)
            if name == "master_weight":
                fqns.append(paddle_names.master_of(key))
                roles.append("master")
            elif state is not None:
                fqns.append(state[0])
                roles.append(state[1])
            elif name == "optimizer_state" and (base := paddle_names.master_of(key)) != key:
                fqns.append(base)
                roles.append("master")
            else:
                fqns.append(key)
                roles.append("ema" if name == "ema_state" else role)
    return replace(merged, fqns=fqns, roles=roles)


FORMAT = Format(
    name="paddle_dist",
    title="paddle.distributed",
    marks="N.metadata, R_N.distcp or .safetensors",
    read_from="paddlepaddle 3.3",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    own_bytes=True,
    framework="paddle",
)
