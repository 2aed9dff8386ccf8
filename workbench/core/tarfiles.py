"""The files inside an uncompressed tar archive, as a folder for readers; nothing is unpacked.

::

    512 bytes   name 100 │ mode, owner │ size 12, octal │ time │ sum 8 │ type 1 │ link 100 │ "ustar" │ … │ prefix 155
    contents    padded to a multiple of 512         type 0: a file · 5: a folder · L, x: the next one's name, or size

Links, devices and sparse files are absent. Source: POSIX.1-2017 ``pax``, section "ustar Interchange Format"; GNU tar's
manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from workbench.core.arrays import Array
from workbench.core.place import Place
from workbench.core.source import FileStat, LazyBytes, Source, too_short
from workbench.core.words import plural
from workbench.errors import CorruptError, MissingFileError, TruncatedError, UnsafeError, quoted

BLOCK = 512
NAME_LIMIT = 64 << 10  #: bytes of a long name or of a pax header
MAX_MEMBERS = 4_000_000
DEPTH = 64  #: folders in folders


_Tree = dict[str, tuple[dict[str, None], dict[str, None]]]


class TarMember(NamedTuple):
    """A file of the archive: bytes ``[start, stop)`` of it."""

    start: int
    stop: int


def read_members(view: LazyBytes, what: str) -> dict[str, TarMember]:
    """Return the regular files of an archive by name, without a leading ``./``.

    Raises:
        CorruptError: a header's sum is wrong, or a name occurs twice. TruncatedError: a member ends beyond the file.
        UnsafeError: a name that leaves the archive.
    """
    found: dict[str, TarMember] = {}
    at, long, size_of_next = 0, "", -1
    for _ in range(MAX_MEMBERS):
        if at + BLOCK > len(view):
            raise TruncatedError(f"{what} ends at byte {len(view):,} without an end mark; it is truncated")
        head = bytes(view[at : at + BLOCK])
        if not any(head):
            return found
        checksum = sum(head) - sum(head[148:156]) + 8 * 32
        if _number(head[148:156], what, at) != checksum:
            raise CorruptError(f"{what}, byte {at:,}: the checksum of a header is wrong; the archive is damaged")
        kind, size = head[156:157], _number(head[124:136], what, at)
        size, size_of_next = (size if size_of_next < 0 or kind in b"LKxg" else size_of_next), -1
        start, stop = at + BLOCK, at + BLOCK + size
        if stop > len(view):
            raise TruncatedError(
                f"{what}: the member at byte {at:,} ends at byte {stop:,}, {plural(stop - len(view), 'byte')} "
                "beyond the end"
            )
        at = start + -(-size // BLOCK) * BLOCK
        if kind in (b"L", b"x"):
            if size > NAME_LIMIT:
                raise UnsafeError(f"{what}: a name of {plural(size, 'byte')} at byte {start:,}; refused")
            text = bytes(view[start:stop])
            long, size_of_next = (_text(text), -1) if kind == b"L" else _pax(text, what, start)
            continue
        if kind in (b"g", b"K"):
            continue
        prefix = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""
        name = long or (f"{prefix}/" if prefix else "") + _text(head[:100])
        long = ""
        if kind not in (b"0", b"\0"):
            continue
        parts = [part for part in name.split("/") if part not in (".", "")]
        if name.startswith("/") or ".." in parts or not parts:
            raise UnsafeError(f"{what}: the name {quoted(name)} at byte {start - BLOCK:,} leaves the archive; refused")
        if len(parts) > DEPTH:
            raise UnsafeError(f"{what}: {plural(len(parts), 'nested folder')} at byte {start - BLOCK:,}; refused")
        name = "/".join(parts)
        if name in found:
            raise CorruptError(f"{what}: {quoted(name)} occurs twice; it is unknown which one is valid")
        found[name] = TarMember(start, stop)
    raise UnsafeError(f"{what} has more than {MAX_MEMBERS:,} members; refused")


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(raw: bytes, what: str, at: int) -> int:
    """Parse an octal number, or GNU's form: big endian after 0x80."""
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    digits = raw.strip(b" \0")
    if digits.strip(b"01234567"):
        raise CorruptError(f"{what}, byte {at:,}: {raw!r} is not a number of a tar header; the archive is damaged")
    return int(digits or b"0", 8)


def _pax(data: bytes, what: str, at: int) -> tuple[str, int]:
    """Name and size (-1: none) of a pax header: lines of ``LENGTH KEY=VALUE``."""
    name, size = "", -1
    for line in data.split(b"\n"):
        key, _, value = line.partition(b" ")[2].partition(b"=")
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise CorruptError(f"{what}, byte {at:,}: the size {quoted(value)} is not a number; it is damaged")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise CorruptError(
                f"{what}, byte {at:,}: a sparse member, which cannot be read in place; unpack the archive"
            )
    return name, size


