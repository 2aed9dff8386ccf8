"""Find tensors that another checkpoint stores elsewhere: split differently, or split alike but in other files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.analysis.diff_pairs import TensorPair
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.core.catalog import Catalog

_MIX = np.uint64(0x9E3779B97F4A7C15)


def moved(pairs: Sequence[TensorPair], b: Checkpoint, replicas: tuple[int, int] = (0, 0)) -> list[str]:
    """Return for each pair ``""``, ``cut`` (other boxes) or ``file`` (the same boxes in files with other names)."""
    names: dict[str, int] = {}
    kept: dict[tuple[int, int], tuple[Array, Array]] = {}

    def sums(ckpt: Checkpoint, replica: int) -> tuple[Array, Array]:
        key = id(ckpt.catalog), replica
        if key not in kept:
            kept[key] = _sums(ckpt.catalog, replica, names)
        return kept[key]

    found = []
    for pair in pairs:
        (cut_a, file_a), (cut_b, file_b) = sums(pair.a, replicas[0]), sums(b, replicas[1])
        if cut_a[pair.tensor_a] != cut_b[pair.tensor_b]:
            found.append("cut")
        else:
            found.append("file" if file_a[pair.tensor_a] != file_b[pair.tensor_b] else "")
    return found


def _sums(catalog: Catalog, replica: int, names: dict[str, int]) -> tuple[Array, Array]:
    """Return ``(T,)`` order-independent sums of 64-bit mixes over chunks: of the boxes, and of boxes and files."""
    files = np.array([names.setdefault(name, len(names)) for name in catalog.files] or [0], np.uint64)
    mixed = np.full(catalog.chunks, _MIX, np.uint64)
    for columns, empty in ((catalog.offsets, 0), (catalog.sizes, 1)):
        for axis in range(columns.shape[1]):
            column = columns[:, axis]
            # padding axes must not contribute: their number differs between catalogs
            step = (column - empty).astype(np.uint64) * np.uint64(2 * axis + 1 + 64 * empty)
            mixed += _mix(step * _MIX + np.uint64(axis + 64 * empty)) * (column != empty)
    boxes = _mix(mixed)
    with_file = _mix(boxes + files[catalog.file] if len(boxes) else boxes)
    keep = catalog.replica == replica
    return tuple(_by_tensor(catalog, np.where(keep, part, 0)) for part in (boxes, with_file))  # type: ignore[return-value]


def _mix(value: Array) -> Array:
    value = (value ^ (value >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(value ^ (value >> np.uint64(32)))


def _by_tensor(catalog: Catalog, values: Array) -> Array:
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values.astype(np.uint64), dtype=np.uint64)])
    return np.asarray(running[catalog.row_ptr[1:]] - running[catalog.row_ptr[:-1]])
