"""DCP's ``.metadata``: a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, decoded to columns.

::

    Metadata
      state_dict_metadata   {fqn → TensorStorageMetadata(properties, size, chunks [(offsets, sizes) …])
                                  | BytesStorageMetadata}
      planner_data          {fqn → path tuple}            the only way to split names that contain dots
      storage_data          {MetadataIndex(fqn, offset, index hint) → _StorageInfo(relative_path, offset, length,
                                                                                   transform_descriptors)}
      storage_meta          StorageMeta(checkpoint_id, save_id, …)      version  "1.0.0"

Shared by the formats whose metadata is this pickle (DCP, Megatron ``torch_dist``, veScale …). Classes are told by
name whatever module they come from, because other frameworks bring their own ``_StorageInfo``. Read from torch 2.13
(``distributed/checkpoint/metadata.py``, ``filesystem.py``); older files lack ``version``, ``storage_meta`` or
``transform_descriptors``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from workbench.core import unpickle
from workbench.core.catalog import OPAQUE, TORCH_ZIP, ZSTD_TORCH_ZIP
from workbench.core.dtypes import by_name
from workbench.errors import CorruptError

__all__ = ["DcpMetadata", "decode"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
ROOTS = ("Metadata", "MCoreMetadata")


@dataclass(frozen=True, eq=False)
class DcpMetadata:
    """Columns of one ``.metadata``.

    Attributes:
        keys: tensors, in stored order; ``T`` of them.
        dtype: ``(T,)`` codes; ndim ``(T,)``; shape ``(T, D)`` padded with 1.
        row_ptr: ``(T+1,)`` CSR over the chunks.
        offsets, sizes: ``(N, D)`` boxes of the chunks.
        item: ``(N,)`` position in the item columns of the bytes of each chunk, ``-1`` where there are none.
        objects: bytes items as ``(key, position)``.
        files: names, distinct. file, start, length, codec: ``(M,)`` the items.
        paths: planner data, key → path, or ``None``.
        orphans: items that belong to no chunk (a damaged or foreign file).
    """

    keys: list[str]
    dtype: Ints
    ndim: Ints
    shape: Ints
    row_ptr: Ints
    offsets: Ints
    sizes: Ints
    item: Ints
    objects: list[tuple[str, int]]
    files: list[str]
    file: Ints
    start: Ints
    length: Ints
    codec: Ints
    paths: Mapping[str, tuple[Any, ...]] | None
    version: str | None = None
    save_id: str | None = None
    orphans: int = 0
    transforms: list[str] = field(default_factory=list)


def decode(data: bytes | memoryview, *, what: str) -> DcpMetadata:
    """Decode a ``.metadata`` file's bytes.

    Raises:
        CorruptError: not such a pickle, or one that contradicts itself.
        UnsafeError: a pickle bomb.
    """
    found = unpickle.loads_with_globals(data, what=what, allow=_ByClass())
    root = _state(found.value, ROOTS, what, found.globals)
    try:
        return _columns(root, what)
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError) as error:
        foreign = f"; it names foreign globals {sorted(found.globals)[:3]}" if found.globals else ""
        raise CorruptError(
            f"{what} is not laid out as DCP metadata ({type(error).__name__}: {str(error)[:120]}){foreign}"
        ) from None


class _Held(list):  # type: ignore[type-arg]
    """Stand-in that keeps the state BUILD hands it as its only element: no Python call per object.

    A million chunks make three million of these, so ``__setstate__`` is ``list.append`` itself.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


CLASSES = (
    "Metadata", "MCoreMetadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
    "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_StorageInfo", "SavePlan", "MCoreSavePlan",
    "WriteItem", "TensorWriteData", "BytesIOWriteData",
)  # fmt: skip


