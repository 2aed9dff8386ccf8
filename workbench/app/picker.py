"""The list of checkpoints under ROOT in the sidebar: their descriptions, and whether they are complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import panel as pn
import panel_material_ui as pmui
import param

from workbench.app import style
from workbench.app.found import checkpoints, found_before
from workbench.app.jobs import Job, Schedule
from workbench.app.state import WorkbenchState, link
from workbench.app.words import count, html
from workbench.runs import Found

AGAIN = 60.0  #: minimum seconds between two searches of ROOT that nobody asked for
SHARE = 0.02  #: … which take at most this share of the time
SHEET = """
:host { display: block; }
nav { max-height: calc(100vh - 250px); min-height: 160px; overflow: hidden auto; scrollbar-width: thin;
  border-bottom: 1px solid rgba(128, 128, 128, .35); }
.ckpt { display: block; color: inherit; text-decoration: none; padding: 6px 8px; line-height: 1.3; font-size: 13px;
  overflow-wrap: anywhere; border-radius: 4px; content-visibility: auto; contain-intrinsic-height: auto 48px; }
.ckpt b { font-weight: 600; } .ckpt small { display: block; opacity: .85; } .ckpt .bad { font-style: italic; }
.ckpt:hover { background: rgba(128, 128, 128, .15); }
.ckpt:focus-visible { outline: 2px solid #0072B2; outline-offset: -2px; }
.ckpt[aria-current] { background: rgba(0, 114, 178, .22); box-shadow: inset 3px 0 #0072B2; }
"""


class CheckpointList(pn.custom.JSComponent):
    """A scrolling list of links. A click sends the number of the row; rows outside the window are not laid out.

    Args:
        clicked: called with the number of a row.
    """

    rows = param.List(doc="The name, a description, what is missing, and the link of each.")
    wanted = param.String(doc="Only rows whose name contains it, in any case.")
    current = param.Integer(default=-1, doc="The row of the open checkpoint, or -1.")

    _esm = """
    export function render({model}) {
      const list = document.createElement("nav");
      list.setAttribute("aria-label", "Checkpoints");
      const add = (parent, tag, text, name) => {
        const part = parent.appendChild(document.createElement(tag));
        part.textContent = text;
        if (name) part.className = name;
        return part;
      };
      const fill = () => {
        const wanted = model.wanted.toLowerCase(), top = list.scrollTop;
        const rows = document.createDocumentFragment();
        model.rows.forEach(([name, about, state, href], number) => {
          if (!name.toLowerCase().includes(wanted)) return;
          const row = add(rows, "a", "", "ckpt");
          row.href = href;
          row.title = name;
          row.dataset.number = number;
          add(row, "b", name);
          add(row, "small", about);
          if (state) add(row, "small", `incomplete: ${state}`, "bad");
        });
        list.replaceChildren(rows);
        list.scrollTop = top;
        mark();
      };
      const mark = () => {
        list.querySelector("[aria-current]")?.removeAttribute("aria-current");
        const row = list.querySelector(`[data-number="${model.current}"]`);
        if (!row) return;
        row.setAttribute("aria-current", "page");
        show(row, 4);
      };
      const show = (row, times) => {  // rows outside the window have estimated heights until they come into it
        const [inner, outer] = [row, list].map((one) => one.getBoundingClientRect());
        if (inner.top < outer.top || inner.bottom > outer.bottom) list.scrollTop += inner.top - outer.top - 60;
        if (times) requestAnimationFrame(() => show(row, times - 1));
      };
      list.addEventListener("click", (event) => {
        const row = event.target.closest("a");
        if (!row || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        model.send_msg(Number(row.dataset.number));
      });
      model.on("rows", fill);
      model.on("wanted", fill);
      model.on("current", mark);
      fill();
      return list;
    }
    """

    def __init__(self, clicked: Callable[[int], None], **params: Any) -> None:
        super().__init__(stylesheets=[SHEET], sizing_mode="stretch_width", margin=(4, 10), **params)
        self.on_msg(lambda event: clicked(int(event.data)))


class Picker(pn.viewable.Viewer):
    """Lists the checkpoints under ROOT, in a job; a click opens one.

    Attributes:
        listing: the checkpoints found; until a session's first search has ended, those of the process's last search.
    """

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state = state
        self.listing = found_before(state.jail)
        self.job = Job(schedule)
        self._looking = Job(schedule, long=True)
        self._next = time.monotonic() + AGAIN
        self._words = style.pane("")
        self._refresh = style.button("Refresh", lambda _: self.refresh())
        self._narrow = pmui.TextInput(label="Find a checkpoint", size="small", sizing_mode="stretch_width")
        self.list = CheckpointList(self._clicked)
        self._narrow.param.watch(lambda event: self.list.param.update(wanted=event.new), "value_input")
        self.job.param.watch(self._fill, "status")
        self._looking.param.watch(self._looked, "status")
        state.param.watch(self._mark, "path")
        self.refresh()

    def __panel__(self) -> pn.viewable.Viewable:
        return pn.Column(self._words, self._narrow, self.list, self._refresh, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """List again; checkpoints come and go while a run writes them."""
        jail = self._state.jail
        self.job.start(lambda progress: checkpoints(jail))

    def look(self) -> None:
        """List again if checkpoints were added, completed or removed. Call it every few seconds; few calls search."""
        jail = self._state.jail
        if time.monotonic() >= self._next and "running" not in (self.job.status, self._looking.status):
            self._looking.start(lambda progress: (time.monotonic(), checkpoints(jail).found, time.monotonic()))

    def close(self) -> None:
        """Stop searching."""
        self.job.reset()
        self._looking.reset()

    def _looked(self, event: Any) -> None:
        if event.new in ("done", "failed"):
            began, found, ended = self._looking.result or (0.0, None, 0.0)
            self._next = time.monotonic() + max(AGAIN, (ended - began) / SHARE)
            if found is not None and self.listing is not None and _names(found) != _names(self.listing.found):
                self.refresh()

    def _fill(self, *_: Any) -> None:
        if self.job.status == "failed":
            self._words.object = style.message(self.job.error, "error")
        elif self.job.status == "running":
            self._words.object = '<p class="muted">Searching for checkpoints …</p>'
        elif self.job.result is not None:
            before, self.listing = self.listing, self.job.result
            links = [link(path=path) for path in self._paths]
            rows = [list(row) for row in zip(*self.listing.texts, links, strict=True)]
            self.list.param.update(rows=rows, current=self._current())
            number = _number(len(self.listing.found))
            self._words.object = f'<p class="muted">{number} in {html(self._state.jail.name)}</p>'
            if before is not None and before.found != self.listing.found:
                self._state.listed += 1

    def _clicked(self, row: int) -> None:
        if 0 <= row < len(self._paths):
            self._state.show(self._paths[row])

    @property
    def _paths(self) -> list[str]:
        return [] if self.listing is None else self.listing.paths

    def _current(self) -> int:
        return self._paths.index(self._state.path) if self._state.path in self._paths else -1

    def _mark(self, *_: Any) -> None:
        self.list.current = self._current()


def _names(found: Sequence[Found]) -> list[tuple[str, bool]]:
    return [(one.path, one.complete) for one in found]


def _number(n: int) -> str:
    return "no checkpoint" if n == 0 else f"{count(n)} checkpoint{'s' if n > 1 else ''}"
