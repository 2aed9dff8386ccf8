"""DCP's ``.metadata``: a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, decoded to columns.

::

    Metadata
      state_dict_metadata   {fqn → TensorStorageMetadata(properties, size, chunks [(offsets, sizes) …])
                                  | BytesStorageMetadata}
      planner_data          {fqn → path tuple}            the only way to split dotted names
      storage_data          {MetadataIndex(fqn, offset, index hint) → _StorageInfo(relative_path, offset, length,
                                                                                   transform_descriptors)}
      storage_meta          StorageMeta(checkpoint_id, save_id, …)      version  "1.0.0"

Shared by the formats whose metadata is this pickle (DCP, Megatron ``torch_dist``, veScale …). Classes are recognized
by name in any module, because other frameworks have their own ``_StorageInfo``. Read from torch 2.13
(``distributed/checkpoint/metadata.py``, ``filesystem.py``); older files lack ``version``, ``storage_meta`` or
``transform_descriptors``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.codecs import OPAQUE, TORCH_ZIP, ZSTD_TORCH_ZIP
from workbench.core.dtypes import by_name
from workbench.core.pickles import unpickle
from workbench.core.pickles.standins import FAULTS, ByClass, Held, not_run, state_of
from workbench.errors import CorruptError

JOINED = 1 << 18  #: items that are matched with chunks at a time
ROOTS = ("Metadata", "MCoreMetadata")
LANES_FROM = 1 << 20  #: bytes; a smaller pickle is decoded as a whole in a fifth of a second
CLASSES = (
    "Metadata",
    "MCoreMetadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_StorageInfo",
    "SavePlan",
    "MCoreSavePlan",
    "WriteItem",
    "TensorWriteData",
    "BytesIOWriteData",
)


@dataclass(frozen=True, eq=False)
class DcpMetadata:
    """Columns of one ``.metadata``.

    Attributes:
        keys: tensors, in stored order; ``T`` of them.
        dtype: ``(T,)`` codes; ndim ``(T,)``; shape ``(T, D)`` padded with 1.
        row_ptr: ``(T+1,)`` CSR over the chunks.
        offsets, sizes: ``(N, D)`` boxes of the chunks.
        item: ``(N,)`` position in the item columns of each chunk's bytes, ``-1`` if it has none.
        objects: bytes items as ``(key, position)``.
        files: distinct names. file, start, length, codec: ``(M,)`` the items.
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


@dataclass(frozen=True, eq=False)
class Items:
    """The stored items as columns, ``(M,)`` each; ``hint``, ``ndim`` and ``at`` apply only if ``owner`` is a tensor.

    ``owner`` is a tensor's row, ``-2 - position`` of a bytes item, or ``-1`` for a name that is neither. ``hint`` is
    the chunk's place in its tensor or ``-1``, ``at`` its offset, ``(M, dims)``.
    """

    owner: Ints
    hint: Ints
    ndim: Ints
    at: Ints
    files: list[str]
    file: Ints
    start: Ints
    length: Ints
    codec: Any
    transforms: list[str]


class DecodedSource(Protocol):
    """The chunks and items of a decoded pickle. Both methods raise one of `by_class.FAULTS` for another layout."""

    def chunks(self, lists: list[Any], ndim: Ints, dims: int) -> tuple[Ints, Ints, Ints]:
        """Return the chunks of each list ``(T,)``, and their offsets and sizes ``(N, dims)``; ``ndim`` is ``(T,)``."""

    def items(self, storage: Mapping[Any, Any], rows_of: Mapping[Any, int], dims: int) -> Items:
        """Return the items; ``rows_of`` gives their owners."""


def decode(data: bytes | memoryview, *, what: str) -> DcpMetadata:
    """Decode a ``.metadata`` file's bytes as one pickle.

    Raises:
        CorruptError: the data are not such a pickle, or contradict themselves.
        UnsafeError: a pickle bomb.
    """
    found = unpickle.loads_with_globals(data, what=what, allow=ByClass(CLASSES))
    root = state_of(found.value, ROOTS, what, found.globals)
    try:
        return assemble(root, Objects())
    except FAULTS as error:
        raise CorruptError(
            f"{what} is not laid out as DCP metadata ({type(error).__name__}: {str(error)[:120]})"
            f"{not_run(found.globals)}"
        ) from None


def assemble(root: Mapping[str, Any], source: DecodedSource) -> DcpMetadata:
    """Return the columns of a decoded root; ``source`` reads its chunks and items. Raises one of `by_class.FAULTS`."""
    entries: Mapping[str, Held] = root["state_dict_metadata"]
    if any(type(key) is not str for key in entries):
        raise TypeError("a tensor's name is not a string")
    tensors = {key: value[0] for key, value in entries.items() if type(value).__name__ == "TensorStorageMetadata"}
    blobs = [key for key, value in entries.items() if type(value).__name__ == "BytesStorageMetadata"]
    if len(tensors) + len(blobs) != len(entries):
        raise TypeError("an entry is neither a tensor nor bytes")

    shapes = [state["size"] for state in tensors.values()]
    dims = max([1, *map(len, shapes)])
    ndim = np.array([len(shape) for shape in shapes], np.int64)
    counts, offsets, sizes = source.chunks([state["chunks"] for state in tensors.values()], ndim, dims)
    row_ptr = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    rows_of = {key: position for position, key in enumerate(tensors)}
    rows_of |= {key: -2 - position for position, key in enumerate(blobs)}
    items = source.items(root["storage_data"], rows_of, dims)
    item, orphans = _join(items, row_ptr, np.repeat(ndim, counts), offsets)
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
        objects=[(blobs[-2 - int(items.owner[i])], i) for i in np.flatnonzero(items.owner <= -2).tolist()],
        files=items.files,
        file=items.file,
        start=items.start,
        length=items.length,
        codec=items.codec,
        paths=planner if isinstance(planner, Mapping) else None,
        version=str(root["version"]) if root.get("version") is not None else None,
        save_id=_save_id(meta),
        orphans=orphans,
        transforms=items.transforms,
    )


