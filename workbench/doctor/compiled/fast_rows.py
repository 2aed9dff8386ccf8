"""The sums of rows and columns compiled by numba (the ``fast`` extra): an order of rows, one loud cell.

::

    x  (rows, columns) float32 ──┬─ means of x² by row, sums by column, Σ x⁴
                                 └─ the bits as a number: log₂ but for a curve; an octave is 1

Loops and kernels stay in one file, see :mod:`workbench.doctor.compiled.kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.doctor.compiled.kernels import exact, ready, reordered

__all__ = ["logs", "square_sums"]

Array = np.ndarray[Any, Any]
SHORT = 512  #: elements whose sums are float32: what that rounds is far below what any number of rows can tell


def square_sums(x: Array) -> tuple[Array, Array, float]:
    """Of a ``(rows, columns) float32`` matrix: means of x² by row, sums by column, Σ x⁴."""
    rows, columns = np.zeros(x.shape[0]), np.zeros(x.shape[1])
    return rows, columns, float(_square_sums(ready(x, np.float32), rows, columns))


def logs(v: Array, cut: int, least: int) -> tuple[Array, Array, tuple[float, float, int, float] | None]:
    """Of about log₂ v: means by row ``float32``; ``(2, columns)`` sums over the rows before ``cut`` and from it on; and
    of what is left without the means of rows and columns the two largest, where the first is, and Σ² of all others.

    The bits of a float32 as a number: an octave is 1.

    Args:
        least: rows from which there is such a rest; there is none where a row is all 0 or less.
    """
    rows, columns = np.zeros(v.shape[0], np.float32), np.zeros((2, v.shape[1]))
    high, at = np.full(2, -np.inf, np.float32), np.full(1, -1, np.int64)
    total = _logs(ready(v, np.int32), cut, least, rows, columns, high, at)
    if at[0] < 0:
        return rows, columns, None
    return rows, columns, (float(high[0]), float(high[1]), int(at[0]), float(total - np.float64(high[0]) ** 2))


# ---- loops -----------------------------------------------------------------------------------------------------------


@exact
def _square_sums(x, rows, columns):
    fourth = 0.0
    whole = len(rows) // 4 * 4
    for i in range(0, whole, 4):
        _add_squares(x[i], x[i + 1], x[i + 2], x[i + 3], columns)
    for i in range(whole, len(rows)):
        _add_square(x[i], columns)
    for i in range(len(rows)):
        total = 0.0
        for start in range(0, len(columns), SHORT):
            second, more = _powers(x[i, start : start + SHORT])
            total += np.float64(second)
            fourth += np.float64(more)
        rows[i] = total / len(columns)
    return fourth


@exact
def _add_squares(a, b, c, d, columns):
    """Of four rows at a time, so that sums are loaded and stored once for them."""
    for j in range(len(columns)):
        first = np.float32(np.float32(a[j] * a[j]) + np.float32(b[j] * b[j]))
        columns[j] += np.float64(np.float32(first + np.float32(np.float32(c[j] * c[j]) + np.float32(d[j] * d[j]))))


@exact
def _add_square(line, columns):
    for j in range(len(columns)):
        columns[j] += np.float64(line[j] * line[j])


@reordered
def _powers(line):
    """Of so few that the lanes of a wide instruction add up some tens of numbers each."""
    second, fourth = np.float32(0), np.float32(0)
    for j in range(len(line)):
        square = np.float32(line[j] * line[j])
        second += square
        fourth += square * square
    return second, fourth


@exact
def _logs(v, cut, least, rows, columns, high, at):
    _log_sums(v, cut, rows, columns)
    mean, alive = 0.0, len(rows) >= least
    for i in range(len(rows)):
        mean += rows[i]
        alive = alive and rows[i] > 0
    if not alive:
        return 0.0
    means = np.empty(columns.shape[1], np.float32)
    for j in range(len(means)):
        means[j] = (columns[0, j] + columns[1, j]) / len(rows) - mean / len(rows)
    return _log_residuals(v, rows, means, high, at)


@exact
def _log_sums(v, cut, rows, columns):
    for half in range(2):
        first, stop = (0, cut) if half == 0 else (cut, len(rows))
        whole = first + (stop - first) // 4 * 4
        for i in range(first, whole, 4):
            _add_logs(v[i], v[i + 1], v[i + 2], v[i + 3], columns[half])
        for i in range(whole, stop):
            _add_log(v[i], columns[half])
    for i in range(len(rows)):
        rows[i] = np.float32(_total(v[i]) / len(v[i]) / np.float64(1 << 23))


@exact
def _add_logs(a, b, c, d, columns):
    """Of four rows at a time, whose sum is within 2e-5 of an octave."""
    for j in range(len(columns)):
        first, second = np.float32(a[j]) + np.float32(b[j]), np.float32(c[j]) + np.float32(d[j])
        columns[j] += np.float64(np.float32(first + second) * np.float32(2.0**-23))


@exact
def _add_log(line, columns):
    for j in range(len(columns)):
        columns[j] += np.float64(np.float32(line[j]) * np.float32(2.0**-23))


@reordered
def _total(line):
    found = 0.0
    for j in range(len(line)):
        found += np.float64(np.float32(line[j]))
    return found


@exact
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


@exact
def _residual(bits, row, column):
    return np.float32(np.float32(np.float32(np.float32(bits) * np.float32(2.0**-23)) - row) - column)


@reordered
def _residuals(bits, row, columns, least):
    """How many lie above ``least``, and the sum of the squares of all."""
    above, squares = np.int32(0), np.float32(0)
    for j in range(len(columns)):
        rest = np.float32(np.float32(np.float32(bits[j]) * np.float32(2.0**-23)) - row) - columns[j]
        above = np.int32(above + np.int32(rest > least))
        squares += rest * rest
    return above, squares
