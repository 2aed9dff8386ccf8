"""How one tensor is placed on a mesh, and rules that define it by pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Only, Placement
from workbench.core.words import plural
from workbench.errors import UsageError

Steps = tuple[tuple[str, Placement], ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor is placed on a mesh.

    Attributes:
        steps: axis and placement in the order they are applied; the tensor is copied along the other axes.
        why: the rule that placed it.
    """

    steps: Steps
    why: str

    def __str__(self) -> str:
        return ", ".join(f"{axis} {_shown(placement)}" for axis, placement in self.steps) or "Replicate()"


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """Placements of the tensors whose key or fqn matches a regular expression somewhere.

    Attributes:
        pattern: the expression.
        placements: by mesh axis, applied in the order written, axes that are not named staying as they are; or one
            placement for each axis of the mesh, as a DTensor has them.
        role: applies to this role only; by default to every role, because states follow their parameter.
    """

    pattern: str
    placements: Mapping[str, Placement] | Sequence[Placement]
    role: str | None = None

    def matches(self, key: str, fqn: str | None, role: str) -> bool:
        """Raise UsageError for a pattern that is not a valid regular expression."""
        if self.role not in (None, role):
            return False
        try:
            return bool(re.search(self.pattern, key) or (fqn and re.search(self.pattern, fqn)))
        except re.error as error:
            raise UsageError(f"pattern {self.pattern!r} is not a valid regular expression: {error}") from None

    def steps(self, mesh: Mesh) -> tuple[Steps, bool]:
        """Return the placements in order, and whether nothing else counts."""
        if isinstance(self.placements, Mapping):
            for axis in self.placements:
                if axis not in mesh.axes:
                    raise UsageError(f"rule {self.pattern!r} places along {axis!r}, which is not an axis of {mesh!r}")
            return tuple(self.placements.items()), False
        if len(self.placements) != len(mesh.axes):
            raise UsageError(f"rule {self.pattern!r} has {plural(len(self.placements), 'placement')} for {mesh!r}")
        return tuple(zip(mesh.axes, self.placements, strict=True)), True


def _shown(placement: Placement) -> str:
    """Format a placement: ``Shard(0)``, ``Only(0, 3)``, ``Flat()``."""
    values = placement.coordinates if isinstance(placement, Only) else astuple(placement)
    return f"{type(placement).__name__}({', '.join(str(value) for value in values if value is not None)})"
