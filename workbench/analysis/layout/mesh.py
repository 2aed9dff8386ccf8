"""The known part of the mesh that a checkpoint was saved on, and one holder on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class HolderView:
    """One holder: a rank, or the mesh coordinates in a file's name.

    Attributes:
        holder: its row in ``Layout.ranks``.
        rank: ``None`` if not stored.
        label: ``rank 3``, ``tp=0 pp=1`` or a file's name.
        coordinates: its known coordinates on the mesh.
        peers: by axis, the labels of holders that differ from it only on that axis, including itself, in order.
        nbytes: bytes of the chunks that it stores.
        pieces: one row per chunk: key role offsets sizes nbytes replica file start stop.
    """

    holder: int
    rank: int | None
    label: str
    coordinates: Mapping[str, int]
    peers: Mapping[str, list[str]]
    nbytes: int
    pieces: pd.DataFrame
