"""Cache catalogs between runs so that reopening a million chunks takes a tenth of a second.

There is one file per checkpoint, in the user's cache folder, never in the checkpoint. It is used only if it provably
describes the current files; otherwise (another version, path or owner, a changed metadata file, a flipped bit) it is
silently rebuilt::

    8 bytes    magic and layout version
    8 bytes    length of the header, then its CRC-32 and the CRC-32 of the columns (4 bytes each)
    header     JSON: checkpoint path, format, stat of every metadata file, names of the folder, columns' places
    columns    raw arrays, 64-byte aligned, used in place
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.core import catalog as cat
from workbench.core import memory
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.disk import keep
from workbench.core.place import FileStat, Place, stat_or_absent
from workbench.errors import WorkbenchError

MAGIC = b"CKWB\0\0\0\3"
MIN_CHUNKS = 20_000  #: smaller catalogs are rebuilt faster than a cache file is worth
ALIGN = 64
_COLUMNS = ("dtype", "ndim", "shape", "row_ptr", *cat.CHUNK_COLUMNS)
_TEXTS = ("keys", "files", "metadata_files", "fqns", "roles")


def cache_folder() -> str:
    """Return ``$WORKBENCH_CACHE``, or ``ckpt-workbench`` in the user's cache folder (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("WORKBENCH_CACHE") or os.path.join(base, "ckpt-workbench")


def load(place: Place, format: str) -> Catalog | None:
    """Return the cached catalog, or ``None`` if there is none that is valid for the current files."""
    try:
        with open(_path(place, format), "rb") as handle:
            info = os.fstat(handle.fileno())
            if info.st_uid != os.getuid() or info.st_size < 24:
                return None
            data = memory.empty((info.st_size,), np.dtype(np.uint8))
            if handle.readinto(memoryview(data)) != info.st_size:
                return None
        return _decode(data, place, format)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, WorkbenchError):
        return None  # damaged or foreign: read the checkpoint itself instead


def save(place: Place, catalog: Catalog) -> None:
    """Cache a catalog; a failure to do so (a full or read-only disk) is not an error."""
    keep(_path(place, catalog.format), lambda out: _encode(out, place, catalog))


def _path(place: Place, format: str) -> str:
    identity = "\0".join([place.root, place.file or "", format])
    return os.path.join(cache_folder(), hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest() + ".ckwb")


def _encode(out: Any, place: Place, catalog: Catalog) -> None:
    arrays = _arrays(catalog)
    if catalog.views is not None:
        arrays |= {f"views.{name}": array for name, array in _arrays(catalog.views).items()}
    places, at = {}, 0
    for name, array in arrays.items():
        places[name] = (array.dtype.str, list(array.shape), at)
        at += -(-array.nbytes // ALIGN) * ALIGN
    crc, blocks = 0, []
    for array in arrays.values():
        block = np.zeros(-(-array.nbytes // ALIGN) * ALIGN, np.uint8)
        block[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        crc = zlib.crc32(block, crc)
        blocks.append(block)
    header = {
        "root": place.root,
        "file": place.file,
        "format": catalog.format,
        "meta": catalog.meta,
        "columns": places,
        "names": _names(place),
        "stats": [_stat(place, name) for name in catalog.metadata_files],
    }
    text = json.dumps(header).encode()
    text += b" " * (-(24 + len(text)) % ALIGN)
    sums = zlib.crc32(text).to_bytes(4, "little") + crc.to_bytes(4, "little")
    out.write(MAGIC + len(text).to_bytes(8, "little") + sums + text)
    for block in blocks:
        out.write(block)


def _arrays(catalog: Catalog) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {name: value for name in _COLUMNS if (value := getattr(catalog, name)) is not None}
    arrays |= {f"objects.{name}": getattr(catalog.objects, name) for name in ("file", "start", "stop", "codec")}
    for name in _TEXTS:
        if (texts := getattr(catalog, name)) is not None:
            arrays |= _pack(name, texts)
    return arrays | _pack("objects.keys", catalog.objects.keys)


def _decode(data: np.ndarray[Any, Any], place: Place, format: str) -> Catalog | None:
    length = int.from_bytes(data[8:16].tobytes(), "little")
    text, columns = data[24 : 24 + length], data[24 + length :]
    if data[:8].tobytes() != MAGIC or zlib.crc32(text) != int.from_bytes(data[16:20].tobytes(), "little"):
        return None
    header = json.loads(text.tobytes())
    if (header["root"], header["file"], header["format"]) != (place.root, place.file, format):
        return None
    if header["names"] != _names(place) or zlib.crc32(columns) != int.from_bytes(data[20:24].tobytes(), "little"):
        return None
    arrays = {name: _column(columns, *where) for name, where in header["columns"].items()}
    metadata_files = [str(name) for name in _unpack("metadata_files", arrays) or ()]
    if header["stats"] != [_stat(place, name) for name in metadata_files]:
        return None
    files = [str(name) for name in _unpack("files", arrays) or ()]
    found = _catalog(arrays, files, [stat_or_absent(place, name) for name in files], format, header["meta"])
    views = {name.removeprefix("views."): array for name, array in arrays.items() if name.startswith("views.")}
    return replace(found, views=_catalog(views, files, found.file_stats, format, {})) if views else found


def _catalog(
    arrays: dict[str, np.ndarray[Any, Any]], files: list[str], stats: list[FileStat], format: str, meta: Any
) -> Catalog:
    texts = {name: _unpack(name, arrays) for name in _TEXTS}
    columns: dict[str, Any] = {name: arrays.get(name) for name in _COLUMNS}
    return Catalog(
        format=format,
        keys=[str(key) for key in texts["keys"] or ()],
        files=files,
        file_stats=stats,
        metadata_files=[str(name) for name in texts["metadata_files"] or ()],
        fqns=texts["fqns"],
        roles=None if texts["roles"] is None else [str(role) for role in texts["roles"]],
        objects=ObjectTable(
            [str(key) for key in _unpack("objects.keys", arrays) or ()],
            *(arrays[f"objects.{name}"] for name in ("file", "start", "stop", "codec")),
        ),
        meta=meta,
        **columns,
    )


def _column(data: np.ndarray[Any, Any], dtype: str, shape: Sequence[int], at: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    return data[at : at + nbytes].view(kind).reshape(shape)


def _pack(name: str, texts: Sequence[str | None]) -> dict[str, np.ndarray[Any, Any]]:
    """Pack strings as lengths (-1 for ``None``) and one run of bytes; lone surrogates in file names are preserved."""
    raw = [b"" if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.array([-1 if text is None else len(b) for text, b in zip(texts, raw, strict=True)], np.int64)
    return {f"{name}.lengths": lengths, f"{name}.bytes": np.frombuffer(b"".join(raw), np.uint8)}


def _unpack(name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> list[str | None] | None:
    if f"{name}.lengths" not in arrays:
        return None
    blob, found, at = arrays[f"{name}.bytes"].tobytes(), [], 0
    for length in arrays[f"{name}.lengths"].tolist():
        found.append(None if length < 0 else blob[at : at + length].decode("utf-8", "surrogatepass"))
        at += max(length, 0)
    return found


def _names(place: Place) -> str:
    """Digest of the folder's names: a file added or removed can change which checkpoint this is."""
    names = "\0".join([*place.files, "/", *place.folders])
    return hashlib.blake2b(names.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _stat(place: Place, name: str) -> list[int | str]:
    stat: FileStat = stat_or_absent(place, name)
    return [stat.size, stat.mtime_ns, stat.tag]
