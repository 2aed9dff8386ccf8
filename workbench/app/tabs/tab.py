"""The base of all tabs: drawn when first shown, and redrawn when their data changes while they are visible."""

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
