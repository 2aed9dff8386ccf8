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
import binascii
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from workbench.analysis.segments import KINDS, Label
from workbench.core import jsonsafe
from workbench.core.blocks import DIGEST, Blocks
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BLOCK
from workbench.errors import CorruptError, MissingFileError, UnsafeError, UnsupportedFormatError, UsageError

__all__ = ["INSIDE", "FileEntry", "Manifest", "TensorEntry", "decode", "encode", "grain_for", "read", "save"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]

INSIDE = ".workbench-manifest.json"  #: its name in a checkpoint's own folder
FORMAT, VERSION = "workbench-manifest", 1
LIMIT = 1 << 30  #: bytes of a manifest, and of a column in it
FILE_KINDS = ("data", "metadata", "other")
_TAIL = re.compile(rb',\n"digest": "([0-9a-f]{32})"}\n?\Z')
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class FileEntry:
    """One file.

    Attributes:
        size: bytes.
        kind: ``data`` (holds elements), ``metadata`` (the catalog is made from it), ``other``.
        lengths: ``(S,) int64`` bytes of its segments, one after the other.
        owners: ``(S,) int32`` their positions in the manifest's labels.
        digests: ``(B, 16) uint8``, of the blocks that :meth:`blocks` gives.
    """

    size: int
    kind: str
    lengths: Ints
    owners: Array
    digests: Array

    def blocks(self, name: str, grain: int) -> Blocks:
        """What each digest is of: segments, small neighbours together until they have ``grain`` bytes, in blocks."""
        return Blocks(name, *_blocks(_runs(self.lengths, grain)))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; ``fingerprint`` is ``None`` where it has none (a hole), and then ``why`` says so."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None
    why: str = ""


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a checkpoint was when the manifest was written.

    Attributes:
        path: of the manifest's file, where it has one.
        made: time, ISO 8601 in UTC.
        name, format, step: of the checkpoint.
        grain: bytes up to which neighbouring segments share a digest; 0 where each has its own.
        labels: what segments are: ``(kind, name)``, with more names where tensors share bytes.
        files, tensors: by name.
        left_out: what lies in the folder but is not covered, with the reason.
    """

    path: str | None
    made: str
    name: str
    format: str
    step: int | None
    grain: int
    labels: list[Label]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    left_out: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def __repr__(self) -> str:
        digests = sum(len(entry.digests) for entry in self.files.values())
        return (
            f"Manifest({self.name!r}, {self.format}, {len(self.files):,} files, {self.nbytes:,} bytes, "
            f"{len(self.tensors):,} tensors, {digests:,} digests, made {self.made})"
        )


def grain_for(columns: Iterable[Ints], budget: int) -> int:
    """The smallest grain with which all files together have at most about ``budget`` digests."""
    columns = list(columns)
    for grain in (0, *(1 << bits for bits in range(12, 23))):
        if sum(len(_blocks(_runs(lengths, grain))[0]) for lengths in columns) <= budget:
            return grain
    return BLOCK


# ---- out -------------------------------------------------------------------------------------------------------------


def save(manifest: Manifest, path: str) -> None:
    """Write a manifest: to a temporary file beside it, synced, then renamed, so that it is there whole or not at all.

    Raises:
        UsageError: the folder cannot be written to.
    """
    folder = os.path.dirname(os.path.abspath(path))
    data = encode(manifest)
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=folder)
    except OSError as error:
        raise UsageError(f"cannot write a manifest into {folder!r}: {error.strerror}; name another place") from None
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
        raise MissingFileError(f"manifest {path!r} cannot be read: {error.strerror}") from None
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
    if document.get("version") != VERSION or document.get("block") != BLOCK:
        raise UnsupportedFormatError(
            f"{what} has version {document.get('version')!r}; this workbench reads version {VERSION}; update it"
        )
    check = _Checked(what)
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


class _Checked:
    """Members of the document, of the type they must have."""

    def __init__(self, what: str) -> None:
        self._what = what

    def fail(self, words: str) -> CorruptError:
        return CorruptError(f"{self._what} contradicts itself: {words}")

    def table(self, row: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = row.get(name)
        if not isinstance(value, dict):
            raise self.fail(f"{name!r} is no object")
        return value

    def rows(self, row: Mapping[str, Any], name: str) -> list[Any]:
        value = row.get(name)
        if not isinstance(value, list):
            raise self.fail(f"{name!r} is no list")
        return value

    def text(self, row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        if not isinstance(value, str):
            raise self.fail(f"{name!r} is no text")
        return value

    def number(self, row: Mapping[str, Any], name: str, most: int) -> int:
        value = row.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self.fail(f"{name!r} is no number from 0 to {most:,}")
        return value

    def label(self, row: Any) -> Label:
        if not (isinstance(row, list) and len(row) >= 2 and all(isinstance(name, str) for name in row)):
            raise self.fail(f"{str(row)[:80]!r} is no label")
        if row[0] not in KINDS or (len(row) > 2 and row[0] != "tensor"):
            raise self.fail(f"{str(row)[:80]!r} is no label")
        return tuple(row)

    def path(self, name: str) -> str:
        if not name or os.path.isabs(name) or "\0" in name or ".." in re.split(r"[/\\]", name):
            raise UnsafeError(f"{self._what} names the file {name!r}, which leaves the checkpoint; refused")
        return name

    def file(self, name: str, row: Any, labels: int, grain: int) -> FileEntry:
        if not isinstance(row, dict) or row.get("kind") not in FILE_KINDS:
            raise self.fail(f"file {name!r} has no kind that is known")
        size, count = self.number(row, "size", 1 << 60), self.number(row, "segments", LIMIT // 8)
        lengths = self.column(row, "lengths", np.dtype("<i8"), count)
        owners = self.column(row, "owners", np.dtype("<i4"), count)
        if len(lengths) and (lengths.min() < 1 or lengths.max() > size or owners.min() < 0 or owners.max() >= labels):
            raise self.fail(f"file {name!r} has a segment of impossible length or label")
        if sum(lengths.tolist()) != size:
            raise self.fail(f"the segments of file {name!r} do not add up to its {size:,} bytes")
        try:
            digests = base64.b64decode(self.text(row, "digests"), validate=True)
        except (binascii.Error, ValueError):
            raise self.fail(f"the digests of file {name!r} are no base64") from None
        runs = _runs(lengths.astype(np.int64), grain)
        if int((-(-runs // BLOCK)).sum()) * DIGEST != len(digests):
            raise self.fail(f"file {name!r} has {len(digests):,} bytes of digests for {len(lengths):,} segments")
        return FileEntry(
            size, row["kind"], lengths.astype(np.int64), owners, np.frombuffer(digests, np.uint8).reshape(-1, DIGEST)
        )

    def column(self, row: Mapping[str, Any], name: str, dtype: np.dtype[Any], count: int) -> Array:
        want = count * dtype.itemsize
        try:
            stream = zlib.decompressobj()
            data = stream.decompress(base64.b64decode(self.text(row, name), validate=True), want + 1)
        except (binascii.Error, ValueError, zlib.error):
            raise self.fail(f"the column {name!r} cannot be unpacked") from None
        if len(data) != want:
            raise self.fail(f"the column {name!r} has not {count:,} numbers")
        return np.frombuffer(data, dtype)

    def tensor(self, key: str, row: Any) -> TensorEntry:
        if not isinstance(row, dict):
            raise self.fail(f"tensor {key!r} is no object")
        shape, found = self.rows(row, "shape"), row.get("fingerprint")
        if any(type(n) is not int or not 0 <= n < 1 << 60 for n in shape):
            raise self.fail(f"tensor {key!r} has the shape {str(shape)[:80]}")
        if found is not None and not (isinstance(found, str) and _HEX.fullmatch(found)):
            raise self.fail(f"tensor {key!r} has a fingerprint that is none")
        return TensorEntry(by_name(self.text(row, "dtype")).name, tuple(shape), found, str(row.get("why", "")))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _runs(lengths: Ints, grain: int) -> Ints:
    """Bytes of each run of segments that are hashed together: closed as soon as it has ``grain`` bytes."""
    if grain == 0 or not len(lengths):
        return lengths
    runs: list[int] = []
    under_way = 0
    for length in lengths.tolist():
        under_way += length
        if under_way >= grain:
            runs.append(under_way)
            under_way = 0
    return np.array([*runs, under_way] if under_way else runs, np.int64)


def _blocks(runs: Ints) -> tuple[Ints, Ints]:
    """Where the blocks of at most :data:`BLOCK` bytes begin and end, each run cut from its own beginning."""
    counts = -(-runs // BLOCK)
    ends = np.cumsum(runs)
    run = np.repeat(np.arange(len(runs)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (ends - runs)[run] + within * BLOCK
    return starts.astype(np.int64), np.minimum(starts + BLOCK, ends[run]).astype(np.int64)


def _packed(column: Array) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 6)).decode()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
