"""The *Doctor* tab: why did the loss jump after a resume? The run was resumed from this checkpoint.

::

    before   this checkpoint
    after    the first one that the resumed run saved      ┐ under ROOT; steps of the same run come first
    echo     this one, saved again right after loading     ┘
    facts    β1 β2, lr, weight decay if not stored:       ?given=betas=0.9:0.95,lr=3e-4,wd=0.1
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import panel as pn
import panel_material_ui as pmui

from workbench.app import style
from workbench.app.jail import Jail
from workbench.app.jobs import Progress
from workbench.app.others import Others
from workbench.app.tabs.doctor_view import DiagnosisView
from workbench.app.tabs.tab import JobTab
from workbench.app.words import html
from workbench.core.remote.url import is_url
from workbench.errors import CorruptError, IncompleteError, MissingFileError, UsageError
from workbench.names.steps import step_of

if TYPE_CHECKING:
    from workbench.doctor.reasoning.diagnosis import Diagnosis

AT_ONCE = 256 << 20  #: bytes of the checkpoint up to which a diagnosis from a link starts automatically
OTHERS = {
    "other": ("After", "the first checkpoint that the resumed run saved; the earlier, the more certain"),
    "echo": ("Echo", "this checkpoint, saved again right after loading, before any update"),
}
NONE = "none"
FACTS = {"betas": "β1 and β2, as 0.9:0.95", "lr": "Learning rate", "wd": "Weight decay"}
QUICK = "quick"  #: in ``given``: do not read weights and moments
EMPTY = """
<p>Before is <span class="name">{path}</span>, the checkpoint that the run resumed from. Choose what to compare it with:
the first checkpoint <b>after</b> the resume, its <b>echo</b>, or both.</p>
<p class="muted">With neither, this checkpoint is examined alone: that reveals damage and contradictions in it, but
not a faulty load. An echo reveals every error in loading; docs/echo.md explains how to save one from a trainer.</p>
"""


class Doctor(JobTab):
    """Choose the evidence, examine, read the result, which is kept until the evidence changes."""

    key = "doctor"
    follows = ("ckpt", "other", "echo", "given")

    view: DiagnosisView | None

    def build(self) -> None:
        self._words = style.pane("")
        self._others = Others(self.schedule, self._words, self._offer)
        self._choices = {which: self._choice(which) for which in OTHERS}
        self._facts = {name: self._fact(name) for name in FACTS}
        self._quick = pmui.Checkbox(label="Facts and names only: do not read weights and moments", size="small")
        self._quick.param.watch(self._facts_entered, "value")
        self.prepare("Examine", self._examine, self._done, verb="examining", ready=self._why_not, long=True)
        facts = pn.Column(
            style.pane('<p class="muted">Facts that the files lack; they take precedence over stored ones.</p>'),
            pn.FlexBox(*self._facts.values()),
            self._quick,
            sizing_mode="stretch_width",
        )
        more = pmui.Accordion(
            ("Facts and depth", facts), active=[], title_variant="body2", sizing_mode="stretch_width", margin=(5, 10)
        )
        self._run = style.button("Diagnose the run of this checkpoint", self._whole, margin=(5, 10))
        self._controls = [style.two_columns(*self._choices.values(), least=440), more, self._words]

    def draw(self) -> None:
        state = self.state
        if state.ckpt is None:
            self.body[:] = []
            return
        self._others.start(state.jail)
        self._offer()
        self._show_given()
        self._arrange()
        small = int(state.ckpt.catalog.tensor_nbytes.sum()) <= AT_ONCE
        if (state.other or state.echo) and small and self.work.job.status == "idle" and not self._why_not():
            self.work.start()

    def close(self) -> None:
        super().close()
        self._others.job.reset()

    def _arrange(self) -> None:
        self.work.button.label = "Examine" if self.state.other or self.state.echo else "Examine this checkpoint alone"
        step = step_of(os.path.basename(self.state.path)) is not None  # others belong to no run
        run = [self._run] if self.view is None and self.state.served and step else []
        self.body[:] = [*self._controls, *([] if self.view is not None else [self.work]), *run, self.result]

    def _whole(self, _: Any) -> None:
        """Show the run's page, which chooses the checkpoints by the jump of the loss."""
        self.state.restore({"run": os.path.dirname(self.state.path) or "."})

    # ---- which evidence ----------------------------------------------------------------------------------------------

    def _choice(self, which: str) -> pmui.Select:
        label, about = OTHERS[which]
        made = pmui.Select(
            label=label,
            description=about,
            options={NONE: ""},
            value="",
            searchable=True,
            size="small",
            sizing_mode="stretch_width",
            margin=(10, 10),
        )
        made.param.watch(lambda event: self.state.param.update(**{which: event.new}), "value")
        return made

    def _fact(self, name: str) -> pmui.TextInput:
        made = pmui.TextInput(label=FACTS[name], size="small", width=190, margin=(5, 10))
        made.param.watch(self._facts_entered, "value")
        return made

    def _offer(self) -> None:
        """Offer the choices of After and Echo, and state what is still missing."""
        state = self.state
        for which, widget in self._choices.items():
            chosen = getattr(state, which)
            widget.param.update(options=self._others.options(state.path, chosen, NONE), value=chosen)
        if why := self._why_not():
            self._words.object = style.message(why, "warning")
        elif not state.other and not state.echo:
            self._words.object = EMPTY.format(path=html(state.path))
        else:
            self._words.object = ""

    def _why_not(self) -> str:
        state = self.state
        for which, (label, _) in OTHERS.items():
            if getattr(state, which) == state.path:
                return f"{label} is this checkpoint itself; choose another one, or none"
        if state.other and state.other == state.echo:
            return "After and Echo are the same checkpoint; choose another one, or none, for one of them"
        try:
            parse_given(state.given)
        except UsageError as error:
            return str(error)
        return ""

    # ---- facts -------------------------------------------------------------------------------------------------------

    def _facts_entered(self, *_: Any) -> None:
        words = {name: one.value.strip() for name, one in self._facts.items()}
        parts = [f"{name}={value}" for name, value in words.items() if value]
        self.state.given = ",".join([*parts, *([QUICK] if self._quick.value else [])])

    def _show_given(self) -> None:
        words = _split(self.state.given)
        for name, one in self._facts.items():
            if one.value.strip() != words.get(name, ""):
                one.value = words.get(name, "")
        self._quick.value = QUICK in words

    # ---- examination -------------------------------------------------------------------------------------------------

    def _examine(self, progress: Progress) -> Diagnosis:
        from workbench.doctor.examine import doctor

        given = parse_given(self.state.given)
        return doctor(self.opened(), self._borrow("other"), echo=self._borrow("echo"), progress=progress, **given)

    def _borrow(self, which: str) -> Any:
        """Return the open checkpoint, or its path if it is damaged: the doctor then reports the damage."""
        path = getattr(self.state, which)
        if not path:
            return None
        try:
            return self.state.borrow(which)
        except (CorruptError, IncompleteError, MissingFileError):
            return self.state.jail.resolve(path)

    def _done(self, found: Diagnosis) -> None:
        state = self.state
        names = {str(state.jail.resolve(path)): path for path in (state.other, state.echo) if path}
        names |= {one.path: _under(one.path, state.jail) for one in found.subjects}
        file = f"{state.path}-{state.other or state.echo}-doctor".replace("--", "-")
        self.put(DiagnosisView(found, names=names, file=file, schedule=self.schedule))
        self._arrange()


