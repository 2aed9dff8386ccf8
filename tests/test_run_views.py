"""What a run's page, pictures and report show is what was logged and stored; nothing here needs a browser."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.test_run import log, save, spiky
from workbench.analysis.health import check_step, unseen
from workbench.app.home import Home
from workbench.app.jail import Jail
from workbench.app.picker import Picker
from workbench.app.run_cache import RunCache
from workbench.app.run_page import RunPage
from workbench.app.state import WorkbenchState, joined, link, parse_query, query_of, separated
from workbench.app.tabs.run import RunTab
from workbench.cli import main
from workbench.runs import discover, grouped
from workbench.views.run import run_sentence
from workbench.views.run_pictures import (
    Curves,
    MetricLine,
    curves_of,
    layer_grid,
    layers_figure,
    run_figure,
    thinned,
)

SAMPLES = Path(__file__).parents[1] / "sample_ckpts"
LOGGED = {int(row["step"]): row for row in csv.DictReader((SAMPLES / "loss_spike.csv").read_text().splitlines())}


@pytest.fixture
def run(tmp_path):
    """Five steps, the fourth with NaN; the loss jumps at step 41, right after a resume."""
    root = tmp_path / "ckpts" / "run"
    for step in (10, 20, 30, 50):
        save(root, step)
    torch.save({"model": {"w": torch.tensor([1.0, math.nan, 2.0])}, "step": 40}, root / "step-40.pt")
    before, after = spiky(41, last=60), list(spiky(41, last=60).items())
    log(
        root / "log.csv",
        [(s, v) for s, v in before.items() if s <= 45 and s < 41] + [one for one in after if one[0] > 40],
    )
    return root


# ---- data of the pictures ------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), min_size=1, max_size=300), st.integers(4, 60))
def test_a_thinned_line_keeps_the_extremes_in_order(values, most):
    steps, values = np.arange(len(values)) * 3, np.asarray(values)
    fewer, kept = thinned(steps, values, most)
    assert len(fewer) <= max(most, 4) and (np.diff(fewer) > 0).all()
    assert np.array_equal(kept, values[fewer // 3], equal_nan=True)
    known = values[np.isfinite(values)]
    if len(known):
        assert np.nanmax(kept) == known.max()
        assert len(values) > most or np.array_equal(kept, values, equal_nan=True)


def test_the_picture_shows_what_was_logged_and_what_the_run_found():
    found = wb.run(SAMPLES / "loss_spike")
    curves = curves_of(found)
    (line,) = curves.lines["loss"].values()
    assert line.steps.tolist() == sorted(LOGGED)
    assert line.values.tolist() == [float(LOGGED[step]["loss"]) for step in sorted(LOGGED)]
    assert [one[0] for one in curves.resumes] == found.resumes["step"].tolist()
    assert [(one[0], one[1]) for one in curves.spikes] == [(242, float(LOGGED[242]["loss"]))]
    assert {(one[0], one[1]) for one in curves.saves} == {(one.step, one.path) for one in found.found}


def test_the_figure_holds_every_point_and_calls_back():
    from bokeh.models import ColumnDataSource, GlyphRenderer

    tapped = []
    curves = curves_of(wb.run(SAMPLES / "loss_spike"))
    figure = run_figure(curves, tapped=lambda *what: tapped.append(what))
    sources = [one.data_source for one in figure.select({"type": GlyphRenderer})]
    lines = [one.data for one in sources if isinstance(one, ColumnDataSource) and "run" in one.data]
    assert lines[0]["value"].tolist() == [float(LOGGED[step]["loss"]) for step in sorted(LOGGED)]
    spike = next(one for one in sources if "label" in one.data)
    saved = next(one for one in sources if "marker" in one.data)
    spike.selected.indices, saved.selected.indices = [0], [2]
    assert tapped == [("spike", 242), ("save", "step-245.pt")]


def test_nan_is_marked_at_the_height_of_the_point_before_it(tmp_path):
    save(tmp_path, 50)
    log(tmp_path / "log.csv", {s: math.nan if s > 60 else 3 + s / 100 for s in range(1, 81)})
    ((step, value, label, certain, _),) = curves_of(wb.run(tmp_path)).spikes
    assert (step, value, label, certain) == (61, 3.6, "NaN at 61", True)


@pytest.mark.parametrize(("value", "span"), [(0.001, 0.0008), (-20.0, 16.0), (0.0, 1.0)])
def test_a_constant_metric_is_not_drawn_at_zero(value, span):
    line = MetricLine(np.arange(10), np.full(10, value))
    figure = run_figure(Curves({"lr": {"": line}})).children[0]
    assert figure.y_range.default_span == pytest.approx(span)


def test_words_beside_resumes_have_room_on_a_phone():
    from bokeh.models import Label

    curves = Curves({"loss": {"": MetricLine(np.arange(101), np.ones(101))}}, resumes=[(s, "") for s in (30, 40, 55)])
    words = sorted(one.x for one in run_figure(curves).select({"type": Label}) if one.text == "resumed")
    assert words == [29.5, 54.5]


def test_an_abandoned_branch_is_drawn_and_belongs_to_one_run_only():
    found = wb.run(SAMPLES / "logs" / "torchtitan")
    curves = curves_of(found, ["loss"], others={"other": wb.run(SAMPLES / "loss_spike")}, name="this")
    ghosts = found.ghosts[found.ghosts["metric"] == "loss"]
    (steps, values), *none = curves.lines["loss"]["this"].ghosts
    assert not none and steps.tolist() == ghosts["step"].tolist() and values.tolist() == ghosts["value"].tolist()
    assert not curves.lines["loss"]["other"].ghosts


def layers(names: list[str], steps: int) -> pd.DataFrame:
    random = np.random.default_rng(1)
    rows = [
        {
            "step": step,
            "path": f"s{step}",
            "key": name,
            "fqn": name,
            "role": "param",
            "norm": random.random() + 0.1,
            "absmean": 0.1,
            "nan": 0,
            "change": random.random(),
        }
        for step in range(steps)
        for name in names
    ]
    return pd.DataFrame(rows)


def test_many_tensors_are_combined_by_layer_as_norms_and_as_largest_changes():
    names = [f"model.layers.{layer}.m{n}.weight" for layer in range(11) for n in range(9)]
    frame = layers(names, 3)
    norms, changes = layer_grid(frame, "weight norm"), layer_grid(frame, "update")
    assert norms.rows == [f"model.layers.{layer}" for layer in range(11)]  # by number, not by letter
    for row, layer in enumerate(norms.rows):
        for step in range(3):
            part = frame[frame["key"].str.startswith(f"{layer}.") & (frame["step"] == step)]
            assert norms.values[row, step] == pytest.approx(math.sqrt((part["norm"] ** 2).sum()))
            assert changes.values[row, step] == part["change"].max()
            assert norms.keys[row][step] == part.loc[part["norm"].idxmax(), "key"]
    few = layer_grid(layers(names[:5], 2), "weight norm")
    assert few.rows == names[:5]


def test_a_step_with_nan_is_marked_in_the_grid_and_the_report(run):
    frame = wb.timeline([run / f"step-{step}.pt" for step in (10, 20, 30, 40, 50)], by="tensor")
    grid = layer_grid(frame, "weight norm")
    assert grid.spoilt.tolist() == [[False, False, False, True, False]]
    assert layers_figure(grid, "weight norm").renderers


# ---- runs and their health -----------------------------------------------------------------------------------------


def test_folders_with_two_steps_of_one_name_are_runs(tmp_path):
    for path in ("a/step-1.pt", "a/step-2.pt", "a/step-1-echo.pt", "b/step-7.pt", "c.pt", "d/x-3.pt", "d/y-4.pt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.ones(2)}, tmp_path / path)
    runs, single = grouped(discover(tmp_path))
    assert [(one.path, [step.path for step in one.steps]) for one in runs] == [
        ("a", ["a/step-1-echo.pt", "a/step-1.pt", "a/step-2.pt"])
    ]
    assert {one.path for one in single} == {"b/step-7.pt", "c.pt", "d/x-3.pt", "d/y-4.pt"}


def test_health_says_what_was_checked(run):
    found = {one.step: one for one in discover(run)}
    assert unseen(found[10]).state == "unseen"
    quick = check_step(found[40], str(run / "step-40.pt"))
    assert quick.state == "sound" and quick.spoilt is None and "values not checked" in quick.words
    deep = check_step(found[40], str(run / "step-40.pt"), values=True)
    assert (deep.state, deep.severity, deep.spoilt) == ("finding", "error", 1) and "NaN" in deep.words
    (run / "step-10.pt").unlink()
    assert check_step(found[10], str(run / "step-10.pt")).state == "finding"


def test_a_run_is_read_again_only_if_its_files_have_changed(run):
    cache, jail = RunCache(), Jail(run.parent)
    first = cache.open(jail, "run")
    assert cache.open(jail, "run") is first and first.found[-1].step == 50
    with (run / "log.csv").open("a") as file:
        file.write("61,2.5\n")
    second = cache.open(jail, "run")
    assert second is not first and second.metrics["loss"].index[-1] == 61
    save(run, 60)
    assert [one.step for one in cache.open(jail, "run").found] == [10, 20, 30, 40, 50, 60]


def test_a_log_above_root_is_not_read(tmp_path):
    for step in (1, 2):
        save(tmp_path / "root" / "run", step)
    log(tmp_path / "run.csv", dict.fromkeys(range(30), 1.0))
    log(tmp_path / "root" / "run.csv", dict.fromkeys(range(30), 2.0))
    inside = RunCache().open(Jail(tmp_path / "root"), "run")
    assert set(inside.metrics["loss"]) == {2.0}
    (tmp_path / "root" / "run.csv").unlink()
    assert not len(RunCache().open(Jail(tmp_path / "root"), "run").sources)
    assert len(wb.run(tmp_path / "root" / "run").sources) == 1  # without a ROOT it is found


# ---- pages without a browser ---------------------------------------------------------------------------------------


def test_links_of_runs_come_back_as_they_were():
    names = ["loss", "train/acc,top 1", "%2C", "<b>"]
    assert separated(joined(names)) == names
    query = link(run="a/b", at="7", metrics=joined(names), versus=joined(["x,y", "z"]))
    back = parse_query(query)
    assert (back["run"], back["at"]) == ("a/b", "7") and separated(back["metrics"]) == names
    state = WorkbenchState(Jail(SAMPLES))
    state.restore(back)
    assert query_of(state) == query
    state.restore({})
    assert query_of(state) == ""


def test_a_checkpoint_of_another_run_leaves_the_run(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, 1)
        save(tmp_path / name, 2)
    state = WorkbenchState(Jail(tmp_path))
    state.restore({"run": "a"})
    state.show("a/step-1.pt")
    assert state.run == "a"
    state.show("b/step-1.pt")
    assert state.run == ""
    state.wait()
    state.close()


def test_the_cards_tell_every_run_and_its_jump(run):
    save(run.parent / "plain", 1)
    save(run.parent / "plain", 2)
    state = WorkbenchState(Jail(run.parent))
    picker = Picker(state)
    assert picker.job.wait(60)
    home = Home(state, picker, runs=RunCache())
    assert home.job.wait(60)
    text = home._page.text
    assert text.count('<a href="?run=') == 2 and "2 runs under" in text
    assert run_sentence(wb.run(run)) in text and "at step 41" in text
    assert re.search(r'class="finding" title="step-40.pt: [^"]*NaN', text)
    assert text.count('class="sound"') == 6 and 'class="unseen"' not in text


def test_a_checkpoint_saved_later_is_listed_without_a_click(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path / "run", step)
    state = WorkbenchState(Jail(tmp_path))
    picker = Picker(state)
    assert picker.job.wait(60)
    state.show("run/step-2.pt")
    assert state.wait(60)
    steps = RunTab(state)
    steps.look()
    assert steps.work.job.wait(60) and len(steps.steps) == 2
    save(tmp_path / "run", 3)
    picker.look()  # too soon after the search
    assert picker._looking.status == "idle"
    monkeypatch.setattr(picker, "_next", 0.0)
    picker.look()
    assert picker._looking.wait(60) and picker.job.wait(60) and steps.work.job.wait(60)
    assert "run/step-3.pt" in picker.listing.paths and [one.step for one in steps.steps] == [1, 2, 3]
    turn = picker.job._turn
    monkeypatch.setattr(picker, "_next", 0.0)
    picker.look()
    assert picker._looking.wait(60) and picker.job._turn == turn  # nothing has changed
    picker.close()
    state.close()


def test_without_runs_the_newest_checkpoint_is_one_click_away(tmp_path):
    for step, name in enumerate(("a<b>.pt", "b.pt")):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
        os.utime(tmp_path / name, (1e9 - step, 1e9 - step))
    state = WorkbenchState(Jail(tmp_path))
    picker = Picker(state)
    assert picker.job.wait(60)
    text = Home(state, picker, runs=RunCache())._page.text
    assert "No runs here" in text and '<a href="?ckpt=a%3Cb%3E.pt">Open the newest checkpoint</a>' in text


def test_the_page_of_a_run_explains_the_jump_and_lists_the_steps(run):
    state = WorkbenchState(Jail(run.parent))
    state.restore({"run": "run"})
    page = RunPage(state, runs=RunCache())
    try:
        for job in (page.opening, page.examining.job, page.checking, page.measuring.job):
            assert job.wait(60), job
        assert page.diagnosis is not None and page.diagnosis.causes[0].title in page._why.text.replace("&#x27;", "'")
        assert "Since step 40" in page._head.text and "NaN" in page._head.text
        rows = page._steps[1].value
        assert rows["step"].tolist() == [50, 40, 30, 20, 10]
        assert rows["health"].str[0].tolist() == ["●", "▲", "●", "●", "●"]
        grid = layer_grid(page._layers, "weight norm")
        page._show_cell(grid, 0, 1)
        assert page.counting.job.wait(60)
        key, steps, counts, edges = page.counting.job.result
        assert (key, steps) == ("model.w", [10, 20, 30, 40, 50]) and (edges[0], edges[-1]) == (1.0, 50.0)
        for row, step in zip(counts, steps, strict=True):
            values = torch.load(run / f"step-{step}.pt")["model"]["w"].double().numpy()
            assert row.tolist() == np.histogram(values[np.isfinite(values)], edges)[0].tolist()
        state.at = "50"
        assert page.examining.job.wait(60) and "step 50" in page._why.text
    finally:
        page.close()


def test_numbers_and_names_beside_a_curve_are_short(tmp_path):
    rows = [(s, 3.0, 2e-4 / s, 3e-7, 1e9 * s, 1.0) for s in range(1, 40)]
    head = "step,loss,lr,small,large,optim/norm_of_all_of_it\n"
    (tmp_path / "log.csv").write_text(head + "".join(",".join(map(str, row)) + "\n" for row in rows))
    found = wb.run(tmp_path)
    figures = run_figure(curves_of(found, list(found.metrics.columns))).children
    formats = {one.yaxis.axis_label: getattr(one.yaxis[0].formatter, "format", None) for one in figures}
    assert formats == {"loss": "%.7g", "lr": "%.7g", "small": None, "large": None, "…_of_all_of_it": "%.7g"}
    assert all(one.min_border_top >= 6 and one.min_border_bottom >= 6 for one in figures)  # half of a number's height


def test_what_a_link_names_and_the_run_lacks_is_told(tmp_path):
    log(tmp_path / "run" / "log.csv", spiky(1000, last=40))
    state = WorkbenchState(Jail(tmp_path))
    state.restore({"run": "run", "at": "3²", "metrics": "loss,gone", "measure": "norms"})
    page = RunPage(state, runs=RunCache())
    try:
        assert page.opening.wait(60)
        text = page._head.text
        assert "the step &#x27;3²&#x27;, which is not a number" in text
        assert "the metric &#x27;gone&#x27;, which the log does not have" in text
        assert "the picture of layers &#x27;norms&#x27;" in text
        assert state.metrics == "loss,gone"  # until the reader chooses metrics
        state.restore({"run": "run", "at": "30", "metrics": "loss"})
        assert "the link names" not in page._head.text
    finally:
        page.close()


def test_new_points_are_shown_unless_someone_has_zoomed(tmp_path):
    root = tmp_path / "proj" / "checkpoints"
    save(root, 10)
    save(root, 20)
    log(root / "log.csv", spiky(1000, last=40))
    state = WorkbenchState(Jail(tmp_path))
    state.restore({"run": "proj/checkpoints"})
    page = RunPage(state, runs=RunCache())
    try:
        assert page.opening.wait(60) and ">proj/checkpoints</h1>" in page._head.text
        assert page.checking.wait(60) and page.measuring.job.wait(60)  # what they end with draws again
        for last, zoom in ((60, None), (80, 30.0), (100, None)):
            if zoom:
                page._drawn.x_range.end = zoom
            log(root / "log.csv", spiky(1000, last=last))
            page._next = 0.0
            page.look()
            assert page._looking.wait(60) and page.opening.wait(60)
            assert len(page.reading.run.metrics) == last
            assert (page._drawn.x_range.end > last) == (last == 60)
    finally:
        page.close()


def test_what_is_saved_later_is_explained_checked_and_shown(tmp_path):
    """A log without checkpoints, then those around its jump, then one of them rewritten with NaN."""
    root = tmp_path / "run"
    log(root / "log.csv", spiky(61))
    state = WorkbenchState(Jail(tmp_path))
    state.restore({"run": "run"})
    page = RunPage(state, runs=RunCache())

    def again() -> None:
        page._next = 0.0
        page.look()
        for job in (page._looking, page.opening, page.examining.job, page.checking, page.measuring.job):
            assert job.wait(60), job

    try:
        assert page.opening.wait(60) and page._steps not in list(page._body) and page.diagnosis is None
        for step in (40, 80):
            save(root, step)
        again()
        assert page._steps in list(page._body) and page.diagnosis is not None
        assert {one.state for one in page.reading.health.values()} == {"sound"}
        torch.save({"model": {"w": torch.tensor([1.0, math.nan, 2.0])}, "step": 80}, root / "step-80.pt")
        again()
        assert page.reading.health["step-80.pt"].state == "finding"
    finally:
        page.close()


def test_a_folder_that_is_no_run_and_one_outside_are_errors(tmp_path):
    (tmp_path / "root" / "empty").mkdir(parents=True)
    save(tmp_path / "other", 1)
    for path in ("empty", "../other", "absent"):
        state = WorkbenchState(Jail(tmp_path / "root"))
        state.restore({"run": path})
        page = RunPage(state, runs=RunCache())
        page.opening.wait(60)
        assert page.opening.status == "failed" and str(tmp_path) not in page._body[0].object


# ---- files to keep -------------------------------------------------------------------------------------------------


def test_a_plot_has_the_logged_values_and_saves_itself(tmp_path):
    found = wb.run(SAMPLES / "logs" / "torchtitan")
    figure = found.plot(["loss", "grad_norm"])
    drawn = [line.get_ydata() for line in figure.axes[0].lines]
    assert any(np.array_equal(one, found.metrics["loss"].dropna()) for one in drawn)
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        figure.save(tmp_path / f"loss{ending}")
        assert (tmp_path / f"loss{ending}").read_bytes().startswith(magic)
    with pytest.raises(wb.errors.UsageError, match=r"end in \.png, \.svg or \.pdf"):
        figure.save(tmp_path / "loss.txt")
    with pytest.raises(wb.errors.WriteError, match="cannot be written"):
        figure.save(tmp_path / "absent" / "loss.png")
    with pytest.raises(wb.errors.UsageError, match="'accuracy' was not logged; logged are"):
        found.plot(["accuracy"])


def test_runs_are_compared_by_step(tmp_path):
    a, b = wb.run(SAMPLES / "logs" / "torchtitan"), wb.run(SAMPLES / "logs" / "megatron")
    both = wb.compare([a, SAMPLES / "logs" / "megatron"])
    assert both.names == ["torchtitan", "megatron"]
    for name, one in (("torchtitan", a), ("megatron", b)):
        pd.testing.assert_series_equal(
            both.metrics["loss", name].dropna(), one.metrics["loss"].dropna(), check_names=False
        )
    assert both.spikes.groupby("run")["step"].apply(list).to_dict() == {
        "torchtitan": a.spikes["step"].tolist(),
        "megatron": b.spikes["step"].tolist(),
    }
    assert len(both.plot(["loss"]).axes[0].lines) >= 2 and "torchtitan" in repr(both)
    with pytest.raises(wb.errors.UsageError, match="at least two runs"):
        wb.compare([a])


def test_a_report_is_one_file_that_fetches_nothing(run, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(page), "--figure", str(tmp_path / "loss.svg")]) == 0
    text = page.read_text("utf-8")
    plain = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # test_run_browser.py opens it in a browser
    assert not re.search(r"(?:src|href)=|url\(|@import", plain)
    assert "step-40.pt" in text and "NaN" in text and "at step 41" in text
    assert (tmp_path / "loss.svg").stat().st_size > 1000
    capsys.readouterr()
    assert main(["report", str(run / "step-10.pt"), str(run / "step-20.pt"), "-o", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(page), "figure": None}
    assert "step-20.pt" in page.read_text("utf-8")
    assert main(["report", str(run / "step-40.pt"), "-o", str(page), "--deep"]) == 0
    assert "values.nan" in page.read_text("utf-8")
    (tmp_path / "mine.html").write_text("not a page")
    assert main(["report", str(run), "-o", str(tmp_path / "mine.html")]) == 3
    assert main(["report", str(run)]) == 64
    assert main(["report", str(run / "step-10.pt"), "--figure", str(tmp_path / "x.png")]) == 64
    assert (tmp_path / "mine.html").read_text() == "not a page" and "is not replaced" in capsys.readouterr().err


def test_a_report_of_a_hundred_steps_of_a_thousand_tensors_is_under_five_megabytes(run):
    from workbench.views.run_html import run_page

    frame = layers([f"model.layers.{layer}.m{n}.weight" for layer in range(40) for n in range(25)], 100)
    assert len(run_page(wb.run(run), layers=frame).encode()) < 5e6


def test_hostile_names_stay_text(tmp_path):
    evil = '<img src=x onerror="window.pwned=1">'
    root = tmp_path / evil.replace("/", "")
    save(root, 1)
    save(root, 2)
    (root / "log.csv").write_text(f"step,loss,{evil.replace(',', '')}\n" + "".join(f"{s},1.{s},2\n" for s in range(30)))
    from workbench.views.run_html import run_page

    found = wb.run(root)
    for text in (run_page(found, metrics=list(found.metrics)), found._repr_html_()):
        assert "<img" not in text and "&lt;img" in text
