"""OCDBT databases and zarr 3 arrays, written after their specifications (tensorstore's ``index.rst``; zarr 3).

``database(folder, values)`` writes every node and value; a test that wants a damaged one writes the parts itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from tests.tensorflow_files import crc32c

MANIFEST, NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
NONE = (1 << 64) - 1
Place = tuple[int, int, int]  #: file, offset, length


def varint(*numbers: int) -> bytes:
    out = b""
    for number in numbers:
        while number > 127:
            out, number = out + bytes([number & 127 | 128]), number >> 7
        out += bytes([number])
    return out


def wrapped(magic: bytes, body: bytes, *, compress: bool = True, version: int = 0) -> bytes:
    stored = varint(version, compress) + (zstandard.compress(body) if compress else body)
    head = magic + struct.pack("<Q", len(stored) + 16) + stored
    return head + struct.pack("<I", crc32c(head))


def table(files: Sequence[str]) -> bytes:
    """Data files, nothing shared, no base paths."""
    out = varint(len(files), *[0] * max(len(files) - 1, 0), *(len(one) for one in files), *[0] * len(files))
    return out + "".join(files).encode()


def common(keys: Sequence[bytes]) -> int:
    """Bytes that begin all of them."""
    return next((at for at, column in enumerate(zip(*keys, strict=False)) if len(set(column)) > 1), min(map(len, keys)))


def shared(keys: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    cuts = [common([a, b]) for a, b in pairwise(keys)]
    return cuts, [key[cut:] for key, cut in zip(keys, [0, *cuts], strict=True)]


def leaf(files: Sequence[str], entries: Mapping[bytes, bytes | Place]) -> bytes:
    """The content of a leaf; a value is its bytes, or where they are."""
    cuts, suffixes = shared(list(entries))
    apart = [one for one in entries.values() if isinstance(one, tuple)]
    inline = [one for one in entries.values() if isinstance(one, bytes)]
    lengths = [one[2] if isinstance(one, tuple) else len(one) for one in entries.values()]
    kinds = bytes(isinstance(one, tuple) for one in entries.values())
    out = b"\0" + table(files) + varint(len(entries), *cuts, *map(len, suffixes)) + b"".join(suffixes)
    out += varint(*lengths) + kinds
    return out + varint(*(one[0] for one in apart), *(one[1] for one in apart)) + b"".join(inline)


def inner(height: int, files: Sequence[str], children: Sequence[tuple[bytes, int, Place, int]]) -> bytes:
    """The content of an inner node; a child is its first key, how much of it the child's keys lack, place, keys."""
    cuts, suffixes = shared([child[0] for child in children])
    out = bytes([height]) + table(files) + varint(len(children), *cuts, *map(len, suffixes))
    out += varint(*(child[1] for child in children)) + b"".join(suffixes)
    for column in range(3):
        out += varint(*(child[2][column] for child in children))
    return out + varint(*(child[3] for child in children), *[0] * 2 * len(children))


def manifest(
    files: Sequence[str], root: Place, height: int, keys: int, *, kind: int = 0, generations: Sequence[int] = (1,)
) -> bytes:
    """The content of a manifest; earlier generations have the same root."""
    n = len(generations)
    out = bytes(range(16)) + bytes([kind]) + varint(1024, 100_000_000) + b"\4" + varint(1) + bytes(4)
    if kind:
        return out
    out += table(files) + varint(n, *generations) + bytes([height]) * n
    for number in (*root, keys, 0, 0):
        out += varint(*[number] * n)
    return out + bytes(8 * n) + varint(0)


