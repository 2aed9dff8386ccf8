"""An OCDBT database (tensorstore): a B+tree of keys and values in a folder. Orbax stores zarr arrays in one.

::

    manifest.ocdbt            the newest version's root: file, offset, length
    manifest.00000000000000ff … in separate manifests, if manifest.ocdbt states "numbered"; the highest counts
    d/7e69c232a6df4149…       data files: nodes and values, in any order
    ocdbt.process_0/d/…       … of the process that wrote them, until and after process 0 merged the databases

    manifest, node    magic │ length u64 │ version, compression │ content, or one zstd stream │ CRC-32C u32
                      0cdb3a2a manifest, 0cdb20de node (big endian); all other numbers little endian or varints
    manifest          uuid 16 │ kind u8 │ max inline │ max node │ arity u8 │ compression (, level i32) │ data files │
                      versions: generation, height u8, file, offset, length, keys, tree bytes, value bytes, time u64
    node              height u8 │ data files │ entries n │ keys │ values, or children
      data files      n │ shared prefix (n-1) │ suffix length (n) │ length of the base path (n) │ suffixes
      keys            shared prefix (n-1) │ suffix length (n) │ in inner nodes: prefix of the subtree (n) │ suffixes
      values          length (n) │ 0 inline, 1 in a data file (n × u8) │ file, offset of the latter │ inline bytes
      children        file │ offset │ length │ keys │ tree bytes │ value bytes, n of each

Every field is a column: n numbers of one kind follow each other. Keys of a subtree lack its prefix. Values of up to
1,024 bytes are usually inline. Manifests and nodes have a CRC-32C, values in data files have none.

Source: tensorstore 0.1.86, ``kvstore/ocdbt/format`` (manifest.cc, version_tree_codec.h, btree.cc, btree_codec.h,
data_file_id_codec.cc, codec_util.cc) and ``kvstore/ocdbt/index.rst``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.crc32 import crc32c
from workbench.core.payload import decompress
from workbench.core.place import METADATA_LIMIT, Place
from workbench.core.source import Source
from workbench.core.words import plural
from workbench.errors import CorruptError, IncompleteError, TruncatedError, UnsafeError, UnsupportedFormatError, quoted

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC, NODE_MAGIC = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
MOST_ENTRIES = 1 << 20  #: of a node (tensorstore's ``kMaxNodeArity``)
MOST_TEXT = 128 << 20  #: bytes of a node's keys, or paths, in full
KEYS, KEYS_LEAST, KEY = 64, 128 << 20, 64  #: times the stored bytes of all nodes that keys may take, if more than …
EXPANDED, EXPANDED_LEAST = 256, 128 << 20  #: times the stored bytes that all nodes may become, if it is more than …
MOST_FILES = 1 << 20  #: that one node refers to
LARGEST = 1 << 30  #: bytes of a node's content
KEY_LIMIT = 1 << 16  #: bytes of a key, and of a path
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")
_MISSING = (1 << 64) - 1  #: offset and length of the root of an empty database


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A range of bytes in a data file, and the path that the files named there are relative to."""

    file: str
    base: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """The entries of one leaf node, in order of their keys.

    Attributes:
        keys: the complete keys.
        files: of the node's table of data files.
        file: ``(n,) int64`` positions in ``files``; of an inline value, -1.
        start, length: ``(n,) int64`` bytes of the value: in its file, or in ``content``.
        content: the decoded node.
        where: file, first and last byte of the stored content.
        compressed: whether that is a zstd stream.
    """

    keys: list[str]
    files: list[str]
    file: Array
    start: Array
    length: Array
    content: Array
    where: tuple[str, int, int]
    compressed: bool


def read_leaves(place: Place, folder: str, used: Callable[[str], Any]) -> list[Leaf]:
    """Read all leaf nodes of a database; values in data files are not read.

    Args:
        folder: the database's folder, relative to the place; empty if it is the place's own.
        used: called with the name of each file that is read.

    Raises:
        CorruptError: a manifest or node does not match its CRC-32C or contradicts itself or the tree.
        UnsupportedFormatError: a newer version or another compression.
        UnsafeError: a data file outside of the folder, or nodes or keys that become too long.
        MissingFileError, TruncatedError, IncompleteError: a required file is absent or ends too early.
    """
    return list(_Database(place, f"{folder}/" if folder else "", used).leaves())


