"""The page: picker, tabs, URL; one :class:`Workbench` per session.

``create_app`` may run twice for one page (Bokeh creates a new session if the first one expired between the HTML and the
websocket), so it keeps nothing beyond its session, and everything that a session holds is released with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import panel as pn
import panel_material_ui as pmui
import param
from bokeh.events import ConnectionLost

from workbench.app import home, style
from workbench.app.access import Access
from workbench.app.aria import Aria
from workbench.app.home import Home
from workbench.app.jail import BucketJail, jail_of
from workbench.app.jobs import Schedule
from workbench.app.linked import Linked
from workbench.app.outlet import Outlet
from workbench.app.picker import Picker
from workbench.app.registry import Registry
from workbench.app.run_page import RunPage
from workbench.app.state import RUN, TABS, URL, WorkbenchState, link, parse_query, query_of
from workbench.app.tabs.tab import LazyTabs
from workbench.app.words import html
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.app.tabs.integrity import Integrity

LOCAL_RESOURCES = "static/extensions/panel/"
BREAKPOINTS = {"xs": 0, "sm": 1000, "md": 1100, "lg": 1300, "xl": 1600}  #: below ``sm``, the list is a drawer
SETTLED = 10_000  #: milliseconds after which a page counts as loaded whatever its views say; 800 are usual
LOOK = 3000  #: milliseconds between two checks whether the files shown were deleted or rewritten
LOOK_FAR = 60_000  #: … where each check is a request for every metadata file
#: A tab's title and its class, imported when the tab is first shown.
MAKERS = {
    "overview": ("Overview", "workbench.app.tabs.overview", "Overview"),
    "tensors": ("Tensors", "workbench.app.tabs.tensors", "Tensors"),
    "layout": ("Layout", "workbench.app.tabs.layout", "LayoutTab"),
    "integrity": ("Integrity", "workbench.app.tabs.integrity", "Integrity"),
    "diff": ("Diff", "workbench.app.tabs.diff", "DiffTab"),
    "doctor": ("Doctor", "workbench.app.tabs.doctor", "Doctor"),
    "export": ("Export", "workbench.app.tabs.export", "Export"),
}
SHOWN = tuple(name for name in TABS if name in MAKERS)


class Workbench(pn.viewable.Viewer):
    """Everything of one session except the frame around it; renders in a notebook cell, too."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self.state = state
        state.served = True
        self.picker = Picker(state, schedule)
        self._schedule = schedule
        self._words = style.pane("")
        self.home = Home(state, self.picker, schedule)
        self.run_page: RunPage | None = None
        self._trail = Linked("", state.restore, TRAIL)
        self._lazy = LazyTabs(state, MAKERS, SHOWN, schedule)
        self.made = self._lazy.made
        self._left_over: Integrity | None = None
        self._body = pn.Column(sizing_mode="stretch_width")
        state.param.watch(self._draw, ["status", "notice", "run"], precedence=1)
        self._draw()

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    @property
    def tabs(self) -> pmui.Tabs:
        """The tabs of a checkpoint; made when they are first shown."""
        return self._lazy.tabs

    def close(self) -> None:
        """Stop the jobs and release the checkpoint."""
        with ExitStack() as all_of_them:  # the others are closed even if one fails
            all_of_them.callback(self.state.close)
            all_of_them.callback(self._lazy.close)
            if self._left_over is not None:
                all_of_them.callback(self._left_over.close)
            self.picker.close()
            self.home.close()
            if self.run_page is not None:
                self.run_page.close()

    def look(self) -> None:
        """Check whether the displayed files, or the list of checkpoints, have changed; called every few seconds."""
        self.state.look()
        if not isinstance(self.state.jail, BucketJail):  # there, a search costs requests
            self.picker.look()
        if self.run_page is not None and self.state.run and not self.state.path:
            self.run_page.look()

    def first(self) -> str:
        """Return as HTML what to show until the page is live: the cards that are known, or what is being opened."""
        name = self.state.path or self.state.run
        return f'<p>Opening <span class="name">{html(name)}</span> …</p>' if name else self.home.text

    def _draw(self, *_: Any) -> None:
        state = self.state
        self._trail.text = trail(state)
        if state.status == "open":
            self._words.object = style.message(state.notice, "warning") if state.notice else ""
            self._body[:] = [self._trail, *([self._words] if state.notice else []), self.tabs]
        elif state.status == "empty" and state.run:
            if self.run_page is None:
                self.run_page = RunPage(state, self.picker, self._schedule)
            self._body[:] = [self._trail, self.run_page]
        elif state.status == "empty":
            self._body[:] = [self.home]
        elif state.status == "opening":
            self._words.object = f'<p>Opening <span class="name">{html(state.path)}</span> …</p>'
            self._body[:] = [self._trail, self._words]
        else:
            title = f'<h2>Cannot open <span class="name">{html(state.path)}</span></h2>'
            self._words.object = f"{title}{style.message(state.error, 'error')}<p>Pick another from the list.</p>"
            self._body[:] = [self._trail, self._words, *self._left()]

    def _left(self) -> list[pn.Column]:
        """Offer a check of the remains of a checkpoint that cannot be opened, unless there is none inside ROOT."""
        from workbench.app.tabs.integrity import Integrity

        if self._left_over is not None:
            self._left_over.close()
            self._left_over = None
        try:
            self.state.jail.resolve(self.state.path)
        except WorkbenchError:
            return []
        self._left_over = Integrity(self.state, self._schedule, always=True)
        words = style.pane("<h3>What is left of it?</h3><p>A verification lists each file that is lost or damaged.</p>")
        return [pn.Column(words, self._left_over, sizing_mode="stretch_width")]


