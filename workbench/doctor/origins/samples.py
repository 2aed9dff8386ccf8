"""Samples of a tensor: complete rows spread over it, the same for every tensor of its shape."""

from __future__ import annotations

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.tensor import LazyTensor

SAMPLED = 1 << 18  #: elements of a tensor that are sampled


def spread(shape: tuple[int, ...], most: int = SAMPLED) -> Array | None:
    """Return rows of the first axis, evenly spread, with about ``most`` elements; ``None`` stands for all rows."""
    numel = int(np.prod(shape, dtype=np.int64))
    if len(shape) < 2 or numel <= most:
        return None
    many = max(most * shape[0] // numel, 1)
    return np.unique(np.linspace(0, shape[0] - 1, many).astype(np.int64))


def sampled(tensor: LazyTensor, rows: Array | None, most: int = SAMPLED) -> Array:
    """Return ``(elements,) float64``: those rows or the full tensor; of a vector, its first ``most`` elements."""
    if rows is not None:
        tensor = tensor.lazy[rows.tolist()]
    elif tensor.numel() > most:  # a flat line
        tensor = tensor.lazy[:most]
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.asarray(Decoder(tensor.element).numbers(tensor.numpy().reshape(-1)), np.float64)
