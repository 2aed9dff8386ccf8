"""The state of a session's page. It does not use Panel and can be tested without a browser.

::

    show(path="run/step-4", tensor="wq")  ──►  status: empty → opening → open | failed
                                               ckpt, lease: held until another path or close()
    borrow("other")                       ──►  a second checkpoint, held until another one replaces it or close()

Views set the selection (:data:`URL`) and call :meth:`WorkbenchState.show`; they do not know each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import param

from workbench.app.jail import Jail
from workbench.app.jobs import Cancelled, Job, Schedule
from workbench.app.outlet import Outlet
from workbench.app.registry import Lease, Registry, shared
from workbench.checkpoint import Checkpoint
from workbench.core.words import without_partial
from workbench.errors import UsageError
from workbench.tensor import LazyTensor

if TYPE_CHECKING:
    from workbench.analysis.report import Report

TABS = ("overview", "tensors", "layout", "integrity", "diff", "doctor", "export")
#: The values that a link restores: name in the state → name in the URL.
URL = {
    "run": "run",
    "at": "at",
    "metrics": "metrics",
    "versus": "with",
    "measure": "heat",
    "path": "ckpt",
    "tensor": "tensor",
    "tab": "tab",
    "pattern": "q",
    "role": "role",
    "other": "b",
    "echo": "echo",
    "view": "view",
    "rank": "rank",
    "depth": "depth",
    "target": "to",
    "mesh": "mesh",
    "place": "slice",
    "given": "given",
    "axes": "axes",
    "by": "by",
    "fit": "fit",
    "cast": "dtype",
    "rename": "rename",
    "into": "into",
}
#: The part of the selection that belongs to a run.
RUN = ("run", "at", "metrics", "versus", "measure")
#: The part of the selection that belongs to a checkpoint.
SELECTION = tuple(name for name in URL if name not in ("path", "tab", "other", "echo", "given", *RUN))
LONGEST = 4096  #: maximum number of characters of one value in a URL
FIELDS = 64  #: maximum number of fields read from a URL


class WorkbenchState(param.Parameterized):
    """One session: the checkpoint of ROOT that it shows, and the selection in it.

    Args:
        jail: ROOT.
        registry: opens and shares checkpoints.
        schedule: runs a callback on the page's thread; immediately if there is no page.
        outlet: where exports may go; by default, nowhere.

    Attributes:
        served: whether there are pages of runs to go to, as in the served dashboard.
    """

    served = False

    run = param.String(default="", doc="Folder of a run, relative to ROOT; shown while no checkpoint is.")
    at = param.String(default="", doc="The step whose loss the run's page explains; empty for the highest spike.")
    metrics = param.String(default="", doc="Metrics drawn on the run's page, as :func:`joined` writes names.")
    versus = param.String(default="", doc="Runs drawn over the first one, as :func:`joined` writes names.")
    measure = param.String(default="", doc="What the picture of layers shows; empty for the first.")
    path = param.String(default="", doc="Relative to ROOT; empty if nothing is selected.")
    tensor = param.String(default="", doc="Key of the selected tensor; empty for none.")
    tab = param.Selector(default="overview", objects=list(TABS))
    pattern = param.String(default="", doc="Regular expression on keys.")
    role = param.String(default="", doc="Only this role; empty for all.")
    other = param.String(default="", doc="A second checkpoint, relative to ROOT, that Diff and Doctor compare with.")
    echo = param.String(default="", doc="The echo of the first one, relative to ROOT, for Doctor.")
    view = param.String(default="", doc="Picture of the Layout tab; empty for the first.")
    rank = param.String(default="", doc="The selected rank; empty for none.")
    axes = param.String(default="", doc="Axes of the tensor that go down and across the shard map: 0,1.")
    by = param.String(default="", doc="What the colours of the shard map mean: rank or file.")
    fit = param.String(default="", doc="Request to Layout's memory planner: gpus=8,gb=80,tp=2.")
    depth = param.String(default="", doc="What Integrity checks; empty for the quickest check.")
    target = param.String(default="", doc="Format that Export writes; empty for the first.")
    cast = param.String(default="", doc="Dtype that Export casts to; empty for as stored.")
    rename = param.String(default="", doc="How Export names tensors: hf, fqn; empty for as stored.")
    into = param.String(default="", doc="Where Export writes, relative to the folder for exports.")
    mesh = param.String(default="", doc="Mesh that Export shards for, as on the command line: tp=2,pp=2.")
    place = param.String(default="", doc="The slice of the tensor on display: 2:9, :, -1.")
    given = param.String(default="", doc="Facts for Doctor that no file stores: betas=0.9:0.95,lr=3e-4,wd=0.1.")
    listed = param.Integer(default=0, doc="How often the checkpoints listed under ROOT have changed.")
    status = param.Selector(default="empty", objects=["empty", "opening", "open", "failed"])
    error = param.String(default="", doc="Why the checkpoint cannot be opened, as a sentence.")
    notice = param.String(default="", doc="The part of a link that could not be restored.")
    ckpt = param.ClassSelector(class_=Checkpoint, default=None, doc="The open checkpoint.")

    def __init__(
        self,
        jail: Jail,
        registry: Registry | None = None,
        schedule: Schedule | None = None,
        outlet: Outlet | None = None,
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.outlet = outlet or Outlet(jail)
        self.jail, self._registry = jail, shared if registry is None else registry
        self.lease: Lease | None = None
        self.structure: Report | None = None  # the Overview's check of the open checkpoint, for Integrity
        self._borrowed: dict[str, tuple[str, Lease]] = {}
        self._lock = threading.Lock()
        self._turn = object()  # the request that may still set `lease`
        self._opening = Job(schedule)
        self._opening.param.watch(self._opened, "status")
        self._looking = Job(schedule)
        self._looking.param.watch(self._looked, "status")
        self._changed = False  # the files have changed since they were opened
        self._closed = False

    def show(self, path: str, **selection: str) -> None:
        """Show another checkpoint, optionally with a selection in it (:data:`URL`)."""
        if self._closed:
            return
        if path == self.path and self.status in ("open", "opening") and not self._changed:
            self.param.update(**selection)
            return
        self._let_go()
        fresh = {**dict.fromkeys(SELECTION, ""), "pattern": self.pattern, "notice": "", "error": "", "ckpt": None}
        if path and not _below(path, self.run):
            fresh |= dict.fromkeys(RUN, "")
        self.param.update(path=path, status="opening" if path else "empty", **{**fresh, **selection})
        if path:
            turn = self._turn
            self._opening.start(lambda progress: self._open(path, turn))

    def chosen(self) -> LazyTensor | None:
        """Return the selected tensor of the open checkpoint."""
        ckpt, key = self.ckpt, self.tensor
        return ckpt[key] if ckpt is not None and key and key in ckpt else None

    def look(self) -> None:
        """Check in a job whether the files have changed since they were opened.

        If so, ``notice`` states it, and showing the checkpoint again reopens it.
        """
        lease = self.lease
        if self.status == "open" and lease is not None and not self._changed and self._looking.status != "running":
            self._looking.start(lambda progress: (lease, lease.changed()))

    def restore(self, query: Mapping[str, str]) -> None:
        """Restore a link: a mapping of the state's own names, as :func:`parse_query` returns it."""
        if not any(query.values()) and not self.path and not self.run:
            return
        self.param.update(**{name: query.get(name, "") for name in RUN})
        tab = query.get("tab") or self.tab
        words = {name: query.get(name, "") for name in URL if name not in ("path", "tab", *RUN)}
        unknown = {} if tab in TABS else {"notice": f"the link names the tab {tab!r}, which does not exist"}
        self.show(query.get("path", ""), tab=TABS[0] if unknown else tab, **words, **unknown)

    def not_restored(self, name: str, words: str) -> None:
        """Clear a value that a link has set to something that does not exist; ``notice`` states it."""
        self.param.update(**{name: "", "notice": self._noticed(words)})

    def borrow(self, which: str) -> Checkpoint:
        """Open the checkpoint named by ``other`` or ``echo``; call it in a job.

        It stays open until another one is borrowed in its place, or until the session ends.

        Raises:
            UsageError: no checkpoint is selected.
            OpenError: it leaves ROOT or cannot be opened.
        """
        path = str(getattr(self, which))
        if not path:
            raise UsageError(f"no checkpoint is selected as {which!r}")
        with self._lock:
            held = self._borrowed.get(which)
        if held is not None and held[0] == path:
            return held[1].checkpoint
        lease = self._registry.acquire(self.jail.resolve(path))
        with self._lock:
            old = self._borrowed.get(which)
            if not self._closed:
                self._borrowed[which] = path, lease
        if self._closed:
            lease.release()
            raise Cancelled
        if old is not None:
            old[1].release()
        return lease.checkpoint

    def hold(self, path: str) -> Lease:
        """Open a checkpoint for separate work, which must release it; call it in a job.

        Raises:
            OpenError: it leaves ROOT or cannot be opened.
        """
        return self._registry.acquire(self.jail.resolve(path))

    def wait(self, timeout: float = 60) -> bool:
        """Block until the requested checkpoint is open or has failed; for scripts and tests."""
        return self._opening.wait(timeout)

    def close(self) -> None:
        """Release the checkpoint; the session is over."""
        with self._lock:
            self._closed = True
            borrowed, self._borrowed = self._borrowed, {}
        for _, lease in borrowed.values():
            lease.release()
        self._let_go()

    def _let_go(self) -> None:
        self._opening.reset()
        self._looking.reset()
        self._changed = False
        with self._lock:
            self._turn = object()
            lease, self.lease = self.lease, None
        self.structure = None
        if lease is not None:
            lease.release()

    def _open(self, path: str, turn: object) -> Checkpoint:
        """Run in a worker. The state owns the lease immediately: the page may be gone before it is notified."""
        lease = self._registry.acquire(self.jail.resolve(path))
        with self._lock:
            current = turn is self._turn
            if current:
                self.lease = lease
        if not current:
            lease.release()
            raise Cancelled
        _ = lease.rows  # computed here, not on the page's thread
        return lease.checkpoint

    def _opened(self, event: param.parameterized.Event) -> None:
        if event.new == "failed":
            self.param.update(status="failed", error=without_partial(self._opening.error), tensor="")
        elif event.new == "done":
            ckpt = self._opening.result
            found: dict[str, Any] = {"ckpt": ckpt, "status": "open"}
            if self.tensor and self.tensor not in ckpt:
                words = f"the link names tensor {self.tensor!r}, which this checkpoint lacks"
                found |= {"notice": self._noticed(words), "tensor": ""}
            self.param.update(**found)

    def _looked(self, event: param.parameterized.Event) -> None:
        if event.new == "done":
            lease, words = self._looking.result
            if words and lease is self.lease:
                self._changed = True
                self.notice = self._noticed(words)

    def _noticed(self, words: str) -> str:
        return f"{self.notice}. {words}" if self.notice else words


