"""A sharding target: every tensor of a checkpoint, sharded for every rank of a mesh, and one plan that reads them.

::

    checkpoint ──rules──▶ layouts ──cut──▶ local tensors = boxes ──plan_reads──▶ copies, in the files' order
                          (T)              (T × ranks)

Nothing is read: a plan can be shown before it runs (:meth:`Target.explain`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import nbytes_of_codes
from workbench.core.mesh.cut import Locals, concatenate, cut
from workbench.core.mesh.layout import Steps, TensorLayout
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Replicate
from workbench.core.plan import ReadPlan, plan_reads
from workbench.core.words import plural
from workbench.errors import TensorNotFoundError, UsageError
from workbench.export.sharding.rules import Rules
from workbench.names.frameworks import geometry
from workbench.names.roles import resolve

if TYPE_CHECKING:
    import pandas as pd


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
        catalog: the tensors; only keys, shapes and dtypes matter.
        mesh: the ranks.
        layouts: one for each tensor.
        notes: sentences about tensors that the rules do not know or could not place as intended.
    """

    catalog: Catalog
    mesh: Mesh
    layouts: list[TensorLayout]
    notes: list[str]

    @classmethod
    def of(cls, source: Checkpoint | Catalog, mesh: Mesh, rules: Rules | None = None) -> Target:
        """Place every tensor of a checkpoint; narrow it with ``select`` first for some of them.

        Raises:
            UsageError: the rules do not fit the mesh or the tensors.
        """
        if isinstance(source, Checkpoint):
            catalog, names, facts = source.catalog, (source.fqns, source.roles), geometry(source.objects)
        else:
            catalog, facts = source, None
            known = catalog.fqns is not None and catalog.roles is not None
            names = (catalog.fqns or [], catalog.roles or []) if known else resolve(catalog.keys)
        layouts, notes = (rules or Rules()).place(catalog, *names, mesh, facts)
        return cls(catalog, mesh, layouts, notes)

    def locals(self, ranks: Sequence[int] | None = None) -> Locals:
        """Return the local tensors of some ranks (all by default), ordered by tensor and rank.

        Raises:
            UsageError: a placement does not fit its tensor; the message names it.
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
        """Plan every copy from a checkpoint's files to the local tensors of some ranks (all by default).

        Args:
            source: the checkpoint to read; by default the one the target was made from. Its tensors must have the same
                keys and shapes; its chunks may differ.
            ranks: which ranks.

        Raises:
            HoleError: a requested element is not stored.
            TensorNotFoundError, UsageError: ``source`` lacks a tensor, or its shape differs.
        """
        catalog = source.catalog if isinstance(source, Checkpoint) else self.catalog if source is None else source
        found = self.locals(ranks)
        tensors = found.tensor[found.owner]
        if catalog is not self.catalog:
            tensors, found = self._positions(catalog)[tensors], _resized(found, catalog.shape.shape[1])
        return Planned(found, plan_reads(catalog, tensors, found.offsets, found.sizes))

    def explain(self, source: Checkpoint | Catalog | None = None) -> Explanation:
        """Return what the plan of all ranks would read and store, by rank, tensor and file. Raises as :meth:`plan`."""
        catalog = source.catalog if isinstance(source, Checkpoint) else self.catalog if source is None else source
        return _explained(self, catalog, self.plan(catalog))

    def nbytes(self, locals: Locals) -> Ints:
        """Return the bytes of local tensors, ``(L,)``."""
        return nbytes_of_codes(self.catalog.dtype[locals.tensor], locals.numel)

    @cached_property
    def _groups(self) -> list[tuple[Steps, int, Ints]]:
        """Tensors that have the same steps and number of axes."""
        by_layout: dict[tuple[int, int], list[int]] = defaultdict(list)  # layouts are shared: few are hashed
        for tensor, (layout, ndim) in enumerate(zip(self.layouts, self.catalog.ndim.tolist(), strict=True)):
            by_layout[id(layout), ndim].append(tensor)
        groups: dict[tuple[Steps, int], list[int]] = defaultdict(list)
        for (_, ndim), tensors in by_layout.items():
            groups[self.layouts[tensors[0]].steps, ndim] += tensors
        return [(steps, ndim, np.sort(np.array(tensors))) for (steps, ndim), tensors in groups.items()]

    def _positions(self, catalog: Catalog) -> Ints:
        """Return the positions of this target's tensors in another catalog."""
        found = np.empty(len(self.catalog), np.int64)
        for tensor, key in enumerate(self.catalog.keys):
            position = catalog.index.get(key)
            if position is None:
                raise TensorNotFoundError(
                    f"tensor {key!r} of the target is not in the checkpoint; select fewer tensors"
                )
            if catalog.shape_of(position) != self.catalog.shape_of(tensor):
                raise UsageError(
                    f"tensor {key!r} has shape {catalog.shape_of(position)} in the checkpoint and "
                    f"{self.catalog.shape_of(tensor)} in the target"
                )
            found[tensor] = position
        return found


