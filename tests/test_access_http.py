"""Sign-in, hosts, origins and headers as a browser meets them: over HTTP, with its cookies, without a browser."""

from __future__ import annotations

import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from http.cookiejar import Cookie, CookieJar
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import pytest
from serving import serving

from workbench.app.access import PASSWORD, TRIES

WORD = "right password"
LINK = "?ckpt=run%2Fstep-4&q=a%26b&tab=tensors"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setenv(PASSWORD, WORD)
    monkeypatch.setattr("workbench.app.access.WAIT", 0)


@pytest.fixture(params=["", "wb", "a/b"], ids=["no prefix", "wb", "a/b"])
def base(request, tmp_path):
    with serving(tmp_path, auth="basic", prefix=request.param) as url:
        yield url


def browser() -> tuple[OpenerDirector, CookieJar]:
    jar = CookieJar()
    return build_opener(HTTPCookieProcessor(jar)), jar


def visit(client: OpenerDirector, url: str) -> str:
    """The address that it leads to."""
    with client.open(url) as answer:
        return str(answer.url)


def sign_in(client: OpenerDirector, base: str, word: str) -> tuple[int, str]:
    """Status and address of the page that the form of the login page leads to."""
    form = urlencode({"username": "workbench", "password": word}).encode()
    try:
        with client.open(base + "login", form) as answer:
            return answer.status, answer.url
    except HTTPError as error:  # it holds a socket, and its traceback would keep that
        error.close()
        return error.code, error.url


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_link_is_still_known_after_a_wrong_password(base, wrong):
    client, _ = browser()
    assert "/login?next=" in visit(client, base + LINK)
    for _ in range(wrong):
        status, url = sign_in(client, base, "wrong password")
        assert status == 200 and url.startswith(base + "login?error=")
    assert sign_in(client, base, WORD) == (200, base + LINK)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_login_without_a_link_ends_at_the_first_page(base, wrong):
    client, _ = browser()
    visit(client, base + "login")
    for _ in range(wrong):
        sign_in(client, base, "wrong password")
    assert sign_in(client, base, WORD) == (200, base)
    stranger, _ = browser()  # who was never shown the form
    assert sign_in(stranger, base, WORD) == (200, base)


EVIL_LINKS = [
    "//evil.example/",
    "https://evil.example/",
    "/\\evil.example",
    "///evil.example/",
    "/%09/evil.example",
    "/%5cevil.example",
    "/%2fevil.example",
    "evil.example",
]


@pytest.mark.parametrize("evil", EVIL_LINKS)
def test_no_login_leads_to_another_host(base, evil):
    for word in (WORD, "wrong password"):
        client, jar = browser()
        visit(client, base + "login")
        (cookie,) = [one for one in jar if one.name == "next_url"]
        assert isinstance(cookie, Cookie)
        cookie.value = evil
        assert sign_in(client, base, word) == (400, base + "login")


@pytest.mark.parametrize(
    "options, good",
    [
        ({"address": "0.0.0.0", "insecure": True}, "localhost:{port}"),
        ({"origins": ["wb.example.org"]}, "localhost:{port}"),
        ({"origins": ["wb.example.org"]}, "wb.example.org"),
        ({}, "localhost:{port}"),
    ],
)
def test_a_page_may_talk_to_a_server_on_whatever_port_was_free(tmp_path, options, good):
    with serving(tmp_path, **options) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        assert _talks(port, "http://" + good.format(port=port))
        assert not _talks(port, "http://evil.example")


@pytest.mark.parametrize("evil", [*EVIL_LINKS, "/\t/evil.example", "\t//evil.example"])
def test_no_link_to_the_sign_in_leads_to_another_host(base, evil):
    assert _ask(base, f"login?next={quote(evil, safe='')}")[0] == 400