class _MemberSource(Source):
    """Bytes ``[start, stop)`` of a source as a separate file."""

    def __init__(self, source: Source, member: TarMember, name: str) -> None:
        self._source, self._start, self._name = source, member.start, name
        self.block, self.span, self.gap = source.block, source.span, source.gap
        self.stat = FileStat(member.stop - member.start, source.stat.mtime_ns, source.stat.tag)

    def _inside(self, stop: int) -> None:
        if stop > self.size:
            raise too_short(self._name, self.size, stop)

    def read_into(self, buffer: Array, start: int) -> None:
        self._inside(start + len(buffer))
        self._source.read_into(buffer, self._start + start)

    def read_runs(self, rows: Array, starts: Sequence[int]) -> None:
        self._inside(max(starts, default=0) + rows.shape[1])
        self._source.read_runs(rows, [self._start + start for start in starts])

    def read_bytes(self, start: int, stop: int) -> bytes:
        return self._source.read_bytes(self._start + start, self._start + min(stop, self.size))

    def ahead(self, spans: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        return self._source.ahead([(self._start + low, self._start + high) for low, high in spans])

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        self._source.fetch([(self._start + low, self._start + high) for low, high in spans])


class TarFiles:
    """The files of an archive below one of its folders, as a :class:`~workbench.core.place.Place` needs them."""

    def __init__(
        self,
        place: Place,
        archive: str,
        members: dict[str, TarMember],
        folder: str = "",
        file: str | None = None,
        tree: _Tree | None = None,
    ) -> None:
        self._tree = _folders(members) if tree is None else tree
        self._place, self._archive, self._members, self._folder = place, archive, members, folder
        self.shown = f"{place.path}/{folder}{file or ''}"
        self.root, self.file, self.at_once = f"{place.root}/{archive}/{folder}", file, place.at_once

    @property
    def name(self) -> str:
        return self.shown.rstrip("/").rpartition("/")[2]

    def member(self, relative: str) -> TarMember:
        """Return the bytes of a file in the archive.

        Raises:
            MissingFileError: the archive does not hold it. UnsafeError: the path leaves the folder.
        """
        if relative.startswith("/") or ".." in relative.split("/") or not relative:
            raise UnsafeError(f"path {relative!r} leaves the checkpoint {self.shown!r}; refused")
        found = self._members.get(self._folder + relative)
        if found is None:
            raise MissingFileError(f"file {relative!r} of {self.shown!r} is missing; restore it or save again")
        return found

    def listing(self) -> tuple[dict[str, FileStat], list[str]]:
        files, folders = self._tree.get(self._folder, ((), ()))
        return {name: self.stat(name) for name in files}, list(folders)

    def sub(self, relative: str) -> TarFiles:
        if self._folder + relative in self._members:
            folder, _, file = (self._folder + relative).rpartition("/")
            return self._at(folder and f"{folder}/", file)
        return self._at(f"{self._folder}{relative}/")

    def exists(self, relative: str) -> bool:
        name = self._folder + relative
        return name in self._members or f"{name}/" in self._tree

    def is_link(self, relative: str) -> bool:
        return False

    def stat(self, relative: str) -> FileStat:
        member, whole = self.member(relative), self._place.stat(self._archive)
        return FileStat(member.stop - member.start, whole.mtime_ns, whole.tag)

    now = stat

    def source(self, relative: str) -> Source:
        return _MemberSource(self._place.source(self._archive), self.member(relative), relative)

    @property
    def traffic(self) -> dict[str, int] | None:
        return self._place.traffic

    def ahead(self) -> None:
        self._place.ahead()

    def uncached(self) -> AbstractContextManager[None]:
        return self._place.uncached()

    def again(self) -> TarFiles:
        return self

    def above(self) -> TarFiles | None:
        return self._at("") if self._folder else None

    def _at(self, folder: str, file: str | None = None) -> TarFiles:
        return TarFiles(self._place, self._archive, self._members, folder, file, self._tree)


def _folders(members: dict[str, TarMember]) -> _Tree:
    """Return the files and subfolders of each folder; a folder's name ends with ``/`` or is empty."""
    found: _Tree = {}
    for name in members:
        child, kind = name, 0
        while True:
            folder, _, last = child.rpartition("/")
            inside = found.setdefault(folder and f"{folder}/", ({}, {}))
            known = last in inside[kind]
            inside[kind][last] = None
            if known or not folder:
                break
            child, kind = folder, 1
    return found
