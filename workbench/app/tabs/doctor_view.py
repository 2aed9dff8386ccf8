"""The view of a diagnosis; the *Doctor* tab connects it to the page, a notebook shows it directly.

::

    verdict · causes (first one open) · ruled out · not checked · facts and their sources
    pictures, read in a job, one pane each
    signs: a table; the clicked sign      downloads: page, JSON, CSV
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import panel as pn

from workbench.app import style
from workbench.app.jail import relative_html
from workbench.app.jobs import Progress, Schedule
from workbench.app.save import csv_button, json_button, text_button
from workbench.app.tabs.report_view import Findings, finding_frame
from workbench.app.work import JobButton
from workbench.doctor.reasoning.diagnosis import Diagnosis
from workbench.views.doctor_html import diagnosis_html, diagnosis_page
from workbench.views.doctor_pictures import doctor_drawers

AT_ONCE = 256 << 20  #: bytes of a checkpoint up to which its pictures are read automatically
PAGE = 8


class DiagnosisView(pn.viewable.Viewer):
    """A diagnosis with its pictures, which are read from the checkpoints; these must stay open.

    Attributes:
        diagnosis: the diagnosis on display.
        pictures: name → element, for the pictures drawn.

    Args:
        names: path of a checkpoint → name to show instead.
        file: base name of downloads.
        schedule: runs a callback on the page's thread.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        *,
        names: Mapping[str, str] | None = None,
        file: str = "diagnosis",
        schedule: Schedule | None = None,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.diagnosis = d = renamed(diagnosis, names or {})
        self.pictures: dict[str, Any] = {}
        self.work = JobButton("Draw the pictures", self._read, self._draw, verb="reading", schedule=schedule)
        self._drawn = pn.Column(sizing_mode="stretch_width")
        self._signs = [style.pane("<h3>Signs</h3>"), Findings(tuple(d), PAGE)] if d else []
        saves = pn.FlexBox(
            text_button(f"{file}.html", lambda: diagnosis_page(d, self.pictures), "page"),
            json_button(file, d.to_dict),
            csv_button(file, lambda: finding_frame(d), "CSV of signs"),
            margin=(0, 5),
        )
        drawable = [style.pane("<h3>Pictures</h3>"), self.work, self._drawn] if d.pictured.get("evidence") else []
        self._body = pn.Column(
            style.pane(_verdict(d) + relative_html(diagnosis_html(d, brief=True))),
            saves,
            *drawable,
            *self._signs,
            sizing_mode="stretch_width",
        )
        if drawable and _size(d) <= AT_ONCE:
            self.work.start()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def close(self) -> None:
        """Stop reading."""
        self.work.reset()

    def _read(self, progress: Progress) -> dict[str, Callable[[], Any]]:
        found = doctor_drawers(self.diagnosis)
        progress(1.0)
        return found

    def _draw(self, drawers: dict[str, Callable[[], Any]]) -> None:
        self.pictures = {name: draw() for name, draw in drawers.items()}
        panes = [
            pn.pane.HoloViews(picture, linked_axes=False, sizing_mode="stretch_width", margin=(5, 10))
            for picture in self.pictures.values()
        ]
        none = style.pane('<p class="muted">There is nothing to draw from this evidence.</p>')
        self._drawn[:] = panes or [none]
        self.work.button.visible = not panes


def renamed(d: Diagnosis, names: Mapping[str, str]) -> Diagnosis:
    """Rename the checkpoints of a diagnosis, for example to their paths under ROOT."""

    def renamed_words(words: str) -> str:
        for path, name in names.items():
            words = words.replace(path, name)
        return words

    return replace(
        d,
        subject=names.get(d.subject, d.subject),
        subjects=tuple(replace(one, path=names.get(one.path, one.path)) for one in d.subjects),
        verdict=renamed_words(d.verdict),
        checked={rule: renamed_words(words) for rule, words in d.checked.items()},
        not_checked={rule: renamed_words(words) for rule, words in d.not_checked.items()},
    )


def _verdict(d: Diagnosis) -> str:
    return style.message(d.verdict, {"error": "error", "warn": "warning"}.get(d.worst or "", "info"))


def _size(d: Diagnosis) -> int:
    return int(d.pictured["evidence"].before.ckpt.catalog.tensor_nbytes.sum())