@pytest.mark.parametrize("evil", [*EVIL_LINKS, "/\t/evil.example"])
def test_no_link_to_a_provider_comes_back_to_another_host(tmp_path, monkeypatch, evil):
    for name in ("PANEL_OAUTH_KEY", "PANEL_OAUTH_SECRET"):
        monkeypatch.setenv(name, "x")
    import panel as pn

    monkeypatch.setattr(pn.config, "_oauth_provider", None)
    with serving(tmp_path, auth="github", users=["ann"]) as url:
        assert _ask(url, f"login?next={quote(evil, safe='')}")[0] == 400
        status, headers, _ = _ask(url, "login?next=%2F%3Fckpt%3Da")
        assert status == 302 and urlsplit(headers["Location"]).netloc == "github.com"
        assert headers["Set-Cookie"].count("SameSite=Lax") == headers["Set-Cookie"].count("panel-oauth-state=") == 1


def test_several_wrong_passwords_lock_a_client_out_even_with_the_right_one(base):
    form = {"username": "workbench", "password": "wrong password"}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: _ask(base, "login", form=form), range(4 * TRIES)))
    assert sorted(status for status, *_ in found) == [302] * TRIES + [429] * (3 * TRIES)
    status, headers, body = _ask(base, "login", form={**form, "password": WORD})
    assert status == 429 and "Set-Cookie" not in headers and 0 < int(headers["Retry-After"]) <= 60
    assert re.search(r"Too many wrong passwords. Try again in \d+ seconds", body)


def test_clients_of_a_proxy_are_locked_out_one_by_one_and_forged_addresses_all_together(base, monkeypatch):
    monkeypatch.setattr("workbench.app.access.CROWD", 2 * TRIES)
    wrong, right = ({"username": "workbench", "password": word} for word in ("wrong password", WORD))

    def through(client: str, form: dict[str, str]) -> int:
        # What a client writes into the header itself stands before what its proxy saw.
        return _ask(base, "login", form=form, headers={"X-Forwarded-For": f"1.1.1.1, {client}"})[0]

    assert [through("192.0.2.1", wrong) for _ in range(TRIES + 1)] == [302] * TRIES + [429]
    assert through("192.0.2.1", right) == 429 and through("192.0.2.2", right) == 302
    assert [through(f"192.0.2.{n}", wrong) for n in range(10, 10 + 2 * TRIES)] == [302] * (2 * TRIES)
    assert through("192.0.2.99", right) == 429


def test_the_sign_in_shows_no_words_of_a_stranger(base):
    assert "call" not in _ask(base, "login?error=call+0800")[2]


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://{host}"}, 302),
        ({"Origin": "http://{host}", "Sec-Fetch-Site": "same-origin"}, 302),
        ({}, 302),
    ],
)
def test_only_our_own_form_signs_in(base, headers, status):
    headers = {name: value.format(host=urlsplit(base).netloc) for name, value in headers.items()}
    found = _ask(base, "login", form={"username": "workbench", "password": WORD}, headers=headers)
    assert found[0] == status and ("user=" in found[1].get("Set-Cookie", "")) == (status == 302)


def test_cookies_stay_on_this_site_and_with_tls_in_it(base):
    form = {"username": "workbench", "password": WORD}
    for asked, headers in (("login", {}), ("logout", {}), ("login", {"X-Forwarded-Proto": "https"})):
        for sent in (None, form) if asked == "login" else (None,):
            cookies = _ask(base, asked, form=sent, headers=headers)[1]["Set-Cookie"].split("\n")
            for cookie in cookies:
                assert "; SameSite=Lax" in cookie and "; HttpOnly" in cookie, cookie
                assert ("; Secure" in cookie) == bool(headers), cookie


GOOD_HOSTS = ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "localhost", "localhost:8080"]
EVIL_HOSTS = [
    "evil.example:{port}",
    "evil.example",
    "127.0.0.1.evil.example:{port}",
    "localhost.evil.example",
    "evil.example@127.0.0.1:{port}",
    "192.0.2.1:{port}",
    "localhost:{port},evil.example",
    "a b",
    "[::1",
]


@pytest.mark.parametrize(
    "path", ["", "liveness", "autoload.js?bokeh-autoload-element=x", "static/js/bokeh.min.js", "x"]
)
def test_a_host_that_is_not_known_is_answered_nothing(tmp_path, path):
    with serving(tmp_path) as url:
        port = urlsplit(url).port
        for host in EVIL_HOSTS:
            status, _, body = _ask(url, path, headers={"Host": host.format(port=port)})
            assert status in (400, 403) and len(body) < 400, host
        for host in GOOD_HOSTS:
            assert _ask(url, path, headers={"Host": host.format(port=port)})[0] == (404 if path == "x" else 200), host


