"""Sharded objects of a ``torch_dist`` checkpoint: non-tensor state in cells of a grid.

::

    rng_state/shard_0.1_1.2                                        cell (0, 1) of a 1 × 2 grid (PP, TP)
    decoder.layers.mlp.linear_fc1._extra_state/shard_3_24          cell 3 of a grid over the model's layers

A grid is one value with the name before ``/shard_``: a single cell unchanged, or a dict of cells by position
(``"0.1"``). A grid over layers is one value per layer (``decoder.layers.3.….._extra_state``). Every rank stores its own
cell, so a lost rank leaves a hole. Read from megatron-core 0.16.1 and 0.20.0dev (``core/dist_checkpointing``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from workbench.formats.megatron import layout

MAX_GRID = 1 << 20  #: cells of a grid that are looked up one by one
_GRID = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)")
Cell = tuple[int, ...]


class _Grid(NamedTuple):
    """Cells by position; ``shape`` is empty for a single object."""

    shape: Cell
    cells: dict[Cell, str]


def object_makers(stored: Mapping[str, Any], keys: Sequence[str], *, leave_out: str) -> dict[str, Callable[[], Any]]:
    """Return a decoder of each value by name; ``stored`` has values by key. Skip the grid ``leave_out``."""
    makers: dict[str, Callable[[], Any]] = {}
    for name, grid in _grids(keys).items():
        if grid.shape and name == leave_out:
            continue
        mine = _grid_makers(stored, name, grid) if grid.shape else {name: partial(stored.__getitem__, name)}
        for one, maker in mine.items():
            makers.setdefault(one, maker)
    return makers


def missing_cells(keys: Sequence[str]) -> list[str]:
    """Return a note on each grid with holes."""
    notes = []
    for name, (shape, cells) in _grids(keys).items():
        lost = prod(shape) - len(cells) if shape else 0
        if lost <= 0:
            continue
        examples = ""
        if prod(shape) <= MAX_GRID:
            absent = [cell for cell in np.ndindex(*shape) if cell not in cells][:4]
            examples = f", first {', '.join(map(str, absent))}"
        grid = " × ".join(map(str, shape))
        notes.append(f"object {name!r}: {lost:,} of the {grid} cells of its grid are missing{examples}")
    return notes


def unwrapped(value: Any) -> Any:
    """Unwrap an object, which Megatron saves as a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _grids(keys: Sequence[str]) -> dict[str, _Grid]:
    """Group objects by the name before ``/shard_``."""
    found: dict[str, _Grid] = {}
    for key in keys:
        name, _, cell = key.rpartition("/")
        match = _GRID.fullmatch(cell) if name else None
        at, shape = ((), ()) if match is None else (_numbers(match[1]), _numbers(match[2]))
        if match is None or len(at) != len(shape) or (name in found and found[name].shape != shape):
            found[key] = _Grid((), {(): key})
        else:
            found.setdefault(name, _Grid(shape, {})).cells[at] = key
    return found


def _numbers(text: str) -> Cell:
    return tuple(int(number[:18]) for number in text.split("."))


def _grid_makers(stored: Mapping[str, Any], name: str, grid: _Grid) -> dict[str, Callable[[], Any]]:
    if not layout.is_stack(name):
        return {name: partial(_cells, stored, grid)}
    by_layer: dict[int, dict[Cell, str]] = {}
    for at, key in grid.cells.items():
        by_layer.setdefault(at[0], {})[at[1:]] = key
    return {
        layout.layer_key(name, layer): partial(_cells, stored, _Grid(grid.shape[1:], part))
        for layer, part in by_layer.items()
    }


def _cells(stored: Mapping[str, Any], grid: _Grid) -> Any:
    values = {".".join(map(str, at)): unwrapped(stored[key]) for at, key in sorted(grid.cells.items())}
    return next(iter(values.values())) if prod(grid.shape) == 1 else values
