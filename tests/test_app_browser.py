"""The dashboard in a real Chromium that reaches nothing but loopback.

::

    served ──► the server in a thread of this process (so that the registry can be looked at), on ROOT:
               llama/ (Hugging Face), run/step-2, run/step-4 (DCP), names/ (hostile), broken/, changing/, huge/ (sparse)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import fsspec
import pytest
import torch
from playwright.sync_api import expect
from safetensors.torch import load_file, save_file

import workbench
from tests.conftest import WAIT
from tests.pages import at_rest, click_until, link
from tests.serving import SHORT_LIVED, serving
from workbench.app.registry import shared

pytestmark = pytest.mark.browser

REPO = Path(__file__).resolve().parents[1]
EVIL = '<img src=x onerror="window.pwned=1">'
NAMES = [f"{EVIL}.weight", "\x1b[31mred\x1b[0m", "abc\u202etxt.exe", "[click](javascript:window.pwned=2)", "<%= 1+1 %>"]


@pytest.fixture(scope="module")
def root(tmp_path_factory, samples):
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "hf_llama_bf16_sharded", root / "llama")
    shutil.copytree(samples / "titan_run", root / "run")
    for name in ("names", "broken", "changing", "huge", "[x](javascript:window.pwned=3) <b>bold<b>"):
        (root / name).mkdir()
    save_file({name: torch.ones(3, 3) for name in NAMES}, root / "names" / "model.safetensors")
    save_file({"w": torch.ones(2)}, root / "[x](javascript:window.pwned=3) <b>bold<b>" / "model.safetensors")
    save_file({"w": torch.ones(50, 50)}, root / "changing" / "model.safetensors")
    whole = (root / "changing" / "model.safetensors").read_bytes()
    (root / "broken" / "model.safetensors").write_bytes(whole[:-100])
    _sparse(root / "huge" / "model.safetensors", 300_000_000)
    outside = root.parent / "outside"
    shutil.copytree(root / "llama", outside)
    (root / "link").symlink_to(outside)
    return root


@pytest.fixture(scope="module")
def served(root):
    """URL of a running server; sessions of closed pages are dropped after some seconds."""
    with serving(root, **SHORT_LIVED) as url:
        yield url


def test_pick_a_checkpoint_and_read_true_numbers(quiet, served, root):
    page = quiet
    page.goto(served)
    page.get_by_text("nothing is written").wait_for()
    page.locator(".ckpt b", has_text=re.compile("^llama$")).click()
    facts = page.locator(".facts").first
    facts.wait_for()
    tensors = {k: v for file in (root / "llama").glob("*.safetensors") for k, v in load_file(file).items()}
    words = facts.inner_text()
    assert f"{sum(t.numel() for t in tensors.values()):,}" in words
    assert f"{len(tensors):,} in {len(tensors):,} chunks" in words
    assert "safetensors" in words
    page.locator(".charts td").first.wait_for()
    link(page, ckpt="llama")


def test_filter_sort_select_and_see_the_tensor(quiet, served, samples):
    page = quiet
    page.goto(f"{served}?ckpt=run/step-4")
    page.get_by_role("tab", name="Tensors").click()
    truth = load_file(samples.parent / "tests/truth" / "titan_run" / "step-4.safetensors")
    wanted = [key for key in truth if re.search(r"layers\.1.*exp_avg$", key)]
    box = page.get_by_label("Filter names")
    box.fill(r"layers\.1.*exp_avg$")
    box.press("Enter")
    page.get_by_text(f"{len(wanted)} of ").wait_for()
    page.locator('.tabulator-col[tabulator-field="nbytes"] .tabulator-col-sorter').click()
    cell = at_rest(page, page.locator('.tabulator-cell[tabulator-field="name"] span').nth(1))
    name = cell.inner_text()
    assert name in wanted
    click_until(page, cell, page.locator("h2.selected", has_text=re.compile(f"^{re.escape(name)}$")))
    page.locator(".stats").wait_for()
    tensor = truth[name].float()
    words = page.locator(".stats").inner_text().replace("−", "-")
    assert f"{tensor.min().item():.5g}" in words and f"{tensor.max().item():.5g}" in words
    worst = page.locator(".worst td.n").first.inner_text().replace("−", "-")
    assert float(worst) == pytest.approx(tensor.flatten()[tensor.abs().argmax()].item(), rel=1e-4)
    for heading in ("Histogram", "Heat map", "Most extreme elements", "Chunks"):
        assert page.locator("h3", has_text=heading).count() == 1
    assert page.locator("canvas").count() >= 2
    link(page, tensor=name, tab="tensors", q=r"layers\.1.*exp_avg$")


def test_a_deep_link_restores_the_selection_and_back_leads_back(quiet, served):
    page, key = quiet, "model.layers.1.mlp.down_proj.weight"
    page.goto(f"{served}?ckpt=llama&tensor={key}&tab=tensors&q={quote('mlp|norm')}")
    page.locator("h2.selected", has_text=key).wait_for()
    page.locator(".stats").wait_for()
    assert page.get_by_label("Filter names").input_value() == "mlp|norm"
    assert page.get_by_role("tab", name="Tensors").get_attribute("aria-selected") == "true"
    marked = page.locator('.tabulator-selected [tabulator-field="name"]')
    marked.wait_for()
    assert marked.inner_text() == key
    page.goto(f"{served}?ckpt=llama&tensor=gone&tab=tensors")
    page.get_by_text("'gone', which this checkpoint lacks").wait_for()


def test_the_number_of_a_page_is_that_of_its_rows(quiet, served, root):
    page, keys = quiet, list(workbench.open(root / "llama"))
    page.goto(f"{served}?ckpt=llama&tensor={keys[-1]}&tab=tensors")
    page.locator('.tabulator-selected [tabulator-field="name"]', has_text=keys[-1]).wait_for()
    table = page.locator(".tabulator", has=page.locator('.tabulator-col[tabulator-field="name"]'))
    pressed, last = table.locator(".tabulator-page.active"), -(-len(keys) // 10)
    expect(pressed).to_have_text(str(last))
    expect(table.get_by_role("button", name="Next")).to_be_disabled()
    table.get_by_role("button", name="Prev").click()
    expect(pressed).to_have_text(str(last - 1))
    first = keys[(last - 2) * 10]
    expect(table.locator('.tabulator-row [tabulator-field="name"]').first).to_have_text(first)


def test_back_and_forward_show_what_the_address_says(quiet, served):
    page = quiet
    page.goto(served)
    page.locator(".ckpt b", has_text=re.compile("^llama$")).click()
    page.locator(".facts").first.wait_for()
    link(page, ckpt="llama", tab="overview")
    page.get_by_role("tab", name="Tensors").click()
    link(page, ckpt="llama", tab="tensors")
    page.get_by_label("Filter names").fill("norm")
    page.get_by_label("Filter names").press("Enter")
    link(page, ckpt="llama", tab="tensors", q="norm")
    page.get_by_role("tab", name="Layout").click()
    link(page, ckpt="llama", tab="layout")
    page.locator(".ckpt b", has_text=re.compile("^names$")).click()
    link(page, ckpt="names", tab="layout")

    def shown(ckpt: str, tab: str) -> None:
        link(page, ckpt=ckpt, tab=tab.casefold())
        page.get_by_role("tab", name=tab, selected=True).wait_for()
        page.locator(".ckpt[aria-current] b", has_text=re.compile(f"^{ckpt}$")).wait_for()

    shown("names", "Layout")
    for tab in ("Layout", "Tensors", "Overview"):
        page.go_back()
        shown("llama", tab)
    page.go_back()
    page.get_by_text("nothing is written").wait_for()
    page.wait_for_url(lambda url: "ckpt=" not in url)
    for tab in ("Overview", "Tensors"):
        page.go_forward()
        shown("llama", tab)
    link(page, ckpt="llama", tab="tensors", q="norm")  # a filter adds no entry to the history
    expect(page.get_by_label("Filter names")).to_have_value("norm")
    page.go_forward()
    page.go_forward()
    shown("names", "Layout")


def test_a_view_that_never_says_it_is_finished_holds_nothing_up(quiet, served):
    def unfinished(route):
        said, response = "this._idle_notified&&this.has_finished()", route.fetch()
        body = response.text()
        assert body.count(said) == 1
        route.fulfill(response=response, body=body.replace(said, "this._idle_notified&&!1"))

    quiet.route(re.compile(r"/bokeh\.min\.js"), unfinished)
    quiet.goto(served)
    quiet.locator(".ckpt b", has_text=re.compile("^llama$")).click()
    quiet.locator(".facts").first.wait_for()
    link(quiet, ckpt="llama", tab="overview")


def test_a_bucket_is_served_like_a_folder(quiet, samples):
    system = fsspec.filesystem("memory")
    for file in (samples / "titan_run").rglob("*"):
        if file.is_file():
            system.pipe_file(f"/bucket/runs/{file.relative_to(samples)}", file.read_bytes())
    truth = load_file(samples.parent / "tests/truth" / "titan_run" / "step-4.safetensors")
    try:
        with serving("memory://bucket/runs", **SHORT_LIVED) as url:
            quiet.goto(url)
            quiet.locator(".ckpt b", has_text=re.compile("^titan_run/step-4$")).click()
            quiet.locator(".facts").first.wait_for()
            link(quiet, ckpt="titan_run/step-4", tab="overview")
            assert f"{len(truth):,} in " in quiet.locator(".facts").first.inner_text()
            name = next(key for key in truth if truth[key].ndim == 2)
            quiet.goto(f"{url}?ckpt=titan_run/step-4&tab=tensors&tensor={quote(name)}")
            quiet.locator(".stats").wait_for()
            words = quiet.locator(".stats").inner_text().replace("−", "-")
            assert f"{truth[name].min().item():.5g}" in words and f"{truth[name].max().item():.5g}" in words
            quiet.goto(f"{url}?ckpt=../other")
            quiet.locator(".said.error", has_text="leaves ROOT through").wait_for()
    finally:
        system.rm("/bucket", recursive=True)


def test_an_invalid_pattern_is_a_sentence(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=llama&tab=tensors")
    box = page.get_by_label("Filter names")
    box.fill("layers[")
    box.press("Enter")
    page.get_by_text("not a valid regular expression: unterminated character set (character 7)").wait_for()
    assert page.locator('.tabulator-cell[tabulator-field="name"]').count() == 10
    box.fill("layers")
    box.press("Enter")
    page.get_by_text(re.compile(r"\d+ of \d+ tensors")).wait_for()


@pytest.mark.parametrize(
    "path, words",
    {
        "broken": "truncated",
        "../outside": "leaves ROOT through",
        "link": "leaves ROOT",
    }.items(),
)
def test_what_cannot_or_may_not_be_opened_is_a_sentence(quiet, served, path, words):
    page = quiet
    page.goto(f"{served}?ckpt={quote(path)}")
    page.locator(".said.error", has_text=words).wait_for()
    assert "Traceback" not in page.content()
    assert page.get_by_role("tab").count() == 0


def test_the_list_names_nothing_outside_root(quiet, served):
    page = quiet
    page.goto(served)
    page.locator(".ckpt").first.wait_for()
    names = page.locator(".ckpt b").all_inner_texts()
    assert "llama" in names and not {"link", "outside"} & set(names)
    page.get_by_label("Find a checkpoint").press_sequentially("STEP-4")
    page.locator(".ckpt b", has_text="run/step-2").wait_for(state="detached")
    expect(page.locator(".ckpt b")).to_have_text(["run/step-4"])


@pytest.mark.slow
def test_hostile_names_are_shown_and_obeyed_nowhere(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=names&tab=tensors&tensor={quote(NAMES[0])}")
    page.locator("h2.selected", has_text=EVIL).wait_for()
    cells = page.locator('.tabulator-cell[tabulator-field="name"]')
    cells.first.wait_for()
    shown = set(cells.all_inner_texts())
    assert {f"{EVIL}.weight", r"\x1b[31mred\x1b[0m", r"abc\u202etxt.exe", NAMES[3], NAMES[4]} <= shown
    assert (
        set(page.locator('.tabulator-cell[tabulator-field="name"] span').evaluate_all("e => e.map(x => x.title)"))
        == shown
    )
    cells.first.hover()
    page.get_by_role("tab", name="Overview").click()
    page.get_by_text("Bytes by module").wait_for()
    page.get_by_text(EVIL).first.wait_for()  # a bar of that name
    page.goto(f"{served}?ckpt={quote('[x](javascript:window.pwned=3) <b>bold<b>')}")
    page.locator("h2", has_text="<b>bold<b>").wait_for()
    page.goto(f"{served}?ckpt={quote(EVIL)}")
    page.locator(".said.error", has_text="does not exist").wait_for()
    assert page.locator("a[href^='javascript']").count() == 0
    assert page.locator("img[src='x']").count() == 0


def test_a_file_that_changes_under_an_open_page_is_a_sentence(quiet, served, root):
    page = quiet
    page.goto(f"{served}?ckpt=changing&tab=tensors")
    page.locator('.tabulator-cell[tabulator-field="name"]').first.wait_for()
    save_file({"w": torch.zeros(60, 60)}, root / "changing" / "model.safetensors")
    row = page.locator('.tabulator-cell[tabulator-field="name"]').first
    click_until(page, row, page.locator(".said.error", has_text="open it again"))


def test_long_reads_show_progress_can_be_cancelled_and_leave_the_server_awake(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=huge&tab=tensors&tensor=w")
    page.get_by_text(re.compile(r"reading, [1-9]\d?%")).wait_for()
    began = time.monotonic()
    with urllib.request.urlopen(f"{served}liveness", timeout=10) as reply:
        assert json.load(reply)["/liveness"] is True
    assert time.monotonic() - began < 2
    # A click waits until the button has stopped moving; on a busy machine the read ends before that.
    page.get_by_role("button", name="Cancel").dispatch_event("click")
    page.get_by_text("Cancelled.").wait_for()
    page.wait_for_timeout(300)
    assert page.locator(".stats").count() == 0


@pytest.mark.slow
def test_two_sessions_share_a_checkpoint_and_closing_both_releases_it(browser, quiet, served, root):
    page, path = quiet, root / "run" / "step-2"
    other = browser.new_page()
    for session in (page, other):
        session.goto(f"{served}?ckpt=run/step-2")
        session.locator(".facts").first.wait_for(timeout=WAIT)
    assert shared._entries[path.resolve()].holders == 2
    other.close()
    page.locator(".ckpt b", has_text=re.compile("^llama$")).click()  # the one turns elsewhere, the other has left
    page.locator("h2", has_text="llama").wait_for()
    deadline = time.monotonic() + 30
    while path.resolve() in shared._entries and time.monotonic() < deadline:
        page.wait_for_timeout(200)
    assert path.resolve() not in shared._entries


def becomes_light(locator) -> bool:
    """Whether a text's colour turns light."""
    return becomes_more(
        locator, "e => Math.max(...(getComputedStyle(e).color.match(/\\d+/g) ?? [0]).slice(0, 3).map(Number))", 200
    )


