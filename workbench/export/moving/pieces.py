"""Pieces of a selection: whole tensors, the local tensors of each rank, or the boxes that ranks hold, each once.

::

    Mesh(tp=2), gate_up (8, h)     whole_pieces     one piece: rows 0:8
                                   rank_pieces      rank 0: rows 0:2 and 4:6 joined, rank 1: rows 2:4 and 6:8 joined
                                   chunk_pieces     rank 0: rows 0:2, rows 4:6;      rank 1: rows 2:4, rows 6:8
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.box import row_major
from workbench.core.mesh.cut import Locals
from workbench.errors import UnsupportedFormatError
from workbench.export.filemap import Pieces
from workbench.export.selection import ExportSelection
from workbench.export.sharding.target import Target


@dataclass(frozen=True, eq=False)
class Chunks:
    """The part of one rank in a checkpoint whose files hold boxes of global tensors: ``P`` pieces, a box each.

    Attributes:
        pieces: under the names of their tensors, in the shapes of their boxes.
        tensor: ``(P,)`` positions in the selection.
        offsets: ``(P, D)`` where each begins in its global tensor, padded with 0.
    """

    pieces: Pieces
    tensor: Ints
    offsets: Ints


def whole_pieces(selection: ExportSelection) -> Pieces:
    """Return every tensor whole, in the order of the selection."""
    whole = Pieces.whole(selection.catalog, selection.tensors, names=selection.names, dtype=selection.codes)
    return _edited(selection, whole)


def rank_pieces(selection: ExportSelection) -> list[tuple[Pieces, Locals]]:
    """Return the local tensors of each rank, in the order of the selection, and the boxes they are made of.

    A rank that does not hold a tensor has no piece of it; a rank whose share is empty has an empty piece.
    ``locals.tensor`` are positions in the selection.

    Raises:
        UnsupportedFormatError: a local tensor is a range of a flattened one, which has no shape.
    """
    found = _locals(selection)
    flat = found.ndim != selection.catalog.ndim[selection.tensors[found.tensor]]
    if flat.any():
        name = selection.names[int(found.tensor[flat][0])]
        raise UnsupportedFormatError(
            f"tensor {name!r} is sharded as flat ranges, which one-file-per-rank formats cannot represent; "
            "give it another placement, or write a format that stores boxes (dcp)"
        )
    return [(_joined(selection, mine), mine) for mine in _by_rank(selection, found)]


def chunk_pieces(selection: ExportSelection) -> list[Chunks]:
    """Return the boxes that each rank writes; boxes that several ranks hold are written by one rank, in turns."""
    found = _locals(selection)
    copies = np.zeros(len(selection), np.int64)
    np.maximum.at(copies, found.tensor, found.copy + 1)
    mine = found.copy == found.tensor % np.maximum(copies[found.tensor], 1)
    ranks = _by_rank(selection, _take(found, np.flatnonzero(mine)))
    # a tensor without elements is an empty chunk of the first rank; otherwise nothing would show that it exists
    shapes = selection.catalog.shape[selection.tensors].astype(np.int64)
    empty = np.flatnonzero(box.volume(shapes) == 0)
    return [_boxes(selection, part, empty if rank == 0 else empty[:0]) for rank, part in enumerate(ranks)]


def _locals(selection: ExportSelection) -> Locals:
    """Return the local tensors of all ranks, renumbered by their place in the selection; tensors outside it are left
    out.
    """
    target = selection.target or Target.of(selection.catalog, selection.mesh)
    found = target.locals()
    place = np.full(len(selection.catalog), -1)
    place[selection.tensors] = np.arange(len(selection))
    keep = np.flatnonzero(place[found.tensor] >= 0)
    found = _take(found, keep)
    found.tensor[:] = place[found.tensor]
    return found


def _by_rank(selection: ExportSelection, found: Locals) -> list[Locals]:
    order = np.argsort(found.rank, kind="stable")
    ends = np.searchsorted(found.rank[order], np.arange(selection.mesh.world_size + 1))
    return [_take(found, order[a:b]) for a, b in pairwise(ends.tolist())]


def _joined(selection: ExportSelection, found: Locals) -> Pieces:
    """Create one piece per local tensor."""
    owner = found.owner
    steps = row_major(found.shape)[owner]
    dest, rest = np.empty_like(found.offsets), found.at.copy()
    for axis in range(dest.shape[1]):
        dest[:, axis] = rest // steps[:, axis]
        rest -= dest[:, axis] * steps[:, axis]
    pieces = Pieces(
        [selection.names[t] for t in found.tensor.tolist()],
        selection.codes[found.tensor],
        found.ndim,
        found.shape,
        owner,
        selection.tensors[found.tensor[owner]],
        found.offsets,
        found.sizes,
        dest,
    )
    return _edited(selection, pieces)


def _boxes(selection: ExportSelection, found: Locals, empty: Ints) -> Chunks:
    """Create one piece per box, and one for each tensor in ``empty``."""
    shapes = selection.catalog.shape[selection.tensors].astype(np.int64)
    tensor = found.tensor[found.owner]
    at = np.concatenate([tensor, empty])
    offsets = np.concatenate([found.offsets, np.zeros_like(shapes[empty])])
    sizes = np.concatenate([found.sizes, shapes[empty]])
    pieces = Pieces(
        [selection.names[t] for t in at.tolist()],
        selection.codes[at],
        selection.catalog.ndim[selection.tensors[at]].astype(np.int64),
        sizes,
        np.arange(len(at)),
        selection.tensors[at],
        offsets,
        sizes,
        np.zeros_like(offsets),
    )
    return Chunks(_edited(selection, pieces), at, offsets)


def _edited(selection: ExportSelection, pieces: Pieces) -> Pieces:
    return pieces if selection.edited is None else selection.edited.applied(pieces)


def _take(found: Locals, index: Ints) -> Locals:
    """Return some of the local tensors, in the order given."""
    counts = np.diff(found.ptr)[index]
    begins = found.ptr[:-1][index]
    rows = box.spans(begins, counts)
    return Locals(
        found.tensor[index],
        found.rank[index],
        found.copy[index],
        found.ndim[index],
        found.shape[index],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        found.offsets[rows],
        found.sizes[rows],
        found.at[rows],
        found.strides[rows],
    )
