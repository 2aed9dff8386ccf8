"""The Diff tab in a real Chromium that reaches nothing but loopback: choose B, compare, tap a cell, follow the link."""

from __future__ import annotations

import re
import shutil
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from safetensors.torch import load_file
from test_tab_diff import EVIL, planted

from tests.serving import serving

pytestmark = pytest.mark.browser

#: Where the figures of the page lie: their frame's box in the figure, and the ranges of their axes.
FRAMES = """() => {
  const found = []
  const walk = (view) => {
    if (view.model.type === "Figure") {
      const {frame: {bbox}, model: {x_range: x, y_range: y}} = view
      found.push([bbox.left, bbox.top, bbox.width, bbox.height, x.start, x.end, y.start, y.end])
    } else for (const child of view.child_views ?? []) walk(child)
  }
  for (const root of Bokeh.index.roots) walk(root)
  return found
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory, samples):
    """URL of a server on a run of two steps and two checkpoints with planted changes and hostile names."""
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "titan_run", root / "run")
    planted(root)
    with serving(root) as url:
        yield url


def tap(page, column, row):
    """Click into a cell of the first figure."""
    figure = page.locator(".bk-Figure").first
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    left, top, width, height, x0, x1, y0, y1 = page.evaluate(FRAMES)[0]
    across, down = (column + 0.5 - x0) / (x1 - x0), (row + 0.5 - y1) / (y0 - y1)
    page.mouse.click(box["x"] + left + across * width, box["y"] + top + down * height)


def becomes(page, key):
    page.locator("h2.changed", has_text=re.compile(f"^{re.escape(key)}$")).wait_for()


def query(page):
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def test_choose_compare_tap_and_come_back_by_the_link(quiet, served, samples):
    page = quiet
    page.goto(f"{served}?ckpt=run/step-2&tab=diff")
    page.get_by_text("steps of the same run come first").wait_for()
    page.get_by_label("B, to compare with").click()
    page.locator("li.MuiMenuItem-root", has_text="run/step-4").click()
    page.get_by_text("86 of 86 tensors changed").wait_for()
    page.locator(".bk-Figure").nth(2).wait_for()
    tap(page, 1, 0)  # column "0" after the one of no layer; the first row is the embeddings', which have no layer
    page.wait_for_timeout(500)
    assert "tensor" not in query(page)  # there is no cell
    tap(page, 2, 6)
    page.wait_for_function("location.search.includes('tensor=layers.1.')")
    key = query(page)["tensor"]
    becomes(page, key)
    a, b = (load_file(samples / "truth" / "titan_run" / f"step-{n}.safetensors")[key].double() for n in (2, 4))
    assert f"{((b - a).norm() / a.norm()).item():.5g}" in page.locator(".facts").last.inner_text()
    page.get_by_text("Values before and after").wait_for()
    assert query(page) == {"ckpt": "run/step-2", "tensor": key, "tab": "diff", "b": "run/step-4"}
    page.reload()
    becomes(page, key)
    page.get_by_role("button", name="Swap A and B").click()
    page.wait_for_function("location.search.includes('ckpt=run/step-4')")
    becomes(page, key)
    assert query(page)["b"] == "run/step-2"


def test_narrow_dark_and_hostile(quiet, served):
    page = quiet
    page.set_viewport_size({"width": 800, "height": 900})
    page.goto(f"{served}?ckpt=plain&b=edited&tab=diff&tensor={quote(EVIL)}")
    becomes(page, EVIL)
    page.get_by_label("Toggle theme").click()
    page.locator(".bk-Figure").nth(1).wait_for()
    page.locator("summary", has_text="Only in A").click()
    page.get_by_text("\\x1b[31mgone").wait_for()
    page.get_by_role("combobox", name="Look at a tensor").press_sequentially("layers.0.q")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    becomes(page, "layers.0.q")
    page.locator(".pattern", has_text="halves").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    with page.expect_download() as download:
        page.get_by_text("Download JSON").click()
    assert download.value.suggested_filename == "plain-edited-diff.json"


def test_b_that_leaves_root_is_a_sentence(quiet, served):
    quiet.goto(f"{served}?ckpt=plain&b=../outside&tab=diff")
    quiet.get_by_role("alert").wait_for()
    quiet.get_by_role("button", name="Compare").wait_for()
