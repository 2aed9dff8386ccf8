"""The tensors of a checkpoint as the table shows them, the choice of rows by pattern and role, and their order.

The frame is made once a checkpoint and shared by all sessions; row ``i`` is the catalog's tensor ``i``. A session holds
positions only: which rows its filters leave, in the order of its sorting. So a row leads back to its key whatever had
to be done to the name to show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.app.search import LIMIT, Search
from workbench.app.words import safe
from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import ALL
from workbench.core.frames import distinct_files
from workbench.views import units

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EVERY_ROLE", "Ranks", "choose_rows", "shape_text", "tensor_rows", "with_role"]

Positions = np.ndarray[Any, np.dtype[np.int64]]
EVERY_ROLE = ""  #: the role filter's value that keeps every row


def tensor_rows(checkpoint: Checkpoint) -> pd.DataFrame:
    """One row a tensor: name shape nbytes dtype role numel chunks files; ``name`` and ``shape`` as text."""
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


def choose_rows(checkpoint: Checkpoint, pattern: str, role: str = EVERY_ROLE, seconds: float = LIMIT) -> Positions:
    """Positions of the tensors whose key matches a regular expression somewhere and whose role is ``role``.

    Raises:
        UsageError: no valid regular expression; the message says where. Or one that takes longer than ``seconds``.
    """
    if not pattern:
        return with_role(checkpoint, np.arange(len(checkpoint)), role)
    search = Search(checkpoint.catalog.keys, pattern)
    if not search.run(seconds):
        raise search.too_long()
    return with_role(checkpoint, search.positions(), role)


def with_role(checkpoint: Checkpoint, positions: Positions, role: str) -> Positions:
    """Those of a role."""
    if role == EVERY_ROLE:
        return positions
    roles = checkpoint.roles
    return positions[np.fromiter((roles[at] == role for at in positions.tolist()), bool, len(positions))]


def shape_text(shape: tuple[int, ...]) -> str:
    """``4096 × 1024``; ``scalar`` for no axis."""
    return " × ".join(map(str, shape)) or "scalar"


class Ranks:
    """The order of a frame's rows by each column, worked out when it is first asked for and kept for all sessions.

    Text is ordered without regard to case, as tables in a browser do it; shapes by their elements.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self._kept: dict[str, np.ndarray[Any, Any]] = {}

    def order(self, positions: Positions, sorters: Sequence[tuple[str, bool]]) -> Positions:
        """Positions sorted by columns, the first one first: ``(column, ascending)``; equal ones stay as they were."""
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
