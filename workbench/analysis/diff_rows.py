"""One pair of tensors of a diff, and tables of many pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_pairs import RENAMED, TensorPair
from workbench.analysis.patterns import Pattern
from workbench.analysis.rounding import CellCheck
from workbench.checkpoint import Checkpoint
from workbench.core.catalog import Catalog
from workbench.core.dtypes import by_name
from workbench.core.jsonable import finite
from workbench.core.scan import Progress
from workbench.core.shown import Shown
from workbench.tensor import LazyTensor

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "key_a",
    "key_b",
    "by",
    "role",
    "dtype",
    "shape",
    "numel",
    "status",
    "source",
    "changed",
    "share",
    "max_abs",
    "at",
    "l2",
    "rel_l2",
    "cosine",
    "ulp_max",
    "nan_a",
    "nan_b",
    "nan_new",
    "pattern",
    "moved",
)
DIFFERENT = ("changed", "type", "shape")


@dataclass(frozen=True, eq=False, repr=False)
class TensorDiff(Shown):
    """One tensor on both sides.

    Attributes:
        keys_a, key_b: stored names; several of ``a`` if a name map joins them.
        by: how they were paired.
        role: of ``b``.
        status: ``equal``; ``rounded`` (a converted tensor, equal up to the rounding of the type that it is stored in);
            ``changed`` (values); ``type`` (another element type, so values are compared as numbers);
            ``shape``; ``unknown`` (not read, and no evidence); ``unread`` (could not be read on one side).
        source: the evidence for ``equal`` or ``changed`` if no payload was read.
        moved: ``cut`` or ``file``: stored in other boxes or files, which is not a difference.
        comparison: counts, norms and bands, if values were compared; :attr:`detail` adds histograms.
        pattern: the proved form of the change, if it has one.
        rounding: of a converted tensor, whether the stored codes represent the source.
        chunk_rows: changed chunk rows of ``b``.
        why: the reason if it could not be read.
        fqn: its parameter in ``b``; ``None`` if unknown.
        again: compares the pair once more, with histograms. ``sides``: the two tensors.
    """

    keys_a: tuple[str, ...]
    key_b: str
    by: str
    role: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    numel: int
    nbytes: int
    status: str
    source: str = ""
    moved: str = ""
    comparison: Comparison | None = None
    pattern: Pattern | None = None
    rounding: CellCheck | None = None
    chunk_rows: tuple[int, ...] = ()
    why: str = ""
    catalog: Catalog | None = field(default=None, repr=False)
    fqn: str | None = None
    again: Callable[[Progress | None], Comparison | None] | None = field(default=None, repr=False)
    sides: Callable[[], tuple[LazyTensor, LazyTensor]] | None = field(default=None, repr=False)

    @cached_property
    def detail(self) -> Comparison | None:
        """The comparison with histograms of ulps and |δ|; reads the tensor again.

        Raises:
            OpenError: the tensor can no longer be read.
        """
        return self._detail(None)

    def look(self, progress: Progress) -> Comparison | None:
        """Return :attr:`detail`; ``progress`` is called with the fraction done and may raise to cancel."""
        if "detail" not in self.__dict__:
            self.__dict__["detail"] = self._detail(progress)
        return self.detail

    def _detail(self, progress: Progress | None) -> Comparison | None:
        c = self.comparison
        if c is None or not c.changed or self.again is None or c.octaves is not None:
            return c
        return self.again(progress)

    @classmethod
    def of(cls, pair: TensorPair, b: Checkpoint, **known: Any) -> TensorDiff:
        """Create a row from the catalogs, with other fields that are known; nothing is read."""
        p, q, t, u = pair.a.catalog, b.catalog, pair.tensor_a, pair.tensor_b
        shapes = p.shape_of(t), q.shape_of(u)
        dtypes = p.dtype_of(t).name, q.dtype_of(u).name
        status = "shape" if shapes[0] != shapes[1] else "type" if dtypes[0] != dtypes[1] else "unread"
        return cls(
            pair.keys_a,
            pair.key_b,
            pair.by,
            b.roles[u],
            *dtypes,
            *shapes,
            int(q.numel[u]),
            int(q.tensor_nbytes[u]),
            status,
            catalog=q,
            fqn=b.fqns[u],
            **known,
        )

    @property
    def key_a(self) -> str:
        """The name of the first side, for display."""
        return " + ".join(self.keys_a)

    @property
    def differs(self) -> bool:
        """Whether this is a difference. A different name is a difference, a different place is not."""
        return self.status in DIFFERENT or self.by == RENAMED

    @property
    def share(self) -> float | None:
        """Share of changed elements."""
        c = self.comparison
        return None if c is None or not c.seen else c.changed / c.seen

    def weight(self) -> tuple[int, float, float]:
        """Return the sort key of a table: other shapes first, then relative L2, then the share of changes."""
        c = self.comparison
        known = None if c is None else c.rel_l2
        relative = -1.0 if known is None else known
        if c is not None and c.nan_new:
            relative = math.inf
        return int(self.status == "shape"), relative, self.share or 0.0

    def compared(
        self,
        found: Comparison | None,
        why: str = "",
        again: Callable[[Progress | None], Comparison | None] | None = None,
    ) -> TensorDiff:
        """Return the row with the result of a comparison, and how it is made ``again``."""
        total = self.numel
        if found is not None and found.how == "raw":
            bits = by_name(self.dtype_b).bits
            total = (self.numel * bits + 7) // 8
        seen = 0 if found is None else found.seen
        if found is not None:
            found.unread = total - seen
        if self.status == "type":
            status = "type"
        elif found is not None and found.changed:
            status = "changed"
        else:
            status = "equal" if seen == total else "unread"
        if status == "unread" and not why:
            why = f"{total - seen:,} of its {total:,} elements are not stored on both sides"
        rows = () if found is None else tuple(sorted({row for _, row in found.chunks}))
        return replace(self, status=status, comparison=found, chunk_rows=rows, why=why, again=again)

    def rounded(self, found: CellCheck) -> TensorDiff:
        """Return the row of a converted tensor with the check of its stored codes."""
        if found.seen < self.numel:
            return self
        return replace(self, status="changed" if found.beyond else "rounded", rounding=found)

    def row(self) -> dict[str, Any]:
        """Return the columns of :data:`COLUMNS`."""
        c = self.comparison
        dtype = self.dtype_b if self.dtype_a == self.dtype_b else f"{self.dtype_a} → {self.dtype_b}"
        shape: Any = self.shape_b if self.shape_a == self.shape_b else (self.shape_a, self.shape_b)
        found: dict[str, Any] = dict.fromkeys(COLUMNS)
        found |= {"key_a": self.key_a, "key_b": self.key_b, "by": self.by, "role": self.role, "dtype": dtype}
        found |= {"shape": shape, "numel": self.numel, "status": self.status, "source": self.source}
        found |= {"moved": self.moved, "pattern": self.pattern.name if self.pattern else None, "share": self.share}
        if c is not None:
            found |= {"changed": c.changed, "at": c.max_at, "nan_a": c.nan_a, "nan_b": c.nan_b, "nan_new": c.nan_new}
            for name in ("max_abs", "l2", "rel_l2", "cosine", "ulp_max"):
                found[name] = getattr(c, name)
        return found

    def to_dict(self, *, detail: bool = False) -> dict[str, Any]:
        """Return the row as plain JSON; ``detail`` adds histograms, for which the tensor is read again."""
        found = {name: _plain(value) for name, value in self.row().items()}
        found["pattern"] = None if self.pattern is None else self.pattern.to_dict()
        c = self.comparison
        if c is not None and c.changed:
            found |= {"same_number": c.same_number, "inf_a": c.inf_a, "inf_b": c.inf_b, "rounded": c.rounded}
            found["bands"] = None if c.bands is None else c.bands.tolist()
            found["values_there"] = [_plain(c.max_a), _plain(c.max_b)]
        if detail and (more := self.detail) is not None:
            found["ulps"] = None if more.ulps is None else np.trim_zeros(more.ulps, "b").tolist()
            found["tail"] = [list(point) for point in more.tail()]
        if self.rounding is not None:
            found["rounding"] = {
                "type": self.rounding.scheme,
                "beyond": self.rounding.beyond,
                "why": self.rounding.sentence,
            }
        if self.why:
            found["why"] = self.why
        if self.catalog is not None and self.chunk_rows:
            found["chunks"] = [_chunk(self.catalog, row) for row in self.chunk_rows[:1000]]
        return found


def tensor_table(rows: Iterable[TensorDiff]) -> pd.DataFrame:
    """Return the rows as a DataFrame with the columns of :data:`COLUMNS`."""
    import pandas as pd

    frame = pd.DataFrame([row.row() for row in rows], columns=list(COLUMNS))
    for name in ("numel", "changed", "ulp_max", "nan_a", "nan_b", "nan_new"):
        try:
            frame[name] = frame[name].astype("Int64")
        except OverflowError:  # distances of 64-bit floats
            continue
    for name in ("share", "l2", "rel_l2", "cosine"):
        frame[name] = frame[name].astype("float64")
    return frame


def chunk_table(rows: Sequence[TensorDiff]) -> pd.DataFrame:
    """Return the changed chunks of the second side."""
    import pandas as pd

    found = []
    for row in rows:
        counts: dict[int, int] = {}
        if row.comparison is not None:
            for (_, at), count in row.comparison.chunks.items():
                counts[at] = counts.get(at, 0) + count
        for at in row.chunk_rows:
            assert row.catalog is not None
            found.append({"key": row.key_b, **_chunk(row.catalog, at), "changed": counts.get(at)})
    frame = pd.DataFrame(found, columns=["key", "offsets", "sizes", "file", "rank", "changed"])
    frame["changed"] = frame["changed"].astype("Int64")
    return frame


def _chunk(catalog: Catalog, row: int) -> dict[str, Any]:
    dims = int(catalog.ndim[catalog.tensor[row]])
    rank = int(catalog.rank[row])
    return {
        "offsets": tuple(catalog.offsets[row, :dims].tolist()),
        "sizes": tuple(catalog.sizes[row, :dims].tolist()),
        "file": catalog.files[catalog.file[row]],
        "rank": rank if rank >= 0 else None,
    }


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
