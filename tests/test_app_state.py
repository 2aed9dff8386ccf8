"""The dashboard without a browser: the jail, shared checkpoints, a session's state, jobs, links and pictures."""

from __future__ import annotations

import html
import math
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor

import holoviews as hv
import numpy as np
import panel as pn
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from workbench.app import jobs, plots, style
from workbench.app.cell import _AnyPlace
from workbench.app.found import checkpoints
from workbench.app.glance import Glance, bytes_by_module, module_of
from workbench.app.jail import Jail, jail_of, relative_html, relative_words
from workbench.app.jobs import WORKERS, Job
from workbench.app.look import look
from workbench.app.outlet import Outlet
from workbench.app.page import Workbench, create_app
from workbench.app.registry import Registry
from workbench.app.rows import tensor_rows, with_role
from workbench.app.search import Search
from workbench.app.serve import serve
from workbench.app.state import WorkbenchState, parse_query, query_of
from workbench.app.tabs.detail import statistics, worst_table
from workbench.app.tabs.overview import charts, object_frame
from workbench.app.tabs.report_view import finding_rows
from workbench.core import executors
from workbench.errors import MissingFileError, OpenError, UnsafeError, UsageError, WorkbenchError, WriteError

WAIT = 30


@pytest.fixture
def root(tmp_path, samples):
    """A ROOT with checkpoints, and secrets beside it that a jail must not show."""
    root = tmp_path / "ckpts"
    root.mkdir()
    shutil.copytree(samples / "hf_llama_bf16_sharded", root / "llama")
    shutil.copytree(samples / "titan_run", root / "run")
    for folder in ("small", "links"):
        (root / folder).mkdir()
    save_file({"w": torch.arange(6.0).reshape(2, 3)}, root / "small" / "model.safetensors")
    for secret in (tmp_path / "secret", tmp_path / "ckpts-private"):
        secret.mkdir()
        save_file({"secret": torch.ones(1)}, secret / "model.safetensors")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "links" / "model.safetensors").symlink_to(tmp_path / "secret" / "model.safetensors")
    (root / "in").symlink_to(root / "llama")
    return root


def opened(root, path="llama", registry=None, **selection):
    state = WorkbenchState(Jail(root), Registry() if registry is None else registry)
    state.show(path, **selection)
    assert state.wait(WAIT)
    return state


# ---- the jail ------------------------------------------------------------------------------------------------------

OUTSIDE = {
    "parent": "../secret",
    "inner parent": "llama/../../secret",
    "prefix sibling": "../ckpts-private",
    "link to a folder": "out",
    "link to a file": "links/model.safetensors",
    "through a link": "out/model.safetensors",
    "absolute": "/etc",
    "NUL": "llama\0",
    "nothing": "",
}


@pytest.mark.parametrize("path", OUTSIDE.values(), ids=OUTSIDE)
def test_jail_refuses_what_leaves_root(root, path):
    with pytest.raises(UnsafeError, match=r"ROOT|list"):
        Jail(root).resolve(path)


def test_jail_refuses_absolute_paths_even_of_its_own(root, tmp_path):
    for path in (root / "llama", tmp_path / "ckpts-private", tmp_path / "secret"):
        with pytest.raises(UnsafeError, match="absolute"):
            Jail(root).resolve(str(path))


def test_jail_lets_in_what_is_inside(root):
    jail = Jail(root)
    assert jail.resolve("llama") == root.resolve() / "llama"
    assert jail.resolve("in") == root.resolve() / "llama"
    assert jail.resolve(".") == root.resolve()
    with pytest.raises(MissingFileError, match="'gone'"):
        jail.resolve("gone")


def test_a_root_that_is_itself_a_link_works(root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root)
    assert Jail(link).resolve("llama") == root.resolve() / "llama"
    with pytest.raises(UnsafeError):
        Jail(link).resolve("out")


def test_root_must_be_a_folder(root, tmp_path):
    for path in (tmp_path / "gone", root / "small" / "model.safetensors"):
        with pytest.raises(UsageError, match="not a folder"):
            Jail(path)