@dataclass
class _Database:
    place: Place
    folder: str
    used: Callable[[str], Any]
    sources: dict[str, Source] = field(default_factory=dict)
    total: int = 0
    content: int = 0
    text: int = 0

    def leaves(self) -> Iterator[Leaf]:
        root, height, keys, largest = self._root()
        seen: set[tuple[str, int]] = set()
        last = ""
        found = 0
        pending = [(root, height, b"", keys)] if root is not None else []
        while pending:
            at, height, prefix, count = pending.pop()
            what = f"the node at byte {at.start:,} of {at.file!r}"
            if (at.file, at.start) in seen:
                raise CorruptError(f"{what} is reached twice: the tree contradicts itself; restore the file")
            seen.add((at.file, at.start))
            cursor, where = self._open(at, what, largest)
            stored = cursor.byte()
            if stored != height:
                raise CorruptError(f"{what} has height {stored} where its parent says {height}; restore the file")
            files = cursor.files(self.folder, at.base)
            entries = cursor.number()
            if not 0 < entries <= MOST_ENTRIES:
                raise CorruptError(f"{what} states {plural(entries, 'entry')}; 1 to {MOST_ENTRIES:,} are possible")
            if height:
                children = list(_children(cursor, files, entries, prefix, height, what))
                total = sum(child[3] for child in children)
                pending += reversed(children)
            else:
                leaf = _leaf(cursor, [file for file, _ in files], entries, prefix, where)
                if leaf.keys[0] <= last and found:
                    raise CorruptError(f"{what} has keys that belong before those of the node before it")
                total, last = entries, leaf.keys[-1]
                self.text += sum(map(len, leaf.keys)) + KEY * entries
                if self.text > max(KEYS_LEAST, KEYS * self.total):
                    raise UnsafeError(
                        f"{what} and those before it have keys of {plural(self.text, 'byte')} in "
                        f"{self.total:,}; refused"
                    )
                found += entries
                yield leaf
            if total != count:
                raise CorruptError(
                    f"{what} has {plural(total, 'key')} where its parent says {count:,}; restore the file"
                )

    def _root(self) -> tuple[NodeRef | None, int, int, int]:
        """Return the root of the newest version, its height, the number of keys, and the largest node's bytes."""
        name, uuid = f"{self.folder}{MANIFEST}", b""
        for _ in range(2):
            self.used(name)
            size = self.place.stat(name).size
            what = f"manifest {name!r}"
            cursor, _ = self._open(NodeRef(name, "", 0, size), what, 0, MANIFEST_MAGIC)
            own = cursor.take(16)
            kind, _, largest, arity = cursor.byte(), cursor.number(), cursor.number(), cursor.byte()
            if uuid and own != uuid:
                raise CorruptError(f"{what} is of another database than {MANIFEST!r}; files of two saves were mixed")
            if cursor.number():
                cursor.take(4)
            if kind == 0:
                break
            numbered = [one for one in self.place.sub(self.folder or ".").files if _NUMBERED.fullmatch(one)]
            if kind > 1 or uuid:
                raise CorruptError(f"{what} is of the unknown kind {kind}")
            if not numbered:
                raise IncompleteError(f"{what} refers to numbered manifests, and there is none; restore them")
            uuid, name = own, f"{self.folder}{max(numbered)}"
        files = cursor.files(self.folder, "")
        count = cursor.number()
        if not 0 < count <= 1 << min(arity, 16):
            raise CorruptError(f"{what} lists {plural(count, 'version')}; 1 to {1 << min(arity, 16):,} are possible")
        generations = cursor.numbers(count)
        height = cursor.take(count)[-1]
        ids, starts, lengths, keys = (cursor.numbers(count) for _ in range(4))
        for _ in range(2):
            cursor.numbers(count)
        cursor.take(8 * count)
        if (generations[1:] <= generations[:-1]).any():
            raise CorruptError(f"{what} lists its versions out of order; restore the file")
        cursor.older()
        cursor.end()
        if int(starts[-1]) == _MISSING and int(lengths[-1]) == _MISSING:
            return None, 0, 0, largest
        return cursor.reference(files, ids[-1], starts[-1], lengths[-1]), height, int(keys[-1]), largest

    def _open(
        self, at: NodeRef, what: str, largest: int, magic: bytes = NODE_MAGIC
    ) -> tuple[_Cursor, tuple[str, int, int, bool]]:
        """Read the content of a manifest or node, and return where it is stored."""
        self.used(at.file)
        self.total += at.length
        if self.total > METADATA_LIMIT:
            raise UnsafeError(f"{what} and those before it are over the limit of {METADATA_LIMIT:,} bytes of metadata")
        if at.file not in self.sources:
            self.sources[at.file] = self.place.source(at.file)
        source = self.sources[at.file]
        if at.start + at.length > source.size:
            raise TruncatedError(
                f"{what} ends at byte {at.start + at.length:,}, but the file has {source.size:,}; it is truncated or "
                "from another save, restore it"
            )
        data = source.read(at.start, at.start + at.length)
        if len(data) < 18 or data[:4].tobytes() != magic:
            raise CorruptError(f"{what} does not begin with {magic.hex()}; the file is damaged or from another save")
        length = int(data[4:12].view("<u8")[0])
        if length != len(data):
            raise CorruptError(
                f"{what} states a length of {plural(length, 'byte')} and has {len(data):,}; restore the file"
            )
        if crc32c(data[:-4]) != int(data[-4:].view("<u4")[0]):
            raise CorruptError(f"{what} does not match its CRC-32C: a byte of it changed; restore the file")
        head = _Cursor(data[:-4], what, 12)
        version, compression = head.number(), head.number()
        if version or compression > 1:
            raise UnsupportedFormatError(
                f"{what} has version {version}, compression {compression}; 0, and 0 or 1 are known"
            )
        content = data[head.at : -4]
        if compression:
            limit = min(2 * largest + (4 << 20), LARGEST)
            content = decompress(content, limit, what=what)
        self.content += len(content)
        if self.content > max(EXPANDED_LEAST, EXPANDED * self.total):
            raise UnsafeError(
                f"{what} and those before it become {plural(self.content, 'byte')} from {self.total:,}, more than the "
                f"limit of {EXPANDED} times as many; refused"
            )
        return _Cursor(content, what), (at.file, at.start + head.at, at.start + len(data) - 4, bool(compression))


