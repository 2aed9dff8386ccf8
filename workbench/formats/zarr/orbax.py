r"""Orbax, JAX's checkpoints: zarr arrays in an OCDBT database, or in folders, and JSON about them.

::

    1000/                               a step, or a single save without items
      _CHECKPOINT_METADATA              handlers of the items, metrics, and when the save was begun and committed
      default/  state/  items/ …        an item is a tree of arrays …
        _METADATA                       its leaves: path, type, shape; use_ocdbt, use_zarr3
        _sharding                       of each array: mesh and PartitionSpec, by its name in base64
        _strings.json                   leaves that are strings
        array_metadatas/process_0       shapes of chunks, by process
        manifest.ocdbt  d/…             the database: keys such as params.wi.kernel/.zarray, params.wi.kernel/0.1
        ocdbt.process_0/d/…             data files, by process: chunks of its devices
        params.wi.kernel/.zarray  0.1   … or, with use_ocdbt=False, a folder per array
      iterator/metadata                 … or JSON …
      rng/jax_random_key/…              … or the key of a generator

Each process saves its own database, and process 0 merges their trees into ``manifest.ocdbt``; the chunks stay. A
save is written into ``1000.orbax-checkpoint-tmp`` (and its items likewise) and renamed in the end. A chunk is the part
of one device.

Keys of the item ``default``, ``state`` or ``items``, or of the only one with arrays, have no prefix; those of others
have the item's name. Moments of optax become ``exp_avg`` and ``exp_avg_sq``, counts ``step``.

Sources: orbax-checkpoint 0.12.8 with tensorstore 0.1.86.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from workbench.core import box, jsonsafe
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.garbage import uncollected
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import NotACheckpointError, WorkbenchError, quoted
from workbench.formats import Format
from workbench.formats.zarr.array import DESCRIPTIONS
from workbench.formats.zarr.chunks import Adder
from workbench.formats.zarr.ocdbt import MANIFEST
from workbench.names.arrays import meaning

LOOKED = 4  #: maximum folders to search for an array
TEMPORARY = ".orbax-checkpoint-tmp"
MAIN = ("default", "state", "items")  #: items whose keys need no prefix: Orbax's, flax's and MaxText's names
STEP, TREE, SHARDING, STRINGS = "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "_strings.json"
JSON_ITEM = "metadata"  #: file of an item that is JSON
COMMITTED = "commit_success.txt"  #: in every folder of a save, whatever else is in it
DOCUMENTS = (STEP, TREE, SHARDING, STRINGS, JSON_ITEM)
_PROCESS = re.compile(r"ocdbt\.process_\d{1,8}")
_KEY = re.compile(r"\w+_random_key")
#: Leaves that are stored as arrays, as ``_METADATA`` spells their types.
STORED = ("jax.Array", "np.ndarray", "scalar")
_TYPE = b'"value_type": "'
_STORED = tuple(_TYPE + kind.encode() + b'"' for kind in STORED)
TAIL = 4 << 10  #: bytes at the end of ``_METADATA`` in which the flags are
_MESH = re.compile(rb'NamedSharding\\", \\"shape\\": (\[[\d, ]*\]), \\"axis_names\\": (\[[^\]]*\])')


def detect(place: Place) -> bool:
    """Return whether the folder has one of Orbax's own files or folders, or an item that has."""
    if place.file is not None:
        return False
    if {MANIFEST, STEP, TREE} & set(place.files) or any(map(_PROCESS.fullmatch, place.folders)):
        return True
    try:
        return any({MANIFEST, TREE} & set(place.sub(item).files) for item in MAIN if item in place.folders)
    except WorkbenchError:  # a link out of the folder, or no permission
        return False


def missing(place: Place) -> str:
    """Describe a save that was not committed or merged; Orbax writes into a folder with another name."""
    if TEMPORARY in place.name:
        return f"the folder was not renamed to {place.name.partition(TEMPORARY)[0]!r}, which is the last step of a save"
    for folder in place.folders:
        if TEMPORARY in folder:
            final = folder.partition(TEMPORARY)[0]
            return f"the item {folder!r} was not renamed to {final!r}, which is the last step of its save"
    if STEP in place.files:
        document = place.read_json(STEP)
        if isinstance(document, dict) and document.get("commit_timestamp_nsecs", 0) is None:
            return f"{STEP} has no commit time: the save was interrupted"
        items = document.get("item_handlers") if isinstance(document, dict) else None
        for item in items if isinstance(items, dict) else ():
            inner = place.sub(item) if item in place.folders else None
            if inner is None or not ({*inner.files, *inner.folders} - {COMMITTED}):
                return f"the item {quoted(item)}, which {STEP} lists, is not there or empty; restore it"
        for tree in _trees(place):
            if TREE not in tree.at(place).files:
                return f"{tree.file(TREE)!r}, which lists the arrays, is missing; restore it"
    return next((why for tree in _trees(place) if (why := _unmerged(place, tree))), "")