@pytest.mark.parametrize("url", ["s3://bucket/runs", "https://host/a%20b/runs", "memory://runs", "gs://bucket"])
def test_the_jail_of_a_url_is_what_is_below_it(url):
    jail = jail_of(url + "/")
    assert jail.root == jail.resolve(".") == url and jail.resolve("llama/./x") == f"{url}/llama/x"
    assert jail.resolve("s3://other/x") == f"{url}/s3:/other/x"  # a name like any other
    for name in ("run/step-4", "a b%20c?d#e", "."):
        assert jail.show(jail.resolve(name)) == name
    for path in ("../x", "run/../../x", "/etc", "a\0", ""):
        with pytest.raises(UnsafeError, match=r"ROOT|list"):
            jail.resolve(path)
    for path in (f"{url}-private/x", "s3://elsewhere/runs/x", "/etc/passwd"):
        with pytest.raises(ValueError, match="not below"):
            jail.show(path)
    assert relative_words(f"{url}/x/model.pt is torn; {url} is not") == "x/model.pt is torn; ROOT is not"


@pytest.mark.parametrize(
    "url, words",
    {
        "https://ann:pass@host/runs": "'https://host/runs' was given with a password or a signature",
        "https://host/runs?X-Amz-Signature=abc": "'https://host/runs' was given with a password or a signature",
        "s3://bucket/../other": "contains '..'",
        "s3://": "names no host",
    }.items(),
)
def test_a_url_that_is_not_served_is_one_sentence(url, words):
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        jail_of(url)
    assert not any(secret in str(error.value) for secret in ("pass@", "abc"))


def test_exports_are_not_written_to_a_root_in_a_store():
    jail = jail_of("s3://bucket/runs")
    assert not Outlet(jail).open
    with pytest.raises(UsageError, match="'s3://bucket/runs' is in a store"):
        Outlet(jail, ".")


@pytest.mark.parametrize("path", [p for p in OUTSIDE.values() if p], ids=[k for k, p in OUTSIDE.items() if p])
def test_a_session_opens_nothing_outside_root_whoever_names_it(root, path):
    registry = Registry()
    state = opened(root, path, registry)
    assert (state.status, state.ckpt, len(registry)) == ("failed", None, 0)
    assert "secret'" in state.error or "ROOT" in state.error or "list" in state.error
    linked = WorkbenchState(Jail(root), registry)
    linked.restore({"path": path})
    linked.wait(WAIT)
    assert linked.status == "failed" and linked.ckpt is None


def test_the_picker_lists_checkpoints_inside_root_only(root):
    found = checkpoints(Jail(root))
    paths = found.paths
    assert {"llama", "small", "run/step-2", "run/step-4"} <= set(paths)
    assert not any("secret" in path or "private" in path or path.startswith("out") for path in paths)
    assert not any("secret" in text for texts in found.texts for text in texts)
    if "links" in paths:  # its file is a link out: listing the name is harmless, opening is refused
        state = opened(root, "links")
        assert state.status == "failed" and "link" in state.error


# ---- shared checkpoints --------------------------------------------------------------------------------------------


class Counting:
    """Opens checkpoints, counting openings and closings."""

    def __init__(self):
        self.opened = self.closed = 0

    def __call__(self, path):
        self.opened += 1
        ckpt = wb.open(path)
        close = ckpt.close

        def closing():
            self.closed += 1
            close()

        ckpt.close = closing
        return ckpt


def test_sessions_share_one_checkpoint_and_the_last_one_closes_it(root):
    count = Counting()
    registry = Registry(count)
    one, two = (opened(root, "llama", registry) for _ in range(2))
    assert one.ckpt is two.ckpt and one.lease.rows is two.lease.rows
    assert (count.opened, count.closed, len(registry)) == (1, 0, 1)
    one.close()
    one.close()
    assert (count.closed, len(registry)) == (0, 1)
    two.show("run/step-2")
    assert two.wait(WAIT)
    assert (count.opened, count.closed, len(registry)) == (2, 1, 1)
    two.close()
    assert (count.opened, count.closed, len(registry)) == (2, 2, 0)


