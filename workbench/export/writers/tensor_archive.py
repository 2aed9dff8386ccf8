"""The ``torch.save`` archive of one tensor, byte for byte as torch 2.13 writes it, except for the payload.

::

    data.pkl  .format_version  .storage_alignment  byteorder │ data/0  │ version  .data/serialization_id  directory
    head: known                                              │ payload │ tail: known except two CRCs and the id

Head, tail and size depend on element type and shape alone, so a :class:`TensorArchive` serves all chunks of one
kind: a hundred thousand archives cost as little as a few.

``serialization_id`` is two numbers of 20 digits: a hash of the records' names, the same for all of these, and a hash of
their CRCs. torch only logs it; equal chunks have equal ids.

Source: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py`` (``_reduce_ex_internal``),
``caffe2/serialize/inline_container.cc`` (``writeSerializationId``), ``c10/util/hash.h`` (``hash_combine``).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from workbench.core import catalog as cat
from workbench.core.dtypes import DType, nbytes_of
from workbench.errors import UnsupportedFormatError
from workbench.export.writers.pickle_tree import Global, Persistent, PickleCall
from workbench.export.writers.pickled import dumps
from workbench.export.writers.record import ALIGN, RecordLayout

#: Types with their own storage class; other types are named directly.
STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
NAMES_HASH = 15728199511854643026  #: of the seven records' names; observed, torch 2.13 with libstdc++
VERSION = b"3\n"  #: of the archive
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class TensorArchive:
    """The archive of any tensor of one element type and shape.

    Attributes:
        head: bytes before the payload.
        nbytes: of the payload.
        size: bytes of the whole archive.
    """

    head: bytes
    nbytes: int
    size: int
    _tail: bytes
    _fixed: tuple[int, int]  # the hash of the CRCs before the payload's, and the CRC after it
    _at: tuple[int, ...]  # in the tail: both CRC fields of the payload, those of the id, and the id

    @classmethod
    def of(cls, dtype: DType, shape: tuple[int, ...]) -> TensorArchive:
        """Compute the layout. Raises: UnsupportedFormatError: an element type that torch lacks or cannot load."""
        layout = RecordLayout()
        crcs = 0
        for name, data in (
            ("data.pkl", tensor_pickle(dtype, shape)),
            (".format_version", b"1"),
            (".storage_alignment", str(ALIGN).encode()),
            ("byteorder", b"little"),
        ):
            layout.add(name, len(data), data)
            crcs = _combined(crcs, zlib.crc32(data))
        payload = layout.add("data/0", nbytes_of(dtype, int(np.prod(shape, dtype=np.int64))))
        layout.add("version", len(VERSION), VERSION)
        serialization_id = layout.add(".data/serialization_id", 40)
        made = layout.finish([0, 0])
        tail = bytearray(layout.at + len(made[-1][1]) - payload.start - payload.size)
        base = payload.start + payload.size
        for start, data in [*layout.literals, *made]:
            if start >= base:
                tail[start - base : start - base + len(data)] = data
        head = bytearray(payload.start)
        for start, data in layout.literals:
            if start < payload.start:
                head[start : start + len(data)] = data
        rows = layout.crc_fields()
        at = (
            4 if payload.size else -1,  # the descriptor follows the payload
            rows[layout.records.index(payload)] - base,
            serialization_id.start + serialization_id.size + 4 - base,
            rows[layout.records.index(serialization_id)] - base,
            serialization_id.start - base,
        )
        size = layout.at + len(made[-1][1])
        return cls(bytes(head), payload.size, size, bytes(tail), (crcs, zlib.crc32(VERSION)), at)

    def tail(self, crc: int) -> bytes:
        """Return the bytes after the payload with this CRC-32."""
        before, after = self._fixed
        crcs = _combined(before, crc) if self.nbytes else before
        serialization_id = b"%020d%020d" % (NAMES_HASH, _combined(crcs, after))
        tail = bytearray(self._tail)
        descriptor, row, id_descriptor, id_row, start = self._at
        if descriptor >= 0:
            _CRC.pack_into(tail, descriptor, crc)
        _CRC.pack_into(tail, row, crc)
        own = zlib.crc32(serialization_id)
        _CRC.pack_into(tail, id_descriptor, own)
        _CRC.pack_into(tail, id_row, own)
        tail[start : start + len(serialization_id)] = serialization_id
        return bytes(tail)


def tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return ``data.pkl`` of one tensor in row-major order.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load.
    """
    return dumps(tensor_value(dtype, shape, "0"), 2)


def tensor_value(dtype: DType, shape: tuple[int, ...], storage: str) -> PickleCall:
    """Return a tensor in row-major order over a whole storage, as torch pickles it. Raises as :func:`tensor_pickle`."""
    if dtype.torch_name is None or dtype.packed:
        raise UnsupportedFormatError(f"torch cannot load element type {dtype}; leave the tensor out, or cast it")
    cls = STORAGES.get(dtype.name)
    numel = int(np.prod(shape, dtype=np.int64))
    count = numel if cls else nbytes_of(dtype, numel)
    owner = Global("torch", cls) if cls else Global("torch.storage", "UntypedStorage")
    args = (
        Persistent(("storage", owner, storage, "cpu", count)),
        0,
        tuple(shape),
        cat.row_major(shape),
        False,
        PickleCall(Global("collections", "OrderedDict"), ()),
    )
    if cls:
        return PickleCall(Global("torch._utils", "_rebuild_tensor_v2"), args)
    return PickleCall(Global("torch._utils", "_rebuild_tensor_v3"), (*args, Global("torch", dtype.torch_name)))


def _combined(seed: int, value: int) -> int:
    """Combine hashes as ``c10::hash_combine`` does."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK)


_CRC = struct.Struct("<L")
