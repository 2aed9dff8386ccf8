"""Which rank, file and byte range stores each box of a checkpoint, and which placements that proves.

::

    holders    the writers of chunks: ranks, mesh coordinates, files       holders.py
    classes    tensors with the same sharding pattern, analysed once        classes.py
    mesh       stored in files, or inferred from the order of pieces        digits.py, infer.py
    fit        placements that give every holder exactly its boxes          runs.py, fit.py, place.py, flat.py
    figures    bytes by rank, file, role …, balance, copies                 figures.py
    coverage   holes and overlaps, exactly                                  coverage.py

Only the catalog's columns are used; nothing is read. A placement counts as proven if it yields, from the holders'
coordinates alone, exactly the boxes that they stored, and all holders of the mesh are accounted for. Facts that a save
does not store (copies that were stored only once, ranks that no file names) are reported as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from workbench.analysis.layout.coverage import coverage
from workbench.analysis.layout.holders import holders
from workbench.analysis.layout.infer import infer
from workbench.analysis.layout.placed import InferredMesh, Placed
from workbench.analysis.layout.result import Layout
from workbench.checkpoint import Checkpoint, as_checkpoint
from workbench.core.source import needs_descriptors

__all__ = ["InferredMesh", "Layout", "Placed", "layout"]


@needs_descriptors()
def layout(ckpt: Checkpoint | str | os.PathLike[str], *, progress: Callable[[float], None] | None = None) -> Layout:
    """Infer where everything in a checkpoint (or a selection of it) is stored: see :class:`Layout`.

    Takes seconds for a million chunks; no tensor byte is read.

    Args:
        ckpt: a checkpoint, a selection of one, or a path or URL.
        progress: called with the fraction done; raise to cancel.
    """
    ckpt = as_checkpoint(ckpt)
    report = progress or (lambda share: None)
    who = holders(ckpt)
    report(0.2)
    covered = coverage(ckpt.catalog)
    report(0.5)
    inferred = infer(ckpt, who, covered)
    report(1.0)
    return Layout(ckpt.path, ckpt.format, ckpt.world_size, ckpt.catalog, ckpt.fqns, ckpt.roles, who, inferred, covered)