def test_many_threads_open_once(root):
    count = Counting()
    registry = Registry(count)
    leases, gate = [], threading.Barrier(8)

    def work():
        gate.wait()
        leases.append(registry.acquire(root / "llama"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert count.opened == 1
    for lease in leases:
        lease.release()
        lease.release()
    assert (count.closed, len(registry)) == (1, 0)


def test_a_checkpoint_saved_over_is_opened_anew(root):
    registry = Registry()
    path = root / "small" / "model.safetensors"
    old = registry.acquire(path)
    save_file({"w": torch.zeros(4, 4), "b": torch.zeros(2)}, path)
    new = registry.acquire(path)
    assert len(new.checkpoint) == 2 and new.checkpoint is not old.checkpoint
    old.release(), new.release()
    assert len(registry) == 0


def test_a_checkpoint_that_does_not_open_is_not_kept(root):
    (root / "broken.safetensors").write_bytes(b"\xff" * 64)
    registry = Registry()
    with pytest.raises(OpenError):
        registry.acquire(root / "broken.safetensors")
    assert len(registry) == 0


def test_turning_away_while_it_opens_keeps_nothing(root):
    """The lease of an opening that nobody waits for any more goes back at once."""
    gate, registry = threading.Event(), None

    def slow(path):
        if path.name == "llama":
            assert gate.wait(WAIT)
        return wb.open(path)

    registry = Registry(slow)
    state = WorkbenchState(Jail(root), registry)
    state.show("llama")
    state.show("small")
    assert state.wait(WAIT) and state.status == "open" and list(state.ckpt) == ["w"]
    gate.set()
    deadline = time.monotonic() + WAIT
    while len(registry) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(registry) == 1 and list(state.ckpt) == ["w"]
    state.close()
    assert len(registry) == 0
    state.show("llama")  # after the session's end: nothing
    assert len(registry) == 0


# ---- state and links -----------------------------------------------------------------------------------------------


def _look(state):
    state.look()
    assert state._looking.wait(WAIT)


def test_a_checkpoint_rewritten_while_it_is_shown_is_told_and_opened_anew(root):
    state = opened(root, "small/model.safetensors")
    _look(state)
    assert state.notice == "" and state.status == "open"
    save_file({"w": torch.zeros(4, 4), "b": torch.zeros(2)}, root / "small" / "model.safetensors")
    _look(state)
    assert "rewritten" in state.notice and "select it in the list again" in state.notice
    workbench = Workbench(state)
    assert "rewritten" in workbench._words.object and workbench._words in list(workbench._body)
    told = state.notice
    _look(state)
    assert state.notice == told  # once
    state.show("small/model.safetensors")
    assert state.wait(WAIT) and state.notice == "" and set(state.ckpt) == {"w", "b"}
    _look(state)
    assert state.notice == ""
    workbench.close()


def test_what_a_tab_shows_is_set_before_the_tab_is_shown(root):
    """A component of the page that has just been mounted loses what is set in the next moment."""
    state = opened(root)
    workbench = Workbench(state)
    state.restore({"path": "llama", "tab": "tensors", "pattern": "mlp"})
    box, seen = workbench.made["tensors"]._pattern, []
    state.restore({"path": "llama", "tab": "overview"})
    assert box.value == ""
    workbench.tabs.param.watch(lambda event: seen.append((event.new, box.value)), "active")
    state.restore({"path": "llama", "tab": "tensors", "pattern": "norm"})
    workbench._body.param.watch(lambda event: seen.append((workbench.tabs in event.new, box.value)), "objects")
    state.show("small/model.safetensors", pattern="w")
    assert state.wait(WAIT)
    assert seen == [(workbench.tabs.active, "norm"), (False, "norm"), (True, "w")]
    workbench.close()


def test_a_checkpoint_deleted_while_it_is_shown_is_told(root):
    state = opened(root)
    shutil.rmtree(root / "llama")
    _look(state)
    assert "deleted" in state.notice and state.status == "open"
    state.show("llama")
    assert state.wait(WAIT) and state.status == "failed" and "does not exist" in state.error
    _look(state)
    assert state.notice == ""
    state.close()


@pytest.mark.parametrize("path", ["/etc", "..", "llama/../../x", "nowhere", "llama\0"])
def test_what_is_not_in_root_is_not_offered_for_verification(root, path):
    state = opened(root, path)
    assert state.status == "failed"
    workbench = Workbench(state)
    assert workbench._left_over is None and "Cannot open" in workbench._words.object
    workbench.close()


def test_integrity_begins_with_what_the_overview_has_checked(root):
    page = Page()
    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    workbench = Workbench(state, page.schedule)
    state.show("llama")
    page.until(lambda: state.structure is not None)
    state.tab = "integrity"
    assert workbench.made["integrity"].view is not None
    state.show("small")
    assert workbench.made["integrity"].view is None and state.structure is None
    page.until(lambda: workbench.made["integrity"].view is not None)  # checked by itself
    workbench.close()


@pytest.mark.parametrize("path", ["junk.pt", "empty", "lost", "outside"])
def test_no_message_says_where_root_lies(root, path):
    (root / "junk.pt").write_bytes(b"junk" * 99)
    (root / "empty").mkdir()
    for name in ("lost", "outside"):
        shutil.copytree(root / "llama", root / name)
        (root / name / "model-00002-of-00004.safetensors").unlink()
    (root / "outside" / "model-00002-of-00004.safetensors").symlink_to("/etc/passwd")
    state = opened(root, path)
    assert state.status == "failed" and str(root) in state.error  # as the command line says it
    workbench = Workbench(state)
    shown = workbench._words.object
    assert str(root) not in shown and path in shown
    left = workbench._left_over.work
    left.start()
    assert left.job.wait(WAIT)
    if left.job.status == "done":  # a report; its findings say what could not be read
        found = finding_rows(left.job.result)
        assert not found.empty and not found.map(lambda cell: str(root) in str(cell)).any(axis=None)
    workbench.close()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("file 'x' of '{root}/run/step-4' is missing", "file 'x' of 'run/step-4' is missing"),
        ("'{root}' is empty", "'ROOT' is empty"),
        ("{root}-other/x and {root}.old", "{root}-other/x and {root}.old"),
    ],
)
def test_paths_in_words_are_relative_to_root(root, text, shown):
    jail = Jail(root)
    assert relative_words(text.format(root=jail.root)) == shown.format(root=jail.root)


