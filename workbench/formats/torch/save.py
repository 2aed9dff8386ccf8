"""``torch.save`` files, and folders of them under a Hugging Face index.

::

    ckpt.pt   zip archive (torch 1.6 and newer, see core/ziparchive.py)  │  legacy chain or tar (legacy.py)

    pytorch_model.bin.index.json                 {"weight_map": {"lm_head.weight": "pytorch_model-00002-…bin"}}
    pytorch_model-00001-of-00002.bin             one flat state_dict each; a file may hold more than the index lists
    pytorch_model-00002-of-00002.bin
    pytorch_model.bin                            or all in one file, without an index

Tensors at any depth become keys by their dotted path (file.py); the rest is non-tensor state (tree.py). Several tensors
may be views of one storage with their own offsets and strides; identical views are listed in ``meta["aliases"]`` (tied
weights).

An optimizer's ``state`` has integer ids. They are mapped to parameters only where that is certain
(:func:`workbench.names.optimizer.join_param_groups`); torch stores a ``state_dict`` in the order in which the model
registered its parameters, so the order of the keys is the order of ``model.parameters()``.

Source: torch 2.13 ``torch/serialization.py``; transformers 5.23 (``.bin`` index).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.core import ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import TensorRef
from workbench.core.place import Place
from workbench.core.words import plural, some_of
from workbench.errors import NotACheckpointError, WorkbenchError
from workbench.formats import Format
from workbench.formats.safetensors.weight_index import absent_files, find_tensors, missing_weights, read_index
from workbench.formats.torch import legacy as torch_legacy
from workbench.formats.torch import tree as torch_tree
from workbench.formats.torch.file import declare, keyed, load_tree, top, top_name, tree_objects
from workbench.formats.torch.legacy import LegacyFile
from workbench.formats.torch.tree import is_quantised, is_sparse_part
from workbench.names.optimizer import MOMENTS, name_numbered
from workbench.names.roles import ADAPTERS, listed_alone, resolve

Tensors = dict[str, tuple[tuple[Any, ...], TensorRef]]
INDEX = ".bin.index.json"
WHOLE = ("pytorch_model.bin", "adapter_model.bin", "diffusion_pytorch_model.bin")  #: files that identify a folder
STEPS = ("step", "global_step", "iteration")
MAX_LISTED = 200  #: maximum foreign globals and alias groups in the facts


def detect(place: Place) -> bool:
    """Return whether the file begins like one of the three formats, or the folder has Hugging Face's ``.bin`` files."""
    if place.file is None:
        return any(name in WHOLE or name.endswith(INDEX) for name in place.files)
    try:
        size = place.stat(place.file).size
        head = place.read(place.file, length=min(512, size))
        if head.startswith(b"PK\x03\x04"):
            return b"data.pkl" in head or _has_object(place)
        return torch_legacy.is_legacy(head) or torch_legacy.is_tar(head)
    except WorkbenchError:  # not our format; its own reader reports what is wrong
        return False


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of a file's tensors, or of a folder's weights.

    Raises:
        CorruptError, TruncatedError: the file is damaged or contradicts itself; the message names tensor and byte.
        UnsafeError: a bomb, or the index names a file outside the folder.
        UnsupportedFormatError: payloads are compressed.
    """
    return _read_file(place, place.file) if place.file is not None else read_folder(place)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the tree's top level without tensors, or a folder's config files; decoded on first access."""
    if place.file is None:
        names = [name for name in place.files if name.endswith(".json") and "config" in name]
        return LazyMap({name.removesuffix(".json"): partial(place.read_json, name) for name in names})
    return tree_objects(place, place.file, catalog.meta.get("objects", []))


def _read_file(place: Place, file: str) -> Catalog:
    """Return the catalog of one file, with names: the tree shows where a container ends."""
    loaded = load_tree(place, file)
    builder = CatalogBuilder("torch_save", place)
    builder.file(file, metadata=True, end=loaded.stop)
    notes = list(loaded.notes)
    tensors = keyed(loaded, repr(file), notes)
    paths = {key: path for key, (path, ref) in tensors.items() if declare(builder, file, key, ref, loaded, notes)}
    names = list(paths)
    fqns, roles = resolve(names, {"paths": paths})
    aliases = _aliases({key: tensors[key][1] for key in names})
    # a mask or a count is no parameter, and of tied ones only the first is
    untrained = {key for group in aliases for key in group[1:]}
    untrained |= {key for key in names if tensors[key][1].dtype in ("int64", "bool")}
    shapes = {key: tensors[key][1].shape for key in names}
    notes += _join_ids(loaded.tree, paths, shapes, fqns, roles, untrained)
    owner = {key: top_name(path[0]) if isinstance(loaded.tree, dict) else "value" for key, path in paths.items()}
    catalog = builder.build(
        {
            "step": _step(loaded.tree),
            "notes": notes,
            "objects": _object_names(loaded.tree, repr(file)),
            "foreign_globals": sorted(loaded.globals)[:MAX_LISTED],
            "aliases": aliases[:MAX_LISTED],
            "left_out": [key for key in tensors if key not in paths],
            "quantised": {key: name for key, name in owner.items() if is_quantised(tensors[key][1])},
            "sparse": {key: name for key, name in owner.items() if is_sparse_part(tensors[key][1])},
        }
    )
    return replace(catalog, fqns=fqns, roles=roles)


