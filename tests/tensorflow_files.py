"""Writes TensorFlow's V2 checkpoints as its bundle writer does, after LevelDB's and its own descriptions."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from tests.reader_suite import raw

KINDS = {torch.float32: 1, torch.int64: 9, torch.bfloat16: 14, torch.bool: 10, torch.float16: 19}
Extents = tuple[tuple[int, int], ...]


def _rest(byte: int) -> int:
    """What is left of a byte, a bit at a time."""
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


RESTS = [_rest(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """CRC-32C, a byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ RESTS[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(number: int) -> bytes:
    found = b""
    while number >= 128:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def message(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def shape_of(sizes: tuple[int, ...]) -> bytes:
    return b"".join(message(2, number(1, size)) for size in sizes)


def entry(kind: int, sizes: tuple[int, ...], shard: int, start: int, data: bytes, crc: bytes | None = None) -> bytes:
    head = number(1, kind) + message(2, shape_of(sizes)) + number(3, shard) + number(4, start) + number(5, len(data))
    return head + b"\x35" + (masked(data) if crc is None else crc)


def block(rows: list[tuple[bytes, bytes]]) -> bytes:
    found, last = b"", b""
    for key, value in rows:
        shared = 0
        while shared < min(len(key), len(last)) and key[shared] == last[shared]:
            shared += 1
        found += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return found + struct.pack("<II", 0, 1)


def table(rows: dict[bytes, bytes], size: int = 4) -> bytes:
    """A table with ``size`` rows a block."""
    ordered, found, handles = sorted(rows.items()), b"", []
    for at in range(0, len(ordered), size):
        body = block(ordered[at : at + size])
        handles.append((ordered[at : at + size][-1][0], varint(len(found)) + varint(len(body))))
        found += body + b"\0" + masked(body + b"\0")
    footer = b""
    for body in (block([]), block(handles)):
        footer += varint(len(found)) + varint(len(body))
        found += body + b"\0" + masked(body + b"\0")
    return found + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def text_entry(texts: list[bytes], sizes: tuple[int, ...], start: int) -> tuple[bytes, bytes]:
    """The entry and the bytes of a tensor of text."""
    widths = b"".join(struct.pack("<I", len(text)) for text in texts)
    head = b"".join(varint(len(text)) for text in texts)
    data = head + masked(widths) + b"".join(texts)
    return entry(7, sizes, 0, start, data, masked(widths + masked(widths) + b"".join(texts))), data


def rows_of(
    tensors: dict[str, torch.Tensor], texts: dict[str, list[bytes]], parts: dict[str, dict[bytes, Extents]], shards: int
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """The rows of the index, and the data files; ``parts`` are slices of the first axis, by their keys."""
    files = [b"" for _ in range(shards)]
    rows = {b"": number(1, shards) + message(3, number(1, 1))}
    for at, (name, value) in enumerate(tensors.items()):
        kind, shard = KINDS[value.dtype], at % shards
        pieces = {name.encode(): value}
        if name in parts:
            slices = b""
            for extents in parts[name].values():
                inner = [number(1, a) + (number(2, b) if b >= 0 else b"") for a, b in extents]
                slices += message(7, b"".join(message(1, one) for one in inner))
            rows[name.encode()] = number(1, kind) + message(2, shape_of(tuple(value.shape))) + slices
            pieces = {key: value[e[0][0] : e[0][0] + e[0][1]] for key, e in parts[name].items()}
        for key, piece in pieces.items():
            rows[key] = entry(kind, tuple(piece.shape), shard, len(files[shard]), raw(piece))
            files[shard] += raw(piece)
    for name, words in texts.items():
        rows[name.encode()], data = text_entry(words, (len(words),), len(files[0]))
        files[0] += data
    return rows, files


def write(
    prefix: Path,
    tensors: dict[str, torch.Tensor],
    texts: dict[str, list[bytes]] | None = None,
    parts: dict[str, dict[bytes, Extents]] | None = None,
    shards: int = 1,
) -> Path:
    """Write a checkpoint; returns the path of its index."""
    rows, files = rows_of(tensors, texts or {}, parts or {}, shards)
    for at, data in enumerate(files):
        prefix.with_name(f"{prefix.name}.data-{at:05d}-of-{shards:05d}").write_bytes(data)
    path = prefix.with_name(f"{prefix.name}.index")
    path.write_bytes(table(rows))
    return path
