"""The changes of an export in addition to names and placements: types, values, omitted and added tensors.

::

    edits = Edits(ckpt, tensors, dtype)      casts
    fp8.dequantize(edits)                    fp8 weights × their scales; the scales are left out
    lora.merge(edits, adapter)               + s·B·A
    fp8.quantize(edits, "fp8")               codes and new scales
                    │
    edited = edits.done()                    a checkpoint of the result: tensors that stay, then added ones
    edited.applied(pieces)                   its pieces, whole, local or in boxes, with their changes and known bytes

They apply in this order; each sees the result of the ones before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array, Ints
from workbench.core.dtypes import DType
from workbench.core.words import plural
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.casts import SOURCES
from workbench.export.filemap import Pieces
from workbench.export.values.located import Quantised, Step, TensorChange, locate

#: Roles of tensors that define what codes mean: rounding one changes every number that is decoded with it.
_OF_CODES = {"scale", "zero_point", "amax_history", "exp_avg_scale", "exp_avg_sq_scale"}


@dataclass(frozen=True, eq=False)
class Added:
    """A tensor that the source lacks.

    Attributes:
        key: the name that it would have in the source.
        fqn, role: as in :mod:`workbench.names.roles`.
        dtype: element type.
        raw: its elements, of ``dtype.raw`` and its shape; may be a view of a file.
        beside: position of the source tensor after whose new name this one is named.
    """

    key: str
    fqn: str | None
    role: str
    dtype: DType
    raw: Array
    beside: int | None = None


class Edits:
    """Changes of the tensors that an export selected.

    Attributes:
        ckpt: the source.
        dtype: type that floats are cast to, if any.
        changes: by position of the tensor in its catalog.
        added: tensors that the source lacks.
        left_out: positions of tensors that are not written.
        notes: sentences for the report.
    """

    def __init__(self, ckpt: Checkpoint, tensors: Iterable[int], dtype: DType | None = None) -> None:
        """Create edits that cast tensors of 16-, 32- or 64-bit floats to ``dtype``; all others stay unchanged.

        The scales and maps of quantised tensors stay, too.
        """
        self.ckpt, self.dtype = ckpt, dtype
        self.changes: dict[int, TensorChange] = {}
        for tensor in tensors:
            source = ckpt.catalog.dtype_of(tensor)
            casts = source.name in SOURCES and ckpt.roles[tensor] not in _OF_CODES
            self.changes[tensor] = TensorChange(source, dtype if dtype and casts else source)
        self.added: list[Added] = []
        self.left_out: set[int] = set()
        self.notes: list[str] = []

    @property
    def tensors(self) -> list[int]:
        """Positions of the tensors that stay, ascending."""
        return sorted(set(self.changes) - self.left_out)

    def note_kept(self) -> None:
        """Note which quantised weights a cast leaves unchanged, and which tensors belong to them."""
        roles, fqns = self.ckpt.roles, self.ckpt.fqns
        kept = [tensor for tensor in self.tensors if roles[tensor] in _OF_CODES and not self.changes[tensor].steps]
        if kept and self.dtype is not None:
            scaled = {fqns[tensor] for tensor in kept} - {None}
            codes = [t for t in self.tensors if roles[t] == "param" and fqns[t] in scaled]
            codes = [t for t in codes if self.changes[t].wanted == self.changes[t].source]
            self.notes.append(
                f"{plural(len(codes), 'quantised weight', 'keep')} their codes, and {plural(len(kept), 'tensor')} that "
                "belong to them (scales, zero points, maps) are not cast, for example "
                f"{self.ckpt.catalog.keys[kept[0]]!r}"
            )

    def step(self, tensor: int, step: Step, wanted: DType | None = None) -> None:
        """Add a step to the values that a tensor represents, and optionally change its type."""
        change = self.changes[tensor]
        self.changes[tensor] = replace(change, steps=(*change.steps, step), wanted=wanted or change.wanted)

    def update(self, tensor: int, step: Step, wanted: DType | None = None) -> None:
        """Add a change of a tensor's values, and optionally change its type."""
        change = self.changes[tensor]
        self.changes[tensor] = replace(change, updates=(*change.updates, step), wanted=wanted or change.wanted)

    def quantise(self, tensor: int, wanted: DType, scales: Quantised) -> None:
        """Write a tensor as 8-bit codes."""
        self.changes[tensor] = replace(self.changes[tensor], wanted=wanted, quantised=scales)

    def done(self) -> Edited:
        """Return the result as a checkpoint with exactly the tensors that are written.

        Raises:
            UnsupportedFormatError: an added tensor has more axes than any of the source.
        """
        kept, ckpt = self.tensors, self.ckpt
        catalog, dims = ckpt.catalog.take(np.array(kept, np.int64)), ckpt.catalog.shape.shape[1]
        place = {tensor: at for at, tensor in enumerate(kept)}
        shape = np.ones((len(self.added), dims), np.int64)
        for at, one in enumerate(self.added):
            if one.raw.ndim > dims:
                raise UnsupportedFormatError(
                    f"tensor {one.key!r} has {one.raw.ndim} axes, but tensors of the source have {dims} at most"
                )
            shape[at, : one.raw.ndim] = one.raw.shape
        wide = replace(
            catalog,
            keys=[*catalog.keys, *(one.key for one in self.added)],
            dtype=np.append(catalog.dtype, [one.dtype.code for one in self.added]).astype(catalog.dtype.dtype),
            ndim=np.append(catalog.ndim, [one.raw.ndim for one in self.added]).astype(catalog.ndim.dtype),
            shape=np.concatenate([catalog.shape, shape]),
            row_ptr=np.append(catalog.row_ptr, np.full(len(self.added), catalog.row_ptr[-1])),
            fqns=[*(ckpt.fqns[t] for t in kept), *(one.fqn for one in self.added)],
            roles=[*(ckpt.roles[t] for t in kept), *(one.role for one in self.added)],
        )
        beside = {
            len(kept) + at: (place[one.beside], one.key.removeprefix(ckpt.catalog.keys[one.beside]))
            for at, one in enumerate(self.added)
            if one.beside is not None
        }
        return Edited(
            ckpt.derive(wide),
            np.array([*(self.changes[t].wanted.code for t in kept), *(one.dtype.code for one in self.added)], np.uint8),
            {
                place[t]: one
                for t, one in self.changes.items()
                if t in place and (one.steps or one.updates or one.quantised)
            },
            {len(kept) + at: one.raw for at, one in enumerate(self.added)},
            beside,
            tuple(self.notes),
        )


