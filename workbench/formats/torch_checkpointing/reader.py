"""torch_checkpointing (Meta; the successor of DCP), in the layout of its native writer.

::

    step-10/                        written as tmp_step-10 and renamed after a barrier, if the saver has one
      metadata.pkl                  world size, mesh, placements (metadata.py); absent without a resharder, and in all
                                    but the first save of the synchronous saver
      model_0.pt │ model_1.pt …     one file for each item and rank: torch.save, DTensors with their local tensor
      optimizer_0.pt …              replicas are stored by every rank
      train_state_0.pt …            items that hold no tensor are stored by every rank, too
      config_0.json │ blob_0 │ model_0.safetensors          if an item's layout requests it

Keys are ``item.path``. A file's DTensors store their own placements (spec.py), so a save without ``metadata.pkl`` is
read like one with it; if both exist they must agree. The tensors of all ranks that hold the same box are replicas:
equal in a healthy save, and ``verify`` compares them. Generator states (bytes of an item that no metadata describes)
are a rank's own and keep its number: ``rng.cpu@rank1``. So do tensors whose ranks store different shapes.

There is no commit marker but the folder's name. A save that was killed leaves ``tmp_step-10`` with truncated files, and
a saver without a barrier leaves them in ``step-10``. The writer does not call ``fsync``, and stores no checksums except
those of ``torch.save``.

Sources: torch_checkpointing 0.1.1 ``checkpoint_writer.py``, ``checkpoint_layout.py``; files of that version.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog, row_major
from workbench.core.dtypes import by_name
from workbench.core.jsonable import jsonable
from workbench.core.lazymap import LazyMap
from workbench.core.mesh.mesh import MAX_RANKS
from workbench.core.pickles.standins import Opaque, TensorRef
from workbench.core.place import Place, lacking
from workbench.core.words import plural, some_of
from workbench.errors import (
    CorruptError,
    IncompleteError,
    MissingFileError,
    NotACheckpointError,
    TruncatedError,
    UnsafeError,
)
from workbench.formats import Format
from workbench.formats.safetensors import header as safetensors_header
from workbench.formats.torch.file import LegacyFile, declare, load_tree, pruned, tensors_of, tree_name
from workbench.formats.torch_checkpointing import metadata as tc_metadata
from workbench.formats.torch_checkpointing.metadata import SaveMetadata
from workbench.formats.torch_checkpointing.spec import Boxes, Spec, from_dtensor, from_metadata
from workbench.names.optimizer import MOMENTS, name_numbered
from workbench.names.roles import resolve

TEMPORARY = "tmp_"  #: prefix of a folder that is not finished
_FILE = re.compile(r"(.+)_(\d{1,7})\.(pt|json|safetensors)", re.DOTALL)
_WORLD = re.compile(rb"world_size\x94(?:K(.)|M(..)|J(....))", re.DOTALL)
_KINDS = {"pt": "TorchSerialization", "json": "JsonSerialization", "safetensors": "SafetensorsSerialization"}
_MARK = b"torch.distributed.tensor"  #: module of DTensor, in the pickle of a file that has one
HEAD = 256 << 10  #: bytes of a file that are searched for it; data.pkl is the first record of an archive
MOST_BOXES = 1 << 16  #: of all tensors, and one more for each 64 bytes of the files
TAIL = 64  #: bytes at the end of metadata.pkl that have the world size


@dataclass(frozen=True, slots=True)
class _ItemFile:
    """One file of an item."""

    item: str
    rank: int
    name: str
    kind: str


@dataclass
class _LocalTensor:
    """A tensor as one rank stores it."""

    file: str
    rank: int
    spec: Spec
    declared: bool  # whether a DTensor or the metadata states its place
    ref: TensorRef | None = None
    loaded: LegacyFile | None = None
    span: tuple[int, int] = (0, 0)  # bytes of a tensor in safetensors …
    local: tuple[int, ...] = ()  # … and its shape


@dataclass
class _Found:
    """The contents of the files: tensors by path, values without tensors by item and rank, and lost files."""

    notes: list[str] = field(default_factory=list)
    tensors: dict[tuple[Any, ...], list[_LocalTensor]] = field(default_factory=lambda: defaultdict(list))
    objects: dict[str, tuple[str, str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # item → its first value, as JSON
    groups: dict[str, list[Any]] = field(default_factory=dict)  # item → param_groups of the first rank
    room: int = MOST_BOXES  # boxes that there may still be

    def add(self, path: tuple[Any, ...], held: _LocalTensor) -> None:
        """Add a tensor. Its boxes may be those of many, as what a pickle shares costs nothing."""
        self.room -= len(held.spec.boxes)
        if self.room < 0:
            raise UnsafeError(f"{held.file!r} and those before it have far more boxes than bytes of tensors; refused")
        self.tensors[path].append(held)


def detect(place: Place) -> bool:
    """Return whether the folder has files ``{item}_{rank}`` of the ranks from 0 on, written by this library.

    Without ``metadata.pkl``, ``torch.save`` files of this library are distinguished from those of a loop by the name of
    their archive (``archive``, which ``torch.save`` writes into an open file), and for several ranks by a DTensor.
    """
    if place.file is not None:
        return False
    files = _by_name(place)
    if not files:
        return False
    if tc_metadata.NAME in place.files:
        return True
    archives = [one for one in files if one.kind == "TorchSerialization"]
    ranks = {one.rank for one in archives}
    if not archives or ranks != set(range(len(ranks))):
        return False
    if place.name.startswith(TEMPORARY) and all(not place.files[one.name].size for one in archives):
        return True
    first = [one for one in archives if one.rank == 0 and place.files[one.name].size]
    if not first or not all(_is_archive(place, one.name) for one in first[:4]):
        return False
    if len(ranks) == 1 and len({one.item for one in files}) > 1:
        return True
    return any(_MARK in place.head(one.name, HEAD) for one in first)


def missing(place: Place) -> str:
    """Describe a folder that was never renamed, or missing files that other ranks or items have."""
    if place.name.startswith(TEMPORARY):
        return f"the folder was not renamed to {place.name.removeprefix(TEMPORARY)!r}, which is the last step of a save"
    files = _by_name(place)
    items: dict[str, set[int]] = defaultdict(set)
    for one in files:
        items[one.item].add(one.rank)
    world = max(_stored_world(place), *(max(ranks) + 1 for ranks in items.values()), 1)
    lost = [f"{item}_{rank}" for item, ranks in items.items() for rank in range(world) if rank not in ranks]
    if lost and tc_metadata.NAME in place.files:
        known = tc_metadata.read(place)
        named = known.files if known is not None else {}
        lost = [one for one in lost if one.rpartition("_")[0] not in named]  # the metadata state where those are
        paths = [path for by_rank in named.values() for path, _ in by_rank.values()]
        lost += [path for path in paths if not place.exists(path)]
    if lost:
        return f"{lacking(len(lost), world * len(items), 'files')}, first {lost[0]}"
    empty = [one.name for one in files if not place.files[one.name].size]
    return f"{plural(len(empty), 'file', 'are')} empty, first {empty[0]!r}" if empty else ""


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every tensor of every item.

    Raises:
        CorruptError: the files of two ranks, or ``metadata.pkl``, contradict each other.
        IncompleteError: no file can be read.
        UnsafeError: the metadata name a file outside the folder, or a file is far larger when decoded.
    """
    known = tc_metadata.read(place)
    files = _files(place, known)
    if not files:
        raise NotACheckpointError(f"{place.path!r} holds no files {{item}}_{{rank}}")
    found = _Found(room=MOST_BOXES + sum(place.stat(one.name).size for one in files if place.exists(one.name)) // 64)
    builder = CatalogBuilder("torch_checkpointing", place)
    if known is not None:
        builder.file(tc_metadata.NAME, metadata=True)
    for one in files:
        try:
            _read(builder, one, known, found)
        except (TruncatedError, MissingFileError) as error:
            found.lost[one.name] = str(error)
    if len(found.lost) == len(files):
        raise IncompleteError(f"{place.path!r}: no file of the save is complete; {next(iter(found.lost.values()))}")
    ranks = {one.rank for one in files}
    world = known.world_size if known is not None else _world(found, ranks)
    _lose_ranks(files, found, world, known)
    paths = _declare(builder, found, world)
    if place.name.startswith(TEMPORARY):
        found.notes.append(f"the folder's name begins with {TEMPORARY!r}: the save was not finished")
    facts: dict[str, Any] = {
        "world_size": world,
        "notes": found.notes,
        "objects": {name: list(where) for name, where in found.objects.items()},
        **_mesh(found),
    }
    if found.lost:
        name, why = next(iter(found.lost.items()))
        count = len({one.name for one in files} | found.lost.keys())
        facts["incomplete"] = f"{lacking(len(found.lost), count, 'files')} or cut off, first {name!r}: {why}"
    catalog = builder.build(facts)
    fqns, roles = resolve(catalog.keys, {"paths": paths})
    found.notes += _join_ids(catalog, paths, found.groups, fqns, roles)
    return replace(catalog, fqns=fqns, roles=roles)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return each item's non-tensor state, by item; that of other ranks, if it differs, as ``item@rank1``."""
    makers = {name: partial(_value, place, *where) for name, where in catalog.meta.get("objects", {}).items()}
    return LazyMap(makers)


# ---- files ---------------------------------------------------------------------------------------------------------


def _by_name(place: Place) -> list[_ItemFile]:
    """Return the files that are named after an item and a rank."""
    matches = [(name, match) for name in place.files if (match := _FILE.fullmatch(name))]
    found = [_ItemFile(match[1], int(match[2]), name, _KINDS[match[3]]) for name, match in matches]
    return [one for one in found if one.rank < MAX_RANKS]


def _files(place: Place, known: SaveMetadata | None) -> list[_ItemFile]:
    """Return the files that exist or that the metadata name, in order of item and rank."""
    found = {(one.item, one.rank): one for one in _by_name(place)}
    for item, by_rank in (known.files if known is not None else {}).items():
        for rank, (path, kind) in by_rank.items():
            found[item, rank] = _ItemFile(item, rank, path, kind)
    return [found[key] for key in sorted(found)]


def _stored_world(place: Place) -> int:
    """Read the world size at the end of ``metadata.pkl`` without decoding it; 0 if it is not at its usual place."""
    stat = place.files.get(tc_metadata.NAME)
    if stat is None or stat.size < TAIL:
        return 0
    match = _WORLD.search(place.read(tc_metadata.NAME, start=stat.size - TAIL, length=TAIL))
    value = next((part for part in match.groups() if part), b"") if match else b""
    number = int.from_bytes(value, "little")
    return number if number <= MAX_RANKS else 0


def _is_archive(place: Place, name: str) -> bool:
    head = place.head(name, 64)
    return head.startswith(b"PK\x03\x04") and head[30:38] == b"archive/"


def _world(found: _Found, ranks: set[int]) -> int:
    """Infer the number of ranks if it is not stored: as many as have files, or as the largest mesh has."""
    meshes = {held.spec.mesh for group in found.tensors.values() for held in group}
    return max(max(ranks) + 1, *map(prod, meshes), 1)


def _lose_ranks(files: Sequence[_ItemFile], found: _Found, world: int, known: SaveMetadata | None) -> None:
    """Note missing files that a rank should have."""
    if known is not None and any(one.rank >= world for one in files):
        high = next(one for one in files if one.rank >= world)
        raise CorruptError(
            f"file {high.name!r} is of rank {high.rank}, but {tc_metadata.NAME!r} has a world size of {world}; "
            "the files are from different saves"
        )
    items: dict[str, dict[int, str]] = defaultdict(dict)
    for one in files:
        items[one.item][one.rank] = one.name
    for item, by_rank in items.items():
        if known is not None and item in known.files:
            continue  # the metadata name its files
        for rank in range(world):
            if rank not in by_rank and len(found.lost) < MAX_RANKS:
                found.lost[f"{item}_{rank}.pt"] = "it is missing"
    for item in known.groups if known is not None else ():
        if item not in items:
            found.lost[f"{item}_0.pt"] = "it is missing, like those of the other ranks"


# ---- one file ------------------------------------------------------------------------------------------------------


def _read(builder: CatalogBuilder, one: _ItemFile, known: SaveMetadata | None, found: _Found) -> None:
    """Collect the tensors and the value of a file.

    Raises:
        TruncatedError, MissingFileError: it is incomplete.
    """
    place = builder.place
    if not place.stat(one.name).size:
        raise TruncatedError(f"file {one.name!r} is empty")
    builder.file(one.name, metadata=True)
    if one.kind == "SafetensorsSerialization":
        _read_safetensors(place, one, known, found)
    elif one.kind == "TorchSerialization":
        _read_torch(place, one, known, found)
    elif one.kind == "JsonSerialization":
        _object(one, place.read_json(one.name), "json", found)
    elif one.rank == 0:  # bytes unchanged
        found.objects[one.item] = one.name, "raw"


def _read_torch(place: Place, one: _ItemFile, known: SaveMetadata | None, found: _Found) -> None:
    loaded, what = load_tree(place, one.name), repr(one.name)
    found.notes += [f"{what}: {note}" for note in loaded.notes]
    if (value := pruned(loaded, what)) is not None:
        _object(one, value, "torch", found)
    if one.rank == 0 and isinstance(loaded.tree, dict) and isinstance(loaded.tree.get("param_groups"), list):
        found.groups[one.item] = loaded.tree["param_groups"]
    present = set()
    for path, node in tensors_of(loaded, what):
        name = f"tensor {_key((one.item, *path))!r} in {what}"
        group = None if known is None else known.group(one.item, path, one.rank)
        spec = None if group is None or known is None else from_metadata(group, one.rank, name, known.position)
        present.add(path)
        if isinstance(node, Opaque):
            stored = from_dtensor(node, one.rank, name)
            if stored is None:
                continue
            own, ref = stored
            _agree(own, spec, name)
            spec = own
        else:
            ref = node
        held = _LocalTensor(one.name, one.rank, spec or _whole(ref), spec is not None, ref, loaded)
        _check_local(held, ref.shape, name)
        found.add((one.item, *path), held)
    for path, groups in known.groups.get(one.item, {}).items() if known is not None else ():
        if path not in present and known is not None and known.group(one.item, path, one.rank) is not None and groups:
            raise CorruptError(
                f"{tc_metadata.NAME!r} describes tensor {_key((one.item, *path))!r}, which {what} lacks; "
                "the files are from different saves"
            )


def _read_safetensors(place: Place, one: _ItemFile, known: SaveMetadata | None, found: _Found) -> None:
    """Collect local tensors of a safetensors file: only the metadata state which tensors they are parts of."""
    parsed = safetensors_header.parse(place, one.name)
    if parsed.metadata:
        _object(one, dict(parsed.metadata), "safetensors", found)
    groups = known.groups.get(one.item, {}) if known is not None else {}
    dotted = {_key(path): path for path in groups}
    for entry in parsed.entries:
        path = dotted.get(entry.name, (entry.name,))
        name = f"tensor {_key((one.item, *path))!r} in {one.name!r}"
        group = None if known is None else known.group(one.item, path, one.rank)
        spec = None if group is None or known is None else from_metadata(group, one.rank, name, known.position)
        whole = Spec(entry.shape, entry.dtype, entry.shape, _box(entry.shape))
        span = entry.start, entry.stop
        held = _LocalTensor(one.name, one.rank, spec or whole, spec is not None, span=span, local=entry.shape)
        if held.spec.dtype != entry.dtype:
            raise CorruptError(f"{name} is {entry.dtype}, but {tc_metadata.NAME!r} says {held.spec.dtype}")
        _check_local(held, entry.shape, name)
        found.add((one.item, *path), held)


def _whole(ref: TensorRef) -> Spec:
    return Spec(ref.shape, by_name(ref.dtype), ref.shape, _box(ref.shape))


def _box(shape: tuple[int, ...]) -> Boxes:
    origin = (0,) * len(shape)
    return ((origin, shape, origin),)


def _agree(own: Spec, meta: Spec | None, name: str) -> None:
    """Compare a DTensor with its metadata."""
    if meta is None:
        return
    mine = (own.shape, own.dtype.name, own.mesh, own.placements, own.boxes)
    other = (meta.shape, meta.dtype.name, meta.mesh or own.mesh, meta.placements or own.placements, meta.boxes)
    if mine != other:
        raise CorruptError(
            f"{name} is {own.dtype} {own.shape}, [{own.placements}] at {own.coordinate} on a mesh of {own.mesh}, but "
            f"{tc_metadata.NAME!r} says {meta.dtype} {meta.shape}, [{meta.placements}] at {meta.coordinate} on "
            f"{meta.mesh}; the files are from different saves"
        )


def _check_local(held: _LocalTensor, shape: tuple[int, ...], name: str) -> None:
    """Check that a stored tensor has the shape that its placements imply for the rank."""
    spec = held.spec
    if spec.local is not None and spec.local != shape:
        raise CorruptError(
            f"{name} has the shape {shape}, but rank {held.rank} holds {spec.local} of its global shape {spec.shape}; "
            "the file is from another save, or files of two ranks were swapped"
        )
    for _, sizes, at in spec.boxes:
        if len(at) != len(shape) or any(a + n > size for a, n, size in zip(at, sizes, shape, strict=True)):
            raise CorruptError(f"{name} has the shape {shape} and does not hold the part of sizes {sizes} at {at}")
    if held.ref is not None and held.ref.dtype != spec.dtype.name:
        raise CorruptError(f"{name} is {held.ref.dtype}, but {tc_metadata.NAME!r} says {spec.dtype}")


def _object(one: _ItemFile, value: object, kind: str, found: _Found) -> None:
    """Record where a value is stored: the first rank's under the item's name, others only if they differ from it."""
    text = json.dumps(jsonable(value), sort_keys=True)
    first = found.objects.get(one.item)
    if first is None:
        found.objects[one.item], found.first[one.item] = (one.name, kind), text
    elif found.first.get(one.item) != text:
        found.objects[f"{one.item}@rank{one.rank}"] = one.name, kind


def _value(place: Place, name: str, kind: str) -> Any:
    if kind == "json":
        return place.read_json(name)
    if kind == "raw":
        return place.read(name)
    if kind == "safetensors":
        return safetensors_header.parse(place, name).metadata
    return pruned(load_tree(place, name), repr(name))


# ---- all ranks together --------------------------------------------------------------------------------------------


def _declare(builder: CatalogBuilder, found: _Found, world: int) -> dict[str, tuple[Any, ...]]:
    """Declare every tensor, with a chunk for each rank that holds a part. Return the path of each key."""
    paths: dict[str, tuple[Any, ...]] = {}
    separate: list[str] = []
    for path, group in found.tensors.items():
        key = base = _key(path)
        count = 1
        while key in paths:
            count += 1
            key = f"{base}#{count}"
        paths[key] = path
        if _differs_by_rank(group, world):
            del paths[key]
            separate.append(key)
            for held in group:
                paths[f"{key}@rank{held.rank}"] = path
                _chunks(builder, f"{key}@rank{held.rank}", held, found.notes)
            continue
        for held in group:
            _chunks(builder, key, held, found.notes)
    if separate:
        what = f"{len(separate)} tensors are" if len(separate) > 1 else "1 tensor is"
        found.notes.append(
            f"{what} kept separate by rank (name@rank0 …), as generator states are: {some_of(separate, 5)}"
        )
    return {key: path for key, path in paths.items() if key in builder}


def _differs_by_rank(group: Sequence[_LocalTensor], world: int) -> bool:
    """Return whether ranks have tensors of their own: of different shapes, or generator states, which are bytes."""
    if world == 1 or any(held.declared for held in group):
        return False
    shapes = {(held.spec.shape, held.spec.dtype.name) for held in group}
    return len(shapes) > 1 or group[0].spec.dtype.name == "uint8"


def _chunks(builder: CatalogBuilder, key: str, held: _LocalTensor, notes: list[str]) -> None:
    spec = held.spec
    if held.ref is not None and held.loaded is not None:
        shape, boxes = spec.shape, spec.boxes
        declare(builder, held.file, key, held.ref, held.loaded, notes, shape=shape, boxes=boxes, rank=held.rank)
        return
    builder.tensor(key, spec.dtype, spec.shape)
    steps = row_major(held.local)
    for offsets, sizes, at in spec.boxes:
        inner = spec.dtype.itemsize * sum(a * s for a, s in zip(at, steps, strict=True))
        builder.chunk(key, offsets, sizes, held.file, *held.span, rank=held.rank, inner=inner, strides=steps)


def _key(path: Sequence[Any]) -> str:
    return ".".join(map(tree_name, path))


def _mesh(found: _Found) -> dict[str, Any]:
    """Return the largest mesh with named axes."""
    meshes = {(held.spec.mesh, held.spec.names) for group in found.tensors.values() for held in group}
    named = [(mesh, names) for mesh, names in meshes if mesh and len(names) == len(mesh) == len(set(names))]
    if not named:
        return {}
    mesh, names = max(named, key=lambda one: (len(one[0]), one))
    axes = dict(zip(names, mesh, strict=True))
    ranks = {
        held.file: dict(zip(names, held.spec.coordinate, strict=True))
        for group in found.tensors.values()
        for held in group
        if (held.spec.mesh, held.spec.names) == (mesh, names)
    }
    return {"mesh": {"axes": axes, "ranks": ranks, "unknown": [], "source": "the placements of its DTensors"}}


def _join_ids(
    catalog: Catalog,
    paths: Mapping[str, tuple[Any, ...]],
    numbered: Mapping[str, list[Any]],
    fqns: list[str | None],
    roles: Sequence[str],
) -> list[str]:
    """Fill in the fqns of an optimizer's integer ids if they are certain. Return notes about the others."""
    shapes = [catalog.shape_of(position) for position in range(len(catalog))]
    params = {fqn: shapes[p] for p, (fqn, role) in enumerate(zip(fqns, roles, strict=True)) if fqn and role == "param"}
    notes: list[str] = []
    for item, groups in numbered.items():
        if not all(isinstance(group, dict) for group in groups):
            continue
        within = {
            position: (path[2], path[3])
            for position, path in enumerate(map(paths.__getitem__, catalog.keys))
            if path[0] == item and len(path) == 4 and path[1] == "state" and type(path[2]) is int
        }
        moments = {number: shapes[position] for position, (number, state) in within.items() if state in MOMENTS}
        if within:
            numbers = {position: number for position, (number, _) in within.items()}
            notes += name_numbered(fqns, numbers, moments, groups, params, ordered=True, optimizer=item)
    return notes


FORMAT = Format(
    name="torch_checkpointing",
    title="torch_checkpointing",
    marks="metadata.pkl, ITEM_RANK.pt",
    read_from="torch_checkpointing 0.1, layouts 1.0 and 2.0",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    suffixes=(".pt", ".pkl"),
    subfolders=("*",),
)
