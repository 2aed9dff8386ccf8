"""Checks on every request, and headers on every response: known hosts only, and other sites are kept out.

::

    browser ──► Guard ── Host known? Origin ours? ──► Bokeh's application (pages, files, websocket, sign-in)
            ◄── 403 with a reason                    ◄──── response + headers + SameSite cookies

**DNS rebinding.** A site can point its own name at 127.0.0.1. Its pages then have the same origin as this server, and
a check of ``Origin`` against ``Host`` finds nothing (Tornado 6.6 makes exactly that check for websockets). Such a
page cannot change the name itself, which the browser sends as ``Host``: it must be one of the known names.

**Components.** Panel answers ``/components/MODULE/…`` by importing that module, before any sign-in. No page
of ours needs such a file: all such requests are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import urlsplit

from bokeh.server.util import check_allowlist, match_host
from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)

_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing

#: Everything comes from this server. Bokeh and Panel write scripts and styles into the page, compile the templates of
#: table cells (``unsafe-eval``), and fetch components from blobs. ``'self'`` covers the websocket.
POLICY = {
    "default-src": "'self'",
    "script-src": "'self' 'unsafe-inline' 'unsafe-eval' blob:",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "connect-src": "'self' blob:",
    "worker-src": "'self' blob:",
    "object-src": "'none'",
    "base-uri": "'self'",
    "form-action": "'self'",
    "frame-ancestors": "'self'",
}
#: On every response.
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {sources}" for name, sources in POLICY.items()),
    "X-Frame-Options": "SAMEORIGIN",  # for browsers that do not know frame-ancestors
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # an address names checkpoints
}
_log = logging.getLogger(__name__)


class Guard(HTTPServerConnectionDelegate):
    """Sits between Tornado's HTTP server and Bokeh's application.

    Args:
        application: the application; its ``websocket_origins`` are the other origins that may connect to it.
        hosts: names of the server, without a port; ``*`` stands for any label, or for any name. The local address of
        a connection is always accepted.
        prefix: path of the application.
    """

    def __init__(self, application: Any, hosts: Collection[str], prefix: str = "") -> None:
        self._application = application
        self._hosts = frozenset(host.lower() for host in hosts)
        self._components = f"{prefix}/components/"

    def start_request(self, server_conn: object, request_conn: Any) -> HTTPMessageDelegate:
        return _Request(self, server_conn, request_conn)

    def on_close(self, server_conn: object) -> None:
        self._application.on_close(server_conn)

    def refusal(self, start_line: RequestStartLine, headers: HTTPHeaders, local: str) -> str | None:
        """Return why a request is refused; ``None`` if it is not.

        Args:
            local: the local address of the connection.
        """
        host = headers.get("Host", "").lower()
        if host and not self._known(host, local):
            return (
                f"This server is not configured for the name {host!r}. If it is yours, start it with this name, for "
                f"example: --allow-websocket-origin wb.example.org"
            )
        if start_line.method not in _SAFE and not self._from_here(headers, host):
            return f"A page of another site, {headers.get('Origin')!r}, sent this form."
        path = start_line.path.partition("?")[0]
        if "%00" in path or path.startswith(self._components):  # Panel would import the module named there
            return "This server serves no components by module name, and no path with a NUL byte."
        return None

    def pass_on(self, server_conn: object, request_conn: Any, *, secure: bool) -> HTTPMessageDelegate:
        """Pass a request to the application and complete its response on the way back."""
        delegate: HTTPMessageDelegate = self._application.start_request(server_conn, _Response(request_conn, secure))
        return delegate

    def _known(self, host: str, local: str) -> bool:
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = parts[1]
        if name in self._hosts or name.strip("[]") == local:
            return True
        return not name.startswith("[") and any(match_host(name, known) for known in self._hosts if "*" in known)

    def _from_here(self, headers: HTTPHeaders, host: str) -> bool:
        """Return whether a form came from one of our pages, or from no page at all (``curl`` sends no ``Origin``)."""
        if headers.get("Sec-Fetch-Site") in ("same-origin", "none") or "Origin" not in headers:
            return True
        origin = urlsplit(headers["Origin"]).netloc.lower()
        return bool(origin) and (origin == host or check_allowlist(origin, self._application.websocket_origins))


class _Request(HTTPMessageDelegate):
    def __init__(self, guard: Guard, server_conn: object, request_conn: Any) -> None:
        self._guard, self._server, self._connection = guard, server_conn, request_conn
        self._inner: HTTPMessageDelegate | None = None
        self._refusal = ""

    def headers_received(self, start_line: Any, headers: HTTPHeaders) -> Any:
        refusal = self._guard.refusal(start_line, headers, _local(self._connection))
        if refusal is not None:
            _log.warning("%s %s refused: %s", start_line.method, start_line.path[:200], refusal)
            self._refusal = refusal
            return None
        # A TLS-terminating proxy sets this header. A forged one only adds Secure to the forger's own cookies.
        protocol = getattr(getattr(self._connection, "context", None), "protocol", "http")
        secure = "https" in (protocol, headers.get("X-Forwarded-Proto", "").strip().lower())
        self._inner = self._guard.pass_on(self._server, self._connection, secure=secure)
        return self._inner.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Any:
        return self._inner.data_received(chunk) if self._inner is not None else None

    def finish(self) -> None:
        if self._inner is not None:
            self._inner.finish()
            return
        body = (self._refusal + "\n").encode("utf-8", "replace")
        headers = HTTPHeaders({"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))})
        _complete(headers, secure=False)
        self._connection.write_headers(ResponseStartLine("HTTP/1.1", 403, "Forbidden"), headers, body)
        self._connection.finish()

    def on_connection_close(self) -> None:
        if self._inner is not None:
            self._inner.on_connection_close()


class _Response:
    """A Tornado connection that completes the headers of its response."""

    def __init__(self, connection: Any, secure: bool) -> None:
        self._connection, self._secure = connection, secure

    def write_headers(self, start_line: Any, headers: HTTPHeaders, chunk: bytes | None = None) -> Any:
        _complete(headers, secure=self._secure)
        return self._connection.write_headers(start_line, headers, chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _complete(headers: HTTPHeaders, *, secure: bool) -> None:
    for name in [name for name in headers if name.lower().startswith("access-control-")]:
        del headers[name]  # Bokeh lets pages of any site read /autoload.js, which contains a session token
    for name, value in HEADERS.items():
        headers[name] = value
    cookies = headers.get_list("Set-Cookie")
    if cookies:
        del headers["Set-Cookie"]
        for cookie in cookies:
            headers.add("Set-Cookie", _guarded(cookie, secure=secure))


def _guarded(cookie: str, *, secure: bool) -> str:
    """Return a ``Set-Cookie`` header that scripts cannot read and requests from other sites do not carry.

    ``Lax``, not ``Strict``: links from a chat must open the page, not the sign-in, and OAuth providers redirect back.
    """
    given = {part.strip().partition("=")[0].lower() for part in cookie.split(";")[1:]}
    wanted: Iterable[str] = ["HttpOnly", "SameSite=Lax", *(["Secure"] if secure else [])]
    return "; ".join([cookie, *(part for part in wanted if part.partition("=")[0].lower() not in given)])


def _local(connection: Any) -> str:
    try:
        return str(connection.stream.socket.getsockname()[0])
    except (AttributeError, OSError, IndexError):  # closed in the meantime
        return ""
