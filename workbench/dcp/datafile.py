"""One data file of a save: items back to back, in large writes; a second thread may hash what the first one writes.

::

    __0_0.1f3a09bc.distcp   │ object │ head │ payload │ tail │ head │ payload │ tail │ …
                            └ bytes  └─── torch.save archive ┘
    written                 small parts are joined; a piece of a large payload is written from the tensor's own memory
    digests                 CRC-32 of each payload (stored in the archive, as torch does), XXH3-128 of each 4 MiB block

Source: torch 2.13 ``torch/distributed/checkpoint/filesystem.py`` (``_write_files_from_queue``, ``_write_item``).
"""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench.core.arrays import Array
from workbench.core.crc32 import crc32
from workbench.core.dtypes import by_name
from workbench.core.fingerprint import BlockDigests
from workbench.dcp.outputs import Output
from workbench.errors import UnsupportedFormatError
from workbench.export.writers.tensor_archive import TensorArchive

TENSOR, OBJECT, OPAQUE = range(3)  #: an archive made here; a pickled object; an archive that ``torch.save`` made
PIECE = 1 << 20  #: bytes hashed at a time: they stay in a core's cache for the second hash
WRITE = 8 << 20  #: bytes written at a time
COPIED = 256 << 10  #: payloads up to this size are joined with their neighbors


class WrittenItem(NamedTuple):
    """An item of a file.

    Attributes:
        kind: ``TENSOR``, ``OBJECT`` or ``OPAQUE``.
        offset, length: bytes in the file.
        crc: CRC-32 of a tensor's payload; 0 otherwise.
        digests: digests of the blocks of a tensor's payload, or of the whole item; empty if they were not computed.
        live: whether they are known to equal those of the trainer's values before the save.
    """

    kind: int
    offset: int
    length: int
    crc: int
    digests: bytes
    live: bool = False


class DataFile:
    """A file that is being appended to.

    Args:
        out: where the bytes go; its owner closes it.
        hashed: compute XXH3-128 digests.
        beside: hash in a second thread, which takes less time and more of the processor meanwhile.

    Attributes:
        size: bytes so far.
        seconds: time spent, by phase.
    """

    def __init__(self, out: Output, *, hashed: bool = True, beside: bool = True) -> None:
        self.size = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._out, self._hashed = out, hashed
        self._written = 0
        self._joined = bytearray()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="workbench-hash") if beside else None

    def tensor(self, tensor: torch.Tensor, expected: tuple[Any, tuple[int, ...]]) -> WrittenItem:
        """Append a tensor as an archive of ``torch.save``.

        Args:
            expected: element type and shape in the plan; another tensor is still stored, as ``OPAQUE``.
        """
        with self.timed("serialise"):
            tensor = tensor.detach().cpu()
            archive = archive_of(tensor.dtype, tuple(tensor.shape)) if _is_plain(tensor) else None
            if archive is None or (tensor.dtype, tuple(tensor.shape)) != expected:
                stream = io.BytesIO()
                torch.save(tensor.clone(), stream)  # a view would be saved with all of its storage
                return self.opaque(stream.getbuffer(), OPAQUE)
            flat = bytes_of(tensor)
        offset = self.size
        self._put(archive.head)
        crc, digests = self._payload(flat)
        self._put(archive.tail(crc))
        return WrittenItem(TENSOR, offset, self.size - offset, crc, digests)

    def opaque(self, data: memoryview | bytes, kind: int = OBJECT) -> WrittenItem:
        """Append bytes that are already an item."""
        offset = self.size
        _, digests = self._payload(np.frombuffer(data, np.uint8), checked=False)
        return WrittenItem(kind, offset, self.size - offset, 0, digests)

    def close(self) -> None:
        """End the thread that hashes."""
        if self._beside is not None:
            self._beside.shutdown()

    def flush(self, *, sync: bool) -> None:
        """Write the joined bytes, give the file its size, and sync it to disk."""
        self._write()
        with self.timed("sync"):
            self._out.end(self.size, sync=sync)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def _payload(self, flat: Array, *, checked: bool = True) -> tuple[int, bytes]:
        hasher, crc = BlockDigests(), 0

        def hash_piece(large: Array) -> None:
            nonlocal crc
            with self.timed("hash"):
                for at in range(0, len(large), PIECE):
                    piece = large[at : at + PIECE]
                    if checked:
                        crc = crc32(piece, crc)
                    if self._hashed:
                        hasher.update(piece)

        if len(flat) <= COPIED or self._beside is None:
            for start in range(0, max(len(flat), 1), PIECE):
                piece = flat[start : start + PIECE]
                hash_piece(piece)
                self._put(piece.data)  # from the cache
        else:
            hashing = [
                self._beside.submit(hash_piece, flat[start : start + WRITE]) for start in range(0, len(flat), WRITE)
            ]
            try:
                for start in range(0, len(flat), WRITE):
                    self._put(flat[start : start + WRITE].data)
            finally:
                for one in hashing:
                    one.result()
        return crc, b"".join(hasher.digests()) if self._hashed else b""

    def _put(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        if len(data) <= COPIED:
            self._joined += data
            if len(self._joined) >= WRITE:
                self._write()
        else:
            self._write(memoryview(data))

    def _write(self, data: memoryview | None = None) -> None:
        """Write the joined bytes and ``data`` in one call."""
        parts = [memoryview(part) for part in (self._joined, data) if part is not None and len(part)]
        if not parts:
            return
        with self.timed("write"):
            self._out.write(parts, self._written)
        self._written += sum(map(len, parts))
        del parts
        self._joined = bytearray()


@lru_cache(maxsize=4096)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorArchive | None:
    """Return the archive of tensors of one type and shape; ``None`` if only ``torch.save`` can write it."""
    try:
        return TensorArchive.of(by_name(dtype), shape)
    except UnsupportedFormatError:
        return None


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's elements in host memory as bytes, in row-major order; a copy if it stores them otherwise."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(0, np.uint8)
    found: Array = flat.view(torch.uint8).numpy()
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
