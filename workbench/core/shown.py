"""How a result finds its view: by a dotted name, so no package imports one above it.

::

    repr(report) ──▶ Shown.__repr__ ──▶ ABOVE["Report"]["text"] ──▶ workbench.views.report.report_text(report)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Class → functions of higher packages that show it as text, HTML or a widget, or do its work.
ABOVE: dict[str, dict[str, str]] = {
    "Budget": {"text": "views.budget:budget_text", "html": "views.budget:budget_html"},
    "Checkpoint": {
        "text": "views.text:checkpoint_text",
        "html": "views.html:checkpoint_html",
        "view": "app.cell:view",
        "to_device": "load.device:to_device",
        "followed": "views.progress:followed",
    },
    "Diagnosis": {
        "text": "views.doctor:diagnosis_text",
        "html": "views.doctor_html:diagnosis_html",
        "view": "app.tabs.doctor_view:DiagnosisView",
    },
    "Diff": {
        "text": "views.diff:diff_text",
        "html": "views.diff:diff_html",
        "view": "app.tabs.diff_view:DiffView",
    },
    "ExportReport": {"html": "views.export:export_html"},
    "Layout": {
        "text": "views.layout:layout_text",
        "html": "views.layout:layout_html",
        "view": "app.tabs.layout:LayoutView",
    },
    "LazyTensor": {"text": "views.text:tensor_line", "html": "views.html:tensor_html"},
    "Report": {
        "text": "views.report:report_text",
        "html": "views.report:report_html",
        "view": "app.tabs.report_view:ReportView",
    },
    "Run": {
        "text": "views.run:run_text",
        "html": "views.run_html:run_html",
        "plot": "views.run_plot:run_plot",
        "to_html": "views.run_html:write_run",
        "view": "app.cell:view_run",
        "diagnose": "doctor.of_run:diagnose_run",
    },
    "RunComparison": {
        "text": "views.run:comparison_text",
        "plot": "views.run_plot:run_plot",
        "view": "app.cell:view_runs",
    },
    "SavePhases": {"text": "views.phases:phases_text", "html": "views.phases:phases_html"},
    "TensorDiff": {"text": "views.diff:tensor_text"},
    "Watcher": {"doctor": "doctor.examine:doctor"},
}


def above(owner: object, what: str) -> Any:
    """Return the function of a higher package that shows an object or does its work; ``None`` if none is listed."""
    for one in type(owner).__mro__:
        if target := ABOVE.get(one.__name__, {}).get(what):
            module, _, name = target.partition(":")
            return getattr(import_module(f"workbench.{module}"), name)
    return None


class Shown:
    """A result with a text and, if it has one, a picture in notebooks. Dataclasses need ``repr=False``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(above(self, "text")(self))

    def _repr_html_(self) -> str | None:
        show = above(self, "html")
        return None if show is None else str(show(self))
