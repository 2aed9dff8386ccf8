"""``torch.save`` files, and folders of them under a Hugging Face index.

::

    ckpt.pt   zip archive (torch 1.6 and newer, see core/ziparchive.py)  │  legacy chain or tar (torch_legacy.py)

    pytorch_model.bin.index.json                 {"weight_map": {"lm_head.weight": "pytorch_model-00002-…bin"}}
    pytorch_model-00001-of-00002.bin             one flat state_dict each

Tensors at any depth become keys by their dotted path, the rest is state (torch_tree.py). Nothing is imported or run:
classes that are not torch's stay named, inert leaves. Several tensors may be views of one storage, with offsets and
strides of their own; those that are the very same view are listed in ``meta["aliases"]`` (tied weights).

An optimizer's ``state`` has integer ids. They are joined to parameters only where that is certain
(:func:`workbench.naming.join_param_groups`); torch stores a ``state_dict`` in the order in which the model registered
its parameters, so the order of the keys is the order of ``model.parameters()``.

Source: torch 2.13 ``torch/serialization.py``, transformers 5.23 (``.bin`` index).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from workbench import naming
from workbench.core import catalog as cat
from workbench.core import unpickle, ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.dtypes import by_name, nbytes_of
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.core.stubs import StorageRef, TensorRef, short
from workbench.errors import CorruptError, MissingFileError, TruncatedError, UnsupportedFormatError, WorkbenchError
from workbench.formats import torch_legacy, torch_tree
from workbench.formats.torch_legacy import Loaded

__all__ = ["detect", "load_tree", "read_catalog", "read_file", "read_objects", "tree_objects"]

INDEX = ".bin.index.json"
WHOLE = ("pytorch_model.bin", "adapter_model.bin", "diffusion_pytorch_model.bin")  #: folders are known by these
STEPS = ("step", "global_step", "iteration")
MAX_LISTED = 200  #: foreign globals and alias groups kept in the facts
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "master_param")


def detect(place: Place) -> bool:
    """Whether the file begins like one of the three formats, or the folder holds Hugging Face's ``.bin`` weights."""
    if place.file is None:
        return any(name in WHOLE or name.endswith(INDEX) for name in place.files)
    try:
        size = place.stat(place.file).size
        head = place.read(place.file, length=min(512, size))
        if head.startswith(b"PK\x03\x04"):
            return b"data.pkl" in head or _has_object(place)
        return torch_legacy.is_legacy(head) or torch_legacy.is_tar(head)
    except WorkbenchError:  # a stranger's file; what is wrong with it is for its own reader to say
        return False


def read_catalog(place: Place) -> Catalog:
    """Columns of every tensor of a file, or of a folder's weights.

    Raises:
        CorruptError, TruncatedError: damaged, or contradicting itself; names the tensor and the byte.
        UnsafeError: a bomb, or an index that leads out of the folder.
        UnsupportedFormatError: compressed payloads.
    """
    return read_file(place, place.file) if place.file is not None else _read_folder(place)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """The top level of the tree without its tensors, or a folder's config files; decoded on first access."""
    if place.file is None:
        names = [name for name in place.files if name.endswith(".json") and "config" in name]
        return LazyMap({name.removesuffix(".json"): partial(place.read_json, name) for name in names})
    return tree_objects(place, place.file, catalog.meta.get("objects", []))


def read_file(place: Place, file: str, format: str = "torch_save") -> Catalog:
    """The catalog of one file, with names: the tree says where a container ends."""
    loaded = load_tree(place, file)
    builder = CatalogBuilder(format, place)
    builder.file(file, metadata=True)
    notes = list(loaded.notes)
    tensors = _keyed(loaded, repr(file), notes)
    paths = {key: path for key, (path, ref) in tensors.items() if _add(builder, file, key, ref, loaded, notes)}
    names = list(paths)
    fqns, roles = naming.resolve(names, {"paths": paths})
    aliases = _aliases({key: tensors[key][1] for key in names})
    shapes = {key: tensors[key][1].shape for key in names}
    notes += _join_ids(loaded.tree, paths, shapes, fqns, roles, {key for group in aliases for key in group[1:]})
    catalog = builder.build(
        {
            "step": _step(loaded.tree),
            "notes": notes,
            "objects": _object_names(loaded.tree, repr(file)),
            "foreign_globals": sorted(loaded.globals)[:MAX_LISTED],
            "aliases": aliases[:MAX_LISTED],
        }
    )
    return replace(catalog, fqns=fqns, roles=roles)


