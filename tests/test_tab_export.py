"""The Export tab without a browser: the plan, the bytes against torch, where it may write, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_app_state import Page

import workbench as wb
from workbench.analysis.manifest_file import INSIDE
from workbench.app.exporting import TARGETS, ExportChoice, default_name
from workbench.app.jail import Jail
from workbench.app.outlet import Outlet, command
from workbench.app.registry import Registry
from workbench.app.state import WorkbenchState, parse_query, query_of
from workbench.app.tabs.export import Export
from workbench.app.tabs.export_device import OnDevice
from workbench.app.tabs.export_view import file_rows, tensor_rows
from workbench.errors import UnsafeError, UsageError, WorkbenchError, WriteError
from workbench.export.writers.registry import WRITERS

EVIL = '<img src=x onerror="window.pwned=1">.weight'


@pytest.fixture
def root(tmp_path, samples):
    """ROOT with two checkpoints and a place for exports; beside it what a jail must not reach."""
    root = tmp_path / "ckpts"
    root.mkdir()
    shutil.copytree(samples / "hf_llama_bf16_sharded", root / "llama")
    shutil.copytree(samples / "titan_run", root / "run")
    (root / "names").mkdir()
    save_file({EVIL: torch.ones(3), "\x1b[31mred": torch.ones(2)}, root / "names" / "model.safetensors")
    (root / "exports").mkdir()
    for outside in ("secret", "ckpts-private"):
        (tmp_path / outside).mkdir()
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "exports" / "up").symlink_to(root)
    (root / "exports" / "alias").symlink_to(root / "llama")
    return root


class Session:
    """A tab on a state, with the page's thread in hand."""

    def __init__(self, root, path="llama", *, exports=None, **selection):
        self.page, self.registry = Page(), Registry()
        jail = Jail(root)
        self.state = WorkbenchState(jail, self.registry, self.page.schedule, Outlet(jail, exports))
        self.state.show(path, tab="export", **selection)
        self.page.until(lambda: self.state.status != "opening")
        assert self.state.status == "open", self.state.error
        self.tab = Export(self.state, self.page.schedule)

    def planned(self):
        self.page.until(lambda: self.tab.dry.job.status not in ("idle", "running"))
        assert self.tab.dry.job.status == "done", self.tab.dry.job.error
        return self.tab.plan

    def refused(self):
        self.page.until(lambda: self.tab.dry.job.status not in ("idle", "running"))
        assert self.tab.dry.job.status == "failed"
        return self.tab.dry.job.error

    def written(self):
        self.planned()
        self.tab.work.start()
        self.page.until(lambda: self.tab.work.job.status not in ("idle", "running"))
        return self.tab.work.job


def truth_of(root):
    return {k: v for file in (root / "llama").glob("*.safetensors") for k, v in load_file(file).items()}


def test_the_formats_offered_are_those_that_are_written():
    assert list(TARGETS) == list(WRITERS)


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(root):
    before = sorted(root.rglob("*"))
    session = Session(root, mesh="tp=2")
    plan, truth = session.planned(), truth_of(root)
    files = file_rows(plan)
    assert len(files) == 2 + sum(files["tensors"] == 0)
    rows = tensor_rows(plan)
    assert set(rows["name"]) == set(truth)
    assert plan.read_nbytes >= sum(t.nbytes for t in truth.values())
    assert sorted(root.rglob("*")) == before
    assert session.tab.work.__panel__() not in list(session.tab._result)  # nothing may be written here
    assert "--allow-export" in session.tab._words.object
    session.tab.close()


def test_the_command_that_is_shown_does_the_same(root):
    session = Session(root, pattern=r"layers\.0.*proj", cast="fp32", into="x y")
    plan = session.planned()
    text = ExportChoice.of(session.state).command(session.state.outlet)
    words = ["-m", "workbench", *shlex.split(text)[1:]]
    done = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wanted = {k: v.float() for k, v in truth_of(root).items() if re.search(r"layers\.0.*proj", k)}
    got = {k: v for file in (root / "x y").glob("*.safetensors") for k, v in load_file(file).items()}
    assert {one.name for one in plan.tensors} == set(wanted) == set(got)
    assert all(torch.equal(got[k], wanted[k]) for k in wanted)


@pytest.mark.parametrize("word", ["a b", "-x", "x\x1b[31m", "q'uo\\te", "\u202eabc", "\udcff", "$(touch pwned)"])
def test_a_command_means_its_words_in_a_shell_and_shows_no_control(word):
    line = command(["printf", "%s", word])
    assert line.isprintable()
    told = subprocess.run(["bash", "-c", line.replace("%s", "%s", 1)], capture_output=True, timeout=20)
    assert (b"" if told.returncode else told.stdout) == (os.fsencode(word) if word != "-x" else b"-x")


