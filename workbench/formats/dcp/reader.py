"""PyTorch's distributed checkpoint (``torch.distributed.checkpoint``), read from torch 2.1 to 2.13.

::

    step-10/
      .metadata           pickle, written last by rename: its presence is the commit marker
      __0_0.distcp        rank 0, file 0:   │ item │ item │ item │ …     back to back, no header, no alignment
      __1_0.distcp
    item = one torch.save archive │ the same in a zstd stream │ raw, when the file is safetensors

Variants, recognized by their files:

* ``use_collectives=False``: one ``__R.metadata`` per rank instead of ``.metadata``, with global sizes and its own
  chunks; every rank stores replicated tensors, which become replicas here.
* ``SerializationFormat.SAFETENSORS``: every ``.distcp`` is a safetensors file and ``.metadata`` has offset 0 for
  every tensor; torch 2.13 cannot read it back ("Unsupported operand 56"). Byte ranges come from the files' headers.

The format stores no step, world size, mesh or placement. The rank of a chunk is its writer's, from the file's name.
A save keeps one of several replicas, so the values of the others are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.codecs import RAW
from workbench.core.dtypes import by_code
from workbench.core.objects import archive_objects
from workbench.core.place import METADATA_LIMIT, Place, lacking, stat_or_absent
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, IncompleteError
from workbench.formats import Format
from workbench.formats.dcp import lanes as dcp_lanes
from workbench.formats.dcp import metadata as dcp_metadata
from workbench.formats.dcp.metadata import DcpMetadata
from workbench.formats.safetensors import header as safetensors_header
from workbench.names.roles import resolve

_DATA = re.compile(r"__(\d+)_(\d+)(?:\.[0-9a-f]{8})?\.distcp")  # with the id of the save, if ``wb.dcp.Writer`` wrote it
_NAMED = re.compile(rb"__\d{1,9}_\d{1,9}(?:\.[0-9a-f]{8})?\.distcp")
NAMES_UP_TO = 2 << 20  #: bytes of a ``.metadata`` on a disk that is searched for names of files, to list a checkpoint
PAGED_FROM = 256 << 20  #: bytes of a ``.metadata``; a smaller one is held in memory
_PER_RANK = re.compile(r"__(\d+)\.metadata")


def detect(place: Place) -> bool:
    """Return whether the folder holds DCP files, committed or not."""
    if place.file is not None:
        return False
    return any(name == ".metadata" or _PER_RANK.fullmatch(name) or _DATA.fullmatch(name) for name in place.files)


def missing(place: Place) -> str:
    """Describe what is missing of ``.metadata``, or of every rank's own, and of the files that a small one names."""
    metadata = place.files.get(".metadata")
    if metadata is not None and place.local and 0 < metadata.size <= NAMES_UP_TO:
        return _lost_files(place)
    if metadata is not None:
        return "" if metadata.size else ".metadata is empty"
    ranks = {int(match[1]) for name in place.files if (match := _PER_RANK.fullmatch(name))}
    if ranks:
        absent = next((number for number in range(max(ranks)) if number not in ranks), None)
        count = max(ranks) + 1 - len(ranks)
        lost = lacking(count, max(ranks) + 1, "files __N.metadata")
        return "" if absent is None else f"{lost}, first __{absent}.metadata"
    return ".metadata is missing" + (", .metadata.tmp is present" if ".metadata.tmp" in place.files else "")


def _lost_files(place: Place) -> str:
    """Describe data files that ``.metadata`` names, and that are absent or empty. It is searched, not decoded."""
    data = place.read(".metadata")
    names = {match[0] for match in _NAMED.finditer(data) if _is_whole(data, match.start(), match.end())}
    lost = sorted(name for name in map(bytes.decode, names) if not (name in place.files and place.files[name].size))
    return f"{lacking(len(lost), len(names), 'data files')} or empty: {some_of(lost)}" if lost else ""


def _is_whole(data: bytes, start: int, stop: int) -> bool:
    """Return whether a string in a pickle has exactly these bytes: its length is stored before it."""
    return data[start - 1] == stop - start or data[start - 4 : start] == (stop - start).to_bytes(4, "little")


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of everything stored.

    Raises:
        IncompleteError: there are data files but no metadata: the save was interrupted.
        CorruptError: the metadata contradicts itself.
        UnsafeError: the metadata names a file outside the folder.
    """
    if ".metadata" in place.files:
        return _from_global(place)
    per_rank = sorted((int(m[1]), m[0]) for name in place.files if (m := _PER_RANK.fullmatch(name)))
    if per_rank:
        return _from_ranks(place, per_rank)
    leftover = " (a half-written .metadata.tmp exists)" if ".metadata.tmp" in place.files else ""
    raise IncompleteError(
        f"{place.path!r} has .distcp files but no .metadata{leftover}: the save was interrupted before its commit; "
        "use an earlier step"
    )


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return bytes items (param groups, schedulers, generator state …), decoded on access by our own unpickler."""
    return archive_objects(place, catalog)


