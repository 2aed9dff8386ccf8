"""How long each phase of a save took on each rank, as ``wb.dcp.Writer`` recorded it in the manifest.

::

    stage   plan   data = serialise, hash, write, sync          gather   metadata
    copy    agree  each rank; the parts are added up over       rank 0   manifest
                   the threads of the rank                               and .metadata

Start times are those of each rank's host; durations do not depend on its clock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.analysis.manifest import load
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.shown import Shown
from workbench.errors import CorruptError, UsageError

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("serialise", "hash", "write", "sync")  #: of ``data``, added up over threads
ORDER = ("stage", "plan", "echo", *PARTS, "data", "gather", "metadata")
NAMES = 32  #: maximum number of distinct phases accepted from a manifest
EVEN = 1.1  #: multiple of the median up to which ranks count as equally fast


@dataclass(frozen=True)
class SavePhase:
    """A phase of one rank: seconds since the epoch, seconds, bytes."""

    rank: int
    name: str
    start: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Slowest:
    """The rank that the others waited for.

    Attributes:
        seconds: duration of its phase ``data``; ``typical`` is the median of all ranks.
        part: the part of ``data`` that exceeds its own median most; ``part_seconds``, ``part_typical``: its seconds and
            that median.
    """

    rank: int
    seconds: float
    typical: float
    part: str
    part_seconds: float
    part_typical: float

    @property
    def even(self) -> bool:
        """Whether no rank was much slower than the others."""
        return self.seconds <= EVEN * self.typical


class SavePhases(Shown):
    """The phases of a save.

    Attributes:
        rows: of all ranks.
        ranks: their number.
        names: of the phases, in their order.
        notes: sentences of the writer; ``differences``: replicas that differed.
    """

    def __init__(self, rows: list[SavePhase], notes: list[str], differences: list[str]) -> None:
        self.rows, self.notes, self.differences = rows, notes, differences
        self.ranks = max(row.rank for row in rows) + 1
        present = dict.fromkeys(row.name for row in rows)
        self.names = [name for name in ORDER if name in present] + [name for name in present if name not in ORDER]
        self._seconds: dict[tuple[int, str], float] = {}
        for row in rows:
            self._seconds[row.rank, row.name] = self._seconds.get((row.rank, row.name), 0.0) + row.seconds

    def seconds(self, rank: int, name: str) -> float | None:
        """Return the seconds that a phase took on a rank; ``None`` if the rank did not have it."""
        return self._seconds.get((rank, name))

    def of(self, name: str) -> dict[int, float]:
        """Return the seconds that a phase took, by rank, for the ranks that had it."""
        return {rank: one for (rank, phase), one in self._seconds.items() if phase == name}

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks wrote."""
        return sum(row.nbytes for row in self.rows if row.name == "data")

    @property
    def total(self) -> float:
        """Seconds from the beginning of the plan to the end of the last phase on rank 0, without staging."""
        own = [row for row in self.rows if row.rank == 0 and row.name != "stage"] or self.rows
        begin = min(row.start for row in own)
        return max((row.start + row.seconds - begin for row in own if row.name not in PARTS), default=0.0)

    @property
    def slowest(self) -> Slowest | None:
        """The rank that took longest to write its data; ``None`` without that phase."""
        data = self.of("data")
        if not data:
            return None
        rank = max(data, key=lambda one: data[one])
        parts = {name: self.of(name) for name in PARTS}
        over = {name: one[rank] - median(one.values()) for name, one in parts.items() if rank in one}
        part = max(over, key=lambda name: (round(over[name], 9), parts[name][rank]), default="")
        mine = parts[part] if part else {rank: 0.0}
        return Slowest(rank, data[rank], median(data.values()), part, mine[rank], median(mine.values()))

    def frame(self) -> pd.DataFrame:
        """Return the phases as a table: rank name start seconds nbytes."""
        import pandas as pd

        return pd.DataFrame([vars(row) for row in self.rows], columns=list(SavePhase.__dataclass_fields__))

    def to_dict(self) -> dict[str, Any]:
        """Return the phases in JSON types."""
        slow = self.slowest
        return {
            "ranks": self.ranks,
            "seconds": self.total,
            "nbytes": self.nbytes,
            "slowest": None if slow is None else vars(slow),
            "notes": self.notes,
            "differences": self.differences,
            "phases": [vars(row) for row in self.rows],
        }


def phases(path: str | os.PathLike[str] | Place) -> SavePhases:
    """Return the phases that the manifest of a checkpoint records.

    Args:
        path: of a checkpoint or a manifest, a URL, or a checkpoint's place.

    Raises:
        MissingFileError: there is no manifest.
        UsageError: the manifest records no phases: another writer saved the checkpoint.
        CorruptError: the manifest is damaged.
    """
    shown = path.path if isinstance(path, Place) else os.fsdecode(path)
    return phases_of(load(path).save, shown)


def phases_of(record: Mapping[str, Any], shown: str) -> SavePhases:
    """Return the phases of a manifest's ``save``; ``shown`` is the name of the checkpoint in errors.

    Raises:
        UsageError: it records none. CorruptError: it was not written by ``wb.dcp.Writer``.
    """
    stored = record.get("phases")
    if not stored:
        raise UsageError(f"the manifest of {shown!r} records no phases of the save; only wb.dcp.Writer records them")
    try:
        rows = [_row(one) for one in stored]
        if len({row.name for row in rows}) > NAMES:
            raise ValueError(f"more than {NAMES} names")
        notes, differences = ([str(one) for one in record.get(name, ())] for name in ("notes", "differences"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptError(f"the manifest of {shown!r} has invalid phases: {short(error, 80)}") from None
    return SavePhases(rows, notes, differences)


def _row(one: Mapping[str, Any]) -> SavePhase:
    row = SavePhase(one["rank"], one["name"], float(one["start"]), float(one["seconds"]), one.get("nbytes", 0))
    whole = all(type(value) is int and 0 <= value < 1 << 62 for value in (row.rank, row.nbytes))
    timed = math.isfinite(row.start) and math.isfinite(row.seconds) and row.seconds >= 0
    if not (whole and timed and isinstance(row.name, str) and row.rank < 1 << 24):
        raise ValueError(f"{one}")
    return row
