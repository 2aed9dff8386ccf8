"""The result of comparing two checkpoints: one row per pair of tensors, unpaired tensors, what was not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from workbench.analysis.diff_objects import ObjectChange
from workbench.analysis.diff_pairs import RENAMED
from workbench.analysis.diff_rows import TensorDiff, chunk_table, tensor_table
from workbench.core.shown import Shown, above
from workbench.errors import TensorNotFoundError

if TYPE_CHECKING:
    import pandas as pd
    from panel.viewable import Viewer


@dataclass(frozen=True, eq=False, repr=False)
class Diff(Shown):
    """The differences between two checkpoints.

    Attributes:
        a, b: paths.
        formats: formats of ``a`` and ``b``.
        steps: steps of ``a`` and ``b``; ``None`` if not stored.
        rows: one per pair of tensors, in the order of ``b``.
        added, removed: keys only in ``b``, only in ``a`` → the reason, if known.
        objects: changes in non-tensor state.
        values: whether payloads were compared; if not, rows are based on evidence and may be ``unknown``.
        notes: sentences on decisions and ambiguities.
        checked, not_checked: what was checked, and what was not and why.
        skipped: objects and unlistable tensors that were not compared; each is also in ``not_checked``.
    """

    a: str
    b: str
    formats: tuple[str, str]
    steps: tuple[int | None, int | None]
    rows: tuple[TensorDiff, ...]
    added: Mapping[str, str]
    removed: Mapping[str, str]
    objects: tuple[ObjectChange, ...]
    values: bool
    notes: tuple[str, ...] = ()
    checked: Mapping[str, str] = field(default_factory=dict)
    not_checked: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[ObjectChange, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs, among what could be compared (see ``not_checked``)."""
        return not (self.added or self.removed or self.objects or any(row.differs for row in self.rows))

    @property
    def exit_code(self) -> int:
        """0: nothing differs; 1: something differs, or could not be compared."""
        return 0 if self.same and not (self.count("unread") or self.count("unknown") or self.skipped) else 1

    def count(self, status: str) -> int:
        """Return the number of pairs with a status: ``equal rounded changed type shape unknown unread``."""
        return self._counts[status]

    @cached_property
    def summary(self) -> dict[str, int]:
        """Counts of pairs by status, then of added removed renamed moved objects."""
        names = ("equal", "rounded", "changed", "type", "shape", "unknown", "unread")
        return {
            **{name: self.count(name) for name in names},
            "added": len(self.added),
            "removed": len(self.removed),
            "renamed": sum(row.by == RENAMED for row in self.rows),
            "moved": sum(bool(row.moved) for row in self.rows),
            "objects": len(self.objects),
        }

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """One row per pair: key_a key_b by role dtype shape numel status source changed share max_abs at l2 rel_l2
        cosine ulp_max nan_a nan_b nan_new pattern moved, those that differ most first.
        """
        return tensor_table(self.changed_rows + [row for row in self.rows if not row.differs])

    @cached_property
    def chunks(self) -> pd.DataFrame:
        """One row per changed chunk of ``b``: key offsets sizes file rank changed (elements; <NA> if not read)."""
        return chunk_table(self.rows)

    @cached_property
    def changed_rows(self) -> list[TensorDiff]:
        """Rows that differ: by relative change, largest first, then rows without one."""
        return sorted((row for row in self.rows if row.differs), key=TensorDiff.weight, reverse=True)

    def tensor(self, key: str) -> TensorDiff:
        """Return the row of a key of ``b``, or of ``a``; its ``detail`` has histograms and bands.

        Raises:
            TensorNotFoundError: no pair has that key.
        """
        for row in self.rows:
            if row.key_b == key:
                return row
        for row in self.rows:
            if key in row.keys_a:
                return row
        where = "a" if key in self.removed else "b" if key in self.added else ""
        raise TensorNotFoundError(f"{key!r} is only in {where}" if where else f"no tensor {key!r} on either side")

    def view(self) -> Viewer:
        """Return the pictures and tables of the dashboard's Diff tab for a notebook; both checkpoints stay open."""
        return cast("Viewer", above(self, "view")(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain JSON, with equal tensors as a count."""
        return {
            "a": {"path": self.a, "format": self.formats[0], "step": self.steps[0]},
            "b": {"path": self.b, "format": self.formats[1], "step": self.steps[1]},
            "same": self.same,
            "summary": self.summary,
            "added": dict(self.added),
            "removed": dict(self.removed),
            "tensors": [row.to_dict() for row in self.changed_rows]
            + [row.to_dict() for row in self.rows if row.status in ("unread", "unknown")],
            "renamed": [[row.key_a, row.key_b] for row in self.rows if row.by == RENAMED],
            "rounded": {
                row.key_b: row.rounding.scheme for row in self.rows if row.status == "rounded" and row.rounding
            },
            "moved": [row.key_b for row in self.rows if row.moved],
            "objects": [vars(change) for change in self.objects],
            "values": self.values,
            "notes": list(self.notes),
            "checked": dict(self.checked),
            "not_checked": dict(self.not_checked),
        }

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(row.status for row in self.rows)
