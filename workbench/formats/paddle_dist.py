"""``paddle.distributed.save_state_dict``: shards of every rank, and one pickle that says what they are.

::

    0.metadata       pickle of Metadata (paddle_dist_metadata.py): which box of which tensor is in which file
    0_0.distcp       rank 0: a paddle.save dict of its shards under their bare keys │ 0_0.safetensors
    1_0.distcp

    flattened_range [a, b) counts in the row-major flattening of local_shape, whose box sits at global_offset:

        global (4, 6), local (4, 3) at (0, 3), range [4, 9):     . . . | . . .
                                                                 . . . | . a a
                                                                 . . . | b b b
                                                                 . . . | . . .

Every distinct shard is stored once, on the rank with the fewest so far; with ``save_replicas=True`` by all that have
it. Metadata is written only where there is none, so a second save into one folder leaves the first one's metadata
beside the second one's data (paddle loads that without a word): every shard is compared with what its file holds.

Neither step nor world size nor mesh are stored; ranks are those of the files' names. PaddleFormers puts such folders
into ``model_state/``, ``optimizer_state/``, ``master_weight/`` and ``ema_state/``; their names stand before the keys.
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
from workbench.core.catalog import RAW, Catalog
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place, stat_or_absent
from workbench.errors import (
    CorruptError,
    IncompleteError,
    NotACheckpointError,
    TruncatedError,
    UnsupportedFormatError,
)
from workbench.formats import paddle_names, paddle_tree, safetensors_header
from workbench.formats.paddle_dist_metadata import Metadata, decode
from workbench.formats.paddle_pickle import load

__all__ = ["detect", "read_catalog", "read_objects"]

PARTS = ("model_state", "optimizer_state", "master_weight", "ema_state")  #: PaddleFormers
MAX_NAMED = 4
_METADATA = re.compile(r"(\d+)\.metadata")
_DATA = re.compile(r"(\d+)_(\d+)\.(distcp|safetensors)")


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard as a data file holds it."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int
    codec: int = RAW
    strides: tuple[int, ...] | None = None


def detect(place: Place) -> bool:
    """A folder with ``N.metadata`` or ``R_N.distcp``, or with PaddleFormers' folders of them."""
    if place.file is not None:
        return False
    return _is_save(place) or bool(_parts(place))


def read_catalog(place: Place) -> Catalog:
    """Columns of every tensor.

    Raises:
        IncompleteError: data files without metadata: the save was interrupted.
        CorruptError: metadata that contradicts itself, or is of another save than the data beside it.
        UnsafeError: a bomb, or metadata that names a file outside the folder.
    """
    if _is_save(place):
        return _read(place)
    found = [(f"{name}.", name, _read(place.sub(name))) for name in _parts(place)]
    if not found:
        raise NotACheckpointError(
            f"{place.path!r} has neither N.metadata nor one of the folders {', '.join(PARTS)} with it"
        )
    notes = [f"{name}: {note}" for _, name, part in found for note in part.meta["notes"]]
    merged = merge("paddle_dist", found, {"step": None, "world_size": None, "notes": notes, "mesh": _mesh()})
    return _parts_named(merged, [(name, part) for _, name, part in found])


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """What the powers of beta say about the step (``beta_pow``); the format stores tensors only."""
    if not any(role in ("beta1_pow", "beta2_pow") for role in catalog.roles or []):
        return {}
    return LazyMap({"beta_pow": lambda: paddle_names.step_facts(place, catalog)})


# ---- which files ---------------------------------------------------------------------------------------------------


def _is_save(place: Place) -> bool:
    return any(
        _METADATA.fullmatch(name) or (_DATA.fullmatch(name) and name.endswith(".distcp")) for name in place.files
    )


def _parts(place: Place) -> list[str]:
    return [name for name in PARTS if name in place.folders and _is_save(place.sub(name))]


def _chosen(place: Place, notes: list[str]) -> str:
    """The metadata of the highest id, as paddle chooses; matched whole (paddle's ``endswith`` takes 10 for 0)."""
    ids = sorted(int(match[1]) for name in place.files if (match := _METADATA.fullmatch(name)))
    if not ids:
        raise IncompleteError(
            f"{place.path!r} has .distcp files but no N.metadata: the save was interrupted before it was written; use "
            "an earlier step"
        )
    if len(ids) > 1:
        notes.append(
            f"{len(ids)} saves lie in the folder ({', '.join(map(str, ids[:MAX_NAMED]))} …); {ids[-1]} is read"
        )
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
        key, there = row[0], held[row[-1]]
        if key not in meta.tensors:
            raise CorruptError(f"{name!r}: storage_metadata names {key!r}, which state_dict_metadata does not have")
        if there is not None:
            dtypes[key] = _checked(name, row, there[key], meta.tensors[key][1])
    dtypes |= {key: _dtype(told, name, key) for key, (_, told) in meta.tensors.items() if key not in dtypes}
    _chunks(builder, meta, held, dtypes)
    _tell(meta, notes, name)
    catalog = builder.build({"step": None, "world_size": None, "notes": notes, "mesh": _mesh()})
    fqns, roles = paddle_names.resolve(catalog.keys, meta.paths, {}, {})
    return replace(catalog, fqns=fqns, roles=roles)


