"""The *Export* tab: choose tensors, format, mesh and types; see what would be written; write it, with the proof.

::

    tensors   format   mesh   types   names   target
    dry run   figures, files, what each holds
    command   the same for a shell              ◄── all there is, unless the server may write (--allow-export)
    Export    progress, cancel ──► proof
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.exporting import CASTS, NAMES, ROLES, TARGETS, Choice
from workbench.app.jobs import Tick
from workbench.app.tabs.export_device import OnDevice, devices
from workbench.app.tabs.export_view import ExportView, proof
from workbench.app.tabs.tab import Tab
from workbench.app.words import html
from workbench.app.work import Work
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.reshard.report import ExportReport

__all__ = ["Export"]

AT_ONCE = 20_000  #: chunks up to which a dry run is made without being asked
CHOSEN = ("role", "pattern", "target", "mesh", "cast", "rename", "into")
COMMAND = (
    "user-select: all; white-space: pre-wrap; overflow-x: auto; padding: 6px 10px; margin: 4px 0; "
    "border: 1px solid currentColor; border-radius: 4px"
)
READ_ONLY = (
    "This server writes nothing: it was started without --allow-export. The command does the same in a shell, in the "
    "folder that is served."
)


class Export(Tab):
    """Wires the choices to :class:`Choice`; a plan is kept while nothing of it changes."""

    key = "export"
    follows = ("ckpt", *CHOSEN)

    def build(self) -> None:
        self.plan: ExportReport | None = None
        self.view: ExportView | None = None
        self._filling = False
        self._selects = {
            "role": self._select("role", "Tensors", ROLES),
            "target": self._select("target", "Format", {}),
            "cast": self._select("cast", "Element type", CASTS),
            "rename": self._select("rename", "Names", NAMES),
        }
        self._texts = {
            "pattern": self._text("pattern", "Only names that match", "regular expression"),
            "mesh": self._text("mesh", "Mesh, outermost axis first", "tp=2,pp=2; empty: whole"),
            "into": self._text("into", f"Target, relative to {self.state.outlet}", ""),
        }
        self.overwrite = pmui.Checkbox(label="Replace a checkpoint that has the name", size="small")
        self.verify = pmui.Checkbox(label="Read it again before it gets its name", value=True, size="small")
        for box in (self.overwrite, self.verify):
            box.param.watch(lambda _: self._again(), "value")
        self.dry = Work("Dry run", self._plan, self._planned, verb="planning", schedule=self.schedule)
        self.work = Work(
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
            label=label, options={title: word for word, title in options.items()}, size="small",
            sizing_mode="stretch_width", margin=(8, 10),
        )  # fmt: skip
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
        """Bring the widgets in line with the state; a word that a link made up is offered as it is, and refused."""
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
            f'<pre class="name command" tabindex="0" aria-label="the command" title="a click selects all of it" '
            f'style="{COMMAND}">{words}</pre>'
        )

    def _choice(self) -> Choice:
        return Choice.of(self.state, overwrite=bool(self.overwrite.value), verify=bool(self.verify.value))

    def _again(self) -> None:
        if self.state.ckpt is not None and self.state.tab == self.key:
            self.draw()

    def _drop(self) -> None:
        """What was planned is of other choices; what is being written stops, and leaves nothing."""
        self.dry.reset()
        self.work.reset()
        self.plan, self._result[:], self._proof.object = None, [], ""

    # ---- work --------------------------------------------------------------------------------------------------------

    def _plan(self, tick: Tick) -> tuple[ExportReport, list[str]]:
        state = self.state
        if state.ckpt is None:
            raise UsageError("the checkpoint is not open any more")
        return self._choice().run(state.ckpt, state.outlet, tick, dry_run=True), devices()

    def _planned(self, found: tuple[ExportReport, list[str]]) -> None:
        self.plan, there = found
        self.view = ExportView(self.plan, where=self._where(), file=f"{self.state.path}-export")
        parts = [*([self.work, self._proof] if self.state.outlet.open else []), self.view]
        if there:
            self._device.offer(self.plan, there)
            parts.append(self._device)
        self._result[:] = parts

    def _why_not(self) -> str:
        return "" if self.plan is not None else "make the dry run first; it says what would be written"

    def _write(self, tick: Tick) -> tuple[ExportReport, tuple[str, str] | None]:
        """With a hold of its own: who turns to another checkpoint meanwhile must not close this one under it."""
        state, choice = self.state, self._choice()
        lease = state.hold(choice.path)
        try:
            report = choice.run(lease.checkpoint, state.outlet, tick)
            return report, _manifest(report)
        finally:
            lease.release()

    def _written(self, found: tuple[ExportReport, tuple[str, str] | None]) -> None:
        report, manifest = found
        self._proof.object = proof(report, self._where(), manifest)
        self.view = ExportView(report, where=self._where(), file=f"{self.state.path}-export")
        self._result[2] = self.view  # now with fingerprints, to download

    def _where(self) -> str:
        outlet = self.state.outlet
        return outlet.shown(outlet.folder / self._choice().into)


def _manifest(report: ExportReport) -> tuple[str, str] | None:
    """Name and own digest of the manifest that was written, checked."""
    import os

    from workbench.analysis.manifest_file import INSIDE, read

    path = os.path.join(report.path, INSIDE)
    if not os.path.isfile(path):
        return None
    read(path)  # raises where its digest is not that of its bytes
    with open(path, "rb") as handle:
        tail = handle.read()[-64:]
    return INSIDE, tail.rsplit(b'"', 2)[1].decode("ascii")