def tree_objects(place: Place, file: str, names: Sequence[str]) -> LazyMap:
    """The non-tensor state of one file by the names at its top level (``value`` when that is no dict)."""

    @cache
    def whole() -> Mapping[str, Any]:
        return _top(torch_tree.prune(load_tree(place, file).tree, what=repr(file)))

    return LazyMap({name: partial(_item, whole, name) for name in names})


def _item(whole: Callable[[], Mapping[str, Any]], name: str) -> Any:
    return whole()[name]


def load_tree(place: Place, file: str) -> Loaded:
    """Decode a file's structure; tensors stay references into its storages."""
    what = repr(file)
    view = place.map(file)
    if view[:4] == b"PK\x03\x04":
        return _load_zip(view, what)
    head = bytes(view[:512])
    if torch_legacy.is_legacy(head):
        return torch_legacy.load_legacy(view, what=what)
    if torch_legacy.is_tar(head):
        return torch_legacy.load_tar(view, what=what)
    if not head:
        raise TruncatedError(f"file {what} is empty")
    raise CorruptError(f"{what} begins with {head[:8]!r}: neither a zip archive nor an older format of torch.save")


# ---- one file ------------------------------------------------------------------------------------------------------


def _has_object(place: Place) -> bool:
    archive = ziparchive.read_directory(place.map(place.file or ""), what=repr(place.file))
    return archive.prefix is not None


def _load_zip(view: memoryview, what: str) -> Loaded:
    archive = ziparchive.read_directory(view, what=what)
    record = archive.find("data.pkl")
    if record is None:
        raise CorruptError(f"{what} is a zip archive without data.pkl, so not of torch.save")
    refs: dict[str, StorageRef] = {}

    def remember(pid: object) -> object:
        ref = torch_legacy.module_or_storage(pid)
        if isinstance(ref, StorageRef):
            refs.setdefault(ref.key, ref)
        return ref

    loaded = unpickle.loads_with_globals(archive.read(record), what=f"{what} (data.pkl)", persistent_load=remember)
    storages = {}
    for key, ref in refs.items():
        payload = archive.find(f"data/{key}")
        if payload is None:
            raise CorruptError(f"{what}: data.pkl names the storage {short(key, 40)}, but no such record is there")
        start, stop = storages[key] = archive.payload(payload)
        kind = by_name(ref.dtype) if ref.dtype else None
        size = ref.numel if kind is None else nbytes_of(kind, ref.numel)
        if size != stop - start and not (kind and kind.packed):  # torch counts packed quantised elements its own way
            raise CorruptError(
                f"{what}: storage {short(key, 40)} should have {size:,} bytes, its record at byte {start:,} has "
                f"{stop - start:,}; the file is damaged"
            )
    notes = ["a TorchScript archive: its code is not looked at"] if archive.find("constants.pkl") else []
    if not archive.has_checksums:
        notes.append("saved without checksums")
    return Loaded(loaded.value, storages, archive.byteorder == "big", loaded.globals, notes)


def _keyed(loaded: Loaded, what: str, notes: list[str]) -> dict[str, tuple[tuple[Any, ...], TensorRef]]:
    """Tensors by dotted path; a path that is taken gets ``#2``, ``#3`` … in the tree's order."""
    found: dict[str, tuple[tuple[Any, ...], TensorRef]] = {}
    twice: list[str] = []
    for path, ref in torch_tree.flatten(loaded.tree, what=what):
        key = base = ".".join(map(_name, path)) if path else "tensor"
        count = 1
        while key in found:
            count += 1
            key = f"{base}#{count}"
        if count > 1:
            twice.append(base)
        found[key] = path, ref
    if twice:
        notes.append(f"{len(twice)} paths are the same once they are joined by dots, and got a number: {_some(twice)}")
    return found


def _name(part: Any) -> str:
    if type(part) is str:
        return part
    return str(part) if type(part) is int and abs(part) < 1 << 64 else short(part, 60)


def _add(builder: CatalogBuilder, file: str, key: str, ref: TensorRef, loaded: Loaded, notes: list[str]) -> bool:
    """Declare a tensor and where its bytes are; ``False`` where its elements cannot be had."""
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
    reach = 0 if 0 in ref.shape else 1 + sum((n - 1) * step for n, step in zip(ref.shape, ref.stride, strict=True))
    if reach and inner + reach * itemsize > stop - start:
        raise CorruptError(
            f"{file!r}: tensor {key!r} of shape {list(ref.shape)} and stride {list(ref.stride)} ends at byte "
            f"{inner + reach * itemsize:,} of a storage of {stop - start:,} at byte {start:,}; the file is "
            "damaged"
        )
    codec = cat.RAW_BE if loaded.big and itemsize > 1 else cat.RAW
    if ref.attrs.get("metadata"):  # a conjugate or negative view: the bits are not the values
        notes.append(f"tensor {key!r} is a lazy view ({short(ref.attrs['metadata'], 40)}) and cannot be read as stored")
        codec = cat.OPAQUE
    builder.tensor(key, dtype, ref.shape)
    strides = ref.stride if reach else None
    origin = (0,) * len(ref.shape)
    builder.chunk(key, origin, ref.shape, file, start, stop, codec=codec, inner=inner if reach else 0, strides=strides)
    return True


