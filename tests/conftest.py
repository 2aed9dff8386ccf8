"""What every test may lean on: samples, a private cache, a browser that sees no network.

::

    samples ──► sample_ckpts/                 chromium ──► path of the executable
    free_port ─► an unused loopback port      browser ───► one Playwright Chromium a session
                                              page ──────► a new page; .external, .console_errors
                                              quiet ─────► a page that must have kept both empty

Environment: ``WORKBENCH_SLOW=1`` runs the tests marked slow; ``WORKBENCH_CHROMIUM`` names the browser; with
``CI`` set a missing browser fails the tests that need one instead of skipping them.
"""

from __future__ import annotations

import gc
import ipaddress
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

ROOT = Path(__file__).resolve().parents[1]

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",  # containers run as root
    "--disable-dev-shm-usage",  # and often have a /dev/shm of 64 MB, in which a page dies
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-save-password-bubble",
    "--proxy-server=http://127.0.0.1:9",  # where nobody answers; loopback is reached without a proxy
]

WAIT = 45_000  #: ms that a page waits by default; a machine with other work on its cores is slow, not wrong
HUNG = 240  #: s after which a test's browser is killed; the longest test takes a tenth of it

# No property is judged by the clock: benchmarks are.
settings.register_profile("workbench", deadline=None)
settings.load_profile("workbench")

#: Besides those with a browser or a notebook: files of few tests that take most of a minute.
LONG = (
    "test_fuzz",
    "test_save",
    "test_doctor_echo",
    "test_fault_matrix",
    "test_stores",
    "test_load",
    "test_doctor_claims",
    "test_watch",
    "test_write_dcp",
)

