"""Which file of a later checkpoint still holds an earlier one's bytes.

::

    later     rank 0   0.0 % equal to the earlier one        an update changes every second moment, if only by β2
              rank 1  99.9 %                            ✗    this rank's file is of the earlier save
              rank 2   0.0 %
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from workbench.core.dtypes import DType
from workbench.core.scan import Piece, Tick, scan
from workbench.core.work import pair_work
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.sign import RULES, Cleared, Inapplicable, Outcome, Rule, many, register
from workbench.errors import WorkbenchError

__all__ = ["check_shards"]

SAME, OTHER = 0.99, 0.5  #: shares of equal elements: a stale file, and one that is not
LEAST = 1024  #: elements of a file from which its share says anything
LIST = 100
ROLES = ("param", "master", "exp_avg", "exp_avg_sq")

register(
    Rule("N24", "a file of the earlier checkpoint", ("G6",), "pair", "an update changes every second moment but 0",
         f"more than {SAME:.0%} of a file's elements as they were, less than {OTHER:.0%} of another's",
         "catalogue N24; exact where second moments are among them", "error",
         "files of frozen weights (warn: no second moments in them)", "restore that rank's file of this step"),
)  # fmt: skip


@dataclass
class _Count:
    """Elements by file of the later checkpoint: ``[equal, all, zero in both]``."""

    files: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))


class _Equal:
    """Counts equal bits by the file that the later side's chunk is in."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def begin(self, dtype: DType, other: DType | None) -> _Count:
        return _Count()

    def fold(self, state: _Count, piece: Piece) -> None:
        assert piece.other is not None
        a, b = piece.bits, piece.other
        if a.dtype != b.dtype or a.dtype.kind == "V":
            return
        count = state.files[int(self._files[piece.row])]
        same = a == b
        count[0] += int(np.count_nonzero(same))
        count[1] += len(a)
        count[2] += int(np.count_nonzero(same & (a == 0)))

    def merge(self, state: _Count, later: _Count) -> None:
        for file, counts in later.files.items():
            state.files[file] = [x + y for x, y in zip(state.files[file], counts, strict=True)]


def check_shards(pair: Pair, *, threads: int | None = None, tick: Tick | None = None) -> Outcome:
    """The share of each file of the later checkpoint that equals the earlier one bit for bit.

    Args:
        pair: two checkpoints with updates between them.
        tick: told the share that is done; stops by raising.
    """
    found = Outcome()
    catalog = pair.b.ckpt.catalog
    if pair.mapped:
        found.not_checked["N24"] = "the two are named or fused otherwise"
        return found
    shared = [
        (role, *places) for _, roles in pair.shared() for role, places in roles.items()
        if role in ROLES and prod(pair.b.shape(places[1])) > 1
        and pair.a.dtype(places[0]) == pair.b.dtype(places[1])
    ]  # fmt: skip
    several = {int(file) for file in np.unique(catalog.file)}
    if not shared or len(several) < 2:
        found.not_checked["N24"] = Inapplicable("all is in one file") if shared else "nothing is stored alike in both"
        return found
    a = np.array([one[1] for one in shared], np.int64)
    b = np.array([one[2] for one in shared], np.int64)
    work = pair_work(pair.b.ckpt.payloads, pair.a.ckpt.payloads, b, a)
    lost: list[WorkbenchError] = []
    totals: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    moving: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for group, count in scan(
        work, _Equal(catalog.file), threads=threads, tick=tick, on_error=lambda *why: lost.append(why[2])
    ):
        for file, (same, of, zero) in count.files.items():
            totals[file] = [x + y for x, y in zip(totals[file], (same, of, zero), strict=True)]
            if shared[group][0] == "exp_avg_sq":
                moving[file] = [moving[file][0] + same - zero, moving[file][1] + of - zero]
    _judge(pair, totals, moving, found)
    if lost:
        found.not_checked["N24"] = f"{len(lost):,} pieces could not be read: {lost[0]}"
    return found


def _judge(pair: Pair, totals: dict[int, list[int]], moving: dict[int, list[int]], found: Outcome) -> None:
    """Zeros that stayed zeros say nothing of either save."""
    files = pair.b.ckpt.catalog.files
    share = {f: (same - zero) / (of - zero) for f, (same, of, zero) in totals.items() if of - zero >= LEAST}
    stale = [file for file, part in share.items() if part > SAME]
    fresh = [file for file, part in share.items() if part < OTHER]
    found.checked["N24"] = f"{many(len(share), 'file')} against the earlier checkpoint"
    for file in stale if fresh else []:
        same, of = moving[file]
        if not of and not pair.due(_names(pair, file)):
            continue  # frozen weights, or a learning rate of 0
        proved = of > 0 and same == of
        words = (
            f"{share[file]:.1%} of {files[file]!r} equals the earlier checkpoint bit for bit; of {files[fresh[0]]!r} "
        )
        words += f"{share[fresh[0]]:.1%}"
        evidence = {"file": files[file], "share": share[file], "second_moments": [same, of],
                    "others": {files[other]: share[other] for other in fresh[:LIST]}}  # fmt: skip
        names = _names(pair, file)
        grave = "error" if proved else "warn"
        found.signs.append(
            RULES["N24"].sign(words, evidence, names, severity=grave, hit=totals[file][0], of=totals[file][1])
        )
    if share and not stale and len(fresh) == len(share):
        words = (
            f"{many(len(share), 'file')}: none repeats the earlier checkpoint (at most {max(share.values()):.1%} equal)"
        )
        found.cleared.append(Cleared("shards of the earlier step", words))


def _names(pair: Pair, file: int) -> list[str]:
    catalog = pair.b.ckpt.catalog
    rows = np.unique(catalog.tensor[catalog.file == file])
    names = (pair.b.ckpt.fqns[int(at)] for at in rows)
    return list(dict.fromkeys(name for name in names if name is not None))[:LIST]
