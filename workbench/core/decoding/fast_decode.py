"""Codes to numbers, compiled; the operations, and their order, are those of numpy in :mod:`ggml` and :mod:`scaled`."""

from __future__ import annotations

import numpy as np

from workbench.core.arrays import Array
from workbench.core.fast_numbers import float16
from workbench.core.kernels import kernel, ready


def spread(codes: Array, table: Array, scale: Array, zero: Array | None = None, more: Array | None = None) -> Array:
    """Return ``scale · (table[codes] - zero) + more`` as ``float32`` of the shape of ``codes``.

    Args:
        codes: ``uint8``; the last axis is a run.
        table: the ``float32`` value of each code; codes beyond it mean 0.
        scale, zero, more: ``float32``, one of each run.
    """
    runs = scale.size
    out = np.empty((runs, codes.size // max(runs, 1)), np.float32)
    numbers = np.zeros(256, np.float32)
    numbers[: len(table)] = table
    zeros = np.zeros(runs, np.float32) if zero is None else zero
    added = np.full(runs, -0.0, np.float32) if more is None else more  # which also keeps a negative zero
    _spread(ready(codes.reshape(out.shape), np.uint8), ready(numbers), _flat(scale), _flat(zeros), _flat(added), out)
    return out.reshape(codes.shape)


def _flat(values: Array) -> Array:
    return ready(np.ascontiguousarray(values, np.float32).reshape(-1))


@kernel
def _spread(codes, table, scale, zero, more, out):
    for run in range(len(scale)):
        by, low, high = scale[run], zero[run], more[run]
        for at in range(codes.shape[1]):
            out[run, at] = by * (table[codes[run, at]] - low) + high


def looked_up(d: Array, book: Array, indices: Array, signs: Array | None, delta: Array | None) -> Array:
    """Return ``d · (book[index] + delta) · sign`` as ``(runs, elements of a run) float32``.

    Args:
        d: ``float32``, one of each run.
        book: ``(rows, width) float32``.
        indices: ``(…, rows of a run)``, unsigned.
        signs: ``uint8``, a byte for eight elements, low bit first.
        delta: ``float32`` of the shape of ``indices``, or one of each run.
    """
    runs, each = d.size, indices.shape[-1]
    out = np.empty((runs, each * book.shape[1]), np.float32)
    more = np.zeros(indices.shape, np.float32) if delta is None else np.broadcast_to(delta, indices.shape)
    bits = np.zeros(out.size // 8, np.uint8) if signs is None else np.ascontiguousarray(signs).reshape(-1)
    rows = ready(indices.astype(np.uint16).reshape(runs, each), np.uint16)
    _looked_up(_flat(d), ready(book), rows, ready(bits, np.uint8), _flat(more), out)
    return out


@kernel
def _looked_up(d, book, indices, signs, delta, out):
    width, bytes_each = book.shape[1], out.shape[1] // 8
    for run in range(len(d)):
        by, at = d[run], 0
        for one in range(indices.shape[1]):
            row, more = indices[run, one], delta[run * indices.shape[1] + one]
            for column in range(width):
                out[run, at] = by * (book[row, column] + more)
                at += 1
        for byte in range(bytes_each):
            bits = np.int32(signs[run * bytes_each + byte])
            for bit in range(8):
                negative = bits >> np.int32(bit) & np.int32(1)
                out[run, 8 * byte + bit] *= np.float32(np.int32(1) - np.int32(2) * negative)


def by_column(codes: Array, zeros: Array, scales: Array, group: Array) -> Array:
    """Return ``(codes - zeros[group]) · scales[group]`` as ``(rows, columns) float32``.

    Args:
        codes: ``(rows, columns) uint8``.
        zeros, scales: ``(groups, columns) float32``.
        group: of each row.
    """
    out = np.empty(codes.shape, np.float32)
    zeros, scales = (ready(np.ascontiguousarray(one, np.float32)) for one in (zeros, scales))
    _by_column(ready(codes, np.uint8), zeros, scales, ready(group.astype(np.int64), np.int64), out)
    return out


@kernel
def _by_column(codes, zeros, scales, group, out):
    for row in range(codes.shape[0]):
        one = group[row]
        for column in range(codes.shape[1]):
            out[row, column] = (np.float32(codes[row, column]) - zeros[one, column]) * scales[one, column]


def unpacked(words: Array, bits: int, shifts: Array) -> Array:
    """Return the codes of words, ``(rows, shifts, columns) uint8``.

    Args:
        words: ``(rows, columns) uint32``.
        bits: of a code.
        shifts: ``uint32``, the first bit of each.
    """
    out = np.empty((len(words), len(shifts), words.shape[1]), np.uint8)
    _unpacked(ready(words, np.uint32), ready(shifts, np.uint32), np.uint32((1 << bits) - 1), out)
    return out


@kernel
def _unpacked(words, shifts, mask, out):
    if words.shape[1] == 1:
        for row in range(words.shape[0]):
            word = words[row, 0]
            for one in range(len(shifts)):
                out[row, one, 0] = word >> shifts[one] & mask
        return
    for row in range(words.shape[0]):
        for one in range(len(shifts)):
            shift = shifts[one]
            for column in range(words.shape[1]):
                out[row, one, column] = words[row, column] >> shift & mask


def rounded(values: Array, name: str) -> Array:
    """Return the bits of ``float32`` values as ``bfloat16`` or ``float16``, to nearest, ties to even."""
    flat = ready(np.ascontiguousarray(values, np.float32).reshape(-1), np.uint32)
    out = np.empty(flat.size, np.uint16)
    (_to_bfloat16 if name == "bfloat16" else _to_float16)(flat, out)
    return out.reshape(values.shape)


@kernel
def _to_bfloat16(bits, out):
    for at in range(len(bits)):
        one = bits[at]
        up = (one + np.uint32(0x7FFF) + (one >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        out[at] = np.uint32(0x7FC0) if (one & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else up


@kernel
def _to_float16(bits, out):
    for at in range(len(bits)):
        size = np.uint32(bits[at] & np.uint32(0x7FFFFFFF))
        odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
        normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
        # below 2⁻¹⁴: with 1/2 added, the last bit of float32 is the last one of a subnormal float16
        small = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
        found = small if size < np.uint32(0x38800000) else normal
        found = np.uint32(0x7C00) if size >= np.uint32(0x477FF000) else found
        nan = np.uint32(0x7E00) | np.uint32(size >> np.uint32(13)) & np.uint32(0x3FF)
        found = nan if size > np.uint32(0x7F800000) else found
        out[at] = found | np.uint32(bits[at] >> np.uint32(16)) & np.uint32(0x8000)


def widened(bits: Array) -> Array:
    """Return the values of ``float16`` bits as ``float32``."""
    out = np.empty(bits.size, np.float32)
    _from_float16(ready(np.ascontiguousarray(bits).reshape(-1), np.uint16), out)
    return out.reshape(bits.shape)


@kernel
def _from_float16(bits, out):
    for at in range(len(bits)):
        out[at] = float16(bits[at], out)
