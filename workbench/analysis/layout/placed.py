"""What is known of where a tensor lies: value objects.

``proven``   the placement, applied to the coordinates of the holders, gives the very boxes that are stored, and every
             holder of the mesh is accounted for
``partly``   so for the axes that cut; what the holders on the other axes have is not stored (a save without copies)
``unknown``  the boxes tell no placement, or several; ``why`` says which
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.analysis.layout.runs import Cut

__all__ = ["PARTLY", "PROVEN", "UNKNOWN", "Mesh", "Placed"]

PROVEN, PARTLY, UNKNOWN = "proven", "partly", "unknown"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, the outermost first, and their sizes; ``ranks`` are numbered row by row where ``ordered``."""

    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    ordered: bool = True

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Placed:
    """How tensors of one way lie.

    Attributes:
        kind: ``whole``, ``grid`` (cut along axes), ``flat`` (ranges of the flattened tensor), ``irregular``,
            ``hole``, ``overlap`` or ``empty``.
        status: ``proven``, ``partly`` or ``unknown``.
        why: in words, what proves it or what is lacking.
        mesh: what the placements below are along.
        cuts: what cuts the tensor, in the order applied; ``Cut.axis`` is an axis of ``mesh``.
        flat: axis along which ranges of the flattened local tensor lie, applied last; ``None`` for none, -1 where it
            is no axis of the mesh but all holders in order.
        others: the other axes of ``mesh``: ``Replicate()``, ``Only(0)`` or ``?``, by position.
        cut: how the tensor is divided, whoever holds the pieces: ``2 × 4 pieces along axes 0, 1``.
        pieces: distinct boxes.
        copies: times that each element is stored, fewest and most.
    """

    kind: str
    status: str
    why: str
    mesh: Mesh = Mesh()
    cuts: tuple[Cut, ...] = ()
    flat: int | None = None
    others: dict[int, str] = field(default_factory=dict)
    cut: str = ""
    pieces: int = 1
    copies: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        """``tp Shard(0), dp Flat()``, as placement rules are written; ``?`` where nothing is known."""
        if self.kind == "empty":
            return "empty"
        names = self.mesh.axes
        parts = [f"{names[cut.axis]} {cut}" for cut in self.cuts]
        if self.flat is not None:
            parts.append(f"{names[self.flat] + ' ' if self.flat >= 0 else ''}Flat()")
        parts += [f"{names[axis]} {text}" for axis, text in sorted(self.others.items())]
        return ", ".join(parts) or ("whole" if self.kind == "whole" and self.status == PROVEN else "?")

    @property
    def torch(self) -> tuple[str, ...] | None:
        """DTensor placements, one a mesh axis: ``("_StridedShard(0, sf=2)", "Shard(0)")``.

        torch applies them from the first axis to the last; an axis that cuts what a later axis cut before is strided.
        ``None`` where a DTensor cannot say it, or something is not known.
        """
        if self.flat is not None or any(cut.parts for cut in self.cuts) or not self.mesh.axes:
            return None
        found = []
        for axis in range(len(self.mesh.axes)):
            if axis in self.others:
                if self.others[axis] != "Replicate()":
                    return None
                found.append("Replicate()")
                continue
            at = next((k for k, cut in enumerate(self.cuts) if cut.axis == axis), None)
            if at is None:
                return None
            before = [cut.axis for cut in self.cuts[:at] if cut.dim == self.cuts[at].dim and cut.axis > axis]
            factor = 1
            for other in before:
                factor *= self.mesh.shape[other]
            dim = self.cuts[at].dim
            found.append(f"Shard(dim={dim})" if factor == 1 else f"_StridedShard(dim={dim}, sf={factor})")
        return tuple(found)
