"""The sums of rows and columns compiled by numba (the ``fast`` extra): an order of rows, one loud cell.

::

    x  (rows, columns) float32 ──┬─ means of x² by row, sums by column, Σ x⁴
                                 └─ the bits as a number: log₂ but for a curve; an octave is 1

Loops and kernels stay in one file, see :mod:`workbench.doctor.passes.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.doctor.passes.compiled import clean, exact, ready, reordered

__all__ = ["log_residuals", "log_sums", "square_sums"]

Array = np.ndarray[Any, Any]


def square_sums(x: Array) -> tuple[Array, Array, float]:
    """Of a ``(rows, columns) float32`` matrix: means of x² by row, sums by column, Σ x⁴."""
    rows, columns = np.zeros(x.shape[0]), np.zeros(x.shape[1])
    return rows, columns, float(_square_sums(ready(x, np.float32), rows, columns))


def log_sums(v: Array, cut: int) -> tuple[Array, Array]:
    """Means by row ``float32``, and ``(2, columns)`` sums over the rows before ``cut`` and from it on, of about log₂ v.

    The bits of a float32 as a number: an octave is 1.
    """
    rows, columns = np.zeros(v.shape[0], np.float32), np.zeros((2, v.shape[1]))
    _log_sums(ready(v, np.int32), cut, rows, columns)
    return rows, columns


def log_residuals(v: Array, rows: Array, columns: Array) -> tuple[float, float, int, float]:
    """About log₂ v less ``rows`` and ``columns``: the two largest, where the first is, and Σ² of all but that one."""
    high, at = np.full(2, -np.inf, np.float32), np.full(1, -1, np.int64)
    total = _log_residuals(ready(v, np.int32), rows, columns, high, at)
    return float(high[0]), float(high[1]), int(at[0]), float(total - np.float64(high[0]) ** 2)


# ---- loops -----------------------------------------------------------------------------------------------------------


@exact
def _square_sums(x, rows, columns):
    fourth = 0.0
    for i in range(len(rows)):
        line = x[i]
        _add_squares(line, columns)
        second, more = _powers(line)
        rows[i] = second / len(columns)
        fourth += more
    return fourth


@exact
def _add_squares(line, columns):
    for j in range(len(columns)):
        columns[j] += np.float64(line[j] * line[j])


@reordered
def _powers(line):
    second, fourth = 0.0, 0.0
    for j in range(len(line)):
        square = np.float64(line[j] * line[j])
        second += square
        fourth += square * square
    return second, fourth


@exact
def _log_sums(v, cut, rows, columns):
    for i in range(len(rows)):
        line = v[i]
        _add_logs(line, columns[0] if i < cut else columns[1])
        rows[i] = np.float32(_total(line) / len(line) / np.float64(1 << 23))


@exact
def _add_logs(line, columns):
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
        line = v[i]
        top, squares = _residuals(line, rows[i], columns)
        total += squares
        if top > high[1]:
            for j in range(len(columns)):
                rest = _residual(line[j], rows[i], columns[j])
                if rest > high[0]:
                    high[1], high[0], at[0] = high[0], rest, i * len(columns) + j
                elif rest > high[1]:
                    high[1] = rest
    return total


@exact
def _residual(bits, row, column):
    return np.float32(np.float32(np.float32(bits) * np.float32(2.0**-23)) - row) - column


@clean
def _residuals(line, row, columns):
    top, squares = np.float32(-np.inf), 0.0
    for j in range(len(columns)):
        rest = np.float32(np.float32(np.float32(line[j]) * np.float32(2.0**-23)) - row) - columns[j]
        top = rest if rest > top else top
        squares += np.float64(rest) * np.float64(rest)
    return top, squares