def becomes_wide(locator, pixels: int) -> bool:
    """Whether an element becomes this wide."""
    return becomes_more(locator, "e => e.getBoundingClientRect().width", pixels - 1)


def becomes_more(locator, measure: str, least: float) -> bool:
    """Whether what is measured exceeds ``least``; a table replaces its cells while it draws, and a cell gone is 0."""
    until = time.monotonic() + WAIT / 1000
    while time.monotonic() < until:
        if locator.evaluate(measure) > least:
            return True
        time.sleep(0.1)
    return False


def test_narrow_and_dark(quiet, served):
    page = quiet
    page.set_viewport_size({"width": 800, "height": 900})
    page.goto(served)
    page.get_by_label("Open drawer").click()
    page.locator(".ckpt b", has_text=re.compile("^llama$")).click()
    page.locator(".facts").first.wait_for()
    page.locator(".MuiDrawer-root .ckpt").first.wait_for(state="hidden")  # the list makes room for what it opened
    page.get_by_label("Toggle theme").click()
    assert becomes_light(page.locator(".facts span").first)
    page.get_by_role("tab", name="Tensors").click()
    name = page.locator('.tabulator-cell[tabulator-field="name"]').first
    name.wait_for()
    assert becomes_light(name)
    assert becomes_wide(name, 240)
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    page.set_viewport_size({"width": 400, "height": 800})
    expect(page.locator(".MuiTabs-scrollButtons").last).to_be_visible()  # leads to the tabs that do not fit