def _from_global(place: Place) -> Catalog:
    if not place.stat(".metadata").size:
        raise IncompleteError(f"{place.path!r}: .metadata is empty; the save was interrupted, use an earlier step")
    meta = _paged(place, ".metadata") or _decode(place.read(".metadata"), what=repr(".metadata"))
    stats = [stat_or_absent(place, name) for name in meta.files]
    if _is_safetensors(place, meta):
        return _from_safetensors(place, meta)
    stored = np.flatnonzero(meta.item >= 0)
    item = meta.item[stored]
    owner = np.repeat(np.arange(len(meta.keys)), np.diff(meta.row_ptr))[stored]
    ranks = np.array([_rank(name) for name in meta.files] or [0], np.int32)
    position = np.array([p for _, p in meta.objects], np.int64)
    fqns, roles = resolve(meta.keys, {"paths": meta.paths})  # only the planner's paths can split dotted names
    return Catalog(
        format="dcp",
        keys=meta.keys,
        dtype=meta.dtype.astype(np.uint8),
        ndim=meta.ndim.astype(np.uint8),
        shape=meta.shape,
        row_ptr=np.searchsorted(owner, np.arange(len(meta.keys) + 1)).astype(np.int64),
        offsets=meta.offsets if len(stored) == len(meta.item) else meta.offsets[stored],
        sizes=meta.sizes if len(stored) == len(meta.item) else meta.sizes[stored],
        file=meta.file[item],
        start=meta.start[item],
        stop=meta.start[item] + meta.length[item],
        codec=meta.codec[item],
        rank=ranks[meta.file[item]] if meta.files else np.empty(0, np.int32),
        replica=np.zeros(len(stored), np.int16),
        files=meta.files,
        file_stats=stats,
        metadata_files=[".metadata"],
        fqns=fqns,
        roles=roles,
        objects=ObjectTable(
            [key for key, _ in meta.objects],
            meta.file[position],
            meta.start[position],
            meta.start[position] + meta.length[position],
            meta.codec[position],
        ),
        meta=_facts(place, meta, len(meta.item) - len(stored)),
    )


def _from_ranks(place: Place, per_rank: list[tuple[int, str]]) -> Catalog:
    """Return one catalog of all ranks' metadata; boxes that several ranks store become replicas."""
    builder = CatalogBuilder("dcp", place)
    objects: dict[str, tuple[str, int, int, int]] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    lost = 0
    for rank, name in per_rank:
        builder.file(name, metadata=True)
        meta = _decode(place.read(name), what=repr(name))
        paths |= meta.paths or {}
        owner = np.repeat(np.arange(len(meta.keys)), np.diff(meta.row_ptr))
        for t, key in enumerate(meta.keys):
            builder.tensor(key, by_code(int(meta.dtype[t])), meta.shape[t, : meta.ndim[t]].tolist())
        for row, item in enumerate(meta.item.tolist()):
            if item < 0:
                lost += 1
                continue
            t = int(owner[row])
            dims = int(meta.ndim[t])
            start = int(meta.start[item])
            builder.chunk(
                meta.keys[t],
                meta.offsets[row, :dims].tolist(),
                meta.sizes[row, :dims].tolist(),
                meta.files[meta.file[item]],
                start,
                start + int(meta.length[item]),
                codec=int(meta.codec[item]),
                rank=rank,
            )
        for key, item in meta.objects:
            start = int(meta.start[item])
            where = (
                meta.files[meta.file[item]],
                start,
                start + int(meta.length[item]),
                int(meta.codec[item]),
            )
            objects.setdefault(key, where)
    for key, (file, start, stop, codec) in objects.items():
        builder.object(key, file, start, stop, codec)
    facts = _facts(place, None, lost)
    known = [rank for rank, _ in per_rank]
    absent = sorted(set(range(known[-1] + 1)) - set(known))
    if absent:
        facts["notes"].append(f"metadata of ranks {absent[:8]} is missing: their part of the save is lost")
    return _named(builder.build(facts), paths)


