"""*Will it fit?*: number and memory of GPUs, and fixed sizes; the smallest layout that fits, rank by rank."""

from __future__ import annotations

import math
from typing import Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jobs import Progress
from workbench.app.save import csv_button, json_button
from workbench.app.tabs.layout_parts import LayoutPart
from workbench.app.words import html
from workbench.app.work import JobButton
from workbench.errors import UsageError
from workbench.memory import Budget, Precision, plan_memory
from workbench.views import budget_pictures
from workbench.views.budget import headline

SIZES = ("tp", "pp", "dp", "ep")
WEIGHTS = ("stored", "fp32", "bf16", "fp16", "fp8")
USES = {"training, Adam": "train", "inference": "infer"}
#: Fields of a link, with their defaults.
DEFAULTS: dict[str, str] = {
    "gpus": "8",
    "gb": "80",
    "reserve": "0",
    **dict.fromkeys(SIZES, ""),
    "stage": "",
    "weights": "stored",
    "use": "train",
}
CHOICES: dict[str, tuple[str, str, int | None]] = {
    "gpus": ("GPUs", "count", 65),
    "tp": ("tp", "count", 50),
    "pp": ("pp", "count", 50),
    "dp": ("dp", "count", 50),
    "ep": ("ep", "count", 50),
    "stage": ("Stage", "count", 60),
    "fits": ("Fits", "text", 60),
    "largest": ("Largest rank", "bytes", 115),
    "mean": ("Mean", "bytes", 95),
    "weights": ("Weights", "bytes", 95),
    "grads": ("Gradients", "bytes", 95),
    "master": ("Masters", "bytes", 95),
    "moments": ("Moments", "bytes", 95),
}
LISTED = 500


class FitPart(LayoutPart):
    """The planner of :func:`workbench.plan_memory` as a job."""

    follows = ("fit",)

    def build(self) -> None:
        small: dict[str, Any] = {"size": "small", "margin": (8, 6)}
        given = asked(self.view.fit)
        self._of: dict[str, Any] = {
            "gpus": pmui.TextInput(label="GPUs", width=90, **small),
            "gb": pmui.TextInput(label="GB each", width=90, **small),
            "reserve": pmui.TextInput(label="GB reserved", width=100, **small),
            **{name: pmui.TextInput(label=name, placeholder="any", width=70, **small) for name in SIZES},
            "stage": pmui.Select(label="Stage", options={"any": "", **{n: n for n in "0123"}}, width=85, **small),
            "weights": pmui.Select(label="Weights", options=list(WEIGHTS), width=110, **small),
            "use": pmui.Select(label="For", options=USES, width=150, **small),
        }
        self._fill(given)
        about = (
            '<p class="muted">The checkpoint\'s own tensors are sharded by tp × pp × dp × ep and a stage, rank '
            "by rank. All values of an empty size are tried. Stage 1 shards moments and masters over dp, stage 2 also "
            "gradients, stage 3 also weights.</p>"
        )
        self.work = JobButton("Find a layout", self._plan, self._done, verb="trying", schedule=self.view.schedule)
        self.work.button.on_click(lambda _: None)
        self.budget: Budget | None = None
        self._asked = ""
        self._result = pn.Column(sizing_mode="stretch_width")
        self.body[:] = [style.pane(about), pn.FlexBox(*self._of.values()), self.work, self._result]

    def draw(self) -> None:
        """Plan the request of a link immediately and update the controls."""
        if self.view.fit and self.view.fit != self._asked:
            self._fill(asked(self.view.fit))
            self.work.start()

    def _fill(self, given: dict[str, str]) -> None:
        for name, widget in self._of.items():
            options = getattr(widget, "options", None)
            allowed = None if options is None else list(options.values() if isinstance(options, dict) else options)
            widget.value = given[name] if allowed is None or given[name] in allowed else DEFAULTS[name]

    def _plan(self, progress: Progress) -> tuple[str, Budget]:
        values = {name: str(widget.value or "").strip() for name, widget in self._of.items()}
        numbers: dict[str, Any] = {name: _whole(values[name], name) for name in (*SIZES, "stage") if values[name]}
        gpus, memory, reserve = _whole(values["gpus"], "GPUs"), _number(values["gb"]), _number(values["reserve"] or "0")
        weights = values["weights"]
        precision = Precision.inference(weights) if values["use"] == "infer" else Precision(weights)
        source = self.view.source if self.view.source is not None else self.found
        made = plan_memory(source, gpus, memory, reserve_gb=reserve, precision=precision, progress=progress, **numbers)
        return request_of(values), made

    def _done(self, result: tuple[str, Budget]) -> None:
        self._asked, found = result
        self.budget = found
        self.set(fit=self._asked)
        _, words = budget_pictures.bars(found)
        kind = "info" if found.fits else "warning"
        line = headline(found)
        notes = "".join(f"<li>{html(note)}</li>" for note in found.notes)
        table = found.frame().head(LISTED)
        table["fits"] = ["yes" if fits else "no" for fits in table["fits"]]
        many = len(found.choices)
        self._result[:] = [
            style.pane(
                f"{style.message(line, kind)}<h3>{html(found.chosen)}, rank by rank</h3><p class='muted'>{words}</p>"
            ),
            pn.pane.HoloViews(budget_pictures.budget_picture(found), linked_axes=False, sizing_mode="stretch_width"),
            style.pane(f"<h3>Layouts tried</h3><p class='muted'>{many:,}; those that fit come first.</p>"),
            style.table(table, CHOICES, page_size=10),
            style.pane(f"<ul>{notes}</ul>"),
            pn.FlexBox(
                csv_button(f"{self.view.file}-fit", found.frame, "CSV of layouts"),
                csv_button(f"{self.view.file}-fit-ranks", lambda: found.ranks, "CSV of ranks"),
                json_button(f"{self.view.file}-fit", lambda: _plain(found.to_dict())),
            ),
        ]


def asked(text: str) -> dict[str, str]:
    """Parse the request of a link: ``gpus=8,gb=80,tp=2``; missing or unknown fields are as in :data:`DEFAULTS`."""
    given = dict(DEFAULTS)
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() in given and len(value) <= 16:
            given[name.strip()] = value.strip()
    return given


def request_of(values: dict[str, str]) -> str:
    """Return the request in the form of a link; GPUs and memory are always included."""
    return ",".join(f"{n}={v}" for n, v in values.items() if n in ("gpus", "gb") or v != DEFAULTS[n])


def _whole(text: str, what: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) < 8):
        raise UsageError(f"{text!r} is not a whole number of {what}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number of GB") from None
    if not (math.isfinite(value) and 0 <= value <= 1e6):
        raise UsageError(f"{text!r} GB is not a possible GPU memory size")
    return value


def _plain(document: Any) -> Any:
    """Convert pandas and NumPy numbers to Python numbers."""
    if isinstance(document, dict):
        return {str(name): _plain(value) for name, value in document.items()}
    if isinstance(document, list):
        return [_plain(value) for value in document]
    return document.item() if hasattr(document, "item") else document
