"""Tensors and Overview without a browser: paging, sorting, filters that end, slices, the run's steps, a cell."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import panel as pn
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_app_state import WAIT, Page, opened

import workbench as wb
from workbench.analysis.window import moved, window
from workbench.app.glance import glance
from workbench.app.jail import Jail
from workbench.app.paged import Paged
from workbench.app.registry import Registry
from workbench.app.rows import RowOrder, tensor_rows
from workbench.app.search import Search
from workbench.app.state import WorkbenchState, query_of
from workbench.app.tabs.overview import Overview, bytes_frame
from workbench.app.tabs.run import siblings
from workbench.app.tabs.tensors import Tensors
from workbench.core.storage import SourcePool
from workbench.errors import SelectionError, UsageError
from workbench.views.values import elements
from workbench.views.window import window_frame, window_html

SIZES = [5, 300, 7, 7, 1, 90, 12]
NAMES = ["w10", "W9", "b", "a", "<b>", "é", "ż=1"]
MANY = {f"layers.{i}.{name}": torch.zeros(n) for i in range(4) for name, n in zip(NAMES, SIZES, strict=True)}
SLOW = r"(?:x+x+)+y"


@pytest.fixture(scope="module")
def root(tmp_path_factory, samples):
    root = tmp_path_factory.mktemp("tab") / "ckpts"
    root.mkdir()
    shutil.copytree(samples / "titan_run", root / "run")
    for name, tensors in {
        "many": MANY,
        "long": {"x" * 6000: torch.ones(2), "y": torch.ones(1)},
        "cube": {"t": torch.arange(4 * 60 * 30, dtype=torch.int64).reshape(4, 60, 30)},
    }.items():
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors")
    return root


def shown(table):
    return list(table._data["name"])


@pytest.fixture
def tab(root):
    """The Tensors tab on a checkpoint, with a page's thread to turn."""
    made = []

    def make(path="many", **selection):
        page = Page()
        state = WorkbenchState(Jail(root), Registry(), page.schedule)
        state.show(path, tab="tensors", **selection)
        page.until(lambda: state.status != "opening")
        assert state.status == "open", state.error
        made.append(Tensors(state, page.schedule))
        pn.panel(made[-1]).get_root()
        return made[-1], state, page

    yield make
    for one in made:
        one.close()


# ---- the table -----------------------------------------------------------------------------------------------------


def test_pages_and_sorting_are_those_of_the_whole_table(tab):
    tensors, state, _ = tab()
    table, keys = tensors.table, list(state.ckpt)
    assert shown(table) == keys[:10] and table.value is state.lease.rows
    table.page = 3
    assert shown(table) == keys[20:]
    table._process_events({"sorters": [{"field": "nbytes", "dir": "desc"}], "page": 1})
    assert shown(table) == sorted(keys, key=lambda key: -MANY[key].nbytes)[:10]  # a stable sort, as Python's
    table._process_events({"sorters": [{"field": "name", "dir": "asc"}]})
    assert shown(table) == sorted(keys, key=str.casefold)[:10]
    table._process_events({"page": 2})
    assert shown(table) == sorted(keys, key=str.casefold)[10:20]
    assert table.value is state.lease.rows  # never a copy


def test_a_click_finds_its_tensor_however_the_table_is_sorted_and_filtered(tab):
    tensors, state, _ = tab(pattern=r"layers\.[13]\.")
    table = tensors.table
    table._process_events({"sorters": [{"field": "numel", "dir": "desc"}]})
    table._process_events({"page": 2})
    wanted = sorted((k for k in MANY if re.search(r"layers\.[13]\.", k)), key=lambda k: -MANY[k].numel())
    wanted = sorted([k for k in state.ckpt if k in wanted], key=lambda k: -MANY[k].numel())
    event = SimpleNamespace(event_name="cell-click", column="name", row=2, model=None)
    table._process_event(event)
    assert state.tensor == wanted[12] == event.value


