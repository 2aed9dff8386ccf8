"""A web server on loopback that knows byte ranges, for tests of remote checkpoints: slow, faulty, and it keeps a log.

::

    with RangeServer(folder, latency=0.03) as server:
        wb.open(f"{server.url}/dcp_fsdp2")
        server.log        one Request for each: method, path, range, when it began and ended
"""

from __future__ import annotations

import html
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

__all__ = ["RangeServer", "Request"]


@dataclass
class Request:
    """One request as the server saw it; ``start`` and ``stop`` of its range, ``None`` without one."""

    method: str
    path: str
    start: int | None
    stop: int | None
    began: float
    ended: float = 0.0
    sent: int = 0


#: Looks at a request and returns what to do instead of answering: a status; "reset"; "short" (half of the bytes);
#: "whole" (the range is ignored); "shifted" (the bytes after or before those asked for, and said to be); "page" (an
#: HTML page); "stall" (no answer until the server ends).
#: ``None``: it is answered.
Fault = Callable[[Request], "int | str | None"]


class RangeServer:
    """Serves the files of a folder.

    Args:
        folder: what to serve.
        latency: seconds before each answer.
        bandwidth: bytes per second of each connection; unlimited by default.
        total: bytes per second of all connections together; unlimited by default.
        ranges: whether it knows ``Range``; without, it always sends the whole file.
        lists: whether a folder is a page of links (else 404).
        fault: see :data:`Fault`.
        pages: answers of an API, by path; JSON.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        latency: float = 0.0,
        bandwidth: float = 0.0,
        total: float = 0.0,
        ranges: bool = True,
        lists: bool = True,
        fault: Fault | None = None,
        pages: dict[str, bytes] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.latency, self.bandwidth, self.ranges, self.lists, self.fault = latency, bandwidth, ranges, lists, fault
        self.total, self._line, self._sent_by = total, threading.Lock(), 0.0
        self.pages = pages or {}
        self.log: list[Request] = []
        self.stalls, self._ends = threading.Event(), threading.Event()  # a request stalls; the server ends

    def __enter__(self) -> RangeServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1  # the header and a short body in one packet

            def do_GET(self) -> None:
                outer.answer(self, body=True)

            def do_HEAD(self) -> None:
                outer.answer(self, body=False)

            def finish(self) -> None:
                try:
                    super().finish()
                finally:  # what is left to write to a client that went away is an error, and rfile would stay open
                    self.rfile.close()

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:  # a client that went away
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def rounds(self) -> int:
        """The number of round trips: the longest chain of requests that begin after the previous one ended."""
        ends: list[float] = []
        for one in sorted(self.log, key=lambda request: request.ended):
            if not ends or one.began >= ends[-1]:
                ends.append(one.ended)
        return len(ends)

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path).lstrip("/")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else None
        stop = int(wanted[2]) + 1 if wanted and wanted[2] else None
        request = Request(handler.command, path, start, stop, time.monotonic())
        self.log.append(request)
        time.sleep(self.latency)
        try:
            self._answer(handler, request, body)
        finally:
            request.ended = time.monotonic()

    def _answer(self, handler: BaseHTTPRequestHandler, request: Request, body: bool) -> None:
        fault = self.fault(request) if self.fault is not None else None
        file = self.folder / request.path
        if fault == "stall":
            self.stalls.set()
            self._ends.wait()
        if fault in ("reset", "stall"):
            handler.close_connection = True
            handler.connection.close()
            return
        if isinstance(fault, int):
            self._send(handler, fault, b"", body)
        elif fault == "page":
            self._send(handler, 200, b"<html><body>Please sign in</body></html>", body)
        elif request.path in self.pages:
            self._send(handler, 200, self.pages[request.path], body, "application/json")
        elif file.is_dir():
            if self.lists:
                names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in file.iterdir())
                links = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>' for name in names)
                self._send(handler, 200, f"<html><a href='../'>..</a><ul>{links}</ul></html>".encode(), body)
            else:
                self._send(handler, 404, b"", body)
        elif not file.is_file():
            self._send(handler, 404, b"", body)
        else:
            self._send_file(handler, request, file, body, fault)

    def _send_file(
        self, handler: BaseHTTPRequestHandler, request: Request, file: Path, body: bool, fault: str | None
    ) -> None:
        info = file.stat()
        tag = f'"{info.st_size:x}-{info.st_mtime_ns:x}"'
        if handler.headers.get("If-Match", tag) != tag:
            self._send(handler, 412, b"", body)
            return
        start, stop, status = 0, info.st_size, 200
        if request.start is not None and self.ranges and fault != "whole":
            start, stop, status = request.start, min(request.stop or info.st_size, info.st_size), 206
            if fault == "shifted":
                step = 1 if stop < info.st_size else -1 if start else 0
                start, stop = start + step, stop + step
            if start >= info.st_size:
                self._send(handler, 416, b"", body)
                return
        handler.send_response(status)
        if status == 206:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{info.st_size}")
        handler.send_header("Content-Length", str(stop - start))
        handler.send_header("ETag", tag)
        handler.send_header("Last-Modified", formatdate(info.st_mtime, usegmt=True))
        handler.end_headers()
        if not body:
            return
        end = start + (stop - start) // 2 if fault == "short" else stop
        with file.open("rb") as data:
            data.seek(start)
            while start < end:
                part = data.read(min(1 << 18, end - start))
                handler.wfile.write(part)
                start += len(part)
                request.sent += len(part)
                pause = len(part) / self.bandwidth if self.bandwidth else 0.0
                if self.total:
                    with self._line:  # the line is one part's at a time
                        self._sent_by = max(self._sent_by, time.monotonic()) + len(part) / self.total
                        pause = max(pause, self._sent_by - time.monotonic())
                if pause:
                    time.sleep(pause)
        if fault == "short":
            handler.close_connection = True
            handler.connection.close()

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, data: bytes, body: bool, kind: str = "text/html") -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Last-Modified", formatdate(usegmt=True))
        handler.end_headers()
        if body:
            handler.wfile.write(data)
