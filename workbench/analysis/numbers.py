"""Stored bits as numbers that can be added and compared, without torch, in reusable buffers.

::

    bits            becomes       how
    bf16            float32       shifted left by 16
    f16             float32       numpy
    fp8, e8m0       float32       a table of 256 entries, from the type's bits
    complex         float64       the magnitude, which has an order
    bool            uint8         0 or 1
    the rest        itself        no copy

Every conversion except the magnitude is exact. F4 and F6 pack several elements into a byte; they have no numbers here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.floats import FP8, fp8_table
from workbench.core.dtypes import DType

BLOCK = 128 << 10  #: elements converted at a time: 1 MiB of float64, which stays in a core's cache

_INTEGERS = {
    "qint8": "i1",
    "quint8": "u1",
    "qint32": "<i4",
}  # the integers, whose scale is not stored beside them


class Decoder:
    """Converts blocks of one element type; the result is valid until the next block.

    Attributes:
        kind: ``numbers``, ``magnitudes`` (complex), or ``raw bytes`` (types whose elements share a byte).
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.kind = "numbers"
        if dtype.packed or dtype.name == "float4_e2m1fn_x2":
            self.kind = "raw bytes"
        elif dtype.kind == "c":
            self.kind = "magnitudes"
        self._buffer = np.empty(0, np.float64)

    def numbers(self, bits: Array) -> Array:
        """Decode a flat array of ``LazyTensor.numpy()`` values (up to a block) as float32, float64 or integers."""
        name = self.dtype.name
        if self.kind == "raw bytes":
            raise ValueError(f"{name} has no numbers")
        if name == "bfloat16":
            out = self._take(len(bits), np.uint32)
            np.left_shift(bits, np.uint32(16), out=out, dtype=np.uint32, casting="unsafe")
            return out.view(np.float32)
        if name == "float16":
            out = self._take(len(bits), np.float32)
            out[:] = bits
            return out
        if name in FP8 or name == "float8_e8m0fnu":
            return np.take(fp8_table(name), bits, out=self._take(len(bits), np.float32), mode="clip")
        if self.kind == "magnitudes":
            half = np.dtype(f"<f{self.dtype.itemsize // 2}")
            parts = np.ascontiguousarray(bits).view(half).reshape(-1, 2)
            with np.errstate(over="ignore"):  # the magnitude of two huge parts is beyond float64
                return np.hypot(parts[:, 0], parts[:, 1], out=self._take(len(parts), np.float64), dtype=np.float64)
        if name == "bool":
            return (bits.view(np.uint8) != 0).view(np.uint8)
        return bits.view(_INTEGERS[name]) if name in _INTEGERS else bits

    def _take(self, count: int, kind: Any) -> Array:
        if len(self._buffer) < count:
            self._buffer = np.empty(count, np.float64)
        return self._buffer.view(kind)[:count]


def equal_edges(low: float, high: float, bins: int) -> Array:
    """Return the ``(bins + 1,)`` edges of equal bins of a range."""
    at = np.arange(bins + 1) / bins
    edges = low * (1 - at) + high * at  # high − low may overflow float64, this cannot
    edges[0], edges[-1] = low, high
    return np.maximum.accumulate(edges)
