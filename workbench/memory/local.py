"""The parameters of a checkpoint, and the piece of each that a (pp, ep, tp) coordinate has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from workbench.analysis.layout import Layout
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Bools, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Only
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.sharding import kinds
from workbench.export.sharding.rules import Rules
from workbench.export.sharding.target import Target
from workbench.memory.precision import BLOCK, Precision, itemsize
from workbench.names.frameworks import Geometry, geometry
from workbench.names.weights import parse

Floats = np.ndarray[Any, np.dtype[np.float64]]
PREFERRED = ("param", "master", "exp_avg")  #: roles whose shape is the parameter's, if weights are not stored
NO_FP8 = ("same", "vocab", "unknown")  #: kinds that stay in bf16 in FP8 training


@dataclass(frozen=True, eq=False)
class LocalPieces:
    """Local tensors of one coordinate.

    Attributes:
        shape: ``(K, D)`` padded with 1; rows are axis 0, which is sharded over data parallel ranks.
        expert: ``(K,)`` whether it is sharded over ep, so fewer ranks hold copies of it.
        width: ``(K, 4)`` bytes per element: weights, grads, master, moments together.
        scaled: ``(K,)`` whether FP8 scales come with the weights.
        rowless: ``(K,)`` whether it has no axis and is never sharded.
    """

    shape: Ints
    expert: Bools
    width: Ints
    scaled: Bools
    rowless: Bools


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """The parameters, one tensor each.

    Attributes:
        catalog: the tensors.
        fqns, roles: the parameter and role of each.
        facts: heads and groups, if known.
        trained: ``(T,)`` whether a parameter has gradients and optimizer state.
        notes: assumptions.
    """

    catalog: Catalog
    fqns: list[str | None]
    roles: list[str]
    facts: Geometry | None
    trained: Bools
    notes: list[str]

    @classmethod
    def of(cls, source: Checkpoint | Layout) -> MemoryModel:
        """Create the model from the parameters of a checkpoint.

        Raises:
            UsageError: it holds none.
        """
        fqns, roles, catalog = list(source.fqns), list(source.roles), source.catalog
        notes: list[str] = []
        best: dict[str, int] = {}
        for role in reversed(PREFERRED):
            for tensor, (fqn, mine) in enumerate(zip(fqns, roles, strict=True)):
                if mine == role and fqn is not None:
                    best[fqn] = tensor
        if not best:
            raise UsageError(f"{source.path!r} contains no named parameters, so no memory budget can be computed")
        if borrowed := sum(roles[tensor] != "param" for tensor in best.values()):
            notes.append(
                f"{plural(borrowed, 'parameter', 'have')} no stored weights; their size is taken from the "
                "optimizer state's shape"
            )
        buffers = [tensor for tensor, role in enumerate(roles) if role == "buffer"]
        chosen = np.array(sorted([*best.values(), *buffers]), np.int64)
        moved = {fqn for fqn, role in zip(fqns, roles, strict=True) if role in ("exp_avg", "momentum")}
        names = [fqns[tensor] for tensor in chosen.tolist()]
        kept = [roles[tensor] for tensor in chosen.tolist()]
        trained = np.array(
            [role != "buffer" and (not moved or fqn in moved) for fqn, role in zip(names, kept, strict=True)], bool
        )
        if frozen := int((~trained).sum()) - len(buffers):
            notes.append(
                f"{plural(frozen, 'parameter', 'have')} no moments although others do; they are counted as frozen"
            )
        facts = geometry(source.objects) if isinstance(source, Checkpoint) else None
        return cls(catalog.take(chosen), names, kept, facts, trained, notes)

    @cached_property
    def layers(self) -> int:
        """Numbered layers of the largest stack."""
        found: dict[str, int] = {}
        for fqn in self.fqns:
            if fqn is not None and (weight := parse(fqn)).layer is not None:
                found[weight.stack] = max(found.get(weight.stack, 0), weight.layer + 1)
        return max(found.values(), default=0)

    @cached_property
    def experts(self) -> int:
        """Experts of a layer, 0 for a dense model."""
        single = [parse(fqn).expert for fqn in self.fqns if fqn is not None]
        count = max((number + 1 for number in single if number is not None), default=0)
        for tensor, fqn in enumerate(self.fqns):
            kind = kinds.kind_of(fqn) if fqn is not None else None
            if kind is not None and kind[0].startswith(("experts", "stack")) and self.catalog.ndim[tensor] >= 2:
                count = max(count, int(self.catalog.shape[tensor, 0]))
        return count

    def pieces(self, mesh: Mesh, rules: Rules, precision: Precision) -> tuple[list[LocalPieces], list[str]]:
        """Return the local tensors of each rank of a mesh of pp, ep and tp, and what the rules could not decide.

        Raises:
            UsageError: the rules do not fit the model (no layers for pp, say).
        """
        layouts, notes = rules.place(self.catalog, self.fqns, self.roles, mesh, self.facts)
        target = Target(self.catalog, mesh, layouts, notes)
        found = target.locals()
        spread = np.array([self._spread(layout.steps, mesh) for layout in layouts], bool)
        width, scaled = self._widths(precision)
        rowless = self.catalog.ndim == 0
        order = np.argsort(found.rank, kind="stable")
        ends = np.searchsorted(found.rank[order], np.arange(mesh.world_size + 1))
        pieces = []
        for rank in range(mesh.world_size):
            rows = order[ends[rank] : ends[rank + 1]]
            mine = found.tensor[rows]
            pieces.append(LocalPieces(found.shape[rows], spread[mine], width[mine], scaled[mine], rowless[mine]))
        return pieces, notes

    def _spread(self, steps: Any, mesh: Mesh) -> bool:
        return mesh.size("ep") > 1 and any(axis == "ep" and not _everywhere(one, mesh) for axis, one in steps)

    def _widths(self, precision: Precision) -> tuple[Ints, Bools]:
        stored = np.array([max(ALL[code].bits // 8, 1) for code in self.catalog.dtype.tolist()], np.int64)
        linear = np.array([self._is_linear(tensor) for tensor in range(len(self.catalog))], bool)
        scaled = linear & (precision.weights == "fp8")
        if precision.weights == "stored":
            weights = stored
        elif precision.weights == "fp8":
            weights = np.where(linear, 1, 2)
        else:
            weights = np.full(len(stored), itemsize(precision.weights), np.int64)
        wide = np.maximum(weights, 2)
        grads = wide if precision.grads == "weights" else np.full(len(stored), itemsize(precision.grads))
        auto = np.where(weights < 4, 4, 0)
        master = auto if precision.master == "auto" else np.full(len(stored), itemsize(precision.master))
        moments = np.full(len(stored), itemsize(precision.moments) * precision.count)
        found = np.stack([weights, *(np.where(self.trained, one, 0) for one in (grads, master, moments))], axis=1)
        return found.astype(np.int64), scaled

    def _is_linear(self, tensor: int) -> bool:
        fqn = self.fqns[tensor]
        kind = kinds.kind_of(fqn) if fqn is not None else None
        return kind is not None and not kind[1] and kind[0] not in NO_FP8 and self.catalog.ndim[tensor] >= 2


def scale_bytes(shape: Ints, rows: Ints) -> Ints:
    """Return the bytes of FP8 scales of local weights ``(…, D)`` with ``rows`` rows of axis 0."""
    matrix = (shape[:, 2:] > 1).any(axis=1) if shape.shape[1] > 2 else np.zeros(len(shape), bool)
    second = shape[:, 1] if shape.shape[1] > 1 else np.ones(len(shape), np.int64)
    flat = -(-rows // BLOCK) * -(-second // BLOCK)
    stacked = rows * -(-second // BLOCK)
    if shape.shape[1] > 2:
        stacked = stacked * -(-shape[:, 2] // BLOCK)
    return 4 * np.where(matrix, stacked, flat)


def _everywhere(placement: Any, mesh: Mesh) -> bool:
    return isinstance(placement, Only) and len(placement.coordinates) == mesh.size("ep")
