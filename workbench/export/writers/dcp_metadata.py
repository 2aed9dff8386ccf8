"""The ``.metadata`` of torch's distributed checkpoint, pickled without importing torch.

Chunks are listed in the order of the ranks that wrote them, and the ``index`` of an item is its place in that list, as
torch's planner numbers them. ``storage_meta`` names no folder and no save, so equal exports are equal files.

Source: torch 2.13 ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` (``_StorageInfo``, ``finish``),
``default_planner.py`` (``create_default_global_save_plan``); the same classes since torch 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from workbench.core.dtypes import ALL
from workbench.export.writers.dcp_items import Blob, Chunk
from workbench.export.writers.pickle_tree import Global, Hole, Instance, Pairs, PickleCall, PickleForm, PickleRow
from workbench.export.writers.pickled import dumps

Paths = Mapping[str, tuple[str | int, ...]]
INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
VERSION = "1.0.0"  #: ``CURRENT_DCP_VERSION``
_MODULE = "torch.distributed.checkpoint.metadata"
_SIZE = Global("torch", "Size")


def metadata(chunks: Sequence[Chunk], blobs: Sequence[Blob], paths: Paths | None, order: Sequence[str] = ()) -> bytes:
    """Return the pickle of a ``Metadata``.

    Args:
        order: names of tensors that come first.
        paths: for each tensor and object, the dict keys and list positions that its flat name represents.
    """
    nothing: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return dumps(
        Instance(
            _class("Metadata"),
            {
                "state_dict_metadata": tensor_metadata(chunks, blobs, order),
                "planner_data": None if paths is None else dict(paths),
                "storage_data": storage_data(chunks, blobs, INFO),
                "storage_meta": Instance(_class("StorageMeta"), nothing),
                "version": VERSION,
            },
        )
    )


def tensor_metadata(chunks: Sequence[Chunk], blobs: Sequence[Blob], order: Sequence[str] = ()) -> dict[str, Instance]:
    """Return ``state_dict_metadata``: tensors with the boxes of their chunks, then objects."""
    listed: dict[str, list[PickleRow]] = {name: [] for name in order}
    kind: dict[str, tuple[int, tuple[int, ...]]] = {}
    for one in chunks:
        kind.setdefault(one.key, (one.code, one.shape))
        listed.setdefault(one.key, []).append(PickleRow(_box_form(len(one.shape)), (*one.offsets, *one.sizes)))
    of_type = {code: _properties(code) for code in {code for code, _ in kind.values()}}
    cls, found = _class("TensorStorageMetadata"), {}
    for name, boxes in listed.items():
        code, shape = kind[name]
        found[name] = Instance(cls, {"properties": of_type[code], "size": size(shape), "chunks": boxes})
    return found | {blob.key: Instance(_class("BytesStorageMetadata")) for blob in blobs}


def storage_data(chunks: Sequence[Chunk], blobs: Sequence[Blob], info: Global) -> Pairs:
    """Return where each item is; ``info`` is the class that describes it."""
    index = _class("MetadataIndex")
    place = PickleForm(Instance(info, {"relative_path": Hole(0), "offset": Hole(1), "length": Hole(2)}))
    pairs: list[tuple[Any, Any]] = [
        (Instance(index, {"fqn": one.key, "index": None}), PickleRow(place, (one.file, one.start, one.length)))
        for one in blobs
    ]
    count: dict[str, int] = {}
    for one in chunks:
        at = count[one.key] = count.get(one.key, -1) + 1
        pairs.append(
            (
                PickleRow(_index_form(len(one.shape)), (one.key, at, *one.offsets)),
                PickleRow(place, (one.file, one.start, one.length)),
            )
        )
    return Pairs(pairs)


def size(values: tuple[Any, ...]) -> PickleCall:
    """Return a ``torch.Size``."""
    return PickleCall(_SIZE, (values,))


@cache
def _box_form(ndim: int) -> PickleForm:
    """Return the form of ``ChunkStorageMetadata``: offsets, then sizes."""
    offsets, sizes = (tuple(Hole(base + axis) for axis in range(ndim)) for base in (0, ndim))
    return PickleForm(Instance(_class("ChunkStorageMetadata"), {"offsets": size(offsets), "sizes": size(sizes)}))


@cache
def _index_form(ndim: int) -> PickleForm:
    """Return the form of ``MetadataIndex``: name, position in the list of chunks, offsets."""
    offset = size(tuple(Hole(2 + axis) for axis in range(ndim)))
    return PickleForm(Instance(_class("MetadataIndex"), {"fqn": Hole(0), "index": Hole(1), "offset": offset}))


def _properties(code: int) -> Instance:
    """Return ``TensorProperties``, whose state is a tuple; all fields except the type are deprecated and filled in as
    torch does.
    """
    name = ALL[code].torch_name
    assert name is not None  # lay_out has refused it
    strided = PickleCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickleCall(_class("_MEM_FORMAT_ENCODING"), (0,))
    return Instance(_class("TensorProperties"), (Global("torch", name), strided, False, contiguous, False))


def _class(name: str) -> Global:
    return Global(_MODULE, name)
