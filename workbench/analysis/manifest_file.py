"""A manifest as a JSON file, as described in ``docs/manifest.md``: written atomically, read as untrusted input.

::

    {"format": "workbench-manifest", "version": 1, "made": …, "checkpoint": {…}, "block": 4194304, "grain": 0,
     "labels": [["header", ""], ["tensor", "layers.0.wq"], …],
     "files": {
      "model.safetensors": {"size": …, "kind": "data", "segments": 40, "lengths": …, "owners": …, "digests": …}},
     "tensors": {
      "layers.0.wq": {"dtype": "bfloat16", "shape": [8, 4], "fingerprint": "0123…"}},
     "left_out": {…},
     "save": {…},                         only if the writer recorded how it saved
     "digest": "…"}                       xxh3_128 of all bytes before this line

``lengths`` and ``owners`` are little-endian ``int64`` and ``int32``, deflated (zlib), in base64; ``digests`` are 16
bytes each, in base64.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
import zlib
from typing import Any

import numpy as np
import xxhash

from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.manifest_fields import LIMIT, ManifestFields
from workbench.core import jsonsafe
from workbench.core.disk import check_size, read_limited
from workbench.core.fingerprint import BLOCK
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.remote.url import is_url
from workbench.errors import (
    CorruptError,
    MissingFileError,
    NotACheckpointError,
    UnsupportedFormatError,
    WriteError,
)

INSIDE = ".workbench-manifest.json"  #: its name inside the checkpoint's folder
#: … while its commit marker is being replaced: with the digest of the marker that it belongs to
_PENDING = re.compile(r"\.workbench-manifest\.[0-9a-f]{32}\.json")
FORMAT, VERSION = "workbench-manifest", 1
_TAIL = re.compile(rb',\n"digest": "([0-9a-f]{32})"}\n?\Z')


# ---- out -------------------------------------------------------------------------------------------------------------


def save(manifest: Manifest, path: str) -> None:
    """Write a manifest atomically.

    Raises:
        WriteError: the folder cannot be written to.
    """
    write_whole(encode(manifest), path, "a manifest")


def pending(marker: bytes | memoryview) -> str:
    """Return the name of the manifest of a checkpoint whose commit marker has these bytes.

    A manifest and a marker cannot be replaced in one step. A save that replaces both writes the manifest under this
    name, replaces the marker, and renames the manifest: at each point, the manifest that is found is the marker's.
    """
    return f".workbench-manifest.{xxhash.xxh3_128_hexdigest(marker)}.json"


def is_pending(name: str) -> bool:
    """Return whether a file's name is one of those that :func:`pending` gives."""
    return _PENDING.fullmatch(name) is not None


def holds_other(path: str | os.PathLike[str], mark: bytes) -> bool:
    """Return whether the path is something other than a file with that mark in its first 64 bytes."""
    if is_url(os.fsdecode(path)):
        try:
            place = Place(path)
        except NotACheckpointError:
            return False
        return place.file is None or mark not in place.read(place.file, length=min(64, place.stat(place.file).size))
    if not os.path.isfile(path):
        return os.path.lexists(path)
    try:
        with open(path, "rb") as handle:
            return mark not in handle.read(64)
    except OSError:
        return True