def _from_safetensors(place: Place, meta: DcpMetadata) -> Catalog:
    """Take byte ranges from the files' headers and boxes from ``.metadata``; the headers' own offsets must agree."""
    builder = CatalogBuilder("dcp", place)
    builder.file(".metadata", metadata=True)
    for t, key in enumerate(meta.keys):
        builder.tensor(key, by_code(int(meta.dtype[t])), meta.shape[t, : meta.ndim[t]].tolist())
    owner = np.repeat(np.arange(len(meta.keys)), np.diff(meta.row_ptr))
    headers = {name: safetensors_header.parse(place, name) for name in meta.files if place.stat(name).size}
    placed = {name: safetensors_header.saved_offsets(name, header, partial=True) for name, header in headers.items()}
    entries = {(name, entry.name): entry for name, header in headers.items() for entry in header.entries}
    for row, item in enumerate(meta.item.tolist()):
        if item < 0:
            continue
        t = int(owner[row])
        key, name, dims = meta.keys[t], meta.files[meta.file[item]], int(meta.ndim[t])
        offsets, sizes = meta.offsets[row, :dims].tolist(), meta.sizes[row, :dims].tolist()
        entry = entries.get((name, key))
        if entry is None:
            raise CorruptError(f"tensor {key!r}: .metadata places it in {name!r}, which does not hold it")
        file_offsets = placed[name].get(key)
        if list(entry.shape) != sizes or (file_offsets is not None and file_offsets != tuple(offsets)):
            # a file keeps one piece per name: the second piece overwrote the first during the save
            raise CorruptError(
                f"tensor {key!r}: .metadata lists a chunk of {tuple(sizes)} at {tuple(offsets)} in {name!r}, which "
                f"holds {entry.shape} at {file_offsets}; the other piece was overwritten during the save"
            )
        builder.chunk(key, offsets, sizes, name, entry.start, entry.stop, codec=RAW, rank=_rank(name))
    # a bytes item is stored as a tensor of bytes under its key, in a torch.save archive
    for key, item in meta.objects:
        name = meta.files[meta.file[item]]
        entry = entries.get((name, key))
        if entry is not None:
            builder.object(key, name, entry.start, entry.stop)
    return _named(builder.build(_facts(place, meta, int((meta.item < 0).sum()))), meta.paths)


def _named(catalog: Catalog, paths: Mapping[str, tuple[Any, ...]] | None) -> Catalog:
    fqns, roles = resolve(catalog.keys, {"paths": paths})
    return replace(catalog, fqns=fqns, roles=roles)


def _is_safetensors(place: Place, meta: DcpMetadata) -> bool:
    """Return whether data files are safetensors: all offsets are 0, and a file begins with a length and ``{``."""
    if not len(meta.start) or meta.start.any():
        return False
    for name in meta.files:
        if place.exists(name) and place.stat(name).size >= 9:
            head = place.read(name, length=9)
            return head[8:9] == b"{" and not head.startswith(b"PK")
    return False


def _rank(file: str) -> int:
    found = _DATA.fullmatch(file.rsplit("/", 1)[-1])
    return int(found[1]) if found and len(found[1]) < 10 else -1  # a rank fits in an int32


def _facts(place: Place, meta: DcpMetadata | None, lost: int) -> dict[str, Any]:
    notes: list[str] = []
    if lost:
        notes.append(f"{plural(lost, 'chunk')} of the metadata without a stored item: the elements are holes")
    if meta is not None and meta.orphans:
        notes.append(f"{plural(meta.orphans, 'stored item', 'belong')} to no tensor of the metadata")
    if meta is not None and meta.transforms:
        notes.append(f"items passed through transforms that cannot be undone here: {', '.join(meta.transforms)}")
    if meta is not None and meta.objects and not meta.keys:
        notes.append(
            f"no tensor is listed: {plural(len(meta.objects), 'object')} may hold tensors, as saves with "
            "flatten_state_dict=False do. Load it with the same planner and save it flattened, which is the default"
        )
    if flat := [key for key in (meta.keys if meta is not None else ()) if key.rpartition(".")[2] == "_flat_param"]:
        notes.append(
            f"{plural(len(flat), 'tensor', 'are')} flat parameters of FSDP1 (LOCAL_STATE_DICT), such as {flat[0]!r}: "
            "several parameters and padding end to end, whose names and shapes are not stored"
        )
    if ".metadata.tmp" in place.files:
        notes.append(".metadata.tmp is left over: a later save to this folder was interrupted")
    facts: dict[str, Any] = {"notes": notes}
    if meta is not None:
        facts |= {"version": meta.version, "save_id": meta.save_id}
    return facts


def _paged(place: Place, name: str) -> DcpMetadata | None:
    """Decode by lanes from a window that moves along the file, if it is on disk and huge."""
    if not place.local or not PAGED_FROM <= place.stat(name).size <= METADATA_LIMIT:
        return None
    return dcp_lanes.decode(dcp_lanes.PagedBytes(place.source(name)), what=repr(name))


def _decode(data: bytes | memoryview, *, what: str) -> DcpMetadata:
    """Decode by lanes if the file is large and regular, otherwise as a whole."""
    found = dcp_lanes.decode(data, what=what) if len(data) >= dcp_metadata.LANES_FROM else None
    return dcp_metadata.decode(data, what=what) if found is None else found


FORMAT = Format(
    name="dcp",
    title="PyTorch distributed checkpoint",
    marks=".metadata, __R_N.distcp",
    read_from="torch 2.1 – 2.13",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    suffixes=(".metadata", ".distcp"),
    subfolders=("*",),
    own_bytes=True,
)