def _has_object(place: Place) -> bool:
    archive = ziparchive.read_directory(place.window(place.file or ""), what=repr(place.file))
    return archive.prefix is not None


# ---- names ---------------------------------------------------------------------------------------------------------


def _aliases(refs: Mapping[str, TensorRef]) -> list[list[str]]:
    """Return groups of keys that are the same view of the same bytes."""
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
    untrained: set[str],
) -> list[str]:
    """Fill in the fqns of integer ids if they are certain. Return notes about the others."""
    keys = list(paths)
    params = {
        listed_alone(fqn, role)[0]: shapes[key]
        for key, fqn, role in zip(keys, fqns, roles, strict=True)
        if role in ("param", *ADAPTERS) and fqn is not None and key not in untrained
    }
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
        numbers = {position: number for position, (number, _) in within.items()}
        called, groups = ".".join(map(str, prefix)), optimizer["param_groups"]
        notes += name_numbered(fqns, numbers, moments, groups, params, ordered=True, optimizer=called)
    return notes


# ---- non-tensor state ----------------------------------------------------------------------------------------------


def _object_names(tree: object, what: str) -> list[str]:
    return list(top(torch_tree.prune(tree, what=what)))


def _step(tree: object) -> int | None:
    if not isinstance(tree, dict):
        return None
    values = [tree.get(name) for name in STEPS]
    if isinstance(tree.get("trainer_state"), dict):
        values.append(tree["trainer_state"].get("global_step"))
    return next((value for value in values if type(value) is int), None)


# ---- folders ---------------------------------------------------------------------------------------------------------


def read_folder(place: Place) -> Catalog:
    """Return the catalog of the tensors in the index, or in the single file.

    Raises:
        CorruptError, TruncatedError: a file is damaged; or, as ``check_files`` finds, the index contradicts the files.
        MissingFileError: (from ``check_files``) a file that the index names is missing.
        UnsafeError: the index names a file outside the folder.
    """
    notes: list[str] = []
    refs: dict[str, TensorRef] = {}
    lost: dict[str, Any] = {}
    builder = CatalogBuilder("torch_save", place)
    name = next((name for name in sorted(place.files, key=len) if name.endswith(INDEX)), None)
    if name is None:
        whole = next((name for name in WHOLE if name in place.files), None)
        if whole is None:
            raise NotACheckpointError(f"{place.path!r} has neither *{INDEX} nor one of {', '.join(WHOLE)}")
        loaded, tensors = _tensors(builder, whole, notes)
        refs = _add(builder, whole, loaded, tensors, tensors, notes)
    else:
        index = read_index(place, name)
        absent = absent_files(place, index)
        builder.file(name, metadata=True)
        files = {file: _tensors(builder, file, notes) for file in index.files if file not in set(absent)}
        found, lost = find_tensors(place, index, absent, {file: held for file, (_, held) in files.items()}, notes)
        listed: dict[str, list[str]] = defaultdict(list)
        for key, file in found.items():
            listed[file].append(key)
        for file, (loaded, tensors) in files.items():
            refs |= _add(builder, file, loaded, tensors, listed[file], notes)
    quantised = dict.fromkeys((key for key, ref in refs.items() if is_quantised(ref)), "")
    sparse = dict.fromkeys((key for key, ref in refs.items() if is_sparse_part(ref)), "")
    return builder.build({"step": None, "notes": notes, "quantised": quantised, "sparse": sparse, **lost})


def _tensors(builder: CatalogBuilder, file: str, notes: list[str]) -> tuple[LegacyFile, Tensors]:
    """Decode one file: its tree, and its tensors by key."""
    loaded = load_tree(builder.place, file)
    builder.file(file, metadata=True, end=loaded.stop)
    return loaded, keyed(loaded, repr(file), notes)


def _add(
    builder: CatalogBuilder,
    file: str,
    loaded: LegacyFile,
    tensors: Tensors,
    listed: Collection[str],
    notes: list[str],
) -> dict[str, TensorRef]:
    """Declare the listed tensors of one file, and return them."""
    for key in listed:
        declare(builder, file, key, tensors[key][1], loaded, notes)
    if extra := sorted(tensors.keys() - set(listed)):
        notes.append(
            f"{plural(len(extra), 'tensor')} of {file!r} that the index does not list, left out: {some_of(extra, 5)}"
        )
    return {key: tensors[key][1] for key in listed}


FORMAT = Format(
    name="torch_save",
    title="torch.save",
    marks="zip, legacy or tar file",
    read_from="torch 0.1 – 2.13",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing_weights,
    single_file=True,
    suffixes=(".bin", ".pt", ".pth", ".ckpt", ".tar"),
    beside=(".pt", ".pth", ".ckpt"),
    loose=True,
    framework="torch",
)