def _held(builder: CatalogBuilder, place: Place, file: str, notes: list[str]) -> dict[str, Shard] | None:
    """The shards of one data file by key; ``None`` for one that is absent or cut off."""
    stat = stat_or_absent(place, file)
    builder.file(file, metadata=stat.size >= 0)
    if stat.size < 0:
        return None
    try:
        if file.endswith(".safetensors"):
            header = safetensors_header.parse(place, file, cut=True)
            return {
                entry.name: Shard(_bf16(entry.dtype), entry.shape, entry.start, entry.stop) for entry in header.entries
            }
        loaded = load(place, file)
    except TruncatedError as error:
        notes.append(f"{error}: its shards are lost")
        return None
    found = {}
    for stored in paddle_tree.tensors(loaded, repr(file)):
        ref = stored.pieces[0]
        if len(stored.pieces) > 1:
            raise UnsupportedFormatError(f"{file!r}: shard {stored.key!r} is cut into slices (pickle protocol 2)")
        found[stored.key] = Shard(
            ref.element(), stored.shape, ref.span.start, ref.span.stop, ref.codec(), ref.strides()
        )
    return found


def _bf16(dtype: DType) -> DType:
    """numpy has no bfloat16: paddle stores its bits as ``uint16``, in pickles and in some safetensors files."""
    return by_name("bfloat16") if dtype.name == "uint16" else dtype


def _stale(meta: Metadata, held: Mapping[str, Any], name: str, notes: list[str]) -> None:
    """Names that only one of metadata and data knows."""
    wanted: dict[str, set[str]] = {}
    for key, *_, file in meta.rows:
        wanted.setdefault(file, set()).add(key)
    for file, keys in wanted.items():
        if held[file] is None:
            continue
        gone, new = sorted(keys - set(held[file])), sorted(set(held[file]) - keys)
        if gone:
            extra = f" and holds {len(new)} that are not in it, first {new[0]!r}" if new else ""
            raise CorruptError(
                f"{name!r} is not the metadata of {file!r}: the file lacks {len(gone)} of its tensors, first "
                f"{gone[0]!r}{extra}; two saves were written into one folder, and paddle kept the metadata of the first"
            )
        if new:
            notes.append(
                f"{file!r} holds {len(new)} tensors that {name!r} does not have, first {new[0]!r}: two saves may have "
                "been written into one folder; what is listed has the shapes that the metadata says"
            )


def _checked(name: str, row: tuple[Any, ...], there: Shard, told: str) -> DType:
    """The shard's type, once shape and type in the file are what the metadata says."""
    key, offset, local, flat, file = row
    if flat is not None and not 0 <= flat[0] <= flat[1] <= _numel(local):
        raise CorruptError(
            f"{name!r}: {key!r} at {offset}: range {list(flat)} is not inside a shard of shape {list(local)}"
        )
    wanted = local if flat is None else (flat[1] - flat[0],)
    # a flat range may be stored in any shape of as many elements, a scalar with an axis or without
    loose = flat is not None or _numel(wanted) == 1
    if there.shape != wanted and not (loose and _numel(there.shape) == _numel(wanted)):
        raise CorruptError(
            f"{name!r} says that {key!r} at {offset} has shape {list(wanted)}, {file!r} holds {list(there.shape)}: "
            "they are of different saves; two were written into one folder, and paddle kept the metadata of the first"
        )
    dtype = _dtype(told, name, key) if told else there.dtype
    if dtype != there.dtype and not (
        "float8" in dtype.name and there.dtype.name in ("int8", "uint8")
    ):  # pickled as int8
        raise CorruptError(
            f"{name!r} says that {key!r} is {dtype}, {file!r} holds {there.dtype}: they are from different saves"
        )
    return dtype


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _dtype(told: str, name: str, key: str) -> DType:
    try:
        return _bf16(by_name(told.removeprefix("paddle.")))
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{name!r}: tensor {key!r}: {error}") from None


def _chunks(
    builder: CatalogBuilder, meta: Metadata, held: Mapping[str, dict[str, Shard] | None], dtypes: Mapping[str, DType]
) -> None:
    """Rows of all shards; those of an absent or cut file lie beyond its end, where opening it will miss them."""
    position = {key: builder.tensor(key, dtypes[key], shape) for key, (shape, _) in meta.tensors.items()}
    ends = {file: max(stat_or_absent(builder.place, file).size, 0) for file in held}
    ranks = {file: int(match[1]) if (match := _DATA.fullmatch(file)) else -1 for file in held}
    for key, offset, local, flat, file in meta.rows:
        there = (held[file] or {}).get(key)
        if there is None:
            there = Shard(dtypes[key], local, ends[file], ends[file] + max(1, nbytes_of(dtypes[key], _numel(local))))
        where = file, there.start, there.stop
        if flat is None:
            builder.chunk(key, offset, local, *where, codec=there.codec, rank=ranks[file], strides=there.strides)
            continue
        shape, base = local or (1,), offset or (0,)
        _, offsets, sizes, at = box.flat_ranges(np.array([shape]), np.array([flat[0]]), np.array([flat[1]]))
        builder.block(
            np.full(len(at), position[key]), offsets + np.array(base), sizes, builder.file(file), *where[1:],
            codec=there.codec, rank=ranks[file], inner=(at - flat[0]) * dtypes[key].itemsize,
        )  # fmt: skip


def _tell(meta: Metadata, notes: list[str], name: str) -> None:
    if meta.lost:
        notes.append(f"{meta.lost} shards of {name!r} are stored in no file: their elements are holes")
    if meta.inferred:
        notes.append(
            f"{meta.inferred} tensors have no global shape in {name!r} (older paddle): it is the end of their shards"
        )


def _mesh() -> dict[str, Any]:
    return {
        "axes": {}, "ranks": {}, "unknown": ["dp", "pp", "sharding", "sep", "cp", "mp"],
        "source": "paddle.distributed stores no mesh; ranks are those of the files' names",
    }  # fmt: skip


def _parts_named(merged: Catalog, found: list[tuple[str, Catalog]]) -> Catalog:
    """Names across PaddleFormers' folders: optimizer and masters are joined to the model's parameters."""
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
