"""Quantised weights with scales in tensors of their own: ``value = (code - offset) · scale``.

::

    codes     one an element (I8, F8), or packed:     words of 32 bits, low bits first      (compressed-tensors, MLX)
                                                      bytes, low nibble first               (NVFP4, MXFP4)
                                                      bytes, high nibble first              (bitsandbytes)
    scales    one for a block of rows × columns:      (1, group)   (1, row)   (128, 128)   all
    product   in float32, then rounded to the type of the result; MLX rounds the product and adds a bias

A unit is a run of elements of one row that share a scale, so a slice reads its own codes and scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.floats import E2M1, E8M0, rounded, widened
from workbench.core.decoding.values import StoredParts
from workbench.core.dtypes import by_name

__all__ = ["Codes", "Scaled", "unit_of"]


def unit_of(columns: int, block: int) -> int:
    """Elements that are decoded together, for rows of ``columns`` and scales of ``block`` columns each."""
    return gcd(columns, block) if block < columns else gcd(columns, 1024)


@dataclass(frozen=True)
class Codes:
    """How the quantised numbers of a weight are stored.

    Attributes:
        key: the stored tensor.
        dtype: its element type, if each element is one number.
        bits: of a packed number, 0 if each element is one.
        kind: ``u`` unsigned, ``e2m1``, ``high`` (four bits, the high nibble first, an index into ``table``).
        offset: what is subtracted from an unsigned number.
        table: stored tensor of 16 ``float32`` that an index means.
    """

    key: str
    dtype: str = ""
    bits: int = 0
    kind: str = "u"
    offset: int = 0
    table: str = ""

    def read(self, stored: StoredParts, first: int, stop: int) -> Array:
        """Return elements ``[first, stop)`` as ``float32``."""
        if not self.bits:
            return widened(stored.elements(self.key, first, stop), by_name(self.dtype))
        element = 8 * stored.itemsize(self.key)
        packed = stored.elements(self.key, first * self.bits // element, -(-stop * self.bits // element))
        flat = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
        if self.bits == 8:
            numbers = flat
        elif self.bits == 4:
            pair = (flat >> 4, flat & 15) if self.kind == "high" else (flat & 15, flat >> 4)
            numbers = np.stack(pair, axis=-1).reshape(-1)
        else:  # a stream of bits
            one = np.unpackbits(flat, bitorder="little")[: (stop - first) * self.bits].reshape(-1, self.bits)
            numbers = one @ (1 << np.arange(self.bits))
        numbers = numbers[: stop - first]
        if self.kind == "e2m1":
            return E2M1[numbers]
        if self.table:
            return stored.whole(self.table).reshape(-1).view(np.float32)[numbers]
        return numbers.astype(np.float32) - np.float32(self.offset)


@dataclass(frozen=True)
class Scaled:
    """Decode a weight of rows and columns.

    Attributes:
        codes: where its numbers are.
        scale: the tensor of scales, with element type ``scale_dtype``; ``e8m0`` bytes are powers of 2.
        shape: rows of one matrix, and columns; matrices follow each other.
        block: rows and columns that share a scale; the scales of a matrix are row-major.
        unit: elements decoded together.
        out: type of the result.
        total: a scale of one element, by which the scales are divided (``divide``) or multiplied.
        bias: a tensor of biases, like the scales; the product is rounded before it is added.
        factor: a number that the product is multiplied with.
    """

    codes: Codes
    scale: str
    scale_dtype: str
    shape: tuple[int, int]
    block: tuple[int, int]
    unit: int
    out: str
    total: str = ""
    divide: bool = False
    bias: str = ""
    factor: float = 1.0

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        out = by_name(self.out)
        codes = self.codes.read(stored, first, stop).reshape(-1, self.unit)
        at = self._scales_of(np.arange(first, stop, self.unit))
        with np.errstate(invalid="ignore", over="ignore"):
            scale = self._scale(stored, at)
            values = codes * scale[:, None]
            if self.factor != 1:
                values = values * np.float32(self.factor)
            if self.bias:
                bias = widened(stored.whole(self.bias).reshape(-1)[at], by_name(self.scale_dtype))
                values = widened(rounded(values, out), out) + bias[:, None]
        return rounded(values.reshape(-1), out)

    def _scales_of(self, elements: Array) -> Array:
        """Position of the scale of each element."""
        rows, columns = self.shape
        high, wide = self.block
        down, across = -(-rows // high), -(-columns // wide)
        row, column = elements // columns, elements % columns
        return (row // rows * down + row % rows // high) * across + column // wide

    def _scale(self, stored: StoredParts, at: Array) -> Array:
        raw = stored.whole(self.scale).reshape(-1)[at]
        scale = E8M0[raw] if self.scale_dtype == "e8m0" else widened(raw, by_name(self.scale_dtype))
        if not self.total:
            return scale
        total = stored.whole(self.total).reshape(-1).view(np.float32)[0]
        return scale / total if self.divide else scale * total