class _ByClass(Mapping[tuple[str, str], object]):
    """(module, name) → stand-in class, for the class names above in any module.

    The classes are made anew for each load, so that a hostile BUILD on one cannot outlive its pickle.
    """

    def __init__(self) -> None:
        self._made = {name: type(name, (_Held,), {"__slots__": ()}) for name in CLASSES}

    def __getitem__(self, key: tuple[str, str]) -> object:
        return self._made[key[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (("*", name) for name in self._made)

    def __len__(self) -> int:
        return len(self._made)


def _state(value: object, names: Iterable[str], what: str, foreign: set[str]) -> Any:
    if not isinstance(value, _Held) or type(value).__name__ not in names:
        seen = f"; it names the foreign globals {sorted(foreign)[:3]}, which were not run" if foreign else ""
        raise CorruptError(f"{what} holds {unpickle.short(value)} instead of checkpoint metadata{seen}")
    return value[0] if value else {}


def _columns(root: Mapping[str, Any], what: str) -> DcpMetadata:
    entries: Mapping[str, _Held] = root["state_dict_metadata"]
    if any(type(key) is not str for key in entries):
        raise TypeError("a tensor's name is not a string")
    tensors = {key: value[0] for key, value in entries.items() if type(value).__name__ == "TensorStorageMetadata"}
    blobs = [key for key, value in entries.items() if type(value).__name__ == "BytesStorageMetadata"]
    if len(tensors) + len(blobs) != len(entries):
        raise TypeError("an entry is neither tensor nor bytes")

    shapes = [state["size"] for state in tensors.values()]
    dims = max([1, *map(len, shapes)])
    lists = [state["chunks"] for state in tensors.values()]
    row_ptr = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    states = [chunk[0] for chunk in chain.from_iterable(lists)]
    ndim = np.array([len(shape) for shape in shapes], np.int64)
    chunk_dims = np.repeat(ndim, np.diff(row_ptr))
    offsets = _ragged(map(itemgetter("offsets"), states), chunk_dims, dims, 0)
    sizes = _ragged(map(itemgetter("sizes"), states), chunk_dims, dims, 1)

    storage = root["storage_data"]
    index = [key[0] for key in storage]
    infos = [value[0] for value in storage.values()]
    item, objects, orphans = _join(index, list(tensors), blobs, row_ptr, chunk_dims, offsets, dims)
    names = [info["relative_path"] for info in infos]
    ids = {name: position for position, name in enumerate(dict.fromkeys(names))}
    codec, transforms = _codecs(infos)
    meta = root.get("storage_meta")
    planner = root.get("planner_data")
    return DcpMetadata(
        keys=list(tensors),
        dtype=np.array([by_name(_dtype_name(state["properties"])).code for state in tensors.values()], np.uint8),
        ndim=ndim,
        shape=_ragged(shapes, ndim, dims, 1),
        row_ptr=row_ptr,
        offsets=offsets,
        sizes=sizes,
        item=item,
        objects=objects,
        files=list(ids),
        file=np.fromiter(map(ids.__getitem__, names), np.int32, len(names)),
        start=_ints(infos, "offset"),
        length=_ints(infos, "length"),
        codec=codec,
        paths=planner if isinstance(planner, Mapping) else None,
        version=str(root["version"]) if root.get("version") is not None else None,
        save_id=_save_id(meta),
        orphans=orphans,
        transforms=transforms,
    )


def _join(
    index: list[dict[str, Any]], keys: list[str], blobs: list[str], row_ptr: Ints, chunk_dims: Ints, offsets: Ints,
    dims: int,
) -> tuple[Ints, list[tuple[str, int]], int]:  # fmt: skip
    """Which item holds which chunk: by (fqn, offset), tried first at the chunk position that the index hints at."""
    rows_of = {key: position for position, key in enumerate(keys)}
    rows_of |= {key: -2 - position for position, key in enumerate(blobs)}
    owner = np.fromiter((rows_of.get(state["fqn"], -1) for state in index), np.int64, len(index))
    objects = [(blobs[-2 - o], position) for position, o in enumerate(owner.tolist()) if o <= -2]
    mine = np.flatnonzero(owner >= 0)
    owner = owner[mine]
    found = [index[position] for position in mine.tolist()]
    hint = np.fromiter((-1 if (h := state.get("index")) is None else h for state in found), np.int64, len(found))
    counts = np.diff(row_ptr)
    item_dims = np.array([len(state["offset"]) for state in found], np.int64)
    at = _ragged(map(itemgetter("offset"), found), item_dims, dims, 0)

    item = np.full(len(offsets), -1, np.int64)
    row = row_ptr[owner] + hint
    good = (hint >= 0) & (hint < counts[owner])
    good[good] = (offsets[row[good]] == at[good]).all(axis=1) & (item_dims[good] == chunk_dims[row[good]])
    item[row[good]] = mine[good]
    rest = np.flatnonzero(~good)
    if len(rest):  # no hint, or a wrong one: look the offset up
        wanted = set(owner[rest].tolist())
        places = {
            (tensor, tuple(offsets[r].tolist())): r
            for tensor in wanted
            for r in range(int(row_ptr[tensor]), int(row_ptr[tensor + 1]))
        }
        for position in rest.tolist():
            r = places.get((int(owner[position]), tuple(at[position].tolist())), -1)
            if r >= 0:
                item[r] = mine[position]
                good[position] = True
    return item, objects, int((~good).sum()) + int(len(index) - len(mine) - len(objects))


def _ragged(rows: Iterable[Any], lengths: Ints, dims: int, fill: int) -> Ints:
    """Tuples of the given lengths as one padded array; a tuple of another length is an error."""
    flat = np.fromiter(chain.from_iterable(rows), np.int64)
    out = np.full((len(lengths), dims), fill, np.int64)
    if len(flat) != int(lengths.sum()):
        raise ValueError("a chunk has another number of dimensions than its tensor")
    out[np.arange(dims) < lengths[:, None]] = flat
    return out


def _ints(infos: list[dict[str, Any]], name: str) -> Ints:
    return np.fromiter(map(itemgetter(name), infos), np.int64, len(infos))


def _codecs(infos: list[dict[str, Any]]) -> tuple[Ints, list[str]]:
    """Codec of each item, and the names of the transforms that we do not know."""
    codec = np.full(len(infos), TORCH_ZIP, np.uint8)
    unknown: dict[str, None] = {}
    for position, info in enumerate(infos):
        descriptors = info.get("transform_descriptors")
        if descriptors:
            names = [str(name) for name in descriptors]
            known = len(names) == 1 and names[0].split("/")[0] == "stream.zstd"
            codec[position] = ZSTD_TORCH_ZIP if known else OPAQUE
            if not known:
                unknown[", ".join(names)] = None
    return codec, list(unknown)


def _dtype_name(properties: Any) -> str:
    """TensorProperties pickles as a 5-tuple (torch ≥ 2.1) or as its ``__dict__`` (other frameworks' copies)."""
    state = properties[0]
    dtype = state["dtype"] if isinstance(state, Mapping) else state[0]
    return str(getattr(dtype, "name", dtype))


def _save_id(meta: Any) -> str | None:
    state = meta[0] if isinstance(meta, _Held) and meta else {}
    found = state.get("save_id") if isinstance(state, Mapping) else None
    return str(found) if found is not None else None

