"""The Doctor tab without a browser: what it examines, what it says of the loss spike, what it keeps and refuses."""

from __future__ import annotations

import html
import json
import re
import shutil

import panel as pn
import pytest
from test_app_state import Page

import workbench as wb
from workbench.app.jail import Jail
from workbench.app.registry import Registry
from workbench.app.state import WorkbenchState, query_of
from workbench.app.tabs.doctor import parse_given
from workbench.app.tabs.doctor_view import DiagnosisView
from workbench.app.tabs.report_view import ReportView
from workbench.errors import UsageError

BEFORE, ECHO, AFTER = (f"run/step-{name}.pt" for name in ("240", "240-echo", "245"))


@pytest.fixture
def root(tmp_path, samples):
    root = tmp_path / "ckpts"
    shutil.copytree(samples / "loss_spike", root / "run")
    return root


@pytest.fixture
def page():
    return Page()


def looked_at(root, page, path=BEFORE, **selection):
    from workbench.app.tabs.doctor import Doctor

    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    state.restore({"path": path, "tab": "doctor", **selection})
    page.until(lambda: state.status != "opening")
    assert state.status == "open", state.error
    return state, Doctor(state, page.schedule)


def examined(root, page, **selection):
    state, tab = looked_at(root, page, **selection)
    page.until(lambda: tab.view is not None and tab.view.work.job.status == "done")
    return state, tab


def shown(tab):
    return "\n".join(str(pane.object) for pane in tab.body.select(pn.pane.HTML))


def test_nothing_chosen_says_what_to_choose_and_examines_nothing(root, page):
    state, tab = looked_at(root, page)
    page.until(lambda: tab._others.job.status == "done")
    assert "Choose what to compare it with" in shown(tab) and tab.work.button.label == "Examine this checkpoint alone"
    for choice in tab._choices.values():
        assert list(choice.options.values()) == ["", ECHO, AFTER]
    assert tab.view is None and tab.work.job.status == "idle"
    tab.work.start()
    page.until(lambda: tab.view is not None)
    assert [one.which for one in tab.view.diagnosis.subjects] == ["before"]
    assert tab.view.diagnosis.exit_code == 0, "the checkpoint itself is whole"
    state.close()


def test_with_its_echo_the_cause_is_that_of_the_sample(root, page):
    state, tab = examined(root, page, other=AFTER, echo=ECHO)
    found = tab.view.diagnosis
    assert [one.cause for one in found.causes] == ["D2"] and found.causes[0].certainty == "certain"
    assert [(one.which, one.path, one.step) for one in found.subjects] == [
        ("before", BEFORE, 240),
        ("echo", ECHO, 240),
        ("after", AFTER, 245),
    ]
    assert {"transition", "reach", "shards", "low bits"} <= set(tab.view.pictures)
    panes = tab.body.select(pn.pane.HoloViews)
    assert len(panes) == len(tab.view.pictures) and not any(pane.linked_axes for pane in panes)
    words = shown(tab)
    assert "The fp32 master weights do not match the weights" in words and str(root) not in words
    # facts, with where they stand: the lab's betas, in the file's arguments
    assert re.search(r"beta.*0\.95.*args", words)
    assert query_of(state) == f"?ckpt={BEFORE}&tab=doctor&b={AFTER}&echo={ECHO}"
    state.close()


def test_downloads_are_the_diagnosis(root, page):
    state, tab = examined(root, page, other=AFTER, echo=ECHO)
    files = {one.filename.rpartition(".")[2]: one.callback().read().decode() for one in downloads(tab)}
    document = json.loads(files["json"])
    assert document["schema"] == "workbench.doctor/1" and document["causes"][0]["cause"] == "D2"
    assert files["csv"].splitlines()[0] == "rule,severity,where,message,evidence,hint"
    assert files["html"].startswith("<!DOCTYPE html>") and "Bokeh" in files["html"]
    assert "<script src" not in files["html"] and "<link" not in files["html"], "it brings what it needs"
    state.close()


def downloads(tab):
    import panel_material_ui as pmui

    return tab.body.select(pmui.FileDownload)


