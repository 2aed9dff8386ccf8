"""A manifest as a JSON file: what ``docs/manifest.md`` describes, written atomically and read with suspicion.

::

    {"format": "workbench-manifest", "version": 1, "made": …, "checkpoint": {…}, "block": 4194304, "grain": 0,
     "labels": [["header", ""], ["tensor", "layers.0.wq"], …],
     "files": {
      "model.safetensors": {"size": …, "kind": "data", "segments": 40, "lengths": …, "owners": …, "digests": …}},
     "tensors": {
      "layers.0.wq": {"dtype": "bfloat16", "shape": [8, 4], "fingerprint": "0123…"}},
     "left_out": {…},
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
from workbench.analysis.manifest_fields import LIMIT, Fields
from workbench.core import jsonsafe
from workbench.core.fingerprint import BLOCK
from workbench.core.pickles.standins import short
from workbench.core.source import cannot_open
from workbench.errors import CorruptError, UnsafeError, UnsupportedFormatError, UsageError

__all__ = ["INSIDE", "decode", "encode", "holds_other", "read", "save", "write_whole"]

INSIDE = ".workbench-manifest.json"  #: its name in a checkpoint's own folder
FORMAT, VERSION = "workbench-manifest", 1
_TAIL = re.compile(rb',\n"digest": "([0-9a-f]{32})"}\n?\Z')


# ---- out -------------------------------------------------------------------------------------------------------------


def save(manifest: Manifest, path: str) -> None:
    """Write a manifest: whole, or not at all.

    Raises:
        UsageError: the folder cannot be written to.
    """
    write_whole(encode(manifest), path, "a manifest")


def holds_other(path: str | os.PathLike[str], mark: bytes) -> bool:
    """Whether something else than a file with that mark in its first 64 bytes lies there: a checkpoint, a device."""
    if not os.path.isfile(path):
        return os.path.lexists(path)
    try:
        with open(path, "rb") as handle:
            return mark not in handle.read(64)
    except OSError:
        return True


def write_whole(data: bytes, path: str, what: str) -> None:
    """A temporary file beside it, synced, then renamed, so that it is there whole or not at all.

    Raises:
        UsageError: the folder cannot be written to; the message calls the file ``what``.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=folder)
    except OSError as error:
        raise UsageError(f"cannot write {what} into {folder!r}: {error.strerror}; name another place") from None
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
    """The file's bytes: a line a file and a line a tensor."""
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
    body = ("{" + ",\n".join(parts)).encode()
    return body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def _packed(column: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 6)).decode()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- in --------------------------------------------------------------------------------------------------------------


def read(path: str) -> Manifest:
    """A manifest from its file.

    Raises:
        MissingFileError: it cannot be read.
        CorruptError: it is damaged, or no manifest; UnsupportedFormatError: of a later version; UnsafeError: absurd.
    """
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size > LIMIT:
                raise UnsafeError(f"manifest {path!r} has {size:,} bytes, over the limit of {LIMIT:,}")
            data = handle.read(LIMIT + 1)
    except OSError as error:
        raise cannot_open(f"manifest {path!r}", error, "read") from None
    return decode(data, path)


def decode(data: bytes, path: str | None) -> Manifest:
    """A manifest from its file's bytes; every number in it is checked before anything is made of it."""
    what = "the manifest" if path is None else f"manifest {path!r}"
    tail = _TAIL.search(data)
    if tail is None:
        raise CorruptError(f"{what} does not end in its own digest; it is cut short, edited, or no manifest")
    if xxhash.xxh3_128_hexdigest(data[: tail.start()]).encode() != tail[1]:
        raise CorruptError(f"{what} is not as it was written: its own digest differs; restore it or write it again")
    document = jsonsafe.loads(data, what=what)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptError(f"{what} is no manifest of a workbench")
    version, block = document.get("version"), document.get("block")
    if type(version) is not int:
        raise CorruptError(f"{what} contradicts itself: 'version' is {short(version, 40)}, not a number")
    if version != VERSION:
        raise UnsupportedFormatError(f"{what} has version {short(version)}; this workbench reads {VERSION} only")
    if type(block) is not int or block != BLOCK:
        raise CorruptError(f"{what} contradicts itself: 'block' is {short(block, 40)}, and should be {BLOCK:,}")
    check = Fields(what, len(data))
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
    )