def parse_given(text: str) -> dict[str, Any]:
    """Parse the input into options of :func:`workbench.doctor.examine.doctor`: ``betas=0.9:0.95,lr=3e-4,wd=0.1,quick``.

    Raises:
        UsageError: not a number, or a value out of range.
    """
    words, found = _split(text), dict[str, Any]()
    if strange := set(words) - {*FACTS, QUICK}:
        raise UsageError(f"{sorted(strange)[0]!r} is unknown; use {', '.join(FACTS)} or {QUICK}")
    if QUICK in words:
        found["deep"] = False
    if "betas" in words:
        betas = [_number(part, "betas") for part in words["betas"].split(":")]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or not betas[1]:
            raise UsageError(
                f"betas {words['betas']!r}: β1 and β2 must be from 0 to below 1, and β2 not 0, for example 0.9:0.95"
            )
        found["betas"] = tuple(betas)
    for name, keyword in (("lr", "lr"), ("wd", "weight_decay")):
        if name in words:
            found[keyword] = _number(words[name], name)
            if not 0 <= found[keyword] < math.inf:
                raise UsageError(f"{name} {words[name]!r}: must be finite and 0 or more")
    return found


def _split(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): value.strip() for name, _, value in parts}


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} {text!r} is not a number") from None


def _under(path: str, jail: Jail) -> str:
    """Return the path relative to ROOT."""
    try:
        return jail.show(path if is_url(path) else os.path.realpath(path))
    except ValueError:
        return path
