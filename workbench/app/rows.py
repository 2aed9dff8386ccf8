"""The tensors of a checkpoint as rows of the table, filtered by pattern and role, and sorted.

The frame is built once per checkpoint and shared by all sessions; row ``i`` is the catalog's tensor ``i``. A session
stores only positions: the rows that pass its filters, in its sort order. A row therefore leads back to its key, however
the name had to be changed for display.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.app.words import safe
from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import ALL
from workbench.core.frames import distinct_files
from workbench.views import units

if TYPE_CHECKING:
    import pandas as pd

Positions = np.ndarray[Any, np.dtype[np.int64]]
EVERY_ROLE = ""  #: the role filter's value that keeps every row


def tensor_rows(checkpoint: Checkpoint) -> pd.DataFrame:
    """Return one row per tensor: name shape nbytes dtype role numel chunks files; ``name`` and ``shape`` are text."""
    import pandas as pd

    catalog = checkpoint.catalog
    short = [units.dtype(one.name) for one in ALL]
    shapes = [tuple(row[:n]) for row, n in zip(catalog.shape.tolist(), catalog.ndim.tolist(), strict=True)]
    written: dict[tuple[int, ...], str] = {shape: shape_text(shape) for shape in set(shapes)}
    return pd.DataFrame(
        {
            "name": pd.array([safe(key) for key in catalog.keys], dtype="str"),
            "shape": pd.array([written[shape] for shape in shapes], dtype="str"),
            "nbytes": catalog.tensor_nbytes,
            "dtype": pd.array([short[code] for code in catalog.dtype.tolist()], dtype="str"),
            "role": pd.array(checkpoint.roles, dtype="str"),
            "numel": catalog.numel,
            "chunks": np.diff(catalog.row_ptr),
            "files": distinct_files(catalog),
        }
    )


def with_role(checkpoint: Checkpoint, positions: Positions, role: str) -> Positions:
    """Keep the positions of a role."""
    if role == EVERY_ROLE:
        return positions
    roles = checkpoint.roles
    return positions[np.fromiter((roles[at] == role for at in positions.tolist()), bool, len(positions))]


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``4096 × 1024``, or ``scalar`` if there are no axes."""
    return " × ".join(map(str, shape)) or "scalar"


class RowOrder:
    """The order of a frame's rows by each column, computed on first use and kept for all sessions.

    Text is ordered ignoring case, as in browser tables; shapes are ordered by number of elements.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self._kept: dict[str, np.ndarray[Any, Any]] = {}

    def order(self, positions: Positions, sorters: Sequence[tuple[str, bool]]) -> Positions:
        """Sort positions stably by columns ``(column, ascending)``, the most significant first."""
        keys = []
        for column, ascending in sorters:
            if column in self._frame:
                rank = self._rank(column)[positions]
                keys.append(rank if ascending else -rank)
        return positions[np.lexsort(keys[::-1])] if keys else positions

    def _rank(self, column: str) -> np.ndarray[Any, Any]:
        found = self._kept.get(column)
        if found is None:
            values = self._frame["numel" if column == "shape" else column]
            if values.dtype.kind in "iuf":
                found = values.to_numpy()
            else:
                texts = [text.casefold() for text in values]
                place = {text: at for at, text in enumerate(sorted(set(texts)))}
                found = np.fromiter((place[text] for text in texts), np.int32, len(texts))
            self._kept[column] = found
        return found
