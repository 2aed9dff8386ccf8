"""What every tab is: drawn when it is first looked at, and again when what it shows changes while it is looked at."""

from __future__ import annotations

from typing import Any, ClassVar

import panel as pn

from workbench.app.jobs import Schedule
from workbench.app.state import WorkbenchState

__all__ = ["Tab"]


class Tab(pn.viewable.Viewer):
    """Base of the tabs.

    Attributes:
        key: its name in the state and the URL.
        follows: the state's names whose change makes it draw anew; a change while another tab is looked at waits.

    Args:
        always: it stands by itself, outside the tabs.
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
        """Make the widgets that stay, once."""

    def draw(self) -> None:
        """Fill :attr:`body` from the state, whose ``ckpt`` may be ``None``; must not take long."""
        raise NotImplementedError

    def close(self) -> None:
        """The session is over: stop the jobs."""

    def _changed(self, *events: Any) -> None:
        self._stale = self._stale or any(event.name in self.follows for event in events)
        if self._stale and (self._always or self.state.tab == self.key):
            self._stale = False
            self.draw()
