"""Quantised weights with scales in tensors of their own: ``value = (code - zero) · scale``.

::

    codes     one an element (I8, F8), or packed:     words of 32 bits, low bits first      (compressed-tensors, MLX)
                                                      bytes, low nibble first               (NVFP4, MXFP4)
                                                      bytes, high nibble first              (bitsandbytes)
                                                      words down a column                   (GPTQ)
                                                      words along a row, columns 0 2 4 6 1 3 5 7  (AWQ)
    scales    one for a block of rows × columns:      (1, group)   (1, row)   (128, 128)   all
    zeros     one number for all, or one for each scale; compressed-tensors packs those of 8 rows in a word
    product   in float32, then rounded to the type of the result; MLX rounds the product and adds a bias

A unit is a run of elements of one row that share a scale, so a slice reads its own codes and scales. Where a tensor
names the group of each column (activation order), a unit is a row. GPTQ and AWQ store a weight transposed, so their
units are rows of that.

Sources: those of the scheme in :mod:`workbench.formats.safetensors.quantised`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from workbench.core import engine
from workbench.core.arrays import Array
from workbench.core.decoding.floats import E2M1, E4M3, E8M0, rounded, widened
from workbench.core.decoding.values import StoredParts
from workbench.core.dtypes import by_name
from workbench.core.words import plural
from workbench.errors import CorruptError

_BYTES = np.arange(256, dtype=np.uint8)


def unit_of(columns: int, block: int) -> int:
    """Return how many elements are decoded together, for rows of ``columns`` and scales of ``block`` columns each."""
    return gcd(columns, block) if block < columns else gcd(columns, 1024)


@dataclass(frozen=True)
class Codes:
    """How the quantised numbers of a weight are stored.

    Attributes:
        key: the stored tensor.
        dtype: its element type, if each element is one number.
        bits: of a packed number, 0 if each element is one.
        kind: ``u`` unsigned, ``e2m1``, ``e2m1+`` (without a negative zero), ``e4m3``, ``high`` (four bits, the high
            nibble first, an index into ``table``).
        offset: what is subtracted from an unsigned number.
        table: stored tensor of 16 ``float32`` that an index means.
    """

    key: str
    dtype: str = ""
    bits: int = 0
    kind: str = "u"
    offset: int = 0
    table: str = ""

    def read(self, stored: StoredParts, first: int, stop: int) -> tuple[Array, Array]:
        """Return elements ``[first, stop)`` as ``uint8``, and the table of the ``float32`` numbers that they mean."""
        if not self.bits:
            return stored.elements(self.key, first, stop).reshape(-1), widened(_BYTES, by_name(self.dtype))
        element = 8 * stored.itemsize(self.key)
        packed = stored.elements(self.key, first * self.bits // element, -(-stop * self.bits // element))
        codes = _stream(packed.reshape(-1), self.bits, self.kind == "high").reshape(-1)[: stop - first]
        if self.kind.startswith("e2m1"):
            return codes, E2M1 + np.float32(0) if self.kind == "e2m1+" else E2M1
        if self.kind == "e4m3":
            return codes, E4M3
        if self.table:
            return codes, stored.whole(self.table).reshape(-1).view(np.float32)
        return codes, np.arange(1 << self.bits, dtype=np.float32) - np.float32(self.offset)


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
        factor: a number by which the product is multiplied.
        zeros: a tensor like the scales that is subtracted from the codes; ``int8``, or packed down the rows in words of
            ``codes.bits``.
        groups: a tensor of the group of each column, unless it has a -1.
        nested: of scales that are codes themselves: the tensors of the 256 numbers that they mean and of the scales,
            how many share one, and what is added to the product.
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
    zeros: str = ""
    groups: str = ""
    nested: tuple[str, str, int, float] | None = None

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        out = by_name(self.out)
        named = stored.whole(self.groups).reshape(-1).view(np.int32) if self.groups else None
        each = 1 if self.groups else self.unit
        codes, table = self.codes.read(stored, first, stop)
        at = self._scales_of(np.arange(first, stop, each), None if named is None or -1 in named else named)
        with np.errstate(invalid="ignore", over="ignore"):
            scale = self._scale(stored, at)
            zeros = self._zeros(stored, at) if self.zeros else None
            values = _spread(codes.reshape(-1, each), table, scale, zeros)
            if self.factor != 1:
                values = values * np.float32(self.factor)
            if self.bias:
                bias = widened(stored.whole(self.bias).reshape(-1)[at], by_name(self.scale_dtype))
                values = widened(rounded(values, out), out) + bias[:, None]
        return rounded(values.reshape(-1), out)

    def _scales_of(self, elements: Array, named: Array | None) -> Array:
        """Return the position of each element's scale."""
        rows, columns = self.shape
        high, wide = self.block
        down, across = -(-rows // high), -(-columns // wide)
        row, column = elements // columns, elements % columns
        group = column // wide if named is None else _in_range(named, across, self.groups)[column]
        return (row // rows * down + row % rows // high) * across + group

    def _zeros(self, stored: StoredParts, at: Array) -> Array:
        """Return the zero points of some scales; if they are packed like the codes, they are stored with the same
        offset.
        """
        whole = stored.whole(self.zeros)
        if stored.itemsize(self.zeros) == 1:
            return whole.reshape(-1).view(np.int8)[at].astype(np.float32)
        each, across = 32 // self.codes.bits, -(-self.shape[1] // self.block[1])
        row, group = at // across, at % across
        words = whole.reshape(-1, across).view(np.uint32)[row // each, group]
        zero = words >> (row % each * self.codes.bits).astype(np.uint32) & np.uint32((1 << self.codes.bits) - 1)
        return zero.astype(np.float32) - np.float32(self.codes.offset)

    def _scale(self, stored: StoredParts, at: Array) -> Array:
        if self.nested is not None:
            table, own, block, more = self.nested
            numbers = stored.whole(table).reshape(-1).view(np.float32)[stored.whole(self.scale).reshape(-1)[at]]
            return numbers * stored.whole(own).reshape(-1).view(np.float32)[at // block] + np.float32(more)
        raw = stored.whole(self.scale).reshape(-1)[at]
        scale = E8M0[raw] if self.scale_dtype == "e8m0" else widened(raw, by_name(self.scale_dtype))
        if not self.total:
            return scale
        total = stored.whole(self.total).reshape(-1).view(np.float32)[0]
        return scale / total if self.divide else scale * total


@dataclass(frozen=True)
class Transposed:
    """Decode a weight of GPTQ or AWQ, in the order of the file: a row for each input, a column for each output.

    Attributes:
        codes: tensor of words, of GPTQ ``(inputs · bits / 32, outputs)``, of AWQ ``(inputs, outputs / 8)``.
        zeros: tensor of words, ``(groups, outputs · bits / 32)``; of AWQ in its order of columns.
        scales: tensor ``(groups, outputs)`` of element type ``scale_dtype``, which the result has, too.
        outputs, bits: of the weight.
        group: inputs that share a scale, one after the other.
        named: tensor of the group of each input instead, if any.
        more: the number to add to the zeros, modulo ``2 ** bits``: 1 for GPTQ in its first version.
        carry: whether a zero that overflows carries into the next one of its word.
        awq: whether the words are AWQ's.
    """

    codes: str
    zeros: str
    scales: str
    scale_dtype: str
    outputs: int
    bits: int
    group: int
    named: str = ""
    more: int = 0
    awq: bool = False
    carry: bool = False

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        out, low, high = by_name(self.scale_dtype), first // self.outputs, stop // self.outputs
        rows, all_scales = np.arange(low, high), stored.whole(self.scales)
        if self.named:
            group = _in_range(stored.whole(self.named).reshape(-1).view(np.int32)[rows], len(all_scales), self.named)
        else:
            group = rows // self.group
        used, group = np.unique(group, return_inverse=True)
        scales = widened(all_scales[used], out)
        zeros = self._zeros(stored.whole(self.zeros)[used]).astype(np.float32)
        if self.awq:
            wide = self.outputs // 8
            codes = self._along(stored.elements(self.codes, low * wide, high * wide).reshape(-1, wide))
        else:
            each = self.bits * self.outputs
            words = stored.elements(self.codes, low // 32 * each, high // 32 * each)
            codes = _columns(words.reshape(-1, self.bits, self.outputs), self.bits)
        with np.errstate(invalid="ignore", over="ignore"):
            if engine.compiled_in_use():
                from workbench.core.decoding import fast_decode

                values = fast_decode.by_column(codes, zeros, scales, group)
            else:
                values = (codes - zeros[group]) * scales[group]
            return rounded(values.reshape(-1), out)

    def _zeros(self, words: Array) -> Array:
        if not self.more:
            return self._along(words)
        if self.carry and 32 % self.bits == 0:
            return self._along(words.view(np.uint32) + np.uint32(self.more * (0xFFFFFFFF // ((1 << self.bits) - 1))))
        found: Array = self._along(words) + np.uint8(self.more) & np.uint8((1 << self.bits) - 1)
        return found

    def _along(self, words: Array) -> Array:
        """Return the codes of rows of words."""
        return _stream(words, self.bits, order=AWQ if self.awq else None)


AWQ = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  #: which four bits of a word are column 0, 1 …


def _spread(codes: Array, table: Array, scale: Array, zero: Array | None) -> Array:
    """Compute ``(table[codes] - zero) · scale`` for runs with a scale and a zero each."""
    if engine.compiled_in_use():
        from workbench.core.decoding import fast_decode

        return fast_decode.spread(codes, table, scale, zero)
    numbers = table[codes]
    found: Array = (numbers if zero is None else numbers - zero[:, None]) * scale[:, None]
    return found


def _columns(words: Array, bits: int) -> Array:
    """Unpack ``(N, bits, columns) uint32`` as ``(32 · N, columns) uint8``: the codes go down each column."""
    if 8 % bits:
        return _stream(words.swapaxes(1, 2), bits).swapaxes(1, 2).reshape(-1, words.shape[2])
    rows, shifts = words.view(np.uint32).reshape(-1, words.shape[2]), np.arange(0, 32, bits, dtype=np.uint32)
    if engine.compiled_in_use():
        from workbench.core.decoding import fast_decode

        return fast_decode.unpacked(rows, bits, shifts).reshape(-1, words.shape[2])
    found = rows[:, None, :] >> shifts[:, None] & np.uint32((1 << bits) - 1)
    return found.astype(np.uint8).reshape(-1, words.shape[2])


def _stream(words: Array, bits: int, high: bool = False, order: Array | None = None) -> Array:
    """Unpack ``(…, W)`` words as ``(…, W · 8 · itemsize / bits) uint8``, low bits first.

    Args:
        high: the high bits of each byte first.
        order: for words of 32 bits, which of its numbers is the first, the second …
    """
    data = np.ascontiguousarray(words)
    if 8 % bits:
        one = np.unpackbits(data.view(np.uint8), axis=-1, bitorder="little")
        one = one[..., : one.shape[-1] // bits * bits].reshape(*words.shape[:-1], -1, bits)
        return (one @ (1 << np.arange(bits, dtype=np.uint8))).astype(np.uint8)
    each = 8 // bits
    at = np.arange(4 * each).reshape(4, each)[:, ::-1].reshape(-1) if high else np.arange(4 * each)
    shifts = ((at if order is None else order) * bits).astype(np.uint32)
    if data.nbytes % 4 == 0 and engine.compiled_in_use():
        from workbench.core.decoding import fast_decode

        found = fast_decode.unpacked(data.reshape(-1).view(np.uint32)[:, None], bits, shifts)
    elif order is None:
        found = data.view(np.uint8)[..., None] >> shifts[:each].astype(np.uint8) & np.uint8((1 << bits) - 1)
    else:
        found = (data[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return found.reshape(*words.shape[:-1], -1)


def _in_range(groups: Array, count: int, key: str) -> Array:
    """Raise CorruptError unless every group is one of ``count``."""
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        wrong = int(groups.max()) if int(groups.min()) >= 0 else int(groups.min())
        raise CorruptError(f"tensor {key!r} names group {wrong:,}; there are scales for {plural(count, 'group')}")
    return groups
