r"""The journal of a resumable export: a file in its temp folder, one line per step.

::

    .out.tmp-HOST.BOOT.PID.START.RANDOM/
    ├── journal   1f0c… {"journal": 1, "plan": "9b41…"}                        which job the temp is for
    │             77aa… {"file": "model-00001-of-00002.safetensors", "pieces": [[0, "5be2…"], [1, "c01d…"]]}
    └── out/      …                             └─ written after their bytes were synced; more lines for a large file

A line begins with the xxh3_64 of the rest of it; the first incomplete line, torn by a crash, ends the journal.
A piece is ``[number in the file, fingerprint as written]``, and after a change of its elements ``[…, fingerprint as
read, its blocks' digests, what was lost]``. Recorded pieces are not trusted before they were read back
(:mod:`workbench.export.moving.kept`).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from workbench.core.fingerprint import Fingerprint
from workbench.export.atomic.writing import sync_folder, write_all, writing
from workbench.export.casts import CastError

FORMAT = 1  #: increased whenever the lines change, or the bytes that result from the same plan
NAME = "journal"
LIMIT = 1 << 30  #: bytes of a journal that is read; 1M pieces have ~100 MB


@dataclass(frozen=True)
class Written:
    """The result of a piece.

    Attributes:
        source: fingerprint of its elements as they are stored.
        target: fingerprint of the written bytes; the same unless it was cast.
        cast: what the cast changed, or ``None`` without a cast.
    """

    source: Fingerprint
    target: Fingerprint
    cast: CastError | None


#: by file of the plan and piece of the file: its result, and its CRC-32 if the file needs that
Kept = dict[int, dict[int, tuple[Written, int]]]


class Journal:
    """The open journal of a temp folder.

    Attributes:
        recorded: by file and piece, the result recorded by an earlier run: the target's fingerprint without its blocks.
        notes: sentences on which pieces were kept.
    """

    def __init__(self, folder: str, plan: str) -> None:
        """Continue an existing journal if it has the same plan; otherwise start a new one.

        Raises:
            WriteError: the system refuses.
        """
        self._path, self._folder = os.path.join(folder, NAME), folder
        lines, whole = _read(self._path)
        self.recorded: dict[str, dict[int, Written]] = {}
        self.notes: list[str] = []
        with writing(NAME):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            if lines and lines[0] == _head(plan):
                for line in lines[1:]:
                    self.recorded.setdefault(line["file"], {}).update(_decoded(one) for one in line["pieces"])
                os.ftruncate(self._fd, whole)
                self._end = whole
            else:
                os.ftruncate(self._fd, 0)
                self._end = 0
                self._append(_head(plan))
                sync_folder(folder)

    def record(self, file: str, pieces: Iterable[tuple[int, Written]]) -> None:
        """Record pieces of a file that are complete and synced."""
        with writing(NAME):
            self._append({"file": file, "pieces": [_encoded(at, one) for at, one in pieces]})

    def tidy(self, paths: Sequence[str]) -> None:
        """Remove from the temp all files that do not belong to it, and links, which are never written through.

        Args:
            paths: paths of the files that belong there.
        """
        wanted = {*paths, self._path}
        with writing(NAME):
            for inside, folders, names in os.walk(self._folder):
                for path in (os.path.join(inside, name) for name in folders + names):
                    info = os.lstat(path)
                    alone = stat.S_ISREG(info.st_mode) and info.st_nlink == 1
                    if not stat.S_ISDIR(info.st_mode) and not (alone and path in wanted):
                        os.unlink(path)

    @property
    def useful(self) -> bool:
        """Whether a later run can resume from the journal."""
        return self._end > len(_line(_head("0" * 64))) and os.path.exists(self._path)

    def discard(self) -> None:
        """Mark this temp as not resumable; the mark is synced to disk before anything else happens to the temp."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        sync_folder(self._folder)

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, value: dict[str, Any]) -> None:
        data = _line(value)
        write_all(self._fd, memoryview(data), self._end)
        os.fsync(self._fd)
        self._end += len(data)


def plan_in(folder: str) -> str | None:
    """Return the plan of a temp folder's journal, or ``None`` if there is no readable journal."""
    lines, _ = _read(os.path.join(folder, NAME), first=True)
    return lines[0]["plan"] if lines and lines[0] == _head(str(lines[0].get("plan"))) else None


def _head(plan: str) -> dict[str, Any]:
    return {"journal": FORMAT, "plan": plan}


def _line(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def _read(path: str, *, first: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of a journal, or only the first, and return how many bytes they take."""
    found: list[dict[str, Any]] = []
    whole = 0
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return found, whole
    with os.fdopen(fd, "rb") as handle, suppress(OSError):
        while line := handle.readline(LIMIT):
            check, _, text = line.removesuffix(b"\n").partition(b" ")
            if not line.endswith(b"\n") or check != xxhash.xxh3_64_hexdigest(text).encode():
                break
            found.append(json.loads(text))
            whole += len(line)
            if first:
                break
    return found, whole


def _encoded(at: int, one: Written) -> list[Any]:
    if one.cast is None:
        return [at, one.target.hex]
    return [at, one.target.hex, one.source.hex, b"".join(one.source.blocks).hex(), asdict(one.cast)]


def _decoded(stored: list[Any]) -> tuple[int, Written]:
    at, target, *changed = stored
    written = Fingerprint(target, [])
    if not changed:
        return at, Written(written, written, None)
    source, blocks, cast = changed
    raw = bytes.fromhex(blocks)
    digests = [raw[k : k + 16] for k in range(0, len(raw), 16)]
    return at, Written(Fingerprint(source, digests), written, CastError(**cast))