class Objects:
    """The chunks and items of a pickle decoded as a whole: lists of stand-ins, and a dict of them."""

    def chunks(self, lists: list[Any], ndim: Ints, dims: int) -> tuple[Ints, Ints, Ints]:
        """See `DecodedSource.chunks`."""
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        states = [chunk[0] for chunk in chain.from_iterable(lists)]
        each = np.repeat(ndim, counts)
        offsets = _ragged(map(itemgetter("offsets"), states), each, dims, 0)
        return counts, offsets, _ragged(map(itemgetter("sizes"), states), each, dims, 1)

    def items(self, storage: Mapping[Any, Any], rows_of: Mapping[Any, int], dims: int) -> Items:
        """See `DecodedSource.items`."""
        index = [key[0] for key in storage]
        infos = [value[0] for value in storage.values()]
        owner = np.fromiter((rows_of.get(state["fqn"], -1) for state in index), np.int64, len(index))
        found = [index[position] for position in np.flatnonzero(owner >= 0).tolist()]
        hint, ndim = np.full((2, len(index)), -1, np.int64)
        hints = (-1 if (h := state.get("index")) is None else h for state in found)
        hint[owner >= 0] = np.fromiter(hints, np.int64, len(found))
        ndim[owner >= 0] = np.fromiter((len(state["offset"]) for state in found), np.int64, len(found))
        at = np.zeros((len(index), dims), np.int64)
        at[owner >= 0] = _ragged(map(itemgetter("offset"), found), ndim[owner >= 0], dims, 0)
        names = [info["relative_path"] for info in infos]
        ids = {name: position for position, name in enumerate(dict.fromkeys(names))}
        if any(type(name) is not str for name in ids):
            raise TypeError("a file's name is not a string")
        codec, transforms = codecs(infos)
        return Items(
            owner=owner,
            hint=hint,
            ndim=ndim,
            at=at,
            files=list(ids),
            file=np.fromiter(map(ids.__getitem__, names), np.int32, len(names)),
            start=_ints(infos, "offset"),
            length=_ints(infos, "length"),
            codec=codec,
            transforms=transforms,
        )


def _join(items: Items, row_ptr: Ints, chunk_dims: Ints, offsets: Ints) -> tuple[Ints, int]:
    """Match items to chunks by (fqn, offset), first at the chunk position that the index hints at."""
    item = np.full(len(offsets), -1, np.int64)
    counts, rests = np.diff(row_ptr), []
    for low in range(0, len(items.owner), JOINED):
        mine = low + np.flatnonzero(items.owner[low : low + JOINED] >= 0)
        owner, hint, at = items.owner[mine], items.hint[mine], items.at[mine]
        row = row_ptr[owner] + hint
        good = (hint >= 0) & (hint < counts[owner])
        good[good] = (offsets[row[good]] == at[good]).all(axis=1) & (items.ndim[mine[good]] == chunk_dims[row[good]])
        item[row[good]] = mine[good]
        rests.append(mine[~good])
    rest = np.concatenate(rests) if rests else np.empty(0, np.int64)
    lost = len(rest)
    if lost:  # no hint, or a wrong one: look the offset up
        wanted = set(items.owner[rest].tolist())
        places = {
            (tensor, tuple(offsets[r].tolist())): r
            for tensor in wanted
            for r in range(int(row_ptr[tensor]), int(row_ptr[tensor + 1]))
        }
        for position in rest.tolist():
            r = places.get((int(items.owner[position]), tuple(items.at[position].tolist())), -1)
            if r >= 0:
                item[r] = position
                lost -= 1
    return item, lost + int((items.owner == -1).sum())


def _ragged(rows: Iterable[Any], lengths: Ints, dims: int, fill: int) -> Ints:
    """Return tuples of the given lengths as one padded array; a tuple of another length is an error."""
    flat = np.fromiter(chain.from_iterable(rows), np.int64)
    out = np.full((len(lengths), dims), fill, np.int64)
    if len(flat) != int(lengths.sum()):
        raise ValueError("a chunk and its tensor differ in number of dimensions")
    out[np.arange(dims) < lengths[:, None]] = flat
    return out


def _ints(infos: list[dict[str, Any]], name: str) -> Ints:
    return np.fromiter(map(itemgetter(name), infos), np.int64, len(infos))


def codecs(infos: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], list[str]]:
    """Return the codec of each item, and the names of unknown transforms."""
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
    """Return the dtype of TensorProperties, pickled as a 5-tuple (torch ≥ 2.1) or ``__dict__`` (other frameworks)."""
    state = properties[0]
    dtype = state["dtype"] if isinstance(state, Mapping) else state[0]
    return str(getattr(dtype, "name", dtype))


def _save_id(meta: Any) -> str | None:
    state = meta[0] if isinstance(meta, Held) and meta else {}
    found = state.get("save_id") if isinstance(state, Mapping) else None
    return str(found) if found is not None else None
