"""A target: every tensor of a checkpoint, cut for every rank of a mesh, and the one plan that reads it all.

::

    checkpoint ──rules──▶ layouts ──cut──▶ local tensors = boxes ──plan_reads──▶ copies, in the files' order
                          (T)              (T × ranks)

Nothing is read: what a plan would do can be shown first (:meth:`Target.explain`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench import naming
from workbench.checkpoint import Checkpoint
from workbench.conventions import geometry
from workbench.core import box
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL
from workbench.core.plan import ReadPlan, plan_reads
from workbench.errors import TensorNotFoundError, UsageError
from workbench.reshard.layouts.cut import Locals, concatenate, cut
from workbench.reshard.layouts.layout import Layout, Steps
from workbench.reshard.mesh import Mesh
from workbench.reshard.placement import Replicate
from workbench.reshard.rules import Rules

if TYPE_CHECKING:
    from workbench.reshard.layouts.explain import Explanation

__all__ = ["Planned", "Target"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Planned(NamedTuple):
    """Copies for some ranks.

    ``reads.request`` is a box of ``locals``; of the local tensor ``locals.owner[request]``, element ``x`` of a copy is
    element ``locals.at[request] + ((reads.dest + x) · locals.strides[request]).sum()`` in row-major order.
    """

    locals: Locals
    reads: ReadPlan


@dataclass(frozen=True, eq=False)
class Target:
    """The tensors of a catalog, laid out on a mesh.

    Attributes:
        catalog: the tensors; keys, shapes and dtypes are what counts.
        mesh: the ranks.
        layouts: one for each tensor.
        notes: sentences on what the rules did not know or could not do.
    """

    catalog: Catalog
    mesh: Mesh
    layouts: list[Layout]
    notes: list[str]

    @classmethod
    def of(cls, source: Checkpoint | Catalog, mesh: Mesh, rules: Rules | None = None) -> Target:
        """Lay out every tensor of a checkpoint; narrow it with ``select`` first for some of them.

        Raises:
            UsageError: rules that do not fit the mesh or the tensors.
        """
        if isinstance(source, Checkpoint):
            catalog, names, facts = source.catalog, (source.fqns, source.roles), geometry(source.objects)
        else:
            catalog, facts = source, None
            known = catalog.fqns is not None and catalog.roles is not None
            names = (catalog.fqns or [], catalog.roles or []) if known else naming.resolve(catalog.keys)
        layouts, notes = (rules or Rules()).place(catalog, *names, mesh, facts)
        return cls(catalog, mesh, layouts, notes)

    def locals(self, ranks: Sequence[int] | None = None) -> Locals:
        """The local tensors of some ranks (of all by default), ordered by tensor and rank.

        Raises:
            UsageError: a placement that does not fit its tensor; the message names it.
        """
        numbers = np.arange(self.mesh.world_size) if ranks is None else box.distinct(np.array(ranks, np.int64))
        coordinates = self.mesh.coordinates(numbers)
        parts = []
        for steps, ndim, tensors in self._groups:
            applied = [*((axis, Replicate()) for axis in self.mesh.axes if axis not in dict(steps)), *steps]
            columns = [self.mesh.axes.index(axis) for axis, _ in applied]
            placed = [(one, self.mesh.size(axis)) for axis, one in applied]
            try:
                found = cut(self.catalog.shape[tensors], ndim, placed, coordinates[:, columns])
            except UsageError as error:
                raise UsageError(f"tensor {self.catalog.keys[tensors[0]]!r}: {error}") from None
            parts.append(replace(found, tensor=tensors[found.tensor], rank=numbers[found.rank]))
        return concatenate(parts) if parts else cut(self.catalog.shape, 0, [], coordinates[:, :0])

    def plan(self, source: Checkpoint | Catalog | None = None, ranks: Sequence[int] | None = None) -> Planned:
        """Every copy from a checkpoint's files to the local tensors of some ranks (of all by default).

        Args:
            source: the checkpoint to read; by default the one the target was made of. Its tensors have the same keys
                and shapes, its chunks may be any.
            ranks: which ranks.

        Raises:
            HoleError: some wanted element is stored nowhere.
            TensorNotFoundError, UsageError: ``source`` lacks a tensor, or has it in another shape.
        """
        catalog = source.catalog if isinstance(source, Checkpoint) else self.catalog if source is None else source
        found = self.locals(ranks)
        tensors = found.tensor[found.owner]
        if catalog is not self.catalog:
            tensors, found = self._positions(catalog)[tensors], _resized(found, catalog.shape.shape[1])
        return Planned(found, plan_reads(catalog, tensors, found.offsets, found.sizes))

    def explain(self, source: Checkpoint | Catalog | None = None) -> Explanation:
        """What the plan of all ranks would read and hold: by rank, tensor and file. Raises as :meth:`plan`."""
        from workbench.reshard.layouts.explain import explain

        catalog = source.catalog if isinstance(source, Checkpoint) else self.catalog if source is None else source
        return explain(self, catalog, self.plan(catalog))

    def nbytes(self, locals: Locals) -> Ints:
        """``(L,)`` bytes of local tensors."""
        return (locals.numel * _BITS[self.catalog.dtype[locals.tensor]] + 7) // 8

    @cached_property
    def _groups(self) -> list[tuple[Steps, int, Ints]]:
        """Tensors that have the same steps and number of axes."""
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)  # layouts are shared: few are hashed
        for tensor, (layout, ndim) in enumerate(zip(self.layouts, self.catalog.ndim.tolist(), strict=True)):
            alike[id(layout), ndim].append(tensor)
        groups: dict[tuple[Steps, int], list[int]] = defaultdict(list)
        for (_, ndim), tensors in alike.items():
            groups[self.layouts[tensors[0]].steps, ndim] += tensors
        return [(steps, ndim, np.sort(np.array(tensors))) for (steps, ndim), tensors in groups.items()]

    def _positions(self, catalog: Catalog) -> Ints:
        """Where this target's tensors are in another catalog."""
        found = np.empty(len(self.catalog), np.int64)
        for tensor, key in enumerate(self.catalog.keys):
            position = catalog.index.get(key)
            if position is None:
                raise TensorNotFoundError(f"tensor {key!r} of the target is not in the checkpoint; narrow the target")
            if catalog.shape_of(position) != self.catalog.shape_of(tensor):
                raise UsageError(
                    f"tensor {key!r} is {catalog.shape_of(position)} in the checkpoint and "
                    f"{self.catalog.shape_of(tensor)} in the target"
                )
            found[tensor] = position
        return found


_BITS = np.array([dtype.bits for dtype in ALL], np.int64)


def _resized(found: Locals, dims: int) -> Locals:
    """The columns of boxes for catalogs of ``dims`` axes; what is cut off or added is padding."""
    columns = {"shape": 1, "offsets": 0, "sizes": 1, "strides": 0}
    more = dims - found.offsets.shape[1]
    if more <= 0:
        return replace(found, **{name: getattr(found, name)[:, :dims] for name in columns})
    pads = ((0, 0), (0, more))
    return replace(found, **{n: np.pad(getattr(found, n), pads, constant_values=v) for n, v in columns.items()})
