"""Bytes on every rank of one layout, and the layouts that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.mesh.mesh import Mesh
from workbench.core.shown import Shown
from workbench.memory.local import LocalPieces, scale_bytes
from workbench.memory.precision import Precision

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("weights", "grads", "master", "moments")
#: The lowest sharding stage at which each of PARTS is sharded over data parallel ranks.
SHARED_FROM = (3, 2, 1, 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout: ``tp · pp · dp`` GPUs, experts on ``ep`` of the dp ranks.

    Attributes:
        tp, pp, dp, ep, stage: the layout.
        largest: bytes on the rank with the most.
        mean: mean bytes per rank.
        parts: of the largest rank: weights, grads, master, moments.
        fits: whether the largest rank fits.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    stage: int
    largest: int
    mean: float
    parts: tuple[int, int, int, int]
    fits: bool

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        ep = f" ep={self.ep}" if self.ep > 1 else ""
        return f"tp={self.tp} pp={self.pp} dp={self.dp}{ep} stage {self.stage}"


@dataclass(frozen=True, eq=False, repr=False)
class Budget(Shown):
    """The result of :func:`workbench.plan_memory`.

    Attributes:
        gpus, memory, reserve: as requested; memory in bytes.
        precision: of weights, gradients, masters and moments.
        parameters: number of parameters, each counted once.
        choices: every layout that was tried: first those that fit, smallest first, then the others.
        chosen: the smallest layout that fits; if none does, the one whose largest rank is smallest.
        ranks: the ranks of ``chosen``, one row each: rank pp dp ep tp weights grads master moments nbytes.
        notes: assumptions, and what is not counted.
    """

    gpus: int
    memory: int
    reserve: int
    precision: Precision
    parameters: int
    choices: Sequence[Choice]
    chosen: Choice
    ranks: pd.DataFrame
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether any layout that was tried fits."""
        return self.chosen.fits

    def frame(self) -> pd.DataFrame:
        """Return ``choices`` as rows: gpus tp pp dp ep stage fits largest mean weights grads master moments."""
        import pandas as pd

        rows = [(c.gpus, c.tp, c.pp, c.dp, c.ep, c.stage, c.fits, c.largest, c.mean, *c.parts) for c in self.choices]
        names = ["gpus", "tp", "pp", "dp", "ep", "stage", "fits", "largest", "mean", *PARTS]
        return pd.DataFrame(rows, columns=names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; ``choices`` and ``ranks`` as lists of rows."""
        return {
            "gpus": self.gpus,
            "memory": self.memory,
            "reserve": self.reserve,
            "fits": self.fits,
            "parameters": self.parameters,
            "precision": {name: getattr(self.precision, name) for name in self.precision.__slots__},
            "chosen": self.frame().iloc[self.choices.index(self.chosen)].to_dict(),
            "choices": self.frame().to_dict("records"),
            "ranks": self.ranks.to_dict("records"),
            "notes": self.notes,
        }


def rank_bytes(pieces: Sequence[LocalPieces], mesh: Mesh, dp: int, stage: int) -> tuple[Ints, Ints]:
    """Return the bytes on every rank.

    Args:
        pieces: local tensors of each rank of ``mesh``.
        mesh: of pp, ep and tp; ep is a part of dp.
        dp: data parallel ranks.
        stage: 0 to 3.

    Returns:
        ``(ranks, 4)`` coordinates pp, dp, ep, tp, and ``(ranks, 4)`` bytes of weights, grads, master, moments.
    """
    ep, places, found = mesh.size("ep"), [], []
    for rank, mine in enumerate(pieces):
        at = mesh.coordinate(rank)
        for outer in range(dp // ep):
            dense = outer * ep + at.get("ep", 0)
            places.append((at.get("pp", 0), dense, at.get("ep", 0), at.get("tp", 0)))
            found.append(_bytes(mine, stage, (dp, dense), (dp // ep, outer)))
    return np.array(places, np.int64), np.array(found, np.int64)


def _bytes(pieces: LocalPieces, stage: int, dense: tuple[int, int], expert: tuple[int, int]) -> Ints:
    """Return the bytes of one rank by part; ``dense`` and ``expert``: how many ranks share tensors, and this rank's
    number.
    """
    rows = pieces.shape[:, 0]
    rest = box.volume(pieces.shape[:, 1:])
    count = np.where(pieces.expert, expert[0], dense[0])
    at = np.where(pieces.expert, expert[1], dense[1])
    each = -(-rows // count)
    shared = np.where(pieces.rowless, rows, np.clip(rows - each * at, 0, each))
    found = np.zeros(len(PARTS), np.int64)
    for part, least in enumerate(SHARED_FROM):
        held = shared if stage >= least else rows
        found[part] = int((held * rest * pieces.width[:, part]).sum())
        if part == 0 and pieces.scaled.any():
            found[part] += int(scale_bytes(pieces.shape, held)[pieces.scaled].sum())
    return found
