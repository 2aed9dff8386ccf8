"""The bases of all tabs, and the row of tabs, which are made when they are first shown.

::

    Tab       drawn when first shown, and redrawn when its data changes while it is visible
    JobTab    … and it shows a view that a job makes: work ──► put(view) ──► drop() when its data changes
                   the view's selection  ◄──►  the state's, which is in the link
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import panel as pn
import panel_material_ui as pmui

from workbench.app.jobs import Progress, Schedule
from workbench.app.state import WorkbenchState
from workbench.app.work import JobButton
from workbench.checkpoint import Checkpoint
from workbench.errors import UsageError

AT_ONCE = 20_000  #: chunks up to which the structure is checked automatically


class Tab(pn.viewable.Viewer):
    """Base of the tabs.

    Attributes:
        key: its name in the state and the URL.
        follows: the state's names whose change redraws it; changes while another tab is visible are deferred.

    Args:
        always: it is always visible, outside the tabs.
    """

    key: ClassVar[str] = ""
    follows: ClassVar[tuple[str, ...]] = ("ckpt",)

    def __init__(
        self, state: WorkbenchState, schedule: Schedule | None = None, *, always: bool = False, **params: Any
    ) -> None:
        super().__init__(**params)
        self.state, self.schedule, self._always = state, schedule, always
        self.body = pn.Column(sizing_mode="stretch_width")
        self._stale = True
        self.build()
        state.param.watch(self._changed, [*self.follows, "tab"])
        self._changed()

    def __panel__(self) -> pn.viewable.Viewable:
        return self.body

    def build(self) -> None:
        """Create the permanent widgets, once."""

    def draw(self) -> None:
        """Fill :attr:`body` from the state, whose ``ckpt`` may be ``None``; must be fast."""
        raise NotImplementedError

    def close(self) -> None:
        """End the session: stop the jobs."""

    def _changed(self, *events: Any) -> None:
        self._stale = self._stale or any(event.name in self.follows for event in events)
        if self._stale and (self._always or self.state.tab == self.key):
            self._stale = False
            self.draw()


class JobTab(Tab):
    """Base of the tabs that show one view, made by a job and kept until its data changes.

    Attributes:
        mirrored: parameters of the view that are the state's, too: a change of either changes the other.
        work: the job and its controls.
        view: on display; ``None`` before the job is done.
        result: where the view is.
    """

    mirrored: ClassVar[tuple[str, ...]] = ()
    work: JobButton
    view: Any

    def prepare(self, label: str, work: Callable[[Progress], Any], done: Callable[[Any], None], **options: Any) -> None:
        """Create the job's button; call it in :meth:`build`. Arguments are those of :class:`JobButton`."""
        self.view = None
        self.work = JobButton(label, work, done, schedule=self.schedule, **options)
        self.result = pn.Column(sizing_mode="stretch_width")
        self.state.param.watch(self.drop, list(self.follows))
        if self.mirrored:
            self.state.param.watch(self._forward, [*self.mirrored, "tab"])

    def put(self, view: Any) -> None:
        """Show a view."""
        if self.mirrored:
            view.param.watch(self._chosen, list(self.mirrored))
        self.view, self.result[:] = view, [view]

    def drop(self, *_: Any) -> None:
        """Stop the job and drop the view, whose checkpoints may be closed."""
        self.work.reset()
        if hasattr(self.view, "close"):
            self.view.close()
        self.view, self.result[:] = None, []

    def close(self) -> None:
        self.work.reset()  # the view stays: at the session's end, its pictures' models are searched for in the page
        if hasattr(self.view, "close"):
            self.view.close()

    def opened(self) -> Checkpoint:
        """Return the open checkpoint, for a job.

        Raises:
            UsageError: it was closed.
        """
        if self.state.ckpt is None:
            raise UsageError("the checkpoint is no longer open")
        return self.state.ckpt

    def of_view(self, words: dict[str, Any]) -> dict[str, Any]:
        """Return the state's values after a change of the view's parameters."""
        return words

    def of_state(self) -> dict[str, Any]:
        """Return the state's selection as the view's parameters."""
        return {name: str(getattr(self.state, name)) for name in self.mirrored}

    def _chosen(self, *events: Any) -> None:
        if self.view is not None:
            self.state.param.update(**self.of_view({event.name: event.new for event in events}))

    def _forward(self, *_: Any) -> None:
        if self.view is not None and self.state.tab == self.key:
            self.view.param.update(**self.of_state())


class LazyTabs:
    """The tabs of a page or of a notebook's cell; one costs nothing before it is first shown.

    Attributes:
        tabs: the row of tabs, made when it is first asked for.
        made: those shown so far, by name.

    Args:
        makers: name → title, and the module and name of its class; those named in ``names``, in this order.
    """

    def __init__(
        self,
        state: WorkbenchState,
        makers: dict[str, tuple[str, str, str]],
        names: Sequence[str],
        schedule: Schedule | None = None,
    ) -> None:
        self._state, self._makers, self._names, self._schedule = state, makers, tuple(names), schedule
        self.made: dict[str, Any] = {}
        self._frames: dict[str, pn.Column] = {}
        state.param.watch(self._make, ["tab", "status"])
        # A tab is shown after it has been filled (``precedence``): a React component (Panel 1.9.4,
        # ``models/react_component.ts``) loses what changes between its first rendering and its effects.
        state.param.watch(self._switch, "tab", precedence=1)
        self._make()

    @cached_property
    def tabs(self) -> pmui.Tabs:
        self._frames = {name: pn.Column(sizing_mode="stretch_width") for name in self._names}
        # In a narrow window, MUI would hide the arrows that lead to the tabs that do not fit.
        tabs = pmui.Tabs(
            sizing_mode="stretch_width", sx={"& .MuiTabs-root .MuiTabs-scrollButtons": {"display": "inline-flex"}}
        )
        # Given as pairs (panel-material-ui 0.16.6, ``layout/base.py``), each title would have an empty pane, too, whose
        # type is searched for among all, with an import of matplotlib.
        tabs.param.update(
            objects=list(self._frames.values()),
            _names=[self._makers[name][0] for name in self._names],
            active=self._names.index(self._state.tab),
        )
        tabs.param.watch(lambda event: self._state.param.update(tab=self._names[event.new]), "active")
        return tabs

    def close(self) -> None:
        """Stop the jobs of all tabs, even if one fails to."""
        with ExitStack() as all_of_them:
            for tab in self.made.values():
                all_of_them.callback(tab.close)

    def _make(self, *_: Any) -> None:
        name = self._state.tab
        if name in self._names and name not in self.made and self._state.status == "open":
            module, kind = self._makers[name][1:]
            self.made[name] = getattr(import_module(module), kind)(self._state, self._schedule)
            _ = self.tabs  # makes the frames
            self._frames[name][:] = [self.made[name]]

    def _switch(self, *_: Any) -> None:
        if self._state.tab in self._frames:  # empty until the tabs are first shown, which begin with the state's
            self.tabs.active = self._names.index(self._state.tab)
