"""Which rank, file and byte range holds each box of a checkpoint, and what placements that proves.

::

    holders    who stored each chunk: ranks, mesh coordinates, files        holders.py
    classes    tensors that lie in one way, looked at once                  classes.py
    mesh       from what files state, or from the order of pieces           digits.py, infer.py
    fit        placements that give every holder its very boxes             runs.py, fit.py, place.py, flat.py
    figures    bytes by rank, file, role …, balance, copies                 figures.py
    coverage   holes and overlaps, exactly                                  coverage.py

Only the catalog's columns are looked at; nothing is read. A placement counts as proven when it gives, from the holders'
coordinates alone, the very boxes that they stored, and all holders of the mesh are accounted for. What a save leaves
out (copies that were stored once, ranks that no file names) stays unknown, and is said.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.analysis.layout.coverage import coverage
from workbench.analysis.layout.holders import holders
from workbench.analysis.layout.infer import infer
from workbench.analysis.layout.placed import Mesh, Placed
from workbench.analysis.layout.result import Layout
from workbench.checkpoint import Checkpoint
from workbench.core.source import needs_descriptors

__all__ = ["Layout", "Mesh", "Placed", "layout"]


@needs_descriptors()
def layout(ckpt: Checkpoint, *, tick: Callable[[float], None] | None = None) -> Layout:
    """Where everything lies in a checkpoint (or a selection of it): see :class:`Layout`.

    Takes seconds for a million chunks; no tensor byte is read.

    Args:
        tick: called with the share that is done; what it raises passes through.
    """
    told = tick or (lambda share: None)
    who = holders(ckpt)
    told(0.2)
    covered = coverage(ckpt.catalog)
    told(0.5)
    inferred = infer(ckpt, who, covered)
    told(1.0)
    return Layout(ckpt.path, ckpt.format, ckpt.world_size, ckpt.catalog, ckpt.fqns, ckpt.roles, who, inferred, covered)