def test_other_evidence_drops_what_was_found(root, page):
    state, tab = examined(root, page, echo=ECHO)
    first = tab.view
    state.echo = ""
    assert tab.view is None and "Choose what to compare it with" in shown(tab)
    state.echo = ECHO
    page.until(lambda: tab.view is not None)
    assert tab.view is not first
    state.close()


@pytest.mark.parametrize(
    ("selection", "why"),
    [
        ({"other": BEFORE}, "After is this checkpoint itself"),
        ({"other": AFTER, "echo": AFTER}, "the same checkpoint"),
        ({"echo": ECHO, "given": "betas=0.9"}, "from 0 to below 1"),
        ({"echo": ECHO, "given": "lr=fast"}, "not a number"),
    ],
)
def test_evidence_that_cannot_be_is_refused_in_words(root, page, selection, why):
    state, tab = looked_at(root, page, **selection)
    assert why in shown(tab) and tab.work.job.status == "idle"
    tab.work.start()
    assert tab.work.job.status == "idle", "the button refuses, too"
    state.close()


def test_a_link_out_of_root_is_refused_in_words(root, page, tmp_path):
    shutil.copytree(root / "run", tmp_path / "secret")
    state, tab = looked_at(root, page, other="../secret/step-245.pt")
    page.until(lambda: tab.work.job.status == "failed")
    assert "ROOT" in tab.work.job.error and tab.view is None
    state.close()


def test_a_damaged_later_checkpoint_is_a_finding(root, page):
    whole = (root / AFTER).read_bytes()
    (root / AFTER).write_bytes(whole[: len(whole) // 2])
    state, tab = examined(root, page, other=AFTER)
    assert any(one.rule == "V01" for one in tab.view.diagnosis)
    state.close()


def test_what_is_wrong_with_a_damaged_checkpoint_does_not_say_where_root_lies(root, page, samples):
    for name in ("whole", "torn"):
        shutil.copytree(samples / "hf_llama_bf16_sharded", root / name)
    (root / "torn" / "model-00002-of-00004.safetensors").unlink()
    state, tab = looked_at(root, page, path="whole", other="torn")
    page.until(lambda: tab.view is not None)
    words = html.unescape(shown(tab))
    assert "missing from 'torn'" in words and str(root) not in words
    state.close()


def test_the_page_of_a_run_is_offered_for_its_steps_alone(root, page):
    shutil.copy(root / BEFORE, root / "weights.pt")
    for path, offered in ((BEFORE, True), ("weights.pt", False)):
        state, tab = looked_at(root, page, path=path)
        state.served = True
        tab._arrange()
        assert (tab._run in list(tab.body)) == offered, path
        state.close()


def test_typed_facts_are_in_the_link_and_reach_the_doctor(root, page):
    state, tab = looked_at(root, page)
    tab._facts["betas"].value, tab._facts["lr"].value, tab._quick.value = "0.8:0.9", "3e-4", True
    assert state.given == "betas=0.8:0.9,lr=3e-4,quick" and "given=betas" in query_of(state)
    state.echo = ECHO
    page.until(lambda: tab.view is not None)
    facts = tab.view.diagnosis.facts["before"]
    assert facts["betas"][0] == (0.8, 0.9) and "values" in tab.view.diagnosis.not_checked
    state.close()
    assert parse_given("betas=0.8:0.9,lr=3e-4,wd=0.1,quick") == {
        "betas": (0.8, 0.9),
        "lr": 3e-4,
        "weight_decay": 0.1,
        "deep": False,
    }
    for text in ("betas=1:1", "wd=-1", "lr=nan", "lr=inf", "speed=3"):
        with pytest.raises(UsageError):
            parse_given(text)


def test_reports_have_views_for_a_notebook(root):
    before = wb.open(root / BEFORE)
    found = wb.doctor(before, echo=wb.open(root / ECHO))
    view = found.view()
    assert isinstance(view, DiagnosisView) and view.work.job.wait(60)
    assert view._repr_mimebundle_ is not None and "shards" in view.pictures
    report = wb.verify(before)
    assert isinstance(report.view(), ReportView)
    words = "\n".join(str(pane.object) for pane in report.view().__panel__().select(pn.pane.HTML))
    assert str(len(report.checked)) in words
