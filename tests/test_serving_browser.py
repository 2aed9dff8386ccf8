"""Serving in a real Chromium: sign-in, prefix behind a proxy, exports, hostile names on every tab, sessions that end.

::

    _server(…) ──► serving(…), and sessions of closed pages are dropped after some seconds
"""

from __future__ import annotations

import http.cookiejar
import json
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving import SHORT_LIVED, serving
from workbench.app.access import PASSWORD
from workbench.app.page import SHOWN
from workbench.app.registry import shared

pytestmark = pytest.mark.browser

WORD = "correct horse"
EVIL = '<img src=x onerror="window.pwned=1">'
NAMES = [f"{EVIL}.layers.0.weight", "\x1b[31mred\x1b[0m", "abc\u202etxt.exe", "[click](javascript:window.pwned=2)"]

_server = partial(serving, **SHORT_LIVED)


@pytest.fixture(scope="module")
def root(tmp_path_factory, samples):
    """ROOT with a plain checkpoint and hostile ones: names of folders, of tensors, and of objects' keys."""
    root = tmp_path_factory.mktemp("serving") / "ckpts"
    root.mkdir()
    shutil.copytree(samples / "hf_llama_bf16_sharded", root / "llama")
    evil = root / f"{EVIL.replace('/', '')} \x1b[31m \u202e"
    evil.mkdir()
    save_file({name: torch.ones(3, 3) for name in NAMES}, evil / "model.safetensors")
    (root / "other").mkdir()
    save_file({name: torch.full((3, 3), 2.0) for name in NAMES}, root / "other" / "model.safetensors")
    return root


def test_nobody_looks_without_the_password_and_its_owner_does(quiet, root, monkeypatch):
    monkeypatch.setenv(PASSWORD, WORD)
    page = quiet
    with _server(root, auth="basic", user="ann") as url:
        with urllib.request.urlopen(f"{url}liveness", timeout=20) as reply:
            assert reply.status == 200  # a watchdog needs no password, and learns nothing
        with urllib.request.urlopen(f"{url}?ckpt=llama", timeout=20) as reply:
            assert reply.url.startswith(f"{url}login") and b"bk-" not in reply.read()
        page.goto(f"{url}?ckpt=llama&tab=tensors")
        for name, word in (("ann", "wrong horse"), ("bob", WORD)):
            page.get_by_label("Name").fill(name)
            page.get_by_label("Password").fill(word)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_role("alert").get_by_text("Wrong name or password").wait_for()
        assert page.locator(".ckpt").count() == 0
        page.get_by_label("Name").fill("ann")
        page.get_by_label("Password").fill(WORD)
        page.get_by_role("button", name="Sign in").click()
        page.locator(".ckpt b", has_text=re.compile("^llama$")).first.wait_for()
        page.goto(f"{url}?ckpt=llama&tab=tensors")
        page.locator('.tabulator-cell[tabulator-field="name"]').first.wait_for()
        page.goto(f"{url}logout")
        page.get_by_text("Sign in").wait_for()
        page.goto(url)
        page.get_by_label("Password").wait_for()


def test_a_websocket_without_the_cookie_or_from_elsewhere_is_refused(root, monkeypatch, free_port):
    monkeypatch.setenv(PASSWORD, WORD)
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))

    def status(url, **headers):
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "bokeh, x"} | headers
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}ws", headers=upgrade), timeout=20) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    with _server(root, auth="basic") as url:
        assert status(url, Origin="http://evil.example") == 403
        assert status(url, Origin=url.rstrip("/")) in (200, 401, 403)  # 200: the login page, after a redirect
        data = urllib.parse.urlencode({"username": "workbench", "password": WORD}).encode()
        with opener.open(f"{url}login", data, timeout=20) as reply:
            assert reply.status == 200 and "/login" not in reply.url
        assert {cookie.name for cookie in jar} >= {"user"}


