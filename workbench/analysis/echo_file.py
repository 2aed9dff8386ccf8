"""A trainer's state as fingerprints: one JSON file that identifies the content of every live tensor.

::

    {"format": "workbench-echo", "version": 1, "made": …, "world_size": 8, "payload": false,
     "counts": {"trained": 291, "with_state": 291},
     "objects": {"optimizer": {"param_groups": […]}, "scheduler": {…}, "train_state": {"step": 48000}},
     "tensors": {
      "model.norm.weight": {"dtype": "bfloat16", "shape": [4096], "fqn": "norm.weight", "role": "param",
                            "fingerprint": "0123…"},
      "optimizer.state.norm.weight.step": {…, "value": "0000803b47…"},                small ones: also their bytes
      "model.head.weight": {…, "tied": "model.embed.weight"}, …},
     "digest": "…"}                       xxh3_128 of all bytes before this line

Fingerprints are those of :mod:`workbench.core.fingerprint`, as in a manifest: of the global tensor, whatever the
sharding. Small tensors (counters) are stored with their bytes. The file opens as a checkpoint with the names and shapes
of all tensors, the objects, and the values of small tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.analysis.manifest_fields import LIMIT, ManifestFields
from workbench.analysis.manifest_file import write_whole
from workbench.checkpoint import Checkpoint
from workbench.core import jsonsafe
from workbench.core.build import CatalogBuilder
from workbench.core.disk import read_limited
from workbench.core.dtypes import by_name, nbytes_of
from workbench.core.place import Place
from workbench.core.source import FileStat, Source, no_descriptor
from workbench.core.storage import SourcePool
from workbench.core.words import plural
from workbench.errors import CorruptError, NotACheckpointError, UnsupportedFormatError

INSIDE = "workbench-echo.json"  #: its name in a folder
SMALL = 64  #: maximum bytes of a tensor whose bytes are stored
FORMAT, VERSION = "workbench-echo", 1
_TAIL = re.compile(rb',\n"digest": "([0-9a-f]{32})"}\n?\Z')
_HEAD = b'{"format": "workbench-echo"'
_VALUE = re.compile(r"(?:[0-9a-f]{2}){0,64}")


class EchoTensor(NamedTuple):
    """One live tensor.

    Attributes:
        dtype: the name of its element type.
        fqn, role: its parameter, and its role for it.
        fingerprint: ``None`` if it could not be computed.
        why: the reason, in that case.
        tied: key of the tensor that it shares its memory with.
        value: bytes of a small tensor, row-major and little endian.
    """

    dtype: str
    shape: tuple[int, ...]
    fqn: str | None
    role: str
    fingerprint: str | None
    why: str = ""
    tied: str | None = None
    value: bytes | None = None


@dataclass(frozen=True, eq=False)
class Echo:
    """The state of a trainer right after its load.

    Attributes:
        path: the file; ``None`` until it is written.
        made: the time, in UTC.
        world_size: number of ranks.
        payload: whether the tensors themselves are stored next to it, as a DCP checkpoint.
        tensors: key, as named by ``torch.distributed.checkpoint`` → tensor.
        objects: non-tensor state, of JSON's types.
        counts: numbers of parameters. ``trained``: the optimizer updates them; ``with_state``: it has state for them;
            ``strangers``: it has them, but the model does not.
        copies: key → rank → fingerprint, if ranks that should hold the same tensor differ.
    """

    path: str | None
    made: str
    world_size: int
    payload: bool
    tensors: Mapping[str, EchoTensor]
    objects: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def prints(self) -> dict[tuple[str, str], str]:
        """Parameter and role → fingerprint, for tensors that have both."""
        return {
            (one.fqn, one.role): one.fingerprint
            for one in self.tensors.values()
            if one.fqn is not None and one.fingerprint is not None
        }

    def __repr__(self) -> str:
        return f"Echo({plural(len(self.tensors), 'tensor')} of {plural(self.world_size, 'rank')}, made {self.made})"


def is_echo(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is an echo's file, or a folder with one."""
    try:
        with open(_file(path), "rb") as handle:
            return handle.read(len(_HEAD)) == _HEAD
    except OSError as error:
        no_descriptor(error)
        return False


def read_echo(path: str | os.PathLike[str]) -> Echo:
    """Read an echo from its file or its folder.

    Raises:
        MissingFileError, NotACheckpointError: there is no echo.
        CorruptError: it is damaged. UnsupportedFormatError: it has a later version. UnsafeError: it is too large.
    """
    name = _file(path)
    return _decode(read_limited(name, what=f"echo {name!r}", limit=LIMIT), name)


def write_echo(echo: Echo, path: str) -> str:
    """Write an echo atomically; in a folder, as :data:`INSIDE`. Return the file's name.

    Raises:
        WriteError: the folder cannot be written to.
    """
    name = _file(path)
    write_whole(_encode(echo), name, "an echo")
    return name