@dataclass(frozen=True, eq=False)
class Edited:
    """The tensors that an export writes, and their changes. Positions are those in :attr:`ckpt`'s catalog.

    Attributes:
        ckpt: all tensors that are written, in the shapes in which they are written and the types in which they are
            stored; added ones have no chunks.
        codes: ``(T,) uint8`` types in which they are written, codes of :mod:`workbench.core.dtypes`.
        changes: by position, if they are more than a cast.
        known: elements of the added ones, by position.
        beside: for an added tensor, the tensor that it belongs to and the end of its name.
        notes: sentences for the report.
    """

    ckpt: Checkpoint
    codes: Array
    changes: Mapping[int, TensorChange] = field(default_factory=dict)
    known: Mapping[int, Array] = field(default_factory=dict)
    beside: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def named(self, names: Sequence[str]) -> list[str]:
        """Return the new names of all tensors; added ones are named after the tensors that they belong to."""
        found = list(names)
        for tensor, (other, suffix) in self.beside.items():
            found[tensor] = names[other] + suffix
        return found

    def applied(self, pieces: Pieces) -> Pieces:
        """Return the same pieces with the changes of their tensors; pieces of added tensors get their bytes."""
        pieces = locate(pieces, self.changes)
        mine = np.isin(pieces.tensor, np.fromiter(self.known, np.int64, len(self.known)))
        if not mine.any():
            return pieces
        literal = dict(pieces.literal)
        for piece in np.unique(pieces.piece[mine]).tolist():
            rows = np.arange(*np.searchsorted(pieces.piece, [piece, piece + 1]))
            if not mine[rows].all():
                raise UsageError(f"piece {pieces.names[piece]!r} joins tensors of the source with added ones")
            literal[piece] = self._bytes(pieces, piece, rows)
        return replace(pieces, literal=literal)

    def _bytes(self, pieces: Pieces, piece: int, rows: Ints) -> Array:
        """Return the bytes of a piece made of boxes of added tensors."""
        ndim, found = int(pieces.ndim[piece]), [self.known[t] for t in pieces.tensor[rows].tolist()]
        if len(rows) == 1 and found[0].shape == pieces.shape_of(piece):
            out = np.ascontiguousarray(found[0])
        else:
            out = np.empty(pieces.shape_of(piece), found[0].dtype)
            for row, raw in zip(rows.tolist(), found, strict=True):
                low, to, size = (column[row, :ndim].tolist() for column in (pieces.offsets, pieces.dest, pieces.sizes))
                out[_key(to, size)] = raw[_key(low, size)]
        return out.reshape(-1).view(np.uint8)


def _key(begin: list[int], size: list[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))
