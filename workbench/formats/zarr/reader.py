"""A folder of zarr 2 arrays: Orbax with ``use_ocdbt=False``, and Megatron-core's zarr backend (until 0.13).

::

    checkpoint/                                     Orbax                     iter_0000100/               Megatron
      _METADATA  _CHECKPOINT_METADATA               the tree, commit times      metadata.json  common.pt
      params.embedder.embedding/.zarray  0.0 …      a folder an array           decoder.layers.…weight/.zarray  0.0.0 …
      opt_state.1.0.mu.embedder.embedding/…         optax: mu, nu, count        optimizer.state.exp_avg.…/…

A chunk is the part of one device, or of one rank, so the grid is the sharding. The moments of optax become the roles
``exp_avg`` and ``exp_avg_sq`` of their parameters, counts become ``step``. A chunk without a file is a hole.

Orbax's default, OCDBT, keeps the same chunks in databases of its own; it is not read here.

Sources: orbax-checkpoint 0.12.8; megatron-core 0.12 ``dist_checkpointing/strategies/zarr.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.core import codecs
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.errors import NotACheckpointError, UnsupportedFormatError, WorkbenchError
from workbench.formats import Format
from workbench.formats.zarr.array import ARRAY, chunks, read_array
from workbench.names.roles import resolve

DEPTH = 4  #: folders between the checkpoint and an array, whose name may contain "/"
LOOKED = 4  #: folders that are looked into to recognize a place
TEMPORARY = ".orbax-checkpoint-tmp"
OBJECTS = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "_strings.json", "metadata.json")
_OPTAX = re.compile(r"(?:opt_state|optimizer|opt)((?:\.\d+)+)\.(mu|nu|count)(?:\.(.+))?", re.DOTALL)
_MEGATRON = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)", re.DOTALL)
PARAMS = "params."  #: where a train state has its parameters
ROLES = {"mu": "exp_avg", "nu": "exp_avg_sq", "count": "step", "fp32_param": "master"}


def detect(place: Place) -> bool:
    """Return whether the folder's first folders are arrays."""
    if place.file is not None or not place.folders:
        return False
    try:
        return any(ARRAY in place.sub(folder).files for folder in place.folders[:LOOKED])
    except WorkbenchError:  # a link out of the folder, or no permission
        return False


def missing(place: Place) -> str:
    """Describe a save that was not renamed; Orbax writes into a folder with another name."""
    if TEMPORARY in place.name:
        return f"the folder was not renamed to {place.name.partition(TEMPORARY)[0]!r}, which ends a save"
    if "_METADATA" in place.files and "_CHECKPOINT_METADATA" in place.files:
        document = place.read_json("_CHECKPOINT_METADATA")
        if isinstance(document, dict) and document.get("commit_timestamp_nsecs", 0) is None:
            return "_CHECKPOINT_METADATA has no commit time: the save was interrupted"
    return ""


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every array.

    Raises:
        CorruptError: an array's description contradicts itself, or its files.
        NotACheckpointError: the folder holds no array.
    """
    builder = CatalogBuilder("zarr", place)
    notes: list[str] = []
    largest = 0
    opaque: list[str] = []
    for folder in _arrays(place, "", DEPTH):
        try:
            array = read_array(place, folder)
        except UnsupportedFormatError as error:
            notes.append(f"array {folder!r} is left out: {error}")
            continue
        builder.file(f"{folder}/{ARRAY}", metadata=True)
        builder.tensor(folder, array.dtype, array.shape)
        largest = max(largest, array.chunk_nbytes)
        compressed = bool(codecs.COMPRESSED[array.codec])
        opaque += [folder] if array.codec == codecs.OPAQUE else []
        for one in chunks(place, folder, array):
            stop = place.stat(one.file).size if compressed else array.chunk_nbytes
            builder.chunk(folder, one.offsets, one.sizes, one.file, 0, stop, codec=array.codec, strides=array.strides)
    if not largest and not notes:
        raise NotACheckpointError(f"{place.path!r} holds no array of zarr 2")
    if opaque:
        notes.append(
            f"{len(opaque)} arrays have a filter, a byte order or a compressor that cannot be undone here, such as "
            f"blosc; they are listed but not read: {opaque[0]!r} …"
        )
    for name in OBJECTS:
        if name in place.files:
            builder.file(name, metadata=True)
    catalog = builder.build({"step": None, "notes": notes, "largest_chunk": largest})
    fqns, roles = _meaning(catalog.keys)
    return replace(catalog, fqns=fqns, roles=roles)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the JSON documents of the save by file name."""
    names = [name for name in OBJECTS if name in place.files]
    return LazyMap({name.removesuffix(".json"): partial(place.read_json, name) for name in names})


def _arrays(place: Place, prefix: str, depth: int) -> Iterator[str]:
    """Yield the folders that are arrays, in order."""
    here = place.sub(prefix) if prefix else place
    for folder in here.folders:
        inner = f"{prefix}/{folder}" if prefix else folder
        if place.is_link(inner):
            continue
        if ARRAY in place.sub(inner).files:
            yield inner
        elif depth > 1:
            yield from _arrays(place, inner, depth - 1)


def _meaning(keys: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """Parameters and roles: those of optax and Megatron by their own names, all others by the usual rules."""
    plain = [key for key in keys if _OPTAX.fullmatch(key) is None and _MEGATRON.fullmatch(key) is None]
    found = dict(zip(plain, zip(*resolve(plain), strict=True), strict=True))
    fqns: list[str | None] = []
    roles: list[str] = []
    for key in keys:
        if match := _OPTAX.fullmatch(key):
            fqn, role = match[3], ROLES[match[2]]
        elif match := _MEGATRON.fullmatch(key):
            fqn, role = match[2], ROLES.get(match[1], match[1])
        else:
            fqn, role = found[key]
            fqn = fqn.removeprefix(PARAMS) if fqn is not None else None  # optax has no such level
        fqns.append(fqn)
        roles.append(role)
    return fqns, roles


FORMAT = Format(
    name="zarr",
    title="zarr 2 (Orbax without OCDBT, Megatron)",
    marks="ARRAY/.zarray",
    read_from="orbax-checkpoint 0.12, zarr 2.18",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    own_bytes=True,
)
