"""The Doctor tab in a real Chromium that reaches nothing but loopback: choose the echo, read the cause."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.pages import click_until, link
from tests.serving import serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served(tmp_path_factory, samples):
    """URL of a server on the loss spike's run."""
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "loss_spike", root / "run")
    with serving(root) as url:
        yield url


def test_from_an_empty_tab_to_the_cause_and_back_by_the_link(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=run/step-240.pt")
    page.get_by_role("tab", name="Doctor").click()
    page.get_by_text("Choose what to compare it with").wait_for()
    page.get_by_role("button", name="Examine this checkpoint alone").wait_for()
    page.get_by_label("Echo").click()
    page.locator("li.MuiMenuItem-root", has_text="run/step-240-echo.pt").click()
    cause = page.locator(".workbench-doctor summary", has_text="D2").first  # what the sample was made with
    cause.wait_for()
    assert "certain" in cause.inner_text()
    wanted = {"ckpt": "run/step-240.pt", "tab": "doctor", "echo": "run/step-240-echo.pt"}
    assert link(page, **wanted) == wanted
    shards_and_low_bits = page.locator(".bk-Figure").nth(1)  # the last to be drawn: the tab is complete then
    shards_and_low_bits.wait_for()
    page.reload()
    shards_and_low_bits.wait_for()
    cause.wait_for()
    row = page.locator('.tabulator-cell[tabulator-field="rule"]', has_text="R09")
    click_until(page, row, page.locator("h3.finding", has_text="R09"))
    with page.expect_download() as download:
        page.get_by_text("Download JSON").click()
    with open(download.value.path()) as file:
        assert json.load(file)["causes"][0]["cause"] == "D2"


def test_narrow_and_dark_all_that_is_shown_fits_and_can_be_read(quiet, served):
    page = quiet
    page.set_viewport_size({"width": 800, "height": 900})
    page.goto(f"{served}?ckpt=run/step-240.pt&tab=doctor&b=run/step-245.pt&echo=run/step-240-echo.pt&given=wd=0.1")
    page.get_by_label("Toggle theme").click()
    page.locator(".bk-Figure").nth(3).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    page.locator(".bk-Legend").nth(3).wait_for()
    for one in page.locator(".bk-Legend").all():
        box = one.bounding_box()
        assert box["x"] + box["width"] <= 800
    page.get_by_role("button", name="Facts and depth").click()
    assert page.get_by_label("Weight decay").input_value() == "0.1"
    colour = page.locator(".workbench-doctor").first.evaluate("one => getComputedStyle(one).color")
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    assert min(red, green, blue) > 150, "light on dark"
    page.locator("summary", has_text="found correct").click()
    page.get_by_text("equal bit for bit").first.wait_for()