def write_whole(data: bytes, path: str, what: str) -> None:
    """Write a file atomically: to a temporary file next to it, which is synced and renamed.

    Raises:
        WriteError: the folder cannot be written to, or the store of a URL refuses; the message refers to the file as
            ``what``.
        UsageError: a URL of that scheme cannot be written to.
    """
    if is_url(path):
        from workbench.core.remote.destination import put_whole

        put_whole(data, path, what)
        return
    folder = os.path.dirname(os.path.abspath(path))
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=folder)
    except OSError as error:
        raise WriteError(f"cannot write {what} into {folder!r}: {error.strerror}; name another place") from None
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fchmod(handle.fileno(), 0o666 & ~_umask())
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def encode(manifest: Manifest) -> bytes:
    """Return the file's bytes: one line per file and per tensor."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "made": manifest.made,
        "checkpoint": {"name": manifest.name, "format": manifest.format, "step": manifest.step},
        "block": BLOCK,
        "grain": manifest.grain,
    }
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts.append('"labels": [\n' + ",\n".join(json.dumps(label) for label in manifest.labels) + "]")
    files = {
        name: {
            "size": entry.size,
            "kind": entry.kind,
            "segments": len(entry.lengths),
            "lengths": _packed(entry.lengths.astype("<i8")),
            "owners": _packed(entry.owners.astype("<i4")),
            "digests": base64.b64encode(entry.digests.tobytes()).decode(),
        }
        for name, entry in manifest.files.items()
    }
    tensors = {
        key: {"dtype": entry.dtype, "shape": entry.shape, "fingerprint": entry.fingerprint}
        | ({"why": entry.why} if entry.fingerprint is None else {})
        for key, entry in manifest.tensors.items()
    }
    for title, rows in (("files", files), ("tensors", tensors), ("left_out", dict(manifest.left_out))):
        lines = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
        parts.append(f'"{title}": {{\n' + ",\n".join(lines) + "}")
    if manifest.save:
        parts.append(f'"save": {json.dumps(dict(manifest.save), allow_nan=False)}')
    body = ("{" + ",\n".join(parts)).encode()
    return body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def _packed(column: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 6)).decode()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- in --------------------------------------------------------------------------------------------------------------


def read(path: str | Place) -> Manifest:
    """Read a manifest from its file: a path, a URL, or the place of a file.

    Raises:
        MissingFileError: it cannot be read.
        NotACheckpointError: a URL has no object.
        CorruptError: it is damaged, or not a manifest. UnsupportedFormatError: it has a later version. UnsafeError: too
        large.
    """
    if isinstance(path, Place) or is_url(path):
        place = path if isinstance(path, Place) else Place(path)
        if place.file is None:
            raise MissingFileError(f"manifest {place.path!r} is a folder; name its file")
        check_size(place.stat(place.file).size, what=f"manifest {place.path!r}", limit=LIMIT)
        return decode(place.read(place.file), place.path)
    return decode(read_limited(path, what=f"manifest {path!r}", limit=LIMIT), path)


def decode(data: bytes, path: str | None) -> Manifest:
    """Decode a manifest from its file's bytes; every number is checked before use."""
    what = "the manifest" if path is None else f"manifest {path!r}"
    tail = _TAIL.search(data)
    if tail is None:
        raise CorruptError(f"{what} does not end in its own digest; it is truncated, edited, or not a manifest")
    if xxhash.xxh3_128_hexdigest(data[: tail.start()]).encode() != tail[1]:
        raise CorruptError(
            f"{what} has changed since it was written: its own digest differs; restore it or write it again"
        )
    document = jsonsafe.loads(data, what=what)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptError(f"{what} is not a workbench manifest")
    version, block = document.get("version"), document.get("block")
    if type(version) is not int:
        raise CorruptError(f"{what} contradicts itself: 'version' is {short(version, 40)}, not a number")
    if version != VERSION:
        raise UnsupportedFormatError(f"{what} has version {short(version)}; this workbench reads only {VERSION}")
    if type(block) is not int or block != BLOCK:
        raise CorruptError(f"{what} contradicts itself: 'block' is {short(block, 40)} and should be {BLOCK:,}")
    check = ManifestFields(what, len(data))
    about, grain = check.table(document, "checkpoint"), check.number(document, "grain", BLOCK)
    labels = [check.label(row) for row in check.rows(document, "labels")]
    files = {
        check.path(name): check.file(name, row, len(labels), grain)
        for name, row in check.table(document, "files").items()
    }
    tensors = {key: check.tensor(key, row) for key, row in check.table(document, "tensors").items()}
    step = about.get("step")
    return Manifest(
        path,
        check.text(document, "made"),
        check.text(about, "name"),
        check.text(about, "format"),
        step if type(step) is int else None,
        grain,
        labels,
        files,
        tensors,
        {name: str(why) for name, why in check.table(document, "left_out").items()},
        check.table(document, "save") if "save" in document else {},
    )
