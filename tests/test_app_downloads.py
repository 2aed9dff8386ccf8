"""Files to download say nothing of where ROOT lies: HTML, JSON and CSV of every tab that has some."""

from __future__ import annotations

import html
import json
import shutil

import panel_material_ui as pmui
import pytest
from test_app_state import Page

from workbench.app.jail import Jail
from workbench.app.page import SHOWN, Workbench
from workbench.app.registry import Registry
from workbench.app.save import csv_button, json_button, text_button
from workbench.app.state import WorkbenchState

TITAN = {"path": "run/step-2", "other": "run/step-4"}
SPIKE = {"path": "spike/step-240.pt", "other": "spike/step-245.pt", "echo": "spike/step-240-echo.pt"}


@pytest.fixture(params=[pytest.param("ckpts", marks=pytest.mark.slow), "öffentlich & 'wahr'"])
def root(request, tmp_path, samples):
    """ROOT under a plain name, and under one that JSON and HTML spell in their own way."""
    root = tmp_path / request.param
    shutil.copytree(samples / "titan_run", root / "run")
    shutil.copytree(samples / "loss_spike", root / "spike")
    with open(root / "run/step-2/__0_0.distcp", "r+b") as file:
        file.seek(300_000)
        file.write(bytes(5000))
    return root


def spellings(root):
    text = str(root)
    return {text, html.escape(text), html.escape(html.escape(text)), json.dumps(text)[1:-1], repr(text)[1:-1]}


def downloads(workbench):
    return list(dict.fromkeys(workbench.tabs.select(pmui.FileDownload)))


def test_no_download_of_any_tab_tells_where_root_lies(root):
    seen = set()
    for query in (TITAN, SPIKE):
        page = Page()
        state = WorkbenchState(Jail(root), Registry(), page.schedule)
        workbench = Workbench(state, page.schedule)
        state.restore(query | {"tab": "overview", "depth": "deep"})
        page.until(lambda state=state: state.status != "opening")
        assert state.status == "open", state.error
        for tab in SHOWN:
            state.tab = tab
            made = workbench.made[tab]
            if tab == "integrity":
                made.work.start()
                page.until(lambda made=made: made.work.job.status == "done")
            elif tab in ("diff", "doctor", "layout", "export"):
                page.until(lambda workbench=workbench, tab=tab: workbench._lazy._frames[tab].select(pmui.FileDownload))
        for button in downloads(workbench):
            content = button.callback().read().decode()
            assert not [one for one in spellings(root) if one in content], (button.label, button.filename)
            seen.add((button.label, button.filename.rpartition(".")[2]))
        workbench.close()
    assert {("Download page", "html"), ("Download JSON", "json"), ("Download CSV", "csv")} <= seen
    assert len(seen) >= 10, seen


def test_a_path_is_relative_to_root_in_each_kind_of_file(root):
    import pandas as pd

    Jail(root)
    inside, evil = str(root / "run/step-2"), str(root / "=1+1")
    made = csv_button("x", lambda: pd.DataFrame({"path": [inside, evil], "more": [[inside], {"at": inside}]}))
    assert made.callback().read().decode() == "path,more\nrun/step-2,['run/step-2']\n'=1+1,{'at': 'run/step-2'}\n"
    made = json_button("x", lambda: {"path": inside, "deep": [{inside: (inside, 1, None)}]})
    assert json.load(made.callback()) == {"path": "run/step-2", "deep": [{"run/step-2": ["run/step-2", 1, None]}]}
    made = text_button("x.html", lambda: f"<p>{html.escape(inside)}</p>{html.escape(str(root))}", "page")
    assert made.callback().read().decode() == "<p>run/step-2</p>ROOT"
