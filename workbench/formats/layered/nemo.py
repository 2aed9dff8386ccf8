"""NeMo's archives: a checkpoint inside an uncompressed tar file, read in place.

::

    model.nemo   tar   ./model_config.yaml  ./…_tokenizer.model
                       ./model_weights.ckpt       a torch.save file                          (NeMo 1, one GPU)
                       ./model_weights/           a distributed checkpoint: .metadata, __0_0.distcp … or zarr arrays
                       ./mp_rank_00/model_weights.ckpt …   one per rank of tensor or pipeline parallelism: not joined

The weights are read by the reader that recognizes them; their byte ranges are then relative to the archive.
Configurations are objects, as text. A compressed archive (``.tar.gz``) has to be unpacked: parts of it cannot be
located.

Source: NeMo 1.23 ``nemo/core/connectors/save_restore_connector.py``, ``nlp_overrides.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workbench import formats
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place, stat_or_absent
from workbench.core.tarfiles import TarFiles, read_members
from workbench.core.words import plural
from workbench.errors import CorruptError, NotACheckpointError, UnsafeError, UnsupportedFormatError
from workbench.formats import Format

SUFFIX = ".nemo"
WEIGHTS = ("model_weights.ckpt", "model_weights")
TEXT = (".yaml", ".yml", ".json")
TEXT_LIMIT = 16 << 20  #: maximum bytes of a configuration
_GZIP = b"\x1f\x8b"


def detect(place: Place) -> bool:
    """Return whether the file is an archive with NeMo's ending, compressed or not."""
    if place.file is None or not place.file.endswith(SUFFIX):
        return False
    head = place.head(place.file, 512)
    return head.startswith(_GZIP) or head[257:262] == b"ustar"


def _inside(place: Place) -> tuple[TarFiles, Place, Format]:
    """Return the archive, the weights in it, and their format."""
    file = place.file or ""
    if place.read(file, length=2) == _GZIP:
        raise UnsupportedFormatError(
            f"{file!r} is compressed, so no part of it can be read by itself; unpack it (tar -xzf) and open the weights"
        )
    members = read_members(place.window(file), repr(file))
    tar = TarFiles(place, file, members)
    found = next((name for name in WEIGHTS if tar.exists(name)), None)
    if found is None:
        ranks = [name for name in members if name.endswith("/model_weights.ckpt")]
        what = f"the weights of {plural(len(ranks), 'rank')}, which are not joined" if ranks else "no model_weights"
        raise UnsupportedFormatError(f"{file!r} holds {what}; unpack it and open its parts")
    inner = Place.of(tar.sub(found))
    name = formats.detect(inner)
    if name is None or name == "nemo":
        raise NotACheckpointError(f"{found!r} in {file!r} does not hold a checkpoint in a known format")
    return tar, inner, formats.reader(name)


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of the weights, with the bytes of the archive.

    Raises:
        CorruptError, TruncatedError, UnsafeError: the archive is damaged; otherwise as the reader of the weights.
        UnsupportedFormatError: the archive is compressed, or holds the files of several ranks.
    """
    if place.file is None:
        raise NotACheckpointError(f"{place.path!r} is a folder; open the {SUFFIX} file")
    _, inner, reader = _inside(place)
    catalog = reader.read_catalog(inner)
    catalog.check()
    catalog.check_files()  # check against the members, before they become ranges of one file
    return _moved(catalog, inner, place)


def _moved(catalog: Catalog, inner: Place, place: Place) -> Catalog:
    """Return the catalog relative to the bytes of the archive."""
    files = inner._files
    if not isinstance(files, TarFiles):
        raise CorruptError(f"{place.path!r} is not an archive")
    first = np.array([files.member(name).start for name in catalog.files] or [0], np.int64)
    table = catalog.objects
    return replace(
        catalog,
        format="nemo",
        files=[place.file or ""],
        file_stats=[stat_or_absent(place, place.file or "")],
        metadata_files=[place.file or ""],
        file=np.zeros_like(catalog.file),
        start=catalog.start + first[catalog.file],
        stop=catalog.stop + first[catalog.file],
        objects=replace(
            table,
            file=np.zeros_like(table.file),
            start=table.start + first[table.file],
            stop=table.stop + first[table.file],
        ),
        meta={key: value for key, value in catalog.meta.items() if key != "ends"},
        views=None if catalog.views is None else _moved(catalog.views, inner, place),
    )


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the objects stored with the weights, and the configurations as text."""
    tar, inner, reader = _inside(place)
    texts = {name: partial(_config, tar, name) for name in tar.listing()[0] if name.endswith(TEXT)}
    stored = LazyMap.of(reader.read_objects(inner, reader.read_catalog(inner)))
    return LazyMap({**{name: partial(stored.__getitem__, name) for name in stored}, **texts})


def _config(tar: TarFiles, name: str) -> str:
    size = tar.stat(name).size
    if size > TEXT_LIMIT:
        raise UnsafeError(f"{name!r} has {plural(size, 'byte')}, over the limit of {TEXT_LIMIT:,}")
    return tar.source(name).read_bytes(0, size).decode("utf-8", "backslashreplace")


FORMAT = Format(
    name="nemo",
    title="NeMo archive",
    marks="*.nemo",
    read_from="nemo 1.23",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    single_file=True,
    suffixes=(SUFFIX,),
    beside=(SUFFIX,),
    framework="nemo",
)