def test_what_is_ready_before_the_page_has_loaded_is_not_lost(quiet, served):
    """Panel 1.9.4 drops changes between handing out the document and its first paint; ours wait for it."""
    quiet.set_viewport_size({"width": 800, "height": 900})
    for _ in range(2):
        quiet.goto(f"{served}?ckpt=llama")
        quiet.locator(".facts").first.wait_for()
        quiet.locator(".MuiDrawer-root .ckpt").first.wait_for(state="hidden")  # said by the browser while it loads
        assert quiet.locator(".MuiDrawer-root .MuiBackdrop-root:visible").count() == 0


@pytest.mark.slow
def test_panel_serve_works_even_when_the_session_expires_before_the_websocket_opens(quiet, root, free_port):
    """With 1 ms of life every page's session is made twice; the second must not ask a CDN for its style sheets."""
    port = free_port()
    flags = ["--unused-session-lifetime", "1", "--check-unused-sessions", "50", "--liveness"]
    command = ["-m", "panel", "serve", "workbench/app", "--port", str(port), *flags, "--args", str(root)]
    url = f"http://localhost:{port}/"
    with _process(command, f"{url}liveness"):
        for _ in range(2):
            quiet.goto(f"{url}app?ckpt=llama&tab=tensors&tensor=lm_head.weight")
            quiet.locator(".stats").wait_for()
            assert quiet.external == []