class _Cursor:
    """Reads the columns of a manifest or node one after another."""

    def __init__(self, data: Array, what: str, at: int = 0) -> None:
        self.data, self.what, self.at = data, what, at

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise CorruptError(
                f"{self.what} ends at byte {len(self.data):,} of its content, {self.at + count - len(self.data):,} "
                "bytes too early; restore the file"
            )
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        return int(self.numbers(1)[0])

    def numbers(self, count: int) -> Array:
        """Read varints ``(count,) uint64``: seven bits a byte, the lowest first; the highest bit marks continuation."""
        window = self.data[self.at : self.at + 10 * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise CorruptError(
                f"{self.what} has fewer than the {plural(count, 'number')} stated at byte {self.at:,} of its content; "
                "restore the file"
            )
        starts = np.concatenate([ends[:0], [0], ends[:-1] + 1])[:count]
        widths = ends - starts
        values = np.zeros(count, np.uint64)
        for place in range(int(widths.max(initial=0)) + 1):
            rows = np.flatnonzero(widths >= place)
            bits = (window[starts[rows] + place] & 0x7F).astype(np.uint64)
            if place > 9 or (place == 9 and (bits > 1).any()):
                raise CorruptError(f"{self.what} has a number of more than 64 bits at byte {self.at:,} of its content")
            values[rows] |= bits << np.uint64(7 * place)
        self.at += int(ends[-1]) + 1 if count else 0
        return values

    def lengths(self, count: int) -> list[int]:
        """Read lengths of keys and paths, which are bounded."""
        found = self.numbers(count)
        if count and int(found.max()) >= KEY_LIMIT:
            raise CorruptError(
                f"{self.what} has a key or path of {plural(int(found.max()), 'byte')}, over {KEY_LIMIT:,}"
            )
        values: list[int] = found.tolist()
        return values

    def texts(self, shared: list[int], suffixes: list[int], first: bytes = b"") -> list[bytes]:
        """Read strings; each shares a prefix with the previous one."""
        total = sum(shared) + sum(suffixes)
        if total > MOST_TEXT:
            raise UnsafeError(
                f"{self.what} has keys or paths of {plural(total, 'byte')}, over the limit of {MOST_TEXT:,}"
            )
        data = self.take(sum(suffixes))
        found, at, last = [], 0, first
        for prefix, length in zip(shared, suffixes, strict=True):
            if prefix > len(last):
                raise CorruptError(
                    f"{self.what} has a key or path that shares {plural(prefix, 'byte')} of {len(last):,}"
                )
            last = last[:prefix] + data[at : at + length]
            at += length
            found.append(last)
        return found

    def files(self, folder: str, base: str) -> list[tuple[str, str]]:
        """Read the table of data files: path, and base path of the nodes read from it."""
        count = self.number()
        if count > min(MOST_FILES, len(self.data)):
            raise CorruptError(
                f"{self.what} states {plural(count, 'data file')} in {plural(len(self.data), 'byte')}; restore the file"
            )
        if not count:
            return []
        shared = [0, *self.lengths(count - 1)]
        suffixes, bases = self.lengths(count), self.lengths(count)
        found = []
        for path, cut in zip(self.texts(shared, suffixes), bases, strict=True):
            text, prefix = self.text(path), self.text(path[:cut])
            whole = base + text
            if whole and ("\0" in whole or {"", ".", ".."} & set(whole.split("/"))):  # empty: that of an empty version
                raise UnsafeError(f"{self.what} names the data file {quoted(whole)}, which is not inside of the folder")
            found.append((folder + whole if whole else "", base + prefix))
        return found

    def text(self, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise CorruptError(f"{self.what} has a key or path that is not UTF-8: {quoted(value)}") from None

    def reference(self, files: list[tuple[str, str]], file: Any, start: Any, length: Any) -> NodeRef:
        if int(file) >= len(files) or not files[int(file)][0] or int(start) + int(length) >= 1 << 63:
            raise CorruptError(
                f"{self.what} refers to data file {int(file):,} of {len(files):,}, bytes {int(start):,} + "
                f"{int(length):,}; restore the file"
            )
        return NodeRef(*files[int(file)], int(start), int(length))

    def older(self) -> None:
        """Skip references to nodes of older versions: generation, file, offset, length, number, height, time."""
        count = self.number()
        if count > 64:
            raise CorruptError(
                f"{self.what} refers to {plural(count, 'node')} of older versions; at most 64 are possible"
            )
        for _ in range(5):
            self.numbers(count)
        self.take(9 * count)

    def end(self) -> None:
        if self.at != len(self.data):
            raise CorruptError(
                f"{self.what} has {plural(len(self.data) - self.at, 'byte')} after its last entry; restore the file"
            )


def _keys(cursor: _Cursor, entries: int, prefix: bytes, *, inner: bool) -> tuple[list[bytes], list[int]]:
    """Read the keys of a node without the prefix of its subtree, and how much of each is the child's prefix."""
    shared, suffixes = [0, *cursor.lengths(entries - 1)], cursor.lengths(entries)
    subtrees = cursor.lengths(entries) if inner else []
    keys = cursor.texts(shared, suffixes)
    if not all(map(lt, keys, islice(keys, 1, None))):
        raise CorruptError(f"{cursor.what} has keys out of order; restore the file")
    if any(cut > len(key) for cut, key in zip(subtrees, keys, strict=False)):
        raise CorruptError(f"{cursor.what} has the prefix of a subtree that is longer than its first key")
    return keys, subtrees


def _children(
    cursor: _Cursor, files: list[tuple[str, str]], entries: int, prefix: bytes, height: int, what: str
) -> Iterator[tuple[NodeRef, int, bytes, int]]:
    keys, subtrees = _keys(cursor, entries, prefix, inner=True)
    ids, starts, lengths, counts = (cursor.numbers(entries) for _ in range(4))
    for _ in range(2):
        cursor.numbers(entries)
    cursor.end()
    for row, (key, cut) in enumerate(zip(keys, subtrees, strict=True)):
        at = cursor.reference(files, ids[row], starts[row], lengths[row])
        whole = prefix + key[:cut]
        if len(whole) > KEY_LIMIT:
            raise CorruptError(
                f"{what} has the prefix of a subtree of {plural(len(whole), 'byte')}, over {KEY_LIMIT:,}"
            )
        yield at, height - 1, whole, int(counts[row])


def _leaf(cursor: _Cursor, files: list[str], entries: int, prefix: bytes, where: tuple[str, int, int, bool]) -> Leaf:
    keys, _ = _keys(cursor, entries, prefix, inner=False)
    lengths = cursor.numbers(entries)
    kinds = np.frombuffer(cursor.take(entries), np.uint8)
    if (kinds > 1).any():
        raise CorruptError(f"{cursor.what} has a value of the unknown kind {int(kinds.max())}; restore the file")
    indirect = np.flatnonzero(kinds)
    ids, starts = cursor.numbers(len(indirect)), cursor.numbers(len(indirect))
    limit = np.uint64(1 << 62)
    named = (
        ids < len(files) if all(files) else np.array([i < len(files) and files[i] != "" for i in ids.tolist()], bool)
    )
    if (lengths > limit).any() or (starts > limit).any() or not named.all():
        raise CorruptError(f"{cursor.what} refers to bytes or to a data file that cannot exist; restore the file")
    length = lengths.astype(np.int64)
    inline = np.where(kinds == 0, np.minimum(length, len(cursor.data) + 1), 0)
    start = cursor.at + np.cumsum(inline) - inline
    file = np.full(entries, -1, np.int64)
    file[indirect], start[indirect] = ids.astype(np.int64), starts.astype(np.int64)
    cursor.take(int(inline.sum()))
    cursor.end()
    if len(prefix) * entries > MOST_TEXT:
        raise UnsafeError(
            f"{cursor.what} has keys of {plural(len(prefix) * entries, 'byte')}, over the limit of {MOST_TEXT:,}"
        )
    try:
        joined = prefix + (b"\0" + prefix).join(keys)
        del keys  # a million of them, in two forms, are a quarter of a gigabyte
        texts = joined.decode().split("\0")
    except UnicodeDecodeError:
        texts = []
    if len(texts) != entries:
        raise CorruptError(f"{cursor.what} has a key that is not UTF-8 or holds a NUL; restore the file")
    return Leaf(texts, files, file, start, length, cursor.data, where[:3], where[3])
