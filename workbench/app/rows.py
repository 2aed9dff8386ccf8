"""The tensors of a checkpoint as the table shows them, and the choice of rows by pattern and role.

The frame is made once a checkpoint and shared by all sessions. Its index is the tensor's position in the catalog: a
row leads back to the key however the table is filtered or sorted, and whatever had to be done to the name to show it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from workbench.app.words import safe
from workbench.checkpoint import Checkpoint
from workbench.errors import UsageError
from workbench.views import units

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EVERY_ROLE", "choose_rows", "tensor_rows"]

EVERY_ROLE = ""  #: the role filter's value that keeps every row


def tensor_rows(checkpoint: Checkpoint) -> pd.DataFrame:
    """One row a tensor: name shape nbytes dtype role numel chunks files; ``name`` and ``shape`` as text."""
    frame = checkpoint.tensors
    out = frame[["nbytes", "dtype", "role", "numel", "chunks", "files"]].copy()
    short = {name: units.dtype(name) for name in out["dtype"].cat.categories}
    out["role"], out["dtype"] = out["role"].astype("str"), out["dtype"].cat.rename_categories(short).astype("str")
    out.insert(0, "name", [safe(key) for key in checkpoint.catalog.keys])
    out.insert(1, "shape", [shape_text(shape) for shape in frame["shape"]])
    return out


def choose_rows(checkpoint: Checkpoint, pattern: str, role: str = EVERY_ROLE) -> np.ndarray:
    """Positions of the tensors whose key matches a regular expression somewhere and whose role is ``role``.

    Raises:
        UsageError: no valid regular expression; the message says where.
    """
    keep = np.ones(len(checkpoint), bool)
    if pattern:
        try:
            hits = checkpoint.catalog.match(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            at = f" (character {error.pos + 1})" if isinstance(error, re.error) and error.pos is not None else ""
            words = error.msg if isinstance(error, re.error) else "it is too large"
            raise UsageError(f"the pattern is no regular expression: {words}{at}; every row is shown") from None
        keep[:] = False
        keep[hits] = True
    if role != EVERY_ROLE:
        keep &= np.asarray(checkpoint.roles, dtype=object) == role
    return np.flatnonzero(keep)


def shape_text(shape: tuple[int, ...]) -> str:
    """``4096 × 1024``; ``scalar`` for no axis."""
    return " × ".join(map(str, shape)) or "scalar"
