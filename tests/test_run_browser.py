"""The way from the first page to the cause of a jump, and the page of a run, in a real Chromium.

::

    served ──► ROOT: spike/ (the sample of a resume with wrong masters), growing/ (two steps and a log that grows),
               logs/ (no checkpoints), a folder with a hostile name
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

import workbench as wb
from tests.conftest import WAIT
from tests.pages import box_of, frame, link, tap
from tests.serving import SHORT_LIVED, serving
from tests.test_run import log, save

pytestmark = pytest.mark.browser
EVIL = '<img src=x onerror="window.pwned=1">'
PANS = 6
CAUSE = "The fp32 master weights do not match the weights."


@pytest.fixture(scope="module")
def root(tmp_path_factory, samples):
    root = tmp_path_factory.mktemp("served") / "ckpts"
    shutil.copytree(samples / "loss_spike", root / "spike")
    shutil.copy(samples / "loss_spike.csv", root / "spike" / "loss.csv")
    (root / "empty").mkdir()
    shutil.copytree(samples / "dcp_tp2_fsdp2_vocab515", root / "mesh")
    shutil.copytree(samples / "logs" / "torchtitan", root / "logs" / "titan")
    for name in ("growing", EVIL.replace("/", "")):
        for step in (10, 20):
            save(root / name, step)
    rows = "".join(f"{step},2.{step:02},{step}\n" for step in range(1, 26))
    (root / EVIL.replace("/", "") / "log.csv").write_text(f"step,loss,{EVIL}\n{rows}")
    log(root / "growing" / "log.csv", {step: 2 + step / 100 for step in range(1, 26)})
    return root


@pytest.fixture(scope="module")
def served(root):
    with serving(root, **SHORT_LIVED) as url:
        yield url


def open_run(page, served: str, **query: str):
    page.goto(served + wb_link(**query))
    page.locator("h1.name").wait_for()
    return page


def wb_link(**query: str) -> str:
    from workbench.app.state import link as made

    return made(**query)


def test_the_cause_of_a_jump_is_one_click_from_the_first_page_and_is_sent_with_another(quiet, served, tmp_path):
    page = quiet
    page.goto(served)
    card = page.locator("a[href='?run=spike']")
    expect(card).to_contain_text("The loss jumps at step 242 by 0.24, 1 step after a resume from step 240")
    began = time.monotonic()
    card.click()
    expect(page.locator(".cause")).to_contain_text(CAUSE)
    assert time.monotonic() - began < patience()
    assert page.locator(".bk-Figure canvas").first.is_visible()
    link(page, run="spike")
    with page.expect_download() as download:
        page.get_by_text("Download report").click()
    download.value.save_as(tmp_path / "report.html")
    assert CAUSE.rstrip(".") in (tmp_path / "report.html").read_text("utf-8")
    page.get_by_text("All signs, pictures and what was not checked").click()
    link(
        page, run="spike", ckpt="spike/step-240.pt", b="spike/step-245.pt", echo="spike/step-240-echo.pt", tab="doctor"
    )
    page.get_by_text(CAUSE).first.wait_for()
    page.go_back()
    expect(page.locator(".cause")).to_contain_text(CAUSE)
    page.go_back()
    expect(card).to_be_visible()


@dataclass(frozen=True)
class Task:
    """A question, how many clicks from the first page may answer it, those after the first one, and where the answer
    is."""

    question: str
    budget: int
    clicks: tuple[str, ...]
    answer: str


#: A first click → the questions that it leads to. The cause of a jump and a layer over the run have tests of their own.
TASKS: dict[str, list[Task]] = {
    "": [Task("is a step damaged", 0, (), ".strip .finding[title*='differ from their rounded masters']")],
    "a[href='?run=spike']": [
        Task("what is damaged", 1, (), "text=Since step 240"),
        Task("which layers changed most", 2, ("text='update'",), "text=Change of the weights since the step before"),
        Task("two runs side by side", 2, (".chips a >> text='growing'",), ".chips a.on"),
    ],
    ".ckpt b >> text='mesh'": [
        Task("how many bytes has each rank", 1, (), "h3 >> text='Bytes by rank'"),
        Task("which rank holds a tensor", 2, ("role=tab[name='Layout']",), "text='All tensors'"),
    ],
    ".ckpt b >> text='spike/step-245.pt'": [
        Task("the learning rate of a step", 1, (), "tr >> text=optimizer.param_groups")
    ],
}
WAITS = 10  #: seconds of waiting for an answer on a machine that does nothing else; 2 to 3 are usual


def patience() -> float:
    """Seconds of waiting for an answer, where others use the cores, too."""
    return WAITS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize("first", TASKS)
def test_questions_are_answered_within_their_clicks_and_seconds(quiet, served, first):
    def seconds(selector: str) -> float:
        began = time.monotonic()
        expect(quiet.locator(selector).first).to_be_attached()
        return time.monotonic() - began

    quiet.goto(served)
    quiet.locator("h2", has_text="runs under").first.wait_for()
    waited = 0.0
    if first:
        waited = seconds(first)
        quiet.locator(first).first.click()
    for task in TASKS[first]:
        assert bool(first) + len(task.clicks) <= task.budget, task.question
        spent = waited
        for one in task.clicks:
            spent += seconds(one)
            quiet.locator(one).first.click()
        spent += seconds(task.answer)
        assert spent < patience(), task.question


def test_the_first_page_is_there_before_its_scripts(quiet, served):
    page = quiet
    page.goto(served)
    page.locator("a[href='?run=spike']").wait_for()  # somebody has looked at the runs
    page.route("**/*.js*", lambda route: page.wait_for_timeout(1500) or route.continue_())
    page.goto(served, wait_until="commit")
    card = page.locator("#first a[href='?run=spike']")
    expect(card).to_contain_text("The loss jumps at step 242")
    assert page.evaluate("typeof Bokeh") == "undefined"
    card.click()  # followed when the page is live
    expect(page.locator("h1.name")).to_have_text("spike")
    expect(page.locator("#first")).to_have_count(0)


def test_on_a_phone_the_table_of_checkpoints_shows_their_health(quiet, served):
    page = quiet
    page.set_viewport_size({"width": 400, "height": 800})
    open_run(page, served, run="spike")
    box = box_of(page, page.locator('.tabulator-cell[tabulator-field="health"]', has_text="▲"))
    assert box["x"] >= 0 and box["x"] + box["width"] <= 400


def test_another_run_is_drawn_over_it_with_one_click(quiet, served):
    page = open_run(quiet, served, run="spike", versus="logs/titan")
    expect(page.locator(".chips a.on")).to_have_text("logs/titan")
    loss = wb.run(Path("sample_ckpts/logs/torchtitan")).metrics["loss"].dropna()
    drawn = """() => {
      const found = []
      const column = (data, name) => data?.get ? data.get(name) : data?.[name]
      const walk = (view) => {
        for (const {data_source} of view.model.renderers ?? []) {
          const run = column(data_source?.data, "run")
          if (run) found.push([run[0], Array.from(column(data_source.data, "value"))])
        }
        for (const child of view.child_views ?? []) walk(child)
      }
      for (const root of Bokeh.index.roots) walk(root)
      return found
    }"""
    page.wait_for_function(f"({drawn})().some(([name]) => name === 'logs/titan')")
    values = {name: line for name, line in page.evaluate(drawn) if len(line) == len(loss)}
    assert values["logs/titan"] == loss.tolist()
    page.locator(".chips a", has_text="growing").click()
    link(page, run="spike", **{"with": "logs/titan,growing"})


def test_layers_lead_to_their_tensors_checkpoints_open_and_the_trail_leads_back(quiet, served):
    page = quiet
    page.goto(served)
    page.locator("a[href='?run=spike']").click()
    page.get_by_text("Norm of the weights.").wait_for()
    figure = page.locator(".bk-Figure").last

    def click_a_cell(then: Locator) -> None:
        for _ in range(8):  # the picture may still move while tables above it are drawn
            figure.scroll_into_view_if_needed()
            box = box_of(page, figure)
            page.mouse.click(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.38)
            page.wait_for_timeout(700)
            if then.is_visible():
                return
        raise TimeoutError(f"{then} did not appear")

    click_a_cell(page.locator("h3", has_text="weight norm over the steps"))
    expect(page.locator(".cause")).to_contain_text(CAUSE)
    cell = page.locator('.tabulator-cell[tabulator-field="path"]', has_text=re.compile("^step-245.pt$"))
    for _ in range(8):  # a click is lost if the table is drawn anew between its press and its release
        cell.click()
        page.wait_for_timeout(3000)
        if "ckpt=" in page.url:
            break
    link(page, run="spike", ckpt="spike/step-245.pt")
    page.locator(".facts").first.wait_for()
    trail = page.get_by_label("Where this is").locator("a")
    trail.filter(has_text="spike").click()
    page.locator("h1.name").wait_for()
    assert link(page, run="spike").get("ckpt") is None
    page.get_by_role("button", name="update").click()
    link(page, heat="update")
    page.get_by_text("Change of the weights since the step before").wait_for()
    tensor = page.get_by_text(re.compile("^Open .* at step 245$"))
    click_a_cell(tensor)
    name = re.search("Open (.*) at step", tensor.inner_text())[1]
    tensor.click()
    assert link(page, tab="tensors", ckpt="spike/step-245.pt")["tensor"] == name
    page.get_by_text("Most extreme elements", exact=True).wait_for()
    trail.first.click()
    expect(page.locator("a[href='?run=spike']")).to_be_visible()


def test_a_new_step_and_new_lines_appear_without_a_reload(quiet, served, root):
    page = open_run(quiet, served, run="growing")
    expect(page.get_by_text("2 checkpoints").first).to_be_visible()
    with (root / "growing" / "log.csv").open("a") as file:
        file.writelines(f"{step},{2 + step / 100}\n" for step in range(26, 31))
    save(root / "growing", 30)
    expect(page.get_by_text("3 checkpoints").first).to_be_visible()
    expect(page.get_by_text("30 points").first).to_be_visible()


def test_names_and_metrics_stay_text(quiet, served):
    page = quiet
    page.goto(served)
    card = page.locator(".runs a", has_text="onerror")
    card.click()
    page.locator("h1.name", has_text="onerror").wait_for()
    page.get_by_text("2 checkpoints").first.wait_for()
    assert page.evaluate("window.pwned") is None


def test_what_is_no_run_says_so(quiet, served):
    page = quiet
    for path in ("absent", "../", "empty"):
        page.goto(served + wb_link(run=path))
        page.get_by_text("Cannot open the run").wait_for()


def test_ten_thousand_steps_of_fifty_metrics_pan_in_the_browser(quiet, root, served):
    folder = root / "long"
    folder.mkdir(exist_ok=True)
    names = [f"m{n}" for n in range(49)]
    lines = [",".join(["step", "loss", *names])]
    lines += [
        ",".join([str(step), f"{3 + step % 7}", *(f"{step % (n + 2)}" for n in range(49))]) for step in range(10_000)
    ]
    (folder / "log.csv").write_text("\n".join(lines))
    received: list[int] = []
    quiet.on("websocket", lambda ws: ws.on("framereceived", lambda data: received.append(len(data))))
    page = open_run(quiet, served, run="long", metrics="loss,m1,m2")
    left, top, width, height, x0, x1, *_ = frame(page)
    page.get_by_text("10,000 points").first.wait_for()
    before = -1
    while before != sum(received):  # until the rest of the page is there
        before = sum(received)
        page.wait_for_timeout(1000)
    for number in range(PANS):  # to the left and back
        page.mouse.move(left + width * 0.5, top + height * 0.5)
        page.mouse.down()
        page.mouse.move(left + width * (0.7 if number % 2 else 0.3), top + height * 0.5, steps=5)
        page.mouse.up()
        if number == 0:
            moved = frame(page)
            assert moved[4] > x0 and moved[5] > x1
    page.wait_for_timeout(500)
    assert before > 3 * 10_000 * 8 > 10 * (sum(received) - before)  # three curves came once, and not again


def test_a_report_opens_without_a_network(quiet, tmp_path):
    page = quiet
    target = tmp_path / "report.html"
    wb.run("sample_ckpts/loss_spike").to_html(target)
    page.set_default_timeout(WAIT)
    page.set_content(target.read_text("utf-8"))
    page.locator(".bk-Figure canvas").first.wait_for()
    expect(page.locator("body")).to_contain_text(CAUSE.rstrip("."))


def test_a_tap_on_a_jump_asks_for_it(quiet, served):
    page = open_run(quiet, served, run="spike", at="241")
    expect(page.get_by_text("What changed at step 241?")).to_be_visible()
    value = float(wb.run("sample_ckpts/loss_spike").metrics["loss"][242])
    page.wait_for_timeout(1500)
    tap(page, 242, value)
    link(page, at="242")
    expect(page.get_by_text("Why did the loss jump at step 242?")).to_be_visible()