@pytest.mark.parametrize("name", ["code", "a'b&c"])
def test_paths_in_html_are_relative_to_root_and_tags_are_kept(monkeypatch, name):
    monkeypatch.setattr("workbench.app.jail._roots", {f"/{name}"})
    markup = f"<code>{html.escape(f'/{name}/run/x')}</code> <b>/{name}/y</b> {html.escape(f'/{name}')}"
    assert relative_html(markup) == "<code>run/x</code> <b>y</b> ROOT"


def test_the_overview_lists_the_values_of_the_objects(root):
    args = {"lr": 4e-3, "betas": [0.9, 0.95], "name": "x" * 300, "<b>\x1b": None}
    torch.save({"model": {"w": torch.ones(2)}, "args": args, "iteration": 7}, root / "odd.pt")
    page = Page()
    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    workbench = Workbench(state, page.schedule)
    state.show("odd.pt")
    page.until(lambda: state.structure is not None)
    (table,) = workbench.made["overview"]._objects.select(pn.widgets.Tabulator)
    values = dict(table.value.itertuples(index=False))
    assert values == {
        "args.lr": "0.004",
        "args.betas": "[0.9, 0.95]",
        "args.name": "x" * 200 + "…",
        "args.<b>\\x1b": "null",
        "iteration": "7",
    }
    workbench.close()
    (root / "run" / "step-4" / "__0_0.distcp").write_bytes(b"")  # where the objects of this checkpoint are
    found = object_frame(wb.open(root / "run" / "step-4", partial=True))
    assert len(found) and found["value"].str.contains("beyond the end|truncated").any()


def test_a_broken_checkpoint_is_a_sentence(root):
    (root / "broken.safetensors").write_bytes(b"\xff" * 64)
    state = opened(root, "broken.safetensors")
    assert state.status == "failed" and "Traceback" not in state.error and "\n" not in state.error
    with pytest.raises(OpenError) as error:
        wb.open(root / "broken.safetensors")
    assert state.error.split("'")[-1] == str(error.value).split("'")[-1]


def test_a_link_restores_what_is_shown(root):
    state = opened(root, "llama", tensor="model.norm.weight", tab="tensors", pattern=r"norm|a+b&c=d%20 é")
    query = query_of(state)
    assert query.startswith("?ckpt=llama&")
    other = WorkbenchState(Jail(root), Registry())
    other.restore(parse_query(query))
    assert other.wait(WAIT)
    assert [getattr(other, name) for name in ("path", "tensor", "tab", "pattern", "status")] == [
        "llama",
        "model.norm.weight",
        "tensors",
        r"norm|a+b&c=d%20 é",
        "open",
    ]


