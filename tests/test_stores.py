"""Checkpoints in stores that are written to: S3 as moto emulates it, and fsspec's memory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests import emulators
from tests.emulators import Emulated
from tests.properties import SLOW
from tests.test_remote import SAMPLES, same_bits
from workbench.app import cell
from workbench.app.jail import jail_of
from workbench.app.page import Workbench
from workbench.app.registry import Registry
from workbench.app.serve import start
from workbench.app.state import WorkbenchState
from workbench.app.tabs.run import siblings
from workbench.cli import main as cli
from workbench.core.place import UNFINISHED
from workbench.core.remote import destination, objects
from workbench.core.remote.destination import Destination
from workbench.core.remote.url import keep_options, parse, with_options
from workbench.errors import (
    IncompleteError,
    MissingExtraError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    UsageError,
    WorkbenchError,
    WriteError,
)
from workbench.export.atomic import owners, store
from workbench.export.atomic.signals import Signals
from workbench.export.moving import sending

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
SECRET = "s3cr3t-of-the-test"


class S3:
    """A server on loopback: ``url`` of a bucket, ``options`` to reach it, ``log`` of its requests."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.url = "s3://bucket"
        self.options: dict[str, Any] = {
            "endpoint": self.endpoint,
            "access_key_id": "AKTEST",
            "secret_access_key": SECRET,
            "region": "us-east-1",
            "retry_config": {"max_retries": 1},
        }
        self.log: list[tuple[str, str, dict[str, str]]] = []

    def call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.endpoint}{path}", data, method=method)
        with urllib.request.urlopen(request) as answer:
            found: bytes = answer.read()
            return found

    def puts(self) -> list[str]:
        """Keys in the order in which their objects became visible."""
        return [path for method, path, headers in self.log if method == "DONE"]

    def clear(self) -> None:
        from moto.s3.models import s3_backends

        for account in s3_backends.values():
            for backend in account.values():
                if "bucket" in backend.buckets:
                    backend.buckets["bucket"].keys.clear()
                    backend.buckets["bucket"].multiparts.clear()
        self.log.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.server import ThreadedMotoServer

    made: list[S3] = []

    def logged(app: Any) -> Any:
        def call(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            query = environ.get("QUERY_STRING", "")
            given = {key: value for key, value in environ.items() if key.startswith("HTTP_")}

            def started(status: str, headers: Any, info: Any = None) -> Any:
                whole = (method == "PUT" and "partNumber" not in query) or (method == "POST" and "uploadId" in query)
                if made and status.startswith("200") and whole:
                    made[0].log.append(("DONE", path, given))
                return start(status, headers, info)

            if made:
                made[0].log.append((method, f"{path}?{query}" if query else path, given))
            return app(environ, started)

        return call

    real = DomainDispatcherApplication.__call__

    def dispatched(self: Any, environ: Any, start: Any) -> Any:
        return logged(lambda e, s: real(self, e, s))(environ, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DomainDispatcherApplication, "__call__", dispatched)
        running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
        try:
            _, port = running.get_host_and_port()
            one = S3(port)
            one.call("PUT", "/bucket")
            made.append(one)
            yield one
        finally:
            running.stop()
    assert create_backend_app is not None


@pytest.fixture
def s3(server: S3) -> S3:
    server.clear()
    return server


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def upload(s3: S3, folder: Path, key: str) -> None:
    import obstore
    from obstore.store import from_url

    bucket: Any = from_url(
        s3.url, client_options={"allow_http": True}, **{k: v for k, v in s3.options.items() if k != "retry_config"}
    )
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(bucket, f"{key}/{path.relative_to(folder)}", path.read_bytes())


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_session_of_the_dashboard_opens_what_is_below_a_url(s3, monkeypatch):
    """Its jobs run in other threads, with the options that the server was started with."""
    upload(s3, ROOT / "titan_run", "runs/titan")
    upload(s3, ROOT / "hf_llama_bf16_sharded", "private")
    with (
        pytest.raises(OpenError, match="'s3://bucket/none' does not exist"),
        with_options(s3.options, "s3://bucket/none"),
    ):
        start("s3://bucket/none")
    with with_options(s3.options, "s3://bucket/runs"):
        server = start("s3://bucket/runs")
    try:
        _open_a_session(monkeypatch, s3)
    finally:
        server.stop()
        keep_options({})


def _open_a_session(monkeypatch, s3):
    state = WorkbenchState(jail_of("s3://bucket/runs"), Registry())
    workbench = Workbench(state)
    assert workbench.picker.job.wait(30) and workbench.picker._paths == ["titan/step-2", "titan/step-4"]
    state.show("titan/step-4", tab="export")
    assert state.wait(30) and state.status == "open", state.error
    assert len(state.ckpt) == len(wb.open(ROOT / "titan_run" / "step-4")) and state.ckpt.path.startswith("s3://")
    words = workbench.made["export"]._choice().command(state.outlet)
    assert words.startswith("workbench export s3://bucket/runs/titan/step-4 ") and not state.outlet.open
    assert [one.path for one in siblings(state.jail, "titan/step-4")] == ["titan/step-2", "titan/step-4"]
    assert state.lease.changed() == ""
    upload(s3, ROOT / "titan_run" / "step-2", "runs/titan/step-4")
    assert "was rewritten after it was opened" in state.lease.changed()
    monkeypatch.chdir(ROOT / "titan_run")  # steps of the same names, but of another run
    monkeypatch.setattr(cell, "_on_this_loop", lambda: None)  # a browser test before this one has left a loop running
    run = state.ckpt.view().made["overview"].run
    assert run.work.job.wait(30) and run.work.job.result == []
    state.show("titan/none")
    assert state.wait(30) and state.status == "failed" and "s3://" not in workbench._words.object
    workbench.close()


@pytest.fixture(scope="module")
def emulated(request, tmp_path_factory):
    """A store by the name of its emulator, and the folder that WebHDFS serves."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "s3":
        s3 = request.getfixturevalue("server")
        yield Emulated(s3.url, s3.options), folder
    elif request.param == "memory":
        yield Emulated("memory://bucket", {}), folder
        fsspec.filesystem("memory").store.clear()
    else:
        with ExitStack() as stack:
            try:
                found = stack.enter_context(getattr(emulators, request.param)(folder))
            except emulators.Missing as error:
                pytest.skip(f"needs: {error}")
            yield found, folder


STORES = ["s3", "azure", "google", "webhdfs", "memory"]
FIRST = {
    "s3": "paddle_save",
    "azure": "hf_llama_bf16_sharded",
    "google": "dcp_single_odd",
    "webhdfs": "dcp_fsdp2",
    "memory": "hf_llama_bf16_sharded",
}


@pytest.mark.parametrize(
    ("emulated", "sample"),
    [
        pytest.param(name, sample, marks=[] if FIRST.get(name) == sample else pytest.mark.slow)
        for name in STORES
        for sample in SAMPLES
    ],
    indirect=["emulated"],
)
def test_a_sample_in_a_store_is_the_same_as_on_disk(emulated, sample, tmp_path):
    (store, options), folder = emulated
    url, path = f"{store}/runs/{sample}", ROOT / sample
    keep(store, options, path, f"runs/{sample}", folder)
    given = options or None
    near, far = wb.open(path, cache=False), wb.open(url, cache=False, storage_options=given)
    assert list(near) == list(far) and near.format == far.format and near.step == far.step
    assert {key: repr(far.objects[key]) for key in far.objects} == {
        key: repr(near.objects[key]) for key in near.objects
    }
    state = far.state_dict()
    for key in near:
        assert same_bits(state[key], near[key].torch()), key
        if near[key].shape:
            assert same_bits(far[key][-1:].contiguous(), near[key][-1:].contiguous()), key
    report = wb.diff(url, path, storage_options=given)
    assert report.summary["changed"] == report.summary["unread"] == 0
    rules = [
        [(one.rule, one.where, one.severity) for one in found]
        for found in (wb.verify(url, True, storage_options=given), wb.verify(path, True))
    ]
    assert rules[0] == rules[1]
    wb.export(far, tmp_path / "out", role="all")
    wb.export(near, tmp_path / "same", role="all")
    for one in sorted((tmp_path / "same").rglob("*.safetensors")):
        assert (tmp_path / "out" / one.relative_to(tmp_path / "same")).read_bytes() == one.read_bytes()
    to = f"{store}/out/{sample}"
    if store.startswith(("s3:", "az:", "memory:")):
        wb.export(near, to, role="all", verify=True, storage_options=given)
        assert wb.diff(to, tmp_path / "same", storage_options=given).summary["equal"] == len(near)
    elif store.startswith("webhdfs:"):
        with pytest.raises(WorkbenchError, match="webhdfs"):
            wb.export(near, to, storage_options=given)


def keep(store: str, options: Any, path: Path, key: str, folder: Path) -> None:
    """Put the files of a folder into a store."""
    files = [path] if path.is_file() else [one for one in sorted(path.rglob("*")) if one.is_file()]
    if store.startswith("webhdfs:"):
        for one in files:
            (folder / key / one.relative_to(path)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(one, folder / key / one.relative_to(path))
        return
    if store.startswith("gs:"):  # the emulator knows obstore's reads, not its writes
        for one in files:
            where = f"{options['base_url']}/upload/storage/v1/b/bucket/o?uploadType=media&name="
            name = quote(f"{key}/{one.relative_to(path)}", safe="")
            with urllib.request.urlopen(urllib.request.Request(where + name, one.read_bytes(), method="POST")):
                pass
        return
    to = Destination(f"{store}/x", options)
    for one in files:
        to.put(f"{key}/{one.relative_to(path)}" if path.is_dir() else key, one.read_bytes())


def test_what_is_not_there_or_not_allowed_is_one_clear_error(s3, monkeypatch):
    with pytest.raises(NotACheckpointError, match="does not exist"):
        wb.open(f"{s3.url}/nothing", storage_options=s3.options)
    with pytest.raises(NotACheckpointError, match="does not exist"):
        wb.open("s3://nobucket/x", storage_options=s3.options)
    ckpt = wb.open(ROOT / "hf_peft_lora", cache=False)
    with pytest.raises(WriteError, match=r"nobucket.*does not exist|no such bucket"):
        wb.export(ckpt, "s3://nobucket/out", storage_options=s3.options)
    for status, words in ((403, "no permission to write"), (503, "answered 503 2 times")):
        with refusing(status, reads=False) as port, pytest.raises(WriteError, match=words) as caught:
            given = s3.options | {"endpoint": f"http://127.0.0.1:{port}"}
            wb.export(ckpt, "s3://bucket/out", storage_options=given)
        assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    with refusing(403) as port, pytest.raises(WriteError, match="cannot be written: no permission to read"):
        given = s3.options | {"endpoint": f"http://127.0.0.1:{port}"}
        wb.export(ckpt, "s3://bucket/out", dry_run=True, storage_options=given)
    with refusing(403) as port, pytest.raises(MissingFileError, match="no permission to read"):
        wb.open("s3://bucket/out", storage_options=s3.options | {"endpoint": f"http://127.0.0.1:{port}"})


def test_an_upload_that_fails_says_how_often_it_was_tried(s3, monkeypatch):
    monkeypatch.setattr(objects, "RETRIES_SENT", 2)
    with refusing(503, reads=False) as port:
        options = {name: value for name, value in s3.options.items() if name != "retry_config"}
        store = objects.connect(parse("s3://bucket"), options | {"endpoint": f"http://127.0.0.1:{port}"})
        with pytest.raises(WriteError, match="answered 503 3 times"):  # not once more for each pause of a read
            store.send("out", 5, [b"bytes"])


class refusing:
    """A server that answers every write with a status, and lists nothing, or answers every request with it."""

    def __init__(self, status: int, *, reads: bool = True) -> None:
        self.status, self.reads = status, reads

    def __enter__(self) -> int:
        import threading
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        status, reads = self.status, self.reads
        nothing = b"<ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount></ListBucketResult>"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                listed = self.command == "GET" and not reads
                self.send_response(200 if listed else status)
                self.send_header("Content-Length", str(len(nothing) if listed else 0))
                self.end_headers()
                if listed:
                    self.wfile.write(nothing)

            do_PUT = do_HEAD = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self.server.server_port

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_webhdfs_names_what_is_missing_and_shows_no_token(tmp_path):
    (tmp_path / "a run").mkdir()
    save_file({"w": torch.arange(6.0)}, tmp_path / "a run" / "50%? #1 ü.safetensors")
    with emulators.webhdfs(tmp_path) as (store, options):
        found = wb.open(f"{store}/a run", storage_options=options)
        assert found["w"][1:3].tolist() == [1.0, 2.0]
        with pytest.raises(NotACheckpointError, match="does not exist"):
            wb.open(f"{store}/none", storage_options=options)
        (tmp_path / "a run" / "50%? #1 ü.safetensors").unlink()
        with pytest.raises(MissingFileError, match="does not exist; restore it"):
            found["w"].torch()
    with pytest.raises(OpenError) as caught:
        wb.open(f"{store}/a run", storage_options={"token": SECRET})
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value) and store in str(caught.value)


def test_hdfs_without_its_libraries_says_what_to_install(monkeypatch):
    def lacking(*_: Any, **__: Any) -> None:
        raise OSError("Unable to load libjvm: /usr/lib/libjvm.so: cannot open shared object file")

    monkeypatch.setattr(fsspec, "filesystem", lacking)
    with pytest.raises(MissingExtraError, match=r"needs a Java runtime, .*libjvm.*webhdfs://"):
        wb.open("hdfs://namenode:8020/run")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="pyarrow"):
        wb.open("hdfs://namenode:8020/run")


# ---- writing ---------------------------------------------------------------------------------------------------------

FORMATS = [
    ("safetensors", {}, "model.safetensors", True),
    ("safetensors", {"max_shard_size": 200_000}, "model.safetensors.index.json", False),
    ("safetensors", {"mesh": "tp=2"}, "model-rank-00001-of-00002.safetensors", False),
    ("dcp", {"mesh": "dp=2"}, ".metadata", True),
    ("dcp", {"role": "all"}, ".metadata", False),
    ("bytecheckpoint", {}, "model/.metadata", False),
    ("bytecheckpoint", {"role": "all"}, "optimizer/.metadata", True),
    ("torch_dist", {}, "metadata.json", False),
    ("torch_dist", {}, "metadata.json", True),
]
FEW = (0, 1, 3)  #: the others are slow tests


@pytest.mark.parametrize(
    ("format", "options", "last", "verify"),
    [pytest.param(*one, marks=[] if at in FEW else pytest.mark.slow) for at, one in enumerate(FORMATS)],
)
def test_an_export_to_s3_is_the_one_on_disk(s3, tmp_path, format, options, last, verify):
    source = wb.open(ROOT / "dcp_fsdp2", cache=False)
    url = f"{s3.url}/run/out"
    report = wb.export(source, url, format, verify=verify, storage_options=s3.options, **options)
    assert report.identical and report.path == url and report.verified == verify
    wb.export(source, tmp_path / "out", format, **options)
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(Destination(url, s3.options).files("run/out")) == names
    assert not Destination(url, s3.options).files("run/.out.tmp-export")
    sent = [path.removeprefix("/bucket/run/") for path in s3.puts()]
    assert [path for path in sent if path.startswith("out/")][-1] == f"out/{last}", sent
    assert sent.index(f"out/{UNFINISHED}") == min(at for at, path in enumerate(sent) if path.startswith("out/"))
    again, local = wb.open(url, cache=False, storage_options=s3.options), wb.open(tmp_path / "out", cache=False)
    assert list(again) == list(local) and repr(list(again.objects.items())) == repr(list(local.objects.items()))
    state = again.state_dict()
    for key in local:
        assert same_bits(state[key], local[key].torch()), key
    assert wb.verify(again, True).exit_code == 0  # with the manifest


def test_one_file_is_one_object(s3, tmp_path):
    source = wb.open(ROOT / "dcp_fsdp2", cache=False)
    for name, format in (("out.safetensors", "safetensors"), ("out.pt", "torch")):
        for verify in (False, True):
            url = f"{s3.url}/run/{verify}-{name}"
            wb.export(source, url, format, verify=verify, storage_options=s3.options)
            again = wb.open(url, cache=False, storage_options=s3.options)
            assert wb.diff(again, source.model).summary["equal"] == len(source.model)
            with pytest.raises(WriteError, match="exists; nothing was changed"):
                wb.export(source, url, format, storage_options=s3.options)
            wb.export(source, url, format, overwrite=True, role="all", storage_options=s3.options)
            assert len(wb.open(url, cache=False, storage_options=s3.options)) == len(source)
    assert not [key for key in Destination(f"{s3.url}/run", s3.options).files("run") if "tmp" in key]


def test_large_files_go_in_parts_that_the_store_checks(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(destination, "SENT_AT_ONCE", 5 << 20)
    monkeypatch.setattr(objects, "SENT_AT_ONCE", 5 << 20)
    torch.manual_seed(1)
    save_file({"w": torch.randn(4_000_000), "b": torch.randn(10)}, tmp_path / "model.safetensors")
    source = wb.open(tmp_path, cache=False)
    seen: list[float] = []
    report = wb.export(source, f"{s3.url}/big", verify=True, storage_options=s3.options, progress=seen.append)
    assert report.verified and seen == sorted(seen) and seen[-1] == 1.0
    parts = [(path, headers) for method, path, headers in s3.log if method == "PUT" and "partNumber" in path]
    assert len(parts) == 4 and all("HTTP_X_AMZ_CHECKSUM_SHA256" in headers for _, headers in parts)
    whole = [
        headers
        for method, path, headers in s3.log
        if method == "PUT" and path.endswith("manifest.json") and "HTTP_X_AMZ_COPY_SOURCE" not in headers
    ]
    assert whole and all("HTTP_X_AMZ_CHECKSUM_SHA256" in headers for headers in whole)
    assert wb.diff(f"{s3.url}/big", tmp_path, storage_options=s3.options).summary["equal"] == 2


def test_objects_that_s3_does_not_copy_are_copied_through_this_machine(s3, small, tmp_path, monkeypatch):
    wb.export(small[0], f"{s3.url}/out", storage_options=s3.options)
    monkeypatch.setattr(objects, "COPIED_AT_ONCE", 5 << 20)
    monkeypatch.setattr(objects, "SENT_AT_ONCE", 5 << 20)
    (tmp_path / "large").mkdir()
    save_file({"w": torch.randn(3_000_000)}, tmp_path / "large" / "model.safetensors")
    large = wb.open(tmp_path / "large")
    wb.export(large, f"{s3.url}/out", overwrite=True, storage_options=s3.options)
    copied = {path for _, path, given in s3.log if "HTTP_X_AMZ_COPY_SOURCE" in given}
    assert copied == {"/bucket/out/.workbench-manifest.json"}
    assert equal(f"{s3.url}/out", large, s3.options)


def test_an_upload_outlasts_a_store_that_asks_to_slow_down(monkeypatch):
    brief = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(objects, "BACKOFF", brief)
    statuses = [503] * 12 + [200]

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(statuses.pop(0))
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as slow:
        threading.Thread(target=slow.serve_forever, args=(0.02,), daemon=True).start()
        options = {"endpoint": f"http://127.0.0.1:{slow.server_port}", "access_key_id": "a", "secret_access_key": "b"}
        made: Any = objects.connect(parse("s3://bucket/x"), options | {"region": "us-east-1"})
        made.send("x", 3, [b"abc"])
        slow.shutdown()
    assert not statuses


def test_a_checksum_may_be_another_or_none(s3, small):
    for name, header in (("crc64nvme", "HTTP_X_AMZ_CHECKSUM_CRC64NVME"), (None, None)):
        s3.clear()
        given = s3.options | {"checksum_algorithm": name}
        wb.export(small[0], f"{s3.url}/out", storage_options=given)
        sent = [headers for method, path, headers in s3.log if method == "PUT" and "/out/" in path]
        assert sent and all(
            [key for key in headers if key.startswith("HTTP_X_AMZ_CHECKSUM")] == [header] * (header is not None)
            for headers in sent
        )


def test_what_is_on_disk_meanwhile_is_bounded(memory, tmp_path, monkeypatch):
    """Two groups of files, and nothing when it is done."""
    monkeypatch.setattr(sending, "GROUP", 250_000)
    monkeypatch.setattr(sending, "spool_folder", lambda: str(tmp_path))
    most = [0]

    def progress(_: float) -> None:
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        most[0] = max(most[0], sum(sizes))

    source = wb.open(ROOT / "dcp_fsdp2", cache=False)
    report = wb.export(source, "memory://b/out", max_shard_size=100_000, role="all", progress=progress, objects=False)
    assert report.nbytes > 2_000_000 and 100_000 < most[0] <= 700_000
    assert not list(tmp_path.iterdir())


def test_files_of_a_killed_run_are_removed_from_the_disk(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "spool_folder", lambda: str(tmp_path))
    host, boot, _, start, end = owners.token().split(".")
    dead = tmp_path / f".workbench-export.tmp-{host}.{boot}.fffffff.{start}.{end}"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"x")
    wb.export(wb.open(ROOT / "hf_peft_lora"), "memory://b/out")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_sends_nothing_and_refuses_what_exists(memory):
    ckpt = wb.open(ROOT / "hf_peft_lora")
    assert wb.export(ckpt, "memory://b/out", dry_run=True).dry_run and not memory.store
    wb.export(ckpt, "memory://b/out")
    with pytest.raises(WriteError, match="exists"):
        wb.export(ckpt, "memory://b/out", dry_run=True)


def test_a_spool_without_room_is_refused_before_anything_is_sent(memory, monkeypatch):
    from workbench.export.atomic import transaction

    monkeypatch.setattr(transaction, "SPARE", 1 << 60)
    with pytest.raises(WriteError, match="not enough space"):
        wb.export(wb.open(ROOT / "hf_peft_lora"), "memory://b/out")
    assert not memory.store


def test_what_exists_is_replaced_only_when_that_is_asked_for(s3):
    old, new = wb.open(ROOT / "hf_peft_lora", cache=False), wb.open(ROOT / "dcp_fsdp2", cache=False)
    url = f"{s3.url}/out"
    wb.export(old, url, storage_options=s3.options)
    before = Destination(url, s3.options).files("out")
    for how in ({}, {"resume": True}):
        with pytest.raises(WriteError, match="exists; nothing was changed"):
            wb.export(new, url, storage_options=s3.options, **how)
    assert Destination(url, s3.options).files("out") == before
    s3.log.clear()
    wb.export(new, url, overwrite=True, storage_options=s3.options)
    assert wb.diff(wb.open(url, cache=False, storage_options=s3.options), new.model).summary["equal"] == 39
    # every new object was in the store before the first old one was removed
    first = next(at for at, (method, path, _) in enumerate(s3.log) if method == "POST" and "delete" in path)
    sent = [
        at
        for at, (method, path, given) in enumerate(s3.log)
        if method == "DONE" and "/out/model.safetensors" in path and "HTTP_X_AMZ_COPY_SOURCE" not in given
    ]
    assert sent and max(sent) < first
    with pytest.raises(WriteError, match="not a checkpoint, so it is not overwritten"):
        Destination(f"{s3.url}/other/x", s3.options).put("other/notes.txt", b"mine")
        wb.export(new, f"{s3.url}/other", overwrite=True, storage_options=s3.options)
    with pytest.raises(WriteError, match="a single object"):
        wb.export(new, f"{s3.url}/other/notes.txt", storage_options=s3.options)
    with pytest.raises(UsageError, match="is, or contains, the checkpoint"):
        wb.export(wb.open(url, storage_options=s3.options), url, overwrite=True, storage_options=s3.options)


# ---- interruptions ---------------------------------------------------------------------------------------------------


class Cut(OpenError):
    """The store cannot be reached any more."""


CALLS = ("head", "get", "walk", "put", "send", "copy", "remove", "version")


class Line:
    """The connection of this process to a store: it breaks at the n-th call, before or after its effect.

    All later calls fail as well, so that nothing is tidied up: the store is as after a kill.
    """

    def __init__(self, patch: pytest.MonkeyPatch, kind: type) -> None:
        self.count, self.at, self.after = 0, -1, False
        for name in CALLS:
            patch.setattr(kind, name, self._through(getattr(kind, name), name))

    def _through(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            number, self.count = self.count, self.count + 1
            broken = 0 <= self.at <= number
            if broken and not (self.after and number == self.at):
                raise Cut("cut")
            found = list(real(*given)) if name == "walk" else real(*given)
            if broken:
                raise Cut("cut")
            return iter(found) if name == "walk" else found

        return call

    def cut(self, at: int, after: bool) -> None:
        self.count, self.at, self.after = 0, at, after

    def mend(self) -> None:
        self.count, self.at = 0, -1


@pytest.fixture
def small(tmp_path):
    """Two checkpoints of four tensors, which are exported as four files each."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        (tmp_path / str(seed)).mkdir()
        save_file(
            {f"{n}.weight": torch.randn(20, 30 + n) for n in range(4)}, tmp_path / str(seed) / "model.safetensors"
        )
        (tmp_path / str(seed) / "config.json").write_text("{}")
        made.append(wb.open(tmp_path / str(seed), cache=False))
    return made


def equal(url: str, other: wb.Checkpoint, options: Any) -> bool:
    """Whether what opens is that checkpoint, bit for bit."""
    with wb.open(url, cache=False, storage_options=options) as found:
        return list(found) == list(other) and all(same_bits(found[k].torch(), other[k].torch()) for k in other)


def everything(url: str, options: Any) -> set[str]:
    to = Destination(f"{url}/x", options)
    return set(to.files(to.beside("").rstrip("/")))


def sweep(base: str, kind: type, small: Any, options: Any, *, step: int = 1, first: int = 0, **how: Any) -> int:
    """Interrupt an export at every call of it; return how many there are."""
    old, new = small
    url, over = f"{base}/out", how.get("overwrite", False)
    kept: dict[str, bytes] = {}  # objects of the old one, which is exported once
    with pytest.MonkeyPatch.context() as patch:
        line = Line(patch, kind)

        def run(ckpt: wb.Checkpoint, **more: Any) -> Any:
            return wb.export(ckpt, url, max_shard_size=3000, threads=1, storage_options=options, **(how | more))

        def fresh() -> None:
            line.mend()
            to = Destination(f"{base}/x", options)
            to.remove([to.beside(name) for name in everything(base, options)])
            for name, data in kept.items():
                to.put(to.beside(name), data)
            if over and not kept:
                run(old, overwrite=False)
                stats = to.files(to.beside("").rstrip("/"))
                kept.update({name: to.read(to.beside(name), stat) or b"" for name, stat in stats.items()})
            line.count = 0

        fresh()
        run(new)
        whole, calls = everything(base, options), line.count
        assert calls > 20
        resumed = 0
        for at in range(first, calls, step):
            for after in (False, True):
                fresh()
                line.cut(at, after)
                try:
                    run(new, resume=True)
                    ended = True  # only tidying up was left
                except WorkbenchError:
                    ended = False
                line.mend()
                state = (at, after, sorted(everything(base, options)))
                try:
                    found = equal(url, new, options)
                    assert found or (over and equal(url, old, options)), state
                except (IncompleteError, NotACheckpointError):
                    found = False
                    assert not ended, state
                # the next run resumes, or finds that the export is complete
                try:
                    report = run(new, resume=True)
                    resumed += any("resumed" in note for note in report.notes)
                except WriteError as error:
                    assert found and not over and "exists; nothing was changed" in str(error), (state, error)
                assert equal(url, new, options), state
                assert everything(base, options) == whole, state
                # one that does not resume removes what is left, also if that is cut off in turn
                fresh()
                line.cut(at, after)
                with suppress(WorkbenchError):
                    run(new, resume=True)
                if at % 2:
                    line.cut(at % 11, after)
                    with suppress(WorkbenchError):
                        cleaned(Destination(url, options))
                line.mend()
                cleaned(Destination(url, options))
                left = everything(base, options)
                assert left == whole or (not over and not left), (state, left)
                assert not left or equal_or_not(url, new, options) or (over and equal(url, old, options)), state
        assert resumed > calls / step / 4
    return calls


def equal_or_not(url: str, ckpt: wb.Checkpoint, options: Any) -> bool:
    try:
        return equal(url, ckpt, options)
    except WorkbenchError:
        return False


@pytest.mark.parametrize(
    "how",
    [pytest.param({}, marks=pytest.mark.slow), {"verify": True}, {"overwrite": True}],
    ids=["new", "verify", "overwrite"],
)
def test_an_export_may_be_cut_off_at_every_call(memory, small, how):
    """Nothing incomplete opens; the next run resumes; nothing is left behind."""
    sweep("memory://b/run", objects._Memory, small, None, step=1 if SLOW else 11, first=0, **how)


@pytest.mark.parametrize(
    "how", [pytest.param({}, marks=pytest.mark.slow), {"overwrite": True}], ids=["new", "overwrite"]
)
def test_an_export_to_s3_may_be_cut_off(s3, small, how):
    sweep(f"{s3.url}/run", objects._Cloud, small, s3.options, step=1 if SLOW else 47, first=5, **how)


def test_what_was_sent_is_not_sent_again(s3, small):
    new, url = small[1], f"{s3.url}/out"
    with pytest.MonkeyPatch.context() as patch:
        line = Line(patch, objects._Cloud)
        wb.export(new, url, max_shard_size=3000, storage_options=s3.options)
        calls = line.count
        s3.clear()
        line.cut(calls * 2 // 3, False)
        with pytest.raises(WorkbenchError):
            wb.export(new, url, max_shard_size=3000, resume=True, storage_options=s3.options)
        line.mend()
    sent = {path for path in s3.puts() if path.endswith(".safetensors")}
    assert len(sent) >= 2
    s3.log.clear()
    report = wb.export(new, url, max_shard_size=3000, resume=True, storage_options=s3.options)
    assert not sent & set(s3.puts())
    (note,) = report.notes
    assert "resumed an unfinished export" in note and "kept" in note and report.identical
    assert wb.verify(url, True, storage_options=s3.options).exit_code == 0


def test_an_object_that_changed_meanwhile_is_sent_again(s3, small):
    new, url = small[1], f"{s3.url}/out"
    with pytest.MonkeyPatch.context() as patch:
        line = Line(patch, objects._Cloud)
        line.cut(24, False)
        with pytest.raises(WorkbenchError):
            wb.export(new, url, max_shard_size=3000, resume=True, storage_options=s3.options)
    to = Destination(url, s3.options)
    name = next(name for name in to.files("out") if name.endswith(".safetensors"))
    to.put(f"out/{name}", bytes(to.files("out")[name].size))
    wb.export(new, url, max_shard_size=3000, resume=True, storage_options=s3.options)
    assert equal(url, new, s3.options)


def test_a_failure_without_resume_leaves_nothing(memory, small):
    def progress(share: float) -> None:
        if share > 0.7:
            raise RuntimeError("stop")

    for how in ({}, {"verify": True}):
        with pytest.raises(RuntimeError, match="stop") as caught:
            wb.export(small[1], "memory://b/out", max_shard_size=3000, progress=progress, **how)
        assert not memory.store and not hasattr(caught.value, "__notes__")
    with pytest.raises(RuntimeError) as caught:
        wb.export(small[1], "memory://b/out", max_shard_size=3000, progress=progress, resume=True)
    assert "with resume to continue from there" in caught.value.__notes__[0]
    with pytest.raises(IncompleteError, match="under way or was interrupted"):
        wb.open("memory://b/out")
    assert wb.discover("memory://b")["complete"].tolist() == [False]
    assert "commit.incomplete" in {one.rule for one in wb.verify("memory://b/out")}
    gone = cleaned(Destination("memory://b/out"))
    assert not memory.store and any(key.endswith("model-00001-of-00004.safetensors") for key in gone)


def test_an_export_that_has_just_begun_is_unfinished(memory, small, capsys):
    memory.pipe_file("/b/run/step-7/.workbench-unfinished", b"{}")
    cli(["ls", "memory://b/run/step-7"])
    assert "is under way or was interrupted" in capsys.readouterr().out
    with pytest.raises(IncompleteError, match="run it again with resume"):
        wb.open("memory://b/run/step-7")
    assert {one.rule for one in wb.verify("memory://b/run/step-7")} == {"open.incomplete"}
    assert wb.discover("memory://b/run")["complete"].tolist() == [False]
    wb.export(small[0], "memory://b/run/step-6")
    assert wb.open("memory://b/run", cache=False).path.endswith("step-6")


def test_an_interrupt_does_not_wait_for_an_upload(memory, small, monkeypatch):
    """What was being sent is left behind, with the mark; the next export waits for it, and goes on from there."""
    begun, end, real = threading.Event(), threading.Event(), objects._Memory.send
    sent: list[float] = []

    def send(*given: Any) -> None:
        begun.set()
        end.wait(10)
        real(*given)

    def interrupt() -> None:
        begun.wait(10)
        time.sleep(0.1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(objects._Memory, "send", send)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            wb.export(small[1], "memory://b/out", max_shard_size=3000)
        assert time.monotonic() - sent[0] < 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert "still in the store" in caught.value.__notes__[0]
    with pytest.raises(IncompleteError):
        wb.open("memory://b/out")
    threading.Timer(0.3, end.set).start()
    wb.export(small[0], "memory://b/out", max_shard_size=3000)
    assert equal("memory://b/out", small[0], None) and not [key for key in memory.store if "tmp-export" in key]


def test_a_second_signal_ends_what_is_deferred():
    with Signals() as signals, pytest.raises(KeyboardInterrupt), signals.deferred(limited=True):
        signals._handle(signal.SIGINT, None)
        with suppress(KeyboardInterrupt):
            signals._handle(signal.SIGINT, None)
            pytest.fail("the second one raises")
        signals._handle(signal.SIGINT, None)


def test_what_cannot_be_removed_after_a_failure_is_said(memory, small, monkeypatch):
    def fail(*_: Any) -> None:
        raise WriteError("no")

    monkeypatch.setattr(objects._Memory, "send", fail)
    monkeypatch.setattr(objects._Memory, "remove", fail)
    with pytest.raises(WriteError, match=r"no; what was sent is still in the store, with '.workbench-unf.*resume"):
        wb.export(small[1], "memory://b/out", max_shard_size=3000)


def cleaned(to: Destination) -> list[str]:
    """Keys that the next run into a target removes: the leftovers of dead ones, whose copying it finishes first."""
    one = store.StoreStaging(to, True, [], "", True, False, True)
    owners.ACTIVE.add(one._token)

    def listed() -> set[str]:
        inside = {f"{to.key}/{name}" for name in to.files(to.key)}
        return inside | {f"{one._temp}/{name}" for name in to.files(one._temp)}

    try:
        before = listed()
        one.take()
        one.discard()
        return sorted(before - listed())
    finally:
        owners.ACTIVE.discard(one._token)


def test_one_that_is_under_way_is_left_alone(memory, small, monkeypatch):
    seen: list[str] = []

    def progress(share: float) -> None:
        if share > 0.5 and not seen:
            seen.append("")
            for how in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(WriteError, match=rf"being written by process {os.getpid()} on this machine"):
                    wb.export(small[0], "memory://b/out", **how)

    wb.export(small[1], "memory://b/out", max_shard_size=3000, progress=progress)
    assert seen and equal("memory://b/out", small[1], None)


def test_one_of_another_machine_is_resumed_once_it_is_silent(memory, small, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        line = Line(patch, objects._Memory)
        line.cut(30, False)
        with pytest.raises(WorkbenchError):
            wb.export(small[1], "memory://b/out", max_shard_size=3000, resume=True)
    path = next(path for path in memory.store if path.endswith("/owner"))
    owner = json.loads(memory.cat_file(path))
    owner["owner"] = "00000000.00000000." + owner["owner"].split(".", 2)[2]
    memory.pipe_file(path, json.dumps(owner).encode())
    with pytest.raises(WriteError, match=r"on another machine .* after 30 silent minutes"):
        wb.export(small[1], "memory://b/out", max_shard_size=3000, resume=True)
    now = time.time()
    monkeypatch.setattr(store.time, "time", lambda: now + store.QUIET + 5)
    assert "resumed" in wb.export(small[1], "memory://b/out", max_shard_size=3000, resume=True).notes[0]


def test_one_that_was_taken_for_dead_stops(memory, small):
    def progress(share: float) -> None:
        for path in list(memory.store):
            if share > 0.5 and path.endswith("/owner"):
                memory.pipe_file(path, json.dumps({"owner": "another"}).encode())

    with pytest.raises(WriteError, match="considered this one stopped"):
        wb.export(small[1], "memory://b/out", max_shard_size=3000, progress=progress)
    with pytest.raises(IncompleteError):
        wb.open("memory://b/out")


def test_a_living_one_gives_signs_of_life(memory, small, monkeypatch):
    monkeypatch.setattr(owners, "BEAT", 0.01)
    beats = []
    real = store.StoreStaging.beat
    monkeypatch.setattr(store.StoreStaging, "beat", lambda self: (beats.append(1), real(self)))
    wb.export(small[1], "memory://b/out", max_shard_size=3000, progress=lambda share: time.sleep(0.01))
    assert beats and equal("memory://b/out", small[1], None)


def test_an_owner_that_is_not_ours_is_not_believed(memory, small):
    memory.pipe_file("/b/.out.tmp-export/owner", b"\xff not json")
    with pytest.raises(WriteError, match="being written by"):
        wb.export(small[1], "memory://b/out")
    memory.pipe_file("/b/.out.tmp-export/journal/1", b"0 [")
    memory.pipe_file("/b/other", b"mine")
    memory.rm_file("/b/.out.tmp-export/owner")
    wb.export(small[1], "memory://b/out", resume=True)
    assert not [path for path in memory.store if "tmp" in path] and memory.cat_file("/b/other") == b"mine"


# ---- secrets ---------------------------------------------------------------------------------------------------------


def test_no_secret_is_shown_logged_or_pickled(s3, small, caplog, tmp_path, capfd):
    url = f"s3://AKUSER:{SECRET}@bucket/out"
    texts = []
    report = wb.export(small[0], url, storage_options=s3.options)
    texts += [str(report), json.dumps(report.to_dict())]
    with pytest.raises(WriteError) as caught:
        wb.export(small[0], url, storage_options=s3.options)
    texts.append(str(caught.value))
    with pytest.raises(WorkbenchError) as caught:
        wb.export(small[0], f"https://ann:{SECRET}@host/out?X-Amz-Signature={SECRET}")
    texts.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        wb.export(small[0], url, storage_options={"nosuch": SECRET})
    texts.append(str(caught.value))
    ckpt = wb.open(url, storage_options=s3.options)
    texts += [repr(ckpt), ckpt.path, repr(vars(ckpt.place)), pickle.dumps(ckpt).decode("latin-1")]
    stored = Destination(f"{s3.url}/out", s3.options)
    texts += [
        (data or b"").decode("latin-1")
        for data in stored.read_all({f"out/{name}": stat for name, stat in stored.files("out").items()})
    ]
    texts += [caplog.text, *capfd.readouterr()]
    assert not [text for text in texts if SECRET in text]


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_exports_to_a_store(s3, tmp_path, monkeypatch):
    """With keys of the environment; in a process of its own once, then here, as a process takes a second to start."""
    for name, value in {"ACCESS_KEY_ID": "AKTEST", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    option = ["--storage-option", f"endpoint={s3.endpoint}"]
    lora, out = str(tmp_path / "lora"), f"{s3.url}/out"

    def run(*arguments: str) -> int:
        return cli([*arguments, *option])

    shutil.copytree(ROOT / "hf_peft_lora", lora)
    command = [sys.executable, "-m", "workbench", "export", lora, out, "--verify", "--json", *option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["verified"], done.stderr
    assert run("export", lora, out) == 3
    assert run("verify", out, "--deep") == 0
    assert run("diff", out, lora) in (0, 1)
    assert run("manifest", "write", out, "--output", f"{out}.manifest.json") == 0
    assert run("manifest", "check", out, f"{out}.manifest.json") == 0
    assert run("verify", lora) == 64