def _resized(found: Locals, dims: int) -> Locals:
    """Return the columns of boxes for catalogs of ``dims`` axes; only padding is cut off or added."""
    columns = {"shape": 1, "offsets": 0, "sizes": 1, "strides": 0}
    more = dims - found.offsets.shape[1]
    if more <= 0:
        return replace(found, **{name: getattr(found, name)[:, :dims] for name in columns})
    pads = ((0, 0), (0, more))
    return replace(found, **{n: np.pad(getattr(found, n), pads, constant_values=v) for n, v in columns.items()})


@dataclass(frozen=True, eq=False)
class Explanation:
    """A plan of all ranks in figures.

    Attributes:
        ranks: one row per rank: rank, its coordinate by mesh axis, tensors, nbytes, copies.
        tensors: one row per tensor: key, shape, dtype, placements, why, ranks (that hold it), times (each element is
            held), largest (shape of the largest local tensor), nbytes (on all ranks together).
        files: one row per file that is read: file, nbytes, copies.
        copies: number of copies.
        nbytes: bytes of all local tensors.
        unique_nbytes: those bytes that no lower rank also holds.
        notes: as in :class:`Target`.
    """

    ranks: pd.DataFrame
    tensors: pd.DataFrame
    files: pd.DataFrame
    copies: int
    nbytes: int
    unique_nbytes: int
    notes: list[str]

    def __str__(self) -> str:
        largest, smallest = (int(f(self.ranks["nbytes"])) if len(self.ranks) else 0 for f in (max, min))
        lines = [
            f"{plural(len(self.tensors), 'tensor')} on {plural(len(self.ranks), 'rank')}: "
            f"{plural(self.nbytes, 'byte')} "
            f"({self.unique_nbytes:,} unique, {self.nbytes - self.unique_nbytes:,} in copies)",
            f"a rank holds {smallest:,} to {plural(largest, 'byte')}",
            f"{plural(self.copies, 'copy')} from {plural(len(self.files), 'file')}",
        ]
        return "\n".join([*lines, *self.notes])


def _explained(target: Target, catalog: Catalog, planned: Planned) -> Explanation:
    """Return the tables of a plan of all ranks; ``catalog`` is the one that the reads were planned for."""
    import pandas as pd

    found, reads = planned
    mesh, world = target.mesh, target.mesh.world_size
    nbytes = target.nbytes(found)
    itemsize = target.nbytes(found)[found.owner] / np.maximum(found.numel[found.owner], 1)
    moved = (box.volume(reads.sizes) * itemsize[reads.request]).round().astype(np.int64)
    coordinates = dict(zip(mesh.axes, mesh.coordinates().T, strict=True))
    copies = np.bincount(found.rank[found.owner[reads.request]], minlength=world)
    held = np.bincount(found.rank, minlength=world)
    ranks = pd.DataFrame(
        {
            "rank": np.arange(world),
            **coordinates,
            "tensors": held,
            "nbytes": box.sums(found.rank, nbytes, world),
            "copies": copies,
        }
    )
    count = len(target.catalog)
    whole = np.maximum(target.catalog.tensor_nbytes, 1)
    total = box.sums(found.tensor, nbytes, count)
    order = np.lexsort((-nbytes, found.tensor))
    first = order[
        np.searchsorted(found.tensor[order], np.arange(count))[np.bincount(found.tensor, minlength=count) > 0]
    ]
    largest = {int(found.tensor[k]): tuple(found.shape[k, : found.ndim[k]].tolist()) for k in first.tolist()}
    tensors = pd.DataFrame(
        {
            "key": target.catalog.keys,
            "shape": [target.catalog.shape_of(t) for t in range(count)],
            "dtype": [target.catalog.dtype_of(t).name for t in range(count)],
            "placements": [str(layout) for layout in target.layouts],
            "why": [layout.why for layout in target.layouts],
            "ranks": np.bincount(found.tensor, minlength=count),
            "times": total // whole,
            "largest": [largest.get(t, ()) for t in range(count)],
            "nbytes": total,
        }
    )
    file = catalog.file[reads.row]
    read = np.flatnonzero(np.bincount(file, minlength=len(catalog.files)))
    files = pd.DataFrame(
        {
            "file": [catalog.files[f] for f in read.tolist()],
            "nbytes": box.sums(file, moved, len(catalog.files))[read],
            "copies": np.bincount(file, minlength=len(catalog.files))[read],
        }
    )
    unique = int(nbytes[found.copy == 0].sum())
    return Explanation(ranks, tensors, files, len(reads), int(nbytes.sum()), unique, target.notes)
