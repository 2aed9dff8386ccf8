"""The mesh that a checkpoint was saved on, as far as it is told, and one holder of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["HolderView"]


@dataclass(frozen=True, eq=False)
class HolderView:
    """One holder: a rank, or the point of a mesh that a file's name tells.

    Attributes:
        holder: its row in ``Layout.ranks``.
        rank: ``None`` where not stored.
        label: ``rank 3``, ``tp=0 pp=1`` or a file's name.
        coordinates: on the mesh, as far as they are known.
        peers: by axis, the labels of those that differ from it on that axis alone, itself included, in order.
        nbytes: of the chunks that it stores.
        pieces: a row a chunk: key role offsets sizes nbytes replica file start stop.
    """

    holder: int
    rank: int | None
    label: str
    coordinates: Mapping[str, int]
    peers: Mapping[str, list[str]]
    nbytes: int
    pieces: pd.DataFrame