def test_odd_keys_survive_a_link():
    state = WorkbenchState(Jail("."), Registry())
    for key in ("a b&c=d#e", "\ud800", "‮evil", "1.0", "null", '{"a": 1}', "true"):
        state.param.update(path="x", tensor=key)
        assert parse_query(query_of(state))["tensor"] == key


def test_a_link_of_nonsense_is_harmless(root):
    state = WorkbenchState(Jail(root), Registry())
    state.restore(parse_query("?ckpt=llama&tensor=gone&tab=elsewhere&q=%5B&ckpt=run&x=" + "y" * 10_000))
    assert state.wait(WAIT)
    assert (state.status, state.tensor, state.tab, state.path) == ("open", "", "overview", "llama")
    assert "'gone'" in state.notice and "the tab 'elsewhere', which does not exist" in state.notice
    assert parse_query("?ckpt=" + "a" * 100_000).get("path") is None


def test_a_link_that_is_no_text_loses_only_that():
    found = parse_query("?ckpt=%ff%fe&tensor=wq&%ff=1&tab=layout")
    assert (found["path"], found["tensor"], found["tab"]) == ("", "wq", "layout")
    assert not any(parse_query("?" + "&".join(f"a{i}=1" for i in range(80))).values())
    assert parse_query("?tab=diff&" + "a=1&" * 10_000)["tab"] == "diff"
    escaped = parse_query("?ckpt=%ED%B3%BF&into=%ED%A0%80&q=a%ED%B8%80")  # only U+DC80 to U+DCFF stand for bytes
    assert escaped["path"] == "\udcff" and not {"into", "pattern"} & set(escaped)


NO_NAMES = {"long": "a" * 300, "deep": "a/" * 4000 + "b", "surrogate": "\ud800", "in a folder": "links/\udfff"}


@pytest.mark.parametrize("name", NO_NAMES.values(), ids=NO_NAMES)
def test_a_name_that_no_file_can_have_is_a_sentence(root, name):
    with pytest.raises(MissingFileError, match="list"):
        Jail(root).resolve(name)
    with pytest.raises(WriteError, match="choose another name"):
        Outlet(Jail(root), ".").resolve(name)


def test_rows_lead_back_to_keys_and_filters_are_true(root):
    ckpt = wb.open(root / "run" / "step-4")
    rows = tensor_rows(ckpt)
    assert [ckpt.catalog.keys[i] for i in rows.index] == list(ckpt)
    search = Search(ckpt.catalog.keys, r"layers\.0")
    assert search.run(60)
    chosen = with_role(ckpt, search.positions(), "exp_avg")
    expected = [k for k, role in zip(ckpt, ckpt.roles, strict=True) if "layers.0" in k and role == "exp_avg"]
    assert [ckpt.catalog.keys[i] for i in chosen] == expected != []
    with pytest.raises(UsageError, match="unterminated character set") as error:
        Search(ckpt.catalog.keys, "layers[")
    assert "character 7" in str(error.value)


def test_bytes_by_module_add_up(root):
    ckpt = wb.open(root / "llama")
    found = dict(bytes_by_module(ckpt))
    truth: dict[str, int] = {}
    for file in (root / "llama").glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            name = module_of(key)
            truth[name] = truth.get(name, 0) + tensor.nbytes
    assert found == truth
    assert module_of("model.layers.3.mlp.up.weight") == "model.layers.3"
    assert module_of("lm_head.weight") == "lm_head" and module_of("w") == "w"


# ---- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_reports_progress_and_its_result():
    seen: list[float] = []
    job = Job()
    job.param.watch(lambda event: seen.append(event.new), "progress")

    def work(progress):
        for step in range(4):
            progress(step / 4)
            time.sleep(0.12)
        return "done"

    job.start(work)
    assert job.wait(WAIT) and (job.status, job.result, job.progress) == ("done", "done", 1.0)
    assert seen == sorted(seen) and any(0 < value < 1 for value in seen)


@pytest.mark.parametrize("spent, share, left", [(1000, 0.2, "1 h left"), (1, 0.2, ""), (1000, 0.01, "")])
def test_a_job_says_how_long_it_will_take_once_that_is_known(spent, share, left):
    job = Job(progress=share)
    job._began -= spent
    assert job.left == left
    words = f"reading, {share:.0%}, {left}" if left else f"reading, {share:.0%}"
    assert f"<span>{words}</span>" in style.progress("reading", share, job.left)


