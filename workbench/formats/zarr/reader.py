"""A folder of zarr arrays without the files of Orbax: Megatron-core's zarr backend (until 0.13), and plain ones.

::

    iter_0000100/
      metadata.json  common.pt
      decoder.layers.…weight/.zarray  0.0.0 …       a folder an array
      optimizer.state.exp_avg.…/…

A chunk is the part of one rank, so the grid is the sharding. A chunk without a file is a hole.

Source: megatron-core 0.12 ``dist_checkpointing/strategies/zarr.py``; zarr 2.18 and 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place
from workbench.errors import NotACheckpointError, WorkbenchError
from workbench.formats import Format
from workbench.formats.zarr.array import DESCRIPTIONS
from workbench.formats.zarr.chunks import Adder
from workbench.names.arrays import meaning

LOOKED = 4  #: maximum folders to examine to recognize a place
OBJECTS = ("metadata.json",)


def detect(place: Place) -> bool:
    """Return whether the folder's first folders are arrays."""
    if place.file is not None or not place.folders:
        return False
    try:
        return any(name in place.sub(folder).files for folder in place.folders[:LOOKED] for name in DESCRIPTIONS)
    except WorkbenchError:  # a link out of the folder, or no permission
        return False


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every array.

    Raises:
        CorruptError: an array's description contradicts itself, or its files.
        NotACheckpointError: the folder holds no array.
    """
    adder = Adder(place, CatalogBuilder("zarr", place))
    adder.folder("", str)
    if not adder.arrays and not adder.notes:
        raise NotACheckpointError(f"{place.path!r} holds no zarr array")
    for name in OBJECTS:
        if name in place.files:
            adder.builder.file(name, metadata=True)
    catalog = adder.builder.build(adder.meta())
    fqns, roles = meaning(catalog.keys)
    return replace(catalog, fqns=fqns, roles=roles)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the JSON documents of the save by file name."""
    names = [name for name in OBJECTS if name in place.files]
    return LazyMap({name.removesuffix(".json"): partial(place.read_json, name) for name in names})


FORMAT = Format(
    name="zarr",
    title="zarr 2 and 3 (Megatron's former backend)",
    marks="ARRAY/.zarray, ARRAY/zarr.json",
    read_from="megatron-core 0.12, zarr 2.18 – 3.1",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    subfolders=("*",),
    own_bytes=True,
)
