"""Placements of every tensor of a checkpoint on the axes of a mesh, inferred from names.

::

    tp                          column, row, vocab … as in kinds.py            first
    ep                          experts: whole ones, or axis 0 of a stack
    pp                          layers, evenly or as given; the ends of the model at the ends
    fsdp dp_shard               axis 0 of the rest after tp                       last
    dp dp_replicate cp          copies

States of the optimizer, scales and adapters follow their parameter. Rules by pattern win over all this, axis by axis.
Tensors with unknown names are replicated on every rank of tp, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.core.catalog import Catalog
from workbench.core.mesh.layout import PlacementRule, TensorLayout
from workbench.core.mesh.mesh import Mesh
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.sharding.placing import Placing
from workbench.names.frameworks import Geometry

#: The effect of an axis of this name unless a rule overrides it.
AXES: dict[str, str] = {
    "tp": "tp",
    "ep": "ep",
    "pp": "pp",
    **dict.fromkeys(("fsdp", "dp_shard", "shard"), "shard"),
    **dict.fromkeys(("dp", "dp_replicate", "replicate", "cp"), "copies"),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """Placement rules.

    Attributes:
        explicit: by pattern; the first that matches a tensor wins.
        layers: number of layers on each pipeline stage; evenly by default, the first stages with one more.
        shard: additional names of axes that shard axis 0 of everything, as FSDP does.
    """

    explicit: tuple[PlacementRule, ...] = ()
    layers: tuple[int, ...] | None = None
    shard: tuple[str, ...] = ()

    @classmethod
    def fsdp(cls, *explicit: PlacementRule) -> Rules:
        """Return rules with which data parallel ranks hold shards: ``dp`` shards axis 0 of everything."""
        return cls(explicit, shard=("dp",))

    def place(
        self,
        catalog: Catalog,
        fqns: Sequence[str | None],
        roles: Sequence[str],
        mesh: Mesh,
        facts: Geometry | None = None,
    ) -> tuple[list[TensorLayout], list[str]]:
        """Return the layout of every tensor, and notes about layouts that are not optimal.

        Args:
            catalog: the tensors.
            fqns, roles: the parameter and role of each, from :class:`workbench.checkpoint.Checkpoint`.
            mesh: the ranks.
            facts: heads and groups, if known.

        Raises:
            UsageError: no rule covers an axis, or a rule does not fit the mesh or the model.
        """
        does = {axis: self.does(axis) for axis in mesh.axes}
        named = {axis for rule in self.explicit if isinstance(rule.placements, Mapping) for axis in rule.placements}
        complete = any(not isinstance(rule.placements, Mapping) for rule in self.explicit)
        for axis, done in does.items():
            if done is None and axis not in named and not complete:
                raise UsageError(
                    f"no rule for mesh axis {axis!r}; known axes are {', '.join(AXES)}; otherwise give a Rule for it"
                )
        if self.layers is not None and "pp" not in mesh.axes:
            raise UsageError(f"layers of {plural(len(self.layers), 'stage')} are given, but {mesh!r} has no axis 'pp'")
        shapes = [catalog.shape_of(tensor) for tensor in range(len(catalog))]
        placing = Placing(self.explicit, self.layers, mesh, does, facts or Geometry())
        return placing.run(catalog.keys, fqns, roles, shapes)

    def does(self, axis: str) -> str | None:
        """Return the effect of an axis by name: ``tp``, ``ep``, ``pp``, ``shard``, ``copies``; ``None`` if unknown."""
        return "shard" if axis in self.shard else AXES.get(axis)
