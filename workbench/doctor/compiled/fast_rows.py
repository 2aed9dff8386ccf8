"""The sums of rows and columns compiled by numba: the order of rows, and one outlier.

::

    x  (rows, columns) float32 ──┬─ means of x² by row, sums by column, Σ x⁴
                                 └─ the bits as a number: log₂ except for a curve; an octave is 1
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.kernels import kernel, loop, ready, reordered

SHORT = 512  #: elements whose sums are float32: what that rounds is far below what any number of rows can tell


def square_sums(x: Array) -> tuple[Array, Array, float]:
    """Compute sums of a ``(rows, columns) float32`` matrix: means of x² by row, sums by column, Σ x⁴."""
    rows, columns = np.zeros(x.shape[0]), np.zeros(x.shape[1])
    return rows, columns, float(_square_sums(ready(x, np.float32), rows, columns))


def logs(v: Array, cut: int, least: int) -> tuple[Array, Array, tuple[float, float, int, float] | None]:
    """Compute sums of approximate log₂ v: means by row ``float32``; ``(2, columns)`` sums over the rows before ``cut``
    and from it on; and, of the residuals without the means of rows and columns, the two largest, where the first is,
    and Σ² of all others.

    The bits of a float32 as a number: an octave is 1.

    Args:
        least: rows from which there is such a rest; there is none where a row is all 0 or less.
    """
    rows, columns, bits = np.zeros(v.shape[0], np.float32), np.zeros((2, v.shape[1])), ready(v, np.int32)
    _log_sums(bits, cut, rows, columns)
    if len(rows) < least or not (rows > 0).all():
        return rows, columns, None
    means = ((columns[0] + columns[1]) / len(rows) - rows.sum(dtype=np.float64) / len(rows)).astype(np.float32)
    high, at = np.full(2, -np.inf, np.float32), np.full(1, -1, np.int64)
    total = _log_residuals(bits, rows, means, high, at)
    return rows, columns, (float(high[0]), float(high[1]), int(at[0]), float(total - np.float64(high[0]) ** 2))


# ---- loops -----------------------------------------------------------------------------------------------------------


def _columns_of(value: Any) -> Any:
    """Add a function of the rows to sums by column, four rows at a time: sums are loaded and stored once for them."""

    @loop
    def add_four(a, b, c, d, columns):
        for j in range(len(columns)):
            first, second = np.float32(value(a[j]) + value(b[j])), np.float32(value(c[j]) + value(d[j]))
            columns[j] += np.float64(np.float32(first + second))

    @loop
    def add_one(line, columns):
        for j in range(len(columns)):
            columns[j] += np.float64(value(line[j]))

    @loop
    def add(x, first, stop, columns):
        whole = first + (stop - first) // 4 * 4
        for i in range(first, whole, 4):
            add_four(x[i], x[i + 1], x[i + 2], x[i + 3], columns)
        for i in range(whole, stop):
            add_one(x[i], columns)

    return add


@loop
def _square(x):
    return np.float32(x * x)


@loop
def _log(bits):
    """Approximate log₂, within 2e-5 of an octave if four are added."""
    return np.float32(np.float32(bits) * np.float32(2.0**-23))


_add_squares, _add_logs = _columns_of(_square), _columns_of(_log)


@kernel
def _square_sums(x, rows, columns):
    fourth = 0.0
    _add_squares(x, 0, len(rows), columns)
    for i in range(len(rows)):
        total = 0.0
        for start in range(0, len(columns), SHORT):
            second, more = _powers(x[i, start : start + SHORT])
            total += np.float64(second)
            fourth += np.float64(more)
        rows[i] = total / len(columns)
    return fourth


@reordered
def _powers(line):
    """Compute Σ x² and Σ x⁴ of a run so short that each lane of a wide instruction adds up some tens of numbers."""
    second, fourth = np.float32(0), np.float32(0)
    for j in range(len(line)):
        square = np.float32(line[j] * line[j])
        second += square
        fourth += square * square
    return second, fourth


@kernel
def _log_sums(v, cut, rows, columns):
    _add_logs(v, 0, cut, columns[0])
    _add_logs(v, cut, len(rows), columns[1])
    for i in range(len(rows)):
        rows[i] = np.float32(_total(v[i]) / len(v[i]) / np.float64(1 << 23))


@reordered
def _total(line):
    found = 0.0
    for j in range(len(line)):
        found += np.float64(np.float32(line[j]))
    return found


@kernel
def _log_residuals(v, rows, columns, high, at):
    total = 0.0
    for i in range(len(rows)):
        for start in range(0, len(columns), SHORT):
            stop = min(start + SHORT, len(columns))
            above, squares = _residuals(v[i, start:stop], rows[i], columns[start:stop], high[1])
            total += np.float64(squares)
            for j in range(start, stop if above else start):
                rest = _residual(v[i, j], rows[i], columns[j])
                if rest > high[0]:
                    high[1], high[0], at[0] = high[0], rest, i * len(columns) + j
                elif rest > high[1]:
                    high[1] = rest
    return total


@loop
def _residual(bits, row, column):
    return np.float32(np.float32(_log(bits) - row) - column)


@reordered
def _residuals(bits, row, columns, least):
    """Return how many are above ``least``, and the sum of the squares of all."""
    above, squares = np.int32(0), np.float32(0)
    for j in range(len(columns)):
        rest = np.float32(_log(bits[j]) - row) - columns[j]
        above = np.int32(above + np.int32(rest > least))
        squares += rest * rest
    return above, squares
