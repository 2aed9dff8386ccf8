"""Value objects: the known placement of a tensor.

``proven``   the placement, applied to the coordinates of the holders, yields exactly the stored boxes, and every
             holder of the mesh is accounted for
``partly``   the same for the axes that cut; what holders on the other axes have is unknown (a save without copies)
``unknown``  the boxes prove no placement, or fit several; ``why`` says which
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.analysis.layout.runs import AxisCut

PROVEN, PARTLY, UNKNOWN = "proven", "partly", "unknown"


@dataclass(frozen=True, slots=True)
class InferredMesh:
    """Named axes, outermost first, and their sizes; if ``ordered``, ``ranks`` are numbered row by row."""

    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    ordered: bool = True

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of all tensors with one sharding pattern.

    Attributes:
        kind: ``whole``, ``grid`` (cut along axes), ``flat`` (ranges of the flattened tensor), ``irregular``,
            ``hole``, ``overlap`` or ``empty``.
        status: ``proven``, ``partly`` or ``unknown``.
        why: the proof, or what is missing, as text.
        mesh: the mesh of the placements below.
        cuts: the cuts of the tensor, in the order applied; ``AxisCut.axis`` is an axis of ``mesh``.
        flat: axis along which the flattened local tensor is split into ranges, applied last; ``None`` for none, -1 if
            it is not a mesh axis but all holders in order.
        others: the other axes of ``mesh``: ``Replicate()``, ``Only(0)`` or ``?``, by position.
        cut: how the tensor is divided, independent of the holders: ``2 × 4 pieces along axes 0, 1``.
        pieces: distinct boxes.
        copies: minimum and maximum number of times that an element is stored.
    """

    kind: str
    status: str
    why: str
    mesh: InferredMesh = InferredMesh()
    cuts: tuple[AxisCut, ...] = ()
    flat: int | None = None
    others: dict[int, str] = field(default_factory=dict)
    cut: str = ""
    pieces: int = 1
    copies: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        """Return ``tp Shard(0), dp Flat()``, in the form of placement rules; ``?`` if nothing is known."""
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
        """DTensor placements, one per mesh axis: ``("_StridedShard(0, sf=2)", "Shard(0)")``.

        PyTorch applies them from the first axis to the last; an axis that cuts a dimension already cut by a later axis
        is strided. ``None`` if DTensor cannot represent the placement, or if something is unknown.
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
