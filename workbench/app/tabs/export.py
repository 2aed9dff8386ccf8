"""The *Export* tab: choose tensors, format, mesh and dtypes; preview the export; write it, with proof.

::

    tensors   format   mesh   dtypes   names   target
    dry run   figures, files and their contents
    command   the same for a shell              ◄── ends here unless the server may write (--allow-export)
    Export    progress, cancel ──► proof
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.exporting import CASTS, NAMES, ROLES, TARGETS, ExportChoice
from workbench.app.jobs import Progress
from workbench.app.tabs.export_device import OnDevice, devices
from workbench.app.tabs.export_view import ExportView, proof
from workbench.app.tabs.tab import Tab
from workbench.app.words import html
from workbench.app.work import JobButton
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.export.report import ExportReport

AT_ONCE = 20_000  #: chunks up to which a dry run starts automatically
CHOSEN = ("role", "pattern", "target", "mesh", "cast", "rename", "into")
COMMAND = (
    "user-select: all; white-space: pre-wrap; overflow-x: auto; padding: 6px 10px; margin: 4px 0; "
    "border: 1px solid currentColor; border-radius: 4px"
)
READ_ONLY = (
    "This server does not write: it was started without --allow-export. To export, run this command in a shell, in the "
    "folder that is served."
)


class Export(Tab):
    """Connects the choices to :class:`ExportChoice`; the plan is kept until a choice changes."""

    key = "export"
    follows = ("ckpt", *CHOSEN)

    def build(self) -> None:
        self.plan: ExportReport | None = None
        self.view: ExportView | None = None
        self._filling = False
        self._selects = {
            "role": self._select("role", "Tensors", ROLES),
            "target": self._select("target", "Format", {}),
            "cast": self._select("cast", "Dtype", CASTS),
            "rename": self._select("rename", "Names", NAMES),
        }
        self._texts = {
            "pattern": self._text("pattern", "Filter names", "regular expression"),
            "mesh": self._text("mesh", "Mesh, outermost axis first", "tp=2,pp=2; empty: not sharded"),
            "into": self._text("into", f"Target, relative to {self.state.outlet}", ""),
        }
        self.overwrite = pmui.Checkbox(label="Overwrite an existing checkpoint", size="small")
        self.verify = pmui.Checkbox(label="Read back and verify before renaming into place", value=True, size="small")
        for box in (self.overwrite, self.verify):
            box.param.watch(lambda _: self._again(), "value")
        self.dry = JobButton("Dry run", self._plan, self._planned, verb="planning", schedule=self.schedule)
        self.work = JobButton(
            "Export", self._write, self._written, verb="writing", ready=self._why_not, schedule=self.schedule, long=True
        )
        self._words, self._command, self._proof = style.pane(""), style.pane(""), style.pane("")
        self._result = pn.Column(sizing_mode="stretch_width")
        self._device = OnDevice(self.state, self.schedule)
        order = ("role", "pattern", "target", "mesh", "cast", "rename", "into")
        widgets = {**self._selects, **self._texts}
        self._controls = [
            style.two_columns(*(widgets[name] for name in order), least=280),
            pn.FlexBox(self.overwrite, self.verify, sizing_mode="stretch_width"),
        ]

    def draw(self) -> None:
        ckpt = self.state.ckpt
        self._drop()
        if ckpt is None:
            self.body[:] = []
            return
        self._fill()
        self.body[:] = [*self._controls, self._words, self._command, self.dry, self._result]
        if ckpt.catalog.chunks <= AT_ONCE:
            self.dry.start()

    def close(self) -> None:
        self.dry.reset()
        self.work.reset()
        self._device.close()

    # ---- choices -----------------------------------------------------------------------------------------------------

    def _select(self, name: str, label: str, options: Mapping[str, str]) -> pmui.Select:
        made = pmui.Select(
            label=label,
            options={title: word for word, title in options.items()},
            size="small",
            sizing_mode="stretch_width",
            margin=(8, 10),
        )
        made.param.watch(lambda event: self._set(name, event.new), "value")
        return made

    def _text(self, name: str, label: str, hint: str) -> pmui.TextInput:
        made = pmui.TextInput(label=label, placeholder=hint, size="small", sizing_mode="stretch_width", margin=(8, 10))
        made.param.watch(lambda event: self._set(name, event.new), "value")
        return made

    def _set(self, name: str, value: str | None) -> None:
        if not self._filling:
            self.state.param.update(**{name: value or ""})

    def _fill(self) -> None:
        """Update the widgets from the state; an unknown value from a link is shown unchanged, and refused."""
        state = self.state
        assert state.ckpt is not None
        self._filling = True
        try:
            first = next(iter(TARGETS))
            known = {
                "role": ROLES | {role: role for role in sorted(set(state.ckpt.roles))},
                "target": {"" if word == first else word: title for word, title in TARGETS.items()},
                "cast": CASTS,
                "rename": NAMES,
            }
            for name, widget in self._selects.items():
                value = getattr(state, name)
                value = "" if name == "target" and value == first else value
                titles = known[name] if value in known[name] else {**known[name], value: value}
                widget.param.update(options={title: word for word, title in titles.items()}, value=value)
            for name, text in self._texts.items():
                text.value = getattr(state, name)
            self._texts["into"].placeholder = self._choice().into
        finally:
            self._filling = False
        command = self._choice().command(state.outlet)
        words = " ".join(f'<span style="white-space: nowrap">{html(word)}</span>' for word in command.split(" "))
        self._words.object = "" if state.outlet.open else style.message(READ_ONLY)
        self._command.object = (
            f'<pre class="name command" tabindex="0" aria-label="command" title="click to select all" '
            f'style="{COMMAND}">{words}</pre>'
        )

    def _choice(self) -> ExportChoice:
        return ExportChoice.of(self.state, overwrite=bool(self.overwrite.value), verify=bool(self.verify.value))

    def _again(self) -> None:
        if self.state.ckpt is not None and self.state.tab == self.key:
            self.draw()

    def _drop(self) -> None:
        """Drop the plan of other choices; a running write stops and leaves nothing behind."""
        self.dry.reset()
        self.work.reset()
        self.plan, self._result[:], self._proof.object = None, [], ""

    # ---- work --------------------------------------------------------------------------------------------------------

    def _plan(self, progress: Progress) -> tuple[ExportReport, list[str]]:
        state = self.state
        if state.ckpt is None:
            raise UsageError("the checkpoint is no longer open")
        return self._choice().run(state.ckpt, state.outlet, progress, dry_run=True), devices()

    def _planned(self, found: tuple[ExportReport, list[str]]) -> None:
        self.plan, devices = found
        self.view = ExportView(self.plan, where=self._where(), file=f"{self.state.path}-export")
        parts = [*([self.work, self._proof] if self.state.outlet.open else []), self.view]
        if devices:
            self._device.offer(self.plan, devices)
            parts.append(self._device)
        self._result[:] = parts

    def _why_not(self) -> str:
        return "" if self.plan is not None else "make a dry run first; it shows what would be written"

    def _write(self, progress: Progress) -> tuple[ExportReport, tuple[str, str] | None]:
        """Write with a separate hold: switching to another checkpoint meanwhile must not close this one."""
        state, choice = self.state, self._choice()
        lease = state.hold(choice.path)
        try:
            report = choice.run(lease.checkpoint, state.outlet, progress)
            return report, _manifest(report)
        finally:
            lease.release()

    def _written(self, found: tuple[ExportReport, tuple[str, str] | None]) -> None:
        report, manifest = found
        self._proof.object = proof(report, self._where(), manifest)
        self.view = ExportView(report, where=self._where(), file=f"{self.state.path}-export")
        self._result[2] = self.view  # now with fingerprints, for download

    def _where(self) -> str:
        outlet = self.state.outlet
        return outlet.shown(outlet.folder / self._choice().into)


def _manifest(report: ExportReport) -> tuple[str, str] | None:
    """Return the name and verified digest of the manifest written."""
    import os

    from workbench.analysis.manifest_file import INSIDE, read

    path = os.path.join(report.path, INSIDE)
    if not os.path.isfile(path):
        return None
    read(path)  # raises if its digest does not match its bytes
    with open(path, "rb") as handle:
        tail = handle.read()[-64:]
    return INSIDE, tail.rsplit(b'"', 2)[1].decode("ascii")