def database(
    folder: Path,
    values: Mapping[str, bytes],
    *,
    inline: int = 1024,
    leaf_keys: int = 0,
    compress: bool = True,
    numbered: bool = False,
    data: str = "d/values",
    prefix: int = 0,
) -> Path:
    """Write a database: leaves of ``leaf_keys`` keys below one inner node, or one leaf, in ``d/nodes``."""
    stored, nodes, entries = bytearray(), bytearray(), {}
    for key, value in sorted((key.encode(), value) for key, value in values.items()):
        entries[key] = value if len(value) <= inline else (0, len(stored), len(value))
        stored += value if len(value) > inline else b""
    keys, children = list(entries), []
    for at in range(0, len(keys), leaf_keys or len(keys)):
        mine = keys[at : at + (leaf_keys or len(keys))]
        cut = min(prefix, common(mine))
        part = wrapped(NODE, leaf([data], {key[cut:]: entries[key] for key in mine}), compress=compress)
        children.append((mine[0], cut, (0, len(nodes), len(part)), len(mine)))
        nodes += part
    root, height = children[0][2], 0
    if leaf_keys:
        part = wrapped(NODE, inner(1, ["d/nodes"], children), compress=compress)
        root, height, nodes = (0, len(nodes), len(part)), 1, nodes + part
    for name, content in (("d/nodes", nodes), (data, stored)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    content = wrapped(MANIFEST, manifest(["d/nodes"], root, height, len(keys)), compress=compress)
    if numbered:
        (folder / "manifest.0000000000000001").write_bytes(b"an older one, never read")
        (folder / "manifest.000000000000000a").write_bytes(content)
        content = wrapped(MANIFEST, manifest([], (0, 0, 0), 0, 0, kind=1))
    (folder / "manifest.ocdbt").write_bytes(content)
    return folder


# ---- arrays ----------------------------------------------------------------------------------------------------------

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def zarr2(name: str, array: np.ndarray, chunk: Sequence[int], dtype: str = "") -> dict[str, bytes]:
    """As Orbax writes it: chunks in zstd, of their full size."""
    told = {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": chunk,
        "dtype": dtype or array.dtype.str,
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": {"id": "zstd", "level": 1},
        "dimension_separator": ".",
    }
    out = {f"{name}/.zarray": json.dumps(told).encode()}
    for at, part in chunks(array, chunk):
        out[f"{name}/{'.'.join(map(str, at)) or '0'}"] = zstandard.compress(part.tobytes())
    return out


def zarr3(
    name: str,
    array: np.ndarray,
    chunk: Sequence[int],
    codecs: list[dict[str, Any]],
    *,
    encode: Any = bytes,
    inside: Sequence[int] | None = None,
    first: bool = False,
    absent: Sequence[int] = (),
    dtype: str = "",
    **more: Any,
) -> dict[str, bytes]:
    """Chunks through ``encode``; with ``inside``, shards of inner chunks of that shape with their index."""
    told = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": dtype or array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "fill_value": 0,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
    }
    if inside is not None:
        index = {"chunk_shape": inside, "codecs": codecs, "index_codecs": [BYTES, {"name": "crc32c"}]}
        index["index_location"] = "start" if first else "end"
        told["codecs"] = [{"name": "sharding_indexed", "configuration": index}]
    told |= more
    out = {f"{name}/zarr.json": json.dumps(told).encode()}
    for at, part in chunks(array, chunk):
        data = encode(part) if inside is None else shard(part, inside, encode, first, absent)
        out["/".join([name, "c", *map(str, at)])] = data
    return out


def shard(part: np.ndarray, inside: Sequence[int], encode: Any, first: bool, absent: Sequence[int]) -> bytes:
    count = int(np.prod([n // c for n, c in zip(part.shape, inside, strict=True)]))
    start, body, index = (16 * count + 4) * first, b"", b""
    for number, (_, one) in enumerate(chunks(part, inside)):
        data = encode(one)
        index += (
            struct.pack("<QQ", NONE, NONE) if number in absent else struct.pack("<QQ", start + len(body), len(data))
        )
        body += b"" if number in absent else data
    index += struct.pack("<I", crc32c(index))
    return index + body if first else body + index


def chunks(array: np.ndarray, chunk: Sequence[int]) -> Any:
    """Places in the grid, and chunks of full size; what is outside of the array is 77."""
    for at in np.ndindex(*(-(-n // c) for n, c in zip(array.shape, chunk, strict=True))):
        part = array[tuple(slice(a * c, a * c + c) for a, c in zip(at, chunk, strict=True))]
        full = np.full(chunk, 77).astype(array.dtype)
        full[tuple(slice(0, n) for n in part.shape)] = part
        yield at, full
