"""``wb.dcp.Writer`` into stores: what is visible is loaded by torch alone, old or new, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import workbench as wb
from tests import emulators
from tests.properties import SLOW
from tests.save_loader import raw
from tests.test_save import check_loads, everything
from tests.test_stores import SECRET, Line, memory, s3, server  # noqa: F401
from workbench import errors
from workbench.analysis import manifest
from workbench.analysis.manifest_file import INSIDE
from workbench.core.remote import destination, objects
from workbench.core.remote.destination import Destination
from workbench.dcp import writer

ROOT = Path(__file__).resolve().parents[1]


def save(url: str, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=wb.dcp.Writer(url, **options), planner=wb.dcp.Planner())


def small(step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(step)
    return {"model": {f"{n}.weight": torch.randn(20, 30 + n, generator=made) for n in range(4)}, "step": step}


def names(url: str, options: Any = None) -> set[str]:
    to = Destination(url, options)
    return set(to.files(to.key))


def fetched(url: str, folder: Path, options: Any = None) -> Path:
    """The objects below a URL, as files."""
    to = Destination(url, options)
    stats = to.files(to.key)
    folder.mkdir()
    for name, stat in stats.items():
        (folder / name).write_bytes(to.read(f"{to.key}/{name}", stat) or b"")
    return folder


def visible(url: str, options: Any = None) -> int | None:
    """The step of what opens, if all of it is that step's."""
    try:
        ckpt = wb.open(url, cache=False, storage_options=options)
    except errors.OpenError:
        return None
    step = ckpt.step
    assert step is not None
    assert all(raw(ckpt[f"model.{key}"].torch()) == raw(one) for key, one in small(step)["model"].items())
    report = wb.verify(ckpt, deep=True)
    assert not report.count("error") and "manifest" in report.checked, str(report)
    assert {one.rule for one in report} <= {"manifest.added"}  # leftovers of a dead save, by name
    return step


def test_a_save_into_s3_is_loaded_by_torch_alone(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "FILE", 1 << 20)
    url, state = f"{s3.url}/run/step-3", everything()
    for _ in range(2):  # the second replaces the first
        s3.log.clear()
        save(url, state, storage_options=s3.options)
    assert s3.puts()[-1].endswith("/.metadata")  # visible last
    found = names(url, s3.options)
    assert len([one for one in found if one.endswith(".distcp")]) == 2 and len(found) == 4
    check_loads(fetched(url, tmp_path / "a", s3.options), state)
    report = wb.verify(url, deep=True, storage_options=s3.options)
    assert report.exit_code == 0 and "manifest" in report.checked
    record = manifest.load(wb.open(url, storage_options=s3.options).place)
    assert record.name == "step-3" and {"write", "sync"} <= {row["name"] for row in record.save["phases"]}
    wb.seal(url, storage_options=s3.options)
    assert names(url, s3.options) == found
    assert wb.verify(tmp_path / "a", deep=True).exit_code == 0  # a copy on disk is the same checkpoint
    save(url, small(1), storage_options=s3.options, manifest=False)
    assert len(names(url, s3.options)) == 2


def test_large_objects_go_in_parts_with_checksums(s3, monkeypatch):
    monkeypatch.setattr(destination, "SENT_AT_ONCE", 5 << 20)
    monkeypatch.setattr(objects, "SENT_AT_ONCE", 5 << 20)
    state = {"w": torch.arange(4 << 20, dtype=torch.float32)}
    save(f"{s3.url}/big", state, storage_options=s3.options, thread_count=1)
    parts = [headers for method, path, headers in s3.log if method == "PUT" and "partNumber" in path]
    assert len(parts) == 4 and all("HTTP_X_AMZ_CHECKSUM_SHA256" in headers for headers in parts)
    assert raw(wb.open(f"{s3.url}/big", storage_options=s3.options)["w"].torch()) == raw(state["w"])


@pytest.fixture(params=["azure", "google_writable"])
def other_store(request, tmp_path_factory):
    """A bucket of Azure's or of Google's kind."""
    with contextlib.ExitStack() as stack:
        try:
            folders = [tmp_path_factory.mktemp("azurite")] if request.param == "azure" else []
            found = stack.enter_context(getattr(emulators, request.param)(*folders))
        except emulators.Missing as error:
            pytest.skip(f"not installed: {error}")
        yield found