#: Two tabs with a table each, turned 8 times; the number of pages changes while a tab is being drawn.
TURNING = """
import numpy as np, pandas as pd, panel as pn, panel_material_ui as pmui
from workbench.app.aria import Aria
from workbench.app.paged import Paged
from workbench.app.rows import RowOrder

pn.extension("tabulator")
frame = pd.DataFrame({"row": np.arange(500)})
tables = [Paged(frame, page_size=10) for _ in range(2)]
tabs = pmui.Tabs(("one", pn.Column(tables[0])), ("two", pn.Column(tables[1])), dynamic=True)
said = pn.pane.HTML("")
document = pn.state.curdoc

def fill(rows):
    for table in tables:
        table.fill(frame, np.arange(rows), RowOrder(frame))

def turn(left):
    if not left:
        said.object = "<b>turned</b>"
        return
    tabs.active = left % 2
    for after, rows in ((1, 15), (6, 500), (11, 15), (16, 500), (21, 45)):
        document.add_timeout_callback(lambda rows=rows: fill(rows), after)
    document.add_timeout_callback(lambda: turn(left - 1), 400)

pn.state.onload(lambda: document.add_timeout_callback(lambda: turn(8), 1000))
pn.Column(Aria(width=0, height=0, margin=0), said, tabs).servable()
"""


