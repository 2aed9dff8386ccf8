"""Validated access to the members of a manifest's document, which comes from an untrusted file."""

from __future__ import annotations

import base64
import binascii
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from workbench.analysis.manifest_entries import FileEntry, TensorEntry, runs
from workbench.analysis.segments import KINDS, Label
from workbench.core.arrays import Array
from workbench.core.blocks import DIGEST
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BLOCK
from workbench.core.pickles.standins import short
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsafeError

LIMIT = 1 << 30  #: maximum bytes of a manifest
SPARE = 1_000_000  #: number of segments allowed in a manifest of any length
FILE_KINDS = ("data", "metadata", "other")
_HEX = re.compile(r"[0-9a-f]{32}")
T = TypeVar("T")


class ManifestFields:
    """Members of the document, checked for their required types.

    Args:
        what: the file, for messages.
        nbytes: its length. Equal numbers compress a thousandfold: no more segments are unpacked than a manifest of
            this length can have digests for.
    """

    def __init__(self, what: str, nbytes: int) -> None:
        self._what = what
        self._segments = SPARE + nbytes

    def fail(self, words: str) -> CorruptError:
        return CorruptError(f"{self._what} contradicts itself: {words}")

    def table(self, row: Mapping[str, Any], name: str) -> dict[str, Any]:
        return self._of(row, name, dict, "an object")

    def rows(self, row: Mapping[str, Any], name: str) -> list[Any]:
        return self._of(row, name, list, "a list")

    def text(self, row: Mapping[str, Any], name: str) -> str:
        return self._of(row, name, str, "a string")

    def _of(self, row: Mapping[str, Any], name: str, kind: type[T], words: str) -> T:
        value = row.get(name)
        if not isinstance(value, kind):
            raise self.fail(f"{name!r} is not {words}")
        return value

    def number(self, row: Mapping[str, Any], name: str, most: int) -> int:
        value = row.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self.fail(f"{name!r} is not a number from 0 to {most:,}")
        return value

    def label(self, row: Any) -> Label:
        if not (isinstance(row, list) and len(row) >= 2 and all(isinstance(name, str) for name in row)):
            raise self.fail(f"{short(row)} is not a valid label")
        if row[0] not in KINDS or (len(row) > 2 and row[0] != "tensor"):
            raise self.fail(f"{short(row)} is not a valid label")
        return tuple(row)

    def path(self, name: str) -> str:
        if not name or os.path.isabs(name) or "\0" in name or ".." in re.split(r"[/\\]", name):
            raise UnsafeError(f"{self._what} names the file {name!r}, which leaves the checkpoint; refused")
        return name

    def file(self, name: str, row: Any, labels: int, grain: int) -> FileEntry:
        if not isinstance(row, dict) or row.get("kind") not in FILE_KINDS:
            raise self.fail(f"file {name!r} has an unknown kind")
        size, count = self.number(row, "size", 1 << 60), self.number(row, "segments", self._segments)
        self._segments -= count
        lengths = self.column(row, "lengths", np.dtype("<i8"), count)
        owners = self.column(row, "owners", np.dtype("<i4"), count)
        if len(lengths) and (lengths.min() < 1 or lengths.max() > size or owners.min() < 0 or owners.max() >= labels):
            raise self.fail(f"file {name!r} has a segment of impossible length or label")
        if sum(lengths.tolist()) != size:
            raise self.fail(f"the segments of file {name!r} do not add up to its {plural(size, 'byte')}")
        try:
            digests = base64.b64decode(self.text(row, "digests"), validate=True)
        except (binascii.Error, ValueError):
            raise self.fail(f"the digests of file {name!r} are not valid base64") from None
        hashed = runs(lengths.astype(np.int64), grain)
        if int((-(-hashed // BLOCK)).sum()) * DIGEST != len(digests):
            raise self.fail(
                f"file {name!r} has {plural(len(digests), 'byte')} of digests for {plural(len(lengths), 'segment')}"
            )
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
            raise self.fail(f"the column {name!r} does not have {plural(count, 'number')}")
        return np.frombuffer(data, dtype)

    def tensor(self, key: str, row: Any) -> TensorEntry:
        if not isinstance(row, dict):
            raise self.fail(f"tensor {key!r} is not an object")
        shape, found = self.rows(row, "shape"), row.get("fingerprint")
        if any(type(n) is not int or not 0 <= n < 1 << 60 for n in shape):
            raise self.fail(f"tensor {key!r} has an invalid shape {short(shape)}")
        if found is not None and not (isinstance(found, str) and _HEX.fullmatch(found)):
            raise self.fail(f"tensor {key!r} has an invalid fingerprint")
        return TensorEntry(by_name(self.text(row, "dtype")).name, tuple(shape), found, str(row.get("why", "")))