def test_saves_into_the_stores_of_azure_and_google(other_store, tmp_path):
    """Old, new, in parts, by two jobs at once, cut off: the same as in S3."""
    url, options = f"{other_store.url}/run/step", other_store.options
    for step in (1, 2):
        save(url, small(step), storage_options=options)
        assert visible(url, options) == step and len(names(url, options)) == 3
    found = {"model": {key: torch.zeros_like(one) for key, one in small(2)["model"].items()}, "step": 0}
    dcp.load(found, checkpoint_id=fetched(url, tmp_path / "a", options))
    assert found["step"] == 2 and all(raw(found["model"][key]) == raw(one) for key, one in small(2)["model"].items())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda step: [save(url, small(step), storage_options=options) for _ in range(3)], (3, 4)))
    last = visible(url, options)
    assert last in (3, 4) and len(names(url, options)) == 3
    for name in ("send", "put"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objects._Cloud, name, lambda *_, **__: 1 / 0)
            with pytest.raises(CheckpointException):
                save(url, small(5), storage_options=options)
            gc.collect()
        assert visible(url, options) == last
    large = {"w": torch.arange(3 << 20, dtype=torch.float32)}
    save(f"{other_store.url}/large", large, storage_options=options, thread_count=1)
    assert raw(wb.open(f"{other_store.url}/large", storage_options=options)["w"].torch()) == raw(large["w"])
    with pytest.raises(CheckpointException, match="exists"):
        save(url, small(6), storage_options=options, overwrite=False)


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_save_may_be_cut_off_at_every_call(kind, request):
    """The old step or the new one is visible, whole; the next save removes what is left."""
    store = request.getfixturevalue(kind)
    base, options = (store.url, store.options) if kind == "s3" else ("memory://b", None)
    url = f"{base}/run/step"
    with pytest.MonkeyPatch.context() as patch:
        line = Line(patch, objects._Cloud if kind == "s3" else objects._Memory)

        def fresh(old: bool) -> None:
            line.mend()
            to = Destination(url, options)
            to.remove([f"{to.key}/{name}" for name in to.files(to.key)])
            if old:
                save(url, small(1), storage_options=options)
            line.count = 0

        fresh(True)
        save(url, small(2), storage_options=options)
        whole, calls = len(names(url, options)), line.count
        assert calls > 10 and whole == 3
        seen = set()
        for old in (True, False):
            for at in range(0, calls, 1 if SLOW else 9 if kind == "s3" else 4):
                for after in (False, True):
                    fresh(old)
                    line.cut(at, after)
                    ended = True
                    try:
                        save(url, small(2), storage_options=options)
                    except (CheckpointException, errors.WorkbenchError):
                        ended = False
                        gc.collect()
                    line.mend()
                    found = visible(url, options)
                    assert found in ({2} if ended else {1 if old else None, 2}), (at, after, old)
                    seen.add((ended, found))
                    with pytest.MonkeyPatch.context() as later:  # leftovers count as such after a day
                        later.setattr("workbench.dcp.commit.DAY", -1e6)
                        save(url, small(3), storage_options=options)
                    assert visible(url, options) == 3 and len(names(url, options)) == whole, (at, after, old)
        assert {(False, None), (False, 1), (True, 2)} <= seen


def test_a_failed_save_leaves_nothing(s3, monkeypatch):
    url = f"{s3.url}/a"
    save(url, small(1), storage_options=s3.options)
    before = names(url, s3.options)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "manifest_of", lambda *_: 1 / 0)
        with pytest.raises(CheckpointException):
            save(url, small(2), storage_options=s3.options)
        gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(writer.DataFile, "flush", lambda *_, **__: 1 / 0)
        with pytest.raises(CheckpointException):
            save(url, small(2), storage_options=s3.options)
    assert names(url, s3.options) == before and visible(url, s3.options) == 1


