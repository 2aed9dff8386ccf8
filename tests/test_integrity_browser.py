"""The Integrity tab in a real Chromium: a deep check with progress and cancel, findings, what does not open."""

from __future__ import annotations

import json
import re
import shutil
import struct

import pytest

from tests.pages import click_until, link
from tests.serving import serving

pytestmark = pytest.mark.browser

HUGE = 6 << 30  #: bytes of a sparse file, so that a check of every byte takes some seconds


@pytest.fixture(scope="module")
def served(tmp_path_factory, samples):
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "hf_llama_bf16_sharded", root / "llama")
    shutil.copytree(samples / "hf_llama_bf16_sharded", root / "short")
    cut = sorted((root / "short").glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-100])
    (root / "odd").mkdir()
    (root / "huge").mkdir()
    write(root / "odd" / "model.safetensors", "weight", struct.pack("<4f", 1.0, float("nan"), 2.0, 3.0), [4])
    with open(root / "huge" / "model.safetensors", "wb") as file:
        header = json.dumps({"w": {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}).encode()
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + HUGE)
    with serving(root) as url:
        yield url


def write(path, name, data, shape):
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def verify(page):
    page.get_by_role("button", name="Verify", exact=True).click()


def test_every_byte_is_read_when_asked_and_a_finding_says_what_to_do(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=odd&tab=integrity")
    page.get_by_role("button", name="Every byte").click()
    page.wait_for_function("location.search.includes('depth=deep')")
    verify(page)
    row = page.locator('.tabulator-cell[tabulator-field="message"]', has_text=re.compile("1 .*NaN"))
    row.first.wait_for()
    click_until(page, row.first, page.locator(".finding", has_text="weight"))
    with page.expect_download() as download:
        page.get_by_text("Download JSON").click()
    found = json.loads(download.value.path().read_text())
    assert [one["where"] for one in found["findings"] if one["severity"] == "error"] == ["weight"]
    link(page, depth="deep")


def test_a_deep_check_tells_its_progress_and_stops_when_cancelled(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=huge&tab=integrity&depth=deep")
    verify(page)
    page.get_by_text(re.compile(r"checking, \d+%")).wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled").wait_for()
    page.get_by_role("button", name="Verify", exact=True).wait_for()
    assert page.locator(".finding").count() == 0


def test_what_does_not_open_can_still_be_checked(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=short")
    page.get_by_text("Cannot open").wait_for()
    verify(page)
    page.locator('.tabulator-cell[tabulator-field="rule"]', has_text="files.truncated").wait_for()


def test_a_healthy_one_says_what_was_and_was_not_checked(quiet, served):
    page = quiet
    page.goto(f"{served}?ckpt=llama&tab=integrity")
    verify(page)
    page.get_by_text("Nothing was found").wait_for()
    page.get_by_text("payloads were not read").wait_for()