def test_it_works_under_a_prefix_and_asks_for_nothing_outside_it(quiet, root):
    page, asked = quiet, []
    page.on("request", lambda request: asked.append(urllib.parse.urlsplit(request.url)))
    with _server(root, prefix="/tools/wb/") as url:
        assert url.endswith("/tools/wb/")
        with urllib.request.urlopen(f"{url}liveness", timeout=20) as reply:
            assert json.load(reply)
        page.goto(f"{url}?ckpt=llama&tab=tensors&tensor=lm_head.weight")
        page.locator(".stats").wait_for()
        assert page.locator("canvas").count() >= 1
    paths = [one.path for one in asked if one.scheme == "http"]  # not data: and blob:
    assert paths and all(path.startswith("/tools/wb/") for path in paths), paths


def test_the_password_works_under_a_prefix(quiet, root, monkeypatch):
    monkeypatch.setenv(PASSWORD, WORD)
    page = quiet
    with _server(root, prefix="wb", auth="basic") as url:
        page.goto(f"{url}?ckpt=llama")
        page.get_by_label("Name").fill("workbench")
        page.get_by_label("Password").fill(WORD)
        page.get_by_role("button", name="Sign in").click()
        page.locator(".ckpt b", has_text=re.compile("^llama$")).first.wait_for()
        assert urllib.parse.urlsplit(page.url).path == "/wb/"


def test_export_in_the_browser_dry_run_write_and_proof(quiet, root, samples):
    page = quiet
    (root / "exports").mkdir(exist_ok=True)
    with _server(root, exports="exports") as url:
        page.goto(f"{url}?ckpt=llama&tab=export")
        page.get_by_text("Would write").wait_for()
        page.get_by_label("Filter names").fill(r"mlp")
        page.get_by_label("Filter names").press("Enter")
        page.get_by_label("Target, relative").fill("mlp only")
        page.get_by_label("Target, relative").press("Enter")
        page.locator("h3", has_text="exports/mlp only").wait_for()
        assert "'exports/mlp only'" in page.locator(".command").inner_text()
        page.get_by_role("button", name="Export", exact=True).click()
        page.get_by_text("are bit-identical to the source").wait_for()
        link = page.url
    written = {k: v for f in (root / "exports" / "mlp only").glob("*.safetensors") for k, v in load_file(f).items()}
    truth = {k: v for f in (root / "llama").glob("*.safetensors") for k, v in load_file(f).items() if "mlp" in k}
    assert truth.keys() == written.keys() and all(torch.equal(truth[k], written[k]) for k in truth)
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
    assert query["into"] == ["mlp only"] and query["q"] == ["mlp"] and query["tab"] == ["export"]


@pytest.fixture(scope="module")
def writable(root):
    """URL of a server that may write below its root."""
    with _server(root, exports=".") as url:
        yield url


@pytest.mark.parametrize("query", ["into=../x", "mesh=tp%3D"])  # test_tab_export.py has the other targets
def test_a_refused_target_is_a_sentence(quiet, writable, query):
    quiet.goto(f"{writable}?ckpt=llama&tab=export&{query}")
    quiet.locator(".said.error").wait_for()
    assert quiet.get_by_role("button", name="Export", exact=True).count() == 0


def test_hostile_names_are_harmless_on_every_tab_and_the_last_session_lets_all_go(quiet, root):
    page = quiet
    path = next(one.name for one in root.iterdir() if EVIL[:4] in one.name)
    where = urllib.parse.urlencode({"ckpt": path, "b": "other", "echo": path, "tensor": NAMES[0]})
    before = set(shared._entries)  # of pages that were open when another test's server stopped
    with _server(root) as url:
        page.goto(f"{url}?{where}")
        for at, tab in enumerate(SHOWN):
            page.get_by_role("tab").nth(at).click()
            page.get_by_role("tab", selected=True).and_(page.get_by_role("tab").nth(at)).wait_for()
            page.wait_for_timeout(1500)
            told = page.locator("body").inner_text()
            assert "\x1b" not in told and "\u202e" not in told, tab
            assert page.locator("img[src='x']").count() == 0, tab
            assert page.locator("a[href^='javascript']").count() == 0, tab
            assert "should not happen" not in told, tab
        assert set(shared._entries) - before
        page.goto("about:blank")
        deadline = time.monotonic() + 30
        while set(shared._entries) - before and time.monotonic() < deadline:
            page.wait_for_timeout(200)
        assert {path.name for path in set(shared._entries) - before} == set()