def test_an_export_writes_the_tensors_and_proves_it(root):
    session = Session(root, exports="exports", target="dcp", into="llama-dcp")
    job = session.written()
    assert job.status == "done", job.error
    report, manifest = job.result
    assert report.identical and report.verified
    state = {k: torch.empty_like(v) for k, v in truth_of(root).items()}
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=str(root / "exports" / "llama-dcp"), no_dist=True)
    assert all(torch.equal(state[k], v) for k, v in truth_of(root).items())
    data = (root / "exports" / "llama-dcp" / INSIDE).read_bytes()
    assert manifest == (INSIDE, json.loads(data)["digest"])
    shown = session.tab._proof.object
    assert session.tab.view.report is report and session.tab.view.__panel__() in list(session.tab._result)
    assert "bit-identical" in shown and manifest[1] in shown and "exports/llama-dcp" in shown
    session.tab.work.start()  # a second time: it is there
    session.page.until(lambda: session.tab.work.job.status == "failed")
    assert "exists" in session.tab.work.job.error
    session.tab.close()
    session.state.close()
    assert len(session.registry) == 0


def test_a_cast_says_how_much_changed(root):
    truth = truth_of(root)
    session = Session(root, exports=".", target="torch", cast="fp16", into="half.pt")
    job = session.written()
    assert job.status == "done", job.error
    got = torch.load(root / "half.pt", weights_only=True)
    assert all(torch.equal(got[k], v.to(torch.float16)) for k, v in truth.items())
    changed = sum(int((v.to(torch.float16).double() != v.double()).sum()) for v in truth.values())
    assert changed > 0 and f"{changed:,} elements".replace(",", "\u2009") in session.tab._proof.object


def test_a_cancelled_export_leaves_nothing(root):
    session = Session(root, exports=".", into="gone")
    session.planned()
    before = sorted(os.listdir(root))
    session.tab.work.start()
    session.tab.work.cancel()
    assert session.tab.work.job.status == "cancelled"
    session.state.close()
    deadline = 100
    while (len(session.registry) or sorted(os.listdir(root)) != before) and deadline:
        time.sleep(0.1)
        deadline -= 1
    assert sorted(os.listdir(root)) == before and len(session.registry) == 0


def test_other_choices_drop_the_plan_and_its_proof(root):
    session = Session(root, exports=".")
    first = session.planned()
    session.state.mesh = "pp=2"
    assert session.tab.plan is None
    second = session.planned()
    assert second.mesh == "pp=2" and first.mesh is None
    session.tab._selects["cast"].value = "fp32"
    assert session.state.cast == "fp32"
    assert {one.dtype for one in session.planned().tensors} == {"float32"}
    assert set(tensor_rows(session.tab.plan)["dtype"]) <= {"f32", "bf16 → f32"}  # as in all other tables


REFUSED = {
    "parent": ("../secret/x", UnsafeError),
    "inner parent": ("exports/../../secret/x", UnsafeError),
    "absolute": ("/elsewhere/x", UnsafeError),
    "prefix sibling": ("../ckpts-private/x", UnsafeError),
    "through a link": ("out/x", UnsafeError),
    "a link itself": ("out", UnsafeError),
    "a link inside": ("exports/alias", UnsafeError),
    "NUL": ("x\0y", UnsafeError),
    "nothing": ("", UnsafeError),
    "dot": (".", UnsafeError),
    "hidden": (".x", UnsafeError),
    "home": ("~/x", UnsafeError),
    "inside a checkpoint": ("llama/x", WriteError),
    "deep inside a checkpoint": ("run/step-4/x", WriteError),
    "no folder": ("nowhere/x", WriteError),
}


@pytest.mark.parametrize("into, error", REFUSED.values(), ids=REFUSED)
def test_a_target_outside_or_inside_a_checkpoint_is_refused(root, into, error):
    with pytest.raises(error, match="target"):
        Outlet(Jail(root), ".").resolve(into, overwrite=True)


def test_a_folder_may_lie_beside_loose_files_in_root(root):
    """Loose files are a checkpoint of their own; folders beside them do not belong to it."""
    save_file({"w": torch.ones(1)}, root / "final.safetensors")
    outlet = Outlet(Jail(root), ".")
    assert outlet.resolve("made") == root.resolve() / "made"
    for into in ("made.safetensors", "llama/x"):
        with pytest.raises(WriteError, match="inside the checkpoint"):
            outlet.resolve(into)


def test_only_the_folder_that_was_allowed_is_written_to(root, tmp_path):
    outlet = Outlet(Jail(root), "exports")
    assert outlet.resolve("x") == root.resolve() / "exports" / "x"
    with pytest.raises(UnsafeError, match="leaves"):
        outlet.resolve("up/x")  # in ROOT, but not in the folder
    for folder in ("out", "..", "../ckpts-private", str(tmp_path / "secret"), "nowhere", "llama/config.json"):
        with pytest.raises(UsageError, match="inside ROOT"):
            Outlet(Jail(root), folder)