@uncollected()
def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every array.

    Raises:
        CorruptError: a database, or an array's description, contradicts itself or its files.
        NotACheckpointError: the folder holds no array.
    """
    adder = Adder(place, CatalogBuilder("orbax", place))
    trees = list(_trees(place))
    meta: dict[str, Any] = {}
    counts = []
    for tree in trees:
        before = len(adder.builder)
        _add(adder, place, tree, meta)
        counts.append(len(adder.builder) - before)
    if not adder.arrays and not adder.notes:
        raise NotACheckpointError(f"{place.path!r} holds no array of an Orbax checkpoint")
    for _, name in _documents(place):
        adder.builder.file(name, metadata=True)
    catalog = adder.builder.build({**adder.meta(), **meta})
    if "incomplete" not in meta:
        reasons = (
            _lost(place, tree, catalog, count) or _partly_merged(place, tree, catalog)
            for tree, count in zip(trees, counts, strict=True)
        )
        if why := next(filter(None, reasons), ""):
            meta["incomplete"] = why
    fqns, roles = meaning(catalog.keys)
    return replace(catalog, fqns=fqns, roles=roles, meta={**catalog.meta, **meta})


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the JSON documents by name, those of items after the item's name and a dot."""
    makers: dict[str, Callable[[], Any]] = {}
    for name, file in _documents(place):
        makers[name] = partial(_shardings if file.rpartition("/")[2] == SHARDING else Place.read_json, place, file)
    return LazyMap(makers)


@dataclass(frozen=True, slots=True)
class _Item:
    """An item that is a tree of arrays, or one generator's key: its name in keys, if any, and its folder."""

    item: str
    folder: str
    key: bool = False

    def name(self, array: str) -> str:
        """Return the key of an array."""
        return self.item if self.key else f"{self.item}.{array}" if self.item else array

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return f"{self.folder}/{name}" if self.folder else name

    def at(self, place: Place) -> Place:
        """Return the item's own place."""
        return place.sub(self.folder) if self.folder else place


def _trees(place: Place) -> Iterator[_Item]:
    if _is_tree(place):
        yield _Item("", "")
        return
    found: list[_Item] = []
    for folder in place.folders:
        if place.is_link(folder):
            continue
        item, inner = folder.partition(TEMPORARY)[0], place.sub(folder)
        if _is_tree(inner):
            found.append(_Item(item, folder))
            continue
        for key in inner.folders:
            if _KEY.fullmatch(key.partition(TEMPORARY)[0]) and _is_tree(inner.sub(key)):
                found.append(_Item(item, f"{folder}/{key}", key=True))
    names = [tree.item for tree in found if not tree.key]
    main = next((item for item in MAIN if item in names), names[0] if len(names) == 1 else None)
    yield from (replace(tree, item="") if tree.item == main and not tree.key else tree for tree in found)


def _is_tree(place: Place) -> bool:
    if {MANIFEST, TREE} & set(place.files) or any(map(_PROCESS.fullmatch, place.folders)):
        return True
    looked = (place.sub(one).files for one in place.folders[:LOOKED] if not place.is_link(one))
    return any(name in files for files in looked for name in DESCRIPTIONS)


def _add(adder: Adder, place: Place, tree: _Item, meta: dict[str, Any]) -> None:
    """Add the arrays of a tree: of its database, of those of the processes if they were not merged, or its folders."""
    here = tree.at(place)
    if MANIFEST in here.files:
        adder.databases([tree.folder], tree.name)
    elif why := _unmerged(place, tree):
        meta["incomplete"] = why
        written = [one for one in here.folders if _PROCESS.fullmatch(one) and MANIFEST in here.sub(one).files]
        adder.databases([tree.file(process) for process in written], tree.name)  # process 0 alone describes arrays
    else:
        adder.folder(tree.folder, tree.name)
    if SHARDING in here.files and "mesh" not in meta:
        meshes = set(_MESH.findall(place.read(tree.file(SHARDING))))
        if len(meshes) == 1:
            sizes, axes = (
                jsonsafe.loads(part.replace(b"\\", b""), what=repr(tree.file(SHARDING))) for part in meshes.pop()
            )
            if len(axes) == len(sizes):
                found = dict(zip(axes, sizes, strict=True))
                meta["mesh"] = {"axes": found, "ranks": {}, "unknown": [], "source": tree.file(SHARDING)}


