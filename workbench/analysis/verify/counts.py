"""Counts of anomalous numbers, collected in the pass over the bytes that :mod:`.values` evaluates.

::

    NaN, Inf            |bits| ≥ all-ones exponent      counted only if the largest |bits| of a piece reaches it
    exp_avg_sq < 0      sign bit on a number but -0
    master's low bits   16 zero bits, no power of two

Counts are kept per chunk: a finding can then name the file and the position in the tensor. The CRC-32 of chunks that
have a stored one is computed on the way, while their bytes are in the core's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from workbench.analysis.verify.log import Examined
from workbench.analysis.verify.pages import Pages
from workbench.core.arrays import Array
from workbench.core.crc32 import crc32, crc32_of_two
from workbench.core.dtypes import DType
from workbench.core.parts import storable
from workbench.core.scan import Piece

SQUARES = ("exp_avg_sq", "max_exp_avg_sq")  #: running means of squares

# |bits| mask and the |bits| of infinity (None: the dtype has none, and the first value is NaN)
_FLOATS: dict[str, tuple[int, int, bool]] = {
    "float64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, True),
    "float32": (0x7FFFFFFF, 0x7F800000, True),
    "bfloat16": (0x7FFF, 0x7F80, True),
    "float16": (0x7FFF, 0x7C00, True),
    "float8_e5m2": (0x7F, 0x7C, True),
    "float8_e4m3fn": (0x7F, 0x7F, False),
    "float8_e8m0fnu": (0xFF, 0xFF, False),
}
_HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@storable
@dataclass(slots=True)
class ChunkCounts:
    """Counts of one chunk."""

    count: int = 0
    nonzero: bool = False
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    negative: int = 0
    low: int = 0
    full: int = 0  #: number of elements checked for ``low``
    first_nan: tuple[int, ...] | None = None  #: position of the first NaN
    first_inf: tuple[int, ...] | None = None
    first_negative: tuple[int, ...] | None = None
    pages: list[tuple[int, int]] = field(default_factory=list)  #: file pages that may be all zero
    at: int = -1  #: byte of the file at which the bytes begin whose CRC-32 is in ``crc``
    nbytes: int = 0  #: their number; -1 if the chunk's bytes do not follow each other
    crc: int = 0


class NumberScan:
    """The reducer; one state per chunk.

    Args:
        numbers: check the values, not only for zeros.
        summed: ``(chunks,) bool`` chunks whose CRC-32 is computed.
    """

    def __init__(self, subject: Examined, numbers: bool, summed: Array) -> None:
        self._numbers, self._summed = numbers, summed
        catalog, roles, fqns = subject.catalog, subject.ckpt.roles, subject.ckpt.fqns
        self._payloads = subject.payloads
        self._pages = Pages(subject.payloads)
        floats = np.array([catalog.dtype_of(t).kind in "fc" for t in range(len(catalog))], bool)
        self._square = np.array([r in SQUARES for r in roles], bool) & floats
        half = {f: catalog.dtype_of(t).name for t, (f, r) in enumerate(zip(fqns, roles, strict=True)) if r == "param"}
        # fp16 keeps 10 bits of 23, bf16 7; without a 16-bit weight to compare, masters are assumed to come from bf16
        self._low = np.array(
            [
                0
                if r != "master" or catalog.dtype_of(t).name != "float32"
                else {"float16": 0x1FFF, "float32": 0}.get(half.get(f or "", ""), 0xFFFF)
                for t, (f, r) in enumerate(zip(fqns, roles, strict=True))
            ],
            np.uint32,
        )

    def begin(self, dtype: DType, other: DType | None) -> ChunkCounts:
        """Return an empty state."""
        return ChunkCounts()

    def fold(self, state: ChunkCounts, piece: Piece) -> None:
        """Add a piece to its chunk's state."""
        catalog = self._payloads.catalog
        tensor = int(catalog.tensor[piece.row])
        dtype = catalog.dtype_of(tensor)
        if self._summed[piece.row]:
            _sum(state, piece)
        state.count += len(piece.bits)
        state.nonzero = state.nonzero or bool(_whole(piece.bits).any())
        self._pages.look(state.pages, piece)
        if not self._numbers:
            return
        if dtype.name in _FLOATS:
            self._floats(state, piece, piece.bits, _FLOATS[dtype.name], bool(self._square[tensor]))
        elif dtype.name in _HALVES:
            half = dtype.itemsize * 4
            parts = np.ascontiguousarray(piece.bits).view(f"<u{half // 8}")
            self._floats(state, piece, parts, _FLOATS[_HALVES[dtype.name]], False)
        elif dtype.name.endswith("fnuz"):
            _count_nan(state, piece, piece.bits == 0x80)
        if self._low[tensor]:
            _low_bits(state, piece.bits, int(self._low[tensor]))

    def merge(self, state: ChunkCounts, later: ChunkCounts) -> None:
        """Add a later state of the same chunk."""
        for name in ("count", "nan", "posinf", "neginf", "negative", "low", "full"):
            setattr(state, name, getattr(state, name) + getattr(later, name))
        if state.nbytes >= 0 and later.nbytes >= 0 and later.at == state.at + state.nbytes:
            state.crc = crc32_of_two(state.crc, later.crc, later.nbytes)
            state.nbytes += later.nbytes
        else:
            state.nbytes = -1
        state.nonzero = state.nonzero or later.nonzero
        for name in ("first_nan", "first_inf", "first_negative"):
            if getattr(state, name) is None:
                setattr(state, name, getattr(later, name))
        state.pages += later.pages

    @staticmethod
    def _floats(state: ChunkCounts, piece: Piece, bits: Array, kind: tuple[int, int, bool], square: bool) -> None:
        mask, infinite, has_infinity = kind
        # two reads cost less than an array of all magnitudes, whose pages some allocators request anew for each piece
        largest = int(bits.max(initial=0))
        positive = int(bits.view(f"i{bits.itemsize}").max(initial=0)) if mask < np.iinfo(bits.dtype).max else largest
        usual = positive < infinite and largest - (mask + 1) < infinite
        if usual and (not square or largest <= mask):
            return
        magnitude = bits & bits.dtype.type(mask)
        if not usual:
            nan = magnitude > infinite if has_infinity else magnitude >= infinite
            is_nan = _elements(nan, piece)
            _count_nan(state, piece, is_nan)
            if has_infinity:
                sign, inf = bits > mask, magnitude == infinite
                above = _elements(inf & ~sign, piece) & ~is_nan
                below = _elements(inf & sign, piece) & ~is_nan & ~above
                state.posinf += int(np.count_nonzero(above))
                state.neginf += int(np.count_nonzero(below))
                if state.first_inf is None:
                    state.first_inf = _first(piece, above | below)
        if square:
            negative = (bits > mask) & (magnitude > 0) & (magnitude <= infinite)
            state.negative += int(np.count_nonzero(negative))
            if state.first_negative is None:
                state.first_negative = _first(piece, negative)


