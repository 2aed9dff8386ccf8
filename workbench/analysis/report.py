"""What a check found, as data: findings, and what was and was not looked at.

::

    rule             severity  where              message                          evidence        hint
    coverage.hole    error     'layers.3.wq'      rows 512:1024 are stored nowhere {"box": […]}    restore rank 2's file
    …
    checked       {"ranges": "6,482 byte ranges inside 16 files", …}
    not_checked   {"values": "payloads were not read; verify with deep=True"}

A report never says "ok": it says what was checked, and what not, and why not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import pandas as pd
    from panel.viewable import Viewer

__all__ = ["SEVERITIES", "Finding", "Report"]

SEVERITIES = ("error", "warn", "info")
COLUMNS = ("rule", "severity", "where", "message", "evidence", "hint")


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        rule: dotted name of the rule, stable: ``coverage.hole``.
        severity: ``error`` (the checkpoint cannot be trusted as it is), ``warn`` (odd, may be intended), ``info``.
        where: the tensor, file or object it is about.
        message: one sentence with the numbers in it.
        evidence: the same numbers, of JSON's types only: file, byte range, box, counts.
        hint: what to do.
    """

    rule: str
    severity: str
    where: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""


@dataclass(frozen=True, eq=False)
class Report:
    """The result of a check.

    Attributes:
        subject: path of what was checked.
        found: the findings, errors first.
        checked: what was looked at: name → sentence with its counts.
        not_checked: what was not: name → why not, and how it could be.
    """

    subject: str
    found: tuple[Finding, ...]
    checked: Mapping[str, str]
    not_checked: Mapping[str, str]

    @classmethod
    def of(
        cls, subject: str, found: Iterable[Finding], checked: Mapping[str, str], not_checked: Mapping[str, str]
    ) -> Self:
        """A report of findings in any order."""
        ordered = sorted(found, key=lambda one: SEVERITIES.index(one.severity))
        return cls(subject, tuple(ordered), dict(checked), dict(not_checked))

    @property
    def findings(self) -> pd.DataFrame:
        """One row a finding: rule severity where message evidence hint."""
        import pandas as pd

        rows = [{name: getattr(one, name) for name in COLUMNS} for one in self.found]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    @property
    def worst(self) -> str | None:
        """The gravest severity found, or ``None``."""
        return self.found[0].severity if self.found else None

    @property
    def exit_code(self) -> int:
        """0 nothing (or only remarks) found, 1 warnings, 2 errors."""
        return {"error": 2, "warn": 1}.get(self.worst or "", 0)

    def count(self, severity: str) -> int:
        """How many findings of one severity."""
        return sum(one.severity == severity for one in self.found)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON: ``subject findings checked not_checked``."""
        rows = [{name: getattr(one, name) for name in COLUMNS} for one in self.found]
        return {
            "subject": self.subject,
            "findings": rows,
            "checked": dict(self.checked),
            "not_checked": dict(self.not_checked),
        }

    def view(self) -> Viewer:
        """What the dashboard's tab shows of it, for a notebook's cell: tables, pictures, downloads."""
        from workbench.app.tabs.report_view import view_of

        return view_of(self)

    def __repr__(self) -> str:
        from workbench.views.report import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.report import report_html

        return report_html(self)