def test_overwriting_is_asked_for_and_only_of_checkpoints(root):
    (root / "notes.txt").write_text("mine")
    (root / "exports" / "mine").mkdir()
    (root / "exports" / "mine" / "thesis.txt").write_text("mine")
    session = Session(root, "names", exports=".", into="llama")
    assert "exists" in session.refused()
    outlet = session.state.outlet
    with pytest.raises(WriteError, match="not a checkpoint"):
        outlet.resolve("notes.txt", overwrite=True)
    for into, to in (("exports/mine", "safetensors"), ("notes.txt", "torch"), ("exports", "dcp")):
        choice = ExportChoice("names", into, to, overwrite=True)
        with pytest.raises(WriteError, match="not a checkpoint"):
            choice.run(session.state.ckpt, outlet, lambda _: None)
    with pytest.raises(WorkbenchError, match="is, or contains, the checkpoint being exported"):
        ExportChoice("names", "names", "dcp", overwrite=True).run(session.state.ckpt, outlet, lambda _: None)
    assert (root / "notes.txt").read_text() == (root / "exports" / "mine" / "thesis.txt").read_text() == "mine"
    session.tab.overwrite.value = True
    session.planned()
    job = session.written()
    assert job.status == "done", job.error
    assert set(wb.open(root / "llama")) == {EVIL, "\x1b[31mred"}


def test_without_leave_nothing_is_written_whatever_calls(root):
    session = Session(root)
    session.planned()
    before = sorted(root.rglob("*"))
    session.tab.work.start()
    session.page.until(lambda: session.tab.work.job.status not in ("idle", "running"))
    assert session.tab.work.job.status == "failed" and "--allow-export" in session.tab.work.job.error
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    "chosen, words",
    [
        ({"mesh": "tp=x"}, "is not a mesh axis"),
        ({"mesh": "tp=100000"}, "more than the page plans"),
        ({"target": "zip"}, "no format 'zip'"),
        ({"cast": "int3"}, "no type 'int3'"),
        ({"rename": "/etc/x.json"}, "no naming"),
        ({"role": "nobody"}, "no tensor has the role"),
        ({"pattern": "layers["}, "not a valid regular expression"),
        ({"pattern": "(a+)+$"}, "matches"),
        ({"into": "../x"}, "contains '..'"),
    ],
)
def test_what_cannot_be_is_a_sentence(root, chosen, words):
    assert words in Session(root, **chosen).refused()


def test_a_link_restores_every_choice(root):
    chosen = {"target": "dcp", "mesh": "tp=2", "cast": "bf16", "rename": "fqn", "into": "a b", "role": "param"}
    session = Session(root, "run/step-4", **chosen)
    restored = parse_query(query_of(session.state))
    assert {name: restored[name] for name in chosen} == chosen
    other = Session(root, restored.pop("path"), **{k: v for k, v in restored.items() if k not in ("tab",)})
    assert {name: widget.value for name, widget in other.tab._selects.items()} == {
        name: chosen[name] for name in other.tab._selects
    }
    assert other.tab.overwrite.value is False


def test_hostile_names_are_escaped_in_all_that_is_shown(root):
    session = Session(root, "names", exports=".")
    session.planned()
    job = session.written()
    assert job.status == "done", job.error
    html = "".join(pane.object for pane in (session.tab._command, session.tab._proof, session.tab._words))
    assert "<img" not in html and "\x1b" not in html
    assert "\x1b" not in tensor_rows(session.tab.plan).to_csv()


def test_downloads_hold_the_plan(root):
    session = Session(root, mesh="tp=2")
    plan = session.planned()
    view = session.tab.view
    files, tensors, document = list(view._body[-1])
    read = pd.read_csv(io.BytesIO(tensors.callback().getvalue()))
    assert len(read) == len(plan.tensors) and read["nbytes"].sum() == sum(one.nbytes for one in plan.tensors)
    assert len(pd.read_csv(io.BytesIO(files.callback().getvalue()))) == len(plan.files)
    assert json.loads(document.callback().getvalue())["dry_run"] is True
    assert str(root.parent).encode() not in document.callback().getvalue()


def test_a_load_onto_a_device_is_timed_and_let_go(root):
    session = Session(root, pattern="norm")
    session.planned()
    part = OnDevice(session.state, session.page.schedule)
    part.device = "cpu"
    part.work.start()
    session.page.until(lambda: part.work.job.status not in ("idle", "running"))
    assert part.work.job.status == "done", part.work.job.error
    wanted = [t for k, t in truth_of(root).items() if "norm" in k]
    assert part.work.job.result[:2] == (len(wanted), sum(t.nbytes for t in wanted))


@pytest.mark.parametrize(
    "path, to, cut, name",
    [
        ("run/step-4", "dcp", False, "run-step-4-dcp"),
        (".", "dcp", False, "export-dcp"),
        ("../x\x1b<b>", "torch", False, "x-b.pt"),
        ("m.safetensors", "torch", True, "m-torch"),
    ],
)
def test_a_target_has_a_name_of_its_own(path, to, cut, name):
    assert default_name(path, to, cut) == name