def _below(path: str, run: str) -> bool:
    return run == "." or path.startswith(f"{run}/")


def query_of(state: WorkbenchState) -> str:
    """Return the query that reproduces the current view: ``?ckpt=run/step-4&tensor=wq&tab=tensors``."""
    if not state.path:
        return link(**{name: getattr(state, name) for name in RUN}) if state.run else ""
    return link(**{name: getattr(state, name) for name in URL})


def link(**selection: str) -> str:
    """Return the query that shows a selection, by the state's own names; empty values are left out."""
    kept = {url: selection[name] for name, url in URL.items() if selection.get(name)}
    return "?" + urlencode(kept, errors="surrogatepass", safe="/")


def joined(names: Iterable[str]) -> str:
    """Return names as one value of a link: percent-encoded, separated by commas."""
    return ",".join(quote(name, safe="/ ", errors="surrogatepass") for name in names)


def separated(value: str) -> list[str]:
    """Return the names that :func:`joined` has written."""
    return [unquote(name, errors="surrogatepass") for name in value.split(",") if name]


def parse_query(search: str) -> dict[str, str]:
    """Return the state's values in a URL's query; unknown, repeated, overlong and non-text fields are left out."""
    found: dict[str, str] = {}
    for field in search.removeprefix("?").split("&", FIELDS)[:FIELDS]:
        try:
            pairs = parse_qsl(field, errors="surrogatepass")
        except UnicodeDecodeError:  # %ff: only this field is dropped
            continue
        for url, value in pairs:
            found.setdefault(url, value)
    values = {name: found.get(url, "") for name, url in URL.items()}
    return {name: value for name, value in values.items() if len(value) <= LONGEST and _usable(name, value)}


def _usable(name: str, value: str) -> bool:
    """Return whether the value can be a path or a command-line argument; a tensor's key may be anything."""
    if name == "tensor":
        return True
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True
