"""The Diff tab without a browser: what it shows against torch, what it keeps, what it escapes, what it costs."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import panel as pn
import panel_material_ui as pmui
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_app_state import Page

import workbench as wb
from workbench.analysis.diff_objects import ObjectChange
from workbench.analysis.pair_histogram import pair_histogram
from workbench.app.jail import Jail
from workbench.app.registry import Registry
from workbench.app.state import WorkbenchState, query_of
from workbench.app.tabs.diff import DiffTab
from workbench.app.tabs.diff_view import DiffView, table_rows
from workbench.views.diff_grid import COLUMNS, ROWS, Board, layer_and_module
from workbench.views.diff_pictures import band_picture, heat_picture, tail_picture, value_picture
from workbench.views.diff_words import lists_html, objects_html, tensor_html

EVIL = '<img src=x onerror="window.pwned=1">.layers.0.w'
A, B = "run/step-2", "run/step-4"


@pytest.fixture
def root(tmp_path, samples):
    """A run of two steps, and two checkpoints with planted changes and hostile names."""
    root = tmp_path / "ckpts"
    shutil.copytree(samples / "titan_run", root / "run")
    planted(root)
    return root


def planted(root):
    """``plain`` and ``edited``: two layers; exchanged halves, a NaN, another shape, one row, one equal, two lonely."""
    generator = torch.Generator().manual_seed(3)
    a = {f"layers.{n}.{m}": torch.randn(8, 6, generator=generator) for n in range(2) for m in ("q", "k", "up", "down")}
    a |= {EVIL: torch.ones(4), "\x1b[31mgone": torch.ones(2)}
    b = {key: value.clone() for key, value in a.items() if "gone" not in key}
    b["layers.0.q"] = a["layers.0.q"].roll(4, 0)
    b["layers.1.q"][2, 3] = math.nan
    b["layers.0.up"] = torch.randn(5, 6, generator=generator)
    b["layers.1.up"][5] += 0.5
    b[EVIL][1] = 2
    b["<b>new</b>"] = torch.zeros(3)
    for name, state in (("plain", a), ("edited", b)):
        (root / name).mkdir(parents=True)
        save_file(state, root / name / "model.safetensors")
    return a, b


def looked_at(root, page, path=A, other=B, **selection):
    """State and tab, opened as by a link."""
    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    state.restore({"path": path, "other": other, "tab": "diff", **selection})
    page.until(lambda: state.status != "opening")
    assert state.status == "open", state.error
    return state, DiffTab(state, page.schedule)


def compared(root, page, path=A, other=B, **selection):
    state, tab = looked_at(root, page, path, other, **selection)
    page.until(lambda: tab.view is not None)
    return state, tab


def shown(tab):
    """The words of everything in the tab."""
    return "\n".join(str(pane.object) for pane in tab.body.select(pn.pane.HTML))


@pytest.fixture
def truth(samples):
    return [load_file(samples.parent / "tests/truth" / "titan_run" / f"step-{n}.safetensors") for n in (2, 4)]


# ---- pictures ------------------------------------------------------------------------------------------------------


def test_the_heat_map_is_torchs_relative_change_in_the_right_place(samples, truth):
    found = wb.diff(samples / "titan_run" / "step-2", samples / "titan_run" / "step-4")
    board = Board(found)
    grid = board.grid(board.matching("", "param"))
    weights = [key for key in truth[0] if not key.startswith(("optimizer", "lr", "train", "dataloader"))]
    assert len(grid.cells) == len(weights) == 21 and grid.layers == ("–", "0", "1")
    for cell in grid.cells:
        key = found.rows[cell.at].key_b
        layer, module = grid.layers[cell.column], grid.modules[cell.row]
        assert key == (module if layer == "–" else f"layers.{layer}.{module}")
        a, b = (side[key].double() for side in truth)
        assert cell.value == pytest.approx(((b - a).norm() / a.norm()).item(), rel=1e-12)
    assert grid.cell_of(grid.cells[4].at) is grid.cells[4]
    assert len(heat_picture(grid, found.rows)) == 1  # all of one kind


def test_the_two_histograms_count_every_element_of_both_sides(samples, truth):
    key = "layers.0.feed_forward.w2.weight"
    sides = [wb.open(samples / "titan_run" / f"step-{n}")[key] for n in (2, 4)]
    found = pair_histogram(*sides, bins=32)
    low = min(side[key].min().item() for side in truth)
    high = max(side[key].max().item() for side in truth)
    assert (found.edges[0], found.edges[-1]) == (low, high) and found.exact
    for counts, side in zip((found.a, found.b), truth, strict=True):
        assert counts.tolist() == np.histogram(side[key].double().numpy(), found.edges)[0].tolist()
    lines = list(value_picture(found, ("A", "B")))
    assert [np.nansum(line.dimension_values(1)) / 2 for line in lines] == [side[key].numel() for side in truth]
    empty = sides[0].lazy[0:0]
    assert pair_histogram(empty, empty) is None


def test_the_tail_is_the_share_that_changed_by_at_least_so_much(samples, truth):
    key = "layers.1.attention.wk.weight"
    row = wb.diff(samples / "titan_run" / "step-2", samples / "titan_run" / "step-4", patterns=False).tensor(key)
    picture = tail_picture(row.detail)
    delta = (truth[1][key].double() - truth[0][key].double()).abs()
    points = next(layer for layer in picture if layer.label == "" and len(layer.vdims) == 2)
    assert len(points) > 3
    for t, share in zip(points.dimension_values("change"), points.dimension_values("share"), strict=True):
        assert share == pytest.approx(100 * (delta >= t).double().mean().item())


def test_bands_show_the_row_that_was_edited(root):
    row = wb.diff(root / "plain", root / "edited").tensor("layers.1.up")
    cells = next(iter(band_picture(row.detail, row.shape_b)))
    frame = cells.dframe()
    rows = frame[frame["axis"] < 1].sort_values("along")
    assert rows["share"].tolist() == [0, 0, 0, 0, 0, 100, 0, 0]
    assert (frame[frame["axis"] > 1]["share"] == 12.5).all()
    whole = wb.diff(root / "plain", root / "edited").tensor("layers.0.q")
    assert band_picture(whole.detail, whole.shape_b) is None  # it changed everywhere


def test_what_has_no_relative_change_has_a_kind_of_its_own(root):
    found = wb.diff(root / "plain", root / "edited")
    board = Board(found)
    grid = board.grid(board.matching("^layers", ""))
    kinds = {found.rows[cell.at].key_b: cell.kind for cell in grid.cells}
    assert kinds == {
        "layers.0.q": "changed",
        "layers.1.q": "NaN in B only",
        "layers.0.up": "different shape",
        "layers.1.up": "changed",
        **{f"layers.{n}.{m}": "equal" for n in range(2) for m in ("k", "down")},
    }
    labels = {layer.label for layer in heat_picture(grid, found.rows)}
    assert {"equal", "NaN in B only", "different shape"} <= labels


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.11.mlp.up_proj.weight", (11, "model.layers", "mlp.up_proj.weight")),
        ("layers.3.experts.17.w1", (3, "layers", "experts.*.w1")),
        ("lm_head.weight", (-1, "", "lm_head.weight")),
        ("norm.0", (-1, "", "norm.0")),
        ("w2.weight", (-1, "", "w2.weight")),
        ("x.99999999999999999999.w", (-1, "", "x.99999999999999999999.w")),
    ],
)
def test_layer_and_module(name, place):
    assert layer_and_module(name) == place


def test_encoder_and_decoder_are_rows_of_their_own(tmp_path):
    state = {f"{side}.layers.{n}.w": torch.zeros(2) for side in ("enc", "dec") for n in range(3)}
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    board = Board(wb.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors"))
    grid = board.grid(board.matching("", ""))
    assert set(grid.modules) == {"enc.layers.w", "dec.layers.w"} and len(grid.cells) == 6


# ---- the tab -------------------------------------------------------------------------------------------------------


def test_a_link_compares_selects_and_is_told_back(root, truth):
    page, key = Page(), "layers.0.feed_forward.w2.weight"
    state, tab = compared(root, page, tensor=key, pattern="feed", role="param")
    assert tab.view.tensor == key and f'<h2 class="name changed">{key}</h2>' in shown(tab)
    page.until(lambda: tab.view.detail.work.job.status == "done")
    a, b = (side[key].double() for side in truth)
    assert f"{((b - a).norm() / a.norm()).item():.5g}" in shown(tab)
    assert f"{(b - a).abs().max().item():.5g}" in shown(tab)
    assert len(tab.view.table.value) == sum("feed" in name and not name.startswith("opt") for name in truth[0])
    assert tab.view.table.value["name"].iloc[tab.view.table.selection[0]] == key
    query = query_of(state)
    for part in (f"ckpt={A}", f"b={B}", f"tensor={key}", "q=feed", "role=param", "tab=diff"):
        assert part in query
    assert tab.body.get_root() is not None


def test_a_tap_and_a_row_select(root):
    page = Page()
    state, tab = compared(root, page, role="param")
    view = tab.view
    cell = next(cell for cell in view._grid.cells if view.diff.rows[cell.at].key_b == "layers.1.attention.wo.weight")
    view._tapped(cell.column + 0.3, cell.row + 0.9)
    page.until(lambda: view.tensor != "")
    assert state.tensor == view.tensor == "layers.1.attention.wo.weight"
    view._tapped(-3.0, 900.0)  # beside all cells
    view._clicked(type("Event", (), {"row": 4})())
    assert state.tensor == view.table.value["name"].iloc[4] != "layers.1.attention.wo.weight"
    state.tensor = "norm.weight"
    assert view.tensor == "norm.weight"


def test_the_result_is_kept_while_a_and_b_stay_and_dropped_with_them(root):
    page = Page()
    state, tab = compared(root, page)
    view = tab.view
    state.tab = "overview"
    state.tensor = "norm.weight"
    state.tab = "diff"
    assert tab.view is view and view.tensor == "norm.weight"
    state.other = "plain"
    assert tab.view is None and tab.work.job.status == "running"
    page.until(lambda: tab.view is not None)
    assert tab.view.diff.count("changed") == 0 and len(tab.view.diff.added) > 5
    state.other = ""
    assert tab.view is None and "Choose B" in shown(tab)
    state.close()
    tab.close()


def test_of_two_steps_the_earlier_one_is_a_whichever_is_open(root):
    page = Page()
    key = "layers.1.attention.wq.weight"
    state, tab = compared(root, page, B, A, tensor=key)
    assert tab.view.diff.steps == (2, 4) and tab.view.tensor == key and state.tensor == key
    forth = tab.view.diff.tensor(key).comparison.rel_l2
    text = shown(tab)
    assert text.index(A) < text.index(B) and (state.path, state.other) == (B, A)
    other = next(row.key_b for row in tab.view.diff.rows if row.key_b != key)
    tab.view.tensor = other
    assert state.tensor == other
    tab.swap()
    page.until(lambda: tab.view is not None)
    assert tab.view.diff.steps == (2, 4) and (state.path, state.other) == (A, B)
    assert tab.view.diff.tensor(key).comparison.rel_l2 == forth


def test_weights_come_first_unless_something_worse_happened(root):
    before, after = root / "before.pt", root / "after.pt"
    state = {"model": {"w": torch.ones(8), "x": torch.ones(8)}, "optimizer": {"state": {}, "param_groups": []}}
    for n in range(2):
        state["optimizer"]["state"][n] = {"step": 1.0, "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}
    state["optimizer"]["param_groups"] = [{"lr": 1e-3, "params": [0, 1]}]
    torch.save(state, before)
    state["model"]["w"][0], state["model"]["x"][0] = 1.1, 1.2
    state["optimizer"]["state"][0]["exp_avg"][0] = 100
    state["optimizer"]["state"][1]["exp_avg_sq"][0] = math.nan
    torch.save(state, after)
    rows = table_rows(Board(wb.diff(before, after)))
    assert rows["role"].tolist() == ["exp_avg_sq", "param", "param", "exp_avg"]
    assert rows["status"].tolist()[0] == "NaN appears" and rows["name"].tolist()[1:3] == ["model.x", "model.w"]


def test_swapping_turns_the_difference_around(root):
    page = Page()
    state, tab = compared(root, page, "plain", "edited", tensor="layers.1.up")
    assert set(tab.view.diff.added) == {"<b>new</b>"}
    tab.swap()
    page.until(lambda: tab.view is not None)
    assert (state.path, state.other, state.tensor) == ("edited", "plain", "layers.1.up")
    assert set(tab.view.diff.removed) == {"<b>new</b>"} and set(tab.view.diff.added) == {"\x1b[31mgone"}


def test_steps_of_the_same_run_are_offered_first(root):
    page = Page()
    state, tab = looked_at(root, page, other="")
    page.until(lambda: tab._others.job.status == "done")
    assert list(tab._choice.options.values()) == ["", B, "edited", "plain"]
    assert "Choose B" in shown(tab)
    state.other = A
    assert "same checkpoint" in shown(tab) and tab.work not in list(tab.body)


@pytest.mark.parametrize("other", ["../secret", "/etc", "run/../../secret", "gone"])
def test_b_outside_root_or_gone_is_a_sentence(root, other):
    (root.parent / "secret").mkdir()
    save_file({"secret": torch.ones(1)}, root.parent / "secret" / "model.safetensors")
    page = Page()
    _, tab = looked_at(root, page, other=other)
    page.until(lambda: tab.work.job.status == "failed")
    assert tab.view is None and 'role="alert"' in shown(tab) and "secret'" not in shown(tab).replace(repr(other), "")


def test_a_bad_pattern_is_a_sentence_and_shows_every_row(root):
    page = Page()
    state, tab = compared(root, page)
    state.pattern = "layers.("
    assert "not a valid regular expression" in shown(tab)
    assert len(tab.view.table.value) == len(tab.view.rows)
    state.pattern = "no such tensor"
    assert len(tab.view.table.value) == 0 and "No tensor matches this name" in shown(tab)


def test_hostile_names_are_shown_and_not_obeyed(root):
    page = Page()
    _, tab = compared(root, page, "plain", "edited", tensor=EVIL)
    words = shown(tab)
    assert "<img" not in words and "&lt;img src=x" in words and "\x1b" not in words
    assert "&lt;b&gt;new" in words and "<b>new" not in words and "\\x1b[31mgone" in words
    assert "\x1b" not in "".join(tab.view.table.value["name"]) + "".join(tab.view._pick.options)


def test_the_pattern_that_was_found_is_said_with_what_is_likely(root):
    row = wb.diff(root / "plain", root / "edited").tensor("layers.0.q")
    words = tensor_html(row)
    assert row.pattern is not None and row.pattern.name == "halves"
    assert "<b>halves</b>" in words and row.pattern.sentence in words


def test_objects_are_folded_by_name_with_before_and_after(samples):
    found = wb.diff(samples / "titan_run" / "step-2", samples / "titan_run" / "step-4")
    words = objects_html(found.objects)
    assert re.search(r"<summary>lr_scheduler \(2 changes\)</summary>", words)
    assert re.search(r"last_epoch</td><td>2</td><td>4</td>", words)
    evil = [ObjectChange(f"<b>x</b>.{n}", "changed", "1 → <i>2</i>") for n in range(2000)]
    many = objects_html(evil)
    assert "<b>x" not in many and "<i>2" not in many and "more in the JSON" in many
    assert "Checked" in lists_html(found)


def test_downloads_hold_everything(root, truth):
    page = Page()
    _, tab = compared(root, page)
    saves = {button.filename.rpartition(".")[2]: button for button in tab.body.select(pmui.FileDownload)}
    table = list(csv.DictReader(io.StringIO(saves["csv"].callback().read().decode())))
    assert {row["key_b"] for row in table} == set(tab.view.board.keys)
    document = json.loads(saves["json"].callback().read())
    assert document["summary"]["changed"] == 86 and len(document["tensors"]) == 86


def test_a_notebook_shows_the_same(root):
    found = wb.diff(root / "plain", root / "edited")
    view = found.view()
    assert isinstance(view, DiffView)
    assert view.detail.work.job.wait(30)
    view.tensor = "layers.1.up"
    assert view.detail.work.job.wait(30)
    assert len(view.detail.pictures[0]) == 3
    root_model = pn.panel(view).get_root()
    assert root_model is not None
    wb.diff(root / "plain", root / "plain").view()


# ---- size ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """100,000 rows: the rows of a small diff under other names."""
    folder = tmp_path_factory.mktemp("huge")
    for name, scale in (("a", 1.0), ("b", 1.01)):
        save_file({f"w{n}": scale * torch.ones(n + 1) for n in range(8)}, folder / f"{name}.safetensors")
    small = wb.diff(folder / "a.safetensors", folder / "b.safetensors")
    names = (f"layers.{n % 250}.part{n // 250 % 100}.w{n // 25_000}" for n in range(100_000))
    rows = tuple(
        replace(small.rows[n % 8], keys_a=(name,), key_b=name, fqn=name, role=("param", "exp_avg")[n % 2])
        for n, name in enumerate(names)
    )
    return Board(replace(small, rows=rows))


def test_a_picture_of_100_000_tensors_is_small_and_counts_them_all(huge):
    grid = huge.grid(np.ones(100_000, bool))
    assert len(grid.layers) <= COLUMNS and len(grid.modules) <= ROWS
    assert sum(cell.tensors for cell in grid.cells) == 100_000
    most = max(huge.diff.rows[n].comparison.rel_l2 for n in range(8))
    assert max(cell.value for cell in grid.cells) == most


def test_filters_and_selection_of_100_000_tensors(huge):
    view = DiffView(huge.diff, huge)
    pn.panel(view).get_root()
    view.param.update(pattern=r"layers\.1\d\.")
    assert len(view.table.value) == 10 * 100_000 // 250
    for change in ({"role": "exp_avg"}, {"pattern": ""}, {"tensor": "layers.5.part7.w0"}):
        view.param.update(**change)
    assert isinstance(view.table.value, pd.DataFrame) and len(view.table.value) == 50_000
