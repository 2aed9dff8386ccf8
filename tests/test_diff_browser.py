"""The Diff tab in a real Chromium that reaches nothing but loopback: choose B, compare, tap a cell, follow the link."""

from __future__ import annotations

import re
import shutil
from urllib.parse import quote

import pytest
from safetensors.torch import load_file
from test_tab_diff import EVIL, planted

from tests.pages import link, tap
from tests.serving import serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served(tmp_path_factory, samples):
    """URL of a server on a run of two steps and two checkpoints with planted changes and hostile names."""
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "titan_run", root / "run")
    planted(root)
    with serving(root) as url:
        yield url


def becomes(page, key):
    page.locator("h2.changed", has_text=re.compile(f"^{re.escape(key)}$")).wait_for()


def test_choose_compare_tap_and_come_back_by_the_link(quiet, served, samples):
    page = quiet
    page.goto(f"{served}?ckpt=run/step-2&tab=diff")
    page.get_by_text("steps of the same run come first").wait_for()
    page.get_by_label("B (compare with)").click()
    page.locator("li.MuiMenuItem-root", has_text="run/step-4").click()
    page.get_by_text("86 of 86 tensors changed").wait_for()
    page.locator(".bk-Figure").nth(2).wait_for()
    tap(page, 1.5, 0.5)  # column "0" after the one of no layer; the first row is the embeddings', which have no layer
    page.wait_for_timeout(500)
    assert "tensor" not in link(page)  # there is no cell
    tap(page, 2.5, 6.5)
    page.wait_for_function("location.search.includes('tensor=layers.1.')")
    key = link(page)["tensor"]
    becomes(page, key)
    a, b = (
        load_file(samples.parent / "tests/truth" / "titan_run" / f"step-{n}.safetensors")[key].double() for n in (2, 4)
    )
    assert f"{((b - a).norm() / a.norm()).item():.5g}" in page.locator(".facts").last.inner_text()
    page.get_by_text("Values before and after").wait_for()
    assert link(page) == {"ckpt": "run/step-2", "tensor": key, "tab": "diff", "b": "run/step-4"}
    page.reload()
    becomes(page, key)
    page.get_by_role("button", name="Swap A and B").click()
    link(page, ckpt="run/step-4", b="run/step-2")
    becomes(page, key)


def test_narrow_dark_and_hostile(quiet, served):
    page = quiet
    page.set_viewport_size({"width": 800, "height": 900})
    page.goto(f"{served}?ckpt=plain&b=edited&tab=diff&tensor={quote(EVIL)}")
    becomes(page, EVIL)
    page.get_by_label("Toggle theme").click()
    page.locator(".bk-Figure").nth(1).wait_for()
    page.locator("summary", has_text="Only in A").click()
    page.get_by_text("\\x1b[31mgone").wait_for()
    page.get_by_role("combobox", name="Show a tensor").press_sequentially("layers.0.q")
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