def test_jobs_of_a_notebooks_cell_are_done_when_it_ends():
    job, waiting, ran = Job(lambda callback: None), Job(), []  # the first one's thread would never be asked
    with jobs.at_once():
        job.start(lambda progress: ran.append(threading.current_thread()) or "done")
        waiting.start(lambda progress: ran.append(threading.current_thread()), later=True)
        assert (job.status, job.result) == ("done", "done")
    assert waiting.wait(WAIT) and ran[0] is threading.current_thread() is not ran[1]


def test_a_run_in_a_cell_is_headed_by_its_name(root, tmp_path):
    """Also if one of its checkpoints was shown before: the folder of that is a ROOT."""
    place = _AnyPlace()
    Jail(root)
    assert [relative_html(place.title(path)) for path in (str(root), f"{root}/run/", "s3://b/run")] == [
        "ckpts",
        "run",
        "run",
    ]
    assert Jail(root).title(".") == "ckpts" and Jail(root).title("a/run") == "a/run"


def test_a_page_does_not_suggest_to_open_in_part(root):
    next((root / "llama").glob("model-00002*")).unlink()
    state = WorkbenchState(Jail(root), Registry())
    state.restore({"path": "llama"})
    assert state.wait(WAIT) and state.status == "failed"
    assert state.error.endswith("download or restore it") and "partial" not in state.error


def test_a_script_ends_without_a_word_while_a_job_runs():
    code = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from workbench.app.jobs import Job
began = threading.Event()
def work(progress):
    for _ in range(3000):
        progress(0.5)
        ThreadPoolExecutor(1).submit(began.set).result()
        time.sleep(0.01)
Job(long=True).start(work)
began.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_cancelled_job_stops_and_publishes_nothing_more():
    started, stopped, job = threading.Event(), threading.Event(), Job()

    def work(progress):
        started.set()
        try:
            while True:
                progress(0.5)
                time.sleep(0.005)
        finally:
            stopped.set()

    job.start(work)
    assert started.wait(WAIT)
    job.cancel()
    assert stopped.wait(WAIT) and job.status == "cancelled" and job.result is None


def test_a_newer_start_supersedes():
    gate, job = threading.Event(), Job()
    job.start(lambda progress: gate.wait(WAIT) and "old")
    job.start(lambda progress: "new")
    assert job.wait(WAIT) and job.result == "new"
    gate.set()
    time.sleep(0.05)
    assert job.result == "new"


def test_failures_are_words_and_the_unforeseen_is_logged(caplog):
    job = Job()

    def ours(progress):
        raise wb.errors.HoleError("tensor 'w': rows 2 to 4 are stored nowhere")

    job.start(ours)
    assert job.wait(WAIT) and (job.status, job.error) == ("failed", "tensor 'w': rows 2 to 4 are stored nowhere")
    job.start(lambda progress: 1 / 0)
    assert job.wait(WAIT) and job.status == "failed" and "ZeroDivisionError" in job.error
    assert "division by zero" in caplog.text


def test_nothing_is_published_but_on_the_page_thread():
    """With a schedule, params change only when the page's thread runs what was handed over."""
    handed: list = []
    job = Job(handed.append)
    job.start(lambda progress: 5)
    assert job.wait(WAIT) and job.status == "running" and job.result is None
    for callback in handed:
        callback()
    assert (job.status, job.result) == ("done", 5)


# ---- pictures ------------------------------------------------------------------------------------------------------

TENSORS = {
    "matrix": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
    "long": torch.arange(5000.0),
    "cube": torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16),
    "zeros": torch.zeros(8, 8),
    "constant": torch.full((4, 4), 3.0),
    "bool": torch.eye(9).bool(),
    "int64": torch.tensor([-(2**63), 2**63 - 1, 0]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 5),
    "all_nan": torch.full((3, 3), math.nan),
    "odd": torch.tensor([[math.nan, 1.0, -math.inf], [0.0, 2.0, math.inf]]),
    "huge": torch.tensor([-3e38, 3e38, 0.0]),
    "tiny": torch.tensor([1e-45, -1e-45, 0.0]),
    "complex": torch.tensor([3 + 4j, 0j]),
    "fp8": torch.randn(16, 16).to(torch.float8_e4m3fn),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "zoo.safetensors"
    save_file(TENSORS, path)
    return wb.open(path)