def _sum(state: ChunkCounts, piece: Piece) -> None:
    """Continue the CRC-32 of a chunk, as long as its bytes follow each other in the file."""
    if state.at < 0:
        state.at = piece.byte
    if piece.byte < 0 or state.nbytes < 0 or piece.byte != state.at + state.nbytes:
        state.nbytes = -1
        return
    state.crc = crc32(piece.bits.view(np.uint8), state.crc)
    state.nbytes += piece.bits.nbytes


def _whole(bits: Array) -> Array:
    """View the same bytes as a type that NumPy can compare with zero."""
    return bits.view(np.uint8) if bits.dtype.kind == "V" else bits


def _elements(halves: Array, piece: Piece) -> Array:
    """Reduce a mask to elements: a complex number has two halves and is NaN or infinite if either is."""
    return np.logical_or.reduce(halves.reshape(len(piece.bits), -1), axis=1)


def _count_nan(state: ChunkCounts, piece: Piece, nan: Array) -> None:
    state.nan += int(np.count_nonzero(nan))
    if state.first_nan is None:
        state.first_nan = _first(piece, nan)


def _first(piece: Piece, bad: Array) -> tuple[int, ...] | None:
    """Return the position in the tensor of the first bad element, if there is one."""
    return piece.where(int(bad.argmax())) if bad.any() else None


def _low_bits(state: ChunkCounts, bits: Array, mask: int) -> None:
    """Count numbers whose low bits are zero, except powers of two and 0, whose low bits are always zero."""
    low = (bits & np.uint32(mask)) == 0
    plain = int(np.count_nonzero(low))
    if plain * 200 > len(bits):
        simple = (bits & np.uint32(0x7FFFFF)) == 0
        count = int(np.count_nonzero(simple))
        state.low += plain - count
        state.full += len(bits) - count
    else:
        state.low += plain
        state.full += len(bits)
