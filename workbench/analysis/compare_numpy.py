"""The differing piece with numpy alone: every type, in blocks that stay in a core's cache.

Values that are folded, here and by compiled code (``fast_compare``):

    counts   changed · NaN on both sides with other bits · NaN in a · in b · new NaN · Inf in a · in b · pairs of
             finite numbers · index of the largest |δ| · δ = 0 · changed among the pairs that are not finite ·
             equal after rounding to the narrower type · largest distance in steps of the type
    sums     Σδ² · Σa² · Σb² · largest |δ|                  over the pairs of finite numbers
    ulps     by bit length of the distance in steps of the type: 0, 1, 2–3, 4–7, …
    octaves  by floor(log₂ |δ|) + 127 of δ ≠ 0; 0: below 2⁻¹²⁶, 255: 2¹²⁸ and more

|δ| of types up to 32 bits is rounded to float32 for the octaves and to find the largest (the first of equal ones); the
sums are of float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workbench.analysis.bit_patterns import float_steps
from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.core.dtypes import DType

Scaled = tuple[int, float, int]

BLOCK = 32 << 10  #: elements at a time
SAFE = 400  #: powers of two whose squares, and sums of them, stay far inside float64
COUNTS, ULPS, OCTAVES = 13, 66, 256
CHANGED, NAN_NAN, NAN_A, NAN_B, NAN_NEW, INF_A, INF_B, FINITE, AT, ZEROS, ODD_CHANGED, ROUNDED, FURTHEST = range(COUNTS)
LARGEST = 3


def how(a: DType, b: DType) -> str:
    """Choose the comparison: ``bits`` (one numeric type), ``numbers`` (two of them), ``raw`` (one other type), or
    ``none``.
    """
    raw = [Decoder(dtype).kind == "raw bytes" for dtype in (a, b)]
    if a == b:
        return "raw" if raw[0] else "bits"
    return "none" if any(raw) else "numbers"


class Numpy:
    """Buffers of one thread for pieces of one pair of types."""

    def __init__(self, a: DType, b: DType, histograms: bool = True) -> None:
        self.a, self.b, self.how, self._histograms = a, b, how(a, b), histograms
        self._decoders = Decoder(a), Decoder(b)
        self._huge = max(a.bits // (2 if a.kind == "c" else 1), b.bits // (2 if b.kind == "c" else 1)) >= 64
        self._narrowest = narrower(a, b) if self.how == "numbers" else None

    def tally(
        self, a: Array, b: Array, mask: Array, ulps: Array, octaves: Array, counts: Array, sums: Array
    ) -> list[Scaled]:
        """Fold a piece; ``mask`` is set where it changed.

        Returns:
            sums of squares that might leave float64: which of the ``sums``, a number, and the power of two to
            multiply it by; they are not in ``sums``.
        """
        scaled: list[Scaled] = []
        for start in range(0, len(a), BLOCK):
            stop = min(start + BLOCK, len(a))
            scaled += self._block(a[start:stop], b[start:stop], mask[start:stop], start, ulps, octaves, counts, sums)
        return scaled

    def _block(
        self, a: Array, b: Array, mask: Array, start: int, ulps: Array, octaves: Array, counts: Array, sums: Array
    ) -> list[Scaled]:
        if self.how == "raw":
            np.not_equal(a, b, out=mask.view(bool))
            counts[CHANGED] += np.count_nonzero(mask)
            return []
        x, y = _numbers(self._decoders[0], a), _numbers(self._decoders[1], b)
        if self.how == "bits":
            changed = _bits_differ(a, b)
        else:
            changed = (x != y) & ~((x != x) & (y != y))
            if self._narrowest is not None:
                counts[ROUNDED] += self._equal_rounded(a, b)
        mask.view(bool)[:] = changed
        counts[CHANGED] += np.count_nonzero(changed)
        finite = np.isfinite(x) & np.isfinite(y) if x.dtype.kind in "fc" or y.dtype.kind in "fc" else None
        if finite is not None and not finite.all():
            _count_odd(x, y, changed, finite, counts)
            x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        counts[FINITE] += len(a) if finite is None else np.count_nonzero(finite)
        distance = _distance(x, y)
        counts[ZEROS] += np.count_nonzero(distance == 0) - (0 if finite is None else np.count_nonzero(~finite))
        at = int(distance.argmax())
        if (top := float(distance[at])) > 0:
            if top > sums[LARGEST]:
                sums[LARGEST], counts[AT] = top, start + at
            if self._histograms:
                octaves += _octaves(distance)
        if self.how == "bits" and self.a.kind == "f":
            exponents = self.a.name == "float8_e8m0fnu"  # without sign
            steps = np.abs(a.astype(np.int64) - b).view(np.uint64) if exponents else float_steps(a, b)
            steps = steps if finite is None else steps[finite]
            furthest = int(steps.max(initial=0))
            unsigned = counts.view(np.uint64)
            unsigned[FURTHEST] = max(int(unsigned[FURTHEST]), furthest)
            if self._histograms:
                ulps += np.bincount(_bit_length(steps), minlength=ULPS)
        return self._squares(x, y, distance, sums)

    def _squares(self, x: Array, y: Array, distance: Array, sums: Array) -> list[Scaled]:
        if x.dtype.kind == "c" or y.dtype.kind == "c":
            sides = [distance, np.abs(x), np.abs(y)]
        else:
            p, q = x.astype(np.float64), y.astype(np.float64)
            with np.errstate(over="ignore"):
                sides = [distance.astype(np.float64) if distance.dtype == np.uint64 else q - p, p, q]
        scaled: list[Scaled] = []
        for which, values in enumerate(sides):
            exponent = 0
            if self._huge:
                top = float(np.abs(values).max())
                if math.isinf(top):  # only δ can be: both sides are finite
                    values, exponent = sides[2] / 16 - sides[1] / 16, 4
                    top = float(np.abs(values).max())
                if abs(more := math.frexp(top)[1]) > SAFE:
                    values, exponent = np.ldexp(values, -more), exponent + more
            found = float(np.einsum("i,i->", values, values))
            if exponent:
                scaled.append((which, found, 2 * exponent))
            else:
                sums[which] += found
        return scaled

    def _equal_rounded(self, a: Array, b: Array) -> int:
        import torch

        wide, narrow = (a, b) if self._narrowest == "b" else (b, a)
        wide_type, narrow_type = (self.a, self.b) if self._narrowest == "b" else (self.b, self.a)
        found = 0
        for at in range(0, len(wide), 16 << 10):  # few enough that torch does not start threads for them
            part = torch.from_numpy(wide[at : at + (16 << 10)].view(f"i{wide.itemsize}").copy()).view(wide_type.torch)
            got = part.to(narrow_type.torch).view(torch.uint8).numpy().view(narrow.dtype)
            want = narrow[at : at + (16 << 10)]
            p, q = (Decoder(narrow_type).numbers(bits.view(narrow_type.numpy)) for bits in (got, want))
            found += int(np.count_nonzero((p == q) | ((p != p) & (q != q))))
        return found


def _numbers(decoder: Decoder, bits: Array) -> Array:
    """Decode bits of one type as float32, float64, complex128 or integers."""
    dtype = decoder.dtype
    if dtype.kind == "c":
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            parts = np.ascontiguousarray(bits).view(f"<f{dtype.itemsize // 2}").astype(np.float64)
        return parts.view(np.complex128)
    return decoder.numbers(bits.view(dtype.numpy))


def narrower(a: DType, b: DType) -> str | None:
    if a.kind != "f" or b.kind != "f" or a.bits == b.bits or None in (a.torch_name, b.torch_name):
        return None
    return "a" if a.bits < b.bits else "b"


def _bits_differ(a: Array, b: Array) -> Array:
    if a.dtype.kind == "V":
        return (a.view(np.uint64) != b.view(np.uint64)).reshape(-1, 2).any(axis=1)
    return a != b


def _count_odd(x: Array, y: Array, changed: Array, finite: Array, counts: Array) -> None:
    nan_a, nan_b = np.isnan(x), np.isnan(y)
    counts[NAN_NAN] += np.count_nonzero(nan_a & nan_b & changed)
    counts[NAN_A] += np.count_nonzero(nan_a)
    counts[NAN_B] += np.count_nonzero(nan_b)
    counts[NAN_NEW] += np.count_nonzero(nan_b & ~nan_a)
    counts[INF_A] += np.count_nonzero(np.isinf(x) & ~nan_a)
    counts[INF_B] += np.count_nonzero(np.isinf(y) & ~nan_b)
    counts[ODD_CHANGED] += np.count_nonzero(changed & ~finite)


def _distance(x: Array, y: Array) -> Array:
    with np.errstate(over="ignore"):
        if x.dtype.kind in "iu" and y.dtype.kind in "iu":
            if x.dtype == y.dtype and x.dtype.itemsize == 8:
                return np.where(x > y, x.view(np.uint64) - y.view(np.uint64), y.view(np.uint64) - x.view(np.uint64))
            x, y = x.astype(np.float64), y.astype(np.float64)
        return np.abs(y - x) if x.dtype == y.dtype else np.abs(y.astype(_common(x, y)) - x.astype(_common(x, y)))


def _common(x: Array, y: Array) -> Any:
    return np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64


def _octaves(distance: Array) -> Array:
    if distance.dtype == np.float32:
        found = np.bincount(distance.view(np.int32) >> 23, minlength=OCTAVES)
    else:
        exponent = (_leading(distance).view(np.int64) >> 52) - 896
        found = np.bincount(np.clip(exponent, 0, 255), minlength=OCTAVES)
    found[0] -= np.count_nonzero(distance == 0)
    return found


def _leading(distance: Array) -> Array:
    """Convert to float64; of 64-bit integers only the leading bit is kept, so nothing is rounded up."""
    if distance.dtype == np.uint64:
        distance = distance & ~(distance >> np.uint64(1))
    return distance.astype(np.float64, copy=False)


def _bit_length(steps: Array) -> Array:
    exponent = (_leading(steps).view(np.int64) >> 52) - 1022
    return np.maximum(exponent, 0)
