"""What a session looks at; no Panel in here, so that it is tested without a browser.

::

    show(path="run/step-4", tensor="wq")  ──►  status: empty → opening → open | failed
                                               ckpt, lease: held until another path or close()

Views set ``tensor``, ``tab``, ``pattern`` and ``role`` and call :meth:`WorkbenchState.show`; they never see each other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlencode

import param

from workbench.app.jail import Jail
from workbench.app.jobs import Cancelled, Job, Schedule
from workbench.app.registry import Lease, Registry, shared
from workbench.checkpoint import Checkpoint

__all__ = ["TABS", "WorkbenchState", "parse_query", "query_of"]

TABS = ("overview", "tensors")
URL = {"path": "ckpt", "tensor": "tensor", "tab": "tab", "pattern": "q"}  #: state's name → the URL's
LONGEST = 4096  #: characters of one value taken from a URL


class WorkbenchState(param.Parameterized):
    """One session: which checkpoint of ROOT, and what of it.

    Args:
        jail: ROOT.
        registry: who opens and shares checkpoints.
        schedule: runs a callback on the page's thread; at once where there is no page.
    """

    path = param.String(default="", doc="Relative to ROOT; empty when nothing is chosen.")
    tensor = param.String(default="", doc="Key of the selected tensor; empty when none is.")
    tab = param.Selector(default="overview", objects=list(TABS))
    pattern = param.String(default="", doc="Regular expression on keys.")
    role = param.String(default="", doc="Only this role; empty for all.")
    status = param.Selector(default="empty", objects=["empty", "opening", "open", "failed"])
    error = param.String(default="", doc="Why the checkpoint did not open, in words.")
    notice = param.String(default="", doc="What of a link could not be restored.")
    ckpt = param.ClassSelector(class_=Checkpoint, default=None, doc="The open checkpoint.")

    def __init__(
        self, jail: Jail, registry: Registry | None = None, schedule: Schedule | None = None, **params: Any
    ) -> None:
        super().__init__(**params)
        self.jail, self._registry = jail, shared if registry is None else registry
        self.lease: Lease | None = None
        self._lock = threading.Lock()
        self._turn = object()  # the request that may still set `lease`
        self._opening = Job(schedule)
        self._opening.param.watch(self._opened, "status")
        self._closed = False

    def show(self, path: str, **selection: str) -> None:
        """Turn to another checkpoint; ``tensor``, ``tab`` and ``pattern`` may be given along with it."""
        if self._closed:
            return
        if path == self.path and self.status in ("open", "opening"):
            self.param.update(**selection)
            return
        self._let_go()
        fresh = {"tensor": "", "role": "", "notice": "", "error": "", "ckpt": None}
        self.param.update(path=path, status="opening" if path else "empty", **{**fresh, **selection})
        if path:
            turn = self._turn
            self._opening.start(lambda tick: self._open(path, turn))

    def restore(self, query: Mapping[str, str]) -> None:
        """Become what a link says: a mapping of the state's own names, as :func:`parse_query` gives it."""
        if not any(query.values()) and not self.path:
            return
        tab = query.get("tab") or self.tab
        words = {"tab": tab if tab in TABS else TABS[0]}
        words |= {name: query.get(name, "") for name in ("tensor", "pattern")}
        self.show(query.get("path", ""), **words)

    def wait(self, timeout: float = 60) -> bool:
        """Block until what was asked for is open or has failed; for scripts and tests."""
        return self._opening.wait(timeout)

    def close(self) -> None:
        """Give the checkpoint back; the session is over."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        self._opening.reset()
        with self._lock:
            self._turn = object()
            lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def _open(self, path: str, turn: object) -> Checkpoint:
        """In a worker. The lease is the state's at once, because the page may be gone before it hears of it."""
        lease = self._registry.acquire(self.jail.resolve(path))
        with self._lock:
            wanted = turn is self._turn
            if wanted:
                self.lease = lease
        if not wanted:
            lease.release()
            raise Cancelled
        _ = lease.rows  # made here, not on the page's thread
        return lease.checkpoint

    def _opened(self, event: param.parameterized.Event) -> None:
        if event.new == "failed":
            self.param.update(status="failed", error=self._opening.error, tensor="")
        elif event.new == "done":
            ckpt = self._opening.result
            found: dict[str, Any] = {"ckpt": ckpt, "status": "open"}
            if self.tensor and self.tensor not in ckpt:
                found |= {"notice": f"the link names tensor {self.tensor!r}, which this checkpoint lacks", "tensor": ""}
            self.param.update(**found)


def query_of(state: WorkbenchState) -> str:
    """The part of the URL that reproduces what is shown: ``?ckpt=run/step-4&tensor=wq&tab=tensors``."""
    values = {url: getattr(state, name) for name, url in URL.items()}
    if not values["ckpt"]:
        return ""
    kept = {url: value for url, value in values.items() if value}
    return "?" + urlencode(kept, errors="surrogatepass", safe="/")


def parse_query(search: str) -> dict[str, str]:
    """The state's values in a URL's query; what is not ours, repeated or overlong is left out."""
    found = parse_qs(search.removeprefix("?"), errors="surrogatepass", max_num_fields=64)
    values = {name: found.get(url, [""])[0] for name, url in URL.items()}
    return {name: value for name, value in values.items() if len(value) <= LONGEST}
