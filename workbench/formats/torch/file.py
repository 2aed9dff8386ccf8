"""One ``torch.save`` file of any version: its tree, and its tensors by name.

::

    ckpt.pt  zip                data.pkl   {"model": {"wq": _rebuild_tensor_v2(storage "0", offset 96, (4, 6), (6, 1))}}
                                data/0     480 bytes at byte 1,024 of the file
    key      "model.wq"         bytes 1,024 to 1,504, the first element 384 bytes into them

Nothing is imported or executed: classes that are not torch's become inert leaves with a name. Legacy chains and tars:
legacy.py. Source: torch 2.13 ``torch/serialization.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from workbench.core import codecs, ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import reach
from workbench.core.dtypes import by_name, nbytes_of
from workbench.core.lazymap import LazyMap
from workbench.core.pickles import unpickle
from workbench.core.pickles.standins import Opaque, StorageRef, TensorRef, short
from workbench.core.place import Place
from workbench.core.source import LazyBytes
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, TruncatedError, UnsupportedFormatError
from workbench.formats.torch import legacy as torch_legacy
from workbench.formats.torch import tree as torch_tree
from workbench.formats.torch.legacy import LegacyFile

Tensors = list[tuple[tuple[Any, ...], Any]]
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def load_tree(place: Place, file: str) -> LegacyFile:
    """Decode a file's structure; tensors remain references into its storages.

    Raises:
        CorruptError, TruncatedError: the file is damaged or not from torch.
        UnsafeError: a bomb.
    """
    what = repr(file)
    view = place.window(file)
    if view[:4] == b"PK\x03\x04":
        loaded = _load_zip(view, what)
        loaded.tree = _plain_nvrx(loaded)
        return loaded
    head = bytes(view[:512])
    if torch_legacy.is_legacy(head):
        return torch_legacy.load_legacy(view, what=what)
    if torch_legacy.is_tar(head):
        return torch_legacy.load_tar(view, what=what)
    if not head:
        raise TruncatedError(f"file {what} is empty")
    raise CorruptError(f"{what} begins with {head[:8]!r}: neither a zip archive nor an older format of torch.save")


def _plain_nvrx(loaded: LegacyFile) -> object:
    """Return the state dict that NVRx wraps in a ``BasicTensorAwareStateDict``; any other tree unchanged."""
    tree = loaded.tree
    if not isinstance(tree, Opaque) or tree.qualname != "BasicTensorAwareStateDict":
        return tree
    if not isinstance(tree.state, dict) or not isinstance(tree.state.get("state_dict"), dict):
        return tree
    loaded.notes.append(
        "one rank's file of an NVRx local checkpoint: it does not store how many ranks there were, nor which parts of "
        "the model this one held"
    )
    return tree.state["state_dict"]


def tree_objects(place: Place, file: str, names: Sequence[str]) -> LazyMap:
    """Return one file's non-tensor state by top-level names (``value`` if the top level is not a dict)."""

    @cache
    def whole() -> Mapping[str, Any]:
        return top(torch_tree.prune(load_tree(place, file).tree, what=repr(file)))

    return LazyMap({name: partial(_item, whole, name) for name in names})


def top(pruned: object) -> dict[str, Any]:
    """Return the top level of a tree by name (``value`` if it is not a dict)."""
    if pruned is None:
        return {}
    if not isinstance(pruned, dict):
        return {"value": pruned}
    found: dict[str, Any] = {}
    for name, value in pruned.items():
        found[top_name(name)] = value
    return found


def top_name(name: object) -> str:
    """Return the name of an entry of the top level."""
    return name if type(name) is str else short(name, 60)


def pruned(loaded: LegacyFile, what: str) -> object:
    """Return a tree without its tensors; ``None`` if nothing is left."""
    return torch_tree.prune(loaded.tree, what=what)


def tensors_of(loaded: LegacyFile, what: str) -> Tensors:
    """Return tensors with their paths, in the tree's order. A DTensor is one of them, as it was pickled."""
    return torch_tree.flatten(loaded.tree, what=what, dtensors=True)


def _item(whole: Callable[[], Mapping[str, Any]], name: str) -> Any:
    return whole()[name]


def keyed(loaded: LegacyFile, what: str, notes: list[str]) -> dict[str, tuple[tuple[Any, ...], TensorRef]]:
    """Return tensors by dotted path; repeated paths get ``#2``, ``#3`` … in the tree's order."""
    tensors = torch_tree.flatten(loaded.tree, what=what)
    return dict(zip(dotted([path for path, _ in tensors], notes), tensors, strict=True))