def test_the_name_of_another_site_opens_no_websocket_whatever_its_origin(tmp_path):
    """DNS rebinding: a page of evil.example, whose name now means 127.0.0.1."""
    with serving(tmp_path) as url:
        port = urlsplit(url).port
        for host in (host.format(port=port) for host in EVIL_HOSTS):
            assert not _talks(port, f"http://{host}", Host=host), host
            assert not _talks(port, f"http://{host}", Host=host, **{"Sec-Fetch-Site": "same-origin"}), host
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:8080"):  # 8080: ssh -L 8080:127.0.0.1:5006
            assert _talks(port, f"http://{host}", Host=host), host


@pytest.mark.parametrize(
    "options, good",
    [
        ({"origins": ["wb.example.org"]}, ["wb.example.org", "WB.example.org:443", "wb.example.org:8443"]),
        ({"origins": ["wb.example.org:8443"]}, ["wb.example.org:8443", "wb.example.org"]),
        ({"origins": ["*.example.org"], "insecure": True}, ["wb.example.org"]),
        ({"address": "0.0.0.0", "insecure": True}, [socket.gethostname(), "0.0.0.0:{port}"]),
        ({"origins": ["*"], "insecure": True}, ["evil.example:{port}"]),
    ],
)
def test_hosts_of_the_command_line_are_known(tmp_path, options, good):
    with serving(tmp_path, **options) as url:
        port = urlsplit(url).port
        for host in [*good, "localhost", "127.0.0.1"]:
            assert _ask(url, "liveness", headers={"Host": host.format(port=port)})[0] == 200, host
        if "*" not in options.get("origins", ()):
            status, _, body = _ask(url, "liveness", headers={"Host": "evil.example"})
            assert status == 403 and "'evil.example'" in body and "--allow-websocket-origin" in body


@pytest.mark.parametrize(
    "path",
    [
        "",
        "login",
        "logout",
        "liveness",
        "static/js/bokeh.min.js",
        "x",
        "metadata",
        "ws",
        "autoload.js?bokeh-autoload-element=x",
    ],
)
def test_every_response_keeps_other_sites_out(base, path):
    _, headers, _ = _ask(base, path, headers={"Origin": "http://evil.example", "Cookie": "a=b"})
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "SAMEORIGIN"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'self'"
    # "blob:" and "data:" are what the page itself made; no host, no scheme of a network, no wildcard.
    allowed = {"'self'", "'none'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:"}
    assert {source for sources in policy.values() for source in sources.split()} <= allowed
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_no_address_imports_a_module_or_is_an_error_of_the_server(base, tmp_path, monkeypatch):
    (tmp_path / "planted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for path in (
        "components/planted_module/A/_css/x",
        "components/planted%5fmodule/A/_css/x",
        "components/planted_module",
        "components//A/_css/x",
        "components/../../etc/passwd",
        "components/%2e%2e/%2e%2e/etc/passwd",
        "static/js/bokeh.min.js%00",
    ):
        status, _, body = _ask(base, path)
        assert status == 403 and "planted" not in body, path
    assert "planted_module" not in sys.modules


def _ask(
    base: str, path: str, *, form: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers (those of one name, a line each) and body; no redirect is followed."""
    where = urlsplit(base)
    sent = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    body = urlencode(form) if form is not None else None
    with closing(HTTPConnection("127.0.0.1", where.port, timeout=20)) as line:
        line.request("POST" if body is not None else "GET", where.path + path, body, {**sent, **(headers or {})})
        reply = line.getresponse()
        names = {name for name, _ in reply.getheaders()}
        found = {name: "\n".join(reply.headers.get_all(name) or []) for name in names}
        return reply.status, found, reply.read().decode("utf-8", "replace")


def _talks(port: int, origin: str, **headers: str) -> bool:
    """Whether a page from there may open a websocket: the answer to its handshake."""
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Origin": origin,
        **headers,
    }
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as line:
        line.request("GET", "/ws", headers={**asked, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
        status = line.getresponse().status
    assert status in (101, 403) or (status == 400 and "Host" in headers)
    return status == 101
