"""Find files of a later checkpoint that still hold the bytes of an earlier one.

::

    later     rank 0   0.0 % equal to the earlier one        an update changes every second moment, if only by β2
              rank 1  99.9 %                            ✗    this rank's file comes from the earlier save
              rank 2   0.0 %
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

import numpy as np

from workbench.core.dtypes import DType
from workbench.core.payload import Payloads
from workbench.core.scan import Piece, Progress, scan
from workbench.core.words import plural
from workbench.core.work import pair_work
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.sign import RULES, Cleared, Inapplicable, Outcome, Rule, register
from workbench.errors import WorkbenchError

SAME, OTHER = 0.99, 0.5  #: shares of equal elements: above, a file is stale; below, it is not
LEAST = 1024  #: fewest elements of a file for a meaningful share
LIST = 100
ROLES = ("param", "master", "exp_avg", "exp_avg_sq")

register(
    Rule(
        "N24", "a file of the earlier checkpoint", ("G6",), "pair",
        "an update changes every second moment that is not 0",
        f"more than {SAME:.0%} of a file's elements are unchanged, less than {OTHER:.0%} of another's",
        "catalogue N24; exact if second moments are among them", "error",
        "files of frozen weights (warn: no second moments in them)", "restore that rank's file of this step"
    ),
)  # fmt: skip


@dataclass
class _Count:
    """Numbers of elements by file of the later checkpoint: ``[equal, all, zero in both]``."""

    files: dict[int, list[int]] = field(default_factory=dict)


class _Equal:
    """A fold that counts equal elements by the file of the later checkpoint."""

    def __init__(self, later: Payloads) -> None:
        self._later = later

    def begin(self, dtype: DType, other: DType | None) -> _Count:
        return _Count()

    def fold(self, state: _Count, piece: Piece) -> None:
        assert piece.other is not None
        a, b = piece.bits, piece.other
        if a.dtype != b.dtype or a.dtype.kind == "V":
            return
        count = state.files.setdefault(int(self._later.catalog.file[piece.row]), [0, 0, 0])
        same = a == b
        count[0] += int(np.count_nonzero(same))
        count[1] += len(a)
        count[2] += int(np.count_nonzero(same & (a == 0)))

    def merge(self, state: _Count, later: _Count) -> None:
        for file, counts in later.files.items():
            state.files[file] = [x + y for x, y in zip(state.files.get(file, [0, 0, 0]), counts, strict=True)]


def check_shards(pair: Pair, *, threads: int | None = None, progress: Progress | None = None) -> Outcome:
    """Compare each file of the later checkpoint with the earlier one bit for bit.

    Args:
        pair: two checkpoints with updates between them.
        progress: called with the fraction done; stops by raising.
    """
    found = Outcome()
    catalog = pair.b.ckpt.catalog
    if pair.mapped:
        found.not_checked["N24"] = "the two checkpoints name or fuse tensors differently"
        return found
    shared = [
        (role, *places)
        for _, roles in pair.shared()
        for role, places in roles.items()
        if role in ROLES and prod(pair.b.shape(places[1])) > 1 and pair.a.dtype(places[0]) == pair.b.dtype(places[1])
    ]
    several = {int(file) for file in np.unique(catalog.file)}
    if not shared or len(several) < 2:
        found.not_checked["N24"] = (
            Inapplicable("everything is in one file") if shared else "no tensor is stored alike in both"
        )
        return found
    a = np.array([one[1] for one in shared], np.int64)
    b = np.array([one[2] for one in shared], np.int64)
    work = pair_work(pair.b.ckpt.payloads, pair.a.ckpt.payloads, b, a)
    lost: list[WorkbenchError] = []
    totals: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    moving: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for group, count in scan(
        work,
        _Equal(pair.b.ckpt.payloads),
        threads=threads,
        progress=progress,
        on_error=lambda *why: lost.append(why[2]),
    ):
        for file, (same, of, zero) in count.files.items():
            totals[file] = [x + y for x, y in zip(totals[file], (same, of, zero), strict=True)]
            if shared[group][0] == "exp_avg_sq":
                moving[file] = [moving[file][0] + same - zero, moving[file][1] + of - zero]
    _judge(pair, totals, moving, found)
    if lost:
        found.not_checked["N24"] = f"{plural(len(lost), 'piece')} could not be read: {lost[0]}"
    return found


def _judge(pair: Pair, totals: dict[int, list[int]], moving: dict[int, list[int]], found: Outcome) -> None:
    """Report files that repeat the earlier checkpoint; zeros that stayed zero prove nothing and are not counted."""
    files = pair.b.ckpt.catalog.files
    share = {f: (same - zero) / (of - zero) for f, (same, of, zero) in totals.items() if of - zero >= LEAST}
    stale = [file for file, part in share.items() if part > SAME]
    fresh = [file for file, part in share.items() if part < OTHER]
    found.checked["N24"] = f"{plural(len(share), 'file')} compared with the earlier checkpoint"
    for file in stale if fresh else []:
        same, of = moving[file]
        if not of and not pair.due(_names(pair, file)):
            continue  # frozen weights, or a learning rate of 0
        if not of and share[file] < 1 and _mastered(pair, file):
            continue  # small updates round to the same weights; rules on masters tell whether they belong together
        proved = of > 0 and same == of
        words = (
            f"{share[file]:.1%} of {files[file]!r} equals the earlier checkpoint bit for bit, "
            f"but only {share[fresh[0]]:.1%} of {files[fresh[0]]!r}"
        )
        evidence = {
            "file": files[file],
            "share": share[file],
            "second_moments": [same, of],
            "others": {files[other]: share[other] for other in fresh[:LIST]},
        }
        names = _names(pair, file)
        grave = "error" if proved else "warn"
        found.signs.append(
            RULES["N24"].sign(words, evidence, names, severity=grave, hit=totals[file][0], of=totals[file][1])
        )
    if share and not stale and len(fresh) == len(share):
        words = f"{plural(len(share), 'file')}: none repeats the earlier checkpoint"
        words += f" (at most {most:.1%} of a file is equal)" if (most := max(share.values())) >= 0.001 else ""
        found.cleared.append(Cleared("shards of the earlier step", words))


def _mastered(pair: Pair, file: int) -> bool:
    """Return whether a file has weights whose masters are in another one."""
    catalog = pair.b.ckpt.catalog
    here = set(catalog.tensor[catalog.file == file].tolist())
    roles = [pair.b.params[name] for name in _names(pair, file) if name in pair.b.params]
    return any("param" in one and "master" in one and one["master"] not in here for one in roles)


def _names(pair: Pair, file: int) -> list[str]:
    catalog = pair.b.ckpt.catalog
    rows = np.unique(catalog.tensor[catalog.file == file])
    names = (pair.b.ckpt.fqns[int(at)] for at in rows)
    return list(dict.fromkeys(name for name in names if name is not None))[:LIST]