class AfterLoad:
    """Run callbacks on the page's thread, but only after the page has loaded.

    Between serving the document and its first paint, Panel (1.9.4, ``io/document.py``, ``hold``) considers the browser
    not connected and drops changes for good: results that a quick job publishes then would never appear.
    """

    def __init__(self, document: Any) -> None:
        self._document, self._lock = document, threading.Lock()
        self._waiting: list[Callable[[], None]] | None = []
        pn.state.onload(self._loaded)

    def __call__(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(callback)
                return
        self._hand_over(callback)

    def _hand_over(self, callback: Callable[[], None]) -> None:
        def run() -> None:
            if not self._over():  # anything drawn into a closed page would never be freed
                callback()

        try:
            self._document.add_next_tick_callback(run)
        except AttributeError:  # Bokeh 3.9 empties a document when its session ends, even if it is still in use
            if not self._over():
                raise

    def _over(self) -> bool:
        context = self._document.session_context
        return context is None or context.session is None or bool(context.session.destroyed)

    def _loaded(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
        for callback in waiting:
            self._hand_over(callback)


#: The served HTML: what the page shows first is in it as plain HTML, before the scripts (5 MB) that make the page live,
#: which base.html would load first. The first view of the page that is drawn removes it, and follows the link that was
#: clicked in it (:mod:`workbench.app.linked`).
FRAME = """{% extends "base.html" %}
{% block js_resources %}{% endblock %}
{% block loader_css %}
{{ super() }}
#loader:not(.error) { visibility: hidden; }
{% endblock %}
{% block contents %}
{{ first }}
{{ bokeh_js if bokeh_js }}
{{ super() }}
{% endblock %}
"""
FIRST = """<style>
#first { position: fixed; inset: 0; z-index: 2000; overflow: auto; background: #fff; color: rgba(0, 0, 0, .87);
  font: 400 16px/1.5 Roboto, Helvetica, Arial, sans-serif; }
#first > header { background: #0072B2; color: #fff; font-size: 24px; font-weight: 700; padding: 15px 16px 15px 68px; }
#first > main { padding: 8px 16px; }
@media (min-width: 1000px) { #first > main { margin-left: 300px; } }
@media (prefers-color-scheme: dark) {
  #first { background: #121212; color: #fff; } #first > header { background: #177fbc; }
}
SHEETS
</style>
<div id="first"><header>TITLE</header><main>BODY</main></div>
<script>
  document.getElementById("first").addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='?']");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();  // loading another page would begin again with the scripts
    event.currentTarget.dataset.wanted = link.getAttribute("href");
    link.style.outline = "2px solid #0072B2";
  });
</script>"""


def first_look(title: str, body: str) -> str:
    """Return what is shown until the page is live.

    Args:
        body: HTML in the page's style; foreign text in it must be escaped.
    """
    sheets = f"#first {{ {style.HTML.replace(':host { color: inherit; }', '')} {style.LINKS} {home.SHEET} }}"
    return FIRST.replace("SHEETS", sheets).replace("TITLE", html(title)).replace("BODY", body)


class BrowserWindow(pn.custom.JSComponent):
    """The browser window: too narrow for list and content side by side; dark mode preferred.

    It also ends the wait of :class:`AfterLoad`. Bokeh (3.9, ``core/view.ts``) reports a document as loaded once every
    view of it has reported that it is finished. If one view never does, the page would stay without a list for good;
    after ``SETTLED`` milliseconds, the page counts as loaded.
    """

    narrow = param.Boolean(default=False)
    dark = param.Boolean(default=False)

    _esm = """
    export function render({model}) {
      const queries = {narrow: "(max-width: 999px)", dark: "(prefers-color-scheme: dark)"};
      for (const [name, words] of Object.entries(queries)) {
        const query = window.matchMedia(words);
        const update = () => { model[name] = query.matches };
        query.addEventListener("change", update);
        model.on("remove", () => query.removeEventListener("change", update));
        update();
      }
      const settle = () => {
        for (const document of window.Bokeh.documents)
          for (const root of document.roots()) document.notify_idle(root);
      };
      const timer = setTimeout(settle, SETTLED);
      model.on("remove", () => clearTimeout(timer));
    }
    """.replace("SETTLED", str(SETTLED))


class History(pn.custom.JSComponent):
    """The browser's Back and Forward buttons, which Panel (1.9.4, ``models/location.ts``) does not observe.

    A change of run, checkpoint, tab or tensor is a step that Back undoes; any other change of the address, such as a
    filter or a slice, replaces the current one. ``follow`` is called with the query of the address that a step led to.
    """

    _esm = """
    const STEPS = ["run", "ckpt", "tab", "tensor"];

    export function render({model}) {
      const moved = () => model.send_msg(window.location.search);
      const {history, location} = window;
      history.pushState = function (data, title, url) {
        const [from, to] = [location.href, url ?? ""].map((one) => new URL(one, location.href).searchParams);
        const step = STEPS.some((name) => from.get(name) !== to.get(name));
        History.prototype[step ? "pushState" : "replaceState"].call(history, data, title, url);
      };
      window.addEventListener("popstate", moved);
      model.on("remove", () => {
        delete history.pushState;
        window.removeEventListener("popstate", moved);
      });
    }
    """

    def __init__(self, follow: Callable[[str], None], **params: Any) -> None:
        super().__init__(**params)
        self.on_msg(lambda event: follow(str(event.data)))


TRAIL = "nav { font-size: 13px; padding: 2px 0; } nav a { font-weight: 400; }"


def trail(state: WorkbenchState) -> str:
    """Return the path to the current page as links: all runs, the run, the checkpoint."""
    parts = [f'<a href="?">{html(state.jail.name)}</a>']
    if state.run and state.path:
        kept = {name: getattr(state, name) for name in RUN}
        parts.append(f'<a href="{html(link(**kept))}">{html(state.run)}</a>')
    elif state.run:
        parts.append(html(state.run))
    if state.path:
        below = state.path.removeprefix(f"{state.run}/") if state.run else state.path
        parts.append(html(below))
    return f'<nav aria-label="Where this is">{" › ".join(parts)}</nav>'


def create_app(
    root: str | os.PathLike[str],
    registry: Registry | None = None,
    *,
    exports: str | os.PathLike[str] | None = None,
    access: Access | None = None,
) -> pmui.Page | pn.pane.HTML:
    """Create the served page of ROOT, a folder or a URL, for one session.

    Args:
        registry: opens checkpoints; by default that of the process.
        exports: the folder inside ROOT that exports may be written to; ``None`` to forbid writing.
        access: who has access; other users get a message. ``None`` for everyone.

    Raises:
        UsageError: ROOT is neither a folder nor a URL that can be served, or ``exports`` is not a folder inside it.
    """
    pn.extension("tabulator", notifications=False)
    document = pn.state.curdoc
    if document is not None:
        # Bokeh sets this only with the HTML; a document created later would fetch its style sheets from a CDN.
        document._template_variables.setdefault("dist_url", LOCAL_RESOURCES)
    if access is not None and not access.lets_in(pn.state.user):
        return style.pane(style.message(f"{pn.state.user or 'nobody'} has no access to this page.", "error"))
    schedule = AfterLoad(document) if document is not None and document.session_context else None
    jail = jail_of(root)
    state = WorkbenchState(jail, registry, schedule, Outlet(jail, exports))
    workbench = Workbench(state, schedule)
    if pn.state.location is not None:
        _keep_local()
        _follow_url(state)
    title = f"Checkpoint workbench: {state.jail.name}"
    if document is not None:
        document._template_variables["first"] = first_look(title, workbench.first())
    window = BrowserWindow(width=0, height=0, margin=0)
    history = History(lambda query: state.restore(parse_query(query)), width=0, height=0, margin=0)
    page = pmui.Page(
        title=title,
        template=FRAME,
        sidebar=[workbench.picker],
        sidebar_width=300,
        main=[window, history, Aria(width=0, height=0, margin=0), workbench],
        theme_config={"breakpoints": {"values": BREAKPOINTS}},
        busy_indicator=None,
    )
    # A page (panel-material-ui 0.16.6, ``template/base.py``) follows ``busy`` of Panel's process-wide state. With every
    # event of any page, the models of all pages would be searched and changed twice, and the state would keep closed
    # pages alive. Assigning another value (param 2.4) does not undo that.
    page.param._update_ref("busy", False)

    if document is not None and document.session_context:
        document.on_session_destroyed(lambda _: _end(workbench, page))
        document.on_event(ConnectionLost, lambda _: _leave(document))
        document.add_periodic_callback(workbench.look, LOOK_FAR if isinstance(jail, BucketJail) else LOOK)

    def fold(*_: Any) -> None:
        page.sidebar_open = not window.narrow

    def paint(*_: Any) -> None:
        page.dark_theme = window.dark  # the button at the top right can override this

    window.param.watch(lambda _: schedule(fold) if schedule else fold(), "narrow")
    window.param.watch(lambda _: schedule(paint) if schedule else paint(), "dark")
    state.param.watch(fold, ["path", "run"])
    return page


def _end(workbench: Workbench, page: pmui.Page) -> None:
    """End the session: stop its jobs, release its checkpoints and its memory.

    HoloViews (1.23) keeps plots with tap streams in a registry until they are cleaned up. Panel (1.9.4, ``custom.py``)
    searches for them in the page's models, which Bokeh has emptied by then.
    """
    try:
        workbench.close()
    finally:
        for pane in page.select(pn.pane.HoloViews):
            for plot, _ in pane._plots.values():
                plot.cleanup()


def _leave(document: Any) -> None:
    """End the session of a closed page, and its jobs, at the server's next check.

    Bokeh would keep both for 15 seconds in case the browser reconnects. A browser that does (after a short network
    failure) gets a new session from the address of the page.
    """
    context = document.session_context
    if context is not None and context.session is not None:
        context.session.request_expiration()


def _keep_local() -> None:
    """Keep style sheets relative to the page, which is at the server's root, whatever the prefix.

    Panel (1.9.4, ``io/location.py``, ``_sync_pathname``) makes them absolute once the browser has sent its path; under
    a prefix, they are then not found.
    """
    document, location = pn.state.curdoc, pn.state.location

    def keep(*_: Any) -> None:
        if document is not None and "dist_url" in document._template_variables:
            document._template_variables["dist_url"] = LOCAL_RESOURCES

    keep()
    location.param.watch(keep, "pathname", precedence=1)


def _follow_url(state: WorkbenchState) -> None:
    """Synchronise URL and state: a link restores what it names, and the current view can be copied as a link."""
    location = pn.state.location
    state.restore(parse_query(location.search or ""))

    def read_url(event: Any) -> None:
        if event.new != query_of(state):
            state.restore(parse_query(event.new or ""))

    def write_url(*_: Any) -> None:
        location.search = query_of(state)

    location.param.watch(read_url, "search")
    state.param.watch(write_url, list(URL))
