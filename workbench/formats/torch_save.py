"""``torch.save`` files, and folders of them under a Hugging Face index.

::

    ckpt.pt   zip archive (torch 1.6 and newer, see core/ziparchive.py)  │  legacy chain or tar (torch_legacy.py)

    pytorch_model.bin.index.json, pytorch_model-00001-of-00002.bin …        torch_save_folder.py

Tensors at any depth become keys by their dotted path (torch_save_file.py), the rest is state (torch_tree.py). Several
tensors may be views of one storage, with offsets and strides of their own; those that are the very same view are listed
in ``meta["aliases"]`` (tied weights).

An optimizer's ``state`` has integer ids. They are joined to parameters only where that is certain
(:func:`workbench.naming.join_param_groups`); torch stores a ``state_dict`` in the order in which the model registered
its parameters, so the order of the keys is the order of ``model.parameters()``.

Source: torch 2.13 ``torch/serialization.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from workbench import naming
from workbench.core import ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import TensorRef, short
from workbench.core.place import Place
from workbench.errors import WorkbenchError
from workbench.formats import torch_legacy, torch_tree
from workbench.formats.torch_save_file import declare, keyed, load_tree
from workbench.formats.torch_save_folder import INDEX, WHOLE, read_folder
from workbench.formats.torch_tree import is_quantised

__all__ = ["detect", "load_tree", "read_catalog", "read_file", "read_objects", "tree_objects"]

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
    return read_file(place, place.file) if place.file is not None else read_folder(place)


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
    builder.file(file, metadata=True, end=loaded.stop)
    notes = list(loaded.notes)
    tensors = keyed(loaded, repr(file), notes)
    paths = {key: path for key, (path, ref) in tensors.items() if declare(builder, file, key, ref, loaded, notes)}
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
            "left_out": [key for key in tensors if key not in paths],
            "quantised": {
                key: _top_name(path[0]) if isinstance(loaded.tree, dict) else "value"
                for key, path in paths.items()
                if is_quantised(tensors[key][1])
            },
        }
    )
    return replace(catalog, fqns=fqns, roles=roles)


def tree_objects(place: Place, file: str, names: Sequence[str]) -> LazyMap:
    """The non-tensor state of one file by the names at its top level (``value`` when that is no dict)."""

    @cache
    def whole() -> Mapping[str, Any]:
        return _top(torch_tree.prune(load_tree(place, file).tree, what=repr(file)))

    return LazyMap({name: partial(_item, whole, name) for name in names})


def _has_object(place: Place) -> bool:
    archive = ziparchive.read_directory(place.window(place.file or ""), what=repr(place.file))
    return archive.prefix is not None


def _item(whole: Callable[[], Mapping[str, Any]], name: str) -> Any:
    return whole()[name]


# ---- names ---------------------------------------------------------------------------------------------------------


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
        found[_top_name(name)] = value
    return found


def _top_name(name: object) -> str:
    return name if type(name) is str else short(name, 60)


def _object_names(tree: object, what: str) -> list[str]:
    return list(_top(torch_tree.prune(tree, what=what)))


def _step(tree: object) -> int | None:
    if not isinstance(tree, dict):
        return None
    values = [tree.get(name) for name in STEPS]
    if isinstance(tree.get("trainer_state"), dict):
        values.append(tree["trainer_state"].get("global_step"))
    return next((value for value in values if type(value) is int), None)
