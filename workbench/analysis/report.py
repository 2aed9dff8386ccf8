"""The result of a check, as data: findings, what was checked and what was not.

::

    rule             severity  where              message                          evidence        hint
    coverage.hole    error     'layers.3.wq'      rows 512:1024 are stored nowhere {"box": […]}    restore rank 2's file
    …
    checked       {"ranges": "6,482 byte ranges inside 16 files", …}
    not_checked   {"values": "payloads were not read; verify with deep=True"}

A report never says "ok": it lists what was checked, and what was not and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from workbench.core.shown import Shown, above
from workbench.errors import bounded

if TYPE_CHECKING:
    import pandas as pd
    from panel.viewable import Viewer

SEVERITIES = ("error", "warn", "info")
COLUMNS = ("rule", "severity", "where", "message", "evidence", "hint")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        rule: dotted name of the rule, stable: ``coverage.hole``.
        severity: ``error`` (the checkpoint cannot be trusted), ``warn`` (unusual, may be intended), ``info``.
        where: the tensor, file or object concerned.
        message: one sentence with the numbers in it.
        evidence: the same numbers, of JSON's types only: file, byte range, box, counts.
        hint: the remedy.
    """

    rule: str
    severity: str
    where: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", bounded(self.message))


@dataclass(frozen=True, eq=False, repr=False)
class Report(Shown):
    """The result of a check: a sequence of :class:`Finding`, errors first, with a table of the same.

    Attributes:
        subject: path of the checkpoint checked.
        checked: what was checked: name → sentence with counts.
        not_checked: what was not: name → why not, and how to check it.
    """

    subject: str
    _found: tuple[Finding, ...]
    checked: Mapping[str, str]
    not_checked: Mapping[str, str]

    @classmethod
    def of(
        cls, subject: str, found: Iterable[Finding], checked: Mapping[str, str], not_checked: Mapping[str, str]
    ) -> Self:
        """Create a report from findings in any order."""
        ordered = sorted(found, key=lambda one: SEVERITIES.index(one.severity))
        return cls(subject, tuple(ordered), dict(checked), dict(not_checked))

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def __getitem__(self, at: int) -> Finding:
        return self._found[at]

    @property
    def findings(self) -> pd.DataFrame:
        """One row per finding: rule severity where message evidence hint."""
        import pandas as pd

        rows = [{name: getattr(one, name) for name in COLUMNS} for one in self]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    @property
    def worst(self) -> str | None:
        """The highest severity found, or ``None``."""
        return self[0].severity if self else None

    @property
    def exit_code(self) -> int:
        """0: nothing found, or only remarks; 1: warnings; 2: errors."""
        return {"error": 2, "warn": 1}.get(self.worst or "", 0)

    def count(self, severity: str) -> int:
        """Return the number of findings of one severity."""
        return sum(one.severity == severity for one in self)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain JSON: ``subject findings checked not_checked``."""
        rows = [{name: getattr(one, name) for name in COLUMNS} for one in self]
        return {
            "subject": self.subject,
            "findings": rows,
            "checked": dict(self.checked),
            "not_checked": dict(self.not_checked),
        }

    def view(self) -> Viewer:
        """Return the view of the dashboard's tab for a notebook cell: tables, pictures, downloads."""
        return cast("Viewer", above(self, "view")(self))
