"""What an export changes beside names and places: types, values, tensors left out, tensors added.

::

    edits = Edits(ckpt, tensors, dtype)      casts
    fp8.dequantize(edits)                    fp8 weights × their scales; the scales are left out
    lora.merge(edits, adapter)               + s·B·A
    fp8.quantize(edits, "fp8")               codes and new scales
                    │
    edits.tensors, edits.codes               what is written, in which types
    edits.applied(pieces, names)             the pieces with their changes, and those that are added

The order is the one above: each looks at what the ones before it made of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import DType
from workbench.reshard.casts import SOURCES
from workbench.reshard.filemap import Literal, Pieces, join, literals
from workbench.reshard.located import Quantised, Step, TensorChange, locate

__all__ = ["Added", "Edits"]

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Added:
    """A tensor that the source lacks.

    Attributes:
        beside: the tensor of the source whose new name it has, followed by ``suffix``; or ``None``.
        suffix: the end of its name; all of it where ``beside`` is ``None``.
        dtype, shape, data: as :class:`workbench.reshard.filemap.Literal` has them.
    """

    beside: int | None
    suffix: str
    dtype: DType
    shape: tuple[int, ...]
    data: bytes | Array


class Edits:
    """Changes of the tensors that an export selected.

    Attributes:
        ckpt: the source.
        changes: by position of the tensor in its catalog.
        added: tensors that it lacks.
        left_out: positions of those that are not written.
        notes: sentences for the report.
    """

    def __init__(self, ckpt: Checkpoint, tensors: Iterable[int], dtype: DType | None = None) -> None:
        """Casts to ``dtype``, of the tensors that are floats of 16, 32 or 64 bits; all others stay as they are."""
        self.ckpt, self.dtype = ckpt, dtype
        self.changes: dict[int, TensorChange] = {}
        for tensor in tensors:
            source = ckpt.catalog.dtype_of(tensor)
            self.changes[tensor] = TensorChange(source, dtype if dtype and source.name in SOURCES else source)
        self.added: list[Added] = []
        self.left_out: set[int] = set()
        self.notes: list[str] = []

    @property
    def tensors(self) -> Ints:
        """Positions of the tensors that are written, ascending."""
        return np.array(sorted(set(self.changes) - self.left_out), np.int64)

    @property
    def codes(self) -> Array:
        """Element type of each of :attr:`tensors` as written, codes of :mod:`workbench.core.dtypes`."""
        return np.array([self.changes[tensor].wanted.code for tensor in self.tensors.tolist()], np.uint8)

    def step(self, tensor: int, step: Step, wanted: DType | None = None) -> None:
        """One more step for a tensor, and perhaps another type."""
        change = self.changes[tensor]
        self.changes[tensor] = replace(change, steps=(*change.steps, step), wanted=wanted or change.wanted)

    def quantise(self, tensor: int, wanted: DType, scales: Quantised) -> None:
        """Write a tensor as codes of 8 bits."""
        self.changes[tensor] = replace(self.changes[tensor], wanted=wanted, quantised=scales)

    def applied(self, pieces: Pieces, names: Mapping[int, str]) -> Pieces:
        """Pieces of :attr:`tensors` (whole, local or joined ones) with their changes, and what is added.

        Args:
            names: new names by position of the tensor.
        """
        changes = {t: one for t, one in self.changes.items() if one.steps or one.quantised}
        added = [
            Literal(
                one.suffix if one.beside is None else names[one.beside] + one.suffix, one.dtype, one.shape, one.data
            )
            for one in self.added
        ]
        pieces = locate(pieces, changes)
        return join([pieces, literals(added, pieces.shape.shape[1])]) if added else pieces
