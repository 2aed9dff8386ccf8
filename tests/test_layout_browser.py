"""The Layout tab in a real Chromium that reaches nothing but loopback: choose, tap, zoom, plan, follow the link."""

from __future__ import annotations

import re
import shutil
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import save_file
from test_tab_layout import EMBEDDINGS, EVIL

import workbench as wb
from benchmarks.synthetic import write_dcp_metadata
from tests.pages import frame, link, tap
from tests.serving import serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served(tmp_path_factory, samples):
    """URL of a server on a two-dimensional mesh, hostile names, and more chunks than are drawn one by one."""
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "dcp_tp2_fsdp2_vocab515", root / "mesh")
    (root / "evil").mkdir()
    save_file({EVIL: torch.ones(4, 3), "\x1b[31mred": torch.ones(2)}, root / "evil" / "model.safetensors")
    (root / "big").mkdir()
    assert write_dcp_metadata(root / "big", 200, 64) > 10_000
    with serving(root) as url:
        yield url, root


def test_choose_a_tensor_tap_its_shard_and_come_back_by_the_link(quiet, served):
    page, (url, root) = quiet, served
    page.goto(f"{url}?ckpt=mesh")
    page.get_by_role("tab", name="Layout").click()
    page.get_by_text("48 proven").wait_for()
    page.locator(".bk-Figure").wait_for()
    page.get_by_role("button", name="One tensor").click()
    box = page.get_by_role("combobox", name="Tensor")
    box.fill(EMBEDDINGS)
    box.press("Enter")
    page.locator("h2.placed", has_text=re.compile(f"^{re.escape(EMBEDDINGS)}$")).wait_for()
    page.get_by_text("_StridedShard(dim=0, sf=2)").wait_for()
    tap(page, 16, 200)
    piece = wb.layout(wb.open(root / "mesh")).pieces(EMBEDDINGS).set_index("holder").loc["rank 2"]
    page.locator(".tapped", has_text=f"bytes {piece['start']:,}–{piece['stop']:,}").wait_for()
    assert piece["file"] in page.locator(".tapped").inner_text()
    wanted = {"ckpt": "mesh", "tab": "layout", "view": "tensor", "tensor": EMBEDDINGS, "rank": "2"}
    assert link(page, rank="2") == wanted
    page.reload()
    page.locator("h2.placed").wait_for()
    page.get_by_role("button", name="Mesh").click()
    page.locator("h2.holder", has_text="rank 2").wait_for()
    page.get_by_text("At axis0=1, axis1=0").wait_for()
    page.get_by_role("button", name="Will it fit?").click()
    page.get_by_label("GPUs").fill("4")
    page.get_by_label("GB each").fill("0.0005")
    page.get_by_role("button", name="Find a layout").click()
    budget = wb.plan_memory(wb.open(root / "mesh"), 4, 0.0005)
    page.locator("h3", has_text=str(budget.chosen)).wait_for()
    link(page, fit="gpus=4,gb=0.0005")


def test_many_chunks_are_painted_zoomed_and_tapped_in_the_dark_and_narrow(quiet, served):
    page, (url, root) = quiet, served
    page.set_viewport_size({"width": 800, "height": 900})
    page.goto(f"{url}?ckpt=big&tab=layout&view=files")
    page.get_by_text("zoom in to see the chunks").wait_for()
    page.get_by_label("Toggle theme").click()
    page.locator(".bk-Figure").wait_for()
    page.wait_for_timeout(1500)
    left, top, width, height, x0, x1, *_ = frame(page)
    page.locator('.bk-tool-icon-wheel-zoom, [class*="wheel-zoom"]').first.click()
    page.mouse.move(left + width / 2, top + height / 2)
    for _ in range(6):
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(60)
    page.wait_for_timeout(2500)
    *_, a, b, _, _ = frame(page)
    assert b - a < 0.6 * (x1 - x0)  # zoomed
    *_, y0, y1 = frame(page)
    file = int((y0 + y1) / 2)
    tap(page, (a + b) / 2, file + 0.5)
    page.locator(".tapped").wait_for()
    page.wait_for_function("location.search.includes('tensor=')")
    words = page.locator(".tapped").inner_text()
    start, stop = (int(n.replace(",", "")) for n in re.search(r"bytes ([\d,]+)–([\d,]+)", words).groups())
    assert start - 1 <= (a + b) / 2 <= stop + 1
    chunks = wb.layout(wb.open(root / "big")).pieces(link(page)["tensor"])
    assert ((chunks["start"] == start) & (chunks["stop"] == stop)).any()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow  # every tab is shown hostile names in test_serving_browser; here each view of this one
def test_hostile_names_do_nothing(quiet, served):
    page, (url, _) = quiet, served
    for view in ("all", "tensor", "files", "mesh"):
        page.goto(f"{url}?ckpt=evil&tab=layout&view={view}&tensor={quote(EVIL)}")
        page.locator(".bk-Figure").first.wait_for()
        page.wait_for_timeout(800)
        box = page.locator(".bk-Figure").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # its tooltip
        page.wait_for_timeout(400)
    assert page.locator("img[src=x]").count() == 0