def _aliases(refs: Mapping[str, TensorRef]) -> list[list[str]]:
    """Groups of keys that are the same view of the same bytes."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for key, ref in refs.items():
        if 0 not in ref.shape:
            groups[ref.storage.key, ref.storage_offset, ref.shape, ref.stride, ref.dtype].append(key)
    return [keys for keys in groups.values() if len(keys) > 1]


def _join_ids(
    tree: object,
    paths: Mapping[str, tuple[Any, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    fqns: list[str | None],
    roles: list[str],
    tied: set[str],
) -> list[str]:
    """Fill in the fqns of integer ids where they are certain; returns notes on those that are not."""
    keys = list(paths)
    params = {fqn: shapes[key] for key, fqn, role in zip(keys, fqns, roles, strict=True)
              if role == "param" and fqn is not None and key not in tied}  # fmt: skip
    notes: list[str] = []
    at = {path: position for position, path in enumerate(paths.values())}
    for prefix, optimizer in torch_tree.optimizers(tree):
        within = {
            position: (path[len(prefix) + 1], path[-1])
            for path, position in at.items()
            if path[: len(prefix)] == prefix and len(path) == len(prefix) + 3 and path[len(prefix)] == "state"
        }
        moments = {number: shapes[keys[p]] for p, (number, state) in within.items() if state in MOMENTS}
        if not any(type(number) is int for number, _ in within.values()):
            continue
        joined = naming.join_param_groups(
            optimizer["param_groups"], moments, list(params), params, ordered=True
        )  # fmt: skip
        for position, (number, _) in within.items():
            fqns[position] = (joined or {}).get(number)
        lost = len({number for number, _ in within.values()} - set(joined or ()))
        if lost:
            notes.append(naming.uncertain(".".join(map(str, prefix)), lost))
    return notes


# ---- what is no tensor ---------------------------------------------------------------------------------------------


def _top(pruned: object) -> dict[str, Any]:
    if pruned is None:
        return {}
    if not isinstance(pruned, dict):
        return {"value": pruned}
    found: dict[str, Any] = {}
    for name, value in pruned.items():
        found[name if type(name) is str else short(name, 60)] = value
    return found


def _object_names(tree: object, what: str) -> list[str]:
    return list(_top(torch_tree.prune(tree, what=what)))


def _step(tree: object) -> int | None:
    if not isinstance(tree, dict):
        return None
    values = [tree.get(name) for name in STEPS]
    if isinstance(tree.get("trainer_state"), dict):
        values.append(tree["trainer_state"].get("global_step"))
    return next((value for value in values if type(value) is int), None)


# ---- folders -------------------------------------------------------------------------------------------------------


def _read_folder(place: Place) -> Catalog:
    notes: list[str] = []
    index = next((name for name in sorted(place.files, key=len) if name.endswith(INDEX)), None)
    builder = CatalogBuilder("torch_save", place)
    if index is None:
        weights, files = None, [next(name for name in WHOLE if name in place.files)]
    else:
        weights = _weight_map(place, index)
        files = sorted(set(weights.values()))
        builder.file(index, metadata=True)
    for file in files:
        try:
            place.resolve(file)
        except MissingFileError:
            raise MissingFileError(
                f"index {index!r} names the file {file!r}, which is absent; download or restore it"
            ) from None
        builder.file(file, metadata=True)
        loaded = load_tree(place, file)
        tensors = _keyed(loaded, repr(file), notes)
        mine = tensors if weights is None else {key for key, where in weights.items() if where == file}
        for key in mine:
            if key not in tensors:
                raise CorruptError(f"index {index!r} puts tensor {key!r} into {file!r}, which lacks it")
            _add(builder, file, key, tensors[key][1], loaded, notes)
        extra = [key for key in tensors if key not in mine]
        if extra:
            notes.append(f"{len(extra)} tensors of {file!r} that the index does not list are left out: {_some(extra)}")
    return builder.build({"step": None, "notes": notes})


def _weight_map(place: Place, index: str) -> dict[str, str]:
    document = place.read_json(index)
    weights = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CorruptError(f"index {index!r} has no weight_map of tensor names to file names")
    return weights


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f", … {len(names) - 5:,} more" if len(names) > 5 else "")