def declare(
    builder: CatalogBuilder,
    file: str,
    key: str,
    ref: TensorRef,
    loaded: LegacyFile,
    notes: list[str],
    *,
    shape: tuple[int, ...] | None = None,
    boxes: Sequence[Box] | None = None,
    rank: int = -1,
) -> bool:
    """Declare a tensor and its byte range; return ``False`` if its elements cannot be read.

    Args:
        ref: the stored tensor, whole or the local one of a rank.
        shape: of the global tensor, if the stored one is a local tensor.
        boxes: which parts of the global tensor the stored one holds: offsets there, sizes, offsets in the stored one.
        rank: the rank that wrote the file, ``-1`` if unknown.
    """
    storage = ref.storage
    if not isinstance(storage, StorageRef) or storage.key not in loaded.storages:
        notes.append(f"tensor {key!r} has no storage in the file; it is left out")
        return False
    try:
        dtype = by_name(ref.dtype)
        itemsize = dtype.itemsize
    except UnsupportedFormatError as error:
        notes.append(f"tensor {key!r} is left out: {error}")
        return False
    start, stop = loaded.storages[storage.key]
    inner = ref.storage_offset * itemsize
    length = reach(ref.shape, ref.stride)
    if length and inner + length * itemsize > stop - start:
        raise CorruptError(
            f"{file!r}: tensor {key!r} of shape {list(ref.shape)} and stride {list(ref.stride)} ends at byte "
            f"{inner + length * itemsize:,} of a storage of {plural(stop - start, 'byte')} at byte {start:,}; the file "
            "is damaged"
        )
    codec = codecs.RAW_BE if loaded.big and itemsize > 1 else codecs.RAW
    try:
        if any(lazy := ziparchive.lazy_view(ref, f"tensor {key!r}")):
            if codec == codecs.RAW_BE:
                raise UnsupportedFormatError(f"tensor {key!r} is a conjugate or negative view of big-endian elements")
            codec = {(True, False): codecs.RAW_CONJ, (False, True): codecs.RAW_NEG}.get(lazy, codecs.RAW_CONJ_NEG)
    except UnsupportedFormatError as error:
        notes.append(f"{error}; it is listed but not read")
        codec = codecs.OPAQUE
    builder.tensor(key, dtype, ref.shape if shape is None else shape)
    strides = ref.stride if length else None
    origin = (0,) * len(ref.shape)
    for offsets, sizes, at in ((origin, ref.shape, origin),) if boxes is None else boxes:
        first = inner + itemsize * sum(a * step for a, step in zip(at, ref.stride, strict=True)) if length else 0
        builder.chunk(key, offsets, sizes, file, start, stop, codec=codec, rank=rank, inner=first, strides=strides)
    return True


def _load_zip(view: LazyBytes, what: str) -> LegacyFile:
    archive = ziparchive.read_directory(view, what=what)
    record = archive.find("data.pkl")
    if record is None:
        raise CorruptError(f"{what} is a zip archive without data.pkl, so not from torch.save")
    refs: dict[str, StorageRef] = {}

    def remember(pid: object) -> object:
        ref = torch_legacy.module_or_storage(pid)
        if isinstance(ref, StorageRef):
            refs.setdefault(ref.key, ref)
        return ref

    loaded = unpickle.loads_with_globals(archive.read(record), what=f"{what} (data.pkl)", persistent_load=remember)
    storages = {}
    archive.fetch_headers()
    for key, ref in refs.items():
        storages[key] = storage_range(archive, ref, what)
    notes = ["a TorchScript archive: its code is not read"] if archive.find("constants.pkl") else []
    if not archive.has_checksums:
        notes.append("saved without checksums")
    return LegacyFile(loaded.value, storages, archive.byteorder == "big", loaded.globals, notes)


def storage_range(archive: ziparchive.Archive, ref: StorageRef, what: str) -> tuple[int, int]:
    """Return the byte range of a storage in a zip archive.

    Raises:
        CorruptError: its record is missing, or has another length.
    """
    record = archive.find(f"data/{ref.key}")
    if record is None:
        raise CorruptError(f"{what}: data.pkl names the storage {short(ref.key, 40)}, but its record is missing")
    start, stop = archive.payload(record)
    kind = by_name(ref.dtype) if ref.dtype else None
    size = ref.numel if kind is None else nbytes_of(kind, ref.numel)
    if size != stop - start and not (kind and kind.packed):  # torch counts packed quantized elements differently
        raise CorruptError(
            f"{what}: storage {short(ref.key, 40)} should have {plural(size, 'byte')}, but its record at byte "
            f"{start:,} has {stop - start:,}; the file is damaged"
        )
    return start, stop


def dotted(paths: Iterable[tuple[Any, ...]], notes: list[str]) -> list[str]:
    """Return different keys for paths: their steps joined by dots, with ``#2``, ``#3`` … after a repeated one."""
    found: dict[str, None] = {}
    twice: list[str] = []
    for path in paths:
        key = base = ".".join(map(tree_name, path)) if path else "tensor"
        count = 1
        while key in found:
            count += 1
            key = f"{base}#{count}"
        if count > 1:
            twice.append(base)
        found[key] = None
    if twice:
        notes.append(
            f"{plural(len(twice), 'dotted path', 'occur')} more than once; a number was appended: {some_of(twice, 5)}"
        )
    return list(found)


def tree_name(part: Any) -> str:
    """Return the name of a step of a path: a dict key or a list position."""
    if isinstance(part, str):
        return str(part)
    return str(part) if type(part) is int and abs(part) < 1 << 64 else short(part, 60)