@pytest.mark.slow
def test_a_table_may_change_before_it_is_drawn(quiet, tmp_path, free_port):
    """Panel 1.9.4 sets the number of pages of a table that Material UI has not drawn yet, and fails."""
    (tmp_path / "turning.py").write_text(TURNING)
    url = f"http://localhost:{(port := free_port())}/"
    with _process(
        ["-m", "panel", "serve", f"{tmp_path}/turning.py", "--port", str(port), "--liveness"], f"{url}liveness"
    ):
        quiet.goto(f"{url}turning")
        quiet.get_by_text("turned", exact=True).wait_for()
        quiet.get_by_role("button", name="Show Page 5").wait_for()  # 45 rows


def test_workbench_serve_prints_its_address_and_ends_on_an_interrupt(quiet, root, free_port):
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    with _process(["-m", "workbench", "serve", str(root), "--port", str(port)], f"{url}liveness") as process:
        for host in ("127.0.0.1", "localhost"):
            quiet.goto(f"http://{host}:{port}/?ckpt=llama")
            quiet.locator(".facts").first.wait_for()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0 and url in out and "Traceback" not in err


class _process:
    """A Python subprocess in the repository's root that answers at a URL; ended, and its output kept, on exit."""

    def __init__(self, arguments, url):
        self._url = url
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("BOKEH_", "PANEL_"))}
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self._url, timeout=5).close()
                return self._process
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._process.kill()
                    pytest.fail(f"no answer at {self._url}: {self._process.communicate()[1][-2000:]}")
                time.sleep(0.1)

    def __exit__(self, *_):
        if self._process.poll() is None:
            self._process.terminate()
            self._process.communicate(timeout=20)


def _sparse(path: Path, elements: int) -> None:
    """A safetensors file of one bfloat16 tensor of zeros that takes no room on the disk."""
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [elements // 1000, 1000], "data_offsets": [0, 2 * elements]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * elements)