def test_the_selected_row_is_marked_on_its_page_and_shape_sorts_by_size(tab):
    tensors, state, _ = tab(tensor="layers.3.W9")
    table = tensors.table
    at = list(state.ckpt).index("layers.3.W9")
    assert (table.page, table.selection) == (at // 10 + 1, [at])
    root = pn.panel(table).get_root()
    assert root.source.selected.indices == [at % 10]
    table._process_events({"sorters": [{"field": "shape", "dir": "asc"}], "page": 1})
    assert [MANY[key].numel() for key in shown(table)] == sorted(t.numel() for t in MANY.values())[:10]


def test_a_filter_turns_back_to_the_first_page_and_nothing_found_says_what_to_do(tab):
    tensors, state, _ = tab()
    tensors.table.page = 3
    state.pattern = "layers.2"
    assert tensors.table.page == 1 and shown(tensors.table) == [k for k in state.ckpt if "layers.2" in k]
    assert "7 of 28" in tensors.summary.object
    state.pattern = "nothing"
    assert shown(tensors.table) == [] and "clear the filter" in tensors.summary.object


def test_the_table_as_csv_is_what_is_shown_in_its_order(tab):
    tensors, state, _ = tab(pattern="layers.0")
    tensors.table._process_events({"sorters": [{"field": "nbytes", "dir": "asc"}]})
    text = tensors._save.callback().read().decode()
    frame = pd.read_csv(io.StringIO(text))
    mine = [key for key in state.ckpt if "layers.0" in key]
    assert list(frame["key"]) == sorted(mine, key=lambda key: MANY[key].nbytes)
    assert list(frame["nbytes"]) == sorted(MANY[key].nbytes for key in mine)


def test_ranks_agree_with_pandas(samples):
    ckpt = wb.open(samples / "titan_run" / "step-4")
    rows = tensor_rows(ckpt)
    ranks, every = RowOrder(rows), np.arange(len(rows))
    for ascending in (True, False):
        order = ranks.order(every, [("role", True), ("numel", ascending)])
        truth = rows.sort_values(["role", "numel"], ascending=[True, ascending], kind="stable", key=None)
        assert list(order) == list(truth.index)


def test_an_empty_paged_table_has_a_page():
    table = Paged(None)
    assert pn.panel(table).get_root() is not None


# ---- patterns ------------------------------------------------------------------------------------------------------


def test_search_finds_what_re_finds(samples):
    keys = list(wb.open(samples / "titan_run" / "step-4"))
    for pattern in ("norm", r"layers\.\d+\.attention\.w[qk]", "^tok", r"(?i)WEIGHT$", "a|b", r"(\d)\..*\1", "", r"\Z"):
        search = Search(keys, pattern)
        assert search.run(WAIT)
        assert list(search.positions()) == [i for i, key in enumerate(keys) if re.search(pattern, key)], pattern


def test_a_catastrophic_pattern_ends_in_time_and_in_words(root):
    ckpt = wb.open(root / "long")
    began = time.process_time()
    search = Search(ckpt.catalog.keys, SLOW)
    assert not search.run(0.3)
    with pytest.raises(UsageError, match=r"takes too long.*name 1 of 2.*\(a\+\)\+"):
        raise search.too_long()
    assert time.process_time() - began < 2


@pytest.mark.parametrize("pattern", ["a{4000000000}", "(?:a{3000}){3000}", "(?:(?:a{0,900}){900}){9}"])
def test_repeats_that_would_fill_the_memory_are_refused_before_they_do(pattern):
    with pytest.raises(UsageError, match="braces"):
        Search(["a"], pattern)


def test_a_slow_pattern_of_a_link_leaves_the_page_awake(tab, monkeypatch):
    monkeypatch.setattr("workbench.app.tabs.tensors.LIMIT", 0.5)
    began = time.process_time()
    tensors, state, page = tab("long", pattern=SLOW)
    assert "Filtering" in tensors.summary.object
    assert time.process_time() - began < 5
    page.until(lambda: tensors.search.status == "failed")
    assert "takes too long" in tensors.summary.object and len(tensors.table.chosen) == 2
    state.pattern = "^y"
    assert shown(tensors.table) == ["y"]


# ---- slices --------------------------------------------------------------------------------------------------------

SLICES = {
    "2, 2:9, ::3": lambda t: t[2, 2:9, ::3],
    "-1, -5:, -1": lambda t: t[-1, -5:, -1],
    "0, ..., 3": lambda t: t[0, :, 3],
    "[0, 2], :, 4": lambda t: t[[0, 2], :, 4],
    "0, 58:0:-7, 3:5": lambda t: t[0, 58:0:-7, 3:5],
    "1, 2, 3": lambda t: t[1, 2, 3],
}


@pytest.mark.parametrize("text", SLICES)
def test_a_slice_shows_the_elements_that_it_names(root, text):
    truth = load_file(root / "cube" / "model.safetensors")["t"].numpy()
    tensor = wb.open(root / "cube")["t"]
    here, wanted = window(tensor, text), SLICES[text](truth)
    assert here.shape == wanted.shape
    cut = wanted[:50, :20] if wanted.ndim == 2 else wanted[:50] if wanted.ndim else wanted
    values = elements(here.shown.numpy(), here.shown.element)
    assert np.array_equal(values, cut)
    frame = window_frame(here, values)
    if len(here.axes) == 2:
        assert frame.iloc[0, 1] == cut[0, 0] and len(frame.columns) == cut.shape[1] + 1
    assert window(tensor, here.text).text == here.text
    assert window_html(here, values).count("<tr>") == len(frame) + 1


def test_rows_and_columns_are_named_by_their_positions(root):
    here = window(wb.open(root / "cube")["t"], "1, 7:, ::-2")
    assert here.index == (list(range(7, 57)), list(range(29, -1, -2))) and here.axes == (1, 2)


def test_moving_stays_inside_and_comes_back(root):
    tensor = wb.open(root / "cube")["t"]
    here = window(tensor)
    assert here.text == "0, 0:20, 0:20"
    down = window(tensor, moved(tensor, here, 1, 1))
    assert down.text == "0, 20:40, 20:30"
    assert moved(tensor, window(tensor, "0, 50:60, :"), 1) == "0, 50:60, :"
    assert moved(tensor, window(tensor, "0, 20:40, :"), -1) == "0, 0:20, :"
    assert moved(tensor, window(tensor, "3, 0:20:2, 5"), 1) == "3, 20:40:2, 5"


WRONG = {
    "x": (UsageError, "is not an integer .*, slice"),
    "9, :, :": (SelectionError, "out of range"),
    "0, 0, 0, 0": (SelectionError, "4 for a tensor with 3 dimensions"),
    ":": (UsageError, "3 axes.*0, :, :"),
    "0, 5:5, :": (UsageError, "empty"),
    "__import__('os')": (UsageError, "is not an integer"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_slice_is_a_sentence(root, text):
    kind, words = WRONG[text]
    with pytest.raises(kind, match=words):
        window(wb.open(root / "cube")["t"], text)


def test_odd_values_of_a_slice_are_in_words(tmp_path):
    save_file({"w": torch.tensor([[math.nan, -math.inf], [0.0, -1.5]])}, tmp_path / "odd.safetensors")
    here = window(wb.open(tmp_path / "odd.safetensors")["w"])
    text = window_html(here, elements(here.shown.numpy(), here.shown.element))
    assert "NaN" in text and "−Inf" in text and "−1.5" in text


def test_the_slice_browser_follows_the_state(tab):
    tensors, state, page = tab("cube", tensor="t", place="2, 3:5, :2")
    slices = tensors.detail.slices
    page.until(lambda: slices.job.status == "done")
    truth = torch.arange(4 * 60 * 30).reshape(4, 60, 30)
    for value in truth[2, 3:5, :2].flatten().tolist():
        assert f">{value}</td>" in slices.output.object
    assert "slice=2%2C+3%3A5%2C+%3A2" in query_of(state)
    slices.text.value = "9, 9, 9"
    assert state.place == "9, 9, 9" and "out of range" in slices.output.object
    slices.text.value = ""
    page.until(lambda: slices.job.status == "done")
    assert slices.text.value == "0, 0:20, 0:20" and state.place == ""
    slices._buttons[1].clicks += 1
    assert state.place == "0, 20:40, 0:20"


def test_a_file_that_is_cut_while_it_is_shown_is_a_message(tab, root, tmp_path, monkeypatch):
    """Cut after all checks have passed, where a read through a map would end the server."""
    kept = tmp_path / "kept"
    shutil.copy2(root / "cube" / "model.safetensors", kept)
    tensors, state, page = tab("cube")
    path, real = root / "cube" / "model.safetensors", os.preadv

    def cut(*given):
        os.truncate(path, 200)
        return real(*given)

    monkeypatch.setattr(SourcePool, "check", lambda pool, file: None)
    monkeypatch.setattr(os, "preadv", cut)
    state.tensor = "t"
    page.until(lambda: {tensors.detail.job.status, tensors.detail.slices.job.status} == {"failed"})
    for job in (tensors.detail.job, tensors.detail.slices.job):
        assert "model.safetensors" in job.error and "has 200 now" in job.error and "open it again" in job.error
    monkeypatch.undo()
    shutil.copy2(kept, path)


# ---- overview ------------------------------------------------------------------------------------------------------


def test_the_run_is_found_and_a_click_turns_to_its_step(root):
    assert [one.step for one in siblings(Jail(root), "run/step-4")] == [2, 4]
    assert siblings(Jail(root), "many") == []
    page = Page()
    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    state.show("run/step-4", tensor="norm.weight")
    page.until(lambda: state.status != "opening")
    overview = Overview(state, page.schedule)
    page.until(lambda: overview.run.steps and "intact" in overview.badge.object)
    earlier, later = overview.run._turn
    assert (earlier.disabled, later.disabled) == (False, True)
    earlier.param.trigger("clicks")
    page.until(lambda: state.status == "open")
    assert (state.path, state.ckpt.step, state.tensor) == ("run/step-2", 2, "norm.weight")
    overview.close()
    state.close()


def test_an_incomplete_step_says_what_it_lacks(root, tmp_path):
    shutil.copytree(root / "run", tmp_path / "run")
    (tmp_path / "run" / "step-6").mkdir()
    shutil.copy(root / "run" / "step-4" / "__0_0.distcp", tmp_path / "run" / "step-6")
    found = {one.step: one for one in siblings(Jail(tmp_path), "run/step-4")}
    assert set(found) == {2, 4, 6} and not found[6].complete and ".metadata" in found[6].why


def test_the_bytes_of_the_overview_add_up(root):
    state = opened(root, "run/step-4")
    total = int(state.ckpt.catalog.tensor_nbytes.sum())
    frame = bytes_frame(glance(state.ckpt))
    assert frame.groupby("by")["nbytes"].sum().to_dict() == dict.fromkeys(("role", "type", "module", "rank"), total)
    state.close()


# ---- in a notebook's cell ------------------------------------------------------------------------------------------


def test_view_shows_one_checkpoint_and_leaves_it_open(root):
    ckpt = wb.open(root / "run" / "step-4")
    cell = ckpt.view(tab="tensors")
    assert list(cell.made) == ["tensors"]  # the others wait until they are looked at
    cell.state.tensor = "norm.weight"
    assert cell.made["tensors"].detail.job.wait(WAIT)
    assert pn.panel(cell).get_root() is not None
    cell.tabs.active = 0
    assert set(cell.made) == {"tensors", "overview"} and cell.state.ckpt is ckpt
    cell.close()
    assert torch.equal(ckpt["norm.weight"][...], load_truth(root)["norm.weight"])
    with pytest.raises(UsageError, match="overview, tensors"):
        ckpt.view(tab="export")


def test_view_of_a_selection_shows_the_selection(root):
    cell = wb.open(root / "run" / "step-4").select("norm").view("tensors")
    assert all("norm" in name for name in shown(cell.made["tensors"].table))
    cell.close()


def load_truth(root):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(root / "run" / "step-4")
    meta = reader.read_metadata().state_dict_metadata["norm.weight"]
    assert isinstance(meta, TensorStorageMetadata)
    state = {"norm.weight": torch.empty(meta.size, dtype=meta.properties.dtype)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