_own = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Give this process and all that it starts (kernels, servers) a catalog cache of their own.

    The lab's runs, which take minutes to train, are shared by the workers of one session.
    """
    config.stash[_own] = [cache := tempfile.mkdtemp(prefix="workbench-test-cache-")]
    os.environ["WORKBENCH_CACHE"] = cache
    if "WORKBENCH_LAB" not in os.environ:  # set by the first process, whose environment the workers inherit
        config.stash[_own].append(lab := tempfile.mkdtemp(prefix="workbench-lab-"))
        os.environ["WORKBENCH_LAB"] = lab
    logging.root.manager.loggerDict = _Loggers(logging.root.manager.loggerDict)
    for name in [n for n in os.environ if n.startswith(("BOKEH_", "PANEL_"))]:
        del os.environ[name]  # BOKEH_RESOURCES=cdn would turn every page blank without a network


class _Loggers(dict[str, logging.Logger | logging.PlaceHolder]):
    """All loggers. pytest 9.2 goes through them before each test, while the thread of a server may create one."""

    def values(self) -> list[logging.Logger | logging.PlaceHolder]:  # type: ignore[override]
        return list(super().values())


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in config.stash[_own]:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the garbage collector, and let it never look at what is there then.

    That is 800,000 objects of torch, panel and the tests, alive to the end: each full collection would take 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Let each worker begin with other files: on a fresh clone, one worker's bytecode of a file serves the others.

    pytest rewrites the assertions of every file, which takes longer than the imports do. The order in which tests run
    is that of ``_in_order``, whatever the order in which they were collected.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and collector.path == ROOT / "tests":
        at = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[at:] + report.result[:at]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_wanted = os.environ.get("WORKBENCH_SLOW") == "1"
    for item in items:
        if item.get_closest_marker("slow") and not slow_wanted:
            item.add_marker(pytest.mark.skip(reason="slow; set WORKBENCH_SLOW=1 (make test-all)"))
        if item.get_closest_marker("browser"):
            # A browser that crashed or hung says nothing of the page in it; a page that hangs it does so again.
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=["TargetClosedError"]))
    items[:] = _in_order(items)


def _in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put long files first, and between any two that wait for a browser or a kernel one that computes.

    Workers take whole files (``--dist loadfile``) in this order: none is left with a long one at the end.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = sorted(path for path in files if path.stem == "test_notebooks" or path.stem.endswith("_browser"))
    computing = sorted(files.keys() - {*waiting}, key=lambda path: (not path.stem.startswith(LONG), path))
    turns = chain.from_iterable(zip_longest(waiting, computing))
    return [item for path in turns if path is not None for item in files[path]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget documents of sessions that are gone: they have no theme any more, and no picture can be drawn for them.

    What a server's loop was doing when it stopped never leaves its ``with patch_curdoc(…)``, which is of the whole
    process, as the document that is current elsewhere is. A session destroys its document when it ends, maybe later.
    """
    if (doc := sys.modules.get("bokeh.io.doc")) is not None:
        doc._PATCHED_CURDOCS[:] = [one for one in doc._PATCHED_CURDOCS if hasattr(one(), "_theme")]
        if not hasattr(doc.curstate().document, "_theme"):
            doc.curstate().document = sys.modules["bokeh.document"].Document()


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of small real checkpoints, ``sample_ckpts/``."""
    return ROOT / "sample_ckpts"


@pytest.fixture
def cache_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty catalog cache for this test alone (the others of a session share one)."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(path))
    return path


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that returns a loopback TCP port which nothing listened on a moment ago."""

    def find() -> int:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return sock.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium executable; skips, or fails where ``CI`` is set, when there is none."""
    if found := find_chromium():
        return found
    reason = "no Chromium; install it or set WORKBENCH_CHROMIUM"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def _launch(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], BrowserContext]]:
    """The session's Chromium; a new one in place of one that is gone.

    It has a profile on disk, which keeps scripts and what V8 compiled of them: a page takes two thirds of the time.
    """
    from playwright.sync_api import sync_playwright

    playwright = sync_playwright().start()
    launched: list[BrowserContext] = []

    def launch() -> BrowserContext:
        if not launched or not is_alive(launched[-1]):
            profile = tmp_path_factory.mktemp("chromium")
            launched.append(
                playwright.chromium.launch_persistent_context(
                    profile, executable_path=chromium, args=CHROMIUM_FLAGS, service_workers="block"
                )
            )
        return launched[-1]

    yield launch
    with killing("chrom", "node", after=HUNG), suppress(Exception):  # no test is wrong because a browser does not end
        for one in launched:
            one.close()
        playwright.stop()


@pytest.fixture
def browser(_launch: Callable[[], BrowserContext]) -> BrowserContext:
    """A headless Chromium, driven through Playwright and shared by the tests of a session."""
    return _launch()


def is_alive(browser: BrowserContext) -> bool:
    """Whether the browser neither ended nor was killed."""
    return browser.browser is not None and browser.browser.is_connected()


@contextmanager
def killing(*names: str, after: float) -> Iterator[None]:
    """Kill the processes below this one whose name begins so, unless the block ends within ``after`` seconds.

    Some of Playwright's calls (``evaluate``, ``close``) wait for a hung browser without end. When it is killed they
    raise TargetClosedError, and the test's traceback says where it was.
    """

    def kill() -> None:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child.name().startswith(names):
                    child.kill()

    timer = threading.Timer(after, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture
def page(browser: BrowserContext) -> Iterator[Page]:
    """A page that reaches loopback only, without cookies or anything else that a page before it stored.

    ``page.external`` lists the URLs of other requests and websockets, which fail, ``page.console_errors`` the console's
    errors and uncaught exceptions, both in order. Nothing is intercepted: a browser caches nothing of what is.
    """
    page = browser.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.external = []
    page.console_errors = []
    visited: set[str] = set()

    def look(url: str) -> None:
        if not is_loopback(url):
            page.external.append(url)

    page.on("request", lambda request: look(request.url))
    page.on("websocket", lambda ws: look(ws.url))
    page.on("framenavigated", lambda frame: visited.add("://".join(urlsplit(frame.url)[:2])))
    page.on("console", lambda m: page.console_errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: page.console_errors.append(str(error)))
    with killing("chrom", after=HUNG):
        yield page
        if is_alive(browser):
            page.unroute_all(behavior="ignoreErrors")  # a request on its way would be answered by a closed page
            tools = browser.new_cdp_session(page)
            for origin in visited:
                if origin.startswith("http"):
                    what = {"origin": origin, "storageTypes": "local_storage,indexeddb,cache_storage"}
                    tools.send("Storage.clearDataForOrigin", what)
            browser.clear_cookies()
            for one in browser.pages[1:]:  # and those that it opened; without the first, the browser would end
                one.close()


@pytest.fixture
def quiet(page: Page) -> Iterator[Page]:
    """A page that must have asked nobody outside, said no error and run no hostile name when the test is over.

    Hostile names of the tests, were they obeyed, set ``window.pwned``.
    """
    from playwright.sync_api import expect

    page.set_default_timeout(WAIT)
    expect.set_options(timeout=WAIT)
    yield page
    assert page.external == []
    assert page.console_errors == []
    assert page.evaluate("window.pwned") is None


def find_chromium() -> str | None:
    """Path of a Chromium executable, that of ``WORKBENCH_CHROMIUM`` first and only where it is set."""
    wanted = os.environ.get("WORKBENCH_CHROMIUM")
    names = [wanted] if wanted else ["/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome"]
    return next((found for name in names if (found := shutil.which(name))), None)


def is_loopback(url: str) -> bool:
    """Whether a request for ``url`` stays on this machine; ``data:`` and ``blob:`` never leave the page."""
    parts = urlsplit(url)
    if parts.scheme in {"data", "blob", "about"}:
        return True
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
