"""GGUF files of every version and byte order, written field by field after ggml's description of the format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Tensor = tuple[str, int, Sequence[int], bytes]  #: name, ggml type, shape in numpy's order, bytes


def scalar(kind: int, value: Any, big: bool = False) -> tuple[int, bytes]:
    """A value of one of the numeric types."""
    form = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind]
    return kind, struct.pack((">" if big else "<") + form, value)


class Writer:
    """Fields in a file's order of bytes; sizes as wide as the version has them."""

    def __init__(self, version: int = 3, big: bool = False) -> None:
        self.version, self.order, self.wide = version, ">" if big else "<", "I" if version == 1 else "Q"

    def number(self, form: str, value: int) -> bytes:
        return struct.pack(self.order + form, value)

    def size(self, value: int) -> bytes:
        return self.number(self.wide, value)

    def text(self, value: bytes) -> bytes:
        return self.size(len(value)) + value

    def words(self, values: Sequence[bytes]) -> tuple[int, bytes]:
        """An array of texts."""
        return 9, self.number("I", 8) + self.size(len(values)) + b"".join(map(self.text, values))

    def file(
        self, tensors: Sequence[Tensor], metadata: dict[str, tuple[int, bytes]], *, alignment: int = 32, **counts: int
    ) -> bytes:
        """A whole file; ``tensors=`` and ``pairs=`` in ``counts`` replace the true counts."""
        head = b"GGUF" + self.number("I", self.version)
        head += self.size(counts.get("count", len(tensors))) + self.size(counts.get("pairs", len(metadata)))
        for key, (kind, value) in metadata.items():
            head += self.text(key.encode()) + self.number("I", kind) + value
        data = b""
        for name, kind, shape, content in tensors:
            head += self.text(name.encode()) + self.number("I", len(shape))
            head += b"".join(self.size(n) for n in reversed(shape))
            head += self.number("I", kind) + self.number("Q", len(data))
            data += content + bytes(-len(content) % alignment)
        return head + bytes(-len(head) % alignment) + data


def write(path: Path, tensors: Sequence[Tensor], *, version: int = 3, big: bool = False, **more: Any) -> Path:
    """Write a file with an architecture as its only metadata."""
    writer = Writer(version, big)
    path.write_bytes(writer.file(tensors, {"general.architecture": (8, writer.text(b"llama"))}, **more))
    return path