def test_several_ranks(s3, tmp_path):
    url = f"{s3.url}/run/step"
    store = json.dumps([url, {key: one for key, one in s3.options.items() if key != "retry_config"}])
    done = subprocess.run(
        [sys.executable, "-m", "tests.save_store_worker", "2", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"STORE": store},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "error" not in told["case_sharded"] and told["case_worse"].get("result") == "[1]", told
    found = wb.open(url, cache=False, storage_options=s3.options)
    truth = torch.load(tmp_path / "case_sharded" / "truth.pt")
    assert all(raw(found[key].torch()) == raw(one) for key, one in truth.items())
    assert wb.verify(found, deep=True).exit_code == 0 and len(names(url, s3.options)) == 4
    assert {row["rank"] for row in manifest.load(found.place).save["phases"]} == {0, 1}


def test_installed_for_urls(memory):
    try:
        wb.dcp.install()
        dcp.save(small(1), checkpoint_id="memory://b/installed")
    finally:
        wb.dcp.uninstall()
    assert visible("memory://b/installed") == 1
    again = small(2)
    dcp.load(again, checkpoint_id="memory://b/installed")  # by torch's own reader
    assert again["step"] == 1 and raw(again["model"]["0.weight"]) == raw(small(1)["model"]["0.weight"])


def test_a_process_that_ends_after_a_failed_save_removes_its_objects(s3):
    code = """
import sys, json, torch, torch.distributed.checkpoint as dcp, workbench as wb
from workbench.dcp import writer
def fail(*_): raise ZeroDivisionError
writer.manifest_of = fail
dcp.save({"w": torch.ones(9)}, storage_writer=wb.dcp.Writer(sys.argv[1], storage_options=json.loads(sys.argv[2])))
"""
    options = {key: one for key, one in s3.options.items() if key != "retry_config"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, f"{s3.url}/a", json.dumps(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "ZeroDivisionError" in done.stderr and done.returncode == 1, done.stderr
    assert [path for path in s3.puts() if ".distcp" in path] and not names(f"{s3.url}/a", s3.options)


def test_jobs_that_save_into_one_folder(memory):
    url = "memory://b/run"
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda step: [save(url, small(step)) for _ in range(4)], (1, 2, 3)))
    assert visible(url) in (1, 2, 3) and len(names(url)) == 3


def test_what_a_manifest_of_another_kind_becomes(memory):
    save("memory://b/a", small(1))
    ckpt = wb.open("memory://b/a")
    manifest.write(ckpt, f"memory://b/a/{INSIDE}")
    save("memory://b/a", small(2))
    assert INSIDE not in names("memory://b/a") and visible("memory://b/a") == 2


def test_ranks_and_options(memory, monkeypatch):
    state = small(1)
    dcp.save(state, storage_writer=wb.dcp.Writer("memory://b/alone"), planner=wb.dcp.Planner(), use_collectives=False)
    assert "__0.metadata" in names("memory://b/alone")
    assert raw(wb.open("memory://b/alone")["model.0.weight"].torch()) == raw(state["model"]["0.weight"])
    with pytest.raises(CheckpointException, match="exists"):
        save("memory://b/alone", state, overwrite=False) or save("memory://b/alone", state, overwrite=False)
    dcp.save(state, storage_writer=wb.dcp.Writer("elsewhere"), checkpoint_id="memory://b/given")
    assert visible("memory://b/given") == 1 and not os.path.exists("elsewhere")


def test_no_secret_is_shown_or_stored(s3, caplog):
    url = f"s3://AKUSER:{SECRET}@bucket/out"
    texts = []
    made = wb.dcp.Writer(url, storage_options=s3.options)
    dcp.save(small(1), storage_writer=made)
    texts += [str(made.checkpoint_id), repr(made.storage_meta())]
    to = Destination(f"{s3.url}/out", s3.options)
    texts += [(to.read(f"out/{name}", stat) or b"").decode("latin-1") for name, stat in to.files("out").items()]
    with pytest.raises(CheckpointException) as caught:
        save(url, small(1), storage_options=s3.options, overwrite=False)
    texts += [str(caught.value), caplog.text]
    assert not [text for text in texts if SECRET in text]
    again = pickle.loads(pickle.dumps(made))  # as `AsyncCheckpointerType.PROCESS` does
    dcp.save(small(2), storage_writer=again)
    assert visible(f"{s3.url}/out", s3.options) == 2
