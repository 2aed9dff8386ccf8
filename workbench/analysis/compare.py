"""Compare two tensors of one shape, element by element: equal bit for bit, or how they differ. One pass, mergeable.

::

    piece of a ─┐
                ├─ memcmp ──► equal: counted, not examined again
    piece of b ─┘        └──► differs: counts, Σδ² Σa² Σb², max |δ| with its place, ulps, octaves of |δ|, bands

Equality means equal bits (NaN equals the same NaN; −0 differs from +0, but δ is 0). Numbers are compared if both sides
are finite; NaN and Inf are counted apart. Sums are carried exactly from piece to piece
(:mod:`workbench.analysis.comparison`), so the order of the pieces does not matter.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from workbench.analysis import compare_numpy as flat
from workbench.analysis.compare_numpy import Numpy, how
from workbench.analysis.comparison import Comparison, exact
from workbench.analysis.numbers import Decoder
from workbench.analysis.where import BANDS, add_bands
from workbench.core.arrays import Array, Ints
from workbench.core.dtypes import DType, by_name
from workbench.core.engine import engine
from workbench.core.payload import Payloads
from workbench.core.scan import PIECE, OnError, Piece, Progress, scan
from workbench.core.work import pair_work


def compare(
    a: Payloads,
    b: Payloads,
    tensors_a: Ints,
    tensors_b: Ints,
    *,
    replicas: tuple[int, int] = (0, 0),
    threads: int | None = None,
    progress: Progress | None = None,
    on_error: OnError | None = None,
    fast: bool | None = None,
    norms: bool = False,
    histograms: bool = False,
) -> Iterator[tuple[int, Comparison]]:
    """Compare ``tensors_a[k]`` with ``tensors_b[k]`` for every ``k``; yields ``(k, comparison)`` as they are done.

    Tensors that changed only in some pieces are read a second time, for the norms of their equal pieces; equal
    tensors are read once, on both sides. Tensors without an element that both sides store are not yielded.

    Args:
        tensors_a, tensors_b: positions of tensors of equal shapes.
        replicas: which stored copies.
        fast: use the compiled code; by default if numba can be imported and the pass is not small.
        norms: compute the norms of equal tensors too.
        histograms: fill ``ulps`` and ``octaves``, which doubles the cost.

    Raises:
        OpenError: a chunk cannot be read (only without ``on_error``, which is called as by :func:`scan`).
    """
    work = pair_work(a, b, tensors_a, tensors_b, replicas=replicas)
    chosen = engine(int(work.nbytes.sum()), fast)
    found: dict[int, Comparison] = {}
    reducer = Compare(a, fast=chosen == "numba", histograms=histograms)
    pass_progress = None if progress is None else (lambda done: progress(0.9 * done))  # the second pass is mostly short
    for k, state in scan(work, reducer, threads=threads, progress=pass_progress, on_error=on_error):
        if (state.changed or norms) and state.looked < state.seen and state.how in ("bits", "numbers"):
            found[k] = state
        else:
            yield k, state
    if found:
        rest = work.take(np.flatnonzero(np.isin(work.group, list(found))))
        pass_progress = None if progress is None else (lambda done: progress(0.9 + 0.1 * done))
        look = Compare(a, fast=chosen == "numba", only_equal=True)
        for k, more in scan(rest, look, threads=threads, progress=pass_progress, on_error=on_error):
            state = found[k]
            for name in ("looked", "finite", "zeros", "nan_a", "nan_b", "inf_a", "inf_b"):
                setattr(state, name, getattr(state, name) + getattr(more, name))
            state.squares = [p + q for p, q in zip(state.squares, more.squares, strict=True)]
            if state.ulps is not None:
                state.ulps[0] += more.finite
            yield k, state
    if progress is not None:
        progress(1.0)


class Compare:
    """The reducer: :class:`Comparison` of every group of a pass over two catalogs.

    Args:
        a: the first side, for the shapes of its tensors.
        fast: whether the compiled code is used for the types it knows.
        only_equal: examine the equal pieces instead of the differing ones, for their norms and NaN.
        histograms: fill those too.
    """

    def __init__(self, a: Payloads, *, fast: bool = False, only_equal: bool = False, histograms: bool = False) -> None:
        self._a, self._fast, self._only_equal, self._histograms = a, fast, only_equal, histograms
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_local": threading.local()}

    def begin(self, dtype: DType, other: DType | None) -> Comparison:
        """Create an empty comparison."""
        assert other is not None
        return Comparison(dtype, other, how=how(dtype, other))

    def fold(self, state: Comparison, piece: Piece) -> None:
        """Take a piece of both sides into account."""
        a, b = piece.bits, piece.other
        assert b is not None
        state.seen += len(a)
        if not state.shape:
            catalog = self._a.catalog
            state.shape = catalog.shape_of(int(catalog.tensor[piece.row]))
        if state.how == "none":
            return
        equal = state.how != "numbers" and _same(a, b)
        if self._only_equal:
            if equal:
                self._look(state, piece, a, b)
        elif not equal:
            self._look(state, piece, a, b)

    def merge(self, state: Comparison, later: Comparison) -> None:
        """Add what another part of the pass found."""
        for name in _COUNTED:
            setattr(state, name, getattr(state, name) + getattr(later, name))
        state.shape = state.shape or later.shape
        state.furthest = max(state.furthest, later.furthest)
        if later.rounded is not None:
            state.rounded = (state.rounded or 0) + later.rounded
        state.squares = [p + q for p, q in zip(state.squares, later.squares, strict=True)]
        for name in ("ulps", "octaves", "bands"):
            mine, theirs = getattr(state, name), getattr(later, name)
            setattr(state, name, mine if theirs is None else theirs if mine is None else mine + theirs)
        for pair, count in later.chunks.items():
            state.chunks[pair] = state.chunks.get(pair, 0) + count
        if _further(later, state):
            state.max_float, state.max_at = later.max_float, later.max_at
            state.max_a, state.max_b = later.max_a, later.max_b

    def _look(self, state: Comparison, piece: Piece, a: Array, b: Array) -> None:
        counts, sums = np.zeros(flat.COUNTS, np.int64), np.zeros(4)
        ulps, octaves = np.zeros(flat.ULPS, np.int64), np.zeros(flat.OCTAVES, np.int64)
        mask = self._mask(len(a))
        scaled = self._run(state, a, b, mask, ulps, octaves, counts, sums)
        state.looked += len(a)
        changed, finite = int(counts[flat.CHANGED]), int(counts[flat.FINITE])
        state.changed += changed
        state.finite += finite
        state.zeros += int(counts[flat.ZEROS])
        finite_changed = changed - int(counts[flat.ODD_CHANGED])
        if state.how == "bits":
            signs = int(counts[flat.ZEROS]) - (finite - finite_changed)
            state.same_number += signs + int(counts[flat.NAN_NAN])
        for name, at in _ODD.items():
            setattr(state, name, getattr(state, name) + int(counts[at]))
        if state.how == "numbers" and a.dtype.kind != "V" and _rounds(state.a, state.b):
            state.rounded = (state.rounded or 0) + int(counts[flat.ROUNDED])
        for which, value in enumerate(sums[:3].tolist()):
            state.squares[which] += exact(value)
        for which, value, exponent in scaled:
            state.squares[which] += exact(value, exponent)
        if not changed:
            return
        state.furthest = max(state.furthest, int(counts.view(np.uint64)[flat.FURTHEST]))
        if self._histograms and state.how == "bits" and state.a.kind == "f":
            state.ulps = ulps if state.ulps is None else state.ulps + ulps
        if self._histograms and state.how != "raw":
            state.octaves = octaves if state.octaves is None else state.octaves + octaves
        self._place(state, piece, mask, changed, sums[3], int(counts[flat.AT]))

    def _place(self, state: Comparison, piece: Piece, mask: Array, changed: int, largest: float, at: int) -> None:
        pair = piece.row, piece.other_row
        state.chunks[pair] = state.chunks.get(pair, 0) + changed
        dims = len(state.shape)
        if state.how == "raw":
            return
        if dims:
            if state.bands is None:
                state.bands = np.zeros((dims, BANDS), np.int64)
            shape = np.array(state.shape, np.int64)
            add_bands(state.bands, shape, mask, piece.offsets[:dims], piece.sizes[:dims], piece.start)
        if largest > 0 and largest >= state.max_float:
            b = piece.other
            assert b is not None
            new = Comparison(state.a, state.b, max_float=float(largest), max_at=piece.where(at)[:dims])
            if _further(new, state):
                state.max_float, state.max_at = new.max_float, new.max_at
                state.max_a, state.max_b = _value(piece.bits[at : at + 1], state.a), _value(b[at : at + 1], state.b)

    def _run(self, state: Comparison, a: Array, b: Array, mask: Array, *into: Array) -> list[flat.Scaled]:
        if self._fast and state.a == state.b:
            from workbench.analysis import fast_compare

            if state.a.name in fast_compare.TALLIES:
                fast_compare.tally(state.a.name, a, b, (mask, *into), self._histograms)
                return []
        known: dict[tuple[str, str], Numpy] = self._local.__dict__.setdefault("engines", {})
        key = state.a.name, state.b.name
        if key not in known:
            known[key] = Numpy(state.a, state.b, self._histograms)
        return known[key].tally(a, b, mask, *into)

    def _mask(self, size: int) -> Array:
        mask: Array | None = self._local.__dict__.get("mask")
        if mask is None or len(mask) < size:
            mask = self._local.mask = np.empty(max(size, PIECE), np.uint8)
        return mask[:size]


_ODD = {"nan_a": flat.NAN_A, "nan_b": flat.NAN_B, "nan_new": flat.NAN_NEW, "inf_a": flat.INF_A, "inf_b": flat.INF_B}
_COUNTED = ("seen", "changed", "same_number", "looked", "finite", "zeros", "unread", *_ODD)


def _further(new: Comparison, old: Comparison) -> bool:
    """Return whether one comparison's largest |δ| precedes another's: it is larger, or equal and earlier."""
    if new.max_at is None:
        return False
    return old.max_at is None or (-new.max_float, new.max_at) < (-old.max_float, old.max_at)


def _same(a: Array, b: Array) -> bool:
    if a.nbytes != b.nbytes:
        return False
    if (compare := _memcmp()) is None:
        return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))
    left, right = a.__array_interface__["data"][0], b.__array_interface__["data"][0]
    return bool(left == right or compare(left, right, a.nbytes) == 0)


@cache
def _memcmp() -> Any:
    """Return libc's ``memcmp``, which is faster than comparing arrays and releases the GIL; ``None`` if it is
    unavailable.
    """
    try:
        found = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return found


@cache
def _rounds(a: DType, b: DType) -> bool:
    return flat.narrower(a, b) is not None


def _value(bits: Array, dtype: DType) -> float | int | complex:
    if dtype.kind == "c":
        half = np.dtype(f"<f{dtype.itemsize // 2}")
        real, imag = np.ascontiguousarray(bits).view(half).astype(np.float64).tolist()
        return complex(real, imag)
    found: float | int = Decoder(by_name(dtype.name)).numbers(bits.view(dtype.numpy))[0].item()
    return found
