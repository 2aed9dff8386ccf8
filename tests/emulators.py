"""Stores on loopback for az:// and gs://, to write to.

Azurite is not a dependency (``npm install azurite``); it is found on ``PATH``, or ``WORKBENCH_AZURITE`` names its
``azurite-blob``, and without it, its tests are skipped.

No emulator of Google's store takes what obstore sends, the XML interface. That is S3's with other headers, so moto
answers behind a translation; generations, which are GCS's own, are counted here.

Source: https://cloud.google.com/storage/docs/xml-api/reference-headers (``x-goog-if-generation-match``).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any, NamedTuple

import pytest

ACCOUNT = "devstoreaccount1"
#: Azurite's account key, which its documentation publishes.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PATIENCE = 120  #: seconds that an emulator may take to start


class Emulated(NamedTuple):
    """A store: the URL of its only bucket, and the options to reach it."""

    url: str
    options: dict[str, Any]


def azurite_command() -> str | None:
    return os.environ.get("WORKBENCH_AZURITE") or shutil.which("azurite-blob")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    if (program := azurite_command()) is None:
        pytest.skip("Azurite is not installed: npm install azurite")
    port = _free_port()
    folder = tmp_path_factory.mktemp("azurite")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with _running(command, port):
        when, version = formatdate(usegmt=True), "2021-08-06"
        headers = {"x-ms-date": when, "x-ms-version": version}
        named = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = "PUT" + "\n" * 12 + f"{named}/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
        signed = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
        _request("PUT", f"{endpoint}/bucket?restype=container", headers)
        options = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint}
        yield Emulated("az://bucket", options | {"client_options": {"allow_http": True}})


@pytest.fixture(scope="module")
def gcs() -> Iterator[Emulated]:
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
            _request("PUT", f"{base}/bucket", {})
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the block ends."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, f"{command[0]} does not start"
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def _request(method: str, url: str, headers: dict[str, str], data: bytes | None = None) -> None:
    request = urllib.request.Request(url, data, {"Content-Length": str(len(data or b"")), **headers}, method=method)
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read()[:300]!r}") from None