def _unmerged(place: Place, tree: _Item) -> str:
    """Return why a tree has no merged database although it should have one; empty otherwise."""
    here = tree.at(place)
    if MANIFEST in here.files:
        return ""
    processes = sum(_PROCESS.fullmatch(one) is not None for one in here.folders)
    if processes:
        return (
            f"{tree.file(MANIFEST)!r} is missing: the databases of {plural(processes, 'process')} (ocdbt.process_0 …) "
            "were not merged, which is the last step of a save"
        )
    if TREE in here.files:
        size = here.files[TREE].size
        if b'"use_ocdbt": true' in place.read(tree.file(TREE), start=max(size - TAIL, 0), length=min(size, TAIL)):
            return f"{tree.file(MANIFEST)!r} is missing, and {TREE} says that the arrays are in an OCDBT database"
    return ""


def _lost(place: Place, tree: _Item, catalog: Catalog, count: int) -> str:
    """Return which arrays of the tree are not stored; empty if there is none. ``count`` are stored."""
    if tree.key:
        return "" if count else f"the generator's key of the item {tree.item!r} is not stored; restore {tree.folder!r}"
    if TREE not in tree.at(place).files:
        return ""
    data = place.read(tree.file(TREE))
    first = data.count(_STORED[0])
    if count == (first if data.count(_TYPE) == first else sum(map(data.count, _STORED))):
        return ""  # decoding the document would take longer than all else
    document = jsonsafe.loads(data, what=repr(tree.file(TREE)))
    leaves = document.get("tree_metadata") if isinstance(document, dict) else None
    lost = []
    for leaf in leaves.values() if isinstance(leaves, dict) else ():
        value, path = (
            (leaf.get(part) for part in ("value_metadata", "key_metadata")) if isinstance(leaf, dict) else (0, 0)
        )
        if isinstance(value, dict) and isinstance(path, list) and value.get("value_type") in STORED:
            name = tree.name(".".join(str(part.get("key")) for part in path if isinstance(part, dict)))
            if not value.get("skip_deserialize") and name not in catalog.index:
                lost.append(name)
    if not lost:
        return ""
    return (
        f"{len(lost):,} of {len(leaves or ()):,} leaves that {tree.file(TREE)!r} lists are not stored: {lost[0]!r} …; "
        "restore the files, or open with partial=True to read the rest"
    )


def _partly_merged(place: Place, tree: _Item, catalog: Catalog) -> str:
    """Return which process's chunks are absent because its database was not merged; empty if there is none."""
    first = catalog.replica == 0
    stored = np.bincount(catalog.tensor[first], box.volume(catalog.sizes[first]), minlength=len(catalog))
    holes = np.flatnonzero(stored < catalog.numel)
    if not len(holes):
        return ""
    for process in filter(_PROCESS.fullmatch, tree.at(place).folders):
        if not any(file.startswith(tree.file(process) + "/") for file in catalog.files):
            return (
                f"{plural(len(holes), 'tensor', 'lack')} chunks, such as {catalog.keys[holes[0]]!r}, and the merged "
                f"database refers to no data file of {tree.file(process)!r}: it was not merged; restore "
                f"{tree.file(MANIFEST)!r} or open with partial=True to read the rest"
            )
    return ""


def _documents(place: Place) -> Iterator[tuple[str, str]]:
    """Yield the JSON documents: name, and file."""
    items = () if _is_tree(place) else (one for one in place.folders if not place.is_link(one))
    for folder in ("", *items):
        files = (place.sub(folder) if folder else place).files
        item = folder.partition(TEMPORARY)[0]
        for file in DOCUMENTS:
            if file in files and (folder or file != JSON_ITEM):
                name = item if file == JSON_ITEM else f"{item}.{file}" if item else file
                yield name.removesuffix(".json"), f"{folder}/{file}" if folder else file


def _shardings(place: Place, file: str) -> Any:
    """Read ``_sharding`` with its names and descriptions decoded: mesh, axis names and PartitionSpec by array."""
    document = place.read_json(file)
    found = {}
    for name, text in document.items() if isinstance(document, dict) else ():
        try:
            key = base64.b64decode(name, validate=True).decode()
        except (binascii.Error, ValueError):
            key = name
        found[key] = jsonsafe.loads(text.encode(), what=f"{key!r} of {file!r}") if isinstance(text, str) else text
    return found


FORMAT = Format(
    name="orbax",
    title="Orbax (JAX)",
    marks="manifest.ocdbt, _METADATA, _CHECKPOINT_METADATA",
    read_from="orbax-checkpoint 0.12",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    own_bytes=True,
)