@pytest.mark.parametrize("key", TENSORS)
def test_every_kind_of_tensor_has_its_pictures(zoo, key):
    ticks: list[float] = []
    found = look(zoo[key], ticks.append)
    assert ticks == sorted(ticks) and (not ticks or ticks[-1] <= 1)
    assert "<div" in statistics(found.profile.summary) or "no elements" in statistics(found.profile.summary)
    assert worst_table(found.heat).count("<tr>") == len(found.heat.worst) + 1
    renderer = hv.renderer("bokeh")
    if found.heat.values.size:
        renderer.get_plot(plots.heat_map(found.heat, found.shape))
    if found.profile.histogram is not None:
        renderer.get_plot(plots.histogram(found.profile.histogram, found.profile.summary))


def test_what_is_odd_is_said_in_words(zoo):
    words = statistics(look(zoo["odd"], lambda _: None).profile.summary)
    assert "1 NaN" in words and "1 +Inf" in words and "1 −Inf" in words
    assert "all zeros" in statistics(look(zoo["zeros"], lambda _: None).profile.summary)
    assert '<span class="odd">constant</span>' in statistics(look(zoo["constant"], lambda _: None).profile.summary)


def test_zeros_are_a_bar_of_their_own_and_no_element_is_lost(zoo):
    found = look(zoo["odd"], lambda _: None).profile
    picture = plots.histogram(found.histogram, found.summary)
    bars = {layer.label: layer for layer in picture}
    assert bars["exactly zero"].dframe()["elements"].sum() == 1
    assert bars["elements"].dframe()["elements"].sum() == found.summary.finite - 1


def test_the_heat_map_marks_the_worst_elements_where_they_are(zoo):
    found = look(zoo["cube"], lambda _: None)
    values = TENSORS["cube"].float().numpy()
    index = np.unravel_index(np.abs(values).argmax(), values.shape)
    assert found.heat.worst[0][0] == tuple(index)
    assert plots.worst_points(found.heat, found.shape)[0] == (index[2] + 0.5, index[0] * 200 + index[1] + 0.5)
    layers = list(plots.heat_map(found.heat, found.shape))
    image = next(layer for layer in layers if isinstance(layer, hv.Image))
    cell = image[index[2] + 0.5, index[0] * 200 + index[1] + 0.5]  # HoloViews' own reading of the coordinates
    assert cell == values[index]


def test_bars_are_in_proportion_with_names_in_full_and_apart():
    most, half, least = "a" * 60 + "x" + "b" * 60, "a" * 60 + "y" + "b" * 60, "<b>"
    page = charts(Glance([], [], [(most, 1 << 20), (half, 1 << 19), (least, 1)], [], [], []))
    rows = re.findall(r'<tr title="(.*?)"><th scope="row">(.*?)</th><td><i style="width:(.*?)%"></i><span>(.*?)<', page)
    titles, names, widths, sizes = zip(*rows, strict=True)
    assert titles == (f"{most}: 1\u2009MiB", f"{half}: 512\u2009KiB", "&lt;b&gt;: 1\u2009B")
    assert all(len(name) == 44 for name in names[:2]) and names[2] == "&lt;b&gt;"
    assert float(widths[0]) == 2 * float(widths[1]) == 80 and float(widths[2]) < 0.01
    assert sizes == ("1\u2009MiB", "512\u2009KiB", "1\u2009B") and "Bytes by rank" not in page


def test_a_cancelled_look_reads_no_further(tmp_path):
    save_file({"w": torch.zeros(3000, 1000)}, tmp_path / "big.safetensors")
    tensor = wb.open(tmp_path / "big.safetensors")["w"]

    class Stop(Exception):
        pass

    seen: list[float] = []

    def progress(fraction):
        seen.append(fraction)
        if fraction > 0.2:
            raise Stop

    with pytest.raises(Stop):
        look(tensor, progress)
    assert 0.2 < seen[-1] < 0.6


# ---- views and server ----------------------------------------------------------------------------------------------