def open_echo(echo: Echo | str | os.PathLike[str]) -> Checkpoint:
    """Open an echo as a checkpoint of format ``echo``: names, shapes and objects, and the values of small tensors.

    Other values are not stored; reading them raises HoleError.

    Raises:
        UsageError: the echo has not been written. Others: see :func:`read_echo`.
    """
    if not isinstance(echo, Echo):
        echo = read_echo(echo)
    place = Place(echo.path or os.getcwd())
    name = os.path.basename(echo.path or INSIDE)
    builder, held = CatalogBuilder("echo", place), bytearray()
    builder.file(name)
    for key, one in echo.tensors.items():
        builder.tensor(key, by_name(one.dtype), one.shape, fqn=one.fqn, role=one.role)
        if one.value:
            at = len(held)
            held += one.value
            builder.chunk(key, [0] * len(one.shape), one.shape, name, at, len(held))
    step = _step(echo.objects)
    meta = {"world_size": echo.world_size} | ({} if step is None else {"step": step})
    catalog = builder.build(meta, named=True)
    catalog.check()
    return Checkpoint(place, catalog, _Held(place, bytes(held)), echo.objects)


# ---- the file --------------------------------------------------------------------------------------------------------


def _file(path: str | os.PathLike[str]) -> str:
    name = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
    return os.path.join(name, INSIDE) if os.path.isdir(name) else name


def _encode(echo: Echo) -> bytes:
    head = {
        "format": FORMAT,
        "version": VERSION,
        "made": echo.made,
        "world_size": echo.world_size,
        "payload": echo.payload,
        "counts": dict(echo.counts),
        "objects": dict(echo.objects),
        "copies": {key: dict(ranks) for key, ranks in echo.copies.items()},
    }
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = [f" {json.dumps(key)}: {json.dumps(_row(one))}" for key, one in echo.tensors.items()]
    parts.append('"tensors": {\n' + ",\n".join(lines) + "}")
    body = ("{" + ",\n".join(parts)).encode()
    return body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def _row(one: EchoTensor) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": one.dtype, "shape": list(one.shape), "fqn": one.fqn, "role": one.role}
    row["fingerprint"] = one.fingerprint
    row |= {name: text for name, text in (("why", one.why), ("tied", one.tied)) if text}
    return row | ({} if one.value is None else {"value": one.value.hex()})


def _decode(data: bytes, path: str) -> Echo:
    what = f"echo {path!r}"
    if not data.startswith(_HEAD):
        raise NotACheckpointError(f"{path!r} is not an echo; write one with workbench.echo(model, optimizer, path)")
    tail = _TAIL.search(data)
    if tail is None or xxhash.xxh3_128_hexdigest(data[: tail.start()]).encode() != tail[1]:
        raise CorruptError(f"{what} has changed since it was written: its own digest differs; write it again")
    document, check = jsonsafe.loads(data, what=what), ManifestFields(what, len(data))
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise UnsupportedFormatError(f"{what} has an unknown version (expected {VERSION}); update the workbench")
    counts, copies = check.table(document, "counts"), check.table(document, "copies")
    if any(type(n) is not int for n in counts.values()) or any(not isinstance(c, dict) for c in copies.values()):
        raise check.fail("a count is not a number, or a copy is not an object")
    return Echo(
        path,
        check.text(document, "made"),
        check.number(document, "world_size", 1 << 40),
        document.get("payload") is True,
        {key: _tensor(check, key, row) for key, row in check.table(document, "tensors").items()},
        check.table(document, "objects"),
        counts,
        copies,
    )


def _tensor(check: ManifestFields, key: str, row: Any) -> EchoTensor:
    entry = check.tensor(key, row)
    texts = {name: row.get(name) for name in ("fqn", "tied", "value")}
    if any(text is not None and not isinstance(text, str) for text in texts.values()):
        raise check.fail(f"tensor {key!r} has a name that is not a string")
    value = texts["value"]
    held = None if value is None or not _VALUE.fullmatch(value) else bytes.fromhex(value)
    numel = 1
    for n in entry.shape:
        numel *= n
    if value is not None and (held is None or len(held) != nbytes_of(by_name(entry.dtype), numel)):
        raise check.fail(f"tensor {key!r} has an invalid value")
    role = check.text(row, "role")
    return EchoTensor(entry.dtype, entry.shape, texts["fqn"], role, entry.fingerprint, entry.why, texts["tied"], held)


def _step(objects: Mapping[str, Any]) -> int | None:
    state = objects.get("train_state")
    step = state.get("step") if isinstance(state, dict) else None
    return step if type(step) is int else None


# ---- as a checkpoint -------------------------------------------------------------------------------------------------


class _Held(SourcePool):
    """Bytes in memory in place of files."""

    def __init__(self, place: Place, data: bytes) -> None:
        super().__init__(place, [], [], "pread")
        self._one = _Bytes(data)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Held, (self._place, self._one.data.tobytes())

    def size(self, file: int) -> int:
        return self._one.size

    def source(self, file: int) -> Source:
        return self._one

    def check(self, file: int) -> None:
        return None


class _Bytes(Source):
    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.stat = FileStat(len(data), 0)

    def read_into(self, buffer: np.ndarray[Any, Any], start: int) -> None:
        buffer[:] = self.data[start : start + len(buffer)]
