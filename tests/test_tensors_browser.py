"""Tensors and Overview in a real Chromium: slices by keyboard, downloads, a slow pattern, pictures saved, the run."""

from __future__ import annotations

import csv
import re
import shutil
import time
import urllib.request
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pages import link
from tests.serving import SHORT_LIVED, serving

pytestmark = pytest.mark.browser
KEY = "layers.1.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory, samples):
    """URL of a server on a run of two steps and a checkpoint with a name that is long."""
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "titan_run", root / "run")
    (root / "long").mkdir()
    save_file({"x" * 6000: torch.ones(2), "y": torch.ones(1)}, root / "long" / "model.safetensors")
    with serving(root, **SHORT_LIVED) as url:
        yield url


def test_a_slice_is_typed_moved_linked_and_downloaded(quiet, served, samples):
    page, truth = quiet, load_file(samples.parent / "tests/truth" / "titan_run" / "step-4.safetensors")[KEY]
    page.goto(f"{served}?ckpt=run/step-4&tab=tensors&tensor={KEY}&slice={quote('3:6, ::40')}")
    page.locator("table.window").wait_for()
    cells = page.locator("table.window td.n")
    wanted = truth[3:6, ::40]
    assert cells.count() == wanted.numel()
    assert [float(text.replace("−", "-")) for text in cells.all_inner_texts()] == pytest.approx(
        wanted.flatten().tolist(), rel=1e-3
    )
    box = page.get_by_label("Slice", exact=True)
    box.fill("0:2, 99")
    box.press("Enter")
    page.locator(".said.error", has_text="out of range").wait_for()
    box.fill("0:10, 5")
    box.press("Enter")
    page.get_by_text("rows are axis 0").wait_for()
    page.get_by_role("button", name="↓ rows").press("Enter")
    link(page, slice="10:20, 5")
    page.locator("table.window th", has_text=re.compile("^10$")).wait_for()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download slice CSV").click()
    rows = list(csv.reader(waiting.value.path().read_text().splitlines()))
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(truth[10:20, 5].tolist())


def test_a_picture_is_saved_and_its_tools_need_no_network(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=run/step-4&tab=tensors&tensor={KEY}")
    page.locator(".stats").wait_for()
    tool = page.locator(".bk-SaveTool, .bk-ToolButton[title^=Save], [title='Save']").first
    tool.wait_for()
    icon = tool.locator(".bk-tool-icon, .bk-ToolIcon, div").first
    assert "data:image" in icon.evaluate("e => getComputedStyle(e).maskImage + getComputedStyle(e).backgroundImage")
    with page.expect_download() as waiting:
        tool.click()
    assert waiting.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_slow_pattern_in_a_link_is_a_sentence_and_the_server_lives(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=long&tab=tensors&q={quote('(?:x+x+)+y')}")
    page.get_by_text("Filtering").wait_for()
    began = time.monotonic()
    urllib.request.urlopen(f"{served}liveness", timeout=10).close()
    assert time.monotonic() - began < 2
    page.locator(".said.error", has_text="takes too long").wait_for()


def test_the_overview_tells_health_and_turns_to_another_step(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=run/step-4")
    page.get_by_text("Structure: intact").wait_for()
    page.get_by_role("button", name="Earlier step").press("Enter")
    page.locator("h2", has_text="run/step-2").wait_for()
    link(page, ckpt="run/step-2")
    page.get_by_role("button", name="Open Integrity").click()
    page.get_by_role("button", name="Verify").wait_for()
    link(page, tab="integrity")


def test_a_rank_that_is_not_stored_is_a_dash(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=long&tab=tensors&tensor=y")
    page.locator("h3", has_text="Chunks").wait_for()
    cell = page.locator(".tabulator-cell[tabulator-field=rank]").last
    cell.wait_for()
    assert cell.inner_text() == "–"