class Page:
    """Stands for a page's thread: runs what the jobs hand over when asked to, as an event loop does."""

    def __init__(self):
        self._handed: queue.Queue = queue.Queue()
        self.schedule = self._handed.put

    def until(self, true):
        deadline = time.monotonic() + WAIT
        while not true():
            self._handed.get(timeout=max(deadline - time.monotonic(), 0.01))()


def test_the_workbench_shows_a_checkpoint_without_a_server(root):
    page = Page()
    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    workbench = Workbench(state, page.schedule)
    state.show("llama", tensor="lm_head.weight", tab="tensors")
    page.until(lambda: state.status != "opening")
    assert state.status == "open", state.error
    job, table = workbench.made["tensors"].detail.job, workbench.made["tensors"].table
    page.until(lambda: job.status == "done")
    assert table.value.index[table.selection[0]] == list(state.ckpt).index("lm_head.weight")
    state.pattern = "self_attn"
    assert len(table.chosen) == sum("self_attn" in key for key in state.ckpt) and table.selection == []
    assert job.status == "done"
    page.until(lambda: workbench.picker.job.status == "done")
    assert pn.panel(workbench).get_root() is not None
    workbench.close()


def test_an_app_made_twice_holds_nothing_twice(root):
    registry = Registry()
    pages = [create_app(root, registry) for _ in range(2)]
    assert len(registry) == 0 and pages[0] is not pages[1]


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.7", "example.org", ""])
def test_other_addresses_need_to_be_asked_for(root, address):
    with pytest.raises(UsageError, match="insecure"):
        serve(root, address=address)


def test_a_taken_port_is_a_sentence(root, free_port):
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(WorkbenchError, match="--port"):
            serve(root, port=sock.getsockname()[1])


def test_nobody_waits_for_long_jobs_to_open_a_checkpoint(root):
    """Twenty verifications under way: another session opens at once, and they keep to their share of threads."""
    go, running, lock = threading.Event(), [0, 0], threading.Lock()

    def slow(progress):
        with lock:
            running[0] += 1
            running[1] = max(running)
        go.wait(WAIT)
        with lock:
            running[0] -= 1

    jobs = [Job(long=True) for _ in range(20)]
    try:
        for job in jobs:
            job.start(slow)
        state = opened(root)
        assert state.status == "open" and not any(job.status == "done" for job in jobs)
        state.close()
    finally:
        go.set()
    assert all(job.wait(WAIT) for job in jobs) and running[1] <= WORKERS


def test_the_passes_of_all_long_jobs_share_one_thread_per_core():
    running, most, lock = 0, 0, threading.Lock()

    class Squares:
        def __call__(self, task):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.002)
            with lock:
                running -= 1
            return task * task

        def close(self):
            pass

    def work(progress):
        return list(executors.ordered(Squares(), range(30), 0, threads=1, at_once=None, name="squares"))

    jobs = [Job(long=True) for _ in range(2 * WORKERS)]
    for job in jobs:
        job.start(work)
    assert all(job.wait(WAIT) and job.result == [(task, task * task) for task in range(30)] for job in jobs)
    assert 1 <= most <= executors.cores()


def test_long_jobs_read_on_the_executor_of_the_server(root, monkeypatch):
    sent, pool = [], ThreadPoolExecutor(1)

    class Elsewhere(Executor):
        def submit(self, call, /, *given, **named):
            sent.append(call)
            return pool.submit(call, *given, **named)

    def shown(long=True):
        job = Job(long=long)
        job.start(lambda progress: wb.verify(root / "llama", deep=True, progress=progress).to_dict())
        assert job.wait(WAIT) and job.status == "done", job.error
        return job.result

    monkeypatch.setattr(executors, "LEAST", 0)
    here = shown()
    jobs.scan_on(Elsewhere())
    try:
        assert shown() == here and sent
        before = len(sent)
        assert shown(long=False) == here and len(sent) == before
    finally:
        jobs.scan_on(None)
    assert shown() == here and len(sent) == before
    pool.shutdown()


def test_an_event_on_one_page_changes_no_other(root):
    """Panel's ``busy`` belongs to the process: it turned, in every page, with each event of any."""
    page = create_app(root)
    try:
        pn.state._add_busy_event("another page")
        assert pn.state.busy and not page.busy
    finally:
        pn.state._remove_busy_event("another page")
